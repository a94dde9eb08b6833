"""Pictures of a fitted estimator, on Axes of matplotlib that the user gives or finds."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from ..console import counted, summary_text
from ..experiments.report.pictures import PALETTE
from ..protocols.bounded_files import LARGEST_TABLE_BYTES, parse_json, read_text
from ..types import Array

__all__ = ["clusters_plot", "fitted_html", "rounds_plot"]

MOST_NAMED = 40


def clusters_plot(clients: Sequence[str], labels: Array, ax: Any = None) -> Any:
    """A mark for each client at its cluster, clients of a cluster side by side."""
    ax = plt.gca() if ax is None else ax
    order = labels.argsort(kind="stable")
    for place, client in enumerate(order.tolist()):
        ax.scatter(place, labels[client], color=PALETTE[int(labels[client]) % len(PALETTE)], s=36)
    ax.set_yticks(range(int(labels.max()) + 1))
    ax.set_ylabel("cluster")
    ax.set_xlabel("client")
    if len(clients) <= MOST_NAMED:
        ax.set_xticks(range(len(clients)), [clients[client] for client in order.tolist()], rotation=90, fontsize=7)
    ax.set_title(f"{counted(len(clients), 'client')} in {counted(int(labels.max()) + 1, 'cluster')}")
    _fits(ax)
    return ax


def rounds_plot(path: Path, ax: Any = None) -> Any:
    """Mean accuracy, and that of the worst client, over the rounds in rounds.jsonl, in per cent."""
    ax = plt.gca() if ax is None else ax
    rows = [parse_json(line) for line in read_text(path, LARGEST_TABLE_BYTES).splitlines()]
    for number, (key, label) in enumerate((("accuracy_mean", "mean over clients"), ("accuracy_worst", "worst client"))):
        points = [(row["round"] + 1, 100 * row[key]) for row in rows if row.get(key) is not None]
        ax.plot([x for x, _ in points], [y for _, y in points], color=PALETTE[number], label=label)
    ax.set_xlabel("round")
    ax.set_ylabel("accuracy, %")
    ax.set_title("Accuracy after each round")
    ax.legend(frameon=False)
    _fits(ax)
    return ax


def _fits(ax: Any) -> None:
    """Make room for the labels in a figure that holds these Axes alone; the layout of others is the user's."""
    if len(ax.figure.axes) == 1 and ax.figure.get_layout_engine() is None:
        ax.figure.set_layout_engine("constrained")


def fitted_html(clients: Array, labels: Array, summary: Mapping[str, Any]) -> str:
    """What a fitted estimator found, in a few lines of HTML."""
    items = []
    for label in range(int(labels.max()) + 1):
        members = [str(name) for name in clients[labels == label].tolist()]
        some = ", ".join(members[:MOST_NAMED]) + (", …" if len(members) > MOST_NAMED else "")
        items.append(f"<li>cluster {label}, {len(members)} clients: {html.escape(some)}</li>")
    return f"<p>{html.escape(summary_text(summary))}</p><ul>{''.join(items)}</ul>"
