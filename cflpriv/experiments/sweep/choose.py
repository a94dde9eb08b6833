"""`[sweep] choose`: a private choice among the runs of a grid, as configured and as recorded in the sweep's folder.

    choose = { by = "accuracy_mean", runs = 10, distribution = "geometric" }

    by            the score, a figure of summary.json (`SCORES`)
    runs          the expected number of runs
    distribution  of the number of runs: "geometric", "logarithmic" or "poisson"

`private_choice` makes the choice, `protocols.private_choice` has its price.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from ...errors import InputError, near
from ...files import write_atomically
from ...keys import Key, check_ranges
from ...protocols.bounded_files import read_json
from ...protocols.private_choice import Distribution, Runs, runs_of
from ..config.config import Config

__all__ = ["FILE", "SCORES", "Choose", "Chosen", "check_choose", "parse_choose", "read_chosen", "write_chosen"]

FILE = "choice.json"
SCORES: dict[str, float] = {"accuracy_mean": 1.0, "accuracy_worst": 1.0, "perplexity_mean": -1.0, "r2": 1.0, "error_mean": -1.0}
"""What may be chosen by, and whether more (1) or less (−1) of it is better. All are measured on test data with the models in use."""


@dataclass(frozen=True)
class Choose:
    """A private choice as it was asked for."""

    by: str
    runs: Annotated[float, Key("Expected number of runs.", "(1, inf)", "runs")]
    distribution: Distribution

    @property
    def law(self) -> Runs:
        """How the number of runs is distributed."""
        return runs_of(self.distribution, self.runs)


@dataclass(frozen=True)
class Chosen:
    """A choice that was made. `run`, `setting`, `score` and `epsilon_of_run` are None where no run was chosen.

    `epsilon` is the price of the choice, at `delta` and for one `unit` under `relation`; `settings` the size of the grid.
    """

    run: str | None
    setting: str | None
    by: str
    score: float | None
    epsilon_of_run: float | None
    epsilon: float
    delta: float
    unit: str
    relation: str
    distribution: str
    runs: float
    settings: int

    @property
    def price(self) -> str:
        """The price of the choice in words."""
        change = "more or less" if self.relation == "add_remove" else "exchanged"
        law = f"{self.distribution} number of runs, {self.runs:g} expected, {self.settings} settings"
        return f"epsilon {self.epsilon:.3g} (delta {self.delta:g}, one {self.unit} {change}; {law})"

    @property
    def line(self) -> str:
        """For the console."""
        if self.run is None:
            return f"no run was chosen: none was drawn, or all that were failed; the choice costs {self.price} all the same"
        return (
            f"chosen: {self.setting}, {self.by} {self.score:.4g}; this run alone costs epsilon {self.epsilon_of_run:.3g}, "
            f"the choice {self.price}"
        )


def parse_choose(table: Mapping[str, Any]) -> Choose:
    """A `Choose` from the table in a file. Raises `InputError` naming key and value."""
    known = ["by", "runs", "distribution"]
    for key, value in table.items():
        if key not in known:
            raise InputError(f"choose.{key} = {value!r}: is not a key here{near(key, known)}")
    by, distribution = table.get("by"), table.get("distribution", "geometric")
    runs: Any = table.get("runs")
    if by not in SCORES:
        raise InputError(f"choose.by = {by!r}: is no score to choose by{near(str(by), list(SCORES))}")
    check_ranges(Choose, {"runs": runs}, "choose")
    if distribution not in get_args(Distribution):
        raise InputError(f"choose.distribution = {distribution!r}: is not known{near(str(distribution), list(get_args(Distribution)))}")
    choose = Choose(str(by), float(runs), distribution)
    try:
        _ = choose.law
    except ValueError as error:
        raise InputError(f"choose.runs = {runs!r}: not with distribution = {distribution!r} ({error})") from None
    return choose


def check_choose(choose: Choose, sweep: Mapping[str, Any], configs: Mapping[str, Config]) -> None:
    """Refuse grids among which no private choice is made. `sweep` is the section [sweep], `configs` are its cells by name.

    Raises `InputError` naming the key, the value and the cell.
    """
    if len(seeds := sweep.get("seeds", [0])) != 1:
        raise InputError(f"seeds = {seeds!r} with choose: give one; all runs of a choice have the same data and first model")
    for key in ("audit", "attacks", "budget"):
        if sweep.get(key):
            raise InputError(f"{key} = {sweep[key]!r} with choose: what an audit shows is not private; audit the chosen run by itself")
    for name, config in configs.items():
        if problem := _refused(choose, config):
            raise InputError(f"choose: {name}: {problem}")
    first_name, first = next(iter(configs.items()))
    for name, config in configs.items():
        for key in ("unit", "relation", "delta"):
            was, now = getattr(first.privacy, key), getattr(config.privacy, key)
            if was != now:
                raise InputError(f"choose: {name}: privacy.{key} = {now!r}, but {was!r} in {first_name}; one price needs one {key}")
        for key in vars(first.data):
            was, now = getattr(first.data, key), getattr(config.data, key)
            if was != now:
                raise InputError(f"choose: {name}: data.{key} = {now!r}, but {was!r} in {first_name}; all runs need the same data")


def _refused(choose: Choose, config: Config) -> str:
    """Why a setting can be no part of a private choice; empty if it can."""
    if config.privacy.unit == "none":
        return "privacy.unit = 'none': without a guarantee of each run there is none of the choice"
    if config.run.insecure_test_entropy:
        return "run.insecure_test_entropy = true: the noise is public, and the same in every run"
    if not config.spec.serves_released:
        return (
            f"algorithm {config.spec.name!r}: what its clients use does not follow from what they release alone (AlgorithmSpec."
            "serves_released), so a score would tell more than the run's epsilon counts"
        )
    if config.protection.small_clusters == "local":
        return "protection.small_clusters = 'local': clients that train alone would be scored, which the run's epsilon does not count"
    if config.run.callbacks:
        return f"run.callbacks = {list(config.run.callbacks)}: would show runs that a private choice keeps secret"
    if choose.by.startswith("perplexity") and config.model.name != "lstm":
        return f"choose.by = {choose.by!r}: there is none for model.name = {config.model.name!r}"
    return ""


def write_chosen(path: Path, chosen: Chosen, **more: Any) -> None:
    """Write a choice down in a file, with `more` beside it."""
    write_atomically(path, json.dumps({**asdict(chosen), **more}, indent=1) + "\n")


def read_chosen(path: Path, more: Sequence[str] = ()) -> tuple[Chosen, dict[str, Any]] | None:
    """What `write_chosen` wrote, and the fields `more`; None where there is no file. Raises `InputError` for a damaged one."""
    if not path.is_file():
        return None
    try:
        tree = read_json(path)
        beside = {key: tree.pop(key) for key in more}
        return Chosen(**tree), beside
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None
