"""Correct an audit's figures for their number, so that an audit of a run without a leak seldom reports a leak.

One figure without a leak is reported as a leak with probability `significance.RATE` at most, and an audit has dozens of figures. They form
two parts: bounds on ε, which are alarms about a guarantee, and all other figures, which are evidence. The parts share the error rate evenly
(Bonferroni), so that the number of attacks does not dilute an alarm; a part that is alone has the whole rate. Within a part, a leak is kept
if its p is significant after Holm's correction for all tested figures of the part (Holm 1979). The other leaks become `inconclusive`. Exact
figures are not counted, since chance gives none.

Source: Holm 1979, "A simple sequentially rejective multiple test procedure". The rate of false alarms was
measured by `python -m benchmarks false_alarms`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .leakage import Cell
from .significance import RATE, p_words

__all__ = ["AIMED", "Family", "FamilyPart", "judged_together"]

AIMED = 0.05
"""The probability, at most, that an audit of a run without a leak reports any leak."""


@dataclass(frozen=True)
class FamilyPart:
    """A part: `tested` figures have a p; `withdrawn` leaks are significant by themselves, but not after correction.

    `aimed` is the probability, at most, that the part reports a leak in an audit of a run without one.
    """

    aimed: float
    tested: int
    withdrawn: int


@dataclass(frozen=True)
class Family:
    """The two parts of an audit's figures: `guarantees` (bounds on ε) and `evidence` (all others). `aimed` is their common error rate."""

    aimed: float
    guarantees: FamilyPart
    evidence: FamilyPart

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judged_together(cells: Sequence[Cell]) -> tuple[list[Cell], Family]:
    """The figures of one audit, already pooled over seeds: leaks that are not significant together become `inconclusive`.

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
    """The figures that stay significant at a common error rate (Holm)."""
    kept: set[int] = set()
    for rank, i in enumerate(sorted(chances, key=lambda i: chances[i])):
        if chances[i] > aimed / (len(chances) - rank):
            break
        kept.add(i)
    return kept


def _is_tested(cell: Cell) -> bool:
    return cell.value is not None and not cell.exact and (cell.p is not None or cell.status == "leaks")


def _withdrawn(cell: Cell, tested: int, aimed: float) -> Cell:
    chance = "" if cell.p is None else f" ({p_words(cell.p)})"
    of = "bounds on epsilon" if cell.metric.endswith("_epsilon") else "figures"
    words = f"; significant by itself{chance}, but not after correction for the {tested} {of} tested in this audit (error rate {aimed:.1%})"
    return replace(cell, status="inconclusive", note=cell.note + words)
