"""Reproducible randomness, keyed by (purpose, round, client) from one root seed.

Runs with and without a protection draw the same cohorts, batches and initial models, so they compare as pairs. Nothing here is secret:
keys, masks and privacy noise come from `cflpriv.protocols.entropy` instead.
"""

from hashlib import blake2b

import numpy as np

__all__ = ["Stream", "stream"]

Stream = np.random.Generator


def stream(seed: int, purpose: str, round: int = -1, client: int = -1) -> Stream:
    """The generator of one (purpose, round, client). Streams of different keys are independent; the same key gives the same stream.

    `round` and `client` are left at -1 where they do not apply.
    """
    key = blake2b(f"{seed}|{purpose}|{round}|{client}".encode(), digest_size=32).digest()
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(np.frombuffer(key, "<u4"))))
