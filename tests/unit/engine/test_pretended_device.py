"""Training and evaluation on a device that is pretended: placement, waits and captured steps. Nothing is said of a real one."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pretended_device import Event, MixedDevices, NotCaptured, pretended

from cflpriv.algorithms.fedavg import fedavg
from cflpriv.algorithms.ifca.ifca import ifca
from cflpriv.algorithms.shared.choosing import EvaluateLowest
from cflpriv.clustering.similarity import MEASURES, Gram, Measure, angles
from cflpriv.engine import Engine, Streams, Task, TaskInput, device, fast, graphs, step_noise
from cflpriv.engine.clipped_sums import steady
from cflpriv.engine.device import CPU, Device, NoisePlace, in_use, sent, using
from cflpriv.engine.models import Model
from cflpriv.errors import CflprivWarning, InputError, TrainingDiverged
from cflpriv.tasks.evaluation import Evaluate, Losses
from cflpriv.tasks.signatures import PrincipalVectors, principal_vectors
from cflpriv.tasks.training import Gradient, Train
from cflpriv.transports.simulation import simulate
from cflpriv.types import ClientData

MLP = Model("mlp", (1, 8, 8), 10, hidden=8, mean=(0.3,), std=(0.5,), dtype="float64")
LENET = Model("lenet5", (1, 16, 16), 10, dtype="float64")
NOISY: dict[str, Any] = {"clip_norm": 0.5, "sampling_rate": 0.1, "noise_multiplier": 1.0, "public_samples": 40}


class Own(torch.nn.Module):
    """No Sequential: torch's vmap takes it. It has a buffer, which a captured step must find on the device."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x.flatten(1) * self.scale))


class Waits(Own):
    """Makes a tensor of a number of the host, at each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.tensor(2.0, dtype=x.dtype, device=x.device)


OWN = Model("own", (1, 8, 8), 10, dtype="float64", factory=Own)
WAITS = Model("waits", (1, 8, 8), 10, dtype="float64", factory=Waits)


def clients(model: Model, sizes: list[int]) -> list[ClientData]:
    rng = np.random.default_rng(0)
    made = []
    for client, n in enumerate(sizes):
        x, y = rng.random((2 * n, *model.shape)), rng.integers(10, size=2 * n)
        made.append(ClientData(client, x[:n], y[:n], x[n:], y[n:]))
    return made


def inputs(model: Model, sizes: list[int]) -> list[TaskInput]:
    """Clients with a start, and what some options of training need besides."""
    rng, start, features = np.random.default_rng(1), model.init(0), model.layout[-2][1][1]
    more = {"anchor": start + 0.1, "correction": 0.01 * rng.normal(size=len(start)), "prototypes": rng.random((10, features))}
    people = clients(model, sizes)
    return [TaskInput(one, {"model": start} | more, {}, Streams(0, 0, one.id), secret=bytes([one.id]) * 32) for one in people]


def same(task: Task, given: list[TaskInput], tolerance: float = 1e-10, noise: NoisePlace = "auto") -> Any:
    """Assert that the device has the plain loop's results; what was counted there."""
    plain = Engine("sequential").run(task, given)
    with pretended() as counts:
        found = Engine(device="cuda", noise=noise).run(task, given)
    for one, other in zip(plain, found, strict=True):
        for name, value in one.items():
            np.testing.assert_allclose(np.asarray(other[name]), np.asarray(value), rtol=tolerance, atol=tolerance)
    return counts


def test_the_device_refuses_mixed_tensors_and_counts_waits() -> None:
    with pretended() as counts:
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert there.is_cuda
        assert not here.is_cuda
        assert (there * 2 + torch.tensor(1.0)).device.type == "cuda"
        refused: list[Callable[[], object]] = [lambda: there + here, lambda: torch.cat([there, here]), there.numpy]
        for attempt in refused:
            with pytest.raises(MixedDevices):
                attempt()
        assert not counts.waits
        assert float(there.sum()) == 3.0
        assert there.cpu().numpy().tolist() == [1.0, 1.0, 1.0]
        assert here.to("cuda").is_cuda
        assert counts.waits == {"_local_scalar_dense": 1, "to host": 1, "to device": 1}


OPTIONS: list[dict[str, Any]] = [
    {}, {"momentum": 0.5}, {"weight_decay": 0.01}, {"prox": 0.1}, {"maml_lr": 0.05}, {"optimizer": "adam", "lr": 1e-3}, {"pull": 0.7},
    {"frozen": ("1.", "0.", "layer.b")}, {"clip_norm": 0.5}, {"clip_norm": 0.5, "maml_lr": 0.05}, {"sampling_rate": 0.1},
    {"sampling_rate": 0.1, "clip_norm": 0.5, "momentum": 0.5}, NOISY, NOISY | {"maml_lr": 0.05},
    NOISY | {"optimizer": "adam", "lr": 1e-3}, NOISY | {"relation": "replace_one", "prox": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"clip_norm": 0.5}])
def test_convolutions_by_patches_train_alike(options: dict[str, Any]) -> None:
    task, given = Train(LENET, **{"lr": 0.05, **options}, epochs=2, batch_size=4), inputs(LENET, [12, 9, 12])
    plain = Engine().run(task, given)
    with pretended():
        for one, other in zip(plain, Engine(device="cuda").run(task, given), strict=True):
            np.testing.assert_allclose(other["update"], one["update"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [NOISY, NOISY | {"maml_lr": 0.05}, NOISY | {"optimizer": "adam", "lr": 1e-3}])
def test_noise_made_on_the_device_is_the_hosts(options: dict[str, Any]) -> None:
    """From the same secret bits; in replayed steps, and step by step, also with clients that end early."""
    task, given = Train(MLP, **{"lr": 0.05, **options}, epochs=4, batch_size=4), inputs(MLP, [40, 38, 40, 37])
    plain = Engine("sequential").run(task, given)
    there = Engine(noise="device").run(task, given)
    with pretended() as counts:
        replayed = [Engine(device="cuda", noise="device").run(task, given) for _ in range(2)]
    assert counts.captured == 1
    for found in (there, *replayed):
        for one, other in zip(plain, found, strict=True):
            np.testing.assert_allclose(other["update"], one["update"], rtol=1e-9, atol=1e-9)


def test_a_device_without_the_right_keystream_gets_noise_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning, unless the device was asked for by name."""
    task, given = Train(MLP, lr=0.05, epochs=4, batch_size=4, **NOISY), inputs(MLP, [40, 40])
    right = step_noise.keystream_words

    def wrong_there(keys: torch.Tensor, *of_words: Any) -> torch.Tensor:
        words = right(keys, *of_words)
        return words ^ 1 if keys.is_cuda else words

    monkeypatch.setattr(step_noise, "keystream_words", wrong_there)
    with pytest.warns(CflprivWarning, match="not that of ChaCha20"):
        counts = same(task, given)
    assert len(counts.behind) > 1
    with pytest.raises(InputError, match=r"run.noise_place = 'device'.*not that of ChaCha20.*use 'host'"):
        same(task, given, noise="device")


def test_samples_of_many_clients_are_one_copy_and_are_sent_once() -> None:
    task, given = Train(MLP, lr=0.05, epochs=1, batch_size=4), inputs(MLP, [12] * 20)
    with pretended() as counts:
        queued = []
        for _ in range(2):
            before = counts.queued
            Engine(device="cuda").run(task, given)
            queued.append(counts.queued - before)
    assert queued[0] == queued[1] + 2, "samples and labels"


def test_signatures_of_many_clients_are_computed_together() -> None:
    task, given = PrincipalVectors(2), inputs(MLP, [12, 12, 9, 100, 12])
    plain = Engine().run(task, given)
    with pretended() as counts:
        engine = Engine(device="cuda")
        found = engine.run(task, given)
    assert engine.paths == {("PrincipalVectors", "stacked"): 5}
    assert counts.waits["to host"] == counts.waits["to device"] == 3, "one copy each way for each number of samples"
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_allclose(other["signature"], one["signature"], atol=1e-10)


def scenes() -> Iterator[Any]:
    """Every option with every model for which it does not mean the plain loop. Most with LeNet-5 take long."""
    for model in (MLP, LENET, OWN):
        for options in OPTIONS:
            if model is not OWN or not options.keys() & {"pull", "clip_norm"}:
                slow = model is LENET and options not in ({"momentum": 0.5}, {"clip_norm": 0.5})
                name = "-".join([model.name, *(f"{key}={value}" for key, value in options.items())])
                yield pytest.param(model, options, marks=[pytest.mark.slow] if slow else [], id=name)


@pytest.mark.parametrize(("model", "options"), list(scenes()))
def test_training_there_equals_the_plain_loop_by_replayed_steps(model: Model, options: dict[str, Any]) -> None:
    """Every option, and what an algorithm gives besides, in replayed steps alone; a second round, too, with the same buffers.

    Clipping in the plain loop takes long; the CPU's stacked steps are compared with it elsewhere.
    """
    task, given = Train(model, **{"lr": 0.05, **options}, epochs=4, batch_size=4), inputs(model, [40, 38, 40, 37])
    plain = Engine("auto" if "clip_norm" in options else "sequential").run(task, given)
    places: tuple[NoisePlace, ...] = ("host", "device") if "noise_multiplier" in options else ("auto",)
    for place in places:
        steady.cache_clear()
        with pretended() as counts:
            for _ in range(2):
                for one, other in zip(plain, Engine(device="cuda", noise=place).run(task, given), strict=True):
                    np.testing.assert_allclose(other["update"], one["update"], rtol=1e-10, atol=1e-10)
        steps = 40 // (2 if "maml_lr" in options else 1)
        assert counts.captured == 1
        assert counts.replayed == 2 * steps, "none was computed step by step"
        trials = ("clip_norm" in options) + (place == "device")
        assert counts.waits == Counter({"to host": trials} if trials else {}), "once for a trial of blocks, or of keystream"
        results, noise = [at for at in counts.behind if at == 0], [at for at in counts.behind if at]
        assert len(results) == 2, "once a round"
        assert len(noise) == (2 * (steps - 2) if place == "host" else 0), "for the copy of the step before the last"
        assert min(noise, default=3) >= 3, "a step, a copy and a step: the host draws while the device computes"


def test_samples_whose_norm_overflows_are_lost_there_without_a_wait() -> None:
    given = inputs(MLP, [40, 40, 40, 40])
    for one in given[:3]:
        one.data.x_train[one.data.id :: 5] = 1e200
    counts = same(Train(MLP, lr=0.05, epochs=8, batch_size=4, clip_norm=0.5), given)
    assert counts.replayed == 80
    assert set(counts.waits) == {"to host"}


def test_noise_drawn_before_its_memory_was_copied_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device does what is queued as late as it may, so without the events steps would read the noise of later ones."""
    task, given = Train(MLP, lr=0.05, epochs=3, batch_size=4, **NOISY), inputs(MLP, [40, 40])
    same(task, given, noise="host")
    monkeypatch.setattr(Event, "synchronize", lambda event: None)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        same(task, given, noise="host")


def test_a_module_that_makes_the_host_wait_is_trained_step_by_step_with_one_warning() -> None:
    task, given = Train(WAITS, lr=0.05, epochs=8, batch_size=4), inputs(WAITS, [40, 40, 40, 40])
    plain = Engine("sequential").run(task, given)
    with pretended() as counts, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            for one, other in zip(plain, Engine(device="cuda").run(task, given), strict=True):
                np.testing.assert_allclose(other["update"], one["update"], rtol=1e-10, atol=1e-10)
    assert [str(one.message) for one in seen if one.category is CflprivWarning] == [
        "a training step could not be captured as a CUDA graph and runs uncaptured: to device"
    ]
    assert (counts.captured, counts.replayed) == (0, 0)


def test_ragged_clients_are_trained_there_as_in_the_plain_loop() -> None:
    same(Train(MLP, lr=0.05, epochs=2, batch_size=4), inputs(MLP, [3, 17, 9, 30, 1]))
    same(Gradient(MLP), inputs(MLP, [3, 17, 9]))
    for model, options in ((MLP, {"clip_norm": 0.5, "maml_lr": 0.05}), (OWN, {"momentum": 0.5}), (OWN, {"maml_lr": 0.05})):
        counts = same(Train(model, lr=0.05, epochs=6, batch_size=4, **options), inputs(model, [5, 17, 9, 30, 6]))  # type: ignore[arg-type]
        assert counts.captured > 0
        assert counts.waits.total() == ("clip_norm" in options), "for the trial of blocks"


def test_results_are_taken_while_the_next_clients_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven clients, three at a time: what the device has to do for the later ones is queued before the host waits for the first's."""
    monkeypatch.setattr(fast, "MOST_IN_TURN", 3)
    monkeypatch.setattr(graphs, "FEWEST_STEPS", 1)
    given = inputs(MLP, [40, 38, 40, 37, 40, 12, 40])
    given[2:4] = [replace(one, params={**one.params, "model": MLP.init(3)}) for one in given[2:4]]  # two of another cluster
    task = Train(MLP, lr=0.05, epochs=2, batch_size=4)
    waited: list[int] = []
    synchronize = Event.synchronize

    def counted(event: Event) -> None:
        waited.append(event.device.counts.replayed)
        synchronize(event)

    with monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", counted)
        assert not same(task, given).waits
    assert waited[0] == 40, "of two lots of 20 steps"
    assert waited[-1] == 46, "the last lot is one client with 12 samples"
    plain = Engine("sequential").run(task, given)
    monkeypatch.setattr(Event, "synchronize", lambda event: None)
    with pretended():
        try:
            early = [result["update"].copy() for result in Engine(device="cuda").run(task, given)]
        except TrainingDiverged as diverged:  # what was in memory before is read, and happens to be no number
            early, of_client = [], str(diverged)
    if early:
        wrong = [not np.allclose(one, other["update"]) for one, other in zip(early, plain, strict=True)]
        assert wrong.count(True) == 1, "that of the last lot, with nothing behind it, would be read before it is there"
    else:
        assert "client 5" in of_client


def test_pinned_memory_is_taken_while_there_is_room_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = device._Pinned(13000)
    monkeypatch.setattr(device, "_pinned", lambda: pinned)
    monkeypatch.setattr(device, "PINNED_AT_ONCE", 5000)
    values = torch.arange(1500.0, dtype=torch.float64).view(5, 300)  # rows of 2,400 bytes; for two torch takes 8,192, for the last 4,096
    with pretended() as counts:
        rows = device.fetched(sent(values, Device("cuda")))
        assert counts.waits == {"to host": 1}, "the second two rows have no room, the last has"
        assert pinned.room == 13000 - 8192 - 4096
        for row, value in zip(rows(), values, strict=True):
            np.testing.assert_array_equal(row, value)
        kept = rows()[1][1:]
    del rows, row
    gc.collect()
    assert pinned.room == 13000 - 8192, "a part of the first two is still there"
    del kept
    gc.collect()
    assert pinned.room == 13000


def test_what_waits_is_not_captured() -> None:
    with pretended():
        tensor = torch.ones(2, device="cuda")
        with pytest.raises(NotCaptured):
            graphs.capture(lambda: float((tensor * 2).sum()), torch.cuda.Stream())  # type: ignore[no-untyped-call]


def test_a_replayed_function_takes_fewer_rows_and_is_captured_anew_for_more_and_after_many_calls_with_few() -> None:
    numbers = torch.arange(1.0, 11.0)
    nearly = [(2, 2)] * (graphs.FEW_CALLS - 1)
    calls = [(8, 1), (3, 1), (8, 1), (9, 2), *nearly, (3, 2), *nearly, (2, 3), (2, 3), (3, 4)]
    with pretended() as counts:
        there = numbers.to("cuda")
        replayed = graphs.Replayed(lambda x, y: (x * y, x - y), "a function")
        made = []
        for rows, captured in calls:
            made.append(replayed(there[:rows], there[1 : rows + 1]))
            assert counts.captured == captured
        assert counts.replayed == len(calls)
        for (rows, _), (product, difference) in zip(calls, made, strict=True):
            assert product.cpu().tolist() == (numbers[:rows] * numbers[1 : rows + 1]).tolist()
            assert difference.cpu().tolist() == [-1.0] * rows


@pytest.mark.parametrize("model", [MLP, LENET], ids=["mlp", "lenet5"])
def test_evaluation_is_computed_there_with_one_copy_back_a_chunk(model: Model) -> None:
    given = inputs(model, [5, 9, 1, 30])
    assert same(Evaluate(model), given).waits["to host"] == 1
    models = [model.init(seed) for seed in range(3)]
    several = [TaskInput(one.data, {"model": models}, {}, one.streams) for one in given]
    assert same(Losses(model), several).waits["to host"] == 3
    counts = same(EvaluateLowest(Losses(model), Evaluate(model)), several)
    assert counts.waits["to host"] == 4
    assert set(counts.waits) == {"to host", "to device"}


def test_a_module_of_unknown_layers_is_evaluated_there() -> None:
    model = Model(
        "own",
        (1, 8, 8),
        10,
        dtype="float64",
        factory=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.ELU()),
    )
    same(Evaluate(model), inputs(model, [5, 9]))
    same(Losses(model), [TaskInput(one.data, {"model": [model.init(0), model.init(1)]}, {}, one.streams) for one in inputs(model, [5, 9])])


@pytest.mark.parametrize("make", [fedavg, lambda train: ifca(train, k=2)], ids=["fedavg", "ifca"])
def test_rounds_there_end_with_the_model_of_the_cpu(make: Callable[[Train], Any]) -> None:
    train = Train(MLP, lr=0.05, epochs=2, batch_size=4)

    def trained(engine: Engine) -> list[np.ndarray]:
        simulated = simulate(clients(MLP, [12, 12, 12]), engine=engine)
        algorithm, federation = make(train), simulated.federation
        state = algorithm.init(federation)
        for number in range(2):
            federation.begin_round(number)
            state, _ = algorithm.round(federation, state)
        served = algorithm.serve(state).params["model"]
        several = served if isinstance(served, list | tuple) else [served]
        return [simulated.peek(0, one) for one in several]

    plain = trained(Engine("sequential"))
    with pretended() as counts:
        found = trained(Engine(device="cuda"))
    assert counts.queued > 0
    np.testing.assert_allclose(found, plain, rtol=1e-10, atol=1e-10)


def test_the_device_in_use_is_that_of_the_innermost_block_and_of_the_task_that_runs() -> None:
    asked: list[str] = []

    class Asks(PrincipalVectors):
        def run(self, given: TaskInput) -> Any:
            asked.append(in_use().kind)
            return {}

    with pretended():
        with using(Device("cuda")):
            with using(CPU):
                assert in_use() == CPU
            assert in_use().kind == Engine().device == "cuda"
            Engine(device="cpu").run(Asks(), inputs(MLP, [3]))
            Engine("sequential", device="cuda").run(Asks(), inputs(MLP, [3]))
        Engine(device="cuda").run(Asks(), inputs(MLP, [3]))
    assert asked == ["cpu", "cpu", "cuda"]
    assert in_use() == CPU


@pytest.mark.parametrize("samples", [9, 90], ids=["fewer than pixels", "more than pixels"])
def test_signatures_there_are_those_of_the_cpu(samples: int) -> None:
    given = inputs(MLP, [samples, samples + 1])
    counts = same(PrincipalVectors(3), given, 1e-9)
    assert counts.waits["to host"] == 2  # values and vectors at once, of two clients with unequal numbers of samples


@pytest.mark.parametrize("measure", MEASURES)
def test_angles_there_are_those_of_the_cpu_and_vectors_are_sent_once(measure: Measure) -> None:
    rng = np.random.default_rng(0)
    vectors = np.stack([principal_vectors(rng.random((20, 12)), 3) for _ in range(9)])
    here = angles(Gram.of_vectors(range(9), vectors), measure, rows_at_once=4).values
    with pretended() as counts, using(Device("cuda")):
        there = angles(Gram.of_vectors(range(9), vectors), measure, rows_at_once=4).values
    np.testing.assert_allclose(there, here, atol=1e-5)  # near 0 an arccos has half the digits
    assert counts.waits["to device"] == (4 if measure == "smallest_angle" else 1)  # and three blocks of products


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.5}, NOISY | {"public_samples": 20}, pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"momentum": 0.5, "weight_decay": 0.01}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "adam", "lr": 1e-3}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_clients_of_lognormal_sizes_are_replayed_from_the_second_round_on(options: dict[str, Any]) -> None:
    """At least nine steps of ten, for a hundred clients, with other batches in each round; results are those of the CPU in every round."""
    sizes = np.random.default_rng(0).lognormal(np.log(15), 0.8, 100).astype(int) + 1
    first, task = inputs(MLP, sizes.tolist()), Train(MLP, **{"lr": 0.05, **options}, epochs=1, batch_size=5)
    rounds = [[replace(one, streams=Streams(0, at, one.data.id), secret=bytes([at]) + one.secret[1:]) for one in first] for at in range(3)]
    reference = Engine("auto" if "clip_norm" in options else "sequential")
    plain = [np.stack([np.asarray(result["update"]) for result in reference.run(task, given)]) for given in rounds]
    steps: list[int] = []
    real = graphs.Program.step

    def step(program: graphs.Program) -> None:
        steps.append(1)
        real(program)

    with pretended() as counts, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.Program, "step", step)
        for round, given in enumerate(rounds):
            replayed, uncaptured, captured = counts.replayed, len(steps), counts.captured
            found = np.stack([np.asarray(result["update"]) for result in Engine(device="cuda").run(task, given)])
            np.testing.assert_allclose(found, plain[round], rtol=1e-10, atol=1e-10)
            live = len(steps) - uncaptured - (graphs.WARM_UPS + 1) * (counts.captured - captured)
            assert round == 0 or counts.replayed - replayed >= 9 * live
        assert counts.captured <= 3, "programs for three sizes of the stack, made once"
        longest = len(task.batches(max(first, key=lambda one: len(one.data.y_train))))
        assert len(steps) - (graphs.WARM_UPS + 1) * counts.captured + counts.replayed <= 3 * 1.1 * longest
