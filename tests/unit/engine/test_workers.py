"""Scripts without `if __name__ == "__main__":` that start worker processes end with one line that names it, once."""

import subprocess
import sys
from pathlib import Path

import pytest

from cflpriv.engine.workers import UNGUARDED

TREE = """
tree = {"data": {"clients": 4}, "model": {"name": "linear"}, "training": {"rounds": 1}, "algorithm": {"name": "fedavg"}}
"""
SWEEP = """
from cflpriv.experiments.sweep.sweep import parse_sweep
from cflpriv.experiments.sweep.sweep_runs import run_sweep
run_sweep(parse_sweep(tree | {"sweep": {"seeds": [0, 1]}}), "out")
"""
WORKERS = """
from cflpriv.experiments import parse_config, run_experiment
run_experiment(parse_config(tree | {"run": {"workers": 2}}), "out")
"""


@pytest.mark.slow
@pytest.mark.parametrize("calls", [SWEEP, WORKERS], ids=["sweep", "workers"])
def test_a_script_without_a_guard_is_told_so(calls: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TREE + calls, encoding="utf-8")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, encoding="utf-8", cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"cflpriv.errors.InputError: {UNGUARDED}"
    assert not list(tmp_path.glob("out/failed/*")), "no run has failed: none has begun"
