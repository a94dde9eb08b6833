"""The outcome of an active attack: refused, accepted without gain, or a figure beside the best guess without the deviation."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ...contract.protection import Protection
from ...experiments.config.config import Config
from ...experiments.report.audit_words import ACTIVE_STATUS
from ...types import Array
from .liar import Refusal
from .scene import AttackRun, Scene, VictimValue

__all__ = ["ActiveAttack", "ActiveFigure", "ActiveGuess", "ActiveResult", "judged", "lies_claimed", "pairwise_sums", "same", "secure_sums"]

ActiveStatus = Literal["learned", "no_gain", "refused", "not_applicable", "failed"]
RIGHT = 1e-2
"""A coordinate is right to this share of the largest."""
MARGIN = 0.1
"""A guess is a gain if its relative error is below that of the best guess without the deviation by more than this."""


@dataclass(frozen=True, eq=False)
class ActiveGuess:
    """The server's guess of a value of the victim; None if the server learned nothing.

    The best guess without the deviation is the mean of the values of the clients `beside` (the victim and other honest clients), or zero if
    the protocol shows no sum. With `at`, the guess is of these coordinates only, and the figure is the number of right coordinates.
    """

    value: Array | None
    of: VictimValue
    beside: Sequence[int] = ()
    note: str = ""
    at: Sequence[int] = ()


@dataclass(frozen=True)
class ActiveFigure:
    """A figure of another kind, and its baseline without the deviation; `value` is None if the server learned nothing."""

    metric: str
    value: float | None
    baseline: float
    lower_is_better: bool = True
    margin: float = MARGIN
    note: str = ""


@dataclass(frozen=True)
class ActiveResult:
    """One attack's line of the result.

    `code` and `stage` are of the first refusal. `refusals` counts the honest parties that refused, by error code and stage. `claimed`:
    whether the guarantee of this protection covers an active server at all.
    """

    attack: str
    protection: str
    status: ActiveStatus
    guarantee: str
    claimed: bool
    code: str = ""
    stage: str = ""
    refusals: str = ""
    metric: str = ""
    value: float | None = None
    baseline: float | None = None
    lower_is_better: bool = True
    accomplices: int = 0
    clients: int = 0
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def result(self) -> str:
        """The outcome, for people."""
        words = ACTIVE_STATUS[self.status]
        if self.status == "refused":
            words += f": {self.code} ({self.stage})"
        if self.value is not None and self.baseline is not None:
            words += f": {self.metric} {self.value:.3g}, without the deviation {self.baseline:.3g}"
        if self.status == "learned" and not self.claimed:
            words += "; outside the guarantee"
        return words


def same(protection: Protection) -> Protection:
    """The server goes by clients' own protection."""
    return protection


def lies_claimed(config: Config) -> bool:
    """Whether the sums' guarantee covers an active server."""
    sums = config.protection.sums
    return (sums.helped or config.protection.sum == "secagg") and config.protection.secagg_mode == "active"


def secure_sums(config: Config) -> str:
    """Why an attack on secure sums does not apply, empty if it does."""
    if not config.protection.secure:
        return f"there are no secure sums under sum = {config.protection.sum!r}"
    return ""


def pairwise_sums(config: Config) -> str:
    """Why an attack on later messages of secure sums does not apply, empty if it does."""
    helped = "clients send one message, and helpers the rest" if config.protection.sums.helped else ""
    return secure_sums(config) or helped


@dataclass(frozen=True)
class ActiveAttack:
    """A deviation of the server's.

    summary: a line for `cflpriv list`. guarantee: the sentence that the attack checks, and where the sentence stands. deviate: the attack.
    applies: why the attack does not apply under a configuration, empty if it applies. claimed: whether the guarantee covers an active
    server under a configuration. server: the server's protection, made from the clients' own. accomplices: whether the server has
    accomplices. sybils: whether all clients but the victim are inventions of the server.
    """

    summary: str
    guarantee: str
    deviate: Callable[[AttackRun], ActiveGuess | ActiveFigure]
    applies: Callable[[Config], str] = secure_sums
    claimed: Callable[[Config], bool] = lies_claimed
    server: Callable[[Protection], Protection] = same
    accomplices: bool = True
    sybils: bool = False


def judged(
    name: str, attack: ActiveAttack, scene: Scene, reading: ActiveGuess | ActiveFigure, run: AttackRun, refused: Sequence[Refusal]
) -> ActiveResult:  # fmt: skip
    """The result of an attack that ran."""
    figure = relative_error(scene, reading, run.victim) if isinstance(reading, ActiveGuess) else reading
    gained = False
    if figure.value is not None:
        gain = figure.baseline - figure.value if figure.lower_is_better else figure.value - figure.baseline
        gained = gain > figure.margin
    status: ActiveStatus = "learned" if gained else "refused" if refused else "failed" if figure.value is None else "no_gain"
    first = refused[0] if refused else None
    counts = Counter((refusal.code, refusal.stage) for refusal in dict.fromkeys(refused))
    words = "; ".join(f"{code} at {stage} ({count} of {len(run.honest)})" for (code, stage), count in counts.items())
    shown, note = figure.value is not None, figure.note
    if status == "failed":
        note = "; ".join([*([note] if note else []), "no result, and no refusal"])
    return ActiveResult(
        name, scene.config.protection.name, status, attack.guarantee, attack.claimed(scene.config),
        code=first.code if first else "", stage=first.stage if first else "", refusals=words, metric=figure.metric if shown else "",
        value=figure.value, baseline=figure.baseline if shown else None, lower_is_better=figure.lower_is_better,
        accomplices=0 if attack.sybils else len(run.accomplices), clients=len(scene.clients), note=note,
    )  # fmt: skip


def relative_error(scene: Scene, guess: ActiveGuess, victim: int) -> ActiveFigure:
    """The relative error ‖û − u‖ / ‖u‖ of a guess, and of the best one without the deviation."""
    truth = scene.truth(guess.of, victim)
    if guess.at and guess.value is not None:
        exact = RIGHT * float(np.abs(truth).max())
        right = int((np.abs(guess.value - truth)[list(guess.at)] <= exact).sum())
        return ActiveFigure(f"{guess.of}_coordinates_read", float(right), 0.0, lower_is_better=False, margin=0.5, note=guess.note)
    blank = np.mean([scene.truth(guess.of, client) for client in guess.beside], axis=0) if guess.beside else np.zeros_like(truth)
    value, note = None, guess.note
    if guess.value is not None and guess.value.shape == truth.shape:
        value = _error(guess.value, truth)
        cosine = float(guess.value @ truth) / max(float(np.linalg.norm(guess.value) * np.linalg.norm(truth)), 1e-300)
        note = "; ".join([*([note] if note else []), f"cosine {cosine:.4f}"])
    return ActiveFigure(f"{guess.of}_relative_error", value, _error(blank, truth), note=note)


def _error(guess: Array, truth: Array) -> float:
    return float(np.linalg.norm(guess - truth)) / max(float(np.linalg.norm(truth)), 1e-300)
