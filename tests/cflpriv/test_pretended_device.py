"""Training and evaluation on a device that is pretended: placement, waits and captured steps. Nothing is said of a real one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pretended_device import MixedDevices, NotCaptured, pretended

from cflpriv.algorithms.choosing import EvaluateLowest
from cflpriv.algorithms.fedavg import fedavg
from cflpriv.algorithms.ifca import ifca
from cflpriv.clustering.similarity import MEASURES, Gram, Measure, angles
from cflpriv.engine import Engine, Streams, Task, TaskInput, graphs
from cflpriv.engine.device import CPU, Device, in_use, using
from cflpriv.engine.models import Model
from cflpriv.tasks.evaluation import Evaluate, Losses
from cflpriv.tasks.signatures import PrincipalVectors, principal_vectors
from cflpriv.tasks.training import Gradient, Train
from cflpriv.transports.simulation import simulate
from cflpriv.types import ClientData

MLP = Model("mlp", (1, 8, 8), 10, hidden=8, mean=(0.3,), std=(0.5,), dtype="float64")
LENET = Model("lenet5", (1, 16, 16), 10, dtype="float64")


def clients(model: Model, sizes: list[int]) -> list[ClientData]:
    rng = np.random.default_rng(0)
    made = []
    for client, n in enumerate(sizes):
        x, y = rng.random((2 * n, *model.shape)), rng.integers(10, size=2 * n)
        made.append(ClientData(client, x[:n], y[:n], x[n:], y[n:]))
    return made


def inputs(model: Model, sizes: list[int]) -> list[TaskInput]:
    start = model.init(0)
    return [TaskInput(one, {"model": start}, {}, Streams(0, 0, one.id)) for one in clients(model, sizes)]


def same(task: Task, given: list[TaskInput], tolerance: float = 1e-10) -> Any:
    """Assert that the device has the plain loop's results; what was counted there."""
    plain = Engine("sequential").run(task, given)
    with pretended() as counts:
        found = Engine(device="cuda").run(task, given)
    for one, other in zip(plain, found, strict=True):
        for name, value in one.items():
            np.testing.assert_allclose(np.asarray(other[name]), np.asarray(value), rtol=tolerance, atol=tolerance)
    return counts


def test_the_device_refuses_mixed_tensors_and_counts_waits() -> None:
    with pretended() as counts:
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert there.is_cuda
        assert not here.is_cuda
        assert (there * 2 + torch.tensor(1.0)).device.type == "cuda"
        refused: list[Callable[[], object]] = [lambda: there + here, lambda: torch.cat([there, here]), there.numpy]
        for attempt in refused:
            with pytest.raises(MixedDevices):
                attempt()
        assert not counts.waits
        assert float(there.sum()) == 3.0
        assert there.cpu().numpy().tolist() == [1.0, 1.0, 1.0]
        assert here.to("cuda").is_cuda
        assert counts.waits == {"_local_scalar_dense": 1, "to host": 1, "to device": 1}


@pytest.mark.parametrize(
    ("model", "options"),
    [(MLP, {}), (MLP, {"weight_decay": 0.01}), (MLP, {"optimizer": "adam", "lr": 1e-3}), (LENET, {"momentum": 0.5})],
    ids=["plain", "decay", "adam", "lenet5"],
)
def test_training_there_equals_the_plain_loop_by_replayed_steps(model: Model, options: dict[str, Any]) -> None:
    task = Train(model, **{"lr": 0.05, **options}, epochs=8, batch_size=4)
    counts = same(task, inputs(model, [40, 40, 40, 40]))
    assert counts.captured == 1
    assert counts.replayed > 40  # most of the 80 steps
    assert set(counts.waits) == {"to device", "to host"}
    assert sum(counts.waits.values()) < 20, "copies of a chunk, not of a step"


def test_ragged_clients_are_trained_there_as_in_the_plain_loop() -> None:
    same(Train(MLP, lr=0.05, epochs=2, batch_size=4), inputs(MLP, [3, 17, 9, 30, 1]))
    same(Gradient(MLP), inputs(MLP, [3, 17, 9]))


def test_what_waits_is_not_captured() -> None:
    class Waiting:
        at = torch.zeros(1)
        tensor: torch.Tensor

        def step(self) -> None:
            float((self.tensor * 2).sum())

    with pretended():
        program = Waiting()
        program.tensor = torch.ones(2, device="cuda")
        with pytest.raises(NotCaptured):
            graphs.capture(program)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [MLP, LENET], ids=["mlp", "lenet5"])
def test_evaluation_is_computed_there_with_one_copy_back_a_chunk(model: Model) -> None:
    given = inputs(model, [5, 9, 1, 30])
    assert same(Evaluate(model), given).waits["to host"] == 1
    models = [model.init(seed) for seed in range(3)]
    several = [TaskInput(one.data, {"model": models}, {}, one.streams) for one in given]
    assert same(Losses(model), several).waits["to host"] == 3
    counts = same(EvaluateLowest(Losses(model), Evaluate(model)), several)
    assert counts.waits["to host"] == 4
    assert set(counts.waits) == {"to host", "to device"}


def test_a_module_of_unknown_layers_is_evaluated_there() -> None:
    model = Model(
        "own",
        (1, 8, 8),
        10,
        dtype="float64",
        factory=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.ELU()),
    )
    same(Evaluate(model), inputs(model, [5, 9]))
    same(Losses(model), [TaskInput(one.data, {"model": [model.init(0), model.init(1)]}, {}, one.streams) for one in inputs(model, [5, 9])])


@pytest.mark.parametrize("make", [fedavg, lambda train: ifca(train, k=2)], ids=["fedavg", "ifca"])
def test_rounds_there_end_with_the_model_of_the_cpu(make: Callable[[Train], Any]) -> None:
    train = Train(MLP, lr=0.05, epochs=2, batch_size=4)

    def trained(engine: Engine) -> list[np.ndarray]:
        simulated = simulate(clients(MLP, [12, 12, 12]), engine=engine)
        algorithm, federation = make(train), simulated.federation
        state = algorithm.init(federation)
        for number in range(2):
            federation.begin_round(number)
            state, _ = algorithm.round(federation, state)
        served = algorithm.serve(state).params["model"]
        several = served if isinstance(served, list | tuple) else [served]
        return [simulated.peek(0, one) for one in several]

    plain = trained(Engine("sequential"))
    with pretended() as counts:
        found = trained(Engine(device="cuda"))
    assert counts.waits["to device"] > 0
    np.testing.assert_allclose(found, plain, rtol=1e-10, atol=1e-10)


def test_the_device_in_use_is_that_of_the_innermost_block_and_of_the_task_that_runs() -> None:
    asked: list[str] = []

    class Asks(PrincipalVectors):
        def run(self, given: TaskInput) -> Any:
            asked.append(in_use().kind)
            return {}

    with pretended():
        with using(Device("cuda")):
            with using(CPU):
                assert in_use() == CPU
            assert in_use().kind == Engine().device == "cuda"
            Engine(device="cpu").run(Asks(), inputs(MLP, [3]))
            Engine("sequential", device="cuda").run(Asks(), inputs(MLP, [3]))
        Engine(device="cuda").run(Asks(), inputs(MLP, [3]))
    assert asked == ["cpu", "cpu", "cuda"]
    assert in_use() == CPU


@pytest.mark.parametrize("samples", [9, 90], ids=["fewer than pixels", "more than pixels"])
def test_signatures_there_are_those_of_the_cpu(samples: int) -> None:
    given = inputs(MLP, [samples, samples + 1])
    counts = same(PrincipalVectors(3), given, 1e-9)
    assert counts.waits["to host"] == 4  # values and vectors of two clients


@pytest.mark.parametrize("measure", MEASURES)
def test_angles_there_are_those_of_the_cpu_and_vectors_are_sent_once(measure: Measure) -> None:
    rng = np.random.default_rng(0)
    vectors = np.stack([principal_vectors(rng.random((20, 12)), 3) for _ in range(9)])
    here = angles(Gram.of_vectors(range(9), vectors), measure, rows_at_once=4).values
    with pretended() as counts, using(Device("cuda")):
        there = angles(Gram.of_vectors(range(9), vectors), measure, rows_at_once=4).values
    np.testing.assert_allclose(there, here, atol=1e-5)  # near 0 an arccos has half the digits
    assert counts.waits["to device"] == (4 if measure == "smallest_angle" else 1)  # and three blocks of products


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 1e-3}], ids=str)
def test_clients_of_lognormal_sizes_are_replayed_from_the_second_round_on(options: dict[str, Any]) -> None:
    """At least nine steps of ten, for a hundred clients; results are those of the plain loop in every round."""
    sizes = np.random.default_rng(0).lognormal(np.log(15), 0.8, 100).astype(int) + 1
    given, task = inputs(MLP, sizes.tolist()), Train(MLP, **{"lr": 0.05, **options}, epochs=1, batch_size=5)
    plain = np.stack([result["update"] for result in Engine("sequential").run(task, given)])
    steps: list[int] = []
    real = graphs.Program.step

    def step(program: graphs.Program, *noise: Any) -> None:
        steps.append(1)
        real(program, *noise)

    with pretended() as counts, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.Program, "step", step)
        for round in range(3):
            replayed, uncaptured, captured = counts.replayed, len(steps), counts.captured
            found = np.stack([np.asarray(result["update"]) for result in Engine(device="cuda").run(task, given)])
            np.testing.assert_allclose(found, plain, rtol=1e-10, atol=1e-10)
            live = len(steps) - uncaptured - 2 * (counts.captured - captured)  # a pretended capture takes two
            assert round == 0 or counts.replayed - replayed >= 9 * live
        assert counts.captured <= 3, "programs for three sizes of the stack, made once"
        assert len(steps) - 2 * counts.captured + counts.replayed <= 3 * 1.1 * -(-sizes.max() // 5)
