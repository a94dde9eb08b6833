"""What a key of a configuration means and which values it takes. It stands beside the key's type where the key is declared.

    lr: Annotated[float, Key("Learning rate of a local step.", "(0, inf)")] = 0.01

A field of a section and a keyword parameter of an algorithm are declared alike. `experiments.config_reference` makes the reference page,
the editor schema and `cflpriv explain` from these, and `check_ranges` enforces them: a dataclass of settings calls it when it is made, a
function is wrapped by `ranged`.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, partial, wraps
from itertools import chain
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import InputError

__all__ = ["Interval", "Key", "check_ranges", "ranged", "readable"]

_INTERVAL = re.compile(r"([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])")
Interval = tuple[float, bool, float, bool]
"""The low end, whether it belongs to the interval, the high end, whether it does."""
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """The `meaning` of a key, in one or two sentences; the `range` of its numbers; their `unit`.

    The range is an interval such as "[0, 1)", or single numbers and intervals, ascending, as in "0 or [3, inf)". It holds for each number
    of a list. `default` replaces the printed default where that depends on other keys. `known` lists the names that a key takes. Raises
    `ValueError` for a range that is none.
    """

    meaning: str
    range: str = ""
    unit: str = ""
    default: str = ""
    known: Callable[[], Iterable[str]] | None = None

    def __post_init__(self) -> None:
        try:
            self.intervals  # noqa: B018 - made once, here
        except ValueError:
            raise ValueError(f"range {self.range!r}: expected an interval such as '[0, 1)'") from None

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """The parts of the range; without a range all finite numbers."""
        return tuple(map(_interval, self.range.split(" or "))) if self.range else ((-math.inf, False, math.inf, False),)

    @property
    def bounds(self) -> Interval:
        """The smallest interval that holds the range."""
        return *self.intervals[0][:2], *self.intervals[-1][2:]

    @property
    def range_text(self) -> str:
        """The range as the reference prints it: "≥ 1", "> 0" or an interval; empty where there is none."""
        return " or ".join(map(_interval_text, self.intervals, self.range.split(" or "))) if self.range else ""

    def contains(self, number: float) -> bool:
        """Whether a number is in the range. NaN never is, an infinite number only at a closed end: "[0, inf]"."""
        return any(
            (low <= number if low_in else low < number) and (number <= high if high_in else number < high)
            for low, low_in, high, high_in in self.intervals
        )


MOST_SHOWN = 200
"""Characters of a value in an error."""


def _interval(text: str) -> Interval:
    match = _INTERVAL.fullmatch(text)
    if match is None:
        return _number(text), True, _number(text), True
    return _number(match[2]), match[1] == "[", _number(match[3]), match[4] == "]"


def _number(text: str) -> float:
    base, _, power = text.partition("^")
    return math.pow(float(base), float(power or 1))


def _interval_text(interval: Interval, text: str) -> str:
    low, low_in, high, high_in = interval
    return text if math.isfinite(high) or high_in else f"{'≥' if low_in else '>'} {low:g}"


ANY_NUMBER = Key("", "[-inf, inf]")
"""Of a number without a key: any, but NaN."""


# --- enforcing ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Domain:
    """The values that a field or parameter takes: of these types, numbers in the range of the `key`, or one of the literal `choices`."""

    key: Key
    types: frozenset[type]
    choices: tuple[Any, ...]

    def has(self, value: Any) -> bool:
        kind = type(value)
        if kind is str:  # most values are of these kinds, and isinstance is slow for the abstract ones below
            return str in self.types or value in self.choices
        if kind in (int, float) and (kind in self.types or float in self.types):
            return self.key.contains(value)
        if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
            return tuple in self.types and all(map(self.has, value))
        if isinstance(value, bool):
            return bool in self.types
        if (isinstance(value, Integral) and int in self.types) or (isinstance(value, Real) and float in self.types):
            return self.key.contains(value)  # type: ignore[arg-type]
        return type(value) in self.types or any(isinstance(value, type(choice)) and value == choice for choice in self.choices)

    @property
    def text(self) -> str:
        """What is expected, as the end of an error."""
        if self.choices:
            *names, last = map(repr, self.choices)
            return f"{', '.join(names)} or {last}" if names else last
        where = self.key.range_text
        noun = "integer" if int in self.types else "number" if where.endswith(("]", ")")) else "finite number"
        noun = f"{noun}s" if tuple in self.types else f"an {noun}" if noun == "integer" else f"a {noun}"
        return noun + (", " if " or " in where else " in " if where.startswith(("[", "(")) else " " if where else "") + where


def _leaves(hint: Any) -> Iterator[Any]:
    """The types and the literal values that a type is made of."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from _leaves(inner[0])
    elif origin is Literal:
        yield from inner
    elif origin in (Union, UnionType, tuple):
        yield from (tuple,) * (origin is tuple)
        yield from chain.from_iterable(_leaves(part) for part in inner if part is not ...)
    else:
        yield hint


@cache
def _domains(owner: Callable[..., Any]) -> dict[str, _Domain]:
    """By name, the fields of a dataclass or the parameters of a function whose values can be checked: numbers and literal values."""
    domains = {}
    for name, hint in _hints(owner).items():
        keys = list(_keys(hint))
        leaves = tuple(_leaves(hint))
        types = frozenset(leaf for leaf in leaves if isinstance(leaf, type))
        choices = tuple(leaf for leaf in leaves if not isinstance(leaf, type))
        known = types <= {int, float, str, bool, tuple, NoneType} and all(isinstance(choice, str | int) for choice in choices)
        if known and (choices or types & {int, float}):
            domains[name] = _Domain((*keys, ANY_NUMBER)[0], types, choices)
        elif any(key.range for key in keys):
            what = f"{getattr(owner, '__name__', owner)}: {name}"
            raise InputError(f"{what}: the range of a Key cannot be checked for {hint}; use int or float, also in a tuple")
    return domains


def _keys(hint: Any) -> Iterator[Key]:
    """The keys of a type, and of the types inside it."""
    if get_origin(hint) is Annotated:
        yield from (part for part in get_args(hint)[1:] if isinstance(part, Key))
        yield from _keys(get_args(hint)[0])
    elif get_origin(hint) is not Literal:
        yield from chain.from_iterable(map(_keys, get_args(hint)))


def _hints(owner: Callable[..., Any]) -> dict[str, Any]:
    """The types of a dataclass's fields, or of a callable's parameters. None where they cannot be known: a name that is not there."""
    target: Any = owner.func if isinstance(owner, partial) else owner
    if not (is_dataclass(target) or inspect.isroutine(target)):
        target = type.__getattribute__(target, "__init__") if isinstance(target, type) else type(target).__call__
    try:
        hints = get_type_hints(target, include_extras=True)
    except (NameError, TypeError):
        return {}
    names = [field.name for field in fields(target)] if is_dataclass(target) else list(inspect.signature(owner).parameters)
    return {name: hints[name] for name in names if name in hints}


def check_ranges(owner: Callable[..., Any], values: Mapping[str, Any], section: str = "") -> None:
    """Raises `InputError` for the first of the `values` that `owner`, a dataclass or a function, does not take by its declaration.

    A number must be of the declared type, finite and in the range of its `Key`; so must each number of a list. The error has one line that
    names the key with its `section`, the value and the range.
    """
    for name, domain in _domains(owner).items():
        if name in values and not domain.has(values[name]):
            raise InputError(f"{f'{section}.' if section else ''}{name} = {_shown(values[name])}: expected {domain.text}")


def _shown(value: Any) -> str:
    """A value as a configuration writes it, in one line of bounded length."""
    try:
        text = " ".join(repr(_as_lists(value)).split())
    except ValueError:  # an integer of more digits than Python writes
        return "an integer of thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def readable(cls: type[T]) -> type[T]:
    """A decorator of a dataclass of keys: help shows a signature without the keys' meanings, which made it several pages long.

    A type is left out where the default shows it, `epochs=1`, for lists of tables, whose keys would be as long, and for lists of lists.
    """
    hints, signature = get_type_hints(cls), inspect.signature(cls.__init__)  # of the class itself it would be that of its base
    parameters = []
    for name, parameter in list(signature.parameters.items())[1:]:
        hint = hints.get(name, parameter.annotation)
        nested = any(is_dataclass(part) or get_origin(part) is tuple for part in get_args(hint))
        shown = nested or (hint in (bool, int, float, str) and isinstance(parameter.default, hint))
        parameters.append(parameter.replace(annotation=parameter.empty if shown else hint))
    cls.__signature__ = signature.replace(parameters=parameters, return_annotation=signature.empty)  # type: ignore[attr-defined]
    return cls


def ranged(section: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function refuses arguments outside their declared ranges (`check_ranges`)."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            check_ranges(function, arguments, section)
            return function(*args, **kwargs)

        return checked

    return decorate
