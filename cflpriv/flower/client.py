"""A client on Flower: settings from a file of its own, state in files or in Flower's context, opaque answers.

Importing this loads no torch: Flower starts a process for every message, and only those that compute need it.
"""

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ..federation.messages import encode
from ..federation.settings import NoSettings, Settings, read_identity, read_roster, read_settings, refused_settings, write_identities
from ..federation.store import ByteStore, DiskStore, Store
from ..transports.deployed import receive
from ..types import ClientData
from .transport import ANSWER, ASK, RECORD, GridTransport

__all__ = [
    "ContextStore", "answer", "client_app", "read_identity", "read_roster", "read_settings", "settings_of", "store_of", "write_identities",
]  # fmt: skip


log = logging.getLogger("cflpriv.flower")


class ContextStore(ByteStore):
    """A client's state in Flower's context: it lives as long as the SuperNode's process."""

    def __init__(self, context: Context) -> None:
        record = context.state.get(RECORD)
        if not isinstance(record, ConfigRecord):
            record = ConfigRecord()
            context.state[RECORD] = record
        self._record = record

    def get(self, name: str) -> bytes | None:
        value = self._record.get(name)
        return value if isinstance(value, bytes) else None

    def put(self, name: str, value: bytes) -> None:
        self._record[name] = value

    def drop(self, name: str) -> None:
        if name in self._record:
            del self._record[name]

    def names(self) -> Iterable[str]:
        return tuple(self._record.keys())

    def alone(self) -> AbstractContextManager[object]:
        return nullcontext()  # a SuperNode handles one message at a time: it waits for the reply before it fetches another


def settings_of(context: Context) -> tuple[Settings, Path | None, dict[str, Any]]:
    """The settings file that the node was started with: `--node-config 'settings="client0.toml"'`.

    In Flower's simulation, where nodes are given a `partition-id` only: `client<ID>.toml` in the folder named by the environment's
    `CFLPRIV_SETTINGS`. Never from the run's config, which the server writes.
    """
    path, folder, partition = (
        context.node_config.get("settings"),
        os.environ.get("CFLPRIV_SETTINGS"),
        context.node_config.get("partition-id"),
    )
    if path is None and folder is not None and partition is not None:
        path = str(Path(folder) / f"client{partition}.toml")
    if not isinstance(path, str):
        raise NoSettings(f"node config: settings = {path!r}: {GridTransport.settings_hint}")
    return read_settings(path)


def store_of(context: Context, folder: Path | None) -> Store:
    """Where this client keeps its state."""
    return ContextStore(context) if folder is None else DiskStore(folder)


def answer(message: Message, data: bytes) -> Message:
    """A reply with our bytes."""
    return Message(RecordDict({RECORD: ConfigRecord({ANSWER: data})}), reply_to=message)


def ask_of(message: Message) -> bytes:
    """The request in a message; empty bytes (which are refused) where there is none."""
    record = message.content.get(RECORD)
    data = record.get(ASK) if isinstance(record, ConfigRecord) else None
    return data if isinstance(data, bytes) else b""


def client_app(data: Callable[[Context, dict[str, Any]], ClientData]) -> ClientApp:
    """A client app that answers all our messages. `data` gets the context and the settings file's table [app], when a task needs them."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        try:
            settings, folder, own = settings_of(context)
            store = store_of(context, folder)
        except Exception as error:
            log.exception("settings")  # Flower would send this text to the server; it stays here
            return answer(message, encode(refused_settings(error)))
        return answer(message, receive(settings, store, lambda: data(context, own), ask_of(message)))

    app.query("cflpriv")(handle)
    app.train("cflpriv")(handle)
    return app
