"""The pictures of a sweep: utility against measured leakage and against ε, and what each setting costs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...types import Array
from ..sweep.sweep import SweepSetting
from . import pictures
from .audit_words import metric_words
from .front import UNIT_SCORES, UTILITIES, Attack, FrontPoint, Result, by_setting, mean_of, ringed_of, utility_of, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["cost_picture", "epsilon_picture", "epsilons_of", "front_picture", "headline_picture"]

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


def scaled(name: str, value: float) -> float:
    return value if name in UNIT_SCORES else 100 * value


def headline_picture(points: Sequence[FrontPoint], attack: Attack, settings: Sequence[SweepSetting]) -> str:
    """One attack's figure against one utility: a numbered mark a setting, a ring and a line for the front."""
    with pictures.style():
        figure = pictures.new_figure(pictures.WIDTH, 3.3)
        _draw(figure.subplots(), points, utility_of(points), settings)
        figure.supxlabel(_axis_words(points, attack), fontsize=9)
        return pictures.uri(figure)


def front_picture(points: Sequence[FrontPoint], attack: Attack, settings: Sequence[SweepSetting]) -> str:
    """One attack's figure against each utility, a panel a utility: a numbered mark a setting, a ring and a line for the front."""
    shown = _shown(point.utilities for point in points)
    with pictures.style():
        figure = pictures.new_figure(pictures.WIDTH, 0.6 + 2.1 * len(shown))
        for axes, utility in zip(figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0], shown, strict=True):
            _draw(axes, points, utility, settings)
        figure.supxlabel(_axis_words(points, attack), fontsize=9)
        return pictures.uri(figure)


def _axis_words(points: Sequence[FrontPoint], attack: Attack) -> str:
    lower = any(point.lower_is_better for point in points)
    return f"{metric_words({'metric': attack[1], 'lower_is_better': lower})} of the attack; left is more private"


def _draw(axes: "Axes", points: Sequence[FrontPoint], utility: str, settings: Sequence[SweepSetting]) -> None:
    """The settings with their numbers, and the front, on axes of leakage and a utility.

    Marks nearer to each other than a hundredth of both axes are drawn as one, with all their numbers.
    """
    have = [(point, value) for point in points if (value := point.utilities[utility]) is not None]
    places = np.array([[point.leakage.mean, scaled(utility, value.mean)] for point, value in have]).reshape(-1, 2)
    rings, lower = ringed_of(have), any(point.lower_is_better for point in points)
    for (point, value), place, ring in zip(have, places, rings, strict=True):
        look = _look(point.setting, settings)
        (x, y), wide, high = place.tolist(), point.leakage.std or 0.0, scaled(utility, value.std or 0.0)
        axes.errorbar(x, y, xerr=wide, yerr=high, fmt="none", ecolor=look["color"], alpha=0.6, linewidth=1)
        edge: dict[str, Any] = {"edgecolors": pictures.INK if ring else "none", "linewidths": 1.8 if ring else 0.0}
        axes.scatter(x, y, s=110, c=look["color"], marker=look["marker"], zorder=3, alpha=0.95 if point.validated else 0.35, **edge)
    line = sorted(tuple(place) for place, ring in zip(places, rings, strict=True) if ring)
    axes.plot([x for x, _ in line], [y for _, y in line], color=pictures.INK, linewidth=0.8, linestyle=":", zorder=1)
    if guesses := [point.baseline for point in points if point.baseline is not None]:
        axes.axvspan(min(guesses), max(guesses), color=pictures.FAINT, alpha=0.3, linewidth=0, zorder=0)
        axes.axvline(float(np.mean(guesses)), color=pictures.INK, linestyle="--", linewidth=0.8, zorder=0)
        where = (float(np.mean(guesses)), 1.0)
        axes.annotate("baseline", where, (3, -2), ("data", "axes fraction"), "offset points", fontsize=8, va="top")
    low, top = axes.get_ylim()
    least = 0.2 if utility in UNIT_SCORES else 4.0  # small differences must not look large
    middle, span = (low + top) / 2, max(top - low, least)
    axes.set_ylim(middle - 0.55 * span, middle + 0.62 * span)
    axes.margins(x=0.12)
    numbers = {setting: number for number, setting in enumerate(settings, 1)}
    for members in _near(places, np.array([np.ptp(axes.get_xlim()), np.ptp(axes.get_ylim())])):
        words = ", ".join(str(numbers[have[member][0].setting]) for member in members)
        axes.annotate(words, tuple(places[members[0]]), (9, 7), textcoords="offset points", fontsize=9, fontweight="bold")
    if lower and not axes.xaxis_inverted():
        axes.invert_xaxis()
    axes.set_ylabel(UTILITIES[utility])


def _near(places: Array, spans: Array) -> list[list[int]]:
    """The marks (m, 2) that lie together on axes of these spans, each group by its first."""
    groups: list[list[int]] = []
    for member, place in enumerate(places):
        near = (group for group in groups if (np.abs(places[group[0]] - place) <= 0.012 * spans).all())
        group = next(near, None)
        if group is None:
            groups.append([member])
        else:
            group.append(member)
    return groups


def epsilons_of(results: Sequence[Result]) -> list[float]:
    """The different ε of the settings that have a guarantee, as axes print them, the smallest first."""
    groups = by_setting(results)
    spent = {setting: mean_of(values_of(own, "epsilon").values()) for setting, own in groups.items()}
    return sorted({float(f"{setting.epsilon or mean.mean:.2g}") for setting, mean in spent.items() if mean is not None})


def epsilon_picture(results: Sequence[Result]) -> str:
    """Utility against ε, a line an algorithm, protection and other keys; dashed, in its algorithm's colour: a setting without noise."""
    groups = by_setting(results)
    with pictures.style():
        utilities = _shown(result.summary for result in results)
        lines: dict[str, list[tuple[float, SweepSetting]]] = {}
        for setting, own in groups.items():
            spent = mean_of(values_of(own, "epsilon").values())
            if spent is not None:
                lines.setdefault(replace(setting, epsilon=None).name, []).append((spent.mean, setting))
        unlimited = [setting for setting, own in groups.items() if mean_of(values_of(own, "epsilon").values()) is None]
        figure = pictures.new_figure(pictures.WIDTH, 0.5 + 2.1 * len(utilities) + 0.2 * (len(lines) + len(unlimited)))
        panels = figure.subplots(len(utilities), 1, sharex=True, squeeze=False)[:, 0]
        colours = {label: pictures.PALETTE[i % len(pictures.PALETTE)] for i, label in enumerate(lines)}
        firsts = {(first.algorithm, first.keys): colours[label] for label, ((_, first), *_) in reversed(lines.items())}
        for axes, (name, words) in zip(panels, utilities.items(), strict=True):
            for i, (label, members) in enumerate(lines.items()):
                look = {"color": colours[label], "marker": MARKERS[i // len(pictures.PALETTE) % len(MARKERS)]}
                known = [
                    (x, value)
                    for x, setting in sorted(members, key=lambda point: point[0])
                    if (value := mean_of(values_of(groups[setting], name).values()))
                ]
                xs, ys = [x for x, _ in known], [scaled(name, value.mean) for _, value in known]
                bars = [scaled(name, value.std or 0.0) for _, value in known]
                axes.errorbar(xs, ys, yerr=bars, capsize=2, label=label, **look)
            for setting in unlimited:
                value = mean_of(values_of(groups[setting], name).values())
                if value is not None:
                    colour = firsts.get((setting.algorithm, setting.keys), pictures.FAINT)
                    axes.axhline(scaled(name, value.mean), color=colour, linestyle="--", linewidth=0.8, label=setting.name)
            axes.set_xscale("log")
            shown = epsilons_of(results)
            axes.set_xticks(shown, [f"{x:g}" for x in shown])
            axes.minorticks_off()
            axes.set_ylabel(words)
        panels[-1].set_xlabel("ε (smaller is more private)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=1, frameon=False)
        return pictures.uri(figure)


def cost_picture(results: Sequence[Result]) -> str:
    """Megabytes up and down and seconds, a bar a setting, by its number."""
    groups = by_setting(results)
    panels_of = {"upload_bytes": "all uploads, MB", "download_bytes": "all downloads, MB", "seconds": "seconds, as run here"}
    with pictures.style():
        figure = pictures.new_figure(pictures.WIDTH, 1.5 + 0.6 * len(groups))
        for axes, (metric, words) in zip(figure.subplots(3, 1), panels_of.items(), strict=True):
            values = [mean_of(values_of(own, metric).values()) for own in groups.values()]
            scale = 1e6 if metric.endswith("bytes") else 1.0
            widths = [value.mean / scale if value else 0.0 for value in values]
            bars = [(value.std or 0.0) / scale if value else 0.0 for value in values]
            colours = [_look(setting, list(groups))["color"] for setting in groups]
            axes.barh(range(len(groups)), widths, xerr=bars, color=colours, height=0.7, error_kw={"elinewidth": 1, "ecolor": pictures.INK})
            axes.set_xlabel(words)
            axes.set_yticks(range(len(groups)), [str(number) for number in range(1, len(groups) + 1)])
            axes.set_ylim(len(groups) - 0.4, -0.6)
        return pictures.uri(figure)
