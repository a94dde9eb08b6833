"""The report's pictures: each function draws one figure as an SVG data URI, the same bytes for the same input.

Nothing here knows of run folders. Matplotlib is imported when a picture is drawn, and without pyplot, so that no state is left behind.
Colours are Okabe and Ito's, which colour-blind readers can distinguish; dense parts are drawn as pixels, to keep files small.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.cluster import hierarchy

from ...clustering.cuts import CLEAR_GAP
from ...types import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "WIDTH", "ClusteringEvidence", "Series", "brackets", "by_clusters", "client_ticks", "clients_picture", "dendrogram",
    "group_colours", "group_legend", "heatmap", "images_picture", "is_wide", "leaf_order", "left_title", "new_figure", "roc_picture",
    "rounds_picture", "shrunk", "style", "svg", "uri",
]  # fmt: skip

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#999933")
DASHES = ("-", "--", ":", "-.")
WIDTH = 5.3
"""Of most figures, in inches: two fit side by side, and one can be read on a phone."""
INK, FAINT, CUT = "#1f2933", "#9aa5b1", "#D55E00"
CUT_WORDS, DENSE_INK = "#a34400", "#6b7280"
"""Of words beside a cut, and of lines that are drawn as pixels, which keep their colour on a dark ground."""
IN_THE_DARK = {
    f"fill: {INK}": "fill: #e4e9ee", f"stroke: {INK}": "stroke: #e4e9ee", "fill: #ffffff": "fill: #1b2229",
    f"fill: {CUT_WORDS}": "fill: #ffb27d",
}  # fmt: skip
"""What a dark scheme makes of a figure's styles."""
_RULES = "".join(f'[style*="{old}"] {{ {new} !important }}' for old, new in IN_THE_DARK.items())
DARK = f"\n@media screen and (prefers-color-scheme: dark) {{{_RULES}}}\n"
_SVG = "data:image/svg+xml;base64,"
PIXELS = 180
"""More clients than this are averaged to this many pixels a side."""
DENSE = 300
"""From this many marks on, they are drawn as pixels."""


UNKNOWN = "#8c8c8c"
"""The colour of clients whose true group is unknown."""


@dataclass(frozen=True, eq=False)
class ClusteringEvidence:
    """What a clustering was decided on: `distance` (n, n) and/or `tree` (n − 1, 4), in the order of `clients` (n,).

    `labels` and `groups` (n,) are found clusters and true groups; None where these are unknown. `degrees`: distances are angles. `mark`
    goes into the title; `names` are those of the true groups.
    """

    clients: Array
    labels: Array
    groups: Array | None
    distance: Array | None = None
    tree: Array | None = None
    height: float | None = None
    gap_ratio: float | None = None
    degrees: bool = True
    mark: str = ""
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return "distance in degrees" if self.degrees else "distance"


@dataclass(frozen=True, eq=False)
class Series:
    """One run's accuracies in [0, 1], or R², NaN where not measured: per evaluated round (r,), and per client at the end (m,)."""

    name: str
    rounds: Array
    served: Array
    local: Array
    clients: Array
    client_served: Array
    client_local: Array
    client_groups: Array
    group_names: Mapping[int, str] = field(default_factory=dict)


def shrunk(values: Array, side: int) -> Array:
    """A square matrix averaged, block by block, down to at most `side` rows and columns."""
    n = len(values)
    if n <= side:
        return values
    starts = np.arange(side) * n // side
    widths = np.diff(np.append(starts, n)).astype(np.float64)
    sums = np.add.reduceat(np.add.reduceat(values, starts, axis=0), starts, axis=1)
    return np.asarray(sums / np.outer(widths, widths))


def heatmap(evidence: ClusteringEvidence) -> str:
    """The distance matrix, clients ordered by cluster, then by the tree; lines between clusters, a strip with known true groups."""
    assert evidence.distance is not None
    leaves = leaf_order(evidence)
    order = leaves[np.argsort(evidence.labels[leaves], kind="stable")]
    values, n = evidence.distance[np.ix_(order, order)], len(order)
    with style():
        figure = new_figure(WIDTH, 4.8)
        axes = figure.subplots()
        image = axes.imshow(shrunk(values, PIXELS), cmap="viridis", extent=(0, n, n, 0), interpolation="none")
        figure.colorbar(image, ax=axes, shrink=0.75, label=evidence.unit)
        sizes = np.unique(evidence.labels, return_counts=True)[1]
        edges = np.concatenate([[0], np.cumsum(sizes)])
        if len(sizes) <= 60:
            for edge in edges[1:-1]:
                axes.axhline(edge, color="white", linewidth=1.5)
                axes.axvline(edge, color="white", linewidth=1.5)
        client_ticks(axes, evidence.clients[order])
        strip = axes.inset_axes((-0.045, 0, 0.03, 1))
        if evidence.groups is None:
            strip.set_ylim(n, 0)
            strip.set_frame_on(False)
        else:
            strip.imshow(group_colours(evidence)[order][:, None, :], aspect="auto", extent=(0, 1, n, 0), interpolation="none")
        strip.set_xticks([])
        names = [f"cluster {label}" for label in np.unique(evidence.labels)] if len(sizes) <= 12 else []
        strip.set_yticks(((edges[:-1] + edges[1:]) / 2)[: len(names)], names, rotation=90, va="center")
        strip.tick_params(length=0)
        axes.set_yticks([])
        left_title(axes, "How far apart clients are", evidence.mark)
        group_legend(figure, evidence.groups, evidence.names)
        return uri(figure)


def brackets(tree: Array) -> Array:
    """The n − 1 merges of a linkage tree as polygons (n − 1, 4, 2) of (x, height); leaves stand at .5, 1.5, … in scipy's order.

    The same drawing as `scipy.cluster.hierarchy.dendrogram`, which recurses as deep as the tree: too deep for long chains.
    """
    n = len(tree) + 1
    x, y = np.zeros(2 * n - 1), np.zeros(2 * n - 1)
    x[hierarchy.leaves_list(tree)] = np.arange(n) + 0.5
    drawn = np.empty((n - 1, 4, 2))
    for merge, (left, right, height, _) in enumerate(tree):
        a, b, node = int(left), int(right), n + merge
        drawn[merge] = [(x[a], y[a]), (x[a], height), (x[b], height), (x[b], y[b])]
        x[node], y[node] = (x[a] + x[b]) / 2, height
    return drawn


def dendrogram(evidence: ClusteringEvidence) -> str:
    """The tree of merges with the cut, leaves coloured by true group."""
    assert evidence.tree is not None
    from matplotlib.collections import LineCollection

    tree, n, leaves = evidence.tree, len(evidence.clients), leaf_order(evidence)
    look: dict[str, Any] = {"colors": DENSE_INK if n > DENSE else INK, "linewidths": 0.6 if n > DENSE else 1.0, "rasterized": n > DENSE}
    with style():
        figure = new_figure(WIDTH, 5.4)
        axes = figure.subplots()
        axes.add_collection(LineCollection(list(brackets(tree)), **look))
        top = max(float(tree[-1, 2]), evidence.height or 0.0) * 1.12 or 1.0
        axes.set_xlim(0, n)
        axes.set_ylim(0, top)
        if evidence.height is not None:
            axes.axhline(evidence.height, color=CUT, linestyle="--", linewidth=1.5)
            ratio = "" if evidence.gap_ratio is None else f"  (largest gap ratio {evidence.gap_ratio:.2f})"
            words = f"cut at {evidence.height:.3g}{'°' if evidence.degrees else ''}{ratio}"
            where, box = ("axes fraction", "data"), {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
            axes.annotate(
                words, (0.5, evidence.height), (0, 4), where, "offset points", ha="center", va="bottom", color=CUT_WORDS, bbox=box
            )
        axes.set_ylabel(f"{evidence.unit} at which two branches merge")
        axes.set_xticks([])
        strip = axes.inset_axes((0, -0.04, 1, 0.03))
        strip.imshow(group_colours(evidence)[leaves][None], aspect="auto", extent=(0, n, 1, 0), interpolation="none")
        strip.set_yticks([])
        client_ticks(strip, evidence.clients[leaves])
        left_title(axes, "Which clients merge first", evidence.mark)
        group_legend(figure, evidence.groups, evidence.names)
        return uri(figure)


def by_clusters(silhouettes: Mapping[int, float], gap_ratios: Mapping[int, float], k: int) -> str:
    """Mean silhouette and gap ratio for each number of clusters, with the number `k` that was taken."""
    panels = [("mean silhouette", silhouettes, None), ("gap ratio", gap_ratios, CLEAR_GAP)]
    with style():
        figure = new_figure(WIDTH, 4.2)
        for axes, (name, values, line) in zip(figure.subplots(2, 1), panels, strict=True):
            points = sorted((size, value) for size, value in values.items() if np.isfinite(value))
            axes.axvline(k, color=CUT, linestyle="--", linewidth=1.2)
            axes.plot([size for size, _ in points], [value for _, value in points], "o-", color=PALETTE[0], markersize=4)
            if line is not None:
                axes.axhline(line, color=FAINT, linewidth=1)
                axes.annotate("clear from here up", (1, line), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
            heights = [0.0, line or 0.0, *(value for _, value in points)]
            axes.set_ylim(1.15 * min(heights), 1.15 * max(heights) or 1.0)
            axes.set_xlabel(f"clusters K (dashed: {k}, taken)")
            axes.set_ylabel(name)
            axes.xaxis.get_major_locator().set_params(integer=True)
        return uri(figure)


def rounds_picture(runs: Sequence[Series], local: bool = False, scale: float = 100, words: str = "mean accuracy of clients, %") -> str:
    """A score per round, times `scale`, one line a run: of the deployed models, or of `local` ones."""
    from matplotlib.ticker import MaxNLocator

    with style():
        figure = new_figure(WIDTH, 3.0 + 0.2 * len(runs))
        axes = figure.subplots()
        for i, run in enumerate(runs):
            values = run.local if local else run.served
            known = np.isfinite(values)
            look: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "linestyle": DASHES[i // len(PALETTE) % len(DASHES)]}
            width = 3.2 - 2.0 * i / max(1, len(runs) - 1)  # lines that coincide stay visible
            axes.plot(run.rounds[known] + 1, scale * values[known], linewidth=width, label=run.name, **look)
            if int(known.sum()) <= 3:
                axes.plot(run.rounds[known] + 1, scale * values[known], "o", color=look["color"])
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(words)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=1, frameon=False)
        return uri(figure)


def clients_picture(runs: Sequence[Series], local: bool = False) -> str:
    """Accuracy of each client at the last evaluated round, of the deployed or the `local` model: a dot a client, sorted upwards within its
    run, coloured by true group where it is known (−1: it is not)."""
    everyone = np.concatenate([run.client_groups for run in runs])
    groups = everyone[everyone >= 0]
    palette = {-1: UNKNOWN, **dict(zip(np.unique(groups).tolist(), _palette(len(np.unique(groups))), strict=True))}
    dense = len(everyone) > DENSE
    with style():
        figure = new_figure(WIDTH, 1.3 + 0.5 * len(runs))
        axes = figure.subplots()
        for i, run in enumerate(runs):
            values = run.client_local if local else run.client_served
            order = [j for j in np.argsort(values, kind="stable") if np.isfinite(values[j])]
            height = i + 0.28 - 0.48 * np.arange(len(order)) / max(1, len(order) - 1)
            colours = [palette[int(run.client_groups[j])] for j in order]
            axes.scatter(100 * values[order], height, s=16, c=colours, linewidths=0, alpha=0.9, rasterized=dense)
            if order:
                axes.plot([100 * values[order].mean()] * 2, [i - 0.22, i + 0.32], color=INK, linewidth=1.6)
            axes.annotate(run.name, (0, i - 0.3), xycoords=("axes fraction", "data"), fontsize=8, va="center")
        axes.set_xlabel("accuracy on the client's own test data, %")
        axes.set_yticks([])
        axes.set_ylim(len(runs) - 0.5, -0.5)
        group_legend(figure, groups, {number: name for run in runs for number, name in run.group_names.items()})
        return uri(figure)


def images_picture(
    truth: Array,
    recovered: Array,
    baseline: Array,
    titles: Sequence[str],
    label_truth: Array | None = None,
    label_guess: Array | None = None,
) -> str:
    """Rows of images (m, C, H, W): the real ones or their means, what the attacker recovers, and the guess without a view (C, H, W).

    Each image is scaled to [0, 1]. With labels (m, classes) in [0, 1], a row of histograms below: bars are true, dots what the attacker
    infers.
    """
    m = len(truth)
    rows = [("real", truth), ("attacker recovers", recovered), ("guess with no view", np.stack([baseline] * m))]
    labels = label_truth is not None and label_guess is not None
    with style():
        figure = new_figure(1.5 + 1.1 * m, 4.6 if labels else 3.7)
        grid = figure.subplots(4 if labels else 3, m, squeeze=False, height_ratios=[1, 1, 1, 0.7] if labels else None)
        for line, (name, images) in zip(grid[:3], rows, strict=True):
            for axes, image in zip(line, images, strict=True):
                axes.imshow(_shown(image), cmap="gray", vmin=0, vmax=1, interpolation="none")
                axes.set_xticks([])
                axes.set_yticks([])
            line[0].set_ylabel(name, rotation=0, ha="right", va="center")
        for axes, title in zip(grid[0], titles, strict=True):
            axes.set_title(title, fontsize=8)
        if label_truth is not None and label_guess is not None:
            classes = label_truth.shape[1]
            for axes, real, inferred in zip(grid[3], label_truth, label_guess, strict=True):
                axes.bar(range(classes), real, color="#8fbbdc", width=0.8)
                axes.plot(np.flatnonzero(inferred > 0), inferred[inferred > 0], "o", color=CUT, markersize=3.5)
                axes.set_xticks([0, classes - 1])
                axes.set_xlim(-0.7, classes - 0.3)
                axes.set_ylim(0, 1.12)
                axes.set_yticks([])
            grid[3, 0].set_ylabel("labels: true (bar),\ninferred (dot)", rotation=0, ha="right", va="center")
        return uri(figure)


def roc_picture(curves: Mapping[str, Array], others: int) -> str:
    """ROC curves, (2, t) of false and true positive rates each, both axes logarithmic: what counts is on the left.

    `others` is the number of non-members: rates below one over it cannot be distinguished from 0, and are not drawn.
    """
    least = 1 / max(2, others)
    with style():
        figure = new_figure(WIDTH, 4.2)
        axes = figure.subplots()
        axes.plot([least, 1], [least, 1], color=FAINT, linewidth=1, label="coin")
        for i, (name, (false, true)) in enumerate(curves.items()):
            seen = false >= least * (1 - 1e-9)
            look: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "linestyle": DASHES[i // len(PALETTE) % len(DASHES)]}
            axes.step(false[seen], np.maximum(true[seen], least / 10), where="post", linewidth=3.2 - 0.6 * min(i, 4), label=name, **look)
        dashed = ""
        if least <= 0.01:
            axes.axvline(0.01, color=CUT, linestyle="--", linewidth=1)
            dashed = " (dashed: 1 %)"
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):  # the default writes powers as mathematics, which `style` does not parse
            axis.set_major_formatter(lambda rate, _: f"{rate:g}")
        axes.set_xlim(least, 1)
        axes.set_ylim(least, 1.05)
        axes.set_xlabel(f"false positive rate, of {others} non-members{dashed}")
        axes.set_ylabel("true positive rate")
        axes.legend(loc="lower right", frameon=False, fontsize=8)
        return uri(figure)


def style() -> AbstractContextManager[None]:
    """One look, whatever the reader's own matplotlib settings are."""
    from matplotlib import style as styles

    look = {
        "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT,
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
        "svg.hashsalt": "cflpriv", "svg.fonttype": "path", "text.parse_math": False,
    }  # fmt: skip
    return styles.context(["default", look])


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, its size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def uri(figure: Figure) -> str:
    """A figure as an SVG data URI, whose ground and ink follow the reader's dark scheme; pixels and colours of data stay."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", dpi=150, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue().decode("utf-8").replace("</style>", f"{DARK}</style>", 1)
    return _SVG + base64.b64encode(text.encode("utf-8")).decode("ascii")


def is_wide(picture: str) -> bool:
    """Whether a figure, by its data URI, is too wide for a phone, which then scrolls it."""
    width = re.search(r'<svg [^>]*width="([0-9.]+)pt"', svg(picture))
    return width is not None and float(width[1]) > 1.3 * WIDTH * 72


def svg(picture: str) -> str:
    """The text of a figure's SVG, from its data URI."""
    return base64.b64decode(picture.removeprefix(_SVG)).decode("utf-8")


def left_title(axes: Axes, words: str, mark: str) -> None:
    """A title above the left edge, with `mark` in brackets below it."""
    axes.set_title(words if not mark else f"{words}\n({mark})", loc="left")


def leaf_order(evidence: ClusteringEvidence) -> Array:
    """The order of clients along the tree; without a tree, as they come."""
    if evidence.tree is None:
        return np.arange(len(evidence.clients))
    return np.asarray(hierarchy.leaves_list(evidence.tree), dtype=np.int64)


def client_ticks(axes: Axes, clients: Array) -> None:
    """Names the columns of an axis by their `clients` (n,), or says how many there are."""
    if len(clients) <= 40:
        small = 8 if len(clients) <= 20 else 6
        names = [str(client) for client in clients]
        axes.set_xticks(np.arange(len(clients)) + 0.5, names, fontsize=small, rotation=0 if small == 8 else 90)
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel("client")
    else:
        axes.set_xticks([])
        axes.set_xlabel(f"{len(clients)} clients")


def _palette(k: int) -> list[str]:
    """k colours: the palette while it lasts, then shades along a scale."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return list(PALETTE[:k]) if k <= len(PALETTE) else [to_hex(colormaps["turbo"](i / (k - 1))) for i in range(k)]


def group_colours(evidence: ClusteringEvidence) -> Array:
    """The RGB of each client's true group, (n, 3); one colour for all where the groups are unknown."""
    from matplotlib.colors import to_rgb

    if evidence.groups is None:
        return np.tile(np.array(to_rgb(UNKNOWN)), (len(evidence.clients), 1))
    known, inverse = np.unique(evidence.groups, return_inverse=True)
    return np.array([to_rgb(colour) for colour in _palette(len(known))])[inverse.reshape(-1)]


def group_legend(figure: Figure, groups: Array | None, names: Mapping[int, str]) -> None:
    """The colours of the true `groups` (n,), below a figure; nothing where they are unknown."""
    from matplotlib.patches import Patch

    if groups is None or not len(groups):
        return
    known = np.unique(groups)
    few = len(known) <= 12
    patches = (
        [Patch(color=colour, label=names.get(int(group), str(group))) for group, colour in zip(known, _palette(len(known)), strict=True)]
        if few
        else []
    )
    title = "true group" if few else f"{len(known)} true groups, a colour each"
    options: dict[str, Any] = {"ncols": min(6, len(known)), "handlelength": 0.9, "columnspacing": 0.9, "handletextpad": 0.4}
    legend = figure.legend(handles=patches, title=title, loc="outside lower center", frameon=False, **options)
    legend.get_title().set_fontsize(9)


def _shown(image: Array) -> Array:
    """An image (C, H, W) as matplotlib shows it, scaled to [0, 1]; colour if it has three channels, else the channels' mean."""
    low, high = float(np.min(image)), float(np.max(image))
    scaled = (np.asarray(image, dtype=np.float64) - low) / (high - low) if high > low else np.zeros(np.shape(image))
    return np.moveaxis(scaled, 0, -1) if len(scaled) == 3 else scaled.mean(axis=0)
