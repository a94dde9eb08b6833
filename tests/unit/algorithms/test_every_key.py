"""Each key of each algorithm at another value than its own, under each protection: a run ends, or is refused in one line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from cflpriv.algorithms.interface import ALGORITHMS
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.config.config_reference import Entry, entries

PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "haar": {"gram": ["haar"], "sum": "secagg", "min_cohort": 2},
    "one_message": {"gram": ["haar"], "sum": "one_message", "min_cohort": 2},
}
NUMBERS = {"k": 2, "rounds": 3, "recheck_every": 1, "landmarks": 6, "draws": 200}
"""Values of keys for which the rule below gives one that takes long or means little."""


def choices(hint: Any) -> Iterator[Any]:
    """The types and literal values of a type."""
    origin = get_origin(hint)
    if origin is Annotated:
        yield from choices(get_args(hint)[0])
    elif origin is Literal or not get_args(hint):
        yield from get_args(hint) or (hint,)
    elif origin is not tuple:
        for part in get_args(hint):
            yield from choices(part)


def others(entry: Entry) -> list[Any]:
    """Other values: each name, the opposite, or a number a little above the least."""
    if entry.name in NUMBERS:
        return [NUMBERS[entry.name]]
    names = list(entry.key.known()) if entry.key.known else []
    made: list[Any] = []
    for choice in [*names, *choices(entry.hint)]:
        low, high = (entry.key.bounds[end] for end in (0, 2))
        low = low if low > -1e6 else 0.0
        if isinstance(choice, str | bool):
            made.append(choice)
        elif choice is bool:
            made += [True, False]
        elif choice is int:
            made.append(int(low) + 2)
        elif choice is float:
            made.append(low + min(0.5, (high - low) / 2))
    return [value for value in made if value != entry.default]


CASES = [
    pytest.param(algorithm, entry.name, value, id=f"{algorithm}-{entry.name}={value}")
    for entry in entries()
    if entry.section == "algorithm"
    for algorithm in entry.algorithms
    for value in others(entry)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::cflpriv.errors.CflprivWarning")
@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize(("algorithm", "key", "value"), CASES)
def test_a_run_with_another_value_ends_or_is_refused(algorithm: str, key: str, value: Any, protection: str, tmp_path: Path) -> None:
    tree = {
        "data": {"clients": 8, "samples_per_client": 20, "test_samples_per_client": 5, "rotations": [0, 180]},
        "model": {"name": "linear"},
        "training": {"rounds": 3, "lr": 0.1, "weights": "equal"},
        "algorithm": {"name": algorithm, key: value},
        "protection": PROTECTIONS[protection],
        "run": {"insecure_test_entropy": True, "workers": 1},
    }
    summary, said = {"rounds": 3}, ""
    try:
        summary = run_experiment(parse_config(tree), tmp_path / "run")
    except InputError as error:
        said = str(error)
    assert summary["rounds"] == 3
    assert not [part for part in ("\n", "<class", " object at ") if part in said], said


def test_all_algorithms_with_keys_are_there() -> None:
    assert {case.values[0] for case in CASES} <= set(ALGORITHMS)
    assert len(CASES) > 100
