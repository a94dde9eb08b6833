"""What a client has released of its data, by its own count: it believes no server's.

Each client keeps its own ledger, in its own store and over all sessions, for the (ε, δ) of its own settings, and the receipts of what it
holds. It prices what it runs itself, and asks its ledger before anything leaves.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..contract.handles import Held, HeldKey
from ..errors import InputError
from ..privacy.client_level import fits, local_event
from ..privacy.receipts import PrivacyLedger
from ..privacy.settings import Noise, Privacy
from ..protocols.errors import RemoteError
from ..protocols.events import Event, GaussianEvent
from ..protocols.ledger import BudgetExceeded, Ledger
from ..protocols.mechanisms import SkellamPlan
from . import messages as m
from .store import Store

__all__ = ["SPENT", "ClientLedger", "noise_of"]

SPENT = "spent"
"""The store's name for the ledger. It outlives sessions: a budget is for the data, whoever asks."""
RECEIPTS = "receipts"
log = logging.getLogger("cflpriv.federation")


def noise_of(said: m.NoisySteps) -> Noise:
    """The noise that a server asks for. Raises `RemoteError` "malformed" for numbers that no noise has."""
    numbers = (said.training, said.signature, said.choice)
    if not all(0 <= one < float("inf") for one in numbers) or not 0 < said.sampling_rate <= 1:
        raise RemoteError("malformed")
    return Noise(
        said.relation, said.training, said.signature, said.choice, said.clip_norm, said.sampling_rate, said.samples, said.sketch_dim,
        said.loss_cap, said.seed,
    )  # fmt: skip


class ClientLedger:
    """The ledger and receipts of one client, for the `privacy` that it demands; with unit = "none" it demands nothing.

    Guarantee: what the client releases under unit = "sample", or into secure sums and as single rows under unit = "client", is private as
    its settings say, (ε, δ), whatever a server asks for; sums in the clear under unit = "client" are if the server adds the noise that it
    announced. That a budget holds whose events are chosen by what was seen is proved for Gaussian releases and Rényi accounting, and used
    unproved for sampled training (`protocols.accounting`).
    Raises `RemoteError`: "forbidden" for what carries no such noise, "over-budget" where it would cost too much.
    """

    def __init__(self, privacy: Privacy, client: int, store: Store) -> None:
        self._privacy, self._client, self._store = privacy, client, store

    @property
    def unit(self) -> str:
        return self._privacy.unit

    def spent(self) -> float:
        """ε so far."""
        return self._ledger().spent(self._client)

    # --- unit = "sample": receipts of what is held

    def agreed(self, noise: m.NoisySteps | None) -> Noise | None:
        """The noise to run a task with. "forbidden" where there is none, or where its bounds are not those of the client's settings."""
        if noise is None:
            self._demand(self.unit != "sample", "a task without noise")
            return None
        own, made = self._privacy, noise_of(noise)
        if self.unit == "sample":
            same = (made.relation, made.clip_norm, made.samples, made.sketch_dim, made.loss_cap)
            self._demand(
                same == (own.relation, own.clip_norm, own.samples, own.sketch_dim, own.loss_cap),
                "relation, clip_norm, samples, sketch_dim, or loss_cap differ",
            )
            self._demand(made.sampling_rate * made.samples >= 1 - 1e-9, "batches of less than one sample")
        return made

    def check(self, task: Any, given: Iterable[m.Mine | m.OwnPart], reads: Iterable[str]) -> None:
        """Refuse a task without noise, or one that is given what was computed without: what it fails for would tell of the data."""
        if self.unit == "sample":
            self._demand(PrivacyLedger.harmless(task, self._privacy.relation), f"{type(task).__name__} has no noise")
            books = self._books()
            handles = [books.held(one.held, (one.part,)) for one in given]
            covered = books.accounts.covers(handles, [(self._client, name) for name in reads])
            self._demand(covered, f"{type(task).__name__} is given what was computed without noise")

    def failed(self, task: Any, given: Iterable[m.Mine | m.OwnPart], reads: Iterable[str]) -> None:
        """Pay for a private task without a result: that it has none is told."""
        if self.unit == "sample":
            books = self._books()
            handles = [books.held(one.held, (one.part,)) for one in given]
            self._paid(books, lambda: books.accounts.failed(task, handles, [(self._client, name) for name in reads], [self._client], -1))

    def enter(self, number: int, task: Any, given: Iterable[m.Mine | m.OwnPart], reads: Iterable[str], live: Sequence[int]) -> None:
        """Note what the results of a task, held as `number`, will cost; of what is held otherwise, only `live` stays."""
        if self.unit == "sample":
            books = self._books()
            held = books.held(number, tuple(task.parts))
            handles = [books.held(one.held, (one.part,)) for one in given]
            books.accounts.enter(held, task, handles, [(self._client, name) for name in reads])
            books.forget(live)
            self._save(books)

    def derive(self, number: int, part: str, given: Iterable[m.OwnPart]) -> None:
        """`number` is a public function of other held values."""
        if self.unit == "sample":
            books = self._books()
            books.accounts.derive(books.held(number, (part,)), [books.held(one.held, (one.part,)) for one in given])
            self._save(books)

    def public(self, number: int, parts: tuple[str, ...]) -> None:
        """`number` is what others released."""
        if self.unit == "sample":
            books = self._books()
            books.accounts.public(books.held(number, parts))
            self._save(books)

    def settle(self, number: int, parts: tuple[str, ...], operation: str) -> None:
        """Pay for parts of a held value before they leave; what is paid already is free."""
        if self.unit == "sample":
            books = self._books()
            self._paid(books, lambda: books.accounts.settle(books.held(number, parts), [self._client], operation, -1))

    def _paid(self, books: "_Books", pay: Callable[[], None]) -> None:
        try:
            pay()
        except InputError as error:
            raise self._refused(str(error)) from None
        except BudgetExceeded as error:
            log.warning("client %d: %s", self._client, error)
            raise RemoteError("over-budget") from None
        self._store.keep(SPENT, books.accounts.ledger, _text)  # first: what is lost after it is paid twice, never too little
        self._save(books)

    def _books(self) -> "_Books":
        """The receipts of what this client holds."""
        ledger = self._ledger()
        books = self._store.load(RECEIPTS, lambda data: _Books.of(data, ledger, self._client))
        return books or _Books(PrivacyLedger(_NO_NOISE, ledger), self._client)

    def _save(self, books: "_Books") -> None:
        self._store.keep(RECEIPTS, books, _Books.to_bytes)

    # --- unit = "client": each release

    def bounded(self, noise: m.Bounded | None, operation: str) -> m.Bounded | None:
        """Pay for a contribution that is clipped, and noised by the trusted server (sums) or by the client (rows)."""
        if self.unit == "none":
            return noise
        if self.unit == "sample":
            self._demand(noise is None, "noise for whole clients")
            return None
        allowed = operation == "sum" or (operation == "gram" and "gram" in self._privacy.local)
        if noise is None or not allowed:
            raise self._refused(f"{operation} without noise")
        own = self._privacy
        self._demand(noise.relation == own.relation and 0 < noise.noise_multiplier < float("inf"), "another relation, or no noise")
        event: Event = local_event(noise.noise_multiplier, noise.relation)
        if operation == "sum":
            self._demand(0 < noise.clip_norm <= own.clip_norm, "clip_norm is above the client's own")
            event = GaussianEvent(
                noise.noise_multiplier, noise.clip_norm * (1 if own.relation == "add_remove" else 2), own.relation, "client"
            )
        self._charge([event], operation)
        return noise

    def shares(self, plan: SkellamPlan | None, floor: int, room: int, weighted: bool) -> None:
        """Pay for a contribution to a secure sum with a share of the noise by `plan`, which must be whole: not cut off, not scaled down.

        `floor` is the fewest survivors for whom the client lets a sum be opened; each of them knows its own share, so no more than the
        others' may be counted.
        """
        if self.unit != "client":
            self._demand(plan is None or self.unit == "none", "noise for whole clients")
            return
        if plan is None:
            raise self._refused("a secure sum without noise")
        own = self._privacy
        self._demand(plan.relation == own.relation and 0 < plan.clip_norm <= own.clip_norm, "clip_norm is above the client's own")
        self._demand(1 <= plan.survivors < floor, f"noise of {plan.survivors} shares, where {floor - 1} are certain beside one's own")
        self._demand(fits(plan, room) and not weighted, "noise that would be cut off, or scaled")
        self._charge([plan.event], "mean")

    # --- inside

    def _ledger(self) -> Ledger:
        try:
            return self._store.load(SPENT, self._read) or Ledger(self._privacy.budget)
        except ValueError as error:  # kept for another relation, unit or δ
            log.warning("client %d: %s", self._client, error)
            raise RemoteError("bad-settings") from None

    def _read(self, data: bytes) -> Ledger:
        return Ledger.read(data.decode(), self._privacy.budget)

    def _charge(self, events: Sequence[Event], purpose: str) -> None:
        ledger = self._ledger()
        try:
            ledger.charge({self._client: events}, purpose, -1)
        except BudgetExceeded as error:
            log.warning("client %d: %s", self._client, error)
            raise RemoteError("over-budget") from None
        self._store.keep(SPENT, ledger, _text)

    def _demand(self, holds: bool, why: str) -> None:
        if not holds:
            raise self._refused(why)

    def _refused(self, why: str) -> RemoteError:
        log.warning("client %d refuses under its privacy.unit = %r: %s", self._client, self.unit, why)
        error = RemoteError("forbidden")
        error.add_note(f"under its privacy.unit = {self.unit!r}: {why}")
        return error


def _text(ledger: Ledger) -> bytes:
    return ledger.text().encode()


class _Books:
    """The receipts of what one client holds, by number: `PrivacyLedger` as the server keeps them for all."""

    def __init__(self, accounts: PrivacyLedger, client: int) -> None:
        self.accounts, self._client = accounts, client
        self._keys: dict[str, HeldKey] = {}

    @classmethod
    def of(cls, data: bytes, ledger: Ledger, client: int) -> "_Books":
        """What `to_bytes` made bytes of."""
        books, saved = cls(PrivacyLedger(_NO_NOISE, ledger), client), json.loads(data)
        books._keys = {number: HeldKey(number) for number in saved["held"]}
        books.accounts.restore(saved, books._keys)
        return books

    def to_bytes(self) -> bytes:
        return json.dumps(self.accounts.saved({key: number for number, key in self._keys.items()})).encode()

    def held(self, number: int, parts: tuple[str, ...]) -> Held:
        return Held(self._keys.setdefault(str(number), HeldKey(str(number))), (self._client,), parts)

    def forget(self, live: Sequence[int]) -> None:
        """Keep only these numbers."""
        self._keys = {number: key for number, key in self._keys.items() if int(number) in live}


_NO_NOISE = Noise("add_remove", 0.0, 0.0, 0.0, 1.0, 1.0, 0, 0, 1.0, 0)
