"""Scores of runs for a report: of every client and round, by class, and of labels that are numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...class_counts import ClassCounts, as_counts
from ...console import counted
from ...errors import InputError
from ...types import Array
from . import pictures
from .run_files import RunFiles, require
from .run_names import kind_of, method_words, protection_words

__all__ = ["by_class", "client_scores", "counts_in", "counts_of", "is_useless", "method_rows", "numbers_of", "score_pictures"]

SHOWN_CLASSES, SHOWN_WRONG = 30, 4


def counts_of(run: RunFiles) -> ClassCounts | None:
    """A run's samples by true and predicted class; None for a run that has no such counts. Raises `InputError` naming summary.json."""
    return counts_in(run.summary, str(run.folder / "summary.json"))


def counts_in(summary: Mapping[str, Any], source: str) -> ClassCounts | None:
    """The samples by true and predicted class of a summary that was read from `source`; None where it has no such counts."""
    of_classes = summary.get("by_class")
    if not of_classes:
        return None
    try:
        return as_counts(np.array(of_classes["counts"], dtype=np.float64))
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{source}: is damaged ('by_class': {error})") from None


def is_useless(counts: ClassCounts) -> bool:
    """Whether a model names one class for everybody, or is shown to be hardly better than that."""
    return counts.constant is not None or counts.shown_useless


def client_scores(run: RunFiles) -> dict[int, float]:
    """The accuracy in [0, 1] of each client that was scored in the last evaluated round; empty where none was kept."""
    series = _series(run)
    return {int(client): float(value) for client, value in zip(series.clients, series.client_served, strict=True) if np.isfinite(value)}


def by_class(run: RunFiles) -> dict[str, Any] | None:
    """The samples of each class, of up to SHOWN_CLASSES: how many, which share is right, and what the others were taken for; or None."""
    path, counts = run.folder / "summary.json", counts_of(run)
    if counts is None:
        return None
    try:
        clusters = {name: cluster["balanced_accuracy"] for name, cluster in run.summary["by_class"].get("clusters", {}).items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ('by_class': {error})") from None
    names = (run.measured or {}).get("class_names") or list(map(str, range(len(counts.samples))))
    shown = [label for label in range(len(counts.samples)) if counts.samples[label] or counts.predictions[label]][:SHOWN_CLASSES]
    require(len(names) == len(counts.samples), path, "'by_class' has another number of classes than measured.json")
    rows = [
        {
            "name": names[i], "samples": int(counts.samples[i]), "recall": float(counts.recalls[i]) if counts.samples[i] else None,
            "predictions": int(counts.predictions[i]),
            "taken": "" if counts.matrix is None else _taken({names[j]: int(counts.matrix[i, j]) for j in shown if j != i}),
        }
        for i in shown
    ]  # fmt: skip
    return {"label": run.label, "rows": rows, "clusters": clusters, "open": is_useless(counts)}


def method_rows(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """What table 1 has of each run: its method, protection, scores, groups found, what a client sends, and what is not as planned."""
    return [
        {
            "method": method_words(run.summary), "algorithm": run.summary["algorithm"], "run": run.name,
            "protection": protection_words(run.summary, run.config),
            "mean": _scores(run.summary, "accuracy_mean", "error_mean"), "worst": _scores(run.summary, "accuracy_worst", "error_worst"),
            "groups": _groups(run), "sent": run.summary["upload_bytes"] / max(1, run.summary["clients"]), "notes": _notes(run),
        }
        for run in runs
    ]  # fmt: skip


def _scores(summary: Mapping[str, Any], accuracy: str, error: str) -> str:
    if summary.get(error) is not None:
        return f"error {summary[error]:.3g}"
    return "–" if summary[accuracy] is None else f"{100 * summary[accuracy]:.1f} %"


def _groups(run: RunFiles) -> str:
    s = run.summary
    if kind_of(s) != "clusters" or s["clusters"] is None:
        return "none sought"
    true = "" if s["true_groups"] is None else f" of {s['true_groups']}"
    return f"{s['clusters']}{true}" + ("" if s["ari"] is None else f", ARI {s['ari']:.2f}")


def _notes(run: RunFiles) -> list[str]:
    """What a reader of a run's scores should know, a line each."""
    s, notes = run.summary, ["files changed, figures may be false"] if run.problems else []
    if s["rounds"] < s["rounds_planned"]:
        notes.append(f"interrupted after {s['rounds']} of {s['rounds_planned']} rounds")
    if s["rounds_skipped"]:
        notes.append(f"{counted(s['rounds_skipped'], 'round')} skipped")
    if s.get("group_rounds_without_sum"):
        notes.append(f"{s['group_rounds_without_sum']} × a group had no sum")
    if s.get("clipped_client_rounds"):
        notes.append(f"{s['clipped_client_rounds']} × a client clipped")
    if s.get("evaluated_clients"):
        interval = s.get("accuracy_mean_interval")
        reach = f": 95 % interval {100 * interval[0]:.1f} to {100 * interval[1]:.1f}" if interval else ""
        notes.append(f"{counted(s['evaluated_clients'], 'client')} drawn at random{reach}; worst of the {s['evaluated_clients']} drawn")
    if s.get("release_policy") == "off":
        notes.append("release policy off")
    if s.get("clear_structure") is False:
        notes.append("no clear structure")
    return [*notes, *map(str, s.get("warnings", ()))]


def _taken(counts: Mapping[str, int]) -> str:
    """The classes that wrong answers name, the most frequent first."""
    named = sorted(((count, name) for name, count in counts.items() if count), key=lambda entry: -entry[0])
    return ", ".join(f"{name} {count}" for count, name in named[:SHOWN_WRONG]) + (", …" if len(named) > SHOWN_WRONG else "")


def score_pictures(runs: Sequence[RunFiles]) -> dict[str, str | None]:
    """Pictures of the accuracy of clients and by round, of deployed and of local models; None for what was not measured."""
    series = [_series(run) for run in runs]
    per_round, per_client = [run for run in series if len(run.rounds)], [run for run in series if len(run.client_served)]
    return {
        "clients": pictures.clients_picture(per_client) if per_client else None,
        "rounds": pictures.rounds_picture(per_round) if per_round else None,
        "local_clients": pictures.clients_picture(per_client, local=True) if per_client else None,
        "local_rounds": pictures.rounds_picture(per_round, local=True) if per_round else None,
        "numbers": _r2_picture(runs),
    }


def _r2_picture(runs: Sequence[RunFiles]) -> str | None:
    """R² per round of the runs whose labels are numbers."""
    none = np.empty(0)
    series = []
    for run in runs:
        if rows := [row for row in run.rounds if row.get("r2") is not None]:
            rounds, served = np.array([row["round"] for row in rows]), _floats([row["r2"] for row in rows])
            local = _floats([row.get("local_r2") for row in rows])
            series.append(pictures.Series(run.label, rounds, served, local, none, none, none, none))
    return pictures.rounds_picture(series, scale=1.0, words="R² of all test samples") if series else None


def numbers_of(run: RunFiles) -> dict[str, Any] | None:
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
            clients=np.array(last.get("clients", []), dtype=np.int64),
            client_served=_floats(last.get("accuracy", [])),
            client_local=_floats(last.get("local_accuracy", [])),
            group_names=run.group_names,
            client_groups=np.array([truth.get(str(client), -1) for client in last.get("clients", [])], dtype=np.int64),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None
    fits = len(series.clients) == len(series.client_served) == len(series.client_local) == len(series.client_groups)
    require(fits, path, "'per_client' has lists of different lengths")
    return series


def _floats(values: Sequence[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
