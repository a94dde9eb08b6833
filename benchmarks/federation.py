"""The federation beside that of an earlier commit, by default f6f9762: processor time and peak memory.

    python -m benchmarks federation [WORD ...] [--quick] [--check] [--old COMMIT]

The old commit is unpacked into a temporary folder. Every measurement is a process of its own, with PYTHONPATH set to one of the two trees
and one intra-op thread; old and new take turns. Seconds are those of the processor in the measured part alone, after a warm-up; the set-up
is timed apart. Ratios are new / old of a pair of measurements, so **below 1 the new one is quicker or smaller**; their median is held
against the limit. Beside it stands `best`, the least new seconds over the least old ones, which a busy machine disturbs less.

Words choose rows; `--quick` takes fewer pairs, of 100 clients at most; with `--check` the exit code is 1 if a limit is missed or a
measurement failed.

A scenario uses what both versions have: `parse_config`, `prepare`, `begin`, `start`, `advance`, the command line; and `old_bytes` or
`new_bytes`, the adapters to one version each.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "OLD", "ROOT", "SCENARIOS", "Scenario", "chosen", "environment", "exit_code", "main", "measured", "memory_used", "old_tree",
    "population", "processor_seconds", "row", "table",
]  # fmt: skip

OLD = "f6f9762"
ROOT = Path(__file__).resolve().parents[1]
PAIRS, QUICK_PAIRS = 5, 3
MEMORY_LIMIT = 1.1


@dataclass(frozen=True)
class Scenario:
    """What one process measures.

    limit: the largest ratio of seconds. part: "rounds" is `times` rounds after one; "begin" is the algorithm's beginning, where PACFL
    compares and clusters, `times` times; "bytes" is rounds over the transport that encodes every message; "run" is a whole `cflpriv run`
    of the file `example` with `changes`. sections: what the experiment has beside `COMMON`. side: pixels along an image's edge. needs: a
    folder in CFLPRIV_DATA. pairs: of measurements; fewer for the longest.
    """

    limit: float
    clients: int = 0
    times: int = 1
    part: Literal["rounds", "begin", "bytes", "run"] = "rounds"
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    side: int = 8
    example: str = ""
    changes: tuple[str, ...] = ()
    needs: str = ""
    pairs: int = PAIRS

    def tree(self) -> dict[str, Any]:
        """The experiment's sections, for `parse_config`; those of a whole run are in its file."""
        common = {**COMMON, "data": {"clients": self.clients}}
        return {name: {**common.get(name, {}), **self.sections.get(name, {})} for name in {**common, **self.sections}}


COMMON: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": 16},
    "training": {"rounds": 100, "epochs": 1, "batch_size": 10, "lr": 0.1, "weights": "equal"},
    "algorithm": {"name": "fedavg"},
    "run": {"evaluate_every": 1000},  # no measured round is evaluated
}
"""MLP 64-16-10 on 40 samples a client, all clients in every round."""
PACFL: dict[str, Any] = {"algorithm": {"name": "pacfl", "p": 3, "k": 2}}
IFCA2: dict[str, Any] = {"algorithm": {"name": "ifca", "k": 2}}
IFCA4: dict[str, Any] = {"algorithm": {"name": "ifca", "k": 4}}
SCAFFOLD: dict[str, Any] = {"algorithm": {"name": "scaffold"}}
HAAR: dict[str, Any] = {"protection": {"sum": "haar"}}
HAAR_GRAM: dict[str, Any] = {**PACFL, "protection": {"gram": ["haar"]}}
PASSIVE: dict[str, Any] = {"protection": {"sum": "secagg", "secagg_mode": "passive"}}
ACTIVE: dict[str, Any] = {"protection": {"sum": "secagg", "secagg_mode": "active"}}
OBLIVIOUS: dict[str, Any] = {**IFCA2, "protection": {"sum": "secagg-oblivious"}}
CKKS: dict[str, Any] = {**PACFL, "protection": {"gram": ["ckks"], "ckks_workers": 1}}
SAMPLE: dict[str, Any] = {"privacy": {"unit": "sample", "epsilon": 8.0, "delta": 1e-5, "samples": 40}}
CLIENT: dict[str, Any] = {"privacy": {"unit": "client", "epsilon": 8.0, "delta": 1e-4}}
BIG: dict[str, Any] = {"model": {"hidden": 200}}
SPAN: dict[str, Any] = {**BIG, "training": {"batch_size": 0}}
SECURE = ("protection.sum='secagg'", "protection.gram=['haar']")

SCENARIOS: dict[str, Scenario] = {
    "no protection, 100 clients": Scenario(1.3, 100, 30),
    "no protection, 1000 clients": Scenario(1.3, 1000, 5),
    "haar sum, 100 clients": Scenario(1.3, 100, 15, sections=HAAR),
    "haar sum, 1000 clients": Scenario(1.3, 1000, 4, sections=HAAR),
    "haar gram, PACFL begins, 100 clients": Scenario(1.3, 100, 20, "begin", HAAR_GRAM),
    "haar gram, PACFL begins, 1000 clients": Scenario(1.3, 1000, 2, "begin", HAAR_GRAM),
    "IFCA k = 2, 100 clients": Scenario(1.3, 100, 20, sections=IFCA2),
    "IFCA k = 4, 100 clients": Scenario(1.3, 100, 20, sections=IFCA4),
    "IFCA k = 4, 1000 clients": Scenario(1.3, 1000, 4, sections=IFCA4),
    "SCAFFOLD, 100 clients": Scenario(1.3, 100, 20, sections=SCAFFOLD),
    "SCAFFOLD, 1000 clients": Scenario(1.3, 1000, 4, sections=SCAFFOLD),
    "secagg passive, 100 clients": Scenario(1.15, 100, 3, sections=PASSIVE),
    "secagg passive, 1000 clients": Scenario(1.3, 1000, 1, sections=PASSIVE, pairs=3),
    "secagg active, 100 clients": Scenario(1.15, 100, 2, sections=ACTIVE),
    "secagg-oblivious, IFCA k = 2, 100 clients": Scenario(1.15, 100, 2, sections=OBLIVIOUS),
    "CKKS, PACFL begins, 20 clients": Scenario(1.2, 20, 3, "begin", CKKS),
    "CKKS, PACFL begins, 100 clients": Scenario(1.2, 100, 1, "begin", CKKS),
    "privacy of samples, 100 clients": Scenario(1.35, 100, 15, sections=SAMPLE),
    "privacy of samples, 1000 clients": Scenario(1.35, 1000, 3, sections=SAMPLE),
    "privacy of clients, 100 clients": Scenario(1.5, 100, 20, sections=CLIENT),
    "privacy of clients, 1000 clients": Scenario(1.5, 1000, 5, sections=CLIENT),
    "big model, 100 clients": Scenario(1.3, 100, 5, sections=BIG, side=28),
    "big model, 1000 clients": Scenario(1.3, 1000, 1, sections=BIG, side=28, pairs=3),
    "big model, full batch, 1000 clients": Scenario(1.3, 1000, 3, sections=SPAN, side=28),
    "bytes transport, 100 clients": Scenario(0.5, 100, 5, "bytes"),
    "run pacfl_digits": Scenario(1.1, part="run", example="pacfl_digits.toml"),
    "run pacfl_digits, secagg and haar gram": Scenario(1.1, part="run", example="pacfl_digits.toml", changes=SECURE),
    "run pacfl_fmnist, 10 rounds": Scenario(
        1.1, part="run", example="pacfl_fmnist.toml", changes=("training.rounds=10",), needs="fashion_mnist", pairs=3
    ),
}
"""Name of a row -> what it measures."""


# --- in the measuring process


def population(clients: int, side: int, samples: int = 40) -> Any:
    """Clients with images around ten centres, made from a seed. Labels of odd clients are shifted by five, so there are two groups."""
    import numpy as np

    from cflpriv.types import ClientData, Population

    rng = np.random.default_rng(0)
    centres = rng.random((10, 1, side, side), dtype=np.float32)
    made = []
    for client in range(clients):
        y = rng.integers(10, size=samples + 2)
        x = np.float32(0.7) * centres[y] + np.float32(0.3) * rng.random((len(y), 1, side, side), dtype=np.float32)
        shifted = (y + 5 * (client % 2)) % 10
        made.append(ClientData(client, x[:samples], shifted[:samples], x[samples:], shifted[samples:]))
    return Population("synthetic", tuple(made), tuple(client % 2 for client in range(clients)), 10)


def old_bytes(config: Any, clients: Any) -> Any:
    """ADAPTER to f6f9762: a federation over loopback.py among the tests of the tree that `cflpriv` comes from, its clients enrolled."""
    sys.path += [str(_home() / "tests" / "helpers"), str(_home() / "tests")]
    return importlib.import_module("loopback").remote(clients, config.protection)[1]


def new_bytes(config: Any, clients: Any) -> Any:
    """ADAPTER to the version under test: a simulated federation whose messages are encoded."""
    from cflpriv.contract.transcript import Transcript
    from cflpriv.transports.simulation import simulate

    return simulate(clients.clients, protection=config.protection, seed=1, transport="bytes", transcript=Transcript("full")).federation


def _home() -> Path:
    """The tree that `cflpriv` comes from."""
    import cflpriv

    return Path(cflpriv.__file__).resolve().parents[1]


def memory_used(name: Literal["VmRSS", "VmHWM"]) -> float:
    """MiB that this process holds (VmRSS), or has held at most (VmHWM). Elsewhere than on Linux always VmHWM.

    `ru_maxrss` would not do on Linux: a new process begins with what its parent held.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text(encoding="utf-8").splitlines() if line.startswith(name)) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def processor_seconds(step: Callable[[], object], times: int = 1) -> float:
    """Seconds of the processor that a step takes.

    What is there before is collected and then left alone: a full collection takes longer than many rounds, and into which process's
    measured part the next would fall is chance.
    """
    gc.collect()
    gc.freeze()
    began = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - began) / times


def measured(scenario: Scenario) -> dict[str, float]:
    """Seconds of the processor (a round, a beginning or the run), and of the set-up; MiB at the peak, and before the set-up."""
    from cflpriv.experiments import parse_config

    whole = scenario.part == "run"
    settings = (None, None) if whole else (parse_config(scenario.tree()), population(scenario.clients, scenario.side))
    before = memory_used("VmRSS")
    setup, seconds = {"rounds": _rounds, "begin": _beginnings, "bytes": _over_bytes, "run": _run}[scenario.part](scenario, *settings)
    return {"seconds": seconds, "setup": setup, "before": before, "peak": memory_used("VmHWM")}


def _rounds(scenario: Scenario, config: Any, clients: Any) -> tuple[float, float]:
    from cflpriv.experiments import advance, start

    made: list[Any] = []
    setup = processor_seconds(lambda: made.append(start(config, population=clients)))
    made[0].rows.append({"round": 0, "skipped": None})  # round 0 is always evaluated, which would hide what the federation holds
    advance(made[0])
    seconds = processor_seconds(lambda: advance(made[0]), scenario.times)
    if skipped := [row["skipped"] for row in made[0].rows if row["skipped"]]:
        raise RuntimeError(f"a round was skipped: {skipped[0]}")
    return setup, seconds


def _beginnings(scenario: Scenario, config: Any, clients: Any) -> tuple[float, float]:
    run = importlib.import_module("cflpriv.experiments.run")
    if not hasattr(run, "begin"):  # a folder in later commits
        run = importlib.import_module("cflpriv.experiments.run.run")
    run.start(config, population=replace(clients, clients=clients.clients[:10], groups=clients.groups[:10]))
    made: list[Any] = []
    setup = processor_seconds(lambda: made.append(run.prepare(config, population=clients)), scenario.times)
    return setup, processor_seconds(lambda: run.begin(made.pop()), scenario.times)


def _over_bytes(scenario: Scenario, config: Any, clients: Any) -> tuple[float, float]:
    algorithm = config.algorithm_for(clients)
    made: list[Any] = []
    new = (_home() / "cflpriv" / "transports").is_dir()
    setup = processor_seconds(lambda: made.append((new_bytes if new else old_bytes)(config, clients)))
    federation = made[0]
    state, numbers = algorithm.init(federation), itertools.count()

    def step() -> None:
        nonlocal state
        federation.begin_round(next(numbers))
        state, _ = algorithm.round(federation, state)

    step()
    return setup, processor_seconds(step, scenario.times)


def _run(scenario: Scenario, config: None, clients: None) -> tuple[float, float]:
    """The set-up is a run of one round, which warms up."""
    from cflpriv.cli import app

    def run(out: str, *more: str) -> None:
        sets = [word for change in (*scenario.changes, *more) for word in ("--set", change)]
        with contextlib.redirect_stdout(io.StringIO()):
            app(["run", str(_home() / "examples" / scenario.example), "--out", out, *sets], standalone_mode=False)

    with tempfile.TemporaryDirectory() as folder:
        return processor_seconds(lambda: run(f"{folder}/warm", "training.rounds=1")), processor_seconds(lambda: run(f"{folder}/run"))


# --- in the process that compares


@contextlib.contextmanager
def old_tree(commit: str = OLD) -> Iterator[Path]:
    """The tree of the old commit in a temporary folder. Raises `LookupError` where the clone does not have it."""
    made = subprocess.run(["git", "-C", str(ROOT), "archive", "--format=tar", commit], capture_output=True)
    if made.returncode:
        raise LookupError(f"federation: not compared, for this is no clone with commit {commit} (git fetch --unshallow)")
    with tempfile.TemporaryDirectory(prefix="cflpriv-") as folder:
        with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
            archive.extractall(folder, filter="data")
        old = Path(folder).resolve()
        for home in (old, ROOT):  # compiled files change times: both trees have theirs in the same place
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(home / "cflpriv")], env=environment(home, old), check=True)
        yield old


def environment(home: Path, old: Path) -> dict[str, str]:
    data = str(Path(os.environ.get("CFLPRIV_DATA", "data")).resolve())
    ours = {"PYTHONPATH": str(home), "PYTHONPYCACHEPREFIX": str(old / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}
    return {**os.environ, **ours, "OMP_NUM_THREADS": "1", "CFLPRIV_DATA": data}


def _once(name: str, home: Path, old: Path) -> dict[str, float]:
    """A measurement in a fresh process. Raises `RuntimeError` with the last line that it wrote."""
    done = subprocess.run(
        [sys.executable, "-P", __file__, name], env=environment(home, old), capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        version = "old" if home == old else "new"
        raise RuntimeError(f"{version}: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def row(name: str, pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, Any]:
    """What pairs of measurements (old, new) come to. With big models memory is what was added to imports and data, else all of it."""
    scenario = SCENARIOS[name]

    def held(row: Mapping[str, float]) -> float:
        return row["peak"] - (row["before"] if scenario.side > 8 else 0.0)

    ratios = [new["seconds"] / old["seconds"] for old, new in pairs]
    ratio, memory = statistics.median(ratios), statistics.median(held(new) / held(old) for old, new in pairs)
    best = min(new["seconds"] for _, new in pairs) / min(old["seconds"] for old, _ in pairs)  # of the least disturbed measurements
    middle = {
        f"{version}_{key}": statistics.median(pair[place][key] for pair in pairs)
        for place, version in enumerate(("old", "new"))
        for key in ("seconds", "setup", "before", "peak")
    }
    return {
        "name": name, "ratio": ratio, "low": min(ratios), "high": max(ratios), "best": best, "limit": scenario.limit, "memory": memory,
        "memory_limit": MEMORY_LIMIT, "holds": ratio <= scenario.limit and memory <= MEMORY_LIMIT, "pairs": len(pairs), **middle,
    }  # fmt: skip


def _compared(name: str, old: Path, count: int) -> dict[str, Any]:
    needs = SCENARIOS[name].needs
    if needs and not Path(os.environ.get("CFLPRIV_DATA", "data"), needs).is_dir():
        return {"name": name, "holds": None, "note": f"skipped: {needs} is not in CFLPRIV_DATA"}
    try:
        pairs = []
        for _ in range(count):
            pairs.append((_once(name, old, old), _once(name, ROOT, old)))
            print(".", end="", flush=True)
        return row(name, pairs)
    except RuntimeError as error:
        return {"name": name, "holds": False, "note": f"failed: {error}"}


def chosen(words: Sequence[str], quick: bool) -> list[str]:
    """The scenarios whose names hold one of the words; all without words."""
    names = [name for name in SCENARIOS if not words or any(word.lower() in name.lower() for word in words)]
    return [name for name in names if not quick or not (SCENARIOS[name].clients > 100 or SCENARIOS[name].needs)]


def table(names: Sequence[str], quick: bool = False, commit: str = OLD) -> list[dict[str, Any]]:
    """Measure scenarios, and print each row when it is done. Rows not measured have a `note`. `LookupError` without the old commit."""
    rows: list[dict[str, Any]] = []
    columns = ("new/old", "low", "high", "best", "limit", "memory", "limit", "holds")
    heads = (f"{column:>7}" for column in columns)
    with old_tree(commit) as old:
        print(f"{'federation, against ' + commit:<44}{'':<6}", *heads, "  old, new: seconds; set-up; peak MiB (growth)")
        for name in names:
            print(f"{name:<44}", end="", flush=True)
            rows.append(row := _compared(name, old, QUICK_PAIRS if quick else SCENARIOS[name].pairs))
            if "note" in row:
                print(f" {row['note']}", flush=True)
                continue
            figures = [f"{row[key]:>7.2f}" for key in ("ratio", "low", "high", "best", "limit", "memory", "memory_limit")]
            seconds, setup = (f"{row[f'old_{key}']:.4f}, {row[f'new_{key}']:.4f}; " for key in ("seconds", "setup"))
            peaks = ", ".join(f"{row[f'{v}_peak']:.0f} ({row[f'{v}_peak'] - row[f'{v}_before']:+.0f})" for v in ("old", "new"))
            dots = " " * (6 - row["pairs"])
            print(dots, *figures, f"{'yes' if row['holds'] else 'NO':>7}", f"  {seconds}{setup}{peaks}", flush=True)
    return rows


def exit_code(rows: Sequence[Mapping[str, Any]]) -> int:
    """1 where a limit is missed or a measurement failed. What was skipped is neither."""
    return int(any(row["holds"] is False for row in rows))


def main(arguments: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """The rows, and the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks federation", description="The federation beside that of an earlier commit.")
    parser.add_argument("words", nargs="*", help="rows whose names hold one of these words; default all")
    parser.add_argument("--quick", action="store_true", help="fewer pairs, and 100 clients at most")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is missed")
    parser.add_argument("--old", default=OLD, metavar="COMMIT", help=f"the earlier commit; default {OLD}")
    options = parser.parse_args(arguments)
    if not (names := chosen(options.words, options.quick)):
        parser.error(f"no name holds {' or '.join(map(repr, options.words))}; available: {'; '.join(SCENARIOS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the temporary folder and the measuring process go then, too
    try:
        rows = table(names, options.quick, options.old)
    except LookupError as error:
        print(error)
        return [], 1 if options.check else 0
    return rows, exit_code(rows) if options.check else 0


if __name__ == "__main__":
    if _home() != Path(os.environ["PYTHONPATH"]):
        sys.exit(f"cflpriv comes from {_home()}, not from {os.environ['PYTHONPATH']}")
    importlib.import_module("torch").set_num_threads(1)
    print(json.dumps(measured(SCENARIOS[sys.argv[1]])))
