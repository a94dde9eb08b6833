"""Folders of another system's updates: written from a loop, audited by the command line, refused in one line where they are bad."""

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from command_line import in_process
from foreign_scenes import SETTINGS, scene
from report_pages import Page, page_of, pictures_of

from cflpriv import plugins
from cflpriv.attacks import audit_folder, audit_updates, save_updates
from cflpriv.attacks.foreign.foreign_folder import _rounds
from cflpriv.engine.models import MODELS
from cflpriv.errors import InputError
from cflpriv.experiments.report.report import write_report
from cflpriv.plugins import load_plugin
from cflpriv.types import Array

PLUGIN = """
from torch import nn
import cflpriv

def network(description):
    classes = description.classes
    return nn.Sequential(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, classes))

cflpriv.register_model("of my own loop", network)
"""


@pytest.fixture
def updates_folder(tmp_path: Path) -> Iterator[Path]:
    """The scene's updates, saved; a plugin beside them."""
    model, updates, (x, y) = scene()
    (tmp_path / "net.py").write_text(PLUGIN, encoding="utf-8")
    yield save_updates(
        tmp_path / "updates", updates, 10, (1, 8, 8), auxiliary=(x, y), settings=SETTINGS, module=model, model="of my own loop"
    )
    MODELS.pop("of my own loop", None)
    plugins._loaded.pop("cflpriv_plugin_net", None)


def without_model(folder: Path, **change: Any) -> Path:
    tree = tomllib.loads((folder / "foreign.toml").read_text(encoding="utf-8")) | change
    del tree["model"]
    (folder / "foreign.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    return folder


def test_a_folder_with_a_plugin_says_what_the_loop_says(
    updates_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, updates, auxiliary = scene()
    assert (updates_folder / "round-0001" / "global.safetensors").is_file()
    assert in_process(monkeypatch, "audit", "--foreign", str(updates_folder), "--plugin", str(updates_folder.parent / "net.py")) == 0
    said = capsys.readouterr().out
    written = json.loads((updates_folder / "audit.json").read_text(encoding="utf-8"))["cells"]
    direct = audit_updates(model, updates, auxiliary, SETTINGS)
    assert {one.pop("colluders") for one in written} == {0}
    assert [one | {"arrays": None} for one in written] == json.loads(json.dumps([one.as_json() for one in direct]))
    assert all(cell.line() in said for cell in direct)
    assert said.splitlines()[-1] == f"written: {updates_folder / 'audit.json'}"
    assert np.load(updates_folder / "audit" / "label_inference_server.npz")["label_guess"].shape == (8, 10)
    verdicts = json.loads((updates_folder / "audit.json").read_text(encoding="utf-8"))["verdicts"]
    assert direct.verdicts == tuple(f"{entry['adversary']}: {entry['sentence']}" for entry in verdicts)
    assert direct.table["metric"] == [cell.metric for cell in direct]


@pytest.mark.slow
def test_an_audit_from_python_has_the_report_of_the_folder(updates_folder: Path, tmp_path: Path) -> None:
    """A page in three lines; of the same updates the same page, but for what the folder alone knows."""
    model, updates, auxiliary = scene()
    page = audit_updates(model, updates, auxiliary, SETTINGS, attacks=["label_inference"]).report(tmp_path / "audit.html")
    load_plugin(updates_folder.parent / "net.py")
    audit_folder(updates_folder, attacks=["label_inference"])
    pages = [path.read_text(encoding="utf-8") for path in (page.path, write_report(updates_folder))]
    told = (
        "<dt>Model</dt>.*?</dd>",
        '<div class="before">.*?</div>',
        "<p>If a setting.*?</p>",
        "<details><summary>(LoopSettings|foreign).*",
    )
    same = [re.sub("|".join(told), "", text, flags=re.DOTALL) for text in pages]
    assert same[0] == same[1]
    in_python, of_folder = map(Page, pages)
    assert not re.search("foreign|folder", in_python.words)
    assert "correct the arguments of audit_updates and audit again" in in_python.words
    assert "correct foreign.toml and audit again" in of_folder.words
    assert "label inference" in same[0]
    assert page._repr_html_().startswith("<iframe srcdoc=")


def test_a_folder_without_a_model_gives_labels_alone(updates_folder: Path) -> None:
    (updates_folder / "model.py").write_text("raise SystemExit('a file of the folder was run')", encoding="utf-8")
    cells = {cell.metric: cell for cell in audit_folder(without_model(updates_folder))}
    assert cells["label_set_accuracy"].status == "leaks", cells["label_set_accuracy"].line()
    assert "no model: predictions taken to be uniform" in cells["histogram_l1"].note
    others = [cell for cell in cells.values() if cell.attack != "label_inference"]
    assert {cell.status for cell in others} == {"not_attempted"}
    assert all("there is no model to run" in cell.note for cell in others)


def test_a_report_shows_verdicts_figures_pictures_and_what_was_assumed(
    updates_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(monkeypatch, "report", str(updates_folder)) == 2
    assert (
        capsys.readouterr().err
        == f"cflpriv: {updates_folder / 'audit.json'}: is missing; cflpriv audit --foreign {updates_folder} writes it\n"
    )
    cells = audit_folder(without_model(updates_folder, iterations=9))
    assert in_process(monkeypatch, "report", str(updates_folder)) == 0
    page = Page((updates_folder / "report.html").read_text(encoding="utf-8"))
    audit = json.loads((updates_folder / "audit.json").read_text(encoding="utf-8"))
    first = audit["verdicts"][0]["sentence"]
    assert audit["attacks"]["run"] == ["label_inference", "membership", "gradient_inversion", "batch_statistics"]
    assert f"4 of {4 + len(audit['attacks']['not_run'])} attacks were run" in page.unfolded
    assert all(name.replace("_", " ") in page.words for name in audit["attacks"]["not_run"])
    assert "secure sums, so that nobody sees a single client's update" in page.unfolded
    assert not re.search(r"\[(privacy|protection|training)\]|fewer rounds|more clients", page.words)
    assert page.headings == ["1 · What leaks, and to whom?", "2 · Can the evidence be trusted?", "3 · What was assumed?"]
    assert "▲ Leaks to the server" in page.unfolded
    assert "Labels: true and inferred" in page.unfolded
    assert page.words.index(first[1:]) < page.words.index("All figures of the audit")
    assert all(words in page.words for words in audit["assumed"].values())
    assert audit["assumed"]["Local training"] == "SGD at rate 0.1, 2 epoch(s), batches of 12, batch normalisation, if any, by the batch"
    shown = next(cell for cell in cells if cell.metric == "histogram_l1")
    assert f"{shown.value:.3f} [{shown.low:.3f}, {shown.high:.3f}]" in page.words
    assert [str(image["alt"])[:12] for image in page.images] == ["Label shares"]
    assert not any(link.startswith(("http", "//")) for link in page.links)
    assert not (updates_folder / "results.csv").exists()


@pytest.mark.slow
def test_recovered_images_stand_beside_the_truth(tmp_path: Path) -> None:
    model, updates, auxiliary = scene()
    few = [replace(one, x=one.x[:1], y=one.y[:1]) for one in updates[:3] if one.x is not None and one.y is not None]
    place = save_updates(
        tmp_path / "a<b", few, 10, (1, 8, 8), auxiliary=auxiliary, settings=replace(SETTINGS, epochs=1), module=model, model="resnet?"
    )
    MODELS["resnet?"] = (lambda _: model, "")
    try:
        tree = tomllib.loads((place / "foreign.toml").read_text(encoding="utf-8")) | {"iterations": 2}
        (place / "foreign.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
        audit_folder(place, attacks=["gradient_inversion"])
    finally:
        MODELS.pop("resnet?", None)
    page = page_of(place)
    assert "Recovered images" in page.unfolded
    assert pictures_of(page)[0].count("<image") == 9
    assert "a<b" in page.words
    (place / "audit.json").write_text(json.dumps({"cells": [], "assumed": {"Model": 3}}), encoding="utf-8")
    with pytest.raises(InputError, match="assumed is not a table of texts"):
        page_of(place)


def test_rounds_and_clients_come_back_in_order(tmp_path: Path) -> None:
    _, updates, _ = scene()
    seen = [replace(updates[i], client=i + 3, samples=30, labels=2, settings=replace(SETTINGS, epochs=1 + i)) for i in (0, 1)]
    later = replace(seen[1], before=seen[1].after)
    save_updates(tmp_path, [*seen, later], 10, (1, 8, 8), settings=SETTINGS)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")) == [
        "foreign.toml", "round-0001/client-3.after.safetensors", "round-0001/client-4.after.safetensors", "round-0001/global.safetensors",
        "round-0002/client-4.after.safetensors", "round-0002/client-4.before.safetensors", "truth/client-3.npz", "truth/client-4.npz",
    ]  # fmt: skip
    tree = tomllib.loads((tmp_path / "foreign.toml").read_text(encoding="utf-8"))
    assert tree["clients"]["4"]["epochs"] == 2
    assert tree["clients"]["4"]["samples"] == 30


@pytest.mark.parametrize(
    ("more", "auxiliary", "why"),
    [
        ({"y": None}, None, "client 0: y: expected an array, got NoneType"),
        ({"x": [[1.0, 2.0], [3.0]]}, None, "client 0: x: expected an array, got list"),
        ({"y": np.array([0] * 29 + [12])}, None, "client 0: y has 12"),
        ({"outside": (np.zeros((3, 1, 8, 8)),)}, None, "client 0, outside: expected a pair"),
        ({"samples": "many"}, None, "client 0: samples = 'many'"),
        ({}, (np.zeros((3, 1, 8, 8)),), "auxiliary: expected a pair"),
    ],
    ids=["labels missing", "ragged", "a label too many", "no labels outside", "no number", "no auxiliary labels"],
)
def test_bad_samples_are_named_when_they_are_written(tmp_path: Path, more: dict[str, Any], auxiliary: Any, why: str) -> None:
    update = replace(scene()[1][0], **more)
    with pytest.raises(InputError, match=re.escape(why)):
        save_updates(tmp_path, [update], 10, (1, 8, 8), settings=SETTINGS, auxiliary=auxiliary)


def test_a_folder_with_earlier_updates_is_not_written_into(tmp_path: Path) -> None:
    """Rounds that a longer recording left would be audited with the new ones."""
    updates = list(scene()[1])[:2]
    save_updates(tmp_path, updates, 10, (1, 8, 8), settings=SETTINGS)
    (tmp_path / "foreign.toml").unlink()  # as an interrupted recording leaves it
    with pytest.raises(InputError, match=r"has updates already \(round-0001\)"):
        save_updates(tmp_path, updates, 10, (1, 8, 8), settings=SETTINGS)


def test_rounds_go_by_their_numbers_however_these_are_written(tmp_path: Path) -> None:
    for name in ("round-2", "round-10", "round-0001"):
        (tmp_path / name).mkdir()
    assert [path.name for path in _rounds(tmp_path)] == ["round-0001", "round-2", "round-10"]
    (tmp_path / "round-02").mkdir()
    with pytest.raises(InputError, match="round-2: is the same round as round-02"):
        _rounds(tmp_path)
    (tmp_path / "round-02").rename(tmp_path / "round-two")
    with pytest.raises(InputError, match="round-two: is not called round-NUMBER"):
        _rounds(tmp_path)


def rewritten(**change: Any) -> Callable[[Path], None]:
    def change_toml(folder: Path) -> None:
        tree = tomllib.loads((folder / "foreign.toml").read_text(encoding="utf-8")) | change
        (folder / "foreign.toml").write_text(
            tomli_w.dumps({name: value for name, value in tree.items() if value is not None}), encoding="utf-8"
        )

    return change_toml


def saved(path: str, **arrays: Array) -> Callable[[Path], None]:
    return lambda folder: np.savez(folder / path, **arrays)  # type: ignore[arg-type]


ROUND = "round-0001"
BAD: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "foreign.toml").unlink(), "foreign.toml: is missing"),
    (lambda folder: (folder / "foreign.toml").write_text("classes 10", encoding="utf-8"), "foreign.toml: is not TOML"),
    (rewritten(format=2), "foreign.toml: format = 2: expected 1"), (rewritten(classes=None), "foreign.toml: classes is missing"),
    (rewritten(classes=1), "foreign.toml: classes = 1: expected an integer of 2 or more"),
    (rewritten(shape=[1, 0]), "foreign.toml: shape = [1, 0]: expected a list of sizes"),
    (rewritten(learning_rate=0.1), "foreign.toml: learning_rate = 0.1: is not a key here; known are format"),
    (rewritten(lr=-0.1), "foreign.toml: lr = -0.1"), (rewritten(std=[0.0]), "foreign.toml: std = [0.0]"),
    (rewritten(batch_norm="none"), "foreign.toml: batch_norm = 'none': expected 'train' or 'eval'"),
    (rewritten(head="fc"), "head 'fc': is no layer with a weight (10, …)"),
    (rewritten(model="resnet50"), "foreign.toml: model = 'resnet50': is not known; known are linear"),
    (rewritten(clients={"0": {"sample": 3}}), "foreign.toml: clients.0.sample = 3: is not a key here; known are samples"),
    (rewritten(clients={"0": {"samples": 0}}), "foreign.toml: clients.0.samples = 0: expected an integer of 1 or more"),
    (rewritten(clients={"first": {}}), "foreign.toml: clients.first = {}"),
    (lambda folder: (folder / ROUND / "global.safetensors").unlink(), "client-0.after.safetensors: has no state before beside it"),
    (
        lambda folder: (folder / ROUND / "client-1.after.safetensors").write_bytes(b"none"),
        "client-1.after.safetensors: not a readable safetensors file",
    ),
    (lambda folder: (folder / ROUND / "c1.safetensors").touch(), "c1.safetensors: is not called global.safetensors or client-NUMBER"),
    (lambda folder: (folder / "round-0001").rename(folder / "rounds"), "has no update (round-0001/client-0.after.safetensors)"),
    (lambda folder: (folder / "auxiliary.npz").write_bytes(b"none"), "auxiliary.npz: not a readable npz file"),
    (saved("auxiliary.npz", x=np.zeros((2, 1, 8, 8))), "auxiliary.npz: has no array 'y'; it has x"),
    (
        saved("auxiliary.npz", x=np.array([{}]), y=np.zeros(1, int)),
        "auxiliary.npz: not a readable npz file (array 'x': its header declares the type 'O'",
    ),
    (saved("truth/client-2.npz", x=np.zeros((2, 64)), y=np.zeros(2, int)), "client-2.npz: x has samples of shape (64,), but"),
    (lambda folder: (folder / "auxiliary.npz").unlink(), "auxiliary.npz: is missing; model = 'of my own loop' needs samples"),
]  # fmt: skip


def test_a_bad_folder_is_refused_in_one_line(
    tmp_path: Path, updates_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (spoil, said) in enumerate(BAD):
        spoilt = tmp_path / f"spoilt-{number}"
        shutil.copytree(updates_folder, spoilt)
        spoil(spoilt)
        assert in_process(monkeypatch, "audit", "--foreign", str(spoilt), "--plugin", str(updates_folder.parent / "net.py")) == 2, said
        words = capsys.readouterr().err
        assert words.count("\n") == 1, words
        assert said in words
        assert not (spoilt / "audit.json").exists()
    for options, said in (
        (("--active",), "--foreign, --active: give one of them"), (("--budget", "standard"), "--budget: does not apply with --foreign"),
        (("--attacks", "imprint"), "attack 'imprint'"),
    ):  # fmt: skip
        assert (
            in_process(monkeypatch, "audit", "--foreign", str(updates_folder), "--plugin", str(updates_folder.parent / "net.py"), *options)
            == 2
        )
        assert said in capsys.readouterr().err
    assert in_process(monkeypatch, "audit", "--foreign", str(tmp_path / "none")) == 2
    assert "none: no such folder" in capsys.readouterr().err
