"""Run a sweep, whole or in parts, with any number of processes and machines over one folder.

A process that makes a run of the sweep holds that run's lock, by a file in `locks/`. Another process leaves the run to it and takes the
next. So several machines that share the folder can each make a part (`part_of`), or all make the same sweep together. The folder itself
is locked only while it is opened and while its tables are written.
"""

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ...console import TimeLeft, counted
from ...errors import InputError
from ...files import write_atomically
from ...protocols.bounded_files import read_bytes, read_json, read_toml
from ..config.config import read_tree
from ..digests import changed_files
from ..run.folder import run_experiment
from ..run.resume import LOCK, held, holds_nothing, locked
from ..run.workers import ended
from .sweep import Sweep, SweepCell

__all__ = ["Audit", "failure_lines", "finished", "kept_words", "locked_sweep", "open_folder", "part_of", "run_sweep", "shown", "standing"]

Audit = Callable[..., Any]
"""What attacks a run folder: called as `audit(folder, data_dir=..., attacks=..., budget=...)`, the last two where the sweep names them."""

OTHER_PROCESS = "another process makes it"
PATIENCE = 60.0
"""Seconds to wait for a process that opens the folder or writes its tables."""


def part_of(sweep: Sweep, only: Sequence[int] = (), shard: str = "") -> tuple[SweepCell, ...]:
    """The runs of these numbers, counted from 1, or those of shard "I/N": every N-th from the I-th on; all where neither is given.

    The shards 1/N to N/N have each run once. Raises `InputError` naming `--only` or `--shard` and the value.
    """
    if only and shard:
        raise InputError(f"--only {only[0]}, --shard {shard}: give one of them")
    count = len(sweep.cells)
    for number in only:
        if not 1 <= number <= count:
            raise InputError(f"--only {number}: the sweep has the runs 1 to {count}; --list shows them")
    if only:
        return tuple(sweep.cells[number - 1] for number in dict.fromkeys(only))
    if not shard:
        return sweep.cells
    first, _, shards = shard.partition("/")
    if not (first.isdecimal() and shards.isdecimal() and 1 <= int(first) <= int(shards)):
        raise InputError(f"--shard {shard}: expected I/N with 1 <= I <= N, such as 1/4")
    return sweep.cells[int(first) - 1 :: int(shards)]


def run_sweep(
    sweep: Sweep,
    out: str | Path,
    data_dir: str | Path | None = None,
    *,
    audit: Audit | None = None,
    workers: int | None = None,
    cells: Sequence[SweepCell] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Run what is missing of a sweep, or of its `cells`, into the folder `out`; the errors of the cells that failed, by name.

    Each run has its folder in `out`. What another process is making is left to it. Raises `InputError` if `out` belongs to something
    else, or for a sweep with `choose`.
    """
    out, cells = Path(out), sweep.cells if cells is None else cells
    if sweep.choose is not None:
        raise InputError(f"{out}: [sweep] choose: all runs of the grid would show; private_choice.run_choice makes the choice")
    open_folder(sweep, out)
    failed = {cell.name: cell.problem for cell in cells if cell.problem}
    with locked_sweep(sweep, out):
        (out / "locks").mkdir(exist_ok=True)
        for name, problem in failed.items():
            _fail(out, name, problem)
    todo = [cell for cell in cells if not cell.problem and not _done(out, cell, sweep, audit)]
    if audit is not None and sweep.audit and any(cell.config and cell.config.run.record == "headers" for cell in cells):
        report("runs that record headers only are not audited; [run] record = 'full' keeps what attacks read")
    part = "" if len(cells) == len(sweep.cells) else f" of {len(sweep.cells)}"
    report(f"{len(cells)} runs{part}: {len(cells) - len(todo) - len(failed)} done before, {len(todo)} to do, {len(failed)} refused")
    work = partial(_run_cell, sweep=sweep, out=out, data_dir=data_dir, audit=audit)
    at_once = min(workers or sweep.workers, len(todo))
    time_left = TimeLeft(len(todo))
    places = {cell.name: number for number, cell in enumerate(todo, 1)}

    def began(name: str) -> None:
        report(f"[{places[name]}/{len(todo)}] {name}: begun")

    for number, (name, trouble) in enumerate(ended(todo, work, at_once, began), 1):
        if trouble and trouble != OTHER_PROCESS:
            failed[name] = trouble
            with _held(out, name) as ours:
                if ours:  # else another process makes it again by now
                    _fail(out, name, trouble)
        report(f"[{places[name]}/{len(todo)}] {name}: {trouble or 'done'}{time_left.words(number) if number >= at_once else ''}")
    return failed


def standing(sweep: Sweep, out: Path) -> dict[str, str]:
    """By name how far each run of the sweep is in the folder `out`: "done", "failed: REASON", "begun" or "missing"."""
    status_of = {}
    for cell in sweep.cells:
        trouble = _marker(out, cell.name)
        if finished(out / cell.name) and not trouble.is_file() and not _auditing(out, cell.name).is_file():
            status_of[cell.name] = "done"
        elif trouble.is_file():
            try:
                status_of[cell.name] = f"failed: {read_json(trouble)['error']}"
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InputError(f"{trouble}: is damaged ({error})") from None
        else:
            status_of[cell.name] = "begun" if (out / cell.name / "config.toml").is_file() else "missing"
    return status_of


def kept_words(sweep: Sweep, out: Path, command: str) -> str:
    """What a sweep that was stopped keeps, and the `command` that goes on."""
    known = Counter(how.partition(":")[0] for how in standing(sweep, out).values()) if (out / "sweep.toml").is_file() else Counter()
    begun = f", {known['begun']} begun {'run goes' if known['begun'] == 1 else 'runs go'} on where saved" if known["begun"] else ""
    return f"stopped: {known['done']} of {counted(len(sweep.cells), 'run')} done and kept{begun}; to go on: {command}"


def shown(sweep: Sweep, out: Path) -> list[str]:
    """A line for each run of a sweep: its number, name and setting, and how far it is in the folder `out`."""
    status_of = standing(sweep, out)
    width = max(len(cell.name) for cell in sweep.cells)
    return [
        f"{number:>{len(str(len(status_of)))}}  {cell.name:<{width}}  {cell.setting.name} · seed {cell.seed}  "
        + (f"refused: {cell.problem.removeprefix(f'{cell.name}: ')}" if cell.problem else status_of[cell.name])
        for number, cell in enumerate(sweep.cells, 1)
    ]


def failure_lines(failed: Mapping[str, str], count: int) -> list[str]:
    """The report of the runs that failed, of `count`: each reason once, with the names of its runs."""
    by_reason: dict[str, list[str]] = {}
    for name, error in failed.items():
        by_reason.setdefault(error.removeprefix(f"{name}: ").replace(name, "RUN"), []).append(name)
    lines = [f"  {len(names)} of {count}: {reason} ({', '.join(names)})" for reason, names in by_reason.items()]
    return [f"failed: {len(failed)} of {count} runs; the same command tries them again", *lines] if lines else []


# --- the folder -----------------------------------------------------------------------------------------------------------------------


def open_folder(sweep: Sweep, out: Path) -> None:
    """Make the folder of a sweep, or go on with it. Raises `InputError` if it belongs to something else."""
    known = out / "sweep.toml"
    if not known.is_file() and out.exists() and not holds_nothing(out) and not known.is_file():  # another process may have made it
        raise InputError(f"{out}: exists and holds no sweep; choose another folder with --out")
    if known.is_file():
        _check_same(sweep, known)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with locked(out, PATIENCE):
            if not known.is_file():
                write_atomically(known, sweep.text)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from None
    _check_same(sweep, known)


@contextmanager
def locked_sweep(sweep: Sweep, out: Path) -> Iterator[None]:
    """Hold the folder of a sweep while something is written into it. Raises `InputError` if it holds no sweep, or another."""
    known = out / "sweep.toml"
    if not known.is_file():
        raise InputError(f"{out}: holds no sweep; name its folder with --out")
    _check_same(sweep, known)
    with locked(out, PATIENCE):
        yield


def _check_same(sweep: Sweep, known: Path) -> None:
    if read_bytes(known) != sweep.text.encode():
        raise InputError(f"{known.parent}: holds another sweep ({_difference(known, sweep.text)}); choose another folder with --out")


def _difference(known: Path, text: str) -> str:
    """The first key by which a folder's sweep differs from this one."""
    old = {section: values for section, values in read_tree(known).items() if isinstance(values, dict)}
    new = tomllib.loads(text)
    for section in sorted({*old, *new}):
        for key in sorted({*old.get(section, {}), *new.get(section, {})}):
            was, now = old.get(section, {}).get(key), new.get(section, {}).get(key)
            if was != now:
                return f"{section}.{key} is {now!r} now, was {was!r}"
    return "another file"


def finished(folder: Path) -> bool:
    """Whether a run folder holds a run that has ended."""
    return (folder / "checkpoints" / "final.json").is_file() and not changed_files(folder, ("summary.json",))


def _done(out: Path, cell: SweepCell, sweep: Sweep, audit: Audit | None) -> bool:
    """Whether a run has ended and was attacked, if it is to be, and no failure is on record, such as an audit that was cut short."""
    folder = out / cell.name
    if not finished(folder) or _marker(out, cell.name).is_file() or _auditing(out, cell.name).is_file():
        return False
    return not _audits(folder, sweep, audit) or (folder / "audit.json").is_file()


def _audits(folder: Path, sweep: Sweep, audit: Audit | None) -> bool:
    recorded = read_toml(folder / "config.toml")["run"]["record"] != "headers"
    return audit is not None and sweep.audit and recorded


def _marker(out: Path, name: str) -> Path:
    return out / "failed" / f"{name}.json"


def _auditing(out: Path, name: str) -> Path:
    """A file that is there while an audit is under way, and stays if the process ends: audit.json grows attack by attack."""
    return out / "locks" / f"{name}.audit"


def _fail(out: Path, name: str, error: str) -> None:
    (out / "failed").mkdir(exist_ok=True)
    write_atomically(_marker(out, name), json.dumps({"cell": name, "error": error}) + "\n")


# --- one run --------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _held(out: Path, name: str) -> Iterator[bool]:
    """Hold a run of the sweep, audit included; whether no other process does."""
    with held(out / "locks" / f"{name}{LOCK}") as ours:
        yield ours


def _run_cell(cell: SweepCell, sweep: Sweep, out: Path, data_dir: str | Path | None, audit: Audit | None) -> str:
    """The error of a cell, `OTHER_PROCESS`, or nothing."""
    assert cell.config is not None
    folder = out / cell.name
    try:
        with _held(out, cell.name) as ours:
            if not ours:
                return OTHER_PROCESS
            if _done(out, cell, sweep, audit):  # by another process, since this one looked
                return ""
            _marker(out, cell.name).unlink(missing_ok=True)
            summary = run_experiment(cell.config, folder, data_dir, resume=True)
            if summary["rounds"] < summary["rounds_planned"] and not summary.get("stopped"):
                return "interrupted"
            if audit is not None and _audits(folder, sweep, audit):
                write_atomically(_auditing(out, cell.name), "")
                wanted = {"attacks": list(sweep.attacks)} if sweep.attacks else {}
                audit(folder, data_dir=data_dir, **wanted, **({"budget": sweep.budget} if sweep.budget else {}))
                _auditing(out, cell.name).unlink()
    except Exception as error:  # whatever it is, it is this cell's: it is recorded, and the other cells go on
        return f"{type(error).__name__}: {error}"
    return ""
