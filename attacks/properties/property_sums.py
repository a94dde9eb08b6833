"""Properties of single clients from mean updates over cohorts that change: all sums of a run are one system of equations.

A mean update is read as the share of its members' samples that have the property, by a regression on simulated clients that train from the
same model. The regression is linear, so its reading of a mean is the mean of the members' readings. Their shares do not change between
rounds, so these are equations that `linear_evidence` solves, as for labels (`label_sums`; Lam et al. 2021). Single updates among the means
are sums over one client. Colluders' shares are known.

What it proves: a minimum cohort size hides a client's property in one sum, not in many sums over different cohorts. Limits: members
that no sum separates get one guess. If no sum separates any members, nothing is attempted here.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b

import numpy as np

from ..evidence.coalition import weights_of
from ..evidence.linear_evidence import equations, shares_of_terms
from ..evidence.updates import ClientStep
from ..figures.leakage import Case, Prior
from ..membership.membership_shadows import once
from .property_clients import FEWEST_PRETENDED, SECONDS, pretended_count, pretended_updates, seconds_each, update_features
from .property_regression import Fit, fit
from .property_statements import Statement

__all__ = ["distinct", "shares_in_sums", "tells_apart"]

LEAST = 1e-3
"""A regression's error is taken to be this at least."""
_KEPT: dict[str, Fit] = {}
MOST_KEPT = 1024
"""Regressions; see `once`."""


def distinct(steps: Mapping[int, Sequence[ClientStep]], case: Case) -> list[ClientStep]:
    """The sums among the steps of clients, each once, in order of rounds; as many of the first as the budget allows to be read."""
    sums = sorted({id(step.update): step for client_steps in steps.values() for step in client_steps}.values(), key=lambda step: step.round)
    return sums[: max(1, int(SECONDS / seconds_each(case) / FEWEST_PRETENDED))]


def tells_apart(sums: Sequence[ClientStep]) -> bool:
    """Whether some sum has one client and lacks another one that is in a sum with it, or is over one client alone."""
    clients = {client for sum_ in sums for client in sum_.members}
    columns = {client: frozenset(i for i, sum_ in enumerate(sums) if client in sum_.members) for client in clients}
    return any(len(sum_.members) == 1 or len({columns[client] for client in sum_.members}) > 1 for sum_ in sums)


def shares_in_sums(sums: Sequence[ClientStep], statement: Statement, case: Case, own: Mapping[int, float]) -> dict[int, float]:
    """The share of the property in each member's samples, but of clients of which it is known (`own`)."""
    prior, count = case.prior, pretended_count(case, len(sums))
    fits = [once(_KEPT, MOST_KEPT, _key(sum_, statement, prior, count), partial(_fit, sum_, statement, prior, count)) for sum_ in sums]
    rows: list[dict[int, float]] = []
    readings: list[tuple[float, float]] = []
    deviations: list[float] = []
    for sum_, regression in zip(sums, fits, strict=True):
        weights = weights_of(prior, sum_.members)
        row = {client: weight / sum(weights.values()) for client, weight in weights.items()}
        read = float(regression.read(update_features(sum_.update[None], prior))[0])
        rows.append(row)
        readings.append((read, 1 - read))
        deviations.append(max(regression.deviation, LEAST) * float(np.linalg.norm(list(row.values()))))
    known = {client: np.array([share, 1 - share]) for client, share in own.items()}
    system, values = equations(rows, deviations).less(known, np.array(readings))
    estimates = shares_of_terms(system, values, np.array([statement.share, 1 - statement.share]))
    return dict(zip(system.terms, estimates[:, 0].tolist(), strict=True))


def _fit(sum_: ClientStep, statement: Statement, prior: Prior, count: int) -> Fit:
    made = pretended_updates(statement, prior, count, sum_)
    return fit(made.features, made.share)


def _key(sum_: ClientStep, statement: Statement, prior: Prior, count: int) -> str:
    """Of what a regression depends on: adversaries of one run share it."""
    words = f"{statement}|{sum_.round}|{sum_.local}|{count}|{prior.seed}|{prior.config}|{sorted(prior.samples_per_client.items())}"
    digest = blake2b(words.encode(), digest_size=16)
    for part in (sum_.start, prior.x, prior.y, *sum_.beside.values()):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()
