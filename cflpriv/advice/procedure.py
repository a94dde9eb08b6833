"""Train and score what could be deployed beside the models of a run: local models, one model, mixtures, and random clusters as the control.

All of it follows the last round of the run, so the models of the run are those that are scored. Held-out samples take no part in any
training, before or after. Each sum has a round of its own, so that no update is in two sums. What leaves the clients are updates and the
three parts of `tasks.advice`, in sums over all clients, and for the stability of groups the values that the algorithm compares, twice more.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from ..algorithms.fedavg import Weights, average_within
from ..algorithms.interface import Algorithm, Served
from ..class_counts import MARGINS
from ..clustering.scores import ari
from ..contract.handles import Shared
from ..contract.operations import Federation
from ..contract.schedule import EACH_ROUND, Schedule, TaskRequest, request
from ..errors import InputError
from ..protocols.errors import TooFewClients
from ..randomness import stream
from ..tasks.advice import (
    EvaluateMixture,
    HeldOutClasses,
    HeldOutScores,
    KeepLocal,
    KeepProbabilities,
    KeepTuned,
    Options,
    Responsibilities,
    kept_names,
)
from ..tasks.balanced_scores import class_weights
from ..tasks.evaluation import Evaluate, EvaluateOwn
from ..tasks.own_mixture import SHARED_STEPS, floored
from ..tasks.training import Train
from ..types import Array, Clustering
from .verdict import (
    CLUSTERS,
    CLUSTERS_MIXTURE,
    LOCAL,
    ONE,
    ONE_MIXTURE,
    RANDOM,
    RANDOM_MIXTURE,
    Advice,
    Moments,
    cannot_tell,
    moments_of,
    verdict_of,
    would_use_clusters,
)

__all__ = ["Advised", "Plan", "advise", "further_rounds", "own_mixture", "plan_of", "with_advice"]

DEALS = 2
"""Deals of random clusters."""
SHORT, LONG, LONG_ALONE, LOCAL_BESIDE = 0.1, 0.5, 1.0, 0.5
"""Fine-tunings, in passes of a client in the whole run: the short one, and the long one of the shared model, beside clusters and without;
and the training of local models beside clusters (without: as long as the run). With `CONTROL` they keep all passes below three times those
of the run."""
CONTROL = 0.25
"""Rounds of a deal, which goes on from the one model, as a share of those of the run."""
SEARCHES = 2
"""Further searches for groups, for their stability."""


@dataclass(frozen=True)
class Plan:
    """What is fixed before: local training, the run's number of rounds, the expected passes of a client over its data in the run, weights.

    `again(number)` is the algorithm with another seed, whose `init` searches for groups anew. `served` is the task by which the algorithm
    serves its models.
    """

    train: Train
    rounds: int
    passes: int
    weights: Weights
    seed: int
    served: object
    again: Callable[[int], Algorithm]

    def tuned(self, beside: bool) -> tuple[int, int]:
        """Passes of the short and the long fine-tuning; `beside`: cluster models are trained, too."""
        short = max(1, int(SHORT * self.passes))
        return short, max(short + 1, int((LONG if beside else LONG_ALONE) * self.passes))

    def local(self, beside: bool) -> int:
        """Passes of local training."""
        return max(self.train.epochs, int(self.passes * (LOCAL_BESIDE if beside else 1.0)))

    @property
    def control(self) -> int:
        """Rounds of a deal."""
        return _control_rounds(self.rounds)


def _control_rounds(rounds: int) -> int:
    return max(1, int(rounds * CONTROL))


def plan_of(
    algorithm: Algorithm, again: Callable[[int], Algorithm], train: Train, rounds: int, participation: float, weights: Weights, seed: int
) -> Plan:  # fmt: skip
    """The plan for a run of this algorithm. Raises `InputError` for one that declares no schedule, and
    where clients use models of their own."""
    if algorithm.schedule is None or not algorithm.schedule.serving:
        raise InputError(f"run.advise, training.mixture: algorithm {algorithm.name!r} declares no task that serves its models")
    served = algorithm.schedule.serving[0].task
    if "mean" not in algorithm.operations or hasattr(served, "reads"):
        raise InputError(_own_models(algorithm))
    passes = max(1, round(rounds * train.epochs * participation))
    return Plan(train, rounds, passes, weights, seed, served, again)


def _own_models(algorithm: Algorithm) -> str:
    return f"run.advise, training.mixture: clients of {algorithm.name!r} use models of their own; take one of one model or of clusters"


def further_rounds(rounds: int) -> int:
    """How many rounds the advice may take after the `rounds` of a run: one model, the control, searches, and a round for each sum."""
    return rounds + DEALS * _control_rounds(rounds) + SEARCHES + 2 * (SHARED_STEPS + 2) + 5


# --- which models there are, and what is made of them ---


def _members(plan: Plan, clusters: bool, deals: int) -> dict[str, tuple[str, ...]]:
    """The models of each option, by the names under which clients keep them. An option with several is a mixture of them.

    Random clusters appear once for each deal.
    """
    short, long = plan.tuned(clusters)
    base = (*kept_names("local"), *kept_names("one", (short, long)))
    members = {LOCAL: base[:1], ONE: base[1:2], ONE_MIXTURE: base}
    if clusters:
        own = kept_names("clusters", (short,))
        members |= {CLUSTERS: own[:1], CLUSTERS_MIXTURE: (*base, *own)}
    if deals:
        members |= {f"{RANDOM} {deal}": kept_names(f"random {deal}") for deal in range(deals)}
        members[RANDOM_MIXTURE] = (*base, *kept_names("random 0", (short,)))
    return members


def _places(members: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], Options]:
    """All models, and the places of each option's among them."""
    names = tuple(dict.fromkeys(name for option in members.values() for name in option))
    return names, tuple(tuple(names.index(name) for name in option) for option in members.values())


def _requests(plan: Plan) -> tuple[TaskRequest, ...]:
    """All that the advice may ask of a client. Counted over the whole run."""
    train, model, evaluate = plan.train, plan.train.model, Evaluate(plan.train.model)
    asked = [request(train, {"update": "sum"}, times=EACH_ROUND)]
    for clusters in (False, True):
        short, long = plan.tuned(clusters)
        asked.append(request(KeepLocal(train, plan.seed, plan.local(clusters))))
        asked += [request(KeepTuned(train, served, "one", (short, long))) for served in dict.fromkeys((evaluate, plan.served))]
    asked.append(request(KeepTuned(train, plan.served, "clusters", (short,))))
    asked += [request(KeepTuned(train, evaluate, f"random {deal}", () if deal else (short,))) for deal in range(DEALS)]
    for clusters, deals in ((False, 0), (True, 0), (True, min(DEALS, plan.rounds))):
        members = _members(plan, clusters, deals)
        names, options = _places(members)
        fitted = _fitted(members, options)
        asked.append(request(KeepProbabilities(model, names)))
        asked.append(request(Responsibilities(fitted, model), {"responsibilities": "sum"}, times=SHARED_STEPS))
        asked.append(request(HeldOutScores(options, model), {"scores": "sum"}))
    if model.classes <= MARGINS:
        asked.append(request(HeldOutClasses(model), {"classes": "sum"}))
    for number in range(SEARCHES):
        asked += _search(plan, number)
    return tuple(dict.fromkeys(asked))


def with_advice(algorithm: Algorithm, plan: Plan) -> Algorithm:
    """The algorithm with a schedule that also has what the advice asks of clients."""
    schedule = algorithm.schedule or Schedule()
    return replace(algorithm, schedule=replace(schedule, joining=(*schedule.joining, *_requests(plan))))


def _fitted(members: Mapping[str, tuple[str, ...]], options: Options) -> Options:
    """The mixtures whose shared weights are fitted: with random clusters theirs alone, since the others were fitted before."""
    control = RANDOM_MIXTURE in members
    return tuple(
        option for name, option in zip(members, options, strict=True) if len(option) > 1 and (name == RANDOM_MIXTURE or not control)
    )


# --- the procedure ---


@dataclass(frozen=True, eq=False)
class Advised:
    """The verdict, what clients would be served by each option, and what it took.

    `stability`: the mean ARI of three searches for groups, None where the algorithm's beginning finds none. `passes`: of a client over its
    training data, those of the run included, over those of the run. `numbers`: that a client put into sums besides updates.
    """

    verdict: Advice
    served: Mapping[str, Served] = field(default_factory=dict)
    stability: float | None = None
    passes: float = 1.0
    numbers: int = 0


@dataclass(eq=False)
class _Run:
    """The federation after the run, and what the advice has taken so far. `begin` begins the next round."""

    federation: Federation
    plan: Plan
    begin: Callable[[], None]
    passes: float = 0.0
    numbers: int = 0
    weights: dict[str, Array] = field(default_factory=dict)
    class_weights: Array | None = None
    clients: set[int] = field(default_factory=set)

    def mean(self, task: HeldOutClasses | HeldOutScores | Responsibilities, part: str, params: Mapping[str, Array]) -> tuple[Array, int]:
        """The mean of a part over all clients that have the models, and their number. Raises `TooFewClients`."""
        self.begin()
        held = self.federation.compute(
            task, {name: Shared(value) for name, value in params.items()}, on=sorted(self.clients & set(self.federation.clients))
        )
        (mean,) = self.federation.mean(held[part], weights="equal")
        if mean is None:
            raise TooFewClients((len(held.clients),), 1)
        value = mean.parts[part].value()
        self.numbers += len(value)
        return value, mean.count

    def keep(self, task: KeepLocal | KeepTuned | KeepProbabilities, served: Served | None = None) -> None:
        """Clients keep models. Those that have no result take no further part."""
        held = self.federation.compute(
            task, {} if served is None else served.params, None if served is None else served.which, sorted(self.clients)
        )
        self.clients &= set(held.clients)


def advise(
    federation: Federation, algorithm: Algorithm, state: object, plan: Plan, begin: Callable[[], None], report: Callable[[str], None]
) -> Advised:  # fmt: skip
    """The advice after the last round of a run. `begin` begins the federation's next round; `report` gets lines of progress.

    Raises `InputError` for an algorithm whose clients use models of their own.
    """
    run = _Run(federation, plan, begin, clients=set(federation.clients))
    served = algorithm.serve(state)
    _check_shared(algorithm, served)
    clustering = algorithm.describe(state).get("clustering")
    several = any(len(_listed(value)) > 1 for name, value in served.params.items() if name == "model")
    clustered = clustering is not None and len(set(clustering.labels)) > 1
    beside = clustered or (clustering is None and several)
    stability, deals = None, _deals(plan, clustering)
    try:
        if beside:
            report("advice: one model is trained beside the cluster models")
            shared, starts = _one_model(run, deals)
        else:
            shared, starts = served, {}
        _with_own_models(run, shared, beside)
        short, _ = plan.tuned(beside)
        if beside:
            run.keep(KeepTuned(plan.train, served.task, "clusters", (short,)), served)
            run.passes += short
        moments = _scored(run, beside, 0)
        if clustered and would_use_clusters(moments):
            assert clustering is not None
            stability = _stability(run, clustering)
            report(f"advice: {len(deals)} deals of random clusters are trained as the control")
            _control(run, deals, starts, short)
            moments = _scored(run, beside, len(deals))
    except TooFewClients as error:
        return Advised(cannot_tell(f"a sum over all clients failed ({error})"), passes=_ratio(run), numbers=run.numbers)
    verdict = verdict_of(moments, stability, stream(plan.seed, "advice intervals"))
    return Advised(verdict, _served(plan, moments, beside), stability, _ratio(run), run.numbers)


def own_mixture(
    federation: Federation, algorithm: Algorithm, state: object, plan: Plan, begin: Callable[[], None]
) -> Advised:  # fmt: skip
    """Each client's own mixture of the model that it uses after a run, that model fine-tuned, and a local model.

    The weights stay at the client. The options are those of an advice on one model; for "one model" read the models of the run. Raises
    `TooFewClients`, and `InputError` for an algorithm whose clients use models of their own.
    """
    run, served = _Run(federation, plan, begin, clients=set(federation.clients)), algorithm.serve(state)
    _check_shared(algorithm, served)
    _with_own_models(run, served, beside=False)
    moments = _scored(run, False, 0)
    verdict = verdict_of(moments, None, stream(plan.seed, "advice intervals"))
    return Advised(verdict, _served(plan, moments, False), None, _ratio(run), run.numbers)


def _check_shared(algorithm: Algorithm, served: Served) -> None:
    """Raises `InputError` for an algorithm whose clients use models of their own."""
    if any(isinstance(model, Shared) and model.own for value in served.params.values() for model in _listed(value)):
        raise InputError(_own_models(algorithm))


def _with_own_models(run: _Run, shared: Served, beside: bool) -> None:
    """Clients train a local model, and keep the shared model as they receive it and fine-tuned."""
    plan = run.plan
    run.keep(KeepLocal(plan.train, plan.seed, plan.local(beside)))
    short, long = plan.tuned(beside)
    run.keep(KeepTuned(plan.train, shared.task, "one", (short, long)), shared)
    run.passes += plan.local(beside) + long


def _ratio(run: _Run) -> float:
    return 1.0 + run.passes / run.plan.passes


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


def _deals(plan: Plan, clustering: Clustering | None) -> dict[int, Clustering]:
    """The deals of random clusters, of the sizes found, by the round in which their models branch off the one model."""
    if clustering is None or len(set(clustering.labels)) < 2:
        return {}
    labels, count = np.array(clustering.labels), min(DEALS, plan.rounds)
    first = max(0, plan.rounds - plan.control - (count - 1))
    dealt = (stream(plan.seed, "advice random clusters", deal).permutation(labels) for deal in range(count))
    return {
        first + deal: Clustering(clustering.clients, tuple(int(label) for label in own), clustering.k) for deal, own in enumerate(dealt)
    }


def _one_model(run: _Run, deals: Mapping[int, Clustering]) -> tuple[Served, dict[int, tuple[Shared, ...]]]:
    """One model of as many rounds as the run had, and the models with which the deals of random clusters begin.

    The first model is another than the run's, so that no update is in two sums. For the same reason the updates of a round in which random
    clusters branch off are summed within these, and the one model goes on from the mean of their models.
    """
    plan, federation, starts = run.plan, run.federation, dict[int, tuple[Shared, ...]]()
    first = int(stream(plan.seed, "advice one model").integers(2**31))
    model = Shared(plan.train.model.init(first))
    for number in range(plan.rounds):
        run.begin()
        train, random = plan.train.at(number), deals.get(number)
        everyone = random or Clustering(federation.clients, (0,) * len(federation.clients), 1)
        models = (model,) * everyone.k
        with suppress(TooFewClients):
            models, _ = average_within(federation, models, everyone, train, plan.weights)
        model = _mean_model(models, everyone)
        if random is not None:
            starts[number] = models
    run.passes += plan.passes
    return Served(Evaluate(plan.train.model), {"model": model}), starts


def _control(run: _Run, deals: Mapping[int, Clustering], starts: Mapping[int, tuple[Shared, ...]], short: int) -> None:
    """Train random clusters to the number of rounds of the run. Clients keep the model of their random cluster in each deal."""
    plan = run.plan
    for deal, (branched, random) in enumerate(deals.items()):
        models = starts[branched]
        for number in range(branched + 1, plan.rounds):
            run.begin()
            with suppress(TooFewClients):
                models, _ = average_within(run.federation, models, random, plan.train.at(number), plan.weights)
            run.passes += plan.passes / plan.rounds
        served = Served(Evaluate(plan.train.model), {"model": list(models)}, random)
        run.clients &= set(random.clients)
        run.keep(KeepTuned(plan.train, Evaluate(plan.train.model), f"random {deal}", () if deal else (short,)), served)
    run.passes += short


def _mean_model(models: Sequence[Shared], clustering: Clustering) -> Shared:
    """The mean of cluster models, each counted as often as it has clients."""
    sizes = np.bincount(clustering.labels, minlength=len(models)) / len(clustering.labels)
    total = models[0] * float(sizes[0])
    for model, size in zip(models[1:], sizes[1:], strict=True):
        total = total + model * float(size)
    return total


def _scored(run: _Run, clusters: bool, deals: int) -> Moments:
    """Fit the shared weights of mixtures, and sum all clients' scores. Raises `TooFewClients`."""
    members = _members(run.plan, clusters, deals)
    names, options = _places(members)
    model = run.plan.train.model
    run.begin()
    run.keep(KeepProbabilities(model, names))
    fitted = _fitted(members, options)
    fitting = [name for name, option in zip(members, options, strict=True) if option in fitted]
    sizes = [len(option) for option in fitted]
    weights, by_class = np.concatenate([np.full(size, 1 / size) for size in sizes]), _class_weights(run)
    for _ in range(SHARED_STEPS):
        weights, _ = run.mean(Responsibilities(fitted, model), "responsibilities", {"weights": weights, "class_weights": by_class})
    for name, part in zip(fitting, np.split(weights, np.cumsum(sizes)[:-1]), strict=True):
        run.weights[name] = floored(np.maximum(part, 0) / np.maximum(part, 0).sum())
    all_weights = np.concatenate([run.weights[name] for name, option in zip(members, options, strict=True) if len(option) > 1])
    params = {"weights": all_weights, "class_weights": by_class}
    value, count = run.mean(HeldOutScores(options, model), "scores", params)
    return moments_of([RANDOM if name.startswith(f"{RANDOM} ") and name != RANDOM_MIXTURE else name for name in members], value, count)


def _class_weights(run: _Run) -> Array:
    """How much a held-out sample counts by its class (classes,), summed once; (0,) for more classes than the report counts."""
    if run.class_weights is None:
        model, run.class_weights = run.plan.train.model, np.zeros(0)
        if model.classes <= MARGINS:
            run.class_weights = class_weights(*run.mean(HeldOutClasses(model), "classes", {}))
    return run.class_weights


def _search(plan: Plan, number: int) -> tuple[TaskRequest, ...]:
    """What a further search for groups asks of clients. Empty where the algorithm's beginning compares nothing, or what it compares is
    the update of a round: by the contract that leaves clients in sums alone."""
    schedule = plan.again(number).schedule
    if schedule is None:
        return ()
    compared = [asked.task for asked in schedule.start if any("gram" in ways for _, ways in asked.leaves)]
    return schedule.start if compared and plan.train not in compared else ()


def _stability(run: _Run, clustering: Clustering) -> float | None:
    """The mean ARI of the groups of the run and of further searches from other seeds; None where the algorithm cannot search again."""
    searches = [dict(zip(clustering.clients, clustering.labels, strict=True))]
    for number in range(SEARCHES):
        if not _search(run.plan, number):
            return None
        run.begin()
        again = run.plan.again(number)
        other = again.describe(again.init(run.federation)).get("clustering")
        if other is None:
            return None
        searches.append(dict(zip(other.clients, other.labels, strict=True)))
    agreement = []
    for i, search in enumerate(searches):
        for other_search in searches[:i]:
            both = sorted(search.keys() & other_search.keys())
            agreement.append(ari([search[client] for client in both], [other_search[client] for client in both]))
    return float(np.mean(agreement))


def _served(plan: Plan, moments: Moments, clusters: bool) -> dict[str, Served]:
    """What clients use by each option, for whoever measures it on test data."""
    model = plan.train.model
    members, first = _members(plan, clusters, moments.names.count(RANDOM)), 0
    served: dict[str, Served] = {}
    for name, option in members.items():
        if len(option) > 1:
            served[name] = Served(EvaluateMixture(model, option, first), {})
            first += len(option)
        else:
            served[name] = Served(EvaluateOwn(model, option[0]), {"model": Shared(model.init(plan.seed))})
    return served
