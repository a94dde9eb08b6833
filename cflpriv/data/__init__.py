"""Data sets, partitions and populations of clients.

Experiments in clustered federated learning need clients whose differences are known. This package turns real data into clients with known
true groups:

- `formats` reads files (idx, npz, libsvm, CIFAR's binary batches, SVHN's MATLAB files, LEAF's json, text) and trusts none of them: sizes
  are checked before memory is taken, nothing is unpickled, and every failure is one line naming the file.
- `named` lists the files of each data set, `datasets` defines their common form. Nothing is downloaded or made up; what is
  incomplete or not the official version is reported in `notes`, which the report shows. Users bring their own data with
  `load_npz` or `load_idx`; an npz may name each sample's real client. `text` turns articles and sentences into windows of words.
- `partition` assigns samples to clients: alike (`iid`), by labels (`label_skew`, `dirichlet`, `pathological`, by the
  kinds that labels belong to) or as in the file (`given`). `shifts` makes groups differ in other ways: rotated images, shifted, swapped
  or permuted labels, several data sets in one frame.
- `population` puts them together: `build_population(DataSpec(...))` returns clients, their true groups, and how to normalise a model's
  input.

Three rules hold throughout. Pixels stay in [0, 1]: signatures are taken of raw pixels, and only a model normalises. Training samples never
belong to two clients, except where `repeat_per_group` asks for it by name; test samples may, since they only score. And every draw comes
from a stream keyed by the seed, the purpose and the client, so the same specification gives the same population in any order of calls.

True groups are what the scores are computed against: the rotation, shift, swap, set of labels, kind or source. Where there is no such truth
(`dirichlet`, most of `given`) a note states that ARI is not meaningful.
"""

from .datasets import Dataset, channel_statistics, data_directory, dataset_of, load_idx, load_npz
from .named import load_dataset
from .partition import Partition, dirichlet, given, iid, label_skew, pathological
from .population import DATASETS, PARTITIONS, DataSpec, build_population, register_dataset
from .shifts import MixtureLayout, conform, label_permutations, mixture_layout, rotate, shift_labels, swap_labels

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "DataSpec",
    "Dataset",
    "MixtureLayout",
    "Partition",
    "build_population",
    "channel_statistics",
    "conform",
    "data_directory",
    "dataset_of",
    "dirichlet",
    "given",
    "iid",
    "label_permutations",
    "label_skew",
    "load_dataset",
    "load_idx",
    "load_npz",
    "mixture_layout",
    "pathological",
    "register_dataset",
    "rotate",
    "shift_labels",
    "swap_labels",
]
