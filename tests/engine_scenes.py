"""Clients and models for tests of the engine, without the packages that a machine with a device may lack."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cflpriv.engine import Device, Streams, TaskInput, fast
from cflpriv.engine.models import Model
from cflpriv.engine.sgd import Way
from cflpriv.types import Array, ClientData

CUDA = Device("cuda")
MODELS = {
    "linear": Model("linear", (1, 4, 4), 3, dtype="float64"),
    "mlp": Model("mlp", (1, 4, 4), 3, hidden=5, dtype="float64"),
    "lenet5": Model("lenet5", (1, 16, 16), 3, dtype="float64"),
}


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
