"""Clients and models for tests of the engine, without the packages that a machine with a device may lack."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from cflpriv.engine import Device, Engine, Streams, TaskInput, fast, graphs
from cflpriv.engine.models import Model
from cflpriv.engine.sgd import Way
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData

CUDA = Device("cuda")
MODELS = {
    "linear": Model("linear", (1, 4, 4), 3, dtype="float64"),
    "mlp": Model("mlp", (1, 4, 4), 3, hidden=5, dtype="float64"),
    "lenet5": Model("lenet5", (1, 16, 16), 3, dtype="float64"),
}

NOISY: dict[str, Any] = {"clip_norm": 1.0, "sampling_rate": 0.2, "noise_multiplier": 1.0, "public_samples": 15}
EXTRAS: tuple[dict[str, Any], ...] = (
    {}, {"momentum": 0.5, "prox": 0.1}, {"optimizer": "adam"}, {"clip_norm": 1.0}, {"maml_lr": 0.05}, NOISY, NOISY | {"maml_lr": 0.05},
)  # fmt: skip
"""Options of training that a device is compared with the plain loop for."""
TOLERANCES = {"float64": 1e-10, "float32": 1e-4}


def inputs(model: Model, sizes: Sequence[int], dtype: Any = np.float64, **vectors: Array) -> list[TaskInput]:
    """Clients with a model and a cryptographic source each."""
    rng = np.random.default_rng(sum(sizes))
    given_to = []
    for i, n in enumerate(sizes):
        x, y = rng.random((n, *model.shape)).astype(dtype), rng.integers(model.classes, size=n)
        data, secret = ClientData(i, x, y, x[:2], y[:2]), i.to_bytes(32, "big")
        given_to.append(TaskInput(data, {"model": model.init(i), **vectors}, {}, Streams(1, 2, i), secret=secret))
    return given_to


def way_of(model: Model, clients: int = 4) -> Way:
    """The way a CUDA device would take."""
    way = fast._forward(model, clients, CUDA)
    assert way is not None
    return way


def differences(name: str, extra: dict[str, Any], device: str) -> dict[str, float]:
    """dtype -> how far updates on a device are from the plain loop's: captured steps and not, from fresh and from kept samples.

    Without float32 for Adam, which divides by gradients that are all rounding.
    """
    found = {}
    for dtype in ("float64",) if "optimizer" in extra else tuple(TOLERANCES):
        model = Model(name, MODELS[name].shape, 3, hidden=5, dtype=dtype)  # type: ignore[arg-type]
        task = Train(model, epochs=3, batch_size=4, lr=0.001, **extra)
        given_to = inputs(model, [21, 14, 20, 9], dtype)
        plain, apart = Engine("sequential").run(task, given_to), [0.0]
        for fewest in (0, 10**9):
            with patch.object(graphs, "FEWEST_STEPS", fewest):
                for _ in range(2):
                    there = Engine(device=device).run(task, given_to)
                    apart += [float(np.abs(ours["update"] - theirs["update"]).max()) for ours, theirs in zip(there, plain, strict=True)]
        found[dtype] = float("inf") if np.isnan(apart).any() else max(apart)
    return found
