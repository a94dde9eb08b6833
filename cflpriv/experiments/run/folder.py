"""A run folder: rounds written as they end, checkpoints, resumption, and the ground truth that only the experimenter sees."""

import json
import os
import platform
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from ...algorithms.shared.grouping import p_words
from ...contract.transcript import Transcript
from ...data import build_population, data_directory
from ...data.text import TEXTS
from ...errors import InputError
from ...federation.registry import EpochEnded
from ...files import append, write_atomically, write_packed
from ...plugins import load_plugin
from ...protocols.bounded_files import read_json
from ...transports.simulation import Hosted
from ...types import Population
from ..config.callbacks import Callback, Callbacks
from ..config.config import Config
from ..digests import changed_files, record_digests
from ..trust import code_digests
from .advising import conclude
from .checkpoint import Checkpoint, prune, restore, save_checkpoint
from .loop import Experiment, advance, begin, check_same_data, finish, population_digest
from .private import charges, guarantee, keep_ledger
from .resume import (
    check_same_config,
    data_directory_of,
    holds_nothing,
    kept_rows,
    last_checkpoint,
    locked,
    note_resume,
    put_aside,
    put_audit_aside,
)
from .run import admit, estimate_record_bytes, prepare

__all__ = ["carry_out", "environment", "interruptible", "plain_json", "run_experiment"]


def run_experiment(
    config: Config,
    out: str | Path,
    data_dir: str | Path | None = None,
    *,
    resume: bool = False,
    population: Population | None = None,
    hosted: Hosted | None = None,
    report: Callable[[str], None] = lambda line: None,
    tick: Callable[[dict[str, Any]], None] = lambda row: None,
    step: Callable[[str, int, int], None] = lambda activity, done, total: None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Simulate an experiment into the folder `out`; the summary, and all else, as in `carry_out`. `hosted`: where its clients are."""

    data_dir = data_dir or (data_directory_of(Path(out)) if resume else None)
    places = {"data_directory": str(data_directory(data_dir).resolve())}

    def make(checkpoint: Checkpoint | None) -> Experiment:
        if checkpoint is None:
            return prepare(config, data_dir, population, hosted=hosted)
        people = population or build_population(config.data, data_dir)
        check_same_data(Path(out), checkpoint.progress.get("data_digest"), people)
        return prepare(config, data_dir, people, hosted=hosted, **checkpoint.parties())

    return carry_out(config, Path(out), make, resume=resume, report=report, tick=tick, step=step, places=places, callbacks=callbacks)


def carry_out(
    config: Config,
    out: Path,
    make: Callable[[Checkpoint | None], Experiment],
    *,
    resume: bool,
    report: Callable[[str], None],
    tick: Callable[[dict[str, Any]], None],
    step: Callable[[str, int, int], None] = lambda activity, done, total: None,
    places: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
    patience: float = 0.0,
) -> dict[str, Any]:
    """Run an experiment into the folder `out`; the summary. `make` gives the run: a new one, or the one that a checkpoint is of.

    `tick` gets each round's row, `report` lines for people, `step` the progress (what, done, total) of a long step inside a round.
    `places`, absolute paths by name, are kept in environment.json. `callbacks` follow the run beside those that `run.callbacks` names.
    Another process that has the folder of a run that is to be resumed is waited for, up to `patience` seconds.

    Nothing is kept unless the data and the algorithm's start succeed. A checkpoint is saved after the beginning and after
    every `run.checkpoint_every`-th round, in a simulation as long as checkpoints take a small share of the run's time; only the last is
    kept. Ctrl-C ends after the current round with everything saved. With
    `resume`, a run that ended early resumes from its last checkpoint (see `resume`), a finished one is left unchanged, and one that never
    started is started. Raises `InputError`, also if `out` exists and is not to be resumed; OSError where something cannot be written,
    and `CallbackFailed`, with all rounds before that in place.
    """
    observers = Callbacks(callbacks, report)
    for file in config.run.plugins:  # a process that was sent the configuration has not read it
        load_plugin(file)

    def waiting() -> None:
        observers.report(f"waiting up to {patience:g} s for another process that has {out}")

    def made(checkpoint: Checkpoint | None) -> Experiment:
        run = make(checkpoint)
        observers.make(config.run.callbacks)
        run.places = places or {}
        run.report, run.digest = observers.report, population_digest(run.population)
        run.federation.listen(observers.report, lambda done, total: step("encrypted similarity", done, total))
        return run

    old = (out / "config.toml").is_file()
    if resume and old:
        check_same_config(config, out)
    elif out.exists() and not (resume and holds_nothing(out)):
        again = ", or continue with --resume" if old and not resume else ""
        raise InputError(f"{out}: the output folder exists; choose another with --out, or remove it{again}")
    try:
        if old:
            with locked(out, patience, waiting):
                return _resumed(config, out, made, observers, tick)
        run = made(None)
        missing = [folder for folder in (out, *out.parents) if not folder.exists()]
        before = frozenset() if missing else frozenset(out.iterdir())
        try:
            out.mkdir(parents=True, exist_ok=resume)
        except OSError as error:
            raise InputError(f"{out}: cannot be made ({error.strerror})") from None
        with locked(out):
            if (out / "config.toml").is_file():
                raise InputError(f"{out}: another process made this run meanwhile; the same command goes on with it")
            try:
                return _started(run, out, observers, tick)
            except InputError:
                if not (out / "rounds.jsonl").exists() and not (out / "ledger.json").exists():
                    _removed(out, before, missing)
                raise
            except OSError:
                with suppress(OSError):
                    if holds_nothing(out):
                        _removed(out, before, missing)
                raise
    except EpochEnded as error:
        raise InputError(f"{out}: {error}: the run cannot be resumed; start a new one") from None
    except OSError as error:
        if error.filename is None:  # not of a file: a connection, say
            raise
        kept = "everything completed is saved; make room or access, and continue with --resume"
        raise OSError(error.errno, f"{error.strerror} ({kept})", error.filename) from None


def _removed(out: Path, before: Set[Path], made: Sequence[Path]) -> None:
    """Remove what a run that has not begun left: all in its folder that was not there `before`, and the folders that were `made` for it."""
    with suppress(OSError):  # a folder holds other files by now
        for path in set(out.iterdir()) - before:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink()
        for folder in made:
            folder.rmdir()


def _started(run: Experiment, out: Path, observers: Callbacks, tick: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Start a new run, in a folder that holds none yet."""
    record = {**environment(run.config), **run.places}
    write_atomically(out / "config.toml", run.config.to_toml())
    write_atomically(out / "environment.json", json.dumps(record, indent=1) + "\n")
    run.backend.welcome(run, None)
    keep_ledger(run.run_ledger, out)
    with naming_clients(run.population.client_names):
        begin(run)
    run.backend.write(run, out)
    _announce(run)
    flush(run.federation.transcript, out, 0)
    _save(run, out)
    return _rounds(run, out, observers, tick)


@contextmanager
def naming_clients(names: Sequence[str]) -> Iterator[None]:
    """Name a client by its `names`, beside its number, at the beginning of an error: users know the table's names alone."""
    try:
        yield
    except InputError as error:
        found = re.match(r"client (\d+)(?=: )", str(error))
        if found and int(found[1]) < len(names):
            error.args = (f"{found[0]} ({names[int(found[1])]!r}){str(error)[found.end() :]}",)
        raise


def _resumed(
    config: Config, out: Path, make: Callable[[Checkpoint | None], Experiment], observers: Callbacks, tick: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Resume a run from its last checkpoint; from its start, if it ended before the first."""
    checkpoint = last_checkpoint(out)
    summary = out / "summary.json"
    if checkpoint is not None and checkpoint.path.stem == "final" and summary.is_file():
        done: dict[str, Any] = {}
        with suppress(ValueError):  # a damaged summary is written anew
            done = read_json(summary)
        sealed = not changed_files(out, ("summary.json",))  # else it was edited, or a kill came in between
        if sealed and done.get("rounds") == checkpoint.progress["rounds"]:  # else it is that of an earlier Ctrl-C
            observers.report(f"{out}: this run is done")
            return done
    run = make(checkpoint)
    # deployments of an early 0.2.0 saved less
    nothing = dict.fromkeys(("admitted", "advice", "mixture", "stopped"))
    progress: dict[str, Any] = {"data_digest": run.digest, "newcomers": [], **nothing}
    if checkpoint is not None:
        progress |= checkpoint.progress
        _same(run, out, progress)
    number = note_resume(out, checkpoint)
    if checkpoint is None:
        put_aside(out, number, 0, 0)
        observers.report(f"resumed: {out} ended before its first checkpoint; it starts again")
        return _started(run, out, observers, tick)
    moved = put_aside(out, number, progress["rounds"], progress["transcript"]["messages"])
    if progress["rounds"] < config.training.rounds and progress["stopped"] is None:
        put_audit_aside(out, number)
    run.federation.transcript.restore(out / "transcript", progress["transcript"])
    run.state = restore(checkpoint, run.federation, 0 if progress.get("entropy") else number)  # test entropy resumes at its position
    run.rows, run.admitted, run.stopped = kept_rows(out, progress["rounds"]), progress["admitted"], progress["stopped"]
    run.advice, run.mixture = progress["advice"], progress["mixture"]
    run.started -= sum(row["seconds"] for row in run.rows)
    run.federation.protection_seconds = run.rows[-1].get("protection_seconds", 0.0) if run.rows else 0.0
    words = "".join(f", {count} {noun} of an interrupted round put aside" for noun, count in moved.items() if count)
    observers.report(f"resumed after round {len(run.rows)} of {config.training.rounds}{words}")
    run.backend.welcome(run, progress)
    return _rounds(run, out, observers, tick)


def _same(run: Experiment, out: Path, progress: Mapping[str, Any]) -> None:
    """`InputError` if the run cannot be resumed: other data, other newcomers, a ledger without some charges."""
    if progress["data_digest"] != run.digest:
        raise InputError(f"{out}: the run was made with other data than are found now; give the same --data-dir")
    if list(run.newcomers) != progress["newcomers"]:
        raise InputError(
            f"{out}: the run holds other clients back than this version would as data.newcomers = {len(run.newcomers)} "
            f"({progress['newcomers']}, now {list(run.newcomers)}); start a new run"
        )
    keep_ledger(run.run_ledger, out, progress["charges"])


FREE_SAVING, SAVING_SHARE = 1.0, 0.05
"""Seconds that the checkpoints of a simulation may take, and beyond them the share of the time of its rounds."""


def _rounds(run: Experiment, out: Path, observers: Callbacks, tick: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run the remaining rounds, saving each, and finish."""
    try:
        with naming_clients(run.population.client_names):
            return _finished(run, out, observers, tick)
    except Exception as error:
        observers.failed(error)
        raise


def _finished(run: Experiment, out: Path, observers: Callbacks, tick: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    rounds, messages = run.config.training.rounds, run.federation.transcript.messages
    written = reported = len(messages)
    saving, began = 0.0, time.perf_counter()
    observers.start(out, run.config, len(run.rows))
    with interruptible() as interrupted:
        while len(run.rows) < rounds and not interrupted() and run.stopped is None:
            row = advance(run)
            append(out / "rounds.jsonl", json.dumps(plain_json(row)) + "\n")
            written = flush(run.federation.transcript, out, written)
            regular = len(run.rows) % run.backend.save_every == 0 and (run.parties is None or _affordable(saving, began))
            if interrupted() or regular or run.federation.checkpoint_due:
                saving += _save(run, out)
            tick(row)
            observers.round(plain_json(row), messages[reported:])
            reported = len(messages)
        done = len(run.rows) == rounds or not interrupted()
        if done and run.stopped is not None:
            run.report(f"stopped after round {len(run.rows)} of {rounds}: {run.stopped}")
        elif done:
            conclude(run)
            if run.admitted is None:
                admit(run)
        summary = finish(run)
        for line in summary["warnings"][len(run.config.doubts) :]:  # the others were shown at the start
            run.report(f"warning: {line}")
        flush(run.federation.transcript, out, written)
        _save(run, out, "final" if done else "")
        if not done:
            run.report(f"interrupted: stopped after round {len(run.rows)} of {rounds}; everything is saved; continue with --resume")
        run.backend.write(run, out)
        _measured(run, out)
        run.backend.close(run)
        write_atomically(out / "summary.json", json.dumps(plain_json(summary), indent=1) + "\n")
        record_digests(out)
    observers.end(plain_json(summary))
    return summary


def _affordable(saving: float, began: float) -> bool:
    """Whether checkpoints, which have taken `saving` seconds since `began`, may take more. Remote clients rely on every one."""
    return saving < FREE_SAVING + SAVING_SHARE * (time.perf_counter() - began)


def _save(run: Experiment, out: Path, name: str = "") -> float:
    """Write a checkpoint of the run after everything it refers to is on the disk; remove earlier ones. The seconds it took."""
    began = time.perf_counter()
    folder, name = out / "checkpoints", name or f"round_{len(run.rows):07d}"
    progress = {
        "rounds": len(run.rows),
        "transcript": run.federation.transcript.saved(),
        "data_digest": run.digest,
        "newcomers": list(run.newcomers),
        "admitted": plain_json(run.admitted),
        "advice": plain_json(run.advice),
        "mixture": plain_json(run.mixture),
        "stopped": run.stopped,
        "charges": charges(run.run_ledger),
        **run.backend.saved(run),
    }
    save_checkpoint(folder, name, run.state, run.federation, progress, run.parties)
    prune(folder, name)
    return time.perf_counter() - began


def flush(transcript: Transcript, out: Path, written: int) -> int:
    """Append new messages to the transcript in the run folder `out` and drop their payloads from memory; the number written so far."""
    messages = transcript.messages
    if len(messages) > written:
        transcript.write(out / "transcript", written)
        for i in range(written, len(messages)):
            messages[i] = replace(messages[i], payload=None)
    return len(messages)


def _announce(run: Experiment) -> None:
    described, report, count = run.algorithm.describe(run.state), run.report, len(run.expected) + len(run.newcomers)
    clustering = described.get("clustering")
    sizes = "" if clustering is None else f", clusters of {[len(clustering.members(label)) for label in range(clustering.k)]}"
    report(f"{run.algorithm.name} on {run.population.name}: {count} clients, protection {run.config.protection.name}{sizes}")
    if run.config.privacy.unit != "none":
        report(guarantee(run.config.privacy, run.config.protection))
    if run.chosen:
        report(run.chosen)
    if (answer := described.get("answer")) is not None:
        tested = f" ({p_words(described)})" if p_words(described) else ""
        report(f"test for groups: {answer}{tested}{': one cluster is trained' if described.get('clear') is False else ''}")
    elif described.get("clear") is False:
        report("no clear structure was found in the clients' similarity: one cluster is trained")
    if run.config.run.release_policy == "off":
        report("note: run.release_policy = 'off': clients release what deployed clients may refuse")
    for note in run.population.notes:
        report(f"note: {note}")
    for key in run.config.protection.idle:
        value, name = getattr(run.config.protection, key), run.config.protection.name
        report(f"note: protection.{key} = {value!r} does nothing under protection {name}")
    if run.config.privacy.unit == "sample" and run.config.data.source in TEXTS:
        length = run.config.data.sequence_length
        report(f"note: a sample is a window of {length} words and the next; a word is in {length + 1} of them, and epsilon is that of one")
    if run.config.run.record != "headers":
        report(f"recording payloads: about {estimate_record_bytes(run.config, run.population, count) / 1e6:.1f} MB")


def _measured(run: Experiment, out: Path) -> None:
    """measured.json and evidence.npz, which only the experimenter sees: truth, clusters and evidence. No adversary's view reads them.

    Evidence that the release withheld is computed again, in the clear, where the clients are here.
    """
    rest = dict(run.algorithm.describe(run.state))
    clustering, evidence, source = rest.pop("clustering", None), rest.pop("evidence", None), "server"
    if evidence is None and "gram" in run.algorithm.operations:
        evidence, source = run.backend.evidence(run), "recomputed"
    labels = None if clustering is None else {str(client): int(clustering[client]) for client in clustering.clients}
    arrays = {name: np.asarray(evidence[name]) for name in ("distance", "tree") if evidence and name in evidence}
    scalars = {name: value for name, value in (evidence or {}).items() if name not in arrays}
    if arrays:
        write_packed(out / "evidence.npz", arrays)
    truth = {client: int(group) for client, group in sorted(run.truth.items())}
    names = {"class_names": list(run.population.class_names)} if run.population.class_names else {}
    clients = run.population.client_names
    names |= {"client_names": list(clients)} if clients else {}
    measured = {"truth": truth, **names, "labels": labels, "evidence_source": source if evidence else None, "evidence": scalars, **rest}
    write_atomically(out / "measured.json", json.dumps(plain_json(measured), indent=1, allow_nan=False) + "\n")


def plain_json(value: Any) -> Any:
    """Plain JSON values: arrays as lists, numbers that are not finite as None."""
    if isinstance(value, np.ndarray | np.generic):
        return plain_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def environment(config: Config) -> dict[str, Any]:
    """By what a run of `config` is made here: versions, the machine, and the digests of its plugins, which are loaded."""
    packages = {name: metadata.version(name) for name in ("torch", "numpy", "scipy", "scikit-learn", "cryptography")}
    system = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
    words = {"command": Path(sys.argv[0]).name, "plugins": code_digests(config.run.plugins)}
    return {"cflpriv": metadata.version("cflpriv"), **system, "packages": packages, **words}


@dataclass
class _Noted:
    """A handler of Ctrl-C that records the first and passes on the second; nested ones share the record."""

    around: "_Noted | None" = None
    here: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked():
            raise KeyboardInterrupt
        (self.around or self).here = True

    def asked(self) -> bool:
        return self.here or (self.around is not None and self.around.asked())


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """While inside, the first Ctrl-C only asks to stop after the current round; the second stops at once.

    A handler that is not Python's own stays: a system that has one, such as Flower, sends the signal when nothing can go on any more.
    """
    before = signal.getsignal(signal.SIGINT)
    if callable(before) and before is not signal.default_int_handler and not isinstance(before, _Noted):
        yield lambda: False
        return
    noted = _Noted(before if isinstance(before, _Noted) else None)
    try:
        signal.signal(signal.SIGINT, noted)
    except ValueError:  # not the main thread: Ctrl-C does not arrive here
        yield lambda: False
        return
    try:
        yield noted.asked
    finally:
        signal.signal(signal.SIGINT, before)
