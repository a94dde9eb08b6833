"""Keys without a default value: a configuration that lacks one is refused in one line, for lists of tables and for algorithms of a user."""

from dataclasses import dataclass
from typing import Any

import pytest

from cflpriv.algorithms.interface import ALGORITHMS, Algorithm, AlgorithmSpec
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config
from cflpriv.tasks.training import Train


def config(**sections: Any) -> dict[str, Any]:
    return {"data": {"source": "digits", "clients": 4, **sections.pop("data", {})}, **sections}


@pytest.mark.parametrize(
    ("tables", "error"),
    [
        ([{"round": 2, "clients": [0]}, {"round": 3}], r"\[\[data.drift\]\], table 2 of 2: \[data.drift\] clients: is missing"),
        ([{"clients": [0]}], r"\[\[data.drift\]\], table 1 of 1: \[data.drift\] round: is missing"),
        ([{"round": 0, "clients": [0]}], r"\[\[data.drift\]\], table 1 of 1: data.drift.round = 0: expected an integer ≥ 1"),
    ],
)
def test_a_table_of_a_list_is_named_with_the_key_that_is_wrong(tables: list[dict[str, Any]], error: str) -> None:
    with pytest.raises(InputError, match=error):
        parse_config(config(data={"drift": tables}))


def test_columns_lack_their_name() -> None:
    with pytest.raises(
        InputError, match=r"\[\[data.columns\]\], table 1 of 1: \[data.columns\] name: is missing, and has no default value"
    ):
        parse_config(config(data={"columns": [{"type": "number"}]}))


def test_the_key_that_other_sections_have_is_named() -> None:
    with pytest.raises(InputError, match=r"\[data\] name = 'digits': is called source"):
        parse_config({"data": {"name": "digits"}})


@dataclass(frozen=True)
class State:
    pass


def demanding(train: Train, *, strength: float, twice: int = 2) -> Algorithm:
    raise AssertionError("is never made")


def test_an_algorithm_of_a_user_may_require_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "demanding", AlgorithmSpec("demanding", demanding, "needs a strength", states=(State,)))
    with pytest.raises(InputError, match=r"\[algorithm\] strength: is missing, and algorithm 'demanding' has no default value for it"):
        parse_config(config(algorithm={"name": "demanding", "twice": 3}))
    assert parse_config(config(algorithm={"name": "demanding", "strength": 1.5})).hyper["strength"] == 1.5
