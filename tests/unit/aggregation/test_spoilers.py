"""One client that breaks the form of its value in secure sums: it is named and left out, and the others' sums go on."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from loopback import Loopback, Spoil, remote, spoilt
from scenes import federation, population, training

from cflpriv.aggregation.secure_sums import SecureSums
from cflpriv.aggregation.spoilers import Suspects, halves, narrowed
from cflpriv.contract.handles import Shared
from cflpriv.contract.protection import Protection
from cflpriv.errors import TooFewClients
from cflpriv.federation import messages as m
from cflpriv.federation.parameters import renamed
from cflpriv.federation.server import FederationServer
from cflpriv.tasks.evaluation import Losses

SCENE = population(groups=1, clients_per_group=8)
TASK = training(SCENE)
BAD = 5
ROUNDS = 5


def spoiled_by(change: Spoil, protection: Protection, rounds: int = ROUNDS, **options: Any) -> tuple[FederationServer, list[Any]]:
    """The means of some rounds in which one client changes its masked vector. The model stays where a sum failed, as in a run."""
    transport, fed = remote(SCENE, protection)
    answers(transport, lambda client, answer: spoilt(answer, change) if client == BAD else answer)
    means: list[Any] = []
    model = TASK.model.init(0)
    for number in range(rounds):
        fed.begin_round(number)
        held = fed.compute(TASK, {"model": model})["update"]
        try:
            means.append(fed.mean(held, **options)[0])
            model = model + means[-1].parts["update"].value()
        except TooFewClients:
            means.append(None)
    return fed, means


def answers(transport: Loopback, change: Callable[[int, m.Answer], m.Answer]) -> None:
    """Let clients send what `change` makes of their answers."""
    transport.tamper = lambda client, stage, data: m.encode(change(client, m.decode_answer(data)))


def with_vector(change: Callable[[Any], Any]) -> Spoil:
    return lambda step: msgspec.structs.replace(step, vector=change(np.frombuffer(step.vector, "<u4").copy()).tobytes())


def moved(place: int, by: int) -> Callable[[Any], Any]:
    def change(vector: Any) -> Any:
        vector[place] = (int(vector[place]) + by) % (1 << 32)
        return vector

    return change


OUT_OF_RANGE: Mapping[str, Callable[[Any], Any]] = {
    "zeros in place of masked numbers": np.zeros_like,
    "a flag below zero": moved(-1, -100),
    "a flag above one": moved(-1, 100),
}


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("form", OUT_OF_RANGE)
def test_a_client_whose_vectors_break_their_form_is_named_and_left_out(form: str, mode: Any) -> None:
    """Of eight, four, two, one: three further failures, and from the second round on each has the mean of a half."""
    fed, means = spoiled_by(with_vector(OUT_OF_RANGE[form]), Protection(sum="secagg", secagg_mode=mode))
    assert means[0] is None
    assert [mean.count for mean in means[1:]] == [4, 4, 4, 7]
    assert all(BAD not in mean.contributors for mean in means[1:])
    assert fed.refusals == [(BAD, "secagg Unmask", "out-of-range")]


def test_a_weight_that_breaks_its_form_is_found_too() -> None:
    protection = Protection(sum="secagg", max_weight=40.0)
    fed, means = spoiled_by(with_vector(moved(-2, -2_000_000_000)), protection, weights="examples")
    assert means[-1].count == 7
    assert fed.refusals == [(BAD, "secagg Unmask", "out-of-range")]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda step: msgspec.structs.replace(step, vector=step.vector[:-4]), "wrong-length"),
        (lambda step: msgspec.structs.replace(step, vector=step.vector + bytes(4)), "wrong-length"),
        (lambda step: msgspec.structs.replace(step, vector=step.vector[: len(step.vector) // 2]), "wrong-length"),
        (lambda step: msgspec.structs.replace(step, client=3), "wrong-sender"),
        (lambda step: msgspec.structs.replace(step, following=None), "wrong-advert"),
    ],
)
def test_a_message_of_another_form_costs_its_client_only(change: Spoil, code: str) -> None:
    fed, means = spoiled_by(change, Protection(sum="secagg"), rounds=2)
    assert [mean.count for mean in means] == [7, 7]
    assert {(client, word) for client, _, word in fed.refusals} == {(BAD, code)}


def test_the_mean_of_halves_is_that_of_their_clients() -> None:
    fed, means = spoiled_by(with_vector(np.zeros_like), Protection(sum="secagg"), rounds=2)
    held = fed.compute(TASK, {"model": TASK.model.init(0)})["update"]
    halved = fed.mean(held, on=means[1].contributors)[0]
    assert halved is not None
    np.testing.assert_allclose(means[1].parts["update"].value(), halved.parts["update"].value(), atol=1e-6)


def test_a_group_that_cannot_be_halved_has_no_sum_and_names_nobody() -> None:
    fed, means = spoiled_by(with_vector(np.zeros_like), Protection(sum="secagg", min_cohort=5), rounds=3)
    assert means == [None, None, None]
    assert not fed.refusals


def test_a_server_that_suspects_nobody_has_no_sum_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecureSums, "suspect", lambda self, survivors, stage: None)
    fed, means = spoiled_by(with_vector(np.zeros_like), Protection(sum="secagg"))
    assert means == [None] * ROUNDS
    assert not fed.refusals


@pytest.mark.parametrize("lost", [range(4), range(8)])
@pytest.mark.parametrize("sums", ["secagg", "secagg-oblivious"])
def test_a_run_goes_on_over_other_clients_where_revealed_shares_were_lost(sums: Any, lost: range) -> None:
    fed = federation(
        SCENE, Protection(sum=sums), seed=1, release_policy="strict", on_error="refuse", dropouts=[(0, client, "Reveal") for client in lost]
    )  # fmt: skip
    counts = []
    for number in range(3):
        fed.begin_round(number)
        if number == 1:
            fed.lose([7])
        try:
            counts.append(fed.mean(fed.compute(TASK, {"model": TASK.model.init(0)}, on=range(8 - number))["update"])[0])
        except TooFewClients:
            counts.append(None)
    assert counts[0] is None
    assert counts[1] is not None
    assert counts[1].count == 7
    assert counts[2] is None, "the sum of round 1 was opened, and its model gets no sum over others"
    assert {code for _, _, code in fed.refusals} == {"second-sum"}


def test_a_group_that_was_too_small_once_is_summed_when_it_is_large_enough() -> None:
    """Its block stays closed, so its model does not move; its clients cannot see that, and would refuse each later sum at this model."""
    scene = population(groups=2, clients_per_group=4)
    task, labels = training(scene, epochs=5), {client: client % 2 for client in range(8)}
    start = task.model.init(0)
    clear = federation(scene)
    apart = clear.mean(clear.compute(task, {"model": start})["update"], groups=labels, k=2)
    models = [start + mean.parts["update"].value() for mean in apart if mean]
    fed = federation(scene, Protection(sum="secagg-oblivious"), release_policy="strict", on_error="refuse")
    counts = []
    for number, cohort in enumerate([(0, 1, 2, 3, 4, 6), (0, 1, 2, 3, 4, 5, 7), tuple(range(8))]):
        fed.begin_round(number)
        chosen = fed.compute(Losses(task.model), {"model": models}, on=cohort)["choice"]
        means = fed.mean(fed.compute(task, {"model": models}, chosen)["update"], groups=chosen, k=2)
        counts.append([mean.count if mean else 0 for mean in means])
        models = [model + mean.parts["update"].value() if mean else model for model, mean in zip(models, means, strict=True)]
    assert counts == [[4, 0], [3, 4], [4, 4]]
    assert not fed.refusals
    assert fed.saved()["unopened"] == [1]


def test_names_that_a_resumed_server_used_are_not_used_again() -> None:
    fed, _ = spoiled_by(with_vector(np.zeros_like), Protection(sum="secagg", min_cohort=5), rounds=2)
    _, again = remote(SCENE, fed.protection, session=fed.session)
    again.restore(fed.saved())
    assert again.saved()["unopened"] == fed.saved()["unopened"] == [1, 2]


@example(np.array([1e-45, 0], np.float32), 1)
@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2), elements=st.floats(-(2.0**100), 2.0**100, width=32)), st.integers(0, 40))
def test_a_model_of_another_name_differs_in_one_number_by_units_in_the_last_place(model: Any, times: int) -> None:
    sent: dict[str, Any] = {"model": model, "models": [Shared(model), Shared(model)], "rate": 1.0, "step": np.arange(3)}
    got: dict[str, Any] = dict(renamed(sent, times))
    assert got["rate"] == 1.0
    assert np.array_equal(got["step"], np.arange(3))
    assert all(np.array_equal(shared.clear, got["model"]) for shared in got["models"])
    before, after = np.ravel(model), np.ravel(got["model"])
    differ = np.flatnonzero(before != after)
    assert len(differ) == (times > 0 and model.size > 1)
    for place in differ:
        assert abs(before[place]) == np.abs(before).max()
        assert abs(float(before[place]) - float(after[place])) <= times * float(np.spacing(np.abs(before[place])))
    if len(differ):
        further: dict[str, Any] = dict(renamed(sent, times + 1))
        assert not np.array_equal(got["model"], further["model"])


# --- the search itself


@given(st.sets(st.integers(0, 60), min_size=6, max_size=40), st.integers(1, 5), st.data())
@settings(deadline=None)
def test_one_spoiler_is_found_by_halving_and_nobody_else_is(clients: set[int], min_cohort: int, data: st.DataObject) -> None:
    everyone, spoiler = sorted(clients), data.draw(st.sampled_from(sorted(clients)))
    suspects: Suspects = ()
    for _ in range(len(everyone).bit_length() + 1):
        parts = halves(everyone, suspects, min_cohort)
        assert sorted(client for part in parts for client in part) == everyone
        assert len(parts) == 1 or min(map(len, parts)) >= min_cohort
        here = [client for client in everyone if client == spoiler or data.draw(st.integers(0, 9))]  # some drop out
        failed = next(part for part in parts if spoiler in part)
        suspects = narrowed(suspects, [client for client in failed if client in here])
        assert any(spoiler in few for few in suspects)
    if len(everyone) >= 2 * min_cohort:
        assert suspects == (frozenset({spoiler}),)
