"""Properties of clients' data that nobody asked for: thick strokes and slants of a hand, turned images, a label.

Statuses over five seeds are t-tests at 2.5 % (one-sided) of the differences less a margin; runs are seeded, so outcomes do not change.
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
from cflpriv.attacks.membership import roc
from cflpriv.attacks.property_inference import PENALTIES, PROPERTIES, pretended, statements, who_has
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import Config
from cflpriv.types import Array, ClientData, Population

SEEDS = range(5)
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
    """200 draws of 20 clients: the mean AUC has a standard error of .0094 (10 against 10: .132), so 4 of them fail one time in 16 000."""
    rng = np.random.default_rng(0)
    has = np.arange(20) < 10
    scores = [infer_property(rng.normal(size=(20, 9)), rng.normal(size=(40, 9)), rng.random(40)) for _ in range(200)]
    assert abs(np.mean([roc(one, has).auc for one in scores]) - 0.5) < 4 * 0.0094


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
    """The χ² test lets 1 % through: of 300 draws more than 12 with a chance of .2 %. Real differences are all found."""
    rng = np.random.default_rng(1)
    alarms = found = 0
    for number in range(300):
        for shares in (np.full(20, 0.3), np.linspace(0.1, 0.5, 20)):
            people = population_of(rng, shares)
            (stated,) = statements(prior_of(people, number))
            varies = who_has(stated, truth_of(people)) is not None
            alarms, found = (alarms + varies, found) if shares[0] == 0.3 else (alarms, found + varies)
    assert alarms <= 12
    assert found == 300


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


@pytest.mark.parametrize(("name", "made"), [("bold", None), ("slanted", None), ("wide", {"rotations": [0, 90]}), ("label_0", {})])
def test_beats_one_half_unprotected_over_seeds(name: str, made: dict[str, Any] | None) -> None:
    """Hands differ within all labels; turns and labels are those of groups."""
    several = []
    for seed in SEEDS:
        one = config(data=IID, seed=seed) if made is None else config(data=IID | made if made else {}, seed=seed)
        several.append(cells_of(hand_case(one, name) if made is None else case(one)))
    found = over_seeds(several)
    for source in ("signature", "update", *(["model"] if made is not None else [])):
        cell = found[f"{source}_{name}_auc", 0]
        assert cell.status == "leaks", cell.line()
        assert cell.seeds == tuple(SEEDS)
        assert cell.baseline == 0.5
        assert cell.low is not None
        assert cell.value is not None
        assert cell.low <= cell.value
        assert cell.value > LEAST[source], cell.line()


@pytest.mark.parametrize("name", ["bold", "wide"])
def test_falls_to_one_half_on_unrelated_clients(name: str) -> None:
    several = []
    for seed in SEEDS:
        if name == "bold":
            several.append(cells_of(hand_case(config(data=IID, seed=seed), name, other=True)))
        else:
            several.append(cells_of(unrelated(config(data=IID | {"rotations": [0, 90]}, seed=seed))))
    found = {metric: cell for (metric, _), cell in over_seeds(several).items() if f"_{name}_" in metric}
    assert found
    assert {cell.status for cell in found.values()} == {"at_baseline"}, [cell.line() for cell in found.values()]


def test_protections_take_signatures_and_updates_but_not_the_clusters_model() -> None:
    """One run: a rank test at 2.5 %, one-sided."""
    protection = {"gram": ["haar"], "sum": "secagg"}
    one = case(config(None, protection, data=IID | {"rotations": [0, 90]}, training={"rounds": 2, "epochs": 1}))
    found = {cell.metric: cell for cell in cells_of(one)}
    assert found["signature_wide_auc"].status == "at_baseline", found["signature_wide_auc"].line()
    assert found["update_auc"].status == "nothing_to_see"
    assert found["model_wide_auc"].status == "leaks", found["model_wide_auc"].line()


def test_where_nothing_varies_there_is_nothing_to_see() -> None:
    (cell,) = cells_of(case(config(data=IID)))
    assert cell.status == "nothing_to_see"
    assert "no property varies" in cell.note


def test_one_model_for_all_tells_no_client_apart() -> None:
    found = {cell.metric: cell for cell in cells_of(case(config({"name": "fedavg"}, data=IID | {"rotations": [0, 90]})))}
    assert found["model_auc"].status == found["signature_auc"].status == "nothing_to_see"
    assert found["update_wide_auc"].status == "leaks"
