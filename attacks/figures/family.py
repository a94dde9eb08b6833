"""An audit's figures judged together, so that an audit of a run without a leak seldom calls anything one.

A figure alone is called a leak without one at `significance.RATE` at most, and an audit has dozens. They are judged in two parts: bounds on
ε, which are alarms about a guarantee, and all others, which are evidence of what is seen. The parts share the rate evenly (Bonferroni), so
that the number of attacks does not dilute an alarm; a part that is alone has all of it. Within a part a leak stays one if its p is small
enough beside those of all figures there that were tested (Holm 1979); others become `inconclusive`. Exact figures are not counted, since
chance gives none.

Source: Holm 1979, "A simple sequentially rejective multiple test procedure". How often audits without a leak have one all the same was
measured by `python -m benchmarks false_alarms`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .leakage import Cell
from .significance import RATE

__all__ = ["AIMED", "Family", "FamilyPart", "judged_together"]

AIMED = 0.05
"""How often an audit without a leak may call any figure one."""


@dataclass(frozen=True)
class FamilyPart:
    """Of a part's figures `tested` have a p, and `withdrawn` leak as figures by themselves, but not among so many.

    `aimed` is how often that part of an audit of a run without a leak may have a false one.
    """

    aimed: float
    tested: int
    withdrawn: int


@dataclass(frozen=True)
class Family:
    """The two parts of an audit's figures: `guarantees`, whose metrics are bounds on ε, and `evidence`. `aimed` is what they share."""

    aimed: float
    guarantees: FamilyPart
    evidence: FamilyPart

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judged_together(cells: Sequence[Cell]) -> tuple[list[Cell], Family]:
    """The figures of one audit, pooled over seeds, each leak kept or `inconclusive`.

    A leak without a p counts with `RATE`.
    """
    chances = {i: RATE if cell.p is None else cell.p for i, cell in enumerate(cells) if _is_tested(cell)}
    parts = [{i: p for i, p in chances.items() if cells[i].metric.endswith("_epsilon") == which} for which in (True, False)]
    aimed = AIMED / max(1, sum(bool(part) for part in parts))
    adjusted, made = list(cells), []
    for part in parts:
        kept = _kept(part, aimed)
        withdrawn = [i for i in part if i not in kept and cells[i].status == "leaks"]
        for i in withdrawn:
            adjusted[i] = _withdrawn(cells[i], len(part), aimed)
        made.append(FamilyPart(aimed if part else 0.0, len(part), len(withdrawn)))
    return adjusted, Family(AIMED, *made)


def _kept(chances: Mapping[int, float], aimed: float) -> set[int]:
    """Whose p stand beside each other at a rate (Holm)."""
    kept: set[int] = set()
    for rank, i in enumerate(sorted(chances, key=lambda i: chances[i])):
        if chances[i] > aimed / (len(chances) - rank):
            break
        kept.add(i)
    return kept


def _is_tested(cell: Cell) -> bool:
    return cell.value is not None and not cell.exact and (cell.p is not None or cell.status == "leaks")


def _withdrawn(cell: Cell, tested: int, aimed: float) -> Cell:
    chance = "" if cell.p is None else f" (p = {cell.p:.2g})"
    of = "bounds on epsilon" if cell.metric.endswith("_epsilon") else "figures"
    words = f"; a leak as one figure{chance}, not among the {tested} {of} tested in this audit, which may err together at {aimed:.1%}"
    return replace(cell, status="inconclusive", note=cell.note + words)
