"""The training run (session) that a party's folder is in: later ones take its place, and what outlives sessions stays.

Guarantee: a folder goes from session to session once, so slots of a session never begin anew. Reveals: nothing. Source: ours.
"""

from collections.abc import Mapping

from ..errors import LocalError
from .log import FolderLog

__all__ = ["entered"]


def entered(log: FolderLog, session: bytes, changes: Mapping[str, bytes | None]) -> None:
    """Go on with a session of 16 bytes, or begin it with these changes of the log.

    Raises:
        LocalError: "old-session" for one that another has followed. ValueError: not 16 bytes.
    """
    if len(session) != 16:
        raise ValueError("session: expected 16 bytes")
    if log.get("session") == session:
        return
    name = f"session/{session.hex()}"
    if name in log:
        raise LocalError("old-session", f"{log.path}: another session followed")
    log.add({**changes, "session": session, name: b""})
    log.commit()
