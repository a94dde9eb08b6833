"""What a client of a run really trains in a round: what every attack goes by that imitates training, or reads an update by its scale.

`[training]` is where algorithms begin. Per-FedAvg has rates of its own and uses batches in pairs, FedProx and StoCFL add a proximal term,
one-shot clustering trains for longer at first, pFedLIA's clients hold samples back, the authors' CFL lets the rate decay. All of it is
public. What is known of a client's steps only once messages are read, StoCFL's pull to an anchor and SCAFFOLD's correction, is in
`label_inference.less_known`.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..algorithms.around import steps_of
from ..algorithms.cfl import DECAY_AUTHORS
from ..algorithms.influence import split
from ..experiments.config import Config
from ..models import Model
from ..training import Train
from ..types import Array, ClientData
from .clipped import sampling_rate

__all__ = ["LocalTraining", "local_training", "not_modelled", "only"]

HOLD_BACK = ("pfedlia", "fedfomo")
"""Algorithms whose clients train on a part of their samples."""
NOT_MODELLED = {
    "scaffold": "the corrections c - c_i, in means of updates",
    "stocfl": "what draws cluster models to the global one, in means of updates",
    "fednova": "weights by numbers of steps, in means of updates",
    "peer": "neighbourhoods that overlap, whose models are means of models",
}
"""By algorithm, or mode of pFedLIA."""


@dataclass(frozen=True)
class LocalTraining:
    """`train` at the rate of its round, by each client on all samples but the share `held_back`, which the public `seed` chooses."""

    train: Train
    held_back: float = 0.0
    seed: int = 0

    def samples(self, count: int) -> int:
        """On how many samples a client that has `count` trains."""
        return max(1, count - (round(self.held_back * count) or 1)) if self.held_back else count

    def places(self, data: ClientData) -> Array:
        """Which of its training samples a client trains on, as indices (n,). `InputError` for one that can hold none back."""
        return split(data, self.held_back, self.seed)[0] if self.held_back else np.arange(len(data.y_train))

    def part(self, data: ClientData) -> ClientData:
        """The client with no training samples but those that it trains on."""
        return only(data, self.places(data)) if self.held_back else data

    def steps(self, count: int) -> int:
        """How many steps a client that has `count` samples takes."""
        return steps_of(self.train, self.samples(count))

    def carried(self, count: int) -> float:
        """How far a constant unit gradient carries the parameters of a client that has `count` samples.

        That is rate × steps, with momentum's growth, and as far as a proximal term lets it.
        """
        moved = velocity = 0.0
        for _ in range(self.steps(count)):
            velocity = self.train.momentum * velocity + 1.0 - self.train.prox * moved
            moved += self.train.lr * velocity
        return moved


def local_training(config: Config, model: Model, round: int = 0, anchored: bool = False) -> LocalTraining:
    """What clients of a run of `config` train in a round (below 0: before the first).

    Under unit = "sample" they clip and draw Poisson batches as everybody; the noise is left out. `anchored`: of StoCFL's two trainings a
    round the one that is drawn to an anchor.
    """
    t, name = config.training, str(config.algorithm["name"])
    train = Train(
        model, t.epochs, t.batch_size, t.lr, t.momentum, t.weight_decay, t.lr_decay, on_divergence=t.on_divergence, optimizer=t.optimizer,
    )  # fmt: skip
    if config.privacy.unit == "sample":
        train = replace(train, clip_norm=config.privacy.clip_norm, sampling_rate=sampling_rate(config))
    if name == "per_fedavg":
        train = replace(train, lr=parameter(config, "beta") or train.lr, maml_lr=parameter(config, "alpha"))
    elif name == "fedprox":
        train = replace(train, prox=parameter(config, "mu"))
    elif name == "stocfl" and anchored:
        train = replace(train, prox=parameter(config, "lam"))
    elif name == "one_shot" and round < 0:
        train = replace(train, epochs=parameter(config, "local_epochs"))
    elif name == "cfl" and parameter(config, "variant") == "authors" and train.lr_decay == 1.0:
        train = replace(train, lr_decay=DECAY_AUTHORS)
    return LocalTraining(train.at(round), parameter(config, "validation") if name in HOLD_BACK else 0.0, config.run.seed)


def not_modelled(config: Config) -> str:
    """What lies between clients' updates and the next model and is left out of account, as the end of a note; empty where nothing is."""
    name = str(config.algorithm["name"])
    words = NOT_MODELLED.get(str(parameter(config, "mode")) if name == "pfedlia" else name)
    return f"; not modelled, so that a figure at the baseline proves nothing: {words}" if words else ""


def only(data: ClientData, places: Array) -> ClientData:
    """The client with those of its training samples that have these indices (n,)."""
    return replace(data, x_train=data.x_train[places], y_train=data.y_train[places])


def parameter(config: Config, key: str) -> Any:
    """A hyper-parameter of the run's algorithm: as given, else its default."""
    return config.algorithm.get(key, inspect.signature(config.spec.make).parameters[key].default)
