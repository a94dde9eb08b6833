"""A coordinator's counters in Prometheus' text format, for a page that the caller's server has at `/metrics`.

Guarantee: numbers of requests, sums, helpers and bytes; no values, no names. Reveals: that. Source: Prometheus' text format 0.0.4.
"""

from collections import defaultdict

from .coordinator import Coordinator

__all__ = ["CONTENT_TYPE", "metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "cflpriv_coordinator_"
_HELP = {
    "requests_total": "Requests of clients, by kind and by the code of the answer.",
    "uploads_left_out_total": "Uploads that a helper could not use, by code.",
    "sums_total": "Attempts at sums that ended, by code.",
    "helper_requests_total": "Requests to helpers, by helper and by the code of the answer.",
    "helpers_left_out_total": "Helpers that were left out of an attempt.",
    "false_masks_total": "Attempts with false masks, by helper.",
}


def metrics(coordinator: Coordinator) -> str:
    """All counters since the process began, and the current state."""
    rounds = coordinator.rounds
    lines: list[str] = []
    families: dict[str, list[str]] = defaultdict(list)
    for (name, labels), count in sorted(rounds.counts.items()):
        shown = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels)
        families[name].append(f"{_PREFIX}{name}{{{shown}}} {count}")
    for name, text in _HELP.items():
        lines += [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} counter", *families[name]]
    roster = rounds.roster
    gauges = (
        ("round", "gauge", "The current round.", rounds.number),
        ("roster_version", "gauge", "The version of its roster.", 0 if roster is None else roster.version),
        ("attempts", "gauge", "Sums under way.", len(rounds.attempts)),
        ("uploads", "gauge", "Uploads to sums under way.", sum(len(attempt.digests) for attempt in rounds.attempts.values())),
        ("uploads_waiting", "gauge", "Uploads that helpers have not seen.", sum(attempt.waiting for attempt in rounds.attempts.values())),
        ("log_frames_total", "counter", "Writes to the log.", rounds.log.frames),
        ("log_seconds_total", "counter", "Seconds spent in writes to the log.", f"{coordinator.commit_seconds:.6f}"),
    )
    for name, kind, text, value in gauges:
        lines += [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}", f"{_PREFIX}{name} {value}"]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
