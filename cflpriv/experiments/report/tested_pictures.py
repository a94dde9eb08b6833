"""The pictures of a clustering made by a test: the spectrum with the edge of noise, and Ward's tree with its tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...types import Array
from .pictures import (
    CUT,
    DENSE,
    FAINT,
    INK,
    PALETTE,
    WIDTH,
    ClusteringEvidence,
    brackets,
    client_ticks,
    group_colours,
    group_legend,
    leaf_order,
    left_title,
    new_figure,
    style,
    uri,
)
from .tested import RunTests, cut_height, node_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ANNOTATED", "apart", "spectrum", "tree"]

EIGENVALUES = 60
"""The number of eigenvalues drawn, plus as many as are needed to show the first eigenvalues below the edge."""
ANNOTATED = 12
"""So many tests are written into the tree: the first, then those of most clients. All are in the table below it."""
LETTER, LINE = 0.0082, 0.062
"""The width of a letter and the height of a line in the tree's axes, as shares of them."""


def spectrum(tested: RunTests, mark: str = "") -> str:
    """Eigenvalues as dots, the largest first, with the edge of noise as a line; those above it are coloured."""
    from matplotlib.ticker import MaxNLocator

    shown = tested.spectrum[: max(EIGENVALUES, tested.above + 20)]
    rank, edge, above = np.arange(1, len(shown) + 1), tested.edge, shown > tested.edge
    with style():
        figure = new_figure(WIDTH, 4.8)
        axes = figure.subplots()
        axes.axhline(0.0, color=FAINT, linewidth=0.8)
        axes.axhline(edge, color=CUT, linestyle="--", linewidth=1.5)
        axes.plot(rank[above], shown[above], "o", color=PALETTE[0], markersize=7, label=f"above the edge: {tested.above}")
        axes.plot(rank[~above], shown[~above], "o", color=FAINT, markersize=4.5, label="within the noise")
        heights = np.append(shown, edge)
        low, high = min(0.0, float(heights.min())), float(heights.max())
        if edge > 0 and high > 20 * edge:
            axes.set_yscale("symlog", linthresh=edge)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # the default writes powers as mathematics
            axes.set_ylim(1.3 * low, 3 * high)
            axes.set_ylabel("eigenvalue (logarithmic above the edge)")
        else:
            room = 0.09 * (high - low) or 1.0
            axes.set_ylim(low - room, high + room)
            axes.set_ylabel("eigenvalue")
        axes.set_xlim(0, len(shown) + 1)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel("rank of the eigenvalue" + (f" (the first {len(shown)})" if len(tested.first.clients) > len(shown) else ""))
        words = f"edge of noise: {edge:.3g}"
        axes.annotate(words, (1, edge), (0, 4), ("axes fraction", "data"), "offset points", ha="right", va="bottom", color="#a34400")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        left_title(axes, "In how many directions clients differ", mark)
        return uri(figure)


def tree(evidence: ClusteringEvidence, tested: RunTests) -> str:
    """Ward's tree of the first test with its cut, and at the node of each test its p-value; below, clusters and true groups."""
    assert evidence.tree is not None
    from matplotlib.collections import LineCollection

    n, order = len(evidence.clients), leaf_order(evidence)
    drawn = brackets(evidence.tree)
    highest = float(evidence.tree[-1, 2]) or 1.0
    with style():
        figure = new_figure(1.5 * WIDTH, 4.9)
        axes = figure.subplots()
        thin = n > DENSE
        axes.add_collection(LineCollection(list(drawn), colors=INK, linewidths=0.6 if thin else 1.0, rasterized=thin))
        axes.set_xlim(0, n)
        axes.set_ylim(0, 1.25 * highest)
        if tested.first.cut:
            height = cut_height(evidence.tree, tested.first.k)
            axes.axhline(height, color=CUT, linestyle="--", linewidth=1.5)
            words, colour = f"cut into {tested.first.k}", "#a34400"
        else:
            height, words, colour = highest, "no cut", INK
        where = ("axes fraction", "data")
        axes.annotate(words, (1, height), (0, 3), where, "offset points", ha="right", va="bottom", color=colour)
        _write_tests(axes, evidence, tested, drawn)
        axes.set_ylabel("height at which two branches merge")
        axes.set_xticks([])
        _strips(axes, evidence, order)
        left_title(axes, "Ward's tree in these directions, with the tests", evidence.mark.replace("\n", " "))
        group_legend(figure, evidence.groups, evidence.names)
        return uri(figure)


def apart(boxes: list[tuple[float, float, float]], line: float = LINE) -> list[float]:
    """Heights of lines of text, (left, width, lowest height) each, moved up as far as it takes that no two overlap; each `line` high."""
    placed: list[tuple[float, float, float]] = []
    for left, width, lowest in boxes:
        height = lowest
        for other_left, other_width, other in sorted(placed, key=lambda box: box[2]):
            beside = left >= other_left + other_width or other_left >= left + width
            if not beside and other - line < height < other + line:
                height = other + line
        placed.append((left, width, height))
    return [height for _, _, height in placed]


def _write_tests(axes: Axes, evidence: ClusteringEvidence, tested: RunTests, drawn: Array) -> None:
    """A mark at the node of each test, and beside the largest its number and outcome. A star: its clients are not that whole branch."""
    assert evidence.tree is not None
    n, top = len(evidence.clients), axes.get_ylim()[1]
    position = {int(client): place for place, client in enumerate(evidence.clients)}
    leaf = np.empty(n)
    leaf[leaf_order(evidence)] = np.arange(n) + 0.5
    texts = []
    for number, test in enumerate(tested.tests, 1):
        node, whole = node_of(evidence.tree, [position[client] for client in test.clients])
        x, y = (leaf[node], 0.0) if node < n else ((drawn[node - n, 1, 0] + drawn[node - n, 2, 0]) / 2, drawn[node - n, 1, 1])
        axes.plot([x], [y], "o", color=CUT, markerfacecolor=CUT if test.cut else "white", markersize=6, clip_on=False, zorder=3)
        texts.append((len(test.clients), f"{number}{'' if whole else '*'}: {test.words}", float(x) / n, float(y) / top))
    texts = [texts[0], *sorted(texts[1:], key=lambda text: -text[0])[: ANNOTATED - 1]]
    widths = [LETTER * len(text[1]) for text in texts]
    lefts = [float(np.clip(x - width / 2, 0.0, max(0.0, 1 - width))) for (_, _, x, _), width in zip(texts, widths, strict=True)]
    heights = apart([(left, width, y + 0.03) for left, width, (_, _, _, y) in zip(lefts, widths, texts, strict=True)])
    look: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.0}
    for (_, words, x, y), left, width, height in zip(texts, lefts, widths, heights, strict=True):
        line = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.8} if height > y + 0.05 else None
        axes.annotate(
            words, (x, y), (left + width / 2, height), "axes fraction", "axes fraction", ha="center", va="bottom", fontsize=8, bbox=look,
            arrowprops=line, zorder=4,
        )  # fmt: skip


def _strips(axes: Axes, evidence: ClusteringEvidence, order: Array) -> None:
    """Below the leaves, a strip of clusters in two greys, with names where they fit, and one of true groups."""
    n, labels = len(order), evidence.labels[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(labels)) + 1])
    runs = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, n)))
    greys = np.where(runs % 2 == 0, 0.86, 0.68)
    clusters = axes.inset_axes((0, -0.065, 1, 0.05))
    clusters.imshow(np.repeat(greys[:, None], 3, axis=1)[None], aspect="auto", extent=(0, n, 1, 0), interpolation="none")
    for start, end in zip(starts, [*starts[1:], n], strict=True):
        if end - start >= n / 40:
            clusters.text((start + end) / 2, 0.5, str(labels[start]), ha="center", va="center", fontsize=8)
    strips = [(clusters, "cluster")]
    if evidence.groups is not None:
        true = axes.inset_axes((0, -0.125, 1, 0.05))
        true.imshow(group_colours(evidence)[order][None], aspect="auto", extent=(0, n, 1, 0), interpolation="none")
        strips.append((true, "true group"))
    for strip, name in strips:
        strip.set_yticks([0.5], [name], fontsize=8)
        strip.tick_params(length=0)
        strip.set_xticks([])
    client_ticks(strips[-1][0], evidence.clients[order])
