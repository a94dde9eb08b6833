"""Columns where some numbers are in another unit: part of a client's rows, or all rows of some clients.

Real columns have two humps, too, and real clients differ. So three things must come together. The two sides are far apart; one becomes
like the other, in place and in spread, by the step between two units that people use; and for rows of one client nothing else differs
between the sides, neither the label nor another column, as it would if the humps were of two kinds of samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ..types import Array

__all__ = [
    "SMALLEST",
    "UNITS",
    "ClientValues",
    "Mixed",
    "UnitStep",
    "bunches",
    "client_units",
    "clients_apart",
    "clients_differ",
    "examined_rows",
    "label_columns",
    "mixed_units",
    "related",
    "shown_step",
    "values_of_clients",
]


@dataclass(frozen=True)
class UnitStep:
    """From one unit to another: x · `factor` + `offset`, or `curve`(x), which rises or falls everywhere above 0."""

    factor: float
    offset: float
    words: str
    curve: Callable[[Array], Array] | None = None


_FACTORS = (
    (2.54, "centimetres and inches"), (25.4, "millimetres and inches"), (3.2808, "feet and metres"), (30.48, "centimetres and feet"),
    (2.2046, "pounds and kilograms"), (453.59, "grams and pounds"), (28.35, "grams and ounces"), (1.6093, "kilometres and miles"),
    (3.6, "km/h and m/s"), (7.5006, "mmHg and kPa"), (14.504, "psi and bar"), (18.016, "mg/dl and mmol/l of glucose"),
    (38.67, "mg/dl and mmol/l of cholesterol"), (88.5, "creatinine or lipids in mg/dl and in mmol/l or µmol/l"),
    (17.1, "µmol/l and mg/dl of bilirubin"), (4.184, "kJ and kcal"), (3.7854, "litres and gallons"),
    (10.764, "square feet and square metres"), (60.0, "minutes and hours, or seconds and minutes"), (3600.0, "seconds and hours"),
    (24.0, "hours and days"), (12.0, "months and years"), (365.25, "days and years"), (57.296, "degrees and radians"),
    (255.0, "0 to 255 and 0 to 1"), (1024.0, "bytes and kilobytes"), (10.0, "powers of ten"),
    (100.0, "percent and fractions, or powers of ten"), (1e3, "powers of ten"), (1e4, "powers of ten"), (1e6, "powers of ten"),
)  # fmt: skip
UNITS = (
    *(UnitStep(factor, 0.0, words) for factor, words in _FACTORS),
    UnitStep(1.8, 32.0, "degrees Fahrenheit and Celsius"), UnitStep(1.0, 273.15, "kelvins and degrees Celsius"),
    UnitStep(1.0, 1900.0, "years of four and of two digits"), UnitStep(1.0, 2000.0, "years of four and of two digits"),
    UnitStep(-1.0, 0.0, "the sign"),
)  # fmt: skip
"""Steps that people make. With more of them any two levels would be a step apart."""
CURVES = (
    UnitStep(1.0, 0.0, "numbers and their logarithms", np.exp), UnitStep(1.0, 0.0, "numbers and their logarithms", np.log),
    UnitStep(1.0, 0.0, "numbers and their logarithms to base 10", lambda x: 10.0**x),
    UnitStep(1.0, 0.0, "numbers and their logarithms to base 10", np.log10),
    UnitStep(1.0, 0.0, "numbers and their logarithms to base 2", np.exp2),
    UnitStep(1.0, 0.0, "numbers and their logarithms to base 2", np.log2),
    UnitStep(1.0, 0.0, "numbers and the logarithms of 1 more", np.expm1),
    UnitStep(1.0, 0.0, "numbers and the logarithms of 1 more", np.log1p),
    UnitStep(1.0, 0.0, "numbers and their squares", np.square), UnitStep(1.0, 0.0, "numbers and their squares", np.sqrt),
    UnitStep(1.0, 0.0, "numbers and their reciprocals", np.reciprocal),
)  # fmt: skip
"""From a few clients' values to those of all others. They bend a distribution, so its quartiles tell them from a shift of the middle."""

FEWEST, FEWEST_MANY = 3, 20
"""Rows of the smaller and of the larger side."""
FEWEST_SPREAD = 8
"""A side of fewer values tells nothing of a spread."""
APART, RUN_APART, CLIENT_APART = 6.0, 3.5, 4.0
"""How many deviations the sides' medians are apart: of any rows, of runs of rows, of whole clients."""
EMPTY = 1.0
"""The gap between the sides is as wide as so many deviations, if they are no runs of rows."""
NEAR, SURE, WIDEST = 0.15, 3.0, 0.12
"""The converted side's median is within `NEAR` deviations of the other's, and `SURE` standard errors, in logarithms within `WIDEST`."""
LITTLE = 0.3
"""Of logarithms: with wider sides any two levels may be a step apart."""
DECIMAL = 0.25
"""Powers of ten are taken before steps that are not nearer by this factor: they are more usual."""
SPREADS = 1.6
"""The sides' spreads differ by less than this factor, beyond what few rows do by chance."""
RELATED = 3.5
"""If a column or the label differs between the sides by so many standard errors, they are two kinds of samples."""
STEP = 0.5
"""A step in a client's rows explains this share of their variance."""
TREND = 0.5
"""A run of rows whose values rise or fall with the rows, by a correlation above this, is a sorted table."""
FEWEST_RUN, FEW_LEVELS = 15, 8
"""Rows of a run, and different values in it."""
FEW_KINDS = 10
"""Of so many classes each is compared by itself."""
FEW_ROWS = 10
"""A client with fewer rows is not compared with others."""
NORMAL_QUARTILES = 1.349
"""The distance between the quartiles of a normal distribution, in deviations."""
FEWEST_CLIENTS = 3
MINORITY, MOST_ODD = 0.4, 0.5
"""Clients in another unit are fewer than the first share; those a hundred times apart at most the second."""
GAP = 3.0
"""Between clients in another unit and all others there is a gap so many times as wide as either differ among themselves."""
FACTOR_SURE = 100
CURVE_SPREADS, CURVE_APART = 1.3, 3.0
"""The same as `SPREADS` and `CLIENT_APART` for curves, which are more and must also explain the spread."""
SMALLEST = float(np.finfo(np.float32).tiny)
"""Models compute in single precision, where a smaller spread is 0, and the square of a deviation may have no number."""
MOST_ROWS = 10_000
"""What is examined of a longer table, in its order."""


@dataclass(frozen=True)
class Mixed:
    """`count` rows, or the clients `clients`, differ from the others by about the step `step`.

    `sure`: the sides spread little, and the step is one that hardly a change of the world makes: 100 times and more, °F and °C.
    """

    step: UnitStep
    count: int
    clients: tuple[int, ...] = ()
    sure: bool = False


@dataclass(frozen=True)
class _Side:
    """Values in a scale: their median, their deviation by quantiles that outliers do not move, and their number."""

    middle: float
    spread: float
    count: int


def mixed_units(columns: Mapping[str, Array], labels: Array, clients: Array | None) -> dict[str, Mixed]:
    """Columns of numbers (rows,), NaN for blanks, where part of the rows of a client is in another unit than the rest.

    Two kinds are found: sides with an empty gap between, and a run of a client's rows. `labels` (rows,) are numbers.
    """
    rows = examined_rows(len(labels))
    owners = np.zeros(len(rows), np.int64) if clients is None else clients[rows]
    order = np.argsort(owners, kind="stable")
    rows, owners = rows[order], owners[order]
    bounds = np.append(np.flatnonzero(np.diff(owners, prepend=-1)), len(owners))
    values = {name: column[rows] for name, column in columns.items()}
    splits: dict[str, tuple[Array, Mixed]] = {}
    for name, own in values.items():
        found = _by_gap(own, bounds) or _by_run(own, bounds)
        if found is not None:
            splits[name] = found
    if not splits:
        return {}
    others = [*(own for name, own in values.items() if name not in splits), *label_columns(labels[rows])]
    return {
        name: replace(mixed, sure=mixed.sure and (mixed.step.factor >= FACTOR_SURE or mixed.step.offset > 0))
        for name, (side, mixed) in splits.items()
        if not any(related(side, np.isfinite(values[name]), other, bounds) for other in others)
    }  # fmt: skip


@dataclass(frozen=True)
class ClientValues:
    """Of each client with enough rows: its number, its least value, quartiles (clients, 3), rows, its most frequent value, and its rows.

    Of all: the number of different values, the least and the largest.
    """

    clients: Array
    least: Array
    quartiles: Array
    sizes: Array
    usual: Array
    often: Array
    levels: int
    ends: tuple[float, float]

    def scales(self) -> list[Array]:
        """The medians, and their logarithms if all values are above 0: sizes of clients that differ by factors have one that is far."""
        return [self.quartiles[:, 1], np.log(self.quartiles[:, 1])] if self.least.min() > 0 else [self.quartiles[:, 1]]

    def in_scale(self, logged: bool) -> tuple[Array, Array]:
        """The medians and deviations, of the values or of their logarithms."""
        low, middle, high = (np.log(self.quartiles) if logged else self.quartiles).T
        return middle, (high - low) / NORMAL_QUARTILES


def values_of_clients(column: Array, clients: Array) -> ClientValues:
    """What the values (rows,), NaN for blanks, of each client are like."""
    rows = examined_rows(len(column))
    rows = rows[np.isfinite(column[rows])]
    order = np.argsort(column[rows])
    levels = int((np.diff(column[rows][order]) > 0).sum()) + 1
    order = order[np.argsort(clients[rows][order], kind="stable")]
    values, owners = column[rows][order], clients[rows][order]
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    sizes = np.diff(np.append(begins, len(owners)))
    firsts = np.flatnonzero(np.append(True, (values[1:] != values[:-1]) | (owners[1:] != owners[:-1]))[: len(values)])
    counts = np.diff(np.append(firsts, len(values)))
    at = np.searchsorted(firsts, begins)
    often = np.maximum.reduceat(counts, at) if len(at) else counts
    most = np.array([values[firsts[i + np.argmax(counts[i:j])]] for i, j in pairwise([*at.tolist(), len(firsts)])])
    large = sizes >= FEW_ROWS
    ends = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    begins, sizes = begins[large], sizes[large]
    quartiles = np.stack([values[begins + sizes * k // 4] for k in (1, 2, 3)], axis=1)
    return ClientValues(owners[begins], values[begins], quartiles, sizes, most[large], often[large], levels, ends)


def client_units(own: ClientValues, most: float = MINORITY) -> list[Mixed]:
    """The clients, up to a share `most` of all, whose values are in another unit; several units are several entries.

    Of clients whose medians, or their logarithms, are drawn from one normal distribution, this happens with a probability below 3 % a
    column (trials with 4 to 20 clients); if they differ by no more than their rows do, below 1e-3.
    """
    if len(own.clients) < FEWEST_CLIENTS:
        return []
    for logged in (True, False) if own.least.min() > 0 else (False,):
        if odd_clients := _odd_clients(own, logged, most):
            return [Mixed(step, int(own.sizes[odd].sum()), tuple(own.clients[odd].tolist())) for odd, step in odd_clients]
    return []


def bunches(middles: Array, spreads: Array) -> tuple[Array, list[Array]]:
    """Clients, by place, divided where their medians are apart: the most that are together, and the others.

    One gap that is `GAP` times as wide as the sides divides them, whatever their spreads are; else gaps of some deviations do.
    """
    order = np.argsort(middles)
    gaps = np.diff(middles[order])
    place = int(np.argmax(gaps))
    if gaps[place] > GAP * max(np.ptp(middles[order[: place + 1]]), np.ptp(middles[order[place + 1 :]])):
        parts = np.split(order, [place + 1])
    else:
        wide = gaps > CLIENT_APART / 2 * max(float(np.median(spreads)), np.finfo(float).tiny)
        parts = np.split(order, np.flatnonzero(wide) + 1)
    most = max(range(len(parts)), key=lambda place: len(parts[place]))
    return parts[most], [part for place, part in enumerate(parts) if place != most]


def clients_differ(own: ClientValues) -> bool:
    """Whether some clients' values are `CLIENT_APART` deviations from those of most."""
    middles, spreads = own.in_scale(logged=False)
    return bool((np.abs(middles - np.median(middles)) > CLIENT_APART * np.median(spreads)).any())


def clients_apart(own: ClientValues) -> tuple[int, ...]:
    """A minority of clients whose values are far from those of all others, which are alike; none if there are none.

    That m medians of one distribution lie within 1/g of the gap to others has a probability that falls as g^-(m - 1). So g depends on m:
    clients whose medians are drawn from one normal distribution are named with a probability below 4e-3 a column (3e-3 in trials).
    """
    if len(own.clients) <= FEWEST_CLIENTS:
        return ()
    for logged in (True, False) if own.least.min() > 0 else (False,):
        middles, spreads = own.in_scale(logged)
        many, others = bunches(middles, spreads)
        few = np.concatenate([np.zeros(0, int), *others])
        if not 0 < len(few) <= MINORITY * len(middles) or spreads[many].min() <= 0:
            continue
        far = np.abs(middles[few][:, None] - middles[many]).min() > CLIENT_APART * float(np.median(spreads))
        if far and all(_gap(scale, few, many) > _wide(90, len(many)) * np.ptp(scale[many]) for scale in own.scales()):
            return tuple(own.clients[few].tolist())
    return ()


def _odd_clients(own: ClientValues, logged: bool, most: float) -> list[tuple[Array, UnitStep]]:
    """Clients, by place, whose medians are apart from those of all others by the step of a unit, and the step.

    If clients are apart by no such step, the column differs among clients, and no step means anything.
    """
    middles, spreads = own.in_scale(logged)
    many, others = bunches(middles, spreads)
    if sum(map(len, others)) > MOST_ODD * len(middles) or len(many) < 2:
        return []
    odd_clients = []
    rest = _Side(float(np.median(middles[many])), float(np.median(spreads[many])), int(own.sizes[many].sum()))
    for few in others:
        if any(_gap(scale, few, many) < max(GAP * np.ptp(scale[few]), _wide(4, len(many)) * np.ptp(scale[many])) for scale in own.scales()):
            return []
        odd = _Side(float(np.median(middles[few])), float(np.median(spreads[few])), int(own.sizes[few].sum()))
        between = float(np.std(middles[many]) * (1 / len(few) + 1 / len(many)) ** 0.5)
        step = _step(odd, rest, logged, CLIENT_APART, between) or _curve(np.median(own.quartiles[few], axis=0), odd, rest, logged, between)
        if step is None or not _sure(step, sum(map(len, others)), len(middles), most):
            return []
        odd_clients.append((few, step))
    return odd_clients


def _gap(middles: Array, few: Array, many: Array) -> float:
    """Between the medians of few clients and of many, where no other is."""
    return float(max(middles[few].min() - middles[many].max(), middles[many].min() - middles[few].max()))


def _wide(rarer: float, clients: int) -> float:
    """How many times as wide as the medians of so many clients a gap is, which `GAP` times is by chance `rarer` times more frequently."""
    return float(GAP * rarer ** (1 / (clients - 1)))


def _sure(step: UnitStep, few: int, clients: int, most: float) -> bool:
    """Whether few clients have a step, or it is one that hardly a change of the world makes."""
    return few <= most * clients or step.factor >= FACTOR_SURE


def _curve(quartiles: Array, few: _Side, many: _Side, logged: bool, between: float) -> UnitStep | None:
    """The curve that brings the quartiles (3,) of few clients to the place and the spread of all others'; None if there is none."""
    if few.spread <= 0 or many.spread <= 0 or abs(few.middle - many.middle) < CURVE_APART * max(few.spread, many.spread):
        return None
    error = 1.25 * many.spread * (1 / few.count + 1 / many.count) ** 0.5
    chance = CURVE_SPREADS * (1 + SURE * (1 / few.count + 1 / many.count) ** 0.5)
    best, nearest = None, NEAR * many.spread + SURE * (error + between)
    for step in CURVES:
        assert step.curve is not None
        with np.errstate(all="ignore"):
            low, middle, high = np.sort(np.log(step.curve(quartiles)) if logged else step.curve(quartiles)).tolist()
        spread = (high - low) / NORMAL_QUARTILES
        if np.isfinite(spread) and 1 / chance < spread / many.spread < chance and abs(middle - many.middle) < nearest:
            best, nearest = step, abs(middle - many.middle)
    return best


def _step(few: _Side, many: _Side, logged: bool, apart: float, between: float = 0.0) -> UnitStep | None:
    """The step of a unit that makes one side like the other, if they are so many deviations apart; None if there is none.

    `between`: of whole clients, how much their medians differ by themselves.
    """
    if min(few.spread, many.spread) < 0 or many.spread == 0 or (few.spread == 0 and few.count >= FEWEST_SPREAD):
        return None
    if abs(few.middle - many.middle) < apart * max(few.spread if few.count >= FEWEST_SPREAD else 0.0, many.spread):
        return None
    error = 1.25 * many.spread * (1 / few.count + 1 / many.count) ** 0.5
    chance = SPREADS * (1 + SURE * (1 / few.count + 1 / many.count) ** 0.5)
    best, nearest = None, NEAR * many.spread + SURE * (error + between)
    nearest = min(nearest, WIDEST) if logged else nearest
    for step in UNITS:
        if logged != (step.offset == 0 and step.factor > 0):
            continue
        for back in (False, True):
            middle, spread = few.middle, few.spread
            if logged:
                middle += np.log(step.factor) * (-1 if back else 1)
            elif back:
                middle, spread = (middle - step.offset) / step.factor, spread / abs(step.factor)
            else:
                middle, spread = middle * step.factor + step.offset, spread * abs(step.factor)
            alike = few.count < FEWEST_SPREAD or 1 / chance < spread / many.spread < chance
            away = abs(middle - many.middle) * (DECIMAL if step.words.endswith("powers of ten") else 1.0)
            if alike and away < nearest:
                best, nearest = step, away
    return best


def _side(values: Array) -> _Side:
    quarter, middle, three = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return _Side(middle, (three - quarter) / NORMAL_QUARTILES, len(values))


def _by_gap(own: Array, bounds: Array) -> tuple[Array, Mixed] | None:
    """A split of a column's rows at an empty gap between values, with rows of both sides at a client. NaN are on no side."""
    there = np.isfinite(own)
    values = own[there]
    if len(values) < FEWEST + FEWEST_MANY:
        return None
    ordered = np.sort(values)
    for logged in (True, False) if ordered[0] > 0 else (False,):
        scaled = np.log(ordered) if logged else ordered
        place = int(np.argmax(np.diff(scaled)[FEWEST - 1 : len(scaled) - FEWEST])) + FEWEST
        sides = _side(scaled[:place]), _side(scaled[place:])
        few, many = sorted(sides, key=lambda side: side.count)
        if many.count < FEWEST_MANY or scaled[place] - scaled[place - 1] < EMPTY * max(few.spread, many.spread):
            continue
        step = _step(few, many, logged, APART)
        if few.count < FEWEST_SPREAD and scaled[place] - scaled[place - 1] < np.ptp(scaled[:place] if many is sides[0] else scaled[place:]):
            continue
        if step is None:
            continue
        side = np.zeros(len(own), bool)
        side[there] = (values >= ordered[place]) == (few is sides[1])
        if any(_both(side[i:j][there[i:j]]) for i, j in pairwise(bounds.tolist())):
            return side, Mixed(step, few.count, sure=not logged or many.spread < LITTLE)
    return None


def _both(side: Array) -> bool:
    """Whether rows of a client are on both sides, more than by a slip."""
    count = int(side.sum())
    return min(count, len(side) - count) >= max(FEWEST, 0.02 * len(side)) if len(side) else False


def _by_run(own: Array, bounds: Array) -> tuple[Array, Mixed] | None:
    """A split of a column's rows at one place in the rows of a client, where the unit changes."""
    sizes = np.diff(bounds)
    if not np.isfinite(own).all() or sizes.max() < 2 * FEWEST_RUN:
        return None
    for logged in (True, False) if own.min() > 0 else (False,):
        scaled = np.log(own) if logged else own
        side, step, count = np.zeros(len(own), bool), None, 0
        for client, place in _steps_in_rows(scaled, bounds):
            i, j = int(bounds[client]), int(bounds[client + 1])
            parts = scaled[i : i + place], scaled[i + place : j]
            if min(map(len, parts)) < FEWEST_RUN or any(len(np.unique(part)) < FEW_LEVELS or _trend(part) > TREND for part in parts):
                continue
            few, many = sorted(map(_side, parts), key=lambda part: part.count)
            found = _step(few, many, logged, RUN_APART)
            if found is not None and (step is None or found == step):
                step, after = found, 2 * place > j - i
                side[i + place : j], side[i : i + place] = after, not after
                count += few.count
        if step is not None:
            return side, Mixed(step, count, sure=True)
    return None


def _steps_in_rows(scaled: Array, bounds: Array) -> list[tuple[int, int]]:
    """Clients, by number, whose values take one step that explains `STEP` of their variance, and the rows before it."""
    sizes, begins = np.diff(bounds), bounds[:-1]
    mean = np.add.reduceat(scaled, begins) / sizes
    centred = scaled - np.repeat(mean, sizes)
    variance = np.repeat(np.add.reduceat(centred**2, begins) / sizes, sizes)
    before = np.arange(len(scaled)) - np.repeat(begins, sizes) + 1
    weight = before * (np.repeat(sizes, sizes) - before)
    whole = weight * variance
    explained = np.divide(np.cumsum(centred) ** 2, whole, out=np.zeros(len(scaled)), where=whole > 0)  # each client's sum is 0
    steep = np.flatnonzero((np.maximum.reduceat(explained, begins) > STEP) & (sizes >= 2 * FEWEST_RUN))
    return [(client, int(np.argmax(explained[bounds[client] : bounds[client + 1]])) + 1) for client in steep.tolist()]


def _trend(values: Array) -> float:
    """The correlation of values with their places."""
    places = np.arange(len(values)) - (len(values) - 1) / 2
    deviation = float(values.std() * places.std())
    return abs(float((values * places).mean())) / deviation if deviation else 1.0


def related(side: Array, there: Array, other: Array, bounds: Array) -> bool:
    """Whether another column, or the label, differs between the sides, within the clients that have both."""
    total = variance = 0.0
    counted = there & np.isfinite(other)
    for i, j in pairwise(bounds.tolist()):
        own, values = side[i:j][counted[i:j]], other[i:j][counted[i:j]]
        if not _both(own) or values.std() == 0:
            continue
        centred = values - values.mean()
        total += float(centred[own].sum())
        variance += float(centred.var()) * own.sum() * (~own).sum() / max(1, len(own) - 1)
    return variance > 0 and abs(total) > RELATED * variance**0.5


def label_columns(labels: Array) -> list[Array]:
    """The labels (rows,), each of a few classes by itself: whether a row has it."""
    kinds = np.unique(labels)
    return [labels == kind for kind in kinds] if 2 < len(kinds) <= FEW_KINDS else [labels]


@lru_cache(4)
def examined_rows(count: int, most: int = MOST_ROWS) -> Array:
    """The rows that are examined, in their order: a random part of a longer table, since its rows may have a period. It is read-only."""
    rows = np.arange(count) if count <= most else np.sort(np.random.default_rng(0).choice(count, most, replace=False))
    rows.setflags(write=False)
    return rows


def shown_step(step: UnitStep) -> str:
    """A step in words, for a remark."""
    return step.words if step.curve or step.offset or step.factor < 0 else f"about {step.factor:g} times, such as {step.words}"
