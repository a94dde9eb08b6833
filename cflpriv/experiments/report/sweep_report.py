"""What the page of a sweep prints: its answers, its table and its pictures."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files import write_atomically
from ..sweep.sweep import Sweep
from . import pictures
from .answer import headed, upper
from .audit_words import metric_words
from .before import place_of
from .front import (
    UNIT_SCORES,
    UTILITIES,
    Result,
    attack_points,
    attack_words,
    by_setting,
    first_utility,
    headline,
    headline_rows,
    read_results,
    table_rows,
    unmarked,
)  # fmt: skip
from .front_pictures import cost_picture, epsilon_picture, epsilons_of, front_picture, headline_picture
from .sweep_answers import groups_found, sweep_answers, sweep_in_short, sweep_steps

__all__ = ["section", "sweep_lines", "warned", "write_pictures"]

NAMED = 3
"""Settings that a line of a console names; it counts more than these."""
MOST_ATTACKS = 12
"""Figures of attacks that are drawn; the rest are in front.csv."""


def write_pictures(folder: Path, shown: Mapping[str, Any]) -> list[Path]:
    """Write the pictures of a `section` into a sweep's folder: front_1.svg and so on, epsilon.svg, costs.svg, as far as there are such."""
    drawn = {f"front_{i}.svg": front["picture"] for i, front in enumerate(shown["fronts"], 1)}
    drawn |= {f"{name}.svg": shown[name] for name in ("epsilon", "costs") if shown[name] is not None}
    for name, picture in drawn.items():
        write_atomically(folder / name, pictures.svg(picture))
    return [folder / name for name in drawn]


def section(folder: Path, sweep: Sweep) -> dict[str, Any]:
    """What the report prints of a sweep: the table, the pictures, and what failed."""
    results, failed = read_results(folder, sweep)
    rows = table_rows(results, sweep)
    points = attack_points(results)
    settings, score = list(by_setting(results)), first_utility([result.summary for result in results])
    first = headline(points)
    marks = headline_rows(results, first)
    groups = [groups_found(own) for own in by_setting(results).values()]
    unmade = len(sweep.cells) - len({result.cell.name for result in results} - failed.keys())
    return {
        "rows": [{**row, **mark, "groups": found} for row, mark, found in zip(rows, marks, groups, strict=True)],
        "agreement": any(row["ari"] is not None for row in rows),
        "score": {"name": score, "words": UTILITIES[score].replace("\n", " "), "scale": 1 if score in UNIT_SCORES else 100},
        "sweep_answers": sweep_answers(results, first),
        "sweep_steps": sweep_steps(place_of(folder), sweep, results, first, unmade),
        "warned": warned(results),
        "headline": None
        if first is None
        else {"picture": headline_picture(points[first], first, settings), "words": upper(attack_words(first))},
        "sweep_in_short": sweep_in_short(results, marks, first),
        "first": sweep.settings[0].protection,
        "failed": failed,
        "missing_runs": len(sweep.cells)
        - len(results)
        - len([name for name in failed if name not in {result.cell.name for result in results}]),
        "seeds": len({cell.seed for cell in sweep.cells}),
        "fronts": [
            {"picture": front_picture(points[key], key, settings), "words": upper(attack_words(key))} for key in list(points)[:MOST_ATTACKS]
        ],
        "undrawn": len(points) - MOST_ATTACKS,
        "unmarked": _unmarked_lines(results),
        "epsilon": epsilon_picture(results) if len(epsilons_of(results)) > 1 else None,
        "costs": cost_picture(results) if results else None,
    }


def _unmarked_lines(results: Sequence[Result]) -> list[dict[str, str]]:
    """For each setting and reason, the figures without a mark."""
    lines: dict[tuple[str, str], list[str]] = {}
    for (attack, metric, adversary, known), setting, why in unmarked(results):
        knows = f", {known} known" if known else ""
        words = f"{attack.replace('_', ' ')} ({metric_words({'metric': metric})}; {adversary}{knows})"
        lines.setdefault((setting.name, why), []).append(words)
    return [{"setting": setting, "why": why, "figures": ", ".join(figures)} for (setting, why), figures in lines.items()]


def warned(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Each warning of the runs once, those of most settings first: its settings by number, its first clause, and the rest.

    Warnings that differ by numbers alone are one, in the words of the first.
    """
    found: dict[str, tuple[str, dict[int, None]]] = {}
    for number, own in enumerate(by_setting(results).values(), 1):
        for line in (str(line) for result in own for line in result.summary.get("warnings", ())):
            found.setdefault(re.sub(r"[0-9][0-9.,]*", "#", line), (line, {}))[1][number] = None
    ordered = sorted(found.values(), key=lambda entry: -len(entry[1]))
    return [{"settings": list(numbers), "head": headed(line)[0], "rest": headed(line)[1]} for line, numbers in ordered]


def sweep_lines(folder: Path, sweep: Sweep) -> list[str]:
    """What a console prints of a sweep: what it found, the warnings of its runs, and what to do next."""
    results, failed = read_results(folder, sweep)
    first, names = headline(attack_points(results)), [setting.name for setting in by_setting(results)]
    lines = [sweep_in_short(results, headline_rows(results, first), first)]
    for one in warned(results):
        named = ", ".join(names[number - 1] for number in one["settings"][:NAMED])
        more = len(one["settings"]) - NAMED
        lines.append(f"warning: {named}{f' and {more} more' if more > 0 else ''}: {one['head']}")
    unmade = len(sweep.cells) - len({result.cell.name for result in results} - failed.keys())
    steps = sweep_steps(str(folder), sweep, results, first, unmade)
    return [*lines, *(f"next: {step.words}{f': {step.command}' if step.command else ''}" for step in steps)]
