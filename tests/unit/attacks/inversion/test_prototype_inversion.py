"""Prototypes: a linear model's are mean images, a network's are read by regression, and another run's show nothing."""

import numpy as np
import pytest
from attack_scenes import case, config, figures_of, unrelated

from cflpriv.attacks.inversion.prototype_inversion import images_of_prototypes, prototypes_in
from cflpriv.experiments import Config
from cflpriv.experiments.config.config import parse_config


def fedproto(name: str = "softmax", protection: dict[str, str] | None = None) -> Config:
    return config({"name": "fedproto"}, protection, model={"name": name}, data={"clients": 8, "samples_per_client": 12})


def test_a_linear_model_shows_mean_images() -> None:
    """Of each client, and of the owners of a class, as a member is sent them."""
    server, member = case(fedproto()), case(fedproto(), "client")
    whole = figures_of("prototype_inversion", server)
    assert whole["class_image_psnr_db"].status == "leaks"
    assert whole["class_image_psnr_db"].value == pytest.approx(100.0)
    assert figures_of("prototype_inversion", member).keys() == {"aggregate_class_image_psnr_db"}
    assert figures_of("prototype_inversion", member)["aggregate_class_image_psnr_db"].value == pytest.approx(100.0)


def test_a_view_of_other_clients_shows_nothing() -> None:
    assert {cell.status for cell in figures_of("prototype_inversion", unrelated(fedproto())).values()}.isdisjoint({"leaks"})


def test_a_class_that_a_client_lacks_has_no_prototype() -> None:
    seen = case(fedproto("mlp"))
    found = prototypes_in(seen.view)
    owned = {(client, label) for client, labels in seen.truth.label_sets.items() for label in labels}
    assert found.single.keys() == owned
    assert {label: found.senders[number, label] for label, number in found.rounds.items()} == {
        label: frozenset(client for client, of in owned if of == label) for label in found.means
    }


def test_regression_leads_back_from_features() -> None:
    """Prototypes that are a linear map of mean images, with a little noise: images that no class mean explains come back."""
    rng = np.random.default_rng(0)
    images, labels = rng.random((200, 1, 4, 4)), rng.integers(3, size=200)
    mixing = rng.normal(size=(16, 24))
    features = images.reshape(200, 16) @ mixing + 1e-3 * rng.normal(size=(200, 24))
    model = parse_config({"data": {}, "model": {"name": "mlp", "hidden": 24}, "training": {}}).model.build(
        (1, 4, 4), 3, (0.0,), (1.0,), False
    )
    known = features[:160], images[:160], labels[:160]
    found = images_of_prototypes(model, features[160:], labels[160:], known)
    assert np.abs(found - images[160:]).max() < 0.02
