"""Answers of clients and of the key holder."""

from typing import Literal

from ..contract.handles import PartLayout
from .message_values import Bytes32, Bytes64, Count, Message, Name, Named, Value

__all__ = ["Answer", "Computed", "Described", "Done", "Enrolled", "Given", "Refused", "Released", "Sealed", "Stepped", "Unusable"]


class Enrolled(Message, frozen=True, tag="enrolled"):
    """A client's number and keys. The signature covers the session, the number and the encryption key. The key holder's number is 0.

    The server shows all this to other clients, but not `proof`: it covers the challenge, too, and authenticates the sender.
    """

    version: Count
    client: Count
    signing_key: Bytes32
    encryption_key: Bytes32
    signature: Bytes64
    proof: Bytes64
    role: Literal["client", "key-holder"] = "client"


class Described(Message, frozen=True):
    """Name, dtype and shape of a part that the client holds. Shapes are public."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...]


class Computed(Message, frozen=True, tag="computed"):
    """Whether the client has a result (without one it drops out), and the parts that it now holds."""

    result: bool
    parts: tuple[Described, ...]

    @property
    def layout(self) -> PartLayout:
        return PartLayout(tuple((part.name, part.dtype, part.shape) for part in self.parts))


class Given(Message, frozen=True, tag="given"):
    """The values that a client releases. `samples`: its sample count if the request says `weigh`, else 0."""

    values: tuple[Named, ...]
    samples: Count


class Stepped(Message, frozen=True, tag="stepped"):
    """The client's message of a secure sum, a dealing or the agreement; empty if there is none. The key holder's announcement."""

    said: bytes


class Sealed(Message, frozen=True, tag="sealed"):
    """One box for each recipient, in order."""

    boxes: tuple[bytes, ...]


class Released(Message, frozen=True, tag="released"):
    """What the key holder releases: labels and small integers, noisy evidence, or noisy blocks by pair."""

    result: tuple[Named, ...]
    evidence: tuple[Named, ...]
    blocks: tuple[tuple[Count, Count, Value], ...]


class Unusable(Message, frozen=True, tag="unusable"):
    """A holder of shares cannot use what these clients deposited. The deposits of others are kept."""

    clients: tuple[Count, ...]


class Done(Message, frozen=True, tag="done"):
    """The request was carried out; nothing leaves the client."""


class Refused(Message, frozen=True, tag="refused"):
    """A refusal: an opaque error code, see `messages.REFUSALS`."""

    code: Name


Answer = Enrolled | Computed | Given | Stepped | Sealed | Released | Unusable | Done | Refused
