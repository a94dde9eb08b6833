"""A federation of clients in this process: the reference for every other, and what simulations run on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Literal

import numpy as np

from .accounts import Accounts, sources
from .channels import STAGES, Channels, SumCall, Transforms, channels, check_hidden
from .clients import Clients
from .engine import Engine, Result, Task, TaskInput
from .epochs import Epochs
from .errors import InputError, TrainingDiverged
from .federation import GramView, Parameter, Sampling, Then
from .group import Group
from .handles import Blind, GroupMean, Held, Labels, Own, Released, Shared, at_server, label_sets, times
from .participation import check_mean, draw_cohort, draw_drops, group_sizes, wanted_senders
from .protection import Protection
from .protocols.entropy import Entropy, system_entropy
from .randomness import Stream, stream
from .record import Transcript, settings_of
from .traffic import Bare, plain
from .types import Array, ClientData, check_array
from .wire import check_small, choices, hash_payload, made, recorded, wire

__all__ = ["LocalFederation"]

RESUMED_BITS = 24
"""So many bits are left for the turns of one uninterrupted stretch of a run; slots of secure sums have 48 in all."""


class LocalFederation:
    """A federation of clients in this process, for simulation; the transcript is what a real one would have sent.

    `entropy` feeds the clients' group secret (tests may pass `public_entropy`); `seed` feeds everything that is not secret.
    In each mean a client vanishes with probability `dropout`, at a random stage of secure aggregation; `dropouts` lists (round, client,
    stage) to vanish for certain. Under sums in one message, stages up to "Masked" mean that the update never arrives.

    Clients are known by their ids and always taken in ascending order, so results do not depend on the order they are given in.

    With `accounts` what leaves a client is differentially private: tasks run in their private form, and every releasing verb asks the
    ledger first. `noise_source` feeds their noise and batches.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        *,
        protection: Protection | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        transcript: Transcript | None = None,
        entropy: Entropy = system_entropy,
        present: Sequence[int] | None = None,
        channels_of: Callable[[Protection, Transforms, tuple[int, ...], Entropy], Channels] = channels,
        dropout: float = 0.0,
        dropouts: Sequence[tuple[int, int, str]] = (),
        engine: Engine | None = None,
        accounts: Accounts | None = None,
        noise_source: Entropy = system_entropy,
    ) -> None:
        self.protection = protection or Protection()
        self.sampling = sampling or Sampling()
        self.seed = seed
        self.transcript = transcript or Transcript()
        ids = {one.id for one in clients}
        self._present = set(ids if present is None else present)
        if not self._present or not self._present <= ids:
            raise InputError(f"federation: present clients {sorted(self._present)} must be some of {sorted(ids)}")
        # Where no transform is in force nothing is agreed, and the secret serves nothing.
        self.group = Group(ids, self._present, entropy) if self.protection.transformed else None
        self._secret = entropy(32) if self.group is None else self.group.secret
        self.side = Clients(clients, Transforms(self._secret, self.protection.sum), seed)
        self._ids = tuple(self.side.data)
        self._channels = channels_of(self.protection, self.side.transforms, self._ids, entropy)
        if not 0 <= dropout < 1:
            raise InputError(f"training.dropout: {dropout} is outside [0, 1)")
        self._dropout = dropout
        self._dropouts = {(number, client): stage for number, client, stage in dropouts}
        for number, client, stage in dropouts:
            if client not in self._ids or stage not in STAGES:
                raise InputError(f"training.dropouts: ({number}, {client}, {stage!r}) is not (round, client, one of {', '.join(STAGES)})")
        self.protection_seconds = 0.0
        self.bare = Bare()  # what would travel without any protection
        self.engine = engine or Engine()
        self.accounts = accounts
        self._noise_source = noise_source
        self._round = -1
        self._turn = 0  # never repeats, unlike a round's number: transforms and mask keys are named by it
        self._calls = 0
        self.epochs = Epochs(self._channels.gram)

    # --- who and when

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(sorted(self._present))

    @property
    def round(self) -> int:
        return self._round

    @property
    def merge_below(self) -> int:
        return self.protection.smallest_sum if self.protection.small_clusters == "merge" else 1

    def saved(self) -> dict[str, Any]:
        """Where it stands, for a checkpoint: counters, and who is present. What clients hold is in `side`, open epochs in `epochs`."""
        counters = {"round": self._round, "turn": self._turn, "calls": self._calls, "epochs": self.epochs.count}
        counters["group_epoch"] = 0 if self.group is None else self.group.epoch
        return counters | {"present": sorted(self._present), "bare": self.bare.saved()}

    def restore(self, saved: Mapping[str, Any], resumed: int = 0) -> None:
        """Go back to where `saved` was taken. After the `resumed`-th interruption turns and epochs start in a range of their own.

        An interrupted round may have used up more of them than the checkpoint knows: a transform or a mask key is never used twice.
        """
        first = resumed << RESUMED_BITS
        self._round, self._calls, self._present = saved["round"], saved["calls"], set(saved["present"])
        self.bare = Bare(**saved["bare"])
        self._turn, self.epochs.count = max(saved["turn"], first), max(saved["epochs"], first)
        if saved["group_epoch"]:
            raise InputError("a run from which clients were removed cannot be resumed: the secret of their successors is not kept")
        if self.group is not None:
            self.group.forget_said()  # it is on record
            self._hand_over()

    def begin_round(self, number: int) -> None:
        """Called by whoever drives the algorithm, before each round."""
        self._round = number
        self._turn += 1
        self._calls = 0

    def join(self, clients: Sequence[int]) -> None:
        """Clients come online. Where a transform is in force, those that lack the group secret get it from a member that is present."""
        unknown = set(clients) - set(self._ids)
        if unknown:
            raise InputError(f"join: there is no data for clients {sorted(unknown)}")
        removed = [] if self.group is None else sorted(client for client in clients if self.group.is_removed(client))
        if removed:
            raise InputError(f"join: clients {removed} were removed from the group for good")
        self._present |= set(clients)
        self._hand_over()

    def _hand_over(self) -> None:
        if self.group is not None:
            self.group.admit(self._present)
            self.group.share(self.side.transforms)

    def leave(self, clients: Sequence[int]) -> None:
        """Clients go offline. They keep the group secret and may come back: nothing changes for the others."""
        unknown = set(clients) - set(self._ids)
        if unknown:
            raise InputError(f"leave: clients {sorted(unknown)} are not known")
        if self._present <= set(clients):
            raise InputError("leave: no client would be left")
        self._present -= set(clients)

    def remove(self, clients: Sequence[int]) -> None:
        """Clients leave. Where a transform is in force they leave for good: a new group epoch starts, with a secret that they do not get.

        What comes later (sums, clustering epochs) is under the fresh secret. Open clustering epochs and blind sums stay under theirs: the
        members go on with them, who joins from now on is refused them until they are made anew (`gram` afresh, `fold`).
        """
        self.leave(clients)
        if self.group is not None:
            self.group.agree(self._present, removed=clients)
            self.group.share(self.side.transforms)

    def stream(self, purpose: str, client: int = -1) -> Stream:
        return stream(self.seed, purpose, self._round, client)

    def cohort(self, labels: Labels | Held | None = None) -> tuple[int, ...]:
        if isinstance(labels, Held):
            labels = None  # the server does not have them
        return draw_cohort(self.sampling, self.clients, labels, self.protection.smallest_sum, self.seed, self._round)

    # --- compute

    def compute(
        self, task: Task, params: Mapping[str, Parameter] | None = None, which: Labels | Held | None = None, on: Sequence[int] | None = None
    ) -> Held:
        clients = self._on(on)
        params = params or {}
        received = self._record_parameters(task, params, which, clients)
        given = self.resolve(task, params, which, clients)
        if self.accounts is not None:
            task = self.accounts.private(task)
            given = [replace(one, secret=self._noise_source(32)) for one in given]
        known: dict[int, Result] = {}
        try:
            # a client without a result takes no further part this time
            known = {client: result for client, result in zip(clients, self.engine.run(task, given), strict=True) if result}
            if not known:
                raise TrainingDiverged(f"{type(task).__name__} in round {self._round}: no client has a result")
        except TrainingDiverged:  # names one client, which tells of those before it, too
            self._failed(task, params, which, given)
            raise
        self._failed(task, params, which, [one for one in given if one.data.id not in known])
        held = self.side.keep(task, known)
        if self.accounts is not None:
            self.accounts.enter(held, task, sources(params, which), _remembered(given))
        if self._channels.sum.binds_models:
            self.side.trace(held, received, params, clients)
        return held

    def _failed(self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, given: Sequence[TaskInput]) -> None:
        """Clients that have no result pay as if they had released one: that they have none is told."""
        if self.accounts is not None and given:
            clients = [one.data.id for one in given]
            self.accounts.failed(task, sources(params, which), _remembered(given), clients, self._round)

    def resolve(self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int]) -> list[TaskInput]:
        """What clients would be given by `compute`, without computing or recording anything. For measuring."""
        return self.side.inputs(task, params, which, clients, self._round)

    def _record_parameters(
        self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int]
    ) -> dict[int, bytes]:
        """One message for the clients that are sent the same parameters. The hash of what each was sent, where sums bind to it."""
        lists, picks, _ = choices(params, which, clients, self.side.value)
        if isinstance(which, Held):
            picks = {}  # only the client knows: all are sent the whole list
        received: dict[int, bytes] = {}
        settings = settings_of(task)
        alike: dict[tuple[int, ...], list[int]] = {}
        for client in clients:
            alike.setdefault(picks.get(client, ()), []).append(client)
        for labels, members in sorted(alike.items()):
            payload, blind = recorded(params, lists, labels)
            if payload:
                if self._channels.sum.binds_models:
                    received |= dict.fromkeys(members, hash_payload(payload))
                self.bare.down(plain(params, lists, labels), copies=len(members))
                context = {"task": type(task).__name__, "settings": settings, "which": list(labels)} | ({"blind": blind} if blind else {})
                self._record("compute")("parameters", "server", "clients", members, payload, readers=("server", "clients"), context=context)
        return received

    # --- gram

    def gram(self, held: Held, then: Then, against: Held | None = None, on: Sequence[int] | None = None) -> Released:
        clients = [] if against is not None and on is not None and not on else self._holders(held, on)
        channel = self._channels.gram
        rows = {client: np.atleast_2d(check_array(f"client {client}: {held.part}", self.side.value(held, client))) for client in clients}
        shapes = {(int(value.shape[0]), int(value.shape[1])) for value in rows.values()}
        if against is not None:
            epoch = self.epochs.of(against)
            again = sorted(set(clients) & set(epoch.clients))
            if again:
                raise InputError(f"gram: clients {again} are already in this epoch")
            shapes.add(epoch.shape)
        if len(shapes) != 1:
            raise InputError(f"gram: {held.part} has different shapes {sorted(shapes)}; pad to one public shape")
        (shape,) = shapes
        if against is None:
            epoch = self.epochs.open(shape)
        self._settle(held, clients, "gram")
        began = perf_counter()
        uploads = [epoch.session.upload(client, rows[client]) for client in clients]
        record = self._record("gram")
        self.bare.up(rows.values())
        if clients:
            receiver = getattr(channel, "receiver", channel.where)  # ciphertexts go to the server, also where a key holder sees the Gram
            record(held.part, "clients", receiver, clients, uploads, readers=(receiver,), context={"epoch": epoch.number})
        gram = epoch.session.extend(clients, uploads, shape[0], record)
        self.protection_seconds += perf_counter() - began
        epoch.clients += clients
        if clients:
            self.epochs.enter(held, epoch)
        result, evidence = then(GramView(gram, tuple(clients), epoch.memory))
        check_small(result, gram.n)
        if channel.where != "server":
            payload = {name: np.asarray(value) for name, value in result.items()}
            record("result", channel.where, "server", (), payload, readers=("server", channel.where), context={"epoch": epoch.number})
        if not isinstance(channel.evidence, bool):
            if not all(name in evidence for name in channel.evidence):
                return Released(result, None)
            evidence = {name: evidence[name] for name in channel.evidence}
            payload = {name: np.asarray(value) for name, value in evidence.items()}
            record("evidence", channel.where, "server", (), payload, readers=("server", channel.where), context={"epoch": epoch.number})
        return Released(result, evidence if channel.evidence else None)

    def close(self, held: Held) -> None:
        self.epochs.close(held)

    # --- mean

    def mean(
        self,
        held: Held,
        weights: Literal["equal", "examples"] | Mapping[int, float] = "equal",
        groups: Labels | Held | None = None,
        k: int | None = None,
        on: Sequence[int] | None = None,
        models: int = 1,
    ) -> tuple[GroupMean | None, ...]:
        clients = self._holders(held, on)
        channel = self._channels.sum
        check_mean(channel.name, channel.oblivious, channel.private_weights, weights, groups, k)
        if weights == "examples" and self.accounts is not None:
            raise InputError("mean: weights = 'examples' under privacy.unit = 'sample' would release sample counts; use 'equal'")
        labels = self._group_labels(groups, clients, k, channel.oblivious)
        if not channel.overlapping and any(len(several) > 1 for several in labels.values()):
            raise InputError(f"mean: overlapping groups under sum = {channel.name!r}: the difference of two sums would show an individual")
        contributions = self.side.contributions(held, clients, weights, labels)
        self._calls += 1
        call = SumCall(
            self._turn, self._calls, contributions, k or 1, self.protection.smallest_sum, weights != "examples",
            self.side.received.get(held.key, {}), models,
            draw_drops(clients, self._dropouts, self._dropout, self.seed, self._round, self._calls),
        )  # fmt: skip
        if self.accounts is not None:
            choices = groups if channel.oblivious and isinstance(groups, Held) else None
            self.accounts.settle_sums(held, call, choices, self.protection.small_clusters, self._round)
        began = perf_counter()
        try:
            if self.protection.small_clusters == "local" and not channel.oblivious:
                means = self._mean_or_local(held, call, groups)
            else:
                means = channel.means(call, self._record("mean"))
            self.bare.mean(call, means)
            return means
        finally:
            self.protection_seconds += perf_counter() - began

    def _group_labels(self, groups: Labels | Held | None, clients: list[int], k: int | None, oblivious: bool) -> dict[int, tuple[int, ...]]:
        if groups is None:
            return dict.fromkeys(clients, (0,))
        if isinstance(groups, Held):
            source = {client: self.side.value(groups, client) for client in clients} if oblivious else self._gathered(groups, clients)
            groups = {client: value if np.ndim(value) else int(value) for client, value in source.items()}
        return label_sets(groups, clients, k, "mean: groups")[0]

    def _gathered(self, groups: Held, clients: list[int]) -> dict[int, Any]:
        return {client: values[groups.part] for client, values in self.gather(groups, on=clients).items()}

    def _mean_or_local(self, held: Held, call: SumCall, groups: Labels | Held | None) -> tuple[GroupMean | None, ...]:
        """The means of groups at the floor; members of clusters below it get their own values back, each for itself.

        What counts is the cluster, not the round's cohort: where only few of a large cluster were sampled, it waits.
        """
        counts = call.counts()
        sizes = group_sizes(groups, call, self._present)
        means: list[GroupMean | None] = [None] * call.k
        if any(count >= call.floor for count in counts):
            means = list(self._channels.sum.means(call, self._record("mean")))
        for label, count in enumerate(counts):
            if count > 0 and sizes[label] < call.floor:
                members = tuple(one.client for one in call.members(label))
                own = Held(held.key, members, held.parts)
                means[label] = GroupMean({part: Shared(own=(Own(own[part]),)) for part in held.parts}, None, count)
        return tuple(means)

    # --- relay, gather

    def relay(self, held: Held, to: Mapping[int, Sequence[int]] | Held | None = None) -> Held:
        recipients = (
            self.clients if to is None else [client for client in self.clients if client in (to.clients if isinstance(to, Held) else to)]
        )
        present = [sender for sender in held.clients if sender in self._present]
        wanted = wanted_senders(held, present, recipients, to, self.side.value)
        if isinstance(to, Held):  # first: who pays for `held` follows from these choices
            self._settle(to, [one for one in recipients if one in to.clients], "relay")
        self._settle(held, [sender for sender in present if any(sender in asked for asked in wanted.values())], "relay")
        record = self._record("relay")
        if to is not None:
            asks = [{"wanted": np.isin(present, wanted[recipient])} for recipient in recipients]
            record("request", "clients", "server", recipients, asks, readers=("server",))
            self.bare.up(ask["wanted"] for ask in asks)
        peers = [[recipient for recipient in recipients if sender in wanted[recipient]] for sender in present]
        sent = [made(self.side.parts(held, sender)) for sender in present]
        for parts, recipients_of in zip(sent, peers, strict=True):
            self.bare.up(parts.values(), copies=len(recipients_of))
            self.bare.down(parts.values(), copies=len(recipients_of))
        # sealed for each recipient: the server passes on what it cannot read (12 bytes of nonce, 16 of tag)
        record(
            "+".join(held.parts), "clients", "clients", present, sent, readers=("clients",), peers=peers, overhead_bytes=28
        )  # fmt: skip
        values = {
            recipient: {part: {sender: self.side.value(held[part], sender) for sender in wanted[recipient]} for part in held.parts}
            for recipient in recipients
        }
        relayed = self.side.hold(f"relayed {held.key.name}", values, held.parts)
        if self.accounts is not None:
            self.accounts.public(relayed)
        return relayed

    def labels(self, held: Held) -> dict[int, int] | None:
        if self._channels.sum.oblivious:
            return None
        return {client: int(values[held.part]) for client, values in self.gather(held[held.part]).items()}

    def gather(self, held: Held, on: Sequence[int] | None = None) -> Mapping[int, Mapping[str, Array]]:
        clients = self._holders(held, on)
        self._settle(held, clients, "gather")
        for client in clients:
            self.bare.up(made(self.side.parts(held, client)).values())
        released = {client: dict(self._channels.gather.release(client, made(self.side.parts(held, client)))) for client in clients}
        self._record("gather")("+".join(held.parts), "clients", "server", clients, list(released.values()), readers=("server",))
        return released

    # --- sums

    def product(self, shared: Shared, number: Shared, on: int | None = None) -> Shared:
        if at_server(shared, number):
            return shared * float(number.value().item())
        client = self._opener([shared, number]) if on is None else on
        arguments = wire("product", shared) | wire("times", number)
        self._record("product")("arguments", "server", "clients", [client], arguments, readers=("server", "clients"))
        value = times(self.side.open(client, shared, {}), self.side.open(client, number, {}))
        return Shared(blind=(self._blind("product", client, value),))

    def fold(self, shared: Shared, on: int | None = None) -> Shared:
        own = shared.own
        if len(own) > 1:
            folded = self.side.fold_own(own)
            if self.accounts is not None:
                self.accounts.derive(folded, [term.held for term in own])
            own = (Own(folded),)
        if len(shared.blind) < 2:
            return Shared(shared.clear, shared.blind, own)
        client = self._opener([shared]) if on is None else on
        blind = Shared(blind=shared.blind)
        self._record("fold")("arguments", "server", "clients", [client], wire("fold", blind), readers=("server", "clients"))
        return Shared(shared.clear, (self._blind("fold", client, self.side.open(client, blind, {})),), own)

    def _blind(self, verb: str, client: int, value: Array) -> Blind:
        """A vector of one client under a fresh transform, sent to the server."""
        self._calls += 1
        transforms = self.side.transforms
        name = transforms.name(f"apply/{self._turn}/{self._calls}")
        check_hidden(verb, value.size, transforms.kind)
        hidden = transforms(name, value.size).apply(np.ravel(value))
        context = {"transform": name, "kind": transforms.kind}
        self._record(verb)("blind result", "clients", "server", [client], [{"blind": hidden}], readers=("server",), context=context)
        return Blind(name, hidden, 0, value.size, value.shape, value.size)

    def _opener(self, shareds: Sequence[Shared]) -> int:
        """The first client present that can open all blind parts; the first of all if there is none."""
        names = {term.transform for shared in shareds for term in shared.blind}
        transforms = self.side.transforms
        return next((client for client in self.clients if all(transforms.holds(client, name) for name in names)), self.clients[0])

    # --- the experimenter's eye and the parties' secrets: outside the protocol, in simulation only

    def peek(self, client: int, value: Parameter) -> Array:
        """What one client sees when it opens a sum or looks at what it holds. For measuring and tests; never recorded."""
        return self.side.value(value, client) if isinstance(value, Held) else self.side.open(client, value, {})  # type: ignore[arg-type]

    def recall(self, client: int, name: str) -> Array | None:
        """What a client keeps under a name, if anything. For measuring and tests."""
        value = self.side.memory[client].get(name)
        return None if value is None else np.asarray(value)

    def data(self, client: int) -> ClientData:
        """A client's data. For measuring."""
        return self.side.data[client]

    def secrets(self, party: str) -> dict[str, str]:
        """The secrets of a party, for auditing a simulated run: "server" has none, "client:ID" has the group secrets it came by.

        "group_secret" is that of the first group epoch, "group_secret@1" that after the first removal, and so on, as in transforms' names.
        """
        if party == "server":
            return {}
        if party == "key-holder" and (of_holder := getattr(self._channels.gram, "secrets", None)) is not None:
            return dict(of_holder())
        name, _, number = party.partition(":")
        if name == "client" and number.isdigit() and int(number) in self._ids:
            if self.group is None:
                return {"group_secret": self._secret.hex()}
            held = self.group.secrets[int(number)]
            return {f"group_secret@{epoch}" if epoch else "group_secret": secret.hex() for epoch, secret in held.items()}
        raise InputError(f"run.audit_parties: {party!r} is not a party here; use 'server' or 'client:ID' with ID of a client")

    # --- inside

    def _on(self, on: Sequence[int] | None) -> list[int]:
        clients = list(self.clients) if on is None else sorted(set(on))
        absent = [client for client in clients if client not in self._present]
        if absent:
            raise InputError(f"clients {absent} are not present")
        if not clients:
            raise InputError("a verb was called on no clients")
        return clients

    def _holders(self, held: Held, on: Sequence[int] | None) -> list[int]:
        clients = [client for client in held.clients if client in self._present] if on is None else self._on(on)
        without = [client for client in clients if client not in held.clients]
        if without:
            raise InputError(f"clients {without} do not hold {held.key.name}")
        if not clients:
            raise InputError(f"none of the holders of {held.key.name} is present")
        return clients

    def _settle(self, held: Held, clients: Sequence[int], verb: str) -> None:
        """Ask the ledger, before anything leaves."""
        if self.accounts is not None and clients:
            self.accounts.settle(held, clients, verb, self._round)

    def _record(self, verb: str) -> Callable[..., None]:
        if self.group is not None:
            self.group.tell(partial(self.transcript.add, self._round, "group"))
        return partial(self.transcript.add, self._round, verb)


def _remembered(given: Sequence[TaskInput]) -> list[tuple[int, str]]:
    """What clients have of what a task reads, as (client, name)."""
    return [(one.data.id, name) for one in given for name in one.memory]
