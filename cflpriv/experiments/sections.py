"""The sections of an experiment's file that no other module defines: `[data]`, `[model]`, `[training]` and `[run]`."""

from dataclasses import dataclass
from typing import Literal

from ..contract.transcript import Level
from ..data import DataSpec
from ..engine.device import Precision
from ..engine.models import Dtype, Model

__all__ = ["MOST_WORKERS", "DataSection", "ModelSection", "RunSection", "TrainingSection"]


MOST_WORKERS = 512
"""Processes at most. A larger number is a mistake that would take all memory."""


@dataclass(frozen=True)
class DataSection(DataSpec):
    """`[data]`: the data set, its partition, and how many clients (the last ones) join after training.

    Newcomers are scored without training and after `newcomer_epochs` of training on their own data (0: not).
    """

    newcomers: int = 0
    newcomer_epochs: int = 5


@dataclass(frozen=True)
class ModelSection:
    """`[model]`. Its input is (pixel − mean) / deviation of the data set; with `normalise = false`, pixels in [0, 1] as they are."""

    name: str = "mlp"
    hidden: int = 200
    normalise: bool = True
    dtype: Dtype = "float32"

    def build(self, shape: tuple[int, ...], classes: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Model:
        """The model for samples of `shape` from a data set of this mean and deviation."""
        mean, std = (mean, std) if self.normalise else ((0.0,), (1.0,))
        return Model(self.name, shape, classes, self.hidden, mean, std, self.dtype)


@dataclass(frozen=True)
class TrainingSection:
    """`[training]`: rounds, local SGD, and which clients take part.

    `weights` are those of means: "examples" (sample counts), "equal", or "own": the algorithm's own default, as its paper prints.
    """

    rounds: int = 20
    epochs: int = 1
    batch_size: int = 10
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    on_divergence: Literal["stop", "skip"] = "stop"
    optimizer: Literal["sgd", "adam"] = "sgd"
    weights: str = "own"
    sampling: str = "global"
    participation: float = 1.0
    dropout: float = 0.0
    dropouts: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True)
class RunSection:
    """`[run]`: the seed of all that is not secret, how to compute, what to record, and whose secrets to write (simulation only).

    With `target_accuracy` above 0 (a share, at most 1) the summary reports the rounds and megabits it took to reach it. `transport`: how
    requests reach clients, as objects ("memory") or encoded ("bytes"). `release_policy`: clients refuse what a deployed client would refuse
    to release ("strict"), or release whatever the algorithm asks for ("off", in simulations only).
    `plugins` are
    Python files that register algorithms, models, attacks or data sets, relative to the config file; they are kept as absolute paths.
    """

    seed: int = 0
    engine: Literal["auto", "sequential"] = "auto"
    workers: int = 1
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    precision: Precision = "full"
    transport: Literal["memory", "bytes"] = "memory"
    release_policy: Literal["strict", "off"] = "strict"
    record: Level = "headers"
    record_rounds: tuple[int, ...] = ()
    record_clients: tuple[int, ...] = ()
    audit_parties: tuple[str, ...] = ("server",)
    evaluate_every: int = 1
    target_accuracy: float = 0.0
    checkpoint_every: int = 1
    insecure_test_entropy: bool = False
    plugins: tuple[str, ...] = ()
