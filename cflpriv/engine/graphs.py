"""Training steps over fixed buffers, so that a CUDA device can replay one from a graph without a launch of each kernel.

A step of a small network is some eighty kernels, each shorter than its launch. So the batches of a whole phase are sent to the device at
once; a step finds its own by a counter that lives there, and changes parameters, moments and counter in place. It asks the host for nothing
and gives nothing to it, so one captured step, replayed, is an epoch. Captured steps are kept: their buffers take the next chunk, and the
next round, of the same shapes.

Privacy noise is a part of the step, made of keys that the plan has (`step_noise`). Where the host makes it (`run.noise_place`), it is
copied to a buffer that the step reads (`NoiseBuffer`).

Clients with fewer batches than others stay in the stack until only one of `HOLD` has any left, since each size of a stack would need a
program of its own. Their further batches are empty; their parameters after the last batch are kept (`BatchPlan.last`).

Every step may be captured. One is run step by step, over buffers of the same form, while its phases are too short to pay for a capture, and
where the capture fails, which a warning reports. That may happen to a module of one's own under vmap, such as one that makes tensors from
numbers of the host. vmap itself refuses what depends on values, and draws nothing. Without a CUDA device nothing is captured, and
everything else is the same.

Other functions of tensors that are computed again and again, such as an attack's objective, are captured in the same way (`Replayed`).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CflprivWarning
from .device import Device, sent
from .sgd import Batch, Local, Options, Stack, Way, take_step
from .step_noise import keys_of, normals

__all__ = [
    "FEWEST_STEPS", "BatchPlan", "NoiseBuffer", "Program", "Replayed", "capture", "planned_batches", "release_graphs", "steps_by_plan",
]  # fmt: skip

FEWEST_STEPS = 20
"""Steps of the same shapes, over all rounds, before they are captured: a capture costs several steps (and, before torch 2.9 or so, a pass
of Python's collector)."""
WORTH = 2
"""Steps of shapes that were trained before that are captured: round after round they will be the same, and a capture costs about four."""
WARM_UPS = 3
"""Steps before a capture, in which the libraries choose their kernels and take their workspaces."""
HOLD = 4
"""A stack with at least this many times as many clients as still train is reduced to the training clients, to avoid idle computation."""
FEW_CALLS = 50
"""Calls in succession with a `HOLD`-th of the rows or less, after which a function is captured for fewer rows. The number is a guess: a
capture may cost as much as fifty replays."""
KEPT = 6
"""Programs kept, with their buffers: a round's usual chunks and its last, smaller one, each with two cuts to a `HOLD`-th."""

_PROGRAMS: dict[Hashable, "Program"] = {}
_SEEN: Counter[Hashable] = Counter()


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """All batches of a phase, padded to the longest of all: rows and weights as in `Batch`, with a leading axis for the batch's number.

    `numbers` (S,) are the batches' own. `last` (S, C) marks each client's last batch; None where all clients have all batches.
    `keys` (C, 4) are for the noise that steps make (`step_noise.keys_of`); None where they make none.
    """

    rows: Tensor
    weights: Tensor
    numbers: Tensor
    last: Tensor | None = None
    keys: Tensor | None = None


def planned_batches(way: Way, stack: Stack, clients: Sequence[Local], span: range, options: Options, device: Device) -> BatchPlan:
    """The batches numbered `span`, sent to the device in one piece.

    Poisson batches have room for as many samples as they hardly ever exceed, so that the next round's are of the same shape.
    """
    none = np.zeros(0, dtype=np.int64)
    batches = [client.batches[at] if at < len(client.batches) else none for client in clients for at in span]
    sizes = np.array([len(batch) for batch in batches]).reshape(len(clients), len(span))
    longest = max(1, int(sizes.max()), *(client.longest for client in clients))
    inside = np.arange(longest) < sizes[:, :, None]  # (C, S, B)
    rows = np.zeros(inside.shape, dtype=np.int64)
    rows[inside] = np.concatenate(batches)
    rows += stack.offsets[: len(clients), None, None]  # what pads is the client's first sample, with weight 0
    divisors = np.array([[client.expected] for client in clients])
    weights = inside / np.where(divisors > 0, divisors, np.maximum(1, sizes))[:, :, None]
    ordered = rows.transpose(1, 2, 0) if way.images else rows.transpose(1, 0, 2)
    inside_steps = options.deviation > 0 and device.noise == "device"
    return BatchPlan(
        sent(torch.from_numpy(np.ascontiguousarray(ordered)), device),
        sent(torch.from_numpy(np.ascontiguousarray(weights.transpose(1, 0, 2))), device, stack.x.dtype),
        sent(torch.tensor(span), device),
        _last(clients, span, options.stride, device),
        sent(keys_of([client.noise_key for client in clients]), device) if inside_steps else None,
    )


def _last(clients: Sequence[Local], span: range, stride: int, device: Device) -> Tensor | None:
    """Where the clients' last batches of a span are, (S, C) bool; of pairs of batches the second."""
    ends = np.array([len(client.batches) // stride * stride for client in clients]) - 1
    if (ends >= span[-1]).all():
        return None
    return sent(torch.from_numpy(ends[None, :] == np.array(span)[:, None]), device)


class NoiseBuffer:
    """The noise of the next step, made by the host: the buffer `there` (batches, C, d) float64, which the step reads and uses up.

    On a CUDA device it is drawn into one of two pinned buffers in turn and copied by a copy that the host does not wait for. The rule about
    order: copies and steps are on one stream, so a copy begins after the step that read what it overwrites and ends before the one that
    needs it; and a pinned buffer is drawn into again only after the event behind its copy. So the host draws while the device computes, at
    most two steps ahead, and no step waits. Without a device it is drawn into the buffer itself.
    """

    def __init__(self, batches: int, clients: int, dimension: int, deviation: float, device: Device) -> None:
        self.deviation, shape = deviation, (batches, clients, dimension)
        self.there = torch.zeros(shape, dtype=torch.float64, device=device.kind)
        self.turns: list[tuple[Tensor, Any]] = []
        if device.kind == "cuda":
            event: Any = torch.cuda.Event
            self.turns = [(torch.zeros(shape, dtype=torch.float64, pin_memory=True), event()) for _ in range(2)]

    def load(self, clients: Sequence[Local], batches: range) -> None:
        """Draw the noise of the numbered batches and queue its copy. Clients without such batches keep what is there, for no use."""
        if not self.turns:
            self._draw(clients, batches, self.there)
            return
        here, copied = self.turns[0]
        copied.synchronize()
        self._draw(clients, batches, here)
        self.there.copy_(here, non_blocking=True)
        copied.record()
        self.turns.reverse()

    def _draw(self, clients: Sequence[Local], batches: range, out: Tensor) -> None:
        for rows, at in zip(out, batches, strict=True):
            number = torch.tensor([at])
            for row, client in zip(rows, clients, strict=True):
                if at < len(client.batches):
                    row.copy_(normals(keys_of([client.noise_key]), number, len(row), self.deviation)[0])


class Program:
    """The step of a stack, over buffers that stay where they are; `graph` is the captured step, if there is one."""

    def __init__(self, way: Way, stack: Stack, plan: BatchPlan, options: Options, device: Device) -> None:
        self.way, self.stack, self.plan, self.options, self.device = way, stack, plan, options, device
        self.at = torch.zeros(1, dtype=torch.int64, device=stack.x.device)
        # the fused update takes a rate from the device in float32 only; a rate of more digits is a part of the step
        self.rate = torch.tensor(options.lr, device=stack.x.device) if stack.x.dtype == torch.float32 else options.lr
        self.graph: Any = None
        self.steps = len(plan.rows)
        self.ended = [torch.zeros_like(parameter) for parameter in stack.parameters] if plan.last is not None else []
        self.dimension = sum(parameter[0].numel() for parameter in stack.parameters)
        self.noise: NoiseBuffer | None = None
        if options.deviation and plan.keys is None:
            self.noise = NoiseBuffer(options.stride, len(stack.parameters[0]), self.dimension, options.deviation, device)

    def run(self, clients: Sequence[Local], span: range) -> None:
        """The steps on the batches numbered `span`, which are the plan's: replayed, or step by step where none is captured."""
        for at in span[:: self.options.stride]:
            if self.noise is not None:
                self.noise.load(clients, range(at, at + self.options.stride))
            self.step() if self.graph is None else self.graph.replay()

    def step(self) -> None:
        """One step on the next batch, or pair of batches, of the plan."""
        batches, noise = [], [] if self.noise is None else list(self.noise.there)
        for _ in range(self.options.stride):
            batches.append(Batch(self.plan.rows.index_select(0, self.at)[0], self.plan.weights.index_select(0, self.at)[0]))
            if self.plan.keys is not None:
                number = self.plan.numbers.index_select(0, self.at)
                noise.append(normals(self.plan.keys, number, self.dimension, self.options.deviation))
            self.at += 1
        take_step(self.way, self.stack, batches, self.options, self.rate, self.device, noise)
        if self.plan.last is not None:
            last = self.plan.last.index_select(0, self.at - 1)[0]
            for kept, now in zip(self.ended, self.stack.parameters, strict=True):
                torch.where(_column(last, now), now, kept, out=kept)

    def load(self, stack: Stack, plan: BatchPlan, lr: float) -> None:
        """Take a stack's values and a plan of the shapes that this was made for, or fewer samples and batches."""
        for kept, source in zip(_tensors(self.stack, self.plan), _tensors(stack, plan), strict=True):
            kept[: len(source)].copy_(source) if source.dim() else kept.copy_(source)
        self.at.zero_()
        self.steps = len(plan.rows)
        if isinstance(self.rate, Tensor):
            self.rate.fill_(lr)

    def unload(self, stack: Stack) -> None:
        """Give a stack what was trained; it stays in the buffers until the next `load`."""
        stack.parameters, stack.moments, stack.count = self.stack.parameters, self.stack.moments, self.stack.count.clone()
        if self.plan.last is not None:
            done = self.plan.last[: self.steps].any(dim=0)  # behind are those of an earlier plan
            stack.parameters = [torch.where(_column(done, now), kept, now) for kept, now in zip(self.ended, stack.parameters, strict=True)]


def steps_by_plan(way: Way, stack: Stack, clients: Sequence[Local], span: range, options: Options, device: Device) -> None:
    """As `sgd.steps_by_batch`, over fixed buffers; clients may have fewer batches than others."""
    plan = planned_batches(way, stack, clients, span, options, device)
    key = _key(way, stack, plan, options, device)
    if key not in _PROGRAMS:
        pays = len(span) >= WORTH and _SEEN[key] > 0
        _SEEN[key] += len(span)
        if not (pays or _SEEN[key] >= FEWEST_STEPS):
            live = Program(way, stack, plan, options, device)
            live.run(clients, span)
            live.unload(stack)
            return
        if len(_PROGRAMS) == KEPT:  # before memory is taken for one more
            release_graphs()
        _PROGRAMS[key] = _made(way, stack, plan, options, device)
    program = _PROGRAMS[key]
    program.load(stack, plan, options.lr)
    program.run(clients, span)
    program.unload(stack)


def _column(flags: Tensor, like: Tensor) -> Tensor:
    """Flags (C,) to be broadcast over tensors (C, ...)."""
    return flags.view(-1, *[1] * (like.dim() - 1))


def release_graphs() -> None:
    """Give up all captured steps and their buffers; before a step is captured again it has to be seen as often again.

    Their pool goes too: torch refuses to capture into one whose graphs are all gone.
    """
    _PROGRAMS.clear()
    _SEEN.clear()
    _pool.cache_clear()


def capture(step: Callable[[], object], around: Any, pool: Any = None, before: Callable[[], object] = lambda: None) -> Any:
    """The step as a CUDA graph, captured on the stream `around`. `before` is called before each warm-up. The step's buffers hold anything
    after this. Without a `pool` the graph has its own memory for temporary tensors. `RuntimeError` where the step cannot be captured.

    A step that makes the host wait is refused in the last warm-up: a failed capture may leave the process' CUDA context unusable.
    """
    around.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(around):  # around the capture as well, which leaves its stream the current one if it fails
        for number in range(WARM_UPS):
            before()
            with _no_waits() if number == WARM_UPS - 1 else nullcontext():
                step()
        with torch.cuda.graph(graph, pool=pool, stream=around):
            step()
    torch.cuda.current_stream().wait_stream(around)
    return graph


def _captured(name: str, *how: Any, raised: tuple[type[Exception], ...] = ()) -> Any:
    """As `capture`; None, with a warning that begins with `name`, where that fails with another error than those `raised`."""
    try:
        return capture(*how)
    except raised:
        raise
    except RuntimeError as error:  # an operation that this device or this version of torch does not capture
        warnings.warn(f"{name} could not be captured as a CUDA graph and runs uncaptured: {error}", CflprivWarning, stacklevel=3)
        return None


class Replayed:
    """A function of tensors (r, ...) to tensors (r, ...) on a CUDA device, replayed from a graph; itself where it cannot be captured.

    The graph has as many rows as the first call. Fewer rows are computed beside rows of earlier calls, so no row may depend on another. For
    more rows, and for few rows after `FEW_CALLS`, the function is captured anew. Results are copies and have no history. `name` chooses the
    stream and begins the warning of a failed capture: two functions that are in use at the same time need two names.

    The graph has a pool of its own. In the steps' pool another graph would overwrite results, and torch takes a pool no more once its
    graphs are gone.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], name: str) -> None:
        self.function, self.name = function, name
        self.inputs: tuple[Tensor, ...] = ()
        self.results: tuple[Tensor, ...] = ()
        self.graph: Any = None
        self.failed, self.few = False, 0

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rows, room = len(inputs[0]), len(self.inputs[0]) if self.inputs else 0
        self.few = self.few + 1 if rows * HOLD <= room else 0
        if not self.failed and (rows > room or self.few >= FEW_CALLS):
            self._capture(inputs)
        if self.failed:
            return self.function(*inputs)
        for kept, source in zip(self.inputs, inputs, strict=True):
            kept[:rows].copy_(source)
        self.graph.replay()
        return tuple(result[:rows].clone() for result in self.results)

    def _capture(self, inputs: Sequence[Tensor]) -> None:
        self.graph, self.results, self.few = None, (), 0  # the last graph ends before another is captured on its stream
        self.inputs = tuple(tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs)
        self.graph = _captured(self.name, self._step, _stream(self.name))
        self.failed = self.graph is None
        if self.failed:
            self.inputs = self.results = ()

    def _step(self) -> None:
        self.results = self.function(*self.inputs)


@contextmanager
def _no_waits() -> Iterator[None]:
    """While inside, an operation that makes the host wait, as far as torch knows them, raises `RuntimeError`."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@cache
def _stream(user: int | str) -> Any:
    """The stream on which the program of that number among those kept, or the function of that name, is warmed up and captured.

    torch keeps cuBLAS' workspaces by stream. So they are there before the capture, outside its pool, and few. One stream for all programs
    would not do: with a graph some versions free the workspaces of its stream, which another's steps still write to (pytorch#193402).
    """
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@cache
def _pool() -> Any:
    """One memory pool for the temporary tensors of steps: steps run one at a time, and no temporary tensor outlives its step."""
    return torch.cuda.graph_pool_handle()


def _made(way: Way, stack: Stack, plan: BatchPlan, options: Options, device: Device) -> Program:
    """A program with buffers of its own, captured where there is a CUDA device. Samples and batches have room for a few more."""
    samples, batches = _room(len(stack.x)), _room(len(plan.rows))
    own = Stack(
        stack.x.new_zeros(samples, *stack.x.shape[1:]), stack.y.new_zeros(samples), stack.offsets, _zeros(stack.parameters), stack.moving,
        [_zeros(moment) for moment in stack.moments], torch.zeros_like(stack.count), stack.anchors and _zeros(stack.anchors),
        stack.correction and _zeros(stack.correction), None if stack.prototypes is None else torch.zeros_like(stack.prototypes),
    )  # fmt: skip
    room = BatchPlan(
        plan.rows.new_zeros(batches, *plan.rows.shape[1:]), plan.weights.new_zeros(batches, *plan.weights.shape[1:]),
        plan.numbers.new_zeros(batches), None if plan.last is None else plan.last.new_zeros(batches, *plan.last.shape[1:]),
        None if plan.keys is None else torch.zeros_like(plan.keys),
    )  # fmt: skip
    program = Program(way, own, room, options, device)
    if device.kind == "cuda":
        how = (program.step, _stream(len(_PROGRAMS)), _pool(), program.at.zero_)
        program.graph = _captured("a training step", *how, raised=(torch.cuda.OutOfMemoryError,))
    return program


def _zeros(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _tensors(stack: Stack, plan: BatchPlan) -> Iterator[Tensor]:
    """Everything that a step reads or changes, in one order."""
    yield from (stack.x, stack.y, plan.rows, plan.weights, plan.numbers, stack.count, *stack.parameters)
    for moment in stack.moments:
        yield from moment
    yield from (tensor for tensor in (plan.last, plan.keys) if tensor is not None)
    yield from (*(stack.anchors or ()), *(stack.correction or ()), *(() if stack.prototypes is None else (stack.prototypes,)))


def _key(way: Way, stack: Stack, plan: BatchPlan, options: Options, device: Device) -> Hashable:
    """What one captured step serves: the same network, options and shapes, with room for the samples and batches."""
    rated = options if stack.x.dtype == torch.float64 else replace(options, lr=0.0)
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in (stack.x, plan.rows, plan.weights))
    tensors = (*stack.parameters, *(() if stack.prototypes is None else (stack.prototypes,)))
    which = (stack.anchors is not None, stack.correction is not None, plan.last is None)
    more = (*which, stack.x.dtype, _room(len(stack.x)), _room(len(plan.rows)))
    return (way.forward, rated, device, shapes, tuple(tuple(tensor.shape) for tensor in tensors), more)


def _room(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()
