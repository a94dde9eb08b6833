"""The example configs: each parses, and each whose files are here gives clients and a model; the table's script resumes by cells."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cflpriv.data import build_population
from cflpriv.data.named import LOADERS
from cflpriv.data.tables import TABLES
from cflpriv.data.text import TEXTS
from cflpriv.experiments import load_config

FOLDER = Path(os.environ.get("CFLPRIV_DATA") or "absent")
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_example_parses(path: Path) -> None:
    config = load_config(path)
    assert config.data.source in {*LOADERS, *TEXTS, *TABLES, "mixture"}
    assert load_config(path, [f"data.seed={config.data.seed + 1}"]).data != config.data


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="CFLPRIV_DATA names no folder of real data sets")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_example_has_clients(path: Path) -> None:
    config = load_config(path)
    if config.data.source in TABLES:
        pytest.skip("tables are made by their own scripts; see tests/cflpriv/test_own_data_runs.py")
    if config.data.source == "femnist":
        pytest.skip("LEAF's files are not here")
    population = build_population(config.data, FOLDER)
    assert len(population.clients) == config.data.clients
    assert config.model_for(population).dimension > 0


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("which_finds_what", EXAMPLES / "which_finds_what.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_resumes_by_cells(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(table.SETTINGS, "rotated", lambda n: {"source": "digits", "clients": n, "rotations": (0, 90)})
    monkeypatch.setitem(table.SETTINGS, "alike", lambda n: {"source": "digits", "clients": n, "label_shifts": (0, 5)})
    words = ["x", "--out", str(tmp_path), "--clients", "8", "--samples", "60", "--seeds", "2", "--settings", "rotated,alike"]
    monkeypatch.setattr(sys, "argv", [*words, "--algorithms", "pacfl"])
    table.main()
    first = capsys.readouterr().out
    assert "| rotated | 1.00 |" in first
    assert "| alike | no clear structure |" in first
    cells = sorted(tmp_path.glob("*.json"))
    assert len(cells) == 4
    spoilt = json.loads(cells[2].read_text(encoding="utf-8")) | {"ari": 0.25, "clusters": 3}
    cells[2].write_text(json.dumps(spoilt), encoding="utf-8")  # taken as it is: nothing runs twice
    cells[3].unlink()
    table.main()
    again = capsys.readouterr().out
    assert "seed 1" in again
    assert "seed 0" not in again
    assert "| rotated | 0.25 – 1.00 (K 2 – 3) |" in again


def test_the_table_judges_splits(table: ModuleType) -> None:
    """Clients 0..5 in groups 0, 0, 1, 1, 2, 2: the root is split rightly, then a pure side, then a mixed one wrongly."""
    truth = {client: client // 2 for client in range(6)}

    def node(clients: list[int], *children: int) -> dict[str, list[int]]:
        return {"clients": clients, "children": list(children)}

    tree = [node([0, 1, 2, 3, 4, 5], 1, 2), node([0, 1], 3, 4), node([2, 3, 4, 5], 5, 6), node([0]), node([1]), node([2, 4]), node([3, 5])]
    assert table.splits(tree, truth) == {"right": 1, "wrong": 1, "pure": 1}
    assert table.splits((), truth) is None
