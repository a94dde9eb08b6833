"""The examples: processes over HTTP and gRPC that are killed and started again, and many clients."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest
from checkout import ROOT

from cflpriv.protocols.coordinator import Coordinator, DurableClient, DurableHelper, SumPlan, metrics, sign_roster, take_part
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.protocols.one_message import Contribution, HelperPolicy, Policy

FOLDER = ROOT / "examples" / "embedding"
MOST_LINES, MOST_OWN_LINES = 60, 30
CLIP = 10.0
"""That of the plan in the example, which values reach after 60 rounds."""
SESSION, MODEL = bytes(range(16)), bytes(32)


@pytest.fixture(params=["over_http", "over_grpc"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "over_grpc":
        pytest.importorskip("grpc", reason="grpcio is not installed")
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module(request.param)


def free_port(count: int = 1) -> int:
    """The first of so many ports that are free now."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
        try:
            for number in range(port, port + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", number))
        except (OSError, OverflowError):
            continue
        return port


def test_the_examples_are_short() -> None:
    for name in ("over_http.py", "over_grpc.py"):
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    own = (FOLDER / "federation.py").read_text(encoding="utf-8").split("# --- ")[1]
    parties = own.split("async def ")
    lines = [[line for line in party.splitlines()[1:] if line.strip()] for party in ("coordinator".join(parties[1:3]), *parties[3:])]
    assert all(len(party) + 1 <= MOST_OWN_LINES for party in lines)
    assert sum(map(len, lines)) > 20


def test_a_transport_carries_bytes_and_refuses_too_many(transport: ModuleType) -> None:
    async def play() -> None:
        port, seen = free_port(), list[bytes]()

        async def receive(data: bytes) -> bytes:
            seen.append(data)
            return data[::-1]

        async with transport.serving(receive, port, lambda: 100_000, lambda: "counters 1\n"):
            for data in (b"", b"abc", bytes(range(256)) * 200):
                assert await transport.connect(port)(data) == data[::-1]
            with pytest.raises(OSError):
                await transport.connect(port)(bytes(100_001))
            assert len(seen) == 3
        with pytest.raises(OSError):
            await transport.connect(port)(b"nobody is there")

    asyncio.run(play())


def test_http_takes_any_bytes_and_shows_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    http = import_module("over_http")

    async def play() -> None:
        port = free_port()

        async def receive(data: bytes) -> bytes:
            return data

        async def raw(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            answer = await reader.read()
            writer.close()
            return answer

        async with http.serving(receive, port, lambda: 1000, lambda: "counters 1\n"):
            for noise in (b"", b"\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"x" * 100_000):
                assert await raw(noise) == b""
            assert await raw(b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n") == b""
            assert await raw(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nshort") == b""
            assert (await raw(b"GET /metrics HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\ncounters 1\n")
            assert await http.connect(port)(b"still there") == b"still there"

    asyncio.run(play())


# --- processes -------------------------------------------------------------------------------------------------------------------------

ROLES: dict[str, list[tuple[str, ...]]] = {
    "coordinator": [("coordinator",)],
    "helper": [("helper", str(number)) for number in range(4)],
    "client": [("client", str(number)) for number in range(5)],
}


class Processes:
    """The parties of `federation.py`, with `rounds` rounds."""

    def __init__(self, folder: Path, transport: str, rounds: int) -> None:
        self.folder, self.running = folder, dict[tuple[str, ...], subprocess.Popen[bytes]]()
        self.environment = {**os.environ, "TRANSPORT": transport, "PORT": str(free_port(5)), "PYTHONPATH": f"{FOLDER}:{ROOT}"}
        self.code = (
            f"import sys, federation, pathlib; federation.ROUNDS = {rounds}; federation.main(pathlib.Path(sys.argv[1]), *sys.argv[2:])"
        )
        self.output = (folder / "output").open("ab")
        subprocess.run([sys.executable, "-c", self.code, str(folder), "keys"], check=True, env=self.environment)

    def start(self, party: tuple[str, ...]) -> None:
        self.running[party] = subprocess.Popen(
            [sys.executable, "-c", self.code, str(self.folder), *party], env=self.environment, stdout=self.output, stderr=subprocess.DEVNULL
        )

    def start_all(self) -> None:
        for parties in ROLES.values():
            for party in parties:
                self.start(party)

    def restart(self, party: tuple[str, ...]) -> None:
        self.running[party].send_signal(signal.SIGKILL)
        self.running[party].wait()
        self.start(party)

    def means(self) -> list[tuple[int, str]]:
        """Round and rest of each line that the coordinator printed."""
        lines = (self.folder / "output").read_text(encoding="utf-8").splitlines()
        return [(int(line.split()[1].rstrip(":")), line.partition(": ")[2]) for line in lines if line.startswith("round ")]


@contextmanager
def processes(folder: Path, transport: str, rounds: int) -> Iterator[Processes]:
    them = Processes(folder, transport, rounds)
    try:
        them.start_all()
        yield them
    finally:
        for process in them.running.values():
            process.kill()
            process.wait()
        them.output.close()


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too slow"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_federation_runs(transport: ModuleType, tmp_path: Path) -> None:
    with processes(tmp_path, transport.__name__, 3) as them:
        until(lambda: len(them.means()) == 3, 120)
        assert them.means() == [(number, f"mean of 5 clients, first value {2 + number / 10:.3f}") for number in range(3)]
        until(lambda: all(them.running[party].poll() == 0 for party in ROLES["client"]), 60)


@pytest.mark.slow
def test_a_hundred_kills_of_processes_of_each_kind(tmp_path: Path) -> None:
    """SIGKILL at any time. Each round's sum is of all clients and right, whatever was killed; none is lost."""
    random, kills, wanted = Random(0), Counter[str](), 100
    with processes(tmp_path, "over_http", 1_000_000) as them:
        until(lambda: bool(them.means()), 120)
        while any(kills[role] < wanted for role in ROLES):
            role = random.choice([role for role in ROLES if kills[role] < wanted])
            them.restart(random.choice(ROLES[role]))
            kills[role] += 1
            time.sleep(random.uniform(0.0, 0.6))
        rounds = them.means()[-1][0]
        until(lambda: them.means()[-1][0] > rounds + 1, 120)
        means = them.means()
    numbers = [number for number, _ in means]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(numbers[-1] + 1)), "no round was lost"
    exact = {number: sum(min(CLIP, client + number / 10) for client in range(5)) / 5 for number in numbers}  # a fast machine gets far
    assert [(number, text) for number, text in means if text != f"mean of 5 clients, first value {exact[number]:.3f}"] == []
    print(f"killed: {dict(kills)}; {numbers[-1] + 1} rounds, all exact, none lost")


@pytest.mark.slow
def test_a_thousand_clients_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    http, clients, dimension = import_module("over_http"), 1000, 1000
    identities = [Identity.create(client) for client in range(clients)]
    holders = [Identity.create(0) for _ in range(4)]
    authority, own = Identity.create(0), Identity.create(0)
    first, *others = (holder.public() for holder in holders)
    roster = Roster(tuple(identity.public() for identity in identities), first, tuple(others))
    values = np.random.default_rng(0).normal(size=(clients, dimension))

    async def play() -> None:
        port = free_port()
        parties = [
            DurableHelper(tmp_path / f"helper{number}", holder, authority.public(), own.public(), HelperPolicy(SESSION))
            for number, holder in enumerate(holders)
        ]

        async def ask(helper: int, data: bytes) -> bytes:
            return await asyncio.to_thread(parties[helper].receive, data)

        async def part(number: int) -> None:
            async def work(slot: tuple[int, int]) -> tuple[Policy, Contribution]:
                return Policy(SESSION, "active", MODEL, names=(slot[0],)), Contribution(values[number])

            client = DurableClient(tmp_path / f"client{number}", identities[number], authority.public(), SESSION)
            await take_part(client, http.connect(port), work, through=0)
            client.close()

        signed = sign_roster(authority, 1, roster)
        async with (
            Coordinator(tmp_path / "coordinator", own, authority.public(), SESSION, ask, roster=signed) as server,
            http.serving(server.receive, port, lambda: server.largest_request),
        ):
            start = time.monotonic()
            tasks = [asyncio.create_task(part(number)) for number in range(clients)]
            total = await server.sum(0, SumPlan(tuple(range(clients)), (MODEL,), dimension, 10.0), seconds=900.0)
            seconds = time.monotonic() - start
            await asyncio.gather(*tasks)
            assert len(total.survivors) == clients
            assert np.abs(total.mean() - values.mean(axis=0)).max() < 1e-5
            text = metrics(server)
        for party in parties:
            party.close()
        print(f"{clients} clients over HTTP: {seconds:.1f} s")
        print("\n".join(line for line in text.splitlines() if "requests_total{" in line))

    asyncio.run(play())
