"""What parties apart from the clients have in common: bytes in, bytes out, no data, state in their own store, clustering epochs by number.

They run the functions of a comparison in place of the server: only their results leave.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from ..clustering.similarity import Gram
from ..contract.operations import GramView, Then
from ..contract.protection import Protection
from ..federation import messages as m
from ..federation.host import Handler, received
from ..federation.registry import enrolled, new_session
from ..federation.settings import Settings
from ..federation.store import Store
from ..federation.task_encoding import check_small, then_from_bytes
from ..federation.values import SharedWork
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import MalformedMessage, RemoteError
from ..protocols.keys import Roster

__all__ = ["HolderParty", "HolderStep", "named", "party_for", "replayed", "then_of"]


class HolderStep(m.FederationMessage, frozen=True):
    """The new clients of one step, in order, and the function that was run (empty under release "gram")."""

    clients: tuple[int, ...]
    then: bytes


class HolderParty:
    """A party that the roster names as a holder. Subclasses answer the requests of an epoch (`_of_epoch`)."""

    def __init__(self, settings: Settings, store: Store, entropy: Entropy = system_entropy) -> None:
        self._settings, self._store, self._entropy = settings, store, entropy

    def receive(self, data: bytes) -> bytes:
        """The answer to a request, whatever its bytes. Requests that use one store are handled one after the other."""
        return received("key holder", self, data)

    def handle(self, ask: m.PartyRequest, exchange: SharedWork) -> Handler:
        """Handle a request. Raises an error for a refusal."""
        with self._store.alone():
            yield from _nothing()  # it needs no work of others
            return self._answer(ask)

    def _answer(self, ask: m.PartyRequest) -> m.Answer:
        if isinstance(ask, m.Enrol):
            return self._enrol(ask)
        if self._store.get("session") != ask.session:
            raise RemoteError("wrong-session")
        if isinstance(ask, m.Drop):
            return self._drop(ask.live)
        return self._of_epoch(ask)

    def _of_epoch(self, ask: m.PartyRequest) -> m.Answer:
        raise RemoteError("forbidden")

    def _roster(self) -> Roster:
        roster = self._settings.roster
        if roster is None or self._settings.identity.public() not in roster.holders:
            raise RemoteError("not-on-roster")
        return roster

    def _enrol(self, ask: m.Enrol) -> m.Enrolled:
        if ask.version != m.VERSION:
            raise RemoteError("version")
        self._roster()
        new_session(self._store, ask.session)
        return enrolled(self._settings.identity, ask, "key-holder", True)

    def _drop(self, live: Sequence[int]) -> m.Acknowledged:
        kept = {str(epoch) for epoch in live}
        self._drop_epochs(lambda epoch: epoch not in kept)
        return m.Acknowledged()

    def _drop_epochs(self, gone: Callable[[str], bool]) -> None:
        for name in self._store.names():
            kind, _, epoch = name.partition("/")
            if kind in ("epoch", "pending") and gone(epoch):
                self._store.drop(name)


def _nothing() -> Generator[Any, Any, None]:
    yield from ()


def replayed(steps: Sequence[HolderStep], gram_of: Callable[[list[int]], Gram]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The last step's result and evidence. All functions run again, which restores their memory, because they are pure.

    `gram_of`: the Gram matrix of some clients, in order. Raises `RemoteError` "forbidden" for a result that is not small.
    """
    order: list[int] = []
    memory: dict[str, Any] = {}
    result: Mapping[str, Any] = {}
    evidence: Mapping[str, Any] = {}
    for step in steps:
        order += step.clients
        result, evidence = then_of(step.then)(GramView(gram_of(order), step.clients, memory))
    try:
        check_small(result, len(order))
    except TypeError:
        raise RemoteError("forbidden") from None
    return result, evidence


def then_of(data: bytes) -> Then:
    """A function of the fixed list. Raises `RemoteError` "unknown-task"."""
    try:
        return then_from_bytes(data)
    except MalformedMessage:
        raise RemoteError("unknown-task") from None


def named(values: Mapping[str, Any]) -> tuple[m.NamedArray, ...]:
    """Arrays with their names, as they travel."""
    return tuple(m.NamedArray(name, np.asarray(value)) for name, value in values.items())


def party_for(protection: Protection) -> type[HolderParty]:
    """The class of the party that holds keys or shares, or helps with sums. Each is loaded when it is first asked for."""
    module, name = ("share_holders", "ShareHolderParty") if protection.comparison.shared else ("key_holder", "KeyHolderParty")
    if protection.sums.helped:
        module, name = "sum_helper", "SumHelperParty"
    party: type[HolderParty] = getattr(import_module(f".{module}", __package__), name)
    return party
