"""Labels of another system's clients from updates of the head's bias, and the states that other attacks read with them.

Where some labels are known to be absent `counts_from_bias` reads them, else `labels_from_bias`, under the statistics of the client's
batches where layers normalise. Updates by optimisers other than SGD, and heads without a bias, are read by comparison with simulated
clients (`foreign_simulation`). Not modelled: weight decay of the head's bias under SGD.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ...types import Array
from ..figures.leakage import Cell, nothing
from ..figures.significance import FEWEST_SCORES, RATE, p_words
from ..labels.label_inference import LabelGuess, label_cells, perfect_chances
from ..labels.label_readings import ONE_STEP, PATH, auxiliary_shares, class_probabilities, counts_from_bias, labels_from_bias
from .foreign_simulation import by_order, read_by_simulation
from .foreign_states import ForeignModel, ReadState, batch_statistics, statistics_of, vector_of
from .foreign_system import AttackOutput, System, UpdateRecord

__all__ = ["NO_MODEL", "NO_TRUTH", "NOT_SGD", "ROUNDS", "alone", "as_sent", "is_sgd", "labels", "settled_vector", "shares_of_update"]

ROUNDS = 3
"""Label shares are means over so many first updates of a client."""
MOST_NORMALISED = 256
"""Auxiliary samples whose statistics take the place of those that states do not have."""
NO_MODEL = "not attempted: there is no model to run (`--plugin FILE`, and `model` in foreign.toml)"
NO_TRUTH = "not attempted: no client's samples are given, so that no guess can be scored"
NOT_SGD = "not attempted: updates by an optimiser other than SGD are not linear in gradients"
NOT_IMITATED = "this takes a model, auxiliary samples, an optimiser that torch has, and numbers of samples and labels"


def labels(system: System) -> AttackOutput:
    """Label sets and histograms from updates: by formulas where these hold, else learned from simulated clients."""
    name, metric, case, prior = "label_inference", "histogram_l1", system.case, system.case.prior
    if not system.scored:
        return [nothing(case, name, metric, NO_TRUTH)], None
    linear = [client for client in system.scored if system.head is not None and is_sgd(system.records[client][0])]
    read = {client: [record for record in system.records[client][:ROUNDS] if is_sgd(record)] for client in linear}
    shares = {client: mean for client, records in read.items() if (mean := mean_shares(records, system)) is not None}
    words = [f"bias {system.head!r}, of the first {ROUNDS} update(s) at most; {predicted(system)}"] if shares else []
    rest = [client for client in system.scored if client not in shares]
    if rest and (learned := _learned(system, rest)) is not None:
        shares |= learned[0]
        words.append(learned[1])
    if not shares:
        why = "neither the learning rate with the number of steps nor the number of labels is known"
        why = why if linear else f"{system.headless or 'the optimiser is not SGD'}, and clients cannot be imitated: {NOT_IMITATED}"
        return [nothing(case, name, metric, f"not attempted: {why}")], None
    blank = auxiliary_shares(prior) if len(prior.y) else np.full(prior.classes, 1 / prior.classes)
    note = f"{'; '.join(words)}; {prior.description}"
    guess = LabelGuess(shares)
    without = LabelGuess(dict.fromkeys(shares, blank))
    figures, arrays = label_cells(case, name, sorted(shares), [guess, without, guess], note)
    best = perfect_chances(case, sorted(shares), without)
    return [alone(figure, figure.counted or len(shares), best.get(figure.metric, 0.0)) for figure in figures], arrays


def _learned(system: System, clients: Sequence[int]) -> tuple[dict[int, Array], str] | None:
    """Label shares of clients whose updates no formula reads, by their first updates, and how they were read; None where nothing can."""
    records = [system.records[client][0] for client in clients]
    made = read_by_simulation(system, records)
    if made is not None:
        words = f"{len(clients)} client(s): learned from simulated clients that train with {records[0].settings.optimizer}"
        return dict(zip(clients, made, strict=True)), words
    if system.head is None or any(record.labels is None for record in records):
        return None
    moved = [
        np.subtract(record.after.parameters[system.head], record.before.parameters[system.head], dtype=np.float64) for record in records
    ]
    shares = {client: by_order(of, record.labels or 1) for client, of, record in zip(clients, moved, records, strict=True)}
    return shares, f"{len(clients)} client(s): labels whose bias {system.head!r} rose most"


def predicted(system: System) -> str:
    """Where predictions come from, for a note."""
    if system.model is None:
        return "no model: predictions taken to be uniform, as an untrained model's are"
    if not system.model.norms:
        return "predictions on auxiliary samples"
    has_statistics = all(record.before.statistics and record.after.statistics for records in system.records.values() for record in records)
    return f"predictions on auxiliary samples, normalised by the statistics of {'the client' if has_statistics else 'these samples'}"


def alone(figure: Cell, scores: int, best: float) -> Cell:
    """A figure that was judged as its own reference, without that; it is the mean of so many `scores`.

    `best` is the p that a perfect recovery would have. A figure that nothing could make a leak is `not_validated`.
    """
    if figure.value is None:
        return figure
    rule = f"another system has no unprotected twin, so there is no reference and no shown power; margin {figure.margin:g}"
    rule += "" if figure.p is None else f", {p_words(figure.p)}; a leak needs p < {RATE:g}"
    if scores < FEWEST_SCORES:
        rule += f"; {scores} score(s) decide nothing, {FEWEST_SCORES} are needed"
    elif figure.counted and 0.5**figure.counted >= RATE:
        rule += f"; {figure.counted} clients are too few to decide about a yes-or-no figure"
    elif figure.status != "leaks" and best >= RATE:
        rule += "; even a perfect recovery would not be shown to beat the baseline by the margin"
    undecided = scores < FEWEST_SCORES or best >= RATE
    status = figure.status if figure.status == "leaks" else "not_validated" if undecided else "inconclusive"
    return replace(figure, reference=None, reference_baseline=None, power=None, status=status, note=f"{figure.note}; {rule}")


# --- states and label shares --------------------------------------------------------------------------------------------------------


def is_sgd(record: UpdateRecord) -> bool:
    return record.settings.optimizer == "sgd"


def mean_shares(records: Sequence[UpdateRecord], system: System) -> Array | None:
    shares = [of_update for record in records if (of_update := shares_of_update(record, system)) is not None]
    return np.asarray(np.mean(shares, axis=0)) if shares else None


def shares_of_update(record: UpdateRecord, system: System) -> Array | None:
    """Label shares (classes,) from one update of the head's bias; None where neither its scale nor the number of labels is known.

    Where some labels are known to be absent the scale comes from these: clients with few samples learn them by heart, so that their updates
    end shorter than rate and steps say. Predictions are those for auxiliary samples, at the state before, or on the way to the state after
    where the scale is rate × steps. Without a model they are taken to be uniform, as an untrained model's are.
    """
    assert system.head is not None  # checked by the caller
    prior, model = system.case.prior, system.model
    moved = np.subtract(record.after.parameters[system.head], record.before.parameters[system.head], dtype=np.float64)
    is_short = record.scale is None or (record.labels is not None and record.labels < prior.classes)
    if model is None:
        probabilities = np.full((prior.classes, prior.classes), 1 / prior.classes)
    else:
        start, end = (settled_vector(system, model, record, state) for state in (record.before, record.after))
        path = [start + share * (end - start) for share in (ONE_STEP if is_short or record.steps == 1 else PATH)]
        probabilities = np.mean([class_probabilities(model.evaluated, at, prior.x, prior.y) for at in path], axis=0)
    if record.scale is not None and not is_short:
        return labels_from_bias(moved, probabilities, record.scale)
    return None if record.labels is None else counts_from_bias(-moved, probabilities, record.labels)


def settled_vector(system: System, model: ForeignModel, record: UpdateRecord, state: ReadState) -> Array:
    """A state's vector (d,) for `model.evaluated`, with the statistics of the client's batches, else with those of auxiliary samples."""
    statistics = batch_statistics(model, record.before, record.after, record.steps) or _of_auxiliary(system, model, record.before)
    return vector_of(model.evaluated, state, statistics)


def as_sent(system: System, model: ForeignModel, state: ReadState) -> Array:
    """A state's vector (d,) for `model.evaluated`, with its own statistics, else with those of auxiliary samples."""
    has_own = state.statistics.keys() >= model.statistics.keys()
    return vector_of(model.evaluated, state, {} if has_own else _of_auxiliary(system, model, state))


def _of_auxiliary(system: System, model: ForeignModel, state: ReadState) -> dict[str, Array]:
    """The statistics of auxiliary samples by name, normalised by themselves."""
    if not model.norms:
        return {}
    x = np.asarray(system.case.prior.x[:MOST_NORMALISED], np.float64)
    with torch.no_grad():
        row = statistics_of(model)(torch.tensor(vector_of(model.in_training, state))[None], torch.tensor(x)[None])[0].numpy()
    parts = np.split(row, np.cumsum([int(np.prod(shape)) for shape in model.statistics.values()])[:-1])
    return dict(zip(model.statistics, parts, strict=True))
