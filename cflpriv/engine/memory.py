"""Device memory: samples of clients, which stay between rounds, and chunks, cut to the free memory."""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..types import ClientData
from .convolutions import only
from .device import CPU, Device, sent, using
from .models import Model, module_there
from .sgd import Local, Options, Way, steps_by_batch, train_stacked

__all__ = ["Residents", "chunk_budget", "client_bytes", "live_bytes", "release_samples", "resident", "resident_samples"]

DATA_SHARE, CHUNK_SHARE = 1 / 3, 3 / 16
"""Of the memory that was free at first: for samples; for a chunk, of which two are kept, each with its cuts to a quarter and a sixteenth
(`graphs.KEPT`), so 2.6 chunks in all. The rest is for the allocator's gaps and for what the libraries take for themselves."""
SENT_AT_ONCE = 1 << 28
"""Bytes of samples, as clients have them, in one copy to the device."""
TRIAL, LARGEST_TRIAL = 2, 64
"""Clients of a trial step, and samples in their batches at most."""


@dataclass(eq=False)
class Residents:
    """Tensors kept with their owner, for as long as it lives, up to `limit` bytes in all."""

    limit: int
    used: int = 0
    _kept: "weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[Tensor, ...]]]" = field(default_factory=weakref.WeakKeyDictionary)

    def has(self, owner: Any, key: Hashable) -> bool:
        """Whether the tensors of this key are kept with their owner."""
        return key in self._kept.get(owner, {})

    def get(self, owner: Any, key: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `make` gives, which is asked once as long as there is room."""
        kept = self._kept.get(owner, {})
        if key in kept:
            return kept[key]
        made = make()
        size = sum(tensor.nbytes for tensor in made)
        if self.used + size <= self.limit:
            self._kept.setdefault(owner, {})[key] = made
            self.used += size
            weakref.finalize(owner, _forget, weakref.ref(self), size)  # must not keep the residents, nor so their tensors
        return made


def _forget(residents: "weakref.ref[Residents]", size: int) -> None:
    if (kept := residents()) is not None:
        kept.used -= size


@cache
def _residents() -> Residents:
    return Residents(int(_free() * DATA_SHARE))


def resident(owner: Any, key: Hashable, make: Callable[[], tuple[Tensor, ...]], device: Device) -> tuple[Tensor, ...]:
    """What `make` gives, on the device; there it is kept with its `owner`, under `key`, while there is room."""
    if device.kind == "cpu":
        return make()

    def there() -> tuple[Tensor, ...]:
        with using(CPU):  # `sent` sends better than `placed`
            made = make()
        return tuple(sent(tensor, device) for tensor in made)

    return _residents().get(owner, key, there)


def resident_samples(model: Model, clients: Sequence[ClientData], device: Device, split: str = "train") -> list[tuple[Tensor, Tensor]]:
    """Each client's "train" or "test" samples as the model's input (n, *shape), and their labels (n,), on the device.

    The samples of all clients that are not there yet are sent in one copy.
    """

    def make(data: ClientData) -> tuple[Tensor, ...]:
        x, y = (data.x_train, data.y_train) if split == "train" else (data.x_test, data.y_test)
        return model.inputs(x), torch.from_numpy(y)

    if device.kind == "cpu":
        return [(x, y) for x, y in map(make, clients)]
    key, residents = (split, model.mean, model.std, model.dtype), _residents()
    absent = list({id(data): data for data in clients if not residents.has(data, key)}.values())
    fresh: dict[int, tuple[Tensor, ...]] = {}
    for some in _together(absent):
        with using(CPU):  # `sent` sends better than `placed`
            made = [make(data) for data in some]
        there = zip(*(_sent_together(tensors, device) for tensors in zip(*made, strict=True)), strict=True)
        fresh |= {id(data): pair for data, pair in zip(some, there, strict=True)}
    return [(x, y) for x, y in (residents.get(data, key, partial(fresh.__getitem__, id(data))) for data in clients)]


def _together(clients: Sequence[ClientData]) -> Iterator[list[ClientData]]:
    """Clients whose samples go in one copy: the host has each copy's samples twice more while it is made."""
    some: list[ClientData] = []
    size = 0
    for data in clients:
        client_size = data.x_train.nbytes + data.x_test.nbytes
        if some and size + client_size > SENT_AT_ONCE:
            yield some
            some, size = [], 0
        some.append(data)
        size += client_size
    if some:
        yield some


def _sent_together(tensors: Sequence[Tensor], device: Device) -> list[Tensor]:
    """Tensors (n, *shape) on the device, in memory of their own, by one copy."""
    return [piece.clone() for piece in torch.split(sent(torch.cat(list(tensors)), device), [len(tensor) for tensor in tensors])]


def release_samples() -> None:
    """Forget all samples and modules on the device."""
    _residents.cache_clear()
    module_there.cache_clear()


@cache
def _free() -> int:
    """The bytes that were free when this process first asked, so that chunks are cut the same way in every round."""
    return int(torch.cuda.mem_get_info()[0])


def chunk_budget() -> int:
    """The bytes that one chunk may take on the CUDA device."""
    return int(_free() * CHUNK_SHARE)


def client_bytes(way: Way, shape: tuple[int, ...], dtype: torch.dtype, options: Options, batch: int, samples: int) -> int:
    """The bytes that one more client costs a chunk: its samples, its batch's pass through the network, and everything of its parameters.

    The pass is measured: a trial step on this machine's CPU, of two clients; beyond `LARGEST_TRIAL` samples a batch by the straight line
    through that and half of it, since there the activations are the most of it.
    """
    rounded = -(-batch // 8) * 8 if batch > 8 else batch
    step = _trial(way, shape, dtype, options, min(rounded, LARGEST_TRIAL))
    if rounded > LARGEST_TRIAL:
        half = _trial(way, shape, dtype, options, LARGEST_TRIAL // 2)
        step += (step - half) * (rounded - LARGEST_TRIAL) / (LARGEST_TRIAL // 2)
    parameters = sum(int(np.prod(dimensions)) for dimensions in way.layout.shapes)
    again = 2 + options.moments + 2 * bool(options.prox)  # the buffers of `graphs.Program`, and the starts as they were sent
    size = torch.empty((), dtype=dtype).element_size()
    data = samples * (int(np.prod(shape)) * size + 8)
    return int(step + parameters * again * size + 3 * data)  # sent, and in a buffer with room for twice as many


@lru_cache(maxsize=64)
def _trial(way: Way, shape: tuple[int, ...], dtype: torch.dtype, options: Options, batch: int) -> float:
    """The bytes a client that a step on batches of so many samples holds at most, with convolutions as on a device."""
    clients = _trial_clients(way, shape, dtype, options, batch)
    with only("unfolded"):
        return live_bytes(lambda: train_stacked(way, clients, options, CPU, steps_by_batch)) / TRIAL


def _trial_clients(way: Way, shape: tuple[int, ...], dtype: torch.dtype, options: Options, batch: int) -> list[Local]:
    """Clients with one sample, which fills their batches. Under clipping the sample is lost: a device always makes room for that case."""
    parameters = np.zeros(
        sum(int(np.prod(dimensions)) for dimensions in way.layout.shapes), dtype=torch.empty((), dtype=dtype).numpy().dtype
    )
    x, y = torch.full((1, *shape), np.nan if options.clip_norm else 0.0, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    batches = [np.zeros(batch, dtype=np.int64)] * options.stride
    return [Local(x, y, batches, parameters, noise_key=bytes(32) if options.deviation else b"")] * TRIAL


def live_bytes(call: Callable[[], object]) -> int:
    """The most bytes that tensors made during `call` held at once."""
    live = _Live()
    with live:
        call()
    return live.most


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make, until they are gone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        argument_storages = {id(storage) for storage in _storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if id(storage) not in argument_storages and storage not in self._known:
                self._known.add(storage)
                size = storage.nbytes()
                self.now += size
                weakref.finalize(storage, self._gone, size)
        self.most = max(self.most, self.now)
        return made

    def _gone(self, size: int) -> None:
        self.now -= size


def _storages(tree: Any) -> Iterator[Any]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
