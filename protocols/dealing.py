"""Deal clients into buckets so that no party chooses who shares a bucket with whom.

Commit, then open. Every client draws a nonce and shows its hash. Who has been shown the hashes of all on the list opens its own, once. The
dealing is a public function of the list and of all nonces, so whoever has them can check it.

Guarantee: to a client that follows the protocol, the dealing of the list that it was shown is uniform (SHA-256 taken for a random oracle),
even if the server and all other clients collude: their nonces were fixed when it opened its own. Who is on the list is the server's choice.
Reveals: the list and the dealing, to everybody on it. What abort can bias: the server sees the nonces first and may stop a dealing that it
does not like; each new one is a fresh draw, so after k attempts it has the best of k uniform dealings. A client that withholds its nonce
causes a new dealing without it, one for each such client.
Source: Blum 1983 (coin flipping by telephone) with more than two parties.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256

from .errors import RemoteError

__all__ = ["NONCE_BYTES", "buckets_of", "check_opened", "commitment", "deal_buckets", "seed_of"]

NONCE_BYTES = 32
Slot = tuple[int, int, int]
"""Names a dealing in its session: the turn of the round, the call of a mean in it, the attempt."""


def commitment(session: bytes, slot: Slot, client: int, nonce: bytes) -> bytes:
    """The hash (32 bytes) by which a client fixes its nonce (32 bytes)."""
    return _hash("commitment", session, *map(_number, slot), _number(client), nonce)


def check_opened(session: bytes, slot: Slot, listed: Mapping[int, bytes], opened: Mapping[int, bytes]) -> None:
    """Raises `RemoteError` "bad-dealing" unless `opened` are the nonces of all whose commitments are `listed`."""
    if set(listed) != set(opened):
        raise RemoteError("bad-dealing")
    for client, nonce in opened.items():
        if len(nonce) != NONCE_BYTES or commitment(session, slot, client, nonce) != listed[client]:
            raise RemoteError("bad-dealing", client)


def seed_of(session: bytes, slot: Slot, opened: Mapping[int, bytes]) -> bytes:
    """The seed (32 bytes) of the dealing of these clients, from the nonces of all."""
    parts = [part for client in sorted(opened) for part in (_number(client), opened[client])]
    return _hash("seed", session, *map(_number, slot), *parts)


def buckets_of(size: int, smallest: int, most: int = 0) -> int:
    """Into how many buckets of at least `smallest` clients a list of `size` is dealt, `most` of them (0: as many as there can be)."""
    there = size // smallest
    return min(there, most) if most else there


def deal_buckets(seed: bytes, clients: Iterable[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Deal clients into `count` buckets whose sizes differ by one at most; each bucket ascending."""
    order = sorted(clients, key=lambda client: (_hash("place", seed, _number(client)), client))
    return tuple(tuple(sorted(order[place::count])) for place in range(count))


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _hash(purpose: str, *parts: bytes) -> bytes:
    """SHA-256 of a purpose and parts, each with its length."""
    digest = sha256(b"cflpriv dealing v1 ")
    for part in (purpose.encode(), *parts):
        digest.update(_number(len(part)) + part)
    return digest.digest()
