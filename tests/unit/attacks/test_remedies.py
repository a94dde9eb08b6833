"""Remedies that the configuration accepts, and their measurement."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cflpriv.attacks.audit import audit_run
from cflpriv.attacks.compared.signature_labels import IMAGE_MARGIN
from cflpriv.attacks.evidence import fresh_runs
from cflpriv.attacks.figures.leakage import Cell
from cflpriv.attacks.figures.payloads import ENTRIES
from cflpriv.attacks.figures.verdicts import verdicts_of
from cflpriv.attacks.remedies import CANDIDATES, WITHOUT, accepted_remedies
from cflpriv.data import build_population
from cflpriv.experiments import load_config
from cflpriv.experiments.run import run as run_module
from cflpriv.experiments.run.folder import run_experiment

TREE = """
[data]
clients = 12
partition = "pathological"
samples_per_client = 20
groups = [[0, 1], [2, 3]]
[model]
name = "linear"
[training]
rounds = 2
batch_size = 0
weights = "equal"
[algorithm]
name = "{algorithm}"
[protection]
{protection}
[run]
record = "full"
"""


def settings_file(folder: Path, algorithm: str = "fedavg", protection: str = "") -> Path:
    path = folder / f"{algorithm}.toml"
    path.write_text(TREE.format(algorithm=algorithm, protection=protection), encoding="utf-8")
    return path


def accepted(path: Path) -> dict[str, Any]:
    config = load_config(path)
    return accepted_remedies(path, config, build_population(config.data), True)


@pytest.mark.parametrize("algorithm", ["fedavg", "pacfl", "fedproto", "fedfomo", "scaffold"])
def test_each_remedy_is_accepted_and_changes_something(tmp_path: Path, algorithm: str) -> None:
    path = settings_file(tmp_path, algorithm)
    plain, remedies = load_config(path), accepted(path)
    assert set(remedies) == {*CANDIDATES, *WITHOUT}
    for remedy in remedies.values():
        if remedy.changes:
            assert load_config(path, remedy.changes) != plain
            assert all(change in remedy.line for change in remedy.changes)


@pytest.mark.slow
def test_no_remedy_is_what_the_run_has(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "pacfl", 'gram = ["ckks"]')
    assert 'protection.gram=["ckks"]' not in accepted(path)["gram_geometry"].changes


def test_secure_sums_are_no_remedy_for_models_that_members_are_sent(tmp_path: Path) -> None:
    assert not any("secagg" in change for change in accepted(settings_file(tmp_path, "fedfomo"))["label_inference"].changes)


def test_secure_sums_are_no_remedy_where_the_first_round_refuses_them(tmp_path: Path) -> None:
    """FedSoft's default smoother lets one client be nearly all of a centre."""
    path = settings_file(tmp_path, "fedsoft")
    path.write_text(path.read_text(encoding="utf-8").replace('name = "fedsoft"', 'name = "fedsoft"\nk = 2'), encoding="utf-8")
    assert not any("secagg" in change for remedy in accepted(path).values() for change in remedy.changes)


def test_of_compared_vectors_and_reports_no_remedy_is_promised() -> None:
    """Secure sums leave them in the open: a remedy of the attack that hides updates would not lower these figures."""
    read = [(entry.operation == "mean", set(entry.part.split("|"))) for entry in ENTRIES if "likeness" in entry.readers]
    summed, others = (set().union(*(parts for is_mean, parts in read if is_mean is wanted)) for wanted in (True, False))
    named = {figure.removeprefix("likeness/").removesuffix("_group_accuracy") for figure in WITHOUT}
    assert {name.rpartition("_")[2] for name in named} == others
    assert not summed & named


def test_a_figure_without_a_remedy_has_the_reason_in_the_verdict(tmp_path: Path) -> None:
    remedies = {name: entry.line for name, entry in accepted(settings_file(tmp_path, "pacfl")).items()}
    leak = Cell("likeness", "server", "none", "rows_group_accuracy", 1.0, None, None, 0.5, 1.0, "leaks", seeds=(0,))
    (verdict,) = verdicts_of([leak], remedies)
    assert verdict.reduces.startswith("no setting: clusters are found from these vectors")
    (other,) = verdicts_of([replace(leak, metric="update_group_accuracy")], remedies)
    assert "--set" in other.reduces


@pytest.mark.slow
def test_a_rotation_is_the_remedy_of_mean_images_and_not_of_label_sets(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "pacfl")
    images = {name.partition("/")[2] for name in CANDIDATES if name.startswith("signature_inversion/")}
    assert images == IMAGE_MARGIN.keys()
    assert all(accepted(path)[f"signature_inversion/{metric}"].changes == ('protection.gram=["haar"]',) for metric in images)
    assert 'protection.gram=["haar"]' not in accepted(path)["signature_inversion"].changes


@pytest.mark.slow
def test_a_rotation_lowers_mean_images_also_where_label_sets_lead_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_experiment(load_config(settings_file(tmp_path, "pacfl")), folder)
    audit_run(folder, attacks=["signature_inversion"], budget="quick", adversary="server", measure_remedies=True)
    measured = json.loads((folder / "audit.json").read_text(encoding="utf-8"))["remedies_measured"]
    images = [entry for entry in measured if entry["metric"].startswith("mean_image_")]
    assert images
    assert all(entry["lowered"] and entry["changes"] == ['protection.gram=["haar"]'] for entry in images), images


@pytest.mark.slow
def test_remedies_are_measured(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_experiment(load_config(settings_file(tmp_path)), folder)
    lines: list[str] = []
    cells = audit_run(folder, attacks=["label_inference"], budget="quick", measure_remedies=True, report=lines.append)
    leaks = [cell.metric for cell in cells if cell.status == "leaks"]
    assert leaks
    audit = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    assert [entry["metric"] for entry in audit["remedies_measured"]] == leaks
    assert all(entry["lowered"] for entry in audit["remedies_measured"])
    assert audit["about"]["not_run"]["attacks"]
    assert audit["about"]["run"]["data_digest"] == json.loads((folder / "summary.json").read_text(encoding="utf-8"))["data_digest"]
    assert any("before" in line for line in lines)


def test_runs_that_an_audit_makes_score_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test sets of texts are large: scores that nobody reads took most of an audit."""

    def refused(*args: Any) -> Any:
        raise AssertionError("a model is scored")

    config = load_config(settings_file(tmp_path, protection='sum = "secagg"'))
    people = build_population(config.data)
    scored = fresh_runs.fresh_scene(config, people, 2).messages
    monkeypatch.setattr(run_module, "_scores", refused)
    fresh_runs.check_start(config, people)
    unscored = fresh_runs.fresh_scene(config, people, 2).messages
    assert [(message.kind, message.round, message.clients) for message in unscored] == [
        (message.kind, message.round, message.clients) for message in scored
    ]
