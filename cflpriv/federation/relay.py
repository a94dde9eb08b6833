"""`relay`: values from client to client, in boxes that the server passes on and cannot open. The client half and the server half."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..errors import InputError
from ..protocols.entropy import Entropy
from ..protocols.errors import MalformedMessage, RemoteError, TooFewClients
from ..protocols.keys import agree, seal, unseal
from ..types import Array, check_array
from . import messages as m
from .client_ledger import ClientLedger
from .enrolment import LABEL, check_peer
from .protections import Allowed
from .registry import ClientRegistry
from .settings import Settings
from .values import UNTRACED, Origin, Values, from_bytes, to_bytes
from .work import smallest

__all__ = ["Relaying", "relay", "relay_key", "requests"]


def relay_key(own: bytes, other: bytes, session: bytes, held: int, source: int, target: int) -> bytes:
    """The key of a relayed value from `source` to `target`, from long-term keys: a stolen one opens what was recorded before."""
    place = b"".join(number.to_bytes(8, "big") for number in (held, source, target))
    return agree(own, other, LABEL + "relay", session, place)


log = logging.getLogger("cflpriv.federation")


class Relaying:
    """A client's part in relays: it seals its values for others, and opens what they sealed for it."""

    def __init__(self, settings: Settings, values: Values, ledger: ClientLedger, entropy: Entropy, allowed: Allowed) -> None:
        self._settings, self._values, self._spending, self._entropy, self._allowed = settings, values, ledger, entropy, allowed

    def seal(self, ask: m.Seal) -> m.Sealed:
        values = self._allowed("relay", ask.held, ask.parts)
        if any(isinstance(value, dict) for value in values.values()) or self._spending.unit == "client":
            raise RemoteError("forbidden")
        origin = self._values.origin(ask.held)
        self._spending.settle(ask.held, ask.parts, "relay")
        plain = to_bytes(values, Origin(compared=any(origin.is_compared(part) for part in ask.parts)))
        boxes = []
        for recipient in ask.recipients:
            check_peer(self._settings.roster, ask.session, recipient)
            key = relay_key(
                self._settings.identity.encryption_seed,
                recipient.encryption_key,
                ask.session,
                ask.arrives,
                self._settings.identity.client,
                recipient.client,
            )
            boxes.append(seal(key, plain, LABEL.encode(), self._entropy))
        return m.Sealed(tuple(boxes))

    def take(self, ask: m.Take) -> m.Done:
        """Keep what others sealed. A box that cannot be opened, or holds something else than most do, costs its sender and nobody else."""
        opened: dict[int, dict[str, Array]] = {}
        compared = False
        for boxed in ask.boxes:
            try:
                opened[boxed.sender.client], said = self._opened(ask, boxed)
                compared |= said
            except RemoteError as error:
                log.warning(
                    "client %d: what client %d sealed for it is left out (%s)",
                    self._settings.identity.client,
                    boxed.sender.client,
                    error.code,
                )
        if ask.boxes and not opened:
            raise RemoteError("bad-box")
        shapes = {sender: tuple((one.shape, one.dtype.str) for one in values.values()) for sender, values in opened.items()}
        usual = max(Counter(shapes.values()).items(), key=lambda one: one[1])[0] if shapes else ()
        arrived = {
            part: {sender: values[part] for sender, values in opened.items() if shapes[sender] == usual} for part in ask.parts
        }  # fmt: skip
        sizes = [np.size(value) for values in arrived.values() for value in values.values()]
        self._values.drop(ask.held)
        self._spending.public(ask.held, ask.parts)
        self._values.hold(ask.held, dict(arrived), Origin(UNTRACED, smallest(size for size in sizes if size > 1), compared))
        return m.Done()

    def _opened(self, ask: m.Take, boxed: m.Boxed) -> tuple[dict[str, Array], bool]:
        """What is in a box, in the order of the parts asked for: finite arrays under their names; and whether clients compare them.

        Raises `RemoteError`.
        """
        check_peer(self._settings.roster, ask.session, boxed.sender)
        own, sender = self._settings.identity.encryption_seed, boxed.sender
        key = relay_key(own, sender.encryption_key, ask.session, ask.held, sender.client, self._settings.identity.client)
        values, origin = from_bytes(unseal(key, boxed.box, LABEL.encode()))
        if set(values) != set(ask.parts) or not all(isinstance(one, np.ndarray) and np.isfinite(one).all() for one in values.values()):
            raise RemoteError("malformed")
        return {part: values[part] for part in ask.parts}, origin.compared


def requests(
    registry: ClientRegistry, session: bytes, asked: Sequence[int], number: int, parts: tuple[str, ...]
) -> dict[int, set[int]]:  # fmt: skip
    """Whom each client asks for, by its own held choice: the server learns it, since it must carry the answers."""
    wanted: dict[int, set[int]] = {}
    for client, answer in registry.ask(dict.fromkeys(asked, m.Give(session, "gather", number, parts, "", False)), "request").items():
        if isinstance(answer, m.Given) and len(answer.values) == 1:
            try:
                asks = check_array(f"client {client}: {parts[0]}", answer.values[0].value, kind="biu")
                if asks.size > len(registry.peers):
                    raise MalformedMessage
                wanted[client] = {int(sender) for sender in np.ravel(asks)}
            except (MalformedMessage, InputError):
                registry.refusals.append((client, "request", "malformed"))
    return wanted


def relay(
    registry: ClientRegistry, session: bytes, number: int, arrives: int, parts: tuple[str, ...], present: Sequence[int],
    wanted: Mapping[int, list[int]], record: Callable[..., None], *, requested: bool,
    witness: Callable[[int, int, tuple[str, ...]], Mapping[str, Array]] | None = None,
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
            asks[sender] = m.Seal(session, number, parts, arrives, tuple(registry.peers[client] for client in targets))
    boxes: dict[int, dict[int, bytes]] = {client: {} for client in recipients}
    for sender, answer in sorted(registry.ask(asks, "seal").items()):
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
        client: m.Take(session, arrives, parts, tuple(m.Boxed(registry.peers[sender], box) for sender, box in sorted(inbox.items())))
        for client, inbox in boxes.items()
        if client in registry.present
    }
    took = tuple(client for client, answer in sorted(registry.ask(takes, "take").items()) if isinstance(answer, m.Done))
    if not took:
        raise TooFewClients((), 1)
    return took
