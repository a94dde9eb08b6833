"""One dishonest client among honest ones, with an honest server: what it may send, and what must hold whatever it sends.

    python -m tests.unit.protocols.secagg.faults [count] [seed]        from the repository root

The dishonest client answers last and knows what it was sent; it deviates at one or two of its messages. Honest clients may drop out. Never
a wrong sum: honest inputs are in it exactly. Never a wrong name: no honest client is refused, or called an offender. No more than the
failure that is stated: without the dishonest client, or with enough others, there is a sum.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cflpriv.protocols.codec import CHECKSUM_BYTES
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import RemoteError, SumFailed, TooFewClients
from cflpriv.protocols.keys import private_key, public_key, sign
from cflpriv.protocols.secagg import ServerStage, Terms, fewest_survivors, retaken, vectors
from cflpriv.protocols.secagg import messages as m
from cflpriv.protocols.secagg.bindings import ADVERT, advert_parts, box_key
from cflpriv.protocols.secagg.shares import Pair, deal

from .scene import Play, identities, levels, resealed, terms

__all__ = ["FAULTS", "Ended", "attempt", "check", "fuzz"]

replace = msgspec.structs.replace


@dataclass
class Dishonest:
    """The dishonest client: its machine runs honestly, and what it sends is changed."""

    play: Play
    number: int
    rng: random.Random
    box_seed: bytes = b""
    arbitrary: bool = False
    """Whether it masked under other keys than it advertised, or changed its vector, so that its input may be anything."""

    @property
    def machine(self) -> Any:
        return self.play.clients[self.number]

    def some(self, peers: tuple[int, ...]) -> set[int]:
        return set(self.rng.sample(peers, self.rng.randint(1, len(peers))))

    def redealt(self, seeds: tuple[bytes, bytes]) -> tuple[m.Shares, tuple[Pair, ...]]:
        """Its shares message over other seeds."""
        state = self.machine._state
        context = m.context(self.play.agreed)
        keys = {
            peer.client: box_key(private_key(self.box_seed), peer.encryption_key, context, self.number, peer.client) for peer in state.peers
        }
        return deal(self.play.agreed, context, self.number, state.peers, keys, seeds, state.mask_key, self.rng.randbytes)


def flip(one: Dishonest, data: bytes) -> bytes:
    place = one.rng.randrange(8 * len(data))
    return data[: place // 8] + bytes([data[place // 8] ^ 1 << place % 8]) + data[place // 8 + 1 :]


def flip_resealed(one: Dishonest, data: bytes) -> bytes:
    place = one.rng.randrange(8 * (len(data) - CHECKSUM_BYTES))
    if type(m.decode_client(data, 1000)).__name__ in ("Advert", "Masked"):
        one.arbitrary = True
    return resealed(data[: place // 8] + bytes([data[place // 8] ^ 1 << place % 8]) + data[place // 8 + 1 :])


def truncated(one: Dishonest, data: bytes) -> bytes:
    return data[: one.rng.randrange(len(data))]


def replayed(one: Dishonest, data: bytes) -> bytes:
    """Another's message, or one of its own of before."""
    return one.rng.choice([sent for sent in one.play.up.values() if sent != data] or [b""])


def on(kind: type[Any], change: Callable[[Dishonest, Any], Any]) -> Callable[[Dishonest, bytes], bytes]:
    """A fault at messages of one kind; others are sent as they are."""

    def fault(one: Dishonest, data: bytes) -> bytes:
        message = m.decode_client(data, 1000)
        return m.encode(change(one, message)) if isinstance(message, kind) else data

    return fault


def copied_key(one: Dishonest, advert: m.Advert) -> m.Advert:
    others = [m.decode_client(sent) for (kind, _), sent in one.play.up.items() if kind == "Advert"]
    victim = one.rng.choice([other for other in others if isinstance(other, m.Advert)] or [advert])
    name = one.rng.choice(("mask_key", "encryption_key"))
    changed = replace(advert, **{name: one.rng.choice((victim.mask_key, victim.encryption_key))})
    one.arbitrary = True
    return signed(one, changed)


def signed(one: Dishonest, advert: m.Advert) -> m.Advert:
    parts = advert_parts(advert.session, advert.slot, one.number, advert.encryption_key, advert.mask_key)
    return replace(advert, signature=sign(identities()[one.number], ADVERT, *parts)) if one.play.agreed.mode == "active" else advert


def other_key(one: Dishonest, advert: m.Advert) -> m.Advert:
    one.arbitrary = True
    return signed(one, replace(advert, **{one.rng.choice(("mask_key", "encryption_key")): public_key(one.rng.randbytes(32))}))


def changed_boxes(name: str) -> Callable[[Dishonest, m.Shares], m.Shares]:
    """Nonsense in some boxes, or in one kind of digest of them."""

    def change(one: Dishonest, shares: m.Shares) -> m.Shares:
        peers = one.some(tuple(sealed.peer for sealed in shares.boxes))
        size = len(getattr(shares.boxes[0], name))
        boxes = (replace(box, **{name: one.rng.randbytes(size)}) if box.peer in peers else box for box in shares.boxes)
        return replace(shares, boxes=tuple(boxes))

    return change


def fewer_boxes(one: Dishonest, shares: m.Shares) -> m.Shares:
    return replace(shares, boxes=shares.boxes[1:])


def wrong_commitment(one: Dishonest, shares: m.Shares) -> m.Shares:
    return replace(shares, commitment=one.rng.randbytes(32))


def wrong_own_digest(one: Dishonest, shares: m.Shares) -> m.Shares:
    return replace(shares, self_digest=one.rng.randbytes(32), key_digest=one.rng.randbytes(32))


def other_secret(which: int) -> Callable[[Dishonest, m.Shares], m.Shares]:
    """Shares that fit their digests, of another secret than it committed to."""

    def change(one: Dishonest, shares: m.Shares) -> m.Shares:
        seeds = [one.machine._state.self_seed, one.machine._state.mask_seed]
        seeds[which] = one.rng.randbytes(32)
        made, dealt = one.redealt((seeds[0], seeds[1]))
        mine = tuple(pair for pair in dealt if pair.peer == one.number)
        one.machine._state = replace(one.machine._state, dealt=tuple(pair for pair in dealt if pair.peer != one.number), held=mine)
        return replace(made, commitment=shares.commitment)

    return change


def mixed_polynomials(one: Dishonest, shares: m.Shares) -> m.Shares:
    """Some keepers hold shares of other secrets; all fit their digests."""
    made, dealt = one.redealt((one.rng.randbytes(32), one.rng.randbytes(32)))
    peers = one.some(tuple(sealed.peer for sealed in shares.boxes))
    true = {pair.peer: pair for pair in one.machine._state.dealt}
    mixed = tuple(pair if pair.peer in peers else true[pair.peer] for pair in dealt if pair.peer != one.number)
    one.machine._state = replace(one.machine._state, dealt=mixed)
    return replace(shares, boxes=tuple(new if new.peer in peers else old for new, old in zip(made.boxes, shares.boxes, strict=True)))


def other_vector(one: Dishonest, masked: m.Masked) -> m.Masked:
    one.arbitrary = True
    return replace(masked, vector=one.rng.randbytes(len(masked.vector)))


def wrong_length(one: Dishonest, masked: m.Masked) -> m.Masked:
    return replace(masked, vector=masked.vector[: -one.rng.randint(1, 8)])


def false_complaint(one: Dishonest, masked: m.Masked) -> m.Complaint | m.Masked:
    """About honest dealers, who have sent it good boxes; when they have opened these it goes on."""
    if one.play.server.stage is not ServerStage.MASKING:
        return masked
    state = one.machine._state
    accused = tuple(sorted(one.some(tuple(peer.client for peer in state.peers if peer.client in state.members))))
    kept = tuple(pair for pair in state.held if pair.peer not in accused)
    one.machine._state = replace(state, stage="complained", accused=accused, withheld=m.encode(masked), held=kept)
    return m.Complaint(one.number, masked.context, m.ids(accused))


def absurd_complaint(one: Dishonest, masked: m.Masked) -> m.Complaint:
    return m.Complaint(one.number, masked.context, m.ids(one.rng.choice(([], [one.number], [199], [0, 199]))))


def false_opening(one: Dishonest, opening: m.Opening) -> m.Opening:
    shares = list(opening.shares)
    place = one.rng.randrange(len(shares))
    name = one.rng.choice(("self_share", "key_share", "signature"))
    shares[place] = replace(shares[place], **{name: one.rng.randbytes(len(getattr(shares[place], name)) or 64)})
    return replace(opening, shares=tuple(shares))


def fewer_openings(one: Dishonest, opening: m.Opening) -> m.Opening:
    return replace(opening, shares=opening.shares[1:])


def bad_signature(one: Dishonest, consistent: m.Consistent) -> m.Consistent:
    return replace(consistent, signature=one.rng.randbytes(64))


def wrong_share(one: Dishonest, reveal: m.Reveal) -> m.Reveal:
    name = one.rng.choice([name for name in ("self_shares", "key_shares") if getattr(reveal, name)])
    shares = list(getattr(reveal, name))
    place = one.rng.randrange(len(shares))
    shares[place] = m.Share(shares[place].peer, one.rng.randbytes(33))
    return replace(reveal, **{name: tuple(shares)})


def fewer_shares(one: Dishonest, reveal: m.Reveal) -> m.Reveal:
    return replace(reveal, self_shares=reveal.self_shares[1:])


def silent(one: Dishonest, data: bytes) -> bytes:
    return b""


ANY: tuple[Callable[[Dishonest, bytes], bytes], ...] = (silent, flip, flip_resealed, truncated, replayed)
FAULTS: dict[str, tuple[Callable[[Dishonest, bytes], bytes], ...]] = {
    "Advert": (*ANY, on(m.Advert, copied_key), on(m.Advert, other_key)),
    "Shares": (
        *ANY, *(on(m.Shares, changed_boxes(name)) for name in ("box", "box", "self_digest", "key_digest")), on(m.Shares, fewer_boxes),
        on(m.Shares, wrong_commitment), on(m.Shares, wrong_own_digest), on(m.Shares, other_secret(0)), on(m.Shares, other_secret(1)),
        on(m.Shares, mixed_polynomials),
    ),
    "Masked": (
        *ANY, on(m.Masked, other_vector), on(m.Masked, wrong_length), *[on(m.Masked, false_complaint)] * 3, on(m.Masked, absurd_complaint),
    ),
    "Opening": (*ANY, on(m.Opening, false_opening), on(m.Opening, false_opening), on(m.Opening, fewer_openings)),
    "Consistent": (*ANY, on(m.Consistent, bad_signature)),
    "Reveal": (*ANY, *[on(m.Reveal, wrong_share)] * 3, on(m.Reveal, fewer_shares)),
}  # fmt: skip
"""By the kind of message that the server waits for."""


@dataclass
class Ended:
    """How an attempt ended. `refused` are codes by client."""

    play: Play
    one: Dishonest
    error: TooFewClients | SumFailed | None = None
    refused: dict[int, str] = field(default_factory=dict)
    masked: dict[int, bytes] = field(default_factory=dict)


def attempt(
    agreed: Terms, number: int, faults: Mapping[str, Callable[[Dishonest, bytes], bytes]], drops: Mapping[int, str], seed: int
) -> Ended:
    """One attempt with the dishonest client `number` (not in the cohort: none)."""
    play = Play.of(agreed, str(seed))
    one = Dishonest(play, number, random.Random(seed))
    ended = Ended(play, one)
    gone: set[int] = set()
    while play.server.stage is not ServerStage.DONE:
        try:
            outbox = play.server.advance()
        except (TooFewClients, SumFailed) as error:
            ended.error = error
            return ended
        waits = play.server.collected[0] if outbox else ""
        gone |= {client for client, kind in drops.items() if kind == waits}
        for client in sorted(outbox.keys() - gone, key=lambda client: (client == number, client)):
            machine = play.clients[client]
            if client == number and waits == "Shares":
                one.box_seed = machine._state.box_seed
            try:
                reply = machine.receive(outbox[client], *(play.values(client) if machine.wants_values else ()))
            except (RemoteError, TooFewClients):
                # Only one that had to do with an own message of before, which it changed, may be at a loss.
                assert client == number, f"honest client {client} refuses what the honest server sends"
                continue
            play.up[type(m.decode_client(reply, 1000)).__name__, client] = reply
            if client == number and waits in faults:
                reply = faults[waits](one, reply)
            if not reply:
                continue
            try:
                if play.server.receive(client, reply) == "Masked":
                    ended.masked[client] = reply
            except RemoteError as error:
                if client != number or error.party not in (number, None):
                    raise AssertionError(f"what client {client} sends is refused: {error}") from error
                ended.refused[client] = error.code
    return ended


def honest_sum(ended: Ended) -> NDArray[np.int64]:
    """What the survivors' inputs add up to; the dishonest client's with what it changed in its masked vector."""
    agreed, number = ended.play.agreed, ended.one.number
    survivors = ended.play.server.result.survivors
    total = np.sum([levels(client, agreed.dimension, agreed.levels).astype(np.int64) for client in survivors], axis=0)
    if number in survivors:
        dtype = "<u2" if agreed.bits == 16 else "<u4"
        sent, true = (m.decode_client(data, 1000) for data in (ended.masked[number], ended.play.up["Masked", number]))
        assert isinstance(sent, m.Masked)
        assert isinstance(true, m.Masked)
        delta = np.frombuffer(sent.vector, dtype) - np.frombuffer(true.vector, dtype)
        total = vectors.unwrap(vectors.wrap(total, agreed.bits) + delta[: agreed.dimension], agreed.bits).astype(np.int64)
    return np.asarray(total)


def check(agreed: Terms, number: int, faults: Mapping[str, Any], drops: Mapping[int, str], seed: int) -> str:
    """Runs one case; raises AssertionError unless all holds. Returns how it ended."""
    ended = attempt(agreed, number, faults, drops, seed)
    server, error = ended.play.server, ended.error
    honest = [client for client in agreed.cohort if client != number and client not in drops]
    if error is None:
        # Under other keys than it advertised its masks are noise: what it adds is then its own choice, as any vector is.
        if not (ended.one.arbitrary and number in server.result.survivors and "Advert" in faults):
            assert server.result.block().tolist() == honest_sum(ended).tolist()
        assert set(honest) <= set(server.result.survivors)
        return "sum"
    if isinstance(error, TooFewClients):
        assert len(honest) < fewest_survivors(agreed), f"{len(honest)} honest clients are enough"
        return "too few"
    assert set(error.offenders) <= {number}, f"offenders: {error.offenders}"
    assert set(error.absent) <= {number, *drops}
    if error.code == "out-of-range":
        assert ended.one.arbitrary
        return error.code
    if not error.repeatable:
        assert (error.code, error.offenders) == ("false-secret", (number,))
        return error.code
    assert error.offenders or error.absent
    try:
        again = retaken(agreed, (*error.offenders, *error.absent), public_entropy("again"))
    except TooFewClients:
        assert len(agreed.cohort) - 1 - len(drops) < agreed.min_cohort
        return "too few"
    number = number if number in again.cohort else -1
    check(again, number, {} if number < 0 else faults, {client: kind for client, kind in drops.items() if client in again.cohort}, seed + 1)
    return "again"


def fuzz(count: int, seed: int = 0) -> Counter[str]:
    """`count` random cases; how often each ending came."""
    endings: Counter[str] = Counter()
    for case in range(seed, seed + count):
        rng = random.Random(case)
        mode = rng.choice(("active", "passive"))
        n = rng.randint(3, 6)
        agreed = terms(n, mode, dimension=3, bits=rng.choice((16, 32)), following=rng.choice((None, (6, 0))))
        number = rng.randrange(n)
        stages = [kind for kind in FAULTS if mode == "active" or kind != "Consistent"]
        chosen = set(rng.sample(stages, rng.choice((1, 1, 2))))
        # An opening is asked for only where there is a complaint.
        faults = {"Shares": on(m.Shares, changed_boxes("box"))} if "Opening" in chosen else {}
        faults |= {kind: rng.choice(FAULTS[kind]) for kind in chosen}
        drops = {}
        if rng.random() < 0.3:
            drops[rng.choice([client for client in range(n) if client != number])] = rng.choice([*stages])
        try:
            endings[check(agreed, number, faults, drops, case)] += 1
        except AssertionError as error:
            raise AssertionError(f"case {case}: {error}") from error
    return endings


if __name__ == "__main__":
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(dict(fuzz(total, int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
