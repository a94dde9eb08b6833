"""The command line. Exit codes: 0 success, 2 invalid user input (one clear line), 1 anything else.

Each command is a function in a file of this package.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from ..errors import CallbackFailed, InputError, TrainingDiverged, WorkerLost, near, out_of_memory, warn_in_lines
from ..extras import what_to_install
from ..protocols.bounded_files import UnusableFile
from ..protocols.errors import ProtocolError
from ..streams import printable_streams
from .auditing import audit, verify
from .claiming import claims
from .describing import contract, explain, list_
from .helping import helper
from .predicting import predict
from .running import advise, reproduce, run, sweep
from .shared import ERR, print_line
from .writing import examples, export, init, report

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Suggests the nearest command where one is not known."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"no such command {args[0]!r}{near(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False,  # tracebacks that show locals would show clients' data
)  # fmt: skip


def _show_version(asked: bool) -> None:
    if asked:
        print_line(f"cflpriv {metadata.version('cflpriv')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", help="Show the version and end.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Privacy-preserving clustered federated learning, and what it leaks."""


for _command in (run, advise, sweep, audit, verify, report, export, predict, reproduce, claims, init, examples, contract, explain, helper):
    app.command()(_command)
app.command("list")(list_)


@contextmanager
def _children_import_safely() -> Iterator[None]:
    """While inside, Python processes that start import nothing from the working directory, which may be a stranger's folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONSAFEPATH", None)


INTERRUPTED = 130
"""What the command line's library returns after Ctrl-C in a command that does not handle it."""


@cache
def _made_command() -> click.Command:
    """All commands, made once in a process: that takes as long as a short command."""
    return typer.main.get_command(app)


@_children_import_safely()
def main() -> None:
    """The entry point: errors become one line and an exit code."""
    printable_streams()
    warn_in_lines()
    try:
        code = _made_command()(standalone_mode=False) or 0
        if code == INTERRUPTED:
            _end("stopped", INTERRUPTED)
        sys.exit(code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        page = "" if not isinstance(error, click.UsageError) or error.ctx is None else f" ({error.ctx.command_path} --help)"
        _end(" ".join(error.format_message().rstrip(".").split()) + page, error.exit_code)
    except (InputError, ProtocolError, CallbackFailed, TrainingDiverged, WorkerLost, OSError) as error:
        _end(str(error), 2 if isinstance(error, InputError | UnusableFile) else 1)
    except ModuleNotFoundError as error:
        if (line := what_to_install(error)) is None:
            raise
        _end(f"this command {line}", 2)
    except (MemoryError, RuntimeError, TypeError, ValueError) as error:
        if "embedded null" in str(error):  # "... byte", and since Python 3.13 "... character in path"
            _end("a path holds a character NUL, which no file's name can", 2)
        if isinstance(error, UnicodeEncodeError):
            _end(f"{error.object!r}: has characters that {error.encoding} lacks; set PYTHONUTF8=1, or a locale of UTF-8", 2)
        if not out_of_memory(error):
            raise
        room = "make room, or take fewer clients, samples or workers"
        _end(f"out of memory; everything completed is saved: {room}; `run --resume` or the same `sweep` goes on", 1)


def _end(line: str, code: int) -> None:
    ERR.print(f"cflpriv: {line}", markup=False)
    sys.exit(code)
