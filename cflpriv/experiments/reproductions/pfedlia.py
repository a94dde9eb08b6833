"""pFedLIA (Rokvic et al. 2025): pathological and noisy groups, three languages, scores of influence and the time they take."""

from collections.abc import Sequence
from typing import Any

from ...algorithms.cfl.cfl import EPS2
from .entry import Published, Reproduction, ReproductionCell, RowFigure, run, shape
from .published import numbers
from .trials import influence_frontier, influence_speed

__all__ = ["ENTRIES"]

_LIA = {
    "data.partition": "pathological", "data.groups": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], "data.clients": 100,
    "data.test_samples_per_client": 100, "model.name": "lenet5", "training.rounds": 100, "training.epochs": 1, "training.batch_size": 10,
    "training.lr": 0.01, "training.weights": "examples", "training.participation": 0.1, "run.evaluate_every": 10,
}  # fmt: skip
_LIA_CHOSEN = (
    "the paper's: 100 clients, 10 % sampled, 20 rounds of warm-up, 20 of its 5 to 20 local epochs for the scores, 3:1 training and "
    "validation data (here pFedLIA alone holds back, and all are scored on test data of their own labels); which labels are paired, rounds "
    "(100), batch 10, lr 0.01 and min_samples of OPTICS (a tenth of the clients) are not published and set here, and CFL "
    "(eps1 0.2, eps2 0.75, relative), FedFomo and FedProto have our defaults; LeNet-5 from scratch stands for the pretrained ResNet-18"
)


_LIA_ROWS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("oracle", "oracle", {}, "Oracle"),
    ("pFedLIA", "pfedlia", {"warm_up": 20, "local_epochs": 20, "min_samples": 10}, "Ours"),
    ("local", "local", {}, "Local-only"),
    ("FedAvg", "fedavg", {}, "FedAvg"),
    ("FedFomo", "fedfomo", {}, "FedFomo"),
    ("FedProto", "fedproto", {}, "FedProto"),
    ("FeSEM", "fesem", {"k": 5}, "FeSEM"),
    ("CFL", "cfl", {"eps2": EPS2}, "CFL"),
    ("random groups", "shuffled", {}, ""),
)  # fmt: skip
"""The methods of Table I: label, algorithm, its keys, the row's heading."""
_SUPERCLASSES = [[4 * i + j for j in range(4)] for i in range(5)]
_SOURCES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "FMNIST": ("Fashion MNIST", {"data.source": "fashion_mnist"}, {"data.samples_per_client": 500}),
    "CIFAR-10": ("CIFAR10", {"data.source": "cifar10"}, {"data.samples_per_client": 150}),
    "CIFAR-100": (
        "CIFAR100", {"data.source": "cifar100", "data.partition": "kinds", "data.groups": _SUPERCLASSES}, {"data.samples_per_client": 150}
    ),
}  # fmt: skip
"""The three data sets: how the paper calls them, their keys, and what holds where a cell is scaled down."""


def _lia_cells(setting: str, noise: float, names: Sequence[str] = tuple(_SOURCES)) -> tuple[ReproductionCell, ...]:
    cells = []
    for name in names:
        called, where, thin = _SOURCES[name]
        foreign = {"data.noise_labels": 5} if noise and name == "CIFAR-100" else {}
        for label, algorithm, keys, row in _LIA_ROWS:
            published = (
                tuple(number for number in numbers("pFedLIA, Table I", row) if number.where.endswith(f" {setting}, {called}"))
                if row
                else None
            )
            metrics: dict[str, Published] = {"shared": published, "local": None}
            if algorithm in ("pfedlia", "fesem", "cfl"):
                metrics["ari"] = None
            cells.append(
                run(f"{name}, {label}", algorithm, metrics, keys={**keys, **where, **foreign, "data.noise": noise}, thin=thin)
            )  # fmt: skip
    return tuple(cells)


def _frontier_cells() -> tuple[ReproductionCell, ...]:
    """Fig. 3b, once a data set."""
    cells = []
    for name, source in (("FMNIST", "fashion_mnist"), ("CIFAR-10", "cifar10")):
        settings = {
            "data": {
                "source": source, "partition": "pathological", "groups": [[0, 1], [2, 3], [4, 5], [6, 7]], "clients": 32,
                "samples_per_client": 400, "test_samples_per_client": 20,
            },
            "model": {"name": "lenet5"},
            "training": {"epochs": 1, "batch_size": 10, "lr": 0.01, "weights": "examples", "participation": 0.1},
            "algorithm": {"name": "pfedlia", "warm_up": 20, "local_epochs": 20},
        }  # fmt: skip
        figures = (
            RowFigure("frontier", shape("all beneficial clients above it, in the picture")),
            RowFigure("score_same"), RowFigure("score_other"),
        )  # fmt: skip
        thin = {"data.samples_per_client": 100}
        cells.append(ReproductionCell(name, figures, trial=influence_frontier, trials=5, settings=settings, thin=thin))
    return tuple(cells)


_LIA_100 = "; which superclasses are grouped is not published: by their numbers here"
_LIA_SHRINKS = {"training.rounds": 10, "data.clients": 20, "algorithm.warm_up": 4, "algorithm.min_samples": 2}


ENTRIES: dict[str, Reproduction] = {
    "pfedlia-pathological": Reproduction(
        "five groups of two labels, of CIFAR-100 of four superclasses", "pFedLIA, Table I, left", _LIA_CHOSEN + _LIA_100,
        _lia_cells("pathological", 0.0), _LIA, _LIA_SHRINKS,
    ),
    "pfedlia-noisy": Reproduction(
        "the same, half of the clients with a foreign label, of CIFAR-100 with five", "pFedLIA, Table I, right", _LIA_CHOSEN + _LIA_100,
        _lia_cells("noisy", 0.5), _LIA, _LIA_SHRINKS,
    ),
    "pfedlia-rounds": Reproduction(
        "accuracy over rounds on CIFAR-100", "pFedLIA, Fig. 4a (a picture; 4b with data.noise=0.5 and data.noise_labels=5)",
        _LIA_CHOSEN + _LIA_100, _lia_cells("pathological", 0.0, ("CIFAR-100",)), {**_LIA, "run.evaluate_every": 2}, _LIA_SHRINKS,
        over="rounds", along="accuracy_mean",
    ),
    "pfedlia-nordic": Reproduction(
        "three Nordic languages, next word",
        "pFedLIA, Fig. 1 (a picture: three clusters, a loss like central training's, FedAvg far above)",
        "an LSTM from scratch for GPT-2, Wikipedia for OSCAR; 5 local epochs of the paper's 5 to 20; 30 clients, 20 % sampled, 10 rounds "
        "of warm-up, lr 1.0, batch 20, 30 rounds set here; min_samples of OPTICS is scikit-learn's 5, set after the scores of a run with "
        "3; peers cluster signs of scores (the paper: scores), set after those of earlier runs; the paper's picture is of peers, central "
        "is not in it",
        (
            run(
                "pFedLIA, peer to peer", "pfedlia",
                {"ari": "roughly the languages", "clusters": numbers("pFedLIA, Fig. 1", "clusters"), "perplexity": "like one model on all"},
                keys={"mode": "peer", "scores": "sign", "warm_up": 10, "local_epochs": 5},
            ),
            run(
                "pFedLIA, central", "pfedlia", {"ari": None, "clusters": None, "perplexity": None},
                keys={"warm_up": 10, "local_epochs": 5, "min_samples": 5},
            ),
            run("oracle", "oracle", {"perplexity": None}),
            run("FedAvg", "fedavg", {"perplexity": "far above one model on all"}),
            run("random groups", "shuffled", {"perplexity": None}),
            run("local", "local", {"perplexity": None}),
            run(
                "one model on all data", "local", {"perplexity": None},
                keys={
                    "data.partition": "iid", "data.clients": 1, "data.samples_per_client": 45000, "data.test_samples_per_client": 9000,
                    "training.participation": 1.0,
                },
                thin={"data.samples_per_client": 15000, "data.test_samples_per_client": 3600},
            ),
        ),
        {
            "data.source": "nordic_wiki", "data.languages": ["nb", "sv", "da"], "data.partition": "kinds", "data.clients": 30,
            "data.vocabulary": 2000, "data.samples_per_client": 1500, "data.test_samples_per_client": 300, "model.name": "lstm",
            "model.hidden": 64, "training.rounds": 30, "training.batch_size": 20, "training.lr": 1.0, "training.participation": 0.2,
            "training.weights": "examples", "run.evaluate_every": 5,
        },
        {"training.rounds": 4, "data.clients": 12, "algorithm.warm_up": 2, "algorithm.min_samples": 3},
        over="rounds", along="perplexity_mean",
    ),
    "pfedlia-influence": Reproduction(
        "the scores of client 0, and the frontier that it draws", "pFedLIA, Fig. 3b (a picture)",
        "the paper's: 32 clients, 2 of 8 classes each, client 0 has classes 0 and 1, 2-means of its scores; which classes are paired, data "
        "set, samples (400 a client) and warm-up (20 rounds, as in its evaluation, with the settings of pfedlia-pathological) are not "
        "published for this; 20 local epochs as there; LeNet-5 from scratch for the pretrained ResNet-18",
        _frontier_cells(), shrinks={"algorithm.warm_up": 3, "algorithm.local_epochs": 5},
    ),
    "pfedlia-speedup": Reproduction(
        "time of exact over lazy influence", "pFedLIA, Fig. 3a (a picture; 40 to 500 times in the text)",
        "the paper's: 9900 samples, a batch of 100, 100 test samples, 10 of its 10 to 20 local epochs; an MLP with 200 hidden units for "
        "its ResNet-18; data set (Fashion-MNIST here), lr 0.1, batch 100 and the thresholds are not published",
        tuple(
            ReproductionCell(
                f"an epoch gains less than {100 * threshold:g} %",
                (RowFigure("speedup", shape("40 to 500")), RowFigure("exact_seconds"), RowFigure("lazy_seconds")),
                trial=influence_speed, trials=5, settings={"threshold": threshold, "source": "fashion_mnist"},
            )
            for threshold in (0.1, 0.03, 0.01)
        ),
    ),
}  # fmt: skip
"""Name -> what is reproduced."""
