"""The server's runs of secure sums: several groups in parallel, new attempts after a failure, adverts for later sums.

The guarantee is that of `protocols.secagg`, whose machines run here; `secagg` and `oblivious` decide what is summed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ..contract.calls import Recorder, TooUnequal
from ..contract.protection import Protection
from ..protocols import secagg
from ..protocols.errors import LocalError, RemoteError, SumFailed, TooFewClients
from ..protocols.secagg import ServerStage, Slot, Sum, Terms
from ..protocols.secagg.graph import complete_threshold
from .spoilers import SumRuns

__all__ = ["ATTEMPTS", "OBLIVIOUS", "SendMessages", "SecureSums", "least_weight"]

OBLIVIOUS = -1
"""The label of a sum whose groups the server does not know."""
STAGES = tuple(ServerStage)
ATTEMPTS = 1 << 16
"""The number of slots of one sum: each attempt takes the next one."""
SendMessages = Callable[[Mapping[int, tuple[Slot, bytes]], str], Mapping[int, bytes]]
"""Sends messages, by client with the slot of its sum, at a named stage. Returns the messages of the clients that answered."""


def least_weight(protection: Protection, clients: int) -> float:
    """What a client with few samples counts as in a sum by sample counts, if so many clients are asked: `max_weight` where all weigh alike.

    In an oblivious sum nobody knows how many contribute to a block, so it is taken as `max_weight` there.
    """
    limit, smallest = protection.max_weight, protection.smallest_sum
    if clients <= smallest or protection.sums.oblivious:
        return limit
    terms = secagg.make_terms(
        session=bytes(16), slot=(0, 0), cohort=range(clients), models=[bytes(32)], dimension=1, clip=1.0, bits=protection.secagg_bits,
        weight_limit=limit, min_cohort=smallest, sparse=False if protection.secagg_mode == "active" else None,
    )  # fmt: skip
    if protection.secagg_mode == "passive" or protection.sums.helped:  # more than half take part
        return terms.least_weight
    active = msgspec.structs.replace(terms, mode="active", threshold=complete_threshold(clients, "active"), least_weight=limit / 2**40)
    return secagg.lifted(active, smallest).least_weight


@dataclass
class SecureSums(SumRuns[Terms]):
    """Of pairwise masks the server keeps also adverts for later slots, and the roster in active mode only."""

    adverts: dict[Slot, dict[int, bytes]] = field(default_factory=dict)

    def forget(self, clients: Iterable[int]) -> None:
        """Forget the adverts of clients that enrolled again: they may have lost the keys, and are invited anew."""
        for adverts in self.adverts.values():
            for client in clients:
                adverts.pop(client, None)

    def terms(
        self, slot: Slot, cohort: Sequence[int], models: Sequence[bytes], dimension: int, weight_limit: float, following: Slot | None,
        spread: float = 1.0, earlier: Terms | None = None, *, noised: bool = False,
    ) -> Terms:  # fmt: skip
        """The terms of one group's sum. `earlier`: of a sum of these clients in this round, whose quantiser and least weight stay.

        A second sum over fewer clients than asked before is over exactly those. `noised` changes nothing: clients' shares of noise are part
        of their values. Raises `TooUnequal` for values that weigh clients too differently inside themselves (`spread`).
        """
        earlier = earlier if earlier is None or len(cohort) <= len(earlier.cohort) else None
        smallest = self.smallest(len(cohort), spread, earlier, 0 if earlier is None else len(earlier.cohort))
        terms = secagg.make_terms(
            session=self.session, slot=slot, cohort=cohort, models=models, dimension=dimension, clip=self.settings.clip,
            bits=self.settings.bits, weight_limit=weight_limit, min_cohort=smallest, effective=self.min_cohort, roster=self.roster,
            following=following, entropy=self.entropy, levels=None if earlier is None else earlier.levels,
            least_weight=None if earlier is None else earlier.least_weight,
        )  # fmt: skip
        return self._among_unequal(terms, spread) if spread > 1 and earlier is None else terms

    def _among_unequal(self, terms: Terms, spread: float) -> Terms:
        """The terms with the least weight for values of this spread. Raises `TooUnequal` if there is none."""
        try:
            return secagg.lifted(terms, self.min_cohort, spread)
        except ValueError:
            fewest = secagg.fewest_contributors(terms)
            raise TooUnequal(spread, fewest, self.min_cohort, secagg.largest_ratio(fewest, self.min_cohort)) from None

    def counts(self, slot: Slot, cohort: Sequence[int], models: Sequence[bytes], k: int, following: Slot) -> Terms:
        """The terms of the first of two oblivious sums."""
        return secagg.count_terms(
            session=self.session, slot=slot, cohort=cohort, models=models, clusters=k, min_cohort=self.min_cohort, roster=self.roster,
            following=following, entropy=self.entropy,
        )  # fmt: skip

    def blocks(
        self, counted: Sum[Terms], slot: Slot, models: Sequence[bytes], dimension: int, weight_limit: float, least_weight: float | None,
        spread: float = 1.0,
    ) -> Terms:  # fmt: skip
        """The terms of the second. With `weight_limit` 0 all weigh equally; `least_weight`: of an earlier such sum of this round.

        Raises `TooUnequal` as `terms` does.
        """
        terms = secagg.block_terms(
            counted, slot=slot, models=models, dimension=dimension, clip=self.settings.clip, bits=self.settings.bits,
            weight_limit=weight_limit or 1.0, least_weight=least_weight if weight_limit else 1.0, roster=self.roster, entropy=self.entropy,
        )  # fmt: skip
        return self._among_unequal(terms, spread) if spread > 1 and least_weight is None else terms

    def run_one(self, terms: Terms, exchange: SendMessages, record: Recorder, spread: float = 1.0) -> Sum[Terms]:
        """Run one oblivious sum. Raises `TooFewClients` if it fails."""
        ended = self.run({OBLIVIOUS: terms}, exchange, record, spread)[OBLIVIOUS]
        if not isinstance(ended, Sum):
            raise ended
        return ended

    def run(
        self, groups: Mapping[int, Terms], exchange: SendMessages, record: Recorder, spread: float = 1.0
    ) -> dict[int, Sum[Terms] | TooFewClients]:
        """Run the sums of groups that share no client. Returns for each its sum, or the error that it ended with.

        `spread`: of the values, for new attempts. A sum that fails before shares are revealed is taken again without the clients at fault.
        """
        servers = {label: self._server(terms) for label, terms in groups.items()}
        ended: dict[int, Sum[Terms] | TooFewClients] = {}
        revealed: set[int] = set()
        while running := [label for label in servers if label not in ended]:
            # Sums that are behind (shares in dispute, or a new attempt) go first, so that all continue together.
            behind = min((servers[label].stage for label in running), key=STAGES.index)
            outboxes: dict[str, dict[int, tuple[int, bytes]]] = {}
            for label in running:
                server = servers[label]
                if server.stage is not behind:
                    continue
                stage = server.sent
                if stage == "Unmask":
                    revealed.add(label)
                try:
                    outbox = server.advance()
                except TooFewClients as error:
                    ended[label] = error
                except SumFailed as error:
                    self.offenders |= set(error.offenders)
                    self.refusals.extend((client, f"secagg {stage}", error.code) for client in error.offenders)
                    if error.among:
                        self.suspect(error.among, f"secagg {stage}")
                    try:
                        servers[label] = self._server(self._retaken(server.terms, error, spread))
                    except TooFewClients as few:
                        ended[label] = few
                else:
                    if server.stage is ServerStage.DONE:
                        ended[label] = server.result
                    outboxes.setdefault(server.sent, {}).update({client: (label, message) for client, message in outbox.items()})
            for kind, sent in outboxes.items():
                if sent:
                    self._deliver(kind, sent, servers, exchange, record)
        for label in revealed:
            if not isinstance(ended[label], Sum):
                self.unopened.add(servers[label].terms.slot[0])
        for server in servers.values():
            if server.stage is ServerStage.DONE and server.terms.following is not None:
                self.adverts.setdefault(server.terms.following, {}).update(server.following)
        for slot in [slot for slot in self.adverts if slot <= max(terms.slot for terms in groups.values())]:
            del self.adverts[slot]
        return ended

    def _deliver(
        self,
        kind: str,
        outbox: Mapping[int, tuple[int, bytes]],
        servers: Mapping[int, secagg.Server],
        exchange: SendMessages,
        record: Recorder,
    ) -> None:
        """Send messages of one kind, and give the answers to the machines."""
        label_of = {client: label for client, (label, _) in outbox.items()}
        slots = {label: servers[label].terms.slot for label in label_of.values()}

        def note(kind: str, messages: Mapping[int, bytes], source: str, target: str, readers: tuple[str, ...]) -> None:
            """Record the messages of each group."""
            for label, slot in slots.items():
                members = [client for client in sorted(messages) if label_of[client] == label]
                payload = [{"bytes": np.frombuffer(messages[client], dtype=np.uint8)} for client in members]
                context = {"slot": list(slot)} | ({} if label == OBLIVIOUS else {"group": label})
                if members:
                    record(f"secagg {kind}", source, target, members, payload, readers=readers, context=context)

        note(kind, {client: message for client, (_, message) in outbox.items()}, "server", "clients", ("server", "clients"))
        answers = exchange({client: (slots[label], message) for client, (label, message) in sorted(outbox.items())}, f"secagg {kind}")
        usual = servers[next(iter(slots))].collected[0]
        kinds = dict.fromkeys(answers, usual)
        for client, message in sorted(answers.items()):
            try:
                kinds[client] = servers[label_of[client]].receive(client, message)
            except RemoteError as error:  # refused without a change of state: the client drops out
                self.refusals.append((client, f"secagg {kind}", error.code))
                if error.code == "wrong-share":
                    self.offenders.add(client)
        for reply in sorted(set(kinds.values())):
            note(
                reply, {client: message for client, message in answers.items() if kinds[client] == reply}, "clients", "server", ("server",)
            )

    def _retaken(self, terms: Terms, failed: SumFailed, spread: float) -> Terms:
        """The terms of the next attempt. Raises `TooFewClients` if there is none."""
        if not failed.repeatable or terms.slot[1] % ATTEMPTS == ATTEMPTS - 1:
            raise TooFewClients((0,), self.min_cohort)
        return secagg.retaken(terms, (*failed.offenders, *failed.absent), self.entropy, self.min_cohort, spread)

    def _server(self, terms: Terms) -> secagg.Server:
        """The server's machine of a sum, with the adverts that its clients sent in an earlier one.

        Adverts were checked one by one. If two have the same key, all clients are invited anew.
        """
        known = self.adverts.get(terms.slot, {})
        try:
            return secagg.Server(terms, roster=self.roster, adverts={c: known[c] for c in terms.cohort if c in known})
        except LocalError:
            return secagg.Server(terms, roster=self.roster)
