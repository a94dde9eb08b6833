"""The notebooks run from top to bottom and are stored without outputs; that of the site is linked from it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "researcher.ipynb"
EXAMPLES = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(kind: str, book: Path = NOTEBOOK) -> list[dict[str, Any]]:
    tree = json.loads(book.read_text(encoding="utf-8"))
    return [cell for cell in tree["cells"] if cell["cell_type"] == kind]


def executed(book: Path, folder: Path) -> list[Any]:
    """The outputs of a notebook that ran in a kernel, in a folder."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    tree = nbformat.read(book, as_version=4)
    nbformat.validate(tree)
    nbclient.NotebookClient(tree, timeout=1000, resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in tree.cells if cell.cell_type == "code" for output in cell.outputs]


def code(**settings: object) -> list[str]:
    """The code cells, with other values of the settings of the first one."""
    first, *rest = ["".join(cell["source"]) for cell in cells("code")]
    for name, value in settings.items():
        first, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value}  ", first, flags=re.MULTILINE)
        assert count == 1, name
    return [first, *rest]


@pytest.mark.parametrize("book", [NOTEBOOK, *EXAMPLES], ids=lambda book: book.stem)
def test_they_are_stored_without_outputs(book: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells("code", book))


def test_it_is_linked() -> None:
    assert "(../notebooks/researcher.ipynb)" in (ROOT / "docs" / "tutorials" / "researcher.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:\s]+)", "".join("".join(cell["source"]) for cell in cells("markdown"))):
        assert (NOTEBOOK.parent / target).exists(), target


def test_its_first_cells_run_as_plain_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those before the private run; the slow test runs all of them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for place, source in enumerate(sources := code(ROUNDS=2, SAMPLES=24)):
        compiled = compile(source, f"cell {place}", "exec")
        if "PRIVACY" not in "".join(sources[: place + 1]):
            exec(compiled, names)
    assert "clusters: accuracy" in capsys.readouterr().out
    assert names["one_model"]["clusters"] == 1


@pytest.mark.slow
def test_it_runs_in_a_kernel(tmp_path: Path) -> None:
    outputs = executed(NOTEBOOK, tmp_path)
    printed = "".join(output.get("text", "") for output in outputs)
    assert "clusters: accuracy" in printed
    assert "2 clusters, ARI 1.0" in printed
    assert any("image/png" in output.get("data", {}) for output in outputs), "the front is drawn"
    assert "label_inference" in printed
    assert (tmp_path / "notebook_runs" / "front" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "page"),
    [("groups_in_a_table", "2 clusters, p = 0.002", "report.html"), ("audit_a_torch_loop", "the server learns which labels", "audit.html")],
)
def test_the_examples_run_in_a_kernel(name: str, words: str, page: str, tmp_path: Path) -> None:
    assert name in {book.stem for book in EXAMPLES}
    outputs = executed(ROOT / "examples" / f"{name}.ipynb", tmp_path)
    assert words in "".join(output.get("text", "") for output in outputs)
    assert any("<iframe srcdoc=" in output.get("data", {}).get("text/html", "") for output in outputs), "the page is shown"
    assert (tmp_path / page).is_file()
