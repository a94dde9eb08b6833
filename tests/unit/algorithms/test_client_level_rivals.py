"""RR-Cluster and PINA: random moves that keep clusters large, counted blocks, first clusters from sketches, steps weighted by normality."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import model, population, training
from small_runs import configured, finished

from cflpriv import Model, Train, simulate
from cflpriv.algorithms import pina, rr_cluster
from cflpriv.algorithms.pina import COORDINATES, normality_weight
from cflpriv.algorithms.rr_cluster import rebalancing
from cflpriv.clustering.scores import ari
from cflpriv.engine import Device, Streams, TaskInput
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment
from cflpriv.experiments.run.loop import advance, begin, finish
from cflpriv.experiments.run.run import prepare
from cflpriv.protocols.events import GaussianEvent
from cflpriv.randomness import stream
from cflpriv.tasks.block_choices import ChooseAndMove, ChooseListed
from cflpriv.tasks.cluster_shares import BLOCK_COUNT, TrainInBlock, counted_blocks
from cflpriv.tasks.evaluation import Losses
from cflpriv.tasks.low_rank import LowRankSketch

SCENE = population(groups=2, clients_per_group=10, samples=30, test_samples=6, shape=(6,), separation=4.0)
NAMES = ("rr_cluster", "pina")
BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 20}, "model": {"name": "linear"}, "algorithm": {"k": 2}, "run": {"insecure_test_entropy": True},
    "training": {"rounds": 4, "epochs": 1, "batch_size": 0, "lr": 0.1, "weights": "equal"},
}  # fmt: skip
small_config = partial(configured, BASE)
MODEL, TRAIN = model(SCENE, "float32"), training(SCENE, dtype="float32", batch_size=0)
pytestmark = pytest.mark.filterwarnings("ignore:run.insecure_test_entropy")


def client_level(name: str, epsilon: float) -> Mapping[str, Any]:
    private = {"unit": "client", "relation": "add_remove", "epsilon": epsilon, "delta": 1e-3, "clip_norm": 0.5}
    return {**private, "local": ["gram"]} if name == "pina" else private


def on(client: int, choice: int | None = None, **params: Any) -> TaskInput:
    return TaskInput(SCENE.clients[client], params, {}, Streams(0, 0, client), choice)


# --- random moves

SIZES = st.lists(st.one_of(st.just(0.0), st.floats(0, 1000)), min_size=1, max_size=6).map(np.array)


@given(SIZES, st.floats(0, 300))
@settings(deadline=None, max_examples=200)
def test_moves_are_probabilities_and_keep_clusters_large(sizes: Any, smallest: float) -> None:
    moves = rebalancing(sizes, smallest)
    np.testing.assert_allclose(moves.sum(1), 1.0, atol=1e-9)
    assert (moves >= 0).all()
    expected = sizes @ moves
    assert expected.sum() == pytest.approx(sizes.sum())
    if sizes.sum() >= len(sizes) * smallest:
        assert (expected >= smallest * (1 - 1e-9) - 1e-9).all()
    if (sizes >= smallest).all():
        np.testing.assert_array_equal(moves, np.eye(len(sizes)))
    assert (np.minimum(sizes, smallest) <= expected + 1e-6).all(), "nobody gives beyond the smallest size"


def test_clients_move_as_often_as_they_should() -> None:
    sizes = np.array([90.0, 10.0, 0.0])
    moves = rebalancing(sizes, 20.0)
    np.testing.assert_allclose(sizes @ moves, [60, 20, 20])
    models = [MODEL.init(0, 0), MODEL.init(0, 1), MODEL.init(0, 2)]
    task = ChooseAndMove(Losses(MODEL))
    inputs = [TaskInput(SCENE.clients[0], {"model": models, "moves": moves}, {}, Streams(0, 0, i)) for i in range(600)]
    results, _ = task.run_many(inputs, Device())
    choice = int(results[0]["choice"])
    share = np.bincount([int(one["moved"]) for one in results], minlength=3) / len(results)
    np.testing.assert_allclose(share, moves[choice], atol=0.08)
    assert all(int(task.run(one)["moved"]) == int(result["moved"]) for one, result in zip(inputs[:9], results, strict=False))


# --- counted blocks


@pytest.mark.parametrize("norm", [1.0, 0.01])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_counted_contribution_is_never_longer_than_the_norm_and_its_count_is_exact(norm: float, dtype: Any) -> None:
    trained = Train(Model("linear", SCENE.shape, SCENE.classes, dtype=dtype), batch_size=5, epochs=3, lr=0.5)
    task, start = TrainInBlock(trained, 3, norm), trained.model.init(0)
    inputs = [on(i, choice=i % 3, model=start, counted=np.array((i + 1) % 3)) for i in range(6)]
    total = np.zeros((3, len(start) + 1))
    for one, many in zip(inputs, task.run_many(inputs, Device())[0], strict=True):
        blocks = task.run(one)["blocks"]
        assert blocks.dtype == start.dtype
        assert np.linalg.norm(blocks.astype(np.float64)) <= norm
        if norm < 0.1:
            assert np.linalg.norm(blocks.astype(np.float64)) == pytest.approx(norm, rel=1e-5)
        np.testing.assert_allclose(many["blocks"], blocks, atol=1e-5 * norm)
        total += blocks
    counts, sums = counted_blocks(total, norm)
    np.testing.assert_allclose(counts, 2.0, rtol=1e-6)
    update = trained.run(inputs[0])["update"]
    alone = counted_blocks(task.run(inputs[0])["blocks"], norm)
    np.testing.assert_allclose(alone[0], [0, 1, 0], atol=1e-6)
    room = norm * math.sqrt(1 - BLOCK_COUNT**2)
    np.testing.assert_allclose(alone[1][0], update * min(1, room / np.linalg.norm(update)), rtol=1e-4, atol=1e-6)
    assert sums.shape == (3, len(start))


def test_counts_are_of_the_choice_if_nothing_else_is_given() -> None:
    task = TrainInBlock(TRAIN, 2, 1.0)
    counts, _ = counted_blocks(task.run(on(0, choice=1, model=MODEL.init(0)))["blocks"], 1.0)
    np.testing.assert_allclose(counts, [0, 1], atol=1e-6)


# --- sketches and labels


def test_a_sketch_has_norm_one_and_is_the_adapters_own_step() -> None:
    task = LowRankSketch(TRAIN, rank=2, sketch=64)
    start = MODEL.init(0)
    found = task.run(on(0, model=start))["signature"]
    assert found.shape == (2 * SCENE.classes,)
    assert np.linalg.norm(found) == pytest.approx(1.0)
    gradient = -TRAIN.run(on(0, model=start))["update"] / 0.1
    ((_, shape, offset), *_) = MODEL.layout
    weights = gradient[offset : offset + math.prod(shape)].reshape(shape)
    flat = np.zeros(MODEL.dimension)
    flat[offset : offset + math.prod(shape)] = np.eye(math.prod(shape))[0]
    assert task.projected(flat).shape == (2 * SCENE.classes,)
    whole = LowRankSketch(TRAIN, rank=99, sketch=64).run(on(0, model=start))["signature"]
    assert whole.shape == (weights.size,), "all directions: nothing is lost but the length"
    other = LowRankSketch(TRAIN, rank=99, sketch=64).run(on(1, model=start))["signature"]
    mine = -weights.ravel() / np.linalg.norm(weights)
    theirs = TRAIN.run(on(1, model=start))["update"][offset : offset + weights.size]
    assert whole @ other == pytest.approx(mine @ theirs / np.linalg.norm(theirs), abs=1e-5)


def test_a_long_low_rank_update_is_sketched() -> None:
    task = LowRankSketch(TRAIN, rank=6, sketch=8)
    one, other = (task.run(on(i, model=MODEL.init(0)))["signature"] for i in (0, 2))
    assert one.shape == (8,)
    assert one @ other > 0.5, "clients of one group"
    np.testing.assert_allclose(task.run_many([on(0, model=MODEL.init(0))], Device())[0][0]["signature"], one, atol=1e-5)


def test_a_listed_label_is_the_clients_own() -> None:
    listed = {"clients": np.array([7, 2, 5]), "labels": np.array([1, 3, 2])}
    inputs = [TaskInput(SCENE.clients[client], listed, {}, Streams(0, 0, client)) for client in (2, 5, 7, 9)]
    assert [int(ChooseListed().run(one)["choice"]) for one in inputs] == [3, 2, 1, 0]


# --- steps weighted by normality


def test_normal_numbers_keep_their_step_and_others_lose_it() -> None:
    draws = stream(0, "t")
    normal, spikes = draws.standard_normal(9000) * 1e-3, np.zeros(9000)
    spikes[:40] = 1.0
    assert len(normal) > COORDINATES
    for rule in ("weight", "drop"):
        statistic, weight = normality_weight(normal, rule, 1e-3, stream(1, "t"))
        assert weight == statistic > 0.99
    statistic, weight = normality_weight(spikes, "weight", 0.05, stream(1, "t"))
    assert weight == statistic < 0.5
    assert normality_weight(spikes, "drop", 0.05, stream(1, "t"))[1] == 0.0
    assert normality_weight(spikes, "off", 0.05, stream(1, "t"))[1] == 1.0
    assert normality_weight(np.zeros(9), "drop", 0.05, stream(1, "t")) == (1.0, 1.0)


# --- the system


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_found_without_noise_and_trained(name: str) -> None:
    run = finished(small_config(name, training={"rounds": 12, "lr": 0.3}, run={"seed": 1}), SCENE)
    summary = finish(run)
    assert summary["choice_ari"] == 1.0
    assert summary["accuracy_mean"] > run.rows[0]["accuracy_mean"]
    assert summary["accuracy_mean"] > 0.8
    if name == "pina":
        assert ari(list(SCENE.groups), run.state.clustering.labels) == 1.0
        assert summary["ari"] == 1.0
    assert all(row["labels"] is None for row in run.rows)
    seen = {message.operation for message in run.federation.transcript.messages}
    assert seen == {"compute", "mean"} | ({"gram"} if name == "pina" else set())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("epsilon", [3.0, 1e4])
def test_every_round_is_one_gaussian_and_the_run_costs_what_was_asked(name: str, epsilon: float, tmp_path: Path) -> None:
    made = small_config(name, training={"rounds": 3}, privacy=client_level(name, epsilon))
    summary = run_experiment(made, tmp_path / "run", population=SCENE)
    assert summary["stopped"] is None
    assert summary["epsilon"] == pytest.approx(epsilon, rel=1e-2)
    run = finished(made, SCENE)
    assert run.run_ledger is not None
    charges = run.run_ledger.ledger.charges
    assert [(one.round, one.purpose) for one in charges if one.purpose == "mean"] == [(0, "mean"), (1, "mean"), (2, "mean")]
    assert len(charges) == 3 + (name == "pina")
    assert all(len(one.events) == 1 and isinstance(one.events[0], GaussianEvent) for one in charges)
    written = json.loads((tmp_path / "run" / "ledger.json").read_text(encoding="utf-8"))["charges"]
    assert [len(line["events"]) for line in written] == [1] * len(charges)


@pytest.mark.parametrize("name", NAMES)
def test_little_noise_changes_little(name: str) -> None:
    private = finished(small_config(name, training={"rounds": 3}, privacy={**client_level(name, 1e7), "updates": "clipped"}), SCENE)
    plain = finished(small_config(name, training={"rounds": 3}, algorithm={"norm": 0.5}), SCENE)
    for one, other in zip(private.state.models, plain.state.models, strict=True):
        np.testing.assert_allclose(one.value(), other.value(), atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_secure_sum_with_little_noise_gives_the_same(name: str) -> None:
    """Without any noise clients refuse it, because one may be alone in a block."""
    plain = finished(small_config(name, training={"rounds": 3}, algorithm={"norm": 0.5}), SCENE)
    protection = {"sum": "secagg", "min_cohort": 16, "secagg_mode": "passive"}
    privacy = {**client_level(name, 1e7), "updates": "clipped"}
    secure = finished(small_config(name, training={"rounds": 3}, privacy=privacy, protection=protection), SCENE)
    for one, other in zip(plain.state.models, secure.state.models, strict=True):
        np.testing.assert_allclose(one.value(), other.value(), atol=0.02)
    assert not {message.operation for message in secure.federation.transcript.messages} & {"gather", "relay"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("protection", [{}, {"sum": "secagg", "min_cohort": 16, "secagg_mode": "passive"}], ids=["trusted", "secagg"])
def test_private_runs_under_a_trusted_and_an_untrusted_server(name: str, protection: Mapping[str, Any]) -> None:
    run = finished(small_config(name, training={"rounds": 2}, privacy=client_level(name, 50.0), protection=protection), SCENE)
    summary = finish(run)
    assert summary["rounds_skipped"] == 0
    assert summary["epsilon"] == pytest.approx(50.0, rel=1e-2)
    assert not run.federation.refusals


def test_rows_without_noise_are_not_compared_under_secure_sums() -> None:
    secure = small_config("pina", algorithm={"k": 1}, protection={"sum": "secagg", "min_cohort": 16})
    with pytest.raises(InputError, match=r"clients refuse under protection\.sum = 'secagg'"):
        prepare(secure, population=SCENE)
    private = small_config("pina", protection={"sum": "secagg", "min_cohort": 16}, privacy=client_level("rr_cluster", 5.0))
    with pytest.raises(InputError, match=r"clients refuse under protection\.sum = 'secagg'|it uses gram"):
        prepare(private, population=SCENE)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_after_any_round(name: str, tmp_path: Path) -> None:
    from cflpriv.experiments.run.checkpoint import load_checkpoint, restore, save_checkpoint

    made = small_config(name, training={"rounds": 3})
    whole = finished(made, SCENE)
    first = prepare(made, population=SCENE)
    begin(first)
    advance(first)
    save_checkpoint(tmp_path, "x", first.state, first.federation, {}, first.simulated)
    later = prepare(made, population=SCENE, **load_checkpoint(tmp_path, "x").parties())
    later.state = restore(load_checkpoint(tmp_path, "x"), later.federation)
    later.rows = list(first.rows)
    for _ in range(2):
        advance(later)
    for one, other in zip(whole.state.models, later.state.models, strict=True):
        np.testing.assert_array_equal(one.value(), other.value())


@pytest.mark.parametrize("name", NAMES)
def test_newcomers_choose_by_themselves(name: str) -> None:
    simulated = simulate(SCENE.clients, present=range(16), seed=1)
    made = {"rr_cluster": rr_cluster, "pina": pina}[name](replace(TRAIN, lr=0.3), k=2, seed=1)
    state = made.init(simulated.federation)
    for number in range(8):
        simulated.federation.begin_round(number)
        state, _ = made.round(simulated.federation, state)
    simulated.join(range(16, 20))
    assert made.admit is not None
    state, _ = made.admit(simulated.federation, state, range(16, 20))
    served = made.serve(state)
    inputs = simulated.resolve(served.task, served.params, served.which, range(16, 20))
    labels = [int(served.task.run(one)["choice"]) for one in inputs]
    assert ari([SCENE.groups[client] for client in range(16, 20)], labels) == 1.0


def test_clients_are_moved_into_a_cluster_that_nobody_chose() -> None:
    """Of three models of two groups one is left over; from the second round on it receives clients."""
    run = finished(small_config("rr_cluster", training={"rounds": 3}, algorithm={"k": 3, "smallest": 4}), SCENE)
    assert [min(row["sizes"]) >= 4 - 1e-9 for row in run.rows] == [True] * 3
    assert run.rows[0]["share_moved"] == 0.0
    assert all(0 <= row["share_moved"] < 0.5 for row in run.rows[1:])


# --- what is refused


@pytest.mark.parametrize("make", [rr_cluster, pina])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("k", 0, r"algorithm\.k = 0: expected an integer ≥ 1"), ("smallest", 0, r"algorithm\.smallest = 0: expected an integer ≥ 1"),
     ("norm", 0.0, r"algorithm\.norm = 0\.0: expected a finite"), ("norm", math.inf, r"algorithm\.norm = inf: expected a finite")],
)  # fmt: skip
def test_parameters_that_cannot_be_are_refused(make: Any, key: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(TRAIN, **{key: value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("rank", 0, r"algorithm\.rank = 0: expected an integer ≥ 1"), ("sketch", 0, r"algorithm\.sketch = 0: expected an integer ≥ 1"),
     ("normality", "no", r"algorithm\.normality = 'no': expected 'weight'"),
     ("alpha", 1.0, r"algorithm\.alpha = 1\.0: expected a number in \(0, 1\)")],
)  # fmt: skip
def test_parameters_of_pina_that_cannot_be_are_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pina(TRAIN, **{key: value})


@pytest.mark.parametrize("name", NAMES)
def test_more_clusters_than_clients_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"algorithm\.k: 21 clusters of 20 clients"):
        finished(small_config(name, algorithm={"k": 21}), SCENE)


@pytest.mark.parametrize("name", NAMES)
def test_sample_level_privacy_and_transformed_sums_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"under privacy\.unit = 'sample': its sums have a private form for whole clients only"):
        small_config(name, privacy={"unit": "sample", "epsilon": 1.0, "delta": 1e-5, "samples": 30})
    with pytest.raises(InputError, match=rf"keeps means from the server, and that of '{name}'"):
        prepare(small_config(name, protection={"sum": "haar", "gram": ["haar"]}), population=SCENE)


def test_contributions_are_as_long_as_they_are_clipped_to() -> None:
    for name in NAMES:
        assert small_config(name, privacy=client_level(name, 1.0)).hyper["norm"] == 0.5
        assert small_config(name).hyper["norm"] == 1.0
        assert small_config(name, algorithm={"norm": 0.3}).hyper["norm"] == 0.3
