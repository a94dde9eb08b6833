"""Gradient inversion on a pretended device: the CPU's images, by captured programs, with one wait for each call of the objective."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from pretended_device import Counts, pretended

from cflpriv.attacks.inversion import image_search
from cflpriv.attacks.inversion.image_search import LocalSteps, invert_updates, unroll
from cflpriv.attacks.inversion.lbfgs import _two_loops, minimise
from cflpriv.engine import graphs
from cflpriv.engine.device import Device, using
from cflpriv.engine.models import Model
from cflpriv.errors import CflprivWarning
from cflpriv.types import Array

NET = Model("sigmoid_lenet", (1, 8, 8), 10, dtype="float64")
CUDA, ONCE = Device("cuda"), LocalSteps()


class Waits(torch.nn.Module):
    """Makes a tensor of a number of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.layer(x.flatten(1))) * torch.tensor(2.0, dtype=x.dtype, device=x.device)


def inversion(model: Model, many: int, iterations: int, steps: LocalSteps = ONCE, **options: Any) -> tuple[Array, Array, Counts]:
    """The images that the CPU and the device find, and what the device counted."""
    rng = np.random.default_rng(0)
    x, y, starts = rng.random((many, 1, *model.shape)), rng.integers(0, 10, (many, 1)), np.stack([model.init(i) for i in range(many)])
    updates = unroll(model, steps)(torch.tensor(starts), torch.tensor(x), torch.tensor(y)).detach().numpy()

    def found() -> Array:
        return invert_updates(model, starts, updates, y, steps, np.random.default_rng(1), iterations=iterations, **options)[0]

    here = found()
    with pretended() as counts, using(CUDA):
        return here, found(), counts


@pytest.mark.parametrize("options", [{}, {"distance": "cosine", "total_variation": 1e-3, "steps": LocalSteps(2, 0.1, 0.9, 0.01)}], ids=str)
def test_images_there_are_the_cpus_by_one_captured_objective_and_one_wait_a_call(options: dict[str, Any]) -> None:
    here, there, counts = inversion(NET, 4, 20, **options)
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-8)
    assert counts.captured == 1
    assert counts.replayed >= 21, "the start, and at least once an iteration"
    assert counts.waits.keys() == {"to device", "to host"}
    assert counts.waits["to host"] == counts.replayed + 1, "for values, and once for the images"
    assert counts.waits["to device"] <= 16, "before the search"


def test_what_is_observed_beside_updates_is_captured_with_them() -> None:
    seen = np.random.default_rng(2).random((4, 1))
    here, there, counts = inversion(NET, 4, 20, beside=(lambda theta, images: images.flatten(1).mean(1, keepdim=True), seen))
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-8)
    assert counts.captured == 1


def test_several_blocks_of_rows_are_replayed_from_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_search, "ROWS_THERE", 2)
    here, there, counts = inversion(NET, 5, 20)
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-8)
    assert counts.captured == 1
    assert counts.replayed >= 3 * 20


def test_short_searches_are_not_captured() -> None:
    here, there, counts = inversion(NET, 2, 5)
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-8)
    assert counts.captured == 0


def test_a_network_that_makes_the_host_wait_is_inverted_uncaptured_with_one_warning() -> None:
    model = Model("waits", (1, 8, 8), 10, dtype="float64", factory=Waits)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        here, there, counts = inversion(model, 2, 20)
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-8)
    assert [str(one.message) for one in seen if one.category is CflprivWarning] == [
        "the objective of an inversion could not be captured as a CUDA graph and runs uncaptured: to device"
    ]
    assert (counts.captured, counts.replayed) == (0, 0)


def valleys(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rosenbrock's function, steeper for later rows, which are slower to end."""
    point = x.detach().requires_grad_(True)
    steep = 10 ** (rows / 4)
    values = (steep[:, None] * (point[:, 1:] - point[:, :-1].square()).square() + (1 - point[:, :-1]).square()).sum(1)
    return values.detach(), torch.autograd.grad(values.sum(), point)[0]


def test_directions_of_full_memory_are_captured_and_done_rows_stay_until_few_are_left() -> None:
    start = torch.tensor(np.random.default_rng(0).normal(size=(12, 3)))
    start[3] = 1.0  # done at once
    start[5] = torch.nan
    here, least = minimise(valleys, start, 300, memory=4, tolerance=1e-20)
    with pretended() as counts:
        found, left = minimise(valleys, start.to("cuda"), 300, memory=4, tolerance=1e-20)
        there = found.cpu()
    assert 2 <= counts.captured <= 4, "once, and after each time that a quarter of the rows was left"
    assert counts.replayed > 10
    assert counts.waits.keys() == {"to device", "to host"}
    ended = torch.isfinite(least)
    assert ended.sum() == 11
    assert torch.isnan(left[5])
    assert torch.equal(there[3], start[3])
    np.testing.assert_allclose(there[ended], here[ended], rtol=0, atol=1e-6)
    assert bool((left[ended] <= 1e-18).all())


def test_captured_directions_are_those_of_the_two_loops() -> None:
    """On the way, where other directions would be at other points."""
    start = torch.tensor(np.random.default_rng(1).normal(size=(5, 3)))
    here, _ = minimise(valleys, start, 26, memory=3)
    with pretended() as counts:
        found, _ = minimise(valleys, start.to("cuda"), 26, memory=3)
        there = found.cpu()
    assert (counts.captured, counts.replayed) == (1, 23)
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-9)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_directions_are_those_of_the_matrix_that_the_pairs_make(number: int) -> None:
    """By the update of an inverse Hessian (Nocedal & Wright 2006, formula 6.17), from the oldest pair kept to the newest."""
    rng, memory, n = np.random.default_rng(2), 3, 4
    root = rng.normal(size=(n, n))
    changes = rng.normal(size=(number, n))
    differences = changes @ (root @ root.T + np.eye(n))
    slope, scale = rng.normal(size=n), 0.3
    matrix = scale * np.eye(n)
    pairs = (
        torch.zeros(memory, 1, n, dtype=torch.float64),
        torch.zeros(memory, 1, n, dtype=torch.float64),
        torch.zeros(memory, 1, dtype=torch.float64),
    )
    for at, (s, y) in enumerate(zip(changes, differences, strict=True)):
        weight = 1 / (s @ y)
        pairs[0][at % memory], pairs[1][at % memory], pairs[2][at % memory] = torch.tensor(s), torch.tensor(y), float(weight)
        if at >= number - memory:
            left = np.eye(n) - weight * np.outer(s, y)
            matrix = left @ matrix @ left.T + weight * np.outer(s, s)
    made = _two_loops(pairs)(torch.tensor(slope[None]), torch.tensor([scale], dtype=torch.float64), number, 100)
    np.testing.assert_allclose(made[0], -matrix @ slope, rtol=1e-9, atol=1e-9)


def test_rows_that_are_done_are_not_asked_for_although_they_stay() -> None:
    asked: list[list[int]] = []

    def objective(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked[-1].extend(rows.cpu().tolist())
        return valleys(x, rows)

    start = torch.tensor(np.random.default_rng(0).normal(size=(6, 3)))
    asked.append([])
    _, least = minimise(objective, start, 40, tolerance=0.1)
    with pretended():
        asked.append([])
        _, left = minimise(objective, start.to("cuda"), 40, tolerance=0.1)
    assert sorted(asked[0]) == sorted(asked[1])
    assert len(set(map(asked[0].count, range(6)))) > 1, "rows end at different times"
    np.testing.assert_allclose(left, least, rtol=1e-9)


def test_a_device_that_captures_nothing_gives_the_same_with_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*how: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(graphs, "capture", refused)
    start = torch.tensor(np.random.default_rng(1).normal(size=(5, 3)))
    plain, _ = minimise(valleys, start, 40, memory=4)
    with pretended():
        with pytest.warns(CflprivWarning, match="the direction of L-BFGS could not be captured .*: refused"):
            found, _ = minimise(valleys, start.to("cuda"), 40, memory=4)
        np.testing.assert_allclose(found.cpu(), plain, rtol=0, atol=1e-9)
    with pytest.warns(CflprivWarning, match="the objective of an inversion could not be captured .*: refused"):
        here, there, counts = inversion(NET, 2, 20)
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-8)
    assert counts.replayed == 0


def test_rows_without_a_gradient_stay_where_they_are() -> None:
    """An infinite slope, and one that is not a number, of finite values: no step is taken, and no other row is touched."""

    def objective(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        odd = torch.tensor([torch.inf, torch.nan, 0.0], dtype=x.dtype)[rows]
        return x.square().sum(1), 2 * x + odd[:, None]

    start = torch.ones((3, 2), dtype=torch.float64)
    found, left = minimise(objective, start, 50)
    assert torch.equal(found[:2], start[:2])
    assert left[:2].tolist() == [2.0, 2.0]
    assert float(left[2]) < 1e-12
