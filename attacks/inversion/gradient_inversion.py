"""Gradient inversion: a client's training images, or words, from the update it sent.

Images are sought by a ladder of methods, the strongest that fits (`inversion_ladder`): closed form, SPEAR and a feature decoder read the
update of the first linear layer. The optimisation (`image_search`) is the last of them. Words are read from the rows of an embedding
(`token_recovery`).

Source of the optimisation: Zhu et al. 2019 (DLG: images whose gradient is the one seen, by L-BFGS), Zhao et al. 2020 (iDLG: the label
first, from the bias gradient), Geiping et al. 2020 (cosine distance and total variation; several local steps by unrolling them).
Deviations: labels come from the head's bias with auxiliary predictions, so that several images and steps are served too; all images,
starts and clients are rows of one batched L-BFGS in float64; the distance is taken relative to the length of the update.

What it proves: with a smooth network and few images and steps, an update in the clear is the images. What it does not: that many images or
many steps hide anything because no method here gets there; where the unprotected reference fails, cells say `not_validated`.
Batches in an order that the attacker does not know (more samples than the batch size) are not attempted, nor are steps other than those of
plain SGD (`_refusal`): Adam, proximal terms, control variates, MAML. Gradients that are sent as such (IFCA's option I)
are one step of rate 1, with their sign turned.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from ...engine.models import Model
from ...randomness import stream
from ...types import Array, ClientData
from ..adversary import AdversaryView
from ..evidence.local_training import LocalTraining
from ..evidence.trained_by import trained_by
from ..evidence.updates import (
    ClientStep,
    blind,
    local_of,
    mean_updates,
    public_model,
    single_steps,
    step_of,
    steps_in,
    trainings_of,
    unread_movement,
)
from ..figures.leakage import Case, Cell, Prior, Truth, cell, nothing, psnr_db, ssim
from ..figures.significance import chance_of_draws, power
from ..labels.label_readings import bias_span, shares_of
from .image_search import LocalSteps, invert_updates
from .inversion_ladder import MATCHING, MOST_MATCHED, fitting_layer, images_by_layer, most_matched, most_samples
from .sum_batches import SumBatch, batches_in, gain_of_draw, is_mean_of_samples, psnr_db_of_samples, smallest, words_of
from .token_recovery import NOTHING_READ, token_cells
from .zeros import embedding_of

__all__ = ["cells", "labels_from_shares", "methods_of"]

NAME = "gradient_inversion"
MEAN_IMAGE = "mean image"
MARGIN = {"image_psnr_db": 3.0, "image_ssim": 0.1, "labels_exact": 0.1}
MOST_IMAGES, MOST_STEPS, CLIENTS_PER_DRAW = 4, 10, 4
"""The optimisation is tried on so many images of a client; SPEAR on up to twenty."""
LARGE = 8
"""Clients with more samples come last, and only one for each draw of the budget: their searches take seconds."""
SMOOTH = 1e-4
"""Weight of the total variation where updates have noise."""
REACHED, AGAIN = 0.01, 150
"""Relative squared distance up to which a search from noise has reached the update, and the iterations of the search that follows if not.

On USPS digits smooth networks end below .003, those with ReLU and pooling on EMNIST letters above .08.
"""


def labels_from_shares(shares: Array, count: int) -> Array:
    """`count` labels, increasing, in the shares (classes,) nearest to the given ones: largest remainders first."""
    exact = np.maximum(shares, 0.0) / max(float(np.maximum(shares, 0.0).sum()), 1e-12) * count
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(-(exact - counts), kind="stable")[: count - int(counts.sum())]] += 1
    return np.repeat(np.arange(len(shares)), counts)


# --- the attack ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImageGuess:
    """Images (n, *shape), labels (n,), and by which method images were found, by client."""

    images: Mapping[int, Array] = field(default_factory=dict)
    labels: Mapping[int, Array] = field(default_factory=dict)
    methods: Mapping[int, str] = field(default_factory=dict)


def guess(view: AdversaryView | None, prior: Prior, clients: Sequence[int], model: Model, restarts: int) -> ImageGuess:
    """The images behind each client's first update. Without a view: the mean auxiliary image, and the commonest auxiliary label."""
    clipped = prior.config is not None and prior.config.privacy.unit != "none"
    return _guess(None if view is None else steps_in(view, model.dimension), prior, clients, model, restarts, clipped)


def _guess(
    steps: Mapping[int, Sequence[ClientStep]] | None, prior: Prior, clients: Sequence[int], model: Model, restarts: int,
    clipped: bool = False, matches: int = MOST_MATCHED,
) -> ImageGuess:  # fmt: skip
    """As `guess`. Of updates that were `clipped` (and noised) the length says little, so their direction is what images are to meet."""
    sizes = {client: prior.samples_per_client[client] for client in clients}
    if steps is None:
        mean, label = prior.x.mean(axis=0, dtype=np.float64), int(np.bincount(prior.y).argmax())
        return ImageGuess({c: np.repeat(mean[None], n, axis=0) for c, n in sizes.items()}, {c: np.full(n, label) for c, n in sizes.items()})
    assert prior.config is not None  # checked by the caller
    images: dict[int, Array] = {}
    labels: dict[int, Array] = {}
    methods: dict[int, str] = {}
    for size, number in sorted({(sizes[client], steps[client][0].round) for client in clients}):
        first = {client: steps[client][0] for client in clients if (sizes[client], steps[client][0].round) == (size, number)}
        for client, step in first.items():
            labels[client] = labels_from_shares(shares_of(step, prior, model, prior.labels_per_client[client]), size)
        recovered = {} if clipped else _by_layer(first, prior, model, size, matches=matches)
        matches -= size * sum(method == MATCHING for _, method in recovered.values())
        left = {client: step for client, step in first.items() if client not in recovered}
        if size > MOST_IMAGES:  # too many for the optimisation, which ends below the mean image
            recovered |= dict.fromkeys(left, (np.repeat(prior.x.mean(axis=0, dtype=np.float64)[None], size, axis=0), MEAN_IMAGE))
        elif left:
            recovered |= _by_optimisation(left, labels, prior, model, restarts, clipped)
        for client, (made, method) in recovered.items():
            images[client], methods[client] = made, method
    return ImageGuess(images, labels, methods)


def _plan(first: Mapping[int, ClientStep], prior: Prior) -> tuple[LocalSteps, int]:
    """How clients asked in the same round trained, and the number of that round."""
    step = next(iter(first.values()))
    train = local_of(step, prior).train
    return LocalSteps(train.epochs, train.lr, train.momentum, train.weight_decay), step.round


def _part_of(steps: Mapping[int, Sequence[ClientStep]]) -> int:
    """The place in the parameters where the known part of updates begins."""
    return max((step.part for client_steps in steps.values() for step in client_steps), default=0)


def _by_layer(
    first: Mapping[int, ClientStep], prior: Prior, model: Model, size: int, *, is_mean: bool = True, matches: int = MOST_MATCHED
) -> dict[int, tuple[Array, str]]:  # fmt: skip
    """Images (size, *shape) and the method, of those clients on whom a rung above the optimisation succeeds."""
    part, (how, number) = next(iter(first.values())).part, _plan(first, prior)
    layer = fitting_layer(model, part)
    if part and layer is None:
        return {}
    starts, updates = (np.stack([getattr(step, part) for step in first.values()]) for part in ("start", "update"))
    rng = stream(prior.seed, f"inversion ladder, {size} images", number)
    recovered = images_by_layer(
        model, layer, starts, updates, size, prior.x, rng, steps=how.count, lr=how.lr, weight_decay=how.weight_decay, is_mean=is_mean,
        matches=0 if part else matches,
    )  # fmt: skip
    return {client: image for client, image in zip(first, recovered, strict=True) if image is not None}


def _by_optimisation(
    first: Mapping[int, ClientStep], labels: Mapping[int, Array], prior: Prior, model: Model, restarts: int, clipped: bool
) -> dict[int, tuple[Array, str]]:  # fmt: skip
    """The same by the last rung, for all clients.

    Where the search from noise ends far from the update, as in networks with kinks, its images are below the mean image. Then the search
    begins again at the mean auxiliary images of the labels.
    """
    (how, number), size = _plan(first, prior), len(labels[next(iter(first))])
    starts, updates = (np.stack([getattr(step, part) for step in first.values()]) for part in ("start", "update"))
    named, rng = np.stack([labels[client] for client in first]), stream(prior.seed, f"gradient inversion, {size} images", number)
    part = next(iter(first.values())).part
    made, left = invert_updates(
        model, starts, updates, named, how, rng, restarts=restarts, distance="cosine" if clipped else "squared",
        total_variation=SMOOTH if clipped else 0.0, part=part,
    )  # fmt: skip
    methods = [f"optimisation of {restarts} start(s)"] * len(named)
    far = np.flatnonzero(~(np.asarray(left) <= REACHED)) if not clipped else np.zeros(0, np.int64)
    if len(far):
        made = np.array(made)
        begin = _label_means(prior)[named[far]]
        made[far], _ = invert_updates(model, starts[far], updates[far], named[far], how, rng, iterations=AGAIN, begin=begin, part=part)
        methods = ["optimisation from mean images of labels" if i in far else method for i, method in enumerate(methods)]
    return {client: (image, method) for client, image, method in zip(first, made, methods, strict=True)}


def _label_means(prior: Prior) -> Array:
    """The mean auxiliary image of each label (classes, *shape); of a label without samples that of all."""
    whole = prior.x.mean(axis=0, dtype=np.float64)
    known = [prior.x[prior.y == label] for label in range(prior.classes)]
    return np.stack([samples.mean(axis=0, dtype=np.float64) if len(samples) else whole for samples in known])


def matched(truth: Array, images: Array) -> list[tuple[Array, Array]]:
    """Pairs of true and recovered images (n, *shape each), by the one-to-one matching of largest total PSNR."""
    table = np.array([[psnr_db(image, other) for other in images] for image in truth])
    rows, columns = linear_sum_assignment(-table)
    return [(truth[i], images[j]) for i, j in zip(rows, columns, strict=True)]


def score(guess: ImageGuess, truth: Truth, clients: Sequence[int], metric: str) -> Array:
    """The mean over a client's images of PSNR or SSIM, or whether all its labels are right, by client."""
    if metric == "labels_exact":
        labels = {c: np.bincount(guess.labels[c], minlength=len(truth.label_counts[c])) for c in clients}
        return np.array([float(np.array_equal(labels[c], truth.label_counts[c])) for c in clients])
    compare = psnr_db if metric == "image_psnr_db" else ssim
    return np.array([np.mean([compare(*pair) for pair in matched(truth.data[c][0], guess.images[c])]) for c in clients])


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Images of clients with few samples, from the first update of each that can be read."""
    if case.prior.config is not None and embedding_of(public_model(case.prior)) is not None:
        return token_cells(case, NAME), None
    if why := _refusal(case) or blind(case.view):
        return [nothing(case, NAME, "image_psnr_db", why)], None
    model = public_model(case.prior)
    observed, reference = (_plain_steps(steps_in(view, model.dimension, case, parts=True)) for view in (case.view, case.reference))
    case = _of_trained_samples(case, trainings_of(case, model.dimension).first)
    prior = case.prior
    apart = (set(observed) & set(reference)) - set(case.view.coalition)
    if not apart:
        return _cells_of_sums(case, model)
    assert prior.config is not None  # as `_refusal` found
    private = prior.config.privacy.unit != "none"
    most = MOST_IMAGES if private else max(MOST_IMAGES, most_samples(fitting_layer(model, _part_of(observed))))
    most = min(most, *(local_of(observed[client][0], prior).train.batch_size or most for client in apart))
    few = sorted(client for client in apart if prior.samples_per_client[client] <= min(most, LARGE))
    few += sorted(client for client in apart if LARGE < prior.samples_per_client[client] <= most)[: case.budget.draws]
    if not few:
        words = f"not attempted: no client has at most {most} samples in one batch; images may still leak"
        return [nothing(case, NAME, "image_psnr_db", words)], None
    clients, restarts = few[: CLIENTS_PER_DRAW * case.budget.draws], case.budget.rounds
    matches = most_matched(model, case.budget)
    guesses = [_guess(steps, prior, clients, model, restarts, private, matches) for steps in (observed, None)]
    same = not private and all(np.array_equal(observed[c][0].update, reference[c][0].update) for c in clients)
    guesses.append(guesses[0] if same else _guess(reference, prior.unprotected(), clients, model, restarts, matches=matches))
    count = sum(prior.samples_per_client[client] for client in clients)
    steps = {local_of(observed[client][0], prior).train.epochs for client in clients}
    note = (
        f"{count} image(s) of {len(clients)} client(s), {' or '.join(map(str, sorted(steps)))} local step(s), "
        f"by {methods_of(guesses[0])}, first update; {prior.description}; baseline: the mean auxiliary image"
    )
    metrics = ["image_psnr_db", "image_ssim", "labels_exact"]
    if np.isnan(ssim(case.truth.data[clients[0]][0][0], case.truth.data[clients[0]][0][0])):
        metrics.remove("image_ssim")
    figures = []
    for metric in metrics:
        scores = [score(guessed, case.truth, clients, metric) for guessed in guesses]
        made = cell(case, NAME, metric, *scores, margin=MARGIN[metric], share=metric == "labels_exact", note=note)
        figures.append(made if metric == "labels_exact" else _abstaining(made, methods_of(guesses[0])))
    arrays = {
        "clients": np.array(clients),
        "truth": np.stack([case.truth.data[c][0][0] for c in clients]),
        "recovered": np.stack([_nearest(case.truth.data[c][0][0], guesses[0].images[c]) for c in clients]),
        "baseline": guesses[1].images[clients[0]][0],
    }
    return figures, arrays


def _plain_steps(steps: Mapping[int, Sequence[ClientStep]]) -> dict[int, list[ClientStep]]:
    """The steps of single clients that hold nothing but local training, of clients that have any."""
    plain = {client: [step for step in own if step.local is None or not step.local.beyond] for client, own in single_steps(steps).items()}
    return {client: own for client, own in plain.items() if own}


def _of_trained_samples(case: Case, local: LocalTraining | None) -> Case:
    """The case without the samples that clients hold back, which leave nothing in updates."""
    if local is None or not local.held_back:
        return case
    data = {}
    for client, (x, y) in case.truth.data.items():
        places = local.places(ClientData(client, x, y, x[:0], y[:0]))
        data[client] = x[places], y[places]
    counts = {client: np.bincount(y, minlength=case.prior.classes) for client, (_, y) in data.items()}
    sizes = {client: local.samples(count) for client, count in case.prior.samples_per_client.items()}
    words = f"{case.prior.description}; what clients hold back of their samples is left out"
    prior = replace(case.prior, samples_per_client=sizes, description=words)
    return replace(case, prior=prior, truth=replace(case.truth, data=data, label_counts=counts))


def _cells_of_sums(case: Case, model: Model) -> tuple[list[Cell], dict[str, Array] | None]:
    """Images of cohorts, each as a whole, where only sums can be read: nothing about whose they are."""
    prior, metric = case.prior, "cohort_image_psnr_db"
    if prior.private:
        return [nothing(case, NAME, metric, "not attempted: sums carry the noise of [privacy]; images may still leak")], None
    steps = steps_in(case.view, model.dimension, case, parts=True)
    if unnamed := not smallest(steps, prior) and not case.view.is_server:
        steps = _unnamed_steps(case, model)
    layer = fitting_layer(model, _part_of(steps))
    most = max(MOST_IMAGES, most_samples(layer))
    batches = batches_in(steps, prior, most, CLIENTS_PER_DRAW * case.budget.draws)
    if layer is None:  # the optimisation costs most
        batches = batches[: case.budget.draws]
    alone = single_steps(steps_in(case.reference, model.dimension, parts=True))
    clients = [client for batch in batches for client in batch.first_of if client in alone]
    if not clients:
        why = unread_movement(case.view, model.dimension) or NOTHING_READ
        if number := smallest(steps, prior):
            why = f"not attempted: a sum is of {number} samples at least, in one batch or several; this reads {most} in one batch each"
        return [nothing(case, NAME, metric, f"{why}; images may still leak" if number else why)], None
    restarts, blank = case.budget.rounds, prior.x.mean(axis=0, dtype=np.float64)
    matches = left = most_matched(model, case.budget) // 2  # half for sums, half for the updates beside them
    made = []
    for batch in batches:
        made.append(_images_of_sum(batch, prior, model, restarts, left))
        left -= batch.samples if made[-1][1] == MATCHING else 0
    images = [found for found, _ in made]
    unsummed = _guess(alone, prior.unprotected(), clients, model, restarts, matches=matches).images
    single = [SumBatch(alone[client][0], prior.samples_per_client[client], (client,)) for client in clients]
    (observed, beside, p), (reference, _, reference_p) = (
        _scored(case, of, found, blank) for of, found in ((batches, images), (single, [unsummed[client] for client in clients]))
    )
    scores = [np.array([of[client] for client in clients]) for of in (observed, beside, reference)]
    margin = MARGIN["image_psnr_db"]
    methods = methods_of(ImageGuess(methods={i: method for i, (_, method) in enumerate(made)}), "sums")
    note = (
        f"{words_of(case, batches)}; {len(clients)} client(s), by {methods}; {prior.description}; baseline: the mean auxiliary image; "
        "unprotected: images of the same clients from their own updates"
    )
    note += "; how many samples trained the model, in one round, is assumed to be known" if unnamed else ""
    figure = cell(case, NAME, metric, *scores, margin=margin, note=note, chances=(p, reference_p))
    figure = _abstaining(replace(figure, power=power(scores[0], scores[1], scores[2], scores[1], margin)), methods)
    where = {client: found for batch, found in zip(batches, images, strict=True) for client in batch.first_of}
    arrays = {
        "clients": np.array(clients),
        "truth": np.stack([case.truth.data[c][0][0] for c in clients]),
        "recovered": np.stack([_nearest(case.truth.data[c][0][0], where[c]) for c in clients]),
        "baseline": blank,
    }
    return [figure], arrays


def _unnamed_steps(case: Case, model: Model) -> dict[int, list[ClientStep]]:
    """How others moved models in a single round, by client that trained them, where the view does not name them."""
    means = mean_updates(case.view, model.dimension)
    steps: dict[int, list[ClientStep]] = {}
    for mean, people in zip(means, trained_by(case, case.view, means), strict=True):
        if mean.sums(case.view) == 1 and not set(people) & set(case.view.coalition):
            step = replace(step_of(mean), members=tuple(sorted(set(people))))
            for client in step.members:
                steps.setdefault(client, []).append(step)
    return steps


def _images_of_sum(batch: SumBatch, prior: Prior, model: Model, restarts: int, matches: int) -> tuple[Array, str]:
    """The images (n, *shape) behind a sum, in any order, and by which method."""
    first = {0: batch.step}
    is_mean = is_mean_of_samples(batch.step, prior)
    recovered = _by_layer(first, prior, model, batch.samples, is_mean=is_mean, matches=matches)
    if not recovered and batch.samples <= MOST_IMAGES and is_mean:
        labels = min(prior.classes, sum(prior.labels_per_client[client] for client in batch.step.members))
        shares = shares_of(batch.step, prior, model, labels)
        recovered = _by_optimisation(first, {0: labels_from_shares(shares, batch.samples)}, prior, model, restarts, clipped=False)
    mean = prior.x.mean(axis=0, dtype=np.float64)
    return recovered.get(0, (np.repeat(mean[None], batch.samples, axis=0), MEAN_IMAGE))


def _scored(
    case: Case, batches: Sequence[SumBatch], images: Sequence[Array], blank: Array
) -> tuple[dict[int, float], dict[int, float], float]:  # fmt: skip
    """The mean PSNR of samples by client, with `images` (n, *shape) of each batch and with the `blank` one; and the chance of such a gain.

    That is how often other samples of the same labels, drawn from the auxiliary data, gain as much.
    """
    means = [np.repeat(blank[None], batch.samples, axis=0) for batch in batches]
    tables = [psnr_db_of_samples(case.truth, batches, several) for several in (images, means)]
    gain = float(np.mean([(found - mean).mean() for found, mean in zip(*tables, strict=True)]))
    by_client = [_by_client(case.prior, batches, table) for table in tables]
    return by_client[0], by_client[1], chance_of_draws(gain, gain_of_draw(case, batches, images, blank))


def _by_client(prior: Prior, batches: Sequence[SumBatch], samples: Sequence[Array]) -> dict[int, float]:
    """The mean of values of samples (n,) of batches, by client in its first batch."""
    scores = {}
    for batch, values in zip(batches, samples, strict=True):
        ends = np.cumsum([prior.samples_per_client[client] for client in batch.step.members])
        for client, part in zip(batch.step.members, np.split(values, ends[:-1]), strict=True):
            if client in batch.first_of:
                scores[client] = float(part.mean())
    return scores


def methods_of(guess: ImageGuess, units: str = "clients") -> str:
    """By which methods images were found, in words; with the number of clients, or other `units`, where there are several."""
    counts = Counter(guess.methods.values())
    return " and ".join(name + (f" ({count} {units})" if len(counts) > 1 else "") for name, count in counts.most_common())


def _abstaining(figure: Cell, methods: str) -> Cell:
    """A figure that is at its baseline with mean images of some updates shows nothing of these: the methods do not fit them."""
    is_open = figure.status == "at_baseline" and MEAN_IMAGE in methods
    return replace(figure, status="inconclusive", note=f"{figure.note}; no method fits, so nothing is shown") if is_open else figure


def _nearest(truth: Array, images: Array) -> Array:
    return np.asarray(max(images, key=lambda image: psnr_db(truth, image)))


def _refusal(case: Case) -> str:
    """Why this run is not attempted; empty if it is."""
    if case.prior.config is None:
        return "not attempted: the training settings are not known"
    model = public_model(case.prior)
    trainings = trainings_of(case, model.dimension)
    if bias_span(model) is None:
        return "not attempted: the model's head has no bias to read labels from"
    if case.prior.config.training.optimizer == "adam" or any(training.train.optimizer == "adam" for training in trainings.all):
        return "not attempted: Adam's steps keep little more than a gradient's signs, too little for this attack; images may still leak"
    if trainings.first is None:
        return ""
    if not all(map(_is_plain, trainings.all)):
        return "not attempted: clients do not take plain steps on all of their samples; images may still leak"
    epochs = trainings.first.train.epochs
    if epochs > MOST_STEPS:
        return f"not attempted: {epochs} local steps are more than {MOST_STEPS}; images may still leak"
    return ""


def _is_plain(local: LocalTraining) -> bool:
    """Whether clients take plain steps of SGD on all samples that they train on, and updates hold nothing else."""
    drawn = local.train.prox and local.train.epochs > 1  # one step from the anchor has no proximal term yet
    return not (local.beyond or local.train.maml_lr or drawn)
