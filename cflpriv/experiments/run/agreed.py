"""The session contract of a configuration."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...algorithms.interface import Algorithm
from ...data import build_population
from ...errors import InputError
from ...federation.contract_record import Contract, make_contract
from ...privacy.settings import Noise
from ...protocols.keys import Roster
from ..config.config import Config
from ..newcomers import held_back

__all__ = ["contract_for", "contract_of_config", "noise_over"]


def contract_of_config(config: Config, data_dir: str | Path | None = None, roster: Roster | None = None) -> Contract:
    """The contract of a configuration: with `roster` that of a deployment of it. Raises `InputError` where the algorithm declares no
    schedule."""
    population = build_population(config.data, data_dir)
    ids = sorted(client.id for client in population.clients)
    late = held_back(population.group_of, config.data.newcomers)
    config, _ = config.fitted(population)
    algorithm = config.algorithm_for(population)
    made = contract_for(config, algorithm, noise_over(config, [client for client in ids if client not in late]), roster)
    if made is None:
        raise InputError(
            f"algorithm {algorithm.name!r} declares no schedule, so no contract can be made; `cflpriv contract --infer` makes one"
        )
    return made


def noise_over(config: Config, clients: Sequence[int]) -> Noise | None:
    """The noise of private tasks in a run of these clients."""
    return None if config.privacy.unit == "none" else config.noise(config.schedule(clients).most)


def contract_for(config: Config, algorithm: Algorithm, noise: Noise | None, roster: Roster | None = None) -> Contract | None:
    """The contract of a run, or None where its algorithm declares no schedule. `noise`: that of private tasks."""
    schedule = algorithm.schedule
    if schedule is None:
        return None
    shown = config.shown_scores
    serving = tuple(replace(asked, leaves=tuple(leaf for leaf in asked.leaves if leaf[0] in shown)) for asked in schedule.serving)
    schedule = replace(schedule, serving=serving if shown else ())
    return make_contract(
        run=config.run.name, algorithm=algorithm.name, settings=config.hyper, rounds=config.rounds_with_scores, seed=config.run.seed,
        schedule=schedule, protection=config.protection, privacy=config.privacy, noise=noise, roster=roster,
        weights="examples" if config.training.weights == "examples" else "equal",
    )  # fmt: skip
