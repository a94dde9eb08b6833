"""Another system as its auditor has it: the updates of clients, read and checked, what the adversary knows, and the truth for scorers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from math import ceil
from operator import index
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ...errors import InputError
from ...types import Array
from ..adversary import AdversaryView
from ..evidence.local_training import carry
from ..figures.leakage import Case, Cell, Prior, Truth
from .foreign_states import ForeignModel, ModelState, ReadState, head_bias, read_samples, read_state

__all__ = [
    "LoopSettings",
    "AttackOutput",
    "UpdateRecord",
    "System",
    "Update",
    "check_same_samples",
    "system_of",
    "whole",
    "written_settings",
]

ModuleMode = Literal["train", "eval"]
AttackOutput = tuple[list[Cell], dict[str, Array] | None]
"""What an attack gives: figures, and arrays for the report."""


@dataclass(frozen=True)
class LoopSettings:
    """How clients trained: SGD on the mean cross-entropy of batches of `batch_size` samples (0: all at once) for `epochs`.

    `lr` None: the rate is not known, and the length of updates is not used. Under an `optimizer` other than "sgd", a name of `torch.optim`,
    labels are learned from simulated clients, and images are not attempted.
    `batch_norm` is the mode in which normalisation layers trained: "train" by the batch, "eval" by running statistics. Raises `InputError`
    naming the setting.
    """

    lr: float | None = None
    epochs: int = 1
    batch_size: int = 0
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: str = "sgd"
    batch_norm: ModuleMode = "train"

    def __post_init__(self) -> None:
        for name, whole, least in (
            ("lr", False, 0), ("epochs", True, 1), ("batch_size", True, 0), ("momentum", False, 0), ("weight_decay", False, 0)
        ):  # fmt: skip
            value = getattr(self, name)
            if name == "lr" and value is None:
                continue
            if not _is_number(value, whole) or not least <= value < float("inf"):
                raise InputError(f"{name} = {value!r}: expected {'an integer' if whole else 'a number'} of {least} or more")
        if self.lr == 0 or self.momentum >= 1:
            raise InputError(f"lr = {self.lr!r}, momentum = {self.momentum!r}: expected lr above 0 and momentum below 1")
        if not isinstance(self.optimizer, str):
            raise InputError(f"optimizer = {self.optimizer!r}: expected a name, as 'sgd'")
        if self.batch_norm not in ("train", "eval"):
            raise InputError(f"batch_norm = {self.batch_norm!r}: expected 'train' or 'eval'")

    def steps(self, samples: int | None) -> int | None:
        """The steps of a client with so many samples; None if the number of samples is needed and not known."""
        if not self.batch_size:
            return self.epochs
        return None if samples is None else self.epochs * ceil(samples / self.batch_size)


def written_settings(settings: LoopSettings) -> dict[str, Any]:
    """The settings that are known, as foreign.toml has them."""
    return {field.name: value for field in fields(settings) if (value := getattr(settings, field.name)) is not None}


def _spoken(how: LoopSettings) -> str:
    """How a client trained, for people."""
    batches = f"batches of {how.batch_size}" if how.batch_size else "all samples at once"
    more = [f"{name.replace('_', ' ')} {value:g}" for name in ("momentum", "weight_decay") if (value := getattr(how, name))]
    rate = "an unknown rate" if how.lr is None else f"rate {how.lr:g}"
    norm = "by the batch" if how.batch_norm == "train" else "by running statistics"
    words = [
        f"{how.optimizer.upper() if how.optimizer == 'sgd' else how.optimizer} at {rate}",
        f"{how.epochs} epoch(s)",
        batches,
        *more,
        f"batch normalisation, if any, {norm}",
    ]
    return ", ".join(words)


def whole(value: Any, least: int, name: str) -> int:
    """An integer of any kind, numpy's included. Raises `InputError` naming it."""
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise InputError(f"{name} = {value!r}: expected an integer of {least} or more")
    return number


def _is_number(value: object, whole: bool) -> bool:
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool)


@dataclass(frozen=True, eq=False)
class Update:
    """One client's training in one round: the state that the client was sent, and the state that it returned.

    A state is a `state_dict`, a mapping or list of arrays, or Flower `Parameters` (`foreign_states`). `x` (n, *shape) and `y` (n,) are the
    client's samples as the model takes them, for scoring alone. `outside` are similar samples (x, y) that nobody trained on. `samples` and
    `labels` are the client's numbers of samples and labels. The attacker knows both; by default they are counted from `y`. `client` is by
    default the place in the list. The updates of one client are in the order of rounds. `settings` replace the audit's settings.
    """

    before: ModelState
    after: ModelState
    x: Any = None
    y: Any = None
    client: int | None = None
    samples: int | None = None
    labels: int | None = None
    outside: tuple[Any, Any] | None = None
    settings: LoopSettings | None = None


# --- what is read -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class UpdateRecord:
    """A checked update: states, settings, and the client's numbers of samples and labels (None: not known)."""

    client: int
    before: ReadState
    after: ReadState
    settings: LoopSettings
    samples: int | None
    labels: int | None

    @property
    def steps(self) -> int | None:
        return self.settings.steps(self.samples)

    @property
    def scale(self) -> float | None:
        """How far a constant unit gradient carried the parameters; None where rate or steps are not known."""
        settings = self.settings
        return None if settings.lr is None or self.steps is None else carry(settings.lr, self.steps, settings.momentum)


@dataclass(frozen=True, eq=False)
class System:
    """Another system as its auditor has it: updates by client, the model, and what scorers and attacks know.

    `case` has the prior and the truth of a suite's audit, and views without messages. `model` is None where there is no module to run.
    `head` is None where the head's bias was not found; `headless` is the reason.
    """

    case: Case
    records: Mapping[int, Sequence[UpdateRecord]]
    model: ForeignModel | None
    head: str | None
    headless: str = ""
    iterations: int = 200

    @property
    def scored(self) -> list[int]:
        """The clients whose samples are known to the scorer."""
        return sorted(set(self.records) & set(self.case.truth.data))

    def assumed(self, model: str) -> dict[str, str]:
        """The assumptions of an audit of this system, for people, by name. `model` names the model."""
        records = [of_client for record in self.records.values() for of_client in record]
        prior, kinds = self.case.prior, Counter(_spoken(record.settings) for record in records)
        rounds = max(len(of_client) for of_client in self.records.values())
        trained = "; ".join(f"{words} ({count} updates)" if len(kinds) > 1 else words for words, count in kinds.items())
        return {
            "Adversary": "reads single updates, and knows the model, how clients trained, and the auxiliary samples",
            "Updates": f"{len(records)}, of {len(self.records)} client(s) in {rounds} round(s)",
            "Model": model,
            "Local training": trained,
            "Auxiliary samples": f"{len(prior.y)} with labels, of the clients' distribution" if len(prior.y) else "none",
            "Known of clients": "how many samples and labels each has",
            "Scored": f"{len(self.scored)} client(s), whose samples are given" if self.scored else "nobody: no samples are given",
        }


def system_of(
    module: nn.Module | None, updates: Sequence[Update], auxiliary: tuple[Any, Any] | None, settings: LoopSettings, *,
    classes: int | None = None, shape: tuple[int, ...] | None = None, head: str | None = None, seed: int = 0, iterations: int = 200,
) -> System:  # fmt: skip
    """Read and check everything. With a `module`, `auxiliary` samples are needed; without one, `classes` and `shape`."""
    model = None
    if module is not None:
        if auxiliary is None:
            raise InputError("auxiliary: is missing; the model needs labelled samples that no client trained on")
        x, y = read_samples(auxiliary, "auxiliary", shape, classes)
        model = _model_of(module, x, classes)
        classes, shape, auxiliary = model.classes, model.shape, read_samples((_unit(model, x), y), "auxiliary", None, model.classes)
    elif auxiliary is not None:
        auxiliary = read_samples(auxiliary, "auxiliary", shape, classes)
    if classes is None or shape is None:
        raise InputError("classes, shape: are needed where there is no model")
    records, data, outside = _records_of(updates, model, settings, shape, classes)
    first = next(iter(records.values()))[0].before.parameters
    shapes = {name: array.shape for name, array in first.items()} if model is None else model.shapes
    bias, headless = None, ""
    try:
        bias = head_bias(shapes, classes, head, model is not None)
    except InputError as error:
        if head is not None or model is None:
            raise
        headless = str(error)
    x, y = auxiliary or (np.zeros((0, *shape)), np.zeros(0, np.int64))
    words = "no auxiliary data" if auxiliary is None else f"auxiliary data: {len(y)} labelled samples"
    labels = {client: records_of[0].labels or classes for client, records_of in records.items()}
    prior = Prior(x, y, classes, shape, labels, f"{words}; numbers of samples and of labels a client known", seed=seed)
    truth = Truth(
        {client: np.asarray(inputs.mean(axis=0, dtype=np.float64)) for client, (inputs, _) in data.items()},
        {client: frozenset(np.unique(labels).tolist()) for client, (_, labels) in data.items()},
        {client: np.bincount(labels, minlength=classes) for client, (_, labels) in data.items()},
        data=data, outside=outside,
    )  # fmt: skip
    view = AdversaryView("server", (), {})
    return System(Case(view, view, prior, truth, "of another system", seed, has_updates=True), records, model, bias, headless, iterations)


def _model_of(module: nn.Module, x: Array, classes: int | None = None) -> ForeignModel:
    """A module for samples like x (n, *shape). Values outside [0, 1] are mapped there by their range."""
    words = x.dtype.kind in "iu"
    low, high = (float(x.min()), float(x.max())) if not words and len(x) else (0.0, 1.0)
    low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
    own = deepcopy(module).cpu().float().train(False)
    try:
        with torch.no_grad():
            made = own(torch.from_numpy(x[:2].copy()).to(torch.int64 if words else torch.float32))
    except Exception as error:
        raise InputError(f"model: fails on auxiliary samples of shape {x.shape[1:]} ({type(error).__name__}: {error})") from None
    if not isinstance(made, torch.Tensor) or made.dim() != 2 or made.shape[1] < 2 or made.shape[1] != (classes or made.shape[1]):
        got = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
        raise InputError(f"model: gives {got} for {len(x[:2])} samples; expected scores of shape ({len(x[:2])}, {classes or 'classes'})")
    return ForeignModel(own, x.shape[1:], int(made.shape[1]), low, high, words)


def _unit(model: ForeignModel, x: Array) -> Array:
    """Samples as the suite has them, mostly in [0, 1]."""
    is_plain = model.words or (model.low, model.high) == (0.0, 1.0)
    return x if is_plain else np.asarray((x.astype(np.float32) - np.float32(model.low)) / np.float32(model.high - model.low))


def _records_of(
    updates: Sequence[Update], model: ForeignModel | None, settings: LoopSettings, shape: tuple[int, ...], classes: int
) -> tuple[dict[int, list[UpdateRecord]], dict[int, tuple[Array, Array]], dict[int, tuple[Array, Array]]]:
    """Records by client in order, the clients' samples as far as they are given, and samples like them that nobody trained on."""
    if not updates:
        raise InputError("updates: there are none")
    records: dict[int, list[UpdateRecord]] = {}
    data: dict[int, tuple[Array, Array]] = {}
    outside: dict[int, tuple[Array, Array]] = {}
    as_given: dict[str, tuple[Any, Any]] = {}
    for place, update in enumerate(updates):
        client = place if update.client is None else whole(update.client, 0, "client")
        where = f"client {client}"
        both = ((update.before, "before"), (update.after, "after"))
        before, after = (read_state(state, model, f"{where}, {when}") for state, when in both)
        if before.parameters.keys() != after.parameters.keys():
            name = sorted(before.parameters.keys() ^ after.parameters.keys())[0]
            raise InputError(f"{where}: {name!r} is in only one of the states before and after")
        if all(np.may_share_memory(value, before.parameters[name]) for name, value in after.parameters.items()):
            raise InputError(f"{where}: before and after are one memory; state_dict() refers to the model's own tensors: deepcopy it")
        for name, value in after.parameters.items():
            if value.shape != before.parameters[name].shape:
                raise InputError(f"{where}, after: {name!r}: has shape {value.shape}, before it was {before.parameters[name].shape}")
        if (update.x is None) != (update.y is None):
            raise InputError(f"{where}: x and y go together; {'x' if update.x is None else 'y'} is missing")
        for kept, pair, name in (
            (data, None if update.x is None else (update.x, update.y), where),
            (outside, update.outside, f"{where}, outside"),
        ):
            if pair is not None and client not in kept:
                x, y = read_samples(pair, name, shape, classes)
                kept[client] = (x if model is None else _unit(model, x), y)
                as_given[name] = pair
            elif pair is not None:
                check_same_samples(as_given[name], pair, name)
        samples_of = data.get(client)
        counted = (None, None) if samples_of is None else (len(samples_of[1]), len(np.unique(samples_of[1])))
        samples, labels = (
            usual if declared is None else whole(declared, 1, f"{where}: {name}")
            for name, declared, usual in zip(("samples", "labels"), (update.samples, update.labels), counted, strict=True)
        )
        for name, number, given in (("samples", samples, counted[0]), ("labels", labels, counted[1])):
            if number is not None and given is not None and number < given:
                raise InputError(f"{where}: {name} = {number}: its x and y have {given}")
        if labels is not None and counted[1] is not None and samples == counted[0] and labels > counted[1]:
            raise InputError(f"{where}: labels = {labels}: its {samples} samples, which are all in x and y, have {counted[1]}")
        records.setdefault(client, []).append(UpdateRecord(client, before, after, update.settings or settings, samples, labels))
    return records, data, outside


def check_same_samples(first: tuple[Any, Any], later: tuple[Any, Any], where: str) -> None:
    """Raises `InputError` if the samples of a client's later update are not those of its first, which all its updates are scored by."""
    for name, before, after in zip("xy", first, later, strict=True):
        if before is not after and not np.array_equal(np.asarray(before), np.asarray(after)):
            raise InputError(
                f"{where}: {name} of a later update is not that of the first; give each client a number of its own, and in all its updates "
                "all samples that it trained on"
            )
