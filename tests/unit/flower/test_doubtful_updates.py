"""What the strategy says of updates that no local training gives, and that it is silent on trainings: least squares at six clients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from cflpriv.flower.doubtful_updates import diverges, example_doubts, group_doubts, initial_doubt
from cflpriv.flower.seen import Seen, Watch

Array = np.ndarray[Any, Any]
SIZE, CLIENTS, ODD = 256, 6, 2
LAYOUT = (("a", (8, 8), "float32"), ("b", (8, 8), "float32"), ("c", (128,), "float32"))
Odd = Callable[[Array, Array, dict[str, Any]], Array]
"""(model sent, update of its training, what the client keeps) -> update that it sends."""


def descended(client: int, model: Array, number: int) -> Array:
    """The update of ten steps of SGD on this client's least squares. The first numbers of `c` have no gradient at some clients."""
    data, shuffles = np.random.default_rng([7, client]), np.random.default_rng([client, number])
    x, truth = data.normal(size=(60, SIZE)), np.random.default_rng(99).normal(size=SIZE)
    x[:, 128 + 8 * client : 136 + 8 * client] = 0
    y = x @ truth + data.normal(size=60)
    now = model.astype(np.float64)
    for _ in range(10):
        some = shuffles.choice(60, 20)
        now = now - 0.02 * x[some].T @ (x[some] @ now - y[some]) / 20
    return now.astype(np.float32) - model


def doubts_of(odd: Odd | None, rounds: int = 6, who: tuple[int, ...] = (ODD,)) -> list[str]:
    """All doubts about a run whose clients `who` answer so."""
    model = np.random.default_rng(5).normal(size=SIZE).astype(np.float32)
    seen, kept, doubts = Seen(), [dict[str, Any]() for _ in range(CLIENTS)], list[str]()
    watch = Watch(seen, LAYOUT, 0)
    for number in range(rounds):
        updates = []
        for client in range(CLIENTS):
            kept[client] |= {"train": lambda start, c=client, n=number: start + descended(c, start, n), "number": number}
            update = descended(client, model, number)
            updates.append(odd(model, update, kept[client]).astype(np.float32) if odd and client in who else update)
        seen.add(number, "mean", "update", "clients", "server", range(CLIENTS), [{"update": u} for u in updates], readers=("server",))
        mean: Array = np.asarray(np.mean(updates, axis=0, dtype=np.float64), np.float32)
        doubts += watch.doubts([model], [mean], dict.fromkeys(range(CLIENTS), 0))
        model = model + mean
    return doubts


def remembered(kept: dict[str, Any], name: str, value: Array) -> Array:
    """What was kept under a name until now, or `value`, which is kept from now on."""
    before: Array = kept.get(name, value)
    kept[name] = value
    return before


def exchanged(model: Array, update: Array, kept: dict[str, Any]) -> Array:
    back = model + update
    return np.concatenate([back[64:128], back[:64], back[128:]]) - model


KINDS: dict[str, tuple[Odd, str]] = {
    "unchanged": (lambda m, u, k: 0 * u, "returned the arrays as they were sent"),
    "updates in place of arrays": (lambda m, u, k: u - m, "nothing in common"),
    "a model of its own": (lambda m, u, k: np.random.default_rng(1).normal(size=SIZE) - m, "nothing in common"),
    "many times too long": (lambda m, u, k: 40 * u, "times as long as the others'"),
    "nearly nothing": (lambda m, u, k: 1e-7 * u, "nearly all rounding"),
    "exchanged arrays": (exchanged, "came back in each other's place"),
    "transposed": (lambda m, u, k: np.r_[(m + u)[:64].reshape(8, 8).T.ravel(), (m + u)[64:]] - m, "came back transposed"),
    "one array left out": (lambda m, u, k: np.r_[np.zeros(64), u[64:]], "returned 'a' as it was sent"),
    "the first result for ever": (lambda m, u, k: k.setdefault("first", m + u) - m, "the arrays of an earlier round, whatever it was sent"),
    "one round behind": (lambda m, u, k: remembered(k, "back", m + u) - m, "the arrays of an earlier round, whatever it was sent"),
    "the update before": (lambda m, u, k: remembered(k, "update", u), "returned the update of an earlier round again"),
    "from the model before": (lambda m, u, k: k["train"](remembered(k, "sent", m)) - m, "from a model of an earlier round"),
    "from the first model": (lambda m, u, k: k["train"](k.setdefault("first", m)) - m, "from a model of an earlier round"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_did_not_train_from_the_model_sent_is_named(kind: str) -> None:
    odd, words = KINDS[kind]
    doubts = doubts_of(odd)
    assert any(words in doubt and f"client {ODD}" in doubt for doubt in doubts), doubts
    assert not [doubt for doubt in doubts if doubt.startswith("client") and f"client {ODD}:" not in doubt]


def test_trainings_are_not_named() -> None:
    """Six clients with 60 samples of 256 features: also where steps differ, and training goes on for long."""
    assert not doubts_of(None, rounds=20)
    assert not doubts_of(lambda m, u, k: u / 3, who=(1, 4))


def test_two_clients_with_one_result_are_named() -> None:
    def odd(model: Array, update: Array, kept: dict[str, Any]) -> Array:
        return descended(0, model, kept["number"])

    assert any(doubt.startswith("clients 0, 2, 3: their updates are equal") for doubt in doubts_of(odd, rounds=1, who=(2, 3)))


def test_numbers_of_examples_that_grow_or_are_one() -> None:
    assert example_doubts([{0: 1.0, 1: 1.0, 2: 1.0}])
    assert not example_doubts([{0: 64.0, 1: 64.0, 2: 64.0}])
    rounds = [{0: 10.0 * n, 1: 40.0, 2: 30.0} for n in (1, 2, 3)]
    assert example_doubts(rounds)[0].startswith("client 0: num-examples grows")
    assert not example_doubts([{0: 10.0, 1: 40.0, 2: 30.0}] * 3)


def test_a_model_of_zeros_in_several_layers_is_named() -> None:
    assert initial_doubt(np.zeros(SIZE, np.float32), LAYOUT)
    assert not initial_doubt(np.zeros(64, np.float32), (("w", (8, 8), "float32"),))
    assert not initial_doubt(np.r_[np.ones(64), np.zeros(SIZE - 64)].astype(np.float32), LAYOUT)


def test_running_statistics_may_move_by_any_length() -> None:
    layout = (("a.weight", (8, 16), "float32"), ("n.running_var", (8,), "float32"))
    draws = np.random.default_rng(0)
    model = np.concatenate([draws.normal(size=128), np.ones(8)])
    updates = {client: np.concatenate([0.1 * draws.normal(size=128), draws.uniform(0, 0.1, 8)]) for client in range(5)}
    updates[3][128:] = 500.0
    assert not [doubt for doubt in group_doubts(model, updates, layout, set()) if "as long as" in doubt]
    updates[3][:128] *= 20
    (named,) = [doubt for doubt in group_doubts(model, updates, layout, set()) if "as long as" in doubt]
    assert named.startswith("client 3: ")


def test_a_model_that_one_round_makes_far_longer_has_diverged() -> None:
    assert "training diverges" in diverges(500.0, 500.0, 1.0, 1.0, 500.0)
    assert diverges(5.0, 5.0, 1.0, 1.0, 5.5) == ""
    assert diverges(5.0, 5.0, 0.0, 0.0, 5.0) == ""  # a model of zeros begins somewhere
