"""All that leads from a row of a table to a class: columns, schema, standardisation, model and names of classes; and predictions."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...array_files import read_safetensors, read_safetensors_texts, reading
from ...data.column_guesses import source_of
from ...data.columns import Column, feature_names
from ...data.number_labels import from_unit
from ...data.raw_tables import TABLES, RawTable, read_table
from ...data.scaling import Scaling
from ...data.tables import features_of
from ...engine.models import Model
from ...errors import InputError
from ...keys import check_ranges
from ...protocols.bounded_files import parse_json
from ...types import Array, Population
from ..config.config import Config

__all__ = ["Pipeline", "Predictions", "joined", "pipeline_from", "pipeline_of", "predict", "read_model", "read_rows"]

VERSION = 2


@dataclass(frozen=True, eq=False)
class Pipeline:
    """What turns rows of a table into the input of `model`, and its outputs into classes.

    `columns` are the columns of features, in their order, or without names `schema` has them. `others` are columns that rows may have, too:
    label, client and group. `mean` and `std` (d,) are a client's own, for the features that are standardised so; without them rows of the
    client must be there.
    """

    model: Model
    classes: tuple[str, ...]
    columns: tuple[str, ...]
    schema: tuple[Column, ...]
    others: tuple[str, ...]
    scaling: Scaling
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    label_range: tuple[float, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, in the order of the model's input."""
        return tuple(name for column in self.schema for name in feature_names(column)) if self.schema else self.columns

    def to_json(self) -> str:
        """The pipeline without the parameters of its model, as a file of the model has it."""
        model = {key: value for key, value in asdict(replace(self.model, factory=None)).items() if key != "factory"}
        tree = {
            "version": VERSION, "model": model, "classes": self.classes, "features": self.features, "columns": self.columns,
            "schema": [asdict(column) for column in self.schema], "others": self.others, "scaling": asdict(self.scaling),
            "mean": self.mean, "std": self.std, "label_range": self.label_range,
        }  # fmt: skip
        return json.dumps(tree, allow_nan=False)


@dataclass(frozen=True, eq=False)
class Predictions:
    """For each row its number in the file, the class and its probability, or the number.

    `clipped` values were outside the public ranges. `shares` (rows, classes) are the probabilities of all classes, in their order.
    """

    rows: tuple[int, ...]
    classes: tuple[str, ...]
    probabilities: Array
    clipped: int
    numbers: Array | None = None
    shares: Array = field(default_factory=lambda: np.empty((0, 0)))

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self.numbers is not None:
            writer.writerow(("row", "prediction"))
            writer.writerows((row, f"{number:.6g}") for row, number in zip(self.rows, self.numbers, strict=True))
            return text.getvalue()
        writer.writerow(("row", "prediction", "probability_of_prediction"))
        writer.writerows((row, name, f"{share:.4f}") for row, name, share in zip(self.rows, self.classes, self.probabilities, strict=True))
        return text.getvalue()


def pipeline_of(config: Config, population: Population, client: int | None) -> Pipeline | None:
    """The pipeline of a run on a table, with the own mean and deviation of `client`, if one is named; None for other data.

    Reveals: the statistics of one client, in the export of that client's model.
    """
    data, scaling = config.data, config.data.scaling
    if data.source not in TABLES or scaling is None:
        return None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if scaling.per_client and client is not None:
        mean, std = (tuple(map(float, values.ravel())) for values in population.moments[client])
    purposes = (data.label_column, data.client_column, data.group_column, data.time_column)
    others = tuple(name for name in purposes if name and name not in {column.name for column in data.columns})
    columns = () if data.columns else population.feature_columns
    return Pipeline(
        config.model_for(population), population.class_names, columns, data.columns, others, scaling, mean, std, population.label_range
    )


def read_model(path: Path) -> tuple[Pipeline, dict[str, torch.Tensor]]:
    """The pipeline and the parameters of an exported file. Raises `InputError` naming it."""
    if path.suffix != ".safetensors":
        raise InputError(f"{path}: expected a run folder, or a file that ends in .safetensors, which alone holds the pipeline")
    state = {name: torch.from_numpy(values) for name, values in read_safetensors(path).items()}
    text = read_safetensors_texts(path).get("pipeline")
    if text is None:
        raise InputError(f"{path}: has no pipeline: it was not exported from a run on a table, or by an earlier version")
    return pipeline_from(path, text), state


def pipeline_from(path: Path, text: str) -> Pipeline:
    """The pipeline that `Pipeline.to_json` wrote. Raises `InputError` naming the file."""
    with reading(path, "model"):
        return _parsed(path, text)


def _parsed(path: Path, text: str) -> Pipeline:
    def tuples(value: Any) -> Any:
        return tuple(tuples(item) for item in value) if isinstance(value, list) else value

    tree = {key: tuples(value) for key, value in parse_json(text).items()}
    if tree.pop("version", None) != VERSION:
        raise InputError(f"{path}: its pipeline is of another version of cflpriv")
    names = tree.pop("features")
    model = {key: tuples(value) for key, value in tree.pop("model").items()}
    check_ranges(Model, model, "model")
    columns = tuple(Column(**{key: tuples(value) for key, value in column.items()}) for column in tree.pop("schema"))
    scaling = Scaling(**{key: tuples(value) for key, value in tree.pop("scaling").items()})
    pipeline = Pipeline(model=Model(**model), schema=columns, scaling=scaling, **tree)
    pipeline.model.layout  # noqa: B018 - refuses a model that is not known
    if pipeline.features != names or pipeline.model.shape != (1, 1, len(names)):
        raise InputError(f"{path}: its pipeline has {len(names)} features, its schema {len(pipeline.features)}")
    return pipeline


def joined(parts: Sequence[Predictions]) -> Predictions:
    """The predictions of several parts of a table, in the order of its rows."""
    rows = np.concatenate([np.array(part.rows, np.int64) for part in parts])
    order = np.argsort(rows, kind="stable")
    classes = [name for part in parts for name in part.classes]
    probabilities = np.concatenate([part.probabilities for part in parts])[order] if classes else np.empty(0)
    clipped, kept = sum(part.clipped for part in parts), [part.numbers for part in parts if part.numbers is not None]
    if kept:
        return Predictions(tuple(map(int, rows[order])), (), np.empty(0), clipped, np.concatenate(kept)[order])
    shares = np.concatenate([part.shares for part in parts])[order] if classes else np.empty((0, 0))
    return Predictions(tuple(map(int, rows[order])), tuple(classes[at] for at in order), probabilities, clipped, shares=shares)


def predict(pipeline: Pipeline, state: Mapping[str, torch.Tensor], table: RawTable, own: Path | RawTable | None = None) -> Predictions:
    """The classes, or numbers, of the rows of a table, by the pipeline and the parameters of a model.

    Args:
        own: a table of the client's own rows, or its file. Their mean and deviation standardise features, where the model needs them.

    Raises `InputError` naming the file and the column or cell that does not fit.
    """
    x, clipped = _features(pipeline, table)
    z = _scaled(pipeline, x, own)
    low, high = pipeline.scaling.low, pipeline.scaling.high
    clipped += int(((z < low) | (z > high)).sum())
    unit = ((np.clip(z, low, high) - low) / (high - low)).astype(np.float32)
    module = pipeline.model.lent(np.zeros(pipeline.model.dimension, pipeline.model.dtype))
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        raise InputError(f"model {pipeline.model.name!r}: the file has other parameters ({' '.join(str(error).split())})") from None
    with torch.no_grad():
        made = module(pipeline.model.inputs(unit)).double()
    if pipeline.label_range:
        numbers = from_unit(made[:, 0].cpu().numpy(), pipeline.label_range)
        return Predictions(tuple(table.numbers_of_rows), (), np.empty(0), clipped, numbers)
    shares = torch.softmax(made, 1).cpu().numpy()
    best = shares.argmax(1)
    names = [pipeline.classes[number] if pipeline.classes else str(number) for number in best]
    return Predictions(tuple(table.numbers_of_rows), tuple(names), shares[np.arange(len(best)), best], clipped, shares=shares)


def read_rows(path: Path) -> RawTable:
    """A table by the name of its file. Raises `InputError` naming it."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    return read_table(source_of(path), path)


OWN_ROWS = (
    "--own: the model takes features that each client standardises by its own training rows; give a table of the client's rows, "
    "export the model of a client (--client), or train with public ranges (data.columns)"
)
"""The error where a model has no mean and deviation of the client."""


def _features(pipeline: Pipeline, table: RawTable) -> tuple[Array, int]:
    """Features (n, 1, 1, d) of a table, and how many values were clipped."""
    if pipeline.schema:
        x, clipped = features_of(table, pipeline.schema, pipeline.others)
        return x[:, None, None, :], clipped
    for name in table.columns:
        if name not in pipeline.columns and name not in pipeline.others:
            raise InputError(f"{table.path}: column {name!r} is no feature of the model, which has {_listed(pipeline.columns)}; remove it")
    for name in pipeline.columns:
        table.column("a feature of the model", name)
    x = np.stack([table.numbers(name) for name in pipeline.columns], axis=1)
    return x[:, None, None, :], 0


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")


def _scaled(pipeline: Pipeline, x: Array, own: Path | RawTable | None) -> Array:
    """Standardised features, by public constants, the client's own statistics in the file of the model, or those of its rows."""
    scaling = pipeline.scaling
    if own is not None and (pipeline.mean or not scaling.per_client):
        raise InputError(
            f"--own {own.path if isinstance(own, RawTable) else own}: the model has all means and deviations that it needs; leave it out"
        )
    if not scaling.per_client:
        return scaling.standardised(x, x)
    if pipeline.mean:
        return scaling.by_moments(x, np.array(pipeline.mean), np.array(pipeline.std))
    if own is None:
        raise InputError(OWN_ROWS)
    return scaling.standardised(x, _features(pipeline, own if isinstance(own, RawTable) else read_rows(own))[0])
