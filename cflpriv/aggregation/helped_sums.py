"""The server's runs of sums in one message: several groups in parallel, each in a slot of its own.

Clients answer once; then three exchanges with the helpers deliver, close and open the sums of all groups together. The guarantee is that of
`protocols.one_message`, whose machine runs here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..contract.calls import Recorder, TooUnequal
from ..contract.transcript import Passed
from ..federation import messages as m
from ..federation.protections import Portions, at_once
from ..federation.registry import KEY_HOLDER, ClientRegistry, KeyHolderLost
from ..protocols.errors import HelpersFailed, RemoteError, SumFailed, TooFewClients
from ..protocols.one_message import HelpedServer, HelpedTerms, Sum, make_terms
from ..protocols.one_message.messages import announcement_of
from ..protocols.secagg import Slot, largest_ratio
from ..protocols.secagg.vectors import vector_length
from ..protocols.shared_noise import HELPER_STEPS
from .secure_sums import OBLIVIOUS, SendMessages
from .spoilers import SumRuns

__all__ = ["HelpedSums"]

Ended = Sum[HelpedTerms] | TooFewClients


@dataclass
class HelpedSums(SumRuns[HelpedTerms]):
    """What a server keeps between sums: the helpers' keys of the current round, the slots in use, and who was asked under which terms.

    `listed`: whether terms name the clients that may be members.
    `portions`: see `ServerParts`.
    """

    registry: ClientRegistry | None = None
    colluding: int = 1
    cohort_change: int = 0
    listed: bool = False
    portions: Portions = at_once
    announced: dict[int, bytes] = field(default_factory=dict)
    of_round: int = -1
    used: dict[Slot, int] = field(default_factory=dict)
    asked: dict[Slot, tuple[int, ...]] = field(default_factory=dict)

    def terms(
        self, slot: Slot, cohort: Sequence[int], models: Sequence[bytes], dimension: int, weight_limit: float, following: Slot | None,
        spread: float = 1.0, earlier: HelpedTerms | None = None, clusters: int = 0, *, noised: bool = False,
    ) -> HelpedTerms:  # fmt: skip
        """The terms of one group's sum, in the next slot from `slot` on. `earlier` as in `SecureSums.terms`; nothing is `following`.

        `clusters`: the blocks that clients choose from. All weigh equally then. `noised`: helpers add noise to the sum.

        Raises `TooUnequal` for values that weigh clients too differently inside themselves (`spread`).
        """
        assert self.roster is not None
        announced = self._keys(slot[0])
        n = len(cohort)
        before = earlier if earlier is None or n <= earlier.maximum else None
        place = self.used[slot] = self.used.get(slot, -1) + 1
        smallest = self.smallest(n, spread, before, 0 if before is None else before.maximum)
        least = 1.0 if clusters else None if before is None else before.least_weight
        try:
            terms = make_terms(
                session=self.session, slot=(slot[0], slot[1] + place), roster=self.roster, colluding=self.colluding, announced=announced,
                clients=n, models=models, dimension=dimension, clip=self.settings.clip, bits=self.settings.bits,
                levels=None if before is None else before.levels, weight_limit=1.0 if clusters else weight_limit, least_weight=least,
                spread=spread, min_cohort=smallest, effective=self.min_cohort, cohort_change=self.cohort_change,
                cohort=cohort if self.listed else (), clusters=clusters, noise=HELPER_STEPS[self.settings.bits] if noised else 0,
            )  # fmt: skip
        except TooFewClients:
            raise
        except ValueError:
            if spread <= 1:
                raise
            raise TooUnequal(spread, smallest, self.min_cohort, largest_ratio(smallest, self.min_cohort)) from None
        self.asked[terms.slot] = tuple(cohort)
        return terms

    def run(
        self, groups: Mapping[int, HelpedTerms], exchange: SendMessages, record: Recorder, spread: float = 1.0
    ) -> dict[int, Sum[HelpedTerms] | TooFewClients]:
        """Run the sums of groups that share no client. Returns for each its sum, or the error that it ended with.

        Raises `KeyHolderLost` if a sum fails because of the helpers.
        """
        assert self.roster is not None
        servers = {label: HelpedServer(terms, self.announced, self.roster) for label, terms in groups.items()}
        ended: dict[int, Ended] = {}
        few = self._collect(servers, exchange, record)
        for server in servers.values():
            self.refusals.extend((client, "sum", code) for client, (_, code) in sorted(server.refused.items()))
        outboxes: dict[int, dict[int, bytes]] = {label: self._stepped(servers[label].close, label, servers, ended) for label in servers}
        stages = iter(("Close", "Open"))
        stage = "Close"
        while any(outboxes.values()):
            stage = next(stages, stage)
            if few and all(server.stage == "opening" for label, server in servers.items() if outboxes.get(label)):
                self._open_one_by_one(servers, outboxes, record)
                arrived: dict[int, dict[int, bytes]] = {label: {} for label in outboxes}
            else:
                arrived = self._ask(servers, outboxes, stage, record)
            outboxes = {
                label: self._stepped(partial(servers[label].advance, arrived[label]), label, servers, ended)
                for label in [label for label, sent in outboxes.items() if sent]
            }
        for label, server in servers.items():
            if label not in ended:
                ended[label] = server.result
            self.refusals.extend((KEY_HOLDER - helper, "sum", "masks-differ") for helper in sorted(server.liars))
        return ended

    def _keys(self, number: int) -> dict[int, bytes]:
        """The helpers' announcements of a round. Raises `KeyHolderLost` if fewer than a quorum are there."""
        if self.of_round == number:
            return self.announced
        registry, roster = self.registry, self.roster
        assert registry is not None
        assert roster is not None
        needed = (len(roster.holders) + self.colluding) // 2 + 1
        if len(registry.holders) < needed:
            registry.enrol()
        ask = m.Help(self.session, number, ())
        announced: dict[int, bytes] = {}
        for helper, answer in registry.ask_holders(dict.fromkeys(registry.holders, ask), "sum keys").items():
            first = answer.answers[0] if isinstance(answer, m.Helped) and len(answer.answers) == 1 else answer
            if not isinstance(first, m.Stepped):
                continue
            try:
                message = announcement_of(roster, first.message)
                if (message.helper, message.session, message.round) != (helper, self.session, number):
                    raise RemoteError("bad-signature")
            except RemoteError as error:
                registry.refusals.append((KEY_HOLDER - helper, "sum keys", error.code))
            else:
                announced[helper] = first.message
        if len(announced) < needed:
            raise KeyHolderLost(
                "sum keys", who=f"{len(announced)} of {len(roster.holders)} helpers are there, {needed} are needed: the others"
            )
        self.announced, self.of_round, self.used, self.asked = announced, number, {}, {}
        return announced

    def _collect(self, servers: Mapping[int, HelpedServer], exchange: SendMessages, record: Recorder) -> bool:
        """Invite the clients, take their uploads and deliver these to the helpers: all at once, or in portions that are let go one by one.

        Returns whether there were several portions.
        The record is the same in both cases: of a helper's messages that came in portions it has the bytes of all.
        """
        label_of = {client: label for label, server in servers.items() for client in self.asked[server.terms.slot]}
        for label, server in servers.items():
            invited = dict.fromkeys(self.asked[server.terms.slot], server.invite)
            payload = [{"bytes": np.frombuffer(message, np.uint8)} for message in invited.values()]
            self._note(record, "Invite", label, server, invited, payload, up=False)
        largest = max(server.terms.bits // 8 * vector_length(server.terms) for server in servers.values())
        portions = list(self.portions(sorted(label_of), largest))
        uploads: dict[int, dict[int, Any]] = {label: {} for label in servers}
        delivered = _Joined(let_go=len(portions) > 1)
        try:
            for some in portions:
                self._take(some, label_of, servers, exchange, uploads, let_go=len(portions) > 1)
                outboxes = {label: server.deliver() for label, server in servers.items()}
                for label, answers in self._ask(servers, outboxes, "Delivery", delivered).items():
                    servers[label].delivered(answers)
        finally:
            for label, server in servers.items():
                self._note(record, "Upload", label, server, uploads[label], list(uploads[label].values()), up=True)
            delivered.write(record)
        return len(portions) > 1

    def _open_one_by_one(
        self, servers: Mapping[int, HelpedServer], outboxes: Mapping[int, Mapping[int, bytes]], record: Recorder
    ) -> None:  # fmt: skip
        """Ask the helpers to open sums one after the other, so that their masks are not all in memory together."""
        opened = _Joined(let_go=True)
        for helper in sorted({helper for outbox in outboxes.values() for helper in outbox}):
            own = {label: {helper: outbox[helper]} for label, outbox in outboxes.items() if helper in outbox}
            for label, answers in self._ask(servers, own, "Open", opened).items():
                servers[label].opened(answers)
        opened.write(record)

    def _take(
        self, some: Sequence[int], label_of: Mapping[int, int], servers: Mapping[int, HelpedServer], exchange: SendMessages,
        uploads: Mapping[int, dict[int, Any]], let_go: bool,
    ) -> None:  # fmt: skip
        """Take the uploads of some clients. What is to be recorded of these goes to `uploads`, by group and client."""
        invites = {client: (servers[label_of[client]].terms.slot, servers[label_of[client]].invite) for client in some}
        for client, message in sorted(exchange(invites, "sum").items()):
            if client not in label_of:
                continue
            uploads[label_of[client]][client] = {"bytes": Passed(len(message)) if let_go else np.frombuffer(message, np.uint8)}
            try:
                servers[label_of[client]].receive(client, message)
            except RemoteError as error:  # refused without a change of state: the client drops out
                self.refusals.append((client, "sum", error.code))

    def _note(
        self, record: Recorder, kind: str, label: int, server: HelpedServer, clients: Iterable[int], payload: Sequence[Any], up: bool
    ) -> None:  # fmt: skip
        if payload:
            source, target = ("clients", "server") if up else ("server", "clients")
            readers = ("server",) if up else ("server", "clients")
            context = {"slot": list(server.terms.slot)} | ({} if label == OBLIVIOUS else {"group": label})
            record(f"helped {kind}", source, target, list(clients), payload, readers=readers, context=context)

    def _ask(
        self, servers: Mapping[int, HelpedServer], outboxes: Mapping[int, Mapping[int, bytes]], stage: str, record: Recorder
    ) -> dict[int, dict[int, bytes]]:  # fmt: skip
        """Send each helper its messages of all groups together; the answers by group and helper. Refusals are recorded."""
        assert self.registry is not None
        helpers = sorted({helper for outbox in outboxes.values() for helper in outbox})
        labels = {helper: [label for label, outbox in outboxes.items() if helper in outbox] for helper in helpers}
        asks = {
            helper: m.Help(self.session, self.of_round, tuple(outboxes[label][helper] for label in labels[helper])) for helper in helpers
        }
        answers: dict[int, dict[int, bytes]] = {label: {} for label in outboxes}
        got = self.registry.ask_holders(asks, f"sum {stage}") if asks else {}
        for helper, answer in got.items():
            several = answer.answers if isinstance(answer, m.Helped) and len(answer.answers) == len(labels[helper]) else ()
            for label, one in zip(labels[helper], several, strict=False):
                if isinstance(one, m.Stepped):
                    answers[label][helper] = one.message
                else:
                    self.registry.refusals.append((KEY_HOLDER - helper, f"sum {stage}", one.code))
        for label, outbox in outboxes.items():
            self._note_helpers(record, stage, label, servers[label], outbox, up=False)
            self._note_helpers(record, f"{stage} answer", label, servers[label], answers[label], up=True)
        return answers

    def _note_helpers(
        self, record: Recorder, kind: str, label: int, server: HelpedServer, messages: Mapping[int, bytes], up: bool
    ) -> None:  # fmt: skip
        source, target = ("key-holder", "server") if up else ("server", "key-holder")
        for helper, message in messages.items():
            context = {"slot": list(server.terms.slot), "holder": helper} | ({} if label == OBLIVIOUS else {"group": label})
            payload = {"bytes": np.frombuffer(message, np.uint8)}
            record(f"helped {kind}", source, target, (), payload, readers=("server", "key-holder"), context=context)

    def _stepped(
        self, step: Callable[[], dict[int, bytes]], label: int, servers: Mapping[int, HelpedServer], ended: dict[int, Ended]
    ) -> dict[int, bytes]:
        """The next messages of a group's sum; none once it has ended."""
        server = servers[label]
        try:
            return step()
        except TooFewClients as error:
            if server.stage != "collecting":  # its set is signed
                self.unopened.add(server.terms.round)
            ended[label] = error
        except SumFailed as error:
            self.unopened.add(server.terms.round)
            self.suspect(error.among, "sum")
            ended[label] = TooFewClients((0,), self.min_cohort)
        except HelpersFailed as error:
            self.unopened.add(server.terms.round)
            names = f" ({', '.join(map(str, error.helpers))})" if error.helpers else ""
            raise KeyHolderLost(f"sum, {error.code}", who=f"too few of the helpers{names}") from None
        return {}


class _Joined:
    """Collects what is recorded of messages to and from helpers, and records those of one kind and party as one. With `let_go` of their
    bytes there are the numbers."""

    def __init__(self, let_go: bool) -> None:
        self._let_go = let_go
        self._kept: dict[tuple[int, str, int], tuple[Callable[..., None], list[Any]]] = {}

    def __call__(
        self, kind: str, source: str, target: str, clients: Sequence[int], payload: Any, *, readers: Sequence[str],
        context: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        def written(record: Recorder, whole: Mapping[str, Any]) -> None:
            record(kind, source, target, clients, whole, readers=readers, context=context)

        assert context is not None
        data, key = payload["bytes"], (context.get("group", OBLIVIOUS), kind, context["holder"])
        self._kept.setdefault(key, (written, []))[1].append(data.nbytes if self._let_go else data)

    def write(self, record: Recorder) -> None:
        """Record all of it, in the order of messages that all parties are sent together."""
        for _, (written, pieces) in sorted(self._kept.items(), key=lambda item: item[0]):
            written(record, {"bytes": Passed(sum(pieces)) if self._let_go else np.concatenate(pieces)})
