"""Inner products of shared vectors: clients deposit sealed shares, holders contribute, the first opens the matrix (`share_holders`).

Guarantee: see `protocols.shared_gram`; keys are fresh for every clustering epoch. The server learns what `then` returns, labels and small
integers, and nothing else of the similarities; no `share_colluding` of the holders, with the server and any clients, learn more of a
vector than its inner products with what those clients deposit, also if they deviate. Clients check whose keys they share under; holders and
clients check the terms by their own settings.
Reveals: the exact Gram matrix to the first holder on the roster; when each party answers. Clients that choose their vectors freely learn
bits from their labels and from refusals, and with the first holder coordinates: of each epoch, and a client lets its vectors into
`most_epochs` at most.
Active attacks (`attacks.active`): coalitions of holders: `holder_coalitions`; holders' keys of the server's: `swapped_shares`; what the
first holder runs: `other_function`; an accomplice and the first holder: `chosen_deposits`.
Source: `protocols.shared_gram`.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..contract.calls import Recorder
from ..contract.handles import Held, Released
from ..contract.operations import Then
from ..errors import InputError
from ..federation import messages as m
from ..federation.epochs import Epoch, Epochs, enter
from ..federation.host import ApplyTransform
from ..federation.protections import ClientParts, ServerParts
from ..federation.registry import KEY_HOLDER, ClientsLost, EpochEnded, KeyHolderLost
from ..federation.task_encoding import then_to_bytes
from ..federation.transforms import sketched
from ..protocols.errors import LocalError, MalformedMessage, RemoteError
from ..protocols.shared_gram import LEAD, GramTerms, check_contribution, deliveries, delivery_digest, deposit, gathered
from .encrypted_epochs import EncryptedStep, concluded, epoch_for, payloads, released, upload_of
from .share_holders import terms_of

__all__ = ["SharesClientComparison", "SharesServerComparison"]

MOST_BYTES = m.LIMIT_BYTES * 7 // 8
"""Of shares in one message, which has seals, hashes and signatures beside them."""
HOLDERS, CLIENTS = ("server", "key-holder"), ("key-holder", "server", "clients")


class SharesClientComparison:
    """A client's part: it shares its vectors.

    Guarantee: that of `protocols.shared_gram`. The holders on the client's own roster must have signed the announced keys, over terms that
    the client computed itself. Its vectors are in `most_epochs` epochs at most, over all sessions. Reveals: see there.
    """

    def __init__(self, parts: ClientParts) -> None:
        self._settings, self._entropy, self._store, self._within = parts.settings, parts.entropy, parts.store, parts.within

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[ApplyTransform, Any, m.Given]:
        """The client's deposit.

        Raises `RemoteError` "forbidden" for other terms than its own, "bad-signature", "bad-key" and "too-few-holders" for other keys,
        "too-many-epochs" for one more epoch than its settings allow. Vectors longer than `share_bound` are scaled down to it.
        """
        yield from ()
        roster, epoch, protection = self._settings.roster, ask.epoch, self._settings.protection
        if epoch is None or roster is None or len(values) != 1:
            raise RemoteError("forbidden")
        (rows,) = (np.atleast_2d(np.asarray(value)) for value in values.values())
        if rows.ndim != 2:
            raise RemoteError("bad-input")
        terms = terms_of(protection, ask.session, epoch.number, roster, *rows.shape)
        if terms.digest != epoch.setup:
            raise RemoteError("forbidden")
        reduced = np.atleast_2d(sketched(epoch.number, protection.sketched)(rows))
        reduced = self._within(reduced, terms.bound, "share_bound")
        upload = deposit(terms, epoch.announcement, roster, self._settings.identity, reduced, entropy=self._entropy)
        enter(self._store, ask.session, epoch.number, protection.most_epochs)
        return m.Given((m.NamedArray("bytes", np.frombuffer(upload, dtype=np.uint8)),), 0)


def check_size(terms: GramTerms, clients: int, everybody: int) -> None:
    """Raises `InputError` where the shares of new clients, or the products with `everybody`'s, do not fit into one message to a holder."""
    shares = 8 * terms.p * terms.dimension * clients
    products = 8 * terms.p**2 * clients * everybody * (terms.contributors - 1)
    limit = "a message carries less than 2 GB"
    if shares >= MOST_BYTES:
        raise InputError(
            f"gram: vectors {(terms.p, terms.dimension)} of {clients} clients are {shares / 1e9:.1f} GB to each holder of shares, {limit}; "
            'put "sketch" before "shares" in protection.gram'
        )
    if products >= MOST_BYTES:
        raise InputError(
            f"gram: products of {clients} clients' vectors with those of {everybody}, {terms.p} each, are {products / 1e9:.1f} GB to the "
            f"first holder of shares, {limit}; compare fewer clients, or fewer vectors of each"
        )


class SharesEpoch:
    """What the server has of one clustering epoch: its terms and keys, the number of steps, deposits by client, with their value, and the
    deposits' digests.

    `used` are the clients whose deposits were given to holders to be multiplied. Holders replace these no more, so a step that is taken
    again, also with a value that was computed again, goes on with them.
    """

    def __init__(self) -> None:
        self.terms: GramTerms | None = None
        self.keys = b""
        self.holders: tuple[int, ...] = ()
        self.steps = 0
        self.deposits: dict[int, tuple[tuple[str, int], bytes]] = {}
        self.digests: dict[int, bytes] = {}
        self.used: set[int] = set()

    @property
    def live(self) -> bool:
        return self.terms is not None

    def has(self, client: int, value: tuple[str, int]) -> bool:
        """Whether there is a deposit of this part of a held value, by its number."""
        part, number = self.deposits.get(client, (("", -1), b""))[0]
        return part == value[0] and (number == value[1] or client in self.used)

    def saved(self) -> dict[str, Any]:
        """Nothing: an epoch ends with the server's process, which has the deposits."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """An epoch to which no client can be added."""


class SharesServerComparison:
    """The server's part: it passes on what it cannot read.

    Raises `InputError` without the holders that the settings want on the roster.
    """

    where: Literal["key-holder"] = "key-holder"
    evidence = False

    def __init__(self, parts: ServerParts) -> None:
        roster, protection = parts.roster, parts.protection
        if roster is None or len(roster.holders) != protection.share_holders:
            there = 0 if roster is None else len(roster.holders)
            raise InputError(
                f"protection.share_holders: {protection.share_holders}: the clients' pinned roster names {there} holders of shares"
            )
        self._registry, self._session, self._protection, self._roster = parts.registry, parts.session, protection, roster
        self.epochs: Epochs[SharesEpoch] = Epochs(lambda number: SharesEpoch())

    def listen(self, notify: Callable[[str], None], tick: Callable[[int, int], None]) -> None:
        """No step takes long."""

    def close(self, held: Held) -> None:
        """Close an epoch. Holders drop their shares now, or at the next epoch if this request is lost."""
        self.epochs.close(held)
        self._registry.ask_holders(dict.fromkeys(self._registry.holders, m.Drop(self._session, self._live())), "shares close")

    def end(self) -> None:
        """End the run: close all epochs, and have holders drop all shares."""
        self.epochs.entered.clear()
        self._registry.ask_holders(dict.fromkeys(self._registry.holders, m.Drop(self._session, ())), "shares close")

    def _live(self) -> tuple[int, ...]:
        """The epochs to which clients can be added."""
        entered = [epoch for entries in self.epochs.entered.values() for _, epoch in entries]
        return tuple(sorted({epoch.number for epoch in entered if epoch.session.live}))

    def gram(
        self, held: Held, number: int, clients: Sequence[int], then: Then, against: Held | None, record: Recorder, shape: tuple[int, ...]
    ) -> Released:  # fmt: skip
        """Have `clients` share their vectors of `held`, of public `shape`, and the first holder run `then`.

        Raises `ClientsLost` if a client does not answer, `KeyHolderLost` if too few holders do; the step can then be taken again, and
        clients that shared this value in this epoch, or one that holders have multiplied, are not asked again. Raises `EpochEnded` for an
        epoch of an earlier process.
        """
        code = then_to_bytes(then)
        epoch = epoch_for(self.epochs, held, clients, against, shape)
        session = self._begun(epoch, record)
        assert session.terms is not None
        check_size(session.terms, len(clients), len(epoch.clients) + len(clients))
        step = EncryptedStep(held, number, clients, then, epoch, record)
        contributors, parts = self._contributions(step, self._deliver(step, self._deposits(step))) if clients else ((), ())
        ask = m.Open(self._session, epoch.number, session.steps, tuple(clients), code, contributors, parts)
        answer = self._open(ask, record)
        if isinstance(answer, m.Unusable):
            raise self._unusable(step, answer.clients, "shares open")
        try:
            seen = released(step, answer, "labels")
        except (MalformedMessage, TypeError, InputError, LocalError):
            raise KeyHolderLost("shares open", "malformed") from None
        session.steps += 1
        epoch.clients += clients
        if clients:
            self.epochs.enter(held, epoch)
        return concluded(step, seen, answer)

    # --- holders

    def _begun(self, epoch: Epoch[SharesEpoch], record: Recorder) -> SharesEpoch:
        """The epoch's session; a new epoch gets the keys of the holders that answer first."""
        session = epoch.session
        if session.live:
            return session
        if epoch.ended:
            raise EpochEnded(epoch.number)
        try:
            terms = terms_of(self._protection, self._session, epoch.number, self._roster, *epoch.shape)
        except RemoteError:
            raise InputError(f"protection.share_bound: {self._protection.share_bound:g} does not fit vectors {epoch.shape}") from None
        ask = m.ShareKey(self._session, epoch.number, *epoch.shape, terms.digest, self._live())
        answers = self._ask(dict.fromkeys(self._registry.holders, ask), "shares keys", epoch.number, record)
        announced = {number: answer.message for number, answer in answers.items() if isinstance(answer, m.Stepped)}
        self._enough(tuple(announced), "shares keys", answers)
        try:
            session.keys = gathered(terms, tuple(announced.values()), self._roster)
        except RemoteError as error:
            raise KeyHolderLost("shares keys", error.code, "a holder of shares") from None
        session.terms, session.holders = terms, tuple(sorted(announced))
        return session

    def _ask(
        self, asks: Mapping[int, m.ShareKey | m.Deposits | m.Contribute | m.Open], stage: str, epoch: int, record: Recorder
    ) -> dict[int, m.Answer]:  # fmt: skip
        """Ask holders. Requests are on record before they can be answered."""
        for number, ask in asks.items():
            context = {"epoch": epoch, "holder": number}
            record(stage, "server", "key-holder", (), payloads([m.encode(ask)])[0], readers=HOLDERS, context=context)
        return self._registry.ask_holders(asks, stage)

    def _enough(self, there: Sequence[int], stage: str, answers: Mapping[int, m.Answer] | None = None) -> None:
        """Raises `KeyHolderLost` unless enough holders are there, the lead among them; with the error code of one of the `answers`."""
        needed = self._protection.fewest_holders
        if not self._suffice(there):
            lost = sorted(set(range(self._protection.share_holders)) - set(there))
            left = f"{len(there)} of {self._protection.share_holders} holders of shares are left"
            who = f"{left}, {needed} are needed with the first among them: holder {', '.join(map(str, lost))}"
            codes = [answer.code for answer in (answers or {}).values() if isinstance(answer, m.Refused)]
            raise KeyHolderLost(stage, next(iter(codes), ""), who)

    def _suffice(self, there: Sequence[int]) -> bool:
        """Whether these holders can open a matrix."""
        return LEAD in there and len(there) >= self._protection.fewest_holders

    def _there(self, session: SharesEpoch) -> tuple[int, ...]:
        """The holders of this epoch that answered last time."""
        return tuple(number for number in session.holders if number in self._registry.holders)

    def _deliver(self, step: EncryptedStep, uploads: Mapping[int, bytes]) -> tuple[int, ...]:
        """Pass every holder its shares; the holders that have them. Raises `KeyHolderLost` if these are too few."""
        session, terms = step.epoch.session, step.epoch.session.terms
        there = self._there(session)
        self._enough(there, "shares deposits")
        split = [deliveries(upload, terms, session.keys, self._roster)[1] for upload in uploads.values()]
        place = {number: at for at, number in enumerate(session.holders)}
        asks = {
            number: m.Deposits(self._session, step.epoch.number, session.keys, tuple(sealed[place[number]] for sealed in split))
            for number in there
        }  # fmt: skip
        answers = self._ask(asks, "shares deposits", step.epoch.number, step.record)
        kept = tuple(number for number in there if isinstance(answers.get(number), m.Acknowledged))
        some = {number: answer.clients for number, answer in answers.items() if isinstance(answer, m.Unusable)}
        if some and not self._suffice(kept) and self._suffice((*kept, *some)):  # without these clients they would be enough
            raise self._unusable(step, {client for clients in some.values() for client in clients}, "shares deposits")
        self._enough(kept, "shares deposits", answers)
        return kept

    def _unusable(self, step: EncryptedStep, clients: Collection[int], stage: str) -> ClientsLost | KeyHolderLost:
        """The error after holders named `clients` whose deposits they cannot use; those are asked again when they have enrolled anew."""
        lost = [client for client in step.clients if client in clients]
        if not lost:
            return KeyHolderLost(stage, "malformed", "a holder of shares")
        for client in lost:
            del step.epoch.session.deposits[client]
            self._registry.refusals.append((client, stage, "bad-deposit"))
            self._registry.lose(client)
        return ClientsLost(lost)

    def _contributions(self, step: EncryptedStep, kept: Sequence[int]) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """The contributors and the others' parts. Where one gives none, or none to these lists, another that has the deposits takes its
        place."""
        order, left, answers = tuple(step.order), list(kept), dict[int, m.Answer]()
        while True:
            self._enough(left, "shares contributions", answers)
            contributors = tuple(left[: self._protection.fewest_holders])
            step.epoch.session.used |= set(step.clients)
            ask = m.Contribute(self._session, step.epoch.number, order, len(step.clients), contributors)
            answers = self._ask(
                {holder: ask for holder in contributors if holder != LEAD}, "shares contributions", step.epoch.number, step.record
            )
            for number, answer in answers.items():
                if isinstance(answer, m.Stepped):
                    context = {"epoch": step.epoch.number, "holder": number}
                    step.record("contribution", "key-holder", "server", (), payloads([answer.message])[0], readers=HOLDERS, context=context)
            answers = {holder: self._checked(step, holder, contributors, answer) for holder, answer in answers.items()}
            parts = {holder: answer.message for holder, answer in answers.items() if isinstance(answer, m.Stepped)}
            if len(parts) == len(contributors) - 1:
                return contributors, tuple(parts[holder] for holder in contributors if holder != LEAD)
            left = [holder for holder in left if holder == LEAD or holder not in contributors or holder in parts]

    def _checked(self, step: EncryptedStep, holder: int, contributors: tuple[int, ...], answer: m.Answer) -> m.Answer:
        """A holder's contribution, or in its place a refusal where the lead could not use it."""
        session = step.epoch.session
        if not isinstance(answer, m.Stepped):
            return answer
        try:
            check_contribution(
                answer.message,
                session.terms,
                session.keys,
                self._roster,
                holder,
                step.order,
                len(step.clients),
                contributors,
                session.digests,
            )
        except RemoteError as error:
            self._registry.refusals.append((KEY_HOLDER - holder, "shares contributions", error.code))
            return m.Refused(error.code)
        return answer

    def _open(self, ask: m.Open, record: Recorder) -> m.Answer:
        answer = self._ask({LEAD: ask}, "shares open", ask.epoch, record).get(LEAD)
        if answer is None:
            raise KeyHolderLost("shares open", "", "the first holder of shares")
        if isinstance(answer, m.Refused):
            if answer.code == "bad-input":
                raise InputError("gram: the first holder of shares could not run the public function on these vectors; its log says why")
            raise KeyHolderLost("shares open", answer.code, "the first holder of shares")
        return answer

    # --- clients

    def _deposits(self, step: EncryptedStep) -> dict[int, bytes]:
        """The deposit of each client, on record before it is checked. Raises `ClientsLost` unless all clients made one."""
        session, epoch, record, value = step.epoch.session, step.epoch.number, step.record, (step.held.part, step.number)
        asked = [client for client in step.clients if not session.has(client, value)]
        give = m.Give(
            self._session, "gram", step.number, (step.held.part,), "", False, None, m.EpochKey(epoch, session.terms.digest, session.keys)
        )  # fmt: skip
        answers = self._registry.ask(dict.fromkeys(asked, give), "gram") if asked else {}
        came = {client: upload_of(answer) for client, answer in sorted(answers.items())}
        context = {"epoch": epoch}
        if came:
            record(step.held.part, "clients", "server", list(came), payloads(came.values()), readers=("server",), context=context)
        if asked:
            record("shares keys", "key-holder", "clients", asked, payloads([session.keys])[0], readers=CLIENTS, context=context)
        for client, upload in came.items():
            try:
                sender, each = deliveries(upload, session.terms, session.keys, self._roster)
                if sender != client:
                    raise RemoteError("wrong-sender", client)
                session.deposits[client], session.digests[client] = (value, upload), delivery_digest(each[0], session.terms)
            except RemoteError as error:
                self._registry.refusals.append((client, "gram", error.code))
        lost = [client for client in step.clients if not session.has(client, value)]
        for client in lost:  # a client that refused would refuse again
            self._registry.lose(client)
        if lost:
            raise ClientsLost(lost)
        return {client: session.deposits[client][1] for client in step.clients}
