"""Check a ledger: the ε of every client, computed from ledger.json alone, without the project.

    python examples/check_ledger.py RUN_DIR/ledger.json [RUN_DIR/summary.json]

Needs dp-accounting only, whose event classes and accountant of privacy-loss distributions it uses as they are. What it does not know is
written here: the exponential mechanism's choices (Dong, Durfee & Rogers 2020). Noise that clients share (`shares` of an event) is priced as
it stands: as long as nobody but one of them is in league with the server. With a summary, the largest ε must equal the one that is stated
there, to 0.01 (the two round losses differently); for ε to about 600, beyond which dp-accounting's formula for ε runs out of floating-point
numbers.
"""

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

RELATIONS = {
    "add_remove": privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": privacy_accountant.NeighboringRelation.REPLACE_ONE,
}


def epsilon(events: list[dict[str, Any]], relation: str, delta: float) -> float:
    """ε at δ of the events of one client."""
    counted = Counter(json.dumps(event, sort_keys=True) for event in events)
    accountant = PLDAccountant(RELATIONS[relation])
    chosen: list[float] = []
    for key, count in counted.items():
        event = json.loads(key)
        kind, z = event["event"], event.get("noise_multiplier", 0.0)
        if kind == "GaussianEvent":
            # its multiplier is over the sensitivity of its own relation; dp-accounting's, under replacement, over half of it
            accountant.compose(dp_event.GaussianDpEvent(z if relation == "add_remove" else 2 * z), count)
        elif kind == "SampledGaussianEvent":
            sampled = dp_event.PoissonSampledDpEvent(event["sampling_rate"], dp_event.GaussianDpEvent(z))
            accountant.compose(sampled, count * event["steps"])
        elif kind == "ChoiceEvent":
            chosen += [event["epsilon"]] * count
        else:
            raise SystemExit(f"{kind}: this script does not know such an event")
    if not chosen:
        return float(accountant.get_epsilon(delta))
    return float(accountant._pld.compose(choices(chosen, accountant._value_discretization_interval)).get_epsilon_for_delta(delta))


def choices(epsilons: list[float], interval: float) -> PrivacyLossDistribution:
    """Choices whose losses lie in ranges [t − ε, t]; an adversary picks each t by what it has seen. From the last choice to the first.

    `worst` is the largest δ at a threshold, on a grid of thresholds; t is one of 40 in each range.
    """
    step = min(epsilons) / 40
    sizes = [round(epsilon / step) for epsilon in epsilons]
    reach = sum(sizes)
    worst = np.maximum(0.0, -np.expm1(-step * np.arange(-reach, reach + 1)))  # by log of the likelihood ratio over the threshold
    for size in sizes:
        wide = np.concatenate([np.zeros(size), worst, -np.expm1(-step * np.arange(reach + 1, reach + size + 1))])
        t = np.arange(size + 1)
        p = (math.exp(size * step) - np.exp(t * step)) / math.expm1(size * step)
        windows = [p[i] * wide[size + i : len(wide) - size + i] + (1 - p[i]) * wide[i : len(wide) - 2 * size + i] for i in t]
        worst = np.max(windows, axis=0)
    thresholds = np.arange(math.floor(-reach * step / interval), math.ceil(reach * step / interval) + 1)
    # lines between the points of the likelihood ratio, not of its log: the curve stays convex
    deltas = np.interp(np.exp(thresholds * interval), np.exp(step * np.arange(-reach, reach + 1)), worst[::-1])
    return PrivacyLossDistribution(create_pmf_pessimistic_connect_dots(interval, thresholds, np.clip(deltas, 0.0, 1.0)))


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    ledger = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    released: dict[int, list[dict[str, Any]]] = {}
    for charge in ledger["charges"]:
        for client in charge["clients"]:
            released.setdefault(client, []).extend(charge["events"])
    prices: dict[str, float] = {}
    spent = {}
    for client, events in sorted(released.items()):
        key = json.dumps(sorted(map(str, events)))
        if key not in prices:
            prices[key] = epsilon(events, ledger["relation"], ledger["delta"])
        spent[client] = prices[key]
    most = max(spent.values(), default=0.0)
    print(f"{len(spent)} clients, {len(ledger['charges'])} charges; epsilon {min(spent.values(), default=0.0):.4f} to {most:.4f}", end=" ")
    print(f"at delta {ledger['delta']:g} ({ledger['relation']}, unit {ledger['unit']}); budget {ledger['epsilon']:g}")
    holds = most <= ledger["epsilon"] + 0.01
    if len(arguments) > 1:
        stated = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))["epsilon"]
        print(f"the summary states {stated:.4f}: {'equal' if abs(stated - most) <= 0.01 else 'NOT equal'}")
        holds = holds and abs(stated - most) <= 0.01
    return 0 if holds else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    raise SystemExit(main(sys.argv[1:]))
