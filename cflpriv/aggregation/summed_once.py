"""What one client has contributed to secure sums: the values of a round go into sums over one set of clients.

The difference of two sums over cohorts that differ by one client is that client's value, or nearly so where both values were computed from
the same model. So once a client has revealed its shares for a value that was computed in a round, it reveals none for another value of that
round, or of an earlier one, unless the same clients survived.

Guarantee: of the values that a client computes in one round of a session, and of all that is computed from these, only sums over the same
survivors are opened.
Reveals: a server may call the same model that of another round. Sums of successive rounds over different clients show, by their difference,
what nearly equal models make of a client's data (`docs/threat_model.md`).
Active attacks (`attacks.active`): `second_sum`, `computed_again`, `derived_copy`, `second_unmasking`; what it does not stop: `next_round`.
"""

from ..federation import messages as m
from ..federation.store import Store
from ..federation.values import LATEST
from ..protocols.errors import RemoteError
from ..protocols.secagg.messages import ServerMessage, names

__all__ = ["Survivors", "check_proposed", "survivors_of", "write_down"]

Survivors = tuple[int, ...]
"""The clients whose values are in a sum, in ascending order."""


class _Last(m.Message, frozen=True):
    """The latest round of which a value went into a sum, and with whom."""

    round: int
    survivors: tuple[m.Count, ...]


def check_proposed(store: Store, kind: str, round: int, clients: Survivors, complete: bool) -> None:
    """Refuse ("second-sum") to add a value of `round` to others of these `clients`: the cohort, or with `complete` the survivors."""
    data = store.get(_name(kind))
    if data is None:
        return
    last = m.codec.decode(data, _Last, m.LIMIT_BYTES)
    same = set(last.survivors) == set(clients) if complete else set(last.survivors) <= set(clients)
    if round < last.round or (round == last.round and not same):
        raise RemoteError("second-sum")


def write_down(store: Store, kind: str, round: int, survivors: Survivors) -> None:
    """Keep that the client revealed its shares for a value of `round`, before anybody gets them; of what others made nothing is kept."""
    if round == LATEST:
        return
    store.put(_name(kind), m.encode(_Last(round, survivors)))


def survivors_of(message: ServerMessage) -> Survivors | None:
    """The survivors that a server names, None for messages without."""
    packed = getattr(message, "survivors", None)
    return None if packed is None else names(packed)


def _name(kind: str) -> str:
    return f"summed/{'counts' if kind == 'counts' else 'values'}"
