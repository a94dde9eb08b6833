"""Cross-fitted clustering in the clear, under a rotation and under CKKS: the same labels, answer and p."""

from functools import cache
from typing import Any

import pytest
from scenes import continuum, federation, population, training

from cflpriv.algorithms import crossfit
from cflpriv.contract.protection import Protection
from cflpriv.types import Population

HAAR, LABELS = Protection(gram=("haar",), sum="haar"), Protection(gram=("ckks",))
SCENES = {"groups": lambda: population(2, 8), "continuum": lambda: continuum(16, 7), "alike": lambda: population(1, 8)}
"""One for each answer of the test; p of the continuum is a count that is released as it is."""


def crossfit_description(scene: Population, protection: Protection) -> dict[str, Any]:
    fed = federation(scene, protection, release_policy="strict", seed=1)
    algorithm = crossfit(training(scene, dtype="float32", batch_size=20))
    return dict(algorithm.describe(algorithm.init(fed)))


@cache
def in_the_clear(name: str) -> dict[str, Any]:
    return crossfit_description(SCENES[name](), Protection())


def test_the_scenes_have_one_answer_each() -> None:
    answers = {name: in_the_clear(name)["answer"] for name in SCENES}
    assert answers == {"groups": "groups", "continuum": "no clear groups", "alike": "all alike"}
    assert in_the_clear("groups")["p"] == 1 / 500
    assert 0.01 < in_the_clear("continuum")["p"] < 1


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("protection", [HAAR, LABELS], ids=["haar", "ckks"])
def test_a_protection_changes_neither_labels_nor_p(name: str, protection: Protection) -> None:
    """A rotation is exact up to rounding, and the key holder computes with products that err by less than a millionth."""
    if protection is LABELS:
        pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    clear, under = in_the_clear(name), crossfit_description(SCENES[name](), protection)
    one, other = ({key: value for key, value in each.items() if key != "evidence"} for each in (clear, under))
    assert one == other
    if protection is LABELS:
        assert under["evidence"] is None
    else:
        tests = [
            [(test["clients"], test["directions"], test["k"], test["p"]) for test in each["evidence"]["tests"]] for each in (clear, under)
        ]
        assert tests[0] == tests[1]
        assert under["evidence"]["edge"] == pytest.approx(clear["evidence"]["edge"], rel=1e-9)
        assert under["evidence"]["spectrum"] == pytest.approx(clear["evidence"]["spectrum"], rel=1e-9, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["distances", pytest.param("gram", marks=pytest.mark.slow)])
def test_where_more_is_released_noise_changes_no_clear_answer(release: str) -> None:
    """The key holder computes the test before noise is added to distances; a released Gram has noise, and the server tests it."""
    pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    scene = population(2, 4)
    clear = crossfit_description(scene, Protection())
    under = crossfit_description(scene, Protection(gram=("ckks",), ckks_release=release))  # type: ignore[arg-type]
    assert clear["answer"] == "groups"
    for key in ("clustering", "answer", "directions", "p"):
        assert under[key] == clear[key]
    assert ("tests" in under["evidence"]) == (release == "gram")
