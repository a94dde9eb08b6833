"""The sums in a view: the clients of each, the model they started from, and the result.

A sum is not a message. The server knows the clients it asked, and publishes the result itself: the next model of a cluster is the last
model plus the mean update. So a sum is read off two successive models of one name and the traffic between the two models.

No model follows the sum of the last round. There the server's view of a secure sum gives the mean, from its own messages (`opened_sums`).

Whoever has released models knows the public initial models. Each later model less its initial one is the sum of the means of all rounds
between them, of clients that are not named.

A member of a cluster has the same two models if it takes part twice in succession. A secure sum names its survivors to its members. A sum
in the clear and an oblivious sum do not: a party that sees only models has the mean, but not the members. In an oblivious sum the terms
state the size of each group, so the server knows the total over all participants, and their names.

Under a robust rule the next model shows no mean. The server computes the means of the buckets itself, and the record has them.

Deviations from what could be known: models of one name that are sent several times in a round (IFCA's restarts) are distinguished by their
order. If a client is moved to another number (CFL's splits, StoCFL's merges), its pending sum is dropped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ...contract.transcript import Message
from ...protocols.errors import MalformedMessage
from ...protocols.one_message import HelpedTerms
from ...protocols.secagg.messages import Adverts, Terms, Unmask, decode_server, names
from ...types import Array
from ..adversary import INITIAL, AdversaryView, opened_rows
from .local_training import LocalTraining, training_of
from .opened_sums import opened_sums, rows_of

__all__ = [
    "CohortSum",
    "Sizes",
    "means_in",
    "means_of_parts_in",
    "models_sent",
    "oblivious_sizes",
    "packed_models",
    "stated_shares",
    "sums_in",
]

BUCKET = "bucket mean"
SUMS = ("update", "blind update", "secagg Masked", "helped Upload", BUCKET)
TERMS, INVITE = "secagg Adverts", "helped Invite"
"""The messages with the terms of a sum."""
SAME = 1e-3
"""Up to so much label shares differ from 1 in sum, since they travel as floats."""
SURVIVORS = "secagg Unmask"
"""The last message of a secure sum to its members: who is in it."""


@dataclass(frozen=True, eq=False)
class CohortSum:
    """One sum: its round, who was in it (nobody if unknown), and the mean if two models show it.

    `start` is the model (d,) that members held, `label` its number (−1: one model for all), and `local` how they were asked to train it,
    without the pull to an anchor, as far as the transcript says. `until` is the round in which the next model
    was sent; whoever does not see sums, only models, cannot tell how many there were since `round`, unless that is the round before.
    `deviation` is the standard deviation of a coordinate of the mean, as far as it was computed (`coalition`). `part`: only the parameters
    from this place on are known; the mean has zeros before, and `start` the initial parameters. `stated` are the members' label shares
    (classes,), where sums of weights by label stand behind several models.
    """

    round: int
    members: tuple[int, ...]
    mean: Array | None = None
    start: Array | None = None
    label: int = -1
    until: int = 0
    local: LocalTraining | None = None
    deviation: float = 0.0
    part: int = 0
    stated: Array | None = None

    def sums(self, view: AdversaryView) -> int:
        """How many rounds' means add up to the mean, as far as the view tells: a server sees each by itself."""
        return 1 if view.is_server else max(1, self.until - self.round)


@dataclass(frozen=True)
class Sizes:
    """An oblivious sum: the `cohort` that took part, and how many of it are in each group that was opened."""

    round: int
    cohort: tuple[int, ...]
    counts: Mapping[int, int] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all who took part are in groups that were opened."""
        return sum(self.counts.values()) == len(self.cohort)


Cohorts = Mapping[tuple[int, int], tuple[int, ...]]
"""Who is in which sum, by round and label."""


def sums_in(view: AdversaryView, cohorts: Cohorts | None = None) -> list[CohortSum]:
    """The sums over named clients, in order; of oblivious sums the total over the cohort, where every group was opened.

    `cohorts` are what a client knows beforehand of who is in the sums that it takes part in (`_sums`).
    """
    every = _sums(view, cohorts)
    sums = [sum_ for sum_ in every if sum_.members]
    hidden = {(sum_.round, sum_.label): sum_ for sum_ in every if not sum_.members}
    for sizes in oblivious_sizes(view):
        if not sizes.whole or len(sizes.counts) == 1:  # of a single group the members are known (`_sums`)
            continue
        parts = [(count, hidden.get((sizes.round, label))) for label, count in sizes.counts.items()]
        means = [count * sum_.mean for count, sum_ in parts if sum_ is not None and sum_.mean is not None]
        total = np.sum(means, axis=0) / len(sizes.cohort) if len(means) == len(parts) else None
        sums.append(CohortSum(sizes.round, sizes.cohort, total))
    return sorted(sums, key=lambda sum_: sum_.round)


def means_in(view: AdversaryView, dimension: int, cohorts: Cohorts | None = None) -> list[CohortSum]:
    """The mean updates (dimension,) of clusters that two models tell, whether or not it is known who is in them.

    Of several models behind each other (FedRC) the mean of each. `cohorts` as in `sums_in`.
    """
    means = (mean for sum_ in _sums(view, cohorts) for mean in _of_dimension(sum_, dimension))
    return [mean for mean in means if mean.mean is not None and mean.mean.any()]


def _of_dimension(sum_: CohortSum, dimension: int) -> list[CohortSum]:
    """A sum as sums of models (dimension,); none where it is of other vectors."""
    if sum_.mean is None or sum_.start is None or sum_.mean.ndim != 1:
        return []
    if len(sum_.mean) == dimension:
        return [sum_]
    classes = 0 if sum_.local is None else sum_.local.train.model.classes
    moved, start = (vector[: packed_models(len(sum_.mean), dimension, classes) * dimension] for vector in (sum_.mean, sum_.start))
    stated = stated_shares(sum_.start + sum_.mean, dimension, classes)
    return [
        replace(sum_, mean=own, start=begun, label=label, stated=stated)
        for label, (own, begun) in enumerate(zip(moved.reshape(-1, dimension), start.reshape(-1, dimension), strict=True))
    ]


def packed_models(size: int, dimension: int, classes: int) -> int:
    """How many models stand behind each other in a row of this `size`, before as many numbers a label for each; 0 if they do not fit."""
    return size // (dimension + classes) if classes and size > dimension and size % (dimension + classes) == 0 else 0


def stated_shares(row: Array, dimension: int, classes: int) -> Array | None:
    """Label shares (classes,) in a row of several models and sums of weights by label, of a client or as the mean of several.

    The weights of one sample add up to 1 over models, so the sums over models are label shares. None for rows of another form, whose sums
    are no shares.
    """
    if not (count := packed_models(len(row), dimension, classes)):
        return None
    shares = row[count * dimension :].reshape(count, classes).sum(axis=0)
    if shares.min() <= -SAME or abs(float(shares.sum()) - 1) >= SAME:
        return None
    return np.asarray(np.maximum(shares, 0.0) / np.maximum(shares, 0.0).sum())


def means_of_parts_in(view: AdversaryView, initial: Array, cohorts: Cohorts | None = None) -> list[CohortSum]:
    """The mean updates of models whose last parameters alone travel, as those of whole models, from the `initial` one (d,).

    Clients keep the parameters before. Only sums over clients that train for the first time have the initial ones there.
    """
    earlier: set[int] = set()
    means: list[CohortSum] = []
    for sum_ in _sums(view, cohorts):
        is_new = not earlier & set(sum_.members) if sum_.members else sum_.round == min([sum_.round, *(mean.round for mean in means)])
        earlier |= set(sum_.members)
        if sum_.mean is None or sum_.start is None or sum_.mean.ndim != 1 or not is_new:
            continue
        kept = len(initial) - len(sum_.mean)
        if kept > 0 and sum_.mean.any():
            start, mean = np.concatenate([initial[:kept], sum_.start]), np.concatenate([np.zeros(kept), sum_.mean])
            means.append(replace(sum_, start=start, mean=mean, part=kept))
    return means


def oblivious_sizes(view: AdversaryView) -> list[Sizes]:
    """The oblivious sums of a server's view: who took part, and the sizes of the groups that were opened.

    A sum from which somebody dropped out is left out: its sizes are those of before.
    """
    sizes: list[Sizes] = []
    if not view.is_server:
        return sizes
    terms: Terms | None = None
    for message in view.messages:
        if message.operation != "mean" or "group" in message.context:
            continue
        if message.kind == TERMS:  # of the counts, which have no blocks, or of the blocks of those who were counted
            terms = _terms(message)
        if message.kind == "secagg Masked" and terms is not None:
            cohort = sorted(terms.cohort)
            if sorted(message.clients) in (cohort, sorted(2 * cohort)):  # twice: as earlier versions recorded counts and blocks together
                sizes.append(Sizes(message.round, tuple(cohort), {int(label): int(count) for label, count in terms.blocks}))
            terms = None
    return sizes + _sizes_by_helpers(view)


def _sizes_by_helpers(view: AdversaryView) -> list[Sizes]:
    """Those of sums in one message, whose members and counts are those of the sum itself."""
    if not any(message.kind == "helped Open" and "group" not in message.context for message in view.messages):
        return []
    return [
        Sizes(opened.round, opened.sum.survivors, {
            cluster: size for cluster, _ in opened.sum.terms.blocks if (size := int(opened.sum.weight(cluster))) >= opened.sum.terms.minimum
        })
        for opened in opened_sums(view, wanted=lambda terms: isinstance(terms, HelpedTerms) and terms.clusters > 0)
        if isinstance(opened.sum.terms, HelpedTerms)
    ]  # fmt: skip


def _terms(message: Message) -> Terms | None:
    """The terms of the blocks, as every member receives them; None if the message holds none."""
    return next((request.terms for request in _requests_of(message) if isinstance(request, Adverts) and request.terms.blocks), None)


def _survivors(message: Message) -> tuple[int, ...]:
    """Who is in a secure sum, as its members are informed; nobody if the message does not name them."""
    return next((names(request.survivors) for request in _requests_of(message) if isinstance(request, Unmask)), ())


def _requests_of(message: Message) -> Iterator[object]:
    """The server's messages of a secure sum in a message's payload."""
    for row in rows_of(message):
        try:
            yield decode_server(row)
        except MalformedMessage:
            continue


# --- the walk -----------------------------------------------------------------------------------------------------------------------


def _sums(view: AdversaryView, cohorts: Cohorts | None = None) -> list[CohortSum]:
    """All sums in order, those of unknown members with none.

    A client has a sum where it took part and was sent the next model in the next round. Elsewhere a mean may be of several sums.
    """
    if view.adversary == "released":
        return _since_the_start(view)
    sums = _walked(view)
    if view.is_server:
        whole = {(sizes.round, *sizes.counts): sizes.cohort for sizes in oblivious_sizes(view) if sizes.whole and len(sizes.counts) == 1}
        return [sum_ if sum_.members else replace(sum_, members=whole.get((sum_.round, sum_.label), ())) for sum_ in sums]
    known = [(sum_, sum_.members or (cohorts or {}).get((sum_.round, sum_.label), ())) for sum_ in sums]
    single = [sum_.mean is not None and sum_.until == sum_.round + 1 and bool(set(of) & set(view.coalition)) for sum_, of in known]
    return [replace(sum_, members=of if alone else ()) for (sum_, of), alone in zip(known, single, strict=True)]


def _since_the_start(view: AdversaryView) -> list[CohortSum]:
    """How each released model moved from its initial one, in all rounds together. A model without its own starts from that of all."""
    first: dict[str, Array] = {}
    sums: list[CohortSum] = []
    local: LocalTraining | None = None
    for message in view.messages:
        models = models_sent(view, message) if message.operation == "compute" else {}
        if message.context.get(INITIAL):
            asked = training_of(message)
            first, local = first | models, local if asked is None else asked.unanchored()
            continue
        for name, vector in models.items():
            starts = [first[name]] if name in first else list(first.values())
            if starts and vector.shape == starts[0].shape and all(np.array_equal(start, starts[0]) for start in starts):
                label = int(name.partition("/")[2] or -1)
                sums.append(CohortSum(0, (), vector - starts[0], starts[0], label, message.round, local))
    return sums


def _walked(view: AdversaryView) -> list[CohortSum]:
    """All sums in order, as the traffic tells them."""
    whole = view.is_server
    hidden = not whole or any("group" not in message.context for kind in (TERMS, INVITE) for message in view.select("mean", kind))
    sums: list[CohortSum] = []
    pending: dict[tuple[str, int, str], tuple[int, Array]] = {}  # task, which call of it in the round, model -> place in `sums`, start
    numbers: dict[int, int] = {}  # which model a client was sent last
    calls: dict[tuple[int, str], int] = {}
    last: dict[tuple[str, int, str], Array] = {}
    local: LocalTraining | None = None
    for sent in _calls(view):
        first = sent[0]
        if first.kind == SURVIVORS:
            _name(first, sums, pending)
            continue
        if first.operation == "mean":
            for label, members in _groups(first) if whole else []:
                name = next((key for key in last if key[2] == f"model/{label}"), next((key for key in last if key[2] == "model"), None))
                number = label if name is not None and name[2] != "model" else -1
                if name is not None and name not in pending and first.kind != BUCKET:
                    pending[name] = (len(sums), last[name])
                start = last.get(name) if name else None
                sums.append(CohortSum(first.round, members, _bucket_mean(first), start, number, local=local))
            continue
        task = str(first.context.get("task", ""))
        place = calls[first.round, task] = calls.get((first.round, task), -1) + 1
        models = {(task, place, name): model for message in sent for name, model in models_sent(view, message).items()}
        if _renumbered(sent, numbers):
            pending = {key: value for key, value in pending.items() if key[2] == "model"}
        for key in sorted(set(models) & set(pending)):
            at, start = pending[key]
            if (first.round > sums[at].round or first.round < 0) and models[key].shape == start.shape:
                sums[at] = replace(sums[at], mean=models[key] - start, until=first.round)
                del pending[key]
        if models:  # a message without one, such as FeSEM's, stands between a model and its sum
            asked = training_of(first)
            last, local = models, None if asked is None else asked.unanchored()
        for key, model in models.items() if hidden else ():  # no sum will name its members
            if key not in pending:
                pending[key] = (len(sums), model)
                sums.append(CohortSum(first.round, (), start=model, label=int(key[2].partition("/")[2] or -1), local=local))
    if whole and view.protection.secure and not view.shared_noise and pending:
        _open_last(view, sums, pending)
    return sums


def _open_last(view: AdversaryView, sums: list[CohortSum], pending: Mapping[tuple[str, int, str], tuple[int, Array]]) -> None:
    """Give the sums after which no model was sent the means that their server computed."""
    opened = opened_sums(view, min(sums[at].round for at, _ in pending.values()))
    for (_, _, name), (at, start) in pending.items():
        sum_ = sums[at]
        for own in opened:
            label = int(name.partition("/")[2] or own.label)
            mean = own.mean_of(label) if own.round == sum_.round and (not sum_.members or sum_.members == own.sum.survivors) else None
            if mean is not None and mean.shape == start.shape:
                sums[at] = replace(sum_, mean=mean, until=sum_.round + 1)


def _calls(view: AdversaryView) -> Iterator[list[Message]]:
    """Models that were sent together, each client one message, and sums, in order."""
    batch: list[Message] = []
    for message in view.messages:
        if message.operation == "compute" and message.payload is not None:
            same = batch and (batch[0].round, batch[0].context.get("task")) == (message.round, message.context.get("task"))
            if batch and not (same and {c for earlier in batch for c in earlier.clients}.isdisjoint(message.clients)):
                yield batch
                batch = []
            batch.append(message)
            continue
        if batch:
            yield batch
            batch = []
        if message.operation == "mean" and message.kind in (SUMS if view.is_server else (*SUMS, SURVIVORS)):
            yield [message]
    if batch:
        yield batch


def _name(message: Message, sums: list[CohortSum], pending: Mapping[tuple[str, int, str], tuple[int, Array]]) -> None:
    """Name the members of the sum of this round and group, of which the model is pending."""
    label = None if "bucket" in message.context else message.context.get("group")  # a bucket's sum is not the cluster's
    for (_, _, name), (at, _) in pending.items():
        if sums[at].round == message.round and label is not None and name in ("model", f"model/{label}"):
            sums[at] = replace(sums[at], members=_survivors(message))


def _bucket_mean(message: Message) -> Array | None:
    """The mean (d,) of a bucket, if the message is one of a single vector and its payload was kept."""
    values = list((message.payload or {}).values()) if message.kind == BUCKET else []
    return np.asarray(values[0], np.float64) if len(values) == 1 and values[0].ndim == 1 else None


def _groups(message: Message) -> list[tuple[int, tuple[int, ...]]]:
    """The cohorts of one message by label; none if the message does not name their members, or if the means of its buckets are recorded."""
    clients, context = message.clients, message.context
    if ("bucket" in context or "buckets" in context) and message.kind != BUCKET:
        return []
    if "group" in context:
        return [(int(context["group"]), clients)]
    if "labels" not in context or len(context["labels"]) != len(clients):
        return []
    labels = sorted({int(label) for listed in context["labels"] for label in listed})
    return [(label, tuple(c for c, listed in zip(clients, context["labels"], strict=True) if label in listed)) for label in labels]


def _renumbered(sent: list[Message], numbers: dict[int, int]) -> bool:
    """Whether a client is sent a model of another number than last time; `numbers` are kept."""
    changed = False
    for message in sent:
        which = message.context.get("which", [])
        for client in message.clients if len(which) == 1 else ():
            changed |= numbers.get(client, which[0]) != which[0]
            numbers[client] = int(which[0])
    return changed


def models_sent(view: AdversaryView, message: Message, of: str = "model") -> dict[str, Array]:
    """The models in a message of parameters, "model" for a single one, "model/3" in a list; blind parts opened where a secret allows it.

    A model with a part that stays blind is left out. `of` is what else of the size of a model is asked for: an anchor, a control.
    """
    models: dict[str, Array] = {}
    blind: dict[str, list[Array | None]] = {}
    for part, value in (message.payload or {}).items():
        first, _, rest = part.partition("/")
        if first != of or value.ndim != 1:
            continue
        head, _, tail = rest.partition("/")
        name, purpose = (f"{of}/{head}", tail) if head.isdigit() else (of, rest)
        if purpose:
            blind.setdefault(name, []).append(_opened_part(view, message, part, purpose))
        else:
            models[name] = np.asarray(value, np.float64)
    for name, terms in blind.items():
        clear = models.pop(name, None)
        known = [term for term in terms if term is not None]
        if clear is not None and len(known) == len(terms):
            models[name] = clear + np.sum(known, axis=0)
    return models


def _opened_part(view: AdversaryView, message: Message, part: str, purpose: str) -> Array | None:
    """A blind part of a parameter, cut out of the vector it travelled in; None where it stays blind."""
    assert message.payload is not None  # checked by the caller
    if view.secret_of(purpose) is None:
        return None
    start, stop, dimension = message.context["blind"][part]
    vector = opened_rows(view, np.asarray(message.payload[part], np.float64), purpose, "mean", dimension)
    return None if vector is None else vector[start:stop]
