"""Whether a client's data changed: the level of the test, and what it finds."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cflpriv.clustering.change import Samples, change_p_value, level_of_check
from cflpriv.randomness import Stream, stream

LEVEL = 1e-3


def samples(rng: Stream, n: int, *, shift: float = 0.0, swapped: bool = False, numbers: bool = False) -> Samples:
    """Two classes whose means differ; or a number that follows the first feature."""
    labels = rng.integers(2, size=n)
    rows = rng.standard_normal((n, 6))
    if numbers:
        return rows + shift, rows[:, 0] * (-1 if swapped else 1)
    rows[:, 0] += 3 * labels
    return rows + shift, 1 - labels if swapped else labels


@pytest.mark.parametrize("numbers", [False, True])
def test_samples_of_one_law_are_named_no_more_often_than_the_level(numbers: bool) -> None:
    rng = stream(1, "test")
    p = np.array([change_p_value(samples(rng, 20, numbers=numbers), samples(rng, 15, numbers=numbers), 0.02, rng) for _ in range(400)])
    for level in (0.02, 0.1, 0.3):
        assert (p <= level).mean() <= level + 3 * np.sqrt(level * (1 - level) / len(p))


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("change", [{"shift": 1.0}, {"swapped": True}])
def test_other_features_and_other_labels_of_the_same_features_are_found(change: Mapping[str, Any], numbers: bool) -> None:
    rng = stream(2, "test")
    found = [change_p_value(samples(rng, 60, numbers=numbers), samples(rng, 60, numbers=numbers, **change), LEVEL, rng) for _ in range(5)]
    assert max(found) <= LEVEL


def test_data_that_stayed_or_only_grew_by_old_samples_are_never_named() -> None:
    rng = stream(3, "test")
    rows, labels = samples(rng, 30)
    assert change_p_value((rows, labels), (rows[::-1], labels[::-1]), LEVEL, rng) == 1.0
    assert change_p_value((rows[:20], labels[:20]), (rows, labels), LEVEL, rng) == 1.0


def test_the_p_value_depends_on_which_samples_come_before_and_not_on_their_order() -> None:
    rows, labels = samples(stream(4, "test"), 40)
    later = samples(stream(5, "test"), 40, shift=0.3)
    order = stream(6, "test").permutation(40)
    p = change_p_value((rows, labels), later, 0.01, stream(7, "test"))
    again = change_p_value((rows[order], labels[order]), later, 0.01, stream(8, "test"))
    assert abs(p - again) <= 0.3 * max(p, again) + 0.01


def test_the_levels_of_all_checks_of_all_clients_add_up_to_alpha() -> None:
    spent = sum(40 * level_of_check(0.05, 40, number) for number in range(1, 2000))
    assert 0.0499 < spent <= 0.05


@pytest.mark.slow
def test_the_level_holds_over_whole_runs() -> None:
    """300 runs of 10 clients and 5 checks with fresh samples: at most alpha of them name any client, up to three standard errors."""
    alpha, false = 0.1, 0
    for run in range(300):
        rng = stream(run, "runs")
        before = [samples(rng, 15) for _ in range(10)]
        false += any(
            change_p_value(own, samples(rng, 15), level := level_of_check(alpha, 10, number), rng) <= level
            for number in range(1, 6)
            for own in before
        )
    assert false / 300 <= alpha + 3 * np.sqrt(alpha * (1 - alpha) / 300)
