"""What one client has contributed to secure sums: the values of a round go into sums over one set of clients.

The difference of two sums over cohorts that differ by one client is that client's value, or nearly so where both values were computed from
the same model. So once a client has revealed its shares for a value that was computed in a round, it reveals none for another value of that
round, unless the same clients survived. A value is of the round in which it was computed and of those of all held values that went into it.

Guarantee: of the values that a client computes in one round of a session, and of all that is computed from these as long as they are held,
only sums over the same survivors are opened.
Reveals: a server may call the same model that of another round. Sums of successive rounds over different clients show, by their difference,
what nearly equal models make of a client's data (`docs/guarantees.md`). What tasks keep in a client's memory is of the round that reads it.
"""

from hashlib import sha256

from ..federation import messages as m
from ..federation.store import Store
from ..protocols.errors import RemoteError
from ..protocols.secagg.messages import ServerMessage, ids, names

__all__ = ["Survivors", "check_proposed", "pinned", "survivors_of", "write_down"]

Survivors = tuple[int, ...]
"""The clients whose values are in a sum, in ascending order."""
MOST_ROUNDS = 4096
"""So many rounds are remembered; values of older ones are in no sum any more."""


class _Summed(m.Message, frozen=True):
    """The digest of the survivors by round, the survivors of the latest sum, and the oldest round that is remembered."""

    rounds: tuple[tuple[int, m.Bytes32], ...]
    survivors: tuple[m.Count, ...]
    oldest: int = -(1 << 62)


class _Pinned(m.Message, frozen=True):
    """The rounds of the value that a sum is of."""

    rounds: tuple[int, ...]


def check_proposed(store: Store, kind: str, rounds: tuple[int, ...], clients: Survivors, complete: bool) -> None:
    """Refuse ("second-sum") to add a value of these `rounds` to others of these `clients`: the cohort, or with `complete` the survivors."""
    data = store.get(_name(kind))
    if data is None:
        return
    summed = m.codec.decode(data, _Summed, m.LIMIT_BYTES)
    known, latest = dict(summed.rounds), _digest(summed.survivors)
    for round in rounds:
        if round in known and complete:
            same = known[round] == _digest(clients)
        else:  # who survived earlier sums is known as a digest alone, so a cohort is judged by the latest
            same = known.get(round) != latest or set(summed.survivors) <= set(clients)
        if round < summed.oldest or not same:
            raise RemoteError("second-sum")


def write_down(store: Store, kind: str, rounds: tuple[int, ...], survivors: Survivors) -> None:
    """Keep that the client revealed its shares for a value of these `rounds`, before anybody gets them."""
    data = store.get(_name(kind))
    summed = _Summed((), ()) if data is None else m.codec.decode(data, _Summed, m.LIMIT_BYTES)
    known = dict(summed.rounds) | dict.fromkeys(rounds, _digest(survivors))
    kept = sorted(known)[-MOST_ROUNDS:]
    oldest = kept[0] if len(kept) < len(known) else summed.oldest
    store.put(_name(kind), m.encode(_Summed(tuple((round, known[round]) for round in kept), survivors, oldest)))


def pinned(store: Store, name: str, rounds: tuple[int, ...], begun: bool) -> None:
    """Keep the rounds of the value that sum `name` is of; once `begun`, refuse ("unlisted-model") others under the value's number."""
    data = m.encode(_Pinned(rounds))
    if not begun:
        store.put(f"{name}/rounds", data)
    elif store.get(f"{name}/rounds") != data:
        raise RemoteError("unlisted-model")


def survivors_of(message: ServerMessage) -> Survivors | None:
    """The survivors that a server names, None for messages without."""
    packed = getattr(message, "survivors", None)
    return None if packed is None else names(packed)


def _digest(clients: Survivors) -> bytes:
    return sha256(ids(tuple(sorted(clients)))).digest()


def _name(kind: str) -> str:
    return f"summed/{'counts' if kind == 'counts' else 'values'}"
