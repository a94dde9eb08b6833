"""The test of the mechanism that is claimed: a lower bound on ε from the trade-off between false and missed canaries.

The events of a ledger state a mechanism, and so the largest share of true positives that any test can have at each share of false ones
(`NoiseClaim.power_at`, the complement of the trade-off function; a Gaussian release has Φ(Φ⁻¹(α) + μ) with μ = 1/noise multiplier).
Canaries that are distinguished better than that refute the claim. The bound on ε is the price, at the same δ, of the same events with their
noise multiplied by a factor s (of a choice: its ε divided by s), for the least s that the scores refute.

The test. One class of canaries sets the threshold: its score of rank k, which is beaten by a further score of the class with a probability
α of the Beta(k, n − k + 1) law, whatever the scores' law is. Under the claim each canary of the other class is beyond the threshold with
probability at most `power_at(α)`. The p-value integrates the binomial tail over α: no parameter is estimated, nothing is asymptotic. Three
thresholds are tried (`THRESHOLDS`), fixed by the claim before scores are seen.

Of each score one threshold uses only on which side of it the score is. The area under the curve uses all ranks: the canaries that are in
beyond each of several thresholds are added up (`AreaCounts`). Whatever the scores' law is, the sum is stochastically at most that of
uniform scores out and of scores in whose places have the law `power_at`. So draws from that law give a valid p-value,
(1 + reached)/(1 + draws). For scores of more than two values the area has most of the error (`AREA`). All tests share the error by
Bonferroni's inequality, so that a sound mechanism exceeds its price in at most 1 − confidence of audits.

Assumption: given the coins, the scores of different canaries are independent, as they are where noise is drawn for each coordinate and
canaries have directions of their own. The bound of `dp_audit.audit_guesses` needs no such assumption, and is weaker.

Source: Dong, Roth & Su 2022 ("Gaussian differential privacy") for trade-off functions and their relation to (ε, δ), Proposition 6; Nasr et
al. 2023 ("Tight auditing of differentially private machine learning") for testing the trade-off function that is claimed. Deviations: the
trade-off function is that of the ledger's privacy-loss distribution for any events, not of a Gaussian alone; one Beta-binomial tail takes
the place of two Clopper–Pearson intervals, which would each need half of the error.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from operator import or_

import numpy as np
from scipy import stats

from ...protocols.accounting import deltas_of, epsilon_of
from ...protocols.events import AllocatedGaussianEvent, ChoiceEvent, Event, SampledGaussianEvent
from ...types import Array

__all__ = ["AreaCounts", "NoiseClaim", "ThresholdCounts", "claim_of_clients", "claim_p_value", "counts_of", "epsilon_refuted", "scaled"]

THRESHOLDS = ((1.0, True, 0.6), (0.1, True, 0.2), (0.1, False, 0.2))
"""Share of the equal error rate, whether canaries that are out set the threshold, and share of the error. The first is where a Gaussian
release shows most of all thresholds; the tails are for leaks of few canaries, and for large ε."""
AREA = 0.8
"""The share of the error that the area has."""
RANKS, DRAWS, COARSE = 16, 999, 50
"""Thresholds whose counts are added up for the area, at evenly spaced ranks; how often the sum is drawn; and of how many parts of the
canaries that are in all but a rest are counted, so that audits with about as many canaries share the draws."""
FIRST = (0.002, 0.0058, 0.017, 0.05)
"""Shares of further thresholds of the area, where steps on batches and small ε show most.

Shares and thresholds follow from the variance of the empirical curve and its slope in ε, not from audits. With 10,000 canaries and batches
at ε = 8 they give a bound of .909 of the claim in the mean. No test of ranks gives more than .917: the information in the ranks is
∫ (∂η/∂ε)² / (η (1 − η)) du, η(u) being the share of canaries that are in at quantile u of all scores."""
STEPS = 256
"""Factors of the noise that are tried between s and 2 s. Steps of .3 %, so ε is at most about that much below the exact bound."""
SMALLEST, LARGEST = 2.0**-2, 2.0**12
"""Factors of the noise, at most and at least. Below the first, distributions of sampled steps take seconds, and bounds mean nothing."""
SLOPES = np.append(0.0, np.geomspace(1e-4, 20.0, 120))
"""Values of ε at which the privacy profile is taken; the trade-off function is bounded from the safe side between them. Lines as steep as
e²⁰ bound nothing at rates above 1e-8."""
POINTS, TINY = 10_000, 1e-12
"""Thresholds at which sums over steps are compared, each read at the next that shows more; and what is as good as impossible."""
NODES, WEIGHTS = (np.polynomial.legendre.leggauss(64)[0] + 1) / 2, np.polynomial.legendre.leggauss(64)[1] / 2
"""Quadrature on (0, 1)."""


def scaled(events: Iterable[Event], factor: float) -> tuple[Event, ...]:
    """The same events with `factor` times the noise; of a choice with 1 / `factor` times its ε."""
    return tuple(
        replace(event, epsilon=event.epsilon / factor)
        if isinstance(event, ChoiceEvent)
        else replace(event, noise_multiplier=event.noise_multiplier * factor)
        for event in events
    )


@dataclass(frozen=True)
class NoiseClaim:
    """What a ledger claims: the `events` of the client that spent most, at `delta`.

    `covering` are events that cover those of each client with canaries, where clients differ; () where `events` do. `summed`: the one event
    is of steps on secret batches at parameters that stay as they are, and scores come from the sum over all steps alone. That shows less
    than the steps one by one, so the price of the events stands, and the trade-off function is that of the sum.
    """

    events: tuple[Event, ...]
    delta: float
    covering: tuple[Event, ...] = ()
    summed: bool = False

    @cached_property
    def epsilon(self) -> float:
        """The price of the events."""
        return epsilon_of(self.events, self.delta)

    def epsilon_at(self, factor: float) -> float:
        """The price of the events with `factor` times the noise."""
        return epsilon_of(scaled(self.events, factor), self.delta)

    def power_at(self, rates: Array, factor: float = 1.0, *, out: bool = True) -> Array:
        """The largest share of true positives (n,) of any test at shares of false ones `rates` (n,), with `factor` times the noise.

        False positives are canaries that are out, or with `out` false those that are in.
        """
        if self.summed:
            curve = _sums(self.events, factor)
            false, true = curve if out else (1 - curve[1][::-1], 1 - curve[0][::-1])
            return np.asarray(np.append(true, 1.0)[np.searchsorted(false, rates)])
        deltas = _profile(self.covering or self.events, factor)
        false = np.asarray(rates, np.float64)
        power, line = np.ones_like(false), np.empty_like(false)
        for steep, flat, delta in zip(
            np.exp(SLOPES), np.exp(-SLOPES), deltas, strict=True
        ):  # line by line, so that rates stay in the caches
            # TPR ≤ e^ε FPR + δ(ε), and the same with the classes exchanged
            np.minimum(power, np.add(np.multiply(false, steep, out=line), delta, out=line), out=power)
            np.multiply(np.subtract(1 - delta, false, out=line), flat, out=line)
            np.minimum(power, np.subtract(1, line, out=line), out=power)
        return np.asarray(np.maximum(power, 0.0))

    @cached_property
    def equal_error(self) -> float:
        """The share of errors where both kinds are as frequent, for the best test that the claim allows."""
        low, high = 0.0, 0.5
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if self.power_at(np.array([middle]))[0] >= 1 - middle else (middle, high)
        return high


@lru_cache(maxsize=256)
def _profile(events: tuple[Event, ...], factor: float) -> Array:
    """δ at each of `SLOPES`, of the events with `factor` times the noise."""
    return deltas_of(scaled(events, factor), SLOPES)


@lru_cache(maxsize=256)
def _sums(events: tuple[Event, ...], factor: float) -> tuple[Array, Array]:
    """Shares of canaries above falling thresholds, of those out and those in (both (n,)), by the sum over the steps of the one event.

    A canary that is in adds its norm bound as often as it is drawn; one that is out adds nothing, or under "replace_one" takes as much off.
    """
    (event,) = scaled(events, factor)
    assert isinstance(event, SampledGaussianEvent | AllocatedGaussianEvent)  # as `NoiseClaim` says
    spread = event.noise_multiplier * math.sqrt(event.steps)
    times = np.arange(event.steps + 1)
    if isinstance(event, AllocatedGaussianEvent):  # once in each pass
        likely = (times == event.passes).astype(float)
    else:
        likely = stats.binom.pmf(times, event.steps, event.sampling_rate)
    times, likely = times[likely > TINY], likely[likely > TINY]
    swaps = event.relation == "replace_one"
    edges = np.linspace(times[-1] + 9 * spread, -swaps * times[-1] - 9 * spread, POINTS)

    def above(sign: int) -> Array:
        tails = stats.norm.sf((edges[:, None] - sign * times) / spread)
        return np.asarray(tails @ likely + TINY * event.steps)  # what was left out counts as above

    return (above(-1) if swaps else stats.norm.sf(edges / spread)), np.minimum(1.0, above(1))


def claim_of_clients(bills: Iterable[tuple[Event, ...]], delta: float) -> NoiseClaim:
    """The claim of clients by their events: that of the client that spent most, covered by the largest count of each event."""
    each = list(bills)
    events = max(each, key=lambda bill: epsilon_of(bill, delta), default=())
    covering = reduce(or_, (Counter(bill) for bill in each), Counter[Event]())
    return NoiseClaim(events, delta, () if covering == Counter(events) else tuple(covering.elements()))


@dataclass(frozen=True)
class ThresholdCounts:
    """At one threshold: the `rank` of the score that sets it in its class of `setters`, and how many of the `others` are `beyond` it.

    `out`: whether canaries that are out set the threshold. `error`: the share of the error that the threshold has.
    """

    rank: int
    setters: int
    others: int
    beyond: int
    out: bool
    error: float

    def p_value(self, claim: NoiseClaim, factor: float) -> float:
        """How probable so many beyond the threshold are at most, under the claim with `factor` times the noise."""
        rates = _rates(self.rank, self.setters)
        tail = stats.binom.sf(self.beyond - 1, self.others, claim.power_at(rates, factor, out=self.out))
        return min(1.0, float(WEIGHTS @ tail))

    @property
    def best(self) -> "ThresholdCounts":
        """The same where all others are beyond the threshold."""
        return replace(self, beyond=self.others)


@lru_cache(maxsize=1024)
def _rates(rank: int, setters: int) -> Array:
    """Quantiles of the share of a class beyond its own score of this rank."""
    return np.asarray(stats.beta.ppf(NODES, rank, setters - rank + 1))


@dataclass(frozen=True)
class AreaCounts:
    """At several thresholds, set by out canaries' scores of falling `ranks`: how many of the `others` are `beyond` all of them, added up.

    `setters` and `error` as in `ThresholdCounts`.
    """

    ranks: tuple[int, ...]
    setters: int
    others: int
    beyond: int
    error: float

    def p_value(self, claim: NoiseClaim, factor: float) -> float:
        """How probable so large a sum is at most, under the claim with `factor` times the noise."""
        rates = _rates_of_ranks(self.ranks, self.setters)
        shares = claim.power_at(rates.ravel(), factor).reshape(rates.shape)
        rows = np.arange(DRAWS)[:, None]
        summed = (np.searchsorted(_places(self.others), shares + 2 * rows, side="right") - self.others * rows).sum(axis=1)
        return (1 + int((summed >= self.beyond).sum())) / (1 + DRAWS)

    @property
    def best(self) -> "AreaCounts":
        """The same where all others are beyond all thresholds."""
        return replace(self, beyond=len(self.ranks) * self.others)


@lru_cache(maxsize=64)
def _rates_of_ranks(ranks: tuple[int, ...], setters: int) -> Array:
    """Draws (`DRAWS`, ranks) of the shares of a class beyond its own scores of these rising ranks, all of one draw together."""
    gaps = np.diff([0, *ranks, setters + 1])
    parts = np.random.default_rng(0).standard_gamma(gaps, size=(DRAWS, len(gaps)))
    return np.asarray(parts[:, :-1].cumsum(axis=1) / parts.sum(axis=1, keepdims=True))


@lru_cache(maxsize=4)
def _places(count: int) -> Array:
    """Draws of so many uniform places, sorted, (`DRAWS` · count,); those of draw number i are from 2 i to 2 i + 1.

    The same for all factors of the noise, so that p falls as the factor rises.
    """
    parts = np.random.default_rng(1).standard_exponential((DRAWS, count + 1)).cumsum(axis=1)
    return np.asarray((parts[:, :-1] / parts[:, -1:] + 2 * np.arange(DRAWS)[:, None]).ravel())


Counts = ThresholdCounts | AreaCounts


def counts_of(scores: Array, coins: Array, claim: NoiseClaim) -> tuple[Counts, ...]:
    """What scores (m,) show at the thresholds, and all ranks; () where all coins (m,) bool fell alike.

    Equal scores are put in an order that does not depend on coins, as if by chance.
    """
    order = np.empty(len(scores))
    order[np.lexsort((np.random.default_rng(0).random(len(scores)), scores))] = np.arange(len(scores))
    classes = {True: order[~coins], False: -order[coins]}  # so that beyond a threshold is always above it
    if not all(len(places) for places in classes.values()):
        return ()
    area = 0.0 if all(isinstance(event, ChoiceEvent) for event in claim.events) else AREA
    counts: list[Counts] = []
    for share, out, error in THRESHOLDS:
        setters, others = np.sort(classes[out]), -classes[not out]
        rank = max(1, round(share * claim.equal_error * (len(setters) + 1)))
        beyond = int((others > setters[-rank]).sum())
        counts.append(ThresholdCounts(rank, len(setters), len(others), beyond, out, (1 - area) * error))
    if area:
        setters, others = np.sort(classes[True]), -classes[False]
        others = np.sort(others[: len(others) - len(others) % max(1, len(others) // COARSE)])
        shares = sorted([*FIRST, *(place / (RANKS + 1) for place in range(1, RANKS + 1))])
        spread = (round(share * (len(setters) + 1)) for share in shares)
        ranks = tuple(dict.fromkeys(min(max(1, rank), len(setters)) for rank in spread))
        below = np.searchsorted(others, setters[[-rank for rank in ranks]], side="right")
        counts.append(AreaCounts(ranks, len(setters), len(others), int((len(others) - below).sum()), area))
    return tuple(counts)


def claim_p_value(counts: Iterable[Counts], claim: NoiseClaim, factor: float = 2 ** (-0.5 / STEPS)) -> float:
    """How probable what the scores show is at most, under the claim with `factor` times the noise; all tests together.

    The default is half a step below the claimed noise: then a bound on ε is above the claim wherever p is as small as is asked for.
    """
    return min([1.0, *(count.p_value(claim, factor) / count.error for count in counts)])


def epsilon_refuted(counts: Iterable[Counts], claim: NoiseClaim, limit: float) -> float:
    """The lower bound on ε: the price of the claim with the least factor of noise whose p-value is at most `limit`; 0 if none is."""
    seen = tuple(counts)

    def refuted(step: int) -> bool:
        return claim_p_value(seen, claim, _factor(step)) <= limit

    refuted_at = _least(refuted)
    return 0.0 if refuted_at is None else claim.epsilon_at(_factor(refuted_at))


def _factor(step: int) -> float:
    """Factors of the noise on a grid, half a step beside 1."""
    return float(2 ** ((step + 0.5) / STEPS))


def _least(refuted: Callable[[int], bool]) -> int | None:
    """The least step whose factor is refuted, as are all above it; None if none is. Far steps are tried last: theirs cost most."""
    first, last = round(math.log2(SMALLEST) * STEPS), round(math.log2(LARGEST) * STEPS)
    low = high = -1  # the claim
    width = STEPS // 4
    if refuted(high):
        while low == high > first:
            low = max(first, high - width)
            if refuted(low):
                high, width = low, 2 * width
    else:
        while low == high < last:
            high = min(last, low + width)
            if not refuted(high):
                low, width = high, 2 * width
        if low == last:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return high
