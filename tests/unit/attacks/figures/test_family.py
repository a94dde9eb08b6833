"""Figures of one audit judged together, and the verdict on each adversary."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cflpriv.attacks.figures.family import AIMED, judged_together
from cflpriv.attacks.figures.leakage import DEALS, Cell
from cflpriv.attacks.figures.significance import LEAST_SHOWN, MATCHINGS, RATE, CellStatus, chance_of_count
from cflpriv.attacks.figures.verdicts import verdicts_of
from cflpriv.attacks.membership.membership_audit import SWAPS


def figure(p: float | None, name: str = "label_inference", adversary: str = "server", **more: object) -> Cell:
    status: CellStatus = "leaks" if p is None or p < RATE else "at_baseline"
    made = Cell(name, adversary, "none", "label_set_accuracy", 0.9, 0.8, 1.0, 0.1, 1.0, status, p=p, note="a note")
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_strong_leak_stays_and_a_weak_one_among_many_does_not() -> None:
    cells = [figure(1e-6), figure(0.02), *[figure(0.5)] * 18]
    found, family = judged_together(cells)
    assert [one.status for one in found[:3]] == ["leaks", "inconclusive", "at_baseline"]
    assert (
        found[1].note
        == "a note; significant by itself (p = 0.02), but not after correction for the 20 figures tested in this audit (error rate 5.0%)"
    )
    assert family.as_json() == {
        "aimed": AIMED, "guarantees": {"aimed": 0.0, "tested": 0, "withdrawn": 0},
        "evidence": {"aimed": AIMED, "tested": 20, "withdrawn": 1},
    }  # fmt: skip


def test_one_figure_alone_is_judged_by_its_own_rate() -> None:
    (alone,), family = judged_together([figure(0.02)])
    assert alone.status == "leaks"
    assert family.evidence.withdrawn == 0


def test_exact_leaks_stay_and_are_not_counted() -> None:
    found, family = judged_together([figure(None, exact=True), *[figure(0.5)] * 30])
    assert found[0].status == "leaks"
    assert family.evidence.tested == 30


def test_a_leak_without_a_p_counts_with_the_rate_of_one_figure() -> None:
    assert judged_together([figure(None), figure(0.5)])[0][0].status == "leaks"
    assert judged_together([figure(None), *[figure(0.5)] * 2])[0][0].status == "inconclusive"


@pytest.mark.parametrize("draws", [DEALS, MATCHINGS, SWAPS])
def test_the_least_p_that_draws_can_give_stands_in_an_audit_of_one_run(draws: int) -> None:
    """Else every label set that was read right would be withdrawn among sixty figures."""
    assert judged_together([figure(1 / (1 + draws)), *[figure(0.5)] * 90])[0][0].status == "leaks"


def test_figures_without_anything_to_see_are_not_counted() -> None:
    empty = replace(figure(0.5), value=None, p=None, status="nothing_to_see")
    assert judged_together([figure(0.02), *[empty] * 50])[0][0].status == "leaks"


def bound(p: float) -> Cell:
    """A bound on ε, above the claim where its p is below .05."""
    return figure(p, "dp_audit", metric="run_epsilon", value=3.0, baseline=2.0, status="leaks" if p < AIMED else "at_baseline")


def test_an_alarm_about_a_guarantee_is_not_diluted_by_evidence() -> None:
    """Three bounds share 2.5 %, whatever else was tested; and they take from the evidence no more than half of its rate."""
    found, family = judged_together([bound(0.008), *[bound(0.6)] * 2, figure(4e-4), figure(5e-4), *[figure(0.5)] * 58])
    assert [one.status for one in found[:5]] == ["leaks", "at_baseline", "at_baseline", "leaks", "inconclusive"]
    assert family.as_json() == {
        "aimed": AIMED, "guarantees": {"aimed": AIMED / 2, "tested": 3, "withdrawn": 0},
        "evidence": {"aimed": AIMED / 2, "tested": 60, "withdrawn": 1},
    }  # fmt: skip
    weak = judged_together([bound(0.01), *[bound(0.6)] * 2, figure(0.5)])[0][0]
    assert weak.status == "inconclusive"
    assert weak.note.endswith("(p = 0.01), but not after correction for the 3 bounds on epsilon tested in this audit (error rate 2.5%)")


def test_a_part_that_is_alone_has_the_whole_rate() -> None:
    assert [one.status for one in judged_together([bound(0.049)])[0]] == ["leaks"]
    assert [one.status for one in judged_together([bound(0.049), figure(0.5)])[0]] == ["inconclusive", "at_baseline"]


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=12))
def test_no_figure_leaks_that_holm_does_not_reject(chances: list[float]) -> None:
    """Holm's adjusted p: the largest of (m − i) p_(i) so far."""
    found, _ = judged_together([figure(p) for p in chances])
    order = np.argsort(chances, kind="stable")
    adjusted = np.maximum.accumulate(np.array(chances)[order] * (len(chances) - np.arange(len(chances))))
    rejected = dict(zip(order.tolist(), (adjusted <= AIMED).tolist(), strict=True))
    for i, (one, p) in enumerate(zip(found, chances, strict=True)):
        assert (one.status == "leaks") == (rejected[i] and p < RATE)


@pytest.mark.slow
def test_audits_without_a_leak_err_together_at_the_rate_aimed_at() -> None:
    """2,000 audits of 40 independent figures and 3 bounds without a leak: more than 5 % + 3.1 deviations come one time in a thousand."""
    rng = np.random.default_rng(0)
    trials, wrong = 2000, 0
    for _ in range(trials):
        made = [*map(figure, rng.random(40)), *map(bound, rng.random(3))]
        wrong += any(one.status == "leaks" for one in judged_together(made)[0])
    assert wrong <= stats.binom.ppf(0.999, trials, AIMED)
    assert wrong > 0, "and the test is not idle"


# --- verdicts


def test_each_adversary_has_one_sentence_with_its_strongest_leak() -> None:
    weak = figure(1e-6, "membership", metric="model_lira_auc", value=0.6, baseline=0.5)
    both = verdicts_of([weak, figure(1e-6), figure(0.5, adversary="server+2")])
    assert [one.adversary for one in both] == ["server", "server+2"]
    assert both[0].sentence == (
        "the server learns which labels clients have and how many of each (label set accuracy 0.90, baseline 0.10); "
        "leaks also by membership"
    )
    assert "secure sums" in both[0].reduces
    assert both[1].sentence == "the server with 2 colluding clients was not seen to learn anything: 1 at baseline of 1 figure"
    assert both[1].reduces == ""


def test_without_a_leak_it_says_what_is_open() -> None:
    cells = [figure(0.5), figure(0.5, "imprint", status="not_attempted"), figure(0.5, "membership", status="inconclusive")]
    (found,) = verdicts_of(cells)
    assert found.sentence.endswith("1 inconclusive, 1 not attempted, 1 at baseline of 3 figures; open: imprint, membership")


def test_a_guarantee_that_does_not_hold_comes_first() -> None:
    broken = figure(1e-4, "dp_audit", metric="run_epsilon", value=3.0, baseline=2.0)
    (found,) = verdicts_of([figure(1e-6, value=1.0), broken])
    assert "(run epsilon 3.00, where 2.00 is claimed)" in found.sentence


@pytest.mark.parametrize(("metric", "value", "baseline", "lower"), [("histogram_l1", 0.1, 0.9, True), ("image_psnr_db", 38.0, 11.0, False)])
def test_errors_and_decibels_are_compared_with_what_there_is_to_know(metric: str, value: float, baseline: float, lower: bool) -> None:
    strong = figure(1e-6, "gradient_inversion", metric=metric, value=value, baseline=baseline, lower_is_better=lower)
    (found,) = verdicts_of([figure(1e-6, value=0.3), strong])
    assert found.attack == "gradient_inversion"


def test_counts_that_all_succeed_stand_in_an_audit() -> None:
    """Twelve label sets of twelve. The commonest set has four right: a sign test of the other eight would be withdrawn."""
    beside = np.repeat([1.0, 0.0], [4, 8])
    p = chance_of_count(np.ones(12), beside, 0.1)
    assert p == pytest.approx((4 / 12 + 0.1) ** 12)
    assert judged_together([figure(max(p, LEAST_SHOWN)), *[figure(0.5)] * 60])[0][0].status == "leaks"
    assert chance_of_count(beside, beside, 0.1) == 1.0
    assert chance_of_count(np.ones(2), np.zeros(2), 0.1) == 1.0


def test_counts_of_guesses_that_know_nothing_seldom_leak() -> None:
    """Guesses right with unequal probabilities whose mean is that of the guesses beside: at most 2.5 %, in 4,000 draws (3 deviations)."""
    rng = np.random.default_rng(0)
    false = 0
    for _ in range(4000):
        beside = (rng.random(10) < 0.3).astype(float)
        each = np.clip(beside.mean() + rng.uniform(-0.1, 0.1, 10), 0, 1)
        each += beside.mean() - each.mean()
        false += chance_of_count((rng.random(10) < each).astype(float), beside, 0.1) < RATE
    assert false / 4000 < RATE + 3 * np.sqrt(RATE / 4000)
