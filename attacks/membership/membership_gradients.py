"""Membership inference from updates: whether a sample was among those an update was trained on.

Source: Nasr, Shokri & Houmansadr 2019, whose white-box attacks on federated learning read single samples' gradients, and Li et al. 2022
("Effective passive membership inference attacks in federated learning against overparameterized models"), who compare them with the update
by cosine. Deviation: all candidates' gradients explain the update together, by ridge regression, so that samples which resemble each other
are distinguished. An update by SGD is a sum of gradients of the client's samples, and adding a sample adds its gradient to the sum.

An observed training (`read_steps`) is one client's update from a model that it was sent, or the mean update of a cluster, read off two
models. Where the coalition subtracts its own part from a sum, a mean of fewer clients is left, or one client's update.

Shadow clients train from the same model by the same local training, each with half of the candidates. Their mean update is subtracted from
the observed one. The rest is regressed on the candidates' gradients: each is a mean over points of the shadows' average path, scaled to the
length of their steps. A candidate's score is its coefficient: the posterior mean of its membership, up to a constant. The penalty is the
noise over the variance of a fair coin. The noise is the larger of two estimates: maximum marginal likelihood for this update, and the part
of the shadows' updates that their known candidates leave unexplained. Several rounds are regressed together. If clients clip single
samples' gradients, the attacker clips alike. Models of more than `MOST_PARAMETERS` are cut to so many numbers by a public count sketch.

No view: the same regression of each shadow's update. What it proves: what an update shows of single samples, to an attacker who knows all
but the member of each pair. What it does not prove: that an attacker who knows less gets as far. Nor, for means that shadows do not model
(`LocalTraining.beyond`) in late rounds, that the update is the source: where an update is far from the shadows' along their common path,
candidates are scored by the lengths of their gradients, and the samples that the *model* remembers have short gradients. Left out: Adam,
whose steps are not linear in gradients, and what means of updates hold beside local training.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import torch

from ...engine.device import tensor
from ...engine.models import Model
from ...engine.own_modules import flat
from ...engine.sample_gradients import gradients_by_sample
from ...experiments.config.config import Config
from ...protocols.mechanisms import clip
from ...protocols.sketch import Sketch, public_seed, sketch
from ...randomness import stream
from ...types import Array
from ..adversary import AdversaryView
from ..evidence.clipped import NEXT_TO_NOTHING
from ..evidence.local_training import LocalTraining, trainings_in
from ..evidence.trained_by import trained_by
from ..evidence.updates import ClientStep, less_known, local_of, mean_updates, public_model, single_steps, step_of, steps_in
from ..figures.leakage import Case, Prior, Truth
from .member_scores import samples_of_shadows
from .membership_shadows import Pairs, federated_replicas, lines_in, once

__all__ = ["GradientEvidence", "affordable_steps", "evidence", "passes_of", "read_steps", "clipped_gradients", "shortened"]

PATH = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where on the way of the shadows gradients are taken."""
CLIPPED_PATH = (0.5,)
"""The same where gradients are clipped: noise matters more than the way."""
ONE_STEP = (0.0,)
"""The same for a single step, whose gradient is taken at the model sent."""
MOST_PARAMETERS = 8192
"""Longer updates and gradients are sketched to so many numbers."""
MOST_NUMBERS = 1 << 24
"""Of gradients or updates that are held at once."""
VARIANCE = 0.25
"""Of whether a candidate is in, a fair coin."""
GRADIENT, CALLED = 3.0, 2000.0
"""A single gradient takes as long as so many passes of training; to begin with a client, so many."""


# --- what the view holds ------------------------------------------------------------------------------------------------------------


def read_steps(case: Case, view: AdversaryView, prior: Prior, model: Model) -> list[ClientStep]:
    """What can be read of training, each once, in the order of rounds: single updates, and means over clients of whom there are none.

    Single updates are those sent and those that sums leave; means are without what the coalition takes off. Where a view does not say who
    trained a model, the reference does.
    """
    read = steps_in(view, model.dimension, case, parts=True)
    single = single_steps(read)
    steps_read = [step for client, steps in single.items() if client not in view.coalition for step in less_known(steps, prior, model)]
    means = {(step.round, step.start.tobytes()): step for steps in read.values() for step in steps if len(step.members) > 1}
    if means or not steps_read:
        means_read = [_of_fewer(step, means.get((step.round, step.start.tobytes()))) for step in _mean_steps(case, view, model.dimension)]
        means_read = means_read or _parts_of_means(case, view, model.dimension)
        steps_read += [step for step in means_read if not set(step.members) & (single.keys() - set(view.coalition))]
    return sorted(steps_read, key=lambda step: step.round)


def _of_fewer(step: ClientStep, other: ClientStep | None) -> ClientStep:
    """The mean of fewer clients, where there is one."""
    return other if other is not None and set(other.members) < set(step.members) else step


def _mean_steps(case: Case, view: AdversaryView, dimension: int) -> list[ClientStep]:
    """The mean updates between models that follow each other, where both can be read and no two models follow one.

    Where models between two are missing, as in released ones, the update is the sum of several (`ClientStep.chain`).
    """
    renumbered = case.prior.config is not None and case.prior.config.spec.renumbers
    seen, lines = lines_in(view, case.reference, dimension, renumbered)
    trainings = trainings_in(case.reference)
    often = Counter((turn.name, turn.round) for turn in seen)
    vectors = {(turn.name, turn.round): turn.vector for turn in seen if often[turn.name, turn.round] == 1}
    steps: dict[tuple[str, int], ClientStep] = {}
    origin: dict[tuple[str, int], tuple[str, int]] = {}
    after: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for line in lines:
        places = [i for i, turn in enumerate(line) if (turn.name, turn.round) in vectors]
        for first, last in pairwise(places):
            here, there = ((line[i].name, line[i].round) for i in (first, last))
            chain = tuple((turn.round, turn.clients) for turn in line[first:last] if turn.clients)
            if chain:
                after.setdefault(here, set()).add(there)
                members = tuple(sorted({client for _, clients in chain for client in clients}))
                moved, local = vectors[there] - vectors[here], trainings.at(line[first].round)
                steps[there] = ClientStep(vectors[here], moved, members, line[first].round, local=local, chain=chain)
                origin[there] = here
    several_from_one = view.adversary == "released"  # of one initial model all clusters' models are made
    return [
        step for there, step in steps.items() if step.update.any() and (several_from_one or len(after[origin[there]]) == 1)
    ]  # fmt: skip


def _parts_of_means(case: Case, view: AdversaryView, dimension: int) -> list[ClientStep]:
    """The mean updates of the part that travels, where only a part does; without its members those who trained, as the reference has it."""
    means = [mean for mean in mean_updates(view, dimension) if mean.part]
    people = [mean.members or tuple(sorted(set(named))) for mean, named in zip(means, trained_by(case, view, means), strict=True)]
    return [replace(step_of(mean), members=members) for mean, members in zip(means, people, strict=True) if members]


def passes_of(step: ClientStep, prior: Prior, shadows: int) -> float:
    """About how many samples' passes through the model a step takes: its shadows' training, and candidates' gradients."""
    assert prior.config is not None  # checked by the caller
    local, counts = local_of(step, prior), [prior.samples_per_client.get(c, 0) for c in step.members]
    points = (len(_path(local, prior.config, count)) for count in counts)
    often = [sum(client in clients for _, clients in step.trainings) for client in step.members]
    return sum(
        n * (local.train.epochs * shadows * times + 2 * GRADIENT * m) + CALLED * times
        for n, m, times in zip(counts, points, often, strict=True)
    )


def affordable_steps(steps: Sequence[ClientStep], rounds: int, costs: Sequence[float], most: float) -> list[ClientStep]:
    """The first `rounds` steps of everybody, all first ones before any second, as far as their `costs` come to `most` together."""
    counts: dict[int, int] = {}
    order = []
    for i, step in enumerate(steps):
        turn = max(counts.get(client, 0) for client in step.members)
        counts |= dict.fromkeys(step.members, turn + 1)
        if turn < rounds:
            order.append((turn, step.round, i))
    order.sort()
    spent = np.cumsum([costs[i] for *_, i in order])
    kept = sorted(i for (*_, i), sum_ in zip(order, spent, strict=True) if sum_ <= most)
    return [steps[i] for i in kept]


# --- gradients ----------------------------------------------------------------------------------------------------------------------


def clipped_gradients(model: Model, at: Array, x: Array, y: Array, norm: float = 0.0) -> Array:
    """Each sample's gradient of the loss at parameters `at` (d,), in float64, (n, d); with `norm` above 0 clipped to it."""
    module = model.lent(np.asarray(at).astype(np.float64 if model.dtype == "float64" else np.float32)).train(False)
    made = gradients_by_sample(module, model.inputs(x), tensor(y), model.loss)
    rows = torch.cat([flat(made[name]) for name, _ in module.named_parameters()], dim=1).double().cpu().numpy()
    if norm:
        rows = rows * np.minimum(1.0, norm / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300))
    return np.asarray(rows)


def _path(local: LocalTraining, config: Config, count: int) -> tuple[float, ...]:
    """Where a client that has `count` samples takes its gradients."""
    if local.steps(max(count, 1)) == 1:
        return ONE_STEP
    return CLIPPED_PATH if config.privacy.unit == "sample" else PATH


# --- the regression -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GradientEvidence:
    """Scores (n,) of the samples asked about, larger for members, and (s, n) where each shadow's updates take the place of those read.

    NaN for samples of clients of whom nothing was read.
    """

    scores: Array
    blank: Array


@dataclass(frozen=True, eq=False)
class _Attack:
    """What is the same for all steps. `inside` (s, n) says which shadow trained on which candidate; nothing is asked about the `known`."""

    pairs: Pairs
    inside: Array
    truth: Truth
    prior: Prior
    known: tuple[int, ...]

    @property
    def config(self) -> Config:
        assert self.prior.config is not None  # checked by the caller
        return self.prior.config

    @property
    def model(self) -> Model:
        return public_model(self.prior)

    def asked(self, clients: Sequence[int]) -> Array:
        """The places of the candidates of these clients."""
        return np.flatnonzero(np.isin(self.pairs.owners, [client for client in clients if client not in self.known]))

    def data(self, client: int, shadow: Array) -> tuple[Array, Array]:
        """What a client has in a shadow federation: all but its candidates, and those that are in."""
        if client in self.known or client not in self.pairs.rest:
            return self.truth.data[client]
        (x, y), own = self.pairs.rest[client], shadow & (self.pairs.owners == client)
        return np.concatenate([x, self.pairs.x[own]]), np.concatenate([y, self.pairs.y[own]])

    def local(self, step: ClientStep) -> LocalTraining:
        """The local training of a step, clipped as clients clip and without noise; a shadow that diverges stays where it is."""
        local, noise = local_of(step, self.prior), self.config.noise()
        local = replace(local, train=replace(local.train, on_divergence="skip"))
        if noise is None or not noise.training:
            return local
        return replace(local, train=local.train.private(replace(noise, training=NEXT_TO_NOTHING)))

    def shares(self, step: ClientStep) -> dict[int, float]:
        """What part of a step each member is, added up over the trainings of a chain."""
        by_count = self.config.training.weights == "examples"
        sizes = {client: float(len(self.truth.data[client][1])) if by_count else 1.0 for client in step.members}
        shares = dict.fromkeys(step.members, 0.0)
        for _, clients in step.trainings:
            whole = sum(sizes[client] for client in clients)
            for client in clients:
                shares[client] += sizes[client] / whole
        return shares


def evidence(
    steps: Sequence[ClientStep], pairs: Pairs, truth: Truth, prior: Prior, shadows: int, known: Sequence[int] = ()
) -> GradientEvidence:
    """Regress `steps` on the gradients of `pairs`, with so many `shadows` (even) of every client.

    `known` are clients whose data the attacker knows: nothing is asked about them. Raises `InputError` for an odd number of shadows.
    """
    coins = samples_of_shadows(len(pairs.y) // 2, shadows, stream(prior.seed, "membership: shadows of updates"))
    attack = _Attack(pairs, np.concatenate([coins, ~coins], axis=1), truth, prior, tuple(known))
    scores = np.full((1 + shadows, len(pairs.y)), np.nan)
    for group in _together(steps):
        asked = attack.asked(sorted({client for step in group for client in step.members}))
        if len(asked):
            scores[:, asked] = once(_KEPT, MOST_KEPT, _key(attack, group), partial(_coefficients, attack, group, asked))
    return GradientEvidence(scores[0], scores[1:])


def _together(steps: Sequence[ClientStep]) -> list[list[ClientStep]]:
    """Steps that say something of the same samples: each client's single ones, or all means."""
    groups: dict[tuple[int, ...], list[ClientStep]] = {}
    for step in steps:
        groups.setdefault(step.members if len(step.members) == 1 else (), []).append(step)
    return list(groups.values())


def _coefficients(attack: _Attack, steps: Sequence[ClientStep], asked: Array) -> Array:
    """Coefficients (1 + s, m) of the candidates `asked` (m,), of the steps as they were read and of the shadows'."""
    gram, towards = np.zeros((len(asked), len(asked))), np.zeros((1 + len(attack.inside), len(asked)))
    for step in steps:
        here = np.flatnonzero(np.isin(attack.pairs.owners[asked], step.members))
        if len(here):
            columns, residues = _system(attack, step, asked[here])
            solved = step.deviation**2 * max(1.0, attack.model.dimension / MOST_PARAMETERS)  # a sketch adds coordinates up
            noise = max(_noise(columns, residues, attack.inside[:, asked[here]]), solved)
            gram[np.ix_(here, here)] += columns @ columns.T / noise
            towards[:, here] += residues @ columns.T / noise
    return np.asarray(np.linalg.solve(gram + np.eye(len(asked)) / VARIANCE, towards.T).T)


def _system(attack: _Attack, step: ClientStep, asked: Array) -> tuple[Array, Array]:
    """What each candidate adds to an update if it is in (m, k), and what is left (1 + s, k) of the update read and of the shadows'."""
    model, shares, shadows = attack.model, attack.shares(step), len(attack.inside)
    short, size = shortened(model.dimension), min(model.dimension, MOST_PARAMETERS)
    moved = np.zeros((shadows, size))
    columns = np.zeros((len(asked), size))
    if len(step.trainings) > 1:
        return _system_of_chain(attack, step, asked)
    for client in step.members:
        places = np.flatnonzero(attack.pairs.owners[asked] == client)
        alone = replace(step, members=(client,), update=np.zeros(0), known=None)
        sent, ways = once(_PARTS, MOST_PARTS, _key(attack, [alone]), partial(_part, attack, step, client, asked[places]))
        moved += shares[client] * sent
        columns[places] = -shares[client] * ways
    known = 0.0 if step.known is None else step.known
    middle = moved.mean(axis=0)
    # a shadow less the mean of the other shadows
    others = (moved - middle) * (shadows / max(shadows - 1, 1))
    return columns, np.vstack([short((step.update - known)[None]) - middle, others])


def _system_of_chain(attack: _Attack, step: ClientStep, asked: Array) -> tuple[Array, Array]:
    """As `_system`, of an update that is the sum of several rounds' means: each shadow is a federation of its own over all of them.

    A candidate's gradient is taken on the way of the whole update, and counts as often as its owner trained.
    """
    model, shares, short = attack.model, attack.shares(step), shortened(attack.model.dimension)
    start = step.start.astype(model.init(0).dtype)
    rosters = [{client: attack.data(client, shadow) for client in step.members} for shadow in attack.inside]
    train, norm = attack.local(step).train, attack.config.privacy.clip_norm if attack.config.privacy.unit == "client" else 0.0
    ended = federated_replicas(
        lambda number: train, start, step.trainings, rosters, attack.prior.seed, weights=attack.config.training.weights, bound=norm
    )
    moved = ended.astype(np.float64) - start
    columns = np.zeros((len(asked), min(model.dimension, MOST_PARAMETERS)))
    for client in step.members:
        places = np.flatnonzero(attack.pairs.owners[asked] == client)
        if len(places):
            way = _way_gradients(attack, step, client, moved.mean(axis=0), asked[places])
            columns[places] = -shares[client] * _amount(attack, step, client) * way
    made = short(moved)
    middle = made.mean(axis=0)
    return columns, np.vstack([short(step.update[None]) - middle, (made - middle) * (len(made) / max(len(made) - 1, 1))])


def _part(attack: _Attack, step: ClientStep, client: int, places: Array) -> tuple[Array, Array]:
    """What a client sends in the shadow federations (s, k), and how far each of its candidates carries that if it is in (m, k)."""
    updates = _shadow_updates(attack, step, client)
    bound = attack.config.privacy.clip_norm if attack.config.privacy.unit == "client" else 0.0
    sent = np.stack([clip(update, bound) for update in updates]) if bound else updates
    lengths = np.linalg.norm(updates, axis=1)
    kept = float(np.mean(np.linalg.norm(sent, axis=1) / np.maximum(lengths, 1e-300))) if bound else 1.0
    short, sent = shortened(attack.model.dimension), step.known_part(sent)
    if not len(places):
        return short(sent), np.zeros((0, min(attack.model.dimension, MOST_PARAMETERS)))
    amount = kept * _amount(attack, step, client)
    return short(sent), amount * _way_gradients(attack, step, client, updates.mean(axis=0), places)


def _amount(attack: _Attack, step: ClientStep, client: int) -> float:
    """How far the steps of a client carry a unit gradient of one of its samples."""
    privacy, samples = attack.config.privacy, len(attack.truth.data[client][1])
    carried = attack.local(step).carried(attack.prior.samples_per_client[client])
    return carried / (privacy.samples if privacy.unit == "sample" else samples)


def _shadow_updates(attack: _Attack, step: ClientStep, client: int) -> Array:
    """A client's updates (s, d) in the shadow federations, from the model of a step."""
    train, start = attack.local(step).train, step.start.astype(attack.model.init(0).dtype)
    rosters = [{client: attack.data(client, shadow)} for shadow in attack.inside]
    ended = federated_replicas(lambda number: train, start, [(step.round, (client,))], rosters, attack.prior.seed)
    return np.asarray(ended.astype(np.float64) - start)


def _way_gradients(attack: _Attack, step: ClientStep, client: int, moved: Array, places: Array) -> Array:
    """A client's candidates' mean gradients (m, k) on the way from the model of a step along `moved` (d,)."""
    privacy, model, short = attack.config.privacy, attack.model, shortened(attack.model.dimension)
    norm = privacy.clip_norm if privacy.unit == "sample" else 0.0
    path = _path(attack.local(step), attack.config, attack.prior.samples_per_client[client])
    chunk = max(1, MOST_NUMBERS // (len(path) * model.dimension))
    rows = []
    for begin in range(0, len(places), chunk):
        x, y = (part[places[begin : begin + chunk]] for part in (attack.pairs.x, attack.pairs.y))
        points = [clipped_gradients(model, step.start + share * moved, x, y, norm) for share in path]
        rows.append(short(step.known_part(np.mean(points, axis=0))))
    return np.concatenate(rows)


def _noise(columns: Array, residues: Array, inside: Array) -> float:
    """The variance of an update's coordinates about what its candidates explain, for the update read (the first of `residues`)."""
    read, others = residues[0], residues[1:]
    values, vectors = np.linalg.eigh(columns @ columns.T)
    kept = values > 1e-12 * max(float(values[-1]), 1e-300)
    values, turn = values[kept], vectors[:, kept] / np.sqrt(values[kept])
    seen = turn.T @ (columns @ read)
    outside, spare = max(float(read @ read - seen @ seen), 0.0), max(columns.shape[1] - len(values), 0)
    grid = np.logspace(-10, 2, 97) * max(float(read @ read) / len(read), 1e-30)
    spread = grid[:, None] + VARIANCE * values
    likelihood = -(np.log(spread) + seen**2 / spread).sum(axis=1) - spare * np.log(grid) - outside / grid
    # less the mean of the others, as the shadows' residues are
    coins = (inside - inside.mean(axis=0)) * (len(inside) / max(len(inside) - 1, 1))
    unexplained = ((others - coins @ columns) @ columns.T) @ turn
    return max(float(grid[int(np.argmax(likelihood))]), float(np.mean(unexplained**2)) if unexplained.size else 0.0)


def shortened(dimension: int) -> Callable[[Array], Array]:
    """What makes rows (m, d) short: sketched to `MOST_PARAMETERS` numbers where they are longer, else as they are."""
    return _sketch(dimension, MOST_PARAMETERS).apply if dimension > MOST_PARAMETERS else np.asarray


@lru_cache(maxsize=2)
def _sketch(dimension: int, size: int) -> Sketch:
    return sketch(public_seed("membership: gradients"), dimension, size)


# --- once for all adversaries -------------------------------------------------------------------------------------------------------


_KEPT: dict[str, Array] = {}
MOST_KEPT = 1024
"""Coefficients; see `once`."""
_PARTS: dict[str, tuple[Array, Array]] = {}
MOST_PARTS = 256
"""What single members of means are; of at most `MOST_PARAMETERS` numbers a row."""


def _key(attack: _Attack, steps: Sequence[ClientStep]) -> str:
    members = sorted({client for step in steps for client in step.members})
    trained = [(attack.local(step), step.trainings, step.part) for step in steps]
    words = f"{trained}|{attack.config.privacy}|{attack.config.training.weights}|{attack.prior.seed}|{set(members) & set(attack.known)}"
    digest = blake2b(words.encode(), digest_size=16)
    owned = [part for client in members for part in attack.truth.data[client]]
    read = [part for step in steps for part in (step.start, step.update, step.known) if part is not None]
    for part in (attack.inside, attack.pairs.x, attack.pairs.y, attack.pairs.owners, *owned, *read):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()
