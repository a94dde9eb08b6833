"""What the claims have in common: small federations with known groups, attacked as an audit attacks them, and membership of federations."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...data import DataSpec, build_population
from ...engine.models import Model
from ...experiments import Config, parse_config
from ...tasks.training import Train
from .. import ATTACKS
from ..evidence.fresh_runs import case_of, fresh_scene
from ..figures.leakage import BUDGETS, Cell
from ..membership.member_scores import confidences, deal_in_pairs, lira_in_turn
from ..membership.membership_shadows import federated_replicas
from .claim import Row

__all__ = ["attacked", "configured", "membership_auc", "row_of"]

BUDGET = replace(BUDGETS["quick"], auxiliary=1000, draws=4)
GROUPS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
PAIRS = 4
"""Pairs of replicas of a federation that train on opposite halves of the samples. Each is attacked with the other pairs as shadows."""


def configured(seed: int, algorithm: Mapping[str, Any], protection: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    """Twenty clients of the digits in five groups of two labels, an MLP of 32 units, two rounds at 0.1; `sections` change keys of it."""
    tree: dict[str, Any] = {
        "data": {"partition": "pathological", "groups": GROUPS, "clients": 20, "seed": seed},
        "model": {"hidden": 32}, "training": {"rounds": 2, "lr": 0.1, "weights": "equal"}, "algorithm": dict(algorithm),
        "protection": dict(protection or {}), "run": {"record": "full", "seed": seed, "audit_parties": ["server", "client:0"]},
    }  # fmt: skip
    for section, keys in sections.items():
        tree[section] = tree[section] | keys
    return parse_config(tree, "claim")


def attacked(config: Config, attack: str, data_dir: str | Path | None, adversary: str = "server") -> dict[str, Cell]:
    """Metric -> the figure of an attack on one run of `config`; with several numbers of known clients, that of the largest."""
    scene = fresh_scene(config, build_population(config.data, data_dir), config.training.rounds, BUDGET)
    cells, _ = ATTACKS[attack].cells(case_of(scene, adversary, BUDGET))
    return {cell.metric: cell for cell in sorted(cells, key=lambda cell: cell.k_known)}


def row_of(arm: str, seed: int, cell: Cell | None) -> Row:
    """The row of an attack's figure. Where there is nothing to see an attack gains 0; what it did not attempt is no figure (NaN)."""
    if cell is None:
        return Row(arm, seed, float("nan"), float("nan"), "the attack has no such figure")
    if cell.value is None or cell.baseline is None:
        gone = 0.0 if cell.status in ("nothing_to_see", "not_applicable") else float("nan")
        return Row(arm, seed, gone, gone, cell.note)
    return Row(arm, seed, cell.value, cell.baseline, cell.note)


@lru_cache(maxsize=64)
def membership_auc(seed: int, sizes: tuple[int, ...], data_dir: str | Path | None = None, rounds: int = 20) -> dict[int, float]:
    """Size -> the AUC of LiRA on the final models of FedAvg in cohorts of so many of 40 clients that are alike as far as can be.

    Forty clients of the digits in five groups of two labels, 16 samples each and as many that they might have had; `PAIRS` pairs of
    federations. A cohort of up to eight clients is of one group. Who has a cohort's secure sums has these models. Three claims read the
    same federations, so they are kept.
    """
    spec = DataSpec(source="digits", partition="pathological", clients=40, samples_per_client=32, seed=seed)
    people = build_population(spec, data_dir)
    order = sorted(range(40), key=lambda i: (people.groups[i], people.clients[i].id))
    clients = [people.clients[i] for i in order]
    model = Model("mlp", people.shape, people.classes, hidden=32, mean=people.mean, std=people.std)
    train = Train(model, epochs=2, batch_size=8, lr=0.1)
    first = deal_in_pairs(40 * 16, PAIRS, np.random.default_rng(seed)).reshape(-1, 40, 16)
    inside = np.concatenate([first, ~first], axis=2)
    aucs = {}
    for size in sizes:
        rosters = [
            {number: (clients[number].x_train[inside[f, number]], clients[number].y_train[inside[f, number]]) for number in cohort}
            for f in range(2 * PAIRS)
            for cohort in np.arange(40).reshape(-1, size).tolist()
        ]
        chain = [(number, range(40)) for number in range(rounds)]
        vectors = federated_replicas(train.at, model.init(seed), chain, rosters, seed).reshape(2 * PAIRS, 40 // size, -1)
        seen = np.concatenate(
            [confidences(model, vectors[:, i // size], clients[i].x_train, clients[i].y_train) for i in range(40)], axis=1
        )
        aucs[size] = float(np.mean([curve.auc for curve in lira_in_turn(seen, inside.reshape(2 * PAIRS, -1))]))
    return aucs
