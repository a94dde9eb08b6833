"""Disaggregation and differencing: single clients' values from sums over cohorts.

Source: secure aggregation hides what is in a sum, not what sums say together. A sum over one client is its value. For a value that does not
change between rounds (a count, a gradient at a fixed model, any signature) the sums are linear equations with a row of zeros and ones for
each cohort; a client whose unit vector lies in their row space is known exactly (Pasquini et al. 2022 and So et al. 2023 on
participation over rounds). Clustering makes cohorts smaller, so fewer rounds do.

What it sees: who was in which sum, and the sums, which the next model sent to a cluster tells (mean = new model − old model). Single
updates, where a protection leaves these open, are not looked at: there the sums are beside the point.

What it proves: a floor stops sums over one client and does not stop differencing; fixed cohorts do, since their equations repeat. What it
does not: updates at changing models are not static; two rounds' sums give their differences only as far as clients move alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..randomness import stream
from ..types import Array
from .adversary import AdversaryView
from .label_inference import models_sent, public_model, updates_in
from .leakage import Case, Cell, cell, nothing

__all__ = ["CohortSum", "cells", "disaggregate", "sums_in"]

NAME = "disaggregation"
EXACT = 1e-3
"""Relative error up to which a value counts as recovered: models travel in float32, and a mean is the difference of two of them."""
SUMS = ("update", "blind update", "secagg Masked")


def disaggregate(cohorts: Sequence[Sequence[int]], sums: Array, clients: Sequence[int]) -> tuple[Array, Array]:
    """Values (n, d) of `clients` from the `sums` (m, d) over `cohorts`, if each client has the same value in all of them.

    Also gives which of them are determined, shape (n,) bool; the rest are least-norm guesses.
    """
    place = {client: i for i, client in enumerate(clients)}
    member = np.zeros((len(cohorts), len(clients)))
    for row, cohort in enumerate(cohorts):
        member[row, [place[client] for client in cohort]] = 1.0
    inverse = np.linalg.pinv(member)
    determined = np.abs(np.diag(inverse @ member) - 1.0) < 1e-8
    return np.asarray(inverse @ np.asarray(sums, np.float64)), determined


@dataclass(frozen=True, eq=False)
class CohortSum:
    """One sum: its round, who was in it, and the mean, where two models tell it."""

    round: int
    members: tuple[int, ...]
    mean: Array | None = None


def sums_in(view: AdversaryView) -> list[CohortSum]:
    """The sums over named cohorts, in order; those of which the members are not known are left out."""
    sums: list[CohortSum] = []
    current: dict[str, Array] = {}
    waiting: dict[str, tuple[int, Array]] = {}
    for message in view.messages:
        if message.verb == "compute" and message.payload is not None:
            for name, model in models_sent(view, message).items():
                if name in waiting:
                    place, start = waiting.pop(name)
                    if model.shape == start.shape:
                        sums[place] = replace(sums[place], mean=model - start)
                current[name] = model
        if message.verb == "mean" and message.kind in SUMS:
            for label, members in _groups(message.clients, message.context):
                name = f"model/{label}" if f"model/{label}" in current else "model"
                if name in current and name not in waiting:
                    waiting[name] = (len(sums), current[name])
                sums.append(CohortSum(message.round, members))
    return sums


def _groups(clients: tuple[int, ...], context: object) -> list[tuple[int, tuple[int, ...]]]:
    """The cohorts of one message by label; none where it is not said who is in which."""
    assert isinstance(context, dict)  # a message's
    if "group" in context:
        return [(int(context["group"]), clients)]
    if "labels" not in context or len(context["labels"]) != len(clients):
        return []
    labels = sorted({int(label) for several in context["labels"] for label in several})
    return [(label, tuple(c for c, several in zip(clients, context["labels"], strict=True) if label in several)) for label in labels]


def guess_single(sums: Sequence[CohortSum]) -> dict[tuple[int, int], Array]:
    """Updates by (round, client), from sums over one client."""
    return {(one.round, one.members[0]): one.mean for one in sums if len(one.members) == 1 and one.mean is not None}


def score_single(guessed: dict[tuple[int, int], Array], truth: dict[tuple[int, int], Array], clients: Sequence[int]) -> Array:
    """1 for a client of which an update was recovered, to rounding, in any round."""
    found = set()
    for (number, client), value in guessed.items():
        real = truth.get((number, client))
        if real is not None and real.shape == value.shape and np.linalg.norm(value - real) <= EXACT * np.linalg.norm(real):
            found.add(client)
    return np.array([float(client in found) for client in clients])


def score_static(seen: Sequence[CohortSum], clients: Sequence[int], seed: int) -> tuple[Array, str]:
    """1 for a client whose value would be recovered if it were the same in all recorded sums; and what the cohorts look like."""
    sums = [replace(one, members=tuple(client for client in one.members if client in clients)) for one in seen]
    sums = [one for one in sums if one.members]  # colluders know their own values and take them off
    if not sums:
        return np.zeros(len(clients)), "no sum has known members"
    values = stream(seed, "static values").normal(size=(len(clients), 4))  # any will do: the answer depends on cohorts alone
    place = {client: i for i, client in enumerate(clients)}
    totals = np.stack([values[[place[client] for client in one.members]].sum(axis=0) for one in sums])
    made, determined = disaggregate([one.members for one in sums], totals, clients)
    right = np.linalg.norm(made - values, axis=1) <= 1e-6 * np.linalg.norm(values, axis=1)
    alone = sum(len(one.members) == 1 for one in sums)
    member = np.array([[client in one.members for client in clients] for one in sums], dtype=np.float64)
    words = f"{len(sums)} sums ({alone / len(sums):.0%} over one client), rank {np.linalg.matrix_rank(member)} of {len(clients)}"
    if right.all():
        needed = next(r for r in sorted({one.round for one in sums}) if _all_known([s.members for s in sums if s.round <= r], clients))
        words += f", all known after round {needed}"
    return (right & determined).astype(np.float64), words


def _all_known(cohorts: Sequence[Sequence[int]], clients: Sequence[int]) -> bool:
    return bool(disaggregate(cohorts, np.zeros((len(cohorts), 1)), clients)[1].all())


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Shares of clients: with an update recovered from a sum over it alone, and with a static value recovered by differencing."""
    view, reference = case.view, case.reference
    clients = sorted(set(case.truth.label_sets) - set(view.coalition))
    seen = [sums_in(one) for one in (view, reference)]
    if not seen[1]:
        return [nothing(case, NAME, "singleton_exact", "the algorithm makes no sums over clients")], None
    blank = np.zeros(len(clients))
    config = case.prior.config
    dimension = 0 if config is None else public_model(case.prior).dimension
    truth = {key: value for key, value in updates_in(reference, dimension).items() if key[1] in clients}
    single = [score_single(guess_single(one), truth, clients) for one in seen]
    static = [score_static(one, clients, case.seed) for one in seen]
    figures = []
    reference_words = "unprotected: the same cohorts' sums in the open, without a floor"
    here, there = static[0][1], static[1][1]
    for metric, mine, theirs, why, note in (
        (
            "singleton_exact", single[0], single[1], "no sum was over one client, even without a floor",
            "a client's update, from a sum over it alone",
        ),
        (
            "static_value_exact", static[0][0], static[1][0], f"cohorts tell no client apart, even without a floor: {there}",
            f"a value that a client would send unchanged in every sum, by differencing; here {here}; without a floor {there}",
        ),
    ):  # fmt: skip
        if not mine.any() and not theirs.any():
            figures.append(nothing(case, NAME, metric, why))
            continue
        made = cell(case, NAME, metric, mine, blank, theirs, margin=0.0, share=True, note=f"{note}; {reference_words}; baseline 0")
        figures.append(replace(made, exact=True, status="leaks" if mine.any() else "at_baseline"))
    return figures, None
