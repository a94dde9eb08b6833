"""Mean images of classes from prototypes: what the mean feature vector of a client's samples of a class looks like.

Source: a prototype is the class's mean image seen through the network without its last layer (FedProto, Tan et al. 2022). With a linear
model the prototype *is* the mean image (`closed_form.images_from_inputs`). Through a network ridge regression leads back: the attacker
trains clients of its own on auxiliary samples, as the public task asks, and learns which mean image belongs to which prototype. The penalty
minimises the generalised cross-validation error (Golub, Heath & Wahba 1979).

What it proves: prototypes show what a client's samples of a class look like on average, and a class with one sample shows the sample. Means
over the owners of a class, as clients are sent them and as secure sums give them, show the same of the owners together. What it does not
prove: that later prototypes, of models that were drawn together, show less. The first ones are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...algorithms.fedproto import TrainToPrototypes, class_means
from ...contract.transcript import payload_rows
from ...engine import Engine, Streams, TaskInput
from ...engine.models import Model
from ...engine.threads import one_thread
from ...federation.task_encoding import task_of
from ...randomness import stream
from ...types import Array, ClientData
from ..adversary import AdversaryView
from ..evidence.simulated_shares import simulated_samples
from ..evidence.updates import public_model
from ..figures.leakage import Case, Cell, Prior, cell, nothing, psnr_db
from ..figures.payloads import part_of
from .closed_form import first_linear, images_from_inputs
from .zeros import embedding_of

Key = TypeVar("Key")
__all__ = ["Prototypes", "cells", "images_of_prototypes", "prototypes_in"]

NAME, PROTOTYPE = "prototype_inversion", "prototype"
METRIC, AGGREGATE = "class_image_psnr_db", "aggregate_class_image_psnr_db"
MARGIN = 3.0
BESIDE = "baseline: the class's mean auxiliary image"
PRETENDED = 96
"""So many clients of its own the attacker trains."""
PENALTIES = np.logspace(-6, 2, 33)
"""Penalties that are compared, in units of the largest eigenvalue."""


@dataclass(frozen=True, eq=False)
class Prototypes:
    """What a view has: the first prototype (e,) of each (client, class), and the first mean over the owners (e,) of each class.

    `rounds` are those in which the owners of such a mean trained, and `senders` who sent a prototype by (round, class).
    """

    single: Mapping[tuple[int, int], Array]
    means: Mapping[int, Array]
    rounds: Mapping[int, int]
    senders: Mapping[tuple[int, int], frozenset[int]]


def prototypes_in(view: AdversaryView) -> Prototypes:
    """The prototypes in a view; rows of zeros are of clients without the class."""
    single: dict[tuple[int, int], Array] = {}
    means: dict[int, Array] = {}
    rounds: dict[int, int] = {}
    senders: dict[tuple[int, int], frozenset[int]] = {}
    for message in view.messages:
        payload = message.payload or {}
        task = task_of(message.context["settings"]) if message.operation == "compute" and "settings" in message.context else None
        for place, label in enumerate(task.known if isinstance(task, TrainToPrototypes) else ()):
            sent = payload.get(f"prototypes/{place}")
            if sent is not None and label not in means:
                means[label], rounds[label] = np.asarray(sent, np.float64), message.round - 1
        if message.operation != "mean" or message.kind != "update":
            continue
        for name in (name for name in payload if part_of(name) == PROTOTYPE):
            label = int(name.rpartition(" ")[2])
            rows = dict(zip(payload_rows(message), np.asarray(payload[name], np.float64), strict=True))
            own = {client: row for client, row in rows.items() if row.any()}
            senders[message.round, label] = senders.get((message.round, label), frozenset()) | own.keys()
            for client, row in own.items():
                if client not in view.coalition:
                    single.setdefault((client, label), row)
    return Prototypes(single, means, rounds, senders)


# --- from prototypes to images ------------------------------------------------------------------------------------------------------


def images_of_prototypes(model: Model, features: Array, labels: Array, known: tuple[Array, Array, Array]) -> Array:
    """Mean images (m, *shape) in [0, 1] of prototypes `features` (m, e) of classes `labels` (m,).

    `known` are prototypes (k, e), mean images (k, *shape) and classes (k,) of the attacker's own clients.
    """
    layer = first_linear(model)
    if layer is not None and layer.is_first and layer.inputs == features.shape[1] and len(model.layout) <= 2:
        return images_from_inputs(model, features)
    own, images, classes = known
    flat = images.reshape(len(images), -1)
    centres = {int(label): (own[classes == label].mean(axis=0), flat[classes == label].mean(axis=0)) for label in np.unique(classes)}
    whole = (own.mean(axis=0), flat.mean(axis=0))
    x, y = (
        np.stack([row - centres[int(label)][part] for row, label in zip(rows, classes, strict=True)])
        for part, rows in ((0, own), (1, flat))
    )
    asked = np.stack([row - centres.get(int(label), whole)[0] for row, label in zip(features, labels, strict=True)])
    begun = np.stack([centres.get(int(label), whole)[1] for label in labels])
    return np.asarray(np.clip(begun + _ridge(x, y, asked), 0.0, 1.0).reshape(-1, *images.shape[1:]))


def _ridge(x: Array, y: Array, asked: Array) -> Array:
    """What ridge regression of y (k, d) on x (k, e) gives for `asked` (m, e), the penalty by generalised cross-validation."""
    values, vectors = np.linalg.eigh(x @ x.T)
    values, turned = np.maximum(values, 0.0), vectors.T @ y
    if values[-1] <= 0:
        return np.zeros((len(asked), y.shape[1]))

    def error(penalty: float) -> float:
        left = penalty / (values + penalty)
        return float(np.square(left[:, None] * turned).sum() / max(float(left.sum()), 1e-300) ** 2)

    penalty = min(PENALTIES * values[-1], key=error)
    return np.asarray(asked @ x.T @ vectors @ (turned / (values + penalty)[:, None]))


def simulated_prototypes(prior: Prior, model: Model) -> tuple[Array, Array, Array]:
    """Prototypes (k, e), mean images (k, *shape) and classes (k,) of clients that the attacker trains from the public initial model."""
    assert prior.config is not None  # checked by the caller
    rng = stream(prior.seed, "prototypes of simulated clients")
    people = [(prior.samples_per_client[client], prior.labels_per_client[client]) for client in sorted(prior.samples_per_client)]
    places, _ = simulated_samples(prior.y, prior.classes, people, rng, PRETENDED)
    start, train = model.init(prior.config.run.seed), prior.config.train_on(model).at(0)
    data = [ClientData(i, prior.x[chosen], prior.y[chosen], prior.x[:1], prior.y[:1]) for i, chosen in enumerate(places)]
    key = int(rng.integers(2**31))
    with one_thread():
        results = Engine().run(train, [TaskInput(client, {"model": start}, {}, Streams(key, 0, client.id)) for client in data])
    features, images, classes = [], [], []
    for client, result in zip(data, results, strict=True):
        if "update" not in result:
            continue
        means, owned = class_means(model, start + np.asarray(result["update"]), client.x_train, client.y_train)
        for label in np.flatnonzero(owned):
            features.append(np.asarray(means[label], np.float64))
            images.append(client.x_train[client.y_train == label].mean(axis=0, dtype=np.float64))
            classes.append(int(label))
    return np.array(features), np.array(images), np.array(classes)


# --- the attack ---------------------------------------------------------------------------------------------------------------------


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Mean images of single clients' classes, and of the owners of a class together."""
    observed, reference, prior = prototypes_in(case.view), prototypes_in(case.reference), case.prior
    keys = sorted(set(observed.single) & set(reference.single))
    made_by = {label: reference.senders.get((number, label), frozenset()) for label, number in observed.rounds.items()}
    labels = sorted(label for label in set(observed.means) & set(reference.means) if made_by[label])
    if not keys and not labels:
        return [nothing(case, NAME, METRIC, "no prototypes are in this view")], None
    if prior.config is None or embedding_of(public_model(prior)) is not None:
        return [nothing(case, NAME, METRIC, "not attempted: prototypes of words, or of a training that is not known")], None
    model = public_model(prior)
    known = simulated_prototypes(prior, model)
    figures, arrays = [], None
    if keys:
        truth = np.stack([_mean_image(case, (client,), label) for client, label in keys])
        found = [_images(of.single, keys, [label for _, label in keys], model, known) for of in (observed, reference)]
        blank = np.stack([_blank(prior, label) for _, label in keys])
        clients = sorted({client for client, _ in keys})
        scores = [_by_client(keys, clients, truth, images) for images in (found[0], blank, found[1])]
        note = f"{len(keys)} class(es) of {len(clients)} client(s), from first prototypes; {prior.description}; {BESIDE}"
        figures.append(cell(case, NAME, METRIC, *scores, margin=MARGIN, note=note))
        first = [next(i for i, (owner, _) in enumerate(keys) if owner == client) for client in clients]
        arrays = {"clients": np.array(clients), "truth": truth[first], "recovered": found[0][first], "baseline": blank[first[0]]}
    if labels:
        truth = np.stack([_mean_image(case, sorted(made_by[label]), label) for label in labels])
        found = [_images(of.means, labels, labels, model, known) for of in (observed, reference)]
        blank = np.stack([_blank(prior, label) for label in labels])
        scores = [np.array([psnr_db(*pair) for pair in zip(truth, images, strict=True)]) for images in (found[0], blank, found[1])]
        note = f"{len(labels)} class(es), each as the mean over those who own it; {prior.description}; {BESIDE}"
        figures.append(cell(case, NAME, AGGREGATE, *scores, margin=MARGIN, note=note))
    return figures, arrays


def _images(of: Mapping[Key, Array], keys: Sequence[Key], labels: Sequence[int], model: Model, known: tuple[Array, Array, Array]) -> Array:
    return images_of_prototypes(model, np.stack([of[key] for key in keys]), np.array(labels), known)


def _mean_image(case: Case, clients: Sequence[int], label: int) -> Array:
    """The mean over clients of each one's mean image of a class."""
    own = [case.truth.data[client] for client in clients]
    return np.asarray(np.mean([x[y == label].mean(axis=0, dtype=np.float64) for x, y in own], axis=0))


def _blank(prior: Prior, label: int) -> Array:
    held = prior.x[prior.y == label]
    return np.asarray((held if len(held) else prior.x).mean(axis=0, dtype=np.float64))


def _by_client(keys: Sequence[tuple[int, int]], clients: Sequence[int], truth: Array, images: Array) -> Array:
    """The mean PSNR over a client's classes, by client."""
    values = [psnr_db(*pair) for pair in zip(truth, images, strict=True)]
    return np.array([np.mean([value for value, (owner, _) in zip(values, keys, strict=True) if owner == client]) for client in clients])
