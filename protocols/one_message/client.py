"""A client of sums in one message: it checks the invitation and answers with one upload. It keeps no machine between messages.

Guarantee: a client accepts only terms of its own session and roster, of a later slot, that list its model, keep its minimum, its cohort
change and the effective number of clients, quantise as it allows and are no larger than it allows (`secagg.Policy`), with keys that the
helpers on its roster signed for this session and round. Of values that share a name it lets sums be taken under one quantiser, weight and
form only; helpers see to it that all are over one set. Seeds come from the given entropy, and are not kept.
Reveals: its upload.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import cast

import msgspec
import numpy as np

from .. import codec
from ..copies import check_own
from ..entropy import Entropy, system_entropy
from ..errors import RemoteError
from ..hpke import seal
from ..keys import Identity, Roster, frame, sign
from ..secagg.effective import reaches
from ..secagg.policy import Policy, check_roster
from ..secagg.summed import Name, SumRecord
from ..secagg.vectors import Contribution, add_masks, counted_weight, encode_inputs, vector_length, wrap
from . import messages as m
from .blocks import counts_first
from .terms import LABEL, HelpedTerms, check_terms, context, held, seed_sets

__all__ = ["AcceptedInvite", "accept", "name_digests", "signed_upload", "upload"]


@dataclass(frozen=True)
class AcceptedInvite:
    """An invitation that a client accepted: the terms, and the keys of helpers by their number."""

    terms: HelpedTerms
    keys: dict[int, bytes]


def name_digests(session: bytes, names: Sequence[Name]) -> bytes:
    """What a value goes by, as helpers see it: rounds of a session, and digests, which outlive sessions."""
    return b"".join(
        sorted(
            sha256(frame(LABEL + "round", session, repr(name).encode()) if isinstance(name, int) else frame(LABEL + "name", name)).digest()
            for name in set(names)
        )
    )


def accept(data: bytes, identity: Identity, policy: Policy, colluding: int, roster: Roster) -> AcceptedInvite:
    """Checks an invitation.

    Args:
        policy: in mode "active"; `clients` is the largest maximum.
        colluding: how many helpers may work with the server, by the client's own settings.

    Raises:
        RemoteError: "malformed", "wrong-context", "wrong-slot", "wrong-roster", "not-invited", "unlisted-model", "minimum-too-low",
        "cohort-change", "too-little-noise", "too-unequal", "bad-terms" or "bad-signature". LocalError: "not-on-roster".
    """
    check_own("roster", roster, Roster)
    check_roster(identity, policy, roster)
    invite = m.decode_invite(data)
    terms = invite.terms
    if terms.session != policy.session:
        raise RemoteError("wrong-context")
    if policy.after is not None and terms.slot <= policy.after:
        raise RemoteError("wrong-slot")
    if terms.roster != roster.digest:
        raise RemoteError("wrong-roster")
    if terms.cohort and identity.client not in m.names(terms.cohort):
        raise RemoteError("not-invited")
    if policy.model not in terms.models or len(terms.models) != policy.models:
        raise RemoteError("unlisted-model")
    if terms.minimum < policy.min_cohort:
        raise RemoteError("minimum-too-low")
    if terms.cohort_change < policy.cohort_change:
        raise RemoteError("cohort-change")
    if terms.noise < policy.noise:
        raise RemoteError("too-little-noise")
    _check_sizes(terms, policy, colluding, roster)
    equal = terms.least_weight == terms.weight_limit
    if not equal or policy.spread > 1:
        limit, least = (1.0, 1.0) if equal else (terms.weight_limit, terms.least_weight)
        if not reaches(terms.minimum, policy.min_cohort, limit, least, policy.spread):
            raise RemoteError("too-unequal")
    return AcceptedInvite(terms, _keys(invite, roster))


def _check_sizes(terms: HelpedTerms, policy: Policy, colluding: int, roster: Roster) -> None:
    if (terms.helpers, terms.colluding) != (len(roster.holders), colluding):
        raise RemoteError("bad-terms")
    if policy.dimension is not None and terms.dimension != policy.dimension:
        raise RemoteError("bad-terms")
    if not policy.clip[0] <= terms.clip <= policy.clip[1] or terms.levels < policy.levels:
        raise RemoteError("bad-terms")
    if terms.maximum > policy.clients or vector_length(terms) > policy.length:
        raise RemoteError("bad-terms")
    if terms.least_weight != terms.weight_limit and terms.weight_limit != policy.max_weight:
        raise RemoteError("bad-terms")
    try:
        check_terms(terms)
    except ValueError:
        raise RemoteError("bad-terms") from None


def _keys(invite: m.HelpedInvite, roster: Roster) -> dict[int, bytes]:
    """The helpers' keys. Raises `RemoteError` "bad-signature" unless they are those of the terms, signed for their session and round."""
    terms, keys = invite.terms, dict[int, bytes]()
    if len(invite.announcements) != len(terms.keys):
        raise RemoteError("bad-signature")
    for (helper, digest), data in zip(terms.keys, invite.announcements, strict=True):
        message = m.announcement_of(roster, data)
        stated = (message.helper, message.session, message.round)
        if sha256(data).digest() != digest or stated != (helper, terms.session, terms.round):
            raise RemoteError("bad-signature")
        keys[helper] = message.key
    return keys


def upload(
    accepted: AcceptedInvite,
    identity: Identity,
    policy: Policy,
    record: SumRecord,
    contribution: Contribution | Sequence[Contribution],
    entropy: Entropy = system_entropy,
) -> tuple[bytes, int]:
    """The client's one message, and the number of its values that were clipped. The record is written; store it before the message leaves.

    `contribution`: where clients choose their blocks, one for each block that this client fills.

    Raises:
        RemoteError: "second-sum" for a value that went into sums of another kind.
        LocalError: "bad-values" or "too-coarse" for a contribution that does not fit the terms.
    """
    check_own("record", record, SumRecord)
    terms, client = accepted.terms, identity.client
    agreed = context(terms)
    several = [contribution] if isinstance(contribution, Contribution) else list(contribution)
    levels, clipped = encode_inputs(several, terms, entropy, policy.most_error)
    record.enter(policy.value, terms, (), [counted_weight(one, terms) for one in several])
    del contribution, several  # the values may be as large as the upload, and there is one user of both
    seeds = [entropy(32) for _ in seed_sets(terms.helpers, terms.colluding)]
    vector = wrap(counts_first(terms, levels), terms.bits)
    add_masks(vector, ((m.mask_key(agreed, client, number, seed), 1) for number, seed in enumerate(seeds)))
    boxes = tuple(
        m.SeedBox(helper, seal(key, b"".join(seeds[number] for number in held(terms, helper)), m.box_info(agreed, client, helper)))
        for helper, key in accepted.keys.items()
    )
    commitments = b"".join(m.commitment(agreed, client, number, seed) for number, seed in enumerate(seeds))
    payload = cast(bytes, vector.view(np.uint8).data)  # encoded without a copy
    message = [signed_upload(identity, terms, name_digests(terms.session, policy.value.names), payload, boxes, commitments)]
    del levels, vector, payload  # as large as the upload, which the encoder copies twice
    return codec.encode_made(message.pop), clipped


def signed_upload(
    identity: Identity, terms: HelpedTerms, named: bytes, vector: bytes, boxes: tuple[m.SeedBox, ...], commitments: bytes
) -> m.MaskedUpload:
    """An upload with its signature."""
    unsigned = m.MaskedUpload(identity.client, context(terms), named, vector, boxes, commitments, bytes(64))
    return msgspec.structs.replace(unsigned, signature=sign(identity, m.UPLOAD, m.signed_digest(terms, unsigned)))
