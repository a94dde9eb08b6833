"""Parties that stay at an address: beside another transport, started again, out of reach, or asked by somebody else."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from command_line import in_process
from loopback import ENTROPY, HOLDER, Loopback
from scenes import population, training

from cflpriv.aggregation.holder_party import party_for
from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.resident import Listener, WithResidents, ask_resident, read_address
from cflpriv.federation.server import FederationServer
from cflpriv.federation.settings import Settings, write_identities
from cflpriv.federation.stages import StagedTransport
from cflpriv.federation.store import DiskStore
from cflpriv.federation.transport import OverBytes

SCENE = population(groups=1, clients_per_group=5)
PROTECTION = Protection(sum="one_message")


class Staged(StagedTransport):
    """Clients in this process, in stages; helpers are elsewhere."""

    def __init__(self, clients: Loopback) -> None:
        super().__init__(deadline_seconds=10.0)
        self._clients = clients

    def places(self) -> list[int]:
        return list(self._clients.places())

    def carry(self, requests: Mapping[int, bytes], stage: str, seconds: float) -> Mapping[int, bytes]:
        return self._clients.exchange(requests, stage)


def listening(clients: Loopback, number: int, folder: Path) -> Listener:
    """A helper that stays, over its folder."""
    settings = Settings(clients.holders[HOLDER - number], PROTECTION, clients.roster, role="key-holder")
    listener = Listener(("127.0.0.1", 0), party_for(PROTECTION)(settings, DiskStore(folder / str(number))).receive)
    Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return listener


@pytest.fixture
def helpers(tmp_path: Path) -> Iterator[tuple[Loopback, list[Listener], Path]]:
    clients = Loopback(SCENE, PROTECTION)
    listeners = [listening(clients, number, tmp_path) for number in range(4)]
    yield clients, listeners, tmp_path
    for listener in listeners:
        listener.shutdown()
        listener.server_close()


def test_a_federation_with_helpers_that_stay(helpers: Any) -> None:
    clients, listeners, folder = helpers
    clients.dead = set(clients.holders)
    addresses = [f"127.0.0.1:{listener.server_address[1]}" for listener in listeners]
    transport = WithResidents(Staged(clients), addresses)
    fed = FederationServer(OverBytes(transport), protection=PROTECTION, roster=clients.roster, entropy=ENTROPY)
    transport.welcome_all(fed, 5, 10.0)
    task = training(SCENE)
    for number in range(3):
        if number == 1:  # one ends; a sum does without it
            listeners[2].shutdown()
            listeners[2].server_close()
        if number == 2:  # another is started again, at another address, over its folder
            listeners[3].shutdown()
            listeners[3].server_close()
            listeners[3] = listening(clients, 3, folder)
            transport._residents[max(transport._residents)] = listeners[3].server_address[:2]
        fed.begin_round(number)
        (mean,) = fed.mean(fed.compute(task, {"model": task.model.init(number)})["update"])
        assert mean is not None
        assert mean.count == 5
    assert {stage for stage, *_ in transport.stages} >= {"enrol", "compute", "sum", "sum keys", "sum Open"}


def test_bad_bytes_and_absent_parties_harm_nothing(helpers: Any) -> None:
    _, listeners, _ = helpers
    address = listeners[0].server_address[:2]
    answer = ask_resident(address, b"no message", 5.0)
    assert answer is not None
    assert m.decode_answer(answer) == m.Refused("malformed")
    for sent in (b"", b"\x00" * 3, (1 << 40).to_bytes(8, "big") + b"x", (10).to_bytes(8, "big") + b"x"):
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(sent)
            answer = b""
            with suppress(OSError):  # it may have hung up already
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(1)
            assert answer == b""
    assert ask_resident(address, b"still there", 5.0) is not None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask_resident(silent.getsockname()[:2], b"x", 0.05) is None
    for text in ("9200", "host:", ":1", "host:x", "host:99999"):
        with pytest.raises(InputError, match="is not an address"):
            read_address(text)


def test_the_command_needs_a_party_with_a_folder_and_a_free_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_identities(tmp_path, 3, key_holder=4)
    rows = 'identity = "{}"\nroster = "roster.txt"\n{}[protection]\nsum = "one_message"\n'
    (tmp_path / "client.toml").write_text(rows.format("client0.key", 'state = "s"\n'), encoding="utf-8")
    (tmp_path / "bare.toml").write_text(rows.format("key-holder.key", 'role = "key-holder"\n'), encoding="utf-8")
    (tmp_path / "helper.toml").write_text(rows.format("key-holder.key", 'role = "key-holder"\nstate = "s"\n'), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        for name, words in (("client", "role = 'key-holder'"), ("bare", "give a folder as state"), ("helper", "cannot be listened at")):
            assert in_process(monkeypatch, "helper", str(tmp_path / f"{name}.toml"), "--listen", busy) == 2
            assert words in " ".join(capsys.readouterr().err.split())
