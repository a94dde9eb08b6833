"""The operations on NVFlare's messages, with a controller in this process. The simulator and POC mode are in test_simulator."""

import json
import logging
import tomllib
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare.apis", reason="the extra `nvflare` is not installed")

from agreements import contract_of
from checkout import ROOT
from fake_controller import context, controlled, deployment, task_of, transport
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.signal import Signal
from scenes import federation, population, training

from cflpriv.aggregation.holder_party import party_for
from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.protection import Protection
from cflpriv.contract.schedule import request
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import load_config, run_experiment
from cflpriv.federation import messages as m
from cflpriv.federation.resident import Listener
from cflpriv.federation.server import FederationServer
from cflpriv.federation.settings import read_roster, read_settings
from cflpriv.federation.store import DiskStore
from cflpriv.federation.transport import OverBytes
from cflpriv.nvflare.exchange import ANSWER, TASK, CflprivController, CflprivExecutor, JobAborted, site_settings

EXAMPLE = ROOT / "examples" / "nvflare_app" / "federation.toml"


@pytest.mark.slow
def test_a_federation_on_nvflare_messages_equals_the_local_one(tmp_path: Path) -> None:
    scene = population(clients_per_group=3)
    sites = deployment(tmp_path, scene)
    fed = FederationServer(OverBytes(transport(sites)), seed=1)
    fed.enrol()
    made = ALGORITHMS["stocfl"].make(training(scene), weights="equal")
    states = []
    for each in (federation(scene.clients, seed=1), fed):
        current = made.init(each)
        for number in range(3):
            each.begin_round(number)
            current, _ = made.round(each, current)
        states.append(current)
    assert states[0].clustering == states[1].clustering
    np.testing.assert_allclose(states[0].global_model.value(), states[1].global_model.value(), rtol=1e-9)
    assert not fed.refusals
    assert {task.name for _, task in sites.tasks} == {TASK}


def test_a_site_that_is_lost_inside_a_secure_sum_is_a_dropout(tmp_path: Path) -> None:
    scene = population(groups=1, clients_per_group=5)
    sites = deployment(tmp_path, scene, 'sum = "secagg"\nmin_cohort = 3')
    ticks = iter(range(10**9))
    staged = transport(sites, clock=lambda: float(next(ticks)), poll_seconds=0.001)
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    task, protection = training(scene), Protection(sum="secagg", min_cohort=3)
    agreed = contract_of(None, request(task, {"update": "sum"}), protection=protection, roster=roster)
    fed = FederationServer(OverBytes(staged), protection=protection, roster=roster, seed=1, contract=agreed)
    assert fed.enrol() == (0, 1, 2, 3, 4)
    fed.begin_round(0)
    held = fed.compute(task, {"model": task.model.init(0)})
    sites.dead = {"site-3"}
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    assert mean.count == 4
    assert ("secagg Adverts", 4, 4) in {stage[:3] for stage in staged.stages}
    assert all(task.completion_status is not None for _, task in sites.tasks), "tasks that nobody answered are cancelled"
    sites.dead = set()
    assert fed.begin_round(1) == (2,)


def test_holders_of_shares_are_sites_too(tmp_path: Path) -> None:
    scene, protection = population(clients_per_group=1), Protection(gram=("shares",))
    sites = deployment(tmp_path, scene, 'gram = ["shares"]', holders=3)
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    made = ALGORITHMS["pacfl"].make(training(scene), k=2)
    agreed = contract_of(made, protection=protection, roster=roster)
    fed = FederationServer(OverBytes(transport(sites)), protection=protection, roster=roster, seed=1, contract=agreed)
    assert fed.enrol() == (0, 1)
    assert made.init(fed).clustering.labels == made.init(federation(scene.clients, seed=1)).clustering.labels
    assert not fed.refusals


@pytest.mark.parametrize("more", ["", "secagg_bits = 16", 'robust = "geometric_median"'])
def test_helpers_of_sums_are_sites_too_and_one_may_be_lost(tmp_path: Path, more: str) -> None:
    scene = population(groups=1, clients_per_group=9)
    sites = deployment(tmp_path, scene, f'sum = "one_message"\nmin_cohort = 3\n{more}', holders=4)
    settings = tomllib.loads(f'sum = "one_message"\nmin_cohort = 3\n{more}')
    protection, roster, task = Protection(**settings), read_roster(tmp_path / "keys" / "roster.txt"), training(scene)
    agreed = contract_of(None, request(task, {"update": "sum"}), protection=protection, roster=roster)
    ticks = iter(range(10**9))
    staged = transport(sites, clock=lambda: float(next(ticks)), poll_seconds=0.001)
    fed = FederationServer(OverBytes(staged), protection=protection, roster=roster, seed=1, contract=agreed)
    assert fed.enrol() == tuple(range(9))
    plain = federation(scene, Protection(**settings | {"sum": "none", "min_cohort": 1} if more.startswith("robust") else {}), seed=1)
    for number in range(2):
        sites.dead = {"site-12"} if number else set()  # the third helper
        for each in (fed, plain):
            each.begin_round(number)
        means = [each.mean(each.compute(task, {"model": task.model.init(number)})["update"]) for each in (fed, plain)]
        assert means[0][0] is not None
        assert means[0][0].count == 9
        if "robust" not in more:  # which has other buckets in the clear
            expected = means[1][0]
            assert expected is not None
            np.testing.assert_allclose(means[0][0].parts["update"].value(), expected.parts["update"].value(), rtol=0, atol=1e-3)
    assert not [refused for refused in fed.refusals if refused[0] >= 0]
    assert ("sum keys", 4, 3) in {stage[:3] for stage in staged.stages}


def test_a_stage_ends_at_its_deadline_or_when_a_site_is_known_to_be_gone(tmp_path: Path) -> None:
    sites = deployment(tmp_path, population(clients_per_group=1))
    ticks = iter(range(10**9))
    staged = transport(sites, clock=lambda: float(next(ticks)), poll_seconds=0.001, deadline_seconds=20.0)
    assert staged.places() == [0, 1]
    sites.dead = {"site-2"}
    answers = staged.exchange({0: b"?", 1: b"?"}, "sum")
    assert list(answers) == [0]
    assert 20 <= staged.stages[-1][3] < 40
    sites.dead, sites.disconnected = set(), {"site-2"}
    assert staged.places() == [0]


def test_an_aborted_job_ends_a_stage_at_once(tmp_path: Path) -> None:
    sites = deployment(tmp_path, population(clients_per_group=1))
    staged = transport(sites)
    assert staged.places() == [0, 1]
    sites.dead = {"site-2"}
    sites.aborted.trigger(True)
    with pytest.raises(JobAborted):
        staged.exchange({1: b"?"}, "sum")


def test_missing_settings_are_a_line_at_the_site_and_a_code_for_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sites = deployment(tmp_path, population(clients_per_group=1))
    settings = tmp_path / "site-1" / "local" / "cflpriv.toml"
    text = settings.read_text(encoding="utf-8")
    settings.unlink()
    staged = transport(sites)
    fed = FederationServer(OverBytes(staged), contract=contract_of(None))
    with caplog.at_level(logging.ERROR, "cflpriv.nvflare"):
        assert fed.enrol() == (1,)
    assert fed.refusals == [(-1, "enrol", "no-settings")]
    line = f"{settings}: is missing; write the settings of site 'site-1' here, or name a folder with site-1.toml as CFLPRIV_SETTINGS"
    assert line in caplog.text
    settings.write_text(text.replace("[protection]", "[protection]\nsun = 3"), encoding="utf-8")
    answer = m.decode_answer(staged.exchange({0: b"?"}, "sum")[0])
    assert answer == m.Refused("bad-settings")


def test_settings_come_from_the_site_and_never_from_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment(tmp_path, population(clients_per_group=1))
    at_site = context(tmp_path / "site-2", "site-2")
    assert site_settings(at_site)[0].identity.client == 1
    monkeypatch.setenv("CFLPRIV_SETTINGS", str(tmp_path / "site-1" / "local"))
    with pytest.raises(InputError, match=r"site-2\.toml: is missing; .* in the folder that CFLPRIV_SETTINGS names"):
        site_settings(at_site)
    (tmp_path / "site-1" / "local" / "site-2.toml").write_text(
        (tmp_path / "site-1" / "local" / "cflpriv.toml").read_text(encoding="utf-8"), encoding="utf-8"
    )
    assert site_settings(at_site)[0].identity.client == 0


def test_the_executor_says_where_its_data_should_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = CflprivExecutor()
    for app in ({}, {"data": 3}, {"data": "module"}, {"data": ":function"}):
        with pytest.raises(InputError, match=r"\[app\] data = .*: give the function"):
            executor.data(0, app)
    (tmp_path / "own_site_data.py").write_text("def of(client, app): return (client, app['file'])", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert executor.data(3, {"data": "own_site_data:of", "file": "x"}) == (3, "x")  # type: ignore[comparison-overlap]
    sites = deployment(tmp_path, population(clients_per_group=1))
    answer = executor.execute("train", task_of({}), context(tmp_path / "site-1", "site-1"), sites.aborted)
    assert answer.get_return_code() == ReturnCode.TASK_UNKNOWN
    answer = executor.execute(TASK, task_of({}), context(tmp_path / "site-1", "site-1"), sites.aborted)
    assert m.decode_answer(answer[ANSWER]) == m.Refused("malformed")


@pytest.fixture
def small() -> list[str]:
    return ["data.clients=4", "training.rounds=1", "training.epochs=1", "model.hidden=4"]


def test_the_controller_writes_the_run_folder_of_a_local_run(tmp_path: Path, small: list[str]) -> None:
    """In the clear to the last digit; the same folder in a second job is done already."""
    open_ = [*small, "protection.sum=none", "protection.gram=[]", "protection.min_cohort=1", "run.engine=sequential"]
    config = load_config(EXAMPLE, open_)
    scene = build_population(config.data)
    sites = deployment(tmp_path, scene, "min_cohort = 1")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "experiment.toml").write_text(config.to_toml(), encoding="utf-8")
    made = CflprivController("experiment.toml", out="run")
    for _ in range(2):
        controller, at_server = controlled(sites, made)
        controller.control_flow(sites.aborted, at_server)
        assert at_server.get_prop(FLContextKey.FATAL_SYSTEM_ERROR) is None
    run_experiment(config, tmp_path / "local")
    there, here = (
        json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in (tmp_path / "server" / "run", tmp_path / "local")
    )
    assert there["engine"] == "nvflare"
    assert there["ari"] == here["ari"]
    assert there["accuracy_mean"] == pytest.approx(here["accuracy_mean"])
    assert there["data_digest"] == here["data_digest"]
    assert {stage for stage, *_ in there["stages"]} >= {"enrol", "compute", "gram", "sum"}


def test_a_job_with_helpers_that_stay_writes_the_run_of_a_local_one(tmp_path: Path, small: list[str]) -> None:
    """Sites are clients only; the roster names the helpers, which the server reaches at their addresses."""
    secure = ["protection.sum=one_message", "protection.min_cohort=2"]
    config = load_config(EXAMPLE, [*small, *secure, "run.engine=sequential"])
    scene = build_population(config.data)
    sites = deployment(tmp_path, scene, 'gram = ["haar"]\nsum = "one_message"\nmin_cohort = 2', holders=4)
    listeners = []
    for number in range(5, 9):
        settings, state, _ = read_settings(tmp_path / f"site-{number}" / "local" / "cflpriv.toml")
        assert state is not None
        party = party_for(settings.protection)(settings, DiskStore(state))
        listeners.append(Listener(("127.0.0.1", 0), party.receive))
        Thread(target=listeners[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        del sites.executors[f"site-{number}"]  # type: ignore[attr-defined]
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "experiment.toml").write_text(config.to_toml(), encoding="utf-8")
    addresses = [f"127.0.0.1:{listener.server_address[1]}" for listener in listeners]
    made = CflprivController("experiment.toml", out="run", roster="../keys/roster.txt", residents=addresses)
    controller, at_server = controlled(sites, made)
    controller.control_flow(sites.aborted, at_server)
    for listener in listeners:
        listener.shutdown()
        listener.server_close()
    assert at_server.get_prop(FLContextKey.FATAL_SYSTEM_ERROR) is None
    there = json.loads((tmp_path / "server" / "run" / "summary.json").read_text(encoding="utf-8"))
    assert {stage for stage, *_ in there["stages"]} >= {"sum keys", "sum", "sum Delivery", "sum Close", "sum Open"}
    assert there["rounds"] == 1
    assert not there["rounds_skipped"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"residents": "host:1"}, "residents = 'host:1': give a list"), ({"residents": [1]}, "residents = [1]: give"),
        ({"deadline_seconds": "x"}, "deadline_seconds = 'x': expected a finite number > 0"),
        ({"hello_seconds": float("inf")}, "hello_seconds = inf: expected a finite number > 0"),
        ({"wait_seconds": 0}, "wait_seconds = 0: expected"),
        ({"clients": -1}, "clients = -1: expected an integer ≥ 0"), ({"classes": "x"}, "classes = 'x': expected an integer ≥ 0"),
        ({"shape": ["a"], "classes": 2}, "shape = ['a'], classes = 2: give the sizes"),
        ({"shape": 3, "classes": 2}, "shape = 3, classes = 2: give"),
        ({"shape": [-1], "classes": 2}, "shape = [-1], classes"), ({"classes": 2}, "shape = (), classes = 2"),
        ({"shape": [8]}, "classes = 0"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_a_job_end_it_with_one_line(tmp_path: Path, given: dict[str, Any], line: str) -> None:
    reasons: list[str] = []
    controller, at_server = controlled(deployment(tmp_path, population(clients_per_group=1)), CflprivController("nothing.toml", **given))
    controller.system_panic = lambda reason, fl_ctx: reasons.append(reason)
    controller.control_flow(Signal(), at_server)
    assert len(reasons) == 1
    assert line in reasons[0]


def test_a_jobs_experiment_brings_no_code(tmp_path: Path) -> None:
    """A job without code of its own may have files beside its configs, and `{WORKSPACE}/{JOB_ID}` in its arguments."""
    sites = deployment(tmp_path, population(clients_per_group=1))
    folder = tmp_path / "server" / "job" / "app_server" / "config"
    folder.mkdir(parents=True)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()", encoding="utf-8")
    (folder / "config.toml").write_text('[run]\nplugins = ["own.py"]\n', encoding="utf-8")
    (folder / "plain.toml").write_text("", encoding="utf-8")
    reasons: list[str] = []
    for given in ({"experiment": "config.toml"}, {"experiment": "plain.toml", "out": ""}):
        paths: dict[str, Any] = {name: str(folder.relative_to(tmp_path / "server") / one) for name, one in given.items()}
        controller, at_server = controlled(sites, CflprivController(**paths))
        controller.system_panic = lambda reason, fl_ctx: reasons.append(reason)
        controller.control_flow(Signal(), at_server)
    assert len(reasons) == 2
    assert all("config.toml: run.plugins = " in line for line in reasons)
    assert not (tmp_path / "ran").exists()


def test_a_wrong_experiment_ends_the_job_with_one_line(tmp_path: Path) -> None:
    sites = deployment(tmp_path, population(clients_per_group=1))
    reasons: list[str] = []
    controller, at_server = controlled(sites, CflprivController("nothing.toml"))
    controller.system_panic = lambda reason, fl_ctx: reasons.append(reason)
    controller.control_flow(Signal(), at_server)
    (line,) = reasons
    assert line.startswith("cflpriv: ")
    assert "nothing.toml" in line
    assert "\n" not in line
