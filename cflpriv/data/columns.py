"""A typed schema of a table's columns, and how cells become features by it.

The schema is public: it is in the configuration and in the contract of the clients. Cells are encoded by the schema alone, one row at a
time, so no statistic is taken over rows. What a schema does not fix, the mean and deviation of a number without a range and the filling
of a blank by `own`, each client computes over its own training rows (`scaling.Scaling`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Any, Literal

import numpy as np

from ..errors import InputError
from ..keys import Key, check_ranges
from ..types import Array
from .class_names import NOT_A_CLASS, accidental_pairs, same_name
from .scaling import Scaling

__all__ = [
    "Column", "Part", "cell_name", "cell_number", "cell_numbers", "encoded", "feature_names", "is_blank", "moment", "nested", "not_nested",
    "scaling_of", "shown",
]  # fmt: skip

LARGEST = 1e30
"""No measured feature is larger; its square would not fit into float32."""
MOST_SHOWN = 60
"""Characters of a cell in an error."""
Part = Literal["time", "year", "week", "day"]
_CYCLES: dict[str, Callable[[datetime], float]] = {
    "year": lambda at: (at.timetuple().tm_yday - 1) / 366,
    "week": lambda at: at.weekday() / 7,
    "day": lambda at: (at.hour * 3600 + at.minute * 60 + at.second) / 86_400,
}
"""The fraction of a cycle that has passed, by its name."""


@dataclass(frozen=True)
class Column:
    """How one column becomes features. Raises `InputError` naming the column for keys that do not go together.

    - number: one feature. With a `range`, which is public, from −1 to 1. Without, standardised by each client's own training rows.
    - category: a feature, 0 or 1, for each of the public `categories`, and with `other` one more for all other values.
    - date: by `parts`, the place in the public `range`, from −1 to 1, and sine and cosine of the year, the week and the day.
    - text: so many `features`, hashed counts of its words, of length 1.
    - ignore: none.
    """

    name: Annotated[str, Key("The column's name in the header.")]
    type: Annotated[
        Literal["number", "category", "date", "text", "ignore"], Key("How its cells become features.")
    ] = "number"  # fmt: skip
    range: Annotated[tuple[float | str, ...], Key("number, date: public [low, high]; values beyond are clipped to it.")] = ()
    categories: Annotated[tuple[str, ...], Key('category: all public values; "" for a blank.')] = ()
    other: Annotated[bool, Key("category: take values that are not listed, as one more category.")] = False
    blank: Annotated[
        Literal["refuse", "middle", "own"],
        Key("number, date: a blank is refused, is the middle of the range, or (number) the mean of each client's own training rows."),
    ] = "refuse"
    format: Annotated[str, Key('date: as Python\'s strptime takes it, such as "%d.%m.%Y"; empty: ISO 8601.')] = ""
    parts: Annotated[tuple[Part, ...], Key("date: features that it becomes.")] = ("time", "year")
    features: Annotated[int, Key("text: number of features.", "[1, 65536]")] = 64

    def __post_init__(self) -> None:
        check_ranges(type(self), {"features": self.features}, f"data.columns {self.name!r}")
        belongs = {
            "range": ("number", "date"), "categories": ("category",), "other": ("category",), "blank": ("number", "date"),
            "format": ("date",), "parts": ("date",), "features": ("text",),
        }  # fmt: skip
        for key, types in belongs.items():
            if self.type not in types and getattr(self, key) != getattr(Column, key):
                raise self.refused(key, f"is for type {' or '.join(map(repr, types))}, and this is {self.type!r}")
        if self.type == "date" or self.range:
            self._check_range()
        if self.type == "category":
            self._check_categories()
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise self.refused("parts", "expected names of parts, each once")
        if self.blank == "middle" and not self.range:
            raise self.refused("blank", "needs a public range")
        if self.blank == "own" and self.type == "date":
            raise self.refused("blank", "is for numbers; a date takes 'middle'")

    def _check_range(self) -> None:
        if len(self.range) != 2:
            raise self.refused("range", "expected [low, high]")
        low, high = self.ends
        if not (math.isfinite(high - low) and low < high):
            raise self.refused("range", "expected finite ends, the lower before the higher")

    def _check_categories(self) -> None:
        if not self.categories:
            raise self.refused("categories", "expected all values of the category")
        names = [same_name(name) for name in self.categories]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise self.refused("categories", f"has {twice!r} twice")

    def refused(self, key: str, problem: str) -> InputError:
        value = getattr(self, key)
        shown = list(value) if isinstance(value, tuple) else value
        return InputError(f"data.columns {self.name!r}: {key} = {shown!r}: {problem}")

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the range as numbers; of dates in seconds since 1970."""
        if self.type == "number":
            if any(isinstance(end, str) for end in self.range):
                raise self.refused("range", "expected two numbers")
            return float(self.range[0]), float(self.range[1])
        moments = [moment(end, self.format) for end in self.range]
        if None in moments:
            raise self.refused("range", f"expected two dates as text, {self.format or 'ISO 8601, such as 2024-05-31'}")
        return float(moments[0].timestamp()), float(moments[1].timestamp())  # type: ignore[union-attr]

    @property
    def own(self) -> bool:
        """Whether its numbers are standardised by each client's own training rows."""
        return self.type == "number" and not self.range


def feature_names(column: Column) -> tuple[str, ...]:
    """The names of the features that a column becomes, in their order."""
    name = column.name
    match column.type:
        case "number":
            return (name,)
        case "category":
            return (*(f"{name}={category}" for category in column.categories), *((f"{name}=other",) if column.other else ()))
        case "date":
            return tuple(f"{name}.{part}{half}" for part in column.parts for half in (("",) if part == "time" else (".sin", ".cos")))
        case "text":
            return tuple(f"{name}#{number}" for number in range(column.features))
        case _:
            return ()


def scaling_of(columns: Sequence[Column], value_range: tuple[float, ...] = ()) -> Scaling:
    """How the features of a schema are brought to [0, 1]: by each client itself where a column has no public range, or a blank is `own`."""
    own = tuple(column.own for column in columns for _ in feature_names(column))
    blanks = any(column.blank == "own" for column in columns)
    low, high = value_range or ((-5.0, 5.0) if any(own) else (-1.0, 1.0))
    return Scaling(low, high, per_client=any(own) or blanks, own=own, blanks=blanks)


# --- cells --------------------------------------------------------------------------------------------------------------------------


def nested(cell: Any) -> str:
    """What a cell holds that is neither a number, a text nor a date, in words, such as "a list"; "" for other cells."""
    if isinstance(cell, str | float | int | None):
        return ""
    if isinstance(cell, timedelta):
        return "a duration"
    if isinstance(cell, time):
        return "a time of day"
    if isinstance(cell, complex | np.complexfloating):
        return "a complex number"
    if isinstance(cell, bytes | bytearray | memoryview):
        return "bytes"
    if isinstance(cell, Mapping):
        return "a structure"
    return "a list" if isinstance(cell, list | tuple | set) or (isinstance(cell, np.ndarray) and cell.ndim > 0) else ""


def not_nested(cells: Sequence[Any], at: Callable[[int], str]) -> None:
    """Raises `InputError` that begins with `at(row)` for the first cell with more than one value, or with bytes."""
    for row, cell in enumerate(cells):
        if what := nested(cell):
            raise InputError(
                f"{at(row)}: {shown(cell)} is {what}, expected a number, a text or a date in each cell; images may be folders or npz"
            )


def shown(cell: Any) -> str:
    """A cell for people: its first characters, if it has many."""
    text = repr(cell)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def cell_name(cell: Any) -> str:
    """A cell as a name, empty for a missing one. 1.0 is 1: a column of whole numbers turns into floats where a cell is missing."""
    if isinstance(cell, float):
        return "" if math.isnan(cell) else str(int(cell)) if cell.is_integer() else str(cell)
    return "" if cell is None else str(cell).strip()


def cell_number(cell: Any) -> float:
    """The number in a cell, NaN if there is none that can be used."""
    try:
        number = math.nan if isinstance(cell, str) and "_" in cell else float(cell)  # Python reads 2020_01 as 202001
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) <= LARGEST else math.nan


def cell_numbers(cells: Sequence[Any]) -> Array:
    """The numbers in cells, float64 (n,), each as `cell_number` reads it."""
    kinds = set(map(type, cells))
    if kinds <= {int, float, bool} or (kinds == {str} and "_" not in "".join(cells)):
        try:
            numbers = np.fromiter(map(float, cells), np.float64, len(cells))
        except (ValueError, OverflowError):
            return np.array([cell_number(cell) for cell in cells], np.float64)
        numbers[~(np.abs(numbers) <= LARGEST)] = math.nan
        return numbers
    return np.array([cell_number(cell) for cell in cells], np.float64)


def is_blank(cell: Any) -> bool:
    """Whether the cell of a number or a date is missing, or a word for that."""
    return cell is None or cell != cell or str(cell).strip().casefold() in (NOT_A_CLASS | {"na", "none", "-", "--"})


def moment(cell: Any, written: str = "") -> datetime | None:
    """The date in a cell, in UTC, by its format or by ISO 8601; None if there is none."""
    at = as_written(cell, written)
    try:
        return None if at is None else at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except OverflowError:  # in the years 1 and 9999
        return None


def as_written(cell: Any, written: str = "") -> datetime | None:
    """The date in a cell, without a time zone if the cell has none; None if there is no date."""
    try:
        if isinstance(cell, datetime):
            at = cell
        elif isinstance(cell, date):
            at = datetime(cell.year, cell.month, cell.day)
        else:
            text = str(cell).strip()
            at = datetime.strptime(text, written) if written else datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at == at else None


def encoded(column: Column, cells: Sequence[Any], at: Callable[[int], str]) -> tuple[Array, int]:
    """The features (rows, k), float64, of a column's cells, and how many values were clipped to the range.

    A blank that is `own` is NaN. Raises `InputError` that begins with `at(row)` for a cell that does not fit.
    """
    if column.type != "ignore":
        not_nested(cells, at)
    match column.type:
        case "number":
            return _numbers(column, cells, at)
        case "category":
            return _categories(column, cells, at), 0
        case "date":
            return _dates(column, cells, at)
        case "text":
            return _words(column, cells), 0
        case _:
            return np.empty((len(cells), 0)), 0


def _numbers(column: Column, cells: Sequence[Any], at: Callable[[int], str]) -> tuple[Array, int]:
    values = np.empty(len(cells))
    for row, cell in enumerate(cells):
        values[row] = cell_number(cell)
        if math.isnan(values[row]):
            blank = is_blank(cell)
            if not blank or column.blank == "refuse":
                advice = (
                    "set its blank to 'middle' or 'own' in data.columns" if blank else "change it, or the column's type in data.columns"
                )
                raise InputError(f"{at(row)}: {shown(cell)} is not a finite number; {advice}")
            values[row] = math.nan if column.blank == "own" else sum(column.ends) / 2
    if not column.range:
        return values[:, None], 0
    low, high = column.ends
    clipped = int(((values < low) | (values > high)).sum())
    return (2 * (np.clip(values, low, high) - low) / (high - low) - 1)[:, None], clipped


def _categories(column: Column, cells: Sequence[Any], at: Callable[[int], str]) -> Array:
    number = {same_name(name): place for place, name in enumerate(column.categories)}
    features = np.zeros((len(cells), len(column.categories) + column.other))
    for row, cell in enumerate(cells):
        name = same_name(cell_name(cell))
        place = number.get(name, len(number) if column.other else None)
        if place is None:
            alike = next((other for other in number if accidental_pairs({name, other})), None)
            hint = f"; did you mean {alike!r}?" if alike else '; add "" for a blank' if name == "" else ""
            raise InputError(f"{at(row)}: {shown(cell_name(cell))} is not in its categories in data.columns, which has no `other`{hint}")
        features[row, place] = 1.0
    return features


def _dates(column: Column, cells: Sequence[Any], at: Callable[[int], str]) -> tuple[Array, int]:
    features, clipped = np.zeros((len(cells), len(feature_names(column)))), 0
    low, high = column.ends
    for row, cell in enumerate(cells):
        when = None if is_blank(cell) else moment(cell, column.format)
        if when is None:
            if not is_blank(cell) or column.blank == "refuse":
                advice = "set its blank to 'middle'" if is_blank(cell) else f"expected {column.format or 'ISO 8601, such as 2024-05-31'}"
                raise InputError(f"{at(row)}: {shown(cell)} is not a date; {advice} in data.columns")
            continue  # 0 is the middle of the range, and of each cycle no time at all
        values: list[float] = []
        for part in column.parts:
            if part == "time":
                clipped += not low <= when.timestamp() <= high
                values.append(2 * (min(max(when.timestamp(), low), high) - low) / (high - low) - 1)
            else:
                angle = 2 * math.pi * _CYCLES[part](when)
                values += [math.sin(angle), math.cos(angle)]
        features[row] = values
    return features, clipped


def _words(column: Column, cells: Sequence[Any]) -> Array:
    """Hashed counts of words, of length 1: no vocabulary is learned."""
    from sklearn.feature_extraction.text import HashingVectorizer

    hashing = HashingVectorizer(n_features=column.features, token_pattern=r"(?u)\b\w+\b")
    return np.asarray(hashing.transform([cell_name(cell) for cell in cells]).toarray(), dtype=np.float64)
