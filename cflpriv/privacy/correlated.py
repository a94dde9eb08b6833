"""Correlated noise of a trusted server: each mean's noise takes back part of what the means before it got.

A participation costs what it costs with independent noise of the same multiplier (`protocols.banded` has the proof): charges, and what is
sent to clients, stay the same. For that a client's columns in one stream of noise must be at least as many rounds apart as there are
bands. Nobody is refused: if a client comes back earlier, a round is run again, or a stream was silent for long, a stream with noise
of its own begins. So the guarantee does not rest on who takes part; only the gain does. A stream keeps bands − 1 rows in memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..protocols.banded import Coefficients
from ..protocols.entropy import Entropy
from ..protocols.mechanisms import gaussian_noise
from ..types import Array

__all__ = ["CorrelatedNoise"]


@dataclass(eq=False)
class _Stream:
    """Noise so far: the number of the last turn, its last bands − 1 rows (the latest last), and when each client took part."""

    turn: int
    rows: list[Array]
    seen: dict[int, int]


@dataclass(eq=False)
class CorrelatedNoise:
    """Rows of C⁻¹ Z for each group and size of sums, with banded C. It lives as long as its process: a resumed run begins new streams.

    `begun` counts streams: one for each group, where cohorts keep the separation.
    """

    coefficients: Coefficients
    begun: int = 0
    _streams: dict[tuple[int, int], _Stream] = field(default_factory=dict, repr=False)

    def row(self, group: int, turn: int, clients: Sequence[int], scale: float, count: int, entropy: Entropy) -> Array:
        """The noise (count,) for the sum over `clients` of a `group` in a `turn`, whose numbers never repeat in a run.

        `scale` is the standard deviation that independent noise would have.
        """
        stream, bands = self._streams.get((group, count)), len(self.coefficients)
        if (
            stream is None
            or not 0 < turn - stream.turn <= bands
            or any(turn - stream.seen[client] < bands for client in clients if client in stream.seen)
        ):
            stream = self._streams[group, count] = _Stream(turn - 1, [], {})
            self.begun += 1
        while stream.turn < turn:  # rows of rounds without a sum are drawn, and shown to nobody
            row = gaussian_noise(scale * math.hypot(*self.coefficients), count, entropy)
            for back, coefficient in zip(reversed(stream.rows), self.coefficients[1:], strict=False):
                row -= coefficient * back
            stream.rows = [*stream.rows, row][-(bands - 1) :] if bands > 1 else []
            stream.turn += 1
        stream.seen.update(dict.fromkeys(clients, turn))
        return np.array(row)
