"""Simulated clients of another system: the auditor trains its module as clients were trained, and learns label shares from the updates.

For every optimiser of `torch.optim`, normalisation by the batch, dropout, several epochs, and parameters that do not move (fine-tuning,
low-rank adapters): those that no client's update moved are held fixed. What is learned is in `evidence.learned_shares`. Without a module,
or for an optimiser that torch does not have, labels are named by the order in which the last layer's bias moved.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ...engine.threads import one_thread
from ...randomness import stream
from ...types import Array
from ..evidence.learned_shares import Rows, learned_shares, ridge_shares
from ..evidence.simulated_shares import simulated_samples
from ..membership.membership_gradients import shortened
from .foreign_states import ForeignModel, ReadState
from .foreign_system import LoopSettings, System, UpdateRecord

__all__ = ["PASSES", "by_order", "can_train_again", "moving_parts", "read_by_simulation", "train_again"]

MOST, FEWEST, SECONDS = 200, 60, 30.0
"""So many simulated clients, fewer where they would take longer, and the fewest of all."""
PASSES, DOUBLES, STEP = 1.0e5, 2.0e4, 1.0e-3
"""A second trains about so many samples, half as many with so many parameters; a step takes so many seconds besides."""
USUAL_LR = 1e-3


def moving_parts(system: System, records: Sequence[UpdateRecord]) -> list[str]:
    """The parameters that some update moved, in the order of the states."""
    names = records[0].before.parameters
    return [
        name for name in names
        if any(not np.array_equal(record.before.parameters[name], record.after.parameters[name]) for record in records)
    ]  # fmt: skip


def read_by_simulation(system: System, records: Sequence[UpdateRecord]) -> Array | None:
    """Label shares (m, classes) from single updates, learned from simulated clients; None where clients cannot be imitated.

    Simulated clients start from the states that the real ones were sent, and have their numbers of samples and labels, in turn.
    """
    model, prior = system.model, system.case.prior
    known = [(record.samples, record.labels) for record in records]
    people = [(samples, labels) for samples, labels in known if samples is not None and labels is not None]
    moving = moving_parts(system, records)
    if model is None or len(people) < len(known) or not moving or not len(prior.y) or _optimiser(records[0].settings) is None:
        return None
    rng = stream(prior.seed, "another system: simulated clients")
    places, shares = simulated_samples(prior.y, prior.classes, people, rng, _count(model, records))
    made = []
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        for number, chosen in enumerate(places):
            like = records[number % len(records)]
            made.append(train_again(model, like, prior.x[chosen], prior.y[chosen], moving))
    finite = [number for number, parts in enumerate(made) if all(np.isfinite(part).all() for part in parts.values())]
    if len(finite) < FEWEST // 2:
        return None
    seen = [{name: record.after.parameters[name] - record.before.parameters[name] for name in moving} for record in records]
    labels = [labels for _, labels in people]
    kept, head = [made[number] for number in finite], _rows(system, moving)
    if head is not None:
        return learned_shares(head(kept), shares[finite]).read(head(seen), labels)
    return ridge_shares(_whole(kept, moving), shares[finite]).read(_whole(seen, moving), labels)


def train_again(model: ForeignModel, like: UpdateRecord, x: Array, y: Array, moving: Sequence[str]) -> dict[str, Array]:
    """The movement of each of the parameters `moving` when a client with samples x, y trains as the client of a record did."""
    module, settings = _loaded(model, like.before), like.settings
    module.train(settings.batch_norm == "train")
    leaves = []
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in moving)
        leaves += [parameter] if name in moving else []
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters() if name in moving}
    make = _optimiser(settings)
    assert make is not None  # checked by the caller
    optimiser = make(leaves)
    unit = torch.from_numpy(np.ascontiguousarray(x))
    inputs = unit.long() if model.words else (model.low + (model.high - model.low) * unit).float()
    labels = torch.from_numpy(y)
    for _ in range(settings.epochs):
        for batch in torch.split(torch.randperm(len(y)), settings.batch_size or len(y)):
            if model.norms and len(batch) < 2 and settings.batch_norm == "train":
                continue  # one sample has no statistics of its own
            optimiser.zero_grad()
            functional.cross_entropy(module(inputs[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    after = dict(module.named_parameters())
    return {name: (after[name].detach() - start).double().numpy() for name, start in before.items()}


def can_train_again(settings: LoopSettings) -> bool:
    """Whether the training is known: a rate, and an optimiser that torch has."""
    return settings.lr is not None and _optimiser(settings) is not None


def by_order(moved: Array, labels: int) -> Array:
    """Label shares (classes,) by how far the last layer's bias moved (classes,): of the `labels` largest, beyond the mean of the rest."""
    order = np.argsort(-moved, kind="stable")
    rest = float(moved[order[labels:]].mean()) if labels < len(moved) else float(moved.min())
    shares = np.zeros(len(moved))
    shares[order[:labels]] = np.maximum(moved[order[:labels]] - rest, 1e-300)
    return np.asarray(shares / shares.sum())


def _rows(system: System, moving: Sequence[str]) -> Callable[[Sequence[dict[str, Array]]], Rows] | None:
    """What takes the labels' rows from movements by name; None where no parameter that moves has a row for each label."""
    classes, shapes = system.case.prior.classes, _shapes(system)
    weights = [name for name in moving if len(shapes[name]) > 1 and shapes[name][0] == classes]
    bias = system.head if system.head in moving else None

    def rows(parts: Sequence[dict[str, Array]]) -> Rows:
        heavy = np.stack([part[weights[-1]].reshape(classes, -1) for part in parts]) if weights else None
        return Rows(heavy, None if bias is None else np.stack([part[bias] for part in parts]))

    return rows if weights or bias is not None else None


def _whole(parts: Sequence[dict[str, Array]], moving: Sequence[str]) -> Array:
    """Whole movements (m, size), sketched where they are long."""
    rows = np.stack([np.concatenate([part[name].reshape(-1) for name in moving]) for part in parts])
    return shortened(rows.shape[1])(rows)


def _shapes(system: System) -> dict[str, tuple[int, ...]]:
    first = next(iter(system.records.values()))[0]
    return {name: tuple(array.shape) for name, array in first.before.parameters.items()}


def _loaded(model: ForeignModel, state: ReadState) -> nn.Module:
    """A copy of the module with the parameters and running statistics of a state."""
    module = deepcopy(model.module)
    arrays = {**state.statistics, **state.parameters}
    tensors = {name: torch.tensor(np.asarray(value, np.float32)) for name, value in arrays.items()}
    module.load_state_dict(tensors, strict=False)
    return module


def _optimiser(settings: LoopSettings) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None:
    """What makes the optimiser of these settings; None for a name that torch does not have. A rate that is not known is the usual one."""
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    kind = kinds.get(settings.optimizer.lower().replace("_", "").replace("-", ""))
    if kind is None or not issubclass(kind, torch.optim.Optimizer) or kind.__name__ in ("Optimizer", "LBFGS", "SparseAdam"):
        return None
    given: dict[str, Any] = {"lr": settings.lr or USUAL_LR, "weight_decay": settings.weight_decay}
    if settings.momentum and kind.__name__ in ("SGD", "RMSprop"):
        given["momentum"] = settings.momentum

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(parameters, **given)

    return made


def _count(model: ForeignModel, records: Sequence[UpdateRecord]) -> int:
    size = sum(int(np.prod(shape)) for shape in model.shapes.values())
    each = float(np.mean([(record.samples or 0) * record.settings.epochs / PASSES * (1 + size / DOUBLES) for record in records]))
    each += float(np.mean([(record.steps or 1) * STEP for record in records]))
    return max(FEWEST, min(MOST, int(SECONDS / max(each, 1e-9))))
