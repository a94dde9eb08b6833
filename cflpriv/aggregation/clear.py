"""In the clear, for sums and for comparisons. With client-level privacy a trusted server adds noise to sums.

Guarantee: none. Reveals: every update and weight, every signature or its public sketch. Source: McMahan et al. 2017; PACFL, Algorithm 1.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..contract.calls import ClearMeans, ClientContribution, Recorder, SumCall, large_enough
from ..contract.handles import GroupMean, PartLayout
from ..errors import InputError
from ..federation import messages as m
from ..federation.host import ApplyTransform
from ..federation.protections import Asked, ClientParts, ServerParts
from ..federation.transforms import clustering_name, sketched
from ..protocols.errors import MalformedMessage, RemoteError
from ..types import Array, check_array
from .vector_epochs import VectorComparison

__all__ = ["ClearClientComparison", "ClearClientSum", "ClearServerComparison", "ClearServerSum"]


class ClearClientSum:
    """Sends its update as it is, with its sample count if asked; under client-level privacy the update was clipped before."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[ApplyTransform, Any, m.Given]:
        yield from ()
        return m.Given(tuple(m.NamedArray(part, value) for part, value in values.items()), self._parts.samples() if ask.weigh else 0)


class ClearServerSum:
    """Averages updates. With client-level privacy they are clipped again, and the sum gets noise."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts

    def means(self, call: SumCall, asked: Asked, choice: m.HeldValue | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        parts, groups = self._parts, large_enough(call)
        clipped = parts.clipped
        if clipped is not None:
            clipped.settle(call)
        weigh = not call.public_weights
        ask = m.Give(parts.session, "sum", asked.number, asked.parts, "", weigh, None if clipped is None else m.Bounded(*clipped.bound))
        contributors = sorted({member.client for member in call.contributions if any(label in groups for label in member.labels)})
        labels = {member.client: member.labels for member in call.contributions}

        def arrived(some: Sequence[int]) -> Iterator[ClientContribution]:
            for client, answer in sorted(parts.registry.ask(dict.fromkeys(some, ask), "sum").items()):
                update = self._update(answer, asked.layout, client, weigh)
                if update is not None and isinstance(answer, m.Given):
                    yield ClientContribution(client, update, asked.weight[client] or float(answer.samples), labels[client])

        if clipped is not None:
            return clipped.central(replace(call, contributions=tuple(arrived(contributors))), record)
        portions = list(parts.portions(contributors, asked.layout.nbytes))
        means = ClearMeans(call, let_go=len(portions) > 1)
        for some in portions:
            means.add(tuple(arrived(some)))
        return means.means(record)

    def _update(self, answer: m.Answer, layout: PartLayout, client: int, weigh: bool) -> dict[str, Array] | None:
        """The parts of an update, or None if they differ from the declared layout, or lack the sample count that was asked for."""
        try:
            if not isinstance(answer, m.Given) or (weigh and answer.samples < 1):
                raise MalformedMessage
            if [array.name for array in answer.values] != list(layout.places):
                raise MalformedMessage
            parts = {array.name: array.value for array in answer.values}
            for name, dtype, shape in layout.parts:
                if parts[name].shape != shape or parts[name].dtype.str != dtype:
                    raise MalformedMessage
                if isinstance(parts[name], np.ndarray):  # what is made on demand was checked by its task
                    check_array(f"client {client}: {name}", parts[name])
        except (MalformedMessage, InputError):
            self._parts.registry.refusals.append((client, "sum", "malformed"))
            return None
        return parts


class ClearClientComparison:
    """Sends its rows as they are, or a public sketch of them."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[ApplyTransform, Any, m.Given]:
        yield from ()
        width = self._parts.settings.protection.sketched
        if width is None:
            return m.Given(tuple(m.NamedArray(part, value) for part, value in values.items()), 0)
        named = clustering_name(ask.transform)
        if len(values) != 1 or named is None:
            raise RemoteError("forbidden")
        (rows,) = (np.atleast_2d(np.asarray(value)) for value in values.values())
        return m.Given((m.NamedArray("rows", sketched(named.number, width)(rows)),), 0)


class ClearServerComparison(VectorComparison):
    """Compares vectors as they are."""
