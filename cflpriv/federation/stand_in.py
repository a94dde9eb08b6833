"""What a task's results look like, whatever the client's data: the layout that the same task gives for public stand-in data.

A client whose protection hides its values, or that demands privacy, answers alike for all data. So it declares this layout, and where its
own computation fails, or gives another layout, it holds zeros in place of results. Stand-in data have the shape of the client's samples,
parameters are small numbers of the same shapes, and a training makes a few small steps. A layout is computed once for equal requests.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..randomness import stream
from ..types import ClientData
from .foreign import Foreign

if TYPE_CHECKING:  # torch is loaded where something is computed
    from ..engine import TaskInput

__all__ = ["ResultLayout", "blank", "foreign_layout", "layout_of", "light", "stand_in_layout"]

SAMPLES = (8, 128, 1024)
"""How many stand-in samples: few, and more where a task needs them."""
SMALL = 2.0**-10
"""Stand-in parameters: not zero, because tasks divide by sums of them."""
KEPT = 256
LARGE_BYTES = 1 << 24
"""A task that computes so much says by itself what its results look like, if it can."""
ResultLayout = tuple[tuple[str, Any], ...]
"""By part (dtype, shape), or the same by sender for relayed values."""
_layouts: "OrderedDict[Hashable, ResultLayout]" = OrderedDict()


def layout_of(results: Mapping[str, Any], parts: Any) -> ResultLayout:
    """The layout of these parts of results."""
    return tuple((part, _form(results[part])) for part in parts)


def blank(layout: ResultLayout) -> dict[str, Any]:
    """Zeros in a layout."""
    return {part: _zeros(form) for part, form in layout}


def stand_in_layout(task: Any, given: "TaskInput", alike: bool) -> ResultLayout:
    """The layout of the parts of a task in its `light` form, and of what it keeps, for inputs like `given`, whose values are not looked at.

    `alike`: it is the same for clients of all numbers. Raises what the task raises for every data, such as parameters that do not fit it.
    """
    if hasattr(task, "laid_out") and task.large_bytes >= LARGE_BYTES:  # a trial would take five times as much
        declared = task.laid_out(given)
        if declared is not None:
            return layout_of(declared, (*task.parts, *task.keeps))
    sent, kept = ([(name, _form(value)) for name, value in sorted(of.items())] for of in (given.params, given.memory))
    x, choice = given.data.x_train, None if given.choice is None else np.shape(given.choice)
    key = (task, tuple(sent), tuple(kept), x.shape[1:], x.dtype.str, choice, None if alike else given.data.id)
    try:
        known = _layouts.get(key)
    except TypeError:  # a task with a field that has no hash
        return _made(task, given)
    if known is None:
        known = _layouts[key] = _made(task, given)
        while len(_layouts) > KEPT:
            _layouts.popitem(last=False)
    return known


def _made(task: Any, given: "TaskInput") -> ResultLayout:
    from ..engine import Engine, TaskInput

    engine, params, memory = _engine(Engine), *({name: _public(v) for name, v in of.items()} for of in (given.params, given.memory))
    choice = 0 if isinstance(given.choice, int) else None if given.choice is None else (0,) * len(given.choice)
    for count in SAMPLES:
        data = _stand_in(given.data, count)
        try:
            with np.errstate(all="ignore"):
                (result,) = engine.run(task, [TaskInput(data, params, memory, given.streams, choice, bytes(32))])
        except Exception:
            if count == SAMPLES[-1]:
                raise
        else:
            return layout_of(result, (*task.parts, *task.keeps))
    raise AssertionError


@cache
def _engine(kind: Callable[..., Any]) -> Any:
    return kind("sequential", device="cpu")


def _stand_in(data: ClientData, count: int) -> ClientData:
    x = stream(0, "stand-in data").random((count, *data.x_train.shape[1:])).astype(data.x_train.dtype)
    y = np.zeros(count, np.int64)  # a label that every model has
    return ClientData(data.id, x, y, x, y, (x, y))


def light(task: Any) -> Any:
    """The task with few steps of training, whatever its learning rate."""
    if not is_dataclass(task) or isinstance(task, type):
        return task
    own = {attribute.name: getattr(task, attribute.name) for attribute in fields(task) if attribute.init}
    changed = {name: lighter for name, value in own.items() if (lighter := light(value)) is not value}
    if "epochs" in own and "lr" in own:
        changed |= {"epochs": min(own["epochs"], 2), "lr": 0.01, "lr_decay": 1.0, "weight_decay": 0.0}
        changed |= {name: min(own[name], SMALL) for name in ("prox", "maml_lr", "pull", "noise_multiplier") if own.get(name)}
        if own.get("sampling_rate"):
            changed["sampling_rate"] = 0.5
        changed = {name: value for name, value in changed.items() if name in own and own[name] != value}
    return replace(task, **changed) if changed else task


def _form(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((sender, _form(item)) for sender, item in sorted(value.items()))
    if isinstance(value, list):
        return "list", tuple(map(_form, value))
    array = value if hasattr(value, "dtype") and hasattr(value, "shape") else np.asarray(value)
    return np.dtype(array.dtype).str, tuple(array.shape)


def _zeros(form: Any) -> Any:
    if form and isinstance(form[0], str):
        return np.zeros(form[1], form[0])
    return {sender: _zeros(inner) for sender, inner in form}


def _public(value: Any) -> Any:
    """Small numbers, or the integer 0, in place of a parameter: it may be the client's own, or computed from it."""
    if isinstance(value, list):
        return [_public(item) for item in value]
    if isinstance(value, dict):
        return {sender: _public(item) for sender, item in value.items()}
    return np.full(value.shape, SMALL if np.dtype(value.dtype).kind == "f" else 0, value.dtype)


def foreign_layout(task: Foreign) -> ResultLayout | None:
    """The layout of an update that an application's training makes: that of its model as one vector. None for other functions."""
    if task.name != "train" or task.asked != ("update",):
        return None
    size = sum(prod(shape) for _, shape, _ in task.layout)
    return (("update", ("<f8" if any(kind == "float64" for _, _, kind in task.layout) else "<f4", (size,))),)
