"""Clients that are placed again because their data changed, and newcomers: in a cluster, in none, or in a new cluster.

After every so many rounds each client tests whether its own data changed (`tasks.ChangeOfData`), and answers with one bit. Clients that
changed, and clients that belong to no cluster, are then compared with the members of the clusters in a new clustering epoch, under the
protection of comparisons. Where none changed nothing is compared.

Guarantee: over a whole run, the probability that any client is named as changed whose data did not change is at most alpha
(`clustering.change`, with its assumptions); others are not moved by a comparison. Of the clients that are placed, one that belongs to a
known cluster is held back by a test at level alpha (`clustering.placement`, with its assumptions).

A client that belongs to no cluster uses the model of the nearest cluster and takes part in no sum: its updates would change a model that is
not its own, and secure sums have no group of one. A new cluster starts from the model of the cluster nearest to its members.

Where more than half of the clients changed, too few are left to compare them with: the groups of all clients are found anew, as at the
start. Each starts from the model that most of its clients had. Then clients whose data did not change may be in another cluster, too.
Clients that are away then are in no cluster until a check after their return.

A cluster that its clients leave for another may be below the minimum cohort size then. `protection.small_clusters` says what happens: its
model waits and trains no more, its members train alone, or all of its members join the nearest cluster, although their data did not change.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from ...clustering.change import checks_within_reach, level_of_check
from ...clustering.placement import LEAST, UNPLACED
from ...contract.handles import Held, Shared
from ...contract.operations import Federation, Parameter
from ...contract.schedule import TaskRequest, request
from ...engine import Task
from ...errors import InputError
from ...keys import Key
from ...placements import NAME
from ...tasks.change_of_data import MOST, ChangeOfData, ComparedAgain, KeepSamples
from ...types import Clustering
from .grouping import FindGroups, PlaceClients, find_groups, landmarks_of

__all__ = [
    "PLACE_ALPHA", "RECHECK_TASKS", "Groupings", "PlaceAlpha", "RecheckEvery", "Rechecks", "late_checks", "newcomers_placed", "rechecked",
    "refuse_private", "watched",
]  # fmt: skip

PLACE_ALPHA = 0.05
RECHECK_TASKS = (KeepSamples, ChangeOfData, ComparedAgain)
"""What clients compute for it, besides what the algorithm compares."""
RecheckEvery = Annotated[
    int,
    Key(
        "After so many rounds clients test whether their data changed; those that changed are compared again and moved (0: never).",
        "[0, inf)",
        "rounds",
    ),
]
PlaceAlpha = Annotated[
    float,
    Key(
        "Chance that any client is moved in a run although its data did not change (samples independent); level at which a client belongs "
        "to no cluster.",
        "[1e-6, 1)",
    ),
]


@dataclass(frozen=True)
class Rechecks:
    """What is fixed in a run: how often, the level, the task whose `part` is compared, and how groups are found.

    `at_model`: whether the task is given the initial "model".
    """

    every: int
    alpha: float
    task: Task
    part: str
    find: FindGroups
    at_model: bool
    landmarks: int | None = None

    @property
    def watch(self) -> ChangeOfData:
        return ChangeOfData(seed=self.find.seed)

    def requests(self) -> tuple[list[TaskRequest], list[TaskRequest]]:
        """What is asked of a client at its start or when it joins, and in a round, besides what the algorithm asks."""
        if not self.every:
            return [], []
        watching = request(self.watch, {"changed": "gather"}, varies=("level",))
        return [request(KeepSamples(self.find.seed))], [watching, request(ComparedAgain(self.task), {self.part: "gram"})]


@dataclass(frozen=True, eq=False)
class Groupings:
    """Models, who is in which cluster, and who is in none (`unplaced`: these have the label of the nearest).

    `held`: the values of the clustering epoch that newcomers are compared in. `placed`: the round of a client's last placement, if not the
    start. `waiting`: those of the unplaced clients that were not compared with earlier ones.
    """

    models: tuple[Shared, ...]
    clustering: Clustering
    held: Held
    unplaced: tuple[int, ...] = ()
    placed: Mapping[int, int] = field(default_factory=dict)
    waiting: tuple[int, ...] = ()

    @property
    def training(self) -> Clustering:
        """The clustering of the clients that train."""
        kept = [client for client in self.clustering.clients if client not in self.unplaced]
        return Clustering(tuple(kept), tuple(self.clustering[client] for client in kept), self.clustering.k)


def late_checks(settings: Mapping[str, Any], clients: int, samples: int, rounds: int) -> str:
    """A warning if late checks of a run can name no client even if all its `samples` samples change; empty if all can, or if unknown."""
    every = settings.get("recheck_every", 0)
    if not every or not samples:
        return ""
    reach = checks_within_reach(settings.get("recheck_alpha", PLACE_ALPHA), clients, min(samples, MOST))
    checks = max(0, rounds - 1) // every
    if reach >= checks:
        return ""
    return (
        f"algorithm.recheck_every = {every}: with {samples} samples a client no change can be found after check {reach} of {checks}: "
        f"each check takes part of recheck_alpha; check more rarely, or raise recheck_alpha"
    )


def refuse_private(settings: Mapping[str, Any]) -> None:
    """Raises `InputError` for settings that have no form under sample-level privacy."""
    if every := settings.get("recheck_every", 0):
        raise InputError(
            f"algorithm.recheck_every = {every} under privacy.unit = 'sample': whether a client's data changed has no private form; "
            "set it to 0"
        )


def watched(federation: Federation, rechecks: Rechecks, clients: Sequence[int] | None = None) -> None:
    """Clients keep a short form of the data that they are placed by."""
    if rechecks.every:
        federation.compute(KeepSamples(rechecks.find.seed), on=clients)


def rechecked(federation: Federation, rechecks: Rechecks, groupings: Groupings, initial: Shared) -> tuple[Groupings, dict[str, Any]]:
    """Before a round: where a check is due, place clients again that changed or are in no cluster. With notes on what happened, if any."""
    number = federation.round // rechecks.every if rechecks.every else 0
    if not number or federation.round % rechecks.every:
        return groupings, {}
    clustering = groupings.clustering
    known = [client for client in federation.clients if client in set(clustering.clients)]
    earlier = [client for client in known if groupings.placed.get(client, -1) < federation.round]  # others came just now
    changed = _changed(federation, rechecks, groupings, earlier, number)
    if not changed and not set(groupings.waiting).intersection(known):
        return groupings, {}
    notes: dict[str, Any] = {"changed": sorted(changed)} if changed else {}
    if 2 * len(changed) > len(known):
        made = _found_anew(federation, rechecks, groupings, known, initial)
        away = {"unplaced": list(made.unplaced)} if made.unplaced else {}
        return made, _notes({**notes, "found_anew": made.clustering.k, **away})
    again = {*changed, *groupings.unplaced}.intersection(known)
    members = _members(federation, clustering, [client for client in known if client not in again], rechecks.landmarks)
    if not members:
        return groupings, _notes(notes)
    params = {"model": initial} if rechecks.at_model else {}
    held = federation.compute(ComparedAgain(rechecks.task), params, on=sorted((*again, *members)))[rechecks.part]
    labels = tuple(UNPLACED if client in again else clustering[client] for client in held.clients)
    if not any(label != UNPLACED for label in labels):
        return groupings, _notes(notes)
    of_others = [0] * clustering.k
    for client in set(groupings.training.clients).difference(held.clients):
        of_others[clustering[client]] += 1
    then = PlaceClients(
        rechecks.find, clustering.k, rechecks.alpha, _least(federation), labels, federation.merge_below, tuple(of_others)
    )  # fmt: skip
    released = federation.gram(held, then=then)
    federation.close(groupings.held)
    waiting = tuple(client for client in groupings.waiting if client not in again)
    made, more = _placed(replace(groupings, held=held, waiting=waiting), held.clients, released.result, again, federation.round)
    return made, _notes({**notes, **more})


def _found_anew(
    federation: Federation, rechecks: Rechecks, groupings: Groupings, clients: Sequence[int], initial: Shared
) -> Groupings:  # fmt: skip
    """The groups of all these clients, found as at the start. A group starts from the model that most of its clients had.

    All others wait in no cluster, nearest to the one that most clients of theirs went to.
    """
    params = {"model": initial} if rechecks.at_model else {}
    held = federation.compute(ComparedAgain(rechecks.task), params, on=clients)[rechecks.part]
    clustering = find_groups(federation, held, rechecks.find, rechecks.landmarks).clustering
    federation.close(groupings.held)
    before = dict(zip(groupings.clustering.clients, groupings.clustering.labels, strict=True))
    models = []
    for label in range(clustering.k):
        had = Counter(before[client] for client in clustering.clients if clustering[client] == label)
        models.append(groupings.models[had.most_common(1)[0][0]])
    placed = {**groupings.placed, **dict.fromkeys(clustering.clients, federation.round)}
    away = tuple(client for client in before if client not in clustering.clients)
    labels = (*clustering.labels, *(_heir(clustering, before, before[client]) for client in away))
    everybody = Clustering((*clustering.clients, *away), labels, clustering.k)
    return Groupings(tuple(models), everybody, held, away, placed, away)


def _heir(clustering: Clustering, before: Mapping[int, int], was: int) -> int:
    """The cluster that most clients of an earlier one are in now; the largest, where none of these is left."""
    went = [label for client, label in zip(clustering.clients, clustering.labels, strict=True) if before[client] == was]
    return Counter(went or clustering.labels).most_common(1)[0][0]


def _notes(placements: Mapping[str, Any]) -> dict[str, Any]:
    """A round's notes: what happened, under the name of placements."""
    return {NAME: dict(placements)} if placements else {}


def _members(federation: Federation, clustering: Clustering, clients: Sequence[int], landmarks: int | None) -> tuple[int, ...]:
    """The clients that others are compared with: as many as at the start, and at least `LEAST` of each cluster that has them."""
    drawn = set(landmarks_of(federation, clients, landmarks))
    for label in range(clustering.k):
        of_cluster = [client for client in clients if clustering[client] == label]
        missing = min(LEAST, len(of_cluster)) - len(drawn.intersection(of_cluster))
        left = [client for client in of_cluster if client not in drawn]
        if missing > 0:
            drawn.update(int(client) for client in federation.stream(f"landmarks of {label}").choice(left, missing, replace=False))
    return tuple(sorted(drawn))


def _least(federation: Federation) -> int:
    """So many clients open a cluster: as many as can be summed, where smaller clusters are merged."""
    return max(LEAST, federation.merge_below)


def _changed(federation: Federation, rechecks: Rechecks, groupings: Groupings, clients: Sequence[int], number: int) -> set[int]:
    """The clients whose data changed since they were placed, by their own test.

    What is asked follows from all clients that ever were placed, so that a step that is taken again without some asks the same.
    """
    of_all = groupings.clustering.clients
    rounds = sorted({groupings.placed.get(client, -1) for client in of_all})
    which = {client: rounds.index(groupings.placed.get(client, -1)) for client in clients}
    task = replace(rechecks.watch, level=level_of_check(rechecks.alpha, len(of_all), number))
    params: dict[str, Parameter] = {"placed": [np.array(float(value)) for value in rounds]}
    answers = federation.gather(federation.compute(task, params, which=which, on=clients)["changed"])
    return {client for client, answer in answers.items() if np.asarray(answer["changed"]).shape == () and int(answer["changed"]) == 1}


def newcomers_placed(
    federation: Federation, rechecks: Rechecks, groupings: Groupings, initial: Shared, newcomers: Sequence[int]
) -> tuple[Groupings, dict[str, Any]]:  # fmt: skip
    """Newcomers, each in the nearest cluster, in none, or in a new one; and notes.

    Where the epoch of the members ended with an earlier process, newcomers wait in no cluster until the next check compares all anew.
    """
    watched(federation, rechecks, newcomers)
    if rechecks.every and not federation.extendable(groupings.held):
        return _waiting(federation, groupings, newcomers)
    params = {"model": initial} if rechecks.at_model else {}
    held = federation.compute(rechecks.task, params, on=newcomers)[rechecks.part]
    then = PlaceClients(rechecks.find, groupings.clustering.k, rechecks.alpha, _least(federation))
    released = federation.gram(held, then=then, against=groupings.held)
    made, notes = _placed(groupings, held.clients, released.result, set(held.clients), federation.round)
    waiting = (*groupings.waiting, *(client for client in made.unplaced if client not in groupings.unplaced))
    return replace(made, waiting=waiting), _notes(notes)


def _waiting(federation: Federation, groupings: Groupings, newcomers: Sequence[int]) -> tuple[Groupings, dict[str, Any]]:
    """Newcomers in no cluster, with the model of the largest."""
    largest = Counter(groupings.clustering.labels).most_common(1)[0][0]
    unplaced = tuple(sorted((*groupings.unplaced, *newcomers)))
    made = replace(
        groupings, clustering=groupings.clustering.extended(newcomers, [largest] * len(newcomers)), unplaced=unplaced,
        placed={**groupings.placed, **dict.fromkeys(newcomers, federation.round)}, waiting=(*groupings.waiting, *newcomers),
    )  # fmt: skip
    return made, _notes({"unplaced": list(unplaced)})


def _placed(
    groupings: Groupings, clients: Sequence[int], result: Mapping[str, Any], again: set[int], round: int
) -> tuple[Groupings, dict[str, Any]]:  # fmt: skip
    """The groupings after a placement of the clients in `again`, and notes, if any: who moved, who is in no cluster, what was opened, and
    which clusters joined others.

    Raises `InputError` for labels that no honest holder releases.
    """
    before = groupings.clustering
    of_all = list(zip(clients, result["placed"], result["labels"], result["nearest"], strict=True))
    labels = {client: (int(label) if there else UNPLACED, int(nearest)) for client, there, label, nearest in of_all if client in again}
    opened = sorted({label for label, _ in labels.values() if label >= before.k})
    if opened != list(range(before.k, before.k + len(opened))) or any(not 0 <= nearest < before.k for _, nearest in labels.values()):
        raise InputError(f"gram: opened clusters {opened} do not follow the {before.k} known ones, or a nearest one is not known")
    merged = _merged(before, {client: int(label) for client, _, label, _ in of_all if client not in again}, before.k + len(opened))
    sources = [Counter(nearest for label, nearest in labels.values() if label == number).most_common(1)[0][0] for number in opened]
    known = dict(zip(before.clients, before.labels, strict=True))
    now = {client: merged.get(label, label) for client, label in known.items()}
    moved = []
    for client, (label, nearest) in labels.items():
        was = None if client in groupings.unplaced else known.get(client, label)
        if label != UNPLACED and label < before.k and was != label:
            moved.append([client, was, label])
        now[client] = merged.get(nearest, nearest) if label == UNPLACED else label
    kept = [client for client in groupings.unplaced if client not in labels]
    unplaced = sorted([*kept, *(client for client, (label, _) in labels.items() if label == UNPLACED)])
    clustering = Clustering(tuple(now), tuple(now.values()), before.k + len(opened))
    models = (*groupings.models, *(groupings.models[source] for source in sources))
    notes = {
        "moved": moved,
        "unplaced": unplaced,
        "merged": {str(label): into for label, into in merged.items()},
        "opened": {str(number): [client for client, (label, _) in labels.items() if label == number] for number in opened},
    }
    placed = {**groupings.placed, **dict.fromkeys(labels, round)}
    made = replace(groupings, models=models, clustering=clustering, unplaced=tuple(unplaced), placed=placed)
    return made, {name: value for name, value in notes.items() if value}


def _merged(before: Clustering, labels: Mapping[int, int], k: int) -> dict[int, int]:
    """The clusters whose members, which were not placed, have another label below k now, and that label. Raises `InputError` if members of
    one cluster have different labels.
    """
    pairs = {(before[client], label) for client, label in labels.items()}
    merged = {was: now for was, now in pairs if was != now}
    if len(pairs) > len({was for was, _ in pairs}) or any(not 0 <= now < k for now in merged.values()):
        raise InputError("gram: members of one cluster have different labels after a placement, or one that is not known")
    return dict(sorted(merged.items()))
