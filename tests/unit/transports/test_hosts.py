"""Clients at several hosts: a host that dies, what comes back, and runs on Ray from the command line."""

import ipaddress
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from checkout import ROOT
from command_line import in_process
from fake_carrier import FakeCarrier, broken, draws, process_id
from msgspec import structs
from ray_nodes import ray_nodes
from scenes import PROTECTIONS, eye, federation, model, parity, population, served, training

from cflpriv.algorithms.fedavg import fedavg
from cflpriv.contract.handles import Held
from cflpriv.contract.protection import PROTECTIONS as PROTECTION_SPECS
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Level, Transcript
from cflpriv.engine import Engine
from cflpriv.errors import InputError, WorkerLost
from cflpriv.experiments import load_config, run_experiment
from cflpriv.experiments.run.checkpoint import load_checkpoint
from cflpriv.federation import messages as m
from cflpriv.federation.server import ClientsLost, FederationServer
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import LocalError, MalformedMessage, ProtocolError, RemoteError, SumFailed, TooFewClients
from cflpriv.protocols.secagg.vectors import largest_levels
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.transports.hosts import SplitHosts
from cflpriv.transports.partial_sums import may_stay
from cflpriv.transports.ray import RayCarrier, ray_hosts
from cflpriv.types import Array

HOSTS = 4
EXAMPLE = ROOT / "examples" / "pacfl_digits.toml"
QUICK = [
    "data.clients=6", "training.rounds=4", "model.dtype=float64", 'protection.gram=["haar"]', "protection.sum=haar",
    "run.insecure_test_entropy=true", "model.hidden=4",
]  # fmt: skip
"""A short run under test entropy, in which the same is drawn at all hosts together as in memory."""
NODES = 3
ROUNDS = 3
CLIP = 8.0
CLIENTS = 12
SCENE = population(groups=2, clients_per_group=CLIENTS // 2)
LOST = (1, 5, 9)
"""The clients of host 1."""


class KilledRay(RayCarrier):
    """Actors on several nodes, of which a test kills one as the machine would, for want of memory."""

    def kill(self, number: int) -> None:
        (pid,), _ = self.reply(self.send(number, "each", [number], process_id, ()))
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def on_ray() -> Iterator[KilledRay]:
    with ray_nodes(NODES) as address, ray_hosts(1, address) as started:
        started.close()
        carrier = KilledRay(HOSTS)
        yield carrier
        carrier.close()


@pytest.fixture(params=["fake", pytest.param("ray", marks=pytest.mark.slow)])
def carrier(request: pytest.FixtureRequest) -> Any:
    return FakeCarrier(HOSTS) if request.param == "fake" else request.getfixturevalue("on_ray")


def at_stage(fed: FederationServer, name: str, act: Callable[[], None]) -> None:
    """Let something happen just before the messages of the next stage of this name."""
    transport: Any = eye(fed).transport
    exchange = transport.exchange

    def watched(asks: Any, stage: Any) -> Any:
        if stage.name == name:
            transport.exchange = exchange
            act()
        return exchange(asks, stage)

    transport.exchange = watched


def trained(fed: FederationServer, before: Callable[[int], None] = lambda number: None) -> tuple[Array, list[tuple[int, ...]]]:
    """Every client's model after three rounds of FedAvg, and the clients in each round's sum."""
    algorithm = fedavg(training(SCENE), weights="equal")
    state = algorithm.init(fed)
    for number in range(ROUNDS):
        fed.begin_round(number)
        before(number)
        state, _ = algorithm.round(fed, state)
    kinds = ("update", "secagg Masked")
    return served(algorithm, fed, state), [m.clients for m in fed.transcript.messages if m.operation == "mean" and m.kind in kinds]


@pytest.mark.parametrize(
    ("protection", "stage"),
    [(Protection(), "sum"), (Protection(sum="secagg", min_cohort=3, secagg_clip=CLIP), "secagg Deliver")],
    ids=["none", "secagg"],
)
def test_clients_of_a_host_that_dies_drop_out_and_come_back(carrier: Any, protection: Protection, stage: str) -> None:
    """The models are those of a run in memory whose clients drop out at that message.

    Secure sums round with the clients' own entropy, which begins afresh: a model may be off by one step of the fixed point a round.
    """
    reference = federation(SCENE, protection, dropouts=[(1, client, "Masked") for client in LOST])
    expected, sums = trained(reference)
    lines: list[str] = []
    fed = federation(SCENE, protection, hosted=partial(SplitHosts, carrier=carrier, notify=lines.append))
    models, taken = trained(fed, lambda number: at_stage(fed, stage, lambda: carrier.kill(1)) if number == 1 else None)
    assert taken == sums
    assert [set(LOST) <= set(clients) for clients in taken] == [True, False, True]
    step = CLIP / largest_levels(CLIENTS, protection.secagg_bits)
    np.testing.assert_allclose(models, expected, rtol=0, atol=ROUNDS * step if protection.secure else 1e-12)
    assert len(lines) == 1
    assert lines[0].startswith("host 1 ended (")
    assert lines[0].endswith("its 3 parties drop out, and begin again from what was last saved of them")


@pytest.fixture
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("contract.transcript", "transports.hosts"):
        monkeypatch.setattr(f"cflpriv.{module}.LARGEST_DIGESTED_BYTES", 0)


@pytest.mark.usefixtures("_everything_is_large")
@pytest.mark.parametrize("level", ["headers", "full"])
def test_hosts_add_up_large_updates_in_the_clear(level: Level) -> None:
    """In place of its clients' updates each host sends their sum, unless each is recorded."""
    carrier = FakeCarrier(HOSTS)
    fed, memory = (federation(SCENE, transcript=Transcript(level), hosted=one) for one in (partial(SplitHosts, carrier=carrier), None))
    start = model(SCENE, "float32").init(0)
    means = []
    for one in (fed, memory):
        held = one.compute(training(SCENE, dtype="float32"), {"model": start})
        means.append(one.mean(held, weights="examples", groups=parity(range(CLIENTS)), k=2))
    for mean, other in zip(*means, strict=True):
        assert mean is not None
        assert other is not None
        assert (mean.count, mean.weight) == (other.count, other.weight)
        opened = [shared.parts["update"].value() for shared in (mean, other)]
        assert [array.dtype for array in opened] == [np.float32, np.float32]
        np.testing.assert_allclose(opened[0], opened[1], rtol=0, atol=1e-6)
    headers = [[(m.kind, m.clients, m.total_bytes, m.context) for m in one.transcript.messages] for one in (fed, memory)]
    assert headers[0] == headers[1]
    for message, expected in zip(fed.transcript.messages, memory.transcript.messages, strict=True):
        assert (message.payload is None) == (expected.payload is None) == (level == "headers")
        for name, value in (message.payload or {}).items():
            np.testing.assert_allclose(value, (expected.payload or {})[name], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("_everything_is_large")
def test_fewer_bytes_travel_than_the_updates_have() -> None:
    scene = population(groups=2, clients_per_group=CLIENTS // 2, shape=(200,))
    carrier = FakeCarrier(HOSTS)
    fed = federation(scene, transcript=Transcript("headers"), hosted=partial(SplitHosts, carrier=carrier))
    held = fed.compute(training(scene), {"model": model(scene).init(0)})
    before, size = carrier.received, model(scene).init(0).nbytes
    fed.mean(held)
    assert HOSTS * size < carrier.received - before < (HOSTS + 2) * size < CLIENTS * size


@pytest.mark.usefixtures("_everything_is_large")
def test_a_step_is_taken_again_where_a_host_dies_before_it_adds_up() -> None:
    carrier = FakeCarrier(HOSTS)
    fed = federation(SCENE, transcript=Transcript("headers"), hosted=partial(SplitHosts, carrier=carrier))
    send = carrier.send

    def sent(number: int, operation: str, *given: Any) -> Any:
        if operation == "added" and number == 1:
            carrier.kill(1)
        return send(number, operation, *given)

    held = train(fed, 0.1)
    carrier.send = sent  # type: ignore[method-assign]
    with pytest.raises(ClientsLost, match=r"clients \[1, 5, 9\]"):
        fed.mean(held)
    carrier.send = send  # type: ignore[method-assign]
    (mean,) = fed.mean(held)
    assert mean is not None
    assert mean.count == CLIENTS - len(LOST)


def test_only_updates_for_plain_sums_stay_at_a_host() -> None:
    give = m.Give(bytes(16), "sum", 1, ("update",), "", False)
    plain = Protection()
    assert may_stay(give, plain)
    for ask in (structs.replace(give, operation="gather"), structs.replace(give, noise=m.Bounded("add_remove", 1.0, 1.0))):
        assert not may_stay(ask, plain)
    others = [name for name, spec in PROTECTION_SPECS.ready().items() if spec.of == "sum" and spec.name != "none"]
    assert len(others) > 3
    for name in others:
        assert not may_stay(give, Protection(sum=PROTECTION_SPECS[name].name, min_cohort=2)), name
    assert not may_stay(give, Protection(robust="trimmed_mean", min_cohort=1))


def train(fed: FederationServer, lr: float) -> Held:
    return fed.compute(training(SCENE, lr=lr), {"model": model(SCENE).init(0)})


def test_clients_come_back_with_what_was_last_saved_of_them(carrier: Any) -> None:
    fed = federation(SCENE, hosted=partial(SplitHosts, carrier=carrier))
    first = train(fed, 0.1)
    saved = {client: eye(fed).recall(client, "trained") for client in fed.clients}
    stores = eye(fed).stores
    second = train(fed, 0.2)
    carrier.kill(1)
    assert set(fed.gather(second)) == set(range(CLIENTS)) - set(LOST)
    fed.begin_round(0)
    assert fed.clients == tuple(range(CLIENTS))
    for client, one in saved.items():
        assert np.array_equal(eye(fed).recall(client, "trained"), one) == (client in LOST)  # type: ignore[arg-type]
    for client in LOST:
        assert eye(fed).stores[client].dumped("memory/trained") == stores[client].dumped("memory/trained")
    assert set(fed.gather(first)) == set(range(CLIENTS))
    assert set(fed.gather(second)) == set(range(CLIENTS)) - set(LOST)
    assert {(client, code) for client, _, code in fed.refusals} == {(client, "not-held") for client in LOST}


def test_clients_of_whom_nothing_was_saved_have_lost_their_state() -> None:
    """Without the common secret, too, they refuse the next sum, and are given it again."""
    carrier = FakeCarrier(HOSTS)
    fed = federation(SCENE, PROTECTIONS["haar"], hosted=partial(SplitHosts, carrier=carrier))
    held = train(fed, 0.1)
    carrier.kill(1)
    fed.mean(held)
    fed.begin_round(0)
    assert fed.clients == tuple(range(CLIENTS))
    assert [eye(fed).recall(client, "trained") is None for client in range(CLIENTS)] == [client in LOST for client in range(CLIENTS)]
    counts = []
    for number in (1, 2):
        (mean,) = fed.mean(train(fed, 0.1))
        assert mean is not None
        counts.append(mean.count)
        fed.begin_round(number)
    assert counts == [CLIENTS - len(LOST), CLIENTS]
    assert {code for _, _, code in fed.refusals} == {"no-secret"}


def test_a_party_that_begins_again_draws_afresh() -> None:
    carrier = FakeCarrier(HOSTS)
    fed = federation(SCENE, hosted=partial(SplitHosts, carrier=carrier))
    seen = [*eye(fed).each(range(CLIENTS), draws)]
    for _ in range(2):
        carrier.kill(1)
        seen += eye(fed).each(range(CLIENTS), draws)
    assert len(set(seen)) == len(seen)


def test_measuring_asks_a_host_again_that_died(carrier: Any) -> None:
    of = {"model": model(SCENE).init(0)}
    fed, memory = federation(SCENE, hosted=partial(SplitHosts, carrier=carrier)), federation(SCENE)
    carrier.kill(2)
    found, expected = (eye(one).measure(Evaluate(model(SCENE)), of, None, range(CLIENTS)) for one in (fed, memory))
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=0, atol=1e-12)
    assert eye(fed).engine.paths == eye(memory).engine.paths


def test_data_that_changed_stay_changed_where_a_host_begins_again() -> None:
    carrier, of = FakeCarrier(HOSTS), {"model": model(SCENE).init(0)}
    fed, memory = federation(SCENE, hosted=partial(SplitHosts, carrier=carrier)), federation(SCENE)
    before = eye(memory).measure(Evaluate(model(SCENE)), of, None, [LOST[0]])
    changed = [replace(SCENE.clients[0], id=LOST[0])]
    for each in (fed, memory):
        eye(each).change(changed)
    carrier.kill(1)
    found, expected = (eye(each).measure(Evaluate(model(SCENE)), of, None, [LOST[0]]) for each in (fed, memory))
    assert float(found[0]["loss"]) == pytest.approx(float(expected[0]["loss"]))
    assert float(found[0]["loss"]) != pytest.approx(float(before[0]["loss"]))
    with pytest.raises(InputError, match=r"change: clients \[99\] are not known"):
        eye(fed).change([replace(SCENE.clients[0], id=99)])


def test_a_host_that_always_dies_ends_the_run() -> None:
    carrier = FakeCarrier(HOSTS)
    fed = federation(SCENE, hosted=partial(SplitHosts, carrier=carrier))
    carrier.restart = lambda number: None  # type: ignore[method-assign]
    carrier.kill(0)
    with pytest.raises(WorkerLost, match="host 0 ended 3 times in a row: killed by the test"):
        eye(fed).recall(0, "trained")


def test_errors_of_a_host_arrive_as_they_are(carrier: Any) -> None:
    """What a client cannot do ends the run with its own message, as in memory; what it refuses keeps its code."""
    fed = federation(SCENE, hosted=partial(SplitHosts, carrier=carrier), on_error="raise")
    with pytest.raises(TooFewClients, match=r"minimum cohort size of 3 clients \(group sizes: 2; min_cohort = 3\)"):
        eye(fed).each(range(CLIENTS), broken)
    bad = {"model": np.full(5, np.nan)}
    raised = []
    for one in (fed, federation(SCENE)):
        with pytest.raises(Exception) as error:
            one.compute(training(SCENE), bad)
        raised.append((type(error.value), str(error.value)))
    if raised[0][0] is RuntimeError:  # an error that is none of ours is said in words
        assert raised[0][1] == f"{raised[1][0].__name__}: {raised[1][1]}"
    else:
        assert raised[0] == raised[1]


@pytest.mark.parametrize(
    "error",
    [
        RemoteError("no-secret", 3),
        MalformedMessage(),
        LocalError("reused", "why"),
        TooFewClients((1, 2), 3),
        SumFailed("false-shares", (1,)),
    ],
)
def test_errors_of_protocols_are_the_same_in_another_process(error: ProtocolError) -> None:
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_test_entropy_continues_in_another_process() -> None:
    whole, cut = public_entropy("hosts"), public_entropy("hosts")
    whole(5), cut(5)
    assert pickle.loads(pickle.dumps(cut))(20) == whole(20)


def test_several_hosts_are_for_cpus() -> None:
    engine = Engine()
    engine.device = "cuda"
    with pytest.raises(InputError, match=r"run\.device = 'cuda': several hosts compute on CPUs"):
        federation(SCENE, engine=engine, hosted=partial(SplitHosts, carrier=FakeCarrier(HOSTS)))


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert in_process(monkeypatch, "run", str(EXAMPLE), "--hosts", "2", "--out", "nowhere") == 2
    assert "--hosts, --ray: Ray is not installed; pip install 'cflpriv[ray]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_has_what_clients_keep_at_all_hosts(tmp_path: Path) -> None:
    """A run is resumed at other hosts, with the rest of its test entropy."""
    config = load_config(EXAMPLE, QUICK)

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(config, tmp_path / "run", hosted=partial(SplitHosts, carrier=FakeCarrier(3)), tick=stop)
    run_experiment(config, tmp_path / "run", hosted=partial(SplitHosts, carrier=FakeCarrier(2)), resume=True)
    run_experiment(config, tmp_path / "whole")
    assert_same_models(tmp_path / "run", tmp_path / "whole")


def assert_same_models(run: Path, whole: Path) -> None:
    one, other = (load_checkpoint(folder / "checkpoints", "final") for folder in (run, whole))
    assert one.server.keys() == other.server.keys()
    for name, value in other.server.items():
        np.testing.assert_allclose(one.server[name], value, rtol=0, atol=1e-12, err_msg=name)


# --- the command line, on Ray


def descendants(mark: str) -> list[int]:
    """Processes that have `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def listening(processes: Sequence[int]) -> set[str]:
    """The addresses at which these processes take connections."""
    sockets = set()
    for process in processes:
        with suppress(OSError):
            sockets |= {os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir()}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text(encoding="utf-8").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                mapped = raw[12:] if raw.startswith(bytes(10) + b"\xff\xff") else raw
                found.add(str(ipaddress.ip_address(mapped)))
    return found


def ended(mark: str, seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while descendants(mark) and time.monotonic() < until:
        time.sleep(0.2)
    return not descendants(mark)


@pytest.mark.slow
def test_ctrl_c_ends_a_run_on_ray_and_leaves_nothing_running(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'cflpriv[ray]')")
    mark = f"CFLPRIV_TEST_{uuid4().hex}"
    words = [sys.executable, "-m", "cflpriv.cli", "run", str(EXAMPLE), "--out", str(tmp_path / "run"), "--hosts", "2"]
    words += [word for change in [*QUICK, "training.rounds=30"] for word in ("--set", change)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, encoding="utf-8", env={**os.environ, mark: "1"}, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round 2/"):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
            break
    rest = process.stdout.read()
    assert process.wait(timeout=120) == 0
    assert "continue with --resume" in rest
    assert ended(mark)
    again = subprocess.run([*words, "--resume"], capture_output=True, encoding="utf-8", env={**os.environ, mark: "1"})
    assert again.returncode == 0, again.stderr
    assert ended(mark)
    run_experiment(load_config(EXAMPLE, [*QUICK, "training.rounds=30"]), tmp_path / "whole")
    assert_same_models(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_local_ray_listens_on_the_loopback_only_and_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'cflpriv[ray]')")
    mark = f"CFLPRIV_TEST_{uuid4().hex}"
    words = [sys.executable, "-m", "cflpriv.cli", "run", str(EXAMPLE), "--out", str(tmp_path / "run"), "--hosts", "2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, encoding="utf-8", env={**os.environ, mark: "1"})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round 2/"):
            break
    assert len(descendants(mark)) > 3
    addresses = listening(descendants(mark))
    assert addresses
    assert all(ipaddress.ip_address(one).is_loopback for one in addresses), addresses
    process.kill()
    process.wait()
    # Ray's agents first report the death to its control service, which is gone, and wait a minute for the answer
    assert ended(mark, 120.0), [Path(f"/proc/{one}/cmdline").read_bytes() for one in descendants(mark)]


@pytest.mark.slow
def test_importing_the_package_does_not_import_ray() -> None:
    code = "import sys, cflpriv, cflpriv.cli, cflpriv.transports.ray, cflpriv.experiments; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_an_address_without_a_cluster_is_refused_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'cflpriv[ray]')")
    words = [sys.executable, "-m", "cflpriv.cli", "run", str(EXAMPLE), "--out", str(tmp_path / "run"), "--ray", "127.0.0.1:1"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 2
    assert "cflpriv: --ray 127.0.0.1:1: " in done.stderr
    assert not (tmp_path / "run").exists()
