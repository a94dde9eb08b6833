"""Results of a sweep: means over seeds, paired differences, and utility against measured leakage and against ε.

Leakage is what attacks achieved on the recorded runs (audit.json); utility is both accuracies and the ARI. A setting is on the front of an
attack's figure if no other setting is at least as good in both and better in one: of what was measured, not of what is possible. What an
attack that is not validated for a setting is on no front and dominates no other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ...errors import InputError
from ...files import write_atomically
from ...protocols.bounded_files import read_json
from ..sweep.sweep import Sweep, SweepCell, SweepSetting
from . import pictures
from .audit_words import STATUS, least_comforting, metric_words
from .run_files import audit_cells

__all__ = [
    "Mean", "Result", "front_rows", "mean_of", "on_front", "paired", "read_results", "section", "setting_columns", "table_rows",
    "unmarked", "write_pictures",
]  # fmt: skip

METRICS = (
    "accuracy_mean", "balanced_accuracy", "macro_f1", "majority_accuracy", "accuracy_worst", "local_accuracy_mean", "ari",
    "clusters", "epsilon", "upload_bytes", "download_bytes", "seconds",
)  # fmt: skip
OF_NUMBERS = ("r2", "error_mean", "root_mean_square_error", "mean_absolute_error", "constant_error")
UTILITIES = {
    "accuracy_mean": "shared or cluster\nmodel, accuracy %",
    "local_accuracy_mean": "last local models,\naccuracy %",
    "r2": "shared or cluster\nmodel, R²",
    "ari": "clusters against\ntrue groups, ARI",
}
COLUMNS = 4
"""Attacks per picture."""
MOST_ATTACKS = 12
"""Figures of attacks that are drawn; the rest are in front.csv."""


@dataclass(frozen=True, eq=False)
class Result:
    """One finished run of a sweep: its cell, summary, and the figures of its audit, if there was one."""

    cell: SweepCell
    summary: Mapping[str, Any]
    audit: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Mean:
    """Over seeds: mean, standard deviation between seeds (None for one), a 95 % t-interval of the mean (None for one), and their number."""

    mean: float
    std: float | None
    low: float | None
    high: float | None
    seeds: int


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """The mean of the values there are; None if there are none."""
    known = np.array([float(value) for value in values if value is not None])
    if not len(known):
        return None
    mean = float(known.mean())
    if len(known) < 2:
        return Mean(mean, None, None, None, len(known))
    std = float(known.std(ddof=1))
    half = float(stats.t.ppf(0.975, len(known) - 1)) * std / float(np.sqrt(len(known)))
    return Mean(mean, std, mean - half, mean + half, len(known))


def paired(values: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> Mean | None:
    """The mean of the differences, mine less theirs, over the seeds that both have."""
    differences = []
    for seed in sorted(values.keys() & theirs.keys()):
        a, b = values[seed], theirs[seed]
        if a is not None and b is not None:
            differences.append(a - b)
    return mean_of(differences)


def read_results(folder: Path, sweep: Sweep) -> tuple[list[Result], dict[str, str]]:
    """The finished runs of a sweep's folder, in the sweep's order, and the errors of those that failed, by name."""
    results, failed = [], {}
    for cell in sweep.cells:
        path = folder / cell.name / "summary.json"
        trouble = folder / "failed" / f"{cell.name}.json"
        if trouble.is_file():
            failed[cell.name] = str(_read(trouble)["error"])
        if path.is_file():
            summary = _read(path)
            if summary["rounds"] < summary["rounds_planned"] and not summary.get("stopped"):
                continue  # interrupted; a run whose privacy budget is spent has ended, too
            audit = folder / cell.name / "audit.json"
            results.append(Result(cell, summary, audit_cells(_read(audit), audit) if audit.is_file() else ()))
    return results, failed


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None


def _by_setting(results: Sequence[Result]) -> dict[SweepSetting, list[Result]]:
    groups: dict[SweepSetting, list[Result]] = {}
    for result in results:
        groups.setdefault(result.cell.setting, []).append(result)
    return groups


def _seeds(results: Sequence[Result], metric: str) -> dict[int, float | None]:
    return {result.cell.seed: result.summary.get(metric) for result in results}


def table_rows(results: Sequence[Result], sweep: Sweep) -> list[dict[str, Any]]:
    """A row per setting: what was known of the groups, and each metric's mean and deviation over seeds and its paired difference to the
    first protection of the sweep.

    The difference is taken within the same algorithm and keys, seed by seed, with a 95 % t-interval; to the first protection's setting of
    the same ε, or to its only one. None where it has several and none of this ε.
    """
    groups = _by_setting(results)
    own_metrics = dict.fromkeys(name for result in results for name in result.summary if name.startswith("metric_") or name in OF_NUMBERS)
    rows = []
    for setting, own in groups.items():
        row: dict[str, Any] = {**setting_columns(setting), "knowledge": own[0].summary.get("knowledge", ""), "seeds": len(own)}
        twin = _compared_with(setting, sweep)
        others = [] if twin is None or twin == setting else groups.get(twin, [])
        row["warnings"] = "; ".join(dict.fromkeys(line for result in own for line in result.summary.get("warnings", ())))
        for metric in (*METRICS, *own_metrics):
            value = mean_of(_seeds(own, metric).values())
            row |= {metric: value and value.mean, f"{metric}_std": value and value.std}
            difference = paired(_seeds(own, metric), _seeds(others, metric))
            row |= {
                f"{metric}_difference": difference and difference.mean,
                f"{metric}_difference_low": difference and difference.low,
                f"{metric}_difference_high": difference and difference.high,
            }
        rows.append(row)
    return rows


def _compared_with(setting: SweepSetting, sweep: Sweep) -> SweepSetting | None:
    """The setting of the sweep's first protection that this one's figures stand beside."""
    same = (setting.algorithm, sweep.settings[0].protection, setting.keys)
    firsts = [setting_ for setting_ in sweep.settings if (setting_.algorithm, setting_.protection, setting_.keys) == same]
    equal = [first for first in firsts if first.epsilon == setting.epsilon]
    return (equal or firsts)[0] if equal or len(firsts) == 1 else None


def setting_columns(setting: SweepSetting) -> dict[str, Any]:
    """The columns of a table that name a setting."""
    return {"algorithm": setting.algorithm, "protection": setting.protection, "privacy.epsilon": setting.epsilon, **dict(setting.keys)}


# --- the front ------------------------------------------------------------------------------------------------------------------------


Attack = tuple[str, str, str, int]
"""(attack, metric, adversary, clients known): the key of a figure of leakage."""


@dataclass(frozen=True, eq=False)
class FrontPoint:
    """One setting under one attack: leakage and its baseline, and each utility, over seeds.

    `validated`: in every run that has a figure the attack works unprotected. `whole`: in no run were rounds left out.
    """

    setting: SweepSetting
    leakage: Mean
    baseline: float | None
    utilities: Mapping[str, Mean | None]
    lower_is_better: bool
    validated: bool = True
    whole: bool = True


def attack_points(results: Sequence[Result]) -> dict[Attack, list[FrontPoint]]:
    """For every attack's figure that has a value somewhere, a point per setting that has one."""
    points: dict[Attack, list[FrontPoint]] = {}
    for setting, own in _by_setting(results).items():
        by_attack: dict[Attack, list[Mapping[str, Any]]] = {}
        for result in own:
            for cell in result.audit:
                key = (str(cell["attack"]), str(cell["metric"]), str(cell["adversary"]), int(cell.get("k_known") or 0))
                by_attack.setdefault(key, []).append(cell)
        utilities = {name: mean_of(_seeds(own, name).values()) for name in UTILITIES}
        for key, cells in by_attack.items():
            leakage, baseline = mean_of(cell["value"] for cell in cells), mean_of(cell["baseline"] for cell in cells)
            if leakage is not None:
                valid = all(cell["status"] != "not_validated" for cell in cells)
                lower = any(cell.get("lower_is_better") for cell in cells)
                guess = None if baseline is None else baseline.mean
                whole = not any(cell.get("rounds") for cell in cells)
                points.setdefault(key, []).append(FrontPoint(setting, leakage, guess, utilities, lower, valid, whole))
    return points


def unmarked(results: Sequence[Result]) -> list[tuple[Attack, SweepSetting, str]]:
    """What has no point: figures of attacks that others have, settings, and the reason, from the least comforting of its runs."""
    missing = []
    groups = _by_setting(results)
    for key, points in attack_points(results).items():
        marked = {point.setting for point in points}
        missing += [(key, setting, _why_none(own, key)) for setting, own in groups.items() if setting not in marked]
    return missing


def _why_none(own: Sequence[Result], key: Attack) -> str:
    """From the attack's cells without a value. If the attack has cells of other figures, only this figure was absent."""
    attack, _, adversary, _ = key
    cells = [cell for result in own for cell in result.audit if (cell["attack"], cell["adversary"]) == (attack, adversary)]
    empty = [str(cell["status"]) for cell in cells if cell["value"] is None]
    if empty:
        return STATUS[least_comforting(empty)]
    return "no such figure" if cells else "not run"


def _ringed(have: Sequence[tuple["FrontPoint", Mean]]) -> list[bool]:
    """Which points are on the front, by leakage and a utility: among those that are validated."""
    known = [place for place, (point, _) in enumerate(have) if point.validated]
    leaks = [(-1.0 if have[i][0].lower_is_better else 1.0) * have[i][0].leakage.mean for i in known]
    best = dict(zip(known, on_front(leaks, [have[i][1].mean for i in known]), strict=True))
    return [best.get(place, False) for place in range(len(have))]


def on_front(leakage: Sequence[float], utility: Sequence[float]) -> list[bool]:
    """The points that no other point dominates (no more leakage, no less utility, one of them strictly)."""
    x, y = np.asarray(leakage, dtype=np.float64), np.asarray(utility, dtype=np.float64)
    return [not np.any((x <= a) & (y >= b) & ((x < a) | (y > b))) for a, b in zip(x, y, strict=True)]


def front_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row per attack's figure, setting and utility, with what the setting cost. ε stands beside it where one is guaranteed.

    Settings without such a figure have one row with the reason.
    """
    groups = _by_setting(results)
    rows = []
    for (attack, metric, adversary, known), points in attack_points(results).items():
        for name in UTILITIES:
            have = [(point, value) for point in points if (value := point.utilities[name]) is not None]
            for (point, value), front in zip(have, _ringed(have), strict=True):
                own = groups[point.setting]
                costs = {
                    metric: mean_of(_seeds(own, metric).values()) for metric in ("epsilon", "upload_bytes", "download_bytes", "seconds")
                }
                rows.append(
                    {
                        **setting_columns(point.setting), "attack": attack, "metric": metric, "adversary": adversary,
                        "clients_known": known,
                        "validated": point.validated, "all_rounds": point.whole,
                        "leakage": point.leakage.mean, "leakage_std": point.leakage.std, "guess_with_no_view": point.baseline,
                        "utility": name, "value": value.mean, "value_std": value.std, "on_front": front,
                        **{name: cost and cost.mean for name, cost in costs.items()}, "seeds": value.seeds,
                        "seeds_with_leakage": point.leakage.seeds, "no_leakage": "",
                    }
                )  # fmt: skip
    for (attack, metric, adversary, known), setting, why in unmarked(results):
        named = {"attack": attack, "metric": metric, "adversary": adversary, "clients_known": known}
        rows.append({**setting_columns(setting), **named, "on_front": False, "seeds_with_leakage": 0, "no_leakage": why})
    return rows


# --- files and pictures ---------------------------------------------------------------------------------------------------------------


def write_pictures(folder: Path, shown: Mapping[str, Any]) -> list[Path]:
    """Write the pictures of a `section` into a sweep's folder: front_1.svg and so on, epsilon.svg, costs.svg, as far as there are such."""
    drawn = {f"front_{i}.svg": picture for i, picture in enumerate(shown["fronts"], 1)}
    drawn |= {f"{name}.svg": shown[name] for name in ("epsilon", "costs") if shown[name] is not None}
    for name, picture in drawn.items():
        write_atomically(folder / name, pictures.svg(picture))
    return [folder / name for name in drawn]


def section(folder: Path, sweep: Sweep) -> dict[str, Any]:
    """What the report prints of a sweep: the table, the pictures, and what failed."""
    results, failed = read_results(folder, sweep)
    rows = table_rows(results, sweep)
    points = attack_points(results)
    keys = list(points)[:MOST_ATTACKS]
    settings = list(_by_setting(results))
    pages = max(1, -(-len(keys) // COLUMNS))
    cuts = [len(keys) * i // pages for i in range(pages + 1)]
    fronts = [front_picture({key: points[key] for key in keys[a:b]}, settings) for a, b in pairwise(cuts) if a < b]
    names = [setting.name for setting in settings]
    return {
        "rows": [{**row, "under": name.partition(" · ")[2]} for row, name in zip(rows, names, strict=True)],
        "first": sweep.settings[0].protection,
        "failed": failed,
        "missing": len(sweep.cells) - len(results) - len([name for name in failed if name not in {result.cell.name for result in results}]),
        "seeds": len({cell.seed for cell in sweep.cells}),
        "fronts": fronts,
        "undrawn": len(points) - len(keys),
        "unmarked": _unmarked_lines(results),
        "epsilon": epsilon_picture(results) if any(result.summary.get("epsilon") is not None for result in results) else None,
        "costs": cost_picture(results) if results else None,
        "audited": any(result.audit for result in results),
    }


def _unmarked_lines(results: Sequence[Result]) -> list[dict[str, str]]:
    """For each setting and reason, the figures without a mark."""
    lines: dict[tuple[str, str], list[str]] = {}
    for (attack, metric, adversary, known), setting, why in unmarked(results):
        knows = f", {known} known" if known else ""
        words = f"{attack.replace('_', ' ')} ({metric_words({'metric': metric})}; {adversary}{knows})"
        lines.setdefault((setting.name, why), []).append(words)
    return [{"setting": setting, "why": why, "figures": ", ".join(figures)} for (setting, why), figures in lines.items()]


MARKERS = "osD^vP*Xh<>p"


def _look(setting: SweepSetting, settings: Sequence[SweepSetting]) -> dict[str, Any]:
    """Colour by protection (and ε), marker by algorithm and keys."""
    colours = list(dict.fromkeys((choice.protection, choice.epsilon) for choice in settings))
    shapes = list(dict.fromkeys((choice.algorithm, choice.keys) for choice in settings))
    colour = pictures.PALETTE[colours.index((setting.protection, setting.epsilon)) % len(pictures.PALETTE)]
    return {"color": colour, "marker": MARKERS[shapes.index((setting.algorithm, setting.keys)) % len(MARKERS)]}


def _shown(results: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The utilities that some of these have (points' utilities or runs' summaries): FedAvg alone finds no clusters to compare."""
    known = list(results)
    return {name: words for name, words in UTILITIES.items() if any(summary.get(name) is not None for summary in known)}


def _scaled(name: str, value: float) -> float:
    return value if name in ("ari", "r2") else 100 * value


def front_picture(points: Mapping[Attack, Sequence[FrontPoint]], settings: Sequence[SweepSetting]) -> str:
    """Utility against leakage: a column an attack's figure, a row a utility, a mark a setting with its deviations over seeds."""
    shown = _shown(point.utilities for these in points.values() for point in these)
    with pictures.style():
        legend_rows = -(-len(settings) // 3)
        figure = pictures.new_figure(1.3 + 2.7 * max(2, len(points)), 1.1 + 1.9 * len(shown) + 0.2 * legend_rows)
        panels = figure.subplots(len(shown), len(points), squeeze=False, sharex="col", sharey="row")
        marks: dict[str, Any] = {}
        kinds = list(dict.fromkeys((setting.protection, setting.epsilon) for setting in settings))
        sizes = {
            setting: 170.0 * 0.6 ** (kinds.index((setting.protection, setting.epsilon)) % 5) for setting in settings
        }  # what coincides stays visible
        for column, ((attack, metric, adversary, known), these) in enumerate(points.items()):
            for line, (name, words) in enumerate(shown.items()):
                axes = panels[line, column]
                have = [(point, value) for point in these if (value := point.utilities[name]) is not None]
                sign = -1.0 if any(point.lower_is_better for point in these) else 1.0
                for (point, value), front in zip(have, _ringed(have), strict=True):
                    look = _look(point.setting, settings)
                    x, y = point.leakage.mean, _scaled(name, value.mean)
                    errors = {"xerr": point.leakage.std or 0.0, "yerr": _scaled(name, value.std or 0.0)}
                    axes.errorbar(x, y, **errors, fmt="none", ecolor=look["color"], alpha=0.45, linewidth=1)
                    edge = {"edgecolors": pictures.INK if front else "none", "linewidths": 1.6 if front else 0.0}
                    marks[point.setting.name] = axes.scatter(
                        x, y, s=sizes[point.setting], c=look["color"], marker=look["marker"], zorder=3,
                        alpha=0.9 if point.validated else 0.3, **edge,
                    )  # fmt: skip
                if guesses := [point.baseline for point in these if point.baseline is not None]:
                    axes.axvspan(min(guesses), max(guesses), color=pictures.FAINT, alpha=0.25, linewidth=0, zorder=0)
                    axes.axvline(float(np.mean(guesses)), color=pictures.FAINT, linestyle="--", linewidth=1, zorder=0)
                if column == 0:
                    axes.set_ylabel(words)
                axes.margins(0.12)
            knows = f", {known} known" if known else ""
            doubt = "" if all(point.validated for point in these) else "\n(not validated)"
            doubt += "" if all(point.whole for point in these) else "\n(not all rounds)"
            name = metric_words({"metric": metric})
            panels[0, column].set_title(f"{attack.replace('_', ' ')}\n{name}\n{adversary}{knows}{doubt}", fontsize=9)
            panels[-1, column].set_xlabel("what the attacker gets" + (" (its error)" if sign < 0 else ""))
            if sign < 0:
                panels[-1, column].invert_xaxis()
        for line, name in enumerate(shown):  # differences of no account look like none
            low, high = panels[line, 0].get_ylim()
            middle, span = (low + high) / 2, max(high - low, 0.2 if name in ("ari", "r2") else 4.0)
            panels[line, 0].set_ylim(middle - span / 2, middle + span / 2)
        names = [setting.name for setting in settings if setting.name in marks]
        figure.legend([marks[name] for name in names], names, loc="outside lower center", ncols=min(3, max(1, len(names))), frameon=False)
        return pictures.uri(figure)


def epsilon_picture(results: Sequence[Result]) -> str:
    """Utility against ε, a line an algorithm, protection and other keys; dashed, in its algorithm's colour: a setting without noise."""
    groups = _by_setting(results)
    with pictures.style():
        utilities = _shown(result.summary for result in results)
        lines: dict[str, list[tuple[float, SweepSetting]]] = {}
        for setting, own in groups.items():
            spent = mean_of(_seeds(own, "epsilon").values())
            if spent is not None:
                lines.setdefault(replace(setting, epsilon=None).name, []).append((spent.mean, setting))
        unlimited = [setting for setting, own in groups.items() if mean_of(_seeds(own, "epsilon").values()) is None]
        figure = pictures.new_figure(max(7.0, 3.5 * len(utilities)), 3.7 + 0.2 * -(-(len(lines) + len(unlimited)) // 2))
        panels = figure.subplots(1, len(utilities), squeeze=False)[0]
        colours = {label: pictures.PALETTE[i % len(pictures.PALETTE)] for i, label in enumerate(lines)}
        firsts = {(first.algorithm, first.keys): colours[label] for label, ((_, first), *_) in reversed(lines.items())}
        for axes, (name, words) in zip(panels, utilities.items(), strict=True):
            for i, (label, members) in enumerate(lines.items()):
                look = {"color": colours[label], "marker": MARKERS[i // len(pictures.PALETTE) % len(MARKERS)]}
                known = [
                    (x, value)
                    for x, setting in sorted(members, key=lambda point: point[0])
                    if (value := mean_of(_seeds(groups[setting], name).values()))
                ]
                xs, ys = [x for x, _ in known], [_scaled(name, value.mean) for _, value in known]
                bars = [_scaled(name, value.std or 0.0) for _, value in known]
                axes.errorbar(xs, ys, yerr=bars, capsize=2, label=label, **look)
            for setting in unlimited:
                value = mean_of(_seeds(groups[setting], name).values())
                if value is not None:
                    colour = firsts.get((setting.algorithm, setting.keys), pictures.FAINT)
                    axes.axhline(_scaled(name, value.mean), color=colour, linestyle="--", linewidth=0.8, label=setting.name)
            axes.set_xscale("log")
            shown = sorted({float(f"{setting.epsilon or x:.2g}") for members in lines.values() for x, setting in members})
            axes.set_xticks(shown, [f"{x:g}" for x in shown])
            axes.minorticks_off()
            axes.set_xlabel("ε (smaller is more private)")
            axes.set_title(words.replace("\n", " "), fontsize=9)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        return pictures.uri(figure)


def cost_picture(results: Sequence[Result]) -> str:
    """Megabytes up and down and seconds, a bar a setting."""
    groups = _by_setting(results)
    names = [setting.name for setting in groups]
    panels_of = {"upload_bytes": "all uploads, MB", "download_bytes": "all downloads, MB", "seconds": "seconds, as run here"}
    with pictures.style():
        figure = pictures.new_figure(10.5, 1.0 + 0.26 * len(groups))
        panels = figure.subplots(1, 3, sharey=True)
        for axes, (metric, words) in zip(panels, panels_of.items(), strict=True):
            values = [mean_of(_seeds(own, metric).values()) for own in groups.values()]
            scale = 1e6 if metric.endswith("bytes") else 1.0
            widths = [value.mean / scale if value else 0.0 for value in values]
            bars = [(value.std or 0.0) / scale if value else 0.0 for value in values]
            colours = [_look(setting, list(groups))["color"] for setting in groups]
            axes.barh(range(len(groups)), widths, xerr=bars, color=colours, height=0.7, error_kw={"elinewidth": 1, "ecolor": pictures.INK})
            axes.set_xlabel(words)
        panels[0].set_yticks(range(len(groups)), names)
        panels[0].set_ylim(len(groups) - 0.4, -0.6)
        return pictures.uri(figure)
