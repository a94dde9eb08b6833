"""Source inference: which client of a group a sample is from, and how probable as many right answers are without a leak."""

from functools import partial
from itertools import permutations, product

import numpy as np
import pytest
from attack_scenes import case, config, figures_of, unrelated

from cflpriv.attacks.evidence.updates import ClientStep
from cflpriv.attacks.membership.source_inference import SourceGame, chance_of_sources, coefficients, distinguished, games_in
from cflpriv.types import Array

source_figures = partial(figures_of, "source_inference")
GRADIENTS, LOSS = "source_gradients_accuracy", "source_loss_accuracy"
WHOLE = {"groups": [[0, 1, 2, 3]], "clients": 6, "samples_per_client": 40}


def game(y: list[int], owner: list[int]) -> SourceGame:
    return SourceGame(tuple(range(max(owner) + 1)), np.zeros((len(y), 1)), np.array(y), np.array(owner))


def test_movements_are_explained_by_the_gradients_that_they_are_made_of() -> None:
    """Each of three clients moves by the sum of its ten samples' gradients, which have a large part in common."""
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((30, 200)) + 3 * rng.standard_normal(200)
    owner = np.repeat(np.arange(3), 10)
    moved = np.stack([gradients[owner == client].sum(axis=0) for client in range(3)])
    assert (coefficients(gradients, moved - moved.mean(axis=0)).argmax(axis=0) == owner).all()


def test_the_chance_is_twice_the_smaller_of_two_exact_tests() -> None:
    """By brute force: all deals of the samples of each label, and all names of the three clients."""
    played = game([0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 0, 1, 2, 2])
    names = np.array([0, 1, 0, 0, 1, 2, 1])
    right = int((names == played.owner).sum())
    first, second = ({tuple(deal) for deal in permutations(played.owner[played.y == label].tolist())} for label in (0, 1))
    dealt = [sum(a == b for a, b in zip((*one, *other), names.tolist(), strict=True)) for one, other in product(first, second)]
    named = [int((np.array(order)[names] == played.owner).sum()) for order in permutations(range(3))]
    smaller = min(float(np.mean(np.array(reached) >= right)) for reached in (dealt, named))
    assert chance_of_sources([names], [played], np.random.default_rng(0), 20000) == pytest.approx(2 * smaller, abs=0.02)


def test_models_that_like_some_labels_are_seldom_a_leak() -> None:
    """Four clients of one distribution with uneven labels; models at random prefer labels, so that samples of a label go to one of them."""
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(300):
        shares = rng.dirichlet(np.full(3, 0.5), 4)
        y = np.concatenate([rng.choice(3, 15, p=row) for row in shares])
        names = np.where(rng.random(60) < 0.8, rng.integers(0, 4, 3)[y], rng.integers(0, 4, 60))
        played = SourceGame((0, 1, 2, 3), np.zeros((60, 1)), y, np.repeat(np.arange(4), 15))
        alarms += chance_of_sources([names], [played], rng, 399) < 0.025
    assert alarms <= 15  # of 300, at 2.5 %: 7.5 expected at most; 16 or more have a probability of .005


def test_a_sample_is_given_to_its_client_in_the_clear_and_by_a_member() -> None:
    seen = source_figures(case(config({"name": "fedavg"}, data=WHOLE, training={"rounds": 1, "batch_size": 0})))
    assert seen[GRADIENTS].status == "leaks", seen[GRADIENTS].line()
    assert seen[GRADIENTS].baseline == pytest.approx(1 / 6)
    assert (seen[GRADIENTS].value or 0.0) > 0.8
    assert seen[LOSS].value is not None
    member = source_figures(case(config({"name": "fedfomo"}, data=WHOLE, training={"rounds": 2, "epochs": 2}), "client"))
    assert member[GRADIENTS].status == "leaks", member[GRADIENTS].line()


def test_sums_over_changing_cohorts_show_whose_a_sample_is() -> None:
    """A sample is in the sums of the rounds in which its client takes part. Of the clients' updates by themselves the server sees none."""
    data = {"groups": [[0, 1, 2, 3]], "clients": 8, "samples_per_client": 30}
    seen = source_figures(
        case(config({"name": "fedavg"}, {"sum": "secagg"}, data=data, training={"rounds": 20, "batch_size": 0, "participation": 0.5}))
    )
    assert set(seen) == {GRADIENTS}
    assert seen[GRADIENTS].status == "leaks", seen[GRADIENTS].line()
    assert (seen[GRADIENTS].value or 0.0) > 3 / 8


def test_clients_that_are_always_summed_together_are_not_told_apart() -> None:
    rng = np.random.default_rng(0)
    sums = [ClientStep(rng.standard_normal(3), rng.standard_normal(3), members) for members in ((0, 1, 2), (0, 1, 3), (0, 1))]
    assert distinguished({client: [step for step in sums if client in step.members] for client in range(4)}) == [2, 3]


def test_sums_and_views_of_others_say_nothing() -> None:
    summed = source_figures(case(config({"name": "fedavg"}, {"sum": "secagg"}, data=WHOLE)))[GRADIENTS]
    assert summed.status == "not_attempted"
    assert "of 0 client(s) can be told apart" in summed.note
    blind = source_figures(case(config({"name": "fedavg"}, {"sum": "haar"}, data=WHOLE)))[GRADIENTS]
    assert blind.status == "not_attempted"
    strange = source_figures(unrelated(config({"name": "fedavg"}, data={"clients": 8, "groups": [[0, 1], [2, 3]]}, training={"rounds": 1})))
    assert {cell.status for cell in strange.values()} <= {"at_baseline", "not_validated", "inconclusive"}, [
        c.line() for c in strange.values()
    ]


def test_equally_many_samples_of_each_client_are_asked_about() -> None:
    seen = case(config({"name": "fedavg"}, data={"clients": 8, "groups": [[0, 1], [2, 3]], "samples_per_client": 20}))
    games = games_in(seen, list(range(8)), None, 12)
    assert [len(played.clients) for played in games] == [4, 4]
    for played in games:
        assert np.bincount(played.owner).tolist() == [12] * 4
        for place, client in enumerate(played.clients):
            own: Array = seen.truth.data[client][0].reshape(20, -1)
            assert all(any(np.array_equal(x.ravel(), row) for row in own) for x in played.x[played.owner == place])
