"""Secure aggregation in one message over blocks: a client fills the block of its group; helpers count, and open the large blocks only.

Guarantee: the server, if it lies, `helpers_colluding` of the helpers and any clients learn all counts, and the sum of each block that the
minimum cohort size of members say they fill; not who fills which. One sum for each slot, over one set of clients, see
`protocols.one_message.blocks`. All weigh equally.
Reveals: the counts, also to helpers; who takes part. Counts and totals over changing cohorts are linear equations, as in `oblivious`.
Clients report the counts: a client that overstates a count can get the block of a too small cluster opened. With k models on the list, a
planted one is not noticed. Needs k times the bytes.
Active attacks (`attacks.active`): those of `secagg` and `helped`; `private_choice` and `own_block` are outside of this guarantee.
Source: `protocols.one_message.blocks`.
"""

from typing import ClassVar

from ..contract.calls import Recorder, SumCall
from ..contract.handles import GroupMean
from ..federation import messages as m
from ..federation.protections import Asked
from ..protocols.errors import RemoteError
from ..protocols.one_message import Contribution, HelpedTerms, Sum
from .helped import HelpedClientSum, HelpedServerSum
from .oblivious import chosen_blocks
from .secagg import group_mean
from .secure_sums import ATTEMPTS, OBLIVIOUS

__all__ = ["HiddenClientSum", "HiddenServerSum"]


class HiddenClientSum(HelpedClientSum):
    """A client's part: it fills the blocks of its groups."""

    kinds: ClassVar[tuple[str, ...]] = ("blocks",)

    def _inputs(self, ask: m.SumStep, terms: HelpedTerms) -> list[Contribution]:
        if isinstance(ask.groups, m.Picks) and ask.groups.labels != (0,):  # the server could give this client a block of its own
            raise RemoteError("forbidden")
        if ask.noise is not None or self._parts.ledger.unit == "client":  # nobody adds noise to counts
            raise RemoteError("forbidden")
        labels = chosen_blocks(self._parts, ask)
        vector, _, blank = self._weighed(ask, terms)
        return [Contribution(vector, 1.0, label, is_blank=blank) for label in dict.fromkeys(labels)]


class HiddenServerSum(HelpedServerSum):
    """The server's part: one sum over the blocks of all groups."""

    def means(self, call: SumCall, asked: Asked, choice: m.HeldValue | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        """One sum; None for groups below the minimum cohort size. Raises `TooFewClients` if no group is left."""
        call = self._sums.without_offenders(call)
        clients = [member.client for member in call.contributions]
        like = self._like(asked, "blocks", choice)
        slot = call.round + 1, call.number * ATTEMPTS
        terms = self._sums.terms(slot, clients, self._listed(call, clients, like), asked.layout.size, 0.0, None, asked.spread, None, call.k)
        ended = self._sums.run({OBLIVIOUS: terms}, self._sender(call, asked, like), record, asked.spread)[OBLIVIOUS]
        if not isinstance(ended, Sum):
            raise ended
        sizes = [int(ended.weight(cluster)) for cluster in range(call.k)]
        opened = [cluster for cluster, size in enumerate(sizes) if size >= terms.minimum]
        if any(size and cluster not in opened for cluster, size in enumerate(sizes)):
            self._sums.unopened.add(slot[0])  # clients of a block that stays closed cannot see that; its model does not move
        means: list[GroupMean | None] = [None] * call.k
        for cluster in opened:
            means[cluster] = group_mean(ended, cluster, asked.layout, sizes[cluster])
        return tuple(means)
