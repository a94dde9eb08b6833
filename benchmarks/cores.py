"""What the second core gains by default: wall time on one core over wall time on two, for a run, an audit and a sweep.

    python -m benchmarks cores [WORD ...]

The figures mean something on two quiet cores only; the load of the machine is printed first. Pairs of runs: the median, smallest and
largest ratio. Words choose rows.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.federation import ROOT

__all__ = ["ROWS", "main"]

PAIRS = 3
SWEEP = """
[sweep]
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
audit = false
"""
ROWS = {
    "pacfl_fmnist": ("run", "{examples}/pacfl_fmnist.toml", "--out", "{out}"),
    "standard audit": ("audit", "{recorded}"),
    "16-run sweep": ("sweep", "{sweep}", "--out", "{out}"),
}
"""Name -> command line of `cflpriv`."""


def called(command: Sequence[str], cores: int) -> float:
    """The wall time of a command of `cflpriv` on so many cores. Raises `RuntimeError` with its last line."""
    began = time.perf_counter()
    places = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        [sys.executable, "-m", "cflpriv.cli", *command], capture_output=True, encoding="utf-8", errors="replace", check=False,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        preexec_fn=lambda: os.sched_setaffinity(0, places),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return time.perf_counter() - began


def seconds(name: str, cores: int, folder: Path) -> float:
    """The wall time of a row on so many cores, in a folder of its own."""
    sweep, examples = folder / "sweep.toml", ROOT / "examples"
    base = (examples / "pacfl_digits.toml").read_text(encoding="utf-8")
    sweep.write_text(base + SWEEP, encoding="utf-8")
    if name == "standard audit":
        called(["run", str(examples / "pacfl_digits.toml"), "--out", str(folder / "recorded"), "--set", "run.record=full"], cores)
    places = {"examples": examples, "out": folder / "out", "recorded": folder / "recorded", "sweep": sweep}
    return called([word.format(**places) for word in ROWS[name]], cores)


def main(words: Sequence[str]) -> int:
    """Print the rows that `words` choose. Exit code 2 if there is none."""
    names = [name for name in ROWS if not words or any(word in name for word in words)]
    if not names:
        print(f"no row holds {' or '.join(words)}; available: {'; '.join(ROWS)}")
        return 2
    print(f"load {os.getloadavg()[0]:.1f}\n{'one core / two':<20} {'ratio':>6} {'low':>6} {'high':>6}", flush=True)
    for name in names:
        ratios = []
        for _ in range(PAIRS):
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
                ratios.append(seconds(name, 1, Path(one)) / seconds(name, 2, Path(two)))
        print(f"{name:<20} {statistics.median(ratios):>6.2f} {min(ratios):>6.2f} {max(ratios):>6.2f}", flush=True)
    return 0
