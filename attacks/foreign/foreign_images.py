"""Images of another system's clients, from the first update of each: by the ladder, else by optimisation.

The ladder (`inversion_ladder`) reads modules that are a sequence of layers, up to twenty samples in a batch, and no layer that normalises
by the batch. The optimisation reads up to four samples. After a single step it also meets the statistics of the batch (Yin et al. 2021,
GradInversion, who take those of the training set).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...engine.device import tensor
from ...randomness import stream
from ...types import Array
from ..figures.leakage import Cell, cell, nothing, ssim
from ..figures.significance import chance
from ..inversion.gradient_inversion import MARGIN, MOST_IMAGES, MOST_STEPS, ImageGuess, labels_from_shares, methods_of, score
from ..inversion.image_search import LocalSteps, invert_updates
from ..inversion.inversion_ladder import fitting_layer, images_by_layer, most_samples
from .foreign_labels import NO_MODEL, NO_TRUTH, NOT_SGD, alone, is_sgd, shares_of_update
from .foreign_states import ForeignModel, batch_statistics, statistics_of, vector_of
from .foreign_system import AttackOutput, System, UpdateRecord

__all__ = ["images"]

PERFECT = {"image_psnr_db": 100.0, "image_ssim": 1.0, "labels_exact": 1.0}
"""The values of figures of images that are recovered exactly."""
MOST_INVERTED = 8
"""Clients whose updates are inverted."""


def images(system: System) -> AttackOutput:
    """The images of clients with few samples in one batch, from the first update of each."""
    name, case, prior, model = "gradient_inversion", system.case, system.case.prior, system.model
    most = MOST_IMAGES if model is None else max(MOST_IMAGES, _most_by_layer(model))
    few = [client for client in system.scored if _is_one_batch(system.records[client][0], most)][:MOST_INVERTED]
    if (why := _unread(system, few, most)) or model is None:
        return [nothing(case, name, "image_psnr_db", why)], None
    shares = {client: shares_of_update(system.records[client][0], system) for client in few}
    drawn = {c: labels_from_shares(share, system.records[c][0].samples or 1) for c, share in shares.items() if share is not None}
    guess = _found(system, model, drawn)
    mean, commonest = prior.x.mean(axis=0, dtype=np.float64), int(np.bincount(prior.y).argmax())
    sizes = {client: len(labels) for client, labels in drawn.items()}
    blank = ImageGuess(
        {client: np.repeat(mean[None], n, axis=0) for client, n in sizes.items()},
        {client: np.full(n, commonest) for client, n in sizes.items()},
    )
    steps = sorted({system.records[client][0].settings.epochs for client in drawn})
    note = (
        f"{sum(sizes.values())} sample(s) of {len(drawn)} client(s), {' or '.join(map(str, steps))} local step(s), first update, "
        f"by {methods_of(guess)}; {prior.description}; baseline: the mean auxiliary sample"
    )
    if model.norms:
        note += "; layers normalise by the batch where clients trained in training mode, by running statistics where in evaluation mode"
    figures: list[Cell] = []
    a_sample = case.truth.data[next(iter(drawn))][0][0]
    for metric in ("image_psnr_db", "image_ssim", "labels_exact"):
        if metric == "image_ssim" and np.isnan(ssim(a_sample, a_sample)):
            continue
        observed, reference = (score(guessed, case.truth, list(drawn), metric) for guessed in (guess, blank))
        made = cell(case, name, metric, observed, reference, observed, margin=MARGIN[metric], share=metric == "labels_exact", note=note)
        perfect = np.full(len(drawn), PERFECT[metric])
        figures.append(alone(made, len(drawn), chance(perfect, reference, MARGIN[metric])))
    shape = (1, *prior.shape) if len(prior.shape) == 2 else prior.shape
    if len(shape) != 3:  # the report has nothing to show
        return figures, None
    arrays = {
        "clients": np.array(list(drawn)), "truth": np.stack([case.truth.data[c][0][0].reshape(shape) for c in drawn]),
        "recovered": np.stack([guess.images[c][0].reshape(shape) for c in drawn]), "baseline": mean.reshape(shape),
    }  # fmt: skip
    return figures, arrays


def _found(system: System, model: ForeignModel, drawn: Mapping[int, Array]) -> ImageGuess:
    """The images of clients whose labels were `drawn`: by the ladder, else by optimisation; of larger batches the mean sample is left."""
    groups: dict[object, list[int]] = {}
    for client in drawn:
        record = system.records[client][0]
        fixed = record.before.statistics.values() if record.settings.batch_norm == "eval" else ()
        groups.setdefault((record.samples, record.settings, tuple(labels.tobytes() for labels in fixed)), []).append(client)
    prior, images, methods = system.case.prior, dict[int, Array](), dict[int, str]()
    for number, clients in enumerate(groups.values()):
        rng = stream(system.case.seed, "another system: gradient inversion", number)
        records = {client: system.records[client][0] for client in clients}
        made = _by_layer(model, records, prior.x, rng)
        left = [client for client in clients if client not in made]
        if left and len(drawn[left[0]]) <= MOST_IMAGES:
            rows = _inverted(model, [records[c] for c in left], [drawn[c] for c in left], rng, system.iterations)
            made |= {client: (row, f"optimisation of {system.iterations} iterations") for client, row in zip(left, rows, strict=True)}
        mean = np.repeat(prior.x.mean(axis=0, dtype=np.float64)[None], len(drawn[clients[0]]), axis=0)
        for client in clients:
            images[client], methods[client] = made.get(client, (mean, "mean sample"))
    return ImageGuess(images, drawn, methods)


def _by_layer(model: ForeignModel, records: Mapping[int, UpdateRecord], x: Array, rng: np.random.Generator) -> dict[int, tuple[Array, str]]:
    """Images (n, *shape) and the rung, of those clients on whom the ladder succeeds; they trained alike."""
    first = next(iter(records.values()))
    how, form, count = first.settings, model.in_training, first.samples or 1
    layer = fitting_layer(form) if count <= _most_by_layer(model) else None
    if (layer is None and (model.norms or model.words)) or (how.lr is None and how.weight_decay):
        return {}
    starts, ends = (np.stack([vector_of(form, getattr(record, when)) for record in records.values()]) for when in ("before", "after"))
    images = images_by_layer(
        form, layer, starts, ends - starts, count, x, rng, steps=how.epochs, lr=how.lr or 1.0, weight_decay=how.weight_decay
    )
    return {client: image for client, image in zip(records, images, strict=True) if image is not None}


def _most_by_layer(model: ForeignModel) -> int:
    """The largest batch that the ladder reads of a model: 0, 1, or 8 to 20. It does not read layers that normalise by the batch."""
    return 0 if model.norms or model.words else most_samples(fitting_layer(model.in_training))


def _is_one_batch(record: UpdateRecord, most: int) -> bool:
    """Whether a client trained on few samples, all in each step."""
    settings = record.settings
    return record.samples is not None and record.samples <= min(most, settings.batch_size or most) and settings.epochs <= MOST_STEPS


def _unread(system: System, few: Sequence[int], most: int) -> str:
    """Why no update is inverted; empty if some are."""
    model, records = system.model, [system.records[client][0] for client in few]
    if model is None or not system.scored:
        return NO_MODEL if model is None else NO_TRUTH
    if not few:
        return f"not attempted: no client has at most {most} samples in one batch and {MOST_STEPS} steps; images may still leak"
    if model.words:
        return "not attempted: inputs are words, not numbers"
    if system.head is None:
        return f"not attempted: labels come from the head's bias; {system.headless}"
    if model.has_dropout:
        return "not attempted: the model has dropout, whose draws are not known; images may still leak"
    if not all(map(is_sgd, records)):
        return NOT_SGD
    if any(record.settings.lr is None and (record.settings.epochs > 1 or record.labels is None) for record in records):
        return "not attempted: several local steps of unknown learning rate; images may still leak"
    if any(record.settings.batch_norm == "eval" and record.before.statistics.keys() != model.statistics.keys() for record in records):
        return "not attempted: layers trained in evaluation mode, and the states have no running statistics; images may still leak"
    return ""


def _inverted(
    model: ForeignModel, records: Sequence[UpdateRecord], labels: Sequence[Array], rng: np.random.Generator, iterations: int
) -> Array:
    """Images (m, n, *shape) in [0, 1] of m clients that trained alike; from the update's direction where its rate is not known."""
    how = records[0].settings
    form = model.frozen(records[0].before.statistics) if how.batch_norm == "eval" else model.in_training
    starts, ends = (np.stack([vector_of(form, getattr(record, when)) for record in records]) for when in ("before", "after"))
    steps = LocalSteps(how.epochs, how.lr or 1.0, how.momentum, how.weight_decay)
    distance: Any = "cosine" if how.lr is None else "squared"
    return invert_updates(
        form, starts, ends - starts, np.stack(labels), steps, rng, iterations=iterations, distance=distance,
        beside=_beside(model, records),
    )[0]  # fmt: skip


def _beside(
    model: ForeignModel, records: Sequence[UpdateRecord]
) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], Array] | None:
    """What running statistics show of the images beside the update, each layer's on the scale 1; None where they show nothing exact.

    They are needed: behind a layer that normalises by the batch, gradients do not depend on the length of the images.
    """
    statistics = [batch_statistics(model, record.before, record.after, record.steps) for record in records]
    if not model.norms or not all(statistics) or records[0].steps != 1 or records[0].settings.batch_norm == "eval":
        return None
    scales = {name: 1 / max(float(np.sqrt(np.mean([batch[name] ** 2 for batch in statistics]))), 1e-12) for name in model.statistics}
    scale = np.concatenate([np.full(shape, scales[name]) for name, shape in model.statistics.items()])
    seen = np.stack([np.concatenate([batch[name] for name in model.statistics]) for batch in statistics]) * scale
    made, there = statistics_of(model), tensor(scale)  # sent once: the function may be captured
    return lambda theta, images: made(theta, images) * there, seen
