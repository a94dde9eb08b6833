"""Evaluation of many clients at once equals that of one after the other: scores, losses of several models, and what did not change."""

from collections import Counter

import numpy as np
import pytest
from scenes import task_input
from torch import nn

from cflpriv.algorithms.shared.choosing import EvaluateLowest
from cflpriv.class_counts import FULL, MARGINS, as_counts, counts_shape
from cflpriv.clustering.cuts import _silhouette
from cflpriv.clustering.scores import ari
from cflpriv.engine import Deferred, Engine, TaskInput
from cflpriv.engine.models import Model
from cflpriv.experiments.run.measure import local_scores
from cflpriv.tasks.evaluation import Evaluate, EvaluateOwn, Losses
from cflpriv.transports.simulation import simulate
from cflpriv.types import Array, ClientData


def unknown() -> nn.Module:
    """A network of a layer that cannot be stacked."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ELU(), nn.Linear(8, 10))


MODELS = {
    "mlp": Model("mlp", (1, 8, 8), 10, hidden=8, mean=(0.3,), std=(0.5,), dtype="float64"),
    "sigmoid_lenet": Model("sigmoid_lenet", (1, 8, 8), 10, dtype="float64"),
    "lenet5": Model("lenet5", (1, 16, 16), 10, dtype="float64"),
    "unknown": Model("unknown", (1, 8, 8), 10, dtype="float64", factory=unknown),
}


def clients(model: Model, sizes: list[int], seed: int = 0) -> list[ClientData]:
    rng = np.random.default_rng(seed)
    made = []
    for client, size in enumerate(sizes):
        x, y = rng.random((size + 3, *model.shape)), rng.integers(10, size=size + 3)
        made.append(ClientData(client, x[:3], y[:3], x[3:], y[3:]))
    return made


def evaluation_input(data: ClientData, model: object, memory: dict[str, Array] | None = None) -> TaskInput:
    return task_input(data, {"model": model}, memory=memory)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sharing", ["none", "some", "all"])
def test_clients_evaluated_together_have_the_scores_of_one_after_the_other(name: str, sharing: str) -> None:
    model = MODELS[name]
    vectors = [model.init(seed) for seed in range(12)]
    picked = {"none": range(12), "some": [0, 1, 0, 2, 1, 5, 0, 3, 3, 0, 8, 9], "all": [0] * 12}[sharing]
    inputs = [
        evaluation_input(one, vectors[i]) for one, i in zip(clients(model, [5, 60, 1, 0, 7, 5, 5, 110, 2, 5, 0, 9]), picked, strict=True)
    ]
    for task in (Evaluate(model), Evaluate(model, "train")):
        plain, together = (Engine(kind).run(task, inputs) for kind in ("sequential", "auto"))
        for one, other in zip(plain, together, strict=True):
            assert float(one["correct"]) == float(other["correct"])
            assert float(one["count"]) == float(other["count"])
            assert one["confusion"].dtype == other["confusion"].dtype
            np.testing.assert_array_equal(one["confusion"], other["confusion"])
            assert float(other["loss"]) == pytest.approx(float(one["loss"]), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("by", ["train", "test"])
def test_the_model_of_lowest_loss_is_the_same_for_many_clients_as_for_one(name: str, by: str) -> None:
    model = MODELS[name]
    models = [model.init(seed) for seed in range(3)]
    inputs = [evaluation_input(one, models) for one in clients(model, [5, 60, 1, 7, 5])]
    task = EvaluateLowest(Losses(model), Evaluate(model), by)  # type: ignore[arg-type]
    for data, one in zip(inputs, Engine().run(task, inputs), strict=True):
        single = [Evaluate(model, by).run(evaluation_input(data.data, vector)) for vector in models]
        lowest = int(np.argmin([float(result["loss"]) for result in single]))
        assert int(one["choice"]) == lowest
        assert float(one["correct"]) == float(Evaluate(model).run(evaluation_input(data.data, models[lowest]))["correct"])


def test_lists_of_unlike_length_and_models_that_diverged_have_their_own_losses() -> None:
    model = MODELS["mlp"]
    bad, good = np.full(model.dimension, np.nan), model.init(0)
    data = clients(model, [4, 4])
    first, second = Engine().run(Losses(model), [evaluation_input(data[0], [bad, good, bad]), evaluation_input(data[1], [good])])
    assert first["losses"].shape == (3,)
    assert second["losses"].shape == (1,)
    assert np.isnan(first["losses"][[0, 2]]).all()
    assert int(first["choice"]) == 1
    assert int(second["choice"]) == 0
    assert first["losses"][1] == pytest.approx(float(Evaluate(model, "train").run(evaluation_input(data[0], good))["loss"]) / 3, rel=1e-12)


def test_a_kept_model_is_evaluated_in_place_of_the_given_one() -> None:
    model = MODELS["mlp"]
    own, other = model.init(1), model.init(0)
    data = clients(model, [9, 9])
    inputs = [evaluation_input(data[0], other, {"mine": own}), evaluation_input(data[1], other)]
    found = Engine().run(EvaluateOwn(model, "mine"), inputs)
    for one, vector, result in zip(data, (own, other), found, strict=True):
        assert float(result["loss"]) == pytest.approx(float(Evaluate(model).run(evaluation_input(one, vector))["loss"]), rel=1e-12)


def test_a_local_model_is_evaluated_again_when_it_changed_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["mlp"]
    simulated = simulate(clients(model, [20] * 4))
    kept: dict[int, object] = {client: Deferred(model.init(client), np.zeros(model.dimension)) for client in range(3)}
    for client in range(4):
        monkeypatch.setattr(simulated.client(client).values, "kept", lambda name, one=client: (kept[one], None) if one in kept else None)
    asked: list[int] = []
    run = Engine.run

    def counted(engine: Engine, task: object, inputs: list[TaskInput], paths: object = None) -> object:
        asked.extend(one.data.id for one in inputs)
        return run(engine, task, inputs, paths)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "run", counted)
    first = local_scores(simulated, model, range(4))
    again = local_scores(simulated, model, range(4))
    assert asked == [0, 1, 2, 3]  # the last has not trained: it holds the initial model
    np.testing.assert_array_equal(first, again)
    kept[1] = Deferred(model.init(7), np.zeros(model.dimension))
    changed = local_scores(simulated, model, range(4))
    assert asked == [0, 1, 2, 3, 1]
    assert changed[1][1] != first[1][1]
    plain = Evaluate(model).run(evaluation_input(simulated.data[1], model.init(7)))
    assert changed[1][1] == pytest.approx(float(plain["loss"]) / 20, rel=1e-12)
    assert simulated.engine.paths == Counter(), "measurements are no part of the record"


def test_scores_of_clusterings_equal_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(40):
        n = int(rng.integers(4, 30))
        truth, labels = (rng.integers(int(rng.integers(1, 8)), size=n).tolist() for _ in range(2))
        assert ari(truth, labels) == metrics.adjusted_rand_score(truth, labels)
        k = int(rng.integers(2, n - 1)) if n > 4 else 2
        clusters = np.concatenate([np.arange(k), rng.integers(k, size=n - k)])
        points = rng.normal(size=(n, 3))
        distances = np.linalg.norm(points[:, None] - points[None], axis=2)
        expected = metrics.silhouette_score(distances, clusters, metric="precomputed")
        assert _silhouette(distances, clusters) == pytest.approx(expected, abs=1e-13)
    assert ari([0, 0], [1, 1]) == 1.0
    assert _silhouette(np.zeros((4, 4)), np.array([0, 0, 1, 1])) == 0.0


@pytest.mark.parametrize("classes", [2, FULL, FULL + 1, MARGINS + 1])
def test_counts_by_class_are_those_of_the_samples_whatever_the_number_of_classes(classes: int) -> None:
    model = Model("linear", (3,), classes, dtype="float64")
    rng = np.random.default_rng(0)
    data = [ClientData(i, x, y, x, y) for i in range(3) for x, y in [(rng.standard_normal((40, 3)), rng.integers(classes, size=40))]]
    inputs = [evaluation_input(client, rng.standard_normal(model.dimension)) for client in data]
    for client, given, one, other in zip(
        data, inputs, *(Engine(kind).run(Evaluate(model), inputs) for kind in ("sequential", "auto")), strict=True
    ):
        np.testing.assert_array_equal(one["confusion"], other["confusion"])
        assert one["confusion"].shape == counts_shape(classes)
        counts = as_counts(one["confusion"])
        if classes > MARGINS:
            assert counts is None
            continue
        assert counts is not None
        logits = model.load(given.array("model"))(model.inputs(client.x_test)).detach().numpy()
        np.testing.assert_array_equal(counts.samples, np.bincount(client.y_test, minlength=classes))
        np.testing.assert_array_equal(counts.predictions, np.bincount(logits.argmax(1), minlength=classes))
        assert counts.right.sum() == float(one["correct"])
