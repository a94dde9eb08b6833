"""One client: bytes in, bytes out.

`FederationClient.receive` never raises: it answers what it refuses with an opaque error code. Torch is loaded only to compute. All state is
in a store, because a new process may handle the next message.

Guarantee: values leave the client through `give`, `seal` and secure sums only, under the protection that its own settings name; the client
refuses a server that asks for more (the rule is in `release_policy`). Under `privacy` in its settings, the client's own ledger
(`client_ledger`) is charged for everything that leaves.
Reveals: that it takes part, its public keys, and what its protection reveals.
"""

import logging
from collections.abc import Callable, Generator, Mapping
from functools import cached_property, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract.handles import PartLayout, join
from ..privacy.client_level import local_event, local_rows
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import RemoteError
from ..protocols.mechanisms import clip
from ..types import Array, ClientData
from . import messages as m
from . import release_policy as releases
from .client_contract import ClientContract
from .client_ledger import ClientLedger
from .group_secret import GroupMember
from .host import ApplyTransform, Handler, RunTask, received, refusal
from .postponed import Postponed
from .protections import ClientParts, no_stage
from .registry import check_session, enrolled, new_session
from .relay import Relaying
from .settings import Settings
from .store import Store
from .transforms import TransformCache
from .values import SharedWork, Values, form_of
from .work import OwnFunction, Work

if TYPE_CHECKING:  # torch is loaded where something is computed
    from ..engine import TaskInput

__all__ = ["FederationClient"]

log = logging.getLogger("cflpriv.federation")


class FederationClient:
    """One client of a federation.

    `data` loads its data when a task needs them. `store` keeps its state between messages. `entropy` feeds masks, keys and privacy noise.
    `own`: the application's functions for `Foreign` tasks. `cache` keeps transforms; clients of one process share it. With
    `strict = False`, for simulations only, the client releases what its release policy would refuse. `failures`: why the client's data gave
    no value for the last request, for a simulation's experimenter; no answer tells it. `samples`: the number of samples that the client is
    weighed by, where its data are its application's.
    """

    def __init__(
        self, settings: Settings, data: Callable[[], ClientData], store: Store, entropy: Entropy = system_entropy,
        own: Mapping[str, OwnFunction] | None = None, cache: TransformCache | None = None, strict: bool = True,
        samples: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._store, self._strict = settings, store, strict
        self.values = Values(store)
        self.failures: list[Exception] = []
        self._contract = contract = ClientContract(settings, store, strict)
        self._allowed = partial(_allowed, settings, self.values, strict, contract)  # a method would be a cycle that keeps the client's data
        self._spending = ClientLedger(settings.privacy, self.number, store)
        self._group = GroupMember(settings, store, entropy, cache or TransformCache())
        self._parts = ClientParts(
            settings, store, self.values, self._spending, entropy, self._group.transforms, self._group.compared, self._allowed,
            samples or (lambda: data().samples), contract.sum_limits, contract.check_weights, partial(_failed, self.number, self.failures),
        )  # fmt: skip
        self._work = Work(self._parts, data, own or {}, self._contract)
        self._relaying = Relaying(self._parts)

    @cached_property
    def _sums(self) -> Any:
        """The client half of the protection of sums."""
        return self._settings.protection.sums.client(self._parts)

    @cached_property
    def _comparisons(self) -> Any:
        """The client half of the protection of comparisons."""
        return self._settings.protection.comparison.client(self._parts)

    @property
    def number(self) -> int:
        """The client's number on the roster."""
        return self._settings.identity.client

    def receive(self, data: bytes) -> bytes:
        """The answer to a request, whatever its bytes. Requests that use one store are handled one after the other."""
        return received(f"client {self.number}", self, data)

    def handle(self, ask: m.PartyRequest, exchange: SharedWork) -> Handler:
        """Handle a request: the client's own checks, its release policy, its ledger, then the work. Raises an error for a refusal."""
        self.failures.clear()
        with self._store.alone():
            if not isinstance(ask, m.Enrol) and self._store.get("session") != ask.session:
                raise RemoteError("wrong-session")
            match ask:
                case m.Enrol():
                    return self._enrol(ask)
                case m.Compute():
                    return (yield from self._work.compute(ask, exchange))
                case m.Give():
                    return (yield from self._give(ask))
                case m.SumStep():
                    return (yield from self._step(ask))
                case m.ComputeAndSum():
                    return (yield from self._both(ask, exchange))
                case m.Deal():
                    return getattr(self._sums, "deal", no_stage)(ask)  # type: ignore[no-any-return]
                case m.Seal():
                    return self._relaying.seal(ask)
                case m.Take():
                    return self._relaying.take(ask)
                case m.AddUp():
                    return self._work.add_up(ask, exchange)
                case m.Fold():
                    folded: m.Given = yield from getattr(self._sums, "fold", no_stage)(ask, exchange)
                    return folded
                case m.Group():
                    return self._group.agree(ask)
                case _:  # a request to the key holder
                    raise RemoteError("forbidden")

    def opened(self, addends: m.Addends, exchange: SharedWork) -> Array:
        """A sum as the client sees it. For measuring."""
        return self.values.open(addends, self._group.transforms, exchange)

    def given(self, ask: m.Compute, exchange: SharedWork) -> "TaskInput":
        """The input that a task would get. For measuring."""
        return self._work.given(ask, exchange)

    def secrets(self) -> dict[str, str]:
        """The secrets of the client's transforms as hexadecimal digits, by group epoch. For audits of simulated runs."""
        return self._group.secrets()

    def _enrol(self, ask: m.Enrol) -> m.Enrolled:
        if ask.version != m.VERSION:
            raise RemoteError("version")
        identity, roster = self._settings.identity, self._settings.roster
        if roster is not None and not (identity.client < len(roster.keys) and roster.keys[identity.client] == identity.public()):
            raise RemoteError("not-on-roster")
        check_session(self._store, ask.session)  # first: a refused enrolment changes no contract
        answer = enrolled(identity, ask, "client", roster is not None)
        self._contract.accept(ask)
        new_session(self._store, ask.session)
        return answer

    def _both(self, ask: m.ComputeAndSum, exchange: SharedWork) -> Generator[RunTask | ApplyTransform, Any, m.ComputedAndSummed]:
        """A computation, then the message of a sum. What refuses the sum leaves the computation as it is."""
        if ask.step.session != ask.session:
            raise RemoteError("wrong-session")
        computed = yield from self._work.compute(ask.compute, exchange)
        try:
            stepped: m.Stepped | m.Refused = yield from self._step(ask.step)
        except Exception as error:
            stepped = refusal(f"client {self.number}", error)
        return m.ComputedAndSummed(computed, stepped)

    def _step(self, ask: m.SumStep) -> Generator[RunTask, Any, m.Stepped]:
        """One message of a secure sum. Where the step reads values that were put off, they are computed for its duration."""
        step, reads = getattr(self._sums, "step", no_stage), getattr(self._sums, "reads", None)
        waiting = self.values.postponed(ask.held, ask.parts)
        if not waiting or reads is None or not reads(ask):
            return step(ask)  # type: ignore[no-any-return]
        made = yield from _computed(waiting)
        for value in reversed(waiting):
            value.now = made.pop()  # which nobody else has then
        try:
            return step(ask)  # type: ignore[no-any-return]
        finally:
            for value in waiting:
                value.now = None

    def _give(self, ask: m.Give) -> Generator[RunTask | ApplyTransform, Any, m.Given]:
        protection, values = self._settings.protection, self._allowed(ask.operation, ask.held, ask.parts)
        if any(isinstance(value, dict) for value in values.values()):
            raise RemoteError("forbidden")
        if ask.weigh:
            self._contract.check_weighed()
        open_sum = ask.operation == "sum" and not protection.sums.hides and protection.min_cohort > 1 and self._strict
        if open_sum or (ask.weigh and self._spending.unit != "none"):
            error = RemoteError("forbidden")
            if open_sum:
                error.add_note(
                    f"min_cohort = {protection.min_cohort} keeps updates from leaving in the clear: use sum = 'secagg', or min_cohort = 1"
                )
            raise error
        if ask.operation == "gram" and self._spending.unit == "client" and len(values) != 1:
            raise RemoteError("forbidden")  # what is paid for is one release of norm 1
        if ask.operation == "gram":
            under = sha256(f"{ask.transform} {ask.epoch and ask.epoch.number}".encode()).digest()
            self._contract.check_compared(self.values.origin(ask.held).request, ask.parts[0], under)
        self._spending.settle(ask.held, ask.parts, ask.operation)
        noise = self._spending.bounded(ask.noise, ask.operation)
        waiting = {part: value for part, value in values.items() if isinstance(value, Postponed)}
        values |= zip(waiting, (yield from _computed(list(waiting.values()))), strict=True)
        for part, value in values.items() if ask.operation != "gather" else ():
            if isinstance(value, np.ndarray):  # a task checks what it computes on demand
                values[part] = self._parts.finite(part, value)
        if ask.operation != "sum":  # only sums read, one client at a time, what is computed on demand
            values = {part: np.asarray(value) for part, value in values.items()}
        if noise is not None:
            values = self._bounded(ask, values, noise)
        if ask.operation == "gather":
            return m.Given(tuple(m.NamedArray(part, value) for part, value in values.items()), 0)
        given: m.Given = yield from (self._sums if ask.operation == "sum" else self._comparisons).give(ask, values)
        return given

    def _bounded(self, ask: m.Give, values: Mapping[str, Any], noise: m.Bounded) -> dict[str, Array]:
        """The client's values, clipped together; single rows get the client's own noise."""
        if ask.operation == "gram":
            event = local_event(noise.noise_multiplier, noise.relation)
            return {part: local_rows(np.atleast_2d(value).astype(np.float64), event, self._parts.entropy) for part, value in values.items()}
        vector = self._parts.finite("+".join(values), join(values, np.float64))
        return PartLayout.of(values).split(clip(vector, noise.clip_norm))


def _computed(waiting: list[Postponed]) -> Generator[RunTask, Any, list[Any]]:
    """The values that were put off, each computed once with what was given for it."""
    results: dict[int, Any] = {}
    for value in waiting:
        if id(value.given) not in results:
            results[id(value.given)] = yield RunTask(value.task, value.given, now=True)
    made = [results[id(value.given)][value.part] for value in waiting]
    for result in results.values():
        result.clear()  # whoever made them keeps the results for a while, and not what is in them
    return made


def _failed(client: int, failures: list[Exception], error: Exception) -> None:
    """Log that the client's data gave no usable value, for its operator alone. The last request's failures are kept."""
    log.warning("client %d: counts with weight zero: %s", client, error)
    failures.append(error)


def _allowed(
    settings: Settings, values: Values, strict: bool, contract: ClientContract, operation: releases.Operation, number: int,
    parts: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
    """Parts of a held value. Raises `RemoteError` "forbidden" or "not-agreed" if this operation must not release them."""
    asked = values.parts(number, parts)
    contract.check_leaving(operation, values.origin(number), parts)
    if strict:
        forms = {part: form_of(value) for part, value in asked.items()}
        releases.check(settings.protection, operation, forms, values.origin(number), "gram" in settings.privacy.local)
    return asked
