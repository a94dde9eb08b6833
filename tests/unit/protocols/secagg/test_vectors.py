"""The fixed vectors: derivations against plain standard-library code, whole runs byte for byte, and what must be refused."""

import hashlib
import hmac
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cflpriv.protocols.errors import RemoteError, TooFewClients
from cflpriv.protocols.secagg import Contribution
from cflpriv.protocols.secagg.shamir import PRIME

from .make_vectors import PATH, at, vectors

VECTORS: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))


def hkdf(secret: bytes, label: str, *parts: bytes) -> bytes:
    """RFC 5869, one block."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in (label.encode(), *parts))
    return hmac.new(hmac.new(bytes(32), secret, hashlib.sha256).digest(), info + b"\x01", hashlib.sha256).digest()


def x25519(scalar: bytes, point: bytes) -> bytes:
    """RFC 7748, section 5, the Montgomery ladder in plain integers."""
    p = 2**255 - 19
    k = int.from_bytes(scalar, "little") & ~7 & ~(1 << 255) | 1 << 254
    u = int.from_bytes(point, "little") & (1 << 255) - 1
    x2, z2, x3, z3, swap = 1, 0, u, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb = d * a % p, c * b % p
        x3, z3 = (da + cb) ** 2 % p, u * (da - cb) ** 2 % p
        e = (a * a - b * b) % p
        x2, z2 = a * a * b * b % p, e * (a * a + 121665 * e) % p
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, p - 2, p) % p).to_bytes(32, "little")


def test_derivations_and_masks() -> None:
    for row in VECTORS["derive"]:
        assert hkdf(bytes.fromhex(row["secret"]), row["label"], *map(bytes.fromhex, row["parts"])).hex() == row["key"]
    for row in VECTORS["mask"]:
        stream = Cipher(algorithms.AES(bytes.fromhex(row["key"])), modes.CTR(bytes(16))).encryptor().update(bytes(32))
        assert stream.hex() == row["stream"]


def test_shares_lie_on_one_polynomial() -> None:
    row = VECTORS["shamir"]
    secret = int(row["secret"], 16)
    points = [(x, int(share, 16)) for x, share in zip(row["keepers"], row["shares"], strict=True)]
    # Degree two through the secret at zero: all third differences of f(0), f(1), … vanish.
    values = [secret, *(y for _, y in points)]
    for _ in range(3):
        values = [(b - a) % PRIME for a, b in pairwise(values)]
    assert values == [0, 0, 0]


def test_keys_of_a_sum() -> None:
    """The whole key schedule, written again with the standard library only."""
    agreed, row = VECTORS["terms"], VECTORS["keys"]
    context = bytes.fromhex(agreed["context"])
    label = "cflpriv secagg v3 "
    body = bytes.fromhex(agreed["bytes"])
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in ((label + "context").encode(), body))
    assert hashlib.sha256(framed).digest() == context
    a, b = bytes.fromhex(row["seed_a"]), bytes.fromhex(row["seed_b"])
    base = (9).to_bytes(32, "little")
    public_a, public_b = x25519(a, base), x25519(b, base)
    assert (public_a.hex(), public_b.hex()) == (row["public_a"], row["public_b"])
    shared = x25519(a, public_b)
    assert shared == x25519(b, public_a)
    slot = (5).to_bytes(8, "big") + (0).to_bytes(8, "big")
    bound = (b"session-of-tests", slot, bytes.fromhex(agreed["models"]), context)
    zero, one = (0).to_bytes(8, "big"), (1).to_bytes(8, "big")
    assert hkdf(a, label + "self mask", *bound, zero).hex() == row["self_of_a_as_client_0"]
    assert hkdf(shared, label + "pair mask", *bound, zero + one, public_a, public_b).hex() == row["pair_of_0_and_1"]
    assert hkdf(shared, label + "box", context, zero + one).hex() == row["boxes_of_0_and_1"]
    for name, what, said in (
        ("commitment_of_0_to_a", "self seed", (zero, a)),
        ("digest_of_self_share_from_0_to_1", "self share", (zero + one, bytes(33))),
        ("digest_of_key_share_from_0_to_1", "key share", (zero + one, bytes(33))),
    ):
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in ((label + what).encode(), context, *said))
        assert hashlib.sha256(framed).hexdigest() == row[name]
    parts = ((label + "shares").encode(), context, zero, one, public_a, public_b)
    assert b"".join(len(part).to_bytes(4, "big") + part for part in parts).hex() == row["associated_data_0_to_1"]


def test_whole_runs_are_reproduced_byte_for_byte() -> None:
    assert vectors() == VECTORS


@pytest.mark.parametrize("case", VECTORS["refused"], ids=lambda case: f"{case['at']}: {case['why']}")
def test_what_must_be_refused_is(case: dict[str, str]) -> None:
    run = at(case["at"], case["to"])
    data = bytes.fromhex(case["bytes"])
    if case["to"] == "server":
        before = run.server.to_bytes()
        with pytest.raises(RemoteError) as caught:
            run.server.receive(0, data)
        assert (caught.value.code, run.server.to_bytes()) == (case["code"], before)
        return
    machine = run.clients[0]
    before = machine.to_bytes()
    with pytest.raises((RemoteError, TooFewClients)) as refusal:
        machine.receive(data, *([Contribution(np.zeros(2))] if machine.wants_values else []))
    assert (refusal.value.code, machine.to_bytes()) == (case["code"], before)
