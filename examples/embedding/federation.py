"""Secure sums that survive restarts, each party in a process of its own. Stop any of them at any time, and start it again:

python federation.py FOLDER keys
python federation.py FOLDER helper 0        (and helper 1, 2, 3)
python federation.py FOLDER client 0        (and client 1, 2, 3, 4)
python federation.py FOLDER coordinator

TRANSPORT=over_grpc takes gRPC in place of HTTP, and PORT another first port. In your system every party makes its own key, and the public
keys of authority and coordinator come by a way that the server does not control.
"""

import asyncio
import logging
import os
import sys
from importlib import import_module
from pathlib import Path

import numpy as np

from cflpriv.protocols.coordinator import Coordinator, DurableClient, DurableHelper, SumPlan, metrics, sign_roster, take_part
from cflpriv.protocols.key_files import read_identity, read_roster, write_identities, write_identity
from cflpriv.protocols.keys import Identity
from cflpriv.protocols.one_message import Contribution, HelperPolicy, Policy
from cflpriv.streams import printable_streams

CLIENTS, HELPERS, ROUNDS, DIMENSION, LINGER = 5, 4, 3, 1000, 3.0
SESSION, MODEL = bytes(range(16)), bytes(32)  # a random session; the SHA-256 of the model that was sent


def keys(folder):
    roster = write_identities(folder / "keys", CLIENTS, key_holder=HELPERS)
    for name in ("authority", "coordinator"):
        write_identity(folder / "keys" / f"{name}.key", Identity.create(0))
    (folder / "roster").write_bytes(sign_roster(read_identity(folder / "keys" / "authority.key"), 1, read_roster(roster)))


# --- what you write ------------------------------------------------------------------------------------------------------------------


async def coordinator(folder, transport, port, key, public):
    helpers = [transport.connect(port + 1 + number) for number in range(HELPERS)]
    roster = (folder / "roster").read_bytes()
    plan = SumPlan(tuple(range(CLIENTS)), (MODEL,), DIMENSION, clip=10.0)

    async def ask(helper, data):
        return await helpers[helper](data)

    async with (
        Coordinator(folder / "coordinator", key("coordinator"), public("authority"), SESSION, ask, roster=roster) as server,
        transport.serving(server.receive, port, lambda: server.largest_request, lambda: metrics(server)),
    ):
        for number in range(max(server.round, 0), ROUNDS):  # a new process goes on with the round of the last one
            total = await server.sum(number, plan, seconds=600, patience=600)
            print(f"round {number}: mean of {len(total.survivors)} clients, first value {total.mean()[0]:.3f}", flush=True)
        await asyncio.sleep(LINGER)  # clients still ask for their answers


async def helper(folder, transport, port, key, public, number):
    policy = HelperPolicy(SESSION)  # its own: no server can lower the minimum of clients
    mine = DurableHelper(folder / f"helper{number}", key(f"key-holder{number or ''}"), public("authority"), public("coordinator"), policy)
    async with transport.serving(lambda data: asyncio.to_thread(mine.receive, data), port + 1 + number, lambda: 1 << 27):
        await asyncio.Event().wait()


async def client(folder, transport, port, key, public, number):
    async def work(slot):  # train, and return what to add; the same for each slot of a round
        update = np.full(DIMENSION, number + slot[0] / 10)
        return Policy(SESSION, "active", MODEL, min_cohort=3, names=(slot[0],)), Contribution(update)

    mine = DurableClient(folder / f"client{number}", key(f"client{number}"), public("authority"), SESSION)
    await take_part(mine, transport.connect(port), work, through=ROUNDS - 1)


# --- one party -----------------------------------------------------------------------------------------------------------------------


def main(folder, role, *number):
    def key(name):
        return read_identity(folder / "keys" / f"{name}.key")

    def public(name):
        return key(name).public()

    logging.basicConfig(level=logging.WARNING)
    if role == "keys":
        return keys(folder)
    transport = import_module(os.environ.get("TRANSPORT", "over_http"))
    port = int(os.environ.get("PORT", "9300"))
    return asyncio.run(globals()[role](folder, transport, port, key, public, *map(int, number)))


if __name__ == "__main__":
    printable_streams()
    main(Path(sys.argv[1]), *sys.argv[2:])
