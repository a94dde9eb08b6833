"""StoCFL, where the data are: a client's representation, and its link of the authors' chain.

Source: Zeng et al. 2023, Algorithm 1, lines 5 and 6, Section 3.1; deviations are listed in `stocfl`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from ...engine import Device, Result, TaskInput
from ...errors import InputError
from ...privacy.private_signatures import NoisyGradient, NoisyMeanGradient
from ...privacy.settings import Noise
from ...randomness import stream
from ...tasks.halves import two_halves
from ...tasks.training import Gradient, Train
from ...types import Array, Parts

__all__ = ["ChainLink", "Represent", "count_sketch"]


@dataclass(frozen=True)
class Represent:
    """Ψ(D), a client's representation at the given "model" ψ (Sec. 3.1). Part: "representation" (d,), or (sketch,) if above 0, float64.

    `task` is `Gradient`, for ∂ℓ(ψ; D)/∂ψ, or `Train`, for the movement ψ − ψ' of local training (authors). `normalise` to norm 1; a zero
    vector stays zero. The sketch's hashes come from the public `seed`. With `remember` the client keeps Ψ and computes it only once.

    With `halves`, for a test, Ψ of each of two random halves of the data, (2, d): both by one factor, so that their mean has norm 1. Then
    the products of different halves tell the cosine of two clients without the error that noise makes of a norm.

    Reveals: whoever sees Ψ sees a gradient of the client's data, from which labels, and for small data sets samples, can be computed.
    """

    task: Gradient | Train
    normalise: bool = True
    sketch: int = 0
    seed: int = 0
    remember: bool = False
    halves: bool = False

    def private(self, noise: Noise) -> NoisyGradient | NoisyMeanGradient:
        """This representation under sample-level differential privacy, in `noise.sketch_dim` dimensions.

        In place of halves one vector, which is not normalised: the law of its noise is public, and a test needs it.
        """
        if isinstance(self.task, Train):
            raise InputError("algorithm.variant: a representation by local training (authors) has no private form; use 'paper'")
        if self.halves:
            return NoisyMeanGradient(
                self.task.model, noise.sketch_dim, noise.signature, noise.relation, noise.samples, noise.seed, "representation"
            )
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

    def run(self, task_input: TaskInput) -> Result:
        if "representation" in task_input.memory:
            return {"representation": task_input.memory["representation"]}
        return self._result([self.task.run(entry) for entry in self._inputs(task_input)])

    def cost(self, task_input: TaskInput) -> int:
        return self.task.cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.task.chunk_size(task_input, device)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        fresh = [(task_input.data.id, self._inputs(task_input)) for task_input in inputs if "representation" not in task_input.memory]
        results, path = self.task.run_many([entry for _, some in fresh for entry in some], device) if fresh else ([], "remembered")
        left = iter(results)
        made = {client: self._result([next(left) for _ in some]) for client, some in fresh}
        return [made[task_input.data.id] if task_input.data.id in made else self.run(task_input) for task_input in inputs], path

    def _inputs(self, task_input: TaskInput) -> list[TaskInput]:
        """What the task is run on: the whole of the data, or each half."""
        if not self.halves:
            return [task_input]
        x, y = task_input.data.x_train, task_input.data.y_train
        try:
            places = two_halves(len(y), task_input.streams("folds"))
        except InputError as error:
            raise InputError(f"client {task_input.data.id}: {error}") from None
        return [replace(task_input, data=replace(task_input.data, x_train=x[half], y_train=y[half])) for half in places]

    def _result(self, results: Sequence[Result]) -> Result:
        if not all(results):  # training diverged: the client sits this out
            return {}
        part, sign = ("update", -1.0) if isinstance(self.task, Train) else ("gradient", 1.0)
        vectors = [sign * np.asarray(result[part], np.float64) for result in results]
        norm = float(np.linalg.norm(np.mean(vectors, axis=0)))
        if self.normalise and norm > 0:
            vectors = [vector / norm for vector in vectors]
        if self.sketch:
            vectors = [count_sketch(vector, self.sketch, self.seed) for vector in vectors]
        return {"representation": np.stack(vectors) if self.halves else vectors[0]}


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

    def run(self, task_input: TaskInput) -> Result:
        start = task_input.array("model")
        sent, before = task_input.params.get("before"), np.zeros_like(start)
        if isinstance(sent, dict):  # empty where the client before has dropped out
            before = next(iter(sent.values()), before)
        trained = self.train.run(replace(task_input, params={"model": start + before}))
        return {} if not trained else {"movement": np.asarray(trained["update"]) + before}
