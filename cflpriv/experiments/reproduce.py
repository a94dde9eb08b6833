"""A paper's table or figure beside ours: every cell a run folder or a file of trials, so that what was cut short goes on.

`reproduce` runs what is missing of an entry of `reproductions` into a folder and writes `table.md`, `table.csv` and `picture.svg` there. A
cell that makes no sense (a protection that its algorithm refuses) becomes a row that says so; data that are not there end everything.
"""

import base64
import csv
import io
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..data import DataSpec, build_population
from ..errors import InputError
from ..files import append, write_atomically
from ..types import Population
from .config import Config, near, parse_config, set_key
from .folder import run_experiment
from .pictures import PALETTE, new_figure, style, uri
from .reproductions import METRICS, REPRODUCTIONS, Cell, Reproduction
from .resume import locked

__all__ = ["Outcome", "Row", "config_of", "reproduce", "scaled_trials"]

PERCENT = {"shared": "accuracy_mean_last_rounds", "local": "local_accuracy_mean_last_rounds"}
PLAIN = {"ari": "ari", "clusters": "clusters", "rounds_shared": "rounds_to_target", "rounds_local": "local_rounds_to_target"}
NEWCOMERS = {"newcomer": "newcomer_accuracy_mean", "newcomer_tuned": "newcomer_tuned_accuracy_mean"}


@dataclass(frozen=True)
class Row:
    """One line of the table: a cell's figure, ours as mean and deviation over `count` seeds or trials, beside the published one."""

    cell: str
    metric: str
    ours: float | None
    deviation: float | None
    published: float | str | None
    count: int
    seconds: float
    note: str = ""

    @property
    def difference(self) -> float | None:
        both = self.ours is not None and isinstance(self.published, float)
        return self.ours - self.published if both else None  # type: ignore[operator]


@dataclass(frozen=True)
class Outcome:
    """What `reproduce` found: rows, remarks on scale and data, and whether it was interrupted."""

    rows: tuple[Row, ...]
    remarks: tuple[str, ...]
    interrupted: bool = False


# --- from an entry to configurations ------------------------------------------------------------------------------------------------


def config_of(
    entry: Reproduction, cell: Cell, seed: int, scale: float = 1.0, changes: Sequence[str] = (), stand_in: Mapping[str, str] | None = None
) -> tuple[Config, tuple[str, ...]]:
    """The configuration of a run cell, and what `scale` and `stand_in` (data set -> what stands in for it) made of it, in words.

    Raises `InputError` naming the cell's key and value that do not fit.
    """
    keys = {**entry.base, **cell.changes}
    remarks = []
    if scale < 1:
        keys |= cell.thin
        for key, floor in entry.shrinks.items():
            if key in keys and (old := keys[key]) != (new := _shrunk(key, old, scale, floor)):
                keys[key] = new
                remarks.append(f"{key} {old} → {new}")
        remarks += [f"{key} at most {value}" for key, value in cell.thin.items() if keys[key] == value]
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = deepcopy(value)
    for absent, there in (stand_in or {}).items():
        sources = tree["data"].get("sources", [])
        tree["data"]["sources"] = [[there if name == absent else name, count] for name, count in sources]
        remarks.append(f"{there} stands in for {absent}, whose files are absent: not the published experiment")
    for section in ("data", "run"):
        tree.setdefault(section, {})["seed"] = seed
    tree["run"].setdefault("checkpoint_every", 10)
    for change in changes:
        set_key(tree, change)
    protection, training = tree.get("protection", {}), tree.setdefault("training", {})
    asked = any(change.replace(" ", "").startswith("training.weights=") for change in changes)
    hidden = protection.get("sum", "none") != "none" or tree.get("privacy", {}).get("unit", "none") != "none"
    if hidden and not protection.get("max_weight") and not asked and training.get("weights", "examples") == "examples":
        training["weights"] = "equal"
        remarks.append("training.weights = equal: sample counts would show through this protection")
    return parse_config(tree, f"cell {cell.label!r}"), tuple(remarks)


def _shrunk(key: str, value: Any, scale: float, floor: int) -> Any:
    """A number of clients becomes a multiple of its floor, so that groups stay equal."""
    if isinstance(value, list):
        return [[name, _shrunk("", count, scale, floor)] for name, count in value]
    step = floor if key == "data.clients" else 1
    return min(value, max(floor, step * round(value * scale / step)))


def scaled_trials(cell: Cell, scale: float) -> int:
    """How many trials of a cell are made: its own number times `scale`, at least one."""
    return max(1, round(cell.trials * scale))


def _trial_settings(entry: Reproduction, cell: Cell, scale: float) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """A trial's settings: those that are trees of sections shrink like a run's."""
    settings, remarks = deepcopy(dict(cell.settings)), []
    for key, floor in entry.shrinks.items():
        section, _, name = key.partition(".")
        if scale < 1 and isinstance(settings.get(section), dict) and name in settings[section]:
            old, new = settings[section][name], _shrunk(key, settings[section][name], scale, floor)
            if old != new:
                settings[section][name] = new
                remarks.append(f"{key} {old} → {new}")
    if cell.trials > 1 and (count := scaled_trials(cell, scale)) != cell.trials:
        remarks.append(f"trials {cell.trials} → {count}")
    return settings, tuple(remarks)


# --- running ------------------------------------------------------------------------------------------------------------------------


def reproduce(
    name: str,
    out: str | Path,
    data_dir: str | Path | None = None,
    *,
    scale: float = 1.0,
    seeds: int = 1,
    changes: Sequence[str] = (),
    cells: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run what is missing of the entry `name` into `out`, and write its table and picture there.

    `scale` in (0, 1] shrinks what the entry says can shrink; `seeds` runs are made of each cell (trials repeat by themselves); `changes`
    are "section.key=value" for every run; `cells` are beginnings of labels, empty for all. Ctrl-C ends with what there is, and the same
    call goes on. Raises `InputError` for unknown names, data that are absent, or a folder that holds the same cells at other settings.
    """
    if name not in REPRODUCTIONS:
        raise InputError(f"reproduce {name!r}: is not known{near(name, list(REPRODUCTIONS))}")
    if not 0 < scale <= 1:
        raise InputError(f"--scale {scale}: is outside (0, 1]")
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: is below 1")
    entry, out = REPRODUCTIONS[name], Path(out)
    if changes and not entry.base and all(cell.trial for cell in entry.cells):
        raise InputError(f"--set {changes[0]}: {name} has no runs whose keys could change")
    chosen = _chosen(entry, cells)
    stand_in = _stand_in(entry, data_dir)
    _check_data(entry, chosen, scale, changes, stand_in, data_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made ({error.strerror})") from None
    rows: list[Row] = []
    remarks: dict[str, None] = dict.fromkeys([f"scale {scale:g}: nothing shrunk"] if scale == 1 else [])
    interrupted = False
    with locked(out):
        populations: dict[str, Population] = {}  # the last seed's only: one data set in memory
        for cell in chosen:
            say(f"{cell.label}")
            try:
                found, said, complete = (
                    _trials(entry, cell, out, data_dir, scale, seeds)
                    if cell.trial
                    else _runs(entry, cell, out, data_dir, scale, seeds, changes, stand_in, populations, say)
                )
            except KeyboardInterrupt:
                interrupted = True
                break
            remarks |= dict.fromkeys(said)
            rows += found
            for row in found:
                say(f"  {_line(row)}")
            if not complete:
                interrupted = True
                break
        outcome = Outcome(tuple(rows), tuple(remarks), interrupted)
        _write(entry, name, outcome, chosen, out, seeds, scale, changes)
    return outcome


def _chosen(entry: Reproduction, wanted: Sequence[str]) -> tuple[Cell, ...]:
    """The cells whose labels begin with one of `wanted`, after those that they take groups from."""
    labels = [cell.label for cell in entry.cells]
    for one in wanted:
        if not any(label.startswith(one) for label in labels):
            raise InputError(f"--cells {one!r}: no cell begins so{near(one, labels)}")
    taken = {cell.label for cell in entry.cells if not wanted or any(cell.label.startswith(one) for one in wanted)}
    taken |= {cell.groups_of for cell in entry.cells if cell.label in taken and cell.groups_of}
    return tuple(cell for cell in entry.cells if cell.label in taken)


def _stand_in(entry: Reproduction, data_dir: str | Path | None) -> dict[str, str]:
    """Which of the entry's data sets are absent, and what stands in for each."""
    absent = {}
    for name, other in entry.instead.items():
        try:
            build_population(DataSpec(source=name, clients=1, samples_per_client=10, test_samples_per_client=10), data_dir)
        except InputError:
            absent[name] = other
    return absent


def _check_data(
    entry: Reproduction, cells: Sequence[Cell], scale: float, changes: Sequence[str], stand_in: Mapping[str, str],
    data_dir: str | Path | None,
) -> None:  # fmt: skip
    """Find out before anything runs that a data set is missing. Raises `InputError` saying which and where it was looked for."""
    seen = set()
    for cell in cells:
        if cell.trial:
            source = str(cell.settings.get("data", {}).get("source", "")) if isinstance(cell.settings.get("data"), dict) else ""
            specs = [DataSpec(source=source, clients=1, samples_per_client=10, test_samples_per_client=10)] if source else []
        else:
            try:
                specs = [config_of(entry, cell, 0, scale, changes, stand_in)[0].data]
            except InputError:
                continue  # the row will say so
        for spec in specs:
            key = (spec.source, spec.sources)
            if key not in seen:
                seen.add(key)
                _population(spec, data_dir, {})


def _population(spec: DataSpec, data_dir: str | Path | None, kept: dict[str, Population]) -> Population:
    key = repr(sorted((name, value) for name, value in asdict(spec).items() if not name.startswith("newcomer")))
    if key not in kept:
        kept.clear()
        kept[key] = build_population(spec, data_dir)
    return kept[key]


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=+]+", "_", label).strip("_.")


def _runs(
    entry: Reproduction, cell: Cell, out: Path, data_dir: str | Path | None, scale: float, seeds: int, changes: Sequence[str],
    stand_in: Mapping[str, str], populations: dict[str, Population], say: Callable[[str], None],
) -> tuple[list[Row], list[str], bool]:  # fmt: skip
    values: dict[str, list[float | None]] = {figure.metric: [] for figure in cell.figures}
    said: list[str] = []
    seconds = 0.0
    for seed in range(seeds):
        folder = out / f"{_slug(cell.label)}-s{seed}"
        try:
            config, remarks = config_of(entry, cell, seed, scale, changes, stand_in)
            population = _population(config.data, data_dir, populations)
            said += [*remarks, *population.notes]
            if cell.groups_of:
                population = _grouped(population, out / f"{_slug(cell.groups_of)}-s{seed}")
            summary = run_experiment(config, folder, data_dir, resume=True, population=population)
        except InputError as error:
            if (folder / "config.toml").is_file() and "--resume" in str(error):
                raise InputError(f"{out}: {error}; choose another folder with --out") from None
            return [Row(cell.label, figure.metric, None, None, figure.published, 0, 0.0, str(error)) for figure in cell.figures], said, True
        if summary["rounds"] < summary["rounds_planned"] and not summary.get("stopped"):
            return [], said, False
        seconds += summary["seconds"]
        if stopped := summary.get("stopped"):
            said.append(f"{cell.label}: stopped after round {summary['rounds']}: {stopped}")
        if skipped := summary["rounds_skipped"]:
            said.append(
                f"{cell.label}, seed {seed}: {skipped} of {summary['rounds']} rounds had too few clients to sum, and changed nothing"
            )
        if empty := summary["group_rounds_without_sum"]:
            said.append(f"{cell.label}, seed {seed}: {empty} times a cluster's model stayed because too few of its clients took part")
        rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        for metric, list_ in values.items():
            list_.append(_measured(metric, summary, rows))
    return _rows(cell, values, seconds), said, True


def _grouped(population: Population, folder: Path) -> Population:
    """The population with the clusters that another run found in place of its true groups."""
    path = folder / "measured.json"
    labels = json.loads(path.read_text(encoding="utf-8"))["labels"] if path.is_file() else None
    if labels is None:
        raise InputError(f"{folder.name} found no clusters to take the sizes from")
    return replace(population, groups=tuple(int(labels[str(client.id)]) for client in population.clients))


def _trials(
    entry: Reproduction, cell: Cell, out: Path, data_dir: str | Path | None, scale: float, seeds: int
) -> tuple[list[Row], list[str], bool]:
    """Trials are kept one a line, so that none is made twice."""
    assert cell.trial is not None
    settings, remarks = _trial_settings(entry, cell, scale)
    count = scaled_trials(cell, scale) if cell.trials > 1 else seeds
    path = out / f"{_slug(cell.label)}.jsonl"
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    asked = json.loads(json.dumps(settings))
    if any(one["settings"] != asked for one in kept):
        raise InputError(f"{path}: holds trials at other settings (another --scale?); choose another folder with --out")
    for number in range(len(kept), count):
        began = time.perf_counter()
        figures = cell.trial(number, data_dir, settings)
        line = {"trial": number, "settings": asked, "figures": dict(figures), "seconds": time.perf_counter() - began}
        append(path, json.dumps(line) + "\n")
        kept.append(line)
    values: dict[str, list[float | None]] = {
        figure.metric: [one["figures"][figure.metric] for one in kept[:count]] for figure in cell.figures
    }
    return _rows(cell, values, sum(one["seconds"] for one in kept[:count])), list(remarks), True


def _rows(cell: Cell, values: Mapping[str, list[float | None]], seconds: float) -> list[Row]:
    rows = []
    for figure in cell.figures:
        numbers = [value for value in values[figure.metric] if value is not None]
        mean = float(np.mean(numbers)) if numbers else None
        deviation = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
        missing = len(values[figure.metric]) - len(numbers)
        note = "" if not missing else "never" if figure.metric.startswith(("rounds_", "gap_from")) else "not measured"
        note = f"{note} in {missing} of {missing + len(numbers)}" if note and numbers else note
        rows.append(Row(cell.label, figure.metric, mean, deviation, figure.published, len(values[figure.metric]), seconds, note))
    return rows


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
    if metric in ("max_norm", "mean_norm"):
        norms = [max(values) for row in rows if (values := [one for one in row.get(f"{metric}s", ()) if one is not None])]
        return norms[-1] / max(norms) if norms else None
    raise AssertionError(f"metric {metric} is of trials only")


# --- what is written ----------------------------------------------------------------------------------------------------------------


def _number(value: float | str | None, metric: str = "") -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    if metric in ("shared", "local", "newcomer", "newcomer_tuned", "before_split"):
        return f"{value:.2f}"
    return f"{value:.4g}"


def _line(row: Row) -> str:
    spread = "" if row.deviation is None else f" ± {_number(row.deviation, row.metric)}"
    apart = "" if row.difference is None else f", difference {row.difference:+.4g}"
    note = f" ({row.note})" if row.note else ""
    return f"{METRICS[row.metric]}: {_number(row.ours, row.metric)}{spread}, published {_number(row.published, row.metric)}{apart}{note}"


def _write(
    entry: Reproduction, name: str, outcome: Outcome, cells: Sequence[Cell], out: Path, seeds: int, scale: float, changes: Sequence[str]
) -> None:
    total = sum({row.cell: row.seconds for row in outcome.rows}.values())
    lines = [
        f"# {name}: {entry.title}",
        "",
        f"Published: {entry.source}. Scale {scale:g}, {seeds} seed(s), {total:.0f} s of running"
        + (f", with {', '.join(changes)}." if changes else "."),
        f"Hyper-parameters: {entry.chosen}.",
        "",
        *(f"- {remark}" for remark in outcome.remarks),
        *(["- interrupted: the same command goes on"] if outcome.interrupted else []),
        "",
        "| cell | figure | ours | published | difference | seeds or trials | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in outcome.rows:
        spread = "" if row.deviation is None else f" ± {_number(row.deviation, row.metric)}"
        ours = row.note if row.ours is None and row.note else f"{_number(row.ours, row.metric)}{spread}"
        ours += f" ({row.note})" if row.note and row.ours is not None else ""
        apart = "–" if row.difference is None else f"{row.difference:+.4g}"
        published = _number(row.published, row.metric)
        lines.append(f"| {row.cell} | {METRICS[row.metric]} | {ours} | {published} | {apart} | {row.count} | {row.seconds:.0f} |")
    write_atomically(out / "table.md", "\n".join(lines) + "\n")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ["reproduction", "cell", "metric", "ours", "deviation", "published", "difference", "count", "scale", "changes", "seconds", "note"]
    )
    for row in outcome.rows:
        values = [row.ours, row.deviation, row.published, row.difference]
        cleaned = ["" if value is None else value for value in values]
        writer.writerow([name, row.cell, row.metric, *cleaned, row.count, scale, " ".join(changes), round(row.seconds, 2), row.note])
    write_atomically(out / "table.csv", buffer.getvalue())
    if any(row.ours is not None for row in outcome.rows):
        picture = base64.b64decode(_picture(entry, outcome.rows, cells, out, seeds).split(",", 1)[1])
        write_atomically(out / "picture.svg", picture)


def _picture(entry: Reproduction, rows: Sequence[Row], cells: Sequence[Cell], out: Path, seeds: int) -> str:
    """The table as a picture: filled marks are ours, rings the published figures; or curves over rounds."""
    if entry.over == "rounds":
        curves = {cell.label: _curve(out / f"{_slug(cell.label)}-s0" / "rounds.jsonl", entry.along) for cell in cells}
        with style():
            figure = new_figure(7, 3.6)
            axes = figure.subplots()
            for i, (label, points) in enumerate(curves.items()):
                axes.plot([x for x, _ in points], [y for _, y in points], color=PALETTE[i % len(PALETTE)], label=label)
            axes.set_xlabel("round (seed 0)")
            axes.set_ylabel(entry.along)
            axes.set_title(f"{entry.title}\n({entry.source})", loc="left")
            axes.legend(frameon=False)
            return uri(figure)
    metrics = list(dict.fromkeys(row.metric for row in rows if row.ours is not None))
    by_label = {cell.label: cell for cell in cells}
    with style():
        figure = new_figure(4.6 * min(3, len(metrics)), (3.4 if entry.over == "x" else 1.2 + 0.28 * len(by_label)) * -(-len(metrics) // 3))
        panels = figure.subplots(-(-len(metrics) // 3), min(3, len(metrics)), squeeze=False).reshape(-1)
        for axes in panels[len(metrics) :]:
            axes.set_visible(False)
        for axes, metric in zip(panels, metrics, strict=False):
            own = [row for row in rows if row.metric == metric]
            (_over_x if entry.over == "x" else _over_cells)(axes, own, by_label)
            axes.set_title(METRICS[metric], fontsize=8, loc="left", wrap=True)
        figure.suptitle(f"{entry.title} ({entry.source}); filled: ours, ring: published", fontsize=9)
        return uri(figure)


def _over_x(axes: Any, rows: Sequence[Row], cells: Mapping[str, Cell]) -> None:
    placed = [row for row in rows if cells[row.cell].x is not None]
    for i, series in enumerate(dict.fromkeys(cells[row.cell].series for row in placed)):
        own = sorted((row for row in placed if cells[row.cell].series == series), key=lambda row: cells[row.cell].x or 0.0)
        colour = PALETTE[i % len(PALETTE)]
        here = [(cells[row.cell].x, row.ours) for row in own if row.ours is not None]
        axes.plot([x for x, _ in here], [y for _, y in here], "o-", color=colour, label=series, markersize=4)
        there = [(cells[row.cell].x, row.published) for row in own if isinstance(row.published, float)]
        axes.plot([x for x, _ in there], [y for _, y in there], "o", color=colour, markerfacecolor="none", markersize=8)
    if placed:
        axes.legend(frameon=False, fontsize=6)


def _over_cells(axes: Any, rows: Sequence[Row], cells: Mapping[str, Cell]) -> None:
    labels = list(cells)
    for row in rows:
        y = labels.index(row.cell)
        if row.ours is not None:
            axes.errorbar(row.ours, y, xerr=row.deviation, fmt="o", color=PALETTE[0], markersize=5)
        if isinstance(row.published, float):
            axes.plot(row.published, y, "o", color=PALETTE[5], markerfacecolor="none", markersize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _curve(path: Path, key: str) -> list[tuple[int, float]]:
    """(round, value) of a key of rounds.jsonl; of several values (one a cluster), the largest."""
    points = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        row = json.loads(line)
        value = row.get(key)
        if isinstance(value, list):
            value = max((one for one in value if one is not None), default=None)
        if value is not None:
            points.append((row["round"] + 1, float(value)))
    return points
