"""The session contract of a configuration."""

from ...algorithms.interface import Algorithm
from ...federation.contract_record import Contract, make_contract
from ...privacy.settings import Noise
from ...protocols.keys import Roster
from ..config.config import Config

__all__ = ["contract_for"]


def contract_for(config: Config, algorithm: Algorithm, noise: Noise | None, roster: Roster | None = None) -> Contract | None:
    """The contract of a run, or None where its algorithm declares no schedule. `noise`: that of private tasks."""
    if algorithm.schedule is None:
        return None
    return make_contract(
        run=config.run.name, algorithm=algorithm.name, settings=config.hyper, rounds=config.training.rounds, seed=config.run.seed,
        schedule=algorithm.schedule, protection=config.protection, privacy=config.privacy, noise=noise, roster=roster,
    )  # fmt: skip
