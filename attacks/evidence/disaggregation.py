"""Disaggregation and differencing: single clients' values from sums over cohorts.

Source: secure aggregation hides the terms of one sum, not what several sums determine together. A sum over one client is the client's
value. For a value that does not change between rounds (a count, a gradient at a fixed model, any signature) the sums are linear equations
with a row of zeros and ones for each cohort. A client whose unit vector lies in the row space is known exactly (`linear_evidence`; Pasquini
et al. 2022 and So et al. 2023 on participation over rounds). Clustering makes cohorts smaller, so fewer rounds suffice.

What it sees: the members of each sum, and the sums, which follow from the next model sent to a cluster (mean = new model − old model). An
oblivious sum hides the groups of its members, but not the members: there the sums are totals over the round's cohort. Where a protection
leaves single updates open, the attack ignores them.

A server with N colluding clients first subtracts their updates from a sum (`coalition`): then a sum over one other client is a single
value. A client subtracts its own update from the sums of its cluster, which follow from two models of successive rounds: in a cluster of
two, the other client's update is left.

What it proves: a minimum cohort size of m prevents sums over one client if fewer than m − 1 members collude. It does not prevent
differencing; fixed cohorts do, since their equations repeat. What it does not prove: updates at changing models are not static, so the sums
of two rounds give differences only as far as clients move alike. `label_inference` solves for the static part of updates, label histograms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ...types import Array
from ..figures.leakage import Case, Cell, cell, nothing
from .coalition import cohorts_assumed, known_sums, trained_again
from .linear_evidence import equations, solved
from .sums import CohortSum, oblivious_sizes
from .updates import public_model, unread, updates_in

__all__ = ["cells", "disaggregate"]

NAME = "disaggregation"
NOT_TAKEN_OFF = (
    "not attempted: this view has sums over one client and colluders; the transcript does not hold the colluders' updates, and only plain "
    "training without noise can be repeated"
)
EXACT = 1e-3
"""Relative error up to which a value counts as recovered: models travel in float32, and a mean is the difference of two of them."""


def disaggregate(cohorts: Sequence[Sequence[int]], sums: Array, clients: Sequence[int]) -> tuple[Array, Array]:
    """Values (n, d) of `clients` from the `sums` (m, d) over `cohorts`, if a client has the same value in all its sums.

    The second result (n,) marks the determined values; the other values are least-norm guesses.
    """
    rows = [dict.fromkeys(cohort, 1.0) for cohort in cohorts]
    system = equations([*rows, dict.fromkeys(clients, 0.0)])  # the last row names clients that are in no sum
    width = np.asarray(sums).shape[1]
    solution = solved(system, np.vstack([np.asarray(sums, np.float64), np.zeros((1, width))]))
    places = [system.terms.index(client) for client in clients]
    return solution.values[places], solution.determined[places]


def guess_single(sums: Sequence[CohortSum]) -> list[CohortSum]:
    """Sums over one client (or over one that does not collude, see `coalition.known_sums`), whose mean is its update."""
    return [sum_ for sum_ in sums if len(sum_.members) == 1 and sum_.mean is not None]


def score_single(
    guessed: Sequence[CohortSum], truth: Mapping[tuple[int, int], Array], clients: Sequence[int],
    again: Callable[[CohortSum], Array | None] = lambda sum_: None,
) -> Array:  # fmt: skip
    """1 for a client of which an update was recovered, to rounding, in any round.

    `truth` are the updates of the unprotected run, by (round, client). Where a sum was below the minimum cohort size its models are others;
    `again` gives what the client of a sum sent there, or None.
    """
    exact = set[int]()
    for sum_ in guessed:
        client = sum_.members[0]
        if client not in exact and (_is_same(sum_.mean, truth.get((sum_.round, client))) or _is_same(sum_.mean, again(sum_))):
            exact.add(client)
    return np.array([float(client in exact) for client in clients])


def _is_same(value: Array | None, real: Array | None) -> bool:
    if value is None or real is None or real.shape != value.shape:
        return False
    return bool(np.linalg.norm(value - real) <= EXACT * np.linalg.norm(real))


def _made_again(case: Case, sum_: CohortSum) -> Array | None:
    """The update of the only member of a sum, by its training from the model that it was sent; None where it holds more than that."""
    is_plain = case.prior.config is not None and not case.prior.private and sum_.local is not None and sum_.local.alone
    made = trained_again(case, sum_.members, sum_) if is_plain else None
    return None if made is None else made[sum_.members[0]]


def score_static(seen: Sequence[CohortSum], clients: Sequence[int]) -> tuple[Array, str]:
    """1 for a client whose value would be recovered if it were the same in all recorded sums; and what the cohorts look like."""
    sums = [replace(sum_, members=tuple(client for client in sum_.members if client in clients)) for sum_ in seen]
    sums = [sum_ for sum_ in sums if sum_.members]  # colluders know their own values and take them off, whatever their values are
    if not sums:
        return np.zeros(len(clients)), "no sum has members that do not collude"
    determined = _determined([sum_.members for sum_ in sums], clients)
    alone = sum(len(sum_.members) == 1 for sum_ in sums)
    rank = equations([dict.fromkeys(sum_.members, 1.0) for sum_ in sums]).rank
    words = f"{len(sums)} sums ({alone / len(sums):.0%} over one client), rank {rank} of {len(clients)}"
    if determined.all():
        numbers = sorted({sum_.round for sum_ in sums})
        needed = next(r for r in numbers if _determined([sum_.members for sum_ in sums if sum_.round <= r], clients).all())
        words += f", all known after round {needed}"
    return determined.astype(np.float64), words


def _determined(cohorts: Sequence[Sequence[int]], clients: Sequence[int]) -> Array:
    """Which clients' static values follow from sums over these cohorts, shape (n,) bool."""
    return disaggregate(cohorts, np.zeros((len(cohorts), 0)), clients)[1]


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Shares of clients: with an update recovered from a sum over it alone, and with a static value recovered by differencing."""
    view, reference = case.view, case.reference
    clients = sorted(set(case.truth.label_sets) - set(view.coalition))
    seen = [known_sums(case, recording) for recording in (view, reference)]
    dimension = 0 if case.prior.config is None else public_model(case.prior).dimension
    if not seen[1]:
        return [nothing(case, NAME, "singleton_exact", (unread(case.view, dimension) or "the algorithm makes no sums over clients"))], None
    if not seen[0]:
        why = "no sum over named clients is in this view"
        if oblivious_sizes(view):
            why = "the members of sums are hidden, and every round had a group below the minimum size, so totals are not known either"
        why = unread(case.view, dimension) or why
        return [nothing(case, NAME, metric, why) for metric in ("singleton_exact", "static_value_exact")], None
    blank = np.zeros(len(clients))
    truth = {key: value for key, value in updates_in(reference, dimension).items() if key[1] in clients}
    single = [score_single(guess_single(sums), truth, clients, partial(_made_again, case)) for sums in seen]
    static = [score_static(sums, clients) for sums in seen]
    figures = []
    reference_words = "unprotected: the same cohorts' sums in the open, without a minimum cohort size"
    if oblivious_sizes(view):
        reference_words = f"sums here are totals over all participants, since their groups are hidden; {reference_words}"
    here, there = static[0][1], static[1][1]
    beside = " and colluders, who subtract their own updates" if view.coalition else ""
    if cohorts_assumed(case):
        reference_words = f"assumed: a client knows the members of its cluster; {reference_words}"
    for metric, observed, twin, why, note in (
        (
            "singleton_exact", single[0], single[1], f"no sum was over one client{beside}, even without a minimum cohort size",
            f"a client's update, from a sum over the client alone{beside and f', or over the client{beside}'}",
        ),
        (
            "static_value_exact", static[0][0], static[1][0], f"cohorts distinguish no client, even without a minimum cohort size: {there}",
            f"a value that a client would send unchanged in every sum, by differencing; here {here}; without a minimum cohort size {there}",
        ),
    ):  # fmt: skip
        if metric == "static_value_exact" and case.prior.private:
            noise = "not attempted: sums carry the noise of [privacy], no value comes out exactly; what differencing leaves is not measured"
            figures.append(nothing(case, NAME, metric, noise))
            continue
        if metric == "singleton_exact" and not observed.any() and any(_is_left(sum_, view.coalition) for sum_ in seen[0]):
            figures.append(nothing(case, NAME, metric, NOT_TAKEN_OFF))
            continue
        if not observed.any() and not twin.any():  # a proof all the same: who is in the sums decides it
            note = why
        made = cell(case, NAME, metric, observed, blank, twin, margin=0.0, share=True, note=f"{note}; {reference_words}; baseline 0")
        figures.append(replace(made, exact=True, power=None, status="leaks" if observed.any() else "at_baseline"))
    return figures, None


def _is_left(sum_: CohortSum, coalition: Sequence[int]) -> bool:
    """Whether a sum is over one client and colluders whose own updates were not taken off."""
    others = set(sum_.members) - set(coalition)
    return len(others) == 1 < len(sum_.members)
