"""The agreement of clients on the common secret of their transforms, over messages: the client half and the server half."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ..errors import InputError
from ..protocols import codec, group
from ..protocols.entropy import Entropy
from ..protocols.errors import LocalError, MalformedMessage, RemoteError, TooFewClients
from ..protocols.keys import Roster
from ..protocols.orthonormal import TRANSFORMS, Transform
from . import messages as m
from .registry import ClientRegistry
from .settings import Settings
from .store import Store
from .transforms import ClusteringName, TransformCache, Transforms, check_secret, group_epoch

__all__ = ["Agreement", "GroupMember"]


PURPOSE = "transforms"
SECRETS = "group-secrets"
"""The store's name for what a client derived from the common secret, by group epoch."""


class _Secret(codec.Redacted, msgspec.Struct, frozen=True, array_like=True):
    """What a client has of one group epoch: the key of sums' transforms, and for an ended epoch the numbered keys that are left."""

    sums: bytes
    ratchet: group.Ratchet | None = None


_Secrets = dict[int, _Secret]
_decoder = msgspec.msgpack.Decoder(_Secrets)


class GroupMember:
    """A client's part: it agrees on the secret with the other clients, and derives the shared transforms from it.

    Guarantee: each clustering epoch has a numbered key of `protocols.group`. For a later epoch the client erases the keys of all earlier
    epochs, except those that the server declares open; a later theft of its state opens no erased epoch. A number whose key is erased is
    refused. Reveals: a stolen state opens the latest clustering epoch, the open ones, all later ones of this group epoch, **and every sum
    of it**, because means are opened long after they were formed. A lying server can declare up to 28 ended epochs open, and can use up all
    numbers. Copies of a store (backups, checkpoints) open what the store could open when they were copied.
    """

    def __init__(self, settings: Settings, store: Store, entropy: Entropy, cache: TransformCache) -> None:
        self._settings, self._store, self._entropy, self._cache = settings, store, entropy, cache

    def agree(self, ask: m.Group) -> m.Stepped:
        """One step of the agreement. More than half of the roster must take part, so that no client can be isolated."""
        settings = self._settings
        if not settings.protection.transformed or settings.roster is None:
            raise RemoteError("forbidden")
        member = self._member()
        if member is None:
            smallest = len(settings.roster.keys) // 2 + 1
            member = group.Member(settings.identity, settings.roster, ask.session, smallest=smallest, entropy=self._entropy)
        before, ratchet = member.epoch, member.ratchet
        try:
            answer = member.receive(ask.message)
        except LocalError:  # the machine has ended and erased its secrets
            self._store.drop("group")
            raise
        secrets = self._secrets()
        if member.epoch is not None and member.epoch not in secrets:
            if before is not None and before in secrets:  # its open clustering epochs continue
                secrets = {**secrets, before: _Secret(secrets[before].sums, ratchet)}
            self._store.keep(SECRETS, {**secrets, member.epoch: _Secret(member.derive(PURPOSE))}, msgspec.msgpack.encode)
        self._store.keep("group", member, group.Member.to_bytes)
        return m.Stepped(answer or b"")

    def transforms(self) -> Transforms:
        """The transforms of clients' sums. Raises `RemoteError` "no-secret"."""
        secrets, kind = self._secrets(), self._settings.protection.sum
        if not secrets:
            raise RemoteError("no-secret")
        return self._cache.shared({epoch: secret.sums for epoch, secret in secrets.items()}, kind if kind in TRANSFORMS else "haar")

    def compared(self, named: ClusteringName, dimension: int, kind: str) -> Transform:
        """The transform of a clustering epoch. The keys of ended epochs are erased first.

        Raises:
            RemoteError: "no-secret"; "used-transform" for an epoch whose key is erased.
            InputError: for an earlier group epoch whose secret this client never gets, and for numbers beyond the last one.
        """
        secrets, member = self._secrets(), self._member()
        if not secrets:
            raise RemoteError("no-secret")
        check_secret(named.purpose, secrets)
        try:
            ratchets = {
                epoch: secret.ratchet.moved(named.number, named.open) for epoch, secret in secrets.items() if secret.ratchet is not None
            }
            if member is not None and member.epoch is not None:
                ratchets[member.epoch] = member.advance(named.number, named.open)
        except RemoteError:
            raise InputError(f"gram: clustering epoch {named.number} is beyond the last of a session, {group.NUMBERS - 1}") from None
        over = {epoch: _Secret(secret.sums, secret.ratchet and ratchets[epoch]) for epoch, secret in secrets.items()}
        if over != secrets:
            self._store.keep(SECRETS, over, msgspec.msgpack.encode)
        if member is not None:
            self._store.keep("group", member, group.Member.to_bytes)
        self._cache.erase_compared({key for ratchet in ratchets.values() for _, key in ratchet.kept})
        epoch = group_epoch(named.purpose)
        if epoch not in ratchets:  # the agreement has ended meanwhile
            raise RemoteError("no-secret")
        key = ratchets[epoch].key(named.number)
        if key is None:
            raise RemoteError("used-transform")
        return self._cache.transform(kind, key, named.purpose, dimension)

    def secrets(self) -> dict[str, str]:
        """The secrets of the transforms as hexadecimal digits: of sums, and of clustering epochs that are not erased."""
        digits, member = {}, self._member()
        for epoch, secret in self._secrets().items():
            suffix = f"@{epoch}" if epoch else ""
            digits[f"group_secret{suffix}"] = secret.sums.hex()
            ratchet = member.ratchet if member is not None and member.epoch == epoch else secret.ratchet
            if ratchet is not None:
                digits[f"epoch_secrets{suffix}"] = codec.encode(ratchet).hex()
        return digits

    def _secrets(self) -> _Secrets:
        return self._store.load(SECRETS, _read_secrets) or {}

    def _member(self) -> group.Member | None:
        settings = self._settings
        if settings.roster is None:
            return None
        return self._store.load(
            "group", partial(group.Member.from_bytes, identity=settings.identity, roster=settings.roster, entropy=self._entropy)
        )


def _read_secrets(data: bytes) -> _Secrets:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        raise MalformedMessage from None


class Agreement:
    """The server's part. `members`: the clients that have the secret, by the messages they were sent and their refusals.

    Clients require that more than half of their roster takes part, so that no client can be isolated.
    """

    def __init__(self, registry: ClientRegistry, session: bytes, roster: Roster, record: Callable[..., None]) -> None:
        self._registry, self._session, self._roster, self._record = registry, session, roster, record
        self._server: group.GroupServer | None = None
        self._epoch = self._read = 0
        self.members: frozenset[int] = frozenset()

    def named(self, purpose: str) -> str:
        """The name of a purpose's transform under the current secret."""
        epoch = 0 if self._server is None else self._server.terms.epoch
        return f"{purpose}@{epoch}" if epoch else purpose

    @property
    def lacking(self) -> str:
        """Why there is no secret yet; empty if there is one."""
        if self._server is not None:
            return ""
        there, total = len(self._registry.present), len(self._roster.keys)
        return f"{there} of {total} clients are there; to agree on the secret of their transform {total // 2 + 1} are needed"

    def renew(self) -> None:
        """Begin a new epoch of the present clients, with a fresh secret that removed clients never get. Raises `TooFewClients`."""
        before = self._server, self.members
        self._server, self.members = None, frozenset()
        try:
            self._agree(sorted(self._registry.present))
        finally:
            if self._server is None:
                self._server, self.members = before
        if self._server is before[0]:
            raise TooFewClients((len(self._registry.present),), len(self._roster.keys) // 2 + 1)

    def saved(self) -> dict[str, Any]:
        """The server's machine and the members, for a checkpoint."""
        return {
            "server": b"" if self._server is None else self._server.to_bytes(),
            "epoch": self._epoch,
            "members": sorted(self.members),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The inverse of `saved`."""
        self._server = group.GroupServer.from_bytes(saved["server"], self._roster) if saved["server"] else None
        self._epoch, self.members = saved["epoch"], frozenset(saved["members"])

    def extend(self) -> None:
        """Agree once enough clients are present; then have a member give the secret to every other client that is present."""
        refusals = self._registry.refusals[self._read :]  # each one once, because a client may get the secret again
        self._read += len(refusals)
        self.members -= {client for client, _, code in refusals if code in ("no-secret", "wrong-session")}
        fresh = sorted(self._registry.present - self.members)
        if self._server is None:
            with suppress(TooFewClients):  # the next round tries again
                self._agree(fresh)
            return
        for client in fresh:
            self._admit(client)

    def _agree(self, fresh: list[int]) -> None:
        smallest = len(self._roster.keys) // 2 + 1
        if len(fresh) < smallest:
            return
        terms = group.make_terms(
            session=self._session, epoch=self._epoch, roster=self._roster, members=fresh, smallest=smallest, removed=self._registry.removed
        )
        self._epoch += 1  # an epoch is tried once
        server = group.GroupServer(terms, self._roster)
        outbox = server.advance()
        while server.stage is not group.GroupServerStage.RUNNING:
            for client, message in self._stage(outbox).items():
                self._pass_on(server, client, message)
            outbox = server.advance()
        self._stage(outbox)
        self._server, self.members = server, frozenset(outbox)  # a client whose answer was lost has the secret, or will refuse

    def _admit(self, client: int) -> None:
        """Have the first member that can do so give the secret to a new client."""
        server = self._server
        assert server is not None
        for sponsor in sorted(self._registry.present & self.members):
            outbox: Mapping[int, bytes] = server.admit(client, sponsor)
            while outbox:
                (asked,) = outbox
                before = len(self._registry.refusals)
                answer = self._stage(outbox).get(asked)
                outbox = self._pass_on(server, asked, answer) if answer else {}
                if asked == client and not outbox:
                    # "wrong-epoch": it is a member already, and its earlier answer was lost
                    if answer == b"" or (client, "group", "wrong-epoch") in self._registry.refusals[before:]:
                        self.members |= {client}
                    return

    def _pass_on(self, server: group.GroupServer, client: int, message: bytes) -> Mapping[int, bytes]:
        """The messages to forward at once; none if the server refuses this one, which is recorded."""
        try:
            return server.receive(client, message)
        except RemoteError as error:
            self._registry.refusals.append((client, "group", error.code))
            return {}

    def _stage(self, outbox: Mapping[int, bytes]) -> dict[int, bytes]:
        asks: dict[int, m.PartyRequest] = {
            client: m.Group(self._session, message) for client, message in outbox.items() if client in self._registry.present
        }
        answers = self._registry.ask(asks, "group") if asks else {}
        replies = {client: answer.message for client, answer in answers.items() if isinstance(answer, m.Stepped)}
        ways = (
            ("server", "clients", dict(outbox), ("server", "clients"), group.decode_server),
            ("clients", "server", replies, ("server",), group.decode_member),
        )
        for source, target, parts, readers, decode in ways:
            kinds: dict[str, list[int]] = {}
            for client, data in sorted(parts.items()):
                if data:
                    kinds.setdefault(_kind(data, decode), []).append(client)
            for kind, clients in kinds.items():
                payload = [{"bytes": np.frombuffer(parts[client], dtype=np.uint8)} for client in clients]
                alike = source == "server" and len({parts[client] for client in clients}) == 1
                self._record(kind, source, target, clients, payload[0] if alike else payload, readers=readers)
        return replies


def _kind(data: bytes, decode: Callable[[bytes], Any]) -> str:
    """The type of a message of the agreement."""
    try:
        return type(decode(data)).__name__
    except RemoteError:
        return "malformed"
