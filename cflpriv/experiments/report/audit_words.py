"""Words of audits for people: statuses, the least comforting first, and figures."""

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["ACTIVE_STATUS", "ORDER", "STATUS", "least_comforting", "metric_words"]

STATUS = {
    "leaks": "leaks", "evidence_doubtful": "evidence doubtful", "inconclusive": "inconclusive", "not_validated": "not validated",
    "not_attempted": "not attempted", "at_baseline": "at baseline", "not_applicable": "not applicable",
    "nothing_to_see": "nothing to see",
}  # fmt: skip
"""Statuses for people, the least comforting first: unknown comes before harmless."""
ACTIVE_STATUS = {
    "learned": "learned", "failed": "could not be run", "no_gain": "accepted without gain", "refused": "refused",
    "not_applicable": "not applicable",
}  # fmt: skip
"""Outcomes of an active attack for people, the least comforting first."""
ORDER = tuple(STATUS)
"""The status of several figures is the first of these that occurs: one leak is a leak, one open question is open."""
SPELLED = {
    "histogram l1": "L1 of label histogram", "structure l1": "L1 of histogram up to renaming", "psnr db": "PSNR in dB",
    "low tpr": "TPR at .1 % FPR", "l1": "L1",
    "ssim": "SSIM", "auc": "AUC", "tpr": "TPR", "fpr": "FPR", "lira": "LiRA", "rmia": "RMIA",
}  # fmt: skip
"""Display names of parts of metrics' names; longer ones first."""


def metric_words(cell: Mapping[str, Any]) -> str:
    """The display name of a figure. An arrow marks errors, where a smaller value means that more was learned."""
    words = f" {str(cell['metric']).replace('_', ' ')} "
    for plain, spelled in SPELLED.items():
        words = words.replace(f" {plain} ", f" {spelled} ")
    return words.strip() + (" ↓" if cell.get("lower_is_better") else "")


def least_comforting(statuses: Iterable[str]) -> str:
    """The first of these in `ORDER`."""
    return min(statuses, key=ORDER.index)
