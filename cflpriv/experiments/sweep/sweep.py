"""A grid of runs from one file: algorithms × protections × ε × any keys × seeds.

A sweep is an experiment with a section `[sweep]`:

    algorithms   names, or tables with a `name`, hyper-parameters, perhaps a `label` and other sections' keys (`model = {...}`)
    protections  names, or tables of [protection] keys, perhaps with a `label` and other sections' keys (`privacy = {...}`)
    epsilon      values of privacy.epsilon, for those protections that have a privacy unit
    keys         any other dotted key with its values: {"training.lr" = [0.1, 0.01]}; a list is a value, too
    seeds        each is both run.seed and data.seed, the same list for every setting, so that settings compare as pairs
    audit        whether to attack every finished run that recorded payloads; `attacks` names attacks, `budget` their budget
    workers      how many processes; default: one a core, on a GPU one
    choose       keep only the best run, at a stated ε (`choose`); `private_choice.run_choice` makes such a sweep

The file's own sections hold for every cell. [algorithm] stands under the entries of its name, and [protection] under each table of
`protections`: the entry's keys win. A name among the protections sets both `gram` and `sum`, over the file's other keys; "none" is no
protection at all. A key of these two sections that reaches no entry is refused, as is one that an algorithm and a protection both give.

A run's result depends on its configuration alone, so it does not matter how many workers there are or who ran it (`sweep_runs`). What
failed is recorded in `failed/` with its error, and the rest continues; the same command again runs what is missing and retries what failed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from ...contract.protection import listed
from ...errors import InputError, near
from ...files import toml_text
from ...keys import check_ranges
from ..config.config import Config, changed, parse_config, read_tree, tuples
from ..config.sections import RunSection
from ..run.workers import processes_for
from ..trust import idle_code, in_run_folder
from .choose import Choose, check_choose, parse_choose

__all__ = ["Sweep", "SweepCell", "SweepSetting", "load_sweep", "parse_sweep", "sweep_keys", "sweep_of"]

_KEYS: Mapping[str, type] = {
    "algorithms": list, "protections": list, "epsilon": list, "keys": dict, "seeds": list, "audit": bool, "attacks": list, "budget": str,
    "workers": int, "choose": dict,
}  # fmt: skip
_TYPES = {list: "list", dict: "table", bool: "boolean", str: "string", int: "integer"}
MEANINGS = {
    "algorithms": "Names, or tables with a `name`, its keys and perhaps a `label`; default: [algorithm] name.",
    "protections": "Names, or tables of [protection] keys and perhaps a `label`; default: [protection] as given.",
    "epsilon": "Values of privacy.epsilon, for protections with a privacy unit.",
    "keys": 'Any other dotted key with its values, such as {"training.lr" = [0.1, 0.01]}.',
    "seeds": "Each is both run.seed and data.seed; default: 0.",
    "audit": "Whether every finished run is attacked; default: true.",
    "attacks": "Names of the attacks; `cflpriv list` has them; default: all that apply.",
    "budget": "quick (one seed an audit), standard (5) or thorough (10); default: standard.",
    "workers": "Processes; default: one a core.",
    "choose": "Keep only the best run, at a stated epsilon.",
}
"""What the keys of [sweep] mean."""


def sweep_keys(wanted: str) -> str:
    """The entries of a key of [sweep] ("sweep.seeds" or "seeds"), or of all ("sweep"), as plain text; "" for any other name."""
    chosen = [key for key in MEANINGS if wanted in (f"sweep.{key}", key, "sweep")]
    return "\n\n".join(f"sweep.{key}\n  {MEANINGS[key]}\n  type:    {_TYPES[_KEYS[key]]}" for key in chosen)


_INSTEAD = {"algorithm": "write its keys beside the `name`", "protection": "belongs to an entry of `protections`"}
_PLACES = {
    "run.seed": "seeds", "data.seed": "seeds", "algorithm.name": "algorithms", "privacy.epsilon": "epsilon",
    "run.plugins": "[run] plugins",
}  # fmt: skip
_Entry = tuple[str, dict[str, dict[str, Any]]]
"""An algorithm or a protection: its label, and the sections that it changes."""
LONGEST_NAME = 200
"""Names of cells are names of folders, and with `.json` of files, which may have 255 letters; a longer one ends in a digest."""


@dataclass(frozen=True)
class SweepSetting:
    """What the seeds of a group of runs have in common: the labels of its algorithm and protection, ε, and other keys."""

    algorithm: str
    protection: str
    epsilon: float | None = None
    keys: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        epsilon = () if self.epsilon is None else (f"ε={self.epsilon:g}",)
        return " · ".join((self.algorithm, self.protection, *epsilon, *(f"{key}={value}" for key, value in self.keys)))


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep: the name of its folder, its setting, seed and configuration, or the reason for a missing configuration."""

    name: str
    setting: SweepSetting
    seed: int
    config: Config | None
    problem: str = ""


@dataclass(frozen=True)
class Sweep:
    """A sweep as read. `text` is its file, resolved, by which it is known again."""

    cells: tuple[SweepCell, ...]
    text: str
    workers: int = 1
    audit: bool = True
    attacks: tuple[str, ...] = ()
    budget: str = ""
    choose: Choose | None = None

    @property
    def settings(self) -> tuple[SweepSetting, ...]:
        return tuple(dict.fromkeys(cell.setting for cell in self.cells))


# --- reading ------------------------------------------------------------------------------------------------------------------------


def load_sweep(path: str | Path, changes: Sequence[str] = (), plugins: Sequence[str | Path] = ()) -> Sweep:
    """Read a sweep. `changes` are "section.key=value", as `--set` takes them, `plugins` files beside its own.

    The code that the file names runs, unless the file is the record in a sweep's folder: of such code `plugins` runs alone.

    Raises `InputError` naming file, key and value.
    """
    tree, source = changed(read_tree(path), changes, plugins), f"{path} with --set {', '.join(changes)}" if changes else str(path)
    own = not in_run_folder(Path(path))
    try:
        sweep = _runnable(_sweep(tree, source, trust=own), tree, source)
    except InputError as error:
        idle = "" if own else idle_code(Path(path), tree)
        raise InputError("; ".join(filter(None, (str(error), idle)))) from None
    if not sweep.audit and (
        unused := [key for key in ("attacks", "budget") if key in tree["sweep"]]
    ):  # folders of earlier versions have it
        value = tree["sweep"][unused[0]]
        raise InputError(f"{source}: [sweep] {unused[0]} = {value!r}: is not used, because audit = false; remove one of them")
    return sweep


def sweep_of(folder: Path) -> Sweep | None:
    """The sweep whose folder this is, or None. No code runs: a cell that needs code has no configuration, but its name and setting."""
    path = Path(folder) / "sweep.toml"
    return _sweep(read_tree(path), str(path), trust=False) if path.is_file() else None


def parse_sweep(tree: Mapping[str, Any], source: str = "sweep") -> Sweep:
    """A `Sweep` from nested mappings. A combination that makes no sense is a cell with a problem; if all are, that is raised."""
    return _runnable(_sweep(tree, source, trust=True), tree, source)


def _runnable(sweep: Sweep, tree: Mapping[str, Any], source: str) -> Sweep:
    """The sweep. Raises `InputError` where no cell can run, or where a private choice cannot be made."""
    if all(cell.problem for cell in sweep.cells):
        raise InputError(f"{source}: {sweep.cells[0].problem}")
    if sweep.choose is not None:
        _check_choice(sweep.choose, tree["sweep"], sweep.cells, source)
    return sweep


def _sweep(tree: Mapping[str, Any], source: str, trust: bool) -> Sweep:
    """A `Sweep` from nested mappings; `trust` as for `parse_config`."""
    sweep = tree.get("sweep")
    if not isinstance(sweep, Mapping):
        raise InputError(f"{source}: has no section [sweep]; `cflpriv run` runs a single experiment")
    for key, value in sweep.items():
        if key not in _KEYS:
            raise InputError(f"{source}: [sweep] {key} = {value!r}: is not a key here{near(key, list(_KEYS))}")
        if not isinstance(value, _KEYS[key]) or (isinstance(value, bool) and _KEYS[key] is not bool):
            raise InputError(f"{source}: [sweep] {key} = {value!r}: expected {_KEYS[key].__name__}")
        if value in ([], {}):
            raise InputError(f"{source}: [sweep] {key} = {value!r}: is empty; leave it out or give values")
    base = {section: dict(values) for section, values in tree.items() if section != "sweep" and isinstance(values, Mapping)}
    if strange := [section for section in tree if section != "sweep" and section not in base]:
        raise InputError(f"{source}: {strange[0]} = {tree[strange[0]]!r}: write it as a section, [{strange[0]}]")
    try:
        check_ranges(RunSection, {"workers": sweep.get("workers", 1)})
        choose = parse_choose(sweep["choose"]) if "choose" in sweep else None
        cells = tuple(_cells(base, sweep, trust))
    except InputError as error:
        raise InputError(f"{source}: [sweep] {error}") from None
    try:
        text = toml_text({**base, "sweep": {key: value for key, value in sweep.items() if key != "workers"}})
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    names = [cell.name for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{source}: [sweep] two cells are called {twice!r}; give their algorithms or protections a `label`")
    runs = [cell.config.run for cell in cells if cell.config is not None]
    workers = sweep.get("workers") or processes_for({run.device for run in runs}, max((run.workers for run in runs), default=1))
    return Sweep(
        cells, text, workers, sweep.get("audit", choose is None), tuple(sweep.get("attacks", ())),
        sweep.get("budget", ""), choose,
    )  # fmt: skip


def _check_choice(choose: Choose, sweep: Mapping[str, Any], cells: Sequence[SweepCell], source: str) -> None:
    """Raises `InputError` where one cell cannot run, or cannot be chosen privately."""
    if problem := next((cell.problem for cell in cells if cell.problem), ""):
        raise InputError(f"{source}: [sweep] choose: every setting must be able to run: {problem}")
    try:
        check_choose(choose, sweep, {cell.name: cell.config for cell in cells if cell.config is not None})
    except InputError as error:
        raise InputError(f"{source}: [sweep] {error}") from None


def _cells(base: Mapping[str, Mapping[str, Any]], sweep: Mapping[str, Any], trust: bool) -> Iterator[SweepCell]:
    own = {"name": "pacfl", **base.get("algorithm", {})}
    algorithms = [_algorithm(entry, own) for entry in sweep.get("algorithms", [own["name"]])]
    protections = [_protection(entry, base.get("protection", {}), trust) for entry in sweep.get("protections", [{"label": "as given"}])]
    _check_reach(base, "algorithm", "algorithms", [settings["algorithm"] for _, settings in algorithms])
    _check_reach(base, "protection", "protections", [overrides["protection"] for _, overrides in protections])
    keys = sweep.get("keys", {})
    for key, values in keys.items():
        if "." not in key or not isinstance(values, list) or not values or any(isinstance(value, Mapping) for value in values):
            raise InputError(f"keys: {key!r} = {values!r}: expected a dotted key and a list of values")
        if key in _PLACES:  # one would overwrite the other
            raise InputError(f"keys: {key!r}: has a place of its own; use `{_PLACES[key]}`")
    for epsilon in sweep.get("epsilon", ()):
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float):
            raise InputError(f"epsilon: {epsilon!r} is not a number")
    for seed in sweep.get("seeds", [0]):
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"seeds: {seed!r} is not a whole number")
    pairs = [(entry, other, _merged(base, entry, other)) for entry, other in product(algorithms, protections)]
    private = [tree.get("privacy", {}).get("unit", "none") != "none" for *_, tree in pairs]
    if "epsilon" in sweep and not any(private):
        raise InputError(f"epsilon = {sweep['epsilon']!r}: no protection here has a privacy unit, so nothing would depend on it")
    for ((algorithm, _), (protection, _), merged), has_epsilon in zip(pairs, private, strict=True):
        for epsilon in sweep.get("epsilon", [None]) if has_epsilon else [None]:
            for values in product(*keys.values()):
                setting = SweepSetting(algorithm, protection, epsilon, tuple(zip(keys, map(tuples, values), strict=True)))
                for seed in sweep.get("seeds", [0]):
                    tree = {section: dict(settings) for section, settings in merged.items()}
                    if epsilon is not None:
                        tree.setdefault("privacy", {})["epsilon"] = float(epsilon)
                    for key, value in zip(keys, values, strict=True):
                        section, _, inner = key.partition(".")
                        tree.setdefault(section, {})[inner] = value
                    for section in ("run", "data"):
                        tree.setdefault(section, {})["seed"] = seed
                    yield _cell(setting, seed, tree, trust)


def _cell(setting: SweepSetting, seed: int, tree: Mapping[str, Any], trust: bool) -> SweepCell:
    epsilon = [] if setting.epsilon is None else [f"eps{setting.epsilon:g}"]
    words = [setting.algorithm, setting.protection, *epsilon, *(f"{key.split('.')[-1]}={value}" for key, value in setting.keys), f"s{seed}"]
    name = "-".join(re.sub(r"[^A-Za-z0-9_.=+]+", "_", word).strip("_.") or "_" for word in words)
    if len(name) > LONGEST_NAME:
        rest = f"-{sha256(repr(words[:-1]).encode()).hexdigest()[:16]}-{words[-1]}"
        name = name[: LONGEST_NAME - len(rest)] + rest
    try:
        return SweepCell(name, setting, seed, parse_config(tree, name, trust=trust))
    except InputError as error:
        return SweepCell(name, setting, seed, None, str(error))


def _algorithm(entry: Any, own: Mapping[str, Any]) -> _Entry:
    """A label, and the sections that the entry changes; [algorithm] is whole: its keys over the file's `own`, if of the same algorithm."""
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise InputError(f"algorithms: {entry!r}: expected a name, or a table with a `name`")
    keys = {key: value for key, value in entry.items() if key != "label" and not isinstance(value, Mapping)}
    sections = {key: dict(value) for key, value in entry.items() if isinstance(value, Mapping)}
    if odd := next((key for key in ("algorithm", "protection") if key in sections), ""):
        raise InputError(f"algorithms: {odd} = {sections[odd]!r}: {_INSTEAD[odd]}")
    return str(entry.get("label", entry["name"])), {**sections, "algorithm": {**own, **keys} if entry["name"] == own["name"] else keys}


def _protection(entry: Any, own: Mapping[str, Any], trust: bool) -> _Entry:
    """A label, and the sections that the entry changes; [protection] is whole: the entry's keys over the file's `own`.

    Without `trust` a name may be that of code which did not run.
    """
    if isinstance(entry, str):
        sums, grams = listed("sum"), listed("gram")
        if entry not in grams and entry not in sums and trust:
            raise InputError(f"protections: {entry!r}: is not known{near(entry, list(sums | grams))}")
        operations = {"gram": [entry] if entry in grams else [], "sum": "none" if entry in grams and entry not in sums else entry}
        return entry, {"protection": {} if entry == "none" else {**own, **operations}}
    if not isinstance(entry, Mapping):
        raise InputError(f"protections: {entry!r}: expected a name or a table")
    plain = {key: value for key, value in entry.items() if key != "label" and not isinstance(value, Mapping)}
    sections = {key: dict(value) for key, value in entry.items() if isinstance(value, Mapping)}
    words = ", ".join(f"{key}={'+'.join(value) if isinstance(value, list) else value}" for key, value in plain.items())
    label = str(entry.get("label", words or ("as given" if own else "none")))
    return label, {**sections, "protection": {**own, **plain, **sections.get("protection", {})}}


def _merged(base: Mapping[str, Mapping[str, Any]], algorithm: _Entry, protection: _Entry) -> dict[str, dict[str, Any]]:
    """All sections of a run, the two entries' keys over the file's. Raises `InputError` for a key that both give."""
    tree = {section: dict(settings) for section, settings in base.items()}
    for section in algorithm[1].keys() & protection[1].keys():
        if both := sorted(algorithm[1][section].keys() & protection[1][section].keys()):
            raise InputError(f"algorithms: {section}.{both[0]}: {algorithm[0]!r} and the protection {protection[0]!r} both give it")
    for section, settings in (*algorithm[1].items(), *protection[1].items()):
        tree[section] = dict(settings) if section in ("algorithm", "protection") else {**tree.get(section, {}), **settings}
    return tree


def _check_reach(base: Mapping[str, Mapping[str, Any]], section: str, entries: str, settings: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a key of the file's own section that no entry takes: it would silently change nothing."""
    for key, value in base.get(section, {}).items():
        if (section, key) != ("algorithm", "name") and not any(key in entry and entry[key] == value for entry in settings):
            raise InputError(f"{entries}: {section}.{key} = {value!r} reaches none of them; write it into those that it is for")
