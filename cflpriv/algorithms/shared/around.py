"""What client tasks of several algorithms have in common: local training with something before and after it, and how many steps it takes.

One level, no more: a task defines what changes in `before` and `after`, and inherits every way of computing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...engine import Device, Result, TaskInput
from ...errors import InputError
from ...privacy.settings import Noise
from ...tasks.training import Train
from ...types import Parts

__all__ = ["AroundTraining", "TrainApart", "needs_sgd", "steps_of", "weight_of_steps"]


@dataclass(frozen=True)
class AroundTraining:
    """`train`, with `before` applied to a client's input and `after` to the result. A client whose training diverged (and is skipped) has
    no result. `gives` are its parts, `remembers` is what it keeps for itself until the client's next turn. `beyond` describes, for audits,
    what the mean of its results contains in addition to local training of the model sent; "" if an audit can read it.
    """

    gives: ClassVar[Parts] = {"update": "summed"}
    remembers: ClassVar[tuple[str, ...]] = ()
    beyond: ClassVar[str] = "what clients do before and after training"

    train: Train

    @property
    def parts(self) -> Parts:
        return self.gives

    @property
    def keeps(self) -> tuple[str, ...]:
        return (*self.train.keeps, *self.remembers)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.remembers

    def before(self, task_input: TaskInput) -> TaskInput:
        return task_input

    def after(self, task_input: TaskInput, inner: TaskInput, result: Result) -> Result:
        return result

    def run(self, task_input: TaskInput) -> Result:
        inner = self.before(task_input)
        result = self.train.run(inner)
        return self.after(task_input, inner, result) if result else {}

    def cost(self, task_input: TaskInput) -> int:
        return self.train.cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.train.chunk_size(task_input, device)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        inner = [self.before(task_input) for task_input in inputs]
        results, path = self.train.run_many(inner, device)
        triples = zip(inputs, inner, results, strict=True)
        return [self.after(task_input, trained, result) if result else {} for task_input, trained, result in triples], path


@dataclass(frozen=True)
class TrainApart(AroundTraining):
    """`train`, for an update that no sum takes: it is compared, or its client uses it. Part: "update" (d,). Kept: what `train` keeps.

    A session contract can tell it from the training of a round, whose update is summed.
    """

    beyond = ""

    def private(self, noise: Noise) -> "TrainApart":
        """The same with private training."""
        return replace(self, train=self.train.private(noise))

    @property
    def events(self) -> dict[str, Any]:
        return self.train.events

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        return self.train.covers


def needs_sgd(train: Train, name: str) -> None:
    """Refuse, for algorithm `name`, an optimiser whose movement is no weighted sum of gradients. Raises `InputError`."""
    if train.optimizer != "sgd":
        raise InputError(f"training.optimizer: {train.optimizer!r} with algorithm {name!r}, whose steps count gradients; use 'sgd'")


def steps_of(train: Train, samples: int) -> int:
    """How many steps `train` takes on a client with so many samples."""
    if train.sampling_rate:
        batches = max(1, round(train.epochs / train.sampling_rate))
    else:
        batches = train.epochs * -(-samples // (train.batch_size or samples))
    return batches // 2 if train.maml_lr else batches


def weight_of_steps(steps: int, momentum: float) -> float:
    """‖a‖₁ = Σ_t (1 − ρ^(τ−t)) / (1 − ρ): how often local SGD with momentum ρ counts its τ gradients in all (τ itself for ρ = 0).

    Source: Wang et al. 2020 (FedNova), section 4: a movement is −η Σ_t a_t g_t with a_t = (1 − ρ^(τ−t)) / (1 − ρ), t = 0 … τ−1.
    """
    if momentum == 0.0:
        return float(steps)
    return float(np.sum((1.0 - momentum ** np.arange(1, steps + 1)) / (1.0 - momentum)))
