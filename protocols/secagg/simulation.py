"""A secure sum with all parties in one process.

The real machines over real bytes, with nothing skipped: for experiments, tests and measurements. Clients are
served one at a time and their vectors are asked for one at a time, so memory holds one masked vector, not n.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..entropy import Entropy, system_entropy
from ..keys import Identity, Roster
from .client import Client
from .messages import Terms
from .policy import MaskKey, Policy
from .server import Server
from .states import ServerStage
from .summed import SumRecord
from .vectors import Contribution, MapJobs, Sum

__all__ = ["STAGES", "Outcome", "simulate"]

STAGES = ("Advert", "Shares", "Masked", "Consistent", "Reveal")
"""What a client sends, in this order; a dropout is named by the first of these that it does not send."""

Record = Callable[[str, int, str, bytes], None]
"""Called with (direction "up" or "down", client, kind of message, bytes) for every message."""


@dataclass(frozen=True)
class Outcome:
    """A finished sum, and what it cost and left behind.

    sum: the result.
    clipped: per client, how many of its values were clipped (known to that client only).
    mask_keys and adverts: for the following slot (each client's secret; what the server holds).
    upload_bytes, download_bytes: totals over the clients.
    """

    sum: Sum[Terms]
    clipped: Mapping[int, int] = field(repr=False)
    mask_keys: Mapping[int, MaskKey] = field(repr=False)
    adverts: Mapping[int, bytes] = field(repr=False)
    upload_bytes: int
    download_bytes: int


def simulate(
    terms: Terms,
    identities: Mapping[int, Identity],
    values: Callable[[int], Contribution | Sequence[Contribution]],
    *,
    roster: Roster | None = None,
    policy: Callable[[int], Policy] | None = None,
    drops: Mapping[int, str] | None = None,
    mask_keys: Mapping[int, MaskKey] | None = None,
    adverts: Mapping[int, bytes] | None = None,
    records: Mapping[int, SumRecord] | None = None,
    record: Record | None = None,
    entropy: Entropy = system_entropy,
    mapper: MapJobs = map,
) -> Outcome:
    """Runs one secure sum between `Client`s and a `Server`.

    Args:
        terms: see `make_terms`.
        identities: of every client in the cohort.
        values: a client's input, asked for when its vector is masked.
        roster: in active mode.
        policy: what each client insists on; by default what the terms say, with the first listed model.
        drops: clients that drop out, and the first of `STAGES` that they no longer send.
        mask_keys, adverts: `Outcome.mask_keys` and `Outcome.adverts` of the sum that named this slot as its following
            one.
        records: the clients' records of earlier sums; by default each client has an empty one.
        record: sees every message.
        entropy: of all clients.
        mapper: for the server's unmasking, e.g. that of a process pool.

    Raises:
        TooFewClients: too few were left at some stage.
        RemoteError, LocalError, SumFailed: as the machines do.
        ValueError: for a drop at an unknown stage.
    """
    drops = drops or {}
    unknown = set(drops.values()) - set(STAGES)
    if unknown:
        raise ValueError(f"drops: unknown stage {min(unknown)!r}; expected one of {', '.join(STAGES)}")
    ready = {client: key for client, key in (mask_keys or {}).items() if client in terms.cohort and client in (adverts or {})}
    server = Server(terms, roster=roster, adverts={client: data for client, data in (adverts or {}).items() if client in ready})
    wants = policy or (lambda number: _agreeable(terms))
    known = records or {}
    clients = {
        number: Client(
            identities[number], wants(number), record=known.get(number) or SumRecord(), roster=roster, mask_key=ready.get(number),
            entropy=entropy,
        )
        for number in terms.cohort
    }  # fmt: skip
    sent = {"up": 0, "down": 0}

    def note(direction: str, client: int, kind: str | None, data: bytes) -> None:
        sent[direction] += len(data)
        if record is not None:
            record(direction, client, kind or "", data)

    clipped: dict[int, int] = {}
    while server.stage is not ServerStage.DONE:
        outbox = server.advance(mapper)
        reply_kind = server.collected[0] if outbox else None
        for number in sorted(outbox):
            client, data = clients[number], outbox.pop(number)
            note("down", number, server.sent, data)
            # A dropout is gone from its stage on, whatever else would have come.
            if number in drops and STAGES.index(drops[number]) <= STAGES.index(str(reply_kind)):
                continue
            if client.wants_values:
                inputs = values(number)
                reply = client.receive(data, *(inputs if isinstance(inputs, Sequence) else (inputs,)))
                clipped[number] = client.clipped
            else:
                reply = client.receive(data)
            note("up", number, reply_kind, reply)
            server.receive(number, reply)
    following = server.following
    kept = {number: key for number, client in clients.items() if number in following and (key := client.next_mask_key())}
    return Outcome(server.result, clipped, kept, following, sent["up"], sent["down"])


def _agreeable(terms: Terms) -> Policy:
    """The policy of a client that accepts these terms and holds the first listed model."""
    return Policy(
        terms.session, terms.mode, terms.models[0], len(terms.models), terms.min_cohort, None, terms.dimension, (terms.clip, terms.clip),
        terms.levels, max_weight=terms.weight_limit,
    )  # fmt: skip
