"""The server's side of secure sums, many groups abreast: each stage is one exchange with all clients of all groups."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..channels import Recorder
from ..handles import GroupMean, Shared
from ..protection import SecureSum
from ..protocols import secagg
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import LocalError, RemoteError, TooFewClients
from ..protocols.keys import Roster
from ..protocols.secagg import SERVER, Slot, Sum, Terms
from . import messages as m

__all__ = ["OBLIVIOUS", "Layout", "SecureSums", "group_mean"]

OBLIVIOUS = -1
"""The label of a sum whose groups the server does not know."""

Layout = tuple[m.Described, ...]
Exchange = Callable[[Mapping[int, m.Step], str], Mapping[int, bytes]]
"""Steps by client and the name of the stage, to what those who answered said."""


@dataclass
class SecureSums:
    """What a server keeps between sums: the roster (active mode), what clients advertised for later slots, whom it refused when and why."""

    settings: SecureSum
    floor: int
    session: bytes
    roster: Roster | None
    entropy: Entropy = system_entropy
    adverts: dict[Slot, dict[int, bytes]] = field(default_factory=dict)
    refusals: list[tuple[int, str, str]] = field(default_factory=list)

    def forget(self, clients: Iterable[int]) -> None:
        """What these advertised for later sums: who comes back may have lost the keys, and is invited again."""
        for adverts in self.adverts.values():
            for client in clients:
                adverts.pop(client, None)

    def terms(
        self, slot: Slot, cohort: Sequence[int], models: Sequence[bytes], dimension: int, weight_limit: float, following: Slot | None
    ) -> Terms:
        """The terms of one group's sum."""
        return secagg.make_terms(
            session=self.session, slot=slot, cohort=cohort, models=models, dimension=dimension, clip=self.settings.clip,
            bits=self.settings.bits, weight_limit=weight_limit, floor=self.floor, roster=self.roster, following=following,
            entropy=self.entropy,
        )  # fmt: skip

    def counts(self, slot: Slot, cohort: Sequence[int], models: Sequence[bytes], k: int, following: Slot) -> Terms:
        """The terms of an oblivious pair's first sum."""
        return secagg.count_terms(
            session=self.session, slot=slot, cohort=cohort, models=models, clusters=k, floor=self.floor, roster=self.roster,
            following=following, entropy=self.entropy,
        )  # fmt: skip

    def blocks(self, counted: Sum, slot: Slot, models: Sequence[bytes], dimension: int, weight_limit: float) -> Terms:
        """The terms of its second."""
        return secagg.block_terms(
            counted, slot=slot, models=models, dimension=dimension, clip=self.settings.clip, bits=self.settings.bits,
            weight_limit=weight_limit, roster=self.roster, entropy=self.entropy,
        )  # fmt: skip

    def run(
        self, groups: Mapping[int, Terms], step: Callable[[int, bytes], m.Step], exchange: Exchange, record: Recorder
    ) -> dict[int, Sum | TooFewClients]:
        """Run the sums of all groups, which share no client: each ends with its sum, or with why there is none.

        An oblivious sum goes by the label `OBLIVIOUS`.
        """
        mode = self.settings.mode
        servers: dict[int, secagg.Server] = {}
        ended: dict[int, Sum | TooFewClients] = {}
        for label, terms in groups.items():
            servers[label] = self._server(terms)
        for _, kind, _ in SERVER[mode].values():
            outbox: dict[int, tuple[int, bytes]] = {}
            for label, server in servers.items():
                if label in ended:
                    continue
                try:
                    outbox |= {client: (label, said) for client, said in server.advance().items()}
                except TooFewClients as error:
                    ended[label] = error
                except LocalError:  # shares that do not fit: clients that lie cost their own sum, not the run
                    ended[label] = TooFewClients((0,), self.floor)
            if not outbox:
                continue
            self._note(record, "down", kind or "", {client: said for client, (_, said) in outbox.items()}, groups, outbox)
            answers = exchange({client: step(client, said) for client, (_, said) in sorted(outbox.items())}, f"secagg {kind}")
            reply_kind = SERVER[mode][next(iter(servers[label] for label in servers if label not in ended)).stage][0]
            self._note(record, "up", reply_kind or "", answers, groups, outbox)
            for client, said in sorted(answers.items()):
                label, _ = outbox[client]
                try:
                    servers[label].receive(client, said)
                except RemoteError as error:  # refused without a change of state: this client is a dropout from here on
                    self.refusals.append((client, f"secagg {kind}", error.code))
        for label, server in servers.items():
            if label not in ended:
                ended[label] = server.result
                if server.terms.following is not None:
                    self.adverts.setdefault(server.terms.following, {}).update(server.following)
        for slot in [slot for slot in self.adverts if slot <= max(terms.slot for terms in groups.values())]:
            del self.adverts[slot]
        return ended

    def _server(self, terms: Terms) -> secagg.Server:
        """The server's machine of a sum, with what its clients advertised for it.

        Adverts were checked in the sums that they came in, not against each other's: where two have the same key all are invited anew.
        """
        known = self.adverts.get(terms.slot, {})
        try:
            return secagg.Server(terms, roster=self.roster, adverts={c: known[c] for c in terms.cohort if c in known})
        except LocalError:
            return secagg.Server(terms, roster=self.roster)

    @staticmethod
    def _note(
        record: Recorder, direction: str, kind: str, said: Mapping[int, bytes], groups: Mapping[int, Terms],
        outbox: Mapping[int, tuple[int, bytes]],
    ) -> None:  # fmt: skip
        """One record a group, as in a federation in one process."""
        up = direction == "up"
        for label, terms in groups.items():
            members = [client for client in sorted(said) if outbox[client][0] == label]
            if members:
                context = {"slot": list(terms.slot)} | ({} if label == OBLIVIOUS else {"group": label})
                record(
                    f"secagg {kind}", "clients" if up else "server", "server" if up else "clients", members,
                    [{"bytes": np.frombuffer(said[client], dtype=np.uint8)} for client in members],
                    readers=("server",) if up else ("server", "clients"), context=context,
                )  # fmt: skip


def group_mean(total: Sum, cluster: int | None, layout: Layout, count: int, common: float = 1.0) -> GroupMean | None:
    """The mean of a sum whose weights, where it is unweighted, are all `common`; None if nothing of weight arrived."""
    weight = total.weight(cluster)
    if weight <= 0:
        return None
    mean = total.mean(cluster)
    parts: dict[str, Any] = {}
    start = 0
    for part in layout:
        stop = start + int(np.prod(part.shape, dtype=int))
        parts[part.name] = Shared(mean[start:stop].reshape(part.shape).astype(np.dtype(part.dtype)))
        start = stop
    return GroupMean(parts, weight * common, count, total.clipped_clients, tuple(total.survivors))
