"""The reference of all configuration keys, made from where each is declared (`cflpriv.keys.Key`).

`python -m cflpriv.experiments.config.config_reference` prints docs/configuration.md.
"""

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ...algorithms import ALGORITHMS
from ...algorithms.interface import Algorithm, AlgorithmSpec
from ...contract.protection import ROBUST, listed
from ...data import DATASETS, PARTITIONS
from ...data.columns import Column
from ...data.datasets import NPZ_ARRAYS
from ...data.drift import Drift
from ...engine.models import MODELS, Model
from ...errors import InputError
from ...generated_pages import generated_page
from ...keys import Key
from ...streams import print_file
from ...tasks.training import Train
from .config import GIVEN, SECTIONS, own_weights

__all__ = ["Entry", "entries", "explained", "keys_of", "made_with_defaults", "page", "toml_value", "type_text"]


@dataclass(frozen=True)
class Entry:
    """A key as declared: its section and name, its type and default, what it means, and the algorithms that take it (empty: any)."""

    section: str
    name: str
    hint: Any
    default: Any
    key: Key
    algorithms: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The name with its section, as `--set` takes it."""
        return f"{self.section}.{self.name}"

    @property
    def default_words(self) -> str:
        """The default in words: what it depends on, or that the key must be set. Empty: the default is a value."""
        return self.key.default or ("required" if self.default is inspect.Parameter.empty else "")

    @property
    def default_text(self) -> str:
        """The default in words or as TOML."""
        return self.default_words or toml_value(self.default)


def keys_of(section: str, kind: Callable[..., Any]) -> tuple[Entry, ...]:
    """The keys that a section's class, or an algorithm's function, declares. A key without a `Key` has an empty meaning."""
    hints = get_type_hints(kind, include_extras=True)
    declared = []
    for name, parameter in inspect.signature(kind).parameters.items():
        if not isinstance(kind, type) and name in GIVEN:
            continue
        hint, *rest = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        key = next((part for part in rest if isinstance(part, Key)), Key(""))
        declared.append(Entry(section, name, hint, parameter.default, key))
    return tuple(declared)


def entries() -> tuple[Entry, ...]:
    """All keys in the order of the page. Keys of several algorithms that are declared alike are one entry."""
    plain = [entry for section, kind in SECTIONS.items() for entry in keys_of(section, kind)]
    takers: dict[str, list[tuple[Entry, list[str]]]] = {}
    for name, spec in ALGORITHMS.ready().items():
        for entry in keys_of("algorithm", spec.make):
            alike = takers.setdefault(entry.name, [])
            same = next((names for other, names in alike if other == entry), None)
            alike.append((entry, [name])) if same is None else same.append(name)
    named = Entry("algorithm", "name", str, "pacfl", Key("The algorithm; `cflpriv list` describes each.", known=lambda: ALGORITHMS))
    own = [
        replace(entry, algorithms=tuple(names))
        for key in sorted(takers)
        for entry, names in takers[key]
    ]  # fmt: skip
    first = list(SECTIONS).index("protection")
    before = [entry for entry in plain if list(SECTIONS).index(entry.section) < first]
    return (*before, named, *own, *plain[len(before) :])


# --- as text ------------------------------------------------------------------------------------------------------------------------


def toml_value(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return "none" if value is None else repr(int(value)) if isinstance(value, int) else repr(value)


def type_text(hint: Any, plural: bool = False) -> str:
    """A type in words: "integer", "list of [integer, integer]", or the values that it allows."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(part, plural) for part in inner if part is not type(None))
    if origin is Literal:
        return ", ".join(map(toml_value, inner))
    if origin is tuple:
        return f"list of {type_text(inner[0], True)}" if inner[-1] is ... else f"[{', '.join(map(type_text, inner))}]"
    if is_dataclass(hint):
        return "tables" if plural else "table"
    word = {int: "integer", float: "number", str: "string", bool: "boolean"}[hint]
    return f"{word}s" if plural else word


def _range_text(entry: Entry) -> str:
    known = () if entry.key.known is None else tuple(entry.key.known())
    names = ", ".join(f'"{name}"' for name in known) if len(known) <= 8 else f"one of {len(known)} names"
    return " ".join(part for part in (entry.key.range_text or names, entry.key.unit) if part)


def explained(wanted: str) -> str:
    """The entries of a key ("training.lr", or "lr" in every section) or a section, as plain text.

    Raises `InputError` with the nearest names for one that there is not.
    """
    every = entries()
    chosen = [entry for entry in every if wanted in (entry.path, entry.name, entry.section)]
    if not chosen:
        names = sorted({name for entry in every for name in (entry.path, entry.name, entry.section)})
        near = get_close_matches(wanted, names, 3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "docs/configuration.md has them all"
        raise InputError(f"{wanted!r}: is not a key or a section; {hint}")
    return "\n\n".join(map(_paragraph, chosen))


def _paragraph(entry: Entry) -> str:
    lines = [entry.path, f"  {entry.key.meaning or 'not described'}", f"  type:    {type_text(entry.hint)}"]
    lines += [f"  range:   {_range_text(entry)}"] if _range_text(entry) else []
    lines += [f"  default: {entry.default_text}"]
    lines += [f"  algorithms: {', '.join(entry.algorithms)}"] if entry.algorithms else []
    if entry.key.known is not None and len(known := tuple(entry.key.known())) > 8:
        lines += [f"  names:   {', '.join(known)}"]
    return "\n".join(lines)


# --- the page -----------------------------------------------------------------------------------------------------------------------

_COMMAND = "python -m cflpriv.experiments.config.config_reference > docs/configuration.md"
_HEAD = """For people who write an experiment's TOML file: every key. To change an entry, change the key where the code declares it.

- `cflpriv init` writes a commented file that runs, `cflpriv explain KEY` prints one entry, and `cflpriv init --schema FILE` writes a JSON
  schema for editors.
- A key that is left out has its default. An unknown key, a wrong type or a value out of range is refused by name.
- `[sweep]`, which only `cflpriv sweep` reads, is described in [experiments.md](experiments.md#sweeps).
- Paths start at the folder of the configuration file.
"""


def page() -> str:
    """docs/configuration.md."""
    every = entries()
    parts = [_HEAD]
    for section in dict.fromkeys(entry.section for entry in every):
        rows = [entry for entry in every if entry.section == section]
        parts.append(f"## [{section}]\n")
        parts.append(_table(rows, "algorithms" if section == "algorithm" else ""))
        if section == "data":
            parts += [
                "### data.columns\n\nKeys of each `[[data.columns]]`, one for each column of a table.\n",
                _table(keys_of("data.columns", Column)),
                "### data.drift\n\nKeys of each `[[data.drift]]`.\n",
                _table(keys_of("data.drift", Drift)),
                _names("data.source", DATASETS),
                _names("data.partition", PARTITIONS),
                _names("Arrays of an npz, or of a folder of .npy files", NPZ_ARRAYS, "array"),
            ]
        if section == "model":
            parts.append(_names("model.name", {name: line for name, (_, line) in MODELS.items()}))
        if section == "algorithm":
            parts.append(_algorithms())
        if section == "protection":
            parts += [
                _names("protection.gram", listed("gram")),
                _names("protection.sum", listed("sum")),
                _names("protection.robust", ROBUST),
            ]
    return generated_page("Configuration reference", _COMMAND, "\n".join(parts))


def _table(rows: Sequence[Entry], extra: str = "") -> str:
    lines = [f"| key |{f' {extra} |' if extra else ''} type | default | range, unit | meaning |", f"|{'---|' * (6 if extra else 5)}"]
    for row in rows:
        takers = f" {', '.join(row.algorithms) or 'all'} |" if extra else ""
        default = row.default_words or f"`{toml_value(row.default)}`"
        lines.append(f"| `{row.name}` |{takers} {type_text(row.hint)} | {default} | {_range_text(row)} | {row.key.meaning} |")
    return "\n".join(lines) + "\n"


def _names(title: str, names: dict[str, str], what: str = "name") -> str:
    rows = (f"| `{name}` | {line} |" for name, line in names.items())
    return "\n".join((f"### {title}\n", f"| {what} | meaning |", "|---|---|", *rows)) + "\n"


def _algorithms() -> str:
    """Which of the keys that are not their own the algorithms take."""
    lines = ["### Algorithms\n", "| name | summary | own `training.weights` | `privacy.unit` | newcomers |", "|---|---|---|---|---|"]
    for name, spec in ALGORITHMS.items():
        weights = own_weights(name) if "weights" in inspect.signature(spec.make).parameters else "–"
        units, admits = _units(spec)
        lines.append(f"| `{name}` | {spec.summary} | {weights} | {', '.join(units) or '–'} | {'yes' if admits else 'no'} |")
    return "\n".join(lines) + "\n"


def made_with_defaults(spec: AlgorithmSpec) -> Algorithm:
    """An algorithm with its default keys, for a small model and, where it needs to know groups, few of them."""
    wanted = inspect.signature(spec.make).parameters
    offered = {name: value for name, value in {"groups": {0: 0}, "k": 2}.items() if name in wanted}
    return spec.make(Train(Model("mlp", (1, 8, 8), 10, 16), epochs=1), **offered)


def _units(spec: AlgorithmSpec) -> tuple[list[str], bool]:
    """The privacy units that an algorithm with its default keys runs under, and whether newcomers can join."""
    algorithm = made_with_defaults(spec)
    units = ["sample"] if spec.sample_releases is not None else []
    alone = all(operation in ("mean", "gram") for operation in algorithm.operations) and "mean" in algorithm.operations
    if alone and not spec.client_refused:
        units.append("client" + (' (with `local = ["gram"]`)' if "gram" in algorithm.operations else ""))
    return units, algorithm.admit is not None


if __name__ == "__main__":
    print_file(page())
