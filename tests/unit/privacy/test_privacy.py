"""Differential privacy through the operations: nothing leaves un-noised, everything that leaves is charged once, noise is what it is said
to be.

Statistical tests run on fixed public entropy and reject at p < 1e-6.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import scenes
from checkout import ROOT
from scenes import task_input
from scipy import stats
from small_runs import configured

from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.handles import OwnAddend, Shared
from cflpriv.contract.protection import Protection
from cflpriv.engine import Engine, Streams, TaskInput, compiled
from cflpriv.engine.models import MODELS, Model
from cflpriv.errors import CflprivWarning, InputError, TrainingDiverged
from cflpriv.experiments import advance, load_config, parse_config, run_experiment
from cflpriv.experiments.config.config import Config
from cflpriv.federation.client_ledger import SPENT, ClientLedger
from cflpriv.federation.server import FederationServer
from cflpriv.federation.values import Origin
from cflpriv.privacy.client_level import client_noise
from cflpriv.privacy.private_signatures import NoisyGradient, noisy_principal_vectors, sketch_directions, unit_rows
from cflpriv.privacy.receipts import PrivacyLedger
from cflpriv.privacy.settings import Noise, Privacy, Releases, plan_noise
from cflpriv.protocols.accounting import epsilon_of
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.events import ChoiceEvent, GaussianEvent, Relation, SampledGaussianEvent, event_from
from cflpriv.protocols.ledger import BudgetExceeded, Ledger, PrivacyBudget
from cflpriv.protocols.mechanisms import noisy_argmin
from cflpriv.tasks.evaluation import Losses
from cflpriv.tasks.signatures import PrincipalVectors
from cflpriv.tasks.training import Gradient, Train
from cflpriv.types import Array, ClientData, Parts, Population

ALPHA = 1e-6
RELATIONS: tuple[Literal["add_remove", "replace_one"], ...] = ("add_remove", "replace_one")
NOISE = Noise("add_remove", 1.5, 2.0, 0.5, 1.0, 0.25, 20, 0, 4.0, 0)


def private_federation(
    scene: Population, noise: Noise = NOISE, epsilon: float = 50.0, demand: bool = True, **options: Any
) -> tuple[FederationServer, Ledger]:
    """A server with its ledger. Its clients `demand` the same, by ledgers of their own, or take the server's word."""
    ledger = Ledger(PrivacyBudget(epsilon, 1e-5, noise.relation, "sample"))
    privacy = Privacy("sample", noise.relation, epsilon, 1e-5, samples=noise.samples, sketch_dim=noise.sketch_dim) if demand else Privacy()
    return scenes.federation(scene, privacy_ledger=PrivacyLedger(noise, ledger), privacy=privacy, **options), ledger


@dataclass(frozen=True)
class Half:
    """A task whose choice carries noise, and its vector of `size` numbers does not."""

    size: int = 3
    noisy: bool = False
    parts: ClassVar[Parts] = {"choice": "choice", "vector": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ("vector",)
    covers: ClassVar[Mapping[str, tuple[str, ...]]] = {"choice": ("choice",)}

    @property
    def events(self) -> dict[str, ChoiceEvent]:
        return {"choice": ChoiceEvent(0.5, "add_remove", "sample")} if self.noisy else {}

    def private(self, noise: Noise) -> "Half":
        return replace(self, noisy=True)

    def run(self, given: TaskInput) -> dict[str, Array]:
        return {"choice": np.array(given.data.id % 2), "vector": np.full(self.size, float(given.data.id))}


@dataclass(frozen=True)
class Recall:
    """A task that gives what the client remembers under a name."""

    name: str
    uses_data: ClassVar[bool] = False
    parts: ClassVar[Parts] = {"value": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name,)

    def run(self, given: TaskInput) -> dict[str, Array]:
        return {"value": given.memory[self.name]}


def input_with_secret(data: ClientData, params: dict[str, Any], label: str = "secret") -> TaskInput:
    return task_input(data, params, public_entropy(label)(32))


# --- what leaves, and what it costs -------------------------------------------------------------------------------------------------------


def test_an_update_is_charged_once_and_showing_it_again_is_free() -> None:
    scene = scenes.population()
    fed, ledger = private_federation(scene)
    task = scenes.training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})
    steps = SampledGaussianEvent(1.5, 0.25, 4, 1.0, "add_remove")
    assert [one.events for one in ledger.charges] == [(steps,)]
    assert ledger.charges[0].clients == fed.clients
    fed.mean(held["update"])
    fed.gram(held["update"], then=lambda view: ({}, {}))
    fed.gather(held["update"])
    assert len(ledger.charges) == 1
    fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])
    assert len(ledger.charges) == 2, "new noise, new charge"


@pytest.mark.parametrize("operation", ["mean", "gram", "gather", "relay"])
def test_no_operation_releases_what_has_no_noise(operation: str) -> None:
    scene = scenes.population()
    fed, ledger = private_federation(scene)
    held = fed.compute(Half())["vector"]
    before, paid = len(fed.transcript.messages), list(ledger.charges)
    operations: dict[str, Any] = {"mean": fed.mean, "gather": fed.gather, "relay": fed.relay}
    operations["gram"] = lambda one: fed.gram(one, then=lambda view: ({}, {}))
    with pytest.raises(InputError, match=f"{operation}: 'vector' of Half was made of samples without noise"):
        operations[operation](held)
    with pytest.raises(InputError, match="compute: Make has no noise here"):
        fed.compute(scenes.Make())
    assert ledger.charges == paid
    assert len(fed.transcript.messages) == before


def test_who_asks_for_whom_is_paid_before_it_is_read() -> None:
    scene = scenes.population()
    fed, ledger = private_federation(scene)
    task = scenes.training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    wanted = fed.compute(Half())["vector"]  # of the data, without noise
    paid = list(ledger.charges)
    with pytest.raises(InputError, match="relay: 'vector' of Half was made of samples without noise"):
        fed.relay(held, to=wanted)
    assert ledger.charges == paid, "whose update was wanted is not in the ledger"


def test_counts_are_never_released() -> None:
    scene = scenes.population()
    fed, _ = private_federation(scene)
    task = scenes.training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})
    with pytest.raises(InputError, match="'count' of Train"):
        fed.mean(held["update", "count"])
    with pytest.raises(InputError, match="sample counts"):
        fed.mean(held["update"], weights="examples")


def test_noise_does_not_wash_out_what_it_was_computed_from() -> None:
    """A private training that starts from a client's un-noised value is as public as that value: not at all."""
    scene = scenes.population()
    task = scenes.training(scene)
    for demand in (False, True):
        fed, ledger = private_federation(scene, demand=demand)
        secret_start = fed.compute(Half(task.model.dimension))["vector"]
        start = {"model": Shared(task.model.init(0), own=(OwnAddend(secret_start),))}
        half = [ChoiceEvent(0.5, "add_remove", "sample")]
        assert [event for one in ledger.charges for event in one.events] == half
        if demand:  # what fails for it would tell of the data
            with pytest.raises(InputError, match=r"'forbidden'.*is given what was computed without noise"):
                fed.compute(task, start)
        else:
            with pytest.raises(InputError, match="without noise"):
                fed.mean(fed.compute(task, start)["update"])
    # and one that starts from a private value costs both, each once
    fed, ledger = private_federation(scene)
    first = fed.compute(task, {"model": task.model.init(0)})["update"]
    second = fed.compute(task, {"model": Shared(task.model.init(0), own=(OwnAddend(first),))})["update"]
    fed.mean(second)
    fed.mean(first)
    assert [len(one.events) for one in ledger.charges] == [1, 1]


def test_a_training_that_diverges_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends and names a client, which tells something of its samples, and of those of whoever came before."""
    scene = scenes.population()
    fed, ledger = private_federation(scene)
    task = scenes.training(scene, lr=1e300, weight_decay=10.0)
    start = {"model": task.model.init(0)}
    with pytest.raises(TrainingDiverged, match="client 0: training in round"):
        fed.compute(task, start)
    assert [(one.clients, one.events) for one in ledger.charges] == [
        (fed.clients, (SampledGaussianEvent(1.5, 0.25, 4, 1.0, "add_remove"),))
    ]
    fed, ledger = private_federation(scene, epsilon=0.01)
    with pytest.raises(BudgetExceeded):  # and nobody is named whose budget does not allow it
        fed.compute(task, start)
    fed, ledger = private_federation(scene)
    result = Train._result
    monkeypatch.setattr(Train, "_result", lambda self, one, *rest: {} if one.data.id == 3 else result(self, one, *rest))
    held = fed.compute(scenes.training(scene), start)
    assert held.clients == fed.clients, "who takes part does not tell who has no result"
    assert not np.any(fed.gather(held["update"])[3]["update"])
    assert [one.clients for one in ledger.charges] == [fed.clients]


def test_what_clients_remember_keeps_its_price() -> None:
    scene = scenes.population()
    task = scenes.training(scene)
    for demand in (False, True):
        fed, ledger = private_federation(scene, demand=demand)
        fed.compute(task, {"model": task.model.init(0)})
        fed.compute(Half())
        paid = list(ledger.charges)
        fed.mean(fed.compute(Recall("trained"))["value"])
        assert len(paid) == 2
        assert ledger.charges == paid, "the trained model is private, and it was charged"
        with pytest.raises(InputError, match="'forbidden'" if demand else "'value' of Recall"):
            fed.mean(fed.compute(Recall("vector"))["value"])


def test_what_was_remembered_before_a_resume_is_not_taken_for_public() -> None:
    scene = scenes.population()
    for demand in (False, True):
        fed, ledger = private_federation(scene, demand=demand)
        for client in fed.clients:  # as a checkpoint puts it back, without its receipts
            scenes.eye(fed).client(client).values.remember("trained", np.zeros(3), Origin())
        fed.restore(fed.saved())
        with pytest.raises(InputError, match="'forbidden'" if demand else "without noise"):
            fed.mean(fed.compute(Recall("trained"))["value"])
        assert ledger.charges == []


def test_a_release_over_budget_is_refused_before_anything_is_sent() -> None:
    scene = scenes.population()
    task = scenes.training(scene)
    steps = SampledGaussianEvent(1.5, 0.25, 4, 1.0, "add_remove")
    fed, ledger = private_federation(scene, epsilon=epsilon_of([steps] * 2, 1e-5))
    for round in range(2):
        fed.begin_round(round)
        fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])
    fed.begin_round(2)
    sent = len(fed.transcript.messages)
    with pytest.raises(BudgetExceeded):
        fed.compute(task, {"model": task.model.init(0)})
    assert len(fed.transcript.messages) == sent
    assert len(ledger.charges) == 2


def test_clients_in_groups_too_small_pay_for_no_sum() -> None:
    """Those who share their noise pay for each sum that they are in; those with noise of their own paid before they trained."""
    scene = scenes.population()
    groups = {client: int(client < 2) for client in range(8)}
    secure = Protection(sum="secagg", min_cohort=3, secagg_mode="passive")
    for noise, protection, paying in (
        (NOISE, Protection(min_cohort=3), range(8)),
        (replace(NOISE, shares=3), secure, range(2, 8)),
    ):
        fed, ledger = private_federation(scene, noise, demand=not noise.shares, protection=protection)
        held = fed.compute(scenes.training(scene), {"model": scenes.training(scene).model.init(0)})["update"]
        fed.mean(held, groups=groups, k=2)
        assert sorted(ledger.clients) == list(paying)


# --- the noise of each private task ------------------------------------------------------------------------------------------------


def linear(features: int = 6, classes: int = 3) -> Model:
    return Model("linear", (features,), classes, dtype="float64")


def client(n: int = 40, features: int = 6, seed: int = 0, id: int = 0) -> ClientData:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, features)), rng.integers(3, size=n)
    return ClientData(id, x, y, x[:1], y[:1])


@pytest.mark.parametrize("name", [pytest.param("linear", marks=pytest.mark.slow), "mlp"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "weight_decay": 0.1, "prox": 0.2}, {"maml_lr": 0.1}])
def test_the_engine_adds_the_same_noise_as_the_plain_loop(name: str, options: dict[str, float]) -> None:
    model = Model(name, (6,), 3, hidden=5, dtype="float64")
    task = Train(model, epochs=2, lr=0.2, **options).private(replace(NOISE, samples=40))  # type: ignore[arg-type]
    inputs = [input_with_secret(client(30 + 5 * i, seed=i, id=i), {"model": model.init(0)}, f"{i}") for i in range(5)]
    plain = Engine("sequential").run(task, inputs)
    kernel, torch_alone = Engine(), Engine("torch")
    for engine in (kernel, torch_alone):
        for one, other in zip(engine.run(task, inputs), plain, strict=True):
            np.testing.assert_allclose(one["update"], other["update"], rtol=1e-9, atol=1e-12)
    assert torch_alone.paths == {("Train", "stacked"): 5}
    assert kernel.paths == {("Train", "stacked" if compiled.library() is None or task.maml_lr else "native"): 5}


@pytest.mark.slow
def test_training_noise_has_its_size_and_its_own_secret() -> None:
    model = linear()
    noise = replace(NOISE, sampling_rate=1.0, samples=25, training=1.7, clip_norm=0.6)
    task = Train(model, epochs=1, lr=1.0).private(noise)
    data = client()
    updates = np.stack([np.asarray(task.run(input_with_secret(data, {"model": model.init(0)}, str(i)))["update"]) for i in range(150)])
    residual = (updates - updates.mean(axis=0)).ravel()
    sigma = 1.7 * 0.6 / 25
    degrees = (len(updates) - 1) * updates.shape[1]
    total = float(np.square(residual / sigma).sum())
    assert stats.chi2(degrees).sf(total / (1 + 1 / 768)) > ALPHA
    assert stats.chi2(degrees).cdf(total) > ALPHA
    again = task.run(input_with_secret(data, {"model": model.init(0)}, "7"))["update"]
    assert np.array_equal(again, updates[7]), "noise comes from the secret"
    with pytest.raises(InputError, match="secret randomness"):
        task.run(replace(input_with_secret(data, {"model": model.init(0)}), secret=b""))


@pytest.mark.parametrize("kind", ["auto", "torch", "sequential"])
def test_a_sample_whose_gradient_overflows_moves_the_sum_by_nothing(kind: Any) -> None:
    model = linear()
    data = client(12)
    wild = ClientData(0, np.vstack([data.x_train, np.full((1, 6), 1e308)]), np.append(data.y_train, 0), data.x_test, data.y_test)
    task = Train(model, epochs=1, lr=1.0).private(replace(NOISE, sampling_rate=1.0, training=1e-9))
    start = model.init(0) * 100
    one, other = (np.asarray(Engine(kind).run(task, [input_with_secret(each, {"model": start})])[0]["update"]) for each in (data, wild))
    assert np.isfinite(other).all()
    np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", ["auto", "torch", "sequential"])
def test_a_convolution_whose_product_overflows_spoils_nobody_else(kind: Any) -> None:
    """Input and gradient of a layer are finite, their product is not, and 0 · ∞ would be no number."""
    model = Model("lenet5", (1, 28, 28), 3)
    start = model.init(0)
    for (_, shape, offset), factor in ((model.layout[0], 1e-20), (model.layout[-2], 1e12)):
        start[offset : offset + math.prod(shape)] *= factor
    rng = np.random.default_rng(0)
    x, y = rng.random((6, 1, 28, 28)).astype(np.float32), rng.integers(3, size=6)
    more = np.concatenate([x, np.full((1, 1, 28, 28), 1e30, np.float32)])
    pair = (ClientData(0, x, y, x[:1], y[:1]), ClientData(0, more, np.append(y, 0), x[:1], y[:1]))
    task = Train(model, epochs=1, lr=1.0).private(replace(NOISE, sampling_rate=1.0, training=1e-9))
    one, other = (np.asarray(Engine(kind).run(task, [input_with_secret(data, {"model": start})])[0]["update"]) for data in pair)
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_masks_of_a_dropout_are_drawn_from_the_secret() -> None:
    """With masks that the public seed tells, one sample more would move those of all after it, and the sum by more than the bound."""
    from torch import nn

    model = Model("dropping", (6,), 3, dtype="float64", factory=lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)))
    task = Train(model, epochs=1, lr=1.0).private(replace(NOISE, sampling_rate=1.0, training=1e-9))
    start = model.init(0)
    inputs = [input_with_secret(client(), {"model": start}, label) for label in ("a", "a", "b")]
    inputs[1] = replace(inputs[1], streams=Streams(9, 9, 0))
    one, same, other = (np.asarray(task.run(each)["update"]) for each in inputs)
    np.testing.assert_allclose(one, same, atol=1e-12)
    assert not np.allclose(one, other, atol=1e-3)


def test_poisson_batches_come_from_the_secret_and_not_from_the_public_seed() -> None:
    task = Train(linear(), epochs=50, lr=1.0).private(replace(NOISE, sampling_rate=0.25))
    one, same, other = (task.batches(input_with_secret(client(), {}, label)) for label in ("a", "a", "b"))
    assert all(np.array_equal(x, y) for x, y in zip(one, same, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))
    assert len(one) == task.steps == 200
    drawn = np.bincount(np.concatenate(one), minlength=40)
    assert stats.chisquare(drawn, np.full(40, drawn.sum() / 40)).pvalue > ALPHA
    assert stats.binomtest(int(drawn.sum()), 40 * 200, 0.25).pvalue > ALPHA


def test_balls_in_bins_put_each_sample_into_one_secret_batch_of_each_pass() -> None:
    task = Train(linear(), epochs=60, lr=1.0).private(replace(NOISE, sampling_rate=0.25, allocated=True))
    one, same, other = (task.batches(input_with_secret(client(), {}, label)) for label in ("a", "a", "b"))
    assert all(np.array_equal(x, y) for x, y in zip(one, same, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))
    assert len(one) == task.steps == 240
    bins = np.empty((60, 40), np.int64)
    for epoch in range(60):
        batches = one[4 * epoch : 4 * epoch + 4]
        assert sorted(np.concatenate(batches)) == list(range(40))
        for number, batch in enumerate(batches):
            bins[epoch, batch] = number
    assert stats.chisquare(np.bincount(bins.ravel())).pvalue > ALPHA
    together = np.bincount(4 * bins[:, 0] + bins[:, 1], minlength=16)  # two samples are drawn apart, and passes are
    again = np.bincount((4 * bins[:-1] + bins[1:]).ravel(), minlength=16)
    assert stats.chisquare(together).pvalue > ALPHA
    assert stats.chisquare(again).pvalue > ALPHA


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("kind", ["auto", "torch", "sequential"])
def test_no_neighbouring_clients_train_further_apart_than_the_event_says(relation: Any, kind: Any) -> None:
    """One full-batch step with noise too small to see: how far one sample, however extreme, moves the update."""
    model = linear()
    noise = replace(NOISE, relation=relation, sampling_rate=1.0, samples=10, training=1e-9, clip_norm=0.8)
    task = Train(model, epochs=1, lr=1.0).private(noise)
    rng = np.random.default_rng(3)
    furthest = 0.0
    for i in range(60):
        x, y = rng.normal(size=(5, 6)) * 10.0 ** rng.uniform(-2, 3), rng.integers(3, size=5)
        last = ClientData(0, x, y, x[:1], y[:1])
        if relation == "add_remove":
            other = ClientData(0, x[:-1], y[:-1], x[:1], y[:1])
        else:  # the opposite: another label of the same input turns the gradient round, another input turns it anywhere
            x2, y2 = x.copy(), y.copy()
            x2[-1] = x[-1] if i % 2 else -x[-1] * 7
            y2[-1] = (y[-1] + 1 + i % 2) % 3
            other = ClientData(0, x2, y2, x[:1], y[:1])
        start = model.init(i)
        results = [Engine(kind).run(task, [input_with_secret(one, {"model": start})])[0] for one in (last, other)]
        furthest = max(furthest, float(np.linalg.norm(np.asarray(results[0]["update"]) - np.asarray(results[1]["update"]))) * 10)
    limit = 0.8 * (1 if relation == "add_remove" else 2)
    assert furthest <= limit * (1 + 1e-6)
    assert furthest > (0.99 if relation == "add_remove" else 0.8) * limit


def test_signatures_are_sketched_scaled_and_noised_in_this_order() -> None:
    data = client(200, 12)
    task = PrincipalVectors(2).private(replace(NOISE, sketch_dim=5, signature=1e-9, seed=4))
    directions = sketch_directions(4, 12, 5)
    np.testing.assert_allclose(directions.T @ directions, np.eye(5), atol=1e-12)
    rows = unit_rows(data.x_train @ directions)
    values, vectors = np.linalg.eigh(rows.T @ rows)
    signature = task.run(input_with_secret(data, {}))["signature"]
    assert signature.shape == (2, 5)
    for row, expected in zip(signature, vectors[:, ::-1][:, :2].T, strict=True):
        assert abs(abs(row @ expected) - 1) < 1e-6
    assert values.sum() == pytest.approx(200)
    event = task.events["moment"]
    assert event == GaussianEvent(1e-9, 1.0, "add_remove", "sample")
    assert isinstance(replace(task, relation="replace_one").events["moment"], GaussianEvent)
    assert replace(task, relation="replace_one").events["moment"].sensitivity == pytest.approx(math.sqrt(2))  # type: ignore[union-attr]


def test_signatures_per_label_and_wider_than_the_sketch_are_refused() -> None:
    with pytest.raises(InputError, match="per_label"):
        PrincipalVectors(3, per_label=True, labels_at_most=2).private(NOISE)
    with pytest.raises(InputError, match="sketch_dim"):
        noisy_principal_vectors(np.ones((4, 3)), 4, 1.0, "add_remove", public_entropy("x"))


@pytest.mark.parametrize("relation", RELATIONS)
def test_gradient_signatures_clip_each_sample(relation: Any) -> None:
    model = linear()
    limit, furthest = 0.3 * (1 if relation == "add_remove" else 2), 0.0
    for i in range(60):
        data = client(4, seed=i)
        task = NoisyGradient(model, "representation", False, 9, 0.3, 1e-9, relation, 0)
        assert task.events["gradient"].sensitivity == pytest.approx(limit)  # type: ignore[union-attr]
        fewer = ClientData(0, data.x_train[:-1], data.y_train[:-1], data.x_test, data.y_test)
        changed = ClientData(0, data.x_train, np.append(data.y_train[:-1], (data.y_train[-1] + 1 + i % 2) % 3), data.x_test, data.y_test)
        start = model.init(i)
        one, other = (
            task.run(input_with_secret(each, {"model": start}))["representation"]
            for each in (data, fewer if relation == "add_remove" else changed)
        )
        furthest = max(furthest, float(np.linalg.norm(one - other)))
    assert 0.8 * limit < furthest <= limit * (1 + 1e-6)


def test_a_gradient_signature_without_noise_or_clip_is_the_gradient() -> None:
    model, data = linear(), client(30)
    plain = Gradient(model).run(TaskInput(data, {"model": model.init(1)}, {}, Streams(0, 0, 0)))["gradient"]
    noisy = NoisyGradient(model, "representation", True, 0, 1e6, 1e-12, "add_remove", 0).run(
        input_with_secret(data, {"model": model.init(1)})
    )
    np.testing.assert_allclose(noisy["representation"], plain / np.linalg.norm(plain), atol=1e-5)


def test_a_gradient_signature_does_not_fail_for_one_sample_whose_gradient_overflows() -> None:
    model, data = Model("mlp", (6,), 3, hidden=5, dtype="float32"), client(12)
    wild = ClientData(0, np.vstack([data.x_train, np.full((1, 6), 1e30)]), np.append(data.y_train, 0), data.x_test, data.y_test)
    task = NoisyGradient(model, "representation", False, 4, 0.3, 1e-9, "add_remove", 0)
    start = model.init(0) * np.float32(1e10)
    one, other = (task.run(input_with_secret(each, {"model": start}))["representation"] for each in (data, wild))
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_without_a_sketch_no_square_matrix_of_the_models_size_is_made() -> None:
    model, data = Model("linear", (30_000,), 10), client(3, 30_000)
    made = NoisyGradient(model, "representation", False, 0, 0.3, 1e-9, "add_remove", 0).run(
        input_with_secret(data, {"model": model.init(0)})
    )
    assert made["representation"].shape == (model.dimension,)  # an identity of that size would take 670 GiB


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_noisy_choice_cuts_losses_and_prefers_the_lowest(relation: Any) -> None:
    model, data = linear(), client(60)
    good = -np.asarray(Gradient(model).run(TaskInput(data, {"model": np.zeros(model.dimension)}, {}, Streams(0, 0, 0)))["gradient"])
    models = [good * -9, good * 3, good * -5]
    task = Losses(model).private(replace(NOISE, relation=relation, choice=0.4, loss_cap=4.0))
    assert task.events == {"choice": ChoiceEvent(0.4, relation, "sample")}
    assert task.covers == {"choice": ("choice",)}, "the losses themselves are never covered"
    assert int(Losses(model).run(input_with_secret(data, {"model": models}))["choice"]) == 1
    drawn = [int(task.run(input_with_secret(data, {"model": models}, str(i)))["choice"]) for i in range(60)]
    assert drawn.count(1) > 40
    free = [int(replace(task, epsilon=1e-6).run(input_with_secret(data, {"model": models}, str(i)))["choice"]) for i in range(60)]
    assert set(free) == {0, 1, 2}, "with next to no epsilon anything is chosen"


def mixed(module: str) -> Model:
    """Models in which the samples of a batch have a part in each other's output, where these are passed together."""
    from torch import nn

    class Centred(nn.Module):
        def forward(self, x: Any) -> Any:
            return x - x.mean(0)

    class Own(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return super().forward(x / x.abs().max())  # type: ignore[no-untyped-call]

    factories: dict[str, Any] = {
        "batch norm": lambda: nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False, affine=False), nn.Flatten(), nn.Linear(4, 3)),
        "centred": lambda: nn.Sequential(nn.Flatten(), Centred(), nn.Linear(4, 3)),
        "scaled": lambda: Own(nn.Flatten(), nn.Linear(4, 3)),
        "known layers": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)),
    }
    return Model(module, (1, 2, 2), 3, dtype="float64", factory=factories[module])


@pytest.mark.parametrize("module", ["batch norm", "centred", "scaled", "known layers"])
def test_a_sample_moves_no_more_than_its_own_loss(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums behind a private choice, and private scores: with the samples in one batch, an outlier moved the losses of all."""
    from cflpriv.algorithms.pfedlia.influence import Influence, split_validation
    from cflpriv.tasks import evaluation

    model, rng, seen = mixed(module), np.random.default_rng(0), []
    x = rng.normal(size=(60, 1, 2, 2))
    y = (x[:, 0, 0, 0] > 0).astype(np.int64)
    up = np.zeros(model.dimension)
    up[0], up[4] = -6.0, 6.0
    two = {"model": [up, -up]}

    def draw(sums: Array, *rest: Any) -> Any:
        seen.append(np.array(sums))
        return noisy_argmin(sums, *rest)

    monkeypatch.setattr(evaluation, "noisy_argmin", draw)
    for count in (60, 61):
        more, label = np.concatenate([x, np.full((1, 1, 2, 2), 1e6)])[:count], np.append(y, 0)[:count]
        Losses(model).private(replace(NOISE, choice=0.5)).run(input_with_secret(ClientData(0, more, label, x[:1], y[:1]), two))
    assert np.abs(seen[1] - seen[0]).max() <= 4.0 * (1 + 1e-9)

    held_back = split_validation(ClientData(0, x, y, x[:1], y[:1]), 0.25, 0)[1]
    wild = x.copy()
    wild[held_back[0]] = np.array([1e6, 0, 0, 0]).reshape(1, 2, 2)
    params = {"model": np.zeros(model.dimension), "own": up, "updates": {1: up}}
    task = Influence(model, 0.25, (0, 1), 1e-9, 4.0)
    one, other = (np.asarray(task.run(input_with_secret(ClientData(0, each, y, x[:1], y[:1]), params))["scores"]) for each in (x, wild))
    assert np.linalg.norm(one - other) <= 8.0 * (1 + 1e-6)


def test_a_model_that_takes_no_single_sample_has_no_private_choice() -> None:
    from torch import nn

    model = Model("normed", (6,), 3, factory=lambda: nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)))
    task = Losses(model).private(replace(NOISE, choice=0.5))
    with pytest.raises(InputError, match="model 'normed': takes no single sample"):
        task.run(input_with_secret(client(), {"model": [model.init(0), model.init(1)]}))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("resnet9", "femnist_cnn") else ()) for name in MODELS]
)
def test_models_of_known_layers_are_passed_in_blocks(name: str) -> None:
    """Private choices of all but the text model need no loop over single samples."""
    import torch

    from cflpriv.engine.device import CPU
    from cflpriv.engine.fast import losses_apart

    model = Model(name, (5,) if name == "lstm" else (1, 32, 32), 4, hidden=6)
    losses = losses_apart(model, model.init(0), model.inputs(np.zeros((3, *model.shape))), torch.zeros(3, dtype=torch.int64), CPU)
    assert (losses is None) == (name == "lstm")


def test_a_model_that_keeps_something_of_its_data_is_refused() -> None:
    """Its buffers live as long as the process, with no noise on them: what one client trains on would reach the next."""
    import torch
    from torch import nn

    class Seen(nn.Module):
        most: torch.Tensor

        def __init__(self, moving: bool) -> None:
            super().__init__()
            self.moving = moving
            self.register_buffer("most", torch.zeros(6))

        def forward(self, x: Any) -> Any:
            if self.moving and self.training:
                self.most = torch.maximum(self.most, x.amax(0))
            return x + self.most

    def model(layer: Any, shape: tuple[int, ...] = (6,)) -> Model:
        return Model("mine", shape, 2, factory=lambda: nn.Sequential(layer(), nn.Flatten(), nn.Linear(math.prod(shape), 2)))

    assert model(lambda: Seen(False)).dimension == 14, "a buffer that stays as it is is a constant"
    with pytest.raises(InputError, match="layer '0' keeps running statistics"):
        model(lambda: Seen(True)).init(0)
    with pytest.raises(InputError, match="layer '0' keeps running statistics"):
        model(lambda: nn.InstanceNorm2d(1, track_running_stats=True), (1, 4, 4)).init(0)


# --- clients as the unit ----------------------------------------------------------------------------------------------------------------


def client_federation(
    scene: Population, protection: Protection, privacy: Privacy, trainings: int = 2, label: str = "noise", **options: Any
) -> tuple[FederationServer, Ledger]:
    """A server that adds noise, or has clients add theirs, and clients that demand it. `label` names all randomness."""
    ledger = Ledger(privacy.budget)
    releases = Releases(signatures=int("gram" in privacy.local), trainings=trainings)
    clipped, local = client_noise(privacy, releases, protection, ledger, public_entropy(label))
    options |= {"privacy": privacy, "clipped": clipped, "local": local}
    return scenes.federation(scene, protection, entropy=lambda party: public_entropy(f"{label} {party}"), **options), ledger


CLIENTS = Privacy("client", "add_remove", 4.0, 1e-5, clip_norm=0.5)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("secure", [False, True])
def test_a_clipped_mean_has_the_noise_that_its_event_says(secure: bool, relation: Any) -> None:
    scene = scenes.population(groups=1, clients_per_group=6)
    protection = Protection(sum="secagg", min_cohort=4, secagg_mode="passive") if secure else Protection()
    privacy = replace(CLIENTS, relation=relation)
    errors = []
    vectors = [scenes.Make().run(TaskInput(one, {}, {}, Streams(0, 0, 0)))["vector"] for one in scene.clients]
    exact = np.mean([v * min(1, 0.5 / np.linalg.norm(v)) for v in vectors], axis=0)
    event = None
    for i in range(3 if secure else 100):
        fed, ledger = client_federation(scene, protection, privacy, label=str(i))
        (mean,) = fed.mean(fed.compute(scenes.Make())["vector"])
        assert mean is not None
        errors.append(mean.parts["vector"].value() - exact)
        (charge,) = ledger.charges
        (event,) = charge.events
        assert charge.clients == fed.clients
    assert epsilon_of([event] * 2, 1e-5) <= 4.0  # type: ignore[list-item]
    assert epsilon_of([event] * 2, 1e-5) > 3.95  # type: ignore[list-item]
    error = np.concatenate(errors) * 6
    assert isinstance(event, GaussianEvent)
    assert event.sensitivity == (0.5 if relation == "add_remove" else 1.0)
    variance = (event.noise_multiplier * event.sensitivity) ** 2
    if secure:
        assert event.shares == 3
        variance *= 6 / 3 * (1 + 1 / 768)  # all six add a share, where three would do, and round
    total = float(np.square(error).sum()) / variance
    assert stats.chi2(error.size).sf(total / 1.01) > ALPHA
    assert stats.chi2(error.size).cdf(total) > ALPHA


def test_dropouts_down_to_the_floor_leave_enough_noise_even_towards_a_member_who_knows_its_own() -> None:
    scene = scenes.population(groups=1, clients_per_group=6)
    protection = Protection(sum="secagg", min_cohort=4, secagg_mode="passive")
    dropouts = [(0, 1, "Masked"), (0, 4, "Masked")]
    fed, ledger = client_federation(scene, protection, CLIENTS, trainings=1, label="n", dropouts=dropouts)
    fed.begin_round(0)
    (mean,) = fed.mean(fed.compute(scenes.Make())["vector"])
    assert mean is not None
    assert mean.count == 4
    assert ledger.charges[0].clients == tuple(range(6)), "who dropped out is charged as well"
    (event,) = ledger.charges[0].events
    assert isinstance(event, GaussianEvent)
    assert event.shares == mean.count - 1


def test_a_group_of_models_is_clipped_as_one_contribution() -> None:
    scene = scenes.population(groups=1, clients_per_group=4)
    fed, _ = client_federation(scene, Protection(), replace(CLIENTS, epsilon=1e6, clip_norm=1e-3))
    (mean,) = fed.mean(fed.compute(scenes.Make())["vector", "one"])
    assert mean is not None
    assert np.linalg.norm(np.append(mean.parts["vector"].value(), mean.parts["one"].value())) < 2e-3


@pytest.mark.parametrize("sum_", ["haar", "secagg-oblivious"])
def test_sums_that_cannot_have_noise_are_refused(sum_: str) -> None:
    with pytest.raises(InputError, match="noise goes to sums in the clear"):
        client_federation(scenes.population(), Protection(sum=sum_), CLIENTS)


def test_signatures_by_local_noise_are_charged_every_time() -> None:
    scene = scenes.population()
    fed, ledger = client_federation(scene, Protection(), replace(CLIENTS, local=("gram",)))
    held = fed.compute(scenes.Make())["rows"]
    rows = []

    def look(view: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        rows.append(view.gram.matrix())
        return {}, {}

    fed.gram(held, then=look)
    first = ledger.spent(0)
    assert 0 < first <= 4.0 * 0.3 + 1e-6
    for _ in range(3):
        fed.gram(held, then=look)
    assert ledger.spent(0) > 1.5 * first
    assert not np.array_equal(rows[0], rows[1]), "the noise is fresh each time"


def test_noise_that_does_not_fit_the_modulus_is_refused_before_anything_is_sent() -> None:
    scene = scenes.population(groups=1, clients_per_group=6)
    protection = Protection(sum="secagg", min_cohort=4, secagg_mode="passive", secagg_bits=16)
    fed, ledger = client_federation(scene, protection, replace(CLIENTS, epsilon=1e7), trainings=1)
    held = fed.compute(scenes.Make())["vector"]
    sent = len(fed.transcript.messages)
    with pytest.raises(InputError, match="secagg_bits = 16: a sum of 6 clients leaves each 5461"):
        fed.mean(held)
    assert len(fed.transcript.messages) == sent
    assert ledger.charges == []


# --- [privacy], runs, and every algorithm -------------------------------------------------------------------------------------------------


MEANS_ONLY = {
    "fedavg", "fedprox", "ditto", "lg_fedavg", "per_fedavg", "local", "oracle", "shuffled", "private_clusters", "rr_cluster", "fedrc",
}  # fmt: skip
"""Algorithms that release nothing but means: those that run under unit = "client"."""
BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 8}, "model": {"name": "linear"}, "training": {"rounds": 2, "batch_size": 5, "lr": 0.1, "weights": "equal"},
    "algorithm": {"name": "fedavg"}, "privacy": {"unit": "sample", "epsilon": 3.0, "delta": 1e-3, "samples": 20, "sketch_dim": 0},
}  # fmt: skip
private_config = partial(configured, BASE)

MORE: dict[str, dict[str, Any]] = {
    "ifca": {"algorithm": {"k": 2}},
    "hypcluster": {"algorithm": {"k": 2}},
    "private_clusters": {"algorithm": {"k": 1}},
    "pfedlia": {"algorithm": {"warm_up": 1, "local_epochs": 2}, "privacy": {"relation": "replace_one"}, "training": {"rounds": 3}},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:algorithm 'fedgwc' will form no clusters")
@pytest.mark.parametrize("unit", ["sample", "client"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_private_or_refused_by_name(name: str, unit: str, tmp_path: Path) -> None:
    scene = scenes.population()
    out = tmp_path / "run"
    refused = ALGORITHMS[name].sample_releases is None if unit == "sample" else name not in MEANS_ONLY
    if refused:
        with pytest.raises(InputError, match=rf"algorithm '{name}' under privacy\.unit = '{unit}': "):
            run_experiment(private_config(name, unit, **MORE.get(name, {})), out, population=scene)
        assert not out.exists(), "refused before anything is written"
        return
    summary = run_experiment(private_config(name, unit, **MORE.get(name, {})), out, population=scene)
    assert summary["epsilon"] <= 3.0
    assert summary["delta"] == 1e-3
    assert summary["rounds"] == summary["rounds_planned"]
    assert summary["stopped"] is None, "the plan reckoned with all that the algorithm releases"
    if name == "local":
        assert summary["epsilon"] == 0.0, "nothing leaves its clients"
        return
    assert summary["epsilon"] > 2.9, "and with no more"
    tree = json.loads((out / "ledger.json").read_text(encoding="utf-8"))
    spent = {c: [event_from(e) for line in tree["charges"] if c in line["clients"] for e in line["events"]] for c in range(8)}
    assert max(epsilon_of(events, 1e-3) for events in spent.values()) == pytest.approx(summary["epsilon"])


@pytest.mark.parametrize(("unit", "operation"), [("sample", "compute"), ("client", "mean")])
def test_a_run_whose_clients_have_spent_their_budgets_ends_with_what_it_has(
    unit: str, operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where they paid for other sessions: the server's ledger allows more."""
    experiment = private_config("fedavg", unit, training={"rounds": 4})
    budget = replace(experiment.privacy.budget, epsilon=2.0)

    def poor(self: ClientLedger) -> Ledger:
        return self._store.load(SPENT, lambda data: Ledger.read(data.decode(), budget)) or Ledger(budget)

    monkeypatch.setattr(ClientLedger, "_ledger", poor)
    summary = run_experiment(experiment, tmp_path / "run", population=scenes.population())
    assert f"{operation} of Train: all 8 clients that were asked refuse: their own privacy budgets allow no more" in summary["stopped"]
    assert 1 < summary["rounds"] < 4
    assert summary["accuracy_mean"] is not None


@pytest.mark.slow
def test_a_run_over_budget_ends_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scenes.population()
    experiment = private_config(training={"rounds": 6})
    short = plan_noise(experiment.privacy, Releases(trainings=3), epochs=1, batch_size=5, seed=0)
    monkeypatch.setattr(Config, "noise", lambda self, asked: short)  # noise for three rounds, where six are asked for
    said: list[str] = []
    summary = run_experiment(experiment, tmp_path / "run", population=scene, report=said.append)
    assert summary["rounds"] == 4
    assert "refused by the privacy ledger" in summary["stopped"]
    assert any("stopped after round" in line for line in said)
    assert summary["accuracy_mean"] is not None
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["epsilon"] for row in rows] == sorted(row["epsilon"] for row in rows)
    assert rows[-1]["epsilon"] == rows[-2]["epsilon"] <= 3.0
    assert len(rows[0]["epsilon_per_client"]) == 8


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scenes.population()
    experiment = private_config(training={"rounds": 4})
    done = []

    def dying(simulation: Any) -> Any:
        row = advance(simulation)
        done.append(row)
        if len(done) == 2:
            raise KeyboardInterrupt  # after the charge of round 1, before the round is saved
        return row

    monkeypatch.setattr("cflpriv.experiments.run.folder.advance", dying)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, tmp_path / "run", population=scene)
    monkeypatch.setattr("cflpriv.experiments.run.folder.advance", advance)
    summary = run_experiment(experiment, tmp_path / "run", population=scene, resume=True)
    tree = json.loads((tmp_path / "run" / "ledger.json").read_text(encoding="utf-8"))
    assert [line["round"] for line in tree["charges"]][:3] == [0, 1, 1], "the interrupted round is charged again"
    assert summary["stopped"], "so the last round is not affordable any more"
    assert summary["epsilon"] <= 3.0


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("privacy", {"epsilon": 0.0}, r"privacy\.epsilon"),
        ("privacy", {"epsilon": -1.0}, r"privacy\.epsilon"),
        ("privacy", {"delta": 0.0}, r"privacy\.delta"),
        ("privacy", {"delta": 1.0}, r"privacy\.delta"),
        ("privacy", {"clip_norm": 0.0}, r"privacy\.clip_norm"),
        ("privacy", {"clip_norm": -2.0}, r"privacy\.clip_norm"),
        ("privacy", {"sampling": "shuffle"}, "the accountants cover 'poisson' and 'balls_in_bins' only"),
        ("privacy", {"sampling": "without_replacement"}, "the accountants cover 'poisson' and 'balls_in_bins' only"),
        ("privacy", {"sampling": "balls_in_bins", "relation": "replace_one"}, r"is for privacy\.relation = 'add_remove' only"),
        ("privacy", {"sampling": "balls_in_bins", "noise": "shared"}, r"is for privacy\.noise = 'per_client' only"),
        ("privacy", {"sampling": "balls_in_bins", "unit": "client"}, r"is for privacy\.unit = 'sample' only"),
        ("privacy", {"samples": 4}, r"batch_size = 5: is above privacy\.samples"),
        ("privacy", {"signature_share": 1.0}, "signature_share"),
        ("privacy", {"relation": "swap"}, "relation"),
        ("privacy", {"unit": "household"}, "unit"),
        ("privacy", {"local": ["gather"]}, r"privacy\.local"),
        ("training", {"weights": "examples"}, "sample counts would be released"),
        ("training", {"on_divergence": "skip"}, "who is left out would reveal"),
        ("data", {"rotations": [0, 90], "repeat_per_group": True}, r"data\.repeat_per_group = true under privacy\.unit = 'sample'"),
        ("algorithm", {"name": "pacfl", "per_label": True}, r"algorithm\.per_label"),
        ("algorithm", {"name": "pacfl", "variant": "authors"}, r"algorithm\.per_label"),
        ("algorithm", {"name": "stocfl", "variant": "authors"}, r"algorithm\.variant = 'authors'"),
        ("algorithm", {"name": "stocfl", "representation": "movement"}, r"algorithm\.representation = 'movement'"),
        ("algorithm", {"name": "ifca", "restarts": 3}, r"algorithm\.restarts = 3"),
        ("algorithm", {"name": "ifca", "averaging": "gradient"}, r"algorithm\.averaging = 'gradient'"),
    ],
)
def test_invalid_parameters_are_refused_before_data_are_touched(section: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        private_config("fedavg", "sample", **{section: changes})


def test_sums_that_cannot_have_noise_are_refused_before_data_are_touched() -> None:
    with pytest.raises(InputError, match=r"protection\.sum = 'haar' under privacy\.unit = 'client'"):
        private_config("fedavg", "client", protection={"sum": "haar"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ifca", "cfl"])
def test_defaults_are_found_within_the_budget(name: str, tmp_path: Path) -> None:
    """IFCA's number of models costs one noisy vector a client; CFL keeps to the paper's rule."""
    summary = run_experiment(private_config(name, training={"rounds": 6}), tmp_path / "run", population=scenes.population())
    assert summary["stopped"] is None
    assert 2.9 < summary["epsilon"] <= 3.0
    found = "none: a test at level 0.01" if name == "ifca" else "thresholds on norms of updates, eps1 = 0.2 and eps2 = 0.75"
    assert summary["knowledge"] == found


@pytest.mark.slow
def test_a_run_of_the_scoring_round_alone_is_planned(tmp_path: Path) -> None:
    asked = MORE["pfedlia"] | {"algorithm": {"warm_up": 0, "local_epochs": 2}, "training": {"rounds": 1}}
    summary = run_experiment(private_config("pfedlia", **asked), tmp_path / "run", population=scenes.population())
    assert 2.9 < summary["epsilon"] <= 3.0


def test_newcomers_who_cannot_pay_again_end_a_run_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cflpriv.privacy.receipts import PrivacyLedger as Real

    settle = Real.settle

    def poor(self: Any, held: Any, clients: Any, operation: str, round: int, noise: Any = None) -> None:
        if 7 in clients:  # the newcomer: its signature was charged in an admission that was interrupted
            raise BudgetExceeded(operation, 7, 2.9, 3.9, 3.0)
        settle(self, held, clients, operation, round)

    monkeypatch.setattr(Real, "settle", poor)
    scene = scenes.population()
    summary = run_experiment(private_config("pacfl", algorithm={"k": 2}, data={"newcomers": 1}), tmp_path / "run", population=scene)
    assert "refused by the privacy ledger" in summary["stopped"]
    assert summary["newcomers"] is None
    assert summary["rounds"] == summary["rounds_planned"]


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "said"), [("sample", True), ("client", False)])
def test_a_private_run_on_texts_says_what_a_sample_is(unit: str, said: bool, tmp_path: Path) -> None:
    lines: list[str] = []
    asked = private_config("fedavg", unit, data={"source": "ag_news", "sequence_length": 7}, training={"rounds": 1})
    run_experiment(asked, tmp_path / "run", population=scenes.population(), report=lines.append)
    assert any("a window of 7 words and the next; a word is in 8 of them" in line for line in lines) == said


def test_a_missing_public_size_is_refused_before_data_are_touched(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"privacy\.samples"):
        run_experiment(private_config(privacy={"samples": 0}, data={"source": "mnist"}), tmp_path / "run", tmp_path)


def test_epsilon_without_a_unit_is_refused() -> None:
    with pytest.raises(InputError, match=r"without privacy\.unit"):
        parse_config({"privacy": {"epsilon": 1.0}})


@pytest.mark.parametrize(("unit", "changes"), [("sample", {"samples": 1000}), ("client", {"delta": 0.2})])
def test_a_delta_that_allows_publishing_one_is_warned_of(unit: str, changes: dict[str, Any]) -> None:
    with pytest.warns(CflprivWarning, match="is not below 1/"):
        private_config("fedavg", unit, privacy=changes, training={"weights": "equal"})


def test_noise_of_a_public_key_is_warned_of() -> None:
    with pytest.warns(CflprivWarning, match="protects nothing"):
        private_config(run={"insecure_test_entropy": True})


def test_without_privacy_a_summary_promises_nothing(tmp_path: Path) -> None:
    summary = run_experiment(parse_config({"training": {"rounds": 1}, "algorithm": {"name": "fedavg"}, "model": {"name": "linear"}}),
                             tmp_path / "run", population=scenes.population())  # fmt: skip
    assert summary["epsilon"] is None
    assert summary["delta"] is None
    assert not (tmp_path / "run" / "ledger.json").exists()


@pytest.mark.slow
def test_the_example_is_sound() -> None:
    path = ROOT / "examples" / "pacfl_dp_fmnist.toml"
    loaded = load_config(path)
    assert loaded.privacy.budget == PrivacyBudget(3.0, 1e-5, "add_remove", "sample")
    assert load_config(path).to_toml() == loaded.to_toml()
    noise = loaded.noise()
    assert noise is not None
    steps = SampledGaussianEvent(noise.training, 0.1, 50, 1.0, "add_remove")
    assert 2.98 < epsilon_of([GaussianEvent(noise.signature, 1.0, "add_remove", "sample"), steps], 1e-5) <= 3.0


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("epsilon", "share"), [(0.5, 0.3), (3.0, 0.2), (8.0, 0.0), (2.0, 1.0)])
def test_a_plan_meets_its_budget_and_wastes_little(relation: Relation, epsilon: float, share: float) -> None:
    privacy = Privacy("sample", relation, epsilon, 1e-5, samples=200, signature_share=share if 0 < share < 1 else 0.2)
    noise = plan_noise(privacy, Releases(signatures=int(share > 0), trainings=10 * (share < 1)), epochs=1, batch_size=10, seed=0)
    signature = [GaussianEvent(noise.signature, 1.0, relation, "sample")] if share > 0 else []
    training = [SampledGaussianEvent(noise.training, 0.05, 200, 1.0, relation)] if share < 1 else []
    assert (noise.signature > 0, noise.training > 0) == (share > 0, share < 1)
    assert epsilon * 0.995 <= epsilon_of([*signature, *training], 1e-5) <= epsilon
    if 0 < share < 1:
        assert epsilon_of(signature, 1e-5) == pytest.approx(share * epsilon, rel=1e-3)
        assert epsilon_of(training, 1e-5) > (1 - share) * epsilon, "training gets what the joint composition leaves"


@pytest.mark.slow
def test_an_independent_script_comes_to_the_same_epsilon(tmp_path: Path) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("check_ledger", ROOT / "examples" / "check_ledger.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("pacfl", "sample", {}), ("ifca", "sample", {"privacy": {"relation": "replace_one"}}), ("fedavg", "client", {}),
    ]  # fmt: skip
    for place, (name, unit, more) in enumerate(cases):
        out = tmp_path / str(place)
        run_experiment(private_config(name, unit, **more), out, population=scenes.population())
        assert script.main([str(out / "ledger.json"), str(out / "summary.json")]) == 0
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    (out / "summary.json").write_text(json.dumps(summary | {"epsilon": summary["epsilon"] - 0.05}), encoding="utf-8")
    assert script.main([str(out / "ledger.json"), str(out / "summary.json")]) == 1


@pytest.mark.slow
def test_the_report_shows_what_was_spent_by_round_and_by_client(tmp_path: Path) -> None:
    from cflpriv.experiments.report.report import write_report

    run_experiment(private_config(), tmp_path / "run", population=scenes.population())
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Privacy spent" in page
    assert "2 × compute of Train" in page
    assert "spent by client" in page
    assert "one sample more or less" in page
    plain = parse_config({"training": {"rounds": 1}, "algorithm": {"name": "fedavg"}, "model": {"name": "linear"}})
    run_experiment(plain, tmp_path / "plain", population=scenes.population())
    assert "Privacy spent" not in write_report(tmp_path / "plain").read_text(encoding="utf-8")


# --- Opacus as the reference ------------------------------------------------------------------------------------------------------


def opacus_clipped_sum(model: Model, start: Array, data: ClientData, clip_norm: float) -> Array:
    """Σ of per-sample gradients clipped to `clip_norm`, by Opacus' GradSampleModule."""
    import torch
    from opacus import GradSampleModule

    module: Any = GradSampleModule(model.load(start, training=True), loss_reduction="sum")
    x, y = model.inputs(data.x_train), torch.from_numpy(data.y_train)
    loss: Any = torch.nn.functional.cross_entropy(module(x.requires_grad_()), y, reduction="sum")
    loss.backward()
    each = torch.cat([parameter.grad_sample.flatten(1) for parameter in module.parameters()], dim=1)
    factors = (clip_norm / each.norm(dim=1).clamp_min(clip_norm)).unsqueeze(1)
    return np.asarray((each * factors).sum(dim=0).numpy())


@pytest.mark.parametrize(("dtype", "slack"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize(("name", "shape"), [("linear", (1, 8, 8)), ("mlp", (1, 8, 8)), ("lenet5", (1, 28, 28))])
def test_clipped_gradients_equal_those_of_opacus(name: str, shape: tuple[int, ...], dtype: Any, slack: float) -> None:
    model = Model(name, shape, 10, hidden=20, dtype=dtype)
    rng = np.random.default_rng(0)
    x, y = rng.random((32, *shape)).astype(dtype), rng.integers(10, size=32)
    data = ClientData(0, x, y, x[:1], y[:1])
    start = model.init(0)
    task = Train(model, epochs=1, batch_size=0, lr=1.0, clip_norm=0.1, sampling_rate=1.0)
    (result,) = Engine().run(task, [input_with_secret(data, {"model": start})])
    ours = -np.asarray(result["update"]) * 32
    theirs = opacus_clipped_sum(model, start, data, 0.1)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < slack
    np.testing.assert_allclose(ours / 32, theirs / 32, atol=1e-6)
