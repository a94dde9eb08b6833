"""A client on Flower: settings from a file of its own, state in files or in Flower's context, opaque answers.

Importing this loads no torch: Flower starts a process for every message, and only those that compute need it.
"""

import logging
import os
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ..errors import InputError
from ..protection import Protection
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.keys import Identity, Roster
from ..remote.client import RemoteClient, Settings
from ..remote.messages import Refused, encode
from ..remote.store import DiskStore, Store
from ..types import ClientData
from .transport import ANSWER, ASK, RECORD

__all__ = ["ContextStore", "answer", "client_app", "read_settings", "settings_of", "store_of", "write_identities"]


log = logging.getLogger("cflpriv.flower")


class ContextStore:
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


def write_identities(folder: str | Path, count: int, entropy: Entropy = system_entropy) -> Path:
    """Keys for clients 0..count−1, one secret file each, and the roster of their public keys; the roster's path.

    For a trial on one machine: in a deployment every operator makes the own key, and the roster is agreed out of band. Existing files are
    not overwritten (`InputError`).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = []
    for client in range(count):
        identity = Identity.create(client, entropy)
        path = folder / f"client{client}.key"
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise InputError(f"{path}: exists; keys are not overwritten") from None
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{client}\n{identity.signing_seed.hex()}\n{identity.encryption_seed.hex()}\n")
        lines.append(f"{client} {identity.public().hex()}\n")
    roster = folder / "roster.txt"
    roster.write_text("".join(lines), encoding="utf-8")
    return roster


def read_identity(path: Path) -> Identity:
    """A client's secret key file."""
    try:
        number, signing, encryption = path.read_text(encoding="utf-8").split()
        return Identity(int(number), bytes.fromhex(signing), bytes.fromhex(encryption))
    except (OSError, ValueError):
        raise InputError(f"{path}: is not a key file of three lines (client number, two seeds in hex)") from None


def read_roster(path: Path) -> Roster:
    """The pinned public keys, a line "number key" each."""
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        keys = {int(number): bytes.fromhex(key) for number, key in rows}
        if sorted(keys) != list(range(len(keys))) or len(keys) != len(rows):
            raise ValueError
        return Roster(tuple(keys[number] for number in range(len(keys))))
    except (OSError, ValueError):
        raise InputError(f"{path}: is not a roster of lines 'number key', from 0 on, each key 32 bytes in hex") from None


def read_settings(path: str | Path) -> tuple[Settings, Path | None, dict[str, Any]]:
    """What a client's operator wrote: (settings, folder for its state or None, other tables for the application).

    A TOML file with `identity` (key file), `roster` (optional), `state` (optional folder; without it the state is lost when the SuperNode
    restarts) and `[protection]`, whose keys are those of an experiment. Paths are relative to the file. Raises `InputError`.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    if not isinstance(tree.get("identity"), str):
        raise InputError(f"{path}: identity = {tree.get('identity')!r}: give the path of the key file")
    section = tree.get("protection", {})
    known = {one.name for one in fields(Protection)}
    for key in section:
        if key not in known:
            raise InputError(f"{path}: [protection] {key} = {section[key]!r}: is not a key here; known are {', '.join(sorted(known))}")
    try:
        given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in section.items()}
        protection = Protection(**given)
    except (InputError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None
    roster = read_roster(path.parent / tree["roster"]) if "roster" in tree else None
    if protection.secure and protection.secagg_mode == "active" and roster is None:
        raise InputError(f"{path}: [protection] secagg_mode = 'active': give the roster of pinned keys, or use 'passive'")
    settings = Settings(read_identity(path.parent / tree["identity"]), protection, roster)
    state = path.parent / tree["state"] if "state" in tree else None
    rest = {key: value for key, value in tree.items() if key not in ("identity", "roster", "state", "protection")}
    return settings, state, rest


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
        raise InputError(f"node config: settings = {path!r}: start the SuperNode with --node-config 'settings=\"FILE.toml\"'")
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
    """A client app that answers all our messages. `data` gets the context and the settings file's other tables, when a task needs them."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        try:
            settings, folder, rest = settings_of(context)
        except InputError:
            log.exception("settings")  # what Flower would send the server word for word stays here
            return answer(message, encode(Refused("bad-settings")))
        client = RemoteClient(settings, lambda: data(context, rest), store_of(context, folder))
        return answer(message, client.receive(ask_of(message)))

    app.query("cflpriv")(handle)
    app.train("cflpriv")(handle)
    return app
