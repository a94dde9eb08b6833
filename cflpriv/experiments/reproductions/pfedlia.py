"""pFedLIA (Rokvic et al. 2025): pathological and noisy groups, three languages, the time that influence takes."""

from collections.abc import Mapping
from typing import Any

from ...algorithms.cfl import EPS2
from ..trials import influence_speed
from .entry import Cell, Figure, Published, Reproduction, run

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


def _lia_cells(published: Mapping[str, Mapping[str, Published]], noise: float) -> tuple[Cell, ...]:
    rows: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("oracle", "oracle", {}),
        ("pFedLIA", "pfedlia", {"warm_up": 20, "local_epochs": 20, "min_samples": 10}),
        ("local", "local", {}),
        ("FedAvg", "fedavg", {}),
        ("FedFomo", "fedfomo", {}),
        ("FedProto", "fedproto", {}),
        ("FeSEM", "fesem", {"k": 5}),
        ("CFL", "cfl", {"eps2": EPS2}),
        ("random groups", "shuffled", {}),
    )
    cells = []
    for source, name in (("fashion_mnist", "FMNIST"), ("cifar10", "CIFAR-10")):
        for label, algorithm, keys in rows:
            metrics: dict[str, Published] = {"shared": published[name].get(label), "local": None}
            if algorithm in ("pfedlia", "fesem", "cfl"):
                metrics["ari"] = None
            where = {"data.source": source, "data.noise": noise}
            size = {"data.samples_per_client": 500 if source == "fashion_mnist" else 150}
            cells.append(run(f"{name}, {label}", algorithm, metrics, keys={**keys, **where}, thin=size))
    return tuple(cells)


_LIA_SHRINKS = {"training.rounds": 10, "data.clients": 20, "algorithm.warm_up": 4, "algorithm.min_samples": 2}


ENTRIES: dict[str, Reproduction] = {
    "pfedlia-pathological": Reproduction(
        "five groups of two labels", "pFedLIA, Table I, left", _LIA_CHOSEN,
        _lia_cells(
            {
                "FMNIST": {
                    "oracle": (99.07, 0.21), "local": (84.71, 5.47), "FedAvg": (60.99, 5.07), "FedFomo": (98.63, 0.44),
                    "FedProto": (93.93, 1.42), "FeSEM": (97.97, 0.46), "CFL": (61.00, 5.05), "pFedLIA": (99.07, 0.21),
                },
                "CIFAR-10": {
                    "oracle": (86.08, 1.67), "local": (72.83, 4.09), "FedAvg": (24.43, 4.84), "FedFomo": (80.98, 2.45),
                    "FedProto": (67.70, 6.36), "FeSEM": (72.90, 8.24), "CFL": (24.42, 4.86), "pFedLIA": (86.08, 1.67),
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
                    "local": (84.71, 5.47), "FedAvg": (65.95, 5.37), "FedFomo": (85.11, 3.41), "FedProto": (87.39, 2.87),
                    "FeSEM": (81.75, 5.46), "CFL": (67.10, 4.80), "pFedLIA": (82.10, 3.45),
                },
                "CIFAR-10": {
                    "local": (66.24, 2.59), "FedAvg": (29.09, 5.03), "FedFomo": (69.98, 1.12), "FedProto": (65.45, 2.11),
                    "FeSEM": (68.86, 4.29), "CFL": (29.52, 4.50), "pFedLIA": (74.52, 1.52),
                },
            },
            0.5,
        ),
        _LIA, _LIA_SHRINKS,
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
                {"ari": "roughly the languages", "clusters": 3.0, "perplexity": "like one model on all"},
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
    "pfedlia-speedup": Reproduction(
        "time of exact over lazy influence", "pFedLIA, Fig. 3a (a picture; 40 to 500 times in the text)",
        "the paper's: 9900 samples, a batch of 100, 100 test samples, 10 of its 10 to 20 local epochs; an MLP with 200 hidden units for "
        "its ResNet-18; data set (Fashion-MNIST here), lr 0.1, batch 100 and the thresholds are not published",
        tuple(
            Cell(
                f"an epoch gains less than {100 * threshold:g} %",
                (Figure("speedup", "40 to 500"), Figure("exact_seconds"), Figure("lazy_seconds")),
                trial=influence_speed, trials=5, settings={"threshold": threshold, "source": "fashion_mnist"},
            )
            for threshold in (0.1, 0.03, 0.01)
        ),
    ),
}  # fmt: skip
"""Name -> what is reproduced."""
