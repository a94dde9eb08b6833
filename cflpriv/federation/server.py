"""The server: the operations of `contract.operations`, over any transport.

A client that does not answer in time drops out of the operation: values are held by the clients that computed them, and sums are over the
clients that contributed. A comparison that lost a client raises `ClientsLost`, and the same step can be taken again, because algorithms are
functions of their state. A simulated and a deployed federation write the same transcript.
"""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal

import numpy as np

from ..contract.calls import ClientContribution, SumCall
from ..contract.handles import GroupMean, Held, HeldKey, Labels, OwnAddend, PartLayout, Released, Shared, at_server, label_sets
from ..contract.operations import Parameter, Sampling, Then
from ..contract.protection import Protection
from ..contract.transcript import Transcript, Unprotected, settings_of
from ..contract.transformed_parts import Transformed
from ..engine import Task
from ..errors import InputError, TrainingDiverged
from ..privacy.client_level import ClippedMean, LocalGram
from ..privacy.receipts import NoLedger, PrivacyLedger, sources
from ..privacy.settings import SumNoise
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import MalformedMessage, ProtocolError, TooFewClients
from ..protocols.keys import Roster
from ..randomness import Stream, stream
from ..types import Array
from . import messages as m
from .cohort import check_mean, draw_cohort, group_sizes, public_weights
from .contract_record import Contract, contract_bytes
from .epochs import Epochs
from .group_secret import Agreement
from .parameters import TaskParameters, renamed
from .protections import Asked, ComparisonServer, Folding, Portions, ServerParts, SumServer, at_once
from .registry import BudgetsSpent, ClientRegistry, ClientsLost, EpochEnded, KeyHolderLost, declared, majority
from .relay import Relay, Witness, relay, requested_senders
from .release_policy import kinds_of, may_leave
from .server_state import KnownValue, Participants, Rounds, WaitingTask
from .transport import Transport
from .values import UNTRACED, Origin, spread_of, trace
from .work import alternatives_of, request_digest

__all__ = ["BudgetsSpent", "ClientsLost", "EpochEnded", "FederationServer", "KeyHolderLost", "Transport"]

WHOLE = "values"
"""The name of the only part of a sum whose parts are not known yet."""


class FederationServer:
    """The operations of a federation.

    `roster` pins the clients' signing keys. Secure sums in active mode need it; without it the first client that enrols as a number keeps
    that number. `seed` feeds public randomness: batches and cohorts equal those of a simulated federation of the same seed. Protections
    that clients apply must be in the clients' own settings, too; a client whose settings differ refuses.

    With `privacy_ledger` (per sample: tasks run in their private form, clients draw the noise) or `clipped` (per client: in means; `local`
    for single rows) what leaves clients is differentially private. The ledger is charged before any client is asked.

    Cohorts are drawn from the clients that are present, or from those of `drawn_from`, without those of them that are absent: then nobody
    takes an absent client's place, and who is asked in which round is known beforehand (`schedule`).

    `contract`: what is asked of clients in this run, which they agree to when they enrol; without a contract only clients enrol whose
    settings need none.

    `portions`: how clients with large values are asked in sums, all at once or few after the other. A transport with deadlines asks all at
    once. A transcript that keeps or digests large payloads needs all at once, too.

    `together`: under sums in one message, whether clients are asked at once for a computation and for the sum over its result, from the
    second time on, when the form of the result is known. The records are the same.

    `signed`: whether clients prove their keys when they enrol, by which the server knows them again; with a roster they always do.

    Under `ckks` the roster names the key holder, a separate party at its own place, under `shares` several holders; without them `gram`
    raises `KeyHolderLost`.

    Raises `InputError` if the roster is missing where it is needed.
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
        privacy_ledger: PrivacyLedger | None = None,
        clipped: ClippedMean | None = None,
        local: LocalGram | None = None,
        strict: bool = True,
        witness: Witness | None = None,
        drawn_from: Sequence[int] | None = None,
        contract: Contract | None = None,
        signed: bool = True,
        portions: Portions = at_once,
        together: bool = True,
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
        self._rounds = Rounds()
        self._registry = ClientRegistry(
            transport,
            self.session,
            roster,
            expect,
            entropy,
            b"" if contract is None else contract_bytes(contract),
            signed or roster is not None,
        )
        self._ask = self._registry.ask
        self._agreement = None
        if self.protection.transformed and roster is not None:
            rounds, written = self._rounds, self.transcript  # not this object, which would be a cycle that keeps clients' data
            self._agreement = Agreement(
                self._registry, self.session, roster, lambda *message, **more: written.add(rounds.round, "group", *message, **more)
            )
        self._participants = Participants(self._registry, self._agreement)
        named = (lambda purpose: purpose) if self._agreement is None else self._agreement.named
        parts = ServerParts(self._registry, self.session, self.protection, roster, entropy, named, clipped, local, portions)
        self._sums: SumServer = self.protection.sums.server(parts)
        self._comparisons: ComparisonServer = self.protection.comparison.server(parts)
        self.privacy_ledger = privacy_ledger
        self._ledger: PrivacyLedger | NoLedger = NoLedger() if privacy_ledger is None else privacy_ledger
        self._named_by_choice = privacy_ledger is None and clipped is None  # as clients name values (`alternatives_of`)
        self._adaptive = None if clipped is None else clipped.adaptive
        self._without_form = () if clipped is None else ("gather", "relay") if local is not None else ("gather", "relay", "gram")
        self.protection_seconds = 0.0
        self._drawn_from = None if drawn_from is None else tuple(sorted(drawn_from))
        self._strict, self._witness, self._noisy_rows = strict, witness, local is not None
        self._known: weakref.WeakKeyDictionary[HeldKey, KnownValue] = weakref.WeakKeyDictionary()
        speaks_once = self.protection.sums.helped and not self.protection.sums.oblivious and self.protection.robust == "none"
        alone = self.protection.small_clusters == "local"  # then who has a result decides whether a group is summed
        self._together = together and speaks_once and not alone and privacy_ledger is None
        self._layouts: dict[Hashable, PartLayout] = {}
        self._unanswered: WaitingTask | None = None

    # --- clients

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(sorted(self._participants.present))

    @property
    def disagreement(self) -> str:
        """Why clients have no common transform yet, where they need one; else empty."""
        return "" if self._agreement is None else self._agreement.lacking

    @property
    def holder_missing(self) -> bool:
        """Whether encrypted comparisons must wait for the key holder, or sums for helpers."""
        there = self._registry.holders
        return len(there) < self.protection.fewest_holders or (self.protection.encrypted and 0 not in there)

    @property
    def removed(self) -> frozenset[int]:
        """The clients that were removed for good."""
        return frozenset(self._registry.removed)

    @property
    def refusals(self) -> list[tuple[int, str, str]]:
        """(client, stage, error code) of every refusal, for the operator; `error_codes.MEANINGS` explains the codes."""
        return self._registry.refusals

    def enrol(self) -> tuple[int, ...]:
        """Greet all places without a client that answers. Returns the clients that enrolled."""
        return self._participants.enrol()

    def lose(self, clients: Sequence[int]) -> None:
        """Clients went away: they enrol anew before they take part again. Raises `InputError` for unknown ones."""
        self._participants.lose(clients)

    def remove(self, clients: Sequence[int]) -> None:
        """Remove clients for good. Under a shared transform the others agree on a fresh secret, which the removed clients do not get.

        Later sums and clustering epochs use the fresh secret. Open clustering epochs and transformed sums keep theirs: clients that have
        it go on with them; later clients cannot use them until they are made anew (`gram` afresh, `fold`).

        Raises `TooFewClients` if not more than half of the roster is left to agree, `InputError` for unknown clients.
        """
        self._participants.remove(clients)

    def _owners(self, held: Held, on: Sequence[int] | None) -> list[int]:
        """The present clients of `on` that hold a value."""
        if held.key not in self._known:
            raise InputError(f"{held.key.name} is not held by clients of this federation")
        return self._participants.among(on, held.clients if held.key.absent else held.asked)  # a mean asks those that nobody asked yet

    # --- rounds

    @property
    def round(self) -> int:
        return self._rounds.round

    @property
    def turn(self) -> int:
        """Counts the rounds that were begun, repeated ones too: it never repeats."""
        return self._rounds.turn

    @property
    def clip_norm(self) -> float | None:
        """The clip norm of the next sum under client-level privacy, where it moves."""
        return None if self._adaptive is None else self._adaptive.norm

    @property
    def epochs(self) -> Epochs[Any]:
        """The open clustering epochs."""
        return self._comparisons.epochs

    @property
    def merge_below(self) -> int:
        return self.protection.smallest_group if self.protection.small_clusters == "merge" else 1

    def begin_round(self, number: int) -> tuple[int, ...]:
        """Begin a round: enrol new places and clients that did not answer lately.

        Returns the clients that enrolled, now or since the last round began.
        """
        self._settle_waiting()
        self._rounds.begin(number)
        self._registry.round, self._registry.call = number, 0
        return self._participants.begin_round()

    def _next_call(self) -> int:
        self._registry.call = self._rounds.next_call()
        return self._registry.call

    def numbers(self) -> dict[HeldKey, int]:
        """The numbers of the values that clients hold."""
        return {key: known.number for key, known in self._known.items()}

    def listen(self, notify: Callable[[str], None], tick: Callable[[int, int], None]) -> None:
        """`notify` gets an estimate before an expensive step starts; `tick` gets (done, total) during it."""
        self._comparisons.listen(notify, tick)

    def stream(self, purpose: str, client: int = -1) -> Stream:
        return stream(self.seed, purpose, self.round, client)

    def cohort(self, labels: Labels | Held | None = None) -> tuple[int, ...]:
        known, smallest = None if isinstance(labels, Held) else labels, self.protection.smallest_group
        if self._drawn_from is None:
            return draw_cohort(self.sampling, self.clients, known, smallest, self.seed, self.round)
        together = dict.fromkeys(self._drawn_from, 0)
        drawn = draw_cohort(self.sampling, self._drawn_from, together, smallest, self.seed, self.round)
        present = tuple(client for client in drawn if client in self._participants.present)
        if not present:
            raise TooFewClients((0,), smallest)
        return present

    def _record(self, operation: str) -> Callable[..., None]:
        return partial(self.transcript.add, self.round, operation)

    # --- compute

    def compute(
        self, task: Task, params: Mapping[str, Parameter] | None = None, which: Labels | Held | None = None, on: Sequence[int] | None = None
    ) -> Held:
        self._finish()
        self._participants.greet_lost()
        again = len(self._registry.unopened) if self.protection.secure and self._named_by_choice else 0
        parameters = TaskParameters(renamed(params or {}, again) if again else params or {}, which)
        clients = self._computing(parameters, on)
        private, inputs = self._ledger.private(task), sources(parameters.values, parameters.which)
        noise = None if self.privacy_ledger is None else m.NoisySteps(**vars(self.privacy_ledger.noise))
        self._ledger.begin(private, inputs, self._ledger.reads(private, clients), clients, self.round)
        key, number = HeldKey(type(private).__name__), self._rounds.next_number()
        spread = spread_of(private)
        for source in parameters.held:
            spread = max(spread, self._known[source.key].spread)
        asks: dict[int, m.Compute] = {}
        traced: dict[int, dict[int, bytes]] = {}
        settings, record = settings_of(task), self._record("compute")
        for chosen, members, ask in parameters.requests(self._request(task, number, noise), clients, self.numbers()):
            asks |= dict.fromkeys(members, ask)
            if self.protection.secure:
                names = alternatives_of(ask, request_digest(ask)) if self._named_by_choice else {-1: request_digest(ask)}
                traced |= {client: self._traced(names, parameters, client) for client in members}
            payload, places = parameters.recorded(chosen)
            if payload:
                self.transcript.unprotected.down(*parameters.unprotected(chosen), len(members))
                context = {"task": key.name, "settings": settings, "which": list(chosen)} | ({"blind": places} if places else {})
                record("parameters", "server", "clients", members, payload, readers=("server", "clients"), context=context)
        before = len(self.refusals)
        form = (type(private), tuple(private.parts), parameters.shapes) if self._together else ()
        layout = self._layouts.get(form)
        at_model = any(not isinstance(value, Held) or self._known[value.key].at_model for value in parameters.values.values())
        taken = self._known[parameters.which.key].chosen if isinstance(parameters.which, Held) else {}
        value = KnownValue(number, layout or PartLayout(), traced, frozenset(), at_model, kinds_of(private), spread=spread)
        self._known[key] = replace(value, chooses=getattr(private, "chooses", ""), chosen=taken)
        held = Held(key, tuple(sorted(asks)), tuple(private.parts))
        self._registry.waiting, self._unanswered, key.awaited = asks, WaitingTask(held, private, inputs, form, before), self._finish
        if layout is None:
            self._finish()
        return held

    def _finish(self) -> None:
        """Ask for the computation that no sum took along, if one waits. Every operation but the sum over its result begins with this, and
        so does who reads which clients hold the result.

        Clients that went away meanwhile are not asked. Raises `BudgetsSpent`, and `TrainingDiverged` if no client has a result.
        """
        unanswered = self._unanswered
        if unanswered is None:
            return
        held, task = unanswered.held, unanswered.task
        asks, answers = self._registry.waiting, self._registry.computed
        for gone in asks.keys() - self._registry.present:
            del asks[gone]
        self._unanswered, self._registry.waiting, self._registry.computed, held.key.awaited = None, {}, {}, None
        layouts = self._declared(answers | self._ask(asks, "compute"), "compute", task.parts)
        held.key.absent = frozenset(held.asked).difference(layouts)
        if not layouts:
            self._check_budgets(f"compute of {held.key.name}", held.asked, unanswered.refusals)
            raise TrainingDiverged(f"{held.key.name} in round {self.round}: no client has a result")
        layout = majority(list(layouts.values())) or PartLayout()
        odd = frozenset(client for client, declared in layouts.items() if declared != layout)
        self._known[held.key] = replace(self._known[held.key], layout=layout, odd=odd)
        self._layouts |= {unanswered.form: layout} if unanswered.form else {}
        self._ledger.enter(held, task, unanswered.inputs, self._ledger.reads(task, sorted(layouts)))

    def _settle_waiting(self) -> None:
        """As `_finish`, where nobody needs the result: what it raises is raised where somebody does."""
        with suppress(BudgetsSpent, TrainingDiverged):
            self._finish()

    def _declared(self, answers: Mapping[int, m.Answer], stage: str, parts: Collection[str]) -> dict[int, PartLayout]:
        """The layouts of the clients that have results. One that declares what no result has is recorded, and left out."""
        layouts: dict[int, PartLayout] = {}
        known: dict[m.Answer, PartLayout | None] = {}  # most clients answer alike
        for client, answer in answers.items():
            try:
                if answer not in known:
                    known[answer] = declared(answer, parts)
            except MalformedMessage:
                self.refusals.append((client, stage, "malformed"))
            else:
                if (layout := known[answer]) is not None:
                    layouts[client] = layout
        return layouts

    def _check_budgets(self, what: str, asked: Collection[int], before: int) -> None:
        """Raises `BudgetsSpent` if each of the clients that were `asked` has refused since `before` because its budget is spent."""
        spent = {client for client, _, code in self.refusals[before:] if code == "over-budget"}
        if asked and spent >= set(asked):
            raise BudgetsSpent(what, asked)

    def asks(
        self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int]
    ) -> dict[int, m.Compute]:  # fmt: skip
        """The requests that `compute` would send to these clients. For measuring."""
        requests = TaskParameters(params, which).requests(self._request(task, 0, None), clients, self.numbers())
        return {client: ask for _, members, ask in requests for client in members}

    def _computing(self, parameters: TaskParameters, on: Sequence[int] | None) -> list[int]:
        """The clients that compute. Raises `InputError` for one that lacks a parameter."""
        clients = self._participants.among(on)
        if isinstance(parameters.which, Held):
            choosing = frozenset(parameters.which.clients)
            clients = [client for client in clients if client in choosing]
        for value in parameters.values.values():
            if isinstance(value, Held):
                missing = sorted(set(clients).difference(value.clients))
                if missing:
                    raise InputError(f"clients {missing} do not hold {value.key.name}")
        return clients

    def _request(self, task: Task, number: int, noise: m.NoisySteps | None) -> m.Compute:
        """A request without parameters. Values that own parts of sums refer to stay live, too."""
        live = tuple(sorted(self.numbers().values()))
        return m.Compute(self.session, self.round, self.seed, number, live, m.Carried(task), (), None, noise)

    def _traced(self, names: Mapping[int, bytes], parameters: TaskParameters, client: int) -> dict[int, bytes]:
        """The names of what a client computes, by the label of the model that it chooses, from those of its request and of the held values
        that go into its task."""
        own = [] if self.protection.small_clusters == "local" else parameters.own
        untraced = [UNTRACED for addend in own if client in addend.clients]
        earlier = [self._known[source.key].models[client] for source in parameters.held]
        if -1 in names and any(len(known) > 1 for known in earlier):
            labels = {label for known in earlier for label in known if label >= 0}
            names = dict.fromkeys(labels, names[-1])
        return {
            label: trace([name, *untraced, *(known.get(label, known.get(-1, UNTRACED)) for known in earlier)])
            for label, name in names.items()
        }

    def _settle(self, held: Held, clients: Sequence[int], operation: str) -> None:
        """Charge a release of single values. Raises `InputError` for an operation that has no private form."""
        if operation in self._without_form:
            raise InputError(
                f"{operation}: releases single clients' values, which have no private form under privacy.unit = 'client'; means have, and "
                "rows to be compared with privacy.local = ['gram']"
            )
        if clients:
            self._ledger.settle(held, clients, operation, self.round)

    # --- gram

    def gram(self, held: Held, then: Then, against: Held | None = None, on: Sequence[int] | None = None) -> Released:
        self._finish()
        self._participants.greet_lost()
        clients = [] if against is not None and on is not None and not on else self._owners(held, on)
        known = self._known[held.key] if clients else KnownValue(0, PartLayout(), {}, at_model=False)
        origin = Origin(size=known.at_model, kinds=tuple(known.kinds.items()))
        if clients and self._strict and not may_leave(self.protection, "gram", held.part, (0, "f"), origin, self._noisy_rows):
            raise InputError(
                f"gram: {held.part} would be compared in the clear, which clients refuse under protection.sum = {self.protection.sum!r}, "
                f"min_cohort = {self.protection.smallest_sum}; name a transform or 'ckks' in protection.gram"
            )
        self._settle(held, clients, "gram")
        record, began = self._record("gram"), perf_counter()
        layout = known.layout.some(held.parts)
        self.transcript.unprotected.up(layout.size, layout.nbytes, len(clients))
        try:
            return self._comparisons.gram(
                held, known.number, clients, self._ledger.with_noise(then), against, record, layout.shape(held.part)
            )
        finally:
            self.protection_seconds += perf_counter() - began

    def extendable(self, held: Held) -> bool:
        return not self.epochs.of(held).ended

    def close(self, held: Held) -> None:
        self._comparisons.close(held)

    def end(self) -> None:
        """End the run: close all clustering epochs, and have the key holder drop their keys."""
        self._settle_waiting()
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
        together = self._unanswered is not None and self._unanswered.held.key is held.key and not isinstance(groups, Held)
        if not together:
            self._finish()
        self._participants.greet_lost()
        clients, protection = self._owners(held, on), self.protection
        oblivious = protection.sums.oblivious
        check_mean(protection, weights, groups, k)
        known = self._known[held.key]
        if not known.layout.parts:
            raise InputError(f"mean: clients hold {held.key.name} in different shapes")
        self.refusals.extend((client, "mean", "malformed") for client in clients if client in known.odd)
        clients = [client for client in clients if client not in known.odd]
        layout = known.layout.some(held.parts)
        weight = public_weights(weights, clients)
        labels = self._group_labels(None if oblivious else groups, clients, k)
        clients = [client for client in clients if client in labels]
        if protection.secure and any(len(several) > 1 for several in labels.values()):
            raise InputError(f"mean: overlapping groups under sum = {protection.sum!r}; the difference of two sums would be one client's")
        if weights == "examples" and self.privacy_ledger is not None:
            raise InputError("mean: weights = 'examples' under privacy.unit = 'sample' would release sample counts; use 'equal'")
        contributions = tuple(ClientContribution(client, {}, weight[client] or 1.0, labels[client]) for client in clients)
        sent = {client: known.names(client) for client in clients} if protection.secure else {}
        number, public = self._next_call(), weights != "examples"
        call = SumCall(self.turn, number, contributions, k or 1, protection.smallest_group, public, sent, models)
        choices = groups if oblivious and isinstance(groups, Held) else None
        noise = self._noise_inside(held)
        self._ledger.settle_sums(held, call, choices, protection.small_clusters, self.round, noise)
        # how a result lies in its vector is known afterwards, if clients have yet to compute it
        summed = PartLayout(((WHOLE, "<f8", (layout.size,)),)) if together else layout
        asked, before = Asked(known.number, held.parts, summed, weight, noise, known.spread), len(self.refusals)
        means: tuple[GroupMean | None, ...] = ()
        try:
            means = self._means(held, call, asked, groups)
        except TooFewClients:
            self._finish()
            if self._known[held.key].layout.some(held.parts).size == layout.size:
                self._check_budgets(f"mean of {held.key.name}", clients, before)
                raise
        except ProtocolError:  # the round ends here
            self._settle_waiting()
            raise
        self._finish()
        made = self._known[held.key].layout.some(held.parts)
        if made.size != layout.size:  # results of another size than before, which fit no sum that was asked for
            return self.mean(held, weights, groups, k, on, models)
        means = tuple(_laid_out(mean, made) for mean in means) if together else means
        contributors = set[int]().union(*(mean.contributors for mean in means if mean is not None))
        added = 0 if public else 1  # a private weight is sent, too
        self.transcript.unprotected.up(made.size + added, made.nbytes + 8 * added, len(contributors))
        return means

    def _means(self, held: Held, call: SumCall, asked: Asked, groups: Labels | Held | None) -> tuple[GroupMean | None, ...]:
        """The means of a call, timed."""
        oblivious, began = self.protection.sums.oblivious, perf_counter() - self._registry.computing_seconds
        try:
            if self.protection.small_clusters == "local" and not oblivious:
                return self._mean_or_local(held, call, asked, groups)
            chosen = m.HeldValue(self._known[groups.key].number, groups.part) if oblivious and isinstance(groups, Held) else None
            return self._sums.means(call, asked, chosen or (m.Picks((0,), False) if oblivious else None), self._record("mean"))
        finally:
            self.protection_seconds += perf_counter() - self._registry.computing_seconds - began

    def _noise_inside(self, held: Held) -> SumNoise | None:
        """What clients have to add to a value inside secure sums, if anything. Raises `InputError` where sums are taken in another way."""
        noise = self._ledger.inside(held)
        if noise is not None and self.protection.sum not in ("secagg", "one_message"):
            raise InputError(
                f"mean: {held.key.name} carries no noise of its own (privacy.noise = 'shared'); it leaves in secure sums only, not under "
                f"protection.sum = {self.protection.sum!r}"
            )
        return noise

    def _group_labels(self, groups: Labels | Held | None, clients: Sequence[int], k: int | None) -> dict[int, tuple[int, ...]]:
        if groups is None:
            return dict.fromkeys(clients, (0,))
        if isinstance(groups, Held):
            return self._chosen_labels(groups, k, clients)
        return label_sets(groups, clients, k, "mean: groups")[0]

    def _chosen_labels(self, held: Held, k: int | None, on: Sequence[int] | None = None) -> dict[int, tuple[int, ...]]:
        """The labels that clients chose, without those of clients whose choice is impossible."""
        chosen: dict[int, tuple[int, ...]] = {}
        for client, values in self.gather(held, on=on).items():
            try:
                chosen |= label_sets({client: values[held.part]}, [client], k, held.part)[0]
            except InputError:
                self.refusals.append((client, "gather", "malformed"))
        known = self._known[held.key]
        if held.part == known.chooses or "choice" in known.kinds.values():
            taken = {client: labels[0] for client, labels in chosen.items() if len(labels) == 1}
            self._known[held.key] = replace(known, chosen={**known.chosen, **taken})
        return chosen

    def _mean_or_local(self, held: Held, call: SumCall, asked: Asked, groups: Labels | Held | None) -> tuple[GroupMean | None, ...]:
        """Means, and for small groups each member's own value."""
        counts = call.counts()
        means: list[GroupMean | None] = [None] * call.k
        if any(count >= call.min_cohort for count in counts):
            means = list(self._sums.means(call, asked, None, self._record("mean")))
        sizes = group_sizes(groups, call, self.clients)
        for label, count in enumerate(counts):
            if count > 0 and sizes[label] < call.min_cohort:
                own = Held(held.key, tuple(member.client for member in call.members(label)), held.parts)
                means[label] = GroupMean({part: Shared(own=(OwnAddend(own[part]),)) for part in held.parts}, None, count)
        return tuple(means)

    # --- relay, gather

    def relay(self, held: Held, to: Mapping[int, Sequence[int]] | Held | None = None) -> Held:
        self._finish()
        self._participants.greet_lost()
        recipients = [client for client in self.clients if to is None or client in (to.clients if isinstance(to, Held) else to)]
        present = self._owners(held, None)
        known, arrives = self._known[held.key], self._rounds.next_number()
        asked: dict[int, set[int]] = {client: set(present) - {client} for client in recipients}
        if isinstance(to, Held):
            self._settle(to, recipients, "relay")  # first, because these choices decide who pays for `held`
            asked = requested_senders(self._registry, self.session, recipients, self._known[to.key].number, to.parts)
        elif to is not None:
            self._participants.check_known(sorted({*to, *(sender for senders in to.values() for sender in senders)}))
            asked = {client: set(to[client]) for client in recipients}
        wanted = {client: sorted(senders & set(present)) for client, senders in asked.items()}
        senders = [sender for sender in present if any(sender in senders for senders in wanted.values())]
        self._settle(held, senders, "relay")
        what = Relay(known.number, arrives, held.parts, present, wanted, requested=to is not None)
        took = relay(self._registry, self.session, what, self._record("relay"), self._witness)
        key = HeldKey(f"relayed {held.key.name}")
        self._known[key] = KnownValue(arrives, PartLayout(), {client: {-1: UNTRACED} for client in took})
        relayed = Held(key, took, held.parts)
        copies = sum(map(len, wanted.values()))
        layout = known.layout.some(held.parts)
        if to is not None:
            self.transcript.unprotected.up(len(present), len(present), len(recipients))  # one bit of a byte for each sender
        self.transcript.unprotected.up(layout.size, layout.nbytes, copies)
        self.transcript.unprotected.down(layout.size, layout.nbytes, copies)
        self._ledger.public(relayed)
        return relayed

    def labels(self, held: Held) -> dict[int, int] | None:
        if self.protection.sums.oblivious:
            return None
        return {client: labels[0] for client, labels in self._chosen_labels(held[held.part], None).items() if len(labels) == 1}

    def gather(self, held: Held, on: Sequence[int] | None = None) -> Mapping[int, Mapping[str, Array]]:
        self._finish()
        self._participants.greet_lost()
        clients = self._owners(held, on)
        self._settle(held, clients, "gather")
        known = self._known[held.key]
        ask = m.Give(self.session, "gather", known.number, held.parts, "", False)
        layout = {name: (dtype, shape) for name, dtype, shape in known.layout.parts}
        released: dict[int, dict[str, Array]] = {}
        for client, answer in sorted(self._ask(dict.fromkeys(clients, ask), "gather").items()):
            try:
                if not isinstance(answer, m.Given) or tuple(array.name for array in answer.values) != held.parts:
                    raise MalformedMessage
                values = {array.name: np.asarray(array.value) for array in answer.values}
                for name, value in values.items():
                    declared = (value.dtype.str, value.shape)
                    if declared != layout.get(name, declared) or not np.isfinite(value).all():
                        raise MalformedMessage
                released[client] = values
                sent = PartLayout.of(values)
                self.transcript.unprotected.up(sent.size, sent.nbytes)
            except MalformedMessage:
                self.refusals.append((client, "gather", "malformed"))
        record = self._record("gather")
        record("+".join(held.parts), "clients", "server", list(released), list(released.values()), readers=("server",))
        return released

    # --- sums

    def product(self, shared: Shared, number: Shared, on: int | None = None) -> Shared:
        if at_server(shared, number):
            return shared * float(number.value().item())
        return Shared(transformed=(self._folded("product", shared.transformed, number.transformed, on),))

    def fold(self, shared: Shared, on: int | None = None) -> Shared:
        self._finish()
        if len(shared.transformed) > 1:
            shared = Shared(shared.clear, (self._folded("fold", shared.transformed, (), on),), shared.own)
        if len(shared.own) < 2:
            return shared
        number, key = self._rounds.next_number(), HeldKey("own")
        self._participants.greet_lost()
        addends = tuple(m.OwnPart(self._known[own.held.key].number, own.held.part, own.factor) for own in shared.own)
        clients = sorted({client for own in shared.own for client in own.held.clients} & set(self.clients))
        answers = self._ask(dict.fromkeys(clients, m.AddUp(self.session, number, addends)), "add up")
        done = {client: layout for client, layout in self._declared(answers, "add up", ("own",)).items() if layout.parts}
        if not done:
            raise TooFewClients((), 1)  # no client with an own part is present
        spread = max(self._known[own.held.key].spread for own in shared.own)
        models = {client: {-1: UNTRACED} for client in done}
        self._known[key] = KnownValue(number, majority(list(done.values())) or PartLayout(), models, spread=spread)
        total = Held(key, tuple(sorted(done)), ("own",))
        self._ledger.derive(total, [own.held for own in shared.own])
        return Shared(shared.clear, shared.transformed, (OwnAddend(total),))

    def _folded(
        self, operation: str, terms: Sequence[Transformed], times: Sequence[Transformed], on: int | None
    ) -> Transformed:  # fmt: skip
        """One transformed part in place of several. Client `on` computes it if it is present, else another one."""
        self._finish()
        self._participants.greet_lost()
        folding = Folding(operation, terms, times, f"apply/{self.turn}/{self._next_call()}")
        folded = self._sums.folded(folding, sorted(self.clients, key=lambda client: client != on), self._record(operation))
        if folded is None:
            raise ClientsLost([] if on is None else [on])
        return folded

    # --- checkpoints

    @property
    def checkpoint_due(self) -> bool:
        """Whether half of what a resumed run skips has been used since the last checkpoint."""
        return self._rounds.checkpoint_due(self.epochs.count)

    def saved(self) -> dict[str, Any]:
        """The state for a checkpoint. It has no client's value, and no secret but the session's name."""
        self._settle_waiting()
        agreement = None if self._agreement is None else self._agreement.saved()
        moving = {} if self._adaptive is None else {"clip_norm": self._adaptive.norm}
        counted = {**self._rounds.saved(self.epochs.count), "bare": asdict(self.transcript.unprotected)}
        counted["unopened"] = sorted(self._registry.unopened)
        return {"session": self.session, **counted, "removed": sorted(self.removed), "agreement": agreement, **moving}

    def restore(self, saved: Mapping[str, Any], resumed: int | None = None) -> None:
        """Continue from `saved` in a new process, after the `resumed`-th interruption of the run (by default the first since `saved`).

        `Rounds.restore` says what is skipped.
        """
        if saved["session"] != self.session:
            raise InputError("session: is not that of the checkpoint; give it when the federation is built")
        self.epochs.count = self._rounds.restore(saved, resumed)
        self._ledger.restored = resumed != 0
        self.transcript.unprotected = Unprotected(**saved["bare"])
        if self._adaptive is not None:
            self._adaptive.norm = saved["clip_norm"]
        self._registry.remove(saved["removed"])
        self._registry.unopened.update(saved.get("unopened", ()))
        if self._agreement is not None and saved["agreement"] is not None:
            self._agreement.restore(saved["agreement"])

    def known(self, key: HeldKey) -> dict[str, Any]:
        """What the server knows of the values under a key, for a checkpoint."""
        self._settle_waiting()
        return self._known[key].saved()

    def know(self, key: HeldKey, saved: Mapping[str, Any]) -> None:
        """The inverse of `known`."""
        self._known[key] = KnownValue.restored(saved)


def _laid_out(mean: GroupMean | None, layout: PartLayout) -> GroupMean | None:
    """A mean of whole vectors by the parts of these."""
    if mean is None:
        return None
    parts = layout.split(mean.parts[WHOLE].value())
    return replace(mean, parts={name: Shared(part) for name, part in parts.items()})
