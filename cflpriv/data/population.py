"""From a plain specification to a population of clients with known true groups."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..randomness import Stream, stream
from ..types import Array, ClientData, DataChange, Population
from . import partition as split
from . import scattering, whitened_scattering
from .datasets import Dataset, channel_statistics, data_directory, load_idx, load_npz
from .drift import OWN, stages, with_stages
from .held_out import with_held_out
from .image_folders import load_image_folders
from .named import LOADERS, load_dataset
from .partition import Partition
from .periods import in_periods
from .plausible import plausible
from .raw_tables import FRAME, IN_PYTHON, TABLES, RawTable
from .scaling import Scaling, scaled
from .scattering import FEATURE_MEAN, FEATURE_STD
from .shifts import conform, label_permutations, mixture_layout, rotate, shift_labels, swap_labels
from .spec import DATASETS, PARTITIONS, DataSpec, check_spec, refuse, register_dataset
from .tables import Columns, load_table, table_dataset
from .text import TEXTS, UNKNOWN, Texts, load_texts, vocabulary, windows, word_numbers

__all__ = ["DATASETS", "PARTITIONS", "DataSpec", "build_population", "register_dataset", "table_population"]

Shift = Callable[[Array, Array], tuple[Array, Array]]


def build_population(spec: DataSpec, directory: str | Path | None = None) -> Population:
    """The clients that `spec` describes, with their true groups; files come from `directory` (see `datasets.data_directory`).

    The same specification and files give the same population. Arrays may be shared between clients: treat them as read-only.

    Raises `InputError` naming the key and value, or the file, that does not fit.
    """
    check_spec(spec)
    build = _build_mixture if spec.source == "mixture" else _build_texts if spec.source in TEXTS else _build_partition
    return with_held_out(build(spec, directory), spec.held_out, spec.held_out_gap, spec.seed)


def _build_partition(spec: DataSpec, directory: str | Path | None) -> Population:
    """The samples of one data set, dealt to clients."""
    return _population(spec, _load(spec, directory))


def _population(spec: DataSpec, dataset: Dataset) -> Population:
    """The data set, divided among clients."""
    shifts = _shifts(spec, dataset)
    samples = spec.samples_per_client
    whole = replace(spec, samples_per_client=samples * stages(spec.drift))
    if spec.periods:  # the limits are those of a period
        whole = replace(spec, samples_per_client=0, test_samples_per_client=0)
    try:
        partition = _partition(whole, dataset, max(len(shifts), 1))
    except InputError as error:
        raise InputError(f"[data] {error}") from None
    repeats = ("every group divides the whole training set: images repeat between groups, not within one",) if spec.repeat_per_group else ()
    kinds = [0] * len(partition.ids)
    if shifts:  # the clients of every group so far are dealt to the shifts in turn
        base = max(partition.groups) + 1
        kinds = [position // base % len(shifts) for position in range(len(kinds))]
        partition = replace(partition, groups=tuple(g * len(shifts) + kind for g, kind in zip(partition.groups, kinds, strict=True)))
    later: dict[int, Array] = {}
    if spec.drift and samples:
        partition, later = with_stages(partition, samples, spec.seed)
    if dataset.periods_train is not None:
        partition, changes = _by_periods(spec, dataset, partition)
    else:
        changes = _changes(spec, dataset, partition, later, shifts or (_unchanged,))
    clients, clipped = _clients(dataset, partition, shifts or (_unchanged,), kinds, features=spec.features)
    scaling = dataset.scaling
    return Population(
        name=f"{spec.source}/{spec.partition}",
        clients=clients,
        groups=partition.groups,
        classes=dataset.classes,
        mean=dataset.mean if spec.features == "none" else FEATURE_MEAN,
        std=dataset.std if spec.features == "none" else FEATURE_STD,
        notes=(*dataset.notes, *partition.notes, *repeats, *clipped),
        doubts=dataset.doubts,
        class_names=dataset.class_names,
        warnings=dataset.warnings,
        feature_columns=dataset.feature_columns,
        client_names=dataset.client_names if spec.partition == "given" else (),
        label_range=dataset.label_range,
        moments={} if scaling is None or not scaling.per_client else _moments(dataset.x_train, scaling, partition),
        groups_known=partition.groups_known,
        changes=changes,
    )


def _changes(
    spec: DataSpec, dataset: Dataset, partition: Partition, later: dict[int, Array], shifts: Sequence[Shift]
) -> tuple[DataChange, ...]:  # fmt: skip
    """What happens to clients in a run, in the order of the rounds: each change takes the next samples of the client's own deal."""
    made: list[DataChange] = []
    group_of = dict(zip(partition.ids, partition.groups, strict=True))
    taken = dict.fromkeys(partition.ids, 0)
    for entry in sorted(spec.drift, key=lambda entry: entry.round):
        for client in entry.clients:
            if entry.joins:
                made.append(DataChange(entry.round, client, group_of[client]))
                continue
            group, was = entry.group if entry.group != OWN else group_of[client], group_of[client]
            if group not in partition.groups or group // len(shifts) != was // len(shifts):
                known = sorted({other for other in partition.groups if other // len(shifts) == was // len(shifts)})
                problem = f"round {entry.round}: client {client} of group {was} can have the data of groups {known}, not of {group}"
                raise InputError(f"[data] drift: {problem}")
            at, count = partition.ids.index(client), spec.samples_per_client
            own = np.sort(later[client][taken[client] : taken[client] + count])
            alone = replace(partition, ids=(client,), train=(own,), test=(partition.test[at],), groups=(group,))
            (data,), _ = _clients(dataset, alone, shifts, [group % len(shifts)], features=spec.features)
            made.append(DataChange(entry.round, client, group, data))
            taken[client], group_of[client] = taken[client] + count, group
    return tuple(made)


def _by_periods(spec: DataSpec, dataset: Dataset, partition: Partition) -> tuple[Partition, tuple[DataChange, ...]]:
    """Clients with the rows of their first period, and what happens later: who joins, and who gets the rows of a later period."""
    assert dataset.periods_train is not None
    assert dataset.periods_test is not None
    caps = (spec.samples_per_client, spec.test_samples_per_client)
    partition, began, later = in_periods(partition, dataset.periods_train, dataset.periods_test, caps, spec.seed)
    group_of = dict(zip(partition.ids, partition.groups, strict=True))
    changes = [DataChange(spec.periods[period - 1], client, group_of[client]) for client, period in began.items() if period]
    for period, client, train, test in later:
        alone = replace(partition, ids=(client,), train=(train,), test=(test,), groups=(group_of[client],))
        (data,), _ = _clients(dataset, alone, (_unchanged,), [0])
        changes.append(DataChange(spec.periods[period - 1], client, group_of[client], data))
    joining, again = sum(period > 0 for period in began.values()), len(later)
    if joining == len(began):
        raise InputError("[data] periods: no client has a training row in the first period")
    note = (
        f"{1 + len(spec.periods)} periods of time: {joining} of {len(began)} clients join after the first, and {again} times "
        "a client gets the rows of a later one"
    )
    return replace(partition, notes=(*partition.notes, note)), tuple(sorted(changes, key=lambda change: change.round))


def _moments(x: Array, scaling: Scaling, partition: Partition) -> dict[int, tuple[Array, Array]]:
    return {client: scaling.moments(x[own]) for client, own in zip(partition.ids, partition.train, strict=True)}


def table_population(spec: DataSpec, tables: Sequence[RawTable]) -> Population:
    """The clients of tables that are in memory: one that is split, or training and test rows. Raises as `build_population`."""
    check_spec(spec)
    scaling = spec.scaling
    if spec.source not in TABLES or scaling is None:
        raise refuse("source", spec.source, f"is no table; known are {', '.join(TABLES)}")
    try:
        dataset = table_dataset(tables, _columns(spec), scaling, spec.test_share, spec.seed)
    except InputError as error:
        raise InputError(f"[data] {error}") from None
    return with_held_out(_population(spec, dataset), spec.held_out, spec.held_out_gap, spec.seed)


def _columns(spec: DataSpec) -> Columns:
    used = (spec.label_column, spec.client_column, spec.group_column)
    return Columns(*used, spec.feature_columns, spec.class_names, spec.columns, spec.label_range, spec.time_column, 1 + len(spec.periods))


def _load(spec: DataSpec, directory: str | Path | None) -> Dataset:
    if spec.source in LOADERS:
        return load_dataset(spec.source, directory)
    folder = data_directory(directory)
    # As written, from where the command runs; else from the data directory.
    paths = [folder / path if not Path(path).exists() and (folder / path).exists() else Path(path) for path in spec.paths]
    for path in paths:
        if not path.exists():
            places = f"beside the configuration, here, or in the data directory {folder} (--data-dir or CFLPRIV_DATA)"
            raise refuse("paths", str(path), f"no such file {places}")
    if spec.source == FRAME:
        raise refuse("source", spec.source, f"its rows were a data frame in memory and are in no file; {IN_PYTHON}")
    try:
        if spec.source in TABLES and spec.scaling is not None:
            return load_table(spec.source, paths, _columns(spec), spec.scaling, spec.test_share, spec.seed)
    except InputError as error:
        raise InputError(f"[data] {error}") from None
    if spec.source == "npz":
        return plausible(load_npz(paths[0], spec.scaling, spec.label_range))
    return plausible(load_image_folders(*paths) if spec.source == "torchvision" else load_idx(*paths))


def _partition(spec: DataSpec, dataset: Dataset, shifts: int) -> Partition:
    y_train, y_test, clients, seed = dataset.y_train, dataset.y_test, spec.clients, spec.seed
    if dataset.label_range:  # no class divides the samples
        y_train, y_test = np.zeros(len(y_train), np.int64), np.zeros(len(y_test), np.int64)
    caps = {"samples_per_client": spec.samples_per_client, "test_samples_per_client": spec.test_samples_per_client}
    if shifts > 1 and clients < shifts:
        raise InputError(f"clients = {clients}: fewer than the {shifts} groups")
    match spec.partition:
        case "iid":
            decks = shifts if spec.repeat_per_group else 1
            return split.iid(y_train, y_test, clients, seed, spec.samples_per_client, spec.test_samples_per_client, decks)
        case "label_skew":
            return split.label_skew(y_train, y_test, clients, seed, spec.skew_percent, **caps)
        case "dirichlet":
            return split.dirichlet(y_train, y_test, clients, seed, spec.alpha, spec.minimum, **caps, even_test=spec.even_test)
        case "pathological" | "kinds":
            by_kind = spec.partition == "kinds"
            if by_kind and dataset.kinds_train is not None and dataset.kinds_test is not None:  # each sample has a group of its own
                y_train, y_test = dataset.kinds_train, dataset.kinds_test
                groups = _groups_of_kinds(spec, np.unique(y_train).tolist())
            else:
                groups = _labels_of_kinds(spec, dataset) if by_kind else spec.groups or split.consecutive_pairs(dataset.classes)
            if clients % (len(groups) * shifts):
                raise InputError(f"clients = {clients}: not a multiple of the {len(groups) * shifts} groups")
            return split.pathological(y_train, y_test, clients, seed, groups, **caps, noise=spec.noise, noise_labels=spec.noise_labels)
        case _:
            if dataset.owners_train is None:
                named = "has no array client_train" if spec.source == "npz" else "does not name its clients"
                raise InputError(f"partition = 'given': {dataset.name} {named}")
            kinds = np.array(dataset.label_kinds)[y_train] if dataset.label_kinds else dataset.kinds_train
            return split.given(y_train, y_test, dataset.owners_train, dataset.owners_test, clients, seed, **caps, kinds=kinds)


def _labels_of_kinds(spec: DataSpec, dataset: Dataset) -> tuple[tuple[int, ...], ...]:
    """The labels of each group of kinds; without groups, each kind is one."""
    known = sorted({kind for kind in dataset.label_kinds if kind >= 0})
    if not known:
        raise InputError(f"partition = 'kinds': {dataset.name} has no kinds; cifar100, omniglot and the texts have")
    groups = _groups_of_kinds(spec, known)
    return tuple(tuple(label for label, kind in enumerate(dataset.label_kinds) if kind in group) for group in groups)


def _groups_of_kinds(spec: DataSpec, known: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The groups of kinds that were asked for, or each kind by itself."""
    groups = spec.groups or tuple((kind,) for kind in known)
    strange = [kind for group in groups for kind in group if kind not in known]
    if strange:
        raise InputError(
            f"groups = {[list(group) for group in groups]}: {strange[0]} is not a kind of {spec.source}; kinds are {list(known)}"
        )
    return groups


def _build_texts(spec: DataSpec, directory: str | Path | None) -> Population:
    """Documents are dealt to clients, whole; then each becomes windows. `samples_per_client` keeps a random subset of at most that many."""
    try:
        texts = load_texts(spec.source, directory, spec.languages)
        entries = vocabulary(texts.train, spec.vocabulary)
        kinds_train, kinds_test = np.array(texts.train_kinds), np.array(texts.test_kinds)
        if spec.partition == "iid":
            part = split.iid(kinds_train, kinds_test, spec.clients, spec.seed)
        else:
            groups = _groups_of_kinds(spec, range(len(texts.kinds)))
            part = split.pathological(kinds_train, kinds_test, spec.clients, spec.seed, groups)
    except InputError as error:
        raise InputError(f"[data] {error}") from None
    index = {word: number for number, word in enumerate(entries)}
    cut = {name: [windows(word_numbers(text, index), spec.sequence_length) for text in getattr(texts, name)] for name in ("train", "test")}
    shared: dict[bytes, tuple[Array, Array]] = {}
    clients = []
    for client, train, test in zip(part.ids, part.train, part.test, strict=True):
        own = _joined([cut["train"][i] for i in train], spec.samples_per_client, stream(spec.seed, "data.text.cap", client=client))
        if len(own[1]) == 0:
            raise InputError(f"[data] clients = {spec.clients}: client {client} has no text of two words or more")
        key = test.tobytes()
        if spec.test_samples_per_client or key not in shared:
            draws = stream(spec.seed, "data.text.test", client=client)
            shared[key] = _joined([cut["test"][i] for i in test], spec.test_samples_per_client, draws)
        clients.append(ClientData(client, *own, *shared[key]))
    return Population(f"{spec.source}/{spec.partition}", tuple(clients), part.groups, len(entries), notes=_text_notes(texts, entries, cut))


def _joined(parts: Sequence[tuple[Array, Array]], cap: int, draws: Stream) -> tuple[Array, Array]:
    """The windows of several documents, in order, or a random `cap` of them."""
    x, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    if cap == 0 or cap >= len(y):
        return x, y
    kept = np.sort(draws.choice(len(y), cap, replace=False))
    return x[kept], y[kept]


def _text_notes(texts: Texts, entries: Sequence[str], cut: dict[str, list[tuple[Array, Array]]]) -> tuple[str, ...]:
    words = np.concatenate([y for _, y in cut["test"]])
    if len(words) == 0:
        raise InputError(f"{texts.name}: no test text has two words or more")
    unknown = float(np.mean(words == UNKNOWN))
    return (
        *texts.notes,
        f"{texts.name}: kinds are {', '.join(texts.kinds)}; a public vocabulary of {len(entries)} entries, fitted on all training text; "
        f"{100 * unknown:.1f} % of the test words are outside it and count as one word in the perplexity",
    )


FEATURES: Mapping[str, Callable[[Array], Array]] = {
    "scattering": scattering.features,
    "whitened_scattering": whitened_scattering.features,
}
"""By the value of `data.features`: images -> features. Models normalise them by `FEATURE_MEAN` and `FEATURE_STD`."""


def _unchanged(x: Array, y: Array) -> tuple[Array, Array]:
    return x, y


def _featured(shift: Shift, features: Callable[[Array], Array], x: Array, y: Array) -> tuple[Array, Array]:
    x, y = shift(x, y)
    return features(x), y


def _rotated(quarter_turns: int, x: Array, y: Array) -> tuple[Array, Array]:
    return rotate(x, quarter_turns), y


def _shifted(shift: int, classes: int, x: Array, y: Array) -> tuple[Array, Array]:
    return x, shift_labels(y, shift, classes)


def _swapped(first: int, second: int, x: Array, y: Array) -> tuple[Array, Array]:
    return x, swap_labels(y, first, second)


def _permuted(permutation: tuple[int, ...], x: Array, y: Array) -> tuple[Array, Array]:
    return x, np.array(permutation)[y]


def _conformed(shape: tuple[int, int, int], offset: int, x: Array, y: Array) -> tuple[Array, Array]:
    return conform(x, shape), y + offset


def _shifts(spec: DataSpec, dataset: Dataset) -> tuple[Shift, ...]:
    """What each group does to its samples, if anything. Equal groups would not be different in truth, so they are refused."""
    classes = dataset.classes
    for degrees in spec.rotations:
        if degrees % 90:
            raise refuse("rotations", spec.rotations, f"{degrees} is not a multiple of 90")
        if degrees % 180 and dataset.shape[1] != dataset.shape[2]:
            raise refuse("rotations", spec.rotations, f"{degrees} would change the shape of images of {dataset.shape}")
    for pair in spec.label_swaps:
        if not all(0 <= label < classes for label in pair):
            raise refuse("label_swaps", spec.label_swaps, f"{pair} is not in 0..{classes - 1}")
    turns = [degrees // 90 % 4 for degrees in spec.rotations]
    moves = [shift % classes for shift in spec.label_shifts]
    # Every (a, a) changes nothing, and (a, b) is (b, a).
    swaps = [tuple(sorted(pair)) if pair[0] != pair[1] else (0, 0) for pair in spec.label_swaps]
    for key, kinds in (("rotations", turns), ("label_shifts", moves), ("label_swaps", swaps)):
        if len(set(kinds)) < len(kinds):
            raise refuse(key, getattr(spec, key), "two groups would be the same")
    return (
        *(partial(_rotated, turn) for turn in turns),
        *(partial(_shifted, move, classes) for move in moves),
        *(partial(_swapped, first, second) for first, second in swaps),
        *(partial(_permuted, permutation) for permutation in label_permutations(spec.seed, spec.label_permutations, classes)),
    )


def _rows(array: Array, places: Array) -> Array:
    """Rows of an array. Consecutive rows are a view, so a mapped array is read on demand; other rows are a copy."""
    first, count = (int(places[0]), len(places)) if len(places) else (0, 0)
    return array[first : first + count] if np.array_equal(places, np.arange(first, first + count)) else array[places]


def _clients(
    dataset: Dataset, partition: Partition, shifts: Sequence[Shift], kinds: Sequence[int], first_id: int = 0, *, features: str = "none"
) -> tuple[tuple[ClientData, ...], tuple[str, ...]]:
    """Each client's own arrays, client i changed by `shifts[kinds[i]]`, and notes. Equal test sets under the same shift are one array.

    `features`: by which map, if any, images are replaced after that, once.
    """
    if dataset.scaling is not None:
        return _scaled_clients(dataset, dataset.scaling, partition, shifts, kinds)
    if features != "none":
        shifts = [partial(_featured, shift, FEATURES[features]) for shift in shifts]
    shared: dict[tuple[bytes, int], tuple[Array, Array]] = {}
    clients = []
    for client, train, test, kind in zip(partition.ids, partition.train, partition.test, kinds, strict=True):
        key = (test.tobytes(), kind)
        if key not in shared:
            shared[key] = shifts[kind](_rows(dataset.x_test, test), dataset.y_test[test])
        clients.append(ClientData(first_id + client, *shifts[kind](_rows(dataset.x_train, train), dataset.y_train[train]), *shared[key]))
    return tuple(clients), ()


def _scaled_clients(
    dataset: Dataset, scaling: Scaling, partition: Partition, shifts: Sequence[Shift], kinds: Sequence[int]
) -> tuple[tuple[ClientData, ...], tuple[str, ...]]:
    """The same of features, which are brought to [0, 1] client by client, since the statistics may be the client's own."""
    clients, clipped = [], 0
    for client, train, test, kind in zip(partition.ids, partition.train, partition.test, kinds, strict=True):
        x_train, x_test, beyond = scaled(scaling, dataset.x_train[train], dataset.x_test[test])
        clipped += beyond
        own, scored = shifts[kind](x_train, dataset.y_train[train]), shifts[kind](x_test, dataset.y_test[test])
        clients.append(ClientData(client, *own, *scored))
    note = f"{clipped} standardised values beyond [{scaling.low:g}, {scaling.high:g}] were clipped (data.value_range)"
    return tuple(clients), (note,) if clipped else ()


def _build_mixture(spec: DataSpec, directory: str | Path | None) -> Population:
    """PACFL's MIX-k: each source's clients share its samples, `samples_per_client` each or, with a note, what there is if that is less."""
    datasets = [load_dataset(name, directory) for name, _ in spec.sources]
    layout = mixture_layout([source.shape for source in datasets], [source.classes for source in datasets], spec.shared_labels)
    clients: list[ClientData] = []
    groups: list[int] = []
    members = ", ".join(f"{name} ({count} clients)" for name, count in spec.sources)
    notes = [f"mixture of {members}" + ("; all share one set of labels" if spec.shared_labels else "")]
    names = {name for name, _ in spec.sources}
    if not spec.shared_labels and "svhn" not in names and len(names) == 4:
        notes.append("PACFL's MIX-4 is of CIFAR-10, SVHN, Fashion-MNIST and USPS; SVHN is not among these four")
    for group, (dataset, (name, count), offset) in enumerate(zip(datasets, spec.sources, layout.offsets, strict=True)):
        samples, there = spec.samples_per_client, len(dataset.y_train) // count
        if samples > there > 0:
            notes.append(f"{name} has too few images for {count} clients of {samples}: each gets {there}")
            samples = there
        try:
            part = split.iid(
                dataset.y_train, dataset.y_test, count, spec.seed, samples, spec.test_samples_per_client, purpose=f"data.mixture.{name}"
            )
        except InputError as error:
            raise InputError(f"[data] sources: {name}: {error}") from None
        conformed = [partial(_conformed, layout.shape, offset)]
        added, _ = _clients(dataset, part, conformed, [0] * count, first_id=len(clients), features=spec.features)
        clients += added
        groups += [group] * count
        notes += dataset.notes
    mean, std = (FEATURE_MEAN, FEATURE_STD) if spec.features != "none" else channel_statistics(client.x_train for client in clients)
    return Population("mixture/iid", tuple(clients), tuple(groups), layout.classes, mean, std, tuple(notes))
