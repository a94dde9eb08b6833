"""How much work a client lets a server ask for. What is over the limits is refused before anything is computed or taken from memory.

The check reads the request alone, so a refusal tells nothing about the client's data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Annotated, Any

import numpy as np

from ..keys import Key, check_ranges
from ..protocols.errors import RemoteError
from ..types import Array
from . import messages as m
from .foreign import Foreign

__all__ = ["Limits", "check_parameters", "check_task"]


@dataclass(frozen=True)
class Limits:
    """The most that a client computes for one request, and what a session contract may ask for at most."""

    numbers: Annotated[int, Key("Numbers of the largest model, and of the largest array of a task.", "[1, inf)", "numbers")] = 1 << 26
    width: Annotated[
        int, Key("Largest size that a task names: clusters, rows of a signature, dimensions of a sketch.", "[1, inf)", "numbers")
    ] = 1 << 16
    epochs: Annotated[int, Key("Passes over the client's data in one training.", "[1, inf)", "epochs")] = 1000
    steps: Annotated[int, Key("Steps of one training with Poisson batches.", "[1, inf)", "steps")] = 1 << 16
    listed: Annotated[int, Key("Values in one list of parameters.", "[1, inf)", "values")] = 1 << 12
    parameter: Annotated[float, Key("Largest absolute value of a parameter that a server sends.", "(0, inf)")] = 1e9
    algorithms: Annotated[tuple[str, ...], Key("Algorithms that a session contract may name; empty: all that are known.")] = ()
    rounds: Annotated[int, Key("Rounds of a session contract.", "[1, inf)", "rounds")] = 1 << 16

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "limits")


WIDTHS = ("k", "p", "labels_at_most", "sketch", "sketch_dim", "directions", "rank", "m", "span")
"""Fields of tasks that are sizes of arrays."""
TOGETHER = (
    (("k",), ("k", "dimension")), (("p",), ("p", "labels_at_most", "features")), (("sketch", "directions"), ("sketch", "directions")),
    (("sketch_dim",), ("sketch_dim", "features")), (("sketch_dim", "clip_norm"), ("sketch_dim", "dimension")),
)  # fmt: skip
"""Of tasks with these fields: sizes whose product is that of an array. A gradient that is clipped is sketched by a whole matrix."""


def check_task(task: Any, limits: Limits, features: int | None = None) -> bool:
    """True. Raises `RemoteError` "too-large" for a task over the limits. Builds no model. `features`: numbers of one sample."""
    if isinstance(task, Foreign):
        _demand(sum(prod(shape) for _, shape, _ in task.layout) <= limits.numbers, "a model", limits.numbers)
        return True
    dimension = 1
    for inner in _inner(task):
        own = {attribute.name: getattr(inner, attribute.name) for attribute in fields(inner)}
        if type(inner).__name__ == "Model":
            size = _size(inner, limits.numbers)
            _demand(size <= limits.numbers, "a model", limits.numbers)
            dimension = max(dimension, size)
        if isinstance(own.get("epochs"), int):
            _demand(own["epochs"] <= limits.epochs, "a training", limits.epochs)
            rate = own.get("sampling_rate", 0.0)
            _demand(not rate or own["epochs"] / rate <= limits.steps, "a training in steps", limits.steps)
    for inner in _inner(task):
        sizes = {name: getattr(inner, name) for name in WIDTHS if isinstance(getattr(inner, name, None), int)}
        _demand(max(sizes.values(), default=0) <= limits.width, f"a size of {type(inner).__name__}", limits.width)
        sizes |= {"dimension": dimension, "features": features or 1}
        for having, names in TOGETHER:
            if all(hasattr(inner, name) for name in having):
                _demand(prod(max(1, sizes.get(name, 1)) for name in names) <= limits.numbers, "an array", limits.numbers)
    return True


def check_parameters(params: m.SentParameters, limits: Limits, bounded: bool) -> bool:
    """True. Raises `RemoteError`: "too-large" for lists that are too long, "bad-input" for parameters that are not finite or too large.

    `bounded`: numbers are checked, too, as far as the server sends them readable. What clients made (transformed parts, held values) has no
    bound that would not tell of data.
    """
    for _, value in params:
        sums: Sequence[m.Addends] = () if isinstance(value, m.HeldValue) else value.values if isinstance(value, m.Many) else (value,)
        _demand(len(sums) <= limits.listed, "a list of parameters", limits.listed)
        for addends in sums:
            if bounded and addends.clear is not None and not _bounded(addends.clear, limits.parameter):
                error = RemoteError("bad-input")
                error.add_note(f"a parameter is not finite, or above limits.parameter = {limits.parameter:g}")
                raise error
    return True


def _bounded(value: Array, most: float) -> bool:
    array = np.asarray(value)
    return array.dtype.kind != "f" or not array.size or bool(max(array.max(), -array.min()) <= most)  # NaN is not below


def _demand(holds: bool, what: str, most: float) -> None:
    if not holds:
        error = RemoteError("too-large")
        error.add_note(f"{what} is above the client's own limit of {most:g} ([limits] of its settings file)")
        raise error


def _inner(task: Any) -> Iterator[Any]:
    """A task and the dataclasses inside it."""
    if is_dataclass(task) and not isinstance(task, type):
        yield task
        for attribute in fields(task):
            yield from _inner(getattr(task, attribute.name))


def _size(model: Any, most: int) -> int:
    """The number of a model's parameters, more than `most` for samples of more numbers."""
    return most + 1 if prod(max(1, abs(size)) for size in model.shape) > most else int(model.dimension)
