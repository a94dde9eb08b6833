"""Membership inference: whether a sample was among those a model was trained on.

Three scores, larger for members: the loss itself (Yeom et al. 2018); LiRA, how much likelier the model's confidence is among shadow models
trained with the sample than among those without (Carlini et al. 2022, Algorithm 1, with one variance for all samples, which they advise for
few shadow models); RMIA, in how many pairings with samples of the population its likelihood grew more (Zarifzadeh et al. 2024, mean over
all shadow models as the marginal). Shadow models are trained as clients of one stacked program.

What it proves: what a model shows of single samples, on average (AUC) and at worst (true positives at few false ones). What it does not:
an AUC near one half says nothing of the few samples that stand out. These are functions of arrays; `membership_audit` applies them to
recorded runs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from scipy.optimize import brentq

from ...engine import Engine, Streams, TaskInput
from ...engine.device import tensor
from ...engine.losses import loss_of
from ...engine.models import Model
from ...errors import InputError
from ...tasks.training import Train
from ...types import Array, ClientData
from ..figures.significance import proportion_interval

__all__ = [
    "Roc", "auc_interval", "confidences", "samples_of_shadows", "deal_in_pairs", "lira", "lira_in_turn", "loss_threshold", "placements",
    "rmia", "roc", "shadow_models", "threshold",
]  # fmt: skip


SCALE = 0.02
"""Twice the variance of a normal error of a tenth, where a label's public range is −1 to 1."""


@dataclass(frozen=True)
class Roc:
    """How well scores part members from others. `tpr` is at the largest false-positive rate that is at most the one asked for: `fpr`.

    Intervals are 95 %: of the AUC by `auc_interval`, of the TPR exact for a fixed threshold. With fewer than 1 / rate
    `non_members` the only such rate is 0.
    """

    auc: float
    auc_interval: tuple[float, float]
    tpr: float
    tpr_interval: tuple[float, float]
    fpr: float
    members: int
    non_members: int


def roc(scores: Array, member: Array, rate: float = 0.01) -> Roc:
    """The figures of scores (n,) for who is a member (n,) bool. Raises `InputError` without members or without others."""
    inside, outside = scores[member], scores[~member]
    if not len(inside) or not len(outside):
        raise InputError(f"membership: {len(inside)} members and {len(outside)} others; both are needed")
    auc = float(stats.mannwhitneyu(inside, outside).statistic) / (len(inside) * len(outside))
    bar = threshold(scores, member, rate)
    hits = (inside > bar).astype(np.float64)
    return Roc(
        auc, auc_interval(auc, len(inside), len(outside)), float(hits.mean()), proportion_interval(hits), float((outside > bar).mean()),
        len(inside), len(outside),
    )  # fmt: skip


def auc_interval(auc: float, members: float, others: float) -> tuple[float, float]:
    """A 95 % interval for an AUC from so many independent scores on either side: the values θ that it is within 1.96 deviations of.

    Newcombe 2006, method 5: the variance at θ, not at the AUC, so that an AUC of 1 from few scores is no point.
    """
    more, square = (members + others) / 2 - 1, stats.norm.ppf(0.975) ** 2

    def excess(theta: float) -> float:
        spread = theta * (1 - theta) * (1 + more * ((1 - theta) / (2 - theta) + theta / (1 + theta))) / (members * others)
        return float((auc - theta) ** 2 - square * spread)

    low = 0.0 if auc <= 0 else brentq(excess, 0.0, min(auc, 1 - 1e-9))
    high = 1.0 if auc >= 1 else brentq(excess, max(auc, 1e-9), 1.0)
    return float(low), float(high)


def threshold(scores: Array, member: Array, rate: float = 0.01) -> float:
    """The lowest bar that at most a share `rate` of the others is above."""
    outside = scores[~member]
    allowed = int(rate * len(outside))  # so many false positives
    return float(np.sort(outside)[::-1][allowed]) if allowed < len(outside) else -np.inf


def placements(scores: Array, member: Array) -> tuple[Array, Array]:
    """For each member the share of others below it, for each other the share of members above it; ties count half.

    The mean of either is the AUC.
    """
    inside, outside = np.sort(scores[member]), np.sort(scores[~member])
    below = [np.searchsorted(outside, scores[member], side=side) for side in ("left", "right")]
    above = [np.searchsorted(inside, scores[~member], side=side) for side in ("left", "right")]
    return (below[0] + below[1]) / (2 * len(outside)), 1 - (above[0] + above[1]) / (2 * len(inside))


def samples_of_shadows(samples: int, shadows: int, rng: np.random.Generator) -> Array:
    """Which shadow model has which sample, (shadows, samples) bool: each sample in half of them. `shadows` is even."""
    if shadows < 2 or shadows % 2:
        raise InputError(f"shadows: {shadows} is not an even number of 2 or more")
    return np.argsort(rng.random((shadows, samples)), axis=0) < shadows // 2


def deal_in_pairs(samples: int, pairs: int, rng: np.random.Generator) -> Array:
    """Which of 2p models has which sample, (2p, samples) bool: the i-th by coins, the (p + i)-th those that the i-th lacks."""
    coins = rng.random((pairs, samples)) < 0.5
    return np.concatenate([coins, ~coins])


def shadow_models(train: Train, x: Array, y: Array, inside: Array, start: Array, seed: int, engine: Engine | None = None) -> Array:
    """Models (s, d) trained from `start` (d,) on the samples of each row of `inside` (s, n), all in one run of the engine."""
    engine = engine or Engine()
    inputs = [
        TaskInput(ClientData(i, x[row], y[row], x[:0], y[:0]), {"model": start}, {}, Streams(seed, 0, i)) for i, row in enumerate(inside)
    ]
    return np.stack([start + np.asarray(result["update"]) for result in engine.run(train, inputs)])


def confidences(model: Model, vectors: Array, x: Array, y: Array) -> Array:
    """log(p / (1 − p)) of the true label's probability p by each model (s, d) on each sample, (s, n), from logits in float64.

    Of a label that is a number, p is exp(−loss / SCALE): the likelihood, up to its maximum, of a normal error.
    """
    rows = []
    for vector in vectors:
        module = model.lent(np.asarray(vector))
        with torch.no_grad():
            logits = module(model.inputs(x)).double()
            if model.loss != "cross_entropy":
                log_p = -loss_of(model.loss, logits, tensor(y), "none").clamp_min(1e-12) / SCALE
                rows.append((log_p - torch.log(-torch.expm1(log_p))).cpu().numpy())
                continue
        labels = tensor(y)[:, None]
        own = labels == torch.arange(model.classes, device=labels.device)
        rest = logits.masked_fill(own, -torch.inf).logsumexp(dim=1)
        rows.append((logits[own] - rest).cpu().numpy())
    return np.stack(rows)


def loss_threshold(target: Array) -> Array:
    """Scores (n,) of confidences (n,): the negative loss, log p."""
    return np.asarray(-np.logaddexp(0.0, -target))


def lira(target: Array, shadow: Array, inside: Array) -> Array:
    """The log-likelihood ratio (n,) of the target's confidences (n,) under shadow confidences (s, n) with and without each sample."""
    ratio = np.zeros(len(target))
    for sign, mask in ((1.0, inside), (-1.0, ~inside)):
        count = mask.sum(axis=0)
        if (count == 0).any():
            raise InputError("lira: some sample is in all shadow models, or in none")
        mean = np.where(mask, shadow, 0.0).sum(axis=0) / count
        squares = np.where(mask, (shadow - mean) ** 2, 0.0).sum()
        deviation = float(np.sqrt(squares / max(int((count - 1).sum()), 1))) + 1e-12
        ratio += sign * stats.norm.logpdf(target, mean, deviation)
    return ratio


def lira_in_turn(seen: Array, inside: Array) -> list[Roc]:
    """LiRA on each of 2p models by their confidences `seen` (2p, n), where samples were dealt in pairs, `inside` (2p, n).

    Shadows are all pairs but the model's own, so its coins are independent of theirs, which have each sample in half of them, and
    confidences that show nothing have a mean AUC of one half. With all others as shadows it would be less (.475 with eight): those that
    have a sample are one fewer where the model has it, so their mean is farther from its confidence.
    """
    pair = np.arange(len(seen)) % (len(seen) // 2)
    return [roc(lira(seen[i], seen[pair != pair[i]], inside[pair != pair[i]]), inside[i]) for i in range(len(seen))]


def rmia(target: Array, shadow: Array, others: Array, shadow_others: Array, gamma: float = 1.0) -> Array:
    """Shares (n,) of population samples z for which (p(x|θ)/p(x)) / (p(z|θ)/p(z)) ≥ gamma.

    Confidences of the target (n,) and the shadow models (s, n) on the samples, and (z,), (s, z) on samples that nobody trained on.
    """
    ratios, other_ratios = (loss_threshold(at) - _log_mean(loss_threshold(by)) for at, by in ((target, shadow), (others, shadow_others)))
    return np.asarray((ratios[:, None] - other_ratios[None, :] >= np.log(gamma)).mean(axis=1))


def _log_mean(values: Array) -> Array:
    return np.asarray(np.logaddexp.reduce(values, axis=0) - np.log(len(values)))
