"""Real jobs in NVFlare's simulator and in POC mode on the loopback. Minutes each, mostly NVFlare starting processes."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare.apis", reason="the extra `nvflare` is not installed")

from checkout import ROOT
from safetensors.numpy import load_file

from cflpriv.contract.transcript import read_transcript
from cflpriv.data import build_population
from cflpriv.experiments import load_config
from cflpriv.federation.client import FederationClient
from cflpriv.nvflare import CflprivExecutor
from cflpriv.transports.memory import Faults
from cflpriv.transports.simulation import simulate

APP = ROOT / "examples" / "nvflare_app"
pytestmark = [pytest.mark.slow, pytest.mark.nvflare, pytest.mark.timeout(1800)]

DYING = '''
"""An executor that kills its own process at one message: [client, the n-th secure sum's message, its name]."""

import json
import os
import signal
from pathlib import Path

from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient
from cflpriv.nvflare import CflprivExecutor
from cflpriv.protocols.secagg.messages import decode_server

receive = FederationClient.receive


def dying(self, data):
    plan = Path(os.environ["CFLPRIV_SETTINGS"]) / "plan.json"
    if plan.exists():
        client, number, name = json.loads(plan.read_text())
        ask = m.decode_ask(data)
        if self.number == client and isinstance(ask, m.SumStep) and type(decode_server(ask.message)).__name__ == name:
            seen = plan.with_name("seen")
            seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
            if len(seen.read_text()) == number:
                plan.rename(plan.with_name("killed"))
                os.kill(os.getpid(), signal.SIGKILL)
    return receive(self, data)


FederationClient.receive = dying


class DyingExecutor(CflprivExecutor):
    pass
'''


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the example by its name; the working directory, the environment and the modules are afterwards what they were."""
    before, folder, known = dict(os.environ), Path.cwd(), set(sys.modules)
    monkeypatch.setattr(FederationClient, "receive", FederationClient.receive)  # which `DYING` replaces
    monkeypatch.syspath_prepend(str(APP))
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name: str) -> Any:
        return importlib.import_module(name)

    yield load
    os.environ.clear()
    os.environ.update(before)
    os.chdir(folder)
    for name in set(sys.modules) - known:
        if name in ("launch", "stock_fedavg", "dying_executor", "site_data"):
            del sys.modules[name]


def memory_models(changes: list[str], faults: Faults) -> list[np.ndarray[Any, Any]]:
    """The models of the same experiment over the memory transport, with the same protection and these dropouts."""
    config = load_config(APP / "federation.toml", changes)
    population = build_population(config.data)
    algorithm = config.algorithm_for(population)
    made = simulate(
        population.clients, seed=config.run.seed, sampling=config.sampling(), protection=config.protection, faults=faults, on_error="refuse"
    )
    state = algorithm.init(made.federation)
    for number in range(config.training.rounds):
        made.federation.begin_round(number)
        state, _ = algorithm.round(made.federation, state)
    models: Any = algorithm.serve(state).params["model"]
    return [made.peek(0, model) for model in models]


def check_models(run: Path, expected: list[np.ndarray[Any, Any]]) -> None:
    found = load_file(run / "checkpoints" / "models.safetensors")
    assert len(found) == len(expected)
    for i, model in enumerate(expected):
        np.testing.assert_allclose(found[f"model/{i}"], model, atol=1e-6)


def test_eight_sites_one_of_which_is_killed_inside_a_sum_give_the_models_of_the_memory_transport(tmp_path: Path, example: Any) -> None:
    """Site 4 is killed when the masked updates of round 0 are due. With as many threads as sites the simulator does not start it again."""
    (tmp_path / "dying_executor.py").write_text(DYING, encoding="utf-8")
    launch = example("launch")
    executor: CflprivExecutor = example("dying_executor").DyingExecutor()
    prepare = launch.prepare

    def planned(out: Path, *rest: Any) -> Any:
        sites = prepare(out, *rest)
        (out / "settings" / "plan.json").write_text(json.dumps([3, 1, "Deliver"]), encoding="utf-8")
        return sites

    launch.prepare = planned
    summary = launch.main(["--out", str(tmp_path / "d"), "--deadline", "40"], executor)
    assert (tmp_path / "d" / "settings" / "killed").exists()
    rows = [json.loads(line) for line in (tmp_path / "d" / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["skipped"] for row in rows] == [None, None]
    assert rows[1]["lost"] == [3]
    assert summary["clusters"] == 2
    assert summary["ari"] == 1.0
    assert summary["protection"] == "gram=haar, sum=secagg"
    sums = [one for one in read_transcript(tmp_path / "d" / "run" / "transcript", summary["messages"]) if one.kind == "secagg Survivors"]
    assert {one.round: 3 in {client for each in sums if each.round == one.round for client in each.clients} for one in sums} == {
        0: False, 1: False,
    }  # fmt: skip
    check_models(tmp_path / "d" / "run", memory_models([], Faults(listed={(0, 3): "Masked", (1, 3): "Advert"})))


def test_sites_that_share_processes_keep_their_state(tmp_path: Path, example: Any) -> None:
    """Two threads for four sites: each task of a site finds a new process."""
    changes = ["data.clients=4", "training.rounds=1", "protection.gram=[]", "protection.min_cohort=2"]
    words = [word for change in changes for word in ("--set", change)]
    summary = example("launch").main(["--out", str(tmp_path / "d"), "--threads", "2", *words])
    assert not summary["refusals"]
    check_models(tmp_path / "d" / "run", memory_models(changes, Faults()))


def test_poc_mode_gives_the_same_models(tmp_path: Path) -> None:
    """The command of the example's page, in a process of its own: what the simulator leaves in one lets no administrator log in."""
    with (tmp_path / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "launch.py", "--out", str(tmp_path / "d"), "--poc"], cwd=APP, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            assert process.wait(1500) == 0, (tmp_path / "output.txt").read_text(encoding="utf-8")
        finally:
            process.terminate()  # it ends the parties that it started
            process.wait(120)
    summary = json.loads((tmp_path / "d" / "run" / "summary.json").read_text(encoding="utf-8"))
    assert not summary["refusals"]
    check_models(tmp_path / "d" / "run", memory_models([], Faults()))


def test_the_filter_stops_a_stock_job_at_its_budget(tmp_path: Path, example: Any) -> None:
    stock = example("stock_fedavg")
    found = stock.main(["--out", str(tmp_path / "d"), "--rounds", "6"])
    for updates, spent in found.values():
        assert updates == stock.RELEASES
        assert 3.99 < spent <= 4.0
    saved = np.load(next((tmp_path / "d" / "workspace").rglob("server.npy")))
    stated = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert not np.allclose(saved, np.round(saved)), "the model of FedAvg is a noisy one"
    assert np.abs(saved - stated).max() < 100
    log = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "d" / "workspace").rglob("log.txt"))
    assert "the answer to task 'train' is blocked: over-budget" in log
