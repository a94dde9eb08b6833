"""A client's side: check the key, quantise, pack, encrypt, sign."""

import numpy as np
import numpy.typing as npt

from ..errors import LocalError
from ..keys import Identity, sign, verify_key
from .messages import LABEL, Announcement, Setup, Upload, ciphertexts_digest, decode, encode, signed_upload
from .parameters import Packing
from .public_key import announced_key
from .seal import arithmetic

__all__ = ["encrypt", "packed"]


def packed(packing: Packing, rows: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The polynomials A and B of `rows` (p, d): two arrays of shape (chunks, N) of quantised numbers.

    Raises:
        LocalError: "out-of-range" for another shape, for numbers that are not finite, for a row longer than `bound`.
    """
    rows = np.asarray(rows, dtype=np.float64)
    p, r, d = packing.p, packing.r, packing.dimension
    if rows.shape != (p, d):
        raise LocalError("out-of-range", f"rows of shape {rows.shape}, the epoch has {(p, d)}")
    # slightly beyond the bound is rounding: unit vectors in float32
    if not np.isfinite(rows).all() or np.linalg.norm(rows, axis=1).max() > packing.bound * (1 + 1e-3):
        raise LocalError("out-of-range", f"a vector is longer than the epoch's bound of {packing.bound:g}, or not finite")
    padded = np.zeros((p, packing.chunks * r))
    padded[:, :d] = np.rint(rows * packing.scale)
    chunks = padded.reshape(p, packing.chunks, r).astype(np.int64)
    left = np.zeros((packing.chunks, packing.ring), dtype=np.int64)
    right = np.zeros_like(left)
    for u in range(p):
        left[:, u * r : (u + 1) * r] = chunks[u]
        right[:, u * p * r : u * p * r + r] = chunks[u, :, ::-1]
    return left, right


def encrypt(
    setup: Setup, announcement: bytes, holder: bytes, identity: Identity, rows: npt.NDArray[np.floating], secret_key: bytes | None = None
) -> bytes:
    """A client's upload: `rows` (p, d) under the key that the key holder (Ed25519 public key `holder`) announced.

    In symmetric mode the clients' common `secret_key` is used instead.

    Guarantee: under the public key nobody but the key holder can read an upload (RLWE at 128 bits), if the key holder made its key
    honestly; half of the key is this client's own hash of the terms (`announced_key`). Reveals: in symmetric mode, every client's rows to
    every client that sees their ciphertexts: one colluding client gives the server all of them.
    Source: Cheon, Kim, Kim & Song 2017 (the scheme); coefficient packing as in Huang et al. 2022 (Cheetah), section 4.

    Raises:
        RemoteError: "bad-signature", "malformed" for an announcement that is not the key holder's of this epoch, or no half of a key.
        LocalError: "out-of-range" for rows that do not fit the epoch.
    """
    message = decode(announcement, Announcement, setup)
    verify_key(holder, 0, message.signature, LABEL + "key", message.setup, message.public_key)
    ring = arithmetic(setup.parameters)
    if (setup.mode == "symmetric") != (secret_key is not None):
        raise LocalError("wrong-mode", f"mode {setup.mode}")
    if secret_key is None:
        encryptor = ring.seal.Encryptor(ring.context, announced_key(setup, holder, message.public_key))
    else:
        encryptor = ring.seal.Encryptor(ring.context, ring.load_secret_key(secret_key))
    sides: list[tuple[bytes, ...]] = []
    for polynomials in packed(setup.packing, rows):
        ciphers = []
        for polynomial in polynomials:
            cipher = ring.zero(encryptor, public=secret_key is None)
            ring.add_polynomial(cipher, ring.residues(polynomial))
            ciphers.append(ring.save(cipher))
        sides.append(tuple(ciphers))
    statement = signed_upload(message.public_key, identity.client, ciphertexts_digest(*sides))
    signature = sign(identity, LABEL + "upload", setup.digest, statement)
    return encode(Upload(setup.digest, identity.client, sides[0], sides[1], signature))
