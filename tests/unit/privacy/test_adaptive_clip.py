"""Adaptive clipping at the client level: the paper's algorithm written again, the price of a fixed clip norm, and both kinds of sums."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
from loopback import ENTROPY, Loopback
from msgspec import structs
from scipy import stats
from small_runs import configured

from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment
from cflpriv.experiments.run.run import prepare
from cflpriv.federation import messages as m
from cflpriv.federation.client_ledger import ClientLedger
from cflpriv.federation.server import BudgetsSpent, FederationServer
from cflpriv.federation.transport import OverBytes
from cflpriv.privacy.adaptive_clip import AdaptiveClip, is_below, with_count
from cflpriv.privacy.client_level import ClippedMean, client_noise
from cflpriv.privacy.settings import Privacy, Releases
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import TooFewClients
from cflpriv.protocols.events import Relation
from cflpriv.protocols.ledger import Ledger
from cflpriv.protocols.mechanisms import gaussian_noise
from cflpriv.types import Array

ROUNDS = 6
MOVING = Privacy("client", "add_remove", 4.0, 1e-3, clip_norm=0.05, clip_quantile=0.5)


def clipped_mean(privacy: Privacy, protection: Protection, cohort: int) -> tuple[ClippedMean, Ledger]:
    """The server's half for a run of `ROUNDS` rounds, and its ledger."""
    ledger = Ledger(privacy.budget)
    adaptive = AdaptiveClip(privacy.clip_quantile, privacy.clip_rate, cohort, privacy.clip_norm) if privacy.clip_quantile else None
    clipped, _ = client_noise(privacy, Releases(trainings=ROUNDS), protection, ledger, public_entropy("noise"), None, adaptive)
    return clipped, ledger


class Paper:
    """Algorithm 1 of Andrew et al. 2021, from the noise multiplier z of a sum and σ_b. Under "replace_one" sensitivities are doubled."""

    def __init__(self, privacy: Privacy, z: float, sigma_b: float) -> None:
        self.gamma, self.eta, self.c, self.sigma_b = privacy.clip_quantile, privacy.clip_rate, privacy.clip_norm, sigma_b
        self.twice = 1 if privacy.relation == "add_remove" else 2
        self.z_delta = (z**-2 - (2 * sigma_b / self.twice) ** -2) ** -0.5

    def round(self, updates: list[Array], noise: Array) -> Array:
        """The mean of the updates (n times (d,)) with the standard normal `noise` (d + 1,), whose last number is that of the count."""
        norms = [float(np.linalg.norm(update)) for update in updates]
        total = sum(update * min(1.0, self.c / norm) for update, norm in zip(updates, norms, strict=True))
        mean = (total + self.z_delta * self.twice * self.c * noise[:-1]) / len(updates)
        b = (sum(norm <= self.c for norm in norms) + self.sigma_b * noise[-1]) / len(updates)
        self.c *= math.exp(-self.eta * (b - self.gamma))
        return np.asarray(mean)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_a_trusted_server_does_what_the_paper_says(relation: Relation) -> None:
    scene, privacy = scenes.population(clients_per_group=10), replace(MOVING, relation=relation, epsilon=40.0, clip_norm=0.8)
    clipped, ledger = clipped_mean(privacy, Protection(), 20)
    fed = scenes.federation(scene, seed=1, privacy=privacy, clipped=clipped)
    sigma_b = max(20 / 20, 2.5 * clipped.multiplier * (1 if relation == "add_remove" else 2))
    paper, source, task = Paper(privacy, clipped.multiplier, sigma_b), public_entropy("noise"), scenes.training(scene)
    below = []
    for number in range(ROUNDS):
        fed.begin_round(number)
        held = fed.compute(task, {"model": task.model.init(number)})["update"]
        updates = [scenes.eye(fed).peek(client, held) for client in fed.clients]
        below.append(sum(np.linalg.norm(one) < paper.c for one in updates))
        deviation = paper.z_delta * paper.twice * paper.c
        expected = paper.round(updates, gaussian_noise(1.0, updates[0].size + 1, source))
        (mean,) = fed.mean(held)
        assert mean is not None
        # noisy sums are on a grid of 1/8 of the noise's deviation at most
        assert np.abs(mean.parts["update"].value() - expected).max() < deviation / 16 / 20 + 1e-6
        assert fed.clip_norm == pytest.approx(paper.c, rel=privacy.clip_rate * sigma_b / 16 / 20 + 1e-6)
        assert fed.clip_norm is not None
        paper.c = fed.clip_norm  # so that the grid's rounding does not add up
    assert any(0 < one < 20 for one in below), "the scene has updates on both sides of the clip norm"
    assert ledger.spent(0) <= 40.0


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("z", "cohort"), [(0.3, 10), (1.7, 100), (4.0, 1000), (12.0, 20)])
def test_the_noise_is_split_as_in_the_paper_and_contribution_and_count_are_as_long_as_the_event_says(
    relation: Relation, z: float, cohort: int
) -> None:
    clip = AdaptiveClip(0.5, 0.2, cohort, 0.3)
    sigma_b, scale, twice = clip.count_deviation(z, relation), clip.scale(z, relation), 1 if relation == "add_remove" else 2
    sigma_b = sigma_b / twice
    z_delta = (z**-2 - (2 * sigma_b) ** -2) ** -0.5
    deviation = z * twice * math.hypot(0.3, scale / 2)
    assert deviation == pytest.approx(z_delta * twice * 0.3)
    assert deviation / scale == pytest.approx(sigma_b * twice)
    assert z < z_delta <= 1.0207 * z
    rng = np.random.default_rng(0)
    for length in (0.1, 0.3, 5.0):
        vector = rng.normal(size=30)
        vector *= min(length, 0.3) / np.linalg.norm(vector)
        whole = with_count(vector, 0.3, scale)
        assert np.linalg.norm(whole) <= math.hypot(0.3, scale / 2) * (1 + 1e-12)
        assert whole[-1] == (scale / 2 if length < 0.3 else -scale / 2)
        assert is_below(vector.astype(np.float32), 0.3) == (length < 0.3)


def test_the_clip_norm_finds_its_quantile_and_stays_there() -> None:
    rng = np.random.default_rng(1)
    norms = rng.lognormal(sigma=0.7, size=1000)
    for quantile in (0.2, 0.5, 0.9):
        clip, reached = AdaptiveClip(quantile, 0.2, 1000, 0.05), []
        for number in range(200):
            clip.follow(float((norms <= clip.norm).sum() + rng.normal() * clip.count_deviation(2.0, "add_remove")), 1000)
            if number >= 150:
                reached.append((norms <= clip.norm).mean())
        assert np.mean(reached) == pytest.approx(quantile, abs=0.03)
    clip = AdaptiveClip(0.5, 0.2, 10, 1.0)
    for _ in range(20_000):
        clip.follow(10.0, 10)
    assert clip.norm == 1e-9, "where all updates are zero it stays a norm"


def sums(scene: Any, privacy: Privacy, protection: Protection) -> tuple[Loopback, FederationServer, ClippedMean, Ledger]:
    """A federation over messages whose clients demand `privacy`."""
    clipped, ledger = clipped_mean(privacy, protection, len(scene.clients))
    transport = Loopback(scene, protection)
    transport.privacy = privacy
    fed = FederationServer(
        OverBytes(transport), protection=protection, roster=transport.roster if protection.secure else None, entropy=ENTROPY, seed=1,
        clipped=clipped,
    )  # fmt: skip
    fed.enrol()
    return transport, fed, clipped, ledger


def own_ledgers(transport: Loopback) -> dict[int, float]:
    return {client: ClientLedger(transport.privacy, client, transport.stores[client]).spent() for client in transport.data}


def words(fed: FederationServer) -> set[str]:
    return {word for _, _, word in fed.refusals}


def test_shares_inside_secure_sums_have_the_two_noises_and_cost_what_the_server_says() -> None:
    scene, protection = scenes.population(groups=1, clients_per_group=6), Protection(sum="secagg", min_cohort=4, secagg_mode="passive")
    task = scenes.training(scene)
    plain = scenes.federation(scene, seed=1)
    transport, fed, clipped, ledger = sums(scene, replace(MOVING, clip_norm=0.4, epsilon=20.0), protection)
    sigma_b = max(6 / 20, 2.5 * clipped.multiplier)
    z_delta = (clipped.multiplier**-2 - (2 * sigma_b) ** -2) ** -0.5
    vectors, counts, beyond = [], [], 6 / (protection.smallest_sum - 1) * (1 + 1 / 768)
    for number in range(ROUNDS):
        plain.begin_round(number)
        held = plain.compute(task, {"model": task.model.init(number)})["update"]
        updates = [scenes.eye(plain).peek(client, held) for client in plain.clients]
        norm = fed.clip_norm
        assert norm is not None
        fed.begin_round(number)
        (mean,) = fed.mean(fed.compute(task, {"model": task.model.init(number)})["update"])
        assert mean is not None
        assert mean.count == 6
        exact = sum(one * min(1, norm / np.linalg.norm(one)) for one in updates)
        vectors.append((mean.parts["update"].value() * 6 - exact) / (z_delta * norm))
        assert fed.clip_norm is not None
        share = 0.5 - math.log(fed.clip_norm / norm) / 0.2
        counts.append((share * 6 - sum(np.linalg.norm(one) < norm for one in updates)) / sigma_b)
    assert not fed.refusals
    for found in (np.concatenate(vectors), np.array(counts)):  # each fails by chance in 2 of a million runs
        law = stats.chi2(found.size)
        assert 1e-6 < law.cdf(float(np.square(found).sum()) / beyond) < 1 - 1e-6
    spent = ledger.spent(0)
    assert own_ledgers(transport) == pytest.approx(dict.fromkeys(fed.clients, spent))
    assert {event.shares for line in ledger.charges for event in line.events} == {protection.smallest_sum - 1}  # type: ignore[union-attr]


def test_a_client_with_a_fixed_clip_norm_joins_no_sum_with_a_count_or_a_longer_one() -> None:
    scene, protection = scenes.population(groups=1, clients_per_group=6), Protection(sum="secagg", min_cohort=4, secagg_mode="passive")
    task = scenes.training(scene)
    for sum_ in (protection, Protection()):
        transport, fed, clipped, _ = sums(scene, MOVING, sum_)
        transport.privacy = replace(MOVING, clip_quantile=0.0)
        if sum_ is not protection:
            assert clipped.adaptive is not None
            clipped.adaptive.norm *= 1.01
        fed.begin_round(0)
        held = fed.compute(task, {"model": task.model.init(0)})["update"]
        with pytest.raises(TooFewClients):
            fed.mean(held)
        assert words(fed) == {"forbidden"}
        assert own_ledgers(transport)[0] == 0.0


@pytest.mark.parametrize(
    ("word", "change"), [("malformed", {"count": math.inf}), ("malformed", {"count": -1.0}), ("over-budget", {"count": 1e4})]
)
def test_a_client_pays_for_the_count_that_it_is_asked_for(word: str, change: dict[str, float]) -> None:
    scene, protection = scenes.population(groups=1, clients_per_group=6), Protection(sum="secagg", min_cohort=4, secagg_mode="passive")
    transport, fed, _, _ = sums(scene, MOVING, protection)
    task, means = scenes.training(scene), scenes.sums_of(fed)
    fed.begin_round(0)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]

    def lying(*said: Any) -> m.SumStep:
        step: m.SumStep = type(means)._like(means, *said)
        assert step.noise is not None
        return structs.replace(step, noise=structs.replace(step.noise, **change))

    object.__setattr__(means, "_like", lying)
    with pytest.raises(BudgetsSpent if word == "over-budget" else TooFewClients):
        fed.mean(held)
    assert words(fed) == {word}
    assert own_ledgers(transport)[0] == 0.0


# --- runs


BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 8}, "model": {"name": "linear"}, "algorithm": {"name": "fedavg"},
    "training": {"rounds": ROUNDS, "batch_size": 5, "lr": 0.1, "weights": "equal"},
    "privacy": {"unit": "client", "epsilon": 2.0, "delta": 1e-4, "clip_norm": 0.1, "clip_quantile": 0.5},
}  # fmt: skip
adaptive_config = partial(configured, BASE)
SECURE = {"sum": "secagg", "secagg_mode": "passive"}


@pytest.mark.parametrize("protection", [{}, SECURE])
def test_a_run_costs_what_it_costs_with_a_fixed_clip_norm_and_the_same_noise(protection: dict[str, Any], tmp_path: Path) -> None:
    summaries, multipliers = [], []
    for quantile in (0.5, 0.0):
        made = adaptive_config(protection=protection, privacy={"clip_quantile": quantile})
        summaries.append(run_experiment(made, tmp_path / str(quantile), population=scenes.population()))
        ledger = json.loads((tmp_path / str(quantile) / "ledger.json").read_text(encoding="utf-8"))
        multipliers.append([event["noise_multiplier"] for line in ledger["charges"] for event in line["events"]])
    assert multipliers[0] == multipliers[1]
    assert summaries[0]["epsilon"] == summaries[1]["epsilon"]
    rows = [json.loads(line) for line in (tmp_path / "0.5" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["clip_norm"] for row in rows}) > 1  # noisy counts are on a grid: a norm may stay for a round
    assert "clip_norm" not in json.loads((tmp_path / "0.0" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[0])


@pytest.mark.filterwarnings("ignore:run.insecure_test_entropy")
def test_a_resumed_run_goes_on_from_the_clip_norm_of_its_checkpoint(tmp_path: Path) -> None:
    made, scene = adaptive_config(run={"insecure_test_entropy": True}), scenes.population()

    class Cut(Exception):
        pass

    def stop(row: Any) -> None:
        if row["round"] == 2:
            raise Cut

    with pytest.raises(Cut):
        run_experiment(made, tmp_path / "cut", population=scene, tick=stop)
    run_experiment(made, tmp_path / "whole", population=scene)
    run_experiment(made, tmp_path / "cut", population=scene, resume=True)
    norms = [
        [json.loads(line)["clip_norm"] for line in (tmp_path / one / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        for one in ("whole", "cut")
    ]
    assert norms[0] == norms[1]
    assert len(set(norms[0])) == ROUNDS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy": {"unit": "sample", "samples": 20}}, r"privacy\.clip_quantile = 0\.5 with privacy\.unit = 'sample'"),
        ({"privacy": {"correlated": True}}, r"privacy\.clip_quantile = 0\.5 with privacy\.correlated = true"),
        ({"privacy": {"clip_quantile": 1.0}}, r"privacy\.clip_quantile = 1\.0: expected a number in \[0, 1\)"),
        ({"privacy": {"clip_rate": 0.0}}, r"privacy\.clip_rate = 0\.0: expected a finite number > 0"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        adaptive_config(**changes)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "rr_cluster", "k": 2}, "'rr_cluster' sums counts whose unit"),
        ({"name": "private_clusters"}, "'private_clusters' sums counts whose unit"),
        ({"name": "local"}, "'local' sums nothing"),
    ],
)
def test_algorithms_for_which_a_moving_clip_norm_has_no_meaning_are_refused_by_name(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"privacy\.clip_quantile = 0\.5: algorithm {message}"):
        prepare(adaptive_config(algorithm=algorithm, training={"rounds": 40}), population=scenes.population())


def test_a_sum_that_nobody_took_part_in_leaves_the_clip_norm() -> None:
    moving = AdaptiveClip(0.5, 0.2, 10, 3.0)
    moving.follow(0.0, 0)
    assert moving.norm == 3.0
