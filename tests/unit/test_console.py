"""Times for people: how long the rest of some work takes."""

import time

import pytest

from cflpriv.console import NAMED, TimeLeft, cluster_lines, duration_words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(61, "1 min"), (89, "1 min"), (150, "2 min"), (3599, "1 h"), (3600, "1 h"), (5400, "1 h 30 min"), (7300, "2 h 2 min")],
)
def test_durations_are_whole_minutes(seconds: float, words: str) -> None:
    assert duration_words(seconds) == words


def test_what_is_left_takes_as_long_as_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    left = TimeLeft(20, done=5, began=400.0)  # ten minutes
    assert left.words(10) == "; about 20 min left"
    assert left.words(20) == ""
    assert TimeLeft(20, began=999.0).words(10) == "", "a second is not worth words"


def test_clients_of_several_clusters_are_named() -> None:
    assert cluster_lines({0: 0, 1: 0}) == []
    assert cluster_lines({2: 1, 0: 0, 1: 1}, ["a", "b", "c"]) == ["cluster 0 (1 client): a", "cluster 1 (2 clients): b, c"]
    assert cluster_lines(dict.fromkeys(range(NAMED + 2), 0) | {99: 1})[0].endswith(" and 2 more")
