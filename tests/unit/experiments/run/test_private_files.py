"""Who may read what a run writes: secrets, updates, and what attacks made of them are their owner's alone."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from small_runs import configured

from cflpriv.attacks.audit import audit_run
from cflpriv.contract.transcript import cut_transcript
from cflpriv.experiments import run_experiment
from cflpriv.files import append, write_arrays, write_atomically, write_packed

BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 4, "samples_per_client": 20, "test_samples_per_client": 5, "rotations": [0, 90]},
    "model": {"name": "mlp", "hidden": 4},
    "training": {"rounds": 2, "epochs": 1, "batch_size": 10},
    "protection": {"gram": ["haar"], "sum": "none"},
    "algorithm": {"name": "pacfl"},
    "run": {"record": "full", "audit_parties": ["server", "client:1"]},
}
PRIVATE = {"transcript", "secrets", "checkpoints", "audit", "interrupted"}


def readable(folder: Path) -> set[str]:
    """The private files and folders that others on the machine can read."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.relative_to(folder).parts[0] in PRIVATE and stat.S_IMODE(path.stat().st_mode) & 0o077
    }


@pytest.fixture(autouse=True)
def _usual_umask() -> None:
    os.umask(0o022)


def test_what_a_run_keeps_of_clients_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_experiment(configured(BASE), folder)
    written = {path.name for path in folder.iterdir()}
    assert {"transcript", "secrets", "checkpoints"} <= written
    assert not readable(folder)
    cut_transcript(folder / "transcript", 1, folder / "interrupted" / "1")
    assert (folder / "interrupted" / "1" / "messages.jsonl").exists()
    assert readable(folder) == {"interrupted"}  # which shows the number of times


@pytest.mark.slow
def test_what_an_audit_makes_of_clients_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_experiment(configured(BASE), folder)
    audit_run(folder, adversary="server", attacks=["label_inference"], budget="quick")
    assert (folder / "audit").is_dir()
    assert not readable(folder)
    assert stat.S_IMODE((folder / "audit.json").stat().st_mode) == 0o600


def test_writers_of_arrays_write_private_files(tmp_path: Path) -> None:
    write_packed(tmp_path / "one.npz", {"a": [1.0]})
    write_arrays(tmp_path / "two.safetensors", {"a": [1.0]})
    write_atomically(tmp_path / "three", "words", 0o600)
    append(tmp_path / "four", "words", 0o600)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
