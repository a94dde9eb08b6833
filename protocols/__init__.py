"""Cryptographic and differential-privacy protocols: secure sums, shared secrets, encrypted comparisons, noise and ledgers.

This folder stands alone: it imports nothing else of the project and only relatively, so that it can be vendored whole into another
system. Each module is one protocol or one building block; its docstring says **Guarantee** (what holds, against whom), **Reveals** (what
is learnt all the same) and **Source** (the paper, section and equation).

All of it is unaudited research code.

A process has these classes once: importing the folder, or a copy of it, under a second name raises `ImportError`.
"""

import sys

_IDENTITY = "the protocols of cflpriv"

_others = (name for name, module in tuple(sys.modules.items()) if getattr(module, "__dict__", {}).get("_IDENTITY") == _IDENTITY)
if _first := next((name for name in _others if name != __name__), None):
    raise ImportError(f"{__name__}: imported as {_first} before, and classes of two copies do not mix; use {_first}", name=__name__)
