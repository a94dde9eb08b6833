"""From a plain specification to a population of clients with known true groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..randomness import Stream, stream
from ..types import Array, ClientData, Population
from . import partition as split
from .datasets import Dataset, channel_statistics, data_directory, load_idx, load_npz
from .named import LOADERS, load_dataset
from .partition import Partition
from .shifts import conform, label_permutations, mixture_layout, rotate, shift_labels, swap_labels
from .text import TEXTS, UNKNOWN, Texts, load_texts, numbers, vocabulary, windows

__all__ = ["DATASETS", "PARTITIONS", "DataSpec", "build_population", "register_dataset"]

DATASETS: dict[str, str] = {
    "digits": "scikit-learn's bundled 8×8 digits, 1 797 real images; needs no files",
    "mnist": "MNIST, 60 000 + 10 000 digits of 28×28, four idx files",
    "fashion_mnist": "Fashion-MNIST, 60 000 + 10 000 pieces of clothing of 28×28, four idx files",
    "usps": "USPS, 7 291 + 2 007 digits of 16×16, usps.npz or usps.bz2 and usps.t.bz2",
    "cifar10": "CIFAR-10, 32×32 colour, the official binary batches or the npz subset",
    "cifar100": "CIFAR-100, 100 classes in 20 superclasses (its kinds), the official binary version or cifar100.npz",
    "svhn": "SVHN, 32×32 colour house numbers, train_32x32.mat and test_32x32.mat",
    "emnist_letters": "EMNIST letters, 26 classes of 28×28, the official idx files or the npz subset; no writers",
    "omniglot": "Omniglot's small sets at 28×28: 160 drawers as clients, eight alphabets as kinds; not FEMNIST",
    "femnist": "FEMNIST with its writers, LEAF's json files in femnist/train and femnist/test",
    "ag_news": "AG News for next-word models, four topics as groups; train.csv and test.csv",
    "nordic_wiki": "sentences of Wikipedia in Nordic languages for next-word models; LANGUAGE_train.txt, LANGUAGE_test.txt",
    "nordic_ud": "sentences of the Nordic treebanks, in the same form",
    "npz": "your own arrays x_train, y_train, x_test, y_test (and client_train, client_test), one path",
    "idx": "your own four idx files: train images, train labels, test images, test labels",
    "mixture": "clients from several data sets in one frame: separate outputs (PACFL's MIX-k), or shared_labels (StoCFL's hybrid)",
}

PARTITIONS: dict[str, str] = {
    "iid": "all clients draw from the same distribution; with rotations, label_shifts or label_swaps these are the true groups",
    "label_skew": "each client owns skew_percent of the labels, at random; a true group is a set of labels (PACFL)",
    "dirichlet": "each class is divided in proportions from Dirichlet(alpha); no true groups",
    "pathological": "groups of clients with a few labels each, the same number of clients in every group",
    "kinds": "groups of clients by topic, language, superclass or alphabet, one each or several (groups)",
    "given": "the clients that the data set itself names: npz (client_train), omniglot's drawers, femnist's writers",
}


def register_dataset(name: str, load: Callable[[Path], Dataset], summary: str = "") -> None:
    """Make a data set known as `[data] source`; `load(directory)` gives it, from the data directory or from anywhere.

    Raises `InputError` naming both if the name is that of another.
    """
    if name in DATASETS and name not in LOADERS:
        raise InputError(f"data set {name!r}: is the name of one of the package's own: {DATASETS[name]}")
    LOADERS.add(name, load)
    DATASETS[name] = summary


LOADERS.accept = register_dataset


@dataclass(frozen=True)
class DataSpec:
    """What `build_population` makes. 0 or an empty tuple means the default that the field's comment names.

    At most one of `SHIFTS` may be set, with `partition` iid, pathological or kinds: one entry per group,
    clients dealt to the groups in turn (client i to i mod the number of groups; with pathological groups, each of these is divided again).
    """

    source: str = "digits"  # a key of DATASETS
    paths: tuple[str, ...] = ()  # npz: one; idx: train images, train labels, test images, test labels
    partition: str = "iid"  # a key of PARTITIONS
    clients: int = 20  # given: 0 takes all; mixture: 0 or the sum of the counts in `sources`
    samples_per_client: int = 0  # 0: all. iid, pathological: exactly; otherwise at most
    test_samples_per_client: int = 0  # 0: all with the client's own labels (dirichlet: see partition.dirichlet)
    skew_percent: float = 20.0  # label_skew
    alpha: float = 0.1  # dirichlet
    minimum: int = 10  # dirichlet: samples that every client has at least
    even_test: bool = False  # dirichlet: test data of all of a client's labels alike, as PACFL's authors score; else in its proportions
    groups: tuple[tuple[int, ...], ...] = ()  # pathological: each group's labels, empty: (0, 1), (2, 3), ...; kinds: its kinds, empty: one
    noise: float = 0.0  # pathological, kinds: probability that a client also holds labels from outside its group (pFedLIA: 0.5)
    noise_labels: int = 1  # how many of them
    rotations: tuple[int, ...] = ()  # degrees counter-clockwise, multiples of 90
    label_shifts: tuple[int, ...] = ()  # added to the labels, modulo the classes
    label_swaps: tuple[tuple[int, int], ...] = ()  # labels that each group exchanges; (0, 0) is none
    label_permutations: int = 0  # the number of groups, each with a random permutation of all labels of its own (CFL)
    repeat_per_group: bool = False  # iid with shifts: every group divides the whole training set (IFCA's m·n = 240 000 on MNIST)
    sources: tuple[tuple[str, int], ...] = ()  # mixture: (data set, number of clients)
    shared_labels: bool = False  # mixture: the same outputs for all data sets (StoCFL's hybrid), not each its own (PACFL's MIX-4)
    languages: tuple[str, ...] = ()  # nordic_wiki, nordic_ud: of da, fo, is, nb, nn, sv; empty: nb, sv, da
    vocabulary: int = 2000  # texts: entries of the public vocabulary, fitted on training text
    sequence_length: int = 10  # texts: words before the one to be predicted
    seed: int = 0


SHIFTS = ("rotations", "label_shifts", "label_swaps", "label_permutations")
"""Keys that make groups differ; one of them at a time."""

Shift = Callable[[Array, Array], tuple[Array, Array]]


def build_population(spec: DataSpec, directory: str | Path | None = None) -> Population:
    """The clients that `spec` describes, with their true groups; files come from `directory` (see `datasets.data_directory`).

    The same specification and files give the same population. Arrays may be shared between clients: treat them as read-only.

    Raises `InputError` naming the key and value, or the file, that does not fit.
    """
    _check_spec(spec)
    if spec.source == "mixture":
        return _build_mixture(spec, directory)
    if spec.source in TEXTS:
        return _build_texts(spec, directory)
    dataset = _load(spec, directory)
    shifts = _shifts(spec, dataset)
    try:
        partition = _partition(spec, dataset, max(len(shifts), 1))
    except InputError as error:
        raise InputError(f"[data] {error}") from None
    repeats = ("every group divides the whole training set: images repeat between groups, not within one",) if spec.repeat_per_group else ()
    kinds = [0] * len(partition.ids)
    if shifts:  # the clients of every group so far are dealt to the shifts in turn
        base = max(partition.groups) + 1
        kinds = [position // base % len(shifts) for position in range(len(kinds))]
        partition = replace(partition, groups=tuple(g * len(shifts) + kind for g, kind in zip(partition.groups, kinds, strict=True)))
    return Population(
        name=f"{spec.source}/{spec.partition}",
        clients=_clients(dataset, partition, shifts or (_unchanged,), kinds),
        groups=partition.groups,
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
        notes=(*dataset.notes, *partition.notes, *repeats),
    )


def _refuse(key: str, value: object, problem: str) -> InputError:
    return InputError(f"[data] {key} = {value!r}: {problem}")


def _known(key: str, value: str, names: Sequence[str]) -> None:
    if value not in names:
        near = get_close_matches(str(value), names, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise _refuse(key, value, f"unknown; {hint}known are {', '.join(names)}")


def _check_spec(spec: DataSpec) -> None:
    """Everything about a specification that can be judged without its data."""
    LOADERS.find(spec.source)
    _known("source", spec.source, list(DATASETS))
    _known("partition", spec.partition, list(PARTITIONS))
    if isinstance(spec.seed, bool) or not isinstance(spec.seed, int):
        raise _refuse("seed", spec.seed, "expected a whole number")
    for key in ("clients", "samples_per_client", "test_samples_per_client", "minimum", "label_permutations", "sequence_length"):
        value = getattr(spec, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _refuse(key, value, "expected a whole number, 0 or more")
    paths = {"npz": 1, "idx": 4}.get(spec.source, 0)
    if len(spec.paths) != paths:
        raise _refuse("paths", spec.paths, f"source = {spec.source!r} takes {paths}")
    if spec.sources and spec.source != "mixture":
        raise _refuse("sources", spec.sources, "only source = 'mixture' has sources")
    if spec.groups and spec.partition not in ("pathological", "kinds"):
        raise _refuse("groups", spec.groups, "only partition = 'pathological' or 'kinds' has groups")
    if spec.noise and spec.partition not in ("pathological", "kinds"):
        raise _refuse("noise", spec.noise, "only partition = 'pathological' or 'kinds' has labels from outside a group")
    for key, partition in (("skew_percent", "label_skew"), ("alpha", "dirichlet"), ("even_test", "dirichlet")):
        if spec.partition != partition and getattr(spec, key) != getattr(DataSpec, key):
            raise _refuse(key, getattr(spec, key), f"only partition = {partition!r} has it, and this one is {spec.partition!r}")
    if spec.shared_labels and spec.source != "mixture":
        raise _refuse("shared_labels", True, "only source = 'mixture' has several data sets")
    if spec.languages and spec.source not in ("nordic_wiki", "nordic_ud"):
        raise _refuse("languages", spec.languages, "only source = 'nordic_wiki' or 'nordic_ud' has languages")
    for key in ("vocabulary", "sequence_length"):
        if spec.source not in TEXTS and getattr(spec, key) != getattr(DataSpec, key):
            raise _refuse(key, getattr(spec, key), f"only texts have it: {', '.join(TEXTS)}")
    if spec.source in TEXTS and spec.partition not in ("iid", "kinds"):
        raise _refuse("partition", spec.partition, "texts are divided by 'kinds' (topics, languages) or 'iid'")
    if spec.source in TEXTS and spec.noise:
        raise _refuse("noise", spec.noise, "texts have no labels to hold besides")
    shifts = [key for key in SHIFTS if getattr(spec, key)]
    if len(shifts) > 1:
        raise _refuse(shifts[1], getattr(spec, shifts[1]), f"cannot be combined with {shifts[0]}")
    if shifts and (spec.partition not in ("iid", "pathological", "kinds") or spec.source == "mixture" or spec.source in TEXTS):
        raise _refuse(shifts[0], getattr(spec, shifts[0]), "needs partition 'iid', 'pathological' or 'kinds' of images, and no mixture")
    if spec.repeat_per_group and not (shifts and spec.partition == "iid"):
        raise _refuse("repeat_per_group", True, f"needs partition = 'iid' with one of {', '.join(SHIFTS)}")
    if spec.source == "mixture":
        _check_mixture(spec)


def _check_mixture(spec: DataSpec) -> None:
    if not spec.sources:
        raise _refuse("sources", spec.sources, "a mixture needs pairs of a data set and its number of clients")
    for name, count in spec.sources:
        LOADERS.find(name)
        _known("sources", name, list(LOADERS))
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise _refuse("sources", (name, count), "expected at least 1 client")
    names = [name for name, _ in spec.sources]
    if len(set(names)) < len(names):
        raise _refuse("sources", spec.sources, "names a data set twice")
    if spec.partition != "iid":
        raise _refuse("partition", spec.partition, "a mixture is iid within each of its sources")
    total = sum(count for _, count in spec.sources)
    if spec.clients not in (0, total):
        raise _refuse("clients", spec.clients, f"the sources have {total} clients together; set clients to that, or to 0")


def _load(spec: DataSpec, directory: str | Path | None) -> Dataset:
    if spec.source in LOADERS:
        return load_dataset(spec.source, directory)
    folder = data_directory(directory)
    # As written, from where the command runs; else from the data directory.
    paths = [folder / path if not Path(path).exists() and (folder / path).exists() else Path(path) for path in spec.paths]
    for path in paths:
        if not path.exists():
            raise _refuse("paths", str(path), f"no such file, nor {folder / path} in the data directory (--data-dir or CFLPRIV_DATA)")
    return load_npz(paths[0]) if spec.source == "npz" else load_idx(*paths)


def _partition(spec: DataSpec, dataset: Dataset, shifts: int) -> Partition:
    y_train, y_test, clients, seed = dataset.y_train, dataset.y_test, spec.clients, spec.seed
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
            groups = _labels_of_kinds(spec, dataset) if by_kind else spec.groups or split.consecutive_pairs(dataset.classes)
            if clients % (len(groups) * shifts):
                raise InputError(f"clients = {clients}: not a multiple of the {len(groups) * shifts} groups")
            return split.pathological(y_train, y_test, clients, seed, groups, **caps, noise=spec.noise, noise_labels=spec.noise_labels)
        case _:
            if dataset.owners_train is None:
                named = "has no array client_train" if spec.source == "npz" else "does not name its clients"
                raise InputError(f"partition = 'given': {dataset.name} {named}")
            kinds = np.array(dataset.label_kinds)[y_train] if dataset.label_kinds else None
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
        raise InputError(f"groups = {[list(one) for one in groups]}: {strange[0]} is not a kind of {spec.source}; kinds are {list(known)}")
    return groups


def _build_texts(spec: DataSpec, directory: str | Path | None) -> Population:
    """Documents are dealt to clients, whole; then each becomes windows. `samples_per_client` keeps a random subset of at most that many."""
    try:
        texts = load_texts(spec.source, directory, spec.languages)
        entries = vocabulary(texts.train, spec.vocabulary)
        if spec.sequence_length < 1:
            raise InputError(f"sequence_length = {spec.sequence_length}: expected at least 1")
        kinds_train, kinds_test = np.array(texts.train_kinds), np.array(texts.test_kinds)
        if spec.partition == "iid":
            part = split.iid(kinds_train, kinds_test, spec.clients, spec.seed)
        else:
            groups = _groups_of_kinds(spec, range(len(texts.kinds)))
            part = split.pathological(kinds_train, kinds_test, spec.clients, spec.seed, groups)
    except InputError as error:
        raise InputError(f"[data] {error}") from None
    index = {word: number for number, word in enumerate(entries)}
    cut = {name: [windows(numbers(one, index), spec.sequence_length) for one in getattr(texts, name)] for name in ("train", "test")}
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


def _unchanged(x: Array, y: Array) -> tuple[Array, Array]:
    return x, y


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
            raise _refuse("rotations", spec.rotations, f"{degrees} is not a multiple of 90")
        if degrees % 180 and dataset.shape[1] != dataset.shape[2]:
            raise _refuse("rotations", spec.rotations, f"{degrees} would change the shape of images of {dataset.shape}")
    for pair in spec.label_swaps:
        if not all(0 <= label < classes for label in pair):
            raise _refuse("label_swaps", spec.label_swaps, f"{pair} is not in 0..{classes - 1}")
    turns = [degrees // 90 % 4 for degrees in spec.rotations]
    moves = [shift % classes for shift in spec.label_shifts]
    # Every (a, a) changes nothing, and (a, b) is (b, a).
    swaps = [tuple(sorted(pair)) if pair[0] != pair[1] else (0, 0) for pair in spec.label_swaps]
    for key, kinds in (("rotations", turns), ("label_shifts", moves), ("label_swaps", swaps)):
        if len(set(kinds)) < len(kinds):
            raise _refuse(key, getattr(spec, key), "two groups would be the same")
    return (
        *(partial(_rotated, turn) for turn in turns),
        *(partial(_shifted, move, classes) for move in moves),
        *(partial(_swapped, first, second) for first, second in swaps),
        *(partial(_permuted, one) for one in label_permutations(spec.seed, spec.label_permutations, classes)),
    )


def _clients(
    dataset: Dataset, partition: Partition, shifts: Sequence[Shift], kinds: Sequence[int], first_id: int = 0
) -> tuple[ClientData, ...]:
    """Each client's own arrays, client i changed by `shifts[kinds[i]]`. Equal test sets under the same shift are one array."""
    shared: dict[tuple[bytes, int], tuple[Array, Array]] = {}
    clients = []
    for client, train, test, kind in zip(partition.ids, partition.train, partition.test, kinds, strict=True):
        key = (test.tobytes(), kind)
        if key not in shared:
            shared[key] = shifts[kind](dataset.x_test[test], dataset.y_test[test])
        clients.append(ClientData(first_id + client, *shifts[kind](dataset.x_train[train], dataset.y_train[train]), *shared[key]))
    return tuple(clients)


def _build_mixture(spec: DataSpec, directory: str | Path | None) -> Population:
    """PACFL's MIX-k: each source's clients share its samples, `samples_per_client` each or, with a note, what there is if that is less."""
    datasets = [load_dataset(name, directory) for name, _ in spec.sources]
    layout = mixture_layout([one.shape for one in datasets], [one.classes for one in datasets], spec.shared_labels)
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
        clients += _clients(dataset, part, [partial(_conformed, layout.shape, offset)], [0] * count, first_id=len(clients))
        groups += [group] * count
        notes += dataset.notes
    mean, std = channel_statistics(client.x_train for client in clients)
    return Population("mixture/iid", tuple(clients), tuple(groups), layout.classes, mean, std, tuple(notes))
