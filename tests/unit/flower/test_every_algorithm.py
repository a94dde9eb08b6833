"""Every algorithm over Flower's messages: the transcript and the models of a run in one process."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from agreements import contract_of
from deployments import DyingGrid
from often import cases
from scenes import federation, mlp_training, population

from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.handles import Shared
from cflpriv.contract.transcript import Transcript
from cflpriv.federation.server import FederationServer
from cflpriv.federation.transport import OverBytes
from cflpriv.flower import GridTransport

SETTINGS: dict[str, dict[str, Any]] = {"cfl": {"watch": True}, "pfedlia": {"warm_up": 1}}


@pytest.mark.parametrize("name", cases(ALGORITHMS.ready()))
def test_flower_changes_nothing(name: str, tmp_path: Path) -> None:
    scene = population(clients_per_group=3, samples=12, test_samples=2, shape=(4,), separation=4.0)
    given = {"weights": "equal", "groups": {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}}
    wanted = inspect.signature(ALGORITHMS[name].make).parameters
    options = {key: value for key, value in given.items() if key in wanted} | SETTINGS.get(name, {})
    algorithm = ALGORITHMS[name].make(mlp_training(scene, dtype="float64", batch_size=6), **options)
    here = federation(scene, release_policy="strict", transcript=Transcript("headers"), seed=1)
    grid = DyingGrid(tmp_path, scene, "", {})
    there = FederationServer(
        OverBytes(GridTransport(grid)), transcript=Transcript("headers"), seed=1, contract=contract_of(algorithm)  # type: ignore[arg-type]
    )  # fmt: skip
    there.enrol()
    models: list[list[Any]] = []
    for fed in (here, there):
        state = algorithm.init(fed)
        for number in range(2):
            fed.begin_round(number)
            state, _ = algorithm.round(fed, state)
        served = [one for value in algorithm.serve(state).params.values() for one in (value if isinstance(value, list) else [value])]
        models.append([one.value() for one in served if isinstance(one, Shared) and not one.own])
    assert not there.refusals
    said = [
        [{key: value for key, value in vars(one).items() if key != "digest"} for one in fed.transcript.messages if one.operation != "group"]
        for fed in (here, there)
    ]
    assert said[0] == said[1]
    for one, other in zip(*models, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
