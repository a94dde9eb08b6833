"""The example of own data runs and is audited, and its run folder is found from any working directory."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from checkout import EXAMPLES
from command_line import in_process

from cflpriv.experiments import load_config

SHORT = ("--set", "training.rounds=2", "--set", "algorithm.name=fedavg")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example's configuration beside the table that its script makes, in a folder of its own."""
    for name in ("make_own_csv.py", "own_csv.toml"):
        shutil.copy(EXAMPLES / name, tmp_path / name)
    found = importlib.util.spec_from_file_location("make_own_csv", tmp_path / "make_own_csv.py")
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    made.write(tmp_path / "own.csv")
    return tmp_path / "own_csv.toml"


def test_a_run_folder_is_found_from_any_folder(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CFLPRIV_DATA", raising=False)
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert in_process(monkeypatch, "run", str(example), *SHORT, "--out", str(out)) == 0
    assert load_config(out / "config.toml").data.paths == (str(tmp_path / "own.csv"),)
    assert json.loads((out / "measured.json").read_text(encoding="utf-8"))["class_names"] == ["none", "relapse"]
    monkeypatch.chdir("/")
    assert in_process(monkeypatch, "run", str(example), *SHORT, "--out", str(out), "--resume") == 0
    assert "this run is done" in capsys.readouterr().out
    assert in_process(monkeypatch, "audit", str(out), "--attacks", "label_inference", "--budget", "quick") == 0


@pytest.mark.slow
def test_a_run_remembers_its_data_directory(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CFLPRIV_DATA", raising=False)
    (tmp_path / "sets").mkdir()
    shutil.move(tmp_path / "own.csv", tmp_path / "sets" / "own.csv")
    monkeypatch.chdir(tmp_path)
    assert in_process(monkeypatch, "run", str(example), *SHORT, "--data-dir", "sets", "--out", "run") == 0
    monkeypatch.chdir("/")
    words = ("--attacks", "label_inference", "--budget", "quick")
    assert in_process(monkeypatch, "audit", str(tmp_path / "run"), *words) == 0
    (tmp_path / "sets").rename(tmp_path / "moved")
    assert in_process(monkeypatch, "audit", str(tmp_path / "run"), *words) == 2, "what is gone is not found"
    assert in_process(monkeypatch, "audit", str(tmp_path / "run"), *words, "--data-dir", str(tmp_path / "moved")) == 0


@pytest.mark.slow
def test_the_example_is_audited(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    assert in_process(monkeypatch, "run", str(example), "--out", str(out)) == 0
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["ari"] == 1.0
    assert in_process(monkeypatch, "audit", str(out), "--budget", "quick") == 0
    assert in_process(monkeypatch, "report", str(out)) == 0
    assert len(json.loads((out / "audit.json").read_text(encoding="utf-8"))["cells"]) > 10
