"""Steps over fixed buffers, memory, precision: all that a CUDA device needs but the device (see `test_on_gpu`)."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from engine_scenes import CUDA, MODELS, inputs, way_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cflpriv.engine import Device, Engine, Result, TaskInput, convolutions, fast, graphs, memory
from cflpriv.engine.device import CPU, NoisePlace, _switches, arithmetic
from cflpriv.engine.memory import resident_samples
from cflpriv.engine.models import Model, dtype_of
from cflpriv.engine.run import chunks
from cflpriv.engine.sgd import Steps, steps_by_batch, train_stacked
from cflpriv.errors import InputError
from cflpriv.experiments.config.config import parse_config
from cflpriv.tasks.training import Gradient, Train
from cflpriv.types import Array, Parts


def moved(task: Train, given_to: Sequence[TaskInput], steps: Steps, device: Device = CPU) -> list[Array]:
    way = way_of(task.model, len(given_to))
    clients = [task._local(one, *resident_samples(task.model, [one.data], CPU)[0]) for one in given_to]
    held = graphs.HOLD if steps is graphs.steps_by_plan else 1
    return train_stacked(way, clients, task._options, device, steps, held)()


options = st.fixed_dictionaries({
    "epochs": st.integers(2, 3), "batch_size": st.integers(0, 7), "lr": st.floats(0.01, 0.1), "momentum": st.sampled_from([0.0, 0.5]),
    "weight_decay": st.sampled_from([0.0, 0.01]), "prox": st.sampled_from([0.0, 0.1]), "maml_lr": st.sampled_from([0.0, 0.05]),
    "clip_norm": st.sampled_from([0.0, 0.0, 0.5]), "sampling_rate": st.sampled_from([0.0, 0.0, 0.4]),
    "frozen": st.sampled_from([(), ("0.", "1.")]), "adam": st.booleans(), "noise_multiplier": st.sampled_from([0.0, 1.0]),
})  # fmt: skip


@pytest.mark.slow
@given(
    st.sampled_from(list(MODELS)), options, st.lists(st.integers(1, 12), min_size=2, max_size=5), st.booleans(),
    st.sampled_from([0, 10**9]), st.sampled_from(["host", "device"]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_steps_over_fixed_buffers_equal_those_by_batch(
    name: str, chosen: dict[str, Any], sizes: list[int], extra: bool, fewest: int, place: NoisePlace
) -> None:
    """Every option, ragged clients, kept buffers (`fewest` 0) and none, noise made in a step and before it: 1e-12 in float64. Adam's rate
    is small: see `by_adam` in test_engine.py."""
    model = MODELS[name]
    adam = chosen.pop("adam")
    if adam:
        chosen |= {"optimizer": "adam", "momentum": 0.0, "lr": chosen["lr"] / 200}
    if not (chosen["clip_norm"] and chosen["sampling_rate"]):
        chosen |= {"noise_multiplier": 0.0}
    if chosen["noise_multiplier"]:
        chosen |= {"public_samples": 10}
    if chosen["clip_norm"] and name != "linear":
        chosen |= {"frozen": ()}
    if name == "linear":
        chosen |= {"frozen": ()}  # all that it has
    rng = np.random.default_rng(len(sizes))
    vectors = {key: 0.01 * rng.normal(size=model.dimension) for key in ("anchor", "correction")} if extra else {}
    task, given_to = Train(model, **chosen), inputs(model, sizes, **vectors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "FEWEST_STEPS", fewest)
        for _ in range(2):  # the second time, the buffers are there and hold the first's
            fixed = moved(task, given_to, graphs.steps_by_plan, Device(noise=place))
    for ours, theirs in zip(fixed, moved(task, given_to, steps_by_batch), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_fixed_buffers_take_other_clients_rates_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 one program serves every learning rate and any number of samples and batches that it has room for."""
    monkeypatch.setattr(graphs, "FEWEST_STEPS", 0)
    graphs.release_graphs()
    made = Counter[str]()
    real = graphs._made
    monkeypatch.setattr(graphs, "_made", lambda *arguments: made.update(["program"]) or real(*arguments))
    model = Model("lenet5", (1, 16, 16), 3)
    for lr, sizes in [(0.1, [40, 40, 40]), (0.05, [40, 40, 40]), (0.02, [39, 38, 37])]:
        task, given_to = Train(model, batch_size=5, lr=lr, momentum=0.5), inputs(model, sizes, np.float32)
        fixed, plain = moved(task, given_to, graphs.steps_by_plan), moved(task, given_to, steps_by_batch)
        np.testing.assert_allclose(fixed, plain, rtol=0, atol=1e-6)
    assert made["program"] == 1
    for clients in range(2, 1 + graphs.KEPT):
        moved(Train(model, batch_size=5), inputs(model, [10] * clients, np.float32), graphs.steps_by_plan)
    assert len(graphs._PROGRAMS) == graphs.KEPT
    graphs.release_graphs()
    assert not graphs._PROGRAMS


def test_short_phases_are_captured_once_they_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.release_graphs()
    graphs._SEEN.clear()
    monkeypatch.setattr(graphs, "FEWEST_STEPS", 3)
    model = MODELS["lenet5"]
    task, given_to = Train(model, batch_size=15), inputs(model, [15, 15])
    kept = []
    for _ in range(4):
        moved(task, given_to, graphs.steps_by_plan)
        kept.append(len(graphs._PROGRAMS))
    assert kept == [0, 0, 1, 1]  # 1, 2, 3, 4 steps


def test_ragged_clients_are_not_captured_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two phases a round and room for one program: each capture is paid for by as many steps since what was kept was given up."""
    monkeypatch.setattr(graphs, "KEPT", 1)
    monkeypatch.setattr(graphs, "FEWEST_STEPS", 8)
    graphs.release_graphs()
    made = Counter[str]()
    real = graphs._made
    monkeypatch.setattr(graphs, "_made", lambda *arguments: made.update(["program"]) or real(*arguments))
    task, given_to = Train(MODELS["linear"], batch_size=1), inputs(MODELS["linear"], [2, 4, 6, 8, 10])
    for _ in range(16):
        moved(task, given_to, graphs.steps_by_plan)
    assert 2 < made["program"] <= 16 * 10 / 8
    assert len(graphs._PROGRAMS) <= graphs.KEPT


def test_what_is_given_up_is_gone_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device what a cycle holds is memory that nobody gets: plans of uncaptured steps, released programs, released samples."""
    task, given_to = Train(MODELS["mlp"], batch_size=5), inputs(MODELS["mlp"], [15, 15])
    plans: list[weakref.ref[graphs.BatchPlan]] = []
    real = graphs.planned_batches

    def planned(*arguments: Any) -> graphs.BatchPlan:
        plan = real(*arguments)
        plans.append(weakref.ref(plan))
        return plan

    monkeypatch.setattr(graphs, "planned_batches", planned)
    kept = memory.Residents(limit=10**6)
    samples = weakref.ref(kept.get(given_to[0].data, "x", lambda: (torch.zeros(5),))[0])
    assert samples() is not None
    gc.disable()
    try:
        for fewest in (10**9, 0):
            monkeypatch.setattr(graphs, "FEWEST_STEPS", fewest)
            moved(task, given_to, graphs.steps_by_plan)
        program = weakref.ref(next(iter(graphs._PROGRAMS.values())))
        graphs.release_graphs()
        del kept
        assert len(plans) == 2
        assert [plan() for plan in plans] == [None, None]
        assert program() is None
        assert samples() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["private", "vmap"])
def test_noise_and_modules_of_ones_own_over_fixed_buffers(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Model("no stack", (6,), 3, dtype="float64", factory=Odd)
    private = Train(MODELS["lenet5"], clip_norm=1.0, sampling_rate=0.3, noise_multiplier=1.0, public_samples=9)
    task = Train(odd, batch_size=5) if how == "vmap" else private
    monkeypatch.setattr(graphs, "FEWEST_STEPS", 0)
    graphs.release_graphs()
    given_to = inputs(task.model, [9, 7, 12, 10])
    for _ in range(2):
        fixed = moved(task, given_to, graphs.steps_by_plan)
    for ours, theirs in zip(fixed, moved(task, given_to, steps_by_batch), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    assert graphs._PROGRAMS


class Odd(nn.Module):
    """An operation without a stacked form: torch's vmap takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = nn.functional.softsign(self.layer(x))
        return out


def test_features_pulled_to_prototypes_over_fixed_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FEWEST_STEPS", 0)
    model = MODELS["mlp"]
    prototypes = np.random.default_rng(0).random((3, 5))
    prototypes[1] = np.nan
    task, given_to = Train(model, batch_size=3, lr=0.05, pull=0.7), inputs(model, [7, 4, 9], prototypes=prototypes)
    plain = Engine().run(task, given_to)
    monkeypatch.setattr(fast, "steps_by_batch", graphs.steps_by_plan)
    for ours, theirs in zip(Engine().run(task, given_to), plain, strict=True):
        np.testing.assert_allclose(ours["update"], theirs["update"], rtol=0, atol=1e-12)


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def test_live_bytes_are_those_of_tensors_alive_at_once() -> None:
    def call() -> None:
        a = torch.zeros(1000, dtype=torch.float64)
        b = a + 1  # 16 000
        del a
        c = b.view(10, 100)[2:]  # no storage of its own
        d = torch.ones(500, dtype=torch.float64) + c.sum()  # 8 000 + 4 000 + 8, + 4 000
        d.add_(1)

    assert memory.live_bytes(call) == 16_008


@pytest.mark.parametrize(("name", "batch"), [("mlp", 12), ("lenet5", 12), ("cnn", 12), ("lenet5", 100)])
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.5, "prox": 0.1}, {"optimizer": "adam"}, {"clip_norm": 1.0}], ids=str)
def test_the_estimate_holds_for_a_whole_chunk(name: str, batch: int, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk never needs more than was estimated, by either way of its convolutions, nor by both less than half of it.

    What autograd saves for the backward pass is part of both.
    """
    monkeypatch.setattr(graphs, "FEWEST_STEPS", 0)
    graphs.release_graphs()
    model, clients, samples = Model(name, (1, 16, 16), 10, hidden=64), 6, max(batch, 30)
    task = Train(model, batch_size=batch, **extra)
    estimate = clients * memory.client_bytes(way_of(model), model.shape, dtype_of(model.dtype), task._options, batch, samples)
    given_to = inputs(model, [samples] * clients, np.float32)
    most = 0
    for way in convolutions.WAYS:
        with convolutions.only(way):
            most = max(most, memory.live_bytes(lambda: moved(task, given_to, graphs.steps_by_plan)))
    assert 0.5 * estimate <= most <= estimate
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moved(Train(model, batch_size=samples, **extra), given_to, steps_by_batch)
    assert sum(saved.values()) <= memory.live_bytes(lambda: moved(Train(model, batch_size=samples, **extra), given_to, steps_by_batch))


def test_only_networks_without_convolutions_are_stacked_by_64_on_the_cpu() -> None:
    """Tiny convolutional ones are no quicker, and hold several times the activations."""
    small = Model("small", (1, 8, 8), 3, factory=lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)))
    assert fast.chunk_size(small, 4, 20, Train(small)._options, CPU) == 16
    assert fast.chunk_size(MODELS["mlp"], 4, 20, Train(MODELS["mlp"])._options, CPU) == 64


def test_chunks_are_cut_to_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("lenet5", (1, 28, 28), 10)
    task, given_to = Train(model), inputs(model, [20] * 100, np.float32)
    on_cpu = chunks(task, given_to)
    needed = memory.client_bytes(way_of(model), model.shape, torch.float32, task._options, 10, 20)
    for budget, sizes in [(40 * needed, [40, 40, 20]), (10**12, [100]), (needed // 2, [1] * 100)]:
        monkeypatch.setattr(fast, "chunk_budget", lambda budget=budget: budget)
        assert [len(piece) for piece in chunks(task, given_to, device=CUDA)] == sizes
        assert chunks(task, given_to) == on_cpu
    monkeypatch.setattr(fast, "chunk_budget", lambda: 10**12)
    assert Gradient(model).chunk_size(given_to[0], CUDA) == fast.LARGEST_ON_CUDA
    assert Train(model, sampling_rate=0.9).chunk_size(given_to[0], CUDA) == fast.LARGEST_ON_CUDA
    for rate in (0.2, 0.1):  # one estimate, whatever the round's rate
        before = memory._trial.cache_info().misses
        assert Train(model, lr=rate, momentum=0.3).chunk_size(given_to[0], CUDA) == fast.LARGEST_ON_CUDA
        assert (memory._trial.cache_info().misses > before) == (rate == 0.2)
    assert Train(model, pull=0.5).chunk_size(given_to[0], CUDA) == fast.LARGEST_ON_CUDA
    odd = Model("no stack", (6,), 3, factory=Odd)
    assert Train(odd).chunk_size(inputs(odd, [5])[0], CUDA) == fast.LARGEST_ON_CUDA
    assert Train(odd, clip_norm=1.0).chunk_size(inputs(odd, [5])[0], CUDA) <= fast.MOST_STACKED  # the plain loop
    lstm = Model("lstm", (3,), 4, hidden=4)
    assert Train(lstm).chunk_size(inputs(lstm, [5])[0], CUDA) == Train(lstm).chunk_size(inputs(lstm, [5])[0], CPU)


def test_samples_stay_with_their_owner_while_there_is_room() -> None:
    class Owner:
        pass

    kept, asked = memory.Residents(limit=100), Counter[str]()

    def make(name: str, size: int) -> Callable[[], tuple[Tensor, ...]]:
        def made() -> tuple[Tensor, ...]:
            asked[name] += 1
            return (torch.zeros(size, dtype=torch.uint8),)

        return made

    first, second, third = Owner(), Owner(), Owner()
    for _ in range(2):
        for owner, name, size in ((first, "first", 60), (second, "second", 50), (third, "third", 40)):
            kept.get(owner, "x", make(name, size))
    assert asked == {"first": 1, "second": 2, "third": 1}
    assert kept.used == 100
    kept.get(first, "other", make("first", 1))
    assert asked["first"] == 2
    del first, owner
    gc.collect()
    assert kept.used == 40
    kept.get(second, "x", make("second", 50))
    assert kept.used == 90


@dataclass(frozen=True)
class Hungry:
    """Takes at most `most` clients at once, and then says what a device without memory says."""

    most: int
    parts: ClassVar[Parts] = {"id": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        return {"id": given.data.id}

    def cost(self, given: TaskInput) -> int:
        return 1

    def chunk_size(self, given: TaskInput, device: Device) -> int:
        return 8

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        if len(inputs) > self.most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (injected)")
        return [self.run(given) for given in inputs], "hungry"


def test_a_device_out_of_memory_gets_the_chunk_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    released = Counter[str]()
    monkeypatch.setattr(graphs, "release_graphs", lambda: released.update(["programs"]))
    given_to = inputs(MODELS["linear"], [3] * 11)
    engine = Engine()
    assert [result["id"] for result in engine.run(Hungry(2), given_to)] == list(range(11))
    assert engine.paths == {("Hungry", "hungry"): 11}
    assert released["programs"] == 5  # chunks of 6 and 5: 6 → 3 + 3, 3 → 1 + 2 twice; 5 → 2 + 3, 3 → 1 + 2
    with pytest.raises(torch.cuda.OutOfMemoryError, match="injected"):
        Engine().run(Hungry(0), given_to)


# --- precision ------------------------------------------------------------------------------------------------------------------------


def test_a_forward_pass_in_bf16_leaves_the_rest_in_float32() -> None:
    """On the CPU, where torch has bfloat16 too. A gradient of noise, a small sum of large terms, differs by more than bfloat16's 2⁻⁸."""
    model = Model("lenet5", (1, 16, 16), 3)
    task, given_to = Train(model, batch_size=0, lr=0.1), inputs(model, [20, 15, 20], np.float32)
    full = moved(task, given_to, graphs.steps_by_plan)
    rough = moved(task, given_to, graphs.steps_by_plan, Device("cpu", "bf16"))
    for ours, theirs in zip(rough, full, strict=True):
        assert ours.dtype == np.float32
        apart = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert 1e-4 < apart < 0.2  # above what float32 could explain, so it was bfloat16


@pytest.mark.parametrize("older", [True, False])
def test_the_switches_of_torch_are_left_as_they_were(older: bool) -> None:
    """Whichever of its two names for them was used before; torch refuses to read the one after the other."""
    places, name, rough, exact = _switches()
    at_first = [getattr(place, name) for place in places]
    try:
        if older:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        else:
            setattr(places[0], name, rough)
            setattr(places[1], name, exact)
        before = [getattr(place, name) for place in places]
        for precision, value in (("full", exact), ("bf16", exact), ("tf32", rough)):
            with arithmetic(Device("cuda", precision)):  # type: ignore[arg-type]
                assert [getattr(place, name) for place in places] == [value] * len(places)
            assert [getattr(place, name) for place in places] == before
        if older:
            assert torch.backends.cuda.matmul.allow_tf32
            assert torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
        for place, value in zip(places, at_first, strict=True):
            setattr(place, name, value)


def test_buffers_of_a_vectorised_module_follow_its_input() -> None:
    """Seen with torch's meta device, which computes nothing and refuses to meet another."""

    class Scaled(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.scale: Tensor
            self.register_buffer("scale", torch.arange(1.0, 4.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    way = way_of(Model("scaled", (6,), 3, factory=Scaled))
    assert way.name == "vmap"
    elsewhere = [torch.zeros((4, *shape), device="meta") for shape in way.layout.shapes]
    assert way.forward(torch.zeros((4, 2, 6), device="meta"), elsewhere, 4).shape == (4, 2, 3)


def test_precisions_that_cannot_be_are_refused_by_name() -> None:
    for arguments, words in [
        ({"precision": "half"}, "'half': expected 'full', 'tf32' or 'bf16'"),
        ({"precision": "tf32"}, "'tf32': on the CPU"), ({"precision": "bf16"}, "'bf16'"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=words):
            Engine(**arguments)  # type: ignore[arg-type]
    clipped = Train(Model("lenet5", (1, 16, 16), 3), batch_size=5, clip_norm=1.0)
    for task, words in [(clipped, "clip_norm = 1.0"), (Train(MODELS["mlp"]), "float64")]:
        with pytest.raises(InputError, match=words):
            task.run_many(inputs(task.model, [4, 4]), Device("cpu", "bf16"))
    sample = {"unit": "sample", "epsilon": 2.0, "delta": 1e-3, "samples": 40}
    trees: list[tuple[dict[str, Any], str]] = [
        ({"run": {"precision": "tf32"}, "model": {"dtype": "float64"}}, "float64"),
        ({"run": {"precision": "bf16"}, "privacy": sample, "training": {"weights": "equal"}}, "clip norm"),
    ]
    for tree, words in trees:
        with pytest.raises(InputError, match=words):
            parse_config(tree)
