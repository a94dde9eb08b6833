"""Traffic of a run: the keys of rounds.jsonl and summary.json that count bytes, numbers and megabits."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from ...federation.server import FederationServer
from ...federation.traffic import client_bytes, megabits, to_target

__all__ = ["traffic_so_far", "traffic_summary"]


def traffic_so_far(federation: FederationServer, number: int) -> dict[str, Any]:
    """After round `number`: what protections added so far, numbers moved so far, and this round's mean bytes a client that took part."""
    bare, transcript = federation.bare, federation.transcript
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
    bare, transcript, present = federation.bare, federation.transcript, len(federation.clients)
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
