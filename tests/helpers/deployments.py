"""The example's own script as a module, what its runs should give, and clients that kill their SuperNode at a message of one's choice."""

import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkout import ROOT
from fake_grid import FakeGrid
from flwr.app import Context, Message
from quick_flower import commands
from safetensors.numpy import load_file

from cflpriv.contract.schedule import CLASS_SCORES
from cflpriv.contract.transcript import read_transcript
from cflpriv.data import build_population
from cflpriv.experiments import load_config
from cflpriv.federation.server import FederationServer
from cflpriv.flower.client import client_app, write_identities
from cflpriv.protocols.entropy import public_entropy
from cflpriv.transports.simulation import simulate
from cflpriv.types import ClientData, Population

APP = ROOT / "examples" / "flower_app"
KILLED = -9

DYING = '''
"""The example's client. A SuperNode dies, with all it started, at the messages in plan.json: [client, message, "before" or "after"]."""

import json
import os
import signal
import time
from pathlib import Path

from clustered import living as example
from cflpriv.protocols.secagg.messages import decode_server
from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient

FOLDER = Path(os.environ["CFLPRIV_SETTINGS"])
living = FederationClient.receive
app = example.app


def name(ask):
    if isinstance(ask, m.SumStep):
        return type(decode_server(ask.message)).__name__
    if isinstance(ask, m.Compute):
        return json.loads(ask.task.data)[""]
    return ask.operation if isinstance(ask, m.Give) else type(ask).__name__


def dying(self, data):
    log = FOLDER / "deaths.jsonl"
    deaths = log.read_text().splitlines() if log.exists() else []
    plan = json.loads((FOLDER / "plan.json").read_text())[len(deaths):]
    said = name(m.decode_ask(data))

    def die(when):
        if plan and plan[0] == [self.number, said, when]:
            with log.open("a") as file:
                file.write(json.dumps([self.number, said, when, time.time()]) + chr(10))
                file.flush()
                os.fsync(file.fileno())
            os.killpg(os.getpgrp(), signal.SIGKILL)

    die("before")
    answer = living(self, data)
    die("after")
    return answer


FederationClient.receive = dying
'''


def _same(client: ClientData, context: Context, tables: dict[str, Any]) -> ClientData:
    return client


class DyingGrid(FakeGrid):
    """A grid in this process whose nodes die just when they would get the n-th message of a stage; they are back when nodes are next asked
    for. `holders`: nodes beside those of the clients, numbered after them, hold the keys or the shares of a comparison.
    """

    def __init__(
        self, folder: Path, scene: Population, protection: str, plan: Mapping[tuple[str, int], Iterable[int]], holders: int = 0
    ) -> None:
        write_identities(folder / "keys", len(scene.clients), public_entropy(str(folder)), key_holder=holders)
        configs = {}
        for client in scene.clients:
            path = folder / f"client{client.id}.toml"
            files = f'identity = "keys/client{client.id}.key"\nroster = "keys/roster.txt"\nstate = "state{client.id}"\n'
            path.write_text(f"{files}allow_scores = true\n[protection]\n{protection}\n", encoding="utf-8")
            configs[client.id] = {"settings": str(path)}
        apps = {client.id: client_app(partial(_same, client)) for client in scene.clients}
        for number in range(holders):
            name, node = f"key-holder{number or ''}", len(scene.clients) + number
            path = folder / f"{name}.toml"
            files = f'role = "key-holder"\nidentity = "keys/{name}.key"\nroster = "keys/roster.txt"\nstate = "state-{name}"\n'
            path.write_text(f"{files}[protection]\n{protection}\n", encoding="utf-8")
            configs[node] = {"settings": str(path)}
            apps[node] = client_app(partial(_same, scene.clients[0]))  # it has no data, and nobody asks it for any
        super().__init__(apps, configs)
        self.plan, self.seen = dict(plan), dict.fromkeys(("enrol",), 0)

    def get_node_ids(self) -> Iterable[int]:
        self.dead.clear()
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        stage = messages[0].metadata.group_id
        self.seen[stage] = self.seen.get(stage, 0) + 1
        self.dead |= set(self.plan.pop((stage, self.seen[stage]), ()))
        return super().push_messages(messages)


def loopback() -> Any:
    """The example's own script, as a module."""
    spec = importlib.util.spec_from_file_location("loopback", APP / "loopback.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quick_loopback(folder: Path) -> Any:
    """The same on commands of Flower that wait and import less (`quick_flower`), which it writes into `folder`.

    Flower is asked for its word on a run where the run folder is complete, and else every half minute: asking starts a process. A run is
    submitted when all have done their imports, which take long on a busy machine.
    """
    module = loopback()
    module.BIN = commands(folder / "bin", module.BIN)
    ask, submit, asked = module.status, module.submit, time.monotonic()

    def submitted(machines: Any) -> str:
        until = time.monotonic() + 600
        while not all(ready(machines.out / f"{name}.log") for name in machines.running) and time.monotonic() < until:
            time.sleep(0.2)
        return str(submit(machines))

    def status(machines: Any, run_id: str) -> str:
        nonlocal asked
        if not Path(machines.run_config["out"], "summary.json").exists() and time.monotonic() < asked + 30:
            return "running"
        asked = time.monotonic()
        return str(ask(machines, run_id))

    module.status, module.submit = status, submitted
    return module


def ready(log: Path) -> bool:
    """Whether the SuperExec of each SuperLink or SuperNode that wrote here has started, which it says when it has done its imports."""
    text = log.read_text(encoding="utf-8", errors="replace")
    started = text.count("Starting Flower SuperLink") + text.count("Starting Flower SuperNode")
    return 0 < started == text.count("Starting Flower SuperExec")


class Survivors:
    """A federation whose sums are over the clients named for each round."""

    def __init__(self, federation: FederationServer, survivors: Mapping[int, Sequence[int]]) -> None:
        self._federation, self._survivors = federation, survivors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._federation, name)

    def mean(self, held: Any, *rest: Any, **named: Any) -> Any:
        return self._federation.mean(held, *rest, **(named | {"on": self._survivors[self._federation.round]}))


def local_models(changes: list[str], survivors: Mapping[int, Sequence[int]] | None = None) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """Clusters and models of the same experiment in one process, in the clear; sums over `survivors` by round, if given."""
    config = load_config(APP / "experiment.toml", [*changes, "protection.sum=none"])
    population = build_population(config.data)
    algorithm = config.algorithm_for(population)
    server = simulate(population.clients, seed=config.run.seed, sampling=config.sampling()).federation
    federation: Any = server if survivors is None else Survivors(server, survivors)
    state = algorithm.init(federation)
    for number in range(config.training.rounds):
        if survivors is not None and number not in survivors:
            continue  # a round without a sum
        federation.begin_round(number)
        state, _ = algorithm.round(federation, state)
    models: Any = algorithm.serve(state).params["model"]
    return algorithm.describe(state)["clustering"], [model.value() for model in models]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """A run's rounds."""
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


def stages_of(run: Path) -> list[dict[str, Any]]:
    """A run's stages that have ended."""
    entries = [json.loads(line) for line in (run / "stages.jsonl").read_text(encoding="utf-8").splitlines()]
    return [entry for entry in entries if "answered" in entry]


def survivors_of(run: Path, messages: int) -> dict[int, tuple[int, ...]]:
    """Who is in the sum of each round that has one, by the server's record: those told of the survivors, or whose update came."""
    found: dict[int, tuple[int, ...]] = {}
    skipped = {row["round"] for row in rows_of(run) if row["skipped"]}
    for one in read_transcript(run / "transcript", messages):
        if one.operation == "mean" and one.kind in ("secagg Survivors", "update") and one.round not in skipped:
            found[one.round] = tuple(sorted({*found.get(one.round, ()), *one.clients}))
    return found


def check_models(run: Path, changes: list[str], atol: float) -> Any:
    """The models are those of the plain sums of each round's survivors. The clustering of the same experiment in one process."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    clustering, models = local_models(changes, survivors_of(run, summary["messages"]))
    found = load_file(run / "checkpoints" / "models.safetensors")
    assert len(found) == len(models)
    for i, model in enumerate(models):
        np.testing.assert_allclose(found[f"model/{i}"], model, atol=atol)
    return clustering


def run_with_deaths(module: Any, machines: Any, out: Path, plan: list[list[Any]], seconds: float, forget: Sequence[int] = ()) -> str:
    """Submit; restart each SuperNode that kills itself; Flower's word at the end. Clients in `forget` keep no state on disk."""
    app = out / "app" / "clustered"
    (app / "client.py").rename(app / "living.py")
    (app / "client.py").write_text(DYING, encoding="utf-8")
    (out / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    for client in forget:
        path = out / f"client{client}.toml"
        path.write_text(
            "".join(line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if not line.startswith("state =")),
            encoding="utf-8",
        )
    run_id = module.submit(machines)
    port, ports, tls = machines.ports
    until = time.monotonic() + seconds
    word, due = "?", 0.0
    while time.monotonic() < until:
        for name, process in list(machines.running.items()):
            if process.poll() is not None:
                assert process.returncode == KILLED, f"{name} ended with {process.returncode}"
                client = int(name.removeprefix("node"))
                module.start_node(machines, client, port, ports[client], tls)
        if time.monotonic() > due:
            asked = time.monotonic()
            word = module.status(machines, run_id)
            if word.startswith("finished"):
                return str(word)
            due = time.monotonic() + 5 * (time.monotonic() - asked)
        time.sleep(0.2)
    raise AssertionError(f"the run is still {word!r} after {seconds:g} s")


def begun(journal: Path, known: int = 0) -> list[str]:
    """The stages that have begun since the journal had `known` lines; all, where it has fewer by now."""
    entries = [json.loads(line) for line in journal.read_text(encoding="utf-8").split("\n")[:-1]] if journal.exists() else []
    return [entry["stage"] for entry in entries[known if known <= len(entries) else 0 :] if "answered" not in entry]


def kill_in_stage(module: Any, machines: Any, stage: tuple[str, int], names: Sequence[str], run_id: str = "") -> str:
    """Kill these processes by their own ids, and only these, when a stage has begun for the n-th time from now on: in the run of this id,
    else in one that is submitted. The run's id.
    """
    journal = Path(machines.run_config["out"]) / "stages.jsonl"
    known = journal.read_text(encoding="utf-8").count("\n") if journal.exists() else 0
    run_id = run_id or module.submit(machines)  # its first stages may begin before the command has ended
    until = time.monotonic() + 400
    while begun(journal, known).count(stage[0]) < stage[1]:  # asking Flower takes longer than a stage
        assert time.monotonic() < until, f"{stage} was never reached; begun: {begun(journal, known)}"
        time.sleep(0.02)
    for name in names:
        os.kill(machines.running[name].pid, signal.SIGKILL)
    for name in names:
        machines.running[name].wait(10)
    return run_id


def start_again(module: Any, machines: Any, names: Sequence[str]) -> None:
    """Start processes by the commands that they were started with."""
    for name in names:
        machines.start(name, *machines.running[name].args)
        if name == "superlink":
            module.health(machines.ports[0], 120, None)


def messages_of(run: Path, messages: int) -> list[tuple[Any, ...]]:
    """The messages of a run, a digest last, but for clients' scores, which an experimenter reads off in one process."""
    return [
        (one.round, one.operation, one.kind, one.source, one.target, one.clients, one.digest)
        for one in read_transcript(run / "transcript", messages)
        if one.kind != "+".join(CLASS_SCORES) and one.context.get("task") != "Evaluate"
    ]


def files_of(run: Path) -> set[str]:
    """A run folder's files, but for arrays of checkpoints."""
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.suffix != ".safetensors"}


def check_run_folder(there: Path, here: Path, *, exact: bool = True, only_here: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The run folder of messages is that of one process; `exact` to the last digest, else ciphertexts and noise differ. Its summary.

    `only_here` are files of what nobody sees whose clients are elsewhere.
    """
    one, two = (json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in (there, here))
    assert {key for key in two if not key.startswith("experimenter_")} <= set(one), "the experimenter's figures are of simulations alone"
    contributors = [messages_of(run, summary["messages"]) for run, summary in ((there, one), (here, two))]
    cut = None if exact else -1
    assert [message[:cut] for message in contributors[0]] == [message[:cut] for message in contributors[1]]
    assert files_of(here) - files_of(there) == only_here
    assert files_of(there) - files_of(here) == {"stages.jsonl"}
    keys = ["algorithm", "dataset", "protection", "clusters", "rounds", "data_digest", "epsilon", "delta", "privacy_unit", "stopped"]
    for key in [*keys, *(("accuracy_mean", "accuracy_worst", "ari") if exact else ())]:
        assert one.get(key) == (pytest.approx(two[key]) if isinstance(two.get(key), float) else two.get(key)), key
    assert [row["cohort"] for row in rows_of(there)] == [row["cohort"] for row in rows_of(here)]
    assert all(set(one) <= set(two) for one, two in zip(rows_of(there), rows_of(here), strict=True))
    if exact:
        measured = [json.loads((run / "measured.json").read_text(encoding="utf-8"))["labels"] for run in (there, here)]
        assert measured[0] == measured[1]
    return dict(one)


def deaths_of(out: Path) -> list[list[Any]]:
    """[client, message, when, time] of each death, in the client's own last words."""
    path = out / "deaths.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


__all__ = [
    "APP", "DyingGrid", "begun", "check_models", "check_run_folder", "deaths_of", "kill_in_stage", "local_models", "loopback",
    "messages_of", "quick_loopback", "rows_of", "run_with_deaths", "stages_of", "start_again", "survivors_of",
]  # fmt: skip
