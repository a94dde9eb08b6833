"""Drift in simulations: before some rounds clients get other data, of their own group or of another, or join the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from ..errors import InputError
from ..keys import Key, check_ranges
from ..randomness import stream
from ..types import Array
from .partition import Partition
from .text import TEXTS

if TYPE_CHECKING:
    from .spec import DataSpec

__all__ = ["OWN", "Drift", "check_drift", "stages", "with_stages"]

OWN = -1
"""The group of a client that stays in its own."""


@dataclass(frozen=True)
class Drift:
    """What happens to some clients before a round. Data that they get are samples that they did not have before, as many."""

    round: Annotated[int, Key("It happens before this round; the first is 0.", "[1, inf)", "rounds")]
    clients: Annotated[tuple[int, ...], Key("The ids of the clients.", "[0, inf)")]
    group: Annotated[int, Key("The true group whose data they get; −1: their own.", "[-1, inf)")] = OWN
    joins: Annotated[bool, Key("They are absent before, and join with the data of their own group.")] = False

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "data.drift")


def check_drift(spec: "DataSpec") -> None:
    """Raises `InputError` for entries that do not go together with each other or with the other keys."""

    def refused(problem: str) -> InputError:
        return InputError(f"[data] drift: {problem}")

    if not spec.drift:
        return
    if spec.held_out != "none":
        raise refused(f"goes with held_out = 'none', and this is {spec.held_out!r}")
    if spec.source in ("mixture", *TEXTS) or spec.partition not in ("iid", "pathological", "kinds"):
        raise refused(
            f"needs partition 'iid', 'pathological' or 'kinds', no mixture and no texts; this is {spec.source!r} by {spec.partition!r}"
        )
    if spec.scaling is not None and spec.scaling.per_client:
        raise refused("clients standardise by their own samples, which change; use standardise = 'constants' or 'none'")
    changes = [entry for entry in spec.drift if not entry.joins]
    if changes and not spec.samples_per_client:
        raise refused("clients get new samples: give samples_per_client, the number that they have at a time")
    for entry in spec.drift:
        strange = [client for client in entry.clients if client >= spec.clients]
        if strange or not entry.clients:
            raise refused(f"round {entry.round}: clients = {list(entry.clients)}: expected some of 0 to {spec.clients - 1}")
        if entry.joins and entry.group != OWN:
            raise refused(f"round {entry.round}: group = {entry.group} with joins = true: who joins has the data of its own group")
    joining = [client for entry in spec.drift if entry.joins for client in entry.clients]
    twice = sorted({client for client in joining if joining.count(client) > 1})
    if twice:
        raise refused(f"clients {twice} join twice")
    if len(joining) == spec.clients:
        raise refused("all clients join later, so that none is there at the start")
    for number in {entry.round for entry in changes}:
        of_round = [client for entry in changes if entry.round == number for client in entry.clients]
        if len(set(of_round)) < len(of_round):
            raise refused(f"round {number}: a client is named twice")


def stages(drift: Sequence[Drift]) -> int:
    """So many sets of samples a client has at most, one after the other."""
    clients = [client for entry in drift if not entry.joins for client in entry.clients]
    return 1 + max((clients.count(client) for client in clients), default=0)


def with_stages(partition: Partition, samples: int, seed: int) -> tuple[Partition, dict[int, Array]]:
    """The partition with the first `samples` of each client, and by client the others, in random order."""
    first, others = [], {}
    for client, own in zip(partition.ids, partition.train, strict=True):
        mixed = own[stream(seed, "data.drift", client=client).permutation(len(own))]
        first.append(np.sort(mixed[:samples]))
        others[client] = mixed[samples:]
    return Partition(partition.ids, tuple(first), partition.test, partition.groups, partition.notes, partition.groups_known), others
