"""A simulated experiment in memory: start, rounds, new clients, finish. `folder` writes it to disk."""

import json
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...algorithms.interface import Algorithm, no_groups
from ...class_counts import as_counts, pooled
from ...clustering.scores import ari, perplexity, spread
from ...console import only
from ...contract.handles import Held, placed
from ...data import build_population
from ...engine import Engine, Result
from ...engine.device import using
from ...engine.threads import one_thread
from ...error_sums import pooled_errors
from ...errors import InputError, InputWarning
from ...files import PRIVATE, write_atomically
from ...plugins import load_plugin
from ...protocols.bounded_files import read_json
from ...protocols.entropy import public_entropy, system_entropy
from ...protocols.errors import LocalError, TooFewClients
from ...protocols.orthonormal import HAAR_LIMIT
from ...transports.memory import Faults
from ...transports.simulation import simulate
from ...types import Array, Population
from ..config.config import Config
from ..metrics import check_metrics
from ..newcomers import fine_tuned_results, held_back
from .agreed import contract_for
from .class_scores import class_scores, majority_label
from .loop import OVER_BUDGET, Backend, Experiment, advance, begin, device_of, finish, input_warnings, population_digest, transcript_of
from .measure import chosen, local_results, recomputed, scores_of, served_results
from .number_scores import client_errors, error_spread, mean_label, number_scores
from .private import run_ledger
from .resume import Counted
from .training_noise import due, training_noise

__all__ = [
    "Experiment", "admit", "advance", "begin", "check_run", "estimate_record_bytes", "finish", "population_digest", "prepare", "secrets_of",
    "start",
]  # fmt: skip


def start(config: Config, data_dir: str | Path | None = None, population: Population | None = None) -> Experiment:
    """Build the clients and the federation, and run the algorithm's beginning (PACFL clusters here). Raises `InputError`."""
    run = prepare(config, data_dir, population)
    begin(run)
    return run


def prepare(config: Config, data_dir: str | Path | None = None, population: Population | None = None, **options: Any) -> Experiment:
    """Build the clients and the federation. `options` of `simulate` take the place of those of the configuration. Raises `InputError`."""
    began = time.perf_counter()
    for file in config.run.plugins:  # a process that was sent the configuration has not read it
        load_plugin(file)
    config.check_noise()
    population = config.judged(population or build_population(config.data, data_dir))
    ids = sorted(client.id for client in population.clients)
    if config.data.newcomers >= len(ids):
        raise InputError(f"data.newcomers = {config.data.newcomers}: leaves no client to train of {len(ids)}")
    newcomers = held_back(population.group_of, config.data.newcomers)
    trained = tuple(client for client in ids if client not in newcomers)
    late = {change.client for change in population.changes if change.data is None}
    if later := sorted(late.intersection(newcomers)):
        raise InputError(
            f"{config.data.changing}: clients {later} join in a round, and data.newcomers = {len(newcomers)} has them join after training"
        )
    present = tuple(client for client in trained if client not in late)
    asked = None if config.privacy.unit == "none" else config.schedule(trained).most
    noise = config.noise(asked)
    config, chosen_values = config.fitted(population)
    algorithm = config.algorithm_for(population)
    check_run(config, population, algorithm, ids, newcomers)
    settings, sources = config.run, dict[str, Counted]()

    def entropy(party: str) -> Counted:
        source = public_entropy(f"{settings.seed} {party}") if settings.insecure_test_entropy else system_entropy
        return sources.setdefault(party, Counted(source))

    private = run_ledger(config, algorithm, noise, entropy("noise"), asked, config.bands(trained))
    dropouts = {(round, client): stage for round, client, stage in config.training.dropouts}
    arguments: dict[str, Any] = {
        "protection": config.protection,
        "sampling": config.sampling(),
        "seed": settings.seed,
        "transcript": transcript_of(config, ids),
        "present": present,
        "entropy": entropy,
        "faults": Faults(settings.seed, config.training.dropout, dropouts),
        "engine": Engine(settings.engine, settings.workers, settings.device, precision=settings.precision, noise=settings.noise_place),
        "privacy": config.privacy,
        "transport": settings.transport,
        "release_policy": settings.release_policy,
    }
    if config.run.release_policy == "strict":
        arguments["contract"] = contract_for(config, algorithm, noise)
    arguments |= {} if private is None else private.options(config.protection)
    simulated = simulate(population.clients, **{**arguments, **options})
    backend = Backend(
        welcome=partial(_join, sources),
        rejoin=_nobody_returns,
        begin_round=_begin_round,
        scores=_scores,
        evidence=recomputed,
        saved=partial(_saved, sources),
        summary=lambda run: {"engine_paths": {f"{task}: {path}": count for (task, path), count in sorted(simulated.engine.paths.items())}},
        write=lambda run, out: _write_secrets(early, run, out),
        close=lambda run: simulated.close(),
        skips=(TooFewClients,),
        save_every=settings.checkpoint_every,
    )
    truth = population.truth
    run = Experiment(
        config, population, algorithm, simulated.federation, backend, present, truth, private, newcomers, simulated, started=began,
        baseline=mean_label(population, trained) if population.label_range else majority_label(population, trained), chosen=chosen_values,
    )  # fmt: skip
    early = secrets_of(run)  # a party that is none is refused before anything runs
    return run


def secrets_of(run: Experiment) -> dict[str, dict[str, str]]:
    """The secrets of `run.audit_parties`: of clients also where they have none, of the key holder once it has any."""
    collected = {party: run.simulated.secrets(party) for party in run.config.run.audit_parties}
    return {party: secrets for party, secrets in collected.items() if secrets or party.startswith("client:")}


def check_run(config: Config, population: Population, algorithm: Algorithm, clients: Sequence[int], newcomers: Sequence[int] = ()) -> None:
    """What configuration, algorithm and data can only be judged for together, before anything runs.

    Warns of a run that can form no clusters. Raises `InputError` naming keys.
    """
    protection, dimension = config.protection, config.model_for(population).dimension
    check_metrics(config.run.metrics, population.classes)
    for doubt in input_warnings(config, population):
        warnings.warn(doubt, InputWarning, stacklevel=2)
    if newcomers and algorithm.admit is None:
        raise InputError(f"data.newcomers = {len(newcomers)}: algorithm {algorithm.name!r} takes no newcomers")
    for change in population.changes:
        if change.round >= config.training.rounds:
            raise InputError(f"{config.data.changing}: round {change.round} of a run of {config.training.rounds} rounds, counted from 0")
        if change.data is None and algorithm.admit is None:
            raise InputError(f"{config.data.changing}: client {change.client} joins, and algorithm {algorithm.name!r} takes no newcomers")
    groups = config.spec.knowledge is not no_groups  # where none are formed, none is small
    if protection.small_clusters == "merge" and groups and "gram" not in algorithm.operations:
        raise InputError(f"protection.small_clusters = 'merge': {algorithm.name!r} has no similarity to merge by; use 'wait' or 'local'")
    if protection.sum == "haar" and dimension > HAAR_LIMIT:
        raise InputError(
            f"protection.sum = 'haar': takes models of up to {HAAR_LIMIT} parameters; {config.model.name!r} has {dimension} here"
        )
    present = len(clients) - len(newcomers)
    if protection.smallest_group > present:
        more = f" under robust = {protection.robust!r} takes {protection.smallest_group} clients a sum"
        under = "" if protection.robust == "none" else more
        raise InputError(f"protection.min_cohort = {protection.smallest_sum}{under}: {only(present, 'client')}, so nothing could be summed")
    for name, values, known in (
        ("record_rounds", config.run.record_rounds, range(-1, config.training.rounds)),
        ("record_clients", config.run.record_clients, clients),
    ):
        for value in values:
            if value not in known:
                raise InputError(f"run.{name} = {list(values)}: {value} is not one of them here")


# --- what a simulation does at each point of the loop -----------------------------------------------------------------------------------


def _join(sources: Mapping[str, Counted], run: Experiment, progress: Mapping[str, Any] | None) -> None:
    """At the beginning all are there; a resumed run has those of its checkpoint, with their entropy."""
    if progress is None:
        return
    run.simulated.engine.paths.update({(task, path): count for task, path, count in progress["engine_paths"]})
    for number in range(progress["rounds"]):
        _change_data(run, number)
    run.simulated.join(progress["online"])
    drawn = progress["entropy"]  # last: greeting clients again draws challenges
    for party in sources.keys() & drawn.keys():
        sources[party].skip(drawn[party])
    run.simulated.skip(drawn)


def _nobody_returns(run: Experiment, error: Exception) -> None:
    """A simulated client that drops out in the beginning would do so again."""
    raise error


def _begin_round(run: Experiment, number: int) -> Collection[int]:
    """Who joins by `data.drift` is admitted. Who comes back after a dropout took part in the beginning; newcomers come after training."""
    joining = _change_data(run, number)
    if joining:
        run.simulated.join(joining)
    run.federation.begin_round(number)
    return joining


def _change_data(run: Experiment, number: int) -> tuple[int, ...]:
    """Give clients the data that they have from this round on; those that join in it, which are expected from then on."""
    changes = [change for change in run.population.changes if change.round == number]
    run.simulated.change([change.data for change in changes if change.data is not None])
    run.truth = {**run.truth, **{change.client: change.group for change in changes if change.client in run.truth}}
    joining = tuple(change.client for change in changes if change.data is None)
    run.expected = tuple(sorted({*run.expected, *joining}))
    return joining


def _scores(run: Experiment, clients: tuple[int, ...]) -> Mapping[str, Any]:
    """What the experimenter sees, outside the protocol."""
    results = served_results(run.simulated, run.algorithm.serve(run.state), clients)
    model = run.config.model_for(run.population)
    of_local = local_results(run.simulated, model, clients)
    accuracy, loss = scores_of(results)
    local, local_loss = scores_of(of_local or [{}] * len(clients))
    per_client = {"clients": list(clients), "accuracy": _listed(accuracy), "local_accuracy": _listed(local)}
    scores: dict[str, Any] = {**spread(accuracy, "accuracy"), **spread(local, "local_accuracy")}
    if run.population.label_range:
        of_numbers, per_client["error"] = _of_clients(run, results, "error")
        of_local_numbers, per_client["local_error"] = _of_clients(run, of_local or [{}] * len(clients), "local_error")
        scores |= {**of_numbers, **of_local_numbers}
    if run.config.model.name == "lstm":  # next words are judged by exp(mean loss) on each client's own text; the worst is the largest
        for name, values in (("perplexity", perplexity(loss, accuracy)), ("local_perplexity", perplexity(local_loss, local))):
            worst = float(np.nanmax(values)) if np.isfinite(values).any() else None
            scores |= {**spread(values, name), f"{name}_worst": worst}
    choices = chosen(results)
    which = run.algorithm.serve(run.state).which
    labels = which if which is not None and not isinstance(which, Held) else None
    if choices is not None:
        labels = dict(zip(clients, choices, strict=True))
    if run.population.label_range:
        scores |= number_scores(results, clients, run.population.label_range, labels, run.baseline)
        if of_local and (errors := pooled_errors(of_local)) is not None and np.isfinite(errors.r2):
            scores["local_r2"] = errors.r2
    else:
        scores |= class_scores(results, clients, labels, None if run.baseline is None else int(run.baseline), run.config.run.metrics)
    if of_local and (counts := pooled(of_local)) is not None and (by_class := as_counts(counts)) is not None:
        scores["local_balanced_accuracy"] = by_class.balanced_accuracy
    private = None if run.run_ledger is None else run.run_ledger.sample_ledger
    if private is not None and private.noise.training and due(run.federation.round, run.config.training.rounds):
        epochs, share = run.config.training.epochs, run.config.training.participation
        of = None if labels is None else {client: labels[client] for client in placed(labels, clients)}
        views, sets = run.config.training.augment, run.config.protection.helper_sets
        scores |= training_noise(run.simulated, model, private.noise, epochs, clients, of, share, views, sets)
    if choices is not None and (known := [i for i, client in enumerate(clients) if client in run.truth]):
        scores["choice_ari"] = ari([run.truth[clients[i]] for i in known], [choices[i] for i in known])
    return {**scores, "per_client": per_client}


def _saved(sources: Mapping[str, Counted], run: Experiment) -> Mapping[str, Any]:
    here = {party: source.drawn for party, source in sources.items()}
    return {
        "entropy": {**here, **run.simulated.drawn()} if run.config.run.insecure_test_entropy else {},
        "online": sorted(run.simulated.online),
        "engine_paths": [[*way, count] for way, count in sorted(run.simulated.engine.paths.items())],
    }


def _write_secrets(early: Mapping[str, Mapping[str, str]], run: Experiment, out: Path) -> None:
    """The key holder makes its keys when an epoch opens. Clients erase some of theirs; those who collude do not, so `early` ones stay."""
    for party, secrets in secrets_of(run).items():
        path = out / "secrets" / f"{party.replace(':', '_')}.json"
        path.parent.mkdir(exist_ok=True, mode=0o700)
        try:
            written = dict(read_json(path)) if path.is_file() else {}
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: is damaged ({error}); remove it and --resume, without the secrets that were in it alone") from None
        write_atomically(path, json.dumps({"party": party, **secrets, **early.get(party, {}), **written}) + "\n", PRIVATE)


def _listed(values: Array) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def admit(run: Experiment) -> None:
    """Let the newcomers of a simulation join after training, measured before anything else changes."""
    if not run.newcomers or run.algorithm.admit is None:
        return
    run.simulated.join(run.newcomers)
    with one_thread(), using(device_of(run.config)):
        try:
            run.state, notes = run.algorithm.admit(run.federation, run.state, run.newcomers)
        except OVER_BUDGET as error:  # as where a run was interrupted here before: then no new clients join, and the run ends
            run.stopped = str(error)
            return
        served = run.algorithm.serve(run.state)
        name = "error" if run.population.label_range else "accuracy"
        scores, each = _of_clients(run, served_results(run.simulated, served, run.newcomers), f"newcomer_{name}")
        if epochs := run.config.data.newcomer_epochs:
            train = replace(run.config.train_for(run.population).at(run.federation.round), epochs=epochs)
            tuned, _ = _of_clients(run, fine_tuned_results(run.simulated, served, train, run.newcomers), f"newcomer_tuned_{name}")
            scores = {**scores, **tuned}
    run.admitted = {"clients": list(run.newcomers), **notes, **scores, name: each}


def _of_clients(run: Experiment, results: Sequence[Result], name: str) -> tuple[dict[str, float | None], list[float | None]]:
    """Mean, deviation and worst of clients' own scores under keys that begin with `name`, and the scores: accuracies, or errors."""
    if run.population.label_range:
        errors = client_errors(results, run.config.model_for(run.population).loss, run.population.label_range)
        return error_spread(errors, name), _listed(errors)
    accuracy = scores_of(results)[0]
    return dict(spread(accuracy, name)), _listed(accuracy)


def estimate_record_bytes(config: Config, population: Population, present: int = 0) -> int:
    """About how much the transcript's payloads will take: models down and updates up, for the rounds and clients that are kept.

    Of comparisons one of all clients is counted, where everything is kept: how many there will be is the algorithm's to find out. There are
    as many clients as in the population, or `present`.
    """
    present = present or len(population.clients)
    if config.run.record == "headers":
        return 0
    model = config.model_for(population)
    rounds = config.training.rounds
    clients = max(1, round(config.training.participation * present))
    if config.run.record == "attackable":
        rounds = len({r for r in config.run.record_rounds if 0 <= r < rounds}) if config.run.record_rounds else rounds
        clients = min(clients, len(config.run.record_clients) or config.run.record_sample or clients)
    down = 2  # cluster models, each once
    compared = _compared_bytes(config, population, present) if config.run.record == "full" else 0
    return rounds * model.dimension * (8 if model.dtype == "float64" else 4) * (clients + down) + compared


def _compared_bytes(config: Config, population: Population, clients: int) -> int:
    """What one comparison of all clients takes: vectors in float64, ciphertexts and a product of each pair for the key holder, or shares
    and twice the contributions to the Gram matrix.
    """
    if "gram" not in config.algorithm_for(population).operations:
        return 0
    protection = config.protection
    compared = config.compared
    p, dimension = compared.rows, int(np.prod(population.shape)) if compared.of_samples else config.model_for(population).dimension
    sketch_dim = protection.sketch_dim if "sketch" in protection.gram else None
    if protection.comparison.shared:
        contributions = 2 * (protection.fewest_holders - 1) * (clients * p) ** 2
        return 8 * (2 * protection.share_holders * clients * p * min(dimension, sketch_dim or dimension) + contributions)
    if "ckks" not in protection.gram:
        return clients * p * min(dimension, sketch_dim or dimension) * 8
    from ...aggregation.ckks_settings import CkksSettings  # loaded on first use

    settings = CkksSettings.of(protection)
    try:
        packing = settings.packing(p, dimension)
    except LocalError:  # too long: the run reports it
        return 0
    ciphertext = settings.parameters().ciphertext_bytes
    pairs = clients * (min(protection.landmarks, clients) or (clients + 1) / 2)
    return round(ciphertext * (2 * packing.chunks * clients + 1.5 * pairs / (settings.group or packing.group)))
