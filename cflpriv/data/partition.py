"""Partitions: from labels to the samples of each client. Pure functions of their arguments.

Every function takes `y_train` and `y_test`, integer labels (n,), and returns a `Partition` of index arrays. Training samples are disjoint
between clients. Test samples are for scoring only, so clients may share them: a client's test set follows its own labels, as in PACFL, and
another client with the same labels is scored on the same images unless `test_samples_per_client` draws each its own subset. Numbers outside
their declared ranges are refused (`keys.ranged`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ..console import only
from ..errors import InputError
from ..keys import Key, ranged
from ..randomness import Stream, stream
from ..types import Array, check_array

__all__ = [
    "Alpha", "MinimumSamples", "NoiseLabels", "NoiseProbability", "Partition", "SamplesPerClient", "SkewPercent", "TestSamplesPerClient",
    "at_most", "consecutive_pairs", "dirichlet", "given", "iid", "label_skew", "owned", "pathological",
]  # fmt: skip

Clients = Annotated[int, Key("Number of clients.", "[1, inf)", "clients")]
SamplesPerClient = Annotated[
    int, Key("Training samples of a client; 0: all. iid and pathological: exactly so many; otherwise at most.", "[0, inf)", "samples")
]
TestSamplesPerClient = Annotated[
    int, Key("Test samples of a client; 0: all with the client's own labels (dirichlet: in its proportions).", "[0, inf)", "samples")
]
SkewPercent = Annotated[float, Key("label_skew: share of the labels that each client owns.", "(0, 100]", "percent")]
Alpha = Annotated[float, Key("dirichlet: concentration; small values give clients few classes.", "[1e-6, 1e6]")]
MinimumSamples = Annotated[int, Key("dirichlet: training samples that every client has at least.", "[1, inf)", "samples")]
NoiseProbability = Annotated[
    float, Key("pathological, kinds: probability that a client also holds labels from outside its group (pFedLIA: 0.5).", "[0, 1]")
]
NoiseLabels = Annotated[int, Key("How many labels from outside its group such a client holds.", "[1, inf)", "labels")]


@dataclass(frozen=True, eq=False)
class Partition:
    """Per client its `id`, its sorted int64 indices into the training and the test set, and its true group; notes for the report.

    Without `groups_known` there are no true groups, or the data do not name them."""

    ids: tuple[int, ...]
    train: tuple[Array, ...]
    test: tuple[Array, ...]
    groups: tuple[int, ...]
    notes: tuple[str, ...] = ()
    groups_known: bool = True


@ranged()
def iid(
    y_train: Array,
    y_test: Array,
    clients: Clients,
    seed: int,
    samples_per_client: SamplesPerClient = 0,
    test_samples_per_client: TestSamplesPerClient = 0,
    decks: int = 1,
    purpose: str = "data.iid",
) -> Partition:
    """The training set shuffled and dealt out evenly (to within one sample), or exactly `samples_per_client` to each client.

    Test: the whole test set, or a random `test_samples_per_client` of it. `decks` > 1 deals the complete training set that many times,
    client i drawing from deck i % decks: clients of one deck are disjoint, clients of different decks overlap (IFCA's rotated MNIST has
    every image in every rotation). All clients are in group 0. `purpose` keys the random streams.

    Raises `InputError` for fewer samples than the clients need.
    """
    _check(y_train, y_test, clients)
    if not 1 <= decks <= clients:
        raise InputError(f"decks = {decks}: expected 1..{clients}, the number of clients")
    train: list[Array] = [np.empty(0, np.int64)] * clients
    for deck in range(decks):
        members = range(deck, clients, decks)
        wanted = samples_per_client * len(members) or len(members)
        if wanted > len(y_train):
            raise InputError(
                f"clients = {clients}, samples_per_client = {samples_per_client}: {len(members)} clients need {wanted} training samples, "
                f"there are {len(y_train)}"
            )
        order = stream(seed, f"{purpose}.deck{deck}").permutation(len(y_train))
        used = order[:wanted] if samples_per_client else order
        for client, part in zip(members, np.array_split(used, len(members)), strict=True):
            train[client] = np.sort(part)
    everything = np.arange(len(y_test))
    test = tuple(at_most(everything, test_samples_per_client, stream(seed, f"{purpose}.test", client=i)) for i in range(clients))
    return Partition(tuple(range(clients)), tuple(train), test, (0,) * clients)


@ranged()
def label_skew(
    y_train: Array,
    y_test: Array,
    clients: Clients,
    seed: int,
    percent: SkewPercent,
    samples_per_client: SamplesPerClient = 0,
    test_samples_per_client: TestSamplesPerClient = 0,
) -> Partition:
    """PACFL's label skew: each client owns a random `percent` of the labels; owners of a label share its samples evenly (to within one).

    The number of labels is rounded to the nearest whole, at least 1. A label that no client drew stays unused, with a note (the paper's
    wording; other implementations force an owner). `samples_per_client` keeps a random subset of at most that many. Test: all test samples
    with the client's own labels. The true group is the set of labels. Source: PACFL, experiments.

    Raises `InputError` for a client that would get no sample.
    """
    _check(y_train, y_test, clients)
    present = np.unique(y_train)
    count = max(1, round(percent / 100 * len(present)))
    owned = [np.sort(stream(seed, "data.label_skew.owned", client=i).choice(present, count, replace=False)) for i in range(clients)]
    owners = {int(label): [i for i in range(clients) if label in owned[i]] for label in present}
    train = _deal(y_train, owners, clients, seed, "data.label_skew")
    _none_empty(train, clients, f"skew_percent = {percent}")
    unused = [label for label, label_owners in owners.items() if not label_owners]
    label_sets = [tuple(map(int, labels)) for labels in owned]
    distinct = {labels: index for index, labels in enumerate(sorted(set(label_sets)))}
    return Partition(
        tuple(range(clients)),
        _subsets(train, samples_per_client, seed, "data.label_skew"),
        _test_with_labels(y_test, label_sets, test_samples_per_client, seed, "data.label_skew"),
        tuple(distinct[labels] for labels in label_sets),
        (f"label skew: no client owns the labels {unused}; their samples are unused",) if unused else (),
    )


@ranged()
def dirichlet(
    y_train: Array,
    y_test: Array,
    clients: Clients,
    seed: int,
    alpha: Alpha,
    minimum: MinimumSamples = 1,
    samples_per_client: SamplesPerClient = 0,
    test_samples_per_client: TestSamplesPerClient = 0,
    even_test: bool = False,
) -> Partition:
    """The samples of each class are divided among the clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    Nothing is rejected and redrawn (which spins for long at small alpha): a client below `minimum` samples is filled up, one sample at a
    time, from the largest class of whoever then has most; ties go to the lowest client and label. `samples_per_client` keeps a random
    subset of at most that many.

    Test: a client's test set has the class proportions of its training set (largest remainder), drawn from the test pool without repeating
    a sample within the client. Its size is `test_samples_per_client`, or the mean class size of the test set if that is 0, or the largest
    that the pool allows in these proportions if that is less. Classes missing from the test set are left out. With `even_test` it is all
    test samples of every label of which the client has a training sample, however few, as PACFL's authors score; or a random
    `test_samples_per_client` of them.

    Each client is its own true group: there is no grouping to recover, so ARI means nothing here.

    Raises `InputError` for too few samples for the minimum.
    """
    _check(y_train, y_test, clients)
    if minimum * clients > len(y_train):
        raise InputError(f"minimum = {minimum}: {clients} clients need {minimum * clients} training samples, there are {len(y_train)}")
    if 0 < samples_per_client < minimum:
        raise InputError(f"samples_per_client = {samples_per_client}: is below minimum = {minimum}")
    labels = [int(label) for label in np.unique(y_train)]
    streams = [stream(seed, f"data.dirichlet.label{label}") for label in labels]
    pools = [draws.permutation(np.flatnonzero(y_train == label)) for draws, label in zip(streams, labels, strict=True)]
    counts = np.stack([_dirichlet_counts(len(pool), clients, alpha, s) for pool, s in zip(pools, streams, strict=True)], axis=1)
    _fill_to_minimum(counts, minimum)
    dealt = [np.split(pool, np.cumsum(counts[:-1, column])) for column, pool in enumerate(pools)]
    train = tuple(np.sort(np.concatenate([parts[i] for parts in dealt])) for i in range(clients))
    train = _subsets(train, samples_per_client, seed, "data.dirichlet")
    if even_test:
        held = [tuple(int(label) for label in np.unique(y_train[own])) for own in train]
        test = _test_with_labels(y_test, held, test_samples_per_client, seed, "data.dirichlet")
    else:
        test = tuple(_test_in_proportion(y_train[own], y_test, test_samples_per_client, seed, i) for i, own in enumerate(train))
    return Partition(
        tuple(range(clients)),
        train,
        test,
        tuple(range(clients)),
        ("Dirichlet clients have no true groups",),
        groups_known=False,
    )


@ranged()
def pathological(
    y_train: Array,
    y_test: Array,
    clients: Clients,
    seed: int,
    groups: Sequence[Sequence[int]],
    samples_per_client: SamplesPerClient = 0,
    test_samples_per_client: TestSamplesPerClient = 0,
    noise: NoiseProbability = 0.0,
    noise_labels: NoiseLabels = 1,
) -> Partition:
    """Clients of a group hold its labels only; all groups have the same number of clients, client i is in group i % len(groups).

    The samples of a label are divided evenly (to within one) among all clients that hold it, also where groups overlap. Then each client
    keeps a random `samples_per_client` of its share, exactly. Test: all test samples with the client's labels.

    With probability `noise` a client also holds `noise_labels` random labels from outside its group, as one more owner of them (pFedLIA's
    noisy setting: ½ and one label, five on CIFAR-100; it does not say how many samples). The true group stays.

    Source: the pathological settings of StoCFL ({012},{34},{56},{789}), pFedLIA (section IV-A) and CFL.

    Raises `InputError` for a label out of range, an empty or repeated group, clients that are no multiple of the groups, too few
    samples, or too few foreign labels to draw from.
    """
    _check(y_train, y_test, clients)
    label_sets = [tuple(sorted(int(label) for label in group)) for group in groups]
    present = set(np.unique(y_train).tolist())
    for index, group in enumerate(label_sets):
        if not group:
            raise InputError(f"groups[{index}] = []: expected at least one label")
        if len(set(group)) < len(group) or group in label_sets[:index]:
            raise InputError(f"groups[{index}] = {list(group)}: repeats a label or an earlier group")
        for label in group:
            if label not in present:
                raise InputError(f"groups[{index}] = {list(group)}: no training sample has label {label}; labels are {sorted(present)}")
    if not label_sets or clients % len(label_sets):
        raise InputError(f"clients = {clients}: not a multiple of the {len(label_sets)} groups")
    membership = [i % len(label_sets) for i in range(clients)]
    held = _noisy([label_sets[g] for g in membership], sorted(present), noise, noise_labels, seed)
    owners = {label: [i for i in range(clients) if label in held[i]] for label in sorted(present)}
    train = _deal(y_train, owners, clients, seed, "data.pathological")
    _none_empty(train, clients, f"groups = {[list(group) for group in label_sets]}")
    for client, own in enumerate(train):
        if len(own) < samples_per_client:
            raise InputError(
                f"samples_per_client = {samples_per_client}: client {client} "
                f"of group {list(label_sets[membership[client]])} can have {len(own)}"
            )
    unused = sorted(present - {label for labels in held for label in labels})
    noisy = sum(labels != label_sets[g] for labels, g in zip(held, membership, strict=True))
    notes = [f"pathological: the labels {unused} are in no group; their samples are unused"] if unused else []
    notes += [f"pathological: {noisy} of {clients} clients also hold {noise_labels} label(s) from outside their group"] if noise else []
    return Partition(
        tuple(range(clients)),
        _subsets(train, samples_per_client, seed, "data.pathological"),
        _test_with_labels(y_test, held, test_samples_per_client, seed, "data.pathological"),
        tuple(membership),
        tuple(notes),
    )


def _noisy(
    label_sets: Sequence[tuple[int, ...]], present: Sequence[int], noise: float, noise_labels: int, seed: int
) -> list[tuple[int, ...]]:
    """Each client's labels, with probability `noise` and `noise_labels` random others."""
    held = []
    for client, own in enumerate(label_sets):
        draws = stream(seed, "data.pathological.noise", client=client)
        if draws.random() < noise:
            foreign = [label for label in present if label not in own]
            if len(foreign) < noise_labels:
                raise InputError(f"noise_labels = {noise_labels}: outside the group {list(own)} there are {len(foreign)} labels")
            own = tuple(sorted((*own, *map(int, draws.choice(foreign, noise_labels, replace=False)))))
        held.append(own)
    return held


def consecutive_pairs(classes: int) -> tuple[tuple[int, ...], ...]:
    """(0, 1), (2, 3), ...: the default pathological groups. With an odd number of classes the last group has three labels."""
    starts = list(range(0, max(classes - 1, 1), 2))
    return tuple(tuple(range(a, b)) for a, b in zip(starts, [*starts[1:], classes], strict=True))


def owned(owners: Array, ids: Sequence[int]) -> list[Array]:
    """The positions of each owner's samples, ascending."""
    order = np.argsort(owners, kind="stable")
    first, last = (np.searchsorted(owners[order], ids, side=side) for side in ("left", "right"))
    return [order[i:j] for i, j in zip(first, last, strict=True)]


@ranged()
def given(
    y_train: Array,
    y_test: Array,
    owners_train: Array,
    owners_test: Array | None,
    clients: int,
    seed: int,
    samples_per_client: SamplesPerClient = 0,
    test_samples_per_client: TestSamplesPerClient = 0,
    kinds: Array | None = None,
) -> Partition:
    """Real clients as named in the file, by an integer owner per sample, which stays their id. `clients` > 0 takes the lowest ids only.

    `samples_per_client` keeps a random subset of at most that many. Test: the client's own test samples (possibly none), or, without
    `owners_test`, the test samples with its labels. The true group is the kind of a client's training samples if `kinds` (n,) names
    one for each sample and it is the same for all of the client's (Omniglot: the alphabet); otherwise groups are unknown, all 0.

    Raises `InputError` for more clients than the file has, or test owners that have no training sample.
    """
    ids = [int(owner) for owner in np.unique(owners_train)]
    strangers = [] if owners_test is None else sorted(set(np.unique(owners_test).tolist()) - set(ids))
    if strangers:
        raise InputError(f"client_test: client {strangers[0]} has test samples but no training samples")
    if clients > len(ids):
        raise InputError(f"clients = {clients}: the file has {len(ids)} clients; 0 takes all of them")
    ids = ids[: clients or len(ids)]
    _check(y_train, y_test, len(ids))
    train = owned(owners_train, ids)
    of_owner = [set(kinds[own].tolist()) for own in train] if kinds is not None else []
    known = bool(of_owner) and all(len(owner_groups) == 1 for owner_groups in of_owner)
    groups = tuple(int(owner_groups.pop()) for owner_groups in of_owner) if known else (0,) * len(ids)
    notes: list[str] = []
    if owners_test is None:
        label_sets = [tuple(map(int, np.unique(y_train[own]))) for own in train]
        test = _test_with_labels(y_test, label_sets, test_samples_per_client, seed, "data.given", ids)
        notes.append("the file does not assign the test samples: each client gets those with its own labels")
    else:
        pools = owned(owners_test, ids)
        test = tuple(
            at_most(pool, test_samples_per_client, stream(seed, "data.given.test", client=i)) for i, pool in zip(ids, pools, strict=True)
        )
        without = sum(len(pool) == 0 for pool in pools)
        notes += [f"{without} of {len(ids)} clients have no test samples"] if without else []
    return Partition(tuple(ids), _subsets(train, samples_per_client, seed, "data.given", ids), test, groups, tuple(notes), known)


# What the partitions share.


def _check(y_train: Array, y_test: Array, clients: int) -> None:
    for name, y in (("y_train", y_train), ("y_test", y_test)):
        check_array(name, y, ndim=1, kind="iu")
    if clients > len(y_train):
        raise InputError(f"clients = {clients}: {only(len(y_train), 'training sample')}")


def _none_empty(train: Sequence[Array], clients: int, key: str) -> None:
    empty = [client for client, own in enumerate(train) if len(own) == 0]
    if empty:
        raise InputError(f"clients = {clients}, {key}: too few samples, client {empty[0]} would get none")


def at_most(pool: Array, cap: int, draws: Stream) -> Array:
    """`pool`, or a sorted random subset of `cap` of it; a cap of 0 is none."""
    if cap == 0 or cap >= len(pool):
        return pool
    return np.sort(draws.choice(pool, cap, replace=False))


def _subsets(train: Sequence[Array], cap: int, seed: int, purpose: str, ids: Sequence[int] = ()) -> tuple[Array, ...]:
    ids = ids or range(len(train))
    return tuple(at_most(own, cap, stream(seed, f"{purpose}.cap", client=i)) for i, own in zip(ids, train, strict=True))


def _deal(y: Array, owners: dict[int, list[int]], clients: int, seed: int, purpose: str) -> tuple[Array, ...]:
    """The samples of each label divided evenly among its owners; which owners get the remainder is random."""
    parts: list[list[Array]] = [[np.empty(0, np.int64)] for _ in range(clients)]
    for label, label_owners in owners.items():
        if label_owners:
            draws = stream(seed, f"{purpose}.label{label}")
            pool = draws.permutation(np.flatnonzero(y == label))
            for owner, part in zip(draws.permutation(label_owners), np.array_split(pool, len(label_owners)), strict=True):
                parts[owner].append(part)
    return tuple(np.sort(np.concatenate(own)) for own in parts)


def _test_with_labels(
    y_test: Array, label_sets: Sequence[tuple[int, ...]], cap: int, seed: int, purpose: str, ids: Sequence[int] = ()
) -> tuple[Array, ...]:
    """Per client the test samples with its labels. Clients with the same labels get the same array."""
    pools = {labels: np.flatnonzero(np.isin(y_test, labels)) for labels in set(label_sets)}
    ids = ids or range(len(label_sets))
    for client, labels in zip(ids, label_sets, strict=True):
        if len(pools[labels]) == 0:
            raise InputError(f"client {client} holds the labels {list(labels)}, but no test sample has one of them")
    return tuple(at_most(pools[own], cap, stream(seed, f"{purpose}.test", client=i)) for i, own in zip(ids, label_sets, strict=True))


def _dirichlet_counts(samples: int, clients: int, alpha: float, draws: Stream) -> Array:
    """How many of `samples` each client gets: edges of the cumulative proportions, rounded."""
    shares = draws.dirichlet(np.full(clients, alpha))
    edges = np.floor(np.cumsum(shares) * samples + 0.5).astype(np.int64)
    edges[-1] = samples
    return np.diff(np.minimum(edges, samples), prepend=0)


def _fill_to_minimum(counts: Array, minimum: int) -> None:
    """Move samples, in place in counts (clients, classes), until every row sums to at least `minimum`.

    The donor holds the most of all, hence more than the minimum as long as some client is below it, so no donor falls below.
    """
    totals = counts.sum(axis=1)
    for client in range(len(counts)):
        while totals[client] < minimum:
            donor = int(totals.argmax())
            label = int(counts[donor].argmax())
            counts[donor, label] -= 1
            counts[client, label] += 1
            totals[donor] -= 1
            totals[client] += 1


def _test_in_proportion(own: Array, y_test: Array, wanted: int, seed: int, client: int) -> Array:
    """Test samples in the class proportions of the labels `own`; the rule is in `dirichlet`. Integers throughout, hence exact."""
    labels, counts = np.unique(own[np.isin(own, y_test)], return_counts=True)
    if len(labels) == 0:
        raise InputError(f"client {client} holds the labels {np.unique(own).tolist()}, but no test sample has one of them")
    pools = [np.flatnonzero(y_test == label) for label in labels]
    total = int(counts.sum())
    mean_class_size = len(y_test) // len(np.unique(y_test))
    fits = min(len(pool) * total // int(count) for pool, count in zip(pools, counts, strict=True))
    size = min(wanted or mean_class_size, fits)
    quotas, remainders = np.divmod(size * counts, total)
    missing = size - int(quotas.sum())
    quotas[np.argsort(-remainders, kind="stable")[:missing]] += 1
    draws = stream(seed, "data.dirichlet.test", client=client)
    return np.sort(np.concatenate([draws.choice(pool, quota, replace=False) for pool, quota in zip(pools, quotas, strict=True)]))
