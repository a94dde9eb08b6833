"""A secure sum under terms of the attacker's choice, which an honest server would not propose."""

from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np

from ...aggregation.secagg import bound
from ...contract.handles import Held, PartLayout
from ...federation import messages as m
from ...protocols import secagg
from ...protocols.errors import ProtocolError, RemoteError
from .scene import AttackRun, Summed

__all__ = ["sum_under"]

FIRST = 1 << 32
"""The number of the first such sum in a round, beyond those of an honest server."""


def sum_under(run: AttackRun, held: Held, on: Collection[int], number: int, **changes: Any) -> Summed | None:
    """The sum of a value over some clients, under honest terms with these `changes`; None where clients refuse it or are too few.

    `number`: of the sum within the round; it goes up. The total of a weighted sum is Σ (weight / `weight_limit`) · value.
    """
    known, protection = run.fed.known(held.key), run.fed.protection
    layout = PartLayout(tuple((name, dtype, tuple(shape)) for name, dtype, shape in known["layout"])).some(held.parts)
    slot, cohort = (run.turn, FIRST + number), sorted(on)
    step = m.SumStep(run.fed.session, slot, run.number(held), held.parts, 1, "sum", None, b"")
    models = [bound(step, bytes.fromhex(model)) for client, model in known["models"] if client in cohort]
    roster = run.roster if protection.secagg_mode == "active" else None
    try:
        honest = secagg.make_terms(
            session=run.fed.session, slot=slot, cohort=cohort, models=models, dimension=layout.size, clip=protection.secagg_clip,
            bits=protection.secagg_bits, min_cohort=protection.smallest_sum, roster=roster,
        )  # fmt: skip
        server = secagg.Server(msgspec.structs.replace(honest, **changes), roster=roster)
        while outbox := server.advance():
            asks = {client: msgspec.structs.replace(step, message=message) for client, message in outbox.items()}
            for client, answer in run.liar.ask(asks, f"secagg {server.sent}").items():
                if isinstance(answer, m.Stepped):
                    _receive(server, client, answer.message)
    except ProtocolError:
        return None
    return Summed(np.asarray(server.result.total()), server.result.survivors)


def _receive(server: secagg.Server, client: int, message: bytes) -> None:
    try:
        server.receive(client, message)
    except RemoteError:  # the client drops out
        return
