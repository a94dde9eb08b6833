"""One client: `python client.py NUMBER URL`."""

import asyncio
import sys

import httpx
import numpy as np
from parties import DIMENSION, FOLDER, MODEL, ROUNDS, SESSION, key, post

from cflpriv.protocols.coordinator import DurableClient, take_part
from cflpriv.protocols.one_message import Contribution, Policy


async def main(number, url):
    async def work(slot):  # train; the same update for each slot of a round
        return Policy(SESSION, "active", MODEL, min_cohort=3, names=(slot[0],)), Contribution(np.full(DIMENSION, number + slot[0] / 10))

    client = DurableClient(FOLDER / f"client{number}", key(f"client{number}"), key("authority").public(), SESSION)
    async with httpx.AsyncClient(timeout=60) as http:
        await take_part(client, lambda data: post(http, url, data), work, through=ROUNDS - 1)


asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
