"""The client's decision by its session contract: which requests it answers, and which parts of their results leave it.

Rules (docs/guarantees.md says what each keeps from a server that lies):

    task        equals one of the contract in every field, but for the parameters and what the contract lets vary
    round       never decreases, and is below the contract's number of rounds
    count       in a round each declared request is answered as often as the contract declares; the same request again is no new one;
                requests of the start are counted over the run, and those of joining, of which `RETAKEN` may fail
    part        leaves by the operations that the contract declares for it, and by `gram` at most `RETAKEN` times more than once
    sum         the clip is the contract's, and all sums of a part weigh clients in one way, equally or by samples
    session     one contract is one session; what was counted outlives sessions and restarts; a deployed client whose sums are secure, or
                that has a ledger, stays away if the server has an answer of a later round than its state knows of

Without a contract (simulations that name none) none of these rules is in force.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from ..contract.schedule import Leaving, TaskRequest, same_task
from ..errors import InputError
from ..protocols.errors import MalformedMessage, RemoteError
from . import messages as m
from .contract_record import contract_digest, contract_from_bytes, excess, keys_that_differ
from .settings import Settings
from .store import Store
from .values import Leaves, Origin, SharedWork

__all__ = ["KEPT", "RETAKEN", "ClientContract"]

KEPT = "contract"
"""The store's name for the contract in force, and the first part of the names of what was counted under each contract."""
RETAKEN = 5
"""How often an honest server takes a comparison again without clients that dropped out (`experiments.run.loop`), and may ask a client again
to join."""
DIGEST_BYTES = 16
log = logging.getLogger("cflpriv.federation")


class _Counted(m.FederationMessage, frozen=True):
    """`Counts` as bytes."""

    session: m.Bytes16
    round: int
    in_round: tuple[tuple[m.Count, bytes], ...]
    lasting: tuple[tuple[m.Count, bytes], ...]
    compared: tuple[tuple[bytes, bytes], ...]
    weighed: tuple[tuple[m.Name, bool], ...]


@dataclass
class Counts:
    """What a client has answered under one contract. Digests of requests by their number in the contract, of this round and of all rounds;
    the transforms or epochs under which each value was compared; and by part, whether its sums weigh clients by their samples."""

    session: bytes
    round: int = -1
    in_round: set[tuple[int, bytes]] = field(default_factory=set)
    lasting: set[tuple[int, bytes]] = field(default_factory=set)
    compared: set[tuple[bytes, bytes]] = field(default_factory=set)
    weighed: dict[str, bool] = field(default_factory=dict)

    def may_be_of(self, session: bytes) -> bool:
        """Whether the contract is answered in this session, or was not answered yet."""
        return self.session == session or not (self.in_round or self.lasting)

    def allows(self, number: int, rounds: int) -> bool:
        """Whether a round is the latest or a later one, and below the contract's number of `rounds`."""
        return self.round <= number < rounds

    def to_bytes(self) -> bytes:
        """The counts as bytes."""
        in_round, lasting, compared = tuple(sorted(self.in_round)), tuple(sorted(self.lasting)), tuple(sorted(self.compared))
        return m.codec.encode(_Counted(self.session, self.round, in_round, lasting, compared, tuple(sorted(self.weighed.items()))))

    @staticmethod
    def from_bytes(data: bytes) -> "Counts":
        """The inverse of `to_bytes`. Raises `MalformedMessage`."""
        kept = m.codec.decode(data, _Counted, m.LIMIT_BYTES)
        return Counts(kept.session, kept.round, set(kept.in_round), set(kept.lasting), set(kept.compared), dict(kept.weighed))


class ClientContract:
    """The contract of one client, in its store. One that is not `strict` (simulations only) agrees to none, and answers."""

    def __init__(self, settings: Settings, store: Store, strict: bool = True) -> None:
        self._settings, self._store, self._strict = settings, store, strict

    def accept(self, ask: m.Enrol) -> None:
        """Agree to the contract of an enrolment, or to none where the client's settings need none.

        Raises `RemoteError`: "no-contract"; "other-contract" for one that the settings do not allow; "contract-used" for one that another
        session has; "set-back" for a state that knows of fewer rounds than the server has answers of; "malformed".
        """
        settings, data = self._settings, ask.contract if self._strict else b""
        if not data:
            if settings.contract or settings.needs_contract:
                raise self._error("no-contract", "the server sent no contract, and the client's settings need one")
            if self._store.get("session") != ask.session:
                self._store.drop(KEPT)
            elif self._store.get(KEPT) is not None:
                raise self._error("no-contract", "the session has a contract")
            return
        digest = contract_digest(data)
        if settings.contract and settings.contract != digest:
            raise self._error("other-contract", f"its digest is {digest.hex()}, the settings pin {settings.contract.hex()}")
        for why in _limits(data, settings):
            raise self._error("other-contract", why)
        counted = self._counts(digest)
        if counted is not None and not counted.may_be_of(ask.session):
            raise self._error("contract-used", "another session has this contract; a second run needs another name ([run] name)")
        known = -1 if counted is None else counted.round
        recorded = settings.needs_contract and (settings.protection.secure or settings.privacy.unit != "none")
        if recorded and (latest := dict(ask.answered).get(settings.identity.client, -1)) > known:
            raise self._error(
                "set-back", f"the state ends with round {known}, the server has an answer of round {latest}: was it set back?"
            )
        if self._store.get("session") == ask.session and self._store.get(KEPT) != data:
            raise self._error("other-contract", "the session has another contract")
        if counted is None or counted.session != ask.session:
            self._keep(digest, Counts(ask.session))
        self._store.put(KEPT, data)

    def begin(self, ask: m.Compute, name: bytes, exchange: SharedWork) -> Leaves | None:
        """Count a request by its name (`Work`); the operations by which its parts will leave. None without a contract.

        Raises `RemoteError` "not-agreed".
        """
        data = self._store.get(KEPT)
        if data is None:
            return None
        contract, digest, name = contract_from_bytes(data), contract_digest(data), name[:DIGEST_BYTES]
        counted = self._counts(digest)
        if counted is None or not counted.allows(ask.round, contract.rounds):
            raise self._error("not-agreed", f"round {ask.round} is not one of those that are left of {contract.rounds}")
        if ask.seed != contract.seed or ask.noise != contract.noise:
            raise self._error("not-agreed", "another seed or noise than the contract's")
        in_round = counted.in_round if ask.round == counted.round else set()
        meant = exchange.once(partial(self._meant, ask, data), ask, data)
        for number in meant:
            agreed = contract.requests[number]
            known = counted.lasting if agreed.phase in ("start", "joining") else in_round
            again = RETAKEN if agreed.phase == "joining" else 0  # in another round, where it failed, or an answer was lost
            if (number, name) not in known and is_full(known, number, agreed.times + again):
                continue
            if (number, name) not in known or ask.round != counted.round:
                if ask.round != counted.round:
                    counted.round, counted.in_round = ask.round, in_round
                known.add((number, name))
                self._keep(digest, counted)
            return Leaves(agreed.leaves, name)
        task = type(ask.task.task).__name__
        raise self._error("not-agreed", f"{task} once more than declared" if meant else f"{task} with these settings is not declared")

    def _meant(self, ask: m.Compute, data: bytes) -> tuple[int, ...]:
        """The requests of a contract, by their numbers, that a request may mean. Raises as `_declared` does."""
        contract, declared = contract_from_bytes(data), self._declared(data)
        phases = ("start", "serving") if ask.round < 0 else ("round", "joining", "serving")
        if not contract.rounds:  # then clients join before any
            phases = ("start", "joining", "serving")
        every = (ask.round, *range(-1, ask.round))
        return tuple(
            number
            for number, agreed in enumerate(contract.requests)
            if agreed.phase in phases and same_task(ask.task.task, declared[number], every if agreed.phase == "joining" else (ask.round,))
        )

    def derived(self, part: str, sources: Sequence[tuple[str, Leaves | None]]) -> Leaves | None:
        """How a part that is the sum of other parts leaves: by the operations of all of them."""
        if self._store.get(KEPT) is None:
            return None
        ways = [set[Leaving]() if leaves is None else set(leaves.by(name)) for name, leaves in sources]
        return Leaves(((part, tuple(sorted(set.intersection(*ways)))),))

    def check_leaving(self, operation: Leaving, origin: Origin, parts: tuple[str, ...]) -> None:
        """Raises `RemoteError` "not-agreed" if parts of a value leave by an operation that the contract does not declare for them, or are
        scores or choices and the client's settings do not allow these.

        What may be shown may also be summed: an oblivious sum counts choices that others gather.
        """
        if self._store.get(KEPT) is None:
            return
        leaves = origin.leaves or Leaves(())
        for part in parts:
            ways = leaves.by(part)
            if operation not in ways and not (operation == "sum" and "gather" in ways):
                raise self._error("not-agreed", f"{part!r} does not leave by {operation!r}")
            if operation == "gather":
                self._check_shown(origin, part)

    def _check_shown(self, origin: Origin, part: str) -> None:
        settings = self._settings
        exposed = settings.protection.sums.hides and settings.privacy.unit == "none"
        if exposed and not settings.allow_scores and origin.kind(part) in ("choice", "request", "score"):
            raise self._error("not-agreed", f"{part!r} is a number about the client's data: it takes allow_scores = true")

    def check_weighed(self) -> None:
        """Raises `RemoteError` "not-agreed" if the contract has equal weights, so that no number of samples leaves."""
        data = self._store.get(KEPT)
        if data is not None and contract_from_bytes(data).weights != "examples":
            raise self._error("not-agreed", "the number of samples does not leave where all weigh equally")

    def check_compared(self, value: bytes, part: str, under: bytes) -> None:
        """Count a comparison of a value, by its name, under a transform or epoch. Raises `RemoteError` "not-agreed" for one too many."""
        data = self._store.get(KEPT)
        if data is None or not value:
            return
        counted = self._counts(contract_digest(data))
        assert counted is not None
        entry = (value[:DIGEST_BYTES] + part.encode(), under)
        if entry in counted.compared:
            return
        if sum(name == entry[0] for name, _ in counted.compared) > RETAKEN:
            raise self._error("not-agreed", f"{part!r} was compared {RETAKEN + 1} times")
        counted.compared.add(entry)
        self._keep(contract_digest(data), counted)

    def sum_limits(self) -> tuple[int, tuple[float, float]]:
        """How many models the members of one secure sum may have been sent, and the least and the largest clip of one.

        The clip is the contract's; without a contract its bounds are wide.
        """
        data, most, own = self._store.get(KEPT), self._settings.models, self._settings.protection.secagg_clip
        if data is None:
            return most, (min(1e-6, own), max(1e6, own))
        contract = contract_from_bytes(data)
        return min(most, contract.models), (contract.clip, contract.clip)

    def check_weights(self, parts: tuple[str, ...], by_samples: bool) -> None:
        """Remember how a secure sum weighs clients. Raises `RemoteError` "not-agreed" if earlier sums of one of the parts differ in that.

        Two sums that are weighed differently show by their difference how a client with an unusual number of samples differs.
        """
        data = self._store.get(KEPT)
        if data is None:
            return
        counted = self._counts(contract_digest(data))
        assert counted is not None
        for part in parts:
            if counted.weighed.get(part, by_samples) != by_samples:
                raise self._error("not-agreed", f"sums of {part!r} so far weighed clients differently")
        if not counted.weighed.keys() >= set(parts):
            counted.weighed |= dict.fromkeys(parts, by_samples)
            self._keep(contract_digest(data), counted)

    def _declared(self, data: bytes) -> tuple[TaskRequest, ...]:
        """The requests of a contract. Raises `RemoteError` "not-agreed" if one of them is no possible task."""
        try:
            return _declared(data)
        except (InputError, MalformedMessage, AttributeError, TypeError) as error:
            raise self._error("not-agreed", f"a request of the contract is no task: {error}") from None

    def _counts(self, digest: bytes) -> Counts | None:
        return self._store.load(_name(digest), Counts.from_bytes)

    def _keep(self, digest: bytes, counted: Counts) -> None:
        self._store.keep(_name(digest), counted, Counts.to_bytes)

    def _error(self, code: str, why: str) -> RemoteError:
        log.warning("client %d: %s: %s", self._settings.identity.client, code, why)
        error = RemoteError(code)
        error.add_note(f"by the session contract: {why}")
        return error


def is_full(known: Collection[tuple[int, bytes]], number: int, most: int) -> bool:
    """Whether a request of the contract, by its number, was answered `most` times with different parameters."""
    return sum(place == number for place, _ in known) >= most


@lru_cache(maxsize=16)
def _declared(data: bytes) -> tuple[TaskRequest, ...]:
    return tuple(agreed.declared() for agreed in contract_from_bytes(data).requests)


@lru_cache(maxsize=16)
def _name(digest: bytes) -> str:
    return f"{KEPT}/{digest.hex()}"


def _limits(data: bytes, settings: Settings) -> list[str]:
    """Why a client's settings do not allow a contract."""
    contract, limits = contract_from_bytes(data), settings.limits
    if too_long := excess(contract):
        return [too_long]
    why = [f"{key} differs from the client's settings" for key in keys_that_differ(data, settings.protection, settings.privacy)]
    own, protection = b"" if settings.roster is None else settings.roster.digest, settings.protection
    pinned = protection.secure or protection.transformed or protection.encrypted
    if contract.roster != own and (contract.roster or pinned):
        why.append("its roster is not the client's")
    if contract.rounds > limits.rounds:
        why.append(f"it has {contract.rounds} rounds, the limit is {limits.rounds}")
    if limits.algorithms and contract.algorithm not in limits.algorithms:
        why.append(f"its algorithm is {contract.algorithm!r}, allowed are {', '.join(limits.algorithms)}")
    if protection.secure and contract.clip <= 0:
        why.append("its protection.secagg_clip is no number above 0")
    if protection.secure and contract.models > settings.models:
        why.append(f"members of a sum may have been sent {contract.models} models, the limit is models = {settings.models}")
    return why
