"""A client on Flower: settings from a file of its own, state in files or in Flower's context, opaque answers.

Importing this loads no torch: Flower starts a process for every message, and only those that compute need it.
"""

import logging
import os
import tomllib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ..contract.protection import Protection
from ..errors import InputError, unknown_key
from ..federation.client import FederationClient
from ..federation.messages import Refused, encode
from ..federation.settings import Settings
from ..federation.store import ByteStore, DiskStore, Store
from ..privacy.settings import Privacy
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.keys import Identity, Roster
from ..types import ClientData
from .transport import ANSWER, ASK, RECORD

if TYPE_CHECKING:
    from ..aggregation.holder_party import HolderParty

__all__ = ["ContextStore", "answer", "client_app", "read_settings", "settings_of", "store_of", "write_identities"]


log = logging.getLogger("cflpriv.flower")
Section = TypeVar("Section", Protection, Privacy)
Role = Literal["client", "key-holder"]
KEY_HOLDER: Role = "key-holder"
KEYS = ("identity", "roster", "state", "role", "models", "protection", "privacy", "app")
"""The keys of a settings file; the application's own keys are in the table [app]."""


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
        return nullcontext()  # each message has the context for itself


def write_identities(folder: str | Path, count: int, entropy: Entropy = system_entropy, *, key_holder: int = 0) -> Path:
    """Keys for clients 0..count−1, one secret file each, and the roster of their public keys; the roster's path.

    With `key_holder` also `key-holder.key` for the key holder of encrypted similarity, whose public key the roster names; for more than one
    holder `key-holder1.key` and so on, too.

    For a trial on one machine: in a deployment every operator makes its own key, and the roster is agreed out of band. Existing files are
    not overwritten (`InputError`).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = []
    parties = [(client, f"client{client}", str(client)) for client in range(count)]
    parties += [(0, f"{KEY_HOLDER}{number or ''}", KEY_HOLDER) for number in range(int(key_holder))]
    for client, name, entry in parties:
        identity = Identity.create(client, entropy)
        path = folder / f"{name}.key"
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise InputError(f"{path}: exists; keys are not overwritten") from None
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{client}\n{identity.signing_seed.hex()}\n{identity.encryption_seed.hex()}\n")
        lines.append(f"{entry} {identity.public().hex()}\n")
    roster = folder / "roster.txt"
    roster.write_text("".join(lines), encoding="utf-8")
    return roster


def read_identity(path: Path) -> Identity:
    """A client's secret key file."""
    try:
        number, signing, encryption = path.read_text(encoding="utf-8").split()
        identity = Identity(int(number), bytes.fromhex(signing), bytes.fromhex(encryption))
        if identity.client < 0 or {len(identity.signing_seed), len(identity.encryption_seed)} != {32}:
            raise ValueError
        return identity
    except (OSError, ValueError):
        raise InputError(f"{path}: is not a key file of three lines (client number, two seeds of 32 bytes in hex)") from None


def read_roster(path: Path) -> Roster:
    """The pinned public keys, a line "number key" each, and "key-holder key" for each that holds keys or shares, the first one first."""
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        holders = [bytes.fromhex(key) for name, key in rows if name == KEY_HOLDER]
        keys = {int(number): bytes.fromhex(key) for number, key in rows if number != KEY_HOLDER}
        if sorted(keys) != list(range(len(keys))) or len(keys) + len(holders) != len(rows):
            raise ValueError
        first, others = (holders[0], tuple(holders[1:])) if holders else (b"", ())
        return Roster(tuple(keys[number] for number in range(len(keys))), first, others)
    except (OSError, ValueError):
        raise InputError(
            f"{path}: is not a roster of lines 'number key', from 0 on (and 'key-holder key'), each key 32 bytes in hex"
        ) from None


def read_settings(path: str | Path) -> tuple[Settings, Path | None, dict[str, Any]]:
    """A client's settings file: (settings, folder for its state or None, the application's own table).

    A TOML file with `identity` (key file), `roster` (optional), `state` (optional folder; without it the state is lost when the SuperNode
    restarts), `[protection]`, which must be there, and `[privacy]`, with the keys of an experiment. Paths are relative to the file.
    `[privacy]` needs `state`, which keeps the record of what was spent. `role = "key-holder"` makes it the key holder of encrypted
    similarity: it has no data. `models` is how many models the members of one secure sum may have been sent, 1 by default. `[app]` is for
    the application. Any other key is refused, so that a misspelt one cannot mean less protection.

    Raises `InputError`.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    for key, value in tree.items():
        if key not in KEYS:
            remedy = "; what the application reads goes into [app]"
            raise InputError(f"{path}: {key} = {value!r}: is not a key here; known are {', '.join(KEYS)}{remedy}")
    for key, what in (("identity", "the key file"), ("roster", "the file of pinned keys"), ("state", "the folder for its state")):
        if not isinstance(tree.get(key, None if key == "identity" else ""), str):
            raise InputError(f"{path}: {key} = {tree.get(key)!r}: give the path of {what}")
    identity = read_identity(path.parent / tree["identity"])
    if "protection" not in tree:  # a misspelt one must not mean none
        raise InputError(f"{path}: [protection] is missing: give the one in force; an empty section is none")
    protection, privacy = _section(path, tree, "protection", Protection), _section(path, tree, "privacy", Privacy)
    roster = read_roster(path.parent / tree["roster"]) if "roster" in tree else None
    if protection.secure and protection.secagg_mode == "active" and roster is None:
        raise InputError(f"{path}: [protection] secagg_mode = 'active': give the roster of pinned keys, or use 'passive'")
    if privacy.unit != "none" and "state" not in tree:
        raise InputError(f"{path}: [privacy] unit = {privacy.unit!r}: give a folder as state, which keeps the record of what was spent")
    models = tree.get("models", 1)
    if isinstance(models, bool) or not isinstance(models, int) or models < 1:
        raise InputError(f"{path}: models = {models!r}: give how many models the members of one secure sum may have been sent, 1 or more")
    settings = Settings(identity, protection, roster, privacy, _role(path, tree, identity, protection, roster), models)
    state = path.parent / tree["state"] if "state" in tree else None
    app = tree.get("app", {})
    if not isinstance(app, dict):
        raise InputError(f"{path}: app = {app!r}: is a table, [app]")
    return settings, state, app


def _role(path: Path, tree: dict[str, Any], identity: Identity, protection: Protection, roster: Roster | None) -> Role:
    """The role in these settings; checks that roster and protection fit it."""
    role: Role = tree.get("role", "client")
    if role not in ("client", KEY_HOLDER):
        raise InputError(f"{path}: role = {role!r}: is not known; known are client, key-holder")
    if protection.encrypted and (roster is None or len(roster.holders) != protection.holders):
        needed = "the key holder" if protection.holders == 1 else f"{protection.holders} key-holders (share_holders)"
        raise InputError(f"{path}: [protection] gram = {list(protection.gram)}: give a roster that names {needed}")
    if role == KEY_HOLDER and not protection.encrypted:
        raise InputError(f"{path}: role = 'key-holder' needs [protection] gram = ['ckks'] or ['shares'], which also set what is released")
    if role == KEY_HOLDER and roster is not None and identity.public() not in roster.holders:
        raise InputError(f"{path}: role = 'key-holder': its key is not that of a key holder on the roster")
    return role


def _section(path: Path, tree: dict[str, Any], name: str, kind: type[Section]) -> Section:
    """A table of the settings file as the dataclass that an experiment has for it, each value of the key's own type."""
    section = tree.get(name, {})
    if not isinstance(section, dict):
        raise InputError(f"{path}: {name} = {section!r}: is a table, [{name}]")
    hints = get_type_hints(kind)
    known = {one.name: hints[one.name] for one in fields(kind)}
    values = {}
    for key, value in section.items():
        if key not in known:
            raise InputError(f"{path}: {unknown_key(name, key, value, '; known are ' + ', '.join(sorted(known)))}")
        try:
            values[key] = msgspec.convert(value, known[key])
        except msgspec.ValidationError as error:
            raise InputError(f"{path}: [{name}] {key} = {value!r}: {_expected(known[key], error)}") from None
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _expected(kind: Any, error: Exception) -> str:
    """What a key of this type takes, in TOML terms."""
    if get_origin(kind) is Literal:
        return f"known are {', '.join(repr(one) for one in get_args(kind))}"
    return "expected a list of names, in brackets" if get_origin(kind) is tuple else f"{error}".replace("Expected", "expected", 1)


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


def holder(settings: Settings, store: Store) -> "HolderParty":
    """The key holder of encrypted similarity, or a holder of shares, at a node whose settings give it that role."""
    from ..aggregation.holders import party_for  # loaded on first use

    return party_for(settings.protection)(settings, store)


def client_app(data: Callable[[Context, dict[str, Any]], ClientData]) -> ClientApp:
    """A client app that answers all our messages. `data` gets the context and the settings file's table [app], when a task needs them."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        try:
            settings, folder, own = settings_of(context)
            store = store_of(context, folder)
        except Exception:
            log.exception("settings")  # Flower would send this text to the server; it stays here
            return answer(message, encode(Refused("bad-settings")))
        if settings.role == KEY_HOLDER:
            return answer(message, holder(settings, store).receive(ask_of(message)))
        client = FederationClient(settings, lambda: data(context, own), store)
        return answer(message, client.receive(ask_of(message)))

    app.query("cflpriv")(handle)
    app.train("cflpriv")(handle)
    return app
