"""The messages between the server and its clients, as objects and as bytes: `requests`, `answers`, and what they carry, `message_values`.

A decoder takes any bytes and gives a valid message or raises `MalformedMessage`.
"""

from . import answers, message_values, requests
from .answers import *  # noqa: F403
from .message_values import *  # noqa: F403
from .requests import *  # noqa: F403

__all__ = ["LIMIT_BYTES", "REFUSALS", "VERSION", "decode_answer", "decode_ask", "encode"]
__all__ += answers.__all__
__all__ += message_values.__all__
__all__ += requests.__all__

VERSION = 9
LIMIT_BYTES = 1 << 31

REFUSALS: dict[str, str] = {
    "malformed": "the message is not one of this protocol",
    "version": "server and client have different versions of this protocol",
    "wrong-session": "the client has not been enrolled into this session (enrol it again), or has left it for another, which is final",
    "forbidden": "the client's own settings forbid this: its protection, the privacy that it demands, or its release policy",
    "bad-dealing": "the nonces and commitments of a dealing into buckets do not match each other, or the list that the client was shown",
    "wrong-bucket": "the cohort of a secure sum is not within the bucket of this client",
    "over-budget": "the client has released all that its own privacy budget allows",
    "second-sum": "the client has contributed a value of this round to a sum already, and the server asks for another over other clients",
    "used-transform": "the client has used this transform already; a transform serves one clustering epoch or one sum",
    "too-many-epochs": "the client's vectors are in as many clustering epochs, over all sessions, as its own settings allow",
    "no-secret": "the client does not have the clients' common secret yet",
    "bad-deposit": "holders of shares cannot use what the client deposited for a comparison; it is left out of that",
    "not-held": "the client does not hold the value asked for (it lost its state, or the value was dropped)",
    "unknown-task": "the client does not know this task; both sides need the same version",
    "bad-input": "the client's data or parameters do not fit the task",
    "not-on-roster": "the client's identity is not on its roster",
    "no-settings": "no settings file is named for the client, or there is none where it should be",
    "bad-settings": "the client's settings file cannot be used; see its own log",
    "internal": "the client failed; see its own log",
}
"""Error codes of refusals and their meaning; those of the protocols are in `cflpriv.protocols.errors`."""


def encode(message: message_values.Message) -> bytes:
    """The canonical encoding of a message. Raises `InputError` for an array or a task that cannot be encoded."""
    return message_values.codec.encode(message)


def decode_ask(data: bytes) -> requests.Ask:
    """A request. Raises `MalformedMessage`."""
    return message_values.codec.decode(data, requests.Ask, LIMIT_BYTES)  # type: ignore[arg-type]


def decode_answer(data: bytes, limit: int = LIMIT_BYTES) -> answers.Answer:
    """An answer of at most `limit` bytes. Raises `MalformedMessage`."""
    return message_values.codec.decode(data, answers.Answer, limit)  # type: ignore[arg-type]
