"""Label shares learned from simulated clients, and those of clients with few labels from few sums."""

import numpy as np
import pytest
import torch
from torch import nn

from cflpriv.attacks.evidence.learned_shares import (
    BiasShares,
    RidgeShares,
    Rows,
    learned_shares,
    restricted,
    ridge_shares,
    row_direction,
    shares_of_bias,
)
from cflpriv.attacks.evidence.linear_evidence import projected
from cflpriv.attacks.evidence.simulated_shares import Head, head_of, shares_by_simulation
from cflpriv.attacks.labels.sparse_shares import least_labels, sparse_shares
from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.models import Model
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData


def planted(clients: int, classes: int, labels: int, rng: np.random.Generator) -> Array:
    shares = np.zeros((clients, classes))
    for row in shares:
        row[rng.choice(classes, labels, replace=False)] = rng.dirichlet(np.full(labels, 8.0))
    return shares


def test_a_conditional_logit_recovers_the_shares_that_it_describes() -> None:
    """Log shares that are a multiple of the scaled bias, up to a constant, are read exactly; the length of an update does not matter."""
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((300, 6))
    scaled = (bias - bias.mean(axis=1, keepdims=True)) / bias.std(axis=1, keepdims=True)
    shares = np.exp(1.5 * scaled)
    shares /= shares.sum(axis=1, keepdims=True)
    learned = learned_shares(Rows(None, bias[:200]), shares[:200])
    read = learned.read(Rows(None, 40.0 * bias[200:] + 3.0), [6] * 100)
    assert np.abs(read - shares[200:]).max() < 0.01


def test_presence_is_learned_once_for_all_labels() -> None:
    """Ten clients, each with two of 40 labels: most labels have no client that has them, but rows of other labels tell what presence is."""
    rng = np.random.default_rng(1)
    shares = planted(30, 40, 2, rng)
    bias = shares + 0.01 * rng.standard_normal(shares.shape)
    learned = learned_shares(Rows(None, bias[:20]), shares[:20])
    read = learned.read(Rows(None, bias[20:]), [2] * 10)
    assert ((read > 0) == (shares[20:] > 0)).all()


def test_the_direction_of_rows_is_the_mean_input() -> None:
    """Rows that are shares times one input, whose numbers add up to nothing: sums of rows are blind, the direction finds it."""
    rng = np.random.default_rng(5)
    shares, hidden = planted(60, 5, 2, rng), rng.standard_normal(12)
    hidden -= hidden.mean()
    rows = Rows((shares - 0.2)[:, :, None] * hidden + 0.01 * rng.standard_normal((60, 5, 12)), None)
    found = row_direction(rows, shares)
    assert float(found @ hidden) / (np.linalg.norm(found) * np.linalg.norm(hidden)) > 0.99
    read = learned_shares(rows.some(np.arange(40)), shares[:40]).read(rows.some(np.arange(40, 60)), [2] * 20)
    assert ((read > 0) == (shares[40:] > 0)).all()


def test_leave_one_out_of_the_ridge_is_that_of_fits_without_one() -> None:
    """The penalty is the one whose fits without each client err least: by brute force."""
    rng = np.random.default_rng(2)
    updates, shares = rng.standard_normal((14, 30)), planted(14, 4, 2, rng)
    made = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    fitted = ridge_shares(updates, shares)
    centred = made - made.mean(axis=0)
    scale = float(np.linalg.eigvalsh(centred @ centred.T).clip(0).mean())
    errors = {}
    for penalty in 10.0 ** np.arange(-6, 4) * scale:
        errors[penalty] = 0.0
        for out in range(14):
            keep = np.arange(14) != out
            x, y = made[keep] - made[keep].mean(axis=0), shares[keep] - shares[keep].mean(axis=0)
            weights = np.linalg.solve(x.T @ x + penalty * np.eye(30), x.T @ y)
            guess = (made[out] - made[keep].mean(axis=0)) @ weights + shares[keep].mean(axis=0)
            errors[penalty] += float(((guess - shares[out]) ** 2).sum())
    best = min(errors, key=lambda penalty: errors[penalty])
    weights = centred.T @ np.linalg.solve(centred @ centred.T + best * np.eye(14), shares - shares.mean(axis=0))
    assert fitted.weights == pytest.approx(weights, abs=1e-8)


def test_means_over_a_vocabulary_are_read_label_by_label() -> None:
    """Forty clients with three of 300 labels: most labels have one client or none, and the mean of others is read all the same."""
    rng = np.random.default_rng(6)
    shares, others = planted(40, 300, 3, rng), planted(20, 300, 3, rng)
    bias, moved = (2.0 * part - 0.01 + 0.005 * rng.standard_normal(part.shape) for part in (shares, others))
    scale = float(np.linalg.norm(bias, axis=1).mean())
    line, ridge = shares_of_bias(bias, shares, scale), ridge_shares(bias, shares, scale)
    assert isinstance(line, BiasShares)
    mean, truth = moved.mean(axis=0)[None], others.mean(axis=0)
    errors = [float(np.abs(way.read(mean, [300])[0] - truth).sum()) for way in (line, ridge)]
    assert errors[0] < 0.4 < errors[1]


def test_labels_whose_movements_depend_are_read_together() -> None:
    """Four labels, each bias a mixture of two shares: a line of its own for each label is worse than a regression on all."""
    rng = np.random.default_rng(7)
    shares = planted(60, 4, 2, rng)
    bias = shares @ (np.eye(4) + 0.8 * np.roll(np.eye(4), 1, axis=1))
    assert isinstance(shares_of_bias(bias, shares, 1.0), RidgeShares)


def test_the_last_layer_is_found_with_and_without_a_bias() -> None:
    linear = Model("linear", (4,), 3)
    assert head_of(linear) == Head(slice(0, 15), (3, 4), True)
    assert head_of(linear, frozen=("1.bias",)) is None
    bare = Model("own", (4,), 3, factory=lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False)))
    assert head_of(bare) == Head(slice(25, 40), (3, 5), False)
    other = Model("own", (4,), 3, factory=lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)))
    assert head_of(other) == Head(slice(18, 21), (3,), True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_simulated_clients_read_the_labels_of_others(bias: bool, optimizer: str) -> None:
    """Three labels that lie apart: a client of one or two of them is read rightly, whatever trained it."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, 4, 400)
    x = (np.eye(4)[y] + 0.2 * rng.standard_normal((400, 4))).astype(np.float32)
    with torch.random.fork_rng(devices=[]):
        model = Model("own", (4,), 4, factory=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4, bias=bias)))
    train = Train(model, epochs=3, batch_size=5, lr=0.02, optimizer="adam" if optimizer == "adam" else "sgd")
    start = model.init(0)
    read = shares_by_simulation(train, start.astype(np.float64), x, y, [(20, 2)], rng)
    for labels in ((0, 1), (1, 3), (0, 2)):
        places = np.flatnonzero(np.isin(y, labels))[:20]
        task_input = TaskInput(ClientData(0, x[places], y[places], x[:1], y[:1]), {"model": start}, {}, Streams(9, 0, 0))
        (result,) = Engine().run(train, [task_input])
        shares = read(np.asarray(result["update"], np.float64), 2)
        assert set(np.flatnonzero(shares)) == set(labels)
        assert shares.sum() == pytest.approx(1.0)


# --- few labels ----------------------------------------------------------------------------------------------------------------------


def test_projections_are_the_nearest_shares_of_so_many_labels() -> None:
    values = np.array([[0.5, 0.4, 0.3, -1.0], [2.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]])
    assert projected(values, np.array([2, 4, 4])) == pytest.approx(np.array([[0.55, 0.45, 0, 0], [1, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]]))
    assert restricted(values, [1, 1, 2]) == pytest.approx(np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0.5, 0.5, 0, 0]]))


def test_shares_are_cut_to_their_labels_only_where_these_hold_half() -> None:
    assert least_labels(np.array([0.6, 0.2, 0.2, 0.0]), 1) == pytest.approx([1, 0, 0, 0])
    undecided = np.array([0.3, 0.3, 0.2, 0.2])
    assert least_labels(undecided, 1) == pytest.approx(undecided)
    assert least_labels(undecided, 4) == pytest.approx(undecided)


def test_fewer_sums_than_clients_determine_shares_of_few_labels() -> None:
    """Twelve exact sums over twenty clients with two of ten labels: shares of all labels are undetermined, of two they are exact."""
    rng = np.random.default_rng(4)
    shares = planted(20, 10, 2, rng)
    rows = (rng.random((14, 20)) < 0.35).astype(float)
    rows /= rows.sum(axis=1, keepdims=True)
    least_norm = np.linalg.pinv(rows) @ (rows @ shares - 0.1) + 0.1
    start = projected(least_norm, np.full(20, 10))
    found = sparse_shares(rows, rows @ shares, [2] * 20, start, 0.0, np.random.default_rng(0))
    before, after = (float(np.abs(guess - shares).sum(axis=1).mean()) for guess in (start, found))
    assert before > 0.5
    assert after < 0.25 * before
