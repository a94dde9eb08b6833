"""Tables with a column of times: test rows come after training rows, and clients' data change from period to period."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.data import DataSpec, build_population
from cflpriv.data.columns import Column
from cflpriv.data.periods import last_rows, periods_of, times
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.run.deployment import deploy, standing_in

START = datetime(2024, 1, 1, tzinfo=UTC)


def written_table(path: Path, rows: Sequence[Sequence[object]], header: str = "site,day,value,other,status") -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")
    return path


def readings(
    sites: int = 3, days: int = 40, turned: tuple[int, ...] = (), late: tuple[int, ...] = (), trend: float = 1.0
) -> list[tuple[object, ...]]:  # fmt: skip
    """A row for each site and day, in mixed order; the feature `other` grows with the day.

    At `turned` sites the label's meaning changes in the second half. `late` sites begin in the last third.
    """
    rng = np.random.default_rng(3)
    rows = []
    for day in range(days):
        for site in range(sites):
            if site in late and day < 2 * days // 3:
                continue
            value, other = rng.standard_normal(2)
            high = (value > 0) != (site in turned and day >= days // 2)
            moment = (START + timedelta(days=day)).date().isoformat()
            rows.append((f"s{site:02}", moment, f"{value:.4f}", f"{other + trend * day:.4f}", "high" if high else "low"))
    return [rows[i] for i in rng.permutation(len(rows))]


def timed(path: Path, **changes: Any) -> DataSpec:
    base: dict[str, Any] = {
        "source": "csv", "paths": (str(path),), "partition": "given", "label_column": "status", "client_column": "site",
        "time_column": "day", "standardise": "constants", "feature_mean": (0.0, 20.0), "feature_std": (1.0, 12.0), "value_range": (-5, 5),
    }  # fmt: skip
    return DataSpec(**{**base, **changes})


def days_of(x: Any) -> Any:
    """The day of each row, from the feature that grows with it."""
    return x.reshape(len(x), 2)[:, 1] * 10 * 12 - 60 + 20


def test_test_rows_are_each_clients_last(tmp_path: Path) -> None:
    population = build_population(timed(written_table(tmp_path / "t.csv", readings()), test_share=0.25))
    assert population.changes == ()
    for client in population.clients:
        assert (len(client.y_train), len(client.y_test)) == (30, 10)
        assert client.x_train.shape[-1] == 2, "the column of times is no feature"
    train, test = (np.concatenate([days_of(getattr(client, part)) for client in population.clients]) for part in ("x_train", "x_test"))
    assert train.mean() < 20 < test.mean()
    assert all(np.corrcoef(days_of(client.x_train), np.arange(30))[0, 1] > 0.9 for client in population.clients), "in the order of time"


@given(
    when=st.lists(st.integers(0, 12), min_size=2, max_size=60).filter(lambda times: len(set(times)) > 1),
    strata=st.integers(1, 4), share=st.floats(0.05, 0.95),
)  # fmt: skip
def test_rows_of_one_time_are_on_one_side_and_later_rows_are_tested(when: list[int], strata: int, share: float) -> None:
    moments = np.array(when, np.float64)
    stratum = np.arange(len(when)) % strata
    try:
        is_test = last_rows(stratum, moments, share)
    except InputError:
        assert all(len(set(moments[stratum == each])) == 1 for each in set(stratum.tolist()))
        return
    for each in range(strata):
        own, tested = moments[stratum == each], is_test[stratum == each]
        if not tested.any():
            assert len(set(own)) <= 1
            continue
        assert own[~tested].size
        assert own[~tested].max() < own[tested].min()
        possible = [sum(own >= moment) for moment in sorted(set(own))[1:]]
        assert abs(tested.sum() - share * len(own)) == min(abs(count - share * len(own)) for count in possible)


@given(when=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=80), periods=st.integers(2, 6))
def test_periods_follow_each_other_and_none_is_empty(when: list[float], periods: int) -> None:
    moments = np.array(when)
    try:
        period = periods_of(moments, periods)
    except InputError:
        assert len(set(when)) < len(when) or len(when) < periods, "different times can always be divided"
        return
    assert set(period.tolist()) == set(range(periods))
    for number in range(1, periods):
        assert moments[period < number].max() < moments[period >= number].min()
    if len(set(when)) == len(when):
        counts = np.bincount(period)
        assert counts.max() - counts.min() <= 1


def test_clients_get_the_rows_of_each_period_and_those_without_rows_join_later(tmp_path: Path) -> None:
    path = written_table(tmp_path / "t.csv", readings(sites=4, late=(2,)))
    population = build_population(timed(path, periods=(3,), samples_per_client=12))
    happened = [(change.round, change.client, change.data is None) for change in population.changes]
    assert happened == [(3, 2, True), (3, 0, False), (3, 1, False), (3, 3, False)]
    for client in population.clients:
        assert len(client.y_train) == (11 if client.id == 2 else 12)
        assert days_of(client.x_train).mean() < 20 or client.id == 2
    for change in population.changes:
        if change.data is not None:
            assert len(change.data.y_train) == 12
            assert days_of(change.data.x_train).mean() > 18
            assert days_of(change.data.x_test).mean() > days_of(change.data.x_train).mean()
    assert any("2 periods of time: 1 of 4 clients join after the first" in note for note in population.notes)


def test_a_client_without_rows_in_a_period_keeps_what_it_had(tmp_path: Path) -> None:
    rows = [row for row in readings() if not (row[0] == "s01" and str(row[1]) >= "2024-01-12")]
    population = build_population(timed(written_table(tmp_path / "t.csv", rows), periods=(1,)))
    assert 1 not in {change.client for change in population.changes}


def test_a_schema_may_have_the_time_as_a_feature_and_names_its_format(tmp_path: Path) -> None:
    rows = [(site, f"{str(day)[8:]}.{str(day)[5:7]}.24", value, other, status) for site, day, value, other, status in readings()]
    columns = (
        Column("day", "date", range=("01.01.24", "01.03.24"), format="%d.%m.%y", parts=("time",)),
        Column("value", "number", range=(-5.0, 5.0)), Column("other", "number", range=(-10.0, 60.0)),
    )  # fmt: skip
    changes: dict[str, Any] = {"standardise": "auto", "feature_mean": (), "feature_std": (), "value_range": ()}
    path = written_table(tmp_path / "t.csv", rows)
    population = build_population(timed(path, columns=columns, **changes))
    assert [client.x_train.shape[-1] for client in population.clients] == [3, 3, 3]
    assert max(client.x_train[..., 0].max() for client in population.clients) < min(
        client.x_test[..., 0].min() for client in population.clients
    )
    without = build_population(timed(path, columns=columns[:2], time_column="other", **changes))
    assert without.clients[0].x_train.shape[-1] == 2
    with pytest.raises(InputError, match=r"t.csv: row 2, column 'day': '\d\d.\d\d.24' is not a number or a date by ISO 8601"):
        build_population(timed(path, columns=columns[1:], **changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"time_column": "dya"}, r"has no column 'dya' \(data.time_column\)"),
        ({"periods": (2, 2)}, r"periods = \[2, 2\]: expected ascending rounds"),
        ({"periods": (0,)}, r"data.periods = \[0\]: expected integers ≥ 1"),
        ({"periods": (1,), "time_column": ""}, r"periods = \[1\]: needs a time_column"),
        ({"periods": (1,), "partition": "iid", "clients": 3}, "needs partition = 'given'"),
        ({"periods": (1,), "held_out": "last"}, "goes with held_out = 'none'"),
        ({"periods": tuple(range(1, 200))}, "data.periods: period 1 of 200 has no rows, because too many have one time"),
        (
            {"periods": (1,), "standardise": "auto", "feature_mean": (), "feature_std": ()},
            "clients standardise by their own rows, which change",
        ),
        ({"source": "digits", "paths": (), "partition": "iid", "label_column": "", "client_column": ""}, "only tables have columns"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = written_table(tmp_path / "t.csv", readings())
    given_changes = {**({} if "paths" in changes else {"paths": (str(path),)}), **changes}
    if given_changes.get("source") == "digits":
        given_changes |= {"standardise": "auto", "feature_mean": (), "feature_std": (), "value_range": ()}
    with pytest.raises(InputError, match=problem):
        build_population(timed(path, **given_changes))


@pytest.mark.parametrize("cell", ["", "yesterday", "2024-13-01", "nan"])
def test_a_cell_without_a_time_is_named(tmp_path: Path, cell: str) -> None:
    rows = readings()
    rows[4] = (rows[4][0], cell, *rows[4][2:])
    with pytest.raises(InputError, match=r"t.csv: row 6, column 'day': .* is not a number or a date"):
        build_population(timed(written_table(tmp_path / "t.csv", rows)))


def test_numbers_and_dates_in_one_column_are_refused(tmp_path: Path) -> None:
    rows = readings()
    rows[4] = (rows[4][0], "17", *rows[4][2:])
    with pytest.raises(InputError, match=r"row 6, column 'day': '17' beside '2024-.*': numbers and dates in one column"):
        build_population(timed(written_table(tmp_path / "t.csv", rows)))


def tree(path: Path, **sections: Any) -> dict[str, Any]:
    data = {
        "source": "csv", "paths": [str(path)], "partition": "given", "label_column": "status", "client_column": "site",
        "time_column": "day", "standardise": "constants", "feature_mean": [0.0, 20.0], "feature_std": [1.0, 12.0], "periods": [2],
        "test_share": 0.3,
    }  # fmt: skip
    base: dict[str, dict[str, Any]] = {
        "data": data, "model": {"name": "linear"}, "training": {"rounds": 4, "lr": 0.5, "batch_size": 20, "weights": "equal"},
        "algorithm": {"name": "crossfit", "recheck_every": 2}, "run": {"insecure_test_entropy": True},
    }  # fmt: skip
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def test_a_run_notices_the_clients_whose_rows_changed_their_meaning(tmp_path: Path) -> None:
    """Sites 0 and 1 of 24 turn: the label of a high value is "low" from the second period on. The level of the checks is .05."""
    path = written_table(tmp_path / "t.csv", readings(sites=24, days=240, turned=(0, 1), late=(5,), trend=0.0))
    config = parse_config(tree(path))
    summary = run_experiment(config, tmp_path / "run")
    happened = {event["round"]: event for event in summary["placements"]}
    assert set(happened[2]["changed"]) >= {0, 1}
    assert len(happened[2]["changed"]) <= 3
    assert summary["clients"] == 24


def test_deployments_privacy_and_short_runs_are_refused_by_the_name_of_the_key(tmp_path: Path) -> None:
    path = written_table(tmp_path / "t.csv", readings())

    def unreached(_: object) -> NoReturn:
        raise AssertionError("nobody is connected")

    with pytest.raises(InputError, match=r"data.periods: is for simulations"):
        deploy(unreached, parse_config(tree(path)), tmp_path / "run", standing_in((1, 1, 2), 2), system="none", clients=3)
    with pytest.raises(InputError, match=r"data.periods under privacy.unit = 'sample'"):
        parse_config(tree(path, privacy={"unit": "sample", "epsilon": 1.0, "delta": 1e-5, "samples": 20}))
    with pytest.raises(InputError, match=r"data.periods: round 2 of a run of 2 rounds"):
        run_experiment(parse_config(tree(path, training={"rounds": 2})), tmp_path / "short")


class Never(datetime):
    """As pandas' NaT: a datetime that equals nothing, and has no time."""

    __hash__ = datetime.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def replace(self, **_: Any) -> "Never":  # type: ignore[override]
        return self

    def timestamp(self) -> float:
        return float("nan")


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        (
            ["2024-01-01T00:00:00+02:00", "2024-01-01T01:00:00"],
            "row 2: .* beside .*: dates with and without a time zone",
        ),
        (["2024-01-01", "0001-01-01T00:00:00+05:00"], "row 2: '0001-01-01T00:00:00.05:00' is not a number or a date"),
        ([START, Never(2024, 1, 1)], "row 2: .* is not a number or a date"),
    ],
)
def test_times_without_an_order_are_refused(cells: list[Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        times(cells, lambda row: f"row {row + 1}")


def test_zones_are_compared_as_times() -> None:
    earlier, later = times(["2024-01-01T09:00:00+09:00", "2024-01-01T00:00:01Z"], str)
    assert later == earlier + 1


def test_a_table_of_test_rows_that_are_not_later_is_named(tmp_path: Path) -> None:
    rows = sorted(readings(), key=lambda row: str(row[1]))
    first, second = written_table(tmp_path / "a.csv", rows[:80]), written_table(tmp_path / "b.csv", rows[80:])
    late = build_population(timed(first, paths=(str(first), str(second))))
    assert not [line for line in late.warnings if "later" in line]
    early = build_population(timed(first, paths=(str(second), str(first))))
    (line,) = [line for line in early.warnings if "later" in line]
    assert line.endswith("a.csv: 80 of 80 test rows are not later than all training rows of their client (data.time_column)")
