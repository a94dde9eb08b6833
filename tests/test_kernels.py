"""`make test-kernels` runs other processors' kernels, and finds a test that compares blocks of a product bit for bit."""

import os
from itertools import product
from pathlib import Path

import kernels
import pytest

PLANTED = """
import numpy as np
import pytest


@pytest.mark.parametrize("seed", range(20))
def test_planted(seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(rng.integers(5, 60), rng.integers(3, 60)))
    blocks = np.concatenate([rows[start : start + 4] @ rows.T for start in range(0, len(rows), 4)])
    COMPARED
"""


def test_every_kernel_and_capability_meets_one_thread_and_two() -> None:
    for machine in kernels.KERNELS:
        rows = kernels.settings(machine)
        assert {(row.kernel, row.threads) for row in rows} == set(product(kernels.KERNELS[machine], (1, 2)))
        assert {(row.capability, row.threads) for row in rows} == set(product(kernels.CAPABILITIES[machine], (1, 2)))
        assert {row.kernel for row in rows[:4]} == set(kernels.KERNELS[machine])
        assert {row.capability for row in rows[:4]} == set(kernels.CAPABILITIES[machine])


def test_the_environment_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "MKL_CBWR", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "7")
    made = kernels.Setting("Haswell", "avx2", 2).environment()
    assert "7" not in [made[name] for name in made if kernels.CHOSEN_BY_OTHERS.search(name)]
    assert made["PATH"] == os.environ["PATH"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compared", "code"),
    [("np.testing.assert_array_equal(blocks, rows @ rows.T)", 1), ("np.testing.assert_allclose(blocks, rows @ rows.T, atol=1e-12)", 0)],
)
def test_a_planted_bit_comparison_of_blocks_is_found(compared: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(PLANTED.replace("COMPARED", compared), encoding="utf-8")
    assert kernels.main(["--quick", str(file)]) == code
    shown = capsys.readouterr().out
    assert ("FAILED" in shown) == bool(code)
    assert "passed" in shown
