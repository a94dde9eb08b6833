"""What the command line prints of a run."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .placements import NAME, placement_text

__all__ = ["TimeLeft", "cluster_lines", "counted", "defaults_text", "duration_words", "only", "row_text", "summary_text"]


def row_text(row: Mapping[str, Any]) -> str:
    """A row of rounds.jsonl, as one reads it: accuracies, the epsilon that is spent so far, and which clients were placed anew."""
    return "; ".join(filter(None, (_scores_text(row), *map(placement_text, row.get("admissions", ())), placement_text(row.get(NAME, {})))))


def _scores_text(row: Mapping[str, Any]) -> str:
    if row["skipped"]:
        return f"skipped: {row['skipped']}"
    spent = "" if row.get("epsilon") is None else f"  epsilon {row['epsilon']:.3g} spent"
    if row.get("error_mean") is not None:
        return f"{_errors_text(row)}{spent}"
    if row.get("accuracy_mean") is None:
        return spent.strip()
    balanced = "" if row.get("balanced_accuracy") is None else f" (balanced {100 * row['balanced_accuracy']:.1f} %)"
    own = "".join(f"  {name.removeprefix('metric_')} {_figure(row[name])}" for name in row if name.startswith("metric_"))
    local = "" if row["local_accuracy_mean"] is None else f"  local models {100 * row['local_accuracy_mean']:.1f} %"
    perplexity = "" if row.get("perplexity_mean") is None else f"  perplexity {row['perplexity_mean']:.4g}"
    return f"accuracy {100 * row['accuracy_mean']:.1f} %{_sampled(row)}{balanced}{local}{perplexity}{own}{spent}"


def _errors_text(scores: Mapping[str, Any]) -> str:
    """The scores of labels that are numbers."""
    r2 = "" if scores.get("r2") is None else f"R² {scores['r2']:.3f}, "
    drawn = f" (from {scores['evaluated_clients']} clients drawn at random)" if scores.get("evaluated_clients") else ""
    constant = "" if scores.get("constant_error") is None else f", always the mean label {_figure(scores['constant_error'])}"
    absolute = "" if scores.get("mean_absolute_error") is None else f", mean absolute error {_figure(scores['mean_absolute_error'])}"
    local = "" if scores.get("local_r2") is None else f", local models R² {scores['local_r2']:.3f}"
    return f"{r2}error {_figure(scores['error_mean'])}{drawn} (worst {_figure(scores['error_worst'])}{constant}){absolute}{local}"


def _figure(value: float | None) -> str:
    """A number of no known unit."""
    return "–" if value is None else f"{value:.4g}"


def _sampled(scores: Mapping[str, Any]) -> str:
    """That scores are of a sample of the clients, and the interval for the mean over all of them."""
    if not scores.get("evaluated_clients"):
        return ""
    interval = scores.get("accuracy_mean_interval")
    between = "" if interval is None else f"95 % interval {100 * interval[0]:.1f} to {100 * interval[1]:.1f}, "
    return f" ({between}from {scores['evaluated_clients']} clients drawn at random)"


def summary_text(summary: Mapping[str, Any]) -> str:
    """The line at the end of a run: accuracies, clusters against true groups where there are such, privacy, and traffic."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f} %"

    known = summary["true_groups"] is not None and 1 < summary["true_groups"] < summary["clients"]  # else nothing is to be found
    groups = f" of {summary['true_groups']} true groups" if known else ""
    clusters = "" if summary["clusters"] is None else f", {counted(summary['clusters'], 'cluster')}{groups}"
    agreement = f", ARI {summary['ari']:.3f}" if known and summary["ari"] is not None else ""
    perplexity = "" if summary.get("perplexity_mean") is None else f", perplexity {summary['perplexity_mean']:.4g}"
    by_class = ""
    if summary.get("balanced_accuracy") is not None:
        by_class = (
            f", balanced accuracy {percent(summary['balanced_accuracy'])}, macro F1 {percent(summary['macro_f1'])} (always the majority "
            f"class: accuracy {percent(summary['majority_accuracy'])}, balanced {percent(summary['majority_balanced_accuracy'])})"
        )
    own = "".join(f", {name.removeprefix('metric_')} {_figure(value)}" for name, value in summary.items() if name.startswith("metric_"))
    private = ""
    if summary.get("epsilon") is not None:
        unit, budget, delta = summary["privacy_unit"], summary["epsilon_budget"], summary["delta"]
        private = f" and differential privacy of one {unit} (epsilon {summary['epsilon']:.3g} of {budget:.3g} spent at delta {delta:g})"
    drawn = "of these" if summary.get("evaluated_clients") else "client"
    scores = (
        f"accuracy {percent(summary['accuracy_mean'])}{_sampled(summary)} (worst {drawn} {percent(summary['accuracy_worst'])})"
        f"{by_class}, local models {percent(summary['local_accuracy_mean'])}{perplexity}{own}"
        if summary.get("error_mean") is None
        else _errors_text(summary)
    )
    return (
        f"{summary['algorithm']}, protection {summary['protection']}{private}: {scores}"
        f"{clusters}{agreement}; up {summary['upload_bytes'] / 1e6:.2f} MB, down {summary['download_bytes'] / 1e6:.2f} MB"
    )


NAMED = 30
"""Clients of a cluster that a line names."""


def cluster_lines(labels: Mapping[int, int], names: Sequence[str] = ()) -> list[str]:
    """The clients of each of several clusters, a line each, from the cluster of each client by number, and names by these numbers."""
    clusters: dict[int, list[int]] = {}
    for client, label in sorted(labels.items()):
        clusters.setdefault(label, []).append(client)
    if len(clusters) < 2:
        return []
    return [f"cluster {label} ({counted(len(members), 'client')}): {named(members, names)}" for label, members in sorted(clusters.items())]


def named(clients: Sequence[int], names: Sequence[str] = ()) -> str:
    """Clients by name, or by number where they have none; the first `NAMED` of many."""
    words = [names[client] if client < len(names) else str(client) for client in clients[:NAMED]]
    return ", ".join(words) + (f" and {len(clients) - NAMED} more" if len(clients) > NAMED else "")


def defaults_text(config: Any) -> str:
    """What an experiment that sets no key runs with."""
    data, training = config.data, config.training
    return (
        f"no key is set, so it runs with the defaults: algorithm {config.algorithm['name']}, data {data.source} ({data.partition}, "
        f"{data.clients} clients), model {config.model.name}, {training.rounds} rounds, protection {config.protection.name}; "
        "config.toml in the run folder has all keys"
    )


def counted(count: int, noun: str) -> str:
    """A number and its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def only(count: int, noun: str) -> str:
    """That there are no more of something."""
    return f"there {'is' if count == 1 else 'are'} only {counted(count, noun)}"


LEAST_SHOWN_SECONDS = 60.0
"""A shorter rest is not worth words."""


@dataclass
class TimeLeft:
    """How long what is left of `total` steps takes, if each takes as long as those since the clock began, after the first `done` ones."""

    total: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def words(self, done: int) -> str:
        """ "; about 12 min left" after `done` steps; "" where less than a minute is left."""
        left = (self.total - done) * (time.monotonic() - self.began) / max(1, done - self.done)
        return "" if left < LEAST_SHOWN_SECONDS else f"; about {duration_words(left)} left"


def duration_words(seconds: float) -> str:
    """Some time for people, in minutes or hours: "12 min", "1 h 30 min"."""
    minutes = max(1, round(seconds / 60))
    hours, rest = divmod(minutes, 60)
    return f"{minutes} min" if not hours else f"{hours} h" + (f" {rest} min" if rest else "")
