"""The federation over messages: the operations for server code, when the clients are elsewhere.

`FederationServer` has the operations of `contract.operations`, over any transport. Who does not answer in time takes no part: values
computed by some are held by those, sums are over who came through, and a clustering that lost a client raises `ClientsLost`, after which
the same step can simply be taken again (algorithms are functions of their state). The transcript is written as in a federation in one
process, so reports and attacks read both.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal

import numpy as np

from ..contract.calls import Contribution, SumCall
from ..contract.handles import Blind, GroupMean, Held, HeldKey, Labels, Own, Released, Shared, at_server, label_sets
from ..contract.operations import Parameter, Sampling, Then
from ..contract.protection import Protection
from ..contract.transcript import Transcript, settings_of
from ..engine import Task
from ..errors import InputError, TrainingDiverged
from ..privacy.client_level import ClippedMean, LocalGram
from ..privacy.receipts import PrivacyLedger, sources
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import MalformedMessage, TooFewClients
from ..protocols.keys import Roster
from ..randomness import Stream, stream
from ..types import Array, PartKind
from . import messages as m
from .cohort import check_mean, draw_cohort, group_sizes
from .epochs import Epochs
from .group_secret import Agreement
from .parameters import said_of
from .payloads import recorded
from .protections import Asked, ComparisonServer, Layout, ServerParts, SumServer, zeros_of
from .registry import ClientRegistry, ClientsLost, EpochEnded, KeyHolderLost, most_common
from .relay import relay, requests
from .release_policy import kinds_of, may_leave
from .traffic import Bare, plain
from .transport import Transport
from .values import UNTRACED, Origin, trace
from .work import told

__all__ = ["ClientsLost", "EpochEnded", "KeyHolderLost", "FederationServer", "Transport"]


SKIPPED = 1 << 10
FAILED = ("bad-input", "internal", "over-budget")
"""Error codes that may tell of a client's data: they are paid for. Other refusals follow from its settings."""


@dataclass(frozen=True)
class _Known:
    """What the server knows of values that clients hold: their number, the layout that more than half have (else none), the name of what
    each was computed from (`values.trace`), which clients say that theirs are laid out otherwise, whether parameters went into them, and
    the kinds of their parts."""

    number: int
    layout: Layout
    models: Mapping[int, bytes]
    odd: frozenset[int] = frozenset()
    at_model: bool = True
    kinds: Mapping[str, PartKind] = field(default_factory=dict)


class FederationServer:
    """The operations over a transport.

    `roster` pins the clients' signing keys (needed by secure sums in active mode; otherwise who enrols first as a number is that number).
    `seed` feeds public randomness: batches and cohorts are those of a local federation of the same seed. Protections that clients apply
    must be in their own settings too; a client whose settings differ refuses.

    What leaves clients is differentially private with `accounts` (per sample: tasks run in their private form, with noise that is drawn at
    the clients) or with `clipped` (per client: in means; `local` for single rows): the ledger is asked before anybody is.

    Under `ckks` the key holder is a party apart, at a place of its own, which the roster names; without it `gram` raises `KeyHolderLost`.

    Raises `InputError` without a roster for what needs one.
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
        accounts: PrivacyLedger | None = None,
        clipped: ClippedMean | None = None,
        local: LocalGram | None = None,
        strict: bool = True,
        witness: Callable[[int, int, tuple[str, ...]], Mapping[str, Array]] | None = None,
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
        self._registry = ClientRegistry(transport, self.session, roster, expect, entropy)
        self._ask = self._registry.ask
        self._agreement = None
        if self.protection.transformed and roster is not None:
            self._agreement = Agreement(self._registry, self.session, roster)
        named = (lambda purpose: purpose) if self._agreement is None else self._agreement.named
        self._named: Callable[[str], str] = named
        parts = ServerParts(self._registry, self.session, self.protection, roster, entropy, named, clipped, local)
        self._sums: SumServer = self.protection.sums.server(parts)
        self._comparisons: ComparisonServer = self.protection.comparison.server(parts)
        self.accounts = accounts
        self.bare = Bare()  # what would travel without any protection
        self.protection_seconds = 0.0
        self._strict, self._witness = strict, witness
        self._without_form: tuple[str, ...] = ()
        if clipped is not None:
            self._without_form = ("gather", "relay") if local is not None else ("gather", "relay", "gram")
        self._round = self._turn = -1
        self._calls = self._numbers = 0
        self._restored = False
        self._came: set[int] = set()
        self._known: weakref.WeakKeyDictionary[HeldKey, _Known] = weakref.WeakKeyDictionary()

    # --- who and when

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(sorted(self._here))

    @property
    def _here(self) -> frozenset[int]:
        return self._registry.present if self._agreement is None else self._registry.present & self._agreement.members

    @property
    def disagreement(self) -> str:
        """Why clients have no common transform yet, where they need one; empty otherwise."""
        return "" if self._agreement is None else self._agreement.lacking

    @property
    def holder_missing(self) -> bool:
        """Whether encrypted comparisons must wait, because the key holder is not there."""
        return self.protection.encrypted and not self._registry.holder

    @property
    def removed(self) -> frozenset[int]:
        """The clients that left for good."""
        return frozenset(self._registry.removed)

    @property
    def refusals(self) -> list[tuple[int, str, str]]:
        """(client, stage, word) of every refusal, for the operator; the words are explained in `messages.REFUSALS`."""
        return self._registry.refusals

    @property
    def round(self) -> int:
        return self._round

    @property
    def turn(self) -> int:
        """Counts rounds as they were begun, also again: it never repeats."""
        return self._turn

    @property
    def epochs(self) -> Epochs[Any]:
        """The open clustering epochs."""
        return self._comparisons.epochs

    @property
    def merge_below(self) -> int:
        return self.protection.smallest_group if self.protection.small_clusters == "merge" else 1

    def begin_round(self, number: int) -> tuple[int, ...]:
        """Called before each round; who is at a place not seen before, or did not answer lately, is enrolled (again).

        Who came, now or since the last round began.
        """
        self._round, self._calls = number, 0
        self._turn += 1
        self._registry.round, self._registry.call = number, 0
        came = self._came.union(self.enrol())
        self._came.clear()
        return tuple(sorted(came & self._here))

    def _next_call(self) -> int:
        """The number of a call that has one within its round."""
        self._calls += 1
        self._registry.call = self._calls
        return self._calls

    def saved(self) -> dict[str, Any]:
        """Where the server stands, for a checkpoint: no client's value, and no secret but the session's name."""
        counters = {"round": self._round, "turn": self._turn, "numbers": self._numbers, "epochs": self.epochs.count}
        agreement = None if self._agreement is None else self._agreement.saved()
        who = {"removed": sorted(self.removed), "agreement": agreement}
        return {"session": self.session, **counters, "calls": self._calls, "bare": self.bare.saved(), **who}

    def restore(self, saved: Mapping[str, Any], resumed: int = 1) -> None:
        """Go on from there in a new process, after the `resumed`-th interruption.

        Turns, numbers and epochs skip a range for each: an interrupted round may have used up more than the checkpoint knows, and no
        transform or mask key is used twice. With 0 interruptions nothing is skipped: for tests, with entropy that goes on where it was.
        """
        if saved["session"] != self.session:
            raise InputError("session: is not that of the checkpoint; give it when the federation is built")
        self._restored = resumed > 0
        skipped = resumed * SKIPPED
        self._round, self._turn, self._calls = saved["round"], saved["turn"] + skipped, saved["calls"]
        self._numbers, self.epochs.count = saved["numbers"] + skipped, saved["epochs"] + skipped
        self.bare = Bare(**saved["bare"])
        self._registry.remove(saved["removed"])
        if self._agreement is not None and saved["agreement"] is not None:
            self._agreement.restore(saved["agreement"])

    def known(self, key: HeldKey) -> dict[str, Any]:
        """What the server knows of what is held under a key, as plain values."""
        one = self._known[key]
        layout = [[part.name, part.dtype, list(part.shape)] for part in one.layout]
        models = [[client, model.hex()] for client, model in sorted(one.models.items())]
        rest = {"odd": sorted(one.odd), "at_model": one.at_model, "kinds": dict(one.kinds)}
        return {"number": one.number, "layout": layout, "models": models, **rest}

    def know(self, key: HeldKey, plain: Mapping[str, Any]) -> None:
        """Take up what `known` gave."""
        layout = tuple(m.Described(name, dtype, tuple(shape)) for name, dtype, shape in plain["layout"])
        models = {client: bytes.fromhex(model) for client, model in plain["models"]}
        rest = (frozenset(plain.get("odd", ())), plain.get("at_model", True), plain.get("kinds", {}))
        self._known[key] = _Known(plain["number"], layout, models, *rest)

    def listen(self, say: Callable[[str], None], tick: Callable[[int, int], None]) -> None:
        """`say` gets an estimate before an expensive step starts, `tick` how much of how much is done."""
        self._comparisons.listen(say, tick)

    def enrol(self) -> tuple[int, ...]:
        """Say hello to all places without a client that answers; the clients that came or came back."""
        return self._entered(self._registry.enrol())

    def _entered(self, came: tuple[int, ...]) -> tuple[int, ...]:
        if self._agreement is not None:
            self._agreement.extend(self._record("group"))
        return came

    def _greet_lost(self) -> None:
        """Who gave no answer lately may be there again: it missed one operation, not the round."""
        if came := self._registry.greet_lost():
            self._came.update(self._entered(came))

    def stream(self, purpose: str, client: int = -1) -> Stream:
        return stream(self.seed, purpose, self._round, client)

    def cohort(self, labels: Labels | Held | None = None) -> tuple[int, ...]:
        known = None if isinstance(labels, Held) else labels
        return draw_cohort(self.sampling, self.clients, known, self.protection.smallest_group, self.seed, self._round)

    def _record(self, operation: str) -> Callable[..., None]:
        return partial(self.transcript.add, self._round, operation)

    # --- compute

    def compute(
        self, task: Task, params: Mapping[str, Parameter] | None = None, which: Labels | Held | None = None, on: Sequence[int] | None = None
    ) -> Held:
        self._greet_lost()
        clients, params, plain_task = self._on(on), params or {}, task
        if isinstance(which, Held):
            choosing = frozenset(which.clients)
            clients = [client for client in clients if client in choosing]
        for value in params.values():
            if isinstance(value, Held):
                missing = sorted(set(clients).difference(value.clients))
                if missing:
                    raise InputError(f"clients {missing} do not hold {value.key.name}")
        task, noise = self._private(task)
        key, number = HeldKey(type(task).__name__), self._number()
        lists = {name: list(one) for name, one in params.items() if isinstance(one, list | tuple)}
        asks: dict[int, m.Ask] = {}
        traced: dict[int, bytes] = {}
        settings = settings_of(plain_task)
        for chosen, members, ask in self._requests(plain_task, params, which, clients, number, noise):
            asks |= dict.fromkeys(members, ask)
            if self.protection.secure:
                name = told(ask)
                traced |= {client: trace([name, *self._earlier(params, which, client)]) for client in members}
            payload, blind = recorded(params, lists, chosen)
            if payload:
                self.bare.down(plain(params, lists, chosen), copies=len(members))
                context = {"task": type(task).__name__, "settings": settings, "which": list(chosen)} | ({"blind": blind} if blind else {})
                self._record("compute")("parameters", "server", "clients", members, payload, readers=("server", "clients"), context=context)
        before = len(self.refusals)
        try:
            answers = self._ask(asks, "compute")
        except Exception as error:  # of a simulated client, which ends the run: it names one, and so tells of those before it, too
            if getattr(error.__cause__, "code", "internal") in FAILED:
                self._failed(task, params, which, clients)
            raise
        layouts = {client: answer.parts for client, answer in answers.items() if isinstance(answer, m.Computed) and answer.result}
        if self.accounts is not None:  # that they failed was told
            said_so = {client for client, _, word in self.refusals[before:] if word in FAILED}
            self._failed(task, params, which, sorted(said_so | (set(answers) - set(layouts))))
        if not layouts:
            raise TrainingDiverged(f"{type(task).__name__} in round {self._round}: no client has a result")
        layout = most_common(list(layouts.values())) or ()
        at_model = any(not isinstance(value, Held) or self._known[value.key].at_model for value in params.values())
        odd = frozenset(client for client, said in layouts.items() if said != layout)
        self._known[key] = _Known(number, layout, traced, odd, at_model, kinds_of(task))
        held = Held(key, tuple(sorted(layouts)), tuple(task.parts))
        if self.accounts is not None:
            self.accounts.enter(held, task, sources(params, which), self._remembered(task, held.clients))
        return held

    def _requests(
        self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int], number: int,
        noise: m.NoisySteps | None,
    ) -> list[tuple[tuple[int, ...], list[int], m.Compute]]:  # fmt: skip
        """What clients are asked to compute: the labels picked from lists, those who are asked the same, and the request."""
        lists = {name: list(one) for name, one in params.items() if isinstance(one, list | tuple)}
        sizes = {len(one) for one in lists.values()}
        if which is not None and len(sizes) != 1:
            raise InputError(f"compute: `which` needs lists of one length to pick from, got lengths {sorted(sizes)}")
        labels: dict[int, tuple[int, ...]] = {}
        several = False
        if which is not None and not isinstance(which, Held):
            labels, several = label_sets(which, clients, next(iter(sizes)), "compute: which")
        numbers = self.numbers()
        live = tuple(sorted(numbers.values()))  # also of those that own parts of sums refer to
        alike: dict[tuple[int, ...], list[int]] = {}
        for client in clients:
            alike.setdefault(labels.get(client, ()), []).append(client)
        carried = m.Carried(task)
        sums: dict[int, m.Addends] = {}  # a sum that several are sent is one object for all
        requests = []
        for chosen, members in sorted(alike.items()):
            sent = said_of(params, lists, chosen if labels else None, several, numbers, sums)
            picks: m.Picks | m.Mine | None = m.Picks(chosen, several) if labels else None
            if isinstance(which, Held):
                picks = m.Mine(numbers[which.key], which.part)
            ask = m.Compute(self.session, self._round, self.seed, number, live, carried, sent, picks, noise)
            requests.append((chosen, members, ask))
        return requests

    def asks(
        self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int]
    ) -> dict[int, m.Compute]:  # fmt: skip
        """What `compute` would ask these clients, without asking them. For measuring."""
        return {client: ask for _, members, ask in self._requests(task, params, which, clients, 0, None) for client in members}

    def numbers(self) -> dict[HeldKey, int]:
        """The numbers by which clients know what they hold."""
        return {key: known.number for key, known in self._known.items()}

    def lose(self, clients: Sequence[int]) -> None:
        """These clients went away: they enrol anew before they take part again. `InputError` for unknown ones."""
        self._check_known(clients)
        for client in clients:
            self._registry.lose(client)

    def remove(self, clients: Sequence[int]) -> None:
        """These clients leave for good. Where a transform is in force the others agree on a fresh secret, which those who left do not get.

        What comes later (sums, clustering epochs) is under the fresh secret. Open clustering epochs and transformed sums stay under theirs:
        who has that goes on with them; whoever enters later cannot use them until they are made anew (`gram` afresh, `fold`).

        Raises `TooFewClients` where not more than half of the roster would be left to agree, `InputError` for unknown clients.
        """
        self._check_known(clients)
        self._registry.remove(clients)
        if self._agreement is not None:
            self._agreement.renew(self._record("group"))

    def _failed(self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int]) -> None:
        """Clients that have no result pay as if they had released one: that they have none is told."""
        if self.accounts is not None and clients:
            self.accounts.failed(task, sources(params, which), self._remembered(task, clients), clients, self._round)

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
        self._greet_lost()
        clients = [] if against is not None and on is not None and not on else self._holders(held, on)
        known = self._known[held.key] if clients else None
        origin = Origin() if known is None else Origin(size=known.at_model, kinds=tuple(known.kinds.items()))
        if clients and self._strict and not may_leave(self.protection, "gram", held.part, 0, origin):
            raise InputError(
                f"gram: {held.part} would be compared in the clear, which clients refuse under protection.sum = {self.protection.sum!r}, "
                f"min_cohort = {self.protection.smallest_sum}; name a transform or 'ckks' in protection.gram"
            )
        self._settle(held, clients, "gram")
        number = self._known[held.key].number if clients else 0
        record, began = self._record("gram"), perf_counter()
        layout = self._known[held.key].layout if clients else ()
        shape = next((part for part in layout if part.name == held.part), None)
        if shape is not None:
            self.bare.up([zeros_of(shape)], copies=len(clients))
        try:
            return self._comparisons.gram(held, number, clients, then, against, record, () if shape is None else shape.shape)
        finally:
            self.protection_seconds += perf_counter() - began

    def close(self, held: Held) -> None:
        self._comparisons.close(held)

    def end(self) -> None:
        """The run is over: all clustering epochs are closed, and the key holder, if there is one, drops their keys."""
        self._comparisons.end()

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
        self._greet_lost()
        clients = self._holders(held, on)
        oblivious = self.protection.sums.oblivious
        hidden = self.protection.max_weight > 0 if self.protection.secure else not self.protection.sums.transformed
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
            raise InputError(
                f"mean: overlapping groups under sum = {self.protection.sum!r}: the difference of two sums would show an individual"
            )
        if weights == "examples" and self.accounts is not None:
            raise InputError("mean: weights = 'examples' under privacy.unit = 'sample' would release sample counts; use 'equal'")
        contributions = tuple(Contribution(client, {}, weight[client] or 1.0, labels[client]) for client in clients)
        sent = {client: known.models.get(client, UNTRACED) for client in clients} if self.protection.secure else {}
        call = SumCall(
            self._turn, self._next_call(), contributions, k or 1, self.protection.smallest_group, weights != "examples", sent, models
        )  # fmt: skip
        if self.accounts is not None:
            choices = groups if oblivious and isinstance(groups, Held) else None
            self.accounts.settle_sums(held, call, choices, self.protection.small_clusters, self._round)
        asked, record, began = Asked(known.number, held.parts, layout, weight), self._record("mean"), perf_counter()
        try:
            choice: m.Mine | m.Picks | None = None
            if oblivious:
                choice = m.Mine(self._known[groups.key].number, groups.part) if isinstance(groups, Held) else m.Picks((0,), False)
            if self.protection.small_clusters == "local" and not oblivious:
                means = self._mean_or_local(held, call, asked, groups)
            else:
                means = self._sums.means(call, asked, choice, record)
        finally:
            self.protection_seconds += perf_counter() - began
        self.bare.mean(call, layout, means)
        return means

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
        if any(count >= call.min_cohort for count in counts):
            means = list(self._sums.means(call, asked, None, self._record("mean")))
        sizes = group_sizes(groups, call, self.clients)
        for label, count in enumerate(counts):
            if count > 0 and sizes[label] < call.min_cohort:
                own = Held(held.key, tuple(one.client for one in call.members(label)), held.parts)
                means[label] = GroupMean({part: Shared(own=(Own(own[part]),)) for part in held.parts}, None, count)
        return tuple(means)

    # --- relay, gather

    def relay(self, held: Held, to: Mapping[int, Sequence[int]] | Held | None = None) -> Held:
        self._greet_lost()
        recipients = [client for client in self.clients if to is None or client in (to.clients if isinstance(to, Held) else to)]
        present = self._holders(held, None)
        known, arrives = self._known[held.key], self._number()
        asked: dict[int, set[int]] = {client: set(present) - {client} for client in recipients}
        if isinstance(to, Held):
            self._settle(to, recipients, "relay")  # first: who pays for `held` follows from these choices
            asked = requests(self._registry, self.session, recipients, self._known[to.key].number, to.parts)
        elif to is not None:
            self._check_known(sorted({*to, *(sender for senders in to.values() for sender in senders)}))
            asked = {client: set(to[client]) for client in recipients}
        wanted = {client: sorted(senders & set(present)) for client, senders in asked.items()}
        self._settle(held, [sender for sender in present if any(sender in senders for senders in wanted.values())], "relay")
        record = self._record("relay")
        took = relay(
            self._registry, self.session, known.number, arrives, held.parts, present, wanted, record, requested=to is not None,
            witness=self._witness,
        )  # fmt: skip
        key = HeldKey(f"relayed {held.key.name}")
        self._known[key] = _Known(arrives, (), dict.fromkeys(took, UNTRACED))
        relayed = Held(key, took, held.parts)
        copies = sum(len(senders) for senders in wanted.values())
        carried = [zeros_of(part) for part in known.layout if part.name in held.parts]
        if to is not None:
            self.bare.up([np.zeros(len(present), dtype=bool)], copies=len(recipients))
        self.bare.up(carried, copies=copies)
        self.bare.down(carried, copies=copies)
        if self.accounts is not None:
            self.accounts.public(relayed)
        return relayed

    def labels(self, held: Held) -> dict[int, int] | None:
        if self.protection.sums.oblivious:
            return None
        return {client: labels[0] for client, labels in self._told_labels(held[held.part], None).items() if len(labels) == 1}

    def gather(self, held: Held, on: Sequence[int] | None = None) -> Mapping[int, Mapping[str, Array]]:
        self._greet_lost()
        clients = self._holders(held, on)
        self._settle(held, clients, "gather")
        known = self._known[held.key]
        ask = m.Give(self.session, "gather", known.number, held.parts, "", False)
        layout = {part.name: (part.dtype, part.shape) for part in known.layout}
        released: dict[int, dict[str, Array]] = {}
        for client, answer in sorted(self._ask(dict.fromkeys(clients, ask), "gather").items()):
            if isinstance(answer, m.Given) and tuple(one.name for one in answer.values) == held.parts:
                try:
                    values = {one.name: np.asarray(one.value) for one in answer.values}
                    for name, value in values.items():
                        laid_out = (value.dtype.str, value.shape)
                        if laid_out != layout.get(name, laid_out) or not np.isfinite(value).all():  # not as most have it, or no number
                            raise MalformedMessage
                    released[client] = values
                    self.bare.up(values.values())
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
        self._greet_lost()
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

    def _one_blind(self, operation: str, blind: Sequence[Blind], times: Sequence[Blind], on: int | None) -> Blind:
        self._greet_lost()
        place, record = f"apply/{self._turn}/{self._next_call()}", self._record(operation)
        return self._sums.folded(self.clients, blind, times, on, place, operation, record)

    def _settle(self, held: Held, clients: Sequence[int], operation: str) -> None:
        """Ask the ledger, before anybody is asked. `InputError` for what has no private form."""
        if operation in self._without_form:
            raise InputError(
                f"{operation}: releases single clients' values, which have no private form under privacy.unit = 'client'; means have, and "
                "rows to be compared with privacy.local = ['gram']"
            )
        if self.accounts is not None and clients:
            self.accounts.settle(held, clients, operation, self._round)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _on(self, on: Sequence[int] | None) -> list[int]:
        clients = list(self.clients) if on is None else sorted(self._here.intersection(on))
        self._check_known(on)
        if not clients:
            raise TooFewClients((), 1)
        return clients

    def _holders(self, held: Held, on: Sequence[int] | None) -> list[int]:
        if held.key not in self._known:
            raise InputError(f"{held.key.name} is not held by clients of this federation")
        self._check_known(on)
        clients = sorted(self._here.intersection(held.clients if on is None else set(on).intersection(held.clients)))
        if not clients:
            raise TooFewClients((), 1)
        return clients

    def _check_known(self, on: Sequence[int] | None) -> None:
        """Who is absent is left out; a number that nobody ever had is a mistake."""
        unknown = [client for client in on or () if not self._registry.knows(client)]
        if unknown:
            raise InputError(f"clients {unknown} are not known to this federation")


def _shared(value: Parameter) -> list[Shared]:
    """The sums in a parameter."""
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Shared)]


def _weight(weights: str | Mapping[int, float], client: int) -> float:
    """A public weight, 0 for the client's own sample count."""
    if isinstance(weights, str):
        return 1.0 if weights == "equal" else 0.0
    if client not in weights:
        raise InputError(f"mean: no weight for client {client}")
    weight = float(weights[client])
    if not (np.isfinite(weight) and weight > 0):
        raise InputError(f"mean: client {client} has weight {weight}; weights are finite and above 0")
    return weight
