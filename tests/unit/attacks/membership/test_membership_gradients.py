"""Membership inference from updates: gradients against autograd, an update that is linear, leaks, other clients' updates, noise.

Runs are seeded, so outcomes do not change. A 95 % interval about an AUC misses one half one time in twenty where nothing leaks; a single
run's status is one-sided at 2.5 %.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attack_scenes import case, config, population_of
from torch.nn import functional

from cflpriv.attacks.evidence.updates import ClientStep, public_model
from cflpriv.attacks.figures.leakage import Case, Cell
from cflpriv.attacks.membership import membership_gradients
from cflpriv.attacks.membership.member_scores import roc
from cflpriv.attacks.membership.membership_audit import cells
from cflpriv.attacks.membership.membership_gradients import GradientEvidence, affordable_steps, clipped_gradients, evidence, read_steps
from cflpriv.attacks.membership.membership_shadows import Pairs, pairs_of
from cflpriv.engine.device import CPU, using
from cflpriv.engine.models import Model
from cflpriv.experiments import Config

IID = {"clients": 12, "samples_per_client": 40, "test_samples_per_client": 40, "partition": "iid", "groups": []}
SHADOWS = 8


def pooled_config(seed: int = 0, protection: dict[str, Any] | None = None, name: str = "fedavg", **more: Any) -> Config:
    """Twelve clients with forty samples each from one pool, in batches of ten."""
    training = {"rounds": 2, "epochs": 2, "batch_size": 10} | more.pop("training", {})
    model = {"hidden": 16} | more.pop("model", {})
    return config({"name": name}, protection, seed, data=IID | more.pop("data", {}), model=model, training=training, **more)


def asked(seen: Case, steps: list[ClientStep]) -> Pairs:
    owners = sorted({client for step in steps for client in step.members})
    return pairs_of(seen.truth, owners, np.random.default_rng(0))


def evidence_on_pairs(seen: Case, steps: list[ClientStep]) -> tuple[GradientEvidence, Pairs]:
    pairs = asked(seen, steps)
    return evidence(steps, pairs, seen.truth, seen.prior, SHADOWS), pairs


def steps_of(seen: Case) -> list[ClientStep]:
    return read_steps(seen, seen.view, seen.prior, public_model(seen.prior))


def figures(seen: Case) -> dict[str, Cell]:
    return {cell.metric: cell for cell in cells(seen)[0]}


# --- the mathematics ----------------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_single_samples() -> None:
    """The loop over samples is the oracle, to rounding in float64."""
    model, rng = Model("mlp", (1, 8, 8), 10, hidden=5, dtype="float64"), np.random.default_rng(0)
    x, y, at = rng.normal(size=(7, 1, 8, 8)), rng.integers(10, size=7), model.init(0)
    found = clipped_gradients(model, at, x, y)
    for i in range(7):
        with using(CPU):
            module = model.load(at)
            loss = functional.cross_entropy(module(model.inputs(x[i : i + 1])), torch.from_numpy(y[i : i + 1]))
        single = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(module.parameters()))])
        assert found[i] == pytest.approx(single.numpy(), abs=1e-12)
    norms = np.linalg.norm(found, axis=1)
    bound = float(np.median(norms))
    assert np.linalg.norm(clipped_gradients(model, at, x, y, bound), axis=1) == pytest.approx(np.minimum(norms, bound))


def test_an_update_that_is_one_step_tells_everybody() -> None:
    """A full batch, one step: the update is the sum of its samples' gradients, and coefficients are the coins themselves."""
    seen = case(pooled_config(model={"dtype": "float64"}, training={"rounds": 1, "epochs": 1, "batch_size": 0}))
    found, pairs = evidence_on_pairs(seen, steps_of(seen))
    assert found.scores == pytest.approx(pairs.member - 0.5, abs=0.1)
    assert roc(found.scores, pairs.member).auc == 1.0
    assert np.abs(found.blank).max() < 0.6


def test_steps_are_taken_as_far_as_the_budget_goes() -> None:
    zero = np.zeros(1)
    steps = [ClientStep(zero, zero, members, number) for number in range(3) for members in ((0,), (1,), (2, 3))]
    assert affordable_steps(steps, 9, [1.0] * 9, 99.0) == steps
    assert affordable_steps(steps, 2, [1.0] * 9, 99.0) == steps[:6]
    assert affordable_steps(steps, 9, [1.0] * 9, 4.0) == steps[:4]
    assert affordable_steps(steps, 9, [2.0] * 9, 1.0) == []
    late = [*steps[:1], *steps[4:]]  # client 1 comes in round 1: its first step is before anybody's second
    assert affordable_steps(late, 1, [1.0] * 6, 99.0) == [late[0], late[1], late[2]]


def test_long_updates_are_sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = case(pooled_config(training={"rounds": 1}))
    monkeypatch.setattr(membership_gradients, "_KEPT", {})
    monkeypatch.setattr(membership_gradients, "_PARTS", {})
    monkeypatch.setattr(membership_gradients, "MOST_PARAMETERS", 600)
    assert public_model(seen.prior).dimension > 1000
    found, pairs = evidence_on_pairs(seen, steps_of(seen))
    assert roc(found.scores, pairs.member).auc > 0.9


# --- figures ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_updates_in_the_clear_show_who_was_trained_on() -> None:
    found = figures(case(pooled_config()))
    cell = found["update_gradients_auc"]
    assert cell.value is not None
    assert cell.value > 0.95
    assert cell.status == found["update_gradients_tpr"].status == "leaks"
    assert cell.baseline == pytest.approx(0.5, abs=0.05)
    assert cell.rounds == 0
    for metric, other in found.items():
        assert not metric.endswith("_auc") or metric.startswith("update") or (other.value or 0.0) < cell.value - 0.1, other.line()


def test_other_clients_updates_say_nothing() -> None:
    """Each client's update replaced by another's of the same round: 95 % intervals, three deals."""
    seen = case(pooled_config(training={"rounds": 1}))
    steps = steps_of(seen)
    for away in (1, 2, 5):
        moved = [replace(step, update=steps[(i + away) % len(steps)].update) for i, step in enumerate(steps)]
        found, pairs = evidence_on_pairs(seen, moved)
        low, high = roc(found.scores, pairs.member).auc_interval
        assert low < 0.5 < high


@pytest.mark.slow
def test_means_show_less_and_still_more_than_models() -> None:
    """The server of a secure sum, and a member, who is sent nothing but models."""
    run = pooled_config(protection={"sum": "secagg"}, training={"rounds": 3})
    sealed, member = figures(case(run)), figures(case(run, "client"))
    cell = sealed["update_gradients_auc"]
    assert cell.status == "leaks", cell.line()
    assert "2 of 2 mean updates" in cell.note
    assert (sealed["model_lira_auc"].value or 1.0) + 0.1 < (cell.value or 0.0) < (cell.reference or 0.0)
    assert member["update_gradients_auc"].status == "leaks", member["update_gradients_auc"].line()


def test_a_transform_stands_before_updates_until_a_member_colludes() -> None:
    run = pooled_config(protection={"sum": "permutation"}, name="pacfl", training={"rounds": 1})
    assert figures(case(run))["update_gradients_auc"].status == "not_attempted"
    open_ = figures(case(run, "server+1"))["update_gradients_auc"]
    assert open_.status == "leaks"
    assert open_.k_known == 1


def test_updates_by_adam_show_members_as_well() -> None:
    """They are not linear in gradients, but follow them: the regression needs no more, and its shadows train by Adam, too."""
    cell = figures(case(pooled_config(training={"rounds": 1, "epochs": 1, "optimizer": "adam", "lr": 0.01})))["update_gradients_auc"]
    assert cell.status == "leaks", cell.line()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::cflpriv.errors.CflprivWarning")  # of noise from a public key, which this test wants
def test_strong_noise_takes_it_to_the_baseline() -> None:
    private = {"unit": "sample", "epsilon": 1.0, "delta": 1e-5, "samples": 40}
    cell = figures(case(pooled_config(privacy=private, run={"insecure_test_entropy": True})))["update_gradients_auc"]
    assert cell.status == "at_baseline", cell.line()
    assert (cell.reference or 0.0) > 0.95


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::cflpriv.errors.CflprivWarning")
def test_weak_noise_is_seen_through() -> None:
    """ε = 50, six rounds: the models' confidences show next to nothing, the updates a lot."""
    private = {"unit": "sample", "epsilon": 50.0, "delta": 1e-5, "samples": 40}
    seen = case(pooled_config(privacy=private, training={"rounds": 6}, run={"insecure_test_entropy": True}))
    steps = steps_of(seen)
    assert len(steps) == 6 * len(population_of(pooled_config()).clients)
    found, pairs = evidence_on_pairs(seen, steps)
    assert roc(found.scores, pairs.member).auc > 0.75


# --- updates that sums leave ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_can_take_its_own_update_off_a_sum_regresses_what_is_left() -> None:
    """Pairs of clients: the adversary is one of each pair, or one client by itself. Oracle: the other's update in the open run."""
    data = {"clients": 4, "partition": "pathological", "groups": [[0, 1], [2, 3]]}
    seen = case(pooled_config(protection={"sum": "secagg", "min_cohort": 2}, name="pacfl", data=data, training={"rounds": 3}), "client")
    open_ = [step for step in read_steps(seen, seen.reference, seen.prior, public_model(seen.prior)) if step.members != (0,)]
    for step in steps_of(seen):
        (member,) = step.members
        (same,) = [one for one in open_ if one.members == (member,) and one.round == step.round]
        assert step.update == pytest.approx(same.update, abs=1e-6)
        assert 0 < step.deviation < 1e-6
    assert steps_of(seen)
