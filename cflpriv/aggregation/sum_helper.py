"""The helpers of sums in one message, separate parties (`holder_party`): each unmasks one set of clients a slot (`protocols.one_message`).

Guarantee: that of `protocols.one_message.Helper`, by this party's own settings: how many helpers there are and may collude, the minimum
cohort size, and how the clients of successive sums may differ. What it signed outlives sessions.
Reveals: to helpers who is summed with whom; they learn no values.
Source: `protocols.one_message`.
"""

from collections.abc import Iterator, MutableMapping

from ..federation import messages as m
from ..federation.store import Store
from ..protocols.errors import RemoteError
from ..protocols.one_message import Helper, HelperPolicy
from .holder_party import HolderParty

__all__ = ["SumHelperParty"]


class _Named(MutableMapping[str, bytes]):
    """A party's store as a mapping."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, name: str) -> bytes:
        value = self._store.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: bytes) -> None:
        self._store.put(name, value)

    def __delitem__(self, name: str) -> None:
        self._store.drop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._store.names()))

    def __len__(self) -> int:
        return len(tuple(self._store.names()))


class SumHelperParty(HolderParty):
    """A helper between messages: all of it is in its store."""

    def _of_epoch(self, ask: m.PartyRequest) -> m.Answer:
        if not isinstance(ask, m.Help):  # it has no data
            raise RemoteError("forbidden")
        helper = self._helper(ask.session)
        if not ask.messages:
            return m.Helped((m.Stepped(helper.announcement(ask.round)),))
        return m.Helped(tuple(_answer(helper, message) for message in ask.messages))

    def _helper(self, session: bytes) -> Helper:
        settings, protection = self._settings, self._settings.protection
        if not protection.sums.helped or len(self._roster().holders) != protection.helpers:
            raise RemoteError("forbidden")
        change = protection.smallest_sum if protection.cohort_change == "min_cohort" else 0
        policy = HelperPolicy(session, protection.helpers_colluding, protection.smallest_sum, change, length=settings.limits.numbers)
        return Helper(settings.identity, self._roster(), policy, _Named(self._store), self._entropy)

    def round_seed(self, session: bytes) -> bytes:
        """The seed of the current round's key, for audits that run the party themselves."""
        return self._helper(session).round_seed

    def secrets(self) -> dict[str, str]:
        """Nothing: what coalitions of helpers learn is measured by active attacks."""
        return {}


def _answer(helper: Helper, message: bytes) -> m.Stepped | m.Refused:
    try:
        return m.Stepped(helper.receive(message))
    except RemoteError as error:
        return m.Refused(error.code)
