"""The SuperLink killed in each stage of a run, alone and together with a SuperNode: started again, the run that is submitted again goes on.

It ends as one that was never cut. Kills of SuperNodes alone are in test_kills.
"""

import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployments import APP, check_models, kill_in_stage, quick_loopback, rows_of, stages_of, start_again

DEADLINE = 60.0
SLACK = 20.0
SECURE = ["data.clients=2", "algorithm.k=1", 'protection.gram=["haar"]']
OPEN = ["data.clients=2", "algorithm.k=1", "protection.sum=none", "protection.min_cohort=1"]
STAGES = {
    "secure": [
        ("enrol", 1), ("group", 1), ("compute", 1), ("gram", 1), ("compute", 2), ("secagg Invite", 1), ("secagg Adverts", 1),
        ("secagg Deliver", 1), ("secagg Survivors", 1), ("secagg Unmask", 1),
    ],
    "open": [("sum", 1), ("compute", 2), ("gather", 1)],
}  # fmt: skip
"""The stages in which processes are killed, and which of that name in the attempt.

With protected similarity and secure sums: greeting, the clients' secret, signatures, their comparison, training, keys, shares, masked
updates, signed survivors, unmasking. In the clear: the sum, evaluation, and the scores. Attempts after the comparison resume behind it.
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def opened(module: Any, machines: Any) -> None:
    """From now on the experiment and the clients' settings, which are read for each message, are without protection."""
    out = machines.out
    (out / "open.toml").write_text(module.load_config(APP / "experiment.toml", [*OPEN, "training.rounds=1"]).to_toml(), encoding="utf-8")
    for path in out.glob("client?.toml"):
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
        settings["protection"] = tomllib.loads((out / "open.toml").read_text(encoding="utf-8"))["protection"]
        path.write_text(tomli_w.dumps(settings), encoding="utf-8")
    machines.run_config |= {"experiment": str(out / "open.toml"), "out": str(out / "open")}


@pytest.mark.parametrize("killed", [["superlink"], ["superlink", "node1"]], ids=["alone", "with a SuperNode"])
def test_a_run_whose_superlink_is_killed_in_every_stage_goes_on(tmp_path: Path, killed: list[str]) -> None:
    """The SuperLink keeps its state in a file, so its SuperNodes need not be started again."""
    module, out = quick_loopback(tmp_path), tmp_path / "d"
    out.mkdir()
    with module.deploy(out, APP / "experiment.toml", SECURE, 1, DEADLINE) as machines:
        others = [name for name in machines.running if name not in killed]
        for name, stages in STAGES.items():
            if name == "open":
                opened(module, machines)
            for stage in stages:
                kill_in_stage(module, machines, stage, killed)
                start_again(module, machines, killed)
                assert all(machines.running[other].poll() is None for other in others), f"{stage}: nothing else ended"
            assert module.wait(machines, module.submit(machines), 900) == "finished:completed"
    for run, changes, exact in ((out / "run", SECURE, 1e-4), (out / "open", OPEN, 1e-6)):
        (row,) = rows_of(run)
        assert not row["skipped"]
        assert row["cohort"] == [0, 1]
        late = [entry for entry in stages_of(run) if entry["stage"] not in ("compute", "enrol") and entry["seconds"] > DEADLINE + SLACK]
        assert not late, "no stage waits beyond its deadline"
        check_models(run, [*changes, "training.rounds=1"], exact)


def test_without_a_database_a_killed_superlink_ends_its_supernodes_and_a_run_by_one_line(tmp_path: Path) -> None:
    """A SuperLink that has forgotten them refuses its SuperNodes, which end. All started again, the run goes on."""
    module, out = quick_loopback(tmp_path), tmp_path / "d"
    out.mkdir()
    start = module.Machines.start

    def forgetful(self: Any, name: str, *command: str) -> None:
        words = list(command)
        if "--database" in words:
            at = words.index("--database")
            del words[at : at + 2]
        start(self, name, *words)

    module.Machines.start = forgetful
    with module.deploy(out, APP / "experiment.toml", SECURE, 1, DEADLINE) as machines:
        kill_in_stage(module, machines, ("secagg Deliver", 1), ["superlink"])
        start_again(module, machines, ["superlink"])
        nodes = ["node0", "node1"]
        until = time.monotonic() + 120
        while any(machines.running[name].poll() is None for name in nodes):
            assert time.monotonic() < until, "SuperNodes go on with a SuperLink that does not know them"
            time.sleep(0.2)
        began = time.monotonic()
        run_id = module.submit(machines)
        assert module.wait(machines, run_id, 600).startswith("finished:failed")
        assert time.monotonic() - began < 300
        shown = module.flwr(machines, "log", run_id, "loop", "--show")
        line = "0 of 2 clients answered within 120 s; refusals: none; the SuperLink knows no SuperNode"
        assert any(line in one for one in shown.splitlines())
        start_again(module, machines, nodes)
        assert module.wait(machines, module.submit(machines), 900) == "finished:completed"
    (row,) = rows_of(out / "run")
    assert row["cohort"] == [0, 1]
    check_models(out / "run", [*SECURE, "training.rounds=1"], 1e-4)
