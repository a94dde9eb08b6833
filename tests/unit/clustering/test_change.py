"""Whether a client's data changed: the level of the test, and what it finds."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from scenes import task_input

from cflpriv.clustering.change import Samples, _log_bound, _net_counts, change_p_value, checks_within_reach, level_of_check
from cflpriv.randomness import Stream, stream
from cflpriv.tasks.change_of_data import PLACED, ChangeOfData, KeepSamples
from cflpriv.types import ClientData

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


def within(hits: int, tries: int, level: float) -> bool:
    """Whether so many hits are within four standard errors of the level: a right test fails this about once in 1,000 times."""
    return bool(hits <= tries * level + 4 * np.sqrt(tries * level * (1 - level)))


LAWS = [(60, 100, 100, 0), (200, 100, 100, 0), (200, 100, 100, 50), (100, 50, 200, 20), (1_000, 60, 60, 30)]
"""Distinct rows of the law, samples before and after, and kept samples."""


def named_by_law(law: tuple[int, int, int, int], tries: int, level: float) -> int:
    distinct, n, m, kept = law
    named = 0
    for number in range(tries):
        rng = stream(number, f"law {law}")
        rows, labels = rng.standard_normal((distinct, 8)), rng.integers(2, size=distinct)
        drawn = rng.integers(distinct, size=n + m - kept)
        before, after = drawn[:n], drawn[n - kept :]
        named += change_p_value((rows[before], labels[before]), (rows[after], labels[after]), level, rng) <= level
    return named


@pytest.mark.parametrize("law", LAWS)
def test_repeated_and_kept_rows_are_named_no_more_often_than_the_level(law: tuple[int, int, int, int]) -> None:
    assert within(named_by_law(law, 100, 0.05), 100, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_repeated_and_kept_rows_keep_the_level_in_many_tries(law: tuple[int, int, int, int]) -> None:
    assert within(named_by_law(law, 4000, 0.05), 4000, 0.05)


def test_given_kept_samples_and_pairs_of_numbers_all_orders_of_equal_differences_are_equally_frequent() -> None:
    """All divisions of a small pool with repeated rows into 1 kept, 3 samples only before and 3 only after."""
    pool = np.array([0, 0, 1, 1, 2, 3, 3])
    frequent: dict[Any, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
    for kept in range(len(pool)):
        rest = [i for i in range(len(pool)) if i != kept]
        for only_before in combinations(rest, 3):
            only_after = [i for i in rest if i not in only_before]
            b, a = (np.bincount(pool[list(only)], minlength=4) for only in (only_before, only_after))
            frequent[int(pool[kept]), tuple(np.minimum(a, b)), tuple(abs(a - b))][tuple(b - a)] += 1
    assert any(len(orders) > 1 for orders in frequent.values())
    for (_, _, sizes), orders in frequent.items():
        possible = {tuple(np.multiply(signs, sizes)) for signs in product((1, -1), repeat=4) if np.dot(signs, sizes) == 0}
        assert set(orders) == possible
        assert len(set(orders.values())) == 1


def test_a_row_counts_by_the_difference_of_its_numbers_and_only_with_its_label() -> None:
    rows = np.array([[5.0], [5.0], [6.0], [7.0]])
    before, after = (rows, np.array([0, 0, 0, 1])), (rows[[0, 2, 3, 3]], np.array([0, 0, 0, 1]))
    found, labels, net, both = _net_counts(before, after)
    assert list(zip(found[:, 0], labels, net, both, strict=True)) == [(5, 0, 1, True), (7, 0, -1, False)]


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_the_bound_is_above_the_share_of_all_signs_and_falls_with_the_distance(shift: float) -> None:
    differences = stream(3, "bound").standard_normal((12, 3)) + shift
    signs = np.array(list(product((1, -1), repeat=12)))
    drawn = np.sort(((signs @ differences) ** 2).sum(1))
    squares = np.linalg.svd(differences, compute_uv=False) ** 2
    bounds = np.exp([_log_bound(float(value), squares) for value in drawn])
    assert (np.arange(len(drawn), 0, -1) / len(drawn) <= bounds).all()
    assert (np.diff(bounds) <= 0).all()


@pytest.mark.parametrize(("clients", "number"), [(1_000, 5), (1_000, 60), (100, 16), (12_600, 1), (100_000, 20)])
def test_a_clear_change_is_found_in_late_checks_of_many_clients(clients: int, number: int) -> None:
    rng = stream(number, "late")
    level = level_of_check(0.05, clients, number)
    assert change_p_value(samples(rng, 100), samples(rng, 100, shift=9.0), level, rng) <= level
    assert change_p_value(samples(rng, 100), samples(rng, 100), level, rng) > level
    assert checks_within_reach(0.05, clients, 100) >= number


@pytest.mark.parametrize("count", [5, 20, 36, 60])
def test_the_farthest_change_is_found_in_the_last_check_within_reach_and_not_in_the_next(count: int) -> None:
    checks, labels = checks_within_reach(0.05, 100, count), np.zeros(count, dtype=np.int64)
    rows = 1e-6 * np.arange(count)[:, None]
    numbers = (checks, checks + 1) if count > 30 else (checks + 1,)  # with few samples draws decide in the last check, by chance
    for number in numbers:
        level = level_of_check(0.05, 100, number)
        named = change_p_value((rows, labels), (rows + 1e6, labels), level, stream(count, "reach")) <= level
        assert named == (number == checks)


def test_the_smallest_levels_raise_nothing_and_name_nobody_without_a_change() -> None:
    rng = stream(9, "test")
    assert checks_within_reach(1e-307, 10, 256) == 0 == checks_within_reach(0.05, 10, 0)
    assert change_p_value(samples(rng, 30), samples(rng, 30), level_of_check(1e-307, 10, 1), rng) > 1e-6


def client(rng: Stream, n: int, shift: float = 0.0) -> ClientData:
    """Samples of 400 distinct rows, each as likely as the others without a shift."""
    table = stream(0, "table").standard_normal((400, 8))
    weights = np.exp(shift * table[:, 0])
    x = table[rng.choice(400, n, p=weights / weights.sum())].astype(np.float32)
    return ClientData(0, x, y := rng.integers(2, size=n), x, y)


def named_after(before: ClientData, after: ClientData, level: float) -> bool:
    kept = KeepSamples().run(task_input(before, {}))[PLACED]
    inputs = task_input(after, {"placed": np.array(0.0)}, memory={PLACED: kept})
    return bool(ChangeOfData(level).run(inputs)["changed"])


def test_clients_of_more_samples_than_are_kept_and_of_other_numbers_of_samples_are_tested_at_the_level() -> None:
    for n, m in ((300, 3000), (600, 600)):
        rng = stream(n, "many")
        assert within(sum(named_after(client(rng, n), client(rng, m), 0.05) for _ in range(25)), 25, 0.05)


def test_of_many_samples_a_change_is_found_and_samples_that_stay_are_not_compared() -> None:
    rng = stream(12, "many")
    many = client(rng, 900)
    assert named_after(many, client(rng, 900, shift=2.0), 0.01)
    order = rng.permutation(900)
    again = ClientData(0, many.x_train[order], many.y_train[order], many.x_test, many.y_test)
    assert not named_after(many, again, 0.99)


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


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_nothing_on_either_side_is_no_change(kind: type) -> None:
    none: Samples = np.zeros((0, 3), np.float32), np.zeros(0, kind)
    some: Samples = np.ones((4, 3), np.float32), np.ones(4, kind)
    for before, after in ((none, none), (some, none), (none, some)):
        assert change_p_value(before, after, 0.05, stream(0, "change")) == 1.0
