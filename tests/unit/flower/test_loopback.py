"""What the example's script starts, and with what; nothing is started here."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployments import APP, loopback

from cflpriv.flower import read_settings

OFF = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def started(monkeypatch: pytest.MonkeyPatch, out: Path, changes: list[str], **how: bool) -> tuple[Any, list[tuple[str, ...]]]:
    """A deployment whose processes are only noted: machines and commands."""
    module, commands = loopback(), []
    out.mkdir()
    monkeypatch.setattr(module.Machines, "start", lambda self, name, *command: commands.append(command))
    monkeypatch.setattr(module, "health", lambda *rest: None)
    monkeypatch.setattr(module, "flwr", lambda machines, *command: commands.append(("flwr", *command)))
    return module.deploy(out, APP / "experiment.toml", changes, 1, 60.0, **how), commands


@pytest.mark.parametrize("how", [{}, {"simulation": True}])
def test_nothing_reaches_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, bool]) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    machines, commands = started(monkeypatch, tmp_path / "d", [], **how)
    assert OFF.items() <= machines.environment.items()
    assert Path(machines.environment["FLWR_HOME"]).parent == tmp_path / "d"
    link, *nodes = commands
    assert link[0] == "flower-superlink"
    assert "--disable-runtime-dependency-installation" in link
    assert link[link.index("--database") + 1] == str(tmp_path / "d" / "superlink.db"), "started again, it knows its SuperNodes"
    assert [node[0] for node in nodes] == ([] if how else ["flower-supernode"] * 4)
    for command in commands:
        assert "--allow-runtime-dependency-installation" not in command
        assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "dependencies = []" in (tmp_path / "d" / "app" / "pyproject.toml").read_text(encoding="utf-8")


def test_under_encrypted_similarity_there_is_one_node_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ['protection.gram=["ckks"]', "protection.sum=none", "protection.min_cohort=1"]
    machines, commands = started(monkeypatch, tmp_path / "d", changes)
    assert len(commands) == 6
    assert machines.run_config["clients"] == 4, "the key holder is none"
    holder, state, own = read_settings(tmp_path / "d" / "client4.toml")
    assert (holder.role, own) == ("key-holder", {})
    assert state == tmp_path / "d" / "state" / "key-holder"
    client, _, own = read_settings(tmp_path / "d" / "client0.toml")
    assert (client.role, list(own)) == ("client", ["experiment"])
    assert client.roster == holder.roster


@pytest.mark.parametrize("change", ["privacy.epsilonn=1.0", "privcy.epsilon=1.0", 'privacy.unit="sampel"', "protection.flor=3"])
def test_a_misspelt_experiment_is_one_line_before_anything_is_started(tmp_path: Path, change: str) -> None:
    section, key, value = change.replace("=", ".", 1).split(".", 2)
    with pytest.raises(SystemExit) as ended:
        loopback().main(["--out", str(tmp_path / "d"), "--set", change])
    line = str(ended.value)
    assert "\n" not in line
    assert line.startswith(str(APP / "experiment.toml"))
    assert f"[{section}]" in line
    assert section == "privcy" or f"{key} = {value}".replace('"', "'") in line
    assert not (tmp_path / "d").exists()
