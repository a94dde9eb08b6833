"""Attacks on comparisons of shared vectors: each coalition of holders up to the threshold with the server; the server with its own keys.

Checks: "no `share_colluding` of the holders, with the server and any clients, learn more of a vector than its inner products with what
those clients deposit, also if they deviate" and "Clients check whose keys they share under" (aggregation/shares.py, Guarantee). Here no
client helps. In `chosen_deposits` an accomplice does: it deposits unit vectors, and the first holder of shares opens its products with
them. That checks what is written beside the guarantee: clients that choose their vectors learn "with the first holder coordinates: of each
epoch, and a client lets its vectors into `most_epochs` at most".
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
from ...federation.transforms import sketched
from ...protocols.entropy import system_entropy
from ...protocols.errors import ProtocolError
from ...protocols.keys import Identity, agree, public_key, unseal
from ...protocols.shared_gram import LEAD, GramTerms, deposit
from ...protocols.shared_gram.depositing import box_binding
from ...protocols.shared_gram.prime_field import Elements, at_zero, plus, signed, times
from ...protocols.shared_gram.terms import LABEL, Announced, Deposit, HolderKey, announcement, decode, encode
from ...types import Array
from .key_holder import encrypted_comparisons
from .liar import HOLDER
from .outcome import ActiveAttack, ActiveGuess
from .scene import AttackRun

__all__ = ["CHOSEN_DEPOSITS", "HOLDER_COALITIONS", "SWAPPED_SHARES"]


def holder_coalitions(run: AttackRun) -> ActiveGuess:
    """For each coalition of holders: they run the server's machines, answer as they should, and keep their shares of the victim's vectors.

    They also ask each other holder to contribute for a set of their own, whose masks they know, and pass it a key of theirs as another
    holder's. The guess is what their shares interpolate to, of the coalition where that is shortest.
    """
    protection = run.scene.config.protection
    held = run.fed.compute(run.scene.signature)["signature"]
    guesses: list[Array] = []
    for coalition in combinations(range(protection.share_holders), protection.share_colluding):
        parties = {number: own_holder(run, number) for number in coalition}
        run.liar.controlled.update({HOLDER - number: party for number, party in parties.items()})
        with suppress(ProtocolError, InputError):
            run.fed.gram(held, ClusterByAngles())
        epochs = [exchange.ask for exchange in run.liar.exchanges if isinstance(exchange.ask, m.Deposits)]
        if epochs:
            guesses += _pooled(run, parties, epochs[-1].epoch)
            _ask_alone(run, coalition, epochs[-1])
        for number in coalition:
            del run.liar.controlled[HOLDER - number]
    # the attacker has no truth to choose by: vectors are within the bound, so the shortest guess is the likeliest
    nearest = min(guesses, key=lambda guess: float(np.linalg.norm(guess)), default=None)
    return ActiveGuess(
        nearest, "signature", note=f"{len(guesses)} coalitions of {protection.share_colluding} of {protection.share_holders}"
    )


def own_holder(run: AttackRun, number: int) -> ShareHolderParty:
    """A holder that the server runs, with the true one's identity."""
    settings = Settings(run.holders[number], run.scene.config.protection, run.roster, role="key-holder")
    party = ShareHolderParty(settings, ObjectStore())
    party.receive(m.encode(m.Enrol(m.VERSION, run.fed.session, system_entropy(16))))
    return party


def _pooled(run: AttackRun, parties: Mapping[int, ShareHolderParty], epoch: int) -> list[Array]:
    """What the shares of a coalition interpolate to, as if they were enough."""
    machines = {number: party.machine(run.fed.session, epoch) for number, party in parties.items()}
    shares = {number: machine.share_of(run.victim) for number, machine in machines.items()}
    if any(share is None for share in shares.values()):
        return []
    terms = next(iter(machines.values())).terms
    return [_interpolated(terms, {number: share for number, share in shares.items() if share is not None})]


def _interpolated(terms: GramTerms, shares: Mapping[int, Elements]) -> Array:
    """The vectors (p·d,) at zero of the polynomial of least degree through these shares."""
    weights = at_zero([number + 1 for number in shares])
    total = np.zeros((terms.p, terms.dimension), dtype=np.uint64)
    for weight, share in zip(weights, shares.values(), strict=True):
        total = plus(total, times(share, weight))
    return np.ravel(signed(total) / terms.scale)


def _ask_alone(run: AttackRun, coalition: Sequence[int], deposits: m.Deposits) -> None:
    """Ask the other holders for what they must not give."""
    for other in range(run.scene.config.protection.share_holders):
        if other in coalition:
            continue
        alone = tuple(sorted({*coalition, other, LEAD}))
        for cohort in (alone, tuple(sorted({other, LEAD}))):
            ask = m.Contribute(deposits.session, deposits.epoch, tuple(run.clients), len(run.clients), cohort)
            run.liar.ask({HOLDER - other: ask}, "shares contributions")
        run.liar.ask({HOLDER - other: msgspec.structs.replace(deposits, keys=_with_own(run, deposits, other))}, "shares deposits")


def _with_own(run: AttackRun, deposits: m.Deposits, other: int) -> bytes:
    """The keys of an epoch with one of the server's in place of an honest holder's, whose signature it lacks."""
    protection = run.scene.config.protection
    asks = [exchange.ask for exchange in run.liar.exchanges]
    asked = next(ask for ask in asks if isinstance(ask, m.ShareKey) and ask.epoch == deposits.epoch)
    terms = terms_of(protection, deposits.session, deposits.epoch, run.roster, asked.p, asked.dimension)
    message, identity = decode(deposits.keys, Announced, terms), Identity.create(0)
    made = decode(announcement(terms, other, identity, public_key(system_entropy(32))), HolderKey, terms)
    return encode(Announced(message.terms, tuple(made if key.holder == other else key for key in message.keys)))


def swapped_shares(run: AttackRun) -> ActiveGuess:
    """The server presents keys of its own to the victim as those of all holders."""
    held = run.fed.compute(run.scene.signature)["signature"]
    protection, identity = run.scene.config.protection, Identity.create(0)
    seeds = [system_entropy(32) for _ in range(protection.share_holders)]
    made: list[tuple[GramTerms, bytes]] = []
    uploads: list[bytes] = []

    def send(client: int, ask: m.PartyRequest, stage: str) -> m.PartyRequest:
        if client != run.victim or not isinstance(ask, m.Give) or ask.epoch is None:
            return ask
        shape = run.scene.signature.width, math.prod(run.scene.population.shape)
        terms = terms_of(protection, ask.session, ask.epoch.number, run.roster, *shape)
        keys = [decode(announcement(terms, number, identity, public_key(seed)), HolderKey, terms) for number, seed in enumerate(seeds)]
        made.append((terms, encode(Announced(terms.digest, tuple(keys)))))
        return msgspec.structs.replace(ask, epoch=m.EpochKey(ask.epoch.number, terms.digest, made[-1][1]))

    def receive(client: int, ask: m.PartyRequest, answer: m.Answer, stage: str) -> m.Answer:
        if client == run.victim and stage == "gram" and isinstance(answer, m.Given) and len(answer.values) == 1:
            uploads.append(np.asarray(answer.values[0].value).tobytes())
        return answer

    run.liar.send, run.liar.receive = send, receive
    with suppress(ProtocolError, InputError):
        run.fed.gram(held, ClusterByAngles())
    guess = None
    for (terms, keys), upload in zip(made, uploads, strict=False):
        with suppress(ProtocolError):
            guess = _opened(terms, keys, seeds, decode(upload, Deposit, terms))
    return ActiveGuess(guess, "signature")


def _opened(terms: GramTerms, keys: bytes, seeds: Sequence[bytes], message: Deposit) -> Array:
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


# --- an accomplice

EPOCHS = 4
"""So many epochs are opened. As many as clients allow (`most_epochs`) would show more."""


def chosen_deposits(run: AttackRun) -> ActiveGuess:
    """The victim's vectors are compared in several epochs, each time with other unit vectors. Raises `InputError` without an accomplice."""
    if not run.accomplices:
        raise InputError(f"of {len(run.clients)} clients none can be an accomplice; more are needed")
    held = run.fed.compute(run.scene.signature)["signature"]
    p, dimension = run.scene.signature.width, int(np.prod(run.scene.population.shape))
    length = min(1.0, run.scene.config.protection.share_bound)
    helper, holder = run.accomplices[0], own_holder(run, LEAD)
    run.liar.controlled[HOLDER - LEAD] = holder
    guess, opened = np.zeros((p, dimension)), 0

    def receive(client: int, ask: m.PartyRequest, answer: m.Answer, stage: str) -> m.Answer:
        if client != helper or not isinstance(ask, m.Give) or ask.epoch is None:
            return answer
        return _deposited(run, ask, helper, length * np.eye(dimension)[opened * p : (opened + 1) * p])

    run.liar.receive = receive
    with suppress(ProtocolError, InputError):
        while opened < min(EPOCHS, dimension // p):
            run.fed.gram(held, ClusterByAngles())
            order, gram = holder.seen(run.fed.session, opened)
            helper_row, victim_row = order.index(helper) * p, order.index(run.victim) * p
            guess[:, opened * p : (opened + 1) * p] = gram[victim_row : victim_row + p, helper_row : helper_row + p] / length
            opened += 1
    at = [row * dimension + column for row in range(p) for column in range(opened * p)]
    note = f"{len(at)} of {guess.size} coordinates in {opened} epochs, one accomplice"
    return ActiveGuess(np.ravel(guess) if opened else None, "signature", note=note, at=at)


def _deposited(run: AttackRun, ask: m.Give, client: int, rows: Array) -> m.Given:
    """An accomplice's deposit of these rows (p, d)."""
    protection, epoch = run.scene.config.protection, ask.epoch
    assert epoch is not None
    terms = terms_of(protection, ask.session, epoch.number, run.roster, *rows.shape)
    reduced = np.atleast_2d(sketched(epoch.number, protection.sketched)(rows))
    upload = deposit(terms, epoch.announcement, run.roster, run.identities[client], reduced)
    return m.Given((m.NamedArray("bytes", np.frombuffer(upload, dtype=np.uint8)),), 0)


CHOSEN_DEPOSITS = ActiveAttack(
    "coordinates of a client's vectors from an accomplice's unit vectors, opened by the first holder of shares",
    "docs/guarantees.md: a client that colludes with the first holder reads coordinates in each epoch", chosen_deposits, shared_comparisons,
    claimed=lambda config: False,
)  # fmt: skip
