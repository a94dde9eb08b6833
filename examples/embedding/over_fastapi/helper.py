"""One helper: `NUMBER=0 uvicorn helper:app`."""

import os

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from parties import FOLDER, SESSION, body, key

from cflpriv.protocols.coordinator import DurableHelper
from cflpriv.protocols.one_message import HelperPolicy

number = int(os.environ["NUMBER"])
identity, authority, coordinator = key(f"key-holder{number or ''}"), key("authority").public(), key("coordinator").public()
helper = DurableHelper(FOLDER / f"helper{number}", identity, authority, coordinator, HelperPolicy(SESSION, min_cohort=3))
app = FastAPI()


@app.post("/")
async def receive(request: Request) -> Response:
    return Response(await run_in_threadpool(helper.receive, await body(request, 1 << 28)))
