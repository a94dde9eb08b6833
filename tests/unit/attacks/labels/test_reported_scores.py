"""Labels by losses and counts that clients report. Figures of unrelated data are tests at 2.5 % each, of seeded runs."""

import numpy as np
import pytest
from attack_scenes import case, config, figures_of, unrelated
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.attacks.adversary import AdversaryView
from cflpriv.attacks.evidence.reported_losses import losses_reported
from cflpriv.attacks.evidence.updates import public_model
from cflpriv.attacks.labels.reported_scores import counts_reported, shares_by_losses
from cflpriv.attacks.membership.member_scores import confidences
from cflpriv.contract.transcript import Message

GWC = {"name": "fedgwc"}


def gathered(confusion: np.ndarray, coalition: tuple[int, ...] = ()) -> AdversaryView:
    clients = tuple(range(len(confusion)))
    message = Message(
        0, 0, "gather", "correct+count+confusion", "clients", "server", clients, ("server",), 8, 3, 24, "", payload={"confusion": confusion}
    )  # fmt: skip
    return AdversaryView("server", (message,), {}, coalition)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(0, 1000))
def test_counts_are_read_exactly(classes: int, seed: int) -> None:
    tables = np.random.default_rng(seed).integers(0, 9, (3, classes, classes)) + np.eye(classes)
    found = counts_reported(gathered(tables.astype(float)), classes)
    for client, table in enumerate(tables):
        assert found[client] == pytest.approx(table.sum(axis=1) / table.sum())
    assert set(counts_reported(gathered(tables.astype(float), (1,)), classes)) == {0, 2}


def test_counts_that_are_of_another_form_are_left_out() -> None:
    for strange in (np.full((2, 3, 3), np.nan), -np.ones((2, 3, 3)), np.zeros((2, 3, 3)), np.ones((2, 7)), np.ones((2, 0, 0))):
        assert not counts_reported(gathered(strange), 3)


def test_losses_of_known_models_are_those_that_clients_sent() -> None:
    """Oracle: the mean loss of a client's samples at the model that it was sent."""
    seen = case(
        config(GWC, {"sum": "secagg"}, training={"rounds": 2, "participation": 0.75}, data={"clients": 8, "samples_per_client": 12})
    )
    model = public_model(seen.prior)
    reported = losses_reported(seen.view, model.dimension)
    assert len(reported) >= 6
    prior = seen.prior
    for client, pairs in list(reported.items())[:2]:
        x, y = seen.truth.data[client]
        for vector, loss in pairs:
            (row,) = confidences(model, vector[None].astype(np.float32), x, y)
            assert float(np.log1p(np.exp(-row)).mean()) == pytest.approx(loss, rel=1e-3)
    shares = shares_by_losses(reported, prior, model)
    for client, row in shares.items():
        assert row.sum() == pytest.approx(1.0)
        assert (row > 0).sum() <= prior.labels_per_client[client]


@pytest.mark.slow
def test_losses_show_labels_under_secure_sums() -> None:
    made = config(GWC, {"sum": "secagg"}, training={"rounds": 6, "participation": 0.6}, data={"clients": 16, "samples_per_client": 20})
    found = figures_of("reported_scores", case(made))["losses_histogram_l1"]
    assert found.status == "leaks", found.line()
    assert found.value is not None
    assert found.value < 1.0
    assert figures_of("reported_scores", unrelated(made))["losses_histogram_l1"].status != "leaks"
