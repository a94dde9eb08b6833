"""The settings of a client, which only its operator can change."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ..contract.protection import Protection
from ..keys import Key, check_ranges
from ..privacy.settings import Privacy
from ..protocols.keys import Identity, Roster

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The client's identity, the pinned peers, the protection in force, and the privacy that the client demands.

    `privacy` uses the unit, the relation, ε and δ (over all runs on these data), `clip_norm`, whether that moves (`clip_quantile`), and
    under unit = "sample" `samples`, `sketch_dim` and `loss_cap`. `role` "key-holder" has no data and decrypts what the protection
    releases. `models`: how many models the members of one secure sum may have been sent. More than 1 is for algorithms that sum over
    several groups at once (IFCA's communication saver, with shared layers or restarts); among k models a server can plant one for a single
    client.
    """

    identity: Identity = field(repr=False)
    protection: Protection = field(default_factory=Protection)
    roster: Roster | None = None
    privacy: Privacy = field(default_factory=Privacy)
    role: Literal["client", "key-holder"] = "client"
    models: Annotated[int, Key("Models that the members of one secure sum may have been sent.", "[1, inf)", "models")] = 1

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self))
