"""Clustering epochs of vectors, in the clear or transformed: the server half."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..clustering.similarity import Gram
from ..contract.calls import Recorder
from ..contract.handles import Held, Released
from ..contract.operations import GramView, Then
from ..errors import InputError
from ..federation import messages as m
from ..federation.epochs import Epoch, Epochs
from ..federation.protections import ServerParts
from ..federation.registry import ClientsLost, majority
from ..federation.task_encoding import check_small
from ..federation.transforms import clustering_purpose
from ..privacy.client_level import LOCAL
from ..protocols.errors import MalformedMessage
from ..types import Array, check_array

__all__ = ["VectorComparison", "Vectors", "check_new"]

LARGEST = 1e100
"""Vectors with larger numbers are refused, because their inner products would not be finite."""


def check_new(clients: Sequence[int], epoch: Epoch[Any] | None) -> None:
    """Raises `InputError` for clients that are in the epoch already."""
    again = sorted(set(clients) & set(epoch.clients)) if epoch is not None else []
    if again:
        raise InputError(f"gram: clients {again} are already in this epoch")


@dataclass
class Vectors:
    """The vectors of one clustering epoch, as clients sent them.

    `transform`: its name, which stays that of the group epoch in which the clustering epoch was opened.
    """

    clients: list[int] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)
    transform: str = ""
    live: ClassVar[bool] = True

    def extend(self, clients: Sequence[int], rows: Sequence[Array]) -> Gram:
        """The Gram matrix with the new rows (p, d) last."""
        self.clients += clients
        stacked = np.stack([*self.rows, *rows], dtype=np.float64)
        self.rows = list(stacked)  # views, so that all vectors are in memory once
        return Gram.of_vectors(self.clients, stacked)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of the epoch; a session without this method is not resumed."""
        return {"clients": list(self.clients), "rows": list(self.rows), "transform": self.transform}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.clients, self.rows, self.transform = list(saved["clients"]), list(saved["rows"]), saved["transform"]


class VectorComparison:
    """The server half of comparisons of vectors. With `local`, rows carry the client's own noise, and each release is charged."""

    def __init__(self, parts: ServerParts) -> None:
        protection = parts.protection
        self._registry, self._session, self._local, self._named = parts.registry, parts.session, parts.local, parts.named
        self._transformed = protection.comparison.transformed
        self._changed = protection.comparison.hides or protection.sketched is not None
        self.epochs: Epochs[Vectors] = Epochs(lambda number: Vectors())

    def gram(
        self, held: Held, number: int, clients: Sequence[int], then: Then, against: Held | None, record: Recorder,
        shape: tuple[int, ...] = (),
    ) -> Released:  # fmt: skip
        """Ask `clients` for their vectors of `held` (their `number`), and run `then`. Raises `ClientsLost` unless all sent one."""
        epoch = None if against is None else self.epochs.of(against)
        check_new(clients, epoch)
        number_of_epoch = self.epochs.count if epoch is None else epoch.number
        transform = self._new_name(number_of_epoch) if epoch is None else epoch.session.transform
        uploads = self._uploads(held, number, clients, transform, None if epoch is None else epoch.shape)
        arrived = [client for client in clients if client in uploads]
        rows = [{"rows": uploads[client]} for client in arrived]
        if arrived:  # the server got them, even if the comparison fails
            record(held.part, "clients", "server", arrived, rows, readers=("server",), context={"epoch": number_of_epoch})
        if len(arrived) < len(clients):
            lost = sorted(set(clients) - set(uploads))
            for client in lost:  # a client that refused would refuse again
                self._registry.lose(client)
            if epoch is None:  # some clients have used its transform, so the next attempt needs another
                self.epochs.count += 1
            raise ClientsLost(lost)
        shapes = {upload.shape for upload in uploads.values()}
        if epoch is not None:
            shapes.add(epoch.shape)
        if len(shapes) != 1:
            raise InputError(f"gram: {held.part} has different shapes {sorted(shapes)}; pad to one public shape")
        ((p, dimension),) = shapes
        if epoch is None:
            epoch = self.epochs.open((p, dimension))
            epoch.session.transform = transform
        gram = epoch.session.extend(clients, [uploads[client] for client in clients])
        epoch.clients += clients
        if clients:
            self.epochs.enter(held, epoch)
        result, evidence = then(GramView(gram, tuple(clients), epoch.memory))
        check_small(result, gram.n)
        return Released(result, evidence)

    def _new_name(self, number: int) -> str:
        """The name of a new epoch's transform. Clients erase the keys of epochs that it does not list as open."""
        entered = [epoch.number for entries in self.epochs.entered.values() for _, epoch in entries] if self._transformed else []
        return self._named(clustering_purpose(number, set(entered)))

    def listen(self, notify: Callable[[str], None], tick: Callable[[int, int], None]) -> None:
        """No step takes long."""

    def close(self, held: Held) -> None:
        """Close an epoch."""
        self.epochs.close(held)

    def end(self) -> None:
        """Close all epochs."""
        self.epochs.entered.clear()

    def _uploads(
        self, held: Held, number: int, clients: Sequence[int], transform: str, shape: tuple[int, int] | None
    ) -> dict[int, Array]:  # fmt: skip
        """The vectors (p, d) by client, of the `shape` of the epoch, else of the shape that more than half of the clients have."""
        if not clients:
            return {}
        noise = None
        if self._local is not None:
            self._local.ledger.charge(dict.fromkeys(clients, (self._local.event,)), LOCAL)
            noise = m.Bounded(self._local.privacy.relation, 1.0, self._local.noise_multiplier)
        part = "rows" if self._changed else held.part
        give = m.Give(self._session, "gram", number, (held.part,), transform if self._changed else "", False, noise)
        uploads: dict[int, Array] = {}
        for client, answer in self._registry.ask(dict.fromkeys(clients, give), "gram").items():
            try:
                if not isinstance(answer, m.Given) or [array.name for array in answer.values] != [part]:
                    raise MalformedMessage
                value = np.atleast_2d(check_array(f"client {client}: {held.part}", answer.values[0].value))
                if value.ndim != 2 or float(np.abs(value).max(initial=0.0)) > LARGEST:
                    raise MalformedMessage
                uploads[client] = value
            except (MalformedMessage, InputError):
                self._registry.refusals.append((client, "gram", "malformed"))
        kept = shape if shape is not None else majority([upload.shape for upload in uploads.values()])
        for client in [client for client, upload in uploads.items() if kept is not None and upload.shape != kept]:
            del uploads[client]
            self._registry.refusals.append((client, "gram", "malformed"))
        return uploads
