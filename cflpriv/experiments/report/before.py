"""What to do before relying on a report: at most three steps, each with its command, the most pressing first.

A run of a data frame in memory gets lines of Python in place of commands that need its rows: `fl` is its `ClusteredFL`,
`rows` what `fit` took.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...data.raw_tables import FRAME
from ...streams import readable
from .answer import Answer
from .answers import subject_of
from .audit_words import remedy_of
from .leak_answers import leaks_in
from .run_files import RunFiles
from .run_names import adversary_words

__all__ = ["Step", "advising", "auditing", "before_relying", "place_in", "place_of", "repeating"]

MOST_STEPS = 3
FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Step:
    """A thing to do, in words, and the command that does it."""

    words: str
    command: str


def place_of(folder: Path) -> str:
    """A folder as it was named, or its own name where a page must not show where it lies on this machine."""
    return readable(str(folder if not folder.is_absolute() and folder != Path(".") else folder.resolve().name))


def place_in(folder: Path, run: RunFiles) -> str:
    """Where a run of a report's folder is, as the folder was named."""
    return place_of(folder) if run.folder == folder else f"{place_of(folder)}/{run.name}"


def before_relying(folder: Path, runs: Sequence[RunFiles], four: Sequence[Answer]) -> list[Step]:
    """The first steps that the runs of a folder and the answers of the first screen call for."""
    subject = subject_of(runs)

    def at(run: RunFiles) -> str:
        return place_in(folder, run)

    found = [step(subject, runs, four, at) for step in (_changed, _interrupted, _useless, _leaking, _untested, _alone, _seeds)]
    return [step for step in found if step is not None][:MOST_STEPS]


Place = Callable[[RunFiles], str]


def _changed(subject: RunFiles, runs: Sequence[RunFiles], four: Sequence[Answer], at: Place) -> Step | None:
    bad = [run for run in runs if run.problems]
    return Step("Find out why files differ from what their run wrote", f"cflpriv verify {_quoted(at(bad[0]))}") if bad else None


def _interrupted(subject: RunFiles, runs: Sequence[RunFiles], four: Sequence[Answer], at: Place) -> Step | None:
    short = [run for run in runs if run.summary["rounds"] < run.summary["rounds_planned"] and not run.summary.get("stopped")]
    if not short:
        return None
    place, s = at(short[0]), short[0].summary
    resumed = f"cflpriv run {_quoted(place + '/config.toml')} --resume --out {_quoted(place)}"
    command = _fitted() if _in_memory(short[0]) else resumed
    return Step(f"Finish the run that ended after {s['rounds']} of {s['rounds_planned']} rounds", command)


def _useless(subject: RunFiles, runs: Sequence[RunFiles], four: Sequence[Answer], at: Place) -> Step | None:
    if four[0].verdict != "Learned nothing":
        return None
    return Step(
        "Train longer, and look at what each class gets",
        _run(subject, at, f"training.rounds={2 * subject.summary['rounds_planned']}", to="longer"),
    )


def _leaking(subject: RunFiles, runs: Sequence[RunFiles], four: Sequence[Answer], at: Place) -> Step | None:
    for adversary, leak in leaks_in(subject.audited).items():
        remedy = remedy_of(subject.audited.about.remedies, str(leak["attack"]), str(leak["metric"]))
        if remedy is not None and remedy[1]:
            command = _run(subject, at, *remedy[1], to="protected")
            return Step(f"Against the leak to {adversary_words(adversary)}: {remedy[0]}", command)
    return None


def _untested(subject: RunFiles, runs: Sequence[RunFiles], four: Sequence[Answer], at: Place) -> Step | None:
    about = subject.audited.about
    if four[2].verdict == "Nothing is sent" or (subject.audited.cells and about.attacks_left == ()):
        return None
    if subject.audited.cells is None:
        if subject.config.get("run", {}).get("record") in ("full", "attackable"):
            return Step("Test what leaks", auditing(subject, at(subject)))
        return Step("Record the messages, then audit the run", _run(subject, at, "run.record=full", to="recorded"))
    left = len(about.attacks_left or ())
    others = "all attacks" if not left else "the other attack" if left == 1 else f"the other {left} attacks"
    return Step(f"Run {others}: nothing is known of what {'it' if left == 1 else 'they'} would find", auditing(subject, at(subject)))


def _alone(subject: RunFiles, runs: Sequence[RunFiles], four: Sequence[Answer], at: Place) -> Step | None:
    if four[0].tone != "open" or four[0].verdict == "Not measured":
        return None
    return Step("Compare with one model for all and with each client alone", advising(subject, at(subject)))


def _seeds(subject: RunFiles, runs: Sequence[RunFiles], four: Sequence[Answer], at: Place) -> Step | None:
    algorithm, protection = subject.summary["algorithm"], subject.summary["protection"]
    same = [run for run in runs if (run.summary["algorithm"], run.summary["protection"]) == (algorithm, protection)]
    seeds = {run.config.get("run", {}).get("seed", 0) for run in same}
    if len(seeds) >= FEWEST_SEEDS:
        return None
    words = f"Run {FEWEST_SEEDS} seeds or more: {len(seeds)} cannot tell a small difference from chance"
    seed = max(map(int, seeds)) + 1
    return Step(words, _run(subject, at, f"run.seed={seed}", to=f"seed{seed}"))


def advising(run: RunFiles, place: str) -> str:
    """What has the advice for the run in the folder `place`."""
    return _fitted("run.advise=true") if _in_memory(run) else f"cflpriv advise {_quoted(place + '/config.toml')}"


def repeating(run: RunFiles, place: str, whole: str) -> list[str]:
    """What makes the run in the folder `place`, its audit and the report of the folder `whole` again."""
    if _in_memory(run):
        return [f"fl = {_fitted()}", auditing(run, place), "fl.report()"]
    return [f"cflpriv run {_quoted(place + '/config.toml')}", auditing(run, place), f"cflpriv report {_quoted(whole)}"]


def _in_memory(run: RunFiles) -> bool:
    """Whether the rows of a run were in no file, so that no command can have them again."""
    data = run.config.get("data")
    return isinstance(data, dict) and data.get("source") == FRAME


def _fitted(*changes: str) -> str:
    """The estimator of the run `fl` with changed keys, fitted again."""
    config = f'load_config(fl.folder_ / "config.toml"{f", {list(changes)}" if changes else ""})'
    return f"ClusteredFL.from_config({config}).fit(rows)  # fl: the fitted estimator, rows: what it was fitted on"


def auditing(run: RunFiles, place: str) -> str:
    """What audits the run in the folder `place`."""
    return 'fl.audit(budget="standard")' if _in_memory(run) else f"cflpriv audit {_quoted(place)}"


def _run(run: RunFiles, at: Place, *changes: str, to: str) -> str:
    """The run again with changed keys, into a folder beside its own."""
    if _in_memory(run):
        return _fitted(*changes)
    set_ = " ".join(f"--set {_quoted(change)}" for change in changes)
    return f"cflpriv run {_quoted(at(run) + '/config.toml')} {set_} --out {_quoted(f'{at(run)}-{to}')}"


def _quoted(words: str) -> str:
    return shlex.quote(words)
