"""Cross-fitted clustering over Flower's messages: the labels, the answer and p of a run in one process, whatever the protection."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from agreements import contract_of
from deployments import DyingGrid
from scenes import continuum, federation, population, training

from cflpriv.algorithms import crossfit
from cflpriv.contract.protection import Protection
from cflpriv.federation.server import FederationServer
from cflpriv.federation.transport import OverBytes
from cflpriv.flower import GridTransport
from cflpriv.flower.client import read_roster

PROTECTIONS = {
    "clear": ("", Protection()),
    "haar": ('gram = ["haar"]\nsum = "haar"', Protection(gram=("haar",), sum="haar")),
    "ckks": ('gram = ["ckks"]', Protection(gram=("ckks",))),
}


@pytest.mark.parametrize("name", PROTECTIONS)
@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "continuum"])
def test_labels_and_p_are_those_of_a_run_in_memory(name: str, grouped: bool, tmp_path: Path) -> None:
    if name == "ckks":
        pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    scene = population(2, 5) if grouped else continuum(10, 5)
    words, protection = PROTECTIONS[name]
    grid = DyingGrid(tmp_path, scene, words, {}, holders=int(name == "ckks"))
    transport = GridTransport(grid)  # type: ignore[arg-type]
    roster = read_roster(tmp_path / "keys" / "roster.txt")
    agreed = contract_of(crossfit(training(scene, dtype="float32", batch_size=20)), protection=protection, roster=roster)
    there = FederationServer(OverBytes(transport), protection=protection, roster=roster, seed=1, contract=agreed)
    transport.welcome(there, len(scene.clients), 30.0)
    here = federation(scene, release_policy="strict", seed=1)
    found: list[dict[str, Any]] = []
    for fed in (here, there):
        algorithm = crossfit(training(scene, dtype="float32", batch_size=20))
        described = dict(algorithm.describe(algorithm.init(fed)))
        evidence = described.pop("evidence")
        found.append(described)
        assert (evidence is None) == (fed is there and name == "ckks")
    assert found[0] == found[1]
    assert found[0]["answer"] == ("groups" if grouped else "no clear groups")
    assert not there.refusals
    assert not grid.errors
