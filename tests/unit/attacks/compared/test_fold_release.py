"""What the folds of cross-fitted clustering tell: estimators against their laws, and recorded runs under each kind of release."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from attack_scenes import QUICK, case, config, unrelated
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import population

from cflpriv import Model
from cflpriv.attacks import ATTACKS
from cflpriv.attacks.compared.fold_release import (
    images_from_folds,
    label_spread,
    member_scores_of,
    membership_scores,
    sample_vectors,
    samples_from_products,
    traces_of,
)
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.figures.leakage import Case, Cell
from cflpriv.attacks.membership.member_scores import placements
from cflpriv.data import build_population
from cflpriv.engine import Streams, TaskInput
from cflpriv.experiments import Config
from cflpriv.tasks.fold_gradients import FoldGradients
from cflpriv.types import ClientData, Population

SCENE = population(groups=1, clients_per_group=3)
UNEQUAL: dict[str, Any] = {"partition": "iid", "groups": []}
SKEWED: dict[str, Any] = {"partition": "dirichlet", "alpha": 1.0, "groups": []}
RELEASES: dict[str, dict[str, Any]] = {
    "clear": {}, "haar": {"gram": ["haar"], "sum": "haar"}, "gram": {"gram": ["ckks"], "ckks_release": "gram"},
    "labels": {"gram": ["ckks"]},
}  # fmt: skip


VARIANTS = ("plain", "balanced")


# --- the mathematics


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 6), seed=st.integers(0, 2**20))
def test_traces_are_those_of_half_differences(n: int, seed: int) -> None:
    folds = np.random.default_rng(seed).normal(size=(n, 2, 5))
    flat = folds.reshape(2 * n, 5)
    expected = (((folds[:, 0] - folds[:, 1]) / 2) ** 2).sum(1)
    np.testing.assert_allclose(traces_of((flat @ flat.T).reshape(n, 2, n, 2)), expected, atol=1e-12)


def test_counts_are_right_on_average_whatever_the_mean() -> None:
    """Samples of norm 1 around a mean, 4000 clients: the mean of t n / (1 − u) is within five standard errors of 1 (one run in 10^6)."""
    rng = np.random.default_rng(2)
    for n, towards in ((6, 0.0), (40, 2.0)):
        rows = rng.normal(size=(4000, n, 10)) + towards
        rows /= np.linalg.norm(rows, axis=2, keepdims=True)
        folds = np.stack([rows[:, ::2].mean(1), rows[:, 1::2].mean(1)], axis=1)
        blocks = np.einsum("iad,ibd->iab", folds, folds)
        shares = []
        for block in blocks:
            shares.append(n / samples_from_products(block[None, :, None, :])[0] * (1 - block[0, 1]))
        expected = 1 - np.mean(blocks[:, 0, 1])
        assert abs(np.mean(shares) - expected) < 5 * np.std(shares) / np.sqrt(len(shares)) + 0.01


def test_the_likelihood_ratio_is_that_of_gaussian_errors() -> None:
    """By hand for one candidate: log N(f; x w, Σ w) − log N(f; 0, Σ w) at weight w = 2/n, added over halves as alternatives."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4))
    covariance, n = root @ root.T + np.eye(4), 10.0
    folds, x, weight = rng.normal(size=(2, 4)), rng.normal(size=4), 2 / n
    inverse = np.linalg.inv(covariance * weight)
    ratios = [-0.5 * (f - weight * x) @ inverse @ (f - weight * x) + 0.5 * f @ inverse @ f for f in folds]
    white = np.linalg.solve(covariance, x)
    found = membership_scores((folds @ white)[:, None], np.array([x @ white]), n)
    assert found[0] == pytest.approx(np.logaddexp(*ratios))


@pytest.mark.parametrize("inside", [True, False])
def test_members_of_small_clients_are_found_and_others_are_not(inside: bool) -> None:
    """Gaussian samples, 20 in the folds: AUC above .75 for members; for samples of nobody within 4.5 deviations of .5 (one run in 10^5)."""
    rng = np.random.default_rng(1)
    y = np.zeros(400, np.int64)
    auxiliary, mine, others = (rng.normal(size=(count, 60)) / 8 for count in (400, 20, 40))
    folds = np.stack([mine[:10].mean(0), mine[10:].mean(0)])
    asked = np.concatenate([mine if inside else rng.normal(size=(20, 60)) / 8, others])
    scores = member_scores_of(folds, label_spread(auxiliary, y, 1), asked, y[: len(asked)], 20)
    auc = float(placements(scores, np.arange(60) < 20)[0].mean())
    assert auc > 0.75 if inside else abs(auc - 0.5) < 4.5 * np.sqrt(61 / (12 * 20 * 40))


@pytest.mark.parametrize("size", [16, 10_000])
def test_single_samples_vectors_are_folds_of_that_sample(size: int) -> None:
    model, one = Model("linear", SCENE.shape, SCENE.classes), SCENE.clients[0]
    task, anchor = FoldGradients(model, sketch=size, seed=3), model.init(0)
    found = sample_vectors(task, anchor, one.x_train[:2], one.y_train[:2])
    for place in range(2):
        twice = ClientData(0, one.x_train[[place] * 2], one.y_train[[place] * 2], one.x_train[:0], one.y_train[:0])
        folds = task.run(TaskInput(twice, {"model": anchor}, {}, Streams(0, -1, 0)))["folds"]
        np.testing.assert_allclose(folds, np.stack([found[place]] * 2), atol=1e-6)


@pytest.mark.slow
def test_a_fold_of_one_sample_is_its_image() -> None:
    """Also sketched, where the sketch has more numbers than the image."""
    model, one = Model("linear", SCENE.shape, SCENE.classes), SCENE.clients[0]
    anchor, pixels = model.init(0), int(np.prod(SCENE.shape))
    x = np.clip(one.x_train[:1], 0.0, 1.0)
    for size in (4 * pixels, 10_000):
        task = FoldGradients(model, sketch=size)
        fold = sample_vectors(task, anchor, x, one.y_train[:1])
        images, labels = images_from_folds(task, anchor, fold, np.random.default_rng(0), restarts=1, iterations=300)
        assert labels[0] == one.y_train[0]
        assert float(((images[0] - x[0]) ** 2).mean()) < 1e-3


# --- recorded runs


@cache
def seen(release: str, variant: str = "balanced", adversary: str = "server", unequal: bool = True) -> Case:
    data = UNEQUAL if unequal else {}
    made = config({"name": "crossfit", "variant": variant}, RELEASES[release], data=data, training={"rounds": 0})
    return case_of(fresh_scene(made, people(made) if unequal else build_population(made.data), 0, QUICK), adversary, QUICK)


def people(made: Config) -> Population:
    """The clients of a configuration, the first with 10 samples and each with a tenth more than the one before, as far as there are."""
    drawn = build_population(made.data)
    sizes = [round(10 * 1.1**place) for place in range(len(drawn.clients))]
    short = [replace(one, x_train=one.x_train[:n], y_train=one.y_train[:n]) for one, n in zip(drawn.clients, sizes, strict=True)]
    return replace(drawn, clients=tuple(short))


def printed_figures(name: str, of: Case) -> dict[tuple[str, int], Cell]:
    cells = ATTACKS[name].cells(of)[0]
    for one in cells:
        print(one.line())
    return {(one.metric, one.k_known): one for one in cells}


EXPECTED: dict[str, tuple[str, str]] = {
    "clear": ("leaks", "leaks"), "haar": ("leaks", "not_attempted"), "gram": ("leaks", "not_attempted"),
    "labels": ("not_applicable", "not_applicable"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_counts_leak_with_the_gram_and_members_with_the_folds(release: str) -> None:
    found = printed_figures("fold_release", seen(release))
    counts, members = found["samples_error" if release == "labels" else "samples_order_auc", 0], found["fold_membership_auc", 0]
    assert (counts.status, members.status) == EXPECTED[release], counts.line() + members.line()


@pytest.mark.slow
def test_a_coalition_reads_rotated_folds() -> None:
    found = printed_figures("fold_release", seen("haar", adversary="server+1"))
    assert found["fold_membership_auc", 1].status == "leaks"
    assert printed_figures("anchor_counts", seen("haar", adversary="server+1", unequal=False))["label_set_accuracy", 1].status == "leaks"


def test_folds_of_nobody_leak_nothing() -> None:
    """The view of other clients: at 2.5 % a figure, and seeded."""
    made = config({"name": "crossfit"}, data=SKEWED, training={"rounds": 0})
    for one in printed_figures("fold_release", unrelated(made)).values():
        assert one.status != "leaks", one.line()


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_label_sets_are_read_from_folds_and_from_their_gram(release: str) -> None:
    of = seen(release, unequal=False)
    clear = printed_figures("anchor_counts", of)
    gram = printed_figures("gram_geometry", of)
    if release == "clear":
        assert clear["label_set_accuracy", 0].status == "leaks"
    else:
        assert clear["histogram_l1", 0].status == "not_attempted"
    if release == "labels":
        assert gram["label_set_accuracy", 0].status == "not_applicable"
    else:
        assert gram["label_set_accuracy", 3].status == "leaks"


def test_balanced_folds_hide_proportions_and_plain_ones_do_not() -> None:
    """Of clients that have every label: what is left is proportions."""
    of = {variant: case(config({"name": "crossfit", "variant": variant}, data=SKEWED, training={"rounds": 0})) for variant in VARIANTS}
    errors = {}
    for variant, one in of.items():
        errors[variant] = printed_figures("anchor_counts", one)["histogram_l1", 0]
    assert errors["plain"].status == "leaks", errors["plain"].line()
    assert errors["plain"].value is not None
    assert errors["balanced"].value is not None
    assert errors["balanced"].value > 1.5 * errors["plain"].value
