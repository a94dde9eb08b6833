"""Vectors shared among holders at SuperNodes of their own, on a real SuperLink: kills between the stages, resumption, audit, report."""

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from command_line import in_process
from deployments import APP, check_models, kill_in_stage, messages_of, quick_loopback, rows_of, stages_of, start_again

CHANGES = ["data.clients=3", 'protection.gram=["shares"]', "protection.sum=none", "protection.min_cohort=1", "run.record=full"]
DEADLINE = 60.0
SLACK = 20.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_holders_that_are_killed_between_stages_are_waited_for_and_the_run_is_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first holder is killed when deposits are passed on, another when it should contribute: the comparison is taken again.

    The SuperLink is killed in the second round: submitted again, the run goes on, though its clustering epoch has ended.
    """
    module, out = quick_loopback(tmp_path), tmp_path / "d"
    out.mkdir()
    with module.deploy(out, APP / "experiment.toml", CHANGES, 2, DEADLINE) as machines:
        run_id = kill_in_stage(module, machines, ("shares deposits", 1), ["node3"])
        start_again(module, machines, ["node3"])
        kill_in_stage(module, machines, ("shares contributions", 1), ["node4"], run_id)
        start_again(module, machines, ["node4"])
        kill_in_stage(module, machines, ("sum", 2), ["superlink"], run_id)
        start_again(module, machines, ["superlink"])
        assert module.wait(machines, module.submit(machines), 900) == "finished:completed"
    run = out / "run"
    assert [row["skipped"] for row in rows_of(run)] == [None, None]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    clustering = check_models(run, [*CHANGES, "training.rounds=2"], 1e-6)
    assert json.loads((run / "measured.json").read_text(encoding="utf-8"))["labels"] == {str(c): clustering[c] for c in range(3)}
    assert summary["ari"] == 1.0
    asked = [entry["stage"] for entry in stages_of(run)]
    assert asked.count("shares keys") == 3, "both times with new keys"
    assert asked.count("shares open") == 1
    late = [entry for entry in stages_of(run) if entry["stage"] not in ("compute", "enrol") and entry["seconds"] > DEADLINE + SLACK]
    assert not late, "no stage waits beyond its deadline"
    assert {"shares keys", "shares deposits", "contribution", "shares open", "result"} <= {
        one[2] for one in messages_of(run, summary["messages"])
    }

    assert in_process(monkeypatch, "audit", str(run), "--budget", "quick") == 0
    cells = json.loads((run / "audit.json").read_text(encoding="utf-8"))
    assert cells
    assert in_process(monkeypatch, "report", str(run)) == 0
    assert "shares" in (run / "report.html").read_text(encoding="utf-8")
    assert in_process(monkeypatch, "verify", str(run)) == 0
