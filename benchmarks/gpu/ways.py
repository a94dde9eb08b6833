"""Ways to compute the convolutions of many clients, cudnn's choice by trial, and rough precisions: rounds of local training by each."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from cflpriv.engine.convolutions import WAYS as CONVOLUTIONS
from cflpriv.engine.convolutions import only
from cflpriv.engine.device import Precision
from cflpriv.engine.models import Model, build_module
from cflpriv.tasks.training import Train

from .rows import Figures, Missing, Row, Setting
from .training import CASES, clients_of, fresh, trained

__all__ = ["WAYS", "rows"]

Way = Callable[[Model], AbstractContextManager[Model]]
"""A context in which the engine takes a way for the model that it gives, which stands for the same network."""


class Unknown(nn.Module):
    """A network behind an operation that the engine does not know, so that it takes torch's vmap."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.unsqueeze(0).squeeze(0))  # type: ignore[no-any-return]


def unknown(model: Model) -> AbstractContextManager[Model]:
    return nullcontext(replace(model, name=f"unknown {model.name}", factory=partial(_wrapped, model)))


def _wrapped(model: Model) -> nn.Module:
    from copy import deepcopy

    return Unknown(deepcopy(build_module(model)))


def by(way: str, model: Model) -> Iterator[Model]:
    """The engine's convolutions all by one way."""
    with only(way):
        yield model


WAYS: tuple[tuple[str, Way], ...] = (*((name, partial(contextmanager(by), name)) for name in reversed(CONVOLUTIONS)), ("vmap", unknown))
"""Name and context of each way; "unfolded" is what the engine does on a CUDA device."""
SWITCHES: tuple[tuple[str, bool, Precision], ...] = (
    ("full", False, "full"), ("full, cudnn.benchmark", True, "full"), ("tf32", False, "tf32"), ("bf16", False, "bf16"),
)  # fmt: skip
COUNTS = {"LeNet-5": 1000, "ResNet-9": 100}
"""Networks with convolutions -> clients."""


@contextmanager
def cudnn_benchmark(on: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def by_way(setting: Setting, name: str, way: Way, benchmark: bool, precision: Precision) -> Figures:
    """A round of training by one way."""
    if precision != "full" and setting.device == "cpu":
        raise Missing(f"{precision} needs a CUDA device")
    case = next(case for case in CASES if case.name == name)
    with fresh(setting.device), cudnn_benchmark(benchmark), way(case.model) as model:
        inputs = clients_of(replace(case, model=model), setting, COUNTS[name])
        return trained(Train(model, momentum=0.5), inputs, setting, precision)[0]


def rows(setting: Setting) -> list[Row]:
    """Every way with every switch; patches ask nothing of cudnn."""
    return [
        Row("ways", f"{name}, {count} clients: {way}, {switch}", partial(by_way, name=name, way=context, benchmark=on, precision=precision))
        for name, count in COUNTS.items()
        for way, context in WAYS
        for switch, on, precision in SWITCHES
        if not (on and way == "unfolded")
    ]
