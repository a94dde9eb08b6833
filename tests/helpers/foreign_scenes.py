"""A system that is not the toolkit's: a plain torch loop with batch normalisation, on scikit-learn's digits."""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from cflpriv.attacks import Cell, LoopSettings, Update, audit_updates

SETTINGS = LoopSettings(lr=0.1, epochs=2, batch_size=12)
State = dict[str, torch.Tensor]
Samples = tuple[torch.Tensor, torch.Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))


@cache
def digits() -> Samples:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16).float().reshape(-1, 1, 8, 8), torch.tensor(y)


def dealt(count: int, clients: int, labels: int = 2) -> tuple[list[Samples], Samples]:
    """`count` samples of a few labels for each client, no sample twice, and 400 samples of all labels that nobody has."""
    x, y = digits()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(7))
    free, people = order[400:].tolist(), []
    for number in range(clients):
        mine = [(3 * number + i) % 10 for i in range(labels)]
        chosen = [place for place in free if int(y[place]) in mine][:count]
        free = [place for place in free if place not in set(chosen)]
        people.append((x[chosen], y[chosen]))
    return people, (x[order[:400]], y[order[:400]])


def trained(model: nn.Module, samples: Samples, how: LoopSettings) -> State:
    """The state after local training from the model's own."""
    x, y = samples
    own = deepcopy(model).train(how.batch_norm == "train")
    parameters = list(own.parameters())
    for _ in range(how.epochs):
        for batch in torch.split(torch.randperm(len(y)), how.batch_size or len(y)):
            slopes = torch.autograd.grad(functional.cross_entropy(own(x[batch]), y[batch]), parameters)
            with torch.no_grad():  # not torch.optim, whose first step takes seconds to import
                for parameter, slope in zip(parameters, slopes, strict=True):
                    parameter.sub_(slope, alpha=how.lr or 0.1)
    return own.state_dict()


@cache
def scene() -> tuple[nn.Module, tuple[Update, ...], Samples]:
    """One round of eight clients with 30 digits of two labels each."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = network()
        clients, auxiliary = dealt(30, 8)
        updates = [Update(model.state_dict(), trained(model, one, SETTINGS), *one) for one in clients]
    return model, tuple(updates), auxiliary


def audited(updates: list[Update] | None = None, settings: LoopSettings = SETTINGS, **more: Any) -> dict[str, Cell]:
    model, known, auxiliary = scene()
    return {cell.metric: cell for cell in audit_updates(model, updates or list(known), auxiliary, settings, **more)}
