"""The tests marked `gpu`; those of networks with every option of training are a row for each network. And the tests of attacks, there."""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec

from engine_scenes import EXTRAS, MODELS, TOLERANCES, differences

from .rows import ROOT, Figures, Floor, Missing, Row, Setting
from .training import fresh

__all__ = ["rows"]

PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfEs")
MARKED = ("--noconftest", "-m", "gpu", "-k", "not equals_the_plain_loop", "tests/unit/engine/test_on_gpu.py")
OF_ATTACKS = (
    "-p", "on_device", "-m", "not slow and not gpu and not flower and not nvflare", "tests/unit/attacks",
    "--ignore", "tests/unit/attacks/inversion/test_captured_inversion.py",
)  # fmt: skip
"""Without those that pretend a device."""
PROCESSES = 8
"""For the tests of attacks, where pytest-xdist is there."""


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


def tests(setting: Setting, words: Sequence[str]) -> Figures:
    """All of them. Raises `RuntimeError` naming those that fail."""
    if setting.device == "cpu":
        raise Missing("no CUDA device")
    done = subprocess.run([*PYTEST, *words], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if "No module named pytest" in done.stderr:
        raise Missing("No module named 'pytest'")
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        raise RuntimeError("; ".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or (lines or [done.stderr])[-1])
    return {"note": lines[-1]}


def rows(setting: Setting) -> list[Row]:
    """Networks, then the other tests, those of attacks last."""
    floor = Floor("float32", TOLERANCES["float32"], at_least=False)
    rows = [Row("device_tests", f"network {name}", partial(of_network, name=name), floor, limit=120.0) for name in MODELS]
    several = ("-n", str(PROCESSES)) if find_spec("xdist") else ()
    return [
        *rows, Row("device_tests", "tests marked gpu", partial(tests, words=MARKED), limit=180.0),
        Row("device_tests", "tests of attacks", partial(tests, words=(*several, *OF_ATTACKS)), limit=300.0),
    ]  # fmt: skip
