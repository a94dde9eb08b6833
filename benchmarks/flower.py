"""What a stage of secure aggregation costs on Flower, against a stage that does nothing: same deployment, same polling, A B A B.

A SuperLink and four SuperNodes on the loopback (`examples/flower_app/loopback.py`). Before or after each of our stages the same clients are
asked an empty question, which is answered without a line or an import of ours (Flower starts a process for every message). A ratio is the
empty stage's seconds over ours, so 1 / 1.5 is the floor. Where flwr is not installed the row is skipped with a reason.
"""

import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["COMPARISONS", "stages"]

EXAMPLE = Path(__file__).parents[1] / "examples" / "flower_app"
ROUNDS, DIMENSION = 6, 10_000

CLIENT = '''
"""Answers an empty question, and ours; ours is imported where it is asked."""

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("empty")
def empty(message, context):
    return Message(RecordDict({"cflpriv": ConfigRecord({"answer": b"nothing"})}), reply_to=message)


@app.query("cflpriv")
def ours(message, context):
    from clustered.ours import app as inner

    return inner(message, context)
'''

OURS = '''
"""Our client, holding a vector instead of an update."""

import numpy as np
from flwr.app import ConfigRecord

from cflpriv.flower import cflpriv_mod
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp(mods=[cflpriv_mod()])


@app.query("cflpriv")
def train(message, context):
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)
'''

SERVER = '''
"""Secure sums, an empty stage beside each of their stages."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp

from cflpriv.flower.client import read_roster
from cflpriv.flower.transport import GridTransport
from cflpriv.contract.protection import Protection
from cflpriv.contract.schedule import Schedule, request
from cflpriv.federation.contract_record import make_contract
from cflpriv.federation.foreign import Foreign
from cflpriv.federation.server import FederationServer
from cflpriv.federation.transport import OverBytes
from cflpriv.privacy.settings import Privacy

app = ServerApp()


class Beside:
    """Our transport; each stage of a secure sum has an empty stage beside it, before it or after it by turns."""

    def __init__(self, grid):
        self.ours = GridTransport(grid, deadline_seconds=300.0, hello_seconds=120.0)
        self.empty = GridTransport(grid, deadline_seconds=300.0, message_type="query.empty")
        self.pairs = []

    def places(self):
        return self.ours.places()

    def exchange(self, requests, stage):
        if not stage.startswith("secagg"):
            return self.ours.exchange(requests, stage)
        first = len(self.pairs) % 2 == 0
        if first:
            self.empty.exchange(dict.fromkeys(requests, b"nothing"), "empty")
        answers = self.ours.exchange(requests, stage)
        if not first:
            self.empty.exchange(dict.fromkeys(requests, b"nothing"), "empty")
        self.pairs.append((stage, self.ours.stages[-1], self.empty.stages[-1]))
        return answers


@app.main()
def main(grid, context):
    given = context.run_config
    transport = Beside(grid)
    roster = read_roster(Path(given["roster"]))
    protection = Protection(sum="secagg", min_cohort=2)
    rounds, dimension = json.loads(Path(given["out"] + ".json").read_text())
    task = Foreign("train", ("update",), (("w", (dimension,), "float32"),))
    contract = make_contract(
        run="", algorithm="none", settings={}, rounds=rounds, seed=0, schedule=Schedule(round=(request(task, {"update": "sum"}),)),
        protection=protection, privacy=Privacy(), roster=roster,
    )
    federation = FederationServer(OverBytes(transport), protection=protection, roster=roster, contract=contract)
    transport.ours.welcome_all(federation, given["clients"], 600.0)
    for number in range(rounds):
        federation.begin_round(number)
        held = federation.compute(task, {"model": np.zeros(dimension, np.float32)})
        (mean,) = federation.mean(held["update"])
        assert mean is not None and mean.count == given["clients"]
    Path(given["out"] + ".pairs").write_text(json.dumps(transport.pairs))
'''


def example() -> ModuleType:
    """The example's script, as a module."""
    spec = importlib.util.spec_from_file_location("flower_loopback", EXAMPLE / "loopback.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pairs(rounds: int = ROUNDS, dimension: int = DIMENSION) -> list[tuple[str, float, float]]:
    """(stage, our seconds, the empty stage's seconds) of every stage of `rounds` secure sums in which all clients took part."""
    loopback = example()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "d"
        out.mkdir()
        with loopback.deploy(out, EXAMPLE / "experiment.toml", [], None, 300.0) as machines:
            app = out / "app" / "clustered"
            for name, text in (("client", CLIENT), ("ours", OURS), ("server", SERVER)):
                (app / f"{name}.py").write_text(text, encoding="utf-8")
            (out / "run.json").write_text(json.dumps([rounds, dimension]), encoding="utf-8")
            run_id = loopback.submit(machines)
            word = loopback.wait(machines, run_id, 3000)
            if word != "finished:completed":
                raise RuntimeError(f"the run ended as {word!r}: {loopback.flwr(machines, 'log', run_id, 'loop', '--show')}")
        measured = json.loads((out / "run.pairs").read_text(encoding="utf-8"))
    return [(stage, ours[3], empty[3]) for stage, ours, empty in measured if ours[1] == ours[2] == empty[2]]


def stages(rounds: int = ROUNDS) -> dict[str, Any]:
    """Stages of secure sums against empty stages beside them."""
    try:
        import flwr
    except ImportError:
        nothing = math.nan
        note = "flwr is not installed, so nothing is compared"
        return {"ratio": nothing, "low": nothing, "high": nothing, "floor": 1 / 1.5, "stretch": 1.0, "against": "-", "note": note}
    measured = pairs(rounds)
    ratios = sorted(empty / ours for _, ours, empty in measured)
    each = {stage: statistics.median(ours / empty for name, ours, empty in measured if name == stage) for stage, _, _ in measured}
    ours, theirs = [seconds for _, seconds, _ in measured], [seconds for _, _, seconds in measured]
    note = (
        f"{len(measured)} pairs, d = {DIMENSION}: ours {statistics.median(ours):.2f} s a stage, "
        f"empty {statistics.median(theirs):.2f} s, all together {sum(ours) / sum(theirs):.2f} times as long; "
        + ", ".join(f"{stage.removeprefix('secagg ')} {ratio:.2f}" for stage, ratio in each.items())
    )
    return {
        "ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1], "floor": 1 / 1.5, "stretch": 1.0,
        "against": f"flwr {flwr.__version__}", "note": note,
    }  # fmt: skip


COMPARISONS: dict[str, Callable[[], dict[str, Any]]] = {"a stage on Flower, against an empty one": stages}
"""Name -> what measures it, for `make bench`."""


if __name__ == "__main__":
    begun = time.perf_counter()
    print(json.dumps(stages(int(sys.argv[1]) if sys.argv[1:] else ROUNDS), indent=1), f"{time.perf_counter() - begun:.0f} s")
