"""Secure aggregation, one sum for each group of clients.

Guarantee: the server learns each group's sum over its survivors (of whom there are at least the minimum cohort size) and nothing else about
a value, see `protocols.secagg`. Every sum binds to the list of what its members were sent, which is one model unless the algorithm says in
public that there are more. The values of one round go into sums over one set of clients (`summed_once`).
Reveals: who is in which group and who drops out, the sums, how many clients clipped. Sums of successive rounds over clients that differ by
one show, by their difference, what nearly equal models make of that client's data. Where the list has k models, a server that plants a
private one as one of the k is not stopped; what tasks keep in a client's memory is not traced to the models it came from.
Active attacks (`attacks.active`): the sum and nothing else: `second_sum`, `computed_again`, `derived_copy`, `stale_slot`,
`split_survivors`, `second_unmasking`, `mode_downgrade`, `false_accusation`, `false_complaints`, `sybils`, `relay_to_accomplice`; the
minimum cohort size: `smaller_minimum`, `few_survivors`, `accomplices`; what sums bind to: `other_model`, `listed_model`, `other_task`,
`switched_value`, `unequal_weights`; by subtraction: `next_round`.
Source: Bonawitz et al. 2017, Bell et al. 2020.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from ..contract.calls import MOST_WEIGHT, Contribution, Recorder, SumCall, large_enough
from ..contract.handles import GroupMean, Shared
from ..contract.protection import SecureSum
from ..errors import InputError
from ..federation import messages as m
from ..federation.handler import Apply
from ..federation.protections import Asked, ClientParts, Layout, ServerParts, joined, size_of
from ..federation.values import UNTRACED
from ..privacy.client_level import BETA, share
from ..protocols import secagg
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import LocalError, MalformedMessage, RemoteError, SumFailed, TooFewClients
from ..protocols.keys import Roster
from ..protocols.mechanisms import SkellamPlan
from ..protocols.secagg import MaskKey, Policy, ServerStage, Slot, Sum, Terms
from ..protocols.secagg.messages import Adverts, Deliver, Invite, Unmask, decode_server, fewest_survivors
from ..types import Array, check_array
from .buckets import Dealings
from .summed_once import Survivors, check_proposed, pinned, survivors_of, write_down

__all__ = ["OBLIVIOUS", "ClientSum", "SecureSums", "ServerSum", "bound", "check_balance", "group_mean"]

OBLIVIOUS = -1
"""The label of a sum whose groups the server does not know."""
FEWEST_LEVELS = 64
"""A weight quantised to fewer levels distorts its client's share by more than about one per cent."""
STAGES = tuple(ServerStage)
ATTEMPTS = 1 << 16
"""The slots of one sum: the second attempt has the one after the first, and so on."""
Kind = Literal["sum", "counts", "blocks"]
Exchange = Callable[[Mapping[int, m.Step], str], Mapping[int, bytes]]
"""Steps by client and the name of the stage, to what those who answered said."""


# --- the client half


class ClientSum:
    """A client's part: its machine between two messages, what it brings, and the share of noise that it adds."""

    kinds: ClassVar[tuple[str, ...]] = ("sum",)

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts
        self._settings, self._store, self._values, self._entropy = parts.settings, parts.store, parts.values, parts.entropy
        self._dealings = Dealings(parts)
        self.deal = self._dealings.deal

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[Apply, Any, m.Given]:
        """A single update never leaves."""
        yield from ()
        raise RemoteError("forbidden")

    def step(self, ask: m.Step) -> m.Stepped:
        """One message of a sum, and the client's answer."""
        settings = self._settings
        if ask.kind not in self.kinds:
            raise RemoteError("forbidden")
        name = f"sum/{ask.slot[0]}.{ask.slot[1]}"
        read = partial(secagg.Client.from_bytes, identity=settings.identity, roster=self._roster(), entropy=self._entropy)
        message, rounds = decode_server(ask.said), self._values.origin(ask.held).rounds
        if isinstance(message, Invite | Adverts):
            check_proposed(self._store, ask.kind, rounds, message.terms.cohort, complete=False)
        survivors = survivors_of(message)
        if survivors is not None:
            check_proposed(self._store, ask.kind, rounds, survivors, complete=True)
        machine = self._store.load(name, read)
        begun = machine is not None
        if machine is None:
            machine = self._machine(ask)
        else:
            self._check_named(ask, machine)
        pinned(self._store, name, rounds, begun)
        contributions: list[secagg.Contribution] = []
        if machine.wants_values and isinstance(message, Deliver):
            contributions = self._contributions(ask, machine)
        try:
            said = machine.receive(ask.said, *contributions)
        except LocalError:  # it is dead, and its secrets are gone
            self._store.drop(name)
            raise
        if isinstance(message, Unmask) and survivors is not None:
            write_down(self._store, ask.kind, rounds, survivors)
        following = machine.next_mask_key()
        if following is not None:
            self._store.put(f"mask/{following.slot[0]}.{following.slot[1]}", following.to_bytes())
        if machine.stage is secagg.ClientStage.DONE:
            self._store.drop(name)
            self._store.drop(f"{name}/rounds")
        else:
            self._store.keep(name, machine, secagg.Client.to_bytes)
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
        session = self._store.get("session") or b""
        policy = Policy(
            session, protection.secagg_mode, self._named(ask), ask.models, protection.smallest_sum, after,
            clip=(min(1e-6, protection.secagg_clip), max(1e6, protection.secagg_clip)), levels=1 if ask.kind == "counts" else 16,
        )  # fmt: skip
        name = f"mask/{ask.slot[0]}.{ask.slot[1]}"
        kept = self._store.get(name)
        key = None if kept is None else MaskKey.from_bytes(kept)
        if key is not None:
            self._store.drop(name)  # before it is used: it serves once
            if kind_of(ask.said) == "Invite":  # who is invited again was not heard: the key that it advertised is used for nothing
                key = None
        for other in self._store.names():
            if other.startswith("sum/"):
                self._store.drop(other)
            if other.startswith("mask/") and tuple(int(part) for part in other[5:].split(".")) < ask.slot:
                self._store.drop(other)
        self._store.put("last-slot", ask.slot[0].to_bytes(8, "big") + ask.slot[1].to_bytes(8, "big"))
        return secagg.Client(self._settings.identity, policy, roster=self._roster(), mask_key=key, entropy=self._entropy)

    def _named(self, ask: m.Step) -> bytes:
        """What a sum says of this client's part in it. "forbidden" for one of too many kinds, or that no sum can be bound to."""
        received = self._values.origin(ask.held).received
        if not 1 <= ask.models <= self._settings.models or (received == UNTRACED and self._settings.protection.secagg_mode == "active"):
            raise RemoteError("forbidden")
        return bound(ask, received)

    def _contributions(self, ask: m.Step, machine: secagg.Client) -> list[secagg.Contribution]:
        """What this client brings; its own ledger is asked first."""
        self._check(ask, machine)
        vector, weight = self._weighed(ask, machine)
        return [secagg.Contribution(vector, weight)]

    def _check_named(self, ask: m.Step, machine: secagg.Client) -> None:
        """All were shown the name of what is added up, so what it is of must not change from stage to stage."""
        if self._named(ask) != machine.policy.model:
            raise RemoteError("unlisted-model")

    def _check(self, ask: m.Step, machine: secagg.Client) -> None:
        assert machine.terms is not None
        self._dealings.check((ask.slot[0], ask.slot[1] // ATTEMPTS), machine.terms.cohort)
        if isinstance(ask.groups, m.Picks) and ask.groups.labels != (0,):  # a block that the server chose might be this client's alone
            raise RemoteError("forbidden")

    def _weighed(self, ask: m.Step, machine: secagg.Client) -> tuple[Array, float]:
        """The client's vector, with its share of noise where there is one, and what it weighs; both were paid for."""
        terms, ledger, protection = machine.terms, self._parts.ledger, self._settings.protection
        assert terms is not None
        values = self._parts.allowed("sum", ask.held, ask.parts)
        vector = joined(values).astype(np.float64)
        if not ask.weight and ledger.unit != "none":
            raise RemoteError("forbidden")
        ledger.settle(ask.held, ask.parts, "mean")
        plan = None if ask.noise is None else plan_of(ask.noise, len(vector))
        ledger.shares(plan, protection.smallest_sum, terms.levels, terms.weight_limit > 0)
        check_array(f"client {self._parts.client}: {'+'.join(ask.parts)}", vector)  # reported after it was paid for
        if not weighed(ask.weight, terms, protection.max_weight):
            raise RemoteError("bad-terms")
        weight = ask.weight or float(self._parts.samples())
        _check_weight(weight, terms)
        if plan is not None and ask.noise is not None:
            vector = share(vector, plan, ask.noise.seed, terms.levels, self._entropy)
        return vector, weight


def _check_weight(weight: float, terms: Terms) -> None:
    """Raises `RemoteError` "bad-terms" for a weight above the limit, or so far below that rounding would make another of it."""
    limit, why = terms.weight_limit, ""
    if limit and weight > limit:
        why = f"its weight is above protection.max_weight = {limit:g}; that maximum is public and must hold for all"
    elif limit and weight / limit * terms.levels < FEWEST_LEVELS:
        why = (
            f"its weight is below {FEWEST_LEVELS} of the {terms.levels} levels up to max_weight = {limit:g}; lower "
            "protection.max_weight, or use secagg_bits = 32"
        )
    if why:
        error = RemoteError("bad-terms")
        error.add_note(why)
        raise error


def bound(ask: m.Step, received: bytes) -> bytes:
    """What a sum binds to: what is added up, in which form and with which noise, and the name of all that it was computed from.

    Whoever is told something else than the others, and so might stand alone in a sum of what is nothing or known, has another name.
    """
    alike = msgspec.structs.replace(ask, slot=(0, 0), weight=0.0, models=0, said=b"")
    return sha256(received + m.encode(alike)).digest()


def weighed(weight: float, terms: secagg.Terms, max_weight: float) -> bool:
    """Whether a client may go into a sum with the `weight` that it is told (0: its own sample count).

    It is told its own only, and a server that lies could give one update all of the weight. So what all are shown decides: under the limit
    `max_weight` of their own settings all weigh by their counts, and under another all are told weights, which must be `balanced`.
    """
    if terms.weight_limit == max_weight or not weight:
        return terms.weight_limit == max_weight and (not weight or not max_weight)
    return balanced(weight, terms)


def balanced(weight: float, terms: secagg.Terms) -> bool:
    """Whether a client with all the weight that the terms allow, among others of this weight, has no more of the sum than one may have.

    For sums over the fewest survivors that there may be. Sums without weights are.
    """
    fewest = terms.min_cohort if terms.blocks else fewest_survivors(terms)
    return terms.weight_limit <= MOST_WEIGHT * (terms.weight_limit + (fewest - 1) * weight)


def plan_of(said: m.Shares, size: int) -> SkellamPlan:
    """The shares that a server asks for, for `size` numbers. Raises `RemoteError` "malformed" for numbers that no noise has."""
    numbers = (said.clip_norm, said.levels_per_unit, said.local_variance)
    if not all(0 < one < float("inf") for one in numbers) or said.survivors < 1:
        raise RemoteError("malformed")
    dimension = 1 << max(0, (size - 1).bit_length())
    return SkellamPlan(said.clip_norm, said.levels_per_unit, dimension, BETA, said.local_variance, said.survivors, said.relation)


def kind_of(said: bytes) -> str:
    """Which message of a secure sum these bytes are, "" for none."""
    try:
        return type(decode_server(said)).__name__
    except MalformedMessage:
        return ""


# --- the server half


class ServerSum:
    """The server's part. With client-level privacy, clients add shares of noise inside the sums."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts, protection = parts, parts.protection
        roster = parts.roster if protection.secagg_mode == "active" else None
        self._sums = SecureSums(protection.secure_sum, protection.smallest_sum, parts.session, roster, parts.entropy)
        self._sums.refusals = parts.registry.refusals
        parts.registry.greeted.append(self._sums.forget)
        self._turn = -1
        self._taken: dict[int, tuple[Survivors, frozenset[int]]] = {}  # of this turn: by client the survivors and the cohort of its sum

    def means(self, call: SumCall, asked: Asked, choice: m.Mine | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        """One secure sum for each group, in parallel; with the clients' shares of noise in them where they are private."""
        call = self._sums.without_offenders(call)
        groups = large_enough(call)
        if self._parts.clipped is not None:
            self._parts.clipped.settle(call, size_of(asked.layout))
        whole, shares = asked, None
        plan = None if self._parts.clipped is None else self._parts.clipped.plan(size_of(asked.layout))
        if self._parts.clipped is not None and self._parts.clipped.shares is not None and plan is not None:
            asked = replace(asked, layout=(m.Described("shares", "<f8", (plan.dimension,)),))
            shares = m.Shares(
                plan.relation, plan.clip_norm, plan.levels_per_unit, plan.local_variance, plan.survivors, self._parts.clipped.shares.seed
            )
        slot, following = (call.round + 1, call.number * ATTEMPTS), (call.round + 2, call.number * ATTEMPTS)
        self._check_groups(call, groups)
        terms = {}
        for label in groups:
            members = call.members(label)
            weighted = not call.public_weights or len({one.weight for one in members}) > 1
            limit = self._limit(call, members)
            dimension = size_of(asked.layout)
            cohort = [one.client for one in members]
            listed = self._listed(call, cohort, self._like(asked, "sum", None, shares))
            terms[label] = self._sums.terms(slot, cohort, listed, dimension, limit if weighted else 0.0, following)
            check_balance(call, members, terms[label])
        step = self._stepper(call, asked, "sum", None, shares)
        ended = self._sums.run(terms, step, self._exchange, record)
        means: list[GroupMean | None] = [None] * call.k
        for label, total in ended.items():
            if isinstance(total, Sum):
                common = 1.0 if terms[label].weight_limit else call.members(label)[0].weight
                means[label] = group_mean(total, None, asked.layout, len(total.survivors), common)
                asked_of = frozenset(one.client for one in call.members(label))
                self._taken |= dict.fromkeys(total.survivors, (total.survivors, asked_of))
        if not any(means):
            raise TooFewClients(tuple(len(call.members(label)) for label in groups), call.min_cohort)
        if self._parts.clipped is not None:
            empty = {part.name: np.zeros(part.shape, np.dtype(part.dtype)) for part in whole.layout}
            return self._parts.clipped.opened(means, call, Contribution(-1, empty, 1.0, ()))
        return tuple(means)

    def _check_groups(self, call: SumCall, groups: Sequence[int]) -> None:
        """`InputError` for a second sum of one turn over other clients, which clients refuse (`summed_once`)."""
        if self._turn != call.round:
            self._turn, self._taken = call.round, {}
        for label in groups:
            cohort = {one.client for one in call.members(label)}
            for client in sorted(cohort & self._taken.keys()):
                survivors, earlier = self._taken[client]
                if not (cohort.issuperset(survivors) and cohort <= earlier):
                    raise InputError(
                        f"mean: client {client} was in a sum over {len(survivors)} clients in this round, and would be in one over "
                        f"{len(cohort)} others: the difference of the two sums would show an individual; take one sum a client and round"
                    )

    def _limit(self, call: SumCall, members: Sequence[Contribution]) -> float:
        """The most that a client may weigh: clients tell public weights from sample counts by it, whose limit is `max_weight`."""
        if not call.public_weights:
            return self._parts.protection.max_weight
        heaviest = max(one.weight for one in members)
        return heaviest if heaviest != self._parts.protection.max_weight else float(np.nextafter(heaviest, np.inf))

    def _like(self, asked: Asked, kind: Kind, groups: m.Mine | m.Picks | None, noise: m.Shares | None = None) -> m.Step:
        """A step as all members of a sum are told it."""
        return m.Step(self._parts.session, (0, 0), asked.number, asked.parts, 0.0, 0, kind, groups, b"", noise)

    def _listed(self, call: SumCall, clients: Sequence[int], like: m.Step) -> list[bytes]:
        """What a sum binds to, no more of it than the algorithm speaks of in public: clients would refuse a longer list."""
        models = {call.models[client] for client in clients}
        if self._parts.protection.secagg_mode == "active" and UNTRACED in models:
            raise InputError(
                "protection.secagg_mode = 'active': what is to be added up was computed from what clients relayed to each other or hold of "
                "their own, which no sum can be bound to; use 'passive', which trusts the server to follow the protocol"
            )
        listed = sorted(bound(like, model) for model in models)
        if len(listed) > call.models_at_most:
            raise InputError(
                f"mean: members of one group were sent {len(listed)} different models, where the algorithm speaks of {call.models_at_most}"
            )
        return listed

    def _stepper(
        self, call: SumCall, asked: Asked, kind: Kind, groups: m.Mine | m.Picks | None, noise: m.Shares | None = None
    ) -> Callable[[int, bytes, Slot], m.Step]:  # fmt: skip
        clients = {label: [one.client for one in call.members(label)] for label in range(call.k)}
        like = self._like(asked, kind, groups, noise)
        lists: dict[int, int] = {}
        for members in clients.values():
            lists |= dict.fromkeys(members, len(self._listed(call, members, like)) if members else 0)

        def step(client: int, said: bytes, slot: Slot) -> m.Step:
            return msgspec.structs.replace(like, slot=slot, weight=asked.weight[client], models=lists[client], said=said)

        return step

    def _exchange(self, steps: Mapping[int, m.Step], stage: str) -> Mapping[int, bytes]:
        here = self._parts.registry.present
        present = {client: step for client, step in steps.items() if client in here}
        before = len(self._parts.registry.refusals)
        answers = self._parts.registry.ask(present, stage) if present else {}
        words = {word for client, _, word in self._parts.registry.refusals[before:] if client in present}
        most = max((step.models for step in present.values()), default=0)
        if not answers and words == {"forbidden"} and most > 1:  # else shared layers would stay as they are, round for round
            raise InputError(
                f"mean: the members of one sum were sent {most} different models (as the algorithm says), and clients allow fewer: write "
                f"models = {most} into their settings"
            )
        return {client: answer.said for client, answer in answers.items() if isinstance(answer, m.Stepped)}


@dataclass
class SecureSums:
    """What a server keeps between sums: the roster (active mode), what clients advertised for later slots, whom it refused when and why.

    `offenders` provably broke the protocol of a sum. They take no part in later sums of the session.
    """

    settings: SecureSum
    min_cohort: int
    session: bytes
    roster: Roster | None
    entropy: Entropy = system_entropy
    adverts: dict[Slot, dict[int, bytes]] = field(default_factory=dict)
    refusals: list[tuple[int, str, str]] = field(default_factory=list)
    offenders: set[int] = field(default_factory=set)

    def without_offenders(self, call: SumCall) -> SumCall:
        """The call without those that broke the protocol of an earlier sum. Raises `TooFewClients` if there is nobody else."""
        kept = tuple(one for one in call.contributions if one.client not in self.offenders)
        if not kept:
            raise TooFewClients((0,), self.min_cohort)
        return replace(call, contributions=kept)

    def forget(self, clients: Iterable[int]) -> None:
        """What these advertised for later sums: who comes back may have lost the keys, and is invited again."""
        for adverts in self.adverts.values():
            for client in clients:
                adverts.pop(client, None)

    def terms(
        self, slot: Slot, cohort: Sequence[int], models: Sequence[bytes], dimension: int, weight_limit: float, following: Slot | None
    ) -> Terms:
        """The terms of one group's sum."""
        return secagg.make_terms(
            session=self.session, slot=slot, cohort=cohort, models=models, dimension=dimension, clip=self.settings.clip,
            bits=self.settings.bits, weight_limit=weight_limit, min_cohort=self.min_cohort, roster=self.roster, following=following,
            entropy=self.entropy,
        )  # fmt: skip

    def counts(self, slot: Slot, cohort: Sequence[int], models: Sequence[bytes], k: int, following: Slot) -> Terms:
        """The terms of an oblivious pair's first sum."""
        return secagg.count_terms(
            session=self.session, slot=slot, cohort=cohort, models=models, clusters=k, min_cohort=self.min_cohort, roster=self.roster,
            following=following, entropy=self.entropy,
        )  # fmt: skip

    def blocks(self, counted: Sum, slot: Slot, models: Sequence[bytes], dimension: int, weight_limit: float) -> Terms:
        """The terms of its second."""
        return secagg.block_terms(
            counted, slot=slot, models=models, dimension=dimension, clip=self.settings.clip, bits=self.settings.bits,
            weight_limit=weight_limit, roster=self.roster, entropy=self.entropy,
        )  # fmt: skip

    def run(
        self, groups: Mapping[int, Terms], step: Callable[[int, bytes, Slot], m.Step], exchange: Exchange, record: Recorder
    ) -> dict[int, Sum | TooFewClients]:
        """Run the sums of all groups, which share no client: each ends with its sum, or with why there is none.

        An oblivious sum goes by the label `OBLIVIOUS`. A sum that fails before shares are revealed is taken again without those at fault.
        """
        servers = {label: self._server(terms) for label, terms in groups.items()}
        ended: dict[int, Sum | TooFewClients] = {}
        while running := [label for label in servers if label not in ended]:
            # Those that are behind go first, because shares are in dispute or the sum was begun again: then all go on together.
            behind = min((servers[label].stage for label in running), key=STAGES.index)
            outboxes: dict[str, dict[int, tuple[int, bytes]]] = {}
            for label in running:
                server = servers[label]
                if server.stage is not behind:
                    continue
                asked = server.sent
                try:
                    outbox = server.advance()
                except TooFewClients as error:
                    ended[label] = error
                except SumFailed as error:
                    self.offenders |= set(error.offenders)
                    self.refusals.extend((client, f"secagg {asked}", error.code) for client in error.offenders)
                    try:
                        servers[label] = self._server(self._retaken(server.terms, error))
                    except TooFewClients as few:
                        ended[label] = few
                else:
                    if server.stage is ServerStage.DONE:
                        ended[label] = server.result
                    outboxes.setdefault(server.sent, {}).update({client: (label, said) for client, said in outbox.items()})
            for kind, sent in outboxes.items():
                if sent:
                    self._deliver(kind, sent, servers, step, exchange, record)
        for server in servers.values():
            if server.stage is ServerStage.DONE and server.terms.following is not None:
                self.adverts.setdefault(server.terms.following, {}).update(server.following)
        for slot in [slot for slot in self.adverts if slot <= max(terms.slot for terms in groups.values())]:
            del self.adverts[slot]
        return ended

    def _deliver(
        self, kind: str, outbox: Mapping[int, tuple[int, bytes]], servers: Mapping[int, secagg.Server],
        step: Callable[[int, bytes, Slot], m.Step], exchange: Exchange, record: Recorder,
    ) -> None:  # fmt: skip
        """Send messages of one kind, and give the answers to the machines."""
        slots = {label: servers[label].terms.slot for label, _ in outbox.values()}
        self._note(record, "down", kind, {client: said for client, (_, said) in outbox.items()}, slots, outbox)
        steps = {client: step(client, said, slots[label]) for client, (label, said) in sorted(outbox.items())}
        answers = exchange(steps, f"secagg {kind}")
        usual = servers[next(iter(slots))].collected[0]
        kinds = dict.fromkeys(answers, usual)
        for client, said in sorted(answers.items()):
            try:
                kinds[client] = servers[outbox[client][0]].receive(client, said)
            except RemoteError as error:  # refused without a change of state: this client is a dropout from here on
                self.refusals.append((client, f"secagg {kind}", error.code))
                if error.code == "wrong-share":
                    self.offenders.add(client)
        for reply in sorted(set(kinds.values())):
            self._note(record, "up", reply, {client: said for client, said in answers.items() if kinds[client] == reply}, slots, outbox)

    def _retaken(self, terms: Terms, failed: SumFailed) -> Terms:
        """The terms of the next attempt. Raises `TooFewClients` if there is none."""
        if not failed.repeatable or terms.slot[1] % ATTEMPTS == ATTEMPTS - 1:
            raise TooFewClients((0,), self.min_cohort)
        return secagg.retaken(terms, (*failed.offenders, *failed.absent), self.entropy)

    def _server(self, terms: Terms) -> secagg.Server:
        """The server's machine of a sum, with what its clients advertised for it.

        Adverts were checked in the sums that they came in, not against each other's: where two have the same key all are invited anew.
        """
        known = self.adverts.get(terms.slot, {})
        try:
            return secagg.Server(terms, roster=self.roster, adverts={c: known[c] for c in terms.cohort if c in known})
        except LocalError:
            return secagg.Server(terms, roster=self.roster)

    @staticmethod
    def _note(
        record: Recorder, direction: str, kind: str, said: Mapping[int, bytes], slots: Mapping[int, Slot],
        outbox: Mapping[int, tuple[int, bytes]],
    ) -> None:  # fmt: skip
        """One record a group, as in a federation in one process."""
        up = direction == "up"
        for label, slot in slots.items():
            members = [client for client in sorted(said) if outbox[client][0] == label]
            if members:
                context = {"slot": list(slot)} | ({} if label == OBLIVIOUS else {"group": label})
                record(
                    f"secagg {kind}", "clients" if up else "server", "server" if up else "clients", members,
                    [{"bytes": np.frombuffer(said[client], dtype=np.uint8)} for client in members],
                    readers=("server",) if up else ("server", "clients"), context=context,
                )  # fmt: skip


def check_balance(call: SumCall, members: Sequence[Contribution], terms: Terms) -> None:
    """`InputError` for public weights that clients would refuse."""
    lightest = min(one.weight for one in members)
    if call.public_weights and not balanced(lightest, terms):
        raise InputError(
            f"mean: weights from {lightest:g} to {terms.weight_limit:g}: the heaviest client could have more than {MOST_WEIGHT:.0%} of a "
            "sum over the fewest survivors, which clients refuse; make weights more alike, or raise the minimum cohort size"
        )
    if call.public_weights and terms.weight_limit and lightest / terms.weight_limit * terms.levels < FEWEST_LEVELS:
        raise InputError(
            f"mean: weights from {lightest:g} to {terms.weight_limit:g}: the lightest is below {FEWEST_LEVELS} of the {terms.levels} "
            "levels up to the heaviest, which clients refuse; make weights more alike, or use secagg_bits = 32"
        )


def group_mean(total: Sum, cluster: int | None, layout: Layout, count: int, common: float = 1.0) -> GroupMean | None:
    """The mean of a sum whose weights, where it is unweighted, are all `common`; None if nothing of weight arrived."""
    weight = total.weight(cluster)
    if weight <= 0:
        return None
    mean = total.mean(cluster)
    parts: dict[str, Any] = {}
    start = 0
    for part in layout:
        stop = start + int(np.prod(part.shape, dtype=int))
        parts[part.name] = Shared(mean[start:stop].reshape(part.shape).astype(np.dtype(part.dtype)))
        start = stop
    return GroupMean(parts, weight * common, count, total.clipped_clients, tuple(total.survivors))
