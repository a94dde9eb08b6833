"""What would lower a leak: changes of a run's own configuration that the configuration accepts.

Each attack has candidates, the one that costs least first. A candidate counts only if the configuration with it is accepted for the run's
algorithm and data, and is not what the run has already. Whether a figure really falls is measured by rerunning (`measured_remedies`).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, TrainingDiverged
from ..experiments.config.config import Config, load_config
from ..experiments.report.audit_words import remedy_of
from ..plugins import ATTACKS
from ..types import Population
from .evidence.fresh_runs import AuditedRun, case_of, check_start, fresh_scene
from .figures.leakage import Budget, Cell, in_words_of

__all__ = [
    "CANDIDATES", "WITHOUT", "Accepted", "Measured", "Remedy", "accepted_remedies", "changed_config", "measured_remedies", "remedy_line",
]  # fmt: skip


@dataclass(frozen=True)
class Remedy:
    """A remedy in words, and what it sets, as `--set` takes it.

    One of the keys that it `needs` must be new: the others alone help nobody. It helps where a task of the algorithm
    gives `part`; none named: everywhere.
    """

    words: str
    changes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    part: str = ""


_SUMS = Remedy(
    "secure sums over cohorts that do not change",
    ('protection.sum="secagg"', 'protection.secagg_mode="active"', 'training.weights="equal"', 'training.sampling="fixed_cohorts"'),
    ("protection.sum", "training.sampling"),
)
_HIDDEN_ROWS = Remedy("secure sums", ('protection.sum="secagg"', 'training.weights="equal"'), ("protection.sum",))
_OBLIVIOUS = Remedy(
    "oblivious secure sums, which hide who is in a group", ('protection.sum="secagg-oblivious"', 'training.weights="equal"')
)
_ENCRYPTED = Remedy("encrypted comparison that releases labels only", ('protection.gram=["ckks"]',))
_TRANSFORMED = Remedy("comparison under a shared rotation, as long as no client helps the server", ('protection.gram=["haar"]',))
_STEADY = Remedy("cohorts that do not change", ('training.sampling="fixed_cohorts"',))
_EQUAL_STEPS = Remedy("as many steps for every client, of all samples at once", ("training.batch_size=0",), part="control")
_SAMPLE = Remedy(
    "privacy noise for single samples",
    ('privacy.unit="sample"', "privacy.epsilon=8.0", "privacy.delta=1e-5", "privacy.samples=SAMPLES", 'training.weights="equal"'),
)
_CLIENT = Remedy(
    "secure sums with privacy noise for whole clients",
    ('protection.sum="secagg"', 'privacy.unit="client"', "privacy.epsilon=8.0", "privacy.delta=1e-3", 'training.weights="equal"'),
)
_LESS = Remedy("a smaller privacy budget", ("privacy.epsilon=HALF",))
_NOISE = (_SAMPLE, _CLIENT, _LESS)
_OF_UPDATES = (_SUMS, _OBLIVIOUS, *_NOISE)
_OF_COMPARISON = (_ENCRYPTED, *_NOISE)

CANDIDATES: dict[str, tuple[Remedy, ...]] = {
    "signature_inversion": _OF_COMPARISON,  # of label sets, which inner products under a rotation still show
    **dict.fromkeys(
        (f"signature_inversion/mean_image_{score}" for score in ("cosine", "psnr_db", "ssim")), (_TRANSFORMED, *_OF_COMPARISON)
    ),
    "gram_geometry": _OF_COMPARISON,
    "gram_updates": (_SUMS, _ENCRYPTED, *_NOISE),
    "fold_release": (_TRANSFORMED, _ENCRYPTED, *_NOISE),
    "anchor_counts": (_TRANSFORMED, _ENCRYPTED, *_NOISE),
    "sybil_span": (_ENCRYPTED, *_NOISE),
    "influence": _NOISE,
    "likeness": (_HIDDEN_ROWS, _OBLIVIOUS, _CLIENT, _LESS),
    "cluster_identity": (_OBLIVIOUS,),
    "disaggregation": (_EQUAL_STEPS, _STEADY, *_NOISE),
    "label_inference": _OF_UPDATES,
    "gradient_inversion": _OF_UPDATES,
    "prototype_inversion": (_OBLIVIOUS, _CLIENT),
    "prototype_inversion/aggregate_class_image_psnr_db": (_CLIENT,),
    "update_norms": _OF_UPDATES,
    "reported_scores": _NOISE,
    "exact_zeros": (_STEADY, *_NOISE),
    "key_recovery": _OF_UPDATES,
    "membership": _NOISE,
    "source_inference": _OF_UPDATES,
    "property_inference": _NOISE,
    "model_inconsistency": (Remedy("secure sums that check a round's model", ('protection.secagg_mode="active"',)),),
}
"""Candidates by attack, or by "attack/metric", the cheapest first. An attack that is not here has its own words (`Attack.reduces`)."""
_COMPARED = "clusters are found from these vectors, so whoever learns the clusters knows who is alike, however the vectors are compared"
_REPORTED = "the algorithm has clients report these numbers in the open, whatever protects their updates"
_RELAYED = "the algorithm has members receive the models of others"
_NONE = {
    "rows": _COMPARED, "fold_blind": _COMPARED, "product_blind": _COMPARED, "relay_wanted": _REPORTED,
    **dict.fromkeys(("changed", "losses", "confusion", "correct", "count", "loss", "errors"), _REPORTED),
    **dict.fromkeys(("relay_own", "relay_update", "relay_model"), _RELAYED),
}  # fmt: skip
WITHOUT = {f"likeness/{part}_group_accuracy": why for part, why in _NONE.items()}
"""Figures that no candidate of their attack lowers, by "attack/metric", and why."""


@dataclass(frozen=True)
class Accepted:
    """The first candidate of an attack that the run's configuration accepts; where there is none, no `changes`, and `words` say why."""

    attack: str
    words: str
    changes: tuple[str, ...]

    @property
    def line(self) -> str:
        """The remedy for people."""
        return remedy_line(self.words, self.changes)


def remedy_line(words: str, changes: Sequence[str]) -> str:
    """A remedy and what it sets, for people."""
    return f"{words} ({' '.join(f'--set {change}' for change in changes)})" if changes else words


def changed_config(path: Path, remedy: Remedy, config: Config, population: Population, trust: bool) -> Config | None:
    """The configuration in a file with a remedy; None where it is refused, or is as the run was."""
    if config.privacy.unit != "none" and any(change.startswith("privacy.unit") for change in remedy.changes):
        return None  # a budget of its own, which may be larger
    if remedy.part and not any(remedy.part in getattr(task, "gives", {}) for task in config.spec.tasks):
        return None
    samples = min(client.samples for client in population.clients)
    changes = [
        change.replace("SAMPLES", str(samples)).replace("HALF", f"{config.privacy.epsilon / 2:g}") for change in remedy.changes
    ]  # fmt: skip
    if any(change.startswith("privacy.epsilon") for change in changes) and len(changes) == 1 and config.privacy.unit == "none":
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            changed = load_config(path, changes, trust=trust)
            check_start(changed, population)
    except (InputError, TrainingDiverged):
        return None
    fresh = {change.partition("=")[0] for change in remedy.changes if _differs(config, changed, change)}
    if config.training.participation == 1:
        fresh.discard("training.sampling")  # everybody is in every cohort
    return changed if fresh & set(remedy.needs or fresh) else None


def _differs(config: Config, changed: Config, change: str) -> bool:
    section, _, key = change.partition("=")[0].partition(".")
    return bool(getattr(getattr(config, section), key) != getattr(getattr(changed, section), key))


def accepted_remedies(path: Path, config: Config, population: Population, trust: bool) -> dict[str, Accepted]:
    """By attack or "attack/metric" the first candidate that the configuration accepts, and the figures that none lowers (`WITHOUT`)."""
    known: dict[Remedy, tuple[str, ...] | None] = {}
    accepted = {}
    for attack, remedies in CANDIDATES.items():
        for remedy in remedies:
            if remedy not in known:
                changed = changed_config(path, remedy, config, population, trust)
                known[remedy] = None if changed is None else _stated(remedy, config, changed)
            changes = known[remedy]
            if changes is not None:
                accepted[attack] = Accepted(attack, remedy.words, changes)
                break
        else:
            accepted[attack] = Accepted(
                attack,
                "no setting that the configuration accepts with this algorithm; next: read in docs/configuration.md which algorithms take "
                "[privacy], name one in algorithm.name, and run again",
                (),
            )
    return accepted | {figure: Accepted(figure, f"no setting: {why}", ()) for figure, why in WITHOUT.items()}


def _stated(remedy: Remedy, config: Config, changed: Config) -> tuple[str, ...]:
    """The changes that are new, with their numbers."""
    values = {"SAMPLES": str(changed.privacy.samples), "HALF": f"{changed.privacy.epsilon:g}"}
    stated = []
    for change in (change for change in remedy.changes if _differs(config, changed, change)):
        for name, value in values.items():
            change = change.replace(name, value)
        stated.append(change)
    return tuple(stated)


@dataclass(frozen=True)
class Measured:
    """A leak before and after its remedy, on one run of each.

    `after` is None where the attack had no figure then, for the reason `note`; `refused`: since there was no run with the remedy.
    """

    attack: str
    adversary: str
    metric: str
    k_known: int
    before: float
    after: float | None
    baseline: float | None
    lower_is_better: bool
    changes: tuple[str, ...]
    note: str
    refused: bool = False

    @property
    def lowered(self) -> bool:
        """Whether less was learned than before."""
        if self.after is None:
            return not self.refused
        return self.after > self.before if self.lower_is_better else self.after < self.before

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"lowered": self.lowered, "stayed": not self.lowered and not self.refused}

    @property
    def line(self) -> str:
        after = f"no figure ({self.note})" if self.after is None else f"{self.after:.3f}"
        return f"{self.attack} / {self.metric} ({self.adversary}): {self.before:.3f} before, {after} with {' '.join(self.changes)}"


def measured_remedies(
    cells: Sequence[Cell], remedies: Mapping[str, Accepted], path: Path, population: Population, rounds: int, budget: Budget, trust: bool
) -> list[Measured]:
    """Each leak of `cells` whose attack has a remedy, attacked again on a run with the remedy, with the same seed and data."""
    scenes: dict[tuple[str, ...], AuditedRun | str] = {}
    measured = []
    for cell in (cell for cell in cells if cell.status == "leaks" and cell.value is not None and not ATTACKS[cell.attack].reruns):
        remedy = remedy_of(remedies, cell.attack, cell.metric)
        if remedy is None or not remedy.changes or cell.value is None:
            continue
        if remedy.changes not in scenes:
            scenes[remedy.changes] = _scene(path, remedy.changes, population, rounds, budget, trust)
        scene = scenes[remedy.changes]
        after, note = (None, scene) if isinstance(scene, str) else _figure(scene, cell, budget)
        measured.append(
            Measured(
                cell.attack, cell.adversary, cell.metric, cell.k_known, cell.value, after, cell.baseline, cell.lower_is_better,
                remedy.changes, note, isinstance(scene, str),
            )
        )  # fmt: skip
    return measured


def _scene(path: Path, changes: Sequence[str], population: Population, rounds: int, budget: Budget, trust: bool) -> AuditedRun | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fresh_scene(load_config(path, changes, trust=trust), population, rounds, budget)
    except (InputError, TrainingDiverged) as error:
        return f"the run with the remedy ended: {error}"


def _figure(scene: AuditedRun, cell: Cell, budget: Budget) -> tuple[float | None, str]:
    """The same figure on another run, or None and why there is none."""
    try:
        made = in_words_of(scene.population.shape, ATTACKS[cell.attack].cells(case_of(scene, cell.adversary, budget))[0])
    except (InputError, TrainingDiverged) as error:
        return None, str(error)
    same = [figure for figure in made if (figure.metric, figure.k_known) == (cell.metric, cell.k_known)]
    if same and same[0].value is not None:
        return same[0].value, same[0].note
    return None, (same or made)[0].note if made else "the attack makes no such figure then"
