"""The bridge to SEAL (by TenSEAL's `sealapi`): exact integer polynomials in and out, and untrusted ciphertexts.

Everything stays at scale 1: the quantisation of `Packing` is the only scale, so plaintexts are exact integers modulo q, no encoder's
floating point in between. SEAL reads and writes files only; these are in memory, and each serves once: secret keys pass through them.

SEAL draws keys and noise from its own generator (Blake2xb, seeded by the operating system); our `Entropy` feeds masks only.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..entropy import Entropy, keystream
from ..errors import LocalError, MalformedMessage
from .parameters import Parameters

__all__ = ["Arithmetic", "Cipher", "arithmetic", "largest_bytes"]

Residues = npt.NDArray[np.uint64]
Cipher = Any
"""A SEAL ciphertext; TenSEAL has no types."""

_HEADER = struct.Struct("<HBBBBHQ")  # magic, header size, version, compression, reserved, bytes in all
_META = struct.Struct("<4Q?QQQdQ")  # parameters, transformed, parts, degree, primes, scale, correction
_MAGIC, _VERSION, _PLAIN, _ZSTD = 0xA15E, (4, 3), 0, 2
_BLOCK = 1 << 17
_LARGEST_WINDOW = 1 << 23


def largest_bytes(parameters: Parameters, parts: int) -> int:
    """No honest ciphertext of so many parts is longer: its residues, and a kilobyte for headers and framing."""
    return parts * parameters.primes * parameters.ring * 8 + 1024


def check_outside(data: bytes, raw_bytes: int) -> None:
    """Refuses bytes that are not one SEAL object of at most `raw_bytes` after decompression, looking at headers only.

    SEAL decompresses everything before it checks the content, so a few kilobytes could become gigabytes. A zstd frame says how much each of
    its blocks can become at most: these bounds are added up first. (Honest frames cut blocks short, so the sum may be a few times too
    large.)

    Raises:
        MalformedMessage.
    """
    if not isinstance(data, bytes) or not _HEADER.size < len(data) <= raw_bytes + 1024:
        raise MalformedMessage
    magic, size, major, minor, compression, reserved, total = _HEADER.unpack_from(data)
    if (magic, size, major, reserved, total) != (_MAGIC, _HEADER.size, _VERSION[0], 0, len(data)) or minor > _VERSION[1]:
        raise MalformedMessage
    if compression == _PLAIN:
        return
    if compression != _ZSTD or _inflated_at_most(data[_HEADER.size :]) > 4 * (raw_bytes + _BLOCK):
        raise MalformedMessage


def _inflated_at_most(frame: bytes) -> int:
    """An upper bound on what one zstd frame (RFC 8878, section 3.1.1) becomes; frames with trailing bytes or dictionaries are refused."""
    try:
        if frame[:4] != b"\x28\xb5\x2f\xfd":
            raise MalformedMessage
        descriptor, at = frame[4], 5
        single, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
        if descriptor & 0b1011:  # a dictionary or reserved bits
            raise MalformedMessage
        if not single:
            exponent, mantissa = frame[at] >> 3, frame[at] & 7
            if (1 << 10 + exponent) * (8 + mantissa) // 8 > _LARGEST_WINDOW:
                raise MalformedMessage
            at += 1
        at += ((1 if single else 0), 2, 4, 8)[descriptor >> 6]
        inflated, last = 0, 0
        while not last:
            header = int.from_bytes(frame[at : at + 3], "little")
            last, kind, size = header & 1, header >> 1 & 3, header >> 3
            if kind == 3 or at + 3 > len(frame):
                raise MalformedMessage
            inflated += size if kind in (0, 1) else _BLOCK  # raw and repeated blocks say their size; a compressed one is at most a block
            at += 3 + (1 if kind == 1 else size)
        if at + 4 * checksum != len(frame):
            raise MalformedMessage
    except IndexError:
        raise MalformedMessage from None
    return inflated


class Arithmetic:
    """SEAL's objects for one set of parameters, in one process."""

    def __init__(self, parameters: Parameters) -> None:
        try:
            import tenseal.sealapi as seal
        except ImportError:
            raise LocalError("no-tenseal", "CKKS needs TenSEAL, which is not installed: pip install tenseal, or 'cflpriv[ckks]'") from None
        self.seal = seal
        self.parameters = parameters
        encryption = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
        encryption.set_poly_modulus_degree(parameters.ring)
        encryption.set_coeff_modulus(seal.CoeffModulus.Create(parameters.ring, list(parameters.bits)))
        level = seal.SEC_LEVEL_TYPE.NONE if parameters.insecure else seal.SEC_LEVEL_TYPE.TC128
        self.context = seal.SEALContext(encryption, True, level)
        if not self.context.parameters_set():
            raise LocalError("bad-parameters", str(self.context.parameters_error_message()))
        self.moduli = [int(modulus.value()) for modulus in self.context.first_context_data().parms().coeff_modulus()]
        self.key_moduli = [int(modulus.value()) for modulus in self.context.key_context_data().parms().coeff_modulus()]
        self._id, self._key_id = tuple(self.context.first_parms_id()), tuple(self.context.key_parms_id())
        self.evaluator = seal.Evaluator(self.context)
        self._encoder = seal.CKKSEncoder(self.context)
        self._short = None  # the same modulus q without the prime that carries keys: encrypting there costs half
        if len(parameters.bits) > 1:
            encryption.set_coeff_modulus(self.context.first_context_data().parms().coeff_modulus())
            self._short = seal.SEALContext(encryption, False, level)
        ones = np.zeros((2, parameters.primes, parameters.ring), dtype=np.uint64)
        ones[1] = 1
        self._ones = self._literal(ones, transformed=True)  # (0, 1): SEAL refuses operations that would end in (m, 0)

    # --- bytes

    def save(self, thing: Any) -> bytes:
        """SEAL's own encoding (zstd) of a ciphertext or key."""
        with _file() as (handle, path):
            thing.save(path)
            return os.pread(handle, os.fstat(handle).st_size, 0)

    def load(self, data: bytes, parts: int) -> Cipher:
        """A ciphertext of so many parts from untrusted bytes.

        Raises:
            MalformedMessage: for all else, ciphertexts under other parameters and transparent ones (which encrypt nothing) included.
        """
        check_outside(data, largest_bytes(self.parameters, parts))
        ciphertext = self.seal.Ciphertext()
        self._load(ciphertext, data)
        whole = (
            ciphertext.is_ntt_form() and ciphertext.size() == parts and tuple(ciphertext.parms_id()) == self._id and ciphertext.scale == 1.0
        )
        if not whole or ciphertext.is_transparent():
            raise MalformedMessage
        return ciphertext

    def key_literal(self, residues: Residues) -> Any:
        """A public key with given parts, shape (2, key primes, N), transformed."""
        key = self.seal.PublicKey()
        self._load(key, self._written(residues, self._key_id, transformed=True))
        return key

    def values(self, thing: Any) -> Residues:
        """The residues of a SEAL ciphertext or plaintext, flat, as it has them."""
        array = thing.dyn_array()
        return np.array([array.at(i) for i in range(array.size())], dtype=np.uint64)

    def load_secret_key(self, data: bytes) -> Any:
        """A secret key. Raises `MalformedMessage`."""
        check_outside(data, len(self.parameters.bits) * self.parameters.ring * 8)
        key = self.seal.SecretKey()
        self._load(key, data)
        return key

    def _load(self, into: Any, data: bytes, context: Any = None) -> None:
        with _file() as (handle, path):
            os.pwrite(handle, data, 0)
            try:
                into.load(context or self.context, path)
            except (RuntimeError, ValueError, IndexError, MemoryError):  # SEAL's refusals, as pybind passes them on
                raise MalformedMessage from None

    def _literal(self, residues: Residues, *, transformed: bool) -> Cipher:
        """A ciphertext with given parts, shape (parts, primes, N)."""
        ciphertext = self.seal.Ciphertext()
        self._load(ciphertext, self._written(residues, self._id, transformed=transformed))
        return ciphertext

    def _written(self, residues: Residues, parameters: tuple[int, ...], *, transformed: bool) -> bytes:
        """SEAL's encoding, uncompressed, of parts (parts, primes, N) under the parameters of this id."""
        parts, primes, n = residues.shape
        values = residues.astype("<u8").tobytes()
        inner = _HEADER.pack(_MAGIC, _HEADER.size, *_VERSION, _PLAIN, 0, _HEADER.size + 8 + len(values)) + struct.pack("<Q", residues.size)
        body = _META.pack(*parameters, transformed, parts, n, primes, 1.0, 1) + inner + values
        return _HEADER.pack(_MAGIC, _HEADER.size, *_VERSION, _PLAIN, 0, _HEADER.size + len(body)) + body

    # --- polynomials

    def residues(self, coefficients: npt.NDArray[np.int64]) -> Residues:
        """Signed integers (N,) modulo each prime, (primes, N). Absolute values must be below the primes."""
        return np.stack([np.where(coefficients < 0, coefficients + q, coefficients) for q in self.moduli]).astype(np.uint64)

    def uniform(self, entropy: Entropy, zero_at: list[int]) -> Residues:
        """A polynomial uniform modulo q, but for zeros at the positions `zero_at`: by the Chinese remainder theorem, prime by prime."""
        n = self.parameters.ring
        drawn = np.empty((self.parameters.primes, n), dtype=np.uint64)
        for row, q in zip(drawn, self.moduli, strict=True):
            mask, filled = np.uint64((1 << q.bit_length()) - 1), 0
            while filled < n:  # keep what is below q: at least every second draw is
                words = np.frombuffer(keystream(entropy(32), 8 * (n + 64)), dtype="<u8") & mask
                kept = words[words < q][: n - filled]
                row[filled : filled + len(kept)] = kept
                filled += len(kept)
        drawn[:, zero_at] = 0
        return drawn

    def add_polynomial(self, cipher: Cipher, polynomial: Residues) -> None:
        """Add a polynomial (primes, N), given by its coefficients, to what `cipher` encrypts, exactly and in place."""
        both = np.zeros((2, *polynomial.shape), dtype=np.uint64)
        both[0] = polynomial
        both[1, :, 0] = 1
        literal = self._literal(both, transformed=False)
        self.evaluator.transform_to_ntt_inplace(literal)  # the constant 1 becomes all ones
        self.evaluator.add_inplace(cipher, literal)
        self.evaluator.sub_inplace(cipher, self._ones)

    def zero(self, encryptor: Any, *, public: bool) -> Cipher:
        """A fresh encryption of 0."""
        cipher = self.seal.Ciphertext()
        if public:
            encryptor.encrypt_zero(cipher)
        else:
            encryptor.encrypt_zero_symmetric(cipher)
        cipher.scale = 1.0
        return cipher

    def masker(self, public_key: Any) -> Any:
        """What `quick_zero` encrypts with: the public key modulo q, which is its first primes' part."""
        if self._short is None:
            return self.seal.Encryptor(self.context, public_key)
        n, primes = self.parameters.ring, self.parameters.primes
        whole = self.values(public_key.data()).reshape(2, -1, n)
        short = self.seal.PublicKey()
        self._load(short, self.save(self._literal(whole[:, :primes], transformed=True)), self._short)
        return self.seal.Encryptor(self._short, short)

    def quick_zero(self, masker: Any) -> Cipher:
        """A fresh public-key encryption of 0 directly modulo q: quicker than `zero`, with more noise (`parameters.mask_std`)."""
        cipher = self.seal.Ciphertext()
        masker.encrypt_zero(self.context.first_parms_id(), cipher)
        cipher.scale = 1.0
        return cipher

    def monomial(self, exponent: int) -> Any:
        """X^exponent as a plaintext: its value at the root of slot i, ζ^(3^i exponent). The encoder rounds to exact integers."""
        n = self.parameters.ring
        powers = np.array([pow(3, i, 2 * n) for i in range(n // 2)])
        plaintext = self.seal.Plaintext()
        self._encoder.encode(list(np.exp(1j * np.pi / n * (powers * exponent % (2 * n)))), 1.0, plaintext)
        return plaintext

    def coefficients(self, plain: Any, positions: list[int]) -> list[int]:
        """Some coefficients of a decrypted polynomial, exactly, in (−q/2, q/2]."""
        holder = self.seal.Ciphertext()
        self.evaluator.add_plain(self._ones, plain, holder)
        self.evaluator.transform_from_ntt_inplace(holder)
        values, n = holder.dyn_array(), self.parameters.ring
        modulus, coefficients = 1, [0] * len(positions)
        for row, q in enumerate(self.moduli):  # Garner: x = x₀ + q₀ (x₁ − x₀) / q₀ mod q₁ …
            inverse = pow(modulus, -1, q)
            coefficients = [
                x + modulus * ((values.at(row * n + at) - x) * inverse % q) for x, at in zip(coefficients, positions, strict=True)
            ]
            modulus *= q
        return [x - modulus if 2 * x > modulus else x for x in coefficients]


@contextmanager
def _file() -> Iterator[tuple[int, str]]:
    """A fresh file in memory and its path. Never shared: threads and forked processes could read each other's keys."""
    handle = os.memfd_create("cflpriv") if hasattr(os, "memfd_create") else _temporary()
    try:
        yield handle, f"/proc/self/fd/{handle}" if os.path.isdir("/proc/self/fd") else f"/dev/fd/{handle}"
    finally:
        os.close(handle)


def _temporary() -> int:
    import tempfile

    handle, path = tempfile.mkstemp()
    os.unlink(path)
    return handle


@lru_cache(maxsize=4)
def arithmetic(parameters: Parameters) -> Arithmetic:
    """The arithmetic of these parameters, made once in a process.

    Raises:
        LocalError: "no-tenseal" without TenSEAL, "bad-parameters" for what is not 128 bits secure.
    """
    return Arithmetic(parameters)
