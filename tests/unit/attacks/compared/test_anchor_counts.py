"""Exact label counts: how probable they are without a view, where clients of a cluster are right or wrong together."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from cflpriv.attacks.compared.anchor_counts import exact_cell, right_counts
from cflpriv.attacks.figures.leakage import Cell
from cflpriv.attacks.figures.pooling import pooled
from cflpriv.attacks.figures.significance import RATE
from cflpriv.attacks.labels.label_inference import LabelGuess

CLIENTS, GROUPS, EACH, SEEDS = 20, 4, 30, 5
OF_GROUP = np.repeat(np.eye(GROUPS), 2, axis=1) / 2
"""The label shares (groups, classes) of four groups with two labels each."""


def figure(groups: np.ndarray, seed: int) -> Cell:
    """The cell of an attacker that takes client i for one of `groups[i]`, where it is one of i mod 4."""
    clients = list(range(CLIENTS))
    counts = {client: OF_GROUP[client % GROUPS] * EACH for client in clients}
    case: Any = SimpleNamespace(
        view=SimpleNamespace(adversary="server", coalition=()), protection="none", seed=seed, prior=SimpleNamespace(description="prior"),
        truth=SimpleNamespace(label_counts=counts),
    )  # fmt: skip
    mine, theirs = ({client: OF_GROUP[group] for client, group in enumerate(one)} for one in (groups, np.arange(CLIENTS) % GROUPS))
    return exact_cell(case, clients, LabelGuess(mine), LabelGuess(theirs))


@pytest.mark.slow
def test_groups_dealt_at_random_are_seldom_taken_for_a_leak() -> None:
    """200 runs: a p up to .05 in more than 21 and up to .5 in more than 122 comes less than one time in a thousand each.

    And 40 audits of five of them: more than 5 leaks at 2.5 %.
    """
    rng, cells = np.random.default_rng(0), []
    for seed in range(200):
        cells.append(figure(rng.permutation(np.arange(CLIENTS) % GROUPS), seed))
    for level in (0.05, 0.5):
        assert sum((one.p or 0.0) <= level for one in cells) <= stats.binom.ppf(0.999, len(cells), level)
    audits = [pooled(cells[start : start + SEEDS])[0] for start in range(0, len(cells), SEEDS)]
    assert sum(one.status == "leaks" for one in audits) <= stats.binom.ppf(0.999, len(audits), RATE)
    assert np.mean([one.value or 0.0 for one in cells]) > 0.2, "a quarter is right by chance, and the sign test took that for a leak"


def test_right_groups_leak_in_one_run() -> None:
    one = figure(np.arange(CLIENTS) % GROUPS, 0)
    assert (one.status, one.value, one.baseline, one.p) == ("leaks", 1.0, 1 / GROUPS, 1 / 2000)


def test_counts_are_right_where_all_of_them_are() -> None:
    truth: Any = SimpleNamespace(label_counts={0: np.array([3, 1]), 1: np.array([1, 5])})
    guess = LabelGuess({0: np.array([0.7, 0.3]), 1: np.array([0.2, 0.8])})
    assert right_counts(guess, truth, (0, 1)).tolist() == [[1.0, 0.0], [0.0, 1.0]]  # of six samples shares of .7 and .3 are 4 and 2
    assert right_counts(guess, truth, (1, 0)).tolist() == [[1.0, 0.0], [0.0, 1.0]]
