"""Pool one figure over several seeds; `leakage` defines what each status requires."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from ...types import Array
from .leakage import Cell
from .significance import (
    ENOUGH,
    FEWEST_COUNTS,
    FEWEST_SCORES,
    LEAST_SHOWN,
    RATE,
    CellStatus,
    confidence_interval,
    interval,
    proportion_interval,
    t_chance,
    t_power,
)

__all__ = ["pooled"]

PARTS = 4
"""The t-test of all seeds has this part of the rate where runs are judged by themselves as well."""

TOO_FEW_TOSSES = f"; one run is a toss of a coin, so {FEWEST_COUNTS} seeds have to agree (--budget thorough has ten)"


def pooled(cells: Sequence[Cell]) -> list[Cell]:
    """One cell a figure from the cells of several seeds, in the order in which figures first occur.

    The first seed is the recorded run's. From three seeds on, a pooled cell has means over seeds and a t-interval. With fewer seeds, it has
    the values of a seed that leaks, else of the first seed with something to see. If some seeds had nothing to see, a note counts the
    others.
    """
    figures: dict[tuple[str, str, str, str, int], list[Cell]] = {}
    for cell in cells:
        figures.setdefault((cell.attack, cell.adversary, cell.protection, cell.metric, cell.k_known), []).append(cell)
    return [_pooled(seeds_of_figure) for seeds_of_figure in figures.values()]


def _pooled(cells: Sequence[Cell]) -> Cell:
    seen = [cell for cell in cells if cell.value is not None]
    if not seen:
        return next((cell for cell in cells if cell.status == "not_attempted"), cells[0])
    first = seen[0]
    recorded = cells[0].value is not None
    exact = any(cell.exact for cell in seen)
    p = first.p if len(seen) == 1 else None if exact else _leak_chance(seen, recorded)
    status = first.status if len(seen) == 1 else _verdict(seen, recorded, p)
    if status != "leaks" and _are_few_tosses(seen):
        status, first = "inconclusive", replace(first, note=first.note + TOO_FEW_TOSSES)
    weakest = min(seen, key=lambda cell: _shown(cell) or 0.0)
    planted = any(cell.power_low is not None for cell in seen)
    shown = None if exact else _shown(weakest) if planted or len(seen) < FEWEST_SCORES else _power_over(seen)
    if status == "at_baseline" and not (exact or _is_earned(seen, shown)):
        status = "inconclusive"
    if status == "at_baseline" and any(cell.status == "inconclusive" for cell in seen):  # the attack knows that its failure shows nothing
        status, shown = "inconclusive", None
    if len(seen) < FEWEST_SCORES:
        stated = next((cell for cell in seen if cell.status == "leaks"), first) if status == "leaks" else first
        return replace(stated, status=status, p=p, note=stated.note + _missing(cells))
    value, baseline, reference, blank = _columns(seen)
    low, high = _interval_over(seen, value)
    arrays = next((cell.arrays for cell in cells if cell.arrays), None)
    seeds = tuple(seed for cell in seen for seed in cell.seeds)
    return replace(
        first, value=float(value.mean()), low=low, high=high, baseline=float(baseline.mean()), reference=float(reference.mean()),
        reference_baseline=float(blank.mean()), status=status, seeds=seeds, arrays=arrays, p=p,
        counted=sum(cell.counted for cell in seen), power=weakest.power if planted else shown, power_low=weakest.power_low, gain_high=None,
        note=first.note + _missing(cells) + (_alone(cells) if status == "leaks" else ""),
    )  # fmt: skip


def _are_few_tosses(seen: Sequence[Cell]) -> bool:
    """Whether runs are tosses of a coin, too few to show anything, of an attack that works on the unprotected runs."""
    _, _, reference, blank = _columns(seen)
    works = float(np.mean(reference - blank)) * (-1.0 if seen[0].lower_is_better else 1.0) > seen[0].margin
    return any(cell.coin for cell in seen) and len(seen) < FEWEST_COUNTS and works


def _is_earned(seen: Sequence[Cell], shown: float | None) -> bool:
    """Whether a figure may be at its baseline with the power `shown`: all rounds were attacked, and of fewer than three seeds the gain of
    each run is surely within the margin."""
    within = len(seen) >= FEWEST_SCORES or all(cell.gain_high is None or cell.gain_high <= cell.margin for cell in seen)
    return shown is not None and shown >= ENOUGH and within and not any(cell.rounds for cell in seen)


def _shown(cell: Cell) -> float | None:
    """The power of one run, by its lower end where it was estimated from planted leaks."""
    return cell.power if cell.power_low is None else cell.power_low


def _power_over(seen: Sequence[Cell]) -> float:
    """How often the t-test over seeds, at its part of the rate, shows a leak half as large as that of the unprotected runs."""
    value, baseline, reference, blank = _columns(seen)
    sign = -1.0 if seen[0].lower_is_better else 1.0
    planted = sign * (value - baseline + reference - blank) / 2
    power = t_power(float(planted.mean()), float(planted.std(ddof=1)), len(seen), seen[0].margin, RATE / PARTS)
    return min(power, _agreement_power(len(seen))) if any(cell.coin for cell in seen) else power


def _columns(seen: Sequence[Cell]) -> tuple[Array, Array, Array, Array]:
    """Value, baseline, reference and its baseline, by seed."""

    def column(name: str) -> Array:
        return np.array([np.nan if (number := getattr(cell, name)) is None else number for cell in seen])

    return column("value"), column("baseline"), column("reference"), column("reference_baseline")


def _verdict(seen: Sequence[Cell], recorded: bool, p: float | None) -> CellStatus:
    """The status of one figure from two seeds or more with its p, the first of them that of the recorded run if `recorded`."""
    first, sign = seen[0], -1.0 if seen[0].lower_is_better else 1.0
    if p is None:  # of exact figures
        return "leaks" if any(cell.exact and (cell.value or 0.0) > cell.margin for cell in seen) else "at_baseline"
    value, baseline, reference, blank = _columns(seen)
    gain, tested = sign * (value - baseline), len(seen) >= FEWEST_SCORES
    alone = all(cell.status != "not_validated" for cell in seen)
    valid = tested and (alone or t_chance(sign * (reference - blank), first.margin) < RATE)
    if p < RATE:
        return "leaks"
    if valid and any(cell.coin for cell in seen) and t_chance(gain, first.margin) < RATE:
        return "inconclusive"  # tosses that agree by luck more often than that
    if not tested:  # no test over two seeds: the recorded one decides, unless a seed leaks
        return "inconclusive" if any(cell.status == "leaks" for cell in seen) else first.status
    if not valid:
        return "not_validated"
    doubt = recorded and first.status == "leaks" and not first.coin  # at the rate of one run, not at that of all
    return "inconclusive" if doubt or confidence_interval(gain)[1] > first.margin else "at_baseline"


def _leak_chance(seen: Sequence[Cell], recorded: bool) -> float:
    """How probable, at most, the seeds' scores are if nothing leaks: the recorded run by itself, any run by itself, and all together.

    These share the rate (Bonferroni, weighted): the recorded run has half, the smallest p an eighth, all p together an eighth, the t-test
    of all seeds a quarter. Runs that give no p are called leaks at `RATE` each: their number has a quarter, the t-test the rest. That test
    has the whole where no run can be a leak by itself, as tosses cannot; of these p is no less than that of a sign test either.
    """
    first, sign = seen[0], -1.0 if seen[0].lower_is_better else 1.0
    value, baseline, reference, blank = _columns(seen)
    gain, coin = sign * (value - baseline), any(cell.coin for cell in seen)
    alone, counted = not coin and any(cell.status != "not_validated" for cell in seen), any(cell.p is None for cell in seen)
    ps = [1.0]
    if len(seen) >= FEWEST_SCORES and t_chance(sign * (reference - blank), first.margin) < RATE:
        together = max(t_chance(gain, first.margin), _agreement(gain) if coin else 0.0)
        ps.append(together * ((4 / 3 if counted else PARTS) if alone else 1))
    if alone and counted:
        leaks = sum(cell.status == "leaks" for cell in seen)
        ps.append(4 * float(stats.binomtest(leaks, len(seen), RATE, alternative="greater").pvalue))
    elif alone:
        chances = [1.0 if cell.p is None or cell.status == "not_validated" else cell.p for cell in seen]
        ps += [8 * len(chances) * min(chances), 8 * _fisher(chances), *([2 * chances[0]] if recorded else [])]
    return max(min(ps), LEAST_SHOWN)


def _fisher(chances: Sequence[float]) -> float:
    """How probable such p of independent runs are, all together (Fisher 1925): several that are small each, or one that is tiny."""
    return float(stats.chi2.sf(-2 * float(np.log(np.maximum(chances, 1e-300)).sum()), 2 * len(chances)))


def _agreement(gains: Array) -> float:
    """How probable it is that so many gains are above 0 if each is the toss of a coin: the p of a sign test, at least 2⁻ⁿ."""
    return float(stats.binomtest(int((gains > 0).sum()), len(gains), alternative="greater").pvalue)


def _agreement_power(n: int) -> float:
    """How often that test shows tosses of which half are not tossed, but turn out right."""
    enough = stats.binom.isf(RATE, n, 0.5) + 1
    return float(stats.binom.sf(enough - 1, n, 0.75))


def _missing(cells: Sequence[Cell]) -> str:
    """The end of the note of a figure that some seeds lack: how many seeds have the figure, and why the first of the others does not."""
    why = [cell.note for cell in cells if cell.value is None]
    if len(why) in (0, len(cells)):
        return ""
    return f"; something to see in {len(cells) - len(why)} of {len(cells)} seeds, the figure is of these only; else: {why[0]}"


def _alone(cells: Sequence[Cell]) -> str:
    """The end of the note of a leak that only some seeds show by themselves: the mean over seeds does not tell which seeds leak."""
    seen = [cell for cell in cells if cell.value is not None]
    leaking = [cell for cell in seen if cell.status == "leaks"]
    if len(leaking) in (0, len(seen)):
        return ""
    recorded = cells[0] in leaking
    figure = f" ({cells[0].value:.3f})" if recorded else ""
    return f"; {len(leaking)} of {len(seen)} seeds leak by themselves, the recorded run{figure} {'among' if recorded else 'not among'} them"


def _interval_over(seen: Sequence[Cell], values: Array) -> tuple[float | None, float | None]:
    """The interval over seeds. If all seeds have the same share, the interval is by the counts of all seeds."""
    if float(np.ptp(values)) == 0.0 and values[0] in (0.0, 1.0) and all(cell.counted for cell in seen):
        return proportion_interval(np.full(sum(cell.counted for cell in seen), values[0]))
    return interval(seen[0].metric, values, 0)
