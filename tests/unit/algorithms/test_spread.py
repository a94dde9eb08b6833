"""Weights inside values: a client that is alone in a centre or a block of an honest run would show, so clients refuse such sums."""

import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import Any, ClassVar

import numpy as np
import pytest
from loopback import remote
from scenes import eye, federation, population, training
from small_runs import configured

from cflpriv.algorithms.fedrc import RobustStep
from cflpriv.algorithms.fedsoft import SHARES, SoftStep
from cflpriv.algorithms.scaffold import TrainControlled
from cflpriv.contract.calls import TooUnequal
from cflpriv.contract.handles import Held, OwnAddend, Shared
from cflpriv.contract.protection import Protection
from cflpriv.engine import TaskInput
from cflpriv.errors import InputError
from cflpriv.experiments import Config
from cflpriv.experiments.run.run import prepare
from cflpriv.federation import server as server_module
from cflpriv.federation.server import FederationServer
from cflpriv.federation.server_state import KnownValue
from cflpriv.federation.values import spread_of
from cflpriv.plugins import TASKS
from cflpriv.protocols.errors import TooFewClients
from cflpriv.tasks.cluster_shares import CellShare, CentreShare, MomentShare, TrainInBlock
from cflpriv.tasks.joining import Join
from cflpriv.tasks.with_update import WithUpdate
from cflpriv.types import Parts

SCENE = population(groups=2, clients_per_group=4)
TRAIN = training(SCENE)
SECURE: dict[str, Any] = {"sum": "secagg", "min_cohort": 3, "secagg_clip": 8.0}


def soft(smoother: float, **protection: Any) -> Config:
    base: dict[str, dict[str, Any]] = {"model": {"name": "linear"}, "training": {"rounds": 2, "lr": 0.1, "weights": "equal"}}
    return configured(base, "fedsoft", algorithm={"smoother": smoother}, protection={**SECURE, **protection})


def played(config: Config) -> Any:
    simulation = prepare(config, population=SCENE)
    fed, algorithm = simulation.federation, simulation.algorithm
    state = algorithm.init(fed)
    fed.begin_round(0)
    return simulation, *algorithm.round(fed, state)


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("sum", ["secagg", "secagg-oblivious"])
def test_fedsoft_names_the_least_smoother_that_works(sum: str, mode: str) -> None:
    with pytest.raises(InputError, match=r"algorithm\.smoother = 0\.0001: .* at least 0\.\d+ keeps") as caught:
        played(soft(1e-4, sum=sum, secagg_mode=mode))
    least = float(str(caught.value).partition("at least ")[2].split()[0])
    assert 0.1 < least < 0.5
    with pytest.raises(InputError, match=rf"at least {least}"):
        played(soft(least - 2e-4, sum=sum, secagg_mode=mode))
    simulation, _, record = played(soft(least, sum=sum, secagg_mode=mode))
    assert "shares" in record.notes
    shares = [simulation.simulated.client(client).values.remembered(SHARES)[0] for client in simulation.federation.clients]
    for centre in zip(*shares, strict=True):
        weights = [Fraction(float(share)) for share in centre]
        assert sum_squared(weights) >= 3


def sum_squared(weights: list[Fraction]) -> Fraction:
    total = Fraction(0)
    squares = Fraction(0)
    for weight in weights:
        total, squares = total + weight, squares + weight**2
    return total**2 / squares


def test_in_the_clear_any_smoother_does() -> None:
    played(soft(1e-4, sum="none", min_cohort=1))


# --- what each task declares


@dataclass(frozen=True)
class Odd:
    """A task with a spread that is no number, and one inside it."""

    inner: Any = None

    spread: ClassVar[float] = float("nan")
    parts: ClassVar[Parts] = {"update": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> dict[str, Any]:
        return {"update": np.ones(3)}


BLOCKS: dict[str, Any] = {
    "TrainInBlock": TrainInBlock(TRAIN, 3, 1.0), "CellShare": CellShare(TRAIN.model),
    "WithUpdate of cells": WithUpdate(CellShare(TRAIN.model), TRAIN, 0.5), "RobustStep": RobustStep(TRAIN, 2),
}  # fmt: skip


def test_what_tasks_declare() -> None:
    assert {name: spread_of(task) for name, task in BLOCKS.items()} == dict.fromkeys(BLOCKS, inf)
    alike = [
        TRAIN, TrainInBlock(TRAIN, 1, 1.0), CentreShare(TRAIN.model), MomentShare(TRAIN.model), RobustStep(TRAIN, 1),
        WithUpdate(MomentShare(TRAIN.model), TRAIN, 0.5), TrainControlled(TRAIN), Join(("update",)),
    ]  # fmt: skip
    assert {spread_of(task) for task in alike} == {1.0}
    assert spread_of(SoftStep(TRAIN, 0.25, 0, 0)) == 4.0
    assert spread_of(Odd()) == inf
    assert spread_of(replace(Odd(), inner=TRAIN)) == inf


@pytest.mark.parametrize("name", ["pina", "rr_cluster", "private_clusters", "fedrc"])
@pytest.mark.parametrize("sum", ["secagg", "secagg-oblivious"])
def test_algorithms_with_blocks_of_clients_own_choice_are_refused_by_name(name: str, sum: str) -> None:
    base: dict[str, dict[str, Any]] = {"model": {"name": "linear"}, "training": {"rounds": 40, "weights": "equal"}}
    protection = {**SECURE, "sum": sum, "gram": ["haar"] if name == "pina" else []}
    with pytest.raises(InputError, match=rf"protection\.sum = '{sum}': clients of '{name}' put values into blocks .* privacy\.unit"):
        prepare(configured(base, name, protection=protection), population=SCENE)
    prepare(configured(base, name, protection=protection, algorithm={"k": 1}), population=SCENE)
    prepare(configured(base, name, protection={"gram": protection["gram"]}), population=SCENE)


# --- clients decide, whatever the server makes of it


def begun(carrier: str, **more: Any) -> FederationServer:
    protection = Protection(**{**SECURE, **more})
    if carrier == "bytes":
        fed = remote(SCENE, protection)[1]
    else:
        fed = federation(SCENE, protection, seed=1, release_policy="strict", on_error="refuse")
    fed.begin_round(0)
    return fed


def unaware(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that knows of no spread."""
    monkeypatch.setattr(server_module, "spread_of", lambda task: 1.0)
    monkeypatch.setattr(KnownValue, "spread", 1.0, raising=False)


def in_blocks(fed: FederationServer, task: Any = None) -> Held:
    models = [TRAIN.model.init(0, number) for number in range(2)]
    which = {client: client % 2 for client in fed.clients}
    return fed.compute(task or TrainInBlock(TRAIN, 2, 1.0), {"model": models}, which=which)["blocks"]


def copied(fed: FederationServer) -> Held:
    return fed.compute(Join(("copy",)), {"copy": in_blocks(fed)})["copy"]


def softly(fed: FederationServer) -> Held:
    return fed.compute(SoftStep(TRAIN, 1e-3, 0, 0), {"model": [TRAIN.model.init(0, number) for number in range(2)]})["blocks"]


def afterwards(fed: FederationServer) -> Held:
    """What a later step computes from what `SoftStep` kept."""
    softly(fed)
    return softly(fed)


def added_up(fed: FederationServer) -> Held:
    held = in_blocks(fed)
    return fed.fold(Shared(own=(OwnAddend(held), OwnAddend(held)))).own[0].held


@pytest.mark.parametrize("carrier", ["bytes", "memory"])
@pytest.mark.parametrize("value", [in_blocks, copied, softly, afterwards, added_up])
def test_a_client_refuses_a_sum_in_which_it_may_be_alone(value: Any, carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = "passive" if value is added_up else "active"  # where clients sum also what can be traced to nothing
    fed = begun(carrier, secagg_mode=mode)
    with pytest.raises(TooUnequal, match="below min_cohort = 3"):
        fed.mean(value(fed), models=2)
    unaware(monkeypatch)
    fed = begun(carrier, secagg_mode=mode)
    held = value(fed)
    with pytest.raises(TooFewClients):
        fed.mean(held, groups={client: client % 2 for client in fed.clients}, k=2)
    assert {code for _, _, code in fed.refusals} == {"too-unequal"}


@pytest.mark.parametrize("carrier", ["bytes", "memory"])
def test_and_sums_what_weighs_all_alike(carrier: str) -> None:
    fed = begun(carrier)
    held = fed.compute(TrainInBlock(TRAIN, 1, 1.0), {"model": [TRAIN.model.init(0)]}, which=dict.fromkeys(fed.clients, 0))["blocks"]
    (mean,) = fed.mean(held)
    assert mean is not None
    assert mean.count == 8


def test_a_task_of_ones_own_declares_its_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS.ready(), "Odd", Odd)
    fed = begun("bytes")
    with pytest.raises(TooUnequal, match=r"themselves without bound, .* with blocks of clients' own choice"):
        fed.mean(fed.compute(Odd())["update"])


@pytest.mark.parametrize("protect", [True, False])
@pytest.mark.parametrize("kind", ["blocks", "centres"])
def test_without_the_check_an_honest_run_shows_the_client_that_is_alone(kind: str, protect: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 is alone in its block, or centre, among 8 in the sum; nobody deviates."""
    unaware(monkeypatch)
    if not protect:
        monkeypatch.setattr("cflpriv.protocols.secagg.policy.reaches", lambda *numbers: True)
    fed, models = begun("memory"), [TRAIN.model.init(0), TRAIN.model.init(0, 1)]
    if kind == "centres":
        monkeypatch.setattr(sys.modules[SoftStep.__module__], "losses_of_models", lambda model, models, data: losses(data.id))
        held = fed.compute(SoftStep(TRAIN, 1e-4, 0, 0), {"model": models})["blocks"]
    else:
        which = {client: int(client == 0) for client in fed.clients}
        held = fed.compute(TrainInBlock(TRAIN, 2, 1.0), {"model": models}, which=which)["blocks"]
    own = np.asarray(eye(fed).peek(0, held))[1]
    for client in fed.clients:
        object.__setattr__(eye(fed).client(client)._settings, "models", 2)
    if protect:
        with pytest.raises(TooFewClients):
            fed.mean(held, models=2)
        assert {code for _, _, code in fed.refusals} == {"too-unequal"}
        return
    (mean,) = fed.mean(held, models=2)
    assert mean is not None
    shown = mean.parts["blocks"].value()[1] * mean.count
    assert np.linalg.norm(shown - own) < 0.01 * np.linalg.norm(own)


def losses(client: int) -> Any:
    """All samples of client 0 prefer centre 1, those of the others centre 0."""
    rows = np.zeros((2, 4))
    rows[int(client != 0)] = 1.0
    return rows
