"""Results of a sweep: means over seeds, paired differences, and utility against measured leakage and against ε.

Leakage is what attacks achieved on the recorded runs (audit.json); utility is both accuracies and the ARI. A setting is on the front of an
attack's figure if no other setting is at least as good in both and better in one: of what was measured, not of what is possible. What an
attack that is not validated for a setting is on no front and dominates no other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ...errors import InputError
from ...protocols.bounded_files import read_json
from ..sweep.sweep import Sweep, SweepCell, SweepSetting
from .audit_words import STATUS, attack_name, is_validated, least_comforting, metric_words
from .run_files import about_audit, audit_cells
from .run_names import adversary_words

__all__ = [
    "UNIT_SCORES", "UTILITIES", "Attack", "FrontPoint", "Mean", "Result", "attack_of", "attack_points", "attack_words", "by_setting",
    "first_utility", "front_rows", "headline", "headline_rows", "mean_of", "on_front", "paired", "read_results", "ringed_of",
    "setting_columns", "table_rows", "unmarked", "utility_of", "values_of",
]  # fmt: skip

METRICS = (
    "accuracy_mean", "balanced_accuracy", "macro_f1", "majority_accuracy", "accuracy_worst", "local_accuracy_mean", "ari",
    "clusters", "epsilon", "upload_bytes", "download_bytes", "seconds",
)  # fmt: skip
OF_NUMBERS = ("r2", "error_mean", "root_mean_square_error", "mean_absolute_error", "constant_error")
UTILITIES = {
    "balanced_accuracy": "balanced accuracy, %",
    "accuracy_mean": "accuracy, %",
    "local_accuracy_mean": "accuracy of last\nlocal models, %",
    "r2": "R²",
    "ari": "clusters against\ntrue groups, ARI",
}
"""Scores of models and clusterings, and how axes name them; a page is about the first that a run has."""
PRINTED = 3
"""Decimals of leakage and utility that a page prints."""
UNIT_SCORES = ("ari", "r2")
"""Of these, scores that are not shown in percent."""


@dataclass(frozen=True, eq=False)
class Result:
    """One finished run of a sweep: its cell, summary, and the figures of its audit, if there was one.

    `left`: the attacks that the audit left out; None where it does not say.
    """

    cell: SweepCell
    summary: Mapping[str, Any]
    audit: Sequence[Mapping[str, Any]] = ()
    left: Sequence[str] | None = None


@dataclass(frozen=True)
class Mean:
    """Over seeds: mean, standard deviation between seeds (None for one), a 95 % t-interval of the mean (None for one), and their number."""

    mean: float
    std: float | None
    low: float | None
    high: float | None
    seeds: int


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """The mean of the values there are; None if there are none."""
    known = np.array([float(value) for value in values if value is not None])
    if not len(known):
        return None
    mean = float(known.mean())
    if len(known) < 2:
        return Mean(mean, None, None, None, len(known))
    std = float(known.std(ddof=1))
    half = float(stats.t.ppf(0.975, len(known) - 1)) * std / float(np.sqrt(len(known)))
    return Mean(mean, std, mean - half, mean + half, len(known))


def paired(values: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> Mean | None:
    """The mean of the differences, mine less theirs, over the seeds that both have."""
    differences = []
    for seed in sorted(values.keys() & theirs.keys()):
        a, b = values[seed], theirs[seed]
        if a is not None and b is not None:
            differences.append(a - b)
    return mean_of(differences)


def read_results(folder: Path, sweep: Sweep) -> tuple[list[Result], dict[str, str]]:
    """The finished runs of a sweep's folder, in the sweep's order, and the errors of those that failed, by name."""
    results, failed = [], {}
    for cell in sweep.cells:
        path = folder / cell.name / "summary.json"
        trouble = folder / "failed" / f"{cell.name}.json"
        if trouble.is_file():
            failed[cell.name] = str(_read(trouble)["error"])
        elif (folder / "locks" / f"{cell.name}.audit").is_file():
            failed[cell.name] = "its audit was cut short, or is under way"
        if path.is_file():
            summary = _read(path)
            if summary["rounds"] < summary["rounds_planned"] and not summary.get("stopped"):
                continue  # interrupted; a run whose privacy budget is spent has ended, too
            audit = folder / cell.name / "audit.json"
            figures = audit_cells(_read(audit), audit) if audit.is_file() else ()
            results.append(Result(cell, summary, figures, about_audit(audit).attacks_left))
    return results, failed


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None


def by_setting(results: Sequence[Result]) -> dict[SweepSetting, list[Result]]:
    groups: dict[SweepSetting, list[Result]] = {}
    for result in results:
        groups.setdefault(result.cell.setting, []).append(result)
    return groups


def values_of(results: Sequence[Result], metric: str) -> dict[int, float | None]:
    return {result.cell.seed: result.summary.get(metric) for result in results}


def table_rows(results: Sequence[Result], sweep: Sweep) -> list[dict[str, Any]]:
    """A row per setting: what was known of the groups, and each metric's mean and deviation over seeds and its paired difference to the
    first protection of the sweep.

    The difference is taken within the same algorithm and keys, seed by seed, with a 95 % t-interval; to the first protection's setting of
    the same ε, or to its only one. None where it has several and none of this ε.
    """
    groups = by_setting(results)
    own_metrics = dict.fromkeys(name for result in results for name in result.summary if name.startswith("metric_") or name in OF_NUMBERS)
    rows = []
    for setting, own in groups.items():
        row: dict[str, Any] = {**setting_columns(setting), "knowledge": own[0].summary.get("knowledge", ""), "seeds": len(own)}
        twin = _compared_with(setting, sweep)
        others = [] if twin is None or twin == setting else groups.get(twin, [])
        row["warnings"] = "; ".join(dict.fromkeys(line for result in own for line in result.summary.get("warnings", ())))
        for metric in (*METRICS, *own_metrics):
            value = mean_of(values_of(own, metric).values())
            row |= {metric: value and value.mean, f"{metric}_std": value and value.std}
            difference = paired(values_of(own, metric), values_of(others, metric))
            row |= {
                f"{metric}_difference": difference and difference.mean,
                f"{metric}_difference_low": difference and difference.low,
                f"{metric}_difference_high": difference and difference.high,
            }
        rows.append(row)
    return rows


def _compared_with(setting: SweepSetting, sweep: Sweep) -> SweepSetting | None:
    """The setting of the sweep's first protection that this one's figures stand beside."""
    same = (setting.algorithm, sweep.settings[0].protection, setting.keys)
    firsts = [setting_ for setting_ in sweep.settings if (setting_.algorithm, setting_.protection, setting_.keys) == same]
    equal = [first for first in firsts if first.epsilon == setting.epsilon]
    return (equal or firsts)[0] if equal or len(firsts) == 1 else None


def setting_columns(setting: SweepSetting) -> dict[str, Any]:
    """The columns of a table that name a setting."""
    return {"algorithm": setting.algorithm, "protection": setting.protection, "privacy.epsilon": setting.epsilon, **dict(setting.keys)}


# --- the front ------------------------------------------------------------------------------------------------------------------------


Attack = tuple[str, str, str, int]
"""(attack, metric, adversary, clients known): the key of a figure of leakage."""


@dataclass(frozen=True, eq=False)
class FrontPoint:
    """One setting under one attack: leakage and its baseline, and each utility, over seeds.

    `status`: the least comforting one that shows nothing, "" where every run's figure is validated (`is_validated`). `whole`: in no run
    were rounds left out. `leaks`: in some run the figure is a leak.
    """

    setting: SweepSetting
    leakage: Mean
    baseline: float | None
    utilities: Mapping[str, Mean | None]
    lower_is_better: bool
    status: str = ""
    whole: bool = True
    leaks: bool = False

    @property
    def validated(self) -> bool:
        return not self.status


def attack_of(cell: Mapping[str, Any]) -> Attack:
    """The key of a figure of an audit."""
    return str(cell["attack"]), str(cell["metric"]), str(cell["adversary"]), int(cell.get("k_known") or 0)


def attack_points(results: Sequence[Result]) -> dict[Attack, list[FrontPoint]]:
    """For every attack's figure that has a value somewhere, a point per setting that has one."""
    points: dict[Attack, list[FrontPoint]] = {}
    for setting, own in by_setting(results).items():
        by_attack: dict[Attack, list[Mapping[str, Any]]] = {}
        for result in own:
            for cell in result.audit:
                by_attack.setdefault(attack_of(cell), []).append(cell)
        utilities = {name: mean_of(values_of(own, name).values()) for name in UTILITIES}
        for key, cells in by_attack.items():
            leakage, baseline = mean_of(cell["value"] for cell in cells), mean_of(cell["baseline"] for cell in cells)
            if leakage is not None:
                shown = [cell for cell in cells if cell["value"] is not None]
                open_ = "" if is_validated(shown) else least_comforting(str(cell["status"]) for cell in shown if not is_validated([cell]))
                lower = any(cell.get("lower_is_better") for cell in cells)
                guess = None if baseline is None else baseline.mean
                whole = not any(cell.get("rounds") for cell in cells)
                leaks = any(cell["status"] == "leaks" for cell in cells)
                points.setdefault(key, []).append(FrontPoint(setting, leakage, guess, utilities, lower, open_, whole, leaks))
    return points


def unmarked(results: Sequence[Result]) -> list[tuple[Attack, SweepSetting, str]]:
    """What has no point: figures of attacks that others have, settings, and the reason, from the least comforting of its runs."""
    missing = []
    groups = by_setting(results)
    for key, points in attack_points(results).items():
        marked = {point.setting for point in points}
        missing += [(key, setting, _why_none(own, key)) for setting, own in groups.items() if setting not in marked]
    return missing


def _why_none(own: Sequence[Result], key: Attack) -> str:
    """From the attack's cells without a value. If the attack has cells of other figures, only this figure was absent."""
    attack, _, adversary, _ = key
    cells = [cell for result in own for cell in result.audit if (cell["attack"], cell["adversary"]) == (attack, adversary)]
    empty = [str(cell["status"]) for cell in cells if cell["value"] is None]
    if empty:
        return STATUS[least_comforting(empty)]
    return "no such figure" if cells else "not run"


def ringed_of(have: Sequence[tuple["FrontPoint", Mean]]) -> list[bool]:
    """Which points are on the front, by leakage and a utility: among those that are validated. Figures that print alike are equal."""
    known = [place for place, (point, _) in enumerate(have) if point.validated]
    leaks = [(-1.0 if have[i][0].lower_is_better else 1.0) * round(have[i][0].leakage.mean, PRINTED) for i in known]
    best = dict(zip(known, on_front(leaks, [round(have[i][1].mean, PRINTED) for i in known]), strict=True))
    return [best.get(place, False) for place in range(len(have))]


def on_front(leakage: Sequence[float], utility: Sequence[float]) -> list[bool]:
    """The points that no other point dominates (no more leakage, no less utility, one of them strictly)."""
    x, y = np.asarray(leakage, dtype=np.float64), np.asarray(utility, dtype=np.float64)
    return [not np.any((x <= a) & (y >= b) & ((x < a) | (y > b))) for a, b in zip(x, y, strict=True)]


def front_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row per attack's figure, setting and utility, with what the setting cost. ε stands beside it where one is guaranteed.

    Settings without such a figure have one row with the reason.
    """
    groups = by_setting(results)
    rows = []
    for (attack, metric, adversary, known), points in attack_points(results).items():
        for name in UTILITIES:
            have = [(point, value) for point in points if (value := point.utilities[name]) is not None]
            for (point, value), front in zip(have, ringed_of(have), strict=True):
                own = groups[point.setting]
                costs = {
                    metric: mean_of(values_of(own, metric).values()) for metric in ("epsilon", "upload_bytes", "download_bytes", "seconds")
                }
                rows.append(
                    {
                        **setting_columns(point.setting), "attack": attack, "metric": metric, "adversary": adversary,
                        "clients_known": known,
                        "validated": point.validated, "all_rounds": point.whole,
                        "leakage": point.leakage.mean, "leakage_std": point.leakage.std, "guess_with_no_view": point.baseline,
                        "utility": name, "value": value.mean, "value_std": value.std, "on_front": front,
                        **{name: cost and cost.mean for name, cost in costs.items()}, "seeds": value.seeds,
                        "seeds_with_leakage": point.leakage.seeds, "no_leakage": "",
                    }
                )  # fmt: skip
    for (attack, metric, adversary, known), setting, why in unmarked(results):
        named = {"attack": attack, "metric": metric, "adversary": adversary, "clients_known": known}
        rows.append({**setting_columns(setting), **named, "on_front": False, "seeds_with_leakage": 0, "no_leakage": why})
    return rows


# --- the attack that the page begins with -----------------------------------------------------------------------------------------------


def headline(points: Mapping[Attack, Sequence[FrontPoint]]) -> Attack | None:
    """The figure that the page begins with; None if there is none.

    That which tells most pairs of settings apart: one leaks, the other does not, and the figure is validated for both. Among equals one
    that leaks somewhere, then that with most validated settings, then with most settings, then the first.
    """

    def rank(key: Attack) -> tuple[int, bool, int, int]:
        valid = [point for point in points[key] if point.validated]
        leaking = sum(point.leaks for point in valid)
        return leaking * (len(valid) - leaking), leaking > 0, len(valid), len(points[key])

    return max(points, key=rank, default=None)


def utility_of(points: Iterable[FrontPoint]) -> str:
    """The first utility that some of these have."""
    return first_utility([point.utilities for point in points])


def first_utility(scored: Sequence[Mapping[str, Any]]) -> str:
    """The first utility that some of these, points' utilities or runs' summaries, have."""
    return next((name for name in UTILITIES if any(scores.get(name) is not None for scores in scored)), next(iter(UTILITIES)))


def headline_rows(results: Sequence[Result], first: Attack | None) -> list[dict[str, Any]]:
    """For each setting, by its number: its name, the figure of the first attack, or why there is none, and whether it is on the front."""
    points = [] if first is None else attack_points(results)[first]
    have = [(point, value) for point in points if (value := point.utilities[utility_of(points)]) is not None]
    places = {point.setting: round(value.mean, PRINTED) for point, value in have}
    ringed = {point.setting: front for (point, _), front in zip(have, ringed_of(have), strict=True)}
    known = {point.setting: point for point in points}
    reasons = {setting: why for key, setting, why in unmarked(results) if key == first}
    rows = []
    for number, setting in enumerate(by_setting(results), 1):
        point = known.get(setting)
        leak = reasons.get(setting, "not run") if point is None else f"{point.leakage.mean:.3f}"
        doubt = "" if point is None else STATUS[point.status] if point.status else "" if point.whole else "not all rounds"
        named = {"number": number, "name": setting.name, "leak": leak, "doubt": doubt, "validated": point is not None and point.validated}
        place = None if point is None else (leak, places.get(setting))
        rows.append({**named, "marked": point is not None, "place": place, "on_front": ringed.get(setting, False)})
    return rows


def attack_words(attack: Attack) -> str:
    """A figure for people: the attack, its figure, and the adversary."""
    name, metric, adversary, known = attack
    knows = f" that knows {known} client{'s' if known > 1 else ''}" if known and "+" not in adversary and adversary != "client" else ""
    return f"{attack_name(name)} by {adversary_words(adversary)}{knows} ({metric_words({'metric': metric})})"
