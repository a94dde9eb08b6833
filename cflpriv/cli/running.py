"""Commands that run experiments: `run`, `sweep`, `reproduce`."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import TimeLeft, cluster_lines, defaults_text, row_text, summary_text
from ..errors import InputError
from ..progress import run_progress
from ..protocols.bounded_files import read_json, read_text
from .shared import ERR, OUT, DataDir, DeviceName, Plugins, Trust, name_of, naming, note_idle_code, print_line

__all__ = ["advise", "reproduce", "run", "sweep"]


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: section.key=value. May be repeated.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run folder to make; default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run that ended early from its last checkpoint.")] = False,
    device: DeviceName = None,
    plugin: Plugins = None,
    data_dir: DataDir = None,
    hosts: Annotated[int | None, typer.Option("--hosts", min=1, help="Spread the clients over so many processes, on Ray.")] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", help="The Ray cluster of --hosts, as ray.init takes it; default a local one.", metavar="ADDRESS")
    ] = None,
    trust: Trust = False,
) -> None:
    """Run one experiment into a run folder.

    CONFIG.toml is the experiment; - reads it from standard input.
    """
    from ..advice.words import advice_lines, mixture_line, without_advice
    from ..experiments import Config, run_experiment
    from ..experiments.digests import digest_of

    folder = out or Path("runs") / name_of(config)
    changes = [*(set_ or []), *([] if device is None else [f"run.device={device}"])]
    experiment = _read(config, changes, plugin or [], folder if resume else None, trust)
    if experiment == Config():
        print_line(f"{config}: {defaults_text(experiment)}")
    note_idle_code(config, trust)  # of the user's own configuration all runs
    total = experiment.training.rounds
    with run_progress(total, OUT) as progress, _hosts(hosts, ray, progress.line) as hosted:
        time_left: list[TimeLeft] = []

        def tick(row: dict[str, Any]) -> None:
            progress.tick(row)
            if not time_left:  # the first round has other work, and a run that goes on has rounds before it
                time_left.append(TimeLeft(total, row["round"] + 1))
            if not OUT.is_terminal:
                left = time_left[0].words(row["round"] + 1)
                OUT.print(f"round {row['round'] + 1}/{total}  {row_text(row)}{left}", markup=False)

        with naming(config):
            summary = run_experiment(
                experiment, folder, data_dir, resume=resume, hosted=hosted,
                report=progress.line, tick=tick, step=progress.step,
            )  # fmt: skip
    OUT.print(summary_text(summary), markup=False)
    for line in _members(folder):
        OUT.print(line, markup=False)
    for line in [without_advice(summary, f"cflpriv advise {config}")] if summary["advice"] is None else advice_lines(summary["advice"]):
        if line:
            OUT.print(line, markup=False)
    if summary["mixture"] is not None:
        OUT.print(mixture_line(summary["mixture"]), markup=False)
    OUT.print(f"run folder: {folder}, digest {digest_of(folder)}", markup=False)
    attacked = [] if experiment.run.record == "headers" else [f"cflpriv audit {folder}"]
    OUT.print(f"next: {'; '.join([*attacked, f'cflpriv report {folder}'])}", markup=False)


def _members(folder: Path) -> list[str]:
    """The clients of each cluster of a run that has just ended."""
    path = folder / "measured.json"
    measured = read_json(path) if path.is_file() else {}
    return cluster_lines(
        {int(client): label for client, label in (measured.get("labels") or {}).items()}, measured.get("client_names") or []
    )


def advise(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: section.key=value. May be repeated.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run folder to make; default runs/NAME-advised.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run that ended early from its last checkpoint.")] = False,
    device: DeviceName = None,
    plugin: Plugins = None,
    data_dir: DataDir = None,
    trust: Trust = False,
) -> None:
    """Run one experiment, and find out whether clusters help its clients and what to deploy.

    CONFIG.toml is the experiment; the same as run with --set run.advise=true.
    """
    folder = out or Path("runs") / f"{name_of(config)}-advised"
    run(config, [*(set_ or []), "run.advise=true"], folder, resume, device, plugin, data_dir, None, None, trust)


def _read(config: Path, changes: list[str], plugin: list[Path], resumed: Path | None, trust: bool) -> Any:
    """The experiment of `run`; with the code of the run in the folder `resumed`, where that is trusted."""
    from ..experiments import load_config
    from ..experiments.config.config import read_tree
    from ..experiments.trust import idle_code, may_run, named_code

    path = None if resumed is None else resumed / "config.toml"
    recorded = read_tree(path) if path is not None and path.is_file() else {}
    if path is not None and trust and may_run(path, recorded, trust):
        plugin = [*map(Path, named_code(recorded)), *plugin]
    try:
        return load_config(config, changes, plugin, trust=trust or None)
    except InputError as error:  # of a name that the folder's code registers, say
        idle = "" if path is None else idle_code(path, recorded)
        raise InputError("; ".join(filter(None, (str(error), idle)))) from None


@contextmanager
def _hosts(hosts: int | None, address: str | None, notify: Callable[[str], None]) -> Iterator[Any]:
    """Where clients are: None for this process, else what makes their hosts on Ray, which end with the block."""
    if hosts is None and address is None:
        yield None
        return
    from ..transports.hosts import SplitHosts
    from ..transports.ray import ray_hosts

    with ray_hosts(hosts, address) as carrier:
        yield partial(SplitHosts, carrier=carrier, notify=notify)


def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: section.key=value. May be repeated.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder for all runs; default runs/NAME.")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, max=512, help=r"Processes; default \[sweep] workers, or one a core.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the runs with their numbers and how far they are; run nothing.")] = False,
    only: Annotated[list[int] | None, typer.Option("--only", help="Make this run only, by its number. May be repeated.")] = None,
    shard: Annotated[
        str, typer.Option("--shard", help="Make every N-th run from the I-th on: one of N machines over one folder.", metavar="I/N")
    ] = "",
    merge: Annotated[bool, typer.Option("--merge", help="Write tables, pictures and report of the runs that are there.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Changes nothing: a sweep always goes on where it stopped.")] = False,
    plugin: Plugins = None,
    data_dir: DataDir = None,
) -> None:
    """Run a grid of experiments, or choose privately among them; the same command again resumes it.

    CONFIG.toml is an experiment with a section \\[sweep]. With --only or --shard a part of the grid runs, and --merge makes the report.
    """
    from ..attacks.audit import audit_run, check_asked
    from ..experiments.report.report import write_report
    from ..experiments.sweep.private_choice import run_choice
    from ..experiments.sweep.sweep import load_sweep
    from ..experiments.sweep.sweep_runs import failure_lines, part_of, run_sweep, shown

    grid, folder = load_sweep(config, set_ or [], plugin or []), out or Path("runs") / name_of(config)
    note_idle_code(config, False)
    with naming(config):
        check_asked(grid.budget or "standard", grid.attacks or None, "[sweep] ")
        part = part_of(grid, only or [], shard)
        if sum((list_, merge, bool(only or shard))) > 1:
            raise InputError("--list, --merge, --only, --shard: give one of them")
        if list_:
            for line in shown(grid, folder):
                print_line(line)
            return
        if grid.choose is not None:
            if merge or only or shard:
                raise InputError("--merge, --only, --shard: [sweep] choose keeps all runs but the best secret; leave them out")
            with _stopping(grid, folder):
                chosen = run_choice(grid, folder, data_dir, workers=workers, report=print_line)
            print_line(chosen.line)
            if chosen.run is not None:
                print_line(f"report: {write_report(folder)}; the chosen run: {folder / chosen.run}")
            return
        with _stopping(grid, folder):
            failed = {} if merge else run_sweep(grid, folder, data_dir, audit=audit_run, workers=workers, cells=part, report=print_line)
        if len(failed) == len(part):
            raise InputError(f"every run failed, the first with: {next(iter(failed.values()))}")
        if only or shard:
            print_line(f"made a part; when all are there: cflpriv sweep {config} --out {folder} --merge")
        else:
            failed = _merged(grid, folder)
        for line in failure_lines(failed, len(part)):
            print_line(line)


@contextmanager
def _stopping(grid: Any, folder: Path) -> Iterator[None]:
    """After Ctrl-C say what is kept and the command that goes on, and end with exit code 1."""
    from ..experiments.sweep.sweep_runs import kept_words

    try:
        yield
    except KeyboardInterrupt:
        ERR.print(f"cflpriv: {kept_words(grid, folder, shlex.join(['cflpriv', *sys.argv[1:]]))}", markup=False)
        sys.exit(1)


def _merged(grid: Any, folder: Path) -> dict[str, str]:
    """Write tables, pictures and report of the runs of a sweep that are there; says what is missing. The errors of those that failed."""
    from ..experiments.report.report import write_report
    from ..experiments.report.sweep_report import sweep_lines
    from ..experiments.sweep.sweep_runs import locked_sweep, standing

    with locked_sweep(grid, folder):
        page = write_report(folder)
    for line in sweep_lines(folder, grid):
        print_line(line)
    tables = sorted(path.name for path in folder.iterdir() if path.suffix in (".csv", ".parquet"))
    print_line(f"report: {page}; tables: {', '.join(tables)}")
    status_of = standing(grid, folder)
    if missing := [f"{number} {name}" for number, (name, how) in enumerate(status_of.items(), 1) if how in ("missing", "begun")]:
        print_line(f"missing: {len(missing)} of {len(status_of)} runs: {', '.join(missing)}")
    return {name: how.removeprefix("failed: ") for name, how in status_of.items() if how.startswith("failed: ")}


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    scale: Annotated[
        float, typer.Option("--scale", help="Factor up to 1 for rounds, clients or trials; the output lists the changes.")
    ] = 1.0,
    seeds: Annotated[int, typer.Option("--seeds", help="How many seeds, 0, 1, ...")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key of every run: section.key=value. May be repeated.")] = None,
    cells: Annotated[str | None, typer.Option("--cells", help="Beginnings of cells' names, with semicolons between; default: all.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder for its runs and tables; default runs/reproduce-NAME.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Run a paper's table or figure, ours beside the published one; the same command again resumes it.

    NAME is one of the reproductions that `cflpriv list` names.
    """
    from ..experiments.reproductions.reproduce import reproduce as run_all

    folder = out or Path("runs") / f"reproduce-{name}"
    wanted = [] if cells is None else [label.strip() for label in cells.split(";") if label.strip()]
    if cells is not None and not wanted:
        raise InputError(f"--cells {cells!r}: names no cell; leave it out for all")
    outcome = run_all(name, folder, data_dir, scale=scale, seeds=seeds, changes=set_ or [], cells=wanted, report=print_line)
    OUT.print(read_text(folder / "table.md"), markup=False)
    written = sorted(path.name for path in folder.iterdir() if path.stem in ("table", "picture"))
    OUT.print(f"written: {', '.join(written)} in {folder}", markup=False)
    if outcome.interrupted:
        ERR.print("cflpriv: stopped; finished results are kept, and the same command resumes", markup=False)
        sys.exit(1)
