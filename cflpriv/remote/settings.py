"""What a client's operator decided, and nobody else can change."""

from dataclasses import dataclass, field
from typing import Literal

from ..privacy import Privacy
from ..protection import Protection
from ..protocols.keys import Identity, Roster

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """Who the client is, which peers are pinned (active mode), the protection in force, and the privacy that it demands.

    Of `privacy` count the unit, the relation, ε and δ (what the client releases in all, over all runs on these data), `clip_norm`, and
    under unit = "sample" `samples`, `sketch_dim` and `loss_cap`. `role` "key-holder" has no data: it decrypts what the protection releases.
    """

    identity: Identity = field(repr=False)
    protection: Protection = field(default_factory=Protection)
    roster: Roster | None = None
    privacy: Privacy = field(default_factory=Privacy)
    role: Literal["client", "key-holder"] = "client"
