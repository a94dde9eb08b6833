"""Secure aggregation over blocks: a masked sum of counts, then one masked sum over the blocks of clusters that are large enough.

Guarantee: the server learns, for each cluster at or above the minimum cohort size, its sum, and all counts; not who is in it.
Reveals: the counts; k times the bytes. Counts and totals over changing cohorts are linear equations: of who is in which group, while
clients stay there, and of values that stay (`attacks.cluster_identity`, `attacks.disaggregation`). Counts are the clients' word: one that
overstates a count can have the block of a cluster below the minimum opened. Where a client counts towards several groups, or several means
are taken in a round, sums whose groups differ by one client give its value by subtraction. With k models on the list, a planted one is not
noticed.
Active attacks (`attacks.active`): those of `secagg`, which are outside of this guarantee.
Source: ours, over `protocols.secagg.oblivious`; it is for a server that follows the protocol.
"""

from typing import ClassVar

import numpy as np

from ..contract.calls import Recorder, SumCall
from ..contract.handles import GroupMean
from ..federation import messages as m
from ..federation.protections import Asked, size_of
from ..protocols import secagg
from ..protocols.errors import RemoteError, SumFailed, TooFewClients
from ..protocols.secagg import Sum, counts_of
from . import secagg as by_group
from .secagg import ATTEMPTS, OBLIVIOUS, check_balance, group_mean

__all__ = ["ClientSum", "ServerSum"]


class ClientSum(by_group.ClientSum):
    """A client's part: first it counts towards its groups, then it brings its vector to their blocks."""

    kinds: ClassVar[tuple[str, ...]] = ("counts", "blocks")

    def _contributions(self, ask: m.Step, machine: secagg.Client) -> list[secagg.Contribution]:
        terms = machine.terms
        assert terms is not None
        self._check(ask, machine)
        labels: tuple[int, ...] = (0,)
        if isinstance(ask.groups, m.Mine):
            chosen = self._parts.allowed("sum", ask.groups.held, (ask.groups.part,))
            labels = tuple(int(label) for label in np.ravel(np.asarray(chosen[ask.groups.part])))
            self._parts.ledger.settle(ask.groups.held, (ask.groups.part,), "mean")
        if ask.kind == "blocks":
            vector, weight = self._weighed(ask, machine)
            return [secagg.Contribution(vector, weight, label) for label in labels]
        if any(not 0 <= label < terms.dimension for label in labels):
            raise RemoteError("bad-input")
        self._parts.ledger.shares(None, 0, 0, False)
        return [secagg.membership(terms.dimension, labels)]


class ServerSum(by_group.ServerSum):
    """The server's part."""

    def means(self, call: SumCall, asked: Asked, choice: m.Mine | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        """A sum of counts, then one over the blocks of clusters at the minimum cohort size; who is where stays with the clients."""
        call = self._sums.without_offenders(call)
        clients = [one.client for one in call.contributions]
        counts, blocks = (self._listed(call, clients, self._like(asked, kind, choice)) for kind in ("counts", "blocks"))
        limit = self._limit(call, call.contributions)
        first, second = ((call.round + 1, (2 * call.number + which) * ATTEMPTS) for which in (0, 1))
        counted = self._sums.run(
            {OBLIVIOUS: self._sums.counts(first, clients, counts, call.k, second)},
            self._stepper(call, asked, "counts", choice), self._exchange, record,
        )[OBLIVIOUS]  # fmt: skip
        if not isinstance(counted, Sum):
            raise counted
        dimension = size_of(asked.layout)
        try:
            terms = self._sums.blocks(counted, second, blocks, dimension, limit)
        except SumFailed:  # counts that no members have
            raise TooFewClients((0,), call.min_cohort) from None
        check_balance(call, call.contributions, terms)
        step = self._stepper(call, asked, "blocks", choice)
        total = self._sums.run({OBLIVIOUS: terms}, step, self._exchange, record)[OBLIVIOUS]
        if not isinstance(total, Sum):
            raise total
        means: list[GroupMean | None] = [None] * call.k
        sizes = counts_of(counted)
        equal = call.public_weights and len({one.weight for one in call.contributions}) == 1
        for label, _ in total.terms.blocks:
            count = round(total.weight(label) / call.contributions[0].weight) if equal else sizes[label]
            means[label] = group_mean(total, label, asked.layout, count)
        return tuple(means)
