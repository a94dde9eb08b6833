"""A user's own module becomes a list of operations where `torch.fx` finds known ones alone, and is computed by torch elsewhere."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.models import MODELS, Model, operations_of
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.tasks.training import Train
from cflpriv.types import ClientData

Pass = Callable[["Own", Tensor], Tensor]


class Own(nn.Module):
    """Layers in another order than they are called, and a forward pass of the test's."""

    def __init__(self, called: Pass) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.first = nn.Conv2d(1, 4, 3)
        self.drop = nn.Dropout(0.5)
        self.inplace = nn.ReLU(inplace=True)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self, x)


def model_of(called: Pass, dtype: Any = "float64") -> Model:
    return Model("own", (1, 8, 8), 3, factory=lambda: Own(called), dtype=dtype)


def two_layers(own: Own, x: Tensor) -> Tensor:
    x = functional.relu(functional.max_pool2d(own.first(x), 2))
    return own.norm(own.second(x))  # type: ignore[no-any-return]


def by_methods(own: Own, x: Tensor) -> Tensor:
    return own.head(two_layers(own, x).relu().tanh().sigmoid().view(x.size(0), -1))  # type: ignore[no-any-return]


def residual(own: Own, x: Tensor) -> Tensor:
    x = functional.avg_pool2d(own.first(x), kernel_size=2)
    x = torch.add(x, own.inplace(own.norm(own.second(x))))
    x += torch.tanh(x)
    return own.head(torch.flatten(functional.max_pool2d(torch.sigmoid(x), 3, stride=1, padding=1), 1))  # type: ignore[no-any-return]


def of_features(own: Own, x: Tensor) -> Tensor:
    features = two_layers(own, x).reshape(x.shape[0], -1)
    return own.head(features + features.relu())  # type: ignore[no-any-return]


KNOWN = {"methods": by_methods, "residual": residual, "features": of_features}


def to_scores(own: Own, x: Tensor) -> Tensor:
    return own.head(x.flatten(1))  # type: ignore[no-any-return]


def by_mode(own: Own, x: Tensor) -> Tensor:
    x = two_layers(own, x)
    return to_scores(own, x.relu() if own.training else x.tanh())


def by_gradients(own: Own, x: Tensor) -> Tensor:
    x = two_layers(own, x)
    return to_scores(own, x.relu() if torch.is_grad_enabled() else x.tanh())


def drawing(own: Own, x: Tensor) -> Tensor:
    x = two_layers(own, x)
    return to_scores(own, x.relu() if torch.rand(1).item() < 2 else x)


def detached(own: Own, x: Tensor) -> Tensor:
    with torch.no_grad():
        before = own.first(x)
    return to_scores(own, own.norm(own.second(functional.max_pool2d(before, 2))))


def changed_in_place(own: Own, x: Tensor) -> Tensor:
    x = two_layers(own, x)
    y = own.inplace(x)
    return to_scores(own, x + y)


def changed_view(own: Own, x: Tensor) -> Tensor:
    x = two_layers(own, x)
    own.inplace(x.flatten(1))
    return to_scores(own, x)


def added_in_place(own: Own, x: Tensor) -> Tensor:
    x = two_layers(own, x)
    y = x
    y += x.tanh()
    return to_scores(own, x.sigmoid())


REFUSED: dict[str, Pass] = {
    "dropout": lambda own, x: to_scores(own, own.drop(two_layers(own, x))),
    "twice": lambda own, x: to_scores(own, own.second(two_layers(own, x))),
    "unused": lambda own, x: to_scores(own, functional.max_pool2d(own.first(x), 2)),
    "values": lambda own, x: to_scores(own, two_layers(own, x) if x.sum() > -1 else x),
    "constant": lambda own, x: to_scores(own, torch.mul(two_layers(own, x), own.get_buffer("scale"))),
    "sum of a number": lambda own, x: to_scores(own, two_layers(own, x) + 1),
    "no relu": lambda own, x: to_scores(own, functional.gelu(two_layers(own, x))),
    "mode": by_mode, "gradients": by_gradients, "draws": drawing, "changed": changed_in_place, "changed view": changed_view,
    "unused value": added_in_place,
}  # fmt: skip
UNLIKE: dict[str, Pass] = {"detached": detached}
"""Of known operations by `torch.fx`, and with other results: the trials of both forms find the difference."""


def four_clients(model: Model) -> list[TaskInput]:
    rng, made = np.random.default_rng(0), []
    for i, n in enumerate((5, 7, 3, 4)):
        x, y = rng.random((n, *model.shape)).astype(model.dtype), rng.integers(model.classes, size=n)
        made.append(TaskInput(ClientData(i, x, y, x, y), {"model": model.init(i)}, {}, Streams(1, 2, i), secret=bytes([i]) * 32))
    return made


def ways_that_agree(model: Model) -> set[str]:
    """Equal results with the plain loop; the ways taken."""
    given_to, fast = four_clients(model), Engine()
    private: dict[str, Any] = {"clip_norm": 0.3, "sampling_rate": 0.5, "noise_multiplier": 1.0, "public_samples": 6}
    for task in (
        Train(model, batch_size=3, momentum=0.5),
        Train(model, batch_size=3, clip_norm=0.2),
        Train(model, **private),
        Evaluate(model),
    ):
        for ours, theirs in zip(fast.run(task, given_to), Engine("sequential").run(task, given_to), strict=True):
            for name in theirs:
                np.testing.assert_allclose(np.asarray(ours[name]), np.asarray(theirs[name]), rtol=0, atol=1e-12, err_msg=name)
    return {path for _, path in fast.paths}


@pytest.mark.parametrize("name", KNOWN)
def test_modules_of_known_operations_are_computed_together(name: str) -> None:
    model = model_of(KNOWN[name])
    assert operations_of(model) is not None
    assert ways_that_agree(model) <= {"native", "stacked"}


@pytest.mark.parametrize("name", [*REFUSED, *UNLIKE])
def test_other_modules_are_computed_by_torch_with_equal_results(name: str) -> None:
    called = (REFUSED | UNLIKE)[name]
    if name in REFUSED:
        assert operations_of(model_of(called)) is None
    if name not in ("draws", "dropout"):  # no two ways draw the same
        assert ways_that_agree(model_of(called)) <= {"vmap", "sequential"}


def test_tracing_leaves_the_module_and_the_generators_as_they_are() -> None:
    state, model = torch.get_rng_state(), model_of(drawing)
    operations_of(model)
    assert torch.equal(state, torch.get_rng_state())
    seen: list[Any] = []

    def keeps_input(own: Own, x: Tensor) -> Tensor:
        own.last = x
        seen.append(own)
        return by_methods(own, x)

    model = model_of(keeps_input)
    assert operations_of(model) is not None
    assert not any(isinstance(value, torch.fx.Proxy) for value in vars(seen[0]).values())


def test_the_project_s_own_models_are_lists_of_operations() -> None:
    shapes = {"lstm": (5,)}
    for name in ("linear", "mlp", "lenet5", "cnn", "femnist_cnn", "sigmoid_lenet", "resnet9", "lstm"):
        assert name in MODELS
        found = operations_of(Model(name, shapes.get(name, (3, 32, 32)), 5))
        assert (found is None) == (name == "lstm"), name


def test_a_relu_before_a_pool_comes_behind_it() -> None:
    def kinds(*layers: nn.Module) -> list[str]:
        whole = nn.Sequential(nn.Conv2d(1, 2, 3), *layers, nn.Flatten(), nn.Linear(18, 3))
        module = partial(deepcopy, whole)
        return [operation.kind for operation in operations_of(Model("pooled", (1, 8, 8), 3, factory=module)) or ()]

    pooled = ["convolution", "max_pool", "relu", "flatten", "linear"]
    assert kinds(nn.ReLU(), nn.MaxPool2d(2)) == kinds(nn.Identity(), nn.MaxPool2d(2), nn.ReLU()) == pooled
    assert kinds(nn.Tanh(), nn.MaxPool2d(2)) == ["convolution", "tanh", "max_pool", "flatten", "linear"]
