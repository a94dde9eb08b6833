"""What the page of a sweep prints: its table, its pictures, and in a sentence what it found."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...console import counted
from ...files import write_atomically
from ..sweep.sweep import Sweep
from . import pictures
from .audit_words import metric_words
from .front import Attack, Result, attack_points, attack_words, by_setting, headline, headline_rows, read_results, table_rows, unmarked
from .front_pictures import cost_picture, epsilon_picture, front_picture, headline_picture

__all__ = ["section", "sweep_in_short", "write_pictures"]

NAMED = 4
"""Settings of the front that a sentence names."""
COLUMNS = 4
"""Attacks per picture."""
MOST_ATTACKS = 12
"""Figures of attacks that are drawn; the rest are in front.csv."""


def sweep_in_short(rows: Sequence[Mapping[str, Any]], marks: Sequence[Mapping[str, Any]], first: Attack | None) -> str:
    """What a sweep found: its front, what serves best, and of how many settings nothing is known."""
    scored = [(row["accuracy_mean"], mark["name"]) for row, mark in zip(rows, marks, strict=True) if row["accuracy_mean"] is not None]
    best = max(scored, default=None, key=lambda pair: pair[0])
    served = "" if best is None else f" Best served: {best[1]}, right in {100 * best[0]:.1f} % of answers."
    if first is None:
        return f"No run was attacked, so nothing is known of what leaks.{served}"
    front = [str(mark["name"]) for mark in marks if mark["on_front"]]
    unknown = sum(not mark["marked"] or mark["doubt"] == "not validated" for mark in marks)
    words = attack_words(first)
    about = (
        f" For {unknown} of {counted(len(marks), 'setting')} this attack has no validated figure, so nothing is known there."
        if unknown
        else ""
    )
    if not front:
        return f"There is no front: {words}, and every other attack, is validated for no setting.{served}"
    several = "; ".join(front[:NAMED]) + (f"; {len(front) - NAMED} more" if len(front) > NAMED else "")
    return f"On the front by {words}: {several}.{served}{about}"


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
    settings = list(by_setting(results))
    pages = max(1, -(-len(keys) // COLUMNS))
    cuts = [len(keys) * i // pages for i in range(pages + 1)]
    fronts = [front_picture({key: points[key] for key in keys[a:b]}, settings) for a, b in pairwise(cuts) if a < b]
    first = headline(points)
    marks = headline_rows(results, first)
    return {
        "rows": [{**row, **mark} for row, mark in zip(rows, marks, strict=True)],
        "headline": None
        if first is None
        else {
            "picture": headline_picture(points[first], first, settings),
            "words": attack_words(first),
            "lower": any(point.lower_is_better for point in points[first]),
        },
        "sweep_in_short": sweep_in_short(rows, marks, first),
        "first": sweep.settings[0].protection,
        "failed": failed,
        "missing_runs": len(sweep.cells)
        - len(results)
        - len([name for name in failed if name not in {result.cell.name for result in results}]),
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
