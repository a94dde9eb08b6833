"""Processes that are killed at any point: sums are exact or refused, a slot has one set, and what was answered is kept."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .world import World

POINTS = ("before a write", "in a write", "before a flush", "after a flush", "between messages")


def play(folder: Path, seed: int, rate: float | None = None) -> tuple[World, list[str]]:
    """A world of rounds drawn from a seed."""
    random = Random(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(folder, seed, monkeypatch, slack=random.choice((None, 0, 500)))
        world.attempts = random.choice((1, 2, 3))
        absent, failing = random.choice(((0, 0), (0, 0), (1, 0), (0, 1), (2, 0), (0, 2)))
        chance = random.choice((0.02, 0.1, 0.2)) if rate is None else rate
        codes = world.play(chance, rounds=random.choice((1, 2)), absent=absent, failing=failing)
        world.close()
    if not absent and not failing:
        assert codes == [""] * len(codes), "a sum was lost"
    return world, codes


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**63 - 1))
def test_sums_survive_kills_at_any_point(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    play(tmp_path_factory.mktemp("world"), seed)


@pytest.mark.slow
def test_worlds_end_in_every_way(tmp_path: Path) -> None:
    """The runs above would show nothing if all ended early, or nobody was killed."""
    ends: Counter[str] = Counter()
    points: Counter[tuple[str, str]] = Counter()
    for seed in range(12):
        world, codes = play(tmp_path / str(seed), seed)
        ends.update(codes)
        points += world.disk.points
    assert ends[""] >= 6
    assert ends["too-few-clients"] >= 1
    assert ends["too-few-helpers"] >= 1
    assert {(party, point) for party in ("coordinator", "client", "helper") for point in POINTS} <= set(points)


@pytest.mark.slow
def test_a_hundred_kills_of_each_at_each_point(tmp_path: Path) -> None:
    points: Counter[tuple[str, str]] = Counter()
    wanted = {(party, point) for party in ("coordinator", "client", "helper") for point in POINTS}
    ends: Counter[str] = Counter()
    seed = 1000
    while any(points[point] < 100 for point in wanted):
        world, codes = play(tmp_path / str(seed), seed, rate=0.15)
        ends.update(codes)
        points += world.disk.points
        seed += 1
    for (party, point), count in sorted(points.items()):
        print(f"{party} killed {point}: {count}")
    print(f"{seed - 1000} runs, rounds ended: {dict(ends)}; no sum lost, none opened twice")
