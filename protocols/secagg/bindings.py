"""Contexts to which the keys, boxes, digests and signatures of a sum are bound.

One place for all labels. Each label is used for one purpose; each binds to the context (a hash of all public
terms), and the mask keys name the session, the slot and the hash of the list of models once more.

Guarantee: what was made for one session, round, sum, pair, direction or list of models fits no other. Source:
Bonawitz et al. 2017, figure 4, where keys and signatures are bound to nothing but the users; the bindings are
ours.
"""

import hashlib
from functools import lru_cache
from hashlib import sha256
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ..errors import RemoteError
from ..keys import Roster, agree, derive, frame, verify
from . import messages
from .messages import LABEL, Advert, Slot, Terms

__all__ = [
    "ADVERT",
    "CONSISTENT",
    "OPENED",
    "advert_parts",
    "binding",
    "box_key",
    "check_advert",
    "opened_parts",
    "pair_key",
    "seed_commitment",
    "self_key",
    "share_associated_data",
    "share_digest",
]

ADVERT = LABEL + "advert"
"""Label of the signature over `advert_parts`."""

CONSISTENT = LABEL + "consistent"
"""Label of the signature over (context, U2, U3)."""

OPENED = LABEL + "opened"
"""Label of the signature over `opened_parts`."""


def advert_parts(session: bytes, slot: Slot, client: int, encryption_key: bytes, mask_key: bytes) -> tuple[bytes, ...]:
    """What the signature of an advert covers."""
    numbers = b"".join(number.to_bytes(8, "big") for number in (*slot, client))
    return session, numbers, encryption_key, mask_key


def check_advert(advert: Advert, session: bytes, slot: Slot, mode: str, roster: Roster | None) -> None:
    """Checks that an advert is for this session and slot and, in active mode, signed by its client.

    Raises:
        RemoteError: "wrong-context", "bad-signature" or "unexpected-signature".
    """
    if advert.session != session or advert.slot != slot:
        raise RemoteError("wrong-context", advert.client)
    if mode == "active":
        assert roster is not None
        parts = advert_parts(session, slot, advert.client, advert.encryption_key, advert.mask_key)
        verify(roster, advert.client, advert.signature, ADVERT, *parts)
    elif advert.signature:
        raise RemoteError("unexpected-signature", advert.client)


def share_associated_data(agreed: bytes, source: int, target: int, source_key: bytes, target_key: bytes) -> bytes:
    """What a box of shares is bound to: the context, its direction, and the mask keys of both as the sealing side saw them."""
    return frame(LABEL + "shares", agreed, source.to_bytes(8, "big"), target.to_bytes(8, "big"), source_key, target_key)


def box_key(own: X25519PrivateKey, other: bytes, agreed: bytes, me: int, peer: int) -> bytes:
    """The key of the two boxes of shares between `me` and `peer`, whose associated data name the direction.

    Args:
        own: the private encryption key of `me`; other: the public one of `peer`.
        agreed: the context of the sum.

    Raises:
        RemoteError: "bad-key" for a public key of small order.
    """
    low, high = sorted((me, peer))
    return agree(own, other, LABEL + "box", agreed, low.to_bytes(8, "big") + high.to_bytes(8, "big"))


def share_digest(kind: Literal["self", "key"], agreed: bytes, owner: int, keeper: int, share: bytes) -> bytes:
    """32 bytes that bind `owner` to the share that `keeper` holds of its self-mask seed ("self") or of its mask-key seed ("key").

    One share is uniform over 2^256 numbers, so the digest hides it (SHA-256 as a random oracle).
    """
    digest = _share_prefix(kind, agreed).copy()
    digest.update(_PAIR_BYTES + owner.to_bytes(8, "big") + keeper.to_bytes(8, "big") + len(share).to_bytes(4, "big") + share)
    return digest.digest()


_PAIR_BYTES = (16).to_bytes(4, "big")


@lru_cache(maxsize=16)
def _share_prefix(kind: str, agreed: bytes) -> "hashlib._Hash":
    """The digest so far of frame(label, agreed, …), which is the same for all shares of a sum."""
    return sha256(frame(LABEL + kind + " share", agreed))


def seed_commitment(agreed: bytes, owner: int, self_seed: bytes) -> bytes:
    """32 bytes that bind `owner` to the seed of its self mask. (Its public mask key binds it to the other seed.)"""
    return sha256(frame(LABEL + "self seed", agreed, owner.to_bytes(8, "big"), self_seed)).digest()


def opened_parts(agreed: bytes, owner: int, keeper: int, owner_key: bytes, keeper_key: bytes, shares: bytes) -> tuple[bytes, ...]:
    """What the signature covers of `owner` that opens the shares which it dealt to `keeper`: with the mask keys as the owner saw them."""
    pair = owner.to_bytes(8, "big") + keeper.to_bytes(8, "big")
    return agreed, pair, owner_key, keeper_key, shares


def binding(terms: Terms) -> tuple[bytes, ...]:
    """Session, round, sum and the list of models, and (through the context) all the other terms."""
    slot = b"".join(number.to_bytes(8, "big") for number in terms.slot)
    return terms.session, slot, messages.model_list(terms), messages.context(terms)


def self_key(self_seed: bytes, bound: tuple[bytes, ...], client: int) -> bytes:
    """The key of the self mask that seed b_u gives in this sum."""
    return derive(self_seed, LABEL + "self mask", *bound, client.to_bytes(8, "big"))


def pair_key(secret: X25519PrivateKey | bytes, own: bytes, other: bytes, bound: tuple[bytes, ...], me: int, peer: int) -> bytes:
    """The key s_uv of the mask between `me` and `peer`; the same from both sides.

    Args:
        secret: the private mask key of `me`, or its seed; `own` is its public key.
        other: the public mask key of `peer`.
        bound: `binding` of the terms.

    Raises:
        RemoteError: "bad-key" for a public key of small order.
    """
    (low, low_key), (high, high_key) = sorted([(me, own), (peer, other)])
    pair = low.to_bytes(8, "big") + high.to_bytes(8, "big")
    return agree(secret, other, LABEL + "pair mask", *bound, pair, low_key, high_key)
