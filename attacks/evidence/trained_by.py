"""Who trained what a mean update shows: for scoring alone, never for an attack."""

from collections.abc import Sequence

from ..adversary import AdversaryView
from ..figures.leakage import Case
from .sums import CohortSum, oblivious_sizes, sums_in

__all__ = ["trained_by"]


def trained_by(case: Case, view: AdversaryView, means: Sequence[CohortSum]) -> list[list[int]]:
    """For each mean the clients whose updates are in it, once for each round; nobody where that is not known.

    A mean of one model of all clients, in rounds before there were clusters, is of every later cluster's model.
    """
    members = _cohorts(case, view)
    labels = {number: {label for round, label in members if round == number} for number, _ in members}
    people = []
    for mean in means:
        named = list[int]()
        for number in range(mean.round, mean.round + mean.sums(view)):
            label = mean.label if mean.label in labels.get(number, ()) or len(labels.get(number, ())) != 1 else min(labels[number])
            named += members.get((number, label), ())
        people.append(named)
    return people


def _cohorts(case: Case, view: AdversaryView) -> dict[tuple[int, int], tuple[int, ...]]:
    """Who was in the sum of each cluster, by round and label.

    Where sums are oblivious no message says so. In the first round it is as without protection, since clients choose among the same
    models; later ones are not scored, nor are choices with noise.
    """
    record = case.reference if view is case.reference else case.record or case.view
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    hidden = bool(oblivious_sizes(record)) or record.protection.sums.oblivious
    if hidden and case.prior.private:
        return {}
    for sum_ in sums_in(case.reference if hidden else record):
        if not hidden or sum_.round == 0:
            known.setdefault((sum_.round, sum_.label), sum_.members)
    return known
