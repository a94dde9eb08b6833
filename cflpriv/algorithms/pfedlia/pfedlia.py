"""pFedLIA: clients score each other's locally trained models on data they hold back, and train on with those that help.

Source: Rokvic, Danassis & Faltings 2025, Sections III-B to III-F and IV-D, equation 1.

FedAvg trains one model θ₀ first (Sec. IV-D). Then, once: every client j trains θ₀ a little on its own data and sends it to the others
(III-D, step 1); client i scores it by the fall of its own validation loss, I(i, j) = Σ_z L(z, θ₀) − L(z, θ̃_j) (step 2, eq. 1). Either the
server gathers the N × N scores and clusters their rows with OPTICS ("central"), or every client divides its own row by 2-means and keeps
the better group ("peer"). FedAvg goes on within each cluster, or within each client's neighbourhood (III-F).

Deviations, each for a reason:
- Clients send updates from θ₀ through `relay`, encrypted for each other, not models. No party learns more. Each client is in its own
  neighbourhood. Its score of itself is not used in its 2-means: it would often be the only good one.
- A quarter of the training data (`validation`) is held back for the scores and is never trained on. Test data are never used.
- OPTICS needs `min_samples`, which the paper does not print. Without it the first clustering is taken that two values in a row agree on
  (`influence.stable_scores`): below the right values groups are cut in two, above them they run together. A noise
  point of OPTICS joins the cluster that it scores best on average, if above 0, else it stands alone. `scores="sign"` clusters signs.
- Without `warm_up` a run takes a fifth of its rounds for it, as the paper's 20 of 100, but at most 20.
- Clustering waits until three clients, and `min_samples`, have an update and scores. The warm-up goes on meanwhile. A client without valid
  scores is left out of the matrix and the neighbourhoods, and is placed like a newcomer. A model that is missing, or has no finite loss on
  a client's data, scores as low as the worst there, or as one that doubles the loss of θ₀ if that is lower.
- `weights="examples"` counts all training samples, those held back as well: the shares differ by rounding only.
- One-dimensional 2-means is solved exactly, so it needs no random start. Without two different scores, all are in the better group if
  the score is not negative.
- In a neighbourhood N_i, θ_i becomes the mean of its sampled members' own models after training; these travel as movements from θ₀.
  Equal neighbourhoods share one model, so exact neighbourhoods are FedAvg per cluster. θ₀ is sent again in every round, though a client
  could keep it.
- `influence="exact"` is the reference of III-B, in the clear and slow: for every client j, θ*_{−j} is trained from the initial model by
  all others in `exact_rounds` rounds of full participation (each with the same batches), θ* by all; I(i, j) = Σ_z L(z, θ*_{−j}) − L(z, θ*)
  on i's validation data. The sum over all and the sum without one client reveal that client's update: it is for experiments only.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import Annotated, Any, Literal

import numpy as np

from ...contract.handles import Held, Labels, Shared
from ...contract.operations import Federation
from ...contract.schedule import Leaving, Schedule, request, scores
from ...contract.transcript import RoundRecord
from ...errors import InputError, TooFewClients
from ...keys import Key, ranged
from ...privacy.settings import Releases
from ...tasks.evaluation import Evaluate
from ...tasks.training import Train
from ...types import Array
from ..fedavg import Weights
from ..interface import Algorithm, AlgorithmSpec, BeforeRun, Served
from ..shared.checks import RunLength, length_of_run
from ..shared.steps import OrElse, clustering_of, mean_notes, moved
from .influence import HasValidation, Influence, Neighbours, OnPart, Scores, cluster_scores, helps_most, score_notes, scored, stable_scores

__all__ = ["FEWEST", "PfedliaState", "pfedlia"]

WARM_UP, SHARE = 20, 5
"""The paper's rounds of warm-up: of 100, so one round of `SHARE`."""
FEWEST = 3
"""The smallest number of clients whose scores can be distinguished."""


@dataclass(frozen=True, eq=False)
class PfedliaState:
    """Before clustering one model, θ₀ in the making; then the groups' `models` and each group's `members`, and whose model is whose.

    `groups[z]` are the clients that model z is averaged over; `uses[client]` is the model that a client uses and trains. Groups overlap in
    peer mode. `lazy` are the clients' updates of θ₀, kept by them for newcomers to score.
    """

    warm: Shared
    models: tuple[Shared, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    uses: Mapping[int, int] = field(default_factory=dict)
    lazy: Held | None = None
    scores: Array | None = None
    scored: tuple[int, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def clustered(self) -> bool:
        return bool(self.models)

    @property
    def labels(self) -> OrElse:
        """The model of every client; those not placed yet have label k, which stands for θ₀."""
        return OrElse(self.uses, len(self.models))


@dataclass(frozen=True)
class PfedliaSettings:
    """What is fixed in a run: training on the training part, and before scores are taken (`lazily`); how scores are made and used."""

    training: OnPart
    lazily: OnPart
    warm_up: int
    peer: bool
    exact: bool
    scores: Scores
    min_samples: int | None
    exact_rounds: int
    weights: Weights

    def scoring(self, clients: tuple[int, ...]) -> Influence:
        """The task that scores the models of `clients`."""
        return Influence(self.training.train.model, self.training.validation, clients, seed=self.training.seed)


@ranged("algorithm")
def pfedlia(
    train: Train,
    *,
    warm_up: Annotated[
        int | None,
        Key(
            "The round, from 0, that clusters and trains nothing; FedAvg before it, FedAvg in groups after it.",
            "[0, inf)",
            "rounds",
            default="20, or a fifth of the rounds if that is less",
        ),
    ] = None,
    mode: Annotated[
        Literal["central", "peer"], Key("Where clients are clustered: at the server (`central`), or by each client for itself (`peer`).")
    ] = "central",
    influence: Annotated[
        Literal["lazy", "exact"], Key("Scores from one training of a part (`lazy`), or from retraining without each client (`exact`).")
    ] = "lazy",
    scores: Annotated[Scores, Key("Scores as numbers, or their signs only.")] = "value",
    local_epochs: Annotated[int, Key("k of section III-D: epochs of the training that scores are made of.", "[1, inf)", "epochs")] = 10,
    local_samples: Annotated[int, Key("Samples of that training; 0: all of the training part.", "[0, inf)", "samples")] = 0,
    validation: Annotated[float, Key("Share of a client's training data that is held back for scores.", "(0, 1)")] = 0.25,
    min_samples: Annotated[int | None, Key("OPTICS' least number of neighbours.", "[2, inf)", "clients", default="found")] = None,
    exact_rounds: Annotated[int, Key("Rounds of each retraining of the exact influence.", "[1, inf)", "rounds")] = 100,
    rounds: RunLength = 100,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """pFedLIA. Round number `warm_up` (from 0) clusters and trains nothing; those before it are FedAvg, those after it FedAvg in groups.

    Without `warm_up` there are 20, or a fifth of the run's `rounds` if that is less. `local_epochs` is k of III-D, on
    `local_samples` of the client's training part (0: all of it). `validation` is the share held back. `min_samples` is OPTICS'; without it
    it is found. `exact_rounds` are the rounds of each retraining of the exact influence.

    Raises `InputError` for parameters that cannot be, and, before anything is trained, for clients with too little data to hold some back.
    """
    warm_up = _warm_up(rounds) if warm_up is None else warm_up
    lazily = OnPart(replace(train, epochs=local_epochs), validation, local_samples, remember=False, seed=seed)
    parts, peer, exact = OnPart(train, validation, seed=seed), mode == "peer", influence == "exact"
    settings = PfedliaSettings(parts, lazily, warm_up, peer, exact, scores, min_samples, exact_rounds, weights)
    reason = "algorithm.influence = 'exact': everybody but one client, for each" if exact else ""
    return Algorithm(
        "pfedlia", ("relay", "gather", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings),
        partial(_describe, settings), public_groups=True,
        regroups="algorithm.mode = 'peer': groups overlap" if peer else reason, schedule=None if exact else _schedule(settings),
    )  # fmt: skip


def _schedule(settings: PfedliaSettings) -> Schedule:
    """A training each round; once, when the client is placed, the training and the row of scores that it is placed by.

    The exact influence has none: how often a client trains for it follows from the number of clients.
    """
    ready, scoring = request(HasValidation(settings.training.validation)), settings.scoring(())
    leaves: dict[str, Leaving] = {"update": "sum"}
    rows = [request(scoring, {"scores": "gather"}, varies=("clients",))]
    if settings.peer:
        leaves["movement"] = "sum"
        rows = [
            request(scoring, varies=("clients",)),
            request(Neighbours((), settings.scores), {"neighbours": "gather"}, varies=("clients",)),
        ]
    placing = (ready, request(settings.lazily, {"update": "relay"}), *rows)
    return Schedule((ready,), (request(settings.training, leaves),), placing, (scores(Evaluate(settings.training.train.model)),))


def _init(settings: PfedliaSettings, federation: Federation) -> PfedliaState:
    count, training = len(federation.clients), settings.training
    federation.compute(HasValidation(training.validation))  # nothing leaves; a client that cannot hold data back fails here
    if settings.min_samples is not None and settings.min_samples > count:
        raise InputError(f"algorithm.min_samples: {settings.min_samples} for {count} clients")
    if count < FEWEST:
        raise InputError(f"algorithm 'pfedlia': {count} client(s); scores of at least {FEWEST} can be distinguished")
    return PfedliaState(Shared(training.train.model.init(training.seed)))


def _round(settings: PfedliaSettings, federation: Federation, state: PfedliaState) -> tuple[PfedliaState, RoundRecord]:
    """FedAvg of θ₀ (IV-D), then once the clustering, then FedAvg in groups (III-F)."""
    if not state.clustered and federation.round >= settings.warm_up and (clustered := _cluster(settings, federation, state)) is not None:
        return clustered
    cohort = federation.cohort(state.labels)
    if not state.clustered:
        everyone = OrElse({}, 0)
        (warm,), notes = _average(settings, federation, (state.warm,), everyone, everyone, cohort)
        return replace(state, warm=warm), RoundRecord(federation.round, cohort, None, {"stage": "warm-up", **notes})
    late = [client for client in cohort if client not in state.uses]
    if late:
        state, _ = _place(settings, federation, state, late)
        cohort = tuple(client for client in cohort if client in state.uses)  # without those whose scores did not come
    taken: dict[int, list[int]] = {client: [] for client in state.uses}  # also of those not sampled: they count in a group's size
    for group, members in enumerate(state.groups):
        for client in members:
            taken[client].append(group)
    models, notes = _average(settings, federation, state.models, state.labels, taken, cohort, state.warm if settings.peer else None)
    notes = {"stage": "groups", **notes, "placed": sum(client in state.uses for client in late)}
    labels = tuple(state.uses[client] for client in cohort)
    return replace(state, models=models), RoundRecord(federation.round, cohort, labels, notes)


def _average(
    settings: PfedliaSettings, federation: Federation, models: Sequence[Shared], uses: Labels, taken: Labels, cohort: Sequence[int],
    origin: Shared | None = None,
) -> tuple[tuple[Shared, ...], dict[str, Any]]:  # fmt: skip
    """One round of FedAvg: clients train what they use, group z averages over the sampled clients with z among `taken`.

    Without an origin θ_z ← θ_z + mean of updates, for members that all use θ_z; with it θ_z ← θ₀ + mean of (own model − θ₀).
    """
    params: dict[str, Any] = {"model": list(models)} | ({} if origin is None else {"origin": origin})
    part = "update" if origin is None else "movement"
    held = federation.compute(settings.training.at(federation.round), params, which=uses, on=cohort)
    own = [client for client in held.clients if np.size(taken[client])]
    means = federation.mean(held[part], weights=settings.weights, groups=taken, k=len(models), on=own)
    after = moved(federation, models if origin is None else (origin,) * len(models), means, part, taken, own)
    return tuple(old if mean is None else new for old, new, mean in zip(models, after, means, strict=True)), mean_notes(means)


def _cluster(settings: PfedliaSettings, federation: Federation, state: PfedliaState) -> tuple[PfedliaState, RoundRecord] | None:
    """The one round that scores and clusters: all clients present. None while they are too few."""
    lazy, fewest = None, max(FEWEST, settings.min_samples or 0)
    if len(federation.clients) < fewest:
        return None
    if settings.exact:
        held, columns = _exact_scores(settings, federation)
    else:
        lazy = federation.compute(settings.lazily.at(federation.round), {"model": state.warm})["update"]  # III-D, step 1
        if len(lazy.clients) < fewest:  # training of the others diverged
            return None
        held, columns = _lazy_scores(settings, federation, state.warm, lazy, lazy, lazy.clients)  # step 2
    rows = _rows(settings, federation, held, columns)
    clients = tuple(client for client in columns if client in rows)
    if len(clients) < fewest:
        return None
    matrix, noise = None, 0
    if settings.peer:
        chosen = {client: _taken(columns, rows[client], rows) for client in clients}
        groups = list(dict.fromkeys(chosen.values()))
        uses = {client: groups.index(group) for client, group in chosen.items()}
    else:
        matrix = np.stack([rows[client] for client in clients])[:, np.isin(columns, clients)]
        by = stable_scores if settings.min_samples is None else partial(cluster_scores, min_samples=settings.min_samples)
        labels, alone = by(matrix, scores=settings.scores)
        uses, noise = dict(zip(clients, labels.tolist(), strict=True)), int(alone.sum())
        groups = [tuple(client for client in clients if uses[client] == label) for label in range(int(labels.max()) + 1)]
    notes = {"groups": len(groups), "noise_clients": noise, "overlapping": sum(map(len, groups)) > len(clients)}
    state = replace(
        state, models=(state.warm,) * len(groups), groups=tuple(groups), uses=uses,
        lazy=None if lazy is None else lazy.of(clients), scores=matrix, scored=clients, notes=notes,
    )  # fmt: skip
    record = {"stage": "clustering", **notes, **score_notes(matrix)}
    return state, RoundRecord(federation.round, clients, tuple(uses[client] for client in clients), record)


def _lazy_scores(
    settings: PfedliaSettings, federation: Federation, warm: Shared, lazy: Held, own: Held | None, on: Sequence[int]
) -> tuple[Held, tuple[int, ...]]:
    """Each client of `on` (with its `own` update if it is a member) gets the updates of the present members from their clients, and scores
    these updates.

    Their scores, and whose updates they are about.
    """
    here = set(federation.clients)
    senders = tuple(client for client in lazy.clients if client in here)
    sent = federation.relay(lazy, to={client: [sender for sender in senders if sender != client] for client in on})
    params: dict[str, Any] = {"model": warm, "updates": sent} | ({} if own is None else {"own": own})
    return federation.compute(settings.scoring(senders), params, on=sent.of(on).clients), senders


def _exact_scores(settings: PfedliaSettings, federation: Federation) -> tuple[Held, tuple[int, ...]]:
    """III-B by retraining: θ* by all, θ*_{−j} by all but j. The scores, and whom they are about."""
    clients = federation.clients
    whole = _retrained(settings, federation, clients)
    without = [_retrained(settings, federation, [client for client in clients if client != left]) for left in clients]
    return federation.compute(settings.scoring(clients), {"model": whole, "without": without}), clients


def _retrained(settings: PfedliaSettings, federation: Federation, members: Sequence[int]) -> Shared:
    """FedAvg of the members from the initial model."""
    training = settings.training
    model = Shared(training.train.model.init(training.seed))
    for _ in range(settings.exact_rounds):
        held = federation.compute(replace(training, remember=False), {"model": model}, on=members)
        means = federation.mean(held["update"], weights=settings.weights)
        (model,) = moved(federation, (model,), means, "update", None, members)
    return model


def _rows(settings: PfedliaSettings, federation: Federation, held: Held, columns: tuple[int, ...]) -> dict[int, Array]:
    """What each client releases about the clients `columns`: its scores, or in peer mode 1 for each chosen client.

    Clients whose row did not come, or cannot be, are left out.
    """
    released = held["scores"]
    if settings.peer:
        released = federation.compute(Neighbours(columns, settings.scores), {"scores": released}, on=held.clients)["neighbours"]
    rows = {client: np.asarray(values[released.part]) for client, values in federation.gather(released).items()}
    return {client: row for client, row in rows.items() if row.shape == (len(columns),) and np.isfinite(row).all()}


def _taken(columns: Sequence[int], row: Array, among: Collection[int]) -> tuple[int, ...]:
    """Those of the `columns` that a client takes into its neighbourhood."""
    return tuple(other for other, score in zip(columns, row, strict=True) if score > 0 and other in among)


def _place(settings: PfedliaSettings, federation: Federation, state: PfedliaState, newcomers: Sequence[int]) -> tuple[PfedliaState, int]:
    """Newcomers score the members' updates of θ₀ and choose: the cluster that helps most, or their better group. Members stay.

    A newcomer that no cluster helps opens one at θ₀; a new neighbourhood starts from the mean of its members' models.
    """
    if state.lazy is None:
        raise InputError("algorithm.influence: the exact influence of newcomers would need every retraining again; use 'lazy'")
    if not set(federation.clients).intersection(state.lazy.clients):  # no client that was clustered is present to be scored
        raise TooFewClients((), 1)
    federation.compute(HasValidation(settings.training.validation), on=newcomers)
    held, senders = _lazy_scores(settings, federation, state.warm, state.lazy, None, newcomers)
    groups, models, uses = list(state.groups), list(state.models), dict(state.uses)
    joined = np.array([state.uses[sender] for sender in senders])
    for client, row in _rows(settings, federation, held, senders).items():
        members = _taken(senders, row, senders) if settings.peer else ()
        best = -1 if settings.peer else helps_most(row, joined, range(len(state.groups)))
        if best >= 0:
            groups[best] = tuple(sorted((*groups[best], client)))
            uses[client] = best
            continue
        uses[client] = len(groups)
        groups.append(tuple(sorted((*members, client))))
        start = reduce(add, (models[uses[member]] * (1 / len(members)) for member in members)) if members else state.warm
        models.append(federation.fold(start, on=client) if settings.peer else start)
    return replace(state, groups=tuple(groups), models=tuple(models), uses=uses), len(groups) - len(state.groups)


def _serve(settings: PfedliaSettings, state: PfedliaState) -> Served:
    return Served(Evaluate(settings.training.train.model), {"model": [*state.models, state.warm]}, state.labels)


def _admit(
    settings: PfedliaSettings, federation: Federation, state: PfedliaState, newcomers: Sequence[int]
) -> tuple[PfedliaState, Mapping[str, Any]]:
    fresh = [client for client in newcomers if client not in state.uses]
    if not state.clustered or not fresh:
        return state, {"opened_clusters": 0}
    state, opened = _place(settings, federation, state, fresh)
    return state, {"opened_clusters": opened}


def _describe(settings: PfedliaSettings, state: PfedliaState) -> Mapping[str, Any]:
    """In peer mode clusters are clients with equal neighbourhoods, newcomers left out of these; the neighbourhoods may overlap."""
    if not state.clustered:
        return {"clustering": None, "stage": "warm-up"}
    uses, k = dict(state.uses), len(state.models)
    neighbourhoods = {client: state.groups[uses[client]] for client in sorted(uses)}
    if settings.peer:
        chosen = {client: tuple(other for other in group if other in state.scored) for client, group in neighbourhoods.items()}
        distinct = list(dict.fromkeys(chosen.values()))
        uses, k = {client: distinct.index(group) for client, group in chosen.items()}, len(distinct)
    evidence: dict[str, Any] | None = None
    if state.scores is not None:
        rows = scored(state.scores, settings.scores)
        evidence = {"scores": state.scores, "clients": state.scored, "distance": np.linalg.norm(rows[:, None] - rows[None], axis=2)}
    rule = "2-means of each client's scores" if settings.peer else "OPTICS on scores"
    described = {"clustering": clustering_of(uses, k), "evidence": evidence, "rule": rule, **state.notes}
    return described | ({"neighbourhoods": neighbourhoods} if settings.peer else {})


def _sample_releases(rounds: int, settings: Mapping[str, Any]) -> Releases:
    """FedAvg before and after the one round that scores; in that, a lazy update and a row of scores."""
    if settings.get("influence", "lazy") != "lazy":
        raise InputError(
            "algorithm.influence = 'exact' under privacy.unit = 'sample': it trains once for every client left out; use 'lazy'"
        )
    if rounds <= int(settings.get("warm_up", WARM_UP)):
        return Releases(trainings=rounds)
    epochs = int(settings.get("local_epochs", 10))
    return Releases(signatures=1, trainings=rounds - 1, extra_epochs=epochs, mechanism="scores", singly=True)


def _defaults(settings: Mapping[str, Any], before: BeforeRun) -> Mapping[str, Any]:
    return {**length_of_run(settings, before), "warm_up": _warm_up(before.rounds)}


def _warm_up(rounds: int) -> int:
    """The rounds of warm-up of a run: a fifth of its rounds, so that one is left to cluster in, and at most `WARM_UP`."""
    return max(0, min(WARM_UP, max(1, rounds // SHARE), rounds - 1))


def _never_clusters(settings: Mapping[str, Any], before: BeforeRun) -> str:
    warm_up = int(settings.get("warm_up", WARM_UP))
    return f"algorithm.warm_up = {warm_up}, and the run has {before.rounds} rounds" if 0 < before.rounds <= warm_up else ""


def _knowledge(settings: Mapping[str, Any]) -> str:
    if settings.get("mode") == "peer":
        return "none: 2-means of each client's scores"
    least = settings.get("min_samples")
    return "none: the clustering of scores that two min_samples agree on" if least is None else f"a density, min_samples = {least}"


PFEDLIA = AlgorithmSpec(
    "pfedlia", pfedlia, "clusters or neighbourhoods by lazy influence on validation losses (Rokvic et al. 2025)",
    states=(PfedliaState,), tasks=(HasValidation, Influence, Neighbours, OnPart), sample_releases=_sample_releases, replace_only=True,
    cohorts="labelled", defaults=_defaults, never_clusters=_never_clusters, knowledge=_knowledge,
)  # fmt: skip
