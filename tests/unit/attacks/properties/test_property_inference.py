"""Properties of clients' data that nobody asked for: thick strokes and slants of a hand, turned images, a label.

Statuses over four seeds are t-tests at 2.5 % (one-sided) of the differences less a margin; runs are seeded, so outcomes do not change.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack_scenes import QUICK, case, config, over_seeds, unrelated
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import RidgeCV

from cflpriv.attacks import ATTACKS, infer_property
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.evidence.updates import ClientStep
from cflpriv.attacks.figures.leakage import Case, Cell, Prior, prior_of, truth_of
from cflpriv.attacks.figures.significance import RATE
from cflpriv.attacks.membership.member_scores import auc_interval
from cflpriv.attacks.properties import property_clients
from cflpriv.attacks.properties.property_clients import pretended_updates, simulated_data
from cflpriv.attacks.properties.property_inference import first_steps
from cflpriv.attacks.properties.property_regression import PENALTIES
from cflpriv.attacks.properties.property_statements import PROPERTIES, statements, who_has
from cflpriv.attacks.properties.property_sums import tells_apart
from cflpriv.attacks.properties.property_trials import chance_dealt, interval_over_groups, is_toss, score, trials_of
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import Config
from cflpriv.types import Array, ClientData, Population

SEEDS = range(4)
IID: dict[str, Any] = {"partition": "iid", "groups": []}


def cells_of(one: Case) -> list[Cell]:
    found: list[Cell] = ATTACKS["property_inference"].cells(one)[0]
    return found


def hands(made: Config, name: str, whose: Collection[int] = range(6)) -> Population:
    """Twenty clients with all labels, of whom six, `whose`, have three in four samples with a property, the others one in four."""
    people = build_population(made.data)
    x, y = (np.concatenate([getattr(one, part) for one in people.clients]) for part in ("x_train", "y_train"))
    (stated,) = [one for one in statements(prior_of(people, made.run.seed)) if one.name == name]
    rng = np.random.default_rng(made.run.seed)
    pools = [list(rng.permutation(np.flatnonzero(stated.holds(x, y) == side))) for side in (False, True)]
    clients = []
    for one in sorted(people.clients, key=lambda one: one.id):
        with_it = 30 if one.id in whose else 10
        mine = [pools[side].pop() for side, many in ((True, with_it), (False, 40 - with_it)) for _ in range(many)]
        clients.append(replace(one, x_train=x[mine], y_train=y[mine]))
    return replace(people, clients=tuple(clients), groups=(0,) * len(clients))


def hand_case(made: Config, name: str, *, other: bool = False) -> Case:
    """The case of `hands`; with `other` the view is of a run on other data in which the minority is dealt again."""
    mine = case_of(fresh_scene(made, hands(made, name), made.training.rounds, QUICK), "server", QUICK)
    if not other:
        return mine
    again = replace(made, run=replace(made.run, seed=made.run.seed + 77), data=replace(made.data, seed=made.data.seed + 77))
    whose = np.random.default_rng(made.run.seed).permutation(20)[:6].tolist()
    theirs = case_of(fresh_scene(again, hands(again, name, whose), made.training.rounds, QUICK), "server", QUICK)
    return replace(mine, view=theirs.view)


def test_pretended_clients_draw_batches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a client's very samples they train in another order: what batches the client drew is not known to an attacker."""
    made = config(training={"rounds": 1, "epochs": 1})
    seen = case(made)
    steps = first_steps(seen.view, made.model_for(build_population(made.data)).dimension)
    own = [seen.truth.data[client] for client in sorted(seen.truth.data)]
    monkeypatch.setattr(property_clients, "simulated_data", lambda *_: (own, np.zeros(len(own))))
    found = pretended_updates(statements(seen.prior)[0], seen.prior, len(own), steps[0]).features
    assert len(found) == len(steps)
    for client, row in enumerate(found):
        assert np.abs(row - steps[client].update).max() > 1e-3


# --- the mathematics ----------------------------------------------------------------------------------------------------------------


@given(st.integers(5, 30), st.integers(1, 40), st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_scores_are_those_of_ridge_regression_with_its_penalty_by_leave_one_out(count: int, size: int, seed: int) -> None:
    """Oracle: scikit-learn's, with an intercept that each fit without a client has anew."""
    rng = np.random.default_rng(seed)
    made, seen = rng.normal(size=(count, size)), rng.normal(size=(7, size))
    share = made @ rng.normal(size=size) + rng.normal(size=count)
    scale = np.linalg.norm(made - made.mean(axis=0)) ** 2 / count
    oracle = RidgeCV(PENALTIES * scale).fit(made, share)
    assert np.allclose(infer_property(seen, made, share), oracle.predict(seen), rtol=1e-5, atol=1e-6)


def test_features_that_say_nothing_give_an_auc_of_one_half() -> None:
    """100 draws of 20 clients: the mean AUC has a standard error of .0132 (10 against 10: .132), so 4 of them fail one time in 16 000."""
    rng = np.random.default_rng(0)
    has = np.arange(20) < 10
    scores = [infer_property(rng.normal(size=(20, 9)), rng.normal(size=(40, 9)), rng.random(40)) for _ in range(100)]
    assert abs(np.mean([score(one, has) for one in scores]) - 0.5) < 4 * 0.0132


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="do not fit"):
        infer_property(np.zeros((2, 3)), np.zeros((5, 4)), np.zeros(5))
    with pytest.raises(InputError, match="seen: value at index"):
        infer_property(np.full((2, 3), np.nan), np.zeros((5, 3)), np.zeros(5))


# --- trials -------------------------------------------------------------------------------------------------------------------------

GROUPS = np.repeat(np.arange(4), 6)


def by_group(rng: np.random.Generator, own: float) -> tuple[Array, Array]:
    """Scores that tell four groups apart, and, as far as `own` goes, which clients have a property; two groups have it mostly."""
    many = rng.permutation([5, 5, 1, 1])
    has = np.concatenate([rng.permutation(6) < one for one in many])
    return rng.normal(size=4)[GROUPS] + 0.05 * rng.normal(size=24) + own * has, has


@pytest.mark.slow
def test_a_score_that_tells_groups_apart_is_no_leak_of_what_these_have_in_part() -> None:
    """Alarms at 2.5 %: more than 12 of 200 one time in 500. Compared over all clients alike they were 60 of 400."""
    rng = np.random.default_rng(0)
    alarms = found = naive = 0
    for _ in range(200):
        for own in (0.0, 0.2):
            scores, has = by_group(rng, own)
            tried = trials_of(scores[None], has, GROUPS)
            sure = chance_dealt(tried.scores[0], tried.has, tried.blocks, rng) < RATE
            alarms, found = (alarms + sure, found) if own == 0.0 else (alarms, found + sure)
            naive += own == 0.0 and chance_dealt(scores, has, np.zeros(24), rng) < RATE
    assert alarms <= 12
    assert found > 175
    assert naive > 12


def test_clients_of_one_group_count_once_where_they_have_score_and_property_in_common() -> None:
    has = GROUPS % 2 == 0
    assert interval_over_groups(np.array([3.0, 1.0, 2.0, 0.0])[GROUPS], has, GROUPS) == pytest.approx(auc_interval(1.0, 2, 2))
    alone = np.random.default_rng(0).normal(size=24)
    assert interval_over_groups(alone, has, np.arange(24)) == pytest.approx(auc_interval(score(alone, has), 12, 12))
    assert interval_over_groups(alone, has, np.zeros(24)) == pytest.approx(auc_interval(score(alone, has), 12, 12))


def test_two_groups_are_a_toss_if_the_property_is_theirs() -> None:
    two, has = GROUPS // 2, np.arange(24) % 2 == 0
    assert is_toss(two == 0, two)
    assert not is_toss(GROUPS == 0, GROUPS)
    assert not is_toss(has, two)
    assert not is_toss(has, np.zeros(24))


# --- what is asked ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((1, 8, 8), {"bold", "wide", "slanted", "label_0"}),
        ((3, 8, 8), {"bold", "wide", "slanted", "label_0"}),
        ((81, 7, 7), {"label_0"}),
        ((1, 1, 6), {"value_0", "label_0"}),
        ((6,), {"label_0"}),
    ],
)
def test_rows_of_tables_and_features_of_images_have_no_strokes(shape: tuple[int, ...], names: set[str]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((50, *shape)), rng.integers(0, 2, 50)
    assert {stated.name for stated in statements(Prior(x, y, 2, shape, {}, "made up"))} == names


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
        clients, shares = simulated_data(stated, one.prior, 60)
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
    assert cell.value is not None
    assert cell.low is None or cell.low <= cell.value  # none where all seeds are alike
    assert cell.value > LEAST[metric.partition("_")[0]], cell.line()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bold", pytest.param("slanted", marks=pytest.mark.slow)])
def test_a_hand_shows_in_signatures_and_updates_over_seeds(name: str) -> None:
    """It differs within all labels, and no algorithm asked about it."""
    found = over_seeds([cells_of(hand_case(config(data=IID, seed=seed), name)) for seed in SEEDS])
    for source in ("signature", "update"):
        leaks(found, f"{source}_{name}_auc")


@pytest.mark.slow
def test_turns_and_labels_of_groups_show_in_all_three_views_over_seeds() -> None:
    found = over_seeds([cells_of(case(config(data={"rotations": [0, 90], "clients": 24}, seed=seed))) for seed in SEEDS])
    for source in LEAST:
        for name in ("wide", "label_0"):
            leaks(found, f"{source}_{name}_auc")


@pytest.mark.slow
def test_a_hand_is_not_seen_in_unrelated_clients() -> None:
    found = over_seeds([cells_of(hand_case(config(data=IID, seed=seed), "bold", other=True)) for seed in SEEDS])
    judged = [found[f"{source}_bold_auc", 0] for source in ("signature", "update")]
    assert {cell.status for cell in judged} <= {"at_baseline", "inconclusive"}, [cell.line() for cell in judged]


@pytest.mark.slow
def test_turns_are_not_seen_in_unrelated_clients() -> None:
    found = over_seeds([cells_of(unrelated(config(data=IID | {"rotations": [0, 90]}, seed=seed))) for seed in SEEDS])
    judged = [found[f"{source}_wide_auc", 0] for source in LEAST]
    assert {cell.status for cell in judged} <= {"at_baseline", "inconclusive"}, [cell.line() for cell in judged]


@pytest.mark.slow
def test_protections_take_signatures_and_updates_but_not_the_clusters_model() -> None:
    """Under a shared rotation each run is one toss of a coin, as is one with two groups: six that agree are 1 in 64. They are seeded."""
    protection, run = {"gram": ["haar"], "sum": "secagg"}, {"insecure_test_entropy": True}
    data, training = IID | {"rotations": [0, 90]}, {"rounds": 2, "epochs": 1}
    several = [cells_of(case(config(None, protection, seed, data=data, training=training, run=run))) for seed in range(6)]
    assert all(cell.status != "leaks" for cells in several for cell in cells if cell.metric.startswith("signature"))
    found = over_seeds(several)
    assert found["signature_wide_auc", 0].status == "inconclusive", found["signature_wide_auc", 0].line()
    assert found["update_auc", 0].status == "not_applicable"
    assert found["model_wide_auc", 0].status == "leaks", found["model_wide_auc", 0].line()
    five = over_seeds(several[:5])["model_wide_auc", 0]
    assert (five.value, five.status) == (found["model_wide_auc", 0].value, "inconclusive"), five.line()


PRIVATE = {"privacy": {"unit": "sample", "epsilon": 50.0, "delta": 1e-5, "clip_norm": 1.0, "samples": 70}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"protection": {"gram": ["sketch"], "sketch_dim": 32}}, pytest.param(PRIVATE, marks=pytest.mark.slow)],
    ids=["sketch", "private"],
)
def test_a_public_sketch_hides_no_property(more: dict[str, Any]) -> None:
    """Pretended clients go through the same one. Eight groups, turned or not: a permutation test over them, at 2.5 % by chance."""
    made = config(data={"rotations": [0, 90], "clients": 24}, training={"epochs": 1, "rounds": 1}, **more)
    found = {cell.metric: cell for cell in cells_of(case(made))}
    assert found["signature_wide_auc"].status == "leaks", found["signature_wide_auc"].line()


@pytest.mark.slow
def test_two_groups_are_two_trials_and_one_run_of_them_claims_nothing() -> None:
    found = {cell.metric: cell for cell in cells_of(case(config(data=IID | {"rotations": [0, 90]})))}
    assert {cell.status for cell in found.values()} == {"not_validated"}
    cell = found["model_wide_auc"]
    assert (cell.value, cell.high) == (1.0, 1.0)
    assert cell.low is not None
    assert cell.low < 0.5  # one group against one, though twenty clients


def test_where_nothing_varies_there_is_nothing_to_see() -> None:
    (cell,) = cells_of(case(config(data=IID)))
    assert cell.status == "not_applicable"
    assert "no property varies" in cell.note


def test_one_model_for_all_tells_no_client_apart() -> None:
    found = {cell.metric: cell for cell in cells_of(case(config({"name": "fedavg"}, data=IID | {"rotations": [0, 90]})))}
    assert found["model_auc"].status == found["signature_auc"].status == "not_applicable"
    assert (found["update_wide_auc"].value or 0.0) > 0.9


# --- sums ---------------------------------------------------------------------------------------------------------------------------


def step(*members: int) -> ClientStep:
    return ClientStep(np.zeros(1), np.zeros(1), members)


def test_sums_tell_clients_apart_where_cohorts_change() -> None:
    assert not tells_apart([])
    assert not tells_apart([step(0, 1), step(2, 3), step(0, 1)])
    assert tells_apart([step(0, 1), step(0, 2)])
    assert tells_apart([step(0, 1), step(2)])


def changing(seed: int, rounds: int = 16, **more: Any) -> Config:
    """Sixteen clients, half of them turned, of whom half train in each round, summed three at least together."""
    training = {"rounds": rounds, "participation": 0.5} | more.pop("training", {})
    data = {"clients": 16, "partition": "iid", "groups": [], "rotations": [0, 90]}
    return config({"name": "fedavg"}, {"sum": "secagg", "min_cohort": 3}, seed, data=data, training=training, **more)


@pytest.mark.slow
def test_sums_over_changing_cohorts_show_single_clients_properties() -> None:
    """No sum is over one client. With fixed cohorts nothing tells a cohort's members apart, and nothing is attempted."""
    found = {cell.metric: cell for cell in cells_of(case(changing(0)))}["update_wide_auc"]
    assert "sums as one system" in found.note
    assert (found.value or 0.0) > 0.9, found.line()
    fixed = {cell.metric: cell for cell in cells_of(case(changing(0, 4, training={"sampling": "fixed_cohorts"})))}
    assert fixed["update_auc"].status == "not_applicable"


@pytest.mark.slow
def test_a_member_of_a_cluster_of_two_reads_the_others_property_over_seeds() -> None:
    """One client a run has no AUC: its share of samples with the property is guessed, and runs are pooled."""
    several, data = [], {"clients": 8, "groups": [[0, 1], [2, 3]], "rotations": [0, 90]}
    for seed in range(3):
        made = config({"k": 4}, {"sum": "secagg", "min_cohort": 2}, seed, data=data)
        several.append(cells_of(case(made, "client")))
    found = over_seeds(several)["update_wide_share_error", 1]
    assert found.value is not None
    assert found.baseline is not None
    assert found.value < found.baseline / 2, found.line()
    assert found.status == "leaks", found.line()
