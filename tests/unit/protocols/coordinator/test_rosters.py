"""Versions of the roster, and requests to be on it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.protocols import codec
from cflpriv.protocols.coordinator import (
    DurableClient,
    DurableHelper,
    FolderLog,
    applied,
    invite,
    join,
    read_roster_version,
    removed,
    renew,
    rosters,
    sign_roster,
)
from cflpriv.protocols.coordinator import messages as c
from cflpriv.protocols.coordinator.rosters import RosterVersion, taken
from cflpriv.protocols.coordinator.rounds import SumRounds
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import MalformedMessage, RemoteError
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.protocols.one_message import HelperPolicy

from .world import AUTHORITY, COORDINATOR, HOLDERS, IDENTITIES, ROSTER

NEW = Identity.create(0, public_entropy("a new party"))
PUBLIC = AUTHORITY.public()
INVITATION = invite(AUTHORITY, "site 7")


def _refused(code: str, call: Any, *values: Any) -> None:
    with pytest.raises(RemoteError) as caught:
        call(*values)
    assert caught.value.code == code


def test_a_version_needs_the_signature_of_the_authority() -> None:
    signed = sign_roster(AUTHORITY, 3, ROSTER)
    message = read_roster_version(signed, PUBLIC)
    assert (message.version, message.roster) == (3, ROSTER)
    _refused("bad-signature", read_roster_version, sign_roster(COORDINATOR, 3, ROSTER), PUBLIC)
    changes: list[dict[str, Any]] = [{"version": 4}, {"keys": ROSTER.keys[:-1]}, {"holders": ROSTER.holders[:-1]}, {"holders": ()}]
    for change in changes:
        _refused("bad-signature", read_roster_version, codec.encode(msgspec.structs.replace(message, **change)), PUBLIC)
    twice = RosterVersion(1, (ROSTER.keys[0], ROSTER.keys[0]), (), bytes(64))
    _refused("malformed", read_roster_version, codec.encode(twice), PUBLIC)


def test_versions_go_up() -> None:
    first, second = sign_roster(AUTHORITY, 1, ROSTER), sign_roster(AUTHORITY, 2, removed(ROSTER, 0))
    assert taken(b"", first, PUBLIC) == first
    assert taken(first, first, PUBLIC) == first
    assert taken(first, second, PUBLIC) == second
    _refused("old-roster", taken, second, first, PUBLIC)
    _refused("old-roster", taken, second, sign_roster(AUTHORITY, 2, ROSTER), PUBLIC)


def test_rosters_invitations_and_requests_are_of_one_federation() -> None:
    """Two of one authority, with the same parties."""
    here, there = "hospitals", "schools"
    signed = sign_roster(AUTHORITY, 1, ROSTER, here)
    assert taken(b"", signed, PUBLIC, here) == signed
    for other in (there, ""):
        _refused("bad-signature", taken, b"", signed, PUBLIC, other)
    asked = join(NEW, invite(AUTHORITY, "site 7", federation=here)), renew(IDENTITIES[2], Identity.create(2), here)
    assert len(applied(ROSTER, asked, PUBLIC, here).keys) == len(ROSTER.keys) + 1
    for request in asked:
        _refused("bad-signature", applied, ROSTER, [request], PUBLIC, there)
        _refused("bad-signature", applied, ROSTER, [request], PUBLIC)


def test_parties_of_a_federation_take_no_roster_of_another(tmp_path: Path) -> None:
    there = sign_roster(AUTHORITY, 9, ROSTER, "schools")
    helper = DurableHelper(tmp_path / "h", HOLDERS[0], PUBLIC, COORDINATOR.public(), HelperPolicy(bytes(16)), federation="hospitals")
    for roster, code in ((there, "bad-signature"), (sign_roster(AUTHORITY, 1, ROSTER, "hospitals"), "")):
        answer = c.decode_helper_answer(helper.receive(c.ask_helper(COORDINATOR, 0, 0, b"", roster)), 1 << 20)
        assert answer.code == code
    helper.close()
    client = DurableClient(tmp_path / "c", IDENTITIES[0], PUBLIC, bytes(16), federation="hospitals")
    _refused("bad-signature", client.answered, c.encode(c.ComeAgain("idle", 1.0, there)))
    client.close()
    rounds = SumRounds(FolderLog(tmp_path / "s"), bytes(16), PUBLIC, federation="hospitals")
    _refused("bad-signature", rounds.publish, there)
    rounds.log.close()


def test_clients_keep_their_numbers() -> None:
    renewed = renew(IDENTITIES[2], Identity.create(2)), renew(HOLDERS[1], Identity.create(0))
    later = applied(ROSTER, [join(NEW, INVITATION), *renewed], PUBLIC)
    assert later.keys[-1] == NEW.public()
    assert [place for place, key in enumerate(ROSTER.keys) if later.keys[place] != key] == [2]
    assert [place for place, key in enumerate(ROSTER.holders) if later.holders[place] != key] == [1]
    gone = removed(later, 0)
    assert len(gone.keys) == len(later.keys)
    assert gone.keys[1:] == later.keys[1:]
    assert gone.keys[0] != later.keys[0]


def test_requests_need_the_secrets_of_their_keys_and_an_invitation() -> None:
    stranger, change = Identity.create(0), msgspec.structs.replace
    asked, other = join(NEW, INVITATION), join(stranger, invite(AUTHORITY, "site 8"))
    assert repr(codec.decode(INVITATION, rosters._Invitation, 1 << 10)) == "_Invitation(name='site 7')"
    for request in (
        change(join(stranger, INVITATION), key=NEW.public()),
        change(asked, name="y"),
        change(asked, key=stranger.public(), by_key=other.by_key),
        change(asked, invited=other.invited, by_authority=other.by_authority),
        change(asked, by_invited=asked.by_key),
        join(NEW, invite(stranger, "site 7")),
        change(renew(stranger, NEW), old=IDENTITIES[0].public()),
        change(renew(IDENTITIES[0], stranger), new=NEW.public()),
    ):
        _refused("bad-signature", applied, ROSTER, [request], PUBLIC)
    with pytest.raises(ValueError, match="the old key is not on it"):
        applied(ROSTER, [renew(stranger, NEW)], PUBLIC)
    with pytest.raises(ValueError, match="the new key is on it already"):
        applied(ROSTER, [join(IDENTITIES[0], INVITATION)], PUBLIC)
    with pytest.raises(ValueError, match="1 to 64 characters"):
        invite(AUTHORITY, "")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(noise: bytes) -> None:
    for data in (noise, codec.HEADER + noise):
        for decode in (
            c.decode_from_coordinator,
            lambda data: c.decode_to_coordinator(data, 1 << 20),
            lambda data: c.decode_ask(data, COORDINATOR.public()),
            lambda data: c.decode_helper_answer(data, 1 << 20),
            lambda data: read_roster_version(data, PUBLIC),
            lambda data: join(NEW, data),
        ):
            with pytest.raises(MalformedMessage):
                decode(data)


def test_a_roster_without_holders_is_one() -> None:
    roster = Roster(ROSTER.keys)
    assert read_roster_version(sign_roster(AUTHORITY, 1, roster), PUBLIC).roster == roster
