"""Samples that are kept back from all training."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.data import DataSpec, build_population
from cflpriv.data.held_out import held_out_count, hold_out, with_held_out
from cflpriv.errors import InputError
from cflpriv.types import ClientData


def client(samples: int, number: int = 0) -> ClientData:
    x = np.arange(samples, dtype=np.float32)[:, None]
    return ClientData(number, x, np.zeros(samples, np.int64), x[:1], np.zeros(1, np.int64))


@given(st.integers(1, 300), st.sampled_from(["random", "last"]), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_trained_on_or_held_out(samples: int, how: str, seed: int) -> None:
    own = hold_out(client(samples), how, 0, seed)  # type: ignore[arg-type]
    assert own.held_out is not None
    assert len(own.held_out[1]) == held_out_count(samples)
    assert sorted([*own.x_train[:, 0], *own.held_out[0][:, 0]]) == list(range(samples))


def test_the_last_samples_are_held_out_and_the_gap_is_in_neither_part() -> None:
    own = hold_out(client(100), "last", 7, 0)
    assert own.held_out is not None
    assert own.held_out[0][:, 0].tolist() == list(range(80, 100))
    assert own.x_train[:, 0].tolist() == list(range(73))


def test_a_gap_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="held_out_gap = 50: leaves client 3 no training sample of 20"):
        hold_out(client(20, 3), "last", 50, 0)
    with pytest.raises(InputError, match="only held_out = 'last' has a gap"):
        build_population(DataSpec(held_out="random", held_out_gap=2))


def test_clients_draw_different_parts_and_hold_out_once() -> None:
    people = build_population(DataSpec(clients=4, held_out="random"))
    assert with_held_out(people, "random", 0, 0) is people
    without = build_population(DataSpec(clients=4))
    assert all(own.held_out is None for own in without.clients)
    assert [own.samples + held_out_count(whole.samples) for own, whole in zip(people.clients, without.clients, strict=True)] == [
        whole.samples for whole in without.clients
    ]


def test_clients_that_the_file_names_have_no_known_groups(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng, owners = np.random.default_rng(0), np.repeat(np.arange(3), 20)
    x, y = rng.random((60, 4)).astype(np.float32), rng.integers(0, 2, 60)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:12], y_test=y[:12], client_train=owners, client_test=owners[:60:5])
    people = build_population(DataSpec(source="npz", paths=(str(tmp_path / "a.npz"),), partition="given"))
    assert not people.groups_known
    assert people.truth == {}
    assert build_population(DataSpec(clients=4)).truth == dict.fromkeys(range(4), 0)
