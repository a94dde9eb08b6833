"""Sums of the part of a model that travels, and how released models moved from the public start: leaks, and none in unrelated data.

Figures of unrelated data are tests at 2.5 % each, of seeded runs.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attack_scenes import case, config, figures_of, population_of, unrelated

from cflpriv.algorithms import ALGORITHMS
from cflpriv.attacks.adversary import recorded_messages, view_of
from cflpriv.attacks.evidence.released_models import release_of_folder, release_of_run
from cflpriv.attacks.evidence.sums import models_sent, stated_shares
from cflpriv.attacks.evidence.trained_by import trained_by
from cflpriv.attacks.evidence.updates import mean_updates, public_model, steps_in
from cflpriv.attacks.figures.payloads import data_parts
from cflpriv.attacks.labels.label_readings import shares_of
from cflpriv.attacks.membership.membership_gradients import read_steps
from cflpriv.contract.handles import Shared
from cflpriv.contract.transcript import Message
from cflpriv.errors import InputError
from cflpriv.experiments import advance, run_experiment, start
from cflpriv.experiments.run.export import exported_model
from cflpriv.types import Array

PARTED = {"name": "lg_fedavg"}
SMALL = {"clients": 12, "samples_per_client": 20}


def test_the_mean_of_a_part_is_that_of_its_members_updates() -> None:
    """Secure sums over changing cohorts: only cohorts of clients that train for the first time begin at the initial model."""
    made = config(PARTED, {"sum": "secagg"}, training={"rounds": 4, "participation": 0.4}, data={"clients": 20, "samples_per_client": 12})
    seen = case(made)
    model = public_model(seen.prior)
    single = {client: steps[0] for client, steps in steps_in(seen.reference, model.dimension, parts=True).items()}
    means = mean_updates(seen.view, model.dimension)
    assert means
    cohorts: list[set[int]] = []
    for mean in means:
        assert mean.part > 0
        assert mean.mean is not None
        assert not any(set(mean.members) & earlier for earlier in cohorts)
        cohorts.append(set(mean.members))
        updates = [single[client] for client in mean.members]
        assert {step.round for step in updates} == {mean.round}
        assert mean.mean == pytest.approx(np.mean([step.update for step in updates], axis=0), abs=2e-4)
        assert not mean.mean[: mean.part].any()


def test_the_sum_of_a_part_shows_the_labels_of_its_cohort() -> None:
    """Cohorts of two groups with other labels each: the shares of the cohort, not those of the auxiliary data, which are even."""
    made = config(PARTED, {"sum": "secagg"}, training={"rounds": 1, "participation": 0.3}, data={"clients": 20, "samples_per_client": 40})
    seen = case(made)
    (steps, *_) = steps_in(seen.view, public_model(seen.prior).dimension, seen, parts=True).values()
    members = steps[0].members
    truth = np.mean([seen.truth.histogram(client) for client in members], axis=0)
    read = shares_of(steps[0], seen.prior, public_model(seen.prior), seen.prior.classes)
    assert np.abs(read - truth).sum() < 0.15
    assert np.abs(np.bincount(seen.prior.y, minlength=seen.prior.classes) / len(seen.prior.y) - truth).sum() > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("protection", [{}, {"sum": "secagg"}])
def test_the_part_that_travels_shows_members(protection: dict[str, Any]) -> None:
    made = config(PARTED, protection, training={"rounds": 2}, data={"clients": 12, "samples_per_client": 20})
    assert figures_of("membership", case(made))["update_gradients_auc"].status == "leaks"
    assert figures_of("membership", unrelated(made))["update_gradients_auc"].status != "leaks"


def test_the_part_that_travels_shows_whose_a_sample_is() -> None:
    made = config(PARTED, training={"rounds": 1}, data={"clients": 12, "samples_per_client": 20})
    assert figures_of("source_inference", case(made))["source_gradients_accuracy"].status == "leaks"
    assert figures_of("source_inference", unrelated(made))["source_gradients_accuracy"].status != "leaks"


@pytest.mark.slow
def test_the_head_of_one_sample_shows_the_image() -> None:
    """The head's update over the head's bias is what the layers before made of the image, and those are public at first."""
    made = config(
        PARTED, training={"rounds": 1, "batch_size": 0}, data={"clients": 4, "samples_per_client": 1}, model={"hidden": 256}
    )  # fmt: skip
    found = figures_of("gradient_inversion", case(made))["image_psnr_db"]
    assert found.value is not None
    assert found.value > 40
    assert found.status == "leaks"
    assert figures_of("gradient_inversion", unrelated(made))["image_psnr_db"].status != "leaks"


# --- released models ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ALGORITHMS.names())
def test_the_start_that_a_released_view_has_depends_on_no_data(algorithm: str) -> None:
    """Two runs on other data with one seed send the same initial models, and a view of later models depends on data."""
    starts = []
    for seed in (0, 1):
        given = {"k": 2} if algorithm in ("ifca", "hypcluster", "fesem", "fedsoft") else {}
        made = config({"name": algorithm, **given}, data={**SMALL, "seed": seed}, model={"name": "linear"}, training={"rounds": 3})
        try:
            run = start(made, population=population_of(made))
            for _ in range(3):
                advance(run)
        except InputError:
            return
        messages = run.federation.transcript.messages
        run.simulated.close()
        try:
            view = view_of(messages, "released", {})
        except InputError:  # this algorithm sends no model
            return
        assert data_parts(view)
        vectors = {
            name: vector for message in view.messages if message.context["initial"]
            for name, vector in models_sent(view, message).items()
        }  # fmt: skip
        starts.append(vectors)
    shared = set(starts[0]) & set(starts[1])  # how many clusters there are depends on the data
    assert shared or not starts[0]
    assert all(np.array_equal(starts[0][name], starts[1][name]) for name in shared)


@pytest.mark.slow
def test_the_movement_of_a_released_model_is_the_sum_of_its_rounds() -> None:
    made = config({"name": "pacfl"}, {"sum": "secagg"}, training={"rounds": 4}, data=SMALL)
    seen = case(made, "released")
    model = public_model(seen.prior)
    moved = mean_updates(seen.view, model.dimension)
    rounds = mean_updates(case(made).view, model.dimension)
    assert {mean.label for mean in moved} == {mean.label for mean in rounds} == {0, 1, 2, 3}
    for mean, people in zip(moved, trained_by(seen, seen.view, moved), strict=True):
        parts = [one.mean for one in rounds if one.label == mean.label and one.round < 3 and one.mean is not None]
        assert mean.mean == pytest.approx(np.sum(parts, axis=0), abs=1e-5)
        assert not mean.members
        assert mean.sums(seen.view) == 3
        assert set(people) == {client for one in rounds if one.label == mean.label for client in one.members}


def test_a_released_model_shows_the_labels_of_those_who_trained_it() -> None:
    """Four clusters of two labels each. By chance alone all four fit best one time in 24, so that one run alone is no leak."""
    made = config({"name": "pacfl"}, {"sum": "secagg"}, training={"rounds": 4}, data=SMALL)
    found = figures_of("label_inference", case(made, "released"))["aggregate_histogram_l1"]
    assert found.value is not None
    assert found.value < 0.1
    assert found.baseline is not None
    assert found.baseline > 1
    assert found.p == pytest.approx(1 / 24)
    other = figures_of("label_inference", unrelated(made, "released"))["aggregate_histogram_l1"]
    assert other.value is not None
    assert other.value > 1


@pytest.mark.slow
def test_a_released_model_shows_members_by_how_it_moved() -> None:
    made = config({"name": "fedavg"}, {"sum": "secagg"}, training={"rounds": 4}, data={"clients": 12, "samples_per_client": 20})
    seen = case(made, "released")
    (step,) = read_steps(seen, seen.view, seen.prior, public_model(seen.prior))
    assert [number for number, _ in step.trainings] == [0, 1, 2]
    found = figures_of("membership", seen)["update_gradients_auc"]
    assert found.value is not None
    assert found.value > 0.7
    assert found.status == "leaks"
    assert figures_of("membership", unrelated(made, "released"))["update_gradients_auc"].status != "leaks"


def test_a_sample_with_an_input_that_nobody_has_trained_no_released_model() -> None:
    made = config({"name": "pacfl"}, {"sum": "secagg"}, training={"rounds": 3}, data=SMALL | {"samples_per_client": 6})
    found = figures_of("exact_zeros", case(made, "released"))["excluded_inputs_auc"]
    assert found.value is not None
    assert found.value > 0.5
    assert "released" in found.note


@pytest.mark.parametrize("viewer", ["server", "released"])
def test_what_reads_whole_models_is_not_attempted_on_a_part_of_clients_data(viewer: str) -> None:
    """Another attack may read the part: "not applicable" would call the question settled."""
    seen = case(config(PARTED, training={"rounds": 2}, data=SMALL), viewer)
    assert figures_of("property_inference", seen)["update_auc"].status == "not_attempted"
    assert {figure.status for figure in figures_of("gradient_inversion", seen).values()} == {"not_attempted"}


@pytest.mark.parametrize("algorithm", [{"name": "fedavg"}, {"name": "pacfl", "k": 4}, {"name": "ifca", "k": 2}, {"name": "fedrc", "k": 2}])
def test_released_models_are_those_that_the_run_ends_with(algorithm: dict[str, Any]) -> None:
    """And not those of the last round's beginning; members and servers are not shown them."""
    made = config(algorithm, data=SMALL, training={"rounds": 2})
    run = start(made, population=population_of(made))
    for _ in range(made.training.rounds):
        advance(run)
    sent = run.federation.transcript.messages
    (release,) = release_of_run(run, sent, made.training.rounds)
    messages = [*sent, release]
    final = [vector for message in view_of(messages, "released", {}).messages[-1:] for vector in models_sent_anywhere(message)]
    served = run.algorithm.serve(run.state).params["model"]
    for vector, model in zip(final, served if isinstance(served, list | tuple) else [served], strict=True):
        assert isinstance(model, Shared)
        np.testing.assert_array_equal(vector, model.value())
    assert all(release not in view_of(messages, viewer, {}).messages for viewer in ("server", "client"))


def models_sent_anywhere(message: Message) -> list[Array]:
    return [vector for name, vector in (message.payload or {}).items() if name.partition("/")[0] == "model"]


def test_a_recorded_run_has_its_final_models(tmp_path: Path) -> None:
    """From its last checkpoint, the same models as those that are exported."""
    made = config({"name": "fedavg"}, data=SMALL, training={"rounds": 1})
    population = population_of(made)
    run_experiment(made, tmp_path / "run", population=population)
    sent = recorded_messages(tmp_path / "run")
    (release,) = release_of_folder(tmp_path / "run", made, population, sent, 1)
    assert (release.round, release.index) == (1, sent[-1].index + 1)
    exported = exported_model(tmp_path / "run", population=population)
    (vector,) = models_sent_anywhere(release)
    np.testing.assert_array_equal(vector, np.concatenate([value.numpy().ravel() for value in exported.state.values()]))
    assert release_of_folder(tmp_path, made, population, sent, 1) == []


# --- several models in one vector -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adversary", ["client", "released"])
def test_means_of_several_models_state_the_labels_of_their_cohort(adversary: str) -> None:
    """FedRC's models and sums of weights by label are one vector: of a mean that two models tell, each model is read, and the shares."""
    made = config({"name": "fedrc", "k": 2}, data=SMALL, training={"rounds": 2})
    seen = case(made, adversary)
    model = public_model(seen.prior)
    means = mean_updates(seen.view, model.dimension)
    truth = np.mean([seen.truth.histogram(client) for client in seen.truth.label_counts], axis=0)
    assert {mean.label for mean in means} == {0, 1}
    for mean in means:
        assert mean.mean is not None
        assert mean.mean.shape == (model.dimension,)
        assert mean.stated is not None
        np.testing.assert_allclose(mean.stated, truth, atol=1e-6)
    assert figures_of("label_inference", seen)["aggregate_histogram_l1"].value == pytest.approx(0.0, abs=1e-6)


def test_rows_of_another_form_state_no_shares() -> None:
    rng = np.random.default_rng(0)
    assert stated_shares(rng.normal(size=2 * (5 + 3)), 5, 3) is None
    assert stated_shares(rng.normal(size=17), 5, 3) is None
    row = np.concatenate([rng.normal(size=10), [0.1, 0.2, 0.1, 0.2, 0.3, 0.1]])
    stated = stated_shares(row, 5, 3)
    assert stated is not None
    np.testing.assert_allclose(stated, np.array([0.3, 0.5, 0.2]))
