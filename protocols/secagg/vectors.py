"""A client's vector and the server's sum: fixed point, a client's input as integer levels, masks, and how to read the sum.

**Fixed point.** x ∈ [−clip, clip] becomes an integer level in {−L, …, L}: x·L/clip, rounded up with the probability of its
fractional part and down otherwise (stochastic rounding, unbiased). Sums of at most n levels lie in [−nL, nL];
they are read back from arithmetic modulo 2^b without ambiguity exactly when nL ≤ 2^(b−1) − 1. That is the
whole overflow proof; `check_no_overflow` checks it for public numbers only, so it can be (and is) checked
before any input is touched.

**A client's input** is its values, its weight and a clipping flag, as one vector of levels:

    block 0: dimension values, weight | block 1: … | 1 if anything was clipped, else 0

There is one block, or in an oblivious sum one for each open cluster; the weight is there in weighted sums only.

**A mask** is an AES-256-CTR keystream (counter from zero, every key used for one mask only) read as little-endian
b-bit numbers; adding and subtracting it wraps around modulo 2^b. Fast enough for models of millions of parameters.

Guarantee: decoding the modular sum of at most n encodings gives the exact integer sum of the levels; each level is within one of x·L/clip
and right on average (up to 2^-32); rounding coins come from the given entropy through AES-256-CTR, so nobody else can predict them.
Without the key a mask is indistinguishable from uniform numbers (AES as a pseudorandom permutation), so a masked vector reveals nothing
about its input but its length. A sum lies within the range of its terms and survivors; within that range a client can put in any vector:
nothing here bounds a single one. `relative_error` is what rounding does to a client's values; a client compares it with its own limit
before anything is masked (`Policy.most_error`), and terms bound it by public numbers (`terms.weight_error`).
Reveals: the sum reveals the sum. One key used for two masks gives the difference of the two inputs away. Rounding with unpredictable coins
is *not* differential privacy.
Source: Bonawitz et al. 2017, section 1 (sums in Z_R); stochastic rounding as in Alistarh et al. 2017 (QSGD), section 3.1.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from ..entropy import Entropy
from ..errors import LocalError

__all__ = [
    "Bits",
    "Contribution",
    "FixedPoint",
    "InputTerms",
    "MapJobs",
    "Mask",
    "Sum",
    "add_masks",
    "check_no_overflow",
    "counted_weight",
    "decode",
    "encode",
    "encode_inputs",
    "largest_levels",
    "relative_error",
    "total_mask",
    "unwrap",
    "vector_length",
    "wrap",
]

# --- fixed point

Bits = Literal[16, 32]
"""Width of the modulus."""

_ROUNDED = 1 << 14


@dataclass(frozen=True)
class FixedPoint:
    """A public quantiser: values in [−clip, clip] become levels in {−levels, …, levels}, summed modulo 2^bits.

    Raises:
        ValueError: for a modulus other than 2^16 and 2^32, a clip that is not a positive finite number, or
        levels outside
            1 … 2^(bits−1) − 1.
    """

    bits: Bits
    clip: float
    levels: int

    def __post_init__(self) -> None:
        if self.bits not in (16, 32):
            raise ValueError(f"bits: expected 16 or 32, got {self.bits}")
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"clip: expected a positive finite number, got {self.clip}")
        if not 1 <= self.levels < 1 << (self.bits - 1):
            raise ValueError(f"levels: expected 1 to {(1 << (self.bits - 1)) - 1} for {self.bits} bits, got {self.levels}")


def largest_levels(clients: int, bits: Bits) -> int:
    """The finest quantiser whose sum over `clients` cannot overflow `bits` bits.

    Raises:
        ValueError: if even one level a client could overflow.
    """
    levels = ((1 << (bits - 1)) - 1) // clients
    if levels < 1:
        raise ValueError(f"bits: {clients} clients do not fit into {bits} bits")
    return levels


def check_no_overflow(clients: int, fixed: FixedPoint) -> None:
    """Proves that no sum of `clients` encodings can overflow.

    Raises:
        ValueError: if clients · levels > 2^(bits−1) − 1.
    """
    limit = (1 << (fixed.bits - 1)) - 1
    if clients * fixed.levels > limit:
        raise ValueError(f"levels: {clients} clients x {fixed.levels} levels may exceed {limit}, the largest {fixed.bits}-bit sum")


def encode(
    values: NDArray[Any], fixed: FixedPoint, entropy: Entropy, fraction: float = 1.0, is_levels: bool = False
) -> tuple[NDArray[np.int32], int]:
    """Levels of `fraction`·`values`, and how many of the values lay outside [−clip, clip] and were clipped to it.

    Args:
        values: shape (d,), real numbers; with `is_levels` integers.
        fixed: the quantiser.
        entropy: source of the rounding coins (32 bytes are drawn).
        fraction: weight in [0, 1], applied after clipping.
        is_levels: the values are levels already (counts, or integer noise was added before).

    Returns:
        int32 levels of shape (d,), and the number of clipped values.

    Raises:
        ValueError: if values are not a finite real vector, are integers where levels were not asked for or the reverse, levels lie
        outside the quantiser's (or come with a fraction other than 1), or fraction is outside [0, 1].
    """
    levels = np.empty(values.size, np.int32)
    return levels, _encoded(values, fixed, entropy, fraction, is_levels, levels)[0]


def _encoded(
    values: NDArray[Any], fixed: FixedPoint, entropy: Entropy, fraction: float, is_levels: bool, levels: NDArray[np.int32]
) -> tuple[int, float]:
    """What `encode` gives, the levels in `levels`, and `relative_error`: 0 for levels."""
    if values.ndim != 1 or values.dtype.kind not in "fiu":
        raise ValueError(f"values: expected a real vector, got {values.ndim} axes of {values.dtype}")
    if is_levels != (values.dtype.kind in "iu"):
        raise ValueError(
            f"values: got {values.dtype} with is_levels = {is_levels}; integers are levels of the quantiser and need is_levels = True, "
            "other values need a floating dtype"
        )
    if not 0.0 <= fraction <= 1.0:
        raise ValueError("fraction: expected a number from 0 to 1")
    if is_levels:
        if fraction != 1.0:
            raise ValueError("fraction: integer levels cannot be weighted")
        if values.size and (int(values.max()) > fixed.levels or int(values.min()) < -fixed.levels):
            raise ValueError(f"values: integer levels must lie within {fixed.levels} of zero")
        levels[:] = values
        return 0, 0.0
    return _rounded(values, fixed, entropy, fraction, levels)


def _rounded(
    values: NDArray[Any], fixed: FixedPoint, entropy: Entropy | None, fraction: float, levels: NDArray[np.int32] | None = None
) -> tuple[int, float]:
    """How many values were clipped, and `relative_error`. With entropy they are rounded, and their levels go to `levels`.

    Each part of the vector goes through all steps in place, so that it stays in the cache.
    """
    coins = None if entropy is None else Cipher(algorithms.AES(entropy(32)), modes.CTR(bytes(16))).encryptor()
    x, low = np.empty(min(_ROUNDED, values.size)), np.empty(min(_ROUNDED, values.size))
    clipped, added, length = 0, 0.0, 0.0
    for start in range(0, values.size, _ROUNDED):
        some = values[start : start + _ROUNDED]
        part, floor = x[: some.size], low[: some.size]
        part[:] = some
        smallest, largest = float(part.min()), float(part.max())
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            raise ValueError("values: not all numbers are finite")
        if smallest < -fixed.clip or largest > fixed.clip:
            clipped += int(np.count_nonzero(np.abs(part) > fixed.clip))
            np.clip(part, -fixed.clip, fixed.clip, out=part)
        # |x| / clip <= 1 and fraction <= 1 hold in floating point too, so |scaled| <= levels exactly.
        part /= fixed.clip
        if fraction != 1.0:
            part *= fraction
        part *= fixed.levels
        length += float(part @ part)
        np.floor(part, out=floor)
        part -= floor
        added += float(part.sum() - part @ part)
        if coins is not None and levels is not None:
            coin = np.frombuffer(coins.update(bytes(4 * some.size)), "<u4")
            part *= 2.0**32
            np.add(floor, coin < part, out=floor)
            levels[start : start + _ROUNDED] = floor
    return clipped, 0.0 if added == 0 else math.sqrt(added / length) if length > 0 else math.inf


def relative_error(values: NDArray[Any], fixed: FixedPoint, fraction: float = 1.0) -> float:
    """What rounding adds to `fraction`·`values` (d,) in a sum, as a share of their length: the root of its mean square, 0 for zeros.

    Raises:
        ValueError: if values are not all finite.
    """
    return _rounded(values, fixed, None, fraction)[1]


def decode(total: NDArray[np.int32], fixed: FixedPoint) -> NDArray[np.float64]:
    """The sum of values, shape (d,), that a sum of levels stands for."""
    return np.multiply(total, fixed.clip / fixed.levels, dtype=np.float64)


def wrap(levels: NDArray[Any], bits: Bits) -> NDArray[Any]:
    """Integers modulo 2^bits, as little-endian unsigned numbers of that width; of 32 bits in the memory of `levels`, if that fits."""
    if bits == 32 and levels.dtype.str == "<i4":
        return levels.view("<u4")
    return levels.astype("<u2" if bits == 16 else "<u4")


def unwrap(residues: NDArray[Any], bits: Bits) -> NDArray[np.int32]:
    """The integers in [−2^(bits−1), 2^(bits−1)) with these residues."""
    return residues.astype("<u2").view("<i2").astype(np.int32) if bits == 16 else residues.astype("<u4").view("<i4")


# --- a client's input


class InputTerms(Protocol):
    """What of the terms of a sum decides a client's vector. `secagg.Terms` and `one_message.Terms` state what their fields mean."""

    @property
    def bits(self) -> Bits: ...
    @property
    def clip(self) -> float: ...
    @property
    def levels(self) -> int: ...
    @property
    def dimension(self) -> int: ...
    @property
    def weight_limit(self) -> float: ...
    @property
    def least_weight(self) -> float: ...
    @property
    def blocks(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def beyond(self) -> int: ...
    @property
    def fixed(self) -> FixedPoint: ...


AnyTerms = TypeVar("AnyTerms", bound=InputTerms, covariant=True)


def vector_length(terms: InputTerms) -> int:
    """Coordinates of a masked vector: per block the values (and the weight), then one for "did this client clip anything"."""
    return max(1, len(terms.blocks)) * (terms.dimension + (terms.weight_limit > 0)) + 1


@dataclass(frozen=True)
class Contribution:
    """What a client adds to one block of the sum.

    values: (d,) real numbers, or with `is_levels` integers.
    weight: in [0, weight_limit], ignored in unweighted sums; below the least weight of the terms it counts as that.
    cluster: the block, in sums that have blocks; a contribution to a block that is not open adds nothing.
    is_levels: the values are levels of the quantiser already (counts, or values with integer noise). Other integers are refused.
    is_blank: zeros take the place of values that cannot be used; the client counts as one that clipped.
    """

    values: NDArray[Any] = field(repr=False)
    weight: float = field(default=1.0, repr=False)
    cluster: int | None = field(default=None, repr=False)
    is_levels: bool = False
    is_blank: bool = False


def counted_weight(contribution: Contribution, terms: InputTerms) -> float:
    """What a contribution counts as in a sum: its weight, the least weight at least, the limit where all weigh equally; else 1.

    Raises:
        LocalError: "bad-values" for a weight that is negative, no number, or above the limit where weights differ.
    """
    limit, least = terms.weight_limit, terms.least_weight
    if limit and not 0 <= contribution.weight <= (limit if least < limit else math.inf):
        raise LocalError("bad-values", "expected a weight from 0 to the limit")
    return 1.0 if not limit else limit if least == limit else max(contribution.weight, least)


def encode_inputs(
    contributions: Sequence[Contribution], terms: InputTerms, entropy: Entropy, most_error: float = math.inf
) -> tuple[NDArray[np.int32], int]:
    """The levels of a client's whole vector, shape (vector_length(terms),), and the number of its values that were clipped.

    Raises:
        LocalError: "bad-values" if the contributions do not fit the terms; "too-coarse" if rounding adds more than `most_error` to one.
    """
    clusters: list[int | None] = [cluster for cluster, _ in terms.blocks] or [None]
    named = [contribution.cluster for contribution in contributions]
    if len(set(named)) != len(named) or (not terms.blocks and named != [None]) or (terms.blocks and None in named):
        raise LocalError("bad-values", "expected one contribution, or in a sum with blocks one for each of distinct clusters")
    if any(contribution.values.shape != (terms.dimension,) for contribution in contributions):  # before memory is taken
        raise LocalError("bad-values", f"expected {terms.dimension} values")
    width = terms.dimension + (terms.weight_limit > 0)
    x = np.zeros(vector_length(terms), np.int32)
    clipped = 0
    for contribution in contributions:
        if contribution.cluster not in clusters:
            continue
        fraction = counted_weight(contribution, terms) / terms.weight_limit if terms.weight_limit else 1.0
        start = clusters.index(contribution.cluster) * width
        try:
            levels = x[start : start + terms.dimension]
            beyond, error = _encoded(contribution.values, terms.fixed, entropy, fraction, contribution.is_levels, levels)
            if error > most_error:
                step = terms.clip / terms.levels / fraction
                raise LocalError(
                    "too-coarse",
                    f"rounding to steps of {step:.3g} would change the values by {error:.0%} of their length, more than {most_error:.0%}; "
                    "use a smaller clip or weight_limit, 32 bits, or fewer clients",
                )
            if terms.weight_limit:
                share = np.array([fraction * terms.clip])
                x[start + terms.dimension] = encode(share, terms.fixed, entropy)[0][0]
        except ValueError as error:
            # These messages name sizes and types, never values.
            raise LocalError("bad-values", str(error)) from None
        clipped += beyond
    x[-1] = clipped > 0 or any(contribution.is_blank for contribution in contributions)
    return x, clipped


# --- masks

Mask = tuple[bytes, int]
"""A 32-byte key, and +1 or −1."""

# Large enough that the cost of a call is negligible, small enough that stream and target stay in the second-level cache.
_CHUNK_BYTES = 1 << 18
_MASKS_AT_ONCE = 256
_ZEROS = bytes(_CHUNK_BYTES)


def add_masks(vector: NDArray[Any], masks: Iterable[Mask]) -> None:
    """Adds sign · keystream(key) for every mask, in place and modulo 2^b; `vector` is (d,) of "<u2" or "<u4".

    Each part of the vector gets all masks before the next, so that it stays in the cache; many masks take turns in groups.
    """
    width = vector.dtype.itemsize
    step = min(_CHUNK_BYTES // width, max(1, vector.size))
    buffer = bytearray(step * width + 15)
    zeros = memoryview(_ZEROS)
    stream = np.frombuffer(buffer, vector.dtype, step)
    waiting = iter(masks)
    while group := list(islice(waiting, _MASKS_AT_ONCE)):
        ciphers = []
        for key, sign in group:
            ciphers.append((Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor(), np.add if sign > 0 else np.subtract))
        for start in range(0, vector.size, step):
            part = vector[start : start + step]
            for encryptor, combine in ciphers:
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


# --- the sum


@dataclass(frozen=True)
class Sum(Generic[AnyTerms]):
    """What the server ends up with.

    terms: of the sum.
    survivors: the clients in it (U3).
    levels: the exact integer sum, int32, shape (vector_length(terms),).

    Raises:
        ValueError: for a sum that no vectors within the terms have: a value outside ± survivors · levels (and the noise `terms.beyond`), a
        weight or the number of clients that clipped outside their range.
    """

    terms: AnyTerms
    survivors: tuple[int, ...]
    levels: NDArray[np.int32] = field(repr=False)

    def __post_init__(self) -> None:
        most = len(self.survivors) * self.terms.levels
        weights = [self.levels[self._start(cluster) + self.terms.dimension] for cluster in self._clusters if self.terms.weight_limit]
        if not 0 <= self.levels[-1] <= len(self.survivors):
            raise ValueError("sum: more clients clipped than took part, or fewer than none")
        least = 0  # how many contribute to a block, the server does not know
        if self.terms.weight_limit and not self.terms.blocks:
            least = len(self.survivors) * math.floor(self.terms.least_weight / self.terms.weight_limit * self.terms.levels)
        if any(not least <= weight <= most for weight in weights):
            raise ValueError("sum: weights outside their range")
        most += self.terms.beyond
        if int(self.levels.min()) < -most or int(self.levels.max()) > most:
            raise ValueError("sum: values outside their range")

    @property
    def _clusters(self) -> list[int | None]:
        return [named for named, _ in self.terms.blocks] or [None]

    @property
    def clipped_clients(self) -> int:
        """How many survivors had at least one value clipped."""
        return int(self.levels[-1])

    def block(self, cluster: int | None = None) -> NDArray[np.int32]:
        """The summed levels of one block, shape (dimension,); of the only one by default."""
        start = self._start(cluster)
        return self.levels[start : start + self.terms.dimension]

    def total(self, cluster: int | None = None) -> NDArray[np.float64]:
        """Σ (weight / weight_limit) · values over the survivors of one block, shape (dimension,); Σ values in an unweighted sum."""
        return decode(self.block(cluster), self.terms.fixed)

    def weight(self, cluster: int | None = None) -> float:
        """Σ weight of one block (quantised like the values); the number of survivors in an unweighted sum."""
        if not self.terms.weight_limit:
            return float(len(self.survivors))
        level = int(self.levels[self._start(cluster) + self.terms.dimension])
        return level / self.terms.levels * self.terms.weight_limit

    def mean(self, cluster: int | None = None) -> NDArray[np.float64]:
        """The weighted mean of one block, shape (dimension,).

        Raises:
            ValueError: if all weights are zero.
        """
        weight = self.weight(cluster)
        if weight <= 0:
            raise ValueError("mean: the weights of this block sum to zero")
        return self.total(cluster) * ((self.terms.weight_limit or 1.0) / weight)

    def rounding(self, cluster: int | None = None) -> float:
        """The most that rounding is expected to have added to a block, as a share of its length; 0 for a block of zeros.

        Each of the survivors rounds each value with a variance of a quarter of a squared level at most.
        """
        block = self.block(cluster).astype(np.float64)
        length = float(np.linalg.norm(block))
        return math.sqrt(len(self.survivors) * block.size) / 2 / length if length else 0.0

    def _start(self, cluster: int | None) -> int:
        if cluster not in self._clusters:
            raise ValueError(f"cluster: {cluster} is not one of the blocks of this sum")
        return self._clusters.index(cluster) * (self.terms.dimension + (self.terms.weight_limit > 0))
