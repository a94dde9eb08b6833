"""One client: bytes in, bytes out.

`RemoteClient.receive` never raises: what it refuses is answered by an opaque word. It loads torch only to compute; protocol stages need
none. All state goes through a store, because the next message may find a new process.

Guarantee: what leaves the client leaves it through `give`, `seal` and secure sums alone, under the protection that its own settings name; a
server that asks for more is refused: `releases` says what leaves by which verb. Under `privacy` of its own everything that leaves was paid
for in its own ledger (`spending`).
Reveals: that it takes part, its public keys, and what its protection reveals.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from ..client_level import local_event, local_rows
from ..errors import InputError, TrainingDiverged
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import LocalError, RemoteError, TooFewClients
from ..protocols.keys import Identity, agree, public_key, seal, sign, unseal, verify, verify_key
from ..protocols.mechanisms import clip
from ..protocols.orthonormal import TRANSFORMS
from ..types import Array, ClientData
from . import messages as m
from . import releases
from .encrypting import encrypted
from .settings import Settings
from .spending import SPENT, Spending
from .store import Store
from .summing import Summing
from .transformed import Transformed
from .values import UNTRACED, Origin, Values, relayed, to_bytes
from .work import Own, Work, smallest

__all__ = ["RemoteClient", "Settings", "answered", "check_enrolled", "enrolled", "new_session", "relay_key"]

LABEL = "cflpriv remote v1 "
ENROL = LABEL + "enrol"
ENROL_HOLDER = LABEL + "enrol key holder"
PROOF = ", to the server now"
LEFT = "left"
"""The store's name for the sessions that are over for this client, 16 bytes each."""
log = logging.getLogger("cflpriv.remote")


def relay_key(own: bytes, other: bytes, session: bytes, held: int, source: int, target: int) -> bytes:
    """The key of a relayed value from `source` to `target`, from long-term keys: a stolen one opens what was recorded before."""
    place = b"".join(number.to_bytes(8, "big") for number in (held, source, target))
    return agree(own, other, LABEL + "relay", session, place)


def answered(who: str, answer: Callable[[m.Ask], m.Answer], data: bytes) -> bytes:
    """The bytes that answer a request, whatever its bytes; what goes wrong becomes a word, and its text stays in the log."""
    try:
        said = answer(m.decode_ask(data))
    except (RemoteError, TooFewClients) as error:
        said = m.Refused(error.code)
    except LocalError as error:
        log.exception("%s: protocol machine", who)
        said = m.Refused(error.code)
    except (InputError, TrainingDiverged):
        log.exception("%s: bad input", who)
        said = m.Refused("bad-input")
    except Exception:
        log.exception("%s: failed", who)
        said = m.Refused("internal")
    return m.encode(said)


def new_session(store: Store, session: bytes) -> None:
    """In a new federation nothing of an old one may be used, but what was spent.

    Raises `RemoteError` "wrong-session" for one that was left: what it used up, such as transforms, is known no more.
    """
    current, left = store.get("session"), store.get(LEFT) or b""
    if current == session:
        return
    if session in (left[at : at + len(session)] for at in range(0, len(left), len(session))):
        raise RemoteError("wrong-session")
    if current is not None:
        store.put(LEFT, left + current)
        store.drop("session")  # before the rest: whoever is stopped here has left it as well
    for name in store.names():
        if name not in (SPENT, LEFT):
            store.drop(name)
    store.put("session", session)


def enrolled(identity: Identity, ask: m.Enrol, role: Literal["client", "key-holder"]) -> m.Enrolled:
    """Who a client or the key holder is, with both signatures."""
    number, label = (identity.client, ENROL) if role == "client" else (0, ENROL_HOLDER)
    key = public_key(identity.encryption_seed)
    said = (ask.session, number.to_bytes(8, "big"), key)
    proof = sign(identity, label + PROOF, *said, ask.challenge)
    return m.Enrolled(m.VERSION, number, identity.public(), key, sign(identity, label, *said), proof, role)


def check_enrolled(answer: m.Enrolled, session: bytes, challenge: bytes) -> None:
    """Raises `RemoteError` unless both signatures are by the key that the answer names."""
    label, said = ENROL if answer.role == "client" else ENROL_HOLDER, (session, answer.client.to_bytes(8, "big"), answer.encryption_key)
    verify_key(answer.signing_key, answer.client, answer.signature, label, *said)
    verify_key(answer.signing_key, answer.client, answer.proof, label + PROOF, *said, challenge)


class RemoteClient:
    """A client of a federation elsewhere.

    `data` gives its data when a task needs them. `store` keeps its state between messages. `entropy` feeds masks, keys and privacy noise.
    `own` are the functions of an application that does the work of `Foreign` tasks by its own means.
    """

    def __init__(
        self, settings: Settings, data: Callable[[], ClientData], store: Store, entropy: Entropy = system_entropy,
        own: Mapping[str, Own] | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._data, self._store, self._entropy = settings, data, store, entropy
        self._values = Values(store)
        self._spending = Spending(settings.privacy, self.number, store)
        self._hidden = Transformed(settings, store, entropy)
        self._summing = Summing(settings, store, self._values, self._spending, entropy)
        self._work = Work(
            self.number, self._values, self._spending, self._hidden.transforms, data, entropy, own or {},
            settings.protection.small_clusters == "local",
        )  # fmt: skip

    @property
    def number(self) -> int:
        """The client's number on the roster."""
        return self._settings.identity.client

    def receive(self, data: bytes) -> bytes:
        """The answer to a request; any bytes are answered. One request at a time works on a store."""
        with self._store.alone():
            return answered(f"client {self.number}", self._answer, data)

    def _answer(self, ask: m.Ask) -> m.Answer:
        if isinstance(ask, m.Enrol):
            return self._enrol(ask)
        if self._store.get("session") != ask.session:
            raise RemoteError("wrong-session")
        match ask:
            case m.Compute():
                return self._work.compute(ask)
            case m.Give():
                return self._give(ask)
            case m.Step():
                return self._summing.step(ask, lambda: self._data().samples)
            case m.Seal():
                return self._seal(ask)
            case m.Take():
                return self._take(ask)
            case m.AddUp():
                return self._work.add_up(ask)
            case m.Fold():
                return self._hidden.fold(ask, self._values)
            case m.Group():
                return self._hidden.agree(ask)
            case _:  # asked of the key holder
                raise RemoteError("forbidden")

    # --- who

    def _enrol(self, ask: m.Enrol) -> m.Enrolled:
        if ask.version != m.VERSION:
            raise RemoteError("version")
        identity, roster = self._settings.identity, self._settings.roster
        if roster is not None and not (identity.client < len(roster.keys) and roster.keys[identity.client] == identity.public()):
            raise RemoteError("not-on-roster")
        new_session(self._store, ask.session)
        return enrolled(identity, ask, "client")

    def _check_peer(self, session: bytes, peer: m.Recipient) -> None:
        if self._settings.roster is not None:
            verify(self._settings.roster, peer.client, peer.signature, ENROL, session, peer.client.to_bytes(8, "big"), peer.encryption_key)

    # --- release

    def _give(self, ask: m.Give) -> m.Given:
        protection, values = self._settings.protection, self._values.parts(ask.held, ask.parts)
        if any(isinstance(value, dict) for value in values.values()):
            raise RemoteError("forbidden")
        releases.check(protection, ask.verb, values, self._values.origin(ask.held))
        stages = ("sketch", "ckks", *TRANSFORMS)
        changed = {"gram": any(stage in stages for stage in protection.gram), "sum": protection.sum in TRANSFORMS}.get(ask.verb)
        in_the_clear = ask.verb != "sum" or (protection.sum == "none" and protection.floor <= 1)
        if not (changed or in_the_clear) or (ask.weigh and self._spending.unit != "none"):
            raise RemoteError("forbidden")
        self._spending.settle(ask.held, ask.parts, ask.verb)
        noise = self._spending.bounded(ask.noise, ask.verb)
        if noise is not None:
            values = self._bounded(ask, values, noise)
        if changed and ask.verb == "gram" and "ckks" in protection.gram:
            return encrypted(self._settings, ask, values)
        if changed and ask.verb == "gram":
            return self._hidden.rows(ask, values)
        if changed:
            return self._hidden.blind(ask, np.concatenate([np.ravel(np.asarray(value)) for value in values.values()]))
        named = tuple(m.Named(part, m.to_tensor(np.asarray(value))) for part, value in values.items())
        return m.Given(named, self._data().samples if ask.weigh else 0)

    def _bounded(self, ask: m.Give, values: Mapping[str, Any], noise: m.Bounded) -> dict[str, Array]:
        """A whole client's values, clipped together; single rows with noise of the client's own."""
        if ask.verb == "gram":
            event = local_event(noise.noise_multiplier, noise.relation)
            return {part: local_rows(np.atleast_2d(value).astype(np.float64), event, self._entropy) for part, value in values.items()}
        vector = np.concatenate([np.ravel(np.asarray(value)).astype(np.float64) for value in values.values()])
        if not np.isfinite(vector).all():
            raise RemoteError("bad-input")
        clipped, cut, start = clip(vector, noise.clip_norm), {}, 0
        for part, value in values.items():
            stop = start + int(np.size(value))
            cut[part] = clipped[start:stop].reshape(np.shape(value)).astype(np.asarray(value).dtype)
            start = stop
        return cut

    # --- relay

    def _seal(self, ask: m.Seal) -> m.Sealed:
        values = self._values.parts(ask.held, ask.parts)
        if any(isinstance(value, dict) for value in values.values()) or self._spending.unit == "client":
            raise RemoteError("forbidden")
        origin = self._values.origin(ask.held)
        releases.check(self._settings.protection, "relay", values, origin)
        self._spending.settle(ask.held, ask.parts, "relay")
        plain = to_bytes(values, any(origin.is_compared(part) for part in ask.parts))
        boxes = []
        for recipient in ask.recipients:
            self._check_peer(ask.session, recipient)
            key = relay_key(
                self._settings.identity.encryption_seed, recipient.encryption_key, ask.session, ask.arrives, self.number, recipient.client
            )
            boxes.append(seal(key, plain, LABEL.encode(), self._entropy))
        return m.Sealed(tuple(boxes))

    def _take(self, ask: m.Take) -> m.Done:
        """Keep what others sealed. A box that cannot be opened, or holds something else than most do, costs its sender and nobody else."""
        opened: dict[int, dict[str, Array]] = {}
        compared = False
        for boxed in ask.boxes:
            try:
                opened[boxed.sender.client], said = self._opened(ask, boxed)
                compared |= said
            except RemoteError as error:
                log.warning("client %d: what client %d sealed for it is left out (%s)", self.number, boxed.sender.client, error.code)
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
        self._check_peer(ask.session, boxed.sender)
        own, sender = self._settings.identity.encryption_seed, boxed.sender
        key = relay_key(own, sender.encryption_key, ask.session, ask.held, sender.client, self.number)
        values, compared = relayed(unseal(key, boxed.box, LABEL.encode()))
        if set(values) != set(ask.parts) or not all(isinstance(one, np.ndarray) and np.isfinite(one).all() for one in values.values()):
            raise RemoteError("malformed")
        return {part: values[part] for part in ask.parts}, compared
