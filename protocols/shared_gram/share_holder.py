"""A holder's machine for one clustering epoch: keeps its share of each client's vectors, and contributes masked products of shares."""

from collections.abc import Sequence
from hashlib import sha256
from threading import RLock
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from .. import codec
from ..entropy import Entropy, system_entropy
from ..errors import LocalError, MalformedMessage, RemoteError
from ..keys import Identity, Roster, agree, public_key, unseal
from ..uncopied import uncopied
from .contributing import contributed, contribution, deposit_digest, pair, statement_of
from .depositing import box_binding
from .prime_field import PRIME, Elements, at_zero, matrix_product, minus, plus, signed, times, uniform
from .terms import LABEL, LEAD, Delivery, GramTerms, announcement, check_deposit, checked_keys, decode

__all__ = ["ShareHolder"]

_LARGEST_STATE_BYTES = 1 << 33


@uncopied("it has the shares of an epoch")
class _State(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="share-holder"):
    """A machine between two messages: as secret as the shares in it, p·d elements each."""

    terms: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    seed: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    keys: bytes
    shares: tuple[tuple[int, bytes, bytes], ...]
    used: tuple[int, ...]


@uncopied("it has the shares of an epoch; see to_bytes")
class ShareHolder:
    """One holder's fresh key and its shares. The roster's first holder, the lead, opens the Gram matrix; the others contribute.

    Guarantee: it contributes to inner products of vectors that the roster's clients deposited by their signature, one deposit a client, and
    to nothing else. A contribution is masked by the secrets of every pair of contributors. So the server and any
    `GramTerms.colluding` of the holders, the lead among them or not, learn of what the others contribute the inner products and nothing
    else, also if they deviate: a mask is made for one list of clients, deposits and contributors, so contributions for two lists never
    add up.
    Reveals: to the lead, the inner products. It trusts the contributors to compute rightly: one that does not changes the matrix.
    Source: Ben-Or, Goldwasser & Wigderson 1988, section 3 (products of Shamir shares are shares of degree 2t); masks as in Bonawitz et al.
    2017, section 4 (pairwise, sum zero).
    """

    def __init__(
        self, terms: GramTerms, identity: Identity, roster: Roster, *, entropy: Entropy = system_entropy, saved: _State | None = None
    ) -> None:
        if terms.roster != roster.digest or terms.most_clients > len(roster.keys) or terms.holders != len(roster.holders):
            raise LocalError("wrong-roster")
        if identity.public() not in roster.holders:
            raise LocalError("wrong-roster", "this identity is no holder's")
        self.terms, self.number = terms, roster.holders.index(identity.public())
        self._identity, self._roster, self._lock = identity, roster, RLock()
        self._seed = entropy(32) if saved is None else saved.seed
        self.announcement = announcement(terms, self.number, identity, public_key(self._seed))
        self._bundle, self._keys = b"", dict[int, bytes]()
        self._shares: dict[int, tuple[bytes, Elements]] = {}
        self._used: set[int] = set() if saved is None else set(saved.used)
        if saved is not None:
            if saved.keys:
                self._accept(saved.keys)
            shape = terms.p, terms.dimension
            self._shares = {client: (digest, np.frombuffer(data, "<u8").reshape(shape)) for client, digest, data in saved.shares}

    def to_bytes(self) -> bytes:
        """The machine, its key and shares included, for a store that only this holder reads."""
        shares = tuple((client, digest, share.astype("<u8").tobytes()) for client, (digest, share) in self._shares.items())
        return codec.encode(_State(self.terms.digest, self._seed, self._bundle, shares, tuple(sorted(self._used))))

    @classmethod
    def from_bytes(cls, data: bytes, terms: GramTerms, identity: Identity, roster: Roster) -> "ShareHolder":
        """The machine that `to_bytes` wrote, to be given the same terms. Raises `MalformedMessage` for another's."""
        saved = codec.decode(data, _State, _LARGEST_STATE_BYTES)
        if saved.terms != terms.digest or any(len(share) != 8 * terms.p * terms.dimension for _, _, share in saved.shares):
            raise MalformedMessage
        return cls(terms, identity, roster, saved=saved)

    @property
    def clients(self) -> frozenset[int]:
        """The clients that it has a share of."""
        return frozenset(self._shares)

    def share_of(self, client: int) -> Elements | None:
        """This holder's share (p, dimension) of a client's vectors, if there is one. As secret as the machine."""
        entry = self._shares.get(client)
        return None if entry is None else entry[1].copy()

    def accept(self, keys: bytes) -> None:
        """Take the keys of all holders of the epoch, once.

        Raises:
            RemoteError: see `terms.checked_keys`; "other-keys" for others than before, or without this holder's own.
        """
        with self._lock:
            if self._bundle and keys != self._bundle:
                raise RemoteError("other-keys")
            self._accept(keys)

    def _accept(self, keys: bytes) -> None:
        received = checked_keys(keys, self.terms, self._roster)
        if received.get(self.number) != public_key(self._seed):
            raise RemoteError("other-keys")
        self._bundle, self._keys = keys, received

    def deliver(self, data: bytes) -> int:
        """Keep this holder's share of a client's deposit; the client. The same one again changes nothing; a new one replaces an unused one.

        Raises:
            RemoteError: "malformed", "bad-signature", "other-keys" before `accept`; naming the client "bad-box" for a box without a share,
                "over-cap", "enrolled-before" for another deposit of a client whose vectors have been compared.
        """
        message, terms = decode(data, Delivery, self.terms), self.terms
        client = message.client
        with self._lock:
            if not self._bundle:
                raise RemoteError("other-keys")
            check_deposit(terms, self._bundle, self._roster, client, message.ephemeral, message.digests, message.signature)
            if len(message.digests) != len(self._keys):
                raise MalformedMessage
            if message.digests[list(self._keys).index(self.number)] != sha256(message.box).digest():
                raise MalformedMessage
            digest = deposit_digest(message.ephemeral, message.digests)
            before = self._shares.get(client)
            if before is not None and before[0] == digest:
                return client
            if client in self._used:
                raise RemoteError("enrolled-before", client)
            if before is None and len(self._shares) >= terms.most_clients:
                raise RemoteError("over-cap", client)
            binding = box_binding(terms, self._bundle, client, self.number)
            try:
                opened = unseal(agree(self._seed, message.ephemeral, LABEL + "box", binding), message.box, binding)
            except RemoteError:
                raise RemoteError("bad-box", client) from None
            share = np.frombuffer(opened[: len(opened) // 8 * 8], dtype="<u8").astype(np.uint64)
            if len(opened) != 8 * terms.p * terms.dimension or (share >= np.uint64(PRIME)).any():
                raise RemoteError("bad-box", client)
            self._shares[client] = digest, share.reshape(terms.p, terms.dimension)
        return client

    def contribute(self, clients: Sequence[int], new: int, contributors: Sequence[int]) -> bytes:
        """This holder's part of the inner products of the vectors of all `clients` with those of the last `new` of them.

        Raises:
            RemoteError: "malformed" for a list with repetitions, "not-enrolled" for a client without a deposit, "bad-contributors" unless
                exactly `GramTerms.contributors` holders of the epoch contribute, the lead and this one among them.
        """
        with self._lock:
            statement, masked = self._masked(clients, new, contributors)
        return contribution(self.terms, self._identity, self.number, statement, masked)

    def opened(
        self, clients: Sequence[int], new: int, contributors: Sequence[int], contributions: Sequence[bytes]
    ) -> npt.NDArray[np.float64]:  # fmt: skip
        """The lead's: the inner products (len(clients) p, new p), from the other contributors' parts and its own.

        Raises:
            RemoteError: as `contribute`; "malformed", "bad-signature", "other-contribution" for parts of other lists or other holders;
                "inconsistent" where the sum is no matrix of inner products within the bound: a holder computed something else, or a client
                deposited shares that do not fit each other or longer vectors. Names the client if it can be found (`_at_fault`).
        """
        terms = self.terms
        if self.number != LEAD:
            raise RemoteError("bad-contributors")
        with self._lock:
            statement, total = self._masked(clients, new, contributors)
        parts = [contributed(uploaded, terms, self._roster, statement, (total.shape[0], total.shape[1])) for uploaded in contributions]
        if sorted(number for number, _ in parts) != [number for number in contributors if number != LEAD]:
            raise RemoteError("other-contribution")
        for _, values in parts:
            total = plus(total, values)
        products = signed(total)
        square, wrong = products[len(products) - new * terms.p :], np.abs(products) > terms.largest
        wrong[len(products) - new * terms.p :] |= (square != square.T) | np.diag(square.diagonal() < 0)
        if wrong.any():
            raise RemoteError("inconsistent", self._at_fault(clients, new, wrong))
        return products / terms.scale**2

    def _at_fault(self, clients: Sequence[int], new: int, wrong: npt.NDArray[np.bool_]) -> int | None:
        """The new client that made products `wrong` (len(clients) p, new p): one whose products with itself are, or else that has most.

        None where that is not clear: where half of the new clients or more have wrong products with themselves (then rather a holder
        computed something else), or two have as many.
        """
        p = self.terms.p
        pairs = np.asarray(wrong.reshape(len(clients), p, new, p).any(axis=(1, 3)))
        candidates, own = clients[len(clients) - new :], pairs[len(clients) - new :].diagonal()
        if own.any():
            return candidates[int(own.argmax())] if 2 * own.sum() < new else None
        counts = pairs.sum(axis=0)
        return candidates[int(counts.argmax())] if (counts == counts.max()).sum() == 1 else None

    def _masked(self, clients: Sequence[int], new: int, contributors: Sequence[int]) -> tuple[bytes, Elements]:
        """The statement, and the products of shares times this holder's Lagrange weight, under the masks of every pair."""
        terms = self.terms
        if list(contributors) != sorted(set(contributors)) or len(contributors) != terms.contributors:
            raise RemoteError("bad-contributors")
        if not {LEAD, self.number} <= set(contributors) <= set(self._keys):
            raise RemoteError("bad-contributors")
        if not 0 < new <= len(clients) or len(set(clients)) != len(clients):
            raise MalformedMessage
        for client in clients:
            if client not in self._shares:
                raise RemoteError("not-enrolled", client)
        self._used |= set(clients)
        deposits = {client: self._shares[client][0] for client in clients}
        statement = statement_of(terms, self._bundle, clients, new, contributors, deposits)
        rows = np.concatenate([self._shares[client][1] for client in clients])
        weight = at_zero([number + 1 for number in contributors])[contributors.index(self.number)]
        total = times(matrix_product(rows, rows[len(rows) - new * terms.p :]), weight)
        for other in contributors:
            if other != self.number:
                between = pair(min(self.number, other), max(self.number, other))
                key = agree(self._seed, self._keys[other], LABEL + "mask", terms.digest, between, statement)
                mask = uniform(key, total.shape)
                total = plus(total, mask) if self.number < other else minus(total, mask)
        return statement, total
