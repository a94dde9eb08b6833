"""IFCA: clients pick the cluster model with the lowest loss on their data and train it; K models, clusters found anew in every round.

Source: Ghosh et al. 2020 (NeurIPS), "An Efficient Framework for Clustered Federated Learning", Algorithm 2 (gradient and model averaging),
section 4.3 (weight sharing, communication saver), section 6 (restarts, inference). HypCluster (Mansour et al. 2020) is the same algorithm.

Each round the server sends all K models to the sampled clients S_t (Alg. 2, l. 4); client i estimates ĵ = argmin_j F_i(θ_j) on its training
data (l. 6) and takes a gradient there (option I) or trains on (option II); models are updated from the clients that chose them (l. 13, 16).

Without `k` the test of `clustering.group_test` finds the number of models, by halves of the clients' gradients at the initial model, before
the first round. All models start from that one, and a client's first estimate is the group that was found for it; later ones are the
paper's. So models come apart in the first round, where random starts may leave two groups with one model for good.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np

from ...contract.handles import GroupMean, Held, Labels, Shared
from ...contract.operations import Federation
from ...contract.schedule import Leaving, Schedule, request, scores
from ...contract.transcript import RoundRecord
from ...errors import InputError, TooFewClients, TrainingDiverged
from ...keys import Key, ranged
from ...privacy.settings import Releases
from ...tasks.evaluation import Evaluate, Losses
from ...tasks.fold_gradients import FoldGradients
from ...tasks.halves import HALVES
from ...tasks.training import Gradient, Train
from ...types import Array
from ..fedavg import Weights
from ..interface import Algorithm, AlgorithmSpec, BeforeRun, ComparedValue, Served
from ..shared.attempts import choices, mean_with_overall, try_mean
from ..shared.checks import enough_clients
from ..shared.choosing import LOSS_COPIES, LOSS_UNIT, EvaluateLowest, PickAndTrain, Spans, WithoutWork, parted, shared_spans
from ..shared.grouping import ALPHA, DRAWS, FindGroups, check_draws, find_groups
from ..shared.steps import clustering_of, mean_notes, moved
from .restarts import IfcaState, Problem, Restart, RestartRound

__all__ = ["IfcaState", "Problem", "Restart", "alternate", "hypcluster", "ifca"]


@dataclass(frozen=True)
class IfcaSettings:
    """What is fixed in a run. A cluster's mean counts `by_share` of the cohort (l. 13); `spans` are the shared coordinates. Without `k`
    groups are found by `halves`.
    """

    problem: Problem
    k: int | None
    by_share: bool
    restarts: int
    decide_after: int
    spans: Spans
    stable_rounds: int
    authors: bool
    weights: Weights
    halves: tuple[FoldGradients, FindGroups] | None = None


@ranged("algorithm")
def ifca(
    train: Train,
    *,
    k: Annotated[
        int | None, Key("Number of cluster models.", "[1, inf)", "models", default="found by a test, where clients can be compared")
    ] = None,
    averaging: Annotated[
        Literal["model", "gradient"],
        Key("Clients train and models are averaged, or each takes one full-batch gradient step (`training.epochs = 1`)."),
    ] = "model",
    divide_by: Annotated[
        Literal["cohort", "cluster"],
        Key('`averaging = "gradient"`: divide the sum by the size of the cohort (Algorithm 2, line 13) or of the cluster.'),
    ] = "cohort",
    restarts: Annotated[int, Key("Random starts that run side by side.", "[1, inf)", "starts")] = 1,
    decide_after: Annotated[int, Key("After so many rounds only the best start goes on; 0: all to the end.", "[0, inf)", "rounds")] = 0,
    shared: Annotated[tuple[str, ...], Key('Prefixes of parameters that all clients train together, or ["all_but_last"].')] = (),
    stable_rounds: Annotated[
        int,
        Key(
            "Once no choice has changed for so many meetings of every client, each is sent its own model only; 0: never.",
            "[0, inf)",
            "meetings",
        ),
    ] = 0,
    variant: Annotated[Literal["paper", "authors"], Key("As the paper states it, or as its authors' code does.")] = "paper",
    alpha: Annotated[float, Key("Level of the test that finds the number of models.", "(0, 1)")] = ALPHA,
    draws: Annotated[int, Key("Simulations without groups, for the test; enough to show its level.", "[1, inf)", "simulations")] = DRAWS,
    weights: Weights = "equal",
    seed: int = 0,
) -> Algorithm:
    """IFCA with `k` cluster models, or with as many as a test at level `alpha` finds, with so many `draws` under the null hypothesis.

    `averaging`: "model" trains by `train` and averages, "gradient" takes one full-batch step of `train.lr`, divided by the size of the
    cohort (Alg. 2, l. 13) or, with `divide_by="cluster"`, by that of the cluster. `restarts` random starts run side by side, after
    `decide_after` rounds only the best (0: all to the end). `shared` names parameters by prefix that all clients train together, or is
    ("all_but_last",). Once each client met was met again `stable_rounds` times in a row without a changed estimate, each is sent its model
    only (0: never).

    Raises `InputError` for parameters that cannot be.
    """
    check_draws(alpha, draws)
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
    halves = (FoldGradients(model, seed=seed), FindGroups(alpha, draws, seed=seed, numbers=model.dimension)) if k is None else None
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
    algorithm = alternate(
        problem, k=k, by_share=by_gradient and divide_by == "cohort", divide_by=divide_by, restarts=restarts, decide_after=decide_after,
        shared=shared, stable_rounds=stable_rounds, variant=variant, weights=weights,
        halves=halves,
    )  # fmt: skip
    spans = shared_spans(model.layout, shared) if shared else ()
    work = PickAndTrain(problem.losses, Gradient(model, train.on_divergence) if by_gradient else train, problem.part, spans)
    served = _evaluating(problem, variant == "authors", spans)
    return replace(algorithm, schedule=_schedule(work, served, k, None if halves is None else halves[0], restarts, stable_rounds > 0))


def _schedule(
    work: PickAndTrain, served: EvaluateLowest, k: int | None, folds: FoldGradients | None, restarts: int, saves: bool
) -> Schedule:  # fmt: skip
    """Each restart has one training a round. Where clients are sent one model each, those without an estimate choose beforehand. A sum of
    shared layers has members that used different models.
    """
    leaves: dict[str, Leaving] = {"step": "sum", "choice": "gather"}
    if work.shared:
        leaves["shared"] = "sum"
    if restarts > 1:
        leaves["loss"] = "sum"
    one_each = saves or folds is not None
    estimate = replace(work, then=WithoutWork(), part="nothing")
    rounds = [request(work, leaves, times=restarts)] + ([request(estimate, {"choice": "gather"}, times=restarts)] if one_each else [])
    return Schedule(
        () if folds is None else (request(folds, {"folds": "gram"}),), tuple(rounds),
        () if one_each else (request(estimate, {"choice": "gather"}),), (scores(served),),
        k if k is not None and work.shared else 1,
    )  # fmt: skip


def _evaluating(problem: Problem, authors: bool, spans: Spans) -> EvaluateLowest:
    """The task that clients are scored by."""
    return EvaluateLowest(problem.losses, problem.evaluate, "test" if authors else "train", spans)


def alternate(
    problem: Problem,
    *,
    k: int | None,
    by_share: bool,
    divide_by: str = "cohort",
    restarts: int = 1,
    decide_after: int = 0,
    shared: tuple[str, ...] = (),
    stable_rounds: int = 0,
    variant: str = "paper",
    weights: Weights = "equal",
    halves: tuple[FoldGradients, FindGroups] | None = None,
) -> Algorithm:
    """IFCA on any `problem`. With `by_share` a cluster's mean is scaled by its share of the cohort (gradient averaging as printed). Without
    `k` groups are found by `halves`, of gradients at the model that the problem starts from.
    """
    if k is None and halves is None:
        raise InputError("algorithm.k: give the number of models; there is nothing here to find it by")
    if by_share and weights == "examples":
        raise InputError(
            "training.weights: 'examples' with algorithm.averaging = 'gradient', which divides by the number of the cohort's clients; use "
            "'equal', or divide_by = 'cluster'"
        )
    if decide_after and restarts == 1:
        raise InputError(f"algorithm.decide_after: {decide_after} rounds to decide between one restart; give restarts")
    spans = shared_spans(problem.layout, shared) if shared else ()
    settings = IfcaSettings(problem, k, by_share, restarts, decide_after, spans, stable_rounds, variant == "authors", weights, halves)
    return Algorithm(
        "ifca", ("gather", "mean") if k is not None else ("gram", "gather", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings),
        _describe, public_groups=k is None, regroups=f"algorithm.restarts = {restarts}: each start has its own" if restarts > 1 else "",
    )  # fmt: skip


def _init(settings: IfcaSettings, federation: Federation) -> IfcaState:
    k, problem = settings.k, settings.problem
    if k is not None:
        enough_clients(k, len(federation.clients))
        return IfcaState(
            tuple(_start(settings, [problem.start(restart * k + j) for j in range(k)], {}) for restart in range(settings.restarts))
        )
    assert settings.halves is not None
    folds, find = settings.halves
    held = federation.compute(folds, {"model": Shared(problem.start(0))})["folds"]
    grouping = find_groups(federation, held, find)
    federation.close(held)
    starts = [[problem.start(restart)] * grouping.clustering.k for restart in range(settings.restarts)]
    first = dict(zip(grouping.clustering.clients, grouping.clustering.labels, strict=True))
    return IfcaState(tuple(_start(settings, whole, first) for whole in starts), notes=grouping.notes, evidence=grouping.evidence)


def _start(settings: IfcaSettings, whole: Sequence[Array], first: Mapping[int, int]) -> Restart:
    """θ_j⁰ (Alg. 2, l. 2)."""
    if not settings.spans:
        return Restart(tuple(Shared(model) for model in whole), None, {}, first)
    joint, _ = parted(whole[0], settings.spans)
    return Restart(tuple(Shared(parted(model, settings.spans)[1]) for model in whole), Shared(joint), {}, first)


def _round(settings: IfcaSettings, federation: Federation, state: IfcaState) -> tuple[IfcaState, RoundRecord]:
    """One round of every restart on the same cohort, and the best restart after the round."""
    labelled, k = {**state.restarts[state.best].first, **state.restarts[state.best].labels}, len(state.restarts[state.best].models)
    strata = {client: labelled.get(client, k) for client in federation.clients}  # those without an estimate are one stratum
    cohort = federation.cohort(state.hidden or strata)  # S_t (Alg. 2, l. 3)
    order = [i for i in range(len(state.restarts)) if i != state.best] + [state.best]  # the best last: its local models are remembered
    done = {i: _step(settings, federation, state.restarts[i], cohort, len(order) > 1) for i in order}
    failures = [round_.failed for round_ in done.values() if round_.failed is not None]
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
    after = replace(state, restarts=tuple(runs), best=best, rounds=state.rounds + 1, hidden=hidden)
    return after, RoundRecord(federation.round, contributors, labels, notes)


def _step(settings: IfcaSettings, federation: Federation, run: Restart, cohort: tuple[int, ...], compared: bool) -> RestartRound:
    """One round of one restart (Alg. 2, l. 4-17). If all training diverged (and is skipped), it keeps its models."""
    try:
        held, labels = _local_work(settings, federation, run, cohort)
    except TrainingDiverged as error:
        if settings.problem.on_divergence != "skip":
            raise
        k = len(run.models)
        notes = {"chosen": [0] * k, **mean_notes((None,) * k), "changed_identities": None, "sent_one_model": run.one_each(cohort)}
        return RestartRound(replace(run, loss=float("inf")), (), None, notes, error)
    # labels of all clients met, for the sizes: that of a cluster is not that of its share of a round's cohort
    groups: Labels | Held = held["choice"] if labels is None else {**run.labels, **labels}
    one_each = run.one_each(cohort)
    lists = 1 if labels is None else len({labels[client] for client in held.clients})
    means, everyone, failed = _means(settings, federation, run, held, groups, lists)
    rate, clients = settings.problem.rate(federation.round), held.clients
    # option I: θ_j − (γ/|S_t|) Σ_{i: ĵ_i = j} g_i (l. 13);  option II: the mean of θ̃_i over {i: ĵ_i = j} (l. 16)
    models = moved(
        federation, run.models, means, "step", labels, clients,
        factor=lambda mean: rate * mean.count / len(clients) if settings.by_share else rate,
    )  # fmt: skip
    joint = run.joint
    if joint is not None and everyone is not None:
        joint = federation.fold(joint + everyone.parts["shared"] * rate, on=clients[0])
    loss = _mean_loss(settings, federation, run, held, lists) if compared else run.loss
    same = {client: label == run.labels[client] for client, label in (labels or {}).items() if client in run.labels}
    first = {client: label for client, label in run.first.items() if client not in (labels or {})}
    after = replace(run, models=models, joint=joint, labels={**run.labels, **(labels or {})}, first=first, loss=loss)
    notes = {
        "chosen": [0 if mean is None else mean.count for mean in means], **mean_notes(means),
        "changed_identities": None if labels is None else sum(not unchanged for unchanged in same.values()), "sent_one_model": one_each,
    }  # fmt: skip
    hidden = held["choice"] if labels is None else None
    return RestartRound(_counted(settings, after, same, federation.clients), clients, hidden, notes, failed)


def _local_work(
    settings: IfcaSettings, federation: Federation, run: Restart, cohort: tuple[int, ...]
) -> tuple[Held, dict[int, int] | None]:
    """The cohort's local work at the models of its estimates, and the estimates (None: an oblivious sum keeps them private)."""
    task = PickAndTrain(settings.problem.losses, settings.problem.local(federation.round), settings.problem.part, settings.spans)
    labels: dict[int, int] | None
    if run.one_each(cohort):
        known = run.labels if run.saving else run.first
        strangers = [client for client in cohort if client not in known]
        labels = {client: known[client] for client in cohort if client in known}
        labels |= _estimates(settings, federation, run, strangers) if strangers else {}
        held = federation.compute(task, run.params, which=labels, on=sorted(labels))
    else:
        held = federation.compute(task, run.params, on=cohort)  # all k models to each of S_t (Alg. 2, l. 4)
        labels = choices(federation, held["choice"], len(run.models))
    # whose choice did not come has no group to be summed in, least of all that of an earlier round
    return (held if labels is None else held.of(labels)), labels


def _means(
    settings: IfcaSettings, federation: Federation, run: Restart, held: Held, groups: Labels | Held, lists: int
) -> tuple[tuple[GroupMean | None, ...], GroupMean | None, TooFewClients | None]:
    """The mean step of each cluster, that of everyone on the shared coordinates (section 4.3), and why the round failed, if it did.

    `lists`: how many different models these clients used.
    """
    k, weights = len(run.models), settings.weights
    if run.joint is None:
        try:
            return federation.mean(held["step"], weights, groups, k), None, None
        except TooFewClients as error:
            return (None,) * k, None, error
    together = settings.k is not None or lists == 1  # else no contract says how many models there will be
    means, everyone = mean_with_overall(federation, held["step", "shared"], held["shared"], weights, groups, k, lists, together=together)
    return means, everyone, TooFewClients((), 1) if everyone is None else None


def _mean_loss(settings: IfcaSettings, federation: Federation, run: Restart, held: Held, lists: int) -> float:
    """The mean training loss of the models that the clients received. If the loss is not released: the last known loss."""
    (total,) = try_mean(federation, held["loss"], settings.weights, models=lists)
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


def _estimates(settings: IfcaSettings, federation: Federation, run: Restart, clients: Sequence[int]) -> dict[int, int]:
    """What clients choose, without local work; nothing where choices stay with them."""
    held = federation.compute(PickAndTrain(settings.problem.losses, WithoutWork(), "nothing", settings.spans), run.params, on=clients)
    return choices(federation, held["choice"], len(run.models)) or {}


def _serve(settings: IfcaSettings, state: IfcaState) -> Served:
    return Served(_evaluating(settings.problem, settings.authors, settings.spans), state.restarts[state.best].params)


def _admit(
    settings: IfcaSettings, federation: Federation, state: IfcaState, newcomers: Sequence[int]
) -> tuple[IfcaState, Mapping[str, Any]]:
    """Newcomers are served the model of lowest loss as everybody is; the server learns their estimates (where it learns any)."""
    run = state.restarts[state.best]
    labels = _estimates(settings, federation, run, newcomers)
    kept = list(state.restarts)
    kept[state.best] = replace(run, labels={**run.labels, **labels})
    return replace(state, restarts=tuple(kept)), {"joined": [labels[client] for client in sorted(labels)]}


def _describe(state: IfcaState) -> Mapping[str, Any]:
    run = state.restarts[state.best]
    labels = {**run.first, **run.labels}
    if not labels:
        return {"clustering": None, "evidence": None}
    return {"clustering": clustering_of(labels, len(run.models)), "evidence": state.evidence, "best_restart": state.best, **state.notes}


hypcluster = ifca


def _sample_releases(rounds: int, settings: Mapping[str, Any]) -> Releases:
    if settings.get("averaging", "model") != "model":
        raise InputError("algorithm.averaging = 'gradient' under privacy.unit = 'sample': gradients have no private form; use 'model'")
    if settings.get("restarts", 1) != 1:
        raise InputError(
            f"algorithm.restarts = {settings['restarts']} under privacy.unit = 'sample': the losses by which they are compared are not "
            "released; use 1"
        )
    return Releases(signatures=int(settings.get("k") is None), trainings=rounds, choices=rounds, mechanism="mean")


def _defaults(settings: Mapping[str, Any], before: BeforeRun) -> Mapping[str, Any]:
    """There is none for `k`: it is found, where that can be."""
    if settings.get("k") is None and (reason := before.no_groups or before.no_gram):
        raise InputError(f"algorithm.k: give the number of models: {reason}")
    return {}


def _knowledge(settings: Mapping[str, Any]) -> str:
    k = settings.get("k")
    return f"none: a test at level {settings.get('alpha', ALPHA):g}" if k is None else f"the number of groups, k = {k}"


IFCA = AlgorithmSpec(
    "ifca", ifca, "clients pick the best of k models in every round (Ghosh et al. 2020)",
    states=(IfcaState, Restart), tasks=(EvaluateLowest, FoldGradients, PickAndTrain, WithoutWork), functions=(FindGroups,),
    sample_releases=_sample_releases, cohorts="labelled", compared=lambda settings: ComparedValue(HALVES, halves=True), defaults=_defaults,
    knowledge=_knowledge,
)  # fmt: skip
HYPCLUSTER = replace(IFCA, name="hypcluster", summary="another name for ifca (Mansour et al. 2020)")
"""HypCluster (Mansour et al. 2020), the same algorithm under its other name."""
