"""Rows for tests of `make gpu`: quick ones, one that lacks a package, one that takes too long, one that ends its process.

Each writes its name into OUT/measured.txt when it begins.
"""

import os
import time
from functools import partial

from benchmarks.gpu.rows import Figures, Floor, Row, Setting


def noted(setting: Setting, name: str, seconds: float = 0.0) -> Figures:
    with (setting.out / "measured.txt").open("a", encoding="utf-8") as file:
        file.write(f"{name} {os.getpid()}\n")
    time.sleep(seconds)
    return {"s": seconds, "nothing": float("nan")}


def lacking(setting: Setting) -> Figures:
    noted(setting, "lacking")
    import msgspec

    return {"note": msgspec.__name__}


def ending(setting: Setting) -> Figures:
    noted(setting, "ending")
    os._exit(3)


def raising(setting: Setting) -> Figures:
    raise ValueError("of\ntwo lines")


def rows(setting: Setting) -> list[Row]:
    return [
        Row("gpu_test_rows", "quick", partial(noted, name="quick"), Floor("s", 1.0)),
        Row("gpu_test_rows", "lacking", lacking),
        Row("gpu_test_rows", "too long", partial(noted, name="too long", seconds=60.0), limit=0.5),
        Row("gpu_test_rows", "ending", ending),
        Row("gpu_test_rows", "raising", raising),
        Row("gpu_test_rows", "slow", partial(noted, name="slow", seconds=float(os.environ.get("SLOW_SECONDS", "3")))),
        Row("gpu_test_rows", "last", partial(noted, name="last")),
    ]
