"""Which masks to remove from a sum, given the revealed shares of the secrets behind them."""

from collections.abc import Callable, Mapping

from ..errors import SumFailed
from ..keys import private_key, public_key
from .bindings import binding, pair_key, seed_commitment, self_key
from .messages import Advert, Reveal, Terms
from .policy import enough
from .shamir import combine
from .vectors import Mask

__all__ = ["masks_of"]


def masks_of(
    terms: Terms,
    agreed: bytes,
    adverts: Mapping[int, Advert],
    commitments: Mapping[int, bytes],
    members: tuple[int, ...],
    survivors: tuple[int, ...],
    reveals: Mapping[int, Reveal],
    near: Callable[[int, tuple[int, ...]], frozenset[int]],
) -> list[Mask]:
    """Σ_{u in U3} x_u = Σ_{u in U3} y_u − Σ_{u in U3} PRG(b_u) − Σ_{u in U3, v in U2∖U3, u~v} ±PRG(s_uv)   mod 2^b: the masks, with signs.

    Args:
        terms: of the sum; agreed: their context.
        adverts, commitments: of all members (U2), by client.
        members, survivors: U2 and U3.
        reveals: by keeper; every share fits its digest.
        near: the neighbours of a client among others.

    Raises:
        TooFewClients: fewer than t shares of a secret. SumFailed: "false-secret", naming those whose shares fit their
        digests but do not give the secret that they committed to.
    """
    place = {member: number for number, member in enumerate(terms.cohort, 1)}
    alive = frozenset(survivors)
    points: dict[int, list[tuple[int, bytes]]] = {client: [] for client in members}
    for keeper, reveal in sorted(reveals.items()):
        for share in (*reveal.self_shares, *reveal.key_shares):
            points[share.peer].append((place[keeper], share.share))
    needed = [client for client in members if client in alive or near(client, survivors)]
    for client in needed:
        enough(terms, len(points[client]), terms.threshold)

    bound = binding(terms)
    masks: list[Mask] = []
    offenders: list[int] = []
    for client in needed:
        keepers, shares = zip(*points[client][: terms.threshold], strict=True)
        try:
            secret = combine(keepers, shares)
        except ValueError:
            offenders.append(client)
            continue
        own = adverts[client].mask_key
        if client in alive:
            masks.append((self_key(secret, bound, client), -1))
            true = seed_commitment(agreed, client, secret) == commitments[client]
        else:
            true = public_key(secret) == own
        if not true:
            offenders.append(client)
        elif client not in alive:
            mask_secret = private_key(secret)
            for u in sorted(near(client, survivors)):
                masks.append((pair_key(mask_secret, own, adverts[u].mask_key, bound, client, u), -1 if u < client else 1))
    if offenders:
        raise SumFailed("false-secret", tuple(offenders))
    return masks
