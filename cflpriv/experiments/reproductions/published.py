"""The numbers that the five papers publish: one table of all of them, by paper, table, row and column.

A number is of exactly the settings of its column. `numbers` gives what an entry's cell may be compared with;
`exact_settings.published_of` selects the figure whose settings equal those of a run. Without such a figure it selects none. Read from the
papers' texts; what could not be read there is None here. Pictures without printed numbers are not in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TABLES", "Number", "Table", "numbers"]

Value = float | tuple[float, float] | str | None
"""A number; a number and its deviation; words ("never" for the papers' "--"); None for what cannot be read."""


@dataclass(frozen=True)
class Number:
    """One published figure: a number or words, the deviation behind its ±, the dotted keys that differ from the entry and its cell, and its
    place in the paper."""

    value: float | str
    deviation: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True)
class Table:
    """A published table. `columns` maps a heading to the keys that it stands for; a row has one value a column; `section` is where the
    table stands in the paper."""

    section: str
    columns: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, Sequence[Value]]


def numbers(table: str, row: str, column: str = "") -> tuple[Number, ...]:
    """The published numbers of a row, one for each column that could be read and whose heading begins with `column`.

    Raises `KeyError` for a table or a row that is not there.
    """
    there = TABLES[table]
    published = []
    for (heading, settings), value in zip(there.columns.items(), there.rows[row], strict=True):
        if value is not None and heading.startswith(column):
            number, deviation = value if isinstance(value, tuple) else (value, None)
            published.append(Number(number, deviation, settings, f"{table}, row {row}" + (f", column {heading}" if heading else "")))
    return tuple(published)


def _data(**more: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """PACFL's columns, with the keys that each has besides; CIFAR-100 is trained with a ResNet-9 (its Tables 12 and 13)."""
    own: dict[str, dict[str, Any]] = {
        "FMNIST": {"data.source": "fashion_mnist"}, "CIFAR-10": {"data.source": "cifar10"},
        "CIFAR-100": {"data.source": "cifar100", "model.name": "resnet9"}, "SVHN": {"data.source": "svhn"},
    }  # fmt: skip
    return {name: {**own[name], **keys} for name, keys in more.items()}


def _pacfl(keys: Mapping[str, Any], targets: Sequence[float] = (), svhn: bool = True) -> dict[str, dict[str, Any]]:
    names = ("FMNIST", "CIFAR-10", "CIFAR-100", *(("SVHN",) if svhn else ()))
    return _data(**{name: {**keys, **({"run.target_accuracy": targets[i]} if targets else {})} for i, name in enumerate(names)})


_20, _30 = {"data.skew_percent": 20.0}, {"data.skew_percent": 30.0}
_ROTATED = {
    f"N={n} at {100 * share:g} %": {"data.clients": n, "data.samples_per_client": size, "training.participation": share}
    for n, size in ((4800, 50), (2400, 100), (1200, 200)) for share in (0.1, 1.0)
}  # fmt: skip
_LIA_DATA = {
    "CIFAR10": {"data.source": "cifar10"}, "Fashion MNIST": {"data.source": "fashion_mnist"}, "CIFAR100": {"data.source": "cifar100"}
}  # fmt: skip
_LAMBDAS = {f"lambda {lam:g}": {"algorithm.lam": lam} for lam in (10.0, 1.0, 0.5, 0.05, 0.01, 0.0)}

TABLES: dict[str, Table] = {
    "PACFL, table beside Fig. 1": Table(
        "2 Clustered Federated Learning, How Principal Angles Can Capture the Similarity; the paper calls two tables Table 1",
        {
            "CIFAR-10 and FMNIST": {}, "CIFAR-10 and USPS": {}, "FMNIST and USPS": {}, "CIFAR-10 and SVHN": {}, "SVHN and FMNIST": {},
            "SVHN and USPS": {},
        },
        {
            "smallest_angle": (45.79, 66.26, 43.36, 6.13, 43.42, 64.86),
            "corresponding_angles": (91.6, 132.5, 86.7, 12.3, 86.8, 129.7),
        },
    ),
    "PACFL, Table 1": Table(
        "3 Experiments, Non-IID Label Skew", _pacfl(_20),
        {
            "SOLO": ((95.92, 0.57), (79.22, 1.67), (32.28, 0.23), (79.72, 1.37)),
            "FedAvg": ((77.3, 4.9), (49.8, 3.3), (53.73, 0.50), (80.2, 0.8)),
            "FedProx": ((74.9, 2.6), (50.7, 1.7), (54.35, 0.84), (79.3, 0.9)),
            "FedNova": ((70.4, 5.1), (46.5, 3.5), (53.61, 0.42), (75.4, 4.8)),
            "SCAFFOLD": ((42.8, 28.7), (49.1, 1.7), (54.15, 0.42), (62.7, 11.6)),
            "LG-FedAvg": ((96.80, 0.51), (86.31, 0.82), (45.98, 0.34), (92.61, 0.45)),
            "Per-FedAvg": ((95.95, 1.15), (85.46, 0.56), (60.19, 0.15), (93.32, 2.05)),
            "IFCA": ((97.15, 0.01), (87.99, 0.15), (71.84, 0.23), (95.42, 0.06)),
            "CFL": ((77.93, 2.19), (51.11, 1.01), (40.29, 2.23), (73.62, 1.76)),
            "PACFL": ((97.54, 0.08), (89.30, 0.41), (73.10, 0.21), (95.77, 0.18)),
        },
    ),
    "PACFL, Table 2": Table(
        "3 Experiments, Mixture of 4 Datasets", {"MIX-4": {}},
        {
            "SOLO": ((55.08, 0.29),), "FedAvg": ((63.68, 1.64),), "FedProx": ((61.86, 3.73),), "FedNova": ((60.92, 3.60),),
            "SCAFFOLD": ((69.26, 0.84),), "LG-FedAvg": ((58.49, 0.46),), "Per-FedAvg": ((42.60, 0.60),), "IFCA (2)": ((70.32, 3.57),),
            "CFL": ((61.18, 2.63),), "PACFL": ((77.83, 0.33),),
        },
    ),
    "PACFL, text": Table("3 Experiments, Mixture of 4 Datasets", {"MIX-4": {}}, {"IFCA (4)": ((76.79, 0.43),)}),
    "PACFL, Table 3": Table(
        "3 Experiments, Generalization to Newcomers", _pacfl(_20),
        {
            "SOLO": ((95.13, 0.42), (82.30, 1.00), (27.26, 0.98), (91.5, 0.64)),
            "FedAvg": ((77.61, 3.78), (31.01, 1.83), (32.19, 0.32), (71.78, 3.43)),
            "FedProx": ((74.30, 4.70), (27.56, 3.24), (32.41, 1.17), (74.30, 4.70)),
            "FedNova": ((74.66, 2.81), (31.48, 1.49), (33.18, 0.80), (73.04, 3.65)),
            "SCAFFOLD": ((73.97, 1.68), (37.22, 1.34), (23.90, 2.61), (64.96, 4.74)),
            "LG-FedAvg": ((94.58, 0.33), (77.98, 1.61), (10.63, 0.21), (89.48, 0.65)),
            "Per-FedAvg": ((89.88, 0.38), (73.79, 0.51), (30.09, 0.35), (67.48, 2.88)),
            "IFCA": ((96.29, 0.04), (84.98, 0.41), (55.66, 0.20), (94.83, 0.14)),
            "PACFL": ((96.36, 0.20), (87.14, 0.15), (59.16, 0.42), (95.25, 0.08)),
        },
    ),
    "PACFL, Table 4": Table(
        "3 Experiments, Communication Cost", _pacfl(_20, (0.75, 0.8, 0.5, 0.75)),
        {
            "FedAvg": (200.0, "never", 130.0, 150.0), "FedProx": (200.0, "never", 115.0, 200.0),
            "FedNova": ("never", "never", 120.0, 150.0), "SCAFFOLD": ("never", "never", "never", "never"),
            "LG-FedAvg": (13.0, 33.0, "never", 16.0), "Per-FedAvg": (19.0, 60.0, 110.0, 39.0), "IFCA": (14.0, 25.0, 40.0, 17.0),
            "CFL": (47.0, "never", "never", "never"), "PACFL": (12.0, 24.0, 37.0, 15.0),
        },
    ),
    "PACFL, Table 5": Table(
        "supplement, 3",
        {"mean times 2": {}, "mean times 3": {}, "covariance times 2": {}, "covariance times 5": {}},
        {
            "smallest_angle": (10.73, 18.41, 8.93, 13.72), "corresponding_angles": (32.2, 55.24, 26.79, 41.15),
            "bhattacharyya": (3.07, 10.31, 1.14, 2.13), "kl": (15.18, 47.12, 3.31, 5.79), "mmd": (0.6218, 0.6238, 0.6234, 0.6246),
        },
    ),
    "PACFL, Table 6": Table(
        "supplement, 5, Non-IID Label Skew", _pacfl(_30),
        {
            "SOLO": ((93.93, 0.10), (65.0, 0.65), (22.95, 0.81), (68.70, 3.13)),
            "FedAvg": ((80.7, 1.9), (58.3, 1.2), (54.73, 0.41), (82.0, 0.7)),
            "FedProx": ((82.5, 1.9), (57.1, 1.2), (53.31, 0.48), (82.1, 1.0)),
            "FedNova": ((78.9, 3.0), (54.4, 1.1), (54.62, 0.91), (80.5, 1.2)),
            "SCAFFOLD": ((77.7, 3.8), (57.8, 1.4), (54.90, 0.42), (77.2, 2.0)),
            "LG-FedAvg": ((94.21, 0.40), (76.58, 0.16), (35.91, 0.20), (87.69, 0.77)),
            "Per-FedAvg": ((92.87, 2.67), (77.67, 0.19), (56.42, 0.41), (91.25, 1.47)),
            "IFCA": ((95.22, 0.03), (80.95, 0.29), (67.39, 0.27), (93.02, 0.15)),
            "CFL": ((78.44, 0.23), (52.57, 3.09), (35.23, 2.72), (73.97, 4.77)),
            "PACFL": ((95.46, 0.06), (82.77, 0.18), (67.71, 0.21), (93.13, 0.27)),
        },
    ),
    "PACFL, Table 7": Table(
        "supplement, 5, Non-IID Dirichlet Label Skew", _pacfl({"data.alpha": 0.1}, svhn=False),
        {
            "SOLO": ((69.71, 0.99), (41.68, 2.84), (16.83, 0.51)), "FedAvg": ((82.91, 0.83), (38.22, 3.28), (44.52, 0.42)),
            "FedProx": ((84.04, 0.53), (42.29, 0.95), (45.52, 0.72)), "FedNova": ((84.50, 0.66), (40.25, 1.46), (46.52, 1.34)),
            "SCAFFOLD": ((10.0, 0.0), (10.0, 0.0), (43.73, 0.89)), "LG-FedAvg": ((74.96, 1.41), (49.65, 0.37), (23.59, 0.26)),
            "Per-FedAvg": ((80.29, 2.00), (53.58, 1.57), (33.94, 0.41)), "IFCA": ((85.01, 0.30), (51.16, 0.49), (47.67, 0.28)),
            "CFL": ((74.13, 0.94), (42.30, 0.25), (31.42, 1.50)), "PACFL": ((85.28, 0.12), (51.22, 0.25), (49.80, 0.09)),
        },
    ),
    "PACFL, Table 8": Table(
        "supplement, 5, Communication Cost", _pacfl(_30, (0.8, 0.7, 0.5, 0.8)),
        {
            "FedAvg": (79.36, "never", 4237.37, 71.43), "FedProx": (71.43, "never", 4237.37, 71.43),
            "FedNova": ("never", "never", 3601.98, 79.36), "SCAFFOLD": ("never", "never", 3305.11, "never"),
            "LG-FedAvg": (1.26, 2.11, "never", 1.76), "Per-FedAvg": (7.54, 23.81, 6356.06, 18.65),
            "IFCA": (11.30, 16.66, 3495.19, 10.71), "CFL": ("never", "never", "never", "never"), "PACFL": (7.53, 10.31, 1991.60, 8.73),
        },
    ),
    "PACFL, Table 9": Table(
        "supplement, 5, Communication Cost", _pacfl({"data.alpha": 0.1}, (0.75, 0.45, 0.4), svhn=False),
        {
            "FedAvg": (9.92, "never", 3389.47), "FedProx": (9.92, "never", 2965.52), "FedNova": (9.92, "never", 3178.03),
            "SCAFFOLD": ("never", "never", 5402.44), "LG-FedAvg": (14.09, 2.46, "never"), "Per-FedAvg": (31.74, 18.25, "never"),
            "IFCA": (13.09, 13.09, 4575.89), "CFL": (79.36, "never", "never"), "PACFL": (8.73, 8.73, 2372.84),
        },
    ),
    "IFCA, Table 1": Table(
        "6.2 Rotated MNIST and CIFAR",
        {
            **{f"MNIST m={m}, n={n}": {"data.clients": m, "data.samples_per_client": n} for m, n in ((4800, 50), (2400, 100), (1200, 200))},
            "CIFAR m=200, n=500": {"data.source": "cifar10"},
        },
        {
            "IFCA": ((94.20, 0.03), (95.05, 0.02), (95.25, 0.40), (81.51, 1.37)),
            "global": ((86.74, 0.04), (88.65, 0.08), (89.73, 0.13), (77.87, 0.39)),
            "local": ((63.32, 0.02), (73.66, 0.04), (80.05, 0.02), (33.97, 1.19)),
        },
    ),
    "IFCA, Table 2": Table(
        "6.3 Federated EMNIST", {"": {}},
        {
            "IFCA k=2": ((87.99, 0.35),), "IFCA k=3": ((87.89, 0.52),), "one-shot k=2": ((87.41, 0.39),), "one-shot k=3": ((87.38, 0.37),),
            "global": ((84.45, 0.51),), "local": ((75.85, 0.72),),
        },
    ),
    "StoCFL, Table 1": Table(
        "4.2 Clustered Federated Learning",
        {
            **_ROTATED, "CIFAR at 10 %": {"data.source": "cifar10", "training.participation": 0.1},
            "CIFAR at 100 %": {"data.source": "cifar10", "training.participation": 1.0},
        },
        {
            "FedAvg": (
                (95.72, 0.13), (96.10, 1.26), (95.32, 0.16), (96.00, 1.31), (94.96, 0.11), (95.72, 1.60), (48.26, 0.66), (47.98, 1.73)
            ),
            "FedProx": (
                (76.45, 0.07), (76.47, 0.08), (77.40, 0.09), (77.48, 0.08), (77.82, 0.07), (77.90, 0.09), (47.17, 0.35), (47.15, 0.36)
            ),
            "Ditto": (
                (65.05, 0.05), (73.60, 0.05), (73.93, 0.11), (79.71, 0.05), (79.38, 0.08), (83.96, 0.03), (46.91, 0.38), (46.61, 0.39)
            ),
            "IFCA k=2": (
                (84.42, 1.05), (84.98, 0.28), (85.25, 0.94), (84.64, 2.54), (86.12, 0.78), (84.37, 4.40), (50.62, 1.86), (49.83, 2.79)
            ),
            "IFCA k=4": (
                (91.74, 0.02), (90.43, 2.71), (91.39, 1.24), (90.75, 2.48), (91.00, 1.44), (88.69, 2.83), (50.80, 1.69), (51.40, 2.00)
            ),
            "IFCA k=6": (
                (91.74, 0.03), (91.65, 0.12), (91.94, 0.13), (91.99, 0.04), (92.15, 0.07), (92.17, 0.04), (51.04, 0.40), (50.63, 1.85)
            ),
            "StoCFL": (
                (97.00, 0.04), (97.36, 0.38), (96.89, 0.02), (97.4, 0.35), (96.71, 0.04), (97.40, 0.38), (52.84, 0.74), (54.99, 0.66)
            ),
        },
    ),
    "StoCFL, Table 2": Table(
        "4.2 Clustered Federated Learning, Real-world dataset evaluation", {"": {}},
        {
            "IFCA k=2": ((73.11, 0.92),), "IFCA k=3": ((69.11, 2.49),), "CFL": ((79.64, 0.37),), "FedAvg": ((86.27, 0.11),),
            "StoCFL tau=0.55": ((90.92, 0.02),), "StoCFL tau=0.60": ((90.71, 0.04),), "StoCFL tau=0.65": ((90.23, 0.20),),
        },
    ),
    "StoCFL, Table 3": Table(
        "4.3 Impact of Hyper-parameters, Effect of lambda", {"MNIST Global": {}, **_LAMBDAS},
        {
            "Pathological": (92.17, 89.28, 86.89, 83.49, 37.83, 24.12, 24.05), "Rotated": (92.65, 62.06, 94.88, 95.28, 95.86, 94.20, 92.25),
            "Shifted": (24.46, 32.69, 92.36, 93.85, 95.12, 93.80, 92.22), "Hybrid": (92.50, 92.26, 92.75, 92.77, 92.69, 91.99, 90.11),
        },
    ),
    "StoCFL, Table 4": Table(
        "4.4 Cluster Inference and Generalization", {"Test Accuracy": {}, "Unparticipation": {}},
        {
            "FedAvg": ((85.93, 0.16), (86.70, 0.22)), "CFL": ((79.78, 0.28), (73.24, 0.99)), "IFCA": ((74.82, 0.49), (75.78, 0.45)),
            "StoCFL": ((91.00, 0.05), (91.06, 0.05)),
        },
    ),
    "StoCFL, Figure 6": Table(
        "4.2 Clustered Federated Learning, Experiments in CFL setting; a table",
        {
            "Shifted MNIST": {"data.source": "mnist", "data.samples_per_client": 9600},
            "Shifted CIFAR": {"data.source": "cifar10", "data.samples_per_client": 8000},
        },
        {
            "FedAvg": ((24.44, 0.03), (13.01, 2.48)), "IFCA": ((98.11, 0.03), (54.05, 0.59)), "CFL": ((98.20, 0.02), (55.23, 1.02)),
            "StoCFL": ((98.14, 0.01), (55.42, 1.42)),
        },
    ),
    "StoCFL, text": Table(
        "4.1, 4.2 and 4.3", {"": {}},
        {
            "clusters, four groups": (4.0,), "clusters, two groups": (2.0,), "clusters, FEMNIST": (2.0,), "clusters, tau below .67": (4.0,),
            "clusters, tau above .76": (8.0,),
        },
    ),
    "CFL, text": Table(
        "VI-A, VI-C, Figs. 6, 8 and 9", {"": {}},
        {
            "rounds to a correct clustering, MNIST, 100 points": (10.0,), "rounds to a correct clustering, CIFAR, 1500 points": (10.0,),
            "permuted labels, before": (20.0,), "permuted labels, after": (60.0,), "AG News, at round 30": (43.0,),
            "AG News, one model": (42.0,), "four groups": (1.0,),
        },
    ),
    "pFedLIA, Table I": Table(
        "IV Evaluation",
        {
            **{f"pathological, {name}": {**keys, "data.noise": 0.0} for name, keys in _LIA_DATA.items()},
            **{f"noisy, {name}": {**keys, "data.noise": 0.5} for name, keys in _LIA_DATA.items()},
        },
        {
            "Oracle": ((86.08, 1.67), (99.07, 0.21), (68.28, 2.24), None, None, None),
            "Local-only": ((72.83, 4.09), (84.71, 5.47), (34.39, 1.40), (66.24, 2.59), (84.71, 5.47), (33.89, 1.51)),
            "FedAvg": ((24.43, 4.84), (60.99, 5.07), (48.20, 3.40), (29.09, 5.03), (65.95, 5.37), (24.52, 20.67)),
            "FedFomo": ((80.98, 2.45), (98.63, 0.44), (43.77, 4.16), (69.98, 1.12), (85.11, 3.41), (40.06, 6.08)),
            "FedProto": ((67.70, 6.36), (93.93, 1.42), (36.68, 2.49), (65.45, 2.11), (87.39, 2.87), (33.35, 2.36)),
            "FeSEM": ((72.90, 8.24), (97.97, 0.46), (51.20, 4.90), (68.86, 4.29), (81.75, 5.46), (22.20, 15.43)),
            "CFL": ((24.42, 4.86), (61.00, 5.05), (48.47, 4.08), (29.52, 4.50), (67.10, 4.80), (25.09, 20.58)),
            "Ours": ((86.08, 1.67), (99.07, 0.21), (68.13, 2.21), (74.52, 1.52), (82.10, 3.45), (57.09, 13.32)),
        },
    ),
    "pFedLIA, Fig. 1": Table("I Introduction", {"": {}}, {"clusters": (3.0,)}),
}  # fmt: skip
"""Name -> a published table, as "PAPER, Table N"."""
