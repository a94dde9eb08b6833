"""A secure sum stopped after the upload, so that the attacker can finish it by hand with survivor lists of its choice."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ...contract.handles import Held
from ...federation import messages as m
from ...protocols import secagg
from ...protocols.keys import public_key
from ...protocols.secagg.bindings import binding, pair_key, self_key
from ...protocols.secagg.graph import neighbours
from ...protocols.secagg.messages import (
    Advert,
    Adverts,
    Challenge,
    Consistent,
    Deliver,
    Masked,
    Opening,
    Reveal,
    Signed,
    Survivors,
    Unmask,
    decode_client,
    decode_server,
    encode,
    ids,
    names,
)
from ...protocols.secagg.shamir import combine
from ...protocols.secagg.vectors import Mask, total_mask, unwrap
from ...types import Array
from .liar import honest_answer
from .scene import AttackRun

__all__ = ["Halted", "halted"]

LARGEST = 1 << 31


@dataclass(eq=False)
class Halted:
    """A sum after masking. `members` masked (U2), `uploads` are the vectors of those whose upload came.

    `self_shares` and `key_shares` hold the shares revealed so far: by client, then by keeper.
    """

    run: AttackRun
    terms: secagg.Terms
    context: bytes
    members: tuple[int, ...]
    steps: Mapping[int, m.SumStep]
    adverts: Mapping[int, Advert]
    uploads: Mapping[int, bytes]
    self_shares: dict[int, dict[int, bytes]] = field(default_factory=dict)
    key_shares: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def challenge(self, dealer: int, accusers: Collection[int]) -> bool:
        """Report to a client that these complained about the shares it dealt them; whether it opened the shares."""
        answer = self.ask({dealer: Challenge(self.context, ids(accusers))}).get(dealer)
        opened = None if answer is None else decode_client(answer)
        for share in opened.shares if isinstance(opened, Opening) else ():
            self.self_shares.setdefault(dealer, {})[share.peer] = share.self_share
            self.key_shares.setdefault(dealer, {})[share.peer] = share.key_share
        return isinstance(opened, Opening)

    def ask(self, requests: Mapping[int, Survivors | Unmask | Challenge]) -> dict[int, bytes]:
        """Send these messages to clients; their answers. Accomplices forget earlier requests and answer each list as if it were the
        first."""
        kinds = {type(request).__name__ for request in requests.values()}
        kept = {client: dict(self.run.stores[client]) for client in requests if client in self.run.stores}
        asks: dict[int, m.PartyRequest] = {
            client: msgspec.structs.replace(self.steps[client], message=encode(request)) for client, request in requests.items()
            if client in self.steps
        }  # fmt: skip
        answers = self.run.liar.ask(asks, f"secagg {'+'.join(sorted(kinds))}") if asks else {}
        if "Unmask" in kinds:
            for client, before in kept.items():
                self.run.stores[client].clear()
                self.run.stores[client].update(before)
        return {client: answer.message for client, answer in answers.items() if isinstance(answer, m.Stepped) and answer.message}

    def agree(self, lists: Mapping[int, Collection[int]]) -> dict[int, bytes]:
        """Send each client its list of survivors; the signatures of those who agree. In passive mode no client is asked."""
        if self.terms.mode != "active":
            return {}
        answers = self.ask({client: Survivors(self.context, ids(survivors)) for client, survivors in lists.items()})
        signed = {client: decode_client(answer) for client, answer in answers.items()}
        return {client: answer.signature for client, answer in signed.items() if isinstance(answer, Consistent)}

    def reveal(self, lists: Mapping[int, Collection[int]], signatures: Mapping[int, bytes]) -> None:
        """Ask each client for the shares that its list of survivors gives, with the signatures of those of `signatures` on that list."""
        requests: dict[int, Unmask] = {}
        for client, survivors in lists.items():
            alike = [client for client in sorted(signatures) if client in survivors and set(lists.get(client, ())) == set(survivors)]
            requests[client] = Unmask(self.context, ids(survivors), tuple(Signed(client, signatures[client]) for client in alike))
        for keeper, answer in self.ask(requests).items():
            revealed = decode_client(answer)
            if isinstance(revealed, Reveal):
                for shares, into in ((revealed.self_shares, self.self_shares), (revealed.key_shares, self.key_shares)):
                    for share in shares:
                        into.setdefault(share.peer, {})[keeper] = share.share

    def opened(self, survivors: Sequence[int]) -> Array | None:
        """The mean (d,) over some of the clients that uploaded; None if the revealed shares do not suffice."""
        bound, left = binding(self.terms), [client for client in self.members if client not in survivors]
        masks: list[Mask] = []
        keys = {client: seed for client in self.members if (seed := self._secret(self.key_shares, client)) is not None}
        for client in survivors:
            seed = self._secret(self.self_shares, client)
            if seed is None or client not in self.uploads:
                return None
            masks.append((self_key(seed, bound, client), -1))
            near = neighbours(self.terms.graph_seed, self.terms.cohort, self.terms.degree, client)
            for other in (other for other in left if other in near):
                if client in keys:
                    key = pair_key(keys[client], public_key(keys[client]), self.adverts[other].mask_key, bound, client, other)
                elif other in keys:
                    key = pair_key(keys[other], public_key(keys[other]), self.adverts[client].mask_key, bound, other, client)
                else:
                    return None
                masks.append((key, -1 if client < other else 1))
        dtype = "<u2" if self.terms.bits == 16 else "<u4"
        total = np.sum([np.frombuffer(self.uploads[client], dtype) for client in survivors], axis=0, dtype=dtype)
        total += total_mask((masks, total.size, dtype))
        levels = unwrap(total, self.terms.bits)
        cluster = self.terms.blocks[0][0] if self.terms.blocks else None  # of an oblivious sum over one group
        return np.asarray(secagg.Sum(self.terms, tuple(survivors), levels).mean(cluster))

    def _secret(self, shares: Mapping[int, Mapping[int, bytes]], client: int) -> bytes | None:
        """A client's secret, None with too few shares."""
        parts = shares.get(client, {})
        if len(parts) < self.terms.threshold:
            return None
        keepers = sorted(parts)[: self.terms.threshold]
        place = {member: number for number, member in enumerate(self.terms.cohort, 1)}
        try:
            return combine([place[keeper] for keeper in keepers], [parts[keeper] for keeper in keepers])
        except ValueError:
            return None


def halted(run: AttackRun, held: Held, on: Collection[int]) -> Halted | None:
    """Have clients upload masked values and stop there: the server's honest part receives no upload. None if too few masked."""

    def receive(client: int, ask: m.PartyRequest, answer: m.Answer, stage: str) -> m.Answer:
        if stage == "secagg Deliver" and isinstance(ask, m.SumStep) and ask.kind != "counts" and isinstance(answer, m.Stepped):
            return m.Stepped(b"")
        return answer

    first = len(run.liar.exchanges)
    run.liar.receive = receive
    run.sum(held, on)
    run.liar.receive = honest_answer
    asked = [exchange for exchange in run.liar.exchanges[first:] if isinstance(exchange.ask, m.SumStep) and exchange.ask.kind != "counts"]
    steps: dict[int, m.SumStep] = {}
    uploads: dict[int, bytes] = {}
    adverts: dict[int, Advert] = {}
    terms, context, members = None, b"", b""
    for exchange in asked:
        assert isinstance(exchange.ask, m.SumStep)
        request = decode_server(exchange.ask.message)
        if isinstance(request, Adverts):
            terms = request.terms
            adverts |= {advert.client: advert for advert in request.adverts}
        elif isinstance(request, Deliver) and isinstance(exchange.answer, m.Stepped):
            masked = decode_client(exchange.answer.message, LARGEST)
            if isinstance(masked, Masked):
                steps[exchange.client], uploads[exchange.client] = exchange.ask, masked.vector
                context, members = request.context, request.members
    if terms is None or not uploads:
        return None
    return Halted(run, terms, context, names(members), steps, adverts, uploads)
