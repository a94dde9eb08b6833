"""Keys: agreement, derivation, sealing, signatures, and what each refuses."""

import hashlib
import hmac
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import RemoteError
from cflpriv.protocols.keys import (
    SEAL_OVERHEAD_BYTES,
    Identity,
    Roster,
    agree,
    check_public_key,
    derive,
    frame,
    public_key,
    seal,
    sign,
    unseal,
    verify,
)

PARTS = st.lists(st.binary(max_size=6), max_size=4)


@given(st.text(max_size=4), PARTS, st.text(max_size=4), PARTS)
def test_frames_are_injective(a: str, x: list[bytes], b: str, y: list[bytes]) -> None:
    assert (frame(a, *x) == frame(b, *y)) == ((a, x) == (b, y))


@given(st.binary(min_size=1, max_size=64), st.text(max_size=8), PARTS)
def test_derive_is_hkdf_sha256(secret: bytes, label: str, parts: list[bytes]) -> None:
    """RFC 5869 written out: extract with a zero salt, one block of expand."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    assert derive(secret, label, *parts) == hmac.new(extracted, frame(label, *parts) + b"\x01", hashlib.sha256).digest()


def test_agreement_is_mutual_and_separated_by_label_and_context() -> None:
    a, b, c = (bytes([i]) * 32 for i in (1, 2, 3))
    assert agree(a, public_key(b), "x", b"1") == agree(b, public_key(a), "x", b"1")
    keys = {agree(a, public_key(o), label, context) for o, label, context in product((b, c), ("x", "y"), (b"1", b"2"))}
    assert len(keys) == 8


SMALL_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_points_of_small_order_are_refused(point: bytes) -> None:
    """The seven points of RFC 7748's security considerations, as listed by Bernstein."""
    with pytest.raises(RemoteError, match="bad-key"):
        agree(bytes([1]) * 32, point, "x")
    with pytest.raises(RemoteError, match="bad-key"):
        check_public_key(point)
    check_public_key(public_key(bytes([1]) * 32))


def test_boxes_open_only_as_they_were_sealed() -> None:
    key, entropy = bytes(range(32)), public_entropy("boxes")
    box = seal(key, b"plaintext", b"data", entropy)
    assert len(box) == len(b"plaintext") + SEAL_OVERHEAD_BYTES
    assert unseal(key, box, b"data") == b"plaintext"
    assert seal(key, b"plaintext", b"data", entropy) != box
    flips = [box[:i] + bytes([box[i] ^ 1 << bit]) + box[i + 1 :] for i in range(len(box)) for bit in range(8)]
    for bad in (*flips, *(box[:i] for i in range(len(box))), box + b"\x00"):
        with pytest.raises(RemoteError, match="bad-box"):
            unseal(key, bad, b"data")
    for other_key, data in ((bytes(32), b"data"), (key, b"dat"), (key, b"")):
        with pytest.raises(RemoteError, match="bad-box"):
            unseal(other_key, box, data)


def test_signatures_are_bound_to_label_parts_and_signer() -> None:
    entropy = public_entropy("signers")
    one, two = (Identity.create(i, entropy) for i in range(2))
    roster = Roster((one.public(), two.public()))
    signature = sign(one, "label", b"a", b"b")
    verify(roster, 0, signature, "label", b"a", b"b")
    for client, given_signature, label, parts in (
        (1, signature, "label", (b"a", b"b")),
        (2, signature, "label", (b"a", b"b")),
        (-1, signature, "label", (b"a", b"b")),
        (0, signature, "other", (b"a", b"b")),
        (0, signature, "label", (b"ab",)),
        (0, signature, "label", (b"a", b"b", b"")),
        (0, signature[:-1], "label", (b"a", b"b")),
        (0, b"", "label", (b"a", b"b")),
    ):
        with pytest.raises(RemoteError, match="bad-signature") as caught:
            verify(roster, client, given_signature, label, *parts)
        assert caught.value.party == client


def test_rosters() -> None:
    keys = tuple(bytes([i]) * 32 for i in range(3))
    assert len({Roster(keys).digest, Roster(keys[:2]).digest, Roster(keys[::-1]).digest}) == 3
    with pytest.raises(ValueError, match="twice"):
        Roster((keys[0], keys[0]))
    with pytest.raises(ValueError, match="32 bytes"):
        Roster((b"short",))


def test_identities_hide_their_seeds() -> None:
    identity = Identity(7, b"A" * 32, b"B" * 32)
    assert repr(identity) == "Identity(client=7)"
    assert Identity.create(1) != Identity.create(1)
