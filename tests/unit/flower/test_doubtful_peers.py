"""What the strategy says of clients beside each other: turned signs, two rates, one data set twice, random signatures, rising losses."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from cflpriv.clustering.similarity import Gram, angles
from cflpriv.flower.doubtful_peers import Peers, usable_losses
from cflpriv.flower.doubtful_signatures import signature_doubt

Array = np.ndarray[Any, Any]
LAYOUT = (("w", (12, 16), "float32"), ("b", (12,), "float32"))
SIZE, CLIENTS, ODD = 12 * 17, 8, 2
COUNTS = {client: 40.0 + 10 * client for client in range(CLIENTS)}


def least_squares_update(client: int, model: Array, seed: int = 0, steps: int = 20, rate: float = 0.002, data: int | None = None) -> Array:
    """The update of SGD on this client's least squares of 12 outputs, which all clients share but for noise and for their features."""
    draws, shuffles = np.random.default_rng([seed, client if data is None else data]), np.random.default_rng([seed, client, 9])
    x = draws.normal(size=(40, 16)) * draws.uniform(0.3, 1.5, 16)
    y = x @ np.random.default_rng(seed).normal(size=(16, 12)) + draws.normal(size=(40, 12)) + draws.normal(size=12)
    w, b = model[: 12 * 16].reshape(12, 16).copy(), model[12 * 16 :].copy()
    for _ in range(steps):
        some = shuffles.choice(40, 20)
        error = x[some] @ w.T + b - y[some]
        w, b = w - rate * error.T @ x[some], b - rate * error.sum(0)
    return np.concatenate([w.ravel(), b]) - model


def doubts_of(odd: Callable[[int, Array], Array | None], seed: int = 0, rounds: int = 6, counts: dict[int, float] = COUNTS) -> list[str]:
    model, peers, doubts = np.random.default_rng([seed, 5]).normal(size=SIZE) / 10, Peers(), list[str]()
    for _ in range(rounds):
        updates = {}
        for client in range(CLIENTS):
            other = odd(client, model)
            updates[client] = least_squares_update(client, model, seed) if other is None else other
        doubts += peers.doubts(updates, counts, LAYOUT)
        model = model + np.mean(list(updates.values()), axis=0)
    return doubts


@pytest.mark.parametrize("seed", range(5))
def test_a_turned_sign_is_named(seed: int) -> None:
    assert doubts_of(lambda client, model: -least_squares_update(client, model, seed) if client == ODD else None, seed) == [
        f"client {ODD}: its updates point against those of all others, which agree; is their sign turned?"
    ]


@pytest.mark.parametrize("seed", range(5))
def test_two_rates_are_named(seed: int) -> None:
    (doubt,) = doubts_of(lambda client, model: least_squares_update(client, model, seed, rate=2e-5) if client % 2 else None, seed)
    assert doubt.startswith("clients 1, 3, 5, 7: their updates are ")
    assert doubt.endswith("times shorter than those of clients 0, 2, 4, 6; have all the same learning rate?")


@pytest.mark.parametrize("seed", range(5))
def test_one_data_set_at_two_clients_is_named_if_their_numbers_are_the_same(seed: int) -> None:
    def same(client: int, model: Array) -> Array | None:
        return least_squares_update(client, model, seed, data=ODD) if client == 3 else None

    (doubt,) = doubts_of(same, seed, counts=COUNTS | {3: COUNTS[ODD]})
    assert doubt.startswith(f"clients {ODD}, 3: their updates are nearer than those of any others")
    assert not doubts_of(same, seed)
    assert not doubts_of(same, seed, counts=dict.fromkeys(range(CLIENTS), 40.0))


@pytest.mark.parametrize("seed", range(20))
def test_correct_clients_are_not_named(seed: int) -> None:
    """Twenty runs of clients whose features have other scales; long after all is learned; with steps of 2 to 16; with one that differs."""
    assert not doubts_of(lambda client, model: None, seed, rounds=30)
    assert not doubts_of(lambda client, model: least_squares_update(client, model, seed, steps=2 * client + 2), seed)
    assert not doubts_of(lambda client, model: least_squares_update(client, model, seed + 100) if client == ODD else None, seed)


def test_a_loss_that_rises_with_longer_updates_is_named() -> None:
    def warned_of(losses: list[float], lengths: list[float]) -> list[str]:
        peers = Peers()
        return [peers.loss_doubt({0: loss, 1: loss + 0.1}, length) for loss, length in zip(losses, lengths, strict=True)]

    rising, growing = [1.0, 1.2, 1.3, 1.3, 1.4, 1.5], [0.8, 0.6, 0.7, 0.9, 1.4, 2.0]
    *before, last = warned_of(rising, growing)
    assert not any(before)
    assert last.startswith("the training loss rose from 1.05 to 1.39 on average, and updates grow")
    assert not any(warned_of(rising[::-1], growing))
    assert not any(warned_of(rising, growing[::-1]))
    assert not any(warned_of([1.0, 0.9, *rising[2:]], growing))


def test_losses_that_nobody_states_are_left_out() -> None:
    assert usable_losses({0: [1.0, 0.5], 1: [0.0, 0.0]}) == {0: 0.5}
    peers = Peers()
    assert not any(peers.loss_doubt({}, float(length)) for length in range(1, 10))


def _distance(rows: Array) -> Array:
    return angles(Gram.of_vectors(range(len(rows)), rows), "smallest_angle").values


@pytest.mark.parametrize("d", [64, 200])
def test_random_signatures_are_named_and_related_ones_are_not(d: int) -> None:
    """60 runs of 8 clients for each. A random run is missed with a probability of 0.3 %: more than 3 of 60 below 1e-4."""
    draws = np.random.default_rng(d)

    def basis(rows: Array) -> Array:
        return np.linalg.qr(rows.T)[0].T

    missed = 0
    for _ in range(60):
        rows = np.stack([basis(draws.normal(size=(3, d))) for _ in range(8)])
        missed += "as far apart as random rows" not in signature_doubt({"distance": _distance(rows)}, 2, (3, d))
        rows[1] = basis(rows[0] + 0.3 * draws.normal(size=(3, d)) / d**0.5)
        assert not signature_doubt({"distance": _distance(rows)}, 2, (3, d))
    assert missed <= 3


def test_signatures_that_may_be_meant_are_not_named() -> None:
    """Rows of few numbers, orthogonal ones, one cluster, shapes or distances that are not seen."""
    rows = np.stack([np.linalg.qr(np.random.default_rng(i).normal(size=(6, 3)))[0].T for i in range(8)])
    assert not signature_doubt({"distance": _distance(rows)}, 2, (3, 6))
    assert not signature_doubt({"distance": 90.0 * (1 - np.eye(8))}, 2, (3, 64))
    wide = np.stack([np.linalg.qr(np.random.default_rng(i).normal(size=(64, 3)))[0].T for i in range(8)])
    assert signature_doubt({"distance": _distance(wide)}, 2, (3, 64))
    assert not signature_doubt({"distance": _distance(wide)}, 1, (3, 64))
    assert not signature_doubt({"distance": _distance(wide)}, 2, None)
    assert not signature_doubt(None, 2, (3, 64))
