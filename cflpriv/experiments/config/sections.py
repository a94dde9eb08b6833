"""The sections of an experiment's file that no other module defines: `[data]`, `[model]`, `[training]` and `[run]`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ...contract.operations import Participation, SamplingMode
from ...contract.transcript import Level
from ...data import DataSpec
from ...engine.compute import Kind
from ...engine.device import NoisePlace, Precision
from ...engine.models import MODELS, OTHER_NAMES, Dtype, Hidden, InitScale, Model
from ...engine.run import Processes
from ...engine.views import check_views
from ...keys import Key, check_ranges, readable
from ...tasks.training import Augment, BatchSize, Epochs, LearningRate, LearningRateDecay, Momentum, OnDivergence, Optimizer, WeightDecay
from ...transports.memory import Dropout
from ...types import Loss

__all__ = ["DataSection", "ModelSection", "RunSection", "TrainingSection"]


@readable
@dataclass(frozen=True)
class DataSection(DataSpec):
    """`[data]`: the data set, its partition, and how many clients (the last ones) join after training."""

    newcomers: Annotated[
        int, Key("The last so many clients join after training, where the algorithm admits them.", "[0, inf)", "clients")
    ] = 0
    newcomer_epochs: Annotated[
        int, Key("Newcomers are scored without training, and after so many epochs on their own data (0: not).", "[0, inf)", "epochs")
    ] = 5


@readable
@dataclass(frozen=True)
class ModelSection:
    """`[model]`: the architecture and what it makes of its input."""

    name: Annotated[str, Key("Architecture; `cflpriv list` describes each.", known=lambda: MODELS)] = "mlp"
    hidden: Hidden = 200
    normalise: Annotated[
        bool, Key("Input is (value − mean) / deviation, by the statistics of the data set; false: values as they are.")
    ] = True
    dtype: Annotated[Dtype, Key("Floating-point type of parameters and training.")] = "float32"
    init_scale: InitScale = 1.0
    error: Annotated[Literal["squared", "absolute"], Key("What training minimises where the label is a number (data.label_type).")] = (
        "squared"
    )

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "model")
        object.__setattr__(self, "name", OTHER_NAMES.get(self.name, self.name))

    def build(self, shape: tuple[int, ...], classes: int, mean: tuple[float, ...], std: tuple[float, ...], numbers: bool = False) -> Model:
        """The model for samples of `shape` from a data set of this mean and deviation; of labels that are `numbers`, or classes.

        Raises `InputError` for a user's module that the probe refuses.
        """
        mean, std = (mean, std) if self.normalise else ((0.0,), (1.0,))
        loss: Loss = self.error if numbers else "cross_entropy"
        return Model(self.name, shape, classes, self.hidden, mean, std, self.dtype, init_scale=self.init_scale, loss=loss).with_constants()


@readable
@dataclass(frozen=True)
class TrainingSection:
    """`[training]`: rounds, local training, and which clients take part."""

    recipe: Annotated[
        Literal["none", "private"],
        Key(
            "Defaults for keys that are left out. `private`, for images under sample-level privacy: a linear model of public features "
            '(`data.features = "whitened_scattering"`, `model.name = "linear"`); the other values follow from the budget as without it.'
        ),
    ] = "none"
    rounds: Annotated[int, Key("Rounds of training; left out under sample-level privacy: 100.", "[0, inf)", "rounds")] = 20
    epochs: Epochs = 1
    batch_size: BatchSize = 10
    lr: LearningRate = 0.01
    momentum: Momentum = 0.0
    weight_decay: WeightDecay = 0.0
    lr_decay: LearningRateDecay = 1.0
    on_divergence: OnDivergence = "stop"
    optimizer: Optimizer = "sgd"
    augment: Augment = ()
    weights: Annotated[
        str,
        Key(
            "Weights of means: sample counts (`examples`), `equal`, or the default of the algorithm's paper (`own`).",
            known=lambda: ("own", "examples", "equal"),
        ),
    ] = "own"
    mixture: Annotated[
        bool,
        Key(
            "After the last round each client mixes the model that it uses, that model fine-tuned, and a local model; the weights stay "
            "with it (simulations)."
        ),
    ] = False
    sampling: SamplingMode = "global"
    participation: Participation = 1.0
    dropout: Dropout = 0.0
    dropouts: Annotated[
        tuple[tuple[int, int, str], ...],
        Key(
            "Simulations: dropouts as [round, client, stage]; rounds count from 0, stages are Advert, Shares, Masked, Consistent, Reveal.",
            "[0, inf)",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "training")
        check_views(self.augment)


@readable
@dataclass(frozen=True)
class RunSection:
    """`[run]`: the seed of all that is not secret, how to compute, what to record, and whose secrets to write (simulation only)."""

    seed: Annotated[int, Key("Seed of all that is not secret: first model, cohorts, batches.")] = 0
    name: Annotated[
        str, Key("Name of the run in the session contract. Clients answer one session for each contract, so a second run needs another.")
    ] = ""
    engine: Annotated[
        Kind,
        Key("The quickest way that gives the same (`auto`), the same without the compiled library (`torch`), or clients one by one."),
    ] = "auto"
    workers: Processes = 1
    device: Annotated[Literal["auto", "cpu", "cuda"], Key("Where clients' training is computed; `auto` takes CUDA if there is one.")] = (
        "cpu"
    )
    precision: Annotated[Precision, Key("Products in training on CUDA: of float32 (`full`), TF32 or bfloat16; a CPU has `full` only.")] = (
        "full"
    )
    noise_place: Annotated[
        NoisePlace,
        Key(
            "Where the noise of private training is made, of keys from the clients' cryptographic source: on the `host`, where training is "
            "computed (`device`), or there if that is CUDA and else on the host (`auto`)."
        ),
    ] = "auto"
    transport: Annotated[
        Literal["memory", "bytes"], Key("How requests reach clients: as objects (`memory`) or encoded as in a deployment (`bytes`).")
    ] = "memory"
    release_policy: Annotated[
        Literal["strict", "off"],
        Key("Clients refuse what a deployed client would refuse to release (`strict`), or release whatever is asked (`off`, simulations)."),
    ] = "strict"
    record: Annotated[
        Level, Key("What the transcript keeps: no payloads (`headers`), those that attacks read (`attackable`), or all (`full`).")
    ] = "headers"
    record_rounds: Annotated[
        tuple[int, ...],
        Key("`attackable`: keep payloads of these rounds only, counted from 0 (what came before is kept); empty: of all.", "[0, inf)"),
    ] = ()
    record_clients: Annotated[tuple[int, ...], Key("`attackable`: keep payloads of these clients only; empty: of all.", "[0, inf)")] = ()
    record_sample: Annotated[
        int, Key("`attackable`: keep payloads of so many clients only, drawn at random once a run (0: of all).", "[0, inf)", "clients")
    ] = 0
    audit_parties: Annotated[
        tuple[str, ...],
        Key('Simulations: parties whose secrets are written for audits: "server", "key-holder", "client:3".'),
    ] = ("server",)
    evaluate_every: Annotated[int, Key("Evaluate after every so many rounds.", "[1, inf)", "rounds")] = 1
    evaluate_clients: Annotated[
        int,
        Key(
            "Evaluate so many clients, drawn at random each time (0: all). The mean has an interval; the worst is the worst of these.",
            "0 or [2, inf)",
            "clients",
        ),
    ] = 0
    target_accuracy: Annotated[float, Key("Report rounds and megabits until this mean accuracy is reached; 0: not.", "[0, 1]")] = 0.0
    checkpoint_every: Annotated[int, Key("Save a checkpoint after every so many rounds.", "[1, inf)", "rounds")] = 1
    insecure_test_entropy: Annotated[
        bool, Key("Tests only: secrets, masks and noise come from the public seed, so they protect nothing.")
    ] = False
    plugins: Annotated[
        tuple[str, ...],
        Key("Python files that register algorithms, models, attacks or data sets; relative to the configuration file."),
    ] = ()
    schedule: Annotated[
        str,
        Key(
            "A file with what the algorithm asks of clients, for an own algorithm that declares no schedule (`cflpriv contract --infer` "
            "writes it); relative to the configuration file. It becomes part of the session contract."
        ),
    ] = ""
    advise: Annotated[
        bool,
        Key(
            "After the last round, compare what could be deployed on held-out samples: local models, one model, clusters, random clusters "
            "of the same sizes, and each client's own mixture (simulations)."
        ),
    ] = False
    callbacks: Annotated[
        tuple[str, ...],
        Key("Code that receives rounds, metrics and messages: `tensorboard`, `mlflow`, `wandb`, or a plugin's."),
    ] = ()

    metrics: Annotated[
        tuple[str, ...],
        Key("Own metrics that a plugin registers: functions of predictions and labels. Results have them as `metric_NAME`."),
    ] = ()

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "run")
