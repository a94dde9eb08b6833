"""The report's section on differential privacy: the spending of each run by round, by client and by purpose."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from ...protocols.bounded_files import read_json
from . import pictures

__all__ = ["ClientLedger", "privacy_section"]

ClientLedger = tuple[str, Path, Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""A run: its label, folder, summary, and rows of rounds."""


def privacy_section(runs: Sequence[ClientLedger]) -> dict[str, Any] | None:
    """The table, and the pictures of ε by round and by client, of the runs that have a guarantee; None if there is none.

    Raises `InputError` naming the file for a ledger that is damaged.
    """
    private = [run for run in runs if run[2].get("epsilon") is not None and run[2].get("privacy_unit")]
    if not private:
        return None
    return {"lines": [_line(*run) for run in private], "rounds": _by_round(private), "clients": _by_client(private)}


def _line(label: str, folder: Path, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    each = [value for value in (rows[-1].get("epsilon_per_client") or [] if rows else []) if value is not None]
    return {
        "label": label, "summary": summary, "least": min(each, default=None), "most": max(each, default=None),
        "purposes": _purposes(folder / "ledger.json"),
    }  # fmt: skip


def _purposes(path: Path) -> list[str]:
    """What was charged, and how many charges of each kind, in the order they came."""
    if not path.exists():
        return []
    try:
        charges = read_json(path)["charges"]
        return [f"{count} × {purpose}" for purpose, count in Counter(str(charge["purpose"]) for charge in charges).items()]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(f"{path}: is no ledger ({error})") from None


def _by_round(runs: Sequence[ClientLedger]) -> str | None:
    """ε spent so far after each round, with the budgets as dotted lines."""
    if not any("epsilon" in row for _, _, _, rows in runs for row in rows):
        return None
    from matplotlib.ticker import MaxNLocator

    with pictures.style():
        figure = pictures.new_figure(7.5, 3.6 + 0.22 * -(-len(runs) // 3))
        axes = figure.subplots()
        for i, (label, _, summary, rows) in enumerate(runs):
            colour = pictures.PALETTE[i % len(pictures.PALETTE)]
            known = [row for row in rows if row.get("epsilon") is not None]
            width = 3.2 - 2.0 * i / max(1, len(runs) - 1)  # lines that coincide stay visible
            axes.plot([row["round"] + 1 for row in known], [row["epsilon"] for row in known], color=colour, linewidth=width, label=label)
            if summary.get("epsilon_budget") is not None:
                axes.axhline(float(summary["epsilon_budget"]), color=colour, linestyle=":", linewidth=1.0)
        axes.set_xlabel("round")
        axes.set_ylabel("ε spent so far")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside lower center", ncols=min(3, len(runs)), frameon=False)
        return pictures.uri(figure)


def _by_client(runs: Sequence[ClientLedger]) -> str | None:
    """ε of each client at the end, a dot a client, sorted upwards within its run."""
    spent = [(label, np.sort(rows[-1]["epsilon_per_client"])) for label, _, _, rows in runs if rows and rows[-1].get("epsilon_per_client")]
    if not spent:
        return None
    with pictures.style():
        figure = pictures.new_figure(7.5, 1.3 + 0.5 * len(spent))
        axes = figure.subplots()
        for i, (_, values) in enumerate(spent):
            height = i + 0.3 - 0.6 * np.arange(len(values)) / max(1, len(values) - 1)
            axes.scatter(values, height, s=14, color=pictures.PALETTE[i % len(pictures.PALETTE)], linewidths=0)
        axes.set_yticks(range(len(spent)), [label for label, _ in spent])
        axes.set_ylim(len(spent) - 0.45, -0.55)
        axes.set_xlim(left=0)
        axes.set_xlabel("ε spent by each client")
        return pictures.uri(figure)
