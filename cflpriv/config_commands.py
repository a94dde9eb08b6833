"""The commands `init` and `explain`: a configuration to start from, and what a key means."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .errors import InputError

__all__ = ["explain", "init"]

Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", help="A Python file whose algorithms and names are to be known. May be repeated.", metavar="FILE"),
]


def init(
    file: Annotated[Path | None, typer.Argument(help="The file to write; default: standard output.", metavar="[FILE]")] = None,
    algorithm: Annotated[str, typer.Option("--algorithm", help="The algorithm; `cflpriv list` names them.", metavar="NAME")] = "pacfl",
    schema: Annotated[bool, typer.Option("--schema", help="Write the JSON schema of configurations instead, for editors.")] = False,
    plugin: Plugins = None,
) -> None:
    """Write a commented configuration that runs."""
    from .experiments.config_starter import schema as schema_of
    from .experiments.config_starter import starter

    _load(plugin)
    text = json.dumps(schema_of(), indent=1, ensure_ascii=False) + "\n" if schema else starter(algorithm)
    if file is None:
        typer.echo(text, nl=False)
        return
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise InputError(f"{file}: exists; choose another name, or remove it") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror})") from None
    typer.echo(f"written: {file}")


def explain(key: Annotated[str, typer.Argument(help="section.key, a key, or a section.", metavar="KEY")], plugin: Plugins = None) -> None:
    """Print what a configuration key means, its type, range and default."""
    from .experiments.config_reference import explained

    _load(plugin)
    typer.echo(explained(key))


def _load(plugins: list[Path] | None) -> None:
    from .plugins import load_plugin

    for file in plugins or []:
        load_plugin(file)
