"""A sum in one message with all parties in one process, over real bytes: for experiments, tests and measurements."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..entropy import Entropy, system_entropy
from ..errors import RemoteError
from ..keys import Identity, Roster
from ..secagg.effective import effective_number
from ..secagg.policy import Policy
from ..secagg.summed import SumRecord
from ..secagg.vectors import Contribution, Sum
from .client import accept, upload
from .helper import Helper
from .server import HelpedServer
from .terms import HelpedTerms

__all__ = ["HelpedOutcome", "agreeable", "simulate"]

BATCH = 64
"""Uploads of one delivery, so that memory holds so many masked vectors."""


@dataclass(frozen=True)
class HelpedOutcome:
    """A finished sum: the result, who was refused and why, the helpers that lied, the bytes of all uploads and of all else."""

    sum: Sum[HelpedTerms]
    refused: Mapping[int, tuple[int, str]] = field(repr=False)
    liars: frozenset[int]
    upload_bytes: int
    other_bytes: int


def agreeable(terms: HelpedTerms) -> Policy:
    """The policy of a client that accepts these terms and holds the first listed model."""
    limit, least = terms.weight_limit or 1.0, terms.least_weight or 1.0
    return Policy(
        terms.session, "active", terms.models[0], len(terms.models), int(effective_number(terms.minimum, limit, least)), None,
        terms.dimension, (terms.clip, terms.clip), terms.levels, terms.maximum, max_weight=terms.weight_limit,
        cohort_change=terms.cohort_change,
    )  # fmt: skip


def simulate(
    terms: HelpedTerms,
    announcements: Mapping[int, bytes],
    roster: Roster,
    identities: Iterable[Identity],
    helpers: Mapping[int, Helper],
    values: Callable[[int], Contribution],
    *,
    absent: Collection[int] = (),
    records: Mapping[int, SumRecord] | None = None,
    entropy: Entropy = system_entropy,
) -> HelpedOutcome:
    """Runs one sum.

    Args:
        terms, announcements, roster: see `HelpedServer`.
        identities: of the clients that upload.
        helpers: the helpers that answer, by number.
        values: a client's input, asked for when it uploads.
        absent: helpers that answer no more once the set is closed.
        records: the clients' records of earlier sums; by default each client has an empty one.
        entropy: of all clients.

    Raises:
        TooFewClients, HelpersFailed, SumFailed, RemoteError, LocalError: as client and server do.
    """
    server, policy, known = HelpedServer(terms, announcements, roster), agreeable(terms), records or {}
    sizes, uploads = 0, 0

    def ask(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        nonlocal sizes
        answers: dict[int, bytes] = {}
        for helper, message in messages.items():
            if helper in helpers and not (helper in absent and server.stage == "opening"):
                try:
                    answers[helper] = helpers[helper].receive(message)
                except RemoteError:
                    continue
                sizes += len(message) + len(answers[helper])
        return answers

    for count, identity in enumerate(identities, 1):
        accepted = accept(server.invite, identity, policy, terms.colluding, roster)
        record = known.get(identity.client) or SumRecord()
        data, _ = upload(accepted, identity, policy, record, values(identity.client), entropy)
        server.receive(identity.client, data)
        sizes, uploads = sizes + len(server.invite), uploads + len(data)
        if count % BATCH == 0:
            server.delivered(ask(server.deliver()))
    server.delivered(ask(server.deliver()))
    messages = server.close()
    while messages:
        messages = server.advance(ask(messages))
    return HelpedOutcome(server.result, server.refused, frozenset(server.liars), uploads, sizes)
