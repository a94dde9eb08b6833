"""The server: the operations of `contract.operations`, over any transport.

A client that does not answer in time drops out of the operation: values are held by the clients that computed them, and sums are over the
clients that contributed. A comparison that lost a client raises `ClientsLost`, and the same step can be taken again, because algorithms are
functions of their state. A simulated and a deployed federation write the same transcript.
"""

from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import Literal

import numpy as np

from ..contract.calls import Contribution, SumCall
from ..contract.handles import GroupMean, Held, HeldKey, Labels, OwnAddend, PartLayout, Released, Shared, Transformed, at_server, label_sets
from ..contract.operations import Parameter, Then
from ..contract.transcript import settings_of
from ..engine import Task
from ..errors import InputError, TrainingDiverged
from ..protocols.errors import MalformedMessage, TooFewClients
from ..types import Array
from . import messages as m
from .cohort import check_mean, group_sizes, public_weights
from .known_values import Known
from .parameters import TaskParameters
from .protections import Asked, Folding
from .registry import BudgetsSpent, ClientsLost, EpochEnded, KeyHolderLost, majority
from .relay import Relay, relay, requested_senders
from .release_policy import kinds_of, may_leave
from .server_state import ServerState
from .transport import Transport
from .values import UNTRACED, Origin, trace
from .work import request_digest

__all__ = ["BudgetsSpent", "ClientsLost", "EpochEnded", "KeyHolderLost", "FederationServer", "Transport"]


class FederationServer(ServerState):
    """The operations of a federation. `ServerState` explains the arguments."""

    # --- compute

    def compute(
        self, task: Task, params: Mapping[str, Parameter] | None = None, which: Labels | Held | None = None, on: Sequence[int] | None = None
    ) -> Held:
        self._greet_lost()
        given = TaskParameters(params or {}, which)
        clients = self._computing(given, on)
        private, noise = self._ledger.private(task)
        self._ledger.begin(private, given, clients, self._round)
        key, number = HeldKey(type(private).__name__), self._number()
        asks: dict[int, m.Ask] = {}
        traced: dict[int, bytes] = {}
        settings, record = settings_of(task), self._record("compute")
        for chosen, members, ask in given.requests(self._request(task, number, noise), clients, self.numbers()):
            asks |= dict.fromkeys(members, ask)
            if self.protection.secure:
                name = request_digest(ask)
                traced |= {client: trace([name, *self._earlier(given, client)]) for client in members}
            payload, places = given.recorded(chosen)
            if payload:
                self.transcript.unprotected.down(*given.unprotected(chosen), len(members))
                context = {"task": key.name, "settings": settings, "which": list(chosen)} | ({"blind": places} if places else {})
                record("parameters", "server", "clients", members, payload, readers=("server", "clients"), context=context)
        before = len(self.refusals)
        answers = self._ask(asks, "compute")
        layouts = {client: answer.layout for client, answer in answers.items() if isinstance(answer, m.Computed) and answer.result}
        if not layouts:
            self._check_budgets(f"compute of {key.name}", asks, before)
            raise TrainingDiverged(f"{key.name} in round {self._round}: no client has a result")
        layout = majority(list(layouts.values())) or PartLayout()
        at_model = any(not isinstance(value, Held) or self._known[value.key].at_model for value in given.values.values())
        odd = frozenset(client for client, declared in layouts.items() if declared != layout)
        self._known[key] = Known(number, layout, traced, odd, at_model, kinds_of(private))
        held = Held(key, tuple(sorted(layouts)), tuple(private.parts))
        self._ledger.enter(held, private, given)
        return held

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

    def _computing(self, given: TaskParameters, on: Sequence[int] | None) -> list[int]:
        """The clients that compute. Raises `InputError` for one that lacks a parameter."""
        clients = self._on(on)
        if isinstance(given.which, Held):
            choosing = frozenset(given.which.clients)
            clients = [client for client in clients if client in choosing]
        for value in given.values.values():
            if isinstance(value, Held):
                missing = sorted(set(clients).difference(value.clients))
                if missing:
                    raise InputError(f"clients {missing} do not hold {value.key.name}")
        return clients

    def _request(self, task: Task, number: int, noise: m.NoisySteps | None) -> m.Compute:
        """A request without parameters. Values that own parts of sums refer to stay live, too."""
        live = tuple(sorted(self.numbers().values()))
        return m.Compute(self.session, self._round, self.seed, number, live, m.Carried(task), (), None, noise)

    def _earlier(self, given: TaskParameters, client: int) -> list[bytes]:
        """The names of the held values that go into a client's task, in the order in which the client finds them."""
        own = [] if self.protection.small_clusters == "local" else given.own
        return [*(UNTRACED for one in own if client in one.clients), *(self._known[one.key].models[client] for one in given.held)]

    # --- gram

    def gram(self, held: Held, then: Then, against: Held | None = None, on: Sequence[int] | None = None) -> Released:
        self._greet_lost()
        clients = [] if against is not None and on is not None and not on else self._holders(held, on)
        known = self._known[held.key] if clients else Known(0, PartLayout(), {}, at_model=False)
        origin = Origin(size=known.at_model, kinds=tuple(known.kinds.items()))
        if clients and self._strict and not may_leave(self.protection, "gram", held.part, 0, origin, self._noisy_rows):
            raise InputError(
                f"gram: {held.part} would be compared in the clear, which clients refuse under protection.sum = {self.protection.sum!r}, "
                f"min_cohort = {self.protection.smallest_sum}; name a transform or 'ckks' in protection.gram"
            )
        self._ledger.settle(held, clients, "gram", self._round)
        record, began = self._record("gram"), perf_counter()
        layout = known.layout.some(held.parts)
        self.transcript.unprotected.up(layout.size, layout.nbytes, len(clients))
        try:
            return self._comparisons.gram(
                held, known.number, clients, self._ledger.with_noise(then), against, record, layout.shape(held.part)
            )
        finally:
            self.protection_seconds += perf_counter() - began

    def close(self, held: Held) -> None:
        self._comparisons.close(held)

    def end(self) -> None:
        """End the run: close all clustering epochs, and have the key holder drop their keys."""
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
        clients, protection = self._holders(held, on), self.protection
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
        if weights == "examples" and self.accounts is not None:
            raise InputError("mean: weights = 'examples' under privacy.unit = 'sample' would release sample counts; use 'equal'")
        contributions = tuple(Contribution(client, {}, weight[client] or 1.0, labels[client]) for client in clients)
        sent = {client: known.models.get(client, UNTRACED) for client in clients} if protection.secure else {}
        number, public = self._next_call(), weights != "examples"
        call = SumCall(self._turn, number, contributions, k or 1, protection.smallest_group, public, sent, models)
        choices = groups if oblivious and isinstance(groups, Held) else None
        noise = self._ledger.inside(held, protection.sum)
        self._ledger.settle_sums(held, call, choices, protection.small_clusters, self._round, noise)
        asked, began, before = Asked(known.number, held.parts, layout, weight, noise), perf_counter(), len(self.refusals)
        try:
            if protection.small_clusters == "local" and not oblivious:
                means = self._mean_or_local(held, call, asked, groups)
            else:
                choice = None if choices is None else m.Mine(self._known[choices.key].number, choices.part)
                blocks = m.Picks((0,), False) if oblivious else None
                means = self._sums.means(call, asked, choice or blocks, self._record("mean"))
        except TooFewClients:
            self._check_budgets(f"mean of {held.key.name}", clients, before)
            raise
        finally:
            self.protection_seconds += perf_counter() - began
        contributors = set[int]().union(*(mean.contributors for mean in means if mean is not None))
        added = 0 if public else 1  # a private weight is sent, too
        self.transcript.unprotected.up(layout.size + added, layout.nbytes + 8 * added, len(contributors))
        return means

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
                own = Held(held.key, tuple(one.client for one in call.members(label)), held.parts)
                means[label] = GroupMean({part: Shared(own=(OwnAddend(own[part]),)) for part in held.parts}, None, count)
        return tuple(means)

    # --- relay, gather

    def relay(self, held: Held, to: Mapping[int, Sequence[int]] | Held | None = None) -> Held:
        self._greet_lost()
        recipients = [client for client in self.clients if to is None or client in (to.clients if isinstance(to, Held) else to)]
        present = self._holders(held, None)
        known, arrives = self._known[held.key], self._number()
        asked: dict[int, set[int]] = {client: set(present) - {client} for client in recipients}
        if isinstance(to, Held):
            self._ledger.settle(to, recipients, "relay", self._round)  # first, because these choices decide who pays for `held`
            asked = requested_senders(self._registry, self.session, recipients, self._known[to.key].number, to.parts)
        elif to is not None:
            self._check_known(sorted({*to, *(sender for senders in to.values() for sender in senders)}))
            asked = {client: set(to[client]) for client in recipients}
        wanted = {client: sorted(senders & set(present)) for client, senders in asked.items()}
        senders = [sender for sender in present if any(sender in senders for senders in wanted.values())]
        self._ledger.settle(held, senders, "relay", self._round)
        what = Relay(known.number, arrives, held.parts, present, wanted, requested=to is not None)
        took = relay(self._registry, self.session, what, self._record("relay"), self._witness)
        key = HeldKey(f"relayed {held.key.name}")
        self._known[key] = Known(arrives, PartLayout(), dict.fromkeys(took, UNTRACED))
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
        self._greet_lost()
        clients = self._holders(held, on)
        self._ledger.settle(held, clients, "gather", self._round)
        known = self._known[held.key]
        ask = m.Give(self.session, "gather", known.number, held.parts, "", False)
        layout = {name: (dtype, shape) for name, dtype, shape in known.layout.parts}
        released: dict[int, dict[str, Array]] = {}
        for client, answer in sorted(self._ask(dict.fromkeys(clients, ask), "gather").items()):
            if isinstance(answer, m.Given) and tuple(one.name for one in answer.values) == held.parts:
                try:
                    values = {one.name: np.asarray(one.value) for one in answer.values}
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
        if len(shared.transformed) > 1:
            shared = Shared(shared.clear, (self._folded("fold", shared.transformed, (), on),), shared.own)
        if len(shared.own) < 2:
            return shared
        number, key = self._number(), HeldKey("own")
        self._greet_lost()
        addends = tuple(m.OwnPart(self._known[own.held.key].number, own.held.part, own.factor) for own in shared.own)
        clients = sorted({client for own in shared.own for client in own.held.clients} & set(self.clients))
        answers = self._ask(dict.fromkeys(clients, m.AddUp(self.session, number, addends)), "add up")
        done = {client: answer.layout for client, answer in answers.items() if isinstance(answer, m.Computed) and answer.parts}
        if not done:
            raise TooFewClients((), 1)  # no client with an own part is present
        self._known[key] = Known(number, majority(list(done.values())) or PartLayout(), dict.fromkeys(done, UNTRACED))
        total = Held(key, tuple(sorted(done)), ("own",))
        self._ledger.derive(total, [own.held for own in shared.own])
        return Shared(shared.clear, shared.transformed, (OwnAddend(total),))

    def _folded(
        self, operation: str, terms: Sequence[Transformed], times: Sequence[Transformed], on: int | None
    ) -> Transformed:  # fmt: skip
        """One transformed part in place of several. Client `on` computes it if it is present, else another one."""
        self._greet_lost()
        folding = Folding(operation, terms, times, f"apply/{self._turn}/{self._next_call()}")
        found = self._sums.folded(folding, sorted(self.clients, key=lambda one: one != on), self._record(operation))
        if found is None:
            raise ClientsLost([] if on is None else [on])
        return found
