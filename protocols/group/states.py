"""State tables of both machines. The machines, the tests and the diagram in the documentation read the same rows."""

from enum import StrEnum

__all__ = ["MEMBER", "SERVER", "GroupServerStage", "MemberStage", "diagram"]


class MemberStage(StrEnum):
    """Where a member is."""

    OUTSIDE = "outside"
    ADVERTISED = "advertised"
    CONFIRMED = "confirmed"
    MEMBER = "member"
    DEAD = "dead"


class GroupServerStage(StrEnum):
    """Where the server is in one epoch."""

    NEW = "new"
    ADVERTISING = "advertising"
    OFFERING = "offering"
    CONFIRMING = "confirming"
    RUNNING = "running"


MEMBER: dict[MemberStage, dict[str, tuple[str | None, MemberStage]]] = {
    MemberStage.OUTSIDE: {"Invite": ("Advert", MemberStage.ADVERTISED)},
    MemberStage.ADVERTISED: {
        "Adverts": ("Offer", MemberStage.CONFIRMED),
        "Deliver": ("Confirm", MemberStage.CONFIRMED),
        "Handover": (None, MemberStage.MEMBER),
        "Invite": ("Advert", MemberStage.ADVERTISED),
    },
    MemberStage.CONFIRMED: {
        "Confirmed": (None, MemberStage.MEMBER),
        "Handover": (None, MemberStage.MEMBER),
        "Invite": ("Advert", MemberStage.ADVERTISED),
    },
    MemberStage.MEMBER: {
        "Admit": ("Grant", MemberStage.MEMBER),
        "Invite": ("Advert", MemberStage.ADVERTISED),
    },
}
"""member state -> message accepted -> (reply, next state). What is not listed is refused. An Invite is one to a later epoch, or,
until the member is in, the same one again, which gets the same answer and changes nothing."""

SERVER: dict[GroupServerStage, tuple[str | None, str, GroupServerStage]] = {
    GroupServerStage.NEW: (None, "Invite", GroupServerStage.ADVERTISING),
    GroupServerStage.ADVERTISING: ("Advert", "Adverts", GroupServerStage.OFFERING),
    GroupServerStage.OFFERING: ("Offer", "Deliver", GroupServerStage.CONFIRMING),
    GroupServerStage.CONFIRMING: ("Confirm", "Confirmed", GroupServerStage.RUNNING),
}
"""server state -> (message collected, message sent when the stage is closed, next state). Where the leader has not offered when its stage
is closed, the next client is asked to lead. In RUNNING newcomers are let in, see `Server.admit`."""

_CONTENTS = {
    "Invite": "terms: session, epoch, roster, who is invited, who is removed",
    "Advert": "a fresh X25519 key, signed",
    "Adverts": "all of them (to one client, which leads)",
    "Offer": "signed header (members, commitment to the secret), a sealed box for each",
    "Deliver": "the header, its box",
    "Confirm": "signature over the header",
    "Confirmed": "everybody's signatures",
}


def diagram() -> str:
    """The agreement as a Mermaid sequence diagram, drawn from the tables."""
    lines = ["sequenceDiagram", "    participant M as member", "    participant S as server"]
    stage, member = GroupServerStage.NEW, MemberStage.OUTSIDE
    while stage in SERVER:
        _, sends, stage = SERVER[stage]
        reply, after = MEMBER[member][sends]
        lines += [f"    S->>M: {sends}: {_CONTENTS[sends]}"]
        if reply is not None:
            lines += [f"    M->>S: {reply}: {_CONTENTS[reply]}"]
        if sends != "Adverts":  # that row is the leader's; the others wait
            member = after
            lines += [f"    Note over M: {member}"]
        lines += [f"    Note over S: {stage}"]
    return "\n".join(lines) + "\n"
