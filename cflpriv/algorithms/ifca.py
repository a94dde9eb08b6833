"""IFCA: clients pick the cluster model with the lowest loss on their data and train it; K models, clusters found anew in every round.

Source: Ghosh et al. 2020 (NeurIPS), "An Efficient Framework for Clustered Federated Learning", Algorithm 2 (gradient and model averaging),
section 4.3 (weight sharing, communication saver), section 6 (restarts, inference). HypCluster (Mansour et al. 2020) is the same algorithm.

Each round the server sends all K models to the sampled clients S_t (Alg. 2, l. 4); client i estimates ĵ = argmin_j F_i(θ_j) on its training
data (l. 6) and takes a gradient there (option I) or trains on (option II); models are updated from the clients that chose them (l. 13, 16).

Deviations, each for a reason:
- Clients send updates (local minus received), not models: the same mean, and a transformed mean never sees a model. With one sampled
  client a cluster's new model is its local one up to rounding.
- The gradient is that of all training samples (the paper allows a stochastic one). Ties go to the first of equal models.
- Restarts run side by side on the same cohorts and batches. The one whose last mean training loss (of the models that the clients received,
  on the data of the round's cohort) is lowest is served; `decide_after` drops the others after that many rounds. The paper does not say
  how a restart is chosen on neural networks. A client remembers the local model of the restart that was best before the round: where
  another overtakes it, local models are those of the earlier one until their clients train again.
- Inference: a client uses the model with the lowest loss on its training data. The paper and `variant="authors"` take the labelled test
  data of the test client, which nobody has before the prediction is made.
- The communication saver: the paper wants the identities of all machines stable. Few of them are met in a round, so it switches on when
  each of those present that was ever met has been met again, and has kept its estimate, `stable_rounds` times in a row (where all take part
  in every round: after so many rounds without a change). It stays on; clients that have no estimate yet are sent all models first.
- The server's clustering is each client's last estimate. Of a client that was not sampled lately it may no longer be the model that it
  would be served, and a model may be nobody's.
- Averages are unweighted, as printed; `weights="examples"` weighs clients by their sample counts inside a cluster. Gradients divided by
  the size of the cohort (l. 13) refuse that: the counts of those whose cluster is below the minimum cohort size would be missing in the
  divisor.
- Where sums are oblivious the choice stays with the client: the server then knows neither clusters nor when to save.
- A restart in which no group reaches the minimum cohort size, or all clients' training diverged (and is skipped), keeps its models for the
  round; the round fails only where that goes for all restarts, and shared layers are trained all the same.
- To compare restarts, the mean training loss is released: as `LOSS_COPIES` equal numbers, of which the server needs the length only, so
  that a blind mean serves as well (it shows each client's loss, as it shows the norm of each update).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from ..types import Array, Clustering
from .attempts import choices, mean_with_overall, try_mean
from .choosing import LOSS_COPIES, LOSS_UNIT, EvaluateLowest, Layout, PickAndTrain, WithoutWork, parted, shared_spans
from .fedavg import Weights
from .interface import Algorithm, AlgorithmSpec, Served

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

    `stable` says of a client how many times in a row it was met again with the estimate unchanged; it is counted only for the saver.
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
    """What one round did to one restart, with whom; `failed` says why it did nothing."""

    restart: Restart
    contributors: tuple[int, ...]
    hidden: Held | None
    notes: Mapping[str, Any]
    failed: TooFewClients | TrainingDiverged | None = None


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

    `averaging`: "model" trains as `train` says and averages, "gradient" takes one full-batch step of `train.lr`, divided by the size of the
    cohort (Alg. 2, l. 13) or, with `divide_by="cluster"`, by that of the cluster. `restarts` random starts run side by side, after
    `decide_after` rounds only the best (0: all to the end). `shared` names parameters by prefix that all clients train together, or is
    ("all_but_last",). Once each client met was met again `stable_rounds` times in a row without a changed estimate, each is sent its model
    only (0: never).

    Raises `InputError` for parameters that cannot be.
    """
    if averaging not in ("model", "gradient"):
        raise InputError(f"algorithm.averaging: {averaging!r} is not known; known are model, gradient")
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
    counts = {"k": (k, 1), "restarts": (restarts, 1), "decide_after": (decide_after, 0), "stable_rounds": (stable_rounds, 0)}
    for name, (value, smallest) in counts.items():
        if value < smallest:
            raise InputError(f"algorithm.{name}: {value} is below {smallest}")
    words = {
        "divide_by": (divide_by, "cohort", "cluster"),
        "variant": (variant, "paper", "authors"),
        "weights": (weights, "equal", "examples"),
    }
    for name, (given, *known) in words.items():
        if given not in known:
            raise InputError(f"algorithm.{name}: {given!r} is not known; known are {', '.join(known)}")
    if by_share and weights == "examples":
        raise InputError(
            "training.weights: 'examples' with algorithm.averaging = 'gradient', which divides by the number of the cohort's clients; use "
            "'equal', or divide_by = 'cluster'"
        )
    if decide_after and restarts == 1:
        raise InputError(f"algorithm.decide_after: {decide_after} rounds to decide between one restart; give restarts")
    spans = shared_spans(problem.layout, shared) if shared else ()

    def init(federation: Federation) -> State:
        if k > len(federation.clients):
            raise InputError(f"algorithm.k: {k} clusters of {len(federation.clients)} clients")
        return State(tuple(begin(attempt) for attempt in range(restarts)))

    def begin(restart: int) -> Restart:
        whole = [problem.start(restart * k + j) for j in range(k)]  # θ_j⁰ (Alg. 2, l. 2)
        if not spans:
            return Restart(tuple(Shared(one) for one in whole), None, {})
        joint, _ = parted(whole[0], spans)
        return Restart(tuple(Shared(parted(one, spans)[1]) for one in whole), Shared(joint), {})

    def round(federation: Federation, state: State) -> tuple[State, RoundRecord]:
        known = state.restarts[state.best].labels
        strata = {client: known.get(client, k) for client in federation.clients}  # those without an estimate are a stratum of their own
        cohort = federation.cohort(state.hidden or strata)  # S_t (Alg. 2, l. 3)
        order = [i for i in range(len(state.restarts)) if i != state.best] + [state.best]  # the best last: its local models are remembered
        done = {i: once(federation, state.restarts[i], cohort, len(order) > 1) for i in order}
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
        if decide_after and state.rounds + 1 >= decide_after:
            runs, best = [runs[best]], 0
        return State(tuple(runs), best, state.rounds + 1, hidden), RoundRecord(federation.round, contributors, labels, notes)

    def once(federation: Federation, run: Restart, cohort: tuple[int, ...], compared: bool) -> Done:
        """One round of one restart."""
        try:
            return trained(federation, run, cohort, compared)
        except TrainingDiverged as error:
            if problem.on_divergence != "skip":
                raise
            nothing = {"chosen": [0] * k, "unchanged_clusters": list(range(k)), "clipped_clients": 0, "changed_identities": None}
            return Done(replace(run, loss=float("inf")), (), None, nothing | {"sent_one_model": run.saving}, error)

    def trained(federation: Federation, run: Restart, cohort: tuple[int, ...], compared: bool) -> Done:
        task = PickAndTrain(problem.losses, problem.local(federation.round), problem.part, spans)
        labels: Mapping[int, int] | None
        if run.saving:  # each client is sent the model of its estimate only (section 4.3)
            strangers = [client for client in cohort if client not in run.labels]
            labels = {client: run.labels[client] for client in cohort if client in run.labels}
            labels |= estimates(federation, run, strangers) if strangers else {}
            held = federation.compute(task, params_of(run), which=labels, on=sorted(labels))
        else:
            held = federation.compute(task, params_of(run), on=cohort)  # all k models to each of S_t (Alg. 2, l. 4)
            labels = choices(federation, held["choice"], k)
        if labels is not None:
            held = held.of(labels)  # whose choice did not come has no group to be summed in, least of all that of an earlier round
        # labels of all clients met, for the sizes: that of a cluster is not that of its share of a round's cohort
        groups: Labels | Held = held["choice"] if labels is None else {**run.labels, **labels}
        failed: TooFewClients | None = None
        means: tuple[GroupMean | None, ...] = (None,) * k
        everyone: GroupMean | None = None
        sent = k if run.saving else 1  # how many different lists of models all of them were sent
        if run.joint is None:
            try:
                means = federation.mean(held["step"], weights, groups, k)
            except TooFewClients as error:
                failed = error
        else:  # and plain averaging over everyone on the shared coordinates (section 4.3)
            means, everyone = mean_with_overall(federation, held["step", "shared"], held["shared"], weights, groups, k, sent)
            failed = TooFewClients((), 1) if everyone is None else None
        rate = problem.rate(federation.round)
        contributors = held.clients
        models = []
        for j, (model, mean) in enumerate(zip(run.models, means, strict=True)):
            if mean is None:  # nobody chose it (or too few): unchanged
                models.append(model)
                continue
            # option I: θ_j − (γ/|S_t|) Σ_{i: ĵ_i = j} g_i (l. 13);  option II: the mean of θ̃_i over {i: ĵ_i = j} (l. 16)
            factor = rate * mean.count / len(contributors) if by_share else rate
            step = mean.parts["step"] if factor == 1.0 else mean.parts["step"] * factor
            member = contributors[0] if labels is None else next(client for client in contributors if labels[client] == j)
            models.append(federation.fold(model + step, on=member))
        joint = run.joint
        if joint is not None and everyone is not None:
            joint = federation.fold(joint + everyone.parts["shared"] * rate, on=contributors[0])
        loss = run.loss
        if compared:
            (total,) = try_mean(federation, held["loss"], weights, models=sent)
            if total is not None and not total.parts["loss"].own:
                loss = total.parts["loss"].norm() * LOSS_UNIT / np.sqrt(LOSS_COPIES)
        found = labels or {}
        kept = {client: found[client] == run.labels[client] for client in found if client in run.labels}
        known, stable, saving = {**run.labels, **found}, run.stable, run.saving
        if stable_rounds and not saving:
            stable = {**stable, **{client: stable.get(client, 0) + 1 if same else 0 for client, same in kept.items()}}
            met = [client for client in federation.clients if client in known]
            saving = bool(met) and all(stable.get(client, 0) >= stable_rounds for client in met)
        notes = {
            "chosen": [0 if mean is None else mean.count for mean in means],
            "unchanged_clusters": [j for j, mean in enumerate(means) if mean is None],
            "clipped_clients": sum(mean.clipped for mean in means if mean is not None),
            "changed_identities": None if labels is None else sum(not same for same in kept.values()),
            "sent_one_model": run.saving,
        }
        after = Restart(tuple(models), joint, known, stable, saving, float(loss))
        return Done(after, contributors, held["choice"] if labels is None else None, notes, failed)

    def params_of(run: Restart) -> dict[str, Any]:
        models = {"model": list(run.models)}
        return models if run.joint is None else {**models, "shared": run.joint}  # one copy, beside k of the rest (section 4.3)

    def estimates(federation: Federation, run: Restart, clients: Sequence[int]) -> dict[int, int]:
        """What clients choose, without local work; nothing where choices stay with them."""
        held = federation.compute(PickAndTrain(problem.losses, WithoutWork(), "nothing", spans), params_of(run), on=clients)
        return choices(federation, held["choice"], k) or {}

    def serve(state: State) -> Served:
        by: Literal["train", "test"] = "test" if variant == "authors" else "train"
        return Served(EvaluateLowest(problem.losses, problem.evaluate, by, spans), params_of(state.restarts[state.best]))

    def admit(federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, Mapping[str, Any]]:
        """Newcomers are served the model of lowest loss as everybody is; the server learns their estimates (where it learns any)."""
        run = state.restarts[state.best]
        labels = estimates(federation, run, newcomers)
        kept = list(state.restarts)
        kept[state.best] = replace(run, labels={**run.labels, **labels})
        return replace(state, restarts=tuple(kept)), {"joined": [labels[client] for client in sorted(labels)]}

    def describe(state: State) -> Mapping[str, Any]:
        run = state.restarts[state.best]
        if not run.labels:
            return {"clustering": None, "evidence": None}
        clients = tuple(sorted(run.labels))
        clustering = Clustering(clients, tuple(run.labels[client] for client in clients), k)
        return {"clustering": clustering, "evidence": None, "best_restart": state.best}

    several = f"algorithm.restarts = {restarts}: each start has its own" if restarts > 1 else ""
    return Algorithm("ifca", ("gather", "mean"), init, round, serve, admit, describe, regroups=several)


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
