"""How a leak is stated: a value with an interval, beside its no-view baseline and its unprotected reference.

Status of a cell: `leaks` if the attack beats the baseline by the margin, `at_baseline` if it does not although its unprotected reference
does, `not_validated` if the reference does not either, `not_attempted` if the attack was not made on what is there, `nothing_to_see` if the
view holds nothing to attack or the truth nothing to find, `inconclusive` if seeds show neither a leak nor its absence.

With one seed interval and status are over clients. Over several (`pooled`) value, baseline and reference are means over seeds, and so is
the interval. A run without a leak is called one at a rate of `RATE` at most, and so are several together, which share it: half for the
recorded run by itself, a quarter for all runs by themselves, the rest for a paired t-test over seeds. `at_baseline` needs that the far end
of the interval of the paired difference is within the margin. Where one run is no more than a toss of a coin (`Cell.coin`), a leak needs
five seeds or more, nearly all of which agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from scipy import stats
from scipy.optimize import linear_sum_assignment
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from ..errors import InputError
from ..experiments.config import Config
from ..privacy import Privacy
from ..randomness import stream
from ..types import Array, Population
from .adversary import AdversaryView

FEWEST_SCORES = 3
RATE = 0.025
"""How often a figure without a leak may be called one, from one run or from several together."""
NOT_ATTEMPTED = "not attempted"
SHARES = ("_accuracy", "_exact", "_auc", "_tpr")
RANGES = {
    **dict.fromkeys(SHARES, (0.0, 1.0)), "images_recovered_gradient": (0.0, 1.0), "images_recovered_update": (0.0, 1.0), "_l1": (0.0, 2.0),
    "_error": (0.0, float("inf")), "_epsilon": (0.0, float("inf")), "_cosine": (-1.0, 1.0), "_ssim": (-1.0, 1.0),
    "_psnr_db": (-float("inf"), 100.0),
}  # fmt: skip
"""How a metric's name ends -> what its values can be."""

__all__ = [
    "BUDGETS", "Budget", "Case", "Cell", "Prior", "Status", "Truth", "cell", "chance_of_deals", "confidence_interval", "cosine",
    "dealt_at_random", "grouping_accuracy", "judge", "nothing", "pooled", "popular_set", "proportion_interval", "psnr_db", "ssim",
]  # fmt: skip

Status = Literal["leaks", "inconclusive", "not_validated", "not_attempted", "at_baseline", "nothing_to_see"]


@dataclass(frozen=True)
class Cell:
    """One figure of the leakage table.

    `low` and `high` are a 95 % interval, over seeds if there are three or more `seeds`, else over clients; None where nothing varies and
    no counts are known. `reference` is the figure on the
    unprotected pipeline and `reference_baseline` the baseline there. `margin` is what a leak must beat the baseline by; with
    `lower_is_better` the figure is an error, and with `exact` a single success is a leak, since chance gives none. `coin` says that one run
    is a toss of a coin, whatever is averaged in it: over seeds a leak has to be improbable for tosses as well. `k_known` counts clients
    whose data the attacker knows. `rounds` says that only so many were attacked (0: all). `arrays` names a file in audit/. `p` is how
    probable so much gain is in one run without a leak, where the status is that of such a test; `counted` the yes-or-no scores that a
    share is of (0: it is of other scores). `towards` says whom an audited guarantee is towards, where that is not the adversary.
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
    status: Status
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """The cell as one line of text."""
        if self.value is None:
            return f"{self.attack} / {self.metric} ({self.adversary}, {self.protection}): {self.status}; {self.note}"
        known = f", k = {self.k_known}" if self.k_known else ""
        interval = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        beside = f"baseline {self.baseline:.3f}" + ("" if self.reference is None else f", unprotected {self.reference:.3f}")
        seeds = f", {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        towards = f", a guarantee towards {self.towards}" if self.towards else ""
        where = f"{self.adversary}, {self.protection}{known}{seeds}{towards}"
        return f"{self.attack} / {self.metric} ({where}): {self.value:.3f}{interval}; {beside}: {self.status}"


@dataclass(frozen=True, eq=False)
class Prior:
    """What an attacker knows beforehand: labelled auxiliary samples, the shape of a sample, how many labels and samples each client has.

    `description` says so in words, with size and distribution, and goes into every cell's note. `rows_per_label` is the public number of
    rows that a signature has for each label (0: signatures are of all samples together). `groups` is the number of true groups. `config` is
    the public configuration: model, learning rate, steps; `mean` and `std` are the data set's. `simulate` runs the public
    pipeline, in the clear, on data (x, y) of pretended clients and gives what they would have uploaded for comparison, shape (m, p, d);
    None where the pipeline compares nothing at its start. `simulate_open` runs it without `[privacy]`.
    """

    x: Array
    y: Array
    classes: int
    shape: tuple[int, ...]
    labels_per_client: Mapping[int, int]
    description: str
    rows_per_label: int = 0
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

    def unprotected(self) -> "Prior":
        """The same for the unprotected reference, in whose pipeline nobody clips."""
        if not self.private or self.config is None:
            return self
        return replace(self, config=replace(self.config, privacy=Privacy()), simulate=self.simulate_open)


@dataclass(frozen=True, eq=False)
class Truth:
    """What a scorer knows of each client: mean training image, labels, how many samples of each (classes,), true group, samples (x, y).

    `outside` are its test samples (x, y), on which nobody trained.
    """

    mean_images: Mapping[int, Array]
    label_sets: Mapping[int, frozenset[int]]
    label_counts: Mapping[int, Array] = field(default_factory=dict)
    groups: Mapping[int, int] = field(default_factory=dict)
    data: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)
    outside: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)

    def histogram(self, client: int) -> Array:
        """The shares of a client's labels, shape (classes,)."""
        return np.asarray(self.label_counts[client] / self.label_counts[client].sum())


@dataclass(frozen=True)
class Budget:
    """How much an audit may do: runs with fresh seeds (the recorded one included), auxiliary samples, draws of known clients.

    `rounds` are attacked where an attack takes them one by one; membership trains so many `shadows`. Fresh runs together take about
    `seconds` at most, by the recorded run's own time: beyond it there are fewer seeds, and beyond that the reference has fewer rounds.
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

    `rows` are the vectors that clients had compared in the run's beginning, by client, (p, d): truth for scorers, and what the attacker
    knows of the clients that it knows. `record` is the server's view of the attacked run, for scorers that ask who was in a sum.
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


def prior_of(population: Population, seed: int, size: int = 2000, rows_per_label: int = 0, config: Config | None = None) -> Prior:
    """An attacker with data of the same distribution that no client trained on: a sample of the clients' test data, without owners."""
    pools = {id(client.x_test): client for client in population.clients}.values()  # clients of a group may share one test set
    x = np.concatenate([client.x_test for client in pools])
    y = np.concatenate([client.y_test for client in pools])
    chosen = stream(seed, "auxiliary data").permutation(len(y))[:size]
    labels = {client.id: len(np.unique(client.y_train)) for client in population.clients}
    words = (
        f"auxiliary data: {len(chosen)} labelled samples of the clients' test distribution (no shift), unknown owners; "
        "numbers of samples and of labels a client known"
    )
    return Prior(
        x[chosen], y[chosen], population.classes, population.shape, labels, words, rows_per_label,
        {client.id: client.samples for client in population.clients}, len(set(population.groups)), config,
        population.mean, population.std, seed=seed,
    )  # fmt: skip


def truth_of(population: Population) -> Truth:
    """The truth to score against."""
    return Truth(
        {client.id: client.x_train.mean(axis=0, dtype=np.float64) for client in population.clients},
        {client.id: frozenset(int(label) for label in np.unique(client.y_train)) for client in population.clients},
        {client.id: np.bincount(client.y_train, minlength=population.classes) for client in population.clients},
        {client.id: group for client, group in zip(population.clients, population.groups, strict=True)},
        {client.id: (client.x_train, client.y_train) for client in population.clients},
        {client.id: (client.x_test, client.y_test) for client in population.clients},
    )


def cell(
    case: Case, attack: str, metric: str, mine: Array, blank: Array, theirs: Array, *, margin: float, theirs_blank: Array | None = None,
    lower_is_better: bool = False, share: bool = False, k_known: int | None = None, note: str = "",
    chances: tuple[float, float] | None = None,
) -> Cell:  # fmt: skip
    """One figure from scores, one a client: of the view, of no view, and of the reference (with its own no-view scores, if others).

    `share` says that scores are 0 or 1, so that the interval is exact; so is that of any share whose scores happen to be. Below three
    clients there is no interval, nor where scores do not vary. `chances` are how probable the scores of view and reference are without a
    view, where clients' scores hang on each other so that no test over clients tells.
    """
    theirs_blank = blank if theirs_blank is None else theirs_blank
    counted = len(mine) if (share or metric.endswith(SHARES)) and _is_count(mine) else 0
    low, high = _interval(metric, mine, counted) if len(mine) >= FEWEST_SCORES else (None, None)
    sign = -1.0 if lower_is_better else 1.0
    if chances is None:
        status = judge(sign * mine, sign * blank, sign * theirs, sign * theirs_blank, margin)
        p = _chance(sign * mine, sign * blank, margin) if len(mine) >= FEWEST_SCORES else None
    else:
        gains = (float((sign * (mine - blank)).mean()), float((sign * (theirs - theirs_blank)).mean()))
        p, reference = (chance if gain > margin else 1.0 for chance, gain in zip(chances, gains, strict=True))
        status = "not_validated" if reference >= RATE else "leaks" if p < RATE else "at_baseline"
    return Cell(
        attack, case.view.adversary, case.protection, metric, float(mine.mean()), low, high,
        baseline=float(blank.mean()), reference=float(theirs.mean()), status=status,
        k_known=len(case.view.coalition) if k_known is None else k_known, seeds=(case.seed,), note=note, margin=margin,
        lower_is_better=lower_is_better, reference_baseline=float(theirs_blank.mean()), counted=counted, p=p,
    )  # fmt: skip


def nothing(case: Case, attack: str, metric: str, why: str, k_known: int | None = None) -> Cell:
    """The cell of an attack that has nothing to see, and why; of one that was not made, if `why` begins with "not attempted"."""
    known = len(case.view.coalition) if k_known is None else k_known
    none = (None,) * 5
    status: Status = "not_attempted" if why.startswith(NOT_ATTEMPTED) else "nothing_to_see"
    return Cell(attack, case.view.adversary, case.protection, metric, *none, status, known, (case.seed,), why)


def pooled(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of several seeds, those of one figure made one; in the order in which figures first occur.

    The first seed is that of the recorded run. From three seeds on the figures are means over them and the interval is a t-interval; of
    fewer they are those of a seed that leaks, else of the first with something to see. A note says in how many of the seeds there was
    something to see, where that is not all of them.
    """
    figures: dict[tuple[str, str, str, str, int], list[Cell]] = {}
    for one in cells:
        figures.setdefault((one.attack, one.adversary, one.protection, one.metric, one.k_known), []).append(one)
    return [_pooled(several) for several in figures.values()]


def _pooled(cells: Sequence[Cell]) -> Cell:
    seen = [one for one in cells if one.value is not None]
    if not seen:
        return next((one for one in cells if one.status == "not_attempted"), cells[0])
    first = seen[0]
    status = first.status if len(seen) == 1 else _verdict(seen, cells[0].value is not None)
    if len(seen) < FEWEST_SCORES:
        found = next((one for one in seen if one.status == "leaks"), first) if status == "leaks" else first
        return replace(found, status=status, note=found.note + _missing(cells))
    value, baseline, reference, blank = _columns(seen)
    low, high = _interval_over(seen, value)
    arrays = next((one.arrays for one in cells if one.arrays), None)
    seeds = tuple(seed for one in seen for seed in one.seeds)
    return replace(
        first, value=float(value.mean()), low=low, high=high, baseline=float(baseline.mean()), reference=float(reference.mean()),
        reference_baseline=float(blank.mean()), status=status, seeds=seeds, arrays=arrays, p=None,
        counted=sum(one.counted for one in seen), note=first.note + _missing(cells) + (_alone(cells) if status == "leaks" else ""),
    )  # fmt: skip


def _columns(seen: Sequence[Cell]) -> tuple[Array, Array, Array, Array]:
    """Value, baseline, reference and its baseline, by seed."""

    def column(name: str) -> Array:
        return np.array([np.nan if (number := getattr(one, name)) is None else number for one in seen])

    return column("value"), column("baseline"), column("reference"), column("reference_baseline")


def _verdict(seen: Sequence[Cell], recorded: bool) -> Status:
    """The status of one figure from two seeds or more, the first of them that of the recorded run if `recorded`."""
    first, sign = seen[0], -1.0 if seen[0].lower_is_better else 1.0
    if any(one.exact for one in seen):
        return "leaks" if any(one.exact and (one.value or 0.0) > one.margin for one in seen) else "at_baseline"
    value, baseline, reference, blank = _columns(seen)
    gain, several = sign * (value - baseline), len(seen) >= FEWEST_SCORES
    valid = several and _t_chance(sign * (reference - blank), first.margin) < RATE
    together = valid and _t_chance(gain, first.margin) < _share_of_test(seen)
    if together and any(one.coin for one in seen) and not _is_no_toss(gain):
        return "not_validated"
    if together or _leaks_alone(seen, recorded):
        return "leaks"
    if not several:  # no test over two seeds: the recorded one's word, unless a seed says otherwise
        return "inconclusive" if any(one.status == "leaks" for one in seen) else first.status
    if not valid:
        return "not_validated"
    doubt = recorded and first.status == "leaks" and not first.coin  # at the rate of one run, not at that of all
    return "inconclusive" if doubt or confidence_interval(gain)[1] > first.margin else "at_baseline"


def _may_leak_alone(seen: Sequence[Cell]) -> bool:
    """Whether a run of this figure can be a leak by itself: not a toss, and not where no run has a reference that works."""
    return not any(one.coin for one in seen) and any(one.status != "not_validated" for one in seen)


def _share_of_test(seen: Sequence[Cell]) -> float:
    """What the t-test over seeds has of `RATE`: what `_leaks_alone` does not use."""
    if not _may_leak_alone(seen):
        return RATE
    return 3 * RATE / 4 if any(one.p is None for one in seen) else RATE / 4


def _leaks_alone(seen: Sequence[Cell], recorded: bool) -> bool:
    """Whether runs leak by themselves: the recorded one at half of `RATE`, any of them at a quarter of it, divided by their number.

    Runs that give no `p` are called leaks at `RATE` each: then so many of them have to be as improbable as that quarter.
    """
    if not _may_leak_alone(seen):
        return False
    if any(one.p is None for one in seen):
        leaks = sum(one.status == "leaks" for one in seen)
        return bool(stats.binomtest(leaks, len(seen), RATE, alternative="greater").pvalue <= RATE / 4)
    chances = [1.0 if one.p is None or one.status == "not_validated" else one.p for one in seen]
    return (recorded and chances[0] < RATE / 2) or min(chances) < RATE / 4 / len(chances)


def _is_no_toss(gains: Array) -> bool:
    """Whether so many gains are above 0 less than one time in 32 if each is a toss of a coin: from five tosses on that can be."""
    return bool(stats.binomtest(int((gains > 0).sum()), len(gains), alternative="greater").pvalue <= 1 / 32)


def _missing(cells: Sequence[Cell]) -> str:
    """The end of the note of a figure that not all seeds have: in how many there was something to see, and why not in the first other."""
    why = [one.note for one in cells if one.value is None]
    if len(why) in (0, len(cells)):
        return ""
    return f"; something to see in {len(cells) - len(why)} of {len(cells)} seeds, the figure is of these only; else: {why[0]}"


def _alone(cells: Sequence[Cell]) -> str:
    """The end of the note of a figure that leaks, where not all seeds do by themselves: the mean over seeds hides those that do."""
    seen = [one for one in cells if one.value is not None]
    leaking = [one for one in seen if one.status == "leaks"]
    if len(leaking) in (0, len(seen)):
        return ""
    recorded = cells[0] in leaking
    figure = f" ({cells[0].value:.3f})" if recorded else ""
    return f"; {len(leaking)} of {len(seen)} seeds leak by themselves, the recorded run{figure} {'among' if recorded else 'not among'} them"


def popular_set(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    """The most common label set: the strongest guess without a view, as if the attacker knew which one that is."""
    if not sets:
        raise InputError("popular_set: there are no label sets")
    return max(set(sets), key=lambda labels: (sets.count(labels), sorted(labels)))


def grouping_accuracy(found: Array, groups: Array) -> Array:
    """Whether each client's found group is the true one, up to the names of groups (best one-to-one matching), shape (n,) of 0 and 1."""
    names, mine = np.unique(groups, return_inverse=True)
    labels, theirs = np.unique(found, return_inverse=True)
    table = np.zeros((len(labels), len(names)), dtype=np.int64)
    np.add.at(table, (theirs, mine), 1)
    rows, columns = linear_sum_assignment(-table)
    match = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return np.array([float(match.get(label, -1) == group) for label, group in zip(theirs.tolist(), mine.tolist(), strict=True)])


def dealt_at_random(found: Array, groups: Array, seed: int, times: int = 200) -> Array:
    """The same score for the same groups dealt at random, mean over deals, shape (n,): the no-view baseline of `grouping_accuracy`."""
    rng = stream(seed, "groups dealt at random")
    return np.full(len(groups), float(np.mean([grouping_accuracy(rng.permutation(found), groups).mean() for _ in range(times)])))


def chance_of_deals(found: Array, groups: Array, seed: int, times: int = 999) -> float:
    """How probable it is that the same groups dealt at random score at least as well: one lucky deal makes all clients right at once."""
    rng, reached = stream(seed, "groups dealt again"), grouping_accuracy(found, groups).sum()
    again = sum(bool(grouping_accuracy(rng.permutation(found), groups).sum() >= reached) for _ in range(times))
    return (1 + again) / (1 + times)


def confidence_interval(values: Array) -> tuple[float, float]:
    """A 95 % t-interval for the mean of independent values; a point where they do not vary."""
    if len(values) < 2 or float(np.std(values)) == 0.0:
        return float(np.mean(values)), float(np.mean(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def proportion_interval(values: Array) -> tuple[float, float]:
    """The exact (Clopper–Pearson) 95 % interval of a share, from scores of 0 and 1."""
    interval = stats.binomtest(int(values.sum()), len(values)).proportion_ci(0.95, method="exact")
    return float(interval.low), float(interval.high)


def _is_count(values: Array) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _interval(metric: str, values: Array, counted: int) -> tuple[float | None, float | None]:
    """The 95 % interval of a mean: exact for counts, else by t and within what the metric can be; none where values do not vary."""
    if counted:
        return proportion_interval(values)
    if float(np.ptp(values)) == 0.0:
        return None, None
    least, most = next((limits for end, limits in RANGES.items() if metric.endswith(end)), (-float("inf"), float("inf")))
    low, high = confidence_interval(values)
    return max(low, least), min(high, most)


def _interval_over(seen: Sequence[Cell], values: Array) -> tuple[float | None, float | None]:
    """The interval over seeds. Where all had the same share, seeds do not tell how sure it is: then by the counts of all of them."""
    if float(np.ptp(values)) == 0.0 and values[0] in (0.0, 1.0) and all(one.counted for one in seen):
        return proportion_interval(np.full(sum(one.counted for one in seen), values[0]))
    return _interval(seen[0].metric, values, 0)


def _t_chance(gain: Array, margin: float) -> float:
    """The one-sided p-value of a t-test that the mean of independent values is above `margin`; 0 or 1 where they do not vary."""
    above = float(np.mean(gain)) - margin
    if len(gain) < 2 or float(np.std(gain)) == 0.0:
        return 0.0 if above > 0 else 1.0
    return float(stats.t.sf(above * np.sqrt(len(gain)) / np.std(gain, ddof=1), len(gain) - 1))


def _chance(score: Array, beside: Array, margin: float) -> float:
    """How probable such a gain over `beside` is, one-sided, scores paired by client, where it is no more than `margin`.

    Scores of 0 and 1 by an exact sign test; 1 if their mean gain is within the margin, and for fewer than 3 scores.
    """
    gain = score - beside
    if len(gain) < FEWEST_SCORES:
        return 1.0
    if not (_is_count(score) and _is_count(beside)):
        return _t_chance(gain, margin)
    wins, losses = int((gain > 0).sum()), int((gain < 0).sum())
    if wins + losses == 0 or not gain.mean() > margin:
        return 1.0
    return float(stats.binomtest(wins, wins + losses, alternative="greater").pvalue)


def judge(values: Array, baseline: Array, reference: Array, reference_baseline: Array, margin: float) -> Status:
    """The status of scores paired by client, at least 3 of them: a leak beats the baseline by more than `margin`.

    By a t-test of the difference, one-sided at `RATE`; scores of 0 and 1 by their mean difference and an exact sign test.
    """
    if len(values) < FEWEST_SCORES or not _chance(reference, reference_baseline, margin) < RATE:  # too few prove nothing either way
        return "not_validated"
    return "leaks" if _chance(values, baseline, margin) < RATE else "at_baseline"


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
    if truth.ndim != 3 or min(truth.shape[1:]) < 7:
        return float("nan")
    return float(structural_similarity(np.asarray(truth, dtype=np.float64), guess, data_range=1.0, channel_axis=0))
