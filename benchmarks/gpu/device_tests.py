"""The tests marked `gpu`, but for those that `agreement` has as rows."""

import subprocess
import sys

from .rows import ROOT, Figures, Missing, Row, Setting

__all__ = ["rows"]

COMMAND = (
    sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-q", "-rs", "-m", "gpu",
    "-k", "not equals_the_plain_loop", "tests/cflpriv/test_on_gpu.py",
)  # fmt: skip


def tests(setting: Setting) -> Figures:
    """All of them. Raises `RuntimeError` naming those that fail."""
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True)
    if "No module named pytest" in done.stderr:
        raise Missing("No module named 'pytest'")
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        raise RuntimeError("; ".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or (lines or [done.stderr])[-1])
    if any(line.startswith("SKIPPED") for line in lines):
        raise Missing("no CUDA device")
    return {"note": lines[-1]}


def rows(setting: Setting) -> list[Row]:
    """One row."""
    return [Row("device_tests", "tests marked gpu", tests, limit=180.0)]
