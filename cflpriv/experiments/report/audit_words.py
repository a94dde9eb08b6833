"""Words of audits for people: statuses, the least comforting first, figures, and what would reduce them."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

__all__ = [
    "ACTIVE_STATUS", "CONDITIONAL", "MEANINGS", "ORDER", "SIGNS", "STATUS", "attack_name", "is_validated", "least_comforting",
    "metric_words", "remedy_of", "share_learned",
]  # fmt: skip

Kept = TypeVar("Kept")
STATUS = {
    "leaks": "leaks", "evidence_doubtful": "evidence doubtful", "inconclusive": "inconclusive", "not_validated": "not validated",
    "not_attempted": "not attempted", "at_baseline": "at baseline", "not_applicable": "not applicable",
    "nothing_to_see": "nothing to see",
}  # fmt: skip
"""Statuses for people, the least comforting first: unknown comes before harmless."""
SIGNS = {
    "leaks": "▲", "evidence_doubtful": "?", "inconclusive": "?", "not_validated": "?", "not_attempted": "○", "at_baseline": "✓",
    "not_applicable": "–", "nothing_to_see": "–",
}  # fmt: skip
"""The sign before each status: it says what the colour says."""
MEANINGS = {
    "leaks": "clearly better than the baseline, also among all figures of the audit (5 % may err together)",
    "evidence_doubtful": "what was audited failed a check, so nothing is concluded",
    "inconclusive": "neither a leak nor its absence is shown; more seeds may decide",
    "not_validated": "the attack does not clearly work unprotected, or had too few seeds: its failure says nothing",
    "not_attempted": "nothing is known: this attack cannot read what was sent, another might",
    "at_baseline": "no better than the baseline: by proof, or by an attack that does work unprotected",
    "not_applicable": "what was sent has not the form that this attack reads",
    "nothing_to_see": "no number that was sent is of clients' data",
}
"""What each status means."""
ACTIVE_STATUS = {
    "learned": "learned", "failed": "could not be run", "no_gain": "accepted without gain", "refused": "refused",
    "not_applicable": "not applicable",
}  # fmt: skip
"""Outcomes of an active attack for people, the least comforting first."""
ORDER = tuple(STATUS)
"""The status of several figures is the first of these that occurs: one leak is a leak, one open question is open."""
CONDITIONAL = {"static_value_exact": "any value that single clients would send unchanged in sums"}
"""Figures of values that a run need not send: a real value that leaks comes before them, and no verdict calls them updates."""
VALIDATED = ("leaks", "at_baseline")
"""Statuses of figures that show something: a leak, or with enough power that there is none."""
BEST_PSNR_DB = 40.0
"""An image with so many decibels looks like the original."""
ATTACK_NAMES = {
    "sybil_span": "comparison with colluders' vectors", "fold_release": "reading of compared vectors",
    "disaggregation": "separation of sums",
    "gram_geometry": "geometry of inner products", "gram_updates": "inner products of updates",
}  # fmt: skip
"""Plain names of attacks in sentences, where the name in commands and tables is none."""
SPELLED = {
    "singleton exact": "single updates read exactly", "static value exact": "constant values read exactly",
    "fold membership auc": "AUC of membership in compared vectors", "samples order auc": "AUC of the order of sample counts",
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


def attack_name(attack: str) -> str:
    """An attack in a sentence."""
    return ATTACK_NAMES.get(attack, attack.replace("_", " "))


def share_learned(cell: Mapping[str, Any]) -> float:
    """How much of what there is between knowing nothing and knowing everything a figure shows, at most 1; a broken guarantee comes first.

    Of a value that a run need not send (`CONDITIONAL`) nothing, and of a figure that was read all.
    """
    if str(cell["metric"]).endswith("_epsilon"):
        return 2.0
    if cell["metric"] in CONDITIONAL or cell.get("value") is None or cell.get("baseline") is None:
        return 0.0
    if cell.get("exact"):
        return 1.0
    best = 0.0 if cell.get("lower_is_better") else BEST_PSNR_DB if str(cell["metric"]).endswith("_psnr_db") else 1.0
    return 0.0 if best == cell["baseline"] else min(1.0, float((cell["value"] - cell["baseline"]) / (best - cell["baseline"])))


def least_comforting(statuses: Iterable[str]) -> str:
    """The first of these in `ORDER`."""
    return min(statuses, key=ORDER.index)


def is_validated(cells: Iterable[Mapping[str, Any]]) -> bool:
    """Whether figures, one at least, all show a leak or how little is learned: the same rule for one audit and for a sweep.

    An attack that fails unprotected shows nothing. An inconclusive figure shows that less than half of the unprotected gain is learned if
    its interval ends below that, and if the attack missed no leak that was planted for it.
    """
    known = list(cells)
    return bool(known) and all(cell["status"] in VALIDATED or (cell["status"] == "inconclusive" and _is_small(cell)) for cell in known)


def _is_small(cell: Mapping[str, Any]) -> bool:
    """Whether the whole interval of a figure is below half of what the attack gains unprotected, and nothing casts doubt on the attack."""
    figures = [cell.get(name) for name in ("low", "high", "baseline", "reference")]
    if any(figure is None for figure in figures) or cell.get("power_low") is not None:
        return False
    low, high, baseline, reference = (float(figure or 0.0) for figure in figures)
    start = cell.get("reference_baseline")
    gain = baseline - low if cell.get("lower_is_better") else high - baseline
    return gain < abs(reference - (baseline if start is None else float(start))) / 2


def remedy_of(remedies: Mapping[str, Kept], attack: str, metric: str) -> Kept | None:
    """What would reduce a figure: its own entry, by "attack/metric", or else that of its attack; None without either."""
    return remedies.get(f"{attack}/{metric}", remedies.get(attack))
