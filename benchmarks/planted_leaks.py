"""How often an audit shows a leak that is there: audits of unprotected runs, seen in a stated number of their seeds only.

    python -m benchmarks planted_leaks [--audits 16] [--first 0] [--seen 5] [--out planted_leaks.jsonl]

Each audit is of five seeds, as a standard one, by the server. In `--seen` of the seeds, drawn at random, the adversary sees the run that it
attacks; in the others it sees a run that has nothing to do with the truth (`false_alarms.cases`).

Whether a figure has a leak to find must not be read off the audit that is judged: of figures without one, one in forty passes the test of
its reference by chance, and then cannot be shown. So audits of one setting come in pairs with other seeds each. A figure is a planted leak
if the other audit of the pair calls it `leaks`; its size is its gain over the baseline there. One that other seeds show only just is not
found again as often as not, so *clear* ones are counted apart: where p is at most 1e-4 in the other audit, so that the leak would stand
among 250 figures.

Reported is how many of these figures end as `leaks`, and as each other status, after all are judged together, with an exact 95 % interval;
and how many of figures whose own reference shows a leak, without that rule. Settings take turns: algorithm × size. Finished audits are in
the file of results, and a restarted run resumes from it. `--first` leaves out the audits before it.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy import stats

from cflpriv.attacks.figures.family import judged_together
from cflpriv.attacks.figures.leakage import Case
from cflpriv.attacks.figures.pooling import pooled
from cflpriv.randomness import stream

from .false_alarms import PROTECTIONS, SETTINGS, attacked, cases, configured

__all__ = ["main", "row"]

OPEN = [number for number, (_, protection, _) in enumerate(SETTINGS) if protection == PROTECTIONS[0]]
"""The settings without protection."""
SEEDS = 5
APART = ("not_validated", "nothing_to_see", "not_applicable", "not_attempted")
"""A figure with such a status has no reference that shows a leak."""
CLEAR = 1e-4
"""A planted leak is clear if its p in the other audit is at most this. Set after audits 0 to 63, for later ones."""


def row(number: int, seen: int) -> dict[str, Any]:
    """One audit: the status of each figure, and how much its reference gains in the mean over seeds."""
    shown = set(stream(number, "seeds that are seen").permutation(SEEDS)[:seen].tolist())
    made = [cell for seed in range(SEEDS) for cell in attacked(_case(number, seed, seed in shown))]
    cells, _ = judged_together(pooled(made))
    figures = {}
    for cell in cells:
        gain = None if cell.reference is None or cell.reference_baseline is None else abs(cell.reference - cell.reference_baseline)
        figures[f"{cell.attack}/{cell.metric}/{cell.k_known}"] = {"status": cell.status, "size": gain and gain * seen / SEEDS, "p": cell.p}
    return {"audit": number, "seen": seen, "figures": figures}


def _case(number: int, seed: int, seen: bool) -> Case:
    """The server on one seed's run, which it sees, or on another one that it sees instead."""
    setting = OPEN[number % len(OPEN)]
    case = cases(configured(setting, 1000 * (number + 1) + seed), ("server",))[0]
    return replace(case, view=case.reference) if seen else case


def planted(rows: Sequence[dict[str, Any]]) -> list[tuple[str, float, bool]]:
    """Status and size of each planted leak, and whether it is clear, in the audits that have another one of their setting beside them."""
    settings: dict[int, list[dict[str, Any]]] = {}
    for made in sorted(rows, key=lambda made: int(made["audit"])):
        settings.setdefault(made["audit"] % len(OPEN), []).append(made)
    pairs = [pair for runs in settings.values() for pair in zip(runs[::2], runs[1::2], strict=False)]
    return [
        (own["figures"][name]["status"], figure["size"], figure["p"] is None or figure["p"] <= CLEAR)  # None: an exact recovery
        for first, two in pairs for own, other in ((first, two), (two, first))
        for name, figure in other["figures"].items() if figure["status"] == "leaks" and name in own["figures"]
    ]  # fmt: skip


def shares(rows: Sequence[dict[str, Any]]) -> str:
    """The shares of statuses among planted leaks, among clear ones, and among figures whose own reference shows a leak, in words."""
    own = [figure["status"] for made in rows for figure in made["figures"].values() if figure["status"] not in APART]
    every, clear = ([status for status, _, surely in planted(rows) if surely >= least] for least in (False, True))
    return f"{len(rows)} audits; planted leaks: {_counted(every)}; clear ones: {_counted(clear)}; by their own reference: {_counted(own)}"


def _counted(statuses: Sequence[str]) -> str:
    words = []
    for status, count in sorted(Counter(statuses).items()):
        limits = stats.binomtest(count, len(statuses)).proportion_ci(0.95, method="exact")
        words.append(f"{count} of {len(statuses)} {status} [{limits.low:.3f}, {limits.high:.3f}]")
    return ", ".join(words) or "none"


def main(words: Sequence[str]) -> int:
    """Make all audits that are not in the file yet, and print the shares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks planted_leaks")
    parser.add_argument("--audits", type=int, default=2 * len(OPEN))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seen", type=int, default=SEEDS, choices=range(1, SEEDS + 1))
    parser.add_argument("--out", default="planted_leaks.jsonl")
    asked = parser.parse_args(words)
    path = Path(asked.out)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    rows = [row for row in rows if row["seen"] == asked.seen and asked.first <= row["audit"] < asked.audits]
    done = {row["audit"] for row in rows}
    with path.open("a", encoding="utf-8") as file:
        for number in range(asked.first, asked.audits):
            if number not in done:
                rows.append(row(number, asked.seen))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                print(f"audit {number}: {shares(rows[-1:])}", flush=True)
    print(shares(rows))
    return 0
