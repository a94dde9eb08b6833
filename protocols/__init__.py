"""Cryptographic and differential-privacy protocols: secure sums, shared secrets, encrypted comparisons, noise and ledgers.

This folder stands alone: it imports nothing else of the project and only relatively, so that it can be vendored whole into another
system. Each module is one protocol or one building block; its docstring says **Guarantee** (what holds, against whom), **Reveals** (what
is learnt all the same) and **Source** (the paper, section and equation).

All of it is unaudited research code.

The same files under two names in one process raise `ImportError`: their classes would seem to be the same. A copy of the folder elsewhere
on the disk is another package with classes of its own and may be imported beside this one; `copies` refuses its objects.
"""

import sys
from os.path import realpath

_FILES = realpath(__file__)

_modules = ((name, getattr(module, "__dict__", {}).get("_FILES")) for name, module in tuple(sys.modules.items()))
if _first := next((name for name, files in _modules if files == _FILES and name != __name__), None):
    raise ImportError(f"{__name__}: the same files were imported as {_first} before; use {_first}", name=__name__)
