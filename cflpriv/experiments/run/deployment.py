"""A whole experiment over a deployment's transport, from its config, into the same run folder as a local one.

The server side of every deployment (`cflpriv.flower`, `cflpriv.nvflare`). It has no client's data. What only an experimenter can know (true
groups) is scored where it is given. The rounds, the run folder, checkpoints and the resumption are those of `cflpriv.experiments`.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...class_counts import counts_these
from ...clustering.scores import spread
from ...contract.handles import Held, Labels, placed
from ...error_sums import sums_these
from ...errors import InputError, TrainingDiverged
from ...federation.resident import WithResidents
from ...federation.server import ClientsLost, EpochEnded, FederationServer, KeyHolderLost
from ...federation.stages import Journal, Notify, StagedTransport
from ...federation.transport import OverBytes
from ...files import append, write_arrays
from ...protocols.entropy import system_entropy
from ...protocols.errors import TooFewClients
from ...protocols.keys import Roster
from ...types import Array, ClientData, Population
from ..config.callbacks import Callback
from ..config.config import Config
from .agreed import contract_for
from .checkpoint import Checkpoint
from .class_scores import class_scores
from .folder import carry_out
from .loop import Backend, Experiment, transcript_of
from .number_scores import client_errors, error_spread, is_evaluated, main_score, number_scores
from .private import run_ledger
from .run import check_run

__all__ = ["deploy", "standing_in"]

SKIPS = (TooFewClients, TrainingDiverged, ClientsLost, KeyHolderLost, EpochEnded)
"""Errors that end a round: clients or the key holder dropped out, or clients diverged."""


def standing_in(
    shape: tuple[int, ...], classes: int, mean: tuple[float, ...] = (0.0,), std: tuple[float, ...] = (1.0,), name: str = "elsewhere",
    label_range: tuple[float, ...] = (),
) -> Population:  # fmt: skip
    """The server's knowledge of its clients' data: the shape of a sample, the number of classes (1 for labels that are numbers in a public
    `label_range`), the model's normalisation."""
    labels = np.zeros(1, np.float64 if label_range else np.int64)
    nothing = ClientData(0, np.zeros((1, *shape), np.float32), labels, np.zeros((0, *shape), np.float32), labels[:0])
    return Population(name, (nothing,), (0,), classes, mean, std, label_range=label_range)


def deploy(
    connect: Callable[[Journal], StagedTransport],
    config: Config,
    out: str | Path,
    described: Population,
    *,
    system: str,
    clients: int,
    truth: Mapping[int, int] | None = None,
    roster: Roster | None = None,
    wait_seconds: float = 120.0,
    resume: bool = False,
    report: Notify = print,
    callbacks: Sequence[Callback] = (),
    residents: Sequence[str] = (),
) -> dict[str, Any]:
    """Run `config` with the `clients` that a transport reaches; the summary, as in summary.json. See `experiments.folder.carry_out`.

    `connect` makes the transport, given its journal; `system` is its name in the summary. `residents`: addresses "HOST:PORT" of helpers and
    holders that stay (`cflpriv helper`), beside those that the transport reaches. `described` gives the shape of samples and the
    number of classes (`standing_in`). `truth` (true group by client) is for scoring only. If clients drop out during a comparison, the step
    is repeated without them. A client that returns keeps its cluster; a new client is admitted. Clients' own scores are gathered and
    recorded, unless sums are secure or clients' data private; then there are none. A release that the ledger refuses ends the run
    (`stopped`).

    Under `[privacy]` cohorts are drawn from all `clients`, present or not, so that noise is calibrated for the rounds in which a client is
    drawn: nobody takes the place of one that is absent.

    With `resume` it also continues as another run of a restarted system, if clients have their state in files. The process of the earlier
    run may still have the folder for a while: it is waited for, up to `wait_seconds`. Raises `InputError` besides if fewer than `clients`
    answer in time, or the release policy is "off".
    """
    if config.run.release_policy == "off":
        raise InputError("run.release_policy = 'off': is for simulated clients; deployed ones keep to their own release policy")
    for key, asked in (("run.advise", config.run.advise), ("training.mixture", config.training.mixture)):
        if asked:
            raise InputError(f"{key} = true: is for simulations, where all clients hold samples out; leave it out of a deployment")
    if changing := config.data.changing:
        raise InputError(f"{changing}: is for simulations; the data of deployed clients change by themselves; leave it out of a deployment")
    out, here = Path(out), tuple(range(clients))

    def journal(entry: Mapping[str, Any]) -> None:
        """stages.jsonl: each stage and its outcome, as it happens."""
        append(out / "stages.jsonl", json.dumps(entry) + "\n")

    config, chosen = config.fitted(described)

    def make(checkpoint: Checkpoint | None) -> Experiment:
        algorithm = config.algorithm_for(described)
        check_run(config, described, algorithm, here)
        asked = None if config.privacy.unit == "none" else config.schedule(here).most
        private = run_ledger(config, algorithm, config.noise(asked), system_entropy, asked, config.bands(here))
        if private is not None and not algorithm.operations:
            raise InputError(f"algorithm {algorithm.name!r} with privacy.unit = {config.privacy.unit!r}: releases nothing; use 'none'")
        transport = WithResidents(connect(journal), residents) if residents else connect(journal)
        federation = FederationServer(
            OverBytes(transport), protection=config.protection, sampling=config.sampling(), seed=config.run.seed, roster=roster,
            transcript=transcript_of(config, here),
            session=None if checkpoint is None else checkpoint.session,
            drawn_from=here if asked is not None and asked < config.training.rounds else None,
            contract=contract_for(config, algorithm, config.noise(asked), roster),
            **({} if private is None else private.options(config.protection)),
        )  # fmt: skip
        backend = _backend(transport, wait_seconds, system, config.unscored or None, report)
        return Experiment(config, described, algorithm, federation, backend, here, truth or {}, private, chosen=chosen)

    def tick(row: Mapping[str, Any]) -> None:
        """A line for each round."""
        name, value = main_score(row)
        score = "" if value is None else f", {name.removesuffix('_mean')} {value:.3f}"
        done = row["skipped"] or f"done with {len(row['cohort'])} of {clients} clients{score}"
        report(f"round {row['round']} ({row['round'] + 1} of {config.training.rounds}): {done}, {row['seconds']:.1f} s")

    return carry_out(config, out, make, resume=resume, report=report, tick=tick, callbacks=callbacks, patience=wait_seconds)


def _backend(transport: StagedTransport, seconds: float, system: str, unscored: str | None, report: Notify) -> Backend:
    """The backend of a deployment: it waits for clients; only their answers are known. `unscored`: why they do not show their scores."""
    return Backend(
        welcome=lambda run, progress: transport.welcome_all(run.federation, len(run.expected), seconds, report),
        rejoin=lambda run, error: _rejoin(run, error, transport, seconds, report),
        begin_round=lambda run, number: _begin_round(run, number, transport, seconds),
        scores=_scores if unscored is None else lambda run, present: {},
        evidence=lambda run: None,
        saved=lambda run: {},
        summary=lambda run: _summary(run, transport, system, unscored),
        write=_write_models,
        close=lambda run: run.federation.end(),
        skips=SKIPS,
        save_every=1,  # clients let go of what a later round does not need
    )


def _rejoin(run: Experiment, error: Exception, transport: StagedTransport, seconds: float, report: Notify) -> None:
    """Wait for clients and holders that dropped out in the beginning. Raises `InputError` where nobody is missing, or too few come back."""
    federation, everybody = run.federation, len(run.expected)
    if len(federation.clients) == everybody and not federation.holder_missing:
        raise InputError(f"the algorithm's beginning: {error}") from error
    report(f"the beginning is taken again when those who are missing are back: {error}")
    transport.welcome_all(federation, everybody, seconds, report, fewest=max(1, run.config.protection.smallest_group))


def _begin_round(run: Experiment, number: int, transport: StagedTransport, seconds: float) -> Collection[int]:
    """Admit clients that are new. With no client present it waits instead of wasting the round."""
    came = set(run.federation.begin_round(number))
    if len(run.federation.clients) < max(1, run.config.protection.smallest_group):
        came |= transport.welcome(run.federation, len(run.expected), seconds)
    return came


def _scores(run: Experiment, present: tuple[int, ...]) -> Mapping[str, Any]:
    """Scores of clients on their own test data, and by class or number where nothing hides values (`Config.shown_scores`).

    None where no client is left to score. An answer that is no score is left out.
    """
    served = run.algorithm.serve(run.state)
    which = served.which  # a client that is not placed yet has no model to score
    shown = tuple(part for part in run.config.shown_scores if part in getattr(served.task, "parts", ()))
    with suppress(*SKIPS):
        on = present if which is None or isinstance(which, Held) else placed(which, present)
        held = run.federation.compute(served.task, served.params, which=which, on=on)
        answers = run.federation.gather(held[shown])
        labels = None if isinstance(which, Held) else which
        return (_number_scores if run.population.label_range else _class_scores)(run, answers, labels)
    return {}


def _class_scores(run: Experiment, answers: Mapping[int, Mapping[str, Array]], labels: Labels | None) -> Mapping[str, Any]:
    """Accuracies, and scores by class, from what clients answered. `labels`: each client's cluster."""
    reported: dict[int, float] = {}
    counted: dict[int, Mapping[str, Array]] = {}
    for client, values in answers.items():
        correct, count = values["correct"], values["count"]
        if correct.size == count.size == 1 and 0 <= correct.item() <= count.item():  # else it is no score
            reported[client] = correct.item() / max(count.item(), 1.0)
            confusion = values.get("confusion")
            if confusion is not None and counts_these(confusion, correct.item(), count.item(), run.population.classes):
                counted[client] = {"confusion": confusion}
    accuracy = np.array(list(reported.values()))
    per_client = {"clients": list(reported), "accuracy": accuracy.tolist(), "local_accuracy": [None] * len(reported)}
    by_class = class_scores(list(counted.values()), list(counted), labels, metrics=run.config.run.metrics)
    return {**spread(accuracy, "accuracy"), **by_class, "per_client": per_client}


def _number_scores(run: Experiment, answers: Mapping[int, Mapping[str, Array]], labels: Labels | None) -> Mapping[str, Any]:
    """The same where labels are numbers: errors in the label's unit, and R²."""
    label_range, loss = run.population.label_range, run.config.model_for(run.population).loss
    reported: dict[int, Mapping[str, Array]] = {}
    for client, values in answers.items():
        total, count = values["loss"], values["count"]
        if total.size == count.size == 1 and count.item() >= 0 and 0 <= total.item() < math.inf:  # else it is no score
            reported[client] = {"loss": np.array(total.item()), "count": np.array(count.item())}
            if "errors" in values and sums_these(values["errors"], count.item()):
                reported[client] = {**reported[client], "errors": values["errors"]}
    errors = client_errors(list(reported.values()), loss, label_range)
    whole = {client: result for client, result in reported.items() if "errors" in result}
    per_client = {"clients": list(reported), "error": errors.tolist(), "local_error": [None] * len(reported)}
    of_numbers = number_scores(list(whole.values()), list(whole), label_range, labels) if whole else {}
    return {**error_spread(errors, "error"), **of_numbers, "per_client": per_client}


def _summary(run: Experiment, transport: StagedTransport, system: str, unscored: str | None) -> Mapping[str, Any]:
    """What is known of a deployment besides, and why a figure is missing."""
    stages = [[stage, asked, answered, round(seconds, 3)] for stage, asked, answered, seconds in transport.stages]
    refusals = [list(refusal) for refusal in run.federation.refusals]
    why = []
    if not any(is_evaluated(row) for row in run.rows):
        why.append(f"no {'error' if run.population.label_range else 'accuracy'}: {unscored or 'no client was left to be scored'}")
    if not run.truth:
        why.append("no ari: the true groups are not known to the server")
    return {
        "engine": system, "engine_paths": {}, "clients": len(run.federation.clients), "refusals": refusals, "stages": stages,
        "notes": [*run.population.notes, *why],
    }  # fmt: skip


def _write_models(run: Experiment, out: Path) -> None:
    """The models that clients would be served, as far as the server has them."""
    models = {}
    for name, value in run.algorithm.serve(run.state).params.items():
        for i, model in enumerate(value if isinstance(value, list | tuple) else [value]):
            if getattr(model, "is_clear", False):
                models[f"{name}/{i}"] = np.ascontiguousarray(model.value())
    (out / "checkpoints").mkdir(exist_ok=True, mode=0o700)
    if models:
        write_arrays(out / "checkpoints" / "models.safetensors", models)
