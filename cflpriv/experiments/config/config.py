"""An experiment as a TOML file: sections of typed keys. Unknown keys are refused by name.

Sections are derived from the types they configure, so a key is defined in one place only. Every error is an `InputError` that names the
file, the section, the key and the value.
"""

import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import lru_cache
from importlib import metadata
from math import isinf
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from ...advice.procedure import Plan, further_rounds, plan_of, with_advice
from ...aggregation.secure_sums import least_weight
from ...algorithms import ALGORITHMS
from ...algorithms.fedavg import Weights
from ...algorithms.interface import Algorithm, AlgorithmSpec, BeforeRun, ComparedValue
from ...algorithms.shared.rechecks import late_checks
from ...contract.operations import Sampling
from ...contract.protection import Protection
from ...contract.schedule import CLASS_SCORES, NUMBER_SCORES
from ...data.held_out import with_held_out
from ...data.raw_tables import TABLES
from ...data.scattering import has_features
from ...data.text import TEXTS
from ...engine.models import Model
from ...errors import InputError, near, unknown_key
from ...federation.cohort import CohortRounds, schedule
from ...federation.release_policy import may_leave
from ...federation.values import Origin
from ...files import toml_text
from ...keys import check_ranges
from ...plugins import is_loaded, load_plugin
from ...privacy.participation import of_participations
from ...privacy.settings import Noise, Privacy, Releases, check_samples, plan_noise
from ...protocols.bounded_files import read_json, read_text
from ...randomness import stream
from ...tasks.training import Train
from ...types import Population
from ..metrics import check_metrics
from ..newcomers import held_back
from ..trust import idle_code, may_run, run_sections
from .callbacks import known_callbacks
from .privacy_checks import check_privacy, few_shares, needless_steps
from .private_training import DerivedFloat, DerivedInt, derived_lr, with_private_values, with_recipe
from .schedule_file import read_schedule
from .sections import DataSection, ModelSection, RunSection, TrainingSection

__all__ = ["GIVEN", "SECTIONS", "Config", "load_config", "own_weights", "parse_config"]

Section = TypeVar("Section")


class _Own(str):
    """Weights that were "own": "examples" or "equal" for the algorithm of their Config, found anew for that of another made from it."""


@dataclass(frozen=True)
class Config:
    """One experiment, resolved: every key has a value, and `training.weights` is not "own" any more.

    `algorithm` holds the name and the hyper-parameters that were given.
    """

    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    algorithm: Mapping[str, Any] = field(default_factory=lambda: {"name": "pacfl"})
    protection: Protection = field(default_factory=Protection)
    privacy: Privacy = field(default_factory=Privacy)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        check_ranges(self.spec.make, self.algorithm, "algorithm")
        for key, parameter in inspect.signature(self.spec.make).parameters.items():
            if parameter.default is parameter.empty and parameter.kind == parameter.KEYWORD_ONLY and key not in {*GIVEN, *self.hyper}:
                raise InputError(f"[algorithm] {key}: is missing, and algorithm {self.algorithm['name']!r} has no default value for it")
        if self.training.weights == "own" or isinstance(self.training.weights, _Own):
            object.__setattr__(self, "training", replace(self.training, weights=_Own(own_weights(self.algorithm["name"]))))
        if self.training.weights not in ("examples", "equal"):
            raise InputError(f"training.weights = {self.training.weights!r}: known are 'own', 'examples' and 'equal'")
        if self.training.weights == "examples" and self.protection.robust != "none":
            raise InputError(
                f"training.weights = 'examples' under protection.robust = {self.protection.robust!r}: a sample count is "
                "not verified, and with a large one it would own its bucket; set it to 'equal'"
            )
        if (
            self.training.weights == "examples"
            and self.protection.sums.hides
            and not (self.protection.secure and self.protection.max_weight)
        ):
            remedy = "set it to 'equal'" + (", or give protection.max_weight, a public maximum" if self.protection.secure else "")
            raise InputError(
                f"training.weights = 'examples': under protection.sum = {self.protection.sum!r} every sample count would show; {remedy}"
            )
        if self.run.record_sample and (self.run.record != "attackable" or self.run.record_clients):
            other = f"record_clients = {list(self.run.record_clients)}" if self.run.record_clients else f"record = {self.run.record!r}"
            raise InputError(f"run.record_sample = {self.run.record_sample} with run.{other}: use it with record = 'attackable' alone")
        for key in ("record_rounds", "record_clients"):
            if (chosen := getattr(self.run, key)) and self.run.record != "attackable":
                raise InputError(f"run.{key} = {list(chosen)} with run.record = {self.run.record!r}: use it with record = 'attackable'")
        if self.run.precision != "full" and self.model.dtype == "float64":
            raise InputError(f"run.precision = {self.run.precision!r} with model.dtype = 'float64': use 'full'")
        if self.model.init_scale == 0 and self.model.name != "linear":
            raise InputError(
                f"model.init_scale = 0 with model.name = {self.model.name!r}: between layers that are zero no gradient "
                "passes; only 'linear' trains from zero"
            )
        if self.run.advise or self.training.mixture:
            self._prepare_scoring()
        if self.training.augment:
            key = f"training.augment = {list(self.training.augment)}"
            if self.data.features != "none":
                raise InputError(f"{key} with data.features = {self.data.features!r}: views are of images, not of their features; use one")
            if self.data.source in (*TABLES, *TEXTS):
                raise InputError(f"{key} with data.source = {self.data.source!r}: views are of images; leave it out")
        self._check_numbers()
        known_callbacks(self.run.callbacks)
        check_metrics(self.run.metrics)
        check_privacy(self.privacy, self.protection, self.training, self.run, self.data, self.spec, self.releases)

    def _prepare_scoring(self) -> None:
        """Hold samples out for the advice or for mixtures, and refuse what these cannot take. Under `[privacy]` nothing is scored."""
        key = "run.advise" if self.run.advise else "training.mixture"
        protection, unit = self.protection, self.privacy.unit
        for refused, name, value, why in (
            (
                self.run.advise and self.training.mixture,
                "training.mixture",
                True,
                "the advice has mixtures of its own; take one of the two",
            ),
            (self.data.label_type != "class", "data.label_type", self.data.label_type, "it scores classes, and the label is a number"),
            (protection.sums.transformed, "protection.sum", protection.sum, "the server reads sums of scores, which this keeps from it"),
            (protection.robust != "none", "protection.robust", protection.robust, "it needs means of all clients' scores"),
            (
                protection.secure and protection.secagg_bits == 16,
                "protection.secagg_bits",
                protection.secagg_bits,
                "so coarse a rounding hides how much scores differ between clients; use 32",
            ),
            (
                protection.secure and protection.secagg_clip < 1,
                "protection.secagg_clip",
                protection.secagg_clip,
                "scores reach 1, and would be clipped; use 1 or more",
            ),
            (
                self.training.mixture and unit != "none",
                "privacy.unit",
                unit,
                "its weights would need releases that the budget does not pay for",
            ),
        ):
            if refused:
                raise InputError(f"{key} = true with {name} = {value!r}: {why}")
        if self.data.held_out == "none" and unit == "none":
            object.__setattr__(self, "data", replace(self.data, held_out="random"))

    def _check_numbers(self) -> None:
        """Refuse what has no meaning where the label is a number, and keys of numbers where it is a class."""
        if self.data.label_type == "class":
            if self.model.error != ModelSection.error:
                raise InputError(f"model.error = {self.model.error!r}: goes with data.label_type = 'number'")
            return
        numbers = "with data.label_type = 'number'"
        if self.spec.needs_classes(self.hyper):
            raise InputError(f"algorithm {self.spec.name!r} {numbers}: {self.spec.needs_classes(self.hyper)}")
        if self.model.name == "lstm":
            raise InputError(f"model.name = 'lstm' {numbers}: predicts words; use another model")
        for key in ("metrics", "target_accuracy"):
            if value := getattr(self.run, key):
                raise InputError(f"run.{key} = {value!r} {numbers}: is for classes; results have R² and errors")

    def sampling(self) -> Sampling:
        return Sampling(self.training.sampling, self.training.participation)

    @property
    def spec(self) -> AlgorithmSpec:
        """The algorithm's declarations. Raises `InputError` for one that is not known."""
        return _spec(self.algorithm["name"])

    @property
    def before(self) -> BeforeRun:
        """What is known of the run before it starts."""
        protection, strict = self.protection, self.run.release_policy == "strict"
        origin = Origin(size=1, kinds=(("vectors", "compared"),))
        no_gram = no_groups = ""
        if strict and not may_leave(protection, "gram", "vectors", (0, "f"), origin, "gram" in self.privacy.local):
            no_gram = (
                f"gradients would be compared in the clear, which clients refuse under protection.sum = {protection.sum!r}, min_cohort = "
                f"{protection.smallest_sum}; or name a transform or 'ckks' in protection.gram"
            )
        if protection.sums.oblivious:
            no_groups = f"protection.sum = {protection.sum!r} keeps groups private, but a server that finds them knows them"
        clip_norm = self.privacy.clip_norm if self.privacy.unit == "client" else 1.0
        return BeforeRun(self.training.rounds, self.privacy.unit, no_gram, no_groups, clip_norm, self.training.participation)

    @property
    def hyper(self) -> dict[str, Any]:
        """The algorithm's hyper-parameters that were given, and those that follow from the run. Raises `InputError` where none can."""
        hyper = {key: value for key, value in self.algorithm.items() if key != "name"}
        return {**self.spec.defaults(hyper, self.before), **hyper}

    @property
    def compared(self) -> ComparedValue:
        """What `gram` compares in this run."""
        return self.spec.compared(self.hyper)

    @property
    def knowledge(self) -> str:
        """What the algorithm knows of the groups, or how it finds them."""
        return self.spec.knowledge(self.hyper)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What a user should know before the run starts: that it can form no clusters, adds needless noise, or weighs all equally."""
        reason = self.spec.never_clusters(self.hyper, self.before)
        clusters = f"algorithm {self.spec.name!r} will form no clusters: {reason}" if reason else ""
        late = late_checks(self.hyper, self.data.clients, self.data.samples_per_client, self.training.rounds)
        return tuple(filter(None, (clusters, few_shares(self.privacy, self.protection, self.cohort), self._equal_weights(), late)))

    def judged(self, population: Population) -> Population:
        """The population, whose clients hold samples out where the configuration asks for it, with a warning of training by far more steps
        than its clients have samples for."""
        population = with_held_out(population, self.data.held_out, self.data.held_out_gap, self.data.seed)
        samples = max(client.samples for client in population.clients)
        doubt = needless_steps(self.privacy, self.training, samples)
        return replace(population, warnings=(*population.warnings, doubt)) if doubt else population

    def _equal_weights(self) -> str:
        """That clients weigh equally in secure sums although they should weigh by their sample counts; "" where they do not."""
        protection, limit = self.protection, self.protection.max_weight
        if self.training.weights != "examples" or not protection.secure or least_weight(protection, self.cohort) < limit:
            return ""
        oblivious = "nobody knows how many contribute to a block, so" if protection.sums.oblivious else ""
        return (
            f"training.weights = 'examples' over {self.cohort} clients with protection.min_cohort = {protection.smallest_sum}: "
            f"{oblivious or 'as few as these may be left, so'} all weigh equally, or one client could be nearly all of a sum; use more "
            "clients a round, a smaller min_cohort, or weights = 'equal'"
        )

    @property
    def unscored(self) -> str:
        """Why clients of a deployment do not show their scores; empty if they do."""
        if self.protection.secure:
            return f"under protection.sum = {self.protection.sum!r} clients do not show their scores"
        if self.privacy.unit != "none":
            return f"under privacy.unit = {self.privacy.unit!r} clients do not show their scores, which have no noise"
        return ""

    @property
    def shown_scores(self) -> tuple[str, ...]:
        """The parts of a client's evaluation that leave a client of a deployment: where values are hidden, single numbers at most."""
        if self.unscored:
            return ()
        alone = self.protection.sums.hides or self.protection.min_cohort > 1  # as `federation.release_policy` has it
        parts = CLASS_SCORES if self.data.label_type == "class" else NUMBER_SCORES
        return parts[:2] if alone else parts

    @property
    def cohort(self) -> int:
        """How many clients a round is expected to ask."""
        return round((self.data.clients - self.data.newcomers) * self.training.participation)

    def releases(self) -> Releases:
        """What a client releases of its samples over the whole run. `InputError` naming an algorithm that cannot be private."""
        spec = self.spec
        if spec.sample_releases is None:
            private = ", ".join(name for name, other in ALGORITHMS.items() if other.sample_releases is not None)
            raise InputError(f"algorithm {spec.name!r} under privacy.unit = 'sample': {spec.sample_refused}; there is one for {private}")
        return spec.sample_releases(self.training.rounds, self.hyper)

    def schedule(self, clients: Sequence[int]) -> CohortRounds:
        """Which rounds a client is asked in, if exactly `clients` are present in every round.

        All rounds where the algorithm does not declare its cohorts. With newcomers also where clusters split: such an algorithm places a
        newcomer by one training for each split.
        """
        spec, rounds = self.spec, self.training.rounds
        if not spec.cohorts or (self.data.newcomers and spec.renumbers):
            return CohortRounds(rounds, dict.fromkeys(clients, tuple(range(rounds))))
        smallest, labels = self.protection.smallest_group, spec.cohorts == "labelled"
        return schedule(self.sampling(), clients, smallest, self.run.seed, rounds, labels)

    def bands(self, clients: Sequence[int]) -> int:
        """How many bands correlated noise has, 0 for independent noise. `InputError` where clients may come back in the next round."""
        if not self.privacy.correlated:
            return 0
        bands = self.schedule(clients).separation
        if bands < 2 and self.training.rounds > 1:
            raise InputError(
                f"privacy.correlated = true: with training.sampling = {self.training.sampling!r}, participation = "
                f"{self.training.participation:g} and algorithm {self.spec.name!r} a client may be asked in two rounds in a row; use "
                "'fixed_cohorts', a participation of 0.5 or less, and an algorithm that forms no groups"
            )
        return bands

    def check_noise(self) -> None:
        """Raises `InputError` for keys with which no noise can be calibrated, as far as that needs no data and no time."""
        if self.privacy.unit == "sample":
            check_samples(self.privacy, self.releases(), self.training.batch_size)

    def noise(self, participations: int | None = None) -> Noise | None:
        """The noise of a whole run, calibrated, where the unit is a sample, for clients that are asked in so many rounds (None: in all)."""
        if self.privacy.unit != "sample":
            return None
        t, releases = self.training, self.releases()
        if participations is not None:
            releases = of_participations(releases, t.rounds, participations)
        return plan_noise(
            self.privacy, releases, epochs=t.epochs, batch_size=t.batch_size, seed=self.run.seed,
            shares=self.protection.noise_shares if self.privacy.noise == "shared" else 0,
        )  # fmt: skip

    def noise_of(self, groups: Mapping[int, int]) -> Noise | None:
        """The noise of the run over exactly these clients (by id their true group), of which `data.newcomers` come after training."""
        if self.privacy.unit != "sample":
            return None
        late = held_back(groups, self.data.newcomers)
        return self.noise(self.schedule([client for client in groups if client not in late]).most)

    def model_for(self, population: Population) -> Model:
        """The model that fits a population's samples. `InputError` for samples that should be features of images, and are others."""
        if self.data.features != "none" and not has_features(population):
            raise InputError(
                f"data.features = {self.data.features!r} with data that were not made from [data], of shape {population.shape}: give "
                f"cflpriv.data.{self.data.features}.features of images, with its FEATURE_MEAN and FEATURE_STD, or use 'none'"
            )
        return self.model.build(population.shape, population.classes, population.mean, population.std, bool(population.label_range))

    def train_for(self, population: Population) -> Train:
        """Local training by `[training]`."""
        return self.train_on(self.model_for(population))

    def train_on(self, model: Model) -> Train:
        """The same of a given model."""
        t = self.training
        return Train(
            model, t.epochs, t.batch_size, self.lr_for(model), t.momentum, t.weight_decay, t.lr_decay, on_divergence=t.on_divergence,
            optimizer=t.optimizer, update_norm=self.privacy.update_norm, augment=t.augment,
        )  # fmt: skip

    def lr_for(self, model: Model) -> float:
        """The learning rate; where the configuration leaves it out under sample-level privacy, what follows from the run."""
        t = self.training
        if not isinstance(t.lr, DerivedFloat):
            return t.lr
        noise = self.noise()
        return float(t.lr) if noise is None else derived_lr(t, noise, model, self.cohort, self.protection.helper_sets)

    def fitted(self, population: Population) -> tuple["Config", str]:
        """The configuration with the learning rate that follows from the run in its place, and a line that names all keys that were left
        out and set by a rule ("" where there are none)."""
        t = self.training
        lr = self.lr_for(self.model_for(population))
        values = {"rounds": t.rounds, "epochs": t.epochs, "batch_size": t.batch_size, "lr": lr}
        left_out = [key for key in values if isinstance(getattr(t, key), DerivedFloat | DerivedInt)]
        if not left_out:
            return self, ""
        named = ", ".join(f"training.{key} = {values[key]:.4g}" for key in left_out)
        line = f"set for private training (see `cflpriv explain training`): {named}, with privacy.clip_norm = {self.privacy.clip_norm:g}"
        plain = {key: lr if key == "lr" else int(values[key]) for key in left_out}
        return self.with_("training", **plain), line

    def algorithm_for(self, population: Population) -> Algorithm:
        """The algorithm, its hyper-parameters checked. The true groups go only to those that ask for them (oracle, shuffled).

        Raises `InputError` for invalid values, and naming algorithm and protection where these are incompatible.
        """
        algorithm = self._made(population, self.run.seed)
        if self.run.schedule:
            if algorithm.schedule is not None:
                raise InputError(
                    f"run.schedule = {self.run.schedule!r}: algorithm {algorithm.name!r} declares its own schedule; leave it out"
                )
            algorithm = replace(algorithm, schedule=read_schedule(self.run.schedule, algorithm.name))
        self._check_protection(algorithm)
        return with_advice(algorithm, self.plan_for(population, algorithm)) if self.scores_held_out else algorithm

    def _made(self, population: Population, seed: int) -> Algorithm:
        """The algorithm with a seed."""
        make = self.spec.make
        wanted = inspect.signature(make).parameters
        offered: dict[str, Any] = {"seed": seed, "weights": self.training.weights, "groups": population.truth}
        extra = {name: value for name, value in offered.items() if name in wanted}
        algorithm: Algorithm = make(self.train_for(population), **extra, **self.hyper)
        return algorithm

    @property
    def scores_held_out(self) -> bool:
        """Whether clients score models on held-out samples: not under `[privacy]`, where such scores are not paid for."""
        return (self.run.advise or self.training.mixture) and self.privacy.unit == "none"

    def plan_for(self, population: Population, algorithm: Algorithm) -> Plan:
        """The plan of the advice for the run of this algorithm."""

        def again(number: int) -> Algorithm:
            return self._made(population, int(stream(self.run.seed, "advice search", number).integers(2**31)))

        t = self.training
        return plan_of(algorithm, again, self.train_for(population), t.rounds, t.participation, cast("Weights", t.weights), self.run.seed)

    @property
    def rounds_with_scores(self) -> int:
        """The rounds of training, and those that the advice or mixtures may take after them."""
        return self.training.rounds + (further_rounds(self.training.rounds) if self.scores_held_out else 0)

    def _check_protection(self, algorithm: Algorithm) -> None:
        """Refuse combinations that clients would refuse later, by the declarations of algorithm and protection."""
        protection = self.protection
        if protection.sums.oblivious and algorithm.public_groups:
            raise InputError(
                f"protection.sum = {protection.sum!r}: keeps groups private, but the server of {algorithm.name!r} makes them; use 'secagg'"
            )
        if protection.sums.transformed and algorithm.reads_means:
            raise InputError(
                f"protection.sum = {protection.sum!r}: keeps means from the server, and that of {algorithm.name!r} computes with them; use "
                "'none' or 'secagg'"
            )
        if protection.secure and not protection.sums.oblivious and algorithm.regroups:
            raise InputError(
                f"protection.sum = {protection.sum!r}: {algorithm.name!r} averages over different groups of the same clients in one round "
                f"({algorithm.regroups}); the difference of two such sums would show an individual, so clients refuse the second"
            )
        if protection.secure and isinf(algorithm.spread) and self.privacy.unit != "client":
            raise InputError(
                f"protection.sum = {protection.sum!r}: clients of {algorithm.name!r} put values into blocks of their own choice, and a "
                "client alone in a block would show, whatever min_cohort is; privacy.unit = 'client' adds noise inside the sum, or use "
                "sum = 'none' where the server is trusted"
            )
        strict = self.run.release_policy == "strict"
        if strict and protection.secure and "relay" in algorithm.operations and not protection.relay_updates:
            raise InputError(
                f"protection.sum = {protection.sum!r}: clients of {algorithm.name!r} send each other what is summed, which they refuse: a "
                "server that lies could name an accomplice as the recipient; protection.relay_updates = true lets them"
            )
        origin = Origin(size=0 if self.compared.of_samples else 1, kinds=(("vectors", "compared"),))
        noisy = "gram" in self.privacy.local
        if "gram" in algorithm.operations and strict and not may_leave(protection, "gram", "vectors", (0, "f"), origin, noisy):
            raise InputError(
                f"protection.gram = {list(protection.gram)}: what {algorithm.name!r} compares would be seen in the clear, which clients "
                f"refuse under protection.sum = {protection.sum!r}, min_cohort = {protection.smallest_sum}; name a transform or 'ckks'"
            )

    def with_(self, section: str, **changes: Any) -> "Config":
        """The same experiment with some keys of a section changed; those of the others stay as they are resolved.

        Weights that were "own" are resolved anew under another `name`.
        """
        current = getattr(self, section)
        if section == "algorithm":
            return replace(self, algorithm={**current, **changes})
        return replace(self, **{section: replace(current, **changes)})

    def recording_all(self, **more: Any) -> "Config":
        """The same experiment with all payloads recorded; `more` are other keys of `[run]`."""
        return self.with_("run", record="full", record_rounds=(), record_clients=(), record_sample=0, **more)

    def to_toml(self) -> str:
        """The resolved experiment as a file that `load_config` reads back. Raises `InputError` for a path that is not UTF-8."""
        return toml_text(_plain(asdict(self)))


SECTIONS: dict[str, type] = {
    "data": DataSection, "model": ModelSection, "training": TrainingSection, "protection": Protection,
    "privacy": Privacy, "run": RunSection,
}  # fmt: skip
"""The sections but `[algorithm]`, each with the class whose fields are its keys."""
GIVEN = {"train", "groups", "weights", "seed"}
"""Parameters of an algorithm that are no keys of `[algorithm]`."""


def own_weights(algorithm: str) -> str:
    """What "own" weights are for an algorithm, by name; "equal" for one that does not weigh by counts."""
    wanted = inspect.signature(_spec(algorithm).make).parameters
    return str(wanted["weights"].default) if "weights" in wanted else "equal"


def _spec(name: Any) -> AlgorithmSpec:
    spec: AlgorithmSpec | None = ALGORITHMS.find(name) if isinstance(name, str) else None
    if spec is None:
        raise InputError(f"[algorithm] name = {name!r}: is not known{near(str(name), ALGORITHMS.names())}")
    return spec


def load_config(path: str | Path, changes: Sequence[str] = (), plugins: Sequence[str | Path] = (), *, trust: bool | None = None) -> Config:
    """Read an experiment. `changes` are "section.key=value" with a TOML value, as `--set` takes them; `plugins` files beside its own.

    `trust`: whether the code that the file names runs. By default it does, unless the file is in a run folder; see `trust.may_run`.
    Without its code the configuration has no `run.plugins`.

    Raises `InputError` naming file, key and value.
    """
    tree, source = changed(read_tree(path), changes, plugins), f"{path} with --set {', '.join(changes)}" if changes else str(path)
    may = may_run(Path(path), tree, trust)
    try:
        return parse_config(tree, source, trust=may)
    except InputError as error:
        idle = "" if may else idle_code(Path(path), tree)
        raise InputError("; ".join(filter(None, (f"{error}{_made_by_another(Path(path).parent)}", idle)))) from None


def _made_by_another(folder: Path) -> str:
    """That this is the run folder of another version of the package, as the end of a sentence; empty if it is not."""
    with suppress(OSError, ValueError, AttributeError):
        made, ours = read_json(folder / "environment.json").get("cflpriv"), metadata.version("cflpriv")
        if isinstance(made, str) and made != ours:
            return f"; {folder} is a run of cflpriv {made}, this is {ours}"
    return ""


def changed(tree: dict[str, Any], changes: Sequence[str], plugins: Sequence[str | Path]) -> dict[str, Any]:
    """The tree of an experiment with "section.key=value" and plugins, as the command line takes them, added. Runs these plugins."""
    for change in changes:
        set_key(tree, change)
    _resolve_paths(tree, Path())
    files = [str(load_plugin(file)) for file in plugins]
    run = tree.setdefault("run", {}) if files else {}
    named = run.setdefault("plugins", []) if isinstance(run, dict) else None
    if isinstance(named, list):  # else the configuration is refused
        named += [file for file in dict.fromkeys(files) if file not in named]
    return tree


def read_tree(path: str | Path) -> dict[str, Any]:
    """A TOML file ("-": standard input) as nested mappings; its `run.plugins`, `run.schedule`, and those of `data.paths`
    that are there, as absolute paths.

    Raises `InputError` naming the file.
    """
    path = Path(path)
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig") if str(path) == "-" else read_text(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: is not TOML ({error})") from None
    _resolve_paths(tree, path.parent)
    for run in run_sections(tree):
        if isinstance(run.get("plugins"), list):
            run["plugins"] = [str((path.parent / file).resolve()) if isinstance(file, str) else file for file in run["plugins"]]
        if isinstance(run.get("schedule"), str) and run["schedule"]:
            run["schedule"] = str((path.parent / run["schedule"]).resolve())
    return tree


def _resolve_paths(tree: dict[str, Any], folder: Path) -> None:
    """Make `data.paths` that are in `folder` absolute, so that a run folder names its data; others may be in the data directory."""
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(data.get("paths"), list):
        paths = [folder / file if isinstance(file, str) else file for file in data["paths"]]
        data["paths"] = [
            str(path.resolve()) if isinstance(path, Path) and path.exists() else file
            for path, file in zip(paths, data["paths"], strict=True)
        ]


def parse_config(tree: Mapping[str, Any], source: str = "config", *, trust: bool = True) -> Config:
    """A `Config` from nested mappings, or sections that are made already; `source` names them in errors.

    Runs the plugins that they name, because a mapping is the caller's own. Without `trust` only those stay that ran before in this process.
    For a file see `load_config`.
    """
    for section in tree:
        if section not in (*SECTIONS, "algorithm"):
            hint = "; `cflpriv sweep` runs a file that has one" if section == "sweep" else near(section, [*SECTIONS, "algorithm"])
            raise InputError(f"{source}: [{section}] is not a section{hint}")
        if not isinstance(tree[section], (Mapping, SECTIONS.get(section, Mapping))):
            raise InputError(f"{source}: {section} = {tree[section]!r}: write it as a section, [{section}]")
    try:
        tree = with_recipe(tree)
        run = _section(RunSection, tree.get("run", {}), "run")
        run = replace(run, plugins=tuple(str(load_plugin(file)) for file in run.plugins if trust or is_loaded(file)))
        sections: dict[str, Any] = {name: _section(kind, tree.get(name, {}), name) for name, kind in SECTIONS.items() if name != "run"}
        if isinstance(training := tree.get("training", {}), Mapping):
            private = with_private_values(sections["training"], training, sections["privacy"])
            sections["training"] = replace(sections["training"], **private)
        return Config(**sections, run=run, algorithm=_algorithm(tree.get("algorithm", {})))
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _section(kind: type[Section], values: Mapping[str, Any] | Section, name: str) -> Section:
    return kind(**_checked(name, kind, values)) if isinstance(values, Mapping) else values


def _algorithm(values: Mapping[str, Any]) -> dict[str, Any]:
    name = values.get("name", "pacfl")
    hyper = {key: value for key, value in values.items() if key != "name"}
    checked = _checked("algorithm", _spec(name).make, hyper)
    return {"name": name, **{key: value for key, value in checked.items() if key in hyper}}


@lru_cache
def _validator(section: str, kind: Callable[..., Any]) -> Any:
    """The keys of a section, with types and defaults, as a pydantic model: those of the dataclass or function that it configures.

    Cached, because making one takes some milliseconds.
    """
    hints, signature = get_type_hints(kind), inspect.signature(kind).parameters.items()
    keys = {key: (hints[key], parameter.default) for key, parameter in signature if isinstance(kind, type) or key not in GIVEN}
    if isinstance(kind, type):  # a function may get what it requires from the rest of the configuration
        keys = {key: (hint, ... if default is inspect.Parameter.empty else default) for key, (hint, default) in keys.items()}
    return create_model(section, __config__=ConfigDict(strict=True, extra="forbid"), **keys)  # type: ignore[call-overload]


def _checked(section: str, kind: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    model = _validator(section, kind)
    keys = list(model.model_fields)
    for key in values:
        if key not in keys:
            raise unknown_key(section, key, values[key], near(key, keys))
    tables = {key: _tables(f"{section}.{key}", model.model_fields[key].annotation, value) for key, value in values.items()}
    try:
        parsed = model(**{key: tuples(value) for key, value in tables.items()})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:1])
        if first["type"] == "missing":
            raise InputError(f"[{section}] {key}: is missing, and has no default value") from None
        if first["type"] == "tuple_type":
            raise InputError(f"[{section}] {key} = {values.get(key)!r}: expected a list, in brackets") from None
        raise InputError(f"[{section}] {key} = {values.get(key)!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    return {key: getattr(parsed, key) for key in keys}


def _tables(section: str, hint: Any, value: Any) -> Any:
    """The value of a key of type `hint`. Tables of a list, such as `[[data.columns]]`, become the dataclass that declares their keys."""
    inner: Any = next(iter(get_args(hint)), None)
    if not (isinstance(inner, type) and is_dataclass(inner) and isinstance(value, list | tuple)):
        return value
    if not all(isinstance(item, Mapping | inner) for item in value):
        raise InputError(f"[[{section}]]: expected a list of tables, each under [[{section}]]")
    made = []
    for number, item in enumerate(value, 1):
        try:
            made.append(_section(inner, item, section) if isinstance(item, Mapping) else item)
        except InputError as error:
            raise InputError(f"[[{section}]], table {number} of {len(value)}: {error}") from None
    return made


def set_key(tree: dict[str, Any], change: str) -> None:
    """Change a key of a tree, as `--set` does."""
    name, equals, text = change.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise InputError(f"--set {change}: expected section.key=value")
    try:
        parsed = tomllib.loads(f"value = {text}")
        if set(parsed) != {"value"}:
            raise InputError(f"--set {change!r}: expected one value")
        value = parsed["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text.strip()  # an unquoted value is a string
    if not isinstance(tree.setdefault(section, {}), dict):
        raise InputError(f"--set {change}: {section} is not a section")
    tree[section][key] = value


def tuples(value: Any) -> Any:
    """Lists, nested ones too, as tuples."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Mappings without None, tuples as lists, for TOML."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
