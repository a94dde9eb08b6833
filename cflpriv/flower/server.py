"""A whole experiment on a Grid, from its config, into the same run folder as a local one.

The server side of a deployment: it has no client's data. What only an experimenter can know (true groups) is scored where it is given.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flwr.serverapp import Grid

from ..algorithms.interface import Algorithm
from ..clustering.scores import ari, spread
from ..contract.handles import Held, placed
from ..contract.transcript import Transcript, cut_transcript
from ..errors import InputError, TrainingDiverged
from ..experiments.checkpoint import latest, load_checkpoint, prune, restore, save_checkpoint, write_atomically
from ..experiments.config import Config
from ..experiments.folder import environment, file_digests, flush, idle_notes, plain_json, write_measured
from ..experiments.private import Books, books, charges, opened, spent, summed_up
from ..experiments.resume import check_same_config, locked
from ..experiments.run import LAST, population_digest, several_models
from ..federation.server import ClientsLost, EpochEnded, KeyHolderLost, RemoteFederation
from ..federation.transport import OverBytes
from ..protocols.entropy import system_entropy
from ..protocols.errors import TooFewClients
from ..protocols.keys import Roster
from ..protocols.ledger import BudgetExceeded
from ..types import ClientData, Population
from .transport import GridTransport

__all__ = ["serve", "standing_in"]

Step = TypeVar("Step")
MOST_RETRIES = 5
GONE = (TooFewClients, TrainingDiverged, ClientsLost, KeyHolderLost, EpochEnded)
"""How a step ends whose clients, or key holder, vanished (or clients diverged, and are skipped)."""


def standing_in(
    shape: tuple[int, ...], classes: int, mean: tuple[float, ...] = (0.0,), std: tuple[float, ...] = (1.0,), name: str = "elsewhere"
) -> Population:
    """What a server knows of its clients' data: the shape of a sample, the number of classes, the model's normalisation."""
    nothing = ClientData(
        0, np.zeros((1, *shape), np.float32), np.zeros(1, np.int64), np.zeros((0, *shape), np.float32), np.zeros(0, np.int64)
    )
    return Population(name, (nothing,), (0,), classes, mean, std)


def serve(
    grid: Grid,
    config: Config,
    out: str | Path,
    described: Population,
    *,
    clients: int,
    truth: Mapping[int, int] | None = None,
    roster: Roster | None = None,
    wait_seconds: float = 120.0,
    deadline_seconds: float = 60.0,
    compute_seconds: float = 600.0,
    hello_seconds: float = 30.0,
    message_type: str = "query.cflpriv",
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run `config` with the `clients` that the Grid reaches; the summary, as in summary.json.

    `described` gives the shape of samples and the number of classes (`standing_in`). `truth` (true group by client) is for scoring only.
    A step in which clients were lost while being compared is taken again without them; who comes back keeps its cluster, who comes new is
    admitted. Each client's own scores are gathered, and recorded as that, unless sums are secure or clients' data private; then there are
    none. What the ledger would refuse ends the run with what it has (`stopped`).

    With `resume` a run that ended early goes on from its last complete round, also as another run of a restarted SuperLink: clients need
    their state in files for that. One that never started starts.

    Raises `InputError` if `out` exists (or holds another experiment, or another process has it), fewer than `clients` answer in time, or
    the release policy is "off".
    """
    if config.run.release_policy == "off":
        raise InputError("run.release_policy = 'off': is for simulated clients; deployed ones keep to their own release policy")
    out = Path(out)
    algorithm = config.algorithm_for(described)
    private = _books(config, algorithm)
    folder = out / "checkpoints"
    last = latest(folder) if resume else None
    checkpoint = None if last is None else load_checkpoint(folder, last)
    going_on = checkpoint is not None
    if going_on:
        check_same_config(config, out)
    if out.exists() and not going_on and not (resume and not (out / "rounds.jsonl").exists()):
        raise InputError(f"{out}: the output folder exists; choose another, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        transport = GridTransport(
            grid, deadline_seconds=deadline_seconds, compute_seconds=compute_seconds, hello_seconds=hello_seconds,
            message_type=message_type, journal=_journal(out),
        )  # fmt: skip
        transcript = Transcript(config.run.record, config.run.record_rounds or None, config.run.record_clients or None)
        federation = RemoteFederation(
            OverBytes(transport), protection=config.protection, sampling=config.sampling(), seed=config.run.seed, roster=roster,
            transcript=transcript, session=None if checkpoint is None else checkpoint.session,
            **({} if private is None else private.options(config.protection, max(clients, 0 if roster is None else len(roster.keys)))),
        )  # fmt: skip
        state: Any = None
        rows: list[dict[str, Any]] = []
        written = 0

        def save(state: Any) -> None:
            # each turn is new, after a restart too: no checkpoint is written over
            name = f"round_{len(rows):07d}_{federation.turn:07d}"
            progress = {"rounds": len(rows), "transcript": transcript.saved(), "charges": charges(private)}
            save_checkpoint(folder, name, state, federation, progress)
            prune(folder, name)

        if checkpoint is not None:
            state, progress = restore(checkpoint, federation), checkpoint.progress
            opened(private, out, progress["charges"])
            rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[: progress["rounds"]]]
            cut_transcript(out / "transcript", progress["transcript"]["messages"], out / "interrupted" / str(progress["rounds"]))
            transcript.restore(out / "transcript", progress["transcript"])
            written = len(transcript.messages)
            write_atomically(out / "rounds.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            save(state)  # or a second restart would ask clients for the turns of the first again
        else:
            opened(private, out)
        began = time.perf_counter()
        transport.welcome(federation, clients, wait_seconds)
        if len(federation.clients) < clients:
            words = sorted({code for _, _, code in federation.refusals})
            raise InputError(
                f"{len(federation.clients)} of {clients} clients answered within {wait_seconds:g} s; refusals: {words or 'none'}"
            )
        if federation.holder_missing:
            words = sorted({code for _, stage, code in federation.refusals if stage == "enrol"})
            raise InputError(f"the key holder did not answer within {wait_seconds:g} s; refusals: {words or 'none'}")
        write_atomically(out / "config.toml", config.to_toml())
        write_atomically(out / "environment.json", json.dumps(environment(), indent=1) + "\n")
        say(f"{algorithm.name}: {len(federation.clients)} clients, protection {config.protection.name}")
        for note in idle_notes(config):
            say(note)
        if not going_on:
            try:
                state = _again(federation, lambda: algorithm.init(federation), say)
            except BudgetExceeded as error:
                raise InputError(f"privacy.epsilon = {config.privacy.epsilon}: the beginning alone costs more ({error})") from None
            written = flush(transcript, out, written)
            save(state)
        stopped: str | None = None
        with (out / "rounds.jsonl").open("a", encoding="utf-8") as file:
            for number in range(len(rows), config.training.rounds):
                if stopped is not None:
                    break
                started = time.perf_counter()
                if private is not None:
                    private.ledger.round = number
                came = set(federation.begin_round(number))
                if len(federation.clients) < max(1, config.protection.smallest_group):  # a round with nobody would be lost for nothing
                    came |= transport.welcome(federation, clients, wait_seconds)
                row: dict[str, Any] = {"round": number, "cohort": [], "admitted": [], "skipped": None}
                try:
                    state, row["admitted"] = _admitted(federation, algorithm, state, came, say)
                    state, record = _again(federation, lambda state=state: algorithm.round(federation, state), say)  # type: ignore[misc]
                    row |= {"cohort": list(record.cohort), "labels": None if record.labels is None else list(record.labels), **record.notes}
                except GONE as error:
                    row["skipped"] = str(error)
                except BudgetExceeded as error:  # the run ends with what it has
                    stopped = row["skipped"] = str(error)
                if not config.protection.secure and private is None:
                    with suppress(*GONE):  # nobody is left to score: the round has no scores
                        row |= _scores(federation, algorithm.serve(state))
                row["upload_bytes"], row["download_bytes"] = transcript.upload_bytes, transcript.download_bytes
                row |= spent(private, federation.clients)
                row["lost"], row["seconds"] = _missing(clients, federation.clients), time.perf_counter() - started
                rows.append(row)
                file.write(json.dumps(plain_json(row)) + "\n")
                file.flush()
                written = flush(transcript, out, written)
                save(state)
                say(f"round {number}: {row['skipped'] or 'done'}, {row['seconds']:.1f} s")
        federation.end()
        summary = _summary(config, algorithm, state, described, truth, rows, transcript)
        summary |= summed_up(private, stopped)
        summary |= {
            "engine": "flower", "clients": len(federation.clients), "refusals": [list(one) for one in federation.refusals],
            "stages": [[stage, asked, answered, round(seconds, 3)] for stage, asked, answered, seconds in transport.stages],
            "seconds": time.perf_counter() - began, "files": file_digests(out),
        }  # fmt: skip
        _save_models(algorithm.serve(state).params, out)
        write_measured(out, algorithm.describe(state), truth or {})
        write_atomically(out / "summary.json", json.dumps(plain_json(summary), indent=1) + "\n")
        return summary


def _books(config: Config, algorithm: Algorithm) -> Books | None:
    """The privacy of a run. `InputError` for what cannot be private, or releases nothing."""
    private = books(config, algorithm, config.noise(), system_entropy)
    if private is not None and not algorithm.verbs:
        raise InputError(f"algorithm {algorithm.name!r} with privacy.unit = {config.privacy.unit!r}: releases nothing; use 'none'")
    return private


def _summary(
    config: Config, algorithm: Any, state: Any, described: Population, truth: Mapping[int, int] | None, rows: list[dict[str, Any]],
    transcript: Transcript,
) -> dict[str, Any]:  # fmt: skip
    """The keys of a local run's summary; what a deployment cannot know is null."""
    found = algorithm.describe(state)
    clustering = found.get("clustering")
    score = None
    if clustering is not None and truth is not None:
        known = [client for client in clustering.clients if client in truth]
        score = ari([truth[client] for client in known], [clustering[client] for client in known])
    measured = [row for row in rows if row.get("accuracy_mean") is not None]
    last = [row for row in measured if row["round"] > measured[-1]["round"] - LAST]
    one = 1 if "mean" in algorithm.verbs and not several_models(algorithm, state) else None
    clusters = len(set(clustering.labels)) if clustering else one
    names = [f"{kind}_{what}" for kind in ("accuracy", "local_accuracy") for what in ("mean", "std", "worst")]
    return {
        "algorithm": algorithm.name, "dataset": described.name, "protection": config.protection.name, "release_policy": "strict",
        **{name: measured[-1].get(name) if measured else None for name in names},
        "accuracy_mean_last_rounds": float(np.mean([row["accuracy_mean"] for row in last])) if last else None,
        "local_accuracy_mean_last_rounds": None, "last_rounds": len(last),
        "ari": score,
        "clusters": clusters,
        "true_groups": 0 if truth is None else len(set(truth.values())), "clear_structure": found.get("clear"),
        "cut_rule": found.get("rule"), "rounds": len(rows), "rounds_planned": config.training.rounds,
        "rounds_skipped": sum(row["skipped"] is not None for row in rows),
        "group_rounds_without_sum": sum(len(row.get("unchanged_clusters", ())) for row in rows),
        "clipped_client_rounds": sum(row.get("clipped_clients", 0) for row in rows),
        "parameters": config.model_for(described).dimension, "upload_bytes": transcript.upload_bytes,
        "download_bytes": transcript.download_bytes, "engine_paths": {}, "newcomers": None, "epsilon": None, "delta": None,
        "setup_bytes": sum(message.total_bytes for message in transcript.messages if message.round < 0), "megabits": None,
        "megabits_a_client": None,
        "protection_upload_bytes": None, "protection_download_bytes": None,  # what the same would be without one, nobody runs here
        "messages": len(transcript.messages), "data_digest": population_digest(described), "notes": list(described.notes),
    }  # fmt: skip


def _journal(out: Path) -> Callable[[dict[str, Any]], None]:
    """stages.jsonl: what is being waited for, and what came of it, as it happens."""

    def write(entry: dict[str, Any]) -> None:
        with (out / "stages.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    return write


def _again(federation: RemoteFederation, step: Callable[[], Step], say: Callable[[str], None]) -> Step:
    """A step of the algorithm, taken again without clients that were lost in the middle of it."""
    for _ in range(MOST_RETRIES):
        try:
            return step()
        except ClientsLost as error:
            say(str(error))
    return step()


def _admitted(
    federation: RemoteFederation, algorithm: Any, state: Any, came: Iterable[int], say: Callable[[str], None]
) -> tuple[Any, list[int]]:
    """Take in clients that the clustering has not seen, where the algorithm can; who vanishes meanwhile is asked when it is back."""
    clustering = algorithm.describe(state).get("clustering")
    fresh = [client for client in sorted(came) if clustering is not None and client not in clustering.clients]
    if not fresh or algorithm.admit is None:
        return state, []
    try:
        state, _ = _again(federation, lambda: algorithm.admit(federation, state, fresh), say)
    except (*GONE, BudgetExceeded) as error:
        say(f"clients {fresh} were not admitted: {error}")
    known = algorithm.describe(state)["clustering"].clients
    return state, [client for client in fresh if client in known]


def _scores(federation: RemoteFederation, served: Any) -> dict[str, Any]:
    """Each client's accuracy on its own test data: it computes, and says three numbers."""
    which = served.which  # who came and was not placed yet has no model to be scored with
    on = None if which is None or isinstance(which, Held) else placed(which, federation.clients)
    held = federation.compute(served.task, served.params, which=which, on=on)
    told: dict[int, float] = {}
    for client, said in federation.gather(held["correct", "count"]).items():
        correct, count = said["correct"], said["count"]
        if correct.size == count.size == 1 and 0 <= correct.item() <= count.item():  # else it is no score
            told[client] = correct.item() / max(count.item(), 1.0)
    accuracy = np.array(list(told.values()))
    return {
        **spread(accuracy, "accuracy"),
        "per_client": {"clients": list(told), "accuracy": accuracy.tolist(), "local_accuracy": [None] * len(told)},
    }


def _missing(clients: int, present: tuple[int, ...]) -> list[int]:
    return [client for client in range(clients) if client not in present]


def _save_models(params: Mapping[str, Any], out: Path) -> None:
    """The models that clients would be served, as far as the server has them."""
    from safetensors.numpy import save_file

    models = {}
    for name, value in params.items():
        for i, one in enumerate(value if isinstance(value, list | tuple) else [value]):
            if getattr(one, "is_clear", False):
                models[f"{name}/{i}"] = np.ascontiguousarray(one.value())
    (out / "checkpoints").mkdir(exist_ok=True)
    if models:
        save_file(models, out / "checkpoints" / "models.safetensors")
