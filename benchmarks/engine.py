"""The engine against the plain loop, and the server side against scipy and numpy, A B A B in one process.

Ratios above 1 mean that ours is quicker. Every comparison names its peer; peers that are not installed are skipped with a word.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg

from cflpriv.clustering.similarity import Gram, angles
from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.compute import Kind
from cflpriv.engine.models import Model
from cflpriv.tasks.signatures import principal_vectors
from cflpriv.tasks.training import Train
from cflpriv.types import ClientData

__all__ = ["COMPARISONS"]

REPEATS = 5


def interleaved(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int = REPEATS, scale: float = 1.0,
    clock: Callable[[], float] = time.process_time,
) -> list[float]:  # fmt: skip
    """theirs / ours, pair by pair, after one warm-up of ours. `scale` multiplies theirs, where it did a part of the work.

    Seconds are those of the processor, which a busy machine disturbs less; where ours has several processes or threads, take another clock.
    """
    ours()
    ratios = []
    for _ in range(repeats):
        begun = clock()
        ours()
        between = clock()
        theirs()
        ratios.append(scale * (clock() - between) / (between - begun))
    return ratios


def row(ratios: list[float], floor: float, stretch: float, against: str, note: str) -> dict[str, Any]:
    low, high = min(ratios), max(ratios)
    return {
        "ratio": statistics.median(ratios), "low": low, "high": high, "floor": floor, "stretch": stretch, "against": against, "note": note,
    }  # fmt: skip


def clients(model: Model, count: int, samples: int) -> list[TaskInput]:
    rng = np.random.default_rng(0)
    start = model.init(0)
    inputs = []
    for i in range(count):
        x = rng.random((samples, *model.shape), dtype=np.float32)
        y = rng.integers(model.classes, size=samples)
        inputs.append(TaskInput(ClientData(i, x, y, x[:1], y[:1]), {"model": start}, {}, Streams(0, 0, i)))
    return inputs


def against_loop(
    task: Train, count: int, samples: int, floor: float, stretch: float, workers: int = 1, loops: int = 0, threads: int = 1,
    kind: Kind = "sequential",
) -> dict[str, Any]:  # fmt: skip
    """The engine against one client after the other, one intra-op thread each. The loop does `loops` clients (0: all), scaled up.

    With `kind` "torch": against the engine without its compiled kernel.
    """
    inputs = clients(task.model, count, samples)
    engine, plain = Engine(workers=workers, threads=threads), Engine(kind)
    few = inputs[: loops or count]
    try:
        clock = time.process_time if workers == threads == 1 else time.perf_counter
        ratios = interleaved(lambda: engine.run(task, inputs), lambda: plain.run(task, few), scale=count / len(few), clock=clock)
    finally:
        engine.close()
    paths = "+".join(sorted({path for _, path in engine.paths}))
    note = f"{count} clients × {samples}, batch {task.batch_size or 'full'}, {paths}, {workers} process(es) × {threads} thread(s)"
    return row(ratios, floor, stretch, "plain loop" if kind == "sequential" else "engine = 'torch'", note)


LENET = Model("lenet5", (1, 28, 28), 10)
MLP = Model("mlp", (1, 28, 28), 10, hidden=200)


def many_angles(n: int = 1000, p: int = 3, d: int = 784) -> dict[str, Any]:
    """All pairs of n signatures against scipy's function on a sample of pairs, scaled."""
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(n, d, p)))[0].transpose(0, 2, 1).copy()
    pairs = [(int(i), int(j)) for i, j in rng.integers(n, size=(500, 2))]

    def theirs() -> None:
        for i, j in pairs:
            np.degrees(scipy.linalg.subspace_angles(vectors[i].T, vectors[j].T)).min()

    ratios = interleaved(lambda: angles(Gram.of_vectors(range(n), vectors)), theirs, 3, n * (n - 1) / 2 / len(pairs))
    return row(
        ratios, 60, 90, "scipy", f"smallest angle of all pairs of {n} clients, p = {p}, d = {d}; scipy on {len(pairs)} pairs, scaled"
    )


def many_signatures(count: int = 20, n: int = 500, d: int = 784) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    samples = [np.abs(rng.normal(size=(n, d))) + np.linspace(0, 1, d) for _ in range(count)]
    ratios = interleaved(
        lambda: [principal_vectors(x, 3) for x in samples],
        lambda: [np.linalg.svd(x.T, full_matrices=False)[0][:, :3] for x in samples],
        3,
    )
    return row(ratios, 5, 11, "numpy svd", f"top-3 principal vectors of {count} clients, {n} × {d}")


COMPARISONS: dict[str, Callable[[], dict[str, Any]]] = {
    "LeNet-5, 10 clients": lambda: against_loop(Train(LENET, momentum=0.5), 10, 500, 6, 9),
    "LeNet-5, 10 clients, two threads": lambda: against_loop(Train(LENET, momentum=0.5), 10, 500, 3.0, 4.4, threads=2),
    "LeNet-5, 10 clients, two workers": lambda: against_loop(Train(LENET, momentum=0.5), 10, 500, 4.5, 10, workers=2),
    "LeNet-5, batch 32, 10 clients": lambda: against_loop(Train(LENET, momentum=0.5, batch_size=32), 10, 480, 3.5, 5, loops=4),
    "LeNet-5, kernel": lambda: against_loop(Train(LENET, momentum=0.5), 20, 500, 1.5, 2.8, kind="torch"),
    "LeNet-5, batch 32, kernel": lambda: against_loop(Train(LENET, momentum=0.5, batch_size=32), 20, 480, 1.5, 2.4, kind="torch"),
    "MLP-200, kernel": lambda: against_loop(Train(MLP, momentum=0.5), 20, 500, 1.5, 3.6, kind="torch"),
    "MLP-200, batch 32, kernel": lambda: against_loop(Train(MLP, momentum=0.5, batch_size=32), 20, 480, 1.5, 2.4, kind="torch"),
    "LeNet-5, 2 clients": lambda: against_loop(Train(LENET, momentum=0.5), 2, 200, 0.95, 2),
    "LeNet-5, 200 clients": lambda: against_loop(Train(LENET, momentum=0.5), 200, 50, 0.95, 2.8, loops=50),
    "MLP-200, batch 10, 2 clients": lambda: against_loop(Train(MLP), 2, 200, 0.95, 2),
    "MLP-200, batch 10, 200 clients": lambda: against_loop(Train(MLP), 200, 50, 0.95, 2, loops=50),
    "CNN, 20 clients": lambda: against_loop(Train(Model("cnn", (3, 32, 32), 10, hidden=512)), 20, 50, 0.95, 2, loops=5),
    "FEMNIST CNN, 4 clients": lambda: against_loop(Train(Model("femnist_cnn", (1, 28, 28), 62)), 4, 30, 0.95, 2),
    "ResNet-9, 2 clients": lambda: against_loop(Train(Model("resnet9", (3, 32, 32), 100)), 2, 20, 0.95, 2),
    "MLP-200, 10 full-batch steps": lambda: against_loop(Train(MLP, epochs=10, batch_size=0, lr=0.1), 200, 50, 5, 9, loops=50),
    "MLP-200, 10 full-batch steps, n = 200": lambda: against_loop(Train(MLP, epochs=10, batch_size=0, lr=0.1), 40, 200, 3, 5, loops=10),
    "angles of 1000 clients": many_angles,
    "signatures": many_signatures,
}
"""Name -> what measures it, for `make bench`."""
