"""Source inference: which client of a group a training sample belongs to, from the models or updates of several clients.

Source: Hu et al. 2021, "Source Inference Attacks in Federated Learning": the client whose local model has the lowest loss on a sample is
named. Ours beside it: all samples that are asked about explain the clients' updates together, by ridge regression on their gradients, as in
`membership_gradients`; the client in whose update a sample has the largest coefficient is named. What clients that started from the same
model have in common is taken off first. Where only sums over changing cohorts can be read, the sums are regressed in the same way, and the
client is named whose taking part agrees best with a sample's coefficients.

The game. Equally many training samples of every client of a group are mixed, and the attacker says whose each one is. A group are the
clients of one true group whose updates can be read; where no group has two of them, all clients are one group. Without a view each of n
clients is as probable: 1/n.

Significance. Either of two permutation tests of one run, at half the level each. Samples dealt again to the clients of their group, within
a label: exact, since samples of one label and group are draws of one distribution. The models dealt again to the clients of their group:
exact, since without a leak models have nothing to do with whose they are; this one has power where clients differ in labels.

What it proves: updates of a group in the clear show whose a sample is, although a model of all shows only that somebody has it, and so do
sums over changing cohorts. What it does not prove: anything about samples that the attacker does not have; nor, for the regression, that an
attacker with few of the samples gets as far.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from ...engine.models import Model, build_module
from ...randomness import Stream, stream
from ...types import Array, ClientData
from ..adversary import AdversaryView, same_messages
from ..evidence.local_training import LocalTraining
from ..evidence.updates import ClientStep, blind, public_model, single_steps, steps_in, unread
from ..figures.leakage import Case, Cell, cell, nothing
from ..figures.significance import power
from .member_scores import confidences, loss_threshold
from .membership_gradients import clipped_gradients, shortened

__all__ = ["SourceGame", "cells", "chance_of_sources", "coefficients", "games_in", "distinguished"]

NAME = "source_inference"
GRADIENTS, LOSS = "source_gradients_accuracy", "source_loss_accuracy"
MARGIN = 0.05
ASKED, FEWEST = 40, 5
"""So many samples of each client are asked about, fewer where gradients would take too long; at least so many."""
PATH, ONE_STEP = (0.0, 0.5, 1.0), (0.0,)
"""Where on the clients' common way gradients are taken, and for training of a single step."""
RIDGE = 0.1
DEALS = 1999
SUMS = 8
"""So many times as many sums are regressed as single updates of a client: each says less."""
SHARE = 0.06
"""Of the seconds that a budget gives fresh runs, for gradients."""
GRADIENT, PASSES, DOUBLES = 3.0, 1.0e5, 2.0e4
"""A gradient takes as long as so many passes; a second has so many passes, half as many with a model of so many parameters."""
MOST_NUMBERS = 1 << 24


@dataclass(frozen=True, eq=False)
class SourceGame:
    """One group: its `clients`, the samples asked about, x (n, *shape) and y (n,), and the place `owner` (n,) of each one's client."""

    clients: tuple[int, ...]
    x: Array
    y: Array
    owner: Array


def games_in(case: Case, clients: Sequence[int], local: LocalTraining | None, asked: int) -> list[SourceGame]:
    """The groups of at least two of these clients, with `asked` samples of each client, or as many as the client with fewest has."""
    groups: dict[int, list[int]] = {}
    for client in clients:
        groups.setdefault(case.truth.groups.get(client, 0), []).append(client)
    several = [group for group in groups.values() if len(group) > 1] or ([list(clients)] if len(clients) > 1 else [])
    rng, games = stream(case.seed, "source inference: samples"), []
    for group in several:
        places = {client: _trained_on(case, client, local) for client in group}
        count = min(asked, *(len(of_client) for of_client in places.values()))
        if count < FEWEST:
            continue
        chosen = {client: rng.permutation(of_client)[:count] for client, of_client in places.items()}
        x, y = (np.concatenate([case.truth.data[client][part][chosen[client]] for client in group]) for part in (0, 1))
        games.append(SourceGame(tuple(group), x, y, np.repeat(np.arange(len(group)), count)))
    return games


def _trained_on(case: Case, client: int, local: LocalTraining | None) -> Array:
    """The places of the samples that a client trains on."""
    x, y = case.truth.data[client]
    return np.arange(len(y)) if local is None else local.places(ClientData(client, x, y, x[:0], y[:0]))


# --- the attack ---------------------------------------------------------------------------------------------------------------------


def by_loss(game: SourceGame, steps: Mapping[int, Sequence[ClientStep]], model: Model) -> Array:
    """The client (n,), by place, whose last model has the lowest loss on each sample."""
    dtype = model.init(0).dtype
    vectors = [(steps[client][-1].start + steps[client][-1].update).astype(dtype) for client in game.clients]
    return np.asarray(np.stack([loss_threshold(confidences(model, vector[None], game.x, game.y)[0]) for vector in vectors]).argmax(axis=0))


def by_gradients(game: SourceGame, steps: Mapping[int, Sequence[ClientStep]], model: Model, rounds: int) -> Array:
    """The client (n,), by place, whose updates each sample's gradient explains best: its first `rounds`, or more sums that it is in."""
    single = all(len(step.members) == 1 for client in game.clients for step in steps[client])
    distinct = {id(step.update): step for client in game.clients for step in steps[client][: rounds if single else SUMS * rounds]}
    order = sorted(distinct, key=lambda key: distinct[key].round)
    found, short = np.zeros((len(order), len(game.y))), shortened(model.dimension)
    by_start: dict[tuple[int, bytes], list[int]] = {}
    for i, key in enumerate(order):
        by_start.setdefault((distinct[key].round, distinct[key].start.tobytes()), []).append(i)
    for alike in by_start.values():
        first, updates = distinct[order[alike[0]]], [distinct[order[i]].update for i in alike]
        common, members = np.mean(updates, axis=0), [distinct[order[i]].members for i in alike]
        counts = [int((game.owner == place).sum()) for place, client in enumerate(game.clients) if any(client in of for of in members)]
        once = single and first.local is not None and max(first.local.steps(count) for count in counts) == 1
        rows = sum(_short_gradients(model, first, first.start + share * common, game, short) for share in (ONE_STEP if once else PATH))
        less = common if len(alike) > 1 else np.zeros_like(common)
        found[alike] = coefficients(np.asarray(rows), np.stack([short((less - update)[None])[0] for update in updates]))
    portions = np.array([[(client in distinct[key].members) / len(distinct[key].members) for key in order] for client in game.clients])
    if not single:  # how often a client takes part says nothing
        portions = portions - portions.mean(axis=1, keepdims=True)
        portions /= np.maximum(np.linalg.norm(portions, axis=1, keepdims=True), 1e-300)
    return np.asarray((portions @ found).argmax(axis=0))


def distinguished(steps: Mapping[int, Sequence[ClientStep]]) -> list[int]:
    """The clients that are not in all the same updates, nor in all that there are."""
    distinct = {id(step.update) for of_client in steps.values() for step in of_client}
    parts = {client: frozenset(id(step.update) for step in of_client) for client, of_client in steps.items()}
    alike = Counter(parts.values())
    return sorted(client for client, part in parts.items() if alike[part] == 1 and (len(part) < len(distinct) or len(distinct) == 1))


def _short_gradients(model: Model, step: ClientStep, at: Array, game: SourceGame, short: Callable[[Array], Array]) -> Array:
    """Gradients (n, size) of the samples at parameters `at` (d,), made short, of the parameters that a step shows."""
    chunk = max(1, MOST_NUMBERS // model.dimension)
    parts = range(0, len(game.y), chunk)
    rows = (clipped_gradients(model, at, game.x[i : i + chunk], game.y[i : i + chunk]) for i in parts)
    return np.concatenate([short(step.known_part(row)) for row in rows])


def coefficients(gradients: Array, moved: Array) -> Array:
    """How much of each of the movements (k, d) each of the gradients (n, d) explains beside all others, (k, n), in units of their mean."""
    products = gradients @ gradients.T
    ridge = RIDGE * max(float(np.trace(products)) / len(products), 1e-300)
    found = np.linalg.solve(products + ridge * np.eye(len(products)), gradients @ moved.T).T
    return np.asarray(found / np.maximum(np.abs(found).mean(axis=1, keepdims=True), 1e-300))


# --- figures ------------------------------------------------------------------------------------------------------------------------


def chance_of_sources(named: Sequence[Array], games: Sequence[SourceGame], rng: Stream, times: int = DEALS) -> float:
    """How probable it is that as many samples are named rightly (place (n,) of each game) without a leak: twice the smaller p of two tests.

    Samples dealt again to clients of their group within a label, and names of clients dealt again within their group.
    """
    right = sum(int((names == game.owner).sum()) for names, game in zip(named, games, strict=True))
    samples, clients = np.zeros(times, np.int64), np.zeros(times, np.int64)
    for names, game in zip(named, games, strict=True):
        for label in np.unique(game.y):
            at = game.y == label
            dealt = rng.permuted(np.tile(game.owner[at], (times, 1)), axis=1)
            samples += (dealt == names[at]).sum(axis=1)
        table = np.zeros((len(game.clients), len(game.clients)), np.int64)
        np.add.at(table, (names, game.owner), 1)
        renamed = rng.permuted(np.tile(np.arange(len(table)), (times, 1)), axis=1)
        clients += table[np.arange(len(table)), renamed].sum(axis=1)
    smaller = min((1 + int((reached >= right).sum())) / (1 + times) for reached in (samples, clients))
    return min(1.0, 2 * smaller)


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The share of samples that are given to their client, by gradients and by loss."""
    prior = case.prior
    if prior.config is None:
        return [nothing(case, NAME, GRADIENTS, "not attempted: the training settings are not known")], None
    model = public_model(prior)
    if any(isinstance(layer, nn.LSTM | nn.Embedding) for layer in build_module(model).modules()):
        return [nothing(case, NAME, GRADIENTS, "not attempted: inputs are words, which clients share")], None
    observed, is_same = _readable(case, case.view, model), same_messages(case.view, case.reference)
    reference = observed if is_same else _readable(case, case.reference, model)
    clients = sorted(set(distinguished(observed)) & set(distinguished(reference)))
    single = all(len(step.members) == 1 for client in clients for step in observed[client])
    local = observed[clients[0]][0].local if clients else None
    rounds = case.budget.rounds
    asked = _affordable(case, model, len(clients), rounds if single else SUMS * rounds) if clients else 0
    games = games_in(case, clients, local, asked) if clients else []
    if not games:
        return [nothing(case, NAME, GRADIENTS, _unseen(case, model, len(clients)))], None
    sizes = ", ".join(str(len(game.clients)) for game in games)
    note = (
        f"{sum(len(game.y) for game in games)} training samples, equally many of each client; groups of {sizes} client(s); baseline: "
        "1 / clients of the group"
    )
    blank = np.concatenate([np.full(len(game.y), 1 / len(game.clients)) for game in games])
    first_ones = f"the first {rounds} update(s) regressed" if single else f"the first {SUMS * rounds} sums of changing cohorts regressed"
    figures = []
    for metric, words in (
        (GRADIENTS, f"{first_ones} on all samples' gradients together"),
        (LOSS, "by the lowest loss of a client's last model"),
    )[: 2 if single else 1]:
        named = [
            [by_loss(game, steps, model) if metric == LOSS else by_gradients(game, steps, model, rounds) for game in games]
            for steps in ((observed,) if is_same else (observed, reference))
        ]
        named += [named[0]] if is_same else []
        scores = [np.concatenate([names == game.owner for names, game in zip(of, games, strict=True)]).astype(float) for of in named]
        rng = stream(case.seed, f"{metric}: dealt again")
        first, second = (chance_of_sources(of, games, rng) for of in named)
        made = cell(
            case, NAME, metric, scores[0], blank, scores[1], margin=MARGIN, share=True, note=f"{words}; {note}", chances=(first, second)
        )  # fmt: skip
        figures.append(replace(made, power=power(scores[0], blank, scores[1], blank, MARGIN)))
    return figures, None


def _unseen(case: Case, model: Model, clients: int) -> str:
    """Why whose a sample is cannot be asked in this view. Where it has sums over clients, these may show it."""
    few = f"updates of {clients} client(s) can be told apart in this view: whose a sample is takes those of two of a group"
    has_sums = bool(clients or steps_in(case.view, model.dimension, case) or case.view.select("mean"))
    return blind(case.view) or unread(case.view, model.dimension) or (f"not attempted: {few}" if has_sums else few)


def _readable(case: Case, view: AdversaryView, model: Model) -> dict[int, list[ClientStep]]:
    """Updates of clients that do not collude, whose samples are known to the scorer: their own, or else sums that they are in; none under
    a transform that stays secret."""
    if blind(view):
        return {}
    steps = steps_in(view, model.dimension, case, parts=True)
    known = {client: list(own) for client, own in steps.items() if client in case.truth.data and client not in case.view.coalition}
    single = single_steps(known)
    return single if len(single) > 1 else known


def _affordable(case: Case, model: Model, clients: int, rounds: int) -> int:
    """How many samples of each client the budget allows to be asked about."""
    seconds = SHARE * case.budget.seconds / case.budget.seeds / 4  # two views, and as much again for the regression
    each = clients * rounds * len(PATH) * GRADIENT * (1 + model.dimension / DOUBLES) / PASSES
    return max(FEWEST, min(ASKED, int(seconds / each)))
