"""The advice in sentences, from what summary.json has of it."""

from collections.abc import Mapping
from typing import Any

from .verdict import CLUSTERS, CLUSTERS_MIXTURE, LOCAL, ONE, ONE_MIXTURE, RANDOM, RANDOM_MIXTURE

__all__ = ["advice_lines", "mixture_line", "option_words", "without_advice"]

WORDS = {
    LOCAL: "each client's own model, trained alone",
    ONE: "one model for all",
    ONE_MIXTURE: "one model for all, mixed with each client's own",
    CLUSTERS: "cluster models",
    CLUSTERS_MIXTURE: "cluster models, mixed with each client's own",
    RANDOM: "random clusters",
    RANDOM_MIXTURE: "random clusters, mixed with each client's own",
    "models of the run": "models of the run",
    "own mixture": "these models, mixed with each client's own",
}
"""The options for people. A run's "local models" are others: the clients' after the training of a round."""

LIMITS = (
    "intervals hold at 95 % over clients, for the models of this one training: between options all together, against random clusters one "
    "by one, with the spread between deals"
)


def option_words(option: str) -> str:
    """An option of an advice for people."""
    return WORDS.get(option, option)


def without_advice(summary: Mapping[str, Any], command: str) -> str:
    """One line for a run that found clusters and was not advised; "" for others. `command` is what has it advised."""
    if summary.get("advice") is not None or (summary.get("clusters") or 1) < 2:
        return ""
    return f"nothing shows yet that clusters help these clients: {command}"


def advice_lines(advice: Mapping[str, Any]) -> list[str]:
    """What to deploy, and why: a line each for the advice, the means, the close options, the control, the mixture and the limits."""
    if not advice["decided"]:
        simplest = "" if advice["held_out_accuracy"] else f"; the simplest choice: {option_words(advice['advice'])}"
        return [f"what to deploy: cannot tell ({'; '.join(advice['reasons'])}){simplest}"]
    close = advice["cannot_be_told_apart"]
    standing = "clearly better than every simpler option" if advice["clear"] else "by its mean; simpler options cannot be told apart"
    if advice["clear"] and advice["allowed"] and advice["advice"] == advice["allowed"][0]:
        standing = "the simplest option is within a point of the best"
    lines = [f"what to deploy: {option_words(advice['advice'])} ({standing})"]
    means = "; ".join(f"{option_words(option)} {_percent(mean)}" for option, mean in advice["held_out_accuracy"].items())
    lines.append(f"{advice.get('score', 'accuracy')} on held-out samples of {advice['clients']} clients: {means}")
    if close:
        lines.append(f"cannot be told apart from it: {'; '.join(map(option_words, close))}")
    lines += advice["reasons"]
    for pair in advice["differences"]:
        if pair["better"] in (CLUSTERS, CLUSTERS_MIXTURE) and pair["other"].startswith("random"):
            lines.append(f"{option_words(pair['better'])}, minus {option_words(pair['other'])}: {_interval(pair)}")
    lines += _against_single(advice)
    if advice.get("stability") is not None:
        lines.append(f"three searches for groups agree by a mean ARI of {advice['stability']:.2f}")
    return [*lines, LIMITS]


def _against_single(advice: Mapping[str, Any]) -> list[str]:
    """Whether the advised mixture is better than the best option without one."""
    means, allowed = advice["held_out_accuracy"], advice["allowed"]
    if advice["advice"] not in (ONE_MIXTURE, CLUSTERS_MIXTURE):
        return []
    single = max((option for option in allowed if option not in (ONE_MIXTURE, CLUSTERS_MIXTURE)), key=lambda option: float(means[option]))
    for pair in advice["differences"]:
        if {pair["better"], pair["other"]} == {advice["advice"], single}:
            sign = 1 if pair["better"] == advice["advice"] else -1
            low = pair["low"] if sign == 1 else -pair["high"]
            words = "is better than" if low > 0 else "is not shown to be better than"
            return [f"the mixture {words} the best option without one, {option_words(single)}: {_interval(pair, sign)}"]
    return []


def mixture_line(mixture: Mapping[str, Any]) -> str:
    """What clients' own mixtures gain over the models of the run."""
    if not mixture["held_out_accuracy"]:
        return f"mixtures with each client's own model: none ({mixture['reason']})"
    test = "; ".join(f"{option_words(name)} {_percent(mean)}" for name, mean in mixture["test_accuracy"].items())
    gains = [pair for pair in mixture["differences"] if (pair["better"], pair["other"]) == ("own mixture", "models of the run")]
    score = mixture.get("score", "accuracy")
    gained = f"on held-out samples {_interval(gains[0])} over the models of the run"
    return f"mixtures with each client's own model: {score} of {test}, on test data; {gained}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(pair: Mapping[str, Any], sign: int = 1) -> str:
    low, high = (pair["low"], pair["high"]) if sign == 1 else (-pair["high"], -pair["low"])
    return f"{100 * sign * pair['mean']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
