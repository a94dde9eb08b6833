"""Public parameters, known before anything is encrypted: rings, precision, and the noise that a release needs."""

from dataclasses import dataclass
from math import floor, log2, sqrt
from typing import Literal

from ..errors import LocalError

__all__ = [
    "FLOOD_BITS", "PARAMETERS", "SYMMETRIC_PARAMETERS", "Mode", "Packing", "Parameters", "error_std", "plan", "release_grid", "release_std",
]  # fmt: skip

Mode = Literal["public-key", "symmetric"]

FLOOD_BITS = 20
"""s of the noise added to what is released: its std is 2^s times the computing error's, times the root of the number of scalars."""
_SIGMA = 3.2
_MOST_CHUNKS = 64


@dataclass(frozen=True)
class Parameters:
    """Ring degree, bits of the primes (the last one only carries keys where there are several), and who may encrypt.

    `insecure` turns the check of 128-bit security off, for tests that attack small rings; no configuration reaches it.
    """

    ring: int
    bits: tuple[int, ...]
    mode: Mode = "public-key"
    insecure: bool = False

    @property
    def primes(self) -> int:
        """Number of primes of the ciphertext modulus q."""
        return max(1, len(self.bits) - 1)

    @property
    def modulus_bits(self) -> int:
        """About log2 q: SEAL's primes lie just below or above powers of two."""
        return sum(self.bits[: self.primes])

    @property
    def ciphertext_bytes(self) -> int:
        """A two-part ciphertext before compression, in bytes."""
        return 2 * self.primes * self.ring * 8


PARAMETERS: dict[int, Parameters] = {4096: Parameters(4096, (54, 54)), 8192: Parameters(8192, (50, 50, 60))}
"""By ring degree, for a key holder apart from the clients. 128-bit security by the homomorphic encryption standard, as SEAL checks it."""
SYMMETRIC_PARAMETERS: dict[int, Parameters] = {
    2048: Parameters(2048, (54,), "symmetric"),
    4096: Parameters(4096, (54,), "symmetric"),
    8192: Parameters(8192, (50, 50, 60), "symmetric"),
}


@dataclass(frozen=True)
class Packing:
    """Where p vectors of length `dimension` lie in polynomials of degree below `ring`, cut into `chunks` of r numbers.

    A(X) holds vector u ascending from X^(u r), B(X) vector v descending from X^(v p r + r − 1). The coefficient of X^(r−1 + u r + v p r) of
    A·B, summed over chunks, is ⟨a_u, b_v⟩. A product takes `span` coefficients, so `group` of them fit side by side into one ciphertext: B
    is moved by X^(slot span). |values| up to `bound` in norm per vector are quantised to multiples of 1 / scale.
    """

    p: int
    dimension: int
    ring: int
    chunks: int
    bound: float
    modulus_bits: int

    @property
    def r(self) -> int:
        return -(-self.dimension // self.chunks)

    @property
    def span(self) -> int:
        return self.p * self.p * self.r + self.r - 1

    @property
    def group(self) -> int:
        return self.ring // self.span

    @property
    def scale(self) -> float:
        """Δ, a power of two: |⟨a,b⟩| Δ² ≤ bound² Δ² ≤ q/8."""
        return 2.0 ** floor((self.modulus_bits - 3 - 2 * log2(self.bound)) / 2)

    def targets(self, slot: int) -> list[int]:
        """The positions of the p² wanted coefficients of a slot, vector u of the left client major."""
        first = slot * self.span + self.r - 1
        return [first + u * self.r + v * self.p * self.r for u in range(self.p) for v in range(self.p)]


def plan(parameters: Parameters, p: int, dimension: int, bound: float = 1.0, group: int = 1) -> Packing:
    """The packing with the fewest chunks that lets `group` pairs share an output.

    Raises:
        LocalError: "too-long" where that takes more than 64 chunks; "out-of-range" for sizes below 1.
    """
    if min(p, dimension, group) < 1 or not 2.0**-20 <= bound <= 2.0**21:
        raise LocalError("out-of-range", f"p = {p}, dimension = {dimension}, group = {group}, bound = {bound}")
    for chunks in range(1, _MOST_CHUNKS + 1):
        packing = Packing(p, dimension, parameters.ring, chunks, bound, parameters.modulus_bits)
        if packing.span * group <= parameters.ring:
            return packing
    hint = f"{p} vectors of {dimension} numbers take more than {_MOST_CHUNKS} polynomials of degree {parameters.ring}"
    raise LocalError("too-long", hint)


def fresh_std(parameters: Parameters, *, public: bool) -> float:
    """The std of a coefficient of a fresh ciphertext's noise, in units of the plaintext's."""
    n = parameters.ring
    if not public:
        return _SIGMA
    if len(parameters.bits) > 1:  # made at the larger modulus and divided by its last prime: what is left is rounding, (1 + 2N/3) / 12
        return sqrt((1 + 2 * n / 3) / 12) + 1.0
    return _SIGMA * sqrt(4 * n / 3 + 1)


def mask_std(parameters: Parameters) -> float:
    """The same for the encryption of a mask, made directly modulo q."""
    return _SIGMA * sqrt(4 * parameters.ring / 3 + 1)


def error_std(parameters: Parameters, packing: Packing, group: int, longest: float | None = None) -> float:
    """An upper bound on the std of the error of a computed inner product of vectors of norms up to `longest` (by default `bound`), where
    `group` pairs share an output.

    Per coefficient of Σ (A + e)(B + e') − A B: σ² (‖A‖² + ‖B‖²) from noise times message, chunks N σ⁴ from noise times noise, with B
    and e' summed over the pairs that share an output, plus the noise of the mask's encryption. Quantising counts as noise. `group` is the
    number that an epoch allows (`Setup.group`), which may be fewer than would fit (`Packing.group`).
    """
    variance = fresh_std(parameters, public=parameters.mode == "public-key") ** 2 + 1 / 12
    norm = packing.bound if longest is None else min(longest, packing.bound)
    message = packing.p * (norm * packing.scale) ** 2
    products = group * (2 * variance * message + packing.chunks * parameters.ring * variance**2)
    return sqrt(products + mask_std(parameters) ** 2) / packing.scale**2


def release_std(parameters: Parameters, packing: Packing, group: int, scalars: int) -> float:
    """The std of the noise that a released inner product gets, where `scalars` of them may be released in all, `group` from an output.

    2^s × error × √scalars (Li & Micciancio 2021; Li, Micciancio, Schultz & Sorrell 2022, whose bounds have this shape). Choosing s = 20 is
    ours: it bounds the statistical distance between decryptions and exact values at about 2^−20 for all of a key's releases together.
    """
    return 2.0**FLOOD_BITS * error_std(parameters, packing, group) * sqrt(max(1, scalars))


def release_grid(std: float) -> float:
    """What released values are rounded to: the largest power of two not above std / 4."""
    return 2.0 ** floor(log2(std / 4))
