"""Users' modules: each works alike in every way of computing, or is refused in one line before it is trained."""

import math
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.models import Model, build_module, check_words, model_doubts, register_model
from cflpriv.engine.sample_gradients import sample_gradients
from cflpriv.errors import InputError
from cflpriv.plugins import Registry
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.tasks.training import Gradient, Train
from cflpriv.types import ClientData

SHAPE, CLASSES = (1, 8, 8), 4
SIZE = math.prod(SHAPE)
Factory = Callable[[], nn.Module]


def user_module(forward: Callable[[Any, Tensor], Any], prepare: Callable[[Any], object] | None = None) -> Factory:
    """A factory of modules with one linear layer `out` whose pass is `forward(module, x)`."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(SIZE, CLASSES)
            if prepare is not None:
                prepare(self)

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    return Own


def client_samples(shape: tuple[int, ...] = SHAPE, words: int = 0, sizes: tuple[int, ...] = (9, 12, 7, 8, 13)) -> list[ClientData]:
    rng = np.random.default_rng(0)
    made = []
    for i, n in enumerate(sizes):
        x = (rng.integers(words, size=(n, *shape)) if words else rng.random((n, *shape))).astype(np.float32)
        y = rng.integers(CLASSES, size=n)
        made.append(ClientData(i, x, y, x.copy(), y))
    return made


def own_model(factory: Factory, shape: tuple[int, ...] = SHAPE) -> Model:
    return Model("own", shape, CLASSES, factory=factory)


def computed_parts(model: Model, data: list[ClientData], kind: Any = "auto", **options: Any) -> list[np.ndarray[Any, Any]]:
    """What clients compute in training, clipped training, a gradient and an evaluation."""
    start = model.init(0)
    given = [TaskInput(client, {"model": start}, {}, Streams(0, 0, client.id), secret=bytes(32)) for client in data]
    found: list[np.ndarray[Any, Any]] = []
    tasks: list[tuple[Any, str]] = [
        (Train(model, epochs=2, batch_size=5, lr=0.1, momentum=0.5, **options), "update"),
        (Train(model, batch_size=5, lr=0.1, clip_norm=1.0), "update"),
        (Gradient(model), "gradient"),
        (Evaluate(model), "loss"),
    ]
    for task, part in tasks:
        found += [np.asarray(result[part]) for result in Engine(kind).run(task, given)]
    return found


def check_agreement(model: Model, data: list[ClientData], *, by_sample: bool = True) -> None:
    """Every way of computing gives the same, also the second time, and leaves the samples as they are."""
    before = [client.x_train.copy() for client in data]
    plain = computed_parts(model, data, "sequential")
    for other in (computed_parts(model, data, "auto"), computed_parts(model, data, "sequential")):
        for a, b in zip(plain, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for client, x in zip(data, before, strict=True):
        np.testing.assert_array_equal(client.x_train, x)
    if by_sample:
        start = model.init(0)
        rows = np.concatenate([block.numpy() for block in sample_gradients(model, start, data[0])])
        whole = Gradient(model).run(TaskInput(data[0], {"model": start}, {}, Streams(0, 0, 0)))["gradient"]
        np.testing.assert_allclose(rows.mean(0), whole, rtol=1e-3, atol=1e-5)


# --- modules that are refused


def patched_reset(module: Any) -> None:
    module.register_buffer("count", torch.zeros(()))


def _grow(module: Any, x: Tensor) -> Tensor:
    if not hasattr(module, "proj"):
        module.proj = nn.Linear(CLASSES, CLASSES)
    return module.proj(module.out(x.flatten(1)))  # type: ignore[no-any-return]


def _counts(module: Any, x: Tensor, sizes: Callable[[int], bool]) -> Tensor:
    if sizes(len(x)):
        module.count.add_(1)
    return module.out(x.flatten(1))  # type: ignore[no-any-return]


def _after(module: Any, x: Tensor, change: Callable[[Any], object]) -> Tensor:
    change(module)
    return module.out(x.flatten(1))  # type: ignore[no-any-return]


def _normed(module: Any) -> None:
    module.out.weight.div_(module.out.weight.norm())


def _set(module: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _unusable() -> nn.Module:
    raise ZeroDivisionError("division by zero")


class Counter:
    def __init__(self) -> None:
        self.number = 0

    def up(self) -> int:
        self.number += 1
        return self.number


class CalledInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(SIZE, CLASSES)

    def __call__(self, x: Tensor) -> Any:
        return self.out(x.sub_(0.3).flatten(1))


class WarmingUp(nn.Module):
    """Its scores change after many passes."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Any:
        type(self).passes += 1
        return self.out(x.flatten(1)) * (1 if self.passes < 1000 else 2)


class Normed(torch.autograd.Function):
    """Scales the gradient by its length over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].square().sum().sqrt()


class Holder:
    def __init__(self) -> None:
        self.layer = nn.Linear(SIZE, SIZE)


class Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 6, **options), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.embed(x.long().flatten(1)).mean(1))


PASSES, OUTSIDE = [0], nn.Linear(SIZE, SIZE)
SHARED = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, CLASSES))
REFUSED: dict[str, tuple[Factory, str]] = {
    "squeeze": (user_module(lambda m, x: m.out(x.flatten(1)).squeeze()), r"gives \(4,\) for one sample, expected \(1, 4\).*squeeze"),
    "squeezed input": (user_module(lambda m, x: m.out(x.squeeze().flatten(1))), r"on a batch of 1 at layer 'out' \(Linear\)"),
    "fixed batch": (user_module(lambda m, x: m.out(x.view(32, -1))), r"on a batch of 2 at layer 'out'.*shape \(n, 1, 8, 8\) for any n"),
    "fails at 33": (user_module(lambda m, x: m.out(x.flatten(1)) if len(x) < 33 else 1 / 0), "on a batch of 33.*ZeroDivisionError"),
    "double": (user_module(lambda m, x: m.out(x.double().flatten(1))), "at layer 'out'.*same dtype"),
    "no gradient": (user_module(lambda m, x: m.out(x.flatten(1)).detach()), r"no trained parameter.*torch.no_grad\(\)"),
    "tuple": (user_module(lambda m, x: (m.out(x.flatten(1)), x)), r"gives a tuple, expected one tensor \(2, 4\)"),
    "dict": (user_module(lambda m, x: {"scores": m.out(x.flatten(1))}), "gives a dict"),
    "labels": (user_module(lambda m, x: m.out(x.flatten(1)).argmax(1)), r"gives \(2,\) for two samples"),
    "sparse": (user_module(lambda m, x: m.out(x.flatten(1)).to_sparse()), "expected a dense tensor"),
    "default dtype": (
        user_module(lambda m, x: _after(m, x, lambda m: torch.set_default_dtype(torch.float64))),
        "sets torch's default dtype",
    ),
    "teacher": (
        user_module(lambda m, x: _after(m, x, lambda m: m.t.mul_(0.9)), lambda m: setattr(m, "t", nn.Parameter(torch.ones(3), False))),
        r"\(t\).*keep nothing of a pass in a buffer or a frozen parameter",
    ),
    "exits": (user_module(lambda m, x: sys.exit(3)), "fails in training mode.*SystemExit: 3"),
    "integers": (user_module(lambda m, x: functional.one_hot(m.out(x.flatten(1)).argmax(1), CLASSES)), "gives int64 scores"),
    "classes": (user_module(lambda m, x: m.out(x.flatten(1))[:, :3]), r"gives \(2, 3\) for two samples, expected \(2, 4\)"),
    "not finite": (user_module(lambda m, x: m.out((x.flatten(1) - 1).log())), "gives scores that are not finite"),
    "infinite gradient": (
        user_module(lambda m, x: m.out((m.w * x.flatten(1)).sqrt()), lambda m: setattr(m, "w", nn.Parameter(torch.zeros(SIZE)))),
        "gradient of parameter 'w' is not finite",
    ),
    "begins at nan": (
        user_module(lambda m, x: m.out(x.flatten(1)) * m.w, lambda m: setattr(m, "w", nn.Parameter(torch.full((CLASSES,), torch.nan)))),
        "parameter 'w' begins with numbers that are not finite",
    ),
    "numpy.random": (user_module(lambda m, x: m.out(x.flatten(1)) + float(np.random.rand())), "draws from numpy.random"),  # noqa: NPY002
    "random": (user_module(lambda m, x: m.out(x.flatten(1)) * (2 if m.training and random.random() < 0.01 else 1)), "or random"),
    "own generator": (
        user_module(lambda m, x: m.out(x.flatten(1)) * m.rng.random(), lambda m: setattr(m, "rng", np.random.default_rng(0))),
        "two passes over the same samples differ",
    ),
    "dropout in evaluation": (user_module(lambda m, x: m.out(functional.dropout(x.flatten(1)))), r"evaluation mode differ.*training=self"),
    "seed": (
        user_module(lambda m, x: (torch.manual_seed(0), m.out(functional.dropout(x.flatten(1), 0.5, m.training)))[1]),
        "sets the seed of torch's generator",
    ),
    "mode": (user_module(lambda m, x: _after(m, x, lambda m: m.eval())), "switches between training and evaluation mode"),
    "counter": (
        user_module(lambda m, x: _after(m, x, lambda m: setattr(m, "n", m.n + 1)), lambda m: setattr(m, "n", 0)),
        "'n' counts passes",
    ),
    "counter in a tensor": (
        user_module(lambda m, x: _after(m, x, lambda m: m.n.add_(1)), lambda m: setattr(m, "n", torch.zeros(()))),
        "'n' counts passes",
    ),
    "counter in an object": (
        user_module(lambda m, x: _after(m, x, lambda m: m.n.up()), lambda m: setattr(m, "n", Counter())),
        "'n.number' counts passes",
    ),
    "state": (
        user_module(lambda m, x: _set(m, mean=0.9 * m.mean + x.mean()).out(x.flatten(1) - m.mean), lambda m: setattr(m, "mean", 0.0)),
        "attribute 'mean' changes from pass to pass",
    ),
    "buffer at 33": (user_module(lambda m, x: _counts(m, x, lambda n: n > 30), patched_reset), r"keeps running statistics \(count\)"),
    "buffer at 1": (user_module(lambda m, x: _counts(m, x, lambda n: n == 1), patched_reset), r"keeps running statistics \(count\)"),
    "buffer in evaluation": (user_module(lambda m, x: _counts(m, x, lambda n: not m.training), patched_reset), "keeps running statistics"),
    "batch norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, CLASSES)),
        "layer '1' keeps running statistics",
    ),
    "spectral norm": (lambda: nn.Sequential(nn.Flatten(), parametrizations.spectral_norm(nn.Linear(SIZE, CLASSES))), "running statistics"),
    "new buffer": (user_module(lambda m, x: _after(m, x, lambda m: m.register_buffer("b", torch.ones(1)))), "makes or removes buffer 'b'"),
    "new layer": (user_module(_grow), "makes parameter 'proj"),
    "parameter in place": (
        user_module(lambda m, x: _after(m, x, lambda m: m.out.bias.data.clamp_(-0.01, 0.01))),
        "changes parameter 'out.bias'",
    ),
    "norm in place": (user_module(lambda m, x: _after(m, x, torch.no_grad()(_normed))), "changes parameter 'out.weight' in place"),
    "freezes": (user_module(lambda m, x: _after(m, x, lambda m: m.out.bias.requires_grad_(False))), "freezes parameter 'out.bias'"),
    "complex": (
        user_module(
            lambda m, x: m.out(x.flatten(1)) * m.c.abs(),
            lambda m: setattr(m, "c", nn.Parameter(torch.ones(CLASSES, dtype=torch.complex64))),
        ),
        "parameter 'c' is complex",
    ),
    "shared memory": (
        user_module(lambda m, x: m.out(x.flatten(1)) + m.w, lambda m: setattr(m, "w", nn.Parameter(m.out.bias.data[:]))),
        "'out.bias' and 'w' share memory",
    ),
    "gradient hook": (
        user_module(lambda m, x: m.out(x.flatten(1)), lambda m: m.out.weight.register_hook(lambda g: 2 * g)),
        "parameter 'out.weight' has a hook",
    ),
    "backward hook": (
        user_module(lambda m, x: m.out(x.flatten(1)), lambda m: m.out.register_full_backward_hook(lambda layer, i, o: None)),
        "layer 'out' has a backward hook",
    ),
    "hook in a pass": (
        user_module(lambda m, x: (lambda h: (h.register_hook(lambda g: 2 * g), h)[1])(m.out(x.flatten(1)))),
        "in evaluation mode on a batch of 2",
    ),
    "lock": (user_module(lambda m, x: m.out(x.flatten(1)), lambda m: setattr(m, "lock", threading.Lock())), "cannot be copied"),
    "device": (user_module(lambda m, x: m.out(x.to("meta").flatten(1))), "at layer 'out'"),
    "all frozen": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(SIZE, CLASSES)).requires_grad_(False), "all parameters are frozen"),
    "same module": (lambda: SHARED, "gives parameter '1.weight' of an earlier call again"),
    "unseeded": (
        user_module(
            lambda m, x: m.out(x.flatten(1)), lambda m: m.register_buffer("p", torch.tensor(np.random.default_rng().normal(size=3)))
        ),
        "other values of buffer or frozen parameter 'p'",
    ),
    "no memory": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(SIZE, CLASSES, device="meta")), "has no memory"),
    "layers in a list": (
        user_module(lambda m, x: m.out(m.hidden[0](x.flatten(1))), lambda m: setattr(m, "hidden", [nn.Linear(SIZE, SIZE)])),
        r"tensor of shape \(64, 64\) that needs a gradient and is no parameter of the module \(in attribute 'hidden'\)",
    ),
    "layers in a dict": (
        user_module(lambda m, x: m.out(m.hidden["a"](x.flatten(1))), lambda m: setattr(m, "hidden", {"a": nn.Linear(SIZE, SIZE)})),
        r"no parameter of the module \(in attribute 'hidden'\).*nn.ModuleDict",
    ),
    "a layer in an object": (
        user_module(lambda m, x: m.out(m.hidden.layer(x.flatten(1))), lambda m: setattr(m, "hidden", Holder())),
        r"no parameter of the module \(in attribute 'hidden'\)",
    ),
    "a tensor that needs a gradient": (
        user_module(lambda m, x: m.out(x.flatten(1)) * m.t, lambda m: setattr(m, "t", torch.ones(CLASSES, requires_grad=True))),
        r"shape \(4,\) that needs a gradient and is no parameter of the module \(in attribute 't'\)",
    ),
    "a layer outside": (user_module(lambda m, x: m.out(OUTSIDE(x.flatten(1)))), "it is outside of the module"),
    "replaced call": (CalledInPlace, "changes its input in place, past the copy that it gets: its class replaces __call__"),
    "gradient of the batch": (
        user_module(lambda m, x: m.out(normed(m.first(x.flatten(1)))), lambda m: setattr(m, "first", nn.Linear(SIZE, SIZE))),
        "gradient of parameter 'first.weight' over two samples is not the mean",
    ),
    "counted words": (lambda: Embedded(scale_grad_by_freq=True), "'embed.weight' over two samples is not the mean.*scale_grad_by_freq"),
    "sparse gradient": (lambda: Embedded(sparse=True), "'embed.weight' is in the layout torch.sparse_coo; use sparse=False"),
    "words of a largest norm": (lambda: Embedded(max_norm=0.1), "changes parameter 'embed.weight' in place"),
    "rounded scores": (user_module(lambda m, x: m.out(x.flatten(1)).round()), r"gradients of all its parameters are 0.* round\(\), which"),
    "first batch": (
        user_module(lambda m, x: (m.__dict__.setdefault("mean", x.mean()), m.out(x.flatten(1) - m.mean))[1]),
        "attribute 'mean' is set by the first batch, and scores depend on it",
    ),
    "factory": (_unusable, "its factory fails: ZeroDivisionError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_odd_module_is_refused_in_one_line(name: str) -> None:
    factory, words = REFUSED[name]
    for _ in range(2):  # also when the findings are known
        with pytest.raises(InputError, match=f"(?s)^model 'own': .*{words}") as caught:
            build_module(own_model(factory))
        assert "\n" not in str(caught.value)


# --- modules that work


class Attention(nn.Module):
    """A class token, learned positions, and weights that stay in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, CLASSES)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.layer = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x[:, 0])], dim=1)
        made, self.weights = self.layer(h, h, h)
        return self.head((h + made)[:, 0])  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, kind: Any, frozen: bool = False) -> None:
        super().__init__()
        self.layer, self.head = kind(8, 12, batch_first=True).requires_grad_(not frozen), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, 0])[0][:, -1])  # type: ignore[no-any-return]


class TopExpert(nn.Module):
    """Each sample goes to one expert; an expert without samples has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(SIZE, 3), nn.ModuleList(nn.Linear(SIZE, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        weights = self.gate(x).softmax(1)
        chosen, out = weights.argmax(1), x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            rows = chosen == i
            if rows.any():
                out[rows] = expert(x[rows]) * weights[rows, i : i + 1]
        return out


class Words(nn.Module):
    """Word numbers, with the embedding as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.long()).mean(1)
        return self.out(h) + functional.linear(h, self.embed.weight[:CLASSES])  # type: ignore[no-any-return]


class CachedMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.tril(torch.ones(8, 8))
        h = self.embed(x[:, 0])
        weights = (h @ h.transpose(1, 2)).masked_fill(self.mask == 0, -1e9).softmax(-1)
        return self.head((weights @ h)[:, -1])  # type: ignore[no-any-return]


class Clamped(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-0.5, 0.5))  # type: ignore[no-any-return, no-untyped-call]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def normed(x: Tensor) -> Any:
    return Normed.apply(x)  # type: ignore[no-untyped-call]


def _reversed(x: Tensor) -> Any:
    return Reversed.apply(x)  # type: ignore[no-untyped-call]


def altered(change: Callable[[nn.Sequential], object], *layers: Callable[[], nn.Module]) -> Factory:
    """A factory of Sequentials of layers that are changed afterwards."""

    def factory() -> nn.Module:
        made = nn.Sequential(*(layer() for layer in layers))
        change(made)
        return made

    return factory


def hidden() -> nn.Module:
    return nn.Linear(SIZE, SIZE)


def head() -> nn.Module:
    return nn.Linear(SIZE, CLASSES)


def doubled(layer: Any, given: Any, made: Tensor) -> Tensor:
    return 2 * made


WORKING: dict[str, Factory] = {
    "in place": user_module(lambda m, x: m.out(x.sub_(0.3).div_(0.5).flatten(1))),
    "relu_": user_module(lambda m, x: m.out(torch.relu_(x.sub_(0.3)).flatten(1))),
    "in place by numpy": user_module(lambda m, x: (x.numpy().__imul__(0.5), m.out(x.flatten(1)))[1]),
    "first layer in place": altered(lambda m: None, lambda: nn.Threshold(0.3, 0.0, inplace=True), nn.Flatten, head),
    "unused": user_module(lambda m, x: m.out(x.flatten(1)), lambda m: setattr(m, "aux", nn.Linear(3, 3))),
    "zero size": user_module(
        lambda m, x: m.out(x.flatten(1)) + x.flatten(1)[:, :0] @ m.z, lambda m: setattr(m, "z", nn.Parameter(torch.zeros(0, CLASSES)))
    ),
    "no axis": user_module(lambda m, x: m.out(x.flatten(1)) * m.t, lambda m: setattr(m, "t", nn.Parameter(torch.tensor(2.0)))),
    "transposed": user_module(lambda m, x: x.flatten(1) @ m.w, lambda m: setattr(m, "w", nn.Parameter(torch.randn(CLASSES, SIZE).t()))),
    "half parameters": user_module(lambda m, x: m.out(x.flatten(1)), lambda m: m.half()),
    "double scores": user_module(lambda m, x: m.out(x.flatten(1)).double()),
    "logits in a dict": user_module(lambda m, x: {"logits": m.out(x.flatten(1))}),
    "complex buffer": user_module(
        lambda m, x: m.out((torch.fft.fft(x.flatten(1)) * m.c).real), lambda m: m.register_buffer("c", torch.full((SIZE,), 1j))
    ),
    "keeps the batch": user_module(lambda m, x: _set(m, last=x).out(x.flatten(1))),
    "keeps a history": user_module(lambda m, x: (m.seen.append(x), m.out(x.flatten(1)))[1], lambda m: setattr(m, "seen", [])),
    "branch by value": user_module(lambda m, x: m.out(x.flatten(1)) * (2 if len(x) and x.flatten(1).sum().item() > -1 else 1)),
    "gradient reversed": user_module(lambda m, x: m.out(_reversed(m.first(x.flatten(1)))), lambda m: setattr(m, "first", hidden())),
    "sequential of its own": lambda: Clamped(nn.Flatten(), head()),
    "hook in a sequential": altered(lambda m: m[1].register_forward_hook(doubled), nn.Flatten, hidden, nn.Tanh, head),
    "forward replaced": altered(lambda m: setattr(m[1], "forward", lambda x: x * 2), nn.Flatten, nn.Tanh, head),
    "tied": altered(lambda m: setattr(m[3], "weight", m[1].weight), nn.Flatten, hidden, nn.Tanh, hidden, nn.Tanh, head),
    "frozen layer": altered(lambda m: m[1].requires_grad_(False), nn.Flatten, hidden, nn.ReLU, head),
    "frozen bias": altered(lambda m: setattr(m[1].bias, "requires_grad", False), nn.Flatten, hidden, nn.ReLU, head),
    "frozen batch norm": altered(
        lambda m: m[:2].requires_grad_(False),
        lambda: nn.Conv2d(1, 2, 3),
        lambda: nn.BatchNorm2d(2),
        nn.Flatten,
        lambda: nn.Linear(72, CLASSES),
    ),
    "frozen lstm": lambda: Recurrent(nn.LSTM, frozen=True),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "experts": TopExpert,
    "cached mask": CachedMask,
    "weight norm": lambda: nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(SIZE, 9)), nn.ReLU(), nn.Linear(9, CLASSES)),
    "transformer": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(64, CLASSES)
    ),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(SIZE), nn.GELU(), head()),
    "group norm": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES)),
    "instance norm": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES)),
    "log softmax": lambda: nn.Sequential(nn.Flatten(), head(), nn.LogSoftmax(1)),
}


@pytest.mark.parametrize("name", WORKING)
def test_a_module_works_alike_in_every_way_of_computing_and_leaves_the_samples(name: str) -> None:
    model = own_model(WORKING[name])
    assert model_doubts(model) == ()
    check_agreement(model, client_samples())


@pytest.mark.parametrize("name", ["in place", "relu_", "first layer in place"])
def test_a_pass_in_place_equals_one_on_a_copy(name: str) -> None:
    plain = {
        "in place": user_module(lambda m, x: m.out(x.sub(0.3).div(0.5).flatten(1))),
        "relu_": user_module(lambda m, x: m.out(torch.relu(x - 0.3).flatten(1))),
        "first layer in place": altered(lambda m: None, lambda: nn.Threshold(0.3, 0.0), nn.Flatten, head),
    }
    for a, b in zip(
        computed_parts(own_model(WORKING[name]), client_samples()), computed_parts(own_model(plain[name]), client_samples()), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_nothing_of_a_batch_stays_in_the_module() -> None:
    for name in ("keeps the batch", "keeps a history"):
        model = own_model(WORKING[name])
        module: Any = model.load(model.init(0))
        module(torch.ones(3, *SHAPE))
        assert getattr(module, "last", None) is None
        assert not getattr(module, "seen", [])


def test_word_numbers_reach_an_embedding() -> None:
    check_agreement(own_model(Words, (6,)), client_samples((6,), words=20))


def test_dropout_and_noise_in_training_are_the_same_in_every_way() -> None:
    for module in (
        lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5, inplace=True), head()),
        user_module(lambda m, x: m.out(x.flatten(1) + (torch.randn(len(x), SIZE) if m.training else 0.0))),
    ):
        model = own_model(module)
        assert model_doubts(model) == ()
        check_agreement(model, client_samples())


@pytest.mark.parametrize("normed", ["layer", "functional"])
def test_batch_norm_without_statistics_works_until_a_batch_has_one_sample(normed: str) -> None:
    factory: Factory = lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(SIZE, track_running_stats=False), head())  # noqa: E731
    if normed == "functional":
        factory = user_module(lambda m, x: m.out(functional.batch_norm(x.flatten(1), None, None, training=True)))
    model = own_model(factory)
    assert bool(model_doubts(model)) == (normed == "functional"), "a layer says by itself that samples mix"
    train, start = Train(model, batch_size=4, lr=0.1), model.init(0)
    kinds: tuple[Any, ...] = ("auto", "sequential")
    for kind in kinds:
        for sizes, fails in (((8, 7), False), ((8, 9), True)):
            given = [TaskInput(data, {"model": start}, {}, Streams(0, 0, data.id)) for data in client_samples(sizes=sizes)]
            if not fails:
                Engine(kind).run(train, given)
                continue
            with pytest.raises(InputError, match=r"^model 'own': takes no single sample .*training\.batch_size") as caught:
                Engine(kind).run(train, given)
            assert "\n" not in str(caught.value)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradients[0] * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))


BOUNDED = "bounds them, but the loss takes scores of any size"
DOUBTS: dict[str, tuple[Factory, str]] = {
    "centred": (user_module(lambda m, x: m.out(x.flatten(1) - x.flatten(1).mean(0))), "depend on the other samples of its batch"),
    "mixed in training": (
        user_module(lambda m, x: m.out((0.7 * x + 0.3 * x.flip(0) if m.training else x).flatten(1))), "in training mode"
    ),
    "branch": (
        user_module(lambda m, x: m.out(x.flatten(1)) if x.mean() > 0.3 else m.out(1 - x.flatten(1))),
        "depend on the other samples of its batch",
    ),
    "softmax": (user_module(lambda m, x: m.out(x.flatten(1)).softmax(1)), "probabilities.*remove the softmax"),
    "sigmoid": (user_module(lambda m, x: m.out(x.flatten(1)).sigmoid()), f"out of a sigmoid, which {BOUNDED}"),
    "relu": (lambda: nn.Sequential(nn.Flatten(), head(), nn.ReLU()), f"out of a ReLU, which {BOUNDED}"),
    "tanh and a view": (user_module(lambda m, x: m.out(x.flatten(1)).tanh().view(-1, 2, 2).flatten(1)), f"out of a tanh, which {BOUNDED}"),
    "no input": (user_module(lambda m, x: m.out(torch.ones(len(x), SIZE))), "the same for all samples"),
    "dead": (
        altered(lambda m: nn.init.constant_(dict(m.named_parameters())["1.bias"], -1e3), nn.Flatten, hidden, nn.ReLU, head),
        "its scores and their gradients are the same for all samples",
    ),
    "counter of the class": (WarmingUp, "counts in WarmingUp.passes, outside of the module"),
    "counter of the program": (
        user_module(lambda m, x: (PASSES.__setitem__(0, PASSES[0] + 1), m.out(x.flatten(1)))[1]), "counts in PASSES, outside of the module"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DOUBTS)
def test_what_a_user_should_know_of_a_module_that_works_is_a_doubt(name: str) -> None:
    factory, words = DOUBTS[name]
    model = own_model(factory)
    (doubt,) = model_doubts(model)
    assert "model 'own': " in doubt
    assert re.search(words, doubt)
    check_agreement(model, client_samples(), by_sample="other samples" not in words)


GOOD_ENDS: dict[str, Factory] = {
    "a head of zeros": altered(lambda m: [p.data.zero_() for p in m[3].parameters()], nn.Flatten, hidden, nn.ReLU, head),
    "a temperature": user_module(lambda m, x: 10 * m.out(x.flatten(1)).tanh()),
    "a gate": user_module(lambda m, x: m.out(x.flatten(1)) * m.out(x.flatten(1)).sigmoid()),
    "logarithms of probabilities": user_module(lambda m, x: m.out(x.flatten(1)).log_softmax(1)),
    "a function of its own": user_module(lambda m, x: Swish.apply(m.out(x.flatten(1)))),  # type: ignore[no-untyped-call]
    "frozen layers in a list": user_module(
        lambda m, x: m.out(m.hidden[0](x.flatten(1))), lambda m: setattr(m, "hidden", [hidden().requires_grad_(False)])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD_ENDS)
def test_good_modules_pass_without_a_doubt(name: str) -> None:
    assert model_doubts(own_model(GOOD_ENDS[name])) == ()


# --- frozen parameters


def backbone(frozen: bool = True) -> nn.Module:
    made = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    made[1].requires_grad_(not frozen)
    return made


def test_exactly_the_parameters_with_requires_grad_are_trained_and_exchanged() -> None:
    model = own_model(backbone)
    assert [name for name, _, _ in model.layout] == ["3.weight", "3.bias"]
    assert model.dimension == 7 * CLASSES
    before = {name: value.clone() for name, value in build_module(model).named_buffers()}
    assert before.keys() == {"1.weight", "1.bias"}
    vectors = computed_parts(model, client_samples())
    assert all(vector.shape in ((model.dimension,), ()) for vector in vectors)
    state = model.load(model.init(0)).state_dict()
    assert state.keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_frozen_weights_are_those_of_training_without_them() -> None:
    """As a module whose frozen layer is a constant of its own, trained by torch's optimiser."""
    model, data = own_model(backbone), client_samples()[0]
    start = model.init(0)
    update = Train(model, epochs=3, batch_size=0, lr=0.1).run(TaskInput(data, {"model": start}, {}, Streams(0, 0, 0)))["update"]
    module = backbone()
    module.load_state_dict(model.load(start).state_dict())
    optimiser = torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        functional.cross_entropy(module(torch.tensor(data.x_train)), torch.tensor(data.y_train)).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    trained = np.concatenate([parameter.detach().numpy().ravel() for parameter in module.parameters() if parameter.requires_grad])
    np.testing.assert_allclose(trained - start, update, atol=1e-6)


def test_another_seed_of_the_trained_parameters_leaves_the_frozen_ones() -> None:
    model = own_model(backbone)
    assert not np.array_equal(model.init(0), model.init(1))
    first = model.load(model.init(0)).state_dict()["1.weight"].clone()
    assert torch.equal(first, model.load(model.init(1)).state_dict()["1.weight"])


def test_parties_with_other_frozen_weights_do_not_agree() -> None:
    model = own_model(backbone).with_constants()
    assert len(model.constants) == 32
    assert model.dimension == 7 * CLASSES
    assert build_module(model) is build_module(replace(model, constants="")), "no second module"

    def heavier() -> nn.Module:
        made = backbone()
        dict(made.named_parameters())["1.weight"].data.mul_(2)
        return made

    other = replace(model, factory=heavier)
    with pytest.raises(InputError, match=f"^model 'own': buffers and frozen parameters have digest [0-9a-f]{{32}} here, {model.constants}"):
        build_module(other)
    assert own_model(lambda: backbone(frozen=False)).with_constants().constants == ""
    assert Model("mlp", SHAPE, CLASSES).with_constants().constants == ""


def test_several_first_models_that_would_be_the_same_are_refused() -> None:
    """A factory that reads its weights from a file gives one start; an algorithm with k models could never tell them apart."""

    def fixed() -> nn.Module:
        made = nn.Sequential(nn.Flatten(), head())
        for parameter in made.parameters():
            nn.init.constant_(parameter, 0.1)
        return made

    model = own_model(fixed)
    model.init(0)
    with pytest.raises(InputError, match="gives the same parameters each time"):
        model.init(0, attempt=1)


def test_a_body_that_a_factory_keeps_between_calls_may_be_frozen() -> None:
    kept: list[nn.Module] = []

    def factory() -> nn.Module:
        if not kept:
            kept.append(nn.Linear(SIZE, 6).requires_grad_(False))
        return nn.Sequential(nn.Flatten(), kept[0], nn.Tanh(), nn.Linear(6, CLASSES))

    check_agreement(own_model(factory), client_samples())


# --- cost


def test_the_probe_runs_once_and_takes_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cflpriv.engine.models.MODELS", Registry("model", lambda entry: entry[0]))
    passes: list[int] = []
    factory = user_module(lambda m, x: _after(m, x, lambda m: passes.append(len(x))))
    register_model("counted", lambda model: factory())
    model = Model("counted", SHAPE, CLASSES)
    began = time.perf_counter()
    build_module(model)
    assert time.perf_counter() - began < 2.0, "a second, to be safe on a busy machine; it takes some 20 ms"
    assert {1, 2, 5, 33} <= set(passes)
    count = len(passes)
    assert count < 40
    for _ in range(3):
        build_module.cache_clear()
        build_module(model)
        model.init(1)
    assert len(passes) == count


# --- what can be learned ------------------------------------------------------------------------------------------------------------------


def cosines(x: Tensor, module: Any) -> Any:
    return functional.linear(functional.normalize(x.flatten(1), dim=1), functional.normalize(module.out.weight, dim=1))


DOUBTED: dict[str, tuple[Factory, str]] = {
    "rounded inside": (
        user_module(lambda m, x: m.out(m.first(x.flatten(1)).round()), lambda m: setattr(m, "first", hidden())),
        r"the gradient of 'first.weight', 'first.bias' is 0 behind round\(\)"
    ),
    "a scale": (
        user_module(lambda m, x: m.scale * m.out(x.flatten(1)).detach(), lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1)))),
        r"only 1 of its 261 numbers \('scale'\)"
    ),
    "all frozen but a scale": (
        altered(lambda m: m[:3].requires_grad_(False), nn.Flatten, hidden, head, lambda: nn.PReLU(1)), r"only 1 of its [0-9,]+ numbers"
    ),
    "cosines": (user_module(lambda m, x: cosines(x, m)), "stay within -1 and 1 however large its parameters are"),
}  # fmt: skip
LEARNED: dict[str, Factory] = {
    "straight through": user_module(
        lambda m, x: m.out((h := m.first(x.flatten(1))) + (h.round() - h).detach()), lambda m: setattr(m, "first", hidden())
    ),
    "scaled cosines": user_module(lambda m, x: 16 * cosines(x, m)),
    "cosines with a temperature": user_module(
        lambda m, x: m.temperature * cosines(x, m), lambda m: setattr(m, "temperature", nn.Parameter(torch.tensor(1.0)))
    ),
    "begins at zero": altered(lambda m: [nn.init.zeros_(p) for p in m[3].parameters()], nn.Flatten, hidden, nn.ReLU, head),
    "small scores": altered(lambda m: nn.init.normal_(next(m.parameters()), std=1e-3), nn.Flatten, head),
    "a trained head": altered(lambda m: m[1].requires_grad_(False), nn.Flatten, hidden, nn.ReLU, head),
    "trained offsets": altered(lambda m: m[1].weight.requires_grad_(False), nn.Flatten, lambda: nn.Linear(SIZE, SIZE), nn.Tanh, head),
}  # fmt: skip


@pytest.mark.parametrize("name", DOUBTED)
def test_a_module_of_which_little_can_be_learned_is_named(name: str) -> None:
    factory, words = DOUBTED[name]
    (doubt,) = model_doubts(own_model(factory))
    assert re.search(words, doubt), doubt


@pytest.mark.parametrize("name", LEARNED)
def test_a_module_that_learns_is_not_doubted(name: str) -> None:
    assert model_doubts(own_model(LEARNED[name])) == ()


def test_an_embedding_that_is_too_small_is_named() -> None:
    model = own_model(Words, (6,))
    check_words(model, [client.x_train for client in client_samples((6,), words=20)])
    check_words(own_model(user_module(lambda m, x: m.out(x.flatten(1)))), [np.full((2, *SHAPE), 1e6, np.float32)])
    with pytest.raises(InputError, match=r"word number 2\d: .*'embed' has 20"):
        check_words(model, [client.x_train for client in client_samples((6,), words=30)])
