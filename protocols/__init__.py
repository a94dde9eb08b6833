"""How can strangers compute together without telling?

This folder stands alone: it imports nothing else of the project and only relatively, so that it can be vendored whole into another
system. Each module is one protocol or one building block; its docstring says **Guarantee** (what holds, against whom), **Reveals** (what
is learnt all the same) and **Source** (the paper, section and equation).

All of it is unaudited research code.

A process has these classes once: importing the folder, or a copy of it, under a second name raises `ImportError`.
"""

import sys

_IDENTITY = "the protocols of cflpriv"

for _name, _module in tuple(sys.modules.items()):
    if _name != __name__ and getattr(_module, "__dict__", {}).get("_IDENTITY") == _IDENTITY:
        raise ImportError(f"{__name__}: imported as {_name} before, and classes of two copies do not mix; use {_name}", name=__name__)
