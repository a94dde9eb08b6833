"""How clients trained, read from the public tasks in the transcript.

Clients are sent the task with the model, so a party that sees the parameters sees the settings: rate, momentum, proximal term, epochs,
inner step, share held back. Nothing here knows an algorithm: a task is rebuilt from its settings, as a client rebuilds it. If a task wraps
other tasks, the first `Train` or `Gradient` in the order of fields counts: its update is sent. `[privacy]` adds clipping and Poisson
batches to the task; both are in the public configuration, and `LocalTraining.clipped` adds them.

`LocalTraining.beyond` describes what a client's update, or the mean of several updates, holds beside that training: as the class of the
task declares (`beyond`), else by what clients were sent beside the model. Two parts of a client's steps are known only after messages are
read, the pull to an anchor and the correction of a control; they are in `updates.less_known`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...algorithms.pfedlia.influence import OnPart, split_validation
from ...algorithms.shared.around import AroundTraining, steps_of
from ...contract.transcript import Message
from ...errors import InputError
from ...experiments.config.config import Config
from ...federation.task_encoding import UnknownTask, task_of
from ...tasks.training import Gradient, Train
from ...types import Array, ClientData
from ..adversary import AdversaryView
from .clipped import sampling_rate

__all__ = ["LocalTraining", "NotRecorded", "Trainings", "carry", "training_in", "trainings_in", "with_samples"]

BESIDE = {
    "model": "", "summed": "", "shared": "", "prototypes": "",
    "anchor": "what draws cluster models to the global one",
    "origin": "neighbourhoods that overlap, whose models are means of models",
}  # fmt: skip
"""Parameter of a training -> what it brings into the means of updates of whole models."""


class NotRecorded(InputError):
    """The transcript does not say how clients trained."""


def carry(lr: float, steps: int, momentum: float = 0.0, prox: float = 0.0) -> float:
    """How far `steps` of SGD at rate `lr` carry a parameter whose gradient is 1 throughout."""
    moved = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - prox * moved
        moved += lr * velocity
    return moved


@dataclass(frozen=True)
class LocalTraining:
    """`train` at the rate of its round, by each client on all samples but the share `held_back`, which the public `seed` chooses.

    `gradient`: clients send the gradient at the model instead, which is one full-batch step of rate 1 with its sign turned. `beyond` says
    in words what the mean of updates holds beside this training; `alone` that a single client's update holds nothing else. `beside` are the
    names of the parameters that clients were sent.
    """

    train: Train
    held_back: float = 0.0
    seed: int = 0
    gradient: bool = False
    beyond: str = ""
    alone: bool = True
    beside: frozenset[str] = frozenset()

    def clipped(self, config: Config) -> "LocalTraining":
        """The same as clients of a run of `config` clip and draw Poisson batches under unit = "sample"; the noise is left out."""
        if config.privacy.unit != "sample":
            return self
        return replace(self, train=replace(self.train, clip_norm=config.privacy.clip_norm, sampling_rate=sampling_rate(config)))

    def unanchored(self) -> "LocalTraining":
        """The same without the pull to the anchor that clients were sent, for those that imitate training and leave it out of account."""
        return replace(self, train=replace(self.train, prox=0.0)) if "anchor" in self.beside else self

    def samples(self, count: int) -> int:
        """On how many samples a client that has `count` trains."""
        return max(1, count - (round(self.held_back * count) or 1)) if self.held_back else count

    def places(self, data: ClientData) -> Array:
        """Which of its training samples a client trains on, as indices (n,). `InputError` for one that can hold none back."""
        return split_validation(data, self.held_back, self.seed)[0] if self.held_back else np.arange(len(data.y_train))

    def part(self, data: ClientData) -> ClientData:
        """The client with no training samples but those that it trains on."""
        return with_samples(data, self.places(data)) if self.held_back else data

    def steps(self, count: int) -> int:
        """How many steps a client that has `count` samples takes."""
        return steps_of(self.train, self.samples(count))

    def carried(self, count: int) -> float:
        """How far a constant unit gradient carries the parameters of a client that has `count` samples.

        That is rate × steps, with momentum's growth, and as far as a proximal term lets it.
        """
        return carry(self.train.lr, self.steps(count), self.train.momentum, self.train.prox)


@dataclass(frozen=True)
class Trainings:
    """The trainings whose results were averaged: by round the first of each, without the pull to an anchor, and `all` of them."""

    by_round: Mapping[int, LocalTraining]
    all: tuple[LocalTraining, ...]

    def at(self, round: int) -> LocalTraining:
        """That of a round, or of the last round before it that has one, else the first. Raises `NotRecorded` where there is none."""
        if not self.by_round:
            raise NotRecorded("the transcript has no local training whose results were averaged")
        return self.by_round[max((number for number in self.by_round if number <= round), default=min(self.by_round))]

    @property
    def first(self) -> LocalTraining | None:
        """That of the first update that any client sends."""
        return self.by_round[min(self.by_round)] if self.by_round else None

    def not_modelled(self) -> str:
        """What lies between clients' updates and the next model and is left out of account, as the end of a note; empty if nothing is."""
        words = next((training.beyond for training in self.all if training.beyond), "")
        return f"; not modelled, so that a figure at the baseline proves nothing: {words}, in means of updates" if words else ""


def trainings_in(view: AdversaryView) -> Trainings:
    """The trainings that a view shows to have been averaged."""
    by_round: dict[int, LocalTraining] = {}
    trainings: list[LocalTraining] = []
    asked: LocalTraining | None = None
    for message in view.messages:
        if message.operation == "compute" and message.kind == "parameters":
            asked = training_of(message) or asked
        elif message.operation == "mean" and asked is not None:
            by_round.setdefault(message.round, asked.unanchored())
            trainings += [] if asked in trainings else [asked]
    return Trainings(by_round, tuple(trainings))


def training_of(message: Message) -> LocalTraining | None:
    """How the clients that got this message of parameters trained; None where its task holds no training that can be read."""
    settings = message.context.get("settings")
    sent = frozenset(part.partition("/")[0] for part in message.payload or {})
    return None if settings is None else _read(json.dumps(settings), sent)


@lru_cache(maxsize=512)
def _read(settings: str, sent: frozenset[str]) -> LocalTraining | None:
    tree = json.loads(settings)
    trainings = _trainings(tree)
    if len(trainings) != 1:
        return None
    (training,), task = trainings, _task(tree)
    if task is None:
        beyond, alone = f"what {tree['']} does beside training", False
    else:
        beyond, alone = str(getattr(task, "beyond", "")), not isinstance(task, AroundTraining | OnPart)
    others = [BESIDE.get(name, f"what clients are sent as {name!r}") for name in sorted(sent)]
    beyond = beyond or ", ".join(word for word in others if word)
    alone = alone and not beyond and not training.gradient and sent <= {"model"}
    return replace(training, beyond=beyond, alone=alone, beside=sent)


def _task(tree: Any) -> Any:
    """The task of these settings; None for one that remote clients would not know."""
    task = task_of(tree)
    return None if isinstance(task, UnknownTask) else task


def _trainings(tree: Any) -> list[LocalTraining]:
    """The trainings in settings: of a task that is known the first, of an unknown one all, since the order of its fields is not."""
    if not isinstance(tree, dict):
        return [training for part in tree for training in _trainings(part)] if isinstance(tree, list) else []
    task = _task(tree)
    if task is None:
        return [training for part in tree.values() for training in _trainings(part)]
    return [] if (training := training_in(task)) is None else [training]


def training_in(task: Any) -> LocalTraining | None:
    """The first training of a task, in the order of fields; None where it has none."""
    if isinstance(task, Train):
        return LocalTraining(task)
    if isinstance(task, Gradient):
        return LocalTraining(Train(task.model, 1, 0, 1.0, on_divergence=task.on_divergence), gradient=True)
    parts = [getattr(task, field.name) for field in fields(task)] if is_dataclass(task) else []
    first = next((training for part in parts if (training := training_in(part)) is not None), None)
    return replace(first, held_back=task.validation, seed=task.seed) if first is not None and isinstance(task, OnPart) else first


def with_samples(data: ClientData, places: Array) -> ClientData:
    """The client with those of its training samples that have these indices (n,)."""
    return replace(data, x_train=data.x_train[places], y_train=data.y_train[places])
