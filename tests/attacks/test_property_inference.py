"""Properties of clients' data that nobody asked for: thick strokes and slants of a hand, turned images, a label.

Statuses over four seeds are t-tests at 2.5 % (one-sided) of the differences less a margin; runs are seeded, so outcomes do not change.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack_scenes import QUICK, case, config, over_seeds, unrelated
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import RidgeCV

from cflpriv.attacks import ATTACKS, infer_property
from cflpriv.attacks.audit import case_of, fresh_scene
from cflpriv.attacks.leakage import Case, Cell, prior_of, truth_of
from cflpriv.attacks.property_inference import PENALTIES, PROPERTIES, pretended, score, statements, who_has
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import Config
from cflpriv.types import Array, ClientData, Population

SEEDS = range(4)
IID: dict[str, Any] = {"partition": "iid", "groups": []}


def cells_of(one: Case) -> list[Cell]:
    return ATTACKS["property_inference"].cells(one)[0]


def hands(made: Config, name: str, shift: int = 0) -> Population:
    """Twenty clients with all labels, of whom six, a minority, have three in four samples with a property, the others one in four."""
    people = build_population(made.data)
    x, y = (np.concatenate([getattr(one, part) for one in people.clients]) for part in ("x_train", "y_train"))
    (stated,) = [one for one in statements(prior_of(people, made.run.seed)) if one.name == name]
    rng = np.random.default_rng(made.run.seed)
    pools = [list(rng.permutation(np.flatnonzero(stated.holds(x, y) == side))) for side in (False, True)]
    clients = []
    for one in sorted(people.clients, key=lambda one: one.id):
        with_it = 30 if (one.id + shift) % 20 < 6 else 10
        mine = [pools[side].pop() for side, many in ((True, with_it), (False, 40 - with_it)) for _ in range(many)]
        clients.append(replace(one, x_train=x[mine], y_train=y[mine]))
    return replace(people, clients=tuple(clients), groups=(0,) * len(clients))


def hand_case(made: Config, name: str, *, other: bool = False) -> Case:
    """The case of `hands`; with `other` the view is of a run in which the minority are other clients' data, and other clients."""
    mine = case_of(fresh_scene(made, hands(made, name), made.training.rounds, QUICK), "server", QUICK)
    if not other:
        return mine
    again = replace(made, run=replace(made.run, seed=made.run.seed + 77), data=replace(made.data, seed=made.data.seed + 77))
    shift = int(np.random.default_rng(made.run.seed).integers(20))
    theirs = case_of(fresh_scene(again, hands(again, name, shift), made.training.rounds, QUICK), "server", QUICK)
    return replace(mine, view=theirs.view)


# --- the mathematics ----------------------------------------------------------------------------------------------------------------


@given(st.integers(5, 30), st.integers(1, 40), st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_scores_are_those_of_ridge_regression_with_its_penalty_by_leave_one_out(count: int, size: int, seed: int) -> None:
    """Oracle: scikit-learn's, on centred data."""
    rng = np.random.default_rng(seed)
    made, seen = rng.normal(size=(count, size)), rng.normal(size=(7, size))
    share = made @ rng.normal(size=size) + rng.normal(size=count)
    centred, middle = made - made.mean(axis=0), share.mean()
    scale = np.linalg.norm(centred) ** 2 / count
    oracle = RidgeCV(PENALTIES * scale, fit_intercept=False).fit(centred, share - middle)
    assert np.allclose(infer_property(seen, made, share), oracle.predict(seen - made.mean(axis=0)) + middle, rtol=1e-5, atol=1e-6)


def test_features_that_say_nothing_give_an_auc_of_one_half() -> None:
    """100 draws of 20 clients: the mean AUC has a standard error of .0132 (10 against 10: .132), so 4 of them fail one time in 16 000."""
    rng = np.random.default_rng(0)
    has = np.arange(20) < 10
    scores = [infer_property(rng.normal(size=(20, 9)), rng.normal(size=(40, 9)), rng.random(40)) for _ in range(100)]
    assert abs(np.mean([score(one, has)[0] for one in scores]) - 0.5) < 4 * 0.0132


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="do not fit"):
        infer_property(np.zeros((2, 3)), np.zeros((5, 4)), np.zeros(5))
    with pytest.raises(InputError, match="seen: value at index"):
        infer_property(np.full((2, 3), np.nan), np.zeros((5, 3)), np.zeros(5))


# --- what is asked ------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_measures_answer_to_what_they_are_named_after(seed: int) -> None:
    x = np.random.default_rng(seed).random((4, 1, 9, 9))
    y = np.zeros(4, np.int64)
    measures = {name: measure for name, (measure, _) in PROPERTIES.items()}
    assert np.allclose(measures["wide"](np.rot90(x, axes=(2, 3)), y), -measures["wide"](x, y))
    assert np.allclose(measures["slanted"](x[..., ::-1], y), -measures["slanted"](x, y))
    thin, thick = np.zeros((1, 1, 9, 9)), np.zeros((1, 1, 9, 9))
    thin[..., 2:7, 4:5], thick[..., 2:7, 3:6] = 1.0, 1.0
    assert measures["bold"](thick, y[:1]) > measures["bold"](thin, y[:1])


def population_of(rng: np.random.Generator, shares: Array) -> Population:
    """Clients with 50 samples of which a share has label 0."""
    clients = []
    for i, share in enumerate(shares):
        y = np.where(rng.random(50) < share, 0, 1 + rng.integers(4, size=50))
        x = rng.random((50, 3))
        clients.append(ClientData(i, x, y, x, y))
    return Population("made", tuple(clients), (0,) * len(clients), 5)


def test_what_random_draws_vary_by_is_no_property() -> None:
    """The χ² test lets 1 % through: more than 6 of 100 draws with a chance of 1 in 10 000. Real differences are all found."""
    rng = np.random.default_rng(1)
    alarms = found = 0
    for number in range(100):
        for shares in (np.full(20, 0.3), np.linspace(0.1, 0.5, 20)):
            people = population_of(rng, shares)
            (stated,) = statements(prior_of(people, number))
            varies = who_has(stated, truth_of(people)) is not None
            alarms, found = (alarms + varies, found) if shares[0] == 0.3 else (alarms, found + varies)
    assert alarms <= 6
    assert found == 100


def test_pretended_clients_are_like_the_real_ones_and_have_all_shares() -> None:
    one = case(config(data=IID))
    for stated in statements(one.prior):
        clients, shares = pretended(stated, one.prior, 60)
        assert {len(y) for _, y in clients} <= set(one.prior.samples_per_client.values())
        assert np.allclose([stated.holds(x, y).mean() for x, y in clients], shares)
        if stated.name != "label_0":
            assert shares.min() < 0.2
            assert shares.max() > 0.8


# --- recorded runs ------------------------------------------------------------------------------------------------------------------

LEAST = {"signature": 0.8, "update": 0.8, "model": 0.9}


def leaks(found: dict[tuple[str, int], Cell], metric: str) -> None:
    cell = found[metric, 0]
    assert cell.status == "leaks", cell.line()
    assert cell.seeds == tuple(SEEDS)
    assert cell.baseline == 0.5
    assert cell.low is not None
    assert cell.value is not None
    assert cell.low <= cell.value
    assert cell.value > LEAST[metric.partition("_")[0]], cell.line()


@pytest.mark.parametrize("name", ["bold", pytest.param("slanted", marks=pytest.mark.slow)])
def test_a_hand_shows_in_signatures_and_updates_over_seeds(name: str) -> None:
    """It differs within all labels, and no algorithm asked about it."""
    found = over_seeds([cells_of(hand_case(config(data=IID, seed=seed), name)) for seed in SEEDS])
    for source in ("signature", "update"):
        leaks(found, f"{source}_{name}_auc")


def test_turns_and_labels_of_groups_show_in_all_three_views_over_seeds() -> None:
    found = over_seeds([cells_of(case(config(data={"rotations": [0, 90], "clients": 24}, seed=seed))) for seed in SEEDS])
    for source in LEAST:
        for name in ("wide", "label_0"):
            leaks(found, f"{source}_{name}_auc")


def test_a_hand_is_not_seen_in_unrelated_clients() -> None:
    found = over_seeds([cells_of(hand_case(config(data=IID, seed=seed), "bold", other=True)) for seed in SEEDS])
    judged = [found[f"{source}_bold_auc", 0] for source in ("signature", "update")]
    assert {cell.status for cell in judged} == {"at_baseline"}, [cell.line() for cell in judged]


@pytest.mark.slow
def test_turns_are_not_seen_in_unrelated_clients() -> None:
    found = over_seeds([cells_of(unrelated(config(data=IID | {"rotations": [0, 90]}, seed=seed))) for seed in SEEDS])
    judged = [found[f"{source}_wide_auc", 0] for source in LEAST]
    assert {cell.status for cell in judged} == {"at_baseline"}, [cell.line() for cell in judged]


def test_protections_take_signatures_and_updates_but_not_the_clusters_model() -> None:
    """Under a shared rotation each run is one toss of a coin: four that agree would be 1 in 16, but secrets are seeded here."""
    protection, run = {"gram": ["haar"], "sum": "secagg"}, {"insecure_test_entropy": True}
    data, training = IID | {"rotations": [0, 90]}, {"rounds": 2, "epochs": 1}
    several = [cells_of(case(config(None, protection, seed, data=data, training=training, run=run))) for seed in SEEDS]
    assert all(cell.status != "leaks" for cells in several for cell in cells if cell.metric.startswith("signature"))
    found = over_seeds(several)
    assert found["signature_wide_auc", 0].status == "at_baseline", found["signature_wide_auc", 0].line()
    assert found["update_auc", 0].status == "nothing_to_see"
    assert found["model_wide_auc", 0].status == "leaks", found["model_wide_auc", 0].line()


def test_two_groups_are_two_trials_and_one_run_of_them_claims_nothing() -> None:
    found = {cell.metric: cell for cell in cells_of(case(config(data=IID | {"rotations": [0, 90]})))}
    assert {cell.status for cell in found.values()} == {"not_validated"}
    assert found["model_wide_auc"].value == 1.0


def test_where_nothing_varies_there_is_nothing_to_see() -> None:
    (cell,) = cells_of(case(config(data=IID)))
    assert cell.status == "nothing_to_see"
    assert "no property varies" in cell.note


def test_one_model_for_all_tells_no_client_apart() -> None:
    found = {cell.metric: cell for cell in cells_of(case(config({"name": "fedavg"}, data=IID | {"rotations": [0, 90]})))}
    assert found["model_auc"].status == found["signature_auc"].status == "nothing_to_see"
    assert (found["update_wide_auc"].value or 0.0) > 0.9
