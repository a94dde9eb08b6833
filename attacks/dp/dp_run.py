"""The DP audit of a run with `[privacy]`: canaries in each kind of release by itself, and in the whole run.

Source: Steinke, Nasr & Jagielski 2023 and Nasr et al. 2023 (`dp_audit`, `dp_claims`). A recorded run has no canaries in it, so the auditor
reruns the same configuration on the run's clients, as often (each time with fresh noise and coins) and as long as the budget allows: with
canaries among clients' samples (`dp_samples`), or with clients as canaries (`dp_clients`).

Of a whole run only the updates, or the released means, are scored, and held against all that it spent: its figure does not cover
signatures, choices and rows with local noise, and its note reports that. These are audited one by one, with the code that releases them
in runs (`dp_mechanisms`). Where members of secure sums share the noise, a server with N colluding members (`server+N`) subtracts theirs.

The figure is a lower bound on ε at one-sided 97.5 %, beside the ε in the ledger: *above it* the run is less private than it claims
(`leaks`). Below it the power decides (`dp_audit.verdict`): how often the same audit would have raised an alarm, had the noise been .7 of
what the claim needs. The unprotected figure is the same game with the noise left out. What it proves: a bound above the claim is a bug.
What it does not: a bound below is no proof. Noise that is right in size but predictable (from a seed that the server knows, or the same in
each round) is not tested.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...experiments.config.config import Config
from ...experiments.run.run import prepare
from ...privacy.client_level import LocalGram
from ...privacy.private_signatures import moment_event, sum_event
from ...protocols.entropy import Entropy, system_entropy
from ...protocols.errors import ProtocolError
from ...protocols.events import ChoiceEvent, Event, known_shares, training_event
from ...randomness import stream
from ...types import Array, ClientData, Population
from ..figures.leakage import Case, Cell, nothing
from .dp_audit import CONFIDENCE, ENOUGH, FAULT, AuditResult, Power, audit_claim, audit_power, verdict
from .dp_claims import NoiseClaim, claim_of_clients
from .dp_clients import rerun_clients
from .dp_mechanisms import GAMES, CanaryGame, quiet
from .dp_references import joined_trials, released_scores
from .dp_reruns import WholeRunGame, recorded_config
from .dp_samples import noise_of_run, rerun_samples

__all__ = ["WholeAudit", "audit_release", "audit_whole", "cells", "claim_of", "rerun", "releases"]

NAME = "dp_audit"
WHOLE = "run_epsilon"
NO_NOISE = 1e-3
"""The share of the noise that a reference keeps."""


def rerun(
    config: Config, population: Population, rng: np.random.Generator, *, reruns: int = 1, seconds: float = np.inf
) -> tuple[WholeRunGame, CanaryGame, int]:
    """The run of `config` with canaries of its unit, the same without noise, and the number of reruns: the canaries of all reruns together.

    Reruns share no noise, so each coin is as private as in one rerun, and more canaries show more. At most `reruns`, within `seconds`; the
    first always runs, with fewer rounds if necessary. Later ones that fail (too few clients for a sum) are left out. Raises as
    `rerun_samples`, and `ValueError` for less than one rerun.
    """
    if reruns < 1:
        raise ValueError(f"rerun: {reruns} reruns; expected at least 1")
    began, runs, calm = time.perf_counter(), list[WholeRunGame](), list[CanaryGame]()
    for number in range(reruns):
        used = time.perf_counter() - began
        if runs and used * (1 + 1 / len(runs)) > seconds:
            break
        try:
            # another seed: were the noise drawn from it (insecure_test_entropy), it would still be another's
            whole_run, without = _pair(config.with_("run", seed=config.run.seed + number), population, rng, seconds - used)
        except (ValueError, ArithmeticError, ProtocolError):
            if not runs:
                raise
            continue
        runs.append(whole_run)
        calm.append(without)
    games, unscored = _joined([run.game for run in runs]), {name for run in runs for name in run.unscored}
    second = [run.apart for run in runs if run.apart is not None]
    apart = _joined(second) if second else None
    repeated = [run.trials for run in runs if run.trials is not None]
    trials = joined_trials(repeated) if len(repeated) == len(runs) else None
    claim = claim_of_clients([bill for run in runs for bill in (run.claim.events, run.claim.covering)], config.privacy.delta)
    together = WholeRunGame(games, claim, min(run.rounds for run in runs), tuple(sorted(unscored)), apart, trials)
    return together, _joined(calm), len(runs)


def _pair(config: Config, population: Population, rng: np.random.Generator, seconds: float) -> tuple[WholeRunGame, CanaryGame]:
    """One rerun, and the same without noise, in about `seconds`."""
    if config.privacy.unit == "client":
        return rerun_clients(config, population, rng, seconds=seconds)
    whole_run = rerun_samples(config, population, rng, seconds=seconds / 2)
    return whole_run, rerun_samples(config, population, rng, noise=NO_NOISE, seconds=seconds / 2).game


def _joined(games: Sequence[CanaryGame]) -> CanaryGame:
    return CanaryGame(np.concatenate([game.scores for game in games]), np.concatenate([game.coins for game in games]))


# --- the attack -----------------------------------------------------------------------------------------------------------------------


def releases(config: Config, population: Population) -> dict[str, tuple[str, Event]]:
    """What one client of the run releases: figure -> (name of the game, its event). A trusted server's means are audited in the whole
    run only."""
    priced: dict[str, tuple[str, Event]] = {}
    if config.privacy.unit == "client":
        run_ledger = prepare(recorded_config(config), population=population).run_ledger
        assert run_ledger is not None  # there is a unit
        options = run_ledger.options(config.protection)
        if isinstance(options["local"], LocalGram):
            priced["signature_epsilon"] = ("local", options["local"].event)
        if config.protection.sum == "secagg":
            priced["mean_epsilon"] = ("shares", options["clipped"].event)
        return priced
    noise, relation = noise_of_run(config, population), config.privacy.relation
    if noise.signature:
        name = config.releases().mechanism
        bound = {"scores": noise.loss_cap, "mean": 1.0}.get(name, noise.clip_norm)
        release = moment_event(noise.signature, relation) if name.endswith("moment") else sum_event(noise.signature, bound, relation)
        priced["signature_epsilon"] = (name, release)
    if noise.choice:
        priced["choice_epsilon"] = ("choice", ChoiceEvent(noise.choice, relation, "sample"))
    if noise.training:
        steps = 1 if noise.shares else max(1, round(config.training.epochs / noise.sampling_rate))
        event = training_event(noise.training, noise.sampling_rate, steps, noise.clip_norm, relation, noise.shares, noise.allocated)
        priced["training_epsilon"] = ("training", event)
    return priced


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """A bound for every release by itself and for the whole run, each beside its claim."""
    config = case.prior.config
    why = ""
    if config is None or config.privacy.unit == "none":
        why = "no differential privacy is claimed in this run"
    elif case.view.adversary != "server" and not (case.view.adversary.startswith("server+") and _noise_is_shared(config)):
        why = "not attempted: audited once, with the server's view, which has all releases (--adversary server)"
    elif not case.view.messages:
        why = "nothing is released"
    if why:
        return [nothing(case, NAME, WHOLE, why)], None
    assert config is not None
    delta, rng, population = config.privacy.delta, stream(case.seed, "dp audit"), _population(case)
    colluding, figures = len(case.view.coalition), []
    for metric, (name, event) in releases(config, population).items():
        if colluding and not getattr(event, "shares", 0):
            continue  # what colluders know of it the server's view has, too
        if known_shares(event, colluding - 1) is None:
            figures.append(
                nothing(case, NAME, metric, f"nothing is claimed: {colluding} colluding members know all shares that are counted")
            )
            continue
        observed, calm = audit_release(name, event, delta, rng, system_entropy, colluding)
        title = f"{name}, less the shares of the noise of {colluding} colluding members" if colluding else name
        figures.append(_figure(case, metric, observed, claim_of(event, delta, colluding).epsilon, calm, title))
    return [*figures, *([] if colluding else [_whole(case, config, population, rng)])], None


def _noise_is_shared(config: Config) -> bool:
    """Whether members of secure sums share the noise."""
    return config.privacy.noise == "shared" or (config.privacy.unit == "client" and config.protection.sum == "secagg")


def claim_of(event: Event, delta: float, colluding: int = 0) -> NoiseClaim:
    """What an event claims towards a server that knows the shares of `colluding` members, of whom one is not counted anyway.

    Raises `ValueError` if these are all that are counted.
    """
    left = known_shares(event, colluding - 1)
    if left is None:
        raise ValueError(f"colluding: {colluding} members know all of the shares that are counted, so nothing is claimed")
    return NoiseClaim((left,), delta)


def audit_release(
    name: str, event: Event, delta: float, rng: np.random.Generator, entropy: Entropy, colluding: int = 0
) -> tuple[AuditResult, AuditResult]:
    """The audit of one release of the game `name`, with its power, against the price of its event; and the same without noise.

    With `colluding` members of a secure sum who tell the server their shares of the noise, against the price of what is left of it.
    Raises `ValueError` if these are all shares that are counted.
    """
    claim, draws = replace(claim_of(event, delta, colluding), summed=name == "training"), rng.spawn(1)[0]
    known = {"colluding": colluding} if colluding else {}
    observed, calm = (GAMES[name](release, rng, entropy, **known) for release in (event, quiet(event)))
    results = [audit_claim(game.scores, game.coins, claim) for game in (observed, calm)]
    (left,), count = claim.events, len(observed.coins)
    shown = audit_power(lambda: released_scores(name, left, count, draws, FAULT), claim)
    return replace(results[0], power=shown), results[1]


@dataclass(frozen=True, eq=False)
class WholeAudit:
    """The audit of a whole run: its `result`, with its power, against `claim`, the same without noise, and what was rerun how often."""

    result: AuditResult
    claim: float
    calm: AuditResult
    run: WholeRunGame
    reruns: int


def audit_whole(
    config: Config, population: Population, rng: np.random.Generator, *, reruns: int = 1, seconds: float = np.inf
) -> WholeAudit:
    """The audit of the run of `config`, by `rerun`, which raises what it raises.

    Both looks share the error. The power is that of the first look alone: with the second an audit has no less.
    """
    draws = rng.spawn(1)[0]
    whole_run, calm, times = rerun(config, population, rng, reruns=reruns, seconds=seconds)
    claim, looks = whole_run.claim, [game for game in (whole_run.game, whole_run.apart) if game is not None]
    confidence = 1 - (1 - CONFIDENCE) / len(looks)
    results = [audit_claim(game.scores, game.coins, claim, confidence=confidence) for game in looks]
    unprotected = audit_claim(calm.scores, calm.coins, claim, confidence=confidence)
    p = min(1.0, len(results) * min(result.p for result in results))
    result = replace(max(results, key=lambda result: result.epsilon), p=p, power=_power_of(whole_run, calm, confidence, draws))
    return WholeAudit(result, claim.epsilon, unprotected, whole_run, times)


def _power_of(whole_run: WholeRunGame, calm: CanaryGame, confidence: float, rng: np.random.Generator) -> Power:
    """The power of the first look at a whole run."""
    if whole_run.trials is None:
        return Power(0, 0, "unknown where clients train with Adam")
    trials = whole_run.trials.held_against(calm)
    numbers = iter(range(len(trials.coins)))
    draw = lambda: trials.scores(next(numbers), FAULT, rng)  # noqa: E731
    return audit_power(draw, whole_run.claim, confidence=confidence, repetitions=len(trials.coins))


def _whole(case: Case, config: Config, population: Population, rng: np.random.Generator) -> Cell:
    try:
        whole = audit_whole(config, population, rng, reruns=case.budget.seeds, seconds=case.budget.seconds)
    except (ValueError, ArithmeticError, ProtocolError) as error:
        return nothing(case, NAME, WHOLE, f"not attempted: {error}")
    whole_run, times = whole.run, f", {whole.reruns} times" if whole.reruns > 1 else ""
    scored = "the means over clients" if config.privacy.unit == "client" else "clients' updates"
    unscored = f"; charged but not validated by it: what has {' and '.join(whole_run.unscored)}" if whole_run.unscored else ""
    scope = f"{whole_run.rounds} of {config.training.rounds} rounds, rerun with canaries{times}; scored are {scored}{unscored}"
    trusted = config.privacy.unit == "client" and config.protection.sum == "none"  # the server adds the noise
    made = _figure(case, WHOLE, whole.result, whole.claim, whole.calm, scope)
    return replace(made, towards="who sees the means, not single updates (the server is trusted)" if trusted else "")


def _population(case: Case) -> Population:
    """The run's clients as far as they trained."""
    clients = tuple(ClientData(client, x, y, x[:1], y[:1]) for client, (x, y) in sorted(case.truth.data.items()))
    groups = tuple(case.truth.groups.get(client.id, 0) for client in clients)
    return Population("audited", clients, groups, case.prior.classes, case.prior.mean, case.prior.std)


def _figure(case: Case, metric: str, observed: AuditResult, claim: float, calm: AuditResult, scope: str) -> Cell:
    power = None if observed.power is None or observed.power.note else observed.power
    assert case.prior.config is not None  # checked by the caller
    note = (
        f"{scope}: a lower bound on epsilon at {100 * CONFIDENCE:g} % from {observed.canaries} canaries, the larger of two: "
        f"{observed.of_claim or 0.0:.2f} by the trade-off function of the claimed noise, {observed.of_guesses:.2f} for any mechanism "
        f"({observed.correct} of {observed.guesses} guesses right); ceiling {observed.ceiling:.2f}; baseline: what the accountant claims "
        f"at delta = {case.prior.config.privacy.delta:g}; unprotected: the same with the noise left out; {_of_power(observed.power)}"
    )
    return Cell(
        NAME, case.view.adversary, case.protection, metric, observed.epsilon, None, None, claim, calm.epsilon, verdict(observed, claim),
        seeds=(case.seed,), note=note, reference_baseline=claim, power=None if power is None else power.share,
        power_low=None if power is None else power.low, p=observed.p,
    )  # fmt: skip


def _of_power(power: Power | None) -> str:
    """The end of a note: how much a bound below the claim means."""
    if power is None or power.note:
        return f"power {power.note if power else 'unknown'}, so that a bound below the claim is inconclusive"
    return (
        f"power {power.share:.2f}, at least {power.low:.2f} at 95 %: with {FAULT:g} times the noise {power.alarms} of "
        f"{power.repetitions} repetitions on a reference raised an alarm; at_baseline requires {ENOUGH:g} at least"
    )
