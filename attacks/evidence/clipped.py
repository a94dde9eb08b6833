"""How an attacker's simulated clients compute in a run with `[privacy]`: clipped, sketched and scaled as real ones, without the noise.

Clip, sketch, sampling rate and the public number of samples stand in the configuration, so whoever imitates the pipeline applies them too.
The noise is left out: the value without it is the best guess of what was sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...engine import Engine, Result, Task, TaskInput
from ...engine.device import tensor
from ...engine.models import Model
from ...engine.sample_gradients import gradients_by_sample
from ...experiments.config.config import Config
from ...privacy.settings import Noise, share_of_batch
from ...protocols.mechanisms import clip
from ...types import Array

__all__ = ["ClippingEngine", "clipped_probabilities", "compared_rows", "engine_for", "sampling_rate"]

NEXT_TO_NOTHING = 1e-9
"""A noise multiplier: mechanisms take none of 0."""
CLIPPED_SAMPLES = 20
"""Auxiliary samples a label of which single gradients are taken."""


@dataclass(frozen=True)
class ClippingEngine:
    """Computes tasks in their private form, with next to no noise."""

    engine: Engine
    noise: Noise

    def run(self, task: Task, inputs: Sequence[TaskInput]) -> list[Result]:
        make = getattr(task, "private", None)
        if make is None:
            return self.engine.run(task, inputs)
        seeded = [replace(task_input, secret=task_input.data.id.to_bytes(32, "big")) for task_input in inputs]
        return self.engine.run(make(self.noise), seeded)


def sampling_rate(config: Config) -> float:
    """The rate of batches under unit = "sample"."""
    return share_of_batch(config.privacy, config.training.batch_size)


def engine_for(config: Config, engine: Engine) -> Engine | ClippingEngine:
    """What simulated clients of a run of `config` compute with: `engine` where no sample-level privacy changes what clients do."""
    privacy = config.privacy
    if privacy.unit != "sample":
        return engine
    noise = Noise(
        privacy.relation, NEXT_TO_NOTHING, NEXT_TO_NOTHING, 1 / NEXT_TO_NOTHING, privacy.clip_norm, sampling_rate(config),
        privacy.samples, privacy.sketch_dim, privacy.loss_cap, config.run.seed,
    )  # fmt: skip
    return ClippingEngine(engine, noise)


def compared_rows(config: Config, rows: Array) -> Array:
    """Rows (m, p, d) as clients let them be compared: scaled to norm 1 in all under unit = "client" with local noise, else as they are."""
    if config.privacy.unit != "client" or "gram" not in config.privacy.local:
        return rows
    return np.stack([clip(row / max(1.0, float(np.sqrt(len(row)))), 1.0) for row in rows])


def clipped_probabilities(model: Model, vector: Array, x: Array, y: Array, clip_norm: float) -> Array:
    """What takes the place of `class_probabilities` (classes, classes) where samples' gradients are clipped to norm `clip_norm`.

    One minus the mean clipped gradient by the head's bias of samples of each label, with its sign turned.
    """
    places = np.concatenate([np.flatnonzero(y == label)[:CLIPPED_SAMPLES] for label in range(model.classes)])
    module = model.lent(vector.astype(np.float32 if model.dtype == "float32" else np.float64))
    made = gradients_by_sample(module, model.inputs(x[places]), tensor(y[places]), model.loss)
    squares = torch.stack([gradients.flatten(1).square().sum(1) for gradients in made.values()]).sum(0)
    shrunk = made[model.layout[-1][0]] * (clip_norm / squares.sqrt().clamp_min(clip_norm))[:, None]
    rows = np.zeros((model.classes, model.classes))
    for label in np.unique(y[places]):
        rows[label] = -shrunk[tensor(y[places] == label)].double().mean(0).cpu().numpy()
    return np.asarray(np.eye(model.classes) - rows)
