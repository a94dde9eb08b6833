"""IFCA's synthetic regression: the stack of matrices is the algorithm, good starts contract, success grows with m and n and separation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import federation

from cflpriv.algorithms.ifca.ifca import Problem, alternate
from cflpriv.algorithms.interface import Algorithm
from cflpriv.data.regression import Regression, regression
from cflpriv.engine import Result, TaskInput
from cflpriv.errors import InputError
from cflpriv.experiments.reproductions.regression import STEPS, RegressionPoint, distance, random_start, succeeds, success_rate, trial
from cflpriv.types import Array, ClientData, Parts

# --- the algorithm itself over a federation: client data hold labels that are classes, so the response is the last column of x


def regression_clients(trial: Regression) -> tuple[ClientData, ...]:
    """The machines as clients: the response is the last column of x. They have no test data."""
    m, n, d = trial.x.shape
    packed = np.concatenate([trial.x, trial.y[..., None]], axis=2)
    none = np.zeros(0, dtype=np.int64)
    return tuple(ClientData(i, packed[i], np.zeros(n, dtype=np.int64), np.zeros((0, d + 1)), none) for i in range(m))


def residual_of(given: TaskInput, parameters: Array) -> tuple[Array, Array]:
    x, y = given.data.x_train[:, :-1], given.data.x_train[:, -1]
    return x, y - x @ parameters


@dataclass(frozen=True)
class RegressionLosses:
    """The mean squared error of each of the list "model". Parts: "losses" (k,), "choice" () of the lowest."""

    parts: ClassVar[Parts] = {"losses": "summed", "choice": "choice"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        losses = np.array([np.mean(residual_of(given, np.asarray(model))[1] ** 2) for model in given.params["model"]])
        return {"losses": losses, "choice": np.array(int(losses.argmin()))}


@dataclass(frozen=True)
class RegressionGradient:
    """The gradient of the mean squared error at "model". Parts: "gradient" (d,)."""

    parts: ClassVar[Parts] = {"gradient": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        x, residual = residual_of(given, given.array("model"))
        return {"gradient": -2.0 / len(x) * x.T @ residual}


@dataclass(frozen=True)
class RegressionLoss:
    """The squared error of "model" summed over the samples. Parts: "loss" (), "count" ()."""

    parts: ClassVar[Parts] = {"loss": "measure", "count": "measure"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        _, residual = residual_of(given, given.array("model"))
        return {"loss": np.array(float(np.sum(residual**2))), "count": np.array(float(len(residual)))}


def ifca_on(d: int, *, k: int, step: float, starts: Sequence[Array]) -> Algorithm:
    """IFCA with gradient averaging on regression clients; attempt j starts from starts[j]."""
    problem = Problem(
        (("theta", (d,), 0),),
        lambda attempt: starts[attempt],
        RegressionLosses(),
        RegressionLoss(),
        lambda round: RegressionGradient(),
        "gradient",
        lambda round: -step,
    )
    return alternate(problem, k=k, by_share=True)


# --- the figure's arithmetic


def test_the_stack_of_matrices_is_the_algorithm() -> None:
    data = regression(3, d=8, k=2, m=6, n=7, separation=0.5, noise=0.1, scale="multiply")
    starts = np.stack([[random_start(5, 2 * b + j, 8) for j in range(2)] for b in range(3)])
    found = trial(data, starts, (0.05, 0.2), rounds=6)
    for b in range(3):
        for s, step in enumerate((0.05, 0.2)):
            fed = federation(regression_clients(data))
            algorithm = ifca_on(8, k=2, step=step, starts=tuple(starts[b]))
            state = algorithm.init(fed)
            for number in range(6):
                fed.begin_round(number)
                state, _ = algorithm.round(fed, state)
            ours = [model.value() for model in state.restarts[0].models]
            np.testing.assert_allclose(ours, found[b, s], atol=1e-11)


def test_a_good_start_contracts_geometrically_to_the_noise_floor() -> None:
    """Theorem 1 and Corollary 1 in small: ‖θ − θ*‖ shrinks by a constant factor a round down to an error of order σ sqrt(dK / mn)."""
    d, k, m, n, noise = 20, 2, 40, 60, 0.05
    data = regression(0, d=d, k=k, m=m, n=n, separation=1.0, noise=noise, scale="multiply")
    rng = np.random.default_rng(0)
    apart = np.linalg.norm(data.truth[0] - data.truth[1])
    begin = data.truth + 0.2 * apart * rng.normal(size=(k, d)) / np.sqrt(d)
    errors = [distance(trial(data, begin[None], (0.4,), rounds)[0, 0], data.truth) for rounds in range(0, 61, 3)]
    floor = noise * np.sqrt(d * k / (m * n))
    falling = [error for error in errors if error > 3 * floor]
    assert len(falling) >= 3
    assert all(after < 0.5 * before for before, after in pairwise(falling))
    assert errors[-1] < 1.5 * floor
    exact = regression(0, d=d, k=k, m=m, n=n, separation=1.0, noise=0.0, scale="multiply")
    assert distance(trial(exact, begin[None], (0.4,), 150)[0, 0], exact.truth) < 1e-10


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(0, 1000))
def test_the_distance_is_that_of_the_best_naming(k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found, truth = rng.normal(size=(2, k, 3))
    best = min(np.mean([np.linalg.norm(found[p] - truth[j]) for j, p in enumerate(order)]) for order in permutations(range(k)))
    assert distance(found, truth) == pytest.approx(best)
    assert distance(np.full((k, 3), np.nan), truth) == np.inf


@pytest.mark.slow
def test_success_grows_from_none_to_all_with_separation_machines_and_points() -> None:
    """Fig. 3 thinned (d = 60, K = 2, σ = 0.1, authors' scale): each row ends where the paper's panels end. Fixed seeds: no error rate."""

    def rates(points: list[tuple[int, int, float]]) -> list[float]:
        return [
            success_rate(RegressionPoint(2, m, n, r, 0.1, d=60, rounds=200, starts=5, trials=8, scale="multiply")) for m, n, r in points
        ]

    for name, points in {
        "separation": [(60, 10, 0.02), (60, 10, 0.1), (60, 10, 0.5)],
        "machines": [(20, 10, 0.5), (60, 10, 0.5), (120, 10, 0.5)],
        "points": [(60, 5, 0.5), (60, 10, 0.5), (60, 20, 0.5)],
    }.items():
        found = rates(points)
        assert found[0] <= 0.25, (name, found)
        assert found[-1] >= 0.75, (name, found)
        assert found == sorted(found), (name, found)


def test_a_trial_succeeds_where_some_start_with_some_step_does() -> None:
    """Against all starts and steps at once, to the end: trying the steps one by one until one does it changes nothing."""
    outcomes = []
    for seed in range(12):
        point = RegressionPoint(2, 32, 10, 0.5, 0.1, d=30, rounds=80, starts=2, scale="multiply")
        data = regression(seed, d=30, k=2, m=32, n=10, separation=0.5, noise=0.1, scale="multiply")
        starts = np.stack([[random_start(seed, b * 2 + j, 30) for j in range(2)] for b in range(2)])
        found = trial(data, starts, STEPS[2], point.rounds).reshape(-1, 2, 30)
        outcomes.append(any(distance(one, data.truth) <= 0.06 for one in found))
        assert succeeds(point, seed) == outcomes[-1]
    assert 0 < sum(outcomes) < len(outcomes)  # both happen


def test_data_have_the_scale_that_was_asked_for() -> None:
    rescaled = regression(1, d=30, k=3, m=6, n=4, separation=0.7, noise=0.0)
    np.testing.assert_allclose(np.linalg.norm(rescaled.truth, axis=1), 0.7)
    multiplied = regression(1, d=30, k=3, m=6, n=4, separation=0.7, noise=0.0, scale="multiply")
    assert set(np.unique(multiplied.truth)) == {0.0, 0.7}
    np.testing.assert_allclose(multiplied.y, np.einsum("mnd,md->mn", multiplied.x, multiplied.truth[multiplied.groups]))
    for options in ({"m": 5}, {"noise": -1.0}, {"separation": 0.0}, {"n": 0}, {"scale": "log"}):
        with pytest.raises(InputError, match="regression"):
            regression(0, **({"d": 3, "k": 2, "m": 4, "n": 2, "separation": 1.0, "noise": 0.1} | options))
