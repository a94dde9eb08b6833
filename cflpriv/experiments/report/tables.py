"""Tables of results: CSV files, Parquet files beside them where pyarrow is installed, and a DataFrame where pandas is."""

import csv
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...files import write_atomically
from ..sweep.choose import FILE as CHOICE
from ..sweep.choose import read_chosen
from ..sweep.sweep import Sweep, sweep_of
from .front import front_rows, read_results, setting_columns, table_rows

__all__ = ["read_sweep", "write_table", "write_tables"]


def write_tables(folder: Path, sweep: Sweep) -> list[Path]:
    """Write sweep.csv (a row a run), table.csv (a row a setting) and front.csv into a sweep's folder, and the Parquet files beside them."""
    results, _ = read_results(folder, sweep)
    tables = {"sweep.csv": _run_rows(folder, sweep), "table.csv": _priced(table_rows(results, sweep), folder, sweep)}
    tables["front.csv"] = front_rows(results)
    return [path for name, rows in tables.items() for path in write_table(folder / name, rows)]


def read_sweep(folder: str | Path) -> Any:
    """The runs of a sweep's folder as a pandas DataFrame, a row a run with the columns of sweep.csv.

    Runs that failed have an `error`. Raises `InputError` where pandas is not installed, or the folder holds no sweep.
    """
    folder = Path(folder)
    if (sweep := sweep_of(folder)) is None:
        raise InputError(f"{folder}: holds no sweep (no sweep.toml)")
    if find_spec("pandas") is None:
        raise InputError(f"read_sweep: needs pandas, which is not installed; {folder / 'sweep.csv'} has the same rows")
    rows = _run_rows(folder, sweep)
    return import_module("pandas").DataFrame(rows, columns=columns_of(rows))


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write rows as the CSV file `path` and, where pyarrow is installed, as a Parquet file beside it; the files written. Raises OSError."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
    if find_spec("pyarrow") is None:
        return [path]
    pyarrow, parquet, packed = import_module("pyarrow"), import_module("pyarrow.parquet"), io.BytesIO()
    columns = {name: _of_one_type([row.get(name) for row in rows]) for name in columns_of(rows)}
    parquet.write_table(pyarrow.table(columns), packed)
    write_atomically(path.with_suffix(".parquet"), packed.getvalue())
    return [path, path.with_suffix(".parquet")]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of all rows, in the order in which they come first."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _of_one_type(values: Sequence[Any]) -> list[Any]:
    """A column as Parquet takes it: truth values, whole numbers, numbers, else text. None stays."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and len(kinds) > 1:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1 or not kinds <= {bool, int, float, str}:
        return [None if value is None else str(value) for value in values]
    return list(values)


def _run_rows(folder: Path, sweep: Sweep) -> list[dict[str, Any]]:
    """One row per run: setting, seed, every scalar of the summary, and the error if the run or its audit failed."""
    results, failed = read_results(folder, sweep)
    plain, made = (str, int, float, type(None)), {result.cell.name: result.summary for result in results}
    rows = []
    for cell in sorted(sweep.cells, key=lambda cell: cell.name not in made):  # those that have results first
        if cell.name in made or cell.name in failed:
            row = {"run": cell.name, **setting_columns(cell.setting), "seed": cell.seed}
            summary = made.get(cell.name, {})
            row |= {key: value for key, value in summary.items() if isinstance(value, plain) and key not in row}  # labels stay
            if cell.name in made:
                row["warnings"] = "; ".join(summary.get("warnings", ()))
            rows.append(row | ({"error": failed[cell.name]} if cell.name in failed else {}))
    return _priced(rows, folder, sweep)


def _priced(rows: list[dict[str, Any]], folder: Path, sweep: Sweep) -> list[dict[str, Any]]:
    """Rows with the epsilon of a private choice, if one was made: that of a run is of the run alone."""
    made = None if sweep.choose is None else read_chosen(folder / CHOICE)
    return rows if made is None else [{**row, "epsilon_of_choice": made[0].epsilon} for row in rows]
