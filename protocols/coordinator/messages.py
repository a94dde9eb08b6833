"""Messages of clients and helpers with a durable coordinator: bytes that fit any transport.

    client → coordinator    WorkPoll, SendUpload, JoinRequest, RenewRequest
    coordinator → client    SumInvited, UploadAccepted, WishNoted, RequestRefused, ComeAgain
    coordinator → helper    AskHelper, answered by HelperAnswer

Guarantee: decoders accept any bytes without harm and read no more than a stated limit. A client's upload and a coordinator's question to a
helper carry signatures of their own, so the sender needs no authentication by the transport. The same request gets the same answer, except
`ComeAgain`. Reveals: all of this is public, except what is in boxes and masked; run it over TLS even so, to hide who takes part.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec
from ..keys import Identity, sign, verify_key
from ..one_message.terms import HelperNumber
from ..secagg.terms import SMALL_LIMIT_BYTES, Bytes32, Count, Id
from .rosters import LIMIT_BYTES, JoinRequest, RenewRequest

__all__ = [
    "AskHelper", "ComeAgain", "FromCoordinator", "HelperAnswer", "JoinRequest", "RenewRequest", "RequestRefused", "SendUpload",
    "SumInvited", "ToCoordinator", "UploadAccepted", "WishNoted", "WorkPoll", "ask_helper", "decode_ask", "decode_from_coordinator",
    "decode_helper_answer", "decode_to_coordinator", "encode",
]  # fmt: skip

ENVELOPE_BYTES = 1 << 10
_ASK = "cflpriv coordinator v1 ask"
Code = Annotated[str, Meta(max_length=64)]
MOST_SECONDS = 1e6
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]


class WorkPoll(msgspec.Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True):
    """Client: what is there after its last slot? `version`: of the roster that it has, 0 for none."""

    client: Id
    after: tuple[Count, Count] | None
    version: Count


class SendUpload(msgspec.Struct, frozen=True, array_like=True, tag=12, forbid_unknown_fields=True):
    """Client: its upload (`one_message.MaskedUpload`) to the sum of a slot."""

    round: Count
    sum: Count
    upload: bytes


class SumInvited(msgspec.Struct, frozen=True, array_like=True, tag=13, forbid_unknown_fields=True):
    """Coordinator: an invitation (`one_message.HelpedInvite`), how long uploads are taken, and the roster if the client's is older."""

    invite: bytes
    seconds: Seconds
    roster: bytes


class ComeAgain(msgspec.Struct, frozen=True, array_like=True, tag=14, forbid_unknown_fields=True):
    """Coordinator: ask again after so many seconds. `code`: "idle" if there is nothing to do now, "ended" if besides the sum of the
    client's last slot has ended and is not taken again, "busy" if the request was not handled."""

    code: Code
    seconds: Seconds
    roster: bytes


class UploadAccepted(msgspec.Struct, frozen=True, array_like=True, tag=15, forbid_unknown_fields=True):
    """Coordinator: the upload with this digest (`one_message.messages.upload_digest`) is stored."""

    round: Count
    sum: Count
    digest: Bytes32


class RequestRefused(msgspec.Struct, frozen=True, array_like=True, tag=16, forbid_unknown_fields=True):
    """Coordinator: the request is refused for good.

    `code`: "malformed", "bad-signature", "not-invited", "too-late", "second-message" (another upload is stored), "wrong-slot",
    "old-slot" (its round is forgotten), "too-many-clients", "not-on-roster" for a key to renew, "request-waits" (another request to renew
    it is not decided), or "invitation-used" (for another request to join).
    """

    code: Code


class WishNoted(msgspec.Struct, frozen=True, array_like=True, tag=17, forbid_unknown_fields=True):
    """Coordinator: the request to join or to renew a key is stored, for the authority to decide."""

    digest: Bytes32


class AskHelper(msgspec.Struct, frozen=True, array_like=True, tag=18, forbid_unknown_fields=True):
    """Coordinator: a message for `one_message.Helper`, or an empty one for the announcement of a round's key; with the round's roster."""

    helper: HelperNumber
    round: Count
    message: bytes
    roster: bytes
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class HelperAnswer(msgspec.Struct, frozen=True, array_like=True, tag=19, forbid_unknown_fields=True):
    """Helper: its answer, or the code of a refusal: one of `one_message.Helper`, "bad-signature" for a question that is not by its
    coordinator, "old-roster", "not-on-roster" or "wrong-helper"."""

    code: Code
    message: bytes


ToCoordinator = WorkPoll | SendUpload | JoinRequest | RenewRequest
FromCoordinator = SumInvited | ComeAgain | UploadAccepted | RequestRefused | WishNoted


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    return codec.encode(message)


def decode_to_coordinator(data: bytes, largest_upload: int) -> ToCoordinator:
    """A client's request, with an upload of at most so many bytes. Raises `MalformedMessage`."""
    message: ToCoordinator = codec.decode(data, ToCoordinator, ENVELOPE_BYTES + largest_upload)  # type: ignore[arg-type]
    return message


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """The coordinator's answer to a client. Raises `MalformedMessage`."""
    limit = SMALL_LIMIT_BYTES + LIMIT_BYTES + ENVELOPE_BYTES
    message: FromCoordinator = codec.decode(data, FromCoordinator, limit)  # type: ignore[arg-type]
    return message


def ask_helper(coordinator: Identity, helper: int, number: int, message: bytes, roster: bytes) -> bytes:
    """A signed question of the coordinator to a helper, in a round."""
    parts = helper.to_bytes(8, "big"), number.to_bytes(8, "big"), message, roster
    return encode(AskHelper(helper, number, message, roster, sign(coordinator, _ASK, *parts)))


def decode_ask(data: bytes, coordinator: bytes) -> AskHelper:
    """A question to a helper that has the signature of the coordinator. Raises `RemoteError` "malformed" or "bad-signature"."""
    message = codec.decode(data, AskHelper, 4 * SMALL_LIMIT_BYTES + LIMIT_BYTES + ENVELOPE_BYTES)
    parts = message.helper.to_bytes(8, "big"), message.round.to_bytes(8, "big"), message.message, message.roster
    verify_key(coordinator, 0, message.signature, _ASK, *parts)
    return message


def decode_helper_answer(data: bytes, largest: int) -> HelperAnswer:
    """A helper's answer. Raises `MalformedMessage`."""
    return codec.decode(data, HelperAnswer, ENVELOPE_BYTES + largest)
