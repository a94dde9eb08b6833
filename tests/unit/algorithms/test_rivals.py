"""FlexCFL, OCFL, FedSoft, FedRC and FedGWC: each rule against a plain recomputation of it from vectors and losses, and the groups found."""

import tracemalloc
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import eye, federation, population, training
from torch.nn import functional

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.fedgwc import affinities, best_parts, gaussian_weights, interacted
from cflpriv.algorithms.fedrc import RobustStep, label_shares, posteriors
from cflpriv.algorithms.fedsoft import SHARES, SoftStep, importance
from cflpriv.algorithms.flexcfl import ClusterByDirections, PlaceByCosine, decomposed_cosines
from cflpriv.algorithms.ocfl import ClusterByTemperature, cosine_distances, temperature
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import Gram
from cflpriv.contract.operations import Sampling
from cflpriv.engine import Streams, TaskInput
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config
from cflpriv.types import Array

SCENE = population(groups=2, clients_per_group=4, separation=3.0)


def vectors(n: int, d: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(n, d))


def view(rows: Array, new: int = 0, memory: dict[str, Any] | None = None) -> Any:
    """The view of rows (n, p, d), of which the last `new` clients are new."""
    clients = tuple(range(len(rows)))
    return SimpleNamespace(gram=Gram.of_vectors(clients, rows), new=clients[len(rows) - new :], memory={} if memory is None else memory)


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def rival_rounds(name: str, rounds: int, participation: float = 1.0, **options: Any) -> tuple[Any, Any, Any]:
    algorithm = ALGORITHMS[name].make(training(SCENE), **options)
    fed = federation(SCENE, sampling=Sampling("global", participation))
    state = algorithm.init(fed)
    for number in range(rounds):
        fed.begin_round(number)
        state, _ = algorithm.round(fed, state)
    return algorithm, fed, state


# --- FlexCFL


@given(st.integers(2, 8), st.integers(3, 9), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_decomposed_cosines_are_those_with_the_singular_vectors(n: int, d: int, m: int, seed: int) -> None:
    rows, m = vectors(n, d, seed), min(m, n, d)
    right = np.linalg.svd(rows, full_matrices=False)[2]
    expected = np.array([[cosine(row, direction) for direction in right[:m]] for row in rows])
    np.testing.assert_allclose(np.abs(decomposed_cosines(rows @ rows.T, m)), np.abs(expected), atol=1e-7)  # a direction has no sign


def test_directions_ignore_the_lengths_of_updates() -> None:
    rng = np.random.default_rng(1)
    truth = np.arange(12) % 3
    directions = np.eye(3, 20)[truth] + 0.05 * rng.normal(size=(12, 20))
    rows = directions * rng.uniform(0.9, 1.1, size=(12, 1))
    result, evidence = ClusterByDirections(3, 5, 0)(view(rows[:, None]))
    assert ari(truth.tolist(), result["labels"].tolist()) == 1.0
    points = decomposed_cosines(rows @ rows.T, 3)
    assert evidence["distance"][0, 1] == pytest.approx(np.linalg.norm(points[0] - points[1]) / np.sqrt(3))


def test_a_newcomer_joins_by_the_largest_cosine_with_a_mean() -> None:
    rows, labels = vectors(9, 5, 3), np.array([0, 1, 2, 0, 1, 2])
    found = PlaceByCosine()(view(rows[:, None], 3, {"labels": labels}))[0]["labels"]
    means = [rows[:6][labels == label].mean(0) for label in range(3)]
    assert found.tolist() == [int(np.argmax([cosine(row, mean) for mean in means])) for row in rows[6:]]


def test_clients_beyond_the_scale_are_placed_and_not_clustered() -> None:
    _, fed, state = rival_rounds("flexcfl", 1, pretrain_scale=2)
    assert ari(list(SCENE.groups), state.clustering.labels) == 1.0
    assert [len(message.clients) for message in fed.transcript.messages if message.operation == "gram"] == [4, 4]


# --- OCFL


@given(st.integers(2, 7), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_the_temperature_is_the_norm_of_the_distances_over_its_largest(n: int, seed: int) -> None:
    rows = vectors(n, 4, seed)
    distances = [[0.0 if i == j else 1 - cosine(rows[i], rows[j]) for j in range(n)] for i in range(n)]
    np.testing.assert_allclose(cosine_distances(rows @ rows.T), distances, atol=1e-12)
    assert temperature(np.array(distances)) == pytest.approx(np.sqrt(np.sum(np.square(distances)) / (4 * n * (n - 1))))
    assert temperature(2 * (1 - np.eye(n))) == pytest.approx(1.0)


def test_clusters_are_made_only_when_the_temperature_rises() -> None:
    alike, apart = np.eye(1, 9).repeat(8, 0), np.eye(2, 9)[np.arange(8) % 2]
    noise = 0.1 * vectors(8, 9)
    rising = np.stack([alike + noise, apart + noise], axis=1)
    result, _ = ClusterByTemperature(3)(view(rising))
    assert (result["risen"], result["k"], result["labels"].tolist()) == (1, 2, [0, 1] * 4)
    result, _ = ClusterByTemperature(3)(view(rising[:, ::-1].copy()))
    assert (result["risen"], result["k"]) == (0, 1)
    assert ClusterByTemperature(3, at_least=5)(view(rising))[0]["k"] == 1, "clusters of four join"


def test_ocfl_finds_the_groups_once_and_takes_newcomers() -> None:
    algorithm = ALGORITHMS["ocfl"].make(training(SCENE))
    fed = federation(SCENE, present=range(7))
    state, grams = algorithm.init(fed), []
    for number in range(4):
        fed.begin_round(number)
        state, record = algorithm.round(fed, state)
        grams.append(sum(message.operation == "gram" for message in fed.transcript.messages))
    assert ari(list(SCENE.groups[:7]), state.clustering.labels) == 1.0
    assert record.notes["clustered"]
    assert grams[0] == 0
    assert grams[-1] == grams[-2], "nothing is compared after the shot"
    eye(fed).join([7])
    assert algorithm.admit is not None
    state, notes = algorithm.admit(fed, state, [7])
    assert notes["joined"] == [state.clustering[1]]


# --- FedSoft


def test_importance_counts_the_samples_that_a_centre_suits_best() -> None:
    losses = np.array([[0.1, 0.5, 0.2, 0.3], [0.2, 0.4, 0.2, 0.4], [9.0, 9.0, 9.0, np.inf]])
    assert importance(losses, 1e-4).tolist() == [0.75, 0.25, 1e-4]


def test_a_round_of_fedsoft_is_that_of_its_formulas() -> None:
    """One full-batch step of all clients: w = w⁰ − η (∇f(w⁰) + λ Σ u_s (w⁰ − c_s) / Σ u_s), c_s = Σ v_s w."""
    train, k, lam = training(SCENE, batch_size=0), 3, 0.4
    algorithm = ALGORITHMS["fedsoft"].make(train, k=k, lam=lam)
    fed = federation(SCENE)
    state = algorithm.init(fed)
    centres, own = [train.model.init(0, j) for j in range(k)], train.model.init(0)
    fed.begin_round(0)
    state, _ = algorithm.round(fed, state)
    shares, models = [], []
    for client in SCENE.clients:
        x, y = torch.from_numpy(client.x_train).double(), torch.from_numpy(client.y_train)
        losses = np.stack([functional.cross_entropy(train.model.load(c)(x), y, reduction="none").detach().numpy() for c in centres])
        counts = [int((losses.argmin(0) == s).sum()) for s in range(k)]
        u = np.array([max(count / len(y), 1e-4) for count in counts])
        module = train.model.load(own)
        gradient = torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(functional.cross_entropy(module(x), y), list(module.parameters()))]
        )
        pull = sum(u[s] * (own - centres[s]) for s in range(k)) / u.sum()
        shares.append(u)
        models.append(own - train.lr * (gradient.numpy() + lam * pull))
    for s in range(k):
        v = np.array([u[s] for u in shares])  # all have as many samples
        np.testing.assert_allclose(state.models[s].value(), (v[:, None] * np.array(models)).sum(0) / v.sum(), atol=1e-10)


def test_a_client_of_odd_rounds_estimates_its_importance_in_each_span_too() -> None:
    """It came in odd rounds only, with τ = 2, and kept the shares of its first round for ever."""
    train = training(SCENE)
    starts, client = [train.model.init(0, j) for j in range(2)], SCENE.clients[0]
    memory: dict[str, Any] = {}
    found: list[list[float]] = []
    for number, models in ((1, starts), (3, starts[::-1]), (4, starts), (5, starts[::-1])):
        given_ = TaskInput(client, {"model": models}, memory, Streams(0, number, 0))
        result = SoftStep(train, 1e-4, number // 2, 0).run(given_)
        memory = {name: result[name] for name in SoftStep.remembers}
        found.append([float(one) for one in result[SHARES]])
    assert found[0] != found[0][::-1]
    assert found[1:] == [found[0][::-1], found[0], found[0]], "rounds 4 and 5 are one span"


# --- FedRC


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_posteriors_are_bayes_rule_with_likelihoods_over_label_shares(k: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses, mixture, shares = rng.exponential(size=(k, n)), rng.dirichlet(np.ones(k)), rng.uniform(0.1, 1, size=(k, n))
    plain = mixture[:, None] * np.exp(-losses) / shares
    np.testing.assert_allclose(posteriors(losses, mixture, shares), plain / plain.sum(0), atol=1e-12)


def test_a_model_that_is_good_only_because_it_sees_one_label_gains_nothing() -> None:
    """A model that predicts its label's share everywhere has loss −log C, which the division takes away exactly."""
    shares = np.array([[0.9, 0.9, 0.1], [0.5, 0.5, 0.5]])
    np.testing.assert_allclose(posteriors(-np.log(shares), np.array([0.5, 0.5]), shares), 0.5, atol=1e-12)
    np.testing.assert_allclose(label_shares(np.array([[0.3, 0.0]])), [[1.0, 1e-8 / 0.3]], rtol=1e-6)


def test_a_step_of_fedrc_is_weighted_sgd() -> None:
    train, k = training(SCENE, batch_size=0, epochs=2, momentum=0.5, weight_decay=0.01), 2
    model, client = train.model, SCENE.clients[0]
    starts = [model.init(0, j) for j in range(k)]
    sums = np.full((k, model.classes), 1 / (k * model.classes))
    given_ = TaskInput(client, {"model": np.concatenate([*starts, sums.ravel()])}, {}, Streams(0, 0, 0))
    result = RobustStep(train, k).run(given_)
    x, y = torch.from_numpy(client.x_train).double(), torch.from_numpy(client.y_train)
    losses = np.stack([functional.cross_entropy(model.load(one)(x), y, reduction="none").detach().numpy() for one in starts])
    gamma = np.exp(-losses) / np.exp(-losses).sum(0)
    for j, start in enumerate(starts):
        module = model.load(start)
        optimiser = torch.optim.SGD(module.parameters(), train.lr, momentum=0.5, weight_decay=0.01)
        for _ in range(2):
            optimiser.zero_grad()
            (functional.cross_entropy(module(x), y, reduction="none") * torch.from_numpy(gamma[j])).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        moved = result["update"][j * model.dimension : (j + 1) * model.dimension]
        np.testing.assert_allclose(start + moved, model.store(module), atol=1e-12)
        seen = [gamma[j][client.y_train == label].sum() / len(y) for label in range(model.classes)]
        at = k * model.dimension + j * model.classes
        np.testing.assert_allclose(result["update"][at : at + model.classes] + sums[j], seen, atol=1e-12)
    np.testing.assert_allclose(result["fedrc mixture"], gamma.mean(1), atol=1e-12)


# --- FedGWC


def test_weights_and_interactions_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    losses, matrix, here = rng.exponential(size=(3, 2)), rng.uniform(size=(5, 5)), [0, 2, 3]
    rewards = []
    for i in range(3):
        terms = [np.exp(-((losses[i, s] - losses[:, s].mean()) ** 2) / (2 * losses[:, s].var())) for s in range(2)]
        rewards.append(np.mean(terms))
    weights = gaussian_weights(losses)
    np.testing.assert_allclose(weights, np.array(rewards) / sum(rewards), atol=1e-9)
    found, change = interacted(matrix, here, weights)
    expected = matrix.copy()
    for row, weight in zip(here, weights, strict=True):
        for column in here:
            expected[row, column] = 0.4 * matrix[row, column] + 0.6 * weight
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert change == pytest.approx(np.square(expected - matrix).sum() / 9)


def test_affinities_leave_out_the_entries_of_the_two() -> None:
    matrix = np.random.default_rng(0).uniform(size=(5, 5))
    columns = (matrix.T - matrix.min()) / np.ptp(matrix)
    found = affinities(matrix, 2.0)
    for i in range(5):
        for j in range(5):
            others = [m for m in range(5) if m not in (i, j)]
            distance = sum((columns[i, m] - columns[j, m]) ** 2 for m in others)
            assert found[i, j] == pytest.approx(0.0 if i == j else np.exp(-2 * distance))


def test_affinities_of_many_clients_take_a_few_matrices() -> None:
    matrix = np.random.default_rng(0).uniform(size=(300, 300))
    tracemalloc.start()
    affinities(matrix, 2.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * matrix.nbytes


def test_clear_blocks_are_split_and_equal_affinities_are_not() -> None:
    truth = np.arange(12) % 2
    blocks = np.where(truth[:, None] == truth[None, :], 1.0, 0.02) * (1 - np.eye(12))
    labels = best_parts(blocks, 4, 0)
    assert labels is not None
    assert ari(truth.tolist(), labels.tolist()) == 1.0
    assert best_parts(1 - np.eye(12), 4, 0) is None
    same = interacted(np.full((6, 6), 1 / 36), range(6), gaussian_weights(vectors(6, 2)))[0]
    assert best_parts(affinities(same, 4.0), 4, 0) is None, "with everybody present all columns are the same"


@pytest.mark.parametrize("n", [3, 4, 5])
def test_few_clients_are_split_without_a_warning(n: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best_parts(affinities(np.random.default_rng(0).random((n, n)), 0.1), 4, 0)


def test_a_loss_that_is_no_number_leaves_the_rewards_of_others_alone() -> None:
    """One such client would make the whole matrix no number, for good, and end the run at the first split."""
    algorithm = ALGORITHMS["fedgwc"].make(training(SCENE), eps=10.0)
    fed = federation(SCENE, sampling=Sampling("global", 0.5))
    gather, state = fed.gather, algorithm.init(fed)

    def lying(held: Any, on: Any = None) -> Any:
        return {client: {"losses": np.array([1.0, np.nan]) if client == 3 else one["losses"]} for client, one in gather(held, on).items()}

    fed.gather = lying  # type: ignore[method-assign]
    for number in range(6):
        fed.begin_round(number)
        state, _ = algorithm.round(fed, state)
    assert all(np.isfinite(cluster.matrix).all() for cluster in state.clusters)


def test_fedgwc_with_everybody_in_every_round_says_that_it_forms_no_clusters() -> None:
    tree = {"algorithm": {"name": "fedgwc"}, "training": {"participation": 1.0}}
    assert "fedgwc' will form no clusters: all clients meet in every round" in parse_config(tree).doubts[0]
    assert not parse_config({**tree, "training": {"participation": 0.5}}).doubts


def test_a_settled_cluster_of_fedgwc_splits_and_its_parts_keep_their_rows() -> None:
    _, _, state = rival_rounds("fedgwc", 40, 0.5, eps=0.02, gamma=4.0)
    assert len(state.clusters) > 1
    assert sorted(client for cluster in state.clusters for client in cluster.clients) == list(range(8))
    assert all(cluster.matrix.shape == (len(cluster.clients),) * 2 for cluster in state.clusters)
    assert len(state.models) == len(state.clusters)


# --- awkward but legal


@pytest.mark.parametrize("name", ["flexcfl", "one_shot"])
def test_fewer_updates_than_clusters_are_clustered_into_what_there_is(name: str) -> None:
    """As many clusters as clients, one of whom diverges and is skipped: k-means takes no more clusters than updates."""
    clients = [replace(one, x_train=np.full_like(one.x_train, 3e38)) if one.id == 2 else one for one in SCENE.clients]
    algorithm = ALGORITHMS[name].make(training(SCENE, dtype="float32", on_divergence="skip"), k=len(clients))
    fed = federation(clients)
    state = algorithm.init(fed)
    assert sorted(state.clustering.clients) == list(range(len(clients)))
    fed.begin_round(0)
    algorithm.round(fed, state)


@pytest.mark.parametrize(("name", "words"), [("cfl", "client 2: 1 sample cannot be"), ("fedfomo", r"client 2: .* held back, and")])
def test_a_client_of_one_sample_is_named_without_another_algorithm(name: str, words: str) -> None:
    clients = [replace(one, x_train=one.x_train[:1], y_train=one.y_train[:1]) if one.id == 2 else one for one in SCENE.clients]
    with pytest.raises(InputError, match=words) as found:
        ALGORITHMS[name].make(training(SCENE)).init(federation(clients))
    assert "pfedlia" not in str(found.value)


def test_ocfl_does_not_say_that_there_are_no_groups_before_it_has_looked() -> None:
    algorithm = ALGORITHMS["ocfl"].make(training(SCENE))
    fed = federation(SCENE)
    state = algorithm.init(fed)
    assert "clear" not in algorithm.describe(state)
    fed.begin_round(0)
    assert algorithm.describe(algorithm.round(fed, state)[0])["clear"] is False


# --- mistakes


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "flexcfl", "pretrain_scale": 0}, r"algorithm\.pretrain_scale = 0: expected"),
        ({"name": "ocfl", "min_cluster_size": 1}, r"algorithm\.min_cluster_size = 1: expected"),
        ({"name": "fedsoft", "smoother": 0.0}, r"algorithm\.smoother = 0\.0: expected"),
        ({"name": "fedsoft", "interval": 0}, r"algorithm\.interval = 0: expected"),
        ({"name": "fedrc", "k": 0}, r"algorithm\.k = 0: expected"),
        ({"name": "fedgwc", "eps": 0.0}, r"algorithm\.eps = 0\.0: expected"),
    ],
)
def test_parameters_that_cannot_be_are_one_line(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_config({"algorithm": algorithm}).algorithm_for(SCENE)


def test_fedrc_names_what_its_weighted_steps_do_not_have() -> None:
    with pytest.raises(InputError, match=r"training\.optimizer: 'adam' has no effect with algorithm 'fedrc'"):
        ALGORITHMS["fedrc"].make(training(SCENE, optimizer="adam"))
    with pytest.raises(InputError, match=r"training\.augment: \('flip',\) has no effect with algorithm 'fedrc'"):
        ALGORITHMS["fedrc"].make(replace(training(SCENE), model=Model("linear", (1, 8, 8), 10), augment=("flip",)))
