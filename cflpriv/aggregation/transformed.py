"""Sums and comparisons under a transform that the clients share and the server does not have.

Guarantee: a server without the clients' secret learns of the updates of one sum, or the rows of one clustering epoch, what the kind of
transform reveals: under "haar" their Gram matrix and nothing else (`transform = "per_round"`; with "fixed", the Gram matrix of all updates
ever sent). Weights are public or equal. Each transform serves one epoch, sum or fold, and is applied to one value of a client: a second
value could be linked with the first, and values that the server chose would reveal the transform.
Reveals: the Gram matrix: norms and angles between updates of one sum, and between rows; who is in which group; everything, to a server that
colludes with one client. Where means of several sums are folded into one, also the norm of the total, and so the angle between successive
means. **Under "permutation" and "signed_permutation" a curious server can infer the labels of clients' data from the updates of a network,
even with a fresh key for every sum**: these transforms exist to be measured. Zero rows of padded signatures stay zero.
Active attacks (`attacks.active`): one value for each transform: `repeated_epoch`, `opened_by_another`; the clients' secret: `sybil_group`;
not prevented, against a server that lies: `chosen_rows`.
Source: Sattler et al. 2019 (CFL), Algorithm 5 (there with a permutation); `protocols.orthonormal`, `protocols.sketch`.
"""

from collections.abc import Generator, Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Any

import numpy as np

from ..contract.calls import Recorder, SumCall, large_enough, weighted_mean
from ..contract.handles import GroupMean, Shared, join, times
from ..contract.transformed_parts import Transformed
from ..errors import InputError
from ..federation import messages as m
from ..federation.host import ApplyTransform
from ..federation.protections import Asked, ClientParts, Folding, ServerParts
from ..federation.store import Store
from ..federation.transforms import check_hidden, clustering_name, group_epoch, sketched
from ..federation.values import SharedWork
from ..protocols.errors import MalformedMessage, RemoteError, TooFewClients
from ..protocols.orthonormal import HAAR_LIMIT
from ..types import Array, check_array
from .vector_epochs import VectorComparison

__all__ = ["TransformedClientComparison", "TransformedClientSum", "TransformedServerComparison", "TransformedServerSum", "take"]


# --- comparisons


class TransformedClientComparison:
    """Sends its rows, or a public sketch of them, under the epoch's transform."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[ApplyTransform, Any, m.Given]:
        protection, named = self._parts.settings.protection, clustering_name(ask.transform)
        if len(values) != 1 or named is None:
            raise RemoteError("forbidden")
        (rows,) = (np.atleast_2d(np.asarray(value)) for value in values.values())
        if rows.ndim != 2 or not rows.size or rows.dtype.kind != "f":
            raise RemoteError("bad-input")
        reduced, kind = sketched(named.number, protection.sketched)(rows), protection.comparison.name
        check_length("gram", "vectors", kind, reduced.shape[-1], '["sketch", "haar"] or ["hadamard"]')
        made = self._parts.compared(named, reduced.shape[-1], kind)
        take(self._parts.store, named.purpose, rows, self._parts.values.origin(ask.held).request)
        hidden = yield ApplyTransform(made, reduced)
        return m.Given((m.NamedArray("rows", hidden),), 0)


class TransformedServerComparison(VectorComparison):
    """Compares transformed vectors, which have the inner products of the original rows."""


# --- sums


class TransformedClientSum:
    """Sends its update under a transform, and folds transformed sums for the others."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[ApplyTransform, Any, m.Given]:
        """An update under a transform, fresh for each sum unless the settings say "fixed". Sample counts are never sent."""
        fixed = self._parts.settings.protection.transform == "fixed"
        if ask.weigh or not (ask.transform.partition("@")[0] == "sum/fixed" if fixed else ask.transform.startswith("sum/")):
            raise RemoteError("forbidden")
        vector = self._parts.finite("+".join(values), join(values))
        return (yield from self._hidden("mean", ask.transform, vector, fixed, self._parts.values.origin(ask.held).request))

    def fold(self, ask: m.Fold, exchange: SharedWork) -> Generator[ApplyTransform, Array, m.Given]:
        """Open transformed parts, add them up, multiply them by `times`, and send the result back under a fresh transform.

        Clear and own parts are refused, because the result would reveal them.
        """
        shown = any(part.clear is not None or part.own for part in (ask.value, *ask.times))
        if shown or len(ask.times) > 1 or not ask.transform.startswith("apply/"):
            raise RemoteError("forbidden")
        opened = self._parts.values.open
        try:
            value, *numbers = [opened(addends, self._parts.transforms, exchange) for addends in (ask.value, *ask.times)]
        except InputError:  # only other clients have this secret
            raise RemoteError("not-held") from None
        try:
            for number in numbers:
                value = times(value, number)
        except InputError:
            raise RemoteError("bad-input") from None
        return (yield from self._hidden("apply", ask.transform, np.ravel(value), False, m.encode(ask)))

    def _hidden(
        self, operation: str, purpose: str, vector: Array, fixed: bool, request: bytes
    ) -> Generator[ApplyTransform, Array, m.Given]:  # fmt: skip
        kind = self._parts.settings.protection.sum
        check_hidden(operation, len(vector), kind)
        check_length("sum", "updates", kind, len(vector), "'hadamard' or 'secagg'")
        made = self._parts.transforms()(purpose, len(vector))
        if not fixed:
            take(self._parts.store, purpose, vector, request)
        (blind,) = yield ApplyTransform(made, vector[None])
        return m.Given((m.NamedArray("blind", blind),), 0)


class TransformedServerSum:
    """Averages transformed updates. The clients invert the transform of the mean."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts

    def means(self, call: SumCall, asked: Asked, choice: m.HeldValue | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        """Means of transformed updates. Groups that share no client are asked together."""
        groups = large_enough(call)
        dimension, where = asked.layout.size, asked.layout.places
        check_hidden("mean", dimension, self._parts.protection.sum)
        check_length("sum", "updates", self._parts.protection.sum, dimension, "'hadamard' or 'secagg'")
        fixed = self._parts.protection.transform == "fixed"
        purposes = {label: self._parts.named("sum/fixed" if fixed else f"sum/{call.round}/{call.number}/{label}") for label in groups}
        asks: dict[int, dict[int, m.PartyRequest]] = {
            label: dict.fromkeys(
                (member.client for member in call.members(label)),
                m.Give(self._parts.session, "sum", asked.number, asked.parts, purposes[label], False),
            )
            for label in groups
        }
        size = transform_size(self._parts.protection.sum, dimension)
        if any(len(member.labels) > 1 for member in call.contributions):  # group by group, because a client gets one request at a time
            rows_of = {label: self._rows(asks[label], size) for label in groups}
        else:
            of_all = self._rows({client: ask for several in asks.values() for client, ask in several.items()}, size)
            rows_of = dict.fromkeys(groups, of_all)
        means: list[GroupMean | None] = [None] * call.k
        for label in groups:
            contributors = rows_of[label]
            members = [member for member in call.members(label) if member.client in contributors]
            if not members:
                continue
            rows = [contributors[member.client] for member in members]
            record(
                "blind update", "clients", "server", [member.client for member in members], [{"blind": row} for row in rows],
                readers=("server",),
                context={
                    "transform": purposes[label], "kind": self._parts.protection.sum, "group": label, "dimension": dimension,
                    "parts": where,
                },
            )  # fmt: skip
            if len(members) < call.min_cohort:  # recorded all the same, because the server got them
                continue
            weights = [member.weight for member in members]
            value = weighted_mean(rows, weights)
            parts = {
                name: Shared(transformed=(Transformed(purposes[label], value, *where[name], shape, dimension),))
                for name, _, shape in asked.layout.parts
            }
            means[label] = GroupMean(parts, float(sum(weights)), len(members), contributors=tuple(member.client for member in members))
        if not any(means):
            raise TooFewClients(tuple(len(call.members(label)) for label in groups), call.min_cohort)
        return tuple(means)

    def _rows(self, asks: Mapping[int, m.PartyRequest], size: int) -> dict[int, Array]:
        """The transformed updates of this size, by client."""
        contributors: dict[int, Array] = {}
        present = self._parts.registry.present
        for client, answer in self._parts.registry.ask({client: ask for client, ask in asks.items() if client in present}, "sum").items():
            try:
                if not isinstance(answer, m.Given) or [array.name for array in answer.values] != ["blind"]:
                    raise MalformedMessage
                row = check_array(f"client {client}: blind", answer.values[0].value, ndim=1)
                if len(row) != size:
                    raise MalformedMessage
                contributors[client] = row
            except (MalformedMessage, InputError):
                self._parts.registry.refusals.append((client, "sum", "malformed"))
        return contributors

    def folded(self, folding: Folding, clients: Sequence[int], record: Recorder) -> Transformed | None:
        """Transformed parts made one under a fresh transform, by the first of `clients` that returns a vector of the right length."""
        parts, kind, operation, terms = self._parts, self._parts.protection.sum, folding.operation, folding.transformed
        value = m.Addends(None, tuple(terms), ())
        number = (m.Addends(None, tuple(folding.times), ()),) if folding.times else ()
        size = prod(terms[0].shape)
        for turn, client in enumerate(clients):
            purpose = parts.named(f"{folding.place}/{turn}")
            answer = parts.registry.ask({client: m.Fold(parts.session, purpose, value, number)}, operation).get(client)
            if answer is None:
                continue
            try:
                if not isinstance(answer, m.Given) or len(answer.values) != 1:
                    raise MalformedMessage
                hidden = check_array(operation, answer.values[0].value, ndim=1)
                if len(hidden) != transform_size(kind, size):
                    raise MalformedMessage
            except (MalformedMessage, InputError):
                parts.registry.refusals.append((client, operation, "malformed"))
                continue
            named = ((operation, terms), ("times", folding.times))
            arguments = {f"{name}/{term.transform}": term.value for name, several in named for term in several}
            record("arguments", "server", "clients", [client], arguments, readers=("server", "clients"))
            context = {"transform": purpose, "kind": kind}
            record("blind result", "clients", "server", [client], [{"blind": hidden}], readers=("server",), context=context)
            return Transformed(purpose, hidden, 0, size, terms[0].shape, size)
        return None


def take(store: Store, purpose: str, value: Array, request: bytes) -> None:
    """Mark a transform as used for this value. Raises "used-transform" if it was used for another value.

    A value is the same if it answers the same `request`, too: else a refusal would tell whether two values of the client are equal.
    """
    group_epoch(purpose)
    name, mark = f"used/{purpose}", sha256(sha256(request).digest() + np.ascontiguousarray(value).tobytes()).digest()
    before = store.get(name)
    if before is not None and before != mark:
        raise RemoteError("used-transform")
    store.put(name, mark)


def check_length(key: str, what: str, kind: str, dimension: int, instead: str) -> None:
    """Raises `InputError` for vectors too long for a dense rotation, and names an alternative."""
    if kind == "haar" and dimension > HAAR_LIMIT:
        raise InputError(
            f"protection.{key}: 'haar' keeps d² numbers and takes {what} up to d = {HAAR_LIMIT}; these have d = {dimension}: use {instead}"
        )


def transform_size(kind: str, dimension: int) -> int:
    """The length of a transformed vector: Hadamard pads to a power of two."""
    return 1 << (dimension - 1).bit_length() if kind == "hadamard" else dimension
