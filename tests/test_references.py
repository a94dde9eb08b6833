"""The generated pages of commands, run folders and error codes are up to date, and name all that there is."""

import json
from fnmatch import fnmatch
from pathlib import Path

from checkout import ROOT

from cflpriv.cli import app, command_reference
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.run import folder_reference
from cflpriv.federation import error_codes

REFERENCE = ROOT / "docs" / "reference"


def test_the_page_of_commands_is_up_to_date() -> None:
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    assert text == command_reference.page(), "python -m cflpriv.cli.command_reference > docs/reference/commands.md"
    for one in app.registered_commands:
        assert f"\n## {one.name or getattr(one.callback, '__name__', '')}\n" in text
    assert "|  |" not in text


def test_the_page_of_run_folders_is_up_to_date() -> None:
    text = (REFERENCE / "run_folder.md").read_text(encoding="utf-8")
    assert text == folder_reference.page(), "python -m cflpriv.experiments.run.folder_reference > docs/reference/run_folder.md"


def test_the_page_of_error_codes_is_up_to_date() -> None:
    text = (REFERENCE / "error_codes.md").read_text(encoding="utf-8")
    assert text == error_codes.page(), "python -m cflpriv.federation.error_codes > docs/reference/error_codes.md"
    assert all(f"`{code}`" in text for code in error_codes.MEANINGS)


def described(pattern: str) -> set[str]:
    (one,) = [one for one in folder_reference.FILES if one.pattern == pattern]
    return {name for names in one.keys for name in names.split(", ")}


def test_it_names_every_file_and_key_of_a_run(tmp_path: Path) -> None:
    data = {"source": "digits", "clients": 4, "rotations": [0, 90]}
    config = parse_config({"data": data, "model": {"hidden": 4}, "training": {"rounds": 2}, "run": {"record": "full"}})
    run_experiment(config, tmp_path / "run")
    for path in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        name = path.relative_to(tmp_path / "run").as_posix()
        assert any(fnmatch(name, one.pattern) for one in folder_reference.FILES), name
    read = {name: (tmp_path / "run" / name).read_text(encoding="utf-8") for name in ("rounds.jsonl", "summary.json", "environment.json")}
    rows = [json.loads(line) for line in read["rounds.jsonl"].splitlines()]
    assert {name for row in rows for name in row} <= described("rounds.jsonl")
    assert set(json.loads(read["summary.json"])) <= described("summary.json")
    assert set(json.loads(read["environment.json"])) == described("environment.json")
