"""Clients whose data changed are placed again, under each comparison; others are not; unseen groups are named, and open clusters."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from scenes import eye, federation, population, training

from cflpriv.algorithms import crossfit, pacfl
from cflpriv.algorithms.interface import Algorithm
from cflpriv.algorithms.shared import rechecks
from cflpriv.clustering.scores import ari
from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.experiments.config.config import parse_config
from cflpriv.experiments.run.run import prepare
from cflpriv.federation.server import FederationServer
from cflpriv.types import ClientData

PROTECTIONS = {"none": Protection(), "haar": Protection(gram=("haar",), sum="haar"), "secagg": Protection(gram=("haar",), sum="secagg")}
SCENE = population(groups=3, clients_per_group=10, samples=40, separation=3.0)
"""The clients of groups 0 and 1 are there; those of group 2 (2, 5, 8, …) are unseen."""
KNOWN = tuple(client for client in range(30) if client % 3 != 2)
MOVED = (0, 3)


@cache
def others() -> Sequence[ClientData]:
    """Fresh data of the same groups: other samples around the same centres."""
    more = population(groups=3, clients_per_group=20, samples=40, separation=3.0).clients
    return tuple(replace(more[client + 30], id=client) for client in range(30))


def data_of(client: int, group: int) -> ClientData:
    """Fresh data of a group, for a client."""
    return replace(others()[client - client % 3 + group], id=client)


def algorithm_of(name: str, **options: Any) -> Algorithm:
    task = training(SCENE, dtype="float32", batch_size=20)
    settings = {"weights": "equal", "recheck_every": 1, **options}
    return crossfit(task, **settings) if name == "crossfit" else pacfl(task, **settings)


def after_a_round(algorithm: Algorithm, protection: Protection, present: Sequence[int] = KNOWN) -> tuple[FederationServer, Any]:
    fed = federation(SCENE, protection, present=present, release_policy="strict")
    state = algorithm.init(fed)
    fed.begin_round(0)
    return fed, algorithm.round(fed, state)[0]


def next_round(algorithm: Algorithm, fed: FederationServer, state: Any) -> tuple[Any, Mapping[str, Any]]:
    fed.begin_round(fed.round + 1)
    state, record = algorithm.round(fed, state)
    return state, dict(record.notes.get("placements", {}))


@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize("name", ["crossfit", "pacfl"])
def test_clients_that_turn_move_to_their_group_and_nobody_else_does(name: str, protection: str) -> None:
    algorithm = algorithm_of(name)
    fed, state = after_a_round(algorithm, PROTECTIONS[protection])
    before = state.clustering
    assert before[0] != before[1]
    eye(fed).change([data_of(client, 1 if client in MOVED else client % 3) for client in KNOWN])
    state, notes = next_round(algorithm, fed, state)
    assert notes == {"changed": list(MOVED), "moved": [[client, before[0], before[1]] for client in MOVED]}
    assert all(state.clustering[client] == before[1 if client in MOVED else client] for client in KNOWN)
    state, notes = next_round(algorithm, fed, state)
    assert not notes


def test_moves_are_the_same_under_encryption() -> None:
    pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    algorithm = algorithm_of("pacfl")
    fed, state = after_a_round(algorithm, Protection(gram=("ckks",)))
    eye(fed).change([data_of(0, 1)])
    before = state.clustering
    state, notes = next_round(algorithm, fed, state)
    assert notes == {"changed": [0], "moved": [[0, before[0], before[1]]]}


def test_without_a_change_nothing_is_compared_again() -> None:
    algorithm = algorithm_of("crossfit")
    fed, state = after_a_round(algorithm, Protection())
    compared = [message for message in fed.transcript.messages if message.operation == "gram"]
    state, notes = next_round(algorithm, fed, state)
    assert not notes
    assert [message for message in fed.transcript.messages if message.operation == "gram"] == compared
    gathered = [message for message in fed.transcript.messages if message.operation == "gather"]
    assert gathered, "the answers of clients are in the transcript"


ENCRYPTED = pytest.param("pacfl", Protection(gram=("ckks",)), marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "protection"), [("crossfit", Protection()), ("pacfl", PROTECTIONS["haar"]), ENCRYPTED])
def test_newcomers_of_an_unseen_group_open_a_cluster_and_a_single_one_belongs_to_none(name: str, protection: Protection) -> None:
    if "ckks" in protection.gram:
        pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    algorithm = algorithm_of(name)
    assert algorithm.admit is not None
    fed, state = after_a_round(algorithm, protection, [client for client in KNOWN if client != 4])
    eye(fed).join([2, 4])
    state, notes = algorithm.admit(fed, state, [2, 4])
    assert notes["placements"]["unplaced"] == [2]
    assert state.clustering[4] == state.clustering[1]
    state, notes = next_round(algorithm, fed, state)
    assert notes["unplaced"] == [2], "it waits, and is compared again with those that come"
    assert 2 not in state.groupings.training.clients
    eye(fed).join([5, 8])
    state, notes = algorithm.admit(fed, state, [5, 8])
    assert notes["placements"]["unplaced"] == [2, 5, 8]
    state, notes = next_round(algorithm, fed, state)
    assert notes == {"opened": {"2": [2, 5, 8]}}
    assert set(state.clustering.members(2)) == {2, 5, 8} <= set(state.groupings.training.clients)
    assert len(state.models) == 3


def test_a_client_that_was_not_placed_again_names_its_change_again() -> None:
    """A round that fails after the check loses the server's state; the client does not take its answer for done."""
    algorithm = algorithm_of("crossfit")
    fed, state = after_a_round(algorithm, Protection())
    eye(fed).change([data_of(0, 1)])
    _, lost = next_round(algorithm, fed, state)
    _, again = next_round(algorithm, fed, state)
    assert lost["changed"] == again["changed"] == [0]


def test_a_client_that_turns_back_moves_back() -> None:
    algorithm = algorithm_of("crossfit")
    fed, state = after_a_round(algorithm, Protection())
    labels = []
    for group in (1, 0):
        eye(fed).change([data_of(0, group)])
        state, _ = next_round(algorithm, fed, state)
        labels.append(state.clustering[0])
    assert labels == [state.clustering[1], state.clustering[3]]


@pytest.mark.parametrize("algorithm", ["crossfit", "pacfl"])
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_where_most_clients_change_the_groups_are_found_anew(algorithm: str, protection: str) -> None:
    """All clients turn, some to the other group and some to a third: the groups are those of the data that they have now."""
    made = algorithm_of(algorithm)
    fed, state = after_a_round(made, PROTECTIONS[protection])
    before = state.clustering
    groups = {client: 2 if client % 4 == 0 else 1 - client % 3 for client in KNOWN}
    eye(fed).change([data_of(client, groups[client]) for client in KNOWN])
    state, notes = next_round(made, fed, state)
    assert set(notes) == {"changed", "found_anew"}
    assert len(notes["changed"]) > len(KNOWN) / 2
    assert notes["found_anew"] == state.clustering.k == len(state.groupings.models) == 3
    assert ari([groups[client] for client in KNOWN], [state.clustering[client] for client in KNOWN]) == 1.0
    assert state.clustering is not before
    assert state.groupings.unplaced == ()
    _, notes = next_round(made, fed, state)
    assert not notes, "they were placed by the data that they have now"


@pytest.mark.parametrize("algorithm", ["crossfit", pytest.param("pacfl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_clients_that_were_away_when_groups_were_found_anew_are_placed_after_their_return(algorithm: str, protection: str) -> None:
    made = algorithm_of(algorithm)
    fed, state = after_a_round(made, PROTECTIONS[protection])
    away, there = (0, 1, 3), [client for client in KNOWN if client not in (0, 1, 3)]
    eye(fed).leave(away)
    eye(fed).change([data_of(client, 1 - client % 3) for client in there])
    state, notes = next_round(made, fed, state)
    assert notes["found_anew"] == 2
    assert set(notes["unplaced"]) == set(state.groupings.unplaced) == set(away)
    assert set(state.clustering.clients) == set(KNOWN), "they have a model"
    assert set(state.groupings.training.clients) == set(there)
    eye(fed).join([0])
    eye(fed).change([data_of(client, 1 - client % 3) for client in away])
    state, notes = next_round(made, fed, state)
    assert set(state.groupings.unplaced) == {1, 3}
    assert state.clustering[0] == state.clustering[6]
    eye(fed).join([1, 3])
    state, notes = next_round(made, fed, state)
    assert state.groupings.unplaced == state.groupings.waiting == ()
    assert ari([client % 3 for client in KNOWN], [state.clustering[client] for client in KNOWN]) == 1.0
    assert set(state.groupings.training.clients) == set(KNOWN)


@pytest.mark.parametrize("gram", ["haar", pytest.param("ckks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["crossfit", "pacfl"])
def test_a_cluster_that_is_too_small_after_moves_joins_the_nearest(name: str, gram: str) -> None:
    """Seven of ten clients of one group turn to the other; of the three that stay one is away. Under "wait" they keep their model."""
    if gram == "ckks":
        pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    protection = Protection(gram=(gram,), sum="secagg", min_cohort=4, small_clusters="merge")
    algorithm = algorithm_of(name)
    turned, stay = [client for client in KNOWN if client % 3 == 0][:7], [21, 24, 27]
    for made in (protection, replace(protection, small_clusters="wait")):
        fed, state = after_a_round(algorithm, made)
        before = state.clustering
        eye(fed).leave([27])
        eye(fed).change([data_of(client, 1) for client in turned])
        state, notes = next_round(algorithm, fed, state)
        into = before[1] if made.small_clusters == "merge" else before[21]
        assert notes.get("merged", {}) == ({str(before[21]): before[1]} if made.small_clusters == "merge" else {})
        assert {state.clustering[client] for client in turned} == {before[1]}
        assert {state.clustering[client] for client in stay} == {into}
        assert {client for client, _, _ in notes["moved"]} == set(turned)


def test_members_of_one_cluster_with_different_labels_are_refused() -> None:
    algorithm = algorithm_of("crossfit")
    _, state = after_a_round(algorithm, Protection())
    result = {"placed": np.ones(3, int), "labels": np.array([0, 0, 1]), "nearest": np.zeros(3, int)}
    with pytest.raises(InputError, match="members of one cluster have different labels"):
        rechecks._placed(state.groupings, [0, 3, 6], result, {0}, 3)


def test_few_landmarks_leave_room_for_members_of_each_cluster() -> None:
    algorithm = algorithm_of("crossfit", landmarks=6)
    fed, state = after_a_round(algorithm, Protection())
    turned = KNOWN[:12:2]  # as many as are compared at most, all of one group
    before = state.clustering
    eye(fed).change([data_of(client, 1) for client in turned])
    state, notes = next_round(algorithm, fed, state)
    assert notes["changed"] == list(turned)
    assert {state.clustering[client] for client in turned} == {before[1]}


def test_checks_that_can_find_nothing_are_named_before_the_run() -> None:
    tree: dict[str, Any] = {
        "data": {"clients": 1000, "samples_per_client": 20}, "training": {"rounds": 20, "weights": "equal"},
        "algorithm": {"name": "crossfit", "recheck_every": 1},
    }  # fmt: skip
    (line,) = parse_config(tree).doubts
    assert "with 20 samples a client no change can be found after check 3 of 19" in line
    tree["data"]["samples_per_client"] = 100
    assert not parse_config(tree).doubts
    with pytest.raises(InputError, match=r"recheck_alpha"):
        parse_config({**tree, "algorithm": {**tree["algorithm"], "recheck_alpha": 1e-307}})


def test_no_private_form_is_refused_by_name() -> None:
    """Whether data changed is one exact bit of the samples."""
    common = {"data": {"clients": 8}, "training": {"weights": "equal"}, "algorithm": {"name": "crossfit", "recheck_every": 2}}
    private = {"epsilon": 8.0, "delta": 1e-5}
    with pytest.raises(InputError, match=r"algorithm.recheck_every = 2 under privacy.unit = 'sample': .* has no private form"):
        parse_config({**common, "privacy": {"unit": "sample", "samples": 100, **private}})
    for local in ((), ("gram",)):
        config = parse_config({**common, "privacy": {"unit": "client", "local": list(local), **private}})
        with pytest.raises(InputError, match=r"uses .*gather, which would release single clients' values"):
            prepare(config, population=SCENE)
    with pytest.raises(InputError, match=r"algorithm.recheck_every: 2 goes with cut = 'test'"):
        pacfl(training(SCENE), beta=10.0, recheck_every=2)


@pytest.mark.parametrize(("labels", "nearest"), [([0, 3], [0, 1]), ([0, 1], [0, 2]), ([0, 1], [-1, 0])])
def test_labels_that_no_honest_holder_releases_are_refused(labels: list[int], nearest: list[int]) -> None:
    algorithm = algorithm_of("crossfit")
    _, state = after_a_round(algorithm, Protection())
    result = {"placed": np.array([1, 1]), "labels": np.array(labels), "nearest": np.array(nearest)}
    with pytest.raises(InputError, match="do not follow the 2 known ones, or a nearest one is not known"):
        rechecks._placed(state.groupings, [0, 1], result, {0, 1}, 3)


@pytest.mark.slow
def test_fresh_data_of_the_same_groups_move_nobody() -> None:
    """100 runs of four checks in which all clients get fresh data: at most 10 name a client, and three standard errors."""
    false = 0
    for seed in range(100):
        scene = population(groups=2, clients_per_group=6, samples=100, seed=seed, separation=1.0)
        algorithm = crossfit(training(scene, dtype="float32"), recheck_every=1, recheck_alpha=0.1, k=2)
        clients = [replace(own, x_train=own.x_train[:20], y_train=own.y_train[:20]) for own in scene.clients]
        fed = federation(clients)
        state = algorithm.init(fed)
        changed: list[int] = []
        for number in range(5):
            fed.begin_round(number)
            at = slice(20 * number, 20 * (number + 1))
            eye(fed).change([replace(own, x_train=own.x_train[at], y_train=own.y_train[at]) for own in scene.clients])
            state, record = algorithm.round(fed, state)
            changed += record.notes.get("placements", {}).get("changed", [])
        false += bool(changed)
    assert false <= 10 + 3 * np.sqrt(100 * 0.1 * 0.9)
