"""Folders of another system's updates: written from a user's loop, read and audited by `cflpriv audit --foreign FOLDER`.

`docs/howto/audit_other_systems.md` describes the files. Arrays are safetensors and npz files; nothing in a folder is run or unpickled. A
module comes from the suite or from the user's own `--plugin FILE`, by the name `model` in foreign.toml. Without one only labels are
attempted.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ...array_files import read_npz, read_safetensors
from ...engine.models import MODELS, Model
from ...errors import InputError
from ...experiments.report.foreign_report import FOREIGN as TOML
from ...files import toml_text, write_arrays, write_atomically, write_packed
from ...protocols.bounded_files import read_toml
from ...types import Array
from ..figures.leakage import Cell
from .foreign_audit import outputs_of, write_audit
from .foreign_states import ForeignModel, named_arrays, read_samples
from .foreign_system import LoopSettings, Update, check_same_samples, system_of, whole, written_settings

__all__ = ["audit_folder", "save_updates"]

FORMAT = 1
TRAINING = tuple(field.name for field in fields(LoopSettings))
KEYS = ("format", "classes", "shape", "model", "hidden", "head", "mean", "std", "seed", "iterations", *TRAINING, "clients")
CLIENT_KEYS = ("samples", "labels", *TRAINING)
STATE = re.compile(r"client-(\d+)\.(before|after)\.safetensors")
ROUND = re.compile(r"round-(\d+)")
GLOBAL = "global.safetensors"


# --- writing ------------------------------------------------------------------------------------------------------------------------


def save_updates(
    folder: str | Path, updates: Sequence[Update], classes: int, shape: Sequence[int], *, auxiliary: tuple[Any, Any] | None = None,
    settings: LoopSettings | None = None, module: nn.Module | None = None, model: str | None = None, head: str | None = None,
) -> Path:  # fmt: skip
    """Write a folder that `cflpriv audit --foreign` reads, and return its path. The updates of one client are in the order of rounds.

    `module` gives the names of arrays where states are lists. `model` is the name under which a plugin registers the module. A state that
    all clients of a round were sent is written once. Raises `InputError` for states and samples that cannot be read and for a folder that
    has updates, and OSError.
    """
    folder, usual = Path(folder), settings or LoopSettings()
    if left := next((path for name in (TOML, "round-*", "truth") for path in folder.glob(name)), None):
        raise InputError(f"{folder}: has updates already ({left.name}), which would be audited with these; name another folder")
    tree: dict[str, Any] = {"format": FORMAT, "classes": int(classes), "shape": [int(length) for length in shape]}
    tree |= {name: value for name, value in (("model", model), ("head", head)) if value is not None} | written_settings(usual)
    names = None if module is None else ForeignModel(module, tuple(shape), classes)
    rounds: dict[int, dict[int, tuple[dict[str, Array], dict[str, Array]]]] = {}
    numbers: dict[int, int] = {}
    clients: dict[str, dict[str, Any]] = {}
    seen: dict[int, tuple[Any, Any]] = {}
    for place, update in enumerate(updates):
        client = place if update.client is None else whole(update.client, 0, "client")
        numbers[client] = numbers.get(client, 0) + 1
        both = ((update.before, "before"), (update.after, "after"))
        states = [named_arrays(state, names, f"client {client}, {when}") for state, when in both]
        rounds.setdefault(numbers[client], {})[client] = (states[0], states[1])
        counts = (("samples", update.samples), ("labels", update.labels))
        known = {name: whole(count, 1, f"client {client}: {name}") for name, count in counts if count is not None}
        clients.setdefault(str(client), {}).update(known | (written_settings(update.settings) if update.settings else {}))
        if update.x is not None:
            pair = seen.setdefault(client, (update.x, update.y))
            check_same_samples(pair, (update.x, update.y), f"client {client}")
        if update.x is not None and numbers[client] == 1:
            pairs = {"": (update.x, update.y)} | ({} if update.outside is None else {"_outside": update.outside})
            truth: dict[str, Array] = {}
            for ending, pair in pairs.items():
                x, y = read_samples(pair, f"client {client}{ending.replace('_', ', ')}", tuple(tree["shape"]), classes)
                truth |= {f"x{ending}": x, f"y{ending}": y}
            _save(folder / "truth" / f"client-{client}.npz", truth)
    for number, states_of_round in rounds.items():
        inside = folder / f"round-{number:04d}"
        inside.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = [state for state, _ in states_of_round.values()]
        together = len(states_of_round) > 1 and all(_same(before[0], state) for state in before)
        if together:
            write_arrays(inside / GLOBAL, before[0])
        for client, (first, last) in states_of_round.items():
            if not together:
                write_arrays(inside / f"client-{client}.before.safetensors", first)
            write_arrays(inside / f"client-{client}.after.safetensors", last)
    if auxiliary is not None:
        x, y = read_samples(auxiliary, "auxiliary", tuple(tree["shape"]), classes)
        _save(folder / "auxiliary.npz", {"x": x, "y": y})
    tree["clients"] = {client: known for client, known in clients.items() if known}
    write_atomically(folder / TOML, toml_text(tree))
    return folder


def _same(states: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return states.keys() == other.keys() and all(np.array_equal(states[name], other[name]) for name in states)


def _save(path: Path, arrays: Mapping[str, Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_packed(path, arrays)


# --- reading ------------------------------------------------------------------------------------------------------------------------


def audit_folder(
    folder: str | Path, *, attacks: Sequence[str] | None = None, report: Callable[[str], None] = lambda line: None
) -> list[Cell]:  # fmt: skip
    """Run the attacks on a folder of updates; writes audit.json, and audit/ with what was recovered, into it.

    Raises `InputError` naming file, key and value.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    tree = _settings(folder / TOML)
    settings, module = _training(tree, folder / TOML), _module(tree, folder / TOML)
    updates, auxiliary = _updates(folder, tree, settings), _samples(folder / "auxiliary.npz", tree)
    if module is not None and auxiliary is None:
        raise InputError(f"{folder / 'auxiliary.npz'}: is missing; model = {tree['model']!r} needs samples that no client trained on")
    try:
        system = system_of(
            module, updates, auxiliary, settings, classes=tree["classes"], shape=tuple(tree["shape"]), head=tree.get("head"),
            seed=tree.get("seed", 0), iterations=tree.get("iterations", 200),
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    which = tree.get("model", "none, so that only labels are attempted")
    report(f"{len(updates)} update(s) of {len(system.records)} client(s); model: {which}")
    return write_audit(folder, system, *outputs_of(system, attacks), which)


def _settings(path: Path) -> dict[str, Any]:
    """foreign.toml, checked key by key."""
    try:
        tree = read_toml(path)
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; docs/howto/audit_other_systems.md describes the folder") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: is not TOML ({error})") from None
    for key in tree:
        if key not in KEYS:
            raise InputError(f"{path}: {key} = {tree[key]!r}: is not a key here; known are {', '.join(KEYS)}")
    for key in ("format", "classes", "shape"):
        if key not in tree:
            raise InputError(f"{path}: {key} is missing")
    _require(tree["format"] == FORMAT, path, "format", tree["format"], f"expected {FORMAT}")
    for key, least in (("classes", 2), ("hidden", 1), ("seed", 0), ("iterations", 1)):
        _require(_whole(tree.get(key, least), least), path, key, tree.get(key), f"expected an integer of {least} or more")
    is_shape = isinstance(tree["shape"], list) and tree["shape"] and all(_whole(length, 1) for length in tree["shape"])
    _require(bool(is_shape), path, "shape", tree["shape"], "expected a list of sizes")
    for key in ("model", "head"):
        _require(isinstance(tree.get(key, ""), str), path, key, tree.get(key), "expected a name")
    for key in ("mean", "std"):
        values = tree.get(key, [1.0])
        is_list = isinstance(values, list) and all(isinstance(number, int | float) and not isinstance(number, bool) for number in values)
        fits = is_list and len(values) in (1, tree["shape"][0]) and (key == "mean" or min(values) > 0)
        _require(fits, path, key, values, "expected a list of one number, or of one a channel, std above 0")
    people = tree.setdefault("clients", {})
    _require(isinstance(people, dict), path, "clients", people, "write sections [clients.0], [clients.1]")
    for client, known in people.items():
        where = f"clients.{client}"
        _require(client.isdecimal() and isinstance(known, dict), path, where, known, "expected a section [clients.NUMBER]")
        for key, value in known.items():
            _require(key in CLIENT_KEYS, path, f"{where}.{key}", value, f"is not a key here; known are {', '.join(CLIENT_KEYS)}")
            if key in ("samples", "labels"):
                _require(_whole(value, 1), path, f"{where}.{key}", value, "expected an integer of 1 or more")
    return tree


def _require(holds: bool, path: Path, key: str, value: object, words: str) -> None:
    if not holds:
        raise InputError(f"{path}: {key} = {value!r}: {words}")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _training(tree: Mapping[str, Any], path: Path, usual: LoopSettings | None = None, where: str = "") -> LoopSettings:
    try:
        return replace(usual or LoopSettings(), **{name: tree[name] for name in TRAINING if name in tree})
    except InputError as error:
        raise InputError(f"{path}: {where}{error}") from None


def _module(tree: Mapping[str, Any], path: Path) -> nn.Module | None:
    """The module that foreign.toml names, with whatever values; None if it names none."""
    name = tree.get("model")
    if name is None:
        return None
    model = MODELS.find(name)
    if model is None:
        known = ", ".join(MODELS.names())
        raise InputError(f"{path}: model = {name!r}: is not known; known are {known}; --plugin FILE registers one of your own")
    try:
        return model[0](Model(name, tuple(tree["shape"]), tree["classes"], tree.get("hidden", 200)))
    except Exception as error:
        raise InputError(f"{path}: model = {name!r}: cannot be built ({type(error).__name__}: {error})") from None


def _updates(folder: Path, tree: Mapping[str, Any], settings: LoopSettings) -> list[Update]:
    """The updates in the order of rounds, with what is known of their clients."""
    updates: list[Update] = []
    truth: dict[int, dict[str, Any]] = {}
    for inside in _rounds(folder):
        files: dict[int, dict[str, Path]] = {}
        for path in sorted(inside.glob("*.safetensors")):
            if path.name == GLOBAL:
                continue
            match = STATE.fullmatch(path.name)
            if match is None:
                raise InputError(f"{path}: is not called {GLOBAL} or client-NUMBER.before.safetensors or client-NUMBER.after.safetensors")
            files.setdefault(int(match[1]), {})[match[2]] = path
        common = read_safetensors(inside / GLOBAL) if (inside / GLOBAL).is_file() else None
        for client, pair in sorted(files.items()):
            if "after" not in pair:
                raise InputError(f"{inside / f'client-{client}.after.safetensors'}: is missing")
            if "before" not in pair and common is None:
                raise InputError(f"{pair['after']}: has no state before beside it (client-{client}.before.safetensors, or {GLOBAL})")
            known = tree["clients"].get(str(client), {})
            own = _training(known, folder / TOML, settings, f"clients.{client}.") if set(known) & set(TRAINING) else None
            if client not in truth:
                truth[client] = _truth(folder / "truth" / f"client-{client}.npz", tree)
            before = read_safetensors(pair["before"]) if "before" in pair else common
            counts = {name: known.get(name) for name in ("samples", "labels")}
            updates.append(Update(before, read_safetensors(pair["after"]), client=client, settings=own, **counts, **truth[client]))
    if not updates:
        raise InputError(f"{folder}: has no update (round-0001/client-0.after.safetensors)")
    return updates


def _rounds(folder: Path) -> list[Path]:
    """The folders of rounds in the order of their numbers."""
    folders: dict[int, Path] = {}
    for path in sorted(path for path in folder.glob("round-*") if path.is_dir()):
        match = ROUND.fullmatch(path.name)
        if match is None:
            raise InputError(f"{path}: is not called round-NUMBER")
        if (same := folders.setdefault(int(match[1]), path)) != path:
            raise InputError(f"{path}: is the same round as {same.name}")
    return [folders[number] for number in sorted(folders)]


def _truth(path: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """A client's samples, and samples like them that nobody trained on, as far as there are any."""
    samples, outside = _samples(path, tree), _samples(path, tree, "_outside")
    return ({} if samples is None else {"x": samples[0], "y": samples[1]}) | ({} if outside is None else {"outside": outside})


def _samples(path: Path, tree: Mapping[str, Any], ending: str = "") -> tuple[Array, Array] | None:
    """Samples as the model takes them, and labels, of an npz file; None where there are none."""
    if not path.is_file():
        return None
    names = f"x{ending}", f"y{ending}"
    arrays = read_npz(path, optional=names)
    if ending and not arrays:
        return None
    for name in names:
        if name not in arrays:
            raise InputError(f"{path}: has no array {name!r}; it has {', '.join(arrays) or 'none'}")
    x, y = (arrays[name] for name in names)
    if x.shape[1:] != tuple(tree["shape"]):
        raise InputError(f"{path}: {names[0]} has samples of shape {x.shape[1:]}, but foreign.toml has shape = {tree['shape']}")
    if x.dtype.kind == "f" and ("mean" in tree or "std" in tree):
        mean, std = (
            np.reshape(np.asarray(tree.get(key, [usual]), x.dtype), (-1, *[1] * (x.ndim - 2)))
            for key, usual in (("mean", 0.0), ("std", 1.0))
        )
        x = (x - mean) / std
    return x, y
