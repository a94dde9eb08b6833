"""Clients that send false halves to cross-fitted clustering, as functions of the honest folds of all clients.

Not a registered attack: registered attacks measure leakage, false folds do harm. A lying client may send any two vectors in place of its
folds. Lying clients know all folds and true groups, and act together: the strongest case. Norms are what `bounded`
(`clustering.unbiased_gram`) lets through unscaled, unless a lie is about length.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...randomness import Stream
from ...types import Array

__all__ = ["LIES", "false_folds"]

LONG = 1000.0
ROOM = 1.9
"""The squared norm of a vector as long as may be: a little below the bound."""
SLACK = 1.05
"""Liars do not know the limits exactly."""


def false_folds(folds: Array, groups: Sequence[int], liars: Sequence[int] | Array, lie: str, rng: Stream, within: float = 0.0) -> Array:
    """The folds (n, 2, d) that arrive if the clients at the places `liars` tell a lie of `LIES`; `groups` are everybody's true ones.

    With `within` liars keep to limits: the square of no half's norm is above the honest median times this factor, and neither is the noise
    trace, nor below the median divided by it.
    """
    sent = np.array(folds, np.float64)
    if not len(liars):
        return sent
    honest = np.setdiff1d(np.arange(len(folds)), liars)
    lies = LIES[lie](sent[list(liars)], sent[honest], np.asarray(groups)[honest], rng)
    sent[list(liars)] = _plausible(lies, sent[honest], within, rng) if within else lies
    return sent


def _plausible(lies: Array, honest: Array, within: float, rng: Stream) -> Array:
    """The nearest thing to a lie that the limits let through."""
    trace = float(np.median(((honest[:, 0] - honest[:, 1]) ** 2).sum(1))) / 4
    square = float(np.median((honest**2).sum(2)))
    mean, noise = lies.mean(1), (lies[:, 0] - lies[:, 1]) / 2
    lengths = np.linalg.norm(noise, axis=1, keepdims=True)
    noise = np.where(lengths > 0, noise / np.where(lengths > 0, lengths, 1.0), _unit(len(lies), lies.shape[2], rng))
    least, most = np.sqrt(trace / within) * SLACK, np.sqrt(trace * within) / SLACK
    noise = noise * np.clip(lengths, least, most)
    room = np.maximum(square * within / SLACK - (noise**2).sum(1, keepdims=True), 0.0)  # what is left for the mean
    mean = mean * np.minimum(1.0, np.sqrt(room) / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-300))
    made = np.stack([mean + noise, mean - noise], axis=1)
    longest = np.sqrt((made**2).sum(2).max(1) / (square * within / SLACK))[:, None, None]
    return np.asarray(made / np.maximum(longest, 1.0))


Lie = Callable[[Array, Array, Array, Stream], Array]
"""What liars send, (m, 2, d): from their own honest folds (m, 2, d), those of honest clients (h, 2, d) and these clients' groups (h,)."""


def _twice(vectors: Array) -> Array:
    """Both halves equal: no noise at all."""
    return np.repeat(vectors[:, None], 2, axis=1)


def _unit(count: int, dimension: int, rng: Stream) -> Array:
    drawn = rng.standard_normal((count, dimension))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


def _two_means(honest: Array, groups: Array) -> tuple[Array, Array]:
    """The means (d,) of two groups; of one group, those of two halves of its clients."""
    names = np.unique(groups)
    means = honest.mean(1)
    if len(names) == 1:
        return means[::2].mean(0), means[1::2].mean(0)
    return means[groups == names[0]].mean(0), means[groups == names[1]].mean(0)


def _around(own: Array, directions: Array) -> Array:
    """Mean vectors as they are, halves as far apart along `directions` as norms allow."""
    centre = own.mean(1)
    along = np.abs((centre * directions).sum(1))
    reach = np.sqrt(np.maximum(ROOM - (centre**2).sum(1) + along**2, 0.0)) - along
    apart = reach[:, None] * directions
    return np.stack([centre + apart, centre - apart], axis=1)


def _silent(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    return _twice(own.mean(1))


def _zero(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    return np.zeros_like(own)


def _long(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    return LONG * own


def _joined(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    return _twice(np.tile(_two_means(honest, groups)[1], (len(own), 1)))


def _between(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    first, second = _two_means(honest, groups)
    return _twice(np.tile((first + second) / 2, (len(own), 1)))


def _bridge(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    first, second = _two_means(honest, groups)
    along = (np.arange(len(own)) + 1) / (len(own) + 1)
    return _twice(first + along[:, None] * (second - first))


def _antipodal(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    vectors = np.sqrt(ROOM) * _unit(len(own), own.shape[2], rng)
    return np.stack([vectors, -vectors], axis=1)


def _noisy(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    return _around(own, _unit(len(own), own.shape[2], rng))


def _noisy_together(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    return _around(own, np.tile(_unit(1, own.shape[2], rng), (len(own), 1)))


def _noisy_across(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    means = honest.mean(1)
    leading = np.linalg.svd(means - means.mean(0), full_matrices=False)[2][:1]
    return _around(own, np.tile(leading, (len(own), 1)))


def _group(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    return _twice(np.tile(np.sqrt(ROOM) * _unit(1, own.shape[2], rng), (len(own), 1)))


def _pairs(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    return _twice(np.sqrt(ROOM) * np.repeat(_unit(-(-len(own) // 2), own.shape[2], rng), 2, axis=0)[: len(own)])


def _split(own: Array, honest: Array, groups: Array, rng: Stream) -> Array:
    of_first = honest[groups == np.unique(groups)[0]].mean(1)
    centre = of_first.mean(0)
    leading = np.linalg.svd(of_first - centre, full_matrices=False)[2][0]
    spread = 3 * float(np.std((of_first - centre) @ leading))
    signs = np.where(np.arange(len(own)) % 2, -1.0, 1.0)
    return _twice(centre + spread * signs[:, None] * leading)


LIES: Mapping[str, Lie] = {
    "silent": _silent, "zero": _zero, "long": _long, "joined": _joined, "between": _between, "bridge": _bridge, "antipodal": _antipodal,
    "noisy": _noisy, "noisy together": _noisy_together, "noisy across": _noisy_across, "group": _group, "pairs": _pairs, "split": _split,
}  # fmt: skip
"""silent: the own mean twice. zero: nothing. long: the own folds times 1000. joined: another group's mean twice. between: the midpoint of
two groups twice. bridge: points on the line between two groups. antipodal: v and −v. noisy: the own mean, halves as far apart as norms
allow, each liar in a direction of its own; together: in one direction; across: in the direction in which honest clients differ most. group:
one vector for all liars, twice. pairs: the same for two liars each. split: two points on either side of an honest group."""
