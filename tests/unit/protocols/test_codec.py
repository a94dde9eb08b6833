"""Bytes to messages: one encoding each, one error for everything else."""

from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.protocols.codec import CHECKSUM_BYTES, HEADER, decode, encode, pack, unpack
from cflpriv.protocols.errors import MalformedMessage, ProtocolError, RemoteError


class Small(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    number: int
    weight: float
    names: tuple[bytes, ...]


class Other(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    text: bytes


def sealed(body: bytes) -> bytes:
    return HEADER + body + sha256(HEADER + body).digest()[:CHECKSUM_BYTES]


SMALL = st.builds(
    Small,
    number=st.integers(-(2**63), 2**64 - 1),
    weight=st.floats(allow_nan=False),
    names=st.lists(st.binary(max_size=300), max_size=20).map(tuple),
)


@given(SMALL)
def test_messages_come_back(message: Small) -> None:
    data = encode(message)
    assert encode(decode(data, Small, len(data))) == data
    assert decode(data, Small, len(data)) == message
    with pytest.raises(MalformedMessage):
        decode(data, Small, len(data) - 1)
    with pytest.raises(MalformedMessage):
        decode(data, Other, len(data))


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_give_a_message_or_the_one_error(body: bytes, seal: bool) -> None:
    data = sealed(body) if seal else body
    try:
        message = decode(data, Small, 1000)
    except MalformedMessage:
        return
    assert encode(message) == data


# [1, 5, 1.0, []] and other ways to write it.
GOOD = bytes((0x94, 0x01, 0x05, 0xCB)) + bytes.fromhex("3ff0000000000000") + b"\x90"


@pytest.mark.parametrize(
    "body",
    [
        GOOD.replace(b"\x05", b"\xcc\x05"),
        GOOD.replace(b"\x05", b"\xcd\x00\x05"),
        GOOD.replace(b"\x05", b"\xd0\x05"),
        GOOD.replace(b"\x05", b"\xc0"),
        GOOD.replace(b"\x05", b"\xa15"),
        b"\xdc\x00\x04" + GOOD[1:],
        GOOD[:-1] + b"\xdc\x00\x00",
        GOOD[:3] + b"\xca\x3f\x80\x00\x00\x90",
        GOOD[:3] + b"\x01\x90",
        b"\x95" + GOOD[1:] + b"\x01",
        GOOD + b"\x00",
        GOOD[:-1],
        GOOD[:-1] + b"\x91\xa1x",
        GOOD[:-1] + b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\xc1",
        b"",
    ],
    ids=lambda body: body[:12].hex(),
)
def test_other_encodings_of_the_same_and_nonsense_are_refused(body: bytes) -> None:
    assert decode(sealed(GOOD), Small, 100) == Small(5, 1.0, ())
    with pytest.raises(MalformedMessage) as caught:
        decode(sealed(body), Small, 10_000)
    assert caught.value.__cause__ is None
    assert isinstance(caught.value, RemoteError | ProtocolError)
    assert str(caught.value) == "message refused: malformed"


def test_header_checksum_and_type() -> None:
    data = sealed(GOOD)
    for bad in (data[1:], b"CFLP\x02" + data[5:], data[:-1], data[:-1] + bytes([data[-1] ^ 1]), bytearray(data), "text", None):
        with pytest.raises(MalformedMessage):
            decode(bad, Small, 1000)  # type: ignore[arg-type]


@given(st.sets(st.integers(0, 2**32 - 1), max_size=40))
def test_sets_of_clients_come_back_sorted(clients: set[int]) -> None:
    assert unpack(pack(clients), 40) == tuple(sorted(clients))


@given(st.binary(max_size=40), st.integers(0, 12))
def test_bytes_that_are_no_packed_set_are_malformed(packed: bytes, most: int) -> None:
    try:
        clients = unpack(packed, most)
    except MalformedMessage:
        return
    assert len(clients) <= most
    assert pack(clients) == packed


@pytest.mark.parametrize("clients", [[-1, 3], [2**32]])
def test_numbers_that_do_not_fit_are_named(clients: list[int]) -> None:
    with pytest.raises(ValueError, match=r"clients: expected whole numbers from 0 to 2\^32 - 1, got"):
        pack(clients)
