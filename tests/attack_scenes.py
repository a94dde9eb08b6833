"""Runs that attacks are tried on: clients with two labels each, in four groups, and views of clients that are none of them."""

from dataclasses import replace
from typing import Any

import numpy as np

from cflpriv.attacks.audit import case_of, fresh_scene
from cflpriv.attacks.leakage import BUDGETS, Case, Cell
from cflpriv.attacks.pooling import pooled
from cflpriv.data import build_population
from cflpriv.experiments import Config, parse_config
from cflpriv.types import Population

PAIRS = {"partition": "pathological", "groups": [[0, 1], [2, 3], [4, 5], [6, 7]], "clients": 20}
QUICK = replace(BUDGETS["quick"], auxiliary=600)


def config(algorithm: dict[str, Any] | None = None, protection: dict[str, Any] | None = None, seed: int = 0, **more: Any) -> Config:
    training = {"rounds": 2, "weights": "equal", "lr": 0.1} | more.pop("training", {})
    run = {"record": "full", "seed": seed, "audit_parties": ["server", "client:0"]} | more.pop("run", {})
    return parse_config({
        "data": PAIRS | {"seed": seed} | more.pop("data", {}), "model": {"hidden": 8} | more.pop("model", {}), "training": training,
        "algorithm": {"name": "pacfl"} | (algorithm or {}), "protection": protection or {}, "run": run, **more,
    })  # fmt: skip


def case(made: Config, adversary: str = "server") -> Case:
    return case_of(fresh_scene(made, build_population(made.data), made.training.rounds, QUICK), adversary, QUICK)


def unrelated(made: Config, adversary: str = "server") -> Case:
    """The view of a run on other samples whose clients are in other groups, with the truth and the reference of `made`."""
    other = replace(made, run=replace(made.run, seed=made.run.seed + 77), data=replace(made.data, seed=made.data.seed + 77))
    people = build_population(other.data)
    names = np.random.default_rng(made.run.seed).permutation(len(people.clients))
    dealt = tuple(replace(client, id=int(name)) for client, name in zip(people.clients, names, strict=True))
    shuffled = replace(people, clients=dealt)
    theirs = case_of(fresh_scene(other, shuffled, other.training.rounds, QUICK), adversary, QUICK)
    return replace(case(made), view=theirs.view)


def population_of(made: Config) -> Population:
    return build_population(made.data)


def over_seeds(cells: list[list[Cell]]) -> dict[tuple[str, int], Cell]:
    """Cells of several seeds, pooled, by metric and number of known clients."""
    return {(one.metric, one.k_known): one for one in pooled([cell for several in cells for cell in several])}
