"""What a view holds, payload by payload: what each number is derived from, and which attacks read it.

Every part that an algorithm, a protection or a protocol sends has an entry here; a test runs all of them and looks for parts without one.
`depends_on_data` decides whether a view holds a number of clients' data at all, `unread` which of these no attack reads.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from ...contract.transcript import Message
from ..adversary import DERIVING, FOLLOWED, INITIAL, AdversaryView

__all__ = [
    "ENTRIES", "PayloadPart", "data_parts", "depends_on_data", "entry_of", "part_of", "parts_in_rows", "parts_of", "readers_in",
    "unread",
]  # fmt: skip

Source = Literal["data", "sealed", "public"]
"""What a number is derived from: clients' data, in a form that its reader can use; data that are masked or encrypted, and keys and
their shares; or public settings and randomness alone."""


@dataclass(frozen=True)
class PayloadPart:
    """A part of messages of an `operation` and `kind` (regular expressions). `readers` are attacks that read it, where it is of data.

    `whole`: its readers take all that the part can show, so nothing is left where they say that there is nothing to find. `leaves`: what
    the part is known to show and its readers do not ask, which the audit names.
    """

    operation: str
    kind: str
    part: str
    source: Source
    readers: tuple[str, ...] = ()
    whole: bool = False
    leaves: str = ""


_MODELS = (
    "membership", "property_inference", "label_inference", "cluster_identity", "gradient_inversion", "exact_zeros", "disaggregation",
)  # fmt: skip
_UPDATES = (
    "label_inference", "gradient_inversion", "update_norms", "membership", "source_inference", "property_inference", "disaggregation",
)  # fmt: skip
_ALIKE = ("likeness",)
_ROWS = ("signature_inversion", "gram_geometry", "sybil_span", "anchor_counts", "fold_release", "property_inference")
ENTRIES: tuple[PayloadPart, ...] = (
    PayloadPart(
        "mean", "secagg Masked|helped Upload", "bytes", "data", (*_MODELS, *_UPDATES, "prototype_inversion")
    ),  # sums that the server opens
    PayloadPart("mean", "bucket mean", "update|step|movement|direction|contribution", "data", (*_MODELS, *_UPDATES)),
    PayloadPart("mean", "bucket mean", ".*", "data"),
    PayloadPart(".*", ".*", "bytes", "sealed"),
    PayloadPart(".*", ".*", "bytes.length", "public"),
    PayloadPart("mean", "deal.*", "listed|nonces", "public"),  # who is listed for buckets, and the randomness that deals them
    PayloadPart("compute", "parameters", "model|global|w", "data", _MODELS),
    PayloadPart("compute", "parameters", "anchor", "data", _MODELS),
    PayloadPart("compute", "parameters", "start|summed|label|clients|counted", "public"),
    PayloadPart("compute", "parameters", "labels", "data", ("cluster_identity",)),
    PayloadPart("compute", "parameters", "prototypes", "data", ("prototype_inversion",)),
    PayloadPart("compute", "parameters", "control", "data", ("label_inference", "disaggregation")),
    PayloadPart("compute", "parameters", "centre|moves|placed", "data"),
    PayloadPart("mean", "update", "update|step|movement|direction|contribution|blocks|global|steps|shared", "data", _UPDATES + _ALIKE),
    PayloadPart("mean", "update", "prototype", "data", ("prototype_inversion", *_ALIKE)),
    PayloadPart("mean", "update", "control", "data", _UPDATES + _ALIKE),  # a function of the update, which comes with it
    PayloadPart("mean", "blind update", "blind", "data", ("key_recovery", "gram_updates", "update_norms", "disaggregation", *_ALIKE)),
    PayloadPart("mean", ".*", "weights|weight|count", "data", ("update_norms",), whole=True),
    PayloadPart("gram", "result", "labels|k", "data", ("cluster_identity",)),
    PayloadPart("gram", "result", "directions|exceeding|found|set_aside|stage|risen|soft|placed|nearest", "data"),
    PayloadPart("gram", ".*", "rows", "data", (*_ROWS, "gram_updates", *_ALIKE)),
    PayloadPart("gather", "scores", "scores", "data", ("influence",)),
    PayloadPart("gather", "owns .*", "owns", "data", ("label_inference",), whole=True),
    PayloadPart("gather", "changed", "changed", "data", _ALIKE),
    PayloadPart("gather", "choice", "choice", "data", ("cluster_identity",)),
    PayloadPart("gather", ".*", "losses", "data", ("reported_scores", "membership", *_ALIKE)),
    PayloadPart("gather", ".*", "confusion", "data", ("reported_scores", *_ALIKE)),
    PayloadPart("gather", ".*", "correct|count|loss|errors", "data", _ALIKE, leaves="numbers of test samples"),
    PayloadPart("relay", "request", "wanted", "data", _ALIKE),
    PayloadPart(
        "relay",
        ".*",
        "own|update|model",
        "data",
        ("label_inference", "gradient_inversion", "membership", "source_inference", "property_inference", *_ALIKE),
    ),
    PayloadPart("fold|product", "arguments", "fold|product|times", "data"),
    PayloadPart("fold|product", "blind result", "blind", "data", _ALIKE),
)
"""The first entry that fits is that of a part."""
OPENED = PayloadPart("gram", "encrypted", "products", "data", (*_ROWS, "cluster_identity"))
"""What a key holder opens of encrypted or shared rows."""


def parts_of(message: Message) -> tuple[str, ...]:
    """The names of the parts of a payload without the numbers that tell clusters, classes and folds apart."""
    return tuple(dict.fromkeys(part_of(name) for name in message.payload or {} if name != "clients"))


def part_of(name: str) -> str:
    """The name of the part that an array of a payload is of."""
    return re.sub(r"(/.*| \d+)$", "", name)


def entry_of(message: Message, part: str) -> PayloadPart | None:
    """The entry of a part of a message; None for one that nobody has described."""
    for entry in ENTRIES:
        texts = ((entry.operation, message.operation), (entry.kind, message.kind), (entry.part, part))
        if all(re.fullmatch(pattern, text) for pattern, text in texts):
            return entry
    return None


def data_parts(view: AdversaryView) -> dict[tuple[str, str, str], PayloadPart | None]:
    """Parts of readable payloads that are derived from clients' data, by (operation, kind, part); None for a part without an entry."""
    known: dict[tuple[str, str, str], PayloadPart | None] = {}
    if _all_collude(view):
        return known
    for message in view.messages:
        if message.operation == "gram" and message.source == "clients" and view.adversary == "key-holder":
            known["gram", "encrypted", "products"] = OPENED
        if message.payload is None or not _of_others(view, message):
            continue
        for part in parts_of(message):
            entry = entry_of(message, part)
            if entry is None or entry.source == "data":
                known[message.operation, re.sub(r" \d+$", "", message.kind), part] = entry
    if not known and _is_sent_more(view):
        known["compute", "parameters", "the models after the last round"] = None
    return known


def _is_sent_more(view: AdversaryView) -> bool:
    """Whether a member, or who gets the models, is sent trained models after the last message of the record, which does not hold them."""
    if view.adversary == "released":
        return any(message.context.get(FOLLOWED) for message in view.messages)
    sent = max((message.index for message in view.messages if message.operation == "compute"), default=None)
    return view.adversary == "client" and sent is not None and any(
        message.index > sent and message.operation in DERIVING and message.source == "clients" for message in view.messages
    )  # fmt: skip


def _of_others(view: AdversaryView, message: Message) -> bool:
    """Whether a payload may depend on the data of a client that does not collude: not what the server sends before anything was trained."""
    first = message.operation == "compute" and message.source == "server" and message.round <= 0
    untrained = first and not any(other.index < message.index and other.source == "clients" for other in view.messages)
    untrained = message.context.get(INITIAL, untrained)  # released models come without what clients sent
    own = message.source == "clients" and bool(message.clients) and set(message.clients) <= set(view.coalition)
    return not untrained and not own


def _all_collude(view: AdversaryView) -> bool:
    clients = {client for message in view.messages for client in message.clients}  # a server sees all of them
    return view.is_server and bool(clients) and clients <= set(view.coalition)


def depends_on_data(view: AdversaryView) -> bool:
    """Whether any number that the view shows was derived from the data of clients that do not collude."""
    return bool(data_parts(view))


def unread(view: AdversaryView, attacks: Collection[str]) -> tuple[str, ...]:
    """The parts of clients' data in a view that none of `attacks` reads, as "operation kind: part", and what is left open of others."""
    named = []
    for (operation, kind, part), entry in data_parts(view).items():
        is_read = entry is not None and bool(set(entry.readers) & set(attacks))
        left = entry.leaves if entry is not None and is_read else ""
        if left or not is_read:
            named.append(f"{operation} {kind}: {part}" + (f" ({left})" if left else ""))
    return tuple(named)


def readers_in(view: AdversaryView) -> dict[str, tuple[str, ...]]:
    """The attacks that read each part of clients' data in a view, by "operation kind: part"; without parts that are read as a `whole`."""
    parts = {f"{operation} {kind}: {part}": entry for (operation, kind, part), entry in data_parts(view).items()}
    return {name: () if entry is None else entry.readers for name, entry in parts.items() if entry is None or not entry.whole}


def parts_in_rows(view: AdversaryView, attack: str) -> tuple[tuple[str, str, str], ...]:
    """The parts of clients' data in a view that an `attack` reads, and those that nobody has described."""
    return tuple(key for key, entry in data_parts(view).items() if entry is None or attack in entry.readers)
