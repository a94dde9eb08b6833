"""The server's arithmetic: one ciphertext product per block of inner products, and the mask it needs before it is sent on.

**The trap.** A product (c₀, c₁, c₂) that was not rerandomised reveals far more to the key holder than it decrypts to. With c₁ and c₂ of a
few pairs it solves linear equations for every full product polynomial, however c₀ is masked (`tests/unit/protocols/test_ckks_trap.py`). So
every output gets a fresh public-key *encryption* of a mask that is uniform modulo q on all coefficients but the wanted ones: c₀ and c₁ then
look uniform to someone who does not know that encryption's randomness, also to the key holder, as long as its own key is as it should be.

c₂ stays as it is, and **what the key holder sees of it is not pseudo-random**. With one chunk it is xᵢ yⱼ, the product of the second parts
of the two clients' ciphertexts: over all pairs, a matrix of rank one at each root (of rank `chunks` otherwise). One value more, such as the
x of one client that reveals it, gives the key holder all xᵢ and yⱼ: the second parts of everybody's ciphertexts. These alone, a u + e,
reveal nothing of the messages; with the first parts, p₀ u + e + m, its key would open them. Those are in c₀ and c₁ only, under the mask's
encryption. No attack is known that gets from c₂ and the wanted coefficients to anything else, nor a proof that there is none: RLWE with
these hints is what it would rest on.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Event, Thread
from typing import Any

import msgspec

from ..entropy import Entropy, derive, keystream, system_entropy
from ..errors import LocalError
from .messages import Setup
from .parameters import Packing
from .public_key import announced_key
from .seal import Arithmetic, Cipher, arithmetic

__all__ = ["Job", "Output", "Products", "grouped", "mask", "product", "rerandomised"]


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Some left clients against one block of right ones, with their ciphertexts by chunk. `wanted[l][s]`: is that pair asked for?"""

    lefts: tuple[tuple[int, tuple[bytes, ...]], ...]
    rights: tuple[tuple[int, tuple[bytes, ...]], ...]
    wanted: tuple[tuple[bool, ...], ...]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One rerandomised product: the block of (left, rights[s]) in slot s."""

    left: int
    rights: tuple[int | None, ...]
    ciphertext: bytes


def grouped(ring: Arithmetic, packing: Packing, rights: Sequence[Sequence[Cipher]], monomials: Sequence[Any]) -> list[Cipher]:
    """Σ_s X^(s span) B_s for each chunk: right-hand ciphertexts side by side, once for all left-hand ones."""
    if len(rights) > packing.group:
        raise LocalError("out-of-range", f"{len(rights)} pairs for an output of {packing.group}")
    together = []
    for chunk in range(packing.chunks):
        total = rights[0][chunk]
        for slot in range(1, len(rights)):
            moved = ring.seal.Ciphertext()
            ring.evaluator.multiply_plain(rights[slot][chunk], monomials[slot], moved)
            moved.scale = 1.0
            both = ring.seal.Ciphertext()
            ring.evaluator.add(total, moved, both)
            total = both
        together.append(total)
    return together


def product(ring: Arithmetic, left: Sequence[Cipher], together: Sequence[Cipher]) -> Cipher:
    """Σ_chunks A · B, three parts, **bare**: must not reach the key holder before `rerandomised`."""
    total = None
    for a, b in zip(left, together, strict=True):
        term = ring.seal.Ciphertext()
        ring.evaluator.multiply(a, b, term)
        if total is None:
            total = term
        else:
            ring.evaluator.add_inplace(total, term)
    return total


def mask(ring: Arithmetic, masker: Any, packing: Packing, slots: Sequence[bool], entropy: Entropy) -> Cipher:
    """A fresh public-key encryption of a polynomial uniform mod q, but zero at the wanted coefficients of the `slots` that are true.

    It depends on no client, so it can be made ahead of time. Each serves once. `masker` is `ring.masker(public key)`.
    """
    open_at = [at for slot, wanted in enumerate(slots) if wanted for at in packing.targets(slot)]
    cipher = ring.quick_zero(masker)
    ring.add_polynomial(cipher, ring.uniform(entropy, open_at))
    return cipher


def rerandomised(ring: Arithmetic, bare: Cipher, fresh_mask: Cipher) -> Cipher:
    """What may be handed to the key holder."""
    ring.evaluator.add_inplace(bare, fresh_mask)
    return bare


class Products:
    """The server's arithmetic of one epoch, under the key that `holder` announced. What serves many jobs is made once: the key as masks
    take it, monomials, and ciphertexts as SEAL has them, by their bytes, as many as fit into `keep_bytes`.

    Masks may be made `ahead`, and each serves one output. Their randomness is of a seed drawn once, a fresh number each time.

    Raises:
        MalformedMessage: for an announced half that is none.
    """

    def __init__(
        self, setup: Setup, holder: bytes, announced: bytes, *, entropy: Entropy = system_entropy, keep_bytes: int = 1 << 28
    ) -> None:
        self._ring, self._packing, self._group = arithmetic(setup.parameters), setup.packing, setup.group
        self._seed, self._masks, self._numbers = entropy(32), deque[Cipher](), count()
        self._most_masks = keep_bytes // setup.parameters.ciphertext_bytes
        self._masker = self._ring.masker(announced_key(setup, holder, announced))
        self._monomials: list[Any] = [None]
        self._loaded: OrderedDict[bytes, Cipher] = OrderedDict()
        self._most_loaded = max(1, keep_bytes // setup.parameters.ciphertext_bytes)

    def load(self, data: bytes) -> Cipher:
        """A client's ciphertext, not to be changed. Raises `MalformedMessage`."""
        ciphertext = self._loaded.get(data)
        if ciphertext is None:
            ciphertext = self._loaded[data] = self._ring.load(data, 2)
            if len(self._loaded) > self._most_loaded:
                self._loaded.popitem(last=False)
        else:
            self._loaded.move_to_end(data)
        return ciphertext

    @contextmanager
    def ahead(self, masks: int) -> Iterator[None]:
        """Make masks for so many outputs, with all slots asked for, while the caller waits for something else."""
        done = Event()

        def make() -> None:
            while len(self._masks) < min(masks, self._most_masks) and not done.is_set():
                self._masks.append(self._mask([True] * self._group))

        thread = Thread(target=make, name="masks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @property
    def masks(self) -> int:
        """How many masks are ready."""
        return len(self._masks)

    def _mask(self, slots: Sequence[bool]) -> Cipher:
        return mask(self._ring, self._masker, self._packing, slots, self._draw)

    def _draw(self, size: int) -> bytes:
        """Another thread may draw at the same time, so it is not `entropy` that is asked."""
        return keystream(derive(self._seed, "masks", next(self._numbers)), size)

    def _ready_mask(self, slots: Sequence[bool]) -> Cipher:
        if self._masks and len(slots) == self._group and all(slots):
            return self._masks.popleft()
        return self._mask(slots)

    def compute(self, job: Job) -> list[Output]:
        """All outputs of a job, one for each left client that has a wanted pair.

        Raises:
            MalformedMessage: for ciphertexts that are none of this epoch's parameters.
        """
        ring, packing = self._ring, self._packing
        for slot in range(len(self._monomials), len(job.rights)):
            self._monomials.append(ring.monomial(slot * packing.span))
        rights = [[self.load(data) for data in ciphers] for _, ciphers in job.rights]
        together = grouped(ring, packing, rights, self._monomials)
        outputs = []
        for (client, ciphers), wanted in zip(job.lefts, job.wanted, strict=True):
            if not any(wanted):
                continue
            bare = product(ring, [self.load(data) for data in ciphers], together)
            output = rerandomised(ring, bare, self._ready_mask(wanted))
            slots = tuple(right if asked else None for (right, _), asked in zip(job.rights, wanted, strict=True))
            outputs.append(Output(client, slots, ring.save(output)))
        return outputs
