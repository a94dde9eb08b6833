"""Secure aggregation, one sum for each group of clients.

Guarantee: the server learns the sum of each group over its survivors, at least the minimum cohort size, and nothing else about a value, see
`protocols.secagg`. Every sum binds to the list of what its members were sent: one model, unless the algorithm declares more in public. The
values of one round, and without privacy those at one model in any session, go into one sum, over one set of clients with one weight each
(`protocols.secagg.summed`). The model is that which the client used, also of its own choice among several. No server chooses a weight:
with `max_weight` = 0 all weigh equally, else a client may be asked to weigh by its sample count. The effective number of clients
(Σ w)² / Σ w² of every sum is at least the minimum cohort size; weights inside a value count (a task's `spread`).
Reveals: who is in which group and who drops out, the sums, how many clients clipped. The difference of sums of successive rounds over
clients that differ by one reveals what nearly equal models make of that client's data; `cohort_change` = "min_cohort" prevents it for two
successive sums. With k models on the list, a server can plant a private one as one of the k. What tasks keep in a client's memory is not
traced to the models that it came from. Where the effective number needs it, clients with few samples count as more, which draws a weighted
mean towards the unweighted one.
Active attacks (`attacks.active`): the sum and nothing else: `second_sum`, `computed_again`, `derived_copy`, `stale_slot`, `other_weight`,
`other_clip`, `split_survivors`, `second_unmasking`, `mode_downgrade`, `false_accusation`, `false_complaints`, `sybils`,
`relay_to_accomplice`; the minimum cohort size: `smaller_minimum`, `few_survivors`, `accomplices`; what sums bind to: `other_model`,
`listed_model`, `other_task`, `switched_value`, `unequal_weights`, `private_choice`, `own_block`; by subtraction: `next_round`,
`new_session`.
Source: Bonawitz et al. 2017, Bell et al. 2020.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from ..contract.calls import Recorder, SumCall, large_enough
from ..contract.handles import GroupMean, PartLayout, Shared, join
from ..errors import InputError
from ..federation import messages as m
from ..federation.host import ApplyTransform
from ..federation.protections import Asked, ClientParts, ServerParts
from ..federation.values import UNTRACED, form_of
from ..privacy.adaptive_clip import with_count
from ..privacy.settings import SumNoise
from ..protocols import secagg
from ..protocols.errors import LocalError, RemoteError, TooFewClients
from ..protocols.keys import Roster
from ..protocols.mechanisms import clip
from ..protocols.secagg import MaskKey, Policy, Slot, Sum, SumRecord
from ..protocols.secagg.messages import Deliver, Invite, Unmask, decode_server
from ..protocols.secagg.vectors import InputTerms
from ..protocols.shared_noise import SharedNoise
from ..types import Array
from .buckets import Dealings
from .secure_sums import ATTEMPTS, SecureSums, SendMessages
from .spoilers import joined

__all__ = ["SecaggClientSum", "SecaggServerSum", "bound", "group_mean"]

SumKind = Literal["sum", "counts", "blocks"]
RECORDS: Mapping[SumKind, str] = {"sum": "summed/values", "blocks": "summed/values", "counts": "summed/counts"}
"""The store's name for the record of sums: counts are of another value than all others."""


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
        name, record = _name("sum", ask.slot), self._record(ask.kind)
        read = partial(secagg.Client.from_bytes, identity=settings.identity, record=record, roster=self._roster(), entropy=self._entropy)
        message, policy = decode_server(ask.message), self._policy(ask)
        machine = self._store.load(name, read)
        if machine is None:
            machine = self._machine(ask, policy, record, isinstance(message, Invite))
        elif msgspec.structs.replace(machine.policy, after=None) != policy:  # the value changed between stages
            raise RemoteError("unlisted-model")
        contributions: list[secagg.Contribution] = []
        if machine.wants_values and isinstance(message, Deliver):
            contributions = self._contributions(ask, machine)
        try:
            answer = machine.receive(ask.message, *contributions)
        except LocalError:  # the machine has ended and erased its secrets
            self._store.drop(name)
            raise
        if isinstance(message, Unmask):
            self._store.keep(RECORDS[ask.kind], machine.record, SumRecord.to_bytes)
        following = machine.next_mask_key()
        if following is not None:
            self._store.put(_name("mask", following.slot), following.to_bytes())
        if machine.stage is secagg.ClientStage.DONE:
            self._store.drop(name)
        else:
            self._store.keep(name, machine, secagg.Client.to_bytes)
        return m.Stepped(answer)

    def reads(self, ask: m.SumStep) -> bool:
        """Whether this step reads the client's value."""
        return isinstance(decode_server(ask.message), Deliver)

    def _record(self, kind: SumKind) -> SumRecord:
        """The client's record of its sums of values, or of counts."""
        record, session = self._store.load(RECORDS[kind], SumRecord.from_bytes), self._store.get("session") or b""
        if record is None or self._store.get(f"{RECORDS[kind]}/session") != session:
            record = SumRecord() if record is None else record.renewed()  # rounds are counted anew; models are those of all sessions
            self._store.keep(RECORDS[kind], record, SumRecord.to_bytes)
            self._store.put(f"{RECORDS[kind]}/session", session)
        return record

    def _roster(self) -> Roster | None:
        return self._settings.roster if self._settings.protection.secagg_mode == "active" else None

    def _policy(self, ask: m.SumStep) -> Policy:
        """What the client insists on in a sum of this value. Raises "forbidden" for too many models, or a value that no sum can bind to."""
        protection, origin, noise = self._settings.protection, self._values.origin(ask.held), ask.noise
        untraced = origin.received == UNTRACED and protection.secagg_mode == "active"
        most, clips = self._parts.sum_limits()
        if ask.kind != "sum":  # each block has its own model, and no block of fewer than `min_cohort` clients is opened
            most = max(most, origin.alternatives)
        if not 1 <= ask.models <= most or untraced or not origin.rounds:
            raise RemoteError("forbidden")
        counts = ask.kind == "counts"
        # The client's own ledger demands this noise and pays for each sum. It protects a client that is alone in a block, too.
        paid = noise is not None and self._parts.ledger.unit == "client"
        # Without it a sum under another clip norm would show as much as one under another clip.
        form = b"" if noise is None or paid or not (noise.clip_norm or noise.count) else repr((noise.clip_norm, noise.count)).encode()
        change = protection.smallest_sum if protection.cohort_change == "min_cohort" else 0
        return Policy(
            self._store.get("session") or b"", protection.secagg_mode, bound(ask, origin.received), ask.models, protection.smallest_sum,
            clip=(1e-6, 1e6) if counts else clips, levels=1 if counts else 16,
            dimension=self._numbers(ask), length=self._settings.limits.numbers, max_weight=protection.max_weight,
            spread=1.0 if counts or paid else origin.spread, form=form, cohort_change=change, most_error=math.inf,
            names=origin.rounds if self._parts.ledger.unit != "none" else (*origin.rounds, *origin.models),  # noise protects a model's sums
        )  # fmt: skip

    def _machine(self, ask: m.SumStep, policy: Policy, record: SumRecord, invited: bool) -> secagg.Client:
        """A machine for a new sum. Machines and keys of earlier sums are dropped."""
        last = self._store.get("last-slot")
        after = None if last is None else (int.from_bytes(last[:8], "big"), int.from_bytes(last[8:], "big"))
        if after is not None and ask.slot <= after:
            raise RemoteError("old-slot")
        name = _name("mask", ask.slot)
        kept = self._store.get(name)
        key = None
        if kept is not None:
            self._store.drop(name)  # before its only use
            if not invited:  # else the server lost the advert of this key
                key = MaskKey.from_bytes(kept)
        for other in self._store.names():
            if other.startswith("sum/"):
                self._store.drop(other)
            if other.startswith("mask/") and tuple(int(part) for part in other[5:].split(".")) < ask.slot:
                self._store.drop(other)
        self._store.put("last-slot", ask.slot[0].to_bytes(8, "big") + ask.slot[1].to_bytes(8, "big"))
        policy = msgspec.structs.replace(policy, after=after)
        return secagg.Client(
            self._settings.identity, policy, record=record, roster=self._roster(), mask_key=key, entropy=self._entropy
        )  # fmt: skip

    def _numbers(self, ask: m.SumStep) -> int | None:
        """How many numbers the client's value has in a sum; None for counts, of which the server knows how many there are."""
        if ask.kind == "counts":
            return None
        numbers = sum(form_of(value)[0] for value in self._values.parts(ask.held, ask.parts).values())
        if not numbers:
            raise RemoteError("bad-input")
        return numbers + bool(ask.noise is not None and ask.noise.count)

    def _contributions(self, ask: m.SumStep, machine: secagg.Client) -> list[secagg.Contribution]:
        """The client's contribution, after its own ledger was charged."""
        self._check(ask, machine)
        assert machine.terms is not None
        vector, weight, blank = self._weighed(ask, machine.terms)
        return [secagg.Contribution(vector, weight, is_levels=ask.noise is not None, is_blank=blank)]

    def _check(self, ask: m.SumStep, machine: secagg.Client) -> None:
        assert machine.terms is not None
        self._dealings.check((ask.slot[0], ask.slot[1] // ATTEMPTS), machine.terms.cohort)
        if isinstance(ask.groups, m.Picks) and ask.groups.labels != (0,):  # the server could give this client a block of its own
            raise RemoteError("forbidden")

    def _weighed(self, ask: m.SumStep, terms: InputTerms) -> tuple[Array, float, bool]:
        """The client's vector, with its share of the noise if there is one, its weight, and whether zeros take the vector's place.

        The ledger is charged for the first two. Under privacy nobody learns of the zeros.
        """
        ledger, protection = self._parts.ledger, self._settings.protection
        values = self._parts.allowed("sum", ask.held, ask.parts)
        vector = np.ravel(np.asarray(*values.values())) if len(values) == 1 else join(values)  # one part is not copied
        if ask.noise is not None or vector.dtype.kind != "f":
            vector = vector.astype(np.float64)
        by_samples = terms.least_weight < terms.weight_limit
        if by_samples and ledger.unit != "none":
            raise RemoteError("forbidden")
        self._parts.weighed(ask.parts, by_samples)
        noise = None if ask.noise is None else noise_of(ask.noise)
        ledger.settle_sum(ask.held, ask.parts, noise, protection, terms.weight_limit > 0)
        weight = float(self._parts.samples()) if by_samples else 1.0
        if by_samples and weight > terms.weight_limit:  # a refusal would tell the number of samples
            why = f"its weight is above protection.max_weight = {terms.weight_limit:g}; that maximum is public and must hold for all"
            self._parts.failed(InputError(f"client {self._parts.client}: {why}"))
            weight = terms.weight_limit
        blank = False
        if not np.isfinite(vector).all():
            blank = True
            self._parts.failed(InputError(f"client {self._parts.client}: {'+'.join(ask.parts)} has numbers that are not finite"))
            vector, weight = np.zeros_like(vector), min(weight, terms.least_weight)
        if self._values.origin(ask.held).failed:  # it answers as for any data, and counts for as little as the terms allow
            vector, weight, blank = np.zeros_like(vector), min(weight, terms.least_weight), True
        if noise is not None:
            try:
                bounded = with_count(clip(vector, noise.clip_norm), noise.clip_norm, noise.count) if noise.clip_norm else vector
                vector = noise.noise.noisy(bounded, terms.levels, self._entropy)
            except ValueError:
                raise RemoteError("bad-terms") from None
        return vector, weight, blank and noise is None and ledger.unit == "none"


def _name(kind: str, slot: Slot) -> str:
    """The store's name for what belongs to a slot."""
    return f"{kind}/{slot[0]}.{slot[1]}"


def bound(ask: m.SumStep, received: bytes) -> bytes:
    """What a sum binds to: what is added up, in which form and with which noise, and the name of what it was computed from.

    A client that is sent something else than the others could be alone in a sum of known values, so it gets another name.
    """
    alike = msgspec.structs.replace(ask, slot=(0, 0), models=0, message=b"")
    return sha256(received + m.encode(alike)).digest()


def noise_of(shares: m.NoiseShares) -> SumNoise:
    """The noise that a server asks for. Raises `RemoteError` "malformed" for impossible numbers."""
    if not (0 <= shares.clip_norm < float("inf") and 0 <= shares.count < float("inf")):
        raise RemoteError("malformed")
    try:
        noise = SharedNoise(shares.deviation, shares.survivors)
        return SumNoise(noise, shares.clip_norm, max(shares.clip_norm, shares.count / 2), shares.count)
    except ValueError:
        raise RemoteError("malformed") from None


# --- the server half


class SecaggServerSum:
    """The server's part. With client-level privacy, clients add shares of noise inside the sums."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts
        self._sums = self._runs(parts)
        self._sums.refusals, self._sums.unopened = parts.registry.refusals, parts.registry.unopened
        self._turn = -1
        self._taken: dict[
            int, tuple[tuple[int, ...], frozenset[int], InputTerms]
        ] = {}  # by client of its sum in this turn: survivors, cohort

    def _runs(self, parts: ServerParts) -> Any:
        """The runs of this protocol (`spoilers.SumRuns`)."""
        protection = parts.protection
        roster = parts.roster if protection.secagg_mode == "active" else None
        sums = SecureSums(protection.secure_sum, protection.smallest_sum, parts.session, roster, parts.entropy)
        parts.registry.greeted.append(sums.forget)
        return sums

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
        spread = 1.0 if clipped is not None else asked.spread  # clients add noise, which protects also one that is alone in a block
        for label in groups:
            cohort = [member.client for member in call.members(label)]
            limit = 0.0 if call.public_weights else self._parts.protection.max_weight
            earlier = next((self._taken[client][2] for client in cohort if client in self._taken), None)
            models = self._listed(call, cohort, like)
            terms[label] = self._sums.terms(
                slot, cohort, models, asked.layout.size, limit, following, spread, earlier, noised=noise is not None
            )
            if noise is not None and noise.noise.room(noise.length) > terms[label].levels:
                raise InputError(
                    f"protection.secagg_bits = {terms[label].bits}: a sum of {len(cohort)} clients leaves each {terms[label].levels} "
                    f"integers on either side of zero, a vector with its share of noise takes {noise.noise.room(noise.length)}; use 32, or "
                    "smaller groups"
                )
        if clipped is not None:
            clipped.settle(call)
        ended = self._sums.run(terms, self._sender(call, asked, like), record, spread)
        means: list[GroupMean | None] = [None] * call.k
        for label, total in ended.items():
            if isinstance(total, Sum):
                means[label] = group_mean(total, None, asked.layout, len(total.survivors))
                asked_clients = frozenset(member.client for member in call.members(label))
                self._taken |= dict.fromkeys(total.survivors, (total.survivors, asked_clients, total.terms))
        if not any(means):
            raise TooFewClients(tuple(len(call.members(label)) for label in groups), call.min_cohort)
        return tuple(means) if noise is None else self._opened(means, terms, noise, whole)

    def _opened(
        self, means: Sequence[GroupMean | None], terms: Mapping[int, InputTerms], noise: SumNoise, whole: PartLayout
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
            opened.append(replace(mean, parts={name: Shared(part) for name, part in whole.split(total / mean.count).items()}, rounding=0.0))
            if noise.count:
                below, clients = below + float(total[-1]) / noise.count + mean.count / 2, clients + mean.count
        adaptive = None if self._parts.clipped is None else self._parts.clipped.adaptive
        if adaptive is not None:
            adaptive.follow(below, clients)
        return tuple(opened)

    def _check_groups(self, call: SumCall, groups: Sequence[int]) -> None:
        """Raises `InputError` for a second sum in one turn over other clients, or by other weights, which clients refuse."""
        if self._turn != call.round:
            self._turn, self._taken = call.round, {}
        for label in groups:
            cohort = {member.client for member in call.members(label)}
            for client in sorted(cohort & self._taken.keys()):
                survivors, earlier, terms = self._taken[client]
                if not (cohort.issuperset(survivors) and cohort <= earlier):
                    raise InputError(
                        f"mean: client {client} was in a sum over {len(survivors)} clients in this round, and would be in one over "
                        f"{len(cohort)} others: the difference of the two sums would show an individual; take one sum a client and round"
                    )
                if (terms.weight_limit == 0) != call.public_weights:
                    raise InputError(
                        f"mean: client {client} was in a sum of this round with other weights: two sums with other weights over the same "
                        "clients would show individuals; give all means of a round the same weights"
                    )

    def _like(self, asked: Asked, kind: SumKind, groups: m.HeldValue | m.Picks | None, noise: m.NoiseShares | None = None) -> m.SumStep:
        """What all members of a sum are sent alike."""
        return m.SumStep(self._parts.session, (0, 0), asked.number, asked.parts, 0, kind, groups, b"", noise)

    def _listed(self, call: SumCall, clients: Sequence[int], like: m.SumStep) -> list[bytes]:
        """The names of what a sum binds to. Raises `InputError` for more than the algorithm declares, as clients refuse a longer list."""
        models = {name for client in clients for name in call.models[client]}
        if self._parts.protection.secagg_mode == "active" and UNTRACED in models:
            raise InputError(
                "protection.secagg_mode = 'active': what is to be added up was computed from what clients relayed to each other or hold of "
                "their own, which no sum can be bound to; use 'passive', which trusts the server to follow the protocol"
            )
        listed = sorted(bound(like, model) for model in models)
        most = call.models_at_most
        if like.kind != "sum":  # each block has its own model, and no block of fewer than `min_cohort` clients is opened
            most = max(most, *(len(call.models[client]) for client in clients))
        if len(listed) > most:
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
            steps, alike = dict[int, m.SumStep](), dict[tuple[Slot, int, int], m.SumStep]()  # equal ones are one object
            for client, (slot, message) in sent.items():
                key = slot, id(message), lists[client]
                if key not in alike:
                    alike[key] = msgspec.structs.replace(like, slot=slot, models=lists[client], message=message)
                steps[client] = alike[key]
            return self._exchange(steps, stage)

        return exchange

    def _exchange(self, steps: Mapping[int, m.SumStep], stage: str) -> Mapping[int, bytes]:
        registry = self._parts.registry
        present = {client: step for client, step in steps.items() if client in registry.present}
        before = len(registry.refusals)
        answers = registry.ask(present, stage) if present else {}
        codes = {code for client, at, code in registry.refusals[before:] if client in present and at == stage}
        most = max((step.models for step in present.values()), default=0)
        if not answers and codes == {"forbidden"} and most > 1:  # else shared layers would never change
            raise InputError(
                f"mean: the members of one sum were sent {most} different models (as the algorithm says), and clients allow fewer: write "
                f"models = {most} into their settings"
            )
        return {client: answer.message for client, answer in answers.items() if isinstance(answer, m.Stepped)}


def group_mean(total: Sum[InputTerms], cluster: int | None, layout: PartLayout, count: int) -> GroupMean | None:
    """The mean of a sum; None if its weight is zero."""
    weight = total.weight(cluster)
    if weight <= 0:
        return None
    parts = {name: Shared(part) for name, part in layout.split(total.mean(cluster)).items()}
    return GroupMean(parts, weight, count, total.clipped_clients, tuple(total.survivors), total.rounding(cluster))
