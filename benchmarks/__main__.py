"""`make bench`: every comparison the project claims, measured in one run; prints a table and writes benchmarks.json.

Each comparison runs in a process of its own, A B A B interleaved, one intra-op thread a process. An entry: name, ratio (median over the
pairs; above 1 ours is quicker), low, high, floor, stretch, against, note. Arguments select rows by words of their names.

`python -m benchmarks federation` compares the federation with an old commit, in a table of its own: see `federation`.
`python -m benchmarks robustness` measures what bad clients do, with and without robust means: see `robustness`.
`python -m benchmarks false_alarms` measures how often audits call something a leak where there is none: see `false_alarms`.
`python -m benchmarks planted_leaks` measures how often audits show leaks of stated size: see `planted_leaks`.
`python -m benchmarks remedies` measures whether the remedies that audits print lower what leaks: see `remedies`.
`python -m benchmarks dp_audits` measures how near bounds on epsilon come to claims: see `dp_audits`.
`python -m benchmarks attack_peers` compares inversions and membership with published attacks on the same models: see `attack_peers`.
`python -m benchmarks doubtful_evidence` measures how often the examination of another system's updates errs: see `doubtful_evidence`.
`python -m benchmarks folds` measures what false halves do to cross-fitted clustering: see `false_folds`.
`python -m benchmarks clustering` measures which methods find the groups with their defaults: see `clustering`.
`python -m benchmarks helps` measures when clusters help accuracy, beside random ones of the same sizes: see `helps`.
`python -m benchmarks advice` measures how near the advice on what to deploy comes to the best option in hindsight: see `advice`.
`python -m benchmarks drift` measures whether clients that turn reach their group, and how often others are moved: see `drift`.
`python -m benchmarks private_defaults` compares the values that private training gets by default with a grid: see `private_defaults`.
`python -m benchmarks private_recipe` trains the private recipe centrally with Opacus: see `private_recipe`.
`python -m benchmarks scale` measures what the test for groups costs the server with 1,000 and 10,000 clients: see `scale`.
`python -m benchmarks whole_runs` compares whole runs, the start of the program and large rounds with the old commit: see `whole_runs`.
`python -m benchmarks cohorts` measures the peak memory of a round with a large model: see `cohorts`.
`python -m benchmarks cores` measures what the second core gains in a run, an audit and a sweep: see `cores`.
`python -m benchmarks one_message` compares sums in one message with pairwise sums, by the processor time of all parties: see `one_message`.
`python -m benchmarks flower_rounds` times rounds on Flower with sums in one message beside pairwise ones: see `flower_rounds`.
`python -m benchmarks projections` computes what projections of masked vectors bound, and what they cost: see `projections`.
`python -m benchmarks gpu` measures what only a CUDA device shows (`make gpu`), and `--write` keeps its report for the documentation.
`python -m benchmarks.pages PAGE` prints a page of the documentation from its tables: see `pages`.
`python -m benchmarks gpu-kit` collects what a machine with a device lacks (`make gpu-kit`): see `gpu.kit`.
"""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from cflpriv.streams import printable_streams

ROWS = ("engine", "secagg", "ckks", "peers", "privacy", "attacks", "flower")
"""The modules whose comparisons `make bench` makes."""
TABLES = {
    "folds": "false_folds",
    "gpu-kit": "gpu.kit",
    **{
        name: name
        for name in (
            "advice",
            "attack_peers",
            "robustness",
            "clustering",
            "cohorts",
            "cores",
            "doubtful_evidence",
            "dp_audits",
            "flower_rounds",
            "drift",
            "helps",
            "private_defaults",
            "private_recipe",
            "scale",
            "false_alarms",
            "planted_leaks",
            "remedies",
            "whole_runs",
            "one_message",
            "projections",
            "gpu",
        )
    },
}
"""First word -> the module that prints a table of its own. Modules are imported when asked for: a machine may lack what others need."""


def comparisons() -> dict[str, Any]:
    """Name -> what measures it."""
    return {name: make for module in ROWS for name, make in import_module(f"benchmarks.{module}").COMPARISONS.items()}


def measured(name: str) -> dict[str, Any]:
    """One comparison in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "row.json"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", "--one", name, str(answer)],
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if not answer.exists():
            reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
            return {"name": name, "ratio": math.nan, "low": math.nan, "high": math.nan, "floor": math.nan, "against": "", "note": reason}
        row: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return {"name": name, **row}


def shown(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.2f}"


def compared(words: list[str]) -> list[dict[str, Any]]:
    """The rows of all comparisons, or of those whose names hold one of the words, printed as they are measured."""
    names = [name for name in comparisons() if not words or any(word.lower() in name.lower() for word in words)]
    print(f"{'comparison':<40} {'ratio':>8} {'low':>8} {'high':>8} {'floor':>8} {'stretch':>8}  against: note", flush=True)
    rows = []
    for name in names:
        row = measured(name)
        rows.append(row)
        figures = " ".join(f"{shown(row.get(key)):>8}" for key in ("ratio", "low", "high", "floor", "stretch"))
        print(f"{name:<40} {figures}  {row['against']}: {row['note']}", flush=True)
    return [{key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()} for row in rows]


def main(words: list[str]) -> int:
    if words[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if words and words[0] in TABLES:
        return int(import_module(f"benchmarks.{TABLES[words[0]]}").main(words[1:]))
    if words[:1] == ["--write"]:
        from .gpu import write

        try:
            print(write(Path(*words[1:2] or ["gpu_report/gpu.json"])))
        except ValueError as error:
            print(error)
            return 2
        return 0
    from . import federation

    alone = words[:1] == ["federation"]
    rows = [] if alone else compared(words)
    beside, code = federation.main(words[1:] if alone else ["--quick"]) if alone or not words else ([], 0)
    versions = {package: metadata.version(package) for package in ("cflpriv", "torch", "numpy", "scipy")}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version()}
    Path("benchmarks.json").write_text(
        json.dumps({"machine": machine, "versions": versions, "rows": rows, "federation": beside}, indent=1) + "\n", encoding="utf-8"
    )
    return code


if __name__ == "__main__":
    printable_streams()
    if sys.argv[1:2] == ["--one"]:
        Path(sys.argv[3]).write_text(json.dumps(comparisons()[sys.argv[2]]()), encoding="utf-8")
    else:
        try:
            sys.exit(main(sys.argv[1:]))
        except KeyboardInterrupt:
            sys.exit("interrupted")
