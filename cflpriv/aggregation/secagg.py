"""Secure aggregation, one sum for each group of clients.

Guarantee: the server learns the sum of each group over its survivors, at least the minimum cohort size, and nothing else about a value, see
`protocols.secagg`. Every sum binds to the list of what its members were sent: one model, unless the algorithm declares more in public. The
values of one round go into sums over one set of clients (`summed_once`).
Reveals: who is in which group and who drops out, the sums, how many clients clipped. The difference of sums of successive rounds over
clients that differ by one reveals what nearly equal models make of that client's data. With k models on the list, a server can plant a
private one as one of the k. What tasks keep in a client's memory is not traced to the models that it came from.
Active attacks (`attacks.active`): the sum and nothing else: `second_sum`, `computed_again`, `derived_copy`, `stale_slot`,
`split_survivors`, `second_unmasking`, `mode_downgrade`, `false_accusation`, `false_complaints`, `sybils`, `relay_to_accomplice`; the
minimum cohort size: `smaller_minimum`, `few_survivors`, `accomplices`; what sums bind to: `other_model`, `listed_model`, `other_task`,
`switched_value`, `unequal_weights`; by subtraction: `next_round`.
Source: Bonawitz et al. 2017, Bell et al. 2020.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from ..contract.calls import MOST_WEIGHT, ClientContribution, Recorder, SumCall, large_enough
from ..contract.handles import GroupMean, PartLayout, Shared, join
from ..errors import InputError
from ..federation import messages as m
from ..federation.host import ApplyTransform
from ..federation.protections import Asked, ClientParts, ServerParts
from ..federation.values import UNTRACED, form_of
from ..privacy.adaptive_clip import with_count
from ..privacy.settings import SumNoise
from ..protocols import secagg
from ..protocols.errors import LocalError, MalformedMessage, RemoteError, TooFewClients
from ..protocols.keys import Roster
from ..protocols.mechanisms import clip
from ..protocols.secagg import MaskKey, Policy, Slot, Sum, Terms
from ..protocols.secagg.messages import Adverts, Deliver, Invite, Unmask, decode_server, fewest_survivors
from ..protocols.shared_noise import SharedNoise
from ..types import Array
from .buckets import Dealings
from .secure_sums import ATTEMPTS, SecureSums, SendMessages
from .spoilers import joined
from .summed_once import SurvivorIds, check_proposed, pinned, survivors_of, write_down

__all__ = ["SecaggClientSum", "SecaggServerSum", "bound", "check_balance", "group_mean"]

FEWEST_LEVELS = 64
"""A weight quantised to fewer levels distorts its client's share by more than about one per cent."""
SumKind = Literal["sum", "counts", "blocks"]


# --- the client half


class SecaggClientSum:
    """A client's part: its protocol machine between messages, its contribution, and its share of the noise."""

    kinds: ClassVar[tuple[str, ...]] = ("sum",)

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts
        self._settings, self._store, self._values, self._entropy = parts.settings, parts.store, parts.values, parts.entropy
        self._dealings = Dealings(parts)
        self.deal = self._dealings.deal

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[ApplyTransform, Any, m.Given]:
        """Refused: a single update never leaves."""
        yield from ()
        raise RemoteError("forbidden")

    def step(self, ask: m.SumStep) -> m.Stepped:
        """One message of a sum, and the client's answer."""
        settings = self._settings
        if ask.kind not in self.kinds:
            raise RemoteError("forbidden")
        name = _name("sum", ask.slot)
        read = partial(secagg.Client.from_bytes, identity=settings.identity, roster=self._roster(), entropy=self._entropy)
        message, rounds = decode_server(ask.message), self._values.origin(ask.held).rounds
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
            answer = machine.receive(ask.message, *contributions)
        except LocalError:  # the machine has ended and erased its secrets
            self._store.drop(name)
            raise
        if isinstance(message, Unmask) and survivors is not None:
            write_down(self._store, ask.kind, rounds, survivors)
        following = machine.next_mask_key()
        if following is not None:
            self._store.put(_name("mask", following.slot), following.to_bytes())
        if machine.stage is secagg.ClientStage.DONE:
            self._store.drop(name)
            self._store.drop(f"{name}/rounds")
        else:
            self._store.keep(name, machine, secagg.Client.to_bytes)
        return m.Stepped(answer)

    def _roster(self) -> Roster | None:
        return self._settings.roster if self._settings.protection.secagg_mode == "active" else None

    def _machine(self, ask: m.SumStep) -> secagg.Client:
        """A machine for a new sum. Machines and keys of earlier sums are dropped."""
        protection = self._settings.protection
        last = self._store.get("last-slot")
        after = None if last is None else (int.from_bytes(last[:8], "big"), int.from_bytes(last[8:], "big"))
        if after is not None and ask.slot <= after:
            raise RemoteError("old-slot")
        session = self._store.get("session") or b""
        policy = Policy(
            session, protection.secagg_mode, self._named(ask), ask.models, protection.smallest_sum, after,
            clip=(min(1e-6, protection.secagg_clip), max(1e6, protection.secagg_clip)), levels=1 if ask.kind == "counts" else 16,
            dimension=self._numbers(ask), length=self._settings.limits.numbers,
        )  # fmt: skip
        name = _name("mask", ask.slot)
        kept = self._store.get(name)
        key = None
        if kept is not None:
            self._store.drop(name)  # before its only use
            if kind_of(ask.message) != "Invite":  # else the server lost the advert of this key
                key = MaskKey.from_bytes(kept)
        for other in self._store.names():
            if other.startswith("sum/"):
                self._store.drop(other)
            if other.startswith("mask/") and tuple(int(part) for part in other[5:].split(".")) < ask.slot:
                self._store.drop(other)
        self._store.put("last-slot", ask.slot[0].to_bytes(8, "big") + ask.slot[1].to_bytes(8, "big"))
        return secagg.Client(self._settings.identity, policy, roster=self._roster(), mask_key=key, entropy=self._entropy)

    def _numbers(self, ask: m.SumStep) -> int | None:
        """How many numbers the client's value has in a sum; None for counts, of which the server knows how many there are."""
        if ask.kind == "counts":
            return None
        numbers = sum(form_of(value)[0] for value in self._values.parts(ask.held, ask.parts).values())
        if not numbers:
            raise RemoteError("bad-input")
        return numbers + bool(ask.noise is not None and ask.noise.count)

    def _named(self, ask: m.SumStep) -> bytes:
        """The name that a sum has for this client's value. Raises "forbidden" for too many models, or a value that no sum can bind to."""
        received = self._values.origin(ask.held).received
        if not 1 <= ask.models <= self._settings.models or (received == UNTRACED and self._settings.protection.secagg_mode == "active"):
            raise RemoteError("forbidden")
        return bound(ask, received)

    def _contributions(self, ask: m.SumStep, machine: secagg.Client) -> list[secagg.Contribution]:
        """The client's contribution, after its own ledger was charged."""
        self._check(ask, machine)
        vector, weight = self._weighed(ask, machine)
        return [secagg.Contribution(vector, weight)]

    def _check_named(self, ask: m.SumStep, machine: secagg.Client) -> None:
        """Raises "unlisted-model" if the value changed between stages: all members were shown its name."""
        if self._named(ask) != machine.policy.model:
            raise RemoteError("unlisted-model")

    def _check(self, ask: m.SumStep, machine: secagg.Client) -> None:
        assert machine.terms is not None
        self._dealings.check((ask.slot[0], ask.slot[1] // ATTEMPTS), machine.terms.cohort)
        if isinstance(ask.groups, m.Picks) and ask.groups.labels != (0,):  # the server could give this client a block of its own
            raise RemoteError("forbidden")

    def _weighed(self, ask: m.SumStep, machine: secagg.Client) -> tuple[Array, float]:
        """The client's vector, with its share of the noise if there is one, and its weight. The ledger is charged for both."""
        terms, ledger, protection = machine.terms, self._parts.ledger, self._settings.protection
        assert terms is not None
        values = self._parts.allowed("sum", ask.held, ask.parts)
        vector = join(values, np.float64)
        if not ask.weight and ledger.unit != "none":
            raise RemoteError("forbidden")
        noise = None if ask.noise is None else noise_of(ask.noise)
        ledger.settle_sum(ask.held, ask.parts, noise, protection.smallest_sum, terms.weight_limit > 0)
        if not weighed(ask.weight, terms, protection.max_weight):
            raise RemoteError("bad-terms")
        weight, why = ask.weight, _unfit_weight(ask.weight or float(self._parts.samples()), terms)
        if why and ask.weight:
            error = RemoteError("bad-terms")
            error.add_note(why)
            raise error
        if not ask.weight:
            weight = min(float(self._parts.samples()), terms.weight_limit or np.inf)
            if why:  # a refusal would tell the number of samples
                self._parts.failed(InputError(f"client {self._parts.client}: {why}"))
        if not np.isfinite(vector).all():
            self._parts.failed(InputError(f"client {self._parts.client}: {'+'.join(ask.parts)} has numbers that are not finite"))
            vector, weight = np.zeros_like(vector), 0.0
        if self._values.origin(ask.held).failed:  # it answers as for any data, and counts for nothing
            vector, weight = np.zeros_like(vector), 0.0
        if noise is not None:
            try:
                bounded = with_count(clip(vector, noise.clip_norm), noise.clip_norm, noise.count) if noise.clip_norm else vector
                vector = noise.noise.noisy(bounded, terms.levels, self._entropy)
            except ValueError:
                raise RemoteError("bad-terms") from None
        return vector, weight


def _name(kind: str, slot: Slot) -> str:
    """The store's name for what belongs to a slot."""
    return f"{kind}/{slot[0]}.{slot[1]}"


def _unfit_weight(weight: float, terms: Terms) -> str:
    """Why a weight does not fit the terms: it is above the limit, or so small that rounding would change it much. Empty if it fits."""
    limit = terms.weight_limit
    if limit and weight > limit:
        return f"its weight is above protection.max_weight = {limit:g}; that maximum is public and must hold for all"
    if limit and weight / limit * terms.levels < FEWEST_LEVELS:
        return (
            f"its weight is below {FEWEST_LEVELS} of the {terms.levels} levels up to max_weight = {limit:g}; lower "
            "protection.max_weight, or use secagg_bits = 32"
        )
    return ""


def bound(ask: m.SumStep, received: bytes) -> bytes:
    """What a sum binds to: what is added up, in which form and with which noise, and the name of what it was computed from.

    A client that is sent something else than the others could be alone in a sum of known values, so it gets another name.
    """
    alike = msgspec.structs.replace(ask, slot=(0, 0), weight=0.0, models=0, message=b"")
    return sha256(received + m.encode(alike)).digest()


def weighed(weight: float, terms: secagg.Terms, max_weight: float) -> bool:
    """Whether a client may join a sum with the `weight` that the server names (0: its own sample count).

    The server names each client only its own weight, and could lie to give one update all of the weight. So the limit decides, which all
    members see: with `max_weight` of their own settings all weigh by their sample counts; with another the server names all weights, which
    must be `balanced`.
    """
    if terms.weight_limit == max_weight or not weight:
        return terms.weight_limit == max_weight and (not weight or not max_weight)
    return balanced(weight, terms)


def balanced(weight: float, terms: secagg.Terms) -> bool:
    """Whether one client with the largest weight, and all others with this one, stays below the largest share of a sum.

    Counts the fewest survivors that the terms allow. Sums without weights are balanced.
    """
    fewest = terms.min_cohort if terms.blocks else fewest_survivors(terms)
    return terms.weight_limit <= MOST_WEIGHT * (terms.weight_limit + (fewest - 1) * weight)


def noise_of(shares: m.NoiseShares) -> SumNoise:
    """The noise that a server asks for. Raises `RemoteError` "malformed" for impossible numbers."""
    if not (0 <= shares.clip_norm < float("inf") and 0 <= shares.count < float("inf")):
        raise RemoteError("malformed")
    try:
        noise = SharedNoise(shares.deviation, shares.survivors)
        return SumNoise(noise, shares.clip_norm, max(shares.clip_norm, shares.count / 2), shares.count)
    except ValueError:
        raise RemoteError("malformed") from None


def kind_of(message: bytes) -> str:
    """The type of a message of a secure sum, "" for other bytes."""
    try:
        return type(decode_server(message)).__name__
    except MalformedMessage:
        return ""


# --- the server half


class SecaggServerSum:
    """The server's part. With client-level privacy, clients add shares of noise inside the sums."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts, protection = parts, parts.protection
        roster = parts.roster if protection.secagg_mode == "active" else None
        self._sums = SecureSums(protection.secure_sum, protection.smallest_sum, parts.session, roster, parts.entropy)
        self._sums.refusals = parts.registry.refusals
        parts.registry.greeted.append(self._sums.forget)
        self._turn = -1
        self._taken: dict[int, tuple[SurvivorIds, frozenset[int]]] = {}  # by client the survivors and the cohort of its sum in this turn

    def means(self, call: SumCall, asked: Asked, choice: m.HeldValue | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        """One secure sum for each group, in parallel; several for one while somebody spoils them (`spoilers`)."""
        call = self._sums.without_offenders(call)
        over, owners = self._sums.divided(call)
        return joined(self._means(over, asked, record), owners, call.k)

    def _means(self, call: SumCall, asked: Asked, record: Recorder) -> tuple[GroupMean | None, ...]:
        groups, clipped, noise, whole = large_enough(call), self._parts.clipped, asked.noise, asked.layout
        if clipped is not None:
            noise = clipped.inside
        shares = None
        if noise is not None:
            asked = replace(asked, layout=PartLayout((("shares", "<f8", (whole.size + bool(noise.count),)),)))
            shares = m.NoiseShares(noise.noise.deviation, noise.noise.survivors, noise.clip_norm, noise.count)
        slot, following = (call.round + 1, call.number * ATTEMPTS), (call.round + 2, call.number * ATTEMPTS)
        self._check_groups(call, groups)
        like, terms = self._like(asked, "sum", None, shares), {}
        for label in groups:
            members = call.members(label)
            weighted = not call.public_weights or len({member.weight for member in members}) > 1
            limit = self._limit(call, members) if weighted else 0.0
            cohort = [member.client for member in members]
            terms[label] = self._sums.terms(slot, cohort, self._listed(call, cohort, like), asked.layout.size, limit, following)
            check_balance(call, members, terms[label])
            if noise is not None and noise.noise.room(noise.length) > terms[label].levels:
                raise InputError(
                    f"protection.secagg_bits = {terms[label].bits}: a sum of {len(cohort)} clients leaves each {terms[label].levels} "
                    f"integers on either side of zero, a vector with its share of noise takes {noise.noise.room(noise.length)}; use 32, or "
                    "smaller groups"
                )
        if clipped is not None:
            clipped.settle(call)
        ended = self._sums.run(terms, self._sender(call, asked, like), record)
        means: list[GroupMean | None] = [None] * call.k
        for label, total in ended.items():
            if isinstance(total, Sum):
                members = call.members(label)
                common = 1.0 if terms[label].weight_limit else members[0].weight
                means[label] = group_mean(total, None, asked.layout, len(total.survivors), common)
                self._taken |= dict.fromkeys(total.survivors, (total.survivors, frozenset(member.client for member in members)))
        if not any(means):
            raise TooFewClients(tuple(len(call.members(label)) for label in groups), call.min_cohort)
        return tuple(means) if noise is None else self._opened(means, terms, noise, whole)

    def _opened(
        self, means: Sequence[GroupMean | None], terms: Mapping[int, Terms], noise: SumNoise, whole: PartLayout
    ) -> tuple[GroupMean | None, ...]:
        """The means of contributions that sums of integers stand for. A clip norm that moves follows their counts."""
        below, clients = 0.0, 0
        opened: list[GroupMean | None] = []
        for label, mean in enumerate(means):
            if mean is None:
                opened.append(None)
                continue
            steps = np.rint(mean.parts["shares"].value() * mean.count * (terms[label].levels / terms[label].clip))
            total = noise.noise.opened(steps)
            opened.append(replace(mean, parts={name: Shared(part) for name, part in whole.split(total / mean.count).items()}))
            if noise.count:
                below, clients = below + float(total[-1]) / noise.count + mean.count / 2, clients + mean.count
        adaptive = None if self._parts.clipped is None else self._parts.clipped.adaptive
        if adaptive is not None:
            adaptive.follow(below, clients)
        return tuple(opened)

    def _check_groups(self, call: SumCall, groups: Sequence[int]) -> None:
        """Raises `InputError` for a second sum in one turn over other clients, which clients refuse (`summed_once`)."""
        if self._turn != call.round:
            self._turn, self._taken = call.round, {}
        for label in groups:
            cohort = {member.client for member in call.members(label)}
            for client in sorted(cohort & self._taken.keys()):
                survivors, earlier = self._taken[client]
                if not (cohort.issuperset(survivors) and cohort <= earlier):
                    raise InputError(
                        f"mean: client {client} was in a sum over {len(survivors)} clients in this round, and would be in one over "
                        f"{len(cohort)} others: the difference of the two sums would show an individual; take one sum a client and round"
                    )

    def _limit(self, call: SumCall, members: Sequence[ClientContribution]) -> float:
        """The largest weight: `max_weight` for sample counts, any other number for public weights. Clients tell the two apart by it."""
        if not call.public_weights:
            return self._parts.protection.max_weight
        heaviest = max(member.weight for member in members)
        return heaviest if heaviest != self._parts.protection.max_weight else float(np.nextafter(heaviest, np.inf))

    def _like(self, asked: Asked, kind: SumKind, groups: m.HeldValue | m.Picks | None, noise: m.NoiseShares | None = None) -> m.SumStep:
        """What all members of a sum are sent alike."""
        return m.SumStep(self._parts.session, (0, 0), asked.number, asked.parts, 0.0, 0, kind, groups, b"", noise)

    def _listed(self, call: SumCall, clients: Sequence[int], like: m.SumStep) -> list[bytes]:
        """The names of what a sum binds to. Raises `InputError` for more than the algorithm declares, as clients refuse a longer list."""
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

    def _sender(self, call: SumCall, asked: Asked, like: m.SumStep) -> SendMessages:
        """How the messages of this call's sums reach the clients: as steps, which are `like` this one."""
        lists: dict[int, int] = {}
        for label in range(call.k):
            members = [member.client for member in call.members(label)]
            lists |= dict.fromkeys(members, len(self._listed(call, members, like)) if members else 0)

        def exchange(sent: Mapping[int, tuple[Slot, bytes]], stage: str) -> Mapping[int, bytes]:
            steps = {
                client: msgspec.structs.replace(like, slot=slot, weight=asked.weight[client], models=lists[client], message=message)
                for client, (slot, message) in sent.items()
            }
            return self._exchange(steps, stage)

        return exchange

    def _exchange(self, steps: Mapping[int, m.SumStep], stage: str) -> Mapping[int, bytes]:
        registry = self._parts.registry
        present = {client: step for client, step in steps.items() if client in registry.present}
        before = len(registry.refusals)
        answers = registry.ask(present, stage) if present else {}
        codes = {code for client, _, code in registry.refusals[before:] if client in present}
        most = max((step.models for step in present.values()), default=0)
        if not answers and codes == {"forbidden"} and most > 1:  # else shared layers would never change
            raise InputError(
                f"mean: the members of one sum were sent {most} different models (as the algorithm says), and clients allow fewer: write "
                f"models = {most} into their settings"
            )
        return {client: answer.message for client, answer in answers.items() if isinstance(answer, m.Stepped)}


def check_balance(call: SumCall, members: Sequence[ClientContribution], terms: Terms) -> None:
    """Raises `InputError` for public weights that clients would refuse."""
    lightest = min(member.weight for member in members)
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


def group_mean(total: Sum, cluster: int | None, layout: PartLayout, count: int, common: float = 1.0) -> GroupMean | None:
    """The mean of a sum; None if its weight is zero. `common`: the weight of each client in an unweighted sum."""
    weight = total.weight(cluster)
    if weight <= 0:
        return None
    parts = {name: Shared(part) for name, part in layout.split(total.mean(cluster)).items()}
    return GroupMean(parts, weight * common, count, total.clipped_clients, tuple(total.survivors))
