"""Signatures and angles on the device against the CPU, and the whole of examples/pacfl_fmnist.toml."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cflpriv.clustering.similarity import Gram, angles
from cflpriv.data import data_directory
from cflpriv.engine.device import CPU, Device, using
from cflpriv.tasks.signatures import principal_vectors

from .rows import ROOT, Figures, Missing, Row, Setting, medians

__all__ = ["rows", "run_of"]


def run_of(setting: Setting, folder: Path, example: str, changes: Sequence[str]) -> dict[str, Any]:
    """The summary of a run of an example on the device."""
    from cflpriv.experiments import load_config, run_experiment

    return dict(run_experiment(load_config(ROOT / "examples" / example, [f"run.device={setting.device}", *changes]), folder))


def algebra(setting: Setting, work: Callable[[], object], note: str) -> Figures:
    """A server's linear algebra on the device against the CPU."""

    def on(device: Device) -> None:
        with using(device):
            work()

    there, here = medians([partial(on, Device(setting.device)), partial(on, CPU)], setting.device, 3, 1)
    return {"ms": 1000 * there, "x CPU": here / there, "note": note}


def signatures(setting: Setting) -> Figures:
    """Principal vectors of clients, one after the other."""
    rng = np.random.default_rng(0)
    samples = [rng.random((500, 784)) for _ in range(setting.size(20, 1))]
    return algebra(setting, lambda: [principal_vectors(x, 3) for x in samples], f"{len(samples)} clients, 500 × 784, p = 3")


def all_angles(setting: Setting) -> Figures:
    """The smallest angles of all pairs of signatures."""
    rng, count = np.random.default_rng(0), setting.size(1000, 30)
    vectors = np.linalg.qr(rng.normal(size=(count, 784, 3)))[0].transpose(0, 2, 1).copy()
    return algebra(setting, lambda: angles(Gram.of_vectors(range(count), vectors)), f"{count} clients, d = 784, p = 3")


def pacfl(setting: Setting) -> Figures:
    """The whole example, with what its clusters are."""
    if not Path(data_directory(), "fashion_mnist").is_dir():
        raise Missing("fashion_mnist is not in CFLPRIV_DATA")
    with tempfile.TemporaryDirectory() as folder:
        changes = ["training.rounds=1", "data.clients=10", "data.samples_per_client=40"] if setting.tiny else []
        summary = run_of(setting, Path(folder) / "run", "pacfl_fmnist.toml", changes)
    note = f"{summary['rounds']} rounds, accuracy {summary['accuracy_mean']:.3f}, ARI {summary['ari']:.2f}"
    return {"s": summary["seconds"], "accuracy": summary["accuracy_mean"], "ARI": summary["ari"], "note": note}


def rows(setting: Setting) -> list[Row]:
    """The whole run before its parts."""
    return [
        Row("whole_run", "pacfl_fmnist", pacfl, limit=180.0), Row("whole_run", "signatures", signatures),
        Row("whole_run", "angles", all_angles),
    ]  # fmt: skip
