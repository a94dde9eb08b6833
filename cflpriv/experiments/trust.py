"""Code that configurations name: which of these files runs, and when.

A configuration names Python files as `[run] plugins`. Three cases:

- The user's own configuration: its files run. The user chose the file.
- A configuration in a run folder or in a sweep's folder, which anybody may have made: its files do not run by themselves. `--plugin FILE`
  runs one file as it is now. `--trust` runs all files that the folder names, each only if its text is the text of the run.
- A command that needs no code (`report`, `verify`) runs none.

Guarantee: no function of this package runs a file because a run folder names it, unless the caller passes `trust=True` or has loaded the
file before. Under `trust=True` a file whose text has changed since the run does not run, and no file runs if `config.toml` or
`environment.json` differ from their digests, which a run writes when it ends. Reveals: nothing is hidden here; whoever makes a folder can
make its digests fit, so `--trust` is a decision about the folder's maker.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..plugins import is_loaded, load_plugin, plugin_digests
from ..protocols.bounded_files import read_json
from .digests import FILE, changed_files

__all__ = ["RECORDED", "code_digests", "idle_code", "in_run_folder", "may_run", "named_code", "run_sections"]

RECORDED = (
    "environment.json", FILE, "rounds.jsonl", "summary.json", "measured.json", "resumes.jsonl", "stages.jsonl", "audit.json",
    "active_audit.json", "transcript/messages.jsonl", "checkpoints/final.json", "checkpoints/round_*.json", ".lock", "locks/*.lock",
    "failed/*.json", "sweep.csv",
)  # fmt: skip
"""What runs, audits and sweeps leave beside their configuration, as patterns. One is enough: a folder may be handed on in part.

Folders that other programs make as well (`checkpoints`, `locks`) are no sign by themselves.
"""


def run_sections(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each section `[run]` of the configuration `tree`: its own, and those of the entries of a sweep."""
    sweep = tree.get("sweep")
    lists = [sweep.get(key) for key in ("algorithms", "protections")] if isinstance(sweep, Mapping) else []
    tables = [tree, *(entry for entries in lists if isinstance(entries, list) for entry in entries)]
    return [run for table in tables if isinstance(table, Mapping) and isinstance(run := table.get("run"), dict)]


def named_code(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """The files that the configuration `tree` names as `[run] plugins`; none where the key is missing or no list of strings."""
    lists = [files for run in run_sections(tree) if isinstance(files := run.get("plugins"), list)]
    return tuple(dict.fromkeys(file for files in lists if all(isinstance(file, str) for file in files) for file in files))


def in_run_folder(path: Path) -> bool:
    """Whether the configuration at `path`, or what that links to, is the record of a run or of a sweep."""
    return _folder_of(path) is not None


def _folder_of(path: Path) -> Path | None:
    """The run folder, or the folder of a sweep, whose record the configuration at `path` is."""
    folders = (path.parent, path.resolve().parent)
    return next((folder for folder in folders if any(any(folder.glob(pattern)) for pattern in RECORDED)), None)


def may_run(path: Path, tree: Mapping[str, Any], trust: bool | None) -> bool:
    """Whether the files that `tree`, the configuration at `path`, names may run.

    `trust` None: a user's own configuration is believed, the record of a run is not. With `trust` the files of a record run here, after
    their digests were checked. Raises `InputError` naming a file that is not as the run left it.
    """
    folder = _folder_of(path)
    if trust and folder is not None:
        _run_as_recorded(folder, named_code(tree))
    return folder is None if trust is None else trust


def idle_code(path: Path, tree: Mapping[str, Any]) -> str:
    """Which files of `tree`, the record at `path`, did not run in this process, and how to allow them: a line; empty if there is none."""
    files = [file for file in named_code(tree) if not is_loaded(file)]
    as_left = "" if "sweep" in tree else "--trust (as the run left it) or "
    allow = f"allow it with {as_left}--plugin FILE (as it is now)"
    return f"{path}: run.plugins = {files}: is code that did not run; {allow}" if files else ""


def code_digests(files: Sequence[str]) -> dict[str, str]:
    """What a run writes down of its plugin `files`, which are loaded: the digest of each text."""
    known = plugin_digests()
    return {str(file): known[str(file)] for file in (Path(file).resolve() for file in files)}


def _run_as_recorded(folder: Path, files: Sequence[str]) -> None:
    """Run the `files` that the record in a run folder names, each with the text that the run had."""
    waiting = [file for file in files if not is_loaded(file)]
    if not waiting:
        return
    if (folder / FILE).is_file():
        for problem in changed_files(folder, ("config.toml", "environment.json")):
            raise InputError(problem)
    try:
        known = read_json(folder / "environment.json")["plugins"]
        digests = {file: str(known[file]) for file in waiting}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{folder / 'environment.json'}: holds no digest of {', '.join(waiting)}; --plugin FILE runs a file as it is now"
        ) from None
    if missing := [file for file in waiting if not Path(file).is_file()]:
        raise InputError(f"{folder}: {', '.join(missing)}: no such file here; --plugin FILE runs it from another place")
    try:
        for file, digest in digests.items():
            load_plugin(file, digest)
    except InputError as error:
        raise InputError(f"{folder / 'config.toml'}: {error}") from None
