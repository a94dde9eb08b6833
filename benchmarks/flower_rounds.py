"""A round on Flower with sums in one message and resident helpers, against a round with pairwise sums in active mode.

    python -m benchmarks flower_rounds          # four SuperNodes
    python -m benchmarks flower_rounds 4 16     # four, then sixteen

For each number of SuperNodes there are two deployments on the loopback, one after the other (`examples/flower_app/loopback.py`): the same
app, whose clients give back a vector of 10,000 numbers, and helpers that stay (`cflpriv helper`). A round is one computation and one mean
over all clients. The first round of each, which greets clients and learns the form of results, does not count. Wall time: nearly all of it
is Flower starting a process for every message.
"""

import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import tomli_w

from .flower import CLIENT, DIMENSION, EXAMPLE, OURS, example

__all__ = ["main", "round_seconds"]

ROUNDS = 3
HELPERS = 4
GOALS = {4: 0.5, 16: 1 / 3}
"""The most that a round may take, as a share of the active one's, by number of SuperNodes."""
PROTECTIONS = {"active": {"sum": "secagg"}, "one message": {"sum": "one_message"}}

SERVER = '''
"""Rounds of one computation and one secure mean, each timed."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp

from cflpriv.contract.protection import Protection
from cflpriv.contract.schedule import Schedule, request
from cflpriv.federation.contract_record import make_contract
from cflpriv.federation.foreign import Foreign
from cflpriv.federation.resident import WithResidents
from cflpriv.federation.server import FederationServer
from cflpriv.federation.transport import OverBytes
from cflpriv.flower.client import read_roster
from cflpriv.flower.transport import GridTransport
from cflpriv.privacy.settings import Privacy

app = ServerApp()


@app.main()
def main(grid, context):
    given = context.run_config
    plan = json.loads(Path(given["out"] + ".json").read_text())
    transport = GridTransport(grid, deadline_seconds=600.0, hello_seconds=300.0)
    if plan["residents"]:
        transport = WithResidents(transport, plan["residents"])
    roster, protection = read_roster(Path(plan["roster"])), Protection(**plan["protection"])
    task = Foreign("train", ("update",), (("w", (plan["dimension"],), "float32"),))
    contract = make_contract(
        run="", algorithm="none", settings={}, rounds=plan["rounds"], seed=0, schedule=Schedule(round=(request(task, {"update": "sum"}),)),
        protection=protection, privacy=Privacy(), roster=roster,
    )
    federation = FederationServer(OverBytes(transport), protection=protection, roster=roster, contract=contract)
    transport.welcome_all(federation, given["clients"], 300.0)
    seconds = []
    for number in range(plan["rounds"]):
        began = time.perf_counter()
        federation.begin_round(number)
        held = federation.compute(task, {"model": np.zeros(plan["dimension"], np.float32)})
        (mean,) = federation.mean(held["update"])
        assert mean is not None and mean.count == given["clients"]
        seconds.append(time.perf_counter() - began)
    Path(given["out"] + ".rounds").write_text(json.dumps(seconds))
'''


def round_seconds(nodes: int, protection: dict[str, str]) -> list[float]:
    """The wall time of each counted round of a deployment with so many SuperNodes."""
    loopback = example()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "d"
        out.mkdir()
        changes = [f"data.clients={nodes}"]
        with loopback.deploy(out, EXAMPLE / "experiment.toml", changes, None, 600.0) as machines:
            residents = _settle(loopback, machines, out, nodes, protection)
            app = out / "app" / "clustered"
            for name, text in (("client", CLIENT), ("ours", OURS), ("server", SERVER)):
                (app / f"{name}.py").write_text(text, encoding="utf-8")
            plan = {
                "rounds": ROUNDS, "dimension": DIMENSION, "protection": protection, "residents": residents,
                "roster": str(out / "own" / "roster.txt"),
            }  # fmt: skip
            (out / "run.json").write_text(json.dumps(plan), encoding="utf-8")
            run_id = loopback.submit(machines)
            word = loopback.wait(machines, run_id, 3000)
            if word != "finished:completed":
                raise RuntimeError(f"the run ended as {word!r}: {loopback.flwr(machines, 'log', run_id, 'loop', '--show')}")
        seconds: list[float] = json.loads((out / "run.rounds").read_text(encoding="utf-8"))
    return seconds[1:]


def _settle(loopback: ModuleType, machines: object, out: Path, nodes: int, protection: dict[str, str]) -> list[str]:
    """Give each client settings with this protection, and start the helpers that it needs. Returns the addresses of these."""
    from cflpriv.flower.client import write_identities

    helpers = HELPERS if protection["sum"] == "one_message" else 0
    write_identities(out / "own", nodes, key_holder=helpers)
    common = {"roster": "own/roster.txt", "protection": protection}
    for client in range(nodes):
        settings = {"identity": f"own/client{client}.key", "state": f"own/state{client}", **common}
        (out / f"client{client}.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    ports = loopback.free_ports(helpers)
    for number, port in enumerate(ports):
        name = f"key-holder{number or ''}"
        settings = {"role": "key-holder", "identity": f"own/{name}.key", "state": f"own/state-{name}", **common}
        (out / f"{name}.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
        machines.start(name, "cflpriv", "helper", str(out / f"{name}.toml"), "--listen", f"127.0.0.1:{port}")  # type: ignore[attr-defined]
    return [f"127.0.0.1:{port}" for port in ports]


def main(words: Sequence[str]) -> int:
    """Print the table; 1 if a goal is missed."""
    missed = 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no process of a deployment is left behind
    print(f"{'SuperNodes':>10} {'active s':>9} {'one message s':>14} {'share':>6} {'goal':>5}")
    for nodes in [int(word) for word in words] or [4]:
        active, ours = (statistics.median(round_seconds(nodes, protection)) for protection in PROTECTIONS.values())
        goal = GOALS.get(nodes)
        missed += goal is not None and ours > goal * active
        print(f"{nodes:>10} {active:>9.1f} {ours:>14.1f} {ours / active:>6.2f} {'' if goal is None else f'{goal:.2f}':>5}", flush=True)
    return int(missed > 0)
