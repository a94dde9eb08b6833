"""Key recovery: sums that no permutation hides, clouds that name labels, and what of it is left under other transforms."""

import importlib.util
import os
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from types import ModuleType
from typing import Any

import attack_scenes
import numpy as np
import pytest
from checkout import ROOT
from hypothesis import given, settings
from hypothesis import strategies as some

from cflpriv.attacks.evidence.fresh_runs import AuditedRun, case_of, fresh_scene
from cflpriv.attacks.figures.leakage import BUDGETS, Cell, Truth, truth_of
from cflpriv.attacks.figures.pooling import pooled
from cflpriv.attacks.figures.significance import judge
from cflpriv.attacks.key_recovery import (
    KeyRecoveryGuess,
    Knowledge,
    cells,
    find_structure,
    guess,
    recover_labels,
    transformed_rounds,
    zero_sum_blocks,
)
from cflpriv.attacks.key_recovery.cells import (
    knowledge,
    score_histograms,
    score_label_sets,
    score_structure,
    structure_at_random,
    structure_chance,
)
from cflpriv.attacks.key_recovery.naming import (
    Response,
    cloud,
    cloud_distance,
    head_blocks,
    name_columns,
    on_simplex,
    rounded,
    simulate_updates,
)
from cflpriv.attacks.key_recovery.structure import rough_proportions
from cflpriv.data import build_population
from cflpriv.engine import Streams, TaskInput
from cflpriv.errors import InputError
from cflpriv.experiments import Config, parse_config
from cflpriv.types import Array, ClientData

pytestmark = pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
"""The steps before clusters are formed are what is tested."""

PAIRS = [[0, 7], [1, 4], [2, 9], [3, 6], [5, 8]]


# --- structure ----------------------------------------------------------------------------------------------------------------------


def planted(
    rng: np.random.Generator, blocks: int, d: int = 400, rounds: int = 6, n: int = 12, classes: int = 5
) -> tuple[list[Array], Array]:
    """Updates (rounds of (n, d)) whose first blocks·classes coordinates add up to zero by block; and the blocks (blocks, classes)."""
    updates = rng.normal(size=(rounds * n, d)) * rng.uniform(0.2, 1.0, d)
    places = np.arange(blocks * classes).reshape(blocks, classes)
    for place in places:
        traces = rng.normal(size=(rounds * n, classes)) + 2.0 * (rng.random((rounds * n, classes)) < 0.3)
        updates[:, place] = 1.5 * (traces - traces.mean(axis=1, keepdims=True))
    return list(updates.reshape(rounds, n, d)), places


@settings(deadline=None, max_examples=15)
@given(seed=some.integers(0, 10**6), blocks=some.integers(1, 4), signed=some.booleans())
def test_planted_blocks_are_found_and_nothing_else(seed: int, blocks: int, signed: bool) -> None:
    rng = np.random.default_rng(seed)
    rounds, places = planted(rng, blocks)
    d = rounds[0].shape[1]
    order, signs = rng.permutation(d), rng.choice([-1.0, 1.0], d) if signed else np.ones(d)
    found = zero_sum_blocks([(rows * signs)[:, order] for rows in rounds], 5)
    assert {frozenset(order[list(block.coordinates)].tolist()) for block in found} == {frozenset(place.tolist()) for place in places}
    for block in found:
        true = signs[order[list(block.coordinates)]]
        assert abs(float(true @ np.array(block.signs))) == 5  # right up to one sign for all


@settings(deadline=None, max_examples=10)
@given(seed=some.integers(0, 10**6), classes=some.integers(2, 6), single=some.booleans())
def test_few_rows_of_a_small_model_show_all_blocks(seed: int, classes: int, single: bool) -> None:
    """One round of six clients, whose order of coordinates no other round shares: all sums of half a block are matched."""
    rng = np.random.default_rng(seed)
    rounds, places = planted(rng, 6, d=50, rounds=1, n=6, classes=classes)
    order = rng.permutation(50)
    shown = [rows[:, order].astype(np.float32 if single else np.float64) for rows in rounds]
    found = zero_sum_blocks(shown, classes)
    assert {frozenset(order[list(block.coordinates)].tolist()) for block in found} == {frozenset(place.tolist()) for place in places}
    assert zero_sum_blocks([rng.normal(size=(6, 50))], classes) == []


@pytest.mark.parametrize("seed", range(5))
def test_updates_without_such_sums_have_no_blocks(seed: int) -> None:
    """Gaussian updates, and planted ones after a rotation: no block of 5 adds up to zero there, so any find is an error."""
    rng = np.random.default_rng(seed)
    rounds, _ = planted(rng, 3)
    rotation = np.linalg.qr(rng.normal(size=(400, 400)))[0]
    assert zero_sum_blocks([rows @ rotation for rows in rounds], 5) == []
    assert zero_sum_blocks(list(rng.normal(size=(6, 12, 400))), 5) == []


def test_common_parts_do_not_hide_a_block() -> None:
    """Weight decay moves all clients of a round alike, off the zero sum; centring takes it out."""
    rng = np.random.default_rng(3)
    rounds, places = planted(rng, 1)
    moved = [rows + rng.normal(size=rows.shape[1]) for rows in rounds]
    assert abs(moved[0][:, places[0]].sum(axis=1)).max() > 0.1
    (block,) = zero_sum_blocks(moved, 5)
    assert sorted(block.coordinates) == places[0].tolist()


def test_structure_of_planted_classes() -> None:
    rng = np.random.default_rng(0)
    truth = np.eye(5)[np.arange(12) % 5]
    rounds, places = planted(rng, 1)
    rounds[0][:, places[0]] = 2.0 * (truth - 0.2)
    order = rng.permutation(400)
    found = find_structure([rows[:, order] for rows in rounds], 5, labels_per_client=1)
    assert found.by == "zero sums"
    assert any(np.array_equal(found.proportions[:, list(naming)], truth) for naming in permutations(range(5)))
    with pytest.raises(InputError, match="different dimensions"):
        find_structure([rounds[0], rounds[1][:, :10]], 5)


def test_shares() -> None:
    traces = np.array([[3.0, -1.0, 1.0, -3.0], [-1.0, -1.0, -1.0, -1.0]])
    assert rough_proportions(traces, None).tolist() == [[0.75, 0.0, 0.25, 0.0], [0.25] * 4]
    assert rough_proportions(traces, 2)[0].tolist() == [0.5, 0.0, 0.5, 0.0]


# --- naming -------------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(some.lists(some.floats(0, 1), min_size=2, max_size=10).filter(lambda row: sum(row) > 0), some.integers(1, 500))
def test_rounded_counts_add_up_and_are_near(row: list[float], total: int) -> None:
    counts = rounded(np.array(row), total)
    assert counts.sum() == total
    assert (np.abs(counts - np.array(row) / np.sum(row) * total) < 1 + 1e-9).all()


@settings(deadline=None, max_examples=50)
@given(some.lists(some.floats(-5, 5), min_size=2, max_size=8), some.integers(0, 10**6))
def test_on_simplex_is_the_nearest_point(row: list[float], seed: int) -> None:
    (found,) = on_simplex(np.array([row]))
    assert found.sum() == pytest.approx(1.0)
    assert found.min() >= 0
    for other in np.random.default_rng(seed).dirichlet(np.ones(len(row)), 50):  # the angle to every other point is obtuse
        assert (np.array(row) - found) @ (other - found) <= 1e-9


def test_clouds_have_no_order() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(3, 200))
    order, signs = rng.permutation(200), rng.choice([-1.0, 1.0], 200)
    a = cloud(rows, 80)
    assert cloud_distance(a, cloud(rows[:, order], 80)) == pytest.approx(0.0, abs=1e-7)
    assert cloud_distance(a, cloud(rows[:, order] * signs, 80), signed=True) == pytest.approx(0.0, abs=1e-7)
    assert cloud_distance(a, cloud(rows[:, order] * signs, 80)) > 0.05
    assert cloud_distance(a, cloud(rng.normal(size=(3, 200)), 80)) > 0.05


@pytest.mark.parametrize("signed", [False, True])
def test_names_come_from_clouds(signed: bool) -> None:
    rng = np.random.default_rng(4)
    truth = rng.dirichlet([0.3] * 5, 15)
    response = Response(rng.standard_t(3, size=(15, 3000)))
    first = response.predict(truth) * (rng.choice([-1.0, 1.0], 3000) if signed else 1.0)
    first = (first + 0.05 * rng.normal(size=first.shape))[:, rng.permutation(3000)]
    shuffle = rng.permutation(5)
    named = name_columns(truth[:, shuffle], first, response, rng, signed=signed)
    assert np.array_equal(shuffle[named.order], np.arange(5))
    assert named.confidence > 0.2
    nothing = name_columns(truth[:, shuffle], rng.standard_t(3, size=first.shape), response, rng, signed=signed)
    assert nothing.confidence < named.confidence / 4


# --- recorded runs ------------------------------------------------------------------------------------------------------------------


def transformed_config(kind: str, transform: str = "fixed", hidden: int = 64, **training: Any) -> Config:
    return parse_config({
        "data": {"partition": "pathological", "groups": PAIRS, "clients": 20, "samples_per_client": 60}, "model": {"hidden": hidden},
        "training": {"rounds": 6, "weights": "equal", "lr": 0.1, "batch_size": 10, **training}, "algorithm": {"name": "cfl", "eps2": 0.75},
        "protection": {"gram": [] if kind == "none" else ["haar"], "sum": kind, "transform": transform},
        "run": {"record": "full", "audit_parties": ["server", "client:0"]},
    })  # fmt: skip


@lru_cache(maxsize=2)
def scene_of_kind(kind: str, transform: str = "fixed", hidden: int = 64) -> AuditedRun:
    made = transformed_config(kind, transform, hidden)
    return fresh_scene(made, build_population(made.data), made.training.rounds, BUDGETS["quick"])


def recovered_figures(one: AuditedRun, adversary: str = "server") -> dict[str, Cell]:
    return {cell.metric: cell for cell in cells(case_of(one, adversary))[0]}


def test_every_update_adds_up_to_zero_over_the_head() -> None:
    """The fact that the attack rests on, in the engine's own updates: biases, and the weights out of each unit, also with momentum."""
    made = transformed_config("none", momentum=0.9)
    people = build_population(made.data)
    prior = fresh_scene(made, people, 1, BUDGETS["quick"]).prior
    known = knowledge(prior, None)
    assert known.train.momentum == 0.9
    assert known.labels_per_client == 2
    updates = simulate_updates(known, np.eye(10)[:4], np.random.default_rng(0))
    head = updates[:, head_blocks(known)]
    assert head.shape == (4, 65, 10)
    assert np.abs(head.sum(axis=2)).max() < 1e-5 * np.abs(head).max()
    decayed = Knowledge(type(known.train)(known.train.model, weight_decay=0.5), known.theta0, known.x, known.y, 60)
    drifted = simulate_updates(decayed, np.eye(10)[:4], np.random.default_rng(0))[:, head_blocks(known)].sum(axis=2)
    assert np.abs(drifted).max() > 1e-3 * np.abs(head).max()
    assert np.abs(drifted - drifted[0]).max() < 1e-5 * np.abs(head).max()  # alike for all: gone once centred


@pytest.mark.slow
def test_a_shared_permutation_is_broken() -> None:
    found = recovered_figures(scene_of_kind("permutation"))
    assert {cell.status for cell in found.values()} == {"leaks"}
    assert found["label_set_accuracy"].value is not None
    assert found["label_set_accuracy"].value >= 0.9
    assert found["label_set_accuracy"].baseline == pytest.approx(0.2)
    assert found["histogram_l1"].value is not None
    assert found["histogram_l1"].value <= 0.5 * 1.6
    assert found["coordinates_exact"].value is not None
    assert found["coordinates_exact"].value > 0.5
    (opened,) = recovered_figures(scene_of_kind("permutation"), "server+1").values()
    assert opened.status == "not_applicable"  # a colluder has the key: label inference reads clear updates


@pytest.mark.slow
def test_the_guess_about_other_clients_is_at_the_baseline() -> None:
    """Scored against clients of other pairs of labels, the same guess is never right, and worse than equal shares."""
    one = scene_of_kind("permutation")
    made = parse_config({"data": {"partition": "pathological", "groups": [[0, 1], [2, 3], [4, 5], [6, 8], [7, 9]], "clients": 20}})
    other, clients = truth_of(build_population(made.data)), list(range(20))
    found = guess(one.view("server"), one.prior)
    assert len(found.histograms) == 20
    assert score_label_sets(found, other, one.prior, clients).mean() <= 0.2
    assert score_histograms(found, other, clients, 10).mean() >= 0.9 * score_histograms(KeyRecoveryGuess(), other, clients, 10).mean()


def dealt_labels(rng: np.random.Generator, n: int) -> dict[int, Array]:
    """Histograms of `n` clients with two labels of ten each."""
    return {client: np.isin(np.arange(10), rng.choice(10, 2, replace=False)) / 2 for client in range(n)}


@pytest.mark.parametrize("n", [6, 10, 20])
def test_a_structure_that_has_nothing_to_do_with_the_clients_is_at_its_baseline(n: int) -> None:
    """40 unrelated structures, margin .1: in 200 trials at most 1 was called a leak, so more than 2 of 40 come less than once in 1000.

    The true structure beats it, so that there is something to be found.
    """
    rng, clients = np.random.default_rng(n), list(range(n))

    def errors(structure: dict[int, Array]) -> tuple[Array, Array]:
        one = KeyRecoveryGuess({}, structure)
        return -score_structure(one, truth, clients, 10), -structure_at_random(one, truth, clients, 10, seed=0, times=50).mean(axis=0)

    said = []
    for _ in range(40):
        real = dealt_labels(rng, n)
        truth = Truth({}, {}, real)
        reference = errors(real)
        said.append(judge(*errors(dealt_labels(rng, n)), *reference, 0.1))
        assert reference[0] == pytest.approx(np.zeros(n))
    assert said.count("leaks") <= 2
    assert said.count("at_baseline") >= 20


def test_a_structure_of_few_clients_that_is_right_by_luck_is_no_leak() -> None:
    """Four clients in two groups are dealt to what they are one time in three; a test over clients called 18 of 60 a leak."""
    rng, clients = np.random.default_rng(0), list(range(4))
    for _ in range(10):
        pairs, who = rng.permutation(10)[:4].reshape(2, 2), rng.permutation([0, 0, 1, 1])
        real = {client: np.isin(np.arange(10), pairs[who[client]]) / 2 for client in clients}
        truth, one = Truth({}, {}, real), KeyRecoveryGuess({}, real)
        dealt = structure_at_random(one, truth, clients, 10, seed=0, times=199)
        assert structure_chance(score_structure(one, truth, clients, 10), dealt) > 0.2
    groups = np.array([[0, 1], [2, 3], [4, 5], [6, 7]])
    many = {client: np.isin(np.arange(10), groups[client % 4]) / 2 for client in range(12)}
    dealt = structure_at_random(KeyRecoveryGuess({}, many), Truth({}, {}, many), list(many), 10, seed=0, times=199)
    assert structure_chance(np.zeros(12), dealt) < 0.025


@pytest.mark.slow
def test_structure_is_reported_beside_the_same_structure_of_permuted_clients() -> None:
    found = recovered_figures(scene_of_kind("permutation"))["structure_l1"]
    assert found.status == "leaks"
    assert found.value is not None
    assert found.baseline is not None
    assert found.value < found.baseline < 1.6  # equal shares, which no renaming helps


@pytest.mark.slow
def test_with_the_wrong_initial_model_the_attacker_abstains_but_keeps_the_structure() -> None:
    one = scene_of_kind("permutation")
    prior, view = one.prior, one.view("server")
    seen = transformed_rounds(view, knowledge(prior, None).theta0.size)
    assert seen is not None
    assert seen.theta0 is not None
    assert len(seen.rounds) == 6
    found = recover_labels(seen.rounds, knowledge(prior, None), np.random.default_rng(0), own_clients=200, restarts=8)
    assert found.abstains
    assert found.label_sets([2] * 20) == [frozenset()] * 20
    groups = [frozenset(np.flatnonzero(row).tolist()) for row in found.structure.proportions]
    assert len(set(groups)) == 5
    assert all(groups[i] == groups[i + 5] for i in range(15))  # who shares labels with whom is plain all the same


@pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
@pytest.mark.parametrize("algorithm", [{"name": "per_fedavg", "beta": 0.1, "alpha": 0.01}, {"name": "pfedlia", "warm_up": 9}])
def test_the_attackers_own_clients_take_the_steps_of_the_run(algorithm: dict[str, Any]) -> None:
    """Oracle: a client's own samples, by what the attacker trains with and on as many, are the update that it sent, permuted."""
    training = {"rounds": 1, "epochs": 2, "batch_size": 0, "lr": 0.01}
    seen = attack_scenes.case(attack_scenes.config(
        algorithm, {"sum": "permutation"}, training=training, model={"dtype": "float64"},
        data={"samples_per_client": 20, "groups": PAIRS},
    ))  # fmt: skip
    sent = transformed_rounds(seen.view, knowledge(seen.prior, None).theta0.size)
    assert sent is not None
    known = knowledge(seen.prior, sent.theta0, sent.local)
    assert sent.local is not None
    for client, row in zip(sent.clients, sent.rounds[0], strict=True):
        x, y = seen.truth.data[client]
        own = sent.local.part(ClientData(client, x, y, x[:0], y[:0]))
        assert known.samples == len(own.y_train)
        update = known.train.run(TaskInput(own, {"model": known.theta0}, {}, Streams(0, 0, client)))["update"]
        assert np.sort(np.asarray(update)) == pytest.approx(np.sort(row), abs=1e-9)


@pytest.mark.slow
def test_under_hadamard_no_labels_are_named() -> None:
    found = recovered_figures(scene_of_kind("hadamard"))
    assert found["label_set_accuracy"].status == "inconclusive"  # it is not made for rotations: gram_updates is
    assert found["histogram_l1"].status == "inconclusive"
    assert found["coordinates_exact"].value == 0.0  # an abstention counts
    assert found["coordinates_exact"].status == "inconclusive"  # it abstains, which shows no safety


@pytest.mark.slow
def test_a_seed_in_which_the_attacker_abstains_counts_as_none_right() -> None:
    """Pooled over a success and an abstention the share of coordinates is their mean, over both seeds."""
    success, failure = (
        recovered_figures(scene_of_kind("permutation"))["coordinates_exact"],
        recovered_figures(scene_of_kind("hadamard"))["coordinates_exact"],
    )
    seeds = [success, replace(failure, protection=success.protection, seeds=(1,)), replace(success, seeds=(2,))]
    (together,) = pooled(seeds)
    assert together.seeds == (0, 1, 2)
    assert success.value is not None
    assert together.value == pytest.approx(2 * success.value / 3)
    assert "counts as 0" in together.note


def test_auxiliary_data_without_some_label_is_not_attempted() -> None:
    one = case_of(scene_of_kind("permutation"), "server")
    kept = one.prior.y != 3
    (only,), _ = cells(replace(one, prior=replace(one.prior, x=one.prior.x[kept], y=one.prior.y[kept])))
    assert only.status == "not_attempted"
    assert "lack samples" in only.note


@pytest.mark.slow
def test_secure_sums_and_open_runs_have_no_key_to_recover() -> None:
    for kind in ("secagg", "none"):
        (only,) = recovered_figures(scene_of_kind(kind)).values()
        assert only.status == "not_applicable"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "transform"), [("signed_permutation", "fixed"), ("permutation", "per_round")])
def test_signs_and_fresh_permutations_do_not_help(kind: str, transform: str) -> None:
    found = recovered_figures(scene_of_kind(kind, transform))
    assert found["label_set_accuracy"].status == "leaks"
    assert found["label_set_accuracy"].value is not None
    assert found["label_set_accuracy"].value >= 0.9


@pytest.mark.slow
def test_under_haar_no_labels_are_named() -> None:
    found = recovered_figures(scene_of_kind("haar", hidden=16))
    assert found["label_set_accuracy"].status == "inconclusive"  # it is not made for rotations: gram_updates is
    assert found["histogram_l1"].status == "inconclusive"


# --- the claims, on 28×28 images ----------------------------------------------------------------------------------------------------


def script() -> ModuleType:
    path = ROOT / "examples" / "break_the_permutation.py"
    spec = importlib.util.spec_from_file_location("break_the_permutation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("network", ["mlp", "lenet5"])
@pytest.mark.parametrize("partition", ["two", "dirichlet"])
def test_claims(network: str, partition: str) -> None:
    """Two labels a client: label sets ≥ .9 right in 4 of 5 seeds. Dirichlet(0.3): mean L1 at most half of that of equal shares."""
    if "CFLPRIV_DATA" not in os.environ:
        pytest.skip("MNIST and Fashion-MNIST are not here: set CFLPRIV_DATA")
    rows = script().claims([network], [partition], script().SEEDS)
    if partition == "two":
        assert sum(row["sets"] >= 0.9 for row in rows) >= 4
    else:
        assert np.mean([row["l1"] for row in rows]) <= 0.5 * np.mean([row["uniform"] for row in rows])
