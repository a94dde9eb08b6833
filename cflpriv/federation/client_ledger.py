"""The client's own privacy ledger: what it has released of its data. It does not rely on a server's ledger.

Each client keeps its ledger in its own store, over all sessions, for the (ε, δ) of its own settings, and the receipts of what it holds. It
prices the tasks that it is asked for, and charges its ledger before it runs them, or before what they made leaves.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import structs

from ..contract.handles import Held, HeldKey
from ..contract.protection import Protection
from ..errors import InputError
from ..privacy.client_level import local_event
from ..privacy.receipts import PrivacyLedger
from ..privacy.settings import Noise, Privacy, SumNoise
from ..protocols.errors import RemoteError
from ..protocols.events import Event, GaussianEvent
from ..protocols.ledger import BudgetExceeded, Charge, Ledger
from . import messages as m
from .store import Store

__all__ = ["SPENT", "ClientLedger", "noise_of"]

SPENT = "spent"
"""The store's name for the ledger. It outlives sessions, because a budget is for the data."""
RECEIPTS = "receipts"
log = logging.getLogger("cflpriv.federation")


def noise_of(steps: m.NoisySteps) -> Noise:
    """The noise that a server asks for. Raises `RemoteError` "malformed" for impossible numbers."""
    numbers = (steps.training, steps.signature, steps.choice)
    if not all(0 <= number < float("inf") for number in numbers) or not 0 < steps.sampling_rate <= 1:
        raise RemoteError("malformed")
    whole = abs(round(1 / steps.sampling_rate) * steps.sampling_rate - 1) < 1e-9
    if steps.allocated and (steps.shares or not whole or steps.relation != "add_remove"):
        raise RemoteError("malformed")
    return Noise(*structs.astuple(steps))


class ClientLedger:
    """The ledger and receipts of one client, for the `privacy` that it demands; with unit = "none" it demands nothing.

    Guarantee: releases under unit = "sample", and secure sums and single rows under unit = "client", are (ε, δ)-private as the client's
    settings say, whatever a server asks for, up to rounding (docs/differential_privacy.md, numerical limits). Sums in
    the clear under unit = "client" are private if the server adds the announced noise.
    For adaptively chosen events the budget is proved for Gaussian releases with Rényi accounting, and used without proof for sampled
    training (`protocols.accounting`).
    Raises `RemoteError`: "forbidden" for a release without such noise, "over-budget" for one that costs too much.
    """

    def __init__(self, privacy: Privacy, client: int, store: Store) -> None:
        self._privacy, self._client, self._store = privacy, client, store

    @property
    def unit(self) -> str:
        return self._privacy.unit

    def spent(self) -> float:
        """ε so far."""
        return self._ledger().spent(self._client)

    def charges(self) -> list[Charge]:
        """All charges so far, in order."""
        return list(self._ledger().charges)

    # --- unit = "sample": receipts of what is held

    def agreed(self, noise: m.NoisySteps | None) -> Noise | None:
        """The noise of a task. Raises "forbidden" without noise, or if its bounds differ from the client's settings."""
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
            self._demand(not made.shares or own.noise == "shared", "noise that clients share; its privacy.noise is 'per_client'")
            self._demand(made.sampling_rate * made.samples >= 1 - 1e-9, "batches of less than one sample")
        return made

    def begin(self, task: Any, inputs: Iterable[m.HeldValue | m.OwnPart], reads: Iterable[str]) -> None:
        """Pay for a task before it runs.

        Refuses a task without noise, or with inputs computed without noise. What is paid for here is released without another charge,
        except where the noise is shared.
        """
        if self.unit == "sample":
            self._demand(PrivacyLedger.harmless(task, self._privacy.relation), f"{type(task).__name__} has no noise")
            receipts = self._receipts()
            sources = receipts.sources(inputs, reads)
            self._demand(receipts.ledger.covers(task, *sources), f"{type(task).__name__} is given what was computed without noise")
            self._paid(receipts, lambda: receipts.ledger.begin(task, *sources, [self._client], -1))

    def enter(self, number: int, task: Any, inputs: Iterable[m.HeldValue | m.OwnPart], reads: Iterable[str], live: Sequence[int]) -> None:
        """Note what releasing the results of a task, held as `number`, costs beside what was paid. Keep only the receipts of `live`."""
        if self.unit == "sample":
            receipts = self._receipts()
            held = receipts.held(number, tuple(task.parts))
            receipts.ledger.enter(held, task, *receipts.sources(inputs, reads))
            receipts.forget(live)
            self._save(receipts)

    def derive(self, number: int, part: str, inputs: Iterable[m.OwnPart]) -> None:
        """`number` is a public function of other held values."""
        if self.unit == "sample":
            receipts = self._receipts()
            receipts.ledger.derive(receipts.held(number, (part,)), receipts.sources(inputs, ())[0])
            self._save(receipts)

    def public(self, number: int, parts: tuple[str, ...]) -> None:
        """`number` was released by other clients."""
        if self.unit == "sample":
            receipts = self._receipts()
            receipts.ledger.public(receipts.held(number, parts))
            self._save(receipts)

    def settle(self, number: int, parts: tuple[str, ...], operation: str) -> None:
        """Pay for parts of a held value before they leave. A second release of the same value is free."""
        if self.unit == "sample":
            receipts = self._receipts()
            self._paid(receipts, lambda: receipts.ledger.settle(receipts.held(number, parts), [self._client], operation, -1))

    # --- secure sums of both units

    def settle_sum(self, number: int, parts: tuple[str, ...], noise: SumNoise | None, protection: Protection, weighted: bool) -> None:
        """Pay for a contribution to a secure sum, with a share of its `noise` if there is one.

        Each survivor knows its own share, so only the shares of the others count (`Protection.noise_shares`). Helpers add all of it.
        """
        if self.unit == "none":
            return
        if noise is not None:
            others, certain = noise.noise.survivors, protection.noise_shares
            self._demand(others <= certain, f"noise of {others} shares; only {certain} are certain beside one's own")
            self._demand(not weighted, "noise that would be scaled")
        if self.unit == "sample":
            receipts = self._receipts()
            held = receipts.held(number, parts)
            self._demand(noise is None or receipts.ledger.inside(held) is not None, "noise for whole clients")
            self._paid(receipts, lambda: receipts.ledger.settle(held, [self._client], "mean", -1, noise))
            return
        if noise is None:
            raise self._refused("a secure sum without noise")
        own = self._privacy
        self._demand(self._allowed(noise.clip_norm), "clip_norm is above the client's own")
        self._demand(not noise.count or own.clip_quantile > 0, "a count beside the sum; its privacy.clip_quantile is 0")
        sensitivity = math.hypot(noise.clip_norm, noise.count / 2) * (1 if own.relation == "add_remove" else 2)
        shares = 0 if protection.sums.helped else noise.noise.survivors
        event = GaussianEvent(noise.noise.deviation / sensitivity, sensitivity, own.relation, "client", shares)
        self.charge([event], "mean")

    def _paid(self, receipts: "_Receipts", pay: Callable[[], None]) -> None:
        try:
            pay()
        except InputError as error:
            raise self._refused(str(error)) from None
        except BudgetExceeded as error:
            raise self._over_budget(error) from None
        self._store.keep(SPENT, receipts.ledger.ledger, _text)  # first: after a crash a release is paid twice, not never
        self._save(receipts)

    def _receipts(self) -> "_Receipts":
        """The receipts of what this client holds."""
        receipts = _Receipts(PrivacyLedger(_NO_NOISE, self._ledger()), self._client)
        return self._store.load(RECEIPTS, receipts.restored) or receipts

    def _save(self, receipts: "_Receipts") -> None:
        self._store.keep(RECEIPTS, receipts, _Receipts.to_bytes)

    # --- unit = "client": each release

    def bounded(self, noise: m.Bounded | None, operation: str) -> m.Bounded | None:
        """Pay for a clipped contribution. The trusted server (sums) or the client (rows) adds the noise."""
        if self.unit == "none":
            if noise is not None and not all(0 < number < math.inf for number in (noise.clip_norm, noise.noise_multiplier)):
                raise RemoteError("malformed")
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
            self._demand(self._allowed(noise.clip_norm), "clip_norm is above the client's own")
            event = GaussianEvent(
                noise.noise_multiplier, noise.clip_norm * (1 if own.relation == "add_remove" else 2), own.relation, "client"
            )
        self.charge([event], operation)
        return noise

    def charge(self, events: Sequence[Event], purpose: str) -> None:
        """Pay for what is about to leave. Raises `RemoteError` "over-budget", and then nothing may leave."""
        ledger = self._ledger()
        try:
            ledger.charge({self._client: events}, purpose, -1)
        except BudgetExceeded as error:
            raise self._over_budget(error) from None
        self._store.keep(SPENT, ledger, _text)

    # --- inside

    def _allowed(self, clip_norm: float) -> bool:
        """Whether the client lets a server name this clip norm. One that moves has no bound: the noise is priced relative to it."""
        most = math.inf if self._privacy.clip_quantile else self._privacy.clip_norm
        return 0 < clip_norm <= most and math.isfinite(clip_norm)

    def _ledger(self) -> Ledger:
        try:
            return self._store.load(SPENT, self._read) or Ledger(self._privacy.budget)
        except ValueError as error:  # kept for another relation, unit or δ
            log.warning("client %d: %s", self._client, error)
            raise RemoteError("bad-settings") from None

    def _read(self, data: bytes) -> Ledger:
        return Ledger.read(data.decode(), self._privacy.budget)

    def _over_budget(self, error: BudgetExceeded) -> RemoteError:
        log.warning("client %d: %s", self._client, error)
        return RemoteError("over-budget")

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


class _Receipts:
    """The receipts of what one client holds, by number, in a `ledger` like the server's."""

    def __init__(self, ledger: PrivacyLedger, client: int) -> None:
        self.ledger, self._client = ledger, client
        self._keys: dict[str, HeldKey] = {}

    def restored(self, data: bytes) -> "_Receipts":
        """The inverse of `to_bytes`, into this new object."""
        saved = json.loads(data)
        self._keys = {number: HeldKey(number) for number in saved["held"]}
        self.ledger.restore(saved, self._keys)
        return self

    def to_bytes(self) -> bytes:
        return json.dumps(self.ledger.saved({key: number for number, key in self._keys.items()})).encode()

    def held(self, number: int, parts: tuple[str, ...]) -> Held:
        return Held(self._keys.setdefault(str(number), HeldKey(str(number))), (self._client,), parts)

    def sources(self, inputs: Iterable[m.HeldValue | m.OwnPart], reads: Iterable[str]) -> tuple[list[Held], list[tuple[int, str]]]:
        """The handles of a task's inputs, and what the task reads of the client's memory."""
        return [self.held(value.held, (value.part,)) for value in inputs], [(self._client, name) for name in reads]

    def forget(self, live: Sequence[int]) -> None:
        """Keep only these numbers."""
        self._keys = {number: key for number, key in self._keys.items() if int(number) in live}


_NO_NOISE = Noise("add_remove", 0.0, 0.0, 0.0, 1.0, 1.0, 0, 0, 1.0, 0)
