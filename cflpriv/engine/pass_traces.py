"""What a pass over a user's module leaves to be seen: the tensors that its scores depend on, and numbers outside of the module."""

import re
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn

__all__ = ["holder_of", "last_operation", "leaves_of", "operations_below", "outer_numbers"]

_UNCHANGED = frozenset(("View", "Reshape", "UnsafeView", "ToCopy", "Clone", "Squeeze", "Unsqueeze", "Alias", "Slice", "Transpose", "T"))
"""Operations that keep the values of a tensor."""
_NAME = re.compile(r"([A-Za-z]+)Backward[0-9]*")
DEEP = 3
"""Functions that functions refer to are followed so far."""


def _operation(node: Any) -> str:
    match = _NAME.fullmatch(node.name())
    return match[1] if match else ""


def last_operation(scores: Tensor) -> str:
    """The name of the operation that scores come out of, as torch's graph has it: "Addmm", "Sigmoid"; "" if there is none."""
    node = scores.grad_fn
    while node is not None and _operation(node) in _UNCHANGED and node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return "" if node is None else _operation(node)


def operations_below(scores: Tensor) -> tuple[str, ...]:
    """The names of all operations that scores come out of, sorted."""
    seen, ahead = set[Any](), [scores.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
    return tuple(sorted({_operation(node) for node in seen}))


def leaves_of(scores: Tensor, known: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors that scores depend on and that need a gradient, but are not among the `known`."""
    parameters, seen, ahead = {id(parameter) for parameter in known}, set[Any](), [scores.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in parameters:
            yield variable
        ahead += [following for following, _ in node.next_functions]


def holder_of(module: nn.Module, tensor: Tensor) -> str:
    """Where a tensor is: the attribute of a layer that holds it, in a list or another object; or outside of the module."""
    for layer_name, layer in module.named_modules():
        for name, value in vars(layer).items():
            if not name.startswith("_") and any(item is tensor for item in _tensors(value, DEEP)):
                return f"in attribute {f'{layer_name}.{name}' if layer_name else name!r}"
    return "it is outside of the module"


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        attributes = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
        for item in (*inner, *attributes):
            yield from _tensors(item, depth - 1)


def outer_numbers(module: nn.Module) -> dict[str, Any]:
    """Numbers that a pass may count with and that are not in the module: of the users' classes, and of what their functions refer to."""
    found: dict[str, Any] = {}
    for kind in {type(layer) for layer in module.modules()}:
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in ("torch", "builtins", "transformers", "peft", "torchvision"):
                continue
            for name, value in vars(base).items():
                if _countable(value):
                    found[f"{base.__name__}.{name}"] = _kept(value)
            if isinstance(forward := vars(base).get("forward"), FunctionType):
                found |= _numbers_of(forward, DEEP)
    return found


def _numbers_of(function: FunctionType, depth: int) -> dict[str, Any]:
    """The numbers among the globals and the closure of a function, and of the functions there."""
    code, around = function.__code__, dict[str, Any]()
    around |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            around[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    found = {name: _kept(value) for name, value in around.items() if _countable(value)}
    for value in around.values():
        if depth and isinstance(value, FunctionType) and value is not function:
            found |= _numbers_of(value, depth - 1)
    return found


def _countable(value: Any) -> bool:
    """Whether a value is a number, or a few of them."""
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return 0 < len(value) <= 16 and all(isinstance(item, int | float) for item in items)
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value.detach())
    return tuple(value.values() if isinstance(value, dict) else value) if isinstance(value, list | dict) else value
