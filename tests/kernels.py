"""`make test-kernels`: the tests that compute, under the matrix kernels of other processors.

    python tests/kernels.py [--quick] [--list] [PATH ...]

The last digits of a matrix product depend on the kernel that a library picks for the processor, the shapes and the number of threads. A
test passes everywhere only if it compares results bit for bit where both come from the same operations on the same shapes. One machine can
run the kernels of others: OpenBLAS (numpy, scipy) by `OPENBLAS_CORETYPE`, torch by `ATEN_CPU_CAPABILITY`, and the libraries
under torch by `MKL_CBWR` and `ONEDNN_MAX_CPU_ISA`. A kernel that this processor lacks is listed as not available.

`--quick` takes the first four settings and a selection of files, as CI does. Exit code 1 if a test fails or if fewer than two kernels ran.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_COMPUTING = ("benchmarks", "cli", "flower", "nvflare")
FOLDERS = tuple(
    f"tests/unit/{path.name}" for path in sorted((ROOT / "tests" / "unit").glob("[a-z]*[a-z]")) if path.name not in NOT_COMPUTING
)
QUICK = (
    "tests/unit/clustering/test_similarity.py",
    "tests/unit/clustering/test_group_test.py",
    "tests/unit/clustering/test_cuts.py",
    "tests/unit/engine/test_engine.py",
    "tests/unit/tasks/test_training.py",
    "tests/unit/tasks/test_evaluation.py",
    "tests/unit/algorithms/test_baselines.py",
    "tests/unit/algorithms/test_pacfl.py",
    "tests/unit/algorithms/test_ifca.py",
    "tests/unit/algorithms/test_cfl.py",
    "tests/unit/algorithms/test_stocfl.py",
    "tests/unit/algorithms/test_pfedlia.py",
    "tests/unit/algorithms/test_crossfit.py",
    "tests/unit/algorithms/test_r_dpcfl.py",
    "tests/unit/attacks/inversion/test_gradient_inversion.py",
    "tests/unit/attacks/test_mathematics.py",
    "tests/unit/protocols/test_orthonormal.py",
    "tests/unit/protocols/test_shared_gram.py",
)
KERNELS = {"x86_64": ("Nehalem", "Sandybridge", "Haswell", "SkylakeX"), "aarch64": ("ARMV8", "CORTEXA57", "NEOVERSEN1", "THUNDERX2T99")}
"""By machine, names of OpenBLAS's kernels. The first two run on every processor of its kind."""
CAPABILITIES = {"x86_64": ("default", "avx2", "avx512"), "aarch64": ("default", "default", "default")}
UNDER_TORCH = {
    "default": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
CHOSEN_BY_OTHERS = re.compile("^(OPENBLAS|GOTO|MKL|OMP|ONEDNN|DNNL|KMP|BLIS|NUMEXPR)_|^ATEN_CPU_CAPABILITY$|^NPY_DISABLE_CPU_FEATURES$")
"""Variables that the environment may have, and that would decide in our place."""

PROBE = """
import json, numpy, scipy.linalg, threadpoolctl, torch
x = numpy.random.default_rng(0).normal(size=(65, 33))
y = torch.from_numpy(x)
scipy.linalg.svd(x @ x.T), torch.linalg.svd(torch.log_softmax(y @ y.T, 1).exp())
torch.conv2d(y[None, None].float(), torch.ones(3, 1, 5, 5))
blas = sorted({one.get("architecture") or "" for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"})
print(json.dumps([blas, torch.backends.cpu.get_cpu_capability()]))
"""


@dataclass(frozen=True)
class Setting:
    """One way of computing: OpenBLAS's kernel, torch's capability, threads of each library."""

    kernel: str
    capability: str
    threads: int

    def environment(self) -> dict[str, str]:
        """This process's environment with the setting in place of what it has of the kind."""
        threads = {name: str(self.threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        return {
            **{name: value for name, value in os.environ.items() if not CHOSEN_BY_OTHERS.search(name)},
            "OPENBLAS_CORETYPE": self.kernel, "ATEN_CPU_CAPABILITY": self.capability, **UNDER_TORCH[self.capability], **threads,
        }  # fmt: skip


def settings(machine: str) -> tuple[Setting, ...]:
    """Every kernel with one and with two threads, every capability with both; the first four have every value once."""
    (a, b, c, d), (x, y, z) = KERNELS[machine], CAPABILITIES[machine]
    rows = ((a, x, 1), (b, y, 2), (c, z, 1), (d, x, 2), (a, z, 2), (b, z, 1), (c, y, 2), (d, y, 1))
    return tuple(Setting(*row) for row in rows)


def probed(setting: Setting) -> tuple[list[str], str] | None:
    """The kernels and the capability that run under a setting; None where the processor lacks them."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=setting.environment(), capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        return None
    kernels, capability = json.loads(done.stdout)
    is_asked = kernels == [setting.kernel] and capability.replace("NO AVX", "DEFAULT").lower() == setting.capability
    return (kernels, capability) if is_asked else None


def run(setting: Setting, paths: Sequence[str]) -> tuple[int, str, list[str]]:
    """pytest's exit code, its last line, and the names of the tests that failed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-m",
        "not slow and not gpu and not flower",
        "-p",
        "no:cacheprovider",
        "--tb=line",
    ]
    done = subprocess.run(
        [*command, *paths], cwd=ROOT, env=setting.environment(), capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    return done.returncode, lines[-1].strip("= "), [line for line in lines if line.startswith(("FAILED", "ERROR"))]


def main(words: Sequence[str] | None = None) -> int:
    """Run the settings that this processor has; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four settings and a selection of files")
    parser.add_argument("--list", action="store_true", help="show the settings and which of them this processor has")
    parser.add_argument("paths", nargs="*", help="files or folders of tests; default: all that compute")
    asked = parser.parse_args(words)
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if machine not in KERNELS:
        print(f"no kernels are known for {platform.machine()}; known are {', '.join(KERNELS)}", file=sys.stderr)
        return 2
    ran, failed = set[str](), 0
    for setting in settings(machine)[: 4 if asked.quick else None]:
        name = f"{setting.kernel:<12} torch {setting.capability:<8} {setting.threads} thread{'s' if setting.threads > 1 else ' '}"
        if probed(setting) is None:
            print(f"{name}  not available on this processor", flush=True)
            continue
        ran.add(setting.kernel)
        if asked.list:
            print(f"{name}  available")
            continue
        began = time.perf_counter()
        code, line, tests = run(setting, asked.paths or (QUICK if asked.quick else FOLDERS))
        print(f"{name}  {line} [{time.perf_counter() - began:.0f} s]", *tests, sep="\n    ", flush=True)
        failed += code != 0
    if len(ran) < 2:
        print(f"only {len(ran)} kernel ran: nothing was compared", file=sys.stderr)
    return int(failed > 0 or len(ran) < 2)


if __name__ == "__main__":
    sys.exit(main())
