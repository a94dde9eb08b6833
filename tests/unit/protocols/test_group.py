"""The group secret: one for all members and nobody else, whatever comes and goes, and whatever a server tries."""

import copy
import json
import pickle
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from time import process_time, sleep
from typing import Any

import msgspec
import pytest
from checkout import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.protocols import codec, group, keys
from cflpriv.protocols.entropy import Entropy, public_entropy
from cflpriv.protocols.group import (
    MEMBER,
    SERVER,
    STAGES,
    GroupServer,
    GroupServerStage,
    GroupTerms,
    Identity,
    LocalError,
    MalformedMessage,
    Member,
    MemberStage,
    RemoteError,
    Roster,
    TooFewClients,
    agree_all,
    diagram,
    hand_over,
    make_terms,
    needed,
)
from cflpriv.protocols.group import messages as m
from cflpriv.protocols.group.member import _Shared
from cflpriv.protocols.group.ratchet import MOST_KEPT, NUMBERS, Ratchet

SESSION = bytes(range(16))
ENTROPY = public_entropy("group tests")
IDENTITIES = [Identity.create(number, ENTROPY) for number in range(9)]
ROSTER = Roster(tuple(identity.public() for identity in IDENTITIES))
VECTORS = json.loads((ROOT / "tests" / "vectors" / "group.json").read_text(encoding="utf-8"))


def member(client: int, **options: Any) -> Member:
    return Member(IDENTITIES[client], ROSTER, SESSION, **({"entropy": ENTROPY} | options))


def terms(members: Any = range(4), epoch: int = 0, **options: Any) -> GroupTerms:
    return make_terms(session=SESSION, epoch=epoch, roster=ROSTER, members=members, **options)


@dataclass
class Scene:
    """Machines, and everything that was said, as (direction, client, kind, bytes)."""

    members: dict[int, Member]
    server: GroupServer
    said: list[tuple[str, int, str, bytes]] = field(default_factory=list)

    def note(self, *what: Any) -> None:
        self.said.append(what)

    def to(self, client: int, kind: str) -> bytes:
        return next(data for way, who, what, data in self.said if (way, who, what) == ("down", client, kind))


def agreed(clients: Any = range(4), epoch: int = 0, **options: Any) -> Scene:
    scene = Scene({client: member(client) for client in clients}, GroupServer(terms(clients, epoch, **options), ROSTER))
    agree_all(scene.server, scene.members, record=scene.note)
    return scene


def at(stage: MemberStage, client: int = 1) -> Scene:
    """A scene of four in which `client` (which does not lead) has come as far as `stage`, with everything said to it in `said`."""
    scene = agreed()
    fresh = member(client)
    scene.members[client] = fresh
    if stage is MemberStage.OUTSIDE:
        return scene
    scene = Scene({number: member(number) for number in range(4)}, GroupServer(terms(), ROSTER))
    stops = {MemberStage.ADVERTISED: "Confirm", MemberStage.CONFIRMED: None, MemberStage.MEMBER: None}
    for _ in range(4):
        kept = stops[stage] is not None and scene.server.stage is GroupServerStage.OFFERING
        asked = SERVER[scene.server.stage][1]
        for number, data in scene.server.advance().items():
            scene.note("down", number, asked, data)
            if number == client and (kept or (stage is MemberStage.CONFIRMED and asked == "Confirmed")):
                continue
            reply = scene.members[number].receive(data)
            if reply is not None:
                scene.note("up", number, "", reply)
                scene.server.receive(number, reply)
    assert scene.members[client].stage is stage
    return scene


def keys_of(scene: Scene, *clients: int) -> set[bytes]:
    return {scene.members[client].derive("test") for client in clients or scene.members}


# --- what must hold


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_all_have_one_secret(n: int) -> None:
    scene = agreed(range(n))
    assert len(keys_of(scene)) == 1
    assert {one.epoch for one in scene.members.values()} == {0}
    assert scene.members[0].derive("gram", 1) != scene.members[0].derive("gram", 2) != scene.members[0].derive("gram1")
    assert len(agreed(range(n)).members[0].derive("test")) == 32
    assert keys_of(agreed(range(n))) != keys_of(scene)  # drawn afresh


@dataclass(frozen=True)
class Step:
    """A new epoch among `invited`, some of whom drop, then `joining`."""

    invited: frozenset[int]
    removed: frozenset[int]
    drops: dict[int, str]
    joining: tuple[int, ...]


@st.composite
def steps(draw: Any) -> list[Step]:
    found: list[Step] = []
    removed: frozenset[int] = frozenset()
    for _ in range(draw(st.integers(1, 3))):
        left = sorted(set(range(8)) - removed)
        invited = draw(st.frozensets(st.sampled_from(left), min_size=1))
        drops = draw(st.dictionaries(st.sampled_from(sorted(invited)), st.sampled_from(STAGES)))
        joining = draw(st.lists(st.sampled_from(left), unique=True))
        found.append(Step(invited, removed, drops, tuple(joining)))
        if len(left) > 2:
            removed |= draw(st.frozensets(st.sampled_from(left), max_size=1))
    return found


@pytest.mark.slow
@given(steps())
@settings(max_examples=80, deadline=None)
def test_members_and_nobody_else_have_the_secret_through_joins_removals_and_dropouts(history: list[Step]) -> None:
    members = {client: member(client) for client in range(8)}
    seen: set[bytes] = set()
    for epoch, step in enumerate(history):
        server = GroupServer(terms(step.invited, epoch, removed=step.removed), ROSTER)
        before = {client: one.epoch for client, one in members.items()}
        try:
            agree_all(server, {client: members[client] for client in step.invited}, drops=step.drops)
        except TooFewClients:
            assert len(step.invited) - len(step.drops) < needed(server.terms)
            assert {client: one.epoch for client, one in members.items()} == before
            continue
        inside = {client for client in step.invited if client not in step.drops}
        assert server.header is not None
        if not inside:
            continue  # the only one led and was not heard of again
        for client in step.joining:
            if members[client].epoch != epoch:
                hand_over(server, client, min(inside), members)
                inside.add(client)
        has = {client for client in members if members[client].epoch == epoch}
        assert has == inside
        (key,) = {members[client].derive("x") for client in inside}
        assert key not in seen
        seen.add(key)
        for client in set(members) - inside:
            if members[client].epoch is not None:
                assert members[client].derive("x") != key
        for client in step.removed:
            with pytest.raises(LocalError, match="cannot be let in"):
                server.admit(client, min(inside))


def test_a_silent_leader_is_replaced() -> None:
    scene = Scene({client: member(client) for client in range(4)}, GroupServer(terms(), ROSTER))
    agree_all(scene.server, scene.members, drops={0: "Offer"}, record=scene.note)
    assert len(keys_of(scene, 1, 2, 3)) == 1
    assert scene.members[0].epoch is None
    assert scene.server.header is not None
    assert scene.server.header.leader == 1
    hand_over(scene.server, 0, 2, scene.members)
    assert len(keys_of(scene)) == 1


def test_a_silent_sponsor_is_replaced() -> None:
    scene = agreed(range(3))
    scene.members[5] = member(5)
    (invite,) = scene.server.admit(5, 1).values()
    advert = scene.members[5].receive(invite)
    assert advert is not None
    assert set(scene.server.receive(5, advert)) == {1}
    outbox = scene.server.admit(5, 2)
    grant = scene.members[2].receive(outbox[2])
    assert grant is not None
    assert scene.members[5].receive(scene.server.receive(2, grant)[5]) is None
    assert len(keys_of(scene)) == 1


def test_a_newcomer_gets_the_running_epoch_and_not_the_one_before() -> None:
    scene = agreed(range(4))
    old = scene.members[0].derive("x")
    scene.server = GroupServer(terms([0, 1, 2], 1, removed=[3]), ROSTER)
    agree_all(scene.server, {client: scene.members[client] for client in range(3)})
    scene.members[5] = member(5)
    hand_over(scene.server, 5, 0, scene.members)
    assert keys_of(scene, 0, 1, 2, 5) != keys_of(scene, 3)
    assert scene.members[3].derive("x") == old  # the removed one keeps what it had, and has nothing new
    assert scene.members[5].derive("x") != old


def test_the_old_secret_serves_until_the_new_one_is_confirmed() -> None:
    scene = agreed(range(3))
    old = keys_of(scene)
    server = GroupServer(terms(range(3), 1), ROSTER)
    for number, data in server.advance().items():
        scene.members[number].receive(data)
    assert keys_of(scene) == old
    assert {one.epoch for one in scene.members.values()} == {0}


@given(st.integers(0, 12), st.integers(0, 8))
@settings(max_examples=30, deadline=None)
def test_machines_may_be_stored_after_every_message(cut: int, who: int) -> None:
    members, server = {client: member(client) for client in range(4)}, GroupServer(terms(range(3)), ROSTER)
    count = 0

    def stored(client: int) -> None:
        nonlocal count, server
        if count == cut or who == 8:
            members[client] = Member.from_bytes(members[client].to_bytes(), IDENTITIES[client], ROSTER, entropy=ENTROPY)
            server = GroupServer.from_bytes(server.to_bytes(), ROSTER)
        count += 1

    while server.stage in SERVER:
        for number, data in server.advance().items():
            stored(number)
            reply = members[number].receive(data)
            stored(number)
            if reply is not None:
                server.receive(number, reply)
    hand_over(server, 3, 1, members)
    assert len({one.derive("x") for one in members.values()}) == 1


@pytest.mark.slow
def test_a_thousand_clients_take_seconds_and_five_messages_each() -> None:
    n = 250  # the time grows with n (and what each client checks with n): see the slow test for a thousand
    identities = [Identity.create(number, ENTROPY) for number in range(n)]
    roster = Roster(tuple(identity.public() for identity in identities))
    members = {number: Member(identity, roster, SESSION) for number, identity in enumerate(identities)}
    said: list[int] = []
    server = GroupServer(make_terms(session=SESSION, epoch=0, roster=roster, members=range(n)), roster)
    agree_all(server, members, record=lambda way, client, kind, data: said.append(len(data)))
    assert len(said) == 5 * n
    assert max(said) < 160 * n + 500
    assert len({one.derive("x") for one in members.values()}) == 1


@pytest.mark.slow
def test_a_thousand_clients_for_real() -> None:
    began = process_time()
    identities = [Identity.create(number, ENTROPY) for number in range(1000)]
    roster = Roster(tuple(identity.public() for identity in identities))
    members = {number: Member(identity, roster, SESSION) for number, identity in enumerate(identities)}
    said: list[int] = []
    agree_all(
        GroupServer(make_terms(session=SESSION, epoch=0, roster=roster, members=range(1000)), roster),
        members,
        record=lambda way, client, kind, data: said.append(len(data)),
    )
    print(f"n = 1000: {process_time() - began:.1f} s of one processor for all parties, {len(said)} messages, {sum(said) / 1e6:.1f} MB")
    assert process_time() - began < 30  # of processor time: other work on the machine does not count
    assert len(said) == 5000


# --- what must be refused, without any change


def unchanged(machine: Member, data: bytes, code: str | None = None) -> None:
    before = machine.to_bytes()
    with pytest.raises((RemoteError, TooFewClients)) as caught:
        machine.receive(data)
    assert machine.to_bytes() == before
    if code is not None:
        assert getattr(caught.value, "code", "") == code


EVERY = [MemberStage.OUTSIDE, MemberStage.ADVERTISED, MemberStage.CONFIRMED, MemberStage.MEMBER]


@pytest.mark.parametrize("stage", EVERY)
def test_replayed_and_reordered_messages_are_refused(stage: MemberStage) -> None:
    donor = agreed()
    hand_over(donor.server, 5, 1, {**donor.members, 5: member(5)}, record=donor.note)
    scene = at(stage)
    one = scene.members[1]
    for _, _, kind, data in donor.said:
        if stage is MemberStage.OUTSIDE and kind == "Invite":
            continue
        if stage in (MemberStage.ADVERTISED, MemberStage.CONFIRMED) and kind == "Invite":
            assert one.receive(data) == one.receive(data)  # the same question gets the same answer
            continue
        before = one.to_bytes()
        if stage is MemberStage.MEMBER and kind == "Admit":
            continue  # 5 is on the roster: letting it in again is allowed
        with pytest.raises((RemoteError, TooFewClients)):
            one.receive(data)
        assert one.to_bytes() == before
    if stage is not MemberStage.OUTSIDE:
        for way, client, kind, data in scene.said:
            if (way, client) == ("down", 1) and kind != "Invite" and kind not in MEMBER[stage]:
                unchanged(one, data, "wrong-stage")


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_messages_are_refused(data: Any) -> None:
    scene = agreed()
    hand_over(scene.server, 5, 1, {**scene.members, 5: member(5)}, record=scene.note)
    _, client, _, sent = data.draw(st.sampled_from([one for one in scene.said if one[0] == "down"]))
    how = data.draw(st.sampled_from(["cut", "flip", "append", "random"]))
    place = data.draw(st.integers(0, len(sent) - 1))
    if how == "cut":
        damaged = sent[:place]
    elif how == "flip":
        damaged = sent[:place] + bytes([sent[place] ^ 1 << data.draw(st.integers(0, 7))]) + sent[place + 1 :]
    elif how == "append":
        damaged = sent + b"\x00"
    else:
        damaged = data.draw(st.binary(max_size=300))
    for one in (member(client), scene.members.get(client)):
        if one is not None:
            before = one.to_bytes()
            with pytest.raises(MalformedMessage):
                one.receive(damaged)
            assert one.to_bytes() == before
    with pytest.raises(RemoteError):
        scene.server.receive(1, damaged)


def changed(message: Any, **fields: Any) -> bytes:
    return m.encode(msgspec.structs.replace(message, **fields))


def test_an_invite_that_is_not_ours_is_refused() -> None:
    one = member(1, smallest=3)
    good = terms(range(4), 7, smallest=3)
    invite: Callable[..., bytes] = lambda **fields: changed(m.Invite(good), terms=msgspec.structs.replace(good, **fields))  # noqa: E731
    unchanged(one, invite(session=bytes(16)), "wrong-context")
    unchanged(one, invite(roster=bytes(32)), "wrong-roster")
    unchanged(one, invite(smallest=2), "minimum-too-low")
    unchanged(one, invite(removed=m.ids([1, 8])), "bad-terms")
    unchanged(one, changed(m.Invite(good), terms=terms([0, 2, 3], 7, removed=[1], smallest=3)), "not-invited")
    unchanged(one, invite(smallest=5), "bad-terms")
    unchanged(one, invite(members=b""), "bad-terms")
    unchanged(one, invite(members=m.ids([1]) * 2), "malformed")
    assert one.receive(invite()) is not None
    for epoch in (7, 6, 0):
        unchanged(one, invite(epoch=epoch, members=m.ids(range(5))), "wrong-epoch")
    assert one.receive(invite(epoch=8)) is not None


def test_the_server_cannot_put_in_a_member_of_its_own() -> None:
    scene = Scene({client: member(client) for client in range(3)}, GroupServer(terms(range(3)), ROSTER))
    outbox = scene.server.advance()
    adverts = [m.decode_member(scene.members[client].receive(outbox[client]) or b"") for client in range(3)]
    assert all(isinstance(advert, m.Advert) for advert in adverts)
    agreed_context = m.context(scene.server.terms)
    leader = scene.members[0]
    own_seed = ENTROPY(32)
    stranger = Identity.create(2, ENTROPY)  # claims to be client 2
    key = keys.public_key(own_seed)
    forged = m.Advert(2, agreed_context, key, keys.sign(stranger, m.LABEL + "advert", agreed_context, (2).to_bytes(4, "little"), key))

    def ask(*these: Any) -> bytes:
        return m.encode(m.Adverts(agreed_context, these))

    unchanged(leader, ask(adverts[0], adverts[1], forged), "bad-signature")
    unchanged(leader, ask(adverts[0], msgspec.structs.replace(adverts[1], key=key), adverts[2]), "bad-signature")
    unchanged(leader, ask(adverts[0], adverts[1], msgspec.structs.replace(adverts[2], client=7)), "bad-members")
    foreign = msgspec.structs.replace(adverts[2], client=8)
    unchanged(leader, ask(adverts[0], adverts[1], adverts[2], foreign), "bad-members")
    unchanged(leader, ask(adverts[1], adverts[2]), "bad-members")  # without itself
    unchanged(leader, ask(adverts[0], adverts[0]), "malformed")
    small = keys.sign(IDENTITIES[2], m.LABEL + "advert", agreed_context, (2).to_bytes(4, "little"), bytes(32))
    unchanged(leader, ask(*adverts[:2], m.Advert(2, agreed_context, bytes(32), small)), "bad-key")
    copied = keys.sign(IDENTITIES[2], m.LABEL + "advert", agreed_context, (2).to_bytes(4, "little"), adverts[1].key)  # type: ignore[union-attr]
    unchanged(leader, ask(*adverts[:2], m.Advert(2, agreed_context, adverts[1].key, copied)), "repeated-key")  # type: ignore[union-attr]
    with pytest.raises(TooFewClients):
        leader.receive(ask(adverts[0]))
    assert leader.receive(ask(*adverts)) is not None


def test_substituted_offers_confirmations_and_hand_overs_are_refused() -> None:
    scene = at(MemberStage.ADVERTISED)
    one = scene.members[1]
    good = m.decode_server(scene.to(1, "Deliver"))
    assert isinstance(good, m.Deliver)
    header, replace = good.header, msgspec.structs.replace
    for bad, code in (
        ({"commitment": bytes(32)}, "bad-signature"),
        ({"signature": bytes(64)}, "bad-signature"),
        ({"key": keys.public_key(bytes(range(32)))}, "bad-signature"),
        ({"leader": 2}, "bad-signature"),
        ({"leader": 8}, "bad-members"),
        ({"members": m.ids([0, 1, 2, 3, 4])}, "bad-members"),
        ({"members": m.ids([0, 1, 2])}, "bad-signature"),
        ({"context": bytes(32)}, "wrong-context"),
    ):
        unchanged(one, changed(good, header=replace(header, **bad)), code)
    others = m.decode_server(scene.to(2, "Deliver"))
    assert isinstance(others, m.Deliver)
    unchanged(one, changed(good, box=others.box), "bad-box")
    # a member that leads beside the leader, with another secret: its box opens, but the two headers can never both be confirmed
    second = at(MemberStage.ADVERTISED)
    rival = m.decode_server(second.to(1, "Deliver"))
    assert isinstance(rival, m.Deliver)
    unchanged(one, m.encode(rival), "bad-box")  # made for another key of mine
    assert one.receive(m.encode(good)) is not None
    unchanged(one, m.encode(good), "wrong-stage")  # one header an epoch
    confirmed = m.decode_server(scene.to(0, "Confirmed"))
    assert isinstance(confirmed, m.Confirmed)
    theirs = m.decode_server(second.to(0, "Confirmed"))
    assert isinstance(theirs, m.Confirmed)
    unchanged(one, m.encode(theirs), "bad-signature")
    with pytest.raises(TooFewClients):
        one.receive(changed(confirmed, clients=m.ids([2]), signatures=confirmed.signatures[:64]))
    unchanged(one, changed(confirmed, clients=m.ids([2, 8])), "bad-members")
    unchanged(one, changed(confirmed, signatures=confirmed.signatures[64:]), "malformed")
    assert one.receive(m.encode(confirmed)) is None
    assert len(keys_of(scene)) == 1


def test_a_newcomer_takes_no_secret_but_that_of_the_group() -> None:
    scene = agreed(range(4))
    scene.members[5] = member(5)
    (invite,) = scene.server.admit(5, 1).values()
    newcomer = scene.members[5]
    advert = newcomer.receive(invite)
    assert advert is not None
    (admit,) = scene.server.receive(5, advert).values()
    grant = scene.members[1].receive(admit)
    assert grant is not None
    (data,) = scene.server.receive(1, grant).values()
    good = m.decode_server(data)
    assert isinstance(good, m.Handover)
    replace = msgspec.structs.replace
    decoded = m.decode_server(admit)
    assert isinstance(decoded, m.Admit)
    # a secret that the server made up, sealed properly for the newcomer
    seed = ENTROPY(32)
    own = keys.public_key(seed)
    sealing = keys.agree(seed, decoded.advert.key, m.LABEL + "box", good.header.context, own, decoded.advert.key)
    associated = keys.frame(m.LABEL + "box", m.digest(good.header), (1).to_bytes(4, "little"), (5).to_bytes(4, "little"))
    made_up = codec.encode(_Shared(bytes(32), Ratchet(0, bytes(32))))
    planted = replace(good.grant, key=own, box=keys.seal(sealing, made_up, associated, ENTROPY))
    unchanged(newcomer, changed(good, grant=planted), "bad-box")
    unchanged(newcomer, changed(good, grant=replace(good.grant, newcomer=4)), "wrong-context")
    unchanged(newcomer, changed(good, grant=replace(good.grant, client=2)), "bad-box")
    unchanged(newcomer, changed(good, grant=replace(good.grant, client=5)), "wrong-context")
    with pytest.raises(TooFewClients):
        newcomer.receive(changed(good, confirmed=replace(good.confirmed, clients=b"", signatures=b"")))
    unchanged(newcomer, changed(good, header=replace(good.header, commitment=bytes(32))), "bad-signature")
    assert newcomer.receive(data) is None
    assert len(keys_of(scene)) == 1


def test_a_member_lets_in_neither_strangers_nor_the_removed() -> None:
    scene = agreed([0, 1, 2], 1, removed=[3])
    one, here = scene.members[1], m.context(scene.server.terms)

    def request(client: int, identity: Identity, context: bytes = here) -> bytes:
        key = keys.public_key(ENTROPY(32))
        signature = keys.sign(identity, m.LABEL + "advert", context, client.to_bytes(4, "little"), key)
        return m.encode(m.Admit(here, m.Advert(client, context, key, signature)))

    unchanged(one, request(3, IDENTITIES[3]), "bad-members")
    unchanged(one, request(1, IDENTITIES[1]), "bad-members")
    unchanged(one, request(5, IDENTITIES[6]), "bad-signature")
    unchanged(one, request(77, Identity.create(77, ENTROPY)), "bad-signature")
    unchanged(one, request(5, IDENTITIES[5], bytes(32)), "wrong-context")
    other = m.decode_server(request(5, IDENTITIES[5]))
    assert isinstance(other, m.Admit)
    unchanged(one, changed(other, context=bytes(32)), "wrong-context")
    assert one.receive(m.encode(other)) is not None


def test_a_server_that_shows_two_lists_makes_no_second_group() -> None:
    """The server invites all four twice, in words of its own each time. Clients that insist on a majority of the roster refuse halves."""
    picky = {client: member(client, smallest=5) for client in range(4)}
    half = make_terms(session=SESSION, epoch=0, roster=ROSTER, members=range(4), smallest=4)
    for one in picky.values():
        unchanged(one, m.encode(m.Invite(half)), "minimum-too-low")
    # same terms: two leaders, each with half of the adverts, both lack the majority
    scene = Scene({client: member(client) for client in range(4)}, GroupServer(terms(range(4)), ROSTER))
    outbox = scene.server.advance()
    adverts = [m.decode_member(scene.members[client].receive(outbox[client]) or b"") for client in range(4)]
    here = m.context(scene.server.terms)
    for leader in (0, 2):
        with pytest.raises(TooFewClients):
            scene.members[leader].receive(m.encode(m.Adverts(here, tuple(adverts[leader : leader + 2]))))  # type: ignore[arg-type]


def test_the_server_refuses_what_a_bad_client_sends() -> None:
    scene = Scene({client: member(client) for client in range(3)}, GroupServer(terms(range(3)), ROSTER))
    outbox = scene.server.advance()
    replies = {client: scene.members[client].receive(outbox[client]) or b"" for client in range(3)}
    with pytest.raises(RemoteError, match="wrong-client"):
        scene.server.receive(1, replies[2])
    with pytest.raises(RemoteError, match="wrong-stage"):
        scene.server.receive(8, replies[2])
    scene.server.receive(0, replies[0])
    with pytest.raises(RemoteError, match="repeated"):
        scene.server.receive(0, replies[0])
    advert = m.decode_member(replies[1])
    with pytest.raises(RemoteError, match="bad-signature"):
        scene.server.receive(1, changed(advert, key=bytes(range(32))))
    scene.server.receive(1, replies[1])
    ((leader, asked),) = scene.server.advance().items()
    offer = m.decode_member(scene.members[leader].receive(asked) or b"")
    assert isinstance(offer, m.Offer)
    with pytest.raises(RemoteError, match="bad-members"):
        scene.server.receive(leader, changed(offer, boxes=()))
    with pytest.raises(RemoteError, match="bad-signature"):
        scene.server.receive(leader, changed(offer, header=msgspec.structs.replace(offer.header, commitment=bytes(32))))
    with pytest.raises(LocalError, match="no epoch runs"):
        scene.server.admit(5, 0)


# --- numbered keys


def opened(stolen: bytes, client: int) -> set[bytes]:
    """All numbered keys up to 12 that whoever stole a stored state works out from it."""
    thief = Member.from_bytes(stolen, IDENTITIES[client], ROSTER)
    assert thief.ratchet is not None
    found = {key for _, key in thief.ratchet.kept}
    for number in range(13):
        key = thief.ratchet.moved(number).key(number)
        found |= set() if key is None else {key}
    return found


def test_a_state_that_is_stolen_after_a_number_opens_none_before() -> None:
    scene = agreed()
    one = scene.members[1]
    made = [one.advance(number).key(number) for number in range(6)]
    assert None not in made
    assert len(set(made)) == 6
    stolen = opened(one.to_bytes(), 1)
    assert made[5] in stolen
    assert not stolen & set(made[:5])
    again = one.advance(3)  # nothing goes backward
    assert [again.key(number) for number in range(6)] == [None] * 5 + [made[5]]
    assert one.derive("lasting") == scene.members[2].derive("lasting")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.frozensets(st.integers(0, 9))), max_size=12), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_members_have_the_same_numbered_keys_whatever_they_missed(steps: list[tuple[int, int, frozenset[int]]], sponsor: int) -> None:
    """Each goes on by itself, forward only; a newcomer goes on from where its sponsor is. Against a table of all keys."""
    scene = agreed()
    start = scene.members[0].ratchet
    assert start is not None
    table = {number: start.moved(number).key(number) for number in range(10)}
    scene.members[5] = member(5)
    have: dict[int, tuple[int, set[int]]] = dict.fromkeys(range(4), (0, set()))
    for client, number, keep in steps:
        ratchet = scene.members[client].advance(number, keep)
        position, kept = have[client]
        if number >= position:
            passed = set(range(position, number + 1))
            have[client] = (number + 1, (kept | passed) & {number, *(one for one in keep if one < number)})
        assert {at for at, _ in ratchet.kept} == have[client][1]
        assert all(table[at] == key for at, key in ratchet.kept)
    hand_over(scene.server, 5, sponsor, scene.members)
    assert scene.members[5].ratchet == scene.members[sponsor].ratchet
    latest = max(position for position, _ in have.values())
    for client in (0, 1, 2, 3, 5):
        assert scene.members[client].advance(latest).key(latest) == start.moved(latest).key(latest)


def test_a_newcomer_is_not_given_what_its_sponsor_has_erased() -> None:
    scene = agreed()
    made = [scene.members[1].advance(number, [1]).key(number) for number in range(4)]
    scene.members[5] = member(5)
    hand_over(scene.server, 5, 1, scene.members)
    stolen = opened(scene.members[5].to_bytes(), 5)
    assert {made[1], made[3]} <= stolen
    assert not stolen & {made[0], made[2]}


def test_numbers_are_bounded() -> None:
    one = agreed().members[1]
    before = one.to_bytes()
    for number, keep in ((NUMBERS, ()), (100, range(MOST_KEPT + 1))):
        with pytest.raises(RemoteError, match="too-far"):
            one.advance(number, keep)
    assert one.to_bytes() == before
    with pytest.raises(LocalError, match="no-secret"):
        member(1).advance(0)
    last = one.advance(NUMBERS - 1, range(MOST_KEPT - 1))
    assert last.end() == agreed_end(before)
    assert len(last.kept) == MOST_KEPT
    for kept in (((0, bytes(32)), (0, bytes(32))), ((1, bytes(32)), (0, bytes(32))), ((5, bytes(32)),)):
        with pytest.raises(ValueError, match="ascending"):
            Ratchet(5, bytes(32), kept)


def agreed_end(stored: bytes) -> bytes:
    """The chain's end, hashed without remembering anything."""
    ratchet = Member.from_bytes(stored, IDENTITIES[1], ROSTER).ratchet
    assert ratchet is not None
    chain = ratchet.chain
    for _ in range(NUMBERS):
        chain = sha256((m.LABEL + "step").encode() + chain).digest()
    return chain


def test_a_sponsor_cannot_hand_out_another_chain() -> None:
    scene = agreed()
    scene.members[5] = member(5)
    ours = scene.members[1]._state
    scene.members[1]._state = msgspec.structs.replace(ours, ratchet=Ratchet(3, bytes(32)))
    with pytest.raises(RemoteError, match="bad-box"):
        hand_over(scene.server, 5, 1, scene.members)
    assert scene.members[5].epoch is None


# --- copies and threads


def test_a_member_is_neither_copied_nor_pickled() -> None:
    one = agreed().members[1]
    one.advance(3)
    for secret in (one, one.ratchet, one._state):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                copied(secret)


def test_of_many_threads_with_one_message_one_gets_the_answer() -> None:
    """A leader asked twice at once would seal two secrets."""
    scene = Scene({client: member(client) for client in range(4)}, GroupServer(terms(), ROSTER))
    for number, data in scene.server.advance().items():
        scene.server.receive(number, scene.members[number].receive(data) or b"")
    ((leader, asked),) = scene.server.advance().items()
    said: list[bytes | Exception | None] = []
    together = threading.Barrier(8)
    slow = scene.members[leader]
    drawn = slow._entropy

    def pausing(count: int) -> bytes:
        sleep(0.001)  # lets the other threads in
        return drawn(count)

    slow._entropy = pausing

    def ask() -> None:
        together.wait()
        try:
            said.append(slow.receive(asked))
        except RemoteError as error:
            said.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(one, bytes) for one in said) == 1
    assert sorted(getattr(one, "code", "") for one in said) == [""] + ["wrong-stage"] * 7


# --- secrets stay secret


def test_no_secret_is_in_what_is_sent_shown_or_raised() -> None:
    drawn: list[bytes] = []

    def remembering(count: int, source: Entropy = ENTROPY) -> bytes:
        drawn.append(source(count))
        return drawn[-1]

    members = {client: member(client, entropy=remembering) for client in range(4)}
    server = GroupServer(terms(range(3)), ROSTER)
    said: list[bytes] = []
    shown: list[str] = []

    def note(way: str, client: int, kind: str, data: bytes) -> None:
        said.append(data)
        decoded = m.decode_server(data) if way == "down" else m.decode_member(data)
        shown.extend([repr(decoded), repr(members[client]), repr(members[client]._state), str(server)])

    agree_all(server, {client: members[client] for client in range(3)}, record=note)
    hand_over(server, 3, 1, members, record=note)
    for one in members.values():
        try:
            one.receive(said[0][:-1])
        except RemoteError as error:
            shown.append("".join(traceback.format_exception(error)))
    secrets = [data for data in drawn if len(data) == 32] + [identity.signing_seed for identity in IDENTITIES]
    ratchet = members[0].advance(2, [1])
    secrets += [members[0].derive("x"), members[0]._state.secret, ratchet.chain, *(key for _, key in ratchet.kept)]
    assert len(secrets) > 8
    for secret in secrets:
        assert not any(secret in data for data in said)
        assert not any(secret.hex() in text or repr(secret) in text for text in shown)
    assert not any(secret in server.to_bytes() for secret in secrets)


def test_keys_by_which_a_secret_came_are_forgotten() -> None:
    scene = agreed()
    hand_over(scene.server, 5, 1, scene.members | {5: member(5)})
    for one in scene.members.values():
        assert one._state.seed == b""
        assert one._state.coming is None


def test_a_dead_source_of_randomness_kills_the_machine_and_its_secrets() -> None:
    one = member(1, entropy=lambda count: b"")
    with pytest.raises(LocalError, match="entropy"):
        one.receive(m.encode(m.Invite(terms())))
    with pytest.raises(LocalError, match="dead"):
        one.receive(m.encode(m.Invite(terms())))
    with pytest.raises(LocalError, match="no-secret"):
        one.derive("x")
    assert one.stage is MemberStage.DEAD


def test_local_mistakes() -> None:
    with pytest.raises(LocalError, match="not-on-roster"):
        Member(Identity.create(1, ENTROPY), ROSTER, SESSION)
    with pytest.raises(LocalError, match="wrong-identity"):
        Member.from_bytes(member(1).to_bytes(), IDENTITIES[2], ROSTER)
    with pytest.raises(MalformedMessage):
        Member.from_bytes(b"x", IDENTITIES[2], ROSTER)
    with pytest.raises(ValueError, match="members"):
        terms([])
    with pytest.raises(ValueError, match="smallest"):
        terms(range(2), smallest=3)
    with pytest.raises(ValueError, match="members"):
        terms(range(4), removed=[2])
    with pytest.raises(ValueError, match="roster"):
        GroupServer(terms([0, 55]), ROSTER)
    with pytest.raises(ValueError, match="unknown stage 'Lunch'"):
        agree_all(GroupServer(terms(), ROSTER), {}, drops={1: "Lunch"})
    with pytest.raises(LocalError, match="wrong-stage"):
        agreed().server.advance()


# --- tables and vectors


def test_the_tables_fit_each_other() -> None:
    sent = {kind for rows in MEMBER.values() for kind in rows}
    assert sent == {"Invite", "Adverts", "Deliver", "Confirmed", "Admit", "Handover"}
    assert {reply for rows in MEMBER.values() for reply, _ in rows.values() if reply} == {"Advert", "Offer", "Confirm", "Grant"}
    assert {row[1] for row in SERVER.values()} < sent
    assert MemberStage.DEAD not in MEMBER
    drawing = diagram()
    assert all(word in drawing for word in ("Invite", "Adverts", "Offer", "Deliver", "Confirm", "running"))


def test_vectors() -> None:
    """Keys, contexts and whole messages from fixed randomness, so that another implementation can check itself."""
    entropy = public_entropy(VECTORS["entropy"])
    identities = [Identity.create(number, entropy) for number in range(4)]
    roster = Roster(tuple(identity.public() for identity in identities))
    members = {
        number: Member(identity, roster, bytes.fromhex(VECTORS["session"]), entropy=entropy) for number, identity in enumerate(identities)
    }
    setting = make_terms(session=bytes.fromhex(VECTORS["session"]), epoch=3, roster=roster, members=range(3), removed=[], smallest=2)
    assert m.context(setting).hex() == VECTORS["context"]
    server = GroupServer(setting, roster)
    said: list[list[str]] = []

    def note(way: str, client: int, kind: str, data: bytes) -> None:
        said.append([way, str(client), kind, sha256(data).hexdigest()])

    agree_all(server, {number: members[number] for number in range(3)}, record=note)
    hand_over(server, 3, 1, members, record=note)
    assert said == VECTORS["messages"]
    for one in members.values():
        assert {purpose: one.derive(*purpose.split("|")).hex() for purpose in VECTORS["keys"]} == VECTORS["keys"]
        assert [(one.advance(number).key(number) or b"").hex() for number in range(3)] == VECTORS["numbered"]


def test_the_package_says_what_it_exports() -> None:
    assert all(hasattr(group, name) for name in group.__all__)
