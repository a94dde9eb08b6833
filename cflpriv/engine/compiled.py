"""The library `libnative.so`, which `setup.py` compiles from `native.cpp` and its headers, and the functions in it.

`native` calls those that train, `step_noise` the one that makes normals. Without the library both compute with torch.
"""

import ctypes
import hashlib
import platform
import warnings
from functools import cache
from pathlib import Path

import torch

from ..errors import CflprivWarning
from ..protocols.bounded_files import read_bytes

__all__ = ["KernelSettings", "library"]

FILE = Path(__file__).with_name("libnative.so")
SOURCES = tuple(FILE.with_name(name) for name in ("native.cpp", "native_images.h", "native_layers.h", "native_noise.h"))
X86 = ("x86_64", "amd64")


class KernelSettings(ctypes.Structure):
    """The numbers of `sgd.Options` as `native_layers.h` has them."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("rate", "momentum", "decay", "prox", "clip", "grid")),
        *((name, ctypes.c_int64) for name in ("anchored", "corrected")),
    ]  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where it was not built or the processor cannot run it."""
    if platform.machine().lower() in X86 and not torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512")):
        return None
    if not FILE.exists():
        return None
    try:
        kernel = ctypes.CDLL(str(FILE))
    except OSError:  # of another system, such as a checkout that two machines share
        return None
    kernel.sources.restype = ctypes.c_char_p
    if kernel.sources().decode() != hashlib.sha256(b"".join(read_bytes(source) for source in SOURCES)).hexdigest():
        message = f"{FILE}: built from other sources, so training uses torch alone; run `python setup.py build_ext --inplace`"
        warnings.warn(message, CflprivWarning, stacklevel=2)
        return None
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    arguments = {
        "create": [pointer, integer, integer, ctypes.POINTER(KernelSettings)], "destroy": [pointer], "begin": [pointer] * 5,
        "steps": [*[pointer] * 5, integer, integer, number, pointer], "clipped_sum": [*[pointer] * 4, integer, number, pointer],
        "end": [pointer] * 2, "outputs": [pointer, pointer, integer, integer, pointer],
    }  # fmt: skip
    for name, types in arguments.items():
        for dtype in ("float32", "float64"):
            function = getattr(kernel, f"{name}_{dtype}")
            function.argtypes, function.restype = types, pointer if name == "create" else None
    kernel.normals.argtypes, kernel.normals.restype = [pointer, pointer, integer, integer, number, pointer, integer], None
    return kernel
