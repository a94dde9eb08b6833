"""The command that applies a trained model to new rows of a table: `predict`."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from ..streams import print_file
from .shared import ERR, DataDir, Plugins, Trust, load_plugins, note_idle_code, print_line

__all__ = ["predict"]


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL")],
    rows: Annotated[Path, typer.Argument(metavar="ROWS")],
    out: Annotated[Path | None, typer.Option("--out", help="The CSV file to write; default: standard output.", metavar="FILE")] = None,
    own: Annotated[
        Path | None,
        typer.Option("--own", help="A table of the client's own rows, where a model standardises by these.", metavar="TABLE"),
    ] = None,
    cluster: Annotated[int | None, typer.Option("--model", help="Of a run folder, the cluster whose model it is.", metavar="K")] = None,
    client: Annotated[int | None, typer.Option("--client", help="Of a run folder, a client, for its own model.", metavar="N")] = None,
    plugin: Plugins = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Predict the classes, or numbers, of new rows: a CSV of row number, class and its probability, or of row number and number.

    MODEL is a run folder on a table, or a file that `cflpriv export` wrote of one; ROWS is a table with the same columns (the label may be
    missing). Rows that name a client of the run folder are predicted by the model that the client uses.
    """
    from ..experiments.run.export import client_column, exported_model, table_pipeline
    from ..experiments.run.pipeline import predict as predicted
    from ..experiments.run.pipeline import read_model, read_rows
    from ..files import write_atomically

    load_plugins(plugin)
    table = read_rows(rows)
    if not model.is_dir():
        if cluster is not None or client is not None:
            raise InputError(f"--model, --client: choose a model of a run folder; {model} holds one model")
        predictions = predicted(*read_model(model), table, own)
    else:
        note_idle_code(model / "config.toml", trust)
        column = client_column(model) if cluster is None and client is None and own is None else ""
        if column and column in table.columns:
            predictions = _by_client(model, table, column, data_dir, trust)
        else:
            exported = exported_model(model, data_dir, cluster=cluster, client=client, trust=trust, own=own is not None)
            warn_of_untrained(model, [exported.name])
            predictions = predicted(table_pipeline(exported, model), exported.state, table, own)
    if predictions.clipped:
        ERR.print(
            f"cflpriv: warning: {rows}: {predictions.clipped} values are outside the ranges of the model's training, and were clipped",
            markup=False,
        )
    if out is None:
        print_file(predictions.to_csv())
        return
    try:
        write_atomically(out, predictions.to_csv())
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error.strerror})") from None
    print_line(f"written: {out}, {len(predictions.rows)} predictions")


def _by_client(folder: Path, table: Any, column: str, data_dir: Path | None, trust: bool) -> Any:
    """Predictions of rows, each by the model that the client uses which it names."""
    from ..experiments.run.export import models_of_clients, table_pipeline
    from ..experiments.run.pipeline import joined
    from ..experiments.run.pipeline import predict as predicted

    clients = table.names("client_column", column)
    models = models_of_clients(folder, dict.fromkeys(clients), data_dir, trust=trust)
    warn_of_untrained(folder, {exported.name for exported in models.values()})
    parts = []
    for name, exported in models.items():
        rows = [row for row, client in enumerate(clients) if client == name]
        parts.append(predicted(table_pipeline(exported, folder), exported.state, table.only(rows)))
    return joined(parts)


def warn_of_untrained(folder: Path, names: Collection[str]) -> None:
    """Print what the run in `folder` recorded of the clusters among `names` that its last rounds did not train.

    Raises `InputError` for a summary that is damaged.
    """
    from ..protocols.bounded_files import parse_json, read_text

    file = folder / "summary.json"
    try:
        lines = parse_json(read_text(file))["warnings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    for line in lines:
        if line.partition(" (")[0] in names:
            ERR.print(f"cflpriv: warning: {folder}: {line}", markup=False)
