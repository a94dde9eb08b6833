"""Forward secrecy: numbered keys of a hash chain whose past is erased, so that a later compromise does not open earlier values.

The chain of number k + 1 is a hash of that of k; the key of number k is derived from the chain of k. Whoever goes on to number k keeps the
key of k, those of earlier numbers that are still wanted, and the chain of k + 1. All members follow the same chain at their own pace: a
member that was away hashes forward.

Guarantee: from a state after number k nobody works out a key of an earlier number that was not kept, nor the chain of k or earlier (SHA-256
is one-way; HKDF). Nothing goes backward. Reveals: a state opens the keys that were kept and **all later ones**: what comes after a theft is
protected by a new group epoch only. Copies of a state made earlier (backups, checkpoints) open what they could then.
Source: ours, of standard parts: a symmetric ratchet, as in Perrin & Marlinspike 2016, section 2.2, without its Diffie-Hellman part.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec, keys
from ..errors import RemoteError
from ..uncopied import uncopied
from .messages import LABEL

__all__ = ["MOST_KEPT", "NUMBERS", "Ratchet"]

NUMBERS = 1 << 14
"""Numbers go from 0 to below this: the leader's commitment is to the chain's end, and whoever checks it hashes all the way."""
MOST_KEPT = 64
_STEP = (LABEL + "step").encode()
_ends: dict[bytes, bytes] = {}
_MOST_ENDS = 8

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Number = Annotated[int, Meta(ge=0, le=NUMBERS)]


@uncopied("a copy would keep what is erased")
class Ratchet(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`chain` is that of number `position`; `kept` are keys of earlier numbers, ascending."""

    _shown = ("position",)

    position: Number
    chain: Key
    kept: Annotated[tuple[tuple[Number, Key], ...], Meta(max_length=MOST_KEPT)] = ()

    def __post_init__(self) -> None:
        numbers = [number for number, _ in self.kept]
        if numbers != sorted(set(numbers)) or (numbers and numbers[-1] >= self.position):
            raise ValueError("kept: expected keys of earlier numbers, ascending")

    def moved(self, number: int, keep: Iterable[int] = ()) -> "Ratchet":
        """The state after going on to `number`: it has the keys of `number` and of the earlier numbers in `keep`, and no other earlier one.

        For a number that was passed nothing changes: what was erased does not come back, and nothing more is.

        Raises:
            RemoteError: "too-far" for numbers from `NUMBERS` on, or more than `MOST_KEPT` kept ones.
        """
        if number < self.position:
            return self
        wanted = {number, *keep}
        if number >= NUMBERS or len(wanted) > MOST_KEPT:
            raise RemoteError("too-far")
        kept, chain = [key for key in self.kept if key[0] in wanted], self.chain
        for passed in range(self.position, number + 1):
            if passed in wanted:
                kept.append((passed, keys.derive(chain, LABEL + "numbered key", passed.to_bytes(4, "big"))))
            chain = sha256(_STEP + chain).digest()
        return Ratchet(number + 1, chain, tuple(kept))

    def key(self, number: int) -> bytes | None:
        """The 32-byte key of a number that was gone on to and kept; None for every other one."""
        return dict(self.kept).get(number)

    def end(self) -> bytes:
        """The chain's last value, the same for all who have the same chain, wherever they are on it. It reveals nothing of earlier values.

        Remembered by the hash of the chain: where all members live in one process, each asks about the same one.
        """
        name = sha256(self.position.to_bytes(4, "big") + self.chain + b"end").digest()
        if name not in _ends:
            chain = self.chain
            for _ in range(self.position, NUMBERS):
                chain = sha256(_STEP + chain).digest()
            while len(_ends) >= _MOST_ENDS:
                _ends.pop(next(iter(_ends)), None)
            _ends[name] = chain
        return _ends[name]
