"""A plugin of pytest, `-p on_device`: a CUDA device is in use wherever a test does not say otherwise, and every run computes there.

Tests of attacks compare with oracles. So under this plugin they show where an attack mixes tensors of both sides, or differs on a device.
"""

from types import CodeType

from cflpriv.engine import device, graphs


def resolved(kind: str) -> str:
    return "cuda"


def in_use() -> device.Device:
    return _IN_USE.get(Device("cuda"))  # type: ignore[name-defined,no-any-return]  # noqa: F821  # of the module that gets this


def pytest_configure() -> None:
    """Before tests import these functions by name: the code is replaced, and the functions stay."""
    codes: list[CodeType] = [resolved.__code__, in_use.__code__]
    device.resolved.__code__, device.in_use.__code__ = codes


def pytest_runtest_setup() -> None:
    """Steps that an earlier test had captured would be replayed as they were, whatever this one replaces in them."""
    graphs.release_graphs()
