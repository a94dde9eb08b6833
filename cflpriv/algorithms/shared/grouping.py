"""Groups by the test of `clustering.group_test`, for every algorithm that compares what two random halves of a client's data give.

The algorithm has its clients compute a value of two folds, and passes `FindGroups` to `gram`. Newcomers are placed by `JoinGroups`.

Three kinds of values can be tested. Two vectors a client: the means of its samples' vectors over each half. 2p vectors: p for each
half, whose second moments are compared (`subspaces` = p). Under sample-level privacy one noisy vector, whose law of noise is public
(`FindGroups.private`).

The test compares all pairs of clients, so its cost grows with their number squared and cubed. Of more than `MOST_COMPARED` clients
`LANDMARKS`, drawn at random, are tested, and all others join the nearest group as newcomers do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from ...clustering.cuts import join_small, merge_small
from ...clustering.group_test import LEAST_TESTED, LOOK, Groups, groups_given, groups_of
from ...clustering.placement import LEAST, UNPLACED, place
from ...clustering.similarity import Gram, moments
from ...clustering.unbiased_gram import LONGEST, UnbiasedGram, bounded, distances_to_groups, unbiased_of_folds, unbiased_of_vectors
from ...contract.handles import Held
from ...contract.operations import Federation, GramView, Results
from ...errors import InputError
from ...keys import Key
from ...privacy.private_signatures import moment_event, sum_event
from ...privacy.settings import Noise
from ...randomness import stream
from ...types import Array, Clustering

__all__ = [
    "ALPHA", "DRAWS", "FindGroups", "FoundGroups", "JoinGroups", "Landmarks", "PlaceClients", "check_draws", "find_groups",
    "landmarks_of", "notes_of", "p_words",
]  # fmt: skip

ALPHA, DRAWS = 0.01, 499
MOST_COMPARED, LANDMARKS, WIDER = 10_000, 1_000, 4
Landmarks = Annotated[
    int | None,
    Key(
        "So many clients, drawn at random, are compared with each other; all others join the nearest group.",
        f"[{LEAST_TESTED}, inf)",
        "clients",
        default=f"all; {LANDMARKS} of more than {MOST_COMPARED}",
    ),
]
DEVIATIONS = 10.0
"""A squared norm of noise is longer than expected by less than so many standard deviations."""


def check_draws(alpha: float, draws: int) -> None:
    """Raises `InputError` for fewer draws than can show the level."""
    least = max(1, int(np.ceil(1 / alpha - 1e-9)) - 1)
    if draws < least:
        raise InputError(f"algorithm.draws: {draws} draws cannot show a level of {alpha:g}; take at least {least}")


def landmarks_of(federation: Federation, clients: Sequence[int], landmarks: int | None = None, compared: int = 0) -> tuple[int, ...]:
    """The `clients` to compare with each other, ascending: all or a random sample. `compared` clients were compared before.

    `landmarks`: the number that is compared at most; None for the rule of `MOST_COMPARED`.
    """
    most = landmarks
    if most is None:
        most = LANDMARKS if compared + len(clients) > MOST_COMPARED else MOST_COMPARED
    room = max(0, most - compared)
    if len(clients) <= room:
        return tuple(clients)
    return tuple(sorted(int(client) for client in federation.stream("landmarks").choice(clients, room, replace=False)))


@dataclass(frozen=True)
class FindGroups:
    """Public code run where the Gram may be seen: the test of all clients, and of each group found.

    `k`: the number of groups, which is then not tested. `subspaces`: the number of vectors of which a fold's second moment is made; 0 for
    folds of one vector. `numbers`: the length of what a private vector is sketched from. `longest`: no honest fold has a larger squared
    norm. `sigma`, `dimensions`, `samples`: the law of a private vector, a mean over so many samples with noise of standard deviation
    `sigma` on each number; set by `private`.

    Result: labels and k; the number of groups `found` before small ones were merged; of the first test how far it went (`stage`: 0 not
    tested, 1 no direction of difference, 2 ended at a first look, 3 all draws), the number of `directions`, and how many simulations
    without groups looked as grouped (`exceeding`, at most the number of clients: only small numbers are released); how many clients were
    `set_aside`, too noisy to be tested. Evidence, of the clients tested: distances, the first test's spectrum, edge and tree, and every
    test.
    """

    results: ClassVar[Results] = {
        "labels": "all", "k": "one", "directions": "one", "exceeding": "one", "stage": "one", "found": "one", "set_aside": "one",
    }  # fmt: skip

    alpha: float = ALPHA
    draws: int = DRAWS
    k: int | None = None
    seed: int = 0
    at_least: int = 1
    subspaces: int = 0
    numbers: int = 0
    longest: float = LONGEST
    sigma: float = 0.0
    dimensions: int = 0
    samples: int = 0

    def private(self, noise: Noise) -> "FindGroups":
        """The same for the private form of the folds: a noisy mean of vectors of norm 1, or with `subspaces` of second moments."""
        size = noise.sketch_dim if 0 < noise.sketch_dim < self.numbers else self.numbers
        z, relation = noise.signature, noise.relation
        event = moment_event(z, relation) if self.subspaces else sum_event(z, 1.0, relation)
        return replace(
            self, subspaces=0, longest=LONGEST, sigma=z * event.sensitivity / noise.samples,
            dimensions=size * (size + 1) // 2 if self.subspaces else size, samples=noise.samples,
        )  # fmt: skip

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        n = view.gram.n
        none = np.zeros(0, dtype=np.int64)
        groups, squares = Groups(np.zeros(n, dtype=np.int64), (), none), np.zeros((n, n))
        if n > 1:  # clients may be met one after the other
            unbiased, rng = self.unbiased(self.comparable(view.gram)), stream(self.seed, "crossfit")
            groups = groups_of(unbiased, rng, alpha=self.alpha, draws=self.draws) if self.k is None else groups_given(unbiased, self.k, rng)
            squares = _squared_distances(unbiased)
        labels = merge_small(groups.labels, squares, self.at_least)
        view.memory["labels"] = np.where(np.isin(np.arange(view.gram.n), groups.set_aside), -1, labels)
        result = {"labels": labels, "k": int(labels.max()) + 1, "found": groups.k, "stage": 0, "directions": 0, "exceeding": 0}
        result["set_aside"] = len(groups.set_aside)
        for first in groups.nodes[:1]:
            stage = 1 if not first.directions else 2 if first.draws < self.draws else 3
            result |= {"stage": stage, "directions": first.directions, "exceeding": min(first.exceeding, view.gram.n)}
        return result, _evidence(view.gram.clients, squares, groups)

    def comparable(self, gram: Gram) -> Gram:
        """The Gram of what is tested, where no vector is longer than an honest one's."""
        if self.subspaces:
            return bounded(moments(gram, self.subspaces), self.longest)
        noise = self.dimensions * self.sigma**2
        return bounded(gram, self.longest + noise * (1 + DEVIATIONS * np.sqrt(2 / max(1, self.dimensions))))

    def unbiased(self, gram: Gram) -> UnbiasedGram:
        """The unbiased products of a comparable Gram."""
        if not self.sigma:
            return unbiased_of_folds(gram)
        return unbiased_of_vectors(gram, self.traces(gram), self.dimensions)

    def traces(self, gram: Gram) -> Array:
        """The noise (n,) of clients of one private vector each: what was added, and that of a mean of samples of norm 1."""
        added = self.dimensions * self.sigma**2
        squares = np.array([gram.block(slice(i, i + 1), slice(i, i + 1)).item() for i in range(gram.n)])
        true = np.clip((squares - added - 1 / self.samples) / (1 - 1 / self.samples), 0.0, 1.0) if self.samples > 1 else np.zeros(gram.n)
        return np.asarray(added + (1 - true) / self.samples)


@dataclass(frozen=True)
class JoinGroups:
    """Each newcomer joins the group whose mean is nearest to it, by unbiased distances. Result: the newcomers' labels.

    Means of few noisy clients are noisy. So where more clients join than are in groups, as with landmarks, the first of them, up to `WIDER`
    times those, count in the means that all newcomers then join by.
    """

    results: ClassVar[Results] = {"labels": "new"}

    by: FindGroups

    def private(self, noise: Noise) -> "JoinGroups":
        """The same for private folds."""
        return JoinGroups(self.by.private(noise))

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        labels: Array = view.memory["labels"]
        fresh = range(view.gram.n - len(view.new), view.gram.n)
        gram = self.by.comparable(view.gram)
        traces, k = self.by.traces(gram) if self.by.sigma else np.zeros(gram.n), int(labels.max()) + 1
        if len(fresh) > len(labels) == fresh.start:
            first = fresh[: (WIDER - 1) * len(labels)]
            labels = np.concatenate([labels, distances_to_groups(gram, first, labels, k, traces).argmin(1)])
        squares = distances_to_groups(gram, fresh, labels, k, traces)
        return {"labels": squares.argmin(1)}, {"squared_distance": squares}


@dataclass(frozen=True)
class PlaceClients:
    """Each new client joins the nearest group, or belongs to none, or opens a group with others: `clustering.placement`.

    `least`: so many clients open a group. `labels`: in a new epoch, those of all clients, `UNPLACED` for the clients to be placed; where
    clients join an epoch, empty: these are placed, by the clients that were compared before. `at_least`: in a new epoch smaller groups join
    the nearest afterwards; `others`: of each group the number of its clients that are not in the epoch.

    Result, of the clients that are new in the epoch: whether each is "placed" in a group, the "labels" (from `k` on of opened groups; of a
    client in none, the nearest), and the "nearest" of the k groups. Evidence: the p-value of each client that was to be placed, and
    that of the joint test.
    """

    results: ClassVar[Results] = {"placed": "new", "labels": "new", "nearest": "new"}

    by: FindGroups
    k: int
    alpha: float
    least: int = LEAST
    labels: tuple[int, ...] = ()
    at_least: int = 1
    others: tuple[int, ...] = ()

    def private(self, noise: Noise) -> "PlaceClients":
        """The same for private folds."""
        return replace(self, by=self.by.private(noise))

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        fresh = np.arange(view.gram.n - len(view.new), view.gram.n)
        old: Array = np.zeros(0, np.int64) if self.labels else view.memory["labels"]
        known = np.array(self.labels) if self.labels else np.full(len(fresh), UNPLACED)
        before = view.memory.get("compared", np.arange(len(old)))
        kept = np.flatnonzero(old != UNPLACED)  # clients of too much noise are not compared
        compared, labels = np.concatenate([before[kept], fresh]), np.concatenate([old[kept], known])
        unbiased = self.by.unbiased(self.by.comparable(_part_of(view.gram, compared)))
        rng = stream(self.by.seed, "place", len(compared))
        placed = place(unbiased.products, unbiased.traces, labels, self.k, rng, alpha=self.alpha, least=self.least)
        nearest = known.copy()
        nearest[known == UNPLACED] = placed.nearest
        known[known == UNPLACED] = placed.labels
        if self.at_least > 1 and self.labels:
            there = known != UNPLACED
            squares = _squared_distances(unbiased)[np.ix_(there, there)]
            known[there] = join_small(known[there], squares, self.at_least, dict(enumerate(self.others)))
        view.memory.update(labels=np.concatenate([old, known]), compared=np.concatenate([before, fresh]))
        result = {"placed": known != UNPLACED, "labels": np.where(known == UNPLACED, nearest, known), "nearest": nearest}
        return result, {"p": placed.p, "joint_p": placed.joint_p}


def _part_of(gram: Gram, positions: Array) -> Gram:
    """The Gram of some of the clients."""
    if len(positions) == gram.n:
        return gram
    rows = [gram.block(slice(at, at + 1), slice(0, gram.n))[:, :, positions] for at in positions]
    size = len(positions) * gram.p
    return Gram.of_matrix([gram.clients[at] for at in positions], np.concatenate(rows).reshape(size, size), gram.p, gram.error)


def _squared_distances(unbiased: UnbiasedGram) -> Array:
    """The unbiased squared distances (n, n) of the clients' true means; values below 0 are right."""
    own = np.diag(unbiased.products)
    squares = -2 * unbiased.products
    squares += own[:, None]
    squares += own[None, :]
    np.fill_diagonal(squares, 0.0)
    return np.asarray(squares)


def _evidence(clients: tuple[int, ...], squares: Array, groups: Groups) -> dict[str, Any]:
    kept = np.setdiff1d(np.arange(len(clients)), groups.set_aside)
    evidence: dict[str, Any] = {
        "clients": tuple(clients[at] for at in kept), "distance": np.sqrt(np.maximum(squares[np.ix_(kept, kept)], 0.0)),
        "set_aside": [clients[at] for at in groups.set_aside],
    }  # fmt: skip
    tests = [
        {"clients": [clients[at] for at in node.members], "directions": node.directions, "k": node.k, "p": node.p, "level": node.level}
        for node in groups.nodes
    ]
    if groups.nodes:
        first = groups.nodes[0]
        evidence |= {"spectrum": first.spectrum, "edge": first.edge} | ({} if first.tree is None else {"tree": first.tree})
    return evidence | {"tests": tests}


@dataclass(frozen=True)
class FoundGroups:
    """The result of `find_groups`: the clustering, notes for the run, and the evidence if the release allows it."""

    clustering: Clustering
    notes: Mapping[str, Any]
    evidence: Mapping[str, Any] | None


def find_groups(federation: Federation, held: Held, find: FindGroups, landmarks: int | None = None) -> FoundGroups:
    """Find the groups of clients that hold folds: the groups of `landmarks` clients, which all other clients then join.

    `notes`: "rule", "clear" (whether there are groups) and, where there was a test, its "answer" ("all alike", "no clear groups", "groups",
    or why there was none), "directions", and "p" or "p_at_least"; "set_aside", the number of clients too noisy to be tested, if any were;
    "landmarks", the number compared, if that is not all.
    """
    compared = landmarks_of(federation, held.clients, landmarks)
    released = federation.gram(held, then=replace(find, at_least=max(find.at_least, federation.merge_below)), on=compared)
    result = released.result
    labels = dict(zip(compared, (int(label) for label in result["labels"]), strict=True))
    notes = notes_of(find, result, len(compared))
    if others := tuple(client for client in held.clients if client not in labels):
        joined = federation.gram(held, then=JoinGroups(find), against=held, on=others).result["labels"]
        labels |= zip(others, (int(label) for label in joined), strict=True)
        notes["landmarks"] = len(compared)
    clustering = Clustering(held.clients, tuple(labels[client] for client in held.clients), int(result["k"]))
    return FoundGroups(clustering, notes, released.evidence)


def p_words(notes: Mapping[str, Any]) -> str:
    """The p-value of a test for groups, or its bound where the test ended early, from the notes of `notes_of`; "" if none was released."""
    p, least = notes.get("p"), notes.get("p_at_least")
    return f"p = {p:.3g}" if p is not None else f"p ≥ {least:.3g}" if least is not None else ""


def notes_of(find: FindGroups, result: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """What a run says of how its groups were found. A count at its cap gives a p-value from below."""
    aside = {"set_aside": int(result["set_aside"])} if int(result["set_aside"]) else {}
    if find.k is not None:
        return {"rule": f"k = {find.k}", "clear": True} | aside
    stage, directions, exceeding = (int(result[name]) for name in ("stage", "directions", "exceeding"))
    outcome = "groups" if int(result["found"]) > 1 else "no clear groups"
    answer = (f"not tested: fewer than {LEAST_TESTED} clients", "all alike", outcome, outcome)[stage]
    notes: dict[str, Any] = {"rule": f"test at level {find.alpha:g}", "clear": answer == "groups", "answer": answer} | aside
    if stage < 2:
        return notes
    p = (1 + exceeding) / (1 + (min(LOOK, find.draws) if stage == 2 else find.draws))
    return notes | {"directions": directions, "p" if exceeding < clients else "p_at_least": p}
