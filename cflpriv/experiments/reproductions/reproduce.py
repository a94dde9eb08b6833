"""Reproduce a paper's table or figure. Every cell is a run folder or a file of trials, so an interrupted reproduction can resume.

`reproduce` runs what is missing of an entry of `reproductions` into a folder and writes `table.md`, `table.csv` and `picture.svg` there. A
cell that makes no sense (a protection that its algorithm refuses), whose data are absent or too few, or whose training diverges becomes a
row with the error. A folder that cannot be resumed, and data that are absent for every cell, end the command.
"""

import csv
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...data import DataSpec, build_population
from ...data.datasets import HOW_TO_SET
from ...errors import InputError, TrainingDiverged, near
from ...files import append, write_atomically
from ...protocols.bounded_files import LARGEST_TABLE_BYTES, parse_json, read_bytes, read_json, read_text
from ...types import Population
from ..run.folder import interruptible, run_experiment
from ..run.resume import check_same_config, kept_rows, locked
from . import REPRODUCTIONS, Reproduction, ReproductionCell, RowFigure
from .exact_settings import config_of, published_of, published_of_trials, scaled_trials, trial_settings
from .published import Number
from .table import ReproductionOutcome, TableRow, in_words, slug, write

__all__ = ["ReproductionOutcome", "TableRow", "reproduce"]

PERCENT = {"shared": "accuracy_mean_last_rounds", "local": "local_accuracy_mean_last_rounds"}
PLAIN = {
    "ari": "ari",
    "choice_ari": "choice_ari",
    "clusters": "clusters",
    "rounds_shared": "rounds_to_target",
    "rounds_local": "local_rounds_to_target",
}
PLAIN |= {"megabits_shared": "megabits_a_client_to_target", "megabits_local": "local_megabits_a_client_to_target"}
NEVER = ("rounds_", "megabits_", "gap_from", "identified_from")
"""What the names of figures begin with that are None where something does not come to pass."""
NEWCOMERS = {"newcomer": "newcomer_accuracy_mean", "newcomer_tuned": "newcomer_tuned_accuracy_mean"}


def reproduce(
    name: str,
    out: str | Path,
    data_dir: str | Path | None = None,
    *,
    scale: float = 1.0,
    seeds: int = 1,
    changes: Sequence[str] = (),
    cells: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> ReproductionOutcome:
    """Run what is missing of the entry `name` into `out`, and write its table and picture there.

    `scale` in (0, 1] shrinks the keys that the entry lists; `seeds` runs are made of each cell (trials repeat by themselves); `changes` are
    "section.key=value" for every run; `cells` are beginnings of labels, empty for all: these are run, and shown with those that were run
    before. Ctrl-C ends with the results so far, and the same call resumes. Raises `InputError` for unknown names, data that are absent for
    every cell, or a folder that holds another reproduction, the same cells at other settings, or damaged files.
    """
    if name not in REPRODUCTIONS:
        raise InputError(f"reproduce {name!r}: is not known{near(name, list(REPRODUCTIONS))}")
    if not 0 < scale <= 1:
        raise InputError(f"--scale {scale}: is outside (0, 1]")
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: is below 1")
    for change in changes:
        if seeds > 1 and change.partition("=")[0].strip() in ("run.seed", "data.seed"):
            raise InputError(f"--set {change}: would give all of the {seeds} seeds the same; leave it out, or --seeds")
    entry, out = REPRODUCTIONS[name], Path(out)
    chosen = _chosen(entry, cells)
    if changes and all(cell.trial for cell in chosen):
        raise InputError(f"--set {changes[0]}: {name} has no runs{' among these cells' if cells else ''} whose keys could change")
    stand_in = _stand_in(entry, data_dir)
    _check_data(entry, chosen, scale, changes, stand_in, data_dir)
    _check_folder(name, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made ({error.strerror})") from None
    rows: list[TableRow] = []
    remarks: dict[str, None] = dict.fromkeys([f"scale {scale:g}: nothing shrunk"] if scale == 1 else [])
    if changes and (trials := [cell.label for cell in chosen if cell.trial]):
        remarks[f"without {', '.join(changes)}, which is for runs: {'; '.join(trials)}"] = None
    interrupted = False
    with locked(out):
        populations: dict[str, Population] = {}  # the last seed's only: one data set in memory
        shown: list[ReproductionCell] = []
        for cell in entry.cells:
            asked = cell in chosen and not interrupted
            if not asked and not _is_there(cell, out, scale, seeds):
                if not cell.trial and _is_there(cell, out, scale, 1):
                    remarks[f"left out, though it was run before: {cell.label} (not with all of these {seeds} seeds)"] = None
                continue
            report(f"{cell.label}")
            try:
                if cell.trial:
                    cell_rows, notes, complete = _trials(entry, cell, out, data_dir, scale, seeds)
                elif asked:
                    cell_rows, notes, complete = _runs(entry, cell, out, data_dir, scale, seeds, changes, stand_in, populations, report)
                else:
                    cell_rows, notes, complete = *_kept_runs(entry, cell, out, scale, seeds, changes, stand_in), True
            except KeyboardInterrupt:
                interrupted = True
                continue
            except InputError as error:
                if asked:
                    raise
                remarks[f"left out, though it was run before: {cell.label} ({error})"] = None
                continue
            shown.append(cell)
            remarks |= dict.fromkeys(notes)
            rows += cell_rows
            for row in cell_rows:
                report(f"  {in_words(row)}")
            interrupted |= not complete
        outcome = ReproductionOutcome(tuple(rows), tuple(remarks), interrupted)
        write(entry, name, outcome, shown, out, seeds, scale, changes)
    return outcome


def _chosen(entry: Reproduction, wanted: Sequence[str]) -> tuple[ReproductionCell, ...]:
    """The cells whose labels begin with a prefix in `wanted`, preceded by the cells whose groups they use."""
    labels = [cell.label for cell in entry.cells]
    for prefix in wanted:
        if not any(label.startswith(prefix) for label in labels):
            raise InputError(f"--cells {prefix!r}: no cell begins so{near(prefix, labels)}")
    taken = {cell.label for cell in entry.cells if not wanted or any(cell.label.startswith(prefix) for prefix in wanted)}
    taken |= {cell.groups_of for cell in entry.cells if cell.label in taken and cell.groups_of}
    return tuple(cell for cell in entry.cells if cell.label in taken)


def _is_there(cell: ReproductionCell, out: Path, scale: float, seeds: int) -> bool:
    """Whether the folder holds all of a cell, to be shown though it was not asked for now."""
    if not cell.trial:
        return all((folder / "checkpoints" / "final.json").is_file() for folder in _folders(cell.label, out, seeds))
    path, count = _trial_file(cell, out, scale, seeds)
    return path.is_file() and read_bytes(path, LARGEST_TABLE_BYTES).count(b"\n") >= count


def _folders(label: str, out: Path, seeds: int) -> list[Path]:
    """The run folders of a cell, one a seed."""
    return [out / f"{slug(label)}-s{seed}" for seed in range(seeds)]


def _trial_file(cell: ReproductionCell, out: Path, scale: float, seeds: int) -> tuple[Path, int]:
    """Where a cell's trials are kept, and how many there are to be."""
    return out / f"{slug(cell.label)}.jsonl", scaled_trials(cell, scale) if cell.trials > 1 else seeds


def _check_folder(name: str, out: Path) -> None:
    """Refuse a folder with the table of another reproduction: cells of the same name would be taken for its own."""
    table = out / "table.csv"
    if table.is_file():
        rows = csv.DictReader(read_text(table, errors="replace").splitlines(keepends=True))
        there = next((row.get("reproduction") for row in rows), None)
        if there not in (None, name):
            raise InputError(f"{table}: is of {there!r}, not of {name!r}; choose another folder with --out")


def _stand_in(entry: Reproduction, data_dir: str | Path | None) -> dict[str, str]:
    """Which of the entry's data sets are absent, and what stands in for each. Raises `InputError` for files that are there but damaged."""
    absent = {}
    for name, other in entry.instead.items():
        try:
            build_population(DataSpec(source=name, clients=1, samples_per_client=10, test_samples_per_client=10), data_dir)
        except InputError as error:
            if HOW_TO_SET not in str(error):  # every loader's message where there are no files
                raise
            absent[name] = other
    return absent


def _check_data(
    entry: Reproduction, cells: Sequence[ReproductionCell], scale: float, changes: Sequence[str], stand_in: Mapping[str, str],
    data_dir: str | Path | None,
) -> None:  # fmt: skip
    """Find out before anything runs that no cell has its data, or that no run accepts its keys. Raises the first cell's `InputError`."""
    answers: dict[Any, InputError | None] = {}
    refused: list[InputError] = []
    without_data: list[InputError] = []
    for cell in cells:
        if cell.trial:
            data = cell.settings.get("data", cell.settings)
            names = [name for name, _ in data.get("sources", [[data["source"], 1]] if "source" in data else [])]
            specs = [DataSpec(source=name, clients=1, samples_per_client=10, test_samples_per_client=10) for name in names]
        else:
            try:
                specs = [config_of(entry, cell, 0, scale, changes, stand_in)[0].data]
            except InputError as error:
                refused.append(error)  # the row will have the error
                continue
        for spec in specs:
            key = (spec.source, spec.sources)
            if key not in answers:
                answers[key] = _why_not(spec, data_dir)
            if (error_of_data := answers[key]) is not None:
                without_data.append(error_of_data)
                break
    if refused and len(refused) == sum(cell.trial is None for cell in cells):
        raise refused[0]
    if without_data and len(without_data) + len(refused) == len(cells):
        raise without_data[0]


def _why_not(spec: DataSpec, data_dir: str | Path | None) -> InputError | None:
    """Why no population of these data can be built; None if it can."""
    try:
        _population(spec, data_dir, {})
    except InputError as error:
        return error
    return None


def _population(spec: DataSpec, data_dir: str | Path | None, kept: dict[str, Population]) -> Population:
    key = repr(sorted((name, value) for name, value in asdict(spec).items() if not name.startswith("newcomer")))
    if key not in kept:
        kept.clear()
        kept[key] = build_population(spec, data_dir)
    return kept[key]


def _runs(
    entry: Reproduction, cell: ReproductionCell, out: Path, data_dir: str | Path | None, scale: float, seeds: int, changes: Sequence[str],
    stand_in: Mapping[str, str], populations: dict[str, Population], report: Callable[[str], None],
) -> tuple[list[TableRow], list[str], bool]:  # fmt: skip
    summaries: list[dict[str, Any]] = []
    notes: list[str] = []
    published: Mapping[str, Number] = {}
    folders = _folders(cell.label, out, seeds)
    with interruptible() as interrupted:  # in its last round a run ends as if nothing had been, and the next must not begin
        for seed, (folder, grouped) in enumerate(zip(folders, _folders(cell.groups_of, out, seeds), strict=True)):
            try:
                config, remarks = config_of(entry, cell, seed, scale, changes, stand_in)
                published = published_of(entry, cell, config)
                population = _population(config.data, data_dir, populations)
                notes += [*remarks, *population.notes]
                if cell.groups_of:
                    population = _grouped(population, grouped)
                summary = run_experiment(config, folder, data_dir, resume=True, population=population)
            except (InputError, TrainingDiverged) as error:
                if any(str(path) in str(error) for path in (folder, grouped)):  # it is not what is asked for, but what lies there
                    raise InputError(f"{error}; choose another folder with --out, or remove that one") from None
                return [_not_measured(cell, figure, error) for figure in cell.figures], notes, not interrupted()
            summaries.append(summary)
            cut = summary["rounds"] < summary["rounds_planned"] and not summary.get("stopped")
            if cut or (interrupted() and seed < seeds - 1):
                return [], notes, False
        rows, more = _from_folders(cell, summaries, folders, published)
        return rows, notes + more, not interrupted()


def _not_measured(cell: ReproductionCell, figure: RowFigure, error: Exception) -> TableRow:
    """The row of a cell that could not be run, or whose training diverged, with the reason."""
    skipped = "skipped: " if isinstance(error, InputError) else ""
    return TableRow(cell.label, figure.metric, None, None, None, 0, 0.0, f"{skipped}{error}")


def _kept_runs(
    entry: Reproduction, cell: ReproductionCell, out: Path, scale: float, seeds: int, changes: Sequence[str], stand_in: Mapping[str, str]
) -> tuple[list[TableRow], list[str]]:
    """A cell that was run before, from its folders. Raises `InputError` if that was at other settings, or a file is damaged."""
    notes: list[str] = []
    summaries: list[dict[str, Any]] = []
    published: Mapping[str, Number] = {}
    folders = _folders(cell.label, out, seeds)
    for seed, folder in enumerate(folders):
        config, remarks = config_of(entry, cell, seed, scale, changes, stand_in)
        published = published_of(entry, cell, config)
        check_same_config(config, folder)
        try:
            summary = read_json(folder / "summary.json")
        except (OSError, ValueError):
            raise InputError(f"{folder / 'summary.json'}: is missing or damaged") from None
        notes += [*remarks, *summary["notes"]]
        summaries.append(summary)
    rows, more = _from_folders(cell, summaries, folders, published)
    return rows, notes + more


def _from_folders(
    cell: ReproductionCell, summaries: Sequence[Mapping[str, Any]], folders: Sequence[Path], published: Mapping[str, Number]
) -> tuple[list[TableRow], list[str]]:
    """The rows of a cell, and what its runs have to remark, from one summary and run folder a seed."""
    values: dict[str, list[float | None]] = {figure.metric: [] for figure in cell.figures}
    notes: list[str] = []
    for seed, (summary, folder) in enumerate(zip(summaries, folders, strict=True)):
        if stopped := summary.get("stopped"):
            notes.append(f"{cell.label}: stopped after round {summary['rounds']}: {stopped}")
        if skipped := summary["rounds_skipped"]:
            notes.append(
                f"{cell.label}, seed {seed}: {skipped} of {summary['rounds']} rounds had too few clients to sum, and changed nothing"
            )
        if empty := summary["group_rounds_without_sum"]:
            why = "none, or too few to sum, of its clients took part"
            notes.append(f"{cell.label}, seed {seed}: {empty} times a cluster's model stayed because {why}")
        rows = kept_rows(folder, summary["rounds"])
        for metric, list_ in values.items():
            list_.append(_two_largest(folder) if metric == "two_largest" else _measured(metric, summary, rows))
    return _rows(cell, values, sum(summary["seconds"] for summary in summaries), published), notes


def _grouped(population: Population, folder: Path) -> Population:
    """The population with the clusters that another run found in place of its true groups."""
    path = folder / "measured.json"
    try:
        labels = read_json(path)["labels"] if path.is_file() else None
        if labels is None:
            raise InputError("no clusters were found to take the sizes from")
        return replace(population, groups=tuple(int(labels[str(client.id)]) for client in population.clients))
    except (KeyError, TypeError, json.JSONDecodeError):
        raise InputError(f"{path}: has no cluster for each of the {len(population.clients)} clients") from None


def _trials(
    entry: Reproduction, cell: ReproductionCell, out: Path, data_dir: str | Path | None, scale: float, seeds: int
) -> tuple[list[TableRow], list[str], bool]:
    """Trials are kept one a line, so that none is made twice."""
    assert cell.trial is not None
    settings, remarks = trial_settings(entry, cell, scale)
    path, count = _trial_file(cell, out, scale, seeds)
    kept = _kept_trials(path, {figure.metric for figure in cell.figures})
    asked = json.loads(json.dumps(settings))
    if any(trial["settings"] != asked for trial in kept):
        raise InputError(f"{path}: holds trials at other settings (another --scale?); choose another folder with --out")
    for number in range(len(kept), count):
        began = time.perf_counter()
        try:
            figures = cell.trial(number, data_dir, settings)
        except InputError as error:  # the other cells may have their data
            return [_not_measured(cell, figure, error) for figure in cell.figures], list(remarks), True
        line = {"trial": number, "settings": asked, "figures": dict(figures), "seconds": time.perf_counter() - began}
        append(path, json.dumps(line) + "\n")
        kept.append(line)
    values: dict[str, list[float | None]] = {
        figure.metric: [trial["figures"][figure.metric] for trial in kept[:count]] for figure in cell.figures
    }
    return _rows(cell, values, sum(trial["seconds"] for trial in kept[:count]), published_of_trials(cell, settings)), list(remarks), True


def _kept_trials(path: Path, metrics: set[str]) -> list[dict[str, Any]]:
    """The trials of an earlier call. A last line that a kill cut short is removed; `InputError` names one that is damaged otherwise."""
    data = read_bytes(path, LARGEST_TABLE_BYTES) if path.is_file() else b""
    if data and not data.endswith(b"\n"):
        data = data[: data.rfind(b"\n") + 1]
        write_atomically(path, data)
    kept = []
    for number, line in enumerate(data.splitlines()):
        try:
            trial = parse_json(line)
            sound = trial["trial"] == number and metrics <= set(trial["figures"]) and {"settings", "seconds"} <= set(trial)
        except (ValueError, TypeError, KeyError):
            sound = False
        if not sound:
            raise InputError(f"{path}: line {number + 1} is damaged; remove the file, and its trials are made again")
        kept.append(trial)
    return kept


def _rows(
    cell: ReproductionCell, values: Mapping[str, list[float | None]], seconds: float, published: Mapping[str, Number]
) -> list[TableRow]:
    rows = []
    for figure in cell.figures:
        numbers = [value for value in values[figure.metric] if value is not None]
        mean = float(np.mean(numbers)) if numbers else None
        deviation = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
        missing = len(values[figure.metric]) - len(numbers)
        note = "" if not missing else "never" if figure.metric.startswith(NEVER) else "not measured"
        note = f"{note} in {missing} of {missing + len(numbers)}" if note and numbers else note
        count = len(values[figure.metric])
        rows.append(TableRow(cell.label, figure.metric, mean, deviation, published.get(figure.metric), count, seconds, note))
    return rows


def _two_largest(folder: Path) -> float | None:
    """The share of a run's clients that are in its two largest clusters."""
    path = folder / "measured.json"
    try:
        labels = read_json(path)["labels"]
        sizes = sorted(Counter(labels.values()).values()) if labels else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path}: is missing or damaged") from None
    return sum(sizes[-2:]) / sum(sizes) if sizes else None


def _measured(metric: str, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """A figure of a run, from its summary and rows; accuracies in percent."""
    if metric in PERCENT:
        value = summary[PERCENT[metric]]
        return None if value is None else 100 * value
    if metric in PLAIN:
        value = summary.get(PLAIN[metric])
        return None if value is None else float(value)
    if metric in NEWCOMERS:
        value = (summary["newcomers"] or {}).get(NEWCOMERS[metric])
        return None if value is None else 100 * value
    if metric in ("before_split", "perplexity_before_split"):
        key, factor = ("accuracy_mean", 100.0) if metric == "before_split" else ("perplexity_mean", 1.0)
        split = next((number for number, row in enumerate(rows) if row.get("splits")), len(rows))
        seen = [row[key] for row in rows[:split] if row.get(key) is not None]
        return factor * seen[-1] if seen else None
    if metric == "perplexity":
        value = summary.get("perplexity_mean")
        return None if value is None else float(value)
    if metric == "identified_from_round":
        seen = [(row["round"] + 1, row["choice_ari"]) for row in rows if row.get("choice_ari") is not None]
        wrong = next((i for i in range(len(seen), 0, -1) if seen[i - 1][1] < 1), 0)  # all after these are right
        return float(seen[wrong][0]) if wrong < len(seen) else None
    if metric in ("max_norm", "mean_norm"):
        norms = [max(values) for row in rows if (values := [number for number in row.get(f"{metric}s", ()) if number is not None])]
        return norms[-1] / max(norms) if norms else None
    raise AssertionError(f"metric {metric} is of trials only")
