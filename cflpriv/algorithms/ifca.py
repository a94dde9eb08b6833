"""IFCA: clients pick the cluster model with the lowest loss on their data and train it; K models, clusters found anew in every round.

Source: Ghosh et al. 2020 (NeurIPS), "An Efficient Framework for Clustered Federated Learning", Algorithm 2 (gradient and model averaging),
section 4.3 (weight sharing, communication saver), section 6 (restarts, inference). HypCluster (Mansour et al. 2020) is the same algorithm.

Each round the server sends all K models to the sampled clients S_t (Alg. 2, l. 4); client i estimates ĵ = argmin_j F_i(θ_j) on its training
data (l. 6) and takes a gradient there (option I) or trains on (option II); models are updated from the clients that chose them (l. 13, 16).

Deviations, each for a reason:
- Clients send updates (local minus received), not models: the same mean, and a transformed mean never sees a model. With one sampled
  client a cluster's new model is its local one up to rounding.
- The gradient is that of all training samples (the paper allows a stochastic one). Ties go to the first of equal models.
- Restarts run in parallel on the same cohorts and batches. The one whose last mean training loss (of the models that the clients received,
  on the data of the round's cohort) is lowest is served. `decide_after` drops the others after that many rounds. The paper does not
  define how a restart is chosen on neural networks. A client remembers the local model of the restart that was best before the round.
- Inference: a client uses the model with the lowest loss on its training data. The paper and `variant="authors"` take the labelled test
  data of the test client, which are not known before the prediction is made.
- The communication saver: the paper wants the identities of all machines to be stable. Few of them are met in a round. So it switches on
  when each client present that was ever met has kept its estimate `stable_rounds` times in a row when met again. It stays on. Clients
  without an estimate are sent all models first.
- The server's clustering is each client's last estimate. For a client not sampled lately it may differ from the model that it would be
  served. A model may have no client.
- Averages are unweighted, as printed; `weights="examples"` weighs clients by their sample counts inside a cluster. Gradients divided by
  the size of the cohort (l. 13) refuse that: the divisor would lack the counts of clusters below the minimum cohort size.
- Under oblivious sums the choice stays with the client: the server then knows neither clusters nor when to save.
- A restart in which no group reaches the minimum cohort size, or all training diverged (and is skipped), keeps its models for the round.
  The round fails only if all restarts do. Shared layers are trained all the same.
- To compare restarts, the mean training loss is released, as `LOSS_COPIES` equal numbers. The server needs their norm only, so a
  transformed mean serves as well (it shows each client's loss, as it shows the norm of each update).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ..contract.handles import GroupMean, Held, Labels, Shared
from ..contract.operations import Federation
from ..contract.transcript import RoundRecord
from ..engine import Task
from ..errors import InputError, TooFewClients, TrainingDiverged
from ..privacy.settings import Releases
from ..tasks.evaluation import Evaluate, Losses
from ..tasks.training import Gradient, Train
from ..types import Array
from .attempts import choices, mean_with_overall, try_mean
from .checks import at_least, known
from .choosing import LOSS_COPIES, LOSS_UNIT, EvaluateLowest, Layout, PickAndTrain, Spans, WithoutWork, parted, shared_spans
from .fedavg import Weights
from .interface import Algorithm, AlgorithmSpec, Served
from .steps import clustering_of, mean_notes, moved

__all__ = ["Problem", "Restart", "State", "alternate", "hypcluster", "ifca"]


@dataclass(frozen=True)
class Problem:
    """What IFCA alternates on: `start(attempt)` gives initial parameters, `losses` a client's losses and choice.

    `local(round)` is the local work, whose part `part` is averaged and added `rate(round)` times.
    """

    layout: Layout
    start: Callable[[int], Array]
    losses: Task
    evaluate: Task
    local: Callable[[int], Task]
    part: str
    rate: Callable[[int], float]
    on_divergence: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True, eq=False)
class Restart:
    """One random start: cluster models (without shared coordinates), the shared ones, each client's last estimate.

    `stable` counts how many times in a row a client was met again with the estimate unchanged, for the communication saver only.
    """

    models: tuple[Shared, ...]
    joint: Shared | None
    labels: Mapping[int, int]
    stable: Mapping[int, int] = field(default_factory=dict)
    saving: bool = False
    loss: float = float("inf")


@dataclass(frozen=True, eq=False)
class State:
    """All restarts, and which of them is best so far. `hidden` are the clients' choices where the server does not learn them."""

    restarts: tuple[Restart, ...]
    best: int = 0
    rounds: int = 0
    hidden: Held | None = None


@dataclass(frozen=True, eq=False)
class Done:
    """What one round did to one restart, with whom; `failed` is the error for which it did nothing."""

    restart: Restart
    contributors: tuple[int, ...]
    hidden: Held | None
    notes: Mapping[str, Any]
    failed: TooFewClients | TrainingDiverged | None = None


@dataclass(frozen=True)
class IfcaSettings:
    """What is fixed in a run. A cluster's mean counts `by_share` of the cohort (l. 13); `spans` are the shared coordinates."""

    problem: Problem
    k: int
    by_share: bool
    restarts: int
    decide_after: int
    spans: Spans
    stable_rounds: int
    authors: bool
    weights: Weights


def ifca(
    train: Train,
    *,
    k: int = 2,
    averaging: Literal["model", "gradient"] = "model",
    divide_by: Literal["cohort", "cluster"] = "cohort",
    restarts: int = 1,
    decide_after: int = 0,
    shared: tuple[str, ...] = (),
    stable_rounds: int = 0,
    variant: Literal["paper", "authors"] = "paper",
    weights: Weights = "equal",
    seed: int = 0,
) -> Algorithm:
    """IFCA with `k` cluster models.

    `averaging`: "model" trains by `train` and averages, "gradient" takes one full-batch step of `train.lr`, divided by the size of the
    cohort (Alg. 2, l. 13) or, with `divide_by="cluster"`, by that of the cluster. `restarts` random starts run side by side, after
    `decide_after` rounds only the best (0: all to the end). `shared` names parameters by prefix that all clients train together, or is
    ("all_but_last",). Once each client met was met again `stable_rounds` times in a row without a changed estimate, each is sent its model
    only (0: never).

    Raises `InputError` for parameters that cannot be.
    """
    known("averaging", averaging, "model", "gradient")
    if averaging == "gradient":
        for name in ("momentum", "weight_decay", "prox", "maml_lr", "clip_norm", "sampling_rate", "frozen", "pull"):
            if getattr(train, name):
                raise InputError(
                    f"training.{name}: {getattr(train, name)} has no effect with algorithm.averaging = 'gradient'; leave it out"
                )
        if train.optimizer != "sgd":
            raise InputError(f"training.optimizer: {train.optimizer!r} has no effect with algorithm.averaging = 'gradient'; leave it out")
        if train.epochs != 1:
            raise InputError(f"training.epochs: {train.epochs} local epochs make no gradient; 1 with algorithm.averaging = 'gradient'")
    model = train.model
    by_gradient = averaging == "gradient"
    problem = Problem(
        model.layout,
        lambda attempt: model.init(seed, attempt),
        Losses(model),
        Evaluate(model),
        (lambda round: Gradient(model, train.on_divergence)) if by_gradient else train.at,
        "gradient" if by_gradient else "update",
        (lambda round: -train.at(round).lr) if by_gradient else (lambda round: 1.0),
        train.on_divergence,
    )
    return alternate(
        problem, k=k, by_share=by_gradient and divide_by == "cohort", divide_by=divide_by, restarts=restarts, decide_after=decide_after,
        shared=shared, stable_rounds=stable_rounds, variant=variant, weights=weights,
    )  # fmt: skip


def alternate(
    problem: Problem,
    *,
    k: int,
    by_share: bool,
    divide_by: str = "cohort",
    restarts: int = 1,
    decide_after: int = 0,
    shared: tuple[str, ...] = (),
    stable_rounds: int = 0,
    variant: str = "paper",
    weights: Weights = "equal",
) -> Algorithm:
    """IFCA on any `problem`. With `by_share` a cluster's mean is scaled by its share of the cohort (gradient averaging as printed)."""
    at_least(1, k=k, restarts=restarts)
    at_least(0, decide_after=decide_after, stable_rounds=stable_rounds)
    known("divide_by", divide_by, "cohort", "cluster")
    known("variant", variant, "paper", "authors")
    known("weights", weights, "equal", "examples")
    if by_share and weights == "examples":
        raise InputError(
            "training.weights: 'examples' with algorithm.averaging = 'gradient', which divides by the number of the cohort's clients; use "
            "'equal', or divide_by = 'cluster'"
        )
    if decide_after and restarts == 1:
        raise InputError(f"algorithm.decide_after: {decide_after} rounds to decide between one restart; give restarts")
    spans = shared_spans(problem.layout, shared) if shared else ()
    settings = IfcaSettings(problem, k, by_share, restarts, decide_after, spans, stable_rounds, variant == "authors", weights)
    return Algorithm(
        "ifca", ("gather", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings),
        partial(_describe, settings), regroups=f"algorithm.restarts = {restarts}: each start has its own" if restarts > 1 else "",
    )  # fmt: skip


def _init(settings: IfcaSettings, federation: Federation) -> State:
    if settings.k > len(federation.clients):
        raise InputError(f"algorithm.k: {settings.k} clusters of {len(federation.clients)} clients")
    return State(tuple(_start(settings, restart) for restart in range(settings.restarts)))


def _start(settings: IfcaSettings, restart: int) -> Restart:
    """θ_j⁰ (Alg. 2, l. 2)."""
    whole = [settings.problem.start(restart * settings.k + j) for j in range(settings.k)]
    if not settings.spans:
        return Restart(tuple(Shared(one) for one in whole), None, {})
    joint, _ = parted(whole[0], settings.spans)
    return Restart(tuple(Shared(parted(one, settings.spans)[1]) for one in whole), Shared(joint), {})


def _round(settings: IfcaSettings, federation: Federation, state: State) -> tuple[State, RoundRecord]:
    """One round of every restart on the same cohort, and which of them is best after it."""
    labelled = state.restarts[state.best].labels
    strata = {client: labelled.get(client, settings.k) for client in federation.clients}  # those without an estimate are one stratum
    cohort = federation.cohort(state.hidden or strata)  # S_t (Alg. 2, l. 3)
    order = [i for i in range(len(state.restarts)) if i != state.best] + [state.best]  # the best last: its local models are remembered
    done = {i: _step(settings, federation, state.restarts[i], cohort, len(order) > 1) for i in order}
    failures = [one.failed for one in done.values() if one.failed is not None]
    if len(failures) == len(done):
        raise next((failure for failure in failures if isinstance(failure, TooFewClients)), failures[-1])
    runs = [done[i].restart for i in range(len(order))]
    best = min(range(len(runs)), key=lambda i: (runs[i].loss, i)) if len(runs) > 1 else 0
    notes = dict(done[best].notes)
    if len(runs) > 1:
        notes |= {"restart_losses": [run.loss if np.isfinite(run.loss) else None for run in runs], "best_restart": best}
    contributors, hidden = done[best].contributors, done[best].hidden
    labels = None if hidden is not None else tuple(runs[best].labels[client] for client in contributors)
    if settings.decide_after and state.rounds + 1 >= settings.decide_after:
        runs, best = [runs[best]], 0
    return State(tuple(runs), best, state.rounds + 1, hidden), RoundRecord(federation.round, contributors, labels, notes)


def _step(settings: IfcaSettings, federation: Federation, run: Restart, cohort: tuple[int, ...], compared: bool) -> Done:
    """One round of one restart (Alg. 2, l. 4-17). If all training diverged (and is skipped), it keeps its models."""
    try:
        held, labels = _local_work(settings, federation, run, cohort)
    except TrainingDiverged as error:
        if settings.problem.on_divergence != "skip":
            raise
        notes = {"chosen": [0] * settings.k, **mean_notes((None,) * settings.k), "changed_identities": None, "sent_one_model": run.saving}
        return Done(replace(run, loss=float("inf")), (), None, notes, error)
    # labels of all clients met, for the sizes: that of a cluster is not that of its share of a round's cohort
    groups: Labels | Held = held["choice"] if labels is None else {**run.labels, **labels}
    means, everyone, failed = _means(settings, federation, run, held, groups)
    rate, clients = settings.problem.rate(federation.round), held.clients
    # option I: θ_j − (γ/|S_t|) Σ_{i: ĵ_i = j} g_i (l. 13);  option II: the mean of θ̃_i over {i: ĵ_i = j} (l. 16)
    models = moved(
        federation, run.models, means, "step", labels, clients,
        factor=lambda mean: rate * mean.count / len(clients) if settings.by_share else rate,
    )  # fmt: skip
    joint = run.joint
    if joint is not None and everyone is not None:
        joint = federation.fold(joint + everyone.parts["shared"] * rate, on=clients[0])
    loss = _mean_loss(settings, federation, run, held) if compared else run.loss
    same = {client: label == run.labels[client] for client, label in (labels or {}).items() if client in run.labels}
    after = replace(run, models=models, joint=joint, labels={**run.labels, **(labels or {})}, loss=loss)
    notes = {
        "chosen": [0 if mean is None else mean.count for mean in means], **mean_notes(means),
        "changed_identities": None if labels is None else sum(not one for one in same.values()), "sent_one_model": run.saving,
    }  # fmt: skip
    hidden = held["choice"] if labels is None else None
    return Done(_counted(settings, after, same, federation.clients), clients, hidden, notes, failed)


def _local_work(
    settings: IfcaSettings, federation: Federation, run: Restart, cohort: tuple[int, ...]
) -> tuple[Held, dict[int, int] | None]:
    """The cohort's local work at the models of its estimates, and the estimates (None: an oblivious sum keeps them private)."""
    task = PickAndTrain(settings.problem.losses, settings.problem.local(federation.round), settings.problem.part, settings.spans)
    labels: dict[int, int] | None
    if run.saving:  # each client is sent the model of its estimate only (section 4.3)
        strangers = [client for client in cohort if client not in run.labels]
        labels = {client: run.labels[client] for client in cohort if client in run.labels}
        labels |= _estimates(settings, federation, run, strangers) if strangers else {}
        held = federation.compute(task, _params(run), which=labels, on=sorted(labels))
    else:
        held = federation.compute(task, _params(run), on=cohort)  # all k models to each of S_t (Alg. 2, l. 4)
        labels = choices(federation, held["choice"], settings.k)
    # whose choice did not come has no group to be summed in, least of all that of an earlier round
    return (held if labels is None else held.of(labels)), labels


def _means(
    settings: IfcaSettings, federation: Federation, run: Restart, held: Held, groups: Labels | Held
) -> tuple[tuple[GroupMean | None, ...], GroupMean | None, TooFewClients | None]:
    """The mean step of each cluster, that of everyone on the shared coordinates (section 4.3), and why the round failed, if it did."""
    k, weights = settings.k, settings.weights
    if run.joint is None:
        try:
            return federation.mean(held["step"], weights, groups, k), None, None
        except TooFewClients as error:
            return (None,) * k, None, error
    sent = k if run.saving else 1  # how many different lists of models all of them were sent
    means, everyone = mean_with_overall(federation, held["step", "shared"], held["shared"], weights, groups, k, sent)
    return means, everyone, TooFewClients((), 1) if everyone is None else None


def _mean_loss(settings: IfcaSettings, federation: Federation, run: Restart, held: Held) -> float:
    """The mean training loss of the models that the clients received; the last one known where it is not released."""
    (total,) = try_mean(federation, held["loss"], settings.weights, models=settings.k if run.saving else 1)
    if total is None or total.parts["loss"].own:
        return run.loss
    return float(total.parts["loss"].norm() * LOSS_UNIT / np.sqrt(LOSS_COPIES))


def _counted(settings: IfcaSettings, run: Restart, same: Mapping[int, bool], clients: Sequence[int]) -> Restart:
    """The restart with its counts of unchanged estimates, by which the communication saver switches on (section 4.3)."""
    if not settings.stable_rounds or run.saving:
        return run
    stable = {**run.stable, **{client: run.stable.get(client, 0) + 1 if kept else 0 for client, kept in same.items()}}
    met = [client for client in clients if client in run.labels]
    return replace(run, stable=stable, saving=bool(met) and all(stable.get(client, 0) >= settings.stable_rounds for client in met))


def _params(run: Restart) -> dict[str, Any]:
    models = {"model": list(run.models)}
    return models if run.joint is None else {**models, "shared": run.joint}  # one copy, beside k of the rest (section 4.3)


def _estimates(settings: IfcaSettings, federation: Federation, run: Restart, clients: Sequence[int]) -> dict[int, int]:
    """What clients choose, without local work; nothing where choices stay with them."""
    held = federation.compute(PickAndTrain(settings.problem.losses, WithoutWork(), "nothing", settings.spans), _params(run), on=clients)
    return choices(federation, held["choice"], settings.k) or {}


def _serve(settings: IfcaSettings, state: State) -> Served:
    by: Literal["train", "test"] = "test" if settings.authors else "train"
    return Served(
        EvaluateLowest(settings.problem.losses, settings.problem.evaluate, by, settings.spans), _params(state.restarts[state.best])
    )


def _admit(settings: IfcaSettings, federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, Mapping[str, Any]]:
    """Newcomers are served the model of lowest loss as everybody is; the server learns their estimates (where it learns any)."""
    run = state.restarts[state.best]
    labels = _estimates(settings, federation, run, newcomers)
    kept = list(state.restarts)
    kept[state.best] = replace(run, labels={**run.labels, **labels})
    return replace(state, restarts=tuple(kept)), {"joined": [labels[client] for client in sorted(labels)]}


def _describe(settings: IfcaSettings, state: State) -> Mapping[str, Any]:
    run = state.restarts[state.best]
    if not run.labels:
        return {"clustering": None, "evidence": None}
    return {"clustering": clustering_of(run.labels, settings.k), "evidence": None, "best_restart": state.best}


hypcluster = ifca


def _sample_releases(rounds: int, given: Mapping[str, Any]) -> Releases:
    if given.get("averaging", "model") != "model":
        raise InputError("algorithm.averaging = 'gradient' under privacy.unit = 'sample': gradients have no private form; use 'model'")
    if given.get("restarts", 1) != 1:
        raise InputError(
            f"algorithm.restarts = {given['restarts']} under privacy.unit = 'sample': the losses by which they are compared are not "
            "released; use 1"
        )
    return Releases(trainings=rounds, choices=rounds)


IFCA = AlgorithmSpec(
    "ifca", ifca, "clients pick the best of k models in every round (Ghosh et al. 2020)",
    states=(State, Restart), tasks=(EvaluateLowest, PickAndTrain, WithoutWork), sample_releases=_sample_releases,
)  # fmt: skip
HYPCLUSTER = replace(IFCA, name="hypcluster", summary="another name for ifca (Mansour et al. 2020)")
"""HypCluster (Mansour et al. 2020), the same algorithm under its other name."""
