"""Orthonormal transforms that clients share and the server lacks: they keep inner products, norms and angles and hide coordinates.

Every client derives the same transform from a shared secret and a public purpose (epoch, round, group), applies it to what it uploads,
and the server works on the transformed rows: Gram matrices are unchanged and averages stay averages, which the clients then invert.

    kind                  what it does                                       hides from a server that lacks the secret
    permutation           puts coordinates in a secret order                 the places of the values; not the values
    signed_permutation    the same, with secret signs                        places and signs; not the sizes of the values
    hadamard              signs, Walsh-Hadamard, permutation and signs       heuristically all but the Gram matrix
    haar                  a Haar-distributed rotation                        all but the Gram matrix (d up to 8192)

All kinds have one interface, `Transform`. The transform is a function of (kind, secret, purpose, length) alone: permutations and signs bit
for bit, in every process and on every machine, Haar matrices to rounding.

Guarantee: inner products are kept, to rounding; what else is hidden differs by kind, see each. Reveals: under every kind the Gram matrix of
everything sent under one purpose (norms, angles, hence who resembles whom); rows under one purpose are linked by construction; one client
that shares its secret, or colludes, reveals the transform and with it every row.
Source: Sattler et al. 2019 (CFL), Algorithm 5, for averaging under a shared orthonormal transform.
"""

from collections.abc import Callable

from .haar import HAAR_LIMIT, Haar, haar
from .hadamard import Hadamard, hadamard
from .interface import Transform
from .permutation import Permutation, permutation, signed_permutation

__all__ = [
    "HAAR_LIMIT",
    "TRANSFORMS",
    "Haar",
    "Hadamard",
    "Permutation",
    "Transform",
    "hadamard",
    "haar",
    "permutation",
    "signed_permutation",
    "transform",
]

TRANSFORMS: dict[str, Callable[[bytes, str, int], Transform]] = {
    "permutation": permutation,
    "signed_permutation": signed_permutation,
    "hadamard": hadamard,
    "haar": haar,
}
"""kind -> the function of (secret, purpose, dimension) that makes it."""


def transform(kind: str, secret: bytes, purpose: str, dimension: int) -> Transform:
    """The transform of a kind, for the holders of `secret`, one purpose and vectors of length `dimension`.

    Raises:
        ValueError: for an unknown kind, or a dimension that the kind does not take.
    """
    if kind not in TRANSFORMS:
        raise ValueError(f"transform: {kind!r} is not known; known are {', '.join(TRANSFORMS)}")
    return TRANSFORMS[kind](secret, purpose, dimension)
