"""What each adversary has of a Gram under encryption, whole or by landmarks; and comparisons under differential privacy."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from attack_scenes import QUICK, case, config

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.compared.gram_geometry import _products_of_blocks, products_of
from cflpriv.attacks.evidence.fresh_runs import AuditedRun, case_of, fresh_scene
from cflpriv.attacks.figures.leakage import Case, Cell
from cflpriv.data import build_population


@lru_cache(maxsize=4)
def encrypted_scene(release: str = "labels", landmarks: int = 0) -> AuditedRun:
    protection = {"gram": ["ckks"], "ckks_release": release, "landmarks": landmarks}
    made = config({"k": 4}, protection, data={"clients": 12}, training={"rounds": 0})
    made = replace(made, run=replace(made.run, audit_parties=("server", "client:0", "key-holder")))
    return fresh_scene(made, build_population(made.data), 0, QUICK)


def seen(adversary: str, *of: Any) -> Case:
    pytest.importorskip("tenseal")
    return case_of(encrypted_scene(*of), adversary, QUICK)


def figures_by_known(name: str, one: Case) -> dict[int, Cell]:
    return {cell.k_known: cell for cell in ATTACKS[name].cells(one)[0]}


def test_half_of_a_gram_is_completed_and_none_is_nothing() -> None:
    """Blocks with landmarks only: vectors in the landmarks' span come out exactly; what was seen stands; without landmarks, nothing."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 2, 6))
    rows[:3] = np.eye(6).reshape(3, 2, 6)  # three landmarks of two vectors span the six dimensions
    blocks = {(a, b): rows[a] @ rows[b].T for a in range(3) for b in range(8)}
    found = _products_of_blocks(blocks)
    assert found is not None
    assert found[0] == tuple(range(8))
    assert found[1] == pytest.approx(np.einsum("ipd,jqd->ipjq", rows, rows), abs=1e-9)
    wild = rng.normal(size=(8, 2, 30))
    partial = _products_of_blocks({(a, b): wild[a] @ wild[b].T for a in range(3) for b in range(8)})
    assert partial is not None
    assert partial[1][:3] == pytest.approx(np.einsum("ipd,jqd->ipjq", wild[:3], wild), abs=1e-12)
    assert _products_of_blocks({(0, 1): wild[0] @ wild[1].T, (2, 3): wild[2] @ wild[3].T}) is None
    assert _products_of_blocks({}) is None


@pytest.mark.parametrize(("adversary", "release", "sees"), [
    ("server", "labels", False), ("server+1", "labels", False), ("key-holder", "labels", True), ("server", "gram", True),
])  # fmt: skip
def test_landmarks_leave_the_gram_attack_its_known_clients(adversary: str, release: str, sees: bool) -> None:
    one = seen(adversary, release, 6)
    found = figures_by_known("gram_geometry", one)
    if not sees:
        assert {cell.status for cell in found.values()} == {"not_applicable"}
        assert products_of(one)[0] is None
        return
    mine, theirs = products_of(one)
    assert mine is not None
    assert theirs is not None
    assert mine[0] == theirs[0]
    close = np.abs(mine[1] - theirs[1]).max(axis=(1, 3)) < 1e-3
    assert 6 <= close.all(axis=1).sum() < 12  # the landmarks' rows are right, the others' are projections
    assert found[3].value is not None
    assert found[3].value > 0.5
    assert found[3].baseline is not None
    assert found[3].value > found[3].baseline


@pytest.mark.parametrize("name", ["gram_geometry", "signature_inversion"])
def test_in_public_key_mode_a_colluder_adds_nothing(name: str) -> None:
    assert {cell.status for cell in figures_by_known(name, seen("server+1")).values()} == {"not_applicable"}


# --- differential privacy -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=6)
def private_case(unit: str, epsilon: float, algorithm: str, tested: bool = False) -> Case:
    privacy: dict[str, Any] = {"unit": unit, "epsilon": epsilon, "delta": 1e-4, "clip_norm": 0.2}
    privacy |= {"samples": 70, "sketch_dim": 32} if unit == "sample" else {"local": ["gram"]}
    rules: dict[str, dict[str, Any]] = {"pacfl": {"k": 4}, "stocfl": {"tau": 0.5}}
    chosen = {"name": algorithm} | ({"cut": "test"} if tested else rules[algorithm])
    return case(config(chosen, training={"rounds": 1, "batch_size": 10}, privacy=privacy))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "algorithm"), [("sample", "pacfl"), pytest.param("sample", "stocfl", marks=pytest.mark.slow), ("client", "pacfl")]
)
@pytest.mark.parametrize("tested", [pytest.param(False, marks=pytest.mark.slow), True])
def test_pretended_clients_clip_sketch_and_scale_as_the_real_ones(unit: str, algorithm: str, tested: bool) -> None:
    """With noise that is next to nothing, what the simulator gives for a client's own data is what that client sent."""
    one = private_case(unit, 1e6, algorithm, tested)
    sent = {c: row for m in one.view.select("gram") for c, row in zip(m.clients, (m.payload or {}).get("rows", ()), strict=False)}
    clients = sorted(sent)[:4]
    made = one.prior.simulate([one.truth.data[client] for client in clients])
    plain = one.prior.simulate_open([one.truth.data[client] for client in clients])
    assert made is not None
    assert plain is not None
    for client, row in zip(clients, made, strict=True):
        cosines = np.abs((row * sent[client]).sum(axis=1)) / np.linalg.norm(row, axis=1) / np.linalg.norm(sent[client], axis=1)
        assert cosines[0] > 0.99
        assert np.linalg.norm(row) == pytest.approx(np.linalg.norm(sent[client]), rel=0.05)
    assert made.shape != plain.shape or not np.allclose(made, plain)
    # halves of other clients fill a batch of float32 otherwise
    assert plain[0] == pytest.approx(one.rows[clients[0]], abs=1e-7 if tested and algorithm == "stocfl" else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gram_geometry", "sybil_span", "anchor_counts"])
@pytest.mark.parametrize("algorithm", ["pacfl", "stocfl"])
@pytest.mark.parametrize("tested", [False, True])
def test_attacks_on_noised_comparisons_are_measured_in_their_own_space(name: str, algorithm: str, tested: bool) -> None:
    """Sketched to fewer dimensions than without privacy: figures are finite, and errors no worse than a wrong guess can be.

    That labels leak at ε = 1 all the same (StoCFL's anchor gradients) is no fault: it is single samples that the noise protects.
    """
    for cell in ATTACKS[name].cells(private_case("sample", 1.0, algorithm, tested))[0]:
        numbers = [number for number in (cell.value, cell.baseline, cell.reference) if number is not None]
        assert np.isfinite(numbers).all()
        assert cell.metric != "histogram_l1" or cell.value is None or cell.value <= 2.0
