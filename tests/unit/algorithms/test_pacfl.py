"""PACFL: its limits are FedAvg and local training, its clusters are the groups, newcomers are placed by new rows only."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from scenes import PROTECTIONS, eye, federation, mlp_training, population, served, training
from small_runs import after_rounds, digits, true_groups

from cflpriv.algorithms import ALGORITHMS, fedavg, local, oracle, pacfl, shuffled
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import Gram, angles
from cflpriv.contract.operations import GramView, Sampling
from cflpriv.contract.protection import Protection
from cflpriv.data import DataSpec, build_population
from cflpriv.engine import Streams, TaskInput
from cflpriv.errors import CflprivWarning, InputError
from cflpriv.experiments import parse_config
from cflpriv.experiments.run.run import start
from cflpriv.tasks.signatures import PrincipalHalves, PrincipalVectors, principal_vectors
from cflpriv.types import Array, ClientData

well_tested_digits = partial(digits, test_samples_per_client=40)
train_on = partial(mlp_training, momentum=0.5)
RULES = ("test", "silhouette", "gap")


@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_beta_to_infinity_is_fedavg_bit_for_bit(weights: Any) -> None:
    scene = well_tested_digits(20)
    sampling = Sampling("global", 0.3)
    one, two = (federation(scene.clients, sampling=sampling, seed=3) for _ in range(2))
    merged, plain = pacfl(train_on(scene), beta=np.inf, weights=weights), fedavg(train_on(scene), weights=weights)
    a, b = after_rounds(merged, one, 4), after_rounds(plain, two, 4)
    np.testing.assert_array_equal(served(merged, one, a), served(plain, two, b))
    assert a.clustering.k == 1


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_beta_zero_is_local_training(participation: float) -> None:
    scene = well_tested_digits(10)
    sampling = Sampling("global", participation)
    one, two = (federation(scene.clients, sampling=sampling, seed=3) for _ in range(2))
    alone, solo = pacfl(train_on(scene, dtype="float64"), beta=0.0), local(train_on(scene, "float64"))
    a, b = after_rounds(alone, one, 4), after_rounds(solo, two, 4)
    np.testing.assert_allclose(served(alone, one, a), served(solo, two, b), rtol=0, atol=1e-12)
    assert a.clustering.k == 10
    assert two.transcript.messages == []


@pytest.mark.parametrize("cut", RULES)
def test_rotated_digits_are_told_apart_without_a_number_of_clusters(cut: Any) -> None:
    scene = well_tested_digits(20)
    state = pacfl(train_on(scene), cut=cut).init(federation(scene))
    assert state.notes["clear"]
    assert ari(scene.groups, state.clustering.labels) == 1.0


@pytest.mark.parametrize("cut", RULES)
def test_no_clear_structure_is_one_cluster(cut: Any) -> None:
    scene = well_tested_digits(20, rotations=())
    state = pacfl(train_on(scene), cut=cut).init(federation(scene))
    assert not state.notes["clear"]
    assert state.clustering.k == 1


# --- the cut by test


def test_by_default_halves_are_tested() -> None:
    """What is sent, what is said of it, and the evidence."""
    scene = well_tested_digits(20)
    fed = federation(scene)
    algorithm = pacfl(train_on(scene))
    state = algorithm.init(fed)
    (message,) = [one for one in fed.transcript.messages if one.operation == "gram"]
    rows = (message.payload or {})["rows"]
    assert rows.shape == (20, 6, 64)
    for half in (rows[:, :3], rows[:, 3:]):
        products = half @ half.transpose(0, 2, 1)
        np.testing.assert_allclose(np.linalg.norm(products, axis=(1, 2)), 1.0)
        np.testing.assert_allclose(products * (1 - np.eye(3)), 0.0, atol=1e-12)
    said = algorithm.describe(state)
    assert {key: said[key] for key in ("rule", "clear", "answer")} == {"rule": "test at level 0.01", "clear": True, "answer": "groups"}
    assert said["p"] <= 0.01
    assert said["evidence"].keys() >= {"spectrum", "edge", "tree", "tests", "distance", "clients"}
    assert ALGORITHMS["pacfl"].compared({}).rows == 6
    assert not ALGORITHMS["pacfl"].compared({"k": 2}).halves


def test_few_clients_are_one_cluster_and_the_notes_say_why() -> None:
    scene = well_tested_digits(3, rotations=(0, 90, 180))
    state = pacfl(train_on(scene)).init(federation(scene))
    assert state.clustering.k == 1
    assert state.notes["answer"] == "not tested: fewer than 4 clients"


def test_halves_are_of_all_samples_each_in_one() -> None:
    """Three vectors are the second moment of three samples; another client draws other halves."""
    rng = np.random.default_rng(0)
    x = rng.random((8, 6, 5))
    clients = [ClientData(number, x[0], np.zeros(6, np.int64), x[0][:0], np.zeros(0, np.int64)) for number in (0, 1)]
    sent = [PrincipalHalves(3).run(TaskInput(one, {}, {}, Streams(0, -1, one.id)))["signature"] for one in clients]
    for rows in sent:
        dealt = []
        for half in (rows[:3], rows[3:]):
            inside = np.linalg.norm(x[0] - x[0] @ np.linalg.pinv(half) @ half, axis=1) < 1e-9
            assert inside.sum() == 3
            moment = x[0][inside].T @ x[0][inside]
            np.testing.assert_allclose(half.T @ half, moment / np.linalg.norm(moment), atol=1e-12)
            dealt.append(inside)
        assert not (dealt[0] & dealt[1]).any()
    assert not np.allclose(sent[0], sent[1])


def test_a_half_of_too_few_samples_is_refused_by_name() -> None:
    scene = well_tested_digits(5)
    few = replace(scene.clients[3], x_train=scene.clients[3].x_train[:5], y_train=scene.clients[3].y_train[:5])
    fed = federation([*scene.clients[:3], few, scene.clients[4]])
    with pytest.raises(InputError, match=r"client 3: a half of 5 samples .*p = 3 .* rank 2"):
        pacfl(train_on(scene)).init(fed)
    one = replace(few, x_train=few.x_train[:1], y_train=few.y_train[:1])
    with pytest.raises(InputError, match="client 3: 1 sample cannot be split"):
        pacfl(train_on(scene)).init(federation([*scene.clients[:3], one, scene.clients[4]]))


@pytest.mark.parametrize("name", PROTECTIONS)
def test_newcomers_join_the_nearest_group_by_test(name: str) -> None:
    scene = well_tested_digits(20)
    fed = federation(scene, PROTECTIONS[name], present=range(14))
    algorithm = pacfl(train_on(scene), weights="equal", fine_tune_epochs=1)
    assert algorithm.admit is not None
    state = after_rounds(algorithm, fed, 1)
    before = state.clustering
    eye(fed).join(range(14, 20))
    state, notes = algorithm.admit(fed, state, range(14, 20))
    assert ari(scene.groups, state.clustering.labels) == 1.0
    assert state.clustering.labels[:14] == before.labels
    assert notes == {"opened_clusters": 0}
    assert served(algorithm, fed, state).shape[0] == 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cut": "test", "k": 2}, r"algorithm\.cut: 'test' .* algorithm\.k is given"),
        ({"cut": "gap", "beta": 9.0}, r"algorithm\.cut: 'gap' .* algorithm\.beta is given"),
        ({"cut": "elbow"}, "'elbow'"),
        ({"cut": "test", "variant": "authors"}, r"algorithm\.cut: 'test' goes with variant = 'paper'"),
        ({"cut": "test", "per_label": True}, r"algorithm\.cut: 'test' goes with per_label = false"),
        ({"linkage": "single"}, r"algorithm\.cut: 'test' .* linkage = 'single' goes with another cut"),
        ({"measure": "chordal"}, r"algorithm\.cut: 'test' .* measure = 'chordal'"),
    ],
)
def test_what_does_not_go_with_a_cut_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        pacfl(training(population()), **options)


def test_signatures_per_label_are_cut_by_silhouette() -> None:
    scene = well_tested_digits(8)
    for options in ({"variant": "authors"}, {"per_label": True}):
        algorithm = pacfl(train_on(scene), **options)
        assert algorithm.init(federation(scene)).notes["rule"] == "automatic (silhouette)"
        assert ALGORITHMS["pacfl"].compared(options).per_label


def test_the_old_key_says_what_it_is_called_now() -> None:
    with pytest.raises(InputError, match=r"\[algorithm\] auto = 'gap': is called cut now"):
        parse_config({"algorithm": {"name": "pacfl", "auto": "gap"}})


@pytest.mark.slow
@pytest.mark.parametrize(("rotations", "k"), [((0, 90), 2), ((), 1)])
def test_under_sample_level_privacy_the_number_of_groups_is_found_too(rotations: tuple[int, ...], k: int) -> None:
    """One noisy second moment a client takes the place of halves."""
    tree = {
        "data": {"clients": 20, "rotations": list(rotations), "test_samples_per_client": 20},
        "model": {"hidden": 4}, "training": {"rounds": 1, "weights": "equal", "batch_size": 10},
        "algorithm": {"name": "pacfl"},
        "privacy": {"unit": "sample", "epsilon": 20.0, "delta": 1e-5, "samples": 60, "sketch_dim": 12},
        "run": {"insecure_test_entropy": True, "record": "full"},
    }  # fmt: skip
    with pytest.warns(CflprivWarning):
        simulation = start(parse_config(tree))
    (message,) = [one for one in simulation.federation.transcript.messages if one.operation == "gram"]
    assert (message.payload or {})["rows"].shape == (20, 1, 78)
    clustering = simulation.algorithm.describe(simulation.state)["clustering"]
    assert clustering.k == k
    assert ari(simulation.population.groups, clustering.labels) == 1.0


def test_the_authors_variant_runs_with_ragged_widths() -> None:
    scene = build_population(DataSpec(partition="label_skew", skew_percent=30, clients=10, test_samples_per_client=20))
    algorithm = pacfl(train_on(scene), variant="authors", labels_at_most=3, k=3)
    state = algorithm.init(federation(scene))
    assert state.clustering.k == 3
    with pytest.raises(InputError, match="labels_at_most is 1"):
        pacfl(train_on(scene), variant="authors", labels_at_most=1).init(federation(scene))


def test_small_clusters_merge_inside_the_clustering() -> None:
    scene = well_tested_digits(20)
    state = pacfl(train_on(scene), beta=5.0).init(federation(scene, Protection(min_cohort=4, small_clusters="merge")))
    sizes = np.bincount(state.clustering.labels)
    assert (sizes >= 4).all() or len(sizes) == 1
    assert len(np.bincount(pacfl(train_on(scene), beta=5.0).init(federation(scene)).clustering.labels)) > len(sizes)


# --- newcomers


@pytest.mark.parametrize("name", PROTECTIONS)
@pytest.mark.parametrize("linkage", ["average", "weighted", "complete", "single"])
def test_newcomers_join_their_group(name: str, linkage: Any) -> None:
    scene = well_tested_digits(20)
    fed = federation(scene, PROTECTIONS[name], present=range(14))
    algorithm = pacfl(train_on(scene), weights="equal", linkage=linkage, cut="silhouette")
    assert algorithm.admit is not None
    state = after_rounds(algorithm, fed, 1)
    before = state.clustering
    eye(fed).join(range(14, 20))
    state, notes = algorithm.admit(fed, state, range(14, 20))
    assert ari(scene.groups, state.clustering.labels) == 1.0
    assert state.clustering.labels[:14] == before.labels
    assert notes == {"opened_clusters": 0, "recut_changes": 0}
    assert served(algorithm, fed, state).shape[0] == 20


def test_a_newcomer_like_nobody_opens_a_cluster() -> None:
    scene = well_tested_digits(10)
    odd = well_tested_digits(10, rotations=(180, 270)).clients[1]  # turned by 270 degrees: an angle that no member has
    stranger = replace(odd, id=10, x_train=1.0 - odd.x_train)
    fed = federation([*scene.clients, stranger], present=range(10))
    algorithm = pacfl(train_on(scene), beta=16.0, weights="equal", fine_tune_epochs=2)
    assert algorithm.admit is not None
    state = after_rounds(algorithm, fed, 1)
    k = state.clustering.k
    eye(fed).join([10])
    state, notes = algorithm.admit(fed, state, [10])
    assert notes["opened_clusters"] == 1
    assert state.clustering[10] == k
    assert eye(fed).peek(10, state.models[k]).shape == eye(fed).peek(10, state.initial).shape


@pytest.mark.slow
def test_newcomers_get_the_clusters_model_and_fine_tune_it() -> None:
    scene = well_tested_digits(20)
    plain, tuned = (pacfl(train_on(scene), weights="equal", fine_tune_epochs=epochs) for epochs in (0, 5))
    results = []
    for algorithm in (plain, tuned):
        fed = federation(scene, present=range(18))
        assert algorithm.admit is not None
        state = after_rounds(algorithm, fed, 2)
        eye(fed).join([18, 19])
        state, _ = algorithm.admit(fed, state, [18, 19])
        results.append((fed, state, served(algorithm, fed, state)))
    (fed, state, without), (_, _, with_) = results
    np.testing.assert_array_equal(without[18], without[next(c for c in range(18) if state.clustering[c] == state.clustering[18])])
    np.testing.assert_array_equal(with_[:18], without[:18])
    assert np.abs(with_[18:] - without[18:]).max() > 1e-3


def test_the_proximity_matrix_grows_by_new_rows_only() -> None:
    """Old entries are kept as they are, and the whole equals the matrix computed at once."""
    from cflpriv.algorithms.pacfl import ClusterByAngles, PlaceNewcomers

    scene = well_tested_digits(12)
    signatures = np.stack([principal_vectors(c.x_train.reshape(len(c.x_train), -1), 3) for c in scene.clients])
    asked: list[tuple[slice, slice]] = []

    def gram_of(n: int) -> Gram:
        inner = Gram.of_vectors(range(n), signatures[:n])

        def block(rows: slice, cols: slice) -> Array:
            asked.append((rows, cols))
            return inner.block(rows, cols)

        return Gram(inner.clients, 3, block)

    memory: dict[str, Any] = {}
    by = ClusterByAngles()
    by(GramView(gram_of(9), tuple(range(9)), memory))
    asked.clear()
    _, evidence = PlaceNewcomers(by)(GramView(gram_of(12), (9, 10, 11), memory))
    assert all(rows.start >= 9 for rows, _ in asked)
    whole = angles(Gram.of_vectors(range(12), signatures)).values
    np.testing.assert_allclose(evidence["distance"], whole, atol=1e-9)


# --- references


def test_oracle_and_shuffled_have_the_same_sizes_and_differ_in_who() -> None:
    scene = population(groups=3, clients_per_group=6)
    groups = true_groups(scene)
    train = training(scene)
    best, control = oracle(train, groups=groups), shuffled(train, groups=groups)
    fed = federation(scene)
    a, b = best.init(fed).clustering, control.init(fed).clustering
    assert ari(scene.groups, a.labels) == 1.0
    assert sorted(np.bincount(a.labels)) == sorted(np.bincount(b.labels))
    assert ari(scene.groups, b.labels) < 0.5
    with pytest.raises(InputError, match="no group"):
        oracle(train, groups={0: 0}).init(fed)


def test_unsampled_clusters_keep_their_model() -> None:
    scene = well_tested_digits(10)
    fed = federation(scene, sampling=Sampling("global", 0.1))
    algorithm = oracle(train_on(scene), groups=true_groups(scene))
    state = algorithm.init(fed)
    fed.begin_round(0)
    after, record = algorithm.round(fed, state)
    (waiting,) = record.notes["unchanged_clusters"]
    np.testing.assert_array_equal(after.models[waiting].value(), state.models[waiting].value())
    assert not np.array_equal(after.models[1 - waiting].value(), state.models[1 - waiting].value())


# --- signatures


def test_principal_vectors_are_the_left_singular_vectors() -> None:
    rng = np.random.default_rng(0)
    for n, d in ((40, 12), (12, 40), (20, 20)):
        x = rng.random((n, d)) + np.linspace(0, 3, d)
        ours = principal_vectors(x, 3)
        theirs = np.linalg.svd(x.T, full_matrices=False)[0][:, :3].T
        np.testing.assert_allclose(np.abs((ours * theirs).sum(axis=1)), 1.0, atol=1e-12)
        np.testing.assert_allclose(ours @ ours.T, np.eye(3), atol=1e-12)
        assert (ours.sum(axis=1) >= 0).all()


def test_more_vectors_than_the_rank_are_refused() -> None:
    x = np.outer(np.arange(1.0, 9.0), np.ones(5))
    assert principal_vectors(x, 1).shape == (1, 5)
    for p in (2, 6, 9):
        with pytest.raises(InputError, match=f"p = {p} .* rank 1"):
            principal_vectors(x, p)
    with pytest.raises(InputError, match="rank 0"):
        principal_vectors(np.zeros((4, 3)), 1)


def test_per_label_signatures_stack_and_pad() -> None:
    scene = build_population(DataSpec(partition="pathological", groups=((0, 1), (2, 3, 4)), clients=4))
    task = PrincipalVectors(2, per_label=True, labels_at_most=4)
    fed = federation(scene)
    held = fed.compute(task)
    widths = [int((np.linalg.norm(eye(fed).peek(c, held), axis=1) > 0).sum()) for c in fed.clients]
    assert [eye(fed).peek(c, held).shape for c in fed.clients] == [(8, 64)] * 4
    assert widths == [4, 6, 4, 6]
    first = eye(fed).data[0]
    np.testing.assert_allclose(eye(fed).peek(0, held)[:2], principal_vectors(first.x_train[first.y_train == 0].reshape(-1, 64), 2))


# --- refused before anything runs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"p": 0}, r"algorithm\.p = 0: expected"),
        ({"measure": "euclid"}, "'euclid'"),
        ({"variant": "mine"}, "'mine'"),
        ({"beta": 1.0, "k": 2}, "both"),
        ({"beta": -1.0}, "-1"),
        ({"beta": float("nan")}, "nan"),
        ({"k": 0}, r"algorithm\.k = 0: expected"),
        ({"fine_tune_epochs": -1}, "fine_tune_epochs"),
        ({"variant": "authors", "measure": "chordal"}, "chordal"),
    ],
)
def test_bad_parameters_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        pacfl(training(population()), **options)


def test_more_clusters_than_clients_is_refused() -> None:
    with pytest.raises(InputError, match="k = 9 clusters of 8"):
        pacfl(training(population()), k=9, p=2).init(federation(population()))
