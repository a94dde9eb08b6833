"""Labels and columns that follow the other columns at one client otherwise than at all others, as shuffled or reversed ones do.

Clients with another relation may be a group of their own, and groups are what clustering is for. So a note says that the relation differs.

Of a table whose clients all have one relation, a note on a column has a probability below `FALSE_ALARM`, all columns and clients together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ..types import Array
from .doubtful_units import examined_rows

__all__ = ["relation_notes"]

FALSE_ALARM = 1e-3
MOST_COLUMNS, MOST_CLIENTS, MOST_KINDS = 64, 200, 20
FEWEST_ROWS, ROWS_A_COLUMN = 20, 5
"""A client is examined with so many rows; with so many for each column its own fit is, too."""
FEWEST_OTHERS, MOST_EXAMINED = 3, 0.9
"""Clients beside one that is unlike them, and the share of all clients that are examined: "all others" would else be a few."""
AGREED, STRANGE = 0.5, 0.15
"""Correlations of labels with what the other clients' columns say of them: all others have more than the first, a strange client less
than the second. Among 20 rows or more of a client like all others, half of that correlation would be a chance of less than 1 %."""
REVERSED_AGREED = 0.2
"""The mean correlation at other clients, of a column that is reversed at one."""
AGAINST = 2.0
"""No other client has a negative correlation of more than so many standard errors."""
OF_LABELS = 0.9
"""If a reversed label explains a client better than a reversed column, by this factor of the log-likelihoods, it is the label."""
UNRELATED = 1.0
"""The clients' own fits explain no more of their labels, by so many standard errors, than fits to noise do."""
RIDGE = 1e-3
MOST_NAMED = 2
FEWEST_VARIED = 5
"""A client's labels, or its values of a column, vary if so many rows differ from the most frequent value."""


@dataclass(frozen=True)
class _Part:
    """A client, its rows, and the products (d + k, d + k) of its d columns and k labels, centred; columns have deviation 1."""

    client: int
    rows: int
    products: Array


def relation_notes(numbers: Mapping[str, Array], labels: Array, clients: Array | None, names: Sequence[str]) -> list[str]:
    """Notes of the labels (rows,), classes by number or a quantity, and of columns of numbers (rows,), beside the other columns."""
    some = examined_rows(len(labels))
    labels, clients = labels[some], None if clients is None else clients[some]
    of_columns = {name: own for name, column in numbers.items() if np.isfinite(own := column[some]).all() and own.std() > 0}
    columns = list(of_columns)
    kinds = np.unique(labels)
    if not 1 <= len(columns) <= MOST_COLUMNS or len(kinds) < 2:
        return []
    truth = (labels[:, None] == kinds).astype(float) if len(kinds) <= MOST_KINDS else labels[:, None].astype(float)
    x = np.stack(list(of_columns.values()), axis=1)
    owners = np.zeros(len(x), np.int64) if clients is None else clients
    order = np.argsort(owners, kind="stable")
    bounds = np.append(np.flatnonzero(np.diff(owners[order], prepend=-1)), len(order))[: MOST_CLIENTS + 1]
    parts = []
    for i, j in zip(bounds.tolist(), bounds[1:].tolist(), strict=False):
        rows = order[i:j]
        if len(rows) >= FEWEST_ROWS and _varies(labels[rows]):
            both = np.concatenate([_centred(x[rows]) * _varies(x[rows]), _centred(truth[rows], scale=len(kinds) > MOST_KINDS)], axis=1)
            parts.append(_Part(int(owners[rows[0]]), len(rows), both.T @ both))
    fitted = [part for part in parts if part.rows >= ROWS_A_COLUMN * len(columns)]
    if not fitted:
        return []
    if _unrelated(fitted, len(columns)):
        return ["no column of numbers, nor a weighted sum of them, has to do with the label; are the labels those of the rows?"]
    if len(parts) <= FEWEST_OTHERS or len(parts) < MOST_EXAMINED * min(MOST_CLIENTS, len(np.unique(owners))):
        return []
    if (odd := _strange(parts, len(columns))) is not None:
        return [f"the labels of client {names[odd]!r} do not follow the columns as those of all others do; are they its own, or exchanged?"]
    return [
        f"column {', '.join(repr(columns[place]) for place in places)}: at client {names[client]!r} the values {how}"
        for client, places, how in _strange_columns(parts, len(columns))
    ]


def _centred(values: Array, scale: bool = True) -> Array:
    """Columns with mean 0 and, with `scale`, deviation 1."""
    centred = values - values.mean(0)
    deviation = centred.std(0)
    return np.asarray(centred / np.where(deviation > 0, deviation, 1.0)) if scale else centred


def _varies(values: Array) -> Array:
    """Whether values (rows, ...) differ from the most frequent in `FEWEST_VARIED` rows. If fewer do, the median is the most frequent."""
    return np.asarray((values != np.sort(values, axis=0)[len(values) // 2]).sum(0) >= FEWEST_VARIED)


def _fit(products: Array, towards: Array, rows: int) -> Array:
    return np.linalg.solve(products + RIDGE * rows * np.eye(len(products)), towards)


def _unrelated(parts: Sequence[_Part], d: int) -> bool:
    """Whether fits of each client by itself explain no more than fits to noise would."""
    excess = variance = 0.0
    for part in parts:
        n, towards = part.rows, part.products[:d, d:]
        explained = float((towards * _fit(part.products[:d, :d], towards, n)).sum() / part.products[d:, d:].trace())
        excess += explained - d / (n - 1)
        variance += 2 * d * (n - 1 - d) / ((n - 1) ** 2 * (n + 1))
    return bool(excess < UNRELATED * variance**0.5)


def _strange(parts: Sequence[_Part], d: int) -> int | None:
    """The one client whose labels do not follow what all others' columns say of them; None if there is none."""
    total, rows = np.sum([part.products for part in parts], axis=0), sum(part.rows for part in parts)

    def follows(place: int, without: Sequence[int] = ()) -> float:
        left = total - np.sum([parts[i].products for i in {place, *without}], axis=0)
        own = _fit(left[:d, :d], left[:d, d:], rows)
        x, y = parts[place].products[:d], parts[place].products[d:, d:].trace()
        return float((own * x[:, d:]).sum() / max(1e-12, float(((own.T @ x[:, :d]) * own.T).sum() * y) ** 0.5))

    first = [follows(place) for place in range(len(parts))]
    odd = int(np.argmin(first))
    if first[odd] > STRANGE or sorted(first)[1] < STRANGE:
        return None
    agreed = [follows(place, [odd]) for place in range(len(parts)) if place != odd]
    return parts[odd].client if min(agreed) > AGREED else None


def _strange_columns(parts: Sequence[_Part], d: int) -> list[tuple[int, list[int], str]]:
    """Clients, columns of theirs that do not follow the others as elsewhere, and how.

    A column is compared with what the other clients' columns and labels say of it. It is reversed if the correlation is negative, beyond
    chance, and positive elsewhere; it is of other rows if the correlation is next to 0, and above `AGREED` everywhere else.
    """
    total, rows = np.sum([part.products for part in parts], axis=0), sum(part.rows for part in parts)
    follows, gains = np.zeros((len(parts), d)), np.zeros((len(parts), d + 1))
    for place, part in enumerate(parts):
        left = rows - part.rows
        inverse = np.linalg.inv((total - part.products) / left + RIDGE * np.eye(len(total)))
        weights = -inverse / inverse.diagonal()
        np.fill_diagonal(weights, 0.0)
        weights = weights[:, :d]
        related = (weights * part.products[:, :d]).sum(0)
        sizes = ((part.products @ weights) * weights).sum(0) * part.products.diagonal()[:d]
        follows[place] = np.where(sizes > 0, related / np.sqrt(np.maximum(sizes, 1e-300)), np.nan)
        gains[place, :d] = -2 * inverse.diagonal()[:d] * related  # what the log-likelihood of normal values gains by another sign
        gains[place, d] = 2 * (inverse[:d, d:] * part.products[:d, d:]).sum()
    counts = np.array([part.rows for part in parts])
    error = 1 / np.sqrt(counts - 3)
    sure = -NormalDist().inv_cdf(FALSE_ALARM / (2 * d * len(parts)))
    differing: list[tuple[int, list[int], str]] = []
    for place, part in enumerate(parts):
        others = np.arange(len(parts)) != place
        elsewhere, own = follows[others], follows[place]
        if not np.isfinite(own).any():
            continue
        known = np.isfinite(elsewhere).sum(0) >= FEWEST_OTHERS
        usual = np.nansum(elsewhere * counts[others, None], 0) / np.maximum(1, (np.isfinite(elsewhere) * counts[others, None]).sum(0))
        agreed = np.nanmin(np.where(np.isfinite(elsewhere), np.arctanh(np.clip(elsewhere, -0.999, 0.999)), np.inf), 0)
        apart = agreed - np.arctanh(np.clip(own, -0.999, 0.999)) > sure * error[place]
        against = (own < 0) & (own < -sure * error[place]) & (own < -usual / 2)
        turned = known & against & (usual > REVERSED_AGREED) & ~(elsewhere < -AGAINST * error[others, None]).any(0)
        strange = known & (np.abs(own) < STRANGE) & (agreed > np.arctanh(AGREED)) & apart
        best = int(np.argmax(np.where(turned, gains[place, :d], -np.inf)))
        if turned[best] and gains[place, best] >= OF_LABELS * gains[place, d]:
            where = "go with the other columns and the label as the reverse of those at all other clients"
            differing.append((part.client, [best], f"{where}; the relation differs there, or the sign or the codes 0 and 1 do"))
        elif not turned.any() and 0 < strange.sum() <= max(1, min(MOST_NAMED, d // 2)):
            differing.append(
                (part.client, np.flatnonzero(strange).tolist(), "do not follow the other columns as at all others; are they of other rows?")
            )
    return differing
