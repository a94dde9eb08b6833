"""Images from sums: the mean update of a cohort is the gradient of one batch, that of all its members' samples.

The methods are those for a single update (`inversion_ladder`). With members i of weights w_i, a sum's gradient of the first linear layer is
D X as for a batch: X are the inputs of all samples, and w_i only scales columns of D. So the closed form, SPEAR and the feature decoder fit
as they are. The optimisation models the mean over all samples, which a sum is after one step if members count by their samples.

Source: Dimitrov et al. 2024 for SPEAR; that a sum is a batch follows from the linearity of gradients.

What it proves: secure aggregation of few small updates hides whose an image is, not the image. What it does not: who owns which image. So
the figure is of a cohort's samples. Sums of more samples than a rung takes are not attempted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from ...randomness import stream
from ...types import Array
from ..evidence.coalition import cohorts_assumed, weights_of
from ..evidence.updates import ClientStep, local_of
from ..figures.leakage import Case, Prior, Truth

__all__ = [
    "SumBatch", "Draw", "batches_in", "gain_of_draw", "is_mean_of_samples", "matched_psnr_db", "psnr_db_of_samples", "psnr_table_db",
    "smallest", "words_of",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class SumBatch:
    """A sum as a batch: its `step`, the number of samples of its members, and the members that no smaller batch has (`first_of`)."""

    step: ClientStep
    samples: int
    first_of: tuple[int, ...]


def batches_in(steps: Mapping[int, Sequence[ClientStep]], prior: Prior, most: int, clients: int) -> list[SumBatch]:
    """The sums over several clients of at most so many samples (`most`), smallest first, until so many `clients` are in any of them.

    Sums in which nobody is new, or a member takes more than one batch a step, are left out.
    """
    covered: set[int] = set()
    batches = []
    for step in sorted(_sums(steps), key=lambda step: (_samples(step, prior), step.round)):
        first_of = tuple(client for client in step.members if client not in covered)
        if _samples(step, prior) > most or not first_of or len(covered) >= clients or not _is_one_batch(step, prior):
            continue
        covered |= set(first_of)
        batches.append(SumBatch(step, _samples(step, prior), first_of))
    return batches


def smallest(steps: Mapping[int, Sequence[ClientStep]], prior: Prior) -> int:
    """The least number of samples of a sum over several clients; 0 where there is no such sum."""
    return min((_samples(step, prior) for step in _sums(steps)), default=0)


def _sums(steps: Mapping[int, Sequence[ClientStep]]) -> list[ClientStep]:
    distinct = {id(step.update): step for client_steps in steps.values() for step in client_steps if len(step.members) > 1}
    return list(distinct.values())


def _samples(step: ClientStep, prior: Prior) -> int:
    return sum(prior.samples_per_client[client] for client in step.members)


def _is_one_batch(step: ClientStep, prior: Prior) -> bool:
    """Whether each member of a sum takes all its samples in each of its steps."""
    size = local_of(step, prior).train.batch_size
    return not size or max(prior.samples_per_client[client] for client in step.members) <= size


def is_mean_of_samples(step: ClientStep, prior: Prior) -> bool:
    """Whether a sum is the update that one client with all the samples would have made: one step, and the same weight for each sample."""
    weights = weights_of(prior, step.members)
    each = {round(weight / prior.samples_per_client[client], 9) for client, weight in weights.items()}
    return len(each) == 1 and local_of(step, prior).train.epochs == 1


# --- scoring ------------------------------------------------------------------------------------------------------------------------


def psnr_table_db(truth: Array, images: Array) -> Array:
    """The PSNR (n, m) of true images (n, *shape) and others (m, *shape) in [0, 1], at most 100 dB."""
    a, b = (np.asarray(array, np.float64).reshape(len(array), -1) for array in (truth, images))
    errors = np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T, 0.0) / a.shape[1]
    return np.asarray(np.minimum(100.0, -10 * np.log10(np.maximum(errors, 1e-10))))


def matched_psnr_db(table: Array) -> Array:
    """The PSNR (n,) of true images by the one-to-one matching of largest total, from the table (n, n) of all pairs."""
    rows, columns = linear_sum_assignment(-table)
    return np.asarray(table[rows, columns][np.argsort(rows)])


@dataclass(frozen=True, eq=False)
class Draw:
    """Mean gains of drawn samples: by batch where samples may be drawn from, their PSNR with its images, and with the mean image."""

    places: Sequence[Sequence[Array]]
    tables: Sequence[Array]
    beside: Array
    rng: np.random.Generator

    def __call__(self) -> float:
        gains = []
        for pools, table in zip(self.places, self.tables, strict=True):
            drawn = np.array([pool[self.rng.integers(len(pool))] for pool in pools])
            gains.append(float((matched_psnr_db(table[drawn]) - self.beside[drawn]).mean()))
        return float(np.mean(gains))


def gain_of_draw(case: Case, batches: Sequence[SumBatch], images: Sequence[Array], blank: Array) -> Draw:
    """What draws other samples of the same labels, and gives their mean gain over the `blank` image (*shape), as `Draw`."""
    prior, truth = case.prior, case.truth
    pools = {int(label): np.flatnonzero(prior.y == label) for label in np.unique(prior.y)}
    labels = [np.concatenate([truth.data[client][1] for client in batch.step.members]) for batch in batches]
    everybody = np.arange(len(prior.y))
    places = [[pools.get(int(label), everybody) for label in of_batch] for of_batch in labels]
    tables = [psnr_table_db(prior.x, made) for made in images]
    beside = psnr_table_db(prior.x, blank[None])[:, 0]
    return Draw(places, tables, beside, stream(case.seed, "samples drawn in place of a cohort's"))


def psnr_db_of_samples(truth: Truth, batches: Sequence[SumBatch], images: Sequence[Array]) -> list[Array]:
    """For each batch the PSNR (n,) of all its members' samples, in the order of members, matched with its `images` (n, *shape)."""
    real = [np.concatenate([truth.data[client][0] for client in batch.step.members]) for batch in batches]
    return [matched_psnr_db(psnr_table_db(samples, made)) for samples, made in zip(real, images, strict=True)]


def words_of(case: Case, batches: Sequence[SumBatch]) -> str:
    """How many images of how many sums, for a note."""
    count, assumed = sum(batch.samples for batch in batches), cohorts_assumed(case)
    words = f"{count} image(s) of the cohorts of {len(batches)} sum(s), which are not attributed to a client"
    return f"{words}; who was in a sum is assumed to be known to its members" if assumed else words
