"""Traffic of a run: the keys of rounds.jsonl and summary.json that count bytes, numbers and megabits.

Papers count numbers in both directions, at 32 bits each, and so does `megabits`, over all clients. PACFL's Table 8 divides this by the
number of clients, sampled or not (211.88 Mb for a ResNet-9, twice, times 0.1 × rounds): `megabits_a_client` in summary.json.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from ...contract.transcript import Message
from ...federation.server import FederationServer

__all__ = ["client_bytes", "megabits", "to_target", "traffic_so_far", "traffic_summary"]

BITS = 32
"""A number costs this many bits in the papers' tables, whatever the dtype of the run."""


def traffic_so_far(federation: FederationServer, number: int) -> dict[str, Any]:
    """After round `number`: what protections added so far, numbers moved so far, and this round's mean bytes a client that took part."""
    transcript, bare = federation.transcript, federation.transcript.unprotected
    sent, received = client_bytes(takewhile(lambda message: message.round == number, reversed(transcript.messages)))
    return {
        "protection_upload_bytes": transcript.upload_bytes - bare.upload_bytes,
        "protection_download_bytes": transcript.download_bytes - bare.download_bytes,
        "upload_numbers": bare.upload_numbers,
        "download_numbers": bare.download_numbers,
        "client_upload_bytes": float(np.mean(list(sent.values()))) if sent else 0.0,
        "client_download_bytes": float(np.mean(list(received.values()))) if received else 0.0,
    }


def traffic_summary(federation: FederationServer, rows: Sequence[Mapping[str, Any]], target: float, trained: int) -> dict[str, Any]:
    """The same for a whole run: `setup_bytes` is the traffic before the first round (PACFL's signatures), `megabits` all numbers at 32
    bits.

    With a `target` above 0, rounds and megabits until either accuracy first reached it (None: never). Keys with `a_client` are divided by
    the number of all clients, sampled or not, as in PACFL's Table 8: those in the federation now, and up to a target the `trained` of them
    that took part in training, without newcomers.
    """
    transcript, bare = federation.transcript, federation.transcript.unprotected
    present = len(federation.clients)
    setup = [message for message in transcript.messages if message.round < 0]
    summary: dict[str, Any] = {
        "protection_upload_bytes": transcript.upload_bytes - bare.upload_bytes,
        "protection_download_bytes": transcript.download_bytes - bare.download_bytes,
        "setup_bytes": sum(message.total_bytes for message in setup),
        "megabits": megabits(bare.upload_numbers + bare.download_numbers),
        "megabits_a_client": megabits(bare.upload_numbers + bare.download_numbers) / present if present else None,
    }
    for prefix in ("", "local_") if target > 0 else ():
        rounds, cost = to_target(rows, target, f"{prefix}accuracy_mean") or (None, None)
        summary |= {
            f"{prefix}rounds_to_target": rounds,
            f"{prefix}megabits_to_target": cost,
            f"{prefix}megabits_a_client_to_target": None if cost is None else cost / trained,
        }
    return summary


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
