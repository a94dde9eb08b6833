"""A lying server against the real machines of the secure sum: with the model bound it gets nothing, without it the victim's update."""

from typing import Any

import numpy as np
import pytest
from attack_scenes import case, config

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.inversion.model_inconsistency import deadened, isolate, trained
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.protocols.entropy import public_entropy
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData

GRID = 2.0**-20
"""Coarser than the quantiser of a sum over eight clients with values within ±1."""


def people(model: Model, many: int, seed: int = 0) -> list[ClientData]:
    rng = np.random.default_rng(seed)
    x = [rng.random((12, *model.shape)).astype(model.dtype) for _ in range(many)]
    return [ClientData(i, one, rng.integers(0, model.classes, 12), one[:0], np.zeros(0, np.int64)) for i, one in enumerate(x)]


@pytest.mark.parametrize("model", [Model("mlp", (6,), 3, hidden=5), Model("lenet5", (1, 16, 16), 4)], ids=lambda model: str(model.name))
def test_a_dead_model_moves_in_the_heads_bias_only(model: Model) -> None:
    start = model.init(0)
    (client,) = people(model, 1)
    train = Train(model, epochs=2, batch_size=4, lr=0.1)
    head = slice(model.dimension - model.classes, model.dimension)
    moved = trained(client, train, deadened(model, start))
    assert not moved[: head.start].any()
    assert moved[head].any()
    assert np.abs(trained(client, train, start)[: head.start]).max() > 1e-4


def test_models_without_relu_cannot_be_silenced() -> None:
    with pytest.raises(InputError, match="'linear'"):
        deadened(Model("linear", (6,), 3), np.zeros(21))


def updates_of_dead_models(many: int = 5) -> tuple[dict[int, Array], dict[int, bytes], Array]:
    """Updates where all but client 2 train a dead model, the hashes of what they were sent, and client 2's update."""
    model = Model("mlp", (6,), 3, hidden=5)
    start, train = model.init(1), Train(model, epochs=1, batch_size=4, lr=0.1)
    dead = deadened(model, start)
    updates = {c.id: trained(c, train, start if c.id == 2 else dead) for c in people(model, many)}
    return updates, {c: bytes([c == 2] * 32) for c in updates}, updates[2]


def test_without_the_binding_the_sum_is_the_victims_update() -> None:
    updates, held, truth = updates_of_dead_models()
    done = isolate(updates, held, 2, binding=False, entropy=public_entropy("off"))
    assert done.update is not None
    assert np.abs(done.update - truth)[:-3].max() < GRID
    assert np.allclose(done.update, sum(updates.values()), atol=5 * GRID)


def test_with_the_binding_there_is_no_sum() -> None:
    updates, held, _ = updates_of_dead_models()
    done = isolate(updates, held, 2, binding=True, entropy=public_entropy("on"))
    assert done.update is None
    assert any("unlisted-model" in word for word in done.refused)
    assert any("too few clients are left to remove the masks" in word for word in done.refused)


def test_an_honest_server_gets_its_sum_under_the_binding() -> None:
    updates, _, _ = updates_of_dead_models()
    done = isolate(updates, dict.fromkeys(updates, bytes(32)), 2, binding=True, entropy=public_entropy("honest"))
    assert done.update is not None
    assert not done.refused
    assert np.allclose(done.update, sum(updates.values()), atol=5 * GRID)


def inconsistent_config(**protection: Any) -> Any:
    return config({"name": "fedavg"}, protection, training={"rounds": 1}, data={"clients": 8, "samples_per_client": 20})


def test_the_cell_is_at_baseline_beside_a_reference_that_leaks() -> None:
    cells, _ = ATTACKS["model_inconsistency"].cells(case(inconsistent_config(sum="secagg"), "active-server"))
    error, cosine = cells
    assert {error.status, cosine.status} == {"at_baseline"}
    assert error.value == error.baseline == 1.0
    assert error.reference is not None
    assert cosine.reference is not None
    assert error.reference < 1e-3
    assert cosine.reference > 0.999
    assert "unlisted-model" in error.note


@pytest.mark.parametrize(
    ("protection", "adversary", "status", "why"),
    [
        ({"sum": "secagg"}, "server", "not_attempted", "an active server"),
        ({"sum": "secagg-oblivious"}, "active-server", "not_attempted", "several models"),
        ({}, "active-server", "not_applicable", "single updates reach the server"),
    ],
)
def test_where_there_is_nothing_to_gain_the_cell_says_why(protection: dict[str, Any], adversary: str, status: str, why: str) -> None:
    (cell,) = ATTACKS["model_inconsistency"].cells(case(inconsistent_config(**protection), adversary))[0]
    assert cell.status == status
    assert why in cell.note
