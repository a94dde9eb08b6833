"""One sum for each value: what a client's record of sums lets its machines open."""

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest

from cflpriv.protocols.errors import MalformedMessage, RemoteError
from cflpriv.protocols.secagg import (
    Client,
    ClientStage,
    Contribution,
    Outcome,
    SumRecord,
    Terms,
    block_terms,
    count_terms,
    membership,
    simulate,
    summed,
)
from cflpriv.protocols.secagg import messages as m
from cflpriv.protocols.secagg.summed import MOST_NUMBERS, Value

from .scene import MODEL, SESSION, identities, policy, roster, terms

N = 8
SLOT = iter((number, 0) for number in range(1000, 100_000))


def agreed(mode: str = "active", **changes: Any) -> Terms:
    """Terms of the next slot for clients 0 … 7, of whom 3 at least survive."""
    return terms(N, mode, **{"slot": next(SLOT), "min_cohort": 3, "levels": 1 << 20, **changes})


def sum_of(
    proposed: Terms, records: dict[int, SumRecord], names: tuple[summed.Name, ...] = (0,), drops: Sequence[int] = (),
    weight: Callable[[int], float] = lambda i: 40.0 + i, **changes: Any,
) -> Outcome:  # fmt: skip
    """A sum of values of these names, by clients with these records."""
    blocks: list[int | None] = [cluster for cluster, _ in proposed.blocks]
    return simulate(
        proposed, {i: identities()[i] for i in proposed.cohort},
        lambda i: [Contribution(np.full(10, 0.01 * (i + 1)), weight(i), cluster) for cluster in (blocks or [None])],
        roster=roster() if proposed.mode == "active" else None, records=records,
        policy=lambda i: policy(
            proposed, **{"max_weight": 60.0, "names": names, "clip": (1e-6, 1e6), "levels": 1, "most_error": math.inf, **changes}
        ),
        drops=dict.fromkeys(drops, "Masked"),
    )  # fmt: skip


def fresh() -> dict[int, SumRecord]:
    return {i: SumRecord() for i in range(N)}


WEIGHTED: dict[str, Any] = {"weight_limit": 60.0, "least_weight": 30.0}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another limit": ({"weight_limit": 60.0, "least_weight": 60.0}, {"weight_limit": 50.0, "least_weight": 50.0}),
    "another least weight": (WEIGHTED, {"weight_limit": 60.0, "least_weight": 31.0}),
    "equal and then by counts": ({"weight_limit": 60.0, "least_weight": 60.0}, WEIGHTED),
    "weighted and then unweighted": (WEIGHTED, {}),
    "unweighted and then weighted": ({}, WEIGHTED),
    "another clip": ({}, {"clip": 0.5}),
    "a clip that differs in the last digit": ({}, {"clip": float(np.nextafter(1.0, 2.0))}),
    "other levels": ({}, {"levels": (1 << 20) - 1}),
    "other bits": ({"levels": 1 << 10}, {"levels": 1 << 10, "bits": 16}),
    "blocks": ({"weight_limit": 1.0, "least_weight": 1.0}, {"weight_limit": 1.0, "least_weight": 1.0, "blocks": ((0, N),)}),
    "counts": ({}, {"levels": 1, "bits": 16}),
}


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_second_sum_of_a_value_has_the_same_settings(change: str, mode: str) -> None:
    first, second = CHANGES[change]
    records = fresh()
    sum_of(agreed(mode, **first), records)
    with pytest.raises(RemoteError, match="second-sum"):
        sum_of(agreed(mode, **second), records)
    assert sum_of(agreed(mode, **first), records).sum.survivors == tuple(range(N)), "the same sum again"
    sum_of(agreed(mode, **second), records, names=(1,))


def test_its_own_weight_stays() -> None:
    records = fresh()
    sum_of(agreed(**WEIGHTED), records)
    with pytest.raises(RemoteError, match="second-sum"):
        sum_of(agreed(**WEIGHTED), records, weight=lambda i: 41.0 + i)
    sum_of(agreed(**WEIGHTED), records)


def test_the_form_in_which_it_is_contributed_stays() -> None:
    records = fresh()
    sum_of(agreed(), records, form=b"clipped to 1")
    with pytest.raises(RemoteError, match="second-sum"):
        sum_of(agreed(), records, form=b"clipped to 2")


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_and_the_survivors(mode: str) -> None:
    records = fresh()
    sum_of(agreed(mode), records, drops=[7])
    for cohort, drops in ((range(7), [6]), (range(8), []), (range(6), [])):
        with pytest.raises(RemoteError, match="second-sum"):
            sum_of(agreed(mode, cohort=cohort), records, drops=drops)
    assert sum_of(agreed(mode, cohort=range(7)), records).sum.survivors == tuple(range(7))
    assert sum_of(agreed(mode), records, drops=[7]).sum.survivors == tuple(range(7))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ((0,), (0, 1), True), ((0, 1), (1,), True), ((0,), (1,), False), ((b"model",), (b"model", 3), True),
        ((b"model",), (b"other",), False),
        ((0,), (b"\0",), False), ((), (), True), ((), (MODEL,), True), ((3, b"model"), (4,), False),
    ],
)  # fmt: skip
def test_values_that_share_a_name_are_one_value(first: tuple[summed.Name, ...], second: tuple[summed.Name, ...], same: bool) -> None:
    records = fresh()
    sum_of(agreed(), records, names=first)
    if same:
        with pytest.raises(RemoteError, match="second-sum"):
            sum_of(agreed(cohort=range(7)), records, names=second)
    else:
        sum_of(agreed(cohort=range(7)), records, names=second)


def test_of_two_names_that_went_into_different_sums_none_is_opened() -> None:
    records = fresh()
    sum_of(agreed(), records, names=(0,))
    sum_of(agreed(cohort=range(6)), records, names=(1,))
    for cohort in (range(8), range(6)):
        with pytest.raises(RemoteError, match="second-sum"):
            sum_of(agreed(cohort=cohort), records, names=(0, 1))


def test_a_sum_that_failed_before_shares_were_revealed_is_taken_again_under_any_terms() -> None:
    records, proposed = fresh(), agreed()
    with pytest.raises(Exception, match="too few"):
        sum_of(proposed, records, drops=[2, 3, 4, 5, 6, 7])
    sum_of(agreed(cohort=range(6), clip=0.5), records)


def test_a_record_outlives_its_process_and_is_not_copied() -> None:
    records = fresh()
    sum_of(agreed(**WEIGHTED), records, names=(3, b"model"), drops=[7])
    stored = {i: record.to_bytes() for i, record in records.items()}
    again = {i: SumRecord.from_bytes(data) for i, data in stored.items()}
    assert {i: record.to_bytes() for i, record in again.items()} == stored
    for names in ((3,), (b"model",)):
        with pytest.raises(RemoteError, match="second-sum"):
            sum_of(agreed(**WEIGHTED), {i: SumRecord.from_bytes(data) for i, data in stored.items()}, names=names)
        sum_of(agreed(**WEIGHTED, cohort=range(7)), {i: SumRecord.from_bytes(data) for i, data in stored.items()}, names=names)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            attempt(records[0])
    for bad in (b"", stored[0][:-1], policy_bytes()):
        with pytest.raises(MalformedMessage):
            SumRecord.from_bytes(bad)
    assert repr(records[0]) == "SumRecord(2 names)"


def policy_bytes() -> bytes:
    return m.encode(policy(terms(3, "passive")))


def test_there_is_no_machine_without_a_record() -> None:
    proposed = terms(3, "passive")
    with pytest.raises(TypeError, match="record"):
        Client(identities()[0], policy(proposed))  # type: ignore[call-arg]
    for wrong in (None, object(), b""):
        with pytest.raises(TypeError, match="record: expected SumRecord"):
            Client(identities()[0], policy(proposed), record=wrong)  # type: ignore[arg-type]
        machine = Client(identities()[0], policy(proposed), record=SumRecord()).to_bytes()
        with pytest.raises(TypeError, match="record: expected SumRecord"):
            Client.from_bytes(machine, identities()[0], record=wrong)  # type: ignore[arg-type]


def test_of_two_machines_at_once_one_reveals() -> None:
    """The record is checked and written in one step, before shares leave."""
    record, machines, sent = SumRecord(), [], []
    for cohort in (range(5), range(4)):
        from .scene import Play

        play = Play.of(terms(len(cohort), "passive", slot=next(SLOT), min_cohort=2))
        play.clients[0] = Client(identities()[0], policy(play.agreed, names=(0,)), record=record)
        outbox = play.until("Unmask")
        machines.append(play.clients[0])
        sent.append(outbox[0])
    assert isinstance(m.decode_client(machines[1].receive(sent[1])), m.Reveal)
    with pytest.raises(RemoteError, match="second-sum"):
        machines[0].receive(sent[0])
    assert (machines[0].stage, machines[1].stage) == (ClientStage.MASKED, ClientStage.DONE)


def test_numbers_are_forgotten_from_the_smallest_and_then_refused() -> None:
    record, proposed = SumRecord(), agreed()
    for first in range(0, MOST_NUMBERS + 1, 64):  # the last alone
        names = tuple(range(first, min(first + 64, MOST_NUMBERS + 1)))
        record.enter(Value(names), proposed, (0, 1, 2), (1.0,))
    for names in ((0,), (-1,), (-5, 1)):
        with pytest.raises(RemoteError, match="second-sum"):
            record.check_proposed(Value(names), proposed)
        with pytest.raises(RemoteError, match="second-sum"):
            SumRecord.from_bytes(record.to_bytes()).check_survivors(Value(names), proposed, (0, 1, 2), (1.0,))
    record.check_survivors(Value((1, MOST_NUMBERS)), proposed, (0, 1, 2), (1.0,))
    record.check_survivors(Value((MOST_NUMBERS + 1,)), proposed, (0, 1), (1.0,))


def test_no_digest_is_forgotten_and_a_full_record_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed, "MOST_DIGESTS", 3)
    record, proposed = SumRecord(), agreed()
    for name in (b"a", b"b", b"c"):
        record.enter(Value((name,)), proposed, (0, 1, 2), (1.0,))
    with pytest.raises(RemoteError, match="second-sum"):
        record.check_proposed(Value((b"d",)), proposed)
    record.check_proposed(Value((b"a",)), proposed)
    record.check_proposed(Value((7,)), proposed)


def counted_as(labels: Sequence[int], records: dict[int, SumRecord]) -> Outcome:
    """The counts of the first of two oblivious sums."""
    counts = count_terms(session=SESSION, slot=next(SLOT), cohort=range(len(labels)), models=[MODEL], clusters=2, roster=roster())
    return simulate(
        counts, {i: identities()[i] for i in counts.cohort}, lambda i: membership(2, [labels[i]]), roster=roster(), records=records,
        policy=lambda i: policy(counts, names=(0,)),
    )  # fmt: skip


def test_counts_and_blocks_of_an_oblivious_sum() -> None:
    """Counts are another value, with another record; the blocks that are open may change, as the clients' own choices do."""
    counting, adding = fresh(), fresh()
    for labels in ([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]):
        counted = counted_as(labels, counting).sum
        sum_of(block_terms(counted, slot=next(SLOT), models=[MODEL], dimension=10, clip=1.0, roster=roster()), adding)
    with pytest.raises(RemoteError, match="second-sum"):
        counted_as([0] * 7, counting)


@pytest.mark.parametrize(("first", "second"), list(product([range(8), range(7), range(5), range(3, 8)], repeat=2)))
def test_successive_sums_differ_by_nobody_or_by_so_many(first: range, second: range) -> None:
    records = fresh()
    sum_of(agreed(cohort=first), records, names=(0,), cohort_change=3)
    differences = (len(set(first) - set(second)), len(set(second) - set(first)))
    in_both = set(first) & set(second)
    if all(number == 0 or number >= 3 for number in differences):
        sum_of(agreed(cohort=second), records, names=(1,), cohort_change=3)
    else:
        assert in_both
        with pytest.raises(RemoteError, match="cohort-change"):
            sum_of(agreed(cohort=second), records, names=(1,), cohort_change=3)
    sum_of(agreed(cohort=second), records, names=(2,), cohort_change=0)


def test_terms_that_change_between_stages_are_other_terms() -> None:
    """The least weight is in the context that keys are bound to."""
    proposed = agreed(**WEIGHTED)
    assert m.context(proposed) != m.context(msgspec.structs.replace(proposed, least_weight=30.5))
