"""Whole runs, the start of the program, and rounds of many clients: processor time beside that of an earlier commit, by default f6f9762.

    python -m benchmarks whole_runs [WORD ...] [--old COMMIT]

Every measurement is a process of its own with one intra-op thread; old and new take turns, on compiled files. Seconds are those of the
processor: of the whole process for commands, of one round after another for rounds. A line a row: the median of old / new over the pairs,
**above 1 the new one is quicker**, the smallest and largest, the ratio asked for, the medians of seconds and of MiB at the peak. Below the
rows of rounds stands how the time a client takes grows. Words choose rows; rows whose data are not in CFLPRIV_DATA are left out.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.federation import OLD, ROOT, environment, memory_used, old_tree, processor_seconds

__all__ = ["ROWS", "Row", "main", "ratios"]

START = "import cflpriv.cli; from cflpriv.experiments import load_config, run_experiment"

AUDIT = """
import json, time
from cflpriv import load_config, run_experiment
from cflpriv.attacks.audit import audit_run
run_experiment(load_config("{examples}/pacfl_digits.toml", %s), "{out}")
began = time.process_time()
audit_run("{out}", budget="standard", attacks=%s)
print(json.dumps({"seconds": time.process_time() - began}))
"""
IN_BOTH = [
    "signature_inversion", "label_inference", "anchor_counts", "gram_geometry", "sybil_span", "cluster_identity", "disaggregation",
    "key_recovery", "gradient_inversion", "membership", "property_inference", "model_inconsistency", "imprint", "influence",
]  # fmt: skip
"""Attacks of both commits, of which the old one has no other but `dp_audit`."""
PRIVATE = ['protection.gram=["haar"]', "protection.sum=secagg", 'run.audit_parties=["server", "client:0"]']


@dataclass(frozen=True)
class Row:
    """What is measured: a command line of `cflpriv`, Python code, or a round of `clients`. asked: the ratio old / new that is wanted.

    Code may print the seconds of what counts as its last line, as JSON.
    """

    asked: float
    command: tuple[str, ...] = ()
    code: str = ""
    clients: int = 0
    needs: str = ""
    pairs: int = 3

    def arguments(self, folder: str, home: Path) -> list[str]:
        """What Python is called with; `{examples}` of the tree `home` and `{out}` are folders."""
        if self.clients:
            return ["-m", "benchmarks.whole_runs", "--round", str(self.clients)]
        words = ("-c", self.code) if self.code else ("-m", "cflpriv.cli", *self.command)
        return [word.replace("{out}", f"{folder}/run").replace("{examples}", str(home / "examples")) for word in words]


ROWS = {
    "cflpriv list": Row(2.0, ("list",), pairs=5),
    "start of cflpriv run": Row(2.0, code=START, pairs=5),
    "pacfl_fmnist, 20 rounds": Row(1.6, ("run", "{examples}/pacfl_fmnist.toml", "--out", "{out}"), needs="fashion_mnist"),
    "IFCA, 1200 clients, 3 rounds": Row(
        1.4,
        (
            "run", "{examples}/ifca_rotated_mnist.toml", "--out", "{out}",
            "--set", "training.rounds=3", "--set", "algorithm.restarts=1", "--set", "algorithm.decide_after=0",
        ),
        needs="mnist", pairs=2,
    ),
    "standard audit of the demo's private run": Row(1 / 1.5, code=AUDIT % (PRIVATE, None)),
    "standard audit of the demo's open run": Row(1 / 1.5, code=AUDIT % ([], None)),
    "attacks of both on the demo's private run": Row(1.3, code=AUDIT % (PRIVATE, IN_BOTH)),
    "attacks of both on the demo's open run": Row(1.3, code=AUDIT % ([], IN_BOTH)),
    "a round of 1,000 clients": Row(1.0, clients=1_000, pairs=5),
    "a round of 100,000 clients": Row(4.0, clients=100_000, pairs=1),
}  # fmt: skip


def one_round(clients: int) -> dict[str, float]:
    """A round of FedAvg after one: an MLP of 2410 parameters, 16 samples a client, nobody evaluated."""
    import numpy as np

    from cflpriv.experiments import advance, parse_config, start
    from cflpriv.types import ClientData, Population

    rng = np.random.default_rng(0)
    x, y = rng.random((clients, 18, 1, 8, 8), dtype=np.float32), rng.integers(10, size=(clients, 18))
    data = tuple(ClientData(i, x[i, :16], y[i, :16], x[i, 16:], y[i, 16:]) for i in range(clients))
    sections: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": 32}, "data": {"clients": clients}, "algorithm": {"name": "fedavg"},
        "training": {"rounds": 100, "epochs": 1, "batch_size": 10, "lr": 0.1, "weights": "equal"}, "run": {"evaluate_every": 1000},
    }  # fmt: skip
    run = start(parse_config(sections), population=Population("synthetic", data, tuple(i % 2 for i in range(clients)), 10))
    run.rows.append({"round": 0, "skipped": None})  # round 0 is always evaluated
    advance(run)
    times = max(1, 10_000 // clients)
    return {"seconds": processor_seconds(lambda: advance(run), times), "peak": memory_used("VmHWM")}


def ratios(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> tuple[float, float, float]:
    """The median, smallest and largest old / new of pairs (old, new) of measurements."""
    each = [old["seconds"] / new["seconds"] for old, new in pairs]
    return statistics.median(each), min(each), max(each)


def _once(row: Row, home: Path, old: Path) -> dict[str, float]:
    """A measurement in a fresh process. Raises `RuntimeError` with the last line that it wrote."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        arguments = [sys.executable, "-P", *row.arguments(folder, home)]
        streams = [(os.POSIX_SPAWN_DUP2, out.fileno(), 1), (os.POSIX_SPAWN_DUP2, out.fileno(), 2)]
        surroundings = environment(home, old)
        (Path(folder) / "benchmarks").symlink_to(ROOT / "benchmarks")  # this file, whichever tree `cflpriv` comes from
        surroundings["PYTHONPATH"] = f"{folder}{os.pathsep}{home}"
        process = os.posix_spawn(sys.executable, arguments, surroundings, file_actions=streams)
        _, status, used = os.wait4(process, 0)
        out.seek(0)
        lines = out.read().decode(errors="replace").strip().splitlines()
        if status:
            raise RuntimeError((lines or [f"exit status {status}"])[-1])
        if row.clients:
            return dict(json.loads(lines[-1]))
        own = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        return {"seconds": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss / 1024} | own


def measured(name: str, old: Path) -> dict[str, Any]:
    """A row's figures; `_once` runs before, so that both trees are compiled and their files in memory."""
    row = ROWS[name]
    if row.command == ("list",):
        _once(row, old, old), _once(row, ROOT, old)
    pairs = [(_once(row, old, old), _once(row, ROOT, old)) for _ in range(row.pairs)]
    ratio, low, high = ratios(pairs)
    middle = {f"{v}_{key}": statistics.median(pair[i][key] for pair in pairs) for i, v in enumerate(("old", "new")) for key in pairs[0][0]}
    return {"name": name, "ratio": ratio, "low": low, "high": high, "asked": row.asked, **middle}


def main(words: Sequence[str]) -> int:
    """Print the rows that `words` choose. Exit code 2 if there is none, 1 without the old commit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks whole_runs")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--old", default=OLD, metavar="COMMIT")
    options = parser.parse_args(words)
    words = options.words
    names = [name for name in ROWS if not words or any(word.lower() in name.lower() for word in words)]
    if not names:
        print(f"no row holds {' or '.join(words)}; available: {'; '.join(ROWS)}")
        return 2
    print(f"{'against ' + options.old:<40} {'old/new':>8} {'low':>6} {'high':>6} {'asked':>6}  old, new: seconds; MiB", flush=True)
    each: dict[int, float] = {}
    try:
        with old_tree(options.old) as old:
            for name in names:
                if ROWS[name].needs and not Path(os.environ.get("CFLPRIV_DATA", "data"), ROWS[name].needs).is_dir():
                    print(f"{name:<40} skipped: {ROWS[name].needs} is not in CFLPRIV_DATA", flush=True)
                    continue
                row = measured(name, old)
                each[ROWS[name].clients] = row["new_seconds"] / max(ROWS[name].clients, 1)
                figures = f"{row['ratio']:>8.2f} {row['low']:>6.2f} {row['high']:>6.2f} {row['asked']:>6.1f}"
                seconds = f"{row['old_seconds']:.2f}, {row['new_seconds']:.2f}; {row['old_peak']:.0f}, {row['new_peak']:.0f}"
                print(f"{name:<40} {figures}  {seconds}", flush=True)
    except LookupError as error:
        print(error)
        return 1
    if {1_000, 100_000} <= set(each):
        print(f"a client of 100,000 takes {each[100_000] / each[1_000]:.2f} times one of 1,000 (asked: at most 1.3)")
    return 0


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(json.dumps(one_round(int(sys.argv[2]))))
