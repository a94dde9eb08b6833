"""The baselines: their limits are algorithms already known, each has a case small enough for plain numpy, all keep the contract."""

import contextlib
import multiprocessing
from dataclasses import replace
from functools import partial
from math import comb
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import PROTECTIONS, eye, federation, mlp_training, population, training
from small_runs import after_rounds, agreement, digits, make_algorithm, true_groups
from torch.nn import functional

from cflpriv.algorithms import fedavg, local
from cflpriv.algorithms.ditto import MEMORY as PERSONAL
from cflpriv.algorithms.ditto import ditto
from cflpriv.algorithms.fedfomo import MEMORY as AFFINITY
from cflpriv.algorithms.fedfomo import Ask, fedfomo, first_order_weights
from cflpriv.algorithms.fednova import fednova
from cflpriv.algorithms.fedproto import class_means, fedproto
from cflpriv.algorithms.fedprox import fedprox
from cflpriv.algorithms.fesem import MEMORY as CENTRE
from cflpriv.algorithms.fesem import fesem, nearest_centre
from cflpriv.algorithms.interface import ALGORITHMS, Algorithm, BeforeRun
from cflpriv.algorithms.lg_fedavg import MEMORY as OWN_LAYERS
from cflpriv.algorithms.lg_fedavg import global_part, lg_fedavg
from cflpriv.algorithms.one_shot import ClusterByMeans, one_shot
from cflpriv.algorithms.per_fedavg import per_fedavg
from cflpriv.algorithms.scaffold import MEMORY as CONTROL
from cflpriv.algorithms.scaffold import ROUND, WAITING, scaffold
from cflpriv.algorithms.shared.around import steps_of, weight_of_steps
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import Gram
from cflpriv.contract.operations import GramView, Sampling
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript
from cflpriv.data import DataSpec, build_population
from cflpriv.engine import Engine, Streams, TaskInput, workers
from cflpriv.engine.models import Model
from cflpriv.errors import InputError, TooFewClients
from cflpriv.federation.server import FederationServer
from cflpriv.federation.task_encoding import task_from_bytes, task_to_bytes
from cflpriv.tasks.training import Gradient, Train
from cflpriv.types import Array, ClientData, Population

BASELINES = ("fedprox", "fednova", "scaffold", "ditto", "lg_fedavg", "per_fedavg", "fedfomo", "fedproto", "fesem", "one_shot")
ONE_MODEL = ("fedprox", "fednova", "scaffold", "ditto", "per_fedavg")


small_digits = partial(digits, samples_per_client=40)
train_on = partial(mlp_training, dtype="float64", momentum=0.5)


def uneven(scene: Population, sizes: tuple[int, ...] = (40, 23, 8, 31)) -> Population:
    """The same clients with different numbers of samples."""
    clients = tuple(
        replace(c, x_train=c.x_train[: sizes[i % len(sizes)]], y_train=c.y_train[: sizes[i % len(sizes)]])
        for i, c in enumerate(scene.clients)
    )
    return replace(scene, clients=clients)


def told(algorithm: Algorithm, fed: FederationServer, state: Any) -> Array:
    """The test loss of the model that each client would use."""
    what = algorithm.serve(state)
    results = eye(fed).engine.run(what.task, eye(fed).resolve(what.task, what.params, what.which, fed.clients))
    return np.array([float(one["loss"]) for one in results])


def update_of(train: Train, data: ClientData, model: Array, number: int = 0, seed: int = 0, **params: Any) -> Array:
    """What plain local training of one client gives."""
    given_ = TaskInput(data, {"model": model, **params}, {}, Streams(seed, number, data.id))
    return np.asarray(train.run(given_)["update"])


def gradient_of(model: Model, data: ClientData, vector: Array) -> Array:
    return np.asarray(Gradient(model).run(TaskInput(data, {"model": vector}, {}, Streams(0, 0, data.id)))["gradient"])


def kept(fed: FederationServer, client: int, name: str) -> Array:
    """What a client remembers under a name, which it must."""
    value = eye(fed).recall(client, name)
    assert value is not None
    return value


def control_of(fed: FederationServer, state: Any, client: int) -> Array:
    """SCAFFOLD's c_i as its client would go on from it in the next round."""
    return kept(fed, client, WAITING if state.summed.get(client) == int(kept(fed, client, ROUND)) else CONTROL)


def both(one: Algorithm, other: Algorithm, scene: Population, count: int = 3, **options: Any) -> tuple[Array, Array]:
    """The shared models after some rounds of two algorithms on like federations."""
    found = []
    for algorithm in (one, other):
        fed = federation(scene, **options)
        found.append(eye(fed).peek(fed.clients[0], after_rounds(algorithm, fed, count).model))
    return found[0], found[1]


# --- limits: what each must equal


@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_fedprox_without_its_term_is_fedavg_bit_for_bit(weights: Any) -> None:
    scene = uneven(small_digits())
    train = train_on(scene, dtype="float32")
    options: dict[str, Any] = {"sampling": Sampling("global", 0.5)}
    np.testing.assert_array_equal(*both(fedprox(train, mu=0.0, weights=weights), fedavg(train, weights=weights), scene, **options))
    pulled, plain = both(fedprox(train, mu=1.0, weights=weights), fedavg(train, weights=weights), scene, **options)
    assert np.abs(pulled - plain).max() > 1e-4


@pytest.mark.parametrize("protection", [Protection(), Protection(sum="haar")], ids=["none", "haar"])
def test_clients_of_fedavg_use_an_average_in_which_late_models_weigh_more(protection: Protection) -> None:
    """Weights (η + 1) / (t + η) of a running mean are those of C(t + η − 1, η) over all rounds; the models trained on are the same."""
    scene = uneven(small_digits())
    train, late = train_on(scene, dtype="float64"), 2.0
    models = []
    for count in range(1, 5):
        plain, averaging = federation(scene, protection), federation(scene, protection)
        state = after_rounds(fedavg(train, weights="equal", average=late), averaging, count)
        models.append(eye(plain).peek(plain.clients[0], after_rounds(fedavg(train, weights="equal"), plain, count).model))
        np.testing.assert_allclose(eye(averaging).peek(averaging.clients[0], state.model), models[-1], atol=1e-12)
        weights = [comb(t + 1, 2) for t in range(1, count + 1)]
        used = fedavg(train, weights="equal", average=late).serve(state).params["model"]
        expected = np.average(models, axis=0, weights=weights)
        np.testing.assert_allclose(eye(averaging).peek(averaging.clients[0], used), expected, atol=1e-12)


def test_private_fedavg_averages_unless_it_is_set_otherwise() -> None:
    spec = ALGORITHMS["fedavg"]
    assert spec.defaults({}, BeforeRun(10, "sample"))["average"] > 0
    assert spec.defaults({}, BeforeRun(10)) == spec.defaults({}, BeforeRun(10, "client")) == {}


def test_per_fedavg_without_its_inner_step_is_fedavg_bit_for_bit() -> None:
    scene = uneven(small_digits())
    train = train_on(scene, dtype="float32")
    np.testing.assert_array_equal(*both(per_fedavg(train, alpha=0.0), fedavg(train), scene))
    np.testing.assert_array_equal(*both(per_fedavg(train, alpha=0.0, beta=0.02), fedavg(replace(train, lr=0.02)), scene))
    fed = federation(scene)
    plain, meta = fedavg(train), per_fedavg(train, alpha=0.0)
    state = after_rounds(plain, fed, 2)
    np.testing.assert_array_equal(told(meta, fed, state), told(plain, fed, state))  # and no step before use


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_fednova_with_equal_steps_is_fedavg(momentum: float) -> None:
    scene = small_digits()
    train = train_on(scene, momentum=momentum, lr=0.02)
    for weights in ("equal", "examples"):
        nova, plain = both(fednova(train, weights=weights), fedavg(train, weights=weights), scene)
        np.testing.assert_allclose(nova, plain, rtol=0, atol=1e-12)
    unequal = uneven(scene)
    nova, plain = both(fednova(train), fedavg(train), unequal)
    assert np.abs(nova - plain).max() > 1e-4


def test_scaffolds_first_round_is_fedavg_with_equal_weights() -> None:
    scene = uneven(small_digits())
    train = train_on(scene)
    np.testing.assert_allclose(*both(scaffold(train), fedavg(train, weights="equal"), scene, 1), rtol=0, atol=1e-12)
    second, plain = both(scaffold(train), fedavg(train, weights="equal"), scene, 2)
    assert np.abs(second - plain).max() > 1e-5


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_ditto_without_its_pull_is_local_training_on_the_personal_models(participation: float) -> None:
    scene = uneven(small_digits())
    train = train_on(scene)
    one, two = (federation(scene, sampling=Sampling("global", participation), seed=2) for _ in range(2))
    after_rounds(ditto(train, lam=0.0), one, 4)
    alone = after_rounds(local(train), two, 4)
    met = [client for client in one.clients if eye(one).recall(client, PERSONAL) is not None]
    assert len(met) >= 4
    for client in met:
        np.testing.assert_allclose(kept(one, client, PERSONAL), eye(two).peek(client, alone.model), rtol=0, atol=1e-12)
    shared, plain = both(ditto(train, lam=3.0), fedavg(train), scene)
    np.testing.assert_array_equal(shared, plain)  # whatever λ is, w is FedAvg's


def test_lg_fedavg_with_all_layers_global_is_fedavg() -> None:
    scene = uneven(small_digits())
    train = train_on(scene)
    np.testing.assert_allclose(*both(lg_fedavg(train, global_layers=2), fedavg(train), scene), rtol=0, atol=1e-12)


def test_one_cluster_makes_fedavg_of_fesem() -> None:
    scene = small_digits()
    train = train_on(scene)
    fed, other = federation(scene), federation(scene)
    state, plain = after_rounds(fesem(train, k=1), fed, 3), after_rounds(fedavg(train, weights="equal"), other, 3)
    np.testing.assert_allclose(eye(fed).peek(0, state.models[0]), eye(other).peek(0, plain.model), rtol=0, atol=1e-12)


def test_fedproto_without_its_pull_is_local_training() -> None:
    scene = small_digits()
    train = train_on(scene)
    one, two = federation(scene), federation(scene)
    after_rounds(fedproto(train, lam=0.0), one, 3)
    alone = after_rounds(local(train), two, 3)
    for client in one.clients:
        np.testing.assert_allclose(kept(one, client, "trained"), eye(two).peek(client, alone.model), rtol=0, atol=1e-12)
    assert not [m for m in one.transcript.messages if m.operation == "compute"]  # and no prototype is sent for nothing


# --- small cases by hand


def test_fedprox_by_hand() -> None:
    """Two full-batch steps: g(θ₁) + μ (θ₁ − θ₀)."""
    scene = population(groups=1, clients_per_group=1)
    train = training(scene, epochs=2, batch_size=0, lr=0.1)
    fed = federation(scene)
    state = after_rounds(fedprox(train, mu=0.7), fed, 1)
    start = train.model.init(0)
    first = start - 0.1 * gradient_of(train.model, scene.clients[0], start)
    second = first - 0.1 * (gradient_of(train.model, scene.clients[0], first) + 0.7 * (first - start))
    np.testing.assert_allclose(state.model.value(), second, atol=1e-12)


@given(st.integers(1, 60), st.sampled_from([0.0, 0.3, 0.9]))
def test_the_weight_of_steps_is_how_far_constant_gradients_lead(steps: int, momentum: float) -> None:
    position, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        position += velocity
    assert weight_of_steps(steps, momentum) == pytest.approx(position, rel=1e-12)


@given(st.integers(1, 3), st.integers(0, 7), st.integers(1, 20), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_steps_are_those_that_training_takes(epochs: int, batch: int, samples: int, maml: float, rate: float) -> None:
    scene = population(groups=1, clients_per_group=1, samples=20)
    data = replace(scene.clients[0], x_train=scene.clients[0].x_train[:samples], y_train=scene.clients[0].y_train[:samples])
    train = training(scene, epochs=epochs, batch_size=batch, maml_lr=maml, sampling_rate=rate)
    given_ = TaskInput(data, {}, {}, Streams(0, 0, 0))
    if maml and steps_of(train, samples) == 0:
        with pytest.raises(InputError, match="client 0 has 1 batch, which makes no pair"):
            train.batches(given_)
    else:
        assert steps_of(train, samples) == len(train.batches(given_)) // (2 if maml else 1)


def test_fednova_by_hand() -> None:
    """Two clients of 12 and 4 samples in batches of 4: three steps and one."""
    scene = uneven(population(groups=1, clients_per_group=2), (12, 4))
    train = training(scene, batch_size=4)
    fed = federation(scene)
    state = after_rounds(fednova(train), fed, 1)
    start = train.model.init(0)
    one, two = (update_of(train, client, start) for client in scene.clients)
    effective = 12 / 16 * 3 + 4 / 16 * 1  # τ_eff = Σ p_i τ_i
    np.testing.assert_allclose(state.model.value(), start + effective * (12 / 16 * one / 3 + 4 / 16 * two / 1), atol=1e-12)


def test_scaffold_by_hand() -> None:
    """One full-batch step a round: after the first, c_i is client i's gradient and c their mean; the second is g_i − c_i + c."""
    scene = population(groups=2, clients_per_group=1)
    train = training(scene, batch_size=0, lr=0.2)
    fed = federation(scene)
    state = after_rounds(scaffold(train), fed, 2)
    start = train.model.init(0)
    controls = [gradient_of(train.model, client, start) for client in scene.clients]
    first = start - 0.2 * np.mean(controls, axis=0)
    steps = [gradient_of(train.model, c, first) - own + np.mean(controls, axis=0) for c, own in zip(scene.clients, controls, strict=True)]
    np.testing.assert_allclose(state.model.value(), first - 0.2 * np.mean(steps, axis=0), atol=1e-12)
    for client, data in zip(fed.clients, scene.clients, strict=True):
        np.testing.assert_allclose(kept(fed, client, CONTROL), gradient_of(train.model, data, start), atol=1e-12)
        np.testing.assert_allclose(control_of(fed, state, client), gradient_of(train.model, data, first), atol=1e-12)
    np.testing.assert_allclose(state.control.value(), np.mean([control_of(fed, state, c) for c in fed.clients], axis=0), atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "weights", "close"),
    [("none", "equal", 1e-10), ("none", "examples", 1e-10), ("haar", "equal", 1e-10), ("secagg", "equal", 1e-6),
     ("secagg", "examples", 1e-6), ("secagg-oblivious", "equal", 1e-6)],
)  # fmt: skip
def test_scaffolds_control_is_the_mean_of_what_its_clients_go_on_from(kind: Any, weights: Any, close: float) -> None:
    """Whoever is sampled, and whoever drops out, before or after the update is sent; up to the rounding of secure sums."""
    scene = uneven(small_digits())
    floor, limit = (2, 64.0 if weights == "examples" else 0.0) if kind.startswith("secagg") else (0, 0.0)
    fed = federation(
        scene, Protection(sum=kind, min_cohort=floor, max_weight=limit), sampling=Sampling("global", 0.8), dropout=0.1, seed=3,
        dropouts=[(0, 1, "Reveal"), (0, 3, "Masked"), (1, 5, "Advert")],
    )  # fmt: skip
    algorithm = scaffold(training(scene, batch_size=10, momentum=0.9, lr=0.02), weights=weights)
    state, contributors = algorithm.init(fed), set()
    for number in range(6):
        fed.begin_round(number)
        with contextlib.suppress(TooFewClients):
            state, _ = algorithm.round(fed, state)
        contributors.add(tuple(sorted(client for client, last in state.summed.items() if last == number)))
    assert len(contributors) > 3, "cohorts and dropouts differ"
    weight = {c.id: 1.0 if weights == "equal" else c.samples for c in scene.clients}
    trained = [client for client in fed.clients if eye(fed).recall(client, ROUND) is not None]
    total = np.sum([weight[client] * control_of(fed, state, client) for client in trained], axis=0)
    whole = state.each * state.counted
    np.testing.assert_allclose(eye(fed).peek(trained[0], state.control), total / whole, rtol=0, atol=close)
    assert np.abs(total / whole).max() > 0.01
    assert weights == "examples" or whole == len(fed.clients)


@pytest.mark.parametrize("kind", ["none", "haar"])
def test_scaffolds_control_stays_the_mean_when_clients_come_later(kind: Any) -> None:
    scene = small_digits()
    ids = [client.id for client in scene.clients]
    first = 2 if kind == "none" else 5  # a secret takes more than half of the roster
    fed = federation(scene, Protection(sum=kind), present=ids[:first])
    algorithm = scaffold(training(scene, batch_size=10, lr=0.02))
    state = algorithm.init(fed)
    for number in range(4):
        fed.begin_round(number)
        state, _ = algorithm.round(fed, state)
        if number == 1:
            eye(fed).join(ids[first:])
    mean = np.mean([control_of(fed, state, client) for client in ids], axis=0)
    np.testing.assert_allclose(eye(fed).peek(ids[0], state.control), mean, rtol=0, atol=1e-10)
    assert np.abs(mean).max() > 0.01


def mean_gradient(train: Train, scene: Population, fed: FederationServer, state: Any) -> float:
    """The norm of the mean of all clients' gradients at the shared model."""
    model = eye(fed).peek(fed.clients[0], state.model)
    return float(np.linalg.norm(np.mean([gradient_of(train.model, client, model) for client in scene.clients], axis=0)))


@pytest.mark.slow
def test_one_round_of_dropouts_does_not_keep_scaffold_from_the_optimum() -> None:
    scene = population(groups=2, clients_per_group=3, seed=1)
    train = training(scene, batch_size=0, epochs=3, lr=0.1)
    left = []
    for dropouts in ([], [(0, client, "Advert") for client in (0, 1, 2)]):
        fed = federation(scene, dropouts=dropouts, transcript=Transcript("headers"))
        left.append(mean_gradient(train, scene, fed, after_rounds(scaffold(train), fed, 150)))
    assert left[1] < 1.5 * left[0] < 0.05


@pytest.mark.slow
def test_scaffold_leaves_controls_alone_where_a_secure_sum_clips() -> None:
    """At first gradients are clipped, later they are small enough: the controls that begin then are whole."""
    scene = population(groups=2, clients_per_group=3, seed=1)
    train = training(scene, batch_size=0, epochs=3, lr=0.1)
    fed = federation(scene, Protection(sum="secagg", secagg_clip=0.1, min_cohort=2), transcript=Transcript("headers"))
    algorithm = scaffold(train)
    state, clipped, moved = algorithm.init(fed), [], []
    for number in range(40):
        fed.begin_round(number)
        state, record = algorithm.round(fed, state)
        clipped.append(record.notes["clipped_clients"])
        moved.append(record.notes["control_moved"])
    assert moved == [count == 0 for count in clipped]
    assert set(moved) == {False, True}
    mean = np.mean([control_of(fed, state, client) for client in fed.clients], axis=0)
    np.testing.assert_allclose(state.control.value(), mean, rtol=0, atol=1e-6)


def test_scaffolds_controls_are_clipped_no_more_than_its_updates() -> None:
    """In the first round the control is the update over lr ‖a‖, ten times as long here; as it travels it is no longer."""
    scene = uneven(small_digits())
    train = training(scene, batch_size=10, lr=0.1)
    fed = federation(scene)
    after_rounds(scaffold(train), fed, 1)
    (sent,) = [message for message in fed.transcript.messages if message.operation == "mean"]
    assert sent.payload is not None
    assert (np.abs(sent.payload["control"]) <= np.abs(sent.payload["update"]) + 1e-15).all()


def test_scaffolds_controls_are_mean_gradients_with_momentum_too() -> None:
    """On the way of one client from θ, Σ a_t g_t / ‖a‖₁; without the weight of momentum they would be almost tenfold."""
    scene = population(groups=1, clients_per_group=1)
    train = training(scene, batch_size=0, epochs=20, lr=1e-6, momentum=0.9)
    fed = federation(scene)
    after_rounds(scaffold(train), fed, 1)
    gradient = gradient_of(train.model, scene.clients[0], train.model.init(0))
    assert np.linalg.norm(kept(fed, 0, WAITING) - gradient) < 0.01 * np.linalg.norm(gradient)


def test_ditto_by_hand() -> None:
    """One full-batch step: v₁ = v₀ − η (∇F(v₀) + λ (v₀ − w)); in the first round v₀ = w, in the second they differ."""
    scene = population(groups=2, clients_per_group=1)
    train = training(scene, batch_size=0, lr=0.1)
    fed = federation(scene)
    after_rounds(ditto(train, lam=0.5), fed, 2)
    start = train.model.init(0)
    gradients = [gradient_of(train.model, client, start) for client in scene.clients]
    shared = start - 0.1 * np.mean(gradients, axis=0)
    for client, gradient in zip(scene.clients, gradients, strict=True):
        own = start - 0.1 * gradient
        expected = own - 0.1 * (gradient_of(train.model, client, own) + 0.5 * (own - shared))
        np.testing.assert_allclose(kept(fed, client.id, PERSONAL), expected, atol=1e-12)


def test_lg_fedavg_by_hand() -> None:
    """Global part: the mean of its updates; own part: each client's own training, which never travels."""
    scene = small_digits(3)
    train = train_on(scene)
    cut = global_part(train.model, 1)
    assert cut == 64 * 16 + 16
    fed = federation(scene)
    state = after_rounds(lg_fedavg(train), fed, 1)
    start = train.model.init(0)
    updates = {client.id: update_of(train, client, start) for client in scene.clients}
    np.testing.assert_allclose(state.model.value(), start[cut:] + np.mean([u[cut:] for u in updates.values()], axis=0), atol=1e-12)
    for client, update in updates.items():
        np.testing.assert_allclose(kept(fed, client, OWN_LAYERS), start[:cut] + update[:cut], atol=1e-12)
    sent = [m for m in fed.transcript.messages if m.source == "clients"]
    assert [m.bytes_each for m in sent] == [8 * (train.model.dimension - cut) + 8]  # and the sample count


def test_per_fedavg_by_hand() -> None:
    """One pair of full batches: θ − β ∇f(θ − α ∇f(θ)), and one more step of rate α before use."""
    scene = population(groups=1, clients_per_group=1)
    train = training(scene, batch_size=0, epochs=2)
    fed = federation(scene)
    algorithm = per_fedavg(train, alpha=0.3, beta=0.05)
    state = after_rounds(algorithm, fed, 1)
    data, model, start = scene.clients[0], train.model, train.model.init(0)
    expected = start - 0.05 * gradient_of(model, data, start - 0.3 * gradient_of(model, data, start))
    np.testing.assert_allclose(state.model.value(), expected, atol=1e-12)
    task = algorithm.serve(state).task
    used = task.used(TaskInput(data, {"model": expected}, {}, Streams(0, 0, 0)))  # type: ignore[attr-defined]
    np.testing.assert_allclose(used, expected - 0.3 * gradient_of(model, data, expected), atol=1e-12)


def test_fedfomos_weights_by_hand() -> None:
    raw, weights = first_order_weights(2.0, np.array([1.0, 1.5, 3.0, np.inf, 0.0]), [2.0, 0.5, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(raw, [0.5, 1.0, -1.0, 0.0, 0.0])
    np.testing.assert_allclose(weights, [1 / 3, 2 / 3, 0, 0, 0])
    assert not first_order_weights(0.0, np.array([1.0, 2.0]), [1.0, 1.0])[1].any()
    for own in (np.inf, np.nan):
        np.testing.assert_array_equal(first_order_weights(own, np.array([1.0, np.inf]), [1.0, 1.0]), np.zeros((2, 2)))


@given(st.integers(2, 12), st.integers(1, 6), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_fedfomo_asks_for_different_others_and_greedily_for_the_best(n: int, m: int, epsilon: float, seed: int) -> None:
    scene = population(groups=1, clients_per_group=1)
    affinity = np.array([np.arange(n), np.arange(n)], dtype=float)
    given_ = TaskInput(scene.clients[0], {}, {AFFINITY: affinity}, Streams(seed, 0, 0))
    wanted = Ask(tuple(range(n)), m, epsilon).run(given_)["wanted"]
    assert len(set(wanted)) == len(wanted) == min(m, n - 1)
    assert 0 not in wanted
    greedy = Ask(tuple(range(n)), m, 0.0).run(given_)["wanted"]
    assert list(greedy) == list(range(n))[1:][-m:]


def test_class_means_by_hand() -> None:
    scene = small_digits(2)
    model = train_on(scene).model
    vector, data = model.init(3), scene.clients[0]
    means, owned = class_means(model, vector, data.x_train, data.y_train)
    weight, bias = vector[: 64 * 16].reshape(16, 64), vector[64 * 16 : 64 * 16 + 16]
    features = np.maximum(data.x_train.reshape(len(data.y_train), 64) @ weight.T + bias, 0.0)
    for label in range(scene.classes):
        mine = features[data.y_train == label]
        assert owned[label] == (len(mine) > 0)
        np.testing.assert_allclose(means[label], mine.mean(axis=0) if len(mine) else np.zeros(16), atol=1e-6)


def test_the_pull_to_prototypes_is_the_gradient_of_what_is_written() -> None:
    """One step against autograd on the written loss; a class without a prototype pulls nothing."""
    scene = small_digits(2)
    data, train = scene.clients[0], train_on(scene, batch_size=0, momentum=0.0, pull=2.5)
    vector = train.model.init(0)
    prototypes = np.random.default_rng(0).normal(size=(scene.classes, 16))
    prototypes[3] = np.nan
    update = update_of(train, data, vector, prototypes=prototypes)
    x, y = torch.from_numpy(data.x_train).double().flatten(1), torch.from_numpy(data.y_train)
    leaf = torch.tensor(vector, requires_grad=True)
    w1, b1, w2, b2 = torch.split(leaf, [1024, 16, 160, 10])
    features = functional.relu(x @ w1.view(16, 64).T + b1)
    loss = functional.cross_entropy(features @ w2.view(10, 16).T + b2, y)
    for i in range(len(y)):
        if y[i] != 3:
            loss = loss + 2.5 * (features[i] - torch.from_numpy(prototypes)[y[i]]).square().mean() / len(y)
    np.testing.assert_allclose(update, -0.1 * torch.autograd.grad(loss, leaf)[0].numpy(), atol=1e-12)


def test_fedprotos_prototypes_are_means_over_the_owners() -> None:
    scene = build_population(DataSpec(partition="pathological", groups=((0, 1), (1, 2)), clients=4, test_samples_per_client=10))
    train = train_on(scene)
    fed = federation(scene)
    state = after_rounds(fedproto(train), fed, 1)
    start = train.model.init(0)
    means = []
    for client in scene.clients:
        trained = start + update_of(train, client, start)
        means.append(class_means(train.model, trained, client.x_train, client.y_train))
    assert sorted(state.prototypes) == [0, 1, 2]
    for label in state.prototypes:
        owners = [mean[label] for mean, owned in means if owned[label]]
        assert len(owners) == (4 if label == 1 else 2)
        np.testing.assert_allclose(state.prototypes[label].value(), np.mean(owners, axis=0), atol=1e-12)


@pytest.mark.slow
def test_fedprotos_classes_below_the_floor_are_dropped_and_owners_hidden_where_sums_are_oblivious() -> None:
    scene = build_population(DataSpec(partition="pathological", groups=((0, 1), (1, 2)), clients=8, test_samples_per_client=10))
    few = [replace(client, id=i) for i, client in enumerate(c for c in scene.clients if c.id not in (1, 7))]  # two own class 2
    fed = federation(few, Protection(sum="secagg-oblivious", min_cohort=3, secagg_clip=8.0))
    state = after_rounds(fedproto(train_on(scene)), fed, 2)
    assert sorted(state.prototypes) == [0, 1]  # class 2 has two owners
    assert not [m for m in fed.transcript.messages if m.operation == "gather"]
    assert "over those who own it" in fedproto(train_on(scene)).regroups
    with pytest.raises(InputError, match="difference of the two sums would show an individual"):
        after_rounds(fedproto(train_on(scene)), federation(few, Protection(sum="secagg", min_cohort=3, secagg_clip=8.0)), 2)


def test_fesem_by_hand() -> None:
    """After the first round each centre is the mean of its group's local models; after the second, of those nearest to it before."""
    scene = small_digits(6)
    train = train_on(scene)
    fed = federation(scene)
    algorithm = fesem(train, k=2, start="random")
    one = after_rounds(algorithm, fed, 1)
    start = train.model.init(0)
    trained = {client.id: start + update_of(train, client, start) for client in scene.clients}
    centres = []
    for j in range(2):
        members = [trained[client] for client in fed.clients if one.labels[client] == j]
        assert members
        centres.append(np.mean(members, axis=0))
        np.testing.assert_allclose(one.models[j].value(), centres[j], atol=1e-12)
    fed.begin_round(1)
    two, _ = algorithm.round(fed, one)
    again = {c.id: centres[one.labels[c.id]] + update_of(train, c, centres[one.labels[c.id]], 1) for c in scene.clients}
    nearest = {client: int(np.argmin([np.linalg.norm(again[client] - centre) for centre in centres])) for client in fed.clients}
    assert dict(two.labels) == nearest
    for j in set(nearest.values()):
        members = [again[client] for client in fed.clients if nearest[client] == j]
        np.testing.assert_allclose(two.models[j].value(), np.mean(members, axis=0), atol=1e-12)


@pytest.mark.parametrize("start", ["means", "random"])
def test_a_first_round_below_the_floor_leaves_no_centre_with_fesems_clients(start: Any) -> None:
    """The next round numbers its groups afresh: a number kept from before would be another group's."""
    scene = small_digits(6)
    fed = federation(scene, Protection(min_cohort=2), dropouts=[(0, client, "Advert") for client in range(1, 6)])
    algorithm = fesem(train_on(scene), k=2, start=start)
    state = algorithm.init(fed)
    fed.begin_round(0)
    with pytest.raises(TooFewClients):
        algorithm.round(fed, state)
    assert [eye(fed).recall(client, CENTRE) for client in range(6)] == [None] * 6
    fed.begin_round(1)
    assert fed.clients == tuple(range(6))
    state, _ = algorithm.round(fed, state)
    assert {client: int(kept(fed, client, CENTRE)) for client in fed.clients} == dict(state.labels)


@given(st.integers(1, 5), st.integers(0, 99))
def test_the_nearest_centre_is_nearest(k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, centres = rng.normal(size=7), rng.normal(size=(k, 7))
    assert nearest_centre(model, list(centres)) == int(((centres - model) ** 2).sum(axis=1).argmin())


def test_k_means_from_a_gram_is_k_means() -> None:
    """The best partition of few points, by trying all: from inner products alone."""
    rng = np.random.default_rng(1)
    points = rng.normal(size=(9, 5)) + 2.5 * rng.integers(0, 2, size=(9, 1))
    view = GramView(Gram.of_vectors(range(9), points[:, None, :]), tuple(range(9)), {})
    result, evidence = ClusterByMeans(2, 20, 0)(view)

    def inertia(labels: Array) -> float:
        return sum(float(((points[labels == z] - points[labels == z].mean(axis=0)) ** 2).sum()) for z in set(labels.tolist()))

    best = min(inertia(np.array([(code >> i) & 1 for i in range(9)])) for code in range(1, 2**8))
    assert inertia(result["labels"]) == pytest.approx(best, rel=1e-9)
    assert evidence["inertia"] == pytest.approx(best, rel=1e-9)
    assert result["labels"][0] == 0  # numbered by first client
    np.testing.assert_allclose(evidence["distance"][2, 5], np.linalg.norm(points[2] - points[5]), atol=1e-9)


# --- the common contract


@pytest.mark.parametrize("name", BASELINES)
def test_all_engine_paths_and_client_orders_give_the_same(name: str) -> None:
    scene = uneven(small_digits(6), (40, 33, 38, 31))
    found = []
    for clients, kind in ((scene.clients, "auto"), (scene.clients[::-1], "auto"), (scene.clients, "sequential")):
        fed = federation(clients, sampling=Sampling("global", 0.7), engine=Engine(kind))  # type: ignore[arg-type]
        algorithm = make_algorithm(name, train_on(scene, epochs=2))
        found.append(told(algorithm, fed, after_rounds(algorithm, fed, 3)))
        if kind == "auto":
            assert {path for task, path in eye(fed).engine.paths if task.startswith("Train") or task == "OnPart"} <= {"native", "stacked"}
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], found[2], rtol=0, atol=1e-10)  # losses are sums over samples


@pytest.mark.parametrize("name", BASELINES)
def test_its_tasks_travel_to_clients_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task that the algorithm computes or serves survives the encoding, unchanged, and gives the same there."""
    scene = small_digits(6)
    algorithm = make_algorithm(name, train_on(scene))
    fed, carried = federation(scene.clients), federation(scene.clients, transport="bytes")
    tasks, compute = list[Any](), carried.compute

    def travelling(task: Any, *rest: Any, **more: Any) -> Any:
        tasks.append(task)
        return compute(task, *rest, **more)

    monkeypatch.setattr(carried, "compute", travelling)
    state = after_rounds(algorithm, carried, 2)
    for task in (*tasks, algorithm.serve(state).task):
        assert task_from_bytes(task_to_bytes(task)) == task
    np.testing.assert_allclose(
        told(algorithm, carried, state), told(algorithm, fed, after_rounds(algorithm, fed, 2)), rtol=1e-9, atol=1e-12
    )


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked here: test_engine has some that start from nothing, which takes seconds."""
    monkeypatch.setattr(workers, "multiprocessing", SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork")))
    scene = uneven(small_digits(6), (40, 33, 38, 31))
    engine = Engine(workers=2)
    try:
        for name in BASELINES:
            found = []
            for one in (Engine(), engine):
                fed = federation(scene.clients, engine=one)
                algorithm = make_algorithm(name, train_on(scene, dtype="float32"))
                found.append(told(algorithm, fed, after_rounds(algorithm, fed, 2)))
            np.testing.assert_array_equal(found[0], found[1], err_msg=name)
    finally:
        engine.close()


def test_fesem_begun_at_random_is_the_same_where_sums_keep_groups_private() -> None:
    scene = small_digits(6)
    algorithm = make_algorithm("fesem", train_on(scene, lr=0.05), weights="equal", start="random")
    feds = [federation(scene, Protection(sum=kind, min_cohort=2, secagg_clip=8.0)) for kind in ("none", "secagg-oblivious")]
    results = [told(algorithm, fed, after_rounds(algorithm, fed, 3)) for fed in feds]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


@pytest.mark.parametrize("name", BASELINES)
def test_cohorts_below_the_floor_wait_or_train_alone(name: str) -> None:
    """With `small_clusters = "local"` and a cohort of two, where three are the minimum, nobody's update is summed; all are served on."""
    scene = build_population(DataSpec(partition="pathological", groups=((0, 1), (2, 3)), clients=6, test_samples_per_client=10))
    fed = federation(scene, Protection(min_cohort=3, small_clusters="local"), sampling=Sampling("global", 0.34))
    algorithm = make_algorithm(name, train_on(scene), start="random", k=1)
    losses = told(algorithm, fed, after_rounds(algorithm, fed, 3))
    assert np.isfinite(losses).all()
    sums = [m for m in fed.transcript.messages if m.operation == "mean" and m.round >= 0]
    assert not sums


@pytest.mark.parametrize("name", BASELINES)
def test_diverged_clients_take_no_part(name: str) -> None:
    scene = small_digits(6)
    broken = [replace(c, x_train=np.full_like(c.x_train, 3e38)) if c.id == 2 else c for c in scene.clients]
    fed = federation(broken)
    algorithm = make_algorithm(name, train_on(scene, dtype="float32", on_divergence="skip"))
    state = after_rounds(algorithm, fed, 2)
    shared = getattr(state, "model", None)
    if shared is not None and not shared.own:
        assert np.isfinite(shared.value()).all()
    sums = [m for m in fed.transcript.messages if m.operation == "mean"]
    assert all(2 not in m.clients for m in sums)


@pytest.mark.parametrize("name", BASELINES)
def test_newcomers_are_taken_and_served(name: str) -> None:
    scene = small_digits(8)
    fed = federation(scene, present=range(6))
    algorithm = make_algorithm(name, train_on(scene))
    assert algorithm.admit is not None
    state = after_rounds(algorithm, fed, 2)
    before = told(algorithm, fed, state)
    eye(fed).join([6, 7])
    state, _ = algorithm.admit(fed, state, [6, 7])
    after = told(algorithm, fed, state)
    np.testing.assert_array_equal(after[:6], before)  # nobody else is touched
    assert np.isfinite(after[6:]).all()
    clustering = algorithm.describe(state).get("clustering")
    assert clustering is None or {6, 7} <= set(clustering.clients)
    fed.begin_round(2)
    algorithm.round(fed, state)  # and the federation goes on with them


@pytest.mark.parametrize("name", BASELINES)
def test_diverged_clients_are_served_newcomers_too(name: str) -> None:
    scene = small_digits(8)
    broken = [replace(c, x_train=np.full_like(c.x_train, 3e38)) if c.id in (2, 7) else c for c in scene.clients]
    fed = federation(broken, present=range(6))
    algorithm = make_algorithm(name, train_on(scene, dtype="float32", on_divergence="skip"))
    assert algorithm.admit is not None
    state = after_rounds(algorithm, fed, 2)
    eye(fed).join([6, 7])
    state, _ = algorithm.admit(fed, state, [6, 7])
    assert np.isfinite(told(algorithm, fed, state)).all()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fedprox", {"mu": -1.0}, r"algorithm\.mu = -1\.0: expected"),
        ("fedprox", {"mu": float("nan")}, r"algorithm\.mu = nan: expected"),
        ("scaffold", {"global_lr": 0.0}, r"algorithm\.global_lr = 0\.0: expected"),
        ("ditto", {"lam": -0.1}, r"algorithm\.lam = -0\.1: expected"),
        ("ditto", {"personal_epochs": -1}, r"algorithm\.personal_epochs = -1: expected"),
        ("lg_fedavg", {"global_layers": 3}, r"algorithm\.global_layers: 3 of a model with 2 layers"),
        ("lg_fedavg", {"global_layers": -1}, r"algorithm\.global_layers = -1: expected"),
        ("per_fedavg", {"alpha": float("inf")}, r"algorithm\.alpha = inf: expected"),
        ("per_fedavg", {"beta": -1.0}, r"algorithm\.beta = -1\.0: expected"),
        ("fedfomo", {"models": 0}, r"algorithm\.models = 0: expected"),
        ("fedfomo", {"epsilon": 1.5}, r"algorithm\.epsilon = 1\.5: expected"),
        ("fedfomo", {"validation": 0.0}, r"algorithm\.validation = 0\.0: expected"),
        ("fedproto", {"lam": -1.0}, r"algorithm\.lam = -1\.0: expected"),
        ("fesem", {"k": 0}, r"algorithm\.k = 0: expected"),
        ("fesem", {"start": "k-means++"}, r"algorithm\.start = 'k-means\+\+': expected"),
        ("one_shot", {"local_epochs": 0}, r"algorithm\.local_epochs = 0: expected"),
        ("one_shot", {"k": 0}, r"algorithm\.k = 0: expected"),
    ],
)
def test_bad_parameters_are_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_algorithm(name, train_on(small_digits(2)), **options)


def test_what_only_the_clients_can_tell_is_refused_when_they_are_there() -> None:
    scene = small_digits(4)
    for algorithm in (fesem(train_on(scene), k=5), one_shot(train_on(scene), k=5)):
        with pytest.raises(InputError, match="5 clusters of 4 clients"):
            algorithm.init(federation(scene))
    few = [replace(c, x_train=c.x_train[:1], y_train=c.y_train[:1]) for c in scene.clients]
    with pytest.raises(InputError, match="held back"):
        fedfomo(train_on(scene)).init(federation(few))
    with pytest.raises(InputError, match="makes no pair"):
        per_fedavg(train_on(scene, batch_size=0))
    with pytest.raises(InputError, match="client 0 has 1 batch, which makes no pair"):  # or it would stay at the initial model
        after_rounds(per_fedavg(train_on(scene, batch_size=64)), federation(scene), 1)


# --- what the papers claim, on real digits


def global_loss(model: Model, scene: Population, vector: Array) -> float:
    """The mean training loss over all samples of all clients, weighted by client."""
    losses = []
    for client in scene.clients:
        module = model.load(vector)
        with torch.no_grad():
            losses.append(float(functional.cross_entropy(module(model.inputs(client.x_train)), torch.from_numpy(client.y_train))))
    return float(np.mean(losses))


def skewed(clients: int = 10, sizes: tuple[int, ...] = (60,)) -> Population:
    scene = build_population(DataSpec(partition="label_skew", skew_percent=20, clients=clients, test_samples_per_client=20))
    return uneven(scene, sizes)


@pytest.mark.slow
def test_scaffold_beats_fedavg_under_client_drift() -> None:
    """Label skew, full participation, 20 local steps a round: FedAvg settles away from the optimum, SCAFFOLD goes on towards it."""
    scene = skewed()
    model = Model("linear", scene.shape, scene.classes, dtype="float64")
    train = Train(model, epochs=20, batch_size=0, lr=0.2)
    losses = [global_loss(model, scene, one) for one in both(scaffold(train), fedavg(train, weights="equal"), scene, 40)]
    assert losses[0] < 0.7 * losses[1]


@pytest.mark.slow
def test_fednova_is_not_misled_by_unequal_numbers_of_steps() -> None:
    """Label skew with unequal sample counts and equal weights: FedAvg leans to whoever takes most steps, FedNova does not."""
    scene = skewed(sizes=(80, 10))
    model = Model("linear", scene.shape, scene.classes, dtype="float64")
    train = Train(model, epochs=2, batch_size=5, lr=0.05)
    losses = [global_loss(model, scene, one) for one in both(fednova(train, weights="equal"), fedavg(train, weights="equal"), scene, 40)]
    assert losses[0] < losses[1]


def test_fedprox_keeps_clients_together() -> None:
    scene = skewed()
    spreads = []
    for mu in (0.0, 1.0):
        fed = federation(scene)
        after_rounds(fedprox(train_on(scene, epochs=5), mu=mu), fed, 3)
        trained = np.stack([one for one in (eye(fed).recall(client, "trained") for client in fed.clients) if one is not None])
        spreads.append(float(np.linalg.norm(trained - trained.mean(axis=0), axis=1).mean()))
    assert spreads[1] < 0.8 * spreads[0]


@pytest.mark.parametrize(
    "name", ["ditto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lg_fedavg", "per_fedavg", "fedfomo", "fedproto"))]
)
def test_personal_models_beat_the_shared_one_under_label_skew(name: str) -> None:
    scene = skewed()
    losses = []
    for one in (name, "fedavg"):
        fed = federation(scene)
        algorithm = make_algorithm(one, train_on(scene, epochs=2), alpha=0.1)
        losses.append(told(algorithm, fed, after_rounds(algorithm, fed, 10)).mean())
    assert losses[0] < losses[1]


def test_fedfomo_finds_those_who_are_alike() -> None:
    """After some rounds, clients turned alike have most of a client's affinity; asking, they ask each other."""
    scene = small_digits(8, samples_per_client=80)
    fed = federation(scene)
    after_rounds(fedfomo(train_on(scene, epochs=3), models=3), fed, 8)
    groups = true_groups(scene)
    inside = 0
    for client in fed.clients:
        affinity = kept(fed, client, AFFINITY)
        best = affinity[0][np.argsort(-affinity[1])][:3].astype(int)
        inside += sum(groups[int(other)] == groups[client] for other in best)
    assert inside >= 18  # of 24; at random 24 · 3/7 ≈ 10.3, and 18 or more has probability below 0.002


@pytest.mark.parametrize("name", PROTECTIONS)
def test_one_shot_finds_rotated_groups_and_places_newcomers(name: str) -> None:
    scene = small_digits(12, samples_per_client=80)
    fed = federation(scene, PROTECTIONS[name], present=range(9))
    algorithm = one_shot(train_on(scene), k=2, weights="equal")
    state = after_rounds(algorithm, fed, 1)
    assert agreement(scene, state.clustering) == 1.0
    eye(fed).join([9, 10, 11])
    assert algorithm.admit is not None
    state, notes = algorithm.admit(fed, state, [9, 10, 11])
    assert agreement(scene, state.clustering) == 1.0
    assert len(notes["joined"]) == 3


def test_one_shots_clusters_that_cannot_be_averaged_start_from_the_initial_model() -> None:
    """Two groups of four under a minimum cohort size of three; of each, two drop out of the one shot's mean, so no group is left to sum."""
    scene = small_digits(8)
    train = train_on(scene)
    drops = [(-1, client, "Masked") for group in (0, 1) for client in [c for c, g in true_groups(scene).items() if g == group][:2]]
    fed = federation(scene, Protection(sum="secagg", min_cohort=3), dropouts=drops)
    state = one_shot(train, k=2, weights="equal").init(fed)
    assert ari(scene.groups, [state.clustering[client.id] for client in scene.clients]) == 1.0
    for model in state.models:
        np.testing.assert_array_equal(eye(fed).peek(0, model), train.model.init(0))


def test_one_shot_under_private_groups_is_refused_before_anything_runs() -> None:
    scene = small_digits(8)
    assert one_shot(train_on(scene), k=2).public_groups
    assert not one_shot(train_on(scene), k=1).public_groups


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fesem_finds_groups_with_other_labels(seed: int) -> None:
    halves = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    spec = DataSpec(partition="pathological", groups=halves, clients=12, samples_per_client=60, test_samples_per_client=10, seed=seed)
    scene = build_population(spec)
    fed = federation(scene, present=range(10), seed=seed)
    algorithm = fesem(train_on(scene), k=2, seed=seed)
    state = after_rounds(algorithm, fed, 5)
    eye(fed).join([10, 11])
    assert algorithm.admit is not None
    state, _ = algorithm.admit(fed, state, [10, 11])
    assert ari(scene.groups, [state.labels[client] for client in fed.clients]) == 1.0
