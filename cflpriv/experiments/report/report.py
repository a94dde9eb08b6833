"""From run folders to one page: report.html, self-contained, and results.csv.

`run_files` reads and checks the folders, `recovered` and `audit_report` prepare what audits found, `pictures` draws. The functions here
turn runs into what the template report.html prints; its text and the order of its sections are in that file. audit.html has what pages on
runs and on other systems share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from ...advice.words import advice_lines, mixture_line, without_advice
from ...class_counts import as_counts
from ...contract.protection import ROBUST, listed
from ...errors import InputError
from ...files import write_atomically
from ...placements import NAME, placement_text
from ...streams import readable
from ...types import Array
from ..sweep.choose import FILE as CHOICE
from ..sweep.choose import read_chosen
from ..sweep.sweep import Sweep, sweep_of
from . import pictures, tested_pictures
from .audit_report import leakage
from .audit_words import ACTIVE_STATUS
from .foreign_report import FOREIGN, write_foreign_report
from .front import section, write_pictures
from .page import templates
from .privacy_report import privacy_section
from .recovered import histograms, recovered_images, roc_curves
from .run_files import RECOMPUTED, RunFiles, read_runs, require
from .tables import write_table, write_tables
from .tested import RunTests, released_words, tested_of

__all__ = ["write_report"]

DETAILED = 8
"""The number of runs with pictures of their clustering and of recovered data. Other runs are only named, to keep the page small."""
SHOWN_CLUSTERS = 30
SHOWN_CLASSES = 30


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
    environment = templates()
    detailed = runs[:DETAILED]
    page = environment.get_template("report.html").render(
        title=readable(folder.resolve().name),
        sweep=None if sweep is None else Markup(_sweep_section(environment, folder, sweep)),
        runs=runs,
        total=len(everything),
        unfinished=unfinished,
        unverified=[
            (run.label, [problem.removeprefix(f"{run.folder}/") for problem in run.problems]) for run in everything if run.problems
        ],
        unpoliced=[run.label for run in everything if run.summary.get("release_policy") == "off"],
        undetailed=runs[DETAILED:],
        leakage=leakage([run.audited for run in runs if run.audited.cells]),
        missing=[run for run in runs if run.audited.cells is None],
        verdicts=[run for run in runs if run.audited.verdicts],
        actives=[run for run in runs if run.active],
        active_words=ACTIVE_STATUS,
        recovered=[shown for run in detailed for shown in recovered_images(run.audited)],
        histograms=[shown for run in detailed for shown in histograms(run.audited)],
        rocs=[shown for run in detailed for shown in roc_curves(run.audited)],
        clusterings=[shown for run in detailed if (shown := _clustering(run)) is not None],
        accuracy=_accuracy(runs),
        privacy=privacy_section([(run.label, run.folder, run.summary, run.rounds) for run in detailed]),
        reveals=_reveals(runs),
        notes=_notes(runs),
        lost=_lost(runs),
        by_class=[shown for run in detailed if (shown := _by_class(run)) is not None],
        numbers=[shown for run in runs if (shown := _numbers(run)) is not None],
        recomputed=RECOMPUTED,
        truth_known=any(run.summary["true_groups"] is not None for run in runs),
        advice=[(run.label, lines) for run in runs if (lines := _advice(run))],
        placements=[(run.label, lines) for run in runs if (lines := _placements(run))],
    )
    try:
        write_table(folder / "results.csv", _scalars(everything))
        write_atomically(folder / "report.html", page)
    except OSError as error:
        raise InputError(f"{folder}: the report cannot be written ({error.strerror})") from None
    return folder / "report.html"


def _sweep_section(environment: Any, folder: Path, sweep: Sweep) -> str:
    """The sweep's section of the page; its tables and pictures are written beside it."""
    write_tables(folder, sweep)
    if sweep.choose is None:
        name, shown = "sweep.html", section(folder, sweep)
        write_pictures(folder, shown)
    else:
        made = read_chosen(folder / CHOICE)
        name, shown = "choice.html", {"chosen": made and made[0]}
    text: str = environment.get_template(name).render(shown)
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


def _by_class(run: RunFiles) -> dict[str, Any] | None:
    """The table of samples by true and predicted class, of up to SHOWN_CLASSES classes; None for a run that has no such counts."""
    path, by_class = run.folder / "summary.json", run.summary.get("by_class")
    if not by_class:
        return None
    try:
        counts = as_counts(np.array(by_class["counts"], dtype=np.float64))
        clusters = {name: cluster["balanced_accuracy"] for name, cluster in by_class.get("clusters", {}).items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ('by_class': {error})") from None
    if counts is None:
        return None
    names = (run.measured or {}).get("class_names") or list(map(str, range(len(counts.samples))))
    shown = [label for label in range(len(counts.samples)) if counts.samples[label] or counts.predictions[label]][:SHOWN_CLASSES]
    require(len(names) == len(counts.samples), path, "'by_class' has another number of classes than measured.json")
    rows = [
        {
            "name": names[i], "samples": int(counts.samples[i]), "recall": float(counts.recalls[i]) if counts.samples[i] else None,
            "counts": [int(counts.predictions[i])] if counts.matrix is None else [int(counts.matrix[i, j]) for j in shown],
        }
        for i in shown
    ]  # fmt: skip
    columns = [] if counts.matrix is None else [names[j] for j in shown]
    return {"label": run.label, "rows": rows, "columns": columns, "clusters": clusters, "open": bool(run.summary.get("warnings"))}


def _advice(run: RunFiles) -> list[str]:
    """What to deploy, in sentences; for a run that found clusters and was not advised, that nothing shows yet that they help."""
    advice, mixture = run.summary.get("advice"), run.summary.get("mixture")
    try:
        lines = [without_advice(run.summary, f"{run.name}/config.toml")] if advice is None else advice_lines(advice)
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
        "table": _contingency(labels, groups),
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


def _contingency(labels: Array, groups: Array | None) -> dict[str, Any]:
    """Clients per cluster and true group, the largest SHOWN_CLUSTERS of either; `share` of the cluster's size colours a cell. Without
    known groups the sizes of the clusters alone."""
    groups, by_group = (np.zeros(len(labels)), False) if groups is None else (groups, True)
    clusters, columns = _largest(labels), _largest(groups) if by_group else np.zeros(0)
    rows = []
    for label in clusters:
        inside, size = groups[labels == label], int((labels == label).sum())
        counts = [int((inside == group).sum()) for group in columns]
        rows.append({"label": int(label), "cells": [{"count": count, "share": count / size} for count in counts], "size": size})
    left_out = len(np.unique(labels)) - len(clusters), len(np.unique(groups)) - len(columns) if by_group else 0
    return {"groups": columns.tolist(), "rows": rows, "left_out": left_out}


def _largest(values: Array) -> Array:
    names, sizes = np.unique(values, return_counts=True)
    return np.asarray(names[np.sort(np.argsort(-sizes, kind="stable")[:SHOWN_CLUSTERS])])


def _accuracy(runs: Sequence[RunFiles]) -> dict[str, str | None]:
    series = [_series(run) for run in runs]
    per_round = [run for run in series if len(run.rounds)]
    per_client = [run for run in series if len(run.client_served)]
    return {
        "rounds": pictures.rounds_picture(per_round) if per_round else None,
        "clients": pictures.clients_picture(per_client) if per_client else None,
        "numbers": _r2_picture(runs),
    }


def _r2_picture(runs: Sequence[RunFiles]) -> str | None:
    """R² per round of the runs whose labels are numbers."""
    none = np.empty(0)
    series = []
    for run in runs:
        if rows := [row for row in run.rounds if row.get("r2") is not None]:
            rounds, served = np.array([row["round"] for row in rows]), _floats([row["r2"] for row in rows])
            series.append(pictures.Series(run.label, rounds, served, _floats([row.get("local_r2") for row in rows]), none, none, none))
    return pictures.rounds_picture(series, 1.0, "R² of all test samples") if series else None


def _numbers(run: RunFiles) -> dict[str, Any] | None:
    """The errors of a run whose labels are numbers, of all clients and by cluster; None for classes."""
    if run.summary.get("error_mean") is None:
        return None
    numbers = run.summary.get("numbers") or {}
    try:
        clusters = [
            (name, own["r2"], own["root_mean_square_error"], int(own["count"])) for name, own in numbers.get("clusters", {}).items()
        ]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{run.folder / 'summary.json'}: is damaged ('numbers': {error})") from None
    return {"label": run.label, "s": run.summary, "clusters": clusters}


def _series(run: RunFiles) -> pictures.Series:
    rows = [row for row in run.rounds if row.get("accuracy_mean") is not None or row.get("local_accuracy_mean") is not None]
    path = run.folder / "rounds.jsonl"
    last: Mapping[str, Any] = next((row["per_client"] for row in reversed(rows) if row.get("per_client")), {})
    truth = (run.measured or {}).get("truth", {})
    try:
        series = pictures.Series(
            run.label,
            np.array([row["round"] for row in rows]),
            served=_floats([row.get("accuracy_mean") for row in rows]),
            local=_floats([row.get("local_accuracy_mean") for row in rows]),
            client_served=_floats(last.get("accuracy", [])),
            client_local=_floats(last.get("local_accuracy", [])),
            client_groups=np.array([truth.get(str(client), -1) for client in last.get("clients", [])], dtype=np.int64),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None
    fits = len(series.client_served) == len(series.client_local) == len(series.client_groups)
    require(fits, path, "'per_client' has lists of different lengths")
    return series


def _floats(values: Sequence[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


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
