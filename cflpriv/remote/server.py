"""The federation over messages: the verbs for server code, when the clients are elsewhere.

`RemoteFederation` fulfils the same contract as `LocalFederation`, over any transport. Who does not answer in time takes no part: values
computed by some are held by those, sums are over who came through, and a clustering that lost a client raises `ClientsLost`, after which
the same step can simply be taken again (algorithms are functions of their state). The transcript is written as in a federation in one
process, so reports and attacks read both.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..accounts import Accounts, sources
from ..channels import Contribution, SumCall
from ..client_level import ClippedMean, LocalGram
from ..engine import Task
from ..epochs import Epochs
from ..errors import InputError, TrainingDiverged
from ..federation import Parameter, Sampling, Then
from ..handles import Blind, GroupMean, Held, HeldKey, Labels, Own, Released, Shared, at_server, label_sets
from ..participation import check_mean, draw_cohort, group_sizes
from ..protection import Protection
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import MalformedMessage, TooFewClients
from ..protocols.keys import Roster
from ..protocols.orthonormal import TRANSFORMS
from ..randomness import Stream, stream
from ..record import Transcript, settings_of
from ..types import Array
from ..wire import recorded
from . import messages as m
from .agreement import Agreement
from .folds import folded
from .gram import Grams
from .means import Asked, Means
from .parameters import said_of
from .relay import relay, requests
from .releases import may_leave
from .roll import ClientsLost, EpochEnded, KeyHolderLost, Roll, Transport, most_common
from .sums import Layout, SecureSums
from .values import UNTRACED, Origin, trace
from .work import told

if TYPE_CHECKING:
    from .encrypted import EncryptedGrams

__all__ = ["ClientsLost", "EpochEnded", "KeyHolderLost", "RemoteFederation", "Transport"]


SKIPPED = 1 << 10


@dataclass(frozen=True)
class _Known:
    """What the server knows of values that clients hold: their number, the layout that more than half have (else none), the name of what
    each was computed from (`values.trace`), which clients say that theirs are laid out otherwise, and whether parameters went into them."""

    number: int
    layout: Layout
    models: Mapping[int, bytes]
    odd: frozenset[int] = frozenset()
    at_model: bool = True


class RemoteFederation:
    """The verbs over a transport.

    `roster` pins the clients' signing keys (needed by secure sums in active mode; otherwise who enrols first as a number is that number).
    `seed` feeds public randomness: batches and cohorts are those of a local federation of the same seed. Protections that clients apply
    must be in their own settings too; a client whose settings differ refuses.

    What leaves clients is differentially private with `accounts` (per sample: tasks run in their private form, with noise that is drawn at
    the clients) or with `clipped` (per client: in means; `local` for single rows): the ledger is asked before anybody is.

    Under `ckks` the key holder is a party apart, at a place of its own, which the roster names; without it `gram` raises `KeyHolderLost`.

    Raises `InputError` without a roster for what needs one, and for `ckks_mode = "symmetric"`, which is not carried.
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
        accounts: Accounts | None = None,
        clipped: ClippedMean | None = None,
        local: LocalGram | None = None,
    ) -> None:
        self.protection = protection or Protection()
        self.sampling = sampling or Sampling()
        self.seed = seed
        self.transcript = transcript or Transcript()
        active = self.protection.secure and self.protection.secagg_mode == "active"
        if active and roster is None:
            raise InputError("protection.secagg_mode: 'active' needs the clients' pinned roster; give it, or use 'passive'")
        if self.protection.transformed and roster is None:
            raise InputError("protection: a transform that clients share needs their pinned roster, by which they agree on its secret")
        self.session = session or entropy(16)
        self._sums = SecureSums(
            self.protection.secure_sum, self.protection.smallest_sum, self.session, roster if active else None, entropy
        )  # fmt: skip
        self._roll = Roll(transport, self.session, roster, expect, entropy)
        self._sums.refusals = self._roll.refusals
        self._ask = self._roll.ask
        self._means = Means(self._roll, self.session, self.protection, self._sums, clipped)
        self._grams: Grams | EncryptedGrams = Grams(self._roll, self.session, self.protection, local)
        if "ckks" in self.protection.gram:
            from . import encrypted  # the protocol is loaded where it is used

            self._grams = encrypted.EncryptedGrams(self._roll, self.session, self.protection, roster, entropy)
        self.accounts = accounts
        self._agreement = None
        if self.protection.transformed and roster is not None:
            self._agreement = Agreement(self._roll, self.session, roster)
        self._round = self._turn = -1
        self._calls = self._numbers = 0
        self._restored = False
        self._known: weakref.WeakKeyDictionary[HeldKey, _Known] = weakref.WeakKeyDictionary()

    # --- who and when

    @property
    def clients(self) -> tuple[int, ...]:
        here = self._roll.present if self._agreement is None else self._roll.present & self._agreement.members
        return tuple(sorted(here))

    @property
    def holder_missing(self) -> bool:
        """Whether encrypted comparisons must wait, because the key holder is not there."""
        return "ckks" in self.protection.gram and not self._roll.holder

    @property
    def refusals(self) -> list[tuple[int, str, str]]:
        """(client, stage, word) of every refusal, for the operator; the words are explained in `messages.REFUSALS`."""
        return self._roll.refusals

    @property
    def round(self) -> int:
        return self._round

    @property
    def epochs(self) -> Epochs[Any]:
        """The open clustering epochs."""
        return self._grams.epochs

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
        self._restored = True
        self._round, self._turn = saved["round"], saved["turn"] + SKIPPED
        self._numbers, self.epochs.count = saved["numbers"] + SKIPPED, saved["epochs"] + SKIPPED
        if self._agreement is not None and saved["agreement"] is not None:
            self._agreement.restore(saved["agreement"])

    def known(self, key: HeldKey) -> dict[str, Any]:
        """What the server knows of what is held under a key, as plain values."""
        one = self._known[key]
        layout = [[part.name, part.dtype, list(part.shape)] for part in one.layout]
        models = [[client, model.hex()] for client, model in sorted(one.models.items())]
        return {"number": one.number, "layout": layout, "models": models, "odd": sorted(one.odd), "at_model": one.at_model}

    def know(self, key: HeldKey, plain: Mapping[str, Any]) -> None:
        """Take up what `known` gave."""
        layout = tuple(m.Described(name, dtype, tuple(shape)) for name, dtype, shape in plain["layout"])
        models = {client: bytes.fromhex(model) for client, model in plain["models"]}
        self._known[key] = _Known(plain["number"], layout, models, frozenset(plain.get("odd", ())), plain.get("at_model", True))

    def enrol(self) -> tuple[int, ...]:
        """Say hello to all places without a client that answers; the clients that came or came back."""
        came = self._roll.enrol()
        self._sums.forget(came)
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
        clients, params, plain = self._on(on), params or {}, task
        clients = [client for client in clients if not isinstance(which, Held) or client in which.clients]
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
        task, noise = self._private(task)
        key, number = HeldKey(type(task).__name__), self._number()
        numbers = {key: known.number for key, known in self._known.items()}
        live = tuple(sorted(numbers.values()))  # also of those that own parts of sums refer to
        said, settings = m.task_to_bytes(plain), settings_of(plain)
        alike: dict[tuple[int, ...], list[int]] = {}
        for client in clients:
            alike.setdefault(labels.get(client, ()), []).append(client)
        asks: dict[int, m.Ask] = {}
        traced: dict[int, bytes] = {}
        for chosen, members in sorted(alike.items()):
            sent = said_of(params, lists, chosen if labels else None, several, numbers)
            picks: m.Picks | m.Mine | None = m.Picks(chosen, several) if labels else None
            if isinstance(which, Held):
                picks = m.Mine(self._known[which.key].number, which.part)
            ask = m.Compute(self.session, self._round, self.seed, number, live, said, sent, picks, noise)
            asks |= dict.fromkeys(members, ask)
            name = told(ask)
            traced |= {client: trace([name, *self._earlier(params, which, client)]) for client in members}
            payload, blind = recorded(params, lists, chosen)
            if payload:
                context = {"task": type(task).__name__, "settings": settings, "which": list(chosen)} | ({"blind": blind} if blind else {})
                self._record("compute")("parameters", "server", "clients", members, payload, readers=("server", "clients"), context=context)
        before = len(self.refusals)
        answers = self._ask(asks, "compute")
        layouts = {client: answer.parts for client, answer in answers.items() if isinstance(answer, m.Computed) and answer.result}
        if self.accounts is not None:  # that they failed was told
            said_so = {client for client, _, word in self.refusals[before:] if word in ("bad-input", "internal", "over-budget")}
            failed = said_so | (set(answers) - set(layouts))
            self.accounts.failed(task, sources(params, which), self._remembered(task, failed), sorted(failed), self._round)
        if not layouts:
            raise TrainingDiverged(f"{type(task).__name__} in round {self._round}: no client has a result")
        layout = most_common(list(layouts.values())) or ()
        at_model = any(not isinstance(value, Held) or self._known[value.key].at_model for value in params.values())
        self._known[key] = _Known(number, layout, traced, frozenset(client for client, said in layouts.items() if said != layout), at_model)
        held = Held(key, tuple(sorted(layouts)), tuple(task.parts))
        if self.accounts is not None:
            self.accounts.enter(held, task, sources(params, which), self._remembered(task, held.clients))
        return held

    def _earlier(self, params: Mapping[str, Parameter], which: Labels | Held | None, client: int) -> list[bytes]:
        """The names of what a client holds itself of what goes into a task, in the order in which it will find them."""
        own = [mine.held for value in params.values() for one in _shared(value) for mine in one.own]
        own = [] if self.protection.small_clusters == "local" else own
        held = [value for value in (which, *params.values()) if isinstance(value, Held)]
        return [*(UNTRACED for one in own if client in one.clients), *(self._known[one.key].models[client] for one in held)]

    def _remembered(self, task: Task, clients: Iterable[int]) -> list[tuple[int, str]]:
        """What clients have of what a task reads; after a restart nobody knows what an interrupted round left with them."""
        asked = [(client, name) for client in clients for name in getattr(task, "reads", ())]
        return [one for one in asked if self._restored or (self.accounts is not None and self.accounts.remembers(*one))]

    def _private(self, task: Task) -> tuple[Task, m.NoisySteps | None]:
        """The private form that clients will make of a task, and what they need for it. `InputError` for a task without one."""
        if self.accounts is None:
            return task, None
        private = self.accounts.private(task)
        if not self.accounts.harmless(private, self.accounts.noise.relation):
            raise InputError(f"compute: {type(task).__name__} has no noise here; clients that demand privacy refuse to compute it")
        return private, m.NoisySteps(**vars(self.accounts.noise))

    # --- gram

    def gram(self, held: Held, then: Then, against: Held | None = None, on: Sequence[int] | None = None) -> Released:
        clients = [] if against is not None and on is not None and not on else self._holders(held, on)
        if clients and not may_leave(self.protection, "gram", held.part, 0, Origin(size=self._known[held.key].at_model)):
            raise InputError(
                f"gram: {held.part} would be compared in the clear, which clients refuse under protection.sum = {self.protection.sum!r}, "
                f"floor = {self.protection.smallest_sum}; name a transform or 'ckks' in protection.gram"
            )
        self._settle(held, clients, "gram")
        number = self._known[held.key].number if clients else 0
        record = self._record("gram")
        if isinstance(self._grams, Grams):
            return self._grams.gram(held, number, clients, then, against, record)
        layout = self._known[held.key].layout if clients else ()
        shape = next((part.shape for part in layout if part.name == held.part), ())
        return self._grams.gram(held, number, clients, then, against, record, shape)

    def close(self, held: Held) -> None:
        self._grams.close(held)

    def end(self) -> None:
        """The run is over: all clustering epochs are closed, and the key holder, if there is one, drops their keys."""
        self._grams.end()

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
        self.refusals.extend((client, "mean", "malformed") for client in clients if client in known.odd)
        clients = [client for client in clients if client not in known.odd]
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
            {client: known.models[client] for client in clients}, models, {},
        )  # fmt: skip
        if self.accounts is not None:
            choices = groups if oblivious and isinstance(groups, Held) else None
            self.accounts.settle_sums(held, call, choices, self.protection.small_clusters, self._round)
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
            return self._told_labels(groups, k, clients)
        return label_sets(groups, clients, k, "mean: groups")[0]

    def _told_labels(self, held: Held, k: int | None, on: Sequence[int] | None = None) -> dict[int, tuple[int, ...]]:
        """The labels that clients chose; a choice that cannot be is as good as none."""
        chosen: dict[int, tuple[int, ...]] = {}
        for client, values in self.gather(held, on=on).items():
            try:
                chosen |= label_sets({client: values[held.part]}, [client], k, held.part)[0]
            except InputError:
                self.refusals.append((client, "gather", "malformed"))
        return chosen

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
        known, arrives = self._known[held.key], self._number()
        asked: dict[int, set[int]] = {client: set(present) - {client} for client in recipients}
        if isinstance(to, Held):
            self._settle(to, recipients, "relay")  # first: who pays for `held` follows from these choices
            asked = requests(self._roll, self.session, recipients, self._known[to.key].number, to.parts)
        elif to is not None:
            asked = {client: set(to[client]) for client in recipients}
        wanted = {client: sorted(senders & set(present)) for client, senders in asked.items()}
        self._settle(held, [sender for sender in present if any(sender in senders for senders in wanted.values())], "relay")
        record = self._record("relay")
        took = relay(self._roll, self.session, known.number, arrives, held.parts, present, wanted, record, requested=to is not None)
        key = HeldKey(f"relayed {held.key.name}")
        self._known[key] = _Known(arrives, (), dict.fromkeys(took, UNTRACED))
        relayed = Held(key, took, held.parts)
        if self.accounts is not None:
            self.accounts.public(relayed)
        return relayed

    def labels(self, held: Held) -> dict[int, int] | None:
        if self.protection.sum == "secagg-oblivious":
            return None
        return {client: labels[0] for client, labels in self._told_labels(held[held.part], None).items() if len(labels) == 1}

    def gather(self, held: Held, on: Sequence[int] | None = None) -> Mapping[int, Mapping[str, Array]]:
        clients = self._holders(held, on)
        self._settle(held, clients, "gather")
        known = self._known[held.key]
        ask = m.Give(self.session, "gather", known.number, held.parts, "", False)
        layout = {part.name: (part.dtype, part.shape) for part in known.layout}
        released: dict[int, dict[str, Array]] = {}
        for client, answer in sorted(self._ask(dict.fromkeys(clients, ask), "gather").items()):
            if isinstance(answer, m.Given) and tuple(one.name for one in answer.values) == held.parts:
                try:
                    values = {one.name: m.from_tensor(one.value) for one in answer.values}
                    for name, value in values.items():
                        laid_out = (value.dtype.str, value.shape)
                        if laid_out != layout.get(name, laid_out) or not np.isfinite(value).all():  # not as most have it, or no number
                            raise MalformedMessage
                    released[client] = values
                except MalformedMessage:
                    self.refusals.append((client, "gather", "malformed"))
        self._record("gather")(
            "+".join(held.parts), "clients", "server", list(released), list(released.values()), readers=("server",)
        )  # fmt: skip
        return released

    # --- sums

    def product(self, shared: Shared, number: Shared, on: int | None = None) -> Shared:
        if at_server(shared, number):
            return shared * float(number.value().item())
        return Shared(blind=(self._one_blind("product", shared.blind, number.blind, on),))

    def fold(self, shared: Shared, on: int | None = None) -> Shared:
        if len(shared.blind) > 1:
            shared = Shared(shared.clear, (self._one_blind("fold", shared.blind, (), on),), shared.own)
        if len(shared.own) < 2:
            return shared
        number, key = self._number(), HeldKey("own")
        addends = tuple(m.OwnPart(self._known[own.held.key].number, own.held.part, own.factor) for own in shared.own)
        clients = sorted({client for own in shared.own for client in own.held.clients} & set(self.clients))
        answers = self._ask(dict.fromkeys(clients, m.AddUp(self.session, number, addends)), "add up")
        done = {client: answer.parts for client, answer in answers.items() if isinstance(answer, m.Computed) and answer.parts}
        if not done:
            raise TooFewClients((), 1)  # nobody with an own part is present
        self._known[key] = _Known(number, most_common(list(done.values())) or (), dict.fromkeys(done, UNTRACED))
        total = Held(key, tuple(sorted(done)), ("own",))
        if self.accounts is not None:
            self.accounts.derive(total, [own.held for own in shared.own])
        return Shared(shared.clear, shared.blind, (Own(total),))

    # --- inside

    def _one_blind(self, verb: str, blind: Sequence[Blind], times: Sequence[Blind], on: int | None) -> Blind:
        self._calls += 1
        place, record = f"apply/{self._turn}/{self._calls}", self._record(verb)
        return folded(self._roll, self.session, self.protection.sum, self.clients, blind, times, on, place, verb, record)

    def _settle(self, held: Held, clients: Sequence[int], verb: str) -> None:
        """Ask the ledger, before anybody is asked."""
        if self.accounts is not None and clients:
            self.accounts.settle(held, clients, verb, self._round)

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


def _shared(value: Parameter) -> list[Shared]:
    """The sums in a parameter."""
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Shared)]


def _weight(weights: str | Mapping[int, float], client: int) -> float:
    """A public weight, 0 for the client's own sample count."""
    if isinstance(weights, str):
        return 1.0 if weights == "equal" else 0.0
    weight = float(weights[client])
    if not (np.isfinite(weight) and weight > 0):
        raise InputError(f"mean: client {client} has weight {weight}; weights are finite and above 0")
    return weight
