"""`tests/which.py` finds tests for every module of the product."""

from pathlib import Path

import pytest
import which


@pytest.mark.slow
def test_every_module_has_tests() -> None:
    product = [path for path in which.files() if path.parts[0] != "tests" and path.name != "__main__.py"]
    found = which.tests_of(product)
    assert len(product) > 300
    assert [str(module) for module, tests in found.items() if not tests] == []


def test_the_tests_of_a_module_import_it_and_its_own_come_first() -> None:
    (tests,) = which.tests_of([Path("cflpriv/clustering/similarity.py")]).values()
    assert tests[0].name == "test_similarity.py"
    assert all("similarity" in (which.ROOT / test).read_text(encoding="utf-8") for test in tests)
    assert which.main(["README.md"]) == which.main([]) == 2
