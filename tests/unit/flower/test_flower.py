"""The operations on Flower's messages: transport, client app, settings, strategy, mod, accountant. Deployments are in test_deployment."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from agreements import contract_of
from checkout import ROOT
from deployments import APP
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.privacy_accounting import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod
from scenes import federation, population, training

from cflpriv.algorithms import ALGORITHMS
from cflpriv.attacks.audit import audit_run
from cflpriv.contract.protection import Protection
from cflpriv.contract.schedule import request
from cflpriv.contract.transcript import read_transcript
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import Config, load_config
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.run.checkpoint import tree_digest
from cflpriv.experiments.run.resume import locked
from cflpriv.federation import messages as m
from cflpriv.federation.server import FederationServer, KeyHolderLost
from cflpriv.federation.transport import OverBytes
from cflpriv.flower import ClusteredAveraging, GridTransport, PldAccountant, cflpriv_mod, client_app, serve, write_identities
from cflpriv.flower.client import ContextStore, read_roster, read_settings
from cflpriv.flower.transport import ANSWER, RECORD
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.secagg.vectors import largest_levels
from cflpriv.tasks.signatures import principal_vectors
from cflpriv.types import Population

HOLDER_NODE = 900


def deployment(
    folder: Path, scene: Population, protection: str = "", state: bool = False, privacy: str = "", key_holder: int = 0
) -> FakeGrid:
    """A node for each client, with keys and a settings file each, and one for each key holder."""
    write_identities(folder / "keys", len(scene.clients), public_entropy(str(folder)), key_holder=key_holder)
    configs = {}
    for client in range(len(scene.clients)):
        path = folder / f"client{client}.toml"
        kept = f'state = "state{client}"\n' if state or "secagg" in protection else ""
        kept += "allow_scores = true\n"
        tables = f"[protection]\n{protection}\n[privacy]\n{privacy}\n"
        path.write_text(f'identity = "keys/client{client}.key"\nroster = "keys/roster.txt"\n{kept}{tables}', encoding="utf-8")
        configs[1000 + client] = {"settings": str(path)}
    for number in range(int(key_holder)):
        name = f"key-holder{number or ''}"
        path = folder / f"{name}.toml"
        kept = f'state = "state-{name}"\n' if state else ""
        names = f'role = "key-holder"\nidentity = "keys/{name}.key"\nroster = "keys/roster.txt"\n'
        path.write_text(f"{names}{kept}[protection]\n{protection}\n", encoding="utf-8")
        configs[HOLDER_NODE + number] = {"settings": str(path)}
    by_number = {client.id: client for client in scene.clients}

    def data(context: Context, tables: dict[str, Any]) -> Any:
        return by_number[read_settings(str(context.node_config["settings"]))[0].identity.client]

    return FakeGrid({node: client_app(data) for node in configs}, configs)


@pytest.mark.slow
@pytest.mark.parametrize("state", [True, False])
def test_a_federation_on_flower_messages_equals_the_local_one(tmp_path: Path, state: bool) -> None:
    scene = population(clients_per_group=3)
    grid = deployment(tmp_path, scene, state=state)
    made = ALGORITHMS["stocfl"].make(training(scene), weights="equal")
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    fed = FederationServer(OverBytes(GridTransport(grid)), seed=1, contract=contract_of(made, roster=roster))  # type: ignore[arg-type]
    fed.enrol()
    one = federation(scene.clients, seed=1)
    states = []
    for each in (one, fed):
        current = made.init(each)
        for number in range(3):
            each.begin_round(number)
            current, _ = made.round(each, current)
        states.append(current)
    assert states[0].clustering == states[1].clustering
    np.testing.assert_allclose(states[0].global_model.value(), states[1].global_model.value(), rtol=1e-9)
    assert not fed.refusals
    assert set(grid.types) == {"query.cflpriv"}


def test_secure_sums_and_lost_nodes(tmp_path: Path) -> None:
    scene = population(groups=1, clients_per_group=5)
    grid = deployment(tmp_path, scene, 'sum = "secagg"\nmin_cohort = 3')
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    ticks = iter(range(10**9))
    transport = GridTransport(grid, clock=lambda: float(next(ticks)), poll_seconds=0.0)  # type: ignore[arg-type]
    task, protection = training(scene), Protection(sum="secagg", min_cohort=3)
    agreed = contract_of(None, request(task, {"update": "sum"}), protection=protection, roster=roster)
    fed = FederationServer(OverBytes(transport), protection=protection, roster=roster, seed=1, contract=agreed)
    assert fed.enrol() == (0, 1, 2, 3, 4)
    fed.begin_round(0)
    held = fed.compute(task, {"model": task.model.init(0)})
    grid.dead = {1002}
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    assert mean.count == 4
    grid.dead = set()
    grid.apps[7] = grid.apps.pop(1002)  # it comes back as another node
    grid.contexts[7] = Context(1, 7, {"settings": str(tmp_path / "client2.toml")}, RecordDict(), {})
    assert fed.begin_round(1) == (2,)
    assert not grid.errors


@pytest.mark.slow
def test_serve_writes_the_run_folder_of_a_local_run(tmp_path: Path) -> None:
    config = load_config(ROOT / "examples" / "flower_app" / "experiment.toml", ["training.rounds=1", "protection.sum=none"])
    scene = build_population(config.data)
    grid = deployment(tmp_path, scene, "min_cohort = 2")
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    with pytest.raises(InputError, match=r"0 of 4 clients answered within .* refusals"):
        serve(FakeGrid({}), config, tmp_path / "none", scene, clients=4, wait_seconds=0.1, report=str)  # type: ignore[arg-type]
    lower = config.with_("protection", min_cohort=0)
    with pytest.raises(InputError, match=r"0 of 4 clients answered within .* refusals"):  # their minimum is higher than the contract's
        serve(grid, lower, tmp_path / "run", scene, clients=4, wait_seconds=0.1, truth=truth, report=str)  # type: ignore[arg-type]
    grid = deployment(tmp_path / "again", scene)
    config = config.with_("protection", min_cohort=0).with_("run", record="full")
    summary = serve(grid, config, tmp_path / "open", scene, clients=4, truth=truth, report=str)  # type: ignore[arg-type]
    assert summary["ari"] == 1.0
    assert summary["accuracy_mean"] > 0.3
    assert json.loads((tmp_path / "open" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[0])["per_client"]["clients"] == [
        0,
        1,
        2,
        3,
    ]
    kinds = {(one.operation, one.kind) for one in read_transcript(tmp_path / "open" / "transcript", summary["messages"])}
    assert ("gather", "correct+count+confusion") in kinds, "single scores are on record"
    assert (tmp_path / "open" / "checkpoints" / "models.safetensors").exists()
    assert "pacfl" in write_report(tmp_path / "open").read_text(encoding="utf-8")
    cells = audit_run(tmp_path / "open", budget="quick", attacks=["signature_inversion"], population=scene)
    assert "leaks" in {cell.status for cell in cells}


def test_deployed_clients_keep_to_their_release_policy(tmp_path: Path) -> None:
    config = load_config(APP / "experiment.toml", ["run.release_policy=off"])
    with pytest.raises(InputError, match=r"run\.release_policy = 'off': is for simulated clients"):
        serve(FakeGrid({}), config, tmp_path / "run", population(), clients=4, report=str)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


class Cut(Exception):
    """The SuperLink goes down."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protection", "stages"),
    [
        ("", ("round 0", "compute", "sum")),
        ('sum = "secagg"\nmin_cohort = 2', ("round 0", "compute", "secagg Deliver")),
        ('gram = ["haar"]\nsum = "haar"', ("round 0", "compute", "sum")),
    ],
    ids=["open", "secagg", "haar"],
)
def test_a_restarted_server_goes_on_from_its_last_round(tmp_path: Path, protection: str, stages: tuple[str, ...]) -> None:
    """Clients keep their state in files; the transcript, rows and models are those of a run that was not cut."""
    import tomllib

    from safetensors.numpy import load_file

    from cflpriv.experiments.config.config import parse_config

    example = ROOT / "examples" / "flower_app" / "experiment.toml"
    tree = tomllib.loads(example.read_text(encoding="utf-8"))
    tree["protection"] = tomllib.loads(protection)
    tree["training"] |= {"rounds": 3, "epochs": 1, "batch_size": 60}
    tree["model"]["hidden"] = 4
    config = parse_config(tree)
    scene = build_population(config.data)
    whole = deployment(tmp_path / "whole", scene, protection, state=True)
    roster = read_roster(tmp_path / "whole" / "keys" / "roster.txt")
    expected = serve(whole, config, tmp_path / "w", scene, clients=4, roster=roster, report=str)  # type: ignore[arg-type]
    for at in stages:
        folder = tmp_path / at
        grid = deployment(folder, scene, protection, state=True)
        roster = read_roster(folder / "keys" / "roster.txt")
        push, says = grid.push_messages, cut_at(grid, at)
        with pytest.raises(Cut):
            serve(grid, config, folder / "r", scene, clients=4, roster=roster, report=says)  # type: ignore[arg-type]
        grid.push_messages = push  # type: ignore[method-assign]
        for node in list(grid.apps):  # a new run: contexts are new, and so are node ids
            grid.apps[node + 50] = grid.apps.pop(node)
            grid.contexts[node + 50] = Context(2, node + 50, grid.contexts.pop(node).node_config, RecordDict(), {})
        written = folder / "r" / "config.toml"
        written.write_text(
            written.read_text(encoding="utf-8").replace("normalise = true\n", ""), encoding="utf-8"
        )  # as before there was this key
        again = serve(grid, config, folder / "r", scene, clients=4, roster=roster, resume=True, report=str)  # type: ignore[arg-type]
        assert not again["refusals"], at
        rows = [
            [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
            for run in (tmp_path / "w", folder / "r")
        ]
        assert [row["cohort"] for row in rows[0]] == [row["cohort"] for row in rows[1]], at
        assert again["rounds"] == expected["rounds"] == 3
        read_transcript(folder / "r" / "transcript", again["messages"])
        if "haar" not in protection:
            models = [load_file(run / "checkpoints" / "models.safetensors") for run in (tmp_path / "w", folder / "r")]
            for name in models[0]:
                np.testing.assert_allclose(models[0][name], models[1][name], atol=1e-5, err_msg=at)
        with pytest.raises(InputError, match=r"run\.seed is 9, but .* has 0"):
            serve(grid, config.with_("run", seed=9), folder / "r", scene, clients=4, roster=roster, resume=True, report=str)  # type: ignore[arg-type]


def cut_at(grid: FakeGrid, at: str) -> Callable[[str], None]:
    """The link goes down when a stage begins for the second time (the fourth, of training), or a round ends that is said."""
    seen: dict[str, int] = {}
    push = grid.push_messages

    def fails(messages: Any) -> Any:
        messages = list(messages)
        stage = messages[0].metadata.group_id
        seen[stage] = seen.get(stage, 0) + 1
        if stage == at and seen[stage] == (4 if at == "compute" else 2):
            raise Cut
        return push(messages)

    def says(line: str) -> None:
        if line.startswith(at):
            raise Cut

    grid.push_messages = fails  # type: ignore[method-assign]
    return says


@pytest.mark.slow
@pytest.mark.parametrize(
    ("privacy", "protection"),
    [('unit = "sample"\nsamples = 300', ""), ('unit = "sample"\nsamples = 300', 'gram = ["haar"]\nsum = "secagg"\nmin_cohort = 2'),
     ('unit = "sample"\nsamples = 300\nnoise = "shared"', 'gram = ["haar"]\nsum = "secagg"\nmin_cohort = 2'),
     ('unit = "client"\nclip_norm = 0.5', ""), ('unit = "client"\nclip_norm = 0.5', 'sum = "secagg"\nmin_cohort = 3')],
)  # fmt: skip
def test_a_private_run_costs_what_a_local_one_does_and_a_restart_forgets_no_charge(
    tmp_path: Path, privacy: str, protection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tomllib

    from cflpriv.experiments import run_experiment
    from cflpriv.experiments.config.config import Config, parse_config

    tree = tomllib.loads((ROOT / "examples" / "flower_app" / "experiment.toml").read_text(encoding="utf-8"))
    asked = f"{privacy}\nepsilon = 8.0\ndelta = 1e-3\nsketch_dim = 16"
    tree |= {"protection": tomllib.loads(protection), "privacy": tomllib.loads(asked)}
    tree["training"] |= {"epochs": 1, "batch_size": 60}
    tree["model"]["hidden"] = 8
    tree["algorithm"] = {"name": "pacfl", "k": 2} if "sample" in privacy else {"name": "fedavg"}
    config = parse_config(tree)
    scene, noise = build_population(config.data), config.noise()
    monkeypatch.setattr(Config, "noise", lambda self, *asked: noise)  # calibrated once
    local = run_experiment(config, tmp_path / "local")
    grid = deployment(tmp_path, scene, protection, state=True, privacy=asked)
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    summary = serve(grid, config, tmp_path / "run", scene, clients=4, roster=roster, report=str)  # type: ignore[arg-type]
    assert not summary["refusals"]
    assert summary["rounds_skipped"] == 0
    for key in ("epsilon", "delta", "epsilon_budget", "privacy_unit", "stopped"):
        assert summary[key] == local[key], key
    ledgers = [json.loads((tmp_path / run / "ledger.json").read_text(encoding="utf-8"))["charges"] for run in ("local", "run")]
    assert ledgers[0] == ledgers[1]
    assert summary["accuracy_mean"] is None, "scores have no noise"
    unit = config.privacy.unit
    why = "under protection.sum = 'secagg'" if config.protection.secure else f"under privacy.unit = {unit!r}"
    assert [note.partition(" clients do")[0] for note in summary["notes"][-2:]] == [
        f"no accuracy: {why}", "no ari: the true groups are not known to the server",
    ]  # fmt: skip

    grid = deployment(tmp_path / "cut", scene, protection, state=True, privacy=asked)
    roster, push, seen = read_roster(tmp_path / "cut" / "keys" / "roster.txt"), grid.push_messages, []

    def fails(messages: Any) -> Any:
        messages = list(messages)
        seen.append(messages[0].metadata.group_id)
        if seen.count("sum") == 2 or seen.count("secagg Deliver") == 2:
            raise Cut
        return push(messages)

    grid.push_messages = fails  # type: ignore[method-assign]
    with pytest.raises(Cut):
        serve(grid, config, tmp_path / "r", scene, clients=4, roster=roster, report=str)  # type: ignore[arg-type]
    grid.push_messages = push  # type: ignore[method-assign]
    kept = (tmp_path / "r" / "ledger.json").read_bytes()
    (tmp_path / "r" / "ledger.json").unlink()
    with pytest.raises(InputError, match=r"ledger\.json: is not there, where the checkpoint knows of"):
        serve(grid, config, tmp_path / "r", scene, clients=4, roster=roster, resume=True, report=str)  # type: ignore[arg-type]
    (tmp_path / "r" / "ledger.json").write_bytes(kept)
    again = serve(grid, config, tmp_path / "r", scene, clients=4, roster=roster, resume=True, report=str)  # type: ignore[arg-type]
    charges = json.loads((tmp_path / "r" / "ledger.json").read_text(encoding="utf-8"))["charges"]
    assert charges == ledgers[1], "the round that was cut is paid, and another would be too dear"
    assert "refused by the privacy ledger" in again["stopped"]
    assert again["epsilon"] == summary["epsilon"]


def test_bad_settings_get_a_word_and_no_text(tmp_path: Path) -> None:
    scene = population(clients_per_group=1)
    grid = deployment(tmp_path, scene, 'sun = "secagg"')
    fed = FederationServer(OverBytes(GridTransport(grid)))  # type: ignore[arg-type]
    assert fed.enrol() == ()
    assert fed.refusals == [(-1, "enrol", "bad-settings")] * 2
    assert not grid.errors
    with pytest.raises(InputError, match=r"client0.toml: \[protection\] sun = 'secagg': is not a key here"):
        read_settings(tmp_path / "client0.toml")
    for text, word in (
        ("", "identity = None"),
        ('identity = "no.key"', "no.key: is not a key file"),
        ('identity = "keys/client0.key"\n[protection]\nsum = "secagg"', "give the roster"),
        ('identity = "keys/client0.key"\n[protection]\nsum = "nothing"', "protection.sum: 'nothing' is not known"),
        ('identity = "keys/client0.key"\n[protection]\n[privacy]\nunit = "sample"\nepsilon = 1.0\ndelta = 1e-5', "give a folder as state"),
        ('identity = "keys/client0.key"\n[protection]\n[privacy]\nunit = "sample"', "privacy.epsilon = 0.0"),
    ):
        (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=word):
            read_settings(tmp_path / "bad.toml")
    with pytest.raises(InputError, match="keys are not overwritten"):
        write_identities(tmp_path / "keys", 1)


# --- an application that exists already -----------------------------------------------------------------------------------------------


def stock_app(scene: Population, node: int, mods: list[Any]) -> ClientApp:
    """A client app that knows nothing of us: it takes "arrays", goes half the way to its target, and returns "arrays"."""
    app = ClientApp(mods=mods)
    target = float(node % 2)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content: Any = message.content
        weights = content["arrays"]["w"].numpy()
        step = float(content["config"]["lr"])
        moved = weights + step * (target - weights)
        sent: dict[str, Any] = {
            "arrays": ArrayRecord({"w": Array(moved.astype(np.float32))}),
            "metrics": MetricRecord({"num-examples": 10}),
        }
        return Message(RecordDict(sent), reply_to=message)

    return app


@pytest.mark.parametrize("protection", ["", 'sum = "secagg"\nmin_cohort = 3'])
def test_a_stock_app_becomes_clustered_and_secure(tmp_path: Path, protection: str) -> None:
    scene = population(clients_per_group=4)
    base = deployment(tmp_path, scene, protection)

    def signature(context: Context) -> Any:
        number = read_settings(str(context.node_config["settings"]))[0].identity.client
        rng = np.random.default_rng(number % 2)
        return principal_vectors(np.abs(rng.normal(size=(20, 12))) + np.arange(12) * (number % 2), 3)

    base.apps = {node: stock_app(scene, node, [cflpriv_mod(signature)]) for node in base.apps}
    settings = Protection(sum="secagg", min_cohort=3) if protection else Protection()
    strategy = ClusteredAveraging(settings, clients=8, k=2, roster=read_roster(tmp_path / "keys" / "roster.txt") if protection else None)
    seen = []
    result = strategy.start(
        base, ArrayRecord({"w": Array(np.full(16, 0.5, np.float32))}), 5, ConfigRecord({"lr": 0.5}),  # type: ignore[arg-type]
        evaluate_fn=lambda number, label, arrays: seen.append((number, label)),
    )  # fmt: skip
    assert result.labels == {client: client % 2 for client in range(8)}
    for label, arrays in enumerate(result.arrays):
        np.testing.assert_allclose(arrays["w"].numpy(), label + (0.5 - label) * 0.5**5, atol=1e-4)
    assert seen == [(number, label) for number in range(5) for label in (0, 1)]
    assert set(base.types) == {"train"}
    assert not base.errors


def test_the_strategy_stops_at_its_budget_and_noise_is_what_it_says(tmp_path: Path) -> None:
    scene = population(groups=1, clients_per_group=4)
    grid = deployment(tmp_path, scene)
    grid.apps = {node: stock_app(scene, 1, [cflpriv_mod()]) for node in grid.apps}
    accounts = PldAccountant(PrivacyConfig(1e-5, 4, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION, 3.0))
    strategy = ClusteredAveraging(clients=4, k=1, clip_norm=0.5, noise_multiplier=3.0, accountant=accounts, entropy=public_entropy("noise"))
    size = 20000
    result = strategy.start(grid, ArrayRecord({"w": Array(np.zeros(size, np.float32))}), 20, ConfigRecord({"lr": 1.0}))  # type: ignore[arg-type]
    done = [row for row in result.rounds if "stopped" not in row]
    assert 0 < len(done) < 20
    assert result.rounds[-1]["stopped"] == "the privacy budget is spent"
    assert result.epsilon is not None
    assert result.epsilon <= 3.0
    assert accounts.would_exceed(GaussianPrivacyEvent(3.0, 4, 4))
    # the sum of len(done) means, each with noise of 3 · 0.5 / 4 a coordinate: 6 standard errors of a sample deviation
    spread = np.std(result.arrays[0]["w"].numpy()) / (3.0 * 0.5 / 4 * np.sqrt(len(done)))
    assert abs(spread - 1) < 6 / np.sqrt(2 * size)
    with pytest.raises(InputError, match="needs clip_norm"):
        ClusteredAveraging(noise_multiplier=1.0)
    with pytest.raises(InputError, match="BatchNorm"):
        strategy.start(grid, ArrayRecord({"n": Array(np.zeros(1, np.int64))}))  # type: ignore[arg-type]


def test_noise_on_a_secure_sum_is_for_updates_as_they_are_rounded(tmp_path: Path) -> None:
    """16 bits among four clients, 20,000 parameters: what is summed may be half as long again as the clip norm, and so is the noise."""
    scene, size, level = population(groups=1, clients_per_group=4), 20000, 1.0 / largest_levels(4, 16)
    clip_norm = 2.01 * level * size**0.5  # coordinates of 2.01 levels, which are all rounded up to 3 or, mostly, are not
    grid = deployment(tmp_path, scene, 'sum = "secagg"\nmin_cohort = 3\nsecagg_bits = 16')
    grid.apps = {node: stock_app(scene, 1, [cflpriv_mod()]) for node in grid.apps}
    strategy = ClusteredAveraging(
        Protection(sum="secagg", min_cohort=3, secagg_bits=16), clients=4, k=1, clip_norm=clip_norm, noise_multiplier=3.0,
        roster=read_roster(tmp_path / "keys" / "roster.txt"), entropy=public_entropy("noise"),
    )  # fmt: skip
    arrays, still = ArrayRecord({"w": Array(np.zeros(size, np.float32))}), ConfigRecord({"lr": 0.0})
    result = strategy.start(grid, arrays, 1, still)  # type: ignore[arg-type]
    spread = np.std(result.arrays[0]["w"].numpy()) * 4 / 3.0
    assert abs(spread / (3.01 * level * size**0.5) - 1) < 6 / np.sqrt(2 * size)
    with pytest.raises(InputError, match=r"protection\.secagg_bits = 16: .* where clip_norm = 0\.01"):
        replace(strategy, clip_norm=0.01).start(grid, arrays, 1, still)  # type: ignore[arg-type]


def test_the_accountant_is_never_below_the_exact_value_and_below_flowers_own() -> None:
    from flwr.serverapp import RdpAccountant

    from cflpriv.protocols.mechanisms import gaussian_epsilon

    config = PrivacyConfig(1e-5, 100, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION, 8.0)
    ours, theirs = PldAccountant(config), RdpAccountant(config)
    for z, count in ((2.0, 3), (4.0, 10)):
        for one in (ours, theirs):
            one.compose(GaussianPrivacyEvent(z, 10, 100), count)
    exact = gaussian_epsilon((3 / 4 + 10 / 16) ** -0.5, 1e-5)
    assert ours.get_epsilon(1e-5) == pytest.approx(exact, rel=1e-6)
    assert ours.get_epsilon(1e-5) < theirs.get_epsilon(1e-5)
    again = PldAccountant(config)
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert again.get_privacy_spent() == ours.get_privacy_spent()
    with pytest.raises(InputError, match="NO_AMPLIFICATION"):
        PldAccountant(PrivacyConfig(1e-5, 100, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.POISSON))


# --- fresh processes --------------------------------------------------------------------------------------------------------------------

EACH_BY_ITSELF = """
import os, struct, sys
from pathlib import Path
import numpy as np
from cflpriv.flower.client import read_settings
from cflpriv.federation.client import FederationClient
from cflpriv.federation.store import DiskStore
from cflpriv.types import ClientData

def answer(path, request):
    settings, folder, _ = read_settings(path)
    def data():
        return ClientData(settings.identity.client, *np.load(Path(path).with_suffix(".npz")).values())
    client = FederationClient(settings, data, DiskStore(folder))
    before = "torch" in sys.modules
    said = client.receive(request)
    return bytes([before, "torch" in sys.modules]) + said

assert "torch" not in sys.modules
while head := sys.stdin.buffer.read(8):
    path, request = (sys.stdin.buffer.read(size) for size in struct.unpack("<II", head))
    if not os.fork():
        said = answer(path.decode(), request)
        sys.stdout.buffer.write(struct.pack("<I", len(said)) + said)
        sys.stdout.buffer.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""


class Processes:
    """A transport that forks a process for every message off one that has imported the client's modules and has no client."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.torch: dict[str, bool] = {}
        path = {"PYTHONPATH": str(ROOT / "tests" / "helpers"), "OMP_NUM_THREADS": "1", "PATH": ""}
        self.forks = subprocess.Popen([sys.executable, "-c", EACH_BY_ITSELF], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path)

    def places(self) -> list[int]:
        return list(range(self.count))

    def exchange(self, requests: Any, stage: str) -> dict[int, bytes]:
        assert self.forks.stdin is not None
        assert self.forks.stdout is not None
        answers = {}
        for place, data in requests.items():
            path = str(self.folder / f"client{place}.toml").encode()
            self.forks.stdin.write(struct.pack("<II", len(path), len(data)) + path + data)
            self.forks.stdin.flush()
            (size,) = struct.unpack("<I", self.forks.stdout.read(4))
            out = self.forks.stdout.read(size)
            assert out[0] == 0, "torch is loaded before it is known whether anything is computed"
            self.torch[stage] = bool(out[1])
            answers[place] = out[2:]
        return answers

    def close(self) -> None:
        self.forks.communicate(timeout=60)
        assert self.forks.returncode == 0


@pytest.mark.slow
def test_each_message_in_a_fresh_process_and_torch_only_to_compute(tmp_path: Path) -> None:
    scene = population(groups=1, clients_per_group=2)
    deployment(tmp_path, scene, 'sum = "secagg"\nmin_cohort = 2', state=True)
    for client in scene.clients:
        np.savez(tmp_path / f"client{client.id}.npz", client.x_train, client.y_train, client.x_test, client.y_test)
    transport = Processes(tmp_path, 2)
    task, protection, roster = training(scene), Protection(sum="secagg", min_cohort=2), read_roster(tmp_path / "keys" / "roster.txt")
    agreed = contract_of(None, request(task, {"update": "sum"}), protection=protection, roster=roster)
    fed = FederationServer(OverBytes(transport), protection=protection, roster=roster, seed=1, contract=agreed)
    fed.enrol()
    fed.begin_round(0)
    held = fed.compute(task, {"model": task.model.init(0)})
    (mean,) = fed.mean(held["update"])
    transport.close()
    one = federation(scene.clients, seed=1)
    one.begin_round(0)
    (plain,) = one.mean(one.compute(task, {"model": task.model.init(0)})["update"])
    assert mean is not None
    assert plain is not None
    np.testing.assert_allclose(mean.parts["update"].value(), plain.parts["update"].value(), atol=1e-6)
    assert transport.torch.pop("compute")
    assert not any(transport.torch.values())
    assert len(transport.torch) == 6


def test_flowers_context_keeps_state_as_a_store_does() -> None:
    context = Context(1, 2, {}, RecordDict(), {})
    ContextStore(context).put("a", b"1")
    assert ContextStore(context).get("a") == b"1"
    ContextStore(context).drop("a")
    assert ContextStore(context).names() == ()


@pytest.mark.slow
@pytest.mark.parametrize("state", [True, False])
def test_encrypted_similarity_with_a_key_holder_at_a_node_of_its_own(tmp_path: Path, state: bool) -> None:
    """The holder is a node without data, named in its settings; its node gone, a round is given up and the next one goes on."""
    pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    scene = population(clients_per_group=3)
    grid = deployment(tmp_path, scene, 'gram = ["ckks"]', state=state, key_holder=True)
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    ticks = iter(range(10**9))
    transport = GridTransport(grid, clock=lambda: float(next(ticks)), poll_seconds=0.0)  # type: ignore[arg-type]
    made, protection = ALGORITHMS["pacfl"].make(training(scene)), Protection(gram=("ckks",))
    agreed = contract_of(made, protection=protection, roster=roster)
    fed = FederationServer(OverBytes(transport), protection=protection, roster=roster, seed=1, contract=agreed)
    grid.dead = {HOLDER_NODE}
    transport.welcome(fed, 6, 3.0)
    assert fed.clients == (0, 1, 2, 3, 4, 5)
    assert fed.holder_missing
    with pytest.raises(KeyHolderLost):
        made.init(fed)
    grid.dead = set()
    transport.welcome(fed, 6, 100.0)
    found = made.init(fed)
    assert found.clustering == made.init(federation(scene.clients, seed=1)).clustering
    assert found.evidence is None
    assert not fed.refusals
    assert not grid.errors


def test_sums_in_one_message_with_helpers_at_nodes_of_their_own(tmp_path: Path) -> None:
    """Four nodes without data; one of them may be gone. A client answers once a round, from the second on, and a dropout costs nothing."""
    scene = population(groups=1, clients_per_group=5)
    grid = deployment(tmp_path, scene, 'sum = "one_message"', state=True, key_holder=4)
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    ticks = iter(range(10**9))
    transport = GridTransport(grid, clock=lambda: float(next(ticks)), poll_seconds=0.0)  # type: ignore[arg-type]
    protection, made = Protection(sum="one_message"), ALGORITHMS["fedavg"].make(training(scene), weights="equal")
    agreed = contract_of(made, protection=protection, roster=roster)
    fed = FederationServer(OverBytes(transport), protection=protection, roster=roster, seed=1, contract=agreed)
    transport.welcome(fed, 5, 100.0)
    state = made.init(fed)
    for number, dead in enumerate((set(), {HOLDER_NODE + 1}, {HOLDER_NODE + 1, 1002})):
        grid.dead = dead
        fed.begin_round(number)
        state, _ = made.round(fed, state)
    asked = [stage for stage, *_ in transport.stages]
    assert (asked.count("compute"), asked.count("sum")) == (3, 1)
    assert "second-sum" not in {code for _, _, code in fed.refusals}
    assert not grid.errors


@pytest.mark.parametrize("state", [True, False])
def test_shared_vectors_with_holders_at_nodes_of_their_own(tmp_path: Path, state: bool) -> None:
    """Three nodes without data; one of them gone, the comparison ends with one line, and is taken again when it is back."""
    scene = population(clients_per_group=3)
    grid = deployment(tmp_path, scene, 'gram = ["shares"]', state=state, key_holder=3)
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    assert len(roster.holders) == 3
    ticks = iter(range(10**9))
    transport = GridTransport(grid, clock=lambda: float(next(ticks)), poll_seconds=0.0)  # type: ignore[arg-type]
    made, protection = ALGORITHMS["pacfl"].make(training(scene)), Protection(gram=("shares",))
    agreed = contract_of(made, protection=protection, roster=roster)
    fed = FederationServer(OverBytes(transport), protection=protection, roster=roster, seed=1, contract=agreed)
    grid.dead = {HOLDER_NODE + 1}
    transport.welcome(fed, 6, 3.0)
    assert fed.holder_missing
    with pytest.raises(KeyHolderLost, match=r"2 of 3 holders of shares are left, 3 are needed with the first among them: holder 1"):
        made.init(fed)
    grid.dead = set()
    transport.welcome(fed, 6, 100.0)
    found = made.init(fed)
    assert found.clustering == made.init(federation(scene.clients, seed=1)).clustering
    assert not fed.refusals
    assert not grid.errors


def test_settings_of_holders_are_checked_by_name(tmp_path: Path) -> None:
    deployment(tmp_path, population(), 'gram = ["shares"]', key_holder=2)
    with pytest.raises(InputError, match=r"give a roster that names 3 key-holders \(share_holders\)"):
        read_settings(tmp_path / "key-holder.toml")
    (tmp_path / "key-holder.toml").write_text(
        (tmp_path / "key-holder.toml").read_text(encoding="utf-8").replace('gram = ["shares"]', ""), encoding="utf-8"
    )
    with pytest.raises(InputError, match="role = 'key-holder' needs"):
        read_settings(tmp_path / "key-holder.toml")


def test_serve_runs_encrypted_similarity(tmp_path: Path) -> None:
    pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    said = ["training.rounds=1", "protection.sum=none", 'protection.gram=["ckks"]', "protection.min_cohort=0"]
    config = load_config(ROOT / "examples" / "flower_app" / "experiment.toml", said)
    scene = build_population(config.data)
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    grid = deployment(tmp_path, scene, 'gram = ["ckks"]', state=True, key_holder=True)
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    grid.dead = {HOLDER_NODE}
    with pytest.raises(InputError, match=r"the key holder did not answer within 0\.1 s"):
        serve(grid, config, tmp_path / "none", scene, clients=4, roster=roster, wait_seconds=0.1, report=str)  # type: ignore[arg-type]
    grid.dead = set()
    summary = serve(grid, config, tmp_path / "run", scene, clients=4, truth=truth, roster=roster, report=str)  # type: ignore[arg-type]
    assert summary["ari"] == 1.0
    assert summary["rounds_skipped"] == 0
    assert not summary["refusals"]
    kinds = {one.kind for one in read_transcript(tmp_path / "run" / "transcript", summary["messages"])}
    assert {"ckks key", "ckks enrolment", "ckks request", "result"} <= kinds


def test_a_server_that_is_stopped_twice_in_one_round_goes_on(tmp_path: Path) -> None:
    """Each restart asks clients for sums that none before it has asked for, also if it completed no round."""
    import tomllib

    from cflpriv.experiments.config.config import parse_config

    tree = tomllib.loads((ROOT / "examples" / "flower_app" / "experiment.toml").read_text(encoding="utf-8"))
    tree["protection"], tree["training"]["rounds"] = {"sum": "secagg", "min_cohort": 2}, 2
    tree["training"] |= {"epochs": 1, "batch_size": 60}
    config = parse_config(tree)
    scene = build_population(config.data)
    grid = deployment(tmp_path, scene, 'sum = "secagg"\nmin_cohort = 2', state=True)
    roster, push = read_roster(tmp_path / "keys" / "roster.txt"), grid.push_messages
    for turn in range(4):
        left = {0: 2, 3: 1 << 30}.get(turn, 1)

        def fails(messages: Any) -> Any:
            nonlocal left
            messages = list(messages)
            left -= messages[0].metadata.group_id == "secagg Unmask"
            if not left:
                raise Cut
            return push(messages)

        grid.push_messages = fails  # type: ignore[method-assign]
        with suppress(Cut):
            summary = serve(grid, config, tmp_path / "r", scene, clients=4, roster=roster, resume=turn > 0, report=str)  # type: ignore[arg-type]
            assert turn == 3
        names = {path.stem for path in (tmp_path / "r" / "checkpoints").glob("*.json")}
        assert names == {"round_0000001" if turn < 3 else "final"}, "only the last is kept"
    assert not summary["refusals"]
    assert summary["rounds_skipped"] == 0
    restarts = [json.loads(line) for line in (tmp_path / "r" / "resumes.jsonl").read_text(encoding="utf-8").splitlines()]
    assert restarts == [{"number": number, "from": "round_0000001"} for number in (1, 2, 3)]
    assert not list((tmp_path / "r" / "checkpoints").glob("*.clients.*")), "no client's side of it is here"


def clustered(tmp_path: Path, rounds: int) -> tuple[Config, Population, FakeGrid]:
    """The example in the clear, and its nodes."""
    config = load_config(APP / "experiment.toml", [f"training.rounds={rounds}", "protection.sum=none", "protection.min_cohort=0"])
    scene = build_population(config.data)
    return config, scene, deployment(tmp_path, scene, state=True)


def test_a_run_that_ctrl_c_ended_goes_on_and_one_that_is_done_asks_nobody(tmp_path: Path) -> None:
    config, scene, grid = clustered(tmp_path, 3)
    out, lines = tmp_path / "r", []

    def says(line: str) -> None:
        lines.append(line)
        if line.startswith("round 0"):
            os.kill(os.getpid(), signal.SIGINT)

    cut = serve(grid, config, out, scene, clients=4, report=says)  # type: ignore[arg-type]
    assert cut["rounds"] == 1
    assert cut["rounds_planned"] == 3
    assert "interrupted: stopped after round 1 of 3" in lines[-1]
    whole = serve(grid, config, out, scene, clients=4, resume=True, report=str)  # type: ignore[arg-type]
    assert whole["rounds"] == 3
    assert not whole["refusals"]
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    assert serve(FakeGrid({}), config, out, scene, clients=4, resume=True, report=str) == json.loads(json.dumps(whole))  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()} == before


def test_a_resumed_deployment_waits_for_the_process_that_still_has_its_folder(tmp_path: Path) -> None:
    """The server's app of a killed SuperLink ends a little later."""
    config, scene, grid = clustered(tmp_path, 1)
    whole = serve(grid, config, tmp_path / "r", scene, clients=4, report=str)  # type: ignore[arg-type]
    has, gone, lines = threading.Event(), threading.Event(), []

    def other() -> None:
        with locked(tmp_path / "r"):
            has.set()
            gone.wait(60)

    def says(line: str) -> None:
        lines.append(line)
        gone.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert has.wait(60)
    again = serve(grid, config, tmp_path / "r", scene, clients=4, resume=True, report=says)  # type: ignore[arg-type]
    thread.join()
    assert again == json.loads(json.dumps(whole))
    assert lines[0] == f"waiting up to 120 s for another process that has {tmp_path / 'r'}"


def test_a_deployment_nobody_came_to_leaves_nothing_and_can_be_started_again(tmp_path: Path) -> None:
    config, scene, grid = clustered(tmp_path, 1)
    with pytest.raises(InputError, match=r"0 of 4 clients answered"):
        serve(FakeGrid({}), config, tmp_path / "r", scene, clients=4, wait_seconds=0.1, report=str)  # type: ignore[arg-type]
    assert not (tmp_path / "r").exists()
    with pytest.raises(InputError, match=r"protection\.min_cohort = 5: there are only 4 clients"):
        serve(grid, config.with_("protection", min_cohort=5), tmp_path / "r", scene, clients=4, report=str)  # type: ignore[arg-type]
    assert serve(grid, config, tmp_path / "r", scene, clients=4, report=str)["rounds"] == 1  # type: ignore[arg-type]


def test_a_deployment_waits_for_enough_to_agree_on_a_transform_and_says_how_many_it_needs(tmp_path: Path) -> None:
    config, scene, _ = clustered(tmp_path / "open", 1)
    haar = config.with_("protection", gram=("haar",))
    grid = deployment(tmp_path, scene, 'gram = ["haar"]', state=True)
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    grid.dead = {1001, 1002}
    words = r"0 of 2 clients answered .*; 2 of 4 clients are there; to agree on the secret of their transform 3 are needed"
    with pytest.raises(InputError, match=words):
        serve(grid, haar, tmp_path / "r", scene, clients=2, roster=roster, wait_seconds=0.1, report=str)  # type: ignore[arg-type]


def test_a_checkpoint_with_the_fewer_keys_of_an_early_version_is_gone_on_from(tmp_path: Path) -> None:
    config, scene, grid = clustered(tmp_path, 3)

    def says(line: str) -> None:
        if line.startswith("round 1"):
            raise Cut

    with pytest.raises(Cut):
        serve(grid, config, tmp_path / "r", scene, clients=4, report=says)  # type: ignore[arg-type]
    folder = tmp_path / "r" / "checkpoints"
    (path,) = folder.glob("round_*.json")
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["progress"] = {key: tree["progress"][key] for key in ("rounds", "transcript", "charges")}
    tree["files"] = {f"{path.stem}_0000002.safetensors": digest for digest in tree["files"].values()}
    (folder / f"{path.stem}.safetensors").rename(folder / f"{path.stem}_0000002.safetensors")
    path.unlink()
    (folder / f"{path.stem}_0000002.json").write_text(json.dumps(tree | {"digest": tree_digest(tree)}), encoding="utf-8")
    rows = [json.loads(line) for line in (tmp_path / "r" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = [{key: value for key, value in row.items() if key != "protection_seconds"} for row in rows]
    (tmp_path / "r" / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    summary = serve(grid, config, tmp_path / "r", scene, clients=4, resume=True, report=str)  # type: ignore[arg-type]
    assert summary["rounds"] == 3
    assert not summary["refusals"]


def test_an_evaluation_that_is_none_costs_its_client_a_score_and_not_the_run(tmp_path: Path) -> None:
    config = load_config(ROOT / "examples" / "flower_app" / "experiment.toml", ["training.rounds=1", "protection.sum=none"]).with_(
        "protection", min_cohort=0
    )
    scene = build_population(config.data)
    grid = deployment(tmp_path, scene)
    pull, odd = grid.pull_messages, [np.zeros(3), np.array(np.nan), np.array(-1.0), np.array(1e300)]

    def lying(message_ids: Any) -> list[Message]:
        arrived = pull(message_ids)
        for message in arrived:
            said = m.decode_answer(message.content[RECORD][ANSWER]) if RECORD in message.content else None  # type: ignore[arg-type]
            if isinstance(said, m.Given) and [one.name for one in said.values] == ["correct", "count", "confusion"] and odd:
                changed = (m.NamedArray("correct", odd.pop()), *said.values[1:])
                message.content[RECORD] = ConfigRecord({ANSWER: m.encode(m.Given(changed, 0))})
        return arrived

    grid.pull_messages = lying  # type: ignore[method-assign]
    summary = serve(grid, config, tmp_path / "r", scene, clients=4, report=str)  # type: ignore[arg-type]
    assert not odd
    assert summary["rounds"] == 1
    row = json.loads((tmp_path / "r" / "rounds.jsonl").read_text(encoding="utf-8"))
    assert row["per_client"]["clients"] == []
    assert row["accuracy_mean"] is None


@pytest.mark.parametrize(
    ("protection", "privacy", "passing", "word"),
    [
        ("", "", (), ""),
        ('sum = "secagg"\nmin_cohort = 3', "", (), "forbidden"),
        ("min_cohort = 3", "", ("evaluate",), "forbidden"),
        ("", 'unit = "client"\nepsilon = 1.0\ndelta = 1e-5\nclip_norm = 1.0', (), "forbidden"),
        ('sum = "secagg"\nmin_cohort = 3', "", ("train",), ""),
        ('sum = "nothing"', "", (), "bad-settings"),
    ],
)
def test_a_protected_client_answers_ordinary_messages_only_where_its_application_says_so(
    tmp_path: Path, protection: str, privacy: str, passing: tuple[str, ...], word: str
) -> None:
    """What the train function returns is the model in the clear."""
    scene = population(groups=1, clients_per_group=1)
    grid = deployment(tmp_path, scene, protection, state=True, privacy=privacy)
    grid.apps = {node: stock_app(scene, 1, [cflpriv_mod(plain=passing)]) for node in grid.apps}
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(4, np.float32))}), "config": ConfigRecord({"lr": 1.0})})
    (reply,) = grid.pull_messages(grid.push_messages([Message(content, dst_node_id=1000, message_type="train")]))
    assert not grid.errors
    if word:
        assert not reply.has_content()
        assert reply.error.reason == word
    else:
        np.testing.assert_array_equal(reply.content["arrays"]["w"].numpy(), np.ones(4))  # type: ignore[union-attr]


def test_the_strategy_refuses_sums_that_it_cannot_read_before_anybody_trains() -> None:
    for protection, more, word in (
        (Protection(sum="haar"), {}, r"protection\.sum: 'haar'"),
        (Protection(sum="permutation"), {"k": 1}, r"protection\.sum: 'permutation'"),
        (Protection(sum="secagg-oblivious"), {"k": 2}, r"protection\.sum: 'secagg-oblivious'"),
        (Protection(sum="secagg", min_cohort=3, small_clusters="local"), {}, r"protection\.small_clusters: 'local'"),
    ):
        with pytest.raises(InputError, match=word):
            ClusteredAveraging(protection, **more)  # type: ignore[arg-type]
    ClusteredAveraging(Protection(sum="secagg-oblivious"), k=1)
    ClusteredAveraging(Protection(gram=("haar",), sum="secagg", small_clusters="merge"))
