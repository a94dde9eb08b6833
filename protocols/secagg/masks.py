"""From keys to masks, fast enough for models of millions of parameters.

A mask is an AES-256-CTR keystream (counter from zero, every key used for one mask only) read as little-endian
b-bit numbers; adding and subtracting it wraps around modulo 2^b.

Guarantee: without the key a mask is indistinguishable from uniform numbers (AES as a pseudorandom
permutation), so a masked vector reveals nothing about its input. Reveals: the length. One key used for
two masks gives the difference of the two inputs away.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

__all__ = ["Mask", "add_masks", "total_mask"]

Mask = tuple[bytes, int]
"""A 32-byte key, and +1 or −1."""

# 512 KiB: large enough that the per-call cost is negligible, small enough that stream and target stay in the second-level cache.
_CHUNK_BYTES = 1 << 19
_ZEROS = bytes(_CHUNK_BYTES)


def add_masks(vector: NDArray[Any], masks: Iterable[Mask]) -> None:
    """Adds sign · keystream(key) for every mask, in place and modulo 2^b; `vector` is (d,) of "<u2" or "<u4"."""
    width = vector.dtype.itemsize
    buffer = bytearray(_CHUNK_BYTES + 15)
    zeros = memoryview(_ZEROS)
    stream = np.frombuffer(buffer, vector.dtype, _CHUNK_BYTES // width)
    step = _CHUNK_BYTES // width
    for key, sign in masks:
        encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        combine = np.add if sign > 0 else np.subtract
        for start in range(0, vector.size, step):
            part = vector[start : start + step]
            encryptor.update_into(zeros[: part.size * width], buffer)
            combine(part, stream[: part.size], out=part)


def total_mask(job: tuple[Sequence[Mask], int, str]) -> NDArray[Any]:
    """The sum of masks as a new vector; `job` = (masks, length, dtype). One argument, so that any `map` can carry it elsewhere."""
    masks, length, dtype = job
    total = np.zeros(length, dtype)
    add_masks(total, masks)
    return total


MapJobs = Callable[[Callable[[tuple[Sequence[Mask], int, str]], NDArray[Any]], Iterable[Any]], Iterable[NDArray[Any]]]
"""Something like the built-in `map`, or the `map` of an executor."""
