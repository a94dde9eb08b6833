"""What a server keeps between operations: who takes part, where the run stands, and what is known of the values that clients hold."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..contract.handles import Held, PartLayout
from ..engine import Task
from ..errors import InputError
from ..protocols.errors import TooFewClients
from ..types import PartKind
from .group_secret import Agreement
from .registry import ClientRegistry
from .values import UNTRACED

__all__ = ["SKIPPED", "SKIPPED_EPOCHS", "KnownValue", "Participants", "Rounds", "WaitingTask"]

SKIPPED, SKIPPED_EPOCHS = 1 << 10, 1 << 8
"""By so many turns and numbers, and clustering epochs, of which a session has some thousands, a resumed run skips what the interrupted one
may have used. A checkpoint is due before that many are used."""


class Participants:
    """The clients of a `registry` that can take part: under a shared transform, those that have the clients' secret."""

    def __init__(self, registry: ClientRegistry, agreement: Agreement | None) -> None:
        self._registry, self._agreement = registry, agreement
        self._came: set[int] = set()

    @property
    def present(self) -> frozenset[int]:
        return self._registry.present if self._agreement is None else self._registry.present & self._agreement.members

    def enrol(self) -> tuple[int, ...]:
        """Greet all places without a client that answers. Returns the clients that enrolled."""
        return self._agreed(self._registry.enrol())

    def greet_lost(self) -> None:
        """Enrol clients again that missed the last operation, so that they do not miss the round."""
        if came := self._registry.greet_lost():
            self._came.update(self._agreed(came))

    def begin_round(self) -> tuple[int, ...]:
        """Enrol; the clients that enrolled now, or since the last round began, and can take part."""
        came = self._came.union(self.enrol())
        self._came.clear()
        return tuple(sorted(came & self.present))

    def _agreed(self, came: tuple[int, ...]) -> tuple[int, ...]:
        if self._agreement is not None:
            self._agreement.extend()
        return came

    def lose(self, clients: Sequence[int]) -> None:
        """Clients went away: they enrol anew before they take part again. Raises `InputError` for unknown ones."""
        self.check_known(clients)
        for client in clients:
            self._registry.lose(client)

    def remove(self, clients: Sequence[int]) -> None:
        """Remove clients for good; the others agree on a fresh secret. Raises `TooFewClients`, and `InputError` for unknown clients."""
        self.check_known(clients)
        self._registry.remove(clients)
        if self._agreement is not None:
            self._agreement.renew()

    def among(self, on: Sequence[int] | None, owners: Iterable[int] | None = None) -> list[int]:
        """The present clients of `on` (None: all) and among `owners` (None: all), ascending. Raises `TooFewClients` if there is none."""
        self.check_known(on)
        clients = self.present if on is None else self.present.intersection(on)
        clients = clients if owners is None else clients.intersection(owners)
        if not clients:
            raise TooFewClients((), 1)
        return sorted(clients)

    def check_known(self, on: Iterable[int] | None) -> None:
        """Absent clients are left out; a number that no client ever had is a mistake."""
        unknown = [client for client in on or () if not self._registry.knows(client)]
        if unknown:
            raise InputError(f"clients {unknown} are not known to this federation")


@dataclass
class Rounds:
    """Where a run stands: the `round`, and counters of what a session uses once.

    `turn` counts the rounds that were begun, repeated ones too; `calls`: of `mean` within the round; `numbers`: of held values.
    `resumed`: how often the run was. `checkpoint`: the turn and the number of clustering epochs at the last checkpoint.
    """

    round: int = -1
    turn: int = -1
    calls: int = 0
    numbers: int = 0
    resumed: int = 0
    checkpoint: tuple[int, int] = (-1, 0)

    def begin(self, number: int) -> None:
        """Begin round `number`."""
        self.round, self.calls = number, 0
        self.turn += 1

    def next_call(self) -> int:
        """The number of the next call within the round."""
        self.calls += 1
        return self.calls

    def next_number(self) -> int:
        """A fresh number for values that clients hold."""
        self.numbers += 1
        return self.numbers

    def checkpoint_due(self, epochs: int) -> bool:
        """Whether half of what a resumed run skips has been used since the last checkpoint."""
        turn, before = self.checkpoint
        return 2 * (self.turn - turn) >= SKIPPED or 2 * (epochs - before) >= SKIPPED_EPOCHS

    def saved(self, epochs: int) -> dict[str, int]:
        """The counters for a checkpoint."""
        self.checkpoint = self.turn, epochs
        counters = {"round": self.round, "turn": self.turn, "numbers": self.numbers, "epochs": epochs}
        return {**counters, "calls": self.calls, "resumed": self.resumed}

    def restore(self, saved: Mapping[str, Any], resumed: int | None) -> int:
        """Continue from `saved` after the `resumed`-th interruption; the number of clustering epochs to count from.

        Turns, numbers and epochs skip a range for each interruption since the checkpoint: each may have used more than the checkpoint
        knows, and no transform or mask key is used twice. With 0 interruptions nothing is skipped: for tests, with entropy that continues.
        """
        before = int(saved.get("resumed", 0))  # checkpoints of an early 0.2.0 lack it
        resumed = before + 1 if resumed is None else resumed
        since = max(1, resumed - before) if resumed else 0
        self.round, self.turn, self.calls = saved["round"], saved["turn"] + since * SKIPPED, saved["calls"]
        self.numbers, epochs = saved["numbers"] + since * SKIPPED, int(saved["epochs"]) + since * SKIPPED_EPOCHS
        self.resumed, self.checkpoint = max(resumed, before), (self.turn, epochs)
        return epochs


@dataclass(frozen=True)
class WaitingTask:
    """A computation that nobody may have been asked for yet: it waits for a sum over its result, which takes it along.

    `held`: its result. `inputs`: what goes into it. `form`: computations of one form have results of one layout, unless clients declare
    another. `refusals`: how many there were before.
    """

    held: Held
    task: Task
    inputs: Sequence[Held]
    form: Hashable
    refusals: int


@dataclass(frozen=True)
class KnownValue:
    """What the server knows of values that clients hold under one `number`.

    `layout`: that of more than half of the clients, else empty; `odd`: the clients that declared another. `models`: by client the names of
    what its value may have been computed from (`values.trace`), by the label of the model that the client chose, −1 where it had no choice.
    `at_model`: parameters went into the values. `kinds`: of their parts. `chooses`: the part with the choice, where the task made it;
    `chosen`: the labels that clients released. `spread`: of the weights inside the values (`values.spread_of`).
    """

    number: int
    layout: PartLayout
    models: Mapping[int, Mapping[int, bytes]]
    odd: frozenset[int] = frozenset()
    at_model: bool = True
    kinds: Mapping[str, PartKind] = field(default_factory=dict)
    chooses: str = ""
    chosen: Mapping[int, int] = field(default_factory=dict)
    spread: float = 1.0

    def names(self, client: int) -> tuple[bytes, ...]:
        """The names that a client's value may have, as far as the server knows its choice."""
        known = self.models.get(client, {-1: UNTRACED})
        label = self.chosen.get(client, -1)
        return (known[label],) if label in known else tuple(known.values())

    def saved(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        layout = [[name, dtype, list(shape)] for name, dtype, shape in self.layout.parts]
        models = [[client, [[label, name.hex()] for label, name in sorted(names.items())]] for client, names in sorted(self.models.items())]
        rest = {"odd": sorted(self.odd), "at_model": self.at_model, "kinds": dict(self.kinds)}
        rest |= {"chooses": self.chooses, "chosen": [list(pair) for pair in sorted(self.chosen.items())], "spread": self.spread.hex()}
        return {"number": self.number, "layout": layout, "models": models, **rest}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "KnownValue":
        """The inverse of `saved`."""
        layout = PartLayout(tuple((name, dtype, tuple(shape)) for name, dtype, shape in saved["layout"]))
        models: dict[int, dict[int, bytes]] = {}
        for client, names in saved["models"]:
            pairs = [(-1, names)] if isinstance(names, str) else names  # a single name in checkpoints of format 4 and before
            models[client] = {label: bytes.fromhex(name) for label, name in pairs}
        rest = (frozenset(saved.get("odd", ())), saved.get("at_model", True), saved.get("kinds", {}), saved.get("chooses", ""))
        return cls(saved["number"], layout, models, *rest, dict(saved.get("chosen", ())), float.fromhex(saved.get("spread", "0x1p+0")))
