"""Reproductions: every entry makes sense, the table says what the runs found, scale and data are named, and nothing is run twice."""

import csv
import json
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.linalg
from command_line import in_process

from cflpriv.data import DATASETS, build_population
from cflpriv.data.datasets import HOW_TO_SET
from cflpriv.engine.models import Model
from cflpriv.errors import InputError, TrainingDiverged
from cflpriv.experiments.config.config import own_weights
from cflpriv.experiments.reproductions import METRICS, REPRODUCTIONS, Reproduction, ReproductionCell, RowFigure, trials
from cflpriv.experiments.reproductions import reproduce as engine
from cflpriv.experiments.reproductions.entry import shape
from cflpriv.experiments.reproductions.exact_settings import config_of, published_of, published_of_trials, scaled_trials, trial_settings
from cflpriv.experiments.reproductions.published import TABLES, Number, numbers
from cflpriv.experiments.reproductions.reproduce import ReproductionOutcome, reproduce
from cflpriv.experiments.reproductions.table import ALONG, TableRow, in_words, slug, write
from cflpriv.experiments.reproductions.trials import (
    _fitted,
    _mmd,
    anchor_cosines,
    class_angles,
    data_set_angles,
    gaussian_separation,
    gaussians,
    influence_frontier,
    influence_speed,
    label_swap_gap,
)
from cflpriv.experiments.run.folder import run_experiment
from cflpriv.experiments.run.resume import locked
from cflpriv.types import Array, ClientData, Population

REQUIRED = (
    "pacfl-label-skew", "pacfl-label-skew-30", "pacfl-mix4", "pacfl-newcomers", "pacfl-rounds-to-target", "pacfl-megabits-to-target",
    "pacfl-limited-rounds", "pacfl-dirichlet", "pacfl-dirichlet-megabits", "pacfl-beta-sweep", "pacfl-beta-sweep-30", "pacfl-gaussians",
    "pacfl-data-sets", "pacfl-classes", "pacfl-celeba", "ifca-identities", "stocfl-cosines", "stocfl-sampling", "cfl-theorem",
    "pfedlia-influence",
    "ifca-synthetic", "ifca-rotated-mnist", "ifca-rotated-cifar", "stocfl-clustering", "stocfl-rotated-mnist", "stocfl-rotated-cifar",
    "stocfl-shifted", "stocfl-shifted-cifar", "stocfl-evolution", "stocfl-unseen", "stocfl-lambda", "stocfl-tau", "cfl-label-swap",
    "cfl-congruent", "cfl-permuted-labels", "cfl-agnews", "pfedlia-pathological", "pfedlia-noisy", "pfedlia-rounds", "pfedlia-nordic",
    "pfedlia-speedup", "femnist",
)  # fmt: skip

BASE: dict[str, Any] = {
    "data.clients": 8, "data.rotations": [0, 90], "data.test_samples_per_client": 20, "model.name": "mlp", "model.hidden": 8,
    "training.rounds": 3, "training.lr": 0.1, "training.batch_size": 60, "run.insecure_test_entropy": True, "run.evaluate_every": 1
}  # fmt: skip


def draw(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
    """A trial for tests."""
    CALLS.append(seed)
    if seed in STOPS:
        raise KeyboardInterrupt
    return {"success": float(seed % 2), "gap": None}


CALLS: list[int] = []
STOPS: set[int] = set()

TINY = Reproduction(
    "tiny", "no paper", "set here",
    (
        ReproductionCell(
            "PACFL", (RowFigure("local", (Number(90.0, 0.5),)), RowFigure("shared"), RowFigure("ari", (Number(1.0),))),
            {"algorithm.name": "pacfl", "algorithm.k": 2},
        ),
        ReproductionCell(
            "FedAvg", (RowFigure("shared", (Number(50.0), Number(40.0, None, {"training.rounds": 2}))),), {"algorithm.name": "fedavg"}
        ),
        ReproductionCell("control", (RowFigure("shared", shape("lower")),), {"algorithm.name": "shuffled"}, groups_of="PACFL"),
        ReproductionCell("drawn", (RowFigure("success", (Number(0.5),)), RowFigure("gap")), trial=draw, trials=6),
    ),
    BASE, {"training.rounds": 2, "data.clients": 4},
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPRODUCTIONS, "tiny", TINY)
    CALLS.clear()
    STOPS.clear()


# --- the entries


def test_every_promised_name_is_there() -> None:
    assert set(REQUIRED) == set(REPRODUCTIONS) - {"tiny"}


@pytest.mark.parametrize("name", REQUIRED)
def test_an_entry_makes_sense(name: str) -> None:
    entry = REPRODUCTIONS[name]
    labels = [cell.label for cell in entry.cells]
    assert all((entry.title, entry.source, entry.chosen))
    assert len({slug(label).lower() for label in labels}) == len(labels)  # a folder each, also where case does not count
    assert any(figure.published for cell in entry.cells for figure in cell.figures)
    for cell in entry.cells:
        assert cell.figures
        assert {figure.metric for figure in cell.figures} <= set(METRICS)
        assert not cell.groups_of or labels.index(cell.groups_of) < labels.index(cell.label)
        assert entry.over != "numbers" or cell.places or cell.trial is None
        if cell.trial:
            assert not cell.changes
            continue
        whole, said = config_of(entry, cell, 3)
        assert not said
        assert (whole.run.seed, whole.data.seed) == (3, 3)
        small, said = config_of(entry, cell, 3, 0.01)
        assert said  # whatever was shrunk is named
        assert small.training.rounds < whole.training.rounds or small.data != whole.data


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_the_methods_of_a_table_average_alike_because_it_says_how(name: str) -> None:
    """Where their own weights differ; so no table changes with a method's own."""
    entry = REPRODUCTIONS[name]
    keys = [{**entry.base, **cell.changes} for cell in entry.cells if cell.trial is None]
    if len({own_weights(one["algorithm.name"]) for one in keys}) > 1:
        assert len({one["training.weights"] for one in keys}) == 1


def test_scale_keeps_to_its_floors_and_names_what_it_shrinks() -> None:
    entry = REPRODUCTIONS["pacfl-mix4"]
    config, said = config_of(entry, entry.cell("PACFL"), 0, 0.1, (), {"svhn": "mnist"})
    assert config.data.sources == (("cifar10", 3), ("mnist", 3), ("fashion_mnist", 3), ("usps", 3))
    assert config.training.rounds == 5
    assert "training.rounds 50 → 5" in said
    assert any("mnist stands in for svhn" in one for one in said)
    skew = REPRODUCTIONS["pacfl-label-skew"]
    config, said = config_of(skew, skew.cell("PACFL"), 0, 0.01)
    assert (config.training.rounds, config.data.clients, config.data.samples_per_client) == (4, 10, 600)
    assert "data.samples_per_client at most 600" in said
    assert config_of(skew, skew.cell("PACFL"), 0)[0].data.samples_per_client == 0
    assert [scaled_trials(REPRODUCTIONS["ifca-synthetic"].cells[0], scale) for scale in (1, 0.1, 0.001)] == [40, 4, 1]


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_one_model_on_all_data_is_measured_on_as_many_texts_as_its_rivals(scale: float) -> None:
    entry = REPRODUCTIONS["pfedlia-nordic"]
    sections = [config_of(entry, cell, 0, scale)[0].data for cell in entry.cells]
    assert len({data.clients * data.test_samples_per_client for data in sections}) == 1


# --- what is published, for exactly these settings


def test_the_papers_numbers_stand_in_one_table_with_the_place_of_each() -> None:
    for name, table in TABLES.items():
        assert table.section, name
        for row, values in table.rows.items():
            assert len(values) == len(table.columns), f"{name}, {row}"
            for number in numbers(name, row):
                assert number.where.startswith(f"{name}, row {row}")
                assert isinstance(number.value, float) or number.value == "never"
    used = {
        number.where for entry in REPRODUCTIONS.values() for cell in entry.cells for figure in cell.figures for number in figure.published
    }
    there = {number.where for name, table in TABLES.items() for row in table.rows for number in numbers(name, row)}
    assert {one for one in used if one} == there  # each number is of an entry, and no entry has one of its own


def differs(entry: Reproduction, cell: ReproductionCell, changes: list[str]) -> bool:
    """Whether a cell that is changed so is one that makes sense, and not what it was."""
    try:
        return config_of(entry, cell, 0, 1.0, changes)[0] != config_of(entry, cell, 0)[0]
    except InputError:
        return False


LARGE_MARKED = [
    pytest.param(name, marks=pytest.mark.slow if name in ("stocfl-rotated-mnist", "stocfl-lambda") else ()) for name in REQUIRED
]


@pytest.mark.parametrize("name", LARGE_MARKED)
def test_a_figure_is_printed_for_exactly_its_settings_or_none(name: str) -> None:
    entry = REPRODUCTIONS[name]
    for cell, source in product(entry.cells, sorted(DATASETS)):
        if cell.trial or not any(figure.published for figure in cell.figures):
            continue
        try:
            config, _ = config_of(entry, cell, 0, 1.0, [f"data.source={source}"])
        except InputError:  # not a data set that this cell allows
            continue
        own = {**entry.base, **cell.changes}
        printed = published_of(entry, cell, config)
        for number in printed.values():
            wanted = {**own, **number.settings}
            assert wanted["data.source"] == config.data.source == source  # never another data set's
            assert wanted.get("data.skew_percent", 20.0) == config.data.skew_percent
            assert wanted["model.name"] == config.model.name
            assert (config.training.rounds, config.data.clients) == (wanted["training.rounds"], wanted["data.clients"])
        if source == own["data.source"]:
            numbered = [figure.metric for figure in cell.figures if figure.published]
            assert set(printed) == set(numbered)  # at its own settings an entry prints what it has
        else:
            there = {**own, **entry.with_data.get(source, {}), "data.source": source}
            columns = {
                number.where for figure in cell.figures for number in figure.published
                if "data.source" in number.settings and all(there.get(key) == value for key, value in number.settings.items())
            }  # fmt: skip
            assert {number.where for number in printed.values()} == columns


@pytest.mark.parametrize("name", LARGE_MARKED)
def test_every_number_is_found_by_its_settings_and_lost_with_any_other_change(name: str) -> None:
    entry = REPRODUCTIONS[name]
    for cell in entry.cells:
        for figure in cell.figures:
            if cell.trial:
                if figure.published:
                    assert published_of_trials(cell, cell.settings)[figure.metric] == figure.published[0]
                    assert not published_of_trials(cell, {**cell.settings, "thin": True})
                continue
            for number in figure.published:
                changes = [f"{key}={json.dumps(value)}" for key, value in number.settings.items()]
                assert published_of(entry, cell, config_of(entry, cell, 5, 1.0, changes)[0])[figure.metric] == number
            if figure.published:
                for change in ("training.rounds=3", "training.lr=0.123", "data.samples_per_client=77", 'protection.sum="secagg"'):
                    if differs(entry, cell, [change]):
                        assert not published_of(entry, cell, config_of(entry, cell, 0, 1.0, [change])[0]), f"{cell.label}: {change}"
                same = ["run.device=cpu", "run.record=full", "data.seed=4"]
                assert figure.metric in published_of(entry, cell, config_of(entry, cell, 0, 1.0, same)[0])
                break


def test_another_column_of_the_papers_table_has_its_own_figures() -> None:
    """The command that printed Fashion-MNIST's for CIFAR-10, and 20 % label skew for 30 %."""
    entry = REPRODUCTIONS["pacfl-label-skew"]

    def local(cell: str, *changes: str, of: str = "pacfl-label-skew") -> tuple[float | str, str] | None:
        one = REPRODUCTIONS[of].cell(cell)
        number = published_of(REPRODUCTIONS[of], one, config_of(REPRODUCTIONS[of], one, 0, 1.0, list(changes))[0]).get("local")
        return None if number is None else (number.value, number.where)

    assert local("PACFL") == (97.54, "PACFL, Table 1, row PACFL, column FMNIST")
    assert local("PACFL", "data.source=cifar10", "data.skew_percent=30") == (82.77, "PACFL, Table 6, row PACFL, column CIFAR-10")
    assert local("PACFL", "data.skew_percent=20", of="pacfl-label-skew-30") == (97.54, "PACFL, Table 1, row PACFL, column FMNIST")
    assert local("PACFL", "data.source=cifar100") == (73.10, "PACFL, Table 1, row PACFL, column CIFAR-100")
    assert local("PACFL", "data.source=cifar100", "model.name=lenet5") is None
    assert local("IFCA (k=2)", "data.source=svhn") == (95.42, "PACFL, Table 1, row IFCA, column SVHN")
    assert local("PACFL", "data.source=mnist") is local("PACFL", "data.skew_percent=40") is local("PACFL", "training.epochs=1") is None
    cell = entry.cell("PACFL")
    assert config_of(entry, cell, 0, 1.0, ["data.source=cifar100"])[1] == ("model.name = resnet9, as the paper has it for cifar100",)
    assert not published_of(entry, cell, config_of(entry, cell, 0, 0.1)[0])  # scaled down
    mix = REPRODUCTIONS["pacfl-mix4"]
    assert not published_of(mix, mix.cell("PACFL"), config_of(mix, mix.cell("PACFL"), 0, 1.0, (), {"svhn": "mnist"})[0])


def test_a_table_prints_the_figures_of_its_settings(tmp_path: Path) -> None:
    outcome = reproduce("tiny", tmp_path / "a", cells=["FedAvg"], changes=["training.rounds=2"])
    assert [row.published for row in outcome.rows] == [40.0]
    outcome = reproduce("tiny", tmp_path / "b", cells=["FedAvg"], changes=["training.lr=0.2"])
    assert [(row.published, row.difference) for row in outcome.rows] == [(None, None)]
    assert "Published: no paper; nothing at these settings." in (tmp_path / "b" / "table.md").read_text(encoding="utf-8")


# --- running


def rows_of(outcome: ReproductionOutcome) -> dict[tuple[str, str], float | None]:
    return {(row.cell, row.metric): row.ours for row in outcome.rows}


@pytest.mark.slow
def test_the_table_says_what_the_runs_found_and_nothing_is_run_twice(tmp_path: Path) -> None:
    first = reproduce("tiny", tmp_path / "a", seeds=2)
    summaries = [json.loads((tmp_path / "a" / f"PACFL-s{seed}" / "summary.json").read_text(encoding="utf-8")) for seed in (0, 1)]
    local = [100 * one["local_accuracy_mean_last_rounds"] for one in summaries]
    row = first.rows[0]
    assert row.ours == pytest.approx(np.mean(local))
    assert row.deviation == pytest.approx(np.std(local, ddof=1))
    assert row.difference == pytest.approx(np.mean(local) - 90.0)
    assert rows_of(first)["PACFL", "ari"] == 1.0
    assert rows_of(first)["drawn", "success"] == 0.5
    assert rows_of(first)["drawn", "gap"] is None
    assert [one.difference for one in first.rows if one.cell == "control"] == [None]  # words are no number to compare with
    assert first.remarks[0] == "scale 1: nothing shrunk"
    table = (tmp_path / "a" / "table.md").read_text(encoding="utf-8")
    assert "Scale 1, 2 seed(s)" in table
    assert "set here" in table
    with (tmp_path / "a" / "table.csv").open(newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert float(written[0]["difference"]) == row.difference
    assert len(written) == len(first.rows)
    assert ElementTree.parse(tmp_path / "a" / "picture.svg").getroot().tag.endswith("svg")
    CALLS.clear()
    again = reproduce("tiny", tmp_path / "a", seeds=2)
    assert again == first  # the very seconds: nothing was run
    assert CALLS == []


def test_the_control_has_the_sizes_of_the_clusters_that_were_found(tmp_path: Path) -> None:
    reproduce("tiny", tmp_path / "a", cells=["control"])  # brings the cell that it takes its groups from
    found = json.loads((tmp_path / "a" / "PACFL-s0" / "measured.json").read_text(encoding="utf-8"))["labels"]
    control = json.loads((tmp_path / "a" / "control-s0" / "measured.json").read_text(encoding="utf-8"))
    assert control["truth"] == found
    assert sorted(np.bincount(list(control["labels"].values()))) == sorted(np.bincount(list(found.values())))


@pytest.mark.slow
def test_an_interrupted_reproduction_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reproduce("tiny", tmp_path / "whole")

    def cut(config: Any, folder: Path, *arguments: Any, **options: Any) -> Any:
        stop = folder.name == "FedAvg-s0" and not folder.exists()
        return run_experiment(config, folder, *arguments, **options, tick=lambda row: signal.raise_signal(signal.SIGINT) if stop else None)

    monkeypatch.setattr(engine, "run_experiment", cut)
    outcome = reproduce("tiny", tmp_path / "cut")
    assert outcome.interrupted
    assert {row.cell for row in outcome.rows} == {"PACFL"}
    assert "interrupted: the same command resumes" in (tmp_path / "cut" / "table.md").read_text(encoding="utf-8")
    assert len((tmp_path / "cut" / "FedAvg-s0" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()) == 1  # kept
    STOPS.add(3)
    outcome = reproduce("tiny", tmp_path / "cut")
    assert outcome.interrupted
    assert {row.cell for row in outcome.rows} == {"PACFL", "FedAvg", "control"}
    STOPS.clear()
    CALLS.clear()
    outcome = reproduce("tiny", tmp_path / "cut")
    assert not outcome.interrupted
    assert CALLS == [3, 4, 5]  # trials 0, 1 and 2 were kept
    assert rows_of(outcome) == rows_of(whole)


@pytest.mark.slow
def test_cells_that_were_run_before_stay_in_the_table(tmp_path: Path) -> None:
    reproduce("tiny", tmp_path, cells=["FedAvg"])
    outcome = reproduce("tiny", tmp_path, cells=["PACFL", "drawn"])
    assert [row.cell for row in outcome.rows] == ["PACFL", "PACFL", "PACFL", "FedAvg", "drawn", "drawn"]
    assert outcome.rows == reproduce("tiny", tmp_path, cells=["drawn"]).rows
    assert "| FedAvg |" in (tmp_path / "table.md").read_text(encoding="utf-8")
    more = reproduce("tiny", tmp_path, cells=["FedAvg"], seeds=2)
    assert {row.cell for row in more.rows} == {"FedAvg", "drawn"}, "of PACFL there is one seed only"
    assert "left out, though it was run before: PACFL (not with all of these 2 seeds)" in more.remarks
    (tmp_path / "PACFL-s0").rename(tmp_path / "elsewhere")
    other = reproduce("tiny", tmp_path, cells=["control"], changes=["training.lr=0.2"])
    assert {row.cell for row in other.rows} == {"PACFL", "control", "drawn"}
    assert any(remark.startswith("left out, though it was run before: FedAvg (") for remark in other.remarks)


def test_notes_on_the_data_of_cells_that_were_run_before_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "build_population", lambda *given: replace(build_population(*given), notes=("a part of the images",)))
    first = reproduce("tiny", tmp_path, cells=["FedAvg"])
    assert "a part of the images" in first.remarks
    assert reproduce("tiny", tmp_path, cells=["drawn"]).remarks == first.remarks


@pytest.mark.slow
def test_a_cell_that_was_run_before_keeps_its_figures_or_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = reproduce("tiny", tmp_path, cells=["FedAvg", "control", "drawn"])
    # a key that FedAvg does not have: its figures were made without it
    reproduce("tiny", tmp_path / "other", cells=["FedAvg"])
    changed = reproduce("tiny", tmp_path / "other", cells=["PACFL"], changes=["algorithm.k=3"])
    assert {row.cell for row in changed.rows} == {"PACFL"}
    assert any(remark.startswith("left out, though it was run before: FedAvg (") for remark in changed.remarks)
    # the groups that a control took from another folder are not needed any more, nor is the data set
    (tmp_path / "PACFL-s0").rename(tmp_path / "elsewhere")
    shown = reproduce("tiny", tmp_path, cells=["FedAvg"])
    assert shown.rows == tuple(row for row in first.rows if row.cell != "PACFL")

    def cut(*arguments: Any, **options: Any) -> Any:
        return run_experiment(*arguments, **options, tick=lambda row: signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(engine, "run_experiment", cut)
    stopped = reproduce("tiny", tmp_path, cells=["PACFL"])
    assert stopped.interrupted
    assert stopped.rows == shown.rows, "Ctrl-C takes nothing out of the table"


def test_ctrl_c_and_then_a_divergence_end_a_reproduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(config: Any, folder: Path, *arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        raise TrainingDiverged("client 0, round 0: a test")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "run_experiment", cut)
        outcome = reproduce("tiny", tmp_path)
    assert outcome.interrupted
    assert {row.cell for row in outcome.rows} == {"PACFL"}
    assert outcome.rows[0].ours is None


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [0, 3], ids=["before its first round", "in its last round"])
def test_ctrl_c_outside_the_rounds_between_ends_a_reproduction_too(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(config: Any, folder: Path, *arguments: Any, **options: Any) -> Any:
        if rounds == 0:
            signal.raise_signal(signal.SIGINT)
        seen: list[Any] = []

        def tick(row: Any) -> None:
            seen.append(row)
            if len(seen) == rounds:
                signal.raise_signal(signal.SIGINT)

        return run_experiment(config, folder, *arguments, **options, tick=tick)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "run_experiment", cut)
        outcome = reproduce("tiny", tmp_path)
    assert outcome.interrupted
    assert {row.cell for row in outcome.rows} == ({"PACFL"} if rounds else set())
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "FedAvg-s0").exists()
    assert not reproduce("tiny", tmp_path).interrupted


def test_another_scale_needs_another_folder(tmp_path: Path) -> None:
    outcome = reproduce("tiny", tmp_path / "a", scale=0.5)
    assert {"training.rounds 3 → 2", "data.clients 8 → 4", "trials 6 → 3"} <= set(outcome.remarks)
    for cells in ("FedAvg", "PACFL"):
        with pytest.raises(InputError, match=r"data\.clients is 8, but .* has 4; .*choose another folder with --out"):
            reproduce("tiny", tmp_path / "a", cells=[cells])


@pytest.mark.slow
def test_a_published_deviation_stands_behind_its_figure(tmp_path: Path) -> None:
    outcome = reproduce("tiny", tmp_path, cells=["PACFL"])
    assert "| 90.00 ± 0.50 |" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "published 90.00 ± 0.50" in in_words(outcome.rows[0])
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        assert [(row["published"], row["published_deviation"]) for row in csv.DictReader(file)] == [("90.0", "0.5"), ("", ""), ("1.0", "")]
    drawn = re.findall("<!-- (.*?) -->", (tmp_path / "picture.svg").read_text(encoding="utf-8"))
    assert any("ring: published" in one for one in drawn)


def test_a_cell_whose_training_diverges_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wild = ReproductionCell("FedAvg", (RowFigure("shared"),), {"algorithm.name": "fedavg", "training.lr": 1e30})
    monkeypatch.setitem(REPRODUCTIONS, "tiny", replace(TINY, cells=(wild, TINY.cells[0])))
    for _ in range(2):
        outcome = reproduce("tiny", tmp_path / "a")
        assert "not finite" in outcome.rows[0].note
        assert rows_of(outcome)["FedAvg", "shared"] is None
        assert rows_of(outcome)["PACFL", "ari"] == 1.0
        assert "not finite" in (tmp_path / "a" / "table.md").read_text(encoding="utf-8")


def test_cells_whose_data_are_absent_or_too_few_are_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_few(seed: int, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Mapping[str, float | None]:
        raise InputError("20 clients need 30000 training samples, there are 20000")

    absent = ReproductionCell("absent", (RowFigure("shared"),), {"algorithm.name": "fedavg", "data.source": "svhn"})
    subset = ReproductionCell("subset", (RowFigure("gap"),), trial=too_few, trials=2, settings={"source": "digits"})
    unread = ReproductionCell("unread", (RowFigure("gap"),), trial=too_few, settings={"source": "mnist"})
    monkeypatch.setitem(REPRODUCTIONS, "tiny", replace(TINY, cells=(absent, subset, TINY.cells[3])))
    lines: list[str] = []
    outcome = reproduce("tiny", tmp_path / "a", tmp_path, report=lines.append)
    assert {row.cell: row.note for row in outcome.rows if row.ours is None and row.cell != "drawn"}.keys() == {"absent", "subset"}
    assert "skipped: svhn: no train_32x32.mat" in outcome.rows[0].note
    assert any("skipped: 20 clients need 30000" in line for line in lines)
    assert rows_of(outcome)["drawn", "success"] == 0.5
    monkeypatch.setitem(REPRODUCTIONS, "tiny", replace(TINY, cells=(absent, unread)))
    with pytest.raises(InputError, match="svhn"):  # nothing could run
        reproduce("tiny", tmp_path / "b", tmp_path)
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_what_lies_in_a_folder_is_gone_on_with_repaired_or_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "a"
    first = reproduce("tiny", out)
    trials, summary = out / "drawn.jsonl", out / "PACFL-s0" / "summary.json"
    kept = trials.read_bytes()
    trials.write_bytes(kept + b'{"trial": 6, "sett')  # a kill while the next was written
    summary.write_text(summary.read_text(encoding="utf-8")[:100], encoding="utf-8")
    CALLS.clear()
    again = reproduce("tiny", out)
    assert rows_of(again) == rows_of(first)
    assert CALLS == []
    assert trials.read_bytes() == kept
    assert json.loads(summary.read_text(encoding="utf-8"))["rounds"] == 3
    trials.write_bytes(kept.replace(b'"figures"', b'"figgures"', 1))
    with pytest.raises(InputError, match=r"drawn\.jsonl: line 1 is damaged"):
        reproduce("tiny", out, cells=["drawn"])
    rounds, measured, config = (out / "PACFL-s0" / name for name in ("rounds.jsonl", "measured.json", "config.toml"))
    checkpoint = next((out / "FedAvg-s0" / "checkpoints").glob("*.safetensors"))
    (out / "FedAvg-s0" / "summary.json").unlink()  # with it nothing of the checkpoint would be read
    for path, cell in ((rounds, "PACFL"), (measured, "control"), (config, "PACFL"), (checkpoint, "FedAvg")):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] + b"\n")
        with pytest.raises(InputError, match=path.name.replace(".", r"\.")):
            reproduce("tiny", out, cells=[cell])
        path.write_bytes(whole)
    assert rows_of(reproduce("tiny", out, cells=["FedAvg"]))["FedAvg", "shared"] == rows_of(first)["FedAvg", "shared"]


def test_a_folder_is_of_one_reproduction_and_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPRODUCTIONS, "other", replace(TINY, cells=TINY.cells[3:]))
    reproduce("tiny", tmp_path / "a", cells=["drawn"])
    with pytest.raises(InputError, match=r"table\.csv: is of 'tiny', not of 'other'; choose another folder"):
        reproduce("other", tmp_path / "a")
    with locked(tmp_path / "a"), pytest.raises(InputError, match="another process is running"):
        reproduce("tiny", tmp_path / "a", cells=["drawn"])


def test_a_data_set_that_is_damaged_is_not_called_absent(tmp_path: Path) -> None:
    entry = REPRODUCTIONS["pacfl-mix4"]
    assert engine._stand_in(entry, tmp_path) == {"svhn": "mnist"}
    (tmp_path / "svhn").mkdir()
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (tmp_path / "svhn" / name).write_bytes(b"nothing")
    with pytest.raises(InputError, match="train_32x32"):
        engine._stand_in(entry, tmp_path)
    with pytest.raises(InputError, match="fashion_mnist"):  # what trials read is looked for before anything is made, too
        reproduce("pfedlia-speedup", tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()
    changes = ['data.sources=[["usps", 2]]']
    assert not any("stands in" in one for one in config_of(entry, entry.cell("SOLO"), 0, 1, changes, {"svhn": "mnist"})[1])


def test_a_picture_over_rounds_names_its_axis_and_shows_what_was_published(tmp_path: Path) -> None:
    entry = REPRODUCTIONS["cfl-agnews"]
    (tmp_path / "CFL-s0").mkdir()
    rows = [json.dumps({"round": i, "perplexity_mean": 350.0 - 10 * i}) + "\n" for i in range(16)]  # within one power of ten
    (tmp_path / "CFL-s0" / "rounds.jsonl").write_text("".join(rows), encoding="utf-8")
    row = TableRow("CFL", "perplexity_before_split", 200.0, None, Number(43.0), 1, 1.0)
    write(entry, "cfl-agnews", ReproductionOutcome((row,), ()), [entry.cell("CFL")], tmp_path, 1, 1.0, [])
    drawn = re.findall("<!-- (.*?) -->", (tmp_path / "picture.svg").read_text(encoding="utf-8"))  # matplotlib notes each text that it draws
    assert {"perplexity", "50", "100", "200", "round (seed 0)"} <= set(drawn)
    assert any("dotted: published" in one for one in drawn)
    write(entry, "cfl-agnews", ReproductionOutcome((replace(row, printed=None),), ()), [entry.cell("CFL")], tmp_path, 1, 1.0, [])
    drawn = re.findall("<!-- (.*?) -->", (tmp_path / "picture.svg").read_text(encoding="utf-8"))
    assert not any("dotted" in one for one in drawn)
    for name in {entry.along for entry in REPRODUCTIONS.values() if entry.over == "rounds"}:
        assert name in ALONG


@pytest.mark.slow
def test_protections_pass_through_and_what_they_refuse_is_a_row(tmp_path: Path) -> None:
    changes = ['protection.sum="secagg"', 'protection.gram=["haar"]']
    outcome = reproduce("tiny", tmp_path / "a", changes=changes, cells=["PACFL", "FedAvg"])
    assert rows_of(outcome)["PACFL", "ari"] == 1.0
    assert json.loads((tmp_path / "a" / "PACFL-s0" / "summary.json").read_text(encoding="utf-8"))["protection"] != "none"
    assert any("training.weights = equal" in one for one in outcome.remarks)
    changes = ['protection.sum="secagg-oblivious"']
    outcome = reproduce("tiny", tmp_path / "b", changes=changes, cells=["PACFL", "FedAvg"])
    assert rows_of(outcome)["PACFL", "local"] is None
    assert "secagg-oblivious" in outcome.rows[0].note
    assert rows_of(outcome)["FedAvg", "shared"] is not None  # the others go on


def test_wrong_words_are_refused_by_name(tmp_path: Path) -> None:
    for options, words in (
        ({"name": "tinny"}, "did you mean 'tiny'"), ({"scale": 0.0}, r"outside \(0, 1\]"), ({"scale": 1.5}, "outside"),
        ({"seeds": 0}, "--seeds 0"), ({"seeds": 2, "changes": ["run.seed=7"]}, "the same"), ({"cells": ["nothing"]}, "no cell begins so"),
        ({"name": "pacfl-gaussians", "changes": ["protection.sum=secagg"]}, "has no runs"),
        ({"changes": ["protection.sum=secagg"], "cells": ["drawn"]}, "has no runs among these cells"),
        ({"changes": ["data.nothing=1"], "cells": ["FedAvg"]}, "nothing = 1: is not a key"), ({"changes": ["training.rounds"]}, "expected"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            reproduce(out=tmp_path / "x", **{"name": "tiny", **options})  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
    outcome = reproduce("tiny", tmp_path / "x", changes=["algorithm.k=2"], cells=["PACFL", "FedAvg", "drawn"])
    assert "is not a key" in outcome.rows[3].note  # what one algorithm has not is a row; the others go on
    assert rows_of(outcome)["PACFL", "ari"] == 1.0
    assert "without algorithm.k=2, which is for runs: drawn" in outcome.remarks


def test_what_is_given_is_not_shrunk_nor_reported_as_shrunk() -> None:
    config, said = config_of(TINY, TINY.cell("FedAvg"), 0, 0.5, ["training.rounds = 3"])
    assert (config.training.rounds, config.data.clients) == (3, 4)
    assert said == ("data.clients 8 → 4",)


def test_trials_shrink_by_what_the_cell_says() -> None:
    cell = REPRODUCTIONS["ifca-synthetic"].cells[0]
    settings, notes = trial_settings(REPRODUCTIONS["ifca-synthetic"], cell, 0.25)
    assert settings["d"] / (settings["m"] * settings["n"]) == cell.settings["d"] / (cell.settings["m"] * cell.settings["n"])
    assert set(notes) == {"d 1000 → 200", "m 100 → 20", "trials 40 → 10"}
    assert trial_settings(REPRODUCTIONS["ifca-synthetic"], cell, 1.0) == (cell.settings, ())
    entry = REPRODUCTIONS["pfedlia-influence"]
    settings, notes = trial_settings(entry, entry.cells[0], 0.4)
    assert set(notes) == {
        "data.samples_per_client 400 → 100", "algorithm.warm_up 20 → 8", "algorithm.local_epochs 20 → 8", "trials 5 → 2"
    }  # fmt: skip
    assert settings["data"] == {**entry.cells[0].settings["data"], "samples_per_client": 100}
    assert trial_settings(entry, entry.cells[0], 1.0) == (entry.cells[0].settings, ())  # a cell's own are left as they are


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "a")
    assert in_process(monkeypatch, "reproduce", "tiny", "--out", folder, "--scale", "0.5", "--cells", "FedAvg;drawn") == 0
    said = capsys.readouterr().out
    assert "| FedAvg |" in said
    assert "training.rounds 3 → 2" in said
    assert in_process(monkeypatch, "reproduce", "tiny", "--out", folder, "--cells", " ; ") == 2
    assert "names no cell" in capsys.readouterr().err
    absent = ["femnist", "--data-dir", str(tmp_path / "nothing"), "--out", str(tmp_path / "b")]
    assert in_process(monkeypatch, "reproduce", *absent) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1  # data that are not there are said in one line
    assert not (tmp_path / "b").exists()
    STOPS.add(0)
    assert in_process(monkeypatch, "reproduce", "tiny", "--out", str(tmp_path / "c"), "--cells", "drawn") == 1
    assert "the same command resumes" in capsys.readouterr().err
    assert in_process(monkeypatch, "list") == 0
    assert "pacfl-label-skew" in capsys.readouterr().out


# --- figures


def test_figures_of_rows() -> None:
    rows = [
        {"accuracy_mean": 0.2, "perplexity_mean": 40.0, "max_norms": [1.0], "mean_norms": [2.0]},
        {"accuracy_mean": 0.3, "perplexity_mean": 30.0, "max_norms": [4.0, None], "splits": [{}]},
        {"accuracy_mean": 0.9, "max_norms": [1.0, 3.0], "mean_norms": [0.5]},
    ]
    assert engine._measured("before_split", {}, rows) == 20.0
    assert engine._measured("perplexity_before_split", {}, rows) == 40.0
    assert engine._measured("max_norm", {}, rows) == 0.75
    assert engine._measured("mean_norm", {}, rows) == 0.25
    assert engine._measured("newcomer", {"newcomers": {"newcomer_accuracy_mean": 0.5}}, rows) == 50.0
    assert engine._measured("rounds_local", {"local_rounds_to_target": None}, rows) is None
    rows = [{"round": i, **({} if one is None else {"choice_ari": one})} for i, one in enumerate((0.4, 1.0, None, 0.9, 1.0, 1.0))]
    assert engine._measured("identified_from_round", {}, rows) == 5.0
    assert engine._measured("identified_from_round", {}, rows[:2]) == 2.0
    assert engine._measured("identified_from_round", {}, rows[1:2]) == 2.0
    assert engine._measured("identified_from_round", {}, rows[:4]) is None
    assert engine._measured("identified_from_round", {}, rows[:1]) is None


def test_the_share_of_the_two_largest_clusters(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    for labels, share in (([0, 0, 0, 1, 2, 2], 5 / 6), ([3, 3], 1.0), ([], None)):
        path.write_text(json.dumps({"labels": {str(client): label for client, label in enumerate(labels)}}), encoding="utf-8")
        assert engine._two_largest(tmp_path) == share
    path.write_text(json.dumps({"labels": None}), encoding="utf-8")
    assert engine._two_largest(tmp_path) is None
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="missing or damaged"):
        engine._two_largest(tmp_path)


def test_distances_of_gaussians_against_their_common_axes() -> None:
    """In the basis where b is the identity and a diagonal (λ), both distances are sums over coordinates."""
    draws = np.random.default_rng(0)
    x = draws.standard_normal((40, 5)) @ draws.standard_normal((5, 5))
    y = draws.standard_normal((40, 5)) + 0.3
    a, b = np.cov(x.T), np.cov(y.T)
    values, vectors = scipy.linalg.eigh(a, b)
    step = vectors.T @ (y.mean(axis=0) - x.mean(axis=0))
    kl = 0.5 * (values - 1 - np.log(values) + step**2).sum()
    middle = (1 + values) / 2
    bhattacharyya = (step**2 / middle / 8 + 0.5 * np.log(middle) - 0.25 * np.log(values)).sum()
    assert _fitted(x, y) == pytest.approx((bhattacharyya, kl), rel=1e-9)
    assert _fitted(x, x) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_mmd_is_the_distance_of_mean_embeddings() -> None:
    draws = np.random.default_rng(1)
    x, y = draws.standard_normal((7, 3)), draws.standard_normal((7, 3)) + 1
    both = [*x, *y]
    squares = [float(((u - v) ** 2).sum()) for u in both for v in both]
    width = float(np.median([one for one in squares if one > 0]))
    sign = [1] * 7 + [-1] * 7
    total = sum(
        sign[i] * sign[j] * np.exp(-float(((both[i] - both[j]) ** 2).sum()) / width) for i in range(14) for j in range(14)
    )  # fmt: skip
    assert _mmd(x, y) == pytest.approx(np.sqrt(total / 49))
    assert _mmd(x, x) == 0.0


@pytest.mark.slow
def test_trials_are_functions_of_their_seed() -> None:
    cell = REPRODUCTIONS["pacfl-gaussians"].cells[0]
    assert gaussians(1, None, cell.settings) == gaussians(1, None, cell.settings) != gaussians(2, None, cell.settings)
    settings = {
        "data": {"source": "digits", "clients": 4, "label_swaps": [[0, 1], [2, 3]]},
        "model": {"name": "mlp", "hidden": 16}, "training": {"rounds": 12, "epochs": 3, "lr": 0.3},
    }  # fmt: skip
    found = label_swap_gap(0, None, settings)
    assert found == label_swap_gap(0, None, settings)
    assert found["gap"] is not None
    assert (found["gap"] > 0) == (found["gap_from_round"] is not None)


def pictures(*clients: tuple[list[float], list[int]]) -> Population:
    """Clients of pictures of one row: each is given by the angles of its pictures in a plane, in degrees, and their labels."""
    data = []
    for number, (turns, labels) in enumerate(clients):
        x = np.stack([np.cos(np.radians(turns)), np.sin(np.radians(turns))], axis=1).reshape(-1, 1, 1, 2)
        y = np.array(labels)
        data.append(ClientData(number, x, y, x[:0], y[:0]))
    return Population("drawn", tuple(data), (0,) * len(data), 10)


def test_angles_of_data_sets_are_those_of_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first singular vector of pictures at 10 and 30 degrees is at 20, the second across it; with p = 2 both span the plane."""
    monkeypatch.setattr(trials, "_population", lambda *given: pictures(([10, 30], [0, 1]), ([60, 40], [0, 1])))
    found = data_set_angles(0, None, {"p": 1})
    assert found == {"smallest_angle": pytest.approx(30.0), "corresponding_angles": pytest.approx(30.0)}
    found = data_set_angles(0, None, {"p": 2})
    assert found == {"smallest_angle": pytest.approx(0.0, abs=1e-5), "corresponding_angles": pytest.approx(60.0)}


def test_angles_of_classes_within_and_between_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four classes at 0, 6, 50 and 60 degrees, of two clients, whose labels are not in the order of the groups."""
    monkeypatch.setattr(trials, "_population", lambda *given: pictures(([0, 50, 0], [3, 1, 3]), ([6, 60], [0, 2])))
    found = class_angles(0, None, {"p": 1, "groups": [[3, 0], [1, 2]]})
    assert found == {"ari": 1.0, "angle_within": pytest.approx((6 + 10) / 2), "angle_between": pytest.approx((50 + 60 + 44 + 54) / 4)}
    found = class_angles(0, None, {"p": 1, "groups": [[3, 1], [0, 2]]})
    assert found["ari"] is not None
    assert found["ari"] < 0.1


def test_cosines_of_representations_against_their_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a random linear model the gradient is the mean of (softmax − one-hot) ⊗ pixels, and of (softmax − one-hot) for the bias."""
    draws = np.random.default_rng(0)
    clients = []
    for number in range(4):
        x, y = draws.random((30, 1, 4, 4)), draws.integers(3, size=30)
        clients.append(ClientData(number, x, y, x[:0], y[:0]))
    people = Population("drawn", tuple(clients), (0,) * 4, 3)
    monkeypatch.setattr(trials, "_population", lambda *given: people)
    model = Model("linear", (1, 4, 4), 3, mean=(0.0,), std=(1.0,))
    anchor = model.init(5)
    weights, bias = anchor[:48].reshape(3, 16), anchor[48:]

    def psi(x: Array, y: Array) -> Array:
        flat = x.reshape(30, 16)
        odds = np.exp(flat @ weights.T + bias)
        errors = (odds / odds.sum(axis=1, keepdims=True) - np.eye(3)[y]) / 30
        gradient = np.concatenate([(errors.T @ flat).ravel(), errors.sum(axis=0)])
        return np.asarray(gradient / np.linalg.norm(gradient))

    for turn in (0, 90):
        turned = [psi(np.rot90(one.x_train, (number if turn else 0), axes=(2, 3)), one.y_train) for number, one in enumerate(clients)]
        for apart, pairs in ((1, ((0, 1), (1, 2), (2, 3), (0, 3))), (2, ((0, 2), (1, 3)))):
            found = anchor_cosines(5, None, {"apart": apart, "turn": turn})
            assert found == {"cosine": pytest.approx(np.mean([turned[i] @ turned[j] for i, j in pairs]), abs=1e-5)}


def test_the_cells_of_the_separation_theorem_follow_its_bounds() -> None:
    """Corollary 1 by equations 19 to 21 at equal noise; where they promise it, every trial is separated."""
    entry = REPRODUCTIONS["cfl-theorem"]
    promised = 0
    for cell in entry.cells:
        k, gamma = cell.settings["k"], cell.settings["gamma"]
        (figure,) = cell.figures
        words = [number.value for number in figure.published]
        inner = 1 - 2 * gamma**2  # H of eq. 20, the least cosine within a group (eq. 21)
        corner = np.pi / (k - 1)
        bounded = gamma < 1 and inner >= np.cos(corner)
        outer = np.cos(corner) * inner + np.sin(corner) * np.sqrt(1 - inner**2) if bounded else 1.0
        assert (words == ["1, by Theorem 1"]) == (inner > outer), cell.label
        if inner > outer:
            promised += 1
            assert all(gaussian_separation(seed, None, cell.settings)["separated"] == 1.0 for seed in range(20))
    assert promised >= 4
    hopeless = {"k": 8, "gamma": 4.0, "d": 100}
    assert sum(gaussian_separation(seed, None, hopeless)["separated"] or 0.0 for seed in range(20)) <= 4


@pytest.mark.slow
def test_the_frontier_of_influence_on_digits() -> None:
    settings = {
        "data": {"source": "digits", "partition": "pathological", "groups": [[0, 1], [2, 3]], "clients": 8},
        "model": {"name": "mlp", "hidden": 16}, "training": {"epochs": 1, "batch_size": 10, "lr": 0.1, "participation": 1.0},
        "algorithm": {"name": "pfedlia", "warm_up": 3, "local_epochs": 10},
    }  # fmt: skip
    found = influence_frontier(0, None, settings)
    assert found["score_same"] is not None
    assert found["score_other"] is not None
    assert found["score_same"] > found["score_other"]  # so 2-means can draw a line between them
    assert found["frontier"] == 1.0


def test_influence_speed_on_digits() -> None:
    found = influence_speed(0, None, {"source": "digits", "samples": 600, "threshold": 0.3, "epochs_at_most": 20})
    exact, lazy = found["exact_seconds"], found["lazy_seconds"]
    assert exact is not None
    assert lazy is not None
    assert found["speedup"] == exact / lazy > 0


# --- the real thing, very small


def test_celeba_runs_on_images_of_three_attributes(tmp_path: Path) -> None:
    """Random pictures around one of three images each, as the file of whoever has CelebA holds them."""
    draws = np.random.default_rng(0)
    faces = draws.random((3, 32, 32, 3))
    arrays: dict[str, Any] = {}
    for part, count in (("train", 300), ("test", 60)):
        labels = np.arange(count) % 3
        arrays[f"y_{part}"] = labels
        arrays[f"x_{part}"] = (255 * (faces[labels] + draws.random((count, 32, 32, 3))) / 2).astype(np.uint8)
    absent = tmp_path / "a"
    with pytest.raises(InputError, match=r"celeba\.npz"):
        reproduce("pacfl-celeba", absent, tmp_path, scale=0.1)
    np.savez(tmp_path / "celeba.npz", **arrays)
    outcome = reproduce("pacfl-celeba", tmp_path / "b", tmp_path, scale=0.1, changes=["training.epochs=1", "training.participation=1.0"])
    assert rows_of(outcome) == {("PACFL", "ari"): 1.0, ("PACFL", "clusters"): 3.0}


def test_femnist_runs_on_files_as_leaf_writes_them(tmp_path: Path) -> None:
    """Three writers of random pixels: that it runs. One-shot keeps updates in span form here, and its checkpoints must hold them."""
    draws = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 3)):
        pixels, labels = draws.random((3, count, 784)).round(2).tolist(), draws.integers(62, size=(3, count)).tolist()
        users = {f"f{i}": {"x": x, "y": y} for i, (x, y) in enumerate(zip(pixels, labels, strict=True))}
        (tmp_path / "femnist" / part).mkdir(parents=True)
        (tmp_path / "femnist" / part / "all_data_0.json").write_text(
            json.dumps({"users": list(users), "user_data": users}), encoding="utf-8"
        )
    changes = ["training.rounds=2", "training.epochs=1", "training.participation=1.0", "model.name=mlp", "model.hidden=8"]
    cells = ["IFCA k=2", "one-shot k=2", "StoCFL", "CFL"]
    outcome = reproduce("femnist", tmp_path / "a", tmp_path, scale=0.01, changes=changes, cells=cells)
    assert all(row.ours is not None for row in outcome.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REQUIRED if name not in ("femnist", "pacfl-celeba")])
def test_scaled_down(name: str, tmp_path: Path) -> None:
    if "CFLPRIV_DATA" not in os.environ:
        pytest.skip("CFLPRIV_DATA names no folder with data sets")
    entry = REPRODUCTIONS[name]
    runs = any(cell.trial is None for cell in entry.cells)
    changes = ["data.samples_per_client=60", "data.test_samples_per_client=20", "model.hidden=16", "training.epochs=1"] if runs else []
    labels = [cell.label for cell in entry.cells if cell.trial is None or not runs]
    wanted = [labels[0], labels[-1]] if runs else labels[:1]
    try:
        outcome = reproduce(name, tmp_path / "a", os.environ["CFLPRIV_DATA"], scale=0.005, changes=changes, cells=wanted)
    except InputError as error:
        if HOW_TO_SET in str(error):
            pytest.skip(str(error))
        raise
    assert not outcome.interrupted
    measured = {row.cell: row.ours for row in outcome.rows if row.ours is not None}
    absent = {row.cell for row in outcome.rows if HOW_TO_SET in row.note}
    assert set(wanted) - absent <= {row.cell for row in outcome.rows if row.ours is not None or row.note == "never"}
    assert np.isfinite(list(measured.values())).all()
    assert (tmp_path / "a" / "picture.svg").is_file() == bool(measured)
