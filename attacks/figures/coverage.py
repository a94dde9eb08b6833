"""What no attack of the suite reads: every part of clients' data in a view has an attack that read it, or is named here.

Three ways: parts for which the suite has no attack (`cells`); parts that none of their attacks read in this audit (`passed_over`), since
the attacks were not asked for, did not fit the form of the part, or had nothing that they look for; and attacks on a part of the view
alone (`less_sure`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...plugins import ATTACKS
from ...types import Array
from ..adversary import AdversaryView
from .leakage import Case, Cell, nothing
from .payloads import data_parts, unread

__all__ = ["cells", "less_sure", "passed_over"]

NAME = "coverage"
PASSED_OVER = "passed_over_payloads"


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """A `not_attempted` cell that names the parts without an attack; none where each part has an attack."""
    parts = unread(case.view, ATTACKS.names())
    if not parts:
        return [], None
    return [nothing(case, NAME, "unread_payloads", f"not attempted: no attack reads {'; '.join(parts)}")], None


def passed_over(cells: Sequence[Cell], readers: Mapping[str, Sequence[str]]) -> list[Cell]:
    """A `not_attempted` cell that names the parts which none of their attacks has read, from all `cells` of one adversary.

    `readers`: the attacks that read each part of its view. An attack has read a part if it states a figure, and leaves the part open by
    itself if it was `not_attempted`. A proof about cohorts (`exact`, at its baseline) reads no value.
    """
    read = {cell.attack for cell in cells if cell.status == "not_attempted" or (cell.value is not None and not _is_proof(cell))}
    left = [part for part, attacks in readers.items() if attacks and not read & set(attacks)]
    if not left or not cells:
        return []
    first = cells[0]
    note = f"not attempted: no attack of this audit read {'; '.join(left)}"
    return [Cell(NAME, first.adversary, first.protection, PASSED_OVER, *(None,) * 5, "not_attempted", first.k_known, first.seeds, note)]


def less_sure(cells: Sequence[Cell], whole: AdversaryView, *, kept: bool) -> list[Cell]:
    """Cells of attacks that saw the first rounds only, or not all payloads (not `kept`), where the `whole` view may show something.

    An attack that found nothing to read is `not_attempted` if it reads a part of the whole view. No figure is at its baseline.
    """
    parts, less = data_parts(whole), list[Cell]()
    for cell in cells:
        reads = not kept or any(entry is None or cell.attack in entry.readers for entry in parts.values())
        status = cell.status
        if status in ("nothing_to_see", "not_applicable"):
            status = "not_attempted" if reads else "not_applicable" if parts else status
        less.append(replace(cell, status="inconclusive" if status == "at_baseline" else status))
    return less


def _is_proof(cell: Cell) -> bool:
    return cell.exact and cell.status == "at_baseline"
