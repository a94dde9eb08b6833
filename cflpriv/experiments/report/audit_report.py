"""The audit's part of a report: the matrix of attacks by protections, all figures, and true beside inferred label histograms.

`run_files` reads and checks the files.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...types import Array
from .audit_words import STATUS, least_comforting, share_learned
from .pictures import CUT, new_figure, style, uri
from .run_files import Audited
from .run_names import adversary_place, adversary_words, with_colluders

__all__ = ["attack_matrix", "label_histograms", "leakage"]


COVERAGE = "coverage"
"""The entry of an audit that counts what none of its attacks read."""
MOST_COLUMNS = 5
"""Runs beside each other in a table, which has at most six columns."""


def leakage(audits: Sequence[Audited]) -> dict[str, Any]:
    """What a page prints of audits: matrices of attacks, at most five audits beside each other, all figures of each, numbered notes, and
    the statuses that occur. The matrices pass over the list of what no attack read, unless there is nothing else."""
    notes: dict[str, int] = {}
    tables = []
    for audited in audits:
        cells = []
        for cell in sorted(audited.cells or (), key=lambda cell: adversary_place(str(cell["adversary"]))):
            doubtful = cell["status"] == "evidence_doubtful"  # the page states the reason once, beside the checks
            note = "" if doubtful else str(cell.get("note") or "")
            number = notes.setdefault(note, len(notes) + 1) if note else None
            cells.append({**cell, "number": number, "seeds": len(cell.get("seeds") or ()), "who": adversary_words(with_colluders(cell))})
        tables.append({"label": f"{audited.column} · {audited.label}", "cells": cells})
    matrices = []
    for start in range(0, len(audits), MOST_COLUMNS):
        some = audits[start : start + MOST_COLUMNS]
        attacks = [[cell for cell in audited.cells or () if cell["attack"] != COVERAGE] or audited.cells or () for audited in some]
        beside = [(audited.column, audited.label, cells) for audited, cells in zip(some, attacks, strict=True)]
        left = [None if audited.about.attacks_left is None else len(audited.about.attacks_left) for audited in some]
        matrices.append(attack_matrix(beside) | {"left": left})
    occurring = {str(cell["status"]) for audited in audits for cell in audited.cells or ()}
    return {"tables": tables, "notes": list(notes), "matrices": matrices, "statuses": [code for code in STATUS if code in occurring]}


def attack_matrix(audits: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """Attacks by row, runs by column: the outcome of an attack, by adversary, over all its figures.

    `audits` has (column heading, line below it, cells of audit.json) for each run. Gives `columns`, and `lines` of "attack" and, for each
    column, a list of "adversary", "status", "figure" (the cell that decided; of leaks the strongest, else the first) and "others" (how many
    figures have another status, for people), who sees least first. Adversaries without a figure for the same reason are listed together.
    """
    attacks = list(dict.fromkeys(str(cell["attack"]) for _, _, cells in audits for cell in cells))
    lines = []
    for attack in attacks:
        places = []
        for _, _, cells in audits:
            own = [cell for cell in cells if cell["attack"] == attack]
            adversaries = sorted({str(cell["adversary"]) for cell in own}, key=adversary_place)
            places.append(_together([_worst(name, [cell for cell in own if cell["adversary"] == name]) for name in adversaries]))
        lines.append({"attack": attack, "places": places})
    return {"columns": [{"name": name, "sub": sub} for name, sub, _ in audits], "lines": lines}


def _worst(adversary: str, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    status = least_comforting(cell["status"] for cell in cells)
    figure = max((cell for cell in cells if cell["status"] == status), key=_strength)
    rest = Counter(cell["status"] for cell in cells if cell["status"] != status)
    others = ", ".join(f"{rest[code]} {words}" for code, words in STATUS.items() if rest[code])
    return {"adversary": adversary, "status": status, "figure": figure, "others": others}


def _strength(cell: Mapping[str, Any]) -> float:
    """Which of several figures with one status is shown: of leaks the strongest, else the first."""
    return share_learned(cell) if cell["status"] == "leaks" else 0.0


def _together(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge neighbours without a figure that have the same note."""
    merged: list[dict[str, Any]] = []
    for item in items:
        before = merged[-1] if merged else None
        empty = item["figure"]["value"] is None
        if before and empty and before["figure"]["value"] is None and before["figure"].get("note") == item["figure"].get("note"):
            merged[-1] = before | {"adversary": f"{before['adversary']}, {item['adversary']}"}
        else:
            merged.append(item)
    return merged


def label_histograms(truth: Array, guess: Array, titles: Sequence[str]) -> str:
    """One panel per client: true label shares as bars, inferred ones as dots, (m, classes) each, with their L1 distance."""
    m, classes = truth.shape
    with style():
        figure = new_figure(1.8 + 1.1 * m, 1.9)
        panels = figure.subplots(1, m, squeeze=False, sharey=True)[0]
        top = 1.12 * max(float(truth.max()), float(guess.max()), 1e-6)
        for axes, real, inferred, title in zip(panels, truth, guess, titles, strict=True):
            axes.bar(range(classes), real, color="#8fbbdc", width=0.8)
            axes.plot(np.arange(classes), inferred, "o", color=CUT, markersize=3)
            axes.set_title(f"{title}\nL1 {np.abs(real - inferred).sum():.2f}", fontsize=8)
            axes.set_xticks([0, classes - 1])
            axes.set_xlim(-0.7, classes - 0.3)
            axes.set_ylim(-0.03 * top, top)
            axes.tick_params(axis="y", length=0)
        highest = max(float(truth.max()), float(guess.max()))
        panels[0].set_yticks([0.0, highest], ["0", f"{100 * highest:.0f} %"])
        panels[0].set_ylabel("label shares:\ntrue (bar),\ninferred (dot)", rotation=0, ha="right", va="center")
        panels[0].set_xlabel("label")
        return uri(figure)
