"""Membership inference: figures against brute force, the ratio against its definition, models that remember against chance."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.datasets import load_digits

from cflpriv.attacks.figures.significance import confidence_interval
from cflpriv.attacks.membership.member_scores import (
    auc_interval,
    confidences,
    deal_in_pairs,
    lira,
    lira_in_turn,
    loss_threshold,
    rmia,
    roc,
    samples_of_shadows,
    shadow_models,
)
from cflpriv.engine import Engine
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.tasks.training import Train
from cflpriv.types import Array


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=12), st.floats(0, 1))
def test_figures_are_those_of_all_pairs_and_all_thresholds(inside: list[int], outside: list[int], rate: float) -> None:
    found = roc(np.array([*inside, *outside], float), np.arange(len(inside) + len(outside)) < len(inside), rate)
    pairs = [(a > b) + (a == b) / 2 for a, b in product(inside, outside)]
    assert found.auc == pytest.approx(np.mean(pairs))
    rates = [(np.mean([a > bar for a in inside]), np.mean([b > bar for b in outside])) for bar in range(-1, 6)]
    assert found.tpr == max(tpr for tpr, fpr in rates if fpr * len(outside) <= int(rate * len(outside)) + 1e-9)
    assert found.fpr <= rate + 1e-9
    assert found.auc_interval[0] <= found.auc <= found.auc_interval[1]
    assert found.tpr_interval[0] <= found.tpr <= found.tpr_interval[1]
    assert (found.members, found.non_members) == (len(inside), len(outside))


@pytest.mark.parametrize(("members", "others"), [(6, 6), (6, 14), (40, 40)])
@pytest.mark.parametrize("apart", [0.0, 1.0, 3.0])
def test_intervals_cover_the_area_of_two_normal_laws(members: int, others: int, apart: float) -> None:
    """Oracle: Φ(apart / √2). 500 draws at 95 %: fewer than 455 hits (91 %) one time in 10 000; few scores near 1 are where others fail."""
    rng = np.random.default_rng(0)
    area, hits = stats.norm.cdf(apart / np.sqrt(2)), 0
    for _ in range(500):
        inside, outside = rng.normal(apart, 1, members), rng.normal(0, 1, others)
        low, high = auc_interval(float((inside[:, None] > outside).mean()), members, others)
        hits += low <= area <= high
    assert hits >= 455
    assert auc_interval(1.0, members, others)[0] < 1.0
    assert auc_interval(0.0, members, others)[1] > 0.0


def test_without_others_there_is_no_figure() -> None:
    with pytest.raises(InputError, match="0 others"):
        roc(np.zeros(3), np.ones(3, bool))


def test_every_sample_is_in_half_of_the_shadow_models() -> None:
    assert (samples_of_shadows(50, 6, np.random.default_rng(0)).sum(axis=0) == 3).all()
    with pytest.raises(InputError, match="not an even number"):
        samples_of_shadows(50, 5, np.random.default_rng(0))


def test_the_ratio_is_that_of_two_normal_laws() -> None:
    rng = np.random.default_rng(0)
    inside = samples_of_shadows(2000, 8, rng)
    shadow = np.where(inside, rng.normal(2, 1, inside.shape), rng.normal(0, 3, inside.shape))
    target = rng.normal(size=2000)
    exact = stats.norm.logpdf(target, 2, 1) - stats.norm.logpdf(target, 0, 3)
    wide = samples_of_shadows(1, 20000, rng)
    many = np.where(wide, rng.normal(2, 1, wide.shape), rng.normal(0, 3, wide.shape))
    assert lira(target[:1], many, wide) == pytest.approx(exact[:1], abs=0.1)
    assert np.corrcoef(lira(target, shadow, inside), exact)[0, 1] > 0.4


def test_relative_shares_count_pairs() -> None:
    rng = np.random.default_rng(1)
    target, shadow, others, shadow_others = rng.normal(size=4), rng.normal(size=(3, 4)), rng.normal(size=5), rng.normal(size=(3, 5))

    def grown(at: Array, by: Array) -> Array:
        return np.asarray((1 / (1 + np.exp(-at))) / (1 / (1 + np.exp(-by))).mean(axis=0))

    mine, theirs = grown(target, shadow), grown(others, shadow_others)
    expected = [np.mean([a / b >= 1.3 for b in theirs]) for a in mine]
    assert rmia(target, shadow, others, shadow_others, 1.3) == pytest.approx(expected)


def test_confidence_is_the_logit_of_the_true_label() -> None:
    model = Model("linear", (3,), 4, dtype="float64")
    rng = np.random.default_rng(0)
    x, y, vector = rng.normal(size=(6, 3)), rng.integers(0, 4, 6), rng.normal(size=16)
    logits = x @ vector[:12].reshape(4, 3).T + vector[12:]
    p = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))[np.arange(6), y]
    assert confidences(model, vector[None], x, y)[0] == pytest.approx(np.log(p / (1 - p)))
    assert loss_threshold(np.log(p / (1 - p))) == pytest.approx(np.log(p))


@pytest.fixture(scope="module")
def shadow_confidences() -> tuple[Array, Array, Array, Array, Array, Array]:
    """Nine models of 60 of 120 noisy digits each, trained until they remember: confidences on these, and on 300 others; who had what."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits.target))
    x, y = (digits.data / 16).astype(np.float32)[order], digits.target.astype(np.int64)[order]
    y[:120] = np.where(rng.random(120) < 0.2, rng.integers(0, 10, 120), y[:120])
    model = Model("mlp", (64,), 10, hidden=32)
    inside = samples_of_shadows(120, 18, rng)
    engine = Engine()
    train = Train(model, epochs=40, batch_size=10, lr=0.2)
    vectors = shadow_models(train, x[:120], y[:120], inside, model.init(0), 0, engine)
    return (
        confidences(model, vectors[1:], x[:120], y[:120]), inside[1:], confidences(model, vectors[:1], x[:120], y[:120])[0], inside[0],
        confidences(model, vectors[1:], x[200:500], y[200:500]), confidences(model, vectors[:1], x[200:500], y[200:500])[0],
    )  # fmt: skip


def test_models_that_remember_show_their_members(shadow_confidences: tuple[Array, Array, Array, Array, Array, Array]) -> None:
    """All lower ends of 95 % intervals above chance; the seeds are fixed, so outcomes do not change."""
    shadow, inside, target, member, shadow_others, others = shadow_confidences
    found = {
        "loss": roc(loss_threshold(target), member), "lira": roc(lira(target, shadow, inside), member),
        "rmia": roc(rmia(target, shadow, others, shadow_others), member),
    }  # fmt: skip
    for name, one in found.items():
        print(f"{name}: AUC {one.auc:.3f}, TPR {one.tpr:.2f} at {one.fpr:.3f} of {one.non_members}")
        assert one.auc_interval[0] > 0.5, name
    assert found["lira"].auc > found["loss"].auc


def test_unrelated_membership_is_at_chance(shadow_confidences: tuple[Array, Array, Array, Array, Array, Array]) -> None:
    """One hundred dealings of membership that have nothing to do with the model: mean AUC within 4 standard errors of one half (6e-5)."""
    shadow, inside, target, _, _, _ = shadow_confidences
    rng = np.random.default_rng(5)
    scores = lira(target, shadow, inside)
    found = [roc(scores, rng.permutation(120) < 60).auc for _ in range(100)]
    assert abs(np.mean(found) - 0.5) < 4 * np.std(found) / 10


PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
MODEL = Model("mlp", (64,), 10, hidden=32)


def aucs(labels: tuple[int, ...], size: int, seed: int) -> tuple[float, float]:
    """LiRA's AUC and TPR at 1 % on a model of `size` samples of `labels`, with 16 shadow models."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    pool = rng.permutation(np.flatnonzero(np.isin(digits.target, labels)))[: 2 * size]
    x, y = (digits.data[pool] / 16).astype(np.float32), digits.target[pool].astype(np.int64)
    inside = samples_of_shadows(2 * size, 18, rng)
    vectors = shadow_models(Train(MODEL, epochs=20, batch_size=10, lr=0.2), x, y, inside, MODEL.init(seed), seed)
    seen = confidences(MODEL, vectors, x, y)
    found = roc(lira(seen[0], seen[1:], inside[1:]), inside[0])
    return found.auc, found.tpr


@pytest.mark.slow
def test_leakage_over_size_and_purity() -> None:
    """Do models of pure clusters leak more than mixed ones? Five seeds a cell; what is asserted is that leakage falls with size."""
    table = {}
    for purity, choices in (("2 labels", PAIRS), ("10 labels", (tuple(range(10)),) * 5)):
        for size in (25, 50, 100, 150):
            found = np.array([aucs(labels, size, seed) for seed, labels in enumerate(choices)])
            table[purity, size] = found[:, 0]
            low, high = confidence_interval(found[:, 0])
            print(f"{purity}, n = {size}: AUC {found[:, 0].mean():.3f} [{low:.3f}, {high:.3f}], TPR at 1 % {found[:, 1].mean():.3f}")
    difference = table["10 labels", 25] - table["10 labels", 150]
    assert confidence_interval(difference)[0] > 0


def test_confidences_that_show_nothing_have_an_auc_of_one_half() -> None:
    rng = np.random.default_rng(0)
    inside = deal_in_pairs(20000, 4, rng)
    seen = 2 * rng.normal(size=20000) + rng.normal(size=inside.shape)

    def auc(confidences: Array) -> float:
        return float(np.mean([one.auc for one in lira_in_turn(confidences, inside)]))

    assert auc(seen) == pytest.approx(0.5, abs=0.006)  # five deviations of a mean over eight
    assert auc(seen + inside) > 0.6
