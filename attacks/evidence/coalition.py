"""What colluding clients know of sums: their own updates, which they subtract, and who was in the sums that they took part in.

Source: textbook; a minimum cohort size of m clients is one of m − N clients to a server with N of them in the sum. No transcript holds a
client's input to a secure sum, and the secrets of a run folder hold no updates. But a colluding client has its model, data and batches, so
it trains again and gets the same update, where the update is plain local training. The remaining sums are linear equations
(`linear_evidence`); updates that the equations determine are taken out one by one.

A client by itself has the sums of its own cluster, from two models that it was sent in successive rounds. A secure sum names its members.
Other sums do not name them, and the attack assumes that the client knows the members (`cohorts_of`): a few organisations know each other.

A mean has the rounding errors of two models, which travel as floats, and those of the levels of a secure sum (`deviating`). A value that is
solved from several means has the uncertainty of all of them.

Not attacked: runs in which a client's update holds more than plain local training, by the recorded tasks (`LocalTraining.alone`); sums
whose model is not in the view (transformed sums, oblivious totals, models of which only a part travels); runs with `[privacy]`, whose noise
is not recorded.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...aggregation.secure_sums import least_weight
from ...engine import Engine, Streams, TaskInput
from ...errors import TrainingDiverged
from ...protocols.secagg.vectors import largest_levels
from ...types import Array, ClientData
from ..adversary import AdversaryView
from ..figures.leakage import Case, Prior
from .control_sums import sums_by_steps
from .linear_evidence import equations, partial_sums_of
from .local_training import trainings_in
from .sums import CohortSum, means_in, sums_in

__all__ = ["cohorts_assumed", "cohorts_of", "deviating", "known_means", "known_sums", "sums_of_others", "weights_of"]

EXACT = 1e-12
"""A deviation in place of 0, so that sums can be compared by theirs."""


def known_sums(case: Case, view: AdversaryView) -> list[CohortSum]:
    """The sums over named clients in a view of the case, without the coalition's part (`sums_of_others`)."""
    sums = [deviating(sum_, view, case.prior) for sum_ in sums_in(view, cohorts_of(case, view))]
    return sums_of_others(case, sums_by_steps(sums, view, case.prior))


def known_means(case: Case, view: AdversaryView, dimension: int) -> list[CohortSum]:
    """The mean updates (dimension,) in a view of the case, without the coalition's part."""
    means = [deviating(mean, view, case.prior) for mean in means_in(view, dimension, cohorts_of(case, view))]
    return sums_of_others(case, sums_by_steps(means, view, case.prior))


def cohorts_of(case: Case, view: AdversaryView) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """The members of sums by round and label, as far as a client is assumed to know them. Secure sums are left out: they name members."""
    if not cohorts_assumed(case) or view.is_server:
        return {}
    assert case.record is not None  # as `cohorts_assumed` found
    return {(sum_.round, sum_.label): sum_.members for sum_ in sums_in(case.record)}


def cohorts_assumed(case: Case) -> bool:
    """Whether the adversary is a client that does not learn the members of a sum, so that knowing them is an assumption."""
    protection = case.view.protection
    is_open = not protection.secure and protection.robust == "none"  # a robust rule makes no mean of the next model
    return case.view.adversary == "client" and case.record is not None and is_open


def weights_of(prior: Prior, clients: Sequence[int]) -> dict[int, float]:
    """The weights of clients in a sum over exactly these, up to a common factor.

    A secure sum counts a client with few samples as more. That is public, and taken as in a sum from which nobody dropped out.
    """
    if prior.config is None or prior.config.training.weights != "examples":
        return dict.fromkeys(clients, 1.0)
    least = least_weight(prior.config.protection, len(clients)) if prior.config.protection.secure else 0.0
    return {client: max(float(prior.samples_per_client[client]), least) for client in clients}


def sums_of_others(case: Case, sums: Sequence[CohortSum]) -> list[CohortSum]:
    """The sums without the coalition's part: members and mean are those of the others. Sums of colluders alone are left out.

    Sums of the same updates are taken apart as far as they determine smaller ones. The same for sums of the view and of the reference,
    since the colluders' training goes by the model that each sum began with.
    """
    plain = case.prior.config is not None and not case.prior.private
    if not plain or not all(training.alone for training in trainings_in(case.view).all):
        return list(sums)
    same: dict[Hashable, list[CohortSum]] = {}
    for place, sum_ in enumerate(sums):
        # a sum below the minimum cohort size leaves the model as it was
        has_value = bool(sum_.members) and sum_.mean is not None and sum_.start is not None and bool(sum_.mean.any())
        same.setdefault((sum_.round, sum_.start.tobytes()) if has_value and sum_.start is not None else place, []).append(sum_)
    return [part for same_values in same.values() for part in _parts(case, same_values)]


def deviating(sum_: CohortSum, view: AdversaryView, prior: Prior) -> CohortSum:
    """A sum of a view with the standard deviation of its mean: of two models rounded to floats, and of the levels of a secure sum.

    Stochastic rounding to levels has a variance of a quarter of a level at most. 0 where there is no mean, or no model.
    """
    if sum_.mean is None or sum_.start is None or sum_.local is None or not sum_.members:
        return sum_
    half = float(np.finfo(sum_.local.train.model.dtype).eps) / 2  # of a number, at most; evenly distributed
    rounded = half * float(np.sqrt(np.mean(sum_.start**2) * 2 / 3))
    if not view.protection.secure:
        return replace(sum_, deviation=rounded)
    asked, weights = view.protection.secure_sum, list(weights_of(prior, sum_.members).values())
    level = asked.clip / largest_levels(len(weights), asked.bits)
    if asked.max_weight:
        level *= asked.max_weight
    return replace(sum_, deviation=float(np.hypot(rounded, level * np.sqrt(len(weights)) / 2 / sum(weights))))


def _parts(case: Case, sums: Sequence[CohortSum]) -> list[CohortSum]:
    """What sums of the same updates say of others than the colluders."""
    first = sums[0]
    clients = sorted({client for sum_ in sums for client in sum_.members})
    own = [client for client in clients if client in case.view.coalition]
    if first.mean is None or not first.mean.any() or not (own or len(sums) > 1):
        return list(sums)
    updates = trained_again(case, own, first) if own else {}
    if updates is None:
        return list(sums)
    rows = [weights_of(case.prior, sum_.members) for sum_ in sums]
    totals = np.stack([sum_.mean * sum(row.values()) for sum_, row in zip(sums, rows, strict=True) if sum_.mean is not None])
    deviations = [max(sum_.deviation, EXACT) * sum(row.values()) for sum_, row in zip(sums, rows, strict=True)]
    parts = partial_sums_of(*equations(rows, deviations).less(updates, totals))
    return [replace(first, members=tuple(sorted(part.terms)), mean=part.value, deviation=part.deviation, stated=None) for part in parts]


def trained_again(case: Case, clients: Sequence[int], sum_: CohortSum) -> dict[int, Array] | None:
    """The updates (d,) of colluding clients in a sum; None where not all of them train a whole model to an end."""
    assert case.prior.config is not None  # checked by the caller
    if sum_.local is None or sum_.start is None or sum_.start.shape != (sum_.local.train.model.dimension,):
        return None
    train = replace(sum_.local.train, on_divergence="stop")
    vectors = {"model": sum_.start.astype(train.model.init(0).dtype)}
    inputs = []
    for client in clients:
        x, y = case.truth.data[client]
        inputs.append(
            TaskInput(ClientData(client, x, y, x[:0], y[:0]), vectors, {}, Streams(case.prior.config.run.seed, sum_.round, client))
        )
    try:
        results = Engine().run(train, inputs)
    except TrainingDiverged:
        return None
    return {client: np.asarray(result["update"], np.float64) for client, result in zip(clients, results, strict=True)}
