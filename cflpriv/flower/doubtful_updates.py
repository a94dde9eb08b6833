"""Updates, and means of updates, that no local training from the model sent gives.

`mean_doubts` looks at a mean, as secure sums give it, and at single updates alike. `group_doubts` compares the updates of
one round. What needs several rounds is in `stale_updates`.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from ..state_checks import (
    DEVIATIONS,
    FEWEST_VALUES,
    PROPORTIONAL,
    UNRELATED,
    factor_between,
    kept_share,
    rounding_of,
)  # fmt: skip
from ..types import Array

__all__ = [
    "FEWEST_NUMBERS", "Layout", "cut_parts", "diverges", "example_doubts", "group_doubts", "initial_doubt", "mean_doubts", "named",
    "untouched_statistics",
]  # fmt: skip

Layout = Sequence[tuple[str, tuple[int, ...], str]]
"""(name, shape, dtype) of the arrays that a vector holds one after the other."""
FEWEST_NUMBERS = 64
"""Models with fewer numbers are not judged."""
FEWEST_CLIENTS = 3
"""Clients are compared with the others of a round where there are so many."""
TINY = 1e-6
"""An update that is shorter than this share of the model is nearly all rounding in float32."""
LONGER, SHORTER = 10.0, 1e-4
"""An update is odd beyond so many lengths of the upper quartile of the others' updates, and below this share of the lower quartile."""
MUCH = 0.3
"""and where a long one is longer than this share of the model."""
FEWEST_LONG, SHARE_LONG = 2, 1 / 3
"""Long updates of a client that are named, and their share of its updates."""
MULTIPLE = 5.0
"""What came back is a multiple of the model sent from this factor on; training far may double a model."""
NEARER = 0.5
"""An array is exchanged if it is nearer to the place of another than this share of its distance from its own."""
GREW, TIMES, AT_ONCE = 30.0, 10.0, 100.0
"""Training diverges where a mean update is so much longer than the first, and the model than the model at the start, or where one round
makes the model so much longer."""
FEW_DIFFERENT = 64
"""A model with fewer different numbers is rounded, where the model sent had many more."""
MOST_COMPARED, MOST_NAMED = 64, 5
STATISTICS = ("running_mean", "running_var")


def named(clients: Sequence[int]) -> str:
    """Clients for people: "client 3", "clients 0, 1, 2, 3, 4 and 7 more"."""
    if len(clients) == 1:
        return f"client {clients[0]}"
    more = len(clients) - MOST_NAMED
    return f"clients {', '.join(map(str, clients[:MOST_NAMED]))}" + (f" and {more} more" if more > 0 else "")


def _is_statistic(name: str) -> bool:
    """Whether an array holds running statistics of a normalisation."""
    return name.rpartition(".")[2] in STATISTICS


def cut_parts(vector: Array, layout: Layout) -> dict[str, Array]:
    """A vector's arrays by name, in their shapes."""
    parts, start = {}, 0
    for name, shape, _ in layout:
        stop = start + int(np.prod(shape, dtype=int))
        parts[name] = vector[start:stop].reshape(shape)
        start = stop
    return parts


# --- one update, or one mean ----------------------------------------------------------------------------------------------------------


def mean_doubts(model: Array, update: Array, layout: Layout = ()) -> list[str]:
    """Why `update` (d,) cannot come from training that began at `model` (d,), as sentences without a subject; empty if it can.

    The regression coefficient of the new model on the old one is near 1 after training. `layout` lets arrays be compared with each other.
    """
    length = float(np.linalg.norm(model.astype(np.float64)))
    if len(model) < FEWEST_NUMBERS or length == 0 or not update.any():
        return []
    kept, deviation = kept_share(model.astype(np.float64) + update, model)
    if DEVIATIONS * deviation < UNRELATED and kept < UNRELATED:
        return [
            "what clients returned has nothing in common with the model that they were sent, or is its opposite; do they return updates or "
            "gradients in place of the trained arrays, or train a model of their own?"
        ]
    if kept - DEVIATIONS * deviation > MULTIPLE:
        return [
            f"what clients returned is {kept:.3g} times the model that they were sent; do they multiply arrays by a number of examples?"
        ]
    if np.linalg.norm(update) < TINY * length:
        return [f"updates are shorter than {TINY:g} of the model, nearly all rounding; is the learning rate right, and are arrays trained?"]
    words = _exchanged(model, update, layout) if layout else ""
    return [words] if words else []


def _exchanged(model: Array, update: Array, layout: Layout) -> str:
    """Arrays that came back in the place of others of the same shape, or transposed."""
    sent, moved = (cut_parts(np.asarray(vector, np.float64), layout) for vector in (model, update))
    own = {name: float(np.linalg.norm(moved[name])) for name in sent if sent[name].size >= FEWEST_VALUES and moved[name].any()}
    back = {name: sent[name] + moved[name] for name in own}
    for name in own:
        square = sent[name].ndim == 2 and sent[name].shape[0] == sent[name].shape[1]
        if square and np.linalg.norm(back[name] - sent[name].T) < NEARER * own[name]:
            return f"the array {name!r} came back transposed"
    for one, other in combinations(own, 2):
        if sent[one].shape == sent[other].shape and all(
            np.linalg.norm(back[a] - sent[b]) < NEARER * own[a] for a, b in ((one, other), (other, one))
        ):
            return f"the arrays {one!r} and {other!r} came back in each other's place; do clients put arrays into the model by name?"
    return ""


def initial_doubt(model: Array, layout: Layout) -> str:
    """A sentence if all weights of a model of several layers are zero at the start, so that they have no gradient."""
    weights = [part for (_, shape, _), part in zip(layout, cut_parts(model, layout).values(), strict=True) if len(shape) > 1]
    if len(weights) < 2 or any(part.any() for part in weights):
        return ""
    return "all weights of initial_arrays are zero; layers behind each other then have no gradient: draw them at random"


def untouched_statistics(model: Array, update: Array, layout: Layout) -> str:
    """A sentence if running statistics of normalisation are as they were made, and clients return them so while other arrays move."""
    if not update.any():
        return ""
    sent, moved = cut_parts(model, layout), cut_parts(update, layout)
    still = [
        name for name in sent
        if _is_statistic(name) and not moved[name].any() and np.all(sent[name] == name.endswith(STATISTICS[1]))
    ]  # fmt: skip
    if not still:
        return ""
    return (
        f"{still[0]!r} is as it was made, 0 or 1, though other arrays are trained: the model normalises by numbers that no data gave; "
        "return running statistics with the model, or use GroupNorm"
    )


# --- the updates of a round -----------------------------------------------------------------------------------------------------------


def group_doubts(
    model: Array,
    updates: Mapping[int, Array],
    layout: Layout,
    moved: set[int],
    alone: bool = True,
    long: dict[int, list[bool]] | None = None,
) -> list[str]:
    """What is odd of single `updates` (d,) by client, which began at one `model` (d,), as sentences.

    Args:
        moved: the clients whose update of this round or of an earlier one is not zero; those of this round are added.
        alone: ask `mean_doubts` of each.
        long: whether each client's update was far longer than the others' in each round so far, which is kept up to date. A client is named
            for `FEWEST_LONG` such rounds, `SHARE_LONG` of its rounds: SGD may jump once. None: this round decides.
    """
    if len(model) < FEWEST_NUMBERS:
        return []
    doubts, several = [], len(updates) >= FEWEST_CLIENTS
    moving = {client: update.astype(np.float64) for client, update in updates.items() if update.any()}
    moved |= set(moving)
    still = [client for client in updates if client not in moved]
    if still and moving:
        doubts.append(f"{named(still)}: returned the arrays as they were sent; check that they train, and return what was trained")
    by_words: dict[str, list[int]] = {}
    for client, update in moving.items() if alone else ():
        for words in mean_doubts(model, update, layout):
            by_words.setdefault(words, []).append(client)
    doubts += [f"{named(clients)}: {words}" for words, clients in by_words.items()]
    doubts += _alike(model, moving) + _coarse(model, moving)
    if several:
        doubts += _lengths(model, moving, layout, long) + _partial(moving, layout)
    return doubts


def _alike(model: Array, updates: Mapping[int, Array]) -> list[str]:
    """Updates that are multiples of each other, which two trainings on different samples do not give."""
    varied = {c: u for c, u in list(updates.items())[:MOST_COMPARED] if len(np.unique(u[:: max(1, len(u) // 4096)])) >= FEWEST_VALUES}
    rounding = {client: rounding_of(model.astype(model.dtype) + update.astype(model.dtype)) for client, update in varied.items()}
    exact = {client: u for client, u in varied.items() if rounding[client] <= PROPORTIONAL * 100 * np.linalg.norm(u)}
    same: dict[int, list[int]] = {}
    known: set[int] = set()
    for one, other in combinations(exact, 2):
        if other not in known and one not in known and factor_between(exact[other], exact[one], rounding[other], rounding[one]):
            same.setdefault(one, [one]).append(other)
            known.add(other)
    return [
        f"{named(clients)}: their updates are equal, or multiples of each other; do they have the same data, or return the same file?"
        for clients in same.values()
    ]


def _coarse(model: Array, updates: Mapping[int, Array]) -> list[str]:
    """Models that came back with a few different numbers, although the model sent had many."""
    step = max(1, len(model) // 4096)
    some = model[::step]
    if len(some) < 16 * FEW_DIFFERENT or len(np.unique(some)) <= 4 * FEW_DIFFERENT:
        return []
    scale = float(np.abs(some).max()) * 1e-5
    coarse = [client for client, update in updates.items() if len(np.unique(np.round((some + update[::step]) / scale))) <= FEW_DIFFERENT]
    return [f"{named(coarse)}: returned models of at most {FEW_DIFFERENT} different numbers; are arrays rounded?"] if coarse else []


def _lengths(model: Array, updates: Mapping[int, Array], layout: Layout, long: dict[int, list[bool]] | None) -> list[str]:
    """Updates that are far longer or shorter than the others', but for running statistics, which may be of any size.

    Where the others have nothing left to learn, any update is far longer. So a long one must also change a good part of the model.
    """

    def length(vector: Array) -> float:
        return float(np.sqrt(sum(np.square(part).sum() for name, part in cut_parts(vector, layout).items() if not _is_statistic(name))))

    norms, part_of_model = {client: length(update) for client, update in updates.items()}, MUCH * length(model)
    doubts = []
    for client, norm in norms.items():
        others = [value for other, value in norms.items() if other != client]
        if len(others) + 1 < FEWEST_CLIENTS:
            continue
        low, high = np.quantile(others, [0.25, 0.75])
        is_long = norm > max(LONGER * high, part_of_model)
        rounds = [True] * FEWEST_LONG if long is None else long.setdefault(client, [])
        rounds.append(is_long)
        often = sum(rounds) >= max(FEWEST_LONG, SHARE_LONG * len(rounds))
        if (is_long and often) or norm < SHORTER * low:
            doubts.append(
                f"client {client}: its update is {norm / float(np.median(others)):.3g} times as long as the others'; has it their learning "
                "rate, loss and scale of samples?"
            )
    return doubts


def _partial(updates: Mapping[int, Array], layout: Layout) -> list[str]:
    """Clients that return arrays as they were sent where all others changed them."""
    still: dict[int, list[str]] = {}
    zero = {
        client: [name for name, part in cut_parts(u, layout).items() if part.size >= FEWEST_VALUES and not part.any()]
        for client, u in updates.items()
    }
    for client, names in zero.items():
        for name in names:
            if sum(name in others for others in zero.values()) == 1:
                still.setdefault(client, []).append(name)
    return [
        f"client {client}: returned {names[0]!r} as it was sent, where all others changed it; does it train and return all arrays?"
        for client, names in still.items() if len(updates) >= FEWEST_CLIENTS
    ]  # fmt: skip


def diverges(first: float, now: float, start: float, sent: float, model: float) -> str:
    """A sentence if the length of the mean update grew from `first` to `now`, and that of the model from `start` or `sent` to `model`, too
    much."""
    if model > AT_ONCE * sent > 0:
        return f"the model is {model / sent:.3g} times as long as the model sent: training diverges; is the learning rate too large?"
    if not (now > GREW * first > 0 and model > TIMES * start > 0):
        return ""
    return f"updates are {now / first:.3g} times as long as in the first round: training diverges; is the learning rate too large?"


def example_doubts(counts: Sequence[Mapping[int, float]]) -> list[str]:
    """What is odd of numbers of examples by client, of each round so far."""
    doubts, now = [], counts[-1]
    if len(now) >= FEWEST_CLIENTS and set(now.values()) == {1.0}:
        doubts.append('all clients state num-examples = 1, so that all weigh alike; weights = "equal" says so without a warning')
    if len(counts) == 3:
        grown = [
            client for client in now
            if all(client in row for row in counts) and counts[2][client] - counts[1][client] == counts[1][client] - counts[0][client] > 0
        ]  # fmt: skip
        if grown:
            doubts.append(f"{named(grown)}: num-examples grows by the same number in each round; is it counted over all rounds?")
    return doubts
