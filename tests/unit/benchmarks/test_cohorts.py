"""`benchmarks/cohorts.py`: the memory of a round does not grow with its clients, and the model is that of all updates at once."""

import json
import subprocess
import sys
from typing import Any

import pytest
from checkout import ROOT

from cflpriv.engine.compiled import library

CLIENTS = 60
"""Of 38 MiB each, more than are held at once."""
MOST_MODELS = 6.0


def measured(protection: str, way: str = "portions") -> Any:
    command = [sys.executable, "-m", "benchmarks", "cohorts", "--one", str(CLIENTS), protection, way]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and glibc hands memory back")
@pytest.mark.skipif(library() is None, reason="torch's loop holds gradients, too")
@pytest.mark.parametrize("protection", ["none", "one_message"])
def test_a_round_takes_fewer_than_six_models(protection: str) -> None:
    assert measured(protection)["models"] < MOST_MODELS


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(library() is None, reason="torch rounds by who is computed together")
def test_the_model_is_that_of_all_updates_at_once() -> None:
    few, whole = measured("none"), measured("none", "at once")
    assert few["digest"] == whole["digest"]
    assert whole["models"] > CLIENTS
