"""The attacks on sums in one message, each a function of an `AttackRun`, and what each checks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from ....aggregation.sum_helper import SumHelperParty
from ....experiments.config.config import Config
from ....federation import messages as m
from ....protocols import hpke
from ....protocols.entropy import system_entropy
from ....protocols.errors import HelpersFailed, ProtocolError, RemoteError
from ....protocols.keys import Identity, sign
from ....protocols.one_message import HelpedServer, HelpedTerms, seed_sets
from ....protocols.one_message import messages as steps
from ....protocols.one_message.client import signed_upload
from ....protocols.one_message.terms import context, held
from ....protocols.secagg.vectors import Sum, add_masks
from ....types import Array
from ..liar import HOLDER, Refusal
from ..outcome import ActiveAttack, ActiveFigure, ActiveGuess
from ..scene import AttackRun
from .collected import Collected, Traitor, collected, difference, true_keys

__all__ = [
    "COPIED_BOX", "LATE_UPLOAD", "LYING_HELPER", "OTHER_SEED", "ROLLED_BACK_HELPER", "SECOND_HELPED_SUM", "SECOND_SET", "SPLIT_VIEW",
    "SWAPPED_HELPER", "helped_sums_claimed",
]  # fmt: skip

GUARANTEE = (
    "aggregation/helped.py: the server, helpers_colluding of the helpers and any clients learn the sum over one set, and nothing else"
)
EXACT = "protocols/one_message/server.py: the exact integer sum of the vectors that the members masked, or there is none"
SAMPLES = 1e-3
"""A sum that is off by a larger share of its length is wrong."""


# --- two sets of one slot


def split_view(run: AttackRun) -> ActiveGuess:
    """Half of the honest helpers are shown all clients, the others all but the victim; the helpers that collude sign both."""
    sums = collected(run, run.compute(), run.clients)
    sums.deliver()
    return ActiveGuess(_two_views(sums, run), "update", run.honest)


def _two_views(sums: Collected, run: AttackRun) -> Array | None:
    half = (len(sums.loyal) + 1) // 2
    totals: list[Array | None] = []
    for helpers, members in ((sums.loyal[:half], run.clients), (sums.loyal[half:], run.others)):
        signatures = sums.sign(helpers, members) | _forged(sums, members)
        totals.append(sums.opened(members, _masks_of_two_kinds(sums, helpers, members, signatures)))
    return difference(*totals)


def _forged(sums: Collected, members: Sequence[int]) -> dict[int, bytes]:
    """Signatures of the helpers that collude, whatever they signed before."""
    name = _name(sums, members)
    return {helper: sign(sums.run.holders[helper], steps.CLOSE, *steps.closing(helper, name)) for helper in sums.traitors}


def _name(sums: Collected, members: Sequence[int]) -> bytes:
    """The name of a set of uploads."""
    digests = [steps.signed_digest(sums.terms, steps.decode_upload(sums.uploads[client], sums.terms)) for client in sorted(members)]
    return steps.set_name(context(sums.terms), digests)


def _masks_of_two_kinds(sums: Collected, helpers: Sequence[int], members: Sequence[int], signatures: Mapping[int, bytes]) -> Array | None:
    """All masks of a set: seeds of the helpers that collude are read by the server, the others are asked for."""
    own: dict[int, Array] = {}
    for helper in sums.traitors:
        opened = seeds_of(sums, helper)
        for place, number in enumerate(held(sums.terms, helper)):
            keys = [
                (steps.mask_key(context(sums.terms), client, number, opened[client][32 * place : 32 * place + 32]), 1) for client in members
            ]
            own[number] = np.zeros_like(sums.vector(members[0]))
            add_masks(own[number], keys)
    left = [number for number in range(len(seed_sets(sums.terms.helpers, sums.terms.colluding))) if number not in own]
    total = np.sum([*own.values()], axis=0, dtype=sums.vector(members[0]).dtype)
    signed = tuple(steps.SetSignature(helper, signature) for helper, signature in sorted(signatures.items()))
    for number in left:
        knowing = [helper for helper in helpers if number in held(sums.terms, helper)]
        if not knowing:
            return None
        answer = sums.ask(knowing[0], steps.OpenSet(sums.terms, steps.ids(members), signed, ((number,),), ()), "Open")
        if not isinstance(answer, steps.OpenedMasks):
            return None
        total = total + sums._residues(answer.masks[0])
    return np.asarray(total)


def seeds_of(sums: Collected, helper: int) -> dict[int, bytes]:
    """The seeds that a helper of the server's opens, by client."""
    traitor = sums.run.liar.controlled[HOLDER - helper]
    assert isinstance(traitor, Traitor)
    secret = hpke.secret_key(SumHelperParty(traitor.settings, traitor.store).round_seed(sums.run.fed.session))
    opened: dict[int, bytes] = {}
    for client, data in sums.uploads.items():
        upload = steps.decode_upload(data, sums.terms)
        box = next(box.box for box in upload.boxes if box.helper == helper)
        opened[client] = hpke.unseal(secret, box, steps.box_info(context(sums.terms), client, helper))
    return opened


def second_set(run: AttackRun) -> ActiveGuess:
    """A sum over all clients, then in the same slot one over all but the victim."""
    sums = collected(run, run.compute(), run.clients)
    sums.deliver()
    return ActiveGuess(difference(_whole(sums, run.clients), _whole(sums, run.others)), "update", run.honest)


def _whole(sums: Collected, members: Sequence[int]) -> Array | None:
    """The sum over a set, with signatures of all helpers that give them."""
    helpers = range(sums.terms.helpers)
    return sums.opened(members, sums.masks(helpers, members, sums.sign(helpers, members)))


def late_upload(run: AttackRun) -> ActiveGuess:
    """The server holds the victim's upload back until the sum of the others is open, then has the helpers close the set with it."""
    sums = collected(run, run.compute(), run.clients)
    late = sums.uploads.pop(run.victim)
    sums.deliver()
    without = _whole(sums, run.others)
    again = replace(sums, server=HelpedServer(sums.terms, true_keys(run), run.roster), uploads={run.victim: late})
    again.deliver()
    sums.uploads[run.victim] = late
    return ActiveGuess(difference(_whole(sums, run.clients), without), "update", run.honest)


def second_helped_sum(run: AttackRun) -> ActiveGuess:
    """A sum over all clients, then in a slot of its own one of the same value over all but the victim."""
    value = run.compute()
    totals: list[Array | None] = []
    for number, members in enumerate((run.clients, run.others)):
        sums = collected(run, value, members, number)
        sums.deliver()
        totals.append(_whole(sums, members) if set(members) <= set(sums.uploads) else None)
    return ActiveGuess(difference(*totals), "update", run.honest)


def rolled_back_helper(run: AttackRun) -> ActiveGuess:
    """As many helpers as may collude are set back to a copy of before they signed, so that they sign a second set by themselves."""
    sums = collected(run, run.compute(), run.clients)
    sums.deliver()
    traitors = {helper: run.liar.controlled[HOLDER - helper] for helper in sums.traitors}
    copies = {helper: traitor.copy() for helper, traitor in traitors.items() if isinstance(traitor, Traitor)}
    half = (len(sums.loyal) + 1) // 2
    totals: list[Array | None] = []
    for helpers, members in ((sums.loyal[:half], run.clients), (sums.loyal[half:], run.others)):
        for helper, kept in copies.items():
            traitor = traitors[helper]
            assert isinstance(traitor, Traitor)
            traitor.back(kept)
        signing = (*helpers, *sums.traitors)
        totals.append(sums.opened(members, sums.masks(signing, members, sums.sign(signing, members))))
    return ActiveGuess(difference(*totals), "update", run.honest)


# --- uploads and keys of the attacker's


def copied_box(run: AttackRun) -> ActiveGuess:
    """An accomplice uploads the victim's masked vector and boxes as its own, so that a set of accomplices counts the victim twice."""
    sums = collected(run, run.compute(), run.clients)
    own, *others = run.accomplices
    upload = steps.decode_upload(sums.uploads[run.victim], sums.terms)
    sums.uploads[own] = steps.encode(
        signed_upload(run.identities[own], sums.terms, upload.names, upload.vector, upload.boxes, upload.commitments)
    )
    sums.deliver()
    members = sorted({run.victim, own, *others})
    spare = [client for client in run.clients if client not in members]
    members = sorted([*members, *spare[: max(0, sums.terms.minimum - len(members))]])
    total = _whole(sums, members)
    known = [run.scene.truth("update", client) for client in others]  # what accomplices put in themselves
    guess = None if total is None or len(members) > len(others) + 2 else (total - np.sum(known, axis=0)) / 2
    return ActiveGuess(guess, "update", run.honest)


def other_seed(run: AttackRun) -> ActiveFigure:
    """An accomplice deals the first helper other seeds than all others, so that a good helper seems to lie, or the sum is wrong."""
    sums = collected(run, run.compute(), run.clients)
    own = run.accomplices[0]
    upload = steps.decode_upload(sums.uploads[own], sums.terms)
    key = steps.decode_announcement(true_keys(run)[0]).key
    seeds = system_entropy(32 * len(held(sums.terms, 0)))
    box = steps.SeedBox(0, hpke.seal(key, seeds, steps.box_info(upload.context, own, 0)))
    boxes = (box, *upload.boxes[1:])
    sums.uploads[own] = steps.encode(signed_upload(run.identities[own], sums.terms, upload.names, upload.vector, boxes, upload.commitments))
    codes = sums.deliver()
    blamed = None if own in codes else float(len(_finished(sums)[1] - set(sums.traitors)))
    return ActiveFigure("good_helpers_blamed", blamed, 0.0, lower_is_better=False)


def _finished(sums: Collected) -> tuple[Sum[HelpedTerms] | None, set[int]]:
    """The sum as an honest server finishes it, and the helpers that it names, or of which one lied."""
    try:
        messages = sums.server.close()
        stage = "Close"
        while messages:
            answers = {helper: sums._asked(helper, data, stage) for helper, data in messages.items()}
            messages = sums.server.advance({helper: steps.encode(answer) for helper, answer in answers.items() if answer is not None})
            stage = "Open"
    except HelpersFailed as error:
        return None, set(error.helpers)
    except ProtocolError:
        return None, set()
    return sums.server.result, sums.server.liars


def lying_helper(run: AttackRun) -> ActiveFigure:
    """Helpers that collude send masks of other numbers, signed. The figure is how far the mean that an honest server opens is off."""
    sums = collected(run, run.compute(), run.clients)
    sums.deliver()
    for helper in sums.traitors:
        run.liar.controlled[HOLDER - helper] = _Lying(sums, helper)
    result, named = _finished(sums)
    run.liar.refused.extend(Refusal(HOLDER - helper, "sum Open", "masks-differ") for helper in sorted(named))
    if result is None or not set(sums.traitors).isdisjoint(named):
        return ActiveFigure("error_of_the_sum", None, 0.0, lower_is_better=False)
    truth = np.sum([run.scene.truth("update", client) for client in result.survivors], axis=0)
    error = float(np.linalg.norm(result.total() - truth) / np.linalg.norm(truth))
    return ActiveFigure("error_of_the_sum", error, SAMPLES, lower_is_better=False)


class _Lying:
    """A helper of the server's that moves the first value of each mask by half of the range, under its good signature."""

    def __init__(self, sums: Collected, helper: int) -> None:
        self._sums, self._helper, self._honest = sums, helper, sums.run.liar.controlled[HOLDER - helper]

    def receive(self, data: bytes) -> bytes:
        answer, ask = m.decode_answer(self._honest.receive(data)), m.decode_ask(data)
        if not isinstance(ask, m.Help) or not isinstance(answer, m.Helped):
            return m.encode(answer)
        return m.encode(m.Helped(tuple(self._changed(*pair) for pair in zip(ask.messages, answer.answers, strict=False))))

    def _changed(self, message: bytes, answer: m.Stepped | m.Refused) -> m.Stepped | m.Refused:
        try:
            ask = steps.decode_to_helper(message)
        except RemoteError:
            return answer
        if not isinstance(ask, steps.OpenSet) or not isinstance(answer, m.Stepped):
            return answer
        opened = steps.decode_from_helper(answer.message, self._sums.terms)
        assert isinstance(opened, steps.OpenedMasks)
        width = self._sums.terms.bits // 8
        masks = tuple(mask[: width - 1] + bytes([mask[width - 1] ^ 0x20]) + mask[width:] for mask in map(bytes, opened.masks))
        hashes = tuple(steps.digest_of(mask) for mask in masks) + tuple(bytes(32) for _ in opened.hashes[len(masks) :])
        parts = steps.mask_parts(self._helper, _name(self._sums, steps.names(ask.members)), (*ask.send, *ask.check), hashes)
        signature = sign(self._sums.run.holders[self._helper], steps.OPEN, *parts)
        return m.Stepped(steps.encode(msgspec.structs.replace(opened, masks=masks, hashes=hashes, signature=signature)))


def swapped_helper(run: AttackRun) -> ActiveGuess:
    """The server presents keys of its own to the victim as those of all helpers."""
    helpers = run.scene.config.protection.helpers
    identity, seeds = Identity.create(0), [system_entropy(hpke.SEED_BYTES) for _ in range(helpers)]
    keys: dict[int, bytes] = {}
    for helper, seed in enumerate(seeds):
        message = steps.KeyAnnouncement(helper, run.fed.session, run.turn, hpke.public_key(seed), bytes(64))
        signature = sign(identity, steps.KEY, *steps.key_parts(run.roster, message))
        keys[helper] = steps.encode(msgspec.structs.replace(message, signature=signature))
    sums = collected(run, run.compute(), [run.victim], keys=keys)
    guess = None
    if run.victim in sums.uploads:
        agreed, row = context(sums.terms), sums.vector(run.victim).copy()
        opened: dict[int, bytes] = {}
        for box in steps.decode_upload(sums.uploads[run.victim], sums.terms).boxes:
            text = hpke.unseal(hpke.secret_key(seeds[box.helper]), box.box, steps.box_info(agreed, run.victim, box.helper))
            opened |= {number: text[32 * at : 32 * at + 32] for at, number in enumerate(held(sums.terms, box.helper))}
        add_masks(row, [(steps.mask_key(agreed, run.victim, number, seed), -1) for number, seed in opened.items()])
        guess = sums.values(row)
    return ActiveGuess(guess, "update", run.honest)


def helped_sums_claimed(config: Config) -> bool:
    """Whether helpers see to it that the guarantee covers a server that lies."""
    return config.protection.sums.helped


def _helped(config: Config) -> str:
    """Why an attack on sums in one message does not apply, empty if it does."""
    if not config.protection.sums.helped:
        return f"there are no helpers under sum = {config.protection.sum!r}"
    if config.privacy.unit == "client":
        return "sums carry noise, which this attack does not ask for"
    return ""


def _attack(summary: str, deviate: Any, guarantee: str = GUARANTEE) -> ActiveAttack:
    return ActiveAttack(summary, guarantee, deviate, _helped, helped_sums_claimed)


SPLIT_VIEW = _attack("one update by showing the helpers two sets of clients, with those that collude", split_view)
SECOND_SET = _attack("one update from a second set of clients in one slot", second_set)
LATE_UPLOAD = _attack("one update by closing a set again after a late upload", late_upload)
SECOND_HELPED_SUM = _attack("one update from a second sum of one value in another slot, over one client fewer", second_helped_sum)
ROLLED_BACK_HELPER = _attack("one update by setting helpers back to copies of before they signed", rolled_back_helper)
COPIED_BOX = _attack("one update by an accomplice that uploads it as its own", copied_box)
SWAPPED_HELPER = _attack("one update under helpers' keys of the server's own", swapped_helper)
OTHER_SEED = _attack("a good helper that seems to lie, by a client that deals unequal seeds", other_seed, EXACT)
LYING_HELPER = _attack("a wrong sum by helpers that send false masks", lying_helper, EXACT)
