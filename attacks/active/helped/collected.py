"""A sum in one message after the uploads, which the attacker goes on with by hand, and helpers that the server runs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ....aggregation.secagg import bound
from ....aggregation.sum_helper import SumHelperParty
from ....contract.handles import Held, PartLayout
from ....federation import messages as m
from ....federation.settings import Settings
from ....federation.store import MemoryStore
from ....protocols.entropy import system_entropy
from ....protocols.one_message import HelpedServer, HelpedTerms, make_terms, seed_sets
from ....protocols.one_message import messages as steps
from ....protocols.one_message.terms import held
from ....protocols.secagg.vectors import decode, unwrap
from ....types import Array
from ..liar import HOLDER
from ..scene import AttackRun

__all__ = ["Collected", "Traitor", "collected", "difference", "true_keys"]

FIRST = 1 << 32
"""The number of the first such sum in a round, beyond those of an honest server."""


class Traitor:
    """A helper that the server runs, with the true one's identity; `back` sets its store back to an earlier copy."""

    def __init__(self, run: AttackRun, number: int) -> None:
        self.settings = Settings(run.holders[number], run.scene.config.protection, run.roster, role="key-holder")
        self.store = MemoryStore()
        self.receive(m.encode(m.Enrol(m.VERSION, run.fed.session, system_entropy(16))))

    def receive(self, data: bytes) -> bytes:
        return SumHelperParty(self.settings, self.store).receive(data)

    def copy(self) -> dict[str, bytes]:
        """All that it keeps."""
        return dict(self.store)

    def back(self, kept: Mapping[str, bytes]) -> None:
        self.store.clear()
        self.store.update(kept)


@dataclass(eq=False)
class Collected:
    """A sum after the uploads, which the attacker goes on with by hand."""

    run: AttackRun
    terms: HelpedTerms
    server: HelpedServer
    uploads: dict[int, bytes] = field(default_factory=dict)

    @property
    def traitors(self) -> range:
        """The helpers that work with the server: the last ones."""
        return range(self.terms.helpers - self.terms.colluding, self.terms.helpers)

    @property
    def loyal(self) -> range:
        return range(self.traitors.start)

    def ask(self, helper: int, message: msgspec.Struct, stage: str) -> Any:
        """A helper's answer; None if it refuses."""
        return self._asked(helper, steps.encode(message), stage)

    def _asked(self, helper: int, data: bytes, stage: str) -> Any:
        ask = m.Help(self.run.fed.session, self.terms.round, (data,))
        answer = self.run.liar.ask({HOLDER - helper: ask}, f"sum {stage}").get(HOLDER - helper)
        first = answer.answers[0] if isinstance(answer, m.Helped) and answer.answers else None
        return steps.decode_from_helper(first.message, self.terms) if isinstance(first, m.Stepped) else None

    def deliver(self) -> dict[int, str]:
        """Pass the uploads to all helpers; whose uploads one of them cannot use, and why."""
        for client, data in self.uploads.items():
            self.server.receive(client, data)
        codes: dict[int, str] = {}
        answers: dict[int, bytes] = {}
        for helper, data in self.server.deliver().items():
            answer = self._asked(helper, data, "Delivery")
            if isinstance(answer, steps.UploadsRead):
                answers[helper] = steps.encode(answer)
                codes |= {refused.client: refused.code for refused in answer.refused}
        self.server.delivered(answers)
        return codes

    def sign(self, helpers: Collection[int], members: Sequence[int]) -> dict[int, bytes]:
        """Helpers' signatures of a set."""
        closed = {helper: self.ask(helper, steps.CloseSet(self.terms, steps.ids(members)), "Close") for helper in helpers}
        return {helper: answer.signature for helper, answer in closed.items() if isinstance(answer, steps.SignedSet)}

    def masks(self, helpers: Sequence[int], members: Sequence[int], signatures: Mapping[int, bytes]) -> Array | None:
        """The sum of all masks of a set, from these helpers; None if they refuse."""
        left, total = set(range(len(seed_sets(self.terms.helpers, self.terms.colluding)))), None
        signed = tuple(steps.SetSignature(helper, signature) for helper, signature in sorted(signatures.items()))
        for helper in helpers:
            group = tuple(seed for seed in held(self.terms, helper) if seed in left)
            if not group:
                continue
            answer = self.ask(helper, steps.OpenSet(self.terms, steps.ids(members), signed, (group,), ()), "Open")
            if isinstance(answer, steps.OpenedMasks):
                mask = self._residues(answer.masks[0])
                total, left = mask if total is None else total + mask, left - set(group)
        return None if left else total

    def opened(self, members: Sequence[int], masks: Array | None) -> Array | None:
        """The sum (d,) of some clients' values, given the sum of their masks."""
        if masks is None:
            return None
        total = np.sum([self.vector(client) for client in members], axis=0, dtype=masks.dtype) - masks
        return self.values(total)

    def vector(self, client: int) -> Array:
        """A client's masked vector."""
        return self._residues(steps.decode_upload(self.uploads[client], self.terms).vector)

    def values(self, residues: Array) -> Array:
        """The real numbers (d,) that residues stand for."""
        return decode(unwrap(residues, self.terms.bits), self.terms.fixed)[: self.terms.dimension]

    def _residues(self, data: bytes | memoryview) -> Array:
        return np.frombuffer(data, "<u2" if self.terms.bits == 16 else "<u4")


def collected(run: AttackRun, value: Held, on: Collection[int], number: int = 0, keys: Mapping[int, bytes] | None = None) -> Collected:
    """Have clients upload for a sum under honest terms, with helpers' true keys unless others are given.

    `number`: of the sum within the round; it goes up.
    """
    known, protection = run.fed.known(value.key), run.fed.protection
    layout = PartLayout(tuple((name, dtype, tuple(shape)) for name, dtype, shape in known["layout"])).some(value.parts)
    slot, cohort = (run.turn, FIRST + number), sorted(on)
    step = m.SumStep(run.fed.session, slot, run.number(value), value.parts, 1, "sum", None, b"")
    models = sorted({bound(step, bytes.fromhex(name)) for client, names in known["models"] for _, name in names if client in cohort})
    announced = dict(keys or true_keys(run))
    terms = make_terms(
        session=run.fed.session, slot=slot, roster=run.roster, colluding=protection.helpers_colluding, announced=announced,
        clients=len(run.clients), models=models, dimension=layout.size, clip=protection.secagg_clip, bits=protection.secagg_bits,
        min_cohort=protection.smallest_sum,
    )  # fmt: skip
    server = HelpedServer(terms, announced, run.roster)
    asks = dict.fromkeys(cohort, msgspec.structs.replace(step, models=len(models), message=server.invite))
    answers = run.liar.ask(asks, "sum")
    uploads = {client: answer.message for client, answer in sorted(answers.items()) if isinstance(answer, m.Stepped)}
    return Collected(run, terms, server, uploads)


def true_keys(run: AttackRun) -> dict[int, bytes]:
    """The announcements of all helpers for the round that is on. Those that collude are run by the server from here on."""
    protection = run.scene.config.protection
    for number in range(protection.helpers - protection.helpers_colluding, protection.helpers):
        if HOLDER - number not in run.liar.controlled:
            run.liar.controlled[HOLDER - number] = Traitor(run, number)
    asks = {HOLDER - number: m.Help(run.fed.session, run.turn, ()) for number in range(protection.helpers)}
    announced: dict[int, bytes] = {}
    for place, answer in run.liar.ask(asks, "sum keys").items():
        first = answer.answers[0] if isinstance(answer, m.Helped) else None
        if isinstance(first, m.Stepped):
            announced[HOLDER - place] = first.message
    return announced


def difference(one: Array | None, other: Array | None) -> Array | None:
    return None if one is None or other is None else one - other
