"""How much audits of ε show: bounds of sound noise, noise that is too small, and false alarms.

    python -m benchmarks dp_audits [--audits 200] [--bounds 20] [--runs 0] [--first 0]

Scores are drawn from the laws that the claims state (`attacks.dp.dp_references`): one Gaussian release, the steps of a private training on
Poisson batches, one choice between two models. Reported are, at each ε and δ = 1e-5 under add_remove,

- the mean (lowest) bound ÷ claim of `--bounds` audits of sound noise with 10,000 canaries, by both tests (`dp_audit.audit_claim`) and by
  guesses alone (`dp_audit.audit_guesses`);
- in how many of `--audits` audits with 2,560 canaries the bound is above the claim: false alarms where the noise is as claimed, faults that
  are found where it is .7 of that.

`--runs` counts the same in true runs: whole runs of FedAvg on digits (softmax regression, 20 clients, 2,560 canaries) whose clients add the
claimed noise, or .7 of it. `--first` is the first seed.
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np

from cflpriv.attacks.dp.dp_audit import FAULT, audit_claim, audit_guesses, is_refuted
from cflpriv.attacks.dp.dp_claims import NoiseClaim
from cflpriv.attacks.dp.dp_references import released_scores
from cflpriv.attacks.dp.dp_samples import rerun_samples
from cflpriv.data import build_population
from cflpriv.experiments.config.config import parse_config
from cflpriv.protocols.accounting import calibrate
from cflpriv.protocols.events import ChoiceEvent, Event, GaussianEvent, SampledGaussianEvent

__all__ = ["claimed", "false_or_found", "main", "ratios"]

DELTA = 1e-5
MANY, FEW = 10_000, 2_560
"""Canaries for bounds, and for alarms."""
EPSILONS = (1.0, 2.0, 4.0, 8.0)
EVENTS: dict[str, Callable[[float], Event]] = {
    "mean": lambda z: GaussianEvent(z, 1.0, "add_remove", "sample"),
    "training": lambda z: SampledGaussianEvent(z, 0.2, 20, 1.0, "add_remove"),
    "choice": lambda z: ChoiceEvent(1 / z, "add_remove", "sample"),
}
"""Name of a reference -> its event with this noise multiplier."""
BATCHES = {"whole runs, all samples in each step": 0, "whole runs, Poisson batches of 20 of 70": 20}


def claimed(name: str, epsilon: float) -> NoiseClaim:
    """The claim of a release that costs ε."""
    event: Event = EVENTS[name](1 / epsilon if name == "choice" else calibrate(lambda z: [EVENTS[name](z)], epsilon, DELTA))
    return NoiseClaim((event,), DELTA, summed=name == "training")


def ratios(name: str, epsilon: float, audits: int, seed: int) -> tuple[list[float], list[float]]:
    """Bound ÷ claim of sound audits, by both tests and by guesses alone."""
    claim, rng = claimed(name, epsilon), np.random.default_rng(seed)
    drawn = [released_scores(name, claim.events[0], MANY, rng, 1.0) for _ in range(audits)]
    both = [audit_claim(scores, coins, claim).epsilon / claim.epsilon for scores, coins in drawn]
    return both, [audit_guesses(scores, coins, DELTA, claim=claim.epsilon).epsilon / claim.epsilon for scores, coins in drawn]


def false_or_found(name: str, epsilon: float, share: float, audits: int, seed: int) -> int:
    """In how many audits the claim is refuted, with this share of the noise."""
    claim, rng = claimed(name, epsilon), np.random.default_rng(seed)
    canaries = FEW if name != "training" else 5 * 500
    return sum(is_refuted(*released_scores(name, claim.events[0], canaries, rng, share), claim) for _ in range(audits))


def alarms_of_runs(batch: int, epsilon: float, runs: int, first: int) -> tuple[int, int, list[float]]:
    """Whole runs in which a claim is refuted: with the claimed noise, and with `FAULT` of it; and bound ÷ claim with the claimed noise."""
    alarms, bounds = [0, 0], []
    for seed in range(first, first + runs):
        config = parse_config({
            "data": {"source": "digits", "clients": 20, "samples_per_client": 70, "seed": seed},
            "model": {"name": "linear"}, "run": {"record": "full", "seed": seed}, "algorithm": {"name": "fedavg"},
            "training": {"rounds": 2, "epochs": 1 if batch == 0 else 2, "batch_size": batch, "lr": 0.3, "weights": "equal"},
            "privacy": {"unit": "sample", "epsilon": epsilon, "delta": DELTA, "samples": 70},
        })  # fmt: skip
        population = build_population(config.data)
        sound = rerun_samples(config, population, np.random.default_rng(seed))
        faulty = rerun_samples(config, population, np.random.default_rng(runs + seed), noise=FAULT)
        results = [audit_claim(run.game.scores, run.game.coins, sound.claim) for run in (sound, faulty)]
        for number, result in enumerate(results):
            alarms[number] += result.epsilon > sound.claim.epsilon
        bounds.append(results[0].epsilon / sound.claim.epsilon)
    return alarms[0], alarms[1], bounds


def main(words: Sequence[str]) -> int:
    """Print the three tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks dp_audits")
    parser.add_argument("--audits", type=int, default=200)
    parser.add_argument("--bounds", type=int, default=20)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args(words)
    print(f"bound / claim of {asked.bounds} sound audits with {MANY} canaries: mean (lowest); by guesses alone")
    for name in EVENTS:
        for epsilon in EPSILONS:
            both, guessed = ratios(name, epsilon, asked.bounds, asked.first)
            print(f"{name:<9} epsilon {epsilon:g}: {np.mean(both):.2f} ({min(both):.2f}); {np.mean(guessed):.2f}", flush=True)
    print(f"refuted claims in {asked.audits} audits with {FEW} canaries: noise as claimed (false alarms), {FAULT:g} of it")
    for name in EVENTS:
        for epsilon in EPSILONS:
            counts = [false_or_found(name, epsilon, share, asked.audits, asked.first) for share in (1.0, FAULT)]
            print(f"{name:<9} epsilon {epsilon:g}: {counts[0]}, {counts[1]}", flush=True)
    for name, batch in BATCHES.items() if asked.runs else ():
        for epsilon in EPSILONS:
            false, found, bounds = alarms_of_runs(batch, epsilon, asked.runs, asked.first)
            print(f"{name}, epsilon {epsilon:g}: {false} and {found} of {asked.runs}; bound / claim {np.mean(bounds):.2f}", flush=True)
    return 0
