"""Class owners: which labels a client has, as FedProto's clients declare to the server.

Source: FedProto (Tan et al. 2022, Algorithm 1) averages a mean feature vector for each class over the clients that own it, so whoever
adds up has to know them: every client declares its classes (`gather`), and membership in a class's sum repeats it. Nothing is inferred.

What it proves: FedProto reveals exact label sets to whoever adds up, under every protection of sums that names who is in a sum. What it
does not: how many samples of each label there are. `prototype_inversion` asks what the mean feature vectors show. With oblivious sums the
server learns how many own each class, not who.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...contract.transcript import payload_rows
from ..adversary import AdversaryView
from ..figures.leakage import Case, Cell, cell, nothing, popular_set

__all__ = ["cells", "owned_in"]

MARGIN = 0.1
DECLARED = "owns "


def owned_in(view: AdversaryView) -> Mapping[int, frozenset[int]]:
    """The classes that each client declared, in any round."""
    declared: dict[int, set[int]] = {}
    for message in view.select("gather"):
        if not message.kind.startswith(DECLARED) or message.payload is None or message.kind not in message.payload:
            continue
        for client, owns in zip(payload_rows(message), np.asarray(message.payload[message.kind]), strict=True):
            of = declared.setdefault(client, set())
            if owns:
                of.add(int(message.kind.removeprefix(DECLARED)))
    return {client: frozenset(labels) for client, labels in declared.items()}


def cells(case: Case, attack: str) -> list[Cell]:
    """The share of clients whose label set is declared, under the name of the `attack` that asks."""
    observed, reference = owned_in(case.view), owned_in(case.reference)
    clients = sorted((set(observed) & set(reference)) - set(case.view.coalition))
    if not clients:
        return [nothing(case, attack, "label_set_accuracy", "not attempted: prototypes; this view does not show who owns which class")]
    sets = case.truth.label_sets
    if all(len(sets[client]) == case.prior.classes for client in clients):
        return [nothing(case, attack, "label_set_accuracy", "every client has all labels: there is no label set to find")]
    popular = popular_set([sets[client] for client in clients])
    scores = [np.array([float(labels == sets[c]) for c, labels in zip(clients, of, strict=True)]) for of in (
        [observed[c] for c in clients], [popular] * len(clients), [reference[c] for c in clients],
    )]  # fmt: skip
    note = (
        "read, not inferred: clients declare their classes, and each class is a sum over those; how many samples is not asked; "
        "baseline: the most common label set for everyone"
    )
    figure = cell(case, attack, "label_set_accuracy", *scores, margin=MARGIN, share=True, note=note)
    declared = float((scores[0] - scores[1]).mean()) > MARGIN
    return [replace(figure, exact=True, p=None, status="leaks", note=note) if declared else figure]  # what is declared takes no test
