"""Sums in one message as their server reads them: recorded uploads less the masks that helpers sent.

Source: `protocols.one_message.server`, its last step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from ...contract.transcript import Message
from ...protocols.errors import MalformedMessage, RemoteError
from ...protocols.one_message import HelpedTerms, Sum, seed_sets
from ...protocols.one_message.blocks import counts_of, in_order, large, opened_places
from ...protocols.one_message.messages import (
    HelpedInvite,
    MaskedUpload,
    OpenedMasks,
    OpenSet,
    decode_from_helper,
    decode_invite,
    decode_to_helper,
    decode_upload,
    names,
)
from ...protocols.secagg.vectors import unwrap
from ...types import Array

__all__ = ["KINDS", "HelpedParts", "invited"]

KINDS = ("Upload", "Open", "Open answer")
"""What is recorded of a sum after its invitation, and decides it."""


def invited(message: Message, row: bytes) -> "HelpedParts | None":
    """A sum that begins with this invitation; None if it is none."""
    try:
        invite: HelpedInvite = decode_invite(row)
    except MalformedMessage:
        return None
    return HelpedParts(message.round, int(message.context.get("group", -1)), invite.terms)


@dataclass
class HelpedParts:
    """What was recorded of one sum: masked vectors by client, the set, and masks by their group of seeds, also those of counts."""

    round: int
    label: int
    terms: HelpedTerms
    vectors: dict[int, bytes] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    asked: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    masks: dict[tuple[int, ...], dict[bytes, bytes]] = field(default_factory=dict)
    counted: dict[tuple[int, ...], dict[bytes, bytes]] = field(default_factory=dict)
    counting: bool = False

    def add(self, message: Message, row: bytes) -> None:
        """Take a recorded message of this sum; any other changes nothing."""
        helper = int(message.context.get("holder", -1))
        try:
            match message.kind:
                case "helped Upload":
                    upload: MaskedUpload = decode_upload(row, self.terms)
                    self.vectors[upload.client] = upload.vector
                case "helped Open":
                    ask = decode_to_helper(row)
                    if isinstance(ask, OpenSet):
                        self.members, self.asked[helper] = names(ask.members), ask.send
                        self.counting = bool(ask.terms.clusters) and not ask.counted
                case _:
                    answer = decode_from_helper(row, self.terms)
                    if isinstance(answer, OpenedMasks) and helper in self.asked:
                        for group, mask in zip(self.asked[helper], answer.masks, strict=False):
                            kept = self.counted if self.counting else self.masks
                            kept.setdefault(group, {})[sha256(mask).digest()] = bytes(mask)
        except MalformedMessage:
            pass

    def total(self) -> Sum[HelpedTerms] | None:
        """The sum; None where its messages do not determine one, or helpers sent different masks."""
        terms, dtype = self.terms, "<u2" if self.terms.bits == 16 else "<u4"
        if not self.members or not set(self.members) <= set(self.vectors):
            return None
        masked = np.sum([np.frombuffer(self.vectors[client], dtype) for client in self.members], axis=0, dtype=dtype)
        parts, total = [(np.arange(len(masked)), self.masks)], np.zeros_like(masked)
        try:
            if terms.clusters:
                counts = self._less(masked[: terms.clusters], self.counted)
                opened = large(terms, counts_of(terms, counts, len(self.members)))
                parts = [(np.arange(terms.clusters), self.counted), (opened_places(terms, opened), self.masks)]
            for places, masks in parts:
                total[places] = self._less(masked[places], masks)
            return Sum(terms, self.members, in_order(terms, unwrap(total, terms.bits)))
        except (ValueError, RemoteError):
            return None

    def _less(self, masked: Array, masks: Mapping[tuple[int, ...], Mapping[bytes, bytes]]) -> Array:
        """A sum less the masks of each seed. Raises `ValueError` where these are not determined."""
        left = set(range(len(seed_sets(self.terms.helpers, self.terms.colluding))))
        for group, several in masks.items():
            if set(group) <= left and len(several) == 1:
                masked = masked - np.frombuffer(next(iter(several.values())), masked.dtype)
                left -= set(group)
            elif set(group) & left:
                raise ValueError("masks: more than one answer for a seed")
        if left:
            raise ValueError("masks: some are missing")
        return masked
