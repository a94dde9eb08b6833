"""A dealing into buckets that the server drives message by message, with accomplices whose nonces it draws itself."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from ...federation import messages as m
from ...protocols import dealing
from ...protocols.entropy import system_entropy

if TYPE_CHECKING:
    from .scene import AttackRun

__all__ = ["Dealing"]


class Dealing:
    """One dealing of some clients in the round that is on.

    `listed` and `nonces` hold the commitments and the opened nonces, by client. A client that refused is in neither.
    """

    def __init__(self, run: "AttackRun", clients: Collection[int], attempt: int = 0) -> None:
        self._run, self._clients = run, tuple(sorted(clients))
        self.slot = (run.turn, 0, attempt)
        self.listed: dict[int, bytes] = {}
        self.nonces: dict[int, bytes] = {}

    def commit(self) -> None:
        """Have all commit to a nonce."""
        self.listed = self._answers((), (), "deal commit")
        for client in self._clients:
            if client in self._run.identities:
                self.choose(client, system_entropy(dealing.NONCE_BYTES))

    def choose(self, client: int, nonce: bytes) -> None:
        """Give an accomplice this nonce, and list its commitment."""
        self.listed[client] = dealing.commitment(self._run.fed.session, self.slot, client, nonce)
        self.nonces[client] = nonce

    def open(self) -> None:
        """Have all open their nonces for the list as it is."""
        self.nonces |= self._answers(self._list(), (), "deal open")

    def keep(self) -> None:
        """Show all the list and the nonces as they are, by which each finds its bucket."""
        if self.nonces.keys() >= self.listed.keys():
            self._answers(self._list(), tuple(self.nonces[client] for client in sorted(self.listed)), "deal")

    def bucket(self, client: int) -> tuple[int, ...]:
        """The bucket of a client under the list and the nonces as they are; empty where some are missing."""
        protection = self._run.scene.config.protection
        if client not in self.listed or not self.nonces.keys() >= self.listed.keys():
            return ()
        count = dealing.buckets_of(len(self.listed), protection.smallest_sum, protection.buckets)
        seed = dealing.seed_of(self._run.fed.session, self.slot, {client: self.nonces[client] for client in self.listed})
        return next(bucket for bucket in dealing.deal_buckets(seed, self.listed, count) if client in bucket)

    def _list(self) -> tuple[m.Committed, ...]:
        return tuple(m.Committed(client, self.listed[client]) for client in sorted(self.listed))

    def _answers(self, listed: tuple[m.Committed, ...], nonces: tuple[bytes, ...], stage: str) -> dict[int, bytes]:
        ask = m.Deal(self._run.fed.session, self.slot, listed, nonces)
        asked = [client for client in self._clients if client not in self._run.identities and (not listed or client in self.listed)]
        answers = self._run.liar.ask(dict.fromkeys(asked, ask), stage)
        return {client: answer.message for client, answer in answers.items() if isinstance(answer, m.Stepped) and answer.message}
