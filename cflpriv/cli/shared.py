"""What commands share: consoles, options that several take, and names of folders."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import InputError

__all__ = [
    "ERR", "OUT", "DataDir", "DeviceName", "Plugins", "Trust", "load_plugins", "name_of", "naming", "note_idle_code", "print_line",
]  # fmt: skip

OUT = Console(soft_wrap=True, highlight=False)
ERR = Console(stderr=True, soft_wrap=True, highlight=False)

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The folder of data sets; default CFLPRIV_DATA, else data/.")]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or auto, in place of run.device. It may be another than a recorded run's.")
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", help="A Python file that registers algorithms, models, attacks or data sets. May be repeated.", metavar="FILE"
    ),
]


def load_plugins(files: list[Path] | None) -> None:
    """Load the files of `--plugin`."""
    from ..plugins import load_plugin

    for file in files or []:
        load_plugin(file)


Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the code that a run folder names, if its files are as the run left them. Default: run none of it."),
]


def note_idle_code(path: Path, trust: bool) -> None:
    """Print which code of the configuration of a run will not run, and how to allow it."""
    from ..experiments.config.config import read_tree
    from ..experiments.trust import idle_code

    if not trust and path.is_file() and (line := idle_code(path, read_tree(path))):
        print_line(line)


def name_of(config: Path) -> str:
    """The name of a run whose configuration this is."""
    return "stdin" if str(config) == "-" else config.stem


@contextmanager
def naming(config: Path) -> Iterator[None]:
    """Name the configuration file in what is found wrong after it was read, such as with its data."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{config}: {error}") from None


def print_line(line: str) -> None:
    OUT.print(line, markup=False)
