"""The agreement of clients on the secret of their transforms, over messages: the client half and the server half."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ..protocols import group
from ..protocols.entropy import Entropy
from ..protocols.errors import LocalError, RemoteError, TooFewClients
from ..protocols.keys import Roster
from ..protocols.orthonormal import TRANSFORMS
from . import messages as m
from .registry import Roll
from .settings import Settings
from .store import Store
from .transforms import TransformCache, Transforms

__all__ = ["Agreement", "GroupMember"]


PURPOSE = "transforms"
SECRETS = "group-secrets"
"""The store's name for what a client derived from the group's secret, by group epoch."""
_read_secrets = msgspec.msgpack.Decoder(dict[int, bytes]).decode


class GroupMember:
    """A client's part: it agrees on the secret with the others, and makes the transforms that they share from it."""

    def __init__(self, settings: Settings, store: Store, entropy: Entropy, cache: TransformCache) -> None:
        self._settings, self._store, self._entropy, self._cache = settings, store, entropy, cache

    def agree(self, ask: m.Group) -> m.Stepped:
        """One step of the agreement on the clients' secret. More than half of the roster must be in it, so that none can be kept apart."""
        settings = self._settings
        if not settings.protection.transformed or settings.roster is None:
            raise RemoteError("forbidden")
        read = partial(group.Member.from_bytes, identity=settings.identity, roster=settings.roster, entropy=self._entropy)
        member = self._store.load("group", read)
        if member is None:
            smallest = len(settings.roster.keys) // 2 + 1
            member = group.Member(settings.identity, settings.roster, ask.session, smallest=smallest, entropy=self._entropy)
        try:
            said = member.receive(ask.said)
        except LocalError:  # it is dead, and its secrets are gone
            self._store.drop("group")
            raise
        self._store.keep("group", member, group.Member.to_bytes)
        secrets = self._store.load(SECRETS, _read_secrets) or {}
        if member.epoch is not None and member.epoch not in secrets:
            self._store.keep(SECRETS, {**secrets, member.epoch: member.derive(PURPOSE)}, msgspec.msgpack.encode)
        return m.Stepped(said or b"")

    def transforms(self) -> Transforms:
        """The clients' transforms. Raises `RemoteError` "no-secret"."""
        secrets, kind = self._store.load(SECRETS, _read_secrets), self._settings.protection.sum
        if secrets is None:
            raise RemoteError("no-secret")
        return self._cache.shared(secrets, kind if kind in TRANSFORMS else "haar")

    def secrets(self) -> dict[str, str]:
        """What the transforms are made from, as hexadecimal digits."""
        secrets = self._store.load(SECRETS, _read_secrets) or {}
        return {f"group_secret@{epoch}" if epoch else "group_secret": secret.hex() for epoch, secret in secrets.items()}


class Agreement:
    """`members` have the secret, as far as is known: it goes by what clients were sent and what they say, since answers may be lost.

    Clients insist that more than half of their roster takes part, so that none can be kept apart.
    """

    def __init__(self, roll: Roll, session: bytes, roster: Roster) -> None:
        self._roll, self._session, self._roster = roll, session, roster
        self._server: group.Server | None = None
        self._epoch = self._read = 0
        self.members: frozenset[int] = frozenset()

    def named(self, purpose: str) -> str:
        """The name of a purpose's transform under the secret that is in force."""
        epoch = 0 if self._server is None else self._server.terms.epoch
        return f"{purpose}@{epoch}" if epoch else purpose

    @property
    def lacking(self) -> str:
        """Why there is no secret yet; empty where there is one."""
        if self._server is not None:
            return ""
        there, everybody = len(self._roll.present), len(self._roster.keys)
        return f"{there} of {everybody} clients are there; to agree on the secret of their transform {everybody // 2 + 1} are needed"

    def renew(self, record: Callable[..., None]) -> None:
        """A new epoch among those who are present, with a fresh secret that removed clients never get. Raises `TooFewClients`."""
        before = self._server, self.members
        self._server, self.members = None, frozenset()
        try:
            self._agree(sorted(self._roll.present), record)
        finally:
            if self._server is None:
                self._server, self.members = before
        if self._server is before[0]:
            raise TooFewClients((len(self._roll.present),), len(self._roster.keys) // 2 + 1)

    def saved(self) -> dict[str, Any]:
        """The server's machine and who has the secret, for a checkpoint."""
        return {
            "server": b"" if self._server is None else self._server.to_bytes(),
            "epoch": self._epoch,
            "members": sorted(self.members),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._server = group.Server.from_bytes(saved["server"], self._roster) if saved["server"] else None
        self._epoch, self.members = saved["epoch"], frozenset(saved["members"])

    def extend(self, record: Callable[..., None]) -> None:
        """Agree, once enough are there; then let everybody else who is there get the secret from a member."""
        said = self._roll.refusals[self._read :]  # each once: who said so before may have the secret again
        self._read += len(said)
        self.members -= {client for client, _, word in said if word in ("no-secret", "wrong-session")}
        fresh = sorted(self._roll.present - self.members)
        if self._server is None:
            with suppress(TooFewClients):  # another attempt comes with the next round
                self._agree(fresh, record)
            return
        for newcomer in fresh:
            self._admit(newcomer, record)

    def _agree(self, fresh: list[int], record: Callable[..., None]) -> None:
        smallest = len(self._roster.keys) // 2 + 1
        if len(fresh) < smallest:
            return
        terms = group.make_terms(
            session=self._session, epoch=self._epoch, roster=self._roster, members=fresh, smallest=smallest, removed=self._roll.removed
        )
        self._epoch += 1  # an epoch is tried once
        server = group.Server(terms, self._roster)
        outbox = server.advance()
        while server.stage is not group.ServerStage.RUNNING:
            for client, said in self._stage(outbox, record).items():
                self._pass_on(server, client, said)
            outbox = server.advance()
        self._stage(outbox, record)
        self._server, self.members = server, frozenset(outbox)  # also whose answer is lost: it has the secret, or will say that it has none

    def _admit(self, newcomer: int, record: Callable[..., None]) -> None:
        """Let a client have the secret from the first member that gives it."""
        server = self._server
        assert server is not None
        for sponsor in sorted(self._roll.present & self.members):
            outbox: Mapping[int, bytes] = server.admit(newcomer, sponsor)
            while outbox:
                (asked,) = outbox
                before = len(self._roll.refusals)
                said = self._stage(outbox, record).get(asked)
                outbox = self._pass_on(server, asked, said) if said else {}
                if asked == newcomer and not outbox:
                    # "wrong-epoch": it is in already, and its word on that was lost
                    if said == b"" or (newcomer, "group", "wrong-epoch") in self._roll.refusals[before:]:
                        self.members |= {newcomer}
                    return

    def _pass_on(self, server: group.Server, client: int, said: bytes) -> Mapping[int, bytes]:
        """What is to be sent on at once; nothing where the message is refused, which is noted."""
        try:
            return server.receive(client, said)
        except RemoteError as error:
            self._roll.refusals.append((client, "group", error.code))
            return {}

    def _stage(self, outbox: Mapping[int, bytes], record: Callable[..., None]) -> dict[int, bytes]:
        asks: dict[int, m.Ask] = {client: m.Group(self._session, said) for client, said in outbox.items() if client in self._roll.present}
        answers = self._roll.ask(asks, "group") if asks else {}
        said = {client: answer.said for client, answer in answers.items() if isinstance(answer, m.Stepped)}
        ways = (
            ("server", "clients", dict(outbox), ("server", "clients"), group.decode_server),
            ("clients", "server", said, ("server",), group.decode_member),
        )
        for source, target, parts, readers, decode in ways:
            kinds: dict[str, list[int]] = {}
            for client, data in sorted(parts.items()):
                if data:
                    kinds.setdefault(_kind(data, decode), []).append(client)
            for kind, clients in kinds.items():
                payload = [{"bytes": np.frombuffer(parts[client], dtype=np.uint8)} for client in clients]
                alike = source == "server" and len({parts[client] for client in clients}) == 1
                record(kind, source, target, clients, payload[0] if alike else payload, readers=readers)
        return said


def _kind(data: bytes, decode: Callable[[bytes], Any]) -> str:
    """Which message of the agreement these bytes are."""
    try:
        return type(decode(data)).__name__
    except RemoteError:
        return "malformed"
