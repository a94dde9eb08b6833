"""Privacy accounting: (ε, δ) of any collection of events, by several accountants that are checked against each other.

pld
    The truth here: privacy-loss distributions of dp-accounting, composed numerically with every discretisation upwards (pessimistic), so
    the figure is an upper bound. What their Fourier transforms may round off δ (`FFT_ERROR`) is taken off the δ that is asked for; a δ
    that is all rounding is priced by formulas (`_by_formulas`). Plain Gaussian releases, and sampled ones whose rate is 1, are first
    merged into one, exactly (noise multipliers compose as Σ 1/z²), and a collection of nothing else is priced by the closed formula.
    The spacing of losses follows from those of the steps (`_interval`), so that ε is within 1 % of exact where the distribution fits.
    Choices are bounded in range, which is about half of what pure ε allows: `bounded_range` has the worst case of their adaptive
    composition, and proves that it composes with all the rest. Those of an ε beyond any use (`LARGEST_PURE`) are added to the rest.
prv
    The cross-check: Opacus' privacy random variables (Gopi et al. 2021). Gaussians, sampled or not, under "add_remove".
rdp
    Rényi divergences: quick and loose, for calibration.

Opacus' GDP accountant is refused by name: it looks at the last entry of its history only and reports too little.

All of them compose a sequence whose noise and sampling rates are fixed beforehand, however adaptive the queries are. Where the *number*
of releases depends on what was released before (an algorithm that splits clusters when it likes), the budget acts as a stopping rule; for
Gaussian releases and Rényi accounting that is proved (Feldman & Zrnic 2021, Whitehouse et al. 2023), for sampled ones under pld it is used
unproved.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .allocation import allocated_moments, allocated_ratio, allocated_renyi, refined
from .bounded_range import Choices, bounded_range_deltas, bounded_range_kinds, bounded_range_reach
from .copies import check_own
from .events import EVENTS, AllocatedGaussianEvent, ChoiceEvent, Event, GaussianEvent, Relation, SampledGaussianEvent
from .mechanisms import gaussian_delta, gaussian_epsilon
from .sampled_losses import sampled_pld, sampled_renyi

__all__ = ["Accountant", "calibrate", "covers", "delta_of", "deltas_of", "epsilon_of", "epsilon_of_renyi", "renyi_of"]

Accountant = Literal["pld", "prv", "rdp"]
ORDERS = (*range(2, 65), *range(68, 129, 4), *range(144, 513, 16), 1024, 2048, 4096)
"""Rényi orders."""
FINEST, COARSEST = 2.0**-26, 2.0**-4
"""Spacings of privacy losses in a distribution are powers of two between these."""
ADDED, NEGLIGIBLE, MOST_ADDED = 0.01, 4e-10, 0.1
"""Discretisation adds to the variance of the losses of all steps together at most this share (half of it is added to ε), but at most and
at least so much."""
PART, SMALLEST = 1 / 256, 1e-2
"""Of ε, one spacing at most, and of an ε below the smallest that anybody asks for, that of this."""
MOST_LOSSES = 1 << 22
"""Losses that the distribution of one step, or of all, may have; where a finer spacing needs more, Rényi divergences may cost less."""
SMALLEST_RATE = 1e-15
"""Smaller sampling rates are rounded up to this, which costs more; some of them are no numbers for dp-accounting."""
PRV_ERROR = 0.01
"""Opacus' own default."""
FFT_ERROR = 1e-12
"""What composing by Fourier transforms may round off δ: up to 3e-14 were seen in 1000 steps, 2e-13 in 10⁵."""
LARGEST_BY_FORMULA = 600.0
"""dp-accounting finds ε with sums of e^-loss, which lose their digits and overflow on the way from about 700; beyond this δ is searched."""
LARGEST_OF_ALL = 1e9
"""An ε that is larger is infinity."""
LARGEST_PURE = 300.0
"""Of a single pure release: dp-accounting takes e^ε of it, which overflows from about 710; what is above this is added up instead."""
MOST_NOISE = 2.0**30
"""A noise multiplier; what costs infinity with that, costs infinity."""


@dataclass(frozen=True)
class _Bill:
    """Events by kind: 1/z² of all plain Gaussians together, steps by (z, q), passes by (z, batches), and counts of choices by ε."""

    relation: Relation
    precision: float
    sampled: tuple[tuple[float, float, int], ...]
    allocated: tuple[tuple[float, int, int], ...]
    choices: Choices


def _bill(events: Iterable[Event]) -> _Bill | None:
    """The events sorted, those of a `Counter` as often as it counts them; None for none.

    Raises `TypeError` for an unknown event, `ValueError` for two relations or units.
    """
    precision: list[float] = []
    sampled: Counter[tuple[float, float]] = Counter()
    allocated: Counter[tuple[float, int]] = Counter()
    choices: Counter[float] = Counter()
    kinds: set[tuple[Relation, str]] = set()
    event: Any
    for event, many in events.items() if isinstance(events, Counter) else ((event, 1) for event in events):
        if isinstance(event, GaussianEvent):
            precision.append(many * event.noise_multiplier**-2)
        elif isinstance(event, SampledGaussianEvent):
            if event.sampling_rate < 1:
                sampled[event.noise_multiplier, max(event.sampling_rate, SMALLEST_RATE)] += many * event.steps
            else:  # everybody in every step: no sampling, and plain Gaussians; one record for another moves a sum by twice the bound
                precision.append(many * (1 if event.relation == "add_remove" else 4) * event.steps * event.noise_multiplier**-2)
        elif isinstance(event, AllocatedGaussianEvent):
            if event.batches > 1:
                allocated[event.noise_multiplier, event.batches] += many * event.passes
            else:
                precision.append(many * event.passes * event.noise_multiplier**-2)
        elif isinstance(event, ChoiceEvent):
            choices[event.epsilon] += many
        else:
            check_own("privacy event", event, *EVENTS.values())
        kinds.add((event.relation, event.unit))
    if not kinds:
        return None
    if len(kinds) > 1:
        raise ValueError(f"events of different (relation, unit) do not compose: {sorted(kinds)}")
    return _Bill(
        next(iter(kinds))[0],
        math.fsum(sorted(precision)),
        tuple(sorted((z, q, steps) for (z, q), steps in sampled.items())),
        tuple(sorted((z, batches, passes) for (z, batches), passes in allocated.items())),
        tuple(sorted(choices.items())),
    )


def epsilon_of(events: Iterable[Event], delta: float, accountant: Accountant = "pld") -> float:
    """The ε at `delta` of all events together; 0 for none.

    Raises `ValueError` for δ outside (0, 1), an accountant that is not known or does not cover an event, or events of different
    relations or units; `TypeError` for an unknown event.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta: {delta} is outside (0, 1)")
    _check_accountant(accountant)
    try:
        return _epsilon(_bill(events), delta, accountant)
    except (OverflowError, ZeroDivisionError):  # of noise so small that no float holds what it costs
        return math.inf


def _epsilon(bill: _Bill | None, delta: float, accountant: Accountant) -> float:
    if bill is None:
        return 0.0
    if accountant == "prv":
        return _prv_epsilon(bill, delta)
    if accountant == "rdp":
        return _rdp_epsilon(bill, delta)
    rest, pure = _split(bill)
    return pure + (0.0 if _empty(rest) else _pld_epsilon(rest, delta))


def delta_of(events: Iterable[Event], epsilon: float) -> float:
    """The δ at `epsilon` of all events together, by pld."""
    return float(deltas_of(events, np.array([epsilon]))[0])


def deltas_of(events: Iterable[Event], epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """The δ (n,) at each of `epsilons` (n,) of all events together: the privacy profile, by pld."""
    bill = _bill(events)
    if bill is None:
        return np.zeros(len(epsilons))
    rest, pure = _split(bill)
    left = epsilons - pure
    if _empty(rest):
        deltas = np.zeros(len(left))
    elif _gaussian_only(rest):
        deltas = np.array([gaussian_delta(rest.precision**-0.5, float(epsilon)) for epsilon in left])
    else:
        interval, finest = _interval(rest)
        total = _pld(
            rest, max(finest, min(interval, _part(float(left.max()))))
        )  # asked for one ε at a time: for several together it walks through its losses in Python
        deltas = np.array([min(1.0, float(total.get_delta_for_epsilon(float(epsilon))) + FFT_ERROR) for epsilon in left])
        if not (rest.sampled or rest.allocated or rest.precision):
            deltas[_by_formulas(rest, 0.0) <= left] = 0.0
    return np.asarray(np.where(left < 0, 1.0, deltas) if pure else deltas, np.float64)


def renyi_of(events: Iterable[Event]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rényi orders (n,), and the divergence of all events together at each of them (n,); it is an upper bound.

    Raises `ValueError` as `epsilon_of`.
    """
    orders, bill = np.array(ORDERS, dtype=np.float64), _bill(events)
    return orders, np.zeros(len(orders)) if bill is None else _rdp(bill)


def epsilon_of_renyi(orders: NDArray[np.float64], renyi: NDArray[np.float64], delta: float) -> float:
    """The ε at `delta` of Rényi divergences (n,) at `orders` (n,), by the best order (Canonne, Kamath & Steinke 2020, Proposition 12)."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    return float(max(0.0, rdp.compute_epsilon(orders.tolist(), renyi.tolist(), delta)[0]))


def covers(planned: Iterable[Event], events: Iterable[Event]) -> bool:
    """Whether `events` are no more than a part of what was `planned`: kind by kind, by the precision of plain noise and by count.

    However data and earlier releases decided how many there were, they then cost no more than all that was planned.
    """
    plan, bill = _bill(planned), _bill(events)
    if bill is None:
        return True
    if plan is None or plan.relation != bill.relation:
        return False
    steps, choices = {(z, q): many for z, q, many in plan.sampled}, dict(plan.choices)
    passes = {(z, batches): many for z, batches, many in plan.allocated}
    return (
        bill.precision <= plan.precision * (1 + 1e-9)
        and all(many <= passes.get((z, batches), 0) for z, batches, many in bill.allocated)
        and all(many <= steps.get((z, q), 0) for z, q, many in bill.sampled)
        and all(many <= choices.get(epsilon, 0) for epsilon, many in bill.choices)
    )


def _check_accountant(name: str) -> None:
    if name == "gdp":
        raise ValueError(
            "accountant 'gdp': Opacus' GaussianAccountant prices the last entry of its history only and reports too little; use 'pld'"
        )
    if name not in get_args(Accountant):
        raise ValueError(f"accountant {name!r} is not known; known are {', '.join(get_args(Accountant))}")


def _split(bill: _Bill) -> tuple[_Bill, float]:
    """The bill without pure releases of an ε above `LARGEST_PURE`, and what these add up to."""
    choices = tuple(choice for choice in bill.choices if choice[0] <= LARGEST_PURE)
    beyond = [epsilon * count for epsilon, count in bill.choices if epsilon > LARGEST_PURE]
    return replace(bill, choices=choices), math.fsum(beyond)


def _empty(bill: _Bill) -> bool:
    return bill.precision == 0 and _gaussian_only(bill)


def _gaussian_only(bill: _Bill) -> bool:
    return not (bill.sampled or bill.allocated or bill.choices)


# --- privacy-loss distributions -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _pld_epsilon(bill: _Bill, delta: float) -> float:
    if _gaussian_only(bill):
        return gaussian_epsilon(bill.precision**-0.5, delta)
    if sum(steps * q for _, q, steps in bill.sampled) <= delta and not (bill.precision or bill.allocated or bill.choices):
        return 0.0  # no step has the record in its sample, but for this probability
    if delta <= FFT_ERROR:
        return _by_formulas(bill, delta)
    interval, finest = _interval(bill)
    epsilon = _distributed_epsilon(bill, delta - FFT_ERROR, interval)
    while (finer := max(finest, _part(epsilon))) < interval:
        interval = finer
        epsilon = _distributed_epsilon(bill, delta - FFT_ERROR, interval)
    return min(epsilon, _by_formulas(bill, delta)) if interval == finest or not (bill.sampled or bill.allocated) else epsilon


def _part(epsilon: float) -> float:
    """The spacing that an ε of this size needs at most."""
    return float(2.0 ** math.floor(math.log2(PART * max(epsilon, SMALLEST))))


def _distributed_epsilon(bill: _Bill, delta: float, interval: float) -> float:
    """The ε at `delta` by distributions of this spacing."""
    total = _pld(bill, interval)
    with warnings.catch_warnings():  # of the overflow that is met below
        warnings.simplefilter("ignore", RuntimeWarning)
        epsilon = float(total.get_epsilon_for_delta(delta))
    if epsilon < LARGEST_BY_FORMULA:
        return epsilon
    low, high = 0.0, LARGEST_BY_FORMULA
    while total.get_delta_for_epsilon(high) > delta:
        if high > LARGEST_OF_ALL:
            return math.inf
        low, high = high, 2 * high
    while high - low > COARSEST:
        middle = (low + high) / 2
        low, high = (middle, high) if total.get_delta_for_epsilon(middle) > delta else (low, middle)
    return float(high)


def _by_formulas(bill: _Bill, delta: float) -> float:
    """An upper bound that takes no Fourier transform: pure releases added to the plain Gaussians; with sampled steps by Rényi."""
    if bill.sampled or bill.allocated:
        return _rdp_epsilon(bill, delta)
    pure = math.fsum(epsilon * count for epsilon, count in bill.choices)
    return pure + (gaussian_epsilon(bill.precision**-0.5, delta) if bill.precision else 0.0)


def _pld(bill: _Bill, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as pld

    total = pld.identity(value_discretization_interval=interval)
    if bill.precision:
        total = total.compose(_gaussian_pld(bill.precision**-0.5, interval))
    for z, q, steps in bill.sampled:
        total = total.compose(_sampled_pld(z, q, steps, bill.relation, interval))
    for z, batches, passes in bill.allocated:
        total = total.compose(_allocated_pld(z, batches, interval).self_compose(passes))
    together, apart = bounded_range_kinds(bill.choices)
    for epsilon, count in apart:
        from dp_accounting.pld.common import DifferentialPrivacyParameters

        pure = pld.from_privacy_parameters(DifferentialPrivacyParameters(epsilon, 0.0), value_discretization_interval=interval)
        total = total.compose(pure.self_compose(count))
    if not together:
        return total
    ranged = _choices_pld(together, interval)
    return total.compose(ranged) if bill.precision or bill.sampled or bill.allocated or apart else ranged


def _interval(bill: _Bill) -> tuple[float, float]:
    """The spacing of losses for all events together, and the finest for which their distribution fits.

    Rounding a loss l of a step up or down to the grid, its mean kept, adds at most min(h²/4, h·|l|) to its variance, h the spacing.
    """
    kinds = [(*_moments(z, q, bill.relation), steps) for z, q, steps in bill.sampled]
    kinds += [(*allocated_moments(z, batches), 2 * passes) for z, batches, passes in bill.allocated]  # two roundings a pass
    kinds += [(bill.precision, bill.precision / 2, math.sqrt(bill.precision), 1)] if bill.precision else []
    kinds += [(epsilon**2 / 4, epsilon / 2, epsilon, count) for epsilon, count in bill.choices]
    variance, mean = (math.fsum(kind[place] * kind[-1] for kind in kinds) for place in (0, 1))
    reach = max(_reach(bill), 24 * math.sqrt(variance) + mean)  # of all losses together
    finest = max(FINEST, 2.0 ** math.ceil(math.log2(reach / MOST_LOSSES)))
    interval = COARSEST if reach < 1e4 * COARSEST else 2.0 ** math.ceil(math.log2(reach / 1e4))
    while interval > finest and sum(min(interval**2 / 4, interval * size) * count for _, _, size, count in kinds) > max(
        ADDED * variance, NEGLIGIBLE
    ):
        interval /= 2
    return max(interval, finest), finest


def _reach(bill: _Bill) -> float:
    """The largest loss of one step that is not cut off, about."""
    far = [max(0.0, (1 + 20 * z) / (2 * z**2) + math.log(q)) for z, q, _ in bill.sampled]
    far += [(1 + 20 * z) / (2 * z**2) for z, _, _ in bill.allocated]
    return max([1e-9, *far, *(q * 20 / z for z, q, _ in bill.sampled), *(epsilon for epsilon, _ in bill.choices)])


@lru_cache(maxsize=256)
def _moments(z: float, q: float, relation: Relation) -> tuple[float, float, float]:
    """Variance, mean and E |l| of the loss l of one sampled step, by the trapezoid rule."""
    _, upper, lower = _densities(z, q, relation)
    loss, weight = upper - lower, np.exp(upper)
    weight /= weight.sum()
    mean = float(weight @ loss)
    return max(float(weight @ (loss - mean) ** 2), 1e-300), mean, float(weight @ np.abs(loss))


def _densities(z: float, q: float, relation: Relation) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Points x (n,), and the log-densities there of a sampled step with the record and with its neighbour, up to one constant."""
    ends = 40 * z + 1
    x = np.linspace(-ends, ends, 8001)
    blank = -(x**2) / (2 * z**2)
    upper = np.logaddexp(math.log1p(-q) + blank, math.log(q) - (x - 1) ** 2 / (2 * z**2))
    other = np.logaddexp(math.log1p(-q) + blank, math.log(q) - (x + 1) ** 2 / (2 * z**2)) if relation == "replace_one" else blank
    return x, upper, other


@lru_cache(maxsize=256)
def _gaussian_pld(z: float, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(z, value_discretization_interval=interval)


@lru_cache(maxsize=256)
def _choices_pld(choices: Choices, interval: float) -> Any:
    """The distribution whose δ at each ε is that of the worst composition of choices, and at least that between multiples of `interval`."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    reach = math.ceil(bounded_range_reach(choices) / interval)
    epsilons = np.arange(-reach, reach + 1, dtype=np.float64) * interval
    deltas = np.clip(np.maximum(bounded_range_deltas(choices, epsilons), -np.expm1(epsilons)), 0.0, 1.0)
    return pld.PrivacyLossDistribution(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -reach, reach, deltas))


@lru_cache(maxsize=256)
def _sampled_pld(z: float, q: float, steps: int, relation: Relation, interval: float) -> Any:
    if steps > 1:
        return _sampled_pld(z, q, 1, relation, interval).self_compose(steps)
    if relation == "add_remove" and q < 1:
        return sampled_pld(z, q, interval)
    from dp_accounting.pld import privacy_loss_distribution as pld

    neighbours = pld.NeighborRel.ADD_OR_REMOVE_ONE if relation == "add_remove" else pld.NeighborRel.REPLACE_ONE
    return pld.from_gaussian_mechanism(z, sampling_prob=q, value_discretization_interval=interval, neighboring_relation=neighbours)


@lru_cache(maxsize=64)
def _allocated_pld(z: float, batches: int, interval: float) -> Any:
    """One pass, in both directions. Its own grid may be coarser, but has points of this one only."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    ratio = refined(allocated_ratio(z, batches, interval), interval)
    present = ratio.masses * np.exp(ratio.losses)
    first, last = ratio.first, ratio.first + len(present) - 1
    rest = max(0.0, 1.0 - float(present.sum()))
    make = pld_pmf.DensePLDPmf
    return pld.PrivacyLossDistribution(
        make(interval, first, present, rest, True), make(interval, -last, ratio.masses[::-1].copy(), ratio.zero, True)
    )


# --- Opacus' PRV ----------------------------------------------------------------------------------------------------------------------


def _prv_epsilon(bill: _Bill, delta: float) -> float:
    if bill.choices or bill.allocated:
        raise ValueError("accountant 'prv': covers Gaussian noise, sampled by Poisson batches or not, only; use 'pld'")
    if bill.sampled and bill.relation != "add_remove":
        raise ValueError(f"accountant 'prv': covers sampling under 'add_remove' only, not {bill.relation!r}; use 'pld'")
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    plain = [(bill.precision**-0.5, 1.0, 1)] if bill.precision else []
    accountant.history = plain + list(bill.sampled)
    with warnings.catch_warnings():  # log(0) at the edge of its grid, for sampling rate 1
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(accountant.get_epsilon(delta, eps_error=PRV_ERROR))


# --- Rényi ----------------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _rdp_epsilon(bill: _Bill, delta: float) -> float:
    return epsilon_of_renyi(np.array(ORDERS, dtype=np.float64), _rdp(bill), delta)


def _rdp(bill: _Bill) -> NDArray[np.float64]:
    orders = np.array(ORDERS, dtype=np.float64)
    total = orders * bill.precision / 2
    for z, q, steps in bill.sampled:
        total = total + steps * (sampled_renyi(z, q, ORDERS) if bill.relation == "add_remove" else _replaced_rdp(z, q))
    for z, batches, passes in bill.allocated:
        total = total + passes * allocated_renyi(z, batches, ORDERS)
    for epsilon, count in bill.choices:
        total = total + count * np.minimum(epsilon, orders * epsilon**2 / 8)  # range ε is ε²/8-concentrated (Cesar & Rogers 2021)
    return np.where(np.isnan(total), np.inf, total)  # of noise so small that it underflows; a NaN would pass for nothing spent


@lru_cache(maxsize=256)
def _replaced_rdp(z: float, q: float) -> NDArray[np.float64]:
    """Of (1−q) N(0, z²) + q N(1, z²) from (1−q) N(0, z²) + q N(−1, z²): the trapezoid rule, whose error falls exponentially.

    An order is left out where the points end before the integrand does.
    """
    x, upper, lower = _densities(z, q, "replace_one")
    step, known = x[1] - x[0], np.full(len(ORDERS), np.inf)
    for place, order in enumerate(ORDERS):
        terms = order * upper - (order - 1) * lower
        peak = int(terms.argmax())
        if min(terms[peak] - terms[0], terms[peak] - terms[-1]) > 60:
            whole = math.log(np.exp(terms - terms[peak]).sum() * step) + terms[peak] - math.log(z * math.sqrt(2 * math.pi))
            known[place] = max(0.0, whole) * (1 + 1e-9) / (order - 1) + 1e-15
    return known


# --- calibration ----------------------------------------------------------------------------------------------------------------------


def calibrate(events: Callable[[float], Sequence[Event]], epsilon: float, delta: float, tolerance: float = 1e-3) -> float:
    """A noise multiplier z for which `events(z)` cost at most ε at δ, and at least (1 − tolerance) ε.

    More noise must cost less. Rényi accounting, quick and too high, finds where to begin. Raises `ValueError` for an ε that no noise
    reaches (what is fixed in `events` costs more).
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon: {epsilon} is not a finite number above 0")

    def quick(z: float) -> float:
        return epsilon_of(events(z), delta, "rdp")

    def exact(z: float) -> float:
        return epsilon_of(events(z), delta)

    high = 1.0
    while quick(high) > epsilon and high < 2**20:
        high *= 2
    if high == 2**20 and exact(high) > epsilon:
        raise ValueError(f"epsilon: {epsilon} cannot be kept by any noise here: what is fixed costs more")
    while high > 2**-10 and quick(high / 2) <= epsilon:
        high /= 2
    return _solved(exact, epsilon, high, tolerance)


def _solved(cost: Callable[[float], float], epsilon: float, start: float, tolerance: float) -> float:
    """z with (1 − tolerance) ε ≤ cost(z) ≤ ε. Costs fall about like a power of z and are dear to compute: the secant rule, in logs."""
    target = epsilon * (1 - tolerance / 2)
    low, high = 0.0, math.inf  # cost(low) > ε ≥ cost(high)
    z, before = start, None
    for _ in range(80):
        now = cost(z)
        if now == math.inf:  # no slope to follow
            low = z
            if z > MOST_NOISE:
                break
            z = 4 * z if high == math.inf else math.sqrt(z * high)
            continue
        if epsilon * (1 - tolerance) <= now <= epsilon:
            return z
        low, high = (z, high) if now > epsilon else (low, min(high, z))
        if low and high / low - 1 < tolerance / 100:  # a step in the cost: the least that keeps it
            return high
        power = -1.0
        if before is not None and now > 0 and before[1] > 0 and now != before[1]:
            power = min(-0.2, math.log(now / before[1]) / math.log(z / before[0]))
        before = (z, now)
        guess = z * (target / now) ** (1 / power) if now > 0 else z / 2
        if not low < guess < high:
            guess = math.sqrt(low * high) if low and high < math.inf else guess
        z = min(max(guess, z / 16, low), z * 16, high)
    if high == math.inf:
        raise ValueError(f"epsilon: {epsilon} cannot be kept by any noise here: what is fixed costs more")
    return high
