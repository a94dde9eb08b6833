"""A run folder: an experiment's rounds written as they end, its checkpoints, its resumption, and what only the experimenter sees."""

import io
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from ..contract.transcript import Transcript
from ..data.text import TEXTS
from ..errors import InputError
from ..federation.registry import EpochEnded
from ..files import append, write_atomically
from ..types import ClientData, Population
from .checkpoint import prune, restore, save_checkpoint
from .config import Config
from .measure import recomputed
from .private import charges, opened
from .resume import check_same_config, holds_nothing, kept_rows, last_checkpoint, locked, note_resume, put_aside, put_audit_aside
from .run import Simulation, admit, advance, begin, estimate_record_bytes, finish, population_digest, prepare, secrets_of

__all__ = ["environment", "file_digests", "flush", "idle_notes", "interruptible", "plain_json", "run_experiment", "write_measured"]


def run_experiment(
    config: Config,
    out: str | Path,
    data_dir: str | Path | None = None,
    *,
    resume: bool = False,
    population: Population | None = None,
    say: Callable[[str], None] = lambda line: None,
    tick: Callable[[dict[str, Any]], None] = lambda row: None,
    step: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Run an experiment into the folder `out`; the summary. `tick` gets each round's row, `say` lines for people, `step` how far a long
    step (what, done, total) inside a round has got.

    Nothing stays written unless the data and the algorithm's beginning prove sound. A checkpoint is saved after the beginning and after
    every `run.checkpoint_every`-th round, and only the last is kept. Ctrl-C ends after the current round with everything saved. With
    `resume`, a run that ended early goes on from its last checkpoint (see `resume`), one that is done is left alone, and one that never
    started is started. Raises `InputError`, also if `out` exists and is not to be resumed; OSError where something cannot be written,
    with all rounds before that in place.
    """
    out = Path(out)
    old = (out / "config.toml").is_file()
    if resume and old:
        check_same_config(config, out)
    elif out.exists() and not (resume and holds_nothing(out)):
        again = ", or go on with --resume" if old and not resume else ""
        raise InputError(f"{out}: the output folder exists; choose another with --out, or remove it{again}")
    try:
        if old:
            with locked(out):
                return _resumed(config, out, data_dir, population, say, tick, step)
        simulation = prepare(config, data_dir, population)
        _listen(simulation, say, step)
        missing = [folder for folder in (out, *out.parents) if not folder.exists()]
        try:
            out.mkdir(parents=True, exist_ok=resume)
        except OSError as error:
            raise InputError(f"{out}: cannot be made ({error.strerror})") from None
        with locked(out):
            try:
                return _started(simulation, out, say, tick)
            except InputError:
                if not (out / "rounds.jsonl").exists() and not (out / "ledger.json").exists():
                    shutil.rmtree(out, ignore_errors=True)
                    with suppress(OSError):  # somebody else's files are in it by now
                        for folder in missing[1:]:
                            folder.rmdir()
                raise
    except EpochEnded as error:
        raise InputError(f"{out}: {error}: the resumed run cannot go on, only be begun anew") from None
    except OSError as error:
        kept = "all that was complete is saved; make room or access, and go on with --resume"
        raise OSError(error.errno, f"{error.strerror} ({kept})", error.filename) from None


def _listen(s: Simulation, say: Callable[[str], None], step: Callable[[str, int, int], None]) -> None:
    """Let an expensive protection say what it will cost, and how far it is."""
    s.federation.listen(say, lambda done, total: step("encrypted similarity", done, total))


def _started(s: Simulation, out: Path, say: Callable[[str], None], tick: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A run from its beginning, in a folder that holds nothing of it yet."""
    write_atomically(out / "config.toml", s.config.to_toml())
    write_atomically(out / "environment.json", json.dumps(environment(), indent=1) + "\n")
    before = secrets_of(s)
    _write_secrets(before, out)
    opened(s.books, out)
    begin(s)
    after = secrets_of(
        s
    )  # a key holder makes its keys when the first epoch opens; clients erase some then, which those who collude would not
    _write_secrets({party: secrets | before.get(party, {}) for party, secrets in after.items()}, out)
    _announce(s, say)
    s.digest = population_digest(s.population)
    flush(s.federation.transcript, out, 0)
    _save(s, out)
    return _rounds(s, out, say, tick)


def _write_secrets(found: Mapping[str, Mapping[str, str]], out: Path) -> None:
    for party, secrets in found.items():
        (out / "secrets").mkdir(exist_ok=True)
        write_atomically(out / "secrets" / f"{party.replace(':', '_')}.json", json.dumps({"party": party, **secrets}) + "\n")


def _resumed(
    config: Config, out: Path, data_dir: str | Path | None, population: Population | None, say: Callable[[str], None],
    tick: Callable[[dict[str, Any]], None], step: Callable[[str, int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """A run from its last checkpoint; from its beginning, if it ended before the first."""
    checkpoint = last_checkpoint(out)
    summary = out / "summary.json"
    if checkpoint is not None and checkpoint.path.stem == "final" and summary.is_file():
        done: dict[str, Any] = {}
        with suppress(ValueError):  # a damaged summary is written anew
            done = json.loads(summary.read_text(encoding="utf-8"))
        if done.get("rounds") == checkpoint.progress["rounds"]:  # else it is that of an earlier Ctrl-C, and a kill came before the last one
            say(f"{out}: this run is done")
            return done
    s = prepare(config, data_dir, population, **({} if checkpoint is None else checkpoint.parties()))
    _listen(s, say, step)
    s.digest = population_digest(s.population)
    if checkpoint is not None:
        _same(s, out, checkpoint.progress)
    number = note_resume(out, checkpoint)
    if checkpoint is None:
        put_aside(out, number, 0, 0)
        say(f"resumed: {out} ended before its first checkpoint; it starts again")
        return _started(s, out, say, tick)
    progress = checkpoint.progress
    moved = put_aside(out, number, progress["rounds"], progress["transcript"]["messages"])
    if progress["rounds"] < config.training.rounds and progress["stopped"] is None:
        put_audit_aside(out, number)
    s.federation.transcript.restore(out / "transcript", progress["transcript"])
    s.simulated.engine.paths.update({(task, path): count for task, path, count in progress["engine_paths"]})
    s.state = restore(checkpoint, s.federation, 0 if config.run.insecure_test_entropy else number)
    s.simulated.join(progress["online"])
    for party, drawn in progress["entropy"].items():  # last: greeting clients again draws challenges
        s.entropy[party].skip(drawn)
    s.rows, s.admitted, s.stopped = kept_rows(out, progress["rounds"]), progress["admitted"], progress["stopped"]
    s.started -= sum(row["seconds"] for row in s.rows)
    s.federation.protection_seconds = s.rows[-1]["protection_seconds"] if s.rows else 0.0
    words = "".join(f", {count} {what} of an interrupted round put aside" for what, count in moved.items() if count)
    say(f"resumed after round {len(s.rows)} of {config.training.rounds}{words}")
    return _rounds(s, out, say, tick)


def _same(s: Simulation, out: Path, progress: Mapping[str, Any]) -> None:
    """`InputError` if the run cannot go on with what is there now: other data, other newcomers, a ledger that has forgotten charges."""
    if progress["data_digest"] != s.digest:
        raise InputError(f"{out}: the run was made with other data than are found now; give the same --data-dir")
    if list(s.newcomers) != progress["newcomers"]:
        raise InputError(
            f"{out}: the run holds other clients back than this version would as data.newcomers = {len(s.newcomers)} "
            f"({progress['newcomers']}, now {list(s.newcomers)}); it can only be begun anew"
        )
    opened(s.books, out, progress["charges"])


def _rounds(s: Simulation, out: Path, say: Callable[[str], None], tick: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The rounds that are left, each saved when it is complete, and the finish."""
    rounds, written = s.config.training.rounds, len(s.federation.transcript.messages)
    with interruptible() as interrupted:
        while len(s.rows) < rounds and not interrupted() and s.stopped is None:
            row = advance(s)
            append(out / "rounds.jsonl", json.dumps(row) + "\n")
            written = flush(s.federation.transcript, out, written)
            if len(s.rows) % s.config.run.checkpoint_every == 0 or interrupted():
                _save(s, out)
            tick(row)
        if interrupted() and len(s.rows) < rounds:
            _save(s, out)
            say(f"interrupted: stopped after round {len(s.rows)} of {rounds}; all of it is saved, --resume goes on")
        else:
            if s.stopped is not None:
                say(f"stopped after round {len(s.rows)} of {rounds}: {s.stopped}")
            elif s.admitted is None:
                admit(s)
            flush(s.federation.transcript, out, written)
            _save(s, out, "final")
        _measured(s, out)
        summary = finish(s) | {"files": file_digests(out)}
        write_atomically(out / "summary.json", json.dumps(summary, indent=1) + "\n")
        s.simulated.engine.close()
    return summary


def _save(s: Simulation, out: Path, name: str = "") -> None:
    """A checkpoint of the run as it stands, written when all that it counts is on the disk; earlier ones are removed."""
    folder, name = out / "checkpoints", name or f"round_{len(s.rows):07d}"
    progress = {
        "rounds": len(s.rows),
        "transcript": s.federation.transcript.saved(),
        "entropy": {party: source.drawn for party, source in s.entropy.items()} if s.config.run.insecure_test_entropy else {},
        "online": sorted(s.simulated.online),
        "engine_paths": [[*way, count] for way, count in sorted(s.simulated.engine.paths.items())],
        "data_digest": s.digest,
        "newcomers": list(s.newcomers),
        "admitted": plain_json(s.admitted),
        "stopped": s.stopped,
        "charges": charges(s.books),
    }
    save_checkpoint(folder, name, s.state, s.federation, progress, s.simulated)
    prune(folder, name)


def flush(transcript: Transcript, out: Path, written: int) -> int:
    """Append new messages to the transcript in the run folder `out` and let go of their payloads; how many are written now."""
    messages = transcript.messages
    if len(messages) > written:
        transcript.write(out / "transcript", written)
        for i in range(written, len(messages)):
            messages[i] = replace(messages[i], payload=None)
    return len(messages)


def file_digests(out: Path) -> dict[str, str]:
    """BLAKE2b digests of the files that say what a run was, by path in its folder: an audit trusts them only as the run left them.

    The transcript's headers hold those of all payloads. They show accidents and mixed-up folders, not an attacker who computes them afresh.
    """
    named = [out / "config.toml", out / "transcript" / "messages.jsonl", *sorted((out / "secrets").glob("*.json"))]
    return {path.relative_to(out).as_posix(): blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in named if path.is_file()}


def idle_notes(config: Config) -> list[str]:
    """A line for each setting of `[protection]` that differs from its default and does nothing."""
    asked = config.protection
    return [f"note: protection.{key} = {getattr(asked, key)!r} does nothing under protection {asked.name}" for key in asked.idle]


def _announce(s: Simulation, say: Callable[[str], None]) -> None:
    described = s.algorithm.describe(s.state)
    clustering = described.get("clustering")
    sizes = "" if clustering is None else f", clusters of {[len(clustering.members(label)) for label in range(clustering.k)]}"
    say(f"{s.algorithm.name} on {s.population.name}: {len(s.population.clients)} clients, protection {s.config.protection.name}{sizes}")
    if described.get("clear") is False:
        say("no clear structure was found in the clients' similarity: one cluster is trained")
    if s.config.run.release_policy == "off":
        say("note: run.release_policy = 'off': clients release what deployed clients may refuse")
    for note in s.population.notes:
        say(f"note: {note}")
    for note in idle_notes(s.config):
        say(note)
    if s.config.privacy.unit == "sample" and s.config.data.source in TEXTS:
        length = s.config.data.sequence_length
        say(f"note: a sample is a window of {length} words and the next; a word is in {length + 1} of them, and epsilon is that of one")
    if s.config.run.record != "headers":
        say(f"recording payloads: about {estimate_record_bytes(s.config, s.population) / 1e6:.1f} MB")


def _measured(s: Simulation, out: Path) -> None:
    """What only the experimenter sees. Evidence that the release withheld is computed again, in the clear."""
    described = dict(s.algorithm.describe(s.state))
    source = "server"
    if described.get("evidence") is None and "gram" in s.algorithm.verbs:
        early = [client for client in s.federation.clients if client not in s.newcomers]
        described["evidence"], source = recomputed(s.algorithm, s.simulated, early), "recomputed"
    truth = {client.id: int(group) for client, group in sorted(zip(s.population.clients, s.population.groups, strict=True), key=_by_id)}
    write_measured(out, described, truth, source)


def write_measured(out: Path, described: Mapping[str, Any], truth: Mapping[int, int], source: str = "server") -> None:
    """measured.json and evidence.npz: truth, clusters and evidence of what an algorithm described. No adversary's view reads them."""
    rest = dict(described)
    clustering, evidence = rest.pop("clustering", None), rest.pop("evidence", None)
    labels = None if clustering is None else {str(client): int(clustering[client]) for client in clustering.clients}
    arrays = {name: np.asarray(evidence[name]) for name in ("distance", "tree") if evidence and name in evidence}
    scalars = {name: value for name, value in (evidence or {}).items() if name not in arrays}
    if arrays:
        packed = io.BytesIO()
        np.savez(packed, allow_pickle=False, **arrays)
        write_atomically(out / "evidence.npz", packed.getvalue())
    measured = {"truth": truth, "labels": labels, "evidence_source": source if evidence else None, "evidence": scalars, **rest}
    write_atomically(out / "measured.json", json.dumps(plain_json(measured), indent=1, allow_nan=False) + "\n")


def _by_id(pair: tuple[ClientData, int]) -> int:
    return pair[0].id


def plain_json(value: Any) -> Any:
    """Plain JSON values: arrays as lists, numbers that are not finite as None."""
    if isinstance(value, np.ndarray | np.generic):
        return plain_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def environment() -> dict[str, Any]:
    packages = {name: metadata.version(name) for name in ("torch", "numpy", "scipy", "scikit-learn", "cryptography")}
    system = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
    return {"cflpriv": metadata.version("cflpriv"), **system, "packages": packages, "command": Path(sys.argv[0]).name}


@dataclass
class _Noted:
    """A handler of Ctrl-C that remembers the first and lets the second through; one inside another shares what is remembered."""

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
    """While inside, the first Ctrl-C only asks to stop after the current round; the second stops at once."""
    before = signal.getsignal(signal.SIGINT)
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
