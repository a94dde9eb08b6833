"""A deployment over Flower's messages asks each client as often as its noise was priced for, also while others are away."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

import scenes
from deployments import DyingGrid
from flwr.app import Message

from cflpriv.experiments import parse_config, run_experiment
from cflpriv.flower import serve
from cflpriv.protocols.events import GaussianEvent
from cflpriv.protocols.ledger import Charge, Ledger

ROUNDS = 12
CLIENT = '\n[privacy]\nunit = "client"\nepsilon = 3.0\ndelta = 1e-3\n'


class Leaving(DyingGrid):
    """Nodes of which those in `away` are not there and do not answer."""

    away: frozenset[int] = frozenset()

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if node not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.dead |= self.away
        return super().push_messages(messages)


def multipliers(charges: Iterable[Charge]) -> set[float]:
    return {event.noise_multiplier for line in charges for event in line.events if isinstance(event, GaussianEvent)}


@pytest.mark.slow
def test_a_deployment_is_calibrated_for_real_participation_and_keeps_to_it_while_clients_are_away(tmp_path: Path) -> None:
    scene = scenes.population(groups=1, clients_per_group=8)
    config = parse_config(
        {
            "data": {"clients": 8}, "model": {"name": "linear"}, "algorithm": {"name": "fedavg"},
            "training": {"rounds": ROUNDS, "batch_size": 5, "lr": 0.05, "weights": "equal", "participation": 0.25},
            "privacy": {"unit": "client", "epsilon": 3.0, "delta": 1e-3}, "run": {"evaluate_every": 1000},
        }
    )  # fmt: skip
    grid, planned = Leaving(tmp_path, scene, CLIENT, {}), config.schedule(range(8))
    often = max(planned.counts, key=planned.counts.__getitem__)
    absent = next(client for client, rounds in planned.rounds_of.items() if client != often and any(3 <= number <= 7 for number in rounds))

    def say(line: str) -> None:
        if line.startswith("round 2"):
            grid.away = frozenset({absent})
        if line.startswith("round 7"):
            grid.away = frozenset()

    summary = serve(grid, config, tmp_path / "run", scene, clients=8, wait_seconds=0.1, compute_seconds=1.0, report=say)  # type: ignore[arg-type]
    run_experiment(config, tmp_path / "local", population=scene)
    there, here = (Ledger.open(tmp_path / name / "ledger.json") for name in ("run", "local"))
    assert summary["stopped"] is None
    assert summary["rounds"] == ROUNDS
    assert not [one for one in summary["refusals"] if one[2] == "over-budget"]
    asked = defaultdict(set)
    for line in there.charges:
        for client in line.clients:
            asked[client].add(line.round)
    assert all(asked[client] <= set(rounds) for client, rounds in planned.rounds_of.items())
    assert asked[often] == set(planned.rounds_of[often])
    assert asked[absent] < set(planned.rounds_of[absent])
    assert multipliers(there.charges) == multipliers(here.charges)
    assert 0.95 * 3.0 < there.spent(often) <= 3.0
