"""Images of single samples from vision transformers: exact for any SGD steps, refused for several samples and without position vectors."""

from typing import Any

import numpy as np
import pytest
import torch
from attack_scenes import case, config
from torch import nn

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.inversion.closed_form import images_from_inputs
from cflpriv.attacks.inversion.patch_positions import image_from_positions, patch_layer
from cflpriv.engine import Streams, TaskInput
from cflpriv.engine.models import MODELS, Model, register_model
from cflpriv.tasks.training import Train
from cflpriv.types import ClientData

SIDE, PATCH, WIDTH = 8, 2, 24
COUNT = (SIDE // PATCH) ** 2


class Vision(nn.Module):
    """A small vision transformer. `embed`: how patches are embedded; `kind` of position vectors; the class's vector first, last or none."""

    def __init__(self, embed: str = "convolution", kind: str = "learned", token: str = "first", norm_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, PATCH, PATCH) if embed == "convolution" else nn.Linear(PATCH**2, WIDTH, bias=embed == "linear")
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, WIDTH)) if token != "none" else None
        self.first = token == "first"
        vectors = 0.1 * torch.randn(1, COUNT + (token != "none"), WIDTH)
        if kind == "learned":
            self.positions = nn.Parameter(vectors)
        elif kind == "fixed":
            self.register_buffer("positions", vectors)
        else:
            self.table = nn.Embedding(vectors.shape[1], WIDTH)
        self.kind = kind
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, batch_first=True, norm_first=norm_first)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.embed, nn.Conv2d):
            rows = self.embed(x).flatten(2).transpose(1, 2)
        else:
            cut = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
            rows = self.embed(cut.reshape(len(x), COUNT, PATCH**2))
        if self.token is not None:
            token = self.token.expand(len(x), -1, -1)
            rows = torch.cat([token, rows] if self.first else [rows, token], dim=1)
        rows = self.layer(rows + (self.table(torch.arange(rows.shape[1])) if self.kind == "embedding" else self.positions))
        return self.head(rows.mean(1) if self.token is None else rows[:, 0 if self.first else -1])  # type: ignore[no-any-return]


def network(dtype: Any = "float64", **options: Any) -> Model:
    name = "_".join(["vision", *map(str, options.values())])
    return Model(name, (1, SIDE, SIDE), 10, mean=(0.3,), std=(0.4,), dtype=dtype, factory=lambda: Vision(**options).train(False))


def update_of(model: Model, x: Any, y: Any, **training: Any) -> Any:
    data = ClientData(0, x, y, x[:0], y[:0])
    given = TaskInput(data, {"model": model.init(0)}, {}, Streams(0, 0, 0))
    return np.asarray(Train(model, **({"epochs": 1, "batch_size": 0, "lr": 0.1} | training)).run(given)["update"], np.float64)


def samples(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(count)
    return rng.random((count, 1, SIDE, SIDE)), rng.integers(0, 10, count)


@pytest.mark.parametrize("training", [{}, {"epochs": 3, "momentum": 0.9}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token": "none"},
        {"token": "none", "norm_first": False},
        {"token": "last"},
        {"embed": "linear", "kind": "embedding"},
        {"embed": "linear without bias"},
    ],
)
def test_one_sample_is_its_update(options: Any, training: Any) -> None:
    model, (x, y) = network(**options), samples(1)
    layer = patch_layer(model)
    assert layer is not None
    image, residual = image_from_positions(layer, update_of(model, x, y, **training))
    assert residual < 1e-6
    np.testing.assert_allclose(images_from_inputs(model, image[None]), x, atol=1e-5)


def test_several_samples_are_refused() -> None:
    model = network()
    layer = patch_layer(model)
    assert layer is not None
    for count in (2, 4):
        assert image_from_positions(layer, update_of(model, *samples(count)))[1] > 1e-3
    assert image_from_positions(layer, np.zeros(model.dimension))[1] == 1


def test_too_few_directions_are_refused() -> None:
    """One query of two heads gives the patches four directions, where no norm stands before the attention."""
    model = network(norm_first=False)
    layer = patch_layer(model)
    assert layer is not None
    assert image_from_positions(layer, update_of(model, *samples(1)))[1] == 1


@pytest.mark.parametrize(
    "model", [network(kind="fixed"), Model("lenet5", (1, 28, 28), 10), Model("mlp", (1, 8, 8), 10), Model("mlp", (9,), 3)]
)
def test_other_networks_have_no_such_layer(model: Model) -> None:
    assert patch_layer(model) is None


def test_the_audit_reads_a_client_of_one_sample() -> None:
    register_model("test_vision", lambda model: Vision())
    try:
        data = {"clients": 4, "samples_per_client": 1, "groups": [list(range(10))]}
        made = config(
            {"name": "fedavg"}, {}, 0, data=data, model={"name": "test_vision"}, training={"rounds": 1, "batch_size": 0, "epochs": 1}
        )
        figures = {cell.metric: cell for cell in ATTACKS["gradient_inversion"].cells(case(made))[0]}
    finally:
        MODELS.pop("test_vision", None)
    figure = figures["image_psnr_db"]
    assert figure.status == "leaks", figure.line()
    assert figure.value is not None
    assert figure.value > 60
    assert "by position vectors" in figure.note
