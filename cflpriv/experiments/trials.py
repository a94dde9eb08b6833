"""Measurements of the papers that are not runs: Gaussians, regressions, separation gaps, the time influence takes.

Every function here makes one trial from a seed and gives its figures by name; `reproduce` repeats it, keeps each trial and averages.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..algorithms.cfl import gaps
from ..clustering.similarity import Gram, angles
from ..data import DataSpec, build_population
from ..engine import Engine, Streams, TaskInput
from ..engine.models import Model
from ..engine.threads import one_thread
from ..randomness import stream
from ..tasks.evaluation import Evaluate
from ..tasks.signatures import principal_vectors
from ..tasks.training import Train
from ..types import Array, ClientData
from .config import parse_config
from .regression import Point, success_rate
from .run import advance, begin, prepare

__all__ = ["Trial", "gaussians", "influence_speed", "label_swap_gap", "regression_success"]

Trial = Callable[[int, str | Path | None, Mapping[str, Any]], Mapping[str, float | None]]
"""(seed, data directory, the cell's settings) -> figures by name."""

MAHALANOBIS = 19.3
"""μᵀΣ⁻¹μ that the published Bhattacharyya distances 3.07 and 10.31 imply: x + b and 4x + b with x = μᵀΣ⁻¹μ/8."""


def gaussians(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """PACFL, Table 5: 100 points each of N(μ, Σ) and N(`mean`·μ, `spread`·Σ) in 20 dimensions, by five measures.

    The paper prints neither μ nor Σ: here Σ = I and μ is as long as its Bhattacharyya distances imply. Those and KL are of Gaussians
    fitted to the points; MMD is the biased estimate, square-rooted, with a Gaussian kernel as wide as the median distance. Angles in
    degrees.
    """
    d, n, p = 20, 100, 3
    mu = np.full(d, np.sqrt(MAHALANOBIS / d))
    draws = stream(seed, "reproduce gaussians")
    x = mu + draws.standard_normal((n, d))
    y = settings["mean"] * mu + np.sqrt(settings["spread"]) * draws.standard_normal((n, d))
    gram = Gram.of_vectors((0, 1), np.stack([principal_vectors(x, p), principal_vectors(y, p)]))
    bhattacharyya, kl = _fitted(x, y)
    return {
        "smallest_angle": float(angles(gram, "smallest_angle").values[0, 1]),
        "corresponding_angles": float(angles(gram, "corresponding_angles").values[0, 1]),
        "bhattacharyya": bhattacharyya,
        "kl": kl,
        "mmd": _mmd(x, y),
    }


def _fitted(x: Array, y: Array) -> tuple[float, float]:
    """The Bhattacharyya distance and KL(x ‖ y) of the Gaussians fitted to two samples (n, d)."""
    step = y.mean(axis=0) - x.mean(axis=0)
    a, b = np.cov(x.T), np.cov(y.T)
    middle = (a + b) / 2
    logs = [float(np.linalg.slogdet(one)[1]) for one in (a, b, middle)]
    bhattacharyya = step @ np.linalg.solve(middle, step) / 8 + (logs[2] - (logs[0] + logs[1]) / 2) / 2
    kl = (np.trace(np.linalg.solve(b, a)) + step @ np.linalg.solve(b, step) - len(step) + logs[1] - logs[0]) / 2
    return float(bhattacharyya), float(kl)


def _mmd(x: Array, y: Array) -> float:
    both = np.concatenate([x, y])
    squares = ((both[:, None] - both[None]) ** 2).sum(axis=2)
    kernel = np.exp(-squares / np.median(squares[squares > 0]))
    n = len(x)
    return float(np.sqrt(max(kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean(), 0.0)))


def regression_success(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """IFCA, Fig. 3: whether a trial succeeds (1 or 0) at the point that `settings` gives (see `regression.Point`). In float32."""
    with one_thread():
        return {"success": success_rate(Point(**settings, trials=1), seed, dtype=torch.float32)}


def label_swap_gap(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """CFL, Figs. 5 and 6: the separation gap of weight updates while one model is trained, label swaps, nobody being split.

    `settings` is a tree of sections. Gives the gap after the last round and the first round from which it stays positive (None: never).
    """
    tree = {section: dict(values) for section, values in settings.items()}
    for section in ("data", "run"):
        tree.setdefault(section, {})["seed"] = seed
    tree["algorithm"] = {"name": "cfl", "eps1": 1e-9, "eps2": 1e9, "relative": False, "watch": True}
    simulation = prepare(parse_config(tree, "label swap"), data_dir)
    truth = {client.id: group for client, group in zip(simulation.population.clients, simulation.population.groups, strict=True)}
    begin(simulation)
    seen: list[float] = []
    while len(simulation.rows) < simulation.config.training.rounds:
        advance(simulation)
        seen.extend(gaps(simulation.state, truth).values())
    simulation.simulated.close()
    after = next((i for i in range(len(seen), 0, -1) if seen[i - 1] <= 0), 0) + 1
    return {"gap": seen[-1], "gap_from_round": float(after) if after <= len(seen) else None}


def influence_speed(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """pFedLIA, Fig. 3a: how many times as long exact influence of a batch of 100 takes as lazy influence.

    M₀ is trained on 9900 samples; exact: a new model on those and the batch until an epoch lowers its loss by less than the share
    `threshold`; lazy: 10 epochs of M₀ on the batch. Both then score 100 test samples. The time of M₀ does not count, as in the paper, which
    publishes neither thresholds nor data set, and has a ResNet-18 where this has an MLP.
    """
    size, batch = int(settings.get("samples", 9900)), 100
    population = build_population(
        DataSpec(source=str(settings.get("source", "fashion_mnist")), clients=1, samples_per_client=size + batch, seed=seed), data_dir
    )
    own = population.clients[0]
    x, y, u, v = own.x_train, own.y_train, own.x_test[:100], own.y_test[:100]
    model = Model("mlp", population.shape, population.classes, 200, population.mean, population.std)
    train = Train(model, epochs=1, batch_size=100, lr=0.1)
    engine = Engine("auto", 1, "cpu")

    def step(start: Array, first: int, last: int, epochs: int, number: int) -> Array:
        data = ClientData(0, x[first:last], y[first:last], u, v)
        task = Train(model, epochs=epochs, batch_size=train.batch_size, lr=train.lr)
        update = engine.run(task, [TaskInput(data, {"model": start}, {}, Streams(seed, number, 0))])[0]["update"]
        return np.asarray(start + np.asarray(update))

    def loss(vector: Array, x_here: Array, y_here: Array) -> float:
        scored = engine.run(
            Evaluate(model), [TaskInput(ClientData(0, x[:1], y[:1], x_here, y_here), {"model": vector}, {}, Streams(seed, 0, 0))]
        )
        return float(scored[0]["loss"]) / max(len(y_here), 1)

    def converged(last: int) -> Array:
        vector = np.asarray(model.init(seed))
        before = loss(vector, x[:last], y[:last])
        for number in range(int(settings.get("epochs_at_most", 200))):
            vector = step(vector, 0, last, 1, number)
            now = loss(vector, x[:last], y[:last])
            if before - now < float(settings["threshold"]) * before:
                break
            before = now
        return vector

    with one_thread():
        base = converged(size)
        began = time.perf_counter()
        loss(converged(size + batch), u, v)
        exact = time.perf_counter() - began
        step(base, size, size + batch, 1, 0)  # the first call compiles and caches
        began = time.perf_counter()
        loss(step(base, size, size + batch, 10, 0), u, v)
        lazy = time.perf_counter() - began
    engine.close()
    return {"speedup": exact / lazy, "exact_seconds": exact, "lazy_seconds": lazy}
