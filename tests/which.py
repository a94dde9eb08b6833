"""Which tests import a module of the product: `python tests/which.py cflpriv/clustering/similarity.py ...`.

Prints the test files that import the module directly, those that import fewest other modules first, and the command that runs them.
A module that no test imports directly is tested through what imports it; the tests of its users are listed then.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("cflpriv", "protocols", "attacks")
TREES = ("cflpriv", "protocols", "attacks", "tests")


def name_of(path: Path) -> str:
    """The dotted name of a file in the checkout; protocols and attacks are packages of cflpriv."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] in ("cflpriv", "tests") else ("cflpriv", *parts))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements of a file; no expression holds one."""
    yield tree
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            yield from statements(node)


def imported(path: Path, known: frozenset[str]) -> Iterator[str]:
    """The modules among `known` that a file imports, wherever in the file; a package only where none of its modules is meant."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in statements(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            home = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (home, node.module or "")))
            inner = [f"{source}.{alias.name}" for alias in node.names if f"{source}.{alias.name}" in known]
            yield from inner or ([source] if source in known else [])


def files() -> list[Path]:
    """Every Python file of the product and of its tests."""
    return sorted(
        path.relative_to(ROOT) for tree in TREES for path in (ROOT / tree).rglob("*.py")
        if not any((ROOT / tree).joinpath(*path.relative_to(ROOT / tree).parts[:depth]).is_symlink() for depth in (1, 2))
    )  # fmt: skip


@cache
def imports() -> dict[Path, frozenset[str]]:
    """By file the modules that it imports."""
    paths = files()
    names = frozenset(map(name_of, paths))
    return {path: frozenset(imported(path, names)) for path in paths}


@cache
def users() -> dict[str, set[Path]]:
    """By module the files that import it."""
    found: dict[str, set[Path]] = {}
    for path, names in imports().items():
        for name in names:
            found.setdefault(name, set()).add(path)
    return found


def tests_of(modules: Sequence[Path]) -> dict[Path, list[Path]]:
    """By module the test files to run. Raises `FileNotFoundError` naming a file that is no module of the product."""
    uses, found = imports(), {}
    paths = list(uses)
    for module in modules:
        if module not in uses or module.parts[0] == "tests":
            raise FileNotFoundError(f"{module}: is no module of {', '.join(PACKAGES)}")
        inside = [path for path in paths if path.parent == module.parent] if module.name == "__init__.py" else [module]
        reached, tests = {name_of(path) for path in inside}, list[Path]()
        while not tests:
            direct = set().union(*(users().get(name, ()) for name in reached))
            tests = [path for path in direct if path.name.startswith("test_")]
            more = reached | {name_of(path) for path in direct}
            siblings = {name_of(path) for path in paths if path.parent == module.parent}
            if more == reached and siblings <= reached:
                break
            # a module that is loaded by its name only, as a claim is: what imports its package, or a module beside it
            reached = more if more != reached else more | siblings
        found[module] = sorted(tests, key=lambda path: (module.stem not in path.stem, len(uses[path]), path))
    return found


def main(words: Sequence[str]) -> int:
    """Print the tests of each file; the exit code."""
    if not words:
        print((__doc__ or "").strip())
        return 2
    try:
        found = tests_of([Path(word).resolve().relative_to(ROOT.resolve()) for word in words])
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for module, tests in found.items():
        print(f"{module}: {' '.join(map(str, tests)) or 'no test imports what uses it'}")
    chosen = list(dict.fromkeys(test for tests in found.values() for test in tests[:5]))
    print(f"the five nearest of each: .venv/bin/python -m pytest -m 'not slow' --durations 5 {' '.join(map(str, chosen))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
