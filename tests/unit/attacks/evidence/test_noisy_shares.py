"""Label shares under noise: the equations of all rounds, solved once, against a general solver and against runs of every round alone."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
from attack_scenes import case, config, figures_of, unrelated
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from cflpriv.attacks.evidence.noisy_shares import WIDTHS, Readings, mode, noise_level, shares_under_noise, width_of
from cflpriv.attacks.evidence.updates import public_model, steps_in
from cflpriv.attacks.figures.leakage import Case
from cflpriv.attacks.labels.label_inference import labels_from_bias, readings_of
from cflpriv.types import Array

pytestmark = pytest.mark.filterwarnings("ignore:run.insecure_test_entropy")
CLASSES = 10
SILENT = 17
EVEN = np.full(CLASSES, 1 / CLASSES)


def probabilities(rng: np.random.Generator) -> Array:
    """What a model half trained predicts for samples of each label."""
    return np.asarray(0.3 * np.eye(CLASSES) + 0.7 * rng.dirichlet(np.full(CLASSES, 5.0), CLASSES))


def read(rng: np.random.Generator, shares: Array, level: float, rounds: int) -> Readings:
    """Readings of a client with these shares in sums over it and up to two more with the same."""
    system, members = np.eye(CLASSES) - probabilities(rng).T, rng.integers(1, 4, rounds)
    noise = rng.normal(size=(rounds, CLASSES)) * level / np.sqrt(members)[:, None]
    silent = rng.normal(size=(rounds, SILENT)) * level / np.sqrt(members)[:, None]
    return Readings(system @ shares + noise, members, system, silent)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from([0.02, 0.2]))
def test_the_shares_are_the_likeliest_that_are_shares(seed: int, deviation: float, width: float) -> None:
    """Oracle: a general solver of the same problem with its constraints."""
    rng = np.random.default_rng(seed)
    one, prior = read(rng, rng.dirichlet(np.full(CLASSES, 0.3)), deviation, 3), rng.dirichlet(np.full(CLASSES, 5.0))

    def objective(q: Array) -> float:
        return float((((one.mean - one.system @ q) / deviation) ** 2).sum() + (((q - prior) / width) ** 2).sum())

    found = mode(one, prior, deviation, width)
    total: Any = {"type": "eq", "fun": lambda q: q.sum() - 1}
    best = minimize(objective, prior, method="SLSQP", bounds=[(0, 1)] * CLASSES, constraints=total, options={"maxiter": 500, "ftol": 1e-12})
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)
    assert objective(found) <= objective(best.x) * 1.01 + 1e-6


@pytest.mark.parametrize("rounds", [1, 12])
def test_the_level_of_noise_shows_in_the_readings(rounds: int) -> None:
    """20 clients' readings of one round or twelve: 340 and 2200 degrees of freedom, so 15 % off comes less than once in 1000 times."""
    rng = np.random.default_rng(rounds)
    made = [read(rng, rng.dirichlet(EVEN), 0.3, rounds) for _ in range(20)]
    assert noise_level(made) == pytest.approx(0.3, rel=0.15)


@pytest.mark.slow
def test_clients_that_are_alike_are_taken_for_alike() -> None:
    """20 clients of the very same shares: in 600 trials 21 widths were others (3.5 %), so more than 8 of 60 come once in 2000 times."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(60):
        made = [read(rng, EVEN, 0.5, 5) for _ in range(20)]
        wrong += width_of(made, EVEN, noise_level(made)) > WIDTHS[0]
    assert wrong <= 8


def test_more_rounds_say_more_and_shares_of_each_round_do_not() -> None:
    """Noise of 4 times a share in each round, two labels a client: 100 rounds show what 3 do not, nor 100 that are solved one by one."""
    rng = np.random.default_rng(1)
    truth = [np.isin(np.arange(CLASSES), rng.choice(CLASSES, 2, replace=False)) / 2 for _ in range(20)]
    made = [read(rng, shares, 0.4, 100) for shares in truth]

    def error(found: Any) -> float:
        return float(np.mean([np.abs(one - shares).sum() for one, shares in zip(found, truth, strict=True)]))

    few = dict(enumerate(replace(one, rows=one.rows[:3], members=one.members[:3]) for one in made))
    apart = [np.mean([labels_from_bias(row, (np.eye(CLASSES) - one.system).T, 1.0) for row in one.rows], axis=0) for one in made]
    every = error(shares_under_noise(dict(enumerate(made)), EVEN).values())
    assert every < 0.5 * error(shares_under_noise(few, EVEN).values())
    assert every < 0.8 * error(apart)


# --- runs ---------------------------------------------------------------------------------------------------------------------------


def noisy(epsilon: float, **more: Any) -> Any:
    data = {"clients": 12, "groups": [[0, 1], [2, 3], [4, 5], [6, 7]]} | more.pop("data", {})
    training = {"rounds": 20, "epochs": 1, "batch_size": 20, "lr": 0.1} | more.pop("training", {})
    privacy = {"unit": "sample", "epsilon": epsilon, "delta": 1e-5, "samples": 70}
    run = {"insecure_test_entropy": True}  # the same noise every time
    return config({"name": "fedavg"}, data=data, model={"name": "linear"}, training=training, privacy=privacy, run=run, **more)


label_figures = partial(figures_of, "label_inference")


@lru_cache(maxsize=1)
def seen_at_eight() -> Case:
    return case(noisy(8.0))


@pytest.mark.slow
def test_noise_that_hides_labels_in_an_update_does_not_hide_them_in_a_run() -> None:
    found = label_figures(seen_at_eight())
    assert found["histogram_l1"].status == "leaks", found["histogram_l1"].line()
    assert found["label_set_accuracy"].status == "leaks", found["label_set_accuracy"].line()
    assert (found["histogram_l1"].value or 9) < 0.6
    assert "all rounds" in found["histogram_l1"].note


@pytest.mark.slow
def test_where_noise_leaves_nothing_the_guess_is_that_without_a_view() -> None:
    """Clients with the same labels under strong noise: a guess of noise would be four times as far off as the auxiliary shares."""
    found = label_figures(case(noisy(0.5, data={"partition": "iid", "groups": []}, training={"rounds": 5})))["histogram_l1"]
    assert found.status in ("at_baseline", "not_validated")
    assert found.value is not None
    assert found.baseline is not None
    assert found.value <= found.baseline + 0.02


@pytest.mark.slow
def test_noisy_updates_of_unrelated_clients_say_nothing_of_these() -> None:
    found = label_figures(unrelated(noisy(8.0)))
    assert found["histogram_l1"].status == "at_baseline", found["histogram_l1"].line()
    assert found["label_set_accuracy"].status == "at_baseline", found["label_set_accuracy"].line()


@pytest.mark.slow
def test_what_is_called_silent_has_the_noise_alone() -> None:
    """Oracle: successive readings. Each estimate has more than 1500 degrees of freedom: what sets them apart is that batches are drawn."""
    seen = seen_at_eight()
    model = public_model(seen.prior)
    steps = steps_in(seen.view, model.dimension)
    made = [readings_of(several, seen.prior, model) for several in steps.values()]
    each = [(one, i) for one in made for i in (0, 9)]
    single = [replace(one, rows=one.rows[i : i + 1], members=one.members[i : i + 1], silent=one.silent[i : i + 1]) for one, i in each]
    assert noise_level(single) == pytest.approx(noise_level(made), rel=0.15)
