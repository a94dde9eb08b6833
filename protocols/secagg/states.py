"""State tables of both machines. The machines, the tests and the diagram in the documentation read the same rows.

A client sits in a state and waits for one kind of message; a server stage first collects one kind of message
from the clients and, when the caller closes it, sends the next kind to those who are still there. Whoever did
not answer before the closing is a dropout. Complaints about shares take the rows of the second pair of tables.
"""

from enum import StrEnum

__all__ = ["CLIENT", "CLIENT_COMPLAINTS", "SERVER", "SERVER_COMPLAINTS", "ClientStage", "ServerStage", "collected", "diagram", "sent"]


class ClientStage(StrEnum):
    """Where a client is."""

    NEW = "new"
    ADVERTISED = "advertised"
    SHARED = "shared"
    COMPLAINED = "complained"
    MASKED = "masked"
    SIGNED = "signed"
    DONE = "done"
    DEAD = "dead"


class ServerStage(StrEnum):
    """Where the server is."""

    NEW = "new"
    ADVERTISING = "advertising"
    SHARING = "sharing"
    MASKING = "masking"
    OPENING = "opening"
    SETTLING = "settling"
    CONSISTENCY = "consistency"
    UNMASKING = "unmasking"
    DONE = "done"
    DEAD = "dead"


# (mode, state) -> message that is accepted -> (reply, next state). In NEW the key is made; with a key advertised before, a client starts
# in ADVERTISED.
_COMMON = {
    ClientStage.NEW: ("Invite", "Advert", ClientStage.ADVERTISED),
    ClientStage.ADVERTISED: ("Adverts", "Shares", ClientStage.SHARED),
    ClientStage.SHARED: ("Deliver", "Masked", ClientStage.MASKED),
}
CLIENT: dict[str, dict[ClientStage, tuple[str, str, ClientStage]]] = {
    "active": {
        **_COMMON,
        ClientStage.MASKED: ("Survivors", "Consistent", ClientStage.SIGNED),
        ClientStage.SIGNED: ("Unmask", "Reveal", ClientStage.DONE),
    },
    "passive": {**_COMMON, ClientStage.MASKED: ("Unmask", "Reveal", ClientStage.DONE)},
}
"""mode -> client state -> (message accepted, reply, next state). What is not listed is refused."""

_OPENING = {
    ServerStage.NEW: (None, "Invite", ServerStage.ADVERTISING),
    ServerStage.ADVERTISING: ("Advert", "Adverts", ServerStage.SHARING),
    ServerStage.SHARING: ("Shares", "Deliver", ServerStage.MASKING),
}
SERVER: dict[str, dict[ServerStage, tuple[str | None, str | None, ServerStage]]] = {
    "active": {
        **_OPENING,
        ServerStage.MASKING: ("Masked", "Survivors", ServerStage.CONSISTENCY),
        ServerStage.CONSISTENCY: ("Consistent", "Unmask", ServerStage.UNMASKING),
        ServerStage.UNMASKING: ("Reveal", None, ServerStage.DONE),
    },
    "passive": {
        **_OPENING,
        ServerStage.MASKING: ("Masked", "Unmask", ServerStage.UNMASKING),
        ServerStage.UNMASKING: ("Reveal", None, ServerStage.DONE),
    },
}
"""mode -> server state -> (message collected, message sent when the stage is closed, next state)."""

CLIENT_COMPLAINTS: tuple[tuple[ClientStage, str, str, ClientStage], ...] = (
    (ClientStage.SHARED, "Deliver", "Complaint", ClientStage.COMPLAINED),
    (ClientStage.COMPLAINED, "Challenge", "Opening", ClientStage.COMPLAINED),
    (ClientStage.COMPLAINED, "Settle", "Masked", ClientStage.MASKED),
    (ClientStage.MASKED, "Challenge", "Opening", ClientStage.MASKED),
)
"""(client state, message accepted, reply, next state): the rows besides `CLIENT` where shares are in dispute. One Challenge a sum."""

SERVER_COMPLAINTS: dict[str, dict[ServerStage, tuple[str | None, str | None, ServerStage]]] = {
    mode: {
        ServerStage.MASKING: ("Complaint", "Challenge", ServerStage.OPENING),
        ServerStage.OPENING: ("Opening", "Settle", ServerStage.SETTLING),
        ServerStage.SETTLING: rows[ServerStage.MASKING],
    }
    for mode, rows in SERVER.items()
}
"""As `SERVER`, where somebody complained: MASKING collects both kinds of message, and one complaint leads here."""


def collected(mode: str, stage: ServerStage) -> tuple[str, ...]:
    """The kinds of message that the server takes in a stage."""
    return tuple(table[mode][stage][0] or "" for table in (SERVER, SERVER_COMPLAINTS) if stage in table[mode])


def sent(mode: str, stage: ServerStage) -> str:
    """The kind of message with which the server entered a stage, "" for the first and the last."""
    rows = (*SERVER[mode].values(), *SERVER_COMPLAINTS[mode].values())
    return next((kind or "" for _, kind, entered in rows if entered is stage), "")


_SAYS = {
    "Invite": "the terms of the sum",
    "Advert": "encryption and mask key (signed if active)",
    "Adverts": "the terms, keys of the neighbours",
    "Shares": "sealed shares of both secrets, one box per neighbour, and digests",
    "Deliver": "U2, the boxes for this client, and their digests",
    "Complaint": "whose shares do not fit their digests",
    "Challenge": "who complained about this client",
    "Opening": "the shares dealt to these (signed if active)",
    "Settle": "the shares that were complained about",
    "Masked": "masked vector, key for the next sum",
    "Survivors": "U3",
    "Consistent": "signature over (terms, U2, U3)",
    "Unmask": "U3 (and at least t signatures if active)",
    "Reveal": "per peer either the self-mask share or the key share",
}


def diagram(mode: str) -> str:
    """The message sequence of `mode` ("active" or "passive") as a Mermaid sequence diagram, drawn from the tables."""
    lines = ["sequenceDiagram", "    participant C as client", "    participant S as server"]
    stage, client = ServerStage.NEW, ClientStage.NEW
    while stage in SERVER[mode]:
        _, sends, stage = SERVER[mode][stage]
        if sends is None:
            break
        accepted, reply, client = CLIENT[mode][client]
        assert accepted == sends, "the two tables disagree"
        lines += [
            f"    S->>C: {sends}: {_SAYS[sends]}",
            f"    Note over C: {client}",
            f"    C->>S: {reply}: {_SAYS[reply]}",
            f"    Note over S: {stage}",
        ]
        if stage is ServerStage.MASKING:
            lines.append("    opt shares are in dispute")
            for _, kind, answer, _ in CLIENT_COMPLAINTS[:3]:
                lines += [f"    S->>C: {kind}: {_SAYS[kind]}"] * (kind != sends) + [f"    C->>S: {answer}: {_SAYS[answer]}"]
            lines.append("    end")
    lines.append(f"    Note over S: {stage}: the sum")
    return "\n".join(lines) + "\n"
