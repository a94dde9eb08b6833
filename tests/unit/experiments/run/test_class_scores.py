"""Scores by class of runs: what a row, a summary, the console and the report have, and the warning that a run means nothing."""

import csv
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score
from small_runs import configured

import cflpriv
from cflpriv.class_counts import FULL
from cflpriv.console import row_text, summary_text
from cflpriv.errors import InputError
from cflpriv.experiments import advance, finish, run_experiment, start
from cflpriv.experiments.config.callbacks import Callback
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.run.class_scores import class_scores, warnings_of
from cflpriv.experiments.run.verify import verify
from cflpriv.plugins import METRICS
from cflpriv.types import Array, ClientData, Population

SMALL: dict[str, Any] = {
    "data": {"clients": 6},
    "model": {"name": "linear"},
    "training": {"rounds": 5, "lr": 0.5},
    "algorithm": {"name": "fedavg"},
}
small_config = partial(configured, SMALL)


def scene(signal: float = 3.0, share: float = 0.82, clients: int = 6, classes: int = 2) -> Population:
    """Clients of one imbalanced data set: class 0 has `share` of the samples, and its mean is `signal` from that of the others."""
    rng = np.random.default_rng(3)

    def samples(count: int) -> tuple[Array, Array]:
        y = np.where(rng.random(count) < share, 0, rng.integers(1, classes, count))
        x = rng.standard_normal((count, 4)) + signal * y[:, None]
        return x, y

    made = [ClientData(i, *samples(100), *samples(60)) for i in range(clients)]
    return Population("imbalanced", tuple(made), (0,) * clients, classes, class_names=tuple(f"c{i}" for i in range(classes)))


class Lines(Callback):
    def __init__(self) -> None:
        self.lines, self.summary = list[str](), dict[str, Any]()

    def on_line(self, line: str) -> None:
        self.lines.append(line)

    def on_end(self, summary: Any) -> None:
        self.summary = dict(summary)


def test_a_row_and_a_summary_have_the_scores_of_all_test_samples() -> None:
    population = scene()
    run = start(small_config(), population=population)
    for _ in range(5):
        row = advance(run)
    model = run.simulated.peek(0, run.algorithm.serve(run.state).params["model"])
    module = run.config.model_for(population)
    x, y = (np.concatenate([getattr(client, part) for client in population.clients]) for part in ("x_test", "y_test"))
    predictions = module.load(model)(module.inputs(x)).argmax(1).numpy()
    summary = finish(run)
    for scores in (row, summary):
        assert scores["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, predictions))
        assert scores["macro_f1"] == pytest.approx(f1_score(y, predictions, average="macro"))
        assert scores["majority_accuracy"] == pytest.approx(np.mean(y == 0))
        assert scores["majority_balanced_accuracy"] == 0.5
        assert scores["local_balanced_accuracy"] > 0.9
        assert np.sum(scores["by_class"]["counts"]) == len(y)
        assert scores["by_class"]["recall"] == pytest.approx([np.mean(predictions[y == k] == k) for k in (0, 1)])
    assert summary["warnings"] == []
    assert f"(balanced {100 * row['balanced_accuracy']:.1f} %)" in row_text(row)
    assert f"always the majority class: accuracy {100 * row['majority_accuracy']:.1f} %, balanced 50.0 %" in summary_text(summary)


@pytest.mark.parametrize(("signal", "lr", "flagged"), [(3.0, 0.5, False), (0.0, 0.5, True)])
def test_a_run_that_learned_nothing_says_so_in_summary_console_report_tables_and_callbacks(
    tmp_path: Path, signal: float, lr: float, flagged: bool
) -> None:
    watcher, printed = Lines(), list[str]()
    config = small_config(training={"lr": lr}, model={"init_scale": 0.0})
    population = scene(signal)
    summary = run_experiment(config, tmp_path / "run", population=population, report=printed.append, callbacks=[watcher])
    words = ("learned nothing that tells classes apart", "is hardly better than always predicting the majority class")
    assert any(word in line for line in summary["warnings"] for word in words) == flagged
    assert any(line.startswith("warning: ") and any(word in line for word in words) for line in printed) == flagged
    assert any(any(word in line for word in words) for line in watcher.lines) == flagged
    assert watcher.summary["warnings"] == summary["warnings"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["warnings"] == summary["warnings"]
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert any(word in page for word in words) == flagged
    assert "Taken for" in page
    assert ("Learned nothing" in page) == flagged
    with (tmp_path / "run" / "results.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert bool(row["warnings"]) == flagged
    assert float(row["balanced_accuracy"]) == summary["balanced_accuracy"]
    assert verify(tmp_path / "run").problems == ()


def test_a_run_of_no_rounds_has_trained_nothing_and_is_not_blamed() -> None:
    summary = finish(start(small_config(training={"rounds": 0}), population=scene()))
    assert summary["warnings"] == []


def test_a_cluster_whose_model_is_constant_is_named_and_one_of_a_single_class_is_not() -> None:
    fine, constant, alone = np.array([[90.0, 10], [8, 92]]), np.array([[150.0, 0], [80, 0]]), np.array([[200.0, 0], [1, 0]])
    row = class_scores([{"confusion": each} for each in (fine, constant, alone)], [4, 5, 6], {4: 0, 5: 1, 6: 2}, 0)
    (line,) = warnings_of(row, ("a", "b"))
    assert line.startswith("the model of cluster 1 predicts class 'a' for all 230 test samples, and 80 are of other classes")
    assert row["by_class"]["clusters"]["0"]["balanced_accuracy"] == pytest.approx(0.91)
    assert warnings_of(class_scores([{"confusion": each} for each in (fine, alone)], [4, 6], {4: 0, 6: 2}, 0)) == []


def test_clients_that_count_nothing_have_no_scores_by_class() -> None:
    assert class_scores([{"count": np.array(3.0)}], [0]) == {}
    assert class_scores([{"confusion": np.zeros((2, 2))}], [0]) == {}
    assert warnings_of({"accuracy_mean": 0.5}) == []


def missed(predictions: Array, labels: Array) -> float:
    return float(np.sum((labels == 1) & (predictions != 1)))


def test_an_own_metric_is_where_the_others_are(tmp_path: Path) -> None:
    plugin = tmp_path / "misses.py"
    plugin.write_text(
        "import cflpriv\ncflpriv.register_metric('missed', lambda predictions, labels: ((labels == 1) & (predictions != 1)).sum())\n",
        encoding="utf-8",
    )
    with pytest.raises(InputError, match=r"run\.metrics = \['missed'\]: 'missed' is not known"):
        small_config(run={"metrics": ["missed"]})
    config = small_config(run={"metrics": ["missed"], "plugins": [str(plugin)]})
    try:
        lines: list[dict[str, Any]] = []
        summary = run_experiment(config, tmp_path / "run", population=scene(1.0), tick=lines.append)
        counts = summary["by_class"]["counts"]
        assert summary["metric_missed"] == lines[-1]["metric_missed"] == counts[1][0]
        assert f"missed {counts[1][0]:.4g}" in row_text(lines[-1])
        assert f"missed {counts[1][0]:.4g}" in summary_text(summary)
        assert re.search(rf"missed</td><td[^>]*>{counts[1][0]}", write_report(tmp_path / "run").read_text(encoding="utf-8"))
        assert "metric_missed" in (tmp_path / "run" / "results.csv").read_text(encoding="utf-8")
        assert '"missed"' in (tmp_path / "run" / "config.toml").read_text(encoding="utf-8")
    finally:
        METRICS.pop("missed", None)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda p, y: 1 / 0, "ZeroDivisionError"), (lambda p, y: "high", "ValueError"), (lambda p, y: y, "TypeError"),
        (lambda p: 0.0, "TypeError"),
    ],
)  # fmt: skip
def test_a_metric_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, metric: Any, words: str) -> None:
    monkeypatch.setitem(METRICS, "odd", metric)
    run = start(small_config(run={"metrics": ["odd"]}), population=scene())
    with pytest.raises(InputError, match=f"metric 'odd': {words}"):
        advance(run)


def test_a_metric_that_is_not_finite_is_none_and_names_and_numbers_of_classes_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "odd", lambda predictions, labels: float("nan"))
    run = start(small_config(run={"metrics": ["odd"]}), population=scene())
    assert advance(run)["metric_odd"] is None
    with pytest.raises(InputError, match="letters, digits and underscores"):
        cflpriv.register_metric("a b", missed)
    with pytest.raises(InputError, match=f"the data have {FULL + 1} classes; own metrics are computed for up to {FULL}"):
        start(small_config(run={"metrics": ["odd"]}), population=scene(classes=FULL + 1))
