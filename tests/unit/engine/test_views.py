"""Views of images: a sample's gradient is the mean over its views, taken before it is clipped, in every way of computing."""

import numpy as np
import pytest
import torch

from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.compute import Kind
from cflpriv.engine.models import Model
from cflpriv.engine.sample_gradients import sample_gradients
from cflpriv.engine.views import VIEWS, as_views, views_in, with_views
from cflpriv.errors import InputError
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData

MODELS = [Model("linear", (2, 8, 8), 4), Model("mlp", (1, 8, 9), 3, hidden=11), Model("lenet5", (1, 16, 16), 3)]
KINDS: tuple[Kind, ...] = ("auto", "torch", "sequential")
NAMES = [("flip",), ("shift",), ("flip", "shift")]


def clients_of(model: Model, sizes: tuple[int, ...]) -> list[TaskInput]:
    rng, made = np.random.default_rng(0), []
    for client, size in enumerate(sizes):
        x, y = rng.random((size, *model.shape)).astype(np.float32), rng.integers(0, model.classes, size)
        data = ClientData(client, x, y, x[:0], y[:0])
        made.append(TaskInput(data, {"model": model.init(1)}, {}, Streams(0, 0, client), secret=bytes(32)))
    return made


def mean_gradients(model: Model, task_input: TaskInput, names: tuple[str, ...]) -> Array:
    """The mean over views of each sample's gradient (n, d) float64, view by view."""
    data, views = task_input.data, as_views(torch.from_numpy(task_input.data.x_train)[None], names)[0].numpy()
    rows = []
    for place in range(views.shape[1]):
        one = ClientData(0, np.ascontiguousarray(views[:, place]), data.y_train, data.x_test, data.y_test)
        rows.append(np.concatenate([block.double().numpy() for block in sample_gradients(model, task_input.array("model"), one)]))
    return np.asarray(np.mean(rows, axis=0))


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_gradient_of_a_sample_is_the_mean_over_its_views(model: Model, kind: Kind, names: tuple[str, ...]) -> None:
    """Without clipping over the batch, and with clipping the mean over views is clipped, not each view."""
    for clip in (0.0, 0.7):
        inputs = clients_of(model, (5, 3, 5))
        task = Train(model, batch_size=0, lr=1.0, clip_norm=clip, augment=names)
        for task_input, result in zip(inputs, Engine(kind).run(task, inputs), strict=True):
            rows = mean_gradients(model, task_input, names)
            factors = np.minimum(1, clip / np.linalg.norm(rows, axis=1)) if clip else np.ones(len(rows))
            assert not clip or factors.min() < 0.9
            np.testing.assert_allclose(-np.asarray(result["update"]), factors @ rows / len(rows), atol=3e-6)


def test_views_are_the_image_and_its_changes() -> None:
    x = torch.arange(2 * 3 * 64, dtype=torch.float32).view(2, 3, 1, 8, 8)
    assert [views_in(names) for names in NAMES] == [2, 5, 10]
    views = as_views(x, ("flip", "shift"))
    assert views.shape == (2, 3, 10, 1, 8, 8)
    assert torch.equal(views[:, :, 0], x)
    assert torch.equal(views[:, :, 1], x.flip(-1))
    moved_down = [view for view in views.unbind(2) if torch.equal(view[..., 2:, :], x[..., :-2, :])]
    assert len(moved_down) == 1
    assert torch.equal(moved_down[0][..., :2, :], x[..., :1, :].expand(2, 3, 1, 2, 8))
    assert len({tuple(view.flatten().tolist()) for view in views.unbind(2)}) == 10
    assert set(VIEWS) == {"flip", "shift"}


@pytest.mark.parametrize("images", [True, False])
def test_rows_are_neighbours_of_one_sample_and_have_its_label(images: bool) -> None:
    x, y = torch.rand((3, 2, 1, 8, 8)), torch.tensor([[0, 1, 2], [3, 4, 5]])  # images: (batch, clients)
    rows, labels = with_views(x if images else x.transpose(0, 1), y, ("flip",), images)
    first = rows.transpose(0, 1) if images else rows
    assert labels.tolist() == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]
    assert torch.equal(first[:, 0::2], x.transpose(0, 1))
    assert torch.equal(first[:, 1::2], x.transpose(0, 1).flip(-1))


@pytest.mark.parametrize("shape", [(60,), (1, 1, 43), (1, 7, 9)])
def test_what_is_no_image_has_none(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"training\.augment = \['flip'\]: views are of images of at least 8×8"):
        Train(Model("linear", shape, 2), augment=("flip",))
