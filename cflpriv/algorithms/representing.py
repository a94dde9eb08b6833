"""StoCFL, where the data are: a client's representation, and its link of the authors' chain.

Source: Zeng et al. 2023, Algorithm 1, lines 5 and 6, Section 3.1; deviations are listed in `stocfl`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from ..engine import Device, Result, TaskInput
from ..errors import InputError
from ..privacy.private_signatures import NoisyGradient
from ..privacy.settings import Noise
from ..randomness import stream
from ..tasks.training import Gradient, Train
from ..types import Array, Parts

__all__ = ["ChainLink", "Represent", "count_sketch"]


@dataclass(frozen=True)
class Represent:
    """Ψ(D), a client's representation at the given "model" ψ (Sec. 3.1). Part: "representation" (d,), or (sketch,) if above 0, float64.

    `task` is `Gradient`, for ∂ℓ(ψ; D)/∂ψ, or `Train`, for the movement ψ − ψ' of local training (authors). `normalise` to norm 1; a zero
    vector stays zero. The sketch's hashes come from the public `seed`. With `remember` the client keeps Ψ and computes it only once.

    Reveals: whoever sees Ψ sees a gradient of the client's data, from which labels, and for small data sets samples, can be computed.
    """

    task: Gradient | Train
    normalise: bool = True
    sketch: int = 0
    seed: int = 0
    remember: bool = False

    def private(self, noise: Noise) -> NoisyGradient:
        """This representation under sample-level differential privacy, in `noise.sketch_dim` dimensions."""
        if isinstance(self.task, Train):
            raise InputError("algorithm.variant: a representation by local training (authors) has no private form; use 'paper'")
        return NoisyGradient(
            self.task.model, "representation", self.normalise, noise.sketch_dim, noise.clip_norm, noise.signature, noise.relation,
            noise.seed,
        )  # fmt: skip

    parts: ClassVar[Parts] = {"representation": "compared"}

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("representation",) if self.remember else ()

    @property
    def reads(self) -> tuple[str, ...]:
        return self.keeps

    def run(self, given: TaskInput) -> Result:
        if "representation" in given.memory:
            return {"representation": given.memory["representation"]}
        return self._result(self.task.run(given))

    def cost(self, given: TaskInput) -> int:
        return self.task.cost(given)

    def chunk_size(self, given: TaskInput, device: Device) -> int:
        return self.task.chunk_size(given, device)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        fresh = [given for given in inputs if "representation" not in given.memory]
        results, path = self.task.run_many(fresh, device) if fresh else ([], "remembered")
        made = {given.data.id: self._result(result) for given, result in zip(fresh, results, strict=True)}
        return [made[given.data.id] if given.data.id in made else self.run(given) for given in inputs], path

    def _result(self, result: Result) -> Result:
        if not result:  # training diverged: the client sits this out
            return {}
        vector = -np.asarray(result["update"], np.float64) if isinstance(self.task, Train) else np.asarray(result["gradient"], np.float64)
        norm = float(np.linalg.norm(vector))
        if self.normalise and norm > 0:
            vector = vector / norm
        return {"representation": count_sketch(vector, self.sketch, self.seed) if self.sketch else vector}


def count_sketch(vector: Array, size: int, seed: int) -> Array:
    """A linear map (d,) -> (size,) that keeps inner products up to ‖x‖‖y‖ / sqrt(size): each coordinate goes to one bucket with a sign.

    Source: Charikar, Chen & Farach-Colton 2002.
    """
    buckets, signs = _hashes(len(vector), size, seed)
    return np.bincount(buckets, weights=signs * vector, minlength=size)


@lru_cache(maxsize=2)
def _hashes(dimension: int, size: int, seed: int) -> tuple[Array, Array]:
    draws = stream(seed, f"stocfl sketch {dimension} {size}")
    return draws.integers(size, size=dimension), draws.choice(np.array([-1.0, 1.0]), size=dimension)


@dataclass(frozen=True)
class ChainLink:
    """One link of the authors' chain: local training from the given "model" plus what the client "before" sent. Part: "movement" (d,)."""

    beyond: ClassVar[str] = "what the clients before it in the chain moved"

    train: Train

    parts: ClassVar[Parts] = {"movement": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        start = given.array("model")
        sent = given.params.get("before")
        before = next(iter(sent.values())) if isinstance(sent, dict) else np.zeros_like(start)
        trained = self.train.run(replace(given, params={"model": start + before}))
        return {} if not trained else {"movement": np.asarray(trained["update"]) + before}
