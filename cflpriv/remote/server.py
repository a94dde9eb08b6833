"""The federation over messages: the verbs for server code, when the clients are elsewhere.

`RemoteFederation` fulfils the same contract as `LocalFederation`, over any transport. Who does not answer in time takes no part: values
computed by some are held by those, sums are over who came through, and a clustering that lost a client raises `ClientsLost`, after which
the same step can simply be taken again (algorithms are functions of their state). The transcript is written as in a federation in one
process, so reports and attacks read both.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Literal

import numpy as np

from ..engine import Task
from ..epochs import Epochs
from ..errors import InputError, TrainingDiverged
from ..federation import GramView, Parameter, Sampling, Then
from ..handles import Blind, GroupMean, Held, HeldKey, Labels, Own, Released, Shared, label_sets
from ..participation import check_mean, draw_cohort, group_sizes
from ..protection import ClearGram, Contribution, Protection, SumCall
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import MalformedMessage, ProtocolError, TooFewClients
from ..protocols.keys import Roster
from ..protocols.orthonormal import TRANSFORMS
from ..randomness import Stream, stream
from ..record import Transcript
from ..types import Array, check_array
from ..wire import check_small
from . import messages as m
from .agreement import Agreement
from .client import NO_MODEL, model_hash
from .means import Asked, Means
from .roll import Roll, Transport
from .sums import Layout, SecureSums

__all__ = ["ClientsLost", "RemoteFederation", "Transport"]


SKIPPED = 1 << 10


class ClientsLost(ProtocolError):
    """Clients vanished while they were being compared; take the step again without them."""

    code = "clients-lost"

    def __init__(self, clients: Iterable[int]) -> None:
        self.clients = tuple(clients)
        super().__init__(f"clients {list(self.clients)} did not answer while they were being compared")


@dataclass(frozen=True)
class _Known:
    """What the server knows of values that clients hold: their number, their layout, and what each was computed from."""

    number: int
    layout: Layout
    models: Mapping[int, bytes]


class RemoteFederation:
    """The verbs over a transport.

    `roster` pins the clients' signing keys (needed by secure sums in active mode; otherwise who enrols first as a number is that number).
    `seed` feeds public randomness: batches and cohorts are those of a local federation of the same seed. Protections that clients apply
    must be in their own settings too; a client whose settings differ refuses.

    Raises `InputError` for protections that are not carried here.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        protection: Protection | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        roster: Roster | None = None,
        transcript: Transcript | None = None,
        entropy: Entropy = system_entropy,
        session: bytes | None = None,
        expect: Iterable[int] | None = None,
    ) -> None:
        self.protection = protection or Protection()
        self.sampling = sampling or Sampling()
        self.seed = seed
        self.transcript = transcript or Transcript()
        uncarried = [stage for stage in self.protection.gram if stage not in (*TRANSFORMS, "sketch", "none")]
        if uncarried or self.protection.sum not in ("none", "secagg", "secagg-oblivious", *TRANSFORMS):
            raise InputError(
                f"protection: gram = {list(self.protection.gram)}, sum = {self.protection.sum!r} is not carried to clients elsewhere yet"
            )
        active = self.protection.secure and self.protection.secagg_mode == "active"
        if active and roster is None:
            raise InputError("protection.secagg_mode: 'active' needs the clients' pinned roster; give it, or use 'passive'")
        if self.protection.transformed and roster is None:
            raise InputError("protection: a transform that clients share needs their pinned roster, by which they agree on its secret")
        self.session = session or entropy(16)
        self._sums = SecureSums(
            self.protection.secure_sum, self.protection.smallest_sum, self.session, roster if active else None, entropy
        )  # fmt: skip
        self._roll = Roll(transport, self.session, roster, expect)
        self._ask = self._roll.ask
        self._means = Means(self._roll, self.session, self.protection, self._sums)
        self._agreement = None
        if self.protection.transformed and roster is not None:
            self._agreement = Agreement(self._roll, self.session, roster)
        self._round = self._turn = -1
        self._calls = self._numbers = 0
        self.epochs = Epochs(ClearGram())
        self._known: weakref.WeakKeyDictionary[HeldKey, _Known] = weakref.WeakKeyDictionary()

    # --- who and when

    @property
    def clients(self) -> tuple[int, ...]:
        here = self._roll.present if self._agreement is None else self._roll.present & self._agreement.members
        return tuple(sorted(here))

    @property
    def refusals(self) -> list[tuple[int, str, str]]:
        """(client, stage, word) of every refusal, for the operator; the words are explained in `messages.REFUSALS`."""
        return self._roll.refusals

    @property
    def round(self) -> int:
        return self._round

    @property
    def merge_below(self) -> int:
        return self.protection.smallest_sum if self.protection.small_clusters == "merge" else 1

    def begin_round(self, number: int) -> tuple[int, ...]:
        """Called before each round; who is at a place not seen before, or did not answer lately, is enrolled (again). Who came."""
        self._round, self._calls = number, 0
        self._turn += 1
        return self.enrol()

    def saved(self) -> dict[str, Any]:
        """Where the server stands, for a checkpoint: no client's value, and no secret but the session's name."""
        counters = {"round": self._round, "turn": self._turn, "numbers": self._numbers, "epochs": self.epochs.count}
        return {"session": self.session, **counters, "agreement": None if self._agreement is None else self._agreement.saved()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from there in a new process. Turns, numbers and epochs skip a range: an interrupted round may have used up some."""
        if saved["session"] != self.session:
            raise InputError("session: is not that of the checkpoint; give it when the federation is built")
        self._round, self._turn = saved["round"], saved["turn"] + SKIPPED
        self._numbers, self.epochs.count = saved["numbers"] + SKIPPED, saved["epochs"] + SKIPPED
        if self._agreement is not None and saved["agreement"] is not None:
            self._agreement.restore(saved["agreement"])

    def known(self, key: HeldKey) -> dict[str, Any]:
        """What the server knows of what is held under a key, as plain values."""
        one = self._known[key]
        layout = [[part.name, part.dtype, list(part.shape)] for part in one.layout]
        return {"number": one.number, "layout": layout, "models": [[client, model.hex()] for client, model in sorted(one.models.items())]}

    def know(self, key: HeldKey, plain: Mapping[str, Any]) -> None:
        """Take up what `known` gave."""
        layout = tuple(m.Described(name, dtype, tuple(shape)) for name, dtype, shape in plain["layout"])
        self._known[key] = _Known(plain["number"], layout, {client: bytes.fromhex(model) for client, model in plain["models"]})

    def enrol(self) -> tuple[int, ...]:
        """Say hello to all places without a client that answers; the clients that came or came back."""
        came = self._roll.enrol()
        if self._agreement is not None:
            self._agreement.extend(self._record("group"))
        return came

    def stream(self, purpose: str, client: int = -1) -> Stream:
        return stream(self.seed, purpose, self._round, client)

    def cohort(self, labels: Labels | Held | None = None) -> tuple[int, ...]:
        known = None if isinstance(labels, Held) else labels
        return draw_cohort(self.sampling, self.clients, known, self.protection.smallest_sum, self.seed, self._round)

    def _record(self, verb: str) -> Callable[..., None]:
        return partial(self.transcript.add, self._round, verb)

    # --- compute

    def compute(
        self, task: Task, params: Mapping[str, Parameter] | None = None, which: Labels | Held | None = None, on: Sequence[int] | None = None
    ) -> Held:
        clients, params = self._on(on), params or {}
        if isinstance(which, Held):
            clients = [client for client in clients if client in which.clients]
        lists = {name: list(one) for name, one in params.items() if isinstance(one, list | tuple)}
        sizes = {len(one) for one in lists.values()}
        if which is not None and len(sizes) != 1:
            raise InputError(f"compute: `which` needs lists of one length to pick from, got lengths {sorted(sizes)}")
        labels: dict[int, tuple[int, ...]] = {}
        several = False
        if which is not None and not isinstance(which, Held):
            labels, several = label_sets(which, clients, next(iter(sizes)), "compute: which")
        for value in params.values():
            if isinstance(value, Held):
                missing = [client for client in clients if client not in value.clients]
                if missing:
                    raise InputError(f"clients {missing} do not hold {value.key.name}")
        key, number = HeldKey(type(task).__name__), self._number()
        # the numbers of all handles that are alive, among them those that own parts of sums refer to
        live = tuple(sorted(known.number for known in self._known.values()))
        said = m.task_to_bytes(task)
        alike: dict[tuple[int, ...], list[int]] = {}
        for client in clients:
            alike.setdefault(labels.get(client, ()), []).append(client)
        asks: dict[int, m.Ask] = {}
        traced: dict[int, bytes] = {}
        for chosen, members in sorted(alike.items()):
            sent = self._parameters(params, lists, chosen if labels else None, several)
            picks: m.Picks | m.Mine | None = m.Picks(chosen, several) if labels else None
            if isinstance(which, Held):
                picks = m.Mine(self._known[which.key].number, which.part)
            ask = m.Compute(self.session, self._round, self.seed, number, live, said, sent, picks)
            asks |= dict.fromkeys(members, ask)
            received = model_hash(sent)
            for client in members:
                traced[client] = self._traced(received, params, client)
            self._record_parameters(task, params, lists, chosen, members)
        answers = self._ask(asks, "compute")
        layouts = {client: answer.parts for client, answer in answers.items() if isinstance(answer, m.Computed) and answer.result}
        if not layouts:
            raise TrainingDiverged(f"{type(task).__name__} in round {self._round}: no client has a result")
        shapes = set(layouts.values())
        layout = next(iter(layouts.values())) if len(shapes) == 1 else ()
        self._known[key] = _Known(number, layout, traced)
        return Held(key, tuple(sorted(layouts)), tuple(task.parts))

    def _parameters(
        self, params: Mapping[str, Parameter], lists: Mapping[str, list[Any]], chosen: tuple[int, ...] | None, several: bool
    ) -> tuple[m.Parameter, ...]:
        numbers = {key: known.number for key, known in self._known.items()}
        sent = []
        for name, value in params.items():
            one: m.One | m.Many | m.Mine
            if isinstance(value, Held):
                one = m.Mine(self._known[value.key].number, value.part)
            elif name not in lists:
                one = m.One(m.to_one(value, numbers))  # type: ignore[arg-type]
            elif chosen is None:
                one = m.Many(tuple(m.to_one(item, numbers) for item in lists[name]))
            elif several:
                one = m.Many(tuple(m.to_one(lists[name][label], numbers) for label in chosen))
            else:
                one = m.One(m.to_one(lists[name][chosen[0]], numbers))
            sent.append(m.Parameter(name, one))
        return tuple(sent)

    def _traced(self, received: bytes, params: Mapping[str, Parameter], client: int) -> bytes:
        earlier = [self._known[value.key].models.get(client, b"") for value in params.values() if isinstance(value, Held)]
        return _trace([received, *earlier])

    def _record_parameters(
        self, task: Task, params: Mapping[str, Parameter], lists: Mapping[str, list[Any]], chosen: tuple[int, ...], members: list[int]
    ) -> None:
        payload: dict[str, Array] = {}
        for name, value in params.items():
            if isinstance(value, Held):
                continue
            items = [(name, value)] if name not in lists else [(f"{name}/{i}", lists[name][i]) for i in chosen or range(len(lists[name]))]
            for path, one in items:
                shared = one if isinstance(one, Shared) else Shared(np.asarray(one))
                payload |= {} if shared.clear is None else {path: shared.clear}
        if payload:
            context = {"task": type(task).__name__, "which": list(chosen)}
            self._record("compute")("parameters", "server", "clients", members, payload, readers=("server", "clients"), context=context)

    # --- gram

    def gram(self, held: Held, then: Then, against: Held | None = None, on: Sequence[int] | None = None) -> Released:
        clients = [] if against is not None and on is not None and not on else self._holders(held, on)
        epoch = None if against is None else self.epochs.of(against)
        again = sorted(set(clients) & set(epoch.clients)) if epoch is not None else []
        if again:
            raise InputError(f"gram: clients {again} are already in this epoch")
        number = self._known[held.key].number if clients else 0
        changed = any(stage in ("sketch", *TRANSFORMS) for stage in self.protection.gram)
        purpose = f"gram/{self.epochs.count if epoch is None else epoch.number}" if changed else ""
        give = m.Give(self.session, "gram", number, (held.part,), purpose, False)
        part = "rows" if changed else held.part
        uploads: dict[int, Array] = {}
        for client, answer in (self._ask(dict.fromkeys(clients, give), "gram") if clients else {}).items():
            if isinstance(answer, m.Given) and [one.name for one in answer.values] == [part]:
                try:
                    value = m.from_tensor(answer.values[0].value)
                    uploads[client] = np.atleast_2d(check_array(f"client {client}: {held.part}", value))
                except (MalformedMessage, InputError):
                    self.refusals.append((client, "gram", "malformed"))
        shapes = {(int(rows.shape[0]), int(rows.shape[1])) for rows in uploads.values() if rows.ndim == 2}
        if epoch is not None:
            shapes.add(epoch.shape)
        if set(uploads) != set(clients):
            raise ClientsLost(sorted(set(clients) - set(uploads)))
        if len(shapes) != 1:
            raise InputError(f"gram: {held.part} has different shapes {sorted(shapes)}; pad to one public shape")
        (shape,) = shapes
        if epoch is None:
            epoch = self.epochs.open(shape)
        record = self._record("gram")
        rows = [{"rows": uploads[client]} for client in clients]
        if clients:
            record(held.part, "clients", "server", clients, rows, readers=("server",), context={"epoch": epoch.number})
        gram = epoch.session.extend(clients, rows, shape[0], record)
        epoch.clients += clients
        if clients:
            self.epochs.enter(held, epoch)
        result, evidence = then(GramView(gram, tuple(clients), epoch.memory))
        check_small(result, gram.n)
        return Released(result, evidence)

    def close(self, held: Held) -> None:
        self.epochs.close(held)

    # --- mean

    def mean(
        self,
        held: Held,
        weights: Literal["equal", "examples"] | Mapping[int, float] = "equal",
        groups: Labels | Held | None = None,
        k: int | None = None,
        on: Sequence[int] | None = None,
        models: int = 1,
    ) -> tuple[GroupMean | None, ...]:
        clients = self._holders(held, on)
        oblivious = self.protection.sum == "secagg-oblivious"
        hidden = self.protection.max_weight > 0 if self.protection.secure else self.protection.sum not in TRANSFORMS
        check_mean(self.protection.sum, oblivious, hidden, weights, groups, k)
        known = self._known[held.key]
        if not known.layout:
            raise InputError(f"mean: clients hold {held.key.name} in different shapes")
        layout = tuple(part for name in held.parts for part in known.layout if part.name == name)
        weight = {client: _weight(weights, client) for client in clients}
        labels = self._group_labels(None if oblivious else groups, clients, k)
        clients = [client for client in clients if client in labels]
        if self.protection.secure and any(len(several) > 1 for several in labels.values()):
            raise InputError("mean: overlapping groups under secure aggregation: the difference of two sums would show an individual")
        self._calls += 1
        contributions = tuple(Contribution(client, {}, weight[client] or 1.0, labels[client]) for client in clients)
        call = SumCall(
            self._turn, self._calls, contributions, k or 1, self.protection.smallest_sum, weights != "examples",
            {client: known.models.get(client) or NO_MODEL for client in clients}, models, {},
        )  # fmt: skip
        asked, record = Asked(known.number, held.parts, layout, weight), self._record("mean")
        if oblivious:
            choice = m.Mine(self._known[groups.key].number, groups.part) if isinstance(groups, Held) else m.Picks((0,), False)
            return self._means.oblivious(call, asked, choice, record)
        if self.protection.small_clusters == "local":
            return self._mean_or_local(held, call, asked, groups)
        return self._means.of_groups(call, asked, record)

    def _group_labels(self, groups: Labels | Held | None, clients: Sequence[int], k: int | None) -> dict[int, tuple[int, ...]]:
        if groups is None:
            return dict.fromkeys(clients, (0,))
        if isinstance(groups, Held):
            chosen = {client: values[groups.part] for client, values in self.gather(groups, on=clients).items()}
            clients = list(chosen)
            groups = {client: value if np.ndim(value) else int(value) for client, value in chosen.items()}
        return label_sets(groups, clients, k, "mean: groups")[0]

    def _mean_or_local(self, held: Held, call: SumCall, asked: Asked, groups: Labels | Held | None) -> tuple[GroupMean | None, ...]:
        counts = call.counts()
        means: list[GroupMean | None] = [None] * call.k
        if any(count >= call.floor for count in counts):
            means = list(self._means.of_groups(call, asked, self._record("mean")))
        sizes = group_sizes(groups, call, self.clients)
        for label, count in enumerate(counts):
            if count > 0 and sizes[label] < call.floor:
                own = Held(held.key, tuple(one.client for one in call.members(label)), held.parts)
                means[label] = GroupMean({part: Shared(own=(Own(own[part]),)) for part in held.parts}, None, count)
        return tuple(means)

    # --- relay, gather

    def relay(self, held: Held, to: Mapping[int, Sequence[int]] | Held | None = None) -> Held:
        recipients = [client for client in self.clients if to is None or client in (to.clients if isinstance(to, Held) else to)]
        present = self._holders(held, None)
        asked: dict[int, set[int]] = {client: set(present) - {client} for client in recipients}
        if isinstance(to, Held):  # the server learns who asks whom: it must carry the answers
            ask = m.Give(self.session, "gather", self._known[to.key].number, to.parts, "", False)
            told = self._ask(dict.fromkeys(recipients, ask), "request")
            asked = {
                client: {int(sender) for sender in np.ravel(m.from_tensor(answer.values[0].value))}
                for client, answer in told.items()
                if isinstance(answer, m.Given) and len(answer.values) == 1
            }
        elif to is not None:
            asked = {client: set(to[client]) for client in recipients}
        wanted = {client: sorted(senders & set(present)) for client, senders in asked.items()}
        recipients = list(wanted)
        known, arrives = self._known[held.key], self._number()
        asks: dict[int, m.Ask] = {}
        peers = {sender: [client for client in recipients if sender in wanted[client]] for sender in present}
        for sender, targets in peers.items():
            if targets:
                asks[sender] = m.Seal(
                    self.session, known.number, held.parts, arrives, tuple(self._roll.peers[client] for client in targets)
                )
        boxes: dict[int, dict[int, bytes]] = {client: {} for client in recipients}
        for sender, answer in sorted(self._ask(asks, "seal").items()):
            if isinstance(answer, m.Sealed) and len(answer.boxes) == len(peers[sender]):
                for client, box in zip(peers[sender], answer.boxes, strict=True):
                    boxes[client][sender] = box
        record = self._record("relay")
        if to is not None:
            record(
                "request", "clients", "server", recipients, [{"wanted": np.isin(present, wanted[client])} for client in recipients],
                readers=("server",),
            )  # fmt: skip
        senders = [sender for sender in present if any(sender in inbox for inbox in boxes.values())]
        sealed = [{"box": np.frombuffer(next(boxes[client][sender] for client in peers[sender]), dtype=np.uint8)} for sender in senders]
        record("+".join(held.parts), "clients", "clients", senders, sealed, readers=("clients",), peers=[peers[one] for one in senders])
        takes: dict[int, m.Ask] = {
            client: m.Take(
                self.session, arrives, held.parts, tuple(m.Boxed(self._roll.peers[sender], box) for sender, box in sorted(inbox.items()))
            )
            for client, inbox in boxes.items()
            if client in self._roll.present
        }
        took = tuple(client for client, answer in sorted(self._ask(takes, "take").items()) if isinstance(answer, m.Done))
        if not took:
            raise InputError("relay: nobody took what was sent")
        key = HeldKey(f"relayed {held.key.name}")
        self._known[key] = _Known(arrives, (), {})
        return Held(key, took, held.parts)

    def labels(self, held: Held) -> dict[int, int] | None:
        if self.protection.sum == "secagg-oblivious":
            return None
        return {client: int(values[held.part]) for client, values in self.gather(held[held.part]).items()}

    def gather(self, held: Held, on: Sequence[int] | None = None) -> Mapping[int, Mapping[str, Array]]:
        clients = self._holders(held, on)
        ask = m.Give(self.session, "gather", self._known[held.key].number, held.parts, "", False)
        released: dict[int, dict[str, Array]] = {}
        for client, answer in sorted(self._ask(dict.fromkeys(clients, ask), "gather").items()):
            if isinstance(answer, m.Given) and tuple(one.name for one in answer.values) == held.parts:
                try:
                    released[client] = {one.name: m.from_tensor(one.value) for one in answer.values}
                except MalformedMessage:
                    self.refusals.append((client, "gather", "malformed"))
        self._record("gather")(
            "+".join(held.parts), "clients", "server", list(released), list(released.values()), readers=("server",)
        )  # fmt: skip
        return released

    # --- sums

    def apply(self, function: Callable[..., Array], *shareds: Shared, on: int | None = None) -> Shared:
        if any(not shared.is_clear for shared in shareds):
            raise InputError("apply: functions of protected sums are not carried to clients elsewhere")
        return Shared(np.asarray(function(*(shared.value() for shared in shareds))))

    def fold(self, shared: Shared, on: int | None = None) -> Shared:
        if len(shared.blind) > 1:
            shared = Shared(shared.clear, (self._folded(shared.blind, on),), shared.own)
        if len(shared.own) < 2:
            return shared
        number, key = self._number(), HeldKey("own")
        addends = tuple(m.OwnPart(self._known[own.held.key].number, own.held.part, own.factor) for own in shared.own)
        clients = sorted({client for own in shared.own for client in own.held.clients} & set(self.clients))
        answers = self._ask(dict.fromkeys(clients, m.AddUp(self.session, number, addends)), "add up")
        done = {client: answer.parts for client, answer in answers.items() if isinstance(answer, m.Computed) and answer.parts}
        if not done:
            raise InputError("fold: none of the clients with an own part is present")
        self._known[key] = _Known(number, next(iter(done.values())), {})
        return Shared(shared.clear, shared.blind, (Own(Held(key, tuple(sorted(done)), ("own",))),))

    def _folded(self, blind: Sequence[Blind], on: int | None) -> Blind:
        """Blind parts of one value made one by a client, under a fresh transform; another is asked if one does not answer."""
        self._calls += 1
        value = m.to_one(Shared(blind=tuple(blind)), {})
        size = int(np.prod(blind[0].shape, dtype=int))
        for turn, client in enumerate(([on] if on in self.clients else []) + [one for one in self.clients if one != on]):
            purpose = f"apply/{self._turn}/{self._calls}/{turn}"
            answer = self._ask({client: m.Fold(self.session, purpose, value)}, "fold").get(client)
            if isinstance(answer, m.Given) and len(answer.values) == 1:
                with suppress(MalformedMessage, InputError):
                    hidden = check_array("fold", m.from_tensor(answer.values[0].value), ndim=1)
                    arguments = {f"fold/{term.transform}": term.value for term in blind}
                    record = self._record("apply")
                    record("arguments", "server", "clients", [client], arguments, readers=("server", "clients"))
                    record(
                        "blind result",
                        "clients",
                        "server",
                        [client],
                        [{"blind": hidden}],
                        readers=("server",),
                        context={"transform": purpose},
                    )
                    return Blind(purpose, hidden, 0, size, blind[0].shape, size)
        raise ClientsLost([] if on is None else [on])

    # --- inside

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _on(self, on: Sequence[int] | None) -> list[int]:
        clients = list(self.clients) if on is None else [client for client in sorted(set(on)) if client in self.clients]
        if not clients:
            raise TooFewClients((), 1)
        return clients

    def _holders(self, held: Held, on: Sequence[int] | None) -> list[int]:
        if held.key not in self._known:
            raise InputError(f"{held.key.name} is not held by clients of this federation")
        clients = [client for client in held.clients if client in self.clients and (on is None or client in on)]
        if not clients:
            raise TooFewClients((), 1)
        return clients


def _weight(weights: str | Mapping[int, float], client: int) -> float:
    """A public weight, 0 for the client's own sample count."""
    if isinstance(weights, str):
        return 1.0 if weights == "equal" else 0.0
    weight = float(weights[client])
    if not (np.isfinite(weight) and weight > 0):
        raise InputError(f"mean: client {client} has weight {weight}; weights are finite and above 0")
    return weight


def _trace(models: Sequence[bytes]) -> bytes:
    parts = [model for model in models if model]
    return b"" if not parts else parts[0] if len(parts) == 1 else sha256(b"".join(parts)).digest()
