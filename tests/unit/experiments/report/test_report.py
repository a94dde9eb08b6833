"""The report: complete, self-contained, escaped, the same twice; numbers as in the files; damage named."""

import csv
import json
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tomli_w
from command_line import in_process
from hypothesis import given
from hypothesis import strategies as st
from report_pages import Page, page_of, pictures_of, rewrite
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from cflpriv.clustering.cuts import LINKAGES, Linkage
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.report import pictures
from cflpriv.experiments.report.pictures import brackets, shrunk
from cflpriv.experiments.report.report import DETAILED, _lost, write_report
from cflpriv.experiments.report.run_files import IF_THERE, read_run, read_runs
from cflpriv.types import Array

STATUSES = {
    "leaks": "leaks", "inconclusive": "inconclusive", "at_baseline": "at baseline", "not_validated": "not validated",
    "not_attempted": "not attempted", "nothing_to_see": "nothing to see",
}  # fmt: skip
QUESTIONS = [
    "1 · Are clients served better?", "2 · Are there groups?", "3 · What leaks, and to whom?",
    "4 · What is guaranteed, and what does it cost?", "5 · Details",
]  # fmt: skip
HOSTILE = '<script>alert("1")</script> & $\\frac$'


def experiment(folder: Path, algorithm: str = "pacfl", protection: str = "none") -> None:
    gram = [protection] if protection != "none" and algorithm == "pacfl" else []
    tree = {
        "data": {"source": "digits", "clients": 8, "rotations": [0, 90]},
        "model": {"hidden": 4},
        "training": {"rounds": 2, "weights": "equal", "lr": 0.1, "batch_size": 60},
        "algorithm": {"name": algorithm, **({"cut": "silhouette"} if algorithm == "pacfl" else {})},
        "protection": {"gram": gram, "sum": protection},
    }
    run_experiment(parse_config(tree), folder)


def cell(status: str, **changes: Any) -> dict[str, Any]:
    seen = status not in ("nothing_to_see", "not_attempted")
    figures = {"value": 0.75, "low": 0.625, "high": 0.875, "baseline": 0.25, "reference": 0.8125}
    return {
        "attack": "signature_inversion", "adversary": "server", "protection": "none", "metric": "mean_image_cosine",
        **{key: value if seen else None for key, value in figures.items()},
        "status": status, "k_known": 0, "seeds": [0], "note": "", "arrays": None, **changes,
    }  # fmt: skip


def write_arrays(path: Path, m: int = 11, channels: int = 1, **more: Array) -> None:
    path.parent.mkdir(exist_ok=True)
    images = np.random.default_rng(0).random((m, channels, 6, 6))
    arrays = {"clients": np.arange(m), "truth": images, "recovered": images[::-1], "baseline": images.mean(axis=0), **more}
    np.savez(path, allow_pickle=False, **arrays)


@pytest.fixture(scope="module")
def reported_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs; PACFL's is audited, by hand."""
    folder = tmp_path_factory.mktemp("runs")
    experiment(folder / "a_pacfl")
    experiment(folder / "b_haar", protection="haar")
    experiment(folder / "c_fedavg", "fedavg")
    experiment(folder / "d_local", "local")
    write_arrays(folder / "a_pacfl" / "audit" / "x.npz", label_truth=np.eye(11, 10), label_guess=np.full((11, 10), 0.1))
    cells = [cell(status, metric=status, arrays="x.npz", note=HOSTILE) for status in STATUSES]
    (folder / "a_pacfl" / "audit.json").write_text(json.dumps(cells), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def whole(reported_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """The runs with their report, for tests that only look."""
    folder = tmp_path_factory.mktemp("whole") / "runs"
    shutil.copytree(reported_runs, folder)
    return folder, page_of(folder)


DRAWN: dict[bytes, str] = {}


@pytest.fixture(autouse=True)
def _drawn_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture follows from what it shows, as `test_the_same_runs_give_the_same_bytes` finds; so here each is drawn once."""

    def once(draw: Callable[..., str], *given: Any, **named: Any) -> str:
        key = pickle.dumps((draw.__name__, given, named))
        if key not in DRAWN:
            DRAWN[key] = draw(*given, **named)
        return DRAWN[key]

    if request.node.name != "test_the_same_runs_give_the_same_bytes":
        for draw in (
            pictures.heatmap, pictures.dendrogram, pictures.by_clusters, pictures.rounds_picture, pictures.clients_picture,
            pictures.images_picture,
        ):  # fmt: skip
            monkeypatch.setattr(pictures, draw.__name__, partial(once, draw))


@pytest.fixture
def runs(reported_runs: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    shutil.copytree(reported_runs, folder)
    return folder


def scale_up(folder: Path, n: int, linkage: Linkage, points: Array, labels: Array) -> None:
    """Make a run look as if it had n clients at `points`, with `labels` as true groups and as clusters."""
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    tree = hierarchy.linkage(squareform(distance, checks=False), linkage)
    np.savez(folder / "evidence.npz", allow_pickle=False, distance=distance, tree=tree)
    names = {str(i): int(label) for i, label in enumerate(labels)}
    evidence = {"clients": list(range(n)), "height": float(tree[-2:, 2].mean()), "gap_ratio": 2.5, "note": "", "silhouettes": {"2": 0.5}}
    rewrite(folder / "measured.json", lambda old: {**old, "truth": names, "labels": names, "evidence": evidence})


# --- the page -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_needs_nothing_from_outside_and_every_picture_is_sound_and_described(whole: tuple[Path, Page]) -> None:
    runs, page = whole
    assert page.tags["script"] == page.tags["link"] == page.tags["iframe"] == 0
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in page.links)
    text = (runs / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text
    assert "url(" not in text
    # two clusterings with three pictures each, one strip, two of accuracy, for two kinds of models
    assert len(page.images) == 2 * 3 + 1 + 2 * 2
    for image, picture in zip(page.images, pictures_of(page), strict=True):
        assert len(image["alt"] or "") > 20
        root = ElementTree.fromstring(picture)
        assert root.tag.endswith("svg")
        links = [value for node in root.iter() for key, value in node.attrib.items() if key.endswith("href")]
        assert all(link.startswith(("#", "data:image/png")) for link in links)


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(runs: Path, whole: tuple[Path, Page]) -> None:
    write_report(runs)
    for name in ("report.html", "results.csv"):
        assert (runs / name).read_bytes() == (whole[0] / name).read_bytes()


def test_sections_come_in_order(whole: tuple[Path, Page]) -> None:
    assert whole[1].headings == QUESTIONS


@pytest.mark.slow
def test_what_comes_from_files_is_escaped(runs: Path) -> None:
    run = runs / "a_pacfl"
    rewrite(run / "summary.json", lambda old: {**old, "algorithm": HOSTILE, "protection": HOSTILE, "dataset": HOSTILE, "notes": [HOSTILE]})
    rewrite(run / "measured.json", lambda old: {**old, "rule": HOSTILE, "evidence": {**old["evidence"], "note": HOSTILE}})
    rewrite(run / "audit.json", lambda old: [{**one, "attack": HOSTILE, "metric": HOSTILE, "adversary": HOSTILE} for one in old])
    (run / "environment.json").write_text(HOSTILE, encoding="utf-8")
    (run / "config.toml").write_text(f"# {HOSTILE}\n" + (run / "config.toml").read_text(encoding="utf-8"), encoding="utf-8")
    page = page_of(run)
    assert page.tags["script"] == 0
    assert page.words.count('<script>alert("1")</script> & $\\frac$') > 10
    assert not any("<script" in picture for picture in pictures_of(page))


# --- results ------------------------------------------------------------------------------------------------------------------------


def test_results_are_those_of_the_summaries(whole: tuple[Path, Page]) -> None:
    runs, page = whole
    with (runs / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["a_pacfl", "b_haar", "c_fedavg", "d_local"]
    plain = json.loads((runs / "a_pacfl" / "summary.json").read_text(encoding="utf-8"))["accuracy_mean"]
    by_run = {next(row["run"] for row in rows if row["run"] in line[0]): line for line in page.tables_with("Method")[0][1:]}
    scores = dict(zip(by_run, page.tables_with("Score", "Value"), strict=True))
    for row in rows:
        summary = json.loads((runs / row["run"] / "summary.json").read_text(encoding="utf-8"))
        scalars = {key: value for key, value in summary.items() if not isinstance(value, list | dict)} | {
            "warnings": "; ".join(summary["warnings"])
        }
        assert row == {"run": row["run"], **{key: "" if value is None else str(value) for key, value in scalars.items()}}
        line, details = by_run[row["run"]], {name.strip(): value.strip() for name, value in scores[row["run"]][1:]}
        assert line[2].strip() == f"{100 * summary['accuracy_mean']:.1f} %"
        assert line[3].strip() == f"{100 * summary['accuracy_worst']:.1f} %"
        beside = f", {100 * (summary['accuracy_mean'] - plain):+.1f} to the same run open" if row["run"] == "b_haar" else ""
        mean, spread = (100 * summary[f"accuracy_{name}"] for name in ("mean", "std"))
        assert details["Shared or cluster model"] == f"{mean:.1f} % ± {spread:.1f}{beside}"
        assert details["Balanced accuracy"] == f"{100 * summary['balanced_accuracy']:.1f} %, macro F1 {100 * summary['macro_f1']:.1f} %"
        assert details["Always the majority class"].startswith(f"accuracy {100 * summary['majority_accuracy']:.1f} %")
        local, spread = (100 * summary[f"local_accuracy_{name}"] for name in ("mean", "std"))
        assert details["Local models"] == f"{local:.1f} % ± {spread:.1f}"
        assert details["Known of the groups before"] == summary["knowledge"]


@pytest.mark.slow
def test_an_interrupted_run_and_one_without_clear_structure_say_so(runs: Path) -> None:
    def method() -> str:
        return page_of(runs / "a_pacfl").tables_with("Method")[0][1][0]

    before = page_of(runs / "a_pacfl")
    assert "interrupted" not in method()
    rewrite(runs / "a_pacfl" / "summary.json", lambda old: {**old, "rounds_planned": 9, "rounds_skipped": 1, "clear_structure": False})
    rewrite(runs / "a_pacfl" / "measured.json", lambda old: {**old, "clear": False})
    after = page_of(runs / "a_pacfl")
    assert "interrupted after 2 of 9 rounds" in method()
    assert "1 round skipped" in method()
    assert "no clear structure" in method()
    assert "Finish the run that ended after 2 of 9 rounds" in after.unfolded
    assert after.words.count("No clear structure.") == before.words.count("No clear structure.") + 1
    assert after.words.count("Clear structure.") == before.words.count("Clear structure.") - 1
    rewrite(runs / "a_pacfl" / "summary.json", lambda old: {**old, "warnings": ["it will form no clusters"]})
    assert "it will form no clusters" in method()


@pytest.mark.slow
def test_a_run_whose_clients_refused_nothing_says_so(runs: Path) -> None:
    before = page_of(runs)
    assert "release policy off" not in before.words
    assert "Release policy off" not in before.words
    rewrite(runs / "a_pacfl" / "summary.json", lambda summary: {**summary, "release_policy": "off"})
    after = page_of(runs)
    off = ["release policy off" in line[0] for line in after.tables_with("Method")[0][1:]]
    assert off.count(True) == 1
    assert "Release policy off: pacfl" in after.words
    assert "may not be deployable" in after.words
    rewrite(runs / "a_pacfl" / "summary.json", lambda summary: {key: value for key, value in summary.items() if key != "release_policy"})
    assert "release policy off" not in page_of(runs).words, "a run of an earlier version"


def test_runs_of_different_lengths_are_not_compared(runs: Path) -> None:
    assert list(_lost(read_runs(runs)[0])) == ["pacfl · secret rotation"]
    rewrite(runs / "b_haar" / "summary.json", lambda old: {**old, "rounds": 1})
    assert _lost(read_runs(runs)[0]) == {}
    rewrite(runs / "a_pacfl" / "summary.json", lambda old: {**old, "rounds": 1})
    assert list(_lost(read_runs(runs)[0])) == ["pacfl · secret rotation"]


def test_rounds_without_accuracy_are_passed_over(runs: Path) -> None:
    path = runs / "a_pacfl" / "rounds.jsonl"
    bare = {"round": 2, "cohort": [], "skipped": "no group reached the minimum cohort size", "seconds": 0.1}
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(bare) + "\n", encoding="utf-8")
    assert len(page_of(runs / "a_pacfl").images) == 3 + 1 + 2 * 2
    path.write_text(json.dumps(bare) + "\n", encoding="utf-8")
    page = page_of(runs / "a_pacfl")
    assert len(page.images) == 3 + 1
    assert "No round was evaluated." in page.words


def test_one_run_and_unfinished_neighbours(runs: Path) -> None:
    for name in ("a_pacfl", "b_haar", "c_fedavg"):
        (runs / name / "summary.json").unlink()
    assert "ended by force): a_pacfl, b_haar, c_fedavg." in page_of(runs).words
    assert write_report(runs / "d_local") == runs / "d_local" / "report.html"


def test_what_a_test_of_the_clusters_answered_is_reported(runs: Path) -> None:
    rewrite(runs / "a_pacfl" / "measured.json", lambda old: {**old, "rule": "test at level 0.01", "answer": "groups", "p": 0.002})
    assert "Cut: test at level 0.01. Answer: groups (p = 0.002)." in page_of(runs / "a_pacfl").words
    rewrite(runs / "a_pacfl" / "measured.json", lambda old: {**old, "answer": "all alike", "p": None})
    assert "Answer: all alike." in page_of(runs / "a_pacfl").words


def test_newcomers_by_test_have_no_cut_anew(runs: Path) -> None:
    new = {"clients": [6, 7], "newcomer_accuracy_mean": 0.512, "newcomer_accuracy_worst": 0.25, "opened_clusters": 0}
    rewrite(runs / "a_pacfl" / "summary.json", lambda old: {**old, "newcomers": new})
    assert "0 cluster(s) opened for them." in page_of(runs / "a_pacfl").words


def test_newcomers_are_reported(runs: Path) -> None:
    new = {"clients": [6, 7], "newcomer_accuracy_mean": 0.512, "newcomer_accuracy_worst": 0.25, "opened_clusters": 1, "recut_changes": 3}
    rewrite(runs / "a_pacfl" / "summary.json", lambda old: {**old, "newcomers": new})
    assert "2 newcomers joined after training, accuracy 51.2 % (worst 25.0 %); 1 cluster(s) opened" in page_of(runs / "a_pacfl").words


# --- leakage ------------------------------------------------------------------------------------------------------------------------


def test_every_status_has_colour_and_words_and_figures_stand_beside_their_references(whole: tuple[Path, Page]) -> None:
    _, page = whole
    (table,) = page.tables_with("Figure", "Who")
    lines = {"_".join(line[0].split()[2:]): line for line in table[1:]}
    assert lines.keys() == set(STATUSES)
    for status, words in STATUSES.items():
        assert page.classes[status] >= 2  # the figure and the legend
        _, _, result, found, guess, unprotected = lines[status]
        assert words in result
        seen = status not in ("nothing_to_see", "not_attempted")
        assert found.split() == (["0.750", "[0.625,", "0.875]"] if seen else ["–"])
        assert [guess.strip(), unprotected.strip()] == (["0.250", "0.812"] if seen else ["–", "–"])


def test_audits_of_older_versions_are_shown(runs: Path) -> None:
    """They have four statuses, intervals that are points, and call what was not attempted nothing to see."""
    old = [cell(one, metric=one) for one in ("leaks", "at_baseline", "not_validated", "nothing_to_see")]
    old[0] |= {"low": 0.75, "high": 0.75}
    (runs / "a_pacfl" / "audit.json").write_text(json.dumps(old), encoding="utf-8")
    page = page_of(runs / "a_pacfl")
    assert "0.750 [0.750, 0.750]" in page.words
    assert "It is not recorded which attacks were left out." in page.unfolded


def test_verdicts_stand_before_the_figures(runs: Path) -> None:
    verdict = {"adversary": "server", "sentence": "the server learns <b>labels</b> (1.00)", "reduces": "secure sums", "attack": "x"}
    (runs / "a_pacfl" / "audit.json").write_text(
        json.dumps({"cells": [cell("leaks")], "verdicts": [verdict], "family": {}}), encoding="utf-8"
    )
    words = page_of(runs / "a_pacfl").words
    assert "The server learns <b>labels</b> (1.00). Would reduce it: secure sums." in words
    assert words.index("Would reduce it") < words.index("All figures of the audit")


def test_whom_an_audited_guarantee_is_towards_stands_beside_its_figure(runs: Path) -> None:
    assert "a guarantee towards" not in page_of(runs / "a_pacfl").words
    (runs / "a_pacfl" / "audit.json").write_text(json.dumps([cell("at_baseline", towards="who sees the means")]), encoding="utf-8")
    assert page_of(runs / "a_pacfl").words.count("a guarantee towards who sees the means") == 1


def test_the_power_of_a_dp_audit_stands_beside_its_figure(runs: Path) -> None:
    assert "at least" not in page_of(runs / "a_pacfl").words
    (runs / "a_pacfl" / "audit.json").write_text(json.dumps([cell("inconclusive", power=0.47, power_low=0.384)]), encoding="utf-8")
    assert page_of(runs / "a_pacfl").words.count("power 0.47, at least 0.38") == 1


def test_a_run_without_audit_names_the_command(runs: Path, whole: tuple[Path, Page]) -> None:
    assert "cflpriv audit RUN_DIR" in whole[1].words
    (runs / "a_pacfl" / "audit.json").unlink()
    page = page_of(runs / "a_pacfl")
    assert "cflpriv audit a_pacfl" in page.words
    assert page.headings == QUESTIONS
    assert "Not tested" in page.unfolded


@pytest.mark.slow
@pytest.mark.parametrize(("m", "channels"), [(1, 1), (8, 2), (9, 3)])
def test_recovered_images_of_any_number_of_clients_and_channels(runs: Path, channels: int, m: int) -> None:
    write_arrays(runs / "a_pacfl" / "audit" / "x.npz", m, channels)
    page = page_of(runs / "a_pacfl")
    assert f"{min(m, 4)} of {m} attacked clients." in page.words
    strip = next(picture for image, picture in zip(page.images, pictures_of(page), strict=True) if "Images of" in str(image["alt"]))
    assert strip.count("<image") == 3 * min(m, 4)


# --- clustering ---------------------------------------------------------------------------------------------------------------------


def test_recomputed_evidence_is_marked_and_the_servers_is_not(runs: Path) -> None:
    words = "recomputed by the experimenter from the data: the server did not see this"
    before = page_of(runs / "a_pacfl")
    assert words not in before.words
    rewrite(runs / "a_pacfl" / "measured.json", lambda old: {**old, "evidence_source": "recomputed"})
    after = page_of(runs / "a_pacfl")
    assert after.words.count(words) == 1
    assert sum(words in str(image["alt"]) for image in after.images) == 2
    changed = [one != two for one, two in zip(pictures_of(before), pictures_of(after), strict=True)]
    assert sum(changed) == 2  # heat map and tree carry the mark themselves


def test_runs_without_clusters_are_skipped_quietly(runs: Path) -> None:
    for name in ("c_fedavg", "d_local"):
        page = page_of(runs / name)
        assert page.headings == [question for question in QUESTIONS if "groups" not in question]


@pytest.mark.slow
def test_the_table_of_clusters_and_groups_counts_clients(runs: Path) -> None:
    rng = np.random.default_rng(5)
    labels, groups = rng.integers(0, 3, 40).tolist(), rng.integers(0, 4, 40).tolist()
    (runs / "a_pacfl" / "evidence.npz").unlink()
    names = [str(i) for i in range(40)]
    rewrite(
        runs / "a_pacfl" / "measured.json",
        lambda old: {
            **old,
            "truth": dict(zip(names, groups, strict=True)),
            "labels": dict(zip(names, labels, strict=True)),
            "evidence": {},
        },
    )
    (table,) = page_of(runs / "a_pacfl").tables_with("Cluster", "Clients", "True groups")
    counts = Counter(zip(labels, groups, strict=True))
    assert [line[0].strip() for line in table[1:]] == ["cluster 0", "cluster 1", "cluster 2"]
    for label, line in enumerate(table[1:]):
        assert int(line[1]) == labels.count(label)
        parts = [words.strip().split(" ", 1) for words in line[2].split(",")]
        wanted = {f"group {group}": str(counts[label, group]) for group in range(4) if counts[label, group]}
        assert {name: count for count, name in parts} == wanted


def test_angles_have_degrees_and_other_measures_do_not(runs: Path) -> None:
    def degrees() -> bool:
        evidence = read_run(runs / "a_pacfl").evidence
        assert evidence is not None
        return evidence.degrees

    config = runs / "a_pacfl" / "config.toml"
    text = config.read_text(encoding="utf-8")
    assert degrees()
    config.write_text(text.replace("[algorithm]\n", '[algorithm]\nmeasure = "chordal"\n'), encoding="utf-8")
    assert not degrees()


@pytest.mark.slow
def test_a_thousand_clients_and_a_tree_that_is_one_long_chain(runs: Path) -> None:
    rng, n = np.random.default_rng(0), 1000
    groups = rng.integers(0, 15, n)
    scale_up(runs / "a_pacfl", n, "average", rng.normal(size=(15, 4))[groups] * 5 + rng.normal(size=(n, 4)), groups)
    scale_up(runs / "b_haar", n, "single", np.arange(n)[:, None] ** 1.5, np.arange(n))
    path = write_report(runs)
    assert path.stat().st_size < 2e6
    page = Page(path.read_text(encoding="utf-8"))
    assert len(page.images) == 2 * 3 + 1 + 2 * 2
    assert max(len(table) for table in page.tables_with("Cluster", "Clients", "True groups")) == 31  # the largest clusters only
    assert "The largest clusters only: 970 are left out." in page.words


@pytest.mark.slow
def test_a_sweep_stays_small_and_names_what_it_leaves_out(runs: Path) -> None:
    for i in range(14):
        shutil.copytree(runs / "a_pacfl", runs / f"e_{i:02}")
    path = write_report(runs)
    assert path.stat().st_size < 3e6
    page = Page(path.read_text(encoding="utf-8"))
    assert sum("Heat map" in str(image["alt"]) for image in page.images) == DETAILED  # runs without clusters come last
    assert f"show the first {DETAILED} runs" in page.words
    assert "e_13" in page.words


@given(st.integers(2, 30), st.integers(0, 2**32 - 1), st.sampled_from(LINKAGES))
def test_brackets_are_those_that_scipy_draws(n: int, seed: int, linkage: Linkage) -> None:
    points = np.random.default_rng(seed).normal(size=(n, 2))
    tree = np.asarray(hierarchy.linkage(points, linkage))
    drawn = hierarchy.dendrogram(tree, no_plot=True)
    theirs = np.stack([np.array(drawn["icoord"]) / 10, np.array(drawn["dcoord"])], axis=-1)
    ours = brackets(tree)
    order, their_order = (np.lexsort(one[:, 1].T) for one in (ours, theirs))
    np.testing.assert_allclose(ours[order], theirs[their_order], rtol=0, atol=1e-12)


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_a_shrunk_matrix_has_the_means_of_its_blocks(n: int, side: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(n, n))
    small = shrunk(values, side)
    kept = min(n, side)
    assert small.shape == (kept, kept)
    block = np.repeat(np.arange(kept), np.diff([i * n // kept for i in range(kept + 1)]))
    for row in range(kept):
        for column in range(kept):
            assert np.isclose(small[row, column], values[np.ix_(block == row, block == column)].mean(), rtol=0, atol=1e-12)


# --- damage -------------------------------------------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def without(key: str) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda old: {name: value for name, value in old.items() if name != key})


def set_to(key: str, value: Any) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda old: {**old, key: value})


def cells_with(**changes: Any) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda old: [{**one, **changes} for one in old])


def arrays_with(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        np.savez(path, **{name: value for name, value in {**arrays, **changes}.items() if value is not None})

    return damage


DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    ("summary.json", cut_short),
    ("summary.json", lambda path: path.write_text("[]", encoding="utf-8")),
    ("summary.json", lambda path: path.write_bytes(b"\xff\xfe\x00")),
    ("summary.json", without("protection")),
    ("summary.json", set_to("accuracy_mean", "high")),
    ("rounds.jsonl", cut_short),
    ("rounds.jsonl", lambda path: path.unlink()),
    ("rounds.jsonl", lambda path: path.write_text("3\n", encoding="utf-8")),
    ("rounds.jsonl", lambda path: path.write_text('{"round": 0, "accuracy_mean": "high"}\n', encoding="utf-8")),
    (
        "rounds.jsonl",
        lambda path: path.write_text(
            '{"round": 0, "accuracy_mean": 1, "per_client": {"clients": [1], "accuracy": []}}\n', encoding="utf-8"
        ),
    ),
    ("config.toml", lambda path: path.write_text("[data\n", encoding="utf-8")),
    ("measured.json", cut_short),
    ("measured.json", set_to("truth", {})),
    ("measured.json", set_to("evidence", None)),
    ("measured.json", lambda path: path.write_text("[1]", encoding="utf-8")),
    ("audit.json", cut_short),
    ("audit.json", lambda path: path.write_text("{}", encoding="utf-8")),
    ("audit.json", lambda path: path.write_text("[1]", encoding="utf-8")),
    ("audit.json", lambda path: path.write_text('{"cells": [], "verdicts": [1]}', encoding="utf-8")),
    ("audit.json", lambda path: path.write_text('{"cells": [], "verdicts": [{"adversary": "server"}]}', encoding="utf-8")),
    ("audit.json", lambda path: path.write_text('[{"attack": "x"}]', encoding="utf-8")),
    ("audit.json", cells_with(status="fine")),
    ("audit.json", cells_with(value="0.3")),
    ("audit.json", cells_with(arrays="../x.npz")),
    ("audit/x.npz", cut_short),
    ("audit/x.npz", lambda path: path.unlink()),
    ("audit/x.npz", arrays_with(truth=None)),
    ("audit/x.npz", arrays_with(recovered=np.zeros((3, 1, 6, 6)))),
    ("audit/x.npz", arrays_with(label_guess=np.zeros((11, 9)))),
    ("evidence.npz", cut_short),
    ("evidence.npz", lambda path: path.write_bytes(b"no archive")),
    ("evidence.npz", arrays_with(distance=np.zeros((3, 3)))),
    ("evidence.npz", arrays_with(distance=np.full((8, 8), np.nan))),
    ("evidence.npz", arrays_with(distance=np.full((8, 8), "far"))),
    ("evidence.npz", arrays_with(tree=np.full((7, 4), 99.0))),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=[f"{i}-{name}" for i, (name, _) in enumerate(DAMAGE)])
def test_damage_is_named_and_nothing_is_written(runs: Path, name: str, damage: Callable[[Path], Any]) -> None:
    damage(runs / "a_pacfl" / name)
    with pytest.raises(InputError) as caught:
        write_report(runs)
    assert str(caught.value).startswith(f"{runs / 'a_pacfl' / name}: ")
    assert "\n" not in str(caught.value)
    assert not (runs / "report.html").exists()
    assert not (runs / "results.csv").exists()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickled_arrays_are_refused_unopened(runs: Path) -> None:
    bomb = runs / "exploded"
    np.savez(runs / "a_pacfl" / "evidence.npz", distance=np.array([Bomb(bomb)], dtype=object))
    with pytest.raises(InputError, match="evidence"):
        write_report(runs)
    assert not bomb.exists()


def test_a_folder_that_is_no_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is no run folder and holds none"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_summary_may_lack_what_an_earlier_version_did_not_write(runs: Path) -> None:
    """Each number is kept where a page asks for it before it prints others."""
    kept, path = ("balanced_accuracy", "protection_upload_bytes"), runs / "b_haar" / "summary.json"
    summary = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key in kept or key not in IF_THERE}
    path.write_text(json.dumps({**summary, "epsilon": 4.0, "delta": 1e-5, "privacy_unit": "client"}), encoding="utf-8")
    assert "ε = 4, a weak bound" in page_of(runs / "b_haar").words


@pytest.mark.parametrize("key", IF_THERE)
def test_a_number_of_another_type_is_named(runs: Path, key: str) -> None:
    path = runs / "c_fedavg" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), key: "x"}), encoding="utf-8")
    with pytest.raises(InputError, match=rf"summary\.json: {key} = 'x' is of a wrong type"):
        read_run(path.parent)


def test_a_page_on_several_runs_names_the_run_that_the_answers_are_about(whole: tuple[Path, Page]) -> None:
    assert "answers on b_haar" in whole[1].words


def test_reports_of_clients_without_known_groups_say_nothing_of_true_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, owners = np.random.default_rng(0), np.repeat(np.arange(6), 20)
    rows: dict[str, Any] = {}
    for part in ("train", "test"):
        labels = rng.integers(0, 2, len(owners))
        pixels = 0.5 * rng.random((len(owners), 4)) + 0.5 * labels[:, None]
        rows |= {f"x_{part}": pixels.astype(np.float32), f"y_{part}": labels, f"client_{part}": owners}
    np.savez(tmp_path / "a.npz", **rows)
    tree = {
        "data": {"source": "npz", "paths": [str(tmp_path / "a.npz")], "partition": "given"},
        "model": {"hidden": 4},
        "training": {"rounds": 1, "weights": "equal"},
    }
    grid = {"algorithms": ["ifca", "fedavg"], "protections": ["none"], "seeds": [0]}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tree | {"algorithm": {"name": "ifca", "k": 2}}), encoding="utf-8")
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(tree | {"sweep": grid}), encoding="utf-8")
    for command, name in (("run", "run"), ("advise", "run"), ("sweep", "sweep")):
        assert in_process(monkeypatch, command, str(tmp_path / f"{name}.toml"), "--out", str(tmp_path / command)) == 0
        text = " ".join(capsys.readouterr()) + page_of(tmp_path / command).words
        assert re.findall(r"(?i).{0,60}(?:\btrue groups?\b|\bARI\b|\btruth\b).{0,60}", text) == []
