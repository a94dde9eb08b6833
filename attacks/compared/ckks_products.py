"""CKKS product leak: what a key holder learns from products that were masked but not rerandomised.

For each pair (i, j) the key holder receives c₂ = xᵢ yⱼ and c₁ = αᵢ yⱼ + xᵢ βⱼ of uploads (αᵢ, xᵢ) and (βⱼ, yⱼ), which decrypt to
mᵢ = αᵢ + xᵢ s and nⱼ = βⱼ + yⱼ s; c₀ has a mask wherever a coefficient is not meant to be seen. Then c₁ + 2 s c₂ = mᵢ yⱼ + xᵢ nⱼ, divided
by c₂: Pᵢ + Qⱼ with P = m/x, Q = n/y. From the sums of all pairs it knows all P and Q up to one polynomial t, (P + t, Q − t); and mᵢ nⱼ =
(Pᵢ + t)(Qⱼ − t) c₂, linear in t and t², is known at the wanted coefficients. Enough pairs give more equations than unknowns.

Source: ours. What it proves: bare products give the key holder every product polynomial whole, hence products of single coordinates, which
no inner product shows; the mask on c₀ does not help. What it does not: that products rerandomised by a fresh encryption leave nothing else.
A recorded run never sends a bare product. So this attack runs on its own example (`toy_products`), on a toy ring of the same arithmetic:
the linear algebra takes a second there. It is as good on a large ring. `examples/ckks_product_leak.py` runs it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...protocols.ckks import Parameters, arithmetic, plan
from ...protocols.ckks.client import packed
from ...protocols.ckks.parameters import Packing
from ...protocols.ckks.products import grouped, mask, product, rerandomised
from ...protocols.ckks.seal import Arithmetic, Cipher
from ...protocols.entropy import Entropy
from ...types import Array

__all__ = ["ToyProducts", "Ring", "toy_products", "products_from_bare", "share_recovered"]

ClientPair = tuple[int, int]
TOY = Parameters(128, (27, 27), insecure=True)
TOY_ROWS, TOY_DIMENSION, TOY_CLIENTS = 7, 2, 3


class Ring:
    """Polynomials modulo X^N + 1 and a prime q below 2^31 with 2N | q − 1, by their values at the roots."""

    def __init__(self, n: int, q: int) -> None:
        self.n, self.q = n, q
        root = next(r for r in (pow(g, (q - 1) // (2 * n), q) for g in range(2, 1000)) if pow(r, n, q) == q - 1)
        powers = [(2 * i + 1) * k % (2 * n) for i in range(n) for k in range(n)]
        table = [pow(root, e, q) for e in range(2 * n)]
        self.forward = np.array([table[e] for e in powers], dtype=np.int64).reshape(n, n)
        scaled = [table[-e % (2 * n)] * pow(n, -1, q) % q for e in powers]
        self.backward = np.array(scaled, dtype=np.int64).reshape(n, n).T

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
        solution = np.zeros(columns, dtype=np.int64)
        solution[pivots] = work[: len(pivots), -1]
        return solution


def products_from_bare(
    seen: Mapping[ClientPair, tuple[Array, Array, Array]], secret: Array, q: int, wanted: Sequence[int]
) -> dict[ClientPair, Array]:
    """Each pair's whole product polynomial (N,), coefficients modulo q, from the parts (c₀, c₁, c₂) that a key holder received.

    `seen` has all pairs i ≤ j of clients 0, 1, …; parts are coefficients (N,) modulo the prime q. `secret` (N,) is the key holder's key.
    `wanted` are the coefficients that the key holder may see. The result is right if the products are bare and pairs · |wanted| is at least
    2 N.
    """
    ring = Ring(len(secret), q)
    values = {pair: [ring.dot(ring.forward, part) for part in parts] for pair, parts in seen.items()}
    key = ring.dot(ring.forward, np.asarray(secret) % q)
    sums = {pair: (c1 + 2 * key * c2 % q) % q * ring.inverse(c2) % q for pair, (_, c1, c2) in values.items()}
    clients = sorted({client for pair in seen for client in pair})
    right = {j: sums[clients[0], j] for j in clients}
    left = {i: (sums[i, i] - right[i]) % q for i in clients}
    at = ring.backward[list(wanted)]  # wanted coefficients as functions of the values at the roots
    matrix, known = [], []
    for (i, j), (c0, c1, c2) in values.items():
        decrypted = (c0 + c1 * key % q + c2 * key % q * key % q) % q
        of_t = at * (c2 * ((right[j] - left[i]) % q) % q) % q
        of_square = at * (q - c2) % q
        matrix.append(np.concatenate([of_t, of_square], axis=1))
        known.append((ring.dot(at, decrypted) - ring.dot(at, left[i] * right[j] % q * c2 % q)) % q)
    t = ring.solve(np.concatenate(matrix), np.concatenate(known))[: ring.n]
    return {(i, j): ring.dot(ring.backward, (left[i] + t) % q * ((right[j] - t) % q) % q * c2 % q) for (i, j), (_, _, c2) in values.items()}


# --- an example -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ToyProducts:
    """Clients' `rows` (clients, p, d), and their pairs as a key holder receives them: `bare` with a masked c₀, and `fresh`, rerandomised.

    `truth` are the product polynomials (N,), `secret` the key, `q` the modulus.
    """

    rows: Array
    bare: Mapping[ClientPair, tuple[Array, Array, Array]]
    fresh: Mapping[ClientPair, tuple[Array, Array, Array]]
    truth: Mapping[ClientPair, Array]
    secret: Array
    q: int
    packing: Packing


def toy_products(entropy: Entropy, seed: int = 0) -> ToyProducts:
    """Three clients with random unit vectors, the real machines' packing, products, masks and rerandomising, on a toy ring.

    Raises `LocalError` "no-tenseal" without TenSEAL.
    """
    ring = arithmetic(TOY)
    packing = plan(TOY, TOY_ROWS, TOY_DIMENSION)
    generator = ring.seal.KeyGenerator(ring.context)
    public = ring.seal.PublicKey()
    generator.create_public_key(public)
    encryptor, masker = ring.seal.Encryptor(ring.context, public), ring.masker(public)
    decryptor = ring.seal.Decryptor(ring.context, generator.secret_key())

    def opened(cipher: Cipher) -> Array:
        plain = ring.seal.Plaintext()
        decryptor.decrypt(cipher, plain)
        return np.array(ring.coefficients(plain, list(range(TOY.ring))), dtype=np.int64)

    rows = np.random.default_rng(seed).normal(size=(TOY_CLIENTS, TOY_ROWS, TOY_DIMENSION))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    sides = [[_encrypted(ring, encryptor, polynomials[0]) for polynomials in packed(packing, client)] for client in rows]
    bare, fresh, truth = {}, {}, {}
    for i in range(TOY_CLIENTS):
        for j in range(i, TOY_CLIENTS):
            together = grouped(ring, packing, [[sides[j][1]]], [None])
            truth[i, j] = opened(product(ring, [sides[i][0]], together))
            pair_product = product(ring, [sides[i][0]], together)
            ring.add_polynomial(pair_product, ring.uniform(entropy, packing.targets(0)))
            bare[i, j] = ciphertext_parts(ring, pair_product)
            two = rerandomised(ring, product(ring, [sides[i][0]], together), mask(ring, masker, packing, [True], entropy))
            fresh[i, j] = ciphertext_parts(ring, two)
    secret = opened(ring._ones)  # (0, 1) decrypts to the secret
    return ToyProducts(rows, bare, fresh, truth, secret, ring.moduli[0], packing)


def _encrypted(ring: Arithmetic, encryptor: object, polynomial: Array) -> Cipher:
    cipher = ring.zero(encryptor, public=True)
    ring.add_polynomial(cipher, ring.residues(polynomial))
    return cipher


def ciphertext_parts(ring: Arithmetic, cipher: Cipher) -> tuple[Array, Array, Array]:
    """The three parts of a ciphertext under one prime, by coefficients (N,): anyone who has it can read them."""
    copy = ring.load(ring.save(cipher), 3)
    ring.evaluator.transform_from_ntt_inplace(copy)
    values, n = copy.dyn_array(), ring.parameters.ring
    flat = np.array([values.at(i) for i in range(3 * n)], dtype=np.int64)
    return flat[:n], flat[n : 2 * n], flat[2 * n :]


def share_recovered(recovered: Mapping[ClientPair, Array], toy: ToyProducts) -> float:
    """The share of coefficients, not wanted and so not meant to be seen, that came out exactly. By chance: 1/q of them."""
    hidden = sorted(set(range(len(toy.secret))) - set(toy.packing.targets(0)))
    return float(np.mean([(recovered[pair][hidden] - toy.truth[pair][hidden]) % toy.q == 0 for pair in toy.truth]))
