"""The way of an array through the product: which modules hold it, and which functions run, while a call is traced."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import CodeType, FrameType
from typing import Any

import msgspec
import numpy as np

PACKAGE = "cflpriv."
ENGINE = ("engine", "tasks")
"""What computes the array is not on its way."""
SLACK = 8
"""A vector on its way may have some numbers more than the array: a weight, a flag, a count."""
OVERHEAD_BYTES = 4096


@dataclass
class Way:
    """The way of an array of `dimension` numbers, from the engine's result to the end of the traced call.

    A module is `entered` if a function of it runs. It `holds` the array if an argument, a local variable or the result of one of its
    functions is the array in any form: an `ndarray` with as many numbers (or up to `SLACK` more), bytes of such a length, or an object
    that `numpy` reads on demand; also as a direct item of a list, tuple or dict, or a direct field of a message or dataclass.
    `functions` are the pieces of code that run, by qualified name, comprehensions and lambdas among them; `named` has functions alone.

    The dimension must be of no other array of the scene, its models and parameters included.
    """

    dimension: int
    entered: set[str] = field(default_factory=set)
    holds: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    _modules: dict[CodeType, str] = field(default_factory=dict)
    _begun: bool = False

    @property
    def named(self) -> set[tuple[str, str]]:
        """The functions and methods, without the comprehensions and lambdas inside them, of which Python 3.12 makes fewer pieces."""
        return {(module, name) for module, name in self.functions if not name.endswith(">")}

    def trace(self, call: Callable[[], Any]) -> Any:
        """The result of a call, which is traced from the engine's first result on."""
        before, self._begun = sys.getprofile(), False
        sys.setprofile(self._noted)
        try:
            return call()
        finally:
            sys.setprofile(before)

    def _noted(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return"):
            return
        module = self._modules.setdefault(code, frame.f_globals.get("__name__", ""))
        if not self._begun:
            self._begun = event == "return" and module.startswith(f"{PACKAGE}engine.") and code.co_qualname == "Engine.run"
            return
        module = module.removeprefix(PACKAGE) if module.startswith(PACKAGE) else ""
        if not module or module.partition(".")[0] in ENGINE:
            return
        self.entered.add(module)
        self.functions.add((module, code.co_qualname))
        if event == "return" and module not in self.holds and any(map(self._has, (result, *frame.f_locals.values()))):
            self.holds.add(module)

    def _has(self, value: Any) -> bool:
        return self._is(value) or any(map(self._is, _items(value)))

    def _is(self, value: Any) -> bool:
        if isinstance(value, bytes | bytearray | memoryview):
            size = len(value)
            return any(self.dimension * width <= size <= (self.dimension + SLACK) * width + OVERHEAD_BYTES for width in (2, 4, 8))
        shape = getattr(value, "shape", None) if hasattr(type(value), "__array__") else None
        return isinstance(shape, tuple) and self.dimension <= int(np.prod(shape, dtype=int)) <= self.dimension + SLACK

    def __str__(self) -> str:
        held = ", ".join(sorted(self.holds))
        run = f"{len(self.functions)} functions run ({len(self.named)} with a name of their own)"
        return f"{len(self.entered)} modules are entered, {run}, {len(self.holds)} modules hold it: {held}"


def _items(value: Any) -> Sequence[Any]:
    """The direct items or fields of a value. A store is a dict of its own kind, and keeping is not passing on."""
    if type(value) is dict:
        return tuple(value.values())
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.astuple(value)
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(getattr(value, one.name, None) for one in fields(value))
    return ()
