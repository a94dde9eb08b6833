"""A configuration for a table, with a typed schema of its columns: `cflpriv init --data FILE`."""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...algorithms import ALGORITHMS
from ...data.column_guesses import Guess, guessed, source_of
from ...data.columns import Column, feature_names
from ...data.population import build_population
from ...errors import InputError, near
from .config import parse_config
from .config_reference import made_with_defaults, toml_value

__all__ = ["TABLE_KEYS", "TableStarter", "table_starter"]

_MOST_NAMED = 100
LEAST_CLIENTS = 3
"""Secure sums are not formed over fewer."""
_HEAD = "[protection]                    # the server learns {}, and which clients are alike"
_GRAM = 'gram = ["haar"]'
_PROTECTIONS = (
    (_HEAD.format("sums over clients"), 'sum = "secagg"', _GRAM),
    (_HEAD.format("sums over all clients"), 'sum = "secagg-oblivious"', _GRAM),
    (
        _HEAD.format("sums over clients"),
        'sum = "secagg"',
        _GRAM,
        "relay_updates = true            # clients send each other updates: a server that lies could name an accomplice as the recipient",
    ),
    (_HEAD.format("each update"), 'sum = "none"', _GRAM),
)
"""Protections of a new experiment, the strongest first. It gets the first that its algorithm takes."""
_MERGED = 'small_clusters = "merge"        # a cluster of fewer clients than a secure sum takes joins the nearest'
_RECORD = (
    "[run]",
    'record = "full"                 # keeps what is sent, so that `cflpriv audit` can attack it',
)
_KEPT = (
    'run.record = "full": the run folder keeps what clients send and the models, which tell of their data; keep the folder as the data are '
    'kept, or set "headers", which leaves nothing to audit'
)
_PRIVACY = (
    '[privacy]                       # also hide each sample: needs a public range for each number above, no blank = "own",',
    "                                # and no rounds, epochs and lr in [training]: then they follow from epsilon",
    'unit = "sample"',
    "epsilon = 8.0",
    "delta = 1e-5",
    "samples = 100                   # about the samples of a client",
)
_SWEEP = (
    "[sweep]                         # with this section `cflpriv sweep` runs each algorithm with and without the protection above,",
    "                                # attacks each run and draws utility against leakage; `cflpriv run` takes a file without it",
    "seeds = [0, 1]",
    'algorithms = ["{algorithm}", "fedavg"]',
    'protections = ["none", {{ label = "protected" }}]',
    'attacks = ["label_inference"]   # quick; leave it out for all attacks: this one shows nothing where label shares are alike',
)
_TO_USE = '# To use a section below, remove "# " at the beginning of each of its lines.'
TABLE_KEYS: Mapping[str, Any] = {
    "model.name": "mlp", "model.hidden": 32, "training.rounds": 20, "training.epochs": 2, "training.lr": 0.1, "training.weights": "equal",
}  # fmt: skip
"""What a new experiment on a table sets, by section and key; `AlgorithmSpec.begins` adds to it."""


@dataclass(frozen=True)
class TableStarter:
    """The text of a configuration, and what its user should know: what was guessed, and what becomes public."""

    text: str
    lines: tuple[str, ...]


def table_starter(data: Path, file: Path | None, algorithm: str, label: str = "", client: str = "") -> TableStarter:
    """A configuration of a clustered run under secure aggregation on the table `data`, to be written to `file`.

    Raises `InputError` for a table that cannot be read, and for labels that are no classes.
    """
    if ALGORITHMS.find(algorithm) is None:
        raise InputError(f"--algorithm {algorithm}: is not known{near(algorithm, ALGORITHMS.names())}")
    guess = guessed(data, label, client)
    shown, why = _protection(data, algorithm, guess)
    return TableStarter(_text(data, file, algorithm, guess, shown), _lines(data, guess, bool(label), bool(client), why))


def _protection(data: Path, algorithm: str, guess: Guess) -> tuple[tuple[str, ...], str]:
    """The strongest protection that the algorithm takes on this table, and why a stronger one is refused.

    Where the table itself is refused, the strongest: the run names what is wrong. Raises `InputError` for an algorithm that takes none.
    """
    refused: list[InputError] = []
    population = None
    for shown in _PROTECTIONS:
        tree = tomllib.loads(_text(data, None, algorithm, guess, shown))
        tree["data"]["paths"] = [str(data)]
        try:
            config = parse_config(tree)
            population = population or build_population(config.data)
        except InputError:
            return _PROTECTIONS[0], ""
        try:
            config.algorithm_for(population)
        except InputError as error:
            refused.append(error)
        else:
            return shown, str(refused[-1]) if refused and shown is _PROTECTIONS[-1] else ""
    raise refused[-1]


def _lines(data: Path, guess: Guess, label_asked: bool, client_asked: bool, refused: str) -> tuple[str, ...]:
    by = "" if label_asked else ", by its name or place (--label names another)"
    owner = f"client: {guess.client!r}{'' if client_asked else ' (--client names another)'}"
    width = sum(len(feature_names(column)) for column in guess.columns)
    doubts = [f"column {name!r}: {remark}" for name, remark in guess.remarks.items()]
    kind = f"a number from {guess.label_range[0]:g} to {guess.label_range[1]:g}" if guess.label_range else f"{len(guess.classes)} classes"
    return (
        f"label: {guess.label!r}{by}, {kind}; {owner if guess.client else 'no column of clients (--client names it): rows are divided'}; "
        f"{width} features of {len(guess.columns)} columns",
        *doubts,
        f"the ranges, categories, dates and labels were taken from {data} and are public from now on: edit those that must not be",
        *([f"the server sees each update, for {refused}"] if refused else []),
        *([] if _has_few(guess) else [_KEPT]),
    )


def _text(data: Path, file: Path | None, algorithm: str, guess: Guess, shown: tuple[str, ...]) -> str:
    lines = [
        f"# A clustered, private run on {data.name}. `cflpriv run` runs it, `cflpriv explain KEY` says more of a key.",
        "# The schema, [[data.columns]], is public: ranges, categories and dates below were taken from the table, so check and edit them.",
        "",
        "[data]",
        f"source = {_value(source_of(data))}",
        f"paths = [{_value(_path(data, file))}]",
        f"label_column = {_value(guess.label)}",
    ]
    if guess.label_range:
        lines += ['label_type = "number"            # a regression', f"label_range = {_value(guess.label_range)}"]
    elif len(guess.classes) <= _MOST_NAMED:
        lines.append(f"class_names = {_value(guess.classes)}")
    if guess.client:
        lines += ['partition = "given"', f"client_column = {_value(guess.client)}"]
    else:
        lines += ['partition = "iid"', "clients = 8                     # rows are divided among them at random"]
    lines += ["test_share = 0.2                # of each client's rows", ""]
    for column in guess.columns:
        lines += [*_column(column, guess.remarks.get(column.name, "")), ""]
    values = {**TABLE_KEYS, **ALGORITHMS[algorithm].begins}
    for section in ("model", "training", "algorithm"):
        keys = {path.partition(".")[2]: value for path, value in values.items() if path.startswith(f"{section}.")}
        keys = {"name": algorithm, **keys} if section == "algorithm" else keys
        lines += [*([""] if section != "model" else []), f"[{section}]", *(f"{key} = {_value(value)}" for key, value in keys.items())]
    merges = "gram" in made_with_defaults(ALGORITHMS[algorithm]).operations
    protection = (*shown, _MERGED) if merges else shown
    secure = [("", *protection), ("", *_RECORD)]
    commented = [_PRIVACY] if _has_few(guess) else [_PRIVACY, tuple(line.format(algorithm=algorithm) for line in _SWEEP)]
    if _has_few(guess):
        secure, commented = [], [protection, _RECORD, *commented]
    lines += [line for part in secure for line in part] + ["", _TO_USE]
    lines += [line for part in commented for line in ("", *(f"# {line}" for line in part))]
    return "\n".join(lines) + "\n"


def _has_few(guess: Guess) -> bool:
    """Whether there are too few clients for secure sums, so that protection, and the record that audits read, are left out."""
    return bool(guess.client) and guess.clients < LEAST_CLIENTS


def _path(data: Path, file: Path | None) -> str:
    """The table's path as the configuration names it: relative to the configuration's folder."""
    return os.path.relpath(data.resolve(), (Path() if file is None else file.parent).resolve())


def _column(column: Column, remark: str) -> list[str]:
    shown: dict[str, Any] = {
        field.name: getattr(column, field.name)
        for field in fields(Column)
        if field.name in ("name", "type") or getattr(column, field.name) != getattr(Column, field.name)
    }
    if column.type == "text":
        shown["features"] = column.features
    if column.type == "category":
        shown["other"] = column.other
    lines = ["[[data.columns]]", *(f"{key} = {_value(value)}" for key, value in shown.items())]
    return [*([f"# {' '.join(remark.split())}"] if remark else []), *lines]


def _value(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, str):  # names may hold any character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, tuple) else toml_value(value)
