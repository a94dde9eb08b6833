"""What no attack of the suite reads: every part of clients' data in a view has an attack, or is named here."""

from ...plugins import ATTACKS
from ...types import Array
from .leakage import Case, Cell, nothing
from .payloads import unread

__all__ = ["cells"]

NAME = "coverage"


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """A `not_attempted` cell that names the parts without an attack; none where each part has an attack."""
    parts = unread(case.view, ATTACKS.names())
    if not parts:
        return [], None
    return [nothing(case, NAME, "unread_payloads", f"not attempted: no attack reads {'; '.join(parts)}")], None
