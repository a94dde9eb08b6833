"""Models as flat vectors: a frozen description that builds a torch module and maps one parameter vector onto it.

Everything that travels is one vector per model, in the order of the module's parameters, so that protections see arrays and nothing else.
"""

import math
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Literal

import numpy as np
import torch
from torch import nn

from ..errors import InputError, near
from ..keys import Key, check_ranges
from ..plugins import Registry
from ..randomness import stream
from ..types import Array
from .device import in_use, placed
from .layers import Residual, stack_layers

__all__ = [
    "MODELS", "OTHER_NAMES", "Hidden", "InitScale", "Model", "build_module", "dtype_of", "keeps_samples_apart", "module_there",
    "register_model",
]  # fmt: skip

Dtype = Literal["float32", "float64"]
Hidden = Annotated[int, Key("Width of a hidden layer, for models that have one to choose.", "[1, inf)", "units")]
InitScale = Annotated[
    float, Key("Initial parameters are the architecture's own times this. 0: a linear model that begins at zero.", "[0, inf)")
]
MOST_CHECKED = 1 << 24
"""A model of more parameters is checked when it is built, not when it is described."""
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
    Initial parameters are the architecture's own times `init_scale`.
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

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "model")
        object.__setattr__(self, "name", OTHER_NAMES.get(self.name, self.name))

    @cached_property
    def layout(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """(name, shape, offset) of each parameter inside the vector. Takes no memory for parameters."""
        entries, offset = [], 0
        for name, parameter in _without_memory(self).named_parameters():
            entries.append((name, tuple(parameter.shape), offset))
            offset += math.prod(parameter.shape)
        return tuple(entries)

    @cached_property
    def dimension(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for _, shape, _ in self.layout)

    def init(self, seed: int, attempt: int = 0) -> Array:
        """Initial parameters, shape (dimension,): the module's own initialisation under a stream keyed by (`seed`, `attempt`), scaled.

        Raises `InputError` for another than the first of models that would all be zero.
        """
        if attempt and self.init_scale == 0:
            raise InputError("model.init_scale = 0: the algorithm begins with several models, which would all be the same")
        key = int(stream(seed, f"initial model {attempt}").integers(2**63))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key)
            module = _construct(self)
        return np.asarray(_to_vector(module) * np.asarray(self.init_scale, self.dtype))

    def checked(self, vector: Array) -> Array:
        """`vector` (dimension,) itself. Raises `InputError` for another shape."""
        if vector.shape != (self.dimension,):
            raise InputError(f"model {self.name!r}: parameters have shape {vector.shape}, expected ({self.dimension},)")
        return vector

    def load(self, vector: Array, training: bool = False) -> nn.Module:
        """The module with the parameters of `vector`, on the device in use. Equal descriptions share it: use it before the next `load`.

        `training` is torch's mode, which dropout heeds.
        """
        module = module_there(self, in_use().kind).train(training)
        source = placed(torch.tensor(self.checked(vector)))
        with torch.no_grad():
            for (_, shape, offset), parameter in zip(self.layout, module.parameters(), strict=True):
                parameter.copy_(source[offset : offset + parameter.numel()].view(shape))
        return module

    def store(self, module: nn.Module) -> Array:
        """The parameter vector of a module that `load` gave."""
        return _to_vector(module)

    def inputs(self, x: Array) -> torch.Tensor:
        """Samples as the module's normalised input, on the device in use."""
        raw = torch.from_numpy(x).to(dtype_of(self.dtype))
        if not any(self.mean) and all(deviation == 1.0 for deviation in self.std):
            return placed(raw)
        return placed((raw - self._statistic(self.mean)).div_(self._statistic(self.std)))

    def _statistic(self, values: tuple[float, ...]) -> torch.Tensor:
        statistic = torch.tensor(values, dtype=dtype_of(self.dtype))
        return statistic.view(-1, *([1] * (len(self.shape) - 1))) if len(values) > 1 else statistic


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
    """Two LSTM layers over a window of words, given as their numbers, and a score for each word that may come next."""

    def __init__(self, words: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, units)
        self.layers = nn.LSTM(units, units, num_layers=2, batch_first=True)
        self.scores = nn.Linear(units, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after, _ = self.layers(self.embedding(x.long()))
        return self.scores(after[:, -1])  # type: ignore[no-any-return]


def _lstm(model: Model) -> nn.Module:
    if len(model.shape) != 1:
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


def _without_memory(model: Model) -> nn.Module:
    """The module on torch's device "meta", or a whole one of a factory that cannot be built there. Raises `InputError` for no model."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = model.factory() if model.factory is not None else _builder(model)(model)
    except InputError:
        raise
    except Exception as error:
        if _OVERFLOW.search(str(error)):  # torch counts bytes in 64 bits
            raise InputError(f"model {model.name!r}: has more parameters than any memory") from None
        return build_module(model)
    known = _unfit(module) is None and not any(True for _ in module.buffers())
    return module if known or sum(parameter.numel() for parameter in module.parameters()) > MOST_CHECKED else build_module(model)


def _construct(model: Model) -> nn.Module:
    module = model.factory() if model.factory is not None else _builder(model)(model)
    if (problem := _unfit(module)) is not None:
        raise InputError(f"model {model.name!r}: {problem}")
    module = module.to(dtype_of(model.dtype))
    if (name := _moving_buffer(module, model)) is not None:
        layer, _, buffer = name.rpartition(".")
        raise InputError(
            f"model {model.name!r}: layer {layer or type(module).__name__!r} keeps running statistics ({buffer}), which are not "
            "parameters: they would not be averaged, and would stay from client to client; use GroupNorm"
        )
    return module


def _unfit(module: object) -> str | None:
    """Why parameters of a module cannot be trained and averaged as one vector, if they cannot."""
    if not isinstance(module, nn.Module):
        return f"its factory gives a {type(module).__name__}, not an nn.Module"
    parameters = dict(module.named_parameters())
    if not parameters:
        return "has no parameters"
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.UninitializedParameter):
            return f"parameter {name!r} has no size before a first pass; use layers that know their sizes"
        if not parameter.requires_grad:
            return f"parameter {name!r} is frozen (requires_grad is false), but all parameters are trained; make it a buffer"
    layers: dict[nn.Module, str] = {}
    for name, layer in module.named_modules(remove_duplicate=False):  # torch.func leaves such a layer changed
        if layer in layers and any(True for _ in layer.parameters()):
            return f"layers {layers[layer]!r} and {name!r} are one; give it one name, and call it twice"
        layers.setdefault(layer, name)
    return None


def _moving_buffer(module: nn.Module, model: Model) -> str | None:
    """The name of a buffer that a pass in training mode changes, if there is one."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    if before:
        with torch.no_grad():  # ones: a word's number, too; two samples: a batch norm takes no single one
            module.train()(torch.ones((2, *model.shape), dtype=dtype_of(model.dtype)))
    return next((name for name, buffer in module.named_buffers() if not torch.allclose(before[name], buffer, 0, 0, equal_nan=True)), None)


@lru_cache(maxsize=32)
def build_module(model: Model) -> nn.Module:
    """The module of a description, built once."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = _construct(model)
        outputs = module.eval()(torch.ones((2, *model.shape), dtype=dtype_of(model.dtype)))
        module.train()
    if not isinstance(outputs, torch.Tensor) or outputs.shape != (2, model.classes):
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise InputError(f"model {model.name!r}: gives {shape} for two samples, expected (2, {model.classes}), a score for each class")
    return module


@lru_cache(maxsize=32)
def module_there(model: Model, kind: str) -> nn.Module:
    """The same on a device "cpu" or "cuda". `memory.release_samples` forgets those that are on a device."""
    module = build_module(model)
    return module if kind == "cpu" else deepcopy(module).to(kind)


@lru_cache(maxsize=32)
def keeps_samples_apart(model: Model) -> bool:
    """Whether the output for a sample is known not to depend on the rest of its batch.

    By structure: known layers in plain Sequentials, none of which mixes samples. False for unknown modules (a batch norm, a user's own
    module): pass such a module one sample at a time if it matters.
    """
    module = build_module(model)
    containers = [type(inner) for inner in module.modules() if isinstance(inner, nn.Sequential)]
    return stack_layers(module) is not None and all(container is nn.Sequential for container in containers)


def _to_vector(module: nn.Module) -> Array:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).cpu().numpy().copy()
