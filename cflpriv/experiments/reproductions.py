"""The papers' tables and figures as data: for each name its cells, what was published for them, and where every hyper-parameter comes from.

A cell is a run (dotted configuration keys over the entry's own) or repeated trials. Nothing here was tuned: what the papers leave open is
said in `chosen`; open ones were set before these runs, some after earlier trials with known outcomes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .trials import Trial, gaussians, influence_speed, label_swap_gap, regression_success

__all__ = ["METRICS", "REPRODUCTIONS", "Cell", "Figure", "Reproduction"]

METRICS: dict[str, str] = {
    "shared": "accuracy of the model a client would use (shared, cluster or personal), last evaluated rounds, %",
    "local": "accuracy of each client's last locally trained model, last evaluated rounds, %",
    "ari": "adjusted Rand index against the true groups",
    "clusters": "clusters found",
    "newcomer": "newcomers' accuracy with the model they are given, %",
    "newcomer_tuned": "newcomers' accuracy after fine-tuning, %",
    "rounds_shared": "rounds until the shared or cluster models reach the target",
    "rounds_local": "rounds until the local models reach the target",
    "before_split": "accuracy at the last evaluation before the first split, %",
    "perplexity": "perplexity at the end",
    "perplexity_before_split": "perplexity at the last evaluation before the first split",
    "max_norm": "largest client norm of the last round, as a share of its largest value in the run",
    "mean_norm": "norm of the mean update of the last round, as a share of its largest value in the run",
    "smallest_angle": "eq. 2, degrees",
    "corresponding_angles": "eq. 3, degrees",
    "bhattacharyya": "Bhattacharyya distance",
    "kl": "KL divergence",
    "mmd": "MMD",
    "success": "share of trials that recover the parameters",
    "gap": "separation gap after the last round",
    "gap_from_round": "first round from which the gap stays positive",
    "speedup": "time of exact influence over lazy influence",
    "exact_seconds": "seconds, exact",
    "lazy_seconds": "seconds, lazy",
}


@dataclass(frozen=True)
class Figure:
    """One published figure: a number to compare with, words for a shape, or None where the paper prints nothing."""

    metric: str
    published: float | str | None = None


@dataclass(frozen=True)
class Cell:
    """One row. `changes` are dotted keys; `thin` are keys that hold only where the cell is scaled down; a `trial` is repeated `trials` "
    "times
    with `settings`. `groups_of` names the cell whose found clusters stand for the true groups (for the control). `x` and `series` place it
    in the picture.
    """

    label: str
    figures: tuple[Figure, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    thin: Mapping[str, Any] = field(default_factory=dict)
    trial: Trial | None = None
    trials: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    groups_of: str = ""
    x: float | None = None
    series: str = ""


@dataclass(frozen=True)
class Reproduction:
    """One table or figure. `shrinks` maps dotted keys that `--scale` multiplies to their floors; `chosen` says where hyper-parameters come
    from; `instead` maps a data set to what stands in where its files are absent; `over` is what the picture has along its axis: cells,
    their
    `x`, or rounds (with the key of rounds.jsonl that it shows).
    """

    title: str
    source: str
    chosen: str
    cells: tuple[Cell, ...]
    base: Mapping[str, Any] = field(default_factory=dict)
    shrinks: Mapping[str, int] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    over: Literal["cells", "x", "rounds"] = "cells"
    along: str = ""

    def cell(self, label: str) -> Cell:
        """The cell of that label."""
        return next(cell for cell in self.cells if cell.label == label)


def _run(label: str, algorithm: str, figures: Mapping[str, float | str | None], **more: Any) -> Cell:
    """A cell that is a run of `algorithm`, with the hyper-parameters and other keys of `more["keys"]`."""
    keys = {(key if "." in key else f"algorithm.{key}"): value for key, value in more.pop("keys", {}).items()}
    named = tuple(Figure(metric, published) for metric, published in figures.items())
    return Cell(label, named, {"algorithm.name": algorithm, **keys}, **more)


def _both(label: str, algorithm: str, published: Mapping[str, float | str | None], **more: Any) -> Cell:
    """The same with both accuracies, whichever the paper printed."""
    return _run(label, algorithm, {"shared": None, "local": None, **published}, **more)


# --- PACFL --------------------------------------------------------------------------------------------------------------------------

_PACFL = {
    "data.source": "fashion_mnist", "data.partition": "label_skew", "data.skew_percent": 20.0, "data.clients": 100,
    "data.test_samples_per_client": 200, "model.name": "lenet5", "training.rounds": 200, "training.epochs": 10, "training.batch_size": 10,
    "training.lr": 0.01, "training.momentum": 0.5, "training.participation": 0.1, "run.evaluate_every": 10,
}  # fmt: skip
_PACFL_CHOSEN = (
    "the paper's (Tables 12 and 13): lr 0.01, momentum 0.5 (0.9 for FedAvg, FedProx, FedNova, SCAFFOLD); from the published grids lr "
    "0.01 and "
    "mu 0.01, not by any result; the numbers of clusters are the published ones; at most 200 test images a client"
)
_GLOBAL = {"training.momentum": 0.9}
_PACFL_SHRINKS = {"training.rounds": 4, "data.clients": 10, "data.newcomers": 2}
_THIN_SKEW = {"data.samples_per_client": 600}  # with fewer clients each would hold more
_CONTROL = "FedAvg in random groups of PACFL's sizes"


def _label_skew(
    k: int, p: int, published: Mapping[str, tuple[str, float | None]], metrics: Mapping[str, str], thin: Mapping[str, Any] = _THIN_SKEW
) -> tuple[Cell, ...]:
    """PACFL's table of methods. `published` maps a method to (metric it was printed in, figure); `metrics` renames metrics."""
    rows: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("SOLO", "local", {}),
        ("FedAvg", "fedavg", _GLOBAL),
        ("FedProx", "fedprox", {"mu": 0.01, **_GLOBAL}),
        ("FedNova", "fednova", _GLOBAL),
        ("SCAFFOLD", "scaffold", _GLOBAL),
        ("LG-FedAvg", "lg_fedavg", {"global_layers": 2}),
        ("Per-FedAvg", "per_fedavg", {"alpha": 0.01, "beta": 0.001}),
        (f"IFCA (k={k})", "ifca", {"k": k}),
        ("CFL", "cfl", {"variant": "authors"}),
        ("PACFL", "pacfl", {"p": p, "k": k}),
    )
    cells = []
    for label, algorithm, keys in rows:
        if label.split(" ")[0] not in published:
            continue
        metric, value = published[label.split(" ")[0]]
        figures = {metrics[one]: value if one == metric else None for one in ("shared", "local")}
        cells.append(_run(label, algorithm, figures, keys=keys, thin=thin))
    if metrics["shared"] == "shared":
        cells.append(_both(_CONTROL, "shuffled", {}, groups_of="PACFL", thin=thin))
    return tuple(cells)


_AS_IS = {"shared": "shared", "local": "local"}
_PAPER_SKEW = {
    "SOLO": ("local", 95.92), "FedAvg": ("shared", 77.3), "FedProx": ("shared", 74.9), "FedNova": ("shared", 70.4),
    "SCAFFOLD": ("shared", 42.8), "LG-FedAvg": ("local", 96.80), "Per-FedAvg": ("shared", 95.95), "IFCA": ("local", 97.15),
    "CFL": ("shared", 77.93), "PACFL": ("local", 97.54),
}  # fmt: skip
_MIX4 = {
    "SOLO": ("local", 55.08), "FedAvg": ("shared", 63.68), "FedProx": ("shared", 61.86), "FedNova": ("shared", 60.92),
    "SCAFFOLD": ("shared", 69.26), "LG-FedAvg": ("local", 58.49), "Per-FedAvg": ("shared", 42.60), "IFCA": ("local", 76.79),
    "CFL": ("shared", 61.18), "PACFL": ("local", 77.83),
}  # fmt: skip
_NEWCOMERS = {
    "SOLO": ("local", 95.13), "FedAvg": ("shared", 77.61), "FedProx": ("shared", 74.30), "FedNova": ("shared", 74.66),
    "SCAFFOLD": ("shared", 73.97), "LG-FedAvg": ("local", 94.58), "Per-FedAvg": ("local", 89.88), "IFCA": ("local", 96.29),
    "PACFL": ("local", 96.36),
}  # fmt: skip
_TO_TARGET = {
    "FedAvg": ("shared", 200.0), "FedProx": ("shared", 200.0), "FedNova": ("shared", None), "SCAFFOLD": ("shared", None),
    "LG-FedAvg": ("local", 13.0), "Per-FedAvg": ("shared", 19.0), "IFCA": ("local", 14.0), "CFL": ("shared", 47.0),
    "PACFL": ("local", 12.0),
}  # fmt: skip
_DIRICHLET = {
    "SOLO": ("local", 69.71), "FedAvg": ("shared", 82.91), "FedProx": ("shared", 84.04), "FedNova": ("shared", 84.50),
    "SCAFFOLD": ("shared", 10.0), "LG-FedAvg": ("local", 74.96), "Per-FedAvg": ("shared", 80.29), "IFCA": ("local", 85.01),
    "CFL": ("shared", 74.13), "PACFL": ("local", 85.28),
}  # fmt: skip


def _gaussian_cells() -> tuple[Cell, ...]:
    printed = (
        ("mean times 2", 2.0, 1.0, (10.73, 32.2, 3.07, 15.18, 0.6218)),
        ("mean times 3", 3.0, 1.0, (18.41, 55.24, 10.31, 47.12, 0.6238)),
        ("covariance times 2", 1.0, 2.0, (8.93, 26.79, 1.14, 3.31, 0.6234)),
        ("covariance times 5", 1.0, 5.0, (13.72, 41.15, 2.13, 5.79, 0.6246)),
    )
    names = ("smallest_angle", "corresponding_angles", "bhattacharyya", "kl", "mmd")
    return tuple(
        Cell(label, tuple(map(Figure, names, values)), trial=gaussians, trials=100, settings={"mean": a, "spread": b})
        for label, a, b, values in printed
    )


# --- IFCA ---------------------------------------------------------------------------------------------------------------------------


def _regression_cells() -> tuple[Cell, ...]:
    """Fig. 3: over R and σ for K = 2 and 4, then over m and over n at σ = 0.1."""
    cells = []

    def add(k: int, m: int, n: int, r: float, noise: float, x: float, series: str) -> None:
        said = "0 where R, m, n are small, 1 where they are large"
        settings = {"k": k, "m": m, "n": n, "separation": r, "noise": noise}
        label = f"K={k} m={m} n={n} R={r:g} s={noise:g}"
        cells.append(Cell(label, (Figure("success", said),), trial=regression_success, trials=40, settings=settings, x=x, series=series))

    for k, m in ((2, 100), (4, 400)):
        for noise in (0.0, 0.1, 0.2, 0.4):
            for r in (0.1, 0.25, 0.5, 0.75, 1.0):
                add(k, m, 100, r, noise, r, f"over R: K={k}, σ={noise:g}")
    for k, m, separations in ((2, 100, (0.1, 0.25)), (4, 400, (0.5, 0.75))):
        for r in separations:
            for size in (50, 200, 400):
                add(k, m, size, r, 0.1, size / 1000, f"over n/1000: K={k}, R={r:g}")
            for machines in (m // 2, 2 * m):
                add(k, machines, 100, r, 0.1, machines / 1000, f"over m/1000: K={k}, R={r:g}")
    return tuple(cells)


_ROTATED = {
    "data.source": "mnist", "data.rotations": [0, 90, 180, 270], "data.repeat_per_group": True, "data.test_samples_per_client": 50,
    "model.name": "mlp", "training.batch_size": 0, "training.lr": 0.1, "training.weights": "equal", "run.evaluate_every": 20,
}  # fmt: skip


def _ifca_rotated() -> tuple[Cell, ...]:
    cells = []
    published = {1200: (200, 95.25, 89.73, 80.05), 2400: (100, 95.05, 88.65, 73.66), 4800: (50, 94.20, 86.74, 63.32)}
    for m, (n, *figures) in published.items():
        rows: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("IFCA", "ifca", {"k": 4, "restarts": 3, "decide_after": 5}),
            ("global", "fedavg", {}),
            ("local", "local", {}),
        )
        for (name, algorithm, keys), figure in zip(rows, figures, strict=True):
            metrics: dict[str, float | str | None] = {"shared": figure}
            if name == "IFCA":
                metrics |= {"local": None, "ari": "1 after few rounds"}
            sizes = {"data.clients": m, "data.samples_per_client": n}
            cells.append(_run(f"{name} m={m}", algorithm, metrics, keys={**keys, **sizes}, x=float(n), series=name))
    return tuple(cells)


# --- StoCFL -------------------------------------------------------------------------------------------------------------------------

_STOCFL: dict[str, Any] = {
    "model.name": "mlp", "model.hidden": 2048, "training.rounds": 50, "training.epochs": 5, "training.batch_size": 0, "training.lr": 0.1,
    "training.participation": 0.1, "data.test_samples_per_client": 50, "run.evaluate_every": 10,
}  # fmt: skip
_PATHOLOGICAL = {
    "data.source": "mnist",
    "data.partition": "pathological",
    "data.groups": [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]],
    "data.clients": 400,
}
_FOUR: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "pathological": (_PATHOLOGICAL, {"data.samples_per_client": 150}, 4),
    "rotated": (
        {"data.source": "mnist", "data.rotations": [0, 90, 180, 270], "data.repeat_per_group": True, "data.clients": 400},
        {"data.samples_per_client": 600}, 4,
    ),
    "shifted": (
        {"data.source": "mnist", "data.label_shifts": [0, 3, 6, 9], "data.repeat_per_group": True, "data.clients": 400},
        {"data.samples_per_client": 600}, 4,
    ),
    "hybrid": (
        {"data.source": "mixture", "data.sources": [["mnist", 100], ["fashion_mnist", 100]], "data.shared_labels": True, "data.clients": 0},
        {"data.samples_per_client": 600}, 2,
    ),
}  # fmt: skip
_STOCFL_CHOSEN = (
    "the paper's: MLP with 2048 hidden units, full batch, 5 epochs, lr 0.1, tau 0.5, lambda 0.05, 10 % sampled unless a row says otherwise"
)
_STOCFL_SHRINKS = {"training.rounds": 5, "data.clients": 20, "data.sources": 10, "model.hidden": 32}


def _lambda_cells() -> tuple[Cell, ...]:
    table = {
        "pathological": (89.28, 86.89, 83.49, 37.83, 24.12, 24.05),
        "rotated": (62.06, 94.88, 95.28, 95.86, 94.20, 92.25),
        "shifted": (32.69, 92.36, 93.85, 95.12, 93.80, 92.22),
        "hybrid": (92.26, 92.75, 92.77, 92.69, 91.99, 90.11),
    }
    return tuple(
        _run(
            f"{setting} lambda={lam:g}", "stocfl", {"shared": figure}, keys={"tau": 0.5, "lam": lam, **_FOUR[setting][0]},
            thin=_FOUR[setting][1], x=lam, series=setting,
        )
        for setting, figures in table.items() for lam, figure in zip((10.0, 1.0, 0.5, 0.05, 0.01, 0.0), figures, strict=True)
    )  # fmt: skip


def _stocfl_rotated() -> tuple[Cell, ...]:
    cells = []
    for n_clients, samples, share, figures in (
        (1200, 200, 0.1, (96.71, 91.00, 79.38, 94.96)),
        (4800, 50, 0.1, (97.00, 91.74, 65.05, 95.72)),
        (4800, 50, 1.0, (97.36, 90.43, 73.60, 96.10)),
    ):
        sizes = {"data.clients": n_clients, "data.samples_per_client": samples, "training.participation": share}
        rows: tuple[tuple[str, str, dict[str, Any], float | None], ...] = (
            ("StoCFL", "stocfl", {"tau": 0.5, "lam": 0.05}, figures[0]),
            ("StoCFL, authors' variant", "stocfl", {"tau": 0.5, "lam": 0.05, "variant": "authors"}, figures[0]),
            ("IFCA k=4", "ifca", {"k": 4}, figures[1]),
            ("Ditto", "ditto", {"lam": 0.05}, figures[2]),
            ("FedAvg", "fedavg", {}, figures[3]),
            ("oracle", "oracle", {}, None),
        )
        for name, algorithm, keys, figure in rows:
            metrics: dict[str, float | str | None] = {"shared": figure}
            if algorithm in ("stocfl", "ifca"):
                metrics["ari"] = None
            cells.append(_run(f"{name}, {n_clients} at {100 * share:g} %", algorithm, metrics, keys={**keys, **sizes}))
    return tuple(cells)


# --- CFL, pFedLIA -------------------------------------------------------------------------------------------------------------------

_SWAP: dict[str, Any] = {
    "data.source": "mnist", "data.label_swaps": [[0, 1], [2, 3], [4, 5], [6, 7]], "data.clients": 20, "data.test_samples_per_client": 200,
    "model.name": "lenet5", "training.rounds": 50, "training.epochs": 3, "training.batch_size": 10, "training.lr": 0.1,
    "run.evaluate_every": 5,
}  # fmt: skip


def _tree(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def _swap_cells() -> tuple[Cell, ...]:
    cells = []
    for n in (10, 20, 50, 100, 200):
        expected = "below 0" if n < 20 else "above 0"
        figures = (Figure("gap", expected), Figure("gap_from_round", 10.0 if n == 100 else None))
        settings = _tree({**_SWAP, "data.samples_per_client": n})
        cells.append(Cell(f"gap, {n} points a client", figures, trial=label_swap_gap, settings=settings, x=float(n), series="gap"))
    own = {"eps1": 0.4, "eps2": 1.6, "relative": False, "data.samples_per_client": 100}
    cells.append(_run("CFL, 100 points a client", "cfl", {"ari": 1.0, "clusters": 4.0, "shared": None}, keys=own))
    cells.append(_run("FedAvg, 100 points a client", "fedavg", {"shared": None}, keys={"data.samples_per_client": 100}))
    return tuple(cells)


_LIA = {
    "data.partition": "pathological", "data.groups": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], "data.clients": 100,
    "data.test_samples_per_client": 100, "model.name": "lenet5", "training.rounds": 100, "training.epochs": 1, "training.batch_size": 10,
    "training.lr": 0.01, "training.participation": 0.1, "run.evaluate_every": 10,
}  # fmt: skip
_LIA_CHOSEN = (
    "the paper's: 100 clients, 10 % sampled, 20 rounds of warm-up, 3:1 training and validation data, 10 local epochs; which labels are "
    "paired, "
    "rounds (100), batch 10 and lr 0.01 are not published and set here; LeNet-5 from scratch stands for the pretrained ResNet-18"
)


def _lia_cells(published: Mapping[str, Mapping[str, float | None]], noise: float) -> tuple[Cell, ...]:
    rows: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("oracle", "oracle", {}),
        ("pFedLIA", "pfedlia", {"warm_up": 20, "local_epochs": 10}),
        ("local", "local", {}),
        ("FedAvg", "fedavg", {}),
        ("FedFomo", "fedfomo", {}),
        ("FedProto", "fedproto", {}),
        ("FeSEM", "fesem", {"k": 5}),
        ("CFL", "cfl", {}),
        ("random groups", "shuffled", {}),
    )
    cells = []
    for source, name in (("fashion_mnist", "FMNIST"), ("cifar10", "CIFAR-10")):
        for label, algorithm, keys in rows:
            metrics: dict[str, float | str | None] = {"shared": published[name].get(label), "local": None}
            if algorithm in ("pfedlia", "fesem", "cfl"):
                metrics["ari"] = None
            where = {"data.source": source, "data.noise": noise}
            size = {"data.samples_per_client": 500 if source == "fashion_mnist" else 150}
            cells.append(_run(f"{name}, {label}", algorithm, metrics, keys={**keys, **where}, thin=size))
    return tuple(cells)


_LIA_SHRINKS = {"training.rounds": 10, "data.clients": 20, "algorithm.warm_up": 4}

REPRODUCTIONS: dict[str, Reproduction] = {
    "pacfl-label-skew": Reproduction(
        "20 % label skew on Fashion-MNIST, both metrics", "PACFL, Table 1", _PACFL_CHOSEN, _label_skew(2, 3, _PAPER_SKEW, _AS_IS), _PACFL,
        _PACFL_SHRINKS,
    ),
    "pacfl-mix4": Reproduction(
        "MIX-4: four data sets on 97 clients", "PACFL, Table 2", _PACFL_CHOSEN + "; clusters: 4; LeNet-5 with 40 outputs",
        _label_skew(4, 3, _MIX4, _AS_IS, {}),
        {
            **{key: value for key, value in _PACFL.items() if key not in ("data.partition", "data.skew_percent")},
            "data.source": "mixture", "data.sources": [["cifar10", 31], ["svhn", 25], ["fashion_mnist", 27], ["usps", 14]],
            "data.clients": 0,
            "data.samples_per_client": 500, "data.test_samples_per_client": 100, "training.rounds": 50, "training.epochs": 5,
        },
        {"training.rounds": 4, "data.sources": 3}, {"svhn": "mnist"},
    ),
    "pacfl-newcomers": Reproduction(
        "20 newcomers after 50 rounds of the other 80", "PACFL, Table 3", _PACFL_CHOSEN + "; newcomers train 5 epochs",
        _label_skew(2, 3, _NEWCOMERS, {"shared": "newcomer", "local": "newcomer_tuned"}),
        {**_PACFL, "training.rounds": 50, "data.newcomers": 20, "data.newcomer_epochs": 5}, _PACFL_SHRINKS,
    ),
    "pacfl-rounds-to-target": Reproduction(
        "rounds to 75 % on Fashion-MNIST", "PACFL, Table 4", _PACFL_CHOSEN,
        _label_skew(2, 3, _TO_TARGET, {"shared": "rounds_shared", "local": "rounds_local"}),
        {**_PACFL, "run.target_accuracy": 0.75, "run.evaluate_every": 1}, _PACFL_SHRINKS,
    ),
    "pacfl-dirichlet": Reproduction(
        "Dirichlet(0.1) on Fashion-MNIST", "PACFL, Table 7", _PACFL_CHOSEN + "; p = 5", _label_skew(2, 5, _DIRICHLET, _AS_IS),
        {**{key: value for key, value in _PACFL.items() if key != "data.skew_percent"}, "data.partition": "dirichlet", "data.alpha": 0.1},
        _PACFL_SHRINKS,
    ),
    "pacfl-beta-sweep": Reproduction(
        "accuracy and number of clusters over the threshold", "PACFL, Fig. 2 (a picture; its ends are SOLO and FedAvg of Table 1)",
        _PACFL_CHOSEN + "; the thresholds are spread evenly over the angles that can occur",
        tuple(
            _run(
                f"beta={beta:g}", "pacfl",
                {"shared": 77.3 if beta == 90 else None, "local": 95.92 if beta == 0 else None, "clusters": 1.0 if beta == 90 else None},
                keys={"p": 3, "beta": beta}, thin=_THIN_SKEW, x=beta, series="PACFL",
            )
            for beta in (0.0, 5.0, 10.0, 15.0, 20.0, 30.0, 90.0)
        ),
        _PACFL, _PACFL_SHRINKS, over="x",
    ),
    "pacfl-gaussians": Reproduction(
        "two Gaussians by five measures", "PACFL, Table 5",
        "the paper prints neither μ nor Σ: Σ = I, μᵀΣ⁻¹μ = 19.3 as its Bhattacharyya distances imply; p = 3, 100 points, 20 dimensions "
        "as printed",
        _gaussian_cells(),
    ),
    "ifca-synthetic": Reproduction(
        "recovery of mixed linear regressions", "IFCA, Fig. 3",
        "the paper's: d = 1000, 300 rounds, 10 starts, 40 trials, its step sizes, θ* rescaled to norm R; its values of m and n could "
        "not be read "
        "and are halves, doubles and quadruples here", _regression_cells(), over="x",
    ),
    "ifca-rotated-mnist": Reproduction(
        "four rotations of MNIST", "IFCA, Table 1",
        "the paper's: MLP with 200 hidden units, 10 full-batch steps of 0.1 a round, everybody, 300 rounds; three random starts side by "
        "side, "
        "the one of lowest training loss after 5 rounds goes on", _ifca_rotated(),
        {**_ROTATED, "model.hidden": 200, "training.rounds": 300, "training.epochs": 10}, {"training.rounds": 10, "data.clients": 40},
        over="x",
    ),
    "ifca-rotated-cifar": Reproduction(
        "two rotations of CIFAR-10", "IFCA, Table 1",
        "the paper's: 200 clients of 500, 10 % sampled, 5 epochs, batch 50, lr 0.25 falling by 0.99 a round; without its flips and "
        "crops; rounds "
        "(200, StoCFL's) and network widths are not published",
        (
            _run(
                "IFCA", "ifca", {"shared": 81.51, "local": None, "ari": "1 after few rounds"},
                keys={"k": 2, "restarts": 3, "decide_after": 10},
            ),
            _run("global", "fedavg", {"shared": 77.87}),
            _run("local", "local", {"shared": 33.97}),
        ),
        {
            "data.source": "cifar10", "data.rotations": [0, 180], "data.repeat_per_group": True, "data.clients": 200,
            "data.test_samples_per_client": 100, "model.name": "cnn", "training.rounds": 200, "training.epochs": 5,
            "training.batch_size": 50,
            "training.lr": 0.25, "training.lr_decay": 0.99, "training.participation": 0.1, "training.weights": "equal",
            "training.on_divergence": "skip", "run.evaluate_every": 20,
        },
        {"training.rounds": 5, "data.clients": 20},
    ),
    "stocfl-clustering": Reproduction(
        "the number of clusters, found in four settings", "StoCFL, 4.1 and Fig. 3", _STOCFL_CHOSEN,
        tuple(
            _run(setting, "stocfl", {"clusters": float(k), "ari": 1.0, "shared": None}, keys={"tau": 0.5, "lam": 0.05, **keys}, thin=thin)
            for setting, (keys, thin, k) in _FOUR.items()
        ),
        _STOCFL, {**_STOCFL_SHRINKS, "training.rounds": 30},
    ),
    "stocfl-rotated-mnist": Reproduction(
        "four rotations of MNIST, many small clients", "StoCFL, Table 1", _STOCFL_CHOSEN + "; Ditto's weight is not published: 0.05 too",
        _stocfl_rotated(), {**_STOCFL, **_ROTATED, "training.rounds": 100}, _STOCFL_SHRINKS,
    ),
    "stocfl-shifted": Reproduction(
        "four shifts of MNIST's labels, 20 clients", "StoCFL, the table called Figure 6",
        "the paper's: 20 clients of 9600, everybody; rounds (50) and batch (100) are not published; CFL's thresholds are the relative "
        "defaults",
        (
            _run("StoCFL", "stocfl", {"shared": 98.14, "ari": None}, keys={"tau": 0.5, "lam": 0.05}),
            _run("CFL", "cfl", {"shared": 98.20, "ari": None}),
            _run("IFCA k=4", "ifca", {"shared": 98.11, "ari": None}, keys={"k": 4, "restarts": 3, "decide_after": 5}),
            _run("FedAvg", "fedavg", {"shared": 24.44}),
            _run("oracle", "oracle", {"shared": None}),
            _run("random groups", "shuffled", {"shared": None}),
        ),
        {
            **_STOCFL, "data.source": "mnist", "data.label_shifts": [0, 3, 6, 9], "data.repeat_per_group": True, "data.clients": 20,
            "data.samples_per_client": 9600, "data.test_samples_per_client": 200, "training.batch_size": 100, "training.participation": 1.0,
        },
        {"training.rounds": 5, "data.samples_per_client": 200, "model.hidden": 32},
    ),
    "stocfl-lambda": Reproduction(
        "accuracy of the cluster models over lambda", "StoCFL, Table 3", _STOCFL_CHOSEN, _lambda_cells(), _STOCFL, _STOCFL_SHRINKS,
        over="x",
    ),
    "stocfl-tau": Reproduction(
        "how finely tau divides two rotations of four sets of labels", "StoCFL, Fig. 8 and 4.3", _STOCFL_CHOSEN,
        tuple(
            _run(
                f"tau={tau:g}", "stocfl", {"clusters": 4.0 if tau < 0.67 else 8.0 if tau > 0.76 else None, "ari": None},
                keys={"tau": tau, "lam": 0.05}, x=tau, series="StoCFL",
            )
            for tau in (0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
        ),
        {**_STOCFL, **_PATHOLOGICAL, "data.rotations": [0, 180]}, {**_STOCFL_SHRINKS, "data.clients": 40}, over="x",
    ),
    "cfl-label-swap": Reproduction(
        "the separation gap of updates over points a client, and what CFL makes of it", "CFL, Figs. 5 and 6",
        "the paper's: 20 clients in 4 groups, 3 epochs, 50 rounds; lr 0.1 and batch 10 are not published for this; thresholds 0.4 and "
        "1.6 are "
        "those of the authors' code", _swap_cells(), _SWAP, {"training.rounds": 10}, over="x",
    ),
    "cfl-congruent": Reproduction(
        "the clients' norms tell congruent from incongruent", "CFL, Fig. 7",
        "the paper's: two clients, digits 0-4 and 5-9 or a label swap, 3 epochs, 1000 rounds; batch 100 as in its other experiments, lr "
        "0.1 not "
        "published; everybody's norms are read, nobody is split",
        (
            _run(
                "congruent", "cfl", {"max_norm": "goes to 0", "mean_norm": "goes to 0"},
                keys={"data.partition": "pathological", "data.groups": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]},
            ),
            _run(
                "incongruent", "cfl", {"max_norm": "stagnates, even grows", "mean_norm": "goes to 0"},
                keys={"data.label_swaps": [[0, 1], [2, 3]]}
            ),
        ),
        {
            **{key: value for key, value in _SWAP.items() if key != "data.label_swaps"}, "data.clients": 2, "training.rounds": 1000,
            "training.batch_size": 100, "algorithm.eps1": 1e-9, "algorithm.eps2": 1e9, "algorithm.relative": False, "algorithm.watch": True,
            "run.evaluate_every": 50,
        },
        {"training.rounds": 20}, over="rounds", along="max_norms",
    ),
    "cfl-permuted-labels": Reproduction(
        "four permutations of CIFAR-10's labels", "CFL, Fig. 8",
        "the paper's: 20 clients, 3 epochs, batch 100, 200 rounds with splits from round 50; lr 0.1 is not published; LeNet-5 for its "
        "network of "
        "five layers, whose widths are not published",
        (
            _run("CFL", "cfl", {"before_split": 20.0, "shared": 60.0, "ari": 1.0}, keys={"first_split": 50}),
            _run("FedAvg", "fedavg", {"shared": 20.0}),
            _run("oracle", "oracle", {"shared": None}),
        ),
        {
            "data.source": "cifar10", "data.label_permutations": 4, "data.clients": 20, "data.test_samples_per_client": 250,
            "model.name": "lenet5", "training.rounds": 200, "training.epochs": 3, "training.batch_size": 100, "training.lr": 0.1,
            "run.evaluate_every": 5,
        },
        {"training.rounds": 10, "algorithm.first_split": 3}, over="rounds", along="accuracy_mean",
    ),
    "cfl-agnews": Reproduction(
        "four topics of AG News, next word", "CFL, Fig. 9",
        "the paper's: 20 clients of one topic each, two-layer LSTM, 100 rounds with splits from round 30; vocabulary 2000, 64 units, 10 "
        "words, "
        "batch 20, lr 1.0 are not published, so perplexities do not compare, only their fall",
        (
            _run("CFL", "cfl", {"perplexity_before_split": 43.0, "perplexity": 36.0, "ari": 1.0}, keys={"first_split": 30}),
            _run("FedAvg", "fedavg", {"perplexity": 42.0}),
            _run("oracle", "oracle", {"perplexity": None}),
        ),
        {
            "data.source": "ag_news", "data.partition": "kinds", "data.clients": 20, "data.vocabulary": 2000, "data.sequence_length": 10,
            "data.samples_per_client": 2000, "data.test_samples_per_client": 500, "model.name": "lstm", "model.hidden": 64,
            "training.rounds": 100, "training.batch_size": 20, "training.lr": 1.0, "run.evaluate_every": 5,
        },
        {"training.rounds": 6, "data.samples_per_client": 100, "algorithm.first_split": 2}, over="rounds", along="perplexity_mean",
    ),
    "pfedlia-pathological": Reproduction(
        "five groups of two labels", "pFedLIA, Table I, left", _LIA_CHOSEN,
        _lia_cells(
            {
                "FMNIST": {
                    "oracle": 99.07, "local": 84.71, "FedAvg": 60.99, "FedFomo": 98.63, "FedProto": 93.93, "FeSEM": 97.97, "CFL": 61.00,
                    "pFedLIA": 99.07,
                },
                "CIFAR-10": {
                    "oracle": 86.08, "local": 72.83, "FedAvg": 24.43, "FedFomo": 80.98, "FedProto": 67.70, "FeSEM": 72.90, "CFL": 24.42,
                    "pFedLIA": 86.08,
                },
            },
            0.0,
        ),
        _LIA, _LIA_SHRINKS,
    ),
    "pfedlia-noisy": Reproduction(
        "five groups of two labels, half of the clients with a foreign one", "pFedLIA, Table I, right", _LIA_CHOSEN,
        _lia_cells(
            {
                "FMNIST": {
                    "local": 84.71, "FedAvg": 65.95, "FedFomo": 85.11, "FedProto": 87.39, "FeSEM": 81.75, "CFL": 67.10, "pFedLIA": 82.10,
                },
                "CIFAR-10": {
                    "local": 66.24, "FedAvg": 29.09, "FedFomo": 69.98, "FedProto": 65.45, "FeSEM": 68.86, "CFL": 29.52, "pFedLIA": 74.52,
                },
            },
            0.5,
        ),
        _LIA, _LIA_SHRINKS,
    ),
    "pfedlia-nordic": Reproduction(
        "three Nordic languages, next word",
        "pFedLIA, Fig. 1 (a picture: three clusters, a loss like central training's, FedAvg far above)",
        "an LSTM from scratch for GPT-2, Wikipedia for OSCAR; 30 clients, 10 rounds of warm-up and 5 local epochs (the paper: 5 to 20), "
        "lr 1.0, "
        "batch 20, 30 rounds set here",
        (
            _run(
                "pFedLIA, peer to peer", "pfedlia", {"ari": 1.0, "clusters": 3.0, "perplexity": "like central"},
                keys={"mode": "peer", "scores": "sign", "warm_up": 10, "local_epochs": 5},
            ),
            _run(
                "pFedLIA, central", "pfedlia", {"ari": 1.0, "clusters": 3.0, "perplexity": "like central"},
                keys={"warm_up": 10, "local_epochs": 5},
            ),
            _run("oracle", "oracle", {"perplexity": None}),
            _run("FedAvg", "fedavg", {"perplexity": "far above central"}),
            _run("random groups", "shuffled", {"perplexity": None}),
            _run("local", "local", {"perplexity": None}),
            _run(
                "one model on all data", "local", {"perplexity": None},
                keys={"data.partition": "iid", "data.clients": 1, "data.samples_per_client": 45000, "training.participation": 1.0},
                thin={"data.samples_per_client": 15000},
            ),
        ),
        {
            "data.source": "nordic_wiki", "data.languages": ["nb", "sv", "da"], "data.partition": "kinds", "data.clients": 30,
            "data.vocabulary": 2000, "data.samples_per_client": 1500, "data.test_samples_per_client": 300, "model.name": "lstm",
            "model.hidden": 64, "training.rounds": 30, "training.batch_size": 20, "training.lr": 1.0, "training.participation": 0.2,
            "run.evaluate_every": 5,
        },
        {"training.rounds": 4, "data.clients": 12, "algorithm.warm_up": 2}, over="rounds", along="perplexity_mean",
    ),
    "pfedlia-speedup": Reproduction(
        "time of exact over lazy influence", "pFedLIA, Fig. 3a (a picture; 40 to 500 times in the text)",
        "the paper's: 9900 samples, a batch of 100, 100 test samples, 10 local epochs; Fashion-MNIST, MLP with 200 hidden units, lr "
        "0.1, batch "
        "100 and the thresholds are not published",
        tuple(
            Cell(
                f"an epoch gains less than {100 * threshold:g} %",
                (Figure("speedup", "40 to 500"), Figure("exact_seconds"), Figure("lazy_seconds")),
                trial=influence_speed, trials=5, settings={"threshold": threshold},
            )
            for threshold in (0.1, 0.03, 0.01)
        ),
    ),
    "femnist": Reproduction(
        "FEMNIST's writers", "IFCA, Table 2, and StoCFL, Table 2",
        "LEAF's network; IFCA shares all layers but the last; StoCFL's best tau, 0.55; rounds (200), 5 % sampled, 5 epochs, batch 10 "
        "and lr 0.05 "
        "set here",
        (
            _run("IFCA k=2", "ifca", {"shared": 87.99}, keys={"k": 2, "shared": ["all_but_last"]}),
            _run("IFCA k=3", "ifca", {"shared": 87.89}, keys={"k": 3, "shared": ["all_but_last"]}),
            _run("one-shot k=2", "one_shot", {"shared": 87.41}, keys={"k": 2}),
            _run("one-shot k=3", "one_shot", {"shared": 87.38}, keys={"k": 3}),
            _run("global", "fedavg", {"shared": 84.45}),
            _run("local", "local", {"shared": 75.85}),
            _run("StoCFL", "stocfl", {"shared": 90.92, "clusters": 2.0}, keys={"tau": 0.55, "lam": 0.05}),
            _run("CFL (StoCFL's table)", "cfl", {"shared": 79.64}, keys={"training.participation": 1.0}),
            _run("IFCA k=2, nothing shared (StoCFL's table)", "ifca", {"shared": 73.11}, keys={"k": 2}),
        ),
        {
            "data.source": "femnist", "data.partition": "given", "data.clients": 0, "model.name": "femnist_cnn", "training.rounds": 200,
            "training.epochs": 5, "training.batch_size": 10, "training.lr": 0.05, "training.participation": 0.05,
            "training.weights": "equal",
            "run.evaluate_every": 20,
        },
        {"training.rounds": 5},
    ),
}  # fmt: skip
"""Name -> what is reproduced."""
