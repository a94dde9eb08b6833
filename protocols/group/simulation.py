"""The group key agreement with all parties in one process: the real machines over real bytes, with nothing skipped."""

from collections.abc import Callable, Mapping

from . import messages
from .member import Member
from .server import GroupServer
from .states import SERVER, GroupServerStage

__all__ = ["STAGES", "agree_all", "hand_over"]

STAGES = ("Advert", "Offer", "Confirm")
"""A member's messages, in this order. A dropout is named after the first message that the member does not send."""

Record = Callable[[str, int, str, bytes], None]
"""Called with (direction "up" or "down", client, kind of message, bytes) for every message."""


def agree_all(
    server: GroupServer, members: Mapping[int, Member], *, drops: Mapping[int, str] | None = None, record: Record | None = None
) -> None:
    """Runs the agreement of one epoch. Afterwards the machines of all who took part to the end have its secret.

    Args:
        server: a fresh machine of the epoch.
        members: the machines of the invited clients.
        drops: clients that drop out, and the first of `STAGES` that they no longer send.
        record: sees every message.

    Raises:
        TooFewClients: too few were left at some stage.
        RemoteError, LocalError: as the machines do.
        ValueError: for a drop at an unknown stage.
    """
    drops = drops or {}
    unknown = set(drops.values()) - set(STAGES)
    if unknown:
        raise ValueError(f"drops: unknown stage {min(unknown)!r}; expected one of {', '.join(STAGES)}")
    note = record or _silent
    while server.stage in SERVER:
        asked_to_lead = server.stage is GroupServerStage.ADVERTISING or (
            server.stage is GroupServerStage.OFFERING and server.header is None
        )
        kind = "Adverts" if asked_to_lead else SERVER[server.stage][1]
        outbox = server.advance()
        for client, data in outbox.items():
            note("down", client, kind, data)
            wanted = None if server.stage is GroupServerStage.RUNNING else SERVER[server.stage][0]
            if client in drops and (wanted is None or STAGES.index(drops[client]) <= STAGES.index(wanted)):
                continue
            reply = members[client].receive(data)
            if reply is not None:
                note("up", client, str(wanted), reply)
                server.receive(client, reply)


def hand_over(server: GroupServer, newcomer: int, sponsor: int, members: Mapping[int, Member], *, record: Record | None = None) -> None:
    """Lets `newcomer` into the running epoch: `sponsor`, who is in it, seals the secret for it.

    Raises:
        RemoteError, LocalError: as the machines do.
    """
    note = record or _silent
    outbox = server.admit(newcomer, sponsor)
    while outbox:
        ((client, data),) = outbox.items()
        note("down", client, _kind(data), data)
        reply = members[client].receive(data)
        if reply is None:
            return
        note("up", client, "Grant" if client == sponsor else "Advert", reply)
        outbox = server.receive(client, reply)


def _kind(data: bytes) -> str:
    return type(messages.decode_server(data)).__name__


def _silent(direction: str, client: int, kind: str, data: bytes) -> None: ...
