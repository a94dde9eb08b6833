"""`make gpu`: what only a CUDA device can show, in parts of less than nine minutes, with the packages that are there.

`python -m benchmarks gpu [--out gpu.json] [--part NAME] [--device cpu] [--tiny]`. Each part runs in a process of its own, and its result is
written when it ends; a call after an interruption makes the parts that are missing. `--part` makes one, again if need be. What needs a
package or data that are not there is skipped, with the reason. On a machine without a device `--device cpu` is a rehearsal: it shows that
the parts run, and measures no GPU. `python -m benchmarks --write` puts a report into docs/measurements.md; a rehearsal it refuses.

Times are wall times of work that has ended on the device; "ratio" is theirs / ours, the median of pairs, so above 1 ours is quicker.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["PARTS", "Setting", "main", "table", "write"]

ROOT = Path(__file__).parent.parent
LIMIT = 530
"""Seconds of a part, with what it starts."""
MARKS = "<!-- gpu: begin -->", "<!-- gpu: end -->"


@dataclass(frozen=True)
class Setting:
    """Where a part computes, and whether it takes the smallest case, to rehearse it."""

    device: str
    tiny: bool


class Missing(Exception):
    """A package or data that a part needs."""


def tests(setting: Setting) -> dict[str, Any]:
    """The tests marked `gpu`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rs",
        "-m",
        "gpu",
        "tests/cflpriv/test_on_gpu.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace")
    if "No module named pytest" in done.stderr:
        raise Missing("no module named 'pytest'")
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        raise RuntimeError("; ".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or (lines or [done.stderr])[-1])
    if any(line.startswith("SKIPPED") for line in lines):
        raise Missing("no CUDA device")
    return {"note": "all passed"}


def engine(setting: Setting, clients: int) -> dict[str, Any]:
    """A round of LeNet-5 training against the eager loop on the same device."""
    from . import engine as rows

    return rows.on_gpu(2 if setting.tiny else clients, 1 if setting.tiny else 5, setting.device, 20 if setting.tiny else 500)


def algebra(setting: Setting) -> dict[str, Any]:
    """Signatures of 20 clients and all angles of 1000 on the device against the CPU."""
    import numpy as np

    from cflpriv.clustering.similarity import Gram, angles
    from cflpriv.engine.device import CPU, Device, using
    from cflpriv.tasks.signatures import principal_vectors

    from .engine import interleaved

    rng, n = np.random.default_rng(0), 30 if setting.tiny else 1000
    vectors = np.linalg.qr(rng.normal(size=(n, 784, 3)))[0].transpose(0, 2, 1).copy()
    samples = [rng.random((500, 784)) for _ in range(1 if setting.tiny else 20)]

    def on(device: Device, work: Callable[[], object]) -> None:
        with using(device):
            work()

    there, figures = Device(setting.device), {}
    for name, work in (
        ("angles", lambda: angles(Gram.of_vectors(range(n), vectors))),
        ("signatures", lambda: [principal_vectors(x, 3) for x in samples]),
    ):
        figures[name] = statistics.median(interleaved(partial(on, there, work), partial(on, CPU, work), 3))
    return {
        "ratio": figures["angles"],
        "against": "numpy on the CPU",
        "note": f"angles of {n} clients; signatures {figures['signatures']:.2f}",
    }


def _run(setting: Setting, folder: Path, example: str, changes: Sequence[str]) -> dict[str, Any]:
    from cflpriv.experiments import load_config, run_experiment

    return dict(run_experiment(load_config(ROOT / "examples" / example, [f"run.device={setting.device}", *changes]), folder))


def whole_run(setting: Setting) -> dict[str, Any]:
    """examples/pacfl_fmnist.toml, with what its clusters are."""
    if not Path(os.environ.get("CFLPRIV_DATA", ROOT / "data"), "fashion_mnist").is_dir():
        raise Missing("fashion_mnist is not in CFLPRIV_DATA")
    with tempfile.TemporaryDirectory() as folder:
        changes = ["training.rounds=1", "data.clients=10", "data.samples_per_client=40"] if setting.tiny else []
        summary = _run(setting, Path(folder) / "run", "pacfl_fmnist.toml", changes)
    return {
        "seconds": summary["seconds"],
        "note": f"{summary['rounds']} rounds, accuracy {summary['accuracy_mean']:.3f}, ARI {summary['ari']:.2f}",
    }


def audit(setting: Setting) -> dict[str, Any]:
    """A quick audit of a run of the digits, both on the device."""
    from cflpriv.attacks.audit import audit_run

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        changes = ["training.rounds=1", "data.clients=4"] if setting.tiny else []
        _run(setting, place, "pacfl_digits.toml", ["run.record=full", *changes])
        begun = time.perf_counter()
        attacks = ("label_inference",) if setting.tiny else None
        cells = audit_run(place, adversary="server", attacks=attacks, budget="quick", device=setting.device)
        return {"seconds": time.perf_counter() - begun, "note": f"budget quick, {len(cells)} figures"}


def inversion(setting: Setting) -> dict[str, Any]:
    """Batches of gradient inversions of 28×28 images, 40 iterations each, on the device against the CPU."""
    import numpy as np
    import torch

    from cflpriv.attacks.gradient_inversion import LocalSteps, invert_updates, unroll
    from cflpriv.engine.device import CPU, Device, using
    from cflpriv.engine.models import Model

    from .engine import interleaved

    side, model_of = (8, 2) if setting.tiny else (28, 40), "sigmoid_lenet"
    model, rng = Model(model_of, (1, side[0], side[0]), 10, dtype="float64"), np.random.default_rng(0)
    figures = {}
    for count in (2,) if setting.tiny else (8, 32, 128):
        x, y = rng.random((count, 1, *model.shape)), rng.integers(0, 10, (count, 1))
        starts = np.repeat(model.init(0)[None], count, axis=0)
        updates = unroll(model, LocalSteps())(torch.tensor(starts), torch.tensor(x), torch.tensor(y)).detach().numpy()

        def invert(device: Device, starts: Any = starts, updates: Any = updates, y: Any = y) -> None:
            with using(device):
                invert_updates(model, starts, updates, y, LocalSteps(), np.random.default_rng(1), iterations=side[1])

        figures[count] = statistics.median(interleaved(partial(invert, Device(setting.device)), partial(invert, CPU), 1))
    largest = max(figures)
    note = ", ".join(f"{count}: {ratio:.2f}" for count, ratio in figures.items())
    return {"ratio": figures[largest], "against": "the same on the CPU", "note": f"images at once: {note}"}


PARTS: Mapping[str, Callable[[Setting], dict[str, Any]]] = {
    "tests": tests,
    "engine, 10 clients": partial(engine, clients=10),
    "engine, 100 clients": partial(engine, clients=100),
    "engine, 1000 clients": partial(engine, clients=1000),
    "signatures and angles": algebra,
    "inversion": inversion,
    "audit": audit,
    "pacfl_fmnist": whole_run,
}
"""Name -> what measures it."""


def outcome(name: str, setting: Setting) -> dict[str, Any]:
    """A part's figures with "status" done, or why it was skipped or failed."""
    begun = time.perf_counter()
    try:
        made = {"status": "done", **PARTS[name](setting)}
    except (Missing, ModuleNotFoundError) as error:
        made = {"status": "skipped", "note": str(error)}
    except Exception as error:
        made = {"status": "failed", "note": f"{type(error).__name__}: {error}"}
    return made | {"took": round(time.perf_counter() - begun, 1)}


def measured(name: str, setting: Setting) -> dict[str, Any]:
    """The outcome of a part in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "row.json"
        words = ["gpu", "--one", name, "--out", str(answer), "--device", setting.device, *(["--tiny"] if setting.tiny else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, env=environment, timeout=LIMIT,
                capture_output=True, encoding="utf-8", errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"status": "failed", "note": f"not done after {LIMIT} s", "took": float(LIMIT)}
        if not answer.is_file():
            return {"status": "failed", "note": (done.stderr.strip().splitlines() or ["no message"])[-1], "took": 0.0}
        made: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return made


def machine(setting: Setting) -> dict[str, Any]:
    """What the parts ran on. `rehearsal`: not on a CUDA device."""
    import torch

    there = setting.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if there else "CPU", "rehearsal": not there or setting.tiny,
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    }  # fmt: skip


def table(report: Mapping[str, Any]) -> str:
    """The report as a Markdown table."""
    on = report["machine"]
    lines = [
        f"Measured on {on['device']}, torch {on['torch']} (`make gpu`).",
        "",
        "| part | ratio | seconds | against, or why not |",
        "|---|---|---|---|",
    ]
    if on["rehearsal"]:
        lines[0] = f"A rehearsal on {on['device']}, torch {on['torch']}: it measures no GPU."
    for name, row in report["parts"].items():
        figures = [f"{row[key]:.2f}" if row.get(key) is not None else "–" for key in ("ratio", "seconds")]
        words = [row["status"] if row["status"] != "done" else "", row.get("against", ""), row.get("note", "")]
        lines.append(f"| {name} | {figures[0]} | {figures[1]} | {': '.join(word for word in words if word)} |")
    return "\n".join(lines)


def write(report: Path, page: Path = ROOT / "docs" / "measurements.md") -> str:
    """Put a report's table between the marks on the page; a line that says so. Raises `ValueError` for a rehearsal, or without one."""
    if not report.is_file():
        raise ValueError(f"{report}: is missing; `make gpu` writes it")
    found = json.loads(report.read_text(encoding="utf-8"))
    if found["machine"]["rehearsal"]:
        raise ValueError(f"{report}: is a rehearsal, which measures no GPU; nothing is written")
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    if not mark:
        raise ValueError(f"{page}: has no lines {MARKS[0]} and {MARKS[1]}")
    page.write_text(f"{before}{MARKS[0]}\n{table(found)}\n{MARKS[1]}{after}", encoding="utf-8")
    return f"{page}: has {len(found['parts'])} parts of {report}"


def main(words: Sequence[str]) -> int:
    """Make the parts that are missing. Exit code 0 where none failed, 1 where one did, 2 where there is nothing to compute on."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--one", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest cases")
    asked = parser.parse_args(words)
    setting = Setting(asked.device, asked.tiny)
    if asked.one:
        asked.out.write_text(json.dumps(outcome(asked.one, setting)), encoding="utf-8")
        return 0
    import torch

    if setting.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; `python -m benchmarks gpu --device cpu --tiny` rehearses without one")
        return 2
    on, parts = machine(setting), dict[str, Any]()
    if asked.out.is_file():
        before = json.loads(asked.out.read_text(encoding="utf-8"))
        parts = before["parts"] if before["machine"] == on else {}
    for name in [asked.part] if asked.part else [name for name in PARTS if parts.get(name, {}).get("status", "failed") == "failed"]:
        parts[name] = measured(name, setting)
        ordered = {one: parts[one] for one in PARTS if one in parts}
        asked.out.write_text(json.dumps({"machine": on, "parts": ordered}, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {parts[name]['status']}, {parts[name]['took']} s, {parts[name].get('note', '')}", flush=True)
    print(table({"machine": on, "parts": parts}))
    return int(any(row["status"] == "failed" for row in parts.values()))
