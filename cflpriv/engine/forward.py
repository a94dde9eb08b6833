"""Forward passes without gradients for many clients at once: what evaluation and loss estimates need."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from ..types import Array
from . import native
from .convolutions import side_by_side
from .device import CPU, Device, arithmetic
from .fast import LARGEST_IMAGE_NETWORK, stacked_form
from .layers import Stacked
from .memory import chunk_budget, live_bytes
from .models import Model, build_module
from .sgd import Layout

__all__ = ["forward_chunk", "outputs"]

LARGEST_PASS = 1024
"""Samples in one pass of a module."""
IMAGE_CLIENTS, IMAGE_SAMPLES = 8, 50
"""Clients and samples of each in one pass over images on the CPU: measured on LeNet-5, where more leaves the caches."""
MOST_CLIENTS, PASS_PARAMETERS = 64, 700_000
"""Clients in one pass over flat features on the CPU, and about how many parameters they have in all."""
SAMPLES_THERE, CLIENTS_THERE, PARAMETERS_THERE = 65_536, 1024, 100_000_000
"""On a CUDA device: samples in one pass, of all clients together and where there is memory for them; clients; about how many parameters
these have. Guesses: not measured. A device has no caches to stay in, and each pass costs its launches."""
TRIAL_CLIENTS, TRIAL_SAMPLES = 2, 8


def forward_chunk(model: Model, device: Device) -> int:
    """How many clients to pass forward together."""
    stacked = stacked_form(model)
    if stacked is None:
        return 1
    if device.kind != "cpu":
        return max(2, min(CLIENTS_THERE, PARAMETERS_THERE // model.dimension))
    if stacked.images:
        return max(1, min(IMAGE_CLIENTS, LARGEST_IMAGE_NETWORK // model.dimension))
    return max(2, min(MOST_CLIENTS, PASS_PARAMETERS // model.dimension))


def outputs(model: Model, vectors: Sequence[Array], inputs: Sequence[Tensor], device: Device) -> tuple[list[Tensor], str]:
    """Each client's outputs (n, classes) on `device`, in evaluation mode, and the way taken.

    `vectors` has each client's parameters (d,), `inputs` its normalised samples (n, *shape) on `device`; n may differ. Flat features of
    clients whose parameters are the same object make one batch ("shared"), other clients are stacked. Networks for images pass through the
    compiled kernel, where it is faster ("native"). A module of layers that cannot be stacked takes one client after the other
    ("sequential").
    """
    stacked = stacked_form(model)
    if device.kind == "cpu" and device.native and native.evaluates(model):
        return native.outputs(model, vectors, inputs), "native"
    with torch.no_grad(), arithmetic(device):
        if stacked is None:
            return [_passed(model, vector, x, device) for vector, x in zip(vectors, inputs, strict=True)], "sequential"
        groups: dict[int, list[int]] = {}
        for i, vector in enumerate(vectors):
            groups.setdefault(i if stacked.images else id(vector), []).append(i)
        results: list[Tensor] = [inputs[0]] * len(inputs)
        for members in (group for group in groups.values() if len(group) > 1):
            (whole,) = _together(model, stacked, vectors[members[0] : members[0] + 1], [torch.cat([inputs[i] for i in members])], device)
            for i, output in zip(members, torch.split(whole, [len(inputs[i]) for i in members]), strict=True):
                results[i] = output
        single, size = [group[0] for group in groups.values() if len(group) == 1], forward_chunk(model, device)
        for some in (single[at : at + size] for at in range(0, len(single), size)):
            made = _together(model, stacked, [vectors[i] for i in some], [inputs[i] for i in some], device)
            for i, output in zip(some, made, strict=True):
                results[i] = output
        return results, "stacked" if single else "shared"


def _together(model: Model, stacked: Stacked, vectors: Sequence[Array], inputs: Sequence[Tensor], device: Device) -> list[Tensor]:
    """The outputs of stacked clients, each padded to the longest."""
    layout = Layout(tuple(shape for _, shape, _ in model.layout), stacked.transposed)
    checked = [model.checked(vector) for vector in vectors]
    parameters = layout.views(_on(checked[0][None].copy() if len(checked) == 1 else np.stack(checked), inputs[0]))
    longest = max(len(x) for x in inputs)
    padded = inputs[0].unsqueeze(0) if len(inputs) == 1 else torch.stack([_padded(x, longest) for x in inputs])
    pieces = []
    for piece in torch.split(padded, _samples(model, stacked, len(inputs), device), dim=1):
        if stacked.images:
            piece = side_by_side(piece.transpose(0, 1))
        pieces.append(stacked.forward(piece, parameters, len(inputs)))
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return [whole[i, : len(x)] for i, x in enumerate(inputs)]


def _samples(model: Model, stacked: Stacked, clients: int, device: Device) -> int:
    """How many samples of each client make one pass."""
    if device.kind != "cpu":
        return max(1, min(SAMPLES_THERE, chunk_budget() // _sample_bytes(model)) // clients)
    return IMAGE_SAMPLES if stacked.images else LARGEST_PASS


@lru_cache(maxsize=32)
def _sample_bytes(model: Model) -> int:
    """The bytes that a pass holds at most for each sample, measured on the CPU."""
    vectors, inputs = [model.init(0)] * TRIAL_CLIENTS, [model.inputs(np.zeros((TRIAL_SAMPLES, *model.shape)))] * TRIAL_CLIENTS
    stacked = stacked_form(model)
    assert stacked is not None
    with torch.no_grad():
        return max(1, live_bytes(lambda: _together(model, stacked, vectors, inputs, CPU)) // (TRIAL_CLIENTS * TRIAL_SAMPLES))


def _passed(model: Model, vector: Array, x: Tensor, device: Device) -> Tensor:
    """One client's outputs from the module itself."""
    if device.kind == "cpu":
        module = model.lent(vector)
        return torch.cat([module(piece) for piece in torch.split(x, LARGEST_PASS)])
    module, whole = build_module(model).eval(), _on(np.array(model.checked(vector)), x)
    state = {name: buffer.to(x.device) for name, buffer in module.named_buffers()}
    state |= {name: whole[at : at + prod(shape)].view(shape) for name, shape, at in model.layout}
    return torch.cat([functional_call(module, state, (piece,)) for piece in torch.split(x, LARGEST_PASS)])


def _on(vectors: Array, x: Tensor) -> Tensor:
    """Parameters in the type and on the device of the samples."""
    return torch.from_numpy(vectors).to(x.device, x.dtype)


def _padded(x: Tensor, longest: int) -> Tensor:
    return x if len(x) == longest else torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])
