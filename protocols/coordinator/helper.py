"""A helper behind any transport: it answers the signed questions of its coordinator, over a log of its own.

Guarantee: that of `one_message.Helper`. Who cannot sign as the coordinator changes nothing: no set is signed for a stranger. Rosters are
taken as `rosters.taken` says, when a round's key is announced, and kept for that round.
Reveals: as `one_message.Helper`. The folder has the keys of the round: a folder that was set back to an older copy makes the helper one of
the colluding ones. Source: ours.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from threading import Lock

from ..copies import check_own
from ..entropy import Entropy, system_entropy
from ..errors import RemoteError
from ..keys import Identity
from ..one_message import Helper, HelperPolicy
from ..uncopied import uncopied
from . import messages as c
from .log import FolderLog
from .rosters import read_roster_version, taken
from .sessions import entered

__all__ = ["DurableHelper"]


OF_SESSION = ("helper/key", "helper/uploads/", "helper/closed/")
"""What a helper keeps for one session: the key of the round, seeds, and the sets of slots. What values went into outlives sessions."""


class _Kept(MutableMapping[str, bytes]):
    """What `Helper` keeps, in a part of the log."""

    def __init__(self, log: FolderLog) -> None:
        self._log = log

    def __getitem__(self, name: str) -> bytes:
        return self._log["helper/" + name]

    def __setitem__(self, name: str, value: bytes) -> None:
        self._log["helper/" + name] = value

    def update(self, other: Mapping[str, bytes]) -> None:  # type: ignore[override]
        """Set items that become durable together, by one write."""
        self._log.add({"helper/" + name: value for name, value in other.items()})
        self._log.commit()

    def __delitem__(self, name: str) -> None:
        del self._log["helper/" + name]

    def __iter__(self) -> Iterator[str]:
        return iter([name.removeprefix("helper/") for name in self._log if name.startswith("helper/")])

    def __len__(self) -> int:
        return sum(1 for _ in self)


@uncopied("one process serves one folder")
class DurableHelper:
    """A helper.

    Args:
        folder: its state, secret.
        identity: the signing key is on rosters, among the holders.
        authority, coordinator: the public keys of who signs rosters, and of the coordinator.
        policy: what it insists on.
        federation: its name, if the authority has several.

    Raises:
        DamagedLog, OSError: as `FolderLog`. LocalError: "old-session" for a session that another has followed.
    """

    def __init__(
        self, folder: str | Path, identity: Identity, authority: bytes, coordinator: bytes, policy: HelperPolicy,
        entropy: Entropy = system_entropy, federation: str = "",
    ) -> None:  # fmt: skip
        check_own("identity", identity, Identity)
        self._identity, self._authority, self._coordinator, self._policy, self._entropy = identity, authority, coordinator, policy, entropy
        self._federation = federation
        self._log, self._lock = FolderLog(folder), Lock()
        try:
            gone = [name for name in self._log if name.startswith(OF_SESSION)]
            entered(self._log, policy.session, dict.fromkeys(gone))
        except BaseException:
            self._log.close()
            raise

    def __repr__(self) -> str:
        return f"DurableHelper({self._log.path.parent!s})"

    def close(self) -> None:
        """Let go of the folder."""
        self._log.close()

    def receive(self, data: bytes) -> bytes:
        """The answer to a question of the coordinator, whatever its bytes. Raises `OSError` if the state cannot be written."""
        with self._lock:
            try:
                return c.encode(c.HelperAnswer("", self._answered(data)))
            except RemoteError as error:
                return c.encode(c.HelperAnswer(error.code, b""))

    def _answered(self, data: bytes) -> bytes:
        ask = c.decode_ask(data, self._coordinator)
        own = self._log.get("roster", b"")
        latest = own if ask.message else taken(own, ask.roster, self._authority, self._federation)
        if latest != ask.roster:
            raise RemoteError("old-roster")
        roster = read_roster_version(latest, self._authority, self._federation).roster
        if self._identity.public() not in roster.holders:
            raise RemoteError("not-on-roster")
        helper = Helper(self._identity, roster, self._policy, _Kept(self._log), self._entropy)
        if helper.number != ask.helper:
            raise RemoteError("wrong-helper")
        if ask.message:
            return helper.receive(ask.message)
        announced = helper.announcement(ask.round)
        if latest != own:
            self._log["roster"] = latest
        return announced
