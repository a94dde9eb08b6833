"""The vectors of the specification, read by a decoder that uses nothing of the package: MessagePack, hashes, signatures, boxes and masks
anew."""

import json
import struct
from hashlib import sha256
from itertools import combinations
from typing import Any

import pytest
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from .make_vectors import PATH, vectors

LABEL = "cflpriv one-message v1 "
SEEDS = list(combinations(range(3), 1))


def unpack(data: bytes, at: int = 0) -> tuple[Any, int]:
    """The MessagePack value at a place, and the place after it: no more types than these messages have."""
    head = data[at]
    sizes = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDC: 2, 0xDD: 4}
    if head < 0x80:
        return head, at + 1
    if 0x90 <= head < 0xA0 or head in (0xDC, 0xDD):
        width = sizes.get(head, 0)
        count = head & 15 if not width else int.from_bytes(data[at + 1 : at + 1 + width], "big")
        at, items = at + 1 + width, []
        for _ in range(count):
            item, at = unpack(data, at)
            items.append(item)
        return items, at
    if 0xA0 <= head < 0xC0:
        return data[at + 1 : at + 1 + (head & 31)].decode(), at + 1 + (head & 31)
    if head in (0xC4, 0xC5, 0xC6):
        start = at + 1 + sizes[head]
        end = start + int.from_bytes(data[at + 1 : start], "big")
        return data[start:end], end
    if head == 0xCB:
        return struct.unpack(">d", data[at + 1 : at + 9])[0], at + 9
    if 0xCC <= head <= 0xCF:
        width = 1 << (head - 0xCC)
        return int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width
    raise ValueError(hex(head))


def message(text: str, tag: int) -> tuple[list[Any], bytes]:
    """The fields of a message after its tag, and its body."""
    data = bytes.fromhex(text)
    assert data[:5] == b"CFLP\x01"
    assert sha256(data[:-16]).digest()[:16] == data[-16:]
    body = data[5:-16]
    fields, end = unpack(body)
    assert end == len(body)
    assert fields[0] == tag
    return fields[1:], body


def framed(label: str, *parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in (label.encode(), *parts))


def hashed(name: str, *parts: bytes) -> bytes:
    return sha256(framed(LABEL + name, *parts)).digest()


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def verify(key: str, signature: bytes, name: str, *parts: bytes) -> None:
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, framed(LABEL + name, *parts))


@pytest.fixture(scope="module")
def file() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return loaded


def agreed(file: dict[str, Any]) -> tuple[list[Any], bytes]:
    """The terms and their context. The terms are the first field of the invitation, and are encoded as a message of their own."""
    fields, body = message(file["invite"], 2)
    raw = body[2 : unpack(body, 2)[1]]  # after the array's head and the tag
    whole = b"CFLP\x01" + raw
    return fields[0], hashed("context", whole + sha256(whole).digest()[:16])


def test_terms_and_keys(file: dict[str, Any]) -> None:
    terms, context = agreed(file)
    names = [
        "session",
        "round",
        "sum",
        "helpers",
        "colluding",
        "keys",
        "minimum",
        "maximum",
        "cohort_change",
        "models",
        "roster",
        "bits",
        "clip",
        "levels",
        "dimension",
        "weight_limit",
        "least_weight",
    ]
    stated = dict(zip(names, terms, strict=True))
    digest = bytes.fromhex(file["roster_digest"])
    assert stated["session"].hex() == file["session"]
    assert stated["roster"] == digest
    assert (stated["round"], stated["sum"], stated["helpers"], stated["colluding"], stated["dimension"], stated["bits"]) == (
        7,
        0,
        3,
        1,
        2,
        16,
    )
    assert stated["maximum"] * stated["levels"] <= 2**15 - 1
    invited, _ = message(file["invite"], 2)
    for helper, text in enumerate(file["announcements"]):
        (who, session, slot, key, signature), _ = message(text, 1)
        assert (who, session, slot) == (helper, stated["session"], 7)
        verify(file["roster"]["helpers"][helper], signature, "key", digest, session, number(7), number(helper), key)
        assert stated["keys"][helper] == [helper, sha256(bytes.fromhex(text)).digest()]
        assert invited[1][helper].hex() == text
        seed = bytes.fromhex(file["helper_seeds"][helper])
        kem, curve = MLKEM768PrivateKey.from_seed_bytes(seed[:64]), X25519PrivateKey.from_private_bytes(seed[64:])
        assert key == kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()
    assert len(context) == 32


def uploads(file: dict[str, Any]) -> tuple[list[bytes], list[list[int]], list[list[bytes]]]:
    """Of each client: what it signed, its masked vector, its seeds, after every check."""
    _, context = agreed(file)
    suite = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
    digests, rows, dealt = [], [], []
    for client, text in enumerate(file["uploads"]):
        (who, bound, names, vector, boxes, commitments, signature), _ = message(text, 3)
        assert (who, bound) == (client, context)
        assert names == hashed("round", bytes.fromhex(file["session"]), b"7")
        digest = hashed(
            "upload",
            context,
            number(client),
            names,
            sha256(vector).digest(),
            b"".join(sha256(box).digest() for _, box in boxes),
            commitments,
        )
        verify(file["roster"]["clients"][client], signature, "upload", digest)
        seeds: list[bytes] = [b""] * 3
        for helper, box in boxes:
            seed = bytes.fromhex(file["helper_seeds"][helper])
            key = hpke.MLKEM768X25519PrivateKey(
                MLKEM768PrivateKey.from_seed_bytes(seed[:64]), X25519PrivateKey.from_private_bytes(seed[64:])
            )
            opened = suite.decrypt(box, key, framed(LABEL + "box", context, number(client), number(helper)))
            held = [k for k, members in enumerate(SEEDS) if helper not in members]
            assert len(opened) == 32 * len(held)
            for place, k in enumerate(held):
                own = opened[32 * place : 32 * place + 32]
                assert seeds[k] in (b"", own)
                seeds[k] = own
                assert commitments[32 * k : 32 * k + 32] == hashed("seed", context, number(client), number(k), own)
        digests.append(digest)
        rows.append(list(struct.unpack(f"<{len(vector) // 2}H", vector)))
        dealt.append(seeds)
    return digests, rows, dealt


def mask(context: bytes, client: int, k: int, seed: bytes, length: int) -> list[int]:
    key = hashed("mask", context, number(client), number(k), seed)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(2 * length))
    return list(struct.unpack(f"<{length}H", stream))


def test_uploads_open_to_the_levels(file: dict[str, Any]) -> None:
    _, context = agreed(file)
    _, rows, dealt = uploads(file)
    for client, (row, seeds) in enumerate(zip(rows, dealt, strict=True)):
        own = list(row)
        for k, seed in enumerate(seeds):
            own = [(a - b) % 2**16 for a, b in zip(own, mask(context, client, k, seed, len(row)), strict=True)]
        assert [value - 2**16 * (value >= 2**15) for value in own] == [*file["levels"][client], 0]


def test_helpers_messages_and_the_sum(file: dict[str, Any]) -> None:
    _, context = agreed(file)
    digests, rows, dealt = uploads(file)
    name = hashed("set", context, *digests)
    members = b"".join(client.to_bytes(4, "little") for client in range(3))
    delivery, close, opening = file["helpers"]
    for helper in range(3):
        (_, items), _ = message(delivery["messages"][helper], 4)
        for client, item in enumerate(items):
            (_, _, names, vector, boxes, commitments, signature), _ = message(file["uploads"][client], 3)
            joined = b"".join(sha256(box).digest() for _, box in boxes)
            assert item == [client, names, sha256(vector).digest(), joined, commitments, signature, boxes[helper][1]]
        assert message(delivery["answers"][helper], 5)[0] == [helper, context, []]
        assert message(close["messages"][helper], 6)[0][1] == members
        (who, bound, signed, signature), _ = message(close["answers"][helper], 7)
        assert (who, bound, signed) == (helper, context, name)
        verify(file["roster"]["helpers"][helper], signature, "close", number(helper), name)
    length = len(rows[0])
    total = [sum(column) for column in zip(*rows, strict=True)]
    seen: dict[tuple[int, ...], bytes] = {}
    for sent, answer in zip(opening["messages"], opening["answers"], strict=True):
        (_, packed, signatures, send, check), _ = message(sent, 8)
        (helper, bound, masks, hashes, signature), _ = message(answer, 9)
        assert packed == members
        assert len(signatures) == 3
        assert bound == context
        groups = [tuple(group) for group in (*send, *check)]
        parts = (bytes(group) + digest for group, digest in zip(groups, hashes, strict=True))
        verify(file["roster"]["helpers"][helper], signature, "open", number(helper), name, *parts)
        for group, digest in zip(groups, hashes, strict=True):
            assert seen.setdefault(group, digest) == digest
        for group, data, digest in zip(send, masks, hashes[: len(send)], strict=True):
            assert sha256(data).digest() == digest
            of_group = [mask(context, client, k, dealt[client][k], length) for client in range(3) for k in group]
            expected = [sum(column) % 2**16 for column in zip(*of_group, strict=True)]
            assert list(struct.unpack(f"<{length}H", data)) == expected
            total = [(a - b) % 2**16 for a, b in zip(total, expected, strict=True)]
    result = [value - 2**16 * (value >= 2**15) for value in total]
    assert result == file["sum"]
    assert result[:2] == [sum(column) for column in zip(*file["levels"], strict=True)]


def test_the_file_is_that_of_this_version(file: dict[str, Any]) -> None:
    """All that boxes, and what covers them, do not change."""
    fresh = vectors()
    for key in ("session", "roster", "roster_digest", "helper_seeds", "levels", "announcements", "invite", "sum"):
        assert fresh[key] == file[key]
