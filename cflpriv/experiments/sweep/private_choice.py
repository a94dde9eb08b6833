"""A private choice among the runs of a sweep: only the best of a secret number of runs is kept and shown.

How many runs there are, and the setting of each, is drawn from the system's cryptographic source. Until the choice is made all of it is in
the folder `candidates/` of the sweep, which its owner alone may read, and which is deleted then: whoever can read it sees more than the
guarantee covers. The same command goes on after an interruption. A run that was cut short is removed and made again from its beginning,
with new noise: nobody is shown the first.

A run counts as failed, with the worst score, if it ended with an error, has no score, or spent more than was planned. An error of the
machine (a full disk, a worker that was killed) is none of a run: it ends the command, and the next call makes the run again.

The price is known before anything runs: it is that of the events that the settings of the grid plan, whatever was drawn.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...data import build_population
from ...errors import InputError, WorkerLost
from ...files import write_atomically
from ...protocols.accounting import covers, epsilon_of
from ...protocols.bounded_files import read_json
from ...protocols.entropy import Entropy, system_entropy
from ...protocols.events import Event
from ...protocols.ledger import Ledger
from ...protocols.private_choice import draw_index, draw_runs, epsilon_of_choice, most_runs
from ..run.folder import run_experiment
from ..run.loop import population_digest
from ..run.private import FILE as LEDGER
from ..run.private import planned_events
from ..run.resume import locked
from ..run.run import prepare
from ..run.workers import ended
from .choose import FILE, SCORES, Choose, Chosen, read_chosen, write_chosen
from .sweep import Sweep, SweepCell
from .sweep_runs import finished, open_folder

__all__ = ["run_choice"]

CANDIDATES = "candidates"
DRAWN = "drawn.json"
DECIDED = "decided.json"
FAILED = "failed"
Plans = Mapping[str, tuple[Event, ...]]
"""What a client is charged at most, by the name of the cell."""


def run_choice(
    sweep: Sweep,
    out: str | Path,
    data_dir: str | Path | None = None,
    *,
    workers: int | None = None,
    report: Callable[[str], None] = lambda line: None,
    entropy: Entropy = system_entropy,
) -> Chosen:
    """Make the private choice of a sweep with `choose` in the folder `out`, or go on with it; what was chosen.

    A choice that was made is left alone. No output depends on what was drawn, until the choice is made.

    Raises `InputError` if `out` belongs to something else, a setting cannot run, or the data are not those of the runs so far; OSError
    where the machine ended a run.
    """
    out = Path(out)
    if sweep.choose is None:
        raise InputError(f"{out}: the sweep has no [sweep] choose")
    open_folder(sweep, out)
    with locked(out):
        if (done := read_chosen(out / FILE)) is None:
            done = _made(sweep, sweep.choose, out, data_dir, workers or sweep.workers, report, entropy), {}
        if (out / CANDIDATES).exists():
            shutil.rmtree(out / CANDIDATES)
    return done[0]


def _made(
    sweep: Sweep, choose: Choose, out: Path, data_dir: str | Path | None, workers: int, report: Callable[[str], None], entropy: Entropy
) -> Chosen:
    """Draw, run, decide, and publish; each step only if it was not done before."""
    folder = out / CANDIDATES
    if (decided := read_chosen(folder / DECIDED, ["candidate"])) is None:
        plans, digest = _planned(sweep, data_dir)
        price = _priced(sweep, choose, plans)
        alone = max(epsilon_of(events, price.delta) for events in plans.values())
        report(f"a private choice by {choose.by}: {price.price}; one run alone costs epsilon {alone:.3g} at most")
        report(f"the number of runs is secret, and above {most_runs(choose.law)} in one of 100 choices; the next line comes at the end")
        drawn = _drawn(sweep, choose, folder, digest, entropy)
        _run_all(sweep, drawn, out, data_dir, workers)
        decided = _decided(sweep, choose, drawn, out, plans, price)
        write_chosen(folder / DECIDED, decided[0], **decided[1])
    chosen, beside = decided
    if chosen.run is not None and not (
        chosen.run in {cell.name for cell in sweep.cells} and re.fullmatch(r"\d{6}", str(beside["candidate"]))
    ):  # names of other folders, which would be moved
        raise InputError(f"{folder / DECIDED}: is damaged (run = {chosen.run!r}, candidate = {beside['candidate']!r})")
    if chosen.run is not None and (source := folder / str(beside["candidate"])).is_dir():
        source.rename(out / chosen.run)
    write_chosen(out / FILE, chosen)
    return chosen


def _planned(sweep: Sweep, data_dir: str | Path | None) -> tuple[Plans, str]:
    """What each setting plans to release, and the digest of the data. Whatever cannot run is refused here, before anything is drawn."""
    plans: dict[str, tuple[Event, ...]] = {}
    first = sweep.cells[0].config
    assert first is not None
    population = build_population(first.data, data_dir)
    for cell in sweep.cells:
        assert cell.config is not None
        try:
            run = prepare(cell.config, data_dir, population)
            plans[cell.name] = planned_events(cell.config, run.algorithm, cell.config.schedule(run.expected).most)
            run.backend.close(run)
        except InputError as error:
            raise InputError(f"{cell.name}: {error}") from None
    return plans, population_digest(population)


def _priced(sweep: Sweep, choose: Choose, plans: Plans) -> Chosen:
    """The choice before it is made: its price."""
    config = sweep.cells[0].config
    assert config is not None
    privacy = config.privacy
    try:
        epsilon = epsilon_of_choice(list(plans.values()), privacy.delta, choose.law)
    except ValueError as error:
        raise InputError(f"[sweep] choose.distribution = {choose.distribution!r}: {error}") from None
    return Chosen(
        None, None, choose.by, None, None, epsilon, privacy.delta, privacy.unit, privacy.relation, choose.distribution, choose.runs,
        len(plans),
    )  # fmt: skip


def _drawn(sweep: Sweep, choose: Choose, folder: Path, digest: str, entropy: Entropy) -> Sequence[SweepCell]:
    """The setting of each run, drawn once; a cell's name is its folder below that of the sweep."""
    path = folder / DRAWN
    if not path.is_file():
        places = [draw_index(len(sweep.cells), entropy) for _ in range(draw_runs(choose.law, entropy))]
        folder.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, json.dumps({"cells": [sweep.cells[place].name for place in places], "data_digest": digest}) + "\n")
    cells = {cell.name: cell for cell in sweep.cells}
    try:
        tree = read_json(path)
        known, drawn = str(tree["data_digest"]), [cells[name] for name in tree["cells"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None
    if known != digest:
        raise InputError(f"{folder.parent}: the choice was begun with other data than are found now; give the same --data-dir")
    return [replace(cell, name=f"{CANDIDATES}/{number:06d}") for number, cell in enumerate(drawn)]


def _run_all(sweep: Sweep, drawn: Sequence[SweepCell], out: Path, data_dir: str | Path | None, workers: int) -> None:
    """Make the runs that are missing. Raises OSError where the machine ended one, after the others."""
    todo = [cell for cell in drawn if not finished(out / cell.name) and not _marker(out, cell).is_file()]
    for cell in todo:
        shutil.rmtree(out / cell.name, ignore_errors=True)
    troubles = []
    for name, trouble in ended(todo, partial(_run_candidate, out=out, data_dir=data_dir), min(workers, len(todo))):
        if trouble == FAILED:
            shutil.rmtree(out / name, ignore_errors=True)
            write_atomically(out / f"{name}.{FAILED}", "")
        elif trouble:
            troubles.append(trouble)
    if troubles:
        raise OSError(f"{out}: the choice is not made yet ({troubles[0]}); the same command goes on with it")


def _run_candidate(cell: SweepCell, out: Path, data_dir: str | Path | None) -> str:
    """Empty for a finished run, `FAILED` for a run that failed by itself, else the failure of the machine."""
    assert cell.config is not None
    try:
        with warnings.catch_warnings():  # which would tell of the settings that were drawn; all settings' were shown before
            warnings.simplefilter("ignore")
            summary = run_experiment(cell.config, out / cell.name, data_dir, resume=True)
    except (OSError, MemoryError, WorkerLost) as error:
        return f"{type(error).__name__}: {error}"
    except Exception:  # it may depend on the data, so it is not shown, and the run is not made again
        return FAILED
    return "interrupted" if summary["rounds"] < summary["rounds_planned"] and not summary.get("stopped") else ""


def _marker(out: Path, cell: SweepCell) -> Path:
    return out / f"{cell.name}.{FAILED}"


def _decided(
    sweep: Sweep, choose: Choose, drawn: Sequence[SweepCell], out: Path, plans: Plans, price: Chosen
) -> tuple[Chosen, dict[str, Any]]:  # fmt: skip
    """The best run, the first among equals, and its folder's name; runs are exchangeable, so that their order tells nothing."""
    names = {cell.setting: cell.name for cell in sweep.cells}
    best, winner = -np.inf, None
    for cell in drawn:
        if _marker(out, cell).is_file():
            continue
        summary = read_json(out / cell.name / "summary.json")
        value = summary.get(choose.by)
        score = -np.inf if value is None or not np.isfinite(value) else SCORES[choose.by] * float(value)
        if score > best and _within(out / cell.name, plans[names[cell.setting]]):
            best, winner = score, (cell, summary)
    if winner is None:
        return price, {"candidate": None}
    cell, summary = winner
    chosen = replace(
        price, run=names[cell.setting], setting=cell.setting.name, score=float(summary[choose.by]), epsilon_of_run=float(summary["epsilon"])
    )
    return chosen, {"candidate": Path(cell.name).name}


def _within(folder: Path, plan: Sequence[Event]) -> bool:
    """Whether no client was charged more than was planned."""
    path = folder / LEDGER
    if not path.is_file():
        return True
    ledger = Ledger.open(path)
    return all(covers(plan, ledger.events(client)) for client in ledger.clients)
