"""Shared types: a client's data, a population of clients, a clustering."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import ref

import numpy as np
import numpy.typing as npt

from .errors import InputError

__all__ = ["Array", "ClientData", "Clustering", "DataChange", "Loss", "PartKind", "Parts", "Population", "ReadOnlyMemory", "check_array"]

Array = npt.NDArray[Any]
Loss = Literal["cross_entropy", "squared", "absolute"]
"""What training minimises: the cross-entropy of classes, or the squared or absolute error of a number."""
PartKind = Literal["compared", "summed", "choice", "request", "score", "measure"]
"""What a part of a task's result is, on which it depends how it may leave a client (`federation.release_policy`): what clients compare (a
signature), what is summed (an update, a model), which of several a client takes, whom it asks for a relayed value, scores of others'
models, or a single measured number. A part that is not declared is "summed", the strictest."""
Parts = Mapping[str, PartKind]
"""The parts of a task's result, each with its kind."""


MOST_CLASSES = 1 << 20


@dataclass(frozen=True, eq=False)
class ReadOnlyMemory:
    """The read-only memory of an array. It identifies the array as long as the owner of the memory lives."""

    owner: "ref[Array]"
    place: tuple[int, tuple[int, ...], tuple[int, ...], str]

    @classmethod
    def of(cls, array: Any) -> "ReadOnlyMemory | None":
        """None for an array that may change."""
        if not isinstance(array, np.ndarray) or array.flags.writeable:
            return None
        owner = array if array.base is None else array.base
        place = array.ctypes.data, array.shape, array.strides, array.dtype.str
        return cls(ref(owner), place) if isinstance(owner, np.ndarray) else None

    def is_of(self, other: "ReadOnlyMemory") -> bool:
        owner = self.owner()
        return owner is not None and owner is other.owner() and self.place == other.place


def check_array(name: str, value: Array, *, ndim: int | None = None, kind: str = "f", finite: bool = True) -> Array:
    """Return `value`, or raise `InputError` naming it.

    `kind` lists the accepted numpy dtype kinds ("f" floating, "iu" integers); `ndim` the number of axes, if it matters.
    """
    if not isinstance(value, np.ndarray):
        raise InputError(f"{name}: expected a numpy array, got {type(value).__name__}")
    if value.dtype.kind not in kind:
        raise InputError(f"{name}: expected dtype kind in {kind!r}, got {value.dtype}")
    if ndim is not None and value.ndim != ndim:
        raise InputError(f"{name}: expected {ndim} axes, got shape {value.shape}")
    if finite and value.dtype.kind == "f" and not np.isfinite(value).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
        raise InputError(f"{name}: value at index {where} is {value[where]}; every value must be finite")
    return value


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client owns. It never leaves the client: algorithms hold `Held` handles instead.

    `x_train` and `x_test` have shape (samples, *features), floating; images are (samples, channels, height, width) in [0, 1], not
    normalised (signatures are taken of raw pixels; a model normalises its own input). `y_train` and `y_test` are int64 class labels,
    or float64 numbers of a regression, whose public range is −1 to 1.
    `id` is the client's stable name: random streams are keyed by it, so results do not depend on the order of clients. `held_out` are
    samples (x, y) that no task trains on, to score models on; None where nothing is held out.

    Raises `InputError` for no training samples, unequal lengths, wrong dtype or a value that is not finite.
    """

    id: int
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    held_out: tuple[Array, Array] | None = None

    def __post_init__(self) -> None:
        name = f"client {self.id}"
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            check_array(f"{name}: x_{part}", x)
            check_array(f"{name}: y_{part}", y, ndim=1, kind="iuf")
            if len(x) != len(y):
                raise InputError(f"{name}: x_{part} has {len(x)} samples but y_{part} has {len(y)} labels")
        dtype = np.float64 if self.y_train.dtype.kind == "f" else np.int64
        if (self.y_train.dtype.kind == "f") != (self.y_test.dtype.kind == "f"):
            raise InputError(f"{name}: y_train has dtype {self.y_train.dtype}, y_test {self.y_test.dtype}; both are classes, or numbers")
        object.__setattr__(self, "y_train", self.y_train.astype(dtype, copy=False))
        object.__setattr__(self, "y_test", self.y_test.astype(dtype, copy=False))
        if len(self.x_train) == 0:
            raise InputError(f"{name}: has no training samples; give every client at least one")
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise InputError(f"{name}: train samples have shape {self.x_train.shape[1:]}, test samples {self.x_test.shape[1:]}")

    @property
    def samples(self) -> int:
        """The number of training samples. It is private: no operation releases it unless asked for by `weights="examples"`."""
        return len(self.x_train)


@dataclass(frozen=True, eq=False)
class DataChange:
    """Before `round` a client joins, or, with `data`, gets these in place of its own. `group`: its true group from then on."""

    round: int
    client: int
    group: int
    data: ClientData | None = None


@dataclass(frozen=True, eq=False)
class Population:
    """Clients with the truth about them, as an experiment sees it. `groups[i]` is the true group of `clients[i]`.

    `groups` is for scoring only and never reaches a federation; without `groups_known` its numbers mean nothing.
    `mean` and `std` are for the input of a model (one value a channel).
    `notes` are sentences for the report: what was substituted, what is missing. `warnings` say what may be wrong with the data, and so do
    `doubts`, with less evidence; these are among the notes.
    `class_names` are the names of the classes, in their order, where the data have names; `feature_columns` the columns of a table whose
    numbers are the features, `client_names` the names of a table's clients, by their ids. Where labels are numbers, `label_range` is
    the public [low, high] that −1 and 1 stand for, and `classes` is 1, the number of outputs. `moments` are, by client, the mean and the
    deviation by which a client standardised its features itself; like its samples they are the client's own. `changes`: what happens in a
    simulation to some clients' data, and which clients join late.
    """

    name: str
    clients: tuple[ClientData, ...]
    groups: tuple[int, ...]
    classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    feature_columns: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    label_range: tuple[float, ...] = ()
    moments: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)
    groups_known: bool = True
    changes: tuple[DataChange, ...] = ()
    doubts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.clients:
            raise InputError(f"population {self.name!r}: has no clients")
        if not 1 <= self.classes <= MOST_CLASSES:
            raise InputError(f"population {self.name!r}: {self.classes} classes; labels are 0, 1, 2, … of at most {MOST_CLASSES} classes")
        if len(self.groups) != len(self.clients):
            raise InputError(f"population {self.name!r}: {len(self.clients)} clients but {len(self.groups)} groups")
        ids = [client.id for client in self.clients]
        if len(set(ids)) != len(ids):
            raise InputError(f"population {self.name!r}: client ids repeat")
        shapes = {client.x_train.shape[1:] for client in self.clients}
        if len(shapes) > 1:
            raise InputError(f"population {self.name!r}: clients have different sample shapes {sorted(shapes)}")
        if self.label_range and self.classes != 1:
            raise InputError(f"population {self.name!r}: labels are numbers, and there are {self.classes} outputs; expected 1")
        for client in self.clients:
            if (client.y_train.dtype.kind == "f") != bool(self.label_range):
                raise InputError(
                    f"population {self.name!r}: client {client.id}: label_range goes with labels that are numbers, and with all"
                )
            for part, y in (("y_train", client.y_train), ("y_test", client.y_test)):
                if not self.label_range and len(y) and (y.min() < 0 or y.max() >= self.classes):
                    bad = int(y.min()) if y.min() < 0 else int(y.max())
                    raise InputError(f"population {self.name!r}: client {client.id} {part} holds label {bad}, not in 0..{self.classes - 1}")

    @property
    def group_of(self) -> dict[int, int]:
        """The true group of each client, by its id."""
        return {client.id: group for client, group in zip(self.clients, self.groups, strict=True)}

    @property
    def truth(self) -> dict[int, int]:
        """The true group of each client, by its id; empty where the groups are unknown."""
        return self.group_of if self.groups_known else {}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(int(size) for size in self.clients[0].x_train.shape[1:])


@dataclass(frozen=True)
class Clustering:
    """A partition of clients: `labels[i]` in 0..k-1 is the cluster of `clients[i]`. Empty clusters are legal."""

    clients: tuple[int, ...]
    labels: tuple[int, ...]
    k: int
    _index: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.clients) != len(self.labels):
            raise InputError(f"clustering: {len(self.clients)} clients but {len(self.labels)} labels")
        if any(not 0 <= label < self.k for label in self.labels):
            raise InputError(f"clustering: a label is outside 0..{self.k - 1}: {self.labels}")
        object.__setattr__(self, "_index", dict(zip(self.clients, self.labels, strict=True)))
        if len(self._index) != len(self.clients):
            raise InputError("clustering: a client appears twice")

    def __getitem__(self, client: int, /) -> int:
        return self._index[client]

    def members(self, label: int) -> tuple[int, ...]:
        """The clients of one cluster."""
        return tuple(client for client, assigned in zip(self.clients, self.labels, strict=True) if assigned == label)

    def extended(self, clients: Sequence[int], labels: Iterable[int]) -> "Clustering":
        """This clustering with newcomers added; k grows to hold their labels."""
        joined = self.labels + tuple(int(label) for label in labels)
        return Clustering(self.clients + tuple(clients), joined, max(self.k, 1 + max(joined)))
