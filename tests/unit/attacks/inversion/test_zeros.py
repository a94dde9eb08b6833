"""Exact zeros of sums: pooled tests against all explanations, and zeros under standardisation and weight decay; opened sums."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from attack_scenes import case, config, figures_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import beta

from cflpriv.attacks.evidence.local_training import LocalTraining
from cflpriv.attacks.evidence.opened_sums import opened_sums
from cflpriv.attacks.evidence.sums import sums_in
from cflpriv.attacks.evidence.updates import public_model
from cflpriv.attacks.figures.leakage import Case
from cflpriv.attacks.figures.payloads import data_parts
from cflpriv.attacks.inversion import exact_zeros, zeros
from cflpriv.attacks.inversion.zeros import Pool, features_of, owners_of, pools_in, present_by_adam, present_in
from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.models import Model
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData

COHORTS = st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=6)


def explanations(cohorts: list[set[int]], owners: set[int]) -> list[set[int]]:
    """All sets of owners that give the same pools as the true `owners`."""
    clients = sorted(set().union(*cohorts))
    sets = [{client for client, has in zip(clients, taken, strict=True) if has} for taken in product([0, 1], repeat=len(clients))]
    return [other for other in sets if [bool(other & cohort) for cohort in cohorts] == [bool(owners & cohort) for cohort in cohorts]]


def pools_of(cohorts: list[set[int]], owners: set[int]) -> list[Pool]:
    return [Pool(tuple(sorted(cohort)), np.array([bool(owners & cohort)])) for cohort in cohorts]


@settings(max_examples=150, deadline=None)
@given(COHORTS, st.sets(st.integers(0, 4)))
def test_certain_and_excluded_are_those_of_all_explanations(cohorts: list[set[int]], owners: set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zeros, "MOST_FALSE", -1.0)  # no likely ones
        found = owners_of(pools_of(cohorts, owners), {})
    possible = explanations(cohorts, owners & set(found.clients))
    for place, client in enumerate(found.clients):
        assert found.attributed[place, 0] == all(client in other for other in possible)
        assert found.excluded[place, 0] == all(client not in other for other in possible)


@settings(max_examples=150, deadline=None)
@given(COHORTS, st.sets(st.integers(0, 4)), st.lists(st.booleans(), min_size=6, max_size=6))
def test_doubtful_pools_count_only_where_they_are_zero(cohorts: list[set[int]], owners: set[int], doubts: list[bool]) -> None:
    pools = pools_of(cohorts, owners)
    pools = [replace(pool, doubtful=pool.present & doubt) for pool, doubt in zip(pools, doubts, strict=False)]
    clear = [cohort for cohort, pool in zip(cohorts, pools, strict=True) if pool.doubtful is not None and not pool.doubtful.any()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zeros, "MOST_FALSE", -1.0)
        found = owners_of(pools, {})
    clients = set().union(*clear)
    possible = explanations(clear, owners & clients) if clear else []
    for place, client in enumerate(found.clients):
        assert found.attributed[place, 0] == (client in clients and all(client in other for other in possible))
        assert found.excluded[place, 0] == (client in clients and all(client not in other for other in possible))


@settings(max_examples=80, deadline=None)
@given(COHORTS, st.integers(0, 4))
def test_the_chance_of_a_sole_owner_is_its_share_of_all_explanations(cohorts: list[set[int]], owner: int) -> None:
    """Oracle: each set of k of n owners weighs the integral of rᵏ (1 − r)ⁿ⁻ᵏ over the rate r."""
    clients = sorted(set().union(*cohorts))
    if owner not in clients:
        return
    member = np.array([[client in cohort for client in clients] for cohort in cohorts])
    weights = {frozenset(other): beta(len(other) + 1, len(clients) - len(other) + 1) for other in explanations(cohorts, {owner})}
    exact = sum(weight for other, weight in weights.items() if owner in other) / sum(weights.values())
    assert zeros._chance_of_sole_owner(member, clients.index(owner)) == pytest.approx(exact, abs=2e-4)


def test_what_a_colluder_has_says_nothing_of_others_and_what_it_lacks_does() -> None:
    pools = [Pool((0, 1, 2), np.array([True, True])), Pool((0, 2), np.array([True, False]))]
    found = owners_of(pools, {0: np.array([True, False])})
    assert found.attributed_to(1).tolist() == [False, True]  # the second word: of client 1, since 2 lacks it and 0 does too
    assert found.attributed_to(0).tolist() == [True, False]
    assert found.excluded_of(2).tolist() == [False, True]


def test_contradictions_leave_a_feature_undecided() -> None:
    found = owners_of([Pool((0, 1), np.array([True])), Pool((0, 1, 2), np.array([False]))], {})
    assert not found.attributed.any()
    assert not found.excluded.any()


def test_rows_along_themselves_are_zero_under_weight_decay_alone() -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 4))
    rows = np.stack([np.zeros(4), -0.01 * start[1], -0.01 * start[2] + 1e-4 * rng.normal(size=4)])
    assert present_in(rows).tolist() == [False, True, True]
    assert present_in(rows, start, 1e-9).tolist() == [False, False, True]


@pytest.mark.parametrize("mean", [(0.0,), (0.13,)])
def test_inputs_that_are_zero_in_every_sample_are_read_whatever_the_standardisation(mean: tuple[float, ...]) -> None:
    model = Model("mlp", (1, 4, 4), 3, hidden=8, mean=mean, std=(0.3,))
    feature = features_of(model)
    assert feature is not None
    assert (feature.name, feature.count, feature.is_exact) == ("input", 16, mean == (0.0,))
    rng = np.random.default_rng(0)
    x = rng.random((5, 1, 4, 4)) * (np.arange(16) % 3 > 0).reshape(1, 1, 4, 4)
    errors = rng.normal(size=(5, 8))  # the loss's slopes by the layer's outputs
    weight, bias = errors.T @ ((x - mean[0]) / 0.3).reshape(5, 16), errors.sum(axis=0)
    update = np.zeros(model.dimension)
    update[: 8 * 16], update[8 * 16 : 8 * 17] = weight.ravel(), bias
    assert present_in(feature.rows(update), None, 1e-9).tolist() == feature.of(x).tolist() == (np.arange(16) % 3 > 0).tolist()


def test_networks_without_such_features_have_none() -> None:
    assert features_of(Model("lenet5", (1, 28, 28), 10)) is None


def moved_by_adam(model: Model, x: Array, client: int, **settings: Any) -> Array:
    """The update (d,) of a client with samples x (n, *shape) and random labels, and the model it began with."""
    y = np.random.default_rng(client).integers(model.classes, size=len(x))
    train = Train(model, optimizer="adam", **settings)
    task_input = TaskInput(ClientData(client, x, y, x[:1], y[:1]), {"model": model.init(5)}, {}, Streams(9, 0, client))
    (result,) = Engine().run(train, [task_input])
    return np.asarray(result["update"], np.float64)


def pool_of(model: Model, train: Train, moved: Array, samples: int, clients: int) -> Array:
    """What is read of a mean update (d,) of so many clients with so many samples each."""
    prior = SimpleNamespace(config=None, samples_per_client=dict.fromkeys(range(clients), samples))
    feature = features_of(model)
    assert feature is not None
    scene = cast("Case", SimpleNamespace(prior=prior))
    return zeros._pool(scene, feature, model, tuple(range(clients)), model.init(5), moved, LocalTraining(train), 0.0).present


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(0.13, 0.0), (0.0, 0.01), (0.0, 0.0)]), st.integers(1, 4), st.sampled_from([5, 10]))
def test_zeros_are_read_off_means_after_adam(seed: int, kind: tuple[float, float], clients: int, batch_size: int) -> None:
    """All inputs that nobody has are found, and no others but one that no unit passes on."""
    mean, decay = kind
    model, rng = Model("mlp", (1, 5, 5), 3, hidden=12, mean=(mean,), std=(0.4,)), np.random.default_rng(seed)
    own = rng.random((clients, 25)) < 0.4
    own[:, :4] = False
    x = (rng.random((clients, 20, 25)) < 0.3) * own[:, None] * rng.uniform(0.2, 1.0, (clients, 20, 25))
    x = x.reshape(clients, 20, 1, 5, 5).astype(np.float32)
    settings_: dict[str, Any] = {"epochs": 2, "batch_size": batch_size, "lr": 0.01, "weight_decay": decay}
    moved = np.mean([moved_by_adam(model, x[client], client, **settings_) for client in range(clients)], axis=0)
    present = pool_of(model, Train(model, optimizer="adam", **settings_), moved, 20, clients)
    truth = (x != 0).reshape(-1, 25).any(axis=0)
    assert not (present & ~truth).any()
    assert (truth & ~present).sum() <= 1  # of one sample, where all units may be silent


def test_a_single_step_of_adam_says_nothing_of_standardised_inputs() -> None:
    model, x = Model("mlp", (1, 5, 5), 3, hidden=12, mean=(0.13,), std=(0.4,)), np.zeros((20, 1, 5, 5), np.float32)
    settings_: dict[str, Any] = {"epochs": 1, "batch_size": 0, "lr": 0.01}
    assert pool_of(model, Train(model, optimizer="adam", **settings_), moved_by_adam(model, x, 0, **settings_), 20, 1).all()


def test_a_row_that_moves_like_no_other_is_not_called_absent() -> None:
    moved = np.random.default_rng(0).normal(size=(8, 4))
    moved[[1, 4, 6]] = moved[1]
    like, channels = np.tile(moved[1], (8, 1)), np.zeros(8, int)
    assert np.flatnonzero(~present_by_adam(moved, like, channels, np.full((8, 4), 1e-9))).tolist() == [1, 4, 6]
    moved[6] += 1.0
    assert present_by_adam(moved, like, channels, np.full((8, 4), 1e-9)).all()  # two alike may be inputs that are always equal


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("fedavg", {"weight_decay": 0.01}), ("fedavg", {"optimizer": "adam", "lr": 0.003, "batch_size": 2}),
        ("fednova", {"weight_decay": 0.01}),
    ],
)  # fmt: skip
def test_inputs_of_one_client_are_named_from_secure_sums(name: str, local: dict[str, Any]) -> None:
    """Digits: some pixels are of one client only. Each round sums another three of six clients."""
    training = {"rounds": 10, "participation": 0.5, "epochs": 2, **local}
    seen = case(config({"name": name}, {"sum": "secagg"}, 0, data={"clients": 6, "groups": [list(range(10))], "samples_per_client": 4},
                       training=training, model={"name": "mlp", "hidden": 8}))  # fmt: skip
    feature = features_of(public_model(seen.prior))
    assert feature is not None
    for pool in pools_in(seen, seen.view, public_model(seen.prior), feature):
        owned = np.any([feature.of(seen.truth.data[client][0]) for client in pool.members], axis=0)
        assert pool.present.tolist() == owned.tolist()
    figures = figures_of("exact_zeros", seen)
    assert set(figures) == {"own_inputs_share", "own_inputs_precision", "excluded_inputs_auc"}
    assert figures["own_inputs_precision"].value in (None, 1.0)


# --- sums as their server opens them ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scaffold", "stocfl"])
def test_zeros_are_read_where_clients_are_sent_more_than_a_model(name: str) -> None:
    """A control, or the pull to an anchor, moves what has moved before; what never moved nobody has, and what first moves somebody has."""
    seen = case(config(
        {"name": name}, {"sum": "secagg", "gram": ["haar"] if name == "stocfl" else []}, data={"clients": 8, "samples_per_client": 3},
        model={"normalise": False}, training={"rounds": 4, "participation": 0.5, "batch_size": 2},
    ))  # fmt: skip
    model = public_model(seen.prior)
    feature = features_of(model)
    assert feature is not None
    assert feature.is_exact
    owners = owners_of(pools_in(seen, seen.view, model, feature), {})
    truth = np.stack([feature.of(seen.truth.data[client][0]) for client in owners.clients])
    assert owners.excluded.any()
    assert not (owners.excluded & truth).any()
    assert (owners.attributed & ~truth).sum() <= 0.02 * owners.attributed.sum()
    assert figures_of("exact_zeros", seen)["excluded_inputs_auc"].value is not None


@pytest.mark.parametrize("kind", ["secagg", "one_message"])
def test_the_sum_of_the_only_round_is_opened_and_its_weight_is_the_number_of_samples(kind: str) -> None:
    made = config({"name": "fedavg"}, {"sum": kind, "max_weight": 300}, 0, data={"clients": 12, "partition": "dirichlet", "groups": []},
                  training={"rounds": 1, "weights": "examples"})  # fmt: skip
    seen = case(made)
    (opened,) = opened_sums(seen.view)
    least = opened.sum.terms.least_weight
    counts = [max(float(seen.truth.label_counts[client].sum()), least) for client in opened.sum.survivors]
    assert opened.sum.weight() == pytest.approx(sum(counts), rel=1e-6)
    mean = opened.mean_of(0)
    assert mean is not None
    (sent,) = [message for message in seen.reference.messages if message.kind == "update"]
    updates = np.asarray((sent.payload or {})["update"], np.float64)
    assert sent.clients == opened.sum.survivors
    exact = np.average(updates, axis=0, weights=counts)
    assert mean == pytest.approx(exact, abs=1e-5)
    assert opened.mean_of(1) is None


def test_sums_with_shares_of_noise_are_left_closed() -> None:
    """Their integers are in units of the noise, so that the mean of the last round would be of another scale."""
    noise = {"unit": "client", "epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}
    seen = case(config({"name": "fedavg"}, {"sum": "secagg"}, privacy=noise, data={"clients": 8}, training={"rounds": 1}))
    assert seen.view.shared_noise
    assert not case(config({"name": "fedavg"}, {"sum": "secagg"}, data={"clients": 8}, training={"rounds": 1})).view.shared_noise


@pytest.mark.parametrize("way", ["secagg-oblivious", "one_message-oblivious"])
def test_the_members_of_an_oblivious_sum_of_one_group_are_its_cohort(way: str) -> None:
    seen = case(config({"name": "fedavg"}, {"sum": way}, 0, data={"clients": 8}, training={"rounds": 2}))
    sums = sums_in(seen.view)
    assert [sum_.members for sum_ in sums] == [tuple(range(8))] * 2
    assert all(sum_.mean is not None and sum_.start is not None for sum_ in sums)  # the last one, too: opened


def test_the_chance_of_a_membership_figure_is_that_of_deals() -> None:
    """Two clients: one with all three others excluded and none of its own, 1 deal of 20; the other with nothing excluded."""
    some, none = np.ones(3, dtype=bool), np.zeros(3, dtype=bool)
    chance = exact_zeros._chance_of_membership([[none, some], [none, none]], np.random.default_rng(0))
    assert chance == pytest.approx(1 / 20, abs=0.015)
    assert exact_zeros._chance_of_membership([[none, none]], np.random.default_rng(0)) == 1.0
    assert (exact_zeros._auc(none, some), exact_zeros._auc(some, none), exact_zeros._auc(some, some)) == (1.0, 0.0, 0.5)


def test_a_model_that_a_client_is_sent_later_depends_on_others() -> None:
    """Although its view has no message of them: it takes part for the first time in the second round."""
    seen = case(config({"name": "fedavg"}, {}, 0, data={"clients": 8}, training={"rounds": 3, "participation": 0.67}), "client")
    late = replace(seen.view, messages=tuple(message for message in seen.view.messages if message.round > 0))
    assert ("compute", "parameters", "model") in data_parts(late)
    assert data_parts(replace(seen.view, messages=tuple(m for m in seen.view.messages if m.round == 0)[:1])) == {}
