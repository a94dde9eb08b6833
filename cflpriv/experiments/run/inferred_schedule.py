"""The schedule of an own algorithm that declares none, from an honest simulation: what `cflpriv contract --infer` writes."""

import warnings
from dataclasses import replace
from pathlib import Path

from ...contract.schedule import Schedule, scores
from ...data import build_population
from ...errors import CflprivWarning, InputError
from ...federation.observed_schedule import Watched, observed_schedule
from ...federation.transport import Transport
from ...types import Population
from ..config.config import Config
from ..newcomers import held_back
from .loop import advance, begin
from .run import admit, prepare

__all__ = ["inferred_schedule"]


def inferred_schedule(
    config: Config, rounds: int | None = None, data_dir: str | Path | None = None, population: Population | None = None
) -> Schedule:
    """All that a simulation of `rounds` (default: all that the configuration has) asks of clients, and the request for their scores.

    What later rounds would ask is not in it, nor what happens in some runs only, such as the admission of new clients where
    `data.newcomers` is 0. Warns where a round was skipped. Raises `InputError` for an algorithm that declares its schedule.
    """
    config = config.with_("run", schedule="")
    population = population or build_population(config.data, data_dir)
    if config.algorithm_for(population).schedule is not None:
        raise InputError(f"algorithm {config.algorithm['name']!r}: declares its schedule; there is nothing to infer")
    most = config.training.rounds if rounds is None else rounds
    if not 0 <= most <= config.training.rounds:
        raise InputError(f"rounds = {most}: the configuration has {config.training.rounds}")
    seen: list[Watched] = []

    def watch(transport: Transport) -> Transport:
        seen.append(Watched(transport, held_back(population.group_of, config.data.newcomers)))
        return seen[0]

    run = prepare(config, data_dir, population, watch=watch)
    begin(run)
    skipped = [row["skipped"] for row in (advance(run) for _ in range(most)) if row["skipped"]]
    if skipped:
        warnings.warn(f"{len(skipped)} rounds were skipped, so the schedule may lack requests: {skipped[0]}", CflprivWarning, stacklevel=2)
    admit(run)
    schedule = observed_schedule(seen[0].observed, config.train_for(population))
    served = run.algorithm.serve(run.state).task
    run.simulated.close()
    return (
        replace(schedule, serving=(scores(served),)) if "count" in served.parts and {"correct", "errors"} & set(served.parts) else schedule
    )
