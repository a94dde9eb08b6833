"""Evaluations of the same models on the same data are computed once; anything that may have changed is computed anew."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scenes import model, population, task_input
from small_runs import configured

from cflpriv.engine import Engine, Result, TaskInput
from cflpriv.experiments.run.run import advance, start
from cflpriv.tasks.evaluation import Evaluate, Losses
from cflpriv.types import Array

SCENE = population(clients_per_group=2)
MODEL = model(SCENE)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> dict[type, int]:
    """How many clients each task computed."""
    counts: dict[type, int] = {}
    for kind in (Evaluate, Losses):
        made: Any = kind._made

        def counted(self: Any, inputs: Sequence[TaskInput], device: Any, made: Any = made) -> tuple[list[Result], str]:
            counts[type(self)] = counts.get(type(self), 0) + len(inputs)
            result: tuple[list[Result], str] = made(self, inputs, device)
            return result

        monkeypatch.setattr(kind, "_made", counted)
    return counts


def read_only(vector: Array) -> Array:
    view = vector.view()
    view.flags.writeable = False
    return view


def alike(some: Sequence[Result], others: Sequence[Result]) -> bool:
    return all(a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("task", [Evaluate(MODEL), Evaluate(MODEL, "train"), Losses(MODEL)])
def test_the_same_models_are_evaluated_once(task: Any, computed: dict[type, int]) -> None:
    vectors = [MODEL.init(0), MODEL.init(1)]
    count = len(SCENE.clients)

    def results(*models: Array, clients: Sequence[Any] = SCENE.clients) -> list[Result]:
        given: Any = list(models) if isinstance(task, Losses) else models[0]
        return Engine().run(task, [task_input(client, {"model": given}) for client in clients])

    first = results(*map(read_only, vectors))
    assert computed == {type(task): count}
    assert alike(results(*map(read_only, vectors)), first)  # another view, as each request makes one
    assert computed == {type(task): count}
    assert alike(results(*(read_only(vector.copy()) for vector in vectors)), first)  # other memory
    assert computed == {type(task): 2 * count}
    results(*vectors)  # whoever has these may write into them
    results(*vectors)
    assert computed == {type(task): 4 * count}
    results(*map(read_only, vectors), clients=[replace(client) for client in SCENE.clients])  # data that changed are another object
    assert computed == {type(task): 5 * count}
    results(*map(read_only, reversed(vectors)))
    assert computed == {type(task): 6 * count}


def test_a_model_whose_memory_was_freed_is_never_another_one(computed: dict[type, int]) -> None:
    client = SCENE.clients[0]
    for seed in range(5):  # often at the place of the one before
        Engine().run(Evaluate(MODEL), [task_input(client, {"model": read_only(MODEL.init(seed))})])
    assert computed[Evaluate] == 5


def test_a_private_choice_is_drawn_each_time(computed: dict[type, int]) -> None:
    task = replace(Losses(MODEL), epsilon=1.0, cap=1.0)
    models = [read_only(MODEL.init(seed)) for seed in range(2)]
    for _ in range(2):
        Engine().run(task, [task_input(SCENE.clients[0], {"model": models}, secret=bytes(32))])
    assert computed[Losses] == 2


def test_ifca_computes_each_rounds_losses_once(computed: dict[type, int]) -> None:
    """Clients are evaluated after a round, and choose in the next, by the same losses."""
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "linear"},
        "training": {"rounds": 4, "batch_size": 5, "weights": "equal"},
        "algorithm": {"k": 2},
    }
    run = start(configured(base, "ifca"), population=SCENE)
    for _ in range(4):
        advance(run)
    assert computed[Losses] == (1 + 4) * len(SCENE.clients)
