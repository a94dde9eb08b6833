"""Verifiable sharing of both secrets of a client among its neighbours.

A dealer seals one share of each secret for every neighbour, and sends the digest of every share, and a commitment to the seed of its self
mask, in the open. A keeper takes only shares that fit; what follows if they do not is in `complaints`.

Guarantee: whoever is shown a share later can tell whether it is the one that was dealt. A box opens only if its dealer and its keeper were
shown the same mask keys. Reveals: digests and commitments hide what they are of (SHA-256 as a random oracle: single shares and seeds are
uniform over 2^256 numbers). That all shares lie on one polynomial shows only when the secret is rebuilt.
Source: verifiable secret sharing (Feldman 1987), with digests instead of homomorphic commitments.
"""

from collections.abc import Mapping, Sequence

import msgspec

from .. import codec
from ..entropy import Entropy
from ..errors import RemoteError
from ..keys import seal, unseal
from .bindings import seed_commitment, share_associated_data, share_digest
from .messages import Advert, Opened, Sealed, Shares, Terms
from .shamir import SHARE_BYTES, split

__all__ = ["Digests", "Pair", "deal", "fits", "open_box"]

Digests = tuple[bytes, bytes]
"""Of the share of the self-mask seed, and of that of the mask-key seed."""


class Pair(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A share of each secret: of `peer`'s secrets where they were entrusted, of the own secrets where they were dealt to `peer`."""

    _shown = ("peer",)

    peer: int
    self_share: bytes
    key_share: bytes


def deal(
    terms: Terms,
    agreed: bytes,
    me: int,
    peers: Sequence[Advert],
    box_keys: Mapping[int, bytes],
    seeds: tuple[bytes, bytes],
    mask_key: bytes,
    entropy: Entropy,
) -> tuple[Shares, tuple[Pair, ...]]:
    """The message with everybody's shares, and the shares themselves, by keeper and with those of `me` among them.

    Args:
        terms: of the sum; agreed: their context.
        me: the dealer. peers: the adverts of its neighbours. box_keys: the key of the box to each.
        seeds: of the self mask and of the mask key; mask_key: the public mask key.
        entropy: draws polynomials and nonces.
    """
    place = {member: number for number, member in enumerate(terms.cohort, 1)}
    holders = sorted([me, *(advert.client for advert in peers)])
    keepers = [place[holder] for holder in holders]
    self_shares, key_shares = (split(seed, terms.threshold, keepers, entropy) for seed in seeds)
    dealt = {peer: Pair(peer, *shares) for peer, *shares in zip(holders, self_shares, key_shares, strict=True)}
    boxes = []
    for peer in peers:
        pair = dealt[peer.client]
        associated = share_associated_data(agreed, me, peer.client, mask_key, peer.mask_key)
        box = seal(box_keys[peer.client], pair.self_share + pair.key_share, associated, entropy)
        boxes.append(Sealed(peer.client, box, *_digests(agreed, me, pair.peer, pair)))
    shares = Shares(me, agreed, seed_commitment(agreed, me, seeds[0]), *_digests(agreed, me, me, dealt[me]), tuple(boxes))
    return shares, tuple(dealt.values())


def open_box(agreed: bytes, sealed: Sealed, me: int, key: bytes, owner_key: bytes, my_key: bytes) -> Pair | None:
    """The shares in the box from `sealed.peer`, None if there are none that fit the digests; the box names both public mask keys."""
    try:
        opened = unseal(key, sealed.box, share_associated_data(agreed, sealed.peer, me, owner_key, my_key))
    except RemoteError:
        return None
    pair = Pair(sealed.peer, opened[:SHARE_BYTES], opened[SHARE_BYTES:])
    return pair if fits(agreed, sealed.peer, me, pair, (sealed.self_digest, sealed.key_digest)) else None


def fits(agreed: bytes, owner: int, keeper: int, pair: Pair | Opened, digests: Digests) -> bool:
    """Whether both shares are those of the digests."""
    return _digests(agreed, owner, keeper, pair) == digests


def _digests(agreed: bytes, owner: int, keeper: int, pair: Pair | Opened) -> Digests:
    return share_digest("self", agreed, owner, keeper, pair.self_share), share_digest("key", agreed, owner, keeper, pair.key_share)
