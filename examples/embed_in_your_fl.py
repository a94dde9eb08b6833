"""Secure aggregation inside a system of your own: the protocol machines, plain sockets, no engine, no torch.

    python examples/embed_in_your_fl.py

Six clients, each a process with a socket to the server, hold a vector each; one dies after sharing its keys. The server ends with the sum
of the others and nothing else. What you bring is transport, time-outs and the roster; the machines take bytes and give bytes.
"""

import multiprocessing
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from cflpriv.protocols import secagg
from cflpriv.protocols.secagg import Client, Contribution, Identity, Policy, RemoteError, Roster, Server, SumRecord
from cflpriv.streams import printable_streams

CLIENTS, DIMENSION, MIN_COHORT, DIES = 6, 1000, 3, 4
SESSION, MODEL = bytes(range(16)), bytes(32)  # in your system: a random session, and the SHA-256 of the model that was sent


def send(link: socket.socket, data: bytes) -> None:
    link.sendall(struct.pack("!I", len(data)) + data)


def receive(link: socket.socket) -> bytes:
    """One message; empty if the other side is gone."""
    size = b""
    while len(size) < 4:
        if not (more := link.recv(4 - len(size))):
            return b""
        size += more
    data = b""
    while len(data) < struct.unpack("!I", size)[0]:
        if not (more := link.recv(1 << 16)):
            return b""
        data += more
    return data


def run_client(link: socket.socket, identity: Identity, roster: Roster) -> None:
    """A client insists on its own policy, whatever the server proposes: session, model, at most one model, a minimum cohort size.

    Its record makes sure that a value goes into one sum only. It outlives the process in your system: store `record.to_bytes()` with the
    machine before each reply is sent.
    """
    vector = np.random.default_rng(identity.client).normal(size=DIMENSION) * 0.1
    policy, record = Policy(SESSION, "active", MODEL, models=1, min_cohort=MIN_COHORT), SumRecord()
    machine = Client(identity, policy, record=record, roster=roster)
    while message := receive(link):
        if machine.wants_values and identity.client == DIES:
            return  # gone, at the worst moment: its masks are in everybody's vectors
        values = [Contribution(vector)] if machine.wants_values else []
        try:
            send(link, machine.receive(message, *values))
        except RemoteError as refused:
            print(f"client {identity.client} refuses: {refused.code}")
            return


def start_client(link: socket.socket, client: int, signing_seed: bytes, encryption_seed: bytes, roster: Roster) -> None:
    """The process of one client. An identity is never pickled; in your system its two seeds are read from the client's own secret store."""
    run_client(link, Identity(client, signing_seed, encryption_seed), roster)


def serve(links: Mapping[int, socket.socket], roster: Roster) -> secagg.Sum:
    """The server asks, waits at most so long, and continues with the clients that answered."""
    terms = secagg.make_terms(
        session=SESSION,
        slot=(0, 0),
        cohort=sorted(links),
        models=[MODEL],
        dimension=DIMENSION,
        clip=1.0,
        min_cohort=MIN_COHORT,
        roster=roster,
    )
    server = Server(terms, roster=roster)
    while outbox := server.advance():
        for client, message in outbox.items():
            with suppress(OSError):  # it is gone, and so a dropout
                send(links[client], message)
        for client in outbox:
            links[client].settimeout(10.0)
            try:
                if answer := receive(links[client]):
                    server.receive(client, answer)
            except (RemoteError, OSError):
                continue  # refused or late: a dropout
    return server.result


def main() -> None:
    identities = [Identity.create(client) for client in range(CLIENTS)]
    roster = Roster(tuple(identity.public() for identity in identities))  # pinned out of band
    context = multiprocessing.get_context("spawn")
    links, processes = {}, []
    for identity in identities:
        links[identity.client], theirs = socket.socketpair()
        seeds = (identity.signing_seed, identity.encryption_seed)
        process = context.Process(target=start_client, args=(theirs, identity.client, *seeds, roster), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
    total = serve(links, roster)
    for link in links.values():
        link.close()
    for process in processes:
        process.join(10)
    expected = np.mean([np.random.default_rng(c).normal(size=DIMENSION) * 0.1 for c in total.survivors], axis=0)
    print(f"survivors {total.survivors}; largest error of the mean {np.abs(total.mean() - expected).max():.1e}")


if __name__ == "__main__":
    printable_streams()
    main()
