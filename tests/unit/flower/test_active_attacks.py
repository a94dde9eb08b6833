"""Active attacks on Flower: the same attack code over the Grid, with clients that are started from their settings files."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployments import APP, loopback
from fake_grid import FakeGrid
from flwr.app import Context
from scenes import population

from cflpriv.attacks.active.audit import FILE, active_audit, run_all
from cflpriv.attacks.active.scene import Clients, Scene
from cflpriv.data import build_population
from cflpriv.experiments import Config, parse_config
from cflpriv.federation.transport import OverBytes
from cflpriv.flower import GridTransport, client_app, write_identities
from cflpriv.flower.client import read_identity, read_roster, settings_of

CLIENTS = 5
SCENE = population(groups=1, clients_per_group=CLIENTS)
CONFIG = parse_config({
    "data": {"clients": CLIENTS}, "model": {"name": "linear"}, "training": {"rounds": 1, "weights": "equal", "lr": 0.1},
    "algorithm": {"name": "fedavg"}, "protection": {"sum": "secagg"},
})  # fmt: skip
PLAYED = (
    "second_sum", "stale_slot", "smaller_minimum", "sybils", "other_model", "switched_value", "split_survivors", "second_unmasking",
    "mode_downgrade", "other_operation", "dressed_task", "relay_to_accomplice", "next_round", "accomplices",
)  # fmt: skip


HELPED = CONFIG.with_("protection", sum="one_message")
OF_HELPERS = (
    "split_view", "second_set", "second_helped_sum", "copied_box", "other_seed", "lying_helper", "late_upload", "swapped_helper",
    "rolled_back_helper",
)  # fmt: skip


def deployed_scene(folder: Path, config: Config = CONFIG) -> Scene:
    """Nodes in this process, each with a settings file; for each attack a session of its own and parties that remember nothing."""
    helpers = config.protection.holders
    roster = write_identities(folder / "keys", CLIENTS, key_holder=helpers)
    names = [*(f"client{client}" for client in range(CLIENTS)), *(f"key-holder{number or ''}" for number in range(helpers))]
    files = [folder / f"{name}.toml" for name in names]
    configs: dict[int, dict[str, Any]] = {1000 + client: {"settings": str(path)} for client, path in enumerate(files)}
    started = count()

    def data(context: Context, tables: dict[str, Any]) -> Any:
        return SCENE.clients[settings_of(context)[0].identity.client]

    grid: Any = FakeGrid({node: client_app(data) for node in configs}, configs)
    holders = {number: read_identity(folder / "keys" / f"{name}.key") for number, name in enumerate(names[CLIENTS:])}
    identities = {client: read_identity(folder / "keys" / f"client{client}.key") for client in range(CLIENTS)}

    def start() -> Clients:
        number = next(started)
        for name, path in zip(names, files, strict=True):
            role = "" if name.startswith("client") else 'role = "key-holder"\n'
            keys = f'{role}identity = "keys/{name}.key"\nroster = "keys/roster.txt"\n'
            path.write_text(f'{keys}state = "state{number}/{name}"\n[protection]\nsum = "{config.protection.sum}"\n', encoding="utf-8")
        return Clients(OverBytes(GridTransport(grid, poll_seconds=0.0)), read_roster(roster), identities, holders)

    return Scene(config, SCENE, start)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "played", "ended"),
    [(CONFIG, PLAYED, {"no_gain", "refused"}), (HELPED, OF_HELPERS, {"refused"})],
    ids=["secagg", "one_message"],
)
def test_over_a_grid_clients_answer_as_in_one_process(tmp_path: Path, config: Config, played: tuple[str, ...], ended: set[str]) -> None:
    there = run_all(deployed_scene(tmp_path, config), played)
    here = active_audit(config, attacks=played, population=SCENE)
    for one, two in zip(there, here, strict=True):
        assert (one.attack, one.status, one.code, one.stage) == (two.attack, two.status, two.code, two.stage)
        assert (one.refusals, one.accomplices) == (two.refusals, two.accomplices)
        if two.value is not None:
            assert one.value == pytest.approx(two.value, abs=1e-5)
            assert one.baseline == pytest.approx(two.baseline)
    assert {one.status for one in here} == ended


SERVER = '''
"""A SuperLink's app that lies to the clients that it reaches, and writes what they answered."""

import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from cflpriv import build_population, load_config
from cflpriv.attacks.active.audit import run_all, written
from cflpriv.attacks.active.scene import Clients, Scene
from cflpriv.federation.transport import OverBytes
from cflpriv.flower import GridTransport
from cflpriv.flower.client import read_identity, read_roster

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    given = context.run_config
    config = load_config(str(given["experiment"]))
    roster = Path(str(given["roster"]))
    transport = GridTransport(grid)
    until = time.monotonic() + 120.0
    while len(transport.places()) < int(given["clients"]) and time.monotonic() < until:
        time.sleep(0.2)
    identities = {client: read_identity(roster.parent / f"client{client}.key") for client in range(int(given["clients"]))}
    met = Clients(OverBytes(transport), read_roster(roster), identities)
    rows = run_all(Scene(config, build_population(config.data), lambda: met), ["second_sum", "smaller_minimum"])
    written(rows, config, Path(str(given["out"])))
'''


@pytest.mark.flower
@pytest.mark.timeout(1800)
def test_a_deployment_is_lied_to(tmp_path: Path) -> None:
    module, out = loopback(), tmp_path / "d"
    out.mkdir()
    with module.deploy(out, APP / "experiment.toml", ["protection.min_cohort=3"], 1, 60.0) as machines:
        (out / "app" / "clustered" / "server.py").write_text(SERVER, encoding="utf-8")
        assert module.wait(machines, module.submit(machines), 1500) == "finished:completed"
    there = json.loads((out / "run" / FILE).read_text(encoding="utf-8"))
    config = module.load_config(out / "experiment.toml")
    here = active_audit(config, attacks=[row["attack"] for row in there], population=build_population(config.data))
    assert [(row["attack"], row["status"], row["code"], row["stage"]) for row in there] == [
        (row.attack, row.status, row.code, row.stage) for row in here
    ]
    assert [row["status"] for row in there][1] == "refused"
