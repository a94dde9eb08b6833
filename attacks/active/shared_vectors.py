"""Attacks on comparisons of shared vectors: each coalition of holders up to the threshold with the server; the server with its own keys.

Checks: "no `share_colluding` of the holders, with the server and any clients, learn more of a vector than its inner products with what
those clients deposit, also if they deviate" and "Clients check whose keys they share under" (aggregation/shares.py, Guarantee). Here no
client helps.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations

import msgspec
import numpy as np

from ...aggregation.share_holders import ShareHolderParty, terms_of
from ...algorithms.pacfl import ClusterByAngles
from ...errors import InputError
from ...experiments.config.config import Config
from ...federation import messages as m
from ...federation.settings import Settings
from ...federation.store import ObjectStore
from ...protocols.entropy import system_entropy
from ...protocols.errors import ProtocolError
from ...protocols.keys import Identity, agree, public_key, unseal
from ...protocols.shared_gram import LEAD, Terms
from ...protocols.shared_gram.depositing import box_binding
from ...protocols.shared_gram.prime_field import Elements, at_zero, plus, signed, times
from ...protocols.shared_gram.terms import LABEL, Announced, Deposit, HolderKey, announcement, decode, encode
from ...types import Array
from .key_holder import encrypted_comparisons
from .liar import HOLDER
from .outcome import ActiveAttack, Guess
from .scene import Play

__all__ = ["HOLDER_COALITIONS", "SWAPPED_SHARES", "own_holder", "shared_comparisons"]


def holder_coalitions(play: Play) -> Guess:
    """For each coalition of holders: they run the server's machines, answer as they should, and keep their shares of the victim's vectors.

    They also ask each other holder to contribute for a set of their own, whose masks they know, and pass it a key of theirs as another
    holder's. The guess is what their shares interpolate to, of the coalition where that is shortest.
    """
    protection = play.scene.config.protection
    held = play.fed.compute(play.scene.signature)["signature"]
    guesses: list[Array] = []
    for coalition in combinations(range(protection.share_holders), protection.share_colluding):
        parties = {number: own_holder(play, number) for number in coalition}
        play.liar.puppets.update({HOLDER - number: party for number, party in parties.items()})
        with suppress(ProtocolError, InputError):
            play.fed.gram(held, ClusterByAngles())
        epochs = [one.ask for one in play.liar.exchanges if isinstance(one.ask, m.Deposits)]
        if epochs:
            guesses += _pooled(play, parties, epochs[-1].epoch)
            _ask_alone(play, coalition, epochs[-1])
        for number in coalition:
            del play.liar.puppets[HOLDER - number]
    # the attacker has no truth to choose by: vectors are within the bound, so the shortest guess is the likeliest
    nearest = min(guesses, key=lambda one: float(np.linalg.norm(one)), default=None)
    return Guess(nearest, "signature", note=f"{len(guesses)} coalitions of {protection.share_colluding} of {protection.share_holders}")


def own_holder(play: Play, number: int) -> ShareHolderParty:
    """A holder that the server runs, with the true one's identity."""
    settings = Settings(play.holders[number], play.scene.config.protection, play.roster, role="key-holder")
    party = ShareHolderParty(settings, ObjectStore())
    party.receive(m.encode(m.Enrol(m.VERSION, play.fed.session, system_entropy(16))))
    return party


def _pooled(play: Play, parties: Mapping[int, ShareHolderParty], epoch: int) -> list[Array]:
    """What the shares of a coalition interpolate to, as if they were enough."""
    machines = {number: party.machine(play.fed.session, epoch) for number, party in parties.items()}
    shares = {number: machine.share_of(play.victim) for number, machine in machines.items()}
    if any(share is None for share in shares.values()):
        return []
    terms = next(iter(machines.values())).terms
    return [_interpolated(terms, {number: share for number, share in shares.items() if share is not None})]


def _interpolated(terms: Terms, shares: Mapping[int, Elements]) -> Array:
    """The vectors (p·d,) at zero of the polynomial of least degree through these shares."""
    weights = at_zero([number + 1 for number in shares])
    total = np.zeros((terms.p, terms.dimension), dtype=np.uint64)
    for weight, share in zip(weights, shares.values(), strict=True):
        total = plus(total, times(share, weight))
    return np.ravel(signed(total) / terms.scale)


def _ask_alone(play: Play, coalition: Sequence[int], deposits: m.Deposits) -> None:
    """Ask the other holders for what they must not give."""
    for other in range(play.scene.config.protection.share_holders):
        if other in coalition:
            continue
        alone = tuple(sorted({*coalition, other, LEAD}))
        for one in (alone, tuple(sorted({other, LEAD}))):
            ask = m.Contribute(deposits.session, deposits.epoch, tuple(play.clients), len(play.clients), one)
            play.liar.ask({HOLDER - other: ask}, "shares contributions")
        play.liar.ask({HOLDER - other: msgspec.structs.replace(deposits, keys=_with_own(play, deposits, other))}, "shares deposits")


def _with_own(play: Play, deposits: m.Deposits, other: int) -> bytes:
    """The keys of an epoch with one of the server's in place of an honest holder's, whose signature it lacks."""
    protection = play.scene.config.protection
    asked = next(one.ask for one in play.liar.exchanges if isinstance(one.ask, m.ShareKey) and one.ask.epoch == deposits.epoch)
    terms = terms_of(protection, deposits.session, deposits.epoch, play.roster, asked.p, asked.dimension)
    message, mine = decode(deposits.keys, Announced, terms), Identity.create(0)
    made = decode(announcement(terms, other, mine, public_key(system_entropy(32))), HolderKey, terms)
    return encode(Announced(message.terms, tuple(made if one.holder == other else one for one in message.keys)))


def swapped_shares(play: Play) -> Guess:
    """The server presents keys of its own to the victim as those of all holders."""
    held = play.fed.compute(play.scene.signature)["signature"]
    protection, mine = play.scene.config.protection, Identity.create(0)
    seeds = [system_entropy(32) for _ in range(protection.share_holders)]
    made: list[tuple[Terms, bytes]] = []
    uploads: list[bytes] = []

    def say(client: int, ask: m.PartyRequest, stage: str) -> m.PartyRequest:
        if client != play.victim or not isinstance(ask, m.Give) or ask.epoch is None:
            return ask
        shape = play.scene.signature.width, math.prod(play.scene.population.shape)
        terms = terms_of(protection, ask.session, ask.epoch.number, play.roster, *shape)
        keys = [decode(announcement(terms, number, mine, public_key(seed)), HolderKey, terms) for number, seed in enumerate(seeds)]
        made.append((terms, encode(Announced(terms.digest, tuple(keys)))))
        return msgspec.structs.replace(ask, epoch=m.EpochKey(ask.epoch.number, terms.digest, made[-1][1]))

    def hear(client: int, ask: m.PartyRequest, answer: m.Answer, stage: str) -> m.Answer:
        if client == play.victim and stage == "gram" and isinstance(answer, m.Given) and len(answer.values) == 1:
            uploads.append(np.asarray(answer.values[0].value).tobytes())
        return answer

    play.liar.say, play.liar.hear = say, hear
    with suppress(ProtocolError, InputError):
        play.fed.gram(held, ClusterByAngles())
    guess = None
    for (terms, keys), upload in zip(made, uploads, strict=False):
        with suppress(ProtocolError):
            guess = _opened(terms, keys, seeds, decode(upload, Deposit, terms))
    return Guess(guess, "signature")


def _opened(terms: Terms, keys: bytes, seeds: Sequence[bytes], message: Deposit) -> Array:
    """The vectors (p·d,) of a deposit under keys of one's own."""
    shares = {}
    for number in range(terms.colluding + 1):
        binding = box_binding(terms, keys, message.client, number)
        opened = unseal(agree(seeds[number], message.ephemeral, LABEL + "box", binding), message.boxes[number], binding)
        shares[number] = np.frombuffer(opened, "<u8").astype(np.uint64).reshape(terms.p, terms.dimension)
    return _interpolated(terms, shares)


def shared_comparisons(config: Config) -> str:
    """Why there are no holders of shares."""
    if not config.protection.comparison.shared:
        return f"vectors are not shared among holders under gram = {list(config.protection.gram)}"
    return encrypted_comparisons(config)


HOLDER_COALITIONS = ActiveAttack(
    "one client's vectors from each coalition of holders of shares, up to the threshold, with the server",
    "shares: no share_colluding of the holders, with the server, learn more of a vector than its inner products, also if they deviate",
    holder_coalitions, shared_comparisons, claimed=lambda config: True, accomplices=False,
)  # fmt: skip
SWAPPED_SHARES = ActiveAttack(
    "keys of the server's own in place of those of the holders of shares", "shares: clients check whose keys they share under",
    swapped_shares, shared_comparisons, claimed=lambda config: True, accomplices=False,
)  # fmt: skip
