"""The privacy ledger: every release of a client is charged to it before the value leaves.

Rules
- **Asked before.** `charge` prices each client's past and coming releases together. If a client would exceed its budget, no client is
  charged, and `BudgetExceeded` reports the spending of the client with the largest excess. Only after `charge` returns may a value leave.
- **Durable before.** With a path, the new ledger has reached the disk (written aside, flushed, renamed, folder flushed) when `charge`
  returns: a program that dies between charge and release has charged too much, never too little.
- **Never taken back.** There is no refund. A round that was interrupted and is run again draws new noise, so it is charged again.
- **Once per noise.** A value that carries its noise is charged once, before its first release (see `Receipt`); showing the same noisy value
  again is free. A value without noise that goes through a noising operation gets fresh noise, so each release is charged.
- **Membership counts.** Who is in a cohort is public here. Where membership follows from data, the value that revealed it (a gathered
  choice, a Gram's labels) was itself a charged release.

Guarantee: for each client, all charged releases together are (ε, δ)-private for the stated relation and unit, against whoever sees them
all. Reveals: the ledger holds no secret; it is made of public parameters. What is *not* charged (plain values that another protection
covers) is not covered. A ledger counts the releases of one data set: two runs on the same data need one ledger, or add up. Two ledgers
open on one file notice each other at the next charge, and that is refused; to keep two processes apart at the same moment takes a
lock around `charge`, which is its caller's to hold.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from .accounting import epsilon_of
from .bounded_files import in_place, read_text
from .copies import check_own
from .errors import BudgetExceeded
from .events import Event, Relation, Unit, event_from, event_to, unsampled

__all__ = ["BudgetExceeded", "Charge", "Ledger", "PrivacyBudget", "Receipt"]

SLACK = 1e-9
"""Rounding by which a bill may exceed the budget."""


@dataclass(frozen=True)
class PrivacyBudget:
    """What each client may spend: ε at δ, for neighbours of `relation` that differ in one `unit`.

    Raises `ValueError` for ε ≤ 0, δ outside (0, 1), or a relation or unit that is not known.
    """

    epsilon: float
    delta: float
    relation: Relation
    unit: Unit

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ValueError(f"epsilon: {self.epsilon} is not a finite number above 0")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta: {self.delta} is outside (0, 1)")
        if self.relation not in get_args(Relation):
            raise ValueError(f"relation: {self.relation!r} is not known; known are {', '.join(get_args(Relation))}")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit: {self.unit!r} is not known; known are {', '.join(get_args(Unit))}")


@dataclass(frozen=True)
class Charge:
    """One line of the ledger: the round, the purpose, the clients, and the events, each charged to every client."""

    round: int
    purpose: str
    clients: tuple[int, ...]
    events: tuple[Event, ...]


@dataclass(eq=False)
class Receipt:
    """Goes with a value that carries its noise: the `events` it costs each of its owners, and who has paid.

    A value whose noise is made of `shares` gets it anew in each sum, so each sum is paid for. The Poisson batch was drawn once. A first sum
    reveals who is in the batch, so a second sum is not amplified: it costs as much as without sampling.
    """

    events: tuple[Event, ...]
    paid: set[int] = field(default_factory=set)

    def due(self, client: int) -> tuple[Event, ...]:
        """What a release costs an owner."""
        return tuple(map(unsampled, self.shared)) if client in self.paid else self.events

    @property
    def shared(self) -> tuple[Event, ...]:
        """The events whose noise is made of shares, so that the value may leave inside a secure sum only."""
        return tuple(event for event in self.events if getattr(event, "shares", 0))


class Ledger:
    """All charges so far, in order, under one `budget`; kept in the file `path` if there is one.

    `Ledger.open(path)` goes on with an existing file. `round` is what charges are filed under where they do not say.
    """

    def __init__(self, budget: PrivacyBudget, path: Path | None = None) -> None:
        check_own("budget", budget, PrivacyBudget)
        self.budget = budget
        self.path = path
        self.round = -1
        self._on_disk: str | None = None  # what the file held when it was last read or written
        self.charges: list[Charge] = []
        self._events: dict[int, Counter[Event]] = {}  # how often each, since most rounds cost the same
        if path is not None and path.exists():
            raise ValueError(f"{path}: there is a ledger already; open it, so that what was spent stays spent")

    def keep(self, path: Path) -> None:
        """Keep this ledger in the file `path`, which the first charge makes. Raises `ValueError` if that, or a charge, is there already."""
        if self.charges:
            raise ValueError("a ledger that was kept nowhere has charges already")
        if path.exists():
            raise ValueError(f"{path}: there is a ledger already; open it, so that what was spent stays spent")
        self.path = path

    def adopt(self, other: "Ledger") -> None:
        """Go on with all that `other` holds, in its file. Raises `ValueError` if something was charged here already."""
        if self.charges:
            raise ValueError("a ledger with charges cannot take over another")
        self.path, self.charges, self._events, self._on_disk = other.path, other.charges, other._events, other._on_disk

    def spent(self, client: int) -> float:
        """The client's ε at the budget's δ so far."""
        return epsilon_of(self._events.get(client, Counter()), self.budget.delta)

    def events(self, client: int) -> tuple[Event, ...]:
        """What the client has released so far, equal events together."""
        return tuple(self._events.get(client, Counter()).elements())

    @property
    def clients(self) -> tuple[int, ...]:
        """Who has been charged, ascending."""
        return tuple(sorted(self._events))

    def charge(self, bills: Mapping[int, Sequence[Event]], purpose: str, round: int | None = None) -> None:
        """Charge each client its events, or nobody.

        Raises `BudgetExceeded` if a client would exceed the budget, `ValueError` for an event of another relation or unit than the
        budget's, `OSError` if the ledger cannot be written or its file is not as this ledger left it (another one charges there): in each
        case nothing was charged and nothing may be released.
        """
        for events in bills.values():
            for event in events:
                if (event.relation, event.unit) != (self.budget.relation, self.budget.unit):
                    raise ValueError(
                        f"{purpose}: an event for ({event.relation}, {event.unit}) cannot be charged to a budget for "
                        f"({self.budget.relation}, {self.budget.unit})"
                    )
        prices = {client: self._price(client, events) for client, events in bills.items() if events}
        if not prices:
            return
        worst = max(prices, key=lambda client: (prices[client], -client))
        if prices[worst] > self.budget.epsilon * (1 + SLACK):
            raise BudgetExceeded(purpose, worst, self.spent(worst), prices[worst], self.budget.epsilon)
        fresh = self._grouped(bills, purpose, self.round if round is None else round)
        if self.path is not None:
            if (read_text(self.path) if self.path.exists() else None) != self._on_disk:
                raise OSError(f"{self.path}: the ledger was changed by somebody else since it was opened; open it again")
            text = self._text([*self.charges, *fresh])
            _write(self.path, text)
            self._on_disk = text
        self.charges += fresh
        for client in prices:
            self._events.setdefault(client, Counter()).update(bills[client])

    def settle(self, receipts: Mapping[int, Sequence[Receipt]], purpose: str, round: int | None = None) -> None:
        """Charge each client what is due of its receipts, each once. Raises as `charge`."""
        due = {client: tuple(dict.fromkeys(owed)) for client, owed in receipts.items()}
        for receipt in dict.fromkeys(receipt for owed in due.values() for receipt in owed):
            check_own("receipt", receipt, Receipt)
        self.charge({client: [event for receipt in owed for event in receipt.due(client)] for client, owed in due.items()}, purpose, round)
        for client, owed in due.items():
            for receipt in owed:
                receipt.paid.add(client)

    def _price(self, client: int, events: Sequence[Event]) -> float:
        return epsilon_of(self._events.get(client, Counter()) + Counter(events), self.budget.delta)

    @staticmethod
    def _grouped(bills: Mapping[int, Sequence[Event]], purpose: str, round: int) -> list[Charge]:
        """Clients with the same bill share a line."""
        alike: dict[tuple[Event, ...], list[int]] = {}
        for client in sorted(bills):
            if bills[client]:
                alike.setdefault(tuple(bills[client]), []).append(client)
        return [Charge(round, purpose, tuple(clients), events) for events, clients in alike.items()]

    def text(self) -> str:
        """What the ledger's file holds; `read` makes the ledger of it again, for those who keep it otherwise."""
        return self._text(self.charges)

    def _text(self, charges: Sequence[Charge]) -> str:
        b = self.budget
        lines = [
            {"round": row.round, "purpose": row.purpose, "clients": list(row.clients), "events": [event_to(event) for event in row.events]}
            for row in charges
        ]
        tree = {"format": 1, "epsilon": b.epsilon, "delta": b.delta, "relation": b.relation, "unit": b.unit, "charges": lines}
        return json.dumps(tree, indent=1) + "\n"

    @classmethod
    def open(cls, path: Path, budget: PrivacyBudget | None = None) -> "Ledger":
        """The ledger in the file `path`; with `budget`, only if it is for the same relation, unit and δ (its ε may be raised or lowered).

        Raises `ValueError` naming the file if it is damaged or for another budget, `OSError` if it cannot be read.
        """
        try:
            text = read_text(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is no ledger ({error})") from None
        ledger = cls.read(text, budget, str(path))
        ledger.path, ledger._on_disk = path, text
        return ledger

    @classmethod
    def read(cls, text: str, budget: PrivacyBudget | None = None, where: str = "ledger") -> "Ledger":
        """The ledger of a `text`, kept nowhere. Raises `ValueError` as `open`, with `where` it came from."""
        try:
            tree = json.loads(text)
            recorded = PrivacyBudget(tree["epsilon"], tree["delta"], tree["relation"], tree["unit"])
            if tree["format"] != 1:
                raise ValueError(f"format {tree['format']!r} is not known")
            charges = [
                Charge(
                    int(line["round"]), str(line["purpose"]), tuple(int(c) for c in line["clients"]), tuple(map(event_from, line["events"]))
                )
                for line in tree["charges"]
            ]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{where}: is no ledger ({error})") from None
        if budget is not None and (budget.delta, budget.relation, budget.unit) != (recorded.delta, recorded.relation, recorded.unit):
            raise ValueError(f"{where}: is a ledger for delta {recorded.delta:g}, {recorded.relation}, {recorded.unit}; not for {budget}")
        ledger = cls(budget or recorded)
        ledger.charges = charges
        for charge in charges:
            for client in charge.clients:
                ledger._events.setdefault(client, Counter()).update(charge.events)
        return ledger


def _write(path: Path, text: str) -> None:
    """The whole file, complete on the disk before this returns, or the old one untouched."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8", opener=in_place) as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)
    if os.name == "posix":  # the rename itself must not be lost either
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
