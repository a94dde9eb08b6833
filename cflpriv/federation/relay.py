"""`relay`: values from client to client, in sealed boxes that the server forwards and cannot open. The client half and the server half."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from ..protocols.errors import MalformedMessage, RemoteError, TooFewClients
from ..protocols.keys import agree, seal, unseal
from ..types import Array, check_array
from . import messages as m
from .protections import ClientParts
from .registry import LABEL, ClientRegistry, check_peer
from .values import UNTRACED, Origin, from_bytes, to_bytes
from .work import smallest

__all__ = ["Relay", "Relaying", "Witness", "relay", "relay_key", "requested_senders"]

Witness = Callable[[int, int, tuple[str, ...]], Mapping[str, Array]]
"""What a simulated client put into its boxes: client, number and parts of the held value -> arrays by part."""
log = logging.getLogger("cflpriv.federation")


def relay_key(own: bytes, other: bytes, session: bytes, held: int, source: int, target: int) -> bytes:
    """The key of a value relayed from `source` to `target`. It follows from long-term keys: a stolen one opens earlier recordings."""
    place = b"".join(number.to_bytes(8, "big") for number in (held, source, target))
    return agree(own, other, LABEL + "relay", session, place)


# --- the client half


class Relaying:
    """A client's part in relays: it seals its values for other clients, and opens what they sealed for it."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts, self._settings, self._values = parts, parts.settings, parts.values
        self._own = parts.settings.identity.encryption_seed

    def seal(self, ask: m.Seal) -> m.SealedBoxes:
        parts, client = self._parts, self._parts.client
        values = parts.allowed("relay", ask.held, ask.parts)
        if any(isinstance(value, dict) for value in values.values()) or parts.ledger.unit == "client":
            raise RemoteError("forbidden")
        origin = self._values.origin(ask.held)
        parts.ledger.settle(ask.held, ask.parts, "relay")
        values = {part: parts.finite(part, value) for part, value in values.items()}
        plain = to_bytes(values, Origin(compared=any(origin.is_compared(part) for part in ask.parts)))
        boxes = []
        for recipient in ask.recipients:
            check_peer(self._settings.roster, ask.session, recipient)
            key = relay_key(self._own, recipient.encryption_key, ask.session, ask.arrives, client, recipient.client)
            boxes.append(seal(key, plain, LABEL.encode(), parts.entropy))
        return m.SealedBoxes(tuple(boxes))

    def take(self, ask: m.Take) -> m.Acknowledged:
        """Hold what others sealed. A box that cannot be opened, or whose arrays differ in shape from most, is left out."""
        opened: dict[int, dict[str, Array]] = {}
        compared = False
        for boxed in ask.boxes:
            sender = boxed.sender.client
            try:
                opened[sender], is_compared = self._opened(ask, boxed)
                compared |= is_compared
            except RemoteError as error:
                log.warning("client %d: the box of client %d is left out (%s)", self._parts.client, sender, error.code)
        if ask.boxes and not opened:
            raise RemoteError("bad-box")
        shapes = {sender: tuple((array.shape, array.dtype.str) for array in values.values()) for sender, values in opened.items()}
        usual = max(Counter(shapes.values()).items(), key=lambda item: item[1])[0] if shapes else ()
        arrived = {part: {sender: values[part] for sender, values in opened.items() if shapes[sender] == usual} for part in ask.parts}
        sizes = [np.size(value) for values in arrived.values() for value in values.values()]
        self._values.drop(ask.held)
        self._parts.ledger.public(ask.held, ask.parts)
        self._values.hold(ask.held, dict(arrived), Origin(UNTRACED, smallest(size for size in sizes if size > 1), compared))
        return m.Acknowledged()

    def _opened(self, ask: m.Take, boxed: m.Boxed) -> tuple[dict[str, Array], bool]:
        """The finite arrays in a box, in the order of the parts asked for, and whether clients compare them. Raises `RemoteError`."""
        sender = boxed.sender
        check_peer(self._settings.roster, ask.session, sender)
        key = relay_key(self._own, sender.encryption_key, ask.session, ask.held, sender.client, self._parts.client)
        values, origin = from_bytes(unseal(key, boxed.box, LABEL.encode()))
        if set(values) != set(ask.parts) or not all(
            isinstance(array, np.ndarray) and np.isfinite(array).all() for array in values.values()
        ):
            raise RemoteError("malformed")
        return {part: values[part] for part in ask.parts}, origin.compared


# --- the server half


@dataclass(frozen=True)
class Relay:
    """One relay: `parts` of the values held as `number`, which recipients will hold as `arrives`.

    `present`: the possible senders. `wanted`: by recipient, the senders that it gets values of; `requested` if the recipient chose them.
    """

    number: int
    arrives: int
    parts: tuple[str, ...]
    present: Sequence[int]
    wanted: Mapping[int, Sequence[int]]
    requested: bool


def requested_senders(
    registry: ClientRegistry, session: bytes, recipients: Sequence[int], number: int, parts: tuple[str, ...]
) -> dict[int, set[int]]:  # fmt: skip
    """The senders that each recipient chose, by its held value `number`. The server learns them, because it carries the boxes."""
    wanted: dict[int, set[int]] = {}
    ask = m.Give(session, "gather", number, parts, "", False)
    for client, answer in registry.ask(dict.fromkeys(recipients, ask), "request").items():
        try:
            if not isinstance(answer, m.Given) or len(answer.values) != 1:
                raise MalformedMessage
            senders = check_array(f"client {client}: {parts[0]}", answer.values[0].value, kind="biu")
            if senders.size > len(registry.peers):
                raise MalformedMessage
            wanted[client] = {int(sender) for sender in np.ravel(senders)}
        except (MalformedMessage, InputError):
            registry.refusals.append((client, "request", "malformed"))
    return wanted


def relay(
    registry: ClientRegistry, session: bytes, what: Relay, record: Callable[..., None], witness: Witness | None = None
) -> tuple[int, ...]:
    """Have senders seal their values and recipients hold them. Returns the recipients that do.

    The record has the sealed boxes, or with a `witness` their contents, readable by those who can open them. Raises `TooFewClients` if no
    recipient holds anything.
    """
    parts, recipients = what.parts, list(what.wanted)
    asks: dict[int, m.PartyRequest] = {}
    peers = {sender: [client for client in recipients if sender in what.wanted[client]] for sender in what.present}
    for sender, targets in peers.items():
        if targets:
            asks[sender] = m.Seal(session, what.number, parts, what.arrives, tuple(registry.peers[client] for client in targets))
    boxes: dict[int, dict[int, bytes]] = {client: {} for client in recipients}
    for sender, answer in sorted(registry.ask(asks, "seal").items()):
        if isinstance(answer, m.SealedBoxes) and len(answer.boxes) == len(peers[sender]):
            for client, box in zip(peers[sender], answer.boxes, strict=True):
                boxes[client][sender] = box
        else:
            registry.refusals.append((sender, "seal", "malformed"))
    if what.requested:
        choices = [{"wanted": np.isin(what.present, what.wanted[client])} for client in recipients]
        record("request", "clients", "server", recipients, choices, readers=("server",))
    senders = [sender for sender in what.present if any(sender in inbox for inbox in boxes.values())]
    sent = [next(boxes[client][sender] for client in peers[sender]) for sender in senders]
    payload: list[Mapping[str, Array]] = [{"box": np.frombuffer(box, dtype=np.uint8)} for box in sent]
    overhead = 0
    if witness is not None and senders:
        payload = [witness(sender, what.number, parts) for sender in senders]
        overhead = len(sent[0]) - sum(array.nbytes for array in payload[0].values())
    record(
        "+".join(parts), "clients", "clients", senders, payload, readers=("clients",), peers=[peers[peer] for peer in senders],
        overhead_bytes=overhead,
    )  # fmt: skip
    takes: dict[int, m.PartyRequest] = {
        client: m.Take(session, what.arrives, parts, tuple(m.Boxed(registry.peers[sender], box) for sender, box in sorted(inbox.items())))
        for client, inbox in boxes.items()
        if client in registry.present
    }
    took = tuple(client for client, answer in sorted(registry.ask(takes, "take").items()) if isinstance(answer, m.Acknowledged))
    if not took:
        raise TooFewClients((), 1)
    return took
