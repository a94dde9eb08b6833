"""Local training (SOLO): every client alone, no operation that releases anything. The reference that collaboration must beat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..contract.handles import OwnAddend, Shared
from ..contract.operations import Federation
from ..contract.schedule import Schedule, request, scores
from ..contract.transcript import RoundRecord
from ..tasks.evaluation import Evaluate
from ..tasks.training import Start, Train
from .interface import Algorithm, AlgorithmSpec, Served, no_groups

__all__ = ["local"]


@dataclass(frozen=True, eq=False)
class LocalState:
    """Each client's own model, a sum that has nothing but clients' own parts."""

    model: Shared


def local(train: Train, *, seed: int = 0) -> Algorithm:
    """Sampled clients go on training their own models; the sampling, batches and optimiser resets are those of FedAvg."""
    start = Start(train.model, seed)

    def init(federation: Federation) -> LocalState:
        return LocalState(Shared(own=(OwnAddend(federation.compute(start)["model"]),)))

    def round(federation: Federation, state: LocalState) -> tuple[LocalState, RoundRecord]:
        cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
        held = federation.compute(train.at(federation.round), {"model": state.model}, on=cohort)
        model = federation.fold(state.model + Shared(own=(OwnAddend(held["update"]),)))
        return LocalState(model), RoundRecord(federation.round, cohort)

    def serve(state: LocalState) -> Served:
        return Served(Evaluate(train.model), {"model": state.model})

    def admit(federation: Federation, state: LocalState, newcomers: Sequence[int]) -> tuple[LocalState, Mapping[str, object]]:
        fresh = federation.compute(start, on=newcomers)
        return LocalState(federation.fold(state.model + Shared(own=(OwnAddend(fresh["model"]),)))), {}

    schedule = Schedule((request(start),), (request(train),), (request(start),), (scores(Evaluate(train.model)),))
    return Algorithm("local", (), init, round, serve, admit, schedule=schedule)


LOCAL = AlgorithmSpec(
    "local", local, "every client alone",
    states=(LocalState,),
    sample_refused="its clients train without noise, and a failure would be reported; nothing else leaves them, so run it without privacy",
    knowledge=no_groups,
)  # fmt: skip
