"""Splitting secrets, and turning keys into masks."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.secagg import Contribution, simulate
from cflpriv.protocols.secagg.shamir import PRIME, SHARE_BYTES, combine, split
from cflpriv.protocols.secagg.vectors import add_masks, total_mask

from .scene import Play, identities, levels, terms


def test_the_modulus_is_prime() -> None:
    """Miller-Rabin with 40 bases: a composite passes with probability below 4^-40."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 42):
        x = pow(base, odd, PRIME)
        assert x in (1, PRIME - 1) or any(pow(x, 2**i, PRIME) == PRIME - 1 for i in range(1, twos))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_t_shares_give_the_secret(data: st.DataObject) -> None:
    secret = data.draw(st.one_of(st.binary(min_size=32, max_size=32), st.sampled_from([bytes(32), b"\xff" * 32])))
    n = data.draw(st.integers(1, 20))
    t = data.draw(st.integers(1, n))
    keepers = data.draw(st.lists(st.integers(1, 1000), min_size=n, max_size=n, unique=True))
    shares = split(secret, t, keepers, public_entropy(data.draw(st.text(max_size=3))))
    assert all(len(share) == SHARE_BYTES for share in shares)
    chosen = data.draw(st.permutations(range(n)))[:t]
    assert combine([keepers[i] for i in chosen], [shares[i] for i in chosen]) == secret


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_t_minus_one_shares_fit_every_secret(t: int, secret: bytes, other: bytes) -> None:
    """Perfect secrecy, exhibited: for the t − 1 shares of one secret there is a t-th share that makes them shares of any other."""
    keepers = list(range(1, t + 1))
    shares = split(secret, t, keepers, public_entropy("x"))[: t - 1]
    # f(t) for the polynomial of degree t − 1 through (0, other) and the shares, by Lagrange.
    points = [(0, int.from_bytes(other, "big")), *((x, int.from_bytes(s, "big")) for x, s in zip(keepers, shares, strict=False))]
    value = 0
    for x, y in points:
        top = bottom = 1
        for z, _ in points:
            if z != x:
                top, bottom = top * (t - z) % PRIME, bottom * (x - z) % PRIME
        value = (value + y * top * pow(bottom, -1, PRIME)) % PRIME
    assert combine(keepers, [*shares, value.to_bytes(SHARE_BYTES, "big")]) == other


def test_shares_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="keepers"):
        combine([1, 1], [bytes(33), bytes(33)])
    # A result in [2^256, p) is no 32-byte secret: f(0) = 2^256 by a constant polynomial.
    with pytest.raises(ValueError, match="shares"):
        combine([7], [(2**256).to_bytes(33, "big")])


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("length", [1, 7, 262_143, 262_144, 262_145, 600_001])
def test_masks_are_the_plain_keystream(dtype: str, length: int) -> None:
    """Against one call of AES-CTR over zeros, across the borders of the chunks; and a mask minus itself is nothing."""
    key = bytes(range(32))
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(length * np.dtype(dtype).itemsize))
    vector = np.full(length, 5, dtype)
    add_masks(vector, [(key, 1)])
    np.testing.assert_array_equal(vector, np.frombuffer(stream, dtype) + np.array(5, dtype))
    add_masks(vector, [(key, -1), (bytes(32), 1), (bytes(32), -1)])
    assert (vector == 5).all()
    np.testing.assert_array_equal(total_mask(([(key, 1), (key, 1)], length, dtype)), np.frombuffer(stream, dtype) * np.array(2, dtype))


def test_a_mapper_that_fails_half_way_leaves_the_server_as_it_was() -> None:
    play = Play.of(terms(4, "passive"))
    play.close(play.until("Unmask", {3: "Masked"}), {})

    def failing(function: Any, jobs: Iterable[Any]) -> Iterator[Any]:
        yield from map(function, jobs)
        raise OSError("a worker died")

    before = play.server.to_bytes()
    with pytest.raises(OSError, match="a worker died"):
        play.server.advance(failing)
    assert play.server.to_bytes() == before
    assert play.server.advance() == {}
    expected = np.sum([levels(i, 10, play.agreed.levels) for i in range(3)], axis=0)
    assert play.server.result.block().tolist() == expected.tolist()


def test_unmasking_in_a_process_pool() -> None:
    agreed = terms(5, "passive")
    with ProcessPoolExecutor(1) as pool:
        outcome = simulate(
            agreed,
            dict(enumerate(identities()[:5])),
            lambda i: Contribution(levels(i, 10, agreed.levels), is_levels=True),
            drops={0: "Masked"},
            mapper=pool.map,
        )
    assert outcome.sum.block().tolist() == np.sum([levels(i, 10, agreed.levels) for i in range(1, 5)], axis=0).tolist()
