"""The first screen of a report: four questions with their answers, one sentence on all of them, and what to do before relying on them.

Each answer follows from summaries, clusterings and audits by the rules here and in `leak_answers`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...advice.verdict import CLUSTERS, CLUSTERS_MIXTURE, FEWEST_CLIENTS, Difference, Moments, differences
from ...advice.words import option_words
from ...algorithms.shared.grouping import p_words
from ...console import counted
from .answer import Answer, Tone, counted_words, joined, listed, lower, percent
from .leak_answers import OPEN, audit_answer, leak_sentence, leaks_in
from .results import client_scores, counts_of
from .run_files import RunFiles
from .run_names import Kind, epsilon_words, kind_of, protection_words

__all__ = ["answers", "clusters_placed", "cost_words", "doubted", "guarantee_of", "in_short", "open_twin", "served_of", "subject_of"]

STRONG_EPSILON, WEAK_EPSILON = 1.0, 3.0
"""Up to the first, a guess at even odds about a member becomes right in 73.2 % at most; up to the second in 95.3 %."""


def subject_of(runs: Sequence[RunFiles]) -> RunFiles:
    """The run that the first screen is about: of the clustered ones, or else of those that train together, a protected one, the best."""
    for kind in ("clusters", "no groups", "alone"):
        if several := [run for run in runs if kind_of(run.summary) == kind]:
            protected = [run for run in several if _is_protected(run)]
            return max(protected or several, key=_goodness)
    raise AssertionError("a report has at least one run")


def _is_protected(run: RunFiles) -> bool:
    return run.summary["protection"] != "none" or run.summary.get("epsilon") is not None


def answers(runs: Sequence[RunFiles]) -> list[Answer]:
    """The four answers, in the order of the questions."""
    subject = subject_of(runs)
    return [served_of(subject, runs), groups_of(subject), leaks_of(subject, runs), guarantee_of(subject)]


CHANGED = "Files were changed, so figures may be false."
"""What stands beside figures of a run that does not verify."""


def doubted(four: Sequence[Answer], runs: Sequence[RunFiles]) -> list[Answer]:
    """The answers as a page shows them: with the doubt in words, and open unless they are bad, where they rest on changed files.

    The first answer compares all runs; the others are about the subject.
    """
    changed = bool(subject_of(runs).problems)
    doubtful = [changed or any(run.problems for run in runs), changed, changed, changed]
    return [_beside_doubt(answer) if doubt else answer for answer, doubt in zip(four, doubtful, strict=True)]


def _beside_doubt(answer: Answer) -> Answer:
    small = joined([CHANGED, answer.small])
    return replace(answer, small=small) if answer.tone == "bad" else replace(answer, tone="open", small=small, symbol="")


def _goodness(run: RunFiles) -> float:
    served, error = run.summary["accuracy_mean"], run.summary.get("error_mean")
    return -float(error) if error is not None else -math.inf if served is None else float(served)


# --- are clients served better? -------------------------------------------------------------------------------------------------------


def served_of(subject: RunFiles, runs: Sequence[RunFiles]) -> Answer:
    """Whether the subject's clients are served better than by one model for all and by each client alone, with the same seed."""
    question = "Are clients served better?"
    if (nothing := _learned_nothing(subject)) is not None:
        return Answer(question, "bad", "Learned nothing", nothing, _majority(subject).partition(". ")[2], "✗")
    others = _others(subject, runs)
    text, small = _figures(subject, others), [_price(subject, runs), _majority(subject)]
    if _goodness(subject) == -math.inf:
        return Answer(question, "open", "Not measured", "No round was evaluated.")
    how = {"clusters": "by clusters", "no groups": "by training together", "alone": "each alone"}[kind_of(subject.summary)]
    if (advice := subject.summary.get("advice")) and advice.get("decided"):
        helps = advice["advice"] in (CLUSTERS, CLUSTERS_MIXTURE)
        tone: Tone = "good" if helps else "none"
        return Answer(
            question,
            tone,
            f"Yes, {how}" if helps else f"Use {option_words(advice['advice'])}",
            text,
            joined(["By held-out samples.", *small]),
        )
    if not others:
        return Answer(question, "open", "Not compared", text, joined(["No other way of training was run.", *small]))
    compared = _compared(subject, others)
    if isinstance(compared, str):
        return Answer(question, "open", "Cannot tell", text, joined([compared, *small]))
    if all(difference.low > 0 for difference in compared):
        if left := [_words(kind) for kind in _less_together(subject) if kind not in others]:
            verdict = f"Better than {listed([_words(kind) for kind in others])}"
            return Answer(question, "open", verdict, text, joined([f"Not compared with {listed(left)}.", *small]))
        return Answer(question, "good", f"Yes, {how}", text, joined(small))
    if worse := next((difference for difference in compared if difference.high < 0), None):
        verdict = "No, worse than alone" if worse.other == "alone" else "No, one model is better"
        return Answer(question, "bad", verdict, text, joined([_interval(worse), *small]), "✗")
    unclear = min(compared, key=lambda difference: difference.mean)
    return Answer(question, "open", "Not clearly", text, joined([_interval(unclear), *small]))


def _learned_nothing(run: RunFiles) -> str | None:
    """That a run's models tell no classes apart, as sentences; None where they do, or where nobody knows."""
    counts = counts_of(run)
    if counts is None or int(counts.occurring.sum()) < 2:
        return None
    k = int(counts.occurring.sum())
    if counts.constant is not None:
        names = (run.measured or {}).get("class_names") or []
        name = names[counts.constant] if counts.constant < len(names) else f"class {counts.constant}"
        share = counts.constant_accuracy(counts.constant)
        return f"It predicts {name} for everybody: {percent(share)} is only the share of that class. Balanced accuracy {percent(1 / k)}."
    if counts.shown_useless:
        return (
            f"{percent(float(run.summary['accuracy_mean']))} of answers are right, hardly more than by always naming the commonest class. "
            f"Balanced accuracy {percent(counts.balanced_accuracy)}, by chance {percent(1 / k)}."
        )
    return None


def _others(subject: RunFiles, runs: Sequence[RunFiles]) -> dict[str, RunFiles]:
    """The best run of each other kind that trains less together, on the same data with the same seeds, without more noise."""
    same = [run for run in runs if run is not subject and _same_data(run, subject) and _noise(run) <= _noise(subject)]
    found = {kind: [run for run in same if kind_of(run.summary) == kind and _goodness(run) > -math.inf] for kind in _less_together(subject)}
    return {kind: max(several, key=_goodness) for kind, several in found.items() if several}


def _less_together(subject: RunFiles) -> tuple[Kind, ...]:
    """The kinds of training that a run is to be compared with."""
    kinds: dict[Kind, tuple[Kind, ...]] = {"clusters": ("no groups", "alone"), "no groups": ("alone",), "alone": ()}
    return kinds[kind_of(subject.summary)]


def _words(kind: str) -> str:
    return "each client alone" if kind == "alone" else "one model for all"


def _noise(run: RunFiles) -> float:
    """What grows with the noise of a guarantee: the inverse of its ε, 0 without noise."""
    epsilon = run.summary.get("epsilon")
    return 0.0 if epsilon is None else 1 / max(float(epsilon), 1e-9)


def _same_data(one: RunFiles, other: RunFiles) -> bool:
    seeds = [run.config.get("run", {}).get("seed") for run in (one, other)]
    return seeds[0] == seeds[1] and one.config.get("data") == other.config.get("data")


def _figures(subject: RunFiles, others: Mapping[str, RunFiles]) -> str:
    s, words = subject.summary, {"no groups": "with one model for all", "alone": "alone"}
    if s.get("error_mean") is not None:
        beside = "".join(f", {run.summary['error_mean']:.3g} {words[kind]}" for kind, run in others.items())
        r2 = "" if s.get("r2") is None else f" R² is {s['r2']:.2f}."
        constant = "" if s.get("constant_error") is None else f" Always the mean label: {s['constant_error']:.3g}."
        return f"The mean error is {s['error_mean']:.3g}{beside}.{r2}{constant}"
    if s["accuracy_mean"] is None:
        return "No accuracy was measured."
    beside = "".join(f", {percent(run.summary['accuracy_mean'])} {words[kind]}" for kind, run in others.items())
    alone = others.get("alone")
    other = "" if alone is None or alone.summary["accuracy_worst"] is None else f" (alone {percent(alone.summary['accuracy_worst'])})"
    worst = "" if s["accuracy_worst"] is None else f" The worst-served client has {percent(s['accuracy_worst'])}{other}."
    return f"{percent(s['accuracy_mean'])} of answers are right{beside}.{worst}"


def _majority(run: RunFiles) -> str:
    """The scores beside the same scores of a model that always names the commonest class."""
    s = run.summary
    if s.get("balanced_accuracy") is None or s.get("majority_accuracy") is None:
        return ""
    balanced = s.get("majority_balanced_accuracy")
    constant = "" if balanced is None else f", balanced {percent(balanced)}"
    return f"Balanced accuracy {percent(s['balanced_accuracy'])}. Always the commonest class: {percent(s['majority_accuracy'])}{constant}."


def _price(subject: RunFiles, runs: Sequence[RunFiles]) -> str:
    """What protection costs in accuracy: the subject beside the same algorithm without any, if that ran."""
    twin = open_twin(subject, runs)
    if twin is None or subject.summary["accuracy_mean"] is None or twin.summary["accuracy_mean"] is None:
        return ""
    lost = 100 * (twin.summary["accuracy_mean"] - subject.summary["accuracy_mean"])
    return (
        "Protection costs no accuracy here."
        if abs(lost) < 0.05
        else f"Protection {'costs' if lost > 0 else 'adds'} {abs(lost):.1f} points."
    )


def open_twin(subject: RunFiles, runs: Sequence[RunFiles]) -> RunFiles | None:
    """The same algorithm's run without protection, on the same data with the same seed."""
    if not _is_protected(subject):
        return None
    algorithm = subject.summary["algorithm"]
    same = (run for run in runs if run.summary["algorithm"] == algorithm and not _is_protected(run) and _same_data(run, subject))
    return next(same, None)


def _compared(subject: RunFiles, others: Mapping[str, RunFiles]) -> list[Difference] | str:
    """The differences to other ways of training with simultaneous 95 % intervals over clients, or why there are none."""
    if subject.summary.get("error_mean") is not None:
        return "Nothing tests yet whether such differences of errors are more than chance."
    names = ["this", *others]
    scores = [client_scores(run) for run in (subject, *others.values())]
    shared = sorted(set.intersection(*(set(score) for score in scores)))
    if len(shared) < FEWEST_CLIENTS:
        return f"Scored in all runs: {counted(len(shared), 'client')}; fewer than {FEWEST_CLIENTS} tell nothing."
    values = np.array([[score[client] for client in shared] for score in scores])
    moments = Moments(tuple(names), values.mean(1), np.cov(values), len(shared), len(shared))
    return differences(moments, [("this", kind) for kind in others], np.random.default_rng(0))


def _interval(difference: Difference) -> str:
    words = _words(difference.other)
    mean, low, high = (100 * value for value in (difference.mean, difference.low, difference.high))
    return f"Difference to {words}: {mean:+.1f} points ({low:+.1f} to {high:+.1f}, 95 % over clients)."


# --- are there groups? ----------------------------------------------------------------------------------------------------------------


def groups_of(run: RunFiles) -> Answer:
    """Whether a run found groups of clients, how clearly, and whether they are the true ones."""
    question, measured = "Are there groups?", run.measured or {}
    labels = measured.get("labels")
    if kind_of(run.summary) != "clusters" or not labels:
        return Answer(question, "none", "Not sought", "This way of training forms no groups of clients.")
    k = len(set(labels.values()))
    verdict, text = counted_words(k), f"{_sizes(run)} {clusters_placed(run)}".strip()
    knowledge, answer, p = str(run.summary.get("knowledge", "none")), measured.get("answer"), measured.get("p")
    if not knowledge.startswith("none"):
        return Answer(question, "none", f"{verdict}, as given", text, f"Known before the run: {knowledge}.")
    if answer is not None:
        tested = p_words(measured) or "the test released no p-value"
        if answer == "groups":
            return Answer(
                question,
                "good",
                f"{verdict}, {'clearly' if p is None else f'p = {p:.2g}'}",
                text,
                f"Tested against clients without groups: {tested}.",
            )
        return Answer(
            question,
            "none",
            "None found",
            f"The test's answer: {answer}. One model is trained for all." if k == 1 else text,
            f"Tested: {tested}.",
        )
    rule = str(measured.get("rule") or "the algorithm's own rule")
    scores = (measured.get("evidence") or {}).get("silhouettes") or {}
    beside = _silhouettes(scores, k)
    small = f"No p-value (crossfit gives one). Rule: {rule}{beside}."
    if measured.get("clear") is None:
        return Answer(question, "open", f"{verdict}, untested", text, small)
    return Answer(
        question, "good" if measured["clear"] else "open", f"{verdict}, {'clearly' if measured['clear'] else 'not clearly'}", text, small
    )


def _silhouettes(scores: Mapping[str, float], k: int) -> str:
    own, rest = scores.get(str(k)), [value for size, value in scores.items() if int(size) != k]
    return "" if own is None else f", silhouette {own:.2f}" + (f", next best {max(rest):.2f}" if rest else "")


def _sizes(run: RunFiles) -> str:
    """How many clients each cluster has, by the names of their true groups where the clusters are these."""
    measured = run.measured or {}
    labels, truth = measured["labels"], measured.get("truth") or {}
    pairs = {(label, truth.get(client)) for client, label in labels.items()}
    values = list(labels.values())
    groups = {int(group): values.count(label) for label, group in pairs if group is not None}
    names = {number: name for number, name in run.group_names.items() if number in groups and name != f"group {number}"}
    if 1 < len(names) <= 4 and len(pairs) == len(names) == len(set(values)):
        members = [f"{counted(groups[number], 'client')} {name}" for number, name in names.items()]
        return f"{listed(members)}."
    sizes = sorted((values.count(label) for label in set(values)), reverse=True)
    few = ", ".join(map(str, sizes[:8]))
    return f"Clusters of {few}{', …' if len(sizes) > 8 else ''} clients." if len(sizes) > 1 else f"One cluster of all {few} clients."


def clusters_placed(run: RunFiles) -> str:
    """How many clients are in the cluster of their true group, under the best one-to-one match; "" where groups are unknown or one."""
    from scipy.optimize import linear_sum_assignment

    measured = run.measured or {}
    truth, labels = measured.get("truth") or {}, measured.get("labels") or {}
    known = [client for client in labels if client in truth]
    clusters, groups = sorted({labels[client] for client in known}), sorted({truth[client] for client in known})
    if len(groups) < 2:
        return ""
    counts = np.zeros((len(clusters), len(groups)))
    for client in known:
        counts[clusters.index(labels[client]), groups.index(truth[client])] += 1
    right = int(counts[linear_sum_assignment(-counts)].sum())
    return f"{'All' if right == len(known) else f'{right} of'} {len(known)} are placed as they truly are."


# --- what leaks, and to whom? ---------------------------------------------------------------------------------------------------------


def leaks_of(subject: RunFiles, runs: Sequence[RunFiles]) -> Answer:
    """What attacks on the subject found, beside the same run without protection."""
    if kind_of(subject.summary) == "alone" and not leaks_in(subject.audited):
        return Answer("What leaks, and to whom?", "none", "Nothing is sent", "Each client trains alone, so no message can leak.")
    answer = audit_answer(subject.audited)
    twin = open_twin(subject, runs)
    if twin is None or not twin.audited.cells:
        return answer
    unprotected = audit_answer(twin.audited)
    bare = unprotected.text.partition(f" {OPEN}")[0]
    return Answer(
        answer.question,
        answer.tone,
        answer.verdict,
        f"Unprotected: {lower(bare)} Protected: {lower(answer.text)}",
        answer.small,
    )


# --- what is guaranteed? --------------------------------------------------------------------------------------------------------------


def guarantee_of(run: RunFiles) -> Answer:
    """The guarantee of differential privacy, or that there is none and what protects instead."""
    question, s = "What is guaranteed?", run.summary
    unaudited = "Unaudited research code."
    if s.get("epsilon") is None:
        words = protection_words(run.summary, run.config)
        if words == "nothing is sent":
            return Answer(question, "none", "Nothing is sent", "Each client trains alone, so no message tells anything.", unaudited)
        instead = "Nothing else protects it either." if words == "none" else f"What protects is: {words}. {_condition(run)}"
        return Answer(question, "none", "No ε", f"No differential privacy was asked for. {instead}", unaudited)
    epsilon, unit = float(s["epsilon"]), str(s.get("privacy_unit") or "unit")
    which = (
        f"whether one {unit} took part" if s.get("privacy_relation", "add_remove") == "add_remove" else f"which of two {unit}s took part"
    )
    right = math.ceil(1e4 / (1 + math.exp(-epsilon))) / 1e2
    most = f"in {right:g} % at most" if right < 100 else "with no useful bound"
    beside = "" if s.get("delta") is None else f" (beside δ = {s['delta']:.2g})"
    text = joined([f"Guessing {which}, at even odds before, becomes right {most}{beside}.", _if_colluding(s.get("epsilon_if_colluding"))])
    if epsilon <= STRONG_EPSILON:
        return Answer(question, "good", epsilon_words(s), text, unaudited)
    words = "moderate" if epsilon <= WEAK_EPSILON else "a weak bound"
    return Answer(question, "none" if epsilon <= WEAK_EPSILON else "open", f"{epsilon_words(s)}, {words}", text, unaudited)


def _if_colluding(epsilons: Any) -> str:
    """What is left of a guarantee whose noise clients share, once the least share of them that was reckoned with tells it to the server."""
    if not isinstance(epsilons, Mapping) or not epsilons:
        return ""
    share, epsilon = next(iter(epsilons.items()))
    left = "nothing is guaranteed" if epsilon is None else f"ε = {epsilon:.3g}"
    return f"Clients share the noise: if {str(share).replace('%', ' %')} of a sum tell the server theirs, {left}."


def _condition(run: RunFiles) -> str:
    gram = run.config.get("protection", {}).get("gram") or []
    known = {"haar", "hadamard", "permutation", "signed_permutation"} & set(gram if isinstance(gram, list) else [gram])
    return "Every client knows the secret of the comparison." if known else ""


def cost_words(subject: RunFiles, runs: Sequence[RunFiles]) -> str:
    """What a client of the subject sends and receives, and what protection adds to that and to the time, if the same run was made open."""
    s, twin = subject.summary, open_twin(subject, runs)

    def each(summary: Mapping[str, Any], key: str) -> str:
        return f"{summary[key] / 1e3 / max(1, summary['clients']):,.0f} kB"

    if twin is None:
        return f"A client sends {each(s, 'upload_bytes')} and receives {each(s, 'download_bytes')}; the run took {s['seconds']:.1f} s."
    o = twin.summary
    return (
        f"With protection a client sends {each(s, 'upload_bytes')} (open {each(o, 'upload_bytes')}) and receives "
        f"{each(s, 'download_bytes')} (open {each(o, 'download_bytes')}); the run took {s['seconds']:.1f} s (open {o['seconds']:.1f} s)."
    )


# --- in short -------------------------------------------------------------------------------------------------------------------------


def in_short(runs: Sequence[RunFiles], four: Sequence[Answer]) -> str:
    """The answers in at most three sentences, after the doubt where files were changed."""
    served, _, leaks, guarantee = four
    k = len(set(((subject_of(runs).measured or {}).get("labels") or {}).values()))
    kind = kind_of(subject_of(runs).summary)
    together = f"in {counted_words(k).lower()} clusters" if k > 1 else "with one model for all"
    if served.verdict == "Learned nothing":
        first = "Nothing was learned: the models tell no classes apart."
    elif kind == "alone":
        first = "Each client trains alone."
    elif served.tone == "good":
        first = f"Train these clients {together}."
    elif served.tone == "bad":
        first = f"Do not train these clients {together}: another way serves them better."
    elif served.verdict == "Not compared":
        first = f"These clients were trained {together}; nothing shows yet that this serves them better."
    else:
        first = f"It is not shown that training {together} serves these clients better."
    doubt = CHANGED if any(run.problems for run in runs) else ""
    return joined([doubt, first, leak_sentence(leaks, subject_of(runs).audited), _guarantee_sentence(guarantee)])


def _guarantee_sentence(guarantee: Answer) -> str:
    return (
        f"Guaranteed: {guarantee.verdict.partition(',')[0]}."
        if guarantee.verdict.startswith("ε")
        else "No guarantee."
        if guarantee.verdict == "No ε"
        else ""
    )
