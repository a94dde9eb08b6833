"""The studies of false alarms and of planted leaks: what an adversary sees in them, and how results are counted."""

from benchmarks.false_alarms import configured, two_populations
from benchmarks.planted_leaks import OPEN, SEEDS, planted, shares
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


def test_whether_a_leak_was_planted_is_read_off_the_other_audit_of_the_pair() -> None:
    """Two audits of one setting, one of another, which has none beside it."""
    first = {"a": "leaks", "b": "leaks", "c": "inconclusive", "d": "not_validated"}
    second = {"a": "leaks", "b": "inconclusive", "c": "leaks"}
    rows = [
        {"audit": number, "figures": {name: {"status": status, "size": 0.5, "p": p} for name, status in figures.items()}}
        for number, figures, p in ((0, first, 1e-3), (1, first, 1e-3), (len(OPEN), second, 1e-5))
    ]
    unclear, clear = [("inconclusive", 0.5, False), ("leaks", 0.5, False)], [("inconclusive", 0.5, True), ("leaks", 0.5, True)]
    assert sorted(planted(rows)) == sorted(unclear + clear)
    words = shares(rows)
    assert "clear ones: 1 of 2 inconclusive [0.013, 0.987], 1 of 2 leaks [0.013, 0.987]" in words
    assert "planted leaks: 2 of 4 inconclusive [0.068, 0.932], 2 of 4 leaks [0.068, 0.932]" in words
    assert "by their own reference: 3 of 9 inconclusive" in words
