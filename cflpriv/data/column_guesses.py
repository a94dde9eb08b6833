"""A first schema of a table's columns, for its user to check and edit.

What a guess takes from the table (ranges, categories, dates) is public as soon as it is in a configuration. Ranges are rounded outwards.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .class_names import accidental_pairs, no_classes, unified
from .columns import Column, Part, as_written, cell_name, cell_number, feature_names, is_blank, moment, nested, shown
from .doubtful_columns import is_filler_date
from .doubtful_rows import check_rows
from .doubtful_values import FEWEST_FILLED
from .plausible import row_numbers
from .raw_tables import RawTable, read_table
from .table_labels import names_of_classes

__all__ = ["Guess", "guessed", "guessed_columns", "is_usual", "source_of"]

LABELS = ("label", "target", "class", "outcome", "y", "diagnosis", "category", "result", "species")
CLIENTS = ("client", "site", "clinic", "hospital", "user", "device", "owner", "institution")
SURE_CLIENTS = (
    "meter", "sensor", "station", "machine", "patient", "subject", "participant", "person", "speaker", "writer", "customer", "household",
    "store", "shop", "branch", "school", "bank", "farm", "factory", "centre", "center", "vehicle", "gateway", "node",
    "substation", "feeder", "turbine", "truck", "driver", "ship", "ward", "building", "tower",
)  # fmt: skip
"""Names of columns that are taken for the label, for the client, and for the client if the values are those of clients, the first first."""
ENDING = re.compile(r"(?<=.)[ _.-]?(id|nr|no|num|number|name|code)\Z")
"""What the name of a column of clients may end in."""
NUMBERED = re.compile(r"(\D*[^\W\d][\W_]*)\d+")
"""A name of clients that are numbered, such as M07 or "ward 3"."""
FEWEST_NUMBERED, FEWEST_ROWS = 8, 5
"""A column of numbered names is that of clients from so many on, if each has so many rows in the mean; fewer may be categories."""
MOST_CATEGORIES = 50
FEW_CATEGORIES = 8
WORDS_OF_TEXT = 2.5
NO_VALUES, IDENTIFIER = "has no values", "all values differ: an identifier"
_POINTED = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}")
_COMMAS = re.compile(r"[+-]?[0-9.]*[0-9](,[0-9]+)*")
_UNIT = re.compile(r"[^\w\s+-]{0,2}\s?[+-]?\d[\d.,' \u00a0]*\s?[^\d\s]{0,8}")
MOSTLY, SURELY = 0.5, 0.9
FEW_DATES = 200
"""So many cells show how most dates of a column are written."""
FORMATS = (
    "", "%d.%m.%Y", "%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%d.%m.%Y %H:%M", "%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M",
    "%Y/%m/%d %H:%M", "%d.%m.%y", "%b %d, %Y", "%d %b %Y",
)  # fmt: skip
"""How dates are written, ISO 8601 first. Of two that read all cells the first is taken, with a remark."""
MIDDLE, BESIDE = (0.02, 0.98), 0.5
"""A range holds the middle of the values and, as far as there are values, so many of its widths on each side: others are clipped.

So the middle takes at least half of the range, and a model can tell its values apart. A normal column keeps all within 4 deviations."""


@dataclass(frozen=True)
class Guess:
    """The columns of label and client (empty: none), the number of clients, the classes (or a label's range, if it is a quantity), and the
    schema of all other columns.

    `remarks` has a remark on some columns, by name.
    """

    label: str
    client: str
    clients: int
    classes: tuple[str, ...]
    columns: tuple[Column, ...]
    label_range: tuple[float, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)


def source_of(path: Path) -> str:
    """The kind of a table's file, by its name. Raises `InputError` for another."""
    if path.is_dir():
        return "huggingface" if not any(path.rglob("*.parquet")) else "parquet"
    if path.suffix == ".parquet":
        return "parquet"
    if path.suffix in (".csv", ".txt", ".data") or path.name.endswith((".csv.gz", ".csv.bz2")):
        return "csv"
    raise InputError(f"{path}: is not a table that is known by its name; expected .csv, .csv.gz, .parquet or a folder of `save_to_disk`")


def guessed(path: Path, label: str = "", client: str = "") -> Guess:
    """A schema of the table in a file. Raises `InputError` for columns that it has not, and for a label that is no class."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    table = read_table(source_of(path), path)
    names = [name for name in table.columns if name]
    label = label or _named(names, LABELS) or next((name for name in reversed(names) if name != client), "")
    client = client or _client(table, [name for name in names if name != label])
    for option, name in (("--label", label), ("--client", client)):
        if name:
            table.column(option, name)
    if label == client:
        raise InputError(f"--label, --client: both name {label!r}")
    label_range = _label_range(table, label)
    classes = () if label_range else names_of_classes([table], label)[1]
    check_rows(table.columns, table.parsed, table.place)
    columns, remarks = guessed_columns(table, [name for name in (label, client) if name])
    clients = len(set(unified(table.names("client_column", client))[0].values())) if client else 0
    if not any(feature_names(column) for column in columns):
        some = "; ".join(f"{name!r} {remark}" for name, remark in list(remarks.items())[:3])
        raise InputError(f"{path}: no column beside {label!r} is known to hold features{f': {some}' if some else ''}")
    return Guess(label, client, clients, classes, columns, label_range, remarks)


def guessed_columns(table: RawTable, others: Collection[str]) -> tuple[tuple[Column, ...], dict[str, str]]:
    """A schema of all columns but `others`, and remarks on some columns, by name."""
    guesses = {name: _guess(table, name) for name in table.columns if name not in others}
    return tuple(column for column, _ in guesses.values()), {name: remark for name, (_, remark) in guesses.items() if remark}


def is_usual(remark: str) -> bool:
    """Whether good tables have columns that are left out for this reason: no values, identifiers, numbers of rows."""
    return remark in (NO_VALUES, IDENTIFIER) or remark.startswith(("numbers the rows", "is an index"))


def _label_range(table: RawTable, label: str) -> tuple[float, ...]:
    """The range of a label that is a quantity: numbers that are surely no classes. Empty for classes."""
    numbers = np.array([math.nan if isinstance(cell, bool) else cell_number(cell) for cell in table.columns[label]])
    if not np.isfinite(numbers).all():
        return ()
    values, counts = np.unique(numbers, return_counts=True)
    _, sure = no_classes(values, counts)
    whole = row_numbers(label, [numbers])
    return _rounded(float(values[0]), float(values[-1])) if sure and not whole else ()


def _named(names: Sequence[str], wanted: Sequence[str]) -> str:
    by_name = {name.casefold(): name for name in names}
    return next((by_name[name] for name in wanted if name in by_name), "")


def _client(table: RawTable, names: Sequence[str]) -> str:
    """The column of clients: by its name, or by values that number them; "" if there is none."""
    stems = [ENDING.sub("", name.casefold()) for name in names]
    if name := next((names[stems.index(stem)] for stem in CLIENTS if stem in stems), ""):
        return name
    sure = [names[stems.index(stem)] for stem in SURE_CLIENTS if stem in stems]
    numbered = [name for name in names if len(_numbered(table.columns[name])) >= FEWEST_NUMBERED]
    return next((name for name in (*sure, *numbered) if _has_rows(table.columns[name])), "")


def _numbered(cells: Sequence[Any]) -> set[str]:
    """The different values of a column of texts that differ by a number at their end alone; empty for another column."""
    found = [NUMBERED.fullmatch(cell.strip()) if isinstance(cell, str) else None for cell in cells]
    first = {match[1] for match in found if match is not None}
    return {match[0] for match in found if match is not None} if len(first) == 1 and None not in found else set()


def _has_rows(cells: Sequence[Any]) -> bool:
    """Whether the values of a column are names, each of some rows."""
    names = {cell_name(cell) for cell in cells}
    numbers = [number for name in names if math.isfinite(number := cell_number(name))]
    return "" not in names and 1 < len(names) <= len(cells) / FEWEST_ROWS and all(number.is_integer() for number in numbers)


def _guess(table: RawTable, name: str) -> tuple[Column, str]:
    cells = table.columns[name]
    if what := next(filter(None, map(nested, cells)), ""):
        return Column(name, "ignore"), f"has a cell with {what}; write a number, a text or a date in each cell"
    there = [cell for cell in cells if not is_blank(cell)]
    blanks = len(cells) - len(there)
    if not there:
        return Column(name, "ignore"), NO_VALUES
    numbers = np.array([math.nan if isinstance(cell, bool) else cell_number(cell) for cell in there])
    if np.isfinite(numbers).all() and not _are_codes(there):
        if how := row_numbers(name, [numbers] if not blanks else []):
            return Column(name, "ignore"), how
        column, remark = _number(name, numbers, blanks)
        return column, "; ".join(filter(None, (remark, _points_of_thousands(there))))
    if any("," in str(cell) for cell in there) and all(_COMMAS.fullmatch(str(cell).strip()) for cell in there):
        return Column(name, "ignore"), "numbers with commas are not read; write them with decimal points, without separators of thousands"
    if (dates := _dates(name, there, blanks)) is not None:
        return dates
    return _names(name, [cell_name(cell) for cell in cells])


def _are_codes(cells: Sequence[Any]) -> bool:
    """Whether digits are a code rather than a number: some begin with a zero, and all are equally long."""
    texts = [cell.strip() for cell in cells if isinstance(cell, str)]
    is_code = len(texts) == len(cells) and all(text.isdecimal() for text in texts) and len({len(text) for text in texts}) == 1
    return is_code and len(texts[0]) > 1 and any(text.startswith("0") for text in texts)


def _points_of_thousands(cells: Sequence[Any]) -> str:
    """A remark on numbers such as 1.250 and 980 in one column, where all points have three digits after them; "" for others."""
    texts = [cell.strip() for cell in cells if isinstance(cell, str)]
    pointed = [text for text in texts if "." in text]
    whole = len(texts) - len(pointed)
    if len(texts) < len(cells) or min(len(pointed), whole) < FEWEST_FILLED or not all(map(_POINTED.fullmatch, pointed)):
        return ""
    return f"all points are followed by three digits, such as {pointed[0]!r}, and {whole} cells have none; do they separate thousands?"


def _number(name: str, values: np.ndarray[Any, np.dtype[np.float64]], blanks: int) -> tuple[Column, str]:
    low, high = float(values.min()), float(values.max())
    first, last = (float(end) for end in np.quantile(values, MIDDLE))
    beside = BESIDE * (last - first)
    far = beside > 0 and (low < first - beside or high > last + beside)
    if far:
        low, high = max(low, first - beside), min(high, last + beside)
    ends = (low - (apart := max(1.0, abs(low) / 2**20)), high + apart) if low == high else _rounded(low, high)
    remark = "a few values lie far beyond the range and are clipped" if far else "has one value only" if low == high else ""
    filled = f"{blanks} blanks are filled by the middle of the range" if blanks else ""
    return Column(name, "number", range=ends, blank="middle" if blanks else "refuse"), "; ".join(filter(None, (remark, filled)))


def _rounded(low: float, high: float) -> tuple[float, float]:
    """A range that holds another, with ends of one or two digits of its width."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    ends = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    made = float(f"{ends[0]:.12g}"), float(f"{ends[1]:.12g}")
    return made if made[0] <= low < high <= made[1] else (low, high)


def _dates(name: str, cells: Sequence[Any], blanks: int) -> tuple[Column, str] | None:
    fitting = [written for written in FORMATS if all(moment(cell, written) is not None for cell in cells)]
    if not fitting:
        some = cells[:: max(1, len(cells) // FEW_DATES)]
        count, best = max((sum(moment(cell, written) is not None for cell in some), written) for written in FORMATS)
        if count < MOSTLY * len(some):
            return None
        others = [cell for cell in cells if moment(cell, best) is None]
        how = f"are dates as {best or '2024-05-31'}, and {len(others)} are not, such as {shown(others[0])}"
        return Column(name, "ignore"), f"{len(cells) - len(others)} of {len(cells)} cells {how}; write all in one way"
    moments = [at for cell in cells if (at := moment(cell, fitting[0])) is not None]
    meant = [at for at in moments if not is_filler_date(at.year, at.month, at.day)]
    meant = moments if len(moments) - len(meant) < FEWEST_FILLED or not meant else meant
    first, last = min(meant), max(meant)
    begin = datetime(first.year, first.month, 1, tzinfo=UTC)
    end = datetime.max.replace(tzinfo=UTC) if last.year == datetime.max.year else _next_month(last)
    parts: list[Part] = ["time"]
    parts += ["year"] if (last - first).days >= 300 else []
    parts += ["day"] if any(at.hour or at.minute for at in moments) else []
    ends = tuple(at.strftime(fitting[0]) if fitting[0] else at.date().isoformat() for at in (begin, end))
    filled = sorted({at.date().isoformat() for at in moments} - {at.date().isoformat() for at in meant})
    remarks = [
        f"{fitting[1]!r} reads all dates, too" if len(fitting) > 1 else "", f"{blanks} blanks are the middle" if blanks else "",
        f"{len(moments) - len(meant)} cells are {' or '.join(filled)}, which programs write for no date; make them blank" if filled else "",
    ]  # fmt: skip
    zoned = sum(at.tzinfo is not None for cell in cells if (at := as_written(cell, fitting[0])) is not None)
    if 0 < zoned < len(cells):
        remarks.append(f"{zoned} cells have a time zone, and the others are taken as UTC")
    column = Column(name, "date", range=ends, format=fitting[0], parts=tuple(parts), blank="middle" if blanks else "refuse")
    return column, "; ".join(filter(None, remarks))


def _next_month(at: datetime) -> datetime:
    return datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)


def _no_numbers(cells: Sequence[str]) -> str:
    """Why cells that mostly begin with a number are no column of numbers; "" if they are not so."""
    plain = [cell for cell in cells if math.isfinite(cell_number(cell))]
    others = [cell for cell in cells if not math.isfinite(cell_number(cell))]
    if not others:
        return ""
    if len(plain) >= MOSTLY * len(cells):
        return f"{len(plain)} of {len(cells)} cells are numbers, others are not, such as {shown(others[0])}; make these blank, or numbers"
    if sum(_UNIT.fullmatch(cell) is not None for cell in cells) >= SURELY * len(cells):
        return f"numbers with units or marks, such as {shown(others[0])}, are not read; write the number alone"
    return ""


def _names(name: str, cells: Sequence[str]) -> tuple[Column, str]:
    names, _ = unified(cells)
    values = sorted(set(names.values()))
    full = [cell for cell in cells if cell]
    words = sum(len(cell.split()) for cell in full) / len(full)
    most = MOST_CATEGORIES if words < WORDS_OF_TEXT else FEW_CATEGORIES
    if len(values) <= most and len(values) <= max(FEW_CATEGORIES, len(cells) / 4):
        pairs = accidental_pairs(values)
        alike = f"{pairs[0][0]!r} and {pairs[0][1]!r} differ as by accident; write them in one way" if pairs else ""
        return Column(name, "category", categories=tuple(values)), alike
    if words >= WORDS_OF_TEXT:
        return Column(name, "text"), ""
    if why := _no_numbers(full):
        return Column(name, "ignore"), why
    if len(set(full)) == len(full):
        return Column(name, "ignore"), IDENTIFIER
    return Column(name, "text"), f"{len(values)} different values, too many for categories, are hashed"
