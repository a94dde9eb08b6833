"""From an entry's cell to the settings that it is run with, and to what the paper has published for exactly these."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

from ...errors import InputError
from ..config.config import Config, own_weights, parse_config, set_key
from .entry import Reproduction, ReproductionCell
from .published import Number

__all__ = ["config_of", "published_of", "published_of_trials", "scaled_trials", "trial_settings"]

MEASURED = ("evaluate_every", "target_accuracy")
"""The keys of [run] on which figures depend; the others say who computes, where, and what is kept."""


def config_of(
    entry: Reproduction,
    cell: ReproductionCell,
    seed: int,
    scale: float = 1.0,
    changes: Sequence[str] = (),
    stand_in: Mapping[str, str] | None = None,
) -> tuple[Config, tuple[str, ...]]:
    """The configuration of a run cell, and what `scale` and `stand_in` (data set -> what stands in for it) changed in it, for people.

    Raises `InputError` naming the cell's key and value that do not fit.
    """
    changed = {change.partition("=")[0].strip(): change.partition("=")[2].strip().strip("'\"") for change in changes}
    with_data = entry.with_data.get(changed.get("data.source", ""), {})
    keys = {**entry.base, **with_data, **cell.changes}
    remarks = [
        f"{key} = {value}, as the paper has it for {changed['data.source']}" for key, value in with_data.items() if key not in changed
    ]
    if scale < 1:
        keys |= cell.thin
        for key, floor in entry.shrinks.items():
            if key in keys and key not in changed and (old := keys[key]) != (new := _shrunk(key, old, scale, floor)):
                keys[key] = new
                remarks.append(f"{key} {old} → {new}")
        remarks += [f"{key} at most {value}" for key, value in cell.thin.items() if key not in changed and keys[key] == value]
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = deepcopy(value)
    for absent, there in (stand_in or {}).items():
        sources = tree["data"].get("sources", [])
        tree["data"]["sources"] = [[there if name == absent else name, count] for name, count in sources]
        if "data.sources" in changed:
            continue
        remarks.append(f"{there} stands in for {absent}, whose files are absent: not the published experiment")
    for section in ("data", "run"):
        tree.setdefault(section, {})["seed"] = seed
    tree["run"].setdefault("checkpoint_every", 10)
    for change in changes:
        set_key(tree, change)
    protection, training = tree.get("protection", {}), tree.setdefault("training", {})
    hidden = protection.get("sum", "none") != "none" or tree.get("privacy", {}).get("unit", "none") != "none"
    weights = training.get("weights", "own")
    by_count = (own_weights(tree["algorithm"]["name"]) if weights == "own" else weights) == "examples"
    if hidden and by_count and "training.weights" not in changed and not protection.get("max_weight"):
        training["weights"] = "equal"
        remarks.append("training.weights = equal: sample counts would show through this protection")
    return parse_config(tree, f"cell {cell.label!r}"), tuple(remarks)


def _shrunk(key: str, value: Any, scale: float, floor: int) -> Any:
    """A number of clients becomes a multiple of its smallest value, so that groups stay equal."""
    if isinstance(value, list):
        return [[name, _shrunk("", count, scale, floor)] for name, count in value]
    step = floor if key == "data.clients" else 1
    return min(value, max(floor, step * round(value * scale / step)))


def scaled_trials(cell: ReproductionCell, scale: float) -> int:
    """How many trials of a cell are made: its own number times `scale`, at least one."""
    return max(1, round(cell.trials * scale))


def trial_settings(entry: Reproduction, cell: ReproductionCell, scale: float) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """A trial's settings: `thin` ones (dotted keys of trees) hold where it is scaled down, and trees of sections shrink like a run's."""
    settings, remarks = deepcopy(dict(cell.settings)), []
    if scale < 1:
        for key, value in cell.thin.items():
            section, _, name = key.rpartition(".")
            holder = settings[section] if section else settings
            remarks.append(f"{key} {holder[name]} → {value}")
            holder[name] = value
    for key, floor in entry.shrinks.items():
        section, _, name = key.partition(".")
        if scale < 1 and isinstance(settings.get(section), dict) and name in settings[section]:
            old, new = settings[section][name], _shrunk(key, settings[section][name], scale, floor)
            if old != new:
                settings[section][name] = new
                remarks.append(f"{key} {old} → {new}")
    if cell.trials > 1 and (count := scaled_trials(cell, scale)) != cell.trials:
        remarks.append(f"trials {cell.trials} → {count}")
    return settings, tuple(remarks)


# --- what is published for these settings ---------------------------------------------------------------------------------------------


def published_of(entry: Reproduction, cell: ReproductionCell, config: Config) -> dict[str, Number]:
    """Metric -> the published number of a run at the settings of `config`, where the paper has one for exactly these.

    A number is of the entry's and the cell's keys with its own settings in their place. Everything that changes what is measured has to be
    as there: so a run that is scaled down, or has a data set's stand-in, has none.
    """
    asked, published = _compared(config), {}
    for figure in cell.figures:
        for number in figure.published:
            if any(asked[section].get(name) != value for (section, _, name), value in _named(number)):
                continue
            try:
                expected = _compared(config_of(entry, cell, 0, changes=_changes(number))[0])
            except InputError:  # not settings of this cell, such as those of another algorithm
                continue
            if expected == asked:
                published[figure.metric] = number
                break
    return published


def published_of_trials(cell: ReproductionCell, settings: Mapping[str, Any]) -> dict[str, Number]:
    """The same for trials, whose numbers are all of the cell's own settings."""
    return {} if settings != cell.settings else {figure.metric: figure.published[0] for figure in cell.figures if figure.published}


def _named(number: Number) -> list[tuple[tuple[str, str, str], Any]]:
    return [(key.partition("."), value) for key, value in number.settings.items()]


def _changes(number: Number) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in number.settings.items()]


def _compared(config: Config) -> dict[str, Any]:
    """All keys on which a figure depends."""
    tree = asdict(config)
    del tree["data"]["seed"]
    tree["run"] = {key: tree["run"][key] for key in MEASURED}
    return tree
