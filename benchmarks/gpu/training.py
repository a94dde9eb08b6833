"""Rounds of local training on the device: against the eager loop there, against the roofline, and the memory that they take."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from cflpriv.engine import Engine, Streams, TaskInput, graphs, memory
from cflpriv.engine.device import Device, Precision, arithmetic
from cflpriv.engine.models import Model
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData

from .roofline import ceilings, floor_row, round_of
from .rows import Figures, Floor, Row, Setting, medians, settle

__all__ = ["CASES", "Case", "clients_of", "fresh", "rows", "trained"]


class Transformer(nn.Module):
    """A small encoder over windows of word numbers: two layers of attention, and a score for each word that may come next."""

    def __init__(self, words: int = 256, window: int = 32, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(window, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.scores = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after = self.words(x.long()) + self.places
        for block in self.blocks:
            after = block(after)
        return self.scores(after.mean(dim=-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and two linear layers, each behind a layer norm and beside a skip connection. Products are written out, to be counted."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, window, width = x.shape
        q, k, v = self.asked(self.before(x)).view(batch, window, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5, dim=-1)
        x = x + self.back((weights @ v).transpose(1, 2).reshape(batch, window, width))
        return x + self.wide(self.between(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A network, the samples of a client, how many clients the eager loop takes, and numbers of clients, the most telling first."""

    name: str
    model: Model
    samples: int
    loops: int = 5
    words: bool = False
    counts: tuple[int, ...] = (1000, 100, 10)


CASES = (
    Case("LeNet-5", Model("lenet5", (1, 28, 28), 10), 500),
    Case("MLP-200", Model("mlp", (1, 28, 28), 10, hidden=200), 500),
    Case("transformer", Model("transformer", (32,), 256, factory=Transformer), 100, words=True),
    Case("ResNet-9", Model("resnet9", (3, 32, 32), 10), 20, 2, counts=(100, 10, 1000)),
)  # fmt: skip
TINY = {"ResNet-9": (2, 2)}
"""Clients and samples of a rehearsal; of other networks 4 and 20."""


def clients_of(case: Case, setting: Setting, count: int, samples: int = 0) -> list[TaskInput]:
    """Clients whose samples are parts of one array, which is quickly made; the device gets a copy for each."""
    few, short = TINY.get(case.name, (4, 20))
    count, samples = setting.size(count, few), setting.size(samples or case.samples, short)
    rng, start, total = np.random.default_rng(0), case.model.init(0), samples + count
    if case.words:
        pool = rng.integers(case.model.classes, size=(total, *case.model.shape)).astype(np.float32)
    else:
        pool = rng.random((total, *case.model.shape), dtype=np.float32)
    y = rng.integers(case.model.classes, size=total)
    made = []
    for client in range(count):
        own = slice(client, client + samples)
        data = ClientData(client, pool[own], y[own], pool[:1], y[:1])
        made.append(TaskInput(data, {"model": start}, {}, Streams(0, 0, client), secret=client.to_bytes(32, "big")))
    return made


@contextmanager
def fresh(device: str) -> Iterator[None]:
    """Without captured steps, samples or cached memory of an earlier row, before and after."""

    def release() -> None:
        graphs.release_graphs()
        memory.release_samples()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    release()
    try:
        yield
    finally:
        release()


def eager(task: Train, inputs: list[TaskInput], device: Device) -> list[Array]:
    """The plain loop as one writes it for a device: data and model there, a client and a batch at a time. The updates."""
    updates = []
    with arithmetic(device):
        for task_input in inputs:
            start = task_input.array("model")
            module = copy.deepcopy(task.model.load(start, training=True)).to(device.kind)
            x, y = task.model.inputs(task_input.data.x_train).to(device.kind), torch.from_numpy(task_input.data.y_train).to(device.kind)
            optimiser = torch.optim.SGD(module.parameters(), task.lr, task.momentum)
            for batch in task.batches(task_input):
                optimiser.zero_grad()
                rows = torch.from_numpy(batch).to(device.kind)
                torch.autograd.backward([functional.cross_entropy(module(x[rows]), y[rows])])
                optimiser.step()
            updates.append(task.model.store(module.cpu()) - start)
    return updates


def trained(task: Train, inputs: list[TaskInput], setting: Setting, precision: Precision = "full") -> tuple[Figures, list[Any]]:
    """A round of the engine against the roofline, and its results."""
    engine = Engine("torch", device=setting.device, precision=precision)
    results: list[Any] = []

    def round() -> None:
        results.clear()  # as a server drops the updates of a round that are summed
        results.extend(engine.run(task, inputs))

    took = medians([round], setting.device)[0]
    figures = floor_row(took, round_of(task, len(inputs), len(inputs[0].data.y_train)), setting, precision)
    if setting.device == "cuda":
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    path = "+".join(sorted({path for _, path in engine.paths}))
    return {**figures, "note": f"{len(inputs)} clients × {len(inputs[0].data.y_train)}, {path}"}, results


def against_eager(setting: Setting, case: Case, count: int) -> Figures:
    """A round of the engine against the eager loop on a few of its clients, scaled, and how far their updates are apart."""
    task, device = Train(case.model, momentum=0.5), Device(setting.device)
    with fresh(setting.device):
        inputs = clients_of(case, setting, count)
        figures, results = trained(task, inputs, setting)
        few = inputs[: case.loops]
        updates = eager(task, few, device)
        (loop,) = medians([partial(eager, task, few, device)], setting.device, warm_ups=0)
    figures["x eager"] = 1000 * loop * len(inputs) / len(few) / figures["ms"]
    largest = max(float(np.abs(update).max()) for update in updates)
    apart = [float(np.abs(np.asarray(ours["update"]) - theirs).max()) for ours, theirs in zip(results, updates, strict=False)]
    return {**figures, "difference": max(apart) / largest, "note": f"{figures['note']}, batch {task.batch_size}; eager loop on {len(few)}"}


def measured_ceilings(setting: Setting) -> Figures:
    """What the rooflines are made of."""
    ceiling = ceilings(setting)
    settle(setting.device)
    rates = {f"{name} TFLOP/s": rate / 1e12 for name, rate in ceiling.items() if name != "bandwidth"}
    return {"GB/s": ceiling["bandwidth"] / 1e9, **rates, "note": "a large copy, bytes read and written; large matrix products"}


def rows(setting: Setting) -> list[Row]:
    """The ceilings, then every network with several numbers of clients."""
    rows = [Row("training", "ceilings of the device", measured_ceilings)]
    for case in CASES:
        for count in case.counts:
            floor = Floor("x eager", 100.0) if (case.name, count) == ("LeNet-5", 1000) else None
            rows.append(
                Row("training", f"{case.name}, {count} clients", partial(against_eager, case=case, count=count), floor, limit=120.0)
            )
    return rows
