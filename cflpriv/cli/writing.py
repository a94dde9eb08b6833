"""Commands that write files out of a run or for a start: `report`, `export`, `init`, `examples`."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from ..streams import print_file
from .shared import ERR, OUT, DataDir, Plugins, Trust, load_plugins, note_idle_code, print_line

__all__ = ["examples", "export", "init", "report"]


def report(folder: Annotated[Path, typer.Argument(metavar="DIR")], plugin: Plugins = None) -> None:
    """Make one self-contained report.html, and results.csv beside it for runs.

    DIR is a run folder, a folder of run folders, or a folder of another system's updates that was audited.
    """
    from ..experiments.report.report import write_report

    load_plugins(plugin)
    OUT.print(f"report: {write_report(folder)}", markup=False)


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    out: Annotated[Path, typer.Option("--out", help="The file to write; it ends in .safetensors or .pt.", metavar="FILE")],
    model: Annotated[int | None, typer.Option("--model", help="The cluster whose model it is, from 0.", metavar="K")] = None,
    client: Annotated[int | None, typer.Option("--client", help="A client, for its last locally trained model.", metavar="N")] = None,
    plugin: Plugins = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Write a model of a run as a state_dict, which a module of your own can load.

    RUN_DIR is a run folder. Of a run on a table a .safetensors file also has columns, schema, standardisation and classes, for
    `cflpriv predict`.
    """
    from ..experiments.run.export import export_model

    load_plugins(plugin)
    note_idle_code(run_dir / "config.toml", trust)
    exported = export_model(run_dir, out, data_dir, cluster=model, client=client, trust=trust)
    print_line(f"written: {out}, {exported.line}")


def init(
    file: Annotated[Path | None, typer.Argument(help="The file to write; default: standard output.", metavar="[FILE]")] = None,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", help="The algorithm; `cflpriv list` names them; default: pacfl, with --data crossfit.", metavar="NAME"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A table, for which a typed schema of its columns is written.", metavar="TABLE")
    ] = None,
    label: Annotated[
        str, typer.Option("--label", help="With --data, the column of the label; default: by its name, else the last.", metavar="COLUMN")
    ] = "",
    client: Annotated[
        str,
        typer.Option("--client", help="With --data, the column of the client; default: by name or values, else none.", metavar="COLUMN"),
    ] = "",
    schema: Annotated[bool, typer.Option("--schema", help="Write the JSON schema of configurations instead, for editors.")] = False,
    plugin: Plugins = None,
) -> None:
    """Write a commented configuration that runs, or one for a table of your own.

    With --data it holds the schema by which columns become features: ranges, categories and dates from the table, which are public from
    then on. Check and edit it.
    """
    from ..experiments.config.config_starter import begin_file

    load_plugins(plugin)
    if data is None and (label or client):
        raise InputError("--label, --client: name columns of a table; give --data TABLE, too")
    if data is not None:
        if schema:
            raise InputError("--schema, --data: give one of them")
        _init_table(file, data, algorithm or "crossfit", label, client)
        return
    if schema and algorithm is not None:
        raise InputError(f"--algorithm {algorithm}: the schema of --schema holds for all algorithms; leave it out")
    text = begin_file(file, None if schema else algorithm or "pacfl")
    if file is None:
        print_file(text)
    else:
        print_line(f"written: {file}")


def _init_table(file: Path | None, data: Path, algorithm: str, label: str, client: str) -> None:
    """Write the configuration of a table; what was guessed goes to standard error if the file goes to standard output."""
    from ..experiments.config.config_starter import write_new
    from ..experiments.config.table_starter import table_starter

    starter = table_starter(data, file, algorithm, label, client)
    write_new(file, starter.text)
    if file is None:
        print_file(starter.text)
    for line in starter.lines:
        (ERR if file is None else OUT).print(line, markup=False)
    if file is not None:
        print_line(f"written: {file}; next: cflpriv run {file}")


def examples(folder: Annotated[Path, typer.Argument(help="The folder to make.", metavar="[DIR]")] = Path("examples")) -> None:
    """Write the examples, configurations and scripts, into a new folder."""
    from ..files import copy_examples

    try:
        print_line(f"written: {copy_examples(folder)} files in {folder}")
    except FileExistsError:
        raise InputError(f"{folder}: exists; name a new folder") from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from None
