"""Noisy signatures: sample-level differential privacy for what clients compare, noisy yet useful for clustering.

Each task is the private form of another (its method `private`); the noise comes from the client's cryptographic source.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch

from ..engine import TaskInput
from ..engine.device import tensor
from ..engine.models import Model
from ..engine.own_modules import flat
from ..engine.sample_gradients import gradients_by_sample, sample_gradients
from ..errors import InputError
from ..protocols.entropy import Entropy
from ..protocols.events import Event, GaussianEvent
from ..protocols.mechanisms import gaussian_sum, second_moment
from ..protocols.sketch import public_sketch
from ..randomness import stream
from ..types import Array, Parts
from .settings import secret_of

__all__ = [
    "NoisyGradient",
    "NoisyMeanGradient",
    "NoisyMoment",
    "NoisyPrincipalVectors",
    "moment_event",
    "noisy_principal_vectors",
    "noisy_sum",
    "sketch_directions",
    "sum_event",
    "unit_rows",
]

Relation = Literal["add_remove", "replace_one"]
PER_SAMPLE = 256
"""So many per-sample gradients are formed at once."""


@lru_cache(maxsize=4)
def sketch_directions(seed: int, dimension: int, size: int) -> Array:
    """`size` public random orthonormal directions of R^dimension, as columns (dimension, size), the same for all who know the seed.

    All of them, as they are, where `size` is 0 or not below the dimension.
    """
    if not 0 < size < dimension:
        return np.eye(dimension)
    draws = stream(seed, f"signature sketch {dimension} {size}").normal(size=(dimension, size))
    basis, triangle = np.linalg.qr(draws)
    return np.asarray(basis * np.sign(np.diag(triangle)))


def unit_rows(x: Array) -> Array:
    """Each row scaled to norm 1; zero rows stay zero."""
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.where(lengths > 0, lengths, 1.0))


def noisy_principal_vectors(x: Array, p: int, noise_multiplier: float, relation: Relation, entropy: Entropy) -> Array:
    """The p leading eigenvectors (p, r) of the noisy second moment of the rows of x (n, r), each scaled to norm 1 first.

    A vector's sign is that of a value ≥ 0 for its sum, as for plain signatures. Raises `InputError` if p exceeds r.
    """
    if p > x.shape[1]:
        raise InputError(f"algorithm.p: {p} vectors in {x.shape[1]} dimensions; raise privacy.sketch_dim")
    moment = second_moment(unit_rows(x), noise_multiplier, relation, "sample", entropy).value
    vectors = np.linalg.eigh(moment)[1][:, ::-1][:, :p]
    return np.ascontiguousarray((vectors * np.where(vectors.sum(axis=0) < 0, -1.0, 1.0)).T)


def moment_event(noise_multiplier: float, relation: Relation) -> GaussianEvent:
    """What a noisy second moment of rows of norm 1 costs (`mechanisms.second_moment`)."""
    return GaussianEvent(noise_multiplier, 1.0 if relation == "add_remove" else float(np.sqrt(2)), relation, "sample")


def _sketched_samples(task_input: TaskInput, seed: int, size: int) -> Array:
    """A client's training samples (n, size) in public random directions, as they are where `size` is 0 or not below their length."""
    x = task_input.data.x_train.reshape(len(task_input.data.x_train), -1).astype(np.float64)
    return np.asarray(x @ sketch_directions(seed, x.shape[1], size))


def sum_event(noise_multiplier: float, bound: float, relation: Relation) -> GaussianEvent:
    """What `noisy_sum` costs: sensitivity `bound` under "add_remove", twice that under "replace_one"."""
    return GaussianEvent(noise_multiplier, bound if relation == "add_remove" else 2 * bound, relation, "sample")


def noisy_sum(rows: Array, bound: float, noise_multiplier: float, relation: Relation, task_input: TaskInput, purpose: str) -> Array:
    """Σ of the rows (n, d), one a sample, each clipped to norm `bound`, with noise from the client's secret."""
    return gaussian_sum(rows, bound, noise_multiplier, relation, "sample", secret_of(task_input, purpose)).value


@dataclass(frozen=True)
class NoisyPrincipalVectors:
    """The private form of `PrincipalVectors`: sketch, then scale rows to norm 1, then second moment, then noise, then eigenvectors.

    In this order: the noise of a second moment grows with √dimension, so samples are first projected to `sketch_dim` public random
    orthonormal directions; rows scaled before that would lose most of their length to it. Neither centred nor divided by n. Part:
    "signature" (p, sketch_dim) float64.

    Guarantee: that of one `GaussianEvent` at the sample level (sensitivity 1 under "add_remove", √2 under "replace_one"), towards everybody
    who sees the signature, and whatever is computed of it. Reveals: the main directions of the client's data up to the noise: it is the
    single sample that is protected, not what kind of data a client has. Source: Dwork et al. 2014, Algorithm 1.
    """

    p: int
    sketch_dim: int
    noise_multiplier: float
    relation: Relation
    seed: int

    parts: ClassVar[Parts] = {"signature": "compared"}
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def events(self) -> dict[str, Event]:
        return {"moment": moment_event(self.noise_multiplier, self.relation)}

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        return {"signature": ("moment",)}

    def run(self, task_input: TaskInput) -> dict[str, Array]:
        x = _sketched_samples(task_input, self.seed, self.sketch_dim)
        return {"signature": noisy_principal_vectors(x, self.p, self.noise_multiplier, self.relation, secret_of(task_input, "signature"))}


@dataclass(frozen=True)
class NoisyGradient:
    """The private form of a gradient signature at the given "model": per sample, sketch, clip; then sum, then noise.

    Part: `part` (sketch_dim,) float64, of norm 1 with `normalise`. Samples' gradients are sketched before they are clipped, since what
    noise does to inner products grows with the root of the dimension. The sum is not divided by n.

    Guarantee: that of one `GaussianEvent` at the sample level (sensitivity clip_norm under "add_remove", twice that under "replace_one").
    Reveals: the direction of the client's gradient up to the noise. Source: Abadi et al. 2016, for the clipped sum.
    """

    model: Model
    part: str
    normalise: bool
    sketch_dim: int
    clip_norm: float
    noise_multiplier: float
    relation: Relation
    seed: int

    @property
    def parts(self) -> Parts:
        return {self.part: "compared"}

    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def events(self) -> dict[str, Event]:
        return {"gradient": sum_event(self.noise_multiplier, self.clip_norm, self.relation)}

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        return {self.part: ("gradient",)}

    def run(self, task_input: TaskInput) -> dict[str, Array]:
        vector = noisy_sum(self._sketched(task_input), self.clip_norm, self.noise_multiplier, self.relation, task_input, "signature")
        norm = float(np.linalg.norm(vector))
        return {self.part: vector / norm if self.normalise and norm > 0 else vector}

    def _sketched(self, task_input: TaskInput) -> Array:
        """Each sample's gradient in the sketched coordinates, (n, sketch_dim), scaled back to about its own length."""
        module = self.model.lent(task_input.array("model"))
        names = [name for name, _ in module.named_parameters()]
        dimension = self.model.dimension
        size = self.sketch_dim if 0 < self.sketch_dim < dimension else dimension
        directions: torch.Tensor | None = None  # without a sketch no (d, d) identity is made
        if size < dimension:
            directions = tensor(sketch_directions(self.seed, dimension, size)).to(next(module.parameters()).dtype)

        x, y = self.model.inputs(task_input.data.x_train), tensor(task_input.data.y_train)
        rows = []
        for at in range(0, len(y), PER_SAMPLE):
            made = gradients_by_sample(module, x[at : at + PER_SAMPLE], y[at : at + PER_SAMPLE], self.model.loss, alone=True)
            whole = torch.cat([flat(made[name]) for name in names], dim=1)
            # row by row: a product of all rows may round each differently beside others, and a sketch may cancel
            rows.append(whole if directions is None else torch.stack([row @ directions for row in whole]))
        sketched = torch.cat(rows).double().cpu().numpy() * np.sqrt(dimension / size)
        # a gradient that no norm bounds contributes nothing: to fail for it would reveal one sample
        return np.asarray(np.where(np.isfinite(sketched).all(axis=1, keepdims=True), sketched, 0.0))


@dataclass(frozen=True)
class NoisyMeanGradient:
    """The private form of `FoldGradients`: per sample, sketch, scale to norm 1; then sum, then noise, over a public number of `samples`.

    Part: `part` (D,) float64, D = `sketch_dim`, or the model's length if that is smaller or no sketch is asked. One vector, not two: its
    law of noise is public, so no halves need to show it, and all of the budget is in it. Sketched before it is scaled, since a sketch does
    not keep norms; a gradient that is zero or not finite adds nothing.

    Guarantee: that of one `GaussianEvent` at the sample level (sensitivity 1 under "add_remove", 2 under "replace_one"). Reveals: the mean
    direction of the client's gradients up to the noise. Source: Abadi et al. 2016, for the bounded sum.
    """

    model: Model
    sketch_dim: int
    noise_multiplier: float
    relation: Relation
    samples: int
    seed: int
    part: str = "folds"

    @property
    def parts(self) -> Parts:
        return {self.part: "compared"}

    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def events(self) -> dict[str, Event]:
        return {"gradient": sum_event(self.noise_multiplier, 1.0, self.relation)}

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        return {self.part: ("gradient",)}

    def run(self, task_input: TaskInput) -> dict[str, Array]:
        dimension = self.model.dimension
        short = public_sketch("crossfit", self.seed, dimension, self.sketch_dim) if 0 < self.sketch_dim < dimension else None
        rows = []
        for block in sample_gradients(self.model, task_input.array("model"), task_input.data, alone=True):
            whole = block.double().cpu().numpy()
            whole = np.where(np.isfinite(whole).all(axis=1, keepdims=True), whole, 0.0)
            rows.append(whole if short is None else short.apply(whole))
        total = noisy_sum(unit_rows(np.concatenate(rows)), 1.0, self.noise_multiplier, self.relation, task_input, "folds")
        return {self.part: total / self.samples}

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)


@dataclass(frozen=True)
class NoisyMoment:
    """The noisy second moment of a client's samples, itself in place of its eigenvectors: sketch, scale to norm 1, sum x xᵀ, noise.

    Part: "signature" (r (r + 1) / 2,) float64, r = `sketch_dim`, or the length of a sample: the upper triangle, with √2 off the diagonal so
    that products are those of the matrices, over a public number of `samples`.

    Guarantee: that of one `GaussianEvent` at the sample level (sensitivity 1 under "add_remove", √2 under "replace_one"). Reveals: the main
    directions of the client's data up to the noise. Source: Dwork et al. 2014, Algorithm 1.
    """

    sketch_dim: int
    noise_multiplier: float
    relation: Relation
    samples: int
    seed: int

    parts: ClassVar[Parts] = {"signature": "compared"}
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def events(self) -> dict[str, Event]:
        return {"moment": moment_event(self.noise_multiplier, self.relation)}

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        return {"signature": ("moment",)}

    def run(self, task_input: TaskInput) -> dict[str, Array]:
        x = unit_rows(_sketched_samples(task_input, self.seed, self.sketch_dim))
        moment = second_moment(x, self.noise_multiplier, self.relation, "sample", secret_of(task_input, "signature")).value
        upper = np.triu_indices(len(moment))
        return {"signature": moment[upper] * np.where(upper[0] == upper[1], 1.0, np.sqrt(2)) / self.samples}
