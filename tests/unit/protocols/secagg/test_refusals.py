"""What must be refused is refused, by an error of the right kind, and the machine that refused is byte for byte the one it was."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import LocalError, MalformedMessage, ProtocolError, RemoteError, TooFewClients
from cflpriv.protocols.keys import Identity, Roster, public_key
from cflpriv.protocols.secagg import (
    CLIENT,
    SERVER,
    Client,
    ClientStage,
    Contribution,
    MaskKey,
    Policy,
    Server,
    ServerStage,
    SumRecord,
    Terms,
    make_terms,
)
from cflpriv.protocols.secagg import messages as m
from cflpriv.protocols.secagg.terms import MOST_CLIENTS

from .scene import MODEL, SESSION, Play, client, complaint, identities, levels, policy, resealed, roster, terms

MODES = ("active", "passive")


def refuses(machine: Client, data: bytes, code: str | None = None, error: type[ProtocolError] = RemoteError) -> None:
    """The client refuses `data` and does not change."""
    before = machine.to_bytes()
    values = [Contribution(np.zeros(10))] if machine.wants_values else []
    with pytest.raises(error) as caught:
        machine.receive(data, *values)
    assert code is None or caught.value.code == code, caught.value.code
    assert machine.to_bytes() == before


def server_refuses(server: Server, sender: int, data: bytes, code: str | None = None) -> None:
    """The server refuses `data` and does not change."""
    before = server.to_bytes()
    with pytest.raises(RemoteError) as caught:
        server.receive(sender, data)
    assert code is None or caught.value.code == code, caught.value.code
    assert server.to_bytes() == before


def spoilt(data: bytes) -> list[bytes]:
    """Every single-bit flip and every truncation, and bytes behind the end."""
    flips = [data[: i // 8] + bytes([data[i // 8] ^ 1 << i % 8]) + data[i // 8 + 1 :] for i in range(8 * len(data))]
    return [*flips, *(data[:length] for length in range(len(data))), data + b"\x00", data + data]


def stages(mode: str, n: int = 3) -> list[tuple[Play, dict[int, bytes]]]:
    """One run per stage, stopped with that stage's messages undelivered."""
    kinds = [row[1] for row in SERVER[mode].values() if row[1] is not None]
    plays = []
    for kind in kinds:
        play = Play.of(terms(n, mode, dimension=2, following=(6, 0)))
        plays.append((play, play.until(kind)))
    return plays


@pytest.mark.parametrize("mode", MODES)
def test_every_bit_flip_and_truncation_is_refused_by_both_sides(mode: str) -> None:
    for play, outbox in stages(mode):
        machine = play.clients[0]
        before = machine.to_bytes()
        for bad in spoilt(outbox[0]):
            with pytest.raises(MalformedMessage):
                machine.receive(bad)
        assert machine.to_bytes() == before
        reply = machine.receive(outbox[0], *([Contribution(np.zeros(2))] if machine.wants_values else []))
        before = play.server.to_bytes()
        for bad in spoilt(reply):
            with pytest.raises(MalformedMessage):
                play.server.receive(0, bad)
        assert play.server.to_bytes() == before
        play.server.receive(0, reply)


@pytest.mark.slow
def test_flips_by_an_enemy_who_mends_the_checksum_are_refused() -> None:
    """Against an active server, once the terms stand, no bit of what a client is sent can be changed; nor of what clients sign."""
    accepted: list[str] = []
    for play, outbox in stages("active"):
        kind = type(m.decode_server(outbox[0])).__name__
        machine = play.clients[0]
        before = machine.to_bytes()
        # An Invite *defines* the terms, and a lie about survivors must be accepted here and found out at Unmask (tested below).
        # A box or digest that was changed gets a complaint in place of the vector.
        if kind not in ("Invite", "Survivors"):
            for bad in spoilt(outbox[0])[: 8 * (len(outbox[0]) - 16)]:
                try:
                    reply = machine.receive(resealed(bad), *([Contribution(np.zeros(2))] if kind == "Deliver" else []))
                except ProtocolError:
                    assert machine.to_bytes() == before
                else:
                    assert kind == "Deliver"
                    assert isinstance(m.decode_client(reply), m.Complaint)
                    machine = Client.from_bytes(before, identities()[0], roster=roster(), entropy=machine._entropy, record=SumRecord())
            accepted.append(kind)
        reply = machine.receive(outbox[0], *([Contribution(np.zeros(2))] if machine.wants_values else []))
        if type(m.decode_client(reply, 100)).__name__ in ("Advert", "Consistent"):
            before = play.server.to_bytes()
            for bad in spoilt(reply)[: 8 * (len(reply) - 16)]:
                with pytest.raises(RemoteError):
                    play.server.receive(0, resealed(bad))
            assert play.server.to_bytes() == before
    assert accepted == ["Adverts", "Deliver", "Unmask"]


@pytest.mark.parametrize("mode", MODES)
def test_replays_and_reorderings_are_refused(mode: str) -> None:
    finished = Play.of(terms(4, mode, following=(6, 0)))
    finished.finish()
    fresh = Play.of(finished.agreed)
    for kind in [row[0] for row in CLIENT[mode].values()]:
        outbox = fresh.until(kind)
        for (other, number), data in finished.down.items():
            if number == 0 and other != kind:
                refuses(fresh.clients[0], data, "wrong-stage")
        for (other, number), data in finished.up.items():
            if other != SERVER[mode][fresh.server.stage][0]:
                server_refuses(fresh.server, number, data, "wrong-stage")
        fresh.close(outbox, {})
        refuses(fresh.clients[0], outbox[0], "wrong-stage")
        sent = str(SERVER[mode][fresh.server.stage][0])
        server_refuses(fresh.server, 0, fresh.up[sent, 0], "replay")
        server_refuses(fresh.server, 1, fresh.up[sent, 0], "wrong-sender")
        server_refuses(fresh.server, 9, fresh.up[sent, 0], "unknown-client")
    assert fresh.server.advance() == {}
    refuses(fresh.clients[0], fresh.down["Unmask", 0], "wrong-stage")
    with pytest.raises(RemoteError, match="wrong-stage"):
        fresh.server.receive(0, fresh.up["Reveal", 0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "other", [{"session": b"another session!"}, {"slot": (5, 1)}, {"slot": (6, 0)}, {"clip": 2.0}, {"min_cohort": 3}, {"cohort": range(5)}]
)
def test_messages_of_another_sum_are_refused(mode: str, other: dict[str, object]) -> None:
    """Another session, round, sum, or the same with any other terms; both runs have reached the same stage."""
    theirs = Play.of(terms(4, mode, **other), "theirs")
    theirs.finish()
    ours = Play.of(terms(4, mode))
    for kind in [row[0] for row in CLIENT[mode].values()]:
        outbox = ours.until(kind)
        sent = str(SERVER[mode][ours.server.stage][0])
        if kind != "Invite":
            refuses(ours.clients[0], theirs.down[kind, 0], "wrong-context")
        if sent != "Advert" or "session" in other or "slot" in other:
            server_refuses(ours.server, 0, theirs.up[sent, 0], "wrong-context")
        ours.close(outbox, {})


@pytest.mark.parametrize("mode", MODES)
def test_messages_of_an_earlier_run_under_the_same_terms_do_not_open(mode: str) -> None:
    """A server that runs the same terms twice finds every client with new keys: old boxes and signatures do not fit."""
    old, new = Play.of(terms(4, mode), "old"), Play.of(terms(4, mode), "new")
    old.finish()
    new.until("Deliver")
    assert complaint(new.clients[0], old.down["Deliver", 0]) == (1, 2, 3)


@pytest.mark.parametrize("mode", MODES)
def test_an_old_advert_for_the_same_slot_is_found_out_before_anything_is_masked(mode: str) -> None:
    """Key confirmation: client 0 is shown the mask key that client 1 had in another run (and whose seed the server may know)."""
    old, new = Play.of(terms(4, mode), "old"), Play.of(terms(4, mode), "new")
    old.finish()
    outbox = new.until("Adverts")
    message = m.decode_server(outbox[0])
    assert isinstance(message, m.Adverts)
    stale = m.decode_client(old.up["Advert", 1])
    assert isinstance(stale, m.Advert)
    swapped = tuple(stale if advert.client == 1 else advert for advert in message.adverts)
    outbox[0] = m.encode(msgspec.structs.replace(message, adverts=swapped))
    new.close(outbox, {})
    delivered = new.open()
    for number in (0, 1):
        assert complaint(new.clients[number], delivered[number]) == (1 - number,)
    if mode == "active":
        # What settles the complaint names the keys as well, so it does not fit either.
        for number, data in delivered.items():
            if number > 1:
                new.server.receive(number, new.clients[number].receive(data, *new.values(number)))
        for number in (0, 1):
            accused = m.encode(m.Complaint(number, m.context(new.agreed), m.ids([1 - number])))
            new.server.receive(number, accused)
        opened = {number: m.decode_client(new.clients[number].receive(data)) for number, data in new.server.advance().items()}
        for number in (0, 1):
            opening = opened[1 - number]
            assert isinstance(opening, m.Opening)
            (share,) = opening.shares
            settle = m.Settle(opening.context, (msgspec.structs.replace(share, peer=1 - number),))
            refuses(new.clients[number], m.encode(settle), "bad-signature")


def test_substituted_keys_and_wrong_signatures() -> None:
    play = Play.of(terms(4, "active"))
    outbox = play.until("Adverts")
    message = m.decode_server(outbox[0])
    assert isinstance(message, m.Adverts)
    first = message.adverts[0]
    server_key = public_key(b"\x07" * 32)
    stranger = Identity.create(first.client, public_entropy("stranger"))
    foreign = Play(
        play.agreed,
        {},
        play.server,
        lambda _: [],
    )
    assert foreign.agreed is play.agreed
    forged = Client(
        stranger,
        policy(play.agreed),
        roster=Roster(tuple(stranger.public() if i == first.client else key for i, key in enumerate(roster().keys))),
        entropy=public_entropy("forged"),
        record=SumRecord(),
    )
    own_roster = Roster(tuple(stranger.public() if i == first.client else key for i, key in enumerate(roster().keys)))
    stranger_terms = msgspec.structs.replace(play.agreed, roster=own_roster.digest)
    by_stranger = m.decode_client(forged.receive(m.encode(m.Invite(stranger_terms))))
    assert isinstance(by_stranger, m.Advert)
    replace = msgspec.structs.replace
    for bad in (
        replace(first, mask_key=server_key),
        replace(first, encryption_key=server_key),
        replace(first, signature=bytes(64)),
        replace(first, signature=b""),
        replace(first, signature=message.adverts[1].signature),
        by_stranger,
    ):
        refuses(play.clients[0], m.encode(replace(message, adverts=(bad, *message.adverts[1:]))), "bad-signature")
    refuses(play.clients[0], m.encode(replace(message, adverts=message.adverts[:1])), error=TooFewClients)
    outsider = replace(first, client=7)
    refuses(play.clients[0], m.encode(replace(message, adverts=(*message.adverts, outsider))), "unknown-client")


def test_substituted_keys_in_passive_mode_are_found_out_by_key_confirmation() -> None:
    play = Play.of(terms(3, "passive"))
    outbox = play.until("Adverts")
    message = m.decode_server(outbox[0])
    assert isinstance(message, m.Adverts)
    swapped = msgspec.structs.replace(message.adverts[0], mask_key=public_key(b"\x07" * 32))
    outbox[0] = m.encode(msgspec.structs.replace(message, adverts=(swapped, *message.adverts[1:])))
    play.close(outbox, {})
    for number, data in play.open().items():
        if number in (0, 1):
            assert complaint(play.clients[number], data) == (1 - number,)


@pytest.mark.parametrize("mode", MODES)
def test_keys_of_small_order_and_repeated_keys(mode: str) -> None:
    play = Play.of(terms(3, mode))
    outbox = play.until("Invite")
    adverts = {number: m.decode_client(machine.receive(outbox[number])) for number, machine in play.clients.items()}
    replace = msgspec.structs.replace
    first, second = adverts[0], adverts[1]
    assert isinstance(first, m.Advert)
    assert isinstance(second, m.Advert)
    if mode == "passive":
        server_refuses(play.server, 0, m.encode(replace(first, mask_key=bytes(32))), "bad-key")
        server_refuses(play.server, 0, m.encode(replace(first, encryption_key=b"\x01" + bytes(31))), "bad-key")
        server_refuses(play.server, 0, m.encode(replace(first, encryption_key=first.mask_key)), "repeated-key")
        play.server.receive(0, m.encode(first))
        server_refuses(play.server, 1, m.encode(replace(second, mask_key=first.mask_key)), "repeated-key")
        again = replace(second, mask_key=first.mask_key)
        refuses(play.clients[0], m.encode(m.Adverts(play.agreed, (again,))), "repeated-key")
        refuses(play.clients[0], m.encode(m.Adverts(play.agreed, (replace(second, encryption_key=bytes(32)),))), "bad-key")
        signed = replace(first, signature=bytes(64))
        server_refuses(play.server, 1, m.encode(replace(signed, client=1)), "unexpected-signature")
    else:
        server_refuses(play.server, 0, m.encode(replace(first, mask_key=bytes(32))), "bad-signature")


def deliver_with(play: Play, change: Callable[[m.Deliver], m.Deliver]) -> bytes:
    message = m.decode_server(play.until("Deliver")[0])
    assert isinstance(message, m.Deliver)
    return m.encode(change(message))


@pytest.mark.parametrize("mode", MODES)
def test_wrong_members_and_boxes(mode: str) -> None:
    replace = msgspec.structs.replace
    changes: list[tuple[Callable[[m.Deliver], m.Deliver], str]] = [
        (lambda d: replace(d, members=m.ids([1, 2, 3, 4])), "bad-members"),
        (lambda d: replace(d, members=m.ids(range(9))), "bad-members"),
        (lambda d: replace(d, members=m.ids(range(4))), "bad-members"),
        (lambda d: replace(d, boxes=d.boxes[1:]), "bad-members"),
        (lambda d: replace(d, members=d.members[:4] * 2 + d.members[4:]), "malformed"),
        (lambda d: replace(d, members=d.members[4:8] + d.members[:4] + d.members[8:]), "malformed"),
        (lambda d: replace(d, members=d.members + b"\x01"), "malformed"),
        (lambda d: replace(d, boxes=(d.boxes[0], *d.boxes)), "malformed"),
    ]
    play = Play.of(terms(5, mode))
    outbox = play.until("Deliver")
    message = m.decode_server(outbox[0])
    assert isinstance(message, m.Deliver)
    for change, code in changes:
        refuses(play.clients[0], m.encode(change(message)), code)
    refuses(play.clients[0], outbox[1], "bad-members")
    few = replace(message, members=m.ids([0, 1]), boxes=message.boxes[:1])
    refuses(play.clients[0], m.encode(few), error=TooFewClients)
    first, second = message.boxes[:2]
    swapped = replace(message, boxes=(replace(second, peer=1), replace(first, peer=2), *message.boxes[2:]))
    assert complaint(play.clients[0], m.encode(swapped)) == (1, 2)


def test_lies_about_survivors_unmask_nothing() -> None:
    """An active server tells client 0 that 3 is gone, and the others that everybody is there."""
    play = Play.of(terms(5, "active"))
    outbox = play.until("Survivors")
    truth = m.decode_server(outbox[0])
    assert isinstance(truth, m.Survivors)
    for bad, code in (([1, 2, 3, 4], "bad-survivors"), ([0, 1, 2, 3, 9], "bad-survivors")):
        refuses(play.clients[0], m.encode(m.Survivors(truth.context, m.ids(bad))), code)
    refuses(play.clients[0], m.encode(m.Survivors(truth.context, m.ids([0, 1, 2]))), error=TooFewClients)
    lie = m.Survivors(truth.context, m.ids([0, 1, 2, 4]))
    signed_lie = m.decode_client(play.clients[0].receive(m.encode(lie)))
    assert isinstance(signed_lie, m.Consistent)
    server_refuses(play.server, 0, m.encode(signed_lie), "bad-signature")
    signatures = []
    for number in (1, 2, 3, 4):
        reply = play.clients[number].receive(outbox[number])
        play.server.receive(number, reply)
        message = m.decode_client(reply)
        assert isinstance(message, m.Consistent)
        signatures.append(m.Signed(number, message.signature))
    unmask = next(iter(play.server.advance().values()))
    refuses(play.clients[0], unmask, "bad-survivors")
    told = m.decode_server(unmask)
    assert isinstance(told, m.Unmask)
    # Whatever mixture of the signatures it shows to client 0, they are over the other set.
    for some in (signatures, [m.Signed(0, signed_lie.signature), *signatures[:1], *signatures[3:]]):
        proof = m.Unmask(told.context, lie.survivors, tuple(some))
        refuses(play.clients[0], m.encode(proof))
    machine = play.clients[1]
    replace = msgspec.structs.replace
    refuses(machine, m.encode(replace(told, signatures=told.signatures[:3])), error=TooFewClients)
    refuses(machine, m.encode(replace(told, signatures=())), error=TooFewClients)
    refuses(machine, m.encode(replace(told, signatures=(told.signatures[0], *told.signatures))), "malformed")
    wrong = (m.Signed(1, bytes(64)), *told.signatures[1:])
    refuses(machine, m.encode(replace(told, signatures=wrong)), "bad-signature")
    moved = (m.Signed(0, told.signatures[0].signature), *told.signatures)
    refuses(machine, m.encode(replace(told, signatures=moved)), "bad-signature")
    machine.receive(unmask)
    assert machine.stage is ClientStage.DONE


@pytest.mark.parametrize("mode", MODES)
def test_both_shares_of_one_client_are_never_given(mode: str) -> None:
    """Each peer once, in one list or the other; a second question (3 lost, after 3 alive) is refused, and the shares are gone."""
    play = Play.of(terms(5, mode))
    outbox = play.until("Unmask", {4: "Masked"})
    machine = play.clients[0]
    question = m.decode_server(outbox[0])
    assert isinstance(question, m.Unmask)
    held = {bytes(held.self_share) for held in machine._state.held} | {bytes(held.key_share) for held in machine._state.held}
    reveal = m.decode_client(machine.receive(outbox[0]))
    assert isinstance(reveal, m.Reveal)
    assert [share.peer for share in reveal.self_shares] == [0, 1, 2, 3]
    assert [share.peer for share in reveal.key_shares] == [4]
    for survivors in ([0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2]):
        refuses(machine, m.encode(msgspec.structs.replace(question, survivors=m.ids(survivors))), "wrong-stage")
    assert not any(share in machine.to_bytes() for share in held)


def test_a_reveal_that_answers_the_wrong_question_is_refused_by_the_server() -> None:
    play = Play.of(terms(5, "passive"))
    outbox = play.until("Unmask", {4: "Masked"})
    reveal = m.decode_client(play.clients[0].receive(outbox[0]))
    assert isinstance(reveal, m.Reveal)
    replace = msgspec.structs.replace
    for bad in (
        replace(reveal, self_shares=reveal.self_shares[1:]),
        replace(reveal, key_shares=()),
        replace(reveal, key_shares=(*reveal.key_shares, m.Share(5, reveal.key_shares[0].share))),
        replace(reveal, self_shares=(*reveal.self_shares, m.Share(4, reveal.key_shares[0].share)), key_shares=()),
    ):
        server_refuses(play.server, 0, m.encode(bad), "wrong-shares")


@pytest.mark.parametrize("kind", ["self_shares", "key_shares"])
def test_a_wrong_share_is_refused_by_name_and_other_shares_do(kind: str) -> None:
    play = Play.of(terms(5, "passive"))
    outbox = play.until("Unmask", {4: "Masked"})
    for number in (0, 1, 2, 3):
        data = play.clients[number].receive(outbox[number])
        if number == 1:
            reveal = m.decode_client(data)
            assert isinstance(reveal, m.Reveal)
            for place in range(len(getattr(reveal, kind))):
                shares = list(getattr(reveal, kind))
                shares[place] = m.Share(shares[place].peer, shares[place].share[:-1] + bytes([shares[place].share[-1] ^ 1]))
                server_refuses(play.server, 1, m.encode(msgspec.structs.replace(reveal, **{kind: tuple(shares)})), "wrong-share")
            continue
        play.server.receive(number, data)
    assert play.server.advance() == {}
    assert play.server.result.block().tolist() == np.sum([levels(i, 10, play.agreed.levels) for i in range(4)], axis=0).tolist()


def test_without_enough_right_shares_there_is_no_sum() -> None:
    play = Play.of(terms(5, "passive"))
    outbox = play.until("Unmask", {4: "Masked"})
    for number in (0, 1):
        play.server.receive(number, play.clients[number].receive(outbox[number]))
    with pytest.raises(TooFewClients):
        play.server.advance()
    assert play.server.stage is ServerStage.DEAD
    with pytest.raises(LocalError, match="dead"):
        play.server.advance()


def test_masked_vectors_of_the_wrong_length_and_missing_adverts() -> None:
    play = Play.of(terms(3, "active", following=(6, 0)))
    outbox = play.until("Deliver")
    message = m.decode_client(play.clients[0].receive(outbox[0], *play.values(0)), 1000)
    other = m.decode_client(play.clients[1].receive(outbox[1], *play.values(1)), 1000)
    assert isinstance(message, m.Masked)
    assert isinstance(other, m.Masked)
    assert message.following is not None
    replace = msgspec.structs.replace
    server_refuses(play.server, 0, m.encode(replace(message, vector=message.vector[:-4])), "wrong-length")
    server_refuses(play.server, 0, m.encode(replace(message, vector=message.vector + bytes(4))), "wrong-length")
    server_refuses(play.server, 0, m.encode(replace(message, following=None)), "wrong-advert")
    server_refuses(play.server, 0, m.encode(replace(message, following=other.following)), "wrong-advert")
    late = replace(message.following, slot=(7, 0))
    server_refuses(play.server, 0, m.encode(replace(message, following=late)), "wrong-context")
    play.server.receive(0, m.encode(message))


def bad_terms(agreed: Terms) -> dict[str, Sequence[Terms]]:
    def with_(**changes: object) -> Terms:
        return msgspec.structs.replace(agreed, **changes)

    other = bytes(32)
    return {
        "wrong-context": [with_(session=b"another session!"), with_(mode="active")],
        "wrong-slot": [with_(round=4), with_(round=3, sum=9)],
        "not-invited": [with_(cohort=(1, 2, 3, 4, 5))],
        "unlisted-model": [with_(models=(other,)), with_(models=tuple(sorted((MODEL, other)))), with_(models=())],
        "minimum-too-low": [with_(min_cohort=1), with_(min_cohort=0)],
        "bad-terms": [
            with_(dimension=11),
            with_(cohort=(0, 2, 1, 3, 4)),
            with_(cohort=(0, 0, 1, 2, 3)),
            with_(threshold=2),
            with_(degree=3),
            with_(degree=3, graph_seed=bytes(16)),
            with_(graph_seed=bytes(16)),
            with_(roster=bytes(32)),
            with_(levels=2**31 // 5 + 1),
            with_(levels=0),
            with_(clip=0.0),
            with_(clip=float("nan")),
            with_(clip=float("inf")),
            with_(clip=1e-9),
            with_(clip=1e9),
            with_(levels=1),
            with_(cohort=tuple(range(9)), degree=8),
            with_(weight_limit=1.0, blocks=((0, 5), (1, 5), (2, 5), (3, 5))),
            with_(weight_limit=-1.0),
            with_(weight_limit=-0.0),
            with_(weight_limit=float("nan")),
            with_(blocks=((1, 5), (0, 5))),
            with_(blocks=((0, 5), (0, 5))),
            with_(blocks=((0, 1),)),
            with_(blocks=((0, 6),)),
            with_(following=(5, 0)),
            with_(following=(4, 9)),
        ],
    }


def test_terms_that_a_client_does_not_accept() -> None:
    agreed = terms(5, "passive")
    machine = client(agreed, 0, after=(4, 0), clip=(1e-6, 1e6), levels=16, clients=8, length=40)
    for code, several in bad_terms(agreed).items():
        for proposal in several:
            refuses(machine, m.encode(m.Invite(proposal)), code)
    machine.receive(m.encode(m.Invite(agreed)))
    refuses(machine, m.encode(m.Adverts(msgspec.structs.replace(agreed, clip=2.0), ())), "wrong-context")


def test_a_private_roster_is_refused() -> None:
    agreed = terms(3, "active")
    mine = msgspec.structs.replace(agreed, roster=Roster(roster().keys[:3]).digest)
    refuses(client(agreed, 0), m.encode(m.Invite(mine)), "wrong-roster")
    with pytest.raises(LocalError, match="no-roster"):
        Server(mine, roster=roster())
    with pytest.raises(LocalError, match="no-roster"):
        Client(identities()[0], policy(agreed), record=SumRecord())
    with pytest.raises(LocalError, match="not-on-roster"):
        Client(identities()[0], policy(agreed), roster=Roster(roster().keys[1:]), record=SumRecord())


def test_a_mask_key_is_for_one_slot_and_one_use() -> None:
    first = Play.of(terms(3, "passive", following=(6, 0)))
    first.finish()
    key = first.clients[0].next_mask_key()
    assert key is not None
    assert first.clients[0].next_mask_key() is None
    stored = key.to_bytes()
    with pytest.raises(LocalError, match="mask-key-used"):
        key.take()
    agreed = terms(3, "passive", slot=(6, 0))
    again = MaskKey.from_bytes(stored)
    machine = Client(identities()[0], policy(agreed), mask_key=again, record=SumRecord())
    with pytest.raises(LocalError, match="mask-key-used"):
        Client(identities()[0], policy(agreed), mask_key=again, record=SumRecord())
    # Even a copy of the stored bytes is no good for another sum, and not for the same slot again.
    copied = Client(identities()[0], policy(agreed, after=(6, 0)), mask_key=MaskKey.from_bytes(stored), record=SumRecord())
    refuses(copied, m.encode(m.Adverts(agreed, ())), "wrong-slot")
    refuses(machine, m.encode(m.Adverts(terms(3, "passive", slot=(7, 0)), ())), "wrong-slot")
    refuses(machine, m.encode(m.Invite(agreed)), "wrong-stage")


def test_adverts_of_another_slot_are_refused_by_the_next_server() -> None:
    first = Play.of(terms(3, "active", following=(6, 0)))
    first.finish()
    adverts = first.server.following
    assert Server(terms(3, "active", slot=(6, 0)), roster=roster(), adverts=adverts).advance() == {}
    with pytest.raises(LocalError, match="bad-advert"):
        Server(terms(3, "active", slot=(7, 0)), roster=roster(), adverts=adverts)
    with pytest.raises(LocalError, match="bad-advert"):
        Server(terms(3, "active", slot=(6, 0)), roster=roster(), adverts={0: adverts[1]})


def test_who_copies_a_peers_key_into_its_next_advert_is_refused_itself() -> None:
    """Otherwise the next sum would start with a clash and blame the peer."""
    play = Play.of(terms(3, "passive", following=(6, 0)))
    outbox = play.until("Deliver")
    victim = m.decode_client(play.up["Advert", 1])
    assert isinstance(victim, m.Advert)
    said = m.decode_client(play.clients[0].receive(outbox[0], *play.values(0)))
    assert isinstance(said, m.Masked)
    assert said.following is not None
    copied = msgspec.structs.replace(said.following, mask_key=victim.encryption_key)
    with pytest.raises(RemoteError, match="repeated-key") as caught:
        play.server.receive(0, m.encode(msgspec.structs.replace(said, following=copied)))
    assert caught.value.party == 0
    play.server.receive(0, m.encode(said))  # the refused one left no trace


BAD_VALUES = [
    [],
    [Contribution(np.zeros(9))],
    [Contribution(np.zeros((10, 1)))],
    [Contribution(np.full(10, np.nan))],
    [Contribution(np.full(10, np.inf))],
    [Contribution(np.zeros(10, complex))],
    [Contribution(np.full(10, 2**30), is_levels=True)],
    [Contribution(np.full(10, 3))],
    [Contribution(np.full(10, 0.5), is_levels=True)],
    [Contribution(np.zeros(10)), Contribution(np.zeros(10))],
    [Contribution(np.zeros(10), cluster=1)],
    [Contribution(np.zeros(10), 1.5)],
    [Contribution(np.zeros(10), -0.1)],
    [Contribution(np.zeros(10), float("nan"))],
]


@pytest.mark.parametrize("contributions", BAD_VALUES)
def test_a_local_error_kills_the_client_and_its_secrets(contributions: list[Contribution]) -> None:
    play = Play.of(terms(5, "passive", weight_limit=1.0))
    outbox = play.until("Deliver")
    machine = play.clients[0]
    secrets = [machine._state.self_seed, machine._state.mask_seed]
    assert all(secret in machine.to_bytes() for secret in secrets)
    with pytest.raises(LocalError, match="bad-values"):
        machine.receive(outbox[0], *contributions)
    assert machine.stage is ClientStage.DEAD
    assert not any(secret in machine.to_bytes() for secret in secrets)
    for data in (outbox[0], b""):
        with pytest.raises(LocalError, match="dead"):
            machine.receive(data, Contribution(np.zeros(10)))
    revived = Client.from_bytes(machine.to_bytes(), identities()[0], record=SumRecord())
    with pytest.raises(LocalError, match="dead"):
        revived.receive(outbox[0])


def test_values_at_the_wrong_time_and_failing_entropy_kill_too() -> None:
    agreed = terms(3, "passive")
    machine = client(agreed, 0)
    with pytest.raises(LocalError, match="unexpected-values"):
        machine.receive(m.encode(m.Invite(agreed)), Contribution(np.zeros(10)))
    assert machine.stage is ClientStage.DEAD

    def broken(count: int) -> bytes:
        raise OSError("no entropy: key material 1234")

    for entropy, code in ((broken, "internal"), (lambda count: bytes(count - 1), "entropy")):
        machine = Client(identities()[0], policy(agreed), entropy=entropy, record=SumRecord())
        with pytest.raises(LocalError, match=code) as caught:
            machine.receive(m.encode(m.Invite(agreed)))
        assert "1234" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert machine.stage is ClientStage.DEAD


def test_server_misuse() -> None:
    agreed = terms(3, "passive")
    with pytest.raises(LocalError, match="bad-terms"):
        Server(msgspec.structs.replace(agreed, levels=2**31))
    play = Play.of(agreed)
    with pytest.raises(LocalError, match="no-result"):
        _ = play.server.result
    play.finish()
    with pytest.raises(LocalError, match="finished"):
        play.server.advance()
    with pytest.raises(LocalError, match="finished"):
        play.server.to_bytes()


def test_terms_need_sixteen_bytes_of_session() -> None:
    with pytest.raises(ValueError, match="session"):
        make_terms(session=SESSION[:-1], slot=(0, 0), cohort=range(3), models=[MODEL], dimension=1, clip=1.0)


def test_a_cohort_below_the_minimum_is_refused_at_once() -> None:
    with pytest.raises(TooFewClients, match=r"group sizes: 2; min_cohort = 3"):
        make_terms(session=SESSION, slot=(0, 0), cohort=range(2), models=[MODEL], dimension=1, clip=1.0)
    assert make_terms(session=SESSION, slot=(0, 0), cohort=range(3), models=[MODEL], dimension=1, clip=1.0).min_cohort == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"session": b"x"}, "session: expected 16 bytes, got 1 bytes"), ({"session": "x" * 16}, "session: expected 16 bytes, got a str"),
        ({"model": MODEL[1:]}, "model: expected 32 bytes, got 31 bytes"), ({"mode": "eager"}, "mode: 'eager' is not known"),
        ({"models": 0}, "models: 0 is below 1"), ({"min_cohort": 0}, "min_cohort: 0 is below 1"),
        ({"dimension": 0}, "dimension: 0 is below 1"),
        ({"levels": 0}, "levels: 0 is below 1"), ({"clip": (1.0, 0.5)}, "clip: expected two numbers above 0"),
        ({"clip": (float("nan"), 1.0)}, "clip: expected two numbers above 0"), ({"length": 0}, "length: 0 is below 1"),
    ],
)  # fmt: skip
def test_a_policy_that_no_terms_can_meet_is_refused_by_field_and_value(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Policy(**{"session": SESSION, "mode": "active", "model": MODEL} | change)


def test_a_list_of_too_many_clients_is_refused_before_it_is_made() -> None:
    assert len(m.names(m.ids(range(MOST_CLIENTS)))) == MOST_CLIENTS
    with pytest.raises(MalformedMessage):
        m.names(m.ids(range(MOST_CLIENTS + 1)))


@pytest.mark.parametrize(("minimum", "words"), [(3, "to remove the masks: 3; .* needs 4"), (4, "minimum cohort size of 4 clients")])
def test_a_sum_that_fails_says_whether_the_threshold_or_the_minimum_cohort_size_is_not_reached(minimum: int, words: str) -> None:
    play = Play.of(terms(5, "active", min_cohort=minimum))
    outbox = play.until("Deliver")
    for number in range(3):
        play.server.receive(number, play.clients[number].receive(outbox[number], *play.values(number)))
    with pytest.raises(TooFewClients, match=words):
        play.server.advance()
