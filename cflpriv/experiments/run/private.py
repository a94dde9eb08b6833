"""A run's privacy ledger: made before anything is sent, kept in the run folder, read for rounds, summary and report."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...algorithms.interface import Algorithm
from ...contract.protection import Protection
from ...errors import InputError
from ...privacy.adaptive_clip import AdaptiveClip
from ...privacy.client_level import ClippedMean, LocalGram, client_noise
from ...privacy.correlated import CorrelatedNoise
from ...privacy.participation import of_participations
from ...privacy.receipts import PrivacyLedger
from ...privacy.settings import Noise, Privacy, Releases, events_of_plan
from ...protocols.accounting import epsilon_of
from ...protocols.banded import optimised_coefficients
from ...protocols.entropy import Entropy, system_entropy
from ...protocols.events import Event, known_shares
from ...protocols.ledger import Ledger
from ..config.config import Config

__all__ = ["FILE", "RunLedger", "charges", "guarantee", "keep_ledger", "planned_events", "run_ledger", "spent", "summed_up"]

FILE = "ledger.json"


@dataclass(frozen=True, eq=False)
class RunLedger:
    """The ledger of a run, and what the server does to keep to it: `sample_ledger` (samples), or `noise` (clients)."""

    privacy: Privacy
    ledger: Ledger
    sample_ledger: PrivacyLedger | None = None
    noise: Callable[[Protection], tuple[ClippedMean, LocalGram | None]] | None = None

    def options(self, protection: Protection) -> dict[str, Any]:
        """Keyword arguments of the federation's server."""
        if self.noise is None:
            return {"privacy_ledger": self.sample_ledger}
        clipped, local = self.noise(protection)
        return {"clipped": clipped, "local": local}


def run_ledger(
    config: Config, algorithm: Algorithm, noise: Noise | None, noise_source: Entropy, participations: int | None = None, bands: int = 0
) -> RunLedger | None:
    """The privacy ledger of a run; None without privacy. Raises `InputError` naming an algorithm that cannot be private.

    `participations`: in how many rounds a client is asked at most (None: in all). `bands`: those of correlated noise (0: independent).
    """
    privacy = config.privacy
    if privacy.unit == "none":
        return None
    ledger = Ledger(privacy.budget)
    if noise is not None:
        return RunLedger(privacy, ledger, PrivacyLedger(noise, ledger))
    releases = _client_releases(config, algorithm)
    if participations is not None:
        releases = of_participations(releases, config.training.rounds, participations)

    def around(protection: Protection) -> tuple[ClippedMean, LocalGram | None]:
        correlated = CorrelatedNoise(optimised_coefficients(bands, config.training.rounds)) if bands else None
        adaptive = None
        if privacy.clip_quantile:
            adaptive = AdaptiveClip(privacy.clip_quantile, privacy.clip_rate, config.cohort, privacy.clip_norm)
        return client_noise(privacy, releases, protection, ledger, noise_source, correlated, adaptive)

    return RunLedger(privacy, ledger, None, around)


def planned_events(config: Config, algorithm: Algorithm, participations: int) -> tuple[Event, ...]:
    """The largest charge to a client in a run that ends as planned, if `participations` rounds ask the client. Empty without privacy.

    Raises `InputError` naming an algorithm that cannot be private.
    """
    privacy, rounds = config.privacy, config.training.rounds
    if privacy.unit == "none":
        return ()
    noise = config.noise(participations)
    if noise is not None:
        return events_of_plan(noise, of_participations(config.releases(), rounds, participations), config.training.epochs)
    releases = of_participations(_client_releases(config, algorithm), rounds, participations)
    clipped, _ = client_noise(privacy, releases, config.protection, Ledger(privacy.budget), system_entropy)
    return (*clipped.before, *[clipped.event] * releases.trainings)


def _client_releases(config: Config, algorithm: Algorithm) -> Releases:
    """What a client releases under unit = "client"; `InputError` naming an algorithm that releases anything else than means."""
    name, operations, local = config.spec.name, algorithm.operations, config.privacy.local
    if config.spec.client_refused:
        raise InputError(f"algorithm {name!r} under privacy.unit = 'client': {config.spec.client_refused}; use 'fedavg'")
    others = [operation for operation in operations if operation != "mean" and operation not in local]
    if others:
        local_noise = "; privacy.local = ['gram'] asks for local noise, a lot of it; 'private_clusters' clusters many clients by means"
        hint = local_noise if others == ["gram"] else ""
        raise InputError(
            f"algorithm {name!r} under privacy.unit = 'client': it uses {' and '.join(others)}, which would release single clients' values "
            f"(clip and noise protect means only){hint}"
        )
    if config.privacy.clip_quantile and ("mean" not in operations or "norm" in config.hyper):
        why = "sums counts whose unit is the length of contributions" if "mean" in operations else "sums nothing"
        raise InputError(f"privacy.clip_quantile = {config.privacy.clip_quantile}: algorithm {name!r} {why}; use 0")
    return Releases(signatures=int("gram" in operations), trainings=config.training.rounds if "mean" in operations else 0)


def charges(spending: RunLedger | None) -> int:
    """How many charges there are, for a checkpoint: what `keep_ledger` needs to notice that they are gone."""
    return 0 if spending is None else len(spending.ledger.charges)


def keep_ledger(spending: RunLedger | None, folder: Path, charged: int = 0) -> None:
    """Keep the ledger in the run folder from now on; go on with the one that is there, which must have `charged` charges at least.

    Raises `InputError` naming a file that is damaged, or has forgotten some of these.
    """
    if spending is None:
        return
    path = folder / FILE
    try:
        if path.exists():
            spending.ledger.adopt(Ledger.open(path, spending.privacy.budget))
        else:
            spending.ledger.keep(path)
    except ValueError as error:
        raise InputError(str(error)) from None
    if charges(spending) < charged:
        state = f"has {charges(spending)} charge(s)" if path.exists() else "is not there"
        raise InputError(
            f"{path}: {state}, where the checkpoint knows of {charged} at least; what was spent must stay spent: put the run's ledger back"
        )


def guarantee(privacy: Privacy, protection: Protection) -> str:
    """One line: what the run may spend, on what, and who adds the noise."""
    unit, change = privacy.unit, "more or less" if privacy.relation == "add_remove" else "exchanged"
    source = "its own noise" if unit == "sample" else "noise by the server, which is trusted"
    if protection.sums.helped and (unit == "client" or privacy.noise == "shared"):
        source = f"noise by the helpers of a secure sum; {protection.helpers_colluding} of them may work with the server"
    elif protection.sum == "secagg" and (unit == "client" or privacy.noise == "shared"):
        source = f"noise shared by the members of a secure sum, of which {protection.smallest_sum - 1} count"
    if privacy.clip_quantile:
        source += f"; the clip norm follows the {privacy.clip_quantile:g} quantile of contributions"
    return f"privacy: epsilon {privacy.epsilon:g} at delta {privacy.delta:g} for one {unit} {change}; {source}"


COLLUDING = (0.1, 0.25, 0.5)
"""Shares of the counted members of which the summary says what ε is left if they tell a server their shares of the noise."""


def _colluding(ledger: Ledger) -> dict[str, float | None] | None:
    """By the share of the counted members that collude, beside one: the largest ε of a client; None where no noise is shared.

    A figure of None: nothing is left.
    """
    bills = {client: ledger.events(client) for client in ledger.clients}
    most = max(bills, key=ledger.spent, default=None)
    if most is None or not any(getattr(event, "shares", 0) for event in bills[most]):
        return None
    epsilons: dict[str, float | None] = {}
    for share in COLLUDING:
        left = [known_shares(event, math.ceil(share * getattr(event, "shares", 0))) for event in bills[most]]
        known = [event for event in left if event is not None]
        epsilons[f"{share:.0%}"] = epsilon_of(known, ledger.budget.delta) if len(known) == len(left) else None
    return epsilons


def spent(spending: RunLedger | None, clients: Sequence[int]) -> Mapping[str, Any]:
    """For a round's row: the ε spent so far, by those who spent most, and by client."""
    if spending is None:
        return {}
    each = {client: spending.ledger.spent(client) for client in clients}
    return {"epsilon": max(each.values(), default=0.0), "epsilon_per_client": [round(each[client], 6) for client in clients]}


def summed_up(spending: RunLedger | None, stopped: str | None, helped: bool = False) -> Mapping[str, Any]:
    """For the summary. `epsilon` is what was spent, not what was allowed (`epsilon_budget`).

    `epsilon_if_colluding`: ε, by the share of counted members that reveal their noise to the server. None if the noise is the helpers'.
    """
    if spending is None:
        return {"epsilon": None, "delta": None}
    most = max((spending.ledger.spent(client) for client in spending.ledger.clients), default=0.0)
    b = spending.ledger.budget
    return {
        "epsilon": most, "delta": b.delta, "epsilon_budget": b.epsilon, "privacy_unit": b.unit, "privacy_relation": b.relation,
        "epsilon_if_colluding": None if helped else _colluding(spending.ledger), "stopped": stopped,
    }  # fmt: skip
