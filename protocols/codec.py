"""Canonical encoding of messages, with strict decoding of untrusted bytes.

A message is a frozen, typed `msgspec.Struct`. Its encoding is

    magic "CFLP" | format version 1 | MessagePack of the struct | first 16 bytes of SHA-256 over all that
    precedes

Guarantee: `decode` takes any bytes and returns a valid message of the wanted type or raises
`MalformedMessage` and nothing else; it reads no more than `limit` bytes; encoding is canonical, i.e. every
accepted byte string is exactly what `encode` makes of its message, so equal messages have equal hashes. No
pickle, no code, no recursion beyond the declared types. Reveals: nothing is hidden here. The checksum detects
accidents, not attacks: whoever can change a message can also recompute it. What must hold against attackers is
signed, or bound into authenticated encryption, by the protocols themselves.
"""

import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, ClassVar, TypeVar

import msgspec

from .errors import MalformedMessage

__all__ = ["CHECKSUM_BYTES", "HEADER", "Codec", "Redacted", "decode", "encode", "encode_made", "increasing", "pack", "unpack"]

HEADER = b"CFLP\x01"
CHECKSUM_BYTES = 16
Message = TypeVar("Message")


class Redacted:
    """Mixed into a struct with secrets: only the fields named in `_shown` are ever printed."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._shown]


class Codec:
    """One encoding of messages. `enc_hook` and `dec_hook` (see msgspec) encode field types that MessagePack does not know.

    A `dec_hook` raises `MalformedMessage`, ValueError or TypeError for what it refuses.
    """

    def __init__(self, enc_hook: Callable[[Any], Any] | None = None, dec_hook: Callable[[Any, Any], Any] | None = None) -> None:
        # Messages hold no dicts or sets (stored states may), so there is one order of everything.
        self._encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
        self._dec_hook = dec_hook
        self._decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}

    def encode(self, message: msgspec.Struct) -> bytes:
        """The one encoding of `message`."""
        body = bytearray(HEADER)
        self._encoder.encode_into(message, body, len(HEADER))
        body += sha256(body).digest()[:CHECKSUM_BYTES]
        return bytes(body)

    def encode_made(self, make: Callable[[], msgspec.Struct]) -> bytes:
        """The encoding of the message that `make` gives, which is dropped before the encoding is copied: it may be large."""
        body = bytearray(HEADER)
        self._encoder.encode_into(make(), body, len(HEADER))
        body += sha256(body).digest()[:CHECKSUM_BYTES]
        return bytes(body)

    def decode(self, data: bytes, kind: type[Message], limit: int) -> Message:
        """The message of type `kind` (a struct or a union of tagged structs) that `data` encodes; at most `limit` bytes are looked at.

        Raises:
            MalformedMessage: for everything that is not exactly `encode` of such a message.
        """
        if not isinstance(data, bytes) or not len(HEADER) + CHECKSUM_BYTES < len(data) <= limit or not data.startswith(HEADER):
            raise MalformedMessage
        view = memoryview(data)
        if sha256(view[:-CHECKSUM_BYTES]).digest()[:CHECKSUM_BYTES] != view[-CHECKSUM_BYTES:]:
            raise MalformedMessage
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.msgpack.Decoder(kind, strict=True, dec_hook=self._dec_hook)
        try:
            message = decoder.decode(view[len(HEADER) : -CHECKSUM_BYTES])
            again = self._encoder.encode(message)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
            raise MalformedMessage from None
        # MessagePack has several encodings of one number or length; only ours is accepted.
        if view[len(HEADER) : -CHECKSUM_BYTES] != again:
            raise MalformedMessage
        return message  # type: ignore[return-value]


_plain = Codec()
encode, encode_made, decode = _plain.encode, _plain.encode_made, _plain.decode


def increasing(items: Sequence[Any], most: int) -> None:
    """Check that `items` increase strictly and are at most `most`.

    Raises:
        MalformedMessage: if they do not, or are more.
    """
    if len(items) > most or not all(map(operator.lt, items, items[1:])):
        raise MalformedMessage


def pack(clients: Iterable[int]) -> bytes:
    """A set of clients as bytes: sorted, four little-endian bytes each.

    Raises:
        ValueError: for numbers that do not fit.
    """
    members = sorted(set(clients))
    try:
        return struct.pack(f"<{len(members)}I", *members)
    except struct.error:
        raise ValueError(f"clients: expected whole numbers from 0 to 2^32 - 1, got {members[0]} to {members[-1]}") from None


def unpack(packed: bytes, most: int) -> tuple[int, ...]:
    """The clients that `pack` packed, at most `most`.

    Raises:
        MalformedMessage: for bytes that `pack` did not make, or more clients.
    """
    if len(packed) % 4 or len(packed) > 4 * most:
        raise MalformedMessage
    clients = struct.unpack(f"<{len(packed) // 4}I", packed)
    increasing(clients, most)
    return clients
