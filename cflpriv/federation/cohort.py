"""Who takes part: a round's cohort, injected dropouts, sizes of groups, public weights. All draws are keyed, none is secret.

So it is known before a run in which rounds each client is asked (`schedule`). What noise costs depends on the number of a client's rounds,
and what correlated noise saves on how far apart they are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ..contract.calls import SumCall
from ..contract.handles import Held, Labels, label_sets
from ..contract.operations import Sampling
from ..contract.protection import Protection
from ..errors import InputError
from ..randomness import stream

__all__ = ["CohortRounds", "check_mean", "draw_cohort", "draw_drop", "group_sizes", "public_weights", "schedule"]


def draw_cohort(
    sampling: Sampling, clients: Sequence[int], labels: Labels | None, smallest: int, seed: int, round_number: int
) -> tuple[int, ...]:
    """The clients of a round, ascending: a share of all, or of each cluster, then at least `smallest` if it has as many."""
    share = sampling.participation
    if sampling.mode == "fixed_cohorts":
        return _fixed_cohort(share, clients, labels, smallest, seed, round_number)
    if sampling.mode == "global":
        return tuple(sorted(_sample(tuple(clients), max(1, round(share * len(clients))), "cohort", seed, round_number)))
    if labels is None:
        raise InputError("training.sampling: 'per_cluster' needs cluster labels, which the server does not have here; use 'global'")
    sets, _ = label_sets(labels, clients, None, "cohort")
    chosen: set[int] = set()
    for label in sorted({label for several in sets.values() for label in several}):
        members = tuple(client for client in clients if label in sets[client])
        size = min(len(members), max(smallest, round(share * len(members))))
        chosen |= _sample(members, size, f"cohort {label}", seed, round_number)
    return tuple(sorted(chosen))


def _fixed_cohort(
    share: float, clients: Sequence[int], labels: Labels | None, smallest: int, seed: int, round_number: int
) -> tuple[int, ...]:
    """Deal each cluster (without labels: all clients) into fixed cohorts, and take one per round in turn.

    Sums over the members of a cluster then repeat, so their differences reveal nothing until its members change.
    """
    sets = dict.fromkeys(clients, (0,)) if labels is None else label_sets(labels, clients, None, "cohort")[0]
    chosen: list[int] = []
    for label in sorted({label for several in sets.values() for label in several}):
        members = [client for client in clients if label in sets[client]]
        cohorts = max(1, len(members) // max(smallest, round(share * len(members))))
        draws = {client: float(stream(seed, "fixed cohorts", client=client).random()) for client in members}
        members.sort(key=lambda client: (draws[client], client))
        chosen += members[round_number % cohorts :: cohorts]
    return tuple(sorted(set(chosen)))


@lru_cache(maxsize=1 << 10)
def _sample(pool: tuple[int, ...], size: int, purpose: str, seed: int, round_number: int) -> frozenset[int]:
    """`size` of the pool. Draws are keyed by client, so they depend neither on the order nor on new clients.

    Kept, because a run that counts participations beforehand (`schedule`) asks twice.
    """
    if size >= len(pool):  # nobody is left out, whatever the draws
        return frozenset(pool)
    draws = {client: float(stream(seed, purpose, round_number, client).random()) for client in pool}
    return frozenset(sorted(pool, key=lambda client: (draws[client], client))[:size])


@lru_cache(maxsize=1 << 14)
def draw_drop(probability: float, stages: tuple[str, ...], seed: int, round_number: int, call: int, client: int) -> str | None:
    """The stage of a call of `mean` at which a client drops out, or None. The same under every protection."""
    draw = stream(seed, f"dropout {call}", round_number, client)
    return stages[int(draw.integers(len(stages)))] if draw.random() < probability else None


def check_mean(protection: Protection, weights: str | Mapping[int, float], groups: object, k: int | None) -> None:
    """Raises `InputError` for a mean that this protection of sums does not support, and names an alternative."""
    name = protection.sum
    private_weights = protection.max_weight > 0 if protection.secure else not protection.sums.transformed
    if protection.sums.oblivious and not isinstance(groups, Held) and (k or 1) > 1:
        raise InputError(f"mean: sum = {name!r} keeps groups private, but these are public already; use sum = 'secagg'")
    if groups is not None and k is None:
        raise InputError("mean: give k, the number of groups, with `groups`")
    if protection.secure and not isinstance(weights, str):
        raise InputError(
            f"mean: weights by client under sum = {name!r}: no server chooses weights there, as it could give one client all of a sum; use "
            "'equal', or 'examples' with protection.max_weight"
        )
    if weights == "examples" and not private_weights:
        raise InputError(f"mean: weights = 'examples' would show every client's sample count under sum = {name!r}; use 'equal'")
    if isinstance(weights, str) and weights not in ("equal", "examples"):
        raise InputError(f"mean: weights = {weights!r} is not known; use 'equal', 'examples' or a mapping by client")


def group_sizes(groups: Labels | Held | None, call: SumCall, present: Collection[int]) -> tuple[int, ...]:
    """How many present clients belong to each group. Where the server has no labels: how many take part."""
    if groups is None or isinstance(groups, Held):
        return call.counts() if groups is None else tuple(max(count, call.min_cohort) for count in call.counts())
    sizes = [0] * call.k
    for client in present:
        try:
            (labels, _) = label_sets(groups, [client], call.k, "mean: groups")
        except InputError:
            continue
        for label in labels[client]:
            sizes[label] += 1
    return tuple(sizes)


def public_weights(weights: str | Mapping[int, float], clients: Sequence[int]) -> dict[int, float]:
    """The public weight of each client, 0 for its own sample count. Raises `InputError` for a missing or impossible one."""
    if isinstance(weights, str):
        return dict.fromkeys(clients, 1.0 if weights == "equal" else 0.0)
    chosen: dict[int, float] = {}
    for client in clients:
        if client not in weights:
            raise InputError(f"mean: no weight for client {client}")
        chosen[client] = weight = float(weights[client])
        if not (np.isfinite(weight) and weight > 0):
            raise InputError(f"mean: client {client} has weight {weight}; weights are finite and above 0")
    return chosen


# --- before the run


@dataclass(frozen=True)
class CohortRounds:
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


def schedule(sampling: Sampling, clients: Sequence[int], smallest: int, seed: int, rounds: int, labels: bool = False) -> CohortRounds:
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
        return CohortRounds(rounds, dict.fromkeys(everyone, tuple(range(rounds))))
    rounds_of: dict[int, list[int]] = {client: [] for client in everyone}
    together = dict.fromkeys(everyone, 0)
    for number in range(rounds):
        for client in draw_cohort(sampling, everyone, together, smallest, seed, number):
            rounds_of[client].append(number)
    return CohortRounds(rounds, {client: tuple(numbers) for client, numbers in rounds_of.items()})
