"""Examine the evidence before another system is attacked: whether the states can be those of one local training each.

A wrong input gives a figure that looks right, and mostly an all-clear. So every check below looks for a fault that correct input has with a
stated small probability. If any check fails, no attack runs: each figure is `evidence_doubtful`, with the reasons. `foreign_samples` checks
the samples, `foreign_fit` and `foreign_origin` whether the updates fit them, `foreign_replay` whether the declared training gives them, and
`foreign_weights` whether each sample has a share in them.

Checks here, of states alone, and what a correct input would need to fail them:

- an update that is exactly zero, although rate × gradient is above the rounding of the parameters (`foreign_fit.is_rounded_away`);
- the same state returned by several clients, or sent twice to one client: equal to the last bit;
- updates that are multiples of each other to within `PROPORTIONAL` and the rounding of their states, in at least `FEWEST_VALUES` numbers;
- a state returned that is unrelated to the state sent: the regression coefficient of the one on the other is below `UNRELATED`, at
  `DEVIATIONS` deviations of the coefficient of independent numbers (5: p < 1e-6 for noise of any size), in every array, and in all
  together, if so many deviations are less than that there;
- a state returned that is a multiple of the state sent, as sums weighted by samples are;
- updates whose mean is zero: the state sent is the mean of the states returned, the next round's;
- a state sent whose weights are all zero, although several arrays moved; a state sent that is the mean of states returned in a later round;
- a state returned that is nearer to a state sent earlier, or to another client, than to its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import combinations

import numpy as np

from ...state_checks import DEVIATIONS, FEWEST_VALUES, UNRELATED, factor_between, kept_share, rounding_of
from ...types import Array
from .foreign_fit import exchanged, is_rounded_away, misled
from .foreign_origin import foreign_samples, mixed_updates, other_rate
from .foreign_replay import is_reproduced, not_reproduced
from .foreign_samples import apart_samples, mislabelled, misplaced, nearly_members, repeated_samples, unlabelled
from .foreign_states import flat
from .foreign_system import System, UpdateRecord
from .foreign_weights import untrained_samples

__all__ = ["doubts_of", "named_clients"]

ROUNDED = 0.01
"""Updates of whose length rounding may be more than this share are not compared."""
SCALED, ALIKE = 2.0, 1.25
"""A state returned is a multiple of the state sent if all arrays grow by more than the first, and by factors within the second."""
BALANCED = 1e-3
"""Updates whose mean is shorter than this share of what independent ones would have belong to the mean of the states returned."""
NEARER = 0.5
MOST_COMPARED, MOST_STATES = 32, 128
"""Updates of one round that are compared in pairs, and states sent that each state returned is compared with."""
MOST_NAMED = 4


def doubts_of(system: System) -> dict[str, str]:
    """Why the evidence is doubtful: a reason for each check that failed, by its name; empty if none did."""
    settled = CHECKS_OF_ORIGIN if is_reproduced(system) else ()
    return {name: reason for name, check in CHECKS.items() if name not in settled and (reason := check(system))}


def named_clients(clients: Sequence[int]) -> str:
    """Clients for people: "client 3", "clients 0, 1, 2 and 3", "clients 0, 1, 2, 3 and 5 more"."""
    if len(clients) == 1:
        return f"client {clients[0]}"
    shown, more = clients[:MOST_NAMED], len(clients) - MOST_NAMED
    if more > 0:
        return f"clients {', '.join(map(str, shown))} and {more} more"
    return f"clients {', '.join(map(str, shown[:-1]))} and {shown[-1]}"


# --- states as vectors --------------------------------------------------------------------------------------------------------------


def _update(record: UpdateRecord) -> Array:
    """What the parameters moved by, (d,), float64."""
    return np.concatenate([
        np.subtract(after, record.before.parameters[name], dtype=np.float64).reshape(-1)
        for name, after in record.after.parameters.items()
    ])  # fmt: skip


def _rounding(record: UpdateRecord) -> float:
    """The length of what rounding may have added to an update."""
    return float(np.linalg.norm([rounding_of(value) for value in record.after.parameters.values()]))


def _digest(parameters: Mapping[str, Array]) -> bytes:
    digest = sha256()
    for name in sorted(parameters):
        digest.update(np.asarray(parameters[name], np.float64).tobytes())
    return digest.digest()


def _rounds(system: System) -> Iterator[list[UpdateRecord]]:
    """The n-th update of each client, for each n."""
    for number in range(max(len(records) for records in system.records.values())):
        yield [records[number] for records in system.records.values() if len(records) > number]


def _is_moved(record: UpdateRecord) -> bool:
    return any(not np.array_equal(after, record.before.parameters[name]) for name, after in record.after.parameters.items())


def _records(system: System) -> list[UpdateRecord]:
    return [record for records in system.records.values() for record in records]


# --- checks -------------------------------------------------------------------------------------------------------------------------


def _unmoved(system: System) -> str:
    """Updates that are zero."""
    still = [record for record in _records(system) if not _is_moved(record) and not is_rounded_away(system, record)]
    if not still:
        return ""
    clients = list(dict.fromkeys(record.client for record in still))
    return (
        f"{named_clients(clients)}: the states before and after are equal, so nothing was trained; record the state after local training, "
        "and copy states (`deepcopy(model.state_dict())`) before the model changes"
    )


def _returned_twice(system: System) -> str:
    """One state returned by several clients, or in several rounds, or sent to others."""
    moved = [record for record in _records(system) if _is_moved(record)]
    by_digest: dict[bytes, list[int]] = {}
    for record in moved:
        by_digest.setdefault(_digest(record.after.parameters), []).append(record.client)
    for clients in by_digest.values():
        if len(clients) > 1:
            where = named_clients(list(dict.fromkeys(clients)))
            return (
                f"{where}: the same state was returned {len(clients)} times; record the state of each client's own training (if before "
                "and after are exchanged, all return the state of the server)"
            )
    sent: dict[bytes, list[int]] = {}
    for record in _records(system):
        sent.setdefault(_digest(record.before.parameters), []).append(record.client)
    for digest, returned in by_digest.items():
        others = [client for client in sent.get(digest, []) if client != returned[0]]
        if len(others) > 1 or (others and len(others) == len(system.records) - 1):
            where = f"client {returned[0]}: returned the state that {named_clients(others)} were sent"
            return f"{where}; are its states before and after exchanged?"
    return ""


def _sent_twice(system: System) -> str:
    """One state sent to a client in several rounds, from which it returned several states."""
    for client, records in system.records.items():
        first: dict[bytes, int] = {}
        for number, record in enumerate(records):
            if _is_moved(record) and first.setdefault(_digest(record.before.parameters), number) != number:
                return (
                    f"client {client}: was sent the same state in updates {first[_digest(record.before.parameters)] + 1} and {number + 1}; "
                    "are these updates of several clients? give each client a number of its own"
                )
    return ""


def _proportional(system: System) -> str:
    """Updates of different clients that are multiples of each other."""
    for records in _rounds(system):
        updates = [(record.client, _update(record), _rounding(record)) for record in records[:MOST_COMPARED] if _is_moved(record)]
        exact = [(c, u, r) for c, u, r in updates if np.count_nonzero(u) >= FEWEST_VALUES and r <= ROUNDED * np.linalg.norm(u)]
        for (one, u, ru), (other, v, rv) in combinations(exact, 2):
            if (factor := factor_between(u, v, ru, rv)) is not None:
                return (
                    f"clients {one} and {other}: the update of the one is {factor:.4g} times that of the other; two trainings on different "
                    "samples do not agree like this: record each client's own state"
                )
    return ""


def _coefficients(record: UpdateRecord) -> tuple[Array, Array]:
    """Regression coefficients of each array returned on the array sent, and of all together, with their deviations for independent arrays.

    Together, each array counts by its size, on the scale on which the array sent has mean square 1.
    """
    made, deviations, whole = list[float](), list[float](), list[tuple[Array, Array]]()
    for name, after in record.after.parameters.items():
        a, b = (np.asarray(value, np.float64).reshape(-1) for value in (after, record.before.parameters[name]))
        length = float(b @ b)
        if length > 0:
            scale = np.sqrt(b.size / length)
            whole.append((scale * a, scale * b))
    pairs = [(a, b) for a, b in whole if b.size >= FEWEST_VALUES]
    if len(whole) > 1:
        pairs.append((np.concatenate([a for a, _ in whole]), np.concatenate([b for _, b in whole])))
    for a, b in pairs:
        kept, deviation = kept_share(a, b)
        made.append(kept)
        deviations.append(deviation)
    return np.array(made), np.array(deviations)


def _unrelated(system: System) -> str:
    """States returned that are not what a training from the state sent gives: an update, another model's, or a weighted state."""
    alone, scaled, least = list[int](), list[int](), 0.0
    for record in _records(system):
        made, deviations = _coefficients(record)
        if not len(made) or not _is_moved(record):
            continue
        settings = record.settings
        kept = 1.0 if settings.lr is None or record.steps is None else max(0.0, 1 - settings.lr * settings.weight_decay) ** record.steps
        precise = made[UNRELATED * kept > DEVIATIONS * deviations]
        if len(precise) and (precise < UNRELATED * kept).all():
            alone.append(record.client)
        elif (made - DEVIATIONS * deviations).min() > SCALED and made.max() < ALIKE * made.min():
            scaled.append(record.client)
            least = float(made.min())
    if alone:
        return (
            f"{named_clients(list(dict.fromkeys(alone)))}: the state after has nothing in common with the state before, which a training "
            "would change; give whole states, no updates (after = before + update), and the state that this client was sent"
        )
    if scaled:
        return (
            f"{named_clients(list(dict.fromkeys(scaled)))}: the state after is about {least:.3g} times the state before; give states "
            "without the factor, such as a number of samples"
        )
    return ""


def _balanced(system: System) -> str:
    """Updates from one state whose mean is zero."""
    for number, records in enumerate(_rounds(system)):
        from_state: dict[bytes, list[UpdateRecord]] = {}
        for record in filter(_is_moved, records):
            from_state.setdefault(_digest(record.before.parameters), []).append(record)
        for moved in from_state.values():
            counts = [np.ones(len(moved))]
            if all(record.samples is not None for record in moved):
                counts.append(np.array([record.samples for record in moved], np.float64))
            if len(moved) > 1 and any(_is_zero_mean(moved, weights) for weights in counts):
                return (
                    f"update {number + 1} of {named_clients([record.client for record in moved])}: the state before is the mean of the "
                    "states after, so that it is the next round's; give the state that clients were sent in this round"
                )
    return ""


def _is_zero_mean(records: Sequence[UpdateRecord], weights: Array) -> bool:
    total, squares = np.zeros(1), 0.0
    for weight, record in zip(weights, records, strict=True):
        update = _update(record)
        total, squares = total + weight * update, squares + weight**2 * float(update @ update)
    return bool(np.linalg.norm(total) <= BALANCED * np.sqrt(squares))


def _nearer(system: System) -> str:
    """States returned that belong to a state sent to another client, or earlier."""
    earlier: dict[bytes, Array] = {}
    for records in _rounds(system):
        for record in records:
            digest = _digest(record.before.parameters)
            if digest not in earlier and len(earlier) < MOST_STATES:
                earlier[digest] = flat(record.before.parameters)
        sent = np.stack(list(earlier.values()))
        for record in records:
            if not _is_moved(record):
                continue
            after, own = flat(record.after.parameters), float(np.linalg.norm(_update(record)))
            if min(float(np.linalg.norm(after - other)) for other in sent) < NEARER * own:
                return (
                    f"client {record.client}: its state after is nearer to a state that was sent to another client, or in an earlier "
                    "round, than to its own state before; give the state that this client was sent in this round"
                )
    return ""


def _zeros(system: System) -> str:
    """States sent with zeros as all weights of several layers: their gradients are zero, too."""
    for record in _records(system):
        weights = {name: sent for name, sent in record.before.parameters.items() if np.ndim(sent) > 1}
        changed = [name for name, sent in weights.items() if not np.array_equal(sent, record.after.parameters[name])]
        if len(changed) > 1 and not any(np.any(sent) for sent in weights.values()):
            return (
                f"client {record.client}: all weights of its state before are zero, so that {changed[0]!r} and {changed[1]!r} have no "
                "gradient; give the state that this client was sent"
            )
    return ""


def _reversed(system: System) -> str:
    """Updates in the wrong order: the state sent in one is the mean of the states returned in a later one."""
    rounds = list(_rounds(system))
    means = [_means_returned(records) for records in rounds]
    for early, later in combinations(range(len(rounds)), 2):
        if len({_digest(record.before.parameters) for record in rounds[early]}) > 1:
            continue
        start = flat(rounds[early][0].before.parameters)
        if any(np.linalg.norm(mean - start) <= BALANCED * spread for mean, spread in means[later]):
            return (
                f"the state before of update {early + 1} is the mean of the states after of update {later + 1}; give the updates of a "
                "client in the order of rounds"
            )
    return ""


def _means_returned(records: Sequence[UpdateRecord]) -> list[tuple[Array, float]]:
    """The mean (d,) of the states returned in a round, by equal weights and by numbers of samples, each with the states' deviation."""
    if len(records) < 2:
        return []
    first, counts = flat(records[0].after.parameters), [record.samples for record in records if record.samples is not None]
    total, squares, weighted = np.zeros_like(first), 0.0, np.zeros_like(first)
    for record in records:
        apart = flat(record.after.parameters) - first  # so that no digits cancel
        total, squares, weighted = total + apart, squares + float(apart @ apart), weighted + (record.samples or 0) * apart
    mean = total / len(records)
    spread = float(np.sqrt(max(0.0, squares / len(records) - float(mean @ mean))))
    whole = len(counts) == len(records) and sum(counts) > 0
    return [(first + mean, spread), *([(first + weighted / sum(counts), spread)] if whole else [])]


CHECKS: Mapping[str, Callable[[System], str]] = {
    "equal states": _unmoved, "repeated states": _returned_twice, "one name for several clients": _sent_twice,
    "proportional updates": _proportional, "unrelated states": _unrelated, "state before of the next round": _balanced,
    "state before of another training": _nearer, "scale of samples": misplaced, "repeated samples": repeated_samples,
    "labels of auxiliary samples": mislabelled, "direction of updates": misled, "samples of another client": exchanged,
    "state before of zeros": _zeros, "order of rounds": _reversed, "samples near members": nearly_members,
    "samples apart from members": apart_samples, "updates of several clients": mixed_updates,
    "samples of another training": foreign_samples, "length of updates": other_rate, "training done again": not_reproduced,
    "labels of clients": unlabelled, "samples without a share": untrained_samples,
}  # fmt: skip
"""Checks by name; each gives a reason, or "" where the evidence stands it."""
CHECKS_OF_ORIGIN = ("direction of updates", "samples of another client", "updates of several clients", "samples of another training",
                    "length of updates")  # fmt: skip
"""What the declared training answers, done again, where it gives the updates (`foreign_replay`)."""
