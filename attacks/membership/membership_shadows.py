"""The membership game on a federated run: the models to attack, the samples to ask about, and shadow federations.

A model in a view is followed back through the traffic to the initial model: who trained it, round by round (`targets_in`). Its owners'
training samples are paired with samples of their test distribution, label by label (`pairs_of`). Shadow federations train by the same
rounds on one of each pair, by a coin, and on everything else (`federated_replicas`): all federations' clients of a round are rows of one
stacked program. `games_of` puts these together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from ...engine import Engine, Streams, TaskInput
from ...protocols.mechanisms import clip
from ...randomness import stream
from ...tasks.training import Train
from ...types import Array, ClientData
from ..adversary import INITIAL, AdversaryView
from ..evidence.local_training import training_of
from ..evidence.trained_models import models_of_round
from ..evidence.updates import ClientStep, hidden_updates, single_steps, steps_in
from ..figures.leakage import Case, Prior, Truth
from .member_scores import confidences, samples_of_shadows

__all__ = [
    "MembershipGame", "Pairs", "Target", "federated_replicas", "games_of", "lines_in", "once", "own_targets", "pairs_of",
    "targets_in", "turns_in",
]  # fmt: skip

Cached = TypeVar("Cached")
Training = Callable[[int], Train]
"""The local training of each round, by its number."""
SAME = 1e-5
"""Models that differ by less are one but for rounding."""
MOST_ASKED = 400
"""Pairs asked about for one model."""


# --- what the view holds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Target:
    """A model (d,) that an adversary has, and how it came about: from `start` (d,) by FedAvg over `chain`, a (round, clients) each.

    `owners` are the clients whose samples it is asked about: those who trained it last. `cohort`, in `round`, was sent it; `own` are those
    clients' models (d,) after that, as far as their updates can be read. Not `is_shared`: it is no model of several clients, and only what
    its one owner made of it is attacked.
    """

    vector: Array
    start: Array
    chain: tuple[tuple[int, tuple[int, ...]], ...]
    owners: tuple[int, ...]
    round: int
    cohort: tuple[int, ...]
    own: Mapping[int, Array]
    is_shared: bool = True


@dataclass(frozen=True, eq=False)
class Turn:
    """One model in one averaging step: its name and vector as it was sent, and who trained it; None where the traffic does not say."""

    step: int
    round: int
    name: str
    vector: Array
    clients: tuple[int, ...] | None


def turns_in(view: AdversaryView, dimension: int) -> list[Turn]:
    """Every model that can be read in the traffic, step by step."""
    turns: list[Turn] = []
    offered: dict[str, Array] = {}
    trained: dict[int, tuple[int, ...]] = {}
    everybody: tuple[int, ...] = ()
    at, step, averaged, is_initial, packed = -1, 0, False, False, False

    def close() -> None:
        for name, vector in offered.items():
            trainers: tuple[int, ...] | None = ()  # nobody
            if packed:
                trainers = tuple(sorted({*everybody, *(client for clients in trained.values() for client in clients)}))
            elif trained:
                trainers = trained.get(int(name.partition("/")[2] or 0), ())
            elif averaged:
                trainers = everybody if len(offered) == 1 else None
            turns.append(Turn(step, at, name, vector, trainers))

    for message in view.messages:
        if message.operation == "compute" and message.kind == "parameters":
            asked = training_of(message)
            models = models_of_round(view, message, dimension, 0 if asked is None else asked.train.model.classes)
            if averaged or (is_initial and not message.context.get(INITIAL)):
                close()
                offered, trained, everybody, averaged, step = {}, {}, (), False, step + 1
            packed = bool(models) and "model" not in models and "model" in (message.payload or {})  # everybody trains all of them
            offered, at, is_initial = offered | models, message.round, bool(message.context.get(INITIAL))
        elif message.operation == "mean" and message.source in ("clients", "server"):
            averaged, labels = True, message.context.get("labels")
            if "group" in message.context:
                trained[int(message.context["group"])] = message.clients
            elif labels is not None and len(labels) == len(message.clients):
                for label in sorted({int(own[0]) for own in labels if own}):
                    trained[label] = tuple(c for c, own in zip(message.clients, labels, strict=True) if own and int(own[0]) == label)
            else:
                everybody = tuple(sorted({*everybody, *message.clients}))
    if offered:
        close()
    return turns


def targets_in(
    view: AdversaryView, reference: AdversaryView, dimension: int, renumbered: bool = False, case: Case | None = None
) -> list[Target]:  # fmt: skip
    """The last shared or cluster models that can be read in a view. Where it does not say who trained them, the reference does.

    `renumbered`: clusters get new numbers, so that a model's predecessor is the nearest one before it, not the one of its name. With the
    `case` that the view is of, own models are also those of updates that were solved from sums.
    """
    seen = turns_in(view, dimension)
    attributed = _attributed(view, reference, seen, dimension)
    last = {turn.name: turn for turn in seen}
    single = single_steps(steps_in(view, dimension, case))
    served: dict[int, str] = {}
    for turn in attributed:
        served |= dict.fromkeys(turn.clients or (), turn.name)
    targets = []
    for name, turn in last.items():
        at = _same_in(attributed, turn, view.is_server)
        if at is None:
            continue
        line = _line(at, attributed, renumbered)
        chain = tuple((link.round, link.clients) for link in line if link.clients)
        owners = sorted({client for _, clients in chain for client in clients if served.get(client) == name})
        if owners:
            cohort = tuple(client for client in at.clients or () if client in owners)
            trained_from = [(client, step) for client in cohort for step in single.get(client, ()) if step.round == turn.round]
            after = {client: step.start + step.update for client, step in trained_from if np.array_equal(step.start, turn.vector)}
            targets.append(Target(turn.vector, line[0].vector, chain, tuple(owners), turn.round, cohort, after))
    if hidden_updates(view):
        return targets
    covered = {client for target in targets for client in target.own}
    return targets + own_targets({client: steps for client, steps in single.items() if client not in covered})


def own_targets(single: Mapping[int, Sequence[ClientStep]]) -> list[Target]:
    """A client's own model after the last of its updates that can be read, from where its own line of models begins.

    Whoever goes on from its own model trained it in all steps before; others in the last one alone, from a model that is known.
    """
    targets = []
    for client, steps in single.items():
        first = len(steps) - 1
        while first and np.allclose(steps[first - 1].start + steps[first - 1].update, steps[first].start, atol=SAME, rtol=SAME):
            first -= 1
        last, chain = steps[-1], tuple((step.round, (client,)) for step in steps[first:-1])
        own = {client: last.start + last.update}
        targets.append(Target(last.start, steps[first].start, chain, (client,), last.round, (client,), own, is_shared=False))
    return targets


def lines_in(
    view: AdversaryView, reference: AdversaryView, dimension: int, renumbered: bool = False
) -> tuple[list[Turn], list[tuple[Turn, ...]]]:
    """Every model in a view, and the lines that lead to the last ones of each name, the oldest first and that one at the end.

    Where the view does not say who trained a model, lines are the reference's. `renumbered` as in `targets_in`.
    """
    seen = turns_in(view, dimension)
    attributed = _attributed(view, reference, seen, dimension)
    last = {turn.name: turn for turn in seen}
    ends = [at for turn in last.values() if (at := _same_in(attributed, turn, view.is_server)) is not None]
    return seen, [(*_line(at, attributed, renumbered), at) for at in ends]


def _attributed(view: AdversaryView, reference: AdversaryView, seen: list[Turn], dimension: int) -> list[Turn]:
    """Turns that say who trained: those seen, else the reference's."""
    own = view.is_server and all(turn.clients is not None for turn in seen)
    return seen if own else turns_in(reference, dimension)


def _same_in(attributed: Sequence[Turn], turn: Turn, whole: bool) -> Turn | None:
    """The turn of the same name, or the last one of it before: by step in a `whole` view, by round in one that lacks steps."""
    before = (earlier for earlier in reversed(attributed) if (earlier.step <= turn.step if whole else earlier.round <= turn.round))
    return next((earlier for earlier in before if earlier.name == turn.name), None)


def _line(turn: Turn, turns: Sequence[Turn], renumbered: bool) -> list[Turn]:
    """The turns that led to a model as it was sent, the oldest first; empty for one that nobody had trained."""
    line: list[Turn] = []
    while True:
        before = [earlier for earlier in turns if earlier.step < turn.step and ("/" in earlier.name) == ("/" in turn.name)]
        if renumbered and before:
            distances = [float(np.linalg.norm(earlier.vector - turn.vector)) for earlier in before]
            nearest = min(distances)
            before = [earlier for earlier, far in zip(before, distances, strict=True) if far <= nearest]
        same = [earlier for earlier in before if earlier.name == turn.name]
        before = same if same or not renumbered else before
        if not before:
            return line
        turn = before[-1]
        line.insert(0, turn)


# --- the game -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pairs:
    """What the attacker is asked: samples x (2m, ...) with labels y and owners, the i-th and the (m + i)-th a pair of one label and owner.

    Which of a pair is the member is the truth: the first m are. `rest` is the owners' other training data. `rows` (m,) are the members'
    places in their owners' training data.
    """

    x: Array
    y: Array
    owners: Array
    rest: Mapping[int, tuple[Array, Array]]
    rows: Array

    @property
    def member(self) -> Array:
        return np.arange(len(self.y)) < len(self.y) // 2


def pairs_of(
    truth: Truth, owners: Sequence[int], rng: np.random.Generator, most: int = MOST_ASKED, asked: float = 0.5
) -> Pairs:  # fmt: skip
    """Pairs of a training and a test sample of one label, for clients of one test set together; no test sample twice.

    Labels that are numbers differ within a pair.

    At most a share `asked` of a test set is asked about: the attacker has other samples of that distribution, not these.
    """
    pools: dict[int, list[int]] = {}
    for client in owners:
        pools.setdefault(id(truth.outside[client][0]), []).append(client)
    seen: set[bytes] = set()
    pairs: list[tuple[int, int, Array, Any]] = []
    numbers = any(truth.data[client][1].dtype.kind == "f" for client in owners)

    def kind(label: Any) -> int:
        return 0 if numbers else int(label)

    for clients in pools.values():
        x, y = truth.outside[clients[0]]
        places = [(client, i) for client in clients for i in range(len(truth.data[client][1]))]
        by_label: dict[int, list[tuple[int, int]]] = {}
        for place in rng.permutation(len(places)):
            client, i = places[int(place)]
            by_label.setdefault(kind(truth.data[client][1][i]), []).append((client, i))
        for j in rng.permutation(len(y))[: max(1, int(asked * len(y)))]:
            waiting = by_label.get(kind(y[j]))
            if waiting and x[j].tobytes() not in seen:
                seen.add(x[j].tobytes())
                pairs.append((*waiting.pop(), x[j], y[j]))
    chosen = [pairs[int(i)] for i in rng.permutation(len(pairs))[:most]]
    taken: dict[int, list[int]] = {}
    for client, i, _, _ in chosen:
        taken.setdefault(client, []).append(i)
    rest = {}
    for client in owners:
        keep = np.setdiff1d(np.arange(len(truth.data[client][1])), taken.get(client, []))
        rest[client] = truth.data[client][0][keep], truth.data[client][1][keep]
    shape = truth.data[owners[0]][0].shape[1:]
    inside = [truth.data[client][0][i] for client, i, _, _ in chosen]
    x = np.array([*inside, *(sample for _, _, sample, _ in chosen)]).reshape(2 * len(chosen), *shape)
    own = [truth.data[client][1][i] for client, i, _, _ in chosen]
    labels = np.array([*own, *(label for *_, label in chosen)], dtype=np.float64 if numbers else np.int64)
    return Pairs(
        x,
        labels,
        np.array([client for client, *_ in chosen] * 2, dtype=np.int64),
        rest,
        np.array([i for _, i, _, _ in chosen], dtype=np.int64),
    )


def federated_replicas(
    train: Training, start: Array, chain: Sequence[tuple[int, Sequence[int]]], rosters: Sequence[Mapping[int, tuple[Array, Array]]],
    seed: int, *, weights: str = "equal", bound: float = 0.0, engine: Engine | None = None,
) -> Array:  # fmt: skip
    """Models (s, d): FedAvg from `start` (d,) or (s, d) over `chain`, (round, clients) each, once for every roster (client -> x, y).

    All federations' clients of a round are one run of the engine, by that round's `train`. `weights` are "equal" or "examples"; with
    `bound` above 0 each update is first clipped to that norm. Batches are drawn by `seed`, each federation's its own. Raises
    `TrainingDiverged` as training does.
    """
    engine = engine or Engine()
    spread = 1 + max((client for roster in rosters for client in roster), default=0)
    people = [
        {client: ClientData((s + 1) * spread + client, x, y, x[:0], y[:0]) for client, (x, y) in roster.items()}
        for s, roster in enumerate(rosters)
    ]
    models = np.array(np.broadcast_to(start, (len(rosters), np.shape(start)[-1])))
    for number, clients in chain:
        trained = [(s, client) for s, roster in enumerate(people) for client in clients if client in roster]
        inputs = [_given(people[s][client], models[s], seed, number) for s, client in trained]
        moved: dict[int, list[tuple[float, Array]]] = {}
        for (s, client), result in zip(trained, engine.run(train(number), inputs), strict=True):
            if result:
                update = np.asarray(result["update"])
                weight = float(people[s][client].samples) if weights == "examples" else 1.0
                moved.setdefault(s, []).append((weight, clip(update, bound) if bound else update))
        for s, updates in moved.items():
            total = sum(weight for weight, _ in updates)
            models[s] = models[s] + sum(weight / total * update for weight, update in updates)
    return models


def _given(data: ClientData, model: Array, seed: int, number: int) -> TaskInput:
    """What a replica's client trains with. Its noise, if any, is the attacker's own: nothing has to stay secret."""
    noise = blake2b(f"{seed}|{number}|{data.id}".encode(), digest_size=32).digest()
    return TaskInput(data, {"model": model}, {}, Streams(seed, number, data.id), secret=noise)


@dataclass(frozen=True, eq=False)
class MembershipGame:
    """What the attacker knows of models: their confidences (n,) and those of shadow models (s, n) on the samples asked about.

    `inside` (s, n) says which shadow trained on which, `member` (n,) is the truth; `others`, `shadow_others` are confidences on auxiliary
    samples (z,), (s, z).
    """

    target: Array
    shadow: Array
    inside: Array
    member: Array
    others: Array
    shadow_others: Array

    def without(self, s: int) -> "MembershipGame":
        """The same game about shadow model s, with the other shadows: it holds nothing about who is a member."""
        rest = np.arange(len(self.shadow)) != s
        return MembershipGame(
            self.shadow[s], self.shadow[rest], self.inside[rest], self.member, self.shadow_others[s], self.shadow_others[rest]
        )


@dataclass(frozen=True, eq=False)
class ShadowConfidences:
    """Confidences (s, n) of shadow models and of their owners' own models, (s, z) on auxiliary samples; NaN where an owner has none."""

    shadow: Array
    own: Array
    others: Array


_KEPT: dict[str, ShadowConfidences] = {}
MOST_KEPT = 256


def once(kept: dict[str, Cached], most: int, key: str, make: Callable[[], Cached]) -> Cached:
    """What `make` gives, computed once for all adversaries, and for a run and its reference where both have the same `key`.

    `kept` holds the `most` newest results by key.
    """
    if key not in kept:
        while len(kept) >= most:
            del kept[next(iter(kept))]
        kept[key] = make()
    return kept[key]


def games_of(
    target: Target, pairs: Pairs, truth: Truth, prior: Prior, train: Training, bound: float, count: int, left_out: Sequence[int] = ()
) -> tuple[MembershipGame, MembershipGame | None]:
    """Train `count` shadow federations for a target: the game about it, and the one about clients' own models where there are any.

    Nothing is asked about the clients `left_out`.
    """
    assert prior.config is not None  # checked by the caller
    model, weights = train(target.round).model, prior.config.training.weights
    known = {sample.tobytes() for sample in pairs.x}
    free = np.array([i for i, sample in enumerate(prior.x) if sample.tobytes() not in known], dtype=np.int64)
    coins = samples_of_shadows(len(pairs.y) // 2, count, stream(prior.seed, "membership: shadows"))
    inside = np.concatenate([coins, ~coins], axis=1)
    start = target.start.astype(model.init(0).dtype)

    def roster(row: Array) -> dict[int, tuple[Array, Array]]:
        others = {client for _, clients in target.chain for client in clients} - set(pairs.rest)
        made = {client: truth.data[client] for client in others if client in truth.data}
        for client, (x, y) in pairs.rest.items():
            own = row & (pairs.owners == client)
            made[client] = np.concatenate([x, pairs.x[own]]), np.concatenate([y, pairs.y[own]])
        return {client: data for client, data in made.items() if len(data[1])}

    def make() -> ShadowConfidences:
        rosters = [roster(row) for row in inside]
        sums = federated_replicas(train, start, target.chain, rosters, prior.seed, weights=weights, bound=bound)
        cohort = [client for client in target.cohort if client in pairs.owners]
        alone = [{client: held[client]} for held in rosters for client in cohort if client in held]
        starts = np.array([vector for held, vector in zip(rosters, sums, strict=True) for client in cohort if client in held])
        after = iter(federated_replicas(train, starts, [(target.round, cohort)], alone, prior.seed) if alone else ())
        own = np.full(inside.shape, np.nan)
        for s, held in enumerate(rosters):
            for client in cohort:
                own_pairs = pairs.owners == client
                if client in held:
                    own[s, own_pairs] = confidences(model, next(after)[None], pairs.x[own_pairs], pairs.y[own_pairs])[0]
        return ShadowConfidences(confidences(model, sums, pairs.x, pairs.y), own, confidences(model, sums, prior.x[free], prior.y[free]))

    trained = [train(number) for number in (*(number for number, _ in target.chain), target.round)]
    rounds = f"{target.chain}|{target.cohort}|{target.round}"
    digest = blake2b(f"{trained}|{weights}|{bound}|{count}|{prior.seed}|{rounds}|{sorted(truth.data)}".encode(), digest_size=16)
    owned = [part for client in sorted(truth.data) for part in truth.data[client]]
    for part in (start, pairs.x, pairs.y, pairs.owners, prior.x[free], prior.y[free], *owned):
        digest.update(np.ascontiguousarray(part).tobytes())
    computed = once(_KEPT, MOST_KEPT, digest.hexdigest(), make)

    def seen(vector: Array, x: Array, y: Array) -> Array:
        return np.asarray(confidences(model, vector[None].astype(start.dtype), x, y)[0])

    asked = ~np.isin(pairs.owners, left_out)
    others = seen(target.vector, prior.x[free], prior.y[free])
    confidence = seen(target.vector, pairs.x, pairs.y)
    first = MembershipGame(confidence[asked], computed.shadow[:, asked], inside[:, asked], pairs.member[asked], others, computed.others)
    asked &= np.isin(pairs.owners, list(target.own))
    if not asked.any():
        return first, None
    confidence = np.full(len(pairs.y), np.nan)
    for client, vector in target.own.items():
        at = pairs.owners == client
        confidence[at] = seen(vector, pairs.x[at], pairs.y[at])
    empty = np.zeros((count, 0))
    return first, MembershipGame(confidence[asked], computed.own[:, asked], inside[:, asked], pairs.member[asked], empty[0], empty)
