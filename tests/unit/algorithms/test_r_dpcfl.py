"""R-DPCFL: the mixture against plain formulas, the draws, the stages of a run, and what a private run pays.

Statistical tests run on fixed public randomness and reject at p < 1e-6 each.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scenes import PROTECTIONS, eye, federation, population, training
from scipy import integrate, stats
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture
from small_runs import recorded_rounds

from cflpriv.algorithms.r_dpcfl import DrawByMixture, Mixture, choice_rounds, drawn, fitted, principal_points, r_dpcfl
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import Gram
from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.config.config import Config
from cflpriv.federation.task_encoding import check_small, fits, then_from_bytes, then_to_bytes
from cflpriv.randomness import stream
from cflpriv.types import Array

ALPHA = 1e-6
SCENE = population(groups=2, clients_per_group=5, separation=3.0)


def blobs(k: int, each: int, deviation: float = 0.03, seed: int = 0) -> tuple[Array, Array]:
    """Points (n, 2) around `k` places of a circle, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(k * each) % k
    turns = 2 * np.pi * labels / k
    return np.stack([np.cos(turns), np.sin(turns)], axis=1) / 2 + 0.5 + deviation * rng.normal(size=(k * each, 2)), labels


def view(vectors: Array, memory: dict[str, Any] | None = None) -> Any:
    clients = tuple(range(len(vectors)))
    gram = Gram.of_vectors(clients, vectors[:, None, :])
    return SimpleNamespace(gram=gram, new=clients, memory={} if memory is None else memory)


# --- the mixture


def test_principal_points_are_those_of_the_vectors_themselves() -> None:
    vectors = 5 + np.random.default_rng(0).normal(size=(12, 30))
    expected = PCA(2, svd_solver="full").fit_transform(vectors)
    expected = (expected - expected.min(0)) / np.ptp(expected, axis=0)
    found = principal_points(vectors @ vectors.T)
    for component in range(2):  # the sign of a component is arbitrary
        same, turned = (np.abs(found[:, component] - one).max() for one in (expected[:, component], 1 - expected[:, component]))
        assert min(same, turned) < 1e-9


@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_component_that_is_rounding_is_zero(n: int) -> None:
    rng = np.random.default_rng(0)
    apart = np.arange(n)[:, None] * rng.normal(size=9) + 3 * rng.normal(size=9)
    points = principal_points(apart @ apart.T)
    assert np.array_equal(points[:, 1], np.zeros(n))
    np.testing.assert_allclose(sorted(points[:, 0]), np.arange(n) / max(1, n - 1), atol=1e-9)
    alike = np.repeat(rng.normal(size=(1, 9)), n, axis=0)
    assert np.array_equal(principal_points(alike @ alike.T), np.zeros((n, 2)))


def test_a_component_that_is_error_of_the_products_is_zero() -> None:
    rng = np.random.default_rng(0)
    vectors = np.repeat(rng.normal(size=(1, 9)), 20, axis=0)
    errors = 0.01 * rng.normal(size=(20, 20))
    products = vectors @ vectors.T + (errors + errors.T) / np.sqrt(2)
    assert principal_points(products).any()
    assert not principal_points(products, 0.01 * 1.2).any()


def test_posteriors_are_bayes_rule_with_equal_weights() -> None:
    points, _ = blobs(3, 8, deviation=0.25)
    mixture = fitted(points, 3, 0)
    densities = np.stack(
        [stats.multivariate_normal.pdf(points, mean, deviation**2) for mean, deviation in zip(*vars(mixture).values(), strict=True)], axis=1
    )
    expected = densities / densities.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(mixture.log_posteriors(points)), expected, atol=1e-12)
    assert expected.max(axis=1).min() < 0.9, "or the blobs are too far apart to show anything"


def test_a_fit_is_that_of_expectation_maximisation() -> None:
    points, labels = blobs(4, 10)
    mixture = fitted(points, 4, 0)
    assert ari(labels.tolist(), mixture.log_posteriors(points).argmax(axis=1).tolist()) == 1.0
    for component in range(4):  # numbered by first point, as the labels are
        own = points[labels == component]
        np.testing.assert_allclose(mixture.means[component], own.mean(0), atol=1e-6)
        assert mixture.deviations[component] == pytest.approx(np.sqrt(own.var(axis=0).mean() + 1e-6), rel=1e-3)
    other = GaussianMixture(4, covariance_type="spherical", n_init=10, random_state=5).fit(points)
    other.weights_ = np.full(4, 0.25)
    theirs = other.predict_proba(points)
    np.testing.assert_allclose(np.sort(theirs, axis=1), np.sort(np.exp(mixture.log_posteriors(points)), axis=1), atol=1e-6)


def test_separation_and_overlap_by_hand() -> None:
    mixture = Mixture(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]), np.array([0.1, 0.25, 0.2]))
    assert mixture.separation == pytest.approx(1 / (2 * 0.25))  # of the first two; the others have 5 and √5 / 0.5
    assert mixture.overlap == pytest.approx(0.0455002639, abs=1e-10)  # 1 − erf(2 / √2)
    equal = Mixture(np.array([[0.0], [1.5]]), np.array([0.5, 0.5]))

    def less(x: float) -> float:
        return float(min(stats.norm.pdf(x, 0.0, 0.5), stats.norm.pdf(x, 1.5, 0.5)))

    common, _ = integrate.quad(less, -6, 8, points=[0.75])
    assert equal.overlap == pytest.approx(common, abs=1e-8), "of equal components the overlap is the mass that both have"
    one = Mixture(np.zeros((1, 2)), np.ones(1))
    assert (one.separation, one.overlap) == (np.inf, 0.0)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_the_number_of_clear_blobs_is_found(k: int) -> None:
    points, labels = blobs(k, 40 // k)
    mixture = fitted(points, None, 0, starts=3)
    assert len(mixture.means) == k
    assert ari(labels.tolist(), mixture.log_posteriors(points).argmax(axis=1).tolist()) == 1.0


def test_few_or_equal_points_are_fitted_by_what_there_is() -> None:
    assert [len(fitted(blobs(2, 4)[0][:n], None, 0).means) for n in (1, 2, 3, 4)] == [1, 1, 1, 2]
    alike = fitted(np.zeros((5, 2)), 3, 0)
    np.testing.assert_allclose(np.exp(alike.log_posteriors(np.zeros((5, 2)))), 1 / 3)
    assert alike.overlap == 1.0


# --- the draws


def test_draws_follow_the_posteriors() -> None:
    """12 counts, each rejected at p < 1e-6: a false alarm in less than one of 80,000 runs, had the stream been another."""
    posteriors = np.array([[0.7, 0.3, 0.0], [0.05, 0.05, 0.9], [1 / 3, 1 / 3, 1 / 3], [0.0, 1.0, 0.0]])
    with np.errstate(divide="ignore"):
        logs = np.log(posteriors)
    labels = np.array([drawn(logs, stream(0, "r_dpcfl draw", round)) for round in range(2000)])
    for client, own in enumerate(posteriors):
        for label, expected in enumerate(own):
            count = int((labels[:, client] == label).sum())
            assert count == 2000 * expected if expected in (0.0, 1.0) else stats.binomtest(count, 2000, float(expected)).pvalue > ALPHA
    joint = stats.contingency.crosstab(labels[:, 0], labels[:, 2]).count
    assert stats.chi2_contingency(joint).pvalue > ALPHA, "clients are drawn independently"


def test_members_of_small_clusters_take_the_next_most_probable() -> None:
    logs = np.array([[0.0, -50.0, -60.0]] * 4 + [[-50.0, 0.0, -60.0]] * 3 + [[-60.0, -50.0, 0.0]])
    rng = np.random.default_rng(0)
    assert drawn(logs, rng).tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
    assert drawn(logs, rng, 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert drawn(logs, rng, 5).tolist() == [1] * 8
    assert drawn(logs, rng, 9).tolist() == [1] * 8, "the last one stays, however small"


@pytest.mark.slow
def test_the_function_draws_anew_in_each_round_and_ends_stage_one() -> None:
    rng = np.random.default_rng(0)
    vectors = np.concatenate([rng.normal(size=(10, 5)) + 2 * side * np.eye(5)[0] for side in (-1, 1)])
    then = DrawByMixture(2, 40, 0, seed=3)
    one = view(vectors)
    results = []
    for round in range(40):
        result, evidence = replace(then, round=round)(one)
        check_small(result, 20)
        assert fits(then, {name: np.asarray(value) for name, value in result.items()}, 20, 20)
        again, _ = replace(then, round=round)(view(vectors))
        assert result["labels"].tolist() == again["labels"].tolist(), "what is remembered changes nothing"
        results.append(result)
    assert 0 < evidence["overlap"] < 1
    soft = [result["soft"] for result in results]
    assert soft == sorted(soft, reverse=True)
    assert sum(soft) == int((1 - evidence["overlap"]) * 20)
    assert len({tuple(result["labels"]) for result in results}) > 3
    unsure = evidence["posteriors"].max(axis=1) < 0.999
    changes = np.ptp([result["labels"] for result in results], axis=0) > 0
    assert not changes[evidence["posteriors"].max(axis=1) > 1 - 1e-9].any()
    assert changes[unsure].any()
    assert then_from_bytes(then_to_bytes(then)) == then


def test_stage_one_has_a_round_at_least() -> None:
    alike = np.ones((6, 4))
    result, evidence = DrawByMixture(3, 20, 0, seed=0)(view(alike))
    assert (evidence["overlap"], result["soft"], result["k"]) == (1.0, 1, 3)
    assert DrawByMixture(3, 20, 1, seed=0)(view(alike))[0]["soft"] == 0


def test_a_tenth_of_the_rounds_is_for_choices() -> None:
    assert [choice_rounds(rounds) for rounds in (0, 1, 2, 10, 11, 50)] == [0, 0, 1, 1, 2, 5]


# --- a run


@pytest.mark.parametrize("k", [3, None])
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_groups_are_found_and_the_stages_follow_each_other(k: int | None, protection: str) -> None:
    """Two groups differ in one direction, and the second component is noise, so without `k` there may be more: here there are three."""
    scene = population(groups=3, clients_per_group=4, separation=3.0)
    fed = federation(scene, PROTECTIONS[protection])
    made = r_dpcfl(training(scene), k=k, rounds=12)
    state, records = recorded_rounds(made, fed, 12)
    soft = int((1 - state.evidence["overlap"]) * 6)
    assert 4 <= soft <= 6
    assert [one.notes["stage"] for one in records] == ["drawn"] * soft + ["chosen"] * 2 + ["fixed"] * (10 - soft)
    described = made.describe(state)
    assert ari(scene.groups, described["clustering"].labels) == 1.0
    assert described["rule"] == ("k = 3" if k else "largest separation")
    assert all(list(one.labels) == list(scene.groups) for one in records)
    served = made.serve(state)
    inputs = eye(fed).resolve(served.task, served.params, served.which, fed.clients)
    used = [served.task.used(one) for one in inputs]  # type: ignore[attr-defined]
    models = [eye(fed).peek(0, model) for model in state.models]
    for client, vector in enumerate(used):
        np.testing.assert_array_equal(vector, models[scene.groups[client]])


def test_choices_mend_what_was_drawn() -> None:
    """From labels that are all wrong but the models' own, clients find their group in stage 2."""
    fed = federation(SCENE)
    made = r_dpcfl(training(SCENE), k=2, rounds=10)
    state, _ = recorded_rounds(made, fed, 4)
    state = replace(state, labels={client: 1 - label for client, label in state.labels.items()}, chosen_from=5)
    fed.begin_round(5)
    state, record = made.round(fed, state)
    assert record.notes["changed_identities"] == 10
    assert made.describe(state)["clustering"].labels == SCENE.groups
    fed.begin_round(6)
    state, record = made.round(fed, state)
    assert record.notes["stage"] == "fixed"


def test_a_client_that_came_later_is_served_by_its_loss_and_joins_so() -> None:
    fed = federation(SCENE, present=range(8))
    made = r_dpcfl(training(SCENE), k=2, rounds=6)
    state, _ = recorded_rounds(made, fed, 6)
    eye(fed).join([8, 9])
    served = made.serve(state)
    used = [served.task.used(one) for one in eye(fed).resolve(served.task, served.params, served.which, [8, 9])]  # type: ignore[attr-defined]
    for client, vector in zip((8, 9), used, strict=True):
        np.testing.assert_array_equal(vector, eye(fed).peek(0, state.models[SCENE.groups[client]]))
    assert made.admit is not None
    state, notes = made.admit(fed, state, [8, 9])
    assert notes == {"joined": list(SCENE.groups[8:])}
    assert made.describe(state)["clustering"].labels == SCENE.groups


def test_small_clusters_are_merged_in_each_draw() -> None:
    scene = population(groups=4, clients_per_group=2, separation=3.0)
    fed = federation(scene, Protection(min_cohort=3, small_clusters="merge"))
    made = r_dpcfl(training(scene), k=4, rounds=8)
    state, records = recorded_rounds(made, fed, 2)
    for record in records:
        assert min(Counter(record.labels).values()) >= 3
    assert len(state.models) == 4


# --- what is refused, and what it costs


def test_parameters_that_cannot_be_are_refused() -> None:
    for options, words in (({"k": 0}, r"algorithm\.k = 0: expected"), ({"rounds": -1}, r"algorithm\.rounds = -1: expected")):
        with pytest.raises(InputError, match=words):
            r_dpcfl(training(SCENE), **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"algorithm\.k: 11 clusters of 10 clients"):
        r_dpcfl(training(SCENE), k=11).init(federation(SCENE))
    with pytest.raises(InputError, match=r"algorithm\.rounds: 7, but training\.rounds = 5; leave it out"):
        _ = parse_config({"training": {"rounds": 5}, "algorithm": {"name": "r_dpcfl", "rounds": 7}}).hyper
    with pytest.raises(InputError, match=r"algorithm 'r_dpcfl' under privacy\.unit = 'client': it uses gram and gather"):
        run_experiment(private_config(unit="client", samples=0), Path("nowhere"), population=SCENE)


def test_what_a_run_is_told_is_declared() -> None:
    found = [parse_config({"algorithm": {"name": "r_dpcfl", **more}}).knowledge for more in ({"k": 4}, {})]
    assert found == ["the number of groups, k = 4", "none: the best separated mixture of 2 to 10"]


def private_config(protection: dict[str, Any] | None = None, **privacy: Any) -> Config:
    return parse_config({
        "data": {"clients": 10}, "model": {"name": "linear"},
        "training": {"rounds": 4, "batch_size": 5, "lr": 0.3, "weights": "equal"},
        "algorithm": {"name": "r_dpcfl", "k": 2},
        "protection": protection or {},
        "privacy": {"unit": "sample", "epsilon": 20.0, "delta": 1e-4, "samples": 20, "sketch_dim": 0, **privacy},
        "run": {"evaluate_every": 4},
    })  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["per_client", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_private_run_pays_what_was_planned(noise: str, tmp_path: Path) -> None:
    """One first step, four rounds, one choice; all of the budget, and no more."""
    protection = {"gram": ["haar"], "sum": "secagg", "secagg_mode": "passive", "min_cohort": 3} if noise == "shared" else {}
    config = private_config(protection, noise=noise)
    releases = config.releases()
    assert (releases.signatures, releases.trainings, releases.choices, releases.mechanism) == (1, 4, 1, "total")
    summary = run_experiment(config, tmp_path / "run", population=SCENE)
    assert summary["stopped"] is None
    assert 19.0 < summary["epsilon"] <= 20.0
    tree = json.loads((tmp_path / "run" / "ledger.json").read_text(encoding="utf-8"))
    kinds = ["GaussianEvent", "SampledGaussianEvent", "ChoiceEvent"]
    for client in range(10):
        paid = Counter(event["event"] for line in tree["charges"] if client in line["clients"] for event in line["events"])
        assert [paid[kind] for kind in kinds] == [1, 4, 1]
