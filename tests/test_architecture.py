"""The one direction of dependency, and the packaging map, read from the syntax trees and the disk."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT

from cflpriv.extras import what_to_install

ROOMS = {"protocols": "cflpriv.protocols", "attacks": "cflpriv.attacks", "cflpriv": "cflpriv"}


@cache
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


def top_of(path: Path) -> list[ast.stmt]:
    """A file's statements at the top."""
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    return module.body


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's syntax."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(name: str, path: Path) -> list[tuple[str, int]]:
    """What a module imports, as absolute names with the level of the import (0: absolute)."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in nodes(path):
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
        elif not name.startswith(("cflpriv.attacks", "cflpriv.cli", "cflpriv.estimator")):
            assert not target.startswith("cflpriv.attacks"), f"{name} imports {target}"
        if name != "cflpriv" and not name.startswith("cflpriv.estimator"):
            assert not target.startswith("cflpriv.estimator"), f"{name} imports {target}"
        if name.startswith("cflpriv.algorithms"):
            assert not target.startswith("cflpriv.protocols"), f"algorithm {name} imports the protocol {target}"


def test_the_import_reader_sees_through_relative_imports(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "from .. import attacks\nfrom ..attacks import audit\nfrom cflpriv import attacks as a\nimport protocols.errors\n", encoding="utf-8"
    )
    seen = {target for target, _ in imports("cflpriv.experiments.x", path)}
    assert {"cflpriv.attacks", "cflpriv.attacks.audit", "protocols.errors"} <= seen


def test_the_command_line_imports_attacks_only_inside_commands() -> None:
    files = list((ROOT / "cflpriv" / "cli").glob("*.py"))
    assert len(files) > 4
    for path in files:
        top = [node.module for node in top_of(path) if isinstance(node, ast.ImportFrom)]
        assert not any(module and "attacks" in module for module in top), path


def test_the_declared_packages_are_those_on_disk() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = (path for path in (ROOT / "examples", *(ROOT / "examples").rglob("*")) if path.is_dir() and path.name != "__pycache__")
    on_disk = {".".join(("cflpriv", *path.relative_to(ROOT).parts)) for path in folders}  # data, which is not imported
    for name, path in modules().items():
        on_disk.add(name if path.name == "__init__.py" else name.rpartition(".")[0])
    assert sorted(declared) == sorted(on_disk)


PAPERS = "cflpriv.experiments.reproductions"
"""Entries of papers' tables name algorithms."""


@pytest.mark.slow
def test_only_its_own_file_names_an_algorithm() -> None:
    """What others need to know of an algorithm stands in its `AlgorithmSpec`: nobody compares names with it, or has a table by names."""
    from cflpriv.algorithms import ALGORITHMS

    names = set(ALGORITHMS) - {"local"}  # a word of `[protection] small_clusters`, of figures and of games, too
    found = set()
    for name, path in modules().items():
        if name.startswith(("cflpriv.algorithms", PAPERS)):
            continue
        for node in nodes(path):
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
        "import sys, cflpriv, cflpriv.protocols.orthonormal, cflpriv.experiments.run.verify;"
        "print([m for m in ('torch', 'tenseal', 'flwr', 'matplotlib', 'opacus', 'sklearn') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def missing_names(name: str) -> list[str]:
    """The public names of a module that it does not have; none where the module or a name needs an extra that is not installed."""
    missing = []
    try:
        module = importlib.import_module(name) if not name.endswith("cli") else None
        missing = [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)]
    except ModuleNotFoundError as error:
        if what_to_install(error) is None:
            raise
    return missing


def test_public_names_exist() -> None:
    assert {name: missing for name in modules() if (missing := missing_names(name))} == {}


READERS = {
    "cflpriv.protocols.bounded_files", "cflpriv.array_files",
    "cflpriv.data.formats",  # unpacks what `open_regular` opened
    "cflpriv.data.image_folders", "cflpriv.data.raw_tables", "cflpriv.data.huggingface",  # with the libraries of their formats
    "cflpriv.federation.store",  # a party's own state, of any size
    "cflpriv.data.named",  # a file of scikit-learn
    "cflpriv.attacks.claims.published.clustering_beats_averaging",  # its own runs; docs/claims.md has the digest of the file
}  # fmt: skip
READING = {
    "read_text",
    "read_bytes",
    "load_file",
    "safe_open",
    "fromfile",
    "memmap",
    "open_memmap",
    "loadtxt",
    "genfromtxt",
    "ZipFile",
    "GzipFile",
}
"""Functions and methods that take whatever a path leads to, whole."""


def unbounded_reads(tree: list[ast.AST]) -> set[str]:
    """Calls by which a file is read without a bound: `np.load`, `path.read_text()`, `path.open("rb")` and their kin."""
    found = set()
    for node in tree:
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        whole = ast.unparse(node.func)
        modes = [one.value for one in (*node.args[:2], *(one.value for one in node.keywords)) if isinstance(one, ast.Constant)]
        if (isinstance(node.func, ast.Attribute) and name in READING) or name in READING - {"read_text", "read_bytes"}:
            found.add(whole)
        if whole in (
            "np.load",
            "numpy.load",
            "torch.load",
            "pickle.load",
            "json.load",
            "tomllib.load",
            "gzip.open",
            "bz2.open",
            "Image.open",
        ):
            found.add(whole)
        if (whole == "open" and not {"wb", "ab", "r+b", "w", "a", "x"} & set(modes)) or (name == "open" and {"r", "rb"} & set(modes)):
            found.add(whole)
    return found


def test_files_are_read_in_one_place() -> None:
    """What others wrote may be a pipe, a device or a bomb; `bounded_files` and `array_files` refuse these."""
    assert set(modules()) >= READERS
    found = {name: unbounded_reads(nodes(path)) for name, path in modules().items() if name not in READERS}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_reads_are_recognised() -> None:
    bad = ("np.load(a)", "a.read_text()", "Path(a).read_bytes()", "a.open('rb')", "open(a)", "open(a, 'rb')", "load_file(a)", "ZipFile(a)")
    assert [line for line in bad if not unbounded_reads(list(ast.walk(ast.parse(line))))] == []
    good = (
        "read_text(a)",
        "read_bytes(a, 3)",
        "a.open('wb')",
        "a.open()",
        "open(a, 'ab')",
        "open_regular(a)",
        "os.open(a, 1)",
        "json.loads(a)",
    )
    assert [line for line in good if unbounded_reads(list(ast.walk(ast.parse(line))))] == []


# --- copies of the protocols, one name for the attacks -------------------------------------------------------------------------------


def ran(code: str, *folders: Path, options: tuple[str, ...] = ()) -> tuple[int, str]:
    """The exit status and the last line of a new process that imports from `folders`."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, encoding="utf-8", check=False, cwd=folders[0],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cflpriv.protocols", "protocols"), ("protocols", "cflpriv.protocols"), ("cflpriv.protocols.secagg", "protocols.keys"),
        ("protocols.keys", "cflpriv.errors"), ("cflpriv.protocols", "other.linked"), ("other.linked", "cflpriv.protocols"),
    ],
)  # fmt: skip
def test_the_same_files_have_one_name_in_a_process(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "linked").symlink_to(ROOT / "protocols")
    assert ran(f"import {first}; print('fine')", ROOT, tmp_path) == (0, "fine")
    status, line = ran(f"import {first}; import {second}", ROOT, tmp_path)
    name = re.sub(r"(protocols|linked)\..*", r"\1", first)
    assert status == 1
    assert line.startswith("ImportError: ")
    assert line.endswith(f"the same files were imported as {name} before; use {name}")
    # who was refused can go on with the first
    again = f"import {first}\ntry: import {second}\nexcept ImportError: from {name} import keys; print(keys.__name__)"
    assert ran(again, ROOT, tmp_path) == (0, f"{name}.keys")


TWO_COPIES = """
import sys
for name in sys.argv[1:]: __import__(name)
import numpy as np
from cflpriv.attacks import audit_updates
from cflpriv.protocols import accounting as ours, events, keys, ledger, secagg
from vendor.inner.protocols import accounting as theirs, events as their_events, keys as their_keys, ledger as their_ledger
from vendor.inner.protocols import secagg as their_secagg
for copy, make in ((secagg, keys.Identity), (their_secagg, their_keys.Identity)):
    terms = copy.make_terms(
        session=bytes(16), slot=(0, 0), cohort=range(4), models=[bytes(32)], dimension=3, clip=8.0, min_cohort=2
    )
    identities = {client: make.create(client) for client in range(4)}
    summed = copy.simulate(terms, identities, lambda client: copy.Contribution(np.arange(3.0) + client)).sum
    assert np.allclose(summed.total(), 4 * np.arange(3.0) + 6, atol=1e-3), summed
event, foreign = (copy.GaussianEvent(2.0, 1.0, "add_remove", "sample") for copy in (events, their_events))
assert ours.epsilon_of([event], 1e-5) == theirs.epsilon_of([foreign], 1e-5)
identity = their_keys.Identity.create(0)
FIELDS = dict(session=bytes(16), slot=(0, 0), cohort=range(4), models=[bytes(32)], dimension=3, clip=8.0, min_cohort=2)
our_terms, their_terms, ones = secagg.make_terms(**FIELDS), their_secagg.make_terms(**FIELDS), np.ones(3)
our_policy, their_policy = (copy.Policy(bytes(16), "passive", bytes(32), 1, 2) for copy in (secagg, their_secagg))
ours_of = {client: keys.Identity.create(client) for client in range(4)}
record = secagg.SumRecord()
book = ledger.Ledger(ledger.PrivacyBudget(1.0, 1e-5, "add_remove", "sample"))
refused = (
    lambda: ours.epsilon_of([foreign], 1e-5), lambda: theirs.epsilon_of([event], 1e-5), lambda: events.event_to(foreign),
    lambda: events.unsampled(foreign), lambda: events.known_shares(foreign, 1), lambda: keys.sign(identity, "x"),
    lambda: keys.verify(their_keys.Roster((identity.public(),)), 0, bytes(64), "x"),
    lambda: book.settle({0: [their_ledger.Receipt((foreign,))]}, "x"), lambda: book.charge({0: [foreign]}, "x"),
    lambda: secagg.Server(their_terms), lambda: their_secagg.Server(our_terms),
    lambda: secagg.Client(identity, their_policy, record=record),
    lambda: secagg.Client(identity, our_policy, record=record),
    lambda: secagg.Client(ours_of[0], our_policy, record=their_secagg.SumRecord()),
    lambda: secagg.simulate(our_terms, ours_of, lambda client: their_secagg.Contribution(ones)),
    lambda: secagg.make_terms(**FIELDS, roster=their_keys.Roster((identity.public(),))),
    lambda: ledger.Ledger(their_ledger.PrivacyBudget(1.0, 1e-5, "add_remove", "sample")),
)
for number, attempt in enumerate(refused):
    try:
        attempt()
    except TypeError as error:
        assert "another copy of these protocols; make it with" in str(error), (number, error)
    else:
        raise AssertionError(number)
print("fine", audit_updates.__module__)
"""


@pytest.mark.parametrize(
    "first",
    [
        ("cflpriv.protocols.secagg", "vendor.inner.protocols"),
        pytest.param(("vendor.inner.protocols.secagg", "cflpriv.attacks"), marks=pytest.mark.slow),
    ],
)
def test_a_copy_of_the_protocols_works_beside_the_package(tmp_path: Path, first: tuple[str, ...]) -> None:
    """An engineer embeds a copy and audits in the same process. Objects of one copy are refused by the other, where they meet."""
    shutil.copytree(ROOT / "protocols", tmp_path / "vendor" / "inner" / "protocols")
    code = f"import sys; sys.argv[1:] = {list(first)!r}\n{TWO_COPIES}"
    assert ran(code, ROOT, tmp_path) == (0, "fine cflpriv.attacks.foreign.foreign_audit")


def test_the_protocols_work_in_another_system(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protocols", tmp_path / "other" / "aggregation")
    modules_ = [path.stem for path in sorted((tmp_path / "other" / "aggregation").glob("*.py")) if path.stem != "__init__"]
    packages = [path.name for path in sorted((tmp_path / "other" / "aggregation").iterdir()) if (path / "__init__.py").is_file()]
    code = f"import sys\nfor name in {modules_ + packages}: __import__('other.aggregation.' + name)\n"
    code += "import other.aggregation, importlib; importlib.reload(other.aggregation); print('cflpriv' in sys.modules)"
    assert ran(code, tmp_path) == (0, "False")


def test_attacks_are_named_by_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "attacks: is a part of cflpriv and does not stand alone; import cflpriv.attacks"
    for code in ("import attacks", "import attacks.leakage"):
        assert ran(code, ROOT) == (1, f"ImportError: {words}")
    import cflpriv.attacks

    monkeypatch.syspath_prepend(str(ROOT))
    assert Path(cflpriv.attacks.__file__) == ROOT / "cflpriv" / "attacks" / "__init__.py"
    with pytest.raises(ImportError, match=f"^{re.escape(words)}$"):
        importlib.import_module("attacks")


@pytest.mark.parametrize("room", ["protocols", "attacks"])
def test_a_checkout_without_links_says_what_to_do(tmp_path: Path, room: str) -> None:
    shutil.copytree(ROOT / "cflpriv", tmp_path / "cflpriv", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "cflpriv").chmod(0o755)  # the checkout may be read-only
    for name in ("protocols", "attacks"):
        (tmp_path / name).symlink_to(ROOT / name)
    # without site-packages, where an editable install would find the folder
    assert ran("import cflpriv; print('fine')", tmp_path, options=("-S",)) == (0, "fine")
    (tmp_path / "cflpriv" / room).unlink()
    (tmp_path / "cflpriv" / room).write_text(f"../{room}", encoding="utf-8")
    status, line = ran("import cflpriv", tmp_path, options=("-S",))
    assert status == 1
    assert line.startswith(f"ImportError: cflpriv/{room} is no link to ../{room}: this checkout has no symbolic links; install it with ")


def test_a_name_that_is_gone_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import cflpriv

    monkeypatch.setitem(cflpriv._OLD, "Simulation", "use Federation")
    with pytest.raises(ImportError, match=r"^cflpriv\.Simulation: use Federation$"):
        exec("from cflpriv import Simulation")
    with pytest.raises(AttributeError, match="no attribute 'Simulatio'"):
        _ = cflpriv.Simulatio


# --- packages: no circle, no long chain ------------------------------------------------------------------------------------------------

LONGEST_CHAIN = 9


@cache
def runtime_imports(name: str, path: Path) -> set[str]:
    """The modules of the project that a module imports, also inside functions; imports for type checkers alone are left out."""
    typing_only = {
        id(inner)
        for node in nodes(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing_only:
            parent = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parent, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in modules() else base)
    return found - {name, "cflpriv"}


def graph(unit: Callable[[str], str]) -> dict[str, set[str]]:
    """Who imports whom among the modules of `cflpriv/`, each taken for its `unit`."""
    edges: dict[str, set[str]] = {}
    for name, path in modules().items():
        if name.startswith(("cflpriv.protocols", "cflpriv.attacks")) or name == "cflpriv":
            continue
        for target in runtime_imports(name, path):
            if not target.startswith(("cflpriv.protocols", "cflpriv.attacks")) and unit(target) != unit(name):
                edges.setdefault(unit(name), set()).add(unit(target))
    return edges


def package_of(name: str) -> str:
    return name.split(".")[1]


FLOORS = (
    ("claims",),
    ("audit", "active", "dp", "foreign", "properties"),
    ("compared",),
    ("inversion", "key_recovery"),
    ("labels", "membership", "remedies"),
    ("attack_table", "evidence"),
    ("figures",),
    ("adversary", "attacks"),
)
"""The rooms of `attacks/` from the top floor down; `attacks` is the register of attacks. A room imports lower floors only."""
MOST_FILES = 20


def room_of(name: str) -> str:
    """The folder or file of `attacks/` that a module is in."""
    words = name.split(".")
    return words[2] if len(words) > 2 else "attacks"


def test_attacks_import_lower_floors_only() -> None:
    floor = {room: number for number, rooms in enumerate(reversed(FLOORS)) for room in rooms}
    own = {name: path for name, path in modules().items() if name.startswith("cflpriv.attacks")}
    assert {room_of(name) for name in own} == set(floor)
    arrows = {(room_of(name), room_of(target)) for name, path in own.items() for target in runtime_imports(name, path) & set(own)}
    assert {(room, target) for room, target in arrows if room != target and floor[target] >= floor[room]} == set()
    assert ("compared", "key_recovery") in arrows


def test_no_folder_of_attacks_is_a_heap() -> None:
    files = {folder: len(list(folder.glob("*.py"))) for folder in (ROOT / "attacks").rglob("*/")}
    assert {folder.name: count for folder, count in files.items() if count > MOST_FILES} == {}
    assert len(files) > len(FLOORS)


def chains(edges: dict[str, set[str]]) -> dict[str, tuple[str, ...]]:
    """The longest chain of imports from each unit. `AssertionError` naming a circle."""
    found: dict[str, tuple[str, ...]] = {}

    def longest(unit: str, above: tuple[str, ...]) -> tuple[str, ...]:
        assert unit not in above, f"a circle of imports: {' -> '.join((*above[above.index(unit) :], unit))}"
        if unit not in found:
            below = [longest(target, (*above, unit)) for target in sorted(edges.get(unit, ()))]
            found[unit] = (unit, *max(below, key=len, default=()))
        return found[unit]

    for unit in edges:
        longest(unit, ())
    return found


def test_modules_and_packages_import_in_no_circle() -> None:
    chains(graph(lambda name: name))
    chains(graph(package_of))


def test_a_circle_would_be_found() -> None:
    with pytest.raises(AssertionError, match="a circle of imports: a -> b -> a"):
        chains({"a": {"b"}, "b": {"a"}})
    assert max(map(len, chains({"a": {"b", "c"}, "b": {"c"}}).values())) == 3


def test_the_longest_chain_of_packages_is_short() -> None:
    chain = max(chains(graph(package_of)).values(), key=len)
    assert len(chain) <= LONGEST_CHAIN, " -> ".join(chain)


def test_every_protection_has_two_halves_in_one_file() -> None:
    from cflpriv.contract.protection import PROTECTIONS

    for name, spec in PROTECTIONS.ready().items():
        kind = "Sum" if spec.of == "sum" else "Comparison"
        homes = []
        for half, side in ((spec.server, "Server"), (spec.client, "Client")):
            module, found = (cell.cell_contents for cell in half.__closure__ or ())  # what `_half` was given
            assert found == f"{side}{kind}", name
            text = (ROOT / "cflpriv" / "aggregation" / f"{module}.py").read_text(encoding="utf-8")
            assert f"class {module.capitalize()}{side}{kind}" in text, f"{name}: {module}.py has no class of its {side.lower()} half"
            assert "Guarantee" in text, f"{module}.py"
            assert "Reveals" in text, f"{module}.py"
            assert "Source" in text, f"{module}.py"
            homes.append(module)
        assert len(set(homes)) == 1, name


def test_every_request_is_made_by_the_server_and_answered_by_one_party() -> None:
    """Each request type is built in server code (or in the server half of a protection) and handled by the client or a holder."""
    from typing import get_args

    from cflpriv.federation import messages as m

    folders = (ROOT / "cflpriv" / "federation", ROOT / "cflpriv" / "aggregation")
    texts = {path.name: path.read_text(encoding="utf-8") for folder in folders for path in folder.glob("*.py")}
    for kind in get_args(m.PartyRequest):
        assert any(f"m.{kind.__name__}(" in text for name, text in texts.items() if name != "messages.py"), f"nobody asks {kind.__name__}"
        forms = (f"case m.{kind.__name__}()", f"isinstance(ask, m.{kind.__name__})")
        parties = ("client.py", "holder_party.py", "key_holder.py", "share_holders.py", "sum_helper.py")
        assert any(form in texts[name] for form in forms for name in parties), f"nobody answers {kind.__name__}"


# --- tests: what several files share is in tests/helpers ---------------------------------------------------------------------------------

MOST_HOMES = 3


def repeated_helpers(sources: dict[str, str]) -> dict[str, list[str]]:
    """The functions beside tests whose name more than `MOST_HOMES` of the files define, with these files."""
    homes: dict[str, list[str]] = {}
    for file, text in sources.items():
        names = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        for name in names:
            if not name.startswith(("test_", "_")):
                homes.setdefault(name, []).append(file)
    return {name: files for name, files in homes.items() if len(files) > MOST_HOMES}


def test_what_many_test_files_need_is_defined_once() -> None:
    paths = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "helpers" not in path.parts)
    assert repeated_helpers({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}) == {}


def test_a_helper_in_many_test_files_would_be_found() -> None:
    text = "def config(): ...\n\ndef test_one(): ...\n\ndef _own(): ...\n"
    assert repeated_helpers(dict.fromkeys("abc", text)) == {}
    assert repeated_helpers(dict.fromkeys("abcd", text)) == {"config": ["a", "b", "c", "d"]}


# --- what a command waits for before it does anything ---------------------------------------------------------------------------------

LATE = ("scipy", "sklearn", "tenseal", "flwr", "ray", "matplotlib", "pandas", "sympy", "torch")
"""Packages that take a tenth of a second or more each, and that names and configuration keys do not need."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "late"),
    [(("list",), LATE), (("--version",), (*LATE, "numpy", "cryptography"))],
    ids=lambda found: found[0],
)
def test_commands_that_compute_nothing_import_no_package_that_computes(words: tuple[str, ...], late: tuple[str, ...]) -> None:
    code = f"""
import sys
from cflpriv.cli import app
try:
    app({list(words)!r})
except SystemExit as end:
    assert not end.code
print("imported:", *sorted({{name.partition(".")[0] for name in sys.modules}} & {set(late)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["imported:"]


@pytest.mark.slow
def test_what_a_run_begins_with_imports_no_package_that_only_some_runs_need() -> None:
    code = "import sys; from cflpriv.experiments import advance, parse_config, start; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, cwd=ROOT)
    assert {name.partition(".")[0] for name in done.stdout.split()} & set(LATE) <= {"torch"}


# --- names that can be searched for -----------------------------------------------------------------------------------------------------

OLD_WORDS = {"said", "told", "say", "hear", "heard", "plays", "puppets"}
GENERIC = {"one": 220, "found": 82}
"""Names of variables that say nothing of what they hold, and how many bindings are borne: a quarter of those of commit 42c3dd0."""
KEPT = {
    "cflpriv.attacks.claims.published.sums_tell_one_nth",  # a claim's text is fixed by its digest
}
TWICE = {"Advert", "Adverts", "Deliver", "Invite"}  # the messages of secagg and of group, whose names are in transcripts


def test_a_public_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in top_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert len(homes) > 500
    assert {name: places for name, places in homes.items() if len(places) > 1}.keys() == TWICE


def identifiers(path: Path) -> list[tuple[str, bool]]:
    """The names in a file, and whether they are bound there."""
    names: list[tuple[str, bool]] = []
    for node in nodes(path):
        if isinstance(node, ast.Name):
            names.append((node.id, isinstance(node.ctx, ast.Store)))
        elif isinstance(node, ast.Attribute):
            names.append((node.attr, False))
        elif isinstance(node, ast.arg):
            names.append((node.arg, True))
        elif isinstance(node, ast.keyword) and node.arg:
            names.append((node.arg, False))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append((node.name, False))
    return names


def test_no_identifier_has_an_old_word() -> None:
    names = {(name, module) for module, path in modules().items() if module not in KEPT for name, _ in identifiers(path)}
    assert sorted((name, module) for name, module in names if set(name.lower().strip("_").split("_")) & OLD_WORDS) == []


def test_variables_are_named_after_what_they_hold() -> None:
    bound = [name for path in modules().values() for name, is_bound in identifiers(path) if is_bound]
    assert {name: bound.count(name) for name, most in GENERIC.items() if bound.count(name) > most} == {}
