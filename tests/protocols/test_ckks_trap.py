"""The trap, as a regression test: what a key holder learns from a product that was masked but not rerandomised.

Per pair (i, j) the key holder receives c₂ = xᵢ yⱼ and c₁ = αᵢ yⱼ + xᵢ βⱼ of uploads (αᵢ, xᵢ) and (βⱼ, yⱼ), which decrypt to
mᵢ = αᵢ + xᵢ s and nⱼ = βⱼ + yⱼ s. So c₁ + 2 s c₂ = mᵢ yⱼ + xᵢ nⱼ, and divided by c₂: Pᵢ + Qⱼ with P = m/x, Q = n/y. From the sums of a
few pairs it knows all P and Q up to one polynomial t, (P + t, Q − t); and mᵢ nⱼ = (Pᵢ + t)(Qⱼ − t) c₂, linear in t and t², is known at
the wanted coefficients. Three clients give more equations than unknowns.
"""

import numpy as np
import pytest

from cflpriv.protocols.ckks import Parameters, arithmetic, plan
from cflpriv.protocols.ckks.client import packed
from cflpriv.protocols.ckks.parameters import Packing, mask_std
from cflpriv.protocols.ckks.products import grouped, mask, product, rerandomised
from cflpriv.protocols.ckks.seal import Arithmetic, Cipher
from cflpriv.protocols.entropy import public_entropy
from cflpriv.types import Array

pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")

N, P, D, CLIENTS = 128, 7, 2, 3
PARAMETERS = Parameters(N, (27, 27), insecure=True)  # a toy ring: the attack is linear algebra and as good on a large one


class Ring:
    """Polynomials modulo X^N + 1 and a prime below 2^31, by their values at the roots, in numpy."""

    def __init__(self, q: int) -> None:
        self.q = q
        root = next(r for r in (pow(g, (q - 1) // (2 * N), q) for g in range(2, 1000)) if pow(r, N, q) == q - 1)
        powers = [(2 * i + 1) * k % (2 * N) for i in range(N) for k in range(N)]
        table = [pow(root, e, q) for e in range(2 * N)]
        self.forward = np.array([table[e] for e in powers], dtype=np.int64).reshape(N, N)
        scaled = [table[-e % (2 * N)] * pow(N, -1, q) % q for e in powers]
        self.backward = np.array(scaled, dtype=np.int64).reshape(N, N).T

    def dot(self, matrix: Array, vector: Array) -> Array:
        return np.asarray((matrix * vector % self.q).sum(axis=-1) % self.q)

    def inverse(self, values: Array) -> Array:
        return np.array([pow(int(value), -1, self.q) for value in values], dtype=np.int64)

    def solve(self, matrix: Array, right: Array) -> Array:
        """A solution of matrix · z = right where there is one, else of as many of its rows as determine it."""
        work = np.concatenate([matrix, right[:, None]], axis=1) % self.q
        columns = matrix.shape[1]
        row = 0
        pivots = []
        for column in range(columns):
            below = np.flatnonzero(work[row:, column])
            if not len(below):
                continue
            work[[row, row + below[0]]] = work[[row + below[0], row]]
            work[row] = work[row] * pow(int(work[row, column]), -1, self.q) % self.q
            others = np.arange(len(work)) != row
            work[others] = (work[others] - work[others, column][:, None] * work[row] % self.q) % self.q
            pivots.append(column)
            row += 1
        found = np.zeros(columns, dtype=np.int64)
        found[pivots] = work[: len(pivots), -1]
        return found


Seen = dict[tuple[int, int], tuple[Array, Array, Array]]


def attack(ring: Ring, packing: Packing, seen: Seen, s: Array) -> dict[tuple[int, int], Array]:
    """What the key holder (secret s) makes of the parts it received: each pair's whole product polynomial, by coefficients."""
    q, values = ring.q, {pair: [ring.dot(ring.forward, part) for part in parts] for pair, parts in seen.items()}
    secret = ring.dot(ring.forward, s)
    sums = {pair: (c1 + 2 * secret * c2 % q) % q * ring.inverse(c2) % q for pair, (_, c1, c2) in values.items()}
    right = {j: sums[0, j] for j in range(CLIENTS)}
    left = {i: (sums[i, i] - right[i]) % q for i in range(CLIENTS)}
    targets = packing.targets(0)
    matrix, known = [], []
    for (i, j), (c0, c1, c2) in values.items():
        decrypted = (c0 + c1 * secret % q + c2 * secret % q * secret % q) % q
        at = ring.backward[targets]  # wanted coefficients as functions of the values at the roots
        of_t = at * (c2 * ((right[j] - left[i]) % q) % q) % q
        of_square = at * (q - c2) % q
        matrix.append(np.concatenate([of_t, of_square], axis=1))
        known.append((ring.dot(at, decrypted) - ring.dot(at, left[i] * right[j] % q * c2 % q)) % q)
    t = ring.solve(np.concatenate(matrix), np.concatenate(known))[:N]
    return {(i, j): ring.dot(ring.backward, (left[i] + t) % q * ((right[j] - t) % q) % q * c2 % q) for (i, j), (_, _, c2) in values.items()}


def parts(arithmetic_: Arithmetic, cipher: Cipher) -> tuple[Array, Array, Array]:
    """The three parts of a ciphertext, by coefficients: anyone who has it can read them."""
    copy = arithmetic_.load(arithmetic_.save(cipher), 3)
    arithmetic_.evaluator.transform_from_ntt_inplace(copy)
    values = copy.dyn_array()
    flat = np.array([values.at(i) for i in range(3 * N)], dtype=np.int64)
    return flat[:N], flat[N : 2 * N], flat[2 * N :]


@pytest.fixture(scope="module")
def scene() -> tuple[Ring, Packing, Array, Array, Seen, Seen, dict[tuple[int, int], Array]]:
    """Three clients' pairs as a key holder receives them: bare with masked c₀, and rerandomised; and the true products."""
    ring = arithmetic(PARAMETERS)
    packing = plan(PARAMETERS, P, D)
    assert packing.group == 1
    entropy = public_entropy("trap")
    generator = ring.seal.KeyGenerator(ring.context)
    public = ring.seal.PublicKey()
    generator.create_public_key(public)
    encryptor = ring.seal.Encryptor(ring.context, public)
    masker = ring.masker(public)
    decryptor = ring.seal.Decryptor(ring.context, generator.secret_key())

    def opened(cipher: Cipher) -> Array:
        plain = ring.seal.Plaintext()
        decryptor.decrypt(cipher, plain)
        return np.array(ring.coefficients(plain, list(range(N))), dtype=np.int64)

    rows = np.random.default_rng(0).normal(size=(CLIENTS, P, D))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    sides: list[tuple[list[Cipher], list[Cipher]]] = []
    for client in rows:
        both = []
        for polynomials in packed(packing, client):
            cipher = ring.zero(encryptor, public=True)
            ring.add_polynomial(cipher, ring.residues(polynomials[0]))
            both.append([cipher])
        sides.append((both[0], both[1]))
    bare: Seen = {}
    fresh: Seen = {}
    truth = {}
    for i in range(CLIENTS):
        for j in range(i, CLIENTS):
            together = grouped(ring, packing, [sides[j][1]], [None])
            truth[i, j] = opened(product(ring, sides[i][0], together))
            one = product(ring, sides[i][0], together)
            ring.add_polynomial(one, ring.uniform(entropy, packing.targets(0)))
            bare[i, j] = parts(ring, one)
            two = rerandomised(ring, product(ring, sides[i][0], together), mask(ring, masker, packing, [True], entropy))
            fresh[i, j] = parts(ring, two)
    s = opened(ring._ones)  # (0, 1) decrypts to the secret
    assert set(s) <= {-1, 0, 1}
    return Ring(ring.moduli[0]), packing, rows, s, bare, fresh, truth


Scene = tuple[Ring, Packing, Array, Array, Seen, Seen, dict[tuple[int, int], Array]]


def recovered(found: dict[tuple[int, int], Array], truth: dict[tuple[int, int], Array], q: int, hidden: list[int]) -> float:
    """The share of coefficients, not wanted and so not meant to be seen, that came out exactly."""
    return float(np.mean([(found[pair][hidden] - truth[pair][hidden]) % q == 0 for pair in truth]))


def test_bare_products_give_every_product_polynomial_away(scene: Scene) -> None:
    ring, packing, rows, s, bare, _, truth = scene
    hidden = sorted(set(range(N)) - set(packing.targets(0)))
    found = attack(ring, packing, bare, s)
    assert recovered(found, truth, ring.q, hidden) == 1.0
    # signature material: the product of single coordinates, which no inner product shows
    centred = np.where(found[0, 1] > ring.q // 2, found[0, 1] - ring.q, found[0, 1]) / packing.scale**2
    assert abs(centred[0] - rows[0, 0, 0] * rows[1, 0, D - 1]) < 0.05


def test_rerandomised_products_leave_the_attack_at_its_baseline(scene: Scene) -> None:
    ring, packing, _, s, _, fresh, truth = scene
    hidden = sorted(set(range(N)) - set(packing.targets(0)))
    found = attack(ring, packing, fresh, s)
    # a guess is right with probability 1/q ≈ 7e-9; of 474 coefficients one is right in 1 of 280 000 runs
    assert recovered(found, truth, ring.q, hidden) == 0.0
    guess = np.concatenate([found[pair][hidden] for pair in truth]) / ring.q
    true = np.concatenate([truth[pair][hidden] for pair in truth])
    # uncorrelated numbers: |r| √n is beyond 5 in fewer than 1 of 10^6 runs
    assert abs(np.corrcoef(guess, true)[0, 1]) * np.sqrt(len(true)) < 5


def test_wanted_coefficients_survive_rerandomising(scene: Scene) -> None:
    ring, packing, _, s, _, fresh, truth = scene
    secret = ring.dot(ring.forward, s % ring.q)
    for pair, (c0, c1, c2) in fresh.items():
        a, b, c = (ring.dot(ring.forward, part) for part in (c0, c1, c2))
        decrypted = ring.dot(ring.backward, (a + b * secret % ring.q + c * secret % ring.q * secret % ring.q) % ring.q)
        off = (decrypted - truth[pair]) % ring.q
        off = np.minimum(off, ring.q - off)
        wanted = packing.targets(0)
        assert off[wanted].max() < 6 * mask_std(PARAMETERS)  # the noise of one fresh encryption
        assert np.median(np.delete(off, wanted)) > ring.q / 16  # uniform elsewhere: the median is q/4
