"""Session contracts for servers that a test starts by itself."""

from cflpriv.algorithms.interface import Algorithm
from cflpriv.contract.protection import Protection
from cflpriv.contract.schedule import Schedule, TaskRequest
from cflpriv.federation.contract_record import Contract, make_contract
from cflpriv.privacy.settings import Privacy
from cflpriv.protocols.keys import Roster

__all__ = ["contract_of"]


def contract_of(
    algorithm: Algorithm | None, *requests: TaskRequest, protection: Protection | None = None, roster: Roster | None = None, seed: int = 1,
    rounds: int = 10, name: str = "", models: int = 1,
) -> Contract:  # fmt: skip
    """The contract of an algorithm, or of `requests` in every round, for a server that a test starts by itself."""
    schedule = Schedule(round=requests, models=models) if algorithm is None else algorithm.schedule
    assert schedule is not None
    return make_contract(
        run=name, algorithm="none" if algorithm is None else algorithm.name, settings={}, rounds=rounds, seed=seed, schedule=schedule,
        protection=protection or Protection(), privacy=Privacy(), roster=roster,
    )  # fmt: skip
