"""Evaluation tasks: the accuracy of a client's model, and which of several models fits its data best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional

from ..engine import Device, Result, TaskInput
from ..engine.models import Model, keeps_samples_apart
from ..errors import InputError
from ..privacy.settings import Noise, secret_of
from ..protocols.events import ChoiceEvent, Event, Relation
from ..protocols.mechanisms import noisy_argmin
from ..types import Array, Parts

__all__ = ["Evaluate", "EvaluateOwn", "EvaluateUsed", "Losses", "sample_losses"]


def sample_losses(model: Model, vector: Array, x: torch.Tensor, y: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
    """The loss (n,) of each of the samples `x` (n, ...), `y` (n,), in the model's dtype.

    With `alone` no sample has a part in another's loss, whatever the model: clipped to a cap, the sum of them then moves by no more than
    that when a sample comes or goes. A model that may mix samples is passed one sample at a time for it (as `Train` does where it clips);
    `InputError` for one that takes no single sample.
    """
    module = model.load(vector)
    size = 1 if alone and not keeps_samples_apart(model) else 1024
    try:
        with torch.no_grad():
            pieces = [
                functional.cross_entropy(module(x[at : at + size]), y[at : at + size], reduction="none") for at in range(0, len(y), size)
            ]  # fmt: skip
    except ValueError as error:
        if size > 1:
            raise
        raise InputError(
            f"model {model.name!r}: takes no single sample ({error}), which privacy.unit = 'sample' needs: in a batch, a sample that comes "
            "or goes would move the losses of all; use GroupNorm in place of a batch norm"
        ) from None
    return torch.cat(pieces)


@dataclass(frozen=True)
class Evaluate:
    """The given "model" on the client's test data (or training data, with `split="train"`).

    Parts: "correct" (), "loss" () summed over samples, "count" ().
    """

    model: Model
    split: str = "test"

    parts: ClassVar[Parts] = {"correct": "measure", "loss": "measure", "count": "measure"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        x, y = (given.data.x_test, given.data.y_test) if self.split == "test" else (given.data.x_train, given.data.y_train)
        module = self.model.load(given.array("model"))
        correct, loss = 0, 0.0
        with torch.no_grad():
            for start in range(0, len(y), 1024):
                logits = module(self.model.inputs(x[start : start + 1024]))
                labels = torch.from_numpy(y[start : start + 1024])
                correct += int((logits.argmax(1) == labels).sum())
                loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        return {"correct": np.array(float(correct)), "loss": np.array(loss), "count": np.array(float(len(y)))}


@dataclass(frozen=True)
class EvaluateUsed:
    """`Evaluate` of the model that a client uses: the given "model", or what an heir makes of it and of its memory. Parts: as there."""

    model: Model

    parts: ClassVar[Parts] = Evaluate.parts
    keeps: ClassVar[tuple[str, ...]] = ()

    def used(self, given: TaskInput) -> Array:
        """The model (d,) that the client uses."""
        return given.array("model")

    def run(self, given: TaskInput) -> Result:
        return Evaluate(self.model).run(replace(given, params={"model": self.used(given)}))


@dataclass(frozen=True)
class EvaluateOwn(EvaluateUsed):
    """`Evaluate` of the model that the client keeps under `name`, or of the given "model" while it keeps none. Parts: as there."""

    name: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name,)

    def used(self, given: TaskInput) -> Array:
        return given.memory[self.name] if self.name in given.memory else super().used(given)


@dataclass(frozen=True)
class Losses:
    """The mean training loss of each model of the given list "model" (IFCA's cluster estimate).

    Parts: "losses" (k,) float64, "choice" () the index of the lowest (the first among equals; NaN is never the lowest).

    With `epsilon` above 0 (the private form, see `private`) the choice is the exponential mechanism's on sums of losses, each sample's cut
    at `cap` and computed without the others (`sample_losses`); "losses" has no private form.
    """

    model: Model
    epsilon: float = 0.0
    cap: float = 0.0
    relation: Relation = "add_remove"

    def private(self, noise: Noise) -> "Losses":
        """This choice under sample-level differential privacy: `protocols.mechanisms.noisy_argmin`, whose docstring has the guarantee."""
        return replace(self, epsilon=noise.choice, cap=noise.loss_cap, relation=noise.relation) if noise.choice else self

    @property
    def events(self) -> dict[str, Event]:
        return {"choice": ChoiceEvent(self.epsilon, self.relation, "sample")} if self.epsilon else {}

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        return {"choice": ("choice",)} if self.epsilon else {}

    parts: ClassVar[Parts] = {"losses": "summed", "choice": "choice"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        return self.run_many([given], Device())[0][0]

    def cost(self, given: TaskInput) -> int:
        return len(given.data.y_train)

    def chunk_size(self, given: TaskInput, device: Device) -> int:
        return max(1, 4096 // len(given.data.y_train))

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        """Clients that were given the same models share one pass over all their samples for each."""
        models = [given.params["model"] for given in inputs]
        if not all(isinstance(several, list) for several in models):
            raise TypeError("parameter 'model': Losses takes a list of models")
        shared = all(len(several) == len(models[0]) and all(a is b for a, b in zip(several, models[0], strict=True)) for several in models)
        if not shared:
            return [self.run_many([given], device)[0][0] for given in inputs], "sequential"
        sizes = [len(given.data.y_train) for given in inputs]
        x = torch.cat([self.model.inputs(given.data.x_train) for given in inputs])
        y = torch.cat([torch.from_numpy(given.data.y_train) for given in inputs])
        losses = np.empty((len(inputs), len(models[0])))
        sums = np.empty_like(losses)
        for k, vector in enumerate(models[0]):
            each = torch.split(sample_losses(self.model, np.asarray(vector), x, y, alone=self.epsilon > 0), sizes)
            losses[:, k] = [float(part.double().mean()) for part in each]
            if self.epsilon:
                sums[:, k] = [float(torch.nan_to_num(part.double(), nan=self.cap).clamp(0, self.cap).sum()) for part in each]
        choices = [int(np.where(np.isnan(row), np.inf, row).argmin()) for row in losses]
        if self.epsilon:
            choices = [self._draw(given, row) for given, row in zip(inputs, sums, strict=True)]
        return [{"losses": row, "choice": np.array(choice)} for row, choice in zip(losses, choices, strict=True)], "shared"

    def _draw(self, given: TaskInput, sums: Array) -> int:
        return noisy_argmin(sums, self.cap, self.epsilon, self.relation, "sample", secret_of(given, "choice")).value
