"""How often an audit shows a leak that is there: audits of unprotected runs, seen in a stated number of their seeds only.

    python -m benchmarks planted_leaks [--audits 40] [--seen 3] [--out planted_leaks.jsonl]

Each audit is of five seeds, as a standard one, by the server. In `--seen` of the seeds, drawn at random, the adversary sees the run that it
attacks; in the others it sees a run that has nothing to do with the truth (`false_alarms.cases`). So a figure's leak has that share of the
size that its unprotected reference shows, which is stated beside each. Figures whose reference shows no leak (`not_validated`), that have
nothing to see or were not attempted are counted apart: there is no leak of known size in them.

Reported is how many of the other figures end as `leaks`, `inconclusive` and `at_baseline` after all are judged together, with an exact 95 %
interval. Settings take turns: algorithm × size. Finished audits are in the file of results, and a restarted run resumes from it.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy import stats

from cflpriv.attacks.family import judged_together
from cflpriv.attacks.leakage import Case
from cflpriv.attacks.pooling import pooled
from cflpriv.randomness import stream

from .false_alarms import PROTECTIONS, SETTINGS, attacked, cases, configured

__all__ = ["main", "row"]

OPEN = [number for number, (_, protection, _) in enumerate(SETTINGS) if protection == PROTECTIONS[0]]
"""The settings without protection."""
SEEDS = 5
APART = ("not_validated", "nothing_to_see", "not_attempted")


def row(number: int, seen: int) -> dict[str, Any]:
    """One audit: the status of each figure, and how much its reference gains in the mean over seeds."""
    shown = set(stream(number, "seeds that are seen").permutation(SEEDS)[:seen].tolist())
    made = [cell for seed in range(SEEDS) for cell in attacked(_case(number, seed, seed in shown))]
    found, _ = judged_together(pooled(made))
    figures = {}
    for one in found:
        gain = None if one.reference is None or one.reference_baseline is None else abs(one.reference - one.reference_baseline)
        figures[f"{one.attack}/{one.metric}/{one.k_known}"] = {"status": one.status, "size": gain and gain * seen / SEEDS, "p": one.p}
    return {"audit": number, "seen": seen, "figures": figures}


def _case(number: int, seed: int, seen: bool) -> Case:
    """The server on one seed's run, which it sees, or on another one that it sees instead."""
    setting = OPEN[number % len(OPEN)]
    case = cases(configured(setting, 1000 * (number + 1) + seed), ("server",))[0]
    return replace(case, view=case.reference) if seen else case


def shares(rows: Sequence[dict[str, Any]]) -> str:
    """The shares of statuses among figures whose reference shows a leak, in words."""
    statuses = Counter(one["status"] for made in rows for one in made["figures"].values())
    apart = sum(statuses.pop(name, 0) for name in APART)
    total, words = sum(statuses.values()), []
    for status, count in sorted(statuses.items()):
        limits = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
        words.append(f"{count} of {total} {status} [{limits.low:.3f}, {limits.high:.3f}]")
    return f"{len(rows)} audits: {'; '.join(words)}; {apart} figures without a leak of known size"


def main(words: Sequence[str]) -> int:
    """Make all audits that are not in the file yet, and print the shares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks planted_leaks")
    parser.add_argument("--audits", type=int, default=40)
    parser.add_argument("--seen", type=int, default=3, choices=range(1, SEEDS + 1))
    parser.add_argument("--out", default="planted_leaks.jsonl")
    asked = parser.parse_args(words)
    path = Path(asked.out)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    rows = [one for one in rows if one["seen"] == asked.seen and one["audit"] < asked.audits]
    done = {one["audit"] for one in rows}
    with path.open("a", encoding="utf-8") as file:
        for number in range(asked.audits):
            if number not in done:
                rows.append(row(number, asked.seen))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                print(f"audit {number}: {shares(rows[-1:])}", flush=True)
    print(shares(rows))
    return 0
