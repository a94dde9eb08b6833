"""The canary audit: its bound against brute force, no false alarms beyond the stated share, and planted bugs are caught."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack_scenes import QUICK, case, config, population_of
from scipy import stats

import cflpriv.federation.client as remote_client
import cflpriv.privacy.private_signatures as private_signatures
import cflpriv.protocols.mechanisms as mechanisms
import cflpriv.tasks.evaluation as evaluation
import cflpriv.tasks.training as training
from cflpriv.attacks import ATTACKS, dp_mechanisms, dp_run
from cflpriv.attacks.dp_audit import (
    ENOUGH,
    FACTOR,
    AuditResult,
    Power,
    audit,
    ceiling,
    epsilon_lower_bound,
    guess,
    numbers_of_guesses,
    p_value,
    power,
    verdict,
)
from cflpriv.attacks.dp_clients import play_clients
from cflpriv.attacks.dp_mechanisms import GAMES, Game, quiet
from cflpriv.attacks.dp_references import released
from cflpriv.attacks.dp_reruns import Played
from cflpriv.attacks.dp_run import audit_release, audit_whole, play, releases
from cflpriv.attacks.dp_samples import play_samples
from cflpriv.attacks.family import judged_together
from cflpriv.attacks.leakage import Cell
from cflpriv.engine import fast
from cflpriv.protocols import shared_noise
from cflpriv.protocols.accounting import calibrate, epsilon_of
from cflpriv.protocols.entropy import Entropy, normals, public_entropy, uniforms
from cflpriv.protocols.events import ChoiceEvent, Event, GaussianEvent, Relation, SampledGaussianEvent
from cflpriv.protocols.mechanisms import Noised, gaussian_noise
from cflpriv.types import Array

pytestmark = pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
"""The steps before clusters are formed are what is tested."""

DELTA = 1e-5
RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one")


# --- the bound ------------------------------------------------------------------------------------------------------------------------


def test_a_pure_bound_is_that_of_independent_coins() -> None:
    # δ = 0: the p value is the binomial tail; here by simulation of randomised responses
    rng = np.random.default_rng(0)
    for epsilon in (0.5, 2.0):
        right = rng.binomial(50, 1 / (1 + math.exp(-epsilon)), size=200_000)
        for correct in (30, 40, 46):
            assert p_value(correct, 50, 100, epsilon, 0.0) == pytest.approx(float((right >= correct).mean()), abs=4e-3)


def test_delta_adds_what_the_theorem_says() -> None:
    law = stats.binom(20, 1 / (1 + math.exp(-1.0)))
    slow = max((law.sf(18 - i - 1) - law.sf(18 - 1)) / i for i in range(1, 19))
    assert p_value(18, 20, 40, 1.0, 1e-3) == pytest.approx(float(law.sf(17) + 2 * 40 * 1e-3 * slow))


def test_a_bound_is_just_refuted_and_never_above_its_ceiling() -> None:
    bound = epsilon_lower_bound(90, 100, 300, DELTA, 0.95)
    assert p_value(90, 100, 300, bound, DELTA) <= 0.05 < p_value(90, 100, 300, bound + 2e-3, DELTA)
    assert bound < epsilon_lower_bound(95, 100, 300, DELTA, 0.95) < ceiling(100, 300, DELTA, 0.95)
    assert epsilon_lower_bound(50, 100, 300, DELTA, 0.95) == 0.0
    with pytest.raises(ValueError, match="audit"):
        epsilon_lower_bound(5, 4, 10, DELTA)


def test_the_surest_are_guessed_by_their_sign() -> None:
    scores, coins = np.array([0.1, 5.0, -3.0, 2.0, 0.0]), np.array([True, True, False, False, True])
    assert guess(scores, coins, 2) == 2
    assert guess(scores, coins, 4) == 3
    with pytest.raises(ValueError, match="coins"):
        audit(scores, coins[:4], DELTA)


def test_so_many_guesses_that_a_bound_can_exceed_the_claim() -> None:
    for claim in (0.5, 2.0, 4.0):
        assert ceiling(max(numbers_of_guesses(10_000, claim, DELTA)), 10_000, DELTA, 0.975) > claim
    assert numbers_of_guesses(20, 8.0, DELTA) == (20,)


def test_a_randomised_response_at_its_epsilon_raises_no_more_alarms_than_stated() -> None:
    # the worst mechanism that ε allows, so alarms come close to the share: each coin is told right with e^ε/(1+e^ε)
    rng = np.random.default_rng(1)
    epsilon, repeats = 1.0, 2000
    right = rng.binomial(200, 1 / (1 + math.exp(-epsilon)), size=repeats)
    counts, times = np.unique(right, return_counts=True)
    alarms = sum(int(often) for count, often in zip(counts, times, strict=True) if epsilon_lower_bound(int(count), 200, 200, 0.0) > epsilon)
    assert alarms / repeats > 0.02, "the test has power"
    assert stats.binomtest(alarms, repeats, 0.05, alternative="greater").pvalue > 1e-6


# --- power ----------------------------------------------------------------------------------------------------------------------------


def test_the_verdict_takes_bound_claim_and_the_conservative_power() -> None:
    result = AuditResult(1000, 100, 90, 1.5, 4.0)
    assert verdict(result, 1.0) == "leaks"
    assert verdict(result, 2.0) == "inconclusive", "no power is known"
    for alarms, status in ((100, "at_baseline"), (96, "at_baseline"), (95, "inconclusive"), (0, "inconclusive")):
        found = Power(alarms, 100)
        assert (found.low >= ENOUGH) == (status == "at_baseline")
        assert verdict(replace(result, power=found), 2.0) == status
        assert verdict(replace(result, power=found), 1.0) == "leaks"
    assert verdict(replace(result, power=Power(0, 0, "unknown where clients train with Adam")), 2.0) == "inconclusive"


def test_the_power_is_at_most_in_one_of_twenty_below_its_conservative_figure() -> None:
    rng = np.random.default_rng(0)
    alarms = rng.binomial(100, ENOUGH, size=2000)
    assert np.mean([Power(int(one), 100).low > ENOUGH for one in alarms]) <= 0.05
    assert Power(7, 10).share == 0.7


@pytest.mark.parametrize("claim", [0.3, pytest.param(0.8, marks=pytest.mark.slow), pytest.param(1.2, marks=pytest.mark.slow)])
def test_power_counts_the_audits_that_exceed_the_claim(claim: float) -> None:
    # randomised responses of ε = 1 against claims about it: the same number of alarms as audits made one by one
    def draw(rng: np.random.Generator) -> tuple[Array, Array]:
        coins = rng.random(300) < 0.5
        right = rng.random(300) < 1 / (1 + math.exp(-1.5))
        return np.where(right == coins, 1.0, -1.0) * (1 + rng.random(300)), coins

    rngs = [np.random.default_rng(0) for _ in range(2)]
    found = power(lambda: draw(rngs[0]), 300, DELTA, claim=claim, repetitions=40)
    alarms = sum(audit(*draw(rngs[1]), DELTA, claim=claim).epsilon > claim for _ in range(40))
    assert (found.alarms, found.repetitions) == (alarms, 40)


# --- every mechanism ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the canaries: less sharp, and quicker."""
    monkeypatch.setattr(dp_mechanisms, "CLIENTS", 4)


def response_probabilities(choice: int, choices: int, epsilon: float) -> Array:
    """The law (choices,) of a randomised response: e^ε / (e^ε + choices − 1) for the true choice.

    Source: Warner 1965; for several values Kairouz, Bonawitz & Ramage 2016, section 2.
    """
    probabilities = np.full(choices, 1.0 / (math.exp(epsilon) + choices - 1))
    probabilities[choice] = 1.0 - probabilities[choice] * (choices - 1)
    return probabilities


def response(event: ChoiceEvent, rng: np.random.Generator, entropy: Entropy, choices: int = 4) -> Game:
    """An oracle: randomised responses lose exactly their ε. A canary's coin says which of two values is the true one."""
    coins = rng.random(dp_mechanisms.CLIENTS * dp_mechanisms.EACH) < 0.5
    laws = np.cumsum([response_probabilities(value, choices, event.epsilon) for value in (0, 1)], axis=1)
    reported = (uniforms(entropy(32), len(coins))[:, None] > laws[coins.astype(int)]).sum(axis=1)
    return Game(np.select([reported == 0, reported == 1], [-1.0, 1.0], 0.0), coins)


ALL_GAMES: dict[str, Callable[..., Game]] = {**GAMES, "response": response}


@pytest.mark.parametrize(("choices", "epsilon"), [(2, 0.3), (5, 1.0), (20, 3.0)])
def test_randomised_response_is_exactly_as_private_as_it_says(choices: int, epsilon: float) -> None:
    laws = np.stack([response_probabilities(choice, choices, epsilon) for choice in range(choices)])
    assert np.allclose(laws.sum(axis=1), 1, atol=1e-15)
    ratios = np.log(laws[:, None, :] / laws[None, :, :])
    assert ratios.max() == pytest.approx(epsilon, abs=1e-12)


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


def played(name: str, event: Event, seed: int, claim: float) -> AuditResult:
    game = ALL_GAMES[name](event, np.random.default_rng(seed), public_entropy(f"{name} {seed}"))
    return audit(game.scores, game.coins, DELTA, claim=claim)


def a_third_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    for module in (mechanisms, training):
        patch.setattr(module, "normals", lambda key, count: normals(key, count) / 3)


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


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ALL_GAMES)
def test_sound_releases_raise_no_alarm_and_their_references_show_that_they_could(name: str) -> None:
    # error rate of the first line: 5 % each by the bound's own confidence if the game told all that ε allows; these draws are fixed
    for relation in RELATIONS:
        event = event_of(name, 1.0, relation)
        assert played(name, event, 1, 1.0).epsilon <= epsilon_of([event], DELTA)
        assert played(name, quiet(event), 1, 1.0).epsilon > 1.0


@pytest.mark.parametrize("name", [name for name in GAMES if name not in ("choice", "response")])
def test_a_third_of_the_noise_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a_third_of_the_noise(monkeypatch)
    claim = 1.0 if name == "training" else 2.0  # batches are drawn: a canary shows less than an accountant has to allow for
    result = played(name, event_of(name, claim, "add_remove"), 0, claim)
    assert claim < result.epsilon <= result.ceiling
    assert whole_audit_says(result, claim) == "leaks"


def whole_audit_says(result: AuditResult, claim: float) -> str:
    """The status of a bound among two others without an alarm and 60 figures of leakage, none of which is a leak."""
    made = Cell("dp_audit", "server", "dp", "run_epsilon", result.epsilon, None, None, claim, None, verdict(result, claim), p=result.p)
    others = [replace(made, status="inconclusive", p=1.0)] * 2 + [replace(made, metric="model_loss_auc", status="at_baseline", p=0.5)] * 60
    return judged_together([made, *others])[0][0].status


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", GAMES)
def test_a_reference_scores_as_a_sound_game_does(name: str) -> None:
    # each comparison rejects equal laws once in 10,000; these draws are fixed
    for relation in RELATIONS:
        event = event_of(name, 1.0, relation)
        game = GAMES[name](event, np.random.default_rng(0), public_entropy(f"reference {name}"))
        scores, coins = released(name, event, len(game.coins), np.random.default_rng(1), 1.0)
        for coin in (False, True):
            theirs, ours = game.scores[game.coins == coin], scores[coins == coin]
            if name == "choice":  # few values
                values, places = np.unique(np.concatenate([theirs, ours]), return_inverse=True)
                table = [np.bincount(half, minlength=len(values)) for half in np.split(places, [len(theirs)])]
                chance = float(stats.chi2_contingency(np.array(table)).pvalue)
            else:
                chance = float(stats.ks_2samp(theirs / game.scores.std(), ours / scores.std()).pvalue)
            assert chance > 1e-4, (name, relation, coin)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["training", "local", "choice"])
def test_the_power_is_the_same_whatever_is_wrong_with_the_audited_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    event = event_of(name, 1.0, "add_remove")

    def found() -> AuditResult:
        return audit_release(name, event, DELTA, np.random.default_rng(0), public_entropy(name))[0]

    sound = found()
    a_third_of_the_noise(monkeypatch)
    no_clip(monkeypatch)
    no_sampling(monkeypatch)
    broken = found()
    assert broken.epsilon > sound.epsilon
    assert broken.power == sound.power
    assert sound.power is not None
    assert sound.power.repetitions == 100


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("moment", 4.0),
        ("choice", 4.0),
        *(
            pytest.param(name, claim, marks=pytest.mark.slow)
            for name, claim in (("total", 4.0), ("scores", 4.0), ("local", 4.0), ("training", 1.0))
        ),
    ],
)
def test_sound_releases_are_at_baseline_where_their_audit_has_power(name: str, claim: float) -> None:
    # error rate: 5 % each if the game told all that ε allows; of 200 sound audits of each release none raised an alarm
    result, _ = audit_release(name, event_of(name, claim, "add_remove"), DELTA, np.random.default_rng(0), public_entropy(name))
    assert result.power is not None
    assert result.power.low >= ENOUGH
    assert verdict(result, claim) == "at_baseline"


def test_a_third_of_the_noise_in_training_is_never_at_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    # error rate: at a claim of 1 one audit in 100 misses it (power .99; these draws are fixed); at 4 its power is 0
    a_third_of_the_noise(monkeypatch)
    for claim, status in ((1.0, "leaks"), (4.0, "inconclusive")):
        event = event_of("training", claim, "add_remove")
        for seed in range(2):
            rng, entropy = np.random.default_rng(seed), public_entropy(f"training {seed}")
            result, _ = audit_release("training", event, DELTA, rng, entropy)
            assert result.power is not None
            assert (result.power.low >= ENOUGH) == (claim == 1.0)
            assert verdict(result, epsilon_of([event], DELTA)) == status


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["moment", "whole_moment", "total", "mean", "scores", "local", "choice", "training"])
def test_a_missing_clip_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_clip(monkeypatch)
    assert played(name, event_of(name, 1.0, "add_remove"), 0, 1.0).epsilon > 1.0


@pytest.mark.usefixtures("few")
def test_a_step_whose_noise_clients_share_is_audited_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for relation in RELATIONS:
        event = calibrated(lambda z: SampledGaussianEvent(z, 0.25, 1, 1.0, relation, shares=4), 1.0)  # noqa: B023
        assert played("training", event, 1, 1.0).epsilon <= 1.0
    event = SampledGaussianEvent(4.0, 1.0, 1, 1.0, "add_remove", shares=4)
    claim = epsilon_of([event], DELTA)
    assert played("training", event, 1, claim).epsilon <= claim
    monkeypatch.setattr(shared_noise, "gaussian_noise", lambda scale, count, entropy: gaussian_noise(scale / 3, count, entropy))
    assert played("training", event, 1, claim).epsilon > claim


@pytest.mark.usefixtures("few")
def test_batches_of_everybody_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    no_sampling(monkeypatch)
    assert played("training", event_of("training", 1.0, "add_remove"), 0, 1.0).epsilon > 1.0


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("name", "factor"), [("choice", 3.0), ("response", 2.0)])
def test_a_choice_that_is_too_sharp_is_caught(name: str, factor: float) -> None:
    # the same as a scale of the noise that is too small: the release is one of another ε than is claimed
    assert played(name, event_of(name, factor, "add_remove"), 0, 1.0).epsilon > 1.0


@pytest.mark.usefixtures("few")
def test_above_the_ceiling_nothing_is_caught_and_the_ceiling_says_so() -> None:
    game = GAMES["local"](quiet(event_of("local", 8.0, "add_remove")), np.random.default_rng(0), public_entropy("ceiling"))
    result = audit(game.scores, game.coins, DELTA, guesses=(100,))
    assert result.epsilon == pytest.approx(result.ceiling)
    assert result.ceiling < 8.0


# --- whole runs -----------------------------------------------------------------------------------------------------------------------


def scene(algorithm: str, unit: str, epsilon: float, **more: Any) -> Any:
    privacy = {"unit": unit, "epsilon": epsilon, "delta": DELTA, **({"samples": 70} if unit == "sample" else {}), **more.pop("privacy", {})}
    training = {"rounds": 2, "epochs": 2, "batch_size": 20, "lr": 0.3} | more.pop("training", {})
    data = {"clients": 20} | more.pop("data", {})
    name, _, found = algorithm.partition(", ")
    told: dict[str, dict[str, Any]] = {"pacfl": {"k": 4}, "ifca": {"k": 2}, "stocfl": {"tau": 0.5}}
    given = {"name": name, **({} if found else told.get(name, {}))}
    return config(given, more.pop("protection", {}), training=training, model={"name": "linear"}, privacy=privacy, data=data, **more)


def whole(made: Any, plays: int = 4) -> AuditResult:
    """The canaries of several plays of a run together: plays share no noise, so each canary still has the run's ε."""
    games = [play_samples(made, population_of(made), np.random.default_rng(seed)).game for seed in range(plays)]
    scores, coins = np.concatenate([game.scores for game in games]), np.concatenate([game.coins for game in games])
    return audit(scores, coins, DELTA, claim=made.privacy.epsilon)


def of_choice(scores: Any, sensitivity: float, epsilon: float, relation: Any, unit: Any, entropy: Any) -> Any:
    return Noised(int(np.argmin(scores)), ChoiceEvent(epsilon, relation, unit))


def of_moment(rows: Any, noise_multiplier: float, relation: Any, unit: Any, entropy: Any) -> Any:
    return Noised(rows.T @ rows, GaussianEvent(noise_multiplier, 1.0, relation, unit))


def of_sum(rows: Any, norm: float, noise_multiplier: float, relation: Any, unit: Any, entropy: Any) -> Any:
    return Noised(rows.sum(axis=0), GaussianEvent(noise_multiplier, norm, relation, unit))


def of_rows(rows: Any, event: Any, entropy: Any) -> Any:
    return rows


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("algorithm", "privacy", "figure", "place", "bare"),
    [
        ("pacfl", {}, "signature_epsilon", (private_signatures, "second_moment"), of_moment),
        ("pacfl, found", {}, "signature_epsilon", (private_signatures, "second_moment"), of_moment),
        ("stocfl", {}, "signature_epsilon", (private_signatures, "gaussian_sum"), of_sum),
        ("stocfl, found", {}, "signature_epsilon", (private_signatures, "gaussian_sum"), of_sum),
        ("crossfit", {}, "signature_epsilon", (private_signatures, "gaussian_sum"), of_sum),
        ("pfedlia", {"relation": "replace_one"}, "signature_epsilon", (private_signatures, "gaussian_sum"), of_sum),
        ("ifca", {}, "choice_epsilon", (evaluation, "noisy_argmin"), of_choice),
        ("pacfl", {"unit": "client", "samples": 0, "local": ["gram"]}, "signature_epsilon", (remote_client, "local_rows"), of_rows),
    ],
)
def test_a_release_that_a_run_makes_without_noise_is_caught(
    algorithm: str, privacy: Any, figure: str, place: tuple[object, str], bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the mechanism is as it was; what is broken is the code of runs that should call it
    made = scene(algorithm, "sample", 2.0, training={"rounds": 25 if algorithm == "pfedlia" else 2}, privacy=privacy)
    name, event = releases(made, population_of(made))[figure]
    claim = epsilon_of([event], DELTA)
    assert played(name, event, 0, claim).epsilon <= claim
    monkeypatch.setattr(place[0], place[1], bare)
    assert played(name, event, 0, claim).epsilon > claim


@pytest.mark.slow
def test_canaries_of_a_whole_run_pay_what_the_ledger_says() -> None:
    made = scene("fedavg", "sample", 1.0)
    result = play_samples(made, population_of(made), np.random.default_rng(0))
    assert 0.98 < result.epsilon <= 1.0
    assert result.rounds == 2
    assert audit(result.game.scores, result.game.coins, DELTA, claim=1.0).epsilon < 1.0


@pytest.mark.parametrize(
    "bug", [a_third_of_the_noise, pytest.param(no_clip, marks=pytest.mark.slow), pytest.param(no_sampling, marks=pytest.mark.slow)]
)
def test_a_bug_in_training_shows_in_a_whole_run(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    # the noise is drawn anew each time: of 12 plays of each bug, bounds of four together lay 3.7 to 8 deviations above the claim (a miss in
    # 10 000, were they normal); those of one, 1.4 to 5 deviations, missed it now and then
    bug(monkeypatch)
    found = whole(scene("fedavg", "sample", 0.8))
    assert found.epsilon > 0.8
    assert whole_audit_says(found, 0.8) == "leaks"


def moved_by_coins(scores: Array, coins: Array) -> float:
    """How far scores lie on the side of their coins."""
    return float(np.mean(np.where(coins, 1, -1) * scores))


@pytest.mark.parametrize("bug", [None, a_third_of_the_noise])
def test_the_reference_of_a_whole_run_has_the_noise_that_is_claimed(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2,560 canaries give a variance to 3 % (a standard deviation), and 100 repetitions to .3 %
    if bug is not None:
        bug(monkeypatch)
    made = scene("fedavg", "sample", 1.0, training={"rounds": 1})
    played, calm, _ = play(made, population_of(made), np.random.default_rng(0))
    assert played.trials is not None
    seen = played.game.scores - np.where(played.game.coins, 1, -1) * moved_by_coins(played.game.scores, played.game.coins)
    claimed = played.trials.noise.var() + played.trials.signal.var()
    assert seen.var() / claimed == pytest.approx(1.0 if bug is None else 1 / 9, rel=0.15)
    # and it is no clearer than what the rerun without noise shows
    moved = [
        np.mean(np.where(coins, 1, -1) * scores)
        for scores, coins in ((calm.scores, calm.coins), (played.trials.signal, played.trials.coins))
    ]
    assert moved[0] == pytest.approx(moved[1], rel=0.1)
    half = replace(calm, scores=calm.scores / 2)
    assert np.allclose(played.trials.held_against(half).signal, played.trials.signal / 2, rtol=0.1, atol=1e-9)
    thrice = replace(calm, scores=calm.scores * 3)
    held = played.trials.held_against(thrice)
    assert held.signal == pytest.approx(played.trials.signal)
    assert (held.beyond >= played.trials.beyond).all()


@pytest.mark.parametrize("protection", [{}, {"sum": "secagg"}])
@pytest.mark.parametrize("relation", RELATIONS)
def test_the_reference_of_means_has_the_noise_that_is_claimed(relation: str, protection: Any) -> None:
    made = scene("fedavg", "client", 2.0, privacy={"relation": relation}, protection=protection, data={"clients": 12})
    played, calm, _ = play(made, population_of(made), np.random.default_rng(0), reruns=6)
    assert played.trials is not None
    noise = (played.game.scores - calm.scores) / made.privacy.clip_norm
    # 72 values: their variance is right to 17 % (a standard deviation); these draws are not fixed, and miss this once in 100,000
    assert 0.4 < noise.var() / played.trials.noise.var() < 2.0
    assert played.trials.signal.std() == pytest.approx((calm.scores / made.privacy.clip_norm).std(), rel=0.1)


def test_training_whose_noise_is_not_linear_has_no_known_power() -> None:
    made = scene("fedavg", "sample", 1.0, training={"rounds": 1, "optimizer": "adam", "lr": 0.01})
    (cell,) = [one for one in ATTACKS["dp_audit"].cells(case(made))[0] if one.metric == "run_epsilon"]
    assert (cell.status, cell.power) == ("inconclusive", None), cell.line()
    assert "power unknown where clients train with Adam" in cell.note


def test_an_update_with_momentum_is_read_with_the_weights_of_its_steps() -> None:
    # by the rate alone canaries would be expected to move it by a third of what they do, and the reference would not fit
    made = scene("fedavg", "sample", 1.0, training={"rounds": 1, "momentum": 0.8, "lr": 0.05})
    played, calm, _ = play(made, population_of(made), np.random.default_rng(0))
    assert played.trials is not None
    moved = [moved_by_coins(calm.scores, calm.coins), moved_by_coins(played.trials.signal, played.trials.coins)]
    assert moved[0] == pytest.approx(moved[1], rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("claim", "rounds", "reruns"), [(4.0, 5, 5), (1.0, 2, 3)])
def test_ten_audits_of_runs_with_a_third_of_the_noise(claim: float, rounds: int, reruns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # error rate: where the conservative power is .9, fewer than eight of ten leaks come in 7 % of repetitions; at the .99 measured, in 1e-5
    a_third_of_the_noise(monkeypatch)
    found = []
    for seed in range(10):
        made = scene("fedavg", "sample", claim, training={"rounds": rounds}).with_("run", seed=seed * 1000)
        whole_run = audit_whole(made, population_of(made), np.random.default_rng(seed), reruns=reruns)
        assert whole_run.result.power is not None
        found.append((verdict(whole_run.result, whole_run.claim), whole_run.result.power.low))
        print(f"claim {claim:g}: {whole_run.result.epsilon:.2f}, power {whole_run.result.power}, {found[-1][0]}")
    assert "at_baseline" not in {status for status, _ in found}
    powerful = [status for status, low in found if low >= ENOUGH]
    assert sum(status == "leaks" for status in powerful) >= 0.8 * len(powerful)


@pytest.mark.slow
def test_noise_that_clients_share_shows_in_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # alone, each update is as noisy as it should be; one less the others is not
    made = scene("fedavg", "sample", 1.0, training={"rounds": 3})
    for shared in (False, True):
        if shared:
            monkeypatch.setattr(training, "secret_key", lambda given: bytes(32))
        result = play_samples(made, population_of(made), np.random.default_rng(0))
        assert result.apart is not None
        alone, apart = (audit(game.scores, game.coins, DELTA, claim=1.0, confidence=0.975) for game in (result.game, result.apart))
        assert alone.epsilon < 1.0
        assert (apart.epsilon > 2.0) if shared else (apart.epsilon < 1.0)
    (whole_run,) = [one for one in ATTACKS["dp_audit"].cells(case(made))[0] if one.metric == "run_epsilon"]
    assert whole_run.status == "leaks"


@pytest.mark.parametrize("relation", RELATIONS)
def test_clients_as_canaries_are_distinguished_without_noise_only(relation: str) -> None:
    made = scene("fedavg", "client", 1.0, privacy={"relation": relation})
    result, calm = play_clients(made, population_of(made), np.random.default_rng(0))
    assert audit(result.game.scores, result.game.coins, DELTA, claim=1.0).epsilon <= result.epsilon <= 1.0
    assert audit(calm.scores, calm.coins, DELTA, claim=1.0).epsilon > 1.0


def test_an_audit_states_a_bound_for_every_release_and_the_whole_run() -> None:
    cells, _ = ATTACKS["dp_audit"].cells(case(scene("pacfl", "sample", 2.0)))
    assert [one.metric for one in cells] == ["signature_epsilon", "training_epsilon", "run_epsilon"]
    assert cells[0].status == "at_baseline", "10 000 canaries in a noisy moment have power"
    for one in cells:
        assert one.power_low is not None
        assert one.status == ("at_baseline" if one.power_low >= ENOUGH else "inconclusive"), one.line()
        assert one.value is not None
        assert one.baseline is not None
        assert one.value < one.baseline
        assert "ceiling" in one.note
        assert f"with noise {FACTOR:g} times too small" in one.note
        assert f"{one.status}, power {one.power:.2f} (at least {one.power_low:.2f})" in one.line()
        assert one.as_json()["power"] == one.power
    assert "scored are clients' updates; charged but not validated by it: what has signature_epsilon:" in cells[-1].note
    mean, other = ATTACKS["dp_audit"].cells(case(scene("fedavg", "client", 1.0, protection={"sum": "secagg", "min_cohort": 16})))[0]
    assert [mean.metric, other.metric] == ["mean_epsilon", "run_epsilon"]
    assert mean.value is not None
    assert mean.baseline is not None
    assert mean.value <= mean.baseline < 1.0, "one mean of two"
    assert other.status == "inconclusive", "20 canaries have no power"
    assert other.power == 0.0
    assert "scored are the means over clients:" in other.note, "and nothing else was released"
    assert other.towards == "", "clients add the noise: it is towards the server, too"


def test_a_guarantee_that_is_not_towards_the_server_says_so() -> None:
    """The server adds the noise, and reads every client's own contribution: other attacks on the same view leak."""
    seen = case(scene("fedavg", "client", 1.0))
    (one,) = ATTACKS["dp_audit"].cells(seen)[0]
    assert one.towards.startswith("who sees the means, not single updates")
    assert f"a guarantee towards {one.towards}" in one.line()


@pytest.mark.parametrize(
    ("algorithm", "unit", "more", "unscored"),
    [
        ("fedavg", "sample", {}, ()),
        ("ifca", "sample", {}, ("choice_epsilon",)),
        ("ifca, k found", "sample", {}, ("choice_epsilon", "signature_epsilon")),
        ("pacfl", "client", {"local": ["gram"]}, ("signature_epsilon",)),
    ],
)
def test_a_whole_run_says_what_of_its_claim_it_does_not_score(algorithm: str, unit: str, more: Any, unscored: tuple[str, ...]) -> None:
    made = scene(algorithm, unit, 2.0, training={"rounds": 1}, privacy=more)
    assert play(made, population_of(made), np.random.default_rng(0))[0].unscored == unscored
    assert set(unscored) <= set(releases(made, population_of(made))), "each has a figure of its own"


def share_of_coins(algorithm: dict[str, Any], relation: Relation = "add_remove", **training: Any) -> float:
    """How many coins of a run with next to no noise its updates tell."""
    settings = {"rounds": 3, "epochs": 2, "batch_size": 20, "lr": 0.2} | training
    privacy = {"unit": "sample", "epsilon": 20.0, "delta": 1e-4, "samples": 40, "relation": relation}
    data = {"samples_per_client": 40, "clients": 10, "groups": [list(range(10))]}
    made = config(algorithm, training=settings, model={"name": "linear"}, privacy=privacy, data=data)
    game = play_samples(made, population_of(made), np.random.default_rng(0), noise=dp_run.NO_NOISE).game
    return float(((game.scores > 0) == game.coins).mean())


def test_an_update_is_read_with_the_rate_of_its_round() -> None:
    # a client that sits out rounds trains at the rate of the round it is in, not of its first, second, third turn (.64 of coins then)
    assert share_of_coins({"name": "fedavg"}, rounds=12, participation=0.3, lr_decay=0.7) > 0.9


@pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
@pytest.mark.parametrize(
    ("algorithm", "relation"),
    [({"name": "per_fedavg", "alpha": 0.01, "beta": 0.02}, "add_remove"), ({"name": "pfedlia", "warm_up": 5}, "replace_one")],
)
def test_an_update_is_read_by_the_steps_that_clients_take(algorithm: dict[str, Any], relation: Relation) -> None:
    # by the rate of [training] Per-FedAvg's coins are a toss (.48); of spikes that pFedLIA's clients hold back nothing can be told (.86)
    assert share_of_coins(algorithm, relation) > 0.9


def test_reruns_pool_their_canaries() -> None:
    made = scene("fedavg", "client", 1.0, training={"rounds": 1}, data={"clients": 4})
    (one, calm, once), (several, several_calm, times) = (
        play(made, population_of(made), np.random.default_rng(0), reruns=3, seconds=seconds) for seconds in (0.0, np.inf)
    )
    assert (once, times) == (1, 3), "no time, one play"
    assert len(one.game.coins) == len(calm.coins) == 4
    assert len(several.game.coins) == len(several_calm.coins) == 12
    assert several.epsilon == one.epsilon
    few, many = (audit(game.scores, game.coins, DELTA, claim=1.0) for game in (calm, several_calm))
    assert many.ceiling > few.ceiling


@pytest.mark.parametrize("unit", ["client", "sample"])
def test_every_rerun_has_a_seed_of_its_own_and_its_share_of_the_time(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # test entropy is drawn from the seed, so plays of one seed would share their noise
    seeds: list[int] = []
    times: list[float] = []

    def made_up(config: Any, population: Any, rng: np.random.Generator, *, noise: float = 1.0, seconds: float = np.inf) -> Any:
        seeds.append(config.run.seed)
        times.append(seconds)
        if config.run.seed == made.run.seed + 1:
            raise ValueError("no mean was released")
        game = Game(rng.normal(size=10), rng.random(10) < 0.5)
        played = Played(game, 1.0 + config.run.seed, 2)
        return (played, game) if unit == "client" else played

    monkeypatch.setattr(dp_run, "play_clients", made_up)
    monkeypatch.setattr(dp_run, "play_samples", made_up)
    made = scene("fedavg", unit, 1.0)
    played, calm, plays = play(made, population_of(made), np.random.default_rng(0), reruns=4, seconds=1000.0)
    assert sorted(set(seeds)) == [made.run.seed + number for number in range(4)]
    assert plays == 3, "reruns that failed are left out"
    assert len(played.game.coins) == len(calm.coins) == 30
    assert played.epsilon == 4.0 + made.run.seed, "the claim is the largest that was spent"
    assert max(times) <= (1000.0 if unit == "client" else 500.0)
    with pytest.raises(ValueError, match="no mean was released"):
        play(made.with_("run", seed=made.run.seed + 1), population_of(made), np.random.default_rng(0), reruns=4)
    with pytest.raises(ValueError, match="0 reruns"):
        play(made, population_of(made), np.random.default_rng(0), reruns=0)


def test_a_run_that_claims_nothing_has_nothing_to_see() -> None:
    made = config({"name": "fedavg"}, training={"rounds": 1})
    (cell,) = ATTACKS["dp_audit"].cells(case(made))[0]
    assert cell.status == "nothing_to_see"
    (other,) = ATTACKS["dp_audit"].cells(replace(case(scene("fedavg", "sample", 2.0), "outsider"), budget=QUICK))[0]
    assert other.status == "not_attempted"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("name", [name for name in GAMES if name != "choice"])
def test_the_power_is_how_often_a_third_of_the_noise_is_caught(name: str, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # error rate: 1 in 1,000 for each of the cells, by Fisher's exact test of ten audits beside 100 repetitions on the reference
    a_third_of_the_noise(monkeypatch)
    event = event_of(name, epsilon, "add_remove")
    claim = epsilon_of([event], DELTA)
    rngs = [np.random.default_rng(seed) for seed in range(10)]
    found, _ = audit_release(name, event, DELTA, rngs[0], public_entropy(f"{name} 0"))
    assert found.power is not None
    games = [GAMES[name](event, rng, public_entropy(f"{name} {seed}")) for seed, rng in enumerate(rngs[1:], 1)]
    bounds = [found.epsilon, *(audit(game.scores, game.coins, DELTA, claim=claim).epsilon for game in games)]
    caught = sum(bound > claim for bound in bounds)
    print(f"{name}, claim {claim:.2f}: {caught} of 10, power {found.power.share:.2f} (at least {found.power.low:.2f})")
    table = np.array([[caught, 10 - caught], [found.power.alarms, found.power.repetitions - found.power.alarms]])
    assert stats.fisher_exact(table).pvalue > 1e-3
    if found.power.low >= ENOUGH:
        assert caught >= 8
    else:
        assert "at_baseline" not in {verdict(replace(found, epsilon=bound), claim) for bound in bounds}


# --- shares, at length ----------------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("chance", "low", "high"), [(ALLOWED, 0.0, FALSE), (TOO_MANY, 1 - MISSED, 1.0)])
def test_a_sequence_of_alarms_is_judged_at_the_rates_stated(chance: float, low: float, high: float) -> None:
    # exact: the chance of every count of alarms so far, as long as neither bound is reached; what is left after 2,000 audits is < 1e-9
    going, rejected = {0: 1.0}, 0.0
    for audits in range(1, 2000):
        came = dict[int, float]()
        for count, share in going.items():
            for more, part in ((0, 1 - chance), (1, chance)):
                came[count + more] = came.get(count + more, 0.0) + share * part
        ratios = {
            count: count * math.log(TOO_MANY / ALLOWED) + (audits - count) * math.log((1 - TOO_MANY) / (1 - ALLOWED)) for count in came
        }
        rejected += sum(share for count, share in came.items() if ratios[count] >= -math.log(FALSE))
        going = {count: share for count, share in came.items() if math.log(MISSED) < ratios[count] < -math.log(FALSE)}
    assert sum(going.values()) < 1e-9
    assert low <= rejected <= high
    assert alarms_are_too_many([True] * 6)
    assert not alarms_are_too_many([False] * 33)
    with pytest.raises(ValueError, match="ended"):
        alarms_are_too_many([False] * 32)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("name", ALL_GAMES)
def test_shares_of_alarms_over_many_audits(name: str, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # error rate: 1 in 1,000 for each of the cells if every alarm came with its full 5 %
    event = event_of(name, epsilon, "add_remove")
    claim = epsilon_of([event], DELTA)

    def alarm(seed: int) -> bool:
        # one of eleven audits has five times as many canaries: what is proved of alarms holds for any number of them
        monkeypatch.setattr(dp_mechanisms, "CLIENTS", 4 if seed % 11 else 20)
        return played(name, event, seed, epsilon).epsilon > claim

    assert not alarms_are_too_many(map(alarm, itertools.count(1)))
