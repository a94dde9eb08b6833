"""`make gpu`: what only a CUDA device can show, within a budget of seconds, with the packages that are there.

`python -m benchmarks gpu [--out gpu_report] [--budget 480] [--part NAME ...] [--device cpu] [--tiny]`. Rows are measured by a process of
their own, the most telling first, and `gpu.json` in the folder is rewritten after each. When the budget is used up, all that runs is ended;
the next call goes on with the rows that are missing. `--part` measures the rows of a part again. A row that needs a package or data that
are not there is skipped, with the reason. Where `make gpu-kit` has made `gpu_kit/`, its packages and data are used (`kit`).

On a machine without a device `--device cpu --tiny` is a rehearsal: it shows that the rows run, and measures no GPU.
`python -m benchmarks --write` keeps a report in docs/gpu.json, for docs/measurements.md; a rehearsal it refuses.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .kit import FOLDER, environment
from .report import read, table, write
from .rows import PARTS, Setting
from .session import NoDevice, Session
from .worker import work

__all__ = ["main", "write"]


def main(words: Sequence[str]) -> int:
    """Measure what is missing. Exit code 0 where no row failed, 1 where one did, 2 where there is nothing to compute on."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder of the report")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds of the whole call")
    parser.add_argument("--part", action="append", choices=PARTS, default=[], help="measure the rows of this part, again if need be")
    parser.add_argument("--kit", type=Path, default=FOLDER, help="packages and data that `make gpu-kit` collected")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest cases")
    parser.add_argument("--modules", type=lambda names: names.split(","), default=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    setting = Setting(asked.device, asked.tiny, asked.out.resolve())
    if asked.worker:
        work(setting, asked.modules)
        return 0
    try:
        setting.out.mkdir(parents=True, exist_ok=True)
        report = read(setting.out)
    except (OSError, ValueError) as error:
        print(error)
        return 2
    with tempfile.TemporaryDirectory(prefix="cflpriv-gpu-") as scratch:
        session = Session(setting, report, begun + asked.budget, asked.modules, environment(Path(scratch), asked.kit), begun)
        try:
            session.measure(asked.part)
        except NoDevice as error:
            print(error)
            return 2
        finally:
            if report.rows:
                print(table({"machine": report.machine, "rows": list(report.rows.values())}), flush=True)
    return int(bool(report.with_status("failed")))
