"""`make gpu`: rows, the report and its page, the kit, and the figures of the roofline and of the device's time."""

import json
import subprocess
import sys
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pages
from benchmarks.gpu import busy, kit, report, roofline, rows, session, training, ways
from benchmarks.gpu.rows import Floor, Missing, Row, Setting
from cflpriv.errors import CflprivWarning
from cflpriv.tasks.training import Train


def tiny(out: Path) -> Setting:
    return Setting("cpu", True, out)


def row(name: str, value: float | None, floor: Floor | None = None) -> dict[str, Any]:
    return {**Row("training", name, lambda setting: {}, floor).head, "status": "done", "figures": {"x eager": value}, "note": "5 ms"}


def machine(rehearsal: bool, device: str = "a device") -> dict[str, Any]:
    return {"device": device, "rehearsal": rehearsal, "torch": "2", "cuda": None, "python": "3"}


# --- rows -------------------------------------------------------------------------------------------------------------------------------


def test_a_row_without_its_package_is_skipped_and_one_that_fails_says_why(tmp_path: Path) -> None:
    def missing(setting: Setting) -> rows.Figures:
        raise Missing("fashion_mnist is not in CFLPRIV_DATA")

    def absent(setting: Setting) -> rows.Figures:
        raise ModuleNotFoundError("No module named 'cryptography'")

    def wrong(setting: Setting) -> rows.Figures:
        raise ValueError("no")

    outcomes = [rows.outcome(Row("part", "name", measure), tiny(tmp_path)) for measure in (missing, absent, wrong)]
    assert [(found["status"], found["note"]) for found in outcomes] == [
        ("skipped", "fashion_mnist is not in CFLPRIV_DATA"), ("skipped", "No module named 'cryptography'"), ("failed", "ValueError: no"),
    ]  # fmt: skip


def test_a_step_that_is_not_captured_is_in_the_note_of_its_row(tmp_path: Path) -> None:
    def warning(setting: Setting) -> rows.Figures:
        for text in ("a training step could not be captured as a CUDA graph", "another thing"):
            warnings.warn(text, CflprivWarning, stacklevel=1)
        return {"ms": 1.0, "note": "4 clients"}

    found = rows.outcome(Row("part", "name", warning), tiny(tmp_path))
    assert found["note"] == "4 clients; a training step could not be captured as a CUDA graph"


def test_a_part_that_cannot_be_imported_is_one_row(tmp_path: Path) -> None:
    (found,) = rows.rows_of(tiny(tmp_path), ["no_such_rows"])
    assert rows.outcome(found, tiny(tmp_path))["note"] == "No module named 'no_such_rows'"


def test_a_round_is_measured_against_the_eager_loop_and_the_roofline(tmp_path: Path) -> None:
    figures = training.against_eager(tiny(tmp_path), training.CASES[1], 100)
    assert figures["x eager"] > 0
    assert figures["x roofline"] > 0
    assert figures["difference"] < 1e-4
    assert figures["note"].startswith("4 clients × 20, stacked")


def test_bytes_and_operations_of_a_round_are_counted() -> None:
    """MLP: products of 784 × 200 and 200 × 10, forward and twice backward, but for the gradient of the input."""
    model = training.CASES[1].model
    work = roofline.round_of(Train(model, momentum=0.5), 7, 50)
    first, second = 784 * 200, 200 * 10
    assert work.operations == 7 * 5 * 2 * 10 * (2 * first + 3 * second)
    assert work.bytes == 7 * 5 * (4 * 4 * model.dimension + 10 * (4 * 784 + 8))


def test_every_way_trains_the_same_network(tmp_path: Path) -> None:
    case, setting = training.CASES[0], tiny(tmp_path)
    updates, paths = [], set()
    for _, way in ways.WAYS:
        with way(case.model) as model:
            task = Train(model, momentum=0.5)
            figures, results = training.trained(task, training.clients_of(case, setting, 4), setting)
            updates.append([torch.from_numpy(result["update"]) for result in results])
            paths.add(figures["note"].rpartition(" ")[2])
    assert paths == {"stacked", "vmap"}
    torch.testing.assert_close(updates[1:], updates[:1] * (len(updates) - 1), rtol=1e-3, atol=1e-5)


def test_spans_that_overlap_are_counted_once() -> None:
    assert busy.covered([]) == 0
    assert busy.covered([(5, 6), (0, 2), (1, 3), (1.5, 1.7)]) == 4


def test_a_profile_has_the_longest_operations(tmp_path: Path) -> None:
    page, numbers = tmp_path / "profile.txt", torch.rand(200, 200)
    assert busy.profiled(partial(torch.mm, numbers, numbers), "cpu", page, "a product") > 0
    assert page.read_text(encoding="utf-8").startswith("a product\n")
    assert "aten::mm" in page.read_text(encoding="utf-8")


# --- the report -------------------------------------------------------------------------------------------------------------------------


def test_floors_are_judged_on_a_device_alone() -> None:
    above, below = Floor("x eager", 100.0), Floor("x eager", 1.5, at_least=False)
    judged = [report.judged(row("a", value, floor), True) for floor in (above, below) for value in (1.0, 200.0, None)]
    assert judged == [
        "x eager ≥ 100: FAILS", "x eager ≥ 100: holds", "x eager ≥ 100", "x eager ≤ 1.5: holds", "x eager ≤ 1.5: FAILS", "x eager ≤ 1.5",
    ]  # fmt: skip
    assert report.judged(row("a", 1.0, above), False) == "x eager ≥ 100"
    assert report.judged(row("a", 1.0), True) == ""


def test_rows_are_in_the_order_of_the_suite_and_of_one_machine(tmp_path: Path) -> None:
    made = report.Report(tmp_path)
    assert made.on(machine(False))
    made.order = ["training: a", "training: b"]
    made.add(row("b", 1.0))
    assert made.missing == ["training: a"]
    made.add(row("a", 2.0))
    again = report.read(tmp_path)
    assert list(again.rows) == ["training: a", "training: b"]
    assert again.on(machine(False))
    assert not again.on(machine(False, "another device"))
    assert not again.rows
    assert len(json.loads((tmp_path / "gpu_a_device.json").read_text(encoding="utf-8"))["rows"]) == 2
    (tmp_path / "gpu.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="is no report"):
        report.read(tmp_path)


def test_the_documentation_takes_a_report_and_no_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs, path = tmp_path / "docs", tmp_path / "gpu.json"
    docs.mkdir()
    (docs / "measurements.csv").write_bytes((pages.DOCS / "measurements.csv").read_bytes())
    monkeypatch.setattr(pages, "DOCS", docs)
    with pytest.raises(ValueError, match=r"gpu\.json: is missing"):
        pages.PAGES["measurements"]()
    with pytest.raises(ValueError, match="is missing"):
        report.write(path, docs)
    found = report.Report(tmp_path, machine(True))
    found.add(row("LeNet-5", 3.0, Floor("x eager", 100.0)))
    with pytest.raises(ValueError, match="measures no GPU"):
        report.write(path, docs)
    assert not (docs / "gpu.json").exists()
    found.machine = machine(False)
    found.add(row("LeNet-5", 3.0, Floor("x eager", 100.0)))
    assert report.write(path, docs).startswith(f"{docs / 'gpu.json'}: has 1 rows")
    text = pages.PAGES["measurements"]()
    assert "| LeNet-5 | 3 | x eager ≥ 100: FAILS | 5 ms |" in text


def test_a_log_keeps_its_end(tmp_path: Path) -> None:
    assert session._last_line(tmp_path / "none") == "no message"
    (tmp_path / "log").write_text("first\nlast\n\n", encoding="utf-8")
    assert session._last_line(tmp_path / "log") == "last"


# --- the kit ----------------------------------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def test_the_kit_brings_what_is_needed_and_not_there() -> None:
    needed = kit.needed()
    lacking = {"tomli-w", "msgspec", "cryptography", "pydantic", "rich", "dp-accounting", "tenseal", "opacus"}
    assert lacking | {"cffi", "pydantic-core", "dm-tree"} <= set(needed)
    assert not set(needed) & kit.listed()
    assert "cflpriv" not in needed
    assert not any("+" in version for version in needed.values())


def test_a_kit_above_the_limit_is_refused_in_one_line_and_the_earlier_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def downloaded(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        place = Path(command[command.index("--dest") + 1])
        wheel(place, "some", {"some.py": "x" * 10})
        return subprocess.CompletedProcess(command, 0, "", "")

    data, out = tmp_path / "data", tmp_path / "kit"
    (data / kit.DATA).mkdir(parents=True)
    (data / kit.DATA / "images.gz").write_bytes(bytes(5000))
    monkeypatch.setenv("CFLPRIV_DATA", str(data))
    monkeypatch.setattr(subprocess, "run", downloaded)
    assert kit.main(["--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 0.0 MiB, 1 wheels for Python 3.12, fashion_mnist\n"
    monkeypatch.setattr(kit, "LIMIT", 5000)
    assert kit.main(["--out", str(out)]) == 2
    assert capsys.readouterr().out == f"{out}: not made: the kit has 0.0 MiB, above 0 MiB\n"
    assert (out / "data" / kit.DATA / "images.gz").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"data", "kit"}


def test_a_kit_is_used_by_its_python_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CFLPRIV_DATA", raising=False)
    place = tmp_path / "kit"
    wheel(place / "wheels", "some-1-py3-none-any", {"some.py": "", "some-1.data/platlib/other.py": "", "some-1.data/scripts/run": ""})
    (place / "data").mkdir()
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    (place / "python.txt").write_text(f"{ours}\n", encoding="utf-8")
    found = kit.environment(tmp_path / "first", place)
    packages = Path(found["PYTHONPATH"].split(":")[0])
    assert (packages / "some.py").is_file()
    assert (packages / "other.py").is_file()
    assert found["CFLPRIV_DATA"] == str(place / "data")
    assert list(packages.glob("cflpriv-*.dist-info/METADATA"))
    (place / "python.txt").write_text("2.7\n", encoding="utf-8")
    found = kit.environment(tmp_path / "second", place)
    assert not (Path(found["PYTHONPATH"].split(":")[0]) / "some.py").exists()
    assert "is for Python 2.7" in capsys.readouterr().err
