"""Sums of one value over the same clients under other settings: other weights, or one clip after the other.

Two sums over the same clients show nothing by subtraction, unless a client counts differently in the second. A clip cuts every value off
in each coordinate, so sums at many clips show where the largest of a coordinate lies.

Checks: "the values of one round go into one sum, over one set of clients with one weight each" (aggregation/secagg.py, Guarantee); "of all
values that share a name only sums with the same survivors and settings are opened" (protocols/secagg/summed.py, Guarantee).
"""

from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np

from ...aggregation.secagg import bound
from ...aggregation.secure_sums import least_weight
from ...contract.handles import Held, PartLayout
from ...contract.protection import Protection
from ...experiments.config.config import Config
from ...federation import messages as m
from ...protocols import secagg
from ...protocols.errors import ProtocolError, RemoteError
from ...protocols.secagg.vectors import largest_levels
from .outcome import ActiveAttack, ActiveFigure, ActiveGuess
from .scene import AttackRun, Summed

__all__ = ["OTHER_CLIP", "OTHER_WEIGHT", "plain_sums", "sum_under"]

GUARANTEE = "protocols/secagg/summed.py: of all values that share a name only sums with the same survivors and settings are opened"
FIRST = 1 << 32
"""The number of the first such sum in a round, beyond those of an honest server."""
CLIPS = 60
"""Sums at so many clips."""
RANGE = 1e-3
"""The smallest clip, as a share of the largest."""


def sum_under(run: AttackRun, held: Held, on: Collection[int], number: int, **changes: Any) -> Summed | None:
    """The sum of a value over some clients, under honest terms with these `changes`; None where clients refuse it or are too few.

    `number`: of the sum within the round; it goes up. The total of a weighted sum is Σ (weight / `weight_limit`) · value.
    """
    known, protection = run.fed.known(held.key), run.fed.protection
    layout = PartLayout(tuple((name, dtype, tuple(shape)) for name, dtype, shape in known["layout"])).some(held.parts)
    slot, cohort = (run.turn, FIRST + number), sorted(on)
    step = m.SumStep(run.fed.session, slot, run.number(held), held.parts, 1, "sum", None, b"")
    models = sorted({bound(step, bytes.fromhex(name)) for client, names in known["models"] for _, name in names if client in cohort})
    step = msgspec.structs.replace(step, models=len(models))
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


def other_weight(run: AttackRun) -> ActiveGuess:
    """A sum in which all weigh equally, then one by sample counts. If the victim's count is not that of the others, their difference is the
    victim's update.

    The server knows the counts: one of an accomplice, and the sum of all.
    """
    held, protection = run.compute(), run.scene.config.protection
    plain = sum_under(run, held, run.clients, 1)
    limit, least = protection.max_weight, least_weight(protection, len(run.clients))
    weighed = None if plain is None else sum_under(run, held, run.clients, 2, weight_limit=limit, least_weight=least)
    guess = None
    if plain is not None and weighed is not None and weighed.survivors == plain.survivors:
        counts = {client: max(float(run.scene.data(client).samples), least) / limit for client in plain.survivors}
        usual = float(np.median(list(counts.values())))
        if counts[run.victim] != usual:
            guess = (weighed.total - usual * plain.total) / (counts[run.victim] - usual)
    return ActiveGuess(guess, "update", run.honest)


def other_clip(run: AttackRun) -> ActiveFigure:
    """Sums of one value at many clips: a coordinate's sum changes from the clip on that is below its largest value.

    Baseline: each coordinate's mean, which one sum shows, taken for its largest value.
    """
    held, protection = run.compute(), run.scene.config.protection
    whole = sum_under(run, held, run.clients, 0)
    clips = np.geomspace(1.0, RANGE, CLIPS) * protection.secagg_clip
    step = float(np.sqrt(clips[0] / clips[1]))
    largest, tolerance = None, 0.0
    if whole is not None:
        largest = np.full(whole.total.shape, clips[0])
        tolerance = 2 * len(run.clients) * protection.secagg_clip / largest_levels(len(run.clients), protection.secagg_bits)
    for number, clip in enumerate(clips, 1):
        summed = None if whole is None else sum_under(run, held, run.clients, number, clip=float(clip))
        if summed is None or whole is None or largest is None:
            largest = None
            break
        unchanged = np.abs(summed.total - whole.total) <= tolerance
        largest = np.where(unchanged, np.minimum(largest, clip / step), largest)
    values = np.array([run.scene.truth("update", client) for client in run.clients])
    truth, mean = np.abs(values).max(axis=0), np.abs(values.mean(axis=0))
    size = float(np.linalg.norm(truth))
    value = None if largest is None else float(np.linalg.norm(largest - truth)) / size
    return ActiveFigure("largest_values_error", value, float(np.linalg.norm(mean - truth)) / size)


def plain_sums(config: Config) -> str:
    """Why an attack by sums under terms of its own does not apply, empty if it does."""
    protection: Protection = config.protection
    if protection.sum != "secagg":
        return f"there are no secure sums of known groups under sum = {protection.sum!r}"
    if config.privacy.unit == "client":
        return "sums carry clients' shares of noise, which this attack does not add"
    return ""


def _weighted(config: Config) -> str:
    return plain_sums(config) or ("" if config.protection.max_weight else "clients' own settings have no max_weight: all weigh equally")


OTHER_WEIGHT = ActiveAttack(
    "one update from two sums of one value over the same clients, with other weights", GUARANTEE, other_weight, _weighted
)
OTHER_CLIP = ActiveAttack("the largest value of each coordinate from sums of one value at many clips", GUARANTEE, other_clip, plain_sums)
