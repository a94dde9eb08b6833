"""Attacks on sums in one message: a server with as many helpers as may collude, and clients of its own.

Checks: "the server, if it lies, `helpers_colluding` of the helpers and any clients learn the sum of each group over one set of its clients
… and nothing else about a value" (aggregation/helped.py, Guarantee). `lying_helper` and `other_seed` are aimed at the sum instead:
"`result` is the exact integer sum …, or there is none" (protocols/one_message/server.py, Guarantee).
"""

from .deviations import (
    COPIED_BOX,
    LATE_UPLOAD,
    LYING_HELPER,
    OTHER_SEED,
    ROLLED_BACK_HELPER,
    SECOND_HELPED_SUM,
    SECOND_SET,
    SPLIT_VIEW,
    SWAPPED_HELPER,
)

__all__ = [
    "COPIED_BOX",
    "LATE_UPLOAD",
    "LYING_HELPER",
    "OTHER_SEED",
    "ROLLED_BACK_HELPER",
    "SECOND_HELPED_SUM",
    "SECOND_SET",
    "SPLIT_VIEW",
    "SWAPPED_HELPER",
]
