"""Local training beside `pfl`, Flower's simulation and JAX, where the extra `bench` is installed.

All get the same clients, model, batch size and optimiser: by default, as in the engine's first row, LeNet-5, 10 clients of 500 samples,
batch 10, SGD with momentum 0.5, one epoch, everything in memory. Ratios above 1 mean that ours is quicker.
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from cflpriv.engine import Engine
from cflpriv.engine.models import Model
from cflpriv.tasks.training import Train

from .engine import LENET, MLP, clients, interleaved, row

__all__ = ["COMPARISONS"]

COUNT, SAMPLES, BATCH, LR, MOMENTUM = 10, 500, 10, 0.01, 0.5


def against_pfl() -> dict[str, Any]:
    """One central iteration of pfl's federated averaging with its simulated backend, in this process, one intra-op thread."""
    try:
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.algorithm.base import NNAlgorithmParams as Params
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.hyperparam.base import NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel
    except ImportError:
        return row([float("nan")], 1, 2.5, "pfl", "not measured: the extra `bench` is not installed")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    inputs = clients(LENET, COUNT, SAMPLES)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = LENET.load(LENET.init(0))

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            self.eval() if eval else self.train()
            return functional.cross_entropy(self.net(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Any]:
            return {}

    net = Net()
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    model = PyTorchModel(
        net, lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=MOMENTUM), torch.optim.SGD(net.parameters(), lr=1.0)
    )
    held = {
        str(data.id): Dataset([torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)], user_id=str(data.id))
        for data in (task_input.data for task_input in inputs)
    }
    turn = iter(range(10**9))
    users = list(held)
    federated = FederatedDataset(lambda user: held[user], lambda: users[next(turn) % len(users)])
    backend = SimulatedBackend(training_data=federated, val_data=None)
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH)

    algorithm = FederatedAveraging()
    params = Params(central_num_iterations=10**9, evaluation_frequency=10**9, train_cohort_size=COUNT, val_cohort_size=0)

    def theirs() -> None:
        contexts, _, _ = algorithm.get_next_central_contexts(model, 1, params, local)  # round 0 would evaluate as well
        statistics, metrics = backend.gather_results(model, algorithm, central_context=contexts[0])
        algorithm.process_aggregated_statistics(contexts[0], metrics, model, statistics)

    task = Train(LENET, momentum=MOMENTUM, lr=LR, batch_size=BATCH)
    engine = Engine()
    before = np.concatenate([parameter.detach().numpy().ravel() for parameter in net.parameters()])
    ratios = interleaved(lambda: engine.run(task, inputs), theirs, 3)
    after = np.concatenate([parameter.detach().numpy().ravel() for parameter in net.parameters()])
    if np.array_equal(before, after):
        return row([float("nan")], 1, 2.5, "pfl", "not measured: its model did not move")
    return row(ratios, 1, 2.5, "pfl", f"LeNet-5, {COUNT} clients × {SAMPLES}, batch {BATCH}, one process and thread each")


def against_flower_simulation(rounds: int = 4) -> dict[str, Any]:
    """A steady round of FedAvg on Flower's simulation engine (Ray, one actor a core) against two of our workers; no evaluation."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["FLWR_HOME"] = tempfile.mkdtemp(prefix="flwr")
    try:
        import ray  # noqa: F401
        from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp import Grid, ServerApp
        from flwr.serverapp.strategy import FedAvg
        from flwr.simulation import run_simulation
    except ImportError:
        return row([float("nan")], 1, 4.5, "Flower simulation", "not measured: the extra `bench` is not installed")
    logging.disable(logging.WARNING)
    app = ClientApp()
    server = ServerApp()
    times: list[float] = []

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        client = int(context.node_config["partition-id"])
        data = clients(LENET, COUNT, SAMPLES)[client].data
        net = LENET.load(LENET.init(0))
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        for parameter in net.parameters():
            parameter.requires_grad_(True)
        optimiser = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
        x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
        for rows in torch.randperm(len(y)).split(BATCH):
            optimiser.zero_grad()
            functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
        return Message(RecordDict(content), reply_to=message)

    class Timed(FedAvg):  # type: ignore[misc]
        def configure_train(self, server_round: int, *rest: Any) -> Any:
            times.append(time.perf_counter())
            return super().configure_train(server_round, *rest)

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=COUNT, min_available_nodes=COUNT)
        strategy.start(grid=grid, initial_arrays=ArrayRecord(LENET.load(LENET.init(0)).state_dict()), num_rounds=rounds)
        times.append(time.perf_counter())

    run_simulation(server, app, num_supernodes=COUNT, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0}})
    steady = np.diff(times)[1:]  # the first round starts the actors
    inputs = clients(LENET, COUNT, SAMPLES)
    task = Train(LENET, momentum=MOMENTUM, lr=LR, batch_size=BATCH)
    engine = Engine(workers=2)
    try:
        engine.run(task, inputs)
        ours = []
        for _ in steady:
            begun = time.perf_counter()
            engine.run(task, inputs)
            ours.append(time.perf_counter() - begun)
    finally:
        engine.close()
    ratios = [float(theirs / own) for theirs, own in zip(steady, ours, strict=True)]
    note = f"a steady round, two processes each; one after the other, not interleaved; theirs {steady.round(2).tolist()} s"
    return row(ratios, 1, 4.5, "Flower simulation", note)


def against_jax(model: Model, batch: int, floor: float, stretch: float) -> dict[str, Any]:
    """A compiled `scan` over a client's batches, one client after the other, on one core. Both end with equal parameters."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if hasattr(os, "sched_setaffinity"):  # there is no other way to keep its threads from computing beside each other
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    try:
        import jax
        from jax import lax
        from jax import numpy as jnp
    except ImportError:
        return row([float("nan")], floor, stretch, "JAX scan", "not measured: the extra `bench` is not installed")
    torch.set_num_threads(1)
    inputs = clients(model, COUNT, SAMPLES // batch * batch)
    samples = [(jnp.asarray(model.inputs(each.data.x_train).numpy()), jnp.asarray(each.data.y_train)) for each in inputs]
    start = [jnp.asarray(piece) for piece in _pieces(model, inputs[0].array("model"))]

    def scores(parameters: list[Any], x: Any) -> Any:
        if model.name == "mlp":
            w1, b1, w2, b2 = parameters
            return jnp.maximum(x.reshape(len(x), -1) @ w1.T + b1, 0) @ w2.T + b2
        for weight, bias in zip(parameters[0:4:2], parameters[1:4:2], strict=True):
            x = jnp.maximum(lax.conv(x, weight, (1, 1), "VALID") + bias[:, None, None], 0)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        x = x.reshape(len(x), -1)
        for weight, bias in zip(parameters[4:8:2], parameters[5:8:2], strict=True):
            x = jnp.maximum(x @ weight.T + bias, 0)
        return x @ parameters[8].T + parameters[9]

    def loss(parameters: list[Any], x: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(scores(parameters, x)), y[:, None], 1).mean()

    @jax.jit
    def trained(x: Any, y: Any, rows: Any) -> Any:
        def step(state: Any, batch_rows: Any) -> Any:
            parameters, velocities = state
            slopes = jax.grad(loss)(parameters, x[batch_rows], y[batch_rows])
            velocities = [MOMENTUM * velocity + slope for velocity, slope in zip(velocities, slopes, strict=True)]
            return ([value - LR * velocity for value, velocity in zip(parameters, velocities, strict=True)], velocities), None

        (parameters, _), _ = lax.scan(step, (start, [jnp.zeros_like(value) for value in start]), rows)
        return jnp.concatenate([value.ravel() for value in parameters])

    task = Train(model, momentum=MOMENTUM, lr=LR, batch_size=batch)
    batches = [np.stack(task.batches(each)) for each in inputs]
    engine = Engine()

    def theirs() -> list[Any]:
        return [np.asarray(trained(x, y, rows)) for (x, y), rows in zip(samples, batches, strict=True)]

    ended = [each.array("model") + np.asarray(made["update"]) for each, made in zip(inputs, engine.run(task, inputs), strict=True)]
    error = max(float(np.abs(one - other).max()) for one, other in zip(ended, theirs(), strict=True))
    note = f"{model.name}, {COUNT} clients × {len(inputs[0].data.y_train)}, batch {batch}; largest difference of parameters {error:.0e}"
    return row(interleaved(lambda: engine.run(task, inputs), theirs, 5), floor, stretch, "JAX scan", note)


def _pieces(model: Model, vector: Any) -> list[Any]:
    """The parameters of a vector (d,), each in its shape."""
    return [vector[at : at + int(np.prod(shape))].reshape(shape) for _, shape, at in model.layout]


COMPARISONS: dict[str, Callable[[], dict[str, Any]]] = {
    "LeNet-5, 10 clients, pfl": against_pfl,
    "LeNet-5, 10 clients, Flower simulation": against_flower_simulation,
    "LeNet-5, batch 10, JAX": lambda: against_jax(LENET, 10, 3.0, 10.0),
    "LeNet-5, batch 32, JAX": lambda: against_jax(LENET, 32, 3.0, 10.0),
    "MLP-200, batch 10, JAX": lambda: against_jax(MLP, 10, 1.3, 1.5),
    "MLP-200, batch 32, JAX": lambda: against_jax(MLP, 32, 1.1, 1.2),
}
"""Name -> what measures it, for `make bench`."""
