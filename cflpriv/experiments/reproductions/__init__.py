"""The papers' tables and figures as data: for each name its cells and the source of every hyper-parameter. `published` has their numbers.

One file a paper. A cell is a run (dotted configuration keys over the entry's own) or repeated trials. Nothing here was tuned: what the
papers leave open is listed in `chosen`; open ones were set before these runs, some after earlier trials with known outcomes.
"""

from . import cfl, ifca, pacfl, pfedlia, stocfl
from .entry import METRICS, Reproduction, ReproductionCell, RowFigure

__all__ = ["METRICS", "REPRODUCTIONS", "Reproduction", "ReproductionCell", "RowFigure"]

REPRODUCTIONS: dict[str, Reproduction] = {
    **pacfl.ENTRIES, **ifca.ENTRIES, **stocfl.ENTRIES, **cfl.ENTRIES, **pfedlia.ENTRIES,
}  # fmt: skip
"""Name -> what is reproduced."""
