"""Receipts of the values that clients hold, and the ledger that is asked before an operation releases them.

Only under `privacy.unit = "sample"`. A client pays for a task before it runs it, because others see whether it gives a result; releasing
the result is free then. A value is *covered* if all that it was computed from is public or carries noise; its receipts say what that costs
and who has paid. A value computed from samples without noise has none, and no operation releases it. A value whose noise clients share
(`privacy.noise = "shared"`) carries none of its own: it leaves in secure sums with that noise only, each of which is paid for, and nothing
that is computed from it is covered.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract.calls import SumCall, large_enough
from ..contract.handles import Held, HeldKey, Labels, Shared
from ..errors import InputError
from ..protocols.events import Event, SampledGaussianEvent, event_from, event_to
from ..protocols.ledger import Ledger, Receipt
from ..protocols.shared_noise import SharedNoise
from .settings import Noise, SumNoise

if TYPE_CHECKING:  # clients that only speak a protocol load no torch
    from ..contract.operations import Parameter, Then
    from ..engine import Task

__all__ = ["NoLedger", "PrivacyLedger", "sources"]

Receipts = tuple[Receipt, ...]


class PrivacyLedger:
    """Receipts by handle and part, and by what clients remember, over one `ledger`; `noise` makes tasks private.

    `restored`: the run was resumed, so clients may remember results of an interrupted round that no receipt covers.
    """

    def __init__(self, noise: Noise, ledger: Ledger) -> None:
        self.noise = noise
        self.ledger = ledger
        self.restored = False
        self._held: weakref.WeakKeyDictionary[HeldKey, dict[str, Receipts | None]] = weakref.WeakKeyDictionary()
        self._remembered: dict[tuple[int, str], Receipts | None] = {}

    def private(self, task: "Task") -> "Task":
        """The private form of a task, or the task itself where it has none. Raises `InputError` for a task without noise."""
        private: Task = _private(task, self.noise)
        if not self.harmless(private, self.noise.relation):
            raise InputError(f"compute: {type(task).__name__} has no noise here; clients that demand privacy refuse to compute it")
        return private

    def with_noise(self, then: "Then") -> "Then":
        """What is run on a Gram, with the law of the noise in the vectors where it asks for it (`private`)."""
        noisy: Then = _private(then, self.noise)
        return noisy

    def reads(self, task: "Task", clients: Iterable[int]) -> list[tuple[int, str]]:
        """What clients remember of what a task reads. After a restart all of it counts as remembered."""
        reads = [(client, name) for client in clients for name in getattr(task, "reads", ())]
        return [read for read in reads if self.restored or read in self._remembered]

    @staticmethod
    def harmless(task: "Task", relation: str) -> bool:
        """Whether it reveals nothing private that a client runs a task, or fails to.

        It carries noise, in all the tasks that it is made of, or uses no data, or of them their number only, which is public under
        "replace_one".
        """
        if not getattr(task, "uses_data", True) or (relation == "replace_one" and getattr(task, "uses_number_only", False)):
            return True
        inner = [inner_task for inner_task in vars(task).values() if hasattr(inner_task, "run") and hasattr(inner_task, "parts")]
        events, within = _events(task), sum((_events(inner_task) for inner_task in inner), Counter[Event]())
        # an event of one inner task may not hide another's of the same name
        return bool(events) and within <= events and all(PrivacyLedger.harmless(inner_task, relation) for inner_task in inner)

    def begin(
        self, task: "Task", inputs: Iterable[Held], remembered: Iterable[tuple[int, str]], clients: Sequence[int], round: int
    ) -> None:
        """Charge clients for a private task that they are about to run: it is visible whether it gives a result.

        What it costs is its own noise, and that of its inputs as far as it is unpaid. Noise that clients share is paid for in each sum; a
        task with such noise gives a result whatever the data are.
        """
        own = Receipt(tuple(event for event in _events(task).elements() if not getattr(event, "shares", 0)))
        inherited = [receipts for handle in inputs for receipts in self._of(handle)]
        due = {client: [own, *_unshared(inherited)] for client in clients}
        for client, name in remembered:
            due[client] += _unshared([self._remembered.get((client, name))])
        self.ledger.settle(due, f"compute of {type(task).__name__}", round)

    def enter(self, held: Held, task: "Task", inputs: Iterable[Held], remembered: Iterable[tuple[int, str]]) -> None:
        """Note what a task's results will cost: its own noise, and that of its `inputs` and of what (client, name) is `remembered`.

        The owners of `held` paid for its own noise when they began, except for noise that they share.
        """
        sources = [
            *(receipts for handle in inputs for receipts in self._of(handle)),
            *(self._remembered.get(memory) for memory in remembered),
        ]
        inherited = _inherited(sources, task)
        events: Mapping[str, Event] = getattr(task, "events", {})
        covers: Mapping[str, Sequence[str]] = getattr(task, "covers", {})
        fresh = {name: Receipt((event,)) for name, event in events.items()}
        for receipt in fresh.values():
            receipt.paid.update(() if receipt.shared else held.clients)
        free = not getattr(task, "uses_data", True)
        known: dict[str, Receipts | None] = {}
        for part in (*task.parts, *task.keeps):
            own = tuple(fresh[name] for name in covers[part]) if part in covers else () if free else None
            known[part] = self._joined([own, inherited])
        self._held[held.key] = {part: known[part] for part in task.parts}
        for client in held.clients:
            for name in task.keeps:
                self._remembered[client, name] = known[name]

    def derive(self, held: Held, sources: Iterable[Held]) -> None:
        """`held` is a public function of values behind `sources`."""
        joined = _inherited((receipts for source in sources for receipts in self._of(source)), None)
        self._held[held.key] = dict.fromkeys(held.parts, joined)

    def public(self, held: Held) -> None:
        """`held` was released already: it is other clients' noisy values, relayed."""
        self._held[held.key] = dict.fromkeys(held.parts, ())

    def covers(self, task: "Task", inputs: Iterable[Held], remembered: Iterable[tuple[int, str]]) -> bool:
        """Whether all that a task is given is public or carries noise, paid for or not."""
        receipts = [
            *(receipts_of for handle in inputs for receipts_of in self._of(handle)),
            *(self._remembered.get(memory) for memory in remembered),
        ]
        return _inherited(receipts, task) is not None

    def settle(self, held: Held, clients: Sequence[int], operation: str, round: int, noise: SumNoise | None = None) -> None:
        """Charge the owners of `held` before an operation releases it, in a secure sum with `noise` where it needs one.

        `InputError` if it is not covered, `BudgetExceeded` if it exceeds the budget.
        """
        due = self._due(held, operation)
        for event in _shared(due):
            least = event.noise_multiplier * event.norm_bound
            if noise is None or noise.noise.deviation < least * (1 - 1e-9) or noise.clip_norm:
                raise InputError(
                    f"{operation}: {held.key.name} {'+'.join(held.parts)} carries no noise of its own (privacy.noise = 'shared'), so it "
                    f"leaves only in a secure sum with noise of {least:.3g} on it; use privacy.noise = 'per_client'"
                )
        self._charge(held, due, clients, operation, round)

    def inside(self, held: Held) -> SumNoise | None:
        """What clients have to add to `held` inside a secure sum; None where it carries its own noise."""
        shared = _shared(receipt for receipts in self._of(held) for receipt in receipts or ())
        if not shared:
            return None
        deviation = max(event.noise_multiplier * event.norm_bound for event in shared)
        length = max(event.norm_bound * event.sampling_rate for event in shared) * self.noise.samples
        return SumNoise(SharedNoise(deviation, min(event.shares for event in shared)), 0.0, length)

    def _due(self, held: Held, operation: str) -> list[Receipt]:
        """The receipts of a value. Raises `InputError` if it is not covered."""
        due: list[Receipt] = []
        for part in held.parts:
            receipts = self._held.get(held.key, {}).get(part)
            if receipts is None:
                raise InputError(
                    f"{operation}: {part!r} of {held.key.name} was made of samples without noise; privacy.unit = 'sample' releases none "
                    "such (the step has no private form, or a resumed run lost its receipts)"
                )
            due += receipts
        return due

    def _charge(self, held: Held, due: Sequence[Receipt], clients: Sequence[int], operation: str, round: int) -> None:
        self.ledger.settle(dict.fromkeys(clients, due), f"{operation} of {held.key.name} {'+'.join(held.parts)}", round)

    def settle_sums(
        self, held: Held, call: SumCall, choices: Held | None, small_clusters: str, round: int, noise: SumNoise | None
    ) -> None:  # fmt: skip
        """Charge those who are in a group that can be summed; `TooFewClients` before any client is charged for nothing.

        Where `choices` stay private all are charged, for these too: counts reveal choices, and so would the list of charged clients.
        """
        if choices is not None:
            everybody = [member.client for member in call.contributions]
            self.settle(choices, everybody, "mean", round)
            self.settle(held, everybody, "mean", round, noise)
            return
        if small_clusters == "local" and not any(count >= call.min_cohort for count in call.counts()):
            return
        summed = set(large_enough(call))
        self.settle(held, [member.client for member in call.contributions if summed & set(member.labels)], "mean", round, noise)

    def saved(self, keys: Mapping[HeldKey, str]) -> dict[str, Any]:
        """For a checkpoint: the receipts behind the handles `keys` (by name) and behind what clients remember, each once."""
        numbers: dict[Receipt, int] = {}

        def listed(receipts: Receipts | None) -> list[int] | None:
            return None if receipts is None else [numbers.setdefault(receipt, len(numbers)) for receipt in receipts]

        held = {name: {part: listed(its) for part, its in self._held.get(key, {}).items()} for key, name in keys.items()}
        remembered = [[client, name, listed(its)] for (client, name), its in self._remembered.items()]
        receipts = [{"events": [event_to(event) for event in receipt.events], "paid": sorted(receipt.paid)} for receipt in numbers]
        return {"held": held, "remembered": remembered, "receipts": receipts}

    def restore(self, saved: Mapping[str, Any], keys: Mapping[str, HeldKey]) -> None:
        """Restore what `saved` returned. What was charged since stays in the ledger: the same value may be charged again, never too
        little."""
        receipts = [Receipt(tuple(map(event_from, receipt["events"])), set(receipt["paid"])) for receipt in saved["receipts"]]

        def listed(numbers: Sequence[int] | None) -> Receipts | None:
            return None if numbers is None else tuple(receipts[number] for number in numbers)

        for name, parts in saved["held"].items():
            self._held[keys[name]] = {part: listed(numbers) for part, numbers in parts.items()}
        for client, name, numbers in saved["remembered"]:
            self._remembered[int(client), str(name)] = listed(numbers)

    def _of(self, held: Held) -> list[Receipts | None]:
        parts = self._held.get(held.key, {})
        return [parts.get(part) for part in held.parts]

    @staticmethod
    def _joined(several: Iterable[Receipts | None]) -> Receipts | None:
        """All receipts once; None if any is missing."""
        joined: dict[Receipt, None] = {}
        for receipts in several:
            if receipts is None:
                return None
            joined.update(dict.fromkeys(receipts))
        return tuple(joined)


class NoLedger:
    """In place of a `PrivacyLedger` where the server charges nothing."""

    restored = False

    def private(self, task: "Task") -> "Task":
        return task

    def with_noise(self, then: "Then") -> "Then":
        return then

    def reads(self, task: "Task", clients: Iterable[int]) -> list[tuple[int, str]]:
        return []

    def inside(self, held: Held) -> None:
        return None

    def _nothing(self, *call: Any) -> None:
        pass

    begin = enter = settle = settle_sums = derive = public = _nothing


def _private(public: Any, noise: Noise) -> Any:
    """The private form of a task or function, or itself where it has none."""
    make = getattr(public, "private", None)
    return public if make is None else make(noise)


def _inherited(several: Iterable[Receipts | None], task: "Task | None") -> Receipts | None:
    """The receipts of what is computed from values of these, once.

    None if any is missing, or is of a value without noise of its own, unless the task only puts different values beside each other (of one
    value twice a sum would have two noises, whose mean is less).
    """
    each = list(several)
    joined = PrivacyLedger._joined(each)
    if joined is None or not _shared(joined):
        return joined
    shared = [receipt for receipts in each for receipt in receipts or () if receipt.shared]
    return joined if getattr(task, "keeps_noise", False) and len(shared) == len(set(shared)) else None


def _events(task: "Task") -> Counter[Event]:
    """The noise of a task, as often as it is drawn."""
    return Counter(getattr(task, "events", {}).values())


def _unshared(several: Iterable[Receipts | None]) -> list[Receipt]:
    """The receipts of values that carry noise of their own."""
    return [receipt for receipts in several for receipt in receipts or () if not receipt.shared]


def _shared(receipts: Iterable[Receipt]) -> list[SampledGaussianEvent]:
    """The events of training whose noise is made of shares."""
    return [event for receipt in receipts for event in receipt.shared if isinstance(event, SampledGaussianEvent)]


def sources(params: Mapping[str, "Parameter"], which: Labels | Held | None) -> list[Held]:
    """The handles of what a task is given."""
    return [handle for value in [*params.values(), which] for handle in _handles(value)]


def _handles(value: Any) -> list[Held]:
    """The handles inside a parameter."""
    if isinstance(value, Held):
        return [value]
    if isinstance(value, Shared):
        return [own.held for own in value.own]
    if isinstance(value, list | tuple):
        return [held for item in value for held in _handles(item)]
    return []
