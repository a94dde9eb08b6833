"""A CUDA device that is not there: real tensors of the CPU, of which some count as being on the device.

While `pretended()` is active, `device="cuda"` is accepted, and what is made or sent there is marked by its storage. Then

- an operation on tensors of both sides raises `MixedDevices` (single numbers and copies may cross, as in torch), as does `.numpy()`;
- what makes the host wait for the device is counted, by name, in `Counts.waits`, and raises `NotCaptured` during a capture;
- a captured step is recorded, operation by operation, and replayed on the same tensors, as a CUDA graph replays it.

It shows where tensors are, how often the host waits, and which buffers are reused. It shows nothing of kernels, streams or speed. Tensors
inside `torch.vmap` are not followed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cflpriv.engine import graphs, memory

__all__ = ["Counts", "MixedDevices", "NotCaptured", "pretended"]

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
"""Operations whose result the host needs."""


class MixedDevices(RuntimeError):
    """An operation on tensors of the host and of the device."""


class NotCaptured(RuntimeError):
    """What a CUDA graph cannot hold."""


@dataclass
class Counts:
    """`waits` by name ("to device", "to host", an operation), and the steps that were captured and replayed."""

    waits: Counter[str] = field(default_factory=Counter)
    captured: int = 0
    replayed: int = 0


@dataclass
class _Device:
    """The storages on the device, kept so that no address is used twice, and the recording under way."""

    counts: Counts = field(default_factory=Counts)
    storages: dict[int, Any] = field(default_factory=dict)
    recording: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] | None = None

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    def take(self, made: Any) -> Any:
        for tensor in _tensors(made):
            self.storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return made

    def wait(self, name: str) -> None:
        if self.recording is not None:
            raise NotCaptured(name)
        self.counts.waits[name] += 1


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
        if _is_cuda(named.get("device")):
            named["device"] = "cpu"
            if func in (torch.tensor, torch.as_tensor):
                device.wait("to device")
            return device.take(func(*args, **named))
        return func(*args, **named)

    def _moved(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        tensor, device = args[0], self.device
        inside = device.holds(tensor)
        wanted = [one for one in (*args[1:], named.pop("device", None)) if isinstance(one, str | torch.device)]
        rest = [one for one in args[1:] if isinstance(one, torch.dtype | Tensor)]  # not whether the copy may be late
        target = func is Tensor.cuda or (func is Tensor.to and (_is_cuda(wanted[0]) if wanted else inside))
        same: Tensor = Tensor.to(tensor, *rest, **named) if func is Tensor.to and (rest or named) else tensor
        if target == inside:
            return same
        device.wait("to device" if target else "to host")
        with _unseen(), torch.no_grad():
            copy = same.detach().clone()
        if target:
            device.take(copy)
        return copy


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _unseen() -> Any:
    return torch.utils._python_dispatch._disable_current_modes()


@dataclass
class _Recorded:
    """A recorded step. `replay` computes it again into the tensors of the recording."""

    device: _Device
    steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]]

    def replay(self) -> None:
        self.device.counts.replayed += 1
        with _unseen(), torch.no_grad():
            for func, args, named, before in self.steps:
                for old, new in zip(_tensors(before), _tensors(func(*args, **named)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextmanager
def pretended() -> Iterator[Counts]:
    """While inside, there is a device with 16 GiB. Gives what is counted."""
    device = _Device()

    def capture(program: graphs.Program) -> _Recorded:
        program.at.zero_()
        program.step()  # a first step, as a real capture warms up
        device.recording = []
        try:
            program.step()
        finally:
            steps, device.recording = device.recording, None
        device.counts.captured += 1
        return _Recorded(device, steps)

    graphs.release()
    memory.release()
    memory._free.cache_clear()
    try:
        with (
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(torch.cuda, "mem_get_info", lambda *given: (1 << 34, 1 << 34)),
            patch.object(graphs, "capture", capture),
            _Operations(device), _Calls(device),
        ):  # fmt: skip
            yield device.counts
    finally:
        graphs.release()
        memory.release()
        memory._free.cache_clear()
