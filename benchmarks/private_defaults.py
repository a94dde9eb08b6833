"""Whether the values that private training gets by default are as good as those of a grid, and whether runs that learn nothing are named.

    python -m benchmarks private_defaults --out FILE.csv [--data-dir DIR] [--tables "usps;sparse"]

Ten imbalanced tables (about 82 % of one class) of 20 to 30 clients: five from scikit-learn and the data directory, five made up. ε = 8,
δ = 1e-5 for one sample. Every run (table, setting, time) is one line of a CSV file, written when the run is done. What is there is not
run again.

The rule, written before the first run: on each table the balanced accuracy with the default values is at most `WITHIN` below the best of
`GRID`, and each run whose balanced accuracy is below `DEGENERATE` of the way from a constant prediction to 1 has a warning.

The best of a grid of single runs is partly lucky: two runs with the same setting and other noise differ by some points. So the setting
that was best, and the default values, are run `AGAIN` times more, and the rule is judged on the means of these runs, too.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cflpriv.data.datasets import data_directory
from cflpriv.data.named import load_dataset
from cflpriv.experiments import advance, finish, parse_config, start
from cflpriv.types import Array, ClientData, Population

from .clustering import add, read

__all__ = ["DEGENERATE", "GRID", "TABLES", "WITHIN", "main", "measured"]

FIELDS = ("table", "setting", "time", "lr", "batch", "clip", "rounds", "accuracy", "balanced", "majority", "flagged", "seconds")
GRID = tuple(product((0.1, 0.5, 2.0, 8.0), (0.1, 1.0), (0.3, 1.0), (20, 60)))
"""Learning rate, share of the samples in a batch, clip norm, rounds."""
WITHIN, DEGENERATE = 0.02, 0.02
AGAIN = 5
EPSILON, DELTA, SHARE = 8.0, 1e-5, 0.82
MOST = 6000
"""Rows of a table."""


def split(name: str, x: Array, y: Array, clients: int, seed: int) -> Population:
    """Rows in random order to `clients`, a quarter of each client's to test."""
    order = np.random.default_rng(seed).permutation(len(y))[:MOST]
    made = []
    for client, rows in enumerate(np.array_split(order, clients)):
        cut = 3 * len(rows) // 4
        a, b = rows[:cut], rows[cut:]
        made.append(ClientData(client, x[a].astype(np.float32), y[a], x[b].astype(np.float32), y[b]))
    return Population(name, tuple(made), (0,) * clients, int(y.max()) + 1)


def imbalanced(x: Array, minority: Array, seed: int = 0) -> tuple[Array, Array]:
    """All rows of one kind, and so many of the other that class 0 has `SHARE`."""
    rng, y = np.random.default_rng(seed), minority.astype(np.int64)
    many, few = np.flatnonzero(y == 0), np.flatnonzero(y == 1)
    wanted = int(len(many) * (1 - SHARE) / SHARE)
    if wanted <= len(few):
        few = rng.choice(few, wanted, replace=False)
    else:
        many = rng.choice(many, int(len(few) * SHARE / (1 - SHARE)), replace=False)
    rows = np.concatenate([many, few])
    return x[rows], y[rows]


def _digits(directory: Path) -> Population:
    from sklearn.datasets import load_digits

    data = load_digits()
    return split("digits", *imbalanced(data.data / 16, np.isin(data.target, [4, 9])), 20, 0)


def _pictures(name: str, minority: list[int], side: int, clients: int) -> Callable[[Path], Population]:
    """Images averaged over blocks, `side` blocks a row, as rows."""

    def load(directory: Path) -> Population:
        data = load_dataset(name, directory)
        x, y = np.asarray(data.x_train[:12000], np.float32), data.y_train[:12000]
        x = x.reshape(len(x), side, x.shape[-2] // side, side, x.shape[-1] // side).mean((2, 4)).reshape(len(x), -1)
        return split(name, *imbalanced(x / max(1.0, float(x.max())), np.isin(y, minority)), clients, 0)

    return load


def _recorded(name: str, minority: list[int], clients: int) -> Callable[[Path], Population]:
    def load(directory: Path) -> Population:
        with np.load(directory / "real_clients" / f"{name}.npz") as file:
            x, y = (np.concatenate([file[f"{part}_train"], file[f"{part}_test"]]) for part in "xy")
        return split(name, *imbalanced(x, np.isin(y, minority)), clients, 0)

    return load


def _made(name: str, clients: int, make: Callable[[np.random.Generator, Array], tuple[Array, Array]]) -> Callable[[Path], Population]:
    def load(directory: Path) -> Population:
        rng = np.random.default_rng(53)
        y = (rng.random(MOST) > SHARE).astype(np.int64)
        return split(name, *make(rng, y), clients, 53)

    return load


def _shifted(rng: np.random.Generator, y: Array) -> tuple[Array, Array]:
    return rng.standard_normal((MOST, 8)) + 0.7 * y[:, None], y


def _heavy_tails(rng: np.random.Generator, y: Array) -> tuple[Array, Array]:
    return 0.5 * rng.standard_t(3, (MOST, 20)) + y[:, None] * rng.uniform(-1, 1, 20), y


def _mislabelled(rng: np.random.Generator, y: Array) -> tuple[Array, Array]:
    x = rng.standard_normal((MOST, 12)) + y[:, None] * rng.uniform(-1.5, 1.5, 12)
    return x, np.where(rng.random(MOST) < 0.05, 1 - y, y)


def _four_classes(rng: np.random.Generator, y: Array) -> tuple[Array, Array]:
    y = np.where(y == 1, rng.integers(1, 4, MOST), 0)
    return rng.standard_normal((MOST, 15)) + 2 * rng.standard_normal((4, 15))[y], y


def _sparse(rng: np.random.Generator, y: Array) -> tuple[Array, Array]:
    likely = np.where(y[:, None] == 1, rng.uniform(0.0, 0.3, 80), rng.uniform(0.0, 0.3, 80))
    return (rng.random((MOST, 80)) < likely).astype(np.float64), y


TABLES: Mapping[str, Callable[[Path], Population]] = {
    "digits": _digits,
    "usps": _pictures("usps", [0], 8, 25),
    "fashion_mnist": _pictures("fashion_mnist", [2, 6], 7, 30),
    "wisdm": _recorded("wisdm", [0, 2, 3], 30),
    "beijing48": _recorded("beijing48", [3], 24),
    "shifted": _made("shifted", 30, _shifted),
    "heavy tails": _made("heavy tails", 25, _heavy_tails),
    "mislabelled": _made("mislabelled", 20, _mislabelled),
    "four classes": _made("four classes", 30, _four_classes),
    "sparse": _made("sparse", 25, _sparse),
}


def measured(people: Population, setting: Mapping[str, Any]) -> dict[str, Any]:
    """One private run of a linear model on a table; `setting` has keys of the grid, or none for the defaults."""
    samples = min(len(client.y_train) for client in people.clients)
    training: dict[str, Any] = {"weights": "equal"}
    privacy: dict[str, Any] = {"unit": "sample", "epsilon": EPSILON, "delta": DELTA, "samples": samples}
    if setting:
        batch = 0 if setting["batch"] == 1.0 else max(1, round(setting["batch"] * samples))
        training |= {"lr": setting["lr"], "batch_size": batch, "rounds": setting["rounds"]}
        privacy["clip_norm"] = setting["clip"]
    tree = {
        "data": {"clients": len(people.clients)}, "model": {"name": "linear", "normalise": False}, "algorithm": {"name": "fedavg"},
        "training": training, "privacy": privacy, "run": {"evaluate_every": 1000},
    }  # fmt: skip
    began = time.perf_counter()
    run = start(parse_config(tree), population=people)
    for _ in range(run.config.training.rounds):
        advance(run)
    summary, used = finish(run), run.config.training
    return {
        "lr": f"{used.lr:.4g}", "batch": used.batch_size, "clip": run.config.privacy.clip_norm, "rounds": used.rounds,
        "accuracy": round(summary["accuracy_mean"], 4), "balanced": round(summary["balanced_accuracy"], 4),
        "majority": round(summary["majority_accuracy"], 4), "flagged": int(bool(summary["warnings"])),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def best_of_grid(rows: list[dict[str, str]], table: str) -> dict[str, str]:
    """The first run of the setting of the grid whose first run has the highest balanced accuracy."""
    grid = [row for row in rows if row["table"] == table and row["setting"] != "defaults" and row["time"] == "0"]
    return max(grid, key=lambda row: float(row["balanced"]))


def means_again(rows: list[dict[str, str]], table: str, setting: str) -> tuple[float, float]:
    """Mean and standard error of the balanced accuracy of a setting's runs after the first."""
    runs = [float(row["balanced"]) for row in rows if (row["table"], row["setting"]) == (table, setting) and row["time"] != "0"]
    return float(np.mean(runs)), float(np.std(runs, ddof=1) / np.sqrt(len(runs)))


def verdicts(rows: list[dict[str, str]], tables: Sequence[str]) -> Iterator[str]:
    """A line for each table: how the default values stand beside the best of the grid, in single runs and in the means of fresh runs."""
    for table in tables:
        own = [row for row in rows if row["table"] == table]
        default = next(row for row in own if row["setting"] == "defaults" and row["time"] == "0")
        best = best_of_grid(rows, table)
        missing = float(best["balanced"]) - float(default["balanced"])
        (default_mean, default_error), (best_mean, best_error) = (means_again(rows, table, each["setting"]) for each in (default, best))
        plain = 1 / (4 if table == "four classes" else 2)
        worthless = [row for row in own if float(row["balanced"]) < plain + DEGENERATE * (1 - plain)]
        silent = [row["setting"] for row in worthless if row["flagged"] == "0"]
        singly, again = ("within" if gap <= WITHIN else "NOT within" for gap in (missing, best_mean - default_mean))
        yield (
            f"{table}: defaults {float(default['balanced']):.3f} (lr {default['lr']}), best of the grid {float(best['balanced']):.3f} "
            f"({best['setting']}): {singly} {WITHIN:g}; run again {default_mean:.3f} ± "
            f"{default_error:.3f} and {best_mean:.3f} ± {best_error:.3f}: {again}; "
            f"{len(worthless)} runs learned nothing, without a warning: {', '.join(silent) or 'none'}"
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks private_defaults", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--tables", default=";".join(TABLES))
    chosen = parser.parse_args(arguments)
    names = [name.strip() for name in chosen.tables.split(";") if name.strip()]
    warnings.simplefilter("ignore")
    settings: dict[str, dict[str, Any]] = {"defaults": {}}
    settings |= {_label(values): dict(zip(("lr", "batch", "clip", "rounds"), values, strict=True)) for values in GRID}
    with threadpool_limits(1):
        for table in names:
            people = TABLES[table](data_directory(chosen.data_dir))

            def run(label: str, times: range, table: str = table, people: Population = people) -> None:
                done = {(row["table"], row["setting"], row["time"]) for row in read(chosen.out, FIELDS)}
                for number in times:
                    if (table, label, str(number)) not in done:
                        add(chosen.out, FIELDS, {"table": table, "setting": label, "time": number, **measured(people, settings[label])})

            for label in settings:
                run(label, range(1))
            for label in ("defaults", best_of_grid(read(chosen.out, FIELDS), table)["setting"]):
                run(label, range(1, 1 + AGAIN))
    for line in verdicts(read(chosen.out, FIELDS), names):
        print(line)
    return 0


def _label(values: Sequence[float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in zip(("lr", "batch", "clip", "rounds"), values, strict=True))
