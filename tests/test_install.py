"""A plain `pip install cflpriv` is enough for the protocols; whatever else is missing is named with its extra, in one line."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from command_line import in_process

from cflpriv.cli import app
from cflpriv.extras import EXTRA_OF, what_to_install
from cflpriv.protocols.accounting import epsilon_of
from cflpriv.protocols.events import Event, GaussianEvent, SampledGaussianEvent

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
DISTRIBUTION_OF = {
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "dp_accounting": "dp-accounting",
    "tomli_w": "tomli-w",
    "mpl_toolkits": "matplotlib",
    "PIL": "pillow",
}
"""Distributions whose name is not that of their module."""
COMMANDS = (
    "run my.toml", "advise my.toml", "sweep my.toml", "audit .", "report .", "export . --out x.pt", "predict . rows.csv",
    "reproduce cfl-label-swap", "claims", "init",
    "explain lr", "contract my.toml",
)  # fmt: skip
"""Each command that needs an extra."""
WITHOUT_EXTRAS = {"examples", "helper", "list", "verify"}
"""Commands that answer without an extra; `verify` names what is missing or changed, and needs safetensors to read arrays."""
WITHOUT = f"""
import sys


class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {sorted(EXTRA_OF)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent)
"""
"""Python code after which nothing that an extra brings can be imported."""


def distributions(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", line)[0] for line in requirements}


BASE = distributions(PROJECT["dependencies"])


def light(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new process in which only what the base dependencies bring can be imported; processes that it starts, too."""
    (folder / "sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    path = os.pathsep.join((str(folder), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False, cwd=folder, env={**os.environ, "PYTHONPATH": path}
    )


def third_party(path: Path, at_import: bool) -> set[str]:
    """The top-level modules from elsewhere that a file imports: anywhere, or when it is itself imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return {name for name in found if name not in sys.stdlib_module_names and name != "cflpriv"}


@pytest.mark.slow
def test_every_import_is_of_a_declared_dependency() -> None:
    extras = {name: distributions(lines) for name, lines in PROJECT["optional-dependencies"].items()}
    for path in (path for room in ("protocols", "cflpriv", "attacks") for path in sorted((ROOT / room).rglob("*.py"))):
        for name in third_party(path, at_import=False):
            declared = extras[EXTRA_OF[name]] if name in EXTRA_OF else BASE
            assert DISTRIBUTION_OF.get(name, name) in declared, f"{path} imports {name}"


def test_the_extra_of_everything_leaves_out_what_is_large() -> None:
    (line,) = PROJECT["optional-dependencies"]["all"]
    assert set(re.split(r"[\[\],]", line)) >= set(EXTRA_OF.values()) - {"ray", "nvflare", "vision", "text", "mlflow", "wandb"}


def test_every_dependency_has_a_lower_bound() -> None:
    """`make test-versions` derives the lowest versions from these bounds; without one, any release would be allowed and none be run."""
    requirements = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    others = [line for line in requirements if not line.startswith("cflpriv[")]
    assert len(others) > 30
    assert [line for line in others if ">=" not in line] == []


@pytest.mark.slow
def test_the_protocols_need_no_extra(tmp_path: Path) -> None:
    code = """
import importlib, pkgutil
import cflpriv.protocols as protocols
for module in pkgutil.walk_packages(protocols.__path__, "cflpriv.protocols."):
    importlib.import_module(module.name)
from cflpriv.protocols.events import GaussianEvent, SampledGaussianEvent
from cflpriv.protocols.ledger import Ledger, PrivacyBudget
ledger = Ledger(PrivacyBudget(3.0, 1e-5, "add_remove", "sample"))
ledger.charge({0: [GaussianEvent(8.0, 1.0, "add_remove", "sample"), SampledGaussianEvent(1.0, 0.01, 10, 1.0, "add_remove")]}, "test")
print(ledger.spent(0))
"""
    done = light(code, tmp_path)
    assert done.returncode == 0, done.stderr
    events: list[Event] = [GaussianEvent(8.0, 1.0, "add_remove", "sample"), SampledGaussianEvent(1.0, 0.01, 10, 1.0, "add_remove")]
    assert float(done.stdout) == epsilon_of(events, 1e-5)


@pytest.mark.slow
def test_the_embedding_example_needs_no_extra(tmp_path: Path) -> None:
    code = f"import runpy; runpy.run_path({str(ROOT / 'examples' / 'embed_in_your_fl.py')!r}, run_name='__main__')"
    done = light(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("survivors (0, 1, 2, 3, 5); largest error")


@pytest.mark.slow
def test_each_command_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from cflpriv.cli import main
Path("my.toml").write_text("")
for line in {COMMANDS}:
    sys.argv = ["cflpriv", *line.split()]
    try:
        main()
    except SystemExit as ended:
        print(line.split()[0], ended.code, file=sys.stderr)
"""
    done = light(code, tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert said[1::2] == [f"{line.split()[0]} 2" for line in COMMANDS]
    for line in said[::2]:
        assert re.fullmatch(r"cflpriv: this command needs \w+, which is not installed: pip install 'cflpriv\[train\]'", line)


@pytest.mark.slow
def test_damage_is_named_and_registries_are_listed_without_an_extra(tmp_path: Path) -> None:
    damaged = tmp_path / "run"
    damaged.mkdir()
    (damaged / "config.toml").touch()
    for line, code, words in (("list", 0, "pacfl"), (f"verify {damaged}", 1, "not verified: ")):
        done = light(f"import sys; from cflpriv.cli import main; sys.argv = {['cflpriv', *line.split()]}; main()", tmp_path)
        assert (done.returncode, done.stderr) == (code, "")
        assert words in done.stdout


def test_no_command_is_forgotten_here() -> None:
    known = {one.name or getattr(one.callback, "__name__", "") for one in app.registered_commands}
    assert known == {line.split()[0] for line in COMMANDS} | WITHOUT_EXTRAS


def test_an_import_from_the_package_names_the_extra() -> None:
    code = WITHOUT + "import cflpriv\ncflpriv.simulate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False, cwd=ROOT)
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(r"ModuleNotFoundError: cflpriv\.simulate: needs \w+, which is not installed: pip install 'cflpriv\[train\]'", last)


def test_a_module_that_no_extra_brings_is_not_explained() -> None:
    assert what_to_install(ModuleNotFoundError("x", name="nowhere.at_all")) is None
    assert "[flower]" in (what_to_install(ModuleNotFoundError("x", name="flwr.common")) or "")


# --- the examples, which come with the package -----------------------------------------------------------------------------------------


def test_the_examples_are_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(monkeypatch, "examples", str(tmp_path / "mine")) == 0
    source = ROOT / "examples"
    there = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    made = {path.relative_to(tmp_path / "mine") for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert made == there - {Path("own.csv")}
    assert (tmp_path / "mine" / "pacfl_digits.toml").read_bytes() == (source / "pacfl_digits.toml").read_bytes()
    assert f"{len(made)} files" in capsys.readouterr().out
    assert in_process(monkeypatch, "examples", str(tmp_path / "mine")) == 2
    assert capsys.readouterr().err == f"cflpriv: {tmp_path / 'mine'}: exists; name a new folder\n"


def test_the_package_holds_every_example() -> None:
    declared = PYPROJECT["tool"]["setuptools"]
    packed: set[Path] = set()
    for package in (name for name in declared["packages"] if name.startswith("cflpriv.examples")):
        for pattern in ("*.py", *declared["package-data"].get(package, ())):
            packed |= set(ROOT.joinpath(*package.split(".")[1:]).glob(pattern))
    source = ROOT / "examples"
    there = {path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == there - {source / "own.csv"}


def test_install_lines_ask_the_default_index_for_what_is_there() -> None:
    """cflpriv is in no index, and versions with a local label (`+cpu`) are in other indexes than the default one."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.ipynb"))]
    lines = [line for page in pages for line in re.findall(r"pip install ([^#`\n]+)", page.read_text(encoding="utf-8"))]
    assert len(lines) > 10
    for line in lines:
        assert not re.search(r"\+\w+", line), line


def test_one_version_is_stated_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \((\d{4}-\d{2}-\d{2})\)$", changes, re.MULTILINE)
    assert newest is not None
    assert re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1] == newest[1] == PROJECT["version"]  # type: ignore[index]
    assert re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)[1] == newest[2]  # type: ignore[index]


def test_the_workflow_that_publishes_gives_the_right_to_publish_to_one_job() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8"))["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
