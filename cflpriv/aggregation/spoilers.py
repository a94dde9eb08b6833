"""How a server finds the one client whose masked vectors make secure sums leave their range.

A masked vector shows nothing, so one bad sum names nobody. But the client is among the survivors of each sum that fails in this way. While
several clients are suspected, later sums are taken over two halves of each group, each at least the minimum cohort size, with the suspects
divided between them. The half that succeeds counts. Each further failure halves the suspects; the last one is named and left out of the
session. A group of fewer than twice the minimum cohort size is not divided. Two or more such clients that act in turn are not found, and
can make the server suspect another.

Guarantee: that of `secagg` for each half: a sum over at least the minimum cohort size. Reveals: two sums in place of one, of fewer clients.
Source: this project; group testing (Dorfman 1943).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Generic, TypeVar

from ..contract.calls import SumCall
from ..contract.handles import GroupMean
from ..contract.protection import SecureSum
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import TooFewClients
from ..protocols.keys import Roster
from ..protocols.secagg.vectors import InputTerms

__all__ = ["SumRuns", "Suspects", "divided", "halves", "joined", "narrowed"]

Suspects = tuple[frozenset[int], ...]
"""Sets of clients; in each is one that made a sum leave its range."""


SumTerms = TypeVar("SumTerms", bound=InputTerms)


@dataclass
class SumRuns(Generic[SumTerms]):
    """What a server keeps between secure sums, of either protocol.

    `offenders` broke the protocol of a sum. They take no part in later sums of the session. `suspects`: one of each of these sets did.
    `unopened`: the turns with a sum or a block that was not opened after others of its value were ruled out. `parts`: those of the groups
    that were summed in the turn `turn`.
    """

    settings: SecureSum
    min_cohort: int
    session: bytes
    roster: Roster | None
    entropy: Entropy = system_entropy
    refusals: list[tuple[int, str, str]] = field(default_factory=list)
    unopened: set[int] = field(default_factory=set)
    offenders: set[int] = field(default_factory=set)
    suspects: Suspects = ()
    turn: int = -1
    parts: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)

    def without_offenders(self, call: SumCall) -> SumCall:
        """The call without clients that broke the protocol of an earlier sum. Raises `TooFewClients` if no client is left."""
        kept = tuple(member for member in call.contributions if member.client not in self.offenders)
        if not kept:
            raise TooFewClients((0,), self.min_cohort)
        return replace(call, contributions=kept)

    def divided(self, call: SumCall) -> tuple[SumCall, list[int]]:
        """The call over halves of its groups, while clients are suspected; sums of several values in one turn are over the same halves."""
        if call.round != self.turn:
            self.turn, self.parts = call.round, []
        parts = []
        for label in range(call.k):
            clients = tuple(member.client for member in call.members(label))
            known = next((known for known in self.parts if set(clients) <= {client for part in known for client in part}), None)
            if known is None:
                known = halves(clients, self.suspects, call.min_cohort)
                self.parts.append(known)
            parts.append([tuple(client for client in part if client in clients) for part in known])
        return divided(call, parts)

    def suspect(self, survivors: Iterable[int], stage: str) -> None:
        """One of these survivors made a sum leave its range. Names the last one that is suspected."""
        self.suspects = narrowed(self.suspects, survivors)
        found = {client for few in self.suspects if len(few) == 1 for client in few}
        self.offenders |= found
        self.refusals.extend((client, stage, "out-of-range") for client in sorted(found))
        self.suspects = tuple(few for few in self.suspects if not few & found)

    def smallest(self, clients: int, spread: float, earlier: SumTerms | None, before: int) -> int:
        """The fewest clients of a sum over these. A second sum over fewer than were asked `before` is over exactly those; with weights
        inside
        values (`spread`) more than half take part, as their number decides how much values may differ inside."""
        fewest = max(self.min_cohort, clients // 2 + 1) if spread > 1 else self.min_cohort
        return max(fewest, clients) if earlier is not None and clients < before else fewest


def narrowed(suspects: Suspects, survivors: Iterable[int]) -> Suspects:
    """The suspects after another failed sum over these survivors."""
    failed = frozenset(survivors)
    if not any(few & failed for few in suspects):
        return (*suspects, failed)
    return tuple(few & failed or few for few in suspects)


def halves(clients: Sequence[int], suspects: Suspects, min_cohort: int) -> tuple[tuple[int, ...], ...]:
    """The clients of one group in two halves that divide the suspects; in one part where there are none, or too few clients."""
    few = next((sorted(few & set(clients)) for few in suspects if len(few & set(clients)) > 1), None)
    if few is None or len(clients) < 2 * max(1, min_cohort):
        return (tuple(clients),)
    rest = [client for client in clients if client not in few]
    half, wanted = len(few) // 2, len(clients) // 2
    first = [*few[:half], *rest[: max(0, wanted - half)]]
    return tuple(sorted(first)), tuple(sorted(set(clients) - set(first)))


def divided(call: SumCall, parts: Sequence[Sequence[tuple[int, ...]]]) -> tuple[SumCall, list[int]]:
    """The call over the `parts` of each group in place of the groups, and of which group each part is."""
    owners = [label for label, several in enumerate(parts) for _ in several]
    places: dict[int, list[int]] = {}
    for place, clients in enumerate(clients for several in parts for clients in several):
        for client in clients:
            places.setdefault(client, []).append(place)
    members = tuple(replace(member, labels=tuple(places.get(member.client, ()))) for member in call.contributions)
    return replace(call, contributions=members, k=len(owners)), owners


def joined(means: Sequence[GroupMean | None], owners: Sequence[int], k: int) -> tuple[GroupMean | None, ...]:
    """The mean of each group from those of its parts that have one."""
    groups = ([mean for mean, owner in zip(means, owners, strict=True) if owner == label and mean is not None] for label in range(k))
    return tuple(_joined(several) if several else None for several in groups)


def _joined(means: Sequence[GroupMean]) -> GroupMean:
    if len(means) == 1:
        return means[0]
    shares = [float(mean.count if mean.weight is None else mean.weight) for mean in means]
    whole = sum(shares)
    parts = {
        name: reduce(add, (mean.parts[name] * (share / whole) for mean, share in zip(means, shares, strict=True)))
        for name in means[0].parts
    }
    weight = None if any(mean.weight is None for mean in means) else whole
    contributors = tuple(sorted(client for mean in means for client in mean.contributors))
    rounding = max(mean.rounding for mean in means)
    return GroupMean(parts, weight, sum(mean.count for mean in means), sum(mean.clipped for mean in means), contributors, rounding)
