"""pFedLIA: scores against brute force, what is held back, groups and neighbourhoods against a plain retelling, newcomers, protections."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import PROTECTIONS, eye, federation, population, served, training
from scenes import mlp_training as train_on
from sklearn.cluster import OPTICS, KMeans
from small_runs import after_rounds, digits, true_groups

from cflpriv.algorithms import ALGORITHMS, fedavg, oracle
from cflpriv.algorithms.pfedlia.influence import Influence, OnPart, better_group, cluster_scores, split_validation, stable_scores
from cflpriv.algorithms.pfedlia.pfedlia import pfedlia
from cflpriv.clustering.scores import ari
from cflpriv.contract.operations import Sampling
from cflpriv.contract.protection import Protection
from cflpriv.data import DataSpec, build_population
from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config
from cflpriv.experiments.run.checkpoint import flatten
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData, Population

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
digit_pairs = partial(digits, rotations=(), partition="pathological", groups=PAIRS)


def training_parts(scene: Population, seed: int = 0) -> tuple[ClientData, ...]:
    """Clients that have their training part only."""
    parts = [split_validation(client, 0.25, seed)[0] for client in scene.clients]
    return tuple(replace(c, x_train=c.x_train[kept], y_train=c.y_train[kept]) for c, kept in zip(scene.clients, parts, strict=True))


def softmax_losses(theta: Array, x: Array, y: Array, classes: int) -> Array:
    """Cross-entropy of softmax regression for each sample, in plain numpy."""
    d = x.shape[1]
    logits = x @ theta[: classes * d].reshape(classes, d).T + theta[classes * d :]
    top = logits.max(axis=1)
    return np.asarray(top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - logits[np.arange(len(y)), y])


def flat(client: ClientData, kept: Array) -> tuple[Array, Array]:
    return client.x_train[kept].reshape(len(kept), -1).astype(np.float64), client.y_train[kept]


# --- what is held back


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 200), st.floats(0.01, 0.6), st.integers(0, 99))
def test_the_split_is_a_partition_with_something_on_both_sides(count: int, share: float, client: int) -> None:
    data = ClientData(client, np.zeros((count, 2)), np.zeros(count, np.int64), np.zeros((0, 2)), np.zeros(0, np.int64))
    train, held_back = split_validation(data, share, 0)
    assert sorted([*train, *held_back]) == list(range(count))
    assert len(held_back) == max(1, round(share * count))
    assert len(train) >= 1


def test_three_to_one_is_the_default_and_the_split_never_changes() -> None:
    scene = digit_pairs(5)
    for client in scene.clients:
        train, held_back = split_validation(client, 0.25, 7)
        assert abs(len(train) - 3 * len(held_back)) <= 2
        np.testing.assert_array_equal(held_back, split_validation(client, 0.25, 7)[1])
        assert not np.array_equal(held_back, split_validation(client, 0.25, 8)[1])


@pytest.mark.parametrize("mode", ["central", "peer"])
def test_test_data_change_nothing(mode: Any) -> None:
    """The pitfall of scoring on test data: other test data, the same scores, groups and models, bit for bit."""
    scene = digit_pairs(10)
    other = [replace(client, x_test=1 - client.x_test[::-1], y_test=(client.y_test + 1) % 10) for client in scene.clients]
    results = []
    for clients in (scene.clients, other):
        fed = federation(clients, seed=1)
        algorithm = pfedlia(train_on(scene), warm_up=1, mode=mode)
        state = after_rounds(algorithm, fed, 4)
        results.append((state.groups, state.scores, served(algorithm, fed, state)))
    assert results[0][0] == results[1][0]
    if mode == "central":
        np.testing.assert_array_equal(results[0][1], results[1][1])
    np.testing.assert_array_equal(results[0][2], results[1][2])


def test_held_back_data_are_not_trained_on() -> None:
    """Other samples in the validation part: the same models before clustering; other samples in the training part: others."""
    scene = digit_pairs(5)

    def spoilt(part: int) -> list[ClientData]:
        clients = []
        for client in scene.clients:
            x = client.x_train.copy()
            x[split_validation(client, 0.25, 0)[part]] *= 0.5
            clients.append(replace(client, x_train=x))
        return clients

    models = []
    for clients in (scene.clients, spoilt(1), spoilt(0)):
        fed = federation(clients)
        models.append(after_rounds(pfedlia(train_on(scene), warm_up=9), fed, 3).warm.value())
    np.testing.assert_array_equal(models[0], models[1])
    assert not np.array_equal(models[0], models[2])


# --- scores


def test_lazy_scores_are_equation_one() -> None:
    """Against plain numpy: θ̃_j by the task's own updates, losses summed over the samples held back, all pairs and oneself."""
    scene = population(groups=3, clients_per_group=3, samples=24)
    train = training(scene)
    algorithm = pfedlia(train, warm_up=2, local_epochs=3, weights="equal")
    fed = federation(scene)
    warm = after_rounds(algorithm, fed, 2).warm.value()
    state = after_rounds(algorithm, fed, 1, replace(after_rounds(algorithm, federation(scene), 2)), first=2)
    tilde = {}
    for client in training_parts(scene):
        given = TaskInput(client, {"model": warm}, {}, Streams(0, 2, client.id))
        tilde[client.id] = warm + np.asarray(replace(train, epochs=3).run(given)["update"])
    expected = np.empty((9, 9))
    for client in scene.clients:
        x, y = flat(client, split_validation(client, 0.25, 0)[1])
        before = softmax_losses(warm, x, y, scene.classes).sum()
        for j in range(9):
            expected[client.id, j] = before - softmax_losses(tilde[j], x, y, scene.classes).sum()
    np.testing.assert_allclose(state.scores, expected, rtol=0, atol=1e-10)
    assert (expected[0] > 0).any()
    assert (expected[0] < 0).any()


def test_a_batch_of_the_data_may_do() -> None:
    scene = digit_pairs(5)
    task = OnPart(train_on(scene, epochs=2), 0.25, samples=12)
    fed = federation(scene)
    held = fed.compute(task, {"model": task.train.model.init(0)})
    for client in training_parts(scene):
        fewer = replace(client, x_train=client.x_train[:12], y_train=client.y_train[:12])
        alone = task.train.run(TaskInput(fewer, {"model": task.train.model.init(0)}, {}, Streams(0, -1, client.id)))
        np.testing.assert_allclose(eye(fed).peek(client.id, held["update"]), np.asarray(alone["update"]), atol=1e-6)
        np.testing.assert_array_equal(eye(fed).peek(client.id, held["update"]), eye(fed).peek(client.id, held["movement"]))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_engine_gives_the_same_scores(workers: int) -> None:
    scene = digit_pairs(5)
    results = []
    for engine in (Engine("sequential"), Engine("auto", workers=workers)):
        fed = federation(scene, engine=engine)
        results.append(after_rounds(pfedlia(train_on(scene, "float64"), warm_up=1), fed, 2).scores)
        engine.close()
    np.testing.assert_allclose(results[0], results[1], rtol=1e-9)


@pytest.mark.slow
def test_exact_influence_is_retraining_with_and_without() -> None:
    """Full-batch steps on equal weights are gradient descent on the mean of the clients' losses; that in plain numpy."""
    scene = population(groups=2, clients_per_group=3, samples=24)
    train = training(scene, batch_size=0, lr=0.3)
    fed = federation(scene)
    state = after_rounds(pfedlia(train, warm_up=0, influence="exact", exact_rounds=40, weights="equal"), fed, 1)
    classes, parts = scene.classes, {c.id: flat(c, split_validation(c, 0.25, 0)[0]) for c in scene.clients}

    def gradient(theta: Array, x: Array, y: Array) -> Array:
        d = x.shape[1]
        logits = x @ theta[: classes * d].reshape(classes, d).T + theta[classes * d :]
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        return np.concatenate([(p.T @ x).ravel(), p.sum(axis=0)]) / len(y)

    def descended(members: Sequence[int]) -> Array:
        theta = train.model.init(0)
        for _ in range(40):
            theta = theta - 0.3 * np.mean([gradient(theta, *parts[i]) for i in members], axis=0)
        return theta

    whole = descended(range(6))
    expected = np.empty((6, 6))
    for client in scene.clients:
        x, y = flat(client, split_validation(client, 0.25, 0)[1])
        after = softmax_losses(whole, x, y, classes).sum()
        for j in range(6):
            expected[client.id, j] = softmax_losses(descended([i for i in range(6) if i != j]), x, y, classes).sum() - after
    np.testing.assert_allclose(state.scores, expected, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_lazy_scores_have_the_signs_of_exact_influence() -> None:
    """Two groups that contradict each other: who helps whom is the same by both, far above the half of chance."""
    scene = population(groups=2, clients_per_group=4, samples=40)
    shifted = [replace(c, y_train=(c.y_train + c.id % 2) % 3, x_train=scene.clients[0].x_train + 0 * c.x_train[:1]) for c in scene.clients]
    fed = federation([replace(c, y_train=(scene.clients[0].y_train + c.id % 2) % 3) for c in shifted])
    train = training(scene, batch_size=0, lr=0.3)
    lazy = after_rounds(pfedlia(train, warm_up=2, local_epochs=10), fed, 3).scores
    exact = after_rounds(pfedlia(train, warm_up=0, influence="exact", exact_rounds=60), fed, 1).scores
    others = ~np.eye(8, dtype=bool)
    assert ((lazy > 0) == (exact > 0))[others].mean() > 0.95


def test_scores_are_finite_where_a_models_loss_is_not() -> None:
    """Whose model explodes on somebody's data is the last that this client would take; the others' scores stay as they are."""
    scene = population(groups=2, clients_per_group=3, samples=24)
    train = training(scene, dtype="float32")
    fed = federation(scene)
    warm = train.model.init(0)
    held = fed.compute(OnPart(train, 0.25, remember=False), {"model": warm})["update"]
    sent = fed.relay(held)
    plain = fed.compute(Influence(train.model, 0.25, tuple(range(6))), {"model": warm, "updates": sent, "own": held})
    huge = np.full(train.model.dimension, 3e38, np.float32) * np.where(np.arange(train.model.dimension) % 2, 1, -1).astype(np.float32)
    task = Influence(train.model, 0.25, (0, 1, 2))
    data = scene.clients[4]
    updates = {0: eye(fed).peek(0, held), 1: huge, 2: eye(fed).peek(2, held)}
    row = np.asarray(task.run(TaskInput(data, {"model": warm, "updates": updates}, {}, Streams(0, -1, 4)))["scores"])
    before = eye(fed).peek(4, plain)
    np.testing.assert_allclose(row[[0, 2]], before[[0, 2]])
    x, y = flat(data, split_validation(data, 0.25, 0)[1])
    assert row[1] == pytest.approx(min(*before[[0, 2]], -softmax_losses(warm.astype(np.float64), x, y, scene.classes).sum()), rel=1e-5)
    nothing = task.run(TaskInput(data, {"model": huge, "updates": dict.fromkeys(range(3), warm)}, {}, Streams(0, -1, 4)))
    np.testing.assert_array_equal(nothing["scores"], np.zeros(3))


# --- clusters from scores


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9))
def test_two_means_on_a_line_is_exact(values: list[int]) -> None:
    """Against all divisions in two; scikit-learn's 2-means from many starts finds no better one."""
    row = np.array(values, dtype=float)
    better = better_group(row)
    if len(set(values)) == 1:
        assert better.all() == (values[0] >= 0)
        assert better.all() or not better.any()
        return

    def error(mask: Array) -> float:
        return float(sum(((part - part.mean()) ** 2).sum() for part in (row[mask], row[~mask])))

    places = range(len(row))
    masks = [np.isin(places, chosen) for size in range(1, len(row)) for chosen in combinations(places, size)]
    assert error(better) <= min(map(error, masks)) + 1e-9
    assert row[better].min() > row[~better].max()
    assert error(better) <= KMeans(2, n_init=5, random_state=0).fit(row[:, None]).inertia_ + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_two_means_does_not_depend_on_the_order(values: list[float], random: Any) -> None:
    order = random.sample(range(len(values)), len(values))
    row = np.array(values)
    np.testing.assert_array_equal(better_group(row)[order], better_group(row[order]))


def block_scores(sizes: Sequence[int], seed: int, noise: float, spread: float) -> tuple[Array, list[int]]:
    """Scores of groups: about 10 within and −10 across; rows differ in size, as validation data do. The true groups."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    scores = np.where(groups[:, None] == groups[None, :], 10.0, -10.0) + noise * rng.normal(size=(len(groups), len(groups)))
    return scores * np.exp(spread * rng.normal(size=len(groups)))[:, None], groups.tolist()


@pytest.mark.slow
def test_the_default_of_optics_splits_groups_that_min_samples_finds() -> None:
    """The pitfall: scikit-learn's min_samples = 5 on 100 clients in 5 groups; 10, or the signs, cure it."""
    found: dict[str, list[float]] = {"default": [], "ten": [], "signs": []}
    for seed in range(5):
        matrix, groups = block_scores([20] * 5, seed, 0.3, 0.3)
        found["default"].append(ari(groups, cluster_scores(matrix, 5)[0].tolist()))
        found["ten"].append(ari(groups, cluster_scores(matrix, 10)[0].tolist()))
        found["signs"].append(ari(groups, cluster_scores(matrix, 5, "sign")[0].tolist()))
    assert max(found["default"]) < 0.95
    assert found["ten"] == found["signs"] == [1.0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[20] * 5, [8] * 4, [6] * 5, [50, 50]])
def test_the_clustering_that_two_min_samples_agree_on_is_right(sizes: list[int]) -> None:
    for seed in range(3):
        matrix, groups = block_scores(sizes, seed, 0.3, 0.3)
        assert ari(groups, stable_scores(matrix)[0].tolist()) == 1.0


def test_without_two_that_agree_min_samples_is_a_tenth() -> None:
    for n in (3, 4, 5):  # too few values to try
        matrix = np.random.default_rng(n).normal(size=(n, n))
        for one, other in zip(stable_scores(matrix), cluster_scores(matrix, 2), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("rounds", "warm_up"), [(100, 20), (500, 20), (20, 4), (5, 1), (2, 1), (1, 0)])
def test_a_run_warms_up_for_a_fifth_of_its_rounds(rounds: int, warm_up: int) -> None:
    config = parse_config({"training": {"rounds": rounds}, "algorithm": {"name": "pfedlia"}})
    assert config.hyper["warm_up"] == warm_up
    assert config.doubts == ()
    assert config.with_("algorithm", warm_up=3).hyper["warm_up"] == 3
    from_python = ALGORITHMS["pfedlia"].make(train_on(digit_pairs(5)), rounds=rounds)
    assert from_python.round.args[0].warm_up == warm_up  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["value", "sign"])
def test_noise_joins_who_helps_most_or_stays_alone(scores: Any) -> None:
    """Against scikit-learn's own labels: what OPTICS put together stays together, noise goes by the mean of its row."""
    joined = alone = 0
    for seed in range(12):
        matrix, _ = block_scores([9, 8, 7], seed, 8.0, 0.8)
        matrix[3] = -np.abs(matrix[3])  # client 3 is helped by nobody
        raw = OPTICS(min_samples=3).fit(np.sign(matrix) if scores == "sign" else matrix).labels_
        labels, noise = cluster_scores(matrix, 3, scores)
        np.testing.assert_array_equal(noise, raw == -1)
        clusters = sorted(set(raw) - {-1})
        for i in range(len(matrix)):
            together = set(np.flatnonzero(labels == labels[i]))
            if not noise[i]:
                assert together - set(np.flatnonzero(noise)) == set(np.flatnonzero(raw == raw[i]))
                continue
            helped = {label: np.mean([matrix[i, j] for j in range(len(matrix)) if raw[j] == label]) for label in clusters}
            best = max(helped, key=lambda label: helped[label]) if helped else -1
            if helped and helped[best] > 0:
                joined += 1
                assert set(np.flatnonzero(raw == best)) <= together
            else:
                alone += 1
                assert together == {i}
    assert alone > 0
    assert joined > 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 14), st.integers(2, 3), st.sampled_from(["value", "sign"]))
def test_any_scores_give_a_partition(seed: int, n: int, min_samples: int, scores: Any) -> None:
    matrix = np.random.default_rng(seed).normal(size=(n, n))
    labels, noise = cluster_scores(matrix, min_samples, scores)
    assert sorted(set(labels)) == list(range(max(labels) + 1))
    first = [list(labels).index(label) for label in range(max(labels) + 1)]
    assert first == sorted(first)
    assert noise.shape == (n,)


# --- training


def test_the_warm_up_is_fedavg_on_the_training_part() -> None:
    scene = digit_pairs(10)
    sampling = Sampling("global", 0.5)
    one, two = federation(scene.clients, sampling=sampling), federation(training_parts(scene), sampling=sampling)
    a, b = (
        after_rounds(pfedlia(train_on(scene), warm_up=9, weights="equal"), one, 4),
        after_rounds(fedavg(train_on(scene), weights="equal"), two, 4),
    )
    np.testing.assert_array_equal(a.warm.value(), b.model.value())


def test_clusters_found_are_trained_like_clusters_given() -> None:
    """After the clustering round, FedAvg per cluster: bit for bit the oracle's on the training parts."""
    scene = digit_pairs(20)
    sampling = Sampling("global", 0.5)
    one, two = federation(scene.clients, sampling=sampling), federation(training_parts(scene), sampling=sampling)
    found, given = pfedlia(train_on(scene), warm_up=0, weights="equal"), oracle(train_on(scene), groups=true_groups(scene), weights="equal")
    a, b = after_rounds(found, one, 4), after_rounds(given, two, 3, first=1)
    assert ari(scene.groups, found.describe(a)["clustering"].labels) == 1.0
    np.testing.assert_array_equal(served(found, one, a), served(given, two, b))


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["value", "sign"])
def test_exact_neighbourhoods_are_the_clusters(scores: Any) -> None:
    scene = digit_pairs(20)
    results = []
    for mode in ("central", "peer"):
        fed = federation(scene.clients, sampling=Sampling("global", 0.5))
        algorithm = pfedlia(train_on(scene, "float64"), warm_up=3, mode=mode, scores=scores)
        state = after_rounds(algorithm, fed, 7)
        results.append((algorithm.describe(state)["clustering"], served(algorithm, fed, state)))
    assert ari(scene.groups, results[0][0].labels) == 1.0
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_overlapping_neighbourhoods_against_a_plain_retelling(weights: Any) -> None:
    """Each sampled client trains its own model; θ_i ← the mean over N_i ∩ S of what came out; unheard clients keep theirs."""
    scene = digit_pairs(10, partition="iid", groups=(), samples_per_client=60)
    train = train_on(scene, "float64")
    algorithm = pfedlia(train, warm_up=1, mode="peer", weights=weights)
    fed = federation(scene.clients, sampling=Sampling("global", 0.5), seed=4)
    state = after_rounds(algorithm, fed, 2)
    neighbours = {client: state.groups[state.uses[client]] for client in fed.clients}
    assert any(sum(client in its for its in neighbours.values()) > 1 for client in fed.clients)
    assert len(state.groups) > 2
    parts = {client.id: client for client in training_parts(scene)}
    weight = {client.id: float(client.samples) if weights == "examples" else 1.0 for client in scene.clients}
    models = dict.fromkeys(fed.clients, state.warm.value())
    for number in range(2, 6):
        fed.begin_round(number)
        trained = {}
        for client in fed.cohort(dict.fromkeys(fed.clients, 0)):
            given = TaskInput(parts[client], {"model": models[client]}, {}, Streams(4, number, client))
            trained[client] = models[client] + np.asarray(train.run(given)["update"])
        state, _ = algorithm.round(fed, state)
        for client in fed.clients:
            contributors = [other for other in neighbours[client] if other in trained]
            if contributors:
                models[client] = sum(weight[o] * trained[o] for o in contributors) / sum(weight[o] for o in contributors)
        np.testing.assert_allclose(served(algorithm, fed, state), np.stack([models[c] for c in fed.clients]), rtol=0, atol=1e-12)
    assert all(client in its for client, its in neighbours.items())


def test_clustering_happens_once_and_trains_nothing() -> None:
    scene = digit_pairs(10)
    fed = federation(scene)
    algorithm = pfedlia(train_on(scene), warm_up=2)
    state = after_rounds(algorithm, fed, 6)
    relays = [
        message for message in fed.transcript.messages if message.operation == "relay" and message.source == message.target == "clients"
    ]
    assert [message.round for message in relays] == [2]
    assert all(message.readers == ("clients",) for message in relays)  # the server passes on what it cannot read
    assert not [message for message in fed.transcript.messages if message.operation == "mean" and message.round == 2]
    described = algorithm.describe(state)
    assert described["evidence"]["distance"].shape == (10, 10)
    flatten(state)


@pytest.mark.parametrize("mode", ["central", "peer"])
def test_clustering_waits_until_enough_clients_are_there(mode: Any) -> None:
    scene = population(groups=2, clients_per_group=4, samples=24)
    fed = federation(scene)
    algorithm = pfedlia(training(scene), warm_up=1, mode=mode, min_samples=4, local_epochs=2, weights="equal")
    state = algorithm.init(fed)
    eye(fed).leave(range(3, 8))
    state = after_rounds(algorithm, fed, 3, state=state)
    assert not state.clustered
    assert not [message for message in fed.transcript.messages if message.operation == "relay"]
    alone = federation(training_parts(scene), present=range(3))
    plain = after_rounds(fedavg(training(scene), weights="equal"), alone, 3)
    np.testing.assert_array_equal(state.warm.value(), plain.model.value())  # the warm-up goes on
    eye(fed).join(range(3, 8))
    state = after_rounds(algorithm, fed, 1, state, first=3)
    assert state.clustered
    assert set(state.uses) == set(range(8))


def test_members_of_large_clusters_wait_where_few_of_them_are_sampled() -> None:
    """small_clusters = "local" is about clusters, not about who of them is in the cohort."""
    scene = digit_pairs(10)
    fed = federation(scene, Protection(min_cohort=2, small_clusters="local"), sampling=Sampling("global", 0.1))
    algorithm = pfedlia(train_on(scene), warm_up=0, min_samples=2)
    state = after_rounds(algorithm, fed, 4)
    assert all(not model.own for model in state.models)
    assert min(map(len, state.groups)) >= 2


# --- newcomers


def test_a_newcomer_scores_and_trains_nothing_first() -> None:
    """So one whose training diverges is placed as well as anybody; what it would have trained is nobody's to score."""
    scene = population(groups=2, clients_per_group=4, samples=24)
    broken = [replace(c, x_train=c.x_train * np.float32(1e30)) if c.id == 7 else c for c in scene.clients]
    fed = federation(broken, present=range(7))
    algorithm = pfedlia(training(scene, on_divergence="skip", dtype="float32"), warm_up=1, local_epochs=2)
    assert algorithm.admit is not None
    state = after_rounds(algorithm, fed, 2)
    eye(fed).join([7])
    before = sum(count for (task, _), count in eye(fed).engine.paths.items() if task == "OnPart")
    after, _ = algorithm.admit(fed, state, [7])
    assert 7 in after.uses
    assert sum(count for (task, _), count in eye(fed).engine.paths.items() if task == "OnPart") == before > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["central", "peer"])
@pytest.mark.parametrize("name", PROTECTIONS)
def test_newcomers_find_their_group(name: str, mode: Any) -> None:
    scene = digit_pairs(20)
    fed = federation(scene, PROTECTIONS[name], present=range(15))
    algorithm = pfedlia(train_on(scene, "float64", hidden=8), warm_up=2, mode=mode, weights="equal")
    assert algorithm.admit is not None
    state = after_rounds(algorithm, fed, 4)
    before = algorithm.describe(state)["clustering"]
    eye(fed).join(range(15, 20))
    if mode == "central":  # peer to peer, whoever is away cannot be chosen
        eye(fed).leave([0])
    state, notes = algorithm.admit(fed, state, range(15, 20))
    after = algorithm.describe(state)["clustering"]
    assert after.labels[:15] == before.labels
    models = served(algorithm, fed, state, range(1, 20))
    for newcomer in range(15, 20):  # the model of its group
        friend = newcomer - 10
        assert scene.groups[friend] == scene.groups[newcomer]
        np.testing.assert_allclose(models[newcomer - 1], models[friend - 1], atol=1e-9)
    assert ari([scene.groups[c] for c in after.clients], after.labels) == 1.0
    if mode == "central":
        assert notes == {"opened_clusters": 0}
    else:
        assert all(set(state.groups[state.uses[c]]) >= {c, c - 10} for c in range(15, 20))
    after_rounds(algorithm, fed, 1, state, first=4)


def test_a_newcomer_that_nobody_helps_opens_a_cluster() -> None:
    scene = digit_pairs(15)
    kept = [client for client in range(15) if scene.groups[client] != scene.groups[4]]
    fed = federation(scene, present=kept)
    algorithm = pfedlia(train_on(scene), warm_up=2, min_samples=2)
    assert algorithm.admit is not None
    state = after_rounds(algorithm, fed, 3)
    eye(fed).join([4])
    state, notes = algorithm.admit(fed, state, [4])
    assert notes == {"opened_clusters": 1}
    np.testing.assert_array_equal(served(algorithm, fed, state, [4])[0], state.warm.value())


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["central", "peer"]),
    st.integers(0, 2),
    st.lists(st.tuples(st.sets(st.integers(0, 11), max_size=3), st.sets(st.integers(0, 11), max_size=3)), min_size=2, max_size=5),
)
def test_every_client_sampled_is_placed_through_joins_and_leaves(mode: Any, warm_up: int, story: list[tuple[set[int], set[int]]]) -> None:
    scene = population(groups=3, clients_per_group=4, samples=12)
    fed = federation(scene, present=range(8), sampling=Sampling("global", 0.5))
    algorithm = pfedlia(training(scene), warm_up=warm_up, mode=mode, local_epochs=2)
    state, seen = algorithm.init(fed), set()
    for number, (leaving, joining) in enumerate(story):
        eye(fed).join(sorted(joining))
        if len(set(fed.clients) - leaving) >= 4 and (not state.clustered or set(fed.clients) - leaving & set(state.scored)):
            kept = set(fed.clients) - leaving
            if not state.clustered or kept & set(state.scored):
                eye(fed).leave(sorted(leaving & set(fed.clients)))
        fed.begin_round(number)
        state, record = algorithm.round(fed, state)
        if not state.clustered:
            continue
        seen |= set(record.cohort)
        clustering = algorithm.describe(state)["clustering"]
        assert set(clustering.clients) == seen
        assert all(client in state.groups[state.uses[client]] for client in seen)
        if mode == "central":
            assert sorted(client for group in state.groups for client in group) == sorted(seen)
        assert served(algorithm, fed, state).shape[0] == len(fed.clients)


# --- protections


@pytest.mark.parametrize("mode", ["central", "peer"])
def test_clear_and_hidden_runs_are_the_same(mode: Any) -> None:
    scene = digit_pairs(10, partition="iid", groups=(), samples_per_client=60)
    results = []
    for protection in PROTECTIONS.values():
        fed = federation(scene.clients, protection=protection, sampling=Sampling("global", 0.5), seed=2)
        algorithm = pfedlia(train_on(scene, "float64", hidden=4), warm_up=2, mode=mode, weights="equal")
        state = after_rounds(algorithm, fed, 5)
        results.append((state.groups, served(algorithm, fed, state)))
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-8)


@pytest.mark.slow
def test_secure_sums_train_clusters_and_refuse_overlapping_neighbourhoods() -> None:
    protection = Protection(sum="secagg", secagg_mode="passive")
    scene = digit_pairs(20)
    algorithm = pfedlia(train_on(scene), warm_up=1, weights="equal")
    fed = federation(scene.clients, protection=protection)
    state = after_rounds(algorithm, fed, 3)
    assert ari(scene.groups, algorithm.describe(state)["clustering"].labels) == 1.0
    overlapping = digit_pairs(10, partition="iid", groups=(), samples_per_client=60)
    fed = federation(overlapping.clients, protection=protection, seed=4)
    algorithm = pfedlia(train_on(overlapping), warm_up=1, mode="peer", weights="equal")
    state = after_rounds(algorithm, fed, 2)
    with pytest.raises(InputError, match="overlapping groups under sum = 'secagg'"):
        after_rounds(algorithm, fed, 1, state, first=2)


def test_peer_mode_shows_the_server_no_scores() -> None:
    scene = digit_pairs(10)
    fed = federation(scene)
    after_rounds(pfedlia(train_on(scene), warm_up=1, mode="peer"), fed, 2)
    gathered = [message for message in fed.transcript.messages if message.operation == "gather"]
    assert [message.kind for message in gathered] == ["neighbours"]
    assert all(set(np.unique(value)) <= {0, 1} for message in gathered for value in (message.payload or {}).values())


# --- real data


@pytest.mark.slow
@pytest.mark.skipif("CFLPRIV_DATA" not in os.environ, reason="CFLPRIV_DATA names no data directory")
@pytest.mark.parametrize(("mode", "scores"), [("central", "value"), ("central", "sign"), ("peer", "sign")])
def test_pathological_fashion_is_found(mode: Any, scores: Any) -> None:
    """100 clients, 5 clusters of 2 labels, 200 samples each, 20 rounds of warm-up at 10 %: ARI 1, peer to peer every row exact.

    Peer to peer by value is not among them: where the losses of others spread wide, 2-means takes some of them for good.
    """
    scene = build_population(
        DataSpec("fashion_mnist", partition="pathological", clients=100, samples_per_client=200, test_samples_per_client=10, groups=PAIRS),
        os.environ["CFLPRIV_DATA"],
    )
    model = Model("mlp", scene.shape, scene.classes, 64, scene.mean, scene.std)
    algorithm = pfedlia(Train(model, epochs=1, batch_size=10, lr=0.01), mode=mode, scores=scores)
    fed = federation(scene.clients, sampling=Sampling("global", 0.1))
    state = after_rounds(algorithm, fed, 21)
    assert ari(scene.groups, algorithm.describe(state)["clustering"].labels) == 1.0
    if mode == "peer":
        groups = true_groups(scene)
        assert all(set(state.groups[state.uses[c]]) == {o for o in fed.clients if groups[o] == groups[c]} for c in fed.clients)


# --- refused before anything runs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warm_up": -1}, r"algorithm\.warm_up = -1: expected"),
        ({"mode": "mesh"}, "'mesh'"),
        ({"influence": "guess"}, "'guess'"),
        ({"scores": "rank"}, "'rank'"),
        ({"local_epochs": 0}, r"algorithm\.local_epochs = 0: expected"),
        ({"local_samples": -1}, r"algorithm\.local_samples = -1: expected"),
        ({"exact_rounds": 0}, r"algorithm\.exact_rounds = 0: expected"),
        ({"validation": 0.0}, r"algorithm\.validation = 0\.0: expected a number in \(0, 1\)"),
        ({"validation": 1.0}, r"algorithm\.validation = 1\.0: expected"),
        ({"min_samples": 1}, r"algorithm\.min_samples = 1: expected"),
    ],
)
def test_bad_parameters_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        pfedlia(training(population()), **options)


def test_clients_without_validation_data_are_refused_before_anything_runs() -> None:
    scene = population()
    poor = replace(scene.clients[2], x_train=scene.clients[2].x_train[:1], y_train=scene.clients[2].y_train[:1])
    fed = federation([*scene.clients[:2], poor, *scene.clients[3:]])
    with pytest.raises(InputError, match=r"client 2: of 1 training sample.* validation data"):
        pfedlia(training(scene)).init(fed)
    assert fed.transcript.messages == []
    with pytest.raises(InputError, match="min_samples: 9 for 8 clients"):
        pfedlia(training(scene), min_samples=9).init(federation(scene))
    with pytest.raises(InputError, match=r"2 client\(s\)"):
        pfedlia(training(scene)).init(federation(scene.clients[:2]))


def test_newcomers_and_exact_influence_do_not_go_together() -> None:
    scene = population()
    fed = federation(scene, present=range(6))
    algorithm = pfedlia(training(scene, batch_size=0), warm_up=0, influence="exact", exact_rounds=2)
    assert algorithm.admit is not None
    state = after_rounds(algorithm, fed, 1)
    eye(fed).join([6])
    with pytest.raises(InputError, match="exact influence of newcomers"):
        algorithm.admit(fed, state, [6])


def test_influence_names_its_clients() -> None:
    assert Influence(Model("linear", (2,), 2), 0.25, (0, 1)).parts == {"scores": "score"}
