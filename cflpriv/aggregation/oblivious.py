"""Secure aggregation over blocks: a masked sum of counts, then one masked sum over the blocks of clusters that are large enough.

Guarantee: the server learns all counts, and the sum of each cluster at or above the minimum cohort size; not who is in which cluster.
Weights are private, and the effective number of clients of every open block is at least the minimum cohort size.
Reveals: the counts; needs k times the bytes. Counts and totals over changing cohorts are linear equations: in the memberships, while
clients stay in their groups, and in values that do not change (`attacks.cluster_identity`, `attacks.disaggregation`). Clients report the
counts: one that overstates a count can get the block of a too small cluster opened. Where a client counts towards several groups, or a
round has several means, sums whose groups differ by one client reveal its value by subtraction. With k models on the list, a planted one
is not noticed.
Active attacks (`attacks.active`): those of `secagg`, which are outside of this guarantee.
Source: this project, over `protocols.secagg.oblivious`; for a server that follows the protocol.
"""

from typing import ClassVar

import numpy as np

from ..contract.calls import Recorder, SumCall
from ..contract.handles import GroupMean
from ..federation import messages as m
from ..federation.protections import Asked, ClientParts
from ..protocols import secagg
from ..protocols.errors import RemoteError, SumFailed, TooFewClients
from ..protocols.secagg import counts_of
from . import secagg as by_group
from .secagg import group_mean
from .secure_sums import ATTEMPTS

__all__ = ["ObliviousClientSum", "ObliviousServerSum", "chosen_blocks"]


def chosen_blocks(parts: ClientParts, ask: m.SumStep) -> tuple[int, ...]:
    """The groups that the client counts towards, by its own choice, after its ledger was charged for the choice; the first by default."""
    if not isinstance(ask.groups, m.HeldValue):
        return (0,)
    chosen = parts.allowed("sum", ask.groups.held, (ask.groups.part,))
    parts.ledger.settle(ask.groups.held, (ask.groups.part,), "mean")
    return tuple(int(label) for label in np.ravel(np.asarray(chosen[ask.groups.part])))


class ObliviousClientSum(by_group.SecaggClientSum):
    """A client's part: it counts towards its groups, then adds its vector to their blocks."""

    kinds: ClassVar[tuple[str, ...]] = ("counts", "blocks")

    def _contributions(self, ask: m.SumStep, machine: secagg.Client) -> list[secagg.Contribution]:
        terms = machine.terms
        assert terms is not None
        self._check(ask, machine)
        if ask.noise is not None:  # nobody sees how many members a block has, so how many shares of noise it would get
            raise RemoteError("forbidden")
        labels = chosen_blocks(self._parts, ask)
        if ask.kind == "blocks":
            vector, weight, blank = self._weighed(ask, terms)
            return [secagg.Contribution(vector, weight, label, is_blank=blank) for label in dict.fromkeys(labels)]
        if self._parts.ledger.unit == "client":  # counts without noise
            raise RemoteError("forbidden")
        return [secagg.membership(terms.dimension, sorted({label % terms.dimension for label in labels}))]  # a refusal would tell the label


class ObliviousServerSum(by_group.SecaggServerSum):
    """The server's part. The blocks of one round have one least weight, as clients sum a value under one only."""

    _least: float | None = None

    def means(self, call: SumCall, asked: Asked, choice: m.HeldValue | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        """A sum of counts, then one over the blocks of clusters of at least the minimum cohort size."""
        call = self._sums.without_offenders(call)
        clients = [member.client for member in call.contributions]
        counting, adding = self._like(asked, "counts", choice), self._like(asked, "blocks", choice)
        if self._turn != call.round:
            self._turn, self._least = call.round, None
        counts, blocks = (self._listed(call, clients, like) for like in (counting, adding))
        first, second = ((call.round + 1, (2 * call.number + which) * ATTEMPTS) for which in (0, 1))
        terms = self._sums.counts(first, clients, counts, call.k, second)
        counted = self._sums.run_one(terms, self._sender(call, asked, counting), record)
        try:
            limit = 0.0 if call.public_weights else self._parts.protection.max_weight
            terms = self._sums.blocks(counted, second, blocks, asked.layout.size, limit, self._least, asked.spread)
        except SumFailed:  # counts that no members have
            raise TooFewClients((0,), call.min_cohort) from None
        total = self._sums.run_one(terms, self._sender(call, asked, adding), record, asked.spread)
        if limit:
            self._least = total.terms.least_weight
        means: list[GroupMean | None] = [None] * call.k
        sizes = counts_of(counted)
        if any(size and label not in dict(total.terms.blocks) for label, size in enumerate(sizes)):
            self._sums.unopened.add(second[0])  # clients of a block that stays closed cannot see that; its model does not move
        for label, _ in total.terms.blocks:
            count = round(total.weight(label)) if call.public_weights else sizes[label]
            means[label] = group_mean(total, label, asked.layout, count)
        return tuple(means)
