"""The tests marked `gpu`; those of networks with every option of training are a row for each network."""

import subprocess
import sys
from functools import partial

from engine_scenes import EXTRAS, MODELS, TOLERANCES, differences

from .rows import ROOT, Figures, Floor, Missing, Row, Setting
from .training import fresh

__all__ = ["rows"]

COMMAND = (
    sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-q", "-rs", "-m", "gpu",
    "-k", "not equals_the_plain_loop", "tests/unit/engine/test_on_gpu.py",
)  # fmt: skip


def of_network(setting: Setting, name: str) -> Figures:
    """How far updates are from the plain loop's, with every option. Raises `ValueError` naming an option with which that is too far."""
    worst = dict.fromkeys(TOLERANCES, 0.0)
    with fresh(setting.device):
        for extra in EXTRAS[:1] if setting.tiny else EXTRAS:
            for dtype, apart in differences(name, extra, setting.device).items():
                if not apart <= TOLERANCES[dtype]:
                    raise ValueError(f"{extra or 'plain'} in {dtype}: {apart:.3g} apart")
                worst[dtype] = max(worst[dtype], apart)
    return dict(worst)


def tests(setting: Setting) -> Figures:
    """All of them. Raises `RuntimeError` naming those that fail."""
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if "No module named pytest" in done.stderr:
        raise Missing("No module named 'pytest'")
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        raise RuntimeError("; ".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or (lines or [done.stderr])[-1])
    if any(line.startswith("SKIPPED") for line in lines):
        raise Missing("no CUDA device")
    return {"note": lines[-1]}


def rows(setting: Setting) -> list[Row]:
    """Networks, then the other tests."""
    floor = Floor("float32", TOLERANCES["float32"], at_least=False)
    rows = [Row("device_tests", f"network {name}", partial(of_network, name=name), floor, limit=120.0) for name in MODELS]
    return [*rows, Row("device_tests", "tests marked gpu", tests, limit=180.0)]
