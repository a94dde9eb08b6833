"""A data specification: its keys, and what can be checked of them without data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..errors import InputError, near
from ..keys import Key, check_ranges, readable
from .columns import Column, scaling_of
from .datasets import Dataset
from .drift import Drift, check_drift
from .held_out import HeldOut
from .named import LOADERS
from .partition import Alpha, MinimumSamples, NoiseLabels, NoiseProbability, SamplesPerClient, SkewPercent, TestSamplesPerClient
from .periods import check_periods
from .raw_tables import FRAME, TABLES
from .scaling import Scaling
from .text import TEXTS, VocabularySize, WindowLength

__all__ = ["DATASETS", "PARTITIONS", "SHIFTS", "DataSpec", "check_spec", "refuse", "register_dataset"]

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
    "sent140": "sentiment of tweets with their accounts, LEAF's json files in sent140/train and sent140/test",
    "shakespeare": "next characters of plays by role, for `lstm`, LEAF's json files in shakespeare/train and shakespeare/test",
    "har": "activities of 30 people with a phone (UCI HAR), train/X_train.txt and so on in har or in UCI HAR Dataset",
    "wisdm": "activities of 36 people with a phone (WISDM v1.1), 43 features, real_clients/wisdm.npz",
    "sentiment": "reviews of products in four domains (Blitzer et al. 2007), 32 clients, real_clients/sentiment.npz",
    "beijing48": "air quality of 12 stations by quarter of the year (Zhang et al. 2017), 48 clients, real_clients/beijing48.npz",
    "ag_news": "AG News for next-word models, four topics as groups; train.csv and test.csv",
    "nordic_wiki": "sentences of Wikipedia in Nordic languages for next-word models; LANGUAGE_train.txt, LANGUAGE_test.txt",
    "nordic_ud": "sentences of the Nordic treebanks, in the same form",
    "npz": "your own arrays, one path: an npz, or a folder of .npy files, which are read when needed; docs/configuration.md lists them",
    "csv": "your own table with a header: features, label and perhaps client and group in named columns (docs/own_data.md)",
    "parquet": "the same as a Parquet file; needs pyarrow, the extra `parquet`",
    "huggingface": "the same as a folder that `save_to_disk` of Hugging Face's datasets wrote; needs the extra `huggingface`",
    "frame": "the same as a data frame in memory, which `ClusteredFL.fit` takes; it is in no file, so only Python runs and audits it",
    "torchvision": "your own images in two folders, training and test, with a folder for each class; needs the extra `vision`",
    "idx": "your own four idx files: train images, train labels, test images, test labels",
    "mixture": "clients from several data sets in one frame: separate outputs (PACFL's MIX-k), or shared_labels (StoCFL's hybrid)",
}

PARTITIONS: dict[str, str] = {
    "iid": "all clients draw from the same distribution; with rotations, label_shifts or label_swaps these are the true groups",
    "label_skew": "each client owns skew_percent of the labels, at random; a true group is a set of labels (PACFL)",
    "dirichlet": "each class is divided in proportions from Dirichlet(alpha); no true groups",
    "pathological": "groups of clients with a few labels each, the same number of clients in every group",
    "kinds": "groups of clients by topic, language, superclass, alphabet or group_column, one each or several (groups)",
    "given": "the clients that the data set itself names: npz (client_train), tables (client_column), and data sets of real clients",
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


class _Unset(int):
    """A number of clients that was not given: it follows from source and partition, also after these are replaced."""


@readable
@dataclass(frozen=True)
class DataSpec:
    """What `build_population` makes. At most one of `SHIFTS` may be set, with `partition` iid, pathological or kinds: one entry per group.

    Clients are dealt to the groups in turn: client i to i mod the number of groups; with pathological groups, each of these is divided
    again. Each key says beside its type what it means.
    """

    source: Annotated[str, Key("The data set; `cflpriv list` describes each.", known=lambda: DATASETS)] = "digits"
    paths: Annotated[
        tuple[str, ...],
        Key(
            "Your own files. npz: one, or a folder of its arrays as NAME.npy; tables (csv, parquet, huggingface): one that is split, or "
            "training and test rows; torchvision: training and test folder; idx: train images, train labels, test images, test labels. A "
            "relative path starts at the configuration file, else at the data directory."
        ),
    ] = ()
    partition: Annotated[str, Key("How samples are divided among clients; `cflpriv list` describes each.", known=lambda: PARTITIONS)] = (
        "iid"
    )
    clients: Annotated[
        int,
        Key(
            "Number of clients; 0 takes all that the data name (partition `given`) or the sum of `sources` (mixture).",
            "[0, inf)", "clients", default="20; 0 for `given` and mixtures",
        ),
    ] = _Unset(20)  # fmt: skip
    samples_per_client: SamplesPerClient = 0
    test_samples_per_client: TestSamplesPerClient = 0
    skew_percent: SkewPercent = 20.0
    alpha: Alpha = 0.1
    minimum: MinimumSamples = 10
    even_test: Annotated[
        bool,
        Key("dirichlet: test each client evenly on all of its labels, as PACFL's authors do, instead of in its proportions."),
    ] = False
    groups: Annotated[
        tuple[tuple[int, ...], ...],
        Key(
            "Groups of clients. pathological: each group's labels; empty: (0, 1), (2, 3), and so on. kinds: the kinds of each group; "
            "empty: one each.",
            "[0, inf)",
        ),
    ] = ()
    noise: NoiseProbability = 0.0
    noise_labels: NoiseLabels = 1
    rotations: Annotated[tuple[int, ...], Key("One rotation per group, counter-clockwise, in multiples of 90.", unit="degrees")] = ()
    label_shifts: Annotated[tuple[int, ...], Key("One number per group, added to its labels modulo the classes.", unit="labels")] = ()
    label_swaps: Annotated[
        tuple[tuple[int, int], ...], Key("One pair per group: the two labels that it exchanges; [0, 0] exchanges none.", "[0, inf)")
    ] = ()
    label_permutations: Annotated[
        int, Key("Number of groups, each with a random permutation of all labels of its own (CFL); 0: none.", "[0, inf)", "groups")
    ] = 0
    repeat_per_group: Annotated[
        bool, Key("iid with a shift: every group divides the whole training set (IFCA: m·n = 240 000 on MNIST).")
    ] = False
    sources: Annotated[
        tuple[tuple[str, int], ...], Key('mixture: pairs of a data set and its number of clients, such as ["mnist", 10].', "[1, inf)")
    ] = ()
    shared_labels: Annotated[
        bool, Key("mixture: the same outputs for all data sets (StoCFL's hybrid), instead of separate ones (PACFL's MIX-4).")
    ] = False
    languages: Annotated[tuple[str, ...], Key("nordic_wiki, nordic_ud: languages among da, fo, is, nb, nn, sv; empty: nb, sv, da.")] = ()
    vocabulary: VocabularySize = 2000
    sequence_length: WindowLength = 10
    label_column: Annotated[str, Key("tables: the column of the label; its values become the classes, or with `label_type` numbers.")] = ""
    label_type: Annotated[
        Literal["class", "number"], Key("tables, npz: the label is a class, or a number, which makes the run a regression.")
    ] = "class"
    label_range: Annotated[
        tuple[float, ...], Key("label_type `number`: public [low, high] of the label; values beyond are clipped to it.")
    ] = ()
    client_column: Annotated[str, Key('tables: the column that names each row\'s client, for partition = "given"; empty: none.')] = ""
    group_column: Annotated[
        str, Key("tables: the column of the true group, which scores are taken against (partition `given` or `kinds`); empty: none.")
    ] = ""
    time_column: Annotated[
        str,
        Key(
            "tables: the column of each row's time, a date or a number. Rows are then in the order of time, and test rows are the last of "
            "each client (of a period), not random ones. Features only if `columns` has it; empty: none."
        ),
    ] = ""
    periods: Annotated[
        tuple[int, ...],
        Key(
            "Simulations with a `time_column`: rounds that begin the next period of time, ascending. Periods have equally many "
            "rows; a client has its rows of one period at a time, and who has none in the first joins later.",
            "[1, inf)",
            "rounds",
        ),
    ] = ()
    feature_columns: Annotated[tuple[str, ...], Key("tables: the columns of features, all numbers; empty: all others.")] = ()
    columns: Annotated[
        tuple[Column, ...],
        Key("tables: a typed schema of all other columns, as `[[data.columns]]`; `cflpriv init --data FILE` writes it. Empty: numbers."),
    ] = ()
    class_names: Annotated[
        tuple[str, ...], Key("tables: all values of the label in the order of the classes; empty: those found, sorted.")
    ] = ()
    test_share: Annotated[
        float, Key("tables of one file: share of each client's rows (or of each class's) that is held out for testing.", "(0, 1)")
    ] = 0.2
    standardise: Annotated[
        Literal["auto", "none", "constants", "per_client"],
        Key(
            "tables, npz of features: (value − mean) / deviation by public constants (`feature_mean`, `feature_std`), or by each "
            "client's own training samples, which stay with it (`per_client`). `auto`: tables per client; npz as pixels in 0..1."
        ),
    ] = "auto"
    feature_mean: Annotated[tuple[float, ...], Key("standardise `constants`: public means, one for each feature or one for all.")] = ()
    feature_std: Annotated[
        tuple[float, ...], Key("standardise `constants`: public deviations, one for each feature or one for all.", "(0, inf)")
    ] = ()
    value_range: Annotated[
        tuple[float, ...],
        Key(
            "tables, npz of features: public [low, high] of standardised values, which are clipped to it.",
            default="[-5, 5]; [0, 1] for `none`",
        ),
    ] = ()
    held_out: Annotated[
        HeldOut,
        Key(
            "Training samples of each client that no training uses, to score models on: a fifth, at least five, drawn at `random`, or the "
            "`last` ones, for samples in the order of time. `run.advise` and `training.mixture` need it.",
            default="`none`; `random` with `run.advise` or `training.mixture`",
        ),
    ] = "none"
    held_out_gap: Annotated[
        int,
        Key("held_out `last`: so many samples before these are left out, since they share measurements with these.", "[0, inf)", "samples"),
    ] = 0
    features: Annotated[
        Literal["none", "scattering", "whitened_scattering"],
        Key(
            "images: each sample is replaced by public features that depend on it alone, once: normalised wavelet `scattering` (Tramèr & "
            "Boneh 2021), also centred and levelled by drawn images (`whitened_scattering`). They cost no privacy."
        ),
    ] = "none"
    drift: Annotated[
        tuple[Drift, ...],
        Key("Simulations: clients that get other data before a round, or join then, as `[[data.drift]]`."),
    ] = ()
    seed: Annotated[int, Key("Seed of the partition and of every other draw of data.")] = 0

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "data")
        if isinstance(self.clients, _Unset):
            object.__setattr__(self, "clients", _Unset(0 if self.partition == "given" or self.source == "mixture" else 20))

    @property
    def changing(self) -> str:
        """The key that changes clients' data in a run, or has clients join; empty where none does."""
        return "data.drift" if self.drift else "data.periods" if self.periods else ""

    @property
    def scaling(self) -> Scaling | None:
        """How features are standardised; None for pixels."""
        mode = self.standardise
        if mode == "auto":
            if self.source not in TABLES:
                return None
            if self.columns:
                return scaling_of(self.columns, self.value_range)
            mode = "per_client"
        low, high = self.value_range or ((0.0, 1.0) if mode == "none" else (-5.0, 5.0))
        if mode == "constants":
            return Scaling(low, high, self.feature_mean, self.feature_std)
        return Scaling(low, high, per_client=mode == "per_client")


SHIFTS = ("rotations", "label_shifts", "label_swaps", "label_permutations")
"""Keys that make groups differ; one of them at a time."""


def refuse(key: str, value: object, problem: str) -> InputError:
    return InputError(f"[data] {key} = {value!r}: {problem}")


def _known(key: str, value: str, names: Sequence[str]) -> None:
    if value not in names:
        raise refuse(key, value, f"unknown{near(str(value), names)}")


def check_spec(spec: DataSpec) -> None:
    """Everything about a specification that can be judged without its data."""
    LOADERS.find(spec.source)
    _known("source", spec.source, list(DATASETS))
    _known("partition", spec.partition, list(PARTITIONS))
    paths = {"npz": (1,), "torchvision": (2,), "idx": (4,), **dict.fromkeys(TABLES, (1, 2)), FRAME: (0,)}.get(spec.source, (0,))
    if len(spec.paths) not in paths:
        raise refuse("paths", spec.paths, f"source = {spec.source!r} takes {' or '.join(map(str, paths))}")
    if spec.held_out_gap and spec.held_out != "last":
        raise refuse("held_out_gap", spec.held_out_gap, f"only held_out = 'last' has a gap, and this is {spec.held_out!r}")
    check_drift(spec)
    check_periods(spec)
    _check_table(spec)
    if spec.features != "none" and (spec.source in (*TABLES, *TEXTS) or spec.scaling is not None):
        raise refuse("features", spec.features, "is a map of images; tables, texts and standardised features have none")
    if spec.sources and spec.source != "mixture":
        raise refuse("sources", spec.sources, "only source = 'mixture' has sources")
    if spec.groups and spec.partition not in ("pathological", "kinds"):
        raise refuse("groups", spec.groups, "only partition = 'pathological' or 'kinds' has groups")
    if spec.noise and spec.partition not in ("pathological", "kinds"):
        raise refuse("noise", spec.noise, "only partition = 'pathological' or 'kinds' has labels from outside a group")
    if spec.noise_labels != DataSpec.noise_labels and spec.partition not in ("pathological", "kinds"):
        raise refuse("noise_labels", spec.noise_labels, "only partition = 'pathological' or 'kinds' has labels from outside a group")
    for key, partition in (("skew_percent", "label_skew"), ("alpha", "dirichlet"), ("minimum", "dirichlet"), ("even_test", "dirichlet")):
        if spec.partition != partition and getattr(spec, key) != getattr(DataSpec, key):
            raise refuse(key, getattr(spec, key), f"only partition = {partition!r} has it, and this one is {spec.partition!r}")
    if spec.shared_labels and spec.source != "mixture":
        raise refuse("shared_labels", True, "only source = 'mixture' has several data sets")
    if spec.languages and spec.source not in ("nordic_wiki", "nordic_ud"):
        raise refuse("languages", spec.languages, "only source = 'nordic_wiki' or 'nordic_ud' has languages")
    for key in ("vocabulary", "sequence_length"):
        if spec.source not in TEXTS and getattr(spec, key) != getattr(DataSpec, key):
            raise refuse(key, getattr(spec, key), f"only texts have it: {', '.join(TEXTS)}")
    if spec.source in TEXTS and spec.partition not in ("iid", "kinds"):
        raise refuse("partition", spec.partition, "texts are divided by 'kinds' (topics, languages) or 'iid'")
    if spec.source in TEXTS and spec.noise:
        raise refuse("noise", spec.noise, "texts have no labels to hold besides")
    shifts = [key for key in SHIFTS if getattr(spec, key)]
    if len(shifts) > 1:
        raise refuse(shifts[1], getattr(spec, shifts[1]), f"cannot be combined with {shifts[0]}")
    if shifts and (spec.partition not in ("iid", "pathological", "kinds") or spec.source == "mixture" or spec.source in TEXTS):
        raise refuse(shifts[0], getattr(spec, shifts[0]), "needs partition 'iid', 'pathological' or 'kinds' of images, and no mixture")
    if spec.repeat_per_group and not (shifts and spec.partition == "iid"):
        raise refuse("repeat_per_group", True, f"needs partition = 'iid' with one of {', '.join(SHIFTS)}")
    if spec.source == "mixture":
        _check_mixture(spec)


def _check_table(spec: DataSpec) -> None:
    """The keys of tables and of standardisation."""
    if spec.source in TABLES:
        if not spec.label_column:
            raise refuse("label_column", "", f"source = {spec.source!r} needs the column of the label")
        if spec.partition == "given" and not spec.client_column:
            raise refuse("client_column", "", "partition = 'given' needs the column that names each row's client")
    else:
        only_tables = ("label_column", "client_column", "group_column", "time_column", "feature_columns", "columns", "class_names")
        for key in (*only_tables, "test_share"):
            if getattr(spec, key) != getattr(DataSpec, key):
                raise refuse(key, getattr(spec, key), f"only tables have columns and a split: {', '.join(TABLES)}")
    if spec.columns:
        _check_columns(spec)
    _check_label(spec)
    if len(spec.paths) == 2 and spec.test_share != DataSpec.test_share:
        raise refuse("test_share", spec.test_share, "the second of data.paths holds the test rows, so nothing is held out")
    if len(set(spec.class_names)) < len(spec.class_names):
        raise refuse("class_names", spec.class_names, "names a class twice")
    if spec.standardise != "auto" and spec.source not in (*TABLES, "npz"):
        raise refuse("standardise", spec.standardise, f"only {', '.join((*TABLES, 'npz'))} have features to standardise")
    constants = spec.standardise == "constants"
    for key in ("feature_mean", "feature_std"):
        values = getattr(spec, key)
        if bool(values) != constants:
            why = (
                "standardise = 'constants' needs it"
                if constants
                else f"goes with standardise = 'constants', and this is {spec.standardise!r}"
            )
            raise refuse(key, values, why)
    ends = spec.value_range
    if ends and not (spec.scaling is not None and len(ends) == 2 and math.isfinite(ends[1] - ends[0]) and ends[0] < ends[1]):
        raise refuse("value_range", ends, "expected [low, high] for features of a table or a standardised npz")


def _check_label(spec: DataSpec) -> None:
    """The keys of labels that are numbers."""
    low_high = spec.label_range
    if spec.label_type == "class":
        if low_high:
            raise refuse("label_range", low_high, "goes with label_type = 'number'")
        return
    if spec.source not in (*TABLES, "npz"):
        raise refuse("label_type", spec.label_type, f"only {', '.join((*TABLES, 'npz'))} have labels that are numbers")
    if not (len(low_high) == 2 and math.isfinite(low_high[1] - low_high[0]) and low_high[0] < low_high[1]):
        raise refuse("label_range", low_high, "label_type = 'number' needs the public [low, high] of the label")
    if spec.class_names:
        raise refuse("class_names", spec.class_names, "label_type = 'number' has no classes")
    if spec.partition not in ("iid", "given", "kinds") or (spec.partition == "kinds" and not spec.group_column):
        raise refuse(
            "partition", spec.partition, "divides by classes, and the label is a number; use iid, given, or kinds of a group_column"
        )
    for key in ("label_shifts", "label_swaps", "label_permutations"):
        if getattr(spec, key):
            raise refuse(key, getattr(spec, key), "changes classes, and the label is a number")


def _check_columns(spec: DataSpec) -> None:
    """The schema of a table's columns."""
    names = [column.name for column in spec.columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise refuse("columns", twice, "is there twice")
    for key in ("feature_columns", "standardise"):
        if getattr(spec, key) != getattr(DataSpec, key):
            raise refuse(key, getattr(spec, key), "data.columns already says of each column how it becomes features")


def _check_mixture(spec: DataSpec) -> None:
    if not spec.sources:
        raise refuse("sources", spec.sources, "a mixture needs pairs of a data set and its number of clients")
    for name, _ in spec.sources:
        LOADERS.find(name)
        _known("sources", name, list(LOADERS))
    names = [name for name, _ in spec.sources]
    if len(set(names)) < len(names):
        raise refuse("sources", spec.sources, "names a data set twice")
    if spec.partition != "iid":
        raise refuse("partition", spec.partition, "a mixture is iid within each of its sources")
    total = sum(count for _, count in spec.sources)
    if spec.clients not in (0, total):
        raise refuse("clients", spec.clients, f"the sources have {total} clients together; set clients to that, or to 0")
