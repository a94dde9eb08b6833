"""Complaints about unusable shares: how a keeper raises them and how they are settled.

It complains in place of sending its masked vector. The server asks the dealer to open these shares in public. If they fit the digests the
keeper has its shares, and nobody is blamed: the dealer may have sealed nonsense, or the keeper may have complained about nothing. If they
do not fit, the dealer broke the protocol; the attempt ends before any share is revealed, and the sum can be taken again without the dealer.

Guarantee: with an honest server, an honest dealer that answers is never blamed, and every honest keeper that sends its masked vector has
the shares that the digests name. An opening shows the server nothing new where the keeper is dishonest. A server that lies can make an
honest dealer open shares of honest keepers, so a dealer opens at most `most_openings` of them, all at once and once: together with the
shares of colluding clients they are fewer than t. Complaints need no signature for that. The signature of an opening names both mask
keys, as the box does, so that a settled complaint confirms the keys like an opened box. Reveals: who complained about whom; the opened
shares.
Source: the complaints of verifiable secret sharing (Pedersen 1991, section 4.2); the bound on openings is ours.
"""

from collections.abc import Mapping, Sequence

from ..errors import RemoteError, SumFailed
from ..keys import Identity, Roster, sign, verify
from .bindings import OPENED, opened_parts
from .messages import Advert, Opened, Opening, Terms
from .shares import Digests, Pair, fits

__all__ = ["by_dealer", "check_opened", "most_openings", "open_dealt", "settled"]


def most_openings(terms: Terms) -> int:
    """To how many keepers a dealer opens its shares.

    Against a server that lies (active mode) the openings for honest keepers and the shares of c < n/3 colluding clients must be fewer than
    t, because the honest keepers reveal the other secret: at most t − 1 − c. As t > 2n/3 that is at least c, so complaints of c dishonest
    keepers are always answered. In passive mode the server follows the protocol, and all openings are for colluders, of whom there
    are at most t − 1.
    """
    return terms.threshold - 1 - ((len(terms.cohort) - 1) // 3 if terms.mode == "active" else 0)


def open_dealt(
    terms: Terms,
    agreed: bytes,
    identity: Identity,
    mask_key: bytes,
    peers: Sequence[Advert],
    dealt: Sequence[Pair],
    accusers: Sequence[int],
) -> Opening:
    """The shares that this client dealt to `accusers`.

    Args:
        terms: of the sum; agreed: their context.
        identity: of the dealer; mask_key: its public mask key; peers: the adverts that it was shown.
        dealt: its shares by keeper.

    Raises:
        RemoteError: "unknown-client" for others than the keepers, "too-many-complaints".
    """
    shares = {pair.peer: pair for pair in dealt}
    if not accusers or not set(accusers) <= shares.keys():
        raise RemoteError("unknown-client")
    if len(accusers) > most_openings(terms):
        raise RemoteError("too-many-complaints")
    keys = {advert.client: advert.mask_key for advert in peers}
    opened = []
    for keeper in accusers:
        pair = shares[keeper]
        parts = opened_parts(agreed, identity.client, keeper, mask_key, keys[keeper], pair.self_share + pair.key_share)
        signature = sign(identity, OPENED, *parts) if terms.mode == "active" else b""
        opened.append(Opened(keeper, pair.self_share, pair.key_share, signature))
    return Opening(identity.client, agreed, tuple(opened))


def check_opened(agreed: bytes, owner: Advert, keeper: int, keeper_key: bytes, opened: Opened, roster: Roster | None) -> None:
    """Checks the signature of an opening (active mode, with `roster`), or that there is none.

    Raises:
        RemoteError: "bad-signature" or "unexpected-signature".
    """
    if roster is not None:
        parts = opened_parts(agreed, owner.client, keeper, owner.mask_key, keeper_key, opened.self_share + opened.key_share)
        verify(roster, owner.client, opened.signature, OPENED, *parts)
    elif opened.signature:
        raise RemoteError("unexpected-signature", owner.client)


def by_dealer(complaints: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Who complained about whom: by accused dealer, from `complaints` by accuser."""
    accusers_of: dict[int, tuple[int, ...]] = {}
    for accuser, accused in sorted(complaints.items()):
        for dealer in accused:
            accusers_of[dealer] = (*accusers_of.get(dealer, ()), accuser)
    return accusers_of


def settled(
    agreed: bytes,
    complaints: Mapping[int, Sequence[int]],
    openings: Mapping[int, Sequence[Opened]],
    adverts: Mapping[int, Advert],
    digests: Mapping[int, Mapping[int, Digests]],
    roster: Roster | None,
) -> dict[int, tuple[Opened, ...]]:
    """For every client that complained the shares that it has not got, each by its dealer.

    Args:
        agreed: the context of the terms.
        complaints: by accuser. openings: by dealer.
        adverts: of all members. digests: by dealer and keeper.
        roster: in active mode.

    Raises:
        SumFailed: "false-shares", naming dealers that opened others than they had dealt, and those that opened none.
    """
    accusers = by_dealer(complaints)

    def good(dealer: int) -> bool:
        if tuple(opened.peer for opened in openings[dealer]) != accusers[dealer]:
            return False
        try:
            for opened in openings[dealer]:
                check_opened(agreed, adverts[dealer], opened.peer, adverts[opened.peer].mask_key, opened, roster)
        except RemoteError:
            return False
        return all(fits(agreed, dealer, opened.peer, opened, digests[dealer][opened.peer]) for opened in openings[dealer])

    absent = tuple(sorted(accusers.keys() - openings.keys()))
    offenders = tuple(dealer for dealer in sorted(openings) if not good(dealer))
    if absent or offenders:
        raise SumFailed("false-shares", offenders, absent, repeatable=True)
    inbox: dict[int, list[Opened]] = {client: [] for client in complaints}
    for dealer in sorted(openings):
        for opened in openings[dealer]:
            inbox[opened.peer].append(Opened(dealer, opened.self_share, opened.key_share, opened.signature))
    return {client: tuple(shares) for client, shares in inbox.items()}
