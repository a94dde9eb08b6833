"""Sums in one message in an engineer's own server: a coordinator, helpers and clients that survive restarts at any point.

Bytes in and bytes out, so that any transport fits. Each party has a folder. What it answered is on the disk before the answer leaves, and
the same request gets the same answer.

    coordinator    on an asyncio loop                rounds, attempts   what it decides and keeps, without a loop
    client         a client, and `take_part`         helper             a helper
    rosters        versions, joining, new keys       messages           what is sent
    sessions       one training run after another    counters           Prometheus' text format
    log            the file that survives

**Guarantee.** That of `one_message`, over restarts of all parties: a sum is exact or refused, a slot has one set of clients, what was
accepted is not lost, and a value goes into sums over one set. **Reveals.** As `one_message`. **Source.** Ours.

Unaudited research code.
"""

from .attempts import SumPlan
from .client import DurableClient, UploadSettled, UploadTask, take_part
from .coordinator import Coordinator
from .counters import metrics
from .helper import DurableHelper
from .log import DamagedLog, FolderLog
from .rosters import JoinRequest, RenewRequest, RosterVersion, applied, invite, join, read_roster_version, removed, renew, sign_roster
from .rounds import CoordinatorLimits

__all__ = [
    "Coordinator", "CoordinatorLimits", "DamagedLog", "DurableClient", "DurableHelper", "FolderLog", "JoinRequest", "RenewRequest",
    "RosterVersion", "SumPlan", "UploadSettled", "UploadTask", "applied", "invite", "join", "metrics", "read_roster_version", "removed",
    "renew", "sign_roster", "take_part",
]  # fmt: skip
