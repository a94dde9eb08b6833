"""CKKS similarity: packing and arithmetic against exact integers, release noise, what is refused, what grows, what hostile clients gain."""

import copy
import pickle
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep, time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from scipy.stats import binom

from cflpriv.protocols import ckks
from cflpriv.protocols.ckks import PARAMETERS, SYMMETRIC_PARAMETERS, CkksServer, CkksWorkers, Identity, KeyHolder, Parameters, Roster, Setup
from cflpriv.protocols.ckks.client import packed
from cflpriv.protocols.ckks.messages import LABEL, Announcement, Request, Upload, ciphertexts_digest, decode, encode, signed_request
from cflpriv.protocols.ckks.messages import signed_upload as statement_of
from cflpriv.protocols.ckks.parameters import Packing, error_std, plan, release_grid
from cflpriv.protocols.ckks.products import Products
from cflpriv.protocols.ckks.public_key import announced_bytes, announced_key, fresh_key, shared_half
from cflpriv.protocols.ckks.reference import naive_block, naive_context
from cflpriv.protocols.ckks.seal import check_outside, largest_bytes
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import LocalError, MalformedMessage, RemoteError
from cflpriv.protocols.keys import sign
from cflpriv.types import Array

pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")

SMALL = PARAMETERS[4096]


@dataclass
class Epoch:
    """All parties of one epoch, and the true vectors (n, p, d)."""

    setup: Setup
    identities: list[Identity]
    roster: Roster
    holder_identity: Identity
    server_identity: Identity
    holder: KeyHolder
    server: CkksServer
    rows: Array

    @classmethod
    def of(
        cls, rows: Array, parameters: Parameters = SMALL, *, release: str = "labels", landmarks: int = 0, group: int = 1, bound: float = 1.0
    ) -> "Epoch":
        entropy = public_entropy("ckks tests")
        n, p, d = rows.shape
        identities = [Identity.create(number, entropy) for number in range(n)]
        roster = Roster(tuple(identity.public() for identity in identities))
        holder_identity, server_identity = Identity.create(0, entropy), Identity.create(0, entropy)
        setup = Setup(
            bytes(16), 0, roster.digest, n, p, d, parameters.ring, parameters.bits, parameters.mode, release, bound, group  # type: ignore[arg-type]
        )  # fmt: skip
        holder = KeyHolder(setup, holder_identity, server_identity.public(), roster, entropy=entropy)
        server = CkksServer(
            setup, holder.announcement, holder_identity.public(), roster, server_identity, landmarks=landmarks, entropy=entropy
        )  # fmt: skip
        return cls(setup, identities, roster, holder_identity, server_identity, holder, server, rows)

    def upload(self, client: int) -> bytes:
        key = self.holder.secret_key() if self.setup.mode == "symmetric" else None
        announcement, holder = self.holder.announcement, self.holder_identity.public()
        return ckks.encrypt(self.setup, announcement, holder, self.identities[client], self.rows[client], key)

    def join(self, clients: Iterable[int]) -> list[bytes]:
        """Clients enrol; the requests that this leads to."""
        new = list(clients)
        for client in new:
            self.holder.enrol(self.server.receive(self.upload(client)))
        return list(self.server.requests(self.server.jobs(new)))

    def gram(self) -> Array:
        return ckks.gram_matrix(
            self.server.clients, self.holder.blocks, self.server.landmarks, error_std(SMALL, self.setup.packing, self.setup.group)
        )

    def truth(self) -> Array:
        vectors = self.rows[list(self.server.clients)].reshape(-1, self.rows.shape[-1])
        return np.asarray(vectors @ vectors.T)


def vectors(n: int, p: int, d: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return np.stack([np.linalg.qr(rng.normal(size=(d, p)))[0].T for _ in range(n)])


@pytest.fixture(scope="module")
def three() -> Epoch:
    """Three enrolled clients whose requests were not answered yet."""
    epoch = Epoch.of(vectors(3, 2, 20))
    epoch.join([])
    return epoch


# --- packing


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_the_wanted_coefficients_of_grouped_products_are_the_inner_products(p: int, d: int, group: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parameters = Parameters(n := 128, (40,), insecure=True)
    packing = plan(parameters, p, d, 1.0, group)
    clients = rng.integers(-50, 51, (1 + packing.group, p, d))
    unit = 50.0 * np.sqrt(d) * 2
    polynomials = [packed(packing, rows / unit) for rows in clients]
    total = np.zeros(n, dtype=object)
    for slot in range(packing.group):
        for a, b in zip(polynomials[0][0], polynomials[1 + slot][1], strict=True):
            full = np.convolve(a.astype(object), b.astype(object))
            for degree, value in enumerate(full):  # X^N = −1
                at = degree + slot * packing.span
                total[at % n] += value if at < n else -value
    left = np.rint(clients[0] / unit * packing.scale).astype(np.int64).astype(object)
    for slot in range(packing.group):
        right = np.rint(clients[1 + slot] / unit * packing.scale).astype(np.int64).astype(object)
        wanted = [int(left[u] @ right[v]) for u in range(p) for v in range(p)]
        assert [int(total[at]) for at in packing.targets(slot)] == wanted


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(LocalError, match="too-long"):
        plan(SMALL, 3, 10**6)
    packing = plan(SMALL, 1, 10)
    for rows in (np.full((1, 10), 0.5), np.full((1, 10), np.nan), np.zeros((2, 10))):
        with pytest.raises(LocalError, match="out-of-range"):
            packed(packing, rows)


def test_rings_below_128_bits_are_refused() -> None:
    with pytest.raises(LocalError, match="bad-parameters"):
        ckks.arithmetic(Parameters(4096, (54, 60)))


# --- inner products


@pytest.mark.parametrize(
    ("parameters", "d", "group", "limit"),
    [
        (PARAMETERS[4096], 784, 1, 2e-5),
        (PARAMETERS[4096], 64, 6, 2e-5),
        (PARAMETERS[8192], 784, 1, 1e-8),
        (PARAMETERS[8192], 784, 2, 1e-8),
        (SYMMETRIC_PARAMETERS[2048], 784, 1, 2e-5),
    ],
    ids=["4096", "4096 several pairs an output", "8192", "8192 grouped", "2048 symmetric"],
)
def test_inner_products_are_those_of_float64(parameters: Parameters, d: int, group: int, limit: float) -> None:
    epoch = Epoch.of(vectors(4, 3, d), parameters, group=group)
    for request in epoch.join(range(4)):
        epoch.holder.answer(request)
    error = np.abs(epoch.gram() - epoch.truth()).max()
    stated = error_std(parameters, epoch.setup.packing, group)
    assert error < limit
    # 144 errors, Gaussian by the sum of many: beyond 6 std with probability below 3e-7 in all
    assert error < 6 * stated
    assert error > stated / 100  # the statement is not idle


@pytest.mark.parametrize(
    ("p", "d", "group"), [(1, 8, 5), (2, 20, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 8, 1), (3, 784, 1)])]
)
@pytest.mark.parametrize(
    "parameters",
    [PARAMETERS[4096], pytest.param(PARAMETERS[8192], marks=pytest.mark.slow), SYMMETRIC_PARAMETERS[2048]],
    ids=["4096", "8192", "2048 symmetric"],
)
def test_the_stated_error_is_that_of_the_pairs_that_share_an_output(parameters: Parameters, p: int, d: int, group: int) -> None:
    found = []
    for seed in range(6):
        epoch = Epoch.of(vectors(6, p, d, seed), parameters, group=group)
        for request in epoch.join(range(6)):
            epoch.holder.answer(request)
        errors = [block - epoch.rows[left] @ epoch.rows[right].T for (left, right), block in epoch.holder.blocks.items()]
        found.append(np.mean(np.square(errors)) / error_std(parameters, epoch.setup.packing, group) ** 2)
    # one epoch's is 0.6 to 1.1 on average, its std 0.4 or less: the mean of six is beyond in fewer than 1 of 10^5 runs
    assert 0.1 < np.mean(found) < 2.2


def test_they_are_those_of_the_naive_dot() -> None:
    import tenseal

    rows = vectors(2, 2, 30)
    epoch = Epoch.of(rows)
    for request in epoch.join(range(2)):
        epoch.holder.answer(request)
    context = naive_context(8192)
    left, right = ([tenseal.ckks_vector(context, list(row)) for row in client] for client in rows)
    assert np.allclose(epoch.holder.blocks[0, 1], naive_block(left, right), atol=1e-4)


@pytest.mark.slow
def test_workers_change_nothing_but_their_masks() -> None:
    epoch = Epoch.of(vectors(7, 2, 20))
    for client in range(7):
        epoch.holder.enrol(epoch.server.receive(epoch.upload(client)))
    jobs = epoch.server.jobs(range(7))
    said = {}
    for count in (0, 1, 2):
        workers = CkksWorkers(count) if count else None
        try:
            requests = list(epoch.server.requests(jobs, workers))
        finally:
            if workers is not None:
                workers.close()
        epoch.holder.blocks.clear()
        pairs = [epoch.holder.answer(request) for request in requests]
        said[count] = pairs, epoch.gram()
    for count in (1, 2):
        assert said[count][0] == said[0][0]
        assert np.abs(said[count][1] - said[0][1]).max() < 1e-9  # fresh masks only: their noise is that of one encryption


@pytest.mark.parametrize("group", [1, 3])
def test_masks_made_ahead_serve_one_output_each(group: int) -> None:
    epoch = Epoch.of(vectors(7, 2, 20), group=group)
    for client in range(7):
        epoch.holder.enrol(epoch.server.receive(epoch.upload(client)))
    products = epoch.server.products
    with epoch.server.ahead(0):
        pass
    assert products.masks == 0
    before = epoch.server
    before.withdraw(range(7))
    with before.ahead(7):
        until = time() + 30
        while products.masks < (28 if group == 1 else 5) and time() < until:
            sleep(0.01)
    for client in range(7):
        before.receive(epoch.upload(client))
    assert products.masks == (28 if group == 1 else 5)  # one for each output in which all slots are asked for
    fresh: list[bytes] = []
    for request in before.requests(before.jobs(range(7))):
        epoch.holder.answer(request)
        fresh.append(request)
    assert products.masks == 0
    assert len(set(fresh)) == len(fresh)
    assert np.abs(epoch.gram() - epoch.truth()).max() < 2e-5
    assert len({products._draw(32) for _ in range(50)}) == 50


def test_a_ciphertext_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = Epoch.of(vectors(20, 1, 8))
    ring = ckks.arithmetic(SMALL)
    loaded, count = ring.load, 0

    def counted(data: bytes, parts: int) -> object:
        nonlocal count
        count += 1
        return loaded(data, parts)

    monkeypatch.setattr(ring, "load", counted)
    assert len(epoch.join(range(20))) == 210
    assert count == 40


def test_few_ciphertexts_are_kept_where_many_do_not_fit() -> None:
    epoch = Epoch.of(vectors(3, 1, 8))
    holder, uploads = epoch.holder_identity.public(), [decode(epoch.upload(client), Upload, epoch.setup) for client in range(3)]
    products = Products(epoch.setup, holder, epoch.server.public_key, keep_bytes=2 * SMALL.ciphertext_bytes)
    for upload in (*uploads, *uploads):
        products.load(upload.left[0])
        assert products.load(upload.left[0]) is products.load(upload.left[0])
        assert len(products._loaded) <= 2


def test_an_epoch_grows_by_new_rows_only() -> None:
    epoch = Epoch.of(vectors(6, 2, 20))
    for request in epoch.join(range(4)):
        epoch.holder.answer(request)
    before = {pair: block.copy() for pair, block in epoch.holder.blocks.items()}
    added = [pair for request in epoch.join([4, 5]) for pair in epoch.holder.answer(request)]
    assert len(before) == 10
    assert sorted(added) == [(0, 4), (0, 5), (1, 4), (1, 5), (2, 4), (2, 5), (3, 4), (3, 5), (4, 4), (4, 5), (5, 5)]
    assert all((epoch.holder.blocks[pair] == block).all() for pair, block in before.items())
    assert np.abs(epoch.gram() - epoch.truth()).max() < 2e-5


def test_landmarks_compute_fewer_pairs_and_complete_the_rest() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(20, 4)))[0].T  # all vectors lie in four dimensions, as the landmarks' then do
    rows = np.stack([np.linalg.qr((rng.normal(size=(2, 4)) @ basis).T)[0].T for _ in range(9)])
    epoch = Epoch.of(rows, PARAMETERS[8192], landmarks=3)
    requests = [*epoch.join(range(7)), *epoch.join([7, 8])]
    for request in requests:
        epoch.holder.answer(request)
    assert len(epoch.server.landmarks) == 3
    assert len(epoch.holder.blocks) == 3 * 6 + 6  # 3 landmarks with 6 others, and among themselves
    assert np.abs(epoch.gram() - epoch.truth()).max() < 1e-6


@pytest.mark.parametrize("blocks", [{}, {(0, 0): np.ones((1, 1))}], ids=["none", "one of three"])
def test_a_matrix_with_missing_blocks_is_refused_by_name(blocks: dict[tuple[int, int], Array]) -> None:
    """A key holder that lies may answer with fewer blocks than there are."""
    with pytest.raises(LocalError, match="missing-block"):
        ckks.gram_matrix([0, 1], blocks)


def test_slots_that_were_not_asked_for_are_masked_too() -> None:
    epoch = Epoch.of(vectors(3, 2, 20), group=3)
    requests = [decode(request, Request, epoch.setup) for request in epoch.join(range(3))]
    assert [(one.left, one.rights) for one in requests] == [(0, (0, 1, 2)), (1, (None, 1, 2)), (2, (None, None, 2))]
    ring, packing = ckks.arithmetic(SMALL), epoch.setup.packing
    decryptor = ring.seal.Decryptor(ring.context, ring.load_secret_key(epoch.holder.secret_key()))
    for request in requests:
        plain = ring.seal.Plaintext()
        decryptor.decrypt(ring.load(request.ciphertext, 3), plain)
        for slot, right in enumerate(request.rights):
            found = np.array(ring.coefficients(plain, packing.targets(slot))) / packing.scale**2
            off = np.abs(found - (epoch.rows[request.left] @ epoch.rows[slot].T).ravel()).max()
            # uniform over ± q / 2: all four within 1e-4 with probability below 1e-16
            assert off < 2e-5 if right is not None else off > 1e-4


# --- the public key


def announcing(epoch: Epoch, half: bytes) -> bytes:
    """An announcement of a key holder that signs what it likes."""
    signature = sign(epoch.holder_identity, LABEL + "key", epoch.setup.digest, half)
    return encode(Announcement(epoch.setup.digest, half, signature))


def seen_by_the_server(epoch: Epoch, announcement: bytes) -> Array:
    """Client 0's first vector as anybody reads it off the first part of a ciphertext."""
    ring, packing = ckks.arithmetic(epoch.setup.parameters), epoch.setup.packing
    upload = ckks.encrypt(epoch.setup, announcement, epoch.holder_identity.public(), epoch.identities[0], epoch.rows[0])
    cipher = ring.load(decode(upload, Upload, epoch.setup).left[0], 2)
    ring.evaluator.transform_from_ntt_inplace(cipher)
    values = [int(value) for value in ring.values(cipher)[: packing.dimension]]
    return np.array([value if 2 * value < ring.moduli[0] else value - ring.moduli[0] for value in values]) / packing.scale


def test_degenerate_public_keys_are_refused() -> None:
    """A key holder that signs p₀ = 0, p₁ = P would make every upload readable to the server."""
    epoch = Epoch.of(vectors(1, 2, 20))
    ring = ckks.arithmetic(SMALL)
    width = announced_bytes(epoch.setup)
    good = decode(epoch.holder.announcement, Announcement, epoch.setup).public_key
    degenerate = ring.seal.PublicKey()
    ring._load(degenerate, ring._written(np.zeros((2, 2, SMALL.ring), dtype=np.uint64), ring._key_id, transformed=True))
    per_prime = width // 2
    bad = {
        "a whole key of the signer's choice": ring.save(degenerate),
        "zeros": bytes(width),
        "one zero": bytes(7) + good[7:],
        "zeros for the prime of ciphertexts": bytes(per_prime) + good[per_prime:],
        "zeros for the prime of keys": good[:per_prime] + bytes(per_prime),
        "residues above the primes": b"\xff" * width,
        "one residue that is its prime": ring.key_moduli[0].to_bytes(7, "little") + good[7:],
        "short": good[:-1],
        "long": good + b"\x00",
        "empty": b"",
    }
    assert np.abs(seen_by_the_server(epoch, epoch.holder.announcement) - epoch.rows[0, 0]).max() > 1
    for half in bad.values():
        said = announcing(epoch, half)
        with pytest.raises(MalformedMessage):
            seen_by_the_server(epoch, said)
        with pytest.raises(MalformedMessage):
            CkksServer(epoch.setup, said, epoch.holder_identity.public(), epoch.roster, epoch.server_identity)


def test_what_remains_trusted_is_that_the_key_holder_made_its_key_honestly() -> None:
    """A key whose secret everybody knows, s = 0 here, passes, and anybody reads under it. The guarantee says so."""
    one_prime = Parameters(4096, (54,))
    epoch = Epoch.of(vectors(1, 2, 20), one_prime)
    ring = ckks.arithmetic(one_prime)
    both = np.zeros((2, 1, 4096), dtype=np.uint64)
    both[0], both[1, :, 0] = ring.residues(np.random.default_rng(0).integers(-3, 4, 4096)), 1
    literal = ring._literal(both, transformed=False)
    ring.evaluator.transform_to_ntt_inplace(literal)
    short = ring.values(literal)[:4096].astype("<u8").view(np.uint8).reshape(-1, 8)[:, :7].tobytes()
    assert np.abs(seen_by_the_server(epoch, epoch.holder.announcement) - epoch.rows[0, 0]).max() > 1
    assert np.abs(seen_by_the_server(epoch, announcing(epoch, short)) - epoch.rows[0, 0]).max() < 0.01


@pytest.mark.parametrize("parameters", [PARAMETERS[4096], PARAMETERS[8192], SYMMETRIC_PARAMETERS[2048]], ids=["4096", "8192", "2048"])
def test_the_shared_half_is_uniform_and_everybodys_own(parameters: Parameters) -> None:
    epoch = Epoch.of(vectors(1, 1, 8), parameters)
    holder = epoch.holder_identity.public()
    ring = ckks.arithmetic(parameters)
    shared = shared_half(epoch.setup, holder)
    shared_half.cache_clear()
    assert (shared_half(epoch.setup, holder) == shared).all()
    assert shared.shape == (len(parameters.bits), parameters.ring)
    for row, q in zip(shared, ring.key_moduli, strict=True):
        assert row.max() < q
        # the mean of N uniforms is within 6 std of 1/2 but for 1 in 10^8, and so is the mean of their squares' distance to 1/3
        unit = row / q
        assert abs(unit.mean() - 0.5) < 6 / np.sqrt(12 * len(row))
        assert abs((unit**2).mean() - 1 / 3) < 6 * np.sqrt(4 / 45 / len(row))
        assert len(set(row.tolist())) > len(row) - 3  # two of N alike: fewer than 2^-30
    for other in (
        structs.replace(epoch.setup, epoch=1),
        structs.replace(epoch.setup, session=b"\1" * 16),
        structs.replace(epoch.setup, p=2),
    ):
        assert not (shared_half(other, holder) == shared).any()
    assert not (shared_half(epoch.setup, epoch.server_identity.public()) == shared).any()
    assert len(decode(epoch.holder.announcement, Announcement, epoch.setup).public_key) == announced_bytes(epoch.setup)
    assert announced_bytes(epoch.setup) <= len(parameters.bits) * parameters.ring * 8


def test_the_error_of_a_key_is_short() -> None:
    """p₀ + a s is −e: of std 3.2, in both primes the same small numbers."""
    setup = Epoch.of(vectors(1, 1, 8)).setup
    ring, holder = ckks.arithmetic(SMALL), bytes(32)
    secret, announced = fresh_key(setup, holder)
    key = announced_key(setup, holder, announced)
    first, second = ring.values(key.data()).reshape(2, 2, SMALL.ring).astype(object)
    assert (second == shared_half(setup, holder)).all()
    s = ring.values(secret.data()).reshape(2, SMALL.ring).astype(object)
    error = (first + second * s)[:1] % ring.moduli[0]
    literal = ring._literal(np.stack([error, np.ones_like(error)]).astype(np.uint64), transformed=True)
    ring.evaluator.transform_from_ntt_inplace(literal)
    q = ring.moduli[0]
    found = ring.values(literal)[: SMALL.ring].astype(object)
    found = np.array([value if 2 * value < q else value - q for value in found], dtype=float)
    assert np.abs(found).max() < 30  # SEAL clips or bounds its noise at 21 or less
    assert 2.5 < found.std() < 4
    other, again = fresh_key(setup, holder)
    assert again != announced
    assert ring.save(other) != ring.save(secret)


# --- release


def test_released_values_have_the_stated_noise() -> None:
    rows = vectors(8, 3, 64)
    epoch = Epoch.of(rows, PARAMETERS[8192], release="gram")
    for request in epoch.join(range(8)):
        epoch.holder.answer(request)
    std = epoch.holder.std
    found, truth = epoch.gram(), epoch.truth()
    upper = np.triu_indices(24)
    errors = (found - truth)[upper] / std
    assert (found == found.T).all()
    grid = release_grid(std)
    assert (found / grid == np.rint(found / grid)).all()
    # 300 normals: the root mean square leaves 1 ± 5/√600, and more lie beyond three std than this, each in fewer than 1 of 10^6 runs
    assert abs(np.sqrt(np.mean(errors**2)) - 1) < 5 / np.sqrt(600)
    assert (np.abs(errors) > 3).sum() <= binom.isf(1e-6, len(errors), 0.0028)
    assert epoch.setup.packing.group > epoch.setup.group == 1  # no noise for pairs that fit in but never share an output
    assert np.isclose(std, 2**20 * error_std(PARAMETERS[8192], epoch.setup.packing, 1) * np.sqrt(36 * 9), rtol=1e-12)


def test_one_prime_is_too_noisy_to_release() -> None:
    with pytest.raises(LocalError, match="too-noisy"):
        Epoch.of(vectors(3, 2, 20), release="gram")


def test_clients_that_encrypt_what_they_like_read_errors_through_the_noise() -> None:
    """Why the guarantee of "gram" and "distances" asks clients to follow the protocol: an error is a linear equation in the secret key."""
    parameters = PARAMETERS[8192]
    epoch = Epoch.of(np.zeros((2, 3, 784)), parameters, release="gram")
    ring, packing = ckks.arithmetic(parameters), epoch.setup.packing
    epoch.holder.enrol(epoch.server.receive(epoch.upload(0)))
    q = ring.moduli[0] * ring.moduli[1]
    large = q >> 12
    polynomial = np.zeros((2, parameters.ring), dtype=np.uint64)
    polynomial[:, 0] = [large % one for one in ring.moduli]
    announcement = decode(epoch.holder.announcement, Announcement, epoch.setup)
    encryptor = ring.seal.Encryptor(ring.context, announced_key(epoch.setup, epoch.holder_identity.public(), announcement.public_key))
    sides = []
    for _ in range(2):
        cipher = ring.zero(encryptor, public=True)
        ring.add_polynomial(cipher, polynomial)
        sides.append((ring.save(cipher),))
    epoch.holder.enrol(epoch.server.receive(signed_upload(epoch, sides[0], sides[1], client=1)))
    for request in epoch.server.requests(epoch.server.jobs(range(2))):
        epoch.holder.answer(request)
    found = epoch.holder.blocks[0, 1].ravel() * packing.scale**2 / large
    decryptor = ring.seal.Decryptor(ring.context, ring.load_secret_key(epoch.holder.secret_key()))
    plain = ring.seal.Plaintext()
    decryptor.decrypt(ring.load(epoch.server._uploads[0].left[0], 2), plain)
    errors = ring.coefficients(plain, packing.targets(0))  # client 0 sent zeros, so errors are all there is
    assert any(errors)
    assert np.abs(found - errors).max() < 0.1
    # and nothing that the key holder could notice by size
    assert np.abs(epoch.holder.blocks[0, 1]).max() < epoch.setup.bound**2


# --- what clients gain that encrypt what they like


def crafted(epoch: Epoch, client: int, left: dict[int, float], right: dict[int, float], *, by_key: bool = False) -> bytes:
    """An upload of polynomials, coefficients by exponent, of a client's choice; `by_key` multiplies the right one by the secret key."""
    ring = ckks.arithmetic(epoch.setup.parameters)
    encryptor = ring.seal.Encryptor(ring.context, announced_key(epoch.setup, epoch.holder_identity.public(), epoch.server.public_key))
    ciphers = [ring.zero(encryptor, public=True) for _ in range(2)]
    ring.add_polynomial(ciphers[0], residues(epoch, left))
    if by_key:  # without knowing it: decryption multiplies the second part by it
        literal = ring._literal(np.stack([0 * residues(epoch, right), residues(epoch, right)]), transformed=False)
        ring.evaluator.transform_to_ntt_inplace(literal)
        ring.evaluator.add_inplace(ciphers[1], literal)
    else:
        ring.add_polynomial(ciphers[1], residues(epoch, right))
    return signed_upload(epoch, (ring.save(ciphers[0]),), (ring.save(ciphers[1]),), client)


def residues(epoch: Epoch, coefficients: dict[int, float]) -> npt.NDArray[np.uint64]:
    n, made = epoch.setup.ring, np.zeros(epoch.setup.ring, dtype=np.int64)
    for exponent, value in coefficients.items():  # X^N = −1
        made[exponent % n] += round(value) * (1 if 0 <= exponent < n else -1)
    return ckks.arithmetic(epoch.setup.parameters).residues(made)


def answered_with(epoch: Epoch, uploads: dict[int, bytes]) -> None:
    """All blocks of all clients, of whom some send uploads of their own."""
    clients = range(len(epoch.identities))
    for client in clients:
        epoch.holder.enrol(epoch.server.receive(uploads.get(client) or epoch.upload(client)))
    for request in epoch.server.requests(epoch.server.jobs(clients)):
        epoch.holder.answer(request)


def test_a_label_tells_hostile_clients_a_coefficient_of_the_key() -> None:
    """Labels say on which side of a threshold a number lies, and here the number is what such a client likes: nothing large about it."""
    epoch = Epoch.of(vectors(10, 1, 8))
    packing, hub = epoch.setup.packing, 2.0**36
    uploads = {0: crafted(epoch, 0, {0: hub}, {})}
    wanted = {client: 100 + client for client in range(1, 10)}
    for client, at in wanted.items():
        uploads[client] = crafted(epoch, client, {}, {packing.r - 1 - at: packing.scale**2 / hub / 2}, by_key=True)
    answered_with(epoch, uploads)
    labels = [abs(epoch.holder.blocks[0, client][0, 0]) > 0.25 for client in wanted]
    ring = ckks.arithmetic(SMALL)
    plain = ring.seal.Plaintext()
    ones = np.ones((2, 1, SMALL.ring), dtype=np.uint64)  # 1 + the key
    decryptor = ring.seal.Decryptor(ring.context, ring.load_secret_key(epoch.holder.secret_key()))
    decryptor.decrypt(ring._literal(ones, transformed=True), plain)
    key = ring.coefficients(plain, list(wanted.values()))
    assert set(key) <= {-1, 0, 1}
    assert labels == [value != 0 for value in key]  # noise of std 0.007 in numbers that are 0 or ± 0.5
    assert max(abs(block).max() for block in epoch.holder.blocks.values()) < epoch.setup.bound**2


def test_a_label_tells_hostile_clients_on_which_side_of_a_threshold_a_coordinate_lies() -> None:
    epoch = Epoch.of(vectors(12, 1, 8))
    packing, coordinate, cut = epoch.setup.packing, 2, 0.98
    factors = {client: cut * 1.5 ** (client - 1) for client in range(1, 12)}
    at = packing.r - 1 - coordinate
    uploads = {client: crafted(epoch, client, {}, {at: factor * packing.scale}) for client, factor in factors.items()}
    answered_with(epoch, uploads)
    near = [client for client in factors if abs(epoch.holder.blocks[0, client][0, 0]) > cut]  # all that a label says
    truth = abs(epoch.rows[0, 0, coordinate])
    assert cut / factors[near[0]] <= truth * (1 + 1e-4)
    assert truth <= cut / factors[near[0] - 1] * (1 + 1e-4)


@pytest.mark.parametrize("group", [1, 4])
def test_a_client_and_the_key_holder_read_as_many_coordinates_of_others_as_pairs_share_an_output(group: int) -> None:
    found = []
    for hostile in (False, True):
        epoch = Epoch.of(vectors(4, 1, 8), group=group)
        packing, factor = epoch.setup.packing, 3.0
        # in slot s coordinate s of the left client's vector; its own is the last slot of an output
        right = {packing.r - 1 - s + (s - group + 1) * packing.span: factor * packing.scale for s in range(group)}
        answered_with(epoch, {3: crafted(epoch, 3, {}, right)} if hostile else {})
        found.append(np.array([epoch.holder.blocks[0, client][0, 0] for client in range(4)]))
    changed = (found[1] - found[0]) / factor
    changed[3] = found[1][3] / factor  # where nothing but its own vector was
    expected = epoch.rows[0, 0, :4] if group == 4 else np.array([0.0, 0.0, 0.0, epoch.rows[0, 0, 0]])
    assert np.abs(changed - expected).max() < 1e-4


# --- what is refused


def signed_upload(epoch: Epoch, left: tuple[bytes, ...], right: tuple[bytes, ...], client: int = 2) -> bytes:
    """A client that signs whatever it likes."""
    digest, statement = epoch.setup.digest, statement_of(epoch.server.public_key, client, ciphertexts_digest(left, right))
    signature = sign(epoch.identities[client], LABEL + "upload", digest, statement)
    return encode(Upload(digest, client, left, right, signature))


def bomb(raw_bytes: int) -> bytes:
    """A SEAL object whose zstd frame would become `raw_bytes` zeros: repeated blocks of 128 KiB, four bytes each."""
    blocks = raw_bytes >> 17
    frame = b"\x28\xb5\x2f\xfd\x00\x70" + b"".join(
        ((1 << 17) << 3 | 1 << 1 | (number == blocks - 1)).to_bytes(3, "little") + b"\x00" for number in range(blocks)
    )
    return struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, 2, 0, 16 + len(frame)) + frame


def test_ciphertexts_from_strangers_are_refused(three: Epoch) -> None:
    good = decode(three.upload(2), Upload, three.setup)
    other = Epoch.of(three.rows, PARAMETERS[8192])
    foreign = decode(other.upload(2), Upload, other.setup)
    ring = ckks.arithmetic(SMALL)
    one = good.left[0]
    bare = ring.load(one, 2)
    ring.evaluator.transform_from_ntt_inplace(bare)
    bad = {
        "random": np.random.default_rng(0).bytes(len(one)),
        "empty": b"",
        "truncated": one[:-1],
        "lengthened": one + b"\x00",
        "header only": one[:16],
        "other parameters": foreign.left[0],
        "oversized": one + bytes(largest_bytes(SMALL, 2)),
        "bomb": bomb(1 << 30),
        "not transformed": ring.save(bare),
        "three parts": ring.save(_square(one)),
        "transparent": ring.save(ring._literal(np.zeros((2, 1, SMALL.ring), dtype=np.uint64), transformed=True)),
    }
    for name, data in bad.items():
        for left, right in (((data,), good.right), (good.left, (data,))):
            try:
                three.server.receive(signed_upload(three, left, right))
            except MalformedMessage:
                continue
            pytest.fail(name)
    for left, right in (((), ()), (good.left * 2, good.right)):
        with pytest.raises(RemoteError, match="malformed"):
            three.server.receive(signed_upload(three, left, right))
    assert three.server.clients == ()


def _square(data: bytes) -> object:
    ring = ckks.arithmetic(SMALL)
    cipher, out = ring.load(data, 2), ring.seal.Ciphertext()
    ring.evaluator.multiply(cipher, cipher, out)
    return out


def flipped(data: bytes, bit: int) -> bytes:
    """One bit of `data` changed, counted modulo its length."""
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


@pytest.fixture(scope="module")
def under_way() -> tuple[Epoch, bytes, bytes]:
    """An upload and a request that nobody has received yet."""
    epoch = answered()
    return epoch, epoch.upload(2), next(iter(epoch.server.requests(epoch.server.jobs([1]))))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_bit_that_changes_under_way_is_refused(under_way: tuple[Epoch, bytes, bytes], bit: int) -> None:
    epoch, upload, request = under_way
    sent, asked = decode(upload, Upload, epoch.setup), decode(request, Request, epoch.setup)
    relayed = [
        (epoch.server.receive, upload, flipped(upload, bit)),
        (epoch.holder.answer, request, flipped(request, bit)),
        # by who can make the checksum anew, but not the signature
        (epoch.server.receive, upload, encode(structs.replace(sent, left=(flipped(sent.left[0], bit),)))),
        (epoch.holder.answer, request, encode(structs.replace(asked, ciphertext=flipped(asked.ciphertext, bit)))),
    ]
    before = epoch.server.clients, dict(epoch.holder.blocks)
    for machine, good, bad in relayed:
        assert good != bad
        with pytest.raises(RemoteError):
            machine(bad)
        assert (epoch.server.clients, epoch.holder.blocks) == before


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=10, deadline=None)
def test_a_client_that_signs_a_changed_ciphertext_is_refused_or_spoils_its_own_rows_only(bit: int, left: bool) -> None:
    epoch = answered()
    good = decode(epoch.upload(2), Upload, epoch.setup)
    assert epoch.setup.group == 1
    assert epoch.setup.packing.group > 1  # where pairs share outputs it could spoil more
    changed = (flipped(good.left[0], bit),)
    try:
        enrolment = epoch.server.receive(signed_upload(epoch, *((changed, good.right) if left else (good.left, changed))))
    except MalformedMessage:
        assert epoch.server.clients == (0, 1)
        return
    epoch.holder.enrol(enrolment)
    for request in epoch.server.requests(epoch.server.jobs(range(3))):
        epoch.holder.answer(request)
    assert len(epoch.holder.blocks) == 6
    assert np.isfinite(epoch.gram()).all()
    assert np.abs(epoch.gram() - epoch.truth())[:4, :4].max() < 2e-5


def answered() -> Epoch:
    """Clients 0 and 1 are enrolled, 2 is not, and nothing was asked."""
    epoch = Epoch.of(vectors(3, 2, 20))
    epoch.join(range(2))
    return epoch


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_bytes_are_judged_before_seal_sees_them(noise: bytes, at: int, value: int) -> None:
    honest = bytearray(bomb(1 << 17))
    honest[min(at, len(honest) - 1)] = value
    for data in (noise, bytes(honest), honest[:16] + noise, struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, 2, 0, 16 + len(noise)) + noise):
        try:
            check_outside(bytes(data), 1 << 17)
        except MalformedMessage:
            continue
        assert len(data) <= (1 << 17) + 1024


def test_a_bomb_is_refused_without_the_memory_it_asks_for() -> None:
    data = bomb(1 << 31)
    assert len(data) < 70_000
    with pytest.raises(MalformedMessage):
        check_outside(data, 1 << 17)
    ring = ckks.arithmetic(SMALL)
    with pytest.raises(MalformedMessage):
        ring.load(data, 2)


def test_uploads_and_enrolments_need_the_roster_and_come_once() -> None:
    epoch = Epoch.of(vectors(3, 2, 20))
    upload = epoch.upload(0)
    enrolment = epoch.server.receive(upload)
    with pytest.raises(RemoteError, match="enrolled-before"):
        epoch.server.receive(upload)
    epoch.holder.enrol(enrolment)
    with pytest.raises(RemoteError, match="enrolled-before"):
        epoch.holder.enrol(enrolment)
    stranger = replace(epoch, identities=[Identity.create(number) for number in range(3)])
    with pytest.raises(RemoteError, match="bad-signature"):
        epoch.server.receive(stranger.upload(1))
    outside = replace(epoch, identities=[Identity.create(9)] * 3)
    with pytest.raises(RemoteError, match="bad-signature"):
        epoch.server.receive(outside.upload(1))
    later = Setup(**{name: getattr(epoch.setup, name) for name in epoch.setup.__struct_fields__} | {"epoch": 1})
    machine = KeyHolder(later, epoch.holder_identity, epoch.server_identity.public(), epoch.roster)
    with pytest.raises(MalformedMessage):
        machine.enrol(enrolment)
    with pytest.raises(RemoteError):
        CkksServer(epoch.setup, machine.announcement, epoch.holder_identity.public(), epoch.roster, epoch.server_identity)
    with pytest.raises(RemoteError, match="bad-signature"):
        ckks.encrypt(epoch.setup, epoch.holder.announcement, epoch.server_identity.public(), epoch.identities[1], epoch.rows[1])


def test_decryption_is_capped_and_authenticated() -> None:
    epoch = Epoch.of(vectors(3, 2, 700))
    requests = epoch.join(range(2))
    assert [decode(request, Request, epoch.setup).rights for request in requests] == [(0,), (1,), (1,)]

    def forged(left: int, rights: tuple[int | None, ...], by: Identity, data: bytes | None = None) -> bytes:
        ciphertext = decode(requests[1], Request, epoch.setup).ciphertext if data is None else data
        statement = signed_request(epoch.server.public_key, left, rights, ciphertext)
        signature = sign(by, LABEL + "request", epoch.setup.digest, statement)
        return encode(Request(epoch.setup.digest, left, rights, ciphertext, signature))

    server, cases = epoch.server_identity, []
    cases.append((forged(0, (2,), server), "not-enrolled"))
    cases.append((forged(0, (1,), epoch.identities[0]), "bad-signature"))
    cases.append((forged(0, (None,), server), "malformed"))
    cases.append((forged(0, (1, 1), server), "malformed"))
    cases.append((forged(0, (1,), server, b"\x00" * 1000), "malformed"))
    cases.append((forged(0, (1,), server, decode(epoch.upload(0), Upload, epoch.setup).left[0]), "malformed"))  # an upload as it is
    cases.append((requests[0][:-1], "malformed"))
    for data, code in cases:
        with pytest.raises(RemoteError, match=code):
            epoch.holder.answer(data)
    assert not epoch.holder.blocks
    for request in requests:
        epoch.holder.answer(request)
    for again in (requests[0], forged(0, (1,), server), forged(1, (0,), server)):
        with pytest.raises(RemoteError, match="answered-before"):
            epoch.holder.answer(again)
    assert sorted(epoch.holder.blocks) == [(0, 0), (0, 1), (1, 1)]


def test_nothing_made_under_another_key_fits_an_epoch_of_the_same_terms() -> None:
    epoch = Epoch.of(vectors(3, 2, 20))
    upload, before = epoch.upload(0), epoch.holder
    enrolment = epoch.server.receive(upload)
    before.enrol(enrolment)
    (request,) = epoch.server.requests(epoch.server.jobs([0]))
    again = KeyHolder(epoch.setup, epoch.holder_identity, epoch.server_identity.public(), epoch.roster)
    server = CkksServer(epoch.setup, again.announcement, epoch.holder_identity.public(), epoch.roster, epoch.server_identity)
    for machine, said in ((server.receive, upload), (again.enrol, enrolment), (again.answer, request)):
        with pytest.raises(RemoteError, match="bad-signature"):
            machine(said)
    assert before.answer(request) == ((0, 0),)
    kept = KeyHolder.from_bytes(before.to_bytes(), epoch.setup, epoch.holder_identity, epoch.server_identity.public(), epoch.roster)
    with pytest.raises(RemoteError, match="answered-before"):
        kept.answer(request)  # it still knows its own key


# --- bytes in and out of SEAL


def test_what_one_saves_or_loads_is_never_what_another_thread_saves(three: Epoch) -> None:
    ring = ckks.arithmetic(SMALL)
    secret = ring.load_secret_key(three.holder.secret_key())
    data = decode(three.upload(0), Upload, three.setup).left[0]
    cipher = ring.load(data, 2)

    class Interrupted:
        """SEAL lets go of the interpreter's lock within its calls: another thread may come in between."""

        def save(self, path: str) -> None:
            cipher.save(path)
            ring.save(secret)

        def load(self, context: object, path: str) -> None:
            ring.save(secret)
            ring.seal.Ciphertext().load(context, path)

    assert ring.save(Interrupted()) == ring.save(cipher)
    ring._load(Interrupted(), data)

    def saving(thing: object, found: list[bytes]) -> None:
        found += {ring.save(thing) for _ in range(100)}

    said: tuple[list[bytes], list[bytes]] = ([], [])
    threads = [threading.Thread(target=saving, args=both) for both in zip((cipher, secret), said, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ([ring.save(cipher)], [ring.save(secret)])


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files where the system lists them")
def test_no_file_stays_open() -> None:
    ring, before = ckks.arithmetic(SMALL), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(MalformedMessage):
            ring._load(ring.seal.Ciphertext(), b"no ciphertext")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_secret_is_shown() -> None:
    epoch = Epoch.of(vectors(2, 1, 10))
    assert "seed" not in repr(epoch.identities[0])
    assert "Secret" not in repr(vars(epoch.server))
    wrong = Roster(tuple(Identity.create(number).public() for number in range(2)))
    with pytest.raises(LocalError, match="wrong-roster"):
        KeyHolder(epoch.setup, epoch.holder_identity, epoch.server_identity.public(), wrong)


def test_machines_are_neither_copied_nor_pickled() -> None:
    """A copied key holder would answer a request twice, a pickle has the secret key in it."""
    epoch = Epoch.of(vectors(2, 1, 10))
    for machine in (epoch.holder, epoch.server):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                copied(machine)
    twin = epoch.holder.fork()
    enrolment = epoch.server.receive(epoch.upload(0))
    assert twin.enrol(enrolment) == 0
    assert epoch.holder.enrolled == set()
    assert twin.secret_key() == epoch.holder.secret_key()


def test_of_many_threads_with_one_request_one_gets_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = Epoch.of(vectors(1, 2, 20))
    (request,) = epoch.join([0])
    ring = ckks.arithmetic(SMALL)
    loaded = ring.load

    def slow(data: bytes, parts: int) -> object:
        sleep(0.01)  # lets the other threads in
        return loaded(data, parts)

    monkeypatch.setattr(ring, "load", slow)
    said: list[object] = []

    def ask() -> None:
        try:
            said.append(epoch.holder.answer(request))
        except RemoteError as error:
            said.append(error.code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said, key=str) == [((0, 0),)] + ["answered-before"] * 3


def test_a_packing_says_how_much_shares_an_output() -> None:
    assert [plan(PARAMETERS[8192], 3, 784, group=group).chunks for group in (1, 2, 4)] == [1, 2, 4]
    assert plan(SMALL, 3, 64).group == 6
    assert Packing(3, 784, 4096, 2, 1.0, 54).span <= 4096
