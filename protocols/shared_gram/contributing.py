"""The statement of a holder's contribution, and its checks: by the lead, which adds up contributions, and by a server with other holders.

Guarantee: a contribution that passes is signed by its holder for this list of clients, deposits and contributors, and has the right size.
It does not show that the holder computed rightly: its values are masked. Reveals: nothing; all that is read is public.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np

from ..errors import MalformedMessage, RemoteError
from ..keys import Identity, Roster, frame, sign, verify_key
from .prime_field import PRIME, Elements
from .terms import LABEL, Delivery, GramContribution, GramTerms, decode, encode

__all__ = ["check_contribution", "contributed", "contribution", "delivery_digest", "deposit_digest", "statement_of"]


def deposit_digest(ephemeral: bytes, digests: tuple[bytes, ...]) -> bytes:
    """The digest of a deposit, by what each holder is delivered of it."""
    return sha256(frame("deposit", ephemeral, *digests)).digest()


def delivery_digest(delivery: bytes, terms: GramTerms) -> bytes:
    """The digest of the deposit that a delivery is of. Raises `MalformedMessage`."""
    message = decode(delivery, Delivery, terms)
    return deposit_digest(message.ephemeral, message.digests)


def statement_of(
    terms: GramTerms, keys: bytes, clients: Sequence[int], new: int, contributors: Sequence[int], deposits: Mapping[int, bytes]
) -> bytes:  # fmt: skip
    """What all contributors state: the epoch, its keys, the list of clients of which the last `new` are new, and their `deposits` (digests
    by client)."""
    lists = pair(len(clients), new), b"".join(pair(number, 0) for number in contributors)
    each = [frame("one", pair(client, 0), deposits[client]) for client in clients]
    return sha256(frame(LABEL + "statement", terms.digest, sha256(keys).digest(), *lists, *each)).digest()


def contribution(terms: GramTerms, identity: Identity, holder: int, statement: bytes, masked: Elements) -> bytes:
    """A holder's signed contribution of its masked products."""
    values = masked.astype("<u8").tobytes()
    return encode(GramContribution(terms.digest, holder, statement, values, sign(identity, *_signed(terms, holder, statement, values))))


def contributed(data: bytes, terms: GramTerms, roster: Roster, statement: bytes, shape: tuple[int, int]) -> tuple[int, Elements]:
    """The holder of a contribution and its masked products, of this shape.

    Raises:
        RemoteError: "malformed", "bad-signature", "other-contribution" for one to another statement.
    """
    message = decode(data, GramContribution, terms)
    if message.holder >= len(roster.holders):
        raise MalformedMessage
    signed = _signed(terms, message.holder, message.statement, message.values)
    verify_key(roster.holders[message.holder], message.holder, message.signature, *signed)
    if message.statement != statement:
        raise RemoteError("other-contribution")
    if len(message.values) != 8 * shape[0] * shape[1]:
        raise MalformedMessage
    values = np.frombuffer(message.values, dtype="<u8").astype(np.uint64)
    if (values >= np.uint64(PRIME)).any():
        raise MalformedMessage
    return message.holder, values.reshape(shape)


def check_contribution(
    data: bytes, terms: GramTerms, keys: bytes, roster: Roster, holder: int, clients: Sequence[int], new: int, contributors: Sequence[int],
    deposits: Mapping[int, bytes],
) -> None:  # fmt: skip
    """Check the contribution of a holder that was asked for these lists, for a server, which can ask another one in its place.

    Raises `RemoteError` as `contributed`, "other-contribution" also for that of another holder.
    """
    statement = statement_of(terms, keys, clients, new, contributors, deposits)
    if contributed(data, terms, roster, statement, (len(clients) * terms.p, new * terms.p))[0] != holder:
        raise RemoteError("other-contribution")


def _signed(terms: GramTerms, holder: int, statement: bytes, values: bytes) -> tuple[str, bytes, bytes, bytes, bytes]:
    return LABEL + "contribution", terms.digest, pair(holder, 0), statement, sha256(values).digest()


def pair(first: int, second: int) -> bytes:
    """Two numbers as 16 bytes."""
    return first.to_bytes(8, "big") + second.to_bytes(8, "big")
