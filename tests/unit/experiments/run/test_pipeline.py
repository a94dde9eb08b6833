"""From a table with categories, dates, blanks and texts to a clustered private run and predictions for new rows."""

import csv
import datetime
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from command_line import in_process

from cflpriv.errors import InputError
from cflpriv.experiments import load_config, parse_config, run_experiment
from cflpriv.experiments.run.export import export_model, models_of_clients
from cflpriv.experiments.run.pipeline import predict, read_model, read_rows

HEADER = ("clinic", "age", "dose", "sex", "admitted", "note", "outcome")
NOTES = ("no complaints today", "pain in the chest since morning", "pain in the leg after a fall")


def patients(count: int, seed: int) -> list[list[object]]:
    """Eight clinics in two groups, where the same signs speak for other outcomes; categories, dates, blanks and texts."""
    draws = np.random.default_rng(seed)
    table: list[list[object]] = []
    for i in range(count):
        age, note = int(draws.integers(18, 90)), NOTES[draws.integers(3)]
        score = (age - 54) / 20 + (0.9 if "chest" in note else -0.3) + 0.2 * draws.normal()
        table.append(
            [
                f"clinic {i % 8}", age if draws.random() > 0.05 else "", f"{draws.normal(5, 2):.2f}",
                ("female", "male", "")[draws.integers(3)],
                (datetime.date(2022, 1, 1) + datetime.timedelta(days=int(draws.integers(700)))).strftime("%d.%m.%Y"),
                f"{note} {draws.integers(9)}", "relapse" if (score > 0) == (i % 2 == 0) else "healthy",
            ]
        )  # fmt: skip
    return table


def csv_of(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str] = HEADER) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the table, its configuration and its run, made by the commands `init` and `run`."""
    folder = tmp_path_factory.mktemp("clinic")
    csv_of(folder / "clinic.csv", patients(640, 0))
    csv_of(folder / "new.csv", [row[:-1] for row in patients(120, 1)], HEADER[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert in_process(patch, "init", "clinic.toml", "--data", "clinic.csv") == 0
        assert in_process(patch, "run", "clinic.toml") == 0
    return folder


def test_three_commands_lead_from_a_raw_table_to_predictions(
    clinic: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(clinic)
    config = load_config("clinic.toml")
    assert [(column.name, column.type) for column in config.data.columns] == [
        ("age", "number"), ("dose", "number"), ("sex", "category"), ("admitted", "date"), ("note", "text"),
    ]  # fmt: skip
    assert (config.protection.sum, config.protection.gram, config.data.scaling and config.data.scaling.per_client) == (
        "secagg",
        ("haar",),
        False,
    )
    summary = json.loads((clinic / "runs" / "clinic" / "summary.json").read_text(encoding="utf-8"))
    assert summary["clusters"] == 2
    assert summary["warnings"] == []
    assert in_process(monkeypatch, "predict", "runs/clinic", "new.csv") == 0
    printed = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    truth = [row[-1] for row in patients(120, 1)]
    assert [row["row"] for row in printed] == [str(number) for number in range(2, 122)]
    right = np.mean([row["prediction"] == outcome for row, outcome in zip(printed, truth, strict=True)])
    assert right > 0.8
    assert abs(right - summary["accuracy_mean"]) < 0.1


def test_what_was_taken_from_the_table_is_declared_public(
    clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table = str(clinic / "clinic.csv")
    assert in_process(monkeypatch, "init", "a.toml", "--data", table) == 0
    printed = capsys.readouterr().out
    assert "label: 'outcome', by its name" in printed
    assert "client: 'clinic' (--client names another)" in printed
    assert "are public from now on: edit those that must not be" in printed
    assert "the run folder keeps what clients send" in printed
    assert in_process(monkeypatch, "init", "--data", table) == 0
    captured = capsys.readouterr()
    assert "public from now on" in captured.err, "the file alone goes to standard output"
    assert captured.out.startswith("# A clustered, private run on clinic.csv")
    for words, line in (
        (["init", "a.toml", "--data", table], "exists"),
        (["init", "b.toml", "--data", "none.csv"], "none.csv: no such file"),
        (["init", "b.toml", "--label", "outcome"], "--label, --client: name columns of a table; give --data"),
        (["init", "b.toml", "--data", table, "--schema"], "give one of them"),
        (["init", "b.toml", "--data", table, "--label", "age"], "column 'age'"),
        (["init", "b.toml", "--data", table, "--algorithm", "crosfit"], "did you mean 'crossfit'?"),
    ):
        assert in_process(monkeypatch, *words) == 2
        assert line in capsys.readouterr().err
    assert not (tmp_path / "b.toml").exists()


def test_the_pipeline_travels_with_an_exported_model(clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, new = clinic / "runs" / "clinic", clinic / "new.csv"
    model = str(tmp_path / "m.safetensors")
    assert in_process(monkeypatch, "export", str(run), "--model", "0", "--out", model) == 0
    assert in_process(monkeypatch, "predict", model, str(new), "--out", str(tmp_path / "m.csv")) == 0
    assert in_process(monkeypatch, "predict", str(run), str(new), "--model", "0", "--out", str(tmp_path / "run.csv")) == 0
    tables = {(tmp_path / f"{name}.csv").read_text(encoding="utf-8") for name in ("m", "run")}
    assert len(tables) == 1
    pipeline, state = read_model(tmp_path / "m.safetensors")
    assert pipeline.classes == ("healthy", "relapse")
    rows = read_rows(new)
    shuffled = csv_of(tmp_path / "shuffled.csv", [row[::-1] for row in ([r[0], *r[1:-1]] for r in patients(120, 1))], HEADER[-2::-1])
    assert predict(pipeline, state, read_rows(shuffled)).to_csv() == predict(pipeline, state, rows).to_csv(), "columns go by their names"
    assert predict(pipeline, state, rows.only([5])).classes == (predict(pipeline, state, rows).classes[5],), "a row by itself"
    with pytest.raises(InputError, match=r"m\.pt: expected a run folder, or a file that ends in \.safetensors"):
        read_model(tmp_path / "m.pt")
    whole = (tmp_path / "m.safetensors").read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", whole.replace(b"range", b"ragne", 1), whole.replace(b"mlp", b"mlq")):
        (tmp_path / "m.safetensors").write_bytes(damaged)
        with pytest.raises(InputError, match=r"m\.safetensors|model"):
            read_model(tmp_path / "m.safetensors")


def column_removed(column: int) -> Callable[[list[list[object]]], list[list[object]]]:
    return lambda table: [[*row[:column], *row[column + 1 :]] for row in table]


@pytest.mark.parametrize(
    ("header", "change", "words"),
    [
        (HEADER[:4] + HEADER[5:-1], column_removed(4), "new.csv: has no column 'admitted' (data.columns)"),
        ((*HEADER[:-1], "height"), lambda table: [[*row, 1] for row in table], "column 'height' is not in data.columns"),
        (
            HEADER[:-1],
            lambda table: [[*row[:3], "femal", *row[4:]] for row in table],
            "row 2, column 'sex': 'femal' is not in its categories",
        ),
        (
            HEADER[:-1],
            lambda table: [[*row[:4], "2022-05-31", *row[5:]] for row in table],
            "row 2, column 'admitted': '2022-05-31' is not a date",
        ),
        (HEADER[:-1], lambda table: [["clinic 9", *row[1:]] for row in table], "client 'clinic 9': is not one of the run"),
        (HEADER[1:-1], column_removed(0), "--model: there are several; known are 0, 1"),
        (HEADER[:-1], lambda table: [], "new.csv: has no rows"),
    ],
)
def test_rows_that_do_not_fit_are_named_in_one_line(
    header: Sequence[str], change: Callable[[list[list[object]]], list[list[object]]], words: str, clinic: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    new = csv_of(tmp_path / "new.csv", change([row[:-1] for row in patients(5, 1)]), header)
    assert in_process(monkeypatch, "predict", str(clinic / "runs" / "clinic"), str(new)) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_values_outside_the_public_ranges_are_counted(
    clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = csv_of(tmp_path / "new.csv", [[row[0], 900, *row[2:-1]] for row in patients(5, 1)], HEADER[:-1])
    assert in_process(monkeypatch, "predict", str(clinic / "runs" / "clinic"), str(new)) == 0
    assert "5 values are outside the ranges of the model's training" in capsys.readouterr().err


def test_a_model_of_no_table_predicts_no_rows(
    clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_experiment(parse_config({"data": {"clients": 4}, "training": {"rounds": 1}, "algorithm": {"name": "fedavg"}}), tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "m.safetensors")
    for model, words in ((tmp_path / "run", "is no run on a table"), (tmp_path / "m.safetensors", "has no pipeline")):
        assert in_process(monkeypatch, "predict", str(model), str(clinic / "new.csv")) == 2
        assert words in capsys.readouterr().err
    assert in_process(monkeypatch, "predict", str(tmp_path / "m.safetensors"), str(clinic / "new.csv"), "--client", "0") == 2


# --- tables without a schema --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table of numbers, standardised by each client: the clients' values have other means."""
    folder = tmp_path_factory.mktemp("plain")
    draws = np.random.default_rng(0)
    rows = [[c, f"{a + 50 * c:.4f}", f"{b:.4f}", int(a + b > 0)] for c in range(4) for a, b in draws.normal(size=(60, 2))]
    table = csv_of(folder / "a.csv", rows, ("site", "a", "b", "y"))
    data = {"source": "csv", "paths": [str(table)], "partition": "given", "client_column": "site", "label_column": "y"}
    tree = {
        "data": data, "training": {"rounds": 8, "lr": 0.3}, "algorithm": {"name": "fedavg"}, "model": {"hidden": 8}, "run": {"seed": 1},
    }  # fmt: skip
    run_experiment(parse_config(tree), folder / "run")
    return folder


def fresh(folder: Path, client: int, count: int = 40) -> tuple[Path, list[str]]:
    """New rows of a client, and their labels."""
    values = np.random.default_rng(9).normal(size=(count, 2))
    rows = [[f"{a + 50 * client:.4f}", f"{b:.4f}"] for a, b in values]
    return csv_of(folder / "new.csv", rows, ("a", "b")), [str(int(a + b > 0)) for a, b in values]


def test_a_model_that_standardises_by_clients_needs_their_statistics(plain: Path, tmp_path: Path) -> None:
    new, truth = fresh(tmp_path, 3)
    export_model(plain / "run", tmp_path / "shared.safetensors")
    pipeline, state = read_model(tmp_path / "shared.safetensors")
    with pytest.raises(InputError, match="give a table of the client's rows"):
        predict(pipeline, state, read_rows(new))
    own = csv_of(tmp_path / "own.csv", [row for row in csv_rows(plain / "a.csv") if row[0] == "3"], ("site", "a", "b", "y"))
    by_rows = predict(pipeline, state, read_rows(new), own)
    assert np.mean(np.array(by_rows.classes) == truth) > 0.85
    export_model(plain / "run", tmp_path / "own.safetensors", client=3)
    theirs, parameters = read_model(tmp_path / "own.safetensors")
    assert np.mean(np.array(predict(theirs, parameters, read_rows(new)).classes) == truth) > 0.85
    with pytest.raises(InputError, match="leave it out"):
        predict(theirs, parameters, read_rows(new), own)
    used = models_of_clients(plain / "run", ["3", "0"])
    assert used["3"].pipeline is not None
    assert used["0"].pipeline is not None
    assert used["3"].pipeline.mean[0] - used["0"].pipeline.mean[0] == pytest.approx(150, abs=2)
    named = predict(used["3"].pipeline, used["3"].state, read_rows(new))
    assert np.mean(np.array(named.classes) == truth) > 0.85
    wrong = predict(used["0"].pipeline, used["0"].state, read_rows(new))
    assert wrong.clipped == 40, "by another client's mean all rows are far away"


def csv_rows(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


@pytest.mark.parametrize(
    ("header", "words"),
    [(("a",), r"has no column 'b' \(a feature of the model\)"), (("a", "b", "c"), "column 'c' is no feature of the model, which has a, b")],
)
def test_columns_of_a_plain_table_must_be_those_of_the_model(header: Sequence[str], words: str, plain: Path, tmp_path: Path) -> None:
    exported = models_of_clients(plain / "run", ["3"])["3"]
    assert exported.pipeline is not None
    new = csv_of(tmp_path / "new.csv", [[1] * len(header)], header)
    with pytest.raises(InputError, match=words):
        predict(exported.pipeline, exported.state, read_rows(new))
