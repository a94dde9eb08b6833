"""Sybil span: a client's vectors from their inner products with vectors that the attacker knows.

Source: linear algebra. Who reads inner products of an unknown vector with known ones knows its projection onto their span; when they span
the space, all of it. Colluding clients know their own vectors, and clients made up for the purpose (Sybils) choose them.

What it proves: a Gram that is open to somebody protects coordinates only while few of its rows are known. With p = 3 vectors a client,
d/3 colluders suffice for dimension d. What it does not: the attack needs the inner products; where they are encrypted and only labels come
back, it has nothing. Colluders here are honest clients of the run (their vectors are alike, hence worse than chosen ones); a Sybil that
picks unit vectors would need no luck.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ...randomness import stream
from ...types import Array
from ..figures.leakage import Case, Cell, Prior, cell, nothing
from ..figures.significance import FEWEST_SCORES
from .gram_geometry import ClientProducts, products_of, rows_known

__all__ = ["COLLUDERS", "cells", "rows_from_products"]

NAME = "sybil_span"
COLLUDERS = (5, 20)
MARGIN = 0.05
RCOND = 1e-8


def rows_from_products(products: Array, known: Array) -> Array:
    """Vectors (p, d) of least norm with inner products (p, m) with `known` vectors (m, d); exact if the known vectors span the space."""
    return np.asarray(np.asarray(products, np.float64) @ np.linalg.pinv(np.asarray(known, np.float64), rcond=RCOND).T)


def guess(client_products: ClientProducts | None, prior: Prior, known: Mapping[int, Array], clients: Sequence[int]) -> dict[int, Array]:
    """Vectors (p, d) of `clients`. Without a view: those of a simulated client with all auxiliary data, for everyone."""
    if client_products is None:
        made = prior.simulate([(prior.x, prior.y)])
        shape = next(iter(known.values())).shape
        return dict.fromkeys(clients, np.zeros(shape) if made is None else made[0])
    order, products = client_products
    places = [order.index(client) for client in known]
    beside = np.concatenate([np.asarray(rows, np.float64) for rows in known.values()])
    p = products.shape[1]
    return {client: rows_from_products(products[order.index(client)][:, places].reshape(p, -1), beside) for client in clients}


def score(guessed: Mapping[int, Array], rows: Mapping[int, Array], clients: Sequence[int]) -> Array:
    """‖V̂ − V‖ / ‖V‖ by client; each vector with the better of its two signs."""
    errors = []
    for client in clients:
        truth, made = np.asarray(rows[client], np.float64), guessed[client]
        signs = np.where((truth * made).sum(axis=1) < 0, -1.0, 1.0) if len(truth) > 1 else np.ones(1)
        errors.append(float(np.linalg.norm(made * signs[:, None] - truth) / max(float(np.linalg.norm(truth)), 1e-300)))
    return np.array(errors)


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The relative error with 5 and 20 colluding clients, of three quarters of all clients at most."""
    metric = "relative_error"
    observed, reference = products_of(case)
    clients = sorted((set(observed[0]) & set(reference[0]) & set(case.rows)) - set(case.view.coalition)) if observed and reference else []
    if len(clients) < 2 * FEWEST_SCORES:
        why = f"not attempted: inner products of {len(clients)} clients are in this view, fewer than {2 * FEWEST_SCORES}"
        return [nothing(case, NAME, metric, why if clients else "no inner products of others are in this view", 0)], None
    sent = rows_known(case, clients)
    if not sent:
        why = "not attempted: what clients compare cannot be imitated here, so colluders know no vectors"
        return [nothing(case, NAME, metric, why, 0)], None
    figures = []
    most = 3 * len(case.prior.samples_per_client) // 4
    for k in sorted({min(k, most) for k in COLLUDERS}):
        if len(clients) - k < FEWEST_SCORES:
            why = f"not attempted: only {len(clients)} clients were compared, too few besides {k} colluders"
            figures.append(nothing(case, NAME, metric, why, k))
            continue
        drawn = stream(case.seed, f"colluders {k}").permutation(len(clients))
        rest = [clients[i] for i in sorted(drawn[k:])]
        errors = []
        for client_products, prior, rows in ((reference, case.prior.unprotected(), case.rows), (observed, case.prior, sent)):
            known = {clients[i]: rows[clients[i]] for i in drawn[:k]}
            errors += [score(guess(seen, prior, known, rest), rows, rest) for seen in (client_products, None)]
        p, d = next(iter(known.values())).shape
        rank = int(np.linalg.matrix_rank(np.concatenate(list(known.values())), tol=RCOND))
        note = f"{k} colluders, p = {p}: their vectors span {rank} of {d} dimensions; baseline: the vectors of the pooled auxiliary data"
        there, there_blank, here, here_blank = errors
        figures.append(
            cell(
                case, NAME, metric, here, here_blank, there, reference_blank=there_blank, margin=MARGIN, lower_is_better=True, k_known=k,
                note=note,
            )
        )  # fmt: skip
    return figures, None
