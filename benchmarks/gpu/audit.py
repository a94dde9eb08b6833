"""The audit's attacks on the device against the CPU: inversions in batches, shadow models and membership; then an audit of a run."""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cflpriv.attacks.inversion.image_search import LocalSteps, invert_updates, unroll
from cflpriv.attacks.membership.member_scores import confidences, lira, roc, samples_of_shadows, shadow_models
from cflpriv.engine import Engine
from cflpriv.engine.device import CPU, Device, using
from cflpriv.engine.models import Model
from cflpriv.tasks.training import Train

from .rows import Figures, Floor, Row, Setting, medians, seconds
from .training import fresh

__all__ = ["rows"]

AT_ONCE, COMPARED = (64, 8, 256), 64
"""Images that are inverted at once, and how many of them on the CPU as well."""


def inversion(setting: Setting, count: int) -> Figures:
    """Inversions of one image each on the device, and of `COMPARED` on the CPU, once each after a short one to warm up."""
    side, iterations, at_once = setting.size(28, 8), setting.size(40, 2), setting.size(count, 2)
    model, rng = Model("sigmoid_lenet", (1, side, side), 10, dtype="float64"), np.random.default_rng(0)
    x, y = rng.random((at_once, 1, *model.shape)), rng.integers(0, 10, (at_once, 1))
    starts = np.repeat(model.init(0)[None], at_once, axis=0)
    updates = unroll(model, LocalSteps())(torch.tensor(starts), torch.tensor(x), torch.tensor(y)).detach().numpy()
    left: dict[str, float] = {}

    def invert(device: Device, iterations: int = iterations) -> None:
        with using(device):
            _, apart = invert_updates(model, starts, updates, y, LocalSteps(), np.random.default_rng(1), iterations=iterations)
        left[device.kind] = float(np.median(apart))

    with fresh(setting.device):
        invert(Device(setting.device), 2)
        there = seconds(partial(invert, Device(setting.device)), setting.device)
        figures: Figures = {"s": there, "images/s": at_once / there, "distance left": left[setting.device]}
        if count == COMPARED:
            figures["x CPU"] = seconds(partial(invert, CPU), "cpu") / there
    return {**figures, "note": f"{at_once} at once, {side}×{side}, {iterations} iterations"}


def shadows(setting: Setting) -> Figures:
    """Shadow models of LeNet-5 as clients of one program on the device, against the CPU; and the confidences and LiRA that follow."""
    model, count, samples = Model("lenet5", (1, 28, 28), 10), setting.size(64, 2), setting.size(400, 20)
    rng, task = np.random.default_rng(0), Train(model, epochs=2, lr=0.05)
    x, y = rng.random((samples, *model.shape), dtype=np.float32), rng.integers(10, size=samples)
    inside, start, device = samples_of_shadows(samples, count, rng), model.init(0), Device(setting.device)

    def train(where: Device) -> Any:
        return shadow_models(task, x, y, inside, start, 0, Engine(device=where.kind))

    def confident(where: Device, vectors: Any) -> Any:
        with using(where):
            return confidences(model, vectors, x, y)

    with fresh(setting.device):
        there = medians([partial(train, device)], setting.device)[0]
        vectors = train(device)
        begun = time.perf_counter()
        here = train(CPU)
        cpu = time.perf_counter() - begun
        asked = medians([partial(confident, device, vectors), partial(confident, CPU, vectors)], setting.device, 1, 1)
        seen = confident(device, vectors)
        apart = float(np.abs(vectors - here).max() / np.abs(here - start).max())
        auc = roc(lira(seen[0], seen[1:], inside[1:]), inside[0]).auc if count > 2 else float("nan")
    figures = {"s": there, "x CPU": cpu / there, "difference": apart, "confidences ms": 1000 * asked[0]}
    figures["confidences x CPU"] = asked[1] / asked[0]
    return {**figures, "note": f"{count} models × {samples // 2} samples; LiRA's AUC {auc:.3f}"}


def whole_audit(setting: Setting) -> Figures:
    """A quick audit of a run of the digits, both on the device."""
    from cflpriv.attacks.audit import audit_run

    from .whole_run import run_of

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        changes = ["training.rounds=1", "data.clients=4"] if setting.tiny else []
        run_of(setting, place, "pacfl_digits.toml", ["run.record=full", *changes])
        attacks = ("label_inference",) if setting.tiny else None
        begun = time.perf_counter()
        cells = audit_run(place, adversary="server", attacks=attacks, budget="quick", device=setting.device)
        return {"s": time.perf_counter() - begun, "note": f"budget quick, {len(cells)} figures"}


def rows(setting: Setting) -> list[Row]:
    """Inversions, shadow models with membership, and an audit of a run."""
    rows = []
    for count in AT_ONCE:
        floor = Floor("x CPU", 20.0) if count == COMPARED else None
        rows.append(Row("audit", f"inversion, {count} images at once", partial(inversion, count=count), floor, limit=120.0))
    rows.append(Row("audit", "shadow models and membership", shadows))
    return [*rows, Row("audit", "audit of pacfl_digits", whole_audit, limit=120.0)]
