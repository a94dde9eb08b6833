"""Gaussian noise that is correlated over rounds by a banded matrix, for clients that come back only after as many rounds as it has bands.

A run releases sums x_0, x_1, … of clipped contributions, one a round, and what matters is their running totals (a model is one).
Independent noise adds up in these. With a lower triangular matrix C the noise of round t is row t of C⁻¹ Z, where the rows of Z are
independent N(0, scale² I): part of each round's noise is taken back in later ones.

**Privacy.** x + C⁻¹ Z = C⁻¹ (C x + Z), so the release is post-processing of C x with Gaussian noise, and its sensitivity is the most by
which C x moves when one client's contributions change, all of its rounds together. C is banded: column t is 0 beyond row t + bands − 1. Let
a client take part in rounds t_1 < … < t_k, at least `separation` ≥ bands apart, and change its contribution there by vectors v_1 … v_k, of
length at most Δ. Columns t_i and t_j have no row in common, so C x moves by a matrix whose squared norm is

    Σ_i |C[:, t_i]|² |v_i|²  ≤  Δ² Σ_i |C[:, t_i]|²  ≤  Δ² k max_t |C[:, t]|²,

whatever the directions of the vectors are, and that is attained where no column is cut off by the last round. Clients may choose
contributions by what was released before: for lower triangular C Gaussian noise is as private then (Denisov et al. 2022, Theorem 2.1).
Several groups with a stream of noise each (own Z) are one release of a longer x, with the same bound, as a client's contributions of
different rounds and streams are in different columns.

**Price.** Squared norms of columns add up as 1/z² of Gaussian events does. So a participation costs as much as under independent noise of
standard deviation `scale` / (norm of its column), and a ledger that charges before each release stays exact. That holds only if clients
keep the separation. `cflpriv.privacy.correlated` draws the rows of noise, and begins anew where a client comes back earlier.

Sources: Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization" (banded C, min-separation sensitivity); Kalinin & Lampert
2024, "Banded square root matrix factorization" (the square root of the prefix sum, cut to bands); McKenna 2024 (Toeplitz C, optimised). All
of it is unaudited research code.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "column_norms", "inverse_coefficients", "optimised_coefficients", "prefix_error", "prefix_variances", "separated_sensitivity",
    "sensitivity_of", "square_root_coefficients", "strategy",
]  # fmt: skip

Floats = NDArray[np.float64]
Coefficients = tuple[float, ...]
"""(bands,) the first column of a banded lower triangular Toeplitz matrix C; the first is 1."""


# --- the matrix -------------------------------------------------------------------------------------------------------------------------


def square_root_coefficients(bands: int) -> Coefficients:
    """The square root of the prefix sum, cut to `bands` diagonals: c_k = (2k choose k) / 4^k. Raises `ValueError` for bands below 1."""
    if bands < 1:
        raise ValueError(f"bands: {bands} is below 1")
    coefficients = [1.0]
    for k in range(1, bands):
        coefficients.append(coefficients[-1] * (2 * k - 1) / (2 * k))
    return tuple(coefficients)


@lru_cache(maxsize=64)
def optimised_coefficients(bands: int, rounds: int) -> Coefficients:
    """Coefficients (bands,) of the least mean squared error of all prefixes of `rounds` rounds at the same privacy.

    Found by descent from the square root, so never worse than that. More bands than rounds are cut. Raises `ValueError` for either below 1.
    """
    from scipy.optimize import minimize

    if rounds < 1:
        raise ValueError(f"rounds: {rounds} is below 1")
    start = np.array(square_root_coefficients(min(bands, rounds)))
    weights = np.arange(rounds, 0, -1) / rounds

    def cost(later: Floats) -> tuple[float, Floats]:
        """log of the error at noise of the norm of a column, and its gradient in the coefficients after the first."""
        c = np.concatenate([[1.0], later])
        inverse = inverse_coefficients(tuple(c), rounds)
        prefix = np.cumsum(inverse)
        error = float(weights @ prefix**2)
        twice = np.convolve(prefix, inverse)[:rounds]  # −d prefix / d c_m is this, m places later
        slope = np.array([-2 * (weights[m:] * prefix[m:]) @ twice[: rounds - m] for m in range(1, len(c))])
        return math.log(c @ c) + math.log(error), 2 * later / (c @ c) + slope / error

    if len(start) == 1:
        return (1.0,)
    optimum = minimize(cost, start[1:], jac=True, method="L-BFGS-B")
    best = optimum.x if np.isfinite(optimum.fun) and optimum.fun <= cost(start[1:])[0] else start[1:]
    return (1.0, *(float(coefficient) for coefficient in best))


def strategy(coefficients: Coefficients, rounds: int) -> Floats:
    """The matrix C (rounds, rounds): entry (s, t) is coefficient s − t, or 0 outside the bands."""
    matrix = np.zeros((rounds, rounds))
    for k, coefficient in enumerate(coefficients[:rounds]):
        matrix += coefficient * np.eye(rounds, k=-k)
    return matrix


def inverse_coefficients(coefficients: Coefficients, rounds: int) -> Floats:
    """The first column (rounds,) of C⁻¹, which is lower triangular and Toeplitz, too. Raises `ValueError` for a first coefficient of 0."""
    c = np.array(coefficients)
    if len(c) == 0 or not np.isfinite(c).all() or c[0] == 0:
        raise ValueError("coefficients: expected finite numbers, the first of them not 0")
    inverse = np.zeros(rounds)
    for t in range(rounds):
        reach = min(t, len(c) - 1)
        inverse[t] = ((t == 0) - c[1 : reach + 1] @ inverse[t - reach : t][::-1]) / c[0]
    return inverse


def column_norms(coefficients: Coefficients, rounds: int) -> Floats:
    """Euclidean lengths (rounds,) of the columns of C; the last bands − 1 are cut off by the last round."""
    lengths = np.sqrt(np.cumsum(np.square(coefficients)))
    return np.asarray(lengths[np.minimum(np.arange(rounds, 0, -1), len(lengths)) - 1])


# --- sensitivity and error --------------------------------------------------------------------------------------------------------------


def separated_sensitivity(coefficients: Coefficients, rounds: int, participations: int, separation: int) -> float:
    """The most by which C x moves for contributions that move by 1, in at most so many rounds, at least `separation` apart.

    √participations times the longest column, with no more participations than fit into the rounds. Proof: see the module.
    Raises `ValueError` for more bands than the separation where somebody may come back, or for numbers below 1.
    """
    for name, value in (("rounds", rounds), ("participations", participations), ("separation", separation)):
        if value < 1:
            raise ValueError(f"{name}: {value} is below 1")
    times = min(participations, -(-rounds // separation))
    if times > 1 and len(coefficients) > separation:
        raise ValueError(f"coefficients: {len(coefficients)} bands are more than the separation of {separation} rounds, so columns overlap")
    return float(column_norms(coefficients, rounds).max() * math.sqrt(times))


def sensitivity_of(coefficients: Coefficients, rounds: int, patterns: Iterable[Iterable[int]]) -> float:
    """The same for known `patterns`, the rounds of each client: exact, where the last columns are cut off and some clients come less often.

    Raises `ValueError` for two rounds of a client that are closer than the bands, or outside the rounds.
    """
    squares, largest = np.square(column_norms(coefficients, rounds)), 0.0
    for pattern in patterns:
        numbers = sorted(pattern)
        if numbers and not 0 <= numbers[0] <= numbers[-1] < rounds:
            raise ValueError(f"patterns: {numbers} are not within {rounds} rounds")
        if len(numbers) > 1 and min(np.diff(numbers)) < len(coefficients):
            raise ValueError(f"patterns: {numbers} are closer than {len(coefficients)} bands, so columns overlap")
        largest = max(largest, float(squares[numbers].sum()))
    return math.sqrt(largest)


def prefix_variances(coefficients: Coefficients, rounds: int) -> Floats:
    """The variance (rounds,) of each coordinate of the sum of all noise up to each round, for a scale of 1: |row t of A C⁻¹|², A the prefix
    sum."""
    return np.cumsum(np.square(np.cumsum(inverse_coefficients(coefficients, rounds))))


def prefix_error(coefficients: Coefficients, rounds: int, sensitivity: float) -> float:
    """Root of the mean over rounds of the prefixes' variances at noise multiplier 1 and this sensitivity (`separated_sensitivity`)."""
    return sensitivity * math.sqrt(float(prefix_variances(coefficients, rounds).mean()))
