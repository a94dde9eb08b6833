"""The command line: what it says of itself, of mistakes and of runs."""

import io
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from command_line import in_process
from typer.testing import CliRunner

import cflpriv
from cflpriv import cli
from cflpriv.cli.predicting import warn_of_untrained
from cflpriv.console import defaults_text, row_text, summary_text
from cflpriv.errors import CflprivWarning, InputError, warn_in_lines
from cflpriv.experiments import Config
from cflpriv.experiments.sweep.sweep import _KEYS, MEANINGS

SUMMARY: dict[str, Any] = {
    "algorithm": "pacfl", "protection": "haar", "accuracy_mean": 0.5, "accuracy_worst": 0.25, "local_accuracy_mean": None, "clusters": 2,
    "true_groups": 3, "clients": 6, "ari": 0.5, "upload_bytes": 10**6, "download_bytes": 2 * 10**6,
}  # fmt: skip


def words_of(text: str) -> str:
    """Text without line breaks, frames and marks of emphasis."""
    return " ".join(re.sub(r"[│╭╮╰╯─]|\\(?=\[)", " ", text).split())


def texts(command: Any) -> list[str]:
    """The help of a command and of all its options."""
    return [command.help, *(one.help for one in command.params if getattr(one, "help", None) and not getattr(one, "hidden", False))]


@pytest.mark.parametrize("name", ["", "run", "sweep", "audit", "verify", "report", "export", "reproduce", "list"])
def test_help_is_printed_as_it_is_written(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are marks of emphasis in it; one that is not escaped would be lost, words and all."""
    group: Any = typer.main.get_command(cli.app)
    assert {"run", "sweep", "audit", "verify", "report", "export", "reproduce", "list"} <= set(group.commands)
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    assert in_process(monkeypatch, *([name] if name else []), "--help") == 0
    said = words_of(capsys.readouterr().out)
    for text in texts(group.commands[name] if name else group):
        assert words_of(text.replace("\\[", "[")) in said
    if name == "sweep":
        assert "[sweep] workers" in said


def test_the_version_has_one_source(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"cflpriv {cflpriv.__version__}\n"
    assert set(cflpriv.__all__) | {"__version__"} <= set(dir(cflpriv))
    assert not [name for name in dir(cflpriv) if not hasattr(cflpriv, name)]


def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = in_process(monkeypatch, *words)
    return code, capsys.readouterr().err


def test_mistakes_get_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    grid, plain = tmp_path / "grid.toml", tmp_path / "plain.toml"
    grid.write_text('[sweep]\nalgorithms = ["fedavg"]\n', encoding="utf-8")
    plain.write_text("[training]\nrounds = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for words, hint in [
        (["swep", str(grid)], "did you mean 'sweep'?"),
        (["run", str(grid)], "`cflpriv sweep`"),
        (["sweep", str(plain)], "`cflpriv run`"),
        (["run", str(plain), "--set", "training.rouns=2"], "did you mean 'rounds'?"),
        (["run", str(plain), "--set", "trainig.rounds=2"], "did you mean 'training'?"),
        (["run", str(plain), "--set", "algorithm.name=pacfll"], "did you mean 'pacfl'?"),
        (["run", str(plain), "--set", "protection.sum=hear"], "did you mean 'haar'?"),
        (["run", str(plain), "--set", "model.name=lenet"], "did you mean 'lenet5'?"),
        (["sweep", str(grid), "--set", 'sweep.attacks=["signature_inversio"]'], "did you mean 'signature_inversion'?"),
        (["reproduce", "pacfl-table-1"], "did you mean '"),
        (["run", str(plain), "--set", "run.workers=100000"], "run.workers = 100000: expected an integer in [1, 512]"),
        (["sweep", str(grid), "--set", "sweep.workers=100000"], "[sweep] workers = 100000: expected an integer in [1, 512]"),
        (["run", str(plain), "--out", "a\0b"], "NUL"),
        (["report", "a\0b"], "NUL"),
        (["claims", "--scale", "0.5"], "--scale, --seed, --data-dir: are for the runs of a claim; name one"),
        (["init", "--schema", "--algorithm", "fedavg"], "--algorithm fedavg: the schema of --schema holds for all algorithms"),
    ]:
        code, said = failing(monkeypatch, capsys, *words)
        assert (code, hint in said) == (2, True), (words, said)
        assert "Traceback" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"grid.toml", "plain.toml"}


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_out_of_memory_is_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr("cflpriv.experiments.run_experiment", full)
    (tmp_path / "plain.toml").write_text("[training]\nrounds = 1\n", encoding="utf-8")
    code, said = failing(monkeypatch, capsys, "run", str(tmp_path / "plain.toml"), "--out", str(tmp_path / "run"))
    assert code == 1
    assert said.startswith("cflpriv: out of memory")
    assert len(said.strip().splitlines()) == 1


def test_a_configuration_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[training]\nrounds = 0\n[data]\nclients = 4\n")))
    assert in_process(monkeypatch, "run", "-") == 0
    assert (tmp_path / "runs" / "stdin" / "summary.json").is_file()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"training = 3\n")))
    assert "-: training = 3: write it as a section" in failing(monkeypatch, capsys, "run", "-")[1]


def test_an_empty_configuration_says_what_it_runs_with() -> None:
    said = defaults_text(Config())
    for word in ("pacfl", "digits", "iid", "20 clients", "mlp", "20 rounds", "protection none"):
        assert word in said


def test_agreement_is_printed_where_there_are_true_groups() -> None:
    assert "2 clusters of 3 true groups, ARI 0.500" in summary_text(SUMMARY)
    for groups in (1, 6):  # all of one group, or each client its own
        said = summary_text({**SUMMARY, "true_groups": groups, "clusters": 1})
        assert "1 cluster; up 1.00 MB, down 2.00 MB" in said
        assert "ARI" not in said


def test_differential_privacy_is_on_the_console() -> None:
    private = {"epsilon": 1.23456, "epsilon_budget": 2.0, "delta": 1e-5, "privacy_unit": "sample"}
    said = summary_text({**SUMMARY, **private})
    assert "protection haar and differential privacy of one sample (epsilon 1.23 of 2 spent at delta 1e-05)" in said
    assert "privacy" not in summary_text({**SUMMARY, "epsilon": None, "delta": None})
    row = {"skipped": None, "accuracy_mean": 0.5, "local_accuracy_mean": None, "epsilon": 0.98765}
    assert row_text(row) == "accuracy 50.0 %  epsilon 0.988 spent"
    assert row_text({**row, "accuracy_mean": None}) == "epsilon 0.988 spent"
    assert row_text({**row, "skipped": "the budget is spent"}) == "skipped: the budget is spent"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is missing shows that the option reaches the engine")
def test_a_run_can_be_resumed_and_audited_on_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = tmp_path / "small.toml", str(tmp_path / "run")
    path.write_text('[training]\nrounds = 1\n[data]\nclients = 4\n[run]\nrecord = "full"\n', encoding="utf-8")
    assert in_process(monkeypatch, "run", str(path), "--out", run, "--device", "auto") == 0
    assert in_process(monkeypatch, "run", str(path), "--out", run, "--resume", "--device", "cpu") == 0
    assert "is done" in capsys.readouterr().out
    (tmp_path / "run" / "summary.json").unlink()  # so that there is something to do
    code, said = failing(monkeypatch, capsys, "run", str(path), "--out", run, "--resume", "--device", "cuda")
    assert (code, "torch finds no CUDA device here" in said) == (2, True)
    code, said = failing(monkeypatch, capsys, "run", str(path), "--out", run, "--resume", "--set", "run.seed=3")
    assert "run.seed is 3" in said
    assert in_process(monkeypatch, "run", str(path), "--out", run, "--resume", "--device", "cpu") == 0

    def stop(config: Config, *given: Any) -> None:
        raise InputError(f"the device is {config.run.device}")

    monkeypatch.setattr("cflpriv.attacks.audit.recorded_scene", stop)
    assert "the device is cuda" in failing(monkeypatch, capsys, "audit", run, "--budget", "quick", "--device", "cuda")[1]


def test_predictions_warn_of_a_cluster_that_was_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["cluster 1 (2 clients): no sum in the last 5 of 5 rounds; its model was never trained", "cluster 11 (1 client): no sum"]
    (tmp_path / "summary.json").write_text(json.dumps({"warnings": [*lines, "another"]}), "utf-8")
    warn_of_untrained(tmp_path, {"cluster 1", "shared model"})
    assert words_of(capsys.readouterr().err).endswith(lines[0])
    (tmp_path / "summary.json").write_text("[]", "utf-8")
    with pytest.raises(InputError, match=r"summary\.json"):
        warn_of_untrained(tmp_path, {"cluster 1"})


def test_every_warning_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    warn_in_lines()
    assert warnings.formatwarning(CflprivWarning("a\n  b"), CflprivWarning, "x.py", 3) == "cflpriv: warning: a b\n"
    assert warnings.formatwarning(UserWarning("a\nb"), UserWarning, "x.py", 3) == "cflpriv: warning: a b (UserWarning, x.py:3)\n"


def test_keys_of_a_sweep_are_explained() -> None:
    for key in ("sweep.attacks", "sweep.budget", "seeds"):
        found = CliRunner().invoke(cli.app, ["explain", key])
        assert found.exit_code == 0
        assert f"sweep.{key.rpartition('.')[2]}" in found.output
    both = CliRunner().invoke(cli.app, ["explain", "workers"]).output
    assert "run.workers" in both
    assert "sweep.workers" in both
    assert CliRunner().invoke(cli.app, ["explain", "sweep.nothing"]).exit_code != 0
    assert MEANINGS.keys() == _KEYS.keys()
