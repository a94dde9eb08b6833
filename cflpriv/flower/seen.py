"""What the server of a Flower run sees of single clients in the clear, and what is odd of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..contract.transcript import Transcript
from ..types import Array
from .doubtful_peers import Peers, usable_losses
from .doubtful_updates import FEWEST_NUMBERS, Layout, diverges, example_doubts, group_doubts, mean_doubts, untouched_statistics
from .stale_updates import History, places

__all__ = ["Seen", "Watch"]


class Seen(Transcript):
    """A transcript that keeps the updates, losses and weights of the last sum in the clear, by client, until they are taken.

    `signature`: (rows, numbers of a sample) of the clients' signatures; None where they are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[int, Mapping[str, Any]] = {}
        self.signature: tuple[int, int] | None = None

    def add(
        self, round: int, operation: str, kind: str, source: str, target: str, clients: Sequence[int], payload: Any, **more: Any
    ) -> None:
        super().add(round, operation, kind, source, target, clients, payload, **more)
        if (operation, kind, source) == ("mean", "update", "clients") and not isinstance(payload, Mapping):
            self._last = dict(zip(clients, payload, strict=True))
        if (operation, kind, source) == ("gram", "signature", "clients") and not isinstance(payload, Mapping) and payload:
            rows = np.shape(payload[0].get("rows", ()))
            self.signature = (rows[0], rows[1]) if len(rows) == 2 else None

    def take(self) -> dict[int, Mapping[str, Any]]:
        """What came, and no longer keep it."""
        last, self._last = self._last, {}
        return last


@dataclass
class Watch:
    """What is odd of the updates of a run, round after round. `seen` has single updates where they are in the clear.

    `last`: the lengths of the updates of the last round, where they are seen.
    """

    seen: Seen
    layout: Layout
    seed: int
    history: History = field(default_factory=History)
    peers: dict[int, Peers] = field(default_factory=dict)
    long: dict[int, list[bool]] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    counts: list[dict[int, float]] = field(default_factory=list)
    lengths: dict[int, tuple[float, float]] = field(default_factory=dict)
    last: list[float] = field(default_factory=list)

    def doubts(self, models: Sequence[Array], means: Sequence[Array | None], labels: Mapping[int, int]) -> list[str]:
        """What is odd of a round, as sentences. `models` (d,) were sent to the clients of these `labels`, and moved by `means` (d,)."""
        updates = {client: parts for client, parts in self.seen.take().items() if np.shape(parts.get("update", ())) == models[0].shape}
        counts = {client: float(parts["weight"]) for client, parts in updates.items() if "weight" in parts}
        self.last = [float(np.linalg.norm(parts["update"])) for parts in updates.values()]
        doubts = list[str]()
        for label, (model, mean) in enumerate(zip(models, means, strict=True)):
            own = {client: np.asarray(parts["update"]) for client, parts in updates.items() if labels[client] == label}
            of_all = [] if mean is None else mean_doubts(model, mean, self.layout)
            doubts += of_all + group_doubts(model, own, self.layout, self.moved, alone=not of_all, long=self.long)
            peers = self.peers.setdefault(label, Peers())
            doubts += peers.doubts(own, counts, self.layout) if len(model) >= FEWEST_NUMBERS else []
            if mean is not None:
                losses = usable_losses({client: updates[client]["loss"] for client in own if "loss" in updates[client]})
                doubts += filter(None, [peers.loss_doubt(losses, float(np.linalg.norm(mean)))])
                doubts += filter(None, [untouched_statistics(model, mean, self.layout), self._diverges(label, model, mean)])
        if updates and len(models[0]) >= FEWEST_NUMBERS:
            where = places(len(models[0]), self.seed)
            doubts += self.history.doubts({
                client: (models[labels[client]][where], np.asarray(parts["update"])[where]) for client, parts in updates.items()
            })  # fmt: skip
        if counts:
            self.counts = [*self.counts, counts][:3]
            doubts += example_doubts(self.counts)
        return doubts

    def _diverges(self, label: int, model: Array, mean: Array) -> str:
        now, sent = float(np.linalg.norm(mean)), float(np.linalg.norm(model))
        first, start = self.lengths.setdefault(label, (now, sent))
        return diverges(first, now, start, sent, float(np.linalg.norm(model + mean)))
