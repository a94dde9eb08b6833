"""The vectors of the specification, read by a decoder that uses nothing of the package: MessagePack, hashes, signatures, boxes and masks
anew."""

import json
import struct
from bisect import bisect_right
from decimal import Decimal, localcontext
from fractions import Fraction
from hashlib import sha256
from itertools import accumulate, combinations
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


@pytest.fixture(scope="module", params=["", "blocks", "noised"])
def each(file: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each sum of the file."""
    part: dict[str, Any] = file[request.param] if request.param else file
    return part


def agreed(file: dict[str, Any]) -> tuple[list[Any], bytes]:
    """The terms and their context. The terms are the first field of the invitation, and are encoded as a message of their own."""
    fields, body = message(file["invite"], 2)
    raw = body[2 : unpack(body, 2)[1]]  # after the array's head and the tag
    whole = b"CFLP\x01" + raw
    return fields[0], hashed("context", whole + sha256(whole).digest()[:16])


NAMES = (
    "session", "round", "sum", "helpers", "colluding", "keys", "minimum", "maximum", "cohort_change", "models", "roster", "bits", "clip",
    "levels", "dimension", "weight_limit", "least_weight", "cohort", "clusters", "noise",
)  # fmt: skip
MEMBERS = b"".join(client.to_bytes(4, "little") for client in range(3))


def stated_terms(file: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(NAMES, agreed(file)[0], strict=True))


def test_terms_and_keys(each: dict[str, Any]) -> None:
    file = each
    _, context = agreed(file)
    stated = stated_terms(file)
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
    assert stated["maximum"] * stated["levels"] + 3 * 13 * stated["noise"] <= 2**15 - 1
    assert (stated["cohort"], stated["clusters"], stated["noise"]) in ((b"", 0, 0), (b"", 2, 0), (MEMBERS, 0, 24))
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


def vector_digest(file: dict[str, Any], vector: bytes) -> bytes:
    """The counts, if a vector has several blocks, and a digest of all that follows."""
    counts = 2 * stated_terms(file)["clusters"]
    return vector[:counts] + sha256(vector[counts:]).digest()


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
            vector_digest(file, vector),
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


def signed(residues: list[int]) -> list[int]:
    return [value - 2**16 * (value >= 2**15) for value in residues]


def masked_levels(file: dict[str, Any]) -> list[list[int]]:
    """What the clients put in, in the order of a masked vector: with blocks first the counts, in levels, then the blocks."""
    if not stated_terms(file)["clusters"]:
        return [[*own, 0] for own in file["levels"]]
    filled = [[0, 1], [0, 1], [1, 1]]
    return [[*(5000 * one for one in of), *(one * x for one in of for x in own), 0] for of, own in zip(filled, file["levels"], strict=True)]


def test_uploads_open_to_the_levels(each: dict[str, Any]) -> None:
    _, context = agreed(each)
    _, rows, dealt = uploads(each)
    for client, (row, seeds) in enumerate(zip(rows, dealt, strict=True)):
        own = list(row)
        for k, seed in enumerate(seeds):
            own = [(a - b) % 2**16 for a, b in zip(own, mask(context, client, k, seed, len(row)), strict=True)]
        assert signed(own) == masked_levels(each)[client]


def noise(file: dict[str, Any], name: bytes, k: int, seeds: list[bytes], length: int) -> list[int]:
    """The helpers' noise of a seed by exact fractions, but for the exponential function (here of 60 digits)."""
    deviation = stated_terms(file)["noise"]
    if not deviation:
        return [0] * length
    with localcontext() as exact:
        exact.prec = 60
        weights = [(Decimal(-x * x) / (2 * deviation * deviation)).exp() for x in range(-13 * deviation, 13 * deviation + 1)]
        below = [Fraction(part) for part in accumulate(weights)]
    stream = Cipher(algorithms.AES(hashed("noise", name, number(k), *seeds)), modes.CTR(bytes(16))).encryptor().update(bytes(16))
    words = struct.unpack("<2Q", stream)
    drawn = [bisect_right(below, Fraction(word, 2**64) * below[-1]) - 13 * deviation for word in words]
    return [*drawn, *[0] * (length - 2)]


def test_helpers_messages_and_the_sum(each: dict[str, Any]) -> None:
    file = each
    _, context = agreed(file)
    stated = stated_terms(file)
    digests, rows, dealt = uploads(file)
    name = hashed("set", context, *digests)
    delivery, close, *openings = file["helpers"]
    for helper in range(3):
        (_, items), _ = message(delivery["messages"][helper], 4)
        for client, item in enumerate(items):
            (_, _, names, vector, boxes, commitments, signature), _ = message(file["uploads"][client], 3)
            joined = b"".join(sha256(box).digest() for _, box in boxes)
            assert item == [client, names, vector_digest(file, vector), joined, commitments, signature, boxes[helper][1]]
        assert message(delivery["answers"][helper], 5)[0] == [helper, context, []]
        assert message(close["messages"][helper], 6)[0][1] == MEMBERS
        (who, bound, named, signature), _ = message(close["answers"][helper], 7)
        assert (who, bound, named) == (helper, context, name)
        verify(file["roster"]["helpers"][helper], signature, "close", number(helper), name)
    length = len(rows[0])
    total = [sum(column) for column in zip(*rows, strict=True)]
    counts = list(range(stated["clusters"]))
    places = [counts, [4, 5, 6]] if counts else [list(range(length))]  # of the blocks only the second has three clients
    for opening, label, at in zip(openings, ["count", "open"] if counts else ["open"], places, strict=True):
        whole = _masks(file, opening, label, name, dealt, length)
        for place in at:
            total[place] = (total[place] - whole[at.index(place)]) % 2**16
    known = {place for several in places for place in several}
    result = signed([value if place in known else 0 for place, value in enumerate(total)])
    if counts:
        assert [count // 5000 for count in result[:2]] == [1, 3]
        assert file["sum"] == [*[0, 0, result[0]], *[*result[4:6], result[1]], result[6]]  # each count after its block
        assert result[4:6] == [sum(column) for column in zip(*file["levels"], strict=True)]
        return
    assert result == file["sum"]
    added = [noise(file, name, k, [seeds[k] for seeds in dealt], length) for k in range(3)]
    assert result == [sum(column) for column in zip(*masked_levels(file), *added, strict=True)]


def _columns(rows: list[list[int]]) -> list[tuple[int, ...]]:
    return list(zip(*rows, strict=True))


def _masks(file: dict[str, Any], opening: dict[str, Any], label: str, name: bytes, dealt: list[list[bytes]], length: int) -> list[int]:
    """The sum of all masks less the noise, of each seed once, from the helpers' answers of a stage, each checked."""
    _, context = agreed(file)
    counts = stated_terms(file)["clusters"]
    at = list(range(length)) if not counts else list(range(counts)) if label == "count" else [4, 5, 6]
    seen: dict[tuple[int, ...], bytes] = {}
    whole, left = [0] * len(at), {0, 1, 2}
    for sent, answer in zip(opening["messages"], opening["answers"], strict=True):
        (_, packed, signatures, send, check, counted), _ = message(sent, 8)
        (helper, bound, masks, hashes, signature), _ = message(answer, 9)
        assert packed == MEMBERS
        assert len(signatures) == 3
        assert bound == context
        groups = [tuple(group) for group in (*send, *check)]
        parts = (bytes(group) + digest for group, digest in zip(groups, hashes, strict=True))
        verify(file["roster"]["helpers"][helper], signature, label, number(helper), name, *parts)
        assert len(counted) == (3 if counts and label == "open" else 0)
        for who, of_counts, by in counted:  # what this helper sent of the counts
            (_, _, earlier, _, signed_before), _ = message(file["helpers"][2]["answers"][who], 9)
            assert (of_counts, by) == (earlier, signed_before)
        for group, digest in zip(groups, hashes, strict=True):
            assert seen.setdefault(group, digest) == digest
        for group, data, digest in zip(send, masks, hashes[: len(send)], strict=True):
            assert sha256(data).digest() == digest
            of_group = [mask(context, client, k, dealt[client][k], length) for client in range(3) for k in group]
            of_noise = [noise(file, name, k, [seeds[k] for seeds in dealt], length) for k in group]
            expected = [(sum(column) - sum(drawn)) % 2**16 for column, drawn in zip(_columns(of_group), _columns(of_noise), strict=True)]
            assert list(struct.unpack(f"<{len(at)}H", data)) == [expected[place] for place in at]
            if set(group) <= left:
                left -= set(group)
                whole = [a + expected[place] for a, place in zip(whole, at, strict=True)]
    assert not left
    return whole


def test_the_file_is_that_of_this_version(file: dict[str, Any]) -> None:
    """All that boxes, and what covers them, do not change."""
    fresh = vectors()
    for part, written in ((fresh, file), *((fresh[name], file[name]) for name in ("blocks", "noised"))):
        for key in ("session", "roster", "roster_digest", "helper_seeds", "levels", "announcements", "invite"):
            assert part[key] == written[key]
    for name in ("", "blocks"):  # noise is of the members' seeds
        assert (fresh[name] if name else fresh)["sum"] == (file[name] if name else file)["sum"]
