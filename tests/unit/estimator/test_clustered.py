"""The estimator: scikit-learn's own checks, the configuration both ways, predictions against the run's own scores, files, frames."""

import html
import json
import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from checkout import ROOT
from sklearn.base import clone
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import KFold, cross_validate
from sklearn.utils.estimator_checks import parametrize_with_checks

from cflpriv import ClusteredFL, InputError, Protection, load_config
from cflpriv.errors import CflprivWarning, DataWarning
from cflpriv.estimator import clustered
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.report.run_names import adversary_place
from cflpriv.types import Array

CLIENTS, ROWS = 12, 40
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.toml")) if path.name != "pyproject.toml" and path.parent.name != "sweeps"]


def arrays(seed: int = 0) -> tuple[Array, Array, Array]:
    """Features, labels and clients: the label is the sign of the first feature, and its opposite for every other client."""
    draws = np.random.default_rng(seed)
    x, owners = draws.normal(size=(CLIENTS * ROWS, 3)), np.repeat(np.arange(CLIENTS), ROWS)
    return x, np.where((x[:, 0] > 0) ^ (owners % 2 == 1), 5, 3), owners


def columns(seed: int = 0) -> dict[str, list[Any]]:
    x, y, owners = arrays(seed)
    named = {name: x[:, i].tolist() for i, name in enumerate("abc")}
    return {**named, "device": [f"d{owner:02}" for owner in owners], "status": ["on" if label == 5 else "off" for label in y]}


def small(algorithm: Any = "crossfit", **others: Any) -> ClusteredFL:
    return ClusteredFL(algorithm, **{"rounds": 6, "verbose": False, **others})


@pytest.fixture(scope="module")
def fitted() -> ClusteredFL:
    return small(record="full").fit(columns(), client="device", label="status")


# --- conventions


@parametrize_with_checks([small(rounds=2, epochs=1)], legacy=False)  # type: ignore[untyped-decorator]
def test_conventions_of_scikit_learn(estimator: ClusteredFL, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::cflpriv.errors.CflprivWarning")
def test_every_example_is_an_estimator_and_back(path: Path) -> None:
    config = load_config(path)
    for estimator in (ClusteredFL.from_config(path), ClusteredFL.from_config(config), clone(ClusteredFL.from_config(config))):
        assert estimator.to_config() == config
        assert estimator.to_config().to_toml() == config.to_toml()


def test_sections_are_objects_or_keys_and_short_names_win() -> None:
    objects = small(protection=Protection(gram=("haar",), sum="secagg"), lr=0.3, training={"momentum": 0.5, "lr": 0.7}, seed=4)
    keys = small(protection={"gram": ["haar"], "sum": "secagg"}, training={"momentum": 0.5}, run={"seed": 4}).set_params(lr=0.3)
    assert objects.to_config() == keys.to_config()
    assert (objects.to_config().training.lr, objects.to_config().model.hidden) == (0.3, 32)
    assert small({"name": "ifca", "k": 3}, model="linear").to_config().hyper["k"] == 3
    for wrong, words in (
        ({"algorithm": "crosfit"}, "did you mean 'crossfit'"),
        ({"protection": {"summ": 1}}, "did you mean 'sum'"),
        ({"lr": -1.0}, r"lr = -1\.0"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            small(**{"algorithm": "crossfit", **wrong}).to_config()


def test_a_configuration_says_the_same_from_toml_and_from_python(tmp_path: Path) -> None:
    """The run of `fit` is that of `cflpriv run` on the same table in a file."""
    table = columns()
    lines = [",".join(table), *(",".join(map(repr, cells)).replace("'", "") for cells in zip(*table.values(), strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    estimator = small().fit(table, client="device", label="status")
    tree = {"source": "csv", "paths": [str(tmp_path / "t.csv")], "partition": "given", "client_column": "device", "label_column": "status"}
    summary = run_experiment(estimator.to_config().with_("data", **parse_config({"data": tree}).data.__dict__), tmp_path / "run")
    same = {key for key in summary if not re.search("seconds|dataset", key)}
    assert {key: summary[key] for key in same} == {key: estimator.summary_[key] for key in same}
    again = ClusteredFL.from_config(tmp_path / "run" / "config.toml", verbose=False).fit(table)  # its columns are the configuration's
    np.testing.assert_array_equal(again.predict(table), estimator.predict(table))


# --- what it finds and predicts


def test_it_finds_the_groups_and_predicts_rows_of_known_clients(fitted: ClusteredFL) -> None:
    assert (fitted.n_clusters_, len(set(fitted.labels_[::2])), fitted.labels_.tolist()) == (
        2,
        1,
        [fitted.labels_[0], fitted.labels_[1]] * 6,
    )
    assert fitted.p_value_ < 0.01
    assert (fitted.classes_.tolist(), fitted.clients_[:2].tolist(), fitted.epsilon_) == (["off", "on"], ["d00", "d01"], None)
    table = columns(1)
    score = fitted.score(table, client="device", label="status")
    assert 0.75 < score == balanced_accuracy_score(table["status"], fitted.predict(table))
    np.testing.assert_allclose(fitted.predict_proba(table).sum(1), 1)
    shuffled = np.random.default_rng(0).permutation(len(table["a"]))
    mixed = {name: [cells[row] for row in shuffled] for name, cells in reversed(table.items())}
    np.testing.assert_array_equal(fitted.predict(mixed), fitted.predict(table)[shuffled])


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "ditto", "per_fedavg", "lg_fedavg", "local", "stocfl", {"name": "ifca", "k": 2}, "fedsoft"]
)
def test_predictions_are_those_that_the_run_was_scored_by(algorithm: Any) -> None:
    x, y, owners = arrays()
    estimator = small(algorithm, rounds=3, run={"insecure_test_entropy": True}).fit(x, y, client=owners)
    assert estimator.classes_.tolist() == [3, 5]
    scores = json.loads((estimator.folder_ / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[-1])["per_client"]["accuracy"]
    assert len(set(scores)) > 2
    for client, score in zip(estimator._population.clients, scores, strict=True):
        mean, std = estimator._population.moments[client.id]
        rows = (client.x_test * 10 - 5) * std + mean  # the values of the table, unless they were clipped to -5..5
        found = estimator.predict(rows.reshape(len(rows), -1), client=np.full(len(rows), client.id))
        assert np.mean(found == estimator.classes_[client.y_test]) == pytest.approx(score)


@pytest.mark.parametrize(
    ("algorithm", "protection", "clusters"),
    [("ditto", "none", 1), ("fedavg", "none", 1), ({"name": "ifca", "k": 2}, "secagg-oblivious", 2)],
    ids=str,
)  # fmt: skip
def test_clusters_are_those_of_the_models_where_the_server_knows_none(algorithm: Any, protection: str, clusters: int) -> None:
    table = columns()
    estimator = small(algorithm, protection={"sum": protection}).fit(table, client="device", label="status")
    assert estimator.n_clusters_ == clusters
    if clusters == 2:
        assert len(set(estimator.labels_[::2])) == len(set(estimator.labels_[1::2])) == 1


def test_the_model_of_a_cluster_predicts_new_clients(fitted: ClusteredFL) -> None:
    table, even = columns(1), [owner % 2 == 0 for owner in np.repeat(np.arange(CLIENTS), ROWS)]
    rows = {name: [cell for cell, here in zip(cells, even, strict=True) if here] for name, cells in table.items()}
    new = {**rows, "device": [f"new {name}" for name in rows["device"]]}
    own, other = int(fitted.labels_[0]), int(fitted.labels_[1])
    assert fitted.score(new, client="device", label="status", cluster=own) > 0.75
    assert fitted.score(new, client="device", label="status", cluster=other) < 0.25
    moved = {name: 3 * np.array(cells) + 5 if name in "abc" else cells for name, cells in new.items()}  # clients standardise their own rows
    np.testing.assert_allclose(fitted.predict_proba(moved, cluster=own), fitted.predict_proba(new, cluster=own), atol=1e-5)
    x, y, owners = arrays()
    shared = small("fedavg", rounds=1, data={"standardise": "constants", "feature_mean": [0.0], "feature_std": [1.0]})
    shared.fit(x, y, client=owners)
    np.testing.assert_array_equal(shared.predict_proba(x[:1], cluster=0), shared.predict_proba(x[:1]))


def test_a_model_of_all_needs_no_client_unless_statistics_are_its_own() -> None:
    x, y, owners = arrays()
    public = {"standardise": "constants", "feature_mean": (0.0,), "feature_std": (1.0,)}
    np.testing.assert_array_equal(
        (shared := small("fedavg", rounds=1, data=public).fit(x, y, client=owners)).predict(x), shared.predict(x, client=owners)
    )
    for algorithm, data in (("ditto", public), ("fedavg", {})):
        with pytest.raises(InputError, match="client: is needed"):
            small(algorithm, rounds=1, data=data).fit(x, y, client=owners).predict(x)


def test_the_client_column_is_metadata() -> None:
    x, y, owners = arrays()
    with sklearn.config_context(enable_metadata_routing=True):
        folds = KFold(2, shuffle=True, random_state=0)
        scores = cross_validate(small(), x, y, params={"client": owners}, cv=folds, error_score="raise")["test_score"]
    assert scores.min() > 0.7


def test_texts_dates_and_blanks_get_a_schema() -> None:
    table, count = columns(), CLIENTS * ROWS
    table["b"] = [None if row % 7 == 0 else value for row, value in enumerate(table["b"])]
    table |= {"city": ["Oslo", "", "Bergen", "Oslo"] * (count // 4), "when": [f"2024-0{1 + row % 9}-10" for row in range(count)]}
    estimator = small("fedavg", rounds=1).fit(table, client="device", label="status")
    assert {column.name: column.type for column in estimator.config_.data.columns} == {
        "a": "number", "b": "number", "c": "number", "city": "category", "when": "date",
    }  # fmt: skip
    assert len(estimator.predict(table)) == count
    with pytest.raises(InputError, match="'Rome' is not in its categories"):
        estimator.predict({**table, "city": ["Rome"] * count})


@pytest.mark.parametrize("package", ["pandas", "polars", "pyarrow"])
def test_frames_of_any_package(package: str, fitted: ClusteredFL) -> None:
    module = pytest.importorskip(package)
    frame = (module.table if package == "pyarrow" else module.DataFrame)(columns(1))
    np.testing.assert_array_equal(fitted.predict(frame), fitted.predict(columns(1)))
    assert fitted.score(frame, label="status") == fitted.score(columns(1), label="status")


def test_columns_that_are_left_out_are_named() -> None:
    table = columns()
    count = len(table["a"])
    table |= {"name": [f"n{row}" for row in range(count)], "weight": [f"{row / 7:.2f} kg" for row in range(count)], "e": [[1, 2]] * count}
    with pytest.warns(CflprivWarning, match="is left out"):
        summary = small("fedavg", rounds=1).fit(table, client="device", label="status").summary_
    left_out = [doubt for doubt in summary["warnings"] if "is left out" in doubt]
    assert [doubt.split(":")[0] for doubt in left_out] == ["column 'weight' is left out", "column 'e' is left out"]
    assert any("column 'name': all values differ: an identifier" in note for note in summary["notes"])


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_missing_cells_and_odd_frames_of_any_package(package: str) -> None:
    module = pytest.importorskip(package)
    table = columns()
    count = len(table["a"])
    gaps = [None if row % 7 == 0 else row % 50 for row in range(count)]
    frame = module.DataFrame({**table, "gaps": module.array(gaps, "Int64") if package == "pandas" else gaps})
    estimator = small("fedavg", rounds=1).fit(frame, client="device", label="status")
    (column,) = [column for column in estimator.config_.data.columns if column.name == "gaps"]
    assert (column.type, column.blank) == ("number", "middle")
    assert len(estimator.predict(frame)) == count
    if package == "polars":
        with pytest.raises(InputError, match=r"X: a LazyFrame has no rows yet; collect\(\) gives a data frame"):
            small().fit(frame.lazy(), client="device", label="status")
    else:
        twice = module.concat([frame, module.DataFrame({"a": [0.0] * count})], axis=1)
        for odd, words in ((frame.rename(columns={"a": 0}), "the column 0 is not named by a text"), (twice, "X: .*'a' 2 times")):
            with pytest.raises(InputError, match=words):
                small().fit(odd, client="device", label="status")


def test_a_dataset_of_hugging_face_is_a_frame() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: the extra `huggingface` brings it")
    table = {name: list(cells) for name, cells in columns().items()}
    estimator = small("fedavg", rounds=1).fit(datasets.Dataset.from_dict(table), client="device", label="status")
    np.testing.assert_array_equal(estimator.predict(datasets.Dataset.from_dict(table)), estimator.predict(table))


def _with_a_single_row(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The table with a row more, of a client that has no other."""
    return {name: [*cells, cells[0] if name in "abc" else "on"] for name, cells in table.items()}


def test_what_does_not_fit_is_refused_by_name(fitted: ClusteredFL) -> None:
    table = columns()
    without = {name: cells for name, cells in table.items() if name != "device"}
    for call, words in (
        (
            lambda: fitted.predict({**table, "device": ["x"] * len(table["a"])}),
            r"client 'x': was not there in fit.*predict\(rows, cluster=K\) takes the model of cluster K, 0 to 1",
        ),
        (lambda: fitted.predict(table, cluster=2), "cluster = 2: there are 0 to 1"),
        (lambda: fitted.predict({name: cells[:1] for name, cells in table.items()}, cluster=0), "1 row, and 2 are needed"),
        (lambda: fitted.predict({name: [] for name in table}), "X: has no rows"),
        (lambda: small("fedavg", rounds=1).fit(*arrays()[:2]).predict(np.array([["a", "b", "c"]])), "X: dtype='numeric'"),
        (
            lambda: small().fit(_with_a_single_row(table), client="device", label="status"),
            r"^client 12 \('on'\): 1 sample cannot be split into 2 halves; leave the client out",
        ),
        (lambda: small(data={"label_type": "number"}).fit(table, client="device", label="a"), "for a regression.*cflpriv run"),
        (lambda: Protection(gram="haar"), r"protection\.gram = 'haar': expected several names, such as \('haar',\)"),  # type: ignore[arg-type]
        (lambda: fitted.predict(without), "client: is needed"),
        (lambda: fitted.predict({name: cells for name, cells in table.items() if name != "b"}), "has no column 'b'"),
        (lambda: fitted.predict(without, client=["d00"]), r"client: has shape \(1,\)"),
        (lambda: small().fit(table, client="nobody", label="status"), "client='nobody': is no column; there are a, b, c, device, status"),
        (lambda: small().fit(table, client="device"), "needs labels"),
        (lambda: small().fit({**table, "status": [["x"]] * len(table["a"])}, client="device", label="status"), r"row 1.*\['x'\] is a list"),
        (lambda: small().fit({**table, "a": [1.0]}, client="device", label="status"), "different lengths"),
        (lambda: small().fit(table, table["status"], label="status"), "y is given, too"),
        (lambda: small(data={"source": "digits", "partition": "iid"}).fit(table, label="status"), "fit takes a table"),
        (lambda: small("fedavg", rounds=1).fit(table, client="device", label="status").audit(), "payloads were not recorded"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            call()
    x, y, _ = arrays()
    with pytest.raises(ValueError, match="Unknown label type"):
        small().fit(x, x[:, 0])
    alone = small("fedavg", rounds=1).fit(x, y)
    np.testing.assert_array_equal(alone.predict(x), alone.predict(x, client=np.zeros(len(x), int)))


@pytest.mark.filterwarnings("ignore::cflpriv.errors.DataWarning")
def test_rows_without_clients_are_warned_of_once_with_the_columns_that_could_name_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clustered, "_SHOWN", set())
    table = columns()
    without = {name: cells for name, cells in table.items() if name != "device"}
    notes = [small("fedavg", rounds=1).fit(X, label="status").summary_["notes"][0] for X in (table, without, table, without)]
    assert all(line.startswith("no client is given, so all rows are of one client") for line in notes)
    assert ["client= could be 'device'" in line for line in notes] == [True, False, True, False]
    assert [record.getMessage() for record in caplog.records if "no client is given" in record.getMessage()] == notes[:2]
    named = small("fedavg", rounds=1).fit(table, client="device", label="status")
    assert not any("no client is given" in line for line in named.summary_["notes"])


def test_a_doubt_about_columns_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustered, "_SHOWN", set())
    table = {**columns(), "weight": [f"{row / 7:.2f} kg" for row in range(CLIENTS * ROWS)]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fits = [small("fedavg", rounds=1).fit(table, client="device", label="status") for _ in range(3)]
    shown = [str(warning.message) for warning in caught if issubclass(warning.category, CflprivWarning)]
    assert shown
    assert len(set(shown)) == len(shown)
    assert all(set(shown) <= set(each.summary_["warnings"]) for each in fits)


def test_a_note_on_doubtful_data_is_a_warning_once_and_stays_in_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustered, "_SHOWN", set())
    table = columns()
    own = [device == table["device"][0] for device in table["device"]]
    cells = np.random.default_rng(0).normal(50, 5, len(own)).round(2)
    table = {**table, "weight": np.where(own, 1000 * cells, cells).tolist(), "twice": np.where(own, 1000 * cells, cells).tolist()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fits = [small("fedavg", rounds=1).fit(table, client="device", label="status") for _ in range(2)]
    shown = [str(warning.message) for warning in caught if issubclass(warning.category, DataWarning)]
    assert len(shown) == len(set(shown))
    assert any("columns 'weight' and 'twice' are equal" in line for line in shown), shown
    assert any("column 'weight'" in line and "powers of ten" in line for line in shown), shown
    for each in fits:
        assert set(shown) <= set(each.summary_["notes"])
    assert not any("own table" in line for line in shown)


def test_a_fit_that_fails_leaves_the_last_one() -> None:
    estimator = small("fedavg", rounds=1).fit(columns(), client="device", label="status")
    before = estimator.predict(columns())
    with pytest.raises(InputError):
        estimator.fit({"other": [1.0, 2.0]}, client=[0, 1])
    np.testing.assert_array_equal(estimator.predict(columns()), before)


# --- files, pictures, reports


def test_what_was_saved_predicts_the_same(fitted: ClusteredFL, tmp_path: Path) -> None:
    fitted.save(tmp_path / "fl")
    assert {path.suffix for path in (tmp_path / "fl").iterdir()} == {".json", ".safetensors", ".toml"}
    loaded = ClusteredFL.load(tmp_path / "fl")
    np.testing.assert_array_equal(loaded.predict_proba(columns(1)), fitted.predict_proba(columns(1)))
    for name in ("classes", "clients", "labels", "n_clusters", "p_value", "epsilon", "n_features_in", "feature_names_in", "summary"):
        np.testing.assert_equal(getattr(loaded, f"{name}_"), getattr(fitted, f"{name}_"))
    assert clone(loaded).to_config().training == fitted.to_config().training
    with pytest.raises(InputError, match="is not empty"):
        fitted.save(tmp_path / "fl")
    with pytest.raises(InputError, match="an estimator that was loaded has none"):
        loaded.audit()
    assert loaded.report(tmp_path / "report.html").path.is_file()
    loaded.folder_ = tmp_path / "removed"
    with pytest.raises(InputError, match="the run folder is not there any more"):
        loaded.report()
    x, y, owners = arrays()
    numbers = small("fedavg", rounds=1).fit(x, y, client=owners)
    numbers.save(tmp_path / "numbers")
    np.testing.assert_array_equal(ClusteredFL.load(tmp_path / "numbers").predict(x, client=owners), numbers.predict(x, client=owners))


@pytest.mark.parametrize("damage", ["missing", "cut", "version", "model", "number", "pipeline", "labels", "columns", "summary"])
def test_damaged_files_are_named(fitted: ClusteredFL, tmp_path: Path, damage: str) -> None:
    fitted.save(tmp_path / "fl")
    path = tmp_path / "fl" / "estimator.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    changes: dict[str, Any] = {
        "version": {"version": 9}, "number": {"of_clients": {name: [7, text] for name, (_, text) in tree["of_clients"].items()}},
        "pipeline": {"of_clients": {name: [0, "{}"] for name in tree["of_clients"]}}, "columns": {"columns": {"client": "device"}},
        "labels": {"labels": {"kind": "i", "values": [-1] * CLIENTS}}, "summary": {"summary": 3},
    }  # fmt: skip
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    elif damage == "model":
        shutil.copyfile(path, tmp_path / "fl" / "model_0.safetensors")
    else:
        path.write_text(json.dumps({**tree, **changes[damage]}), encoding="utf-8")
    with pytest.raises(InputError, match=r"model_0\.safetensors" if damage == "model" else r"estimator\.json") as caught:
        ClusteredFL.load(tmp_path / "fl")
    assert "\n" not in str(caught.value)


@pytest.mark.slow  # 5 s, of which 4 are imports
def test_pictures_and_pages(fitted: ClusteredFL, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert fitted.plot_clusters(axes) is axes
    assert [label.get_text() for label in axes.get_xticklabels()][:2] == ["d00", "d02"]
    assert axes.get_title() == "12 clients in 2 clusters"
    axes.figure.draw_without_rendering()
    assert axes.xaxis.label.get_window_extent().y0 >= 0  # not cut off
    assert fitted.plot_rounds(Figure().subplots()).get_xlabel() == "round"
    page = fitted.report(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!")
    assert page._repr_html_().startswith("<iframe srcdoc=")
    assert "cluster 1, 6 clients" in fitted._repr_html_()
    assert "label inference" in fitted.audit(["label_inference"])._repr_html_()


def test_a_report_gives_python_lines_which_run(fitted: ClusteredFL, tmp_path: Path) -> None:
    page = fitted.report(tmp_path / "report.html").path.read_text(encoding="utf-8")
    page = re.sub("</?span>", "", page)  # each word of a line is one, and breaks as a whole
    assert not re.search("cflpriv (run|advise|audit) ", html.unescape(page))
    lines = {html.unescape(line) for line in re.findall(r"<code>(ClusteredFL.*?)</code>", page)}
    assert len(lines) > 1
    for line in lines:
        again = eval(line, {"ClusteredFL": ClusteredFL, "load_config": load_config, "fl": fitted, "rows": columns()})
        assert again.config_ != fitted.config_


def test_groups_that_nobody_knows_are_called_unknown(fitted: ClusteredFL) -> None:
    notes = {cell.note for cell in fitted.audit(["cluster_identity", "likeness"])}
    assert any(note.startswith("true groups unknown") for note in notes)
    assert not any("one true group" in note for note in notes)
    page = fitted.report().path.read_text(encoding="utf-8")
    assert "leaves coloured by cluster; true groups unknown" in page


def test_a_command_on_a_run_of_a_frame_names_the_estimator(fitted: ClusteredFL) -> None:
    with pytest.raises(InputError, match=r"ClusteredFL\.fit takes them again, and ClusteredFL\.load"):
        run_experiment(fitted.config_, fitted.folder_.parent / "again")


def test_an_audit_has_figures_and_verdicts_and_prints_nothing(
    fitted: ClusteredFL, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cflpriv"):
        found = fitted.audit(["label_inference"])
    assert any(record.name == "cflpriv" and "audit" in record.getMessage() for record in caplog.records)
    assert capsys.readouterr().out == ""
    assert {cell.attack for cell in found} == {"label_inference"}
    assert set(map(len, found.table.values())) == {len(found)}
    named = [verdict.partition(":")[0] for verdict in found.verdicts]
    assert named == sorted({cell.adversary for cell in found}, key=adversary_place), "who sees least comes first"


def test_progress_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    estimator = small("fedavg", rounds=2, verbose=True)
    estimator.fit(columns(), client="device", label="status")
    assert capsys.readouterr().out.strip() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    estimator.fit(columns(), client="device", label="status")
    assert "2/2" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::cflpriv.errors.DataWarning")
def test_what_a_run_warns_of_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    table = columns()
    table["status"] = ["on" if value > 1 else "off" for value in table["a"]]
    estimator = small("fedavg", rounds=1, lr=1e-9).fit(table, client="device", label="status")
    assert estimator.summary_["warnings"]
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING and record.name == "cflpriv"]
    assert set(estimator.summary_["warnings"]) <= set(logged)


def test_a_column_of_times_is_no_feature_and_new_rows_need_none(tmp_path: Path) -> None:
    table = {**columns(), "when": [f"2024-01-{1 + row % ROWS % 28:02}" for row in range(CLIENTS * ROWS)]}
    fitted = small("fedavg", data={"time_column": "when"}).fit(table, client="device", label="status")
    assert fitted.config_.data.columns == ()
    new = {name: cells[:5] for name, cells in table.items() if name != "status"}
    without = {name: cells for name, cells in new.items() if name != "when"}
    assert fitted.predict(new).tolist() == fitted.predict(without).tolist()
    fitted.save(tmp_path / "fl")
    assert ClusteredFL.load(tmp_path / "fl").predict(without).tolist() == fitted.predict(new).tolist()
