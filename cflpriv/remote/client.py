"""One client: bytes in, bytes out.

`RemoteClient.receive` never raises: what it refuses is answered by an opaque word. It loads torch only to compute; protocol stages need
none. All state goes through a store, because the next message may find a new process.

Guarantee: what leaves the client leaves it through `give` and `step` alone, under the protection that its own settings name; a server that
asks for more is refused. Under a protected sum it hands out, one by one or for comparison in the clear, nothing with as many numbers as
the model it was given. Reveals: that it takes part, its public keys, and what its protection reveals.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from ..errors import InputError, TrainingDiverged
from ..protection import ClearGram, GramChannel, Protection, Transforms, check_hidden
from ..protocols import codec, group, secagg
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import LocalError, MalformedMessage, RemoteError, TooFewClients
from ..protocols.keys import Identity, Roster, agree, public_key, seal, sign, unseal, verify
from ..protocols.orthonormal import TRANSFORMS
from ..protocols.secagg import MaskKey, Policy
from ..types import Array, ClientData
from . import messages as m
from .foreign import Foreign
from .store import Store

__all__ = ["RemoteClient", "Settings", "model_hash", "relay_key"]

LABEL = "cflpriv remote v1 "
ENROL = LABEL + "enrol"
NO_MODEL = bytes(32)
PURPOSE = "transforms"
Own = Callable[[Foreign, Mapping[str, Any]], Mapping[str, Array]]
log = logging.getLogger("cflpriv.remote")


@dataclass(frozen=True)
class Settings:
    """What a client's operator decided: who it is, which peers are pinned (active mode), and the protection in force."""

    identity: Identity = field(repr=False)
    protection: Protection = field(default_factory=Protection)
    roster: Roster | None = None


class _Values(m.Message, frozen=True):
    """A held value or memory: arrays by name; relayed ones by name and sender."""

    arrays: tuple[m.Named, ...] = ()
    said: tuple[tuple[str, tuple[m.Said, ...]], ...] = ()


def model_hash(params: tuple[m.Parameter, ...]) -> bytes:
    """What a secure sum binds to: the SHA-256 of what a client was sent to compute with (not of what it holds itself)."""
    sent = tuple(one for one in params if not isinstance(one.value, m.Mine))
    return sha256(b"".join(m.encode(one) for one in sent)).digest() if sent else b""


def relay_key(own: bytes, other: bytes, session: bytes, held: int, source: int, target: int) -> bytes:
    """The key of a relayed value from `source` to `target`."""
    place = b"".join(number.to_bytes(8, "big") for number in (held, source, target))
    return agree(own, other, LABEL + "relay", session, place)


class RemoteClient:
    """A client of a federation elsewhere.

    `data` gives its data when a task needs them. `store` keeps its state between messages. `entropy` feeds masks and keys. `own` are the
    functions of an application that does the work of `Foreign` tasks by its own means.
    """

    def __init__(
        self, settings: Settings, data: Callable[[], ClientData], store: Store, entropy: Entropy = system_entropy,
        own: Mapping[str, Own] | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._data, self._store, self._entropy, self._own = settings, data, store, entropy, own or {}

    @property
    def number(self) -> int:
        """The client's number on the roster."""
        return self._settings.identity.client

    def receive(self, data: bytes) -> bytes:
        """The answer to a request; any bytes are answered."""
        try:
            answer = self._answer(m.decode_ask(data))
        except (RemoteError, TooFewClients) as error:
            answer = m.Refused(error.code)
        except LocalError as error:
            log.exception("client %d: protocol machine", self.number)
            answer = m.Refused(error.code)
        except (InputError, TrainingDiverged):
            log.exception("client %d: bad input", self.number)
            answer = m.Refused("bad-input")
        except Exception:
            log.exception("client %d: failed", self.number)
            answer = m.Refused("internal")
        return m.encode(answer)

    def _answer(self, ask: m.Ask) -> m.Answer:
        if isinstance(ask, m.Enrol):
            return self._enrol(ask)
        if self._store.get("session") != ask.session:
            raise RemoteError("wrong-session")
        match ask:
            case m.Compute():
                return self._compute(ask)
            case m.Give():
                return self._give(ask)
            case m.Step():
                return self._step(ask)
            case m.Seal():
                return self._seal(ask)
            case m.Take():
                return self._take(ask)
            case m.AddUp():
                return self._add_up(ask)
            case m.Fold():
                return self._fold(ask)
            case m.Group():
                return self._agree(ask)

    # --- who

    def _enrol(self, ask: m.Enrol) -> m.Enrolled:
        if ask.version != m.VERSION:
            raise RemoteError("version")
        identity, roster = self._settings.identity, self._settings.roster
        if roster is not None and not (identity.client < len(roster.keys) and roster.keys[identity.client] == identity.public()):
            raise RemoteError("not-on-roster")
        if self._store.get("session") != ask.session:  # a new federation: nothing of an old one may be used in it
            for name in self._store.names():
                self._store.drop(name)
            self._store.put("session", ask.session)
        key = public_key(identity.encryption_seed)
        signature = sign(identity, ENROL, ask.session, identity.client.to_bytes(8, "big"), key)
        return m.Enrolled(m.VERSION, identity.client, identity.public(), key, signature)

    def _check_peer(self, session: bytes, peer: m.Recipient) -> None:
        if self._settings.roster is not None:
            verify(self._settings.roster, peer.client, peer.signature, ENROL, session, peer.client.to_bytes(8, "big"), peer.encryption_key)

    # --- what is held

    def _hold(self, number: int, arrays: dict[str, Any], received: bytes, largest: int) -> None:
        """Keep values, what they were computed from, and the size of the model they were computed at."""
        self._keep(f"held/{number}", arrays)
        self._store.put(f"model/{number}", received.ljust(32, b"\0")[:32] + largest.to_bytes(8, "big") + bytes([bool(received)]))

    def _keep(self, name: str, arrays: dict[str, Any]) -> None:
        plain = tuple(m.Named(part, m.to_tensor(np.asarray(value))) for part, value in arrays.items() if not isinstance(value, dict))
        said = tuple(
            (part, tuple(m.Said(sender, m.to_tensor(np.asarray(one))) for sender, one in sorted(value.items())))
            for part, value in arrays.items()
            if isinstance(value, dict)
        )
        self._store.put(name, m.encode(_Values(plain, said)))

    def _kept(self, name: str) -> dict[str, Any]:
        data = self._store.get(name)
        if data is None:
            raise RemoteError("not-held")
        values = codec.decode(data, _Values, m.LIMIT_BYTES)
        arrays: dict[str, Any] = {one.name: m.from_tensor(one.value) for one in values.arrays}
        return arrays | {part: {one.sender: m.from_tensor(one.value) for one in said} for part, said in values.said}

    def _parts(self, number: int, parts: tuple[str, ...]) -> dict[str, Any]:
        kept = self._kept(f"held/{number}")
        if not parts or not set(parts) <= set(kept):
            raise RemoteError("not-held")
        return {part: kept[part] for part in parts}

    def _mine(self, mine: m.Mine) -> Any:
        return self._parts(mine.held, (mine.part,))[mine.part]

    def _model(self, number: int) -> tuple[bytes, int]:
        """What a held value was computed from (empty: nothing that was sent), and how many numbers that model has."""
        data = self._store.get(f"model/{number}")
        if data is None:
            raise RemoteError("not-held")
        return data[:32] if data[40] else b"", int.from_bytes(data[32:40], "big")

    def _forget(self, live: tuple[int, ...]) -> None:
        kept = {str(number) for number in live}
        for name in self._store.names():
            kind, _, number = name.partition("/")
            if kind in ("held", "model") and number not in kept:
                self._store.drop(name)

    # --- compute

    def _open(self, addends: m.Addends) -> Array:
        total: Array | None = m.from_tensor(addends.clear[0]) if addends.clear else None
        for term in m.blind_terms(addends):
            transform = self._transforms()(term.transform, term.dimension or len(term.value))
            vector = transform.invert(term.value)[term.start : term.stop].reshape(term.shape)
            total = vector if total is None else total + vector
        for own in addends.own:
            if self._store.get(f"held/{own.held}") is None:
                continue  # this client has no part in it
            addend = np.asarray(self._mine(m.Mine(own.held, own.part)))
            addend = addend if own.factor == 1.0 else (addend * own.factor).astype(addend.dtype, copy=False)
            total = addend if total is None else total + addend
        if total is None:
            raise RemoteError("not-held")
        return total

    def _compute(self, ask: m.Compute) -> m.Computed:
        try:
            task = m.task_from_bytes(ask.task)
        except MalformedMessage:
            raise RemoteError("unknown-task") from None
        given: dict[str, Any] = {}
        several = isinstance(ask.which, m.Picks) and ask.which.several
        chosen: list[int] | None = None
        if isinstance(ask.which, m.Picks):
            chosen = list(ask.which.labels)
        elif isinstance(ask.which, m.Mine):
            own = np.asarray(self._mine(ask.which))
            several, chosen = own.ndim > 0, [int(label) for label in np.ravel(own)]
        largest, received = 0, [model_hash(ask.params)]
        for parameter in ask.params:
            value = parameter.value
            if isinstance(value, m.Mine):
                given[parameter.name] = self._mine(value)
                received.append(self._model(value.held)[0])
                continue
            if isinstance(value, m.One):
                given[parameter.name] = self._open(value.value)
            else:
                sent = [self._open(one) for one in value.values]
                if isinstance(ask.which, m.Mine):
                    assert chosen is not None
                    if any(not 0 <= label < len(sent) for label in chosen):
                        raise RemoteError("bad-input")
                    sent = [sent[label] for label in chosen]
                given[parameter.name] = sent[0] if isinstance(ask.which, m.Mine) and not several else sent
            of = given[parameter.name]
            largest = max([largest, *(np.size(one) for one in (of if isinstance(of, list) else [of]))])
        choice = None if chosen is None else tuple(chosen) if several else chosen[0]
        if isinstance(task, Foreign):
            if task.name not in self._own:
                raise RemoteError("unknown-task")
            result = dict(self._own[task.name](task, given))
        else:
            result = self._run(ask, task, given, choice)
        self._forget((*ask.live, ask.held))
        if not result:
            return m.Computed(False, ())
        for name in task.keeps:
            self._keep(f"memory/{name}", {name: result[name]})
        parts = [part for part in received if part]
        traced = b"" if not parts else parts[0] if len(parts) == 1 else sha256(b"".join(parts)).digest()
        made = {part: result[part] if isinstance(result[part], dict) else np.asarray(result[part]) for part in task.parts}
        self._hold(ask.held, made, traced, largest)
        return m.Computed(
            True, tuple(m.Described(part, one.dtype.str, one.shape) for part, one in made.items() if not isinstance(one, dict))
        )

    def _run(self, ask: m.Compute, task: Any, given: dict[str, Any], choice: int | tuple[int, ...] | None) -> dict[str, Any]:
        from ..engine import Engine, Streams, TaskInput  # torch is loaded where something is computed

        memory = {}
        for name in getattr(task, "reads", ()):
            if self._store.get(f"memory/{name}") is not None:
                memory[name] = np.asarray(self._kept(f"memory/{name}")[name])
        streams = Streams(ask.seed, ask.round, self.number)
        (result,) = Engine().run(task, [TaskInput(self._data(), given, memory, streams, choice)])
        return result

    def _add_up(self, ask: m.AddUp) -> m.Computed:
        mine = tuple(own for own in ask.addends if self._store.get(f"held/{own.held}") is not None)
        if not mine:
            return m.Computed(False, ())
        total = self._open(m.Addends((), (), mine))
        self._hold(ask.held, {"own": total}, b"", max(self._model(own.held)[1] for own in mine))
        return m.Computed(True, (m.Described("own", total.dtype.str, total.shape),))

    # --- release

    def _give(self, ask: m.Give) -> m.Given:
        protection, values = self._settings.protection, self._parts(ask.held, ask.parts)
        if any(isinstance(value, dict) for value in values.values()):
            raise RemoteError("forbidden")
        kinds = [stage for stage in protection.gram if stage in TRANSFORMS]
        if ask.verb == "gram" and (kinds or "sketch" in protection.gram):
            return self._rows(ask, values, kinds)
        if ask.verb == "sum" and protection.sum in TRANSFORMS:
            return self._blind(ask, np.concatenate([np.ravel(np.asarray(value)) for value in values.values()]))
        wanted = {"gram": protection.gram in ((), ("none",)), "gather": protection.gather == "none", "sum": protection.sum == "none"}
        if not wanted[ask.verb] or (ask.verb == "sum" and protection.floor > 1):
            raise RemoteError("forbidden")
        if protection.sum != "none" or kinds:
            _, size = self._model(ask.held)
            if any(np.asarray(value).dtype.kind == "f" and 0 < size <= np.size(value) for value in values.values()):
                raise RemoteError("forbidden")
        named = tuple(m.Named(part, m.to_tensor(np.asarray(value))) for part, value in values.items())
        return m.Given(named, self._data().samples if ask.weigh else 0)

    # --- under a transform that the clients share

    def _agree(self, ask: m.Group) -> m.Stepped:
        """One step of the agreement on the clients' secret. More than half of the roster must be in it, so that none can be kept apart."""
        settings = self._settings
        if not settings.protection.transformed or settings.roster is None:
            raise RemoteError("forbidden")
        stored = self._store.get("group")
        if stored is not None:
            member = group.Member.from_bytes(stored, settings.identity, settings.roster, entropy=self._entropy)
        else:
            smallest = len(settings.roster.keys) // 2 + 1
            member = group.Member(settings.identity, settings.roster, ask.session, smallest=smallest, entropy=self._entropy)
        said = member.receive(ask.said)
        self._store.put("group", member.to_bytes())
        return m.Stepped(said or b"")

    def _transforms(self) -> Transforms:
        settings, stored = self._settings, self._store.get("group")
        if stored is None or settings.roster is None:
            raise RemoteError("no-secret")
        member = group.Member.from_bytes(stored, settings.identity, settings.roster, entropy=self._entropy)
        try:
            secret = member.derive(PURPOSE)
        except LocalError:
            raise RemoteError("no-secret") from None
        return Transforms(secret, settings.protection.sum if settings.protection.sum in TRANSFORMS else "haar")

    def _use(self, purpose: str, held: int) -> None:
        """A transform serves one thing: what it is used for a second time could be linked with the first."""
        name, mark = f"used/{purpose}", str(held).encode()
        before = self._store.get(name)
        if not purpose or (before is not None and before != mark):
            raise RemoteError("used-transform")
        self._store.put(name, mark)

    def _rows(self, ask: m.Give, values: Mapping[str, Any], kinds: list[str]) -> m.Given:
        """What is compared, sketched and under the epoch's transform."""
        from ..rotations import RotatedGram

        protection = self._settings.protection
        number = ask.transform.removeprefix("gram/")
        if len(values) != 1 or not number.isdigit():
            raise RemoteError("forbidden")
        sketch_dim = protection.sketch_dim if "sketch" in protection.gram else None
        rows = np.atleast_2d(np.asarray(next(iter(values.values()))))
        channel: GramChannel = ClearGram(sketch_dim)
        if kinds:
            self._use(f"gram/{number}", ask.held)
            channel = RotatedGram(self._transforms(), kinds[0], sketch_dim)
        upload = channel.open(int(number)).upload(self.number, rows)
        return m.Given(tuple(m.Named(part, m.to_tensor(np.asarray(value))) for part, value in upload.items()), 0)

    def _blind(self, ask: m.Give, vector: Array) -> m.Given:
        """An update under a transform: a fresh one for each sum unless these settings say "fixed". Counts are never given along."""
        if ask.weigh or not np.isfinite(vector).all():
            raise RemoteError("forbidden" if ask.weigh else "bad-input")
        if self._settings.protection.transform == "fixed":
            purpose = "sum/fixed"
        else:
            purpose = ask.transform
            self._use(purpose, ask.held)
        check_hidden("mean", len(vector), self._settings.protection.sum)
        blind = self._transforms()(purpose, len(vector)).apply(vector[None])[0]
        return m.Given((m.Named("blind", m.to_tensor(blind)),), 0)

    def _fold(self, ask: m.Fold) -> m.Given:
        """Blind parts, opened, added up, and sent back under a fresh transform. Clear and own parts take no part: they would be shown."""
        if self._settings.protection.sum not in TRANSFORMS or ask.value.clear or ask.value.own or not ask.transform.startswith("apply/"):
            raise RemoteError("forbidden")
        value = self._open(ask.value)
        self._use(ask.transform, 0)
        check_hidden("apply", value.size, self._settings.protection.sum)
        blind = self._transforms()(ask.transform, value.size).apply(np.ravel(value)[None])[0]
        return m.Given((m.Named("blind", m.to_tensor(blind)),), 0)

    def _step(self, ask: m.Step) -> m.Stepped:
        protection, settings = self._settings.protection, self._settings
        wanted = "secagg" if ask.kind == "sum" else "secagg-oblivious"
        if protection.sum != wanted:
            raise RemoteError("forbidden")
        name = f"sum/{ask.slot[0]}.{ask.slot[1]}"
        stored = self._store.get(name)
        if stored is not None:
            machine = secagg.Client.from_bytes(stored, settings.identity, roster=self._roster(), entropy=self._entropy)
        else:
            machine = self._machine(ask)
        contributions: list[secagg.Contribution] = []
        if machine.wants_values and secagg_delivers(ask.said):
            contributions = self._contributions(ask, machine)
        said = machine.receive(ask.said, *contributions)
        following = machine.next_mask_key()
        if following is not None:
            self._store.put(f"mask/{following.slot[0]}.{following.slot[1]}", following.to_bytes())
        if machine.stage is secagg.ClientStage.DONE:
            self._store.drop(name)
        else:
            self._store.put(name, machine.to_bytes())
        return m.Stepped(said)

    def _roster(self) -> Roster | None:
        return self._settings.roster if self._settings.protection.secagg_mode == "active" else None

    def _machine(self, ask: m.Step) -> secagg.Client:
        """A machine for a new sum; what was left of earlier ones is dropped."""
        protection = self._settings.protection
        last = self._store.get("last-slot")
        after = None if last is None else (int.from_bytes(last[:8], "big"), int.from_bytes(last[8:], "big"))
        if after is not None and ask.slot <= after:
            raise RemoteError("old-slot")
        model, _ = self._model(ask.held)
        models = ask.models if ask.models >= 1 else 1
        policy = Policy(
            self._store.get("session") or b"", protection.secagg_mode, model or NO_MODEL, models, protection.smallest_sum, after, None
        )
        name = f"mask/{ask.slot[0]}.{ask.slot[1]}"
        stored = self._store.get(name)
        key = None
        if stored is not None:
            self._store.drop(name)  # before it is used: it serves once
            key = MaskKey.from_bytes(stored)
        for other in self._store.names():
            if other.startswith("sum/"):
                self._store.drop(other)
            if other.startswith("mask/") and tuple(int(part) for part in other[5:].split(".")) < ask.slot:
                self._store.drop(other)
        self._store.put("last-slot", ask.slot[0].to_bytes(8, "big") + ask.slot[1].to_bytes(8, "big"))
        return secagg.Client(self._settings.identity, policy, roster=self._roster(), mask_key=key, entropy=self._entropy)

    def _contributions(self, ask: m.Step, machine: secagg.Client) -> list[secagg.Contribution]:
        terms = machine.terms
        assert terms is not None
        labels: tuple[int, ...] = (0,)
        if isinstance(ask.groups, m.Picks):
            labels = ask.groups.labels
        elif isinstance(ask.groups, m.Mine):
            labels = tuple(int(label) for label in np.ravel(np.asarray(self._mine(ask.groups))))
        if ask.kind == "counts":
            if any(not 0 <= label < terms.dimension for label in labels):
                raise RemoteError("bad-input")
            return [secagg.membership(terms.dimension, labels)]
        values = self._parts(ask.held, ask.parts)
        vector = np.concatenate([np.ravel(np.asarray(value)).astype(np.float64) for value in values.values()])
        if not np.isfinite(vector).all():
            raise RemoteError("bad-input")
        weight = ask.weight or float(self._data().samples)
        if ask.kind == "sum":
            return [secagg.Contribution(vector, weight)]
        return [secagg.Contribution(vector, weight, label) for label in labels]

    # --- relay

    def _seal(self, ask: m.Seal) -> m.Sealed:
        values = self._parts(ask.held, ask.parts)
        if any(isinstance(value, dict) for value in values.values()):
            raise RemoteError("forbidden")
        plain = m.encode(_Values(tuple(m.Named(part, m.to_tensor(np.asarray(value))) for part, value in values.items())))
        boxes = []
        for recipient in ask.recipients:
            self._check_peer(ask.session, recipient)
            key = relay_key(
                self._settings.identity.encryption_seed, recipient.encryption_key, ask.session, ask.arrives, self.number, recipient.client
            )
            boxes.append(seal(key, plain, LABEL.encode(), self._entropy))
        return m.Sealed(tuple(boxes))

    def _take(self, ask: m.Take) -> m.Done:
        arrived: dict[str, dict[int, Array]] = {part: {} for part in ask.parts}
        for boxed in ask.boxes:
            self._check_peer(ask.session, boxed.sender)
            sender = boxed.sender.client
            own = self._settings.identity.encryption_seed
            key = relay_key(own, boxed.sender.encryption_key, ask.session, ask.held, sender, self.number)
            sent = codec.decode(unseal(key, boxed.box, LABEL.encode()), _Values, m.LIMIT_BYTES)
            values = {one.name: m.from_tensor(one.value) for one in sent.arrays}
            if set(values) != set(ask.parts):
                raise RemoteError("malformed")
            for part, value in values.items():
                arrived[part][sender] = value
        self._hold(ask.held, dict(arrived), b"", 0)
        return m.Done()


def secagg_delivers(said: bytes) -> bool:
    """Whether these bytes of a secure sum are the message that values go with."""
    from ..protocols.secagg.messages import Deliver, decode_server

    try:
        return isinstance(decode_server(said), Deliver)
    except MalformedMessage:
        return False
