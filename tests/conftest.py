"""Settings of all tests: what a slow or busy machine does to a property test's speed says nothing about the property."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import pytest
from hypothesis import HealthCheck, settings

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # the processes of a suite share the cores; read when numpy and torch load
    os.environ.setdefault(variable, "1")

settings.register_profile("cflpriv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cflpriv")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the files, and the tests of each file, in an order drawn from SEED")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the order, if `--shuffle` asks for it. A file's tests stay together, for the sake of what they share."""
    if (seed := config.getoption("--shuffle")) is None:
        return
    draws = Random(seed)
    place = {path: draws.random() for path in dict.fromkeys(item.path for item in items)}
    draws.shuffle(items)
    items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Search for cycles only after collection, and leave what collection has made out of later searches: each takes up to a second among
    ten thousand tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def _nobody_waits_for_the_disk() -> Iterator[None]:
    """Only a machine that loses its power sees whether a file was flushed; tests of flushes put an `os.fsync` of their own in its place."""

    def flushed(file: int) -> None:
        os.fstat(file)  # OSError where it is closed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", flushed)
        yield


@pytest.fixture(autouse=True, scope="module")
def _a_module_leaves_no_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module's own functions cache, such as runs to attack, is dropped after it, and freed memory given back to the system."""
    yield
    for one in vars(request.module).values():
        if hasattr(one, "cache_clear") and one.__module__ == request.module.__name__:
            one.cache_clear()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(autouse=True, scope="module")
def _a_module_leaves_no_plugin() -> Iterator[None]:
    """What a module's tests register is taken back after them: a later module lists and counts what is registered."""
    if "cflpriv.algorithms" not in sys.modules:  # the protocols alone, which are tested without importing more
        yield
        return
    from registries import new_process

    with new_process():
        yield


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the canaries of DP audits: less sharp, and quicker."""
    monkeypatch.setattr("cflpriv.attacks.dp.dp_mechanisms.CLIENTS", 4)
