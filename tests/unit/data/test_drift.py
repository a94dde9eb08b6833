"""Drift in a population: who has which data from when on, and what is refused."""

from typing import Any

import numpy as np
import pytest

from cflpriv.data import DataSpec, build_population
from cflpriv.data.drift import Drift
from cflpriv.data.shifts import rotate
from cflpriv.errors import InputError
from cflpriv.experiments.run.loop import population_digest
from cflpriv.types import Array

SCENE: dict[str, Any] = {"clients": 6, "samples_per_client": 20, "test_samples_per_client": 10, "rotations": (0, 90, 180)}


def samples_of(x: Array) -> set[bytes]:
    return {row.tobytes() for row in x}


def test_clients_get_fresh_samples_of_the_group_that_they_turn_to() -> None:
    drift = (Drift(2, (0, 1), group=2), Drift(4, (0,), group=0), Drift(3, (5,)), Drift(2, (4,), joins=True))
    population = build_population(DataSpec(**SCENE, drift=drift))
    happened = [(change.round, change.client, change.group, change.data is None) for change in population.changes]
    assert happened == [(2, 0, 2, False), (2, 1, 2, False), (2, 4, 1, True), (3, 5, 2, False), (4, 0, 0, False)]
    seen = {client.id: samples_of(client.x_train) for client in population.clients}
    turns = {0: 0, 1: 1, 2: 2}
    for change in population.changes:
        if change.data is None:
            continue
        assert len(change.data.y_train) == 20
        upright = rotate(change.data.x_train, -turns[change.group])
        own = population.clients[change.client]
        before = rotate(own.x_train, -turns[change.client % 3])
        assert not samples_of(upright) & samples_of(before), "samples that the client did not have"
        np.testing.assert_array_equal(rotate(change.data.x_test, -turns[change.group]), rotate(own.x_test, -turns[change.client % 3]))
    assert not seen[0] & samples_of(population.changes[-1].data.x_train)  # type: ignore[union-attr]


def test_a_population_without_drift_is_as_it_was_and_one_with_drift_has_another_digest() -> None:
    plain, late = (build_population(DataSpec(**SCENE, drift=drift)) for drift in ((), (Drift(1, (0,), joins=True),)))
    assert plain.changes == ()
    assert population_digest(plain) == population_digest(late), "who joins late has the same data"
    assert population_digest(build_population(DataSpec(**SCENE, drift=(Drift(1, (0,)),)))) != population_digest(plain)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"drift": (Drift(1, (6,)),)}, r"drift: round 1: clients = \[6\]: expected some of 0 to 5"),
        ({"drift": (Drift(1, (0,), group=3),)}, r"drift: round 1: client 0 of group 0 can have the data of groups \[0, 1, 2\], not of 3"),
        ({"drift": (Drift(1, (0,)), Drift(1, (0,), group=1))}, "drift: round 1: a client is named twice"),
        ({"drift": (Drift(1, (0,), joins=True), Drift(2, (0,), joins=True))}, r"drift: clients \[0\] join twice"),
        ({"drift": (Drift(1, (0,), group=1, joins=True),)}, "who joins has the data of its own group"),
        ({"drift": (Drift(1, tuple(range(6)), joins=True),)}, "all clients join later"),
        ({"drift": (Drift(1, (0,)),), "samples_per_client": 0}, "give samples_per_client"),
        ({"drift": (Drift(1, (0,)),), "held_out": "random"}, "goes with held_out = 'none'"),
        ({"drift": (Drift(1, (0,)),), "rotations": (), "partition": "dirichlet"}, "needs partition 'iid'"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        build_population(DataSpec(**{**SCENE, **changes}))


def test_a_round_before_the_second_is_refused() -> None:
    with pytest.raises(InputError, match=r"data.drift.round = 0: expected"):
        Drift(0, (0,))
