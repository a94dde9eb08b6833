"""The whole of `make gpu`, rehearsed on the CPU in a copy of the checkout, with the listed packages alone and then with the kit beside."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from listed_packages import only_listed, unlisted

from benchmarks.gpu.rows import PARTS, ROOT

BUDGET = 900
"""Seconds: a rehearsal takes one or two minutes on an idle machine."""


def copied(folder: Path) -> Path:
    """The files of the checkout that git does not ignore, as a machine with a device gets them."""
    listing = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def rehearsed(checkout: Path, out: Path, environment: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Part -> rows of a call, after which nothing else of the checkout has changed."""
    before = files(checkout)
    words = ["--device", "cpu", "--tiny", "--out", str(out), "--budget", str(BUDGET)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", *words], cwd=checkout, capture_output=True, text=True, encoding="utf-8",
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert files(checkout) == before
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads((out / "gpu.json").read_text(encoding="utf-8"))["rows"]:
        parts.setdefault(row["part"], []).append(row)
    return parts


@pytest.mark.slow
@pytest.mark.timeout(3 * BUDGET)
def test_with_the_listed_packages_every_row_runs_or_names_what_is_missing_and_with_the_kit_all_run(tmp_path: Path) -> None:
    checkout, out, environment = copied(tmp_path / "checkout"), tmp_path / "out", only_listed(tmp_path / "blocked")
    parts = rehearsed(checkout, out, environment)
    assert tuple(parts) == PARTS
    skipped = {row["note"] for rows in parts.values() for row in rows if row["status"] == "skipped"}
    without_device = {note for note in skipped if note.endswith("a CUDA device") or note == "no CUDA device"}
    no_data = {"fashion_mnist is not in CFLPRIV_DATA"}
    absent = {
        note.removeprefix("No module named ").strip("'") for note in skipped - without_device - {"fashion_mnist is not in CFLPRIV_DATA"}
    }
    assert absent <= unlisted(), skipped
    assert absent, "nothing was blocked"
    assert all(row["status"] == "done" for row in parts["training"])
    for part in ("ways", "audit", "whole_run", "profile", "device_tests"):
        assert any(row["status"] == "done" for row in parts[part]), part
    assert "No module named 'cryptography'" in {row["note"] for row in parts["private"]}, "noise needs it"
    made = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu-kit", "--python", f"{sys.version_info.major}.{sys.version_info.minor}"], cwd=checkout,
        capture_output=True, text=True, encoding="utf-8", env={**os.environ, "CFLPRIV_DATA": os.environ.get("CFLPRIV_DATA", "none")},
    )  # fmt: skip
    if "pip download" in made.stdout:
        pytest.skip(made.stdout.strip())  # no package index here
    assert made.returncode == 0, made.stdout + made.stderr
    parts = rehearsed(checkout, out, environment)
    skipped = {row["note"] for rows in parts.values() for row in rows if row["status"] == "skipped"}
    assert skipped == without_device | (no_data if "without" in made.stdout else set())
    assert len(list(out.iterdir())) <= 8
    assert all(path.stat().st_size < 2**24 for path in out.iterdir())
