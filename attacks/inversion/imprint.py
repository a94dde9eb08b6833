"""Imprint: an active server sends a first layer whose gradient holds single training images, one per bin.

Source: Fowl, Geiping, Czaja, Goldblum & Goldstein 2022 ("Robbing the Fed", Sec. 3): every unit of the first linear layer measures the same
scalar and fires above a threshold of its own, at quantiles of auxiliary data. With equal weights behind all units, the gradients of two
neighbours differ by the samples between their thresholds, and weight over bias difference is the sample where there is one. Deviations: the
scalar is a random projection, not the mean brightness, in which images tie; no layer is added, the crafted parameters fit the run's own
MLP, so there are as many bins as hidden units; head weights are ± one value, by label, so that no label's gradient is zero.

What it proves: one update in the clear, or one secure sum, may be single images, whatever the batch, once bins outnumber samples. **A
secure sum does not stop it, bound to its model or not**: all clients are sent the same crafted model, which the binding allows, and the sum
over clients is the gradient of all their samples in the same bins; it only takes as many times more bins. What it does not: nothing about
models whose first layer is no linear map, or about clients that look at what they are sent. Several local steps move thresholds and head,
and images blur. Adam divides every coordinate of a gradient by its own size, so that weight over bias is no image any more: against it this
form of the attack recovers nothing even unprotected, and says `not_validated`.

No recorded transcript contains this attack, since recorded servers follow the protocol: it runs on the run's data, and its sums on the real
machines of `protocols.secagg`. Only an audit may do that; the server's part sees updates and sums alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b, sha256

import numpy as np
from scipy.spatial.distance import cdist

from ...engine import Engine, Streams, TaskInput
from ...engine.models import Model
from ...errors import InputError
from ...experiments.config.config import Config
from ...randomness import stream
from ...tasks.training import Train
from ...types import Array, ClientData, check_array
from ..adversary import AdversaryView
from ..evidence.local_training import trainings_in
from ..evidence.sums import sums_in
from ..evidence.updates import public_model, steps_in
from ..figures.leakage import Case, Cell, Prior, cell, nothing
from ..figures.significance import CellStatus
from .model_inconsistency import clients_of, isolate

__all__ = ["cells", "images_from_imprint", "imprinted", "share_of_images"]

NAME = "imprint"
GOOD_DB = 30.0
COHORT = 20
EMPTY = 1e-6
"""A bin whose bias gradient is below this share of the largest holds no sample, or none that float32 can tell."""


# --- the mathematics, for gradients from anywhere -----------------------------------------------------------------------------------


def imprinted(model: Model, x: Array, balance: float = 10.0) -> Array:
    """Parameters (d,) of an MLP whose hidden units are bins of a random projection of the input, at its quantiles on `x` (n, *shape).

    `balance` is how large the first layer is beside the head: large values keep thresholds where they are over several steps, small ones
    the head. Raises `InputError` for a model that is no MLP.
    """
    if model.name != "mlp":
        raise InputError(f"model {model.name!r}: imprints are for 'mlp', whose first layer is a linear map")
    bins, size = model.hidden, int(np.prod(model.shape))
    direction = stream(0, "imprint: projection").standard_normal(size) / np.sqrt(size)
    measured = model.inputs(x).double().flatten(1).cpu().numpy() @ direction
    thresholds = np.quantile(measured, np.arange(bins) / bins)
    spread = max(float(np.ptp(measured)), 1e-12)
    thresholds[0] -= spread  # hardly anybody is below the first
    head = 1.0 / np.sqrt(bins * spread * balance)  # so that logits stay of the order of one
    signs = np.where(np.arange(model.classes) % 2, -1.0, 1.0)
    parts = (
        np.tile(balance * head * direction, (bins, 1)), -balance * head * thresholds, np.repeat(head * signs[:, None], bins, axis=1),
        np.zeros(model.classes),
    )  # fmt: skip
    return np.concatenate([part.ravel() for part in parts]).astype(model.init(0).dtype)


def images_from_imprint(weight_gradient: Array, bias_gradient: Array) -> Array:
    """The inputs (m, d), m ≤ bins, behind the gradients (bins, d), (bins,) of an imprinted first layer, in the order of thresholds.

    The inputs are normalised, as the layer received them. A bin of several samples gives a mean weighted by gradients; an empty bin gives
    nothing. Any multiple of the gradients serves, such as an update. Raises `InputError` for other shapes and values that are not finite.
    """
    weight = check_array("weight_gradient", np.asarray(weight_gradient, np.float64), ndim=2)
    bias = check_array("bias_gradient", np.asarray(bias_gradient, np.float64), ndim=1)
    if len(weight) != len(bias):
        raise InputError(f"bias_gradient: has {len(bias)} values for {len(weight)} rows of weight_gradient")
    # unit j holds all samples above its threshold: what it has and the next has not is its own
    each, scale = (np.diff(part, axis=0, append=np.zeros_like(part[:1])) for part in (weight, bias))
    held = np.abs(scale) > EMPTY * np.abs(scale).max(initial=0.0)
    return np.asarray(each[held] / scale[held, None])


def share_of_images(truth: Array, images: Array) -> float:
    """The share of true images (n, *shape) in [0, 1] that one of `images` (m, *shape) shows with a PSNR of at least 30 dB."""
    if not len(images):
        return 0.0
    flat = np.asarray(truth, np.float64).reshape(len(truth), -1)
    squares = cdist(flat, np.asarray(images, np.float64).reshape(len(images), -1), "sqeuclidean") / flat.shape[1]
    return float((squares.min(axis=1) <= 10 ** (-GOOD_DB / 10)).mean())


# --- the attack ---------------------------------------------------------------------------------------------------------------------


def guess(update: Array | None, prior: Prior, model: Model) -> Array:
    """Images (m, *shape) in [0, 1] from one update, or sum of updates, of an imprinted model. Without: the mean auxiliary image."""
    if update is None:
        return np.asarray(prior.x.mean(axis=0, dtype=np.float64)[None])
    size, bins = int(np.prod(model.shape)), model.hidden
    images = images_from_imprint(update[: bins * size].reshape(bins, size), update[bins * size : bins * (size + 1)])
    channel = (-1, *([1] * (len(model.shape) - 1)))
    mean, std = (np.asarray(statistic).reshape(channel if len(statistic) > 1 else ()) for statistic in (model.mean, model.std))
    return np.asarray(np.clip(images.reshape(len(images), *model.shape) * std + mean, 0.0, 1.0))


def score(images: Mapping[int, Array], people: Sequence[ClientData]) -> Array:
    """The share of each client's images that the guess about it shows, (m,)."""
    return np.array([share_of_images(client.x_train, images[client.id]) for client in people])


def updates_of(people: Sequence[ClientData], train: Train, start: Array, seed: int) -> dict[int, Array]:
    """What clients answer that believe `start` to be the model."""
    secrets = [
        blake2b(f"{seed}|{client.id}".encode(), digest_size=32).digest() for client in people
    ]  # [privacy]'s noise hides nothing here
    inputs = [
        TaskInput(client, {"model": start}, {}, Streams(seed, 0, client.id), secret=secret)
        for client, secret in zip(people, secrets, strict=True)
    ]
    results = Engine().run(train, inputs)
    return {client.id: np.asarray(made["update"], np.float64) for client, made in zip(people, results, strict=True) if made}


def summed(updates: Mapping[int, Array], start: Array, *, clip: float, min_cohort: int) -> Array | None:
    """The secure sum of `updates`, bound to the model `start` that all were sent; None where there are too few for one."""
    held = sha256(np.ascontiguousarray(start).tobytes()).digest()
    return isolate(updates, dict.fromkeys(updates, held), min(updates), clip=clip, min_cohort=min_cohort, binding=True).update


def _refusal(case: Case) -> str:
    """Why this adversary on this run is not attempted; empty if it is."""
    config = case.prior.config
    if case.view.adversary != "active-server":
        return "not attempted: only an active server can do this (--adversary active-server)"
    if config is None:
        return "not attempted: the training settings are not known"
    if config.model.name != "mlp":
        return f"not attempted: the first layer of {config.model.name!r} is no linear map with ReLU behind it; images may still leak"
    if config.privacy.unit == "client":
        return "not attempted: updates are clipped as a whole and have noise of their own"
    if config.protection.sum not in ("none", "secagg"):
        return f"not attempted under sum = {config.protection.sum!r}"
    if not steps_in(case.reference, public_model(case.prior).dimension):
        return "clients send no update of a whole model, even without protection"
    return ""


def _cohort(case: Case, view: AdversaryView, config: Config) -> list[ClientData]:
    """Whose updates the server gets: the members of the run's first sum, at most so many."""
    min_cohort = config.protection.smallest_sum
    members = next((sum_.members for sum_ in sums_in(view) if len(sum_.members) >= min_cohort), tuple(case.truth.data))
    return [client for client in clients_of(case.truth) if client.id in members][:COHORT]


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The share of images recovered, from one full-batch step of the run's optimizer and from the run's own local training."""
    why = _refusal(case)
    config = case.prior.config
    if why or config is None:
        return [nothing(case, NAME, "images_recovered_gradient", why)], None
    model, t, secure = public_model(case.prior), config.training, config.protection.sum == "secagg"
    start = imprinted(model, case.prior.x)
    local = trainings_in(case.reference).at(0)
    own = replace(local.train, on_divergence="stop")
    people = [local.part(client) for client in _cohort(case, case.record or case.view, config)]
    noise = config.noise_of(case.truth.groups)
    mean = guess(None, case.prior, model)
    figures, arrays = [], None
    for kind, train in (("gradient", Train(model, 1, 0, t.lr, optimizer=t.optimizer)), ("update", own)):
        clear = updates_of(people, train, start, case.seed)
        reference = {client: guess(update, case.prior, model) for client, update in clear.items()}
        sent = clear if noise is None else updates_of(people, train.private(noise), start, case.seed)
        if secure:
            total = summed(sent, start, clip=config.protection.secagg_clip, min_cohort=config.protection.smallest_sum)
            observed = dict.fromkeys(sent, guess(total, case.prior, model))
        else:
            observed = reference if noise is None else {client: guess(update, case.prior, model) for client, update in sent.items()}
        answered = [client for client in people if client.id in reference and client.id in observed]
        if not answered:
            figures.append(nothing(case, NAME, f"images_recovered_{kind}", "nobody's training on the crafted model ended"))
            continue
        scores = [score(images, answered) for images in (observed, dict.fromkeys(reference, mean), reference)]
        count = sum(client.samples for client in answered)
        note = (
            f"{model.hidden} bins; {count} images of {len(answered)} client(s), "
            f"{'one secure sum of all, bound to the model sent' if secure else 'one update each'}; "
            f"{'one full-batch step' if kind == 'gradient' else 'the local training of the run'}; share at {GOOD_DB:.0f} dB PSNR or more; "
            f"run on the run's data; {case.prior.description}; baseline: the mean auxiliary image; a single image is a leak"
        )
        made = cell(case, NAME, f"images_recovered_{kind}", *scores, margin=0.0, note=note)
        # without an image: more bins, or bins nearer to each other, may show one
        status: CellStatus = "leaks" if scores[0].any() else "inconclusive" if scores[2].any() else "not_validated"
        figures.append(replace(made, exact=bool(scores[2].any()), power=None, status=status))
        arrays = arrays or _shown(answered, observed, mean[0])
    return figures, arrays


def _shown(people: Sequence[ClientData], images: Mapping[int, Array], mean: Array) -> dict[str, Array]:
    """For the report: of each client the image that comes out best."""
    truth, recovered = [], []
    for client in people:
        flat = images[client.id].reshape(len(images[client.id]), -1) if len(images[client.id]) else mean.reshape(1, -1)
        squares = cdist(client.x_train.reshape(client.samples, -1), flat, "sqeuclidean")
        i, j = np.unravel_index(int(squares.argmin()), squares.shape)
        truth.append(client.x_train[i])
        recovered.append(flat[j].reshape(mean.shape))
    ids = np.array([client.id for client in people])
    return {"clients": ids, "truth": np.stack(truth), "recovered": np.stack(recovered), "baseline": mean}
