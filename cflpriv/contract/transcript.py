"""The transcript: a record of everything that crosses a trust boundary.

An adversary's view is a filter of it plus the coalition's own secrets; attacks run on nothing else. A message covers one kind of
payload between the server (or key holder) and a set of clients, so that a round of a thousand clients is a handful of records.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from dataclasses import fields as fields_of
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..array_files import read_safetensors
from ..errors import InputError
from ..files import PRIVATE, append, write_arrays, write_atomically
from ..protocols.bounded_files import LARGEST_TABLE_BYTES, in_place, parse_json, read_bytes, read_text
from ..types import Array

__all__ = [
    "LEVELS", "Level", "Message", "Passed", "RoundRecord", "Transcript", "Unprotected", "cut_transcript", "read_transcript", "settings_of",
    "what_was_kept",
]  # fmt: skip

Level = Literal["headers", "attackable", "full"]
LEVELS: dict[str, str] = {
    "headers": "kind, parties, sizes and digests of every message",
    "attackable": "payloads too, for the rounds in `record_rounds` and the clients in `record_clients` or a `record_sample`",
    "full": "all payloads",
}


@dataclass(frozen=True, eq=False)
class Message:
    """One kind of payload between parties.

    `source` and `target` are "server", "clients" or "key-holder"; `clients` says which clients, and `peers[i]`, in a relay, the recipients
    clients[i] sent. `readers` are the parties that can read the payload (a relay's server cannot). `context` holds public facts: epoch,
    group, transform, cluster, and of parameters the public task that was asked: its "task", by class name, and "settings" (`settings_of`).

    `payload` maps part names to arrays: with `each`, one row a client in the order of `clients`; otherwise the same for all. It is None
    where it was not kept. One-dimensional payloads of different lengths are kept padded with zeros, beside an array "NAME.length". `digest`
    is that of all rows; where only some were kept, beside an array "clients", `kept_digest` is that of these and of whose they are.
    `bytes_each` is the size for one client (the largest, of one copy), `copies` how many travelled (one where it concerns no client, from a
    key holder to the server, say), `total_bytes` the size of all.
    """

    index: int
    round: int
    operation: str
    kind: str
    source: str
    target: str
    clients: tuple[int, ...]
    readers: tuple[str, ...]
    bytes_each: int
    copies: int
    total_bytes: int
    digest: str
    each: bool = True
    peers: tuple[tuple[int, ...], ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)
    payload: Mapping[str, Array] | None = None
    kept_digest: str = ""


@dataclass(frozen=True)
class RoundRecord:
    """A round as the server knows it: `cohort`, `labels` of the cohort (None where the server does not learn them), `notes`."""

    round: int
    cohort: tuple[int, ...]
    labels: tuple[int, ...] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Unprotected:
    """Bytes (in the dtypes of the run) and numbers from and to clients, since the start, that operations would send without a protection.

    The difference to the bytes that were sent is the cost of the protection: masks, shares, transforms, nonces, wider numbers.
    """

    upload_bytes: int = 0
    download_bytes: int = 0
    upload_numbers: int = 0
    download_numbers: int = 0

    def up(self, numbers: int, size: int, copies: int = 1) -> None:
        """Count `numbers` of `size` bytes that clients send, `copies` times."""
        self.upload_numbers += copies * numbers
        self.upload_bytes += copies * size

    def down(self, numbers: int, size: int, copies: int = 1) -> None:
        """Count `numbers` of `size` bytes that clients are sent, `copies` times."""
        self.download_numbers += copies * numbers
        self.download_bytes += copies * size


@dataclass(frozen=True)
class Passed:
    """The size of an array that was let go before its message was recorded. At level "headers" it takes the array's place, and the message
    has no digest."""

    nbytes: int


LARGEST_DIGESTED_BYTES = 1 << 26
"""At level "headers" larger payloads get no digest, since they are not kept."""


class Transcript:
    """Collects messages at a record level. `upload_bytes` and `download_bytes` count everything, kept or not; `unprotected` what would be
    sent without any protection.

    A payload is copied when it is kept, so that later changes by its owner do not reach the record.
    """

    def __init__(self, level: Level = "headers", rounds: Sequence[int] | None = None, clients: Sequence[int] | None = None) -> None:
        if level not in LEVELS:
            raise InputError(f"run.record: {level!r} is not known; known are {', '.join(LEVELS)}")
        self.level = level
        self.rounds = None if rounds is None else frozenset(rounds)
        self.clients = None if clients is None else frozenset(clients)
        self.messages: list[Message] = []
        self.upload_bytes = 0
        self.download_bytes = 0
        self.unprotected = Unprotected()
        self._chain = ""

    def add(
        self,
        round: int,
        operation: str,
        kind: str,
        source: str,
        target: str,
        clients: Sequence[int],
        payload: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        readers: Sequence[str],
        peers: Sequence[Sequence[int]] = (),
        context: Mapping[str, Any] | None = None,
        overhead_bytes: int = 0,
    ) -> None:
        """Record a message. `payload` is one mapping for all `clients`, or a sequence with one mapping each.

        `overhead_bytes` is what a protection adds to each copy (nonces, tags).
        """
        each = not isinstance(payload, Mapping)
        payloads: Sequence[Mapping[str, Any]] = [payload] if isinstance(payload, Mapping) else payload
        if each and len(payloads) != len(clients):
            raise ValueError(f"{operation} {kind}: {len(payloads)} payloads for {len(clients)} clients")
        sizes = [sum(array.nbytes for array in single.values()) for single in payloads]
        gone = any(isinstance(array, Passed) for single in payloads for array in single.values())
        digested = self.level != "headers" or (sum(sizes) <= LARGEST_DIGESTED_BYTES and not gone)
        times = [len(row) for row in peers] if peers else [1] * len(payloads) if each else [len(clients)]
        if not each and not clients and "clients" not in (source, target):
            times = [1]
        copies = sum(times)
        bytes_each = max(sizes, default=0) + overhead_bytes
        total = sum(count * (size + overhead_bytes) for count, size in zip(times, sizes, strict=True))
        message = Message(
            len(self.messages), round, operation, kind, source, target, tuple(clients), tuple(readers), bytes_each, copies, total,
            _digest(payloads) if digested else "", each, tuple(tuple(row) for row in peers), dict(context or {}),
        )  # fmt: skip
        if source == "clients":
            self.upload_bytes += total
        if target == "clients":
            self.download_bytes += total
        self.messages.append(self._with_payload(message, payloads))

    def _with_payload(self, message: Message, payloads: Sequence[Mapping[str, Array]]) -> Message:
        if self.level == "headers" or not payloads:
            return message
        wanted = range(len(payloads))
        if self.level == "attackable":
            if self.rounds is not None and message.round not in self.rounds and message.round >= 0:
                return message  # what comes before the first round, signatures above all, is always kept
            if message.each and self.clients is not None:
                wanted = [i for i in wanted if message.clients[i] in self.clients]  # type: ignore[assignment]
                if not wanted:
                    return message
        if not message.each:
            return replace(message, payload={name: np.array(value) for name, value in payloads[0].items()})
        names = sorted(payloads[0])
        kept: dict[str, Array] = {}
        for name in names:
            rows = [np.asarray(payloads[i][name]) for i in wanted]
            lengths = {row.shape for row in rows}
            if len(lengths) > 1 and all(row.ndim == 1 for row in rows):
                kept[f"{name}.length"] = np.array([len(row) for row in rows], dtype=np.int64)
                rows = [np.pad(row, (0, int(kept[f"{name}.length"].max()) - len(row))) for row in rows]
            kept[name] = np.stack(rows)
        if len(wanted) == len(payloads):
            return replace(message, payload=kept)
        kept["clients"] = np.array([message.clients[i] for i in wanted], dtype=np.int64)
        return replace(message, payload=kept, kept_digest=_digest([*(payloads[i] for i in wanted), {"clients": kept["clients"]}]))

    def write(self, folder: Path, first: int = 0) -> None:
        """Append messages from number `first` on: headers to messages.jsonl, payloads to one safetensors file per call.

        Atomic: where it fails, OSError is raised and the folder is unchanged, except for a payload file that no header names.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = self.messages[first:]
        payloads = {f"{message.index}/{name}": array for message in fresh for name, array in (message.payload or {}).items()}
        if payloads:
            write_arrays(folder / f"payloads_{first:07d}.safetensors", payloads)
        lines, chain = [], self._chain
        for message in fresh:
            header = json.dumps(_header(message), sort_keys=True)
            chain = _link(chain, header)
            lines.append(json.dumps({"chain": chain, "header": header}) + "\n")
        append(folder / "messages.jsonl", "".join(lines), PRIVATE)
        self._chain = chain

    def saved(self) -> dict[str, Any]:
        """Its position, for a checkpoint, once all of it is written."""
        counted = {"upload_bytes": self.upload_bytes, "download_bytes": self.download_bytes}
        return {"messages": len(self.messages), "chain": self._chain, **counted}

    def restore(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Continue a written transcript at the position `saved`; headers are read, payloads stay on disk. `InputError` if it is another."""
        headers = folder / "messages.jsonl"
        lines = list(_parsed(headers)) if headers.is_file() else []
        self.messages = [message for message, _, _ in lines]
        self._chain = lines[-1][2] if lines else ""
        if len(self.messages) != saved["messages"] or self._chain != saved["chain"]:
            raise InputError(f"{headers}: is not the transcript of the checkpoint")
        self.upload_bytes, self.download_bytes = saved["upload_bytes"], saved["download_bytes"]


def cut_transcript(folder: Path, count: int, aside: Path) -> int:
    """Cut a transcript back to its first `count` messages; later ones are moved to the folder `aside`. Returns the number of these."""
    headers = folder / "messages.jsonl"
    lines = read_bytes(headers, LARGEST_TABLE_BYTES).splitlines(keepends=True) if headers.is_file() else []
    payloads = [path for path in sorted(folder.glob("payloads_*.safetensors")) if int(path.stem.split("_")[1]) >= count]
    if lines[count:] or payloads:
        aside.mkdir(parents=True, exist_ok=True, mode=0o700)
    if lines[count:]:
        write_atomically(aside / "messages.jsonl", b"".join(lines[count:]).decode("utf-8", errors="replace"), PRIVATE)
        with open(headers, "r+b", opener=in_place) as out:
            out.truncate(sum(map(len, lines[:count])))
    for path in payloads:
        os.replace(path, aside / path.name)
    for path in folder.glob("*.part"):
        path.unlink()
    return len(lines[count:])


def settings_of(value: object) -> Any:
    """A public task, or a part of one, as plain JSON: the fields of a dataclass by name, and "" for its class, as tasks travel.

    Anything else that is no JSON, such as a function, is given by its class alone. It is the task that was asked: under `[privacy]` clients
    run its private form, whose noise is in the public configuration.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): settings_of(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [settings_of(item) for item in value]
    names = (
        [attribute.name for attribute in fields_of(value) if attribute.init] if is_dataclass(value) and not isinstance(value, type) else []
    )
    return {"": type(value).__name__, **{name: settings_of(getattr(value, name)) for name in names}}


def what_was_kept(messages: Sequence[Message]) -> str:
    """A sentence on the payloads that were not kept; empty where all were."""
    sent = [message for message in messages if message.total_bytes]
    without, in_part = sum(message.payload is None for message in sent), sum(bool(message.kept_digest) for message in sent)
    if not without + in_part:
        return ""
    return (
        f"of {len(sent)} payloads {len(sent) - without - in_part} were kept, {in_part} for some clients only, {without} not at all (see "
        "[run] record): what was not kept cannot be checked against its digest, and no attack reads it"
    )


def payload_rows(message: Message) -> tuple[int, ...]:
    """The clients that the rows of a kept payload belong to."""
    if message.payload is not None and "clients" in message.payload:
        return tuple(int(client) for client in message.payload["clients"])
    return message.clients


def _link(before: str, header: str) -> str:
    """A digest over all headers so far. It shows accidents and careless edits, not an attacker who computes it afresh."""
    return blake2b(f"{before}|{header}".encode(), digest_size=16).hexdigest()


def _header(message: Message) -> dict[str, Any]:
    fields = {name: getattr(message, name) for name in Message.__dataclass_fields__ if name != "payload"}
    return fields | {"kept": sorted(message.payload or {})}


def read_transcript(folder: Path, count: int | None = None) -> list[Message]:
    """The messages of a run folder's transcript, `count` of them if that is known.

    Raises `InputError` naming the file where it is missing, cut short or changed.
    """
    headers = folder / "messages.jsonl"
    if not headers.is_file():
        raise InputError(f"{headers}: no transcript here; is this a run folder?")
    payloads: dict[str, Array] = {}
    for path in sorted(folder.glob("payloads_*.safetensors")):
        payloads |= read_safetensors(path)
    messages: list[Message] = []
    for message, kept, _ in _parsed(headers):
        if any(f"{message.index}/{name}" not in payloads for name in kept):
            raise InputError(f"{headers}: line {message.index + 1} is not a message of this transcript (a payload is missing)")
        message = replace(message, payload={name: payloads[f"{message.index}/{name}"] for name in kept} or None)
        _verify(message, headers, message.index + 1)
        messages.append(message)
    if count is not None and len(messages) != count:
        raise InputError(f"{headers}: has {len(messages)} messages, the run had {count}; the transcript was cut")
    return messages


def _parsed(headers: Path) -> Iterator[tuple[Message, list[str], str]]:
    """Each line's message, without its payload, the names of what was kept of that, and the chain up to it, followed from line to line."""
    chain = ""
    for number, line in enumerate(read_text(headers, LARGEST_TABLE_BYTES, "replace").splitlines(), 1):
        try:
            linked = parse_json(line)
            chain = _link(chain, linked["header"])
            if chain != linked["chain"]:
                raise ValueError("it does not continue the lines before it")
            fields = parse_json(linked["header"])
            kept = fields.pop("kept")
            fields["clients"], fields["readers"] = tuple(fields["clients"]), tuple(fields["readers"])
            fields["peers"] = tuple(tuple(row) for row in fields["peers"])
            message = Message(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{headers}: line {number} is not a message of this transcript ({error})") from None
        if message.index != number - 1:
            raise InputError(f"{headers}: line {number} has index {message.index}, expected {number - 1}")
        yield message, kept, chain


def _digest(payloads: Sequence[Mapping[str, Array]]) -> str:
    """A digest of payloads in order: names, types, shapes and bytes."""
    digest = blake2b(digest_size=16)
    for single in payloads:
        for name in sorted(single):
            array = np.ascontiguousarray(single[name])
            digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
            digest.update(array.data)
    return digest.hexdigest()


def _verify(message: Message, path: Path, line: int) -> None:
    """A payload must still match its digest, also where only some rows were kept."""
    payload = message.payload
    if payload is None:
        return
    some = "clients" in payload and message.each
    if some and not message.kept_digest:
        raise InputError(
            f"{path}: line {line}: rows of some clients were kept without a digest of their own, by an earlier version, so nothing shows "
            "whether they were changed; make the run again"
        )
    parts: list[Mapping[str, Array]] = [payload]
    if message.each:
        names = [name for name in payload if not name.endswith(".length") and not (some and name == "clients")]
        rows = len(payload["clients"]) if some else len(message.clients)
        if any(len(payload[name]) != rows for name in payload):
            raise InputError(f"{path}: line {line}: the payload has not one row a client; the transcript was changed")
        parts = [{name: _row(payload, name, row) for name in names} for row in range(rows)]
        parts += [{"clients": payload["clients"]}] if some else []
    if _digest(parts) != (message.kept_digest if some else message.digest):
        raise InputError(f"{path}: line {line}: the payload does not match its digest; the transcript was changed")


def _row(payload: Mapping[str, Array], name: str, row: int) -> Array:
    """One client's part, without the padding."""
    array: Array = payload[name][row]
    return array[: int(payload[f"{name}.length"][row])] if f"{name}.length" in payload else array
