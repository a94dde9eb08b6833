"""Labels that have nothing to do with the columns, or at one client with other columns than everywhere else, as shuffled ones have."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..types import Array
from .doubtful_units import examined_rows

__all__ = ["label_notes"]

MOST_COLUMNS, MOST_CLIENTS, MOST_KINDS = 64, 200, 20
FEWEST_ROWS, ROWS_A_COLUMN = 20, 5
"""A client is examined with so many rows, and so many for each column."""
FEWEST_OTHERS = 3
AGREED, STRANGE = 0.5, 0.15
"""Correlations of labels with what the other clients' columns say of them: all others have more than the first, a strange client less
than the second. Among 20 rows or more of a client like all others, half of that correlation would be a chance of less than 1 %."""
UNRELATED = 1.0
"""The clients' own fits explain no more of their labels, by so many standard errors, than fits to noise do."""
RIDGE = 1e-3


def label_notes(numbers: Mapping[str, Array], labels: Array, clients: Array | None, names: Sequence[str]) -> list[str]:
    """Notes of the labels (rows,), classes by number or a quantity, beside columns of numbers (rows,)."""
    some = examined_rows(len(labels))
    labels, clients = labels[some], None if clients is None else clients[some]
    columns = [own for column in numbers.values() if np.isfinite(own := column[some]).all() and own.std() > 0]
    kinds = np.unique(labels)
    if not 1 <= len(columns) <= MOST_COLUMNS or len(kinds) < 2:
        return []
    truth = (labels[:, None] == kinds).astype(float) if len(kinds) <= MOST_KINDS else labels[:, None].astype(float)
    x = np.stack(columns, axis=1)
    owners = np.zeros(len(x), np.int64) if clients is None else clients
    order = np.argsort(owners, kind="stable")
    bounds = np.append(np.flatnonzero(np.diff(owners[order], prepend=-1)), len(order))[: MOST_CLIENTS + 1]
    parts = []
    for i, j in zip(bounds.tolist(), bounds[1:].tolist(), strict=False):
        rows = order[i:j]
        if len(rows) >= max(FEWEST_ROWS, ROWS_A_COLUMN * len(columns)) and truth[rows].std(0).max() > 0:
            parts.append((int(owners[rows[0]]), _centred(x[rows]), _centred(truth[rows], scale=len(kinds) > MOST_KINDS)))
    if not parts:
        return []
    if _unrelated(parts):
        return ["no column of numbers, nor a weighted sum of them, has to do with the label; are the labels those of the rows?"]
    return [] if (odd := _strange(parts)) is None else [
        f"the labels of client {names[odd]!r} do not follow the columns as those of all others do; are they its own, or exchanged?"
    ]  # fmt: skip


def _centred(values: Array, scale: bool = True) -> Array:
    """Columns with mean 0 and, with `scale`, deviation 1."""
    centred = values - values.mean(0)
    deviation = centred.std(0)
    return np.asarray(centred / np.where(deviation > 0, deviation, 1.0)) if scale else centred


_Part = tuple[int, Array, Array]
"""A client, its columns and its labels, centred."""


def _fit(products: Array, towards: Array, rows: int) -> Array:
    return np.linalg.solve(products + RIDGE * rows * np.eye(len(products)), towards)


def _unrelated(parts: Sequence[_Part]) -> bool:
    """Whether fits of each client by itself explain no more than fits to noise would."""
    excess = variance = 0.0
    for _, x, y in parts:
        n, d = x.shape
        explained = float((x @ _fit(x.T @ x, x.T @ y, n) * y).sum() / (y**2).sum())
        excess += explained - d / (n - 1)
        variance += 2 * d * (n - 1 - d) / ((n - 1) ** 2 * (n + 1))
    return bool(excess < UNRELATED * variance**0.5)


def _strange(parts: Sequence[_Part]) -> int | None:
    """The one client whose labels do not follow what all others' columns say of them; None if there is none."""
    if len(parts) <= FEWEST_OTHERS:
        return None
    products = [x.T @ x for _, x, _ in parts]
    towards = [x.T @ y for _, x, y in parts]
    rows = sum(len(x) for _, x, _ in parts)

    def follows(client: int, without: set[int]) -> float:
        _, x, y = parts[client]
        left = without | {client}
        own = _fit(sum(products) - sum(products[i] for i in left), sum(towards) - sum(towards[i] for i in left), rows)  # type: ignore[arg-type]
        expected = x @ own
        return float((expected * y).sum() / max(1e-12, float((expected**2).sum() * (y**2).sum()) ** 0.5))

    first = [follows(client, set()) for client in range(len(parts))]
    odd = int(np.argmin(first))
    if first[odd] > STRANGE or sorted(first)[1] < STRANGE:
        return None
    agreed = [follows(client, {odd}) for client in range(len(parts)) if client != odd]
    return parts[odd][0] if min(agreed) > AGREED else None
