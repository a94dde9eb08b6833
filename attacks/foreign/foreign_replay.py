"""Train clients again as they are declared to have trained, and compare the updates: evidence that is right comes out again.

Every fault of states, samples, labels or settings changes what a second training gives, whatever its kind. So the comparison knows no
faults: it knows what a correct update may be besides the declared training. Each record is trained twice, in two orders of samples. The
cosine of the two is what a correct update has with either; `fit` is the update's own cosine in shares of it, `factor` the coefficient of
the update on their mean. Where a record fits (`FITS`, `FACTORS`), no further check of origin is asked. A single client's update is
doubtful if it is longer than `FACTORS` allow, or if an array has less than `OTHER_PART` where another array fits.

What clients may do to an update without a declaration, and how it is recognised:

- parameters held fixed: arrays that did not move are not trained again; compression: numbers that stay zero are left out, and numbers of
  one size in each array (`_is_signs`) are not compared;
- noise: what the training does not explain has one size in all arrays (`ISOTROPIC`), and is not beyond `MOST_NOISE` lengths of the state;
- clipping: the direction fits, and the updates of all clients have one length (`ONE_LENGTH`);
- variance reduction: updates are much more alike (`APART`) than the trainings, and their mean is that of the trainings (`TOGETHER`).

Correct audits of `benchmarks/doubtful_evidence.py` that train as they declare have fits of .96 and more and factors from .9 to 1.1.
"""

import math
from dataclasses import dataclass
from itertools import combinations
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ...engine.threads import one_thread
from ...randomness import stream
from ...types import Array
from .foreign_fit import alike, cosine, is_rounded_away
from .foreign_simulation import PASSES, can_train_again, train_again
from .foreign_states import ForeignModel, flat
from .foreign_system import System, UpdateRecord

__all__ = ["is_reproduced", "not_reproduced", "plain_replays"]

FITS, ONE_FITS, FACTORS = 0.95, 0.8, (0.4, 2.5)
STEADY, LEAST_STEADY = 0.9, 0.3
OTHER_PART, MORE = 0.5, 4
ISOTROPIC, MOST_NOISE, ONE_LENGTH = 1.5, 30.0, 0.01
APART, TOGETHER = 0.7, 0.5
FEWEST_NUMBERS = 16
MOST_CLIENTS, SECONDS = 12, 20.0


@dataclass(frozen=True, eq=False)
class Replay:
    """A client's update beside two trainings of its declared samples: cosines, the factor, and vectors (d,) of the moved parameters.

    `parts`: `steady` and `fit` of each array with `FEWEST_NUMBERS` numbers.
    """

    client: int
    steady: float
    fit: float
    factor: float
    update: Array
    again: Array
    sizes: tuple[int, ...]
    before: Array
    parts: tuple[tuple[float, float], ...]

    @property
    def fits(self) -> bool:
        return self.steady >= LEAST_STEADY and self.fit >= FITS and self.has_factor

    @property
    def has_factor(self) -> bool:
        return FACTORS[0] <= self.factor <= FACTORS[1]


_REPLAYS: WeakKeyDictionary[System, list[Replay]] = WeakKeyDictionary()


def _replays(system: System) -> list[Replay]:
    """The first update of each client, as far as time allows; none where the training is not known."""
    if system not in _REPLAYS:
        model, made, spent = system.model, list[Replay](), 0.0
        with one_thread(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(stream(system.case.seed, "another system: replays").integers(2**63)))
            for client in system.scored[:MOST_CLIENTS]:
                record = system.records[client][0]
                spent += 2 * len(system.case.truth.data[client][1]) * record.settings.epochs / PASSES
                if model is None or spent > SECONDS or not can_train_again(record.settings):
                    continue
                if (replay := _replay(system, model, record)) is not None:
                    made.append(replay)
        _REPLAYS[system] = made
    return _REPLAYS[system]


def _replay(system: System, model: ForeignModel, record: UpdateRecord) -> Replay | None:
    """None where nothing moved, a part of the samples is known, or rounding decides."""
    x, y = system.case.truth.data[record.client]
    before, after = record.before.parameters, record.after.parameters
    moving = [name for name in before if not np.array_equal(before[name], after[name])]
    if not moving or record.samples != len(y) or is_rounded_away(system, record):
        return None
    start = flat(before, moving)
    update = flat(after, moving) - start
    rounding = float(np.linalg.norm(np.spacing(np.abs(flat(after, moving)).astype(np.float32)).astype(np.float64)))
    kept = update != 0
    if kept.sum() > len(update) / 2 or kept.sum() < FEWEST_NUMBERS:  # not compressed
        kept = np.ones(len(update), bool)
    best: Replay | None = None
    for trained in [moving] if len(moving) == len(before) else [moving, list(before)]:  # held fixed in training, or not sent
        one, two = (flat(train_again(model, record, x, y, trained), moving) for _ in range(2))
        again = (one + two) / 2
        if not np.isfinite(again).all() or np.linalg.norm(again) < 100 * rounding:
            continue
        steady, fit = _cosines(update, one, two, kept)
        factor = float(update[kept] @ again[kept]) / max(float(again[kept] @ again[kept]), 1e-300)
        if best is None or fit > best.fit:
            sizes = tuple(before[name].size for name in moving)
            best = Replay(record.client, steady, fit, factor, update, again, sizes, start, _parts(update, one, two, kept, sizes))
    return best


def _cosines(update: Array, one: Array, two: Array, kept: Array) -> tuple[float, float]:
    """The cosine of two trainings, and the update's own with them in shares of it, over the numbers `kept` (d,)."""
    steady = cosine(one[kept], two[kept])
    return steady, (cosine(update[kept], one[kept]) + cosine(update[kept], two[kept])) / 2 / max(steady, 1e-9)


def _parts(update: Array, one: Array, two: Array, kept: Array, sizes: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
    split = [np.split(vector, np.cumsum(sizes)[:-1]) for vector in (update, one, two, kept)]
    return tuple(_cosines(*part) for part in zip(*split, strict=True) if part[3].sum() >= FEWEST_NUMBERS)


def plain_replays(system: System) -> list[Replay]:
    """Those of updates that can be read sample by sample: not compressed, not reduced, and no array held fixed."""
    replays = _replays(system)
    if _is_reduced(replays):
        return []
    size = sum(value.size for value in next(iter(system.records.values()))[0].before.parameters.values())
    return [
        replay for replay in replays
        if len(replay.update) == size and 2 * np.count_nonzero(replay.update) > size and not _is_signs(replay)
    ]  # fmt: skip


def is_reproduced(system: System) -> bool:
    """Whether the declared training of each client's own samples gives its update."""
    replays = _replays(system)
    if not replays or len(replays) < len(system.scored[:MOST_CLIENTS]):
        return False
    usual = float(np.median([replay.fit for replay in replays]))
    return usual >= FITS and all(replay.steady >= LEAST_STEADY and replay.fit >= ONE_FITS and replay.has_factor for replay in replays)


def not_reproduced(system: System) -> str:
    """Updates that the declared training of the declared samples does not give, and that no usual change of updates explains."""
    replays = _replays(system)
    away = [replay for replay in replays if _is_away(replay) and not _is_changed(replay, replays)]
    fitting = [replay for replay in replays if replay.fits]
    several = 2 * len(away) >= len(replays) and float(np.median([replay.fit for replay in away] or [1.0])) < FITS
    one = 2 * len(fitting) >= len(replays) and any(replay.fit < ONE_FITS and replay.steady >= STEADY for replay in away)
    lengths = 2 * sum(not replay.has_factor for replay in away) >= len(replays)
    if not away or not (several or one or lengths):
        return _other_parts(system, replays) or _longer(replays)
    worst = min(away, key=lambda replay: (replay.has_factor, replay.fit))
    return (
        f"client {worst.client}: the declared training, done again from its state before on its x and y, does not give its update (cosine "
        f"{worst.fit * worst.steady:.2f}, where two such trainings have {worst.steady:.2f}; {worst.factor:.3g} times as long): check x, y, "
        "their scale and order, the states, and lr, epochs, batch_size, momentum and optimizer"
    )


def _other_parts(system: System, replays: list[Replay]) -> str:
    """Updates with arrays of another origin beside arrays that the declared training gives."""
    for replay in replays:
        if not _has_other_part(replay) or _is_changed(replay, replays):
            continue
        fit = _confirmed(system, replay)
        if fit < OTHER_PART:
            return (
                f"client {replay.client}: the declared training gives some arrays of its update, and others not (cosine {fit:.2f}, where "
                "such trainings agree): are its states put together from those of several clients or rounds?"
            )
    return ""


def _has_other_part(replay: Replay) -> bool:
    return any(steady >= STEADY and fit < OTHER_PART for steady, fit in replay.parts) and any(fit >= FITS for _, fit in replay.parts)


def _confirmed(system: System, replay: Replay) -> float:
    """The least fit of an array with `MORE` more trainings, where all pairs of these agree on the array; 1 without one."""
    record, model = system.records[replay.client][0], system.model
    assert model is not None  # it was trained before
    names = list(record.before.parameters)
    if len(replay.update) < sum(record.before.parameters[name].size for name in names):
        return 1.0
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(stream(system.case.seed, "another system: arrays").integers(2**63)))
        x, y = system.case.truth.data[replay.client]
        made = [np.split(flat(train_again(model, record, x, y, names), names), np.cumsum(replay.sizes)[:-1]) for _ in range(MORE)]
    least = 1.0
    for part, *again in zip(np.split(replay.update, np.cumsum(replay.sizes)[:-1]), *made, strict=True):
        agree = min(cosine(one, two) for one, two in combinations(again, 2))
        if part.size >= FEWEST_NUMBERS and agree >= STEADY:
            least = min(least, max(cosine(part, one) for one in again) / agree)
    return least


def _longer(replays: list[Replay]) -> str:
    """Updates of single clients that are a multiple of what the declared training gives, where that of most clients fits."""
    directed = [replay for replay in replays if replay.steady >= LEAST_STEADY and replay.fit >= ONE_FITS]
    long = [replay for replay in directed if replay.factor > FACTORS[1]]
    if not long or 2 * sum(replay.has_factor for replay in directed) < len(replays):
        return ""
    worst = max(long, key=lambda replay: replay.factor)
    return (
        f"client {worst.client}: its update is {worst.factor:.3g} times as long as the declared training makes it, unlike those of most "
        "clients; give its own lr and epochs, and a state without a factor"
    )


def _is_away(replay: Replay) -> bool:
    return not replay.has_factor if replay.steady < STEADY else not replay.fits


def _is_changed(replay: Replay, replays: list[Replay]) -> bool:
    """Whether a usual change of updates explains this one."""
    if _is_signs(replay) or _is_noise(replay):
        return True
    lengths = [float(np.linalg.norm(other.update)) for other in replays]
    if replay.fit >= FITS and replay.factor < 1 and len(lengths) > 1 and np.std(lengths) <= ONE_LENGTH * np.mean(lengths):
        return True
    return replay.factor < FACTORS[1] and _is_reduced(replays)


def _is_signs(replay: Replay) -> bool:
    parts = np.split(np.abs(replay.update), np.cumsum(replay.sizes)[:-1])
    moved = [part[part > 0] for part in parts]
    return all(part.size == 0 or part.max() - part.min() <= 1e-3 * part.max() for part in moved)


def _is_noise(replay: Replay) -> bool:
    left = replay.update - min(max(replay.factor, 0.0), 1.0) * replay.again
    parts = [part for part in np.split(left, np.cumsum(replay.sizes)[:-1]) if part.size >= FEWEST_NUMBERS]
    sizes = [float(np.sqrt(np.mean(np.square(part)))) for part in parts]
    if not sizes or min(sizes) == 0 or float(np.linalg.norm(left)) > MOST_NOISE * max(float(np.linalg.norm(replay.before)), 1.0):
        return False
    slack = math.exp(4 * math.sqrt(sum(1 / (2 * part.size) for part in parts)))
    # noise is no multiple of the state, and has the tails of a normal distribution: an update of a training is large in few numbers
    whole = np.concatenate([part / size for part, size in zip(parts, sizes, strict=True)])
    heavy, deviation = float(np.mean(whole**4)) - 3, math.sqrt(24 / len(whole))
    if not -0.3 - 4 * deviation < heavy < 1 + 5 * deviation or abs(cosine(left, replay.before)) > 6 / math.sqrt(len(left)):
        return False
    return max(sizes) <= ISOTROPIC * slack * min(sizes)


def _is_reduced(replays: list[Replay]) -> bool:
    """Whether updates have less of what is each client's own than their trainings, as under SCAFFOLD."""
    kept = [replay for replay in replays if len(replay.again) == len(replays[0].again)]
    if len(kept) < 2 or all(replay.fit >= FITS for replay in kept):
        return False
    updates, trainings = ([getattr(replay, name) for replay in kept] for name in ("update", "again"))
    together = cosine(np.mean(updates, axis=0), np.mean(trainings, axis=0))
    return 1 - alike(updates) < APART * (1 - alike(trainings)) and together > TOGETHER
