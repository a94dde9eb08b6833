"""Cohorts whose updates do not fit into memory together: summed in portions, with the results of one sum, and few updates at a time."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import model, population, task_input
from small_runs import configured

from cflpriv.contract import portions
from cflpriv.contract.calls import RunningMean, weighted_mean
from cflpriv.contract.portions import fits, in_portions
from cflpriv.engine import Engine, Later, TaskInput
from cflpriv.errors import TrainingDiverged
from cflpriv.experiments.run.run import Experiment, advance, start
from cflpriv.federation.postponed import Postponed, together
from cflpriv.tasks.training import Train

CLIENTS, FEW, ROUNDS = 12, 3, 2
SCENE = population(groups=2, clients_per_group=CLIENTS // 2)
DIMENSION = model(SCENE).dimension
BASE: dict[str, dict[str, Any]] = {
    "model": {"name": "linear", "dtype": "float64"},
    "training": {"rounds": ROUNDS, "epochs": 1, "batch_size": 5, "lr": 0.1, "weights": "equal"},
    "run": {"insecure_test_entropy": True},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedprox": {}, "scaffold": {}, "ifca": {"k": 2}, "ifca, gradients": {"k": 2, "averaging": "gradient"},
    "ifca, shared": {"k": 2, "shared": ["1.bias"]}, "pacfl": {"p": 2, "k": 2}, "stocfl": {}, "local": {},
}  # fmt: skip
TOO_FEW = ("ifca, shared", "haar")
"""Three shared numbers, which are too few for a transform."""
SUMS = ("none", "haar", "one_message", "secagg")


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every cohort too large, and a portion hold `FEW` updates."""

    def shorten() -> None:
        monkeypatch.setattr(portions, "LARGEST_COHORT_BYTES", 0)
        monkeypatch.setattr(portions, "PORTION_BYTES", FEW * 8 * DIMENSION)

    return shorten


class Alive:
    """Counts the clients of each training, and the updates of earlier trainings that are alive when one begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.together: list[int] = []
        self.kept: list[int] = []
        self._made: list[Any] = []
        run = Engine.run

        def counted(engine: Engine, task: Any, inputs: Sequence[TaskInput], *more: Any, **options: Any) -> Any:
            if not isinstance(task, Train):
                return run(engine, task, inputs, *more, **options)
            self.together.append(len(inputs))
            self.kept.append(sum(made() is not None for made in self._made))
            results = run(engine, task, inputs, *more, **options)
            self._made += [ref(result["update"]) for result in results]
            return results

        monkeypatch.setattr(Engine, "run", counted)


def after_rounds(algorithm: str, protection: str, **changes: Any) -> Experiment:
    keys = {"name": algorithm.partition(",")[0], **ALGORITHMS[algorithm]}
    if protection != "none" and keys["name"] in ("pacfl", "stocfl"):
        changes = {**changes, "protection": {"gram": ["haar"]}}
    run = start(
        configured(BASE, algorithm=keys, **{**changes, "protection": {"sum": protection, **changes.get("protection", {})}}),
        population=SCENE,
    )
    for _ in range(ROUNDS):
        advance(run)
    return run


def models_of(run: Experiment) -> list[np.ndarray]:
    """What each client would use."""
    served = run.algorithm.serve(run.state)
    given = run.simulated.resolve(served.task, served.params, served.which, range(CLIENTS))
    return [np.concatenate([np.ravel(vector) for vector in np.atleast_2d(np.asarray(each.params["model"]))]) for each in given]


def sent(run: Experiment) -> list[tuple[Any, ...]]:
    """What crossed trust boundaries. Uploads go to helpers in more messages, each with its own frame."""
    return [
        (message.kind, message.source, message.clients, message.copies, 0 if "Delivery" in message.kind else message.total_bytes)
        for message in run.federation.transcript.messages
    ]


CASES = [
    *(
        pytest.param(name, sums, marks=pytest.mark.slow if sums == "haar" else ())
        for name in ALGORITHMS
        for sums in SUMS
        if (name, sums) != TOO_FEW
    ),
    ("ifca", "one_message-oblivious"),
]


@pytest.mark.parametrize(("algorithm", "protection"), CASES)
def test_results_and_transcripts_are_those_of_one_sum(
    algorithm: str, protection: str, short_of_memory: Callable[[], None]
) -> None:  # fmt: skip
    whole = after_rounds(algorithm, protection)
    short_of_memory()
    few = after_rounds(algorithm, protection)
    for one, other in zip(models_of(whole), models_of(few), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-12 if protection in ("none", "haar") else 1e-6)
    assert sent(few) == sent(whole)
    for row, other_row in zip(whole.rows, few.rows, strict=True):
        assert {key: row[key] for key in ("cohort", "labels", "accuracy_mean", "local_accuracy_mean", "lost")} == {
            key: other_row[key] for key in ("cohort", "labels", "accuracy_mean", "local_accuracy_mean", "lost")
        }


@pytest.mark.parametrize("protection", ["none", "one_message"])
def test_updates_of_a_portion_are_freed_before_the_next_is_trained(
    protection: str, short_of_memory: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_memory()
    run = start(configured(BASE, "fedavg", protection={"sum": protection}, run={"evaluate_every": 100}), population=SCENE)
    alive = Alive(monkeypatch)
    run.federation.begin_round(0)
    run.algorithm.round(run.federation, run.state)
    each = 8 * DIMENSION if protection == "none" else 4 * (DIMENSION + 1)  # an upload has 32 bits a number, and one number more
    assert alive.together == [len(some) for some in in_portions(range(CLIENTS), each)]
    assert max(alive.kept) == 0


def test_a_cohort_that_fits_is_trained_together(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = Alive(monkeypatch)
    after_rounds("fedavg", "none")
    assert alive.together == [CLIENTS] * ROUNDS


def test_a_protection_that_needs_all_updates_has_them_together(
    short_of_memory: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every client's masked vector waits for all others under secure aggregation, so nothing is gained by portions."""
    short_of_memory()
    alive = Alive(monkeypatch)
    after_rounds("fedavg", "secagg", run={"evaluate_every": 100})
    assert CLIENTS in alive.together


@pytest.mark.parametrize("protection", ["none", "one_message"])
def test_a_training_that_diverges_ends_the_run_with_the_same_words(protection: str, short_of_memory: Callable[[], None]) -> None:
    changes = {"training": {"lr": 1e308, "epochs": 3}}
    with pytest.raises(TrainingDiverged) as whole:
        after_rounds("fedavg", protection, **changes)
    short_of_memory()
    with pytest.raises(TrainingDiverged) as few:
        after_rounds("fedavg", protection, **changes)
    assert str(few.value) == str(whole.value)


def test_clients_that_may_have_no_result_are_computed_at_once(short_of_memory: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether such a client has a result decides who is in the cohort, before anything is summed."""
    short_of_memory()
    alive = Alive(monkeypatch)
    after_rounds("fedavg", "none", training={"on_divergence": "skip"}, run={"evaluate_every": 100})
    assert alive.together[0] == CLIENTS


def test_a_transcript_that_keeps_updates_has_them_all(short_of_memory: Callable[[], None]) -> None:
    short_of_memory()
    run = after_rounds("fedavg", "none", run={"record": "full"})
    updates = [message for message in run.federation.transcript.messages if message.kind == "update"]
    assert all(message.payload is not None and message.payload["update"].shape == (CLIENTS, DIMENSION) for message in updates)
    assert all(message.digest for message in updates)


# --- the pieces


@given(st.lists(st.integers(), max_size=40), st.integers(1, 1000), st.integers(1, 5), st.integers(0, 20_000), st.integers(1, 4000))
def test_portions_are_the_clients_in_order_and_small(clients: list[int], nbytes: int, fewest: int, most: int, portion: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(portions, "LARGEST_COHORT_BYTES", most)
        patched.setattr(portions, "PORTION_BYTES", portion)
        pieces = [list(piece) for piece in in_portions(clients, nbytes, fewest)]
        assert [client for piece in pieces for client in piece] == clients
        if fits(len(clients), nbytes):
            assert len(pieces) <= 1
        else:
            assert all(len(piece) * nbytes <= portion or len(piece) <= fewest for piece in pieces)


@given(st.integers(1, 12), st.integers(0, 2**32 - 1), st.data())
def test_a_mean_does_not_depend_on_how_many_vectors_come_at_a_time(count: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    vectors, weights = list(rng.standard_normal((count, 5)).astype(np.float32)), list(rng.random(count) + 0.1)
    running, at = RunningMean(), 0
    while at < count:
        stop = data.draw(st.integers(at + 1, count))
        running.add(vectors[at:stop], weights[at:stop])
        at = stop
    value = running.value()
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, weighted_mean(vectors, weights))
    np.testing.assert_allclose(value, np.average(vectors, axis=0, weights=weights), rtol=1e-5, atol=1e-6)


def test_vectors_longer_than_a_block_are_added_up_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cflpriv.contract.calls.BLOCK", 7)
    vectors = np.random.default_rng(0).standard_normal((3, 4, 5))
    np.testing.assert_allclose(weighted_mean(list(vectors), [1.0, 2.0, 3.0]), np.average(vectors, axis=0, weights=[1, 2, 3]), rtol=1e-12)


def test_a_postponed_part_is_the_same_each_time_and_travels_as_its_array() -> None:
    train = replace(Train(model(SCENE), batch_size=5, lr=0.1))
    engine = Engine("sequential")
    inputs = [task_input(client, {"model": train.model.init(0)}) for client in SCENE.clients[:2]]
    declared = train.later(inputs, engine.run)
    assert declared is not None
    results = engine.run(train, inputs)
    parts = []
    for (result, reduced), made in zip(declared, results, strict=True):
        form = result["update"]
        assert isinstance(form, Later)
        assert (form.shape, np.dtype(form.dtype)) == (made["update"].shape, made["update"].dtype)
        parts.append(Postponed(train, reduced, "update", form, engine))
        assert parts[-1].nbytes == made["update"].nbytes == form.nbytes
    for part, made in zip(parts, results, strict=True):
        np.testing.assert_array_equal(np.asarray(part), made["update"])
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(part)), made["update"])
    ready, *_ = together([*parts, 5.0])
    np.testing.assert_array_equal(ready, results[0]["update"])
    parts[0].now = np.zeros(2)
    assert np.asarray(parts[0]).shape == (2,)
    assert np.asarray(parts[0]).shape == (DIMENSION,)  # `now` is taken once
