"""Sums in one message against pairwise sums: processor time of all parties, and bytes of a client.

    python -m benchmarks one_message               # n = 100, d = 10^5 and n = 1,000, d = 10^4; the active sum of 1,000 takes minutes
    python -m benchmarks one_message 100x100000    # these sizes only; "passive", "active" and "flower" select what is beside

All parties run in this process, each sum over real bytes, 32 bits, nobody drops out, four helpers of which one may collude. "flower" is
SecAgg+ of Flower (`flower_sums`). A row is the median of paired runs, one after the other in turn. Each party pays for its own checks: the
memory of good signatures, which parties of one process would share, is off. A goal is met if the ratio of the paired run is at least as
large in the median.
"""

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from cflpriv.protocols import keys, one_message, secagg
from cflpriv.protocols.keys import Identity, Roster

from .flower_sums import secagg_plus

__all__ = ["Parties", "main"]

SESSION, MODEL = bytes(16), sha256(b"benchmark").digest()
HELPERS, COLLUDING = 4, 1
GOALS = {(100, 100_000, "passive"): 3.0, (100, 100_000, "active"): 6.0, (1000, 10_000, "passive"): 8.0, (1000, 10_000, "active"): 60.0}
BYTES_GOAL = 1.1
PAIRS = {100: 5, 1000: 1}
"""Paired runs by number of clients; one where there is no entry."""


class Parties:
    """Clients and helpers with their keys, and the values of a size."""

    def __init__(self, n: int, d: int) -> None:
        self.n, self.d = n, d
        self.clients = [Identity.create(client) for client in range(n)]
        self.helpers = [Identity.create(0) for _ in range(HELPERS)]
        holders = [identity.public() for identity in self.helpers]
        self.roster = Roster(tuple(identity.public() for identity in self.clients), holders[0], tuple(holders[1:]))
        self.values = np.random.default_rng(0).uniform(-1, 1, d).astype(np.float32)

    def one_message(self) -> tuple[float, float]:
        """(processor seconds, bytes that a client uploads) of a sum in one message."""
        begun = time.process_time()
        policy = one_message.HelperPolicy(SESSION, COLLUDING)
        helpers = {number: one_message.Helper(identity, self.roster, policy, {}) for number, identity in enumerate(self.helpers)}
        announced = {number: helper.announcement(1) for number, helper in helpers.items()}
        terms = one_message.make_terms(
            session=SESSION, slot=(1, 0), roster=self.roster, colluding=COLLUDING, announced=announced, clients=self.n, models=[MODEL],
            dimension=self.d, clip=1.0,
        )  # fmt: skip
        outcome = one_message.simulate(
            terms, announced, self.roster, self.clients, helpers, lambda client: one_message.Contribution(self.values)
        )
        spent = time.process_time() - begun
        self._check(outcome.sum)
        return spent, outcome.upload_bytes / self.n

    def pairwise(self, mode: str) -> tuple[float, float]:
        """The same of a sum with pairwise masks."""
        begun = time.process_time()
        roster = self.roster if mode == "active" else None
        terms = secagg.make_terms(
            session=SESSION, slot=(1, 0), cohort=range(self.n), models=[MODEL], dimension=self.d, clip=1.0, roster=roster
        )
        identities = {identity.client: identity for identity in self.clients}
        outcome = secagg.simulate(terms, identities, lambda client: secagg.Contribution(self.values), roster=roster)
        spent = time.process_time() - begun
        self._check(outcome.sum)
        return spent, outcome.upload_bytes / self.n

    def flower(self) -> tuple[float, float]:
        """The same of a sum by Flower."""
        return secagg_plus(self.n, self.values)

    def _check(self, total: Any) -> None:
        step = 1.0 / total.terms.levels
        if float(np.abs(total.mean() - self.values).max()) > step:
            raise AssertionError("a benchmark of a wrong sum")


def paired(ours: Callable[[], tuple[float, float]], theirs: Callable[[], tuple[float, float]], count: int) -> list[tuple[float, ...]]:
    """(our seconds, our bytes, their seconds, their bytes) of each pair, in turn."""
    rows = []
    for number in range(count):
        first, second = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        one, other = first(), second()
        rows.append((*one, *other) if number % 2 == 0 else (*other, *one))
    return rows


def main(words: Sequence[str]) -> int:
    """Print the table; 1 if a goal is missed."""
    checked = keys._valid
    keys._valid = checked.__wrapped__  # type: ignore[assignment]
    try:
        return _table(words)
    finally:
        keys._valid = checked


def _table(words: Sequence[str]) -> int:
    sizes = [tuple(int(part) for part in word.split("x")) for word in words if "x" in word and word[0].isdigit()]
    modes = [word for word in words if word in ("passive", "active", "flower")] or ["passive", "active"]
    missed = 0
    print(
        f"{'n':>6} {'d':>9} {'beside':>8} {'ours s':>8} {'theirs s':>9} {'ratio':>6} {'goal':>5} {'bytes':>10} {'theirs':>10} {'ratio':>6}"
    )
    for n, d in sizes or [(100, 100_000), (1000, 10_000)]:
        parties = Parties(n, d)
        for mode in modes:
            theirs_sum = parties.flower if mode == "flower" else partial(parties.pairwise, mode)
            rows = paired(parties.one_message, theirs_sum, PAIRS.get(n, 1))
            ratio = statistics.median(theirs / ours for ours, _, theirs, _ in rows)
            ours, sent, theirs, received = (statistics.median(column) for column in zip(*rows, strict=True))
            goal = GOALS.get((n, d, mode))
            missed += goal is not None and (ratio < goal or (mode == "passive" and sent / received > BYTES_GOAL))
            print(
                f"{n:>6} {d:>9} {mode:>8} {ours:>8.2f} {theirs:>9.2f} {ratio:>6.1f} {goal or '':>5} {sent:>10.0f} {received:>10.0f} "
                f"{sent / received:>6.2f}",
                flush=True,
            )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    return int(missed > 0)
