"""Sample counts from the lengths of updates."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack_scenes import case
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cflpriv.attacks import counts_from_lengths
from cflpriv.attacks.figures.leakage import Case
from cflpriv.attacks.figures.significance import chance, chance_of_orders, orders
from cflpriv.attacks.labels.sample_totals import Total, counts_of_totals
from cflpriv.attacks.labels.update_norms import cells, errors_of, lengths_in
from cflpriv.contract.protection import Protection
from cflpriv.experiments import Config, parse_config
from cflpriv.randomness import stream


def skewed(protection: dict[str, Any], seed: int = 0, **more: Any) -> Config:
    """Twenty clients with unequal labels and numbers of samples."""
    return parse_config({
        "data": {"partition": "dirichlet", "alpha": 0.3, "clients": 20, "seed": seed}, "model": {"hidden": 8},
        "training": {"rounds": 1, "weights": "equal", "lr": 0.1}, "algorithm": {"name": "fedavg"}, "protection": protection,
        "run": {"record": "full", "seed": seed, "audit_parties": ["server", "client:0"]}, **more,
    })  # fmt: skip


HAAR = {"gram": ["haar"], "sum": "haar"}


@given(st.floats(0.2, 3.0), st.floats(0.1, 10.0))
def test_a_known_curve_is_read_backwards(power: float, scale: float) -> None:
    counts = np.geomspace(4, 512, 40)
    lengths = scale * counts**power
    np.testing.assert_allclose(counts_from_lengths(lengths[5:30:3], lengths, counts), counts[5:30:3], rtol=1e-6)
    assert counts_from_lengths(np.array([0.0, np.inf]), lengths, counts).tolist() == pytest.approx([4, 512])


def test_totals_of_changing_cohorts_give_single_numbers() -> None:
    counts = {0: 7.0, 1: 40.0, 2: 3.0, 3: 12.0}
    cohorts = [(0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 3)]
    totals = [Total(cohort, sum(counts[client] for client in cohort)) for cohort in cohorts]
    assert counts_of_totals(totals, 10.0) == pytest.approx(counts, rel=1e-5)
    assert counts_of_totals(totals[:1], 10.0) == pytest.approx({0: 50 / 3, 1: 50 / 3, 2: 50 / 3}, rel=1e-5)
    assert counts_of_totals([], 10.0) == {}
    bounded = counts_of_totals([Total((0, 1, 2), 24.0, 7.0), Total((1, 2), 14.0, 7.0)], 10.0)  # two that count as the least weight
    assert bounded == pytest.approx({0: 10.0, 1: 7.0, 2: 7.0}, rel=1e-5)


@pytest.mark.parametrize("protection", [{}, {"sum": "secagg", "max_weight": 400}], ids=["open", "secure sums"])
def test_weights_by_samples_are_numbers_of_samples(protection: dict[str, Any]) -> None:
    """In the open from the first round on; of secure sums those above the least weight, once cohorts have changed often enough."""
    training = {"rounds": 14, "weights": "examples", "participation": 0.7, "lr": 0.1, "epochs": 1}
    made = skewed({})
    for key, value in training.items():
        made = made.with_("training", **{key: value})
    seen = case(replace(made.with_("data", clients=12), protection=Protection(**protection)))
    found = {figure.metric: figure for figure in cells(seen)[0]}["samples_exact"]
    assert found.status == "leaks", found.line()
    assert found.reference == 1.0
    assert (found.value or 0.0) > 0.5 if protection else found.value == 1.0


@given(st.lists(st.integers(1, 10_000), min_size=3, max_size=40), st.floats(0.5, 20_000.0))
def test_no_number_for_everyone_is_nearer_than_the_baseline(counts: list[int], constant: float) -> None:
    """Else lengths that say nothing would gain where numbers are very unequal: a guess need only be small."""
    true = np.array(counts, float)
    assert errors_of(np.full(len(true), np.median(true)), true).mean() <= errors_of(np.full(len(true), constant), true).mean() + 1e-9


@pytest.mark.slow
def test_a_transform_keeps_lengths_and_so_what_they_tell() -> None:
    plain, turned = (case(skewed(protection)) for protection in ({}, HAAR))
    seen = lengths_in(turned.view)
    assert seen == pytest.approx(lengths_in(plain.view), rel=1e-4)
    order, error = cells(turned)[0]
    assert order.status == "leaks"
    assert (order.value or 0.0) > 0.75
    assert error.baseline is not None
    assert (error.value or 2.0) < error.baseline


@pytest.mark.slow
def test_clients_dealt_otherwise_are_not_found() -> None:
    made = case(skewed(HAAR))
    names = stream(0, "dealt").permutation(20)
    dealt = replace(made.truth, label_counts={client: made.truth.label_counts[int(names[client])] for client in range(20)})
    order = cells(replace(made, truth=dealt))[0][0]
    assert order.status != "leaks"


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (lambda: case(skewed({"sum": "secagg", "secagg_mode": "passive"})), "no single updates of others"),
        (
            lambda: case(skewed({}, privacy={"unit": "client", "epsilon": 5.0, "delta": 1e-4, "clip_norm": 0.2})),
            "not attempted: clients clip",
        ),
    ],
    ids=["secure sums", "private"],
)
def test_what_is_not_there_or_not_read_is_said(made: Any, word: str) -> None:
    seen: Case = made()
    (one,) = cells(seen)[0]
    assert word in one.note


def rejections(chances: list[float], rates: tuple[float, ...] = (0.05, 0.01)) -> list[int]:
    """How many are within each rate; printed with exact 95 % limits."""
    found = [int((np.array(chances) <= rate + 1e-12).sum()) for rate in rates]
    for rate, count in zip(rates, found, strict=True):
        low, high = stats.binomtest(count, len(chances)).proportion_ci(0.95, method="exact")
        print(f"p <= {rate}: {count} of {len(chances)} = {count / len(chances):.4f} [{low:.4f}, {high:.4f}]")
    return found


@pytest.mark.slow
def test_the_order_of_unrelated_numbers_has_a_valid_p() -> None:
    """Null simulation: 2000 runs of 6 to 20 clients with unequal numbers, some equal, and guesses that know nothing of them.

    p ≤ .05 and ≤ .01 may each come more often than these rates allow in less than 1 % of such tests.
    """
    rng, chances = np.random.default_rng(0), []
    for run in range(2000):
        true = np.round(np.exp(rng.normal(3, 1, size=int(rng.integers(6, 21)))))
        chances.append(chance_of_orders(rng.normal(size=len(true)), true, stream(run, "dealt")))
    for rate, count in zip((0.05, 0.01), rejections(chances), strict=True):
        assert count <= stats.binom.isf(0.01, 2000, rate)


def test_a_t_test_over_clients_in_pairs_errs_more_often_than_it_says() -> None:
    """Why deals are needed: a t-test over clients finds a leak in more than .05 of 1000 runs without one (p < 1e-3 if it were .05)."""
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(1000):
        true, guessed = rng.permutation(20).astype(float), rng.normal(size=20)
        wrong += chance(orders(guessed, true), np.full(20, 0.5), 0.0) <= 0.05
    print(f"{wrong} of 1000")
    assert stats.binom.sf(wrong - 1, 1000, 0.05) < 1e-3


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6))
def test_the_best_order_of_eight_is_seldom_dealt_again(seed: int) -> None:
    true = np.random.default_rng(seed).permutation(8).astype(float)
    assert orders(true, true).tolist() == [1.0] * 8
    assert chance_of_orders(true, true, stream(seed, "dealt")) <= 6 / 2000, "1 of 40320 deals is as good"
    assert chance_of_orders(np.zeros(8), true, stream(seed, "dealt")) == 1.0
