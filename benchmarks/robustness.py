"""The effect of misbehaving clients on honest ones, with and without a robust rule: attack × share of bad clients × method.

    python -m benchmarks robustness [digits | fashion_mnist | clustering ...] [--seeds 11 12] [--out FILE]

Clients are in two groups, upright and turned by 90 degrees, and PACFL finds these. Bad clients are spread evenly over the groups. Updates
are averaged in the clear over buckets of three clients, which gives the means that secure sums give, to the quantiser's step, in a fraction
of the time; "secagg" beside a method is the same through secure sums. Reported are the mean accuracy of honest clients after the last
round (of the model of their cluster, on their own test data), the ARI of honest clients, and the success of the back door: the share of
honest clients' test images of other classes that the model takes for the target once they bear the trigger.

The settings stand below as they were fixed before the run that judges, on seed 0; this run has seeds 11 and 12. Finished cells are in the
file of results, and a restarted run resumes from it.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cflpriv.attacks.active.bad_clients import (
    bridging,
    copied,
    corrupt,
    flipped_labels,
    mean_of_victims,
    poisoned,
    scaled_update,
    triggered,
)
from cflpriv.clustering.scores import ari
from cflpriv.experiments import parse_config
from cflpriv.experiments.run.measure import served_accuracy
from cflpriv.experiments.run.run import Experiment, advance, begin, prepare
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.types import ClientData, Population

__all__ = ["ATTACKS", "CLUSTERING", "METHODS", "cell", "main", "steered"]

TARGET = 0
SHARES = (0.05, 0.1, 0.2)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "digits": {
        "data": {"source": "digits", "clients": 60, "rotations": [0, 90]},
        "model": {"name": "mlp", "hidden": 32},
        "training": {"rounds": 20, "epochs": 2, "batch_size": 10, "lr": 0.1, "weights": "equal"},
    },
    "fashion_mnist": {
        "data": {"source": "fashion_mnist", "clients": 60, "rotations": [0, 90], "samples_per_client": 100, "test_samples_per_client": 50},
        "model": {"name": "mlp", "hidden": 32},
        "training": {"rounds": 15, "epochs": 1, "batch_size": 10, "lr": 0.05, "weights": "equal"},
    },
}  # fmt: skip
PATCH = {"digits": 2, "fashion_mnist": 4}
BUCKETS = 10
METHODS: Mapping[str, Mapping[str, Any]] = {
    "mean": {},
    "trimmed_mean": {"robust": "trimmed_mean", "buckets": BUCKETS},
    "geometric_median": {"robust": "geometric_median", "buckets": BUCKETS},
    "centred_clipping": {"robust": "centred_clipping", "buckets": BUCKETS},
    "geometric_median, single": {"robust": "geometric_median"},
    "mean, secagg": {"sum": "secagg"},
    "geometric_median, secagg": {"sum": "secagg", "robust": "geometric_median", "buckets": BUCKETS},
}
SLOW = ("mean, secagg", "geometric_median, secagg")


@dataclass(frozen=True)
class Spoilt:
    """One attack: what bad clients train on, and how they change what they send, given the members of their group and how many are bad."""

    data: Callable[[ClientData, str], ClientData] | None = None
    factor: Callable[[int, int], float] | None = None
    signature: str = ""


ATTACKS: Mapping[str, Spoilt] = {
    "sign flip": Spoilt(factor=lambda members, bad: -1.0),
    "scaled update (x10)": Spoilt(factor=lambda members, bad: 10.0),
    "sign flip x10": Spoilt(factor=lambda members, bad: -10.0),
    "model replacement with a back door": Spoilt(
        lambda data, source: poisoned(data, TARGET, PATCH[source]), lambda members, bad: members / bad
    ),
    "label flip": Spoilt(lambda data, source: flipped_labels(data, 10)),
    "copied signature, label flip": Spoilt(lambda data, source: flipped_labels(data, 10), signature="copied"),
    "signature between": Spoilt(lambda data, source: flipped_labels(data, 10), signature="between"),
}
RULE_OF_BRIEF = ("sign flip", "scaled update (x10)", "model replacement with a back door")


def bad_ones(population: Population, share: float, seed: int) -> tuple[int, ...]:
    """The bad clients: the same share of every group, drawn."""
    draws, chosen = np.random.default_rng([seed, round(1000 * share)]), []
    for group in sorted(set(population.groups)):
        members = [client.id for client, label in zip(population.clients, population.groups, strict=True) if label == group]
        chosen += draws.choice(members, round(share * len(members)), replace=False).tolist()
    return tuple(sorted(int(client) for client in chosen))


def cell(source: str, attack: str | None, share: float, method: str, seed: int) -> dict[str, Any]:
    """One run: accuracy and ARI of honest clients, success of the back door."""
    tree = {
        **SETTINGS[source],
        "algorithm": {"name": "pacfl", "cut": "silhouette"},
        "protection": METHODS[method],
        "run": {"seed": seed, "evaluate_every": 1000},
    }
    config = parse_config({**tree, "data": {**tree["data"], "seed": seed}})
    clean = prepare(config).population
    bad = bad_ones(clean, share, seed) if attack else ()
    spoilt = ATTACKS[attack] if attack else Spoilt()
    groups = {client.id: group for client, group in zip(clean.clients, clean.groups, strict=True)}
    data = {client.id: client for client in clean.clients}
    if spoilt.data is not None:
        data |= {client: spoilt.data(data[client], source) for client in bad}
    simulation = prepare(config, population=replace(clean, clients=tuple(data.values())))
    for client in bad:
        members = [member for member in groups if groups[member] == groups[client]]
        if spoilt.factor is not None:
            factor = spoilt.factor(len(members), sum(member in bad for member in members))
            corrupt(simulation.simulated, client, scaled_update(factor))
        honest_of = {group: next(data[k] for k in groups if groups[k] == group and k not in bad) for group in sorted(set(groups.values()))}
        victims = list(honest_of.values())
        if spoilt.signature == "copied":
            corrupt(simulation.simulated, client, copied("signature", victims[1 - groups[client]]))
        if spoilt.signature == "between":
            corrupt(simulation.simulated, client, bridging("signature", victims))
    begin(simulation)
    for _ in range(config.training.rounds):
        advance(simulation)
    return scores(simulation, groups, bad, PATCH[source])


def scores(simulation: Experiment, groups: Mapping[int, int], bad: Sequence[int], patch: int) -> dict[str, Any]:
    """What honest clients have in the end."""
    honest = [client for client in groups if client not in bad]
    served = simulation.algorithm.serve(simulation.state)
    accuracy = served_accuracy(simulation.simulated, served, honest)
    clustering = simulation.algorithm.describe(simulation.state)["clustering"]
    clusters = [clustering[client] for client in honest]
    inputs = simulation.simulated.resolve(served.task, served.params, served.which, honest)
    marked = []
    for task_input in inputs:
        others = task_input.data.y_test != TARGET
        x = triggered(task_input.data.x_test[others], patch)
        marked.append(replace(task_input, data=replace(task_input.data, x_test=x, y_test=np.full(len(x), TARGET))))
    task = Evaluate(simulation.config.model_for(simulation.population))
    hit = simulation.simulated.engine.run(task, marked)
    success = sum(float(result["correct"]) for result in hit) / sum(float(result["count"]) for result in hit)
    return {
        "accuracy": float(np.mean(accuracy)), "ari": ari([groups[client] for client in honest], clusters), "back_door": success,
        "without_sum": sum(len(row.get("unchanged_clusters", ())) for row in simulation.rows),
    }  # fmt: skip


# --- clustering ---------------------------------------------------------------------------------------------------------------------

STEERED_SHARES = (0.0, 0.1, 0.2, 0.3)
STEERED: Mapping[str, Any] = {
    "data": {"source": "digits", "clients": 45, "partition": "pathological", "groups": [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]},
    "model": {"name": "mlp", "hidden": 32},
    "training": {"rounds": 10, "epochs": 2, "batch_size": 10, "lr": 0.1, "weights": "equal"},
}
CLUSTERING: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "pacfl": ({"name": "pacfl", "k": 3}, "signature"),
    "ifca": ({"name": "ifca", "k": 3, "restarts": 3, "decide_after": 3}, "choice"),
    "cfl": ({"name": "cfl", "eps1": 0.5, "eps2": 0.6, "first_split": 3}, "update"),
    "stocfl": ({"name": "stocfl", "tau": 0.15}, "representation"),
    "pfedlia": ({"name": "pfedlia", "warm_up": 5}, "scores"),
}
"""Each algorithm's settings, and the part of its results by which clients are clustered."""


def steered(name: str, craft: str, share: float, seed: int) -> dict[str, Any]:
    """Cluster with bad clients that craft what they are clustered by; the clustering of honest clients in the end.

    craft: "between" groups 0 and 1; "copied" from group 0; "scaled" is copied, with updates times −10; "scaled, robust" is that against the
    geometric median. `merged`: pairs of groups most of whose honest clients share a cluster. `spoilt`: groups whose largest cluster holds
    less than 80 % of their honest clients.
    """
    algorithm, part = CLUSTERING[name]
    protection = {"robust": "geometric_median"} if craft.endswith("robust") else {}
    config = parse_config({
        **STEERED, "algorithm": algorithm, "data": {**STEERED["data"], "seed": seed}, "run": {"seed": seed, "evaluate_every": 99},
        "protection": protection,
    })  # fmt: skip
    simulation = prepare(config)
    population = simulation.population
    groups = {client.id: group for client, group in zip(population.clients, population.groups, strict=True)}
    bad = bad_ones(population, share, seed)
    victims = [next(client for client in population.clients if groups[client.id] == group and client.id not in bad) for group in (0, 1)]
    for client in bad:
        if craft == "between":
            make = bridging if part == "signature" else mean_of_victims
            corrupt(simulation.simulated, client, make(part, victims))
        else:
            corrupt(simulation.simulated, client, copied(part, victims[0]))
        if craft.startswith("scaled"):
            corrupt(simulation.simulated, client, scaled_update(-10.0, "step" if name == "ifca" else "update"))
    begin(simulation)
    for _ in range(config.training.rounds):
        advance(simulation)
    clustering = simulation.algorithm.describe(simulation.state)["clustering"]
    honest = [client for client in groups if client not in bad]
    clusters = [clustering[client] for client in honest]
    most: dict[int, int] = {}
    spoilt = 0
    for group in sorted(set(groups.values())):
        labels = [clustering[client] for client in honest if groups[client] == group]
        most[group] = max(sorted(set(labels)), key=labels.count)
        spoilt += labels.count(most[group]) < 0.8 * len(labels)
    merged = sum(most[a] == most[b] for a in most for b in most if a < b)
    accuracy = served_accuracy(simulation.simulated, simulation.algorithm.serve(simulation.state), honest)
    return {
        "ari": ari([groups[client] for client in honest], clusters), "merged": merged, "spoilt": spoilt, "clusters": len(set(clusters)),
        "accuracy": float(np.mean(accuracy)),
    }  # fmt: skip


# --- the table ----------------------------------------------------------------------------------------------------------------------


def cells(wanted: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """What is to be measured, the cells that judge first."""
    for source in (name for name in SETTINGS if name in wanted):
        for seed in seeds:
            fast = [method for method in METHODS if method not in SLOW]
            yield from ((source, None, 0.0, method, seed) for method in fast)
            for share in sorted(SHARES, key=lambda share: share != 0.1):
                for attack in ATTACKS:
                    signature = bool(ATTACKS[attack].signature)
                    yield from ((source, attack, share, method, seed) for method in (fast[:3:2] if signature else fast))
        for attack in (None, *RULE_OF_BRIEF):
            yield from ((source, attack, 0.1 if attack else 0.0, method, seeds[0]) for method in SLOW)
    if "clustering" in wanted:
        for seed in seeds:
            for name in CLUSTERING:
                yield (name, "none", 0.0, seed)
                for craft in ("between", "copied", "scaled", "scaled, robust") if name == "ifca" else ("between", "copied"):
                    yield from ((name, craft, share, seed) for share in STEERED_SHARES[1:])


def main(words: Sequence[str]) -> int:
    """Measure what is not in the file of results yet, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks robustness")
    parser.add_argument("what", nargs="*", default=[], help="digits, fashion_mnist, clustering (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[11, 12])
    parser.add_argument("--out", type=Path, default=Path("robustness.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what was measured, and measure nothing")
    options = parser.parse_args(words)
    known = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()] if options.out.is_file() else []
    done = {tuple(row["cell"]): row for row in known}
    for key in () if options.table else cells(options.what or [*SETTINGS, "clustering"], options.seeds):
        if key in done:
            continue
        result = steered(*key) if len(key) == 4 else cell(*key)
        done[key] = {"cell": key, **result}
        with options.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(done[key]) + "\n")
    print("\n".join(tables(done)))
    return 0


def tables(done: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: one table a data set (means over seeds, accuracy and back door in per cent), one for clustering."""

    def mean(keys: Sequence[tuple[Any, ...]], name: str) -> float:
        return float(np.mean([done[key][name] for key in keys]))

    for source in SETTINGS:
        rows = sorted({key[1:3] for key in done if key[0] == source and len(key) == 5}, key=lambda key: (key[0] or "", key[1]))
        methods = [method for method in METHODS if any(key[0] == source and len(key) == 5 and key[3] == method for key in done)]
        if rows:
            yield from (f"\n{source}\n", "| attack | share | " + " | ".join(methods) + " | ARI |", "|" + "---|" * (len(methods) + 3))
        for attack, share in rows:
            texts = []
            for method in methods:
                keys = [key for key in done if len(key) == 5 and key[:4] == (source, attack, share, method)]
                back = f" / {100 * mean(keys, 'back_door'):.0f}" if keys and "back door" in (attack or "") else ""
                texts.append(f"{100 * mean(keys, 'accuracy'):.1f}{back}" if keys else "–")
            every = [key for key in done if len(key) == 5 and key[:3] == (source, attack, share)]
            yield f"| {attack or 'none'} | {share:.0%} | " + " | ".join(texts) + f" | {mean(every, 'ari'):.2f} |"
    steerings = [key for key in done if len(key) == 4]
    if steerings:
        yield from ("\nclustering\n", "| algorithm | crafted | " + " | ".join(f"{share:.0%}" for share in STEERED_SHARES) + " |")
        yield "|" + "---|" * (len(STEERED_SHARES) + 2)
    for name, craft in sorted({key[:2] for key in steerings}):
        texts = []
        for share in STEERED_SHARES:
            keys = [key for key in steerings if key[:3] == (name, craft, share)]
            texts.append(f"{mean(keys, 'ari'):.2f}, {mean(keys, 'merged'):.1f} merged, {mean(keys, 'spoilt'):.1f} split" if keys else "–")
        yield f"| {name} | {craft} | " + " | ".join(texts) + " |"
