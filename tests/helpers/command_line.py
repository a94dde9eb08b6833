"""The command line without another interpreter, which takes seconds to start."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from cflpriv.cli import main


def in_process(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run `cflpriv` with these words; its exit code."""
    monkeypatch.setattr(sys, "argv", ["cflpriv", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@contextmanager
def forked(*words: str) -> Iterator[tuple[int, TextIO]]:
    """`cflpriv` with these words in a process forked off this one, which may be sent signals: its id and standard output."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 3
        try:
            os.close(reading)
            sys.argv = ["cflpriv", *words]
            with open(writing, "w", buffering=1, encoding="utf-8") as sys.stdout:
                main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8") as out:
        yield pid, out
