"""Keys; every party makes its own."""

from pathlib import Path

import httpx
from fastapi import HTTPException

from cflpriv.protocols.coordinator import SumPlan, sign_roster
from cflpriv.protocols.key_files import read_identity, read_roster, write_identities, write_identity
from cflpriv.protocols.keys import Identity

CLIENTS, HELPERS, DIMENSION, ROUNDS = 5, 4, 1000, 3
SESSION, MODEL = bytes(range(16)), bytes(32)  # a random session; the SHA-256 of the model that was sent
PLAN = SumPlan(tuple(range(CLIENTS)), (MODEL,), DIMENSION, clip=10.0)
FOLDER = Path("state")


def key(name):
    return read_identity(FOLDER / "keys" / f"{name}.key")


def make_keys():
    roster = read_roster(write_identities(FOLDER / "keys", CLIENTS, key_holder=HELPERS))
    for name in ("authority", "coordinator"):
        write_identity(FOLDER / "keys" / f"{name}.key", Identity.create(0))
    (FOLDER / "roster").write_bytes(sign_roster(key("authority"), 1, roster))  # who may take part: the authority's decision


async def post(http, url, data):
    try:
        return (await http.post(url, content=data)).raise_for_status().content
    except httpx.HTTPError as error:
        raise ConnectionError(url) from error  # it is sent again


async def body(request, largest):
    data = bytearray()
    async for part in request.stream():
        data.extend(part)
        if len(data) > largest:
            raise HTTPException(413)
    return bytes(data)
