"""The noise of private training steps: its keystream, the rule by which words become tails, and the law of the normals."""

import ctypes
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtri
from torch.cuda import jiterator

from cflpriv.engine import compiled, step_noise
from cflpriv.engine.device import CPU, Device
from cflpriv.engine.step_noise import keys_of, keystream_words, noise_place, normals, tails
from cflpriv.errors import CflprivWarning, InputError
from cflpriv.protocols import entropy
from cflpriv.types import Array

KEY = bytes(range(32))
ALPHA = 1e-6
"""The probability that a test of the law fails for a key drawn at random; the keys are fixed."""
RFC_8439: list[tuple[bytes, int, str, str]] = [  # key, counter, nonce, keystream: sections 2.3.2, A.1 #1, #2 and #4
    (KEY, 1, "000000090000004a00000000",
     "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
    (bytes(32), 0, "000000000000000000000000",
     "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    (bytes(32), 1, "000000000000000000000000",
     "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    (bytes([0, 255]) + bytes(30), 2, "000000000000000000000000",
     "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
]  # fmt: skip


@pytest.fixture(params=["library", "torch"])
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes normals of words."""
    if request.param == "torch":
        monkeypatch.setattr(step_noise, "library", lambda: None)
    elif compiled.library() is None:
        pytest.skip("the library is not built, or this processor has no AVX2")


def parts_of(nonce: bytes) -> tuple[int, int]:
    """The stream and the batch number of a nonce (12 bytes)."""
    return int.from_bytes(nonce[:4], "little"), int.from_bytes(nonce[4:], "little")


@pytest.mark.parametrize(("key", "counter", "nonce", "keystream"), RFC_8439)
def test_words_are_those_of_the_standard(key: bytes, counter: int, nonce: str, keystream: str) -> None:
    stream, number = parts_of(bytes.fromhex(nonce))
    words = keystream_words(keys_of([key]), torch.tensor([number]), stream, 8 * counter, 8)
    assert words.numpy().astype("<i8").tobytes().hex() == keystream


keys, streams, numbers = st.binary(min_size=32, max_size=32), st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1)


@given(st.lists(keys, min_size=1, max_size=4), streams, numbers, st.integers(0, 40), st.integers(1, 70))
@settings(max_examples=50, deadline=None)
def test_words_are_rows_of_the_whole_keystream(given_keys: list[bytes], stream: int, number: int, blocks: int, count: int) -> None:
    found = keystream_words(keys_of(given_keys), torch.tensor([number]), stream, 8 * blocks, count)
    nonce = bytes(4) + stream.to_bytes(4, "little") + number.to_bytes(8, "little")
    for key, row in zip(given_keys, found.numpy(), strict=True):
        whole = bytes(Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(8 * (8 * blocks + count))))
        np.testing.assert_array_equal(row, np.frombuffer(whole, dtype="<i8")[8 * blocks :])


def test_the_function_for_a_device_makes_the_same_words(tmp_path: Path) -> None:
    """Its C++ text, compiled for this machine; torch finds the name of the function in it."""
    source = step_noise._source()
    made: Any = jiterator._create_multi_output_jit_fn(source, num_outputs=8)
    assert made.kernel_name == "chacha20_block"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    outputs = ", ".join(f"out[{i}]" for i in range(8))
    call = f"chacha20_block<long long>(key[0], key[1], key[2], key[3], position, number, {outputs});"
    whole = f'{source}extern "C" void block(const long long* key, long long position, long long number, long long* out) {{ {call} }}\n'
    (tmp_path / "block.cpp").write_text(whole, encoding="utf-8")
    library = tmp_path / "block.so"
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "block.cpp"], check=True)
    block, rng = ctypes.CDLL(str(library)).block, np.random.default_rng(0)
    block.argtypes = [ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_void_p]
    for _ in range(200):
        key, (stream, number, counter) = rng.bytes(32), (int(rng.integers(top)) for top in (2**31, 2**63, 2**32))
        packed, out = np.frombuffer(key, dtype=np.int64).copy(), np.zeros(8, dtype=np.int64)
        block(packed.ctypes.data, (stream << 32) + counter, number, out.ctypes.data)
        np.testing.assert_array_equal(out, keystream_words(keys_of([key]), torch.tensor([number]), stream, 8 * counter, 8)[0].numpy())


@pytest.mark.parametrize(("first", "count"), [(0, 1), (16, 8), (80, 29)])
def test_blocks_of_a_device_are_put_in_order(first: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a function in place of the compiled one that broadcasts its arguments, as that does, and makes a block of each."""
    two = keys_of([KEY, KEY[::-1]])

    def block(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *key, position, number = (argument.expand(2, arguments[4].shape[1]) for argument in arguments)
        blocks = [
            [
                keystream_words(torch.stack([part[i, j] for part in key])[None], number[i, j], int(at) >> 32, 8 * (int(at) % 2**32), 8)[0]
                for j, at in enumerate(row)
            ]
            for i, row in enumerate(position)
        ]
        return torch.stack([torch.stack(row) for row in blocks]).unbind(-1)

    monkeypatch.setattr(step_noise, "_compiled", lambda: block)
    number = torch.tensor([11])
    assert torch.equal(step_noise._on_cuda(two, number, 5, first, count), keystream_words(two, number, 5, first, count))


def test_no_two_clients_batches_or_streams_share_a_word() -> None:
    """Of 38,400 words of 64 bits two are equal by chance once in 10^10 keys."""
    three = keys_of([KEY, bytes(32), KEY[::-1]])
    drawn = [keystream_words(three, torch.tensor([number]), stream, 0, 800) for number in range(8) for stream in (0, 1)]
    words = torch.cat(drawn).flatten().tolist()
    assert len(set(words)) == len(words) == 38_400


def crafted(seed: int) -> tuple[Array, Array]:
    """Words whose tails have any number of digits, down to none, of either sign; and words for the digits that are missing."""
    rng = np.random.default_rng(seed)
    bits = np.concatenate([rng.integers(2**62, 2**63, 200) >> shift for shift in range(0, 63, 3)] + [np.zeros(3, dtype=np.int64)])
    bits = np.concatenate([bits, [2**52 - 1, 2**52, 2**63 - 1, 0]])
    more = rng.integers(-(2**63), 2**63, bits.size)
    more[-1] = 0
    return bits | (rng.integers(-1, 1, bits.size) << 63), more


def test_tails_are_those_of_their_words() -> None:
    """To the rounding of a float64, which is all that they have."""
    words, more = crafted(0)
    found = tails(torch.from_numpy(words), torch.from_numpy(more)).numpy()
    for word, extra, u in zip(words.tolist(), more.tolist(), found.tolist(), strict=True):
        bits = word % 2**63
        rest = Fraction(1, 2) if bits >= 2**52 else (Fraction((extra % 2**64) >> 12) + Fraction(1, 2)) / 2**52
        assert abs(Fraction(u) / ((bits + rest) / 2**64) - 1) <= Fraction(1, 2**52)
    assert found.min() == 2.0**-117
    assert found.max() == 0.5


def test_tails_follow_the_rule_of_the_host() -> None:
    """Bit for bit those of `entropy.signed_tails`, which takes the words of missing digits in their order; 100,000 have some 49."""
    count = 100_000
    words = np.frombuffer(entropy.keystream(KEY, 8 * (count + 200)), dtype="<i8").copy()
    few = (words[:count] & (2**63 - 1)) < 2**52
    more = np.zeros(count, dtype=np.int64)
    more[few] = words[count : count + few.sum()]
    signed = entropy.signed_tails(KEY, count)
    assert few.sum() > 20
    np.testing.assert_array_equal(tails(torch.from_numpy(words[:count]), torch.from_numpy(more)).numpy(), np.abs(signed))
    np.testing.assert_array_equal(words[:count] < 0, np.signbit(signed))


def drawn_of(words: Array, more: Array, monkeypatch: pytest.MonkeyPatch) -> Array:
    """The normals that are made of these words."""
    both = [torch.from_numpy(np.atleast_2d(values)) for values in (words, more)]
    monkeypatch.setattr(step_noise, "keystream_words", lambda keys, number, stream, first, count: both[stream][:, first : first + count])
    return normals(keys_of([KEY]), torch.tensor([0]), words.size, 1.0)[0].numpy()


@pytest.mark.usefixtures("maker")
def test_normals_have_their_law_far_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chance of a tail beyond each is the one that its bits say, to 1e-13 of it, and they are scipy's; the first bit is the sign."""
    words, more = crafted(1)
    u, upper = tails(torch.from_numpy(words), torch.from_numpy(more)).numpy(), words < 0
    found = drawn_of(words.copy(), more, monkeypatch)
    assert np.all(np.where(upper, found, -found) >= 0)
    np.testing.assert_allclose(stats.norm.sf(np.abs(found)), u, rtol=1e-13, atol=0)
    np.testing.assert_allclose(np.abs(found), -ndtri(u), rtol=1e-13, atol=1e-15)
    assert np.abs(drawn_of(np.array([0, -(2**63)]), np.zeros(2, dtype=np.int64), monkeypatch)) == pytest.approx([12.4, 12.4], abs=0.1)


@pytest.mark.usefixtures("maker")
def test_normals_are_normal_and_independent() -> None:
    """Kolmogorov and Smirnov's test of 120,000, and the correlations between clients, batches and neighbours."""
    two = keys_of([KEY, KEY[::-1]])
    rows = torch.cat([normals(two, torch.tensor([number]), 30_000, 2.0) for number in (0, 1)]).numpy() / 2.0
    assert stats.kstest(rows.ravel(), "norm").pvalue > ALPHA
    most = stats.norm.isf(ALPHA / 40) / np.sqrt(30_000)  # of 9 correlations, either side
    assert np.abs(np.asarray(np.corrcoef(rows))[np.triu_indices(4, 1)]).max() < most
    assert np.abs(np.mean(rows[:, 1:] * rows[:, :-1], axis=1)).max() < most


@pytest.mark.usefixtures("maker")
def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = normals(keys_of([KEY, bytes(32)]), torch.tensor([3]), 100, 0.5)
    assert torch.equal(whole[:1], normals(keys_of([KEY]), torch.tensor([3]), 100, 0.5)), "beside whatever clients"
    monkeypatch.setattr(step_noise, "PIECE", 16)
    assert torch.equal(whole, normals(keys_of([KEY, bytes(32)]), torch.tensor([3]), 100, 0.5))


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"32 bytes each, got \[31, 32\]"):
        keys_of([KEY, KEY[:31]])


def test_noise_is_made_where_training_is_computed_unless_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noise_place(CPU) == noise_place(Device("cpu", noise="host")) == noise_place(Device("cuda", noise="host")) == "host"
    assert noise_place(Device("cpu", noise="device")) == "device"
    monkeypatch.setattr(step_noise, "_fault", lambda kind: "" if kind == "cuda" else "missing")
    assert noise_place(Device("cuda")) == noise_place(Device("cuda", noise="device")) == "device"
    monkeypatch.setattr(step_noise, "_fault", lambda kind: "RuntimeError: no compiler")
    with pytest.raises(InputError, match=r"run.noise_place = 'device': this device cannot make noise \(RuntimeError: no compiler\)"):
        noise_place(Device("cuda", noise="device"))
    with pytest.warns(CflprivWarning, match="no compiler"):
        assert noise_place(Device("cuda")) == "host"


def test_what_a_device_raises_is_a_fault_but_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: Exception = RuntimeError("code\n" * 1000 + "no such\n  operation\n")

    def fails(*of_words: Any) -> torch.Tensor:
        raise raised

    monkeypatch.setattr(step_noise, "keystream_words", fails)
    step_noise._fault.cache_clear()
    assert step_noise._fault("cpu").startswith("RuntimeError: ")
    assert step_noise._fault("cpu").endswith("code no such operation")
    assert len(step_noise._fault("cpu")) < 250, "not the text of the program"
    step_noise._fault.cache_clear()
    raised = torch.cuda.OutOfMemoryError("full")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        step_noise._fault("cpu")
