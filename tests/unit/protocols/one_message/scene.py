"""Parties of a sum in one message for tests: clients, helpers over stores that outlive them, and terms."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.keys import sign
from cflpriv.protocols.one_message import (
    Contribution,
    HelpedServer,
    HelpedTerms,
    Helper,
    HelperPolicy,
    Identity,
    Roster,
    SumRecord,
    accept,
    agreeable,
    make_terms,
    upload,
)
from cflpriv.protocols.one_message import messages as m

__all__ = ["SESSION", "Scene", "levels", "wrong"]

SESSION = bytes(range(16))
MODEL = bytes(32)


@lru_cache(maxsize=64)
def _identities(clients: int, helpers: int) -> tuple[tuple[Identity, ...], tuple[Identity, ...]]:
    entropy = public_entropy("one-message scene")
    return tuple(Identity.create(i, entropy) for i in range(clients)), tuple(Identity.create(0, entropy) for _ in range(helpers))


def wrong(helper: Helper, identity: Identity, data: bytes) -> bytes:
    """The answer of a helper that sends masks, or their hashes, with another first value, under a good signature."""
    answer = helper.receive(data)
    ask = m.decode_to_helper(data)
    message = m.decode_from_helper(answer, ask.terms)
    if not isinstance(message, m.OpenedMasks) or not isinstance(ask, m.OpenSet):
        return answer
    masks = tuple(bytes([mask[0] ^ 1]) + mask[1:] for mask in message.masks)
    others = tuple(bytes([digest[0] ^ 1]) + digest[1:] for digest in message.hashes[len(masks) :])
    hashes = (*(sha256(mask).digest() for mask in masks), *others)
    uploads = helper._uploads(m.context(ask.terms))[0]
    name = m.set_name(m.context(ask.terms), [uploads[client].digest for client in m.names(ask.members)])
    signature = sign(identity, m.OPEN, *m.mask_parts(helper.number, name, (*ask.send, *ask.check), hashes))
    return m.encode(msgspec.structs.replace(message, masks=masks, hashes=hashes, signature=signature))


def levels(client: int, dimension: int) -> Any:
    """A client's input, as levels of the quantiser."""
    return np.arange(dimension, dtype=np.int64) % 7 * (client + 1) - 3 * client


@dataclass
class Scene:
    """`clients` and `helpers` parties, and what the helpers store. `policy` is that of the helpers."""

    clients: int = 5
    helpers: int = 4
    colluding: int = 1
    policy: HelperPolicy = field(default_factory=lambda: HelperPolicy(SESSION))
    stores: dict[int, dict[str, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.identities, holders = _identities(self.clients, self.helpers)
        self.holders = holders
        keys = [identity.public() for identity in holders]
        self.roster = Roster(tuple(identity.public() for identity in self.identities), keys[0], tuple(keys[1:]))
        self.policy = msgspec.structs.replace(self.policy, colluding=self.colluding)
        for number in range(self.helpers):
            self.stores.setdefault(number, {})

    def helper(self, number: int, store: MutableMapping[str, bytes] | None = None) -> Helper:
        """A helper over its store, as a new process would make it."""
        return Helper(self.holders[number], self.roster, self.policy, self.stores[number] if store is None else store)

    def announced(self, number: int = 1, present: Sequence[int] | None = None) -> dict[int, bytes]:
        """Announcements of a round."""
        return {helper: self.helper(helper).announcement(number) for helper in (range(self.helpers) if present is None else present)}

    def terms(self, announced: dict[int, bytes], **changes: Any) -> HelpedTerms:
        fields: dict[str, Any] = {
            "session": SESSION, "slot": (1, 0), "roster": self.roster, "colluding": self.colluding, "announced": announced, "clients":
            self.clients, "models": [MODEL], "dimension": 4, "clip": 1.0,
        }  # fmt: skip
        return make_terms(**fields | changes)

    def server(self, terms: HelpedTerms, announced: dict[int, bytes]) -> HelpedServer:
        return HelpedServer(terms, announced, self.roster)

    def upload(self, client: int, server: HelpedServer, record: SumRecord | None = None, values: Any = None, **policy: Any) -> bytes:
        """A client's upload of its `levels`."""
        terms, identity = server.terms, self.identities[client]
        own = msgspec.structs.replace(agreeable(terms), **{"names": (terms.round,), **policy})
        accepted = accept(server.invite, identity, own, self.colluding, self.roster)
        contribution = Contribution(levels(client, terms.dimension) if values is None else values, is_levels=values is None)
        return upload(accepted, identity, own, SumRecord() if record is None else record, contribution)[0]

    def finish(self, server: HelpedServer, helpers: dict[int, Helper]) -> None:
        """Deliver, close and open with these helpers."""
        server.delivered({helper: helpers[helper].receive(data) for helper, data in server.deliver().items() if helper in helpers})
        messages = server.close()
        while messages:
            messages = server.advance({helper: helpers[helper].receive(data) for helper, data in messages.items() if helper in helpers})

    def all(self) -> dict[int, Helper]:
        return {number: self.helper(number) for number in range(self.helpers)}
