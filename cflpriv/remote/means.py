"""The server's side of `mean`: who is asked for what, stage by stage, under each protection."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from ..channels import MOST_WEIGHT, Contribution, Recorder, SumCall, above_floor, check_hidden, clear_means, places, weighted_mean
from ..client_level import ClippedMean
from ..errors import InputError
from ..handles import Blind, GroupMean, Shared
from ..protection import Protection
from ..protocols.errors import MalformedMessage, TooFewClients
from ..protocols.orthonormal import TRANSFORMS
from ..protocols.secagg import Slot, Sum, Terms, counts_of
from ..types import Array, check_array
from . import messages as m
from .roll import Roll
from .summing import FEWEST_LEVELS, balanced, bound
from .sums import OBLIVIOUS, Layout, SecureSums, group_mean
from .transformed import check_length
from .values import UNTRACED

__all__ = ["Asked", "Means"]


Kind = Literal["sum", "counts", "blocks"]


@dataclass(frozen=True)
class Asked:
    """What is to be averaged: parts of the values held as `number`, their layout, each client's public weight (0: its sample count)."""

    number: int
    parts: tuple[str, ...]
    layout: Layout
    weight: Mapping[int, float]


@dataclass(frozen=True)
class Means:
    """Takes means over messages. Who does not answer takes no part; a group that falls below the floor has no mean.

    With `clipped`, contributions are clipped at the clients and sums get noise: here, or in shares inside secure sums.
    """

    _roll: Roll
    _session: bytes
    _protection: Protection
    _sums: SecureSums
    _named: Callable[[str], str]
    _clipped: ClippedMean | None = None

    def of_groups(self, call: SumCall, asked: Asked, record: Recorder) -> tuple[GroupMean | None, ...]:
        """The mean of each group at the floor, by whatever the protection names. Raises `TooFewClients` if there is none."""
        groups = above_floor(call)
        if self._clipped is not None:
            self._clipped.settle(call, size_of(asked.layout))
        if self._protection.sum in TRANSFORMS:
            return self._blind(call, asked, groups, record)
        heard = sorted({one.client for one in call.contributions if any(label in groups for label in one.labels)})
        if not self._protection.secure:
            ask = m.Give(self._session, "sum", asked.number, asked.parts, "", not call.public_weights, self._bounded())
            arrived = []
            labels_of = {one.client: one.labels for one in call.contributions}
            for client, answer in sorted(self._roll.ask(dict.fromkeys(heard, ask), "sum").items()):
                parts = self._update(answer, asked.layout, client)
                if parts is None or not isinstance(answer, m.Given) or (not call.public_weights and answer.samples < 1):
                    continue
                arrived.append(Contribution(client, parts, asked.weight[client] or float(answer.samples), labels_of[client]))
            call = replace(call, contributions=tuple(arrived))
            if self._clipped is None:
                return clear_means(call, record)
            above_floor(call)  # of those who arrived
            return self._clipped.central(call, record)
        return self._secure(call, asked, groups, record)

    def _bounded(self) -> m.Bounded | None:
        """What clients whose sums get noise here are told."""
        if self._clipped is None:
            return None
        return m.Bounded(self._clipped.privacy.relation, self._clipped.privacy.clip_norm, self._clipped.multiplier)

    def _secure(self, call: SumCall, asked: Asked, groups: Sequence[int], record: Recorder) -> tuple[GroupMean | None, ...]:
        """One secure sum for each group, abreast; with the clients' shares of noise in them where they are private."""
        whole, shares = asked, None
        plan = None if self._clipped is None else self._clipped.plan(size_of(asked.layout))
        if self._clipped is not None and self._clipped.shares is not None and plan is not None:
            asked = replace(asked, layout=(m.Described("shares", "<f8", (plan.dimension,)),))
            shares = m.Shares(
                plan.relation, plan.clip_norm, plan.levels_per_unit, plan.local_variance, plan.survivors, self._clipped.shares.seed
            )
        slot, following = (call.round + 1, call.number), (call.round + 2, call.number)
        terms = {}
        for label in groups:
            members = call.members(label)
            weighted = not call.public_weights or len({one.weight for one in members}) > 1
            limit = self._limit(call, members)
            dimension = size_of(asked.layout)
            cohort = [one.client for one in members]
            listed = self._listed(call, cohort, self._like(asked, "sum", None, shares))
            terms[label] = self._sums.terms(slot, cohort, listed, dimension, limit if weighted else 0.0, following)
            check_balance(call, members, terms[label])
        step = self._stepper(slot, call, asked, "sum", None, shares)
        ended = self._sums.run(terms, step, self._exchange, record)
        means: list[GroupMean | None] = [None] * call.k
        for label, total in ended.items():
            if isinstance(total, Sum):
                common = 1.0 if terms[label].weight_limit else call.members(label)[0].weight
                means[label] = group_mean(total, None, asked.layout, len(total.survivors), common)
        if not any(means):
            raise TooFewClients(tuple(len(call.members(label)) for label in groups), call.floor)
        if self._clipped is not None:
            empty = {part.name: np.zeros(part.shape, np.dtype(part.dtype)) for part in whole.layout}
            return self._clipped.opened(means, call, Contribution(-1, empty, 1.0, ()))
        return tuple(means)

    def _blind(self, call: SumCall, asked: Asked, groups: Sequence[int], record: Recorder) -> tuple[GroupMean | None, ...]:
        """Updates under the clients' transform, averaged unseen; one stage for all groups that share no client."""
        dimension, where = size_of(asked.layout), places({part.name: part.shape for part in asked.layout})
        check_hidden("mean", dimension, self._protection.sum)
        check_length("sum", "updates", self._protection.sum, dimension, "'hadamard' or 'secagg'")
        fixed = self._protection.transform == "fixed"
        purposes = {label: self._named("sum/fixed" if fixed else f"sum/{call.round}/{call.number}/{label}") for label in groups}
        asks: dict[int, dict[int, m.Ask]] = {
            label: dict.fromkeys(
                (one.client for one in call.members(label)),
                m.Give(self._session, "sum", asked.number, asked.parts, purposes[label], False),
            )
            for label in groups
        }
        size = transform_size(self._protection.sum, dimension)
        if any(len(one.labels) > 1 for one in call.contributions):  # group by group: a client is asked one thing at a time
            rows_of = {label: self._rows(asks[label], size) for label in groups}
        else:
            everybody = self._rows({client: ask for several in asks.values() for client, ask in several.items()}, size)
            rows_of = dict.fromkeys(groups, everybody)
        means: list[GroupMean | None] = [None] * call.k
        for label in groups:
            heard = rows_of[label]
            members = [one for one in call.members(label) if one.client in heard]
            if not members:
                continue
            rows = [heard[one.client] for one in members]
            record(
                "blind update", "clients", "server", [one.client for one in members], [{"blind": row} for row in rows],
                readers=("server",),
                context={
                    "transform": purposes[label], "kind": self._protection.sum, "group": label, "dimension": dimension, "parts": where,
                },
            )  # fmt: skip
            if len(members) < call.floor:  # they are on record all the same: they left their clients
                continue
            weights = [one.weight for one in members]
            value = weighted_mean(rows, weights)
            parts = {
                part.name: Shared(blind=(Blind(purposes[label], value, *where[part.name], part.shape, dimension),)) for part in asked.layout
            }
            means[label] = GroupMean(parts, float(sum(weights)), len(members), heard=tuple(one.client for one in members))
        if not any(means):
            raise TooFewClients(tuple(len(call.members(label)) for label in groups), call.floor)
        return tuple(means)

    def _rows(self, asks: Mapping[int, m.Ask], size: int) -> dict[int, Array]:
        """The transformed updates of those who gave one of this size."""
        heard: dict[int, Array] = {}
        present = self._roll.present
        for client, answer in self._roll.ask({client: ask for client, ask in asks.items() if client in present}, "sum").items():
            try:
                if not isinstance(answer, m.Given) or [one.name for one in answer.values] != ["blind"]:
                    raise MalformedMessage
                row = check_array(f"client {client}: blind", answer.values[0].value, ndim=1)
                if len(row) != size:
                    raise MalformedMessage
                heard[client] = row
            except (MalformedMessage, InputError):
                self._roll.refusals.append((client, "sum", "malformed"))
        return heard

    def oblivious(self, call: SumCall, asked: Asked, choice: m.Mine | m.Picks, record: Recorder) -> tuple[GroupMean | None, ...]:
        """A sum of counts, then one over the blocks of clusters at the floor; who is where stays with the clients."""
        clients = [one.client for one in call.contributions]
        counts, blocks = (self._listed(call, clients, self._like(asked, kind, choice)) for kind in ("counts", "blocks"))
        limit = self._limit(call, call.contributions)
        first, second = (call.round + 1, 2 * call.number), (call.round + 1, 2 * call.number + 1)
        counted = self._sums.run(
            {OBLIVIOUS: self._sums.counts(first, clients, counts, call.k, second)},
            self._stepper(first, call, asked, "counts", choice), self._exchange, record,
        )[OBLIVIOUS]  # fmt: skip
        if not isinstance(counted, Sum):
            raise counted
        dimension = size_of(asked.layout)
        terms = self._sums.blocks(counted, second, blocks, dimension, limit)
        check_balance(call, call.contributions, terms)
        step = self._stepper(second, call, asked, "blocks", choice)
        total = self._sums.run({OBLIVIOUS: terms}, step, self._exchange, record)[OBLIVIOUS]
        if not isinstance(total, Sum):
            raise total
        means: list[GroupMean | None] = [None] * call.k
        sizes = counts_of(counted)
        equal = call.public_weights and len({one.weight for one in call.contributions}) == 1
        for label, _ in terms.blocks:
            count = round(total.weight(label) / call.contributions[0].weight) if equal else sizes[label]
            means[label] = group_mean(total, label, asked.layout, count)
        return tuple(means)

    def _limit(self, call: SumCall, members: Sequence[Contribution]) -> float:
        """The most that a client may weigh: clients tell public weights from sample counts by it, whose limit is `max_weight`."""
        if not call.public_weights:
            return self._protection.max_weight
        heaviest = max(one.weight for one in members)
        return heaviest if heaviest != self._protection.max_weight else float(np.nextafter(heaviest, np.inf))

    def _like(self, asked: Asked, kind: Kind, groups: m.Mine | m.Picks | None, noise: m.Shares | None = None) -> m.Step:
        """A step as all members of a sum are told it."""
        return m.Step(self._session, (0, 0), asked.number, asked.parts, 0.0, 0, kind, groups, b"", noise)

    def _listed(self, call: SumCall, clients: Sequence[int], like: m.Step) -> list[bytes]:
        """What a sum binds to, no more of it than the algorithm speaks of in public: clients would refuse a longer list."""
        if self._protection.secagg_mode == "active" and UNTRACED in {call.models[client] for client in clients}:
            raise InputError(
                "protection.secagg_mode = 'active': what is to be added up was computed from what clients relayed to each other or hold of "
                "their own, which no sum can be bound to; use 'passive', which trusts the server to follow the protocol"
            )
        listed = sorted({bound(like, call.models[client]) for client in clients})
        if len(listed) > call.models_at_most:
            raise InputError(
                f"mean: members of one group were sent {len(listed)} different models, where the algorithm speaks of {call.models_at_most}"
            )
        return listed

    def _stepper(
        self, slot: Slot, call: SumCall, asked: Asked,
        kind: Kind, groups: m.Mine | m.Picks | None, noise: m.Shares | None = None,
    ) -> Callable[[int, bytes], m.Step]:  # fmt: skip
        clients = {label: [one.client for one in call.members(label)] for label in range(call.k)}
        like = self._like(asked, kind, groups, noise)
        lists: dict[int, int] = {}
        for members in clients.values():
            lists |= dict.fromkeys(members, len(self._listed(call, members, like)) if members else 0)

        def step(client: int, said: bytes) -> m.Step:
            return msgspec.structs.replace(like, slot=slot, weight=asked.weight[client], models=lists[client], said=said)

        return step

    def _exchange(self, steps: Mapping[int, m.Step], stage: str) -> Mapping[int, bytes]:
        here = self._roll.present
        present = {client: step for client, step in steps.items() if client in here}
        before = len(self._roll.refusals)
        answers = self._roll.ask(present, stage) if present else {}
        words = {word for client, _, word in self._roll.refusals[before:] if client in present}
        most = max((step.models for step in present.values()), default=0)
        if not answers and words == {"forbidden"} and most > 1:  # else shared layers would stay as they are, round for round
            raise InputError(
                f"mean: the members of one sum were sent {most} different models (as the algorithm says), and clients allow fewer: write "
                f"models = {most} into their settings"
            )
        return {client: answer.said for client, answer in answers.items() if isinstance(answer, m.Stepped)}

    def _update(self, answer: m.Answer, layout: Layout, client: int) -> dict[str, Array] | None:
        """The parts of an update that are as they were said to be, else None."""
        if not isinstance(answer, m.Given) or [one.name for one in answer.values] != [part.name for part in layout]:
            return None
        try:
            parts = {one.name: one.value for one in answer.values}
            for part in layout:
                if parts[part.name].shape != part.shape or parts[part.name].dtype.str != part.dtype:
                    raise MalformedMessage
                if isinstance(parts[part.name], np.ndarray):  # what is made on demand was checked by its task
                    check_array(f"client {client}: {part.name}", parts[part.name])
        except (MalformedMessage, InputError):
            self._roll.refusals.append((client, "sum", "malformed"))
            return None
        return parts


def check_balance(call: SumCall, members: Sequence[Contribution], terms: Terms) -> None:
    """`InputError` for public weights that clients would refuse."""
    lightest = min(one.weight for one in members)
    if call.public_weights and not balanced(lightest, terms):
        raise InputError(
            f"mean: weights from {lightest:g} to {terms.weight_limit:g}: the heaviest client could have more than {MOST_WEIGHT:.0%} of a "
            "sum over the fewest survivors, which clients refuse; make weights more alike, or raise the floor"
        )
    if call.public_weights and terms.weight_limit and lightest / terms.weight_limit * terms.levels < FEWEST_LEVELS:
        raise InputError(
            f"mean: weights from {lightest:g} to {terms.weight_limit:g}: the lightest is below {FEWEST_LEVELS} of the {terms.levels} "
            "levels up to the heaviest, which clients refuse; make weights more alike, or use secagg_bits = 32"
        )


def size_of(layout: Layout) -> int:
    """How many numbers parts have in all."""
    return sum(int(np.prod(part.shape, dtype=int)) for part in layout)


def transform_size(kind: str, dimension: int) -> int:
    """How long a vector is under a transform: Hadamard pads to a power of two."""
    return 1 << (dimension - 1).bit_length() if kind == "hadamard" else dimension
