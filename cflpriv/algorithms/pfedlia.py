"""pFedLIA: clients score each other's locally trained models on data they hold back, and train on with those that help.

Source: Rokvic, Danassis & Faltings 2025, Sections III-B to III-F and IV-D, equation 1.

FedAvg warms one model θ₀ up (Sec. IV-D). Then, once: every client j trains θ₀ a little on its own data and sends it to the others
(III-D, step 1); client i scores it by the fall of its own validation loss, I(i, j) = Σ_z L(z, θ₀) − L(z, θ̃_j) (step 2, eq. 1). Either the
server gathers the N × N scores and clusters their rows with OPTICS ("central"), or every client divides its own row by 2-means and keeps
the better group ("peer"); FedAvg goes on within each cluster, or within each client's neighbourhood (III-F).

Deviations, each for a reason:
- Clients send updates from θ₀ through `relay`, encrypted for each other, not models; nobody learns more. Each client is in its own
  neighbourhood, and its score of itself takes no part in its 2-means: it would often be the only good one.
- A quarter of the training data (`validation`) is held back for the scores and takes no part in training at all; test data are never used.
- OPTICS needs `min_samples`: by default a tenth of the clients, at least 2 (scikit-learn's 5 finds sub-clusters among 100 clients). What it
  calls noise joins the cluster that it scores best on average, if that helps it at all, else stands alone. `scores="sign"` clusters signs.
- Clustering waits until three clients, and `min_samples`, are there with an update and their scores; the warm-up goes on meanwhile. Whose
  scores did not come, or cannot be, is out of the matrix and the neighbourhoods, and is placed like a newcomer. A model that did not
  come, or without a finite loss on somebody's data, scores as low as the worst there, or as one that doubles the loss of θ₀ if that is
  lower.
- `weights="examples"` counts all training samples, those held back as well: the shares differ by rounding only.
- One-dimensional 2-means is solved exactly, so it needs no random start. Without two different scores, everybody is in the better group
  if the score is not negative.
- In a neighbourhood N_i, θ_i becomes the mean of its sampled members' own models after training; these travel as movements from θ₀.
  Neighbourhoods that are equal share one model, so exact neighbourhoods are FedAvg per cluster. θ₀ is sent again in every round, though a
  client could keep it: two models down where one would do.
- `influence="exact"` is the reference of III-B, in the clear and slow: for every client j, θ*_{−j} is trained from the initial model by
  all others in `exact_rounds` rounds of full participation (each with the same batches), θ* by all; I(i, j) = Σ_z L(z, θ*_{−j}) − L(z, θ*)
  on i's validation data. Sums over all and over all but one tell that one's updates: it is for experiments only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ..contract.handles import Held, Labels, Shared
from ..contract.operations import Federation
from ..contract.transcript import RoundRecord
from ..errors import InputError, TooFewClients
from ..privacy.settings import Releases
from ..tasks.evaluation import Evaluate
from ..tasks.training import Train
from ..types import Array, Clustering
from .fedavg import Weights
from .influence import HasValidation, Influence, Neighbours, OnPart, Scores, cluster_scores, scored
from .interface import Algorithm, AlgorithmSpec, Served
from .steps import OrElse

__all__ = ["FEWEST", "State", "pfedlia"]

FEWEST = 3
"""Clients whose scores can be told apart."""


@dataclass(frozen=True, eq=False)
class State:
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


def pfedlia(
    train: Train,
    *,
    warm_up: int = 20,
    mode: Literal["central", "peer"] = "central",
    influence: Literal["lazy", "exact"] = "lazy",
    scores: Scores = "value",
    local_epochs: int = 10,
    local_samples: int = 0,
    validation: float = 0.25,
    min_samples: int | None = None,
    exact_rounds: int = 100,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """pFedLIA. Round number `warm_up` (from 0) clusters and trains nothing; those before it are FedAvg, those after it FedAvg in groups.

    `local_epochs` is k of III-D, on `local_samples` of the client's training part (0: all of it). `validation` is the share held back.
    `min_samples` is OPTICS'; `exact_rounds` are the rounds of each retraining of the exact influence.

    Raises `InputError` for parameters that cannot be, and, before anything is trained, for clients with too little data to hold some back.
    """
    if warm_up < 0:
        raise InputError(f"algorithm.warm_up: {warm_up} is negative")
    if mode not in ("central", "peer"):
        raise InputError(f"algorithm.mode: {mode!r} is not known; known are central, peer")
    if influence not in ("lazy", "exact"):
        raise InputError(f"algorithm.influence: {influence!r} is not known; known are lazy, exact")
    if scores not in ("value", "sign"):
        raise InputError(f"algorithm.scores: {scores!r} is not known; known are value, sign")
    counts = (("local_epochs", local_epochs, 1), ("local_samples", local_samples, 0), ("exact_rounds", exact_rounds, 1))
    for name, value, smallest in counts:
        if value < smallest:
            raise InputError(f"algorithm.{name}: {value} is below {smallest}")
    if not 0 < validation < 1:
        raise InputError(f"algorithm.validation: {validation} is outside (0, 1): without validation data there are no scores")
    if min_samples is not None and min_samples < 2:
        raise InputError(f"algorithm.min_samples: {min_samples} is below 2, where every client is a cluster")
    fewest = max(FEWEST, min_samples or 0)
    lazily = OnPart(replace(train, epochs=local_epochs), validation, local_samples, remember=False, seed=seed)
    train_part = OnPart(train, validation, seed=seed)

    def init(federation: Federation) -> State:
        federation.compute(HasValidation(validation))  # nothing leaves; a client that cannot hold data back says so now
        if min_samples is not None and min_samples > len(federation.clients):
            raise InputError(f"algorithm.min_samples: {min_samples} for {len(federation.clients)} clients")
        if len(federation.clients) < FEWEST:
            raise InputError(f"algorithm 'pfedlia': {len(federation.clients)} client(s); scores of at least {FEWEST} can be told apart")
        return State(Shared(train.model.init(seed)))

    def round(federation: Federation, state: State) -> tuple[State, RoundRecord]:
        if not state.clustered and federation.round >= warm_up and (clustered := cluster(federation, state)) is not None:
            return clustered
        cohort = federation.cohort(state.labels)
        if not state.clustered:
            warm, waiting, clipped = _average(federation, (state.warm,), OrElse({}, 0), OrElse({}, 0), cohort)
            notes = {"stage": "warm-up", "unchanged_clusters": waiting, "clipped_clients": clipped}
            return replace(state, warm=warm[0]), RoundRecord(federation.round, cohort, None, notes)
        late = [client for client in cohort if client not in state.uses]
        if late:
            state, _ = place(federation, state, late)
            cohort = tuple(client for client in cohort if client in state.uses)  # without those whose scores did not come
        taken: dict[int, list[int]] = {client: [] for client in state.uses}  # also of those not sampled: they count in a group's size
        for group, members in enumerate(state.groups):
            for client in members:
                taken[client].append(group)
        models, waiting, clipped = _average(federation, state.models, state.labels, taken, cohort, state.warm if mode == "peer" else None)
        placed = sum(client in state.uses for client in late)
        notes = {"stage": "groups", "unchanged_clusters": waiting, "clipped_clients": clipped, "placed": placed}
        labels = tuple(state.uses[client] for client in cohort)
        return replace(state, models=models), RoundRecord(federation.round, cohort, labels, notes)

    def _average(
        federation: Federation, models: Sequence[Shared], uses: Labels, taken: Labels, cohort: Sequence[int], origin: Shared | None = None
    ) -> tuple[tuple[Shared, ...], list[int], int]:
        """One round of FedAvg: clients train what they use, group z averages over the sampled clients with z among `taken`.

        Without an origin θ_z ← θ_z + mean of updates, for members that all use θ_z; with it θ_z ← θ₀ + mean of (own model − θ₀).
        """
        params: dict[str, Any] = {"model": list(models)} | ({} if origin is None else {"origin": origin})
        held = federation.compute(train_part.at(federation.round), params, which=uses, on=cohort)
        own = [client for client in held.clients if np.size(taken[client])]
        means = federation.mean(held["update" if origin is None else "movement"], weights=weights, groups=taken, k=len(models), on=own)
        updated = []
        for group, (model, mean) in enumerate(zip(models, means, strict=True)):
            if mean is None:
                updated.append(model)
                continue
            (moved,) = mean.parts.values()
            member = next(client for client in own if group in np.ravel(taken[client]))
            updated.append(federation.fold((model if origin is None else origin) + moved, on=member))
        clipped = sum(mean.clipped for mean in means if mean is not None)
        return tuple(updated), [group for group, mean in enumerate(means) if mean is None], clipped

    def cluster(federation: Federation, state: State) -> tuple[State, RoundRecord] | None:
        """The one round that scores and clusters: all clients present. None while they are too few."""
        lazy = None
        if len(federation.clients) < fewest:
            return None
        if influence == "exact":
            held, columns = _exact(federation)
        else:
            lazy = federation.compute(lazily.at(federation.round), {"model": state.warm})["update"]  # III-D, step 1
            if len(lazy.clients) < fewest:  # training of the others diverged
                return None
            held, columns = _lazy_scores(federation, state.warm, lazy, lazy, lazy.clients)  # step 2
        part, told = "scores", held
        if mode == "peer":
            part = "neighbours"
            told = federation.compute(Neighbours(columns, scores), {"scores": held["scores"]}, on=held.clients)
        rows = _rows(federation, told[part], len(columns))
        clients = tuple(client for client in columns if client in rows)
        if len(clients) < fewest:
            return None
        matrix, noise = None, np.zeros(len(clients), dtype=bool)
        if mode == "central":
            matrix = np.stack([rows[client] for client in clients])[:, np.isin(columns, clients)]
            labels, noise = cluster_scores(matrix, min_samples or max(2, len(clients) // 10), scores)
            groups = [tuple(int(client) for client in np.array(clients)[labels == label]) for label in range(int(labels.max()) + 1)]
            uses = {client: int(label) for client, label in zip(clients, labels, strict=True)}
        else:
            groups, uses = [], {}
            for client in clients:
                whole = tuple(other for other, taken in zip(columns, rows[client], strict=True) if taken > 0 and other in rows)
                if whole not in groups:
                    groups.append(whole)
                uses[client] = groups.index(whole)
        notes = {"groups": len(groups), "noise_clients": int(noise.sum()), "overlapping": sum(map(len, groups)) > len(clients)}
        state = replace(
            state, models=(state.warm,) * len(groups), groups=tuple(groups), uses=uses,
            lazy=None if lazy is None else lazy.of(clients), scores=matrix, scored=clients, notes=notes,
        )  # fmt: skip
        record = {"stage": "clustering", **notes, **_score_notes(matrix)}
        return state, RoundRecord(federation.round, clients, tuple(uses[client] for client in clients), record)

    def _lazy_scores(federation: Federation, warm: Shared, lazy: Held, own: Held | None, on: Sequence[int]) -> tuple[Held, tuple[int, ...]]:
        """Clients `on`, each with its `own` update if it is a member, get those of the members present from them, and score them.

        Their scores, and whose updates they are about.
        """
        here = set(federation.clients)
        senders = tuple(client for client in lazy.clients if client in here)
        sent = federation.relay(lazy, to={client: [sender for sender in senders if sender != client] for client in on})
        given: dict[str, Any] = {"model": warm, "updates": sent} | ({} if own is None else {"own": own})
        return federation.compute(Influence(train.model, validation, senders, seed=seed), given, on=sent.of(on).clients), senders

    def _exact(federation: Federation) -> tuple[Held, tuple[int, ...]]:
        """III-B by retraining: θ* by all, θ*_{−j} by all but j. The scores, and whom they are about."""
        clients = federation.clients

        def retrained(members: Sequence[int]) -> Shared:
            model = Shared(train.model.init(seed))
            for _ in range(exact_rounds):
                held = federation.compute(replace(train_part, remember=False), {"model": model}, on=members)
                (mean,) = federation.mean(held["update"], weights=weights)
                model = model if mean is None else federation.fold(model + mean.parts["update"], on=members[0])
            return model

        whole = retrained(clients)
        without = [retrained([client for client in clients if client != left]) for left in clients]
        return federation.compute(Influence(train.model, validation, clients, seed=seed), {"model": whole, "without": without}), clients

    def place(federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, int]:
        """Newcomers score the members' updates of θ₀ and choose: the cluster that helps most, or their better group. Members stay.

        A newcomer that no cluster helps opens one at θ₀; a new neighbourhood starts from the mean of its members' models.
        """
        if state.lazy is None:
            raise InputError("algorithm.influence: the exact influence of newcomers would need every retraining again; use 'lazy'")
        here = set(federation.clients)
        senders = tuple(client for client in state.lazy.clients if client in here)
        if not senders:  # none of the clients that were clustered is present to be scored by newcomers
            raise TooFewClients((), 1)
        federation.compute(HasValidation(validation), on=newcomers)
        held, senders = _lazy_scores(federation, state.warm, state.lazy, None, newcomers)
        groups, models, uses = list(state.groups), list(state.models), dict(state.uses)
        if mode == "central":
            joined = np.array([state.uses[sender] for sender in senders])
            for client, row in _rows(federation, held["scores"], len(senders)).items():
                by_group = [row[joined == group] for group in range(len(state.groups))]
                means = [float(one.mean()) if len(one) else -np.inf for one in by_group]
                best = int(np.argmax(means))
                if means[best] > 0:
                    groups[best] = tuple(sorted((*groups[best], client)))
                    uses[client] = best
                else:
                    uses[client] = len(groups)
                    groups.append((client,))
                    models.append(state.warm)
        else:
            chosen = federation.compute(Neighbours(senders, scores), {"scores": held["scores"]}, on=held.clients)
            for client, row in _rows(federation, chosen["neighbours"], len(senders)).items():
                members = [sender for sender, taken in zip(senders, row, strict=True) if taken > 0]
                uses[client] = len(groups)
                groups.append(tuple(sorted((*members, client))))
                start = state.warm
                if members:
                    start = models[uses[members[0]]] * (1 / len(members))
                    for member in members[1:]:
                        start = start + models[uses[member]] * (1 / len(members))
                models.append(federation.fold(start, on=client))
        opened = len(groups) - len(state.groups)
        return replace(state, groups=tuple(groups), models=tuple(models), uses=uses), opened

    def serve(state: State) -> Served:
        return Served(Evaluate(train.model), {"model": [*state.models, state.warm]}, state.labels)

    def admit(federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, Mapping[str, Any]]:
        fresh = [client for client in newcomers if client not in state.uses]
        if not state.clustered or not fresh:
            return state, {"opened_clusters": 0}
        state, opened = place(federation, state, fresh)
        return state, {"opened_clusters": opened}

    def describe(state: State) -> Mapping[str, Any]:
        """In peer mode clusters are clients with equal neighbourhoods, newcomers left out of these; the neighbourhoods may overlap."""
        if not state.clustered:
            return {"clustering": None, "stage": "warm-up"}
        clients = tuple(sorted(state.uses))
        clustering = Clustering(clients, tuple(state.uses[client] for client in clients), len(state.models))
        if mode == "peer":
            chosen = [tuple(other for other in state.groups[state.uses[client]] if other in state.scored) for client in clients]
            distinct = list(dict.fromkeys(chosen))
            clustering = Clustering(clients, tuple(distinct.index(one) for one in chosen), len(distinct))
        evidence: dict[str, Any] | None = None
        if state.scores is not None:
            rows = scored(state.scores, scores)
            evidence = {"scores": state.scores, "clients": state.scored, "distance": np.linalg.norm(rows[:, None] - rows[None], axis=2)}
        rule = "OPTICS on scores" if mode == "central" else "2-means of each client's scores"
        described = {"clustering": clustering, "evidence": evidence, "rule": rule, **state.notes}
        return described | ({"neighbourhoods": {client: state.groups[state.uses[client]] for client in clients}} if mode == "peer" else {})

    several = "algorithm.influence = 'exact': everybody but one client, for each" if influence == "exact" else ""
    several = "algorithm.mode = 'peer': groups overlap" if mode == "peer" else several
    return Algorithm("pfedlia", ("relay", "gather", "mean"), init, round, serve, admit, describe, public_groups=True, regroups=several)


def _rows(federation: Federation, held: Held, length: int) -> dict[int, Array]:
    """What each client says of `length` others, of those who said it."""
    told = {client: np.asarray(values[held.part]) for client, values in federation.gather(held).items()}
    return {client: row for client, row in told.items() if row.shape == (length,) and np.isfinite(row).all()}


def _score_notes(matrix: Array | None) -> dict[str, Any]:
    """What the gathered scores look like."""
    if matrix is None:
        return {}
    others = matrix[~np.eye(len(matrix), dtype=bool)]
    quantiles = np.quantile(others, (0, 0.25, 0.5, 0.75, 1))
    return {"scores_above_zero": float((others > 0).mean()), "score_quantiles": [float(q) for q in quantiles]}


def _sample_releases(rounds: int, given: Mapping[str, Any]) -> Releases:
    """FedAvg before and after the one round that scores; in that, a lazy update and a row of scores."""
    if given.get("influence", "lazy") != "lazy":
        raise InputError(
            "algorithm.influence = 'exact' under privacy.unit = 'sample': it trains once for every client left out; use 'lazy'"
        )
    if rounds <= int(given.get("warm_up", 20)):
        return Releases(trainings=rounds)
    epochs = int(given.get("local_epochs", 10))
    return Releases(signatures=1, trainings=rounds - 1, extra_epochs=epochs, mechanism="scores")


PFEDLIA = AlgorithmSpec(
    "pfedlia", pfedlia, "clusters or neighbourhoods by lazy influence on validation losses (Rokvic et al. 2025)",
    states=(State,), tasks=(HasValidation, Influence, Neighbours, OnPart), sample_releases=_sample_releases, replace_only=True,
)  # fmt: skip
