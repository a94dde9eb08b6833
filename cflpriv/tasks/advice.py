"""What clients compute for the advice: models kept with the client, and what of their held-out accuracy goes into sums.

No model, weight or accuracy of a single client leaves it. Three parts leave, each in a sum over all clients: "classes", how many held-out
samples of each class there are; "responsibilities", from which the shared weights of mixtures follow; and "scores". Under a protection of
sums none is seen for one client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ..engine import Device, Result, Streams, TaskInput
from ..engine.device import in_use, placed
from ..engine.forward import outputs
from ..engine.models import Model
from ..types import Array, Parts
from .balanced_scores import class_masses, contribution, sample_weights
from .evaluation import Evaluate
from .own_mixture import cross_fitted, likelihoods, mixed, own_weights, responsibilities
from .training import Train

__all__ = [
    "EvaluateMixture", "HeldOutClasses", "HeldOutScores", "KeepLocal", "KeepProbabilities", "KeepTuned", "Options", "Responsibilities",
    "kept_names",
]  # fmt: skip

PROBABILITIES, WEIGHTS = "advice probabilities", "advice weights"
"""Under these names clients keep what their models say of held-out samples, and the weights of their mixtures."""
DONE: Result = {"kept": np.array(1.0)}


def kept_names(name: str, epochs: Sequence[int] = ()) -> tuple[str, ...]:
    """The names under which a client keeps a model as received and after so many epochs of its own training."""
    return (f"advice {name}", *(f"advice {name} after {count}" for count in epochs))


def _trained(train: Train, inputs: Sequence[TaskInput], device: Device | None) -> list[Array | None]:
    """Each client's model (d,) after `train`; None where the training diverged. Without a device one client after the other."""
    results = [train.run(own) for own in inputs] if device is None else train.run_many(inputs, device)[0]
    return [
        own.array("model") + np.asarray(result["update"]) if result else None for own, result in zip(inputs, results, strict=True)
    ]  # fmt: skip


@dataclass(frozen=True)
class KeepLocal:
    """Train a model of the client's own from the initial model of `seed`, `epochs` in all, in rounds of `train`, as algorithm local does.

    Part: "kept" (). Kept: the model (d,).
    """

    train: Train
    seed: int
    epochs: int

    parts: ClassVar[Parts] = {"kept": "measure"}

    @property
    def keeps(self) -> tuple[str, ...]:
        return kept_names("local")

    def cost(self, task_input: TaskInput) -> int:
        return self.train.cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.train.chunk_size(task_input, device)

    def run(self, task_input: TaskInput) -> Result:
        return self._run([task_input], None)[0]

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        return self._run(inputs, device), "rounds"

    def _run(self, inputs: Sequence[TaskInput], device: Device | None) -> list[Result]:
        start = self.train.model.init(self.seed)
        models: list[Array | None] = [start] * len(inputs)
        for number in range(max(1, self.epochs // self.train.epochs)):
            there = [i for i, model in enumerate(models) if model is not None]
            trainings = [_from_model(inputs[i], models[i], number) for i in there]
            for i, model in zip(there, _trained(self.train.at(number), trainings, device), strict=True):
                models[i] = model
        return [{} if model is None else {**DONE, self.keeps[0]: model} for model in models]


def _from_model(task_input: TaskInput, model: Array | None, round: int) -> TaskInput:
    """The input of a training of `model`, with the batches of a round."""
    assert model is not None
    streams = task_input.streams
    return replace(task_input, params={"model": model}, streams=Streams(streams.seed, round, streams.client))


@dataclass(frozen=True)
class KeepTuned:
    """Keep the model that the client would use by the task `served`, and that model after each of `tuned` epochs of `train` on its data.

    Part: "kept" (). Kept: the models (d,), `kept_names(name, tuned)`.
    """

    train: Train
    served: Any
    name: str
    tuned: tuple[int, ...] = ()

    parts: ClassVar[Parts] = {"kept": "measure"}

    @property
    def keeps(self) -> tuple[str, ...]:
        return kept_names(self.name, self.tuned)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(getattr(self.served, "reads", ()))

    def cost(self, task_input: TaskInput) -> int:
        return self.train.cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.train.chunk_size(task_input, device)

    def run(self, task_input: TaskInput) -> Result:
        return self._run([task_input], None)[0]

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        return self._run(inputs, device), "rounds"

    def _run(self, inputs: Sequence[TaskInput], device: Device | None) -> list[Result]:
        used = getattr(self.served, "used", _model)
        kept: list[list[Array]] = [[np.asarray(used(task_input))] for task_input in inputs]
        before = 0
        for epochs in self.tuned:
            train = replace(self.train.at(inputs[0].streams.round), epochs=epochs - before)
            there = [i for i, models in enumerate(kept) if models]
            trainings = [_from_model(inputs[i], kept[i][-1], inputs[i].streams.round + before) for i in there]
            for i, model in zip(there, _trained(train, trainings, device), strict=True):
                kept[i] = [*kept[i], model] if model is not None else []
            before = epochs
        return [{**DONE, **dict(zip(self.keeps, models, strict=True))} if models else {} for models in kept]


def _model(task_input: TaskInput) -> Array:
    return task_input.array("model")


@dataclass(frozen=True)
class KeepProbabilities:
    """Keep the probabilities (models, samples, classes) of held-out samples by the models that the client keeps under `names`.

    Part: "kept" (). A client without a held-out sample takes no further part.
    """

    model: Model
    names: tuple[str, ...]

    parts: ClassVar[Parts] = {"kept": "measure"}
    keeps: ClassVar[tuple[str, ...]] = (PROBABILITIES,)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.names

    def run(self, task_input: TaskInput) -> Result:
        held_out = task_input.data.held_out
        if held_out is None or not len(held_out[1]):
            return {}
        return {**DONE, PROBABILITIES: _probabilities(self.model, self.names, task_input, held_out[0])}


def _probabilities(model: Model, names: Sequence[str], task_input: TaskInput, x: Array) -> Array:
    """Probabilities (models, samples, classes) of samples by the models that a client keeps."""
    samples = placed(model.inputs(x))
    logits, _ = outputs(model, [np.asarray(task_input.memory[name]) for name in names], [samples] * len(names), in_use())
    return torch.stack([torch.softmax(own, 1) for own in logits]).cpu().numpy()


Options = tuple[tuple[int, ...], ...]
"""Of each option the places of its models among those whose probabilities are kept. An option of several models is a mixture of these."""


def _mixtures(options: Options, weights: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Array]]:
    """The models of each mixture, and its part of the given "weights"."""
    parts = [option for option in options if len(option) > 1]
    if not parts:
        return []
    ends = np.cumsum([len(option) for option in parts])
    return list(zip(parts, np.split(np.asarray(weights["weights"], dtype=np.float64), ends[:-1]), strict=True))


@dataclass(frozen=True)
class Responsibilities:
    """The mean shares of each model in the likelihood of held-out samples, of all mixtures, under the given shared "weights".

    "class_weights": as for `HeldOutScores`; clients count alike.

    Part: "responsibilities" (models of all mixtures,), which add up to 1 in each mixture.
    """

    options: Options
    model: Model

    parts: ClassVar[Parts] = {"responsibilities": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = (PROBABILITIES,)

    def run(self, task_input: TaskInput) -> Result:
        probabilities, labels = _kept(task_input, self.model)
        counted = _counted(task_input, labels)
        shares = [
            responsibilities(likelihoods(probabilities[list(option)], labels), weights, counted)
            for option, weights in _mixtures(self.options, task_input.params)
        ]
        return {"responsibilities": np.concatenate(shares)}


def _kept(task_input: TaskInput, model: Model) -> tuple[Array, Array]:
    """The probabilities that a client keeps, and the labels of its held-out samples."""
    held_out = task_input.data.held_out
    assert held_out is not None
    probabilities = np.asarray(task_input.memory[PROBABILITIES], dtype=np.float64)
    return probabilities, held_out[1][: probabilities.shape[1]] % model.classes


def _counted(task_input: TaskInput, labels: Array) -> Array:
    """How much each held-out sample counts (samples,)."""
    return sample_weights(labels, np.asarray(task_input.params["class_weights"], dtype=np.float64))


@dataclass(frozen=True)
class HeldOutClasses:
    """How many held-out samples of each class the client has, in units of `balanced_scores.MOST_SAMPLES`.

    Part: "classes" (classes,).
    """

    model: Model

    parts: ClassVar[Parts] = {"classes": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = (PROBABILITIES,)

    def run(self, task_input: TaskInput) -> Result:
        return {"classes": class_masses(_kept(task_input, self.model)[1], self.model.classes)}


@dataclass(frozen=True)
class HeldOutScores:
    """The score of each option on held-out samples, the client's weight, and the products of these (`balanced_scores.contribution`).

    The given "class_weights" (classes,) say how much a sample counts; without (0,), all of a client's count alike and clients equally. A
    mixture's score is cross-fitted; its prior are the given shared "weights" (models of all mixtures,). Part: "scores". Kept: the weights
    of the client's own mixtures, from all held-out samples.
    """

    options: Options
    model: Model

    parts: ClassVar[Parts] = {"scores": "summed"}
    keeps: ClassVar[tuple[str, ...]] = (WEIGHTS,)
    reads: ClassVar[tuple[str, ...]] = (PROBABILITIES,)

    def run(self, task_input: TaskInput) -> Result:
        probabilities, labels = _kept(task_input, self.model)
        shared, counted = dict(_mixtures(self.options, task_input.params)), _counted(task_input, labels)
        right, own = [], [np.zeros(0)]
        for option in self.options:
            inside = probabilities[list(option)]
            if option in shared:
                right.append(cross_fitted(inside, labels, shared[option], counted, task_input.streams("mixture folds")))
                own.append(own_weights(likelihoods(inside, labels), shared[option], counted))
            else:
                right.append(inside[0].argmax(1) == labels)
        return {"scores": contribution(np.array(right), counted), WEIGHTS: np.concatenate(own)}


@dataclass(frozen=True)
class EvaluateMixture:
    """`Evaluate` of the client's mixture of the models that it keeps under `names`, with its weights from place `first` on.

    Parts: as there; the loss is that of the mixture's probabilities.
    """

    model: Model
    names: tuple[str, ...]
    first: int = 0

    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def parts(self) -> Parts:
        return Evaluate(self.model).parts

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.names, WEIGHTS)

    def run(self, task_input: TaskInput) -> Result:
        weights = np.asarray(task_input.memory[WEIGHTS])[self.first : self.first + len(self.names)]
        probabilities = mixed(_probabilities(self.model, self.names, task_input, task_input.data.x_test), weights)
        logits = torch.from_numpy(np.log(np.maximum(probabilities, np.finfo(np.float32).tiny)))
        return Evaluate(self.model).of_outputs([logits], [torch.from_numpy(task_input.data.y_test)])[0]
