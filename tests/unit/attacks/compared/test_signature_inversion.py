"""The first attack, on recorded runs: it sees clear signatures, not rotated ones, and with one colluder everything."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import configured

from cflpriv.attacks import ATTACKS, invert_signature, load_view, place_signatures, recover_label_set, view_of
from cflpriv.attacks.audit import audit_run
from cflpriv.attacks.compared import signature_inversion
from cflpriv.attacks.compared.signature_inversion import guess, simulated_signatures
from cflpriv.attacks.compared.signature_places import Placed
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.figures.leakage import Case, Cell, cosine, prior_of, psnr_db, ssim, truth_of
from cflpriv.attacks.figures.pooling import pooled
from cflpriv.attacks.figures.significance import confidence_interval, judge, proportion_interval
from cflpriv.attacks.key_recovery import KeyRecoveryGuess
from cflpriv.data import DataSpec, build_population
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment
from cflpriv.tasks.signatures import principal_vectors
from cflpriv.types import Population

PAIRS = {"partition": "pathological", "groups": [[0, 1], [2, 3], [4, 5], [6, 7]], "clients": 12}


BASE: dict[str, dict[str, Any]] = {
    "data": PAIRS, "model": {"hidden": 4}, "training": {"rounds": 1, "weights": "equal", "lr": 0.1}, "algorithm": {"name": "pacfl"},
    "run": {"record": "full", "audit_parties": ["server", "client:0"]},
}  # fmt: skip
observed_config = partial(configured, BASE)
ONLY = ("signature_inversion",)


def audited(folder: Path, adversary: str | None = None, population: Population | None = None) -> list[Cell]:
    return audit_run(folder, adversary=adversary, attacks=ONLY, budget="quick", population=population)


def by_metric(cells: list[Cell], adversary: str = "server") -> dict[str, Cell]:
    return {cell.metric: cell for cell in cells if cell.adversary == adversary}


@pytest.mark.parametrize("cut", ["silhouette", "test"])
def test_clear_signatures_show_images_and_labels(tmp_path: Path, cut: str) -> None:
    """Of the whole data, and of two halves."""
    run_experiment(observed_config(algorithm={"name": "pacfl", "cut": cut}), tmp_path / "run")
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
    written = json.loads((tmp_path / "run" / "audit.json").read_text(encoding="utf-8"))["cells"]
    keys = {"attack", "adversary", "protection", "metric", "value", "low", "high", "baseline", "reference", "status", "k_known", "seeds"}
    assert all(keys <= set(cell) for cell in written)
    arrays = np.load(tmp_path / "run" / "audit" / written[0]["arrays"], allow_pickle=False)
    assert arrays["recovered"].shape == arrays["truth"].shape == (12, 1, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("sketch_dim", [pytest.param(0, marks=pytest.mark.slow), 32])
def test_noisy_moments_show_images_where_the_noise_allows_it_and_sketches_by_label_sets_only(tmp_path: Path, sketch_dim: int) -> None:
    privacy = {"unit": "sample", "epsilon": 500.0, "delta": 1e-5, "samples": 100, "sketch_dim": sketch_dim}
    run_experiment(observed_config(algorithm={"name": "pacfl", "cut": "test"}, privacy=privacy), tmp_path / "run")
    cells = by_metric(audited(tmp_path / "run", "server"))
    if sketch_dim:  # 528 numbers, more than the 64 of a sample
        assert cells["mean_image_cosine"].note.startswith("label sets from inner products")
        return
    for metric in ("mean_image_cosine", "label_set_accuracy"):
        assert cells[metric].status == "leaks"
        assert cells[metric].value == pytest.approx(cells[metric].reference, abs=0.1)


@pytest.mark.slow
def test_under_haar_there_are_label_sets_only_and_a_colluder_breaks_the_transform(tmp_path: Path) -> None:
    run_experiment(observed_config(protection={"gram": ["haar"], "sum": "haar"}), tmp_path / "run")
    cells = audited(tmp_path / "run")
    server, coalition = by_metric(cells), by_metric(cells, "server+1")
    assert all(cell.note.startswith("label sets from inner products") for cell in server.values())
    assert server["mean_image_cosine"].value is not None
    assert server["mean_image_cosine"].value < 0.998, "no values of rotated signatures are read as images"
    assert {cell.status for cell in coalition.values()} == {"leaks"}
    assert coalition["mean_image_cosine"].reference is not None
    assert coalition["mean_image_cosine"].reference > 0.99
    images = np.load(tmp_path / "run" / "audit" / "signature_inversion_server+1.npz")
    assert 0 not in images["clients"]  # the colluder's own data are no discovery


@pytest.mark.parametrize(("signed", "halves"), [(True, False), (False, True)])
def test_permuted_signatures_are_put_back_in_place(signed: bool, halves: bool) -> None:
    """Stand-alone: signatures (p, d), or of two halves, under an unknown order and unknown signs."""
    scene = build_population(DataSpec(partition="pathological", groups=((3, 8), (0, 5), (1, 4), (2, 9)), clients=12))
    prior, rng = prior_of(scene, 0), np.random.default_rng(0)
    flat = [client.x_train.reshape(len(client.x_train), -1) for client in scene.clients]
    parts = [[x[::2], x[1::2]] if halves else [x] for x in flat]
    clear = np.stack([np.concatenate([principal_vectors(part, 3) for part in several]) for several in parts])
    order, signs = rng.permutation(64), rng.choice([-1.0, 1.0], 64) if signed else np.ones(64)
    sent = (clear * signs)[:, :, order]
    templates = simulated_signatures(prior, 2, 3)
    found = place_signatures(sent, templates, [2] * 12, rows_per_part=3 if halves else 0, signed=signed)
    assert [set(one) for one in found.label_sets] == [set(np.unique(client.y_train).tolist()) for client in scene.clients]
    for rows, client in zip(found.undone(sent), scene.clients, strict=True):
        assert cosine(invert_signature(rows, prior.shape, 1.0, 3 if halves else 0), client.x_train.mean(axis=0)) > 0.99
    with pytest.raises(InputError, match="no template"):
        place_signatures(sent, templates, [3] * 12)
    if signed:
        with pytest.raises(InputError, match="negative values"):
            place_signatures(
                sent, {one: -rows[:, ::-1] * np.resize([1.0, -1.0], 64) for one, rows in templates.items()}, [2] * 12, signed=True
            )


@cache
def permuted_case(seed: int, kind: str = "permutation") -> Case:
    """Twenty clients in five groups, two labels each, dealt by the seed; signatures and updates are permuted."""
    groups = np.random.default_rng(seed).permutation(10).reshape(5, 2).tolist()
    made = observed_config(
        protection={"gram": [kind], "sum": kind}, data={"groups": groups, "clients": 20, "seed": seed}, run={"seed": seed}
    )
    return case_of(fresh_scene(made, build_population(made.data), 1), "server")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["permutation", pytest.param("signed_permutation", marks=pytest.mark.slow)])
def test_a_shared_permutation_hides_no_signatures(kind: str) -> None:
    seen = permuted_case(100, kind)
    cells, arrays = ATTACKS["signature_inversion"].cells(seen)
    assert {cell.status for cell in cells} == {"leaks"}, [cell.line() for cell in cells]
    found = by_metric(cells)
    assert found["mean_image_cosine"].value is not None
    assert found["mean_image_cosine"].value > 0.97
    assert found["label_set_accuracy"].value is not None
    assert found["label_set_accuracy"].value >= 0.9
    assert arrays is not None
    assert arrays["recovered"].shape == (20, 1, 8, 8)
    assert {cell.status for cell in ATTACKS["label_inference"].cells(seen)[0] if cell.metric == "histogram_l1"} == {"not_attempted"}


@pytest.mark.slow
def test_label_sets_of_updates_are_a_start_where_signatures_leave_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key recovery is asked only then, and only a better fit counts."""
    seen = permuted_case(100)
    asked: list[Any] = []

    def doubtful(*given: Any, starts: Any = (), **more: Any) -> Placed:
        asked.append(starts)
        return replace(place_signatures(*given, starts=starts, **more), settled=False)

    truth = {client: counts / counts.sum() for client, counts in seen.truth.label_counts.items()}
    monkeypatch.setattr(signature_inversion, "place_signatures", doubtful)
    monkeypatch.setattr(signature_inversion, "recover", lambda view, prior: KeyRecoveryGuess(truth))
    found = guess(seen.view, seen.prior, tuple(range(20)))
    assert asked[0] == ()
    assert asked[1] == [[seen.truth.label_sets[client] for client in range(20)]]
    assert np.mean([found.label_sets[client] == seen.truth.label_sets[client] for client in range(20)]) >= 0.9


@pytest.mark.slow
def test_permuted_signatures_over_five_seeds() -> None:
    """The claim, on digits: label sets .9 on average, mean images at a cosine of .97, with no known client."""
    several = [ATTACKS["signature_inversion"].cells(permuted_case(seed))[0] for seed in range(5)]
    for metric, least in (("label_set_accuracy", 0.9), ("mean_image_cosine", 0.97)):
        (one,) = pooled([cell for cells in several for cell in cells if cell.metric == metric])
        print(metric, [by_metric(cells)[metric].value for cells in several], one.line())
        assert one.status == "leaks"
        assert one.value is not None
        assert one.value >= least


@pytest.mark.slow
def test_permuted_signatures_of_others_show_nothing_of_these_clients() -> None:
    """Scored against clients of other groups, on three seeds."""
    several = []
    for seed in range(3):
        seen, other = permuted_case(seed), permuted_case(seed + 50)
        several.append(ATTACKS["signature_inversion"].cells(replace(seen, view=other.view))[0])
    for one in pooled([cell for cells in several for cell in cells]):
        assert one.status in ("at_baseline", "inconclusive"), one.line()


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


@pytest.mark.slow
def test_full_label_sets_are_nothing_to_see(tmp_path: Path) -> None:
    run_experiment(observed_config(data={"partition": "iid", "groups": [], "rotations": [0, 90]}), tmp_path / "run")
    cells = by_metric(audited(tmp_path / "run", "server"))
    assert cells["label_set_accuracy"].status == "not_applicable"
    assert cells["label_set_accuracy"].value is None
    assert "not_applicable" in cells["label_set_accuracy"].line()


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
    run_experiment(observed_config(protection={"gram": ["haar"], "sum": "haar"}), tmp_path / "run")
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
    run_experiment(observed_config(run={"record": "headers"}), tmp_path / "run")
    with pytest.raises(InputError, match="payloads were not recorded"):
        audit_run(tmp_path / "run")
    with pytest.raises(InputError, match="--attacks: 'nothing'"):
        audit_run(tmp_path / "run", attacks=["nothing"])


def test_an_algorithm_without_signatures_is_nothing_to_see(tmp_path: Path) -> None:
    run_experiment(observed_config(algorithm={"name": "fedavg"}), tmp_path / "run")
    (cell,) = audited(tmp_path / "run", "server")
    assert cell.status == "not_applicable"


@pytest.mark.slow
def test_newcomers_are_attacked_too(tmp_path: Path) -> None:
    run_experiment(observed_config(data={"newcomers": 4}), tmp_path / "run")
    cells = by_metric(audited(tmp_path / "run", "server"))
    assert cells["mean_image_cosine"].status == "leaks"
    with np.load(tmp_path / "run" / "audit" / "signature_inversion_server.npz") as arrays:
        assert len(arrays["clients"]) == 12


def test_the_authors_signatures_show_the_mean_of_the_labels_images(tmp_path: Path) -> None:
    made = observed_config(algorithm={"name": "pacfl", "variant": "authors", "labels_at_most": 3, "k": 4})
    run_experiment(made, tmp_path / "run")
    cells = by_metric(audited(tmp_path / "run", "server"))
    assert cells["mean_image_cosine"].status == "leaks"


def test_other_data_and_cut_transcripts_are_refused(tmp_path: Path) -> None:
    run_experiment(observed_config(), tmp_path / "run")
    other = build_population(observed_config(data={"seed": 1}).data)
    with pytest.raises(InputError, match="other data"):
        audited(tmp_path / "run", population=other)
    messages = tmp_path / "run" / "transcript" / "messages.jsonl"
    messages.write_text("\n".join(messages.read_text(encoding="utf-8").splitlines()[:-1]) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="was cut"):
        audited(tmp_path / "run")


@pytest.mark.slow
def test_a_colluder_counts_as_known(tmp_path: Path) -> None:
    run_experiment(observed_config(protection={"gram": ["haar"]}), tmp_path / "run")
    cells = audited(tmp_path / "run", "server+1")
    assert {cell.k_known for cell in cells if cell.value is not None} == {1}
    secret = tmp_path / "run" / "secrets" / "client_0.json"
    for content in ('{"party": "client:0", "group_secret": "xyz"}', '{"party": "janitor"}', "[]", "{"):
        secret.write_text(content, encoding="utf-8")
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
