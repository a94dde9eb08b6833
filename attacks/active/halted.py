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
from .scene import Play

__all__ = ["Halted", "halted"]

LARGEST = 1 << 31


@dataclass(eq=False)
class Halted:
    """A sum after masking. `members` masked (U2), `uploads` are the vectors of those whose upload came.

    `self_shares` and `key_shares` hold the shares revealed so far: by client, then by keeper.
    """

    play: Play
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
        for one in opened.shares if isinstance(opened, Opening) else ():
            self.self_shares.setdefault(dealer, {})[one.peer] = one.self_share
            self.key_shares.setdefault(dealer, {})[one.peer] = one.key_share
        return isinstance(opened, Opening)

    def ask(self, requests: Mapping[int, Survivors | Unmask | Challenge]) -> dict[int, bytes]:
        """Send these messages to clients; their answers. Accomplices forget earlier requests and answer each list as if it were the
        first."""
        kinds = {type(one).__name__ for one in requests.values()}
        kept = {one: dict(self.play.stores[one]) for one in requests if one in self.play.stores}
        asks: dict[int, m.PartyRequest] = {
            client: msgspec.structs.replace(self.steps[client], message=encode(one)) for client, one in requests.items()
            if client in self.steps
        }  # fmt: skip
        answers = self.play.liar.ask(asks, f"secagg {'+'.join(sorted(kinds))}") if asks else {}
        if "Unmask" in kinds:
            for one, before in kept.items():
                self.play.stores[one].clear()
                self.play.stores[one].update(before)
        return {client: answer.message for client, answer in answers.items() if isinstance(answer, m.Stepped) and answer.message}

    def agree(self, lists: Mapping[int, Collection[int]]) -> dict[int, bytes]:
        """Send each client its list of survivors; the signatures of those who agree. In passive mode no client is asked."""
        if self.terms.mode != "active":
            return {}
        answers = self.ask({client: Survivors(self.context, ids(survivors)) for client, survivors in lists.items()})
        signed = {client: decode_client(one) for client, one in answers.items()}
        return {client: one.signature for client, one in signed.items() if isinstance(one, Consistent)}

    def reveal(self, lists: Mapping[int, Collection[int]], signatures: Mapping[int, bytes]) -> None:
        """Ask each client for the shares that its list of survivors gives, with the signatures of those of `signatures` on that list."""
        requests: dict[int, Unmask] = {}
        for client, survivors in lists.items():
            alike = [one for one in sorted(signatures) if one in survivors and set(lists.get(one, ())) == set(survivors)]
            requests[client] = Unmask(self.context, ids(survivors), tuple(Signed(one, signatures[one]) for one in alike))
        for keeper, answer in self.ask(requests).items():
            revealed = decode_client(answer)
            if isinstance(revealed, Reveal):
                for shares, into in ((revealed.self_shares, self.self_shares), (revealed.key_shares, self.key_shares)):
                    for share in shares:
                        into.setdefault(share.peer, {})[keeper] = share.share

    def opened(self, survivors: Sequence[int]) -> Array | None:
        """The mean (d,) over some of the clients that uploaded; None if the revealed shares do not suffice."""
        bound, left = binding(self.terms), [one for one in self.members if one not in survivors]
        masks: list[Mask] = []
        keys = {one: seed for one in self.members if (seed := self._secret(self.key_shares, one)) is not None}
        for one in survivors:
            seed = self._secret(self.self_shares, one)
            if seed is None or one not in self.uploads:
                return None
            masks.append((self_key(seed, bound, one), -1))
            near = neighbours(self.terms.graph_seed, self.terms.cohort, self.terms.degree, one)
            for other in (other for other in left if other in near):
                if one in keys:
                    key = pair_key(keys[one], public_key(keys[one]), self.adverts[other].mask_key, bound, one, other)
                elif other in keys:
                    key = pair_key(keys[other], public_key(keys[other]), self.adverts[one].mask_key, bound, other, one)
                else:
                    return None
                masks.append((key, -1 if one < other else 1))
        dtype = "<u2" if self.terms.bits == 16 else "<u4"
        total = np.sum([np.frombuffer(self.uploads[one], dtype) for one in survivors], axis=0, dtype=dtype)
        total += total_mask((masks, total.size, dtype))
        levels = unwrap(total, self.terms.bits)
        cluster = self.terms.blocks[0][0] if self.terms.blocks else None  # of an oblivious sum over one group
        return np.asarray(secagg.Sum(self.terms, tuple(survivors), levels).mean(cluster))

    def _secret(self, shares: Mapping[int, Mapping[int, bytes]], client: int) -> bytes | None:
        """A client's secret, None with too few shares."""
        given = shares.get(client, {})
        if len(given) < self.terms.threshold:
            return None
        keepers = sorted(given)[: self.terms.threshold]
        place = {member: number for number, member in enumerate(self.terms.cohort, 1)}
        try:
            return combine([place[keeper] for keeper in keepers], [given[keeper] for keeper in keepers])
        except ValueError:
            return None


def halted(play: Play, held: Held, on: Collection[int]) -> Halted | None:
    """Have clients upload masked values and stop there: the server's honest part receives no upload. None if too few masked."""

    def hear(client: int, ask: m.PartyRequest, answer: m.Answer, stage: str) -> m.Answer:
        if stage == "secagg Deliver" and isinstance(ask, m.SumStep) and ask.kind != "counts" and isinstance(answer, m.Stepped):
            return m.Stepped(b"")
        return answer

    first = len(play.liar.exchanges)
    play.liar.hear = hear
    play.sum(held, on)
    play.liar.hear = honest_answer
    asked = [one for one in play.liar.exchanges[first:] if isinstance(one.ask, m.SumStep) and one.ask.kind != "counts"]
    steps: dict[int, m.SumStep] = {}
    uploads: dict[int, bytes] = {}
    adverts: dict[int, Advert] = {}
    terms, context, members = None, b"", b""
    for one in asked:
        assert isinstance(one.ask, m.SumStep)
        request = decode_server(one.ask.message)
        if isinstance(request, Adverts):
            terms = request.terms
            adverts |= {advert.client: advert for advert in request.adverts}
        elif isinstance(request, Deliver) and isinstance(one.answer, m.Stepped):
            masked = decode_client(one.answer.message, LARGEST)
            if isinstance(masked, Masked):
                steps[one.client], uploads[one.client] = one.ask, masked.vector
                context, members = request.context, request.members
    if terms is None or not uploads:
        return None
    return Halted(play, terms, context, names(members), steps, adverts, uploads)
