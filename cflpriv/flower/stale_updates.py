"""Clients whose training did not begin at the model that they were sent: a model of an earlier round, the first one, or their own last one.

A client that was sent s_t and returned r_t moved by r_t − s_t. If the training began elsewhere, at b, then r_t − b is explained better than
r_t − s_t by what is known of trainings: the client's move in the round before, and the mean move of the others. `ADVANTAGE` compares what
the two explanations leave. By itself this also holds for a client that training pulls back to where it was. So two more numbers must agree:
the weight of s_t in r_t, by a regression on s_t − b beside those moves, is near 0 instead of near 1; and for an earlier model, the client
made less way than the others' median by half of the step of the server. Each is the median over rounds.

A client that forgets in each round where it began cannot be told from one that began elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..state_checks import FEWEST_VALUES, PROPORTIONAL, factor_between, rounding_of
from ..types import Array
from .doubtful_updates import named

__all__ = ["History", "fingerprint", "places"]

SAMPLED = 1 << 14
"""Numbers of a model that are kept, drawn at random."""
FEWEST_ROUNDS = 3
"""Rounds of a client that are judged together, each with two before it."""
FEWEST_OTHERS = 3
BEHIND = (-0.1, 0.5, -0.5)
"""Least advantage of the model before, largest weight of the model sent, and largest lag, where a client began at the model before."""
OWN = (0.4, 0.15, 0.25, -0.2)
"""Least advantage of the client's own model, largest weights of the model sent beside it and beside the model before, and largest lag."""
FIRST = (0.1, 0.05)
"""Least advantage of the first model, and largest weight of the model sent."""
FEWEST_EQUAL, SHARE_EQUAL = 16, 0.005
"""Numbers that must be equal to those of one model, and their share,"""
TIMES = 20
"""and so many times as many as are equal to those of the other."""
SAME = 1e-3
"""How far the factor between two updates may be from 1 where one repeats the other."""


def places(size: int, seed: int) -> Array:
    """The places of a model of `size` numbers that are kept."""
    if size <= SAMPLED:
        return np.arange(size)
    return np.sort(np.random.default_rng([seed, size]).choice(size, SAMPLED, replace=False))


def fingerprint(update: Array, sent: Array, other: Array) -> int:
    """By the numbers that training did not change: 1 if it began at the model `other` (d,), -1 if at the model `sent` (d,), 0 if unknown.

    Numbers without a gradient come back to the last bit: then the `update` (d,) is `other` - `sent`, as rounded. Others agree by chance.
    """
    apart = other - sent
    differ = apart != 0
    equal, kept = int((update[differ] == apart[differ]).sum()), int((update[differ] == 0).sum())
    least = max(FEWEST_EQUAL, SHARE_EQUAL * len(update))
    return 1 if equal >= least and equal > TIMES * kept else -1 if kept >= least and kept > TIMES * equal else 0


def _left(move: Array, by: list[Array]) -> float:
    """The squared length of what moves `by` (d,) leave of `move` (d,), by least squares."""
    some = [other for other in by if other.any()]
    if not some:
        return float(move @ move)
    matrix = np.stack([other / np.linalg.norm(other) for other in some], axis=1)
    rest = move - matrix @ np.linalg.lstsq(matrix, move, rcond=1e-6)[0]
    return max(float(rest @ rest), 1e-300)


def _weight(move: Array, step: Array, beside: list[Array]) -> float:
    """The coefficient of `step` in the regression of `move` on it and on the moves `beside`; NaN without a step."""
    if not step.any():
        return float("nan")
    some = [step, *(other for other in beside if other.any())]
    sizes = [float(np.linalg.norm(vector)) for vector in some]
    matrix = np.stack([vector / size for vector, size in zip(some, sizes, strict=True)], axis=1)
    return float(np.linalg.lstsq(matrix, move, rcond=1e-6)[0][0]) / sizes[0]


@dataclass
class History:
    """What clients were sent, and where they came, in the last rounds, at `SAMPLED` places, and numbers of each round and client.

    `evidence`: client -> rows of (advantage, weight, lag of "behind"; advantage, weight of "own"; advantage, weight of "first").
    """

    first: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    rounds: list[dict[int, tuple[Array, Array]]] = field(default_factory=list)
    sent: list[dict[int, Array]] = field(default_factory=list)
    evidence: dict[int, list[tuple[float, ...]]] = field(default_factory=dict)

    def doubts(self, seen: Mapping[int, tuple[Array, Array]]) -> list[str]:
        """Add a round, (sent, update) by client at the same places, and give what is odd so far, as sentences."""
        now = {client: (sent.astype(np.float64), sent.astype(np.float64) + update) for client, (sent, update) in seen.items()}
        kinds: dict[str, list[int]] = {}
        clear = set[int]()
        for client, (sent, update) in seen.items():
            marks = [fingerprint(update, sent, earlier) for earlier in self._sent_earlier(client)]
            if 1 in marks:
                kinds.setdefault(EARLIER, []).append(client)
            elif -1 in marks:
                clear.add(client)
            if words := self._repeated(client, sent, update):
                kinds.setdefault(words, []).append(client)
        lags = self._lags(now)
        for client, (sent, back) in now.items():
            if client not in clear and len(self.rounds) >= 2 and all(client in row for row in self.rounds[-2:]):
                others = [b - s for other, (s, b) in now.items() if other != client and np.array_equal(s, sent)]
                if len(others) >= FEWEST_OTHERS and (back != sent).any():
                    self._note(client, sent, back, np.mean(others, axis=0), lags.get(client, 0.0))
            kind = "" if client in clear else self._kind(client)
            if kind and client not in kinds.get(kind, []):
                kinds.setdefault(kind, []).append(client)
        for client, pair in now.items():
            self.first.setdefault(client, pair)
        self.rounds = [*self.rounds[-1:], now]
        self.sent = [*self.sent[-2:], {client: sent for client, (sent, _) in seen.items()}]
        return [f"{named(clients)}: {words}" for words, clients in kinds.items()]

    def _repeated(self, client: int, sent: Array, update: Array) -> str:
        """Words for an update, or a model returned, of a round before, which a training from another model does not give."""
        back, rounding = sent.astype(np.float64) + update, rounding_of(sent)
        moved, length = len(np.unique(update)) >= FEWEST_VALUES, float(np.linalg.norm(update))
        if not moved or rounding > 100 * PROPORTIONAL * length:
            return ""
        for s, b in (row[client] for row in (self.first, *self.rounds) if client in row):
            if np.array_equal(s, sent) or np.array_equal(s, b):
                continue
            if min(np.linalg.norm(back - b), np.linalg.norm(back - s)) <= 3 * rounding:
                return AGAIN
            factor = factor_between(update.astype(np.float64), b - s, rounding, rounding)
            if factor is not None and abs(factor - 1) < SAME:
                return REPEATED
        return ""

    def _sent_earlier(self, client: int) -> list[Array]:
        """The models that a client was sent in the last rounds, as they were sent."""
        return [row[client] for row in self.sent if client in row]

    def _lags(self, now: Mapping[int, tuple[Array, Array]]) -> dict[int, float]:
        """How much less way each client made than the median, in steps of the server since the round before."""
        way = {}
        for client, (sent, back) in now.items():
            before = self.rounds[-1].get(client) if self.rounds else None
            step = None if before is None else sent - before[0]
            if step is not None and step.any():
                way[client] = float((back - sent) @ step) / float(step @ step)
        middle = float(np.median(list(way.values()))) if len(way) > FEWEST_OTHERS else 0.0
        return {client: value - middle for client, value in way.items()} if len(way) > FEWEST_OTHERS else {}

    def _note(self, client: int, sent: Array, back: Array, others: Array, lag: float) -> None:
        (s2, r2), (s1, r1) = (row[client] for row in self.rounds[-2:])
        s0 = self.first[client][0]
        before = _mean_move(self.rounds[-1], client)
        begun = _mean_move({c: pair for c, pair in self.first.items() if np.array_equal(pair[0], self.first[client][0])}, client)
        left = _left(back - sent, [r1 - s1, others])
        self.evidence.setdefault(client, []).append((
            np.log(left / _left(back - s1, [r1 - s2, before])), _weight(back - s1, sent - s1, [others, s1 - s2, r1 - s1, r1 - s2]), lag,
            np.log(left / _left(back - r1, [r1 - r2, others])), _weight(back - r1, sent - r1, [others, r1 - r2, s1 - r2]),
            np.log(left / _left(back - s0, [r1 - s0, begun])), _weight(back - s0, sent - s0, [others, r1 - s0]),
        ))  # fmt: skip

    def _kind(self, client: int) -> str:
        rows = self.evidence.get(client, [])
        if len(rows) < FEWEST_ROUNDS:
            return ""
        behind, weight, lag, own, own_weight, first, first_weight = np.nanmedian(np.array(rows), axis=0)
        if first > FIRST[0] and first_weight < FIRST[1]:
            return EARLIER
        if own > OWN[0] and own_weight < OWN[1] and weight < OWN[2] and lag < OWN[3]:
            return ITS_OWN
        return EARLIER if behind > BEHIND[0] and weight < BEHIND[1] and lag < BEHIND[2] else ""


EARLIER = "trained from a model of an earlier round, not from the one sent, or answered one round behind"
AGAIN = "returned the arrays of an earlier round, whatever it was sent"
REPEATED = "returned the update of an earlier round again"
ITS_OWN = "trained from its own last model, not from the one sent"


def _mean_move(row: Mapping[int, tuple[Array, Array]], client: int) -> Array:
    """The mean move of the others in a round, from the model that the client was sent, too."""
    sent = row[client][0]
    moves = [b - s for other, (s, b) in row.items() if other != client and np.array_equal(s, sent)]
    return np.mean(moves, axis=0) if moves else np.zeros(len(sent))
