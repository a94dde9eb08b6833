"""Gram geometry: labels from inner products alone, given k clients whose data the attacker knows.

Source: a rotation, or encryption with a released Gram, keeps all inner products (Sattler et al. 2019 send rotated updates; PACFL's angles
are functions of them). A client's inner products with k known clients are those of a simulated client with the same labels, which the
attacker makes from auxiliary data by running the public pipeline. With k = 0 there is nothing to hold on to but the Gram itself: label sets
are dealt so that the whole Gram fits that of simulated clients best (a quadratic assignment, `assignment`).

What it proves: hiding coordinates does not hide labels from a reader of the Gram who knows a few clients' data. What it does not: "the Gram
leaks labels" without a k: with k = 0 a wrong naming of labels fits better than the true one in some runs, and all clients are wrong
together. Only Grams of what clients send at the start are attacked (signatures, anchor gradients); those of updates are in `gram_updates`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb

import numpy as np

from ...contract.transcript import payload_rows
from ...protocols import ckks
from ...randomness import stream
from ...types import Array
from ..adversary import AdversaryView
from ..evidence.encrypted import Blocks, decrypted_blocks
from ..figures.leakage import Case, Cell, Prior, Truth, cell, chance_of_names, label_sets_of, nothing, popular_set
from ..figures.significance import FEWEST_SCORES
from .assignment import assign, renamings_of

__all__ = ["KINDS", "KNOWN", "ComparedProducts", "cells", "compared", "guess", "labels_from_gram", "products_in"]

NAME = "gram_geometry"
KNOWN = (0, 3, 10)
"""How many clients' data the attacker knows, one figure each."""
MARGIN = 0.1
FEWEST_CLIENTS = 2 * FEWEST_SCORES
MOST_SETS = 260
PRETENDED, MOST_PRETENDED = 3, 400
"""Simulated clients for each label set, and about how many altogether."""
KINDS = ("signature", "representation", "folds")
"""What this attack reads inner products of."""
RELEASE_ERROR = 1e-4
"""About the largest noise of a released inner product of unit vectors: what completion takes for rounding."""
ClientProducts = tuple[tuple[int, ...], Array]


# --- the mathematics, for a Gram from anywhere --------------------------------------------------------------------------------------


def labels_from_gram(
    products: Array, known: Mapping[int, Array], templates: Mapping[frozenset[int], Array], *, seed: int = 0
) -> list[frozenset[int]]:
    """The label set of each of n clients from their inner products (n, p, n, p).

    `known` are the vectors (p, d) of known clients, by place. `templates` are the vectors of simulated clients by label set: (p, d), or
    (t, p, d) of t clients each, the same t for all. If `known` is empty, the whole Gram is matched instead.
    """
    n, p = products.shape[:2]
    sets = list(templates)
    rows = np.stack([np.asarray(templates[label_set], np.float64) for label_set in sets])
    rows = rows[:, None] if rows.ndim == 3 else rows
    if known:
        places = sorted(known)
        beside = np.concatenate([np.asarray(known[place], np.float64) for place in places])
        blocks = np.einsum("stpd,kd->stpk", rows, beside).reshape(-1, p, len(places), p)
        pretended = _shape_of(blocks).reshape(len(sets), -1, p, len(places), p).mean(axis=1)
        seen = _shape_of(products[:, :, places])
        distance = ((seen[:, None] - pretended[None]) ** 2).reshape(n, len(sets), -1).sum(axis=2)
        return [sets[int(best)] for best in distance.argmin(axis=1)]
    assignment = assign(_length_of(products), _between(rows), renamings=renamings_of(sets), seed=seed)
    return [sets[kind] for kind in assignment.kinds]


def _between(rows: Array) -> Array:
    """The mean of `_length_of` between clients of two kinds, (K, K), from vectors (K, t, p, d); within one kind of different clients."""
    count, each, p, _ = rows.shape
    flat = rows.reshape(count * each * p, -1)
    lengths = _length_of((flat @ flat.T).reshape(count * each, p, count * each, p)).reshape(count, each, count, each)
    between = lengths.mean(axis=(1, 3))
    if each > 1:
        among = np.arange(count)
        own = lengths[among, :, among]
        between[among, among] = own[:, ~np.eye(each, dtype=bool)].mean(axis=1)
    return np.asarray(between)


def _shape_of(blocks: Array) -> Array:
    """Inner products without the signs that singular vectors do not have; those of single vectors as they are."""
    return blocks if blocks.shape[1] == 1 else np.abs(blocks)


def _length_of(blocks: Array) -> Array:
    """One number a pair, (n, m) of (n, p, m, p): what does not depend on the basis of a span; a single vector's product as it is."""
    return blocks[:, 0, :, 0] if blocks.shape[1] == 1 else np.sqrt((blocks**2).sum(axis=(1, 3)))


# --- the attack ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GramLabelGuess:
    """A label set for each client."""

    label_sets: Mapping[int, frozenset[int]] = field(default_factory=dict)


def products_in(view: AdversaryView, everyone: Sequence[int] = (), shape: tuple[int, int] = (0, 0)) -> ClientProducts | None:
    """Clients, and the inner products (n, p, n, p) of the vectors of the first clustering epoch in the view; None without one.

    From rows under any orthonormal transform, from a Gram that was released block by block, or, for a key holder, from what it decrypts;
    for that it has to know the ids of `everyone` on the roster and the public `shape` (p, d) of what clients send.
    """
    return _products_of_rows(view) or _products_of_blocks(_released_blocks(view) or decrypted_blocks(view, everyone, shape))


def _released_blocks(view: AdversaryView) -> Blocks:
    blocks: Blocks = {}
    for message in view.select("gram", "gram"):
        if message.payload is not None and "block" in message.payload and message.context.get("epoch") == 0:
            for pair, block in zip(message.payload["pair"], message.payload["block"], strict=True):
                blocks[int(pair[0]), int(pair[1])] = np.asarray(block, np.float64)
    return blocks


def _products_of_blocks(blocks: Blocks) -> ClientProducts | None:
    """The whole of inner products from blocks (p, p) of pairs. Where only landmarks were compared with everybody, the rest is completed
    from these, as who clusters does it; None where nobody was compared with everybody."""
    clients = sorted({client for pair in blocks for client in pair})
    landmarks = [client for client in clients if all((client, other) in blocks or (other, client) in blocks for other in clients)]
    if not landmarks:
        return None
    p = len(next(iter(blocks.values())))
    complete = len(landmarks) == len(clients)
    whole = ckks.gram_matrix(clients, blocks, () if complete else landmarks, RELEASE_ERROR).reshape(len(clients), p, len(clients), p)
    for (a, b), block in blocks.items():  # what was seen stands
        i, j = clients.index(a), clients.index(b)
        whole[i, :, j], whole[j, :, i] = block, block.T
    return tuple(clients), whole


def _products_of_rows(view: AdversaryView) -> ClientProducts | None:
    clients: list[int] = []
    rows: list[Array] = []
    epoch = None
    for message in view.select("gram"):
        if message.kind not in KINDS or message.payload is None or "rows" not in message.payload:
            continue
        epoch = message.context.get("epoch") if epoch is None else epoch
        if message.context.get("epoch") == epoch:
            clients += payload_rows(message)
            rows += list(np.asarray(message.payload["rows"], dtype=np.float64))
    if not clients:
        return None
    stacked = np.stack(rows)
    n, p, d = stacked.shape
    flat = stacked.reshape(n * p, d)
    return tuple(clients), (flat @ flat.T).reshape(n, p, n, p)


def guess(
    gram: ClientProducts, prior: Prior, known: Mapping[int, Array], templates: Mapping[int, Mapping[frozenset[int], Array]], seed: int
) -> GramLabelGuess:
    """Label sets for all clients that are not known. `templates[size]` are those for clients with `size` labels."""
    clients, products = gram
    guessed: dict[int, frozenset[int]] = {}
    places = {clients.index(client): rows for client, rows in known.items()}
    for size in sorted(templates):
        unknown = [i for i, client in enumerate(clients) if client not in known and prior.labels_per_client[client] == size]
        kept = sorted({*unknown, *places})
        if not unknown:
            continue
        inside = {kept.index(place): rows for place, rows in places.items()}
        sets = labels_from_gram(products[kept][:, :, kept], inside, templates[size], seed=seed)
        guessed |= {clients[place]: labels for place, labels in zip(kept, sets, strict=True) if place in unknown}
    return GramLabelGuess(guessed)


def simulated_templates(prior: Prior, size: int, samples: int) -> dict[frozenset[int], Array]:
    """What several clients with each set of `size` labels would send, (t, p, d), made of auxiliary data by the public pipeline; empty where
    it cannot be."""
    sets, data = [], []
    rng = stream(prior.seed, f"simulated clients {size}")
    pools = [np.flatnonzero(prior.y == label) for label in range(prior.classes)]
    repeats = max(1, min(PRETENDED, MOST_PRETENDED // comb(prior.classes, size)))
    for chosen in label_sets_of(range(prior.classes), size):
        each = min(min(len(pools[label]) for label in chosen), max(1, samples // size))
        if each == 0:
            continue
        sets.append(chosen)
        for _ in range(repeats):
            places = np.concatenate([rng.permutation(pools[label])[:each] for label in sorted(chosen)])
            data.append((prior.x[places], prior.y[places]))
    rows = prior.simulate(data) if data else None
    if rows is None:
        return {}
    kept = np.stack([_mean(row, prior) for row in rows])
    return dict(zip(sets, kept.reshape(len(sets), repeats, *kept.shape[1:]), strict=True))


def _mean(rows: Array, prior: Prior) -> Array:
    """Vectors (p, d) of a client; of two halves of its data their mean, unless they are principal vectors, which have no mean."""
    return rows.mean(axis=0, keepdims=True) if prior.halves and not prior.of_samples else rows


def _of_means(products: ClientProducts | None, prior: Prior) -> ClientProducts | None:
    """The inner products of what `_mean` gives: these have signs, which those of principal vectors have not."""
    if products is None or not prior.halves or prior.of_samples:
        return products
    return products[0], products[1].mean(axis=(1, 3), keepdims=True)


def score(guess: GramLabelGuess, truth: Truth, clients: Sequence[int]) -> Array:
    """1 where a client's label set is right."""
    return np.array([float(guess.label_sets[client] == truth.label_sets[client]) for client in clients])


def products_of(case: Case) -> tuple[ClientProducts | None, ClientProducts | None]:
    """The inner products in the view of a case, and in its reference."""
    first = next(iter(rows_known(case, list(case.rows)[:1]).values()), np.zeros((0, 0)))
    shape = (int(first.shape[0]), int(first.shape[1]))
    return products_in(case.view, sorted(case.prior.samples_per_client), shape), products_in(case.reference)


@dataclass(frozen=True, eq=False)
class ComparedProducts:
    """What there is to attack: the inner products in the view of a case (`observed`) and in its `reference`, and by number of labels
    the templates for each; `judged` are the clients whose label sets are looked for."""

    observed: ClientProducts
    reference: ClientProducts
    templates: Mapping[int, Mapping[frozenset[int], Array]]
    plain: Mapping[int, Mapping[frozenset[int], Array]]
    judged: tuple[int, ...]


def compared(case: Case) -> ComparedProducts | str:
    """What there is to attack, or why there is nothing."""
    prior = case.prior
    observed, reference = (_of_means(products, prior) for products in products_of(case))
    clients = sorted((set(observed[0]) & set(reference[0]) & set(case.rows)) - set(case.view.coalition)) if observed and reference else []
    if observed is None or reference is None or not clients:
        return "no Gram of signatures, anchor gradients or folds of others is in this view"
    if len(clients) < FEWEST_CLIENTS:
        return f"not attempted: the Gram in this view is of {len(clients)} clients, fewer than {FEWEST_CLIENTS}"
    sizes = {prior.labels_per_client[client] for client in clients}
    fits = {size for size in sizes if size < prior.classes and comb(prior.classes, size) <= MOST_SETS}
    samples = int(np.median([prior.samples_per_client[client] for client in clients]))
    templates = {size: made for size in sorted(fits) if (made := simulated_templates(prior, size, samples))}
    plain = templates
    if prior.private:
        plain = {size: made for size in templates if (made := simulated_templates(prior.unprotected(), size, samples))}
    judged = tuple(
        client for client in clients if prior.labels_per_client[client] in templates and prior.labels_per_client[client] in plain
    )
    if len(judged) >= FEWEST_CLIENTS:
        return ComparedProducts(observed, reference, templates, plain, judged)
    if min(sizes) == prior.classes:
        return "every client has all labels: there is no label set to find"
    return "not attempted: too many label sets are possible, or auxiliary data are too few"


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """One figure for each k; known clients are drawn anew several times, and each client scored where it is not known."""
    prior, metric = case.prior, "label_set_accuracy"
    seen = compared(case)
    if isinstance(seen, str):
        return [nothing(case, NAME, metric, seen, 0)], None
    judged = seen.judged
    popular = popular_set([case.truth.label_sets[c] for c in judged])
    blank = np.array([float(case.truth.label_sets[c] == popular) for c in judged])
    figures = []
    rows = {client: _mean(row, prior) for client, row in rows_known(case, judged).items()}
    clear_rows = {client: _mean(row, prior) for client, row in case.rows.items()}
    for k in KNOWN:
        if len(judged) - k < FEWEST_SCORES:
            why = f"not attempted: only {len(judged)} clients, with {k} known too few are left to find"
            figures.append(nothing(case, NAME, metric, why, k))
            continue
        if k:
            pairs = ((seen.observed, seen.templates, rows), (seen.reference, seen.plain, clear_rows))
            right, chances = [_drawn(case, *of, judged, k) for of in pairs], None
        else:
            of = ((seen.observed, seen.templates), (seen.reference, seen.plain))
            (first, p), (second, q) = (_unaided(case, *inputs, judged, blank) for inputs in of)
            right, chances = [first, second], (p, q)
        scored = np.isfinite(right[0])
        draws = f"{case.budget.draws if k else 1} draw(s)"
        note = f"{k} client(s) whose data are known, {draws}; {prior.description}; baseline: the most common label set for everyone"
        parts = (scores[scored] for scores in (right[0], blank, right[1]))
        figures.append(cell(case, NAME, metric, *parts, margin=MARGIN, k_known=k, note=note, chances=chances))
    return figures, None


def rows_known(case: Case, clients: Sequence[int]) -> Mapping[int, Array]:
    """What `clients` would have compared, (p, d) by client, as whoever has their data works it out: clipped and sketched as they do."""
    if not case.prior.private:
        return case.rows
    made = case.prior.simulate([case.truth.data[client] for client in clients])
    return {} if made is None else dict(zip(clients, made, strict=True))


def _unaided(
    case: Case, products: ClientProducts, templates: Mapping[int, Mapping[frozenset[int], Array]], judged: Sequence[int], blank: Array
) -> tuple[Array, float]:
    """Scores of each client without known ones, and how probable they are beside `blank` (n,) by chance: labels are named all at once."""
    made = guess(products, case.prior, {}, templates, case.seed)
    sets, real = ([of.label_sets[client] for client in judged] for of in (made, case.truth))
    return score(made, case.truth, judged), chance_of_names(sets, real, blank, MARGIN, case.prior.classes, case.seed)


def _drawn(
    case: Case, products: ClientProducts, templates: Mapping[int, Mapping[frozenset[int], Array]], rows: Mapping[int, Array],
    judged: Sequence[int], k: int,
) -> Array:  # fmt: skip
    """Mean score of each client over draws of k ≥ 1 known ones, NaN for one that was known in all."""
    scores = np.full((case.budget.draws, len(judged)), np.nan)
    for draw in range(len(scores)):
        chosen = stream(case.seed, f"known clients {k}", draw).permutation(len(judged))[:k]
        known = {judged[i]: rows[judged[i]] for i in chosen}
        rest = [i for i in range(len(judged)) if i not in set(chosen.tolist())]
        made = guess(products, case.prior, known, templates, case.seed)
        scores[draw, rest] = score(made, case.truth, [judged[i] for i in rest])
    return np.array([column[np.isfinite(column)].mean() if np.isfinite(column).any() else np.nan for column in scores.T])
