"""Trials of one property in one run, and their significance: clients of one group resemble each other in more than that property.

A score that merely separates groups is right, or wrong, about a property for whole groups at a time. So if whole groups share the property,
the groups are the trials. If the property differs within groups, clients are compared within their group only. With two or three groups, a
run is little more than the toss of a coin. The groups are the true ones: this is the scorer's side, not the attacker's.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from ...types import Array
from ..membership.member_scores import auc_interval

__all__ = ["PropertyTrials", "share_between", "chance_dealt", "interval_over_groups", "is_toss", "score", "trials_of"]

DEALS = 4000
FEW_GROUPS = 3
LITTLE = 0.1
"""A share of the variance between groups that clients dealt to them at random have as well."""


@dataclass(frozen=True, eq=False)
class PropertyTrials:
    """Scores (k, t) of clients, or of groups where the property is theirs; who has it (t,), and within what they are compared (t,)."""

    scores: Array
    has: Array
    blocks: Array


def score(scores: Array, has: Array) -> float:
    """The AUC of scores (m,) for who has the property (m,) bool."""
    return float(stats.mannwhitneyu(scores[has], scores[~has]).statistic) / (int(has.sum()) * int((~has).sum()))


def share_between(values: Array, groups: Array) -> float:
    """The share of the variance of values (m,) that is between groups (m,); 0 where they do not vary."""
    total = float(np.var(values))
    means = np.array([np.mean(values[groups == group]) for group in groups])
    return float(means.var()) / total if total > 0 else 0.0


def trials_of(scores: Array, has: Array, groups: Array) -> PropertyTrials:
    """Of clients with scores (k, m), who have the property (m,), in true groups (m,); groups go by their mean scores and majority."""
    names = np.unique(groups)
    shares = np.array([has[groups == name].mean() for name in names])
    if share_between(has, groups) < 0.5 or len(set(shares > 0.5)) < 2:
        return PropertyTrials(scores, has, groups)
    means = np.stack([scores[:, groups == name].mean(axis=1) for name in names], axis=1)
    return PropertyTrials(means, shares > 0.5, np.zeros(len(names), np.int64))


def chance_dealt(scores: Array, has: Array, blocks: Array, rng: np.random.Generator) -> float:
    """How probable it is that scores (t,) are as large where `has` (t,) when these are dealt again within each of `blocks` (t,)."""
    statistic, dealt = 0.0, np.zeros(DEALS)
    for block in np.unique(blocks):
        ranks, having = stats.rankdata(scores[blocks == block]), has[blocks == block]
        statistic += float(ranks[having].sum())
        dealt += rng.permuted(np.tile(ranks, (DEALS, 1)), axis=1)[:, having].sum(axis=1)
    return float((1 + (dealt >= statistic - 1e-9).sum()) / (1 + DEALS))


def is_toss(has: Array, groups: Array) -> bool:
    """Whether all that one run can be right or wrong about is which of two or three groups (m,) has the property (m,), or mostly that."""
    return bool(1 < len(np.unique(groups)) <= FEW_GROUPS and share_between(has, groups) > LITTLE)


def interval_over_groups(scores: Array, has: Array, groups: Array) -> tuple[float, float]:
    """A 95 % interval of the AUC in one run: clients of a group count as fewer, as far as they share score and property.

    Kish's design effect, with the shares of variance between groups as correlations; these are rather too large than too small.
    """
    size = len(has) / len(np.unique(groups))
    effect = 1 + (size - 1) * share_between(scores, groups) * share_between(has, groups)
    return auc_interval(score(scores, has), *(max(1.0, float(side.sum()) / effect) for side in (has, ~has)))
