"""Evaluation tasks: the accuracy of a client's model, and which of several models fits its data best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from ..class_counts import FULL, counts_shape
from ..engine import Deferred, Device, Result, TaskInput, fast, span
from ..engine.device import in_use, placed, tensor
from ..engine.forward import forward_chunk, outputs
from ..engine.losses import loss_of
from ..engine.memory import resident_samples
from ..engine.models import Model, dtype_of
from ..error_sums import error_sums
from ..errors import InputError
from ..privacy.settings import Noise, secret_of
from ..protocols.events import ChoiceEvent, Event, Relation
from ..protocols.mechanisms import noisy_argmin
from ..types import Array, Parts
from .kept_results import kept_or_made

__all__ = ["Evaluate", "EvaluateOwn", "EvaluateUsed", "Losses", "sample_losses"]


def sample_losses(model: Model, vector: Array, x: torch.Tensor, y: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
    """The loss (n,) of each of the samples `x` (n, ...), `y` (n,), in the model's dtype; all on the device in use.

    With `alone` no sample has a part in another's loss, to the last bit, whatever the model and its parameters: clipped to a cap, the sum
    of them then moves by no more than that when a sample comes or goes (`engine.clipped_sums`). A model that may mix samples gets one
    sample at a time (as in `Train` with clipping); `InputError` for one that takes no single sample.
    """
    if alone and (apart := fast.losses_apart(model, vector, x, y, in_use())) is not None:
        return apart
    module = model.lent(vector)
    size = 1 if alone else 1024
    try:
        with torch.no_grad():
            pieces = [
                loss_of(model.loss, module(x[at : at + size].clone()), y[at : at + size], "none") for at in range(0, len(y), size)
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

    Parts: "correct" (), "loss" () summed over samples, "count" (), and "confusion" float64, which counts samples by class as
    `class_counts` describes: (k, k) by true and predicted class, for many classes (3, k), for over 1,000 (0, 0). These are more than one
    number, so they leave a client only where no protection hides values: their rows show how many samples of each class a client has.
    Of a model that predicts a number there are "loss", "count", and "errors" (6,) as `error_sums` describes.
    """

    model: Model
    split: str = "test"

    @property
    def parts(self) -> Parts:
        """The parts of the loss's kind, each a measured number or several."""
        of_kind = ("correct", "loss", "count", "confusion") if self.model.loss == "cross_entropy" else ("loss", "count", "errors")
        return dict.fromkeys(of_kind, "measure")

    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        x, y = self._samples(task_input)
        module = self.model.lent(np.asarray(task_input.array("model")))
        with torch.no_grad():
            none = placed(torch.zeros((0, self.model.classes), dtype=dtype_of(self.model.dtype)))
            pieces = [none, *(module(self.model.inputs(x[at : at + 1024])) for at in range(0, len(y), 1024))]
        return self.of_outputs([torch.cat(pieces)], [tensor(y)])[0]

    def _samples(self, task_input: TaskInput) -> tuple[Array, Array]:
        return (
            (task_input.data.x_test, task_input.data.y_test) if self.split == "test" else (task_input.data.x_train, task_input.data.y_train)
        )

    def cost(self, task_input: TaskInput) -> int:
        return len(self._samples(task_input)[1])

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return forward_chunk(self.model, device)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        """`run` for each: the clients of a chunk pass forward together, on the device. Results of the same models are kept.

        A local model that is an update in the span of its client's samples (`engine.span`) is never formed on the CPU.
        """
        models = [[task_input.array("model")] for task_input in inputs]
        return kept_or_made((self, device), inputs, models, partial(self._made, device=device))

    def _made(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        samples = resident_samples(self.model, [task_input.data for task_input in inputs], device, self.split)
        models: list[Any] = [task_input.array("model") for task_input in inputs]
        models = [own.bound(given.data) if isinstance(own, Deferred) else own for own, given in zip(models, inputs, strict=True)]
        made, path = [x for x, _ in samples], "span"
        moved = [i for i, own in enumerate(models) if device.kind == "cpu" and span.in_span(own, inputs[i].data, self.model)]
        others = sorted(set(range(len(inputs))) - set(moved))
        of_moved = span.moved_outputs([models[i] for i in moved], [made[i] for i in moved], self.split)
        of_others: list[torch.Tensor] = []
        if others:
            of_others, path = outputs(self.model, [np.asarray(models[i]) for i in others], [made[i] for i in others], device)
        for i, output in zip(moved + others, of_moved + of_others, strict=True):
            made[i] = output
        return self.of_outputs(made, [y for _, y in samples]), path

    def of_outputs(self, made: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> list[Result]:
        """The parts of each client's outputs (n, classes) and labels (n,)."""
        counts = [len(y) for y in of]
        whole, labels = torch.cat(list(made)), torch.cat(list(of))
        losses = loss_of(self.model.loss, whole, labels, "none").double()
        if self.model.loss != "cross_entropy":
            columns = torch.stack([losses, labels.double(), whole[:, 0].double()]).cpu().numpy()  # one copy a chunk
            parts = np.split(columns, np.cumsum(counts)[:-1], axis=1)
            return [
                {"loss": np.array(own.sum()), "count": np.array(float(len(own))), "errors": error_sums(y, p)} for own, y, p in parts
            ]  # fmt: skip
        predicted = whole.argmax(1)
        scores = torch.stack([(predicted == labels).double(), losses])
        sums = torch.stack([each.sum(1) for each in torch.split(scores, counts, dim=1)])
        by_class = _by_class(predicted, labels, counts, self.model.classes)
        copied = torch.cat([sums, by_class], dim=1).cpu().numpy()  # one copy a chunk
        shape = counts_shape(self.model.classes)
        return [
            {
                "correct": np.array(row[0]), "loss": np.array(row[1]), "count": np.array(float(count)),
                "confusion": row[2:].reshape(shape).copy(),
            }
            for row, count in zip(copied, counts, strict=True)
        ]  # fmt: skip


def _by_class(predicted: torch.Tensor, labels: torch.Tensor, counts: Sequence[int], classes: int) -> torch.Tensor:
    """The "confusion" of each client (clients, numbers) float64 from its `counts` samples, on the device of `labels` (n,)."""
    rows, columns = counts_shape(classes)
    made = torch.zeros(len(counts) * rows * columns, dtype=torch.float64, device=labels.device)
    if not rows:
        return made.view(len(counts), 0)
    ones = torch.ones(len(labels), dtype=torch.float64, device=labels.device)
    sizes = torch.from_numpy(np.repeat(np.arange(len(counts)) * rows * columns, counts)).to(labels.device)
    if rows == columns and classes <= FULL:
        made.index_add_(0, sizes + labels * columns + predicted, ones)
    else:
        made.index_add_(0, sizes + labels, ones)
        made.index_add_(0, sizes + columns + predicted, ones)
        made.index_add_(0, sizes + 2 * columns + labels, (predicted == labels).double())
    return made.view(len(counts), rows * columns)


def capped(losses: Array, cap: float) -> Array:
    """Losses (n,) within [0, `cap`]; `cap` for those that are not a number."""
    return np.asarray(np.nan_to_num(losses, nan=cap).clip(0, cap))


@dataclass(frozen=True)
class EvaluateUsed:
    """`Evaluate` of the model that a client uses: the given "model", or what an heir makes of it and of its memory. Parts: as there."""

    model: Model

    @property
    def parts(self) -> Parts:
        return Evaluate(self.model).parts

    keeps: ClassVar[tuple[str, ...]] = ()

    def used(self, task_input: TaskInput) -> Array:
        """The model (d,) that the client uses."""
        return task_input.array("model")

    def run(self, task_input: TaskInput) -> Result:
        return Evaluate(self.model).run(replace(task_input, params={"model": self.used(task_input)}))

    def cost(self, task_input: TaskInput) -> int:
        return Evaluate(self.model).cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return Evaluate(self.model).chunk_size(task_input, device)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        return Evaluate(self.model).run_many(
            [replace(task_input, params={"model": self.used(task_input)}) for task_input in inputs], device
        )


@dataclass(frozen=True)
class EvaluateOwn(EvaluateUsed):
    """`Evaluate` of the model that the client keeps under `name`, or of the given "model" while it keeps none. Parts: as there."""

    name: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name,)

    def used(self, task_input: TaskInput) -> Array:
        return task_input.memory[self.name] if self.name in task_input.memory else super().used(task_input)


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

    def run(self, task_input: TaskInput) -> Result:
        return self.run_many([task_input], in_use())[0][0]

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return max(1, 4096 // len(task_input.data.y_train))

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        """`run` for each: the k-th models of all clients pass forward together, on the device. Losses of the same models are kept."""
        models = [task_input.params["model"] for task_input in inputs]
        if not all(isinstance(candidates, list) for candidates in models):
            raise TypeError("parameter 'model': Losses takes a list of models")
        if self.epsilon:  # each choice is drawn anew
            return self._made(inputs, device)
        return kept_or_made((self, device), inputs, models, partial(self._made, device=device))  # type: ignore[arg-type]

    def _made(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        models: list[Any] = [task_input.params["model"] for task_input in inputs]
        samples = resident_samples(self.model, [task_input.data for task_input in inputs], device)
        losses_of: list[list[Array]] = [[] for _ in inputs]
        path, alone = "sequential", set[int]()
        if device.kind == "cpu" and not self.epsilon and fast.is_network(self.model):
            alone = {i for i, task_input in enumerate(inputs) if span.is_large(self.model, task_input.data)}
        if alone:
            with torch.no_grad():
                each_of = span.losses(
                    self.model, [models[i] for i in sorted(alone)], [samples[i] for i in sorted(alone)],
                    [inputs[i].data for i in sorted(alone)],
                )  # fmt: skip
            path = "shared"
            for i, own in zip(sorted(alone), each_of, strict=True):
                losses_of[i] = own
        others = [i for i in range(len(inputs)) if i not in alone]
        for k in range(max((len(models[i]) for i in others), default=0)):
            having = [i for i in others if k < len(models[i])]
            each, path = self._each([np.asarray(models[i][k]) for i in having], [samples[i] for i in having], device)
            for i, losses in zip(having, each, strict=True):
                losses_of[i].append(losses)
        return [self._result(task_input, losses) for task_input, losses in zip(inputs, losses_of, strict=True)], path

    def _each(
        self, vectors: Sequence[Array], samples: Sequence[tuple[torch.Tensor, torch.Tensor]], device: Device
    ) -> tuple[list[Array], str]:  # fmt: skip
        """The losses (n,) float64 of each client's samples under its model, and the way taken."""
        if self.epsilon:
            alone = [sample_losses(self.model, vector, x, y, alone=True) for vector, (x, y) in zip(vectors, samples, strict=True)]
            return [losses.double().cpu().numpy() for losses in alone], "sequential"
        logits, path = outputs(self.model, vectors, [x for x, _ in samples], device)
        losses = loss_of(self.model.loss, torch.cat(logits), torch.cat([y for _, y in samples]), "none")
        ends = np.cumsum([len(y) for _, y in samples])[:-1]
        return np.split(losses.double().cpu().numpy(), ends), path  # one copy a model

    def _result(self, task_input: TaskInput, losses: Sequence[Array]) -> Result:
        means = np.array([sample.mean() for sample in losses])
        choice = int(np.where(np.isnan(means), np.inf, means).argmin())
        if self.epsilon:
            choice = self._draw(task_input, np.array([capped(sample, self.cap).sum() for sample in losses]))
        return {"losses": means, "choice": np.array(choice)}

    def _draw(self, task_input: TaskInput, sums: Array) -> int:
        return noisy_argmin(sums, self.cap, self.epsilon, self.relation, "sample", secret_of(task_input, "choice")).value
