"""SCAFFOLD's sums of updates and controls: two numbers of steps take them apart, one does not."""

from dataclasses import replace

import numpy as np
import pytest
from attack_scenes import QUICK, config, figures_of, population_of

from cflpriv.attacks.evidence.coalition import known_means
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.evidence.updates import public_model, single_steps, steps_in
from cflpriv.attacks.figures.leakage import Case

ALONE = 3


def scene(batch_size: int) -> Case:
    """Secure sums of eight clients, one with twice as many samples."""
    made = config(
        {"name": "scaffold"}, {"sum": "secagg"}, data={"clients": 8, "samples_per_client": 24},
        training={"rounds": 3, "batch_size": batch_size},
    )  # fmt: skip
    whole = population_of(made)
    counts = {client.id: 24 if client.id == ALONE else 12 for client in whole.clients}
    clients = [replace(one, x_train=one.x_train[: counts[one.id]], y_train=one.y_train[: counts[one.id]]) for one in whole.clients]
    return case_of(fresh_scene(made, replace(whole, clients=tuple(clients)), made.training.rounds, QUICK), "server", QUICK)


def test_a_client_with_steps_of_its_own_is_in_no_sum() -> None:
    seen = scene(6)
    dimension = public_model(seen.prior).dimension
    single = single_steps(steps_in(seen.reference, dimension))
    means = known_means(seen, seen.view, dimension)
    assert {mean.members for mean in means} == {(ALONE,), tuple(client for client in range(8) if client != ALONE)}
    for mean in means:
        updates = [step.update for client in mean.members for step in single[client] if step.round == mean.round]
        truth = np.mean(updates, axis=0)
        assert mean.mean is not None
        assert np.linalg.norm(mean.mean - truth) < 5 * mean.deviation * np.sqrt(dimension) < 1e-4 * np.linalg.norm(truth)
    assert figures_of("disaggregation", seen)["singleton_exact"].value == pytest.approx(1 / 8)


def test_equal_numbers_of_steps_keep_sums_together() -> None:
    seen = scene(0)
    means = known_means(seen, seen.view, public_model(seen.prior).dimension)
    assert {mean.members for mean in means} == {tuple(range(8))}
    assert figures_of("disaggregation", seen)["singleton_exact"].value == 0.0
