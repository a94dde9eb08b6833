"""The server's arithmetic: one ciphertext product for a block of inner products, and the mask without which it must not be handed on.

**The trap.** A product (c₀, c₁, c₂) that was not rerandomised tells the key holder far more than it decrypts to. With c₁ and c₂ of a few
pairs it solves linear equations for every full product polynomial, however c₀ is masked; `tests/protocols/test_ckks_trap.py` does. So
every output gets a fresh public-key *encryption* of a mask that is uniform modulo q on all coefficients but the wanted ones: c₀ and c₁ then
look uniform to someone who does not know that encryption's randomness, also to the key holder. c₂ stays as it is: a product of the second
parts of two fresh ciphertexts, pseudo-random without their randomness. This is an argument, not a proof.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ..entropy import Entropy, system_entropy
from ..errors import LocalError
from .messages import Setup
from .parameters import Packing
from .public_key import public_key
from .seal import Arithmetic, Cipher, arithmetic

__all__ = ["Job", "Output", "compute", "grouped", "mask", "product", "rerandomised"]


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
    """Σ_chunks A · B, three parts, **bare**: not for the key holder's eyes before `rerandomised`."""
    total = None
    for a, b in zip(left, together, strict=True):
        one = ring.seal.Ciphertext()
        ring.evaluator.multiply(a, b, one)
        if total is None:
            total = one
        else:
            ring.evaluator.add_inplace(total, one)
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


def compute(setup: Setup, holder: bytes, announced: bytes, job: Job, entropy: Entropy = system_entropy) -> list[Output]:
    """All outputs of a job, one for each left client that has a wanted pair, under the key that `holder` announced.

    Raises:
        MalformedMessage: for ciphertexts that are none of this epoch's parameters.
    """
    ring, packing = arithmetic(setup.parameters), setup.packing
    masker = ring.masker(public_key(setup, holder, announced))
    monomials = [None, *(ring.monomial(slot * packing.span) for slot in range(1, len(job.rights)))]
    rights = [[ring.load(data, 2) for data in ciphers] for _, ciphers in job.rights]
    together = grouped(ring, packing, rights, monomials)
    outputs = []
    for (client, ciphers), wanted in zip(job.lefts, job.wanted, strict=True):
        if not any(wanted):
            continue
        bare = product(ring, [ring.load(data, 2) for data in ciphers], together)
        output = rerandomised(ring, bare, mask(ring, masker, packing, wanted, entropy))
        slots = tuple(right if asked else None for (right, _), asked in zip(job.rights, wanted, strict=True))
        outputs.append(Output(client, slots, ring.save(output)))
    return outputs
