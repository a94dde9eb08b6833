"""A client's own limit on clustering epochs of encrypted or shared vectors.

In each epoch those who choose what is compared with a client learn a little of its vectors, however the epoch is protected, so a server
that opens epochs at will would have them read whole ones. An honest run needs few: one for each time that it compares clients anew.
"""

from hashlib import sha256

from ..protocols.errors import RemoteError
from .store import Store

__all__ = ["ENTERED", "enter"]

ENTERED = "epochs"
"""The store's name for the epochs that the client's vectors are in, `_BYTES` each. It outlives sessions, which a server opens at will."""
_BYTES = 16


def enter(store: Store, session: bytes, number: int, most: int) -> None:
    """Note that the client's vectors enter an epoch; one that they are in already is not counted again.

    Raises `RemoteError` "too-many-epochs" where they are in `most` others, over all sessions.
    """
    name, entered = sha256(session + number.to_bytes(8, "big")).digest()[:_BYTES], store.get(ENTERED) or b""
    if name in (entered[at : at + _BYTES] for at in range(0, len(entered), _BYTES)):
        return
    if len(entered) >= most * _BYTES:
        error = RemoteError("too-many-epochs")
        error.add_note(f"its vectors are in {most} clustering epochs already, as many as its protection.most_epochs allows")
        raise error
    store.put(ENTERED, entered + name)
