"""Words from the gradient of an embedding: which words a client trained on, and in what order.

Source: the rows of an embedding's gradient are zero for all words but those of the batch (Melis, Song, De Cristofaro & Shmatikov 2019);
the order of one window by matching gradients as in TAG (Deng et al. 2021), but over the words that are known to occur, so that the search
is discrete: rows are assigned to the gradients of the places, again and again since these depend on the words; then single changes are
tried.

Texts of transformers, in batches of several windows too, follow from the spans of their attention layers (`text_spans`).

What it proves: of a language model with a trained embedding, an update in the clear is the vocabulary of its client, for any number of
windows, batches and steps; of one window it is the text. A sum is the vocabulary of its cohort, and sums over changing cohorts show whose
words these are (`inversion.zeros`). What it does not: nothing about updates with noise, which moves all rows, about the order of words
under weight decay, or about words that the public vocabulary has not.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from torch import nn
from torch.nn import functional

from ...engine.device import tensor
from ...engine.models import Model
from ...errors import InputError
from ...randomness import stream
from ...types import Array, check_array
from ..evidence.local_training import trainings_in
from ..evidence.updates import ClientStep, blind, local_of, public_model, single_steps, steps_in, unread_movement
from ..figures.leakage import Case, Cell, Prior, cell, nothing
from ..figures.significance import chance, chance_of_draws, chance_of_matching, power
from ..labels.label_readings import bias_span
from .text_spans import MOST_WINDOWS, has_attention, windows_from_spans
from .zeros import WEIGHTS_ALONE, Feature, Owners, Pool, embedding_of, features_of, owners_of, pools_in

__all__ = ["NOTHING_READ", "embedding_of", "refusal", "token_cells", "tokens_from_rows", "window_from_rows"]

CLIENTS_PER_DRAW = 4
NOTHING_READ = "no single client's update, and no sum over known clients, can be read in this view"
MARGIN = 0.1
DRAWS = 8
"""Draws of auxiliary windows that give the number of words of a guess without a view."""
STANDS_OUT = 6.0
"""Where no row is exactly zero (sums are rounded), rows whose length is so many deviations above the median hold words."""
PLACINGS, SWEEPS = 8, 12
"""Times that all words are placed anew before single changes are tried, and that these are."""
CLOSE = 1e-6
"""A window whose rows are nearer than this to those seen, as 1 − cosine, is taken to be the one."""
_Score = Callable[[Array, Array], float]


# --- the mathematics, for updates from anywhere -------------------------------------------------------------------------------------


def tokens_from_rows(rows: Array) -> Array:
    """The words (k,), increasing, of a batch from the gradient (or an update) of its embedding (words, units).

    Raises `InputError` for another number of axes and values that are not finite.
    """
    lengths = np.linalg.norm(check_array("rows", np.asarray(rows, np.float64), ndim=2), axis=1)
    if not lengths.all():
        return np.flatnonzero(lengths)
    middle = float(np.median(lengths))
    deviation = 1.4826 * float(np.median(np.abs(lengths - middle)))  # of normal values
    return np.flatnonzero(lengths > middle + STANDS_OUT * deviation)


def window_from_rows(model: Model, vector: Array, rows: Array, label: int, length: int) -> tuple[Array, float]:
    """The window (length,) of words behind the embedding gradient `rows` (words, units) at `vector` (d,), and 1 − cosine of its gradient.

    `label` is the word that follows. Any positive multiple of the gradient serves. Raises `InputError` for a model without an embedding, a
    gradient of no words, or of more words than the window is long.
    """
    if embedding_of(model) is None:
        raise InputError(f"model {model.name!r}: has no embedding")
    words = tokens_from_rows(rows)
    if not 0 < len(words) <= length:
        raise InputError(f"rows: hold {len(words)} words, for a window of {length}")
    batch = _Rows(model, vector, words, np.asarray(rows, np.float64)[words], label)
    # the later a word, the more it moves: recurrent networks forget
    order = words[np.argsort(np.linalg.norm(rows[words], axis=1), kind="stable")]
    window = np.concatenate([np.repeat(order[:1], length - len(words)), order])
    left = float(batch.at(window[None])[1][0])
    for _ in range(SWEEPS):
        window, left = _settled(batch, window, left)
        if left < CLOSE:
            break
        tried = _neighbours(window, words)
        distances = batch.at(tried)[1]
        best = int(distances.argmin())
        if not distances[best] < left:
            break
        window, left = tried[best], float(distances[best])
    return window, left


def _settled(batch: "_Rows", window: Array, left: float) -> tuple[Array, float]:
    """The nearest window, with its distance, of those met by placing all words anew until they stay; `window` at `left` at first."""
    now, words = window, batch.words.cpu().numpy()
    for _ in range(PLACINGS):
        slopes, (distance,) = batch.at(now[None])
        if distance < left:
            window, left = now, float(distance)
        again = words[_placed(slopes[0], batch.seen)]
        if left < CLOSE or np.array_equal(again, now):
            break
        now = again
    return window, left


def _placed(slopes: Array, seen: Array) -> Array:
    """For each place of a window the index of a word (length,): each word at least once, so that its places' slopes add up to its row.

    `slopes` (length, units) are those of another order of nearly the same words, which change slowly with it; `seen` (k, units) the rows.
    """
    total = slopes.sum(axis=0)
    rest = seen * float(total @ total) / max(float(total @ seen.sum(axis=0)), 1e-300)  # in the units of the slopes: sums are alike
    window = np.full(len(slopes), -1)
    words, places = linear_sum_assignment(cdist(rest, slopes, "sqeuclidean"))
    window[places] = words
    rest[words] -= slopes[places]
    for place in sorted(np.flatnonzero(window < 0), key=lambda place: -float(slopes[place] @ slopes[place])):
        window[place] = int((rest @ slopes[place]).argmax())
        rest[window[place]] -= slopes[place]
    return window


class _Rows:
    """What windows of certain words give as embedding gradients at a model, compared with those seen."""

    def __init__(self, model: Model, vector: Array, words: Array, seen: Array, label: int) -> None:
        single = replace(model, dtype="float32")  # orders differ by far more than its rounding
        self.module, self.words, self.label = single.lent(vector.astype(np.float32)), tensor(words), label
        self.embedding = next(inner for inner in self.module.modules() if isinstance(inner, nn.Embedding))
        self.seen = seen / np.linalg.norm(seen)

    def at(self, windows: Array) -> tuple[Array, Array]:
        """The loss's slopes (r, length, units) by the words of windows (r, length), and 1 − cosine (r,) of their rows and those seen."""
        x = tensor(windows)
        made: list[torch.Tensor] = []

        def cut(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            made.append(output.detach().requires_grad_(True))
            return made[-1]

        handle = self.embedding.register_forward_hook(cut)
        try:
            scores = self.module(x)
        finally:
            handle.remove()  # the module is shared
        loss = functional.cross_entropy(scores, torch.full((len(x),), self.label, device=x.device), reduction="sum")
        (slopes,) = torch.autograd.grad(loss, made)
        places = (x[:, :, None] == self.words).to(slopes.dtype)
        produced = torch.einsum("rlk,rle->rke", places, slopes).flatten(1).double()
        seen = tensor(self.seen).flatten()[None]
        return slopes.cpu().numpy().astype(np.float64), 1 - functional.cosine_similarity(produced, seen, dim=1).cpu().numpy()


def _neighbours(window: Array, words: Array) -> Array:
    """Windows that differ by one swap or, where words repeat, by one word: (r, length)."""
    length, windows = len(window), []
    for i in range(length):
        for j in range(i + 1, length):
            if window[i] != window[j]:
                windows.append(window.copy())
                windows[-1][[i, j]] = window[[j, i]]
    if len(words) < length:
        for i in range(length):
            for word in words[words != window[i]]:
                windows.append(window.copy())
                windows[-1][i] = word
    return np.stack(windows) if windows else window[None]


# --- the attack ---------------------------------------------------------------------------------------------------------------------


def guess(steps: Mapping[int, ClientStep] | None, prior: Prior, clients: Sequence[int], model: Model) -> dict[int, Array]:
    """The words (k,) of each client. Without a view: the commonest auxiliary words, as many as so many auxiliary windows have."""
    if steps is None:
        return {client: _common(prior, prior.samples_per_client[client]) for client in clients}
    embedding = embedding_of(model)
    assert embedding is not None  # checked by the caller
    offset, shape = embedding
    return {client: tokens_from_rows(steps[client].update[offset : offset + shape[0] * shape[1]].reshape(shape)) for client in clients}


def guess_windows(steps: Mapping[int, ClientStep] | None, prior: Prior, clients: Sequence[int], model: Model) -> dict[int, Array]:
    """The windows (n, length) of each client. Without a view: the commonest auxiliary word of each place."""
    length, counts = model.shape[0], {client: prior.samples_per_client[client] for client in clients}
    if steps is None:
        common = np.array([np.bincount(column).argmax() for column in prior.x.reshape(len(prior.x), -1).astype(np.int64).T])
        return {client: np.repeat(common[None], counts[client], axis=0) for client in clients}
    embedding, span, attends = embedding_of(model), bias_span(model), has_attention(model)
    assert embedding is not None  # checked by the caller
    offset, shape = embedding
    windows = {}
    for client in clients:
        step = steps[client]
        rows = -step.update[offset : offset + shape[0] * shape[1]].reshape(shape)
        words = tokens_from_rows(rows)
        windows[client] = np.full((counts[client], length), -1)
        if attends and len(words):
            rng = stream(prior.seed, "texts from spans", step.round, client=client)
            windows[client] = windows_from_spans(model, step.start, step.update, counts[client], words, rng)
        if counts[client] > 1 or span is None or not 0 < len(words) <= length or (windows[client] >= 0).all():
            continue
        label = int(step.update[span].argmax())  # of one sample the score of its label alone is raised
        windows[client] = window_from_rows(model, step.start, rows, label, length)[0][None]
    return windows


def _in_place(windows: Array, truth: Array) -> float:
    """The share of words that are right at their place, windows (n, length) matched one to one with the true ones (n, length)."""
    shares = (windows[:, None] == truth[None]).mean(axis=2)
    rows, columns = linear_sum_assignment(-shares)
    return float(shares[rows, columns].mean())


def _common(prior: Prior, count: int, without: Array | None = None) -> Array:
    """The commonest auxiliary words, as many as `count` auxiliary windows have on average; of those not `without` (words,) bool."""
    rng, x = stream(prior.seed, "words of auxiliary windows"), prior.x.reshape(len(prior.x), -1).astype(np.int64)
    distinct = np.mean([len(np.unique(x[rng.permutation(len(x))[:count]])) for _ in range(DRAWS)])
    order = np.argsort(-np.bincount(x.ravel()), kind="stable")
    return (order if without is None else order[~without[order]])[: round(float(distinct))]


def token_cells(case: Case, name: str) -> list[Cell]:
    """Words of clients from the first update of each that can be read, and the order of those of clients with one window."""
    metrics = ("token_share", "token_precision", "words_in_place")
    if why := refusal(case, decays=("sgd", "adam")) or blind(case.view):
        return [nothing(case, name, metrics[0], why)]
    prior, model = case.prior, public_model(case.prior)
    if refusal(case):  # weights decay: what nobody's words moved is told from it as in sums
        return _cells_of_sums(case, name, model)
    observed, reference = (
        {client: client_steps[0] for client, client_steps in single_steps(steps_in(view, model.dimension, case)).items()}
        for view in (case.view, case.reference)
    )
    clients = sorted((set(observed) & set(reference)) - set(case.view.coalition))[: CLIENTS_PER_DRAW * case.budget.draws]
    if not clients:
        return _cells_of_sums(case, name, model)
    truth = {client: case.truth.data[client][0].reshape(-1, model.shape[0]).astype(np.int64) for client in clients}
    note = (
        f"words of {len(clients)} client(s), padding and the unknown word included, by the embedding's rows that move, first update; "
        f"{prior.description}; baseline: the commonest auxiliary words, as many as auxiliary windows have"
    )
    same = all(np.array_equal(observed[client].update, reference[client].update) for client in clients)
    guesses = [guess(steps, prior, clients, model) for steps in (observed, None, reference)]
    figures = []
    for metric, score in zip(metrics, (_found, _right), strict=False):
        scores = [np.array([score(guessed[client], truth[client]) for client in clients]) for guessed in guesses]
        figures.append(cell(case, name, metric, *scores, margin=MARGIN, note=note))
    most = MOST_WINDOWS if has_attention(model) else int(bias_span(model) is not None)
    single = [client for client in clients if len(truth[client]) <= most and _is_one_step(observed[client], prior)]
    if single:
        windows = [guess_windows(steps, prior, single, model) for steps in (observed, None)]
        windows.append(windows[0] if same else guess_windows(reference, prior, single, model))
        scores = [np.array([_in_place(guessed[client], truth[client]) for client in single]) for guessed in windows]
        many, how = ("up to 8 windows", "by the spans of attention layers") if most > 1 else ("one window", "by matching gradients")
        note = (
            f"words of {len(single)} client(s) with {many} of {model.shape[0]}, in order, {how}; {prior.description}; "
            "baseline: the commonest auxiliary word of each place"
        )
        figures.append(cell(case, name, metrics[2], *scores, margin=MARGIN, note=note))
    return figures


def _found(words: Array, truth: Array) -> float:
    """The share of a client's words that were recovered."""
    return float(np.isin(np.unique(truth), words).mean())


def _right(words: Array, truth: Array) -> float:
    """The share of the recovered words that are a client's; 0 if there are none."""
    return float(np.isin(words, truth).mean()) if len(words) else 0.0


def _is_one_step(step: ClientStep, prior: Prior) -> bool:
    return local_of(step, prior).steps(1) == 1


def refusal(case: Case, feature: str = "word", *, decays: Collection[str] = (), is_zero: bool = False) -> str:
    """Why this run is not attempted; empty if it is. What is read are the zeros of each `feature`, a word of an embedding or an input.

    `decays` are the optimisers whose weight decay, which moves the parameters of every feature, is taken off. `is_zero`: what clients are
    sent beside models is read as well, as parameters of absent features are exactly zero in it.
    """
    assert case.prior.config is not None  # checked by the caller
    if case.prior.private:
        return f"not attempted: the noise of [privacy] moves the parameters of every {feature}; {feature}s may still leak"
    for local in trainings_in(case.reference).all:
        weighted = local.beyond in WEIGHTS_ALONE and not (local.train.weight_decay and local.train.optimizer == "adam")
        read = weighted or (is_zero and not local.train.weight_decay)
        if (local.beyond and not read) or local.held_back:
            return f"not attempted: updates hold more than training on all samples; {feature}s may still leak"
        if local.train.weight_decay and local.train.optimizer not in decays:
            return f"not attempted: weight decay moves the parameters of every {feature}; {feature}s may still leak"
    return ""


# --- words of sums ------------------------------------------------------------------------------------------------------------------


def _cells_of_sums(case: Case, name: str, model: Model) -> list[Cell]:
    """Words of cohorts, each as a whole, and of the members, where only sums can be read."""
    feature = features_of(model)
    assert feature is not None  # there is an embedding
    pools = [pools_in(case, view, model, feature) for view in (case.view, case.reference)]
    known = {client: feature.of(case.truth.data[client][0]) for client in case.view.coalition}
    owners = [owners_of(of_view, known) for of_view in pools]
    clients = sorted((set(owners[0].clients) & set(owners[1].clients)) - set(known))
    if not clients:
        why = unread_movement(case.view, model.dimension) or NOTHING_READ
        return [nothing(case, name, "token_share", why)]
    truth = {client: feature.of(case.truth.data[client][0]) for client in {*clients, *known}}
    cohorts = _cohort_figures(case, name, feature, pools, truth)
    if case.view.adversary == "released":  # nobody is named
        return cohorts or [nothing(case, name, "cohort_token_share", NOTHING_READ)]
    return [*cohorts, *_member_figures(case, name, clients, owners, truth)]


def _member_figures(
    case: Case, name: str, clients: Sequence[int], owners: Sequence[Owners], truth: Mapping[int, Array]
) -> list[Cell]:  # fmt: skip
    """The words of each member: those attributed to it, and common words that it is not known to lack."""
    prior = case.prior
    blank = {client: _common(prior, prior.samples_per_client[client]) for client in clients}
    guessed = [{client: _likely_words(of_view, prior, client) for client in clients} for of_view in owners]
    note = (
        f"words of {len(clients)} client(s) from sums over cohorts, by the embedding's rows that do not move, all rounds: those that "
        f"follow from the cohorts, then common words that may be the client's; {prior.description}; baseline: the commonest auxiliary words"
    )
    figures = []
    for metric, score in (("token_share", _found), ("token_precision", _right)):
        tables = [
            np.array([[score(words[of], np.flatnonzero(truth[client])) for client in clients] for of in clients])
            for words in (*guessed, blank)
        ]
        observed, reference, beside = (np.diag(table) for table in tables)
        chances = [
            max(chance_of_matching(-table, stream(case.seed, f"{metric} dealt again")), chance(np.diag(table), beside, MARGIN))
            for table in tables[:2]
        ]
        made = cell(case, name, metric, observed, beside, reference, margin=MARGIN, note=note, chances=(chances[0], chances[1]))
        figures.append(replace(made, power=power(observed, beside, reference, beside, MARGIN)))
    return figures


def _likely_words(owners: Owners, prior: Prior, client: int) -> Array:
    """The words (k,) attributed to a client, and the commonest others that it may have, up to as many as its number of windows has."""
    own, excluded = owners.attributed_to(client), owners.excluded_of(client)
    common = _common(prior, prior.samples_per_client[client], excluded | own)
    number = len(_common(prior, prior.samples_per_client[client]))
    return np.concatenate([np.flatnonzero(own), common[: max(0, number - int(own.sum()))]])


def _cohort_figures(
    case: Case, name: str, feature: Feature, pools: Sequence[Sequence[Pool]], truth: Mapping[int, Array]
) -> list[Cell]:  # fmt: skip
    """The words of cohorts, each as a whole: nothing about a member."""
    prior, most = case.prior, CLIENTS_PER_DRAW * case.budget.draws
    sums = [pool for pool in pools[0] if set(pool.members) <= set(truth)][:most]
    alone = [pool for pool in pools[1] if len(pool.members) == 1 and pool.members[0] in truth][:most]
    if not sums or not alone:
        return []
    real = [np.asarray(np.any([truth[client] for client in pool.members], axis=0)) for pool in sums]
    samples = [sum(prior.samples_per_client[client] for client in pool.members) for pool in sums]
    few = [prior.samples_per_client[pool.members[0]] for pool in alone]
    marks = np.eye(feature.count, dtype=bool)
    common = {count: np.asarray(marks[_common(prior, count)].any(axis=0)) for count in {*samples, *few}}
    note = (
        f"words of the cohorts of {len(sums)} sum(s), each as a whole: nothing about a member; by the embedding's rows that move; "
        f"{prior.description}; baseline: the commonest auxiliary words, as many as so many auxiliary windows have"
    )
    figures = []
    for metric, score in (("cohort_token_share", _share), ("cohort_token_precision", _precision)):
        observed = np.array([score(pool.present, of) for pool, of in zip(sums, real, strict=True)])
        blank = np.array([score(common[count], of) for count, of in zip(samples, real, strict=True)])
        reference = np.array([score(pool.present, truth[pool.members[0]]) for pool in alone])
        beside = np.array([score(common[count], truth[pool.members[0]]) for pool, count in zip(alone, few, strict=True)])
        rng = stream(case.seed, f"{metric} of drawn windows")

        def gain(score: _Score = score, rng: np.random.Generator = rng) -> float:
            drawn = [feature.of(prior.x[rng.integers(len(prior.x), size=count)]) for count in samples]
            gains = [score(pool.present, of) - score(common[n], of) for pool, of, n in zip(sums, drawn, samples, strict=True)]
            return float(np.mean(gains))

        chances = (chance_of_draws(float((observed - blank).mean()), gain), chance(reference, beside, MARGIN))
        made = cell(
            case, name, metric, observed, blank, reference, reference_blank=beside, margin=MARGIN, note=note, chances=chances
        )  # fmt: skip
        figures.append(made)
    return figures


def _share(words: Array, truth: Array) -> float:
    """The share of the true words that were recovered, both (words,) bool."""
    return float((words & truth).sum() / max(1, truth.sum()))


def _precision(words: Array, truth: Array) -> float:
    """The share of the recovered words that are true, both (words,) bool; 0 if there are none."""
    return _share(truth, words)
