"""What only a CUDA device shows. `make gpu` runs this file; it needs pytest, torch and numpy."""

import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from engine_scenes import CUDA, EXTRAS, MODELS, TOLERANCES, differences, inputs, way_of

from cflpriv.attacks.inversion.image_search import LocalSteps, invert_updates, unroll
from cflpriv.engine import Engine, fast, graphs, memory, step_noise
from cflpriv.engine.device import Device, using
from cflpriv.engine.models import Model
from cflpriv.errors import CflprivWarning
from cflpriv.tasks.training import Train


def on_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_a_device_equals_the_plain_loop(name: str, extra: dict[str, Any]) -> None:
    on_device()
    for dtype, apart in differences(name, extra, "cuda").items():
        assert apart <= TOLERANCES[dtype], dtype


@pytest.mark.gpu
def test_a_replayed_graph_is_the_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device()
    model = Model("lenet5", (1, 28, 28), 10)
    given_to = inputs(model, [100] * 12, np.float32)
    task = Train(model, epochs=2, lr=0.05, momentum=0.5)
    updates = []
    for fewest in (10**9, 0):
        monkeypatch.setattr(graphs, "FEWEST_STEPS", fewest)
        updates.append(np.stack([result["update"] for result in Engine(device="cuda").run(task, given_to)]))
    assert graphs._PROGRAMS
    np.testing.assert_allclose(updates[0], updates[1], rtol=0, atol=1e-5)


class Own(torch.nn.Module):
    """An operation without a stacked form: torch's vmap takes it."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.layer, self.waits = torch.nn.Linear(16, 3), waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.nn.functional.softsign(self.layer(x.flatten(1)))
        return out * torch.tensor(2.0, dtype=x.dtype, device=x.device) if self.waits else out


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [False, True])
def test_a_module_of_ones_own_is_captured_unless_it_makes_the_host_wait(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does is refused before the capture begins; it is trained step by step, and captures of others go on."""
    on_device()
    monkeypatch.setattr(graphs, "FEWEST_STEPS", 0)
    graphs.release_graphs()
    model = Model("own", (1, 4, 4), 3, dtype="float64", factory=lambda: Own(waits))
    task, given_to = Train(model, epochs=3, batch_size=4, lr=0.05), inputs(model, [21, 14, 20, 9])
    plain = Engine("sequential").run(task, given_to)
    with pytest.warns(CflprivWarning, match="could not be captured") if waits else nullcontext():
        found = Engine(device="cuda").run(task, given_to)
    for ours, theirs in zip(found, plain, strict=True):
        np.testing.assert_allclose(ours["update"], theirs["update"], rtol=0, atol=1e-10)
    assert all((program.graph is None) == waits for program in graphs._PROGRAMS.values())
    other = Train(MODELS["mlp"], epochs=3, batch_size=4)
    graphs.release_graphs()
    Engine(device="cuda").run(other, inputs(other.model, [21, 14, 20, 9]))
    assert all(program.graph is not None for program in graphs._PROGRAMS.values())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 300])
def test_inverted_images_there_are_those_of_the_cpu_and_all_is_captured(rows: int) -> None:
    """Few iterations, before rounding has grown; then many, in which the directions are captured too, and the images come out."""
    on_device()
    model, rng, steps = Model("sigmoid_lenet", (1, 8, 8), 10, dtype="float64"), np.random.default_rng(0), LocalSteps()
    x, y, starts = rng.random((rows, 1, *model.shape)), rng.integers(0, 10, (rows, 1)), np.stack([model.init(i) for i in range(rows)])
    updates = unroll(model, steps)(torch.tensor(starts), torch.tensor(x), torch.tensor(y)).detach().numpy()

    def inverted(device: Device, iterations: int) -> Any:
        with using(device), warnings.catch_warnings():
            warnings.simplefilter("error", CflprivWarning)
            return invert_updates(model, starts, updates, y, steps, np.random.default_rng(1), iterations=iterations)

    here, there = (inverted(device, graphs.FEWEST_STEPS)[0] for device in (Device(), CUDA))
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-8)
    images, left = inverted(CUDA, 150)
    assert left.max() < 1e-20
    np.testing.assert_allclose(images, x, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("clients", "count"), [(1, 1), (2, 7), (3, 8), (5, 1000), (300, 44_426), (1000, 16_384)])
def test_a_device_makes_the_words_and_normals_of_the_host(clients: int, count: int) -> None:
    """Words bit for bit, for several batch numbers, streams and beginnings; normals to the last digits of Φ⁻¹."""
    on_device()
    keys = step_noise.keys_of([np.random.default_rng(client).bytes(32) for client in range(clients)])
    for number, stream, first in ((0, 0, 0), (1, 1, 8), ((5 << 32) + 7, 2**31 - 1, 1 << 20), (2**63 - 1, 0, 8 * (2**32 - 200_000))):
        batch = torch.tensor([number])
        there = step_noise.keystream_words(keys.cuda(), batch.cuda(), stream, first, count)
        assert torch.equal(there.cpu(), step_noise.keystream_words(keys, batch, stream, first, count))
    assert step_noise._fault("cuda") == ""
    there, here = (step_noise.normals(keys.to(kind), torch.tensor([3], device=kind), count, 2.0).cpu() for kind in ("cuda", "cpu"))
    np.testing.assert_allclose(there.numpy(), here.numpy(), rtol=1e-13, atol=1e-15)


@pytest.mark.gpu
def test_a_replayed_graph_makes_the_noise_of_the_batch_number_in_its_buffer() -> None:
    on_device()
    keys, number = step_noise.keys_of([bytes([client]) * 32 for client in range(20)]), torch.zeros(1, dtype=torch.int64, device="cuda")
    there, around, graph = keys.cuda(), torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    around.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(around):
        step_noise.normals(there, number, 20_000, 1.0)
        with graphs._no_waits():
            step_noise.normals(there, number, 20_000, 1.0)
        with torch.cuda.graph(graph, stream=around):
            words, noise = step_noise.keystream_words(there, number, 0, 0, 20_000), step_noise.normals(there, number, 20_000, 1.0)
    torch.cuda.current_stream().wait_stream(around)
    for batch in (0, 1, 2**40, 1):
        number.fill_(batch)
        graph.replay()
        here = torch.tensor([batch])
        assert torch.equal(words.cpu(), step_noise.keystream_words(keys, here, 0, 0, 20_000))
        np.testing.assert_allclose(noise.cpu().numpy(), step_noise.normals(keys, here, 20_000, 1.0).numpy(), rtol=1e-13, atol=1e-15)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "most"), [("tf32", 1e-2), ("bf16", 1e-1)])
def test_rough_precisions_are_near(precision: Any, most: float) -> None:
    """Of a smooth network. On a CPU, factors rounded to ten bits move its updates by up to 0.002, to seven by up to 0.03; where maxima and
    kinks may choose otherwise, as in LeNet-5, either moves them by 0.1.
    """
    on_device()
    model = Model("sigmoid_lenet", (1, 28, 28), 10)
    task, given_to = Train(model, lr=0.05, momentum=0.5), inputs(model, [200] * 6, np.float32)
    full, rough = Engine(device="cuda").run(task, given_to), Engine(device="cuda", precision=precision).run(task, given_to)
    for a, b in zip(full, rough, strict=True):
        assert 1e-5 < np.linalg.norm(a["update"] - b["update"]) / np.linalg.norm(a["update"]) <= most


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lenet5", "mlp", "cnn"])
def test_a_device_needs_no_more_than_estimated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the allocator handed out for one captured chunk, samples included, and three workspaces of cuBLAS, of 32 MiB at most."""
    on_device()
    monkeypatch.setattr(graphs, "FEWEST_STEPS", 0)
    graphs.release_graphs()
    memory.release_samples()
    torch.cuda.empty_cache()
    model, clients, samples = Model(name, (1, 28, 28), 10), 256, 100
    task, given_to = Train(model, momentum=0.5), inputs(model, [samples] * clients, np.float32)
    needed = clients * memory.client_bytes(way_of(model), model.shape, torch.float32, task._options, 10, samples)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    task.run_many(given_to, CUDA)
    assert torch.cuda.max_memory_allocated() - before <= needed + 3 * 2**25


@pytest.mark.gpu
def test_a_device_really_out_of_memory_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cap on what torch may take, set below what all clients need together."""
    on_device()
    model = Model("mlp", (1, 28, 28), 10, hidden=1000)
    task, given_to = Train(model, lr=0.05), inputs(model, [20] * 128, np.float32)  # 1.2 GB at least
    plain = Engine("sequential").run(task, given_to)
    graphs.release_graphs()
    memory.release_samples()
    torch.cuda.empty_cache()
    monkeypatch.setattr(fast, "chunk_budget", lambda: 10**12)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**28) / total))
    try:
        results = Engine(device="cuda").run(task, given_to)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for ours, theirs in zip(results, plain, strict=True):
        np.testing.assert_allclose(ours["update"], theirs["update"], rtol=0, atol=1e-4)
