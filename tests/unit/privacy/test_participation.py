"""How often each client is asked is known before a run, by the code that draws the cohorts; noise is calibrated for that, and no more."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
from loopback import ENTROPY, Loopback
from small_runs import configured

from cflpriv.attacks.dp.dp_run import releases
from cflpriv.contract.operations import Sampling
from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.config.config import Config
from cflpriv.experiments.run.run import prepare
from cflpriv.federation import cohort
from cflpriv.federation.client_ledger import ClientLedger
from cflpriv.federation.cohort import schedule
from cflpriv.federation.server import BudgetsSpent, FederationServer
from cflpriv.federation.transport import OverBytes
from cflpriv.privacy.client_level import client_noise
from cflpriv.privacy.participation import of_participations
from cflpriv.privacy.settings import Privacy, Releases
from cflpriv.protocols.accounting import calibrate
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import TooFewClients
from cflpriv.protocols.events import GaussianEvent, SampledGaussianEvent
from cflpriv.protocols.ledger import Ledger, PrivacyBudget

SCENE = scenes.population(groups=2, clients_per_group=20)
BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 40}, "model": {"name": "linear"}, "algorithm": {"name": "fedavg"}, "run": {"evaluate_every": 1000},
    "training": {"rounds": 20, "batch_size": 5, "lr": 0.05, "weights": "equal", "participation": 0.1},
    "privacy": {"unit": "client", "epsilon": 3.0, "delta": 1e-3, "samples": 20, "sketch_dim": 0},
}  # fmt: skip
sampled_config = partial(configured, BASE)


@pytest.mark.parametrize("mode", ["global", "per_cluster", "fixed_cohorts"])
def test_the_schedule_is_what_a_federation_draws(mode: Any) -> None:
    sampling, protection = Sampling(mode, 0.15), Protection(min_cohort=4)
    fed = scenes.federation(SCENE, protection, sampling=sampling, seed=7)
    planned = schedule(sampling, fed.clients, protection.smallest_group, 7, 12)
    for number in range(12):
        fed.begin_round(number)
        drawn = fed.cohort(dict.fromkeys(fed.clients, 0))
        assert drawn == tuple(client for client, rounds in planned.rounds_of.items() if number in rounds)
    assert sum(planned.counts.values()) == 12 * 6 if mode != "fixed_cohorts" else planned.most == math.ceil(12 / 6)


@pytest.mark.parametrize(("clients", "share", "smallest", "rounds"), [(100, 0.1, 1, 50), (97, 0.1, 3, 31), (40, 0.3, 15, 9), (5, 1, 1, 4)])
def test_fixed_cohorts_come_back_after_as_many_rounds_as_there_are_cohorts(clients: int, share: float, smallest: int, rounds: int) -> None:
    cohorts = clients // max(smallest, round(share * clients))
    planned = schedule(Sampling("fixed_cohorts", share), range(clients), smallest, 3, rounds)
    assert planned.separation == cohorts
    assert planned.most == math.ceil(rounds / cohorts)
    assert all(set(np.diff(numbers)) <= {cohorts} for numbers in planned.rounds_of.values())


def test_a_schedule_of_little_or_nothing() -> None:
    assert schedule(Sampling("global", 0.1), range(10), 1, 0, 0).most == 0
    assert schedule(Sampling(), (), 1, 0, 0).most == 0
    assert schedule(Sampling("fixed_cohorts", 0.1), range(100), 1, 0, 4).separation == 4, "nobody is asked twice"
    assert schedule(Sampling("global", 0.5), range(4), 1, 0, 30).separation == 1


@pytest.mark.parametrize("mode", ["per_cluster", "fixed_cohorts"])
def test_groups_that_are_found_in_the_run_are_counted_in_every_round(mode: Any) -> None:
    assert schedule(Sampling(mode, 0.1), range(50), 1, 0, 20, labels=True).most == 20
    assert schedule(Sampling("global", 0.1), range(50), 1, 0, 20, labels=True).most < 10
    made = sampled_config("pacfl", "sample", algorithm={"k": 2}, training={"sampling": mode})
    assert made.schedule(range(40)).most == 20
    assert sampled_config("pacfl", "sample", algorithm={"k": 2}).schedule(range(40)).most < 10


def test_one_hundred_clients_at_a_tenth_pay_for_the_rounds_that_they_are_asked_in() -> None:
    made = parse_config(
        {
            "data": {"clients": 100}, "model": {"name": "linear"}, "algorithm": {"name": "fedavg"},
            "training": {"rounds": 50, "weights": "equal", "participation": 0.1},
            "privacy": {"unit": "client", "epsilon": 4.0, "delta": 1e-5},
        }
    )  # fmt: skip
    scene = scenes.population(groups=1, clients_per_group=100)
    clipped: Any = prepare(made, population=scene).federation._sums
    real = made.schedule(range(100)).most
    needed, before = (calibrate(lambda z, n=n: [GaussianEvent(z, 1.0, "add_remove", "client")] * n, 4.0, 1e-5) for n in (real, 50))  # type: ignore[misc]
    used = clipped._parts.clipped.multiplier
    assert 9 <= real <= 13
    assert needed * 0.999 <= used <= needed * 1.05
    assert before / used > 1.9


LIA = {"algorithm": {"warm_up": 3, "local_epochs": 2}, "privacy": {"relation": "replace_one"}}
SECURE = {"sum": "secagg", "min_cohort": 6, "secagg_mode": "passive"}
CASES: list[Any] = [
    ("fedavg", "client", {}),
    ("fedavg", "client", {"training": {"sampling": "fixed_cohorts"}}),
    pytest.param("fedavg", "client", {"training": {"dropout": 0.2}}, marks=pytest.mark.slow),
    ("fedavg", "client", {"training": {"dropout": 0.2, "participation": 0.25}, "protection": SECURE}),
    pytest.param(
        "fedavg",
        "sample",
        {"training": {"dropout": 0.2, "participation": 0.25}, "protection": SECURE, "privacy": {"noise": "shared"}},
        marks=pytest.mark.slow,
    ),
    pytest.param("oracle", "client", {}, marks=pytest.mark.slow),
    ("fedavg", "sample", {}),
    pytest.param("stocfl", "sample", {}, marks=pytest.mark.slow),
    pytest.param("ifca", "sample", {"algorithm": {"k": 2}}, marks=pytest.mark.slow),
    pytest.param("pacfl", "sample", {"algorithm": {"k": 2}, "data": {"newcomers": 4}}, marks=pytest.mark.slow),
    pytest.param("pfedlia", "sample", LIA, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "unit", "changes"), CASES)
def test_the_most_frequent_client_spends_its_budget_and_the_run_never_stops_early(
    name: str, unit: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    made = sampled_config(name, unit, **changes)
    summary = run_experiment(made, tmp_path / "run", population=SCENE)
    assert summary["stopped"] is None
    assert summary["rounds"] == 20
    ledger = Ledger.open(tmp_path / "run" / "ledger.json")
    spent = {client: ledger.spent(client) for client in ledger.clients}
    assert max(spent.values()) <= 3.0
    if name != "pfedlia":  # its clustering is one round of all; who is asked most often may be asked in that one, too
        assert max(spent.values()) > 0.95 * 3.0
    most = made.schedule([client for client in range(40) if not made.data.newcomers or client < 36]).most
    assert most <= 10


@pytest.mark.slow
def test_a_run_resumed_between_rounds_goes_on_to_the_end(tmp_path: Path) -> None:
    made = sampled_config("fedavg", "client", training={"rounds": 12})
    whole = run_experiment(made, tmp_path / "whole", population=SCENE)

    class Cut(Exception):
        pass

    def stop(row: Any) -> None:
        if row["round"] == 5:
            raise Cut

    with pytest.raises(Cut):
        run_experiment(made, tmp_path / "cut", population=SCENE, tick=stop)
    resumed = run_experiment(made, tmp_path / "cut", population=SCENE, resume=True)
    assert (resumed["stopped"], resumed["rounds"]) == (None, 12)
    assert resumed["epsilon"] == pytest.approx(whole["epsilon"])


def test_releases_of_some_rounds() -> None:
    releases = Releases(signatures=1, trainings=40, choices=20, extra_epochs=3)
    assert of_participations(releases, 20, 20) == releases
    assert of_participations(releases, 20, 5) == Releases(signatures=1, trainings=10, choices=5, extra_epochs=3)
    assert of_participations(Releases(trainings=19), 20, 5).trainings == 5, "one round less than all is still one a round"
    assert of_participations(Releases(trainings=19), 20, 20).trainings == 19
    assert of_participations(Releases(trainings=0), 0, 0) == Releases()
    with pytest.raises(ValueError, match="most: 6"):
        of_participations(releases, 5, 6)


def test_an_algorithm_that_declares_no_cohorts_is_counted_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from cflpriv.algorithms import ALGORITHMS

    made = sampled_config()
    spec = replace(made.spec, cohorts="")
    monkeypatch.setattr(Config, "spec", property(lambda self: spec))
    assert made.schedule(range(40)).most == 20
    assert ALGORITHMS["fedavg"].cohorts == "one"
    with pytest.raises(InputError):
        sampled_config(training={"participation": 0.0})


@pytest.mark.slow
def test_an_audit_looks_at_the_noise_that_the_run_has(tmp_path: Path) -> None:
    """Noise that is calibrated for the rounds in which a client is asked, not for all."""
    scene = scenes.population(groups=1, clients_per_group=20)
    made = parse_config({
        "data": {"clients": 20}, "model": {"name": "linear"}, "algorithm": {"name": "fedavg"},
        "training": {"rounds": 10, "batch_size": 5, "lr": 0.1, "weights": "equal", "participation": 0.2},
        "privacy": {"unit": "sample", "epsilon": 3.0, "delta": 1e-3, "samples": 20, "sketch_dim": 0},
    })  # fmt: skip
    run = prepare(made, population=scene)
    assert run.run_ledger is not None
    assert run.run_ledger.sample_ledger is not None
    _, event = releases(made, scene)["training_epsilon"]
    assert isinstance(event, SampledGaussianEvent)
    assert event.noise_multiplier == run.run_ledger.sample_ledger.noise.training
    everywhere = made.noise()
    assert everywhere is not None
    assert event.noise_multiplier < 0.8 * everywhere.training


def test_nobody_is_drawn_where_everybody_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw takes longer than all else that a server does for a client; who takes part does not depend on it then."""
    monkeypatch.setattr(cohort, "stream", None)
    assert cohort._sample((3, 1, 2), 3, "all of them", 0, 0) == {1, 2, 3}


# --- deployments ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "fixed_cohorts"])
def test_nobody_takes_the_place_of_an_absent_client_where_cohorts_are_drawn_from_all(mode: Any) -> None:
    scene, sampling = scenes.population(groups=1, clients_per_group=12), Sampling(mode, 0.25)
    transport = Loopback(scene, Protection())
    fed = FederationServer(OverBytes(transport), sampling=sampling, seed=7, entropy=ENTROPY, drawn_from=range(12))
    planned = schedule(sampling, range(12), 1, 7, 12)
    absent = {3, 5}
    fed.enrol()
    fed.lose(sorted(absent))
    transport.dead |= absent
    missed = 0
    for number in range(12):
        fed.begin_round(number)
        drawn = {client for client, rounds in planned.rounds_of.items() if number in rounds}
        missed += len(drawn & absent)
        assert set(fed.cohort(dict.fromkeys(fed.clients, 0))) == drawn - absent
    assert missed, "absent clients were drawn"
    transport.dead |= set(range(12))
    fed.lose(range(12))
    with pytest.raises(TooFewClients):
        fed.cohort()


@pytest.mark.parametrize("protection", [Protection(), Protection(sum="secagg", min_cohort=4, secagg_mode="passive")])
def test_a_client_refuses_over_messages_to_take_part_more_often_than_was_priced(protection: Protection) -> None:
    """Whatever the server's own ledger allows; a client's is in its store, where a new process finds it."""
    scene, privacy, most = scenes.population(groups=1, clients_per_group=6), Privacy("client", "add_remove", 2.0, 1e-3, clip_norm=0.5), 3
    careless = Ledger(PrivacyBudget(1e6, 1e-3, "add_remove", "client"))
    clipped, _ = client_noise(privacy, Releases(trainings=most), protection, careless, public_entropy("noise"))
    transport, task = Loopback(scene, protection), scenes.training(scene)
    transport.privacy = privacy
    roster = transport.roster if protection.secure else None
    fed = FederationServer(OverBytes(transport), protection=protection, roster=roster, entropy=ENTROPY, seed=1, clipped=clipped)
    fed.enrol()
    for number in range(most):
        fed.begin_round(number)
        (mean,) = fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])
        assert mean is not None
        assert mean.count == 6
    assert not fed.refusals
    fed.begin_round(most)
    with pytest.raises(
        BudgetsSpent, match=r"^mean of Train: all 6 clients .* own privacy budgets allow no more \(clients 0, 1, 2, 3, 4, 5\)$"
    ):
        fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])
    assert {(client, word) for client, _, word in fed.refusals} == {(client, "over-budget") for client in range(6)}
    assert careless.spent(0) > 2.0
    assert all(ClientLedger(privacy, client, transport.stores[client]).spent() <= 2.0 for client in range(6))
