"""Runs that attacks are tried on: clients with two labels each, in four groups, and views of clients that are none of them."""

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.false_alarms import two_populations
from cflpriv.attacks import ATTACKS
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.figures.leakage import BUDGETS, Case, Cell
from cflpriv.attacks.figures.pooling import pooled
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
    """The view of a run on other samples whose clients are in other groups, with the truth and the reference of `made`.

    The samples are halved first, so that no sample is of both runs. What `made` is of here is a run on one half.
    """
    seed = made.run.seed + 77
    mine, other = two_populations(made.data)
    names = np.random.default_rng(made.run.seed).permutation(len(other.clients))
    dealt = replace(other, clients=tuple(replace(client, id=int(name)) for client, name in zip(other.clients, names, strict=True)))
    scenes = (
        fresh_scene(made, mine, made.training.rounds, QUICK),
        fresh_scene(made.with_("run", seed=seed), dealt, made.training.rounds, QUICK),
    )
    true, theirs = (case_of(one, adversary, QUICK) for one in scenes)
    return replace(true, view=theirs.view)


def population_of(made: Config) -> Population:
    return build_population(made.data)


def figures_of(attack: str, seen: Case) -> dict[str, Cell]:
    """By metric what an attack finds in a case."""
    return {cell.metric: cell for cell in ATTACKS[attack].cells(seen)[0]}


def over_seeds(cells: list[list[Cell]]) -> dict[tuple[str, int], Cell]:
    """Cells of several seeds, pooled, by metric and number of known clients."""
    return {(one.metric, one.k_known): one for one in pooled([cell for several in cells for cell in several])}
