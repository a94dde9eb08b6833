"""Real deployments on the loopback: SuperLink, SuperNodes, a process for every message. Nodes that are killed are in test_kills.

Minutes each, mostly Flower starting processes: one is in the default suite (marker `flower`), the others are `slow`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployments import local_models, loopback
from safetensors.numpy import load_file

from cflpriv.record import read_transcript


@pytest.mark.flower
@pytest.mark.timeout(900)
def test_a_deployment_with_secure_sums_finds_the_clusters_and_models_of_a_local_run(tmp_path: Path) -> None:
    """`main` asserts Flower's own word, finished:completed. Sums are quantised: 2^-20 or so of the clip range a client."""
    summary = loopback().main(["--out", str(tmp_path / "d"), "--rounds", "1"])
    clustering, models = local_models(["training.rounds=1", "protection.sum=none", "protection.floor=0"])
    run = tmp_path / "d" / "run"
    assert summary["ari"] == 1.0
    assert json.loads((run / "measured.json").read_text())["labels"] == {str(c): clustering[c] for c in range(4)}
    found = load_file(run / "checkpoints" / "models.safetensors")
    for i, model in enumerate(models):
        np.testing.assert_allclose(found[f"model/{i}"], model, atol=1e-5)
    kinds = {one.kind for one in read_transcript(run / "transcript", summary["messages"])}
    assert "secagg Masked" in kinds
    assert "update" not in kinds
    assert not summary["refusals"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_secure_sums_the_parameters_are_those_of_a_local_run(tmp_path: Path) -> None:
    summary = loopback().main(
        ["--out", str(tmp_path / "d"), "--rounds", "2", "--set", "protection.sum=none", "--set", "protection.floor=1"]
    )
    _, models = local_models(["training.rounds=2", "protection.sum=none", "protection.floor=1"])
    found = load_file(tmp_path / "d" / "run" / "checkpoints" / "models.safetensors")
    for i, model in enumerate(models):
        np.testing.assert_allclose(found[f"model/{i}"], model, atol=1e-6)
    assert summary["accuracy_mean"] > 0.5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_tls_and_authenticated_nodes(tmp_path: Path) -> None:
    summary = loopback().main(["--out", str(tmp_path / "d"), "--rounds", "1", "--tls"])
    assert summary["ari"] == 1.0
