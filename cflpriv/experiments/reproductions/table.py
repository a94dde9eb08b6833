"""The table of a reproduction, ours beside the published figures, and its picture."""

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from ...files import write_atomically
from ...protocols.bounded_files import LARGEST_TABLE_BYTES, parse_json, read_text
from ..report.pictures import PALETTE, new_figure, style, uri
from .entry import METRICS, Reproduction, ReproductionCell
from .published import Number

__all__ = ["ReproductionOutcome", "TableRow", "in_words", "slug", "write"]

ALONG: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "accuracy_mean": ("accuracy of the model a client would use, %", 100.0, ("shared", "before_split")),
    "local_accuracy_mean": ("accuracy of the last locally trained models, %", 100.0, ("local",)),
    "perplexity_mean": ("perplexity", 1.0, ("perplexity", "perplexity_before_split")),
    "choice_ari": ("adjusted Rand index of the clients' choices", 1.0, ()),
    "max_norms": ("norm of the largest update; dashed: of their mean", 1.0, ()),
}
"""What a picture over rounds shows of rounds.jsonl: its axis label, the unit, and the metrics whose published figures are lines."""


@dataclass(frozen=True)
class TableRow:
    """One line of the table: a cell's figure, ours as mean and deviation over `count` seeds or trials, beside the one that is `printed` in
    the paper for these settings."""

    cell: str
    metric: str
    ours: float | None
    deviation: float | None
    printed: Number | None
    count: int
    seconds: float
    note: str = ""

    @property
    def published(self) -> float | str | None:
        return None if self.printed is None else self.printed.value

    @property
    def published_deviation(self) -> float | None:
        return None if self.printed is None else self.printed.deviation

    @property
    def difference(self) -> float | None:
        both = self.ours is not None and isinstance(self.published, float)
        return self.ours - self.published if both else None  # type: ignore[operator]


@dataclass(frozen=True)
class ReproductionOutcome:
    """What `reproduce` found: rows, remarks on scale and data, and whether it was interrupted."""

    rows: tuple[TableRow, ...]
    remarks: tuple[str, ...]
    interrupted: bool = False


def slug(label: str) -> str:
    """A label as a file name."""
    return re.sub(r"[^A-Za-z0-9.=+]+", "_", label).strip("_.")


def _sources(entry: Reproduction, rows: Sequence[TableRow]) -> str:
    """Where the published figures of a table stand, or that there are none at these settings."""
    if not any(row.printed for row in rows):
        return f"{entry.source}; nothing at these settings"
    tables = {
        re.sub(", row .*?(?=, column|$)", "", row.printed.where): None for row in rows if row.printed is not None and row.printed.where
    }
    return "; ".join(tables) or entry.source


def _number(value: float | str | None, metric: str = "") -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    if metric in ("shared", "local", "newcomer", "newcomer_tuned", "before_split"):
        return f"{value:.2f}"
    return f"{value:.4g}"


def _with_deviation(value: float | str | None, deviation: float | None, metric: str) -> str:
    return _number(value, metric) + ("" if deviation is None else f" ± {_number(deviation, metric)}")


def in_words(row: TableRow) -> str:
    """A row as text."""
    ours = _with_deviation(row.ours, row.deviation, row.metric)
    published = _with_deviation(row.published, row.published_deviation, row.metric)
    apart = "" if row.difference is None else f", difference {row.difference:+.4g}"
    note = f" ({row.note})" if row.note else ""
    return f"{METRICS[row.metric]}: {ours}, published {published}{apart}{note}"


def write(
    entry: Reproduction,
    name: str,
    outcome: ReproductionOutcome,
    cells: Sequence[ReproductionCell],
    out: Path,
    seeds: int,
    scale: float,
    changes: Sequence[str],
) -> None:
    """Write `table.md`, `table.csv` and, if anything was measured, `picture.svg` into `out`."""
    total = sum({row.cell: row.seconds for row in outcome.rows}.values())
    lines = [
        f"# {name}: {entry.title}",
        "",
        f"Published: {_sources(entry, outcome.rows)}. Scale {scale:g}, {seeds} seed(s), {total:.0f} s of running"
        + (f", with {', '.join(changes)}." if changes else "."),
        f"Hyper-parameters: {entry.chosen}.",
        "",
        *(f"- {remark}" for remark in outcome.remarks),
        *(["- interrupted: the same command resumes"] if outcome.interrupted else []),
        "",
        "| cell | figure | ours | published | difference | seeds or trials | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in outcome.rows:
        ours = row.note if row.ours is None and row.note else _with_deviation(row.ours, row.deviation, row.metric)
        ours += f" ({row.note})" if row.note and row.ours is not None else ""
        apart = "–" if row.difference is None else f"{row.difference:+.4g}"
        published = _with_deviation(row.published, row.published_deviation, row.metric)
        lines.append(f"| {row.cell} | {METRICS[row.metric]} | {ours} | {published} | {apart} | {row.count} | {row.seconds:.0f} |")
    write_atomically(out / "table.md", "\n".join(lines) + "\n")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        [
            "reproduction", "cell", "metric", "ours", "deviation", "published", "published_deviation", "published_in", "difference",
            "count", "scale", "changes", "seconds", "note",
        ]
    )  # fmt: skip
    for row in outcome.rows:
        where = None if row.printed is None else row.printed.where
        values = [row.ours, row.deviation, row.published, row.published_deviation, where, row.difference]
        cleaned = ["" if value is None else value for value in values]
        writer.writerow([name, row.cell, row.metric, *cleaned, row.count, scale, " ".join(changes), round(row.seconds, 2), row.note])
    write_atomically(out / "table.csv", buffer.getvalue())
    if any(row.ours is not None for row in outcome.rows):
        picture = base64.b64decode(_picture(entry, outcome.rows, cells, out, seeds).split(",", 1)[1])
        write_atomically(out / "picture.svg", picture)


def _picture(entry: Reproduction, rows: Sequence[TableRow], cells: Sequence[ReproductionCell], out: Path, seeds: int) -> str:
    """The table as a picture: filled marks are ours, rings the published figures; or curves over rounds, the published ones dotted."""
    if entry.over == "rounds":
        return _over_rounds(entry, rows, cells, out)
    by_label = {cell.label: cell for cell in cells}
    measured = [row for row in rows if row.ours is not None]
    axes_of = {cell.label: tuple(dict.fromkeys(axis for axis, _, _ in cell.places)) for cell in cells}
    panels = dict.fromkeys((row.metric, axis) for row in measured for axis in (axes_of[row.cell] if entry.over == "numbers" else ("",)))
    wide, high = min(3, max(1, len(panels))), -(-len(panels) // 3) or 1
    with style():
        figure = new_figure(4.6 * wide, (3.4 if entry.over == "numbers" else 1.4 + 0.28 * len(by_label)) * high)
        places = figure.subplots(high, wide, squeeze=False).reshape(-1)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        for axes, (metric, axis) in zip(places, panels, strict=False):
            own = [row for row in rows if row.metric == metric]
            if entry.over == "numbers":
                _over_numbers(axes, own, by_label, axis)
            else:
                _over_cells(axes, own, by_label)
            if metric in ("success", "separated"):
                axes.set_ylim(-0.05, 1.05)
            if metric == "ari" and entry.over == "cells":
                axes.set_xlim(min(-0.05, *axes.get_xlim()), 1.05)
            axes.set_title(fill(METRICS[metric], 44), fontsize=8, loc="left")
        if {"shared", "local"} <= {metric for metric, _ in panels} and entry.over == "cells":  # both are accuracies of the same methods
            _alike([axes for axes, (metric, _) in zip(places, panels, strict=False) if metric in ("shared", "local")])
        ring = "; filled: ours, ring: published" if any(isinstance(row.published, float) for row in measured) else ""
        figure.suptitle(fill(f"{entry.title} ({entry.source}){ring}", 64 * wide), fontsize=9)
        return uri(figure)


def _alike(panels: Sequence[Any]) -> None:
    """The same limits along x, so that places in one panel can be compared with those in another."""
    limits = [axes.get_xlim() for axes in panels]
    for axes in panels:
        axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))


def _over_rounds(entry: Reproduction, rows: Sequence[TableRow], cells: Sequence[ReproductionCell], out: Path) -> str:
    name, unit, metrics = ALONG[entry.along]
    with style():
        figure = new_figure(7, 3.6)
        axes, drawn = figure.subplots(), False
        for i, cell in enumerate(cells):
            colour = PALETTE[i % len(PALETTE)]
            path = out / f"{slug(cell.label)}-s0" / "rounds.jsonl"
            points = _curve(path, entry.along)
            axes.plot([x for x, _ in points], [unit * y for _, y in points], color=colour, label=cell.label)
            if entry.along == "max_norms":
                means = _curve(path, "mean_norms")
                axes.plot([x for x, _ in means], [y for _, y in means], color=colour, linestyle="--")
            lines = [row.published for row in rows if row.cell == cell.label and row.metric in metrics and isinstance(row.published, float)]
            for line in lines:
                axes.axhline(line, color=colour, linestyle=":")
            drawn |= bool(lines)
        axes.set_xlabel("round (seed 0)")
        axes.set_ylabel(name)
        if not entry.along.endswith(("accuracy_mean", "ari")):
            axes.set_yscale("log", subs=())
            _plain(axes.yaxis)
            low, high = axes.get_ylim()
            axes.set_yticks([x for power in range(-5, 7) for x in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if low <= x <= high])
        dotted = "; dotted: published figures" if drawn else ""
        axes.set_title(fill(f"{entry.title} ({entry.source}){dotted}", 88), loc="left")
        axes.legend(frameon=False)
        return uri(figure)


def _over_numbers(axes: Any, rows: Sequence[TableRow], cells: Mapping[str, ReproductionCell], axis: str) -> None:
    placed = [(series, x, row) for row in rows for name, series, x in cells[row.cell].places if name == axis]
    for i, series in enumerate(dict.fromkeys(name for name, _, _ in placed)):
        own = sorted(((x, row) for name, x, row in placed if name == series), key=lambda point: point[0])
        here = [(x, row.ours) for x, row in own if row.ours is not None]
        bare = {"success", "separated"}  # each trial is 0 or 1: their deviation adds nothing to their mean
        spread = [0.0 if row.metric in bare else row.deviation or 0.0 for _, row in own if row.ours is not None]
        there = [(x, row.published) for x, row in own if isinstance(row.published, float)]
        colour = PALETTE[i % len(PALETTE)]
        axes.errorbar([x for x, _ in here], [y for _, y in here], yerr=spread, fmt="o-", color=colour, label=series, markersize=4)
        axes.plot([x for x, _ in there], [y for _, y in there], "o", color=colour, markerfacecolor="none", markersize=8)
    if any(row.metric == "gap" for _, _, row in placed):
        axes.axhline(0, color="grey", linewidth=0.8)  # above it the groups can be distinguished
    sizes = [abs(x) for _, x, _ in placed if x] or [1.0]
    if max(sizes) > 50 * min(sizes):
        axes.set_xscale("symlog", linthresh=min(sizes))
        _plain(axes.xaxis)
    axes.set_xlabel(axis)
    if placed:
        axes.legend(frameon=False, fontsize=6)


def _plain(axis: Any) -> None:
    """Ticks of a logarithmic axis as numbers, since nothing is set as mathematics here."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _over_cells(axes: Any, rows: Sequence[TableRow], cells: Mapping[str, ReproductionCell]) -> None:
    labels = list(cells)
    for row in rows:
        y = labels.index(row.cell)
        if row.ours is not None:
            axes.errorbar(row.ours, y, xerr=row.deviation, fmt="o", color=PALETTE[0], markersize=5)
        if isinstance(row.published, float):
            ring = {"fmt": "o", "color": PALETTE[5], "markerfacecolor": "none", "markersize": 8}
            axes.errorbar(row.published, y, xerr=row.published_deviation, elinewidth=0.8, **ring)
    axes.locator_params(axis="x", nbins=5)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _curve(path: Path, key: str) -> list[tuple[int, float]]:
    """(round, value) of a key of rounds.jsonl; of several values (one a cluster), the largest."""
    points = []
    for line in read_text(path, LARGEST_TABLE_BYTES).splitlines() if path.is_file() else ():
        row = parse_json(line)
        value = row.get(key)
        if isinstance(value, list):
            value = max((entry for entry in value if entry is not None), default=None)
        if value is not None:
            points.append((row["round"] + 1, float(value)))
    return points
