"""One client's nonsense over Flower's messages costs that client only, and a server's costs no client its memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fake_grid import FakeGrid
from flwr.app import ConfigRecord, Context, Message
from loopback import spoilt
from scenes import population, training

from cflpriv.contract.protection import Protection
from cflpriv.engine.models import Model
from cflpriv.errors import TooFewClients
from cflpriv.federation import messages as m
from cflpriv.federation.server import FederationServer
from cflpriv.federation.transport import ExchangeStage, OverBytes
from cflpriv.flower import GridTransport, client_app, write_identities
from cflpriv.flower import client as flower_client
from cflpriv.flower.client import read_roster, settings_of
from cflpriv.flower.transport import ANSWER, RECORD

CLIENTS, BAD = 7, 3
SCENE = population(groups=1, clients_per_group=CLIENTS)
TASK = training(SCENE)
SECURE = Protection(sum="secagg")


@pytest.fixture(autouse=True)
def _without_a_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that enrol without a session contract: what they answer besides is looked at here."""

    def settings(context: Context) -> Any:
        own, folder, app = settings_of(context)
        return replace(own, needs_contract=False), folder, app

    monkeypatch.setattr(flower_client, "settings_of", settings)


def over_a_grid(folder: Path, change: Callable[[m.Answer], m.Answer], more: str = "") -> tuple[FederationServer, Any]:
    """A server whose clients are Flower apps with settings files; one of them changes its answers."""
    roster = read_roster(write_identities(folder / "keys", CLIENTS))
    configs: dict[int, dict[str, Any]] = {}
    for client in range(CLIENTS):
        path = folder / f"client{client}.toml"
        keys = f'identity = "keys/client{client}.key"\nroster = "keys/roster.txt"\nstate = "state{client}"\n'
        path.write_text(f'{keys}{more}\n[protection]\nsum = "secagg"\n', encoding="utf-8")
        configs[1000 + client] = {"settings": str(path)}

    def data(context: Context, tables: dict[str, Any]) -> Any:
        return SCENE.clients[settings_of(context)[0].identity.client]

    def bad(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        record: Any = reply.content[RECORD]
        reply.content[RECORD] = ConfigRecord({ANSWER: m.encode(change(m.decode_answer(record[ANSWER])))})
        return reply

    honest = client_app(data)
    apps: dict[int, Any] = {node: bad if node == 1000 + BAD else honest for node in configs}
    transport = OverBytes(GridTransport(FakeGrid(apps, configs), poll_seconds=0.0))  # type: ignore[arg-type]
    fed = FederationServer(transport, protection=SECURE, roster=roster, seed=1)
    fed.enrol()
    return fed, transport


def trained_after(fed: FederationServer, round: int) -> Any:
    fed.begin_round(round)
    held = fed.compute(TASK, {"model": TASK.model.init(round)})
    try:
        return fed.mean(held["update"])[0]
    except TooFewClients:
        return None


@pytest.mark.parametrize(
    "part",
    [
        m.Described("update", "<f8", (1 << 53, 1 << 53)), m.Described("update", "<f8", (1,) * 70), m.Described("update", "nonsense", (27,)),
        m.Described("update", "<f8", (28,)),
    ],
)  # fmt: skip
def test_a_layout_that_is_none_costs_its_client_only(part: m.Described, tmp_path: Path) -> None:
    fed, _ = over_a_grid(tmp_path, lambda answer: m.Computed(True, (part,)) if isinstance(answer, m.Computed) else answer)
    mean = trained_after(fed, 0)
    assert mean.count == CLIENTS - 1
    assert {(client, code) for client, _, code in fed.refusals} == {(BAD, "malformed")}


def test_a_client_whose_vectors_break_their_form_is_named_and_left_out(tmp_path: Path) -> None:
    zeros = lambda step: msgspec.structs.replace(step, vector=bytes(len(step.vector)))  # noqa: E731
    fed, _ = over_a_grid(tmp_path, lambda answer: spoilt(answer, zeros))
    means = [trained_after(fed, number) for number in range(5)]
    assert means[0] is None
    assert means[-1].count == CLIENTS - 1
    assert (BAD, "out-of-range") in {(client, code) for client, _, code in fed.refusals}
    assert {client for client, _, _ in fed.refusals} == {BAD}


def test_work_over_the_limits_of_a_settings_file_is_refused(tmp_path: Path) -> None:
    fed, transport = over_a_grid(tmp_path, lambda answer: answer, more="[limits]\nnumbers = 100\nepochs = 2")
    sent = (("model", m.Addends(np.zeros(27), (), ())),)
    codes = []
    for task in (
        TASK, replace(TASK, epochs=3), replace(TASK, model=Model("mlp", SCENE.shape, 3, hidden=10**8)),
        replace(TASK, model=replace(TASK.model, classes=12)),
    ):  # fmt: skip
        ask = m.Compute(fed.session, 0, 1, 1, (), m.Carried(task), sent, None)
        (answer,) = transport.exchange({1000: ask}, ExchangeStage("asked")).values()
        codes.append(answer.code if isinstance(answer, m.Refused) else type(answer).__name__)
    assert codes == ["Computed", "too-large", "too-large", "too-large"]
