"""The first attack, on recorded runs: it sees clear signatures, not rotated ones, and with one colluder everything."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflpriv.attacks import invert_signature, load_view, recover_label_set, view_of
from cflpriv.attacks.audit import audit_run
from cflpriv.attacks.leakage import Cell, cosine, prior_of, psnr_db, ssim, truth_of
from cflpriv.attacks.signature_inversion import guess, simulated_signatures
from cflpriv.attacks.significance import confidence_interval, judge, proportion_interval
from cflpriv.data import DataSpec, build_population
from cflpriv.errors import InputError
from cflpriv.experiments import Config, parse_config, run_experiment
from cflpriv.tasks.signatures import principal_vectors
from cflpriv.types import Population

PAIRS = {"partition": "pathological", "groups": [[0, 1], [2, 3], [4, 5], [6, 7]], "clients": 12}


def config(protection: dict[str, Any], **more: Any) -> Config:
    run = {"record": "full", "audit_parties": ["server", "client:0"], **more.pop("run", {})}
    return parse_config({
        "data": PAIRS | more.pop("data", {}), "model": {"hidden": 4}, "training": {"rounds": 1, "weights": "equal", "lr": 0.1},
        "algorithm": {"name": "pacfl"}, "protection": protection, "run": run, **more,
    })  # fmt: skip


ONLY = ("signature_inversion",)


def audited(folder: Path, adversary: str | None = None, population: Population | None = None) -> list[Cell]:
    return audit_run(folder, adversary=adversary, attacks=ONLY, budget="quick", population=population)


def by_metric(cells: list[Cell], adversary: str = "server") -> dict[str, Cell]:
    return {cell.metric: cell for cell in cells if cell.adversary == adversary}


@pytest.mark.parametrize("cut", ["silhouette", "test"])
def test_clear_signatures_show_images_and_labels(tmp_path: Path, cut: str) -> None:
    """Of the whole data, and of two halves."""
    run_experiment(config({}, algorithm={"name": "pacfl", "cut": cut}), tmp_path / "run")
    cells = by_metric(audited(tmp_path / "run", "server"))
    assert cells["mean_image_cosine"].value is not None
    assert cells["mean_image_cosine"].value > 0.99
    assert {cell.status for cell in cells.values()} == {"leaks"}
    assert cells["label_set_accuracy"].value is not None
    assert cells["label_set_accuracy"].value >= 0.9
    for cell in cells.values():
        assert cell.low is not None
        assert cell.high is not None
        assert cell.baseline is not None
        assert cell.value is not None
        assert cell.low <= cell.value <= cell.high
        assert cell.reference == pytest.approx(cell.value)
    written = json.loads((tmp_path / "run" / "audit.json").read_text())["cells"]
    keys = {"attack", "adversary", "protection", "metric", "value", "low", "high", "baseline", "reference", "status", "k_known", "seeds"}
    assert all(keys <= set(cell) for cell in written)
    arrays = np.load(tmp_path / "run" / "audit" / written[0]["arrays"], allow_pickle=False)
    assert arrays["recovered"].shape == arrays["truth"].shape == (12, 1, 8, 8)


@pytest.mark.parametrize("sketch_dim", [pytest.param(0, marks=pytest.mark.slow), 32])
def test_noisy_moments_show_images_where_the_noise_allows_it_and_they_are_not_sketched(tmp_path: Path, sketch_dim: int) -> None:
    privacy = {"unit": "sample", "epsilon": 500.0, "delta": 1e-5, "samples": 100, "sketch_dim": sketch_dim}
    run_experiment(config({}, algorithm={"name": "pacfl", "cut": "test"}, privacy=privacy), tmp_path / "run")
    cells = by_metric(audited(tmp_path / "run", "server"))
    if sketch_dim:  # 528 numbers, more than the 64 of a sample
        assert "sketched" in cells["mean_image_cosine"].note
        return
    for metric in ("mean_image_cosine", "label_set_accuracy"):
        assert cells[metric].status == "leaks"
        assert cells[metric].value == pytest.approx(cells[metric].reference, abs=0.1)


def test_under_haar_the_server_is_at_its_baseline_and_a_colluder_breaks_it(tmp_path: Path) -> None:
    run_experiment(config({"gram": ["haar"], "sum": "haar"}), tmp_path / "run")
    cells = audited(tmp_path / "run")
    server, coalition = by_metric(cells), by_metric(cells, "server+1")
    assert {cell.status for cell in server.values()} == {"at_baseline"}
    assert {cell.status for cell in coalition.values()} == {"leaks"}
    assert server["mean_image_cosine"].reference is not None
    assert server["mean_image_cosine"].reference > 0.99
    images = np.load(tmp_path / "run" / "audit" / "signature_inversion_server+1.npz")
    assert 0 not in images["clients"]  # the colluder's own data are no discovery


def test_unrelated_signatures_are_at_the_baseline() -> None:
    """The attack on signatures of nobody: 12 clients, the scores may not beat the baseline."""
    scene = build_population(DataSpec(partition="pathological", groups=((0, 1), (2, 3), (4, 5)), clients=12))
    prior, truth = prior_of(scene, 0), truth_of(scene)
    rng = np.random.default_rng(0)
    mean = prior.x.mean(axis=0)
    values, blank = [], []
    for client in scene.clients:
        noise = np.linalg.qr(rng.normal(size=(64, 3)))[0].T
        values.append(cosine(truth.mean_images[client.id], invert_signature(noise, prior.shape)))
        blank.append(cosine(truth.mean_images[client.id], mean))
    ones, zeros = np.ones(12), np.zeros(12)
    assert judge(np.array(values), np.array(blank), ones, zeros, 0.01) == "at_baseline"


def test_full_label_sets_are_nothing_to_see(tmp_path: Path) -> None:
    run_experiment(config({}, data={"partition": "iid", "groups": [], "rotations": [0, 90]}), tmp_path / "run")
    cells = by_metric(audited(tmp_path / "run", "server"))
    assert cells["label_set_accuracy"].status == "nothing_to_see"
    assert cells["label_set_accuracy"].value is None
    assert "nothing_to_see" in cells["label_set_accuracy"].line()


def test_the_attack_sees_no_truth() -> None:
    """The guess is a function of view and prior alone, and an empty view gives the same image for everyone."""
    scene = build_population(DataSpec(clients=4))
    blank = guess(None, prior_of(scene, 0), (0, 1, 2, 3))
    assert all(np.array_equal(blank.images[0], image) for image in blank.images.values())
    assert blank.label_sets == {}


def test_stand_alone_use() -> None:
    scene = build_population(DataSpec(partition="pathological", groups=((3, 8), (0, 5)), clients=2))
    data = scene.clients[0]
    signature = principal_vectors(data.x_train.reshape(len(data.x_train), -1), 3)
    image = invert_signature(-signature, (1, 8, 8))
    assert cosine(image, data.x_train.mean(axis=0)) > 0.99
    templates = simulated_signatures(prior_of(scene, 0), 2, 3)
    assert recover_label_set(signature, templates) == {3, 8}


def test_views_hide_what_the_adversary_cannot_read(tmp_path: Path) -> None:
    run_experiment(config({"gram": ["haar"], "sum": "haar"}), tmp_path / "run")
    view = load_view(tmp_path / "run")
    assert view.secrets == {}
    assert load_view(tmp_path / "run", "server+1").coalition == (0,)
    assert {m.operation for m in view.messages} >= {"gram", "mean", "compute"}
    with pytest.raises(InputError, match="secrets of 2"):
        load_view(tmp_path / "run", "server+2")
    with pytest.raises(InputError, match="janitor"):
        view_of(view.messages, "janitor", {})


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        audit_run(tmp_path)
    run_experiment(config({}, run={"record": "headers"}), tmp_path / "run")
    with pytest.raises(InputError, match="payloads were not recorded"):
        audit_run(tmp_path / "run")
    with pytest.raises(InputError, match="--attacks nothing"):
        audit_run(tmp_path / "run", attacks=["nothing"])


def test_an_algorithm_without_signatures_is_nothing_to_see(tmp_path: Path) -> None:
    run_experiment(config({}, algorithm={"name": "fedavg"}), tmp_path / "run")
    (cell,) = audited(tmp_path / "run", "server")
    assert cell.status == "nothing_to_see"


def test_newcomers_are_attacked_too(tmp_path: Path) -> None:
    run_experiment(config({}, data={"newcomers": 4}), tmp_path / "run")
    cells = by_metric(audited(tmp_path / "run", "server"))
    assert cells["mean_image_cosine"].status == "leaks"
    with np.load(tmp_path / "run" / "audit" / "signature_inversion_server.npz") as arrays:
        assert len(arrays["clients"]) == 12


def test_the_authors_signatures_show_the_mean_of_the_labels_images(tmp_path: Path) -> None:
    made = config({}, algorithm={"name": "pacfl", "variant": "authors", "labels_at_most": 3, "k": 4})
    run_experiment(made, tmp_path / "run")
    cells = by_metric(audited(tmp_path / "run", "server"))
    assert cells["mean_image_cosine"].status == "leaks"


def test_other_data_and_cut_transcripts_are_refused(tmp_path: Path) -> None:
    run_experiment(config({}), tmp_path / "run")
    other = build_population(config({}, data={"seed": 1}).data)
    with pytest.raises(InputError, match="other data"):
        audited(tmp_path / "run", population=other)
    messages = tmp_path / "run" / "transcript" / "messages.jsonl"
    messages.write_text("\n".join(messages.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(InputError, match="was cut"):
        audited(tmp_path / "run")


def test_a_colluder_counts_as_known(tmp_path: Path) -> None:
    run_experiment(config({"gram": ["haar"]}), tmp_path / "run")
    cells = audited(tmp_path / "run", "server+1")
    assert {cell.k_known for cell in cells if cell.value is not None} == {1}
    secret = tmp_path / "run" / "secrets" / "client_0.json"
    for content in ('{"party": "client:0", "group_secret": "xyz"}', '{"party": "janitor"}', "[]", "{"):
        secret.write_text(content)
        with pytest.raises(InputError, match="client_0"):
            load_view(tmp_path / "run", "server+1")


def test_few_scores_prove_nothing() -> None:
    assert judge(np.ones(2), np.zeros(2), np.ones(2), np.zeros(2), 0.1) == "not_validated"
    ones, zeros = np.ones(4), np.zeros(4)
    assert judge(ones, zeros, ones, zeros, 0.1) == "not_validated"  # 4 of 4: p = 1/16
    ones, zeros = np.ones(6), np.zeros(6)
    assert judge(ones, zeros, ones, zeros, 0.1) == "leaks"  # 6 of 6: p = 1/64
    low, high = proportion_interval(np.array([1.0, 1.0]))
    assert (round(low, 3), high) == (0.158, 1.0)


def test_statuses() -> None:
    high, low = np.full(10, 0.9) + np.linspace(0, 0.01, 10), np.full(10, 0.2)
    assert judge(high, low, high, low, 0.1) == "leaks"
    assert judge(low, low, high, low, 0.1) == "at_baseline"
    assert judge(high, low, low, low, 0.1) == "not_validated"
    bottom, top = confidence_interval(np.array([0.0, 1.0, 2.0]))
    assert bottom == pytest.approx(1 - 4.30265 / 3**0.5, abs=1e-4)
    assert top == pytest.approx(1 + 4.30265 / 3**0.5, abs=1e-4)
    assert psnr_db(np.zeros(4), np.full(4, 0.1)) == pytest.approx(20.0)
    assert psnr_db(np.zeros(4), np.zeros(4)) == 100.0
    assert ssim(np.ones((1, 8, 8)), np.ones((1, 8, 8))) == pytest.approx(1.0)
    assert np.isnan(ssim(np.ones((1, 4, 4)), np.ones((1, 4, 4))))
    assert cosine(np.zeros(3), np.ones(3)) == 0.0
