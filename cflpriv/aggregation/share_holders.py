"""The holders of shares, separate parties (`holder_party`): each keeps its shares of an epoch, the first opens inner products.

A step of an epoch is one `gram` of the federation: deposits, then the contributions of all but the lead, then `Open` at the lead, which
runs the function and releases its result, once. The same step again gets the same answer, whoever contributes to it.
"""

from dataclasses import dataclass

import numpy as np
from msgspec import structs

from ..clustering.similarity import Gram
from ..contract.protection import Protection
from ..federation import messages as m
from ..protocols import codec
from ..protocols.errors import LocalError, RemoteError
from ..protocols.keys import Roster
from ..protocols.shared_gram import GramTerms, ShareHolder
from ..types import Array
from .ckks_settings import sketched_shape
from .holder_party import HolderParty, HolderStep, named, replayed, then_of

__all__ = ["ShareHolderParty", "terms_of"]


def terms_of(protection: Protection, session: bytes, epoch: int, roster: Roster, p: int, dimension: int) -> GramTerms:
    """The public terms of an epoch over clients' rows (p, dimension), which every party computes of its own settings.

    Raises `RemoteError` "forbidden" for settings without shares and for a roster of another number of holders.
    """
    if not protection.comparison.shared or len(roster.holders) != protection.share_holders:
        raise RemoteError("forbidden")
    length, bound = sketched_shape(protection.sketched, dimension, protection.share_bound)
    try:
        return GramTerms(
            session, epoch, roster.digest, len(roster.keys), protection.share_holders, protection.share_colluding, p, length, bound
        )  # fmt: skip
    except LocalError:
        raise RemoteError("forbidden") from None


class _StoredShares(m.FederationMessage, frozen=True):
    """An epoch: the shape of clients' rows, the machine; at the lead also the steps, the Gram matrix, the answer to the last."""

    p: int
    dimension: int
    machine: bytes = b""
    steps: tuple[HolderStep, ...] = ()
    gram: bytes = b""
    answer: bytes = b""


@dataclass(frozen=True, eq=False)
class _Shared:
    """An epoch between messages: `stored`, but with a live machine."""

    stored: _StoredShares
    machine: ShareHolder

    def to_bytes(self) -> bytes:
        return m.encode(structs.replace(self.stored, machine=self.machine.to_bytes()))

    @property
    def order(self) -> tuple[int, ...]:
        """All clients of the epoch's steps."""
        return tuple(client for step in self.stored.steps for client in step.clients)

    def extended(self, columns: Array) -> Array:
        """The Gram matrix with the new columns (all rows, new ones) and their transpose."""
        size, new = columns.shape
        matrix = np.zeros((size, size))
        old = size - new
        matrix[:old, :old] = np.frombuffer(self.stored.gram, "<f8").reshape(old, old)
        matrix[:, old:], matrix[old:, :] = columns, columns.T
        return matrix


class ShareHolderParty(HolderParty):
    """Keeps its shares; contributes masked products; as the lead opens inner products, runs functions of a fixed list, and releases labels.

    Guarantee: that of `protocols.shared_gram.ShareHolder`, by this party's own settings: how many holders there are, and how many may
    collude. The lead runs each step once, at most as many as the roster has clients, and an epoch ends if a step's function fails.
    Reveals: to the server, each step's labels, and whose deposits cannot be used; one that lies gets the labels of other functions of the
    list than the algorithm's, too.
    Active attacks (`attacks.active`): coalitions of holders: `holder_coalitions`; holders' keys of the server's: `swapped_shares`; a
    threshold of the server's choice: `other_function`.
    Source: `protocols.shared_gram`.
    """

    def _of_epoch(self, ask: m.PartyRequest) -> m.Answer:
        match ask:
            case m.ShareKey():
                return self._key(ask)
            case m.Deposits():
                return self._deposits(ask)
            case m.Contribute():
                kept = self._kept(ask.session, ask.epoch)
                contribution = kept.machine.contribute(ask.clients, ask.new, ask.contributors)
                self._keep(ask.epoch, kept)
                return m.Stepped(contribution)
            case m.Open():
                return self._open(ask)
            case _:  # it has no data
                raise RemoteError("forbidden")

    def _terms(self, session: bytes, epoch: int, p: int, dimension: int) -> GramTerms:
        return terms_of(self._settings.protection, session, epoch, self._roster(), p, dimension)

    def _key(self, ask: m.ShareKey) -> m.Stepped:
        terms = self._terms(ask.session, ask.epoch, ask.p, ask.dimension)
        self._drop(ask.live)
        if self._store.get(f"epoch/{ask.epoch}") is not None:
            raise RemoteError("replay")
        if terms.digest != ask.terms:
            raise RemoteError("forbidden")
        machine = ShareHolder(terms, self._settings.identity, self._roster(), entropy=self._entropy)
        self._keep(ask.epoch, _Shared(_StoredShares(ask.p, ask.dimension), machine))
        return m.Stepped(machine.announcement)

    def _keep(self, epoch: int, kept: _Shared) -> None:
        self._store.keep(f"epoch/{epoch}", kept, _Shared.to_bytes)

    def _kept(self, session: bytes, epoch: int) -> _Shared:
        def read(data: bytes) -> _Shared:
            stored = codec.decode(data, _StoredShares, 2 * m.LIMIT_BYTES)
            terms = self._terms(session, epoch, stored.p, stored.dimension)
            return _Shared(stored, ShareHolder.from_bytes(stored.machine, terms, self._settings.identity, self._roster()))

        kept = self._store.load(f"epoch/{epoch}", read)
        if kept is None:
            raise RemoteError("not-held")
        return kept

    def _deposits(self, ask: m.Deposits) -> m.Answer:
        kept, unusable = self._kept(ask.session, ask.epoch), []
        kept.machine.accept(ask.keys)
        for delivery in ask.deliveries:
            try:
                kept.machine.deliver(delivery)
            except RemoteError as error:
                if error.party is None:
                    raise
                unusable.append(error.party)
        self._keep(ask.epoch, kept)
        return m.Unusable(tuple(unusable)) if unusable else m.Acknowledged()

    def _open(self, ask: m.Open) -> m.Answer:
        kept, wanted = self._kept(ask.session, ask.epoch), HolderStep(ask.clients, ask.then)
        stored, terms = kept.stored, kept.machine.terms
        if stored.steps and (ask.step, wanted) == (len(stored.steps) - 1, stored.steps[-1]):  # perhaps with other contributors
            return m.decode_answer(stored.answer)
        if ask.step != len(stored.steps):
            raise RemoteError("replay")
        if set(ask.clients) & set(kept.order) or not (ask.clients or kept.order):
            raise RemoteError("not-enrolled")
        if len(stored.steps) >= terms.most_clients:
            raise RemoteError("over-cap")
        then_of(ask.then)
        order = (*kept.order, *ask.clients)
        if ask.clients:
            try:
                columns = kept.machine.opened(order, len(ask.clients), ask.contributors, ask.contributions)
            except RemoteError as error:
                if error.code != "inconsistent" or error.party is None:
                    raise
                return m.Unusable((error.party,))
            stored = structs.replace(stored, gram=kept.extended(columns).tobytes())
        stored = structs.replace(stored, steps=(*stored.steps, wanted))
        try:
            released = self._released(stored, terms)
        except Exception:  # the failure reveals something of the Gram matrix, so it ends the epoch
            self._drop_epochs(lambda epoch: epoch == str(ask.epoch))
            raise
        self._keep(ask.epoch, _Shared(structs.replace(stored, answer=m.encode(released)), kept.machine))
        return released

    def _released(self, stored: _StoredShares, terms: GramTerms) -> m.HolderRelease:
        whole = np.frombuffer(stored.gram, "<f8")
        size = int(np.sqrt(whole.size))
        matrix = whole.reshape(size, size)

        def gram_of(order: list[int]) -> Gram:
            some = matrix[: len(order) * terms.p, : len(order) * terms.p]
            longest = float(np.sqrt(max(float(some.diagonal().max(initial=0.0)), 0.0)))
            return Gram.of_matrix(order, some, terms.p, terms.error(longest))

        result, _ = replayed(stored.steps, gram_of)
        return m.HolderRelease(named(result), (), ())

    def machine(self, session: bytes, epoch: int) -> ShareHolder:
        """This party's machine of an epoch, for audits that run the party themselves. Raises `RemoteError` "not-held"."""
        return self._kept(session, epoch).machine

    def seen(self, session: bytes, epoch: int) -> tuple[tuple[int, ...], Array]:
        """The clients of an epoch and their Gram matrix, which the lead has, for audits that run the party themselves.

        Raises `RemoteError` "not-held".
        """
        kept = self._kept(session, epoch)
        order = kept.order
        size = len(order) * kept.stored.p
        return order, np.frombuffer(kept.stored.gram, "<f8").reshape(size, size)

    def secrets(self) -> dict[str, str]:
        """Nothing: what holders learn is measured by active attacks, which have their shares."""
        return {}
