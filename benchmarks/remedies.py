"""Whether the remedies that audits print are accepted and lower what leaks: audits of many algorithms, each rerun with its remedies.

    python -m benchmarks remedies [--first 0] [--audits 20] [--out remedies.jsonl]

Each audit runs an algorithm on digits without protection, or with the protection that stands beside it, finds leaks (`--budget quick`: the
recorded run alone), and runs again with the remedy of each leak, with the same seed and data. Reported are leaks with a remedy, how many of
the figures fell, and the others: the run with the remedy was refused, or the figure stayed. Leaks without a remedy, since no setting of the
algorithm helps, are in the number of leaks only. Finished audits are in the file of results, and a restarted run resumes from it.
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.audit import audit_run
from cflpriv.experiments import parse_config, run_experiment

__all__ = ["SETTINGS", "main", "row"]

SETTINGS: tuple[dict[str, Any], ...] = (
    *({"algorithm": {"name": name}} for name in (
        "fedavg", "pacfl", "stocfl", "cfl", "fedprox", "fednova", "scaffold", "ditto", "lg_fedavg", "fedproto", "fedfomo", "pfedlia",
        "crossfit", "one_shot", "fedgwc",
    )),
    {"algorithm": {"name": "ifca", "k": 2}},
    {"algorithm": {"name": "fesem", "k": 2}},
    {"algorithm": {"name": "fedsoft", "k": 2}},
    {"algorithm": {"name": "pacfl"}, "protection": {"sum": "haar", "gram": ["haar"]}},
    {"algorithm": {"name": "fedavg"}, "protection": {"sum": "secagg"}, "training": {"participation": 0.5}},
)  # fmt: skip
"""What each audit changes."""


def row(number: int) -> dict[str, Any]:
    """The leaks of an audit and what became of them."""
    changes = SETTINGS[number]
    training = {"rounds": 3, "lr": 0.1, "weights": "equal", "participation": 0.75 if changes["algorithm"]["name"] == "fedgwc" else 1.0}
    config = parse_config({
        "data": {"partition": "pathological", "groups": [[0, 1], [2, 3]], "clients": 12, "samples_per_client": 20, "seed": number},
        "model": {"name": "mlp", "hidden": 8}, "algorithm": changes["algorithm"], "protection": changes.get("protection", {}),
        "training": training | changes.get("training", {}), "run": {"record": "full", "seed": number},
    })  # fmt: skip
    with TemporaryDirectory() as place:
        folder = Path(place) / "run"
        run_experiment(config, folder)
        attacks = [name for name in ATTACKS.names() if not (ATTACKS[name].reruns or ATTACKS[name].active)]
        cells = audit_run(folder, attacks=attacks, budget="quick", measure_remedies=True)
        measured = json.loads((folder / "audit.json").read_text(encoding="utf-8"))["remedies_measured"]
    leaks = [f"{cell.attack}/{cell.metric} ({cell.adversary})" for cell in cells if cell.status == "leaks"]
    return {"audit": number, "settings": changes, "leaks": leaks, "measured": measured}


def words_of(made: Sequence[dict[str, Any]]) -> str:
    """How many leaks have a remedy, and how many of these fell."""
    measured = [entry for audit in made for entry in audit["measured"]]
    leaks = sum(len(audit["leaks"]) for audit in made)
    refused, stayed = (sum(entry[key] for entry in measured) for key in ("refused", "stayed"))
    return (
        f"{len(made)} audits, {leaks} leaks, {len(measured)} with a remedy: {len(measured) - refused - stayed} lower with it, "
        f"{stayed} not, {refused} refused"
    )


def main(words: Sequence[str]) -> int:
    """Make all audits that are not in the file yet; print what did not fall, and the counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks remedies")
    parser.add_argument("--audits", type=int, default=len(SETTINGS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", default="remedies.jsonl")
    asked = parser.parse_args(words)
    path = Path(asked.out)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    wanted = range(asked.first, min(asked.audits, len(SETTINGS)))
    rows = [made for made in rows if made["audit"] in wanted]
    done = {made["audit"] for made in rows}
    with path.open("a", encoding="utf-8") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in wanted:
            if number in done:
                continue
            rows.append(row(number))
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            print(f"audit {number}, {SETTINGS[number]}: {words_of(rows[-1:])}", flush=True)
            for entry in rows[-1]["measured"]:
                if entry["refused"] or entry["stayed"]:
                    print(f"  {entry['attack']} / {entry['metric']} ({entry['adversary']}): {entry['before']:.3f}, then {entry['after']}: "
                          f"{' '.join(entry['changes'])} {entry['note'][:120]}", flush=True)  # fmt: skip
    print(words_of(rows))
    return 0
