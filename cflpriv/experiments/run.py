"""One experiment in memory: start, rounds, newcomers, finish. `folder` writes it down."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms.interface import Algorithm
from ..clustering.scores import ari, perplexity, spread
from ..contract.transcript import Transcript
from ..data import build_population
from ..engine import Engine
from ..engine.threads import one_thread
from ..errors import InputError
from ..federation.server import RemoteFederation
from ..plugins import load_plugin
from ..protocols.entropy import public_entropy, system_entropy
from ..protocols.errors import LocalError, TooFewClients
from ..protocols.ledger import BudgetExceeded
from ..protocols.orthonormal import HAAR_LIMIT
from ..transports.memory import Faults
from ..transports.simulation import Simulated, simulate
from ..types import Array, Population
from .communication import traffic_so_far, traffic_summary
from .config import Config
from .measure import local_scores, served_accuracy, served_scores
from .newcomers import fine_tuned_accuracy, held_back
from .private import Books, books, spent, summed_up
from .resume import Counted

__all__ = [
    "Simulation", "admit", "advance", "begin", "estimate_record_bytes", "finish", "population_digest", "prepare", "secrets_of",
    "several_models", "start",
]  # fmt: skip

LAST = 10
"""Accuracies are also averaged over those of this many last rounds that were evaluated: one round moves by points."""


@dataclass
class Simulation:
    """An experiment under way. `rows` has one mapping per round, as in rounds.jsonl."""

    config: Config
    population: Population
    algorithm: Algorithm
    simulated: Simulated
    state: Any
    rows: list[dict[str, Any]] = field(default_factory=list)
    newcomers: tuple[int, ...] = ()
    admitted: Mapping[str, Any] | None = None
    entropy: Mapping[str, Counted] = field(default_factory=dict)
    digest: str = ""
    books: Books | None = None
    stopped: str | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def federation(self) -> RemoteFederation:
        """The server's side of it."""
        return self.simulated.federation


def start(config: Config, data_dir: str | Path | None = None, population: Population | None = None) -> Simulation:
    """Build the clients and the federation, and run the algorithm's beginning (PACFL clusters here). Raises `InputError`."""
    simulation = prepare(config, data_dir, population)
    begin(simulation)
    return simulation


def prepare(config: Config, data_dir: str | Path | None = None, population: Population | None = None, **options: Any) -> Simulation:
    """Build the clients and the federation. `options` of `simulate` take the place of those of the configuration. Raises `InputError`."""
    began = time.perf_counter()
    for file in config.run.plugins:  # a process that was sent the configuration has not read it
        load_plugin(file)
    noise = config.noise()
    population = population or build_population(config.data, data_dir)
    ids = sorted(client.id for client in population.clients)
    if config.data.newcomers >= len(ids):
        raise InputError(f"data.newcomers = {config.data.newcomers}: leaves no client to train of {len(ids)}")
    newcomers = held_back(population, config.data.newcomers)
    algorithm = config.algorithm_for(population)
    _check(config, population, ids, newcomers)
    if newcomers and algorithm.admit is None:
        raise InputError(f"data.newcomers = {config.data.newcomers}: algorithm {algorithm.name!r} takes no newcomers")
    if config.protection.small_clusters == "merge" and "gram" not in algorithm.verbs:
        raise InputError(f"protection.small_clusters = 'merge': {algorithm.name!r} has no similarity to merge by; use 'wait' or 'local'")
    run = config.run
    sources: dict[str, Counted] = {}

    def entropy(party: str) -> Counted:
        source = public_entropy(f"{run.seed} {party}") if run.insecure_test_entropy else system_entropy
        return sources.setdefault(party, Counted(source))

    private = books(config, algorithm, noise, entropy("noise"))
    given: dict[str, Any] = {
        "protection": config.protection,
        "sampling": config.sampling(),
        "seed": run.seed,
        "transcript": Transcript(run.record, run.record_rounds or None, run.record_clients or None),
        "present": [client for client in ids if client not in newcomers],
        "entropy": entropy,
        "faults": Faults(run.seed, config.training.dropout, {(round, client): stage for round, client, stage in config.training.dropouts}),
        "engine": Engine(run.engine, run.workers, run.device, precision=run.precision),
        "privacy": config.privacy,
        "transport": run.transport,
        "release_policy": run.release_policy,
    }
    given |= {} if private is None else private.options(config.protection, len(ids))
    simulated = simulate(population.clients, **{**given, **options})
    simulation = Simulation(
        config, population, algorithm, simulated, None, newcomers=newcomers, entropy=sources, books=private, started=began
    )
    secrets_of(simulation)  # a party that is none is refused before anything runs
    return simulation


def begin(simulation: Simulation) -> None:
    """Run the algorithm's beginning."""
    with one_thread():
        try:
            simulation.state = simulation.algorithm.init(simulation.federation)
        except BudgetExceeded as error:
            raise InputError(f"privacy.epsilon = {simulation.config.privacy.epsilon}: the beginning alone costs more ({error})") from None


def secrets_of(simulation: Simulation) -> dict[str, dict[str, str]]:
    """The secrets of `run.audit_parties`: of clients also where they have none, of the key holder once it has any."""
    found = {party: simulation.simulated.secrets(party) for party in simulation.config.run.audit_parties}
    return {party: secrets for party, secrets in found.items() if secrets or party.startswith("client:")}


def _check(config: Config, population: Population, ids: list[int], newcomers: tuple[int, ...]) -> None:
    """What config and data can only be judged for together, before anything runs."""
    dimension = config.model_for(population).dimension
    if config.protection.sum == "haar" and dimension > HAAR_LIMIT:
        raise InputError(
            f"protection.sum = 'haar': takes models of up to {HAAR_LIMIT} parameters; {config.model.name!r} has {dimension} here"
        )
    present = len(ids) - len(newcomers)
    if config.protection.smallest_sum > present:
        raise InputError(
            f"protection.min_cohort = {config.protection.smallest_sum}: there are only {present} clients, so nothing could be summed"
        )
    for name, values, known in (
        ("record_rounds", config.run.record_rounds, range(-1, config.training.rounds)),
        ("record_clients", config.run.record_clients, ids),
    ):
        for value in values:
            if value not in known:
                raise InputError(f"run.{name} = {list(values)}: {value} is not one of them here")


def population_digest(population: Population) -> str:
    """A digest of all clients' data, whatever their order, by which an audit knows that it sees the same."""
    seen: dict[int, bytes] = {}

    def of(array: Array) -> bytes:
        if id(array) not in seen:
            seen[id(array)] = blake2b(
                f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).data, digest_size=16
            ).digest()
        return seen[id(array)]

    whole = blake2b(digest_size=16)
    for client in sorted(population.clients, key=lambda client: client.id):
        whole.update(f"{client.id}|".encode())
        for array in (client.x_train, client.y_train, client.x_test, client.y_test):
            whole.update(of(array))
    return whole.hexdigest()


def advance(simulation: Simulation) -> dict[str, Any]:
    """Run and measure one round; the new row. A round in which no group reaches the floor changes nothing, and says so."""
    s = simulation
    number = len(s.rows)
    began = time.perf_counter()
    s.federation.begin_round(number)
    if s.books is not None:
        s.books.ledger.round = number
    row: dict[str, Any] = {"round": number, "cohort": [], "skipped": None}
    with one_thread():
        try:
            s.state, record = s.algorithm.round(s.federation, s.state)
            row |= {"cohort": list(record.cohort), "labels": None if record.labels is None else list(record.labels), **record.notes}
        except TooFewClients as error:
            row["skipped"] = str(error)
        except BudgetExceeded as error:  # the run ends with what it has
            s.stopped = row["skipped"] = str(error)
        if number % s.config.run.evaluate_every == 0 or number >= s.config.training.rounds - LAST or s.stopped:
            row |= _measured(s, s.federation.clients)
    row["upload_bytes"], row["download_bytes"] = s.federation.transcript.upload_bytes, s.federation.transcript.download_bytes
    row |= traffic_so_far(s.federation, number)
    row |= spent(s.books, s.federation.clients)
    row["seconds"] = time.perf_counter() - began
    row["protection_seconds"] = s.federation.protection_seconds  # since the start: gram and mean, computing and recording
    s.rows.append(row)
    return row


def _measured(s: Simulation, clients: tuple[int, ...]) -> dict[str, Any]:
    accuracy, loss = served_scores(s.simulated, s.algorithm.serve(s.state), clients)
    local, local_loss = local_scores(s.simulated, s.config.model_for(s.population), clients)
    per_client = {"clients": list(clients), "accuracy": _listed(accuracy), "local_accuracy": _listed(local)}
    scores: dict[str, Any] = {**spread(accuracy, "accuracy"), **spread(local, "local_accuracy")}
    if s.config.model.name == "lstm":  # next words are judged by exp(mean loss) on each client's own text; the worst is the largest
        for name, values in (("perplexity", perplexity(loss, accuracy)), ("local_perplexity", perplexity(local_loss, local))):
            worst = float(np.nanmax(values)) if np.isfinite(values).any() else None
            scores |= {**spread(values, name), f"{name}_worst": worst}
    return {**scores, "per_client": per_client}


def _listed(values: Array) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def admit(simulation: Simulation) -> None:
    """Let the newcomers join after training, measured before anything else changes."""
    s = simulation
    if not s.newcomers or s.algorithm.admit is None:
        return
    s.simulated.join(s.newcomers)
    with one_thread():
        try:
            s.state, notes = s.algorithm.admit(s.federation, s.state, s.newcomers)
        except BudgetExceeded as error:  # as where a run was interrupted here before: nobody new then, and the run ends with what it has
            s.stopped = str(error)
            return
        served = s.algorithm.serve(s.state)
        accuracy = served_accuracy(s.simulated, served, s.newcomers)
        scores = spread(accuracy, "newcomer_accuracy")
        if epochs := s.config.data.newcomer_epochs:
            train = replace(s.config.train_for(s.population).at(s.federation.round), epochs=epochs)
            tuned = fine_tuned_accuracy(s.simulated, served, train, s.newcomers)
            scores = {**scores, **spread(tuned, "newcomer_tuned_accuracy")}
    s.admitted = {"clients": list(s.newcomers), **notes, **scores, "accuracy": _listed(accuracy)}


def several_models(algorithm: Algorithm, state: Any) -> bool:
    """Whether clients have one of several models; without a clustering the server then does not know how many are in use."""
    return any(isinstance(value, list | tuple) and len(value) > 1 for value in algorithm.serve(state).params.values())


def finish(simulation: Simulation) -> dict[str, Any]:
    """The summary of what has run so far, as in summary.json.

    Newcomers count in what is said of "newcomers" and in traffic only: accuracies, `ari` and `clusters` are those of the clients that
    trained. `clusters` that nobody is in do not count.
    """
    s = simulation
    described = s.algorithm.describe(s.state)
    clustering = described.get("clustering")
    truth = {client.id: group for client, group in zip(s.population.clients, s.population.groups, strict=True)}
    trained = () if clustering is None else zip(clustering.clients, clustering.labels, strict=True)
    labels = {client: label for client, label in trained if client not in s.newcomers}
    evaluated = [row for row in s.rows if row.get("accuracy_mean") is not None]
    last = [row for row in evaluated if row["round"] > evaluated[-1]["round"] - LAST]
    final = evaluated[-1] if evaluated else _measured(s, tuple(client for client in s.federation.clients if client not in s.newcomers))
    names = [f"{kind}_{what}" for kind in ("accuracy", "local_accuracy") for what in ("mean", "std", "worst")]
    return {
        "algorithm": s.algorithm.name,
        "dataset": s.population.name,
        "protection": s.config.protection.name,
        "release_policy": s.config.run.release_policy,
        **{name: final[name] for name in names},
        **{name: value for name, value in final.items() if "perplexity" in name},
        "accuracy_mean_last_rounds": _mean([row["accuracy_mean"] for row in last]),
        "local_accuracy_mean_last_rounds": _mean([row["local_accuracy_mean"] for row in last]),
        "last_rounds": len(last),
        "ari": ari([truth[client] for client in labels], list(labels.values())) if labels else None,
        "clusters": len(set(labels.values())) or (1 if "mean" in s.algorithm.verbs and not several_models(s.algorithm, s.state) else None),
        "true_groups": len(set(truth.values())),
        "clear_structure": described.get("clear"),
        "cut_rule": described.get("rule"),
        "rounds": len(s.rows),
        "rounds_planned": s.config.training.rounds,
        "rounds_skipped": sum(row["skipped"] is not None for row in s.rows),
        "group_rounds_without_sum": sum(len(row.get("unchanged_clusters", ())) for row in s.rows),
        "clipped_client_rounds": sum(row.get("clipped_clients", 0) for row in s.rows),
        "clients": len(s.population.clients),
        "parameters": s.config.model_for(s.population).dimension,
        "upload_bytes": s.federation.transcript.upload_bytes,
        "download_bytes": s.federation.transcript.download_bytes,
        **traffic_summary(s.federation, s.rows, s.config.run.target_accuracy, len(s.population.clients) - len(s.newcomers)),
        "engine_paths": {f"{task}: {path}": count for (task, path), count in sorted(s.simulated.engine.paths.items())},
        "newcomers": s.admitted,
        **summed_up(s.books, s.stopped),
        "messages": len(s.federation.transcript.messages),
        "data_digest": s.digest or population_digest(s.population),
        "notes": list(s.population.notes),
        "seconds": time.perf_counter() - s.started,
    }


def _mean(values: list[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return float(np.mean(kept)) if kept else None


def estimate_record_bytes(config: Config, population: Population) -> int:
    """About how much the transcript's payloads will take: models down and updates up, for the rounds and clients that are kept.

    Of comparisons one of all clients is counted, where everything is kept: how many there will be is the algorithm's to find out.
    """
    if config.run.record == "headers":
        return 0
    model = config.model_for(population)
    rounds = config.training.rounds
    clients = max(1, round(config.training.participation * len(population.clients)))
    if config.run.record == "attackable":
        rounds = len({r for r in config.run.record_rounds if 0 <= r < rounds}) if config.run.record_rounds else rounds
        clients = min(clients, len(config.run.record_clients) or clients)
    down = 2  # cluster models, each once
    compared = _compared_bytes(config, population) if config.run.record == "full" else 0
    return rounds * model.dimension * (8 if model.dtype == "float64" else 4) * (clients + down) + compared


def _compared_bytes(config: Config, population: Population) -> int:
    """What one comparison of all clients takes: vectors in float64, or ciphertexts, and of each pair a product for the key holder."""
    if "gram" not in config.algorithm_for(population).verbs:
        return 0
    clients, protection = len(population.clients), config.protection
    compared = config.spec.compared(config.algorithm)
    p, dimension = compared.rows, int(np.prod(population.shape)) if compared.of_samples else config.model_for(population).dimension
    sketch_dim = protection.sketch_dim if "sketch" in protection.gram else None
    if "ckks" not in protection.gram:
        return clients * p * min(dimension, sketch_dim or dimension) * 8
    from ..aggregation.ckks_settings import CkksSettings  # the protocol is loaded where it is used

    settings = CkksSettings.of(protection)
    try:
        packing = settings.packing(p, dimension)
    except LocalError:  # too long: the run says so
        return 0
    ciphertext = settings.parameters().ciphertext_bytes
    pairs = clients * (min(protection.landmarks, clients) or (clients + 1) / 2)
    return round(ciphertext * (2 * packing.chunks * clients + 1.5 * pairs / (settings.group or packing.group)))
