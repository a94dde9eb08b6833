"""Flower's SecAgg+: how large the space of its masks' seeds is."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..claim import Arm, Claim, Row

__all__ = ["CLAIM"]

TRIALS = 20


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    rng = np.random.default_rng(seed)
    collided = 0
    for _ in range(TRIALS):
        key = rng.integers(0, 2**32, 8, dtype=np.uint64).astype("<u4")
        folded = np.zeros(8, dtype="<u4")
        folded[0] = np.bitwise_xor.reduce(key)
        masks = [pseudo_rand_gen(one.tobytes(), 1 << 22, [(64,)])[0] for one in (key, folded)]
        collided += int(np.array_equal(masks[0], masks[1]))
    bits = 32.0 if collided == TRIALS else 256.0
    return [Row("bits of a mask's seed", seed, bits, 128.0, f"{collided} of {TRIALS} keys give the mask of their 32-bit fold")]


CLAIM = Claim(
    20, "the masks of SecAgg+ are computationally secure",
    source="in our words, of Flower's SecAgg+ (`flwr.common.secure_aggregation`, as installed)",
    baseline="128 bits, the security that its key agreement claims",
    assumed=(
        "a mask is as hard to find as its seed: if each of 20 random keys of 256 bits gives the same mask as a key that holds "
        "only the exclusive or of its eight words, seeds have 32 bits; masks of pairs have less, since their keys are base64 text "
        "with 28 bits a fold at most; dropouts and the shares were not tried"
    ),
    arms={
        "bits of a mask's seed": Arm("bits", 0.0, "above"),
    },
    measure=measure,
    seeds=1,
)  # fmt: skip
