"""Runs to attack: the recorded one as an auditor has it, fresh ones with other seeds, and the unprotected twin of each.

A scene holds all messages and secrets of a run; `case_of` gives one adversary's view of it, with the truth that scores its guesses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...contract.protection import Protection
from ...contract.transcript import Message, Transcript, payload_rows
from ...engine import Engine
from ...errors import InputError, TrainingDiverged
from ...experiments.config.config import Config
from ...experiments.run.run import admit as admit_newcomers
from ...experiments.run.run import advance, begin, prepare, secrets_of, start
from ...privacy.settings import Privacy
from ...tasks.halves import HALVES
from ...types import Array, ClientData, Population
from ..adversary import AdversaryView, relays_to, released_at_last, view_of
from ..figures.leakage import BUDGETS, Budget, Case, Prior, prior_of, truth_of
from ..figures.plan import AuditPlan
from .clipped import compared_rows, engine_for
from .released_models import release_of_run

__all__ = ["AuditedRun", "case_of", "fresh_scene", "is_open", "protection_name", "recorded_scene", "reseeded", "simulator"]


@dataclass(eq=False)
class AuditedRun:
    """A run as the auditor has it: all messages and secrets, of which views are taken, and its unprotected twin.

    `reference` is the server's view of the `twin`.
    """

    seed: int
    config: Config
    population: Population
    messages: Sequence[Message]
    secrets: Mapping[str, Mapping[str, str]]
    reference: AdversaryView
    prior: Prior
    rounds: int | None = None
    twin: Sequence[Message] = ()

    def view(self, adversary: str) -> AdversaryView:
        """What the adversary is attacked with: its view of the first `rounds`."""
        whole = self.whole_view(adversary)
        return whole if self.rounds is None else whole.until(self.rounds)

    def whole_view(self, adversary: str) -> AdversaryView:
        view = view_of(self.messages, adversary, self.secrets, self.config.protection)
        return replace(view, shared_noise=self.config.privacy.unit == "client")


def reseeded(config: Config, seed: int) -> Config:
    """The same experiment with other seeds, of data and of everything else."""
    return config.with_("run", seed=seed).with_("data", seed=config.data.seed + seed - config.run.seed)


def recorded_scene(
    config: Config, population: Population, messages: Sequence[Message], secrets: Mapping[str, Mapping[str, str]], plan: AuditPlan,
    budget: Budget,
) -> AuditedRun:  # fmt: skip
    """The recorded run, and its unprotected twin: itself where nothing protects it. Raises `TrainingDiverged` that names the twin."""
    reference = _twin(config, population, plan.rounds) if plan.here else messages
    seen, cut = view_of(reference, "server", {}), plan.rounds if plan.cut else None
    seen = seen if cut is None else seen.until(cut)
    return AuditedRun(config.run.seed, config, population, messages, secrets, seen, _prior(config, population, budget), cut, reference)


def fresh_scene(config: Config, population: Population, rounds: int, budget: Budget = BUDGETS["standard"]) -> AuditedRun:
    """A run of `config` on `population` made for the attack, `rounds` long, kept in memory; and its unprotected twin.

    Raises `TrainingDiverged` that names the one which diverged.
    """
    reference = _twin(config, population, rounds)
    messages, secrets = (reference, _secrets_of(config, population)) if is_open(config) else _again(config, population, rounds)
    seen = view_of(reference, "server", {})
    return AuditedRun(config.run.seed, config, population, messages, secrets, seen, _prior(config, population, budget), twin=reference)


def is_open(config: Config) -> bool:
    """Whether nothing protects this run."""
    return config.protection == Protection() and config.privacy.unit == "none"


def _opened(config: Config) -> Config:
    """The same without protection: no transform, no secure sum, no minimum cohort size, no noise."""
    return replace(config, protection=Protection(), privacy=Privacy()).with_("run", audit_parties=("server",))


def protection_name(config: Config) -> str:
    """What protects a run, for tables: its protection and its differential privacy."""
    privacy = config.privacy
    return config.protection.name + ("" if privacy.unit == "none" else f", dp {privacy.unit} ε={privacy.epsilon:g}")


def _prior(config: Config, population: Population, budget: Budget) -> Prior:
    prior = prior_of(population, config.run.seed, budget.auxiliary, _rows_per_part(config), config)
    return replace(prior, simulate=simulator(config, population), simulate_open=simulator(_opened(config), population))


def _twin(config: Config, population: Population, rounds: int) -> list[Message]:
    """All messages of the unprotected twin of a run of `config`."""
    return _again(_opened(config), population, rounds, "the unprotected twin of the run")[0]


def _again(config: Config, population: Population, rounds: int, name: str = "the run") -> tuple[list[Message], dict[str, dict[str, str]]]:
    """All messages of a run of `config` in memory, and the secrets of the parties that are audited. Errors call the run `what`."""
    simulation = start(_recording(config), population=population)
    try:
        for _ in range(rounds):
            advance(simulation, scored=False)
        if rounds >= config.training.rounds:
            admit_newcomers(simulation)
        released = release_of_run(simulation, simulation.federation.transcript.messages, rounds)
    except TrainingDiverged as error:
        raise TrainingDiverged(f"{name} with seed {config.run.seed} diverged: {error}") from None
    finally:
        simulation.simulated.engine.close()
    return [*simulation.federation.transcript.messages, *released], secrets_of(simulation)


def _secrets_of(config: Config, population: Population) -> dict[str, dict[str, str]]:
    """The secrets of audited parties in a run without protection, where they open nothing."""
    return secrets_of(prepare(_recording(config), population=population))


def _recording(config: Config) -> Config:
    return config.recording_all()


class _Upload(Exception):
    """Raised when a simulated run has made its first comparison."""


class _UntilCompared(Transcript):
    """A transcript that stops its run at the first comparison."""

    def add(self, *parts: Any, **more: Any) -> None:
        super().add(*parts, **more)
        if self.messages[-1].operation == "gram":
            raise _Upload


def simulator(config: Config, population: Population) -> Callable[[Sequence[tuple[Array, Array]]], Array | None]:
    """What clients with given data (x, y) would have compared at the beginning of the public pipeline: rows (m, p, d), in the clear.

    Under `[privacy]` clipped, sketched and scaled as the clients' own, without noise.
    Only what is public of `population` is used: the shape of samples, the number of classes, the mean and deviation of pixels.
    Nothing of no clients.
    """

    def simulate(data: Sequence[tuple[Array, Array]]) -> Array | None:
        if not data:
            return None
        clients = tuple(ClientData(i, x, y, x[:0], y[:0]) for i, (x, y) in enumerate(data))
        people = replace(population, clients=clients, groups=(0,) * len(clients), notes=())
        alone = _opened(config).with_("data", newcomers=0)
        alone = alone.with_("training", participation=1.0, sampling="global", dropout=0.0, dropouts=(), weights="equal")
        alone = alone.recording_all()
        if "k" in config.algorithm:  # what is compared is the same; of a few clients there are no more clusters than these
            alone = alone.with_("algorithm", k=min(config.algorithm["k"], len(data)))
        if "landmarks" in config.algorithm:  # each client is compared as if it were one
            alone = alone.with_("algorithm", landmarks=max(config.algorithm["landmarks"], len(data)))
        try:
            simulation = prepare(alone, population=people, transcript=_UntilCompared("full"), engine=engine_for(config, Engine()))
            begin(simulation)
            advance(simulation, scored=False)
        except _Upload:
            (message,) = [message for message in simulation.federation.transcript.messages if message.operation == "gram"]
            rows = None if message.payload is None else np.asarray(message.payload["rows"], np.float64)
            return None if rows is None or len(rows) != len(data) else compared_rows(config, rows)
        except InputError:
            return None
        return None

    return simulate


def check_start(config: Config, population: Population) -> None:
    """Raises what a run of `config` would before it begins, and also in a first round of encrypted comparisons, whose rows may be too long,
    and of protected sums, whose clients may be too unequal."""
    simulation = prepare(config, population=population)
    try:
        if config.protection.encrypted or config.protection.sum != "none":
            begin(simulation)
            advance(simulation, scored=False)
    finally:
        simulation.simulated.close()


def _rows_per_part(config: Config) -> int:
    """The public number of signature rows for each label or half; 0 where all rows are of all samples."""
    compared = config.compared
    return compared.rows // HALVES if compared.halves else compared.rows if compared.per_label else 0


def case_of(scene: AuditedRun, adversary: str, budget: Budget = BUDGETS["standard"]) -> Case:
    """One adversary on one run. What clients relay to its coalition is in the reference, too, and so are released models."""
    view = scene.view(adversary)
    relayed = {message.index: message for message in relays_to(scene.twin, view.coalition)}
    reference = scene.reference
    if relayed:
        reference = replace(reference, messages=tuple(relayed.get(message.index, message) for message in reference.messages))
    if adversary == "released" and scene.rounds is None:
        reference = replace(reference, messages=(*reference.messages, *released_at_last(scene.twin)))
    rows: dict[int, Array] = {}
    for message in scene.reference.select("gram"):
        if message.payload is not None and "rows" in message.payload:
            for client, row in zip(payload_rows(message), message.payload["rows"], strict=True):
                rows.setdefault(client, np.asarray(row, np.float64))
    truth, protection = truth_of(scene.population), protection_name(scene.config)
    record = scene.view("server")
    return Case(view, reference, scene.prior, truth, protection, scene.seed, budget, rows, record)
