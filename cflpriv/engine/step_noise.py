"""The Gaussian noise of private training steps, made of 32-byte keys wherever training is computed.

A client derives one key for each private training task from its own secret randomness. Key, number of the batch and stream select a
ChaCha20 keystream, whose words become normals. Words are the same on a CPU and on a CUDA device, and normals are within a few units in the
last place. So a device needs the keys alone, once a phase, and a replayed CUDA graph makes new noise at every step because the batch number
is a tensor on the device.

The keystream itself is an operation of torch with two kernels: the `cryptography` package for tensors of the CPU, and for those of a CUDA
device a function that NVRTC compiles at its first use. `noise_place` compares the two before it lets a device make noise. Normals are made
by the compiled library (`native_noise.h`) on a CPU, whichever way trains there. Torch operations make them on a device, where there is no
library, and under `run.engine` "torch" and "sequential".

Guarantee: ChaCha20's keystream under a secret key is computationally indistinguishable from uniform bits. So is the noise from the normals
that uniform bits would give. No two batches share keystream: a key is for one task of one client, whose secret is drawn anew for each task;
the nonce has the batch number and the stream; the counter begins at zero. A task that is computed again, because a device ran out of
memory, adds the same noise to the same gradients. The library branches on no word, reads at no place that depends on one, and wipes words.
Reveals: nothing is released here. Keys are as secret as the noise, and stay in a device's buffers until the next phase.
Source: RFC 8439 (ChaCha20); Φ⁻¹ of Cephes, as torch has it; in the library by quotients of polynomials, to 1e-15.
"""

import struct
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import CflprivWarning, InputError
from .compiled import library
from .device import Device, NoisePlace, in_use, sent

__all__ = ["keys_of", "keystream_words", "noise_place", "normals", "tails"]

WORDS = 8
"""64-bit words of a block of ChaCha20."""
PIECE, PIECES_OF_CPU = 1 << 14, 4
"""Normals of a client that are made at once, a multiple of `WORDS`: some six tensors of this size are in memory on the way. A CPU makes
more, since each operation has its overhead (one client: 26 and 22 ns a normal)."""
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
QUARTERS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15), (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
"""The words of the state that the quarter rounds of a double round take."""


def keys_of(keys: Sequence[bytes]) -> Tensor:
    """Keys of 32 bytes as rows of four little-endian words (C, 4) int64. `ValueError` for another length."""
    if any(len(key) != 32 for key in keys):
        raise ValueError(f"noise keys: expected 32 bytes each, got {sorted({len(key) for key in keys})}")
    return torch.from_numpy(np.frombuffer(b"".join(keys), dtype="<i8").reshape(-1, 4).astype(np.int64))


def keystream_words(keys: Tensor, number: Tensor, stream: int, first: int, count: int) -> Tensor:
    """Words number `first` to `first + count` (C, count) of ChaCha20's keystream under each of the keys (C, 4), as int64.

    The nonce of RFC 8439 is `stream` (four bytes, little-endian) and then `number` (1,) int64, at least 0 (eight bytes); `first` is a
    multiple of 8. All tensors are on one device. Neither the host nor a captured step waits.
    """
    if not keys.is_cuda:  # the dispatch of torch takes a quarter of the time that a small model's words take
        return _on_cpu(keys, number, stream, first, count)
    words: Tensor = torch.ops.cflpriv.keystream(keys, number, stream, first, count)
    return words


def normals(keys: Tensor, number: Tensor, count: int, deviation: float) -> Tensor:
    """Normals (C, count) float64 of this standard deviation for batch `number` (1,) of the clients with these keys (C, 4).

    They reach 12.4 deviations on either side. Round what they are added to to a public grid (`protocols.mechanisms.snap`), because which
    doubles can occur is visible in the last bits.
    """
    made = keys.new_empty((len(keys), count), dtype=torch.float64)
    width = PIECE if made.is_cuda else PIECES_OF_CPU * PIECE
    for first in range(0, count, width):
        piece = made[:, first : first + width]
        words, more = (keystream_words(keys, number, stream, first, piece.shape[1]) for stream in (0, 1))
        _fill(piece, words, more, deviation)
    return made


def _fill(piece: Tensor, words: Tensor, more: Tensor, deviation: float) -> None:
    """Set `piece` (C, n) to the normals of these words (C, n) of the two streams, which are used up."""
    kernel = library() if in_use().native and not piece.is_cuda else None
    if kernel is None:
        sizes = torch.special.ndtri(tails(words, more))
        torch.mul(sizes.copysign_(words.bitwise_not_().view(torch.float64)), deviation, out=piece)
        return
    words, more = words.contiguous(), more.contiguous()
    kernel.normals(words.data_ptr(), more.data_ptr(), *words.shape, deviation, piece.data_ptr(), piece.stride(0))


def tails(words: Tensor, more: Tensor) -> Tensor:
    """Probabilities of a tail u in (0, 1/2], float64, from words of two keystreams: the rule of `protocols.entropy.signed_tails`.

    The first bit of a word is the sign of the normal, which is not read here, and the other 63 are u. Where these leave fewer than 52
    digits (one draw in 2,048), 52 more follow, from the word of `more` at the same place. Without such a place of its own for each word
    the shapes would depend on values, which a captured step cannot have.
    """
    u = words.bitwise_and(2**63 - 1).to(torch.float64)
    rest = more.bitwise_right_shift(12).bitwise_and_(2**52 - 1).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return u.add_(rest.masked_fill_(u >= 2.0**52, 0.5)).mul_(2.0**-64)


def noise_place(device: Device) -> NoisePlace:
    """ "host" or "device": where noise is made of training on `device`.

    "auto" is the CUDA device where training is computed on one, and else the host, and also the host, with a warning, where a device does
    not make the right keystream. Raises `InputError` for such a device where its noise was asked for by name.
    """
    if device.noise == "host" or (device.noise == "auto" and device.kind == "cpu"):
        return "host"
    fault = _fault(device.kind)
    if not fault:
        return "device"
    if device.noise == "device":
        raise InputError(f"run.noise_place = 'device': this device cannot make noise ({fault}); use 'host'")
    warnings.warn(f"noise is made on the host, which is slower: this device cannot make it ({fault})", CflprivWarning, stacklevel=2)
    return "host"


@cache
def _fault(kind: str) -> str:
    """Why a device of this kind cannot make keystream; empty where it has made some words, and these are the right ones."""
    keys, number = keys_of([bytes(range(i, i + 32)) for i in range(3)]), torch.tensor([(5 << 32) + 7])
    try:
        words = keystream_words(sent(keys, Device(kind)), sent(number, Device(kind)), 1, 1 << 20, 20).cpu()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # what a compiler, a driver or another version of torch raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"  # a compiler's message comes after the whole program
    return "" if torch.equal(words, keystream_words(keys, number, 1, 1 << 20, 20)) else "its keystream is not that of ChaCha20"


def _on_cpu(keys: Tensor, number: Tensor, stream: int, first: int, count: int) -> Tensor:
    """`keystream_words` by the `cryptography` package, whose nonce begins with the counter."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms  # training without noise does without

    words, zeros = np.empty((len(keys), count), dtype="<i8"), bytes(8 * count)
    nonce = struct.pack("<IIQ", first // WORDS, stream, int(number))
    for key, row in zip(keys.numpy().astype("<i8", copy=False), words, strict=True):
        Cipher(algorithms.ChaCha20(key.tobytes(), nonce), mode=None).encryptor().update_into(zeros, row.data.cast("B"))
    return torch.from_numpy(words)


def _on_cuda(keys: Tensor, number: Tensor, stream: int, first: int, count: int) -> Tensor:
    """`keystream_words` by the compiled function: a thread a block."""
    begin, blocks = first // WORDS, -(-count // WORDS)
    positions = torch.arange(begin, begin + blocks, dtype=torch.int64, device=keys.device).add_(stream << 32)
    words = _compiled()(*torch.split(keys, 1, dim=1), positions.unsqueeze(0), number.unsqueeze(1))
    return torch.stack(words).permute(1, 2, 0).flatten(1)[:, :count]  # two copies; by `dim=-1` one of five times their time


@cache
def _compiled() -> Callable[..., tuple[Tensor, ...]]:
    """The function of `_source` over tensors of a CUDA device, compiled at its first call."""
    from torch.cuda import jiterator  # a beta of torch: where it is gone, `_fault` says so

    made: Callable[..., tuple[Tensor, ...]] = jiterator._create_multi_output_jit_fn(_source(), num_outputs=WORDS)
    return made


def _source() -> str:
    """C++ for a block of ChaCha20: of a key's four words, (stream << 32) + counter, and the batch number it makes eight words."""
    inputs = [*(f"key{i}" for i in range(4)), "position", "number"]
    state = [f"{word}u" for word in CONSTANTS]
    for name in inputs:  # low half first
        state += [f"(unsigned int) ((unsigned long long) {name})", f"(unsigned int) (((unsigned long long) {name}) >> 32)"]
    lines = [f"unsigned int s{i} = {word}; unsigned int x{i} = s{i};" for i, word in enumerate(state)]
    lines += ["#pragma unroll 1", "for (int round = 0; round < 10; ++round) {"]
    for a, b, c, d in QUARTERS:
        for sum_, term, turned, left in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x = f"x{turned}"
            lines.append(f"x{sum_} += x{term}; {x} ^= x{sum_}; {x} = ({x} << {left}) | ({x} >> {32 - left});")
    lines.append("}")
    for i in range(WORDS):
        low, high = (f"((unsigned long long) (x{j} + s{j}))" for j in (2 * i, 2 * i + 1))
        lines.append(f"word{i} = (T) (({high} << 32) | {low});")
    parameters = ", ".join([*(f"T {name}" for name in inputs), *(f"T& word{i}" for i in range(WORDS))])
    return f"template <typename T> void chacha20_block({parameters}) {{\n" + "\n".join(lines) + "\n}\n"


_LIBRARY: Any = cast(Any, torch.library.Library)("cflpriv", "DEF")
"""The keystream as an operation of torch, which chooses the kernel by the device of the tensors. It is gone with its library."""
_LIBRARY.define("keystream(Tensor keys, Tensor number, int stream, int first, int count) -> Tensor")
_LIBRARY.impl("keystream", _on_cpu, "CPU")
_LIBRARY.impl("keystream", _on_cuda, "CUDA")
