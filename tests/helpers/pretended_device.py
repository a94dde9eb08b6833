"""A CUDA device that is not there: real tensors of the CPU, of which some count as being on the device.

While `pretended()` is active, `device="cuda"` is accepted, and what is made or sent there is marked by its storage. Then

- an operation on tensors of both sides raises `MixedDevices` (single numbers and copies may cross, as in torch), as does `.numpy()`;
- what makes the host wait for the device is counted, by name, in `Counts.waits`, and raises `NotCaptured` during a capture;
- a captured step is recorded, operation by operation, and replayed on the same tensors, as a CUDA graph replays it;
- replays, and copies from or to pinned memory that need not be waited for, are done as late as may be: at the next wait, operation or
  event that needs them. Pinned memory that is written to, or read, before its copy is done gives wrong results.

It shows where tensors are, how often the host waits, and which buffers are reused. It shows nothing of kernels, several
streams or speed.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cflpriv.engine import fast, graphs, memory, step_noise

__all__ = ["Counts", "Event", "MixedDevices", "NotCaptured", "pretended"]

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
"""Operations whose result the host needs."""


class MixedDevices(RuntimeError):
    """An operation on tensors of the host and of the device."""


class NotCaptured(RuntimeError):
    """What a CUDA graph cannot hold."""


@dataclass
class Counts:
    """`waits` by name ("to device", "to host", an operation), and copies that nobody waits for (`queued`).

    `captured` and `replayed` count steps. `behind`: how much the device had still to do, each time that an event had been waited for.
    """

    waits: Counter[str] = field(default_factory=Counter)
    behind: list[int] = field(default_factory=list)
    queued: int = 0
    captured: int = 0
    replayed: int = 0


@dataclass
class _Device:
    """The storages on the device and the pinned ones, kept so that no address is used twice, and the recording under way.

    `late` is what the device has not done yet, of `queued` things in all. While `refusing`, a wait is an error.
    """

    counts: Counts = field(default_factory=Counts)
    storages: dict[int, Any] = field(default_factory=dict)
    pinned: dict[int, Any] = field(default_factory=dict)
    recording: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] | None = None
    refusing: bool = False
    late: deque[Callable[[], object]] = field(default_factory=deque)
    queued: int = 0

    def holds(self, tensor: Tensor) -> bool:
        return _storage(tensor)._cdata in self.storages

    def pins(self, tensor: Tensor) -> Tensor:
        self.pinned[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    def queue(self, what: Callable[[], object]) -> None:
        self.late.append(what)
        self.queued += 1

    def finish(self, until: int | None = None) -> None:
        """Do what was queued, all of it or the first so many."""
        while self.late and (until is None or self.queued - len(self.late) < until):
            with _unseen(), torch.no_grad():
                self.late.popleft()()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """A copy from or to pinned memory that nobody waits for."""
        if self.recording is not None:
            raise NotCaptured("copy between host and device")
        self.counts.queued += 1
        self.queue(lambda: to.copy_(source))

    def take(self, made: Any) -> Any:
        for tensor in _tensors(made):
            self.storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return made

    def wait(self, name: str) -> None:
        if self.recording is not None or self.refusing:
            raise NotCaptured(name)
        self.counts.waits[name] += 1
        self.finish()


class _Operations(TorchDispatchMode):
    """Sees every operation, those of a backward pass too."""

    def __init__(self, device: _Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, device = dict(kwargs or {}), self.device
        given = _tensors((args, named))
        here = [device.holds(tensor) for tensor in given]
        if not any(here):
            return func(*args, **named)
        name = func.overloadpacket.__name__
        late = name == "copy_" and here[0] != here[1] and (args[2:] == (True,) or named.get("non_blocking"))
        if late and _storage(args[int(here[0])])._cdata in device.pinned:
            device.copy(args[0], args[1])
            return args[0]
        device.finish()
        indices = _tensors(args[1]) if name.startswith("index") and len(args) > 1 else []
        for tensor, inside in zip(given, here, strict=True):
            if inside or tensor.dim() == 0:
                continue
            if any(tensor is index for index in indices):
                device.wait("index of the host")
            elif name == "copy_":
                device.wait("copy between host and device")
            else:
                raise MixedDevices(f"{name}: tensors of the host {tuple(tensor.shape)} and of the device")
        if name in WAITS or any(index.dtype == torch.bool for index in indices):
            device.wait(name)
        made = func(*args, **named)
        device.take(made)
        if device.recording is not None:
            device.recording.append((func, args, named, made))
        return made


class _Calls(TorchFunctionMode):
    """Sees what names a device, which operations no longer do."""

    def __init__(self, device: _Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        named, device = dict(kwargs or {}), self.device
        if func == Tensor.device.__get__:
            return torch.device("cuda" if device.holds(args[0]) else "cpu")
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return device.holds(args[0])
        if func in (Tensor.numpy, Tensor.__array__) and device.holds(args[0]):
            raise MixedDevices("numpy: of a tensor on the device")
        if func is Tensor.tolist and device.holds(args[0]):
            device.wait("tolist")
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._moved(func, args, named)
        if func is Tensor.pin_memory:
            if device.holds(args[0]):
                raise MixedDevices("pin_memory: of a tensor on the device")
            return device.pins(args[0].detach().clone())
        if named.pop("pin_memory", False):
            return device.pins(func(*args, **named))
        if _is_cuda(named.get("device")):
            named["device"] = "cpu"
            if func in (torch.tensor, torch.as_tensor):
                device.wait("to device")
            return device.take(func(*args, **named))
        return func(*args, **named)

    def _moved(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        tensor, device, late = args[0], self.device, named.pop("non_blocking", False)
        inside = device.holds(tensor)
        wanted = [one for one in (*args[1:], named.pop("device", None)) if isinstance(one, str | torch.device)]
        rest = [one for one in args[1:] if isinstance(one, torch.dtype | Tensor)]  # not whether the copy may be late
        target = func is Tensor.cuda or (func is Tensor.to and (_is_cuda(wanted[0]) if wanted else inside))
        same: Tensor = Tensor.to(tensor, *rest, **named) if func is Tensor.to and (rest or named) else tensor
        if target == inside:
            return same
        if target and late and _storage(same)._cdata in device.pinned:
            copy = torch.empty_like(same)
            device.copy(copy, same)
            return device.take(copy)  # type: ignore[no-any-return]
        device.wait("to device" if target else "to host")
        with _unseen(), torch.no_grad():
            copy = same.detach().clone()
        return device.take(copy) if target else copy


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _storage(tensor: Tensor) -> Any:
    """That of the tensor itself where it is wrapped, as `torch.vmap` does."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _unseen() -> Any:
    return torch.utils._python_dispatch._disable_current_modes()


class _Graph:
    """A step to be recorded. `replay` computes it again into the tensors of the recording, when its turn comes."""

    def __init__(self, device: _Device) -> None:
        self.device = device
        self.steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self.device.finish()
        self.device.recording = self.steps
        try:
            yield
        finally:
            self.device.recording = None
        self.device.counts.captured += 1

    def replay(self) -> None:
        self.device.counts.replayed += 1
        self.device.queue(self._again)

    def _again(self) -> None:
        for func, args, named, before in self.steps:
            for old, new in zip(_tensors(before), _tensors(func(*args, **named)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Event:
    """A place in the queue of the device."""

    def __init__(self, device: _Device) -> None:
        self.device, self.place = device, 0

    def record(self) -> None:
        self.place = self.device.queued

    def synchronize(self) -> None:
        if self.place > self.device.queued - len(self.device.late):
            self.device.finish(self.place)
            self.device.counts.behind.append(len(self.device.late))


class _Stream:
    """All streams are one."""

    def wait_stream(self, other: object) -> None:
        pass


@contextmanager
def pretended() -> Iterator[Counts]:
    """While inside, there is a device with 16 GiB. Gives what is counted."""
    device = _Device()

    def debug(mode: str) -> None:
        device.refusing = mode == "error"

    there: dict[str, Any] = {
        "is_available": lambda: True, "mem_get_info": lambda *given: (1 << 34, 1 << 34),
        "get_device_properties": lambda *given: SimpleNamespace(total_memory=1 << 34), "Event": partial(Event, device), "Stream": _Stream,
        "current_stream": _Stream, "stream": nullcontext, "CUDAGraph": partial(_Graph, device), "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: device.recording is not None,
        "graph": lambda graph, **given: graph.recorded(), "get_sync_debug_mode": lambda: "default", "set_sync_debug_mode": debug,
    }  # fmt: skip
    _forget()
    try:
        with patch.multiple(torch.cuda, **there), _Operations(device), _Calls(device):
            yield device.counts
            device.finish()
    finally:
        _forget()


def _forget() -> None:
    graphs.release_graphs()
    graphs._stream.cache_clear()
    fast._vmapped.cache_clear()  # modules' buffers
    memory.release_samples()
    memory._free.cache_clear()
    step_noise._fault.cache_clear()
