"""Sums in one message as their server reads them: recorded uploads less the masks that helpers sent.

Source: `protocols.one_message.server`, its last step.
"""

from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from ...contract.transcript import Message
from ...protocols.errors import MalformedMessage
from ...protocols.one_message import HelpedTerms, Sum, seed_sets
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
    """What was recorded of one sum: masked vectors by client, the set, and masks by their group of seeds."""

    round: int
    label: int
    terms: HelpedTerms
    vectors: dict[int, bytes] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    asked: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    masks: dict[tuple[int, ...], dict[bytes, bytes]] = field(default_factory=dict)

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
                case _:
                    answer = decode_from_helper(row, self.terms)
                    if isinstance(answer, OpenedMasks) and helper in self.asked:
                        for group, mask in zip(self.asked[helper], answer.masks, strict=False):
                            self.masks.setdefault(group, {})[sha256(mask).digest()] = bytes(mask)
        except MalformedMessage:
            pass

    def total(self) -> Sum[HelpedTerms] | None:
        """The sum; None where its messages do not determine one, or helpers sent different masks."""
        terms, dtype = self.terms, "<u2" if self.terms.bits == 16 else "<u4"
        left = set(range(len(seed_sets(terms.helpers, terms.colluding))))
        if not self.members or not set(self.members) <= set(self.vectors):
            return None
        total = np.sum([np.frombuffer(self.vectors[client], dtype) for client in self.members], axis=0, dtype=dtype)
        for group, several in self.masks.items():
            if not set(group) <= left or len(several) != 1:
                return None
            total = total - np.frombuffer(next(iter(several.values())), dtype)
            left -= set(group)
        try:
            return None if left else Sum(terms, self.members, unwrap(total, terms.bits))
        except ValueError:
            return None
