"""Sample-level privacy with the noise of training added once per secure sum: what leaves, with how much noise, and who refuses what.

Statistical tests run on fixed public entropy and reject at p < 1e-6.
"""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
from scenes import task_input
from scipy import stats
from small_runs import configured

from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.handles import OwnAddend, Shared
from cflpriv.contract.protection import Protection
from cflpriv.engine import Engine
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment
from cflpriv.federation import messages as m
from cflpriv.federation.server import FederationServer
from cflpriv.privacy.receipts import PrivacyLedger
from cflpriv.privacy.settings import Noise, Privacy, plan_noise
from cflpriv.protocols.accounting import epsilon_of
from cflpriv.protocols.entropy import derive, public_entropy, uniforms
from cflpriv.protocols.errors import TooFewClients
from cflpriv.protocols.events import SampledGaussianEvent, event_from
from cflpriv.protocols.ledger import Ledger, PrivacyBudget
from cflpriv.tasks.joining import Join
from cflpriv.tasks.training import Train
from cflpriv.types import ClientData, Population

ALPHA = 1e-6
NOISE = Noise("add_remove", 1.5, 2.0, 0.5, 1.0, 0.25, 20, 0, 4.0, 0, shares=3)
SECURE = Protection(sum="secagg", min_cohort=4, secagg_mode="passive")


def private_federation(
    scene: Population, noise: Noise = NOISE, label: str = "noise", protection: Protection = SECURE, demand: str = "shared", **options: Any
) -> tuple[FederationServer, Ledger]:
    ledger = Ledger(PrivacyBudget(50.0, 1e-5, noise.relation, "sample"))
    own: dict[str, Any] = {"samples": noise.samples, "sketch_dim": noise.sketch_dim, "noise": demand}
    privacy = Privacy("sample", noise.relation, 50.0, 1e-5, **own) if demand else Privacy()
    options |= {
        "privacy_ledger": PrivacyLedger(noise, ledger),
        "privacy": privacy,
        "entropy": lambda party: public_entropy(f"{label} {party}"),
    }
    return scenes.federation(scene, protection, **options), ledger


def with_noise(task: Train, **changes: Any) -> Train:
    made = task.private(NOISE)
    return replace(made, **changes)


# --- the task -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "prox": 0.3}, {"momentum": 0.9}])
def test_a_training_is_one_step_without_noise(extra: dict[str, float]) -> None:
    """−lr (Σ clipped gradients / (q·public samples) + weight decay + the anchor's pull), of the secret's Poisson batch."""
    scene = scenes.population(clients_per_group=1)
    task = with_noise(scenes.training(scene, lr=0.3, **extra))
    start, anchor = task.model.init(0), task.model.init(1)
    params = {"model": start} | ({"anchor": anchor} if "prox" in extra else {})
    one = task_input(scene.clients[0], params, bytes(range(32)))
    (batch,) = task.batches(one)
    coins = uniforms(derive(one.secret, "batches"), len(one.data.y_train))
    assert np.array_equal(batch, np.flatnonzero(coins < 0.25))
    plain = Train(task.model, batch_size=0, lr=1.0)
    summed = np.zeros(len(start))
    for i in batch:
        alone = replace(one.data, x_train=one.data.x_train[i : i + 1], y_train=one.data.y_train[i : i + 1])
        gradient = -np.asarray(plain.run(task_input(alone, {"model": start}, one.secret))["update"], np.float64)
        summed += gradient / max(1.0, float(np.linalg.norm(gradient)))
    public = extra.get("weight_decay", 0.0) * start + extra.get("prox", 0.0) * (start - anchor)
    expected = -0.3 * (summed / (0.25 * 20) + public)
    for found in (task.run(one)["update"], Engine().run(task, [one, one])[1]["update"]):
        assert np.allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_one_sample_moves_the_update_by_no_more_than_its_event_says(relation: Any) -> None:
    scene = scenes.population(clients_per_group=1)
    data = scene.clients[0]
    task = with_noise(scenes.training(scene, lr=0.5), sampling_rate=1.0, public_samples=7)
    start = task.model.init(0)
    event = task.events["steps"]
    assert isinstance(event, SampledGaussianEvent)
    assert (event.steps, event.shares, event.norm_bound) == (1, 3, task.moves)
    loud = replace(data, x_train=data.x_train * 50, y_train=data.y_train)  # gradients beyond the clip norm

    def update(keep: list[int], of: ClientData) -> Any:
        less = replace(of, x_train=of.x_train[keep], y_train=of.y_train[keep])
        return np.asarray(task.run(task_input(less, {"model": start}, bytes(32)))["update"], np.float64)

    most = 0.0
    everybody = list(range(len(data.y_train)))
    for i in range(8):
        others = [j for j in everybody if j != i]
        other = update(others, loud) if relation == "add_remove" else update([*others, (i + 1) % len(everybody)], loud)
        most = max(most, float(np.linalg.norm(update(everybody, loud) - other)))
    times = 1 if relation == "add_remove" else 2
    assert most <= times * event.norm_bound * (1 + 1e-5)
    assert most > 0.95 * event.norm_bound, "and the bound is reached"


@pytest.mark.parametrize("way", ["auto", "torch", "sequential"])
def test_large_parameters_do_not_round_an_update_further_than_one_sample_moves_it(way: Any) -> None:
    """A server that lies chooses them: parameters of 2²⁰ are multiples of ⅛, their differences too, and a clipped gradient has norm 1."""
    rng = np.random.default_rng(0)
    x, y = rng.random((61, 1, 28, 28)).astype(np.float32), np.arange(61) % 10
    task = with_noise(Train(Model("linear", (1, 28, 28), 10), lr=0.1), sampling_rate=1.0, public_samples=60)
    start = np.full(task.model.dimension, 2.0**20, np.float32)  # all classes alike, so gradients are as usual

    def update(count: int) -> Any:
        one = task_input(ClientData(0, x[:count], y[:count], x[:1], y[:1]), {"model": start}, bytes(32))
        return np.asarray(Engine(way).run(task, [one, one])[0]["update"], np.float64)

    assert float(np.linalg.norm(update(61) - update(60))) == pytest.approx(task.moves, rel=1e-4)


def test_a_public_part_that_would_round_it_is_refused_whatever_the_data_are() -> None:
    scene = scenes.population(clients_per_group=1)
    task = with_noise(scenes.training(scene, lr=0.3, weight_decay=1.0))
    task = replace(task, model=replace(task.model, dtype="float32"))
    one = task_input(scene.clients[0], {"model": np.full(task.model.dimension, 2.0**20, np.float32)}, bytes(32))
    with pytest.raises(InputError, match="float32 rounding of weight decay and pull takes"):
        task.run(one)
    assert np.isfinite(replace(task, weight_decay=1e-4).run(one)["update"]).all()


def test_what_a_client_keeps_is_not_covered() -> None:
    task = with_noise(scenes.training(scenes.population()))
    assert set(task.covers) == {"update"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"optimizer": "adam"}, "training.optimizer"), ({"maml_lr": 0.1}, "algorithm.alpha"), ({"shares": -1}, "training.shares")],
)
def test_trainings_that_are_no_plain_step_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        with_noise(scenes.training(scenes.population()), **changes)


# --- the sum ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["passive", "active", "helped"])
def test_a_secure_sum_has_the_noise_of_its_shares_and_every_sum_is_paid_for(mode: Any) -> None:
    """Or that of the four sets of helpers."""
    protection = replace(SECURE, sum="one_message", secagg_mode="active") if mode == "helped" else replace(SECURE, secagg_mode=mode)
    shares = 3 if mode != "helped" else protection.noise_shares
    times = 6 / shares + protection.helper_sets
    scene = scenes.population(groups=1, clients_per_group=6)
    task = scenes.training(scene)
    start = {"model": task.model.init(0)}
    errors, event = [], None
    for i in range(1 if mode == "active" else 6):
        fed, ledger = private_federation(scene, replace(NOISE, shares=shares), label=str(i), protection=protection)
        fed.begin_round(0)
        held = fed.compute(task, start)["update"]
        assert ledger.charges == [], "computing releases nothing"
        (mean,) = fed.mean(held)
        assert mean is not None
        assert mean.count == 6
        (charge,) = ledger.charges
        (event,) = charge.events
        assert isinstance(event, SampledGaussianEvent)
        fed.begin_round(1)
        (again,) = fed.mean(held)
        assert again is not None
        assert len(ledger.charges) == 2, "new noise on the same value is a new release"
        assert ledger.charges[1].events == (replace(event, sampling_rate=1.0),), "of the same batch, which amplifies no second time"
        errors.append((mean.parts["update"].value() - again.parts["update"].value()) * 6 / np.sqrt(2))
    assert isinstance(event, SampledGaussianEvent)
    assert (event.noise_multiplier, event.sampling_rate, event.steps, event.shares) == (1.5, 0.25, 1, shares)
    assert event.norm_bound == pytest.approx(task.lr / (0.25 * 20))
    error = np.concatenate(errors) / (event.noise_multiplier * event.norm_bound)  # in what is priced; six shares are there, three counted
    total = float(np.square(error).sum()) / (times * (1 + 1 / 768))
    assert ALPHA < stats.chi2(error.size).sf(total) < 1 - ALPHA
    assert mode != "passive" or stats.chi2(error.size).sf(total * 2) < ALPHA, "half of the variance would be noticed"


def test_sums_of_one_batch_cost_what_one_sum_with_less_noise_does() -> None:
    """A server that lies has one value summed nine times: the mean of these has a third of the noise on one Poisson batch."""
    scene = scenes.population(groups=1, clients_per_group=6)
    fed, ledger = private_federation(scene)
    task = scenes.training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    for number in range(9):
        fed.begin_round(number)
        assert fed.mean(held)[0] is not None
    one = SampledGaussianEvent(1.5 / 3, 0.25, 1, 1.0, "add_remove")
    own = scenes.eye(fed).client(0)._spending
    assert ledger.spent(0) == pytest.approx(own.spent())
    assert ledger.spent(0) > epsilon_of([one], 1e-5) > epsilon_of([replace(one, noise_multiplier=1.5)] * 9, 1e-5)


@pytest.mark.parametrize("operation", ["gram", "gather", "relay"])
def test_no_other_operation_releases_it(operation: str) -> None:
    scene = scenes.population(groups=1, clients_per_group=6)
    fed, ledger = private_federation(scene)
    task = scenes.training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    operations: dict[str, Any] = {"gather": fed.gather, "relay": fed.relay, "gram": lambda one: fed.gram(one, then=lambda view: ({}, {}))}
    with pytest.raises(InputError, match=r"carries no noise of its own|would be compared in the clear"):
        operations[operation](held)
    assert ledger.charges == []


def test_sums_in_the_clear_are_refused() -> None:
    scene = scenes.population(groups=1, clients_per_group=6)
    task = scenes.training(scene)
    fed, ledger = private_federation(scene, protection=Protection())
    fed.begin_round(0)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    with pytest.raises(InputError, match="it leaves in secure sums only"):
        fed.mean(held)
    assert ledger.charges == []


def test_what_is_computed_from_it_is_not_covered() -> None:
    scene = scenes.population(groups=1, clients_per_group=6)
    task = scenes.training(scene)
    fed, ledger = private_federation(scene, demand="")
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    second = fed.compute(task, {"model": Shared(task.model.init(0), own=(OwnAddend(held),))})["update"]
    with pytest.raises(InputError, match="made of samples without noise"):
        fed.mean(second)
    assert ledger.charges == []


def test_values_beside_each_other_keep_their_noise_and_one_value_twice_does_not() -> None:
    scene = scenes.population(groups=1, clients_per_group=6)
    task = scenes.training(scene)
    fed, ledger = private_federation(scene)
    fed.begin_round(0)
    first, second = (fed.compute(task, {"model": task.model.init(i)})["update"] for i in range(2))
    (mean,) = fed.mean(fed.compute(Join(("a", "b")), {"a": first, "b": second}))
    assert mean is not None
    assert len(ledger.charges[0].events) == 2
    with pytest.raises(InputError, match=r"'forbidden'.*given what was computed without noise"):
        fed.compute(Join(("a", "b")), {"a": first, "b": first})


def test_clients_refuse_noise_that_others_add_unless_their_settings_say_so() -> None:
    scene = scenes.population(groups=1, clients_per_group=6)
    task = scenes.training(scene)
    fed, _ = private_federation(scene, demand="per_client")
    with pytest.raises(InputError, match="'forbidden'"):
        fed.compute(task, {"model": task.model.init(0)})


@pytest.mark.parametrize(
    ("change", "word"),
    [({"deviation": 1e-3}, "forbidden"), ({"survivors": 4}, "forbidden"), ({"clip_norm": 1.0}, "forbidden"), (None, "forbidden")],
)
def test_clients_refuse_less_noise_than_their_price_counts_on(change: dict[str, Any] | None, word: str) -> None:
    from msgspec import structs

    scene = scenes.population(groups=1, clients_per_group=6)
    task = scenes.training(scene)
    fed, _ = private_federation(scene)
    fed.begin_round(0)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    means = fed._sums

    def lying(*said: Any) -> Any:
        step = type(means)._like(means, *said)  # type: ignore[attr-defined]
        assert step.noise is not None
        lie = (
            None
            if change is None
            else structs.replace(step.noise, **{k: v * step.noise.deviation if k == "deviation" else v for k, v in change.items()})
        )
        return structs.replace(step, noise=lie)

    object.__setattr__(means, "_like", lying)
    with pytest.raises((TooFewClients, InputError)):
        fed.mean(held)
    assert {one[2] for one in fed.refusals} <= {word}


def test_clients_add_no_shares_to_sums_that_hide_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are not verified there: a server that lies opens a block of one client, with the one share of its own."""
    scene = scenes.population(groups=1, clients_per_group=6)
    fed, _ = private_federation(scene, protection=replace(SECURE, sum="secagg-oblivious"))
    fed.begin_round(0)
    task = scenes.training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    assert fed.privacy_ledger is not None
    noise = fed.privacy_ledger.inside(held)
    assert noise is not None
    shares, like = m.NoiseShares(noise.noise.deviation, noise.noise.survivors, 0.0, 0.0), fed._sums._like  # type: ignore[attr-defined]
    monkeypatch.setattr(fed, "_noise_inside", lambda held: noise)
    monkeypatch.setattr(fed._sums, "_like", lambda asked, kind, groups: like(asked, kind, groups, shares if kind == "blocks" else None))
    with pytest.raises(InputError, match="'forbidden'"):
        fed.mean(held)


# --- runs ---------------------------------------------------------------------------------------------------------------------------------


BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 8}, "model": {"name": "linear"}, "training": {"rounds": 3, "batch_size": 5, "lr": 0.1, "weights": "equal"},
    "algorithm": {"name": "fedavg"}, "protection": {"gram": ["haar"], "sum": "secagg", "secagg_mode": "passive"},
    "privacy": {"unit": "sample", "noise": "shared", "epsilon": 3.0, "delta": 1e-3, "samples": 20, "sketch_dim": 0},
}  # fmt: skip
shared_noise_config = partial(configured, BASE)

MORE: dict[str, dict[str, Any]] = {"ifca": {"algorithm": {"k": 2}}, "hypcluster": {"algorithm": {"k": 2}}}
SINGLY = {"cfl", "pfedlia", "per_fedavg"}
"""Private algorithms whose updates leave singly, too, or are of more than one step."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:run.insecure_test_entropy")
@pytest.mark.parametrize("transport", ["memory", "bytes"])
@pytest.mark.parametrize("name", [name for name, spec in ALGORITHMS.items() if spec.sample_releases is not None])
def test_every_private_algorithm_runs_or_is_refused_by_name(name: str, transport: str, tmp_path: Path) -> None:
    scene = scenes.population(groups=2, clients_per_group=4)
    if name in SINGLY:
        more = {"privacy": {"relation": "replace_one"}} if name == "pfedlia" else {}
        with pytest.raises(InputError, match=rf"algorithm '{name}' under privacy\.noise = 'shared'|algorithm\.alpha"):
            run_experiment(shared_noise_config(name, **more), tmp_path / "run", population=scene)
        return
    made = shared_noise_config(
        name, **MORE.get(name, {}), run={"transport": transport, "insecure_test_entropy": True}
    )  # what R-DPCFL pays is random
    summary = run_experiment(made, tmp_path / "run", population=scene)
    assert summary["stopped"] is None
    assert summary["rounds"] == summary["rounds_planned"]
    if name == "local":
        return
    assert 2.9 < summary["epsilon"] <= 3.0
    tree = json.loads((tmp_path / "run" / "ledger.json").read_text(encoding="utf-8"))
    spent = {c: [event_from(e) for line in tree["charges"] if c in line["clients"] for e in line["events"]] for c in range(8)}
    assert max(epsilon_of(events, 1e-3) for events in spent.values()) == pytest.approx(summary["epsilon"])
    steps = [event for events in spent.values() for event in events if isinstance(event, SampledGaussianEvent)]
    assert {(one.steps, one.shares) for one in steps} == {(1, 2)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protection": {"sum": "none"}}, r"protection\.sum = 'none' under privacy\.noise = 'shared'"),
        ({"protection": {"sum": "secagg-oblivious"}}, r"protection\.sum = 'secagg-oblivious' under privacy\.noise"),
        ({"protection": {"small_clusters": "local"}}, r"protection\.small_clusters = 'local'"),
        ({"protection": {"robust": "trimmed_mean"}}, r"protection\.robust = 'trimmed_mean'"),
        ({"training": {"epochs": 2}}, r"training\.epochs = 2 under privacy\.noise = 'shared'"),
        ({"training": {"optimizer": "adam"}}, r"training\.optimizer = 'adam'"),
        ({"privacy": {"unit": "client"}}, r"privacy\.noise = 'shared': is for privacy\.unit = 'sample'"),
        ({"privacy": {"noise": "both"}}, r"\[privacy\] noise = 'both'"),
    ],
)
def test_what_does_not_go_together_is_refused_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        shared_noise_config(**changes)


@pytest.mark.slow
def test_the_noise_of_a_sum_is_that_of_one_client_not_of_all() -> None:
    """The gain: with as many members as shares counted, the mean has noise smaller by the root of their number."""
    made = shared_noise_config(protection={"min_cohort": 8})
    shared = made.noise()
    own = plan_noise(made.privacy, made.releases(), epochs=1, batch_size=5, seed=0)
    assert shared is not None
    assert shared.shares == 7
    assert own.training > shared.training, "four steps a round cost more than one"


@pytest.mark.slow
def test_a_sum_that_fails_through_dropouts_does_not_end_a_run(tmp_path: Path) -> None:
    """StoCFL's members of it would be in a second sum of the same batch, which is beyond the budget: they are left out."""
    scene = scenes.population(clients_per_group=5)
    made = shared_noise_config("stocfl", training={"rounds": 4, "dropout": 0.3}, run={"seed": 3})
    summary = run_experiment(made, tmp_path / "run", population=scene)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any(row.get("unchanged_clusters") for row in rows), "a sum failed"
    assert (summary["stopped"], summary["rounds"]) == (None, 4)
    assert summary["epsilon"] == pytest.approx(3.0, rel=2e-3), "and nothing was paid for but what was planned"


def test_an_interrupted_run_goes_on_and_pays_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cflpriv.experiments import advance

    scene = scenes.population()
    done: list[Any] = []

    def dying(simulation: Any) -> Any:
        done.append(advance(simulation))
        if len(done) == 2:
            raise KeyboardInterrupt
        return done[-1]

    monkeypatch.setattr("cflpriv.experiments.run.folder.advance", dying)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(shared_noise_config(), tmp_path / "run", population=scene)
    monkeypatch.setattr("cflpriv.experiments.run.folder.advance", advance)
    summary = run_experiment(shared_noise_config(), tmp_path / "run", population=scene, resume=True)
    tree = json.loads((tmp_path / "run" / "ledger.json").read_text(encoding="utf-8"))
    assert [line["round"] for line in tree["charges"]][:3] == [0, 1, 1]
    assert summary["epsilon"] <= 3.0


@pytest.mark.slow
def test_the_summary_says_what_colluding_members_leave(tmp_path: Path) -> None:
    summary = run_experiment(shared_noise_config(protection={"min_cohort": 8}), tmp_path / "run", population=scenes.population())
    left = summary["epsilon_if_colluding"]
    assert list(left) == ["10%", "25%", "50%"]
    assert summary["epsilon"] < left["10%"] < left["25%"] < left["50%"]
    events = [
        event_from(e)
        for line in json.loads((tmp_path / "run" / "ledger.json").read_text(encoding="utf-8"))["charges"]
        for e in line["events"]
    ]
    weaker = [
        replace(one, noise_multiplier=one.noise_multiplier * (3 / 7) ** 0.5) for one in events if isinstance(one, SampledGaussianEvent)
    ]
    assert left["50%"] == pytest.approx(epsilon_of(weaker, 1e-3)), "four of seven shares are known"


def test_a_small_minimum_cohort_size_is_warned_of() -> None:
    (doubt,) = shared_noise_config(data={"clients": 20}).doubts
    assert "protection.min_cohort = 3" in doubt
    assert "3.2 times the noise that it needs" in doubt
    assert "min_cohort = 16" in doubt
    assert shared_noise_config(data={"clients": 20}, protection={"min_cohort": 16}).doubts == ()
    assert shared_noise_config(data={"clients": 20}, privacy={"noise": "per_client"}).doubts == ()


@pytest.mark.slow
def test_the_console_says_what_is_guaranteed(tmp_path: Path) -> None:
    said: list[str] = []
    run_experiment(shared_noise_config(training={"rounds": 1}), tmp_path / "run", population=scenes.population(), report=said.append)
    line = "privacy: epsilon 3 at delta 0.001 for one sample more or less; noise shared by the members of a secure sum, of which 2 count"
    assert line in said
