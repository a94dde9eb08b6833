"""Communication cost: the bytes and numbers that the operations would send without any protection, and figures of papers.

The transcript has the bytes that were sent. The difference is the cost of the protection: masks, shares, transforms, nonces, wider
numbers. Papers count numbers in both directions, at 32 bits each, and so does `megabits`, over all clients. PACFL's Table 8 divides this by
the number of clients, sampled or not (211.88 Mb for a ResNet-9, twice, times 0.1 × rounds): `megabits_a_client` in summary.json.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..contract.calls import SumCall
from ..contract.handles import GroupMean, Shared
from ..contract.transcript import Message
from ..types import Array

__all__ = ["Bare", "client_bytes", "megabits", "to_target"]

BITS = 32
"""A number costs this many bits in the papers' tables, whatever the dtype of the run."""


@dataclass
class Bare:
    """Bytes (in the dtypes of the run) and numbers from and to clients, since the start, without the cost of a protection."""

    upload_bytes: int = 0
    download_bytes: int = 0
    upload_numbers: int = 0
    download_numbers: int = 0

    def up(self, values: Iterable[Any], copies: int = 1) -> None:
        """Count values (anything with a shape and a dtype) that clients send."""
        numbers, size = _sizes(values)
        self.upload_numbers += copies * numbers
        self.upload_bytes += copies * size

    def down(self, values: Iterable[Any], copies: int = 1) -> None:
        """Count values that clients are sent."""
        numbers, size = _sizes(values)
        self.download_numbers += copies * numbers
        self.download_bytes += copies * size

    def mean(self, call: SumCall, layout: Sequence[Any], means: Sequence[GroupMean | None]) -> None:
        """Count a mean: the parts (of this `layout`) of every client whose update is in a sum, and private weights."""
        parts = [np.broadcast_to(np.zeros((), part.dtype), part.shape) for part in layout]
        contributors = set().union(*(mean.contributors for mean in means if mean is not None))
        self.up([*parts, *(() if call.public_weights else (np.array(0.0),))], copies=len(contributors))

    def saved(self) -> dict[str, int]:
        """The counters, for a checkpoint."""
        return asdict(self)


def _sizes(values: Iterable[Any]) -> tuple[int, int]:
    numbers = size = 0
    for value in values:
        for one in value.values() if isinstance(value, dict) else (value,):
            count = int(np.prod(one.shape, dtype=np.int64))
            numbers += count
            size += count * np.dtype(one.dtype).itemsize
    return numbers, size


def plain(values: Iterable[Array | Shared]) -> list[Array]:
    """What would be sent of parameters of `compute` without a protection: nothing of a sum of which clients have only their own parts."""
    sent: list[Array] = []
    for value in values:
        if not isinstance(value, Shared):
            sent.append(np.asarray(value))
        elif value.clear is not None:
            sent.append(value.clear)
        elif value.blind:
            sent.append(np.broadcast_to(np.zeros((), dtype=value.blind[0].value.dtype), value.blind[0].shape))
    return sent


def megabits(numbers: int) -> float:
    """Megabits (10⁶) for so many numbers at 32 bits each."""
    return numbers * BITS / 1e6


def client_bytes(messages: Iterable[Message]) -> tuple[dict[int, float], dict[int, float]]:
    """(sent, received) bytes by client. A message's bytes are divided evenly among its copies; exact if these have equal sizes."""
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    for message in messages:
        each = message.total_bytes / max(1, message.copies)
        for i, client in enumerate(message.clients):
            copies = len(message.peers[i]) if message.peers else 1
            if message.source == "clients":
                sent[client] = sent.get(client, 0.0) + copies * each
            if message.target == "clients" and not message.peers:
                received[client] = received.get(client, 0.0) + each
        for row in message.peers:
            for recipient in row:
                received[recipient] = received.get(recipient, 0.0) + each
    return sent, received


def to_target(rows: Sequence[Mapping[str, Any]], target: float, metric: str = "accuracy_mean") -> tuple[int, float] | None:
    """(rounds, megabits both ways, setup included) when `metric` first reaches `target`, from the rows of rounds.jsonl; None if never.

    Rounds are counted from 1. Only evaluated rounds can reach it.
    """
    for row in rows:
        value = row.get(metric)
        if value is not None and value >= target:
            return int(row["round"]) + 1, megabits(row["upload_numbers"] + row["download_numbers"])
    return None
