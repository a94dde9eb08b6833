"""Updates scaled to the clip norm: their direction, what stays as trained, and a price that does not change."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from loopback import ENTROPY
from scenes import eye, federation, mlp_training, population, task_input, training
from small_runs import configured

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.ditto import MEMORY, TrainBoth
from cflpriv.algorithms.lg_fedavg import TrainParted
from cflpriv.contract.protection import Protection
from cflpriv.engine import Device, Streams, TaskInput
from cflpriv.engine.span import Movement
from cflpriv.errors import InputError
from cflpriv.experiments.run.private import planned_events
from cflpriv.privacy.client_level import client_noise
from cflpriv.privacy.settings import Privacy, Releases
from cflpriv.protocols.events import Relation
from cflpriv.protocols.ledger import Ledger
from cflpriv.protocols.mechanisms import CLIP_SLACK, clip

SCENE = population(clients_per_group=3)
C = 0.3
PLAIN = training(SCENE, dtype="float32", batch_size=0, epochs=3, lr=0.1)
SCALED = replace(PLAIN, update_norm=C)
BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 6}, "model": {"name": "linear"}, "training": {"rounds": 4, "weights": "equal"}, "algorithm": {"name": "fedavg"},
    "privacy": {"unit": "client", "epsilon": 2.0, "delta": 1e-5, "clip_norm": C},
}  # fmt: skip
small_config = partial(configured, BASE)


def inputs_of(train: Any, count: int = 4) -> list[TaskInput]:
    start = train.model.init(0)
    return [TaskInput(SCENE.clients[i], {"model": start}, {}, Streams(0, 0, i)) for i in range(count)]


def length(update: Any) -> float:
    return float(np.linalg.norm(np.asarray(update, np.float64)))


def test_an_update_has_the_norm_and_its_direction_and_the_local_model_is_as_trained() -> None:
    for one, many in zip(inputs_of(SCALED), SCALED.run_many(inputs_of(SCALED), Device())[0], strict=True):
        plain, scaled = PLAIN.run(one), SCALED.run(one)
        assert length(scaled["update"]) == pytest.approx(C, rel=1e-6)
        assert scaled["update"].dtype == plain["update"].dtype
        np.testing.assert_allclose(scaled["update"], plain["update"] * (C / length(plain["update"])), rtol=1e-5, atol=1e-8)
        np.testing.assert_array_equal(np.asarray(scaled["trained"]), np.asarray(plain["trained"]))
        np.testing.assert_allclose(many["update"], scaled["update"], rtol=1e-4, atol=1e-6)


@given(
    arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    st.floats(1e-6, 1e6),
)
@settings(deadline=None, max_examples=200)
def test_any_update_is_as_long_as_asked_or_next_to_nothing(update: Any, norm: float) -> None:
    sent = np.asarray(replace(PLAIN, update_norm=norm).sent(update))
    assert np.isfinite(sent).all()
    if length(update) > 1e-30:
        assert length(sent) == pytest.approx(norm, rel=1e-5)
    else:
        np.testing.assert_array_equal(sent, update)
    assert length(clip(sent, norm)) <= norm * (1 + CLIP_SLACK)


def test_a_zero_update_stays_zero() -> None:
    np.testing.assert_array_equal(np.asarray(SCALED.sent(np.zeros(5, np.float32))), 0.0)


def test_a_movement_in_span_form_stays_in_it() -> None:
    train = replace(mlp_training(SCENE, hidden=64, batch_size=0, epochs=2, weight_decay=0.1), update_norm=C)
    results, _ = train.run_many(inputs_of(train), Device(kind="cpu"))
    for one, result in zip(inputs_of(train), results, strict=True):
        assert length(result["update"]) == pytest.approx(C, rel=1e-5)
        np.testing.assert_allclose(np.asarray(result["update"]), train.run(one)["update"], rtol=1e-3, atol=1e-5)
    raw = replace(train, update_norm=0.0).run_many(inputs_of(train), Device())[0][0]["update"]
    if isinstance(raw, Movement):
        np.testing.assert_allclose(np.asarray(raw.scaled(0.5)), 0.5 * np.asarray(raw), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_one_client_moves_a_sum_by_the_clip_norm_exactly(relation: Relation) -> None:
    """Neighbouring populations, one whose first client's contribution is there, zero, or another: sums without the same noise."""
    privacy = Privacy("client", relation, 2.0, 1e-3, clip_norm=C)
    sums = []
    for other in (0, 1):
        clipped, _ = client_noise(privacy, Releases(trainings=1), Protection(), Ledger(privacy.budget), ENTROPY)
        clients = (replace(SCENE.clients[0], y_train=(SCENE.clients[0].y_train + other) % SCENE.classes), *SCENE.clients[1:])
        fed = federation(replace(SCENE, clients=clients), seed=1, privacy=privacy, clipped=clipped)
        fed.begin_round(0)
        held = fed.compute(SCALED, {"model": SCALED.model.init(0)})["update"]
        shares = [clip(eye(fed).peek(client, held), C) for client in fed.clients]
        assert all(length(share) == pytest.approx(C, rel=1e-6) for share in shares), "the whole of what is paid for"
        assert all(length(share) <= C * (1 + CLIP_SLACK) for share in shares)
        sums.append(np.sum(shares, axis=0))
        assert clipped.event.sensitivity == (C if relation == "add_remove" else 2 * C)
    assert 0.1 * C < length(sums[0] - sums[1]) <= 2 * C * (1 + 1e-9)


def test_the_price_does_not_depend_on_it() -> None:
    events = []
    for updates in ("scaled", "clipped"):
        config = small_config(privacy={"updates": updates})
        algorithm = ALGORITHMS["fedavg"].make(config.train_for(SCENE))
        events.append(planned_events(config, algorithm, 4))
    assert events[0] == events[1]
    assert len(events[0]) == 4


def test_own_models_of_clients_are_not_scaled() -> None:
    """Ditto's personal model and LG-FedAvg's own layers move as local training moves them; what is summed has the norm."""
    start = PLAIN.model.init(0)
    one = task_input(SCENE.clients[0], {"model": start})
    plain, scaled = (TrainBoth(train, replace(train, prox=0.1), 0).run(one) for train in (PLAIN, SCALED))
    np.testing.assert_array_equal(scaled[MEMORY], plain[MEMORY])
    assert length(scaled["update"]) == pytest.approx(C, rel=1e-6)
    mlp = mlp_training(SCENE)
    cut = mlp.model.dimension // 2
    part = task_input(SCENE.clients[0], {"model": mlp.model.init(0)[cut:]})
    plain, scaled = (TrainParted(train, cut, 0).run(part) for train in (mlp, replace(mlp, update_norm=C)))
    np.testing.assert_array_equal(scaled["trained"], plain["trained"])
    assert length(scaled["update"]) == pytest.approx(C, rel=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto", "private_clusters", "rr_cluster", "fedrc", "oracle"])
def test_every_method_at_the_client_level_trains_alike(name: str) -> None:
    config = small_config(name)
    train = config.train_for(SCENE)
    assert (train.update_norm, train.epochs, train.batch_size) == (C, 10, 0)
    plain = small_config(name, privacy={"updates": "clipped"}, training={"epochs": 1, "batch_size": 10}).train_for(SCENE)
    assert (plain.update_norm, plain.epochs, plain.batch_size) == (0.0, 1, 10)
    assert "training.epochs = 10" in config.fitted(SCENE)[1]


def test_a_clip_norm_that_follows_lengths_leaves_lengths() -> None:
    assert small_config(privacy={"clip_quantile": 0.5}).train_for(SCENE).update_norm == 0.0
    with pytest.raises(InputError, match=r"privacy\.clip_quantile = 0\.5 with privacy\.updates = 'scaled'"):
        small_config(privacy={"clip_quantile": 0.5, "updates": "scaled"})
    with pytest.raises(InputError, match=r"privacy\.updates = 'scaled' with privacy\.unit = 'sample'"):
        small_config(privacy={"unit": "sample", "updates": "scaled", "samples": 30})
