"""The command line without another interpreter, which takes seconds to start."""

import sys

import pytest

from cflpriv.cli import main


def in_process(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run `cflpriv` with these words; its exit code."""
    monkeypatch.setattr(sys, "argv", ["cflpriv", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
