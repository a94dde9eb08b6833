"""A run over Flower's messages leaves the folder of a run in one process, in the clear to the last digest."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployments import APP, DyingGrid, check_run_folder

from cflpriv.data import build_population
from cflpriv.experiments import load_config, run_experiment
from cflpriv.flower import serve


@pytest.mark.slow
def test_the_run_folder_is_that_of_a_run_in_one_process(tmp_path: Path) -> None:
    # a stack of clients may round otherwise than one alone, which depends on the processor
    config = load_config(APP / "experiment.toml", ["protection.sum=none", "protection.min_cohort=1", "run.engine=sequential"])
    scene = build_population(config.data)
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    there, here = tmp_path / "flower", tmp_path / "local"
    serve(DyingGrid(tmp_path, scene, "", {}), config, there, scene, clients=4, truth=truth, report=str)  # type: ignore[arg-type]
    run_experiment(config, here)
    check_run_folder(there, here)
