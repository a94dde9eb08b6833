"""How often the examination of another system's updates errs: correct audits that are called doubtful, and wrong ones that are not.

    python -m benchmarks doubtful_evidence [--seeds 2] [--first 0] [--out doubtful_evidence.jsonl]

Small models on digits and made-up tables, trained by plain loops. `CORRECT` are audits as users make them: untrained models, tiny rates,
private updates, clients with one label, few samples, momentum, SCAFFOLD, other optimisers, compressed updates, tables, shifts between
clients. `MISUSES` spoil one of `BASES` in one way. Only the examination runs (`attacks.foreign.foreign_evidence`), no attack.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_digits
from torch import nn
from torch.nn import functional

from cflpriv.attacks import LoopSettings, Update
from cflpriv.attacks.foreign.foreign_evidence import doubts_of
from cflpriv.attacks.foreign.foreign_system import system_of
from cflpriv.errors import InputError

__all__ = ["BASES", "CORRECT", "MISUSES", "Audit", "main", "reasons"]

State = dict[str, torch.Tensor]
Samples = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Audit:
    """What `audit_updates` takes."""

    model: nn.Module
    updates: tuple[Update, ...]
    auxiliary: Samples
    settings: LoopSettings


def reasons(audit: Audit) -> dict[str, str]:
    """Why the evidence of an audit is doubtful, or what it is refused for, by check; empty if it is not."""
    try:
        return doubts_of(system_of(audit.model, audit.updates, audit.auxiliary, audit.settings))
    except InputError as error:
        return {"refused": str(error)}


# --- data ---------------------------------------------------------------------------------------------------------------------------


@cache
def samples_of(name: str) -> Samples:
    """All samples of a data set, shuffled."""
    rng = torch.Generator().manual_seed(5)
    if name == "digits":
        x, y = load_digits(return_X_y=True)
        made = torch.tensor(x / 16).float().reshape(-1, 1, 8, 8), torch.tensor(y)
    elif name == "cancer":
        x, y = load_breast_cancer(return_X_y=True)
        made = torch.tensor((x - x.mean(0)) / x.std(0)).float(), torch.tensor(y)
    elif name == "raw cancer":
        x, y = load_breast_cancer(return_X_y=True)
        made = torch.tensor(x / x.max()).float(), torch.tensor(y)
    elif name == "blobs":
        y = torch.randint(4, (1500,), generator=rng)
        made = torch.randn(4, 12, generator=rng)[y] + 0.7 * torch.randn(1500, 12, generator=rng), y
    elif name == "random":
        made = torch.randn(1500, 20, generator=rng), torch.randint(5, (1500,), generator=rng)
    elif name == "heavy tails":
        y = torch.randint(3, (1500,), generator=rng)
        made = (y[:, None] + torch.randn(1500, 10, generator=rng)).exp(), y
    else:  # categories, which repeat
        y = torch.randint(2, (1500,), generator=rng)
        made = (torch.rand(1500, 6, generator=rng) < 0.3 + 0.4 * y[:, None]).float(), y
    order = torch.randperm(len(made[1]), generator=rng)
    return made[0][order], made[1][order]


def dealt(name: str, clients: int, count: int, labels: int, auxiliary: int, seed: int) -> tuple[list[Samples], list[Samples], Samples]:
    """Samples of clients with so many labels each (0: all), as many of each that nobody trained on, and auxiliary ones."""
    x, y = samples_of(name)
    classes = int(y.max()) + 1
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).tolist()
    aside, free = order[:auxiliary], order[auxiliary:]
    people, others = [], []
    for number in range(clients):
        own = {(number * max(labels, 1) + i) % classes for i in range(labels or classes)}
        places = [place for place in free if int(y[place]) in own]
        chosen, left = places[:count], places[count : 2 * count]
        taken = set(places[: 2 * count])
        free = [place for place in free if place not in taken]
        people.append((x[chosen], y[chosen]))
        others.append((x[left], y[left]))
    return people, others, (x[aside], y[aside])


# --- models and training ------------------------------------------------------------------------------------------------------------


def network(kind: str, shape: Sequence[int], classes: int) -> nn.Module:
    size = int(torch.tensor(shape).prod())
    if kind == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(size, classes))
    if kind == "zero":
        made = network("linear", shape, classes)
        for parameter in made.parameters():
            nn.init.zeros_(parameter)
        return made
    if kind == "cnn":
        return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, classes))
    if kind == "normed":
        return nn.Sequential(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, classes))
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, classes))


def trained(
    model: nn.Module, samples: Samples, how: LoopSettings, *, correction: Sequence[torch.Tensor] | None = None, pull: float = 0.0,
    sample_clip: float = 0.0, noise: float = 0.0,
) -> State:  # fmt: skip
    """The state after local training. `correction` is added to gradients; `pull` towards the start; clipped samples with `noise`."""
    x, y = samples
    own = deepcopy(model).train(how.batch_norm == "train")
    parameters = list(own.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    moved, squared = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    step = 0
    for _ in range(how.epochs):
        for batch in torch.split(torch.randperm(len(y)), how.batch_size or len(y)):
            step += 1
            if sample_clip:
                slopes = [torch.zeros_like(parameter) for parameter in parameters]
                for i in batch:
                    one = torch.autograd.grad(functional.cross_entropy(own(x[i : i + 1]), y[i : i + 1]), parameters)
                    length = torch.sqrt(torch.stack([slope.square().sum() for slope in one]).sum())
                    slopes = [
                        total + slope * (sample_clip / length.clamp(min=sample_clip)) for total, slope in zip(slopes, one, strict=True)
                    ]
                slopes = [(total + noise * sample_clip * torch.randn_like(total)) / len(batch) for total in slopes]
            else:
                slopes = list(torch.autograd.grad(functional.cross_entropy(own(x[batch]), y[batch]), parameters))
            with torch.no_grad():
                for i, (parameter, slope) in enumerate(zip(parameters, slopes, strict=True)):
                    slope = slope + how.weight_decay * parameter + pull * (parameter - start[i])
                    slope = slope if correction is None else slope + correction[i]
                    if how.optimizer == "adam":
                        moved[i].mul_(0.9).add_(0.1 * slope)
                        squared[i].mul_(0.999).add_(0.001 * slope.square())
                        slope = moved[i] / (1 - 0.9**step) / ((squared[i] / (1 - 0.999**step)).sqrt() + 1e-8)
                    elif how.momentum:
                        moved[i].mul_(how.momentum).add_(slope)
                        slope = moved[i]
                    parameter.sub_((how.lr or 0.1) * slope)
    return {name: value.detach().clone() for name, value in own.state_dict().items()}


def plus(state: State, update: State, factor: float = 1.0) -> State:
    return {name: value + factor * update[name] if value.is_floating_point() else value.clone() for name, value in state.items()}


def minus(state: State, other: State) -> State:
    return {name: value - other[name] for name, value in state.items()}


def mean_of(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name].float() for state in states]).mean(0).to(states[0][name].dtype) for name in states[0]}


def on_floats(state: State, change: Callable[[torch.Tensor], torch.Tensor]) -> State:
    return {name: change(value) if value.is_floating_point() else value for name, value in state.items()}


def made(
    data: str = "digits", kind: str = "mlp", clients: int = 6, count: int = 30, labels: int = 2, auxiliary: int = 200, rounds: int = 1,
    warm: int = 0, seed: int = 0, outside: bool = False, change: Callable[[State, State], State] | None = None,
    shift: Callable[[int, Samples], Samples] | None = None, sizes: Sequence[int] = (), scaffold: bool = False,
    own_start: bool = False, scale: Callable[[torch.Tensor], torch.Tensor] | None = None, training: Mapping[str, Any] | None = None,
    **how: Any,
) -> Audit:  # fmt: skip
    """A correct audit: `warm` rounds of federated averaging, then `rounds` that are recorded.

    `change(update, sent)` is what a client does to its update before it returns; `shift(number, samples)` to its data.
    """
    settings = LoopSettings(**({"lr": 0.1, "epochs": 2, "batch_size": 10} | how))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        people, others, aside = dealt(data, clients, count, labels, auxiliary, seed)
        people = [(x[: sizes[i % len(sizes)]], y[: sizes[i % len(sizes)]]) for i, (x, y) in enumerate(people)] if sizes else people
        if scale is not None:
            people, others = ([(scale(x), y) for x, y in several] for several in (people, others))
            aside = scale(aside[0]), aside[1]
        if shift is not None:
            people, others = ([shift(i, pair) for i, pair in enumerate(several)] for several in (people, others))
        model = network(kind, tuple(people[0][0].shape[1:]), int(samples_of(data)[1].max()) + 1)
        starts = [deepcopy(model.state_dict()) for _ in people]
        if own_start:  # models of their own, from earlier rounds of clusters
            starts = [trained(model, people[i], replace(settings, epochs=3)) for i in range(clients)]
        controls: list[list[torch.Tensor]] = [[torch.zeros_like(p) for p in model.parameters()] for _ in people]
        updates = []
        for number in range(warm + rounds):
            returned = []
            common = [torch.stack(part).mean(0) for part in zip(*controls, strict=True)]
            for client, samples in enumerate(people):
                model.load_state_dict(starts[client])
                correction = [c - own for c, own in zip(common, controls[client], strict=True)] if scaffold else None
                after = trained(model, samples, settings, correction=correction, **(training or {}))
                if scaffold:
                    steps = settings.epochs * -(-len(samples[1]) // (settings.batch_size or len(samples[1])))
                    names = [name for name, _ in model.named_parameters()]
                    controls[client] = [
                        own - c + (starts[client][name] - after[name]) / (steps * (settings.lr or 0.1))
                        for own, c, name in zip(controls[client], common, names, strict=True)
                    ]
                if change is not None:
                    after = plus(starts[client], change(minus(after, starts[client]), starts[client]))
                returned.append(after)
                if number >= warm:
                    updates.append(Update(starts[client], after, *samples, client=client, outside=others[client] if outside else None))
            starts = returned if own_start else [mean_of(returned)] * clients
    return Audit(model, tuple(updates), aside, settings)


# --- what clients do to updates -----------------------------------------------------------------------------------------------------


def private(norm: float, noise: float) -> Callable[[State, State], State]:
    """Clip to a norm and add Gaussian noise."""

    def change(update: State, sent: State) -> State:
        length = torch.sqrt(torch.stack([value.float().square().sum() for value in update.values()]).sum())
        factor = min(1.0, norm / max(float(length), 1e-12))
        return on_floats(update, lambda value: factor * value + noise * norm * torch.randn_like(value))

    return change


def sparse(update: State, sent: State) -> State:
    def largest(value: torch.Tensor) -> torch.Tensor:
        kept = max(1, value.numel() // 10)
        return torch.where(value.abs() >= value.abs().flatten().kthvalue(value.numel() - kept + 1).values, value, torch.zeros_like(value))

    return on_floats(update, largest)


def signs(update: State, sent: State) -> State:
    return on_floats(update, lambda value: value.sign() * value.abs().mean())


def coarse(update: State, sent: State) -> State:
    def rounded(value: torch.Tensor) -> torch.Tensor:
        step = value.abs().max() / 8 + 1e-12
        return (value / step).round() * step

    return on_floats(update, rounded)


def frozen(update: State, sent: State) -> State:
    """The first array does not move."""
    first = next(iter(update))
    return {name: torch.zeros_like(value) if name == first else value for name, value in update.items()}


def brighter(number: int, samples: Samples) -> Samples:
    return samples[0] * (0.6 + 0.1 * (number % 5)), samples[1]


def relabelled(number: int, samples: Samples) -> Samples:
    return samples[0], (samples[1] + 3 * (number % 3)) % 10


def noisy_labels(number: int, samples: Samples) -> Samples:
    return samples[0], torch.where(torch.arange(len(samples[1])) % 3 == 0, (samples[1] + 1) % 10, samples[1])


def moved_features(number: int, samples: Samples) -> Samples:
    return samples[0] + 0.5 * (number % 4), samples[1]


def drawn_again(number: int, samples: Samples) -> Samples:
    """A bootstrap sample."""
    places = torch.randint(len(samples[1]), (len(samples[1]),))
    return samples[0][places], samples[1][places]


CORRECT: Mapping[str, Mapping[str, Any]] = {
    "plain": {}, "linear": {"kind": "linear"}, "convolution": {"kind": "cnn"}, "batch normalisation": {"kind": "normed"},
    "batch normalisation, one step": {"kind": "normed", "epochs": 1, "batch_size": 0}, "zero start": {"kind": "zero"},
    "one step": {"epochs": 1, "batch_size": 0}, "tiny rate": {"epochs": 1, "batch_size": 0, "lr": 1e-4},
    "tinier rate": {"epochs": 1, "batch_size": 0, "lr": 1e-6}, "rate below rounding": {"epochs": 1, "batch_size": 0, "lr": 1e-12},
    "tiny rate, trained": {"epochs": 1, "batch_size": 0, "lr": 1e-5, "warm": 3}, "all labels": {"labels": 0},
    "all labels, linear": {"labels": 0, "kind": "linear", "warm": 2}, "one label": {"labels": 1, "clients": 8},
    "one label, two rounds": {"labels": 1, "rounds": 2}, "one label, linear, trained": {"labels": 1, "kind": "linear", "warm": 5},
    "one label, tiny rate": {"labels": 1, "epochs": 1, "batch_size": 0, "lr": 1e-4}, "few auxiliary": {"auxiliary": 12},
    "25 auxiliary": {"auxiliary": 25, "labels": 3}, "few auxiliary, blobs": {"data": "blobs", "auxiliary": 15},
    "private, some noise": {"change": private(0.5, 0.01)}, "private": {"change": private(0.5, 0.1)},
    "private, much noise": {"change": private(0.5, 2.0)},
    "private, linear, noise": {"kind": "linear", "change": private(1.0, 0.5), "labels": 1}, "clipped": {"change": private(0.05, 0.0)},
    "private samples": {"training": {"sample_clip": 1.0, "noise": 1.0}, "count": 20},
    "private samples, much noise": {"training": {"sample_clip": 0.5, "noise": 5.0}, "count": 20, "labels": 1},
    "private, trained": {"change": private(0.5, 0.3), "warm": 3, "labels": 1}, "momentum": {"momentum": 0.9, "lr": 0.05},
    "momentum, many epochs": {"momentum": 0.9, "lr": 0.02, "epochs": 20}, "weight decay": {"weight_decay": 0.1, "epochs": 10},
    "adam": {"optimizer": "adam", "lr": 0.003}, "pull": {"training": {"pull": 0.5}, "epochs": 5},
    "scaffold": {"scaffold": True, "rounds": 3}, "scaffold, one label": {"scaffold": True, "warm": 2, "labels": 1},
    "scaffold, uneven labels": {
        "scaffold": True, "warm": 2, "labels": 1, "clients": 7, "kind": "linear", "data": "cancer", "count": 15, "lr": 0.01
    },
    "many epochs": {"epochs": 60}, "many epochs, linear": {"epochs": 60, "kind": "linear", "lr": 0.5},
    "large rate": {"lr": 1.5, "epochs": 5}, "three samples": {"count": 3, "labels": 1, "batch_size": 0},
    "one sample": {"count": 1, "labels": 1, "batch_size": 0, "epochs": 1},
    "five samples, many epochs": {"count": 5, "labels": 2, "epochs": 40}, "two clients": {"clients": 2},
    "one client": {"clients": 1, "count": 60}, "uneven sizes": {"sizes": (4, 60, 15), "count": 60}, "rounds": {"rounds": 3},
    "late rounds": {"warm": 6, "rounds": 2}, "outside": {"outside": True},
    "outside, all labels": {"outside": True, "labels": 0, "rounds": 2}, "brightness": {"shift": brighter},
    "concept shift": {"shift": relabelled, "labels": 0}, "noisy labels": {"shift": noisy_labels, "epochs": 30},
    "bootstrap": {"shift": drawn_again}, "blobs": {"data": "blobs", "labels": 0},
    "blobs, own labels": {"data": "blobs", "labels": 1, "outside": True},
    "shifted features": {"data": "blobs", "labels": 2, "shift": moved_features}, "cancer": {"data": "cancer", "labels": 0},
    "raw cancer": {"data": "raw cancer", "labels": 1, "outside": True, "count": 15, "auxiliary": 100},
    "random": {"data": "random", "labels": 0, "epochs": 30, "outside": True},
    "heavy tails": {"data": "heavy tails", "labels": 0, "auxiliary": 30, "lr": 0.001, "outside": True},
    "categories": {"data": "categories", "labels": 0, "outside": True, "count": 40},
    "categories, one label": {"data": "categories", "labels": 1}, "sparse": {"change": sparse}, "signs": {"change": signs},
    "coarse": {"change": coarse}, "frozen": {"change": frozen}, "own starts": {"own_start": True},
    "own starts, rounds": {"own_start": True, "rounds": 2}, "pixels to 255": {"scale": lambda x: 255 * x, "lr": 1e-4},
    "scaffold, trained": {"scaffold": True, "warm": 4}, "scaffold, blobs": {"scaffold": True, "warm": 3, "labels": 1, "data": "blobs"},
    "scaffold, convolution": {"scaffold": True, "warm": 3, "kind": "cnn", "labels": 3},
    "outside, categories": {"data": "categories", "labels": 0, "outside": True},
    "outside, heavy tails": {"data": "heavy tails", "labels": 0, "lr": 1e-3, "outside": True, "count": 50},
    "standardised": {"scale": lambda x: (x - 0.3) / 0.37},
    "float64": {"change": lambda update, sent: on_floats(update, torch.Tensor.double)}, "20 clients": {"clients": 20, "labels": 2},
}  # fmt: skip
"""Options of `made` by name."""


# --- misuses ------------------------------------------------------------------------------------------------------------------------

BASES: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"outside": True}, "linear, all labels": {"kind": "linear", "labels": 0, "outside": True},
    "convolution, trained": {"kind": "cnn", "warm": 3, "labels": 3, "outside": True},
    "blobs": {"data": "blobs", "labels": 2, "outside": True}, "one step": {"epochs": 1, "batch_size": 0, "labels": 1, "outside": True},
    "normed": {"kind": "normed", "outside": True}, "three clients": {"clients": 4, "labels": 1, "count": 20, "outside": True},
    "private": {"change": private(1.0, 0.002), "outside": True},
}  # fmt: skip
"""What is misused, by name."""
SOME = (0, 3)
"""The clients that a misuse by some spoils."""


def each(audit: Audit, change: Callable[[int, Update], Update], only: Sequence[int] | None = None) -> Audit:
    changed = [change(i, update) if only is None or i in only else update for i, update in enumerate(audit.updates)]
    return replace(audit, updates=tuple(changed))


def other_model(audit: Audit) -> State:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(99)
        fresh = deepcopy(audit.model)
        for layer in fresh.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
        return fresh.state_dict()


def of(audit: Audit, place: int) -> Update:
    return audit.updates[place % len(audit.updates)]


def halved(audit: Audit, i: int) -> Samples:
    """Half of the samples outside are members."""
    update = audit.updates[i]
    assert update.outside is not None
    (x, y), half = update.outside, len(update.outside[1]) // 2
    return torch.cat([x[:half], update.x[: len(y) - half]]), torch.cat([y[:half], update.y[: len(y) - half]])


def standard(audit: Audit, x: torch.Tensor) -> torch.Tensor:
    whole = torch.cat([update.x for update in audit.updates])
    return (x - whole.mean()) / (0.5 * whole.std())


def shuffled(y: torch.Tensor) -> torch.Tensor:
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(3))]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Noise in the place of samples."""
    return torch.rand(x.shape, generator=generator(seed))


def classes_of(audit: Audit) -> int:
    return int(audit.auxiliary[1].max()) + 1


def with_outside(update: Update, change: Callable[[torch.Tensor, torch.Tensor], Samples]) -> Samples:
    assert update.outside is not None
    return change(*update.outside)


def dealt_anew(audit: Audit) -> Audit:
    """All clients' samples, dealt at random."""
    x, y = torch.cat([update.x for update in audit.updates]), torch.cat([update.y for update in audit.updates])
    order, sizes = torch.randperm(len(y), generator=generator(1)), [len(update.y) for update in audit.updates]
    parts = list(zip(torch.split(x[order], sizes), torch.split(y[order], sizes), strict=True))
    return each(audit, lambda i, update: replace(update, x=parts[i][0], y=parts[i][1], outside=None))


def with_untrained(update: Update, whole: bool = True) -> Update:
    """All (`whole`) or half of the client's samples, and as many that nobody trained on."""
    assert update.outside is not None
    (x, y), count = update.outside, len(update.y) if whole else len(update.y) // 2
    kept = len(update.y) if whole else len(update.y) - count
    return replace(update, x=torch.cat([update.x[:kept], x[:count]]), y=torch.cat([update.y[:kept], y[:count]]), outside=None)


def with_first_layer(update: Update, other: Update) -> Update:
    """The first layer of its state after is another client's."""
    layer = next(name for name, value in update.after.items() if value.is_floating_point()).partition(".")[0]
    return replace(update, after={n: other.after[n] if n.partition(".")[0] == layer else v for n, v in update.after.items()})


MISUSES: Mapping[str, Callable[[Audit], Audit]] = {
    "update as state": lambda a: each(a, lambda i, u: replace(u, after=minus(u.after, u.before))),
    "update as state, one client": lambda a: each(a, lambda i, u: replace(u, after=minus(u.after, u.before)), [1]),
    "negative update as state": lambda a: each(a, lambda i, u: replace(u, after=minus(u.before, u.after))),
    "before is after": lambda a: each(a, lambda i, u: replace(u, before=deepcopy(u.after))),
    "after is before": lambda a: each(a, lambda i, u: replace(u, after=deepcopy(u.before))),
    "after is before, one client": lambda a: each(a, lambda i, u: replace(u, after=deepcopy(u.before)), [2]),
    "same after": lambda a: each(a, lambda i, u: replace(u, after=deepcopy(of(a, 0).after))),
    "same after of two": lambda a: each(a, lambda i, u: replace(u, after=deepcopy(of(a, 0).after)), [1]),
    "proportional": lambda a: each(
        a, lambda i, u: replace(u, after=plus(u.before, minus(of(a, 0).after, of(a, 0).before), 1 + i / 4)), [1, 2, 3]
    ),
    "before of another model": lambda a: each(a, lambda i, u: replace(u, before=other_model(a))),
    "before of another model, one client": lambda a: each(a, lambda i, u: replace(u, before=other_model(a)), [3]),
    "before of the next round": lambda a: each(a, lambda i, u: replace(u, before=mean_of([v.after for v in a.updates]))),
    "exchanged": lambda a: each(a, lambda i, u: replace(u, before=u.after, after=u.before)),
    "exchanged, one client": lambda a: each(a, lambda i, u: replace(u, before=u.after, after=u.before), [0]),
    "before of the client before": lambda a: each(a, lambda i, u: replace(u, before=of(a, i - 1).after), [1, 2, 3]),
    "data of the next client": lambda a: each(a, lambda i, u: replace(u, x=of(a, i + 1).x, y=of(a, i + 1).y)),
    "data of two clients exchanged": lambda a: each(a, lambda i, u: replace(u, x=of(a, 1 - i).x, y=of(a, 1 - i).y), [0, 1]),
    "states of the next client": lambda a: each(a, lambda i, u: replace(u, before=of(a, i + 1).before, after=of(a, i + 1).after)),
    "pixels to 255": lambda a: each(a, lambda i, u: replace(u, x=255 * u.x, outside=None)),
    "pixels to 255, one client": lambda a: each(a, lambda i, u: replace(u, x=255 * u.x), [2]),
    "divided by 255": lambda a: each(a, lambda i, u: replace(u, x=u.x / 255, outside=None)),
    "auxiliary to 255": lambda a: replace(a, auxiliary=(255 * a.auxiliary[0], a.auxiliary[1])),
    "outside to 255": lambda a: each(a, lambda i, u: replace(u, outside=None if u.outside is None else (255 * u.outside[0], u.outside[1]))),
    "standardised": lambda a: each(a, lambda i, u: replace(u, x=standard(a, u.x), outside=None)),
    "auxiliary standardised": lambda a: replace(a, auxiliary=(standard(a, a.auxiliary[0]), a.auxiliary[1])),
    "auxiliary labels shuffled": lambda a: replace(a, auxiliary=(a.auxiliary[0], shuffled(a.auxiliary[1]))),
    "auxiliary labels in order": lambda a: replace(a, auxiliary=(a.auxiliary[0], torch.sort(a.auxiliary[1])[0])),
    "outside is x": lambda a: each(a, lambda i, u: replace(u, outside=(u.x, u.y))),
    "outside half members": lambda a: each(a, lambda i, u: replace(u, outside=halved(a, i))),
    "outside of other clients": lambda a: each(a, lambda i, u: replace(u, outside=(of(a, i + 1).x, of(a, i + 1).y))),
    "auxiliary of clients": lambda a: replace(
        a, auxiliary=(torch.cat([u.x for u in a.updates]), torch.cat([u.y for u in a.updates]))
    ),
    "several under one name": lambda a: each(a, lambda i, u: replace(u, client=0, x=of(a, 0).x, y=of(a, 0).y, outside=of(a, 0).outside)),
    "several under one name, own data": lambda a: each(a, lambda i, u: replace(u, client=0)),
    "two under one name": lambda a: each(a, lambda i, u: replace(u, client=0, x=None, y=None, outside=None), [1]),
    "samples twice": lambda a: each(a, lambda i, u: replace(u, x=torch.cat([u.x, u.x]), y=torch.cat([u.y, u.y]))),
    "one client's samples for all": lambda a: each(a, lambda i, u: replace(u, x=of(a, 0).x, y=of(a, 0).y)),
    "weighted states": lambda a: each(a, lambda i, u: replace(u, after=on_floats(u.after, lambda v: len(u.y) * v))),
    "outside of noise": lambda a: each(a, lambda i, u: replace(u, outside=with_outside(u, lambda x, y: (drawn(x, i), y)))),
    "outside of zeros": lambda a: each(a, lambda i, u: replace(u, outside=with_outside(u, lambda x, y: (torch.zeros_like(x), y)))),
    "outside once": lambda a: each(a, lambda i, u: replace(u, outside=with_outside(u, lambda x, y: (x[[0] * len(x)], y)))),
    "outside labels shuffled": lambda a: each(
        a, lambda i, u: replace(u, outside=with_outside(u, lambda x, y: (x, torch.randint(classes_of(a), y.shape, generator=generator(i)))))
    ),
    "outside rounded members": lambda a: each(a, lambda i, u: replace(u, outside=(1.0001 * u.x.half().float(), u.y))),
    "outside noisy members": lambda a: each(a, lambda i, u: replace(u, outside=(u.x + 1e-3 * drawn(u.x, i), u.y))),
    "auxiliary of rounded members": lambda a: replace(
        a, auxiliary=(torch.cat([(200 * u.x).round() / 200 for u in a.updates]), torch.cat([u.y for u in a.updates]))
    ),
    "samples of noise": lambda a: each(a, lambda i, u: replace(u, x=drawn(u.x, i), outside=None)),
    "samples dealt anew": dealt_anew,
    "labels one up": lambda a: each(a, lambda i, u: replace(u, y=(u.y + 1) % classes_of(a))),
    "samples of two clients": lambda a: each(
        a, lambda i, u: replace(u, x=torch.cat([u.x, of(a, i + 1).x]), y=torch.cat([u.y, of(a, i + 1).y]), outside=None)
    ),
    "before of zeros": lambda a: each(a, lambda i, u: replace(u, before=on_floats(u.before, torch.zeros_like))),
    "after of two clients": lambda a: each(a, lambda i, u: replace(u, after=mean_of([u.after, of(a, i + 1).after]))),
    "another's update added": lambda a: each(
        a, lambda i, u: replace(u, after=plus(u.after, minus(of(a, i + 1).after, of(a, i + 1).before)))
    ),
    "updates times 1000": lambda a: each(a, lambda i, u: replace(u, after=plus(u.before, minus(u.after, u.before), 1000.0))),
    "rate in thousandths": lambda a: replace(a, settings=replace(a.settings, lr=1e-3 * (a.settings.lr or 0.1))),
    "rate in thousands": lambda a: replace(a, settings=replace(a.settings, lr=1e3 * (a.settings.lr or 0.1))),
    "fewer samples declared": lambda a: each(a, lambda i, u: replace(u, samples=len(u.y) - 1)),
    "half never trained": lambda a: each(a, lambda i, u: with_untrained(u)),
    "half never trained, some clients": lambda a: each(a, lambda i, u: with_untrained(u), SOME),
    "half replaced": lambda a: each(a, lambda i, u: with_untrained(u, whole=False)),
    "half replaced, some clients": lambda a: each(a, lambda i, u: with_untrained(u, whole=False), SOME),
    "first layer of another": lambda a: each(a, lambda i, u: with_first_layer(u, of(a, i + 1))),
    "first layer of another, some clients": lambda a: each(a, lambda i, u: with_first_layer(u, of(a, i + 1)), SOME),
    "updates times 10, some clients": lambda a: each(
        a, lambda i, u: replace(u, after=plus(u.before, minus(u.after, u.before), 10.0)), SOME
    ),
    "samples of noise, some clients": lambda a: each(a, lambda i, u: replace(u, x=drawn(u.x, i), outside=None), SOME),
    "labels one up, some clients": lambda a: each(a, lambda i, u: replace(u, y=(u.y + 1) % classes_of(a)), SOME),
    "another's update added, one client": lambda a: each(
        a, lambda i, u: replace(u, after=plus(u.after, minus(of(a, i + 1).after, of(a, i + 1).before))), [1]
    ),
    "momentum declared": lambda a: replace(a, settings=replace(a.settings, momentum=0.9)),
    "more labels declared": lambda a: each(a, lambda i, u: replace(u, labels=len(torch.unique(u.y)) + 1)),
}  # fmt: skip
"""Name -> what spoils an audit."""


def rows(seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The reasons of each audit, correct or spoilt."""
    for seed in seeds:
        for name, options in CORRECT.items():
            yield {"kind": "correct", "name": name, "seed": seed, "reasons": reasons(made(**options, seed=seed))}
        for base, options in BASES.items():
            audit = made(**options, seed=100 + seed)
            yield {"kind": "correct", "name": f"base {base}", "seed": seed, "reasons": reasons(audit)}
            for name, spoil in MISUSES.items():
                yield {"kind": "misuse", "name": name, "base": base, "seed": seed, "reasons": reasons(spoil(audit))}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks doubtful_evidence")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("doubtful_evidence.jsonl"))
    options = parser.parse_args(arguments)
    measured = []
    with options.out.open("w", encoding="utf-8") as lines:
        for row in rows(range(options.first, options.first + options.seeds)):
            measured.append(row)
            lines.write(json.dumps(row) + "\n")
            lines.flush()
    for kind, wrong, words in (("correct", True, "called doubtful"), ("misuse", False, "not named")):
        of_kind = [row for row in measured if row["kind"] == kind]
        missed = [row for row in of_kind if bool(row["reasons"]) is wrong]
        interval = stats.binomtest(len(missed), len(of_kind)).proportion_ci(method="exact")
        print(f"{kind}: {len(missed)} of {len(of_kind)} {words} ({interval.low:.1%} to {interval.high:.1%})")
        for row in missed:
            print(f"  {row['name']}, {row.get('base', '')}, seed {row['seed']}: {'; '.join(row['reasons'].values())}")
    return 0
