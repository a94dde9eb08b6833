"""Label shares of single clients from sums over changing cohorts: all sums of a run are one system of equations.

Source: Lam et al. 2021 ("Gradient disaggregation") for the participation matrix and constrained least squares. A sum's update is read as
label shares of its cohort (`label_readings`), by what clients of the attacker's own do from the same model. These shares are a weighted
mean of the members' shares, which do not change between rounds. So clients' shares solve P q = readings with q ≥ 0 and Σ q = 1
(`linear_evidence.shares_of_terms`). Each reading is weighted by how far an error of the update moves it. Clients that the sums do not
separate get their common shares.

What it proves: a minimum cohort size hides a client's labels in one sum, not in many sums over different cohorts. What it does not prove:
that equal cohorts hide labels. For this the figure has a power: the same sums, each without one member drawn at random, are attacked in the
same way (`planted`). The power is the share of these attacks that show a leak.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...engine.models import Model
from ...randomness import stream
from ...types import Array
from ..evidence.coalition import weights_of
from ..evidence.linear_evidence import Equations, equations, likeliest_penalty, shares_of_terms, solved
from ..evidence.noisy_shares import Readings, shares_of_members
from ..evidence.updates import ClientStep, local_of
from ..figures.leakage import Prior
from .label_readings import Reader, bias_span, is_learned, is_read_better, is_summed, reader_of, steps_scale, trained_reader
from .sparse_shares import sparse_shares

__all__ = ["SumRead", "distinct_sums", "noisy_shares_in", "planted", "shares_in", "sums_read", "words_of"]

PRETENDED, FEWEST, SECONDS = 200, 40, 60.0
"""So many clients of the attacker's own for each sum, fewer where they would take longer than so many seconds, none below the fewest."""
PASSES, DOUBLES = 1.0e5, 2.0e4
"""A second trains about so many samples; a model of so many parameters takes twice as long as one of none."""
MOST_SUMS, MOST_SUMS_LEARNED = 200, 24
"""Of a run, so many sums are one system; fewer where each needs clients of the attacker's own."""


@dataclass(frozen=True, eq=False)
class SumRead:
    """One sum: the `round`, its members' `weights`, the mean movement `moved` (size,) of what is read of the head, and how to read it.

    `scales` are how far a unit gradient carries each member.
    """

    round: int
    weights: Mapping[int, float]
    scales: Mapping[int, float]
    moved: Array
    reader: Reader

    @property
    def scale(self) -> float:
        """How far a unit gradient carries the mean."""
        return sum(weight * self.scales[client] for client, weight in self.weights.items()) / sum(self.weights.values())

    @property
    def portions(self) -> dict[int, float]:
        """What part of the shares that are read is each member's."""
        whole = self.scale * sum(self.weights.values())
        return {client: weight * self.scales[client] / whole for client, weight in self.weights.items()}

    @property
    def reading(self) -> Array:
        """Label shares (classes,) of the members together."""
        return self.reader.read(self.moved / self.scale)


def distinct_sums(steps: Mapping[int, Sequence[ClientStep]], prior: Prior) -> list[ClientStep]:
    """The sums among the steps of clients, each once, in order of rounds: the first `MOST_SUMS`, fewer where each is learned."""
    by_update = {id(step.update): step for client_steps in steps.values() for step in client_steps}
    distinct = sorted(by_update.values(), key=lambda step: step.round)
    learned = any(is_learned(local_of(step, prior)) for step in distinct)
    return distinct[: MOST_SUMS_LEARNED if learned else MOST_SUMS]


def sums_read(sums: Sequence[ClientStep], prior: Prior, model: Model) -> list[SumRead]:
    """How each sum is read. Where sums have noise of their own (`is_summed`) movements are kept as they are, for `noisy_shares_in`."""
    read, noisy, count = [], is_summed(prior), affordable_clients(sums, prior, model)
    if count and not all(is_read_better(step, prior, model, count) for step in (sums[0], sums[-1]) if step.stated is None):
        count = 0
    for step in sums:
        reader = Reader(np.asarray, is_scaled=True) if noisy else None
        if count and step.stated is None:
            reader = trained_reader(step, prior, model, count)
        reader = reader or reader_of(step, prior, model, prior.labels_per_client[step.members[0]])
        local, scales = local_of(step, prior), dict.fromkeys(step.members, 1.0)
        if reader.is_scaled:
            scales = {client: steps_scale(prior, client, local) for client in step.members}
        moved = step.update[reader.span or bias_span(model)]
        read.append(SumRead(step.round, weights_of(prior, step.members), scales, moved, reader))
    return read


def affordable_clients(sums: Sequence[ClientStep], prior: Prior, model: Model) -> int:
    """How many clients of the attacker's own train from the model of each sum; none where they would be too few, or no formula reads."""
    if is_summed(prior) or not sums or any(is_learned(local_of(step, prior)) for step in sums):
        return 0
    passes = sum(
        local_of(step, prior).train.epochs * float(np.mean([prior.samples_per_client[client] for client in step.members])) for step in sums
    )
    count = min(PRETENDED, int(SECONDS * PASSES / max(passes * (1 + model.dimension / DOUBLES), 1e-9)))
    return count if count >= FEWEST else 0


def shares_in(
    sums: Sequence[SumRead], known: Mapping[int, Array], centre: Array, labels: Mapping[int, int] | None = None
) -> dict[int, Array]:  # fmt: skip
    """Label shares (classes,) of every member but those `known`, around `centre` (classes,), the best guess without a view.

    With the number of `labels` that each client has, shares of clients that lack labels are sparse, so that fewer sums determine them.
    """
    system, readings = _system(sums).less(known, np.stack([sum_.reading for sum_ in sums]))
    if not system.terms:
        return {}
    penalty = likeliest_penalty(system, readings, centre)
    shares = shares_of_terms(system, readings, centre, penalty)
    if labels is not None and any(labels[client] < len(centre) for client in system.terms):
        counts = [labels[client] for client in system.terms]
        aims = np.asarray(readings, np.float64) / system.deviations[:, None]
        shares = sparse_shares(system.whitened, aims, counts, shares, penalty, stream(len(shares), "starts of sparse shares"))
    return dict(zip(system.terms, shares, strict=True))


def noisy_shares_in(sums: Sequence[SumRead], readings: Readings, known: Mapping[int, Array], centre: Array) -> dict[int, Array]:
    """As `shares_in`, from sums with noise and their `readings`, solved around the `centre` as far as the noise lets."""
    deviations = [float(np.sqrt(sum(portion**2 for portion in sum_.portions.values()))) for sum_ in sums]
    system = equations([sum_.portions for sum_ in sums], deviations)
    rest, rows = system.less({client: readings.system @ shares for client, shares in known.items()}, readings.rows)
    return dict(zip(rest.terms, shares_of_members(rest, replace(readings, rows=rows), centre), strict=True))


def _system(sums: Sequence[SumRead]) -> Equations[int]:
    return equations([sum_.portions for sum_ in sums], [sum_.reader.deviation for sum_ in sums])


def words_of(sums: Sequence[SumRead], known: Mapping[int, Array]) -> str:
    """How many sums there are, their rank, and how many clients they separate, for a note."""
    system, none = _system(sums).less(known, np.zeros((len(sums), len(next(iter(known.values()), ())))))
    n = len(system.terms)
    return (
        f"{len(sums)} sums as one system, rank {system.rank} of {n}, {int(solved(system, none).determined.sum())} of {n} clients separated"
    )


def planted(
    sums: Sequence[SumRead], single: Mapping[tuple[int, int], Array], span: slice | None, known: Mapping[int, Array], centre: Array,
    labels: Mapping[int, int], seed: int, times: int,
) -> Iterator[dict[int, Array]]:  # fmt: skip
    """Label shares found where every sum lacks one member drawn at random, so that no two cohorts need be alike; `times` of these.

    `single` are single members' updates (d,) by (round, client), as the unprotected run has them, and `span` is where the head's bias lies.
    Nothing is found where an update is missing.
    """
    if any((sum_.round, client) not in single for sum_ in sums for client in sum_.weights):
        return
    rng = stream(seed, "label sums without one member")
    for _ in range(times):
        yield shares_in([_without_one(sum_, single, span, rng) for sum_ in sums], known, centre, labels)


def _without_one(sum_: SumRead, single: Mapping[tuple[int, int], Array], span: slice | None, rng: np.random.Generator) -> SumRead:
    members = list(sum_.weights)
    if len(members) > 1:
        members.pop(int(rng.integers(len(members))))
    weights = {client: sum_.weights[client] for client in members}
    read = [single[sum_.round, client][sum_.reader.span or span] for client in members]
    return SumRead(sum_.round, weights, sum_.scales, np.average(read, axis=0, weights=list(weights.values())), sum_.reader)
