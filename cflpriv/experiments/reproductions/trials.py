"""Measurements of the papers that are not runs: angles, cosines, regressions, separation gaps, scores of influence and their time.

Every function here makes one trial from a seed and gives its figures by name; `reproduce` repeats it, keeps each trial and averages.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...algorithms.cfl.cfl import gaps
from ...algorithms.cfl.splitting import separation_gap
from ...algorithms.pfedlia.influence import better_group
from ...algorithms.stocfl.representing import Represent
from ...clustering.cuts import cut_tree, linkage_tree
from ...clustering.scores import ari
from ...clustering.similarity import Gram, Measure, angles, cosines
from ...data import DataSpec, build_population
from ...engine import Engine, Streams, TaskInput
from ...engine.models import Model
from ...engine.threads import one_thread
from ...randomness import stream
from ...tasks.evaluation import Evaluate
from ...tasks.signatures import principal_vectors
from ...tasks.training import Gradient, Train
from ...types import Array, ClientData, Population
from ..config.config import parse_config
from ..run.loop import Experiment
from ..run.run import advance, begin, prepare
from .regression import RegressionPoint, success_rate

__all__ = [
    "Trial", "anchor_cosines", "class_angles", "data_set_angles", "gaussian_separation", "gaussians", "influence_frontier",
    "influence_speed", "label_swap_gap", "regression_success",
]  # fmt: skip

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
    logs = [float(np.linalg.slogdet(matrix)[1]) for matrix in (a, b, middle)]
    bhattacharyya = step @ np.linalg.solve(middle, step) / 8 + (logs[2] - (logs[0] + logs[1]) / 2) / 2
    kl = (np.trace(np.linalg.solve(b, a)) + step @ np.linalg.solve(b, step) - len(step) + logs[1] - logs[0]) / 2
    return float(bhattacharyya), float(kl)


def _mmd(x: Array, y: Array) -> float:
    both = np.concatenate([x, y])
    squares = ((both[:, None] - both[None]) ** 2).sum(axis=2)
    kernel = np.exp(-squares / np.median(squares[squares > 0]))
    n = len(x)
    return float(np.sqrt(max(kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean(), 0.0)))


def data_set_angles(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """PACFL, the table beside Fig. 1: the angles between the leading `p` singular vectors of two data sets, in degrees.

    `settings["data"]` is a mixture with one client a data set, which brings both into one frame.
    """
    first, other = (_flat(client.x_train) for client in _population(seed, data_dir, settings).clients)
    p = settings["p"]
    gram = Gram.of_vectors((0, 1), np.stack([principal_vectors(first, p), principal_vectors(other, p)]))
    measures: tuple[Measure, ...] = ("smallest_angle", "corresponding_angles")
    return {measure: float(angles(gram, measure).values[0, 1]) for measure in measures}


def class_angles(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """PACFL, Fig. 3: the smallest angles (eq. 2) between all pairs of classes, and whether they show the `groups` of classes.

    `settings["data"]` says whose samples these are, `p` how many singular vectors a class has. Gives the mean angle within and between
    groups, in degrees, and the ARI of a cut of the tree (average linkage) into as many clusters as there are groups.
    """
    population = _population(seed, data_dir, settings)
    x = np.concatenate([_flat(client.x_train) for client in population.clients])
    y = np.concatenate([client.y_train for client in population.clients])
    group = np.array([number for number, labels in enumerate(settings["groups"]) for _ in labels])
    classes = [label for labels in settings["groups"] for label in labels]
    vectors = np.stack([principal_vectors(x[y == label], settings["p"], name=f"class {label}") for label in classes])
    distance = angles(Gram.of_vectors(range(len(classes)), vectors), "smallest_angle")
    cut = cut_tree(linkage_tree(distance), distance, k=len(settings["groups"]))
    same, apart = group[:, None] == group[None, :], ~np.eye(len(group), dtype=bool)
    return {
        "angle_within": float(distance.values[same & apart].mean()),
        "angle_between": float(distance.values[~same].mean()),
        "ari": ari(group.tolist(), cut.labels),
    }


def _population(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Population:
    """The clients that the section `data` of a trial's settings describes."""
    return build_population(parse_config({"data": {**settings["data"], "seed": seed}}, "trial").data, data_dir)


def _flat(x: Array) -> Array:
    return x.reshape(len(x), -1)


def anchor_cosines(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """StoCFL, Fig. 2: the mean cosine of the representations Ψ of two clients whose data are `apart` steps apart.

    Ψ is the gradient at a random linear model, of pixels in [0, 1] as they are. `settings["data"]` has clients whose groups, or else whose
    numbers, are the steps, on a circle; client i's images are turned by `turn`·i degrees, if that is given.
    """
    from scipy.ndimage import rotate  # slow to import

    population = _population(seed, data_dir, settings)
    places = np.array(population.groups if len(set(population.groups)) > 1 else range(len(population.clients)))
    model = Model("linear", population.shape, population.classes, mean=(0.0,), std=(1.0,))
    inputs, anchor = [], model.init(seed)
    for place, client in zip(places, population.clients, strict=True):
        turn = place * settings.get("turn", 0)
        x = rotate(client.x_train, turn, axes=(3, 2), reshape=False, order=1) if turn else client.x_train
        data = ClientData(client.id, x, client.y_train, client.x_test, client.y_test)
        inputs.append(TaskInput(data, {"model": anchor}, {}, Streams(seed, 0, client.id)))
    engine = Engine("auto", 1, "cpu")
    with one_thread():
        results = engine.run(Represent(Gradient(model)), inputs)
    engine.close()
    vectors = np.stack([result["representation"] for result in results])[:, None]
    values = cosines(Gram.of_vectors(range(len(results)), vectors)).values
    steps = np.abs(places[:, None] - places[None, :])
    steps = np.minimum(steps, places.max() + 1 - steps)
    return {"cosine": float(values[(steps == settings["apart"]) & ~np.eye(len(results), dtype=bool)].mean())}


def gaussian_separation(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """CFL, Fig. 3: whether (1 or 0) the best bipartition of 3k clients is correct, that is g(α) > 0 (eq. 28, Remark 2).

    `k` risks have Gaussian gradients of `d` coordinates that sum to zero, as at a stationary point of all; three clients each have that
    gradient with Gaussian noise, rescaled to `gamma` times its length: γ_i (eq. 16) is the same for all.
    """
    k, d, clients = settings["k"], settings["d"], 3
    draws = stream(seed, "reproduce separation")
    risks = draws.standard_normal((k, d))
    risks[-1] = -risks[:-1].sum(axis=0)
    own = np.repeat(risks, clients, axis=0)
    noise = draws.standard_normal(own.shape)
    noise *= settings["gamma"] * (np.linalg.norm(own, axis=1) / np.linalg.norm(noise, axis=1))[:, None]
    unit = (own + noise) / np.linalg.norm(own + noise, axis=1, keepdims=True)
    return {"separated": float(separation_gap(unit @ unit.T, np.repeat(np.arange(k), clients).tolist()) > 0)}


def regression_success(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """IFCA, Fig. 3: whether a trial succeeds (1 or 0) at the point that `settings` gives (see `regression.RegressionPoint`). In float32."""
    with one_thread():
        return {"success": success_rate(RegressionPoint(**settings, trials=1), seed, dtype=torch.float32)}


def label_swap_gap(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """CFL, Figs. 5 and 6: the separation gap of weight updates while one model is trained, label swaps, nobody being split.

    `settings` is a tree of sections. Gives the gap after the last round and the first round from which it stays positive (None: never).
    """
    watch = {"name": "cfl", "eps1": 1e-9, "eps2": 1e9, "relative": False, "watch": True}
    simulation = _prepared(seed, data_dir, {**settings, "algorithm": watch}, "label swap")
    truth = {client.id: group for client, group in zip(simulation.population.clients, simulation.population.groups, strict=True)}
    begin(simulation)
    seen: list[float] = []
    while len(simulation.rows) < simulation.config.training.rounds:
        advance(simulation)
        seen.extend(gaps(simulation.state, truth).values())
    simulation.simulated.close()
    after = next((i for i in range(len(seen), 0, -1) if seen[i - 1] <= 0), 0) + 1
    return {"gap": seen[-1], "gap_from_round": float(after) if after <= len(seen) else None}


def influence_frontier(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """pFedLIA, Fig. 3b: client 0's scores of all others, and the frontier that 2-means draws between them.

    `settings` is a tree of sections whose algorithm warms up for `warm_up` rounds and then has a matrix of scores. Gives the lowest score
    of a client of client 0's own group, the highest of another's, and the share of clients on the right side of the frontier.
    """
    training = {**settings["training"], "rounds": settings["algorithm"]["warm_up"] + 1}
    simulation = _prepared(seed, data_dir, {**settings, "training": training}, "influence")
    truth = simulation.population.group_of
    begin(simulation)
    while len(simulation.rows) < simulation.config.training.rounds:
        advance(simulation)
    simulation.simulated.close()
    first, *others = simulation.state.scored
    row = simulation.state.scores[0, 1:]
    same = np.array([truth[client] == truth[first] for client in others])
    return {
        "score_same": float(row[same].min()),
        "score_other": float(row[~same].max()),
        "frontier": float((better_group(row) == same).mean()),
    }


def _prepared(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any], name: str) -> Experiment:
    """A simulation of a tree of sections, before its beginning."""
    tree = {section: dict(values) for section, values in settings.items()}
    for section in ("data", "run"):
        tree.setdefault(section, {})["seed"] = seed
    return prepare(parse_config(tree, name), data_dir)


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
