"""The first screen of a sweep's report: four answers on its settings, one sentence, and what to do next.

The answers follow from the summaries and audits of the runs by the rules here. A difference counts if its paired interval over seeds is
above 0; settings whose scores print alike are named together.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...console import counted
from ..sweep.sweep import Sweep, SweepSetting
from .answer import Answer, Tone, counted_words, joined, listed, upper
from .answers import STRONG_EPSILON, WEAK_EPSILON
from .audit_words import is_validated
from .before import MOST_STEPS, Step
from .front import (
    UNIT_SCORES,
    Attack,
    Result,
    attack_of,
    attack_points,
    attack_words,
    by_setting,
    first_utility,
    mean_of,
    paired,
    values_of,
)  # fmt: skip
from .results import counts_in, is_useless
from .run_names import kind_of

__all__ = ["BestServed", "best_served", "groups_found", "score_words", "sweep_answers", "sweep_in_short", "sweep_steps", "useless_of"]

SCORES = {
    "balanced_accuracy": "balanced accuracy", "accuracy_mean": "accuracy", "local_accuracy_mean": "accuracy of local models", "r2": "R²",
    "ari": "ARI",
}  # fmt: skip
ALIKE = {("label_inference", "histogram_l1"): "The clients' label shares are alike"}
"""What it means for an attack's figure that a guess without a view is right: by attack and metric."""
FEWEST_SEEDS = 5
NAMED = 2
"""Settings that a verdict or a sentence names; it counts more than these."""
LONGEST_NAME = 30


@dataclass(frozen=True)
class BestServed:
    """The settings that serve best by `score`: those that print as the best `value`, and those that no seeds tell apart from the best."""

    score: str
    value: str
    best: tuple[SweepSetting, ...]
    undecided: tuple[SweepSetting, ...]
    seeds: int


def score_words(name: str, value: float) -> str:
    return f"{value:.2f}" if name in UNIT_SCORES else f"{100 * value:.1f} %"


def best_served(results: Sequence[Result]) -> BestServed | None:
    """The settings with the best mean of the first score that runs have; None where none was measured."""
    score, groups = first_utility([result.summary for result in results]), by_setting(results)
    values = {setting: values_of(own, score) for setting, own in groups.items()}
    means = {setting: mean.mean for setting, known in values.items() if (mean := mean_of(known.values())) is not None}
    if not means:
        return None
    top = max(means, key=lambda setting: means[setting])
    value = score_words(score, means[top])
    best = [setting for setting in means if score_words(score, means[setting]) == value]
    others = {setting: paired(values[top], values[setting]) for setting in means if setting not in best}
    undecided = [setting for setting, difference in others.items() if difference is None or not (difference.low or 0.0) > 0]
    return BestServed(score, value, tuple(best), tuple(undecided), len({result.cell.seed for result in results}))


def useless_of(results: Sequence[Result]) -> list[SweepSetting]:
    """The settings whose models tell no classes apart, in any run."""
    found = []
    for setting, own in by_setting(results).items():
        counts = [counts_in(result.summary, f"{result.cell.name}/summary.json") for result in own]
        if all(known is not None and is_useless(known) for known in counts):
            found.append(setting)
    return found


def _which(settings: Sequence[SweepSetting], results: Sequence[Result]) -> str:
    """Settings by their numbers on the page."""
    numbers = [str(number) for number, setting in enumerate(by_setting(results), 1) if setting in settings]
    return f"setting{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def _named(settings: Sequence[SweepSetting], results: Sequence[Result]) -> str:
    return listed([setting.name for setting in settings]) if len(settings) <= NAMED else _which(settings, results)


# --- the four answers -----------------------------------------------------------------------------------------------------------------


def sweep_answers(results: Sequence[Result], first: Attack | None) -> list[Answer]:
    """The four answers, in the order of the questions; `first` is the figure that the page begins with."""
    return [_served(results), _groups(results), _leaks(results, first), _guaranteed(results)]


def _served(results: Sequence[Result]) -> Answer:
    question, found, useless = "Which setting serves best?", best_served(results), useless_of(results)
    if found is None:
        return Answer(question, "open", "Not measured", "No run was evaluated.")
    if set(found.best) <= set(useless):
        return Answer(question, "bad", "Learned nothing", "No setting has models that tell classes apart.", symbol="✗")
    own = found.best[0].name
    verdict = own if len(found.best) == 1 and len(own) <= LONGEST_NAME else _which(found.best, results).capitalize()
    names = f"{listed([setting.name for setting in found.best])}: " if len(found.best) <= NAMED else ""
    text = upper(f"{names}{SCORES[found.score]} {found.value}{', each' if len(found.best) > 1 else ''}.")
    apart = f"{counted(found.seeds, 'seed')} cannot tell {_which(found.undecided, results)} apart." if found.undecided else ""
    small = joined([apart, f"Learned nothing: {_which(useless, results)}." if useless else ""])
    return Answer(question, "open" if found.undecided else "good", verdict, text, small)


def groups_found(results: Sequence[Result]) -> str:
    """How many clusters the runs of one setting found, for a cell of a table."""
    sought = [result.summary for result in results if kind_of(result.summary) == "clusters" and result.summary.get("clusters")]
    if not sought:
        return "none sought"
    numbers = sorted({int(summary["clusters"]) for summary in sought})
    agreed = mean_of(summary.get("ari") for summary in sought)
    return " or ".join(map(str, numbers)) + ("" if agreed is None else f", ARI {agreed.mean:.2f}")


def _groups(results: Sequence[Result]) -> Answer:
    question = "Are there groups?"
    formed = [result for result in results if kind_of(result.summary) == "clusters" and result.summary.get("clusters")]
    found = [result for result in formed if str(result.summary.get("knowledge", "none")).startswith("none")]
    if not formed:
        return Answer(question, "none", "Not sought", "No setting forms groups of clients.")
    if not found:
        return Answer(question, "none", "As given", "What groups to form was set before each run.")
    counts = Counter(int(result.summary["clusters"]) for result in found)
    by_algorithm: dict[str, Counter[int]] = {}
    for result in found:
        by_algorithm.setdefault(result.cell.setting.algorithm, Counter())[int(result.summary["clusters"])] += 1
    lines = [f"{name}: {_run_counts(own)}" for name, own in list(by_algorithm.items())[:NAMED]]
    agreed = mean_of(result.summary.get("ari") for result in found)
    true = "" if agreed is None else f"Mean ARI against the true groups: {agreed.mean:.2f}."
    given = dict.fromkeys(result.cell.setting.algorithm for result in formed if result not in found)
    small = joined([true, f"Set before the run: {', '.join(given)}." if given else ""])
    text = f"{'; '.join(lines)}{'; …' if len(by_algorithm) > NAMED else ''}."
    if len(counts) > 1:
        return Answer(question, "open", f"{min(counts)} to {max(counts)}, by run", text, small)
    (k,) = counts
    if k == 1:
        return Answer(question, "none", "None found", text, small)
    clear = all(result.summary.get("clear_structure") is not False for result in found) and (agreed is None or agreed.mean > CLEAR_ARI)
    return Answer(question, "good" if clear else "open", f"{counted_words(k)}, in every run", text, small)


CLEAR_ARI = 0.9


def _run_counts(counts: Mapping[int, int]) -> str:
    """How many clusters were found in how many runs."""
    each = [f"{counted(k, 'cluster')} in {counted(runs, 'run')}" for k, runs in sorted(counts.items())]
    return listed(each)


def _leaks(results: Sequence[Result], first: Attack | None) -> Answer:
    question = "What leaks, and to whom?"
    if first is None:
        return Answer(question, "open", "Not tested", "No run was attacked, so nothing is known of what leaks.")
    figures = {key: [point for point in points if point.validated] for key, points in attack_points(results).items()}
    leaking = {key: [point.setting for point in points if point.leaks] for key, points in figures.items()}
    if not leaking[first]:
        first = max(figures, key=lambda key: (len(leaking[key]), key == first))
    total = len(by_setting(results))
    if not figures[first]:
        return Answer(question, "open", "Not known", why_not_validated(results, first), f"Asked: {attack_words(first)}.")
    calm = [point.setting for point in figures[first] if not point.leaks]
    unknown = total - len(figures[first])
    known = f"Nothing is known of {unknown} of {counted(total, 'setting')}." if unknown else ""
    small = joined([known, "Other attacks may find more."])
    if not leaking[first]:
        return Answer(question, "open", "No leak seen yet", f"By {attack_words(first)}: none in {_which(calm, results)}.", small)
    unseen = f" Not shown in {_which(calm, results)}." if calm else ""
    words = f"By {attack_words(first)}: {_which(leaking[first], results)}.{unseen}"
    return Answer(question, "bad", f"Leaks in {len(leaking[first])} of {total}", words, small)


def why_not_validated(results: Sequence[Result], attack: Attack) -> str:
    """Why a figure is validated for no setting, in a sentence."""
    cells = [cell for result in results for cell in result.audit if attack_of(cell) == attack and not is_validated([cell])]
    known = [cell for cell in cells if cell.get("baseline") is not None and cell.get("reference") is not None]
    if not known:
        return "The attack is validated for no setting: it had too little to score."
    lower = bool(known[0].get("lower_is_better"))
    left = max(float(cell["baseline"]) if lower else 1 - float(cell["baseline"]) for cell in known)
    margin = max(float(cell.get("margin") or 0.0) for cell in known)
    base, open_ = (mean_of(cell[name] for cell in known) for name in ("baseline", "reference"))
    assert base is not None
    assert open_ is not None
    few = min(len(cell.get("seeds") or ()) for cell in known)
    seeds = " An audit with one seed is weak." if few <= 1 else ""
    if not any(cell["status"] == "not_validated" for cell in known):
        return f"The figures are inconclusive: neither a leak nor its absence is shown. More seeds may decide.{seeds}"
    if left <= margin:
        why = ALIKE.get(attack[:2], "Clients hardly differ")
        far = f"errs by {base.mean:.2f} only" if lower else f"already reaches {base.mean:.2f}"
        return f"{why}, so this attack can show nothing: a guess without a view {far} (margin {margin:g})."
    return f"The attack does not clearly work unprotected: {open_.mean:.2f}, without a view {base.mean:.2f}.{seeds}"


def _guaranteed(results: Sequence[Result]) -> Answer:
    question, groups = "What is guaranteed?", by_setting(results)
    spent = {setting: mean.mean for setting, own in groups.items() if (mean := mean_of(values_of(own, "epsilon").values())) is not None}
    if not spent:
        return Answer(question, "none", "No ε", "No setting asks for differential privacy.", "Unaudited research code.")
    low, high = min(spent.values()), max(spent.values())
    several = f"ε = {low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"ε = {low:.3g} to {high:.3g}"
    without = [setting for setting in groups if setting not in spent]
    text = f"By {_which(list(spent), results)}, each run alone." + (f" No ε: {_which(without, results)}." if without else "")
    tone: Tone = "good" if high <= STRONG_EPSILON and not without else "none" if high <= WEAK_EPSILON else "open"
    return Answer(question, tone, several, text, "Unaudited research code.")


# --- in short, and what to do ---------------------------------------------------------------------------------------------------------


def sweep_in_short(results: Sequence[Result], marks: Sequence[Mapping[str, Any]], first: Attack | None) -> str:
    """What a sweep found: its front, what serves best, and of how many settings nothing is known."""
    found = best_served(results)
    served = "" if found is None else f"Highest {SCORES[found.score]}: {_named(found.best, results)}, {found.value}."
    if first is None:
        return joined(["No run was attacked, so nothing is known of what leaks.", served])
    front = _front_places(marks)
    if not front:
        return joined([f"There is no front: no attack is validated for any setting. {why_not_validated(results, first)}", served])
    several = "; ".join(front[:FRONT]) + (f"; {len(front) - FRONT} more" if len(front) > FRONT else "")
    unknown = sum(not mark["validated"] for mark in marks)
    among = "" if not unknown else f" among the {counted(len(marks) - unknown, 'setting')} with a validated figure"
    about = f"What this attack learns in the other {unknown} is not known." if unknown else ""
    return joined([served, f"Best trade-offs with {attack_words(first)}{among}: {several}.", about])


FRONT = 4
"""Points of the front that a sentence names."""


def _front_places(marks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The points of the front by name; settings that lie on one point are named together."""
    places: dict[Any, list[str]] = {}
    for mark in marks:
        if mark["on_front"]:
            places.setdefault(mark["place"], []).append(str(mark["name"]))
    return [f"{listed(names)} (one point)" if len(names) > 1 else names[0] for names in places.values()]


def sweep_steps(place: str, sweep: Sweep, results: Sequence[Result], first: Attack | None, unmade: int) -> list[Step]:
    """The first steps that a sweep in the folder `place` calls for; `unmade` runs have no whole result."""

    def again(*changes: str, to: str = "") -> str:
        keys = "".join(f" --set {shlex.quote(change)}" for change in changes)
        return f"cflpriv sweep {shlex.quote(f'{place}/sweep.toml')}{keys} --out {shlex.quote(f'{place}-{to}' if to else place)}"

    recorded = any(cell.config is not None and cell.config.run.record != "headers" for cell in sweep.cells)
    points = [] if first is None else attack_points(results)[first]
    left = sorted({name for result in results for name in result.left or ()})
    steps = []
    if unmade:
        steps.append(Step(f"Make the {counted(unmade, 'run')} without a result", again()))
    if first is None:
        command = f"cflpriv audit {shlex.quote(place)}" if recorded else again("run.record=full", to="recorded")
        steps.append(Step("Attack the runs: nothing is known of what leaks", command))
    else:
        weak = _weakly_attacked(results, first)
        budget = "standard" if sweep.budget == "quick" else "thorough"
        numbers = [number for number, cell in enumerate(sweep.cells, 1) if cell.setting in weak]
        some = "" if len(numbers) == len(sweep.cells) else "".join(f" --only {number}" for number in numbers)
        more = f"cflpriv audit {shlex.quote(place)}{some} --attacks {shlex.quote(first[0])} --budget {budget}"
        if any(point.validated for point in points) and weak:
            steps.append(
                Step(f"Attack the runs of {_which(weak, results)} with more seeds: too few validate nothing under protection", more)
            )
        elif not any(point.validated for point in points):
            if left:
                words = f"Try the other {counted(len(left), 'attack')} on the recorded runs: one may work on these data"
                steps.append(Step(words, f"cflpriv audit {shlex.quote(place)}"))
            elif weak:
                steps.append(Step("Attack with more seeds: few validate few attacks", more))
            else:
                steps.append(Step("Compare settings by ε and accuracy: no attack of the suite works on these data", ""))
    if useless := useless_of(results):
        steps.append(Step(f"Read the warnings on {_which(useless, results)}: their models learned nothing", ""))
    if (seeds := len({cell.seed for cell in sweep.cells})) < FEWEST_SEEDS:
        command = again(f"sweep.seeds={list(range(FEWEST_SEEDS))}", to=f"{FEWEST_SEEDS}-seeds")
        steps.append(Step(f"Run {FEWEST_SEEDS} seeds or more: {seeds} cannot tell a small difference from chance", command))
    return steps[:MOST_STEPS]


def _weakly_attacked(results: Sequence[Result], attack: Attack) -> list[SweepSetting]:
    """The settings for which a figure is not validated by an audit of fewer seeds than a standard audit has: slow runs get fewer."""
    return [
        setting
        for setting, own in by_setting(results).items()
        for cell in [cell for result in own for cell in result.audit if attack_of(cell) == attack and not is_validated([cell])][:1]
        if len(cell.get("seeds") or ()) < FEWEST_SEEDS
    ]
