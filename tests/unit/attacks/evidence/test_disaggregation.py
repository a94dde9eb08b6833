"""Sums over cohorts, recorded from real federations: what a minimum cohort size stops, what it does not, and what fixed cohorts do."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import pytest
from attack_scenes import case, config
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scenes import federation, population

from cflpriv.attacks import ATTACKS, AdversaryView, disaggregate, view_of
from cflpriv.attacks.compared.cluster_identity import clusters_from_sizes
from cflpriv.attacks.evidence.disaggregation import guess_single, score_static
from cflpriv.attacks.evidence.sums import CohortSum, oblivious_sizes, sums_in
from cflpriv.attacks.figures.leakage import Case
from cflpriv.contract.handles import Shared
from cflpriv.contract.operations import Sampling
from cflpriv.contract.protection import Protection
from cflpriv.engine import TaskInput
from cflpriv.privacy.settings import Privacy
from cflpriv.types import Array, Parts

DIMENSION = 12


@dataclass(frozen=True)
class Static:
    """A vector that a client sends in every round, such as a gradient at a fixed model: a function of its id. Part: "update"."""

    parts: ClassVar[Parts] = {"update": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> dict[str, Array]:
        return {"update": value_of(given.data.id)}


def value_of(client: int) -> Array:
    return np.random.default_rng(client).uniform(-0.5, 0.5, DIMENSION)


def recorded(protection: Protection, sampling: Sampling, rounds: int) -> list[CohortSum]:
    """The sums in the view of `federated`."""
    return sums_in(federated(protection, sampling, rounds))


def federated(protection: Protection, sampling: Sampling, rounds: int, clients: int = 12) -> AdversaryView:
    """What a server saw of clients in two clusters, who sent the same values in every round."""
    scene = population(groups=2, clients_per_group=clients // 2, samples=6)
    fed = federation(scene, protection, sampling=sampling, seed=3)
    labels = {client: client % 2 for client in fed.clients}
    models = [Shared(np.zeros(DIMENSION)) for _ in range(2)]
    for number in range(rounds):
        fed.begin_round(number)
        cohort = fed.cohort(labels)
        held = fed.compute(Static(), {"model": models}, which=labels, on=cohort)
        means = fed.mean(held["update"], groups=labels, k=2)
        models = [model if mean is None else model + mean.parts["update"] for model, mean in zip(models, means, strict=True)]
    fed.begin_round(rounds)
    fed.compute(Static(), {"model": models}, which=labels)
    return view_of(fed.transcript.messages, "server", {})


def differenced(sums: Sequence[CohortSum], clients: int = 12) -> tuple[Array, Array]:
    """Relative errors of what the sums determine, and the share of clients that is."""
    known = [one for one in sums if one.mean is not None]
    totals = np.stack([one.mean * len(one.members) for one in known if one.mean is not None])
    made, determined = disaggregate([one.members for one in known], totals, range(clients))
    truth = np.stack([value_of(client) for client in range(clients)])
    errors = np.linalg.norm(made - truth, axis=1) / np.linalg.norm(truth, axis=1)
    return errors[determined], determined


def test_singletons_are_exact_without_a_minimum_cohort_size_and_there_are_none_with_it() -> None:
    open_ = recorded(Protection(), Sampling("global", 0.25), 6)
    single = guess_single(open_)
    assert single
    for one in single:
        assert one.mean == pytest.approx(value_of(one.members[0]), abs=1e-12)
    assert not guess_single(recorded(Protection(sum="secagg"), Sampling("per_cluster", 0.3), 3))


@pytest.mark.parametrize("protection", [Protection(), Protection(min_cohort=3), Protection(sum="secagg")], ids=["open", "floor", "secagg"])
def test_differencing_of_static_values_is_exact_with_and_without_a_minimum_cohort_size(protection: Protection) -> None:
    sums = recorded(protection, Sampling("per_cluster", 0.5), 14)
    assert all(len(one.members) >= protection.smallest_sum for one in sums)
    errors, determined = differenced(sums)
    assert determined.all()
    assert errors.max() < 1e-5


@pytest.mark.parametrize("protection", [Protection(min_cohort=3), Protection(sum="secagg")], ids=["floor", "secagg"])
def test_fixed_cohorts_remove_it(protection: Protection) -> None:
    sums = recorded(protection, Sampling("fixed_cohorts", 0.5), 14)
    assert len({one.members for one in sums}) == 4  # two clusters, two cohorts of each
    _, determined = differenced(sums)
    assert not determined.any()


@pytest.mark.parametrize("protection", [Protection(sum="secagg", robust="trimmed_mean", min_cohort=2), Protection(robust="trimmed_mean")])
def test_buckets_that_are_dealt_afresh_bring_it_back(protection: Protection) -> None:
    """Sums over one cohort that repeats, but over other buckets of it in each round."""
    sums = recorded(protection, Sampling("fixed_cohorts", 1.0), 14)
    assert all(len(one.members) >= protection.smallest_sum for one in sums)
    errors, determined = differenced(sums)
    assert determined.all()
    assert errors.max() < 1e-5


@pytest.mark.parametrize("mode", ["passive", "active"])
def test_a_server_opens_the_sum_of_the_last_round_too(mode: Literal["passive", "active"]) -> None:
    """No model that follows shows it."""
    seen = federated(Protection(sum="secagg", secagg_mode=mode), Sampling("per_cluster", 0.5), 3)
    last = replace(seen, messages=tuple(message for message in seen.messages if message.round < 3), protection=Protection(sum="secagg"))
    sums = sums_in(last)
    assert {sum_.round for sum_ in sums} == {0, 1, 2}
    for sum_ in sums:
        assert sum_.mean == pytest.approx(np.mean([value_of(client) for client in sum_.members], axis=0), abs=1e-6)
    assert {sum_.round for sum_ in sums_in(replace(last, shared_noise=True)) if sum_.mean is None} == {2}


def test_sums_of_unrelated_clients_tell_nothing_of_these() -> None:
    sums = recorded(Protection(), Sampling("per_cluster", 0.5), 14)
    made, _ = disaggregate(
        [one.members for one in sums], np.stack([one.mean * len(one.members) for one in sums if one.mean is not None]), range(12)
    )
    strangers = np.stack([value_of(client + 1000) for client in range(12)])
    assert (np.linalg.norm(made - strangers, axis=1) > 0.5 * np.linalg.norm(strangers, axis=1)).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=7), min_size=1, max_size=9), st.integers(0, 2**32 - 1))
def test_determined_means_the_same_in_every_solution(cohorts: list[set[int]], seed: int) -> None:
    """Oracle: a client is determined iff no vector of the null space of the membership matrix moves it."""
    rng = np.random.default_rng(seed)
    member = np.array([[float(client in cohort) for client in range(7)] for cohort in cohorts])
    values = rng.normal(size=(7, 3))
    made, determined = disaggregate([sorted(cohort) for cohort in cohorts], member @ values, range(7))
    null = np.linalg.svd(member)[2][np.linalg.matrix_rank(member) :]
    assert np.array_equal(determined, np.abs(null).max(axis=0, initial=0.0) < 1e-9)
    assert made[determined] == pytest.approx(values[determined], abs=1e-8)
    assert member @ made == pytest.approx(member @ values, abs=1e-8)


@pytest.mark.slow
def test_a_run_reports_both_figures() -> None:
    training = {"rounds": 8, "participation": 0.3}
    open_ = {cell.metric: cell for cell in ATTACKS["disaggregation"].cells(case(config(training=training)))[0]}
    assert {cell.status for cell in open_.values()} == {"leaks"}
    floor = config(protection={"sum": "secagg"}, training=training | {"sampling": "per_cluster"})
    cells = {cell.metric: cell for cell in ATTACKS["disaggregation"].cells(case(floor))[0]}
    assert cells["singleton_exact"].status in ("at_baseline", "nothing_to_see")
    assert cells["singleton_exact"].value in (0.0, None)
    assert cells["static_value_exact"].status == "leaks"
    fixed = config(protection={"sum": "secagg"}, training=training | {"sampling": "fixed_cohorts"})
    cells = {cell.metric: cell for cell in ATTACKS["disaggregation"].cells(case(fixed))[0]}
    assert cells["static_value_exact"].status in ("at_baseline", "nothing_to_see")


def test_smaller_cohorts_of_clusters_fall_sooner() -> None:
    """50 clients, 10 sampled a round: with clusters fewer rounds do (the prototype's 50 against 22 to 25)."""

    def rounds_needed(k: int) -> int:
        rng = np.random.default_rng(k)
        sums: list[CohortSum] = []
        for number in range(80):
            cohort = rng.permutation(50)[:10]
            for label in range(k):
                members = tuple(int(client) for client in cohort if client % k == label)
                if members:
                    sums.append(CohortSum(number, members))
            if score_static(sums, range(50))[0].all():
                return number + 1
        raise AssertionError("never")

    assert rounds_needed(4) < 0.7 * rounds_needed(1)


def test_colluders_take_their_values_off() -> None:
    sums = [CohortSum(0, (0, 1)), CohortSum(1, (2, 3, 4))]
    assert score_static(sums, [1, 2, 3, 4])[0].tolist() == [1.0, 0.0, 0.0, 0.0]


@lru_cache(maxsize=4)
def oblivious(participation: float, rounds: int, sampling: str = "global", way: str = "secagg-oblivious") -> Case:
    """IFCA on digits of which every second client sees all upside down; it finds the two groups."""
    training = {"rounds": rounds, "participation": participation, "sampling": sampling, "epochs": 2}
    data = {"partition": "iid", "rotations": [0, 180], "groups": [], "clients": 12}
    return case(config({"name": "ifca", "k": 2}, {"sum": way}, training=training, data=data, model={"hidden": 16}))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["secagg-oblivious", "one_message-oblivious"])
def test_who_is_in_which_oblivious_sum_is_not_known_but_the_totals_are(way: str) -> None:
    seen = oblivious(0.7, 18, way=way)
    totals, sizes = sums_in(seen.view), oblivious_sizes(seen.view)
    open_ = {(one.round, one.label): one for one in sums_in(seen.reference)}
    assert len(sizes) == 18
    assert [one.round for one in totals] == [one.round for one in sizes if one.whole]
    apart = next(one.round for one in sizes if not one.whole)  # from then on a minimum cohort size keeps a model that moves without one
    assert apart > 2
    for one in totals[:apart]:  # and a total is that of the whole cohort: the same as without protection, to the quantiser
        parts = [open_[one.round, label] for label in range(2) if (one.round, label) in open_]
        assert sizes[one.round].counts == {part.label: len(part.members) for part in parts}
        assert set(one.members) == {client for part in parts for client in part.members}
        mean = sum(len(part.members) * part.mean for part in parts if part.mean is not None) / len(one.members)
        assert one.mean == pytest.approx(mean, abs=1e-6)


@pytest.mark.slow
def test_differencing_of_oblivious_totals_is_measured_and_fixed_cohorts_remove_it() -> None:
    found = {cell.metric: cell for cell in ATTACKS["disaggregation"].cells(oblivious(0.7, 18))[0]}
    assert found["static_value_exact"].status == "leaks"
    assert "totals over all participants" in found["static_value_exact"].note
    assert found["singleton_exact"].value in (0.0, None)
    fixed = {cell.metric: cell for cell in ATTACKS["disaggregation"].cells(oblivious(0.5, 6, "fixed_cohorts"))[0]}
    assert fixed["static_value_exact"].value in (0.0, None)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["secagg-oblivious", "one_message-oblivious"])
def test_sizes_of_groups_over_cohorts_tell_who_is_in_which(way: str) -> None:
    """Oblivious sums name no cluster. Over enough different cohorts their sizes do; with everybody in every round they do not."""
    (found,), _ = ATTACKS["cluster_identity"].cells(oblivious(0.7, 18, way=way))
    assert found.status == "leaks", found.line()
    assert "inferred from the sizes" in found.note
    (fixed,), _ = ATTACKS["cluster_identity"].cells(oblivious(1.0, 3, way=way))
    assert fixed.status == "at_baseline", fixed.line()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_groups_that_explain_all_sizes_are_found(seed: int, k: int) -> None:
    """Oracle: with more cohorts than clients the sizes have one explanation, which is the truth."""
    rng = np.random.default_rng(seed)
    groups, cohorts = rng.integers(k, size=10), (rng.random((30, 10)) < 0.5).astype(float)
    assume(np.linalg.matrix_rank(cohorts) == 10)
    sizes = cohorts @ np.eye(k)[groups]
    assert clusters_from_sizes(cohorts, sizes).tolist() == groups.tolist()
    sizes[:, 0] = np.nan  # one group is never opened: of what is known, the rest follows
    assert clusters_from_sizes(cohorts, sizes).tolist() == groups.tolist()


@pytest.mark.slow
def test_nothing_is_measured_where_no_total_is_known() -> None:
    """Without the sizes of groups no sum is over named clients, so the attack does not apply: not a measured zero."""
    seen = oblivious(0.7, 18)
    view = replace(seen.view, messages=tuple(one for one in seen.view.messages if one.kind != "secagg Adverts"))
    assert sums_in(view) == []
    cells, _ = ATTACKS["disaggregation"].cells(replace(seen, view=view))
    assert {cell.status for cell in cells} == {"not_applicable"}
    assert {cell.metric for cell in cells} == {"singleton_exact", "static_value_exact"}


def test_noised_sums_are_not_called_exact() -> None:
    """Cohorts that differ tell static values apart, but not values with noise in every sum."""
    seen = case(config(training={"rounds": 8, "participation": 0.3}))
    assert seen.prior.config is not None
    privacy = Privacy("client", epsilon=8.0, delta=1e-3)
    noised = replace(seen, prior=replace(seen.prior, config=replace(seen.prior.config, privacy=privacy)))
    found = {cell.metric: cell for cell in ATTACKS["disaggregation"].cells(noised)[0]}
    assert found["static_value_exact"].status == "not_attempted"
    assert "noise" in found["static_value_exact"].note


@pytest.mark.slow
def test_a_client_is_told_who_is_in_a_sum_by_secure_sums_alone() -> None:
    """Of a sum in the clear it has the mean, by two models, and does not see who else is in it."""
    open_ = case(config({"name": "fedavg"}, training={"rounds": 2}), "client").view
    assert sums_in(open_) == []
    (one,) = sums_in(case(config({"name": "fedavg"}, {"sum": "secagg"}, training={"rounds": 2}), "client").view)
    assert one.members == tuple(range(20))
