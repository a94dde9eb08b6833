"""The server's side of `gram`: vectors, in the clear or as clients hide them, and the clustering epochs that they are in."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..client_level import LOCAL, LocalGram
from ..epochs import Epoch, Epochs
from ..errors import InputError
from ..federation import GramView, Then
from ..handles import Held, Released
from ..protection import ClearGram, Protection, Recorder
from ..protocols.errors import MalformedMessage
from ..protocols.orthonormal import TRANSFORMS
from ..types import Array, check_array
from ..wire import check_small
from . import messages as m
from .roll import ClientsLost, Roll

__all__ = ["Grams", "check_new"]


def check_new(clients: Sequence[int], epoch: Epoch[Any] | None) -> None:
    """`InputError` for clients that are in the epoch already."""
    again = sorted(set(clients) & set(epoch.clients)) if epoch is not None else []
    if again:
        raise InputError(f"gram: clients {again} are already in this epoch")


class Grams:
    """Clustering epochs over messages. With `local`, single rows carry the client's own noise, which is paid for each time."""

    def __init__(self, roll: Roll, session: bytes, protection: Protection, local: LocalGram | None) -> None:
        self._roll, self._session, self._local = roll, session, local
        self._changed = any(stage in ("sketch", *TRANSFORMS) for stage in protection.gram)
        self.epochs = Epochs(ClearGram())

    def gram(
        self, held: Held, number: int, clients: Sequence[int], then: Then, against: Held | None, record: Recorder
    ) -> Released:  # fmt: skip
        """Ask `clients` for their vectors of `held`, which they know by `number`, and run `then`. Raises `ClientsLost` without all."""
        epoch = None if against is None else self.epochs.of(against)
        check_new(clients, epoch)
        uploads = self._uploads(held, number, clients, epoch)
        shapes = {(int(rows.shape[0]), int(rows.shape[1])) for rows in uploads.values() if rows.ndim == 2}
        if epoch is not None:
            shapes.add(epoch.shape)
        if set(uploads) != set(clients):
            lost = sorted(set(clients) - set(uploads))
            for client in lost:  # also who refused: it would again
                self._roll.lose(client)
            raise ClientsLost(lost)
        if len(shapes) != 1:
            raise InputError(f"gram: {held.part} has different shapes {sorted(shapes)}; pad to one public shape")
        (shape,) = shapes
        if epoch is None:
            epoch = self.epochs.open(shape)
        rows = [{"rows": uploads[client]} for client in clients]
        if clients:
            record(held.part, "clients", "server", clients, rows, readers=("server",), context={"epoch": epoch.number})
        gram = epoch.session.extend(clients, rows, shape[0], record)
        epoch.clients += clients
        if clients:
            self.epochs.enter(held, epoch)
        result, evidence = then(GramView(gram, tuple(clients), epoch.memory))
        check_small(result, gram.n)
        return Released(result, evidence)

    def close(self, held: Held) -> None:
        """Close an epoch."""
        self.epochs.close(held)

    def _uploads(self, held: Held, number: int, clients: Sequence[int], epoch: Epoch[Any] | None) -> dict[int, Array]:
        """The vectors of those who gave any."""
        if not clients:
            return {}
        noise = None
        if self._local is not None:
            self._local.ledger.charge(dict.fromkeys(clients, (self._local.event,)), LOCAL)
            noise = m.Bounded(self._local.privacy.relation, 1.0, self._local.noise_multiplier)
        purpose = f"gram/{self.epochs.count if epoch is None else epoch.number}" if self._changed else ""
        part = "rows" if self._changed else held.part
        give = m.Give(self._session, "gram", number, (held.part,), purpose, False, noise)
        uploads: dict[int, Array] = {}
        for client, answer in self._roll.ask(dict.fromkeys(clients, give), "gram").items():
            if isinstance(answer, m.Given) and [one.name for one in answer.values] == [part]:
                try:
                    value = m.from_tensor(answer.values[0].value)
                    uploads[client] = np.atleast_2d(check_array(f"client {client}: {held.part}", value))
                except (MalformedMessage, InputError):
                    self._roll.refusals.append((client, "gram", "malformed"))
        return uploads
