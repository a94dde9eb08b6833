"""The notebook runs from top to bottom, is stored without outputs, and is linked from the site."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "researcher.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    tree = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in tree["cells"] if cell["cell_type"] == kind]


def code(**settings: object) -> list[str]:
    """The code cells, with other values of the settings of the first one."""
    first, *rest = ["".join(cell["source"]) for cell in cells("code")]
    for name, value in settings.items():
        first, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value}  ", first, flags=re.MULTILINE)
        assert count == 1, name
    return [first, *rest]


def test_it_is_stored_without_outputs_and_linked() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells("code"))
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
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=1000, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "clusters: accuracy" in printed
    assert "2 clusters, ARI 1.0" in printed
    assert any("image/png" in output.get("data", {}) for output in outputs), "the front is drawn"
    assert "label_inference" in printed
    assert (tmp_path / "notebook_runs" / "front" / "report.html").is_file()
