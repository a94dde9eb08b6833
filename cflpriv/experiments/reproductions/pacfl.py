"""PACFL (Vahidian et al. 2023): its tables of methods, the sweep over the threshold, angles of data sets and of Gaussians."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .entry import Published, Reproduction, ReproductionCell, RowFigure, both, run, shape
from .published import TABLES, numbers
from .trials import class_angles, data_set_angles, gaussians

__all__ = ["ENTRIES"]

_PACFL = {
    "data.source": "fashion_mnist", "data.partition": "label_skew", "data.skew_percent": 20.0, "data.clients": 100,
    "data.test_samples_per_client": 200, "model.name": "lenet5", "training.rounds": 200, "training.epochs": 10, "training.batch_size": 10,
    "training.lr": 0.01, "training.momentum": 0.5, "training.weights": "examples", "training.participation": 0.1, "run.evaluate_every": 10,
}  # fmt: skip
_PACFL_CHOSEN = (
    "the paper's (Tables 12 and 13): lr 0.01, momentum 0.5 (0.9 for FedAvg, FedProx, FedNova, SCAFFOLD); of the published grids the middle "
    "lr, 0.01, and the larger of two mu, 0.01, not by any result; for SCAFFOLD, of which the paper says that its rates were lower, the "
    "lowest, 0.001; CFL as its authors' code has it, whose lr falls by 0.99 a round; IFCA's clients choose on training data (the paper: by "
    "test accuracy); numbers of clusters as in Table 13 (2; the text says 4 for Fashion-MNIST); at most 200 test images a client; the "
    "paper calls every figure local test accuracy, and which model it is of we take from its size"
)
_EVEN = "; p = 5; of the authors' code: clients are tested on all of their labels alike, whatever they train on most"
_MEGABITS = (
    "; megabits are all numbers that travel, 32 bits each, divided by all clients, which is how the published ones divide (79.36 are 20 "
    "participations of a LeNet-5 for colour images); ours have a network for the images' own channels"
)
_30 = {"data.skew_percent": 30.0}
_DIRICHLET = {
    **{key: value for key, value in _PACFL.items() if key != "data.skew_percent"}, "data.partition": "dirichlet", "data.alpha": 0.1,
    "data.even_test": True,
}  # fmt: skip
_GLOBAL = {"training.momentum": 0.9}
_PACFL_SHRINKS = {"training.rounds": 4, "data.clients": 10, "data.newcomers": 2}
_THIN_SKEW = {"data.samples_per_client": 600}  # with fewer clients each would hold more
_CONTROL = "FedAvg in random groups of PACFL's sizes"


def _methods(
    k: int, p: int, tables: Sequence[str], metrics: Mapping[str, str], thin: Mapping[str, Any] = _THIN_SKEW,
    scored: Mapping[str, str] = {}, only: Sequence[str] = (),
) -> tuple[ReproductionCell, ...]:  # fmt: skip
    """PACFL's tables of methods: those of the first of `tables`, or `only` these; `metrics` and `scored` say what a figure is of."""
    rows: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("SOLO", "local", {}),
        ("FedAvg", "fedavg", _GLOBAL),
        ("FedProx", "fedprox", {"mu": 0.01, **_GLOBAL}),
        ("FedNova", "fednova", _GLOBAL),
        ("SCAFFOLD", "scaffold", {"training.lr": 0.001, **_GLOBAL}),
        ("LG-FedAvg", "lg_fedavg", {"global_layers": 2}),
        ("Per-FedAvg", "per_fedavg", {"alpha": 0.01, "beta": 0.001}),
        (f"IFCA (k={k})", "ifca", {"k": k}),
        ("CFL", "cfl", {"variant": "authors"}),
        ("PACFL", "pacfl", {"p": p, "k": k}),
    )
    cells = []
    for label, algorithm, keys in rows:
        method = label.split(" ")[0]
        if method not in (only or TABLES[tables[0]].rows):
            continue
        published = tuple(number for table in tables for number in numbers(table, method))
        own = {**_SCORED, **scored}[method]
        figures: dict[str, Published] = {
            metrics[model_kind]: published if model_kind == own else None for model_kind in ("shared", "local")
        }
        cells.append(run(label, algorithm, figures, keys=keys, thin=thin))
    if metrics["shared"] == "shared":
        cells.append(both(_CONTROL, "shuffled", {}, groups_of="PACFL", thin=thin))
    return tuple(cells)


_AS_IS = {"shared": "shared", "local": "local"}
_TO_TARGET = {"shared": "rounds_shared", "local": "rounds_local"}
_COST = {"shared": "megabits_shared", "local": "megabits_local"}
_SCORED = {
    "SOLO": "local", "FedAvg": "shared", "FedProx": "shared", "FedNova": "shared", "SCAFFOLD": "shared", "LG-FedAvg": "local",
    "Per-FedAvg": "shared", "IFCA": "local", "CFL": "shared", "PACFL": "local",
}  # fmt: skip
"""Which model a method's published figure is of, in our reading."""
_RESNET = {"cifar100": {"model.name": "resnet9"}}


def _targets(**targets: float) -> dict[str, dict[str, Any]]:
    """The target accuracy of each data set but Fashion-MNIST."""
    return {name: {**_RESNET.get(name, {}), "run.target_accuracy": target} for name, target in targets.items()}


def _gaussian_cells() -> tuple[ReproductionCell, ...]:
    names = ("smallest_angle", "corresponding_angles", "bhattacharyya", "kl", "mmd")
    return tuple(
        ReproductionCell(
            label, tuple(RowFigure(name, numbers("PACFL, Table 5", name, label)) for name in names), trial=gaussians, trials=100,
            settings={"mean": mean, "spread": spread},
        )
        for label, mean, spread in (
            ("mean times 2", 2.0, 1.0), ("mean times 3", 3.0, 1.0), ("covariance times 2", 1.0, 2.0), ("covariance times 5", 1.0, 5.0)
        )
    )  # fmt: skip


_NAMES = {"CIFAR-10": "cifar10", "SVHN": "svhn", "FMNIST": "fashion_mnist", "USPS": "usps", "MNIST": "mnist"}


def _mixture(*names: str, samples: int) -> dict[str, Any]:
    """One client for each of the data sets, in one frame: colour, black around smaller images, as the paper does for MIX-4."""
    sources = [[_NAMES[name], 1] for name in names]
    return {"source": "mixture", "sources": sources, "samples_per_client": samples, "test_samples_per_client": 10}


def _data_set_cells() -> tuple[ReproductionCell, ...]:
    table = "PACFL, table beside Fig. 1"
    measures = ("smallest_angle", "corresponding_angles")
    return tuple(
        ReproductionCell(
            pair, tuple(RowFigure(name, numbers(table, name, pair)) for name in measures), trial=data_set_angles, trials=5,
            settings={"data": _mixture(*pair.split(" and "), samples=2000), "p": 2},
            thin={"data.samples_per_client": 500},
        )
        for pair in TABLES[table].columns
    )  # fmt: skip


def _class_cells() -> tuple[ReproductionCell, ...]:
    animals, vehicles = [2, 3, 4, 5, 6, 7], [0, 1, 8, 9]
    four = ("CIFAR-10", "SVHN", "FMNIST", "USPS")
    rows: tuple[tuple[str, tuple[str, ...], Sequence[Sequence[int]], str], ...] = (
        ("CIFAR-10", ("CIFAR-10",), (vehicles, animals), "animals and vehicles apart, in the picture"),
        ("MIX-4, MNIST for SVHN", tuple("MNIST" if name == "SVHN" else name for name in four), _TENS, ""),
        ("MIX-4", four, _TENS, "four data sets apart, in the picture"),
    )
    return tuple(
        ReproductionCell(
            label,
            (RowFigure("angle_within"), RowFigure("angle_between"), RowFigure("ari", shape(words) if words else ())),
            trial=class_angles, trials=5,
            settings={"data": _mixture(*names, samples=5000), "p": 3, "groups": [list(group) for group in groups]},
            thin={"data.samples_per_client": 1000},
        )
        for label, names, groups, words in rows
    )  # fmt: skip


_TENS = [range(10 * i, 10 * i + 10) for i in range(4)]
"""The labels of the four data sets of MIX-4."""


def _beta_cells(betas: Sequence[float], table: str, **keys: Any) -> tuple[ReproductionCell, ...]:
    """The sweep over the threshold, whose ends are FedAvg and SOLO of `table`."""
    return tuple(
        run(
            f"beta={beta:g}", "pacfl",
            {
                "shared": numbers(table, "FedAvg") if beta == betas[-1] else None,
                "local": numbers(table, "SOLO") if beta == 0 else None,
                "clusters": "1" if beta == betas[-1] else None,
            },
            keys={"p": 3, "beta": beta, **keys}, thin=_THIN_SKEW, places=(("beta, degrees", "PACFL", beta),),
        )
        for beta in betas
    )  # fmt: skip


ENTRIES: dict[str, Reproduction] = {
    "pacfl-label-skew": Reproduction(
        "20 % label skew, both metrics", "PACFL, Table 1", _PACFL_CHOSEN, _methods(2, 3, ("PACFL, Table 1", "PACFL, Table 6"), _AS_IS),
        _PACFL, _PACFL_SHRINKS, _RESNET,
    ),
    "pacfl-label-skew-30": Reproduction(
        "30 % label skew, both metrics", "PACFL, Table 6", _PACFL_CHOSEN, _methods(2, 3, ("PACFL, Table 6", "PACFL, Table 1"), _AS_IS),
        {**_PACFL, **_30}, _PACFL_SHRINKS, _RESNET,
    ),
    "pacfl-mix4": Reproduction(
        "MIX-4: four data sets on 97 clients", "PACFL, Table 2, and the text before it (IFCA with four clusters)",
        _PACFL_CHOSEN + "; clusters: 4; LeNet-5 with 40 outputs",
        (
            *_methods(4, 3, ("PACFL, Table 2",), _AS_IS, {}),
            both("IFCA (k=4)", "ifca", {"local": numbers("PACFL, text", "IFCA (4)")}, keys={"k": 4}),
            both("IFCA (k=2)", "ifca", {"local": numbers("PACFL, Table 2", "IFCA (2)")}, keys={"k": 2}),
        ),
        {
            **{key: value for key, value in _PACFL.items() if key not in ("data.partition", "data.skew_percent")},
            "data.source": "mixture", "data.sources": [["cifar10", 31], ["svhn", 25], ["fashion_mnist", 27], ["usps", 14]],
            "data.clients": 0, "data.samples_per_client": 500, "data.test_samples_per_client": 100,
            "training.rounds": 50, "training.epochs": 5,
        },
        {"training.rounds": 4, "data.sources": 3}, instead={"svhn": "mnist"},
    ),
    "pacfl-newcomers": Reproduction(
        "20 newcomers after 50 rounds of the other 80", "PACFL, Table 3",
        _PACFL_CHOSEN + "; newcomers train 5 epochs, after which the paper says it scores: the figures of methods with one model are below "
        "what two labels give after any training, so they are taken as before it",
        _methods(2, 3, ("PACFL, Table 3",), {"shared": "newcomer", "local": "newcomer_tuned"}, scored={"Per-FedAvg": "local"}),
        {**_PACFL, "training.rounds": 50, "data.newcomers": 20, "data.newcomer_epochs": 5}, _PACFL_SHRINKS, _RESNET,
    ),
    "pacfl-rounds-to-target": Reproduction(
        "rounds to a target accuracy, on Fashion-MNIST 75 %", "PACFL, Table 4", _PACFL_CHOSEN,
        _methods(2, 3, ("PACFL, Table 4",), _TO_TARGET),
        {**_PACFL, "run.target_accuracy": 0.75, "run.evaluate_every": 1}, _PACFL_SHRINKS, _targets(cifar10=0.8, cifar100=0.5, svhn=0.75),
    ),
    "pacfl-megabits-to-target": Reproduction(
        "megabits a client to a target accuracy under 30 % label skew, on Fashion-MNIST 80 %", "PACFL, Table 8", _PACFL_CHOSEN + _MEGABITS,
        _methods(2, 3, ("PACFL, Table 8",), _COST), {**_PACFL, **_30, "run.target_accuracy": 0.8, "run.evaluate_every": 1},
        _PACFL_SHRINKS, _targets(cifar10=0.7, cifar100=0.5, svhn=0.8),
    ),
    "pacfl-limited-rounds": Reproduction(
        "accuracy over 80 rounds, the personalised methods", "PACFL, Figs. 4 (20 %) and 5 (with data.skew_percent=30), pictures",
        _PACFL_CHOSEN,
        tuple(
            replace(
                cell,
                figures=tuple(
                    RowFigure(row.metric, shape("converged after 30 rounds") if (cell.label, row.metric) == ("PACFL", "local") else ())
                    for row in cell.figures
                ),
            )
            for cell in _methods(2, 3, ("PACFL, Table 1",), _AS_IS, only=("LG-FedAvg", "Per-FedAvg", "IFCA", "CFL", "PACFL"))
            if cell.label != _CONTROL
        ),
        {**_PACFL, "training.rounds": 80, "run.evaluate_every": 2}, _PACFL_SHRINKS, _RESNET, over="rounds", along="local_accuracy_mean",
    ),
    "pacfl-dirichlet": Reproduction(
        "Dirichlet(0.1)", "PACFL, Table 7", _PACFL_CHOSEN + _EVEN, _methods(2, 5, ("PACFL, Table 7",), _AS_IS), _DIRICHLET, _PACFL_SHRINKS,
        _RESNET,
    ),
    "pacfl-dirichlet-megabits": Reproduction(
        "megabits a client to a target accuracy under Dirichlet(0.1), on Fashion-MNIST 75 %", "PACFL, Table 9",
        _PACFL_CHOSEN + _EVEN + _MEGABITS, _methods(2, 5, ("PACFL, Table 9",), _COST),
        {**_DIRICHLET, "run.target_accuracy": 0.75, "run.evaluate_every": 1}, _PACFL_SHRINKS, _targets(cifar10=0.45, cifar100=0.4),
    ),
    "pacfl-beta-sweep": Reproduction(
        "accuracy and number of clusters over the threshold", "PACFL, Fig. 2 (a picture; its ends are SOLO and FedAvg of Table 1)",
        _PACFL_CHOSEN + "; the thresholds, 0 to 90 degrees, are set here",
        _beta_cells((0.0, 5.0, 10.0, 15.0, 20.0, 30.0, 90.0), "PACFL, Table 1"), _PACFL, _PACFL_SHRINKS, _RESNET, over="numbers",
    ),
    "pacfl-beta-sweep-30": Reproduction(
        "the same by sums of angles (eq. 3) under 30 % label skew", "PACFL, Fig. 6 (a picture; its ends are SOLO and FedAvg of Table 6)",
        _PACFL_CHOSEN + "; the thresholds, 0 to 270 degrees, are set here",
        _beta_cells((0.0, 30.0, 60.0, 90.0, 120.0, 150.0, 270.0), "PACFL, Table 6", measure="corresponding_angles"), {**_PACFL, **_30},
        _PACFL_SHRINKS, _RESNET, over="numbers",
    ),
    "pacfl-data-sets": Reproduction(
        "angles between pairs of data sets", "PACFL, the table beside Fig. 1",
        "the paper's: p = 2, smaller images with black around them and in three equal channels (its appendix on MIX-4); which images, and "
        "how many, is not published: 2000 of the training set, drawn at random, 5 times",
        _data_set_cells(),
    ),
    "pacfl-classes": Reproduction(
        "angles between classes: do they show two kinds of objects, and four data sets", "PACFL, Fig. 3b and 3d (pictures)",
        "eq. 2 between all pairs of classes, as in Fig. 3b; that the 40 classes of MIX-4 are compared so in Fig. 3d, too, we take from its "
        "caption; p = 3 of the paper's 3 to 5; samples are not published: 5000 training images of a data set, drawn at random, 5 times; "
        "that a tree is cut, by average linkage at the true number of groups, is set here; Figs. 3a and 3c show the data by UMAP, not by "
        "the method, and are not made",
        _class_cells(),
    ),
    "pacfl-celeba": Reproduction(
        "whether clusters of clients with faces share an attribute", "PACFL, Fig. 7 (a picture of faces)",
        "data: your celeba.npz (x_train, y_train, x_test, y_test) of CelebA's images with exactly one of the paper's three attributes: "
        "smiling (label 0), wavy hair (1), wearing hat (2); it publishes neither size nor number of images, nor clients, shards, p and "
        "threshold: 99 clients, p = 3, three clusters as in the picture, each client has images of one attribute; clusters are found "
        "before the first round, so only one is run",
        (run("PACFL", "pacfl", {"ari": "each cluster has one attribute, in the picture", "clusters": "3"}, keys={"p": 3, "k": 3}),),
        {
            **{key: value for key, value in _PACFL.items() if key != "data.skew_percent"}, "data.source": "npz",
            "data.paths": ["celeba.npz"], "data.partition": "pathological", "data.groups": [[0], [1], [2]], "data.clients": 99,
            "training.rounds": 1,
        },
        {"data.clients": 9},
    ),
    "pacfl-gaussians": Reproduction(
        "two Gaussians by five measures", "PACFL, Table 5",
        "the paper prints neither μ nor Σ: Σ = I, μᵀΣ⁻¹μ = 19.3 as its Bhattacharyya distances imply; p = 3, 100 points, 20 dimensions as "
        "printed",
        _gaussian_cells(),
    ),
}  # fmt: skip
"""Name -> what is reproduced."""
