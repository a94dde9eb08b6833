"""Numbers of samples from weights: those that clients send in the open, and the totals of secure sums over changing cohorts.

Under `weights = "examples"` a client's weight in a mean is its number of samples. In the clear it travels beside the update. A secure sum
shows its server the total over the cohort, so that totals over changing cohorts are linear equations of numbers that do not change
of which each is at least the public least weight of the sum. A client with fewer samples counts as that, so its own number does not follow.

Source: textbook linear equations; Pasquini et al. 2022 and So et al. 2023 on participation over rounds.

What it proves: a secure sum weighted by samples tells the number of samples of single clients. What it does not: anything of sums in which
all clients weigh the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from ...contract.transcript import payload_rows
from ...protocols.secagg.vectors import InputTerms
from ..adversary import AdversaryView
from ..evidence.linear_evidence import equations
from ..evidence.opened_sums import opened_sums

__all__ = ["Total", "counts_in", "counts_of_totals", "totals_in"]

HEAVY = 1e3
"""Weight of the totals beside the pull to the same number for everyone."""


@dataclass(frozen=True)
class Total:
    """The total weight of the `members` of one sum, each of whom counts as `least` at least."""

    members: tuple[int, ...]
    weight: float
    least: float = 1.0


def totals_in(view: AdversaryView) -> list[Total]:
    """The totals of weights in a view that are numbers of samples: of single clients in the clear, and of secure sums over known clients.

    Each cohort once.
    """
    totals: dict[tuple[int, ...], Total] = {}
    for message in view.select("mean"):
        weights = (message.payload or {}).get("weight")
        if weights is not None and weights.ndim == 1 and len(weights) == len(payload_rows(message)):
            single = [Total((int(client),), float(weight)) for client, weight in zip(payload_rows(message), weights, strict=True)]
            totals |= {total.members: total for total in single}
    secure = view.protection.secure and not view.shared_noise
    for opened in opened_sums(view, wanted=_is_by_samples) if secure else ():
        totals[opened.sum.survivors] = Total(opened.sum.survivors, opened.sum.weight(), opened.sum.terms.least_weight)
    return list(totals.values())


def _is_by_samples(terms: InputTerms) -> bool:
    """Whether members of a sum of one group weigh unequally, by their numbers of samples."""
    return 0 < terms.least_weight < terms.weight_limit and not terms.blocks


def counts_in(view: AdversaryView, everybody: float) -> dict[int, float]:
    """The number of samples of each client that a view has weights of; as `counts_of_totals`."""
    return counts_of_totals(totals_in(view), everybody)


def counts_of_totals(totals: Sequence[Total], everybody: float) -> dict[int, float]:
    """The number of samples of each client from totals over cohorts; as near to `everybody` as totals and least weights let them."""
    if not totals:
        return {}
    system = equations([dict.fromkeys(total.members, 1.0) for total in totals])
    least = min(total.least for total in totals)
    n = len(system.terms)
    rows = np.vstack([HEAVY * system.coefficients, np.eye(n)])
    beyond = np.array([total.weight - least * len(total.members) for total in totals])
    values = nnls(rows, np.append(HEAVY * beyond, np.full(n, everybody - least)), maxiter=30 * n)[0] + least
    return dict(zip(system.terms, values.tolist(), strict=True))
