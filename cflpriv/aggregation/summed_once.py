"""The client's record of its secure sums: the values of one round go into sums over one set of clients.

The difference of two sums over cohorts that differ by one client is that client's value, or close to it if both values come from the same
model. So after a client has revealed its shares for a value of a round, it reveals none for another value of that round, unless the same
clients survived. A value belongs to the round in which it was computed, and to the rounds of all held values that went into it.

Guarantee: of the values that a client computes in one round of a session, and of all that is computed from these while they are held, only
sums over the same survivors are opened.
Reveals: a server may present the same model in another round. The difference of sums of successive rounds over different clients reveals
what nearly equal models make of a client's data (`docs/guarantees.md`). Values in a client's memory belong to the round that reads them.
"""

from hashlib import sha256

from ..federation import messages as m
from ..federation.store import Store
from ..protocols.errors import RemoteError
from ..protocols.secagg.messages import ServerMessage, ids, names

__all__ = ["SurvivorIds", "check_proposed", "pinned", "survivors_of", "write_down"]

SurvivorIds = tuple[int, ...]
"""The clients whose values are in a sum, in ascending order."""
MOST_ROUNDS = 4096
"""The number of rounds that are remembered. The client contributes no value of an older round."""


class _Summed(m.FederationMessage, frozen=True):
    """The digest of the survivors by round, the survivors of the latest sum, and the oldest round that is remembered."""

    rounds: tuple[tuple[int, m.Bytes32], ...]
    survivors: tuple[m.Count, ...]
    oldest: int = -(1 << 62)


class _Pinned(m.FederationMessage, frozen=True):
    """The rounds of the value that a sum is of."""

    rounds: tuple[int, ...]


def check_proposed(store: Store, kind: str, rounds: tuple[int, ...], clients: SurvivorIds, complete: bool) -> None:
    """Raises "second-sum" for a value of these `rounds` in a sum over other clients than before.

    `clients` are the cohort, or with `complete` the survivors.
    """
    data = store.get(_name(kind))
    if data is None:
        return
    summed = m.codec.decode(data, _Summed, m.LIMIT_BYTES)
    known, latest = dict(summed.rounds), _digest(summed.survivors)
    for round in rounds:
        if round in known and complete:
            same = known[round] == _digest(clients)
        else:  # of earlier sums only the digest of the survivors is known, so the latest sum decides about a cohort
            same = known.get(round) != latest or set(summed.survivors) <= set(clients)
        if round < summed.oldest or not same:
            raise RemoteError("second-sum")


def write_down(store: Store, kind: str, rounds: tuple[int, ...], survivors: SurvivorIds) -> None:
    """Record a sum of a value of these `rounds`, before the client reveals its shares."""
    data = store.get(_name(kind))
    summed = _Summed((), ()) if data is None else m.codec.decode(data, _Summed, m.LIMIT_BYTES)
    known = dict(summed.rounds) | dict.fromkeys(rounds, _digest(survivors))
    kept = sorted(known)[-MOST_ROUNDS:]
    oldest = kept[0] if len(kept) < len(known) else summed.oldest
    store.put(_name(kind), m.encode(_Summed(tuple((round, known[round]) for round in kept), survivors, oldest)))


def pinned(store: Store, name: str, rounds: tuple[int, ...], begun: bool) -> None:
    """Record the rounds of the value in sum `name`. Once `begun`, raises "unlisted-model" for a value of other rounds."""
    data = m.encode(_Pinned(rounds))
    if not begun:
        store.put(f"{name}/rounds", data)
    elif store.get(f"{name}/rounds") != data:
        raise RemoteError("unlisted-model")


def survivors_of(message: ServerMessage) -> SurvivorIds | None:
    """The survivors in a server's message, or None."""
    packed = getattr(message, "survivors", None)
    return None if packed is None else names(packed)


def _digest(clients: SurvivorIds) -> bytes:
    return sha256(ids(tuple(sorted(clients)))).digest()


def _name(kind: str) -> str:
    return f"summed/{'counts' if kind == 'counts' else 'values'}"
