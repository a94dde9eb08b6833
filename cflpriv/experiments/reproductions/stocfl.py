"""StoCFL (Zeng et al. 2023): cosines of representations, the clusters it finds, its tables on rotated and shifted MNIST, lambda and tau."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...algorithms.cfl.cfl import EPS2
from .entry import Published, Reproduction, ReproductionCell, RowFigure, run, shape
from .ifca import FEMNIST, ROTATED
from .published import Number, numbers
from .trials import anchor_cosines

__all__ = ["ENTRIES"]

_STOCFL: dict[str, Any] = {
    "model.name": "mlp", "model.hidden": 2048, "model.normalise": False, "training.rounds": 50, "training.epochs": 5,
    "training.batch_size": 0, "training.lr": 0.1, "training.participation": 0.1, "data.test_samples_per_client": 50,
    "run.evaluate_every": 10,
}  # fmt: skip
_PATHOLOGICAL = {
    "data.source": "mnist", "data.partition": "pathological", "data.groups": [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]], "data.clients": 400,
}  # fmt: skip
_FOUR: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "pathological": (_PATHOLOGICAL, {"data.samples_per_client": 150}, "four"),
    "rotated": (
        {"data.source": "mnist", "data.rotations": [0, 90, 180, 270], "data.repeat_per_group": True, "data.clients": 400},
        {"data.samples_per_client": 600}, "four",
    ),
    "shifted": (
        {"data.source": "mnist", "data.label_shifts": [0, 3, 6, 9], "data.repeat_per_group": True, "data.clients": 400},
        {"data.samples_per_client": 600}, "four",
    ),
    "hybrid": (
        {"data.source": "mixture", "data.sources": [["mnist", 100], ["fashion_mnist", 100]], "data.shared_labels": True, "data.clients": 0},
        {"data.samples_per_client": 600}, "two",
    ),
}  # fmt: skip
_STOCFL_CHOSEN = (
    "the paper's, printed for rotated MNIST and taken for its other tasks: MLP with 2048 hidden units, full batch, 5 epochs, lr 0.1, tau "
    "0.5, lambda 0.05, 10 % sampled unless a row states otherwise; of the authors' code: pixels in [0, 1] as they are"
)
_ALL_LABELS = (
    "; the published pathological row seems to be of all ten labels (its 24.05 at lambda 0 is what models of two or three labels get "
    "there), ours of the client's own, so the two do not compare; its column MNIST Global is of StoCFL's global model, which the paper "
    "trains as FedAvg does, so FedAvg runs for it"
)
_STOCFL_SHRINKS = {"training.rounds": 5, "data.clients": 20, "data.sources": 10, "model.hidden": 32}


def _of_labels(setting: str, published: tuple[Number, ...]) -> tuple[Number, ...]:
    """The numbers of a setting of Table 3; the pathological row's as words, since it does not compare."""
    return tuple(replace(number, value=f"{number.value} on all labels") for number in published) if setting == "pathological" else published


def _lambda_cells() -> tuple[ReproductionCell, ...]:
    cells = tuple(
        run(
            f"{setting} lambda={lam:g}", "stocfl",
            {"shared": _of_labels(setting, numbers("StoCFL, Table 3", setting.capitalize(), "lambda"))},
            keys={"tau": 0.5, "lam": lam, **_FOUR[setting][0]}, thin=_FOUR[setting][1], places=(("lambda", setting, lam),),
        )
        for setting in _FOUR for lam in (10.0, 1.0, 0.5, 0.05, 0.01, 0.0)
    )  # fmt: skip
    return cells + tuple(
        run(
            f"{setting}, FedAvg", "fedavg",
            {"shared": _of_labels(setting, numbers("StoCFL, Table 3", setting.capitalize(), "MNIST Global"))},
            keys=_FOUR[setting][0], thin=_FOUR[setting][1],
        )
        for setting in _FOUR
    )  # fmt: skip


def _cosine_cells() -> tuple[ReproductionCell, ...]:
    """Fig. 2, panels a to d: ten clients on a circle of steps; five of each data set in panel d, apart 0 or 1."""
    size: dict[str, Any] = {"samples_per_client": 1000, "test_samples_per_client": 10}
    ten: dict[str, Any] = {"source": "mnist", "clients": 10, **size}
    consecutive = [[(first + i) % 10 for i in range(5)] for first in range(10)]
    two = {"source": "mixture", "sources": [["mnist", 5], ["fashion_mnist", 5]], "shared_labels": True, **size}
    panels: tuple[tuple[str, str, dict[str, Any], Sequence[int]], ...] = (
        ("labels", "labels that are not shared, of five", {"data": {**ten, "partition": "pathological", "groups": consecutive}}, _STEPS),
        ("rotated", "rotations apart, 36 degrees each", {"data": ten, "turn": 36}, _STEPS),
        ("shifted", "label shifts apart", {"data": {**ten, "label_shifts": list(range(10))}}, _STEPS),
        ("hybrid", "data sets apart", {"data": two}, (0, 1)),
    )
    return tuple(
        ReproductionCell(
            f"{panel}, {apart} apart", (RowFigure("cosine", shape("higher for more similar data, in the picture")),), trial=anchor_cosines,
            trials=3, settings={**settings, "apart": apart}, places=((axis, panel, apart),),
        )
        for panel, axis, settings, steps in panels for apart in steps
    )  # fmt: skip


_STEPS = (1, 2, 3, 4, 5)
_ROWS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("StoCFL", "stocfl", {"tau": 0.5, "lam": 0.05}, "StoCFL"),
    ("StoCFL, authors' variant", "stocfl", {"tau": 0.5, "lam": 0.05, "variant": "authors"}, "StoCFL"),
    ("IFCA k=2", "ifca", {"k": 2}, "IFCA k=2"),
    ("IFCA k=4", "ifca", {"k": 4}, "IFCA k=4"),
    ("IFCA k=6", "ifca", {"k": 6}, "IFCA k=6"),
    ("Ditto", "ditto", {"lam": 0.05}, "Ditto"),
    ("FedAvg", "fedavg", {}, "FedAvg"),
    ("FedProx", "fedprox", {"mu": 0.05}, "FedProx"),
    ("oracle", "oracle", {}, ""),
)  # fmt: skip
"""The methods of Table 1: label, algorithm, its keys, the row's heading."""


def _table_1(column: str, sizes: Mapping[str, Any], suffix: str) -> list[ReproductionCell]:
    cells = []
    for name, algorithm, keys, row in _ROWS:
        metrics: dict[str, Published] = {"shared": numbers("StoCFL, Table 1", row, column) if row else None}
        if algorithm in ("stocfl", "ifca"):
            metrics["ari"] = None
        cells.append(run(name + suffix, algorithm, metrics, keys={**keys, **sizes}))
    return cells


_CIFAR = {
    "data.source": "cifar10", "data.rotations": [0, 180], "data.repeat_per_group": True, "data.clients": 200,
    "data.test_samples_per_client": 50, "model.name": "cnn", "training.rounds": 200, "training.epochs": 5, "training.batch_size": 50,
    "training.lr": 0.1, "training.participation": 0.1, "training.weights": "equal", "training.on_divergence": "skip",
    "run.evaluate_every": 20,
}  # fmt: skip
_CIFAR_CHOSEN = (
    "the paper's: 200 clients of 500, 200 rounds, 5 epochs, batch 50, lr 0.1, tau 0.5, lambda 0.05, two convolutional and two linear "
    "layers, whose widths are not published (200 units); Ditto's and FedProx's weights are not published: 0.05 too"
)


def _sampling_cells() -> tuple[ReproductionCell, ...]:
    """Fig. 4: the methods of Table 1 over the share of clients in a round; at 10 and 100 % Table 1 has the figures."""
    return tuple(
        run(
            f"{name}, {100 * share:g} %", algorithm,
            {"shared": numbers("StoCFL, Table 1", row, f"CIFAR at {100 * share:g} %") if share in (0.1, 1.0) else None},
            keys={**keys, "training.participation": share}, places=(("share of clients in a round", name, share),),
        )
        for name, algorithm, keys, row in _ROWS if row and name not in ("StoCFL, authors' variant", "IFCA k=4", "IFCA k=6")
        for share in (0.1, 0.2, 0.5, 1.0)
    )  # fmt: skip


def _stocfl_rotated() -> tuple[ReproductionCell, ...]:
    return tuple(
        cell
        for n, samples in ((1200, 200), (2400, 100), (4800, 50)) for share in (0.1, 1.0)
        for cell in _table_1(
            "N=", {"data.clients": n, "data.samples_per_client": samples, "training.participation": share}, f", {n} at {100 * share:g} %"
        )
    )  # fmt: skip


def _shifted_cells(column: str) -> tuple[ReproductionCell, ...]:
    def of(row: str) -> dict[str, Published]:
        return {"shared": numbers("StoCFL, Figure 6", row, column)}

    return (
        run("StoCFL", "stocfl", {**of("StoCFL"), "ari": None}, keys={"tau": 0.5, "lam": 0.05}),
        run("CFL", "cfl", {**of("CFL"), "ari": None}, keys={"eps2": EPS2}),
        run("IFCA k=4", "ifca", {**of("IFCA"), "ari": None}, keys={"k": 4, "restarts": 3, "decide_after": 5}),
        run("FedAvg", "fedavg", of("FedAvg")),
        run("oracle", "oracle", {"shared": None}),
        run("random groups", "shuffled", {"shared": None}),
    )


_SHIFTED = {
    **_STOCFL, "data.source": "mnist", "data.label_shifts": [0, 3, 6, 9], "data.repeat_per_group": True, "data.clients": 20,
    "data.samples_per_client": 9600, "data.test_samples_per_client": 200, "training.batch_size": 100, "training.participation": 1.0,
    "training.weights": "examples",
}  # fmt: skip
_SHIFTED_CHOSEN = "CFL's are eps1 0.2, eps2 0.75; of three starts of IFCA the one of lowest training loss after 5 rounds goes on (set here)"
_SHIFTED_SHRINKS = {"training.rounds": 5, "data.samples_per_client": 200, "model.hidden": 32}


def _granularity(tau: float) -> Published:
    """How many clusters the paper has at a threshold; it says nothing of the thresholds between."""
    row = "clusters, tau below .67" if tau < 0.67 else "clusters, tau above .76" if tau > 0.76 else ""
    return numbers("StoCFL, text", row) if row else None


def _unseen_cells() -> tuple[ReproductionCell, ...]:
    rows: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("FedAvg", "fedavg", {}), ("CFL", "cfl", {"training.participation": 1.0, "eps2": EPS2}), ("IFCA", "ifca", {"k": 2}),
        ("StoCFL", "stocfl", {"tau": 0.55, "lam": 0.05}),
    )  # fmt: skip
    return tuple(
        run(
            name, algorithm,
            {
                "shared": numbers("StoCFL, Table 4", name, "Test Accuracy"),
                "newcomer": numbers("StoCFL, Table 4", name, "Unparticipation"),
            },
            keys=keys,
        )
        for name, algorithm, keys in rows
    )  # fmt: skip


ENTRIES: dict[str, Reproduction] = {
    "stocfl-cosines": Reproduction(
        "cosines of the anchor's gradients over how different two clients' data are", "StoCFL, Fig. 2 (a picture)",
        "the paper's: a random linear model, rotations by 36 degrees, label shifts, MNIST and Fashion-MNIST; samples are not published "
        "(1000 a client), nor which labels clients share in its panel a (here client s has five labels from s on, on a circle); pixels in "
        "[0, 1] as they are, as the authors' code has them for other tasks",
        _cosine_cells(), over="numbers",
    ),
    "stocfl-clustering": Reproduction(
        "the number of clusters, found in four settings", "StoCFL, 4.1 and Fig. 3", _STOCFL_CHOSEN,
        tuple(
            run(
                setting, "stocfl", {"clusters": numbers("StoCFL, text", f"clusters, {k} groups"), "ari": None, "shared": None},
                keys={"tau": 0.5, "lam": 0.05, **keys}, thin=thin,
            )
            for setting, (keys, thin, k) in _FOUR.items()
        ),
        _STOCFL, {**_STOCFL_SHRINKS, "training.rounds": 30},
    ),
    "stocfl-rotated-mnist": Reproduction(
        "four rotations of MNIST, many small clients", "StoCFL, Table 1",
        _STOCFL_CHOSEN + "; Ditto's and FedProx's weights are not published: 0.05 too", _stocfl_rotated(),
        {**_STOCFL, **ROTATED, "training.rounds": 100}, _STOCFL_SHRINKS,
    ),
    "stocfl-rotated-cifar": Reproduction(
        "two rotations of CIFAR-10", "StoCFL, Table 1",
        _CIFAR_CHOSEN,
        tuple(cell for share in (0.1, 1.0) for cell in _table_1("CIFAR", {"training.participation": share}, f", {100 * share:g} %")),
        _CIFAR,
        {"training.rounds": 5, "data.clients": 20},
    ),
    "stocfl-sampling": Reproduction(
        "accuracy over the share of clients in a round", "StoCFL, Fig. 4 (a picture; 10 and 100 % are in Table 1)",
        _CIFAR_CHOSEN + "; which shares and methods the picture has could not be read: those of Table 1, 20 and 50 % are set here; its "
        "text calls it Figure 5, and says that it is of rotated CIFAR-10",
        _sampling_cells(), _CIFAR, {"training.rounds": 5, "data.clients": 20}, over="numbers",
    ),
    "stocfl-shifted": Reproduction(
        "four shifts of MNIST's labels, 20 clients", "StoCFL, the table called Figure 6",
        "the paper's: 20 clients of 9600, everybody; tau 0.5, lambda 0.05, the network, pixels, 5 epochs and lr 0.1 of its other tasks on "
        "MNIST; rounds (50) and batch (100) are not published; " + _SHIFTED_CHOSEN,
        _shifted_cells("Shifted MNIST"), _SHIFTED, _SHIFTED_SHRINKS,
    ),
    "stocfl-shifted-cifar": Reproduction(
        "four shifts of CIFAR-10's labels, 20 clients", "StoCFL, the table called Figure 6",
        "the paper's: 20 clients of 8000, everybody; tau 0.5, lambda 0.05, network, 5 epochs, batch 50 and lr 0.1 of its rotated CIFAR; "
        "rounds (50) and widths are not published; " + _SHIFTED_CHOSEN,
        _shifted_cells("Shifted CIFAR"),
        {
            **_SHIFTED, "data.source": "cifar10", "data.samples_per_client": 8000, "model.name": "cnn", "model.hidden": 200,
            "model.normalise": True, "training.batch_size": 50,
        },
        _SHIFTED_SHRINKS,
    ),
    "stocfl-evolution": Reproduction(
        "accuracy over rounds of CFL and StoCFL", "StoCFL, Fig. 5 (a picture)",
        "as in stocfl-shifted; the paper states no numbers: StoCFL's curve is the higher one in most rounds",
        (
            run("StoCFL", "stocfl", {"shared": "above CFL in most rounds"}, keys={"tau": 0.5, "lam": 0.05}),
            run("CFL", "cfl", {"shared": None}, keys={"eps2": EPS2}),
        ),
        {**_SHIFTED, "run.evaluate_every": 1}, _SHIFTED_SHRINKS, over="rounds", along="accuracy_mean",
    ),
    "stocfl-unseen": Reproduction(
        "FEMNIST's writers, 1079 of 3597 unseen in training", "StoCFL, Table 4",
        "as femnist: 100 rounds, 5 % sampled, tau 0.55; neither epochs (5), batch (10) and lr (0.05) are published, nor IFCA's k (2)",
        _unseen_cells(), {**FEMNIST, "data.newcomers": 1079}, {"training.rounds": 5, "data.newcomers": 1},
    ),
    "stocfl-lambda": Reproduction(
        "accuracy of the cluster models over lambda", "StoCFL, Table 3", _STOCFL_CHOSEN + _ALL_LABELS, _lambda_cells(), _STOCFL,
        _STOCFL_SHRINKS, over="numbers",
    ),
    "stocfl-tau": Reproduction(
        "how finely tau divides two rotations of four sets of labels", "StoCFL, Fig. 8 and 4.3",
        _STOCFL_CHOSEN + "; 400 clients as published, but every image in one of the two rotations (150 a client; the paper has all images "
        "in both, 300)",
        tuple(
            run(
                f"tau={tau:g}", "stocfl", {"clusters": _granularity(tau), "ari": None},
                keys={"tau": tau, "lam": 0.05}, thin={"data.samples_per_client": 150}, places=(("tau", "StoCFL", tau),),
            )
            for tau in (0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
        ),
        {**_STOCFL, **_PATHOLOGICAL, "data.rotations": [0, 180]}, {**_STOCFL_SHRINKS, "data.clients": 40}, over="numbers",
    ),
}  # fmt: skip
"""Name -> what is reproduced."""
