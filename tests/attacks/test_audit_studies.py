"""The studies of false alarms and of planted leaks: what an adversary sees in them, and how results are counted."""

from benchmarks.false_alarms import configured, two_populations
from benchmarks.planted_leaks import OPEN, SEEDS, shares
from cflpriv.types import Population


def samples(people: Population) -> tuple[set[bytes], set[bytes]]:
    """The training and test samples of all clients."""
    trained = {sample.tobytes() for client in people.clients for sample in client.x_train}
    return trained, {sample.tobytes() for client in people.clients for sample in client.x_test}


def test_the_run_that_is_seen_has_trained_on_no_sample_of_the_run_audited() -> None:
    """Else membership is no false alarm: the digits have one split, so two runs on all of them train on the same samples."""
    mine, other = two_populations(configured(1, 7).data)
    (trained, tested), (theirs, their_tests) = samples(mine), samples(other)
    assert not (trained | tested) & (theirs | their_tests)
    assert not trained & tested
    assert [client.id for client in mine.clients] == [client.id for client in other.clients]
    assert mine.groups == other.groups
    again, _ = two_populations(configured(1, 8).data)
    assert samples(again)[0] != trained, "each seed has a split of its own"


def test_leaks_are_planted_in_runs_without_protection() -> None:
    assert SEEDS == 5
    assert {configured(number, 0).protection.name for number in OPEN} == {"none"}


def test_figures_without_a_leak_of_known_size_are_counted_apart() -> None:
    statuses = ["leaks", "leaks", "leaks", "inconclusive", "not_validated", "nothing_to_see"]
    rows = [{"figures": {str(i): {"status": status} for i, status in enumerate(statuses)}}]
    words = shares(rows)
    assert "1 of 4 inconclusive" in words
    assert "3 of 4 leaks [0.194, 0.994]" in words
    assert words.endswith("2 figures without a leak of known size")
