"""From run folders to one page: report.html, self-contained, and results.csv.

`run_files` reads and checks the folders, `recovered` and `audit_report` prepare what audits found, `pictures` draws. The functions here
turn runs into what the template report.html prints; its text and the order of its sections are in that file. audit.html has what pages on
runs and on other systems share.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...advice.words import advice_lines, mixture_line, without_advice
from ...console import counted, named
from ...contract.protection import ROBUST, listed
from ...errors import InputError
from ...files import write_atomically
from ...placements import NAME, placement_text
from ...types import Array
from ..sweep.choose import FILE as CHOICE
from ..sweep.choose import read_chosen
from ..sweep.sweep import Sweep, sweep_of
from . import pictures, tested_pictures
from .answers import answers, cost_words, doubted, in_short, subject_of
from .audit_report import leakage
from .audit_words import ACTIVE_STATUS
from .before import advising, auditing, before_relying, place_in, place_of, repeating
from .foreign_report import FOREIGN, write_foreign_report
from .page import templates
from .privacy_report import privacy_section
from .recovered import histograms, recovered_images, roc_curves
from .results import by_class, method_rows, numbers_of, score_pictures
from .run_files import RECOMPUTED, RunFiles, read_runs
from .run_names import kind_of, title
from .sweep_report import section, write_pictures
from .tables import write_table, write_tables
from .tested import RunTests, released_words, tested_of

__all__ = ["write_report"]

DETAILED = 8
"""The number of runs with pictures of their clustering and of recovered data. Other runs are only named, to keep the page small."""
SHOWN_CLUSTERS, SHOWN_GROUPS = 30, 8
KINDS = ("clusters", "no groups", "alone")


def write_report(folder: Path) -> Path:
    """Write report.html and results.csv into `folder`, a run folder or a folder of run folders; the page's path.

    A folder of another system's updates that was audited gets report.html alone.

    Raises `InputError` naming the file, for a folder that is neither and for a file that is damaged.
    """
    folder = Path(folder)
    if (folder / FOREIGN).is_file():
        return write_foreign_report(folder)
    sweep = sweep_of(folder)
    runs, unfinished = read_runs(folder)
    everything = runs
    if sweep is not None:  # one seed stands for the others below the sweep's own tables
        first_seed = {cell.name for cell in sweep.cells if cell.seed == sweep.cells[0].seed}
        runs = [run for run in runs if run.name in first_seed] or runs
    subject = subject_of(runs)
    runs = sorted(runs, key=lambda run: (run is not subject, KINDS.index(kind_of(run.summary)), run.name))
    four = answers(runs)
    shown = {
        "title": title(runs), "runs": runs, "total": len(everything), "place": place_of(folder), "subject": subject,
        "answers": doubted(four, runs), "in_short": in_short(runs, four),
        "steps": before_relying(folder, runs, four), "again": _again(folder, subject, everything),
        "auditing": auditing, "where": partial(place_in, folder), "meta": _meta(everything, subject),
        "unfinished": unfinished, "unverified": _unverified(everything), "unchecked": _unchecked(everything),
        "unpoliced": [run.label for run in everything if run.summary.get("release_policy") == "off"],
        **_detailed(runs, subject),
    }  # fmt: skip
    try:
        page = _sweep_page(folder, sweep, shown) if sweep is not None else templates().get_template("report.html").render(shown)
        write_table(folder / "results.csv", _scalars(everything))
        write_atomically(folder / "report.html", page)
    except OSError as error:
        raise InputError(f"{folder}: the report cannot be written ({error.strerror})") from None
    return folder / "report.html"


def _again(folder: Path, subject: RunFiles, runs: Sequence[RunFiles]) -> list[str]:
    """What makes the subject, its audit and the report again, a line each."""
    place = place_of(folder)
    return repeating(subject, f"{place}/{subject.name}" if len(runs) > 1 else place, place)


def _meta(runs: Sequence[RunFiles], subject: RunFiles) -> str:
    """What the answers rest on, and which of several runs they are about, in a line below the title."""
    seeds = {run.config.get("run", {}).get("seed", 0) for run in runs}
    rounds = sorted({int(run.summary["rounds"]) for run in runs})
    parts = [
        f"{counted(len(runs), 'run')}{' compared' if len(runs) > 1 else ''}",
        counted(rounds[0], "round") if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds",
        counted(len(seeds), "seed"),
        "files unchanged ✓" if not any(run.problems for run in runs) else "files changed ▲",
        *([f"answers on {subject.name}"] if len(runs) > 1 else []),
    ]
    return " · ".join(parts)


def _unverified(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """The label and the problems of each run whose files do not verify."""
    return [(run.label, [problem.removeprefix(f"{run.folder}/") for problem in run.problems]) for run in runs if run.problems]


def _unchecked(runs: Sequence[RunFiles]) -> list[tuple[str, str]]:
    """What `verify` could not check of each run that it could not check whole, after the run's label."""
    return [(run.label, run.unchecked) for run in runs if run.unchecked]


def _detailed(runs: Sequence[RunFiles], subject: RunFiles) -> dict[str, Any]:
    """What the sections below the first screen print: pictures of the first `DETAILED` runs, tables of all."""
    detailed = list(runs[:DETAILED])
    audited = [run.audited for run in runs if run.audited.cells]
    return {
        "costs_words": cost_words(subject, runs),
        "undetailed": runs[DETAILED:],
        "methods": method_rows(runs),
        "leakage": leakage(audited),
        "missing": [run for run in runs if run.audited.cells is None and kind_of(run.summary) != "alone"],
        "verdicts": [run for run in runs if run.audited.verdicts],
        "actives": [run for run in runs if run.active],
        "active_words": ACTIVE_STATUS,
        "recovered": [shown for run in detailed for shown in recovered_images(run.audited)],
        "histograms": [shown for run in detailed for shown in histograms(run.audited)],
        "rocs": [shown for run in detailed for shown in roc_curves(run.audited)],
        "clusterings": [shown for run in detailed if (shown := _clustering(run)) is not None],
        "scores": score_pictures(runs),
        "privacy": privacy_section([(run.label, run.folder, run.summary, run.rounds) for run in detailed]),
        "reveals": _reveals(runs),
        "notes": _notes(runs),
        "lost": _lost(runs),
        "by_class": [shown for run in detailed if (shown := by_class(run)) is not None],
        "numbers": [shown for run in runs if (shown := numbers_of(run)) is not None],
        "recomputed": RECOMPUTED,
        "truth_known": any(run.summary["true_groups"] is not None for run in runs),
        "advice": [(run.label, lines) for run in runs if (lines := _advice(run))],
        "placements": [(run.label, lines) for run in runs if (lines := _placements(run))],
    }


def _sweep_page(folder: Path, sweep: Sweep, shown: Mapping[str, Any]) -> str:
    """The page of a sweep; its tables and pictures are written beside it."""
    write_tables(folder, sweep)
    if sweep.choose is not None:
        made = read_chosen(folder / CHOICE)
        own: dict[str, Any] = {"chosen": made and made[0]}
    else:
        own = section(folder, sweep)
        write_pictures(folder, own)
    text: str = templates().get_template("choice.html" if sweep.choose is not None else "sweep.html").render({**shown, **own})
    return text


def _lost(runs: Sequence[RunFiles]) -> dict[str, float]:
    """By label, for runs under a protection with an otherwise equal unprotected run: the accuracy less the accuracy of that run.

    A run that ended early is compared with none of another length.
    """

    def rest(run: RunFiles) -> Any:
        return {name: section for name, section in run.config.items() if name not in ("protection", "run")} | {
            "seed": run.config.get("run", {}).get("seed"), "rounds run": run.summary["rounds"],
        }  # fmt: skip

    plain = [run for run in runs if run.summary["protection"] == "none" and run.summary["accuracy_mean"] is not None]
    lost = {}
    for run in runs:
        twin = next((candidate for candidate in plain if rest(candidate) == rest(run)), None)
        if twin is not None and twin is not run and run.summary["accuracy_mean"] is not None:
            lost[run.label] = run.summary["accuracy_mean"] - twin.summary["accuracy_mean"]
    return lost


# --- what the template prints ---------------------------------------------------------------------------------------------------------


def _scalars(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """A row per run: its name and every scalar of its summary."""
    plain = (str, int, float, type(None))
    return [
        {
            "run": run.name,
            **{key: value for key, value in run.summary.items() if isinstance(value, plain)},
            "warnings": "; ".join(map(str, run.summary.get("warnings", ()))),
        }
        for run in runs
    ]


def _advice(run: RunFiles) -> list[str]:
    """What to deploy, in sentences; for a run that found clusters and was not advised, that nothing shows yet that they help."""
    advice, mixture = run.summary.get("advice"), run.summary.get("mixture")
    try:
        lines = [without_advice(run.summary, advising(run, run.name))] if advice is None else advice_lines(advice)
        return list(filter(None, [*lines, "" if mixture is None else mixture_line(mixture)]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{run.folder / 'summary.json'}: is damaged ('advice': {error})") from None


def _placements(run: RunFiles) -> list[str]:
    """Who was moved, who belongs to no cluster and which clusters were opened, a line for each event; nothing if nothing happened."""
    try:
        lines = [f"Round {event['round'] + 1}: {placement_text(event)}." for event in run.summary.get("placements", ())]
        newcomers = placement_text((run.summary.get("newcomers") or {}).get(NAME, {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{run.folder / 'summary.json'}: is damaged ('placements': {error})") from None
    return [*lines, *([f"Newcomers: {newcomers}."] if newcomers else [])]


def _clustering(run: RunFiles) -> dict[str, Any] | None:
    """Pictures of the clustering, and the table of clusters against true groups; None for a run that found no clusters.

    A clustering made by a test has three: distances, the spectrum with the edge of noise, and the tree with its tests.
    """
    measured, evidence, tested = run.measured, run.evidence, tested_of(run)
    if measured is None or not measured.get("labels"):
        return None
    scalars = measured.get("evidence") or {}
    labels = np.array([measured["labels"][client] for client in measured["labels"]])
    truth = measured["truth"]
    groups = np.array([truth[client] for client in measured["labels"]]) if truth else None
    curves = [{int(k): float(value) for k, value in (scalars.get(name) or {}).items()} for name in ("silhouettes", "gap_ratios")]
    k = len(np.unique(evidence.labels if evidence else labels))
    if tested and evidence:  # unbiased distances are no angles, whatever else the algorithm measures
        evidence = replace(evidence, degrees=False)
    dendrogram = pictures.dendrogram if tested is None else partial(tested_pictures.tree, tested=tested)
    return {
        "run": run,
        "rule": measured.get("rule"),
        "answer": measured.get("answer"),
        "is_clear": measured.get("clear"),
        "p": measured.get("p"),
        "note": scalars.get("note"),
        "gap_ratio": scalars.get("gap_ratio"),
        "recomputed": measured.get("evidence_source") == "recomputed",
        "heatmap": pictures.heatmap(evidence) if evidence and evidence.distance is not None else None,
        "dendrogram": dendrogram(evidence) if evidence and evidence.tree is not None else None,
        "curves": pictures.by_clusters(curves[0], curves[1], k) if any(curves) else None,
        "tested": None if tested is None else _tested(run, tested, k),
        "released": released_words(run),
        "n": len(labels),
        "k": k,
        "true": None if groups is None else len(np.unique(groups)),
        "table": _contingency(labels, groups, run.group_names, _members(measured)),
    }


def _tested(run: RunFiles, tested: RunTests, k: int) -> dict[str, Any]:
    """What the page prints of a test's spectrum, tree and tests."""
    evidence = run.evidence
    return {
        "caption": tested.caption(k),
        "spectrum": tested_pictures.spectrum(tested, evidence.mark if evidence else ""),
        "spectrum_words": tested.spectrum_words(),
        "tree_words": tested.tree_words(evidence) if evidence and evidence.tree is not None else None,
        "rows": tested.rows(),
        "left_out": len(tested.tests) - len(tested.rows()),
        "stars": evidence is not None and tested.beside_tree(evidence),
    }


def _members(measured: Mapping[str, Any]) -> dict[int, str]:
    """The clients of each cluster by name; empty where clients have none."""
    names, clusters = measured.get("client_names") or [], dict[int, list[int]]()
    for client, label in (measured.get("labels") or {}).items() if names else ():
        clusters.setdefault(int(label), []).append(int(client))
    return {label: named(sorted(members), names) for label, members in clusters.items()}


def _contingency(labels: Array, groups: Array | None, names: Mapping[int, str], members: Mapping[int, str]) -> dict[str, Any]:
    """The clients of each cluster by true group, the largest SHOWN_CLUSTERS; without known groups the sizes of the clusters alone."""
    clusters = _largest(labels)
    rows = []
    for label in clusters:
        inside = [] if groups is None else groups[labels == label].tolist()
        counts = sorted(Counter(inside).items(), key=lambda entry: (-entry[1], entry[0]))
        words = ", ".join(f"{count} {names.get(int(group), f'group {group}')}" for group, count in counts[:SHOWN_GROUPS])
        more = f", and {counted(len(counts) - SHOWN_GROUPS, 'group')} more" if len(counts) > SHOWN_GROUPS else ""
        rows.append(
            {"label": int(label), "size": int((labels == label).sum()), "groups": words + more, "members": members.get(int(label), "")}
        )
    return {"rows": rows, "left_out": len(np.unique(labels)) - len(clusters)}


def _largest(values: Array) -> Array:
    names, sizes = np.unique(values, return_counts=True)
    return np.asarray(names[np.sort(np.argsort(-sizes, kind="stable")[:SHOWN_CLUSTERS])])


def _reveals(runs: Sequence[RunFiles]) -> list[dict[str, str]]:
    """Each key and setting of [protection] that occurs, its line in `cflpriv list`, and in which runs. The template explains them at
    length."""
    known = {"gram": listed("gram"), "sum": listed("sum"), "robust": ROBUST}
    rows: dict[tuple[str, str], list[str]] = {}
    for key in known:
        for run in runs:
            value = run.config.get("protection", {}).get(key) or "none"
            for setting in value if isinstance(value, list) else [str(value)]:
                rows.setdefault((key, setting), []).append(run.label)
    return [
        {"key": key, "setting": setting, "line": known[key].get(setting, ""), "runs": _names(labels, runs)}
        for (key, setting), labels in rows.items()
    ]


def _notes(runs: Sequence[RunFiles]) -> dict[str, str]:
    """Each note on the data, and the runs it is about."""
    notes: dict[str, list[str]] = {}
    for run in runs:
        for note in run.summary["notes"]:
            notes.setdefault(str(note), []).append(run.label)
    return {note: _names(labels, runs) for note, labels in notes.items()}


def _names(labels: Sequence[str], runs: Sequence[RunFiles]) -> str:
    return ", ".join(labels) if len(labels) < len(runs) or len(runs) == 1 else "all runs"
