"""How one run's figures become a status and an interval, and several runs' figures one: simulated scores, of which the truth is known."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cflpriv.attacks.adversary import AdversaryView
from cflpriv.attacks.figures import leakage
from cflpriv.attacks.figures.leakage import Cell, cell, chance_of_deals, dealt_at_random, grouping_accuracy, nothing
from cflpriv.attacks.figures.pooling import pooled
from cflpriv.attacks.figures.significance import ENOUGH, RATE, chance, chance_of_matching, interval, p_words, power, t_chance, t_power
from cflpriv.randomness import stream
from cflpriv.types import Array

CLIENTS, SEEDS = 20, 5


def figure(mine: Array, blank: Array, seed: int = 0, metric: str = "label_set_accuracy", margin: float = 0.1, **more: Any) -> Cell:
    """The cell of scores beside a reference that always works."""
    case: Any = SimpleNamespace(view=AdversaryView("server", (), {}), has_updates=False, protection="none", seed=seed)
    better = -1.0 if more.get("lower_is_better") else 1.0
    return cell(case, "attack", metric, mine, blank, blank + better, margin=margin, **more)


def share(of: float, seed: int, base: float = 0.1) -> Cell:
    """A share of clients whose label set is found, and of those who have the popular one."""
    mine = (np.arange(CLIENTS) < round(of * CLIENTS)).astype(float)
    blank = (np.arange(CLIENTS) >= CLIENTS - round(base * CLIENTS)).astype(float)
    case: Any = SimpleNamespace(view=AdversaryView("server", (), {}), has_updates=False, protection="none", seed=seed)
    ones, zeros = np.ones(CLIENTS), np.zeros(CLIENTS)
    return cell(case, "attack", "label_set_accuracy", mine, blank, ones, margin=0.1, reference_blank=zeros, share=True)


def shares(values: Sequence[float]) -> Cell:
    (one,) = pooled([share(value, seed) for seed, value in enumerate(values)])
    return one


def bare(one: Cell) -> Cell:
    """A figure whose run has a rule of its own, so that only its status is known."""
    return replace(one, p=None)


@given(st.floats(0.0, 1.0, exclude_min=True))
def test_a_p_is_printed_no_smaller_than_a_test_can_promise(p: float) -> None:
    relation, number = p_words(p).split()[1:]
    assert relation == ("<" if p < 1e-4 else "=")
    assert float(number) >= 1e-4
    assert relation == "<" or float(number) == pytest.approx(p, rel=0.06)


# --- leaks of single runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        (0.6, 0.1, 0.1, 0.1, 0.1),  # the recorded run
        (0.95, 0.95, 0.0, 0.7, 0.7),
        (0.1, 0.1, 0.1, 0.9, 0.1),  # a fresh one
        (0.6, 0.1),
        (0.1, 0.9),
    ],
)
def test_a_run_that_leaks_is_a_leak_whatever_others_do(values: tuple[float, ...]) -> None:
    assert shares(values).status == "leaks"


def test_the_note_names_the_runs_that_leak_which_the_mean_hides() -> None:
    assert shares((0.6, 0.1, 0.1)).note == "; 1 of 3 seeds leak by themselves, the recorded run (0.600) among them"
    assert shares((0.1, 0.1, 0.9)).note == "; 1 of 3 seeds leak by themselves, the recorded run not among them"
    assert shares((0.9, 0.9, 0.9)).note == shares((0.1, 0.1, 0.1)).note == ""


def test_a_run_that_leaks_at_its_own_rate_only_is_no_leak_among_several_and_not_at_baseline_either() -> None:
    """9 wins to 2 losses: p = .033; 8 to 1: .020, which is above half the rate."""
    weak = share(0.4, 0, 0.05)
    assert RATE / 2 < (weak.p or 0.0) < RATE
    assert weak.status == "leaks"
    others = [share(0.05, seed, 0.05) for seed in range(1, SEEDS)]
    assert pooled([weak])[0].status == "leaks"
    assert pooled([weak, *others])[0].status == "inconclusive"
    assert pooled([weak, others[0]])[0].status == "inconclusive"


@pytest.mark.parametrize(("leaks", "seeds", "status"), [(1, 5, "inconclusive"), (2, 5, "leaks"), (2, 3, "leaks"), (2, 10, "inconclusive")])
def test_runs_with_rules_of_their_own_are_counted(leaks: int, seeds: int, status: str) -> None:
    """At .025 each, two of five are called leaks one time in 170, two of ten one in 41."""
    values = [0.6] * leaks + [0.1] * (seeds - leaks)
    assert pooled([bare(share(value, seed)) for seed, value in enumerate(values)])[0].status == status


def test_exact_figures_need_one_success_above_their_margin() -> None:
    tiny = replace(share(0.0, 0), value=0.04, margin=0.05, exact=True, status="at_baseline")
    assert pooled([tiny] * 5)[0].status == "at_baseline"
    assert pooled([*[tiny] * 4, replace(tiny, value=0.67)])[0].status == "leaks"


def test_all_seeds_together_show_what_none_shows_alone() -> None:
    rng = np.random.default_rng(0)
    weak = [figure(rng.normal(0.5, 1.0, CLIENTS), np.zeros(CLIENTS), seed, "image_psnr_db") for seed in range(10)]
    assert min(one.p or 0.0 for one in weak) > RATE / 4 / 10
    assert pooled(weak)[0].status == "leaks"


# --- no leak ------------------------------------------------------------------------------------------------------------------------


def alarms(draw: Any, trials: int) -> int:
    """How many of so many audits of five seeds without a leak are called one."""
    rng = np.random.default_rng(20)
    return sum(pooled([draw(rng, seed) for seed in range(SEEDS)])[0].status == "leaks" for _ in range(trials))


def at_the_margin(rng: np.random.Generator, seed: int) -> Cell:
    return figure(rng.normal(0.1, 1.0, CLIENTS), np.zeros(CLIENTS), seed, "image_psnr_db")


def by_its_status(rng: np.random.Generator, seed: int) -> Cell:
    return bare(at_the_margin(rng, seed))


def coins(rng: np.random.Generator, seed: int) -> Cell:
    mine, blank = (rng.random((2, CLIENTS)) < 0.3).astype(float)
    return figure(mine, blank, seed, margin=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [at_the_margin, by_its_status, coins])
def test_several_runs_without_a_leak_are_called_one_no_more_often_than_one_run(draw: Any) -> None:
    """300 audits of five seeds at a rate of .025: more than 17 alarms come less than one time in a thousand."""
    trials = 300
    most = int(stats.binom.ppf(0.999, trials, RATE))
    assert alarms(draw, trials) <= most


@pytest.mark.parametrize("gains", [(0.5,), (-0.5,), (0.5, -0.5), (0.5,) * 5, (-0.3, -0.4, 0.5, -0.5, -0.4)])
def test_fewer_than_six_tosses_of_a_coin_are_open_whichever_way_they_fell(gains: Sequence[float]) -> None:
    """The reference works, so no run says that the attack fails there."""
    tossed = [
        replace(share(0.5, seed), value=0.5 + gain, baseline=0.5, reference=1.0, reference_baseline=0.5, margin=0.05, p=0.5, coin=True,
                status="not_validated")
        for seed, gain in enumerate(gains)
    ]  # fmt: skip
    (one,) = pooled(tossed)
    assert one.status == "inconclusive"
    assert "6 seeds have to agree" in one.note
    (failing,) = pooled([replace(cell, reference=0.5) for cell in tossed])
    assert failing.status == "not_validated"
    assert "seeds have to agree" not in failing.note


def test_at_baseline_says_that_the_gain_is_surely_within_the_margin() -> None:
    rng = np.random.default_rng(1)
    wide = [figure(rng.normal(0.0, 1.0, CLIENTS), np.zeros(CLIENTS), seed, "image_psnr_db", 0.0) for seed in range(SEEDS)]
    tight = [replace(one, margin=0.5, reference=4.0) for one in wide]
    assert pooled(wide)[0].status == "inconclusive"
    assert pooled(tight)[0].status == "at_baseline"
    weak = pooled([replace(one, reference=1.0) for one in tight])[0]
    assert (weak.status, weak.power) == ("inconclusive", 0.0), "half of what the unprotected run gains is no leak here"
    assert shares([0.1] * SEEDS).status == "at_baseline"
    assert shares([0.0, 0.0, 0.35, 0.0, 0.3]).status == "inconclusive"


@pytest.mark.parametrize("found", [2, 3, 4, 5])
def test_one_run_is_not_at_its_baseline_with_a_gain_beyond_the_margin(found: int) -> None:
    """Some of twenty label sets are read where the baseline reads none: too few for a leak, too many to say that nothing leaks."""
    mine = (np.arange(CLIENTS) < found).astype(float)
    one = figure(mine, np.zeros(CLIENTS), share=True)
    assert (one.p or 0.0) > RATE
    assert (one.power or 0.0) > ENOUGH
    for several in ([one], [one, share(0.1, 1)]):
        assert pooled(several)[0].status == "inconclusive"
        assert f"; the gain may be {one.gain_high:.2f})" in pooled(several)[0].line()
    assert pooled([figure(np.zeros(CLIENTS), np.zeros(CLIENTS), share=True)])[0].status == "at_baseline"


def test_what_an_attack_leaves_open_in_a_run_stays_open_over_seeds() -> None:
    """Such as a fit that is bad (`gram_updates`), or an attacker that abstains (`key_recovery`)."""
    right = [share(0.1, seed) for seed in range(SEEDS)]
    assert pooled(right)[0].status == "at_baseline"
    assert pooled([replace(right[0], status="inconclusive"), *right[1:]])[0].status == "inconclusive"
    assert pooled([replace(share(0.9, seed), status="inconclusive") for seed in range(SEEDS)])[0].status == "leaks"
    exact = [replace(one, value=0.0, exact=True, status="inconclusive") for one in right]
    assert (pooled(exact)[0].status, pooled(exact)[0].power) == ("inconclusive", None)


def test_scores_that_are_no_numbers_are_at_no_baseline() -> None:
    broken = figure(np.full(CLIENTS, np.nan), np.zeros(CLIENTS), metric="image_psnr_db")
    assert (broken.status, broken.value) == ("not_attempted", None)
    assert "no numbers" in broken.note


def test_without_a_reference_that_works_nothing_is_claimed() -> None:
    seen = [share(value, seed) for seed, value in enumerate((0.1, 0.2, 0.1))]
    weak = [replace(one, reference=0.1, reference_baseline=0.1, status="not_validated") for one in seen]
    assert pooled(weak)[0].status == "not_validated"


# --- intervals ----------------------------------------------------------------------------------------------------------------------


def test_shares_that_do_not_vary_have_the_interval_of_their_counts() -> None:
    """Exact for all of 20: the least share of which all of 20 are found one time in 40."""
    plain = figure(np.ones(CLIENTS), np.zeros(CLIENTS), metric="group_accuracy")  # the attack did not say that these are counts
    assert plain.low == pytest.approx(0.025 ** (1 / CLIENTS))
    assert plain.high == 1.0
    none = shares([0.0] * SEEDS)
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / (SEEDS * CLIENTS)))


def test_what_does_not_vary_has_no_interval() -> None:
    flat = figure(np.full(4, 0.5), np.zeros(4), metric="mean_image_cosine")
    assert (flat.value, flat.low, flat.high) == (0.5, None, None)
    assert "[" not in flat.line()
    over = pooled([replace(flat, seeds=(seed,)) for seed in range(SEEDS)])[0]
    assert (over.value, over.low, over.high) == (0.5, None, None)
    assert over.status == "leaks"


LIMITS = {"histogram_l1": (0.0, 2.0), "group_accuracy": (0.0, 1.0), "mean_image_psnr_db": (-np.inf, 100.0), "relative_error": (0.0, np.inf)}


@pytest.mark.slow
@given(st.sampled_from(sorted(LIMITS)), st.lists(st.floats(0.0, 1.0), min_size=3, max_size=6))
def test_intervals_hold_the_value_and_nothing_impossible(metric: str, scores: list[float]) -> None:
    least, most = LIMITS[metric]
    values = np.array(scores) * min(most, 2.0)
    seeds = [figure(np.full(4, value), np.zeros(4), seed, metric) for seed, value in enumerate(values)]
    for one in (figure(values, values, metric=metric), *pooled(seeds)):
        if one.low is not None and one.high is not None and one.value is not None:
            assert least <= one.low <= one.value + 1e-9
            assert one.value - 1e-9 <= one.high <= most


# --- what was not attempted ---------------------------------------------------------------------------------------------------------


def test_an_attack_that_was_not_made_is_not_called_nothing_to_see() -> None:
    case: Any = SimpleNamespace(view=AdversaryView("server", (), {}), has_updates=False, protection="none", seed=0)
    missed, blind = (nothing(case, "a", "m", why) for why in ("not attempted: clients have many samples", "no update is in this view"))
    assert (missed.status, blind.status) == ("not_attempted", "nothing_to_see")
    assert missed.line() == "a / m (server, none): not_attempted; clients have many samples"
    assert blind.line() == "a / m (server, none): nothing_to_see; no update is in this view"
    assert pooled([blind, missed])[0].status == "not_attempted"


@pytest.mark.slow
def test_a_lucky_deal_of_few_clients_is_no_leak_and_a_found_one_of_more_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients are right at once by one deal in three (4 of them), ten (6) or 35 (8): a test over clients took each for a leak."""

    @cache
    def scored(found: bytes, groups: bytes) -> Array:  # there are 96 deals of so few, and they are dealt 240,000 times
        return grouping_accuracy(np.frombuffer(found, int), np.frombuffer(groups, int))

    monkeypatch.setattr(leakage, "grouping_accuracy", lambda found, groups: scored(found.tobytes(), groups.tobytes()))
    rng, wrong = np.random.default_rng(0), 0
    for clients in (4, 6, 8):
        groups = np.arange(clients) % 2
        for trial in range(40):
            made = [deal_of(rng.permutation(groups), groups, SEEDS * trial + seed) for seed in range(SEEDS)]
            wrong += pooled(made)[0].status == "leaks"
    assert wrong <= 9  # of 120 at 2.5 %: more once in 1200
    groups = np.arange(12) % 2
    assert deal_of(groups, groups, 0).status == "leaks"


def test_matchings_of_a_few_clusters_are_all_counted() -> None:
    right = 1 - np.eye(4)
    assert chance_of_matching(right, stream(0, "t")) == pytest.approx(1 / 24)
    assert chance_of_matching(np.ones((4, 4)), stream(0, "t")) == 1.0
    assert chance_of_matching(1 - np.eye(8), stream(0, "t")) == pytest.approx(1 / 2000)
    assert chance_of_matching(np.zeros((0, 0)), stream(0, "t")) == 1.0


def deal_of(found: Array, groups: Array, seed: int) -> Cell:
    case: Any = SimpleNamespace(view=AdversaryView("server", (), {}), has_updates=False, protection="none", seed=seed)
    chances = tuple(chance_of_deals(one, groups, seed, 199) for one in (found, groups))
    mine, blank = grouping_accuracy(found, groups), dealt_at_random(found, groups, seed, 50)
    return cell(case, "cluster_identity", "group_accuracy", mine, blank, np.ones(len(groups)), margin=0.1, chances=(chances[0], chances[1]))


# --- power --------------------------------------------------------------------------------------------------------------------------


def _found(draw: Any, margin: float, times: int, rng: np.random.Generator) -> int:
    """In how many of so many audits the test finds a leak in each client that a toss lets be read as in the reference."""
    mine, blank, theirs, theirs_blank = draw
    n, hits = len(mine), 0
    for _ in range(times):
        own, other, tosses = rng.integers(n, size=n), rng.integers(len(theirs), size=n), rng.random(n) < 0.5
        score, beside = np.where(tosses, mine[own], theirs[other]), np.where(tosses, blank[own], theirs_blank[other])
        hits += chance(score, beside, margin) < RATE
    return hits


@pytest.mark.parametrize(("n", "margin"), [(6, 0.0), (12, 0.1), (40, 0.1)])
def test_the_power_for_counts_is_the_share_of_planted_leaks_that_are_found(n: int, margin: float) -> None:
    """1,000 draws: a right power is outside this interval one time in 10,000."""
    rng = np.random.default_rng(n)
    mine, blank, theirs, theirs_blank = ((rng.random(n) < rate).astype(float) for rate in (0.1, 0.2, 0.95, 0.2))
    drawn = (mine, blank, theirs, theirs_blank)
    low, high = stats.binom.interval(0.9999, 1000, power(*drawn, margin))
    assert low <= _found(drawn, margin, 1000, rng) <= high


@pytest.mark.slow
def test_the_power_for_other_scores_is_that_of_a_normal_distribution() -> None:
    rng = np.random.default_rng(0)
    drawn = (rng.normal(0.1, 0.3, 30), np.zeros(30), rng.normal(0.6, 0.3, 30), np.zeros(30))
    assert power(*drawn, 0.1) == pytest.approx(_found(drawn, 0.1, 1000, rng) / 1000, abs=0.08)
    assert power(*drawn, 0.5) == 0.0, "half of the reference's gain is within the margin"
    normal = rng.normal(0.3, 0.5, (4000, 8))
    shown = np.mean([t_chance(one, 0.0) < RATE for one in normal])
    assert t_power(0.3, 0.5, 8, 0.0, RATE) == pytest.approx(float(shown), abs=0.03)


@pytest.mark.parametrize(("k", "n"), [(1, 3), (2, 5), (7, 4)])
def test_equal_gains_come_no_more_often_than_stated(k: int, n: int) -> None:
    """Over all mixtures of uniform laws on −m … m, which are the symmetric ones with one mode at 0: the largest share on a value k."""
    shares = [1 / (2 * m + 1) if m >= k else 0.0 for m in range(50)]
    assert max(shares) ** n <= t_chance(np.full(n, float(k)), 0.0) == 3.0**-n
    assert t_chance(np.full(n, float(k)), float(k)) == 1.0


@given(st.floats(0.01, 1.0), st.integers(3, 12), st.integers(0, 99))
def test_equal_gains_are_equal_whatever_rounding_makes_of_them(by: float, n: int, seed: int) -> None:
    """Their deviation is often some 1e-17. Taken for one it would make a p of 1e-30, and a power that is no number."""
    beside = np.random.default_rng(seed).random(n)
    for gain in (np.full(n, by), (beside + by) - beside):
        assert t_chance(gain, by / 2) == 3.0**-n
        assert t_chance(gain, by) == 1.0
        assert t_power(float(gain.mean()), float(gain.std(ddof=1)), n, by / 2, RATE) == 1.0
        assert interval("", gain, 0) == (None, None)


def test_no_power_no_absence() -> None:
    """Of one run, of two, and of five whose unprotected runs differ much: half of what they gain need not have been seen."""
    few = share(0.0, 0, base=0.0)
    assert few.power is not None
    assert few.power >= ENOUGH
    assert pooled([few])[0].status == "at_baseline"
    for known in (None, 0.5):
        weak = replace(few, power=known)
        assert pooled([weak])[0].status == "inconclusive"
        assert pooled([few, replace(weak, seeds=(1,))])[0].status == "inconclusive"
    differ = [replace(share(0.1, seed), reference=0.1 + of) for seed, of in enumerate((0.3, 0.9, 0.3, 0.9, 0.9))]
    sure = [replace(share(0.1, seed), reference=0.9) for seed in range(SEEDS)]
    assert pooled(sure)[0].status == "at_baseline"
    assert pooled(differ)[0].status == "inconclusive"


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.5, 1.0])
def test_planted_leaks_are_seldom_at_the_baseline(size: float) -> None:
    """Leaks of half or all of what the unprotected runs gain, in 200 audits of five seeds: none may be at its baseline."""
    rng = np.random.default_rng(round(10 * size))
    found = []
    for _ in range(200):
        blank = (rng.random((SEEDS, CLIENTS)) < 0.2).astype(float)
        theirs = (rng.random((SEEDS, CLIENTS)) < 0.9).astype(float)
        mine = np.where(rng.random((SEEDS, CLIENTS)) < size, theirs, blank)
        case: Any = SimpleNamespace(view=AdversaryView("server", (), {}), has_updates=False, protection="none", seed=0)
        cells = [
            replace(cell(case, "attack", "label_set_accuracy", *one, margin=0.1, share=True), seeds=(seed,))
            for seed, one in enumerate(zip(mine, blank, theirs, strict=True))
        ]
        found.append(pooled(cells)[0].status)
    assert found.count("leaks") >= 190
    assert "at_baseline" not in found


@pytest.mark.parametrize(
    ("shape", "word"), [((1, 28, 28), "image"), ((3, 8, 8), "image"), ((81, 7, 7), "sample"), ((1, 1, 43), "sample"), ((5,), "sample")]
)
def test_feature_maps_and_tables_are_no_images(shape: tuple[int, ...], word: str) -> None:
    made = Cell("a", "server", "none", "mean_image_cosine", *(None,) * 5, "not_applicable", note="the mean auxiliary image")
    (worded,) = leakage.in_words_of(shape, [made])
    assert worded.metric == f"mean_{word}_cosine"
    assert worded.note == f"the mean auxiliary {word}"
    assert np.isnan(leakage.ssim(np.zeros(shape), np.zeros(shape))) == (word == "sample")
