"""Models as flat vectors: a frozen description that builds a torch module and maps one parameter vector onto it.

Everything that travels is one vector per model, in the order of the module's parameters, so that protections see arrays and nothing else.
"""

import math
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Literal

import numpy as np
import torch
from torch import nn

from ..errors import InputError, near, out_of_memory
from ..keys import Key, check_ranges
from ..plugins import Registry
from ..randomness import stream
from ..types import Array, Loss
from .device import in_use, placed
from .operations import Operation, copies_nothing, traced
from .own_modules import constants_digest, hooked, in_mode, keep_nothing, prepared, seeded, trained_shapes, unfit
from .probe import Findings, made_up, probe, unrepeatable

__all__ = [
    "MODELS", "OTHER_NAMES", "Hidden", "InitScale", "Model", "Residual", "build_module", "dtype_of", "findings_of",
    "check_words", "model_doubts", "module_there", "operations_of", "register_model",
]  # fmt: skip

Dtype = Literal["float32", "float64"]
Hidden = Annotated[int, Key("Width of a hidden layer, for models that have one to choose.", "[1, inf)", "units")]
InitScale = Annotated[
    float, Key("Initial parameters are the architecture's own times this. 0: a linear model that begins at zero.", "[0, inf)")
]
MOST_CHECKED = 1 << 24
"""A model of more parameters is checked when it is built, not when it is described."""
LARGE = 1 << 22
"""A module of so many parameters is not kept when only its operations are wanted."""
BUILT_AT_ONCE = 1 << 12
"""A user's module is built to be described, without a look at its size before, if neither `hidden` nor `classes` is larger."""
_OVERFLOW = re.compile("overflow|larger than|too large")
OTHER_NAMES = {"softmax": "linear"}
"""Other names of architectures. Results and saved configurations have the name that it stands for."""


def dtype_of(name: Dtype) -> torch.dtype:
    """The torch dtype of a model's `dtype`."""
    return torch.float64 if name == "float64" else torch.float32


@dataclass(frozen=True)
class Model:
    """What to train: architecture `name` for samples of `shape`, with `classes` outputs.

    `hidden` is the width of the MLP's hidden layer. Inputs are normalised by (x − mean) / std, one value a channel or one for all.
    Initial parameters are the architecture's own times `init_scale`. `constants` is the digest of a user's module's buffers and frozen
    parameters, which never travel: a party whose module has others refuses the description. "": not compared. `loss`: cross-entropy
    of classes, or with one output the error of a number.
    """

    name: str
    shape: tuple[int, ...]
    classes: Annotated[int, Key("Outputs.", "[1, inf)", "classes")]
    hidden: Hidden = 200
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    dtype: Dtype = "float32"
    factory: Callable[[], nn.Module] | None = None
    init_scale: InitScale = 1.0
    constants: str = ""
    loss: Loss = "cross_entropy"

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "model")
        if self.loss != "cross_entropy" and self.classes != 1:
            raise InputError(f"model.loss = {self.loss!r}: is the error of one number, and the model has {self.classes} outputs")
        object.__setattr__(self, "name", OTHER_NAMES.get(self.name, self.name))

    @cached_property
    def layout(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """(name, shape, offset) of each trained parameter inside the vector. Takes no memory for parameters of the project's own models."""
        return _layout(self)

    @cached_property
    def dimension(self) -> int:
        """The number of trained parameters."""
        return sum(math.prod(shape) for _, shape, _ in self.layout)

    def init(self, seed: int, attempt: int = 0) -> Array:
        """Initial parameters, shape (dimension,): the module's own initialisation under a stream keyed by (`seed`, `attempt`), scaled.

        Raises `InputError` for another than the first of models that would all be the same.
        """
        if attempt and self.init_scale == 0:
            raise InputError("model.init_scale = 0: the algorithm begins with several models, which would all be the same")
        own = _is_own(self)
        if own:
            build_module(self)  # with its checks
        with seeded(int(stream(seed, f"initial model {attempt}").integers(2**63))):
            vector = np.asarray(_to_vector(_construct(self)) * np.asarray(self.init_scale, self.dtype))
        if own and attempt and np.array_equal(vector, self.init(seed)):
            raise InputError(
                f"model {self.name!r}: its factory gives the same parameters each time, but the algorithm begins with several models, "
                "which would all be the same; draw some of them at random, or take another algorithm"
            )
        return vector

    def with_constants(self) -> "Model":
        """This description with the digest of the module's constants, for parties that build the module themselves."""
        return replace(self, constants=_digest_of(self)) if _is_own(self) and not self.constants else self

    def checked(self, vector: Array) -> Array:
        """`vector` (dimension,) itself. Raises `InputError` for another shape."""
        if vector.shape != (self.dimension,):
            raise InputError(f"model {self.name!r}: parameters have shape {vector.shape}, expected ({self.dimension},)")
        return vector

    def load(self, vector: Array, training: bool = False) -> nn.Module:
        """A module with the parameters of `vector`, on the device in use; each call gives one of its own.

        `training` is torch's mode, which dropout heeds.
        """
        return deepcopy(self.lent(vector, training))

    def lent(self, vector: Array, training: bool = False) -> nn.Module:
        """`load` without a copy: equal descriptions share the module, so use it before the next `lent`."""
        module = in_mode(module_there(self, in_use().kind), training)
        source = placed(torch.tensor(self.checked(vector)))
        with torch.no_grad():
            for (_, shape, offset), parameter in zip(self.layout, module.parameters(), strict=True):
                parameter.copy_(source[offset : offset + parameter.numel()].view(shape))
        return module

    def store(self, module: nn.Module) -> Array:
        """The parameter vector of a module that `load` or `lent` gave."""
        return _to_vector(module)

    def inputs(self, x: Array) -> torch.Tensor:
        """Samples as the module's normalised input, on the device in use."""
        raw = torch.from_numpy(x).to(dtype_of(self.dtype))
        if not any(self.mean) and all(deviation == 1.0 for deviation in self.std):
            return placed(raw)
        return placed((raw - self._statistic(self.mean)).div_(self._statistic(self.std)))

    def _statistic(self, values: tuple[float, ...]) -> torch.Tensor:
        return _by_channel(values, dtype_of(self.dtype), len(self.shape))


@lru_cache(maxsize=64)
def _by_channel(values: tuple[float, ...], dtype: torch.dtype, axes: int) -> torch.Tensor:
    """A statistic of each channel beside samples of so many axes; nobody changes the tensor."""
    statistic = torch.tensor(values, dtype=dtype, device="cpu")
    return statistic.view(-1, *([1] * (axes - 1))) if len(values) > 1 else statistic


def _linear(model: Model) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(model.shape)), model.classes))


def _mlp(model: Model) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(model.shape)), model.hidden), nn.ReLU(), nn.Linear(model.hidden, model.classes)
    )


def _lenet5(model: Model) -> nn.Module:
    channels, height, width = _image(model, smallest=16)
    flat = 16 * ((((height - 4) // 2) - 4) // 2) * ((((width - 4) // 2) - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, model.classes),
    )  # fmt: skip


def _image(model: Model, smallest: int) -> tuple[int, int, int]:
    if len(model.shape) != 3 or min(model.shape[1:]) < smallest:
        raise InputError(f"model.name: {model.name!r} needs images of at least {smallest}×{smallest}, the data have shape {model.shape}")
    return model.shape[0], model.shape[1], model.shape[2]


def _cnn(model: Model) -> nn.Module:
    channels, height, width = _image(model, smallest=16)
    flat = 64 * ((((height - 4) // 2) - 4) // 2) * ((((width - 4) // 2) - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(flat, model.hidden), nn.ReLU(), nn.Linear(model.hidden, model.classes),
    )  # fmt: skip


def _femnist_cnn(model: Model) -> nn.Module:
    channels, height, width = _image(model, smallest=4)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 2048), nn.ReLU(), nn.Linear(2048, model.classes),
    )  # fmt: skip


def _sigmoid_lenet(model: Model) -> nn.Module:
    channels, height, width = _image(model, smallest=4)
    flat = 12 * -(-height // 4) * -(-width // 4)
    module = nn.Sequential(
        nn.Conv2d(channels, 12, 5, stride=2, padding=2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, stride=2, padding=2), nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(flat, model.classes),
    )  # fmt: skip
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return module


class Residual(nn.Module):
    """x + body(x), for networks with skip connections."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


def _resnet9(model: Model) -> nn.Module:
    channels, height, width = _image(model, smallest=32)

    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(32, outside), nn.ReLU()]

    return nn.Sequential(
        *block(channels, 64), *block(64, 128), nn.MaxPool2d(2), Residual(*block(128, 128), *block(128, 128)),
        *block(128, 256), nn.MaxPool2d(2), *block(256, 512), nn.MaxPool2d(2), Residual(*block(512, 512), *block(512, 512)),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(512 * (height // 32) * (width // 32), model.classes),
    )  # fmt: skip


class NextWord(nn.Module):
    """Two LSTM layers over a window of words, and a score for each word that may come next.

    A window is (n, words), the words' numbers; or (n, 1, 1, words) within 0 to 1, where (number + ½) / words stands for a number.
    """

    def __init__(self, words: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, units)
        self.layers = nn.LSTM(units, units, num_layers=2, batch_first=True)
        self.scores = nn.Linear(units, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.embedding.num_embeddings
        numbers = x.long() if x.dim() == 2 else (x.flatten(1) * count).long().clamp(0, count - 1)
        after, _ = self.layers(self.embedding(numbers))
        return self.scores(after[:, -1])  # type: ignore[no-any-return]


def _lstm(model: Model) -> nn.Module:
    if max(model.shape[:-1], default=1) != 1:
        raise InputError(f"model.name: 'lstm' needs windows of word numbers, shape (words,), the data have shape {model.shape}")
    return NextWord(model.classes, model.hidden)


MODELS: Registry[tuple[Callable[[Model], nn.Module], str]] = Registry(
    "model", lambda entry: entry[0], lambda name, factory: register_model(name, factory)
)
"""Architecture name -> (builder, one line for `cflpriv list`)."""

MODELS |= {
    "linear": (_linear, "softmax regression, also called `softmax`"),
    "mlp": (_mlp, "one hidden ReLU layer of `hidden` units (IFCA, StoCFL)"),
    "lenet5": (_lenet5, "LeNet-5 as in PACFL, Table 10"),
    "cnn": (_cnn, "two convolutions and two linear layers, `hidden` units (IFCA and StoCFL on CIFAR; the papers give no widths)"),
    "femnist_cnn": (_femnist_cnn, "LEAF's network for FEMNIST: two padded convolutions and 2048 units"),
    "sigmoid_lenet": (_sigmoid_lenet, "three smooth convolutions, weights U(-.5, .5): what gradient inversion is measured on (DLG)"),
    "lstm": (_lstm, "two-layer LSTM of `hidden` units over windows of word numbers (CFL on AG News); runs in the plain loop"),
    "resnet9": (_resnet9, "ResNet-9 with GroupNorm as in PACFL, Table 11"),
}


def register_model(name: str, factory: Callable[[Model], nn.Module], summary: str = "") -> None:
    """Make an architecture known as `[model] name`: `factory` gives the module for a description (`shape`, `classes`, `hidden`).

    Raises `InputError` naming both if the name is that of another.
    """
    if name in OTHER_NAMES:
        raise InputError(f"model {name!r}: is another name of {OTHER_NAMES[name]!r}")
    MODELS.add(name, (factory, summary))


def _builder(model: Model) -> Callable[[Model], nn.Module]:
    known = MODELS.find(model.name)
    if known is None:
        raise InputError(f"model.name: {model.name!r} is not a known model{near(model.name, [*MODELS.names(), *OTHER_NAMES])}")
    return known[0]


def _is_own(model: Model) -> bool:
    """Whether the module is a user's."""
    return model.factory is not None or getattr(_builder(model), "__module__", "") != __name__


def _without_memory(model: Model) -> nn.Module:
    """The module on torch's device "meta", or a whole one of a user's factory. Raises `InputError` for no model."""
    own = _is_own(model)
    if own and max(model.hidden, model.classes) <= BUILT_AT_ONCE:
        return build_module(model)
    try:
        with seeded(0), torch.device("meta"):
            module = model.factory() if model.factory is not None else _builder(model)(model)
            large = unfit(module) is None and _size(module) > MOST_CHECKED
    except InputError:
        raise
    except Exception as error:
        if _OVERFLOW.search(str(error)):  # torch counts bytes in 64 bits
            raise InputError(f"model {model.name!r}: has more parameters than any memory") from None
        return build_module(model)
    return module if large or not own else build_module(model)


@lru_cache(maxsize=64)
def _layout(model: Model) -> tuple[tuple[str, tuple[int, ...], int], ...]:
    """`Model.layout`, once for models that are equal."""
    entries, offset = [], 0
    for name, shape in trained_shapes(_without_memory(model)):
        entries.append((name, shape, offset))
        offset += math.prod(shape)
    return tuple(entries)


def _construct(model: Model) -> nn.Module:
    try:
        module = model.factory() if model.factory is not None else _builder(model)(model)
    except InputError:
        raise
    except Exception as error:
        if out_of_memory(error):  # no fault of the factory
            raise
        raise InputError(
            f"model {model.name!r}: its factory fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    if (problem := unfit(module)) is not None:
        raise InputError(f"model {model.name!r}: {problem}")
    try:
        return prepared(module, dtype_of(model.dtype))
    except InputError as error:
        raise InputError(f"model {model.name!r}: {error}") from None


@lru_cache(maxsize=32)
def build_module(model: Model) -> nn.Module:
    """The module of a description, built once. Raises `InputError` for a user's module that the probe refuses."""
    if model.constants:
        plain = replace(model, constants="")
        if model.constants != _digest_of(plain):
            raise InputError(
                f"model {model.name!r}: buffers and frozen parameters have digest {_digest_of(plain) or 'none'} here, {model.constants} at "
                "the party that describes the model; make both from the same file or seed"
            )
        return build_module(plain)
    with seeded(0):  # what it draws for buffers and frozen parameters is the same for all parties
        module = _construct(model)
    if not _is_own(model):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = module.eval()(torch.ones((2, *model.shape), dtype=dtype_of(model.dtype)))
        if outputs.shape != (2, model.classes):
            raise InputError(f"model {model.name!r}: gives {tuple(outputs.shape)} for two samples, expected (2, {model.classes})")
        return module.train()
    try:
        copied = None if copies_nothing(module) else hooked(module, dtype_of(model.dtype))
    except InputError as error:
        raise InputError(f"model {model.name!r}: {error}") from None
    findings = _findings(model, module)
    if findings.problem:
        raise InputError(f"model {model.name!r}: {findings.problem}")
    if findings.restored:
        keep_nothing(module)
    if copied is not None and findings.alone:
        copied.refusal = f"model {model.name!r}: {findings.alone}"
    return in_mode(module, True)


@lru_cache(maxsize=64)
def operations_of(model: Model) -> tuple[Operation, ...] | None:
    """The operations of a model's module; None if it has others than `operations` knows."""
    if _is_own(model) or model.dimension < LARGE:
        return traced(build_module(model), model.shape, dtype_of(model.dtype))
    with seeded(0):
        return traced(_construct(model), model.shape, dtype_of(model.dtype))


_FINDINGS: dict[Model, Findings] = {}
"""What the probe found, by description, once in this process."""


def _findings(model: Model, module: nn.Module) -> Findings:
    key = replace(model, constants="")
    if key not in _FINDINGS:
        problem, other = "", None
        if _size(module) <= MOST_CHECKED:
            other = _repeated(model)
            if problem := unrepeatable(module, other):  # the first call may have drawn for what later calls take from a cache
                problem, other = unrepeatable(other, last := _repeated(model)), last
        x = model.inputs(made_up(module, model.shape)).cpu()
        _FINDINGS[key] = Findings(problem) if problem else probe(module, other, x, model.classes, model.loss)
    return _FINDINGS[key]


def _repeated(model: Model) -> nn.Module:
    """Another module of the same description and seed."""
    with seeded(0):
        other = _construct(model)
    if not copies_nothing(other):
        hooked(other, dtype_of(model.dtype))
    return other


def _size(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


@lru_cache(maxsize=256)
def _digest_of(model: Model) -> str:
    return constants_digest(build_module(model))


def model_doubts(model: Model) -> tuple[str, ...]:
    """What the probe found that a user should know: a sentence each, none for the project's own models."""
    return tuple(f"model {model.name!r}: {doubt}" for doubt in findings_of(model).doubts)


def check_words(model: Model, samples: Iterable[Array]) -> None:
    """Raises `InputError` if an embedding of a user's module is too small for samples (n, *shape)."""
    module = build_module(model) if _is_own(model) else nn.Identity()
    sizes = {name: layer.num_embeddings for name, layer in module.named_modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)}
    largest = max((x[int(np.argmax(x.reshape(len(x), -1).max(1)))] for x in samples if len(x)), key=np.max, default=None) if sizes else None
    if largest is None:
        return
    try:
        with torch.no_grad():
            deepcopy(module).eval()(model.inputs(np.stack([largest, largest])).cpu())
    except IndexError as error:
        some = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
        first = next(iter(str(error).splitlines()), "")
        raise InputError(
            f"model {model.name!r}: fails on a sample with the word number {float(np.max(largest)):g}: {first[:100]}; of its embeddings "
            f"{some}, and each needs one more than the largest number"
        ) from None


def findings_of(model: Model) -> Findings:
    """What the probe found of a user's module; nothing for the project's own models."""
    return _findings(model, build_module(model)) if _is_own(model) else Findings()


@lru_cache(maxsize=32)
def module_there(model: Model, kind: str) -> nn.Module:
    """The same on a device "cpu" or "cuda". `memory.release_samples` forgets those that are on a device.

    Raises `InputError` for a user's module that fails there.
    """
    module = build_module(model)
    if kind == "cpu":
        return module
    there = deepcopy(module).to(kind)
    if _is_own(model):
        try:
            with torch.no_grad():
                there.eval()(placed(model.inputs(made_up(module, model.shape)[:2])))
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            raise InputError(
                f"model {model.name!r}: fails on device {kind!r}: {type(error).__name__}: {first[:200]}; make tensors on the device "
                "of the input"
            ) from None
    return there


def _to_vector(module: nn.Module) -> Array:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).cpu().numpy()
