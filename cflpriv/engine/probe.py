"""A probe of a user's module before it is trained: passes forward and backward over made-up batches of 1, 2, 5 and 33 samples.

The ways of computing clients (one by one, stacked, under vmap, in worker processes, gradients by sample) call a module differently often,
with batches of different sizes. They agree for modules whose scores depend on parameters, samples and torch's generator alone. The probe
finds modules for which that does not hold, and errors that would otherwise come up in the middle of a run.
"""

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..types import Loss
from .losses import loss_of
from .own_modules import CONTAINERS, in_mode, own_attributes
from .pass_traces import holder_of, last_operation, leaves_of, outer_numbers
from .weak_modules import what_is_learned

__all__ = ["SIZES", "Findings", "made_up", "probe", "unrepeatable"]

SIZES = (2, 1, 5, 33)
"""Samples of the batches, in the order of the passes. The last one is left out for a module that would take `LONGEST` for it."""
LONGEST = 3.0
"""Seconds."""
REPEATS = 4
"""Passes over the same two samples."""
ADDED = 0.05
"""The mean gradient of two samples differs from the gradient of both together by less than this share."""
BOUNDING = {
    "Sigmoid": "a sigmoid", "LogSigmoid": "a logarithm of a sigmoid", "Tanh": "a tanh", "Relu": "a ReLU", "Softplus": "a softplus",
    "Hardsigmoid": "a sigmoid", "Hardtanh": "a tanh", "Clamp": "a clamp", "ClampMin": "a clamp", "ClampMax": "a clamp",
}  # fmt: skip
"""Last operations that keep scores from being of any size and sign."""
CLOSE = 1e-3
"""Scores of the same samples differ between batches by less than this, relative to the largest, unless samples mix."""


@dataclass(frozen=True)
class Findings:
    """What the probe found. `problem`: why the module cannot be trained, or "". `doubts`: what a user should know.

    `restored`: attributes that passes change without effect on scores. `alone`: why the module takes no batch of one sample, or "".
    `mixes`: a sample's scores depend on the other samples of its batch.
    """

    problem: str = ""
    doubts: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    alone: str = ""
    mixes: bool = False


class _Problem(Exception):
    """The module is refused; the message is the reason."""


@dataclass(frozen=True)
class _Pass:
    scores: Tensor
    gradients: tuple[Tensor | None, ...]


def made_up(module: nn.Module, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """33 samples of a shape, before normalisation: numbers in [0, 1] with some exact zeros and ones, of different brightness.

    Word numbers, below the size of the smallest embedding, for a module that has embeddings.
    """
    rng, count = np.random.default_rng(0), max(SIZES)
    words = [layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    if words:
        return rng.integers(min(words), size=(count, *shape)).astype(np.float64)
    x = rng.random((count, *shape))
    x[rng.random(x.shape) < 0.1] = 0.0
    x[rng.random(x.shape) < 0.1] = 1.0
    brightness = np.concatenate([[1.0, 0.1, 0.7, 0.4, 0.2], 0.1 + 0.4 * rng.random(count - 5)])
    return np.asarray(x * brightness.reshape(-1, *[1] * len(shape)))


def probe(module: nn.Module, other: nn.Module | None, x: Tensor, classes: int, loss: Loss = "cross_entropy") -> Findings:
    """What passes over the samples `x` (33, *shape), normalised, show of a prepared module, which stays as it is.

    They are passes of `other`, a second module of the same factory, or of a copy.
    """
    try:
        copied = deepcopy(module)
    except Exception as error:
        return Findings(
            f"cannot be copied ({_line(error)}), as other devices and audits need; keep no computed tensors, locks or files in attributes, "
            "and use torch.nn.utils.parametrizations in place of torch.nn.utils.weight_norm"
        )
    made = copied if other is None else other
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            warnings.simplefilter("ignore")
            found = _Probe(made, x, classes, loss).findings()
            problem, doubts = what_is_learned(module, x, classes, loss, found.restored, doubted=bool(found.doubts))
            return Findings(problem) if problem else replace(found, doubts=(*found.doubts, *doubts))
    except _Problem as problem:
        return Findings(str(problem))
    finally:
        torch.set_num_threads(threads)


def unrepeatable(module: nn.Module, other: nn.Module) -> str:
    """Why two prepared modules of one factory and seed are not the same module with memory of its own, or ""."""
    for kind, mine, theirs in (
        ("parameter", dict(module.named_parameters()), dict(other.named_parameters())),
        ("buffer or frozen parameter", dict(module.named_buffers()), dict(other.named_buffers())),
    ):
        if mine.keys() != theirs.keys():
            return f"its factory gives a {kind} {min(mine.keys() ^ theirs.keys())!r} in one call and not in another"
        for name, tensor in mine.items():
            if kind == "parameter" and tensor.numel() and tensor.data_ptr() == theirs[name].data_ptr():
                return f"its factory gives parameter {name!r} of an earlier call again; it must make a new module each time"
            if tensor.shape != theirs[name].shape or not torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(theirs[name])):
                return f"its factory gives other values of {kind} {name!r} under the same seed; draw them by torch, numpy.random or random"
    return ""


class _Probe:
    def __init__(self, module: nn.Module, x: Tensor, classes: int, loss: Loss) -> None:
        self.module, self.x, self.classes, self.loss = module, x, classes, loss
        self.names = [name for name, _ in module.named_parameters()]
        self.parameters = list(module.parameters())
        self.values = [parameter.detach().clone() for parameter in self.parameters]
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.changed: set[str] = set()
        self.alone, self.last = "", ""
        self.outer: set[str] = set()
        self.by_batch = any(isinstance(layer, _NormBase) and layer.running_mean is None for layer in module.modules())

    def findings(self) -> Findings:
        for name, value in zip(self.names, self.values, strict=True):
            if not bool(torch.isfinite(value).all()):
                raise _Problem(f"parameter {name!r} begins with numbers that are not finite; initialise it")
        sizes, began = list(SIZES), time.perf_counter()
        trained: dict[int, _Pass] = {}
        scored: dict[int, _Pass] = {}
        for size in sizes:
            if size == sizes[-1] and (time.perf_counter() - began) * size / 8 > LONGEST:
                break
            for training, passes in ((True, trained), (False, scored)):
                made = self._run(self.x[:size], training, 1)
                if made is not None:
                    passes[size] = made
        largest = max(scored)
        self._influence(trained.values())
        self._repeated(trained, largest)
        mixing = tuple(self._mixing(scored, largest)) or tuple(self._mixing_in_training())
        if not mixing and not self.by_batch:
            self._add_up(scored)
        doubts = [*mixing, *self._last_step(scored[largest].scores), *(() if mixing else self._blindness())]
        doubts += [
            f"its forward pass counts in {name}, outside of the module; ways of computing differ in the number of passes, so scores must "
            "not depend on that"
            for name in sorted(self.outer)
        ]
        return Findings("", tuple(doubts), tuple(sorted(self.changed)), self.alone, self.by_batch or bool(mixing))

    def _run(self, x: Tensor, training: bool, seed: int, label: int = 0) -> _Pass | None:
        """One pass forward and backward; None for a single sample that the module refuses as other layers of batches do.

        Labels count up from that of the first sample, `label`.
        """
        size, mode = len(x), "training" if training else "evaluation"
        before, state = x.clone(), self._state()
        in_mode(self.module, training)
        default, modes, numbers = torch.get_default_dtype(), [layer.training for layer in self.module.modules()], _numbers()
        given, outer = x.clone(), outer_numbers(self.module)
        where = f"in {mode} mode on a batch of {size}"
        torch.default_generator.manual_seed(seed)
        try:
            if not training and size == min(SIZES[0], len(self.x)):
                with torch.no_grad():
                    self.module(x.clone())
            scores = self.module(given)
        except (Exception, SystemExit) as error:
            self._failed(error, before, where)
            return None
        self._check(scores, size, where)
        if not torch.equal(torch.nan_to_num(given), torch.nan_to_num(x)):
            raise _Problem("changes its input in place, past the copy that it gets: its class replaces __call__; define forward instead")
        self.outer |= {name for name, number in outer_numbers(self.module).items() if outer.get(name, number) != number}
        self._compare_buffers()
        self._compare_parameters()
        if modes != [layer.training for layer in self.module.modules()]:
            raise _Problem("its forward pass switches between training and evaluation mode; leave the mode to the training")
        if default != torch.get_default_dtype():
            torch.set_default_dtype(default)
            raise _Problem("its forward pass sets torch's default dtype, which other modules use too; convert tensors instead")
        if numbers != _numbers():
            raise _Problem("its forward pass draws from numpy.random or random; draw from torch, whose generator the training seeds")
        if not scores.requires_grad:
            raise _Problem(
                f"its scores {where} depend on no trained parameter that a gradient reaches; is there a torch.no_grad(), detach() or "
                "numpy() in its forward pass?"
            )
        if (stranger := next(iter(leaves_of(scores, self.parameters)), None)) is not None:
            raise _Problem(
                f"its scores depend on a tensor of shape {tuple(stranger.shape)} that needs a gradient and is no parameter of the module "
                f"({holder_of(self.module, stranger)}), so that nobody trains it; use nn.Parameter, nn.ModuleList or nn.ModuleDict"
            )
        try:
            loss = loss_of(self.loss, scores, (torch.arange(size) + label) % self.classes)
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        except Exception as error:
            raise _Problem(f"fails in the backward pass {where}: {_line(error)}") from None
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise _Problem(f"the gradient of parameter {name!r} is in the layout {gradient.layout}; use sparse=False")
        self._compare_buffers()
        self._compare_parameters()
        self.changed |= {name for name, mark in self._state().items() if state.get(name) != mark}
        self.last = last_operation(scores)
        return _Pass(scores.detach().clone(), tuple(None if gradient is None else gradient.clone() for gradient in gradients))

    def _failed(self, error: BaseException, x: Tensor, where: str) -> None:
        layer = _failing_layer(self.module, x)
        if len(x) == 1 and isinstance(error, ValueError) and (self.by_batch or "more than 1 value per channel" in str(error)):
            self.alone = (
                f"takes no single sample ({layer}: {_line(error)}); use GroupNorm, or a training.batch_size that leaves no single sample"
            )
            return
        raise _Problem(
            f"fails {where} at {layer}: {_line(error)}; its forward pass gets {str(x.dtype).removeprefix('torch.')} samples of shape "
            f"(n, {', '.join(map(str, x.shape[1:]))}) for any n"
        ) from None

    def _check(self, scores: Any, size: int, where: str) -> None:
        if not isinstance(scores, Tensor):
            raise _Problem(
                f"gives a {type(scores).__name__}, expected one tensor ({size}, {self.classes}) of scores; return the scores alone"
            )
        expected = (size, self.classes)
        if tuple(scores.shape) != expected:
            samples = {1: "one sample", 2: "two samples"}.get(size, f"{size} samples")
            hint = "; is there a squeeze() that drops the batch's axis?" if size == 1 else ""
            raise _Problem(f"gives {tuple(scores.shape)} for {samples}, expected {expected}, a score for each class{hint}")
        if scores.layout != torch.strided:
            raise _Problem(f"gives scores in the layout {scores.layout}, expected a dense tensor; use to_dense()")
        if not scores.is_floating_point():
            raise _Problem(f"gives {str(scores.dtype).removeprefix('torch.')} scores, expected floating-point scores before any argmax")
        if not bool(torch.isfinite(scores).all()):
            raise _Problem(f"gives scores that are not finite {where}, for made-up samples with values in [0, 1] before normalisation")

    def _compare_buffers(self) -> None:
        buffers = dict(self.module.named_buffers())
        for name in buffers.keys() ^ self.buffers.keys():
            raise _Problem(f"its forward pass makes or removes buffer {name!r}; make it when the module is built")
        for name, buffer in buffers.items():
            kept = self.buffers[name]
            if buffer.shape != kept.shape or not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(kept)):
                layer, _, last = name.rpartition(".")
                normed = isinstance(self.module.get_submodule(layer), _NormBase)
                advice = "use GroupNorm" if normed else "keep nothing of a pass in a buffer or a frozen parameter"
                raise _Problem(
                    f"layer {layer or type(self.module).__name__!r} keeps running statistics ({last}), which are not parameters: they "
                    f"would not be averaged, and would stay from client to client; {advice}"
                )

    def _compare_parameters(self) -> None:
        parameters = dict(self.module.named_parameters())
        for name in self.names:
            if name not in parameters:
                raise _Problem(f"its forward pass removes parameter {name!r}")
        for name in parameters.keys() - set(self.names):
            raise _Problem(f"its forward pass makes parameter {name!r}; make it when the module is built")
        for name, kept, parameter in zip(self.names, self.values, self.parameters, strict=True):
            if parameters[name] is not parameter:
                raise _Problem(f"its forward pass replaces parameter {name!r}; leave parameters to the training")
            if not parameter.requires_grad:
                raise _Problem(f"its forward pass freezes parameter {name!r}; set requires_grad when the module is built")
            if not torch.equal(parameter.detach(), kept):
                raise _Problem(f"its forward pass changes parameter {name!r} in place; leave parameters to the training")

    def _state(self) -> dict[str, Any]:
        """What can be compared of the attributes of all layers, by name."""
        return {
            f"{layer_name}.{name}" if layer_name else name: _mark(value)
            for layer_name, layer in self.module.named_modules()
            for name, value in own_attributes(layer).items()
        }

    def _influence(self, passes: Any) -> None:
        reached = [any(made.gradients[i] is not None for made in passes) for i in range(len(self.names))]
        if not any(reached):
            raise _Problem("no trained parameter has an influence on the loss")
        for made in passes:
            for name, gradient in zip(self.names, made.gradients, strict=True):
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    raise _Problem(f"the gradient of parameter {name!r} is not finite, for made-up samples with values in [0, 1]")

    def _repeated(self, trained: dict[int, _Pass], largest: int) -> None:
        """Whether a pass gives the same again, and draws from torch's generator alone."""
        x = self.x[:largest]
        if not _same(self._again(x, True, 1), trained[largest]):
            raise _Problem(
                f"two passes over the same samples differ: {self._memory()}a module's scores may depend on parameters, samples and torch's "
                "generator alone, not on earlier passes or other random numbers"
            )
        if not _same(self._again(x, False, 2), self._again(x, False, 3)):
            raise _Problem(
                f"two passes over the same samples in evaluation mode differ: {self._memory()}scores are drawn at random, or depend on "
                "earlier passes; use nn.Dropout, or functional.dropout(..., training=self.training)"
            )
        few = [self._again(x[:2], True, 1) for _ in range(REPEATS)]
        if not all(_same(few[0], other) for other in few[1:]):
            raise _Problem(
                "two passes over the same samples differ: its forward pass draws random numbers that are not of torch's generator"
            )
        ends = []
        for seed in (4, 5):
            self._again(x[:2], True, seed)
            ends.append(torch.default_generator.get_state())
        if torch.equal(*ends):
            raise _Problem("its forward pass sets the seed of torch's generator; leave the seed to the training")
        if self.changed:
            states = []
            for _ in range(2):
                self._again(x[:2], True, 1)
                states.append(self._numbers_kept())
            for name, value in states[1].items():
                if name in states[0] and not torch.equal(torch.as_tensor(states[0][name]), torch.as_tensor(value)):
                    raise _Problem(f"attribute {name!r} counts passes, and ways of computing differ in the number of passes; remove it")

    def _numbers_kept(self) -> dict[str, Any]:
        """Copies of numbers and tensors in attributes of the layers, and of objects there, by name."""
        kept: dict[str, Any] = {}
        for layer_name, layer in self.module.named_modules():
            for name, value in own_attributes(layer).items():
                inner = vars(value) if _is_plain_object(value) else {}
                for key, item in ((name, value), *((f"{name}.{key}", item) for key, item in inner.items())):
                    if isinstance(item, int | float | Tensor):
                        kept[f"{layer_name}.{key}" if layer_name else key] = item.detach().clone() if isinstance(item, Tensor) else item
        return kept

    def _again(self, x: Tensor, training: bool, seed: int) -> _Pass:
        made = self._run(x, training, seed)
        assert made is not None, "only a single sample may be refused"
        return made

    def _memory(self) -> str:
        return f"attribute {min(self.changed)!r} changes from pass to pass; " if self.changed else ""

    def _mixing(self, scored: dict[int, _Pass], largest: int) -> Iterator[str]:
        """A doubt, if a sample's scores depend on the other samples of its batch for another reason than a layer that is known for it."""
        if self.by_batch:
            return
        whole = scored[largest].scores
        scale = float(whole.abs().max()) or 1.0
        last = self._run(self.x[1:2], False, 1, 1)
        parts = [(0, made.scores) for size, made in scored.items() if size != largest]
        parts += [] if last is None else [(1, last.scores)]
        apart = max(float((whole[at : at + len(part)] - part).abs().max()) for at, part in parts)
        if apart > CLOSE * scale:
            yield (
                f"the scores of a sample depend on the other samples of its batch (by {apart / scale:.2g} of the largest score, in "
                "evaluation mode); accuracies are those of batches of up to 1024 samples, and a single sample may get another class"
            )

    def _mixing_in_training(self) -> Iterator[str]:
        """A doubt, if another sample in the place of the last changes the scores of the others in training mode."""
        few = self.x[:5]
        if self.by_batch or len(self.x) < 6:
            return
        altered = torch.cat([few[:4], self.x[5:6]])
        one, other = (self._again(batch, True, 1).scores[:4] for batch in (few, altered))
        scale = float(one.abs().max()) or 1.0
        apart = float((one - other).abs().max()) / scale
        if apart > CLOSE:
            yield (
                f"the scores of a sample depend on the other samples of its batch (by {apart:.2g} of the "
                "largest score, in training mode), so that gradients are those of the batches that are drawn"
            )

    def _add_up(self, scored: dict[int, _Pass]) -> None:
        """Whether the gradient of two samples is the mean of their gradients, as every way of computing several samples takes it."""
        both, singles = scored.get(2), [self._run(self.x[i : i + 1], False, 1, i) for i in range(2)]
        if both is None or None in singles:
            return
        for i, name in enumerate(self.names):
            parts = [made.gradients[i] for made in (*singles, both) if made is not None]
            first, second, together = (torch.zeros_like(self.values[i]) if part is None else part for part in parts)
            if float((first + second - 2 * together).norm()) > ADDED * float(first.norm() + second.norm()) + 1e-7:
                raise _Problem(
                    f"the gradient of parameter {name!r} over two samples is not the mean of the gradients of each: its backward pass "
                    "mixes samples (an autograd.Function that scales by the batch, or an embedding with scale_grad_by_freq)"
                )

    def _last_step(self, scores: Tensor) -> Iterator[str]:
        """A doubt, if scores are probabilities, or come out of a function that bounds them."""
        if self.classes < 2 or self.loss != "cross_entropy":
            return
        if bool((scores >= 0).all()) and bool(((scores.sum(1) - 1).abs() < 1e-4).all()):
            yield "its scores are probabilities, which sum to 1, but the loss takes scores before softmax; remove the softmax"
        elif self.last in BOUNDING:
            yield (
                f"its scores come out of {BOUNDING[self.last]}, which bounds them, but the loss takes scores of any size, before softmax, "
                "and cannot become small otherwise; remove the last function"
            )

    def _blindness(self) -> Iterator[str]:
        """A doubt, if neither scores nor gradients depend on the sample."""
        singles = [self._run(self.x[i : i + 1], False, 1) for i in range(3)]
        made = [one for one in singles if one is not None]
        if len(made) == len(singles) and all(_same(made[0], other) for other in made[1:]):
            yield (
                "its scores and their gradients are the same for all samples: it ignores its input, or its first layers give the same "
                "whatever comes in, as a ReLU after a far negative bias does"
            )


def _mark(value: Any) -> Any:
    """Something that is equal for an attribute's value before and after a pass if the pass did not change it."""
    if isinstance(value, Tensor):
        return ("tensor", id(value), value._version)
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return ("value", value)
    if isinstance(value, CONTAINERS):
        items: Sequence[Any] = list(value.items()) if isinstance(value, dict) else list(value)
        return ("container", len(items), tuple(_mark(item) if isinstance(item, int | float | str) else id(item) for item in items))
    if isinstance(value, tuple):
        return ("tuple", tuple(_mark(item) for item in value))
    if _is_plain_object(value):
        return (
            "object",
            id(value),
            tuple((name, _mark(item) if isinstance(item, int | float | Tensor) else 0) for name, item in vars(value).items()),
        )
    return ("object", id(value))


def _is_plain_object(value: Any) -> bool:
    """Whether a value is of a class of Python's, with attributes that can be compared."""
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value)


def _numbers() -> tuple[Any, ...]:
    """The states of the generators that a module should not draw from."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  # users' modules draw from it
    return random.getstate(), name, bytes(np.asarray(keys)), *rest


def _same(one: _Pass, other: _Pass) -> bool:
    """Whether two passes have the same scores and gradients, up to the order of sums."""
    pairs = [(one.scores, other.scores)]
    for a, b in zip(one.gradients, other.gradients, strict=True):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None:
            pairs.append((a, b))
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6 * float(a.abs().max()) if a.numel() else 0.0) for a, b in pairs)


def _line(error: BaseException) -> str:
    """The first line of an error, with its type."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__


def _failing_layer(module: nn.Module, x: Tensor) -> str:
    """The innermost layer where a pass over `x` fails."""
    entered: list[str] = []
    with _listening(module, entered.append, lambda name: entered.remove(name)):
        try:
            module(x.clone())
        except (Exception, SystemExit):
            name = entered[-1] if entered else ""
            return f"layer {name!r} ({type(module.get_submodule(name)).__name__})" if name else type(module).__name__
    return type(module).__name__


@contextmanager
def _listening(module: nn.Module, begin: Callable[[str], None], end: Callable[[str], None]) -> Iterator[None]:
    """While inside, `begin` and `end` are called with the names of the layers whose passes begin and end."""
    handles: list[Any] = []
    for name, layer in module.named_modules():
        handles.append(layer.register_forward_pre_hook(lambda layer, args, name=name: begin(name)))
        handles.append(layer.register_forward_hook(lambda layer, args, output, name=name: end(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
