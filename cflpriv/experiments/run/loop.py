"""The loop of rounds over any federation: start, next round, summary. `folder` writes it to disk.

Simulations (`run`) and deployments (`deployment`) differ in their `Backend` alone.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...algorithms.interface import Algorithm
from ...clustering.scores import ari, mean_interval
from ...contract.transcript import Transcript
from ...engine.device import Device, resolved, using
from ...engine.models import check_words, model_doubts
from ...engine.threads import one_thread
from ...errors import InputError
from ...federation.server import BudgetsSpent, ClientsLost, FederationServer, KeyHolderLost
from ...placements import NAME, placements_of
from ...protocols.ledger import BudgetExceeded
from ...randomness import stream
from ...transports.simulation import Simulated
from ...types import Array, Population
from ..config.config import Config
from .class_scores import warnings_of
from .communication import traffic_so_far, traffic_summary
from .folder_reference import ROW_NAMES
from .number_scores import NUMBERS, is_evaluated, number_warnings
from .private import RunLedger, spent, summed_up
from .still_improving import still_improving
from .summary_figures import LAST, MEASURED
from .training_noise import noise_warning, not_the_noise, over_run

__all__ = [
    "OVER_BUDGET", "Backend", "Experiment", "advance", "begin", "device_of", "finish", "input_warnings",
    "check_same_data", "population_digest", "transcript_of",
]  # fmt: skip

MOST_RETRIES = 5
UNTRAINED = 5
"""After so many rounds without a sum a cluster is named in the summary; in shorter runs, if it never had one."""
OVER_BUDGET = (BudgetExceeded, BudgetsSpent)
"""What ends a run with what it has: the server's ledger allows no more, or no client's own does."""
Done = TypeVar("Done")


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend:
    """How a run reaches its clients, and what else is known of them: all differences between simulations and deployments.

    welcome(run, progress): clients join, before the start or, with the `progress` of its checkpoint, before a resumed run continues;
    raises `InputError` where too few come. rejoin(run, error): after an error of `skips` in the algorithm's beginning, waits for who is
    missing; raises where nobody is. begin_round(run, number): begins the round; returns new clients to be admitted.
    scores(run, clients): accuracies, for a round's row. evidence(run): that of a clustering whose release withheld it.
    saved(run): what a checkpoint of its progress has besides. summary(run): keys of the summary besides, or in place of those of `finish`.
    write(run, out): additional files, after the start and at the end. close(run): ends the exchange with clients.
    skips: the errors that end a round and not the run. save_every: rounds from one checkpoint to the next.
    """

    welcome: Callable[["Experiment", Mapping[str, Any] | None], None]
    rejoin: Callable[["Experiment", Exception], None]
    begin_round: Callable[["Experiment", int], Collection[int]]
    scores: Callable[["Experiment", tuple[int, ...]], Mapping[str, Any]]
    evidence: Callable[["Experiment"], Mapping[str, Any] | None]
    saved: Callable[["Experiment"], Mapping[str, Any]]
    summary: Callable[["Experiment"], Mapping[str, Any]]
    write: Callable[["Experiment", Path], None]
    close: Callable[["Experiment"], None]
    skips: tuple[type[Exception], ...]
    save_every: int


@dataclass
class Experiment:
    """An experiment under way. `rows` has one mapping per round, as in rounds.jsonl.

    `expected` are the clients that take part from the start, `truth` has the true group of those whose group is known. `parties` are all
    clients, where they are in this process. `baseline`: the most frequent class of training labels, or their mean, where they are.
    `chosen`: a line on values that a rule set. `waiting` are new clients that an absent holder kept from being admitted, by step.
    """

    config: Config
    population: Population
    algorithm: Algorithm
    federation: FederationServer
    backend: Backend
    expected: tuple[int, ...]
    truth: Mapping[int, int]
    run_ledger: RunLedger | None = None
    newcomers: tuple[int, ...] = ()
    parties: Simulated | None = None
    baseline: float | None = None
    chosen: str = ""
    state: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    admitted: Mapping[str, Any] | None = None
    advice: Mapping[str, Any] | None = None
    mixture: Mapping[str, Any] | None = None
    waiting: list[tuple[int, ...]] = field(default_factory=list)
    digest: str = ""
    stopped: str | None = None
    report: Callable[[str], None] = lambda line: None
    started: float = field(default_factory=time.perf_counter)
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def simulated(self) -> Simulated:
        """The clients of a simulation. Raises `InputError` for a deployment."""
        if self.parties is None:
            raise InputError("the clients of this run are not in this process")
        return self.parties


def begin(run: Experiment) -> None:
    """Run the algorithm's beginning. Raises `InputError` where clients cannot agree on their transform, or it is beyond the budget."""
    if run.federation.disagreement:
        later = f" (data.newcomers = {len(run.newcomers)} come after training)" if run.newcomers else ""
        raise InputError(f"protection {run.config.protection.name}: {run.federation.disagreement}{later}")
    with one_thread(), using(device_of(run.config)):
        try:
            run.state = _begun(run)
        except OVER_BUDGET as error:
            raise InputError(f"privacy.epsilon = {run.config.privacy.epsilon}: the beginning is beyond the budget ({error})") from None


def advance(run: Experiment, *, scored: bool = True) -> dict[str, Any]:
    """Run and measure one round; the new row. A round without a large enough group changes nothing and is recorded as such.

    Without `scored` no model is evaluated: nothing that parties send depends on scores.
    """
    number, began = len(run.rows), time.perf_counter()
    if run.run_ledger is not None:
        run.run_ledger.ledger.round = number
    came = run.backend.begin_round(run, number)
    row: dict[str, Any] = {"round": number, "cohort": [], "admitted": [], "skipped": None}
    with one_thread(), using(device_of(run.config)):
        try:
            row["admitted"], admissions = _admitted(run, came)
            row |= {"admissions": admissions} if admissions else {}
            run.state, record = _retried(run, lambda: run.algorithm.round(run.federation, run.state))
            if taken := ROW_NAMES.intersection(record.notes):
                raise InputError(f"algorithm {run.algorithm.name!r}: its round notes {sorted(taken)}, names of the run; choose others")
            row |= {"cohort": list(record.cohort), "labels": None if record.labels is None else list(record.labels), **record.notes}
        except run.backend.skips as error:
            row["skipped"] = str(error)
        except OVER_BUDGET as error:  # the run ends here
            run.stopped = row["skipped"] = str(error)
        due = number % run.config.run.evaluate_every == 0 or number >= run.config.training.rounds - LAST or run.stopped
        trained = time.perf_counter()
        if scored and due:
            row |= _scores(run, run.federation.clients, number)
        row["scoring_seconds"] = time.perf_counter() - trained
    row["upload_bytes"], row["download_bytes"] = run.federation.transcript.upload_bytes, run.federation.transcript.download_bytes
    row |= traffic_so_far(run.federation, number)
    row |= spent(run.run_ledger, run.federation.clients)
    if run.federation.clip_norm is not None:
        row["clip_norm"] = run.federation.clip_norm  # of the next sum
    row["lost"] = sorted(set(run.expected).difference(run.federation.clients))
    row["seconds"] = time.perf_counter() - began
    row["protection_seconds"] = run.federation.protection_seconds  # since the start: gram and mean, computing and recording
    run.rows.append(row)
    return row


def transcript_of(config: Config, clients: Sequence[int]) -> Transcript:
    """An empty transcript that keeps what `[run]` asks for; `clients` are all of the run."""
    run = config.run
    kept = set(run.record_clients)
    if run.record_sample:
        drawn = stream(run.seed, "recorded clients").choice(len(clients), min(run.record_sample, len(clients)), replace=False)
        kept = {clients[i] for i in drawn}
    return Transcript(run.record, run.record_rounds or None, sorted(kept) or None)


def _scores(run: Experiment, clients: tuple[int, ...], number: int) -> dict[str, Any]:
    """Scores of clients: of all, or of a random sample of `run.evaluate_clients`, with intervals for the means over all.

    Every sample of this size is equally likely, and each round's is drawn anew.
    """
    size = run.config.run.evaluate_clients
    if not 0 < size < len(clients):
        return dict(run.backend.scores(run, clients))
    drawn = stream(run.config.run.seed, "evaluation", number).choice(len(clients), size, replace=False)
    scores = dict(run.backend.scores(run, tuple(clients[i] for i in sorted(drawn))))
    for kind, largest in (("accuracy", 1.0), ("local_accuracy", 1.0), ("error", math.inf), ("local_error", math.inf)):
        if kind in scores.get("per_client", {}) or largest == 1.0:
            values = [value for value in scores.get("per_client", {}).get(kind, ()) if value is not None]
            scores[f"{kind}_mean_interval"] = mean_interval(values, len(clients), largest)
    return scores | {"evaluated_clients": size}


def device_of(config: Config) -> Device:
    """Where a server and its attackers compute: on the device of the run, where this machine has one, in full precision."""
    return Device("cpu" if config.run.device == "cpu" else resolved("auto"))


def _begun(run: Experiment) -> Any:
    """The algorithm's first state. A beginning that too few clients or holders took part in is taken again when these are back."""
    for _ in range(MOST_RETRIES):
        try:
            return _retried(run, lambda: run.algorithm.init(run.federation))
        except run.backend.skips as error:
            run.backend.rejoin(run, error)
    return _retried(run, lambda: run.algorithm.init(run.federation))


def _retried(run: Experiment, step: Callable[[], Done]) -> Done:
    """A step of the algorithm, taken again without clients that dropped out while they were compared: it is a function of the state."""
    for _ in range(MOST_RETRIES):
        try:
            return step()
        except ClientsLost as error:
            run.report(str(error))
    return step()


def _admitted(run: Experiment, came: Collection[int]) -> tuple[list[int], list[dict[str, Any]]]:
    """Admit clients that the clustering has not seen, where the algorithm can; and what is noted of their placement, if anything.

    Those that drop out meanwhile are asked when they return. When a holder is back that did not answer, a step is taken again with the same
    clients: if its answer was lost, it repeats that to no others.
    """
    waiting, run.waiting = run.waiting, []
    steps = [*waiting, tuple(sorted(set(came).difference(*waiting)))]
    admitted, notes = zip(*(_admitted_together(run, step) for step in steps), strict=True)
    return sorted(client for clients in admitted for client in clients), [own[NAME] for own in notes if NAME in own]


def _admitted_together(run: Experiment, came: Sequence[int]) -> tuple[list[int], Mapping[str, Any]]:
    """Admit clients in one step; who was admitted, and the algorithm's notes."""
    admit = run.algorithm.admit
    clustering = run.algorithm.describe(run.state).get("clustering") if came and admit is not None else None
    fresh = [client for client in came if clustering is not None and client not in clustering.clients]
    if not fresh or admit is None:
        return [], {}
    if "gram" in run.algorithm.operations and run.federation.holder_missing:
        run.waiting.append(tuple(fresh))
        return [], {}
    later: tuple[type[Exception], ...] = (*run.backend.skips, *OVER_BUDGET)
    notes: Mapping[str, Any] = {}
    try:
        run.state, notes = _retried(run, lambda: admit(run.federation, run.state, fresh))
    except later as error:
        run.report(f"clients {fresh} were not admitted: {error}")
        if isinstance(error, KeyHolderLost) and not error.refusal:
            run.waiting.append(tuple(fresh))
    known = run.algorithm.describe(run.state)["clustering"].clients
    return [client for client in fresh if client in known], notes


def input_warnings(config: Config, population: Population) -> tuple[str, ...]:
    """What is doubtful about a run before it begins: its settings, its data, its model.

    Raises `InputError` for a user's model that cannot take the samples.
    """
    model = config.model_for(population)
    check_words(model, (x for client in population.clients for x in (client.x_train, client.x_test)))
    return (*config.doubts, *population.warnings, *model_doubts(model))


def finish(run: Experiment) -> dict[str, Any]:
    """The summary of what has run so far, as in summary.json.

    Newcomers count in "newcomers" and in traffic only: accuracies, `ari` and `clusters` are those of the clients that
    trained. Empty `clusters` do not count. Unknown values are None: local accuracies of remote clients, `ari` without truth. `choice_ari`:
    the ARI of the clusters that clients choose by themselves when served. Only the experimenter of a simulation sees these choices.
    """
    described = run.algorithm.describe(run.state)
    clustering = described.get("clustering")
    trained = () if clustering is None else zip(clustering.clients, clustering.labels, strict=True)
    labels = {client: label for client, label in trained if client not in run.newcomers}
    known = [client for client in labels if client in run.truth]
    evaluated = [row for row in run.rows if is_evaluated(row)]
    last = [row for row in evaluated if row["round"] > evaluated[-1]["round"] - LAST]
    present = tuple(client for client in run.federation.clients if client not in run.newcomers)
    final = evaluated[-1] if evaluated else _scores(run, present, len(run.rows))
    models = run.algorithm.serve(run.state).params.values()  # of several, without a clustering, the number in use is unknown
    by_cluster = described.get("k", 1) > 1 or any(isinstance(value, list | tuple) and len(value) > 1 for value in models)
    transcript = run.federation.transcript
    noise = over_run(run.rows, len(run.rows))
    return {
        "algorithm": run.algorithm.name,
        "dataset": run.population.name,
        "protection": run.config.protection.name,
        "release_policy": run.config.run.release_policy,
        **{name: final.get(name) for name in MEASURED},
        **{name: final[name] for name in NUMBERS if name in final},
        **{name: value for name, value in final.items() if "perplexity" in name or name.startswith("metric_")},
        "accuracy_mean_last_rounds": _mean([row["accuracy_mean"] for row in last]),
        **({"error_mean_last_rounds": _mean([row["error_mean"] for row in last])} if run.population.label_range else {}),
        "local_accuracy_mean_last_rounds": _mean([row.get("local_accuracy_mean") for row in last]),
        "last_rounds": len(last),
        "ari": ari([run.truth[client] for client in known], [labels[client] for client in known]) if known else None,
        "choice_ari": final.get("choice_ari"),
        "clusters": len(set(labels.values())) or (1 if "mean" in run.algorithm.operations and not by_cluster else None),
        "true_groups": len(set(run.truth.values())) or None,
        "placements": placements_of(run.rows),
        "unplaced": sorted(described.get("unplaced", ())),
        "advice": run.advice,
        "mixture": run.mixture,
        "clear_structure": described.get("clear"),
        "cut_rule": described.get("rule"),
        "knowledge": run.config.knowledge,
        **noise,
        "warnings": [*input_warnings(run.config, run.population), *_result_warnings(run, final, noise), *_untrained(run, labels)],
        "rounds": len(run.rows),
        "rounds_planned": run.config.training.rounds,
        "rounds_skipped": sum(row["skipped"] is not None for row in run.rows),
        "group_rounds_without_sum": sum(len(row.get("unchanged_clusters", ())) for row in run.rows),
        "clipped_client_rounds": sum(row.get("clipped_clients", 0) for row in run.rows),
        "clients": len(run.expected) + len(run.newcomers),
        "parameters": run.config.model_for(run.population).dimension,
        "upload_bytes": transcript.upload_bytes,
        "download_bytes": transcript.download_bytes,
        **traffic_summary(run.federation, run.rows, run.config.run.target_accuracy, len(run.expected)),
        "newcomers": run.admitted,
        **summed_up(run.run_ledger, run.stopped, bool(run.config.protection.helper_sets)),
        "messages": len(transcript.messages),
        "data_digest": run.digest or population_digest(run.population),
        "notes": list(run.population.notes),
        "seconds": time.perf_counter() - run.started,
        **run.backend.summary(run),
    }


def _result_warnings(run: Experiment, final: Mapping[str, Any], noise: Mapping[str, float]) -> list[str]:
    """What a reader of the result should know: that it means nothing, and whether noise is the reason. Nothing before the first round."""
    if not run.rows:
        return []
    useless = [*warnings_of(final, run.population.class_names), *number_warnings(final)]
    reason = noise_warning(noise, final) or (not_the_noise(noise, run.config.privacy.clip_norm) if useless else "")
    return list(filter(None, (*useless, reason, still_improving(run.rows, run.config.training.rounds))))


def _untrained(run: Experiment, labels: Mapping[int, int]) -> list[str]:
    """Clusters whose models their clients use although the last rounds did not train them; `labels` by client."""
    done = [row for row in run.rows if row["skipped"] is None]
    waits = run.config.protection.small_clusters == "wait" and "gram" in run.algorithm.operations
    remedy = "; protection.small_clusters = 'merge' has such clusters join the nearest" if waits else ""
    lines = []
    for label in sorted(set(labels.values())):
        since = next((age for age, row in enumerate(reversed(done)) if label not in row.get("unchanged_clusters", ())), len(done))
        if since < min(UNTRAINED, len(done)) or not done:
            continue
        members = [client for client in sorted(labels) if labels[client] == label]
        trained = "its model was never trained" if since == len(done) else f"its model is that of round {done[-since - 1]['round'] + 1}"
        lines.append(
            f"cluster {label} ({len(members)} client{'s' * (len(members) > 1)}): no sum in the last {since} of {len(done)} rounds, because "
            f"fewer than {run.config.protection.smallest_group} of its clients took part (protection.min_cohort), and {trained}{remedy}"
        )
    return lines


def _mean(values: list[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return float(np.mean(kept)) if kept else None


def check_same_data(folder: Path, digest: str | None, population: Population) -> None:
    """`InputError` if the data are not those of the run in `folder`, which recorded their digest (None: it recorded none)."""
    if digest not in (None, population_digest(population)):
        raise InputError(
            f"{folder}: the run was made with other data than are found now; give the same --data-dir, or in Python the same population"
        )


def population_digest(population: Population) -> str:
    """A digest of all clients' data, independent of their order, by which an audit detects other data."""
    seen: dict[int, bytes] = {}
    later = [change.data for change in population.changes if change.data is not None]

    def of(array: Array) -> bytes:
        if id(array) not in seen:
            seen[id(array)] = blake2b(
                f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).data, digest_size=16
            ).digest()
        return seen[id(array)]

    whole = blake2b(digest_size=16)
    for client in (*sorted(population.clients, key=lambda client: client.id), *later):
        whole.update(f"{client.id}|".encode())
        for array in (client.x_train, client.y_train, client.x_test, client.y_test):
            whole.update(of(array))
    return whole.hexdigest()
