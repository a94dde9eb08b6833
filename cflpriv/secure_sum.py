"""`[protection] sum = "secagg"` and `"secagg-oblivious"`: the sums of a federation through the real protocol, over real bytes.

Every mean is one secure sum per group (or, obliviously, one sum of counts and one over blocks) between one machine a client and the
server's. What they say to each other goes to the transcript as it is.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .channels import Contribution, Recorder, SumCall, above_floor
from .errors import InputError
from .handles import GroupMean, Shared
from .protection import SecureSum
from .protocols import secagg
from .protocols.entropy import Entropy
from .protocols.errors import TooFewClients
from .protocols.fixedpoint import largest_levels
from .protocols.keys import Identity, Roster
from .protocols.secagg import MaskKey, Policy, Slot, Sum
from .types import Array

__all__ = ["ObliviousSecaggSum", "SecaggSum"]

FEWEST_LEVELS = 64
"""A weight quantised to fewer levels distorts its client's share by more than about one per cent."""
NO_MODEL = bytes(32)
"""Stands for the model of clients that were sent none."""


@dataclass(frozen=True, eq=False)
class Parties:
    """The clients' identities, the roster that pins them (active mode), and what earlier sums advertised for later ones."""

    settings: SecureSum
    floor: int
    session: bytes
    identities: Mapping[int, Identity]
    roster: Roster | None
    numbers: Mapping[int, int]
    entropy: Entropy
    ready: dict[Slot, tuple[Mapping[int, MaskKey], Mapping[int, bytes]]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, clients: tuple[int, ...], settings: SecureSum, floor: int, entropy: Entropy) -> "Parties":
        """Identities for all clients, present or not: the roster is pinned before anything starts."""
        numbers = {client: number for number, client in enumerate(sorted(clients))}
        identities = {number: Identity.create(number, entropy) for number in numbers.values()}
        roster = Roster(tuple(identity.public() for identity in identities.values())) if settings.mode == "active" else None
        return cls(settings, floor, entropy(16), identities, roster, numbers, entropy)

    def policies(self, models: Mapping[int, bytes], at_most: int) -> dict[int, Policy]:
        """What each client insists on: its own model on a list no longer than the algorithm says in public, and the floor."""
        listed = len(set(models.values()))
        if listed > at_most:
            raise InputError(
                f"mean: members of one group were sent {listed} different models, where the algorithm speaks of {at_most}: "
                "clients refuse such a sum, in which somebody could stand alone with a private model"
            )
        mode = self.settings.mode
        return {self.numbers[client]: Policy(self.session, mode, model, listed, self.floor) for client, model in models.items()}

    def take(self, slot: Slot) -> tuple[Mapping[int, MaskKey], Mapping[int, bytes]]:
        """The keys that were advertised for a slot; those of slots gone by are dropped."""
        for other in [other for other in self.ready if other < slot]:
            del self.ready[other]
        return self.ready.pop(slot, ({}, {}))

    def keep(self, slot: Slot, keys: Mapping[int, MaskKey], adverts: Mapping[int, bytes]) -> None:
        """Keys for a later slot, from sums over different clients."""
        kept = self.ready.get(slot, ({}, {}))
        self.ready[slot] = ({**kept[0], **keys}, {**kept[1], **adverts})


def _vector(one: Contribution) -> Array:
    return np.concatenate([np.ravel(np.asarray(value)).astype(np.float64) for value in one.parts.values()])


def _parts(mean: Array, like: Contribution) -> dict[str, Shared]:
    """A mean vector cut into the parts of a contribution, in their dtypes."""
    parts, start = {}, 0
    for name, value in like.parts.items():
        stop = start + int(np.prod(value.shape, dtype=int))
        parts[name] = Shared(mean[start:stop].reshape(value.shape).astype(value.dtype))
        start = stop
    return parts


def _models(call: SumCall, members: list[Contribution]) -> dict[int, bytes]:
    return {one.client: call.models.get(one.client, NO_MODEL) for one in members}


class _Log:
    """Collects the messages of one sum by kind, so that the transcript has one record for each."""

    def __init__(self, clients: tuple[int, ...]) -> None:
        self._clients = clients
        self._said: dict[tuple[str, str], list[tuple[int, bytes]]] = {}

    def __call__(self, direction: str, number: int, kind: str, data: bytes) -> None:
        self._said.setdefault((direction, kind), []).append((self._clients[number], data))

    def record(self, recorder: Recorder, context: Mapping[str, Any]) -> None:
        for (direction, kind), said in self._said.items():
            source, target = ("clients", "server") if direction == "up" else ("server", "clients")
            payload = [{"bytes": np.frombuffer(data, dtype=np.uint8)} for _, data in said]
            readers = ("server",) if direction == "up" else ("server", "clients")
            recorder(f"secagg {kind}", source, target, [client for client, _ in said], payload, readers=readers, context=context)


@dataclass(frozen=True, eq=False)
class SecaggSum:
    """One secure sum per group.

    Guarantee: the server learns each group's sum over its survivors (of whom there are at least the floor) and nothing else about a value,
    see `protocols.secagg`. Every sum binds to the list of models that its members were sent, which is one model unless the algorithm says
    in public that there are more.
    Reveals: who is in which group and who drops out, the sums, how many clients clipped. Two sums whose groups differ by one client give
    its value by subtraction. Where the list has k models, a server that plants a private one as one of the k is not stopped; what tasks
    keep in a client's memory is not traced to the models it came from.
    Source: Bonawitz et al. 2017, Bell et al. 2020.
    """

    parties: Parties
    name: str = "secagg"
    oblivious: bool = False
    overlapping: bool = False
    binds_models: bool = True

    @property
    def private_weights(self) -> bool:
        return self.parties.settings.max_weight > 0

    def means(self, call: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
        means: list[GroupMean | None] = [None] * call.k
        slot = (call.round + 1, call.number)
        following = (call.round + 2, call.number)
        keys, adverts = self.parties.take(slot)
        groups = above_floor(call)
        for label in groups:
            log = _Log(tuple(sorted(self.parties.numbers)))
            try:
                with suppress(TooFewClients):  # dropouts took this group below what its sum needs: it has none this time
                    means[label] = self._mean(call, label, slot, following, keys, adverts, log)
            finally:
                log.record(record, {"group": label, "slot": list(slot)})
        if not any(means):
            raise TooFewClients(tuple(len(call.members(label)) for label in groups), call.floor)
        return tuple(means)

    def _mean(
        self, call: SumCall, label: int, slot: Slot, following: Slot, keys: Mapping[int, MaskKey], adverts: Mapping[int, bytes], log: _Log
    ) -> GroupMean | None:
        parties, settings, members = self.parties, self.parties.settings, call.members(label)
        number, models = parties.numbers, _models(call, members)
        by_number = {number[one.client]: one for one in members}
        weighted = not call.public_weights or len({one.weight for one in members}) > 1
        limit = _limit(call, members, settings)
        policies = parties.policies(models, call.models_at_most)
        terms = secagg.make_terms(
            session=parties.session, slot=slot, cohort=by_number, models=models.values(), dimension=len(_vector(members[0])),
            clip=settings.clip, bits=settings.bits, weight_limit=limit if weighted else 0.0, floor=parties.floor, roster=parties.roster,
            following=following, entropy=parties.entropy,
        )  # fmt: skip
        if weighted:
            _check_weights(members, limit, terms.levels)
        outcome = secagg.simulate(
            terms,
            parties.identities,
            lambda n: secagg.Contribution(_vector(by_number[n]), by_number[n].weight),
            roster=parties.roster,
            policy=policies.__getitem__,
            drops={number[client]: stage for client, stage in call.drops.items() if client in models},
            mask_keys=keys,
            adverts=adverts,
            record=log,
            entropy=parties.entropy,
        )
        parties.keep(following, outcome.mask_keys, outcome.adverts)
        common = 1.0 if weighted else members[0].weight
        heard = tuple(by_number[n].client for n in outcome.sum.survivors)
        return _group_mean(outcome.sum, None, members[0], len(heard), heard, common)


@dataclass(frozen=True, eq=False)
class ObliviousSecaggSum:
    """A masked sum of counts, then one masked sum over the blocks of clusters at or above the floor: who is where stays with the clients.

    Guarantee: the server learns, for each cluster at or above the floor, its sum, and all counts; not who is in it.
    Reveals: the counts; k times the bytes. Counts and totals over changing cohorts are linear equations: of who is in which group, while
    clients stay there, and of values that stay (`attacks.cluster_identity`, `attacks.disaggregation`). Counts are the clients' word: one
    that overstates a count can have the block of a cluster below the floor opened. Where a client counts towards several groups, or
    several means are taken in a round, sums whose groups differ by one client give its value by subtraction. With k models on the list, a
    planted one is not noticed.
    Source: ours, over `protocols.secagg.oblivious`; it is for a server that follows the protocol.
    """

    parties: Parties
    name: str = "secagg-oblivious"
    oblivious: bool = True
    overlapping: bool = True
    binds_models: bool = True

    @property
    def private_weights(self) -> bool:
        return self.parties.settings.max_weight > 0

    def means(self, call: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
        parties, settings, members = self.parties, self.parties.settings, list(call.contributions)
        limit = _limit(call, members, settings)
        models = _models(call, members)
        policies = parties.policies(models, call.models_at_most)
        _check_weights(members, limit, largest_levels(len(members), settings.bits))
        by_number = {parties.numbers[one.client]: one for one in members}
        slots: tuple[Slot, Slot] = (call.round + 1, 2 * call.number), (call.round + 1, 2 * call.number + 1)
        terms = secagg.count_terms(
            session=parties.session, slot=slots[0], cohort=sorted(by_number), models=sorted(set(models.values())), clusters=call.k,
            floor=parties.floor, roster=parties.roster, following=slots[1], entropy=parties.entropy,
        )  # fmt: skip
        log = _Log(tuple(sorted(parties.numbers)))
        try:
            outcome = secagg.simulate_oblivious(
                terms,
                parties.identities,
                lambda n: by_number[n].labels,
                lambda n: [secagg.Contribution(_vector(by_number[n]), by_number[n].weight, label) for label in by_number[n].labels],
                slot=slots[1],
                dimension=len(_vector(members[0])),
                clip=settings.clip,
                bits=settings.bits,
                weight_limit=limit,
                roster=parties.roster,
                drops=({}, {parties.numbers[client]: stage for client, stage in call.drops.items()}),
                policy=policies.__getitem__,
                record=log,
                entropy=parties.entropy,
            )
        finally:
            log.record(record, {"slot": [list(slot) for slot in slots]})
        means: list[GroupMean | None] = [None] * call.k
        heard = tuple(by_number[n].client for n in outcome.second.sum.survivors)
        for label in outcome.means:
            # with equal weights the masked weight counts the survivors; otherwise the count is that of the first sum, before its dropouts
            equal = call.public_weights and len({one.weight for one in members}) == 1
            count = round(outcome.second.sum.weight(label) / members[0].weight) if equal else int(outcome.counts[label])
            means[label] = _group_mean(outcome.second.sum, label, members[0], count, heard)
        return tuple(means)


def _group_mean(
    total: Sum, cluster: int | None, like: Contribution, count: int, heard: tuple[int, ...], common: float = 1.0
) -> GroupMean | None:
    """The mean of a sum whose weights, where it is unweighted, are all `common`; None if nothing of weight arrived."""
    weight = total.weight(cluster)
    if weight <= 0:
        return None
    return GroupMean(_parts(total.mean(cluster), like), weight * common, count, total.clipped_clients, heard)


def _limit(call: SumCall, members: list[Contribution], settings: SecureSum) -> float:
    """The public limit of a weight: the largest where weights are public, else what the configuration says."""
    return max(one.weight for one in members) if call.public_weights else settings.max_weight


def _check_weights(members: list[Contribution], limit: float, levels: int) -> None:
    """Each client, for itself: its weight is below the limit, and still worth some of the quantiser's levels."""
    for one in members:
        if one.weight > limit:
            raise InputError(
                f"client {one.client}: its weight is above protection.max_weight = {limit:g}; that maximum is public and must hold for all"
            )
        if one.weight / limit * levels < FEWEST_LEVELS:
            raise InputError(
                f"client {one.client}: its weight is below {FEWEST_LEVELS} of the {levels} levels up to max_weight = {limit:g}; "
                "lower protection.max_weight, or use secagg_bits = 32"
            )
