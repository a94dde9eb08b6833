"""A server that sends bins for a first layer: exact on gradients made by hand, at baseline under noise, and not stopped by a secure sum."""

from typing import Any

import numpy as np
import pytest
from attack_scenes import case, config, figures_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.attacks import ATTACKS, images_from_imprint
from cflpriv.attacks.figures.leakage import Cell, prior_of
from cflpriv.attacks.inversion import imprint
from cflpriv.attacks.inversion.imprint import guess, imprinted, share_of_images, summed, updates_of
from cflpriv.data import DataSpec, build_population
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData, Population

pytestmark = pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
"""The steps before clusters are formed are what is tested."""


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_samples_alone_in_their_bin_come_out_exactly(bins: int, size: int, seed: int) -> None:
    """Oracle: gradients summed by hand, unit j over all samples of bins j and above."""
    rng = np.random.default_rng(seed)
    x, slopes = rng.random((bins, size)), rng.choice([-1.0, 1.0], bins) * rng.uniform(0.5, 2.0, bins)
    taken = rng.random(bins) < 0.6
    weight = np.array([(slopes[j:, None] * x[j:] * taken[j:, None]).sum(axis=0) for j in range(bins)]).reshape(bins, size)
    bias = np.array([(slopes[j:] * taken[j:]).sum() for j in range(bins)])
    assert np.allclose(images_from_imprint(weight, bias), x[taken], atol=1e-9)


def test_what_is_no_gradient_of_a_layer_is_refused() -> None:
    with pytest.raises(InputError, match=r"bias_gradient: has 3 values for 2 rows"):
        images_from_imprint(np.zeros((2, 4)), np.zeros(3))
    with pytest.raises(InputError, match="weight_gradient"):
        images_from_imprint(np.full((2, 4), np.nan), np.zeros(2))
    with pytest.raises(InputError, match="'lenet5'"):
        imprinted(Model("lenet5", (1, 16, 16), 4), np.zeros((3, 1, 16, 16)))


@pytest.fixture(scope="module")
def digits() -> Population:
    return build_population(DataSpec(source="digits", clients=10))


def client_of(population: Population, name: int, size: int, seed: int = 0) -> ClientData:
    """`size` images of the whole training data, dealt by `seed`, the part numbered `name`."""
    x, y = (np.concatenate([getattr(one, part) for one in population.clients]) for part in ("x_train", "y_train"))
    mine = np.random.default_rng(seed).permutation(len(y))[name * size : (name + 1) * size]
    return ClientData(name, x[mine], y[mine], x[:0], y[:0])


def recovered(population: Population, bins: int, size: int, seed: int, clients: int = 1) -> float:
    """The share of images that one full-batch step shows; with several clients, that the real secure sum over them shows."""
    model = Model("mlp", population.shape, population.classes, bins, population.mean, population.std)
    prior = prior_of(population, 0)
    start, people = imprinted(model, prior.x), [client_of(population, name, size, seed) for name in range(clients)]
    updates = updates_of(people, Train(model, 1, 0, 0.1), start, seed)
    total: Array | None = updates[0] if clients == 1 else summed(updates, start, clip=1.0, min_cohort=3)
    assert total is not None
    return share_of_images(np.concatenate([one.x_train for one in people]), guess(total, prior, model))


@pytest.mark.parametrize(("bins", "size"), [(16, 8), (64, 32), (256, 32), (256, 64)])
def test_the_share_is_that_of_samples_alone_in_a_bin(digits: Population, bins: int, size: int) -> None:
    """(1 − 1/K)^(n − 1) for n samples dealt evenly to K bins.

    Each of 24 draws has a deviation of at most .18 (8 shares of 0 or 1), so their mean one of .037, and .12 is more than 3 of these (error
    rate below .2 % a case) where bins are even; that 359 auxiliary samples do not make them so takes up to .08 of it.
    """
    share = np.mean([recovered(digits, bins, size, seed) for seed in range(24)])
    assert abs(share - (1 - 1 / bins) ** (size - 1)) < 0.12


def test_a_secure_sum_only_disperses(digits: Population) -> None:
    """Five clients with 8 images each, one real secure sum bound to the model: as good as one client with 40; more bins make up for it."""
    alone, together, wide = recovered(digits, 64, 8, 0), recovered(digits, 64, 8, 0, clients=5), recovered(digits, 512, 8, 0, clients=5)
    assert together == pytest.approx(recovered(digits, 64, 40, 0), abs=0.03)
    assert alone > together > 0.3
    assert wide > 0.8


def imprinted_config(protection: dict[str, Any] | None = None, **more: Any) -> Any:
    data = {"clients": 8, "samples_per_client": 20} | more.pop("data", {})
    return config({"name": "fedavg"}, protection, training={"rounds": 1} | more.pop("training", {}), data=data, **more)


def imprint_figures(protection: dict[str, Any] | None = None, adversary: str = "active-server", **more: Any) -> dict[str, Cell]:
    more = {"model": {"hidden": 128}} | more
    return figures_of("imprint", case(imprinted_config(protection, **more), adversary))


def test_single_updates_are_images() -> None:
    found = imprint_figures()
    for metric, least in (("images_recovered_gradient", 0.6), ("images_recovered_update", 0.3)):
        cell = found[metric]
        assert cell.status == "leaks"
        assert cell.baseline == 0.0
        assert cell.value is not None
        assert cell.value == cell.reference
        assert cell.value > least, cell.line()


@pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
def test_clients_train_on_the_crafted_model_as_on_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-FedAvg's by its own rate; of what pFedLIA's hold back nothing is looked for."""
    trained: list[Train] = []

    def noted(people: Any, train: Train, *more: Any) -> Any:
        trained.append(train)
        return updates_of(people, train, *more)

    monkeypatch.setattr(imprint, "updates_of", noted)
    for algorithm in ({"name": "per_fedavg", "beta": 1e-6}, {"name": "pfedlia", "warm_up": 9}):
        run = config(algorithm, training={"rounds": 1}, data={"clients": 8, "samples_per_client": 20}, model={"hidden": 16})
        (cell, _) = ATTACKS["imprint"].cells(case(run, "active-server"))[0]
    assert [train.lr for train in trained] == [0.1, 1e-6, 0.1, 0.1]
    assert f"{8 * 15} images" in cell.note


def test_a_bound_secure_sum_still_shows_images() -> None:
    cell = imprint_figures({"sum": "secagg"})["images_recovered_gradient"]
    assert cell.status == "leaks"
    assert cell.value is not None
    assert cell.reference is not None
    assert 0.1 < cell.value < cell.reference
    assert "bound to the model sent" in cell.note


@pytest.mark.slow
def test_noise_on_samples_leaves_no_image_and_that_is_no_proof() -> None:
    privacy = {"unit": "sample", "epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0, "samples": 20}
    found = imprint_figures(training={"batch_size": 10, "epochs": 1}, privacy=privacy)
    assert {cell.status for cell in found.values()} == {"inconclusive"}
    assert all(cell.value == 0.0 and cell.reference for cell in found.values())


def test_steps_of_adam_are_no_gradients_and_prove_nothing() -> None:
    """It divides gradients by their own sizes; nothing comes out unprotected, so nothing is claimed of sums either."""
    for protection in ({}, {"sum": "secagg"}):
        found = imprint_figures(protection, training={"optimizer": "adam", "lr": 0.01})
        assert {(cell.status, cell.value, cell.reference) for cell in found.values()} == {("not_validated", 0.0, 0.0)}


@pytest.mark.parametrize(
    ("protection", "adversary", "model", "why"),
    [
        ({}, "server", {"hidden": 8}, "an active server"),
        ({}, "active-server", {"name": "linear"}, "the first layer of 'linear'"),
        ({"sum": "haar"}, "active-server", {"hidden": 8}, "not attempted under sum = 'haar'"),
    ],
)
def test_where_there_is_nothing_to_gain_the_cell_says_why(
    protection: dict[str, Any], adversary: str, model: dict[str, Any], why: str
) -> None:
    (cell,) = imprint_figures(protection, adversary, model=model).values()
    assert cell.status == "not_attempted"
    assert why in cell.note


def test_an_unrelated_update_shows_none_of_these_images(digits: Population) -> None:
    model = Model("mlp", digits.shape, digits.classes, 256, digits.mean, digits.std)
    prior = prior_of(digits, 0)
    mine, other = client_of(digits, 0, 20), client_of(digits, 1, 20)
    start = imprinted(model, prior.x)
    images = guess(updates_of([other], Train(model, 1, 0, 0.1), start, 0)[1], prior, model)
    assert share_of_images(other.x_train, images) > 0.6
    assert share_of_images(mine.x_train, images) == 0.0
