"""Values of `[training]` for private training, where the configuration leaves them out.

At the client level, for every algorithm: `epochs` 10 and `batch_size` 0, ten steps along the full gradient. An update costs the same
whatever it took, and one step is a poor use of it; its length is `privacy.clip_norm` at any learning rate (`privacy.updates`).

At the sample level the usual values (batches of 10 samples, a learning rate of 0.01) move a model too little within a privacy budget:
noise is divided by the size of a batch, and clipped gradients are short. All that enters is public: ε, δ, `privacy.samples`, the number of
clients and of parameters, and what the configuration sets.

    batch_size  0: every sample is in every step (sampling rate 1). Among all rates this needs the least noise in all.
    rounds      100.
    lr          the smallest of LARGEST, PATH / steps and DRIFT / (σ·√(steps·d)), all divided by clip_norm / (1 − momentum). Where labels
                are numbers at most LARGEST_OF_NUMBERS: the curvature of a squared error does not fall as the model becomes sure.
    clip_norm   1, as everywhere.

`[training] recipe` names defaults of several sections (`RECIPES`). Each applies where its key is left out. Values that the rules
above set stay with the rules.

d is the number of parameters, σ·clip_norm the deviation of the noise of one step in the mean over clients, steps the number of steps in all
rounds. The second bound keeps the length of the path where steps are many, the third keeps the noise from moving a large model too far. The
constants were chosen on data apart from those that `benchmarks/private_defaults.py` judges by.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from ...data.raw_tables import TABLES
from ...data.text import TEXTS
from ...engine.models import Model
from ...errors import InputError
from ...privacy.settings import Noise, Privacy, noise_of_mean
from .sections import TrainingSection

__all__ = ["RECIPES", "DerivedFloat", "DerivedInt", "derived_lr", "with_private_values", "with_recipe"]

EPOCHS, BATCH = 10, 0
ROUNDS = 100
LARGEST, PATH, DRIFT = 8.0, 800.0, 45.0
LARGEST_OF_NUMBERS = 0.25


RECIPES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "private": {"data": {"features": "whitened_scattering"}, "model": {"name": "linear"}},
}
"""By name, sections with the defaults of a recipe. "private": a linear model of public features (Tramèr & Boneh 2021;
`data.whitened_scattering`). Rounds, batches, rate and clip norm follow from the rules above. With plain scattering, on MNIST and EMNIST
letters, 100 steps of all samples at a rate of 8 were within .3 points of the best of rates from 2 to 32 and of clip norms from .03 to 2."""


class DerivedInt(int):
    """A number that the configuration left out and a rule set."""


class DerivedFloat(float):
    """A number that the configuration left out. A rule sets it when the size of the model is known; until then it is the largest value."""


def with_recipe(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its recipe where keys are left out; sections that are made already have all keys.

    Raises `InputError` for a recipe that is not known, or is not for this configuration.
    """
    sections = {name: tree.get(name, {}) for name in ("training", "privacy", "data")}
    plain = {name: section if isinstance(section, Mapping) else vars(section) for name, section in sections.items()}
    recipe = plain["training"].get("recipe", "none")
    if recipe == "none":
        return dict(tree)
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise InputError(f"training.recipe = {recipe!r}: known are {', '.join(map(repr, ('none', *RECIPES)))}")
    if (unit := plain["privacy"].get("unit", "none")) != "sample":
        raise InputError(f"training.recipe = {recipe!r} with privacy.unit = {unit!r}: is for unit = 'sample'; leave it out")
    if (source := plain["data"].get("source")) in (*TABLES, *TEXTS):
        raise InputError(f"training.recipe = {recipe!r} with data.source = {source!r}: its features are of images; leave it out")
    made = dict(tree)
    for name, defaults in RECIPES[recipe].items():
        if isinstance(section := tree.get(name, {}), Mapping):
            made[name] = {**defaults, **section}
    return made


def with_private_values(training: TrainingSection, configured: Mapping[str, Any], privacy: Privacy) -> dict[str, Any]:
    """The keys of `[training]` that a rule sets: those that are not `configured`. At the sample level it takes a number of samples."""
    values: dict[str, Any] = {}
    if privacy.unit == "client":
        values = {"epochs": DerivedInt(EPOCHS), "batch_size": DerivedInt(BATCH)}
    elif privacy.unit == "sample" and privacy.samples:
        values = {"rounds": DerivedInt(ROUNDS), "batch_size": DerivedInt(BATCH)}
        if training.optimizer == "sgd":
            values["lr"] = DerivedFloat(LARGEST)
    return {key: value for key, value in values.items() if key not in configured}


def derived_lr(training: TrainingSection, noise: Noise, model: Model, clients: int, helper_sets: int = 0) -> float:
    """The learning rate of the rule, for noise that was planned for the run. `helper_sets` as in `noise_of_mean`."""
    a_round = 1 if noise.shares else max(1, round(training.epochs / noise.sampling_rate))
    steps = max(1, training.rounds * a_round)
    deviation = noise.training / (noise.sampling_rate * noise.samples) * noise_of_mean(noise, max(1, clients), helper_sets)
    drift = DRIFT / (deviation * sqrt(steps * model.dimension)) if deviation else LARGEST
    largest = LARGEST if model.loss == "cross_entropy" else LARGEST_OF_NUMBERS
    return float(min(largest, PATH / steps, drift)) * (1 - training.momentum) / noise.clip_norm
