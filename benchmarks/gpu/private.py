"""Private training against clipped training, the share of a round in which the device waits for the host, and where noise is made."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cflpriv.engine import Engine
from cflpriv.engine.device import NoisePlace
from cflpriv.engine.step_noise import keys_of, normals
from cflpriv.tasks.training import Train

from .busy import host_share
from .roofline import floor_row, round_of
from .rows import Figures, Floor, Missing, Row, Setting, medians
from .training import CASES, Case, clients_of, fresh

__all__ = ["NOISES", "rows"]

NOISES: tuple[NoisePlace, ...] = ("host", "device")
"""Where noise is made, of the same keys."""
SAMPLES, STEPS, SIZES = 40, 4, ((0, 1000), (0, 100), (1, 100))
"""Samples of a client, steps of a round, and the cases, by number, with their clients: the host makes noise slowly."""
PRIVATE: dict[str, Any] = {"clip_norm": 1.0, "sampling_rate": 1 / STEPS, "noise_multiplier": 1.0, "public_samples": SAMPLES}
MOST_WAITING = Floor("host share", 0.3, at_least=False)


def against_clipped(setting: Setting, case: Case, count: int, noise: NoisePlace) -> Figures:
    """Rounds of private training against the same without noise."""
    noisy = Train(case.model, **PRIVATE)
    clipped = replace(noisy, noise_multiplier=0.0, public_samples=0)
    with fresh(setting.device):
        inputs, engine = clients_of(case, setting, count, SAMPLES), Engine("torch", device=setting.device, noise=noise)
        works = [partial(engine.run, task, inputs) for task in (noisy, clipped)]
        private, plain = medians(works, setting.device, repeats=2)
    figures = floor_row(private, round_of(noisy, len(inputs), len(inputs[0].data.y_train)), setting)
    return {**figures, "x clipped": private / plain, "note": f"{len(inputs)} clients, {noisy.steps} steps; clipped {1000 * plain:.0f} ms"}


def waiting(setting: Setting, case: Case, count: int, options: Mapping[str, Any], noise: NoisePlace = "auto") -> Figures:
    """The share of a round in which the device does nothing."""
    if setting.device == "cpu":
        raise Missing("the share of the host needs a CUDA device")
    with fresh(setting.device):
        inputs, engine = clients_of(case, setting, count, SAMPLES if options else 0), Engine("torch", device=setting.device, noise=noise)
        work = partial(engine.run, Train(case.model, **(options or {"momentum": 0.5})), inputs)
        (took,) = medians([work], setting.device)
        return {"ms": 1000 * took, "host share": host_share(work, took), "note": f"{len(inputs)} clients"}


def noise_of_a_step(setting: Setting, count: int) -> Figures:
    """A step's noise for LeNet-5, of each client's key: made on the host and sent, or made on the device."""
    dimension, count = CASES[0].model.dimension, setting.size(count, 4)
    keys, number = keys_of([client.to_bytes(32, "big") for client in range(count)]), torch.zeros(1, dtype=torch.int64)

    def made(kind: str) -> None:
        normals(keys.to(kind), number.to(kind), dimension, 1.0).to(setting.device)

    host, device = medians([partial(made, "cpu"), partial(made, setting.device)], setting.device, 2, 1)
    return {"host ms": 1000 * host, "device ms": 1000 * device, "note": f"{count} × {dimension}"}


def rows(setting: Setting) -> list[Row]:
    """Plain rounds first, then every place where noise is made."""
    rows, lenet = [], CASES[0]
    rows.append(Row("private", "LeNet-5, 1000 clients: host share", partial(waiting, case=lenet, count=1000, options={}), MOST_WAITING))
    for number, count in SIZES:
        for place in NOISES:
            name, most = f"{CASES[number].name}, {count} clients, noise of the {place}", Floor("x clipped", 1.5, at_least=False)
            measure = partial(against_clipped, case=CASES[number], count=count, noise=place)
            rows.append(Row("private", name, measure, most, limit=120.0))
    for place in NOISES:
        measure = partial(waiting, case=lenet, count=100, options=PRIVATE, noise=place)
        rows.append(Row("private", f"LeNet-5, 100 clients, noise of the {place}: host share", measure, MOST_WAITING))
    rows.append(Row("private", "noise of a step, 100 clients", partial(noise_of_a_step, count=100)))
    return rows
