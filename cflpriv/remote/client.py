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
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..channels import TransformCache
from ..client_level import local_event, local_rows
from ..errors import InputError, TrainingDiverged
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import LocalError, RemoteError, TooFewClients
from ..protocols.keys import Identity, agree, public_key, seal, sign, unseal, verify, verify_key
from ..protocols.mechanisms import clip
from ..protocols.orthonormal import TRANSFORMS
from ..types import Array, ClientData, check_array
from . import messages as m
from . import releases
from .encrypting import encrypted
from .settings import Settings
from .spending import SPENT, Spending
from .store import Store
from .summing import Summing
from .transformed import Apply, Transformed
from .values import UNTRACED, Exchange, Origin, Values, from_bytes, to_bytes
from .work import Own, Run, Work, smallest

if TYPE_CHECKING:  # torch is loaded where something is computed
    from ..engine import TaskInput

__all__ = [
    "Handler", "RemoteClient", "Settings", "answered", "check_enrolled", "driven", "enrolled", "new_session", "next_wish", "refusal",
    "relay_key",
]  # fmt: skip

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


Handler = Generator[Run | Apply, Any, m.Answer]
"""What a client does for a request. It asks whoever drives it for what can be done for many clients at once, and is sent the result."""


def refusal(who: str, error: Exception) -> m.Refused:
    """The error code that a failure is answered with; its text stays in the log."""
    if isinstance(error, RemoteError | TooFewClients):
        return m.Refused(error.code)
    if isinstance(error, LocalError):
        log.error("%s: protocol machine", who, exc_info=error)
        return m.Refused(error.code)
    if isinstance(error, InputError | TrainingDiverged):
        log.error("%s: bad input", who, exc_info=error)
        return m.Refused("bad-input")
    log.error("%s: failed", who, exc_info=error)
    return m.Refused("internal")


def answered(who: str, answer: Callable[[m.Ask], m.Answer], data: bytes) -> bytes:
    """The bytes that answer a request, whatever its bytes."""
    try:
        return m.encode(answer(m.decode_ask(data)))
    except Exception as error:
        return m.encode(refusal(who, error))


def driven(handler: Handler) -> m.Answer:
    """The answer of one client, with its work done here, by itself."""
    wish = next_wish(handler, None)
    while not isinstance(wish, m.Message):
        try:
            if isinstance(wish, Run):
                from ..engine import Engine  # torch is loaded where something is computed

                done: Any = Engine().run(wish.task, [wish.given])[0]
            else:
                done = wish.transform.apply(wish.rows)
        except Exception as error:
            wish = next_wish(handler, error)
        else:
            wish = next_wish(handler, done)
    return wish


def next_wish(handler: Handler, done: Any) -> "Run | Apply | m.Answer":
    """Send a handler what it asked for, or throw the error that came of it; what it asks for next, or its answer."""
    try:
        return handler.throw(done) if isinstance(done, Exception) else handler.send(done)
    except StopIteration as end:
        answer: m.Answer = end.value
        return answer


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
    """One client of a federation, wherever the server is.

    `data` gives its data when a task needs them. `store` keeps its state between messages. `entropy` feeds masks, keys and privacy noise.
    `own` are the functions of an application that does the work of `Foreign` tasks by its own means. `cache` keeps transforms; clients of
    one process share it. With `strict = False` the client releases what its release policy would refuse: for simulated clients alone.
    """

    def __init__(
        self, settings: Settings, data: Callable[[], ClientData], store: Store, entropy: Entropy = system_entropy,
        own: Mapping[str, Own] | None = None, cache: TransformCache | None = None, strict: bool = True,
    ) -> None:  # fmt: skip
        self._settings, self._data, self._store, self._entropy, self._strict = settings, data, store, entropy, strict
        self.values = Values(store)
        self._spending = Spending(settings.privacy, self.number, store)
        self._hidden = Transformed(settings, store, entropy, cache or TransformCache())
        self._summing = Summing(settings, store, self.values, self._spending, entropy, self._allowed)
        self._work = Work(settings, self.values, self._spending, self._hidden.transforms, data, entropy, own or {})

    @property
    def number(self) -> int:
        """The client's number on the roster."""
        return self._settings.identity.client

    def receive(self, data: bytes) -> bytes:
        """The answer to a request; any bytes are answered. One request at a time works on a store."""
        return answered(f"client {self.number}", lambda ask: driven(self.handle(ask, Exchange())), data)

    def handle(self, ask: m.Ask, exchange: Exchange) -> Handler:
        """What the client does for a request: its own checks, its release policy, its ledger, then the work. Raises what it refuses by."""
        with self._store.alone():
            if not isinstance(ask, m.Enrol) and self._store.get("session") != ask.session:
                raise RemoteError("wrong-session")
            match ask:
                case m.Enrol():
                    return self._enrol(ask)
                case m.Compute():
                    return (yield from self._work.compute(ask, exchange))
                case m.Give():
                    return (yield from self._give(ask))
                case m.Step():
                    return self._summing.step(ask, lambda: self._data().samples)
                case m.Seal():
                    return self._seal(ask)
                case m.Take():
                    return self._take(ask)
                case m.AddUp():
                    return self._work.add_up(ask, exchange)
                case m.Fold():
                    return (yield from self._hidden.fold(ask, self.values, exchange))
                case m.Group():
                    return self._hidden.agree(ask)
                case _:  # asked of the key holder
                    raise RemoteError("forbidden")

    def opened(self, addends: m.Addends, exchange: Exchange) -> Array:
        """What the client sees of a sum. For measuring."""
        return self.values.open(addends, self._hidden.transforms, exchange)

    def given(self, ask: m.Compute, exchange: Exchange) -> "TaskInput":
        """What the client would give a task. For measuring."""
        return self._work.given(ask, exchange)

    def secrets(self) -> dict[str, str]:
        """The secrets of the client's transforms as hexadecimal digits, by group epoch. For audits of simulated runs."""
        return self._hidden.secrets()

    def _allowed(self, verb: releases.Verb, number: int, parts: tuple[str, ...]) -> dict[str, Any]:
        """Parts of a held value, if this verb may release them."""
        values = self.values.parts(number, parts)
        if self._strict:
            releases.check(self._settings.protection, verb, values, self.values.origin(number))
        return values

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

    def _give(self, ask: m.Give) -> Generator[Apply, Array, m.Given]:
        protection, values = self._settings.protection, self._allowed(ask.verb, ask.held, ask.parts)
        if any(isinstance(value, dict) for value in values.values()):
            raise RemoteError("forbidden")
        stages = ("sketch", "ckks", *TRANSFORMS)
        changed = {"gram": any(stage in stages for stage in protection.gram), "sum": protection.sum in TRANSFORMS}.get(ask.verb)
        in_the_clear = ask.verb != "sum" or (protection.sum == "none" and (protection.floor <= 1 or not self._strict))
        if not (changed or in_the_clear) or (ask.weigh and self._spending.unit != "none"):
            error = RemoteError("forbidden")
            if ask.verb == "sum" and protection.sum == "none":
                error.add_note(f"floor = {protection.floor} keeps updates from leaving in the clear: use sum = 'secagg', or no floor")
            raise error
        for part, value in values.items() if ask.verb != "gather" else ():
            if isinstance(value, np.ndarray):  # what is made on demand was checked by its task
                check_array(f"client {self.number}: {part}", value, kind="biuf")
        self._spending.settle(ask.held, ask.parts, ask.verb)
        noise = self._spending.bounded(ask.noise, ask.verb)
        if noise is not None:
            values = self._bounded(ask, values, noise)
        if changed and ask.verb == "gram" and "ckks" in protection.gram:
            return encrypted(self._settings, ask, values)
        if changed and ask.verb == "gram":
            return (yield from self._hidden.rows(ask, values))
        if changed:
            vector = np.concatenate([np.ravel(np.asarray(value)) for value in values.values()])
            return (yield from self._hidden.blind(ask, vector))
        named = tuple(m.Named(part, value) for part, value in values.items())
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
        values = self._allowed("relay", ask.held, ask.parts)
        if any(isinstance(value, dict) for value in values.values()) or self._spending.unit == "client":
            raise RemoteError("forbidden")
        origin = self.values.origin(ask.held)
        self._spending.settle(ask.held, ask.parts, "relay")
        plain = to_bytes(values, Origin(compared=any(origin.is_compared(part) for part in ask.parts)))
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
        self.values.drop(ask.held)
        self._spending.public(ask.held, ask.parts)
        self.values.hold(ask.held, dict(arrived), Origin(UNTRACED, smallest(size for size in sizes if size > 1), compared))
        return m.Done()

    def _opened(self, ask: m.Take, boxed: m.Boxed) -> tuple[dict[str, Array], bool]:
        """What is in a box, in the order of the parts asked for: finite arrays under their names; and whether clients compare them.

        Raises `RemoteError`.
        """
        self._check_peer(ask.session, boxed.sender)
        own, sender = self._settings.identity.encryption_seed, boxed.sender
        key = relay_key(own, sender.encryption_key, ask.session, ask.held, sender.client, self.number)
        values, origin = from_bytes(unseal(key, boxed.box, LABEL.encode()))
        if set(values) != set(ask.parts) or not all(isinstance(one, np.ndarray) and np.isfinite(one).all() for one in values.values()):
            raise RemoteError("malformed")
        return {part: values[part] for part in ask.parts}, origin.compared
