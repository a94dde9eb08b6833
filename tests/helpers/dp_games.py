"""Games of the canary audit as its tests play them: events that claim an ε, an oracle, planted bugs, and small private runs."""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack_scenes import config, population_of

import cflpriv.privacy.private_signatures as private_signatures
import cflpriv.protocols.mechanisms as mechanisms
import cflpriv.tasks.evaluation as evaluation
import cflpriv.tasks.training as training
from cflpriv.attacks.dp import dp_mechanisms
from cflpriv.attacks.dp.dp_audit import AuditResult, audit_claim, audit_guesses, verdict
from cflpriv.attacks.dp.dp_claims import NoiseClaim
from cflpriv.attacks.dp.dp_mechanisms import GAMES, CanaryGame
from cflpriv.attacks.dp.dp_samples import rerun_samples
from cflpriv.attacks.figures.family import judged_together
from cflpriv.attacks.figures.leakage import Cell
from cflpriv.engine import fast, step_noise
from cflpriv.protocols.accounting import calibrate
from cflpriv.protocols.entropy import Entropy, normals, public_entropy, uniforms
from cflpriv.protocols.events import ChoiceEvent, Event, GaussianEvent, Relation, SampledGaussianEvent
from cflpriv.types import Array

DELTA = 1e-5
RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one")


def response_probabilities(choice: int, choices: int, epsilon: float) -> Array:
    """The law (choices,) of a randomised response: e^ε / (e^ε + choices − 1) for the true choice.

    Source: Warner 1965; for several values Kairouz, Bonawitz & Ramage 2016, section 2.
    """
    probabilities = np.full(choices, 1.0 / (math.exp(epsilon) + choices - 1))
    probabilities[choice] = 1.0 - probabilities[choice] * (choices - 1)
    return probabilities


def response(event: ChoiceEvent, rng: np.random.Generator, entropy: Entropy, choices: int = 4) -> CanaryGame:
    """An oracle: randomised responses lose exactly their ε. A canary's coin says which of two values is the true one."""
    coins = rng.random(dp_mechanisms.CLIENTS * dp_mechanisms.EACH) < 0.5
    laws = np.cumsum([response_probabilities(value, choices, event.epsilon) for value in (0, 1)], axis=1)
    reported = (uniforms(entropy(32), len(coins))[:, None] > laws[coins.astype(int)]).sum(axis=1)
    return CanaryGame(np.select([reported == 0, reported == 1], [-1.0, 1.0], 0.0), coins)


ALL_GAMES: dict[str, Callable[..., CanaryGame]] = {**GAMES, "response": response}


def event_of(name: str, epsilon: float, relation: Relation) -> Event:
    """The event of a game whose release claims ε."""
    twice = 1.0 if relation == "add_remove" else 2.0
    made: dict[str, Callable[[float], Event]] = {
        "moment": lambda z: GaussianEvent(z, math.sqrt(twice), relation, "sample"),
        "whole_moment": lambda z: GaussianEvent(z, math.sqrt(twice), relation, "sample"),
        "total": lambda z: GaussianEvent(z, twice, relation, "sample"),
        "mean": lambda z: GaussianEvent(z, twice, relation, "sample"),
        "scores": lambda z: GaussianEvent(z, 8.0, "replace_one", "sample"),  # these have no other relation
        "local": lambda z: GaussianEvent(z, twice, relation, "client"),
        "training": lambda z: SampledGaussianEvent(z, 0.2, 20, 1.0, relation),
        "shares": lambda z: GaussianEvent(z, 1.0 if relation == "add_remove" else 2.0, relation, "client", 500),
        "choice": lambda z: ChoiceEvent(1 / z, relation, "sample"),
        "response": lambda z: ChoiceEvent(1 / z, relation, "sample"),
    }
    if name in ("choice", "response"):
        return made[name](1 / epsilon)
    return calibrated(made[name], epsilon)


def calibrated(made: Callable[[float], Event], epsilon: float) -> Event:
    return made(calibrate(lambda z: [made(z)], epsilon, DELTA))


def audited_game(name: str, event: Event, seed: int, claimed: Event | None = None) -> AuditResult:
    """The audit of a game of `event`, of which `claimed` (default: the event) is claimed."""
    game = ALL_GAMES[name](event, np.random.default_rng(seed), public_entropy(f"{name} {seed}"))
    claim = NoiseClaim((claimed or event,), DELTA, summed=name == "training")
    if name == "response":  # pure, and not bounded in range as the event of a choice claims
        return audit_guesses(game.scores, game.coins, DELTA, claim=claim.epsilon)
    return audit_claim(game.scores, game.coins, claim)


def less_noise(patch: pytest.MonkeyPatch, share: float) -> None:
    patch.setattr(mechanisms, "normals", lambda key, count: share * normals(key, count))
    made = step_noise.normals
    users = [module for name, module in sys.modules.items() if name.startswith("cflpriv.") and vars(module).get("normals") is made]
    for module in users:  # wherever steps are made
        patch.setattr(module, "normals", lambda *of_step: share * made(*of_step))


def a_third_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    less_noise(patch, 1 / 3)


def no_clip(patch: pytest.MonkeyPatch) -> None:
    stacked = fast.train
    patch.setattr(mechanisms, "clip_rows", lambda rows, norm: np.asarray(rows, np.float64))
    patch.setattr(private_signatures, "unit_rows", lambda rows: rows)  # signatures bound their rows twice
    patch.setattr(evaluation, "capped", lambda losses, cap: losses)

    def unclipped(model: Any, clients: Any, options: Any, *more: Any) -> Any:
        return stacked(model, clients, replace(options, clip_norm=1e9 * bool(options.clip_norm)), *more)

    patch.setattr(fast, "train", unclipped)


def no_sampling(patch: pytest.MonkeyPatch) -> None:
    plain = training.Train._batches

    def everybody(self: training.Train, given: Any) -> list[Any]:
        return [np.arange(len(given.data.y_train))] * self.steps if self.noise_multiplier else plain(self, given)

    patch.setattr(training.Train, "_batches", everybody)


def whole_audit_says(result: AuditResult, claim: float) -> str:
    """The status of a bound among two others without an alarm and 60 figures of leakage, none of which is a leak."""
    made = Cell("dp_audit", "server", "dp", "run_epsilon", result.epsilon, None, None, claim, None, verdict(result, claim), p=result.p)
    others = [replace(made, status="inconclusive", p=1.0)] * 2 + [replace(made, metric="model_loss_auc", status="at_baseline", p=0.5)] * 60
    return judged_together([made, *others])[0][0].status


def scene(algorithm: str, unit: str, epsilon: float, **more: Any) -> Any:
    privacy = {"unit": unit, "epsilon": epsilon, "delta": DELTA, **({"samples": 70} if unit == "sample" else {}), **more.pop("privacy", {})}
    training = {"rounds": 2, "epochs": 2, "batch_size": 20, "lr": 0.3} | more.pop("training", {})
    data = {"clients": 20} | more.pop("data", {})
    name, _, found = algorithm.partition(", ")
    needed: dict[str, dict[str, Any]] = {"pacfl": {"k": 4}, "ifca": {"k": 2}, "stocfl": {"tau": 0.5}}
    given = {"name": name, **({} if found else needed.get(name, {}))}
    return config(given, more.pop("protection", {}), training=training, model={"name": "linear"}, privacy=privacy, data=data, **more)


def whole(made: Any, runs: int = 4) -> AuditResult:
    """The canaries of several runs together: they share no noise, so each canary still has the run's ε."""
    found = [rerun_samples(made, population_of(made), np.random.default_rng(seed)) for seed in range(runs)]
    scores, coins = (np.concatenate([getattr(run.game, name) for run in found]) for name in ("scores", "coins"))
    return audit_claim(scores, coins, found[0].claim)


ALLOWED, TOO_MANY, FALSE, MISSED = 0.05, 0.175, 1e-3, 1e-2
"""A sound audit's chance of an alarm at most, one that is too high, and how often either is taken for the other, at most."""


def alarms_are_too_many(alarms: Iterable[bool]) -> bool:
    """Whether alarms of one audit after the other come too often, as soon as that is clear.

    The likelihood ratio of the two chances is at most 1 in expectation, whatever came before, where no audit's chance is above `ALLOWED`;
    so it ever reaches 1 / `FALSE` with probability `FALSE` at most (Ville's inequality). Where all are at least `TOO_MANY` the same holds
    of its inverse and `MISSED`. Without an alarm that takes ln(.01) / ln(.825 / .95) = 33 audits. A fixed number of audits that rejects at
    .001 and misses a chance of .178 once in 100 takes 165: it rejects at 19 alarms.

    Source: Wald 1945 ("Sequential tests of statistical hypotheses").
    """
    ratio = 0.0
    for alarm in alarms:
        ratio += math.log(TOO_MANY / ALLOWED) if alarm else math.log((1 - TOO_MANY) / (1 - ALLOWED))
        if not math.log(MISSED) < ratio < -math.log(FALSE):
            return ratio > 0
    raise ValueError("alarms: ended before they were enough")
