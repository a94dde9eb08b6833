"""What the folds of cross-fitted clustering reveal: a client's number of samples, its members, and the images of small clients.

Source: a client gives the means a and b of its samples' gradients, each of norm 1, over two random halves of its data. |a − b|²/4 is the
noise of a mean of n such vectors, about (1 − ⟨a, b⟩) / n: a reader of the Gram of the folds has this value. The membership of a known
sample is tested by a likelihood ratio of Gaussian errors, whitened by the spread of auxiliary samples of its label (Homer et al. 2008, for
means of genotypes; Sankararaman et al. 2009, this ratio). A fold of one sample is the sample's gradient: L-BFGS finds the image with this
sketched gradient (Zhu et al. 2019). `anchor_counts` finds label sets from folds in the clear, `gram_geometry` from their Gram.

What it proves: sample counts can be read wherever the Gram can, membership and images where folds are in the clear (or where a coalition
undoes the transform). What it does not prove: that the Gram hides members. A colluding client that sends a sample's whitened gradient in
place of its own fold reads the same inner products off the Gram. No recorded run has such a client (`membership_scores` takes inner
products).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls

from ...contract.transcript import payload_rows
from ...engine.device import placed, tensor
from ...engine.sample_gradients import sample_gradients
from ...federation.task_encoding import task_of
from ...protocols.orthonormal import TRANSFORMS
from ...protocols.sketch import Sketch, public_seed, sketch
from ...randomness import stream
from ...tasks.fold_gradients import FoldGradients
from ...tasks.halves import HALVES
from ...types import Array, ClientData
from ..adversary import AdversaryView, opened_rows
from ..evidence.sums import models_sent
from ..figures.leakage import Case, Cell, Prior, cell, nothing, psnr_db
from ..figures.significance import FEWEST_SCORES, chance_of_orders, orders
from ..inversion.image_search import LocalSteps, unroll
from ..inversion.lbfgs import minimise
from ..membership.member_scores import placements
from .gram_geometry import ClientProducts, products_of

__all__ = ["cells", "folds_in", "images_from_folds", "membership_scores", "sample_vectors", "samples_from_products", "traces_of"]

NAME = "fold_release"
SAMPLES, ORDER, MEMBERS, IMAGES = "samples_error", "samples_order_auc", "fold_membership_auc", "image_psnr_db"
MARGIN = {SAMPLES: 0.1, ORDER: 0.05, MEMBERS: 0.05, IMAGES: 3.0}
ASKED = 20
"""Members asked about, and as many others, of each client."""
RIDGE = 0.1
"""Of the mean variance of a coordinate, added to each: auxiliary samples may be fewer than coordinates."""
MOST_SAMPLES, CLIENTS_TRIED, RESTARTS, ITERATIONS = 2, 4, 2, 400
"""Of clients with at most so many samples images are sought, for so many folds; starts for each label, steps."""


# --- the mathematics, for folds and Gram matrices from anywhere ---------------------------------------------------------------------


def traces_of(products: Array) -> Array:
    """|a − b|²/4 (n,) of clients' folds, from their inner products (n, 2, n, 2)."""
    own = products[np.arange(len(products)), :, np.arange(len(products)), :]
    return np.asarray((own[:, 0, 0] + own[:, 1, 1] - 2 * own[:, 0, 1]) / 4)


def samples_from_products(products: Array) -> Array:
    """How many samples clients have (n,), from the inner products (n, 2, n, 2) of their folds: (1 − ⟨a, b⟩) / t.

    n vectors of norm 1 with a mean of squared norm u have a mean whose noise trace is (1 − u) / n, and ⟨a, b⟩ is unbiased for u.
    """
    own = products[np.arange(len(products)), 0, np.arange(len(products)), 1]
    return np.asarray(np.maximum(1 - own, 0.0) / np.maximum(traces_of(products), 1e-300))


def membership_scores(products: Array, own: Array, samples: float) -> Array:
    """Log likelihood ratios (c,) that candidates are in one of a client's folds, larger for members.

    products: (2, c), of what the folds hold beyond their label means with each whitened candidate, ⟨f − m, Σ⁻¹(x − m_y)⟩. own: (c,), the
    candidates' own ⟨x − m_y, Σ⁻¹(x − m_y)⟩. A member weighs 2 / `samples` in its fold, whose error has the variance 2Σ / `samples`.
    """
    return np.asarray(np.logaddexp.reduce(products - own / samples, axis=0))


def sample_vectors(task: FoldGradients, anchor: Array, x: Array, y: Array) -> Array:
    """What single samples add to a fold (n, D): gradients of norm 1, sketched as folds are."""
    rows = []
    for block in sample_gradients(task.model, anchor, ClientData(0, x, y, x[:0], y[:0])):
        rows.append(torch.nn.functional.normalize(torch.nan_to_num(block, 0.0, 0.0, 0.0).double(), dim=1).cpu().numpy())
    whole = np.concatenate(rows)
    return whole if task.model.dimension <= task.sketch else np.asarray(_sketch(task).apply(whole))


def _sketch(task: FoldGradients) -> Sketch:
    return sketch(public_seed("crossfit", task.seed), task.model.dimension, task.sketch)


def images_from_folds(
    task: FoldGradients, anchor: Array, folds: Array, rng: np.random.Generator, *, restarts: int = RESTARTS, iterations: int = ITERATIONS
) -> tuple[Array, Array]:
    """Images (m, *shape) and labels (m,) of the single samples that folds (m, D) are of.

    Every label is tried from several starts; the image whose sketched gradient of norm 1 is nearest is returned.
    """
    model, count = task.model, len(folds)
    labels = placed(torch.arange(model.classes).repeat_interleave(restarts).repeat(count)[:, None])
    each = model.classes * restarts
    target = np.repeat(np.asarray(folds, np.float64), each, axis=0)
    theta = tensor(np.asarray(anchor, np.float64))[None]
    made = unroll(model, LocalSteps())
    short = None if model.dimension <= task.sketch else _sketch(task)

    def objective(points: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        point = points.detach().requires_grad_(True)
        update = made(theta.expand(len(point), -1), point.view(len(point), 1, *model.shape), labels[rows])
        vectors = -torch.nn.functional.normalize(update, dim=1)
        seen = vectors.detach().cpu().numpy()
        left = (seen if short is None else short.apply(seen)) - target[rows.cpu().numpy()]
        back = tensor(2 * (left if short is None else short.transposed(left)))
        return tensor((left**2).sum(1)), torch.autograd.grad(vectors, point, back)[0]

    begin = tensor(rng.random((count * each, int(np.prod(model.shape)))))
    points, left = minimise(objective, begin, iterations, tolerance=1e-20)
    distances = np.nan_to_num(left.cpu().numpy().reshape(count, each), nan=np.inf)
    best = np.arange(count) * each + distances.argmin(1)
    images = np.clip(points.cpu().numpy()[best].reshape(count, *model.shape), 0.0, 1.0)
    return images, labels.cpu().numpy()[best, 0]


# --- the attack ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FoldSetting:
    """The public task that clients were asked, and the model at which gradients are taken."""

    task: FoldGradients
    anchor: Array


def setting_in(view: AdversaryView) -> FoldSetting | None:
    """What the first request for folds says; None where there is none."""
    for message in view.select("compute", "parameters"):
        if message.context.get("task") == FoldGradients.__name__:
            task, sent = task_of(message.context["settings"]), models_sent(view, message)
            if isinstance(task, FoldGradients) and "model" in sent:
                return FoldSetting(task, sent["model"])
    return None


def folds_in(view: AdversaryView, dimension: int) -> dict[int, Array]:
    """The folds (2, D) that the adversary reads in the clear: `dimension` is that of the model. None under a transform it cannot undo."""
    folds: dict[int, Array] = {}
    for message in view.select("gram", "folds"):
        if message.payload is None or "rows" not in message.payload:
            continue
        name = f"gram/{message.context['epoch']}"
        if any(stage in TRANSFORMS for stage in view.protection.gram) and view.secret_of(name) is None:
            continue
        rows = opened_rows(view, np.asarray(message.payload["rows"], np.float64), name, "gram", dimension)
        for client, row in zip(payload_rows(message), () if rows is None else rows, strict=rows is not None):
            folds.setdefault(client, row)
    return folds


def guess_samples(products: Array | None, prior: Prior, count: int) -> Array:
    """The number of samples of each of `count` clients; without a view the median of all for everyone, as if the attacker knew it."""
    if products is None:
        return np.full(count, float(np.median(list(prior.samples_per_client.values()))))
    return np.maximum(samples_from_products(products), 1.0)


def samples_cells(case: Case) -> list[Cell]:
    """|log(n̂ / n)| by client, and how often two clients are put into the right order, from the Gram of the folds."""
    observed, reference = products_of(case)
    fitting = observed is not None and reference is not None and observed[1].shape[1] == reference[1].shape[1] == HALVES
    if observed is None or reference is None or not fitting or setting_in(case.reference) is None:
        return [nothing(case, NAME, SAMPLES, "no folds, and no Gram of folds, can be read in this view")]
    clients = sorted((set(observed[0]) & set(reference[0])) - set(case.view.coalition))
    true = np.array([case.truth.label_counts[client].sum() for client in clients], np.float64)
    if len(set(true.tolist())) < 2:
        return [nothing(case, NAME, SAMPLES, "all clients have equally many samples, which is public: there is nothing to find")]
    guesses = [guess_samples(products, case.prior, len(clients)) for products in (_of(observed, clients), None, _of(reference, clients))]
    note = "(1 − ⟨a, b⟩) / (|a − b|²/4) of the folds; no client's number of samples is used; baseline: the median number for everyone"
    errors, order = [np.abs(np.log(estimate / true)) for estimate in guesses], [orders(estimate, true) for estimate in guesses]
    words = f"the share of pairs of clients in the right order of size, by {note}"
    first, second = (chance_of_orders(estimate, true, stream(case.seed, "numbers of samples dealt again")) for estimate in guesses[::2])
    return [
        cell(case, NAME, SAMPLES, *errors, margin=MARGIN[SAMPLES], lower_is_better=True, note=f"|log(n̂/n)|, {note}"),
        cell(case, NAME, ORDER, *order, margin=MARGIN[ORDER], note=words, chances=(first, second)),
    ]


def _of(products: ClientProducts, clients: Sequence[int]) -> Array:
    places = [products[0].index(client) for client in clients]
    return np.asarray(products[1][np.ix_(places, range(HALVES), places, range(HALVES))])


@dataclass(frozen=True, eq=False)
class LabelSpread:
    """Of auxiliary samples' vectors (·, D): the mean of each label (classes, D), and whitening by the spread within labels (D, D)."""

    means: Array
    precision: Array


def label_spread(vectors: Array, y: Array, classes: int) -> LabelSpread:
    """From single samples' vectors (n, D) and labels (n,)."""
    means = np.stack([vectors[y == label].mean(0) if (y == label).any() else np.zeros(vectors.shape[1]) for label in range(classes)])
    apart = vectors - means[y]
    covariance = apart.T @ apart / len(y)
    covariance[np.diag_indices_from(covariance)] += RIDGE * np.trace(covariance) / len(covariance)
    return LabelSpread(means, np.linalg.inv(covariance))


def member_scores_of(folds: Array, spread: LabelSpread, vectors: Array, y: Array, samples: float) -> Array:
    """Scores (c,) of candidates, larger for members of one client's folds (2, D)."""
    beyond = np.stack([fold - spread.means.T @ nnls(spread.means.T, fold)[0] for fold in folds])
    apart = vectors - spread.means[y]
    whitened = apart @ spread.precision
    return membership_scores(beyond @ whitened.T, (apart * whitened).sum(1), samples)


def asked_of(case: Case, client: int) -> tuple[Array, Array, Array] | None:
    """Members and others (x, y, is member) of one client, label by label; None for too few."""
    (x, y), (other_x, other_y) = case.truth.data[client], case.truth.outside[client]
    rng = stream(case.seed, f"{NAME}: asked", client)
    inside, outside = [], []
    for label in np.unique(y):
        own_rows, other_rows = (rng.permutation(np.flatnonzero(of == label)) for of in (y, other_y))
        both = min(len(own_rows), len(other_rows))
        inside += own_rows[:both].tolist()
        outside += other_rows[:both].tolist()
    chosen = rng.permutation(len(inside))[:ASKED]
    if len(chosen) < FEWEST_SCORES:
        return None
    inside, outside = [inside[i] for i in chosen], [outside[i] for i in chosen]
    member = np.arange(2 * len(chosen)) < len(chosen)
    return np.concatenate([x[inside], other_x[outside]]), np.concatenate([y[inside], other_y[outside]]), member


def members_cell(case: Case) -> Cell:
    """The AUC by client of whether samples are in its folds, for folds in the clear."""
    setting = setting_in(case.view) or setting_in(case.reference)
    if setting is None:
        return nothing(case, NAME, MEMBERS, "no folds are in this view")
    observed, reference = (folds_in(view, setting.task.model.dimension) for view in (case.view, case.reference))
    if not observed and products_of(case)[0] is not None:
        why = "not attempted: only inner products of folds are seen; a colluding client that sends a sample's gradient as its fold has more"
        return nothing(case, NAME, MEMBERS, why)
    readable = sorted((set(observed) & set(reference)) - set(case.view.coalition))
    clients = [client for client in readable if asked_of(case, client) is not None]
    if len(clients) < FEWEST_SCORES:
        why = f"not attempted: folds of fewer than {FEWEST_SCORES} clients with samples to ask about are in this view"
        return nothing(
            case, NAME, MEMBERS, why if set(observed) - set(case.view.coalition) else "no folds of others can be read in this view"
        )
    asked = {client: asked for client in clients if (asked := asked_of(case, client)) is not None}
    known = {sample.tobytes() for x, _, _ in asked.values() for sample in x}
    fresh = np.array([sample.tobytes() not in known for sample in case.prior.x.astype(next(iter(asked.values()))[0].dtype)])
    x, y = case.prior.x[fresh], case.prior.y[fresh]
    if len(y) == 0:
        return nothing(case, NAME, MEMBERS, "not attempted: all auxiliary samples are among those asked about; the data are too few")
    spread = label_spread(sample_vectors(setting.task, setting.anchor, x, y), y, case.prior.classes)
    figures: list[list[float]] = [[], [], []]
    for place, client in enumerate(clients):
        candidates, labels, member = asked[client]
        vectors = sample_vectors(setting.task, setting.anchor, candidates, labels)
        others = clients[(place + 1) % len(clients)]
        for figure, folds in zip(figures, (observed[client], observed[others], reference[client]), strict=True):
            scores = member_scores_of(folds, spread, vectors, labels, case.prior.samples_per_client[client])
            figure.append(float(placements(scores, member)[0].mean()))
    note = (
        f"{np.mean([m.sum() for _, _, m in asked.values()]):.0f} members and as many others of the same labels a client; likelihood ratio, "
        f"whitened by {len(y)} auxiliary samples; {case.prior.description}; baseline: the same on another client's folds"
    )
    return cell(case, NAME, MEMBERS, *(np.array(values) for values in figures), margin=MARGIN[MEMBERS], note=note)


def images_cell(case: Case) -> tuple[Cell, dict[str, Array] | None]:
    """The PSNR of the images of clients so small that a fold is one sample."""
    setting = setting_in(case.view) or setting_in(case.reference)
    if setting is None:
        return nothing(case, NAME, IMAGES, "no folds are in this view"), None
    observed, reference = (folds_in(view, setting.task.model.dimension) for view in (case.view, case.reference))
    clients = sorted((set(observed) & set(reference)) - set(case.view.coalition))
    small = [client for client in clients if case.prior.samples_per_client[client] <= MOST_SAMPLES][:CLIENTS_TRIED]
    if not small:
        why = f"not attempted: no client has at most {MOST_SAMPLES} samples, so that a fold is one; images may still leak"
        return nothing(case, NAME, IMAGES, why if clients else "no folds can be read in this view"), None
    same = all(np.array_equal(observed[client], reference[client]) for client in small)
    made = []
    for folds in (observed,) if same else (observed, reference):
        rng = stream(case.seed, f"{NAME}: images")
        made.append([images_from_folds(setting.task, setting.anchor, folds[client], rng)[0] for client in small])
    mean = case.prior.x.mean(0, dtype=np.float64)
    truths = [case.truth.data[client][0] for client in small]
    scored = []
    for images in (made[0], [np.stack([mean] * MOST_SAMPLES)] * len(small), made[-1]):
        scored.append(np.array([_best_pairing(true, guessed) for true, guessed in zip(truths, images, strict=True)]))
    note = f"{len(small)} clients of at most {MOST_SAMPLES} samples, every label tried; baseline: the mean auxiliary image"
    arrays = {"clients": np.array(small), "truth": np.stack([t[0] for t in truths])}
    arrays |= {"recovered": np.stack([_nearest(t[0], image) for t, image in zip(truths, made[0], strict=True)]), "baseline": mean}
    return cell(case, NAME, IMAGES, *scored, margin=MARGIN[IMAGES], note=note), arrays


def _best_pairing(true: Array, guessed: Array) -> float:
    """The mean PSNR of a client's images, each guess for one of them, in the better order."""
    orders = ((0, 1), (1, 0)) if len(true) == MOST_SAMPLES else ((0,),)
    return max(float(np.mean([psnr_db(true[i], guessed[at]) for i, at in enumerate(order)])) for order in orders)


def _nearest(true: Array, guessed: Array) -> Array:
    return np.asarray(max(guessed, key=lambda image: psnr_db(true, image)))


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Sample counts from the Gram, members and single images from folds in the clear."""
    image, arrays = images_cell(case)
    return [*samples_cells(case), members_cell(case), image], arrays
