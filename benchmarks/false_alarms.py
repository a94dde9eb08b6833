"""How often an audit calls something a leak where there is none: audits of views that have nothing to do with the truth.

    python -m benchmarks false_alarms [--audits 200] [--seeds 5] [--out false_alarms.jsonl]

Each audit is of five seeds, as a standard one, by the server and a server with one colluding client, with all attacks but `dp_audit`, which
has runs of its own, and `disaggregation`, whose figures are of cohorts and not of data. In each seed the digits are halved at random, each
half with its own test set. The run audited has one half; the adversary sees a run on the other half, whose clients are in other groups;
truth and unprotected reference are those of the run audited. So each leak is false.

Reported are audits with a false leak among figures by themselves, and after all figures are judged together (`attacks.family`), with exact
95 % intervals. Settings take turns: algorithm × protection × size. Finished audits are in the file of results, and a restarted run resumes
from it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy import stats

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.figures.family import judged_together
from cflpriv.attacks.figures.leakage import BUDGETS, Case, Cell
from cflpriv.attacks.figures.pooling import pooled
from cflpriv.data import DataSpec, build_population, load_dataset
from cflpriv.experiments import Config, parse_config
from cflpriv.randomness import stream
from cflpriv.types import Population

__all__ = ["main", "row"]

BUDGET = replace(BUDGETS["standard"], auxiliary=600, shadows=4)
ALGORITHMS: tuple[dict[str, Any], ...] = ({"name": "pacfl", "k": 4}, {"name": "fedavg"}, {"name": "stocfl"}, {"name": "ifca", "k": 4})
PROTECTIONS: tuple[dict[str, Any], ...] = (
    {}, {"gram": ["haar"], "sum": "haar"}, {"gram": ["permutation"], "sum": "permutation"},
    {"gram": ["haar"], "sum": "secagg", "secagg_mode": "passive", "min_cohort": 2},
)  # fmt: skip
CLIENTS = (12, 20)
SETTINGS = list(product(ALGORITHMS, PROTECTIONS, CLIENTS))
ADVERSARIES = ("server", "server+1")
APART = 100_003
"""Added to the seed of the run that the adversary sees instead."""


def configured(number: int, seed: int) -> Config:
    """The configuration of an audit, with other seeds for its later runs."""
    algorithm, protection, clients = SETTINGS[number % len(SETTINGS)]
    return parse_config({
        "data": {"partition": "pathological", "groups": [[0, 1], [2, 3], [4, 5], [6, 7]], "clients": clients, "seed": seed},
        "model": {"hidden": 8}, "training": {"rounds": 2, "weights": "equal", "lr": 0.1}, "algorithm": algorithm, "protection": protection,
        "run": {"record": "full", "seed": seed, "audit_parties": ["server", "client:0"]},
    })  # fmt: skip


def two_populations(data: DataSpec) -> tuple[Population, Population]:
    """Two populations of `data` without a common sample: each of half of the digits, a fifth of these for tests, drawn by its seed."""
    whole = load_dataset(data.source)
    x, y = np.concatenate([whole.x_train, whole.x_test]), np.concatenate([whole.y_train, whole.y_test])
    parts = np.array_split(stream(data.seed, "samples dealt").permutation(len(y)), [2 * len(y) // 5, len(y) // 2, 9 * len(y) // 10])
    made = []
    with TemporaryDirectory() as folder:
        for number, (train, test) in enumerate((parts[:2], parts[2:])):
            path = Path(folder) / f"{number}.npz"
            np.savez(path, x_train=x[train], y_train=y[train], x_test=x[test], y_test=y[test])
            made.append(build_population(replace(data, source="npz", paths=(str(path),), seed=data.seed + number)))
    return made[0], made[1]


def cases(config: Config, adversaries: Sequence[str] = ADVERSARIES) -> list[Case]:
    """The run of `config` as its adversaries have it, but that they see another run."""
    seed = config.run.seed + APART
    population, other = two_populations(config.data)
    names = stream(seed, "clients dealt").permutation(len(other.clients))
    dealt = replace(other, clients=tuple(replace(client, id=int(name)) for client, name in zip(other.clients, names, strict=True)))
    rounds = config.training.rounds
    scenes = [fresh_scene(config, population, rounds, BUDGET), fresh_scene(config.with_("run", seed=seed), dealt, rounds, BUDGET)]
    return [replace(case_of(scenes[0], adversary, BUDGET), view=case_of(scenes[1], adversary, BUDGET).view) for adversary in adversaries]


def attacked(case: Case) -> list[Cell]:
    """The figures of all attacks of this study."""
    names = [name for name, attack in ATTACKS.items() if not attack.reruns and name != "disaggregation"]
    return [cell for name in names for cell in ATTACKS[name].cells(case)[0]]


def row(number: int, seeds: int) -> dict[str, Any]:
    """One audit: how many figures were tested, and what leaks by itself and beside the others."""
    made = [cell for seed in range(seeds) for case in cases(configured(number, 1000 * number + seed)) for cell in attacked(case)]
    alone = pooled(made)
    together, family = judged_together(alone)
    named = [[f"{cell.attack}/{cell.metric}/{cell.adversary}" for cell in cells if cell.status == "leaks"] for cells in (alone, together)]
    return {"audit": number, "seeds": seeds, "tested": family.evidence.tested, "alone": named[0], "together": named[1]}


def shares(rows: Sequence[dict[str, Any]]) -> str:
    """The shares of audits with a false leak, in words."""
    words = []
    for key, name in (("alone", "with a figure that leaks by itself"), ("together", "with a leak after all are judged together")):
        wrong = sum(bool(row[key]) for row in rows)
        limits = stats.binomtest(wrong, len(rows)).proportion_ci(0.95, method="exact")
        words.append(f"{wrong} of {len(rows)} audits {name} [{limits.low:.3f}, {limits.high:.3f}]")
    return "; ".join(words)


def main(words: Sequence[str]) -> int:
    """Make all audits that are not in the file yet, and print the shares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks false_alarms")
    parser.add_argument("--audits", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=BUDGET.seeds)
    parser.add_argument("--out", default="false_alarms.jsonl")
    asked = parser.parse_args(words)
    path = Path(asked.out)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    done = {row["audit"] for row in rows if row["seeds"] == asked.seeds}
    with path.open("a", encoding="utf-8") as file:
        for number in range(asked.audits):
            if number not in done:
                made = row(number, asked.seeds)
                rows.append(made)
                file.write(json.dumps(made) + "\n")
                file.flush()
                print(f"audit {number}: {made['tested']} figures, false by itself {made['alone']}, together {made['together']}", flush=True)
    print(shares([row for row in rows if row["seeds"] == asked.seeds and row["audit"] < asked.audits]))
    return 0
