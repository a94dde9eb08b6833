"""The coordinator: `uvicorn service:app`."""

import asyncio
import os
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request, Response
from parties import CLIENTS, DIMENSION, FOLDER, MODEL, ROUNDS, SESSION, body, key, post

from cflpriv.protocols.coordinator import Coordinator, SumPlan, metrics
from cflpriv.protocols.errors import ProtocolError

URLS = os.environ["HELPERS"].split()


async def rounds(coordinator):
    plan = SumPlan(tuple(range(CLIENTS)), (MODEL,), DIMENSION, clip=10.0)
    for number in range(max(coordinator.round, 0), ROUNDS):  # a new process goes on with the last round
        try:
            total = await coordinator.sum(number, plan, seconds=600, attempts=3)  # or until all have uploaded
        except ProtocolError as error:
            print(f"round {number}: {error}", flush=True)
        else:
            print(f"round {number}: mean of {total.survivors} is {total.mean()[0]:.2f}", flush=True)


@asynccontextmanager
async def lifespan(app):
    async with httpx.AsyncClient(timeout=60) as http:

        async def ask(helper, data):
            return await post(http, URLS[helper], data)

        authority, roster = key("authority").public(), (FOLDER / "roster").read_bytes()
        async with Coordinator(FOLDER / "coordinator", key("coordinator"), authority, SESSION, ask, roster=roster) as app.state.server:
            task = asyncio.create_task(rounds(app.state.server))
            yield
            task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/")
async def receive(request: Request) -> Response:
    return Response(await app.state.server.receive(await body(request, app.state.server.largest_request)))


@app.get("/metrics")
async def counters() -> Response:
    return Response(metrics(app.state.server), media_type="text/plain")
