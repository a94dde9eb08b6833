"""Secure sums as their server reads them: the recorded messages of a sum, unmasked again.

A transcript holds what the server received, masked vectors and revealed shares, but not the sum that follows from them. The next model
shows most sums, rounded to its precision. It does not show the sum of the last round, nor the weight of a cohort: under
`weights = "examples"` its number of samples. The server knows both.

Source: Bonawitz et al. 2017, figure 4, the server's last step; the functions are those of `protocols.secagg`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ...contract.transcript import Message
from ...protocols.errors import MalformedMessage, ProtocolError
from ...protocols.secagg import Sum, Terms
from ...protocols.secagg.graph import neighbours
from ...protocols.secagg.messages import (  # fmt: skip
    Advert,
    Adverts,
    Deliver,
    Masked,
    Reveal,
    Shares,
    Unmask,
    context,
    decode_client,
    decode_server,
    names,
)
from ...protocols.secagg.unmasking import masks_of
from ...protocols.secagg.vectors import InputTerms, total_mask, unwrap
from ...types import Array
from ..adversary import AdversaryView
from .helped_sums import KINDS as KINDS_HELPED
from .helped_sums import HelpedParts, invited

__all__ = ["OpenedSum", "opened_sums", "rows_of"]

KINDS = ("Adverts", "Shares", "Deliver", "Masked", "Unmask", "Reveal")


@dataclass(frozen=True, eq=False)
class OpenedSum:
    """The sum of a round; `label` is its group's, −1 in an oblivious sum, whose blocks are of several groups."""

    round: int
    label: int
    sum: Sum[InputTerms]

    def mean_of(self, label: int) -> Array | None:
        """The mean (dimension,) of a group; None where this sum is not of the group, or weighs nothing."""
        cluster = label if self.sum.terms.blocks else None
        known = [block for block, _ in self.sum.terms.blocks] if self.sum.terms.blocks else [self.label]
        if label not in known or self.sum.weight(cluster) <= 0:
            return None
        return np.asarray(self.sum.mean(cluster), np.float64)


@dataclass
class _Parts:
    """What was recorded of one sum, by client."""

    round: int
    label: int
    terms: Terms
    adverts: dict[int, Advert] = field(default_factory=dict)
    commitments: dict[int, bytes] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    masked: dict[int, bytes] = field(default_factory=dict)
    reveals: dict[int, Reveal] = field(default_factory=dict)


def opened_sums(
    view: AdversaryView, first_round: int = 0, wanted: Callable[[InputTerms], bool] = lambda terms: True
) -> list[OpenedSum]:  # fmt: skip
    """The secure sums of means in a server's view, from a round on, in order, of `wanted` terms.

    Sums that failed, or were recorded in part, are left out.
    """
    parts: dict[bytes, _Parts] = {}
    helped: dict[tuple[int, ...], HelpedParts] = {}
    for message in view.messages if view.is_server else ():
        if message.operation == "mean" and message.payload is not None and message.round >= first_round:
            _collect(parts, message)
            _collect_helped(helped, message)
    opened = [
        OpenedSum(known.round, known.label, total) for agreed, known in parts.items() if (total := _opened(agreed, known)) is not None
    ]
    opened += [OpenedSum(one.round, one.label, whole) for one in helped.values() if (whole := one.total()) is not None]
    return [total for total in opened if wanted(total.sum.terms)]


def rows_of(message: Message) -> Iterator[bytes]:
    """The messages of single clients in a message's payload, or the one to or from a key holder or helper."""
    rows = np.atleast_2d(np.asarray((message.payload or {}).get("bytes", np.zeros((0, 0), np.uint8))))
    lengths = (message.payload or {}).get("bytes.length", np.full(len(rows), rows.shape[1] if rows.ndim == 2 else 0))
    for row, length in zip(rows, lengths, strict=True):
        yield np.asarray(row[: int(length)], np.uint8).tobytes()


def _collect_helped(parts: dict[tuple[int, ...], HelpedParts], message: Message) -> None:
    """Add a recorded message to the sum in one message of its slot."""
    protocol, _, kind = message.kind.partition(" ")
    slot = tuple(message.context.get("slot", ()))
    if protocol != "helped":
        return
    for row in rows_of(message):
        if kind == "Invite" and slot not in parts and (begun := invited(message, row)) is not None:
            parts[slot] = begun
        elif kind in KINDS_HELPED and slot in parts:
            parts[slot].add(message, row)


def _collect(parts: dict[bytes, _Parts], message: Message) -> None:
    """Add a recorded message to the sum that it is of."""
    protocol, _, kind = message.kind.partition(" ")
    if protocol != "secagg" or kind not in KINDS:
        return
    for row in rows_of(message):
        try:
            decoded = decode_server(row) if message.source == "server" else decode_client(row, len(row))
        except MalformedMessage:
            continue
        if isinstance(decoded, Adverts):
            label = int(message.context.get("group", -1))
            known = parts.setdefault(context(decoded.terms), _Parts(message.round, label, decoded.terms))
            known.adverts |= {advert.client: advert for advert in decoded.adverts}
            continue
        agreed = getattr(decoded, "context", b"")
        if agreed not in parts:
            continue
        match decoded:
            case Shares():
                parts[agreed].commitments[decoded.client] = decoded.commitment
            case Deliver():
                parts[agreed].members = names(decoded.members)
            case Masked():
                parts[agreed].masked[decoded.client] = decoded.vector
            case Unmask():
                parts[agreed].survivors = names(decoded.survivors)
            case Reveal():
                parts[agreed].reveals[decoded.client] = decoded


def _opened(agreed: bytes, known: _Parts) -> Sum[Terms] | None:
    """The sum; None where its messages do not determine one."""
    terms = known.terms
    dtype = "<u2" if terms.bits == 16 else "<u4"
    if not known.survivors or not set(known.survivors) <= set(known.masked):
        return None

    def near(client: int, among: tuple[int, ...]) -> frozenset[int]:
        return neighbours(terms.graph_seed, terms.cohort, terms.degree, client) & frozenset(among)

    try:
        total = np.frombuffer(known.masked[known.survivors[0]], dtype).copy()
        for client in known.survivors[1:]:
            total += np.frombuffer(known.masked[client], dtype)
        masks = masks_of(terms, agreed, known.adverts, known.commitments, known.members, known.survivors, known.reveals, near)
        return Sum(terms, known.survivors, unwrap(total + total_mask((masks, total.size, dtype)), terms.bits))
    except (ProtocolError, ValueError, KeyError):
        return None
