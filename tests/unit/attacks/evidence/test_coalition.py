"""Colluding clients take their own updates off sums: what they train again is what they sent, and what that leaves of a minimum cohort
size.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack_scenes import case, config, figures_of

from cflpriv.aggregation.secure_sums import least_weight
from cflpriv.attacks.evidence.coalition import known_sums, sums_of_others, trained_again
from cflpriv.attacks.evidence.local_training import trainings_in
from cflpriv.attacks.evidence.sums import sums_in
from cflpriv.attacks.evidence.updates import public_model, steps_in, updates_in
from cflpriv.attacks.figures.leakage import Case
from cflpriv.attacks.labels.update_norms import lengths_of
from cflpriv.contract.protection import Protection

pytestmark = pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
"""The steps before clusters are formed are what is tested."""

PLAIN = [
    {"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}, {"name": "per_fedavg", "beta": 0.1}, {"name": "pacfl"}, {"name": "ditto"},
    {"name": "ifca", "k": 2}, {"name": "cfl", "variant": "authors"}, {"name": "one_shot", "k": 2},
]  # fmt: skip


def colluders(clients: list[int], protection: dict[str, Any], **more: Any) -> Case:
    """A server with these clients, who are some of ten in groups of labels: `size` clients a group, the same labels every so many."""
    size = more.pop("size", 2)
    groups = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]][: 10 // size]
    run = {"audit_parties": ["server", *(f"client:{client}" for client in clients)]}
    data = {"clients": size * len(groups), "groups": groups} | more.pop("data", {})
    return case(config(more.pop("algorithm", None), protection, data=data, run=run, **more), f"server+{len(clients)}")


@pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
@pytest.mark.parametrize("algorithm", PLAIN, ids=lambda one: one["name"])
def test_who_trains_again_has_the_update_that_it_sent(algorithm: dict[str, Any]) -> None:
    """Oracle: the run in the open, with momentum and a rate that decays; float32 to rounding."""
    training = {"rounds": 3, "epochs": 2, "momentum": 0.5, "lr_decay": 0.9}
    seen = case(config(algorithm, training=training, data={"clients": 8}))
    sent, compared = updates_in(seen.view, public_model(seen.prior).dimension), 0
    for one in sums_in(seen.view):
        if one.round < 0 or one.start is None:
            continue
        made = trained_again(seen, one.members, one)
        assert made is not None
        for client, update in made.items():
            assert np.linalg.norm(update - sent[one.round, client]) <= 1e-5 * np.linalg.norm(update)
            compared += 1
    assert compared >= 16


@pytest.mark.slow
@pytest.mark.parametrize(("min_cohort", "size", "clients"), [(2, 2, [0, 1, 2, 3, 4]), (3, 5, [0, 2, 4, 6])], ids=["two", "five"])
def test_a_minimum_cohort_size_is_none_to_all_but_one_of_a_sum(min_cohort: int, size: int, clients: list[int]) -> None:
    """Pairs with one colluder each; a group of five, of whom four collude, and one without any."""
    seen = colluders(clients, {"sum": "secagg", "min_cohort": min_cohort}, size=size)
    single = figures_of("disaggregation", seen)["singleton_exact"]
    assert single.status == "leaks", single.line()
    assert single.value == pytest.approx(1.0 if size == 2 else 1 / 6)
    assert "colluders, who subtract their own updates" in single.note
    alone = colluders([], {"sum": "secagg", "min_cohort": min_cohort}, size=size)
    assert figures_of("disaggregation", alone)["singleton_exact"].status == "at_baseline"


def test_an_update_is_recovered_whatever_the_unprotected_run_made_of_its_round() -> None:
    """Three clients a group, two of them collude. A group that was not whole has no sum, so that its models are not the open run's."""
    run = {"audit_parties": ["server", *(f"client:{client}" for client in range(4, 12))]}
    groups, training = [[0, 1], [2, 3], [4, 5], [6, 7]], {"rounds": 4, "participation": 0.75}
    protection = {"sum": "secagg", "secagg_mode": "passive", "min_cohort": 3}
    data = {"clients": 12, "groups": groups, "samples_per_client": 20}
    seen = case(config({"k": 4}, protection, data=data, training=training, run=run), "server+8")
    alone = {one.members for one in known_sums(seen, seen.view) if len(one.members) == 1 and one.mean is not None}
    assert figures_of("disaggregation", seen)["singleton_exact"].value == len(alone) / 4 == 0.75


def test_what_colluders_sent_and_a_transcript_does_not_hold_is_not_called_safe() -> None:
    """A member of a pair remembers what it sent; the audit cannot make it again where updates hold more than training."""
    data = {"clients": 2, "groups": [[0, 1]], "samples_per_client": 20}
    protection = {"sum": "secagg", "secagg_mode": "passive", "min_cohort": 2}
    run = {"audit_parties": ["server", "client:0"]}
    seen = case(config({"name": "scaffold"}, protection, data=data, run=run, training={"rounds": 3}), "server+1")
    single = figures_of("disaggregation", seen)["singleton_exact"]
    assert single.status == "not_attempted", single.line()
    assert "the transcript does not hold the colluders' updates" in single.note


def test_lengths_are_read_off_what_is_left() -> None:
    """Pairs with one colluder each. Oracle: the lengths in the open run."""
    seen = colluders([0, 1, 2, 3, 4], {"sum": "secagg", "secagg_mode": "passive", "min_cohort": 2}, data={"samples_per_client": 12})
    found, sent = (lengths_of(seen, view) for view in (seen.view, seen.reference))
    assert sorted(found) == [5, 6, 7, 8, 9]
    assert found == pytest.approx({client: sent[client] for client in found}, rel=1e-3)
    assert lengths_of(replace(seen, view=replace(seen.view, coalition=())), replace(seen.view, coalition=())) == {}


@pytest.mark.slow
def test_membership_says_that_updates_follow_though_not_of_the_last_round() -> None:
    data = {"clients": 4, "samples_per_client": 40, "groups": [[0, 1]]}
    run = {"audit_parties": ["server", "client:0", "client:1", "client:2"]}
    protection = {"sum": "secagg", "secagg_mode": "passive", "min_cohort": 2}
    found = figures_of("membership", case(config({"name": "fedavg"}, protection, data=data, run=run), "server+3"))
    assert found["own_model_lira_auc"].status == "not_attempted", found["own_model_lira_auc"].line()
    assert found["update_gradients_auc"].value is not None


def test_sums_weighted_by_samples_are_taken_apart_by_these_weights() -> None:
    """Dirichlet shares give clients different numbers of samples; the others' mean is that of the open run's updates."""
    data = {"partition": "dirichlet", "alpha": 0.5, "clients": 6, "groups": []}
    protection = {"sum": "secagg", "max_weight": 600.0}
    seen = colluders([0, 1], protection, algorithm={"name": "fedavg"}, training={"weights": "examples"}, data=data)
    sent = updates_in(seen.reference, public_model(seen.prior).dimension)
    first = sums_of_others(seen, sums_in(seen.view))[0]
    assert first.members == (2, 3, 4, 5)
    least = least_weight(Protection(sum="secagg", max_weight=600.0), 6)
    counts = [max(seen.prior.samples_per_client[client], least) for client in first.members]
    assert len(set(counts)) > 1
    assert min(seen.prior.samples_per_client.values()) < least, "a client with few samples counts as more"
    assert first.mean == pytest.approx(np.average([sent[0, client] for client in first.members], axis=0, weights=counts), abs=1e-5)


@pytest.mark.slow
def test_labels_and_images_are_read_off_what_is_left() -> None:
    """One client of four labels' mean says little of the last one; without the other three it is that client's own update."""
    data = {"samples_per_client": 4, "clients": 4, "groups": [[0, 1], [2, 3], [4, 5], [6, 7]]}
    seen = colluders([0, 1, 2], {"sum": "secagg"}, algorithm={"name": "fedavg"}, data=data)
    dimension = public_model(seen.prior).dimension
    (step, *_) = steps_in(seen.view, dimension, seen)[3]
    assert step.members == (3,)
    assert step.update == pytest.approx(updates_in(seen.reference, dimension)[0, 3], abs=1e-5)
    assert steps_in(seen.view, dimension)[3][0].members == (0, 1, 2, 3)
    assert figures_of("label_inference", seen)["label_set_accuracy"].value == 1.0
    assert figures_of("gradient_inversion", seen)["image_psnr_db"].value is not None


@pytest.mark.parametrize(
    "algorithm", [{"name": "scaffold"}, {"name": "ifca", "k": 2, "averaging": "gradient"}], ids=["scaffold", "gradient"]
)
def test_means_of_more_than_local_training_are_left_as_they_are(algorithm: dict[str, Any]) -> None:
    seen = colluders([0], {"sum": "secagg"}, algorithm=algorithm)
    sums = sums_in(seen.view)
    assert sums_of_others(seen, sums) == sums
    assert not any(one.alone for one in trainings_in(seen.view).all)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"secagg_bits": 16}, {"min_cohort": 2}], ids=["fine", "coarse", "pairs"])
def test_the_uncertainty_of_what_is_left_is_what_it_is_off_by(more: dict[str, Any]) -> None:
    """Oracle: the open run's updates. The stated deviation is an upper one; it is no more than six times too large."""
    seen = colluders([0, 2], {"sum": "secagg"} | more, size=5)
    sent = updates_in(seen.reference, public_model(seen.prior).dimension)
    one = next(one for one in known_sums(seen, seen.view) if len(one.members) == 3 and one.round == 0)
    assert one.mean is not None
    off = float(np.std(one.mean - np.mean([sent[0, client] for client in one.members], axis=0)))
    assert one.deviation / 6 < off < 1.2 * one.deviation
