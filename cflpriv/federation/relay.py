"""The server's side of `relay`: boxes that it passes on and cannot open."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..errors import InputError
from ..protocols.errors import MalformedMessage, TooFewClients
from ..types import Array, check_array
from . import messages as m
from .registry import Roll

__all__ = ["relay", "requests"]


def requests(
    roll: Roll, session: bytes, asked: Sequence[int], number: int, parts: tuple[str, ...]
) -> dict[int, set[int]]:  # fmt: skip
    """Whom each client asks for, by its own held choice: the server learns it, since it must carry the answers."""
    wanted: dict[int, set[int]] = {}
    for client, answer in roll.ask(dict.fromkeys(asked, m.Give(session, "gather", number, parts, "", False)), "request").items():
        if isinstance(answer, m.Given) and len(answer.values) == 1:
            try:
                asks = check_array(f"client {client}: {parts[0]}", answer.values[0].value, kind="biu")
                if asks.size > len(roll.peers):
                    raise MalformedMessage
                wanted[client] = {int(sender) for sender in np.ravel(asks)}
            except (MalformedMessage, InputError):
                roll.refusals.append((client, "request", "malformed"))
    return wanted


def relay(
    roll: Roll, session: bytes, number: int, arrives: int, parts: tuple[str, ...], present: Sequence[int], wanted: Mapping[int, list[int]],
    record: Callable[..., None], *, requested: bool, witness: Callable[[int, int, tuple[str, ...]], Mapping[str, Array]] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Have the senders `present` seal parts of `number` for who wants them, and these keep them as `arrives`; who did.

    The record holds the sealed boxes, or what is in them where a `witness` (client, number, parts) knows: for those who could open them.

    Raises `TooFewClients` if nobody did: they are gone, or refuse.
    """
    recipients = list(wanted)
    asks: dict[int, m.Ask] = {}
    peers = {sender: [client for client in recipients if sender in wanted[client]] for sender in present}
    for sender, targets in peers.items():
        if targets:
            asks[sender] = m.Seal(session, number, parts, arrives, tuple(roll.peers[client] for client in targets))
    boxes: dict[int, dict[int, bytes]] = {client: {} for client in recipients}
    for sender, answer in sorted(roll.ask(asks, "seal").items()):
        if isinstance(answer, m.Sealed) and len(answer.boxes) == len(peers[sender]):
            for client, box in zip(peers[sender], answer.boxes, strict=True):
                boxes[client][sender] = box
    if requested:
        said = [{"wanted": np.isin(present, wanted[client])} for client in recipients]
        record("request", "clients", "server", recipients, said, readers=("server",))
    senders = [sender for sender in present if any(sender in inbox for inbox in boxes.values())]
    sent = [next(boxes[client][sender] for client in peers[sender]) for sender in senders]
    payload: list[Mapping[str, Array]] = [{"box": np.frombuffer(box, dtype=np.uint8)} for box in sent]
    overhead = 0
    if witness is not None and senders:
        payload = [witness(sender, number, parts) for sender in senders]
        overhead = len(sent[0]) - sum(one.nbytes for one in payload[0].values())
    record(
        "+".join(parts), "clients", "clients", senders, payload, readers=("clients",), peers=[peers[one] for one in senders],
        overhead_bytes=overhead,
    )  # fmt: skip
    takes: dict[int, m.Ask] = {
        client: m.Take(session, arrives, parts, tuple(m.Boxed(roll.peers[sender], box) for sender, box in sorted(inbox.items())))
        for client, inbox in boxes.items()
        if client in roll.present
    }
    took = tuple(client for client, answer in sorted(roll.ask(takes, "take").items()) if isinstance(answer, m.Done))
    if not took:
        raise TooFewClients((), 1)
    return took
