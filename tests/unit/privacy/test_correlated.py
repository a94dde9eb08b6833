"""Correlated noise of a trusted server: rows of the stated law, columns of a client never overlap, and runs end nearer to those without."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import scenes
from small_runs import configured

from cflpriv.engine import TaskInput
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment
from cflpriv.experiments.run.run import prepare
from cflpriv.privacy.correlated import CorrelatedNoise
from cflpriv.protocols.banded import optimised_coefficients, prefix_variances, separated_sensitivity, strategy
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.ledger import Ledger
from cflpriv.types import Array, Parts

SCENE = scenes.population(groups=1, clients_per_group=40)
BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 40}, "model": {"name": "linear"}, "algorithm": {"name": "fedavg"}, "run": {"evaluate_every": 1000},
    "training": {"rounds": 12, "batch_size": 5, "lr": 0.05, "weights": "equal", "participation": 0.25, "sampling": "fixed_cohorts"},
    "privacy": {"unit": "client", "epsilon": 3.0, "delta": 1e-3, "correlated": True},
}  # fmt: skip
correlated_config = partial(configured, BASE)


@dataclass(frozen=True)
class Zeros:
    """A task that contributes nothing, so that a mean is its noise."""

    parts: ClassVar[Parts] = {"vector": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> dict[str, Array]:
        return {"vector": np.zeros(20_000)}


def scaled_rows(noise: CorrelatedNoise, cohorts: dict[int, list[int]], count: int = 30_000, scale: float = 2.0) -> Array:
    source = public_entropy("rows")
    return np.stack([noise.row(0, turn, clients, scale, count, source) for turn, clients in cohorts.items()]) / scale


def test_rows_have_the_covariance_of_the_matrix() -> None:
    coefficients = optimised_coefficients(3, 9)
    noise = CorrelatedNoise(coefficients)
    rows = scaled_rows(noise, {turn: [turn % 3] for turn in range(9)})
    inverse = np.linalg.inv(strategy(coefficients, 9)) * math.hypot(*coefficients)
    assert noise.begun == 1
    assert np.abs(rows @ rows.T / rows.shape[1] - inverse @ inverse.T).max() < 6 * np.square(inverse).sum(axis=1).max() / 170
    variances = np.cumsum(rows, axis=0).var(axis=1) / math.hypot(*coefficients) ** 2
    assert np.allclose(variances, prefix_variances(coefficients, 9), rtol=0.06)


@pytest.mark.parametrize(
    ("cohorts", "streams"),
    [
        ({0: [1], 1: [2], 2: [3], 3: [1], 4: [2]}, [[0, 1, 2, 3, 4]]),
        ({0: [1], 1: [2], 2: [1], 3: [3], 4: [2]}, [[0, 1], [2, 3, 4]]),
        ({0: [1], 2: [2], 3: [1], 4: [3]}, [[0, 2, 3, 4]]),
        ({0: [1], 4: [2], 5: [3]}, [[0], [4, 5]]),
        ({0: [1, 2], 1: [2]}, [[0], [1]]),
    ],
)
def test_a_client_that_comes_back_too_early_gets_a_stream_of_its_own(cohorts: dict[int, list[int]], streams: list[list[int]]) -> None:
    """The rows of different streams are independent, those of one are not, and each client's rounds in a stream are 3 apart."""
    noise = CorrelatedNoise(optimised_coefficients(3, 9))
    rows = dict(zip(cohorts, scaled_rows(noise, cohorts), strict=True))
    assert noise.begun == len(streams)
    for stream in streams:
        for client in (1, 2, 3):
            turns = [turn for turn in stream if client in cohorts[turn]]
            assert all(later - earlier >= 3 for earlier, later in pairwise(turns))
    place = {turn: i for i, stream in enumerate(streams) for turn in stream}
    for one in cohorts:
        for other in cohorts:
            correlation = float(np.corrcoef(rows[one], rows[other])[0, 1])
            if place[one] != place[other]:
                assert abs(correlation) < 6 / 170
            elif other == one + 1:
                assert correlation < -0.1


def test_a_round_that_is_run_again_gets_fresh_noise() -> None:
    noise, source = CorrelatedNoise(optimised_coefficients(3, 9)), public_entropy("again")
    first = noise.row(0, 5, [1], 1.0, 1000, source)
    again = noise.row(0, 5, [1], 1.0, 1000, source)
    assert abs(float(np.corrcoef(first, again)[0, 1])) < 0.2
    assert noise.begun == 2


def test_groups_have_noise_of_their_own() -> None:
    noise, source = CorrelatedNoise(optimised_coefficients(4, 9)), public_entropy("groups")
    rows = [noise.row(group, turn, [group], 1.0, 20_000, source) for turn, group in ((0, 0), (1, 1), (2, 0), (3, 1))]
    assert noise.begun == 4, "each comes back after two rounds, and there are four bands"
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 0.05


@pytest.mark.slow
def test_a_run_is_charged_as_with_independent_noise_and_keeps_one_stream(tmp_path: Path) -> None:
    summaries = [
        run_experiment(correlated_config(privacy={"correlated": one}), tmp_path / str(one), population=SCENE) for one in (True, False)
    ]
    charges = [Ledger.open(tmp_path / str(one) / "ledger.json").charges for one in (True, False)]
    assert charges[0] == charges[1]
    assert [one["epsilon"] for one in summaries] == pytest.approx([3.0, 3.0], rel=1e-3)
    assert [one["stopped"] for one in summaries] == [None, None]
    made: Any = prepare(correlated_config(), population=SCENE).federation._sums
    correlated, clipped = made._parts.clipped.correlated, made._parts.clipped
    assert len(correlated.coefficients) == 4
    once = clipped.multiplier / math.sqrt(3) * separated_sensitivity(correlated.coefficients, 12, 3, 4)
    assert once == pytest.approx(clipped.multiplier * math.hypot(*correlated.coefficients)), "one price over the run, or one a round"


@pytest.mark.parametrize("correlated", [True, False])
def test_running_totals_of_means_have_the_stated_error(correlated: bool) -> None:
    """Whole rounds of a federation, contributions that are all zero: what is left of a sum is noise."""
    made = correlated_config(privacy={"correlated": correlated})
    federation: Any = prepare(made, population=SCENE, contract=None).federation  # whose clients compute what no algorithm asks
    clipped = federation._sums._parts.clipped
    rows = []
    for number in range(12):
        federation.begin_round(number)
        cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
        (mean,) = federation.mean(federation.compute(Zeros(), on=cohort)["vector"])
        rows.append(np.asarray(mean.parts["vector"].value()).ravel() * mean.count)
    measured = np.sqrt(np.square(np.cumsum(rows, axis=0)).mean()) / clipped.multiplier
    coefficients = optimised_coefficients(4, 12) if correlated else (1.0,)
    assert measured == pytest.approx(math.hypot(*coefficients) * math.sqrt(prefix_variances(coefficients, 12).mean()), rel=0.03)
    if correlated:
        assert clipped.correlated.begun == 1
        assert measured < 0.75 * math.sqrt(6.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy": {"unit": "sample", "samples": 20}}, "is the noise of a server"),
        ({"protection": {"sum": "secagg"}}, "of a trusted server"),
    ],
)
def test_noise_that_no_server_adds_cannot_be_correlated(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        correlated_config(**changes)


@pytest.mark.parametrize(
    "changes", [{"training": {"sampling": "global"}}, {"training": {"participation": 1.0}}, {"algorithm": {"name": "oracle"}}]
)
def test_clients_that_may_be_asked_in_two_rounds_in_a_row_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"privacy\.correlated = true: .* two rounds in a row"):
        prepare(correlated_config(**changes), population=SCENE)
