"""R² and errors from sums, against scikit-learn, and the rule for models that predict nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from cflpriv.error_sums import SUMS, ErrorSums, error_sums, pooled_errors, sums_these, useless_numbers
from cflpriv.types import Array


def of(y: Array, p: Array) -> ErrorSums:
    return ErrorSums(float(len(y)), *map(float, error_sums(y, p)))


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.integers(1, 5))
def test_scores_of_summed_clients_are_those_of_scikit_learn(seed: int, n: int, clients: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [(rng.uniform(-1, 1, n), rng.uniform(-1.5, 1.5, n)) for _ in range(clients)]
    y, p = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    whole = pooled_errors([{"count": np.array(float(n)), "errors": error_sums(*part)} for part in parts])
    assert whole is not None
    assert whole.r2 == pytest.approx(r2_score(y, p), rel=1e-6, abs=1e-9)
    assert whole.root_mean_square == pytest.approx(root_mean_squared_error(y, p))
    assert whole.mean_absolute == pytest.approx(mean_absolute_error(y, p))
    assert whole.constant_error(0.3) == pytest.approx(root_mean_squared_error(y, np.full(len(y), 0.3)))
    assert sums_these(error_sums(y, p), len(y))


def test_labels_that_do_not_vary_have_no_r2_and_no_warning() -> None:
    sums = of(np.full(9, 0.25), np.full(9, 0.2))
    assert np.isnan(sums.r2)
    assert not useless_numbers(sums, "the model")


def test_models_that_predict_nothing_are_named() -> None:
    rng = np.random.default_rng(0)
    y = rng.uniform(-1, 1, 200)
    assert "predicts one number" in useless_numbers(of(y, np.full(200, y.mean())), "the model")
    assert "explains none" in useless_numbers(of(y, y.mean() + 0.1 * rng.normal(size=200)), "the model")
    assert not useless_numbers(of(y, 0.5 * y), "the model")
    assert not useless_numbers(of(y, y), "the model")


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(SUMS + 1), np.full(SUMS, np.nan), np.array([-1.0, 1, 0, 1, 0, 1]), np.array([1.0, 3, 0, 1, 0, 1]),
        np.array([1, 1, 0, 9.0, 0, 1]),
    ],
)  # fmt: skip
def test_sums_that_no_samples_have_are_recognised(wrong: Array) -> None:
    assert not sums_these(wrong, 4)
