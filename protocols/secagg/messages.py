"""What do client and server say to each other? The public terms of a sum and the ten messages, as typed, bounded, canonical bytes.

Guarantee: `decode_client` and `decode_server` return a well-formed message or raise `MalformedMessage`; lists
of clients are strictly increasing, so nobody is named twice. `context(terms)` is a hash of everything that
was agreed in public; every later message carries it and every key, box and signature is bound to it, so a
message of another session, round, sum, cohort or model list does not fit. Reveals: all fields except the
boxes and the masked vector are readable by the server; the transport hides them from outsiders.
"""

import math
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .. import codec
from ..entropy import Entropy, system_entropy
from ..errors import MalformedMessage
from ..fixedpoint import Bits, FixedPoint, check_no_overflow, largest_levels
from ..keys import SEAL_OVERHEAD_BYTES, Roster, frame
from .graph import COMPLETE_UP_TO, complete_threshold, sparse_parameters
from .shamir import SHARE_BYTES

__all__ = [
    "LABEL",
    "Advert",
    "Adverts",
    "Consistent",
    "Deliver",
    "Invite",
    "Masked",
    "Reveal",
    "Sealed",
    "Share",
    "Shares",
    "Signed",
    "Slot",
    "Survivors",
    "Terms",
    "Unmask",
    "check_terms",
    "context",
    "decode_client",
    "decode_server",
    "encode",
    "ids",
    "make_terms",
    "names",
    "survivor_floor",
    "vector_length",
]

LABEL = "cflpriv secagg v1 "
"""Starts every key derivation, associated datum and signature of this protocol version."""

Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
Bytes16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
ShareBytes = Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
_BOX = 2 * SHARE_BYTES + SEAL_OVERHEAD_BYTES
Box = Annotated[bytes, Meta(min_length=_BOX, max_length=_BOX)]
Mode = Literal["active", "passive"]
Slot = tuple[Count, Count]
"""(round, sum): a client takes part in at most one sum per slot, and slots only go up."""


class Terms(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything public about one sum. All who take part must see exactly the same terms, or nothing unmasks.

    session: 16 bytes naming the training run; round, sum: the slot.
    mode: what the server may do: "passive" (it follows the protocol) or "active" (it may lie).
    cohort: the invited clients, increasing.
    degree, threshold: (k, t) of the graph; graph_seed: 16 bytes for the sparse one, else empty.
    floor: the fewest survivors whose sum may be seen.
    models: SHA-256 of every model that members may hold, increasing.
    roster: digest of the pinned roster (active mode), else empty.
    bits, clip, levels: the quantiser.
    dimension: values per block.
    weight_limit: public maximum of a weight, 0 for unweighted sums.
    blocks: for an oblivious sum, (cluster, contributors counted) of every open block; else empty.
    following: the next slot, for which mask keys are advertised with the upload; None if there is none.
    """

    session: Bytes16
    round: Count
    sum: Count
    mode: Mode
    cohort: tuple[Id, ...]
    degree: Count
    threshold: Count
    graph_seed: Annotated[bytes, Meta(max_length=16)]
    floor: Count
    models: tuple[Bytes32, ...]
    roster: Annotated[bytes, Meta(max_length=32)]
    bits: Literal[16, 32]
    clip: float
    levels: Count
    dimension: Annotated[int, Meta(ge=1, le=1 << 30)]
    weight_limit: float
    blocks: tuple[tuple[Id, Count], ...]
    following: Slot | None

    @property
    def slot(self) -> Slot:
        """(round, sum)."""
        return self.round, self.sum

    @property
    def fixed(self) -> FixedPoint:
        """The quantiser."""
        return FixedPoint(self.bits, self.clip, self.levels)


class Invite(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Server: who is invited to which sum."""

    terms: Terms


class Advert(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Client: its two X25519 keys for one slot, signed in active mode (else the signature is empty)."""

    client: Id
    session: Bytes16
    slot: Slot
    encryption_key: Bytes32
    mask_key: Bytes32
    signature: Annotated[bytes, Meta(max_length=64)]


class Adverts(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Server: the terms (again, for those invited by an earlier upload) and the adverts of the recipient's neighbours."""

    terms: Terms
    adverts: tuple[Advert, ...]


class Sealed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box to (in Shares) or from (in Deliver) `peer`."""

    peer: Id
    box: Box


class Shares(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Client: one box per neighbour."""

    client: Id
    context: Bytes32
    boxes: tuple[Sealed, ...]


class Deliver(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Server: U2, those who shared, and the boxes they made for the recipient."""

    context: Bytes32
    members: bytes
    boxes: tuple[Sealed, ...]


class Masked(msgspec.Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Client: the masked vector (little-endian residues) and, where the terms name a following slot, the advert for it."""

    client: Id
    context: Bytes32
    vector: bytes
    following: Advert | None


class Survivors(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """Server: U3, those whose masked vectors arrived."""

    context: Bytes32
    survivors: bytes


class Consistent(msgspec.Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True):
    """Client: its signature over (context, U2, U3)."""

    client: Id
    context: Bytes32
    signature: Signature


class Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Somebody's signature, passed on."""

    client: Id
    signature: Signature


class Unmask(msgspec.Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True):
    """Server: U3 and the signatures of at least t of them (none in passive mode)."""

    context: Bytes32
    survivors: bytes
    signatures: tuple[Signed, ...]


class Share(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A share of one of `peer`'s two secrets."""

    _shown = ("peer",)

    peer: Id
    share: ShareBytes


class Reveal(msgspec.Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """Client: self-mask shares of survivors, mask-key shares of those lost between U2 and U3."""

    client: Id
    context: Bytes32
    self_shares: tuple[Share, ...]
    key_shares: tuple[Share, ...]


ClientMessage = Advert | Shares | Masked | Consistent | Reveal
ServerMessage = Invite | Adverts | Deliver | Survivors | Unmask

_MOST_CLIENTS = 1 << 14
_SMALL_LIMIT_BYTES = 1 << 25


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    return codec.encode(message)


def ids(members: Iterable[int]) -> bytes:
    """A set of clients as bytes: sorted, four little-endian bytes each."""
    return b"".join(member.to_bytes(4, "little") for member in sorted(members))


def names(packed: bytes) -> tuple[int, ...]:
    """The clients that `ids` packed.

    Raises:
        MalformedMessage: unless they are strictly increasing.
    """
    if len(packed) % 4:
        raise MalformedMessage
    return _increasing(tuple(int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)))


def _increasing(members: tuple[int, ...]) -> tuple[int, ...]:
    if any(a >= b for a, b in pairwise(members)) or len(members) > _MOST_CLIENTS:
        raise MalformedMessage
    return members


def decode_client(data: bytes, vector_bytes: int = 0) -> ClientMessage:
    """The client's message in `data`, whose masked vector may have `vector_bytes` bytes.

    Raises:
        MalformedMessage: for anything else.
    """
    message: ClientMessage = codec.decode(data, ClientMessage, _SMALL_LIMIT_BYTES + vector_bytes)  # type: ignore[arg-type]
    match message:
        case Shares():
            _increasing(tuple(sealed.peer for sealed in message.boxes))
        case Reveal():
            _increasing(tuple(share.peer for share in message.self_shares))
            _increasing(tuple(share.peer for share in message.key_shares))
    return message


def decode_server(data: bytes) -> ServerMessage:
    """The server's message in `data`.

    Raises:
        MalformedMessage: for anything else.
    """
    message: ServerMessage = codec.decode(data, ServerMessage, _SMALL_LIMIT_BYTES)  # type: ignore[arg-type]
    match message:
        case Adverts():
            _increasing(tuple(advert.client for advert in message.adverts))
        case Deliver():
            names(message.members)
            _increasing(tuple(sealed.peer for sealed in message.boxes))
        case Survivors():
            names(message.survivors)
        case Unmask():
            names(message.survivors)
            _increasing(tuple(signed.client for signed in message.signatures))
    return message


def vector_length(terms: Terms) -> int:
    """Coordinates of a masked vector: per block the values (and the weight), then one for "did this client clip anything"."""
    return max(1, len(terms.blocks)) * (terms.dimension + (terms.weight_limit > 0)) + 1


def survivor_floor(terms: Terms) -> int:
    """The fewest survivors that may be unmasked.

    In an oblivious sum every dropout might have belonged to the smallest open block, so as many must survive
    as leave `floor` contributors there.
    """
    spare = min((count - terms.floor for _, count in terms.blocks), default=len(terms.cohort))
    return max(terms.floor, terms.threshold if terms.degree == len(terms.cohort) - 1 else 0, len(terms.cohort) - spare)


def context(terms: Terms) -> bytes:
    """32 bytes that name these terms and no others."""
    return sha256(frame(LABEL + "context", codec.encode(terms))).digest()


def model_list(terms: Terms) -> bytes:
    """The hash of the list of all model hashes that belong to this sum."""
    return sha256(frame(LABEL + "models", *terms.models)).digest()


def check_terms(terms: Terms) -> None:
    """Holds everything that honest terms must satisfy, the overflow proof among it.

    Raises:
        ValueError: naming the field.
    """
    n = len(terms.cohort)
    if n < 1 or any(a >= b for a, b in pairwise(terms.cohort)) or n > _MOST_CLIENTS:
        raise ValueError("cohort: expected distinct clients in increasing order")
    if terms.floor < 2:
        raise ValueError("floor: a sum over one client is that client's input; expected at least 2")
    complete = terms.degree == n - 1 and terms.threshold == complete_threshold(n, terms.mode)
    if complete and terms.graph_seed:
        raise ValueError("graph_seed: the complete graph has none")
    if not complete:
        if terms.mode == "active":
            raise ValueError("degree: against an active server only the complete graph, with t = 2n//3 + 1, will do")
        if n <= COMPLETE_UP_TO or (terms.degree, terms.threshold) != sparse_parameters(n):
            raise ValueError("degree: expected the complete graph, or the sparse one for more than 32 clients, with its threshold")
        if len(terms.graph_seed) != 16:
            raise ValueError("graph_seed: expected 16 bytes")
    if len(terms.roster) != (32 if terms.mode == "active" else 0):
        raise ValueError("roster: expected its digest in active mode, and nothing in passive mode")
    if not terms.models or any(a >= b for a, b in pairwise(terms.models)):
        raise ValueError("models: expected distinct hashes in increasing order")
    check_no_overflow(n, terms.fixed)
    if not math.isfinite(terms.weight_limit) or math.copysign(1.0, terms.weight_limit) < 0:
        raise ValueError("weight_limit: expected a finite number, 0 for unweighted sums")
    if any(a >= b for (a, _), (b, _) in pairwise(terms.blocks)):
        raise ValueError("blocks: expected distinct clusters in increasing order")
    if any(not terms.floor <= count <= n for _, count in terms.blocks):
        raise ValueError("blocks: every open block needs at least `floor` contributors of the cohort")
    if vector_length(terms) > 1 << 30:
        raise ValueError("dimension: too large")
    if terms.following is not None and terms.following <= terms.slot:
        raise ValueError("following: the next slot must come after this one")


def make_terms(
    *,
    session: bytes,
    slot: Slot,
    cohort: Iterable[int],
    models: Iterable[bytes],
    dimension: int,
    clip: float,
    bits: Bits = 32,
    levels: int | None = None,
    weight_limit: float = 0.0,
    floor: int = 3,
    roster: Roster | None = None,
    sparse: bool | None = None,
    blocks: Sequence[tuple[int, int]] = (),
    following: Slot | None = None,
    entropy: Entropy = system_entropy,
) -> Terms:
    """Valid terms, with everything that follows from the rest filled in.

    Args:
        roster: given, the mode is "active"; without one it is "passive".
        sparse: the k-regular graph; by default where the mode allows it and the cohort has more than 32 clients.
        levels: by default the finest quantiser that cannot overflow.
        entropy: draws the seed of the sparse graph.
        The others as in `Terms`.

    Raises:
        ValueError: naming the field that is wrong; "levels" where the sum could overflow.
    """
    members = tuple(sorted(cohort))
    n = len(members)
    mode: Mode = "passive" if roster is None else "active"
    if sparse is None:
        sparse = mode == "passive" and n > COMPLETE_UP_TO
    degree, threshold = sparse_parameters(n) if sparse else (n - 1, complete_threshold(n, mode))
    terms = Terms(
        session=session,
        round=slot[0],
        sum=slot[1],
        mode=mode,
        cohort=members,
        degree=degree,
        threshold=threshold,
        graph_seed=entropy(16) if degree < n - 1 else b"",
        floor=floor,
        models=tuple(sorted(set(models))),
        roster=b"" if roster is None else roster.digest,
        bits=bits,
        clip=float(clip),
        levels=largest_levels(max(n, 1), bits) if levels is None else levels,
        dimension=dimension,
        weight_limit=float(weight_limit),
        blocks=tuple(sorted(blocks)),
        following=following,
    )
    check_terms(terms)
    try:
        return codec.decode(codec.encode(terms), Terms, _SMALL_LIMIT_BYTES)
    except MalformedMessage:
        raise ValueError("terms: a field has the wrong type, length or range") from None
