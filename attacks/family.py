"""An audit's figures judged together, so that an audit of a run without a leak seldom calls anything one.

A figure alone is called a leak without one at `significance.RATE` at most, and an audit has dozens. A leak stays one here if its p is small
enough beside those of all figures that were tested (Holm 1979); others become `inconclusive`. Exact figures are not counted, since chance
gives none.

Source: Holm 1979, "A simple sequentially rejective multiple test procedure". How often audits without a leak have one all the same was
measured by `python -m benchmarks false_alarms`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .leakage import Cell
from .significance import RATE

__all__ = ["AIMED", "Family", "judged_together"]

AIMED = 0.05
"""How often an audit without a leak may call any figure one."""


@dataclass(frozen=True)
class Family:
    """Of the figures of an audit `tested` have a p, and `withdrawn` leak as figures by themselves, but not among so many.

    `aimed` is how often an audit of a run without a leak may have a false one.
    """

    aimed: float
    tested: int
    withdrawn: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judged_together(cells: Sequence[Cell]) -> tuple[list[Cell], Family]:
    """The figures of one audit, pooled over seeds, each leak kept or `inconclusive`.

    A leak without a p counts with `RATE`.
    """
    chances = {i: RATE if one.p is None else one.p for i, one in enumerate(cells) if _is_tested(one)}
    kept: set[int] = set()
    for rank, i in enumerate(sorted(chances, key=lambda i: chances[i])):
        if chances[i] > AIMED / (len(chances) - rank):
            break
        kept.add(i)
    found = [
        _withdrawn(one, len(chances)) if i in chances and i not in kept and one.status == "leaks" else one for i, one in enumerate(cells)
    ]
    withdrawn = sum(before.status != after.status for before, after in zip(cells, found, strict=True))
    return found, Family(AIMED, len(chances), withdrawn)


def _is_tested(one: Cell) -> bool:
    return one.value is not None and not one.exact and (one.p is not None or one.status == "leaks")


def _withdrawn(one: Cell, tested: int) -> Cell:
    chance = "" if one.p is None else f" (p = {one.p:.2g})"
    words = f"; a leak as one figure{chance}, not among the {tested} that were tested in this audit, of which {AIMED:.0%} may err together"
    return replace(one, status="inconclusive", note=one.note + words)
