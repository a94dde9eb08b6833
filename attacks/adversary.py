"""Adversaries and their views: a filter of the transcript, and the secrets of the parties that collude.

server            every message that reaches or passes the server, as far as the server can read it
server+N          the server's view, the secrets of N colluding clients, and the messages that these clients received and sent
active-server     a server that may deviate from the protocol. The server of a recorded run did not, so on a transcript the view is the
                  server's. Attacks that craft messages need a run in which such messages were sent
key-holder        what reaches the party that holds the key of a Gram, if the run has one
client            what one client sends, receives and knows: the first one whose secrets were written, else who was sent models most often
released          the models that the run ends with, or else those that clients were sent last: whoever gets what the run was made for
outsider          parties, times and sizes of messages; no payloads, and no grouping of clients inside one message
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import is_
from pathlib import Path

import numpy as np

from ..algorithms.fednova import STEPS_UNIT
from ..contract.protection import Protection
from ..contract.transcript import Message, payload_rows, read_transcript
from ..errors import InputError, near
from ..experiments.config.config import load_config
from ..federation.transforms import clustering_name
from ..protocols import codec
from ..protocols.bounded_files import read_json
from ..protocols.group import Ratchet
from ..protocols.orthonormal import TRANSFORMS, Transform, transform
from ..types import Array

__all__ = [
    "ADVERSARIES", "RELEASE", "UPDATES", "AdversaryView", "hidden_by", "load_view", "opened_rows", "parts_in", "relays_to",
    "released_at_last", "same_messages", "updates_sent", "view_of",
]  # fmt: skip

ADVERSARIES: dict[str, str] = {
    "server": "honest but curious: every message that reaches or passes it",
    "server+N": "the server with N colluding clients and their secrets",
    "active-server": "a server that may lie; on the transcript of an honest run it sees what `server` sees",
    "key-holder": "the party that holds the key of an encrypted Gram",
    "client": "one client: its own messages and secrets",
    "released": "whoever gets the models that the run ends with, and no other message",
    "outsider": "reads no payload: parties, times and sizes",
}


@dataclass(frozen=True, eq=False)
class AdversaryView:
    """What an adversary has: `messages` in order, with the payloads it can read; `secrets` by party; the colluding clients (`coalition`).

    `protection` is the public setting under which the run was made. `shared_noise`: clients add shares of noise inside secure sums, which
    are then in units of the noise.
    """

    adversary: str
    messages: tuple[Message, ...]
    secrets: Mapping[str, Mapping[str, str]]
    coalition: tuple[int, ...] = ()
    protection: Protection = field(default_factory=Protection)
    shared_noise: bool = False

    @property
    def is_server(self) -> bool:
        """Whether the adversary is a server, which sees who trains and who takes part in sums."""
        return self.adversary.startswith(("server", "active-server"))

    def select(self, operation: str, kind: str | None = None) -> tuple[Message, ...]:
        """The messages of an operation (and kind) whose payload is at hand."""
        return tuple(m for m in self.messages if m.operation == operation and kind in (None, m.kind) and m.payload is not None)

    def until(self, rounds: int) -> "AdversaryView":
        """What was seen before round number `rounds`."""
        return replace(self, messages=tuple(m for m in self.messages if m.round < rounds))

    def secret_of(self, name: str) -> bytes | None:
        """The secret behind the transform of this name, if a colluding client has it: the secret of its group epoch, or the key of its
        clustering epoch. Colluding clients erase nothing."""
        epoch, named = name.partition("@")[2], clustering_name(name)
        key = ("group_secret" if named is None else "epoch_secrets") + (f"@{epoch}" if epoch else "")
        secret = next((bytes.fromhex(party[key]) for party in self.secrets.values() if key in party), None)
        if named is None or secret is None:
            return secret
        ratchet = codec.decode(secret, Ratchet, len(secret))
        return ratchet.key(named.number) or ratchet.moved(named.number).key(named.number)


def same_messages(a: AdversaryView, b: AdversaryView) -> bool:
    """Whether two views are of the same messages, so that an attack need not be made twice."""
    return a.coalition == b.coalition and len(a.messages) == len(b.messages) and all(map(is_, a.messages, b.messages))


DERIVING = ("mean", "relay", "fold", "product")
"""Operations that give models. What is sent before the first of them depends on public settings alone."""
RELEASE = "release"
"""The operation of a message that only who gets the released models has: the models that the run ends with (`evidence.released_models`)."""
INITIAL, FOLLOWED = "initial", "followed"
"""The keys of a released model's context that say whether it is an initial one, and whether clients trained after the last one."""
UPDATES = ("update", "step", "movement", "direction", "contribution")
"""Names of parts that hold a client's update or determine it."""


def hidden_by(view: AdversaryView, name: str, operation: str) -> str:
    """The kind of the transform of this name that hides vectors of an `operation` ("gram" or "mean").

    Empty where there is none, or where the coalition has its secret.
    """
    return "" if view.secret_of(name) is not None else _kind(view, operation) or ""


def _kind(view: AdversaryView, operation: str) -> str | None:
    stages = view.protection.gram if operation == "gram" else (view.protection.sum,)
    return next((stage for stage in stages if stage in TRANSFORMS), None)


def opened_rows(view: AdversaryView, rows: Array, name: str, operation: str, dimension: int) -> Array | None:
    """Rows (..., size) as the clients had them, (..., dimension), where the coalition has the secret of their transform.

    Sketched rows stay sketched. Without the secret, rows are returned as they are. With it, the result is None for rows that are not of the
    transform's size and so cannot be opened. `name` is the transform's; `operation` ("gram" or "mean") selects its protection.
    """
    secret, kind = view.secret_of(name), _kind(view, operation)
    if secret is None or kind is None:
        return rows
    if operation == "gram" and "sketch" in view.protection.gram:  # a transform after it is one of what the sketch leaves
        dimension = min(dimension, view.protection.sketch_dim)
    made = _transform(kind, secret, name, dimension)
    return np.asarray(made.invert(np.asarray(rows, np.float64))) if made.size == rows.shape[-1] else None


def parts_in(view: AdversaryView, message: Message) -> dict[str, Array]:
    """What a message of updates holds by name, a row a client, the parts of transformed vectors split up where the coalition's secret opens
    them.

    Vectors that it cannot open are under "blind" (m, size), unchanged. Vectors that do not fit the message's description are left out.
    """
    parts, context = dict(message.payload or {}), message.context
    if "blind" not in parts or view.secret_of(str(context["transform"])) is None:
        return parts
    rows = opened_rows(view, parts.pop("blind"), str(context["transform"]), "mean", int(context["dimension"]))
    return parts if rows is None else parts | {name: rows[:, start:stop] for name, (start, stop) in context["parts"].items()}


def updates_sent(view: AdversaryView, message: Message, named: Sequence[str] = UPDATES) -> Array | None:
    """The update of each client (m, d) in a message of updates, None where there is none; transformed ones that cannot be opened are
    unchanged, (m, size).

    The first available part of `named` is taken.
    """
    parts = parts_in(view, message)
    name = next((name for name in named if name in message.context.get("parts", parts)), None)
    part = parts.get("blind" if named is UPDATES and "blind" in parts else name) if name else None
    if part is None or part.ndim != 2:
        return None
    rows = np.asarray(part, np.float64)
    if name == "direction" and "steps" in parts:  # FedNova: an update divided by its number of steps, which comes along
        rows = rows * np.asarray(parts["steps"], np.float64).reshape(-1, 1) * STEPS_UNIT
    return rows


@lru_cache(maxsize=4)
def _transform(kind: str, secret: bytes, name: str, dimension: int) -> Transform:
    """Cached: attacks use the same few transforms repeatedly, and a Haar transform takes long to make."""
    return transform(kind, secret, name, dimension)


def view_of(
    messages: Sequence[Message], adversary: str, secrets: Mapping[str, Mapping[str, str]], protection: Protection | None = None
) -> AdversaryView:
    """The view of `adversary` on recorded `messages`. `secrets` maps parties ("client:3") to secrets; a view has those of the coalition.

    Raises `InputError` for an unknown adversary, an adversary whose secrets were not written, or a key holder in a run without one.
    """
    protection = protection or Protection()
    match = re.fullmatch(r"server(?:\+(\d+))?", adversary)
    if match is None and adversary not in ADVERSARIES:
        raise InputError(f"--adversary {adversary}: is not known{near(adversary, list(ADVERSARIES))}")
    if adversary == "server+N":
        raise InputError("--adversary server+N: write a number for N, as in server+1")
    wanted = int(match.group(1) or 0) if match else int(adversary == "client")
    clients = sorted(int(party.partition(":")[2]) for party in secrets if party.startswith("client:"))
    if adversary == "client" and not clients:
        sent = [client for m in messages if m.operation == "compute" and m.round > 0 for client in m.clients]
        everybody = {client for message in messages for client in message.clients}
        clients = sorted(everybody, key=lambda client: (-sent.count(client), client))
    if wanted > len(clients):
        raise InputError(
            f"--adversary {adversary}: needs the secrets of {wanted} client(s), the run folder has those of {len(clients)}; "
            'run with [run] audit_parties naming them ("client:ID")'
        )
    coalition = tuple(clients[:wanted])
    if adversary == "released":
        opened = {party: secrets[party] for party in [f"client:{client}" for client in clients[:1]] if party in secrets}  # models come open
        return AdversaryView(adversary, _released(messages), opened, (), protection)
    if adversary == "outsider":
        return AdversaryView(adversary, _traffic(messages), {}, (), protection)
    if adversary == "key-holder" and not any("key-holder" in (m.source, m.target) for m in messages):
        raise InputError("--adversary key-holder: this run had no key holder (no message to or from one)")
    if adversary == "key-holder" and protection.comparison.shared:
        raise InputError(
            "--adversary key-holder: the first holder of shares sees the Gram matrix, as the server of a run under gram = ['haar'] does; "
            "audit such a run"
        )
    if adversary == "key-holder" and protection.encrypted and adversary not in secrets:
        raise InputError(
            '--adversary key-holder: its key was not written, so its view is unknown; run with [run] audit_parties naming "key-holder"'
        )
    party = {"key-holder": "key-holder", "client": None}.get(adversary, "server")
    seen = []
    for message in (message for message in messages if message.operation != RELEASE):
        whole = party is not None and (party in (message.source, message.target) or (party == "server" and message.operation == "relay"))
        if whole and party in message.readers:
            seen.append(message)
        elif (own := _of_coalition(message, coalition, header=whole)) is not None:
            seen.append(own)
    parties = [f"client:{client}" for client in coalition if f"client:{client}" in secrets] + (
        ["key-holder"] if adversary in secrets else []
    )
    own_secrets = {party: secrets[party] for party in parties}
    if adversary == "client":
        seen = [*_before(seen, messages), *seen]
    return AdversaryView(adversary, tuple(seen), own_secrets, coalition, protection)


def _before(seen: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """The public initial models, for a client whose first models are trained ones; nothing for others."""
    first = _initial(messages)
    own = next((message.index for message in seen if message.operation == "compute" and _sizes(message)), None)
    if own is None or own in {message.index for message in first}:
        return []
    names = sorted({name for message in first for name in message.payload or {}})
    named = [message for message in first[:1] if sorted(message.payload or {}) == names]
    return [replace(message, clients=(), peers=(), context={**message.context, INITIAL: True}) for message in named]


def _initial(messages: Sequence[Message]) -> list[Message]:
    """The messages with models that the server sends before any client has trained."""
    trained = next((m.index for m in messages if m.operation in DERIVING and m.source == "clients"), None)
    return [message for message in _models_of_server(messages) if trained is None or message.index < trained]


def _models_of_server(messages: Sequence[Message]) -> list[Message]:
    sent = [m for m in messages if (m.operation, m.kind, m.source) == ("compute", "parameters", "server") and m.payload is not None]
    return [m for m in sent if any(name.partition("/")[0] == "model" for name in m.payload or {})]


def _released(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The models that the run ends with, without whom, after the initial ones, which are public.

    Those that clients were sent last stand for models that the record does not have. Raises `InputError` where none are in the clear.
    """
    whole = _models_of_server(messages)
    if not whole:
        raise InputError("--adversary released: no model that the server sends is in this record in the clear")
    last = [m for m in whole if m.round == whole[-1].round]
    first = _initial(messages)
    last = [m for m in last if m not in first]
    followed = any(m.index > whole[-1].index and m.operation in DERIVING and m.source == "clients" for m in messages)
    if final := released_at_last(messages):
        last, followed = final, False
    marks = {"labels": None, FOLLOWED: followed}
    return tuple(replace(m, clients=(), peers=(), context={**m.context, **marks, INITIAL: m in first}) for m in [*first, *last])


def released_at_last(messages: Sequence[Message]) -> list[Message]:
    """The models that a run ends with as a message of parameters, where the messages have them and are of models of these sizes.

    A single one has the name under which the last one was sent.
    """
    final = [m for m in messages if m.operation == RELEASE]
    sent = [m for m in messages if m.operation == "compute" and m.source == "server" and _sizes(m)]
    if not final or not sent or not _sizes(final[-1]) <= {size for message in sent for size in _sizes(message)}:
        return []
    models = dict(final[-1].payload or {})
    names = {name for m in sent if m.round == sent[-1].round for name in m.payload or {} if name.partition("/")[0] == "model"}
    if len(models) == len(names) == 1:
        models = dict(zip(names, models.values(), strict=True))
    return [replace(final[-1], operation="compute", context={**sent[-1].context, **final[-1].context}, payload=models)]


def _sizes(message: Message) -> set[int]:
    """The numbers of parameters of the models in a message."""
    return {vector.size for name, vector in (message.payload or {}).items() if name.partition("/")[0] == "model"}


def relays_to(messages: Sequence[Message], coalition: Sequence[int]) -> list[Message]:
    """The relays of which colluding clients read something, with what they read and the header that the server sees."""
    relays = (_of_coalition(message, tuple(coalition), header=True) for message in messages if coalition and message.operation == "relay")
    return [message for message in relays if message is not None and message.payload is not None]


def _of_coalition(message: Message, coalition: tuple[int, ...], *, header: bool) -> Message | None:
    """What colluding clients read of a message: their own rows, what was sent to all of them alike, what a relay brought them.

    `header`: the adversary sees that the message passes. Without it, messages that do not concern the colluding clients are dropped.
    """
    closed = replace(message, payload=None, digest="", kept_digest="") if header else None  # a digest would let small values be guessed
    if not coalition or "clients" not in (message.source, message.target):
        return closed
    rows = payload_rows(message)
    if message.each:
        to = [any(client in coalition for client in peers) for peers in message.peers] or [False] * len(message.clients)
        received = {client for client, their in zip(message.clients, to, strict=True) if their}
        places = [i for i, client in enumerate(rows) if client in coalition or client in received]
        if not places:
            return closed
        payload = None if message.payload is None or len(rows) != _length(message) else _taken(message, rows, places)
        clients = message.clients if header else tuple(rows[i] for i in places)
        peers = message.peers if header else ()
        return replace(message, clients=clients, peers=peers, payload=payload, digest="", kept_digest="")
    places = [i for i, client in enumerate(message.clients) if client in coalition]
    if not places:
        return closed
    return message if header else replace(message, clients=tuple(message.clients[i] for i in places), digest="")


def _length(message: Message) -> int:
    return min(len(array) for array in (message.payload or {}).values())


def _taken(message: Message, rows: tuple[int, ...], places: Sequence[int]) -> dict[str, Array]:
    assert message.payload is not None  # checked by the caller
    kept = {name: np.asarray(array)[list(places)] for name, array in message.payload.items()}
    return kept | {"clients": np.array([rows[i] for i in places], dtype=np.int64)}


def _traffic(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Headers as an outsider sees them: clients that were sent equally many bytes in one step are not distinguished by content."""
    merged: dict[tuple[int, str, str, str, int], Message] = {}
    for message in messages:
        key = (message.round, message.operation, message.source, message.target, message.bytes_each)
        before = merged.get(key)
        clients = message.clients if before is None else tuple(sorted({*before.clients, *message.clients}))
        bare = before or replace(message, kind="", payload=None, digest="", kept_digest="", context={}, peers=(), readers=())
        merged[key] = replace(
            bare,
            clients=clients,
            copies=message.copies + (before.copies if before else 0),
            total_bytes=message.total_bytes + (before.total_bytes if before else 0),
        )
    return tuple(sorted(merged.values(), key=lambda message: message.index))


def load_view(run_dir: str | Path, adversary: str = "server") -> AdversaryView:
    """The view of `adversary` on a run folder. Raises `InputError` naming the file for a folder that is not a run folder or was changed."""
    folder = Path(run_dir)
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder}: is not a run folder (no config.toml)")
    config = load_config(folder / "config.toml", trust=False)
    view = view_of(recorded_messages(folder), adversary, read_secrets(folder), config.protection)
    return replace(view, shared_noise=config.privacy.unit == "client")


def recorded_messages(folder: Path) -> list[Message]:
    """The messages of a run folder; none for a run without messages (`local`).

    Raises `InputError` for a run of an earlier version, which records neither the training tasks nor the layout of transformed updates.
    """
    count = messages_of(folder / "summary.json")
    if count == 0 and not (folder / "transcript").exists():
        return []
    messages = read_transcript(folder / "transcript", count)
    if any(message.kind == "blind update" and not {"dimension", "parts"} <= set(message.context) for message in messages):
        raise InputError(
            f"{folder / 'transcript'}: does not record the layout of transformed updates; an earlier version wrote it: make the run again"
        )
    if any(message.kind == "parameters" and "settings" not in message.context for message in messages):
        raise InputError(
            f"{folder / 'transcript'}: does not record how clients were asked to train; {_writer(folder)} wrote it: make the run again"
        )
    return messages


def _writer(folder: Path) -> str:
    """The version that wrote a run folder, for messages."""
    try:
        return f"an earlier version ({read_json(folder / 'environment.json')['cflpriv']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "an earlier version"


def messages_of(path: Path) -> int | None:
    """The number of messages in the run's summary."""
    try:
        return int(read_json(path)["messages"])
    except FileNotFoundError:
        return None  # an interrupted run has no summary yet
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is not a run's summary ({error})") from None


def read_secrets(folder: Path) -> dict[str, dict[str, str]]:
    """The secrets that the simulation wrote, by party."""
    secrets = {}
    for path in sorted((folder / "secrets").glob("*.json")):
        try:
            content = read_json(path)
            party = str(content.pop("party"))
            if not re.fullmatch(r"client:\d+|key-holder", party):
                raise ValueError(f"party {party!r}")
            for value in content.values():
                bytes.fromhex(value)
            secrets[party] = {str(key): str(value) for key, value in content.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"{path}: is not a party's secrets ({error})") from None
    return secrets
