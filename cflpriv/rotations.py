"""`[protection] gram` and `sum` by a transform that the clients share and the server lacks: what is compared, and what is averaged.

The kinds (`permutation`, `signed_permutation`, `hadamard`, `haar`) are those of `protocols.orthonormal`, each with what it hides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .channels import (
    Contribution,
    GramSession,
    Recorder,
    SumCall,
    Transforms,
    Vectors,
    above_floor,
    check_hidden,
    places,
    sketched,
    weighted_mean,
)
from .errors import InputError
from .handles import Blind, GroupMean, Shared
from .protocols.orthonormal import HAAR_LIMIT
from .types import Array

__all__ = ["BlindSum", "RotatedGram"]

_BATCH_BYTES = 1 << 26


def check_length(key: str, what: str, kind: str, dimension: int, instead: str) -> None:
    """Refuse vectors too long for a dense rotation, naming what takes them."""
    if kind == "haar" and dimension > HAAR_LIMIT:
        raise InputError(
            f"protection.{key}: 'haar' keeps d² numbers and takes {what} up to d = {HAAR_LIMIT}; these have d = {dimension}: use {instead}"
        )


@dataclass(frozen=True)
class RotatedGram:
    """What is compared travels under one shared transform an epoch, perhaps after a public sketch.

    Guarantee: inner products are those of the vectors (of their sketches, where they are sketched). What else a server that lacks the
    clients' secret learns differs by kind: under "haar" the rows of one epoch tell their Gram matrix and nothing more.
    Reveals: the Gram matrix; under the other kinds what `protocols.orthonormal` says; all rows, to one client that colludes. Zero rows of
    padded signatures stay zero.
    Source: `protocols.orthonormal`, `protocols.sketch`.
    """

    transforms: Transforms
    kind: str = "haar"
    sketch_dim: int | None = None
    where: Literal["server", "key-holder"] = "server"
    evidence: bool = True

    def open(self, epoch: int) -> GramSession:
        return Vectors(self._protect(epoch))

    def _protect(self, epoch: int) -> Callable[[int, Array], Array]:
        reduce, name = sketched(epoch, self.sketch_dim), self.transforms.name(f"gram/{epoch}")

        def protect(client: int, rows: Array) -> Array:
            self.transforms.check(client, name)
            short = reduce(rows)
            check_length("gram", "vectors", self.kind, short.shape[-1], '["sketch", "haar"] or ["hadamard"]')
            return self.transforms(name, short.shape[-1], self.kind).apply(short)

        return protect


@dataclass(frozen=True)
class BlindSum:
    """The blind mean: clients send updates under a shared transform, the server averages them unseen, the clients turn the mean back.

    Guarantee: against a server that lacks the clients' secret, the updates of one sum tell what the kind of transform tells: under "haar"
    their Gram matrix and nothing more (`transform = "per_round"`; with "fixed", the Gram of all updates ever sent). Weights are public or
    equal.
    Reveals: norms and angles between updates of one sum, who is in which group; everything, to one client that colludes. Where means of
    several sums are folded into one (`federation.fold`, so that a model's blind parts do not pile up), also the norm of that total, and so
    the angle between successive means. **Under "permutation" and "signed_permutation" a curious server reads the labels of clients' data
    off the updates of a network, key or no key, also when every sum has a fresh one**: they are there to be measured.
    Source: Sattler et al. 2019 (CFL), Algorithm 5 (there with a permutation); `protocols.orthonormal`.
    """

    transforms: Transforms
    name: str = "haar"
    fixed: bool = False
    private_weights: bool = False
    oblivious: bool = False
    overlapping: bool = True
    binds_models: bool = False

    def means(self, call: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
        call = call.arriving()
        means: list[GroupMean | None] = [None] * call.k
        for label in above_floor(call):
            members = call.members(label)
            shapes = {name: np.shape(value) for name, value in members[0].parts.items()}
            where = places(shapes)
            dimension = max(stop for _, stop in where.values())
            check_hidden("mean", dimension, self.name)
            check_length("sum", "updates", self.name, dimension, "'hadamard' or 'secagg'")
            purpose = self.transforms.name("sum/fixed" if self.fixed else f"sum/{call.round}/{call.number}/{label}")
            blind = self._blind(purpose, members, dimension)
            record(
                "blind update", "clients", "server", [one.client for one in members], [{"blind": row} for row in blind],
                readers=("server",),
                context={"transform": purpose, "kind": self.name, "group": label, "dimension": dimension, "parts": where},
            )  # fmt: skip
            weights = [one.weight for one in members]
            value = weighted_mean(blind, weights)
            parts = {name: Shared(blind=(Blind(purpose, value, *where[name], shape, dimension),)) for name, shape in shapes.items()}
            means[label] = GroupMean(parts, float(sum(weights)), len(members), heard=tuple(one.client for one in members))
        return tuple(means)

    def _blind(self, purpose: str, members: list[Contribution], dimension: int) -> list[Array]:
        """Each member's parts as one vector under the transform, a few members at a time."""
        transform = self.transforms(purpose, dimension)
        batch = max(1, _BATCH_BYTES // (8 * dimension))
        blind: list[Array] = []
        for start in range(0, len(members), batch):
            rows = [np.concatenate([np.ravel(value) for value in one.parts.values()]) for one in members[start : start + batch]]
            blind += list(transform.apply(np.stack(rows)))
        return blind
