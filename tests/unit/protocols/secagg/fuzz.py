"""Throws mutated byte strings at every decoder and at running machines.

    python -m tests.unit.protocols.secagg.fuzz [count] [seed]        from the repository root

Half of the mutants get a correct checksum again, so that they reach the typed decoder and the checks behind it. A decoder
may return a message whose encoding is the mutant itself, or raise MalformedMessage; a machine may also raise another
RemoteError or TooFewClients. Anything else is a finding.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from cflpriv.protocols.errors import MalformedMessage, RemoteError, TooFewClients
from cflpriv.protocols.secagg import Client, Contribution, MaskKey, Server, SumRecord
from cflpriv.protocols.secagg import messages as m

from .make_vectors import play as vector_play
from .scene import Play, identities, resealed, roster, terms

__all__ = ["corpus", "fuzz_decoders", "fuzz_machines", "mutants"]


def corpus() -> list[bytes]:
    """Every kind of message of both modes, and stored states."""
    found: list[bytes] = [*(run := vector_play("complaint")).down.values(), *run.up.values()]
    for mode in ("active", "passive"):
        play = Play.of(terms(3, mode, dimension=3, following=(6, 0)))
        play.finish({2: "Reveal"} if mode == "passive" else {})
        found += [*play.down.values(), *play.up.values(), *play.server.following.values()]
        key = play.clients[0].next_mask_key()
        assert key is not None
        found += [key.to_bytes(), Client(identities()[0], play.clients[0]._state.policy, roster=roster(), record=SumRecord()).to_bytes()]
        found.append(Server(play.agreed, roster=roster()).to_bytes())
    return found


def mutants(seeds: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """`count` mutants: flipped bits, changed, inserted and removed bytes, two messages spliced, numbers re-encoded wider."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            here = rng.randrange(len(data) + 1)
            match rng.randrange(7):
                case 0 if here < len(data):
                    data[here] ^= 1 << rng.randrange(8)
                case 1 if here < len(data):
                    data[here] = rng.choice((0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC6, 0xCA, 0xCF, 0xD9, 0xDD, 0xDF, 0xFF))
                case 2:
                    data[here:here] = rng.randbytes(rng.randint(1, 8))
                case 3:
                    del data[here : here + rng.randint(1, 8)]
                case 4:
                    other = rng.choice(seeds)
                    data[here:] = other[rng.randrange(len(other)) :]
                case 5 if here < len(data) and data[here] < 0x80:
                    # The same small number in a longer encoding: must be refused as not canonical.
                    data[here : here + 1] = bytes((0xCC, data[here]))
                case _:
                    data[here : here + rng.randint(1, 4)] = rng.randbytes(rng.randint(0, 4))
            if not data:
                break
        mutant = bytes(data)
        yield resealed(mutant) if rng.random() < 0.5 and len(mutant) > 16 else mutant


def fuzz_decoders(count: int, seed: int = 0) -> int:
    """Puts `count` mutants through every decoder; returns how many decoded to a message (each is then its canonical encoding)."""
    accepted = 0
    decoders: list[Callable[[bytes], object]] = [
        lambda data: m.encode(m.decode_client(data, 100)),
        lambda data: m.encode(m.decode_server(data)),
        lambda data: MaskKey.from_bytes(data).to_bytes(),
    ]
    for mutant in mutants(corpus(), count, seed):
        for decode in decoders:
            try:
                again = decode(mutant)
            except MalformedMessage:
                continue
            assert again == mutant, mutant.hex()
            accepted += 1
    return accepted


def fuzz_machines(count: int, seed: int = 0) -> int:
    """Puts `count` mutants into machines at every stage, which must refuse without changing; returns how many were not refused."""
    accepted = 0
    seeds = corpus()
    for mode in ("active", "passive"):
        play = Play.of(terms(3, mode, dimension=3, following=(6, 0)))
        outbox = play.open()
        while outbox:
            clients = play.clients[0].to_bytes()
            server = play.server.to_bytes()
            for mutant in mutants([*seeds, *outbox.values()], count // 11 + 1, seed):
                keys = roster() if mode == "active" else None
                machine = Client.from_bytes(clients, identities()[0], roster=keys, record=SumRecord())
                before = machine.to_bytes()
                try:
                    machine.receive(mutant, *([Contribution(np.zeros(3))] if machine.wants_values else []))
                    accepted += 1
                except (RemoteError, TooFewClients):
                    assert machine.to_bytes() == before == clients
                try:
                    play.server.receive(0, mutant)
                    accepted += 1
                    play.server = Server.from_bytes(server, roster=keys)
                except RemoteError:
                    assert play.server.to_bytes() == server
            play.close(outbox, {})
            outbox = play.open()
    return accepted


if __name__ == "__main__":
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    start = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    begun = time.monotonic()
    print(f"decoders: {total} mutants, {fuzz_decoders(total, start)} were messages, {time.monotonic() - begun:.0f} s")
    begun = time.monotonic()
    print(f"machines: {total // 20} mutants, {fuzz_machines(total // 20, start)} were accepted, {time.monotonic() - begun:.0f} s")
