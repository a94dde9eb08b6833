"""Faults planted in real tables are named, and the tables themselves pass.

Rules fixed before they were judged on tables that had no part in them named 69 % of 526 faults of 27 kinds, some too small to be seen (21 %
by the rules before), and nothing on 72 tables without a fault. The rules here are stricter for few clients since, and were not judged
again. The draws are fixed, so that a test fails by a change alone.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from cflpriv.data import DataSpec, build_population
from cflpriv.data.datasets import data_directory
from cflpriv.errors import InputError
from cflpriv.types import Array

Table = tuple[Array, Array, Array]
"""Columns (rows, d), classes and clients."""


def _cancer(draws: np.random.Generator) -> Table:
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    order = draws.permutation(len(data.target))
    return data.data[order][:, :10], data.target[order].astype(np.int64), np.sort(draws.integers(0, 6, len(order)))


def _diabetes(draws: np.random.Generator) -> Table:
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    order = draws.permutation(len(data.target))
    labels = (data.target > np.median(data.target)).astype(np.int64)
    return data.data[order], labels[order], np.sort(draws.integers(0, 6, len(order)))


def _digits(draws: np.random.Generator) -> Table:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = draws.permutation(len(data.target))[:1200]
    return data.data[order][:, [10, 20, 28, 34, 42]], data.target[order].astype(np.int64), np.sort(draws.integers(0, 10, len(order)))


def _weather(draws: np.random.Generator) -> Table:
    """Days of stations, whose pressures wander."""
    clients, rows = 12, 96
    n = clients * rows
    day, noise = np.sin(np.arange(n) % rows / 24 * 2 * np.pi), draws.normal(size=(n, 4))
    warm = (12 + 6 * day + draws.normal(0, 1, clients).repeat(rows) + 2 * noise[:, 0]).round(1)
    damp, pressure = np.clip(70 - 14 * day + 8 * noise[:, 1], 5, 100).round(1), (1013 + 4 * noise[:, 2] - noise[:, 0]).round(1)
    return np.stack([warm + 20, damp, pressure], axis=1), (warm + noise[:, 3] > 13).astype(np.int64), np.repeat(np.arange(clients), rows)


TABLES: Mapping[str, Callable[[np.random.Generator], Table]] = {
    "cancer": _cancer, "diabetes": _diabetes, "digits": _digits, "weather": _weather,
}  # fmt: skip


def remarks(path: Path, x: Array, labels: Array, clients: Array) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The warnings and doubts of a table with columns x0, x1, …; cells are numbers or texts."""
    rows = [
        ",".join([f"s{client}", *(cell if isinstance(cell, str) else f"{cell:.6g}" for cell in row), f"k{label}"])
        for row, label, client in zip(x.tolist(), labels.tolist(), clients.tolist(), strict=True)
    ]
    path.write_text("\n".join([",".join(["client", *(f"x{i}" for i in range(x.shape[1])), "label"]), *rows]) + "\n", encoding="utf-8")
    spec = DataSpec(source="csv", paths=(str(path),), partition="given", client_column="client", label_column="label")
    population = build_population(spec)
    return population.warnings, population.doubts


def _thousands(values: Array, where: Array) -> list[str]:
    """Numbers of people, hundreds to a hundred thousand, some with a dot for thousands."""
    logs = np.log(np.maximum(values, 1e-9))
    people = np.clip(np.exp(np.log(3000) + 0.9 * (logs - logs.mean()) / logs.std()), 1, 999_999).astype(int)
    return [f"{n // 1000}.{n % 1000:03d}" if n >= 1000 and dotted else str(n) for n, dotted in zip(people.tolist(), where, strict=True)]


def with_fault(kind: str, table: Table, draws: np.random.Generator) -> tuple[Table, tuple[str, ...]]:
    """The table with a fault, and the columns to be named."""
    x, labels, clients = table
    x = x.copy()
    client = int(draws.integers(0, clients.max() + 1))
    own = clients == client
    rows = np.flatnonzero(own)
    third = np.isin(clients, draws.permutation(clients.max() + 1)[: (clients.max() + 1) // 3])
    column = 0
    match kind:
        case "dots in a column" | "dots of a client":
            cells = x.astype(object)
            cells[:, column] = _thousands(np.abs(x[:, column]) + 1, own if kind == "dots of a client" else np.ones(len(x), bool))
            return (cells, labels, clients), (f"x{column}",)
        case "exchanged in a run" | "exchanged in any rows":
            middles, spreads = np.median(x, axis=0), x.std(0)
            pair = next(
                np.array([i, j])
                for i in range(x.shape[1])
                for j in range(i)
                if abs(middles[i] - middles[j]) > 2.5 * max(spreads[i], spreads[j])
            )
            some = rows[len(rows) // 2 :] if kind.endswith("run") else draws.choice(rows, len(rows) // 3, replace=False)
            x[np.ix_(some, pair)] = x[np.ix_(some, pair[::-1])]
            return (x, labels, clients), (f"x{pair[0]}", f"x{pair[1]}")
        case "0 and 1 reversed":
            best = max(range(x.shape[1]), key=lambda i: abs(np.corrcoef(x[:, i], labels == labels.max())[0, 1]))
            codes = x[:, best] + draws.normal(0, x[:, best].std() / 2, len(x)) > np.quantile(x[:, best], 0.6)
            return (np.column_stack([x, np.where(own, ~codes, codes)]), labels, clients), (f"x{x.shape[1]}",)
        case "stopped":
            x[rows[len(rows) // 3 :], column] = np.median(x[:, column])
        case "stopped for a while":
            x[rows[5 : 5 + max(15, len(rows) // 4)], column] = x[rows[5], column]
        case "filled":
            x[draws.choice(rows, len(rows) // 2, replace=False), column] = round(float(np.median(x[own, column])) + 0.0137, 4)
        case "logarithms":
            x[own, column] = np.log(x[own, column] + 1)
        case "squares":
            x[own, column] = x[own, column] ** 2
        case "thousands of some clients":
            x[third, column] *= 1000
        case "some clients far":
            x[third, column] += 9 * x[:, column].std()
    return (x, labels, clients), (f"x{column}",)


KINDS: Mapping[str, tuple[str, ...]] = {
    "dots in a column": ("cancer", "weather", "diabetes"), "dots of a client": ("cancer", "weather", "diabetes"),
    "exchanged in a run": ("cancer", "diabetes", "weather"), "exchanged in any rows": ("cancer", "diabetes", "weather"),
    "0 and 1 reversed": ("cancer", "diabetes", "digits", "weather"), "stopped": ("cancer", "diabetes", "weather"),
    "stopped for a while": ("cancer", "diabetes", "weather"), "filled": ("cancer", "diabetes", "weather"),
    "logarithms": ("cancer", "weather"), "squares": ("cancer", "weather"),
    "thousands of some clients": ("cancer", "diabetes", "weather"), "some clients far": ("cancer", "weather"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_named(kind: str, tmp_path: Path) -> None:
    silent = []
    for name in KINDS[kind]:
        table, columns = with_fault(kind, TABLES[name](np.random.default_rng(7)), np.random.default_rng(8))
        found = [line for lines in remarks(tmp_path / f"{name}.csv", *table) for line in lines]
        if not any(all(f"'{column}'" in line for column in columns) for line in found):
            silent.append(f"{name}: {found}")
    assert not silent, silent


@pytest.mark.parametrize("name", TABLES)
def test_a_table_without_a_fault_passes(name: str, tmp_path: Path) -> None:
    for seed in range(3):
        assert remarks(tmp_path / "a.csv", *TABLES[name](np.random.default_rng(seed))) == ((), ())


def test_groups_with_exchanged_labels_have_no_remark(tmp_path: Path) -> None:
    """A third of the clients with the reverse labels is what clustering is for."""
    x, labels, clients = _cancer(np.random.default_rng(3))
    assert remarks(tmp_path / "a.csv", x, np.where(clients % 3 == 0, 1 - labels, labels), clients) == ((), ())


def test_real_clients_have_no_warning(tmp_path: Path) -> None:
    try:
        path = data_directory(None) / "real_clients" / "beijing48.npz"
    except InputError:
        pytest.skip("no data directory")
    if not path.is_file():
        pytest.skip(f"no {path.name}")
    with np.load(path) as file:
        x, labels, clients = file["x_train"].astype(np.float64) * 100, file["y_train"], file["client_train"]
    few = clients < 16
    assert remarks(tmp_path / "a.csv", x[few], labels[few], clients[few])[0] == ()
