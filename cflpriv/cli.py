"""The command line. Exit codes: 0 success, 2 invalid user input (one clear line), 1 anything else."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

from .console import defaults_text, row_text, summary_text
from .errors import InputError, TrainingDiverged, WorkerLost, near
from .extras import what_to_install
from .protocols.errors import ProtocolError

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Suggests the nearest command where one is not known."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"no such command {args[0]!r}{near(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False,  # tracebacks that show locals would show clients' data
)  # fmt: skip
_out = Console(soft_wrap=True, highlight=False)
_err = Console(stderr=True, soft_wrap=True, highlight=False)

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The folder of data sets; default CFLPRIV_DATA, else data/.")]


DeviceName = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or auto, in place of run.device. It may be another than a recorded run's.")
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", help="A Python file that registers algorithms, models, attacks or data sets. May be repeated.", metavar="FILE"
    ),
]


def _show_version(asked: bool) -> None:
    if asked:
        _say(f"cflpriv {metadata.version('cflpriv')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", help="Show the version and end.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Privacy-preserving clustered federated learning, and what it leaks."""


@app.command()
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
) -> None:
    """Run one experiment into a run folder.

    CONFIG.toml is the experiment; - reads it from standard input.
    """
    from .experiments import Config, load_config, run_experiment
    from .experiments.resume import plugins_of
    from .experiments.verify import digest_of

    folder = out or Path("runs") / _name_of(config)
    changes = [*(set_ or []), *([] if device is None else [f"run.device={device}"])]
    experiment = load_config(config, changes, [*(plugins_of(folder) if resume else ()), *(plugin or [])])
    if experiment == Config():
        _say(f"{config}: {defaults_text(experiment)}")
    total = experiment.training.rounds
    with _progress() as progress, _hosts(hosts, ray, experiment.run.plugins, progress) as hosted:
        bar = progress.add_task("rounds", total=total, result="")

        def tick(row: dict[str, Any]) -> None:
            result = row_text(row)
            progress.update(bar, completed=row["round"] + 1, result=result)
            if not _out.is_terminal:
                _out.print(f"round {row['round'] + 1}/{total}  {result}", markup=False)

        bars: dict[str, Any] = {}

        def step(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total, result="")
            progress.update(bars[what], completed=done, total=total, visible=done < total)

        with _naming(config):
            summary = run_experiment(
                experiment, folder, data_dir, resume=resume, hosted=hosted,
                say=lambda line: progress.console.print(line, markup=False), tick=tick, step=step,
            )  # fmt: skip
    _out.print(summary_text(summary), markup=False)
    _out.print(f"run folder: {folder}, digest {digest_of(folder)}", markup=False)


@contextmanager
def _hosts(hosts: int | None, address: str | None, plugins: Sequence[str], progress: Progress) -> Iterator[Any]:
    """Where clients are: None for this process, else what makes their hosts on Ray, which end with the block."""
    if hosts is None and address is None:
        yield None
        return
    from .transports.hosts import SplitHosts
    from .transports.ray import ray_hosts

    with ray_hosts(hosts, address, plugins) as carrier:
        yield partial(SplitHosts, carrier=carrier, say=lambda line: progress.console.print(line, markup=False))


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: section.key=value. May be repeated.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder for all runs; default runs/NAME.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, max=512, help=r"Processes; default \[sweep] workers.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the runs with their numbers and how far they are; run nothing.")] = False,
    only: Annotated[list[int] | None, typer.Option("--only", help="Make this run only, by its number. May be repeated.")] = None,
    shard: Annotated[
        str, typer.Option("--shard", help="Make every N-th run from the I-th on: one of N machines over one folder.", metavar="I/N")
    ] = "",
    merge: Annotated[bool, typer.Option("--merge", help="Write tables, pictures and report of the runs that are there.")] = False,
    plugin: Plugins = None,
    data_dir: DataDir = None,
) -> None:
    """Run a grid of experiments, or choose privately among them; the same command again resumes it.

    CONFIG.toml is an experiment with a section \\[sweep]. With --only or --shard a part of the grid runs, and --merge makes the report.
    """
    from .attacks.audit import audit_run, check_asked
    from .experiments.private_choice import run_choice
    from .experiments.report import write_report
    from .experiments.sweep import load_sweep
    from .experiments.sweep_runs import failure_lines, part_of, run_sweep, shown

    grid, folder = load_sweep(config, set_ or [], plugin or []), out or Path("runs") / _name_of(config)
    with _naming(config):
        check_asked(grid.budget or "standard", grid.attacks or None, "[sweep] ")
        part = part_of(grid, only or [], shard)
        if sum((list_, merge, bool(only or shard))) > 1:
            raise InputError("--list, --merge, --only, --shard: give one of them")
        if list_:
            for line in shown(grid, folder):
                _say(line)
            return
        if grid.choose is not None:
            if merge or only or shard:
                raise InputError("--merge, --only, --shard: [sweep] choose keeps all runs but the best secret; leave them out")
            chosen = run_choice(grid, folder, data_dir, workers=workers, say=_say)
            _say(chosen.line)
            if chosen.run is not None:
                _say(f"report: {write_report(folder)}; the chosen run: {folder / chosen.run}")
            return
        failed = {} if merge else run_sweep(grid, folder, data_dir, audit=audit_run, workers=workers, cells=part, say=_say)
        if len(failed) == len(part):
            raise InputError(f"every run failed, the first with: {next(iter(failed.values()))}")
        if only or shard:
            _say(f"made a part; when all are there: cflpriv sweep {config} --out {folder} --merge")
        else:
            failed = _merged(grid, folder)
        for line in failure_lines(failed, len(part)):
            _say(line)


def _merged(grid: Any, folder: Path) -> dict[str, str]:
    """Write tables, pictures and report of the runs of a sweep that are there; says what is missing. The errors of those that failed."""
    from .experiments.report import write_report
    from .experiments.sweep_runs import opened, standing

    with opened(grid, folder):
        page = write_report(folder)
    tables = sorted(path.name for path in folder.iterdir() if path.suffix in (".csv", ".parquet"))
    _say(f"report: {page}; tables: {', '.join(tables)}")
    found = standing(grid, folder)
    if missing := [f"{number} {name}" for number, (name, how) in enumerate(found.items(), 1) if how in ("missing", "begun")]:
        _say(f"missing: {len(missing)} of {len(found)} runs: {', '.join(missing)}")
    return {name: how.removeprefix("failed: ") for name, how in found.items() if how.startswith("failed: ")}


@app.command()
def audit(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR"),
    ],
    adversary: Annotated[
        str | None,
        typer.Option(
            "--adversary",
            help="server, server+N (N colluding clients), active-server, key-holder, client, outsider; default: server, server+1 and "
            "key-holder, where the run has them.",
        ),
    ] = None,
    attacks: Annotated[
        str | None, typer.Option("--attacks", help="Names of attacks, with commas between; default: all that apply.")
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", help="quick (this run only), standard (5 seeds), thorough (10 seeds), as far as time allows.")
    ] = "standard",
    active: Annotated[
        bool,
        typer.Option("--active", help="Run active attacks against freshly started clients, and report what they refuse."),
    ] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Attack another system's updates: a folder as in docs/attacks/other_systems.md.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="With --active, the folder to write; default the run folder, or runs/NAME-active.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="With --active, change a key: section.key=value.")] = None,
    device: DeviceName = None,
    plugin: Plugins = None,
    data_dir: DataDir = None,
) -> None:
    """Attack a recorded run; writes audit.json and audit/ into its folder. An interrupted audit resumes when called again.

    RUN_DIR is a run folder whose payloads were recorded; with --active also a configuration, with --foreign a folder of updates.
    """
    from .attacks.audit import audit_run
    from .experiments.resume import data_directory_of
    from .experiments.verify import digest_of
    from .plugins import load_plugin

    for file in plugin or []:
        load_plugin(file)
    names = None if attacks is None else [name.strip() for name in attacks.split(",")]
    if foreign:
        if active or adversary is not None or out is not None or set_ or device is not None:
            raise InputError("--foreign: goes with --attacks and --plugin only; the adversary is whoever reads single updates")
        _foreign_audit(run_dir, names)
        return
    if active:
        if adversary is not None:
            raise InputError(f"--adversary {adversary}: applies to recordings; the active audit always attacks as the server")
        _active_audit(run_dir, [*(set_ or []), *([] if device is None else [f"run.device={device}"])], names, out, data_dir)
        return
    if out is not None or set_:
        raise InputError("--out, --set: go with --active; a recording is audited as it is, and the result written into its folder")
    try:
        place = data_dir or data_directory_of(run_dir)
        cells = audit_run(run_dir, adversary=adversary, attacks=names, budget=budget, data_dir=place, device=device, say=_say)
    except KeyboardInterrupt:
        done = run_dir / "audit.json"
        words = f"finished results are in {done}; the same command resumes" if done.is_file() else "nothing was finished yet"
        _err.print(f"cflpriv: stopped; {words}", markup=False)
        sys.exit(1)
    _print_audit(cells)
    _out.print(f"written: {run_dir / 'audit.json'}, digest {digest_of(run_dir)}", markup=False)


def _print_audit(cells: Sequence[Any]) -> None:
    """What each adversary learns, and all figures after it."""
    from .attacks.verdicts import verdicts_of

    for verdict in verdicts_of(cells):
        _out.print(f"{verdict.sentence[0].upper()}{verdict.sentence[1:]}.", markup=False)
        if verdict.reduces:
            _out.print(f"  Would reduce it: {verdict.reduces}.", markup=False)
    _out.print()
    for cell in cells:
        _out.print(cell.line(), markup=False)


def _foreign_audit(folder: Path, attacks: list[str] | None) -> None:
    """Attack a folder of another system's updates."""
    from .attacks.foreign_folder import audit_folder

    _print_audit(audit_folder(folder, attacks=attacks, say=_say))
    _out.print(f"written: {folder / 'audit.json'}", markup=False)


def _active_audit(source: Path, changes: list[str], attacks: list[str] | None, out: Path | None, data_dir: Path | None) -> None:
    """Run the active attacks against clients of a configuration, given as a run folder or a file."""
    from .attacks.active.audit import active_audit, table, written
    from .experiments import load_config
    from .experiments.resume import data_directory_of

    folder = out or (source if source.is_dir() else Path("runs") / f"{source.stem}-active")
    config = load_config(source / "config.toml" if source.is_dir() else source, changes)
    rows = active_audit(config, data_dir or data_directory_of(source), attacks=attacks, say=_say)
    path = written(rows, config, folder)
    _out.print(table(rows), markup=False)
    _out.print(f"written: {path}", markup=False)


@app.command()
def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    digest: Annotated[str | None, typer.Option("--digest", help="What `cflpriv run` or an audit printed at its end.")] = None,
) -> None:
    """Check that a run folder is unchanged since its run and audits, and that its figures follow from its rounds. Exit code 1 if not."""
    from .experiments.verify import verify as check

    found = check(run_dir)
    problems = list(found.problems)
    if digest is not None and digest != found.digest:
        problems.append(f"{run_dir}: its digest is {found.digest or 'missing'}, not {digest}")
    for problem in problems:
        _out.print(f"not verified: {problem}", markup=False)
    if problems:
        sys.exit(1)
    _out.print(f"verified: {run_dir}, digest {found.digest}", markup=False)


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="DIR")], plugin: Plugins = None) -> None:
    """Make one self-contained report.html, and results.csv beside it for runs.

    DIR is a run folder, a folder of run folders, or a folder of another system's updates that was audited.
    """
    from .experiments.report import write_report
    from .plugins import load_plugin

    for file in plugin or []:
        load_plugin(file)
    _out.print(f"report: {write_report(folder)}", markup=False)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    out: Annotated[Path, typer.Option("--out", help="The file to write; it ends in .safetensors or .pt.", metavar="FILE")],
    model: Annotated[int | None, typer.Option("--model", help="The cluster whose model it is, from 0.", metavar="K")] = None,
    client: Annotated[int | None, typer.Option("--client", help="A client, for its last locally trained model.", metavar="N")] = None,
    data_dir: DataDir = None,
) -> None:
    """Write a model of a run as a state_dict, which a module of your own can load.

    RUN_DIR is a run folder.
    """
    from .experiments.export import export_model

    exported = export_model(run_dir, out, data_dir, cluster=model, client=client)
    _say(f"written: {out}, {exported.line}")


@app.command()
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
    from .experiments.reproduce import reproduce as run_all

    folder = out or Path("runs") / f"reproduce-{name}"
    wanted = [] if cells is None else [one.strip() for one in cells.split(";") if one.strip()]
    if cells is not None and not wanted:
        raise InputError(f"--cells {cells!r}: names no cell; leave it out for all")
    outcome = run_all(name, folder, data_dir, scale=scale, seeds=seeds, changes=set_ or [], cells=wanted, say=_say)
    _out.print((folder / "table.md").read_text(encoding="utf-8"), markup=False)
    written = sorted(path.name for path in folder.iterdir() if path.stem in ("table", "picture"))
    _out.print(f"written: {', '.join(written)} in {folder}", markup=False)
    if outcome.interrupted:
        _err.print("cflpriv: stopped; finished results are kept, and the same command resumes", markup=False)
        sys.exit(1)


@app.command()
def claims(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The claim; default: list them.")] = None,
    scale: Annotated[float, typer.Option("--scale", help="Factor for the number of seeds; below 1 the claim stays undecided.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="The first seed.")] = 0,
    out: Annotated[Path, typer.Option("--out", help="The folder that holds a folder for each run of a claim.")] = Path("runs/claims"),
    page: Annotated[Path | None, typer.Option("--page", help="Write the table of all verdicts in --out to this file.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Put a published statement to the test, and print a verdict by a rule set before; the same command again resumes it."""
    from .attacks.claims.judging import in_words, judge, listed, write_page

    if name is not None:
        verdict = judge(name, out / f"{name}-s{seed}", data_dir, scale=scale, seed=seed, say=_say)
        _say("\n".join(in_words(name, verdict)))
    if page is not None:
        judged, repeated = write_page(out, page)
        _say(f"written: {page}, {judged} claim(s) with a verdict, {repeated} repeated")
    elif name is None:
        _say("\n".join(f"{one:<28} {statement}" for one, statement in listed().items()))


@app.command()
def init(
    file: Annotated[Path | None, typer.Argument(help="The file to write; default: standard output.", metavar="[FILE]")] = None,
    algorithm: Annotated[str, typer.Option("--algorithm", help="The algorithm; `cflpriv list` names them.", metavar="NAME")] = "pacfl",
    schema: Annotated[bool, typer.Option("--schema", help="Write the JSON schema of configurations instead, for editors.")] = False,
    plugin: Plugins = None,
) -> None:
    """Write a commented configuration that runs."""
    from .experiments.config_starter import begin_file
    from .plugins import load_plugin

    for one in plugin or []:
        load_plugin(one)
    text = begin_file(file, None if schema else algorithm)
    _out.print(text if file is None else f"written: {file}", markup=False, end="" if file is None else "\n")


@app.command()
def examples(folder: Annotated[Path, typer.Argument(help="The folder to make.", metavar="[DIR]")] = Path("examples")) -> None:
    """Write the examples, configurations and scripts, into a new folder."""
    from .files import copy_examples

    try:
        _say(f"written: {copy_examples(folder)} files in {folder}")
    except FileExistsError:
        raise InputError(f"{folder}: exists; name a new folder") from None


@app.command()
def explain(key: Annotated[str, typer.Argument(help="section.key, a key, or a section.", metavar="KEY")], plugin: Plugins = None) -> None:
    """Print what a configuration key means, its type, range and default."""
    from .experiments.config_reference import explained
    from .plugins import load_plugin

    for file in plugin or []:
        load_plugin(file)
    _out.print(explained(key), markup=False)


@app.command("list")
def list_(plugin: Plugins = None) -> None:
    """List algorithms, protections, attacks, data sets, partitions, models, reproductions."""
    from .algorithms import ALGORITHMS
    from .attacks import ATTACKS
    from .attacks.active import ACTIVE_ATTACKS
    from .contract.protection import PROTECTIONS, ROBUST, listed
    from .data import DATASETS, PARTITIONS
    from .data.named import LOADERS
    from .engine.models import MODELS
    from .experiments.reproductions import REPRODUCTIONS
    from .plugins import load_plugin

    for file in plugin or []:
        load_plugin(file)
    for problem in (line for registry in (ALGORITHMS, ATTACKS, LOADERS, MODELS, PROTECTIONS) for line in registry.load_all()):
        _err.print(f"cflpriv: {problem}", markup=False)
    for title, entries in (
        ("algorithms", {name: spec.summary for name, spec in ALGORITHMS.items()}),
        ("protection.gram", listed("gram")),
        ("protection.sum", listed("sum")),
        ("protection.robust", ROBUST),
        ("attacks", {name: attack.summary for name, attack in ATTACKS.items()}),
        ("active attacks", {name: attack.summary for name, attack in ACTIVE_ATTACKS.items()}),
        ("data.source", DATASETS),
        ("data.partition", PARTITIONS),
        ("models", {name: line for name, (_, line) in MODELS.items()}),
        ("reproductions", {name: f"{one.title} ({one.source})" for name, one in REPRODUCTIONS.items()}),
    ):
        _out.print(f"[bold]{title}[/bold]")
        for name, line in entries.items():
            _out.print(f"  {name:<18} {line}", markup=False)


def _name_of(config: Path) -> str:
    """The name of a run whose configuration this is."""
    return "stdin" if str(config) == "-" else config.stem


@contextmanager
def _naming(config: Path) -> Iterator[None]:
    """Name the configuration file in what is found wrong after it was read, such as with its data."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{config}: {error}") from None


def _say(line: str) -> None:
    _out.print(line, markup=False)


def _progress() -> Progress:
    """A progress bar on a terminal; plain lines otherwise."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[result]}"),
    )
    return Progress(*columns, console=_out, disable=not _out.is_terminal)


def main() -> None:
    """The entry point: errors become one line and an exit code."""
    try:
        app(standalone_mode=True)
    except (InputError, ProtocolError, TrainingDiverged, WorkerLost, OSError) as error:
        _end(str(error), 2 if isinstance(error, InputError) else 1)
    except ModuleNotFoundError as error:
        if (line := what_to_install(error)) is None:
            raise
        _end(f"this command {line}", 2)
    except (MemoryError, RuntimeError, ValueError) as error:
        if "null byte" in str(error):
            _end("a path holds a character NUL, which no file's name can", 2)
        if not (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)):
            raise
        _end("out of memory; everything completed is saved: make room, or take fewer clients, samples or workers, then --resume", 1)


def _end(line: str, code: int) -> None:
    _err.print(f"cflpriv: {line}", markup=False)
    sys.exit(code)


if __name__ == "__main__":
    main()
