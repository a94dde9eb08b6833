"""A report of a clustering made by a test: distances, spectrum and tree, whatever the answer and the algorithm, drawn and in words."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_pages import Page, page_of, pictures_of, rewrite
from scenes import population
from scipy.cluster import hierarchy

from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.report.tested import LISTED, cut_height, node_of
from cflpriv.experiments.report.tested_pictures import ANNOTATED, apart

GROUPS, EACH = 4, 6
N = GROUPS * EACH


@pytest.fixture(scope="module")
def grouped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run that found four groups."""
    folder = tmp_path_factory.mktemp("tested") / "run"
    tree = {
        "data": {"source": "digits", "clients": N},
        "model": {"name": "linear"},
        "training": {"rounds": 1, "lr": 0.1, "batch_size": 20},
        "algorithm": {"name": "crossfit"},
    }
    run_experiment(parse_config(tree), folder, population=population(GROUPS, EACH, samples=60))
    return folder


@pytest.fixture
def run(grouped_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(grouped_run, tmp_path / "run"))


def words_in(picture: str) -> list[str]:
    """Matplotlib notes each text that it draws."""
    return re.findall("<!-- (.*?) -->", picture)


def shown(page: Page, start: str) -> tuple[str, list[str]]:
    """The text alternative of the picture that begins so, and the words in the picture."""
    ((alt, picture),) = [
        (str(image["alt"]), picture)
        for image, picture in zip(page.images, pictures_of(page), strict=True)
        if str(image["alt"]).startswith(start)
    ]
    return alt, words_in(picture)


def evidence_pictures(page: Page) -> list[str]:
    starts = ("Heat map", "Eigenvalues", "Ward's tree")
    return [picture for image, picture in zip(page.images, pictures_of(page), strict=True) if str(image["alt"]).startswith(starts)]


def a_test(clients: list[int], directions: int = 1, k: int = 2, p: float = 0.5, level: float = 0.01) -> dict[str, Any]:
    return {"clients": clients, "directions": directions, "k": k, "p": p, "level": level}


def with_evidence(run: Path, *, keep_tree: bool = True, **changes: Any) -> Page:
    """The page of the run with other evidence."""
    rewrite(run / "measured.json", lambda old: {**old, "evidence": {**old["evidence"], **changes}})
    if not keep_tree:
        with np.load(run / "evidence.npz") as file:
            np.savez(run / "evidence.npz", allow_pickle=False, distance=file["distance"])
    return page_of(run)


# --- the three pictures


@pytest.mark.slow
def test_groups_show_in_three_pictures_with_words(run: Path) -> None:
    page = page_of(run)
    assert "ordered by the 4 clusters found" in shown(page, "Heat map")[0]
    alt, drawn = shown(page, "Eigenvalues")
    assert "3 above the edge of noise" in alt
    assert any(text.startswith("edge of noise: ") for text in drawn)
    assert "above the edge: 3" in drawn
    alt, drawn = shown(page, "Ward's tree")
    assert f"of {N} clients, cut into 4 branches" in alt
    assert f"test 1 of {N} clients: p = 0.002, cut into 4" in alt
    assert {"1: p = 0.002, cut into 4", "cut into 4"} <= set(drawn)
    assert all(any(text.startswith(f"{number}: ") for text in drawn) for number in range(2, 6)), "each group was tested"
    assert f"Groups: the {N} clients differ in 3 directions" in page.words
    assert "A star:" not in page.words
    (table,) = [table for table in page.tables if table[0][0].strip() == "Test"]
    assert [cell.strip() for cell in table[1]] == ["1", f"all {N}", "3", "0.002", "0.01", "cut into 4 groups"]
    assert len(table) == 6


@pytest.mark.slow
def test_the_pictures_follow_from_the_evidence_alone(run: Path) -> None:
    """Another algorithm with the same evidence has the same pictures."""
    before = evidence_pictures(page_of(run))
    assert len(before) == 3
    config = (run / "config.toml").read_text(encoding="utf-8")
    (run / "config.toml").write_text(config.replace('name = "crossfit"', 'name = "pacfl"'), encoding="utf-8")
    rewrite(run / "summary.json", lambda old: {**old, "algorithm": "pacfl"})
    assert evidence_pictures(page_of(run)) == before


@pytest.mark.slow
def test_alike_clients_have_no_tree_and_the_page_says_so(run: Path) -> None:
    rewrite(run / "measured.json", lambda old: {**old, "answer": "all alike", "clear": False, "p": None})
    page = with_evidence(run, tests=[a_test(list(range(N)), 0, 1, 1.0, 0.0)], edge=1e3, keep_tree=False)
    assert "There is no tree." in page.words
    assert "All alike: no eigenvalue is above the edge of noise" in page.words
    assert "Answer: all alike." in page.words
    alt, drawn = shown(page, "Eigenvalues")
    assert "0 above the edge of noise at 1e+03" in alt
    assert "above the edge: 0" in drawn
    assert not any(str(image["alt"]).startswith("Ward") for image in page.images)


@pytest.mark.slow
def test_a_continuum_has_a_tree_without_a_cut(run: Path) -> None:
    page = with_evidence(run, tests=[a_test(list(range(N)), 3, 4, 0.41)])
    alt, drawn = shown(page, "Ward's tree")
    assert "not cut" in alt
    assert {"no cut", "1: p = 0.41, not cut"} <= set(drawn)
    assert not any(text.startswith("cut into") for text in drawn)
    assert "No clear groups:" in page.words
    assert "its branches are not groups" in page.words


@pytest.mark.slow
def test_a_given_number_of_groups_has_no_p(run: Path) -> None:
    page = with_evidence(run, tests=[a_test(list(range(N)), 3, 4, 1.0, 0.0)])
    assert "was given, so nothing was tested" in page.words
    drawn = shown(page, "Ward's tree")[1]
    assert "1: cut into 4, as given" in drawn
    assert not any("p =" in text for text in drawn)


@pytest.mark.slow
def test_tests_of_clients_that_are_no_branch_have_a_star(run: Path) -> None:
    parts = [a_test(list(range(N)), 3, 2, 0.002), a_test([0, 1, 2, 3, 4], p=0.3)]
    page = with_evidence(run, tests=parts)
    assert "2*: p = 0.3, not cut" in shown(page, "Ward's tree")[1]
    assert "A star:" in page.words


@pytest.mark.slow
def test_many_tests_are_all_listed_or_counted_and_the_largest_are_drawn(run: Path) -> None:
    many = [a_test(list(range(N)), 3, 4, 0.002), *(a_test(list(range(4 + number % 9)), p=0.5) for number in range(LISTED + 4))]
    page = with_evidence(run, tests=many)
    (table,) = [table for table in page.tables if table[0][0].strip() == "Test"]
    assert len(table) == 1 + LISTED
    assert "The first tests only: 5 are left out." in page.words
    assert sum(bool(re.match(r"\d+\*?: ", text)) for text in shown(page, "Ward's tree")[1]) == ANNOTATED


@pytest.mark.slow
def test_merged_groups_are_counted(run: Path) -> None:
    rewrite(run / "measured.json", lambda old: {**old, "labels": {key: min(label, 2) for key, label in old["labels"].items()}})
    assert "were merged, which leaves 3" in page_of(run).words


@pytest.mark.slow
def test_a_spectrum_that_reaches_far_above_the_edge_is_logarithmic(run: Path) -> None:
    long = [40.0, 3.0, *np.linspace(0.09, -0.09, N - 2)]
    drawn = shown(with_evidence(run, spectrum=long, edge=0.1), "Eigenvalues")[1]
    assert "eigenvalue (logarithmic above the edge)" in drawn
    assert not any("$" in text for text in drawn), "powers are written out"


# --- what was released


@pytest.mark.slow
def test_a_line_says_what_was_released_where_the_evidence_was_not(run: Path) -> None:
    assert "Released to the server" not in page_of(run).words
    rewrite(run / "measured.json", lambda old: {**old, "evidence_source": "recomputed"})
    page = page_of(run)
    line = "Released to the server: the labels, the answer (groups), p = 0.002 and the number of directions (3)."
    assert line in page.words
    assert "Not released: the spectrum, the tree, the tests of parts and the distances." in page.words
    assert sum("recomputed by the experimenter" in str(image["alt"]) for image in page.images) == 3
    rewrite(run / "measured.json", lambda old: {**{key: old[key] for key in old if key != "p"}, "p_at_least": 0.25})
    assert "p ≥ 0.25" in page_of(run).words


def test_a_deployment_without_evidence_has_the_line_and_no_picture(run: Path) -> None:
    (run / "evidence.npz").unlink()
    rewrite(run / "measured.json", lambda old: {**old, "evidence_source": None, "evidence": {}})
    page = page_of(run)
    assert "Released to the server: the labels, the answer (groups)" in page.words
    assert not any(str(image["alt"]).startswith("(") for image in page.images)


@pytest.mark.slow
def test_released_distances_are_shown_and_named(run: Path) -> None:
    rewrite(run / "measured.json", lambda old: {**old, "evidence": {"clients": old["evidence"]["clients"]}})
    with np.load(run / "evidence.npz") as file:
        np.savez(run / "evidence.npz", allow_pickle=False, distance=file["distance"])
    page = page_of(run)
    assert "the number of directions (3) and the distances, with noise." in page.words
    assert sum("Heat map" in str(image["alt"]) for image in page.images) == 1


# --- damage


@pytest.mark.parametrize(
    "changes",
    [
        {"spectrum": [1.0, None]},
        {"spectrum": [[1.0]]},
        {"spectrum": "high"},
        {"edge": None},
        {"tests": [{"clients": [0]}]},
        {"tests": 3},
        {"tests": [a_test([])]},
        {"tests": [a_test([0, 999])]},
        {"tests": [a_test(list(range(N)), k=N + 1, p=0.0)]},
    ],
)
def test_damaged_tests_are_named(run: Path, changes: dict[str, Any]) -> None:
    rewrite(run / "measured.json", lambda old: {**old, "evidence": {**old["evidence"], **changes}})
    with pytest.raises(InputError) as caught:
        write_report(run)
    assert str(caught.value).startswith(f"{run / 'measured.json'}: ")
    assert "\n" not in str(caught.value)


# --- the layout


@given(st.integers(2, 25), st.integers(0, 2**32 - 1), st.data())
def test_a_test_stands_at_the_lowest_node_above_its_clients(n: int, seed: int, data: st.DataObject) -> None:
    tree = np.asarray(hierarchy.linkage(np.random.default_rng(seed).normal(size=(n, 2)), "ward"))
    members = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    below = {leaf: {leaf} for leaf in range(n)}
    for merge, (left, right, _, _) in enumerate(tree):
        below[n + merge] = below[int(left)] | below[int(right)]
    node, whole = node_of(tree, sorted(members))
    assert members <= below[node]
    assert all(len(others) >= len(below[node]) for others in below.values() if members <= others)
    assert whole == (members == below[node])


@given(st.integers(3, 25), st.integers(0, 2**32 - 1), st.data())
def test_a_cut_crosses_k_branches(n: int, seed: int, data: st.DataObject) -> None:
    tree = np.asarray(hierarchy.linkage(np.random.default_rng(seed).normal(size=(n, 2)), "ward"))
    k = data.draw(st.integers(2, n))
    assert len(set(hierarchy.fcluster(tree, cut_height(tree, k), "distance"))) == k


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 0.4), st.floats(0, 1)), max_size=12))
def test_lines_of_text_do_not_overlap(boxes: list[tuple[float, float, float]]) -> None:
    line = 0.0625
    heights = apart(boxes, line)
    for at, ((left, width, lowest), height) in enumerate(zip(boxes, heights, strict=True)):
        assert height >= lowest
        for (other, wide, _), beside in zip(boxes[:at], heights[:at], strict=True):
            apart_sideways = left >= other + wide or other >= left + width
            assert apart_sideways or abs(height - beside) >= line * (1 - 1e-9)
