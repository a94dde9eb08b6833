"""Every block of the tutorials, and of how-to pages that are scripts, runs in its order in a new folder."""

import asyncio
import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT

from cflpriv.cli import app
from cflpriv.experiments.config.config import parse_config

DOCS = ROOT / "docs"
SERVICE = ROOT / "examples" / "embedding" / "over_fastapi"
TUTORIALS = [
    *sorted((DOCS / "tutorials").glob("*.md")),
    *(DOCS / "howto" / name for name in ("callbacks.md", "fastapi.md", "own_algorithm.md")),
]
FENCE = re.compile(r"^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    exit: int
    body: str


def blocks(page: Path) -> list[Block]:
    found = []
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        options = dict(re.findall(r'(\w+)="([^"]*)"', match["options"]))
        found.append(Block(match["language"], options.get("title", ""), int(options.get("exit", 0)), match["body"]))
    return found


def commands(block: Block) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.body.splitlines() if line]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_each_block_is_a_file_or_commands(page: Path) -> None:
    known = {one.name or getattr(one.callback, "__name__", "") for one in app.registered_commands}
    files = {block.title for block in blocks(page)}
    assert len(blocks(page)) == page.read_text(encoding="utf-8").count("\n```") // 2
    for block in blocks(page):
        match block.language:
            case "python":
                compile(block.body, block.title, "exec")
                assert block.title.endswith(".py")
            case "toml":
                tree = tomllib.loads(block.body)
                if "plugins" not in tree.get("run", {}):  # its names are known after its file was written, in a run of the page
                    parse_config({name: keys for name, keys in tree.items() if name != "sweep"})
                assert block.title.endswith(".toml")
            case "sh":
                for program, first, *_ in commands(block):
                    assert (program == "cflpriv" and first in known) or (program == "python" and first in files), f"{program} {first}"
            case _:
                assert block.language == "text"


def run_blocks(page: Path, folder: Path) -> str:
    """Write and run all blocks of a page; what the commands printed. Each ends with 0, the last of a block with its `exit`."""
    printed = ""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
        for number, words in enumerate(commands(block) if block.language == "sh" else [], 1):
            start = [sys.executable, *(["-m", "cflpriv"] if words[0] == "cflpriv" else []), *words[1:]]
            done = subprocess.run(
                start, capture_output=True, encoding="utf-8", check=False, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            wanted = block.exit if number == len(commands(block)) else 0
            assert done.returncode == wanted, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
            printed += done.stdout
    return printed


def page_of(name: str) -> Path:
    return next(page for page in TUTORIALS if page.stem == name)


@pytest.mark.slow
def test_the_engineer_gets_sums_by_cluster(tmp_path: Path) -> None:
    printed = run_blocks(page_of("engineer"), tmp_path)
    shown = next(block.body for block in blocks(page_of("engineer")) if block.language == "text")
    assert re.sub(r"\S+e-\d+", "", printed) == re.sub(r"\S+e-\d+", "", shown)
    errors = [float(number) for number in re.findall(r"\S+e-\d+", printed)]
    assert len(errors) == 2
    assert max(errors) < 1e-6


@pytest.mark.slow
def test_a_service_that_is_killed_loses_no_sum(tmp_path: Path) -> None:
    for module in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    for path in SERVICE.glob("*.py"):
        shutil.copy(path, tmp_path)
    done = subprocess.run(
        [sys.executable, "run.py"],
        capture_output=True,
        encoding="utf-8",
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    shown = next(block.body for block in blocks(page_of("fastapi")) if block.language == "text")
    assert list(dict.fromkeys(done.stdout.splitlines())) == shown.splitlines()


def test_pages_quote_their_examples() -> None:
    """Lines of code on the pages that tell how an example works are in the example, up to what the page names otherwise."""
    quoted = [line.strip() for line in indented("own_algorithm") if "Halve" in line or "labels" in line or "values" in line]
    text = (ROOT / "examples" / "own_clustering.py").read_text(encoding="utf-8")
    assert len(quoted) > 5
    assert [line for line in quoted if line not in text] == []
    text = "".join(path.read_text(encoding="utf-8") for path in SERVICE.glob("*.py"))
    named = set(re.findall(r"\b[A-Z]\w+(?=\()", "\n".join(indented("fastapi"))))
    assert named == {"SumPlan", "Coordinator", "Policy", "Contribution", "DurableClient"}
    assert all(f"{name}(" in text for name in named)
    listed = set(re.findall(r"^\| `(\w+\.py)`", page_of("fastapi").read_text(encoding="utf-8"), re.MULTILINE))
    assert {*listed, "run.py"} == {path.name for path in SERVICE.glob("*.py")}


def test_the_service_takes_thirty_lines() -> None:
    lines = (SERVICE / "service.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith('"""')]) <= 30


def indented(name: str) -> list[str]:
    """The indented lines of a page outside of fences."""
    return [line for line in FENCE.sub("", page_of(name).read_text(encoding="utf-8")).splitlines() if line.startswith("    ")]


def test_a_body_without_a_length_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fastapi", "httpx"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    body = dict[str, Any]()
    exec((SERVICE / "parties.py").read_text(encoding="utf-8"), body)
    given = 0

    async def stream() -> AsyncIterator[bytes]:
        nonlocal given
        while given < 100:
            given += 1
            yield bytes(10)

    request = SimpleNamespace(stream=stream)
    with pytest.raises(body["HTTPException"]):
        asyncio.run(body["body"](request, 25))
    assert given == 3
    assert asyncio.run(body["body"](request, 970)) == bytes(970)


@pytest.mark.slow
def test_the_researcher_finds_the_groups(tmp_path: Path) -> None:
    printed = run_blocks(page_of("researcher"), tmp_path)
    clustered, one_model, private, noisy = re.findall(r"^\w+, protection .*?accuracy ([\d.]+) %", printed, re.MULTILINE)
    assert printed.count("2 clusters of 2 true groups, ARI 1.000") >= 2
    assert printed.count("1 cluster of 2 true groups") >= 2, "noise hides the groups, and one model serves neither"
    assert abs(float(noisy) - 50) < 10  # as by chance: of 8 runs the mean was 49.8, the deviation .6
    assert "epsilon 8 of 8 spent at delta 0.0001" in printed
    assert float(clustered) > float(one_model) + 10
    assert abs(float(clustered) - float(private)) < 1
    assert "failed" not in printed
    assert (tmp_path / "runs" / "front" / "report.html").is_file()
    with (tmp_path / "runs" / "front" / "front.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["utility"] == "accuracy_mean" and row["adversary"] == "server"]
    points = {(row["algorithm"], row["protection"]): row for row in rows if row["metric"] == "histogram_l1"}
    assert len(points) == 4
    assert all(row["validated"] == "True" for row in points.values())
    error, guess = ({key: float(row[name]) for key, row in points.items()} for name in ("leakage", "guess_with_no_view"))
    for algorithm in ("crossfit", "fedavg"):
        assert error[algorithm, "none"] < 0.5 * guess[algorithm, "none"]
        assert error[algorithm, "haar + secagg"] > 0.9 * guess[algorithm, "haar + secagg"]
    assert points["crossfit", "haar + secagg"]["on_front"] == "True"


@pytest.mark.slow
def test_the_auditor_finds_a_leak_and_a_changed_folder(tmp_path: Path) -> None:
    printed = run_blocks(page_of("auditor"), tmp_path)
    assert "verified: runs/open" in printed
    assert "not verified: " in printed
    assert "leaks" in printed
    assert "not_attempted" in printed, "under a rotation signatures are not inverted"
    assert (tmp_path / "updates" / "audit.json").is_file()


@pytest.mark.slow
def test_a_callback_follows_a_run(tmp_path: Path) -> None:
    run_blocks(page_of("callbacks"), tmp_path)
    log = [json.loads(line) for line in (tmp_path / "runs" / "logged" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [one["round"] for one in log if "round" in one] == [0, 1]
    assert sum("bytes" in one for one in log) > 2


@pytest.mark.slow
def test_an_own_algorithm_is_run_swept_and_audited(tmp_path: Path) -> None:
    printed = run_blocks(page_of("own_algorithm"), tmp_path)
    assert "failed" not in printed
    assert "label_inference" in printed
    assert len(list((tmp_path / "runs" / "mine").glob("*/summary.json"))) == 4
    assert "halves, protection gram=haar, sum=secagg: " in printed
    assert "2 clusters of 2 true groups, ARI 1.000" in printed
