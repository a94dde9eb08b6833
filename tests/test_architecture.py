"""The one direction of dependency, and the packaging map, read from the syntax trees and the disk."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"protocols": "cflpriv.protocols", "attacks": "cflpriv.attacks", "cflpriv": "cflpriv"}


def modules() -> dict[str, Path]:
    """Every module of the project by import name."""
    found = {}
    for room, name in ROOMS.items():
        for path in sorted((ROOT / room).rglob("*.py")):
            relative = path.relative_to(ROOT / room)
            if room == "cflpriv" and relative.parts[0] in ("protocols", "attacks"):
                continue
            parts = [part for part in relative.with_suffix("").parts if part != "__init__"]
            found[".".join([name, *parts])] = path
    return found


def imports(name: str, path: Path) -> list[tuple[str, int]]:
    """What a module imports, as absolute names with the level of the import (0: absolute)."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([node.module] if node.module else [])])
            found += [(base, node.level)] + [(f"{base}.{alias.name}", node.level) for alias in node.names]
    return found


@pytest.mark.parametrize("name", modules())
def test_dependencies_go_one_way(name: str) -> None:
    for target, level in imports(name, modules()[name]):
        assert target.split(".")[0] not in ("protocols", "attacks"), f"{name} imports the bare name {target}"
        ours = target == "cflpriv" or target.startswith("cflpriv.")
        if name.startswith("cflpriv.protocols"):
            assert not ours or (level > 0 and target.startswith("cflpriv.protocols")), f"{name} imports {target}"
        elif not name.startswith("cflpriv.attacks") and name != "cflpriv.cli":
            assert not target.startswith("cflpriv.attacks"), f"{name} imports {target}"
        if name.startswith("cflpriv.algorithms"):
            assert not target.startswith("cflpriv.protocols"), f"algorithm {name} imports the protocol {target}"


def test_the_import_reader_sees_through_relative_imports(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("from .. import attacks\nfrom ..attacks import audit\nfrom cflpriv import attacks as a\nimport protocols.errors\n")
    seen = {target for target, _ in imports("cflpriv.experiments.x", path)}
    assert {"cflpriv.attacks", "cflpriv.attacks.audit", "protocols.errors"} <= seen


def test_the_cli_imports_attacks_only_inside_commands() -> None:
    tree = ast.parse((ROOT / "cflpriv" / "cli.py").read_text(encoding="utf-8"))
    top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not any(module and "attacks" in module for module in top)


def test_the_declared_packages_are_those_on_disk() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    on_disk = set()
    for name, path in modules().items():
        on_disk.add(name if path.name == "__init__.py" else name.rpartition(".")[0])
    assert sorted(declared) == sorted(on_disk)


PAPERS = "cflpriv.experiments.reproductions"
"""Entries of papers' tables name algorithms."""
TO_BE_READ_OFF_TASKS = ("cflpriv.attacks.local_training", "cflpriv.attacks.coalition")


def test_only_its_own_file_names_an_algorithm() -> None:
    """What others need to know of an algorithm stands in its `AlgorithmSpec`: nobody compares names with it, or has a table by names."""
    from cflpriv.algorithms import ALGORITHMS

    names = set(ALGORITHMS) - {"local"}  # a word of `[protection] small_clusters`, of figures and of games, too
    found = set()
    for name, path in modules().items():
        if name.startswith(("cflpriv.algorithms", PAPERS, *TO_BE_READ_OFF_TASKS)):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            inside: list[ast.expr | None] = []
            if isinstance(node, ast.Compare):
                inside = [node.left, *node.comparators]
            elif isinstance(node, ast.Dict):
                inside = [*node.keys]
            elif isinstance(node, ast.Tuple | ast.List | ast.Set):
                inside = [*node.elts]
            elif isinstance(node, ast.MatchValue):
                inside = [node.value]
            found |= {(name, one.value) for one in inside if isinstance(one, ast.Constant) and one.value in names}
    assert not found


def test_the_links_lead_to_the_rooms() -> None:
    for room in ("protocols", "attacks"):
        assert (ROOT / "cflpriv" / room).is_symlink()
        assert (ROOT / "cflpriv" / room).resolve() == (ROOT / room).resolve()


def test_importing_stays_light() -> None:
    code = (
        "import sys, cflpriv, cflpriv.protocols.orthonormal;"
        "print([m for m in ('torch', 'tenseal', 'flwr', 'matplotlib', 'opacus', 'sklearn') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    import importlib

    for name in modules():
        module = importlib.import_module(name) if not name.endswith("cli") else None
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.__all__ names {public}"
