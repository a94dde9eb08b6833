"""A fitted estimator on disk: estimator.json, and a safetensors file for each model. No pickle."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from ..array_files import read_safetensors, reading
from ..errors import InputError
from ..experiments.config.config import Config, load_config
from ..experiments.run.folder import plain_json
from ..experiments.run.pipeline import Pipeline, pipeline_from
from ..files import write_atomically
from ..protocols.bounded_files import LARGEST_TABLE_BYTES, parse_json, read_bytes
from ..types import Array

__all__ = ["SavedClient", "read_estimator", "write_estimator"]

VERSION = 1
FACTS, CONFIG = "estimator.json", "config.toml"
KINDS = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64, "U": np.str_}
"""Kinds of arrays that estimator.json holds, by numpy's letter."""


@dataclass(frozen=True, eq=False)
class SavedClient:
    """The model that a client uses: `whose` says whose it is, `pipeline` what turns rows into its input, `state` its parameters."""

    whose: str
    pipeline: Pipeline
    state: Mapping[str, torch.Tensor]


def write_estimator(folder: Path, config: Config, facts: Mapping[str, Any], clients: Mapping[str, SavedClient]) -> None:
    """Write a new folder. Raises `InputError` if it cannot be made, or exists with something in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"{folder}: is not empty; choose another folder")
        whose = list(dict.fromkeys(client.whose for client in clients.values()))
        for number, name in enumerate(whose):
            state = next(client.state for client in clients.values() if client.whose == name)
            write_atomically(folder / f"model_{number}.safetensors", safetensors.torch.save(dict(state), {"cflpriv": name}))
        write_atomically(folder / CONFIG, config.to_toml())
        tree = {
            "version": VERSION,
            **{name: _written(value) for name, value in facts.items()},
            "models": whose,
            "of_clients": {name: [whose.index(client.whose), client.pipeline.to_json()] for name, client in clients.items()},
        }
        write_atomically(folder / FACTS, json.dumps(plain_json(tree), indent=1) + "\n")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from None


def _written(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = value.dtype.kind if value.dtype.kind in KINDS else "U"
        return {"kind": kind, "values": value.astype(str).tolist() if kind == "U" else value.tolist()}
    return value


def _array(tree: Mapping[str, Any]) -> Array:
    return np.array(tree["values"], KINDS[tree["kind"]])


def _maybe(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else kind(value)


_FACTS: Mapping[str, Callable[[Any], Any]] = {
    "classes": _array, "clients": _array, "labels": _array, "p_value": _maybe(float), "epsilon": _maybe(float), "n_features_in": int,
    "names": lambda names: tuple(map(str, names)), "framed": bool,
    "columns": lambda columns: {what: str(columns[what]) for what in ("client", "label")}, "summary": dict, "run_folder": str,
}  # fmt: skip
"""How the facts of an estimator are read."""


def read_estimator(folder: Path) -> tuple[Config, dict[str, Any], dict[str, SavedClient]]:
    """The configuration, the facts and the models of a folder. Raises `InputError` naming a file that is missing or damaged."""
    path = folder / FACTS
    if not path.is_file():
        raise InputError(f"{folder}: holds no saved estimator (no {FACTS})")
    config = load_config(folder / CONFIG, trust=False)
    with reading(path, "estimator"):
        tree = dict(parse_json(read_bytes(path, LARGEST_TABLE_BYTES)))
        if tree.pop("version", None) != VERSION:
            raise InputError(f"{path}: is of another version of cflpriv")
        names = [str(name) for name in tree.pop("models")]
        of_clients = dict(tree.pop("of_clients"))
        facts = {name: read(tree[name]) for name, read in _FACTS.items()}
        count = len(facts["clients"])
        if facts["labels"].shape != (count,) or not set(facts["labels"].tolist()) <= set(range(count)) or len(of_clients) != count:
            raise InputError(f"{path}: has {len(facts['labels'])} labels and {len(of_clients)} models for {count} clients")
        states = [
            {key: torch.from_numpy(values) for key, values in read_safetensors(folder / f"model_{number}.safetensors").items()}
            for number in range(len(names))
        ]
        if any(number not in range(len(names)) for number, _ in of_clients.values()):
            raise InputError(f"{path}: names a model that is not one of its {len(names)}")
        clients = {
            str(name): SavedClient(names[number], pipeline_from(path, text), states[number]) for name, (number, text) in of_clients.items()
        }
    return config, facts, clients
