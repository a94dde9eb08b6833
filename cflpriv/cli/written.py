"""The names and lines of registries whose packages import torch, read from the source files: an import takes two seconds.

`described` gives what `cflpriv list` prints of the project's own things. Plugins and installed packages add to the registries themselves.
"""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..protocols.bounded_files import read_bytes

__all__ = ["described"]

ROOT = Path(__file__).parents[1]


def described() -> dict[str, dict[str, str]]:
    """By title, the lines of things by name, in the order of their registration. Raises `KeyError` for a name that no file assigns."""
    specs = [_arguments(spec, "name", "make", "summary") for spec in _value("algorithms", "SPECS").elts]
    active, entries = _items("attacks.active", "ATTACKS"), _items("experiments.reproductions", "REPRODUCTIONS")
    papers = {name: _arguments(entry, "title", "source") for name, entry in entries.items()}
    return {
        "algorithms": {spec["name"]: spec["summary"] for spec in specs},
        "active attacks": {name: _arguments(attack, "summary")["summary"] for name, attack in active.items()},
        "models": {name: ast.literal_eval(entry.elts[1]) for name, entry in _items("engine.models", "MODELS").items()},
        "reproductions": {name: f"{paper['title']} ({paper['source']})" for name, paper in papers.items()},
    }


def _arguments(call: Any, *names: str) -> dict[str, Any]:
    """Those of a call that are literals: by keyword, and by place if the first parameters have these names."""
    pairs = [*zip(names, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    return {name: value.value for name, value in pairs if isinstance(value, ast.Constant)}


def _items(module: str, name: str) -> dict[str, Any]:
    """The entries of a dictionary, those of others that are unpacked into it included."""
    made: dict[str, Any] = {}
    written = _value(module, name)
    for key, value in zip(written.keys, written.values, strict=True):
        made |= _items(*_place(module, value)) if key is None else {ast.literal_eval(key): _resolved(module, value)}
    return made


def _value(module: str, name: str) -> Any:
    """What a name of a module was assigned last, with names in a tuple replaced by what they stand for."""
    values, homes = _file(module)
    if name not in values:
        return _value(*homes[name])
    value = values[name]
    if isinstance(value, ast.Tuple):
        return ast.Tuple([_resolved(module, element) for element in value.elts])
    return value


def _resolved(module: str, value: ast.expr) -> Any:
    return _value(*_place(module, value)) if isinstance(value, ast.Name | ast.Attribute) else value


def _place(module: str, value: Any) -> tuple[str, str]:
    """Where `NAME` or `module.NAME` is assigned."""
    if isinstance(value, ast.Name):
        return module, value.id
    package, name = _file(module)[1][value.value.id]
    return f"{package}.{name}", value.attr


@cache
def _file(module: str) -> tuple[Mapping[str, ast.expr], Mapping[str, tuple[str, str]]]:
    """What a module of the package assigns, and where the names that it imports from others of its package come from."""
    path = ROOT.joinpath(*module.split("."))
    package = module if path.is_dir() else module.rpartition(".")[0]
    text = read_bytes(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    values: dict[str, ast.expr] = {}
    homes: dict[str, tuple[str, str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            homes |= {alias.name: (".".join(filter(None, (package, node.module))), alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign):
            values |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            values[node.target.id] = node.value
    return values, homes
