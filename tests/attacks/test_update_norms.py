"""Sample counts from the lengths of updates."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack_scenes import case
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.attacks import counts_from_lengths
from cflpriv.attacks.leakage import Case
from cflpriv.attacks.update_norms import cells, lengths_in
from cflpriv.experiments import Config, parse_config
from cflpriv.randomness import stream


def skewed(protection: dict[str, Any], seed: int = 0, **more: Any) -> Config:
    """Twenty clients with unequal labels and numbers of samples."""
    return parse_config({
        "data": {"partition": "dirichlet", "alpha": 0.3, "clients": 20, "seed": seed}, "model": {"hidden": 8},
        "training": {"rounds": 1, "weights": "equal", "lr": 0.1}, "algorithm": {"name": "fedavg"}, "protection": protection,
        "run": {"record": "full", "seed": seed, "audit_parties": ["server", "client:0"]}, **more,
    })  # fmt: skip


HAAR = {"gram": ["haar"], "sum": "haar"}


@given(st.floats(0.2, 3.0), st.floats(0.1, 10.0))
def test_a_known_curve_is_read_backwards(power: float, scale: float) -> None:
    counts = np.geomspace(4, 512, 40)
    lengths = scale * counts**power
    np.testing.assert_allclose(counts_from_lengths(lengths[5:30:3], lengths, counts), counts[5:30:3], rtol=1e-6)
    assert counts_from_lengths(np.array([0.0, np.inf]), lengths, counts).tolist() == pytest.approx([4, 512])


def test_a_transform_keeps_lengths_and_so_what_they_tell() -> None:
    plain, turned = (case(skewed(protection)) for protection in ({}, HAAR))
    seen = lengths_in(turned.view)
    assert seen == pytest.approx(lengths_in(plain.view), rel=1e-4)
    order, error = cells(turned)[0]
    assert order.status == "leaks"
    assert (order.value or 0.0) > 0.75
    assert error.baseline is not None
    assert (error.value or 2.0) < error.baseline


def test_clients_dealt_otherwise_are_not_found() -> None:
    made = case(skewed(HAAR))
    names = stream(0, "dealt").permutation(20)
    dealt = replace(made.truth, label_counts={client: made.truth.label_counts[int(names[client])] for client in range(20)})
    order = cells(replace(made, truth=dealt))[0][0]
    assert order.status != "leaks"


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (lambda: case(skewed({"sum": "secagg", "secagg_mode": "passive"})), "no single updates of enough clients"),
        (
            lambda: case(skewed({}, privacy={"unit": "client", "epsilon": 5.0, "delta": 1e-4, "clip_norm": 0.2})),
            "not attempted: clients clip",
        ),
    ],
    ids=["secure sums", "private"],
)
def test_what_is_not_there_or_not_read_is_said(made: Any, word: str) -> None:
    seen: Case = made()
    (one,) = cells(seen)[0]
    assert word in one.note
