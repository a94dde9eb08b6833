"""Which rounds each client is asked in, known before the run: cohorts are drawn from public randomness.

`cohort.draw_cohort` draws them in a run, and here, so the two cannot differ. What noise costs depends on the number of a client's rounds,
and what correlated noise saves on how far apart they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..contract.operations import Sampling
from .cohort import draw_cohort

__all__ = ["Schedule", "schedule"]


@dataclass(frozen=True)
class Schedule:
    """The cohorts of `rounds` rounds. `rounds_of` has for each client its rounds, ascending; none for a client that is never asked."""

    rounds: int
    rounds_of: Mapping[int, tuple[int, ...]]

    @property
    def counts(self) -> dict[int, int]:
        """In how many rounds each client is asked."""
        return {client: len(numbers) for client, numbers in self.rounds_of.items()}

    @property
    def most(self) -> int:
        """In how many rounds the most frequent client is asked; 0 without clients."""
        return max(self.counts.values(), default=0)

    @property
    def separation(self) -> int:
        """The fewest rounds from one participation of a client to its next: 1 where some client is asked twice in a row.

        `rounds` where no client is asked twice (at least 1).
        """
        gaps = (later - earlier for numbers in self.rounds_of.values() for earlier, later in pairwise(numbers))
        return min(gaps, default=max(1, self.rounds))


def schedule(sampling: Sampling, clients: Sequence[int], smallest: int, seed: int, rounds: int, labels: bool = False) -> Schedule:
    """The cohorts of a run whose `clients` are present in every round, which are one group.

    `smallest` is the fewest clients of a cohort (`Protection.smallest_group`), `seed` that of the run. Under "global" sampling groups do
    not matter. With `labels` there are groups that nobody knows beforehand: under the other two ways of sampling each client is then
    counted in every round, because that is what happens to a client of a small group. Dropouts do not matter: who drops out was asked. Nor
    does it matter where a run is resumed. Others take the place of a client that is missing when a round begins: then this is no upper
    bound.

    Raises `InputError` for impossible sampling.
    """
    everyone = tuple(sorted(clients))
    if labels and sampling.mode != "global":
        return Schedule(rounds, dict.fromkeys(everyone, tuple(range(rounds))))
    found: dict[int, list[int]] = {client: [] for client in everyone}
    together = dict.fromkeys(everyone, 0)
    for number in range(rounds):
        for client in draw_cohort(sampling, everyone, together, smallest, seed, number):
            found[client].append(number)
    return Schedule(rounds, {client: tuple(numbers) for client, numbers in found.items()})
