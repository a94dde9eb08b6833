"""The warning of a run that ended too early: scores that rise are named, scores around a level are not."""

import numpy as np
import pytest

from cflpriv.experiments.run.still_improving import LEAST_RISE, LEVEL, still_improving
from cflpriv.types import Array

REPETITIONS = 2000


def scored_rounds(scores: Array, name: str = "balanced_accuracy") -> list[dict[str, float]]:
    return [{"round": number, "accuracy_mean": 0.5, name: score} for number, score in enumerate(scores.tolist())]


@pytest.mark.parametrize("rounds", [10, 20, 60])
def test_a_level_is_seldom_called_a_rise(rounds: int) -> None:
    """Error rate of this test 1e-4: four standard deviations of a binomial count at the stated level."""
    draws = np.random.default_rng(rounds)
    found = sum(bool(still_improving(scored_rounds(0.7 + draws.normal(0, 0.1, rounds)), rounds)) for _ in range(REPETITIONS))
    assert found <= REPETITIONS * LEVEL + 4 * np.sqrt(REPETITIONS * LEVEL)


def test_a_steady_rise_is_named_with_its_rounds() -> None:
    steady = 0.5 + 0.01 * np.arange(20)
    line = still_improving(scored_rounds(steady), 20)
    assert "balanced accuracy rose by 7.0 points over rounds 13 to 20" in line
    assert "training.rounds = 20" in line
    assert "accuracy rose" in still_improving(scored_rounds(steady, "accuracy_mean"), 20)


def test_small_rises_falls_short_and_unfinished_runs_are_not_named() -> None:
    steady = np.arange(20.0)
    for slope in (0.9 * LEAST_RISE / 7, 0.0, -0.01):
        assert still_improving(scored_rounds(0.5 + slope * steady), 20) == ""
    assert still_improving(scored_rounds(0.5 + 0.01 * steady), 21) == ""  # stopped, or interrupted
    assert still_improving(scored_rounds(0.5 + 0.01 * steady[:9]), 9) == ""
    assert still_improving([{"round": 0, "accuracy_mean": None}], 1) == still_improving([], 0) == ""


def test_a_rise_that_ended_is_not_named() -> None:
    assert still_improving(scored_rounds(np.minimum(0.9, 0.3 + 0.1 * np.arange(20))), 20) == ""
