"""The clients of a federation in this process, agreeing on the secret of their transforms: the real protocol, over real bytes.

A deployment has one `protocols.group.Member` at each client; here all of them live side by side, and what they say goes to the transcript.
Everybody present has the secret of the running group epoch. Going offline and coming back changes nothing. Newcomers get the secret from a
member. A removal starts a new epoch with a fresh secret; secrets of earlier epochs stay with those who had them.
"""

from collections.abc import Callable, Iterable

import numpy as np

from .channels import Transforms
from .protocols import group
from .protocols.entropy import Entropy
from .protocols.keys import Identity, Roster

__all__ = ["Group"]

PURPOSE = "transforms"


class Group:
    """`secrets[client][epoch]` is what a client derives for its transforms. `clients` are all on the roster; those `present` agree at once.

    What was said is kept until `tell` takes it to the transcript.
    """

    def __init__(self, clients: Iterable[int], present: Iterable[int], entropy: Entropy) -> None:
        self._ids = tuple(sorted(clients))
        self._numbers = {client: number for number, client in enumerate(self._ids)}
        self._entropy = entropy
        self._session = entropy(16)
        identities = [Identity.create(number, entropy) for number in range(len(self._ids))]
        self._roster = Roster(tuple(identity.public() for identity in identities))
        self._members = {
            number: group.Member(identity, self._roster, self._session, entropy=entropy) for number, identity in enumerate(identities)
        }
        self._removed: set[int] = set()
        self._said: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
        self._server: group.Server | None = None
        self.epoch = -1
        self.secrets: dict[int, dict[int, bytes]] = {client: {} for client in self._ids}
        self.agree(present)

    def agree(self, present: Iterable[int], removed: Iterable[int] = ()) -> None:
        """A new epoch among those present, with a fresh secret that the `removed` never get."""
        self._removed |= {self._numbers[client] for client in removed}
        members = [self._numbers[client] for client in present]
        terms = group.make_terms(session=self._session, epoch=self.epoch + 1, roster=self._roster, members=members, removed=self._removed)
        self._server = group.Server(terms, self._roster)
        group.agree_all(self._server, {number: self._members[number] for number in members}, record=self._note)
        self.epoch += 1
        self._derive(members)

    def admit(self, present: Iterable[int]) -> None:
        """Each client present that lacks the running secret gets it from the first one that has it."""
        assert self._server is not None
        members = sorted(client for client, held in self.secrets.items() if self.epoch in held)
        inside = [client for client in members if client in set(present)] or members
        for client in sorted(set(present) - set(members)):
            number = self._numbers[client]
            group.hand_over(self._server, number, self._numbers[inside[0]], self._members, record=self._note)
            self._derive([number])

    @property
    def secret(self) -> bytes:
        """The secret of the running epoch."""
        return next(held[self.epoch] for held in self.secrets.values() if self.epoch in held)

    def share(self, transforms: Transforms) -> None:
        """Tell the shared transforms which epoch runs, and who has the secret of each."""
        if transforms.epoch < self.epoch:
            transforms.renew(self.secret)
        for epoch in range(self.epoch + 1):
            transforms.hold(epoch, (client for client, held in self.secrets.items() if epoch in held))

    def is_removed(self, client: int) -> bool:
        return self._numbers[client] in self._removed

    def _derive(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.secrets[self._ids[number]][self.epoch] = self._members[number].derive(PURPOSE)

    def _note(self, direction: str, number: int, kind: str, data: bytes) -> None:
        self._said.setdefault((direction, kind), []).append((self._ids[number], data))

    def tell(self, record: Callable[..., None]) -> None:
        """Take what was said since the last time to the transcript. What the server reads of it: public terms, keys, and sealed boxes."""
        said, self._said = self._said, {}
        for (direction, kind), parts in said.items():
            source, target = ("clients", "server") if direction == "up" else ("server", "clients")
            payload = [{"bytes": np.frombuffer(data, dtype=np.uint8)} for _, data in parts]
            readers = ("server",) if direction == "up" else ("server", "clients")
            alike = direction == "down" and len({data for _, data in parts}) == 1
            record(
                kind, source, target, [client for client, _ in parts], payload[0] if alike else payload,
                readers=readers, context={"group_epoch": self.epoch},
            )  # fmt: skip

    def forget_said(self) -> None:
        """What was said is on record already, from before an interruption."""
        self._said = {}
