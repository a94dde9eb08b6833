"""The statement of a leak: a value with an interval, beside its no-view baseline and its unprotected reference.

Status of a cell:

- `leaks`: the attack beats the baseline by the margin.
- `at_baseline`: the attack does not beat the baseline, although it does on the unprotected reference; or a proof (`exact`) shows no leak.
- `not_validated`: the attack beats the baseline neither here nor on the reference.
- `not_attempted`: the attack was not made on what the view holds.
- `not_applicable`: the view holds nothing of the form that this attack reads, or the truth nothing to find. Other attacks read the rest.
- `nothing_to_see`: no number in the view was derived from the data of a client that does not collude (`payloads`).
- `inconclusive`: the seeds show neither a leak nor its absence.
- `evidence_doubtful`: what was to be attacked failed a check (`foreign.foreign_evidence`), so the attack was not made.

With one seed, interval and status are over clients. Over several seeds (`pooling`), value, baseline and reference are means over seeds, and
the interval is over seeds. The probability that a figure without a leak is reported as a leak is at most `RATE`. Tests of one figure share
this rate: half for the recorded run by itself, a quarter for all runs by themselves (the smallest p, and all p together), the rest for a
paired t-test over seeds. The figures of an audit are corrected for their number (`family`). Where one run is no more than a toss of a coin
(`Cell.coin`), a leak needs six seeds or more, and nearly all have to agree. With fewer
the figure is `inconclusive`, and its note says so.

`at_baseline` needs an interval of the paired difference whose far end is within the margin, and a power of at least `ENOUGH`. Power: the
probability that a leak half as large as the unprotected run's would be reported (`significance.power`; over seeds: of the t-test alone). An
attack that plants leaks of its own states its power itself. A proof (`exact`) needs no power. A figure stays `inconclusive` over seeds if
its attack leaves a run `inconclusive` (the attack abstains, or its failure shows nothing), or if not all rounds were attacked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from ...errors import InputError
from ...experiments.config.config import Config
from ...privacy.settings import Privacy
from ...randomness import stream
from ...types import Array, ClientData, Population
from ..adversary import AdversaryView
from .payloads import depends_on_data
from .significance import (
    FEWEST_COUNTS,
    FEWEST_SCORES,
    LEAST_SHOWN,
    RATE,
    SHARES,
    CellStatus,
    chance,
    chance_of_count,
    chance_of_matching,
    confidence_interval,
    interval,
    is_count,
    judge,
    p_words,
    power,
)

NOT_ATTEMPTED = "not attempted"
MOST_CHANNELS = 4
"""Of an image. Maps with more, such as features of images, have no strokes and no width."""
DEALS, ENOUGH_DEALS = 1999, 20
"""So many make the least p so small that a figure can stand among a hundred (`family`)."""
__all__ = [
    "BUDGETS", "Budget", "Case", "Cell", "Prior", "Truth", "cell", "chance_of_deals", "chance_of_names", "cosine", "dealt_at_random",
    "group_cell", "grouping_accuracy", "in_words_of", "is_image", "label_sets_of", "nothing", "one_group", "popular_set", "psnr_db", "ssim",
]  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One figure of the leakage table.

    `low`, `high`: a 95 % interval, over seeds if there are three or more `seeds`, else over clients; None where nothing varies and no
    counts are known. `baseline`: the same attack without a view. `reference`, `reference_baseline`: the figure and the baseline on the
    unprotected pipeline. `margin`: by how much a leak must beat the baseline. `lower_is_better`: the figure is an error. `exact`: a single
    success is a leak, since chance gives none. `coin`: one run is a toss of a coin, whatever is averaged in it, so over seeds a leak has to
    be improbable for tosses as well. `k_known`: the number of clients whose data the attacker knows. `rounds`: the number of attacked
    rounds (0: all). `arrays`: the name of a file in audit/. `p`: the probability of so large a gain without a leak, in one run or over all
    seeds, where a test decides the status. `counted`: the number of yes-or-no scores of a share (0: other scores). `towards`: the party
    that an audited guarantee protects against, where that party is not the adversary. `power`: the probability that the same attack would
    show a leak half as large as the unprotected run's, or of the size that the note states. `power_low`: the lower end of `power` at 95 %,
    where planted leaks gave it. `gain_high`: the far end of the 95 % interval of the gain over the scores of one run. None: not known.
    """

    attack: str
    adversary: str
    protection: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    baseline: float | None
    reference: float | None
    status: CellStatus
    k_known: int = 0
    seeds: tuple[int, ...] = ()
    note: str = ""
    arrays: str | None = None
    margin: float = 0.0
    lower_is_better: bool = False
    reference_baseline: float | None = None
    exact: bool = False
    coin: bool = False
    rounds: int = 0
    p: float | None = None
    counted: int = 0
    towards: str = ""
    power: float | None = None
    power_low: float | None = None
    gain_high: float | None = None

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))  # fields are plain values: `asdict` would copy each

    def line(self) -> str:
        """The cell as one line of text."""
        if self.status == "evidence_doubtful":  # the verdict has the reason, which is the same for all figures
            return f"{self.attack} / {self.metric} ({self.adversary}, {self.protection}): {self.status}"
        if self.value is None:
            why = self.note.removeprefix(NOT_ATTEMPTED).lstrip(":, ")  # the status says that already
            return f"{self.attack} / {self.metric} ({self.adversary}, {self.protection}): {self.status}; {why}"
        known = f", k = {self.k_known}" if self.k_known else ""
        interval = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        beside = f"baseline {self.baseline:.3f}" + ("" if self.reference is None else f", unprotected {self.reference:.3f}")
        seeds = f", {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        towards = f", a guarantee towards {self.towards}" if self.towards else ""
        where = f"{self.adversary}, {self.protection}{known}{seeds}{towards}"
        power = "" if self.power is None else f", power {self.power:.2f}"
        power += "" if self.power_low is None else f" (at least {self.power_low:.2f})"
        return f"{self.attack} / {self.metric} ({where}): {self.value:.3f}{interval}; {beside}: {self.status}{power}{self._rule()}"

    def _rule(self) -> str:
        """What decided the status, for people."""
        if self.status == "not_validated" and self.reference is not None and self.reference_baseline is not None:
            gain = (self.reference - self.reference_baseline) * (-1.0 if self.lower_is_better else 1.0)
            above = "is not surely above it" if gain > self.margin else "is not above it"
            return f" (margin {self.margin:g}: what the unprotected run gains, {gain:.3f}, {above})"
        if self.status == "not_validated" and self.reference is None:  # another system's: the note ends with the reason
            return f" ({self.note.rsplit('; ', 1)[-1]})"
        if self.p is None or self.exact or self.status in ("nothing_to_see", "not_applicable", "not_attempted"):
            return ""
        beyond = self.status == "inconclusive" and self.gain_high is not None and self.gain_high > self.margin
        return f" (margin {self.margin:g}, {p_words(self.p)}{f'; the gain may be {self.gain_high:.2f}' if beyond else ''})"


@dataclass(frozen=True, eq=False)
class Prior:
    """What an attacker knows beforehand: labelled auxiliary samples, the shape of a sample, how many labels and samples each client has.

    `description` states this knowledge for people, with size and distribution, and goes into every cell's note. `rows_per_part` is the
    public number of rows of a signature for each label, or each half, of a client's data (0: all rows are of all samples). `groups` is the
    number of true groups. `config` is the public configuration: model, learning rate, steps. `mean` and `std` are the data set's.
    `simulate` runs the public pipeline, in the clear, on data (x, y) of simulated clients. It returns what these clients would upload for
    comparison, shape (m, p, d); None where the pipeline compares nothing at its start. `simulate_open` runs the pipeline without
    `[privacy]`.
    """

    x: Array
    y: Array
    classes: int
    shape: tuple[int, ...]
    labels_per_client: Mapping[int, int]
    description: str
    rows_per_part: int = 0
    samples_per_client: Mapping[int, int] = field(default_factory=dict)
    groups: int = 0
    config: Config | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    simulate: Callable[[Sequence[tuple[Array, Array]]], Array | None] = lambda clients: None
    seed: int = 0
    simulate_open: Callable[[Sequence[tuple[Array, Array]]], Array | None] = lambda clients: None

    @property
    def private(self) -> bool:
        """Whether the run has `[privacy]`, so that clients clip, and perhaps sketch, what they send."""
        return self.config is not None and self.config.privacy.unit != "none"

    @property
    def halves(self) -> bool:
        """Whether clients let values of two halves of their data be compared."""
        return self.config is not None and self.config.spec.compared(self.config.algorithm).halves

    @property
    def of_samples(self) -> bool:
        """Whether vectors as long as samples are compared."""
        return self.config is not None and self.config.spec.compared(self.config.algorithm).of_samples

    @property
    def moments(self) -> bool:
        """Whether clients let noisy second moments be compared in place of principal vectors."""
        return self.halves and self.of_samples and self.config is not None and self.config.privacy.unit == "sample"

    def unprotected(self) -> "Prior":
        """The prior for the unprotected reference: there nobody clips."""
        if not self.private or self.config is None:
            return self
        return replace(self, config=replace(self.config, privacy=Privacy()), simulate=self.simulate_open)


@dataclass(frozen=True, eq=False)
class Truth:
    """What a scorer knows of each client: mean training image, labels, how many samples of each (classes,), true group, samples (x, y).

    `outside` are the client's test samples (x, y), and nobody trained on them. Without `groups_known` numbers of groups mean nothing.
    """

    mean_images: Mapping[int, Array]
    label_sets: Mapping[int, frozenset[int]]
    label_counts: Mapping[int, Array] = field(default_factory=dict)
    groups: Mapping[int, int] = field(default_factory=dict)
    data: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)
    outside: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)
    groups_known: bool = True

    def histogram(self, client: int) -> Array:
        """The shares of a client's labels, shape (classes,)."""
        return np.asarray(self.label_counts[client] / self.label_counts[client].sum())


@dataclass(frozen=True)
class Budget:
    """How much an audit may do: runs with fresh seeds (the recorded one included), auxiliary samples, draws of known clients.

    `rounds` limits attacks that take rounds one by one. `shadows` is the number of shadow models of the membership attack. Fresh runs take
    about `seconds` at most in all, by the recorded run's own time. If they would take longer, an audit uses fewer seeds. If one run alone
    would take longer, only its first rounds are made again.
    """

    seeds: int
    auxiliary: int
    draws: int
    rounds: int
    seconds: float
    shadows: int = 8


BUDGETS: dict[str, Budget] = {
    "quick": Budget(seeds=1, auxiliary=1000, draws=2, rounds=1, seconds=30.0),
    "standard": Budget(seeds=5, auxiliary=2000, draws=4, rounds=3, seconds=90.0),
    "thorough": Budget(seeds=10, auxiliary=2000, draws=10, rounds=5, seconds=3600.0, shadows=32),
}


@dataclass(frozen=True, eq=False)
class Case:
    """One adversary on one run. `reference` is the server's view of the same pipeline without protection, on the same data and seed.

    `rows` are the vectors that clients had compared when the run began, by client, (p, d): truth for scorers, and the attacker's knowledge
    of the clients it knows. `record` is the server's view of the attacked run, for scorers that ask who was in a sum. `has_updates`: the
    adversary has clients' updates that are in no message of `view`, as in another system.
    """

    view: AdversaryView
    reference: AdversaryView
    prior: Prior
    truth: Truth
    protection: str
    seed: int = 0
    budget: Budget = BUDGETS["standard"]
    rows: Mapping[int, Array] = field(default_factory=dict)
    record: AdversaryView | None = None
    has_updates: bool = False


def prior_of(population: Population, seed: int, size: int = 2000, rows_per_part: int = 0, config: Config | None = None) -> Prior:
    """An attacker with data of the same distribution that no client trained on: a sample of the clients' test data, without owners."""
    pools = {id(client.x_test): client for client in population.clients}.values()  # clients of a group may share one test set
    x = np.concatenate([client.x_test for client in pools])
    y = np.concatenate([client.y_test for client in pools])
    chosen = stream(seed, "auxiliary data").permutation(len(y))[:size]
    labels = {client.id: len(np.unique(_classes(client))) for client in population.clients}
    words = (
        f"auxiliary data: {len(chosen)} labelled samples of the clients' test distribution (no shift), unknown owners; "
        "numbers of samples and of labels a client known"
    )
    return Prior(
        x[chosen], y[chosen], population.classes, population.shape, labels, words, rows_per_part,
        {client.id: client.samples for client in population.clients}, len(set(population.groups)), config,
        population.mean, population.std, seed=seed,
    )  # fmt: skip


def _classes(client: ClientData) -> Array:
    """The classes (n,) of the training samples; 0 for all where labels are numbers."""
    return np.zeros(len(client.y_train), np.int64) if client.y_train.dtype.kind == "f" else client.y_train


def truth_of(population: Population) -> Truth:
    """The truth to score against."""
    return Truth(
        {client.id: client.x_train.mean(axis=0, dtype=np.float64) for client in population.clients},
        {client.id: frozenset(int(label) for label in np.unique(_classes(client))) for client in population.clients},
        {client.id: np.bincount(_classes(client), minlength=population.classes) for client in population.clients},
        population.group_of,
        {client.id: (client.x_train, client.y_train) for client in population.clients},
        {client.id: (client.x_test, client.y_test) for client in population.clients},
        groups_known=population.groups_known,
    )


def cell(
    case: Case, attack: str, metric: str, observed: Array, blank: Array, reference: Array, *, margin: float,
    reference_blank: Array | None = None, lower_is_better: bool = False, share: bool = False, k_known: int | None = None, note: str = "",
    chances: tuple[float, float] | None = None,
) -> Cell:  # fmt: skip
    """One figure from scores, one score a client: of the view, of no view, and of the reference.

    `reference_blank`: the no-view scores of the reference, where they differ from `blank`. `share`: scores are 0 or 1, so the interval is
    exact. The interval of any share with such scores is exact, too. There is no interval below three clients, nor where scores do not vary.
    `chances`: the probabilities of the scores of view and reference without a view, where clients' scores depend on each other and no test
    over clients is valid.
    """
    reference_blank = blank if reference_blank is None else reference_blank
    counted = len(observed) if (share or metric.endswith(SHARES)) and is_count(observed) else 0
    if counted and chances is None and len(observed) < FEWEST_COUNTS:
        note += f"; {len(observed)} client(s) of one run cannot validate a yes-or-no figure, which takes {FEWEST_COUNTS}"
    low, high = interval(metric, observed, counted) if len(observed) >= FEWEST_SCORES else (None, None)
    sign = -1.0 if lower_is_better else 1.0
    if not all(np.isfinite(scores).all() for scores in (observed, blank, reference, reference_blank)):
        return nothing(case, attack, metric, f"{NOT_ATTEMPTED}: the attack ended in scores that are no numbers; {note}", k_known)
    shown = None
    if chances is None:
        scores = (sign * observed, sign * blank, sign * reference, sign * reference_blank)
        status, shown = judge(*scores, margin), power(*scores, margin)
        p = chance(sign * observed, sign * blank, margin) if len(observed) >= FEWEST_SCORES else None
    else:
        gains = (float((sign * (observed - blank)).mean()), float((sign * (reference - reference_blank)).mean()))
        p, reference_p = (chance if gain > margin else 1.0 for chance, gain in zip(chances, gains, strict=True))
        status = "not_validated" if reference_p >= RATE else "leaks" if p < RATE else "at_baseline"
    return Cell(
        attack, case.view.adversary, case.protection, metric, float(observed.mean()), low, high,
        baseline=float(blank.mean()), reference=float(reference.mean()), status=status,
        k_known=len(case.view.coalition) if k_known is None else k_known, seeds=(case.seed,), note=note, margin=margin,
        lower_is_better=lower_is_better, reference_baseline=float(reference_blank.mean()), counted=counted, power=shown,
        p=None if p is None else max(p, LEAST_SHOWN),
        gain_high=confidence_interval(sign * (observed - blank))[1] if len(observed) >= FEWEST_SCORES else None,
    )  # fmt: skip


def nothing(case: Case, attack: str, metric: str, why: str, k_known: int | None = None) -> Cell:
    """The cell of an attack without a figure: `not_attempted` if `why` begins with "not attempted", else `not_applicable`.

    Where the view shows no number of clients' data, `not_applicable` becomes `nothing_to_see`.
    """
    known = len(case.view.coalition) if k_known is None else k_known
    none = (None,) * 5
    seen: CellStatus = "not_applicable" if case.has_updates or depends_on_data(case.view) else "nothing_to_see"
    status: CellStatus = "not_attempted" if why.startswith(NOT_ATTEMPTED) else seen
    return Cell(attack, case.view.adversary, case.protection, metric, *none, status, known, (case.seed,), why)


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether samples of this shape are images: not rows of tables, words or feature maps."""
    return len(shape) == 3 and min(shape[1:]) > 1 and shape[0] <= MOST_CHANNELS


def in_words_of(shape: tuple[int, ...], cells: Iterable[Cell]) -> list[Cell]:
    """The cells of an attack, with "sample" in place of "image" where samples of this shape are no images."""
    if is_image(shape):
        return list(cells)
    return [replace(one, metric=one.metric.replace("image", "sample"), note=one.note.replace("image", "sample")) for one in cells]


def popular_set(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    """The most common label set: the strongest guess without a view. (A real attacker does not know which set is most common.)"""
    if not sets:
        raise InputError("popular_set: there are no label sets")
    return max(set(sets), key=lambda labels: (sets.count(labels), sorted(labels)))


def grouping_accuracy(clusters: Array, groups: Array) -> Array:
    """Whether each client's found group is the true one, up to the names of groups (best one-to-one matching), shape (n,) of 0 and 1."""
    names, observed = np.unique(groups, return_inverse=True)
    labels, reference = np.unique(clusters, return_inverse=True)
    table = np.zeros((len(labels), len(names)), dtype=np.int64)
    np.add.at(table, (reference, observed), 1)
    rows, columns = linear_sum_assignment(-table)
    match = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return np.array([float(match.get(label, -1) == group) for label, group in zip(reference.tolist(), observed.tolist(), strict=True)])


def one_group(case: Case) -> str:
    """Why no group of a client can be found where the truth has one group: it may be unknown."""
    return "the clients looked for are of one true group" if case.truth.groups_known else "true groups unknown"


def dealt_at_random(clusters: Array, groups: Array, seed: int, times: int = 200) -> Array:
    """The same score for the same groups dealt at random, mean over deals, shape (n,): the no-view baseline of `grouping_accuracy`."""
    rng = stream(seed, "groups dealt at random")
    return np.full(len(groups), float(np.mean([grouping_accuracy(rng.permutation(clusters), groups).mean() for _ in range(times)])))


def chance_of_deals(clusters: Array, groups: Array, seed: int, times: int = DEALS) -> float:
    """How probable it is that the same groups dealt at random score at least as well: one lucky deal makes all clients right at once.

    At most so many `times` are dealt, and no more than it takes until `ENOUGH_DEALS` score as well (Besag & Clifford 1991).
    """
    rng, reached = stream(seed, "groups dealt again"), grouping_accuracy(clusters, groups).sum()
    again = 0
    for dealt in range(1, times + 1):
        again += bool(grouping_accuracy(rng.permutation(clusters), groups).sum() >= reached)
        if again == ENOUGH_DEALS:
            return again / dealt
    return (1 + again) / (1 + times)


def group_cell(
    case: Case, attack: str, metric: str, found: tuple[Mapping[int, int], Mapping[int, int]], clients: Sequence[int], *, margin: float,
    note: str,
) -> Cell:  # fmt: skip
    """The share of clients whose group is known up to renaming, from a cluster for each client of the view and of the reference.

    The baseline is the same clusters dealt at random, or everybody in the largest group if that is more.
    """
    groups = np.array([case.truth.groups[client] for client in clients])
    largest = np.unique(groups, return_counts=True)[1].max() / len(groups)
    observed, reference = (np.array([clusters[client] for client in clients]) for clusters in found)
    blanks = [np.maximum(dealt_at_random(clusters, groups, case.seed), largest) for clusters in (observed, reference)]
    return cell(
        case, attack, metric, grouping_accuracy(observed, groups), blanks[0], grouping_accuracy(reference, groups),
        reference_blank=blanks[1], margin=margin, note=note,
        chances=(chance_of_deals(observed, groups, case.seed), chance_of_deals(reference, groups, case.seed)),
    )  # fmt: skip


def chance_of_names(
    guessed: Sequence[frozenset[int]], truth: Sequence[frozenset[int]], beside: Array, margin: float, classes: int, seed: int,
    times: int = DEALS,
) -> float:  # fmt: skip
    """How probable it is that label sets (n,), all named together, are right by the margin more often than the guesses right `beside` (n,).

    The largest p counts: of their number (`chance_of_count`); under a random renaming of all labels, since one lucky name makes all clients
    of a group right together; and of the same sets dealt to the clients at random, since which sets occur says nothing about who has which.
    """
    sets, real = (np.array([[label in labels for label in range(classes)] for labels in label_sets]) for label_sets in (guessed, truth))
    rng, right = stream(seed, "labels renamed"), (sets == real).all(axis=1)
    again = sum(int((sets == real[:, rng.permutation(classes)]).all(axis=1).sum()) >= right.sum() for _ in range(times))
    errors = (sets[:, None] != real[None]).any(axis=2).astype(np.float64)
    dealt = chance_of_matching(errors, stream(seed, "label sets dealt again"))
    return max(float((1 + again) / (1 + times)), dealt, chance_of_count(right.astype(np.float64), beside, margin))


def label_sets_of(labels: Iterable[int], size: int) -> list[frozenset[int]]:
    """Every set of `size` of these labels."""
    return [frozenset(chosen) for chosen in combinations(labels, size)]


def cosine(a: Array, b: Array) -> float:
    """The cosine of two arrays as vectors; 0 if either is zero."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / norms if norms > 0 else 0.0


def psnr_db(truth: Array, guess: Array) -> float:
    """The peak signal-to-noise ratio for values in [0, 1], in decibels, at most 100."""
    if np.array_equal(truth, guess):
        return 100.0
    return float(min(100.0, peak_signal_noise_ratio(np.asarray(truth, dtype=np.float64), guess, data_range=1.0)))


def ssim(truth: Array, guess: Array) -> float:
    """The structural similarity of two images (C, H, W) with values in [0, 1]; NaN for images below 7×7 and for other data."""
    if not is_image(truth.shape) or min(truth.shape[1:]) < 7:
        return float("nan")
    return float(structural_similarity(np.asarray(truth, dtype=np.float64), guess, data_range=1.0, channel_axis=0))
