"""How many samples' gradients are clipped, and how much the noise of private training changes beside the gradients.

For `privacy.unit = "sample"`, in simulations only. Both figures are computed from samples without noise, so no ledger pays for them: they
are the experimenter's, their names begin with `experimenter_`, and a deployment has neither.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
import torch

from ...engine.device import CPU, using
from ...engine.models import Model
from ...engine.sample_gradients import sample_gradients
from ...engine.views import as_views
from ...privacy.settings import Noise, noise_of_mean, noise_of_rounds
from ...transports.hosts import LocalHost
from ...transports.simulation import Simulated
from ...types import Array, ClientData

__all__ = ["CLIPPED", "RATIO", "due", "noise_warning", "not_the_noise", "over_run", "training_noise"]

CLIPPED, RATIO = "experimenter_clipped_share", "experimenter_noise_to_signal"
CLIENTS, SAMPLES, LOOKS = 8, 32, 8
"""At most so many clients are looked at, and so many samples of each; in about so many rounds, because a gradient for each sample costs."""
SWAMPED, HARMED, LEARNED, HARMLESS = 2.0, 0.75, 10.0, 0.3
"""Ratios over a run. Above the first, noise swamps the signal; above the second it does where accuracy is below that of the majority class;
above the third where more than half of what chance leaves was learned: the gradients of a model that fits are short, so late rounds show a
large ratio. Below the fourth, noise is no reason for a model that learned nothing."""


def training_noise(
    simulated: Simulated, model: Model, noise: Noise, epochs: int, clients: Sequence[int], labels: Mapping[int, Any] | None, share: float,
    augment: Sequence[str] = (), helper_sets: int = 0,
) -> dict[str, float]:  # fmt: skip
    """The two figures at the clients' last local models; empty before the first training. `augment`: the views of `[training]`.
    `helper_sets` as in `noise_of_mean`.

    `RATIO` is of the mean of one round over the m clients of a cluster (`labels`; None: of all) that take part, a `share` of it: how much
    its noise changes the loss of a sample, over how much the gradients lower it, both to first order. With the clipped gradients g of
    samples and σ = z·C / (q·samples) that is σ / √(steps·m) · √(mean ‖g‖²) / ‖mean g‖². The number of parameters does not enter: noise
    in directions that change no loss does no harm. The median over clusters.
    """
    picked = list(clients)[:: max(1, -(-len(clients) // CLIENTS))]
    seen: list[tuple[int, int, Array, float] | None] = simulated.each(picked, _gradients, model, noise.clip_norm, tuple(augment))
    known = {client: each for client, each in zip(picked, seen, strict=True) if each is not None}
    if not known:
        return {}
    steps = 1 if noise.shares else max(1, round(epochs / noise.sampling_rate))
    deviation = noise.training * noise.clip_norm / (noise.sampling_rate * noise.samples)
    ratios = []
    for label in {_label(labels, client) for client in known}:
        members = [known[client][2] for client in known if _label(labels, client) == label]
        contributors = max(1.0, share * sum(_label(labels, client) == label for client in clients))
        length = sqrt(np.mean([known[client][3] for client in known if _label(labels, client) == label]))
        signal = float(np.sum(np.mean(members, axis=0) ** 2))
        ratios.append(deviation * noise_of_mean(noise, contributors, helper_sets) * length / sqrt(steps) / max(signal, 1e-12))
    clipped, counted = sum(each[0] for each in known.values()), sum(each[1] for each in known.values())
    return {CLIPPED: clipped / counted, RATIO: float(np.median(ratios))}


def _label(labels: Mapping[int, Any] | None, client: int) -> Any:
    return None if labels is None else labels.get(client)


def _gradients(
    host: LocalHost, clients: Sequence[int], model: Model, clip_norm: float, augment: tuple[str, ...]
) -> list[tuple[int, int, Array, float] | None]:
    """By client: how many of some samples' gradients are longer than `clip_norm`, of how many, the mean (d,) of the clipped ones, and the
    mean of their squared lengths."""
    with using(CPU):  # few samples, for which a device would be waited for
        return [_of_client(host, client, model, clip_norm, augment) for client in clients]


def _of_client(
    host: LocalHost, client: int, model: Model, clip_norm: float, augment: tuple[str, ...]
) -> tuple[int, int, Array, float] | None:
    kept = host.client(client).values.kept("trained")
    if kept is None:
        return None
    data = host.members.data[client]
    places = np.linspace(0, len(data.y_train) - 1, min(SAMPLES, len(data.y_train))).astype(np.int64)
    images = as_views(torch.from_numpy(data.x_train[places]).unsqueeze(0), augment)[0].unbind(1)
    gradients = np.zeros((len(places), model.dimension))
    for image in images:  # training clips the mean over views
        chosen = ClientData(client, image.numpy(), data.y_train[places], data.x_test[:0], data.y_test[:0])
        at = 0
        for block in sample_gradients(model, np.asarray(kept[0]), chosen):
            gradients[at : at + len(block)] += block.double().cpu().numpy() / len(images)
            at += len(block)
    norms = np.linalg.norm(gradients, axis=1)
    finite = np.isfinite(norms)
    shortened = gradients[finite] * np.minimum(1.0, clip_norm / np.maximum(norms[finite], 1e-300))[:, None]
    squares = np.minimum(norms[finite], clip_norm) ** 2
    count = len(norms)
    return int((norms[finite] > clip_norm).sum()), count, shortened.sum(0) / count, float(squares.sum()) / count


def due(number: int, rounds: int) -> bool:
    """Whether the figures are computed in round `number`: about `LOOKS` times in a run of so many rounds, each amid equally many."""
    step = max(1, rounds // LOOKS)
    return number % step == step // 2


def over_run(rows: Sequence[Mapping[str, Any]], rounds: int) -> dict[str, float]:
    """The two figures of `rounds` rounds, from the rows that have them: the mean share, and the ratio for all rounds together."""
    known = [row for row in rows if row.get(RATIO) is not None]
    if not known or not rounds:
        return {}
    return {CLIPPED: float(np.mean([row[CLIPPED] for row in known])), RATIO: noise_of_rounds([row[RATIO] for row in known], rounds)}


def not_the_noise(figures: Mapping[str, float], clip_norm: float) -> str:
    """That the noise is no reason for a result that means nothing, and what to change; "" where it may be one."""
    if figures.get(RATIO, HARMLESS) >= HARMLESS:
        return ""
    return (
        f"the noise of privacy is not the reason: over the run it changed the loss of a sample {figures[RATIO]:.3g} times as much as "
        f"the gradients can have lowered it ({figures[CLIPPED]:.0%} of them are clipped at {clip_norm:g}); leave training.lr, "
        "training.batch_size, training.rounds and privacy.clip_norm out, so that a rule sets them, or raise lr and rounds"
    )


def noise_warning(figures: Mapping[str, float], row: Mapping[str, Any]) -> str:
    """That noise swamps the signal, as a sentence; "" where it does not. `row` has the final scores."""
    ratio = figures.get(RATIO, 0.0)
    if ratio <= _limit(row):
        return ""
    return (
        f"noise swamps the signal: over the run the noise of privacy changed the loss of a sample {ratio:.3g} times as much as the "
        "gradients can have lowered it; a larger privacy.epsilon, more samples or clients lessen it, and training.lr does not"
    )


def _limit(row: Mapping[str, Any]) -> float:
    """Above which ratio noise swamps the signal of a run with these final scores."""
    if (constant := row.get("constant_error")) is not None:
        unexplained = (row["root_mean_square_error"] / constant) ** 2 if constant else 1.0
        return HARMED if unexplained > 1 else LEARNED if unexplained < 0.5 else SWAMPED
    baseline, accuracy = row.get("majority_accuracy"), row.get("accuracy_mean")
    if baseline is not None and accuracy is not None and accuracy < baseline:
        return HARMED
    chance, balanced = row.get("majority_balanced_accuracy"), row.get("balanced_accuracy")
    return LEARNED if chance is not None and balanced is not None and balanced > (1 + chance) / 2 else SWAMPED
