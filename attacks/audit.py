"""Audit a recorded run: every attack that has something to see, for every adversary that the run folder allows.

The recorded transcript is attacked first. Then the same configuration runs again with fresh seeds, of data and of everything else, as often
as the budget allows, so that figures have an interval over seeds. These runs stay in memory. The reference of a run is its unprotected
twin: the same pipeline on the same data and seed, without protection. If the twin diverges, only attacks that rerun the configuration
themselves are made for this seed; the others are `not_attempted`. Truth is rebuilt from configuration and data; no attack sees the truth.

Finished results are kept in audit/units.json. A repeated call resumes an interrupted audit, unless run, budget or attacks have changed. The
plan and an estimate of its duration are printed first (`plan`).
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..algorithms import ALGORITHMS
from ..contract.transcript import Message, what_was_kept
from ..data import build_population
from ..engine.device import using
from ..engine.threads import one_thread
from ..errors import InputError, TrainingDiverged, near
from ..experiments.config.config import Config, load_config
from ..experiments.digests import OF_AUDITS, OF_RUN, changed_files, record_digests, sealed
from ..experiments.report.shown import AuditFindings
from ..experiments.run.loop import device_of
from ..experiments.run.resume import locked
from ..experiments.run.run import estimate_record_bytes, population_digest
from ..experiments.run.workers import ended, processes_for
from ..files import PRIVATE, write_atomically, write_packed
from ..protocols.bounded_files import LARGEST_TABLE_BYTES, read_bytes, read_json, read_text
from ..types import Population
from . import ATTACKS
from .adversary import read_secrets, recorded_messages, view_of
from .evidence.fresh_runs import AuditedRun, case_of, fresh_scene, is_open, recorded_scene, reseeded
from .evidence.local_training import NotRecorded
from .evidence.released_models import release_of_folder
from .figures.about import about_audit, extent, left_out
from .figures.coverage import less_sure, passed_over
from .figures.exposed import exposed_samples
from .figures.family import Family, judged_together
from .figures.leakage import BUDGETS, Budget, Cell, in_words_of, nothing
from .figures.payloads import readers_in
from .figures.plan import AuditPlan, Clock, plan_of, spoken, unscored_seconds
from .figures.pooling import pooled
from .figures.verdicts import audit_text
from .remedies import Accepted, Measured, accepted_remedies, measured_remedies

__all__ = ["audit_run", "check_asked"]


def audit_run(
    run_dir: str | Path,
    *,
    adversary: str | None = None,
    attacks: Sequence[str] | None = None,
    budget: str = "standard",
    data_dir: str | Path | None = None,
    population: Population | None = None,
    device: str | None = None,
    trust: bool = False,
    measure_remedies: bool = False,
    workers: int | None = 1,
    report: Callable[[str], None] = lambda line: None,
) -> AuditFindings:
    """Run the attacks and write audit.json and audit/ into the folder; the cells asked for.

    Without `adversary`, five adversaries are audited: the server, the server with one client (if the secrets of a client were written), the
    key holder (if its key was written), one client, and whoever gets the released models; the last two attack the recorded run
    alone. What is not run is named. `population` replaces the data that the configuration names, for all seeds; `device` replaces
    `run.device`. `trust`: whether code that the folder names runs, after its digests were checked (`experiments.trust`). With `workers`
    above 1 seeds and attacks are divided among so many processes (None: one a core, on a CUDA device one); the figures are the same.
    `measure_remedies`: leaks are attacked again with their remedies.

    Raises `InputError` for a folder that is no complete recorded run, was changed or is in use by another process, and for an unknown
    attack, adversary or budget.
    """
    folder, supplied = Path(run_dir), population
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder}: is not a run folder (no config.toml)")
    config = load_config(folder / "config.toml", trust=trust)
    if device is not None:  # another device has no other precision than "full" to be sure of
        config = config.with_("run", device=device, precision="full")
    workers = workers or processes_for([config.run.device])
    check_asked(budget, attacks)  # now that the run's plugins, which may have attacks, are loaded
    summary, messages, secrets = _read(folder, config)
    adversaries = [adversary] if adversary else _adversaries(messages, secrets)
    for viewer in adversaries:
        view_of(messages, viewer, secrets, config.protection)  # an unknown one is refused before anything runs
    people = population or build_population(config.data, data_dir)
    if summary["data_digest"] != population_digest(people):
        raise InputError(f"{folder / 'summary.json'}: the run was made with other data than are found now; give the same --data-dir")
    messages += release_of_folder(folder, config, people, messages, summary["rounds"])
    limits = BUDGETS[budget]
    plan = _plan(config, summary | {"seconds": unscored_seconds(folder, summary)}, people, limits)
    named = attacks or ATTACKS
    wanted = [(adversary, name) for adversary in adversaries for name in named if attacks or _by_default(name, adversary)]
    with locked(folder):  # two audits at once would each write audit.json without the other's cells
        _begin_writing(folder)
        remedies = accepted_remedies(folder / "config.toml", config, people, trust)
        about = about_audit(config, summary, budget, plan.seeds, sealed(folder, OF_RUN))
        planned = [(viewer, name) for viewer in _adversaries(messages, secrets) for name in ATTACKS if _by_default(name, viewer)]

        def readers(viewer: str) -> Mapping[str, Sequence[str]]:
            return readers_in(view_of(messages, viewer, secrets, config.protection))

        kept = _Kept(folder, _key(folder, budget), remedies, about, planned, readers)
        units = {seed: _units(wanted, seed, config.run.seed, () if adversary else ONCE) for seed in plan.seeds}
        plan = replace(
            plan, seeds=tuple(seed for seed in plan.seeds if units[seed]), rerun_seconds=_rerun_seconds(config, summary, wanted, limits)
        )
        todo = [seed for seed in plan.seeds if not units[seed].keys() <= kept.cells.keys()]
        report(plan.line(budget, todo, len(wanted), adversaries))
        if missing := what_was_kept(messages):
            report(missing)
        if once := [name for name in adversaries if adversary is None and name in ONCE]:
            report(f"{' and '.join(once)}: the recorded run alone")
        report(f"not run: {', '.join(left_out(adversaries))}")
        evidence = _Evidence(folder, config, people, messages, secrets, plan, limits, data_dir, supplied)
        left = {seed: {unit: pair for unit, pair in units[seed].items() if unit not in kept.cells} for seed in todo}
        parts = [] if supplied is not None else _dealt(left, workers)
        if len(parts) > 1:
            common = (str(folder), None if data_dir is None else str(data_dir), budget, device, trust, plan)
            with TemporaryDirectory() as place:
                jobs = [AuditJob(f"part {number}", f"{place}/{number}.jsonl", *common, *part) for number, part in enumerate(parts)]
                _in_processes(jobs, workers, kept, report)
        else:
            clock = Clock(plan, todo, len(wanted))
            for seed in todo:
                report(clock.line(seed))
                for unit, cells in _attacked_units(evidence, seed, left[seed], report):
                    kept.add(unit, cells)
        if measure_remedies:
            report("running the configuration again with the remedies of what leaks")
            kept.measured = measured_remedies(kept.table(), remedies, folder / "config.toml", people, plan.rounds, limits, trust)
            kept.write_audit()
            for entry in kept.measured:
                report(f"  {entry.line}")
    asked = {unit.rsplit("|", 1)[0] for seed_units in units.values() for unit in seed_units}
    return AuditFindings((cell for cell in kept.table() if f"{cell.adversary}|{cell.attack}" in asked), lambda: folder)


@dataclass(frozen=True, eq=False)
class _Evidence:
    """The recorded run that is attacked, and what fresh runs are made of."""

    folder: Path
    config: Config
    people: Population
    messages: Sequence[Message]
    secrets: Mapping[str, Mapping[str, str]]
    plan: AuditPlan
    budget: Budget
    data_dir: str | Path | None
    supplied: Population | None

    def scene(self, seed: int) -> AuditedRun:
        """The run of a seed: recorded, or made now. Raises `TrainingDiverged`."""
        if seed == self.config.run.seed:
            return recorded_scene(self.config, self.people, self.messages, self.secrets, self.plan, self.budget)
        fresh = reseeded(self.config, seed)
        return fresh_scene(fresh, self.supplied or build_population(fresh.data, self.data_dir), self.plan.rounds, self.budget)


def _attacked_units(
    evidence: _Evidence, seed: int, units: Mapping[str, tuple[str, str]], report: Callable[[str], None]
) -> Iterator[tuple[str, list[Cell]]]:
    """The cells of each unit of a seed, as they are made."""
    diverged, plan = "", evidence.plan
    try:
        scene = evidence.scene(seed)
    except TrainingDiverged as error:
        diverged = str(error)
        report(f"  {diverged}; only attacks that need no twin go on")
        scene = replace(replace(evidence, plan=replace(plan, here=0)).scene(evidence.config.run.seed), seed=seed)
    folder = evidence.folder if seed == evidence.config.run.seed else None
    for place, (unit, (viewer, name)) in enumerate(units.items(), 1):
        report(f"  {place} of {len(units)}: {name}, adversary {viewer}")
        yield unit, _attacked(name, viewer, scene, evidence.budget, folder, diverged)


# --- several processes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditJob:
    """A part of an audit that a process of its own does: units of one seed, (unit, adversary, attack) each, into the file `done`."""

    name: str
    done: str
    folder: str
    data_dir: str | None
    budget: str
    device: str | None
    trust: bool
    plan: AuditPlan
    seed: int
    units: tuple[tuple[str, str, str], ...]


def _dealt(left: Mapping[int, Mapping[str, tuple[str, str]]], workers: int) -> list[tuple[int, tuple[tuple[str, str, str], ...]]]:
    """Parts for the workers, (seed, units) each, the longest first. An attack's units of all adversaries are one part's: they share work.

    Seeds are divided only where there are fewer than workers.
    """
    if workers < 2:
        return []
    pieces = max(1, -(-workers // max(1, sum(bool(units) for units in left.values()))))
    parts = []
    for seed, units in left.items():
        names = sorted({name for _, name in units.values()}, key=lambda name: (name not in LONG, name))
        for piece in range(pieces):
            own = tuple((unit, viewer, name) for unit, (viewer, name) in units.items() if name in names[piece::pieces])
            parts += [(seed, own)] if own else []
    return parts


LONG = ("membership", "property_inference", "gradient_inversion", "dp_audit", "label_inference")
"""Attacks that take longest."""


def _in_processes(jobs: Sequence[AuditJob], workers: int, kept: "_Kept", report: Callable[[str], None]) -> None:
    """Do the parts of an audit in processes of their own, and keep what each gives; also of those that an error or Ctrl-C ends."""
    report(f"{len(jobs)} parts in {min(workers, len(jobs))} processes")
    began, going = time.perf_counter(), {job.name: job for job in jobs}
    try:
        for number, (name, problem) in enumerate(ended(jobs, work, min(workers, len(jobs))), 1):
            _keep(going.pop(name), kept)
            if problem:
                raise InputError(f"{kept.folder}: {name} of the audit ended: {problem}")
            left = (time.perf_counter() - began) / number * (len(jobs) - number)
            report(f"  {number} of {len(jobs)} parts done" + (f", about {spoken(left)} left" if left else ""))
    finally:
        for job in going.values():
            _keep(job, kept)


def _keep(job: AuditJob, kept: "_Kept") -> None:
    """Add the units that a part has finished. A line without its end is of a process that was stopped while it wrote."""
    path = Path(job.done)
    for line in read_text(path, LARGEST_TABLE_BYTES).splitlines(keepends=True) if path.is_file() else ():
        if line.endswith("\n"):
            unit, rows = json.loads(line)
            kept.add(unit, [_cell(row) for row in rows])


def work(job: AuditJob) -> str:
    """Do a part, a line of its file for each unit: (unit, cells). Returns what stopped it, or nothing."""
    try:
        evidence = _evidence_of(job)
        units = {unit: (viewer, name) for unit, viewer, name in job.units}
        with one_thread(), Path(job.done).open("w", encoding="utf-8") as file:
            for unit, cells in _attacked_units(evidence, job.seed, units, lambda line: None):
                file.write(json.dumps([unit, [cell.as_json() for cell in cells]]) + "\n")
                file.flush()
    except Exception as error:  # the parent reports it
        return f"{type(error).__name__}: {error}"
    return ""


def _evidence_of(job: AuditJob) -> _Evidence:
    folder = Path(job.folder)
    config = load_config(folder / "config.toml", trust=job.trust)
    if job.device is not None:
        config = config.with_("run", device=job.device, precision="full")
    summary, messages, secrets = _read(folder, config)
    people = build_population(config.data, job.data_dir)
    messages += release_of_folder(folder, config, people, messages, summary["rounds"])
    return _Evidence(folder, config, people, messages, secrets, job.plan, BUDGETS[job.budget], job.data_dir, None)


def check_asked(budget: str, attacks: Sequence[str] | None, of: str = "--") -> None:
    """Raises `InputError` for a budget or an attack that is not known; `of` stands before the name of what they were given by."""
    if budget not in BUDGETS:
        raise InputError(f"{of}budget: {budget!r} is not known{near(budget, list(BUDGETS))}")
    if attacks is not None and not attacks:
        raise InputError(f"{of}attacks: names none; known are {', '.join(ATTACKS)}")
    for name in attacks or ():
        if ATTACKS.find(name) is None:
            raise InputError(f"{of}attacks: {name!r} is not known{near(name, ATTACKS.names())}")


# --- the run folder -----------------------------------------------------------------------------------------------------------------


def _read(folder: Path, config: Config) -> tuple[dict[str, Any], list[Message], dict[str, dict[str, str]]]:
    """A complete run folder's contents, checked against each other."""
    if config.run.record == "headers":
        raise InputError(f'{folder}: payloads were not recorded; run it again with [run] record = "full" or "attackable"')
    path = folder / "summary.json"
    if not path.is_file():
        raise InputError(f"{path}: is missing, so the run is not complete; finish it with `cflpriv run … --resume`")
    messages = recorded_messages(folder)
    summary = _summary(path, config)
    secrets = read_secrets(folder)
    for problem in changed_files(folder, OF_RUN):
        raise InputError(problem)
    return summary, messages, secrets


def _summary(path: Path, config: Config) -> dict[str, Any]:
    """A run's summary, as far as an audit reads it. Raises `InputError` naming the key that is missing, damaged or not the config's."""
    summary: dict[str, Any] = read_json(path)
    kinds: dict[str, tuple[type, ...]] = {"rounds": (int,), "seconds": (int, float)}
    for key in ("algorithm", "protection", "data_digest", *kinds):
        if key not in summary:
            raise InputError(f"{path}: has no {key!r}; it is not the summary of a run of this version")
        if not isinstance(summary[key], kinds.get(key, (str,))) or isinstance(summary[key], bool):
            raise InputError(f"{path}: {key} = {summary[key]!r} is of a wrong type")
    if not 0 <= summary["rounds"] <= config.training.rounds:
        raise InputError(f"{path}: rounds = {summary['rounds']}, but config.toml has {config.training.rounds}; one of them was changed")
    if not 0 <= summary["seconds"] < float("inf"):
        raise InputError(f"{path}: seconds = {summary['seconds']!r} is no duration")
    for key, value in (("algorithm", config.spec.name), ("protection", config.protection.name)):
        other = ALGORITHMS.find(summary[key]) if key == "algorithm" else None  # one algorithm may have two names
        if summary[key] != value and (other is None or other.make is not config.spec.make):
            raise InputError(f"{path}: {key} is {summary[key]!r}, but config.toml says {value!r}; one of them was changed")
    return summary


def _adversaries(messages: Sequence[Message], secrets: Mapping[str, Mapping[str, str]]) -> list[str]:
    client = any(party.startswith("client:") for party in secrets)
    holder = "key-holder" in secrets and any("key-holder" in (message.source, message.target) for message in messages)
    whole = ["server", *(["server+1"] if client else []), *(["key-holder"] if holder else []), "client", "released"]
    return [name for name in whole if _has_view(messages, name, secrets)]


def _has_view(messages: Sequence[Message], adversary: str, secrets: Mapping[str, Mapping[str, str]]) -> bool:
    try:
        view_of(messages, adversary, secrets)
    except InputError:
        return False
    return True


def _key(folder: Path, budget: str) -> str:
    """What a finished cell depends on: the run's files, the budget, and the attacks' own text."""
    digest = blake2b(budget.encode(), digest_size=16)
    for name, of_file in sorted(sealed(folder, OF_RUN).items()):
        digest.update(f"{name} {of_file}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(read_bytes(path))
    return digest.hexdigest()


def _rerun_seconds(config: Config, summary: Mapping[str, Any], wanted: Sequence[tuple[str, str]], budget: Budget) -> float:
    """Estimated seconds for attacks that rerun the configuration, with and without noise: three runs each."""
    reruns = config.privacy.unit != "none" and any(ATTACKS[attack].reruns and adversary == "server" for adversary, attack in wanted)
    return min(budget.seconds, 6 * budget.seeds * float(summary["seconds"])) if reruns else 0.0


def _by_default(name: str, adversary: str) -> bool:
    """Whether an attack is made by this adversary where no attacks are named: each active attack by an active server, each rerun once."""
    attack = ATTACKS[name]
    return (not attack.active or adversary == "active-server") and (not attack.reruns or adversary.startswith(("server", "active-server")))


ONCE = ("client", "released")
"""Adversaries that attack the recorded run alone unless they are asked for: they see less than the server, and cost as much."""


def _units(wanted: Sequence[tuple[str, str]], seed: int, recorded: int, once: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The units of a seed, (adversary, attack) by name.

    For fresh seeds without adversaries that attack `once`, and without attacks that rerun the configuration themselves.
    """
    fresh = [pair for pair in wanted if pair[0] not in once and not ATTACKS[pair[1]].reruns]
    return {_unit(*pair, seed): pair for pair in (wanted if seed == recorded else fresh)}


def _unit(adversary: str, attack: str, seed: int) -> str:
    return f"{adversary}|{attack}|{seed}"


def _texts() -> dict[str, str]:
    """The digest of the file of each attack that is not the package's own: one that was edited is made again."""
    files = {name: getattr(sys.modules.get(getattr(attack.cells, "__module__", "")), "__file__", None) for name, attack in ATTACKS.items()}
    own = Path(__file__).parent.resolve()
    return {
        name: blake2b(read_bytes(file), digest_size=16).hexdigest()
        for name, file in files.items() if file and not Path(file).resolve().is_relative_to(own)
    }  # fmt: skip


_Readers = Callable[[str], Mapping[str, Sequence[str]]]
"""The attacks that read each part of an adversary's view."""


def _begin_writing(folder: Path) -> None:
    """Make the folder of an audit's files. Raises `InputError` where it cannot be made, before anything is computed."""
    try:
        (folder / "audit").mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"{folder / 'audit'}: cannot be written ({error.strerror})") from None


class _Kept:
    """Finished cells by unit, written to disk after each. Cells of another run, budget, version, or text of a plugin are dropped."""

    def __init__(
        self, folder: Path, key: str, remedies: Mapping[str, Accepted], about: Mapping[str, Any], planned: Sequence[tuple[str, str]],
        readers: _Readers,
    ) -> None:  # fmt: skip
        self.folder, self.key, self.texts, self.planned = folder, key, _texts(), planned
        self.readers = cache(readers)
        self.remedies, self.about, self.measured = remedies, about, list[Measured]()
        self.cells: dict[str, list[Cell]] = {}
        try:
            stored = read_json(folder / "audit" / "units.json")
            if stored["key"] == key:
                texts = stored["texts"]
                self.texts = texts | self.texts  # an attack whose file is not loaded now stays
                self.cells = {
                    unit: [_cell(row) for row in rows] for unit, rows in stored["units"].items()
                    if self.texts.get(unit.split("|")[1]) == texts.get(unit.split("|")[1])
                }  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # none, or damaged: everything is done again

    def add(self, unit: str, cells: Sequence[Cell]) -> None:
        self.cells[unit] = list(cells)
        units = {name: [cell.as_json() for cell in stored] for name, stored in self.cells.items()}
        tree = {"key": self.key, "texts": self.texts, "units": units}
        self._write("audit/units.json", json.dumps(tree) + "\n")
        self.write_audit()

    def write_audit(self) -> None:
        """Write audit.json with what is finished."""
        table, family = self._judged()
        words = {name: remedy.line for name, remedy in self.remedies.items()}
        remedies = {name: {"words": remedy.words, "changes": list(remedy.changes)} for name, remedy in self.remedies.items()}
        measured = [entry.as_json() for entry in self.measured]
        more = {
            "about": {**self.about, **extent(self._done(), self.planned)}, "remedies_accepted": remedies, "remedies_measured": measured,
            "most_exposed": exposed_samples(self.folder, self.recorded),
        }  # fmt: skip
        self._write("audit.json", audit_text(table, family, words, **more))

    def _done(self) -> list[tuple[str, str]]:
        """(adversary, attack) of all figures, also those of earlier calls: an audit that was stopped has not run what it was asked for."""
        return [(viewer, name) for viewer, name, _ in (unit.split("|") for unit in self.cells)]

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.folder / name, text, PRIVATE)
            record_digests(self.folder, OF_AUDITS)
        except OSError as error:
            raise InputError(f"{self.folder / name}: cannot be written ({error.strerror})") from None

    @property
    def recorded(self) -> list[Cell]:
        """The figures of the recorded run alone, not judged together."""
        seed = str(self.about["seeds"][0]) if self.about.get("seeds") else ""
        return [cell for unit, cells in self.cells.items() if unit.endswith(f"|{seed}") for cell in cells]

    def table(self) -> list[Cell]:
        """All figures so far, pooled over seeds and judged together."""
        return self._judged()[0]

    def _judged(self) -> tuple[list[Cell], Family]:
        order = {name: i for i, name in enumerate(ATTACKS)}
        done = sorted(self.cells, key=lambda name: (name.split("|")[0] != "server", name.split("|")[0], order.get(name.split("|")[1], 99)))
        cells, family = judged_together(pooled([cell for name in done for cell in self.cells[name]]))
        for viewer in dict.fromkeys(cell.adversary for cell in cells):
            cells += passed_over([cell for cell in cells if cell.adversary == viewer], self.readers(viewer))
        return cells, family


def _cell(fields: Mapping[str, Any]) -> Cell:
    return Cell(**{**fields, "seeds": tuple(fields["seeds"])})


def _plan(config: Config, summary: Mapping[str, Any], population: Population, budget: Budget) -> AuditPlan:
    size = estimate_record_bytes(config.recording_all(), population)
    is_whole = is_open(config) and config.run.record == "full"
    return plan_of(summary, config.run.seed, size=size, is_open=is_open(config), is_whole=is_whole, budget=budget)


# --- attacking ----------------------------------------------------------------------------------------------------------------------


def _attacked(name: str, adversary: str, scene: AuditedRun, budget: Budget, folder: Path | None, diverged: str = "") -> list[Cell]:
    """One attack by one adversary on one run. Arrays are saved into `folder`, if there is one.

    `diverged` says why there is no run of this seed, or no unprotected twin; `reruns` marks the attacks that need neither.
    """
    case = case_of(scene, adversary, budget)
    if scene.population.label_range and not ATTACKS[name].numbers:
        return [nothing(case, name, "attempted", "not attempted: it reads labels of classes, and these are numbers")]
    if diverged and not ATTACKS[name].reruns:
        return [nothing(case, name, "attempted", f"not attempted: {diverged}")]
    in_part = "; not all payloads were kept ([run] record)" if what_was_kept(scene.messages) else ""
    try:
        with using(device_of(scene.config)):
            cells, arrays = ATTACKS[name].cells(case)
            cells = in_words_of(scene.population.shape, cells)
    except (NotRecorded, TrainingDiverged) as error:
        own = "the attacker's own clients: " if isinstance(error, TrainingDiverged) else ""
        return [nothing(case, name, "attempted", f"not attempted: {own}{error}{in_part}")]
    if in_part:
        cells = [replace(cell, note=cell.note + in_part) for cell in cells]
    if scene.rounds is not None:
        words, most = f"; of the first {scene.rounds} round(s) only", scene.rounds
        cells = [replace(cell, note=cell.note + words, rounds=min(cell.rounds or most, most)) for cell in cells]
    if in_part or scene.rounds is not None:
        cells = less_sure(cells, scene.whole_view(adversary), kept=not in_part)
    if arrays is None or folder is None:
        return list(cells)
    file = f"{name}_{adversary}.npz"
    write_packed(folder / "audit" / file, arrays)
    return [replace(cell, arrays=file) for cell in cells]
