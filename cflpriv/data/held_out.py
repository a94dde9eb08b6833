"""Which of a client's training samples are kept back from all training, to score models on (`[data] held_out`)."""

from dataclasses import replace
from typing import Literal

import numpy as np

from ..errors import InputError
from ..randomness import stream
from ..types import ClientData, Population

__all__ = ["FEWEST", "SHARE", "HeldOut", "held_out_count", "hold_out", "with_held_out"]

SHARE, FEWEST = 0.2, 5
"""The share of a client's training samples that is kept back, and the fewest samples."""
HeldOut = Literal["none", "random", "last"]


def held_out_count(samples: int) -> int:
    """How many of a client's training samples are kept back: a fifth, at least five, and never more than half of them."""
    return min(max(FEWEST, round(SHARE * samples)), samples // 2)


def hold_out(client: ClientData, how: HeldOut, gap: int, seed: int) -> ClientData:
    """The client with a part of its training samples as `held_out` (x, y), and the others as its training samples.

    "random": a part drawn at random. "last": the last ones, for samples in the order of time; the `gap` samples before these, which share
    measurements with them, are in neither part. "none": no sample is held out.

    Raises `InputError` for a client without a training sample left.
    """
    count = 0 if how == "none" else held_out_count(client.samples)
    order = np.arange(client.samples)
    if how == "random":
        order = stream(seed, "data.held_out", client=client.id).permutation(client.samples)
    end = client.samples - count
    train, held = np.sort(order[: max(0, end - gap) if how == "last" and count else end]), np.sort(order[end:])
    if not len(train):
        raise InputError(f"[data] held_out_gap = {gap}: leaves client {client.id} no training sample of {client.samples}")
    return replace(
        client, x_train=client.x_train[train], y_train=client.y_train[train], held_out=(client.x_train[held], client.y_train[held])
    )


def with_held_out(population: Population, how: HeldOut, gap: int, seed: int) -> Population:
    """The population whose clients hold samples out; unchanged with "none", and where they do so already."""
    if how == "none" or all(client.held_out is not None for client in population.clients):
        return population
    return replace(population, clients=tuple(hold_out(client, how, gap, seed) for client in population.clients))
