"""Commands that attack or check what was recorded: `audit`, `verify`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import TimeLeft
from ..errors import InputError
from .shared import ERR, OUT, DataDir, DeviceName, Plugins, Trust, load_plugins, note_idle_code, print_line

__all__ = ["audit", "verify"]

TAKES = {
    "to a recorded run": ("--adversary", "--budget", "--measure-remedies", "--workers", "--device", "--trust", "--data-dir", "--only"),
    "with --active": ("--out", "--set", "--device", "--trust", "--data-dir"),
    "with --foreign": (),
}
"""The options that each kind of audit takes, besides `--attacks` and `--plugin`, which all take."""


def audit(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR"),
    ],
    adversary: Annotated[
        str | None,
        typer.Option(
            "--adversary",
            help="server, server+N (N colluding clients), active-server, key-holder, client, released, outsider; default: server, "
            "server+1, key-holder, client and released, where the run has them.",
        ),
    ] = None,
    attacks: Annotated[
        str | None, typer.Option("--attacks", help="Names of attacks, with commas between; default: all that apply.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", help="quick (this run only), standard (5 seeds), thorough (10 seeds), as far as time allows; default: standard."
        ),
    ] = None,
    measure_remedies: Annotated[
        bool, typer.Option("--measure-remedies", help="Run the configuration again with the remedy of each leak, and attack that.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            help="Processes that share seeds and attacks; default: one a core, on a GPU one.",
            min=1,
        ),
    ] = None,
    active: Annotated[
        bool,
        typer.Option("--active", help="Run active attacks against freshly started clients, and report what they refuse."),
    ] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Attack another system's updates: a folder as in docs/howto/audit_other_systems.md.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="With --active, the folder to write; default the run folder, or runs/NAME-active.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="With --active, change a key: section.key=value.")] = None,
    device: DeviceName = None,
    only: Annotated[
        list[int] | None, typer.Option("--only", help="Of a sweep's folder: attack this run only, by its number. May be repeated.")
    ] = None,
    plugin: Plugins = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Attack a recorded run; writes audit.json and audit/ into its folder. An interrupted audit resumes when called again.

    RUN_DIR is a run folder whose payloads were recorded, or a sweep's folder: its finished runs, or those of --only, are attacked, and its
    report is made again. With --active it may also be a configuration, with --foreign it is a folder of updates.
    Exit code 1 where the updates of --foreign fail a check, so that nothing is concluded.
    """
    from ..attacks.remedies import remedy_line
    from ..experiments.digests import digest_of
    from ..protocols.bounded_files import read_json

    if active and foreign:
        raise InputError("--foreign, --active: give one of them")
    kind = "with --foreign" if foreign else "with --active" if active else "to a recorded run"
    chosen = {
        "--adversary": adversary,
        "--budget": budget,
        "--measure-remedies": measure_remedies or None,
        "--workers": workers,
        "--out": out,
        "--set": set_,
        "--device": device,
        "--data-dir": data_dir,
        "--trust": trust or None,
        "--only": only,
    }
    for option, value in chosen.items():
        if value is not None and value != [] and option not in TAKES[kind]:
            raise InputError(f"{option}: does not apply {kind}, which takes {', '.join((*TAKES[kind], '--attacks'))} and --plugin only")
    load_plugins(plugin)
    names = None if attacks is None else [name.strip() for name in attacks.split(",")]
    if foreign:
        _foreign_audit(run_dir, names)
        return
    note_idle_code(run_dir / "config.toml", trust)
    if active:
        _active_audit(run_dir, [*(set_ or []), *([] if device is None else [f"run.device={device}"])], names, out, data_dir, trust)
        return
    options: dict[str, Any] = {
        "adversary": adversary, "attacks": names, "budget": budget or "standard", "data_dir": data_dir, "device": device, "trust": trust,
        "measure_remedies": measure_remedies, "workers": workers,
    }  # fmt: skip
    if (run_dir / "sweep.toml").is_file():
        _sweep_audit(run_dir, options, only or [])
        return
    if only:
        raise InputError(f"--only {only[0]}: {run_dir} is no sweep's folder; name the folder of the sweep")
    cells = _audited(run_dir, options)
    stored = read_json(run_dir / "audit.json").get("remedies_accepted", {})
    _print_audit(cells, {name: remedy_line(entry["words"], entry["changes"]) for name, entry in stored.items()}, accepted=bool(stored))
    OUT.print(f"written: {run_dir / 'audit.json'}, digest {digest_of(run_dir)}", markup=False)


def _audited(run_dir: Path, options: Mapping[str, Any]) -> Sequence[Any]:
    """The figures of an audit of a run folder. After Ctrl-C says what is kept, and ends with exit code 1."""
    from ..attacks.audit import audit_run
    from ..experiments.run.resume import data_directory_of

    try:
        return audit_run(run_dir, **{**options, "data_dir": options["data_dir"] or data_directory_of(run_dir)}, report=print_line)
    except KeyboardInterrupt:
        done = run_dir / "audit.json"
        words = f"finished results are in {done}; the same command resumes" if done.is_file() else "nothing was finished yet"
        ERR.print(f"cflpriv: stopped; {words}", markup=False)
        sys.exit(1)


def _sweep_audit(folder: Path, options: Mapping[str, Any], only: Sequence[int]) -> None:
    """Attack every finished run of a sweep, or those of the numbers `only`, and make its report again."""
    from ..experiments.report.report import write_report
    from ..experiments.report.sweep_report import sweep_lines
    from ..experiments.sweep.sweep import sweep_of
    from ..experiments.sweep.sweep_runs import finished, locked_sweep, part_of

    sweep = sweep_of(folder)
    assert sweep is not None
    if sweep.choose is not None:
        raise InputError(f"{folder}: [sweep] choose keeps all runs but the chosen secret; audit the folder of the chosen run")
    made = [cell for cell in part_of(sweep, only) if finished(folder / cell.name)]
    time_left = TimeLeft(len(made))
    for number, cell in enumerate(made, 1):
        _audited(folder / cell.name, options)
        print_line(f"[{number}/{len(made)}] {cell.name}: audited{time_left.words(number)}")
    with locked_sweep(sweep, folder):
        page = write_report(folder)
    for line in [*sweep_lines(folder, sweep), f"report: {page}"]:
        print_line(line)


def _print_audit(cells: Sequence[Any], remedies: Mapping[str, str], *, accepted: bool) -> None:
    """What each adversary learns, and all figures after it. `accepted`: the remedies are settings that a configuration accepts."""
    from ..attacks.figures.verdicts import risk_words, verdicts_of

    for verdict in verdicts_of(cells, remedies):
        OUT.print(f"{verdict.sentence[0].upper()}{verdict.sentence[1:]}.", markup=False)
        if verdict.reduces:
            OUT.print(f"  Would reduce it: {verdict.reduces}.", markup=False)
    if accepted and any(cell.status == "leaks" for cell in cells):
        OUT.print("Remedies are settings that the configuration accepts; --measure-remedies shows whether they help.", markup=False)
    for risk, words in risk_words(cells).items():
        OUT.print(f"{risk.capitalize()}: {words}.", markup=False)
    OUT.print()
    for cell in cells:
        OUT.print(cell.line(), markup=False)


def _foreign_audit(folder: Path, attacks: list[str] | None) -> None:
    """Attack a folder of another system's updates. Ends with exit code 1 where the evidence is doubtful."""
    from ..attacks.foreign.foreign_audit import REMEDIES
    from ..attacks.foreign.foreign_folder import audit_folder

    cells = audit_folder(folder, attacks=attacks, report=print_line)
    _print_audit(cells, REMEDIES, accepted=False)
    OUT.print(f"written: {folder / 'audit.json'}", markup=False)
    if any(cell.status == "evidence_doubtful" for cell in cells):
        sys.exit(1)


def _active_audit(
    source: Path, changes: list[str], attacks: list[str] | None, out: Path | None, data_dir: Path | None, trust: bool
) -> None:
    """Run the active attacks against clients of a configuration, given as a run folder or a file."""
    from ..attacks.active.audit import active_audit, table, written
    from ..experiments import load_config
    from ..experiments.run.resume import data_directory_of

    folder = out or (source if source.is_dir() else Path("runs") / f"{source.stem}-active")
    path, believed = (source / "config.toml", trust) if source.is_dir() else (source, trust or None)
    config = load_config(path, changes, trust=believed)
    rows = active_audit(config, data_dir or data_directory_of(source), attacks=attacks, report=print_line)
    path = written(rows, config, folder)
    OUT.print(table(rows), markup=False)
    OUT.print(f"written: {path}", markup=False)


def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    digest: Annotated[str | None, typer.Option("--digest", help="What `cflpriv run` or an audit printed at its end.")] = None,
) -> None:
    """Check that a run folder is unchanged since its run and audits, and that its figures follow from its rounds. Exit code 1 if not."""
    from ..experiments.run.verify import verify as check

    verification = check(run_dir)
    problems = list(verification.problems)
    if digest is not None and digest != verification.digest:
        problems.append(f"{run_dir}: its digest is {verification.digest or 'missing'}, not {digest}")
    for problem in problems:
        OUT.print(f"not verified: {problem}", markup=False)
    if problems:
        sys.exit(1)
    OUT.print(f"verified: {run_dir}, digest {verification.digest}", markup=False)
    if verification.unchecked:
        OUT.print(f"not checked: {verification.unchecked}", markup=False)
