"""Build the engine's compiled kernel where there is a C++ compiler. Without one the package is complete, and training stays with torch.

`pip install` runs this; `python setup.py build_ext --inplace` builds the kernel again in a checkout. All else is in pyproject.toml.
"""

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ENGINE = Path("cflpriv", "engine")
SOURCES = tuple(ENGINE / name for name in ("native.cpp", "native_images.h", "native_layers.h", "native_noise.h"))
LIBRARY = ENGINE / "libnative.so"
# products and sums are fused, as torch's kernels fuse them; nothing is reordered; a root that sets no errno is one instruction
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared"]
ARCHITECTURE = {"x86_64": ["-march=x86-64-v3"], "amd64": ["-march=x86-64-v3"]}


class Kernel(build_ext):
    """One library without Python's interface, which `ctypes` loads under any Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
        if compiler is None:
            print("cflpriv: no C++ compiler, so training will use torch alone, which is about half as fast")
            return
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()
        flags = [*FLAGS, *ARCHITECTURE.get(platform.machine().lower(), []), f'-DSOURCES="{digest}"']
        done = subprocess.run(
            [compiler, *flags, str(SOURCES[0]), "-o", str(target)], capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            print(f"cflpriv: {compiler} fails ({reason}), so training will use torch alone, which is about half as fast")


class Wheel(bdist_wheel):
    """For any Python; for this platform if the library was built."""

    def get_tag(self) -> tuple[str, str, str]:
        built = Path(self.get_finalized_command("build_ext").build_lib) / LIBRARY
        return "py3", "none", super().get_tag()[2] if built.exists() else "any"


setup(
    ext_modules=[Extension("cflpriv.engine.libnative", [str(SOURCES[0])], optional=True)],
    cmdclass={"build_ext": Kernel, "bdist_wheel": Wheel},
)
