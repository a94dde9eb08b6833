"""Networks in the span of their samples: local models are scored without being formed, and training takes up products of the choice."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_scenes import inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.algorithms.shared.choosing import PickAndTrain
from cflpriv.engine import Engine, TaskInput, span
from cflpriv.engine.models import Model
from cflpriv.tasks.evaluation import Evaluate, Losses
from cflpriv.tasks.training import Train
from cflpriv.types import Array

MODEL = Model("mlp", (1, 5, 5), 4, hidden=3, mean=(0.5,), std=(0.3,))
options = st.fixed_dictionaries({
    "epochs": st.integers(1, 3), "momentum": st.sampled_from([0.0, 0.5]), "weight_decay": st.sampled_from([0.0, 0.01]),
    "prox": st.sampled_from([0.0, 0.1]),
})  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _small_clients_are_large() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span, "LARGE", 0)
        yield


def local_models(task: Train, given_to: Sequence[TaskInput]) -> list[TaskInput]:
    """The inputs with the local models that training ends with."""
    trained = Engine().run(task, given_to)
    return [replace(own, params={"model": result["trained"]}) for own, result in zip(given_to, trained, strict=True)]


def summed_losses(engine: Engine, task: Evaluate, given_to: Sequence[TaskInput]) -> list[float]:
    return [float(result["loss"]) for result in engine.run(task, given_to)]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), options, st.booleans())
@settings(max_examples=40)
def test_local_models_have_the_scores_of_the_vectors_that_they_stand_for(sizes: list[int], chosen: dict[str, Any], anchored: bool) -> None:
    model = replace(MODEL, dtype="float64")
    vectors = {"anchor": 0.01 * np.random.default_rng(1).normal(size=model.dimension)} if anchored else {}
    local = local_models(Train(model, batch_size=0, lr=0.1, **chosen), inputs(model, sizes, **vectors))
    assert all(span.in_span(own.params["model"], own.data, model) for own in local)
    formed = [replace(own, params={"model": np.asarray(own.array("model"))}) for own in local]
    for task in (Evaluate(model), Evaluate(model, "train")):
        assert summed_losses(Engine(), task, local) == pytest.approx(summed_losses(Engine(), task, formed), rel=1e-12, abs=1e-12)
        assert summed_losses(Engine("sequential"), task, local) == summed_losses(Engine("sequential"), task, formed)


def test_scores_of_local_models_have_the_same_bits_in_worker_processes_and_beside_any_others() -> None:
    model = Model("mlp", (1, 28, 28), 4, hidden=40)  # large clients: workers know nothing of what a test changes
    local = local_models(Train(model, epochs=2, batch_size=0, lr=0.1), inputs(model, [110, 120, 100], np.float32))
    together = summed_losses(Engine(), Evaluate(model), local)
    assert together == [loss for own in local for loss in summed_losses(Engine(), Evaluate(model), [own])]
    workers = Engine(workers=2)
    assert together == summed_losses(workers, Evaluate(model), local)
    workers.close()


def test_losses_and_scores_of_small_and_large_clients_are_the_same_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(MODEL, dtype="float64")
    given_to = inputs(model, [5, 9, 3, 12])
    models = [model.init(seed) for seed in range(3)]
    to_choose = [replace(own, params={"model": models[: 1 + i % 3]}) for i, own in enumerate(given_to)]
    plain = Engine("sequential").run(Losses(model), to_choose)
    task = Train(model, epochs=3, batch_size=0, lr=0.1)
    updates = Engine("sequential").run(task, given_to)
    scores = summed_losses(Engine("sequential"), Evaluate(model), local_models(task, given_to))
    for least in (0, 6 * 3 * 25, 10**9):
        monkeypatch.setattr(span, "LARGE", least)
        for result, reference in zip(Engine().run(Losses(model), to_choose), plain, strict=True):
            np.testing.assert_allclose(result["losses"], reference["losses"], rtol=1e-12)
            assert int(result["choice"]) == int(reference["choice"])
        for result, reference in zip(Engine().run(task, given_to), updates, strict=True):
            np.testing.assert_allclose(np.asarray(result["update"]), reference["update"], rtol=0, atol=1e-12)
        assert summed_losses(Engine(), Evaluate(model), local_models(task, given_to)) == pytest.approx(scores, rel=1e-12)


def test_a_model_of_other_data_or_of_another_description_is_formed() -> None:
    first, second = local_models(Train(MODEL, epochs=3, batch_size=0, lr=0.1), inputs(MODEL, [5, 7], np.float32))
    vector = first.params["model"]
    assert span.in_span(vector, first.data, MODEL)
    assert not span.in_span(vector, second.data, MODEL)
    assert not span.in_span(vector, first.data, replace(MODEL, mean=(0.4,)))
    assert not span.in_span(np.asarray(vector), first.data, MODEL)


def test_training_takes_up_the_products_of_the_choice_and_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    task = PickAndTrain(Losses(MODEL), Train(MODEL, epochs=3, batch_size=0, lr=0.1), "update")
    given_to = inputs(MODEL, [5, 7, 3], np.float32)
    made: list[Array] = []
    product = span._Layers.product

    def counted(layers: Any, x: torch.Tensor, vector: Array) -> torch.Tensor:
        made.append(vector)
        return product(layers, x, vector)

    monkeypatch.setattr(span._Layers, "product", counted)

    def steps(writeable: bool) -> tuple[int, list[Array]]:
        """How many products the choice and the training take, and the clients' steps."""
        models = [MODEL.init(seed) for seed in range(3)]
        for vector in models:
            vector.flags.writeable = writeable
        made.clear()
        results = Engine().run(task, [replace(own, params={"model": models}) for own in given_to])
        return len(made), [np.asarray(result["step"]) for result in results]

    first, again, changeable = steps(False), steps(False), steps(True)
    assert first[0] == 3 * 3 + 3, "at first nobody knows that these clients train in their span"
    assert again[0] == 3 * 3
    assert changeable[0] == 3 * 3 + 3, "a model that may change is not known again"
    for own, other, third in zip(first[1], again[1], changeable[1], strict=True):
        np.testing.assert_array_equal(own, other)
        np.testing.assert_array_equal(own, third)
