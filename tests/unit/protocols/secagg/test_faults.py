"""One dishonest client: never a wrong sum, never a wrong name, no more than the failure that is stated. `faults` is the long run."""

import copy
import pickle
import random
from collections.abc import Callable, Sequence
from threading import Barrier, Thread
from time import sleep
from typing import Any

import msgspec
import numpy as np
import pytest

from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import ProtocolError, RemoteError, SumFailed, TooFewClients
from cflpriv.protocols.secagg import Contribution, MaskKey, Server, Sum, Terms, counts_of, retaken
from cflpriv.protocols.secagg import client as client_module
from cflpriv.protocols.secagg import messages as m
from cflpriv.protocols.secagg.complaints import most_openings

from .faults import (
    attempt,
    changed_boxes,
    check,
    false_complaint,
    false_opening,
    fuzz,
    honest_sum,
    mixed_polynomials,
    on,
    other_secret,
    silent,
    wrong_commitment,
    wrong_share,
)
from .scene import Play, client, identities, levels, policy, roster, terms

MODES = ("active", "passive")
BAD_BOX = on(m.Shares, changed_boxes("box"))


@pytest.mark.slow
def test_random_faults_of_one_client() -> None:
    endings = fuzz(300)
    assert endings["sum"] > 100
    assert endings["again"] > 30
    assert endings["false-secret"] > 0


@pytest.mark.slow
def test_ten_thousand_random_faults_of_one_client() -> None:
    assert sum(fuzz(10_000, 1_000).values()) == 10_000


# --- each fault, and what comes of it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("faults", [{"Reveal": on(m.Reveal, wrong_share)}, {"Shares": BAD_BOX}, {"Masked": on(m.Masked, false_complaint)}])
def test_a_wrong_share_a_bad_box_and_a_false_complaint_cost_nothing(mode: str, faults: dict[str, Any]) -> None:
    """Before, the first gave a wrong sum, and the second none."""
    ended = attempt(terms(6, mode), 2, faults, {}, 7)
    assert ended.error is None
    assert ended.play.server.result.survivors == (0, 1, 2, 3, 4, 5)
    assert ended.play.server.result.block().tolist() == honest_sum(ended).tolist()
    assert ended.play.server.result.clipped_clients == 0
    assert ended.refused == ({2: "wrong-share"} if "Reveal" in faults else {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("opening", "offenders", "absent"), [(on(m.Opening, false_opening), (2,), ()), (silent, (), (2,))])
def test_who_cannot_open_its_shares_is_left_out_before_anything_is_revealed(
    mode: str, opening: Any, offenders: tuple[int, ...], absent: tuple[int, ...]
) -> None:
    agreed = terms(6, mode)
    ended = attempt(agreed, 2, {"Shares": BAD_BOX, "Opening": opening}, {}, 7)
    assert isinstance(ended.error, SumFailed)
    assert (ended.error.offenders, ended.error.absent, ended.error.repeatable) == (offenders, absent, True)
    assert all(machine.stage.value in ("masked", "complained") for machine in ended.play.clients.values())
    again = retaken(agreed, (*offenders, *absent))
    assert (again.cohort, again.slot, again.levels) == ((0, 1, 3, 4, 5), (5, 1), agreed.levels)
    assert check(again, -1, {}, {}, 8) == "sum"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("faults", "drops"),
    [
        ({"Shares": on(m.Shares, wrong_commitment)}, {}),
        ({"Shares": on(m.Shares, other_secret(0))}, {}),
        ({"Shares": on(m.Shares, other_secret(1)), "Masked": silent}, {}),
    ],
)
def test_who_deals_shares_of_another_secret_is_named_and_there_is_no_sum(mode: str, faults: dict[str, Any], drops: dict[int, str]) -> None:
    ended = attempt(terms(6, mode), 2, faults, drops, 7)
    assert isinstance(ended.error, SumFailed)
    assert (ended.error.code, ended.error.offenders, ended.error.repeatable) == ("false-secret", (2,), False)
    with pytest.raises(ProtocolError, match="no-result"):
        _ = ended.play.server.result


def test_shares_of_mixed_polynomials_never_give_a_wrong_sum() -> None:
    endings = {check(terms(6, "passive"), 2, {"Shares": on(m.Shares, mixed_polynomials)}, {}, seed) for seed in range(20)}
    assert endings == {"false-secret"}


def test_a_second_complaint_is_no_answer() -> None:
    again: list[bytes] = []

    def stubborn(one: Any, data: bytes) -> bytes:
        if one.play.server.stage.value == "masking":
            again.append(on(m.Masked, false_complaint)(one, data))
        return again[0]

    ended = attempt(terms(6, "passive"), 2, {"Masked": stubborn}, {}, 7)
    assert ended.error is None
    assert ended.refused == {2: "wrong-stage"}
    assert ended.play.server.result.survivors == (0, 1, 3, 4, 5)


# --- what a lying server gains from complaints ------------------------------------------------------------


@pytest.mark.parametrize("n", range(3, 40))
def test_openings_and_colluders_together_are_too_few_for_a_secret(n: int) -> None:
    for mode in MODES:
        agreed = terms(n, mode, sparse=False)
        colluders = (n - 1) // 3 if mode == "active" else 0
        assert most_openings(agreed) + colluders == agreed.threshold - 1
        assert most_openings(agreed) >= (colluders if mode == "active" else agreed.threshold - 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_client_opens_shares_once_and_to_few(mode: str) -> None:
    play = Play.of(terms(7, mode))
    play.close(play.until("Deliver"), {})
    machine, context = play.clients[0], m.context(play.agreed)
    most = most_openings(play.agreed)
    for accusers, code in (
        (range(1, most + 2), "too-many-complaints"),
        ((), "unknown-client"),
        ((0, 1), "unknown-client"),
        ((9,), "unknown-client"),
    ):
        before = machine.to_bytes()
        with pytest.raises(RemoteError, match=code):
            machine.receive(m.encode(m.Challenge(context, m.ids(accusers))))
        assert machine.to_bytes() == before
    dealt = {pair.peer: pair for pair in machine._state.dealt}
    opening = m.decode_client(machine.receive(m.encode(m.Challenge(context, m.ids([1])))))
    assert isinstance(opening, m.Opening)
    assert [(one.peer, one.self_share, one.key_share) for one in opening.shares] == [(1, dealt[1].self_share, dealt[1].key_share)]
    assert not any(pair.self_share in machine.to_bytes() for pair in dealt.values())
    with pytest.raises(RemoteError, match="wrong-stage"):
        machine.receive(m.encode(m.Challenge(context, m.ids([2]))))


def test_what_settles_a_complaint_is_signed_by_the_dealer() -> None:
    play = Play.of(terms(4, "active"))
    outbox = play.until("Deliver")
    message = m.decode_server(outbox[0])
    assert isinstance(message, m.Deliver)
    spoilt = tuple(msgspec.structs.replace(box, box=bytes(len(box.box))) for box in message.boxes[:1])
    outbox[0] = m.encode(msgspec.structs.replace(message, boxes=(*spoilt, *message.boxes[1:])))
    play.close(outbox, {})
    play.close(play.open(), {})
    settle = m.decode_server(play.open()[0])
    assert isinstance(settle, m.Settle)
    (share,) = settle.shares
    machine = play.clients[0]
    for changed, code in (
        ((msgspec.structs.replace(share, self_share=bytes(33)),), "bad-signature"),
        ((msgspec.structs.replace(share, signature=b""),), "bad-signature"),
        ((msgspec.structs.replace(share, peer=2),), "wrong-shares"),
        ((), "wrong-shares"),
    ):
        before = machine.to_bytes()
        with pytest.raises(RemoteError, match=code):
            machine.receive(m.encode(msgspec.structs.replace(settle, shares=changed)))
        assert machine.to_bytes() == before
    assert isinstance(m.decode_client(machine.receive(m.encode(settle)), 1000), m.Masked)


# --- results ------------------------------------------------------------


def test_sums_outside_their_range_are_no_results() -> None:
    agreed = terms(4, "passive", weight_limit=1.0, dimension=2)
    most = 3 * agreed.levels
    good = np.array([most, -most, most, 3], np.int32)
    assert Sum(agreed, (0, 1, 2), good).clipped_clients == 3
    for place, value in ((0, most + 1), (1, -most - 1), (2, -1), (2, most + 1), (3, -1), (3, 4)):
        bad = good.copy()
        bad[place] = value
        with pytest.raises(ValueError, match="sum: "):
            Sum(agreed, (0, 1, 2), bad)
    counts = terms(4, "passive", levels=1, dimension=2, bits=16)
    assert counts_of(Sum(counts, (0, 1, 2), np.array([0, 3, 0], np.int32))) == (0, 3)
    with pytest.raises(SumFailed, match="out-of-range"):
        counts_of(Sum(counts, (0, 1, 2), np.array([-1, 3, 0], np.int32)))


def test_a_vector_of_noise_is_an_error() -> None:
    def noise(one: Any, masked: m.Masked) -> m.Masked:
        return msgspec.structs.replace(masked, vector=random.Random(1).randbytes(len(masked.vector)))

    ended = attempt(terms(5, "passive"), 2, {"Masked": on(m.Masked, noise)}, {}, 7)
    assert isinstance(ended.error, SumFailed)
    assert (ended.error.code, ended.error.offenders, ended.error.repeatable) == ("out-of-range", (), False)


# --- a sum taken again ------------------------------------------------------------


def test_who_goes_is_taken_off_every_block() -> None:
    agreed: Terms = terms(8, "passive", weight_limit=1.0, min_cohort=3, blocks=((0, 5), (2, 3)))
    again = retaken(agreed, (7,))
    assert again.blocks == ((0, 4),)
    with pytest.raises(TooFewClients):
        retaken(agreed, (5, 6, 7))
    with pytest.raises(TooFewClients):
        retaken(terms(4, "passive", min_cohort=3), (0, 1))


def test_a_large_cohort_stays_on_a_sparse_graph() -> None:
    agreed = terms(60, "passive")
    again = retaken(agreed, (3,), public_entropy("again"))
    assert again.degree < 58
    assert len(again.graph_seed) == 16
    small = retaken(agreed, range(30), public_entropy("again"))
    assert (small.degree, small.graph_seed) == (29, b"")


# --- threads and copies ------------------------------------------------------------


def both(first: Callable[[], object], second: Callable[[], object]) -> list[object]:
    """What two threads get that begin together: results or errors."""
    barrier, got = Barrier(2), []

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            got.append(call())
        except ProtocolError as error:
            got.append(error)

    threads = [Thread(target=run, args=(call,)) for call in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def slowly(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Makes both threads pass every check before either of them changes anything, unless something holds one back."""
    true = getattr(module, name)

    def slow(*given: Any, **named: Any) -> Any:
        sleep(0.05)
        return true(*given, **named)

    monkeypatch.setattr(module, name, slow)


def test_of_two_threads_one_gets_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play.of(terms(5, "active"))
    outbox = play.until("Survivors")
    truth = m.decode_server(outbox[0])
    assert isinstance(truth, m.Survivors)
    lie = m.encode(m.Survivors(truth.context, m.ids([0, 1, 2, 4])))
    slowly(monkeypatch, client_module, "sign")
    got = both(lambda: play.clients[0].receive(outbox[0]), lambda: play.clients[0].receive(lie))
    assert sorted(type(one).__name__ for one in got) == ["RemoteError", "bytes"]


def test_of_two_threads_one_gets_the_mask_key_and_one_takes_it() -> None:
    for _ in range(20):
        play = Play.of(terms(3, "passive", following=(6, 0)))
        play.close(play.until("Deliver"), {})
        got = both(play.clients[0].next_mask_key, play.clients[0].next_mask_key)
        assert sorted(type(one).__name__ for one in got) == ["MaskKey", "NoneType"]
        (key,) = [one for one in got if isinstance(one, MaskKey)]
        assert sorted(type(one).__name__ for one in both(key.take, key.take)) == ["LocalError", "tuple"]


def test_of_two_answers_of_one_client_the_server_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play.of(terms(4, "passive"))
    outbox = play.until("Deliver")
    replies = {number: machine.receive(outbox[number], *play.values(number)) for number, machine in play.clients.items()}
    slowly(monkeypatch, np, "frombuffer")
    got = both(lambda: play.server.receive(0, replies[0]), lambda: play.server.receive(0, replies[0]))
    assert sorted(type(one).__name__ for one in got) == ["RemoteError", "str"]
    monkeypatch.undo()
    for number in (1, 2, 3):
        play.server.receive(number, replies[number])
    play.finish()
    assert play.server.result.block().tolist() == np.sum([levels(i, 10, play.agreed.levels) for i in range(4)], axis=0).tolist()


def test_machines_are_neither_copied_nor_pickled() -> None:
    agreed = terms(3, "active")
    machines: Sequence[object] = (client(agreed, 0), Server(agreed, roster=roster()), identities()[0])
    for machine in machines:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                duplicate(machine)


def test_a_policy_bounds_what_a_server_proposes() -> None:
    agreed = terms(5, "passive", weight_limit=1.0, blocks=((0, 5), (1, 5)))
    for bound in ({"clip": (2.0, 3.0)}, {"clip": (0.1, 0.5)}, {"levels": agreed.levels + 1}, {"clients": 4}, {"length": 22}):
        machine = client(agreed, 0, **bound)
        with pytest.raises(RemoteError, match="bad-terms"):
            machine.receive(m.encode(m.Invite(agreed)))
    assert client(agreed, 0, length=23, clients=5, levels=agreed.levels).receive(m.encode(m.Invite(agreed)))
    chosen = policy(agreed)
    assert chosen.clip == (1.0, 1.0)
    assert Contribution(np.zeros(1)).weight == 1.0
