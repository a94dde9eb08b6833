"""`make gpu` rehearsed on the CPU: parts, what is missing, what is made again, and the page."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu

TINY = gpu.Setting("cpu", True)


def machine(rehearsal: bool) -> dict[str, Any]:
    return {"device": "a device", "rehearsal": rehearsal, "torch": "2", "cuda": None, "python": "3"}


def test_parts_that_are_there_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def outcome(name: str, setting: gpu.Setting) -> dict[str, Any]:
        made.append(name)
        return {"status": "failed" if len(made) == 2 else "done", "note": "", "took": 0.0}

    monkeypatch.setattr(gpu, "measured", outcome)
    words = ["--device", "cpu", "--tiny", "--out", str(tmp_path / "gpu.json")]
    assert gpu.main(words) == 1
    assert gpu.main(words) == 0
    assert made == [*gpu.PARTS, list(gpu.PARTS)[1]], "what failed, and no more"
    assert gpu.main([*words, "--part", "audit"]) == 0
    assert made[-1] == "audit"
    assert list(json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["parts"]) == list(gpu.PARTS)


def test_a_part_without_its_package_is_skipped_and_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(setting: gpu.Setting) -> dict[str, Any]:
        raise ModuleNotFoundError("No module named 'cryptography'")

    def wrong(setting: gpu.Setting) -> dict[str, Any]:
        raise ValueError("no")

    monkeypatch.setattr(gpu, "PARTS", {"missing": missing, "wrong": wrong})
    assert [(one["status"], one["note"]) for one in (gpu.outcome(name, TINY) for name in gpu.PARTS)] == [
        ("skipped", "No module named 'cryptography'"), ("failed", "ValueError: no"),
    ]  # fmt: skip


def test_the_engine_and_the_algebra_are_rehearsed_on_the_cpu() -> None:
    for name in ("engine, 10 clients", "signatures and angles"):
        assert gpu.outcome(name, TINY)["ratio"] > 0


@pytest.mark.slow
def test_all_parts_are_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--tiny", "--out", str(report)]) == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["machine"]["rehearsal"]
    assert set(found["parts"]) == set(gpu.PARTS)


def test_the_page_takes_a_report_and_no_rehearsal(tmp_path: Path) -> None:
    page, report = tmp_path / "page.md", tmp_path / "gpu.json"
    page.write_text(f"before\n{gpu.MARKS[0]}\nnot measured\n{gpu.MARKS[1]}\nafter\n", encoding="utf-8")
    parts = {"engine, 10 clients": {"status": "done", "ratio": 3.0, "against": "eager loop", "note": "5 ms"}}
    with pytest.raises(ValueError, match="is missing"):
        gpu.write(report, page)
    report.write_text(json.dumps({"machine": machine(True), "parts": parts}), encoding="utf-8")
    with pytest.raises(ValueError, match="measures no GPU"):
        gpu.write(report, page)
    assert "measures no GPU" in gpu.table(json.loads(report.read_text(encoding="utf-8")))
    report.write_text(json.dumps({"machine": machine(False), "parts": parts}), encoding="utf-8")
    gpu.write(report, page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| engine, 10 clients | 3.00 | – | eager loop: 5 ms |" in text
    assert "not measured" not in text
    gpu.write(report, page)
    assert page.read_text(encoding="utf-8") == text


def test_the_page_of_the_documentation_has_a_place_for_it() -> None:
    text = (gpu.ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    assert all(text.count(mark) == 1 for mark in gpu.MARKS)


def test_without_a_device_it_says_how_to_rehearse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--device cpu" in capsys.readouterr().out
