"""The key holder's machine for one clustering epoch: makes keys, decrypts only what is requested, and adds noise before a release."""

from threading import RLock
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from .. import codec
from ..entropy import Entropy, normals, system_entropy
from ..errors import LocalError, MalformedMessage, RemoteError
from ..keys import Identity, Roster, sign, verify, verify_key
from ..uncopied import uncopied
from .messages import LABEL, Announcement, Enrolment, Request, Setup, decode, encode, signed_request, signed_upload
from .parameters import release_grid, release_std
from .public_key import fresh_key
from .seal import arithmetic

__all__ = ["KeyHolder"]

Block = npt.NDArray[np.float64]
_LARGEST_NOISE = 0.25
_LARGEST_STATE_BYTES = 1 << 31


@uncopied("it has the secret key of an epoch")
class _State(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="ckks-holder"):
    """A machine between two messages: as secret as the key in it. `blocks` are p² float64 each, little-endian."""

    setup: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    secret: bytes
    announcement: bytes
    enrolled: tuple[int, ...]
    blocks: tuple[tuple[int, int, bytes], ...]


@uncopied("it has the secret key of an epoch, and a copy would answer again; see fork and to_bytes")
class KeyHolder:
    """Fresh keys for one epoch, the enrolled clients, and the blocks decrypted so far: `blocks[left, right]` (p, p).

    Under release "gram" and "distances" a block is noised and rounded as soon as it is decrypted, once, and the exact one is forgotten.

    Guarantee: it decrypts one block for each pair of clients that the roster's signatures enrolled in this epoch, p² numbers each, at the
    server's signed request. It does not collude with the server. The noise hides computing errors (which leak the key) from a server and
    clients that follow the protocol. Clients that encrypt what they like, such as one coefficient of the size of q, make errors of any size
    and read them through the noise, p² linear equations in the key for each pair of such clients: under "gram" and "distances" √(2N) / p of
    them that collude with the server come by the key. Noise in the vectors is no remedy: they know their own. Under "labels" each such
    client's label says on which side of a threshold a number of its choice lies, such as a coefficient of the key or a multiple of a
    coordinate of another's vector: about log2 k bits a client. 6500 bits give the key at N = 4096, fewer with lattice
    reduction. These numbers need be no larger than honest ones: no check can detect them.
    Reveals: it sees the Gram matrix (and how it was masked, nothing of the vectors beyond, see `products`). It cannot see that a request
    really is the product of two uploads: a server that lies can have p² numbers of its choice decrypted in place of each pair's, e.g.
    coordinates of a vector. Under "labels" it gets labels back; under "gram" it would read noisy values: CKKS with an apart key holder is
    for servers that are curious, not for ones that lie. Source: Li & Micciancio 2021 (why decryptions need noise before they are shown).
    """

    def __init__(
        self, setup: Setup, identity: Identity, server: bytes, roster: Roster, *, entropy: Entropy = system_entropy,
        saved: _State | None = None,
    ) -> None:  # fmt: skip
        if setup.roster != roster.digest or setup.most_clients > len(roster.keys):
            raise LocalError("wrong-roster")
        ring = arithmetic(setup.parameters)
        self.setup = setup
        self.std = release_std(setup.parameters, setup.packing, setup.group, setup.scalars) if setup.release != "labels" else 0.0
        if self.std > _LARGEST_NOISE * setup.bound**2:
            raise LocalError(
                "too-noisy", f"what is shown would need noise of std {self.std:.2g}: take a larger ring, or release labels only"
            )
        if saved is not None:
            self._secret = ring.load_secret_key(saved.secret)
            self.announcement = saved.announcement
        else:
            self._secret, key = fresh_key(setup, identity.public())
            self.announcement = encode(Announcement(setup.digest, key, sign(identity, LABEL + "key", setup.digest, key)))
        self._public_key = decode(self.announcement, Announcement, setup).public_key
        self._decryptor = ring.seal.Decryptor(ring.context, self._secret)
        self._lock = RLock()
        self._server = server
        self._roster = roster
        self._entropy = entropy
        self.enrolled: set[int] = set() if saved is None else set(saved.enrolled)
        self.blocks: dict[tuple[int, int], Block] = {}
        for left, right, values in () if saved is None else saved.blocks:
            self.blocks[left, right] = np.frombuffer(values, "<f8").reshape(setup.p, setup.p)

    def fork(self) -> "KeyHolder":
        """The same keys; what is enrolled or answered with one of the two is not with the other. The caller keeps one of them only."""
        with self._lock:
            twin = object.__new__(KeyHolder)
            vars(twin).update(vars(self), _lock=RLock(), enrolled=set(self.enrolled), blocks=dict(self.blocks))
        return twin

    def to_bytes(self) -> bytes:
        """The machine, secret key included, for a store that only the key holder reads."""
        blocks = tuple((left, right, np.ascontiguousarray(block, "<f8").tobytes()) for (left, right), block in self.blocks.items())
        return codec.encode(_State(self.setup.digest, self.secret_key(), self.announcement, tuple(sorted(self.enrolled)), blocks))

    @classmethod
    def from_bytes(
        cls, data: bytes, setup: Setup, identity: Identity, server: bytes, roster: Roster, *, entropy: Entropy = system_entropy
    ) -> "KeyHolder":
        """The machine that `to_bytes` wrote, to be given the same terms. Raises `MalformedMessage` for another's."""
        saved = codec.decode(data, _State, _LARGEST_STATE_BYTES)
        if saved.setup != setup.digest or any(len(values) != 8 * setup.p**2 for _, _, values in saved.blocks):
            raise MalformedMessage
        return cls(setup, identity, server, roster, entropy=entropy, saved=saved)

    def secret_key(self) -> bytes:
        """The secret key: for the clients in symmetric mode, and for audits."""
        return arithmetic(self.setup.parameters).save(self._secret)

    def enrol(self, data: bytes) -> int:
        """Accept that a client takes part, by its own signature over this same key. Raises `RemoteError`."""
        message = decode(data, Enrolment, self.setup)
        client = message.client
        statement = signed_upload(self._public_key, client, message.ciphertexts)
        verify(self._roster, client, message.signature, LABEL + "upload", message.setup, statement)
        with self._lock:
            if client in self.enrolled:
                raise RemoteError("enrolled-before", client)
            if len(self.enrolled) >= self.setup.most_clients:
                raise RemoteError("over-cap", client)
            self.enrolled.add(client)
        return client

    def answer(self, data: bytes) -> tuple[tuple[int, int], ...]:
        """Decrypt the blocks of a request; which pairs they are. A refused one changes nothing. Threads come one after the other.

        Raises:
            RemoteError: "malformed", "bad-signature" (not the server's, or under another key), "not-enrolled", "answered-before".
        """
        request = decode(data, Request, self.setup)
        statement = signed_request(self._public_key, request.left, request.rights, request.ciphertext)
        verify_key(self._server, 0, request.signature, LABEL + "request", request.setup, statement)
        packing, ring = self.setup.packing, arithmetic(self.setup.parameters)
        asked = [(slot, (request.left, right)) for slot, right in enumerate(request.rights) if right is not None]
        pairs = [pair for _, pair in asked]
        if not pairs or len(request.rights) > self.setup.group or len({frozenset(pair) for pair in pairs}) != len(pairs):
            raise MalformedMessage
        with self._lock:
            for left, right in pairs:
                for client in (left, right):
                    if client not in self.enrolled:
                        raise RemoteError("not-enrolled", client)
                if (left, right) in self.blocks or (right, left) in self.blocks:
                    raise RemoteError("answered-before", left)
            plain = ring.seal.Plaintext()
            self._decryptor.decrypt(ring.load(request.ciphertext, 3), plain)
            positions = [at for slot, _ in asked for at in packing.targets(slot)]
            values = np.array(ring.coefficients(plain, positions), dtype=np.float64) / packing.scale**2
            for pair, block in zip(pairs, values.reshape(-1, packing.p, packing.p), strict=True):
                self.blocks[pair] = self._shown(block, own=pair[0] == pair[1])
        return tuple(pairs)

    def _shown(self, block: Block, *, own: bool) -> Block:
        if self.std:
            grid = release_grid(self.std)
            noise = self.std * normals(self._entropy(32), block.size).reshape(block.shape)
            # the grid hides what floating point would show of the noise's lowest bits
            block = np.rint((block + noise) / grid) * grid
        return np.triu(block) + np.triu(block, 1).T if own else block
