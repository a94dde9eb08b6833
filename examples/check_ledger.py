"""Check a ledger: the ε of every client, computed from ledger.json alone, without the project.

    python examples/check_ledger.py RUN_DIR/ledger.json [RUN_DIR/summary.json]

Needs dp-accounting only, whose event classes and accountant of privacy-loss distributions it uses as they are. Noise that clients share
(`shares` of an event) is priced as it stands: as long as nobody but one of them is in league with the server. With a summary, the largest
ε must equal the one that is stated there, to 0.01 (the two round losses differently); for ε to about 600, beyond which dp-accounting's
formula for ε runs out of floating-point numbers.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.privacy_loss_distribution import from_privacy_parameters

RELATIONS = {
    "add_remove": privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": privacy_accountant.NeighboringRelation.REPLACE_ONE,
}


def epsilon(events: list[dict[str, Any]], relation: str, delta: float) -> float:
    """ε at δ of the events of one client."""
    counted = Counter(json.dumps(event, sort_keys=True) for event in events)
    accountant = PLDAccountant(RELATIONS[relation])
    pure = []
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
            pure.append((event["epsilon"], count))
        else:
            raise SystemExit(f"{kind}: this script does not know such an event")
    if not pure:
        return float(accountant.get_epsilon(delta))
    total = accountant._pld  # no event of dp-accounting says "pure epsilon", but its distributions do
    for each, count in pure:
        total = total.compose(from_privacy_parameters(DifferentialPrivacyParameters(each, 0.0)).self_compose(count))
    return float(total.get_epsilon_for_delta(delta))


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
    raise SystemExit(main(sys.argv[1:]))
