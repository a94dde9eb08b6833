"""A whole experiment on a Grid, from its config, into the same run folder as a local one.

The server side of a deployment: it has no client's data. What only an experimenter can know (true groups) is scored where it is given. The
rounds, the run folder, checkpoints and the resumption are those of `cflpriv.experiments`.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from ..clustering.scores import spread
from ..contract.handles import Held, placed
from ..contract.transcript import Transcript
from ..errors import InputError, TrainingDiverged
from ..experiments.callbacks import Callback
from ..experiments.checkpoint import Checkpoint
from ..experiments.config import Config
from ..experiments.folder import carry_out
from ..experiments.loop import Backend, Run
from ..experiments.private import run_ledger
from ..experiments.run import check
from ..federation.server import ClientsLost, EpochEnded, FederationServer, KeyHolderLost
from ..federation.transport import OverBytes
from ..files import append, write_arrays
from ..protocols.entropy import system_entropy
from ..protocols.errors import TooFewClients
from ..protocols.keys import Roster
from ..types import ClientData, Population
from .transport import GridTransport

__all__ = ["serve", "standing_in"]

SKIPS = (TooFewClients, TrainingDiverged, ClientsLost, KeyHolderLost, EpochEnded)
"""Errors that end a round: clients or the key holder dropped out, or clients diverged."""


def standing_in(
    shape: tuple[int, ...], classes: int, mean: tuple[float, ...] = (0.0,), std: tuple[float, ...] = (1.0,), name: str = "elsewhere"
) -> Population:
    """The server's knowledge of its clients' data: the shape of a sample, the number of classes, the model's normalisation."""
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
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Run `config` with the `clients` that the Grid reaches; the summary, as in summary.json. See `experiments.folder.carry_out`.

    `described` gives the shape of samples and the number of classes (`standing_in`). `truth` (true group by client) is for scoring only. A
    step in which clients were lost while being compared is taken again without them; a client that returns keeps its cluster, a new one is
    admitted. Clients' own scores are gathered and recorded, unless sums are secure or clients' data private; then there are none. A release
    that the ledger refuses ends the run (`stopped`).

    Under `[privacy]` cohorts are drawn from all `clients`, present or not, so that noise is calibrated for the rounds in which a client is
    drawn: nobody takes the place of one that is absent.

    With `resume` it also continues as another run of a restarted SuperLink, if clients have their state in files. Raises `InputError`
    besides if fewer than `clients` answer in time, or the release policy is "off".
    """
    if config.run.release_policy == "off":
        raise InputError("run.release_policy = 'off': is for simulated clients; deployed ones keep to their own release policy")
    out, here = Path(out), tuple(range(clients))

    def journal(entry: Mapping[str, Any]) -> None:
        """stages.jsonl: each stage and its outcome, as it happens."""
        append(out / "stages.jsonl", json.dumps(entry) + "\n")

    def make(checkpoint: Checkpoint | None) -> Run:
        algorithm = config.algorithm_for(described)
        check(config, described, algorithm, here)
        asked = None if config.privacy.unit == "none" else config.schedule(here).most
        private = run_ledger(config, algorithm, config.noise(asked), system_entropy, asked, config.bands(here))
        if private is not None and not algorithm.operations:
            raise InputError(f"algorithm {algorithm.name!r} with privacy.unit = {config.privacy.unit!r}: releases nothing; use 'none'")
        transport = GridTransport(
            grid, deadline_seconds=deadline_seconds, compute_seconds=compute_seconds, hello_seconds=hello_seconds,
            message_type=message_type, journal=journal,
        )  # fmt: skip
        federation = FederationServer(
            OverBytes(transport), protection=config.protection, sampling=config.sampling(), seed=config.run.seed, roster=roster,
            transcript=Transcript(config.run.record, config.run.record_rounds or None, config.run.record_clients or None),
            session=None if checkpoint is None else checkpoint.session,
            drawn_from=here if asked is not None and asked < config.training.rounds else None,
            **({} if private is None else private.options(config.protection)),
        )  # fmt: skip
        backend = _backend(transport, wait_seconds, scored=not config.protection.secure and private is None)
        return Run(config, described, algorithm, federation, backend, here, truth or {}, private)

    def tick(row: Mapping[str, Any]) -> None:
        say(f"round {row['round']}: {row['skipped'] or 'done'}, {row['seconds']:.1f} s")

    return carry_out(config, out, make, resume=resume, say=say, tick=tick, callbacks=callbacks)


def _backend(transport: GridTransport, seconds: float, *, scored: bool) -> Backend:
    """The backend of a deployment: it waits for clients; only their answers are known."""
    return Backend(
        welcome=lambda run, progress: transport.welcome_all(run.federation, len(run.expected), seconds),
        begin_round=lambda run, number: _begin_round(run, number, transport, seconds),
        scores=_scores if scored else lambda run, present: {},
        evidence=lambda run: None,
        saved=lambda run: {},
        summary=lambda run: _summary(run, transport),
        write=_write_models,
        close=lambda run: run.federation.end(),
        skips=SKIPS,
        save_every=1,  # clients let go of what a later round does not need
    )


def _begin_round(run: Run, number: int, transport: GridTransport, seconds: float) -> Collection[int]:
    """Admit clients that are new. With no client present it waits instead of wasting the round."""
    came = set(run.federation.begin_round(number))
    if len(run.federation.clients) < max(1, run.config.protection.smallest_group):
        came |= transport.welcome(run.federation, len(run.expected), seconds)
    return came


def _scores(run: Run, present: tuple[int, ...]) -> Mapping[str, Any]:
    """Each client's accuracy on its own test data: it computes, and sends three numbers. None where no client is left to score."""
    served, federation = run.algorithm.serve(run.state), run.federation
    which = served.which  # a client that is not placed yet has no model to score
    reported: dict[int, float] = {}
    with suppress(*SKIPS):
        on = None if which is None or isinstance(which, Held) else placed(which, present)
        held = federation.compute(served.task, served.params, which=which, on=on)
        for client, values in federation.gather(held["correct", "count"]).items():
            correct, count = values["correct"], values["count"]
            if correct.size == count.size == 1 and 0 <= correct.item() <= count.item():  # else it is no score
                reported[client] = correct.item() / max(count.item(), 1.0)
        accuracy = np.array(list(reported.values()))
        per_client = {"clients": list(reported), "accuracy": accuracy.tolist(), "local_accuracy": [None] * len(reported)}
        return {**spread(accuracy, "accuracy"), "per_client": per_client}
    return {}


def _summary(run: Run, transport: GridTransport) -> Mapping[str, Any]:
    stages = [[stage, asked, answered, round(seconds, 3)] for stage, asked, answered, seconds in transport.stages]
    refusals = [list(one) for one in run.federation.refusals]
    return {"engine": "flower", "engine_paths": {}, "clients": len(run.federation.clients), "refusals": refusals, "stages": stages}


def _write_models(run: Run, out: Path) -> None:
    """The models that clients would be served, as far as the server has them."""
    models = {}
    for name, value in run.algorithm.serve(run.state).params.items():
        for i, one in enumerate(value if isinstance(value, list | tuple) else [value]):
            if getattr(one, "is_clear", False):
                models[f"{name}/{i}"] = np.ascontiguousarray(one.value())
    (out / "checkpoints").mkdir(exist_ok=True)
    if models:
        write_arrays(out / "checkpoints" / "models.safetensors", models)
