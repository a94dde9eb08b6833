"""A client's side: check the holders' keys, quantise, share, seal, sign."""

from hashlib import sha256

import numpy as np
import numpy.typing as npt

from ..entropy import Entropy, derive, system_entropy
from ..errors import LocalError
from ..keys import Identity, Roster, agree, frame, public_key, seal, sign
from .prime_field import Elements, of_integers, plus, times, uniform
from .terms import LABEL, Deposit, GramTerms, checked_keys, encode, signed_deposit

__all__ = ["box_binding", "deposit", "shamir_shares"]


def shamir_shares(values: Elements, points: tuple[int, ...], colluding: int, key: bytes) -> dict[int, Elements]:
    """Shamir's shares of an array at some points: f(point), for a polynomial f of degree `colluding` with f(0) = `values`, uniform else.

    Guarantee: the shares at any `colluding` points are uniform, whatever `values` are. Source: Shamir 1979. `key` is a secret, and serves
    once.
    """
    coefficients = [uniform(derive(key, "coefficient", power), values.shape) for power in range(colluding)]
    values_at = {}
    for point in points:
        total = np.zeros_like(values)
        for coefficient in coefficients:
            total = times(plus(total, coefficient), point)
        values_at[point] = plus(total, values)
    return values_at


def deposit(
    terms: GramTerms, keys: bytes, roster: Roster, identity: Identity, rows: npt.NDArray[np.floating], *, entropy: Entropy = system_entropy
) -> bytes:
    """A client's upload: a sealed share of `rows` (p, d) for each holder whose key is among the announced `keys`.

    Guarantee: the server and any `GramTerms.colluding` of the holders learn nothing of the rows from it.
    Reveals: that the client takes part.
    Source: Shamir 1979; X25519 and AES-256-GCM as in `keys`, under an ephemeral key.

    Raises:
        RemoteError: see `terms.checked_keys`: keys of other parties than the roster's holders, of other terms, or too few.
        LocalError: "out-of-range" for rows of another shape, longer than the bound, or not finite.
    """
    holders = checked_keys(keys, terms, roster)
    rows = np.asarray(rows, dtype=np.float64)
    if rows.shape != (terms.p, terms.dimension):
        raise LocalError("out-of-range", f"rows of shape {rows.shape}, the epoch has {(terms.p, terms.dimension)}")
    # slightly beyond the bound is rounding: unit vectors in float32
    if not np.isfinite(rows).all() or np.linalg.norm(rows, axis=1).max() > terms.bound * (1 + 1e-3):
        raise LocalError("out-of-range", f"a vector is longer than the epoch's bound of {terms.bound:g}, or not finite")
    values = of_integers(np.rint(rows * terms.scale).astype(np.int64))
    own, vector_shares = entropy(32), shamir_shares(values, tuple(number + 1 for number in holders), terms.colluding, entropy(32))
    ephemeral = public_key(own)
    boxes = []
    for number, key in holders.items():
        binding = box_binding(terms, keys, identity.client, number)
        sealing = agree(own, key, LABEL + "box", binding)
        boxes.append(seal(sealing, vector_shares[number + 1].astype("<u8").tobytes(), binding, entropy))
    digests = tuple(sha256(box).digest() for box in boxes)
    signature = sign(identity, LABEL + "deposit", terms.digest, signed_deposit(keys, identity.client, ephemeral, digests))
    return encode(Deposit(terms.digest, identity.client, ephemeral, tuple(boxes), signature))


def box_binding(terms: GramTerms, keys: bytes, client: int, holder: int) -> bytes:
    """What a sealed share is bound to: the epoch, its keys, the sender and the recipient."""
    parties = client.to_bytes(8, "big"), holder.to_bytes(8, "big")
    return frame(LABEL + "box", terms.digest, sha256(keys).digest(), *parties)
