"""Clients that are lost, refuse, or say what cannot be, at any exchange of any algorithm: the round is done without them, or skipped."""

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from loopback import remote
from scenes import population, training

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.fesem import TrainAndAssign
from cflpriv.contract.handles import Held, HeldKey, placed
from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError, TrainingDiverged
from cflpriv.federation import messages as m
from cflpriv.federation.server import ClientsLost, FederationServer
from cflpriv.protocols.errors import TooFewClients
from cflpriv.types import Population

SKIPPED = (TooFewClients, TrainingDiverged, ClientsLost)
"""What a server that plays rounds takes for a round without a result; anything else would end the run."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ALGORITHMS},
    "ifca, saving": ("ifca", {"stable_rounds": 1}),
    "ifca, restarts": ("ifca", {"restarts": 2}),
    "fesem, random": ("fesem", {"start": "random"}),
    "pfedlia, peer": ("pfedlia", {"mode": "peer"}),
    "r_dpcfl": ("r_dpcfl", {"k": 2, "rounds": 4}),
}
ROUNDS = 3
LOST = 2


def algorithm(case: str, scene: Population) -> Any:
    name, options = CASES[case]
    wanted = inspect.signature(ALGORITHMS[name].make).parameters
    given = {"weights": "equal", "warm_up": 1, "warmup_rounds": 1, "groups": dict(zip(range(6), scene.groups, strict=True))}
    return ALGORITHMS[name].make(training(scene), **{key: value for key, value in given.items() if key in wanted}, **options)


def play(case: str, protection: Protection, at: int, lost: Collection[int], thorough: bool) -> tuple[list[tuple[int, str]], list[Any]]:
    """`lost` die at exchange number `at`, and are back at the next round. All exchanges (round, stage), and each round's record or None.

    A thorough one has every client scored after each round.
    """
    scene = population(groups=2, clients_per_group=3)
    transport, fed = remote(scene, protection)
    exchange = transport.exchange
    exchanges: list[tuple[int, str]] = []

    def dying(requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        if stage not in ("enrol", "group"):
            transport.dead |= set(lost) if len(exchanges) == at else set()
            exchanges.append((fed.round, stage))
        return exchange(requests, stage)

    transport.exchange = dying  # type: ignore[method-assign]
    made: Any = algorithm(case, scene)
    records: list[Any] = []
    state = again(made.init, fed)
    for number in range(ROUNDS):
        transport.dead -= set(lost)
        came = fed.begin_round(number)
        records.append(None)
        with suppress(*SKIPPED):
            clustering = made.describe(state).get("clustering")
            fresh = [] if clustering is None else sorted(set(came) - set(clustering.clients))
            if fresh and made.admit is not None:
                state, _ = again(made.admit, fed, state, fresh)
            state, records[-1] = again(made.round, fed, state)
        if thorough:
            with suppress(*SKIPPED):
                served = made.serve(state)
                fed.gather(fed.compute(served.task, served.params, which=served.which)["correct", "count"])
    return exchanges, records


def again(step: Any, *given: Any) -> Any:
    try:
        return step(*given)
    except ClientsLost:
        return step(*given)


def check_deaths(case: str, protection: Protection, lost: Collection[int], thorough: bool) -> None:
    """At every exchange, or (not so thorough) at the first of its kind in each round."""
    exchanges, records = play(case, protection, -1, (), thorough)
    assert all(record is not None for record in records)
    for at, (number, stage) in enumerate(exchanges):
        if not thorough and (number, stage) in exchanges[:at]:
            continue
        try:
            _, records = play(case, protection, at, lost, thorough)
        except SKIPPED:  # before the first round: there is nothing to go on with
            assert (number, len(lost)) == (-1, 6)
            continue
        skipped = [i for i, record in enumerate(records) if record is None]
        assert set(skipped) <= {number}, (stage, number)
        if len(lost) == 1:
            assert not skipped, (stage, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["ifca", "ifca, saving", "fesem", "fesem, random", "fedproto", "pfedlia", "pfedlia, peer", "fedfomo", "r_dpcfl"]
)
def test_one_client_lost_where_algorithms_gather_or_relay_costs_no_run(case: str) -> None:
    check_deaths(case, Protection(), [LOST], thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["pfedlia", "fedfomo", "local"])
def test_all_clients_lost_where_values_are_relayed_or_added_up_cost_the_round(case: str) -> None:
    check_deaths(case, Protection(), range(6), thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [[LOST], range(6)], ids=["one", "all"])
@pytest.mark.parametrize("case", CASES)
def test_clients_lost_at_any_exchange_of_any_algorithm_cost_no_more_than_the_round(case: str, lost: Collection[int]) -> None:
    check_deaths(case, Protection(), lost, thorough=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["ifca", "ifca, saving", "fesem", "pfedlia", "fedfomo", "one_shot", "r_dpcfl"]
)  # FedProto is refused there
def test_also_under_secure_sums(case: str) -> None:
    check_deaths(case, Protection(gram=("haar",), sum="secagg", min_cohort=2), [LOST], thorough=False)


# --- what one client says instead ---------------------------------------------------------------------------------------------------------


def said(case: str, stage: str, answer: Any, number: int = 1, protection: Protection | None = None) -> tuple[Any, FederationServer]:
    """The state after round `number`, in which client `LOST` says `answer` (a word, or an array for its values) at every such stage."""
    scene = population(groups=2, clients_per_group=3)
    transport, fed = remote(scene, protection)

    def instead(client: int, at: str, data: bytes) -> bytes:
        if (client, at, fed.round) != (LOST, stage, number):
            return data
        if isinstance(answer, str):
            return m.encode(m.Refused(answer))
        given = m.decode_answer(data)
        assert isinstance(given, m.Given)
        return m.encode(m.Given(tuple(m.NamedArray(one.name, np.asarray(answer)) for one in given.values), given.samples))

    transport.tamper = instead
    made: Any = algorithm(case, scene)
    state = made.init(fed)
    for i in range(number + 1):
        fed.begin_round(i)
        state, _ = made.round(fed, state)
    return state, fed


def models(state: Any) -> list[Any]:
    """What the server has after a round."""
    held = (
        state.prototypes.values()
        if hasattr(state, "prototypes")
        else state.restarts[0].models
        if hasattr(state, "restarts")
        else state.models
    )
    return [one.value() for one in held]


CHOICES = ["internal", 99, -1, np.nan, np.inf, np.zeros(3, np.int64), 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ifca", "fesem", "fedproto"])
def test_whose_choice_does_not_come_or_cannot_be_is_in_no_sum(case: str) -> None:
    """Not even in that of its choice of an earlier round: all is as if it had not trained. Nor does the run end."""
    without, _ = said(case, "compute", "internal")
    for choice in CHOICES:
        state, fed = said(case, "gather", choice)
        for found, expected in zip(models(state), models(without), strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=str(choice))
        noted = {"internal": "internal", 99: None}.get(choice if isinstance(choice, str | int) else "", "malformed")
        assert {one for one in fed.refusals if one[1] == "gather"} == ({(LOST, "gather", noted)} if noted else set()), choice


def test_groups_that_are_private_choices_leave_out_who_says_none() -> None:
    """Where the sum itself asks for the choices."""
    scene = population(groups=2, clients_per_group=3)
    transport, fed = remote(scene)
    made: Any = algorithm("fesem, random", scene)
    made.init(fed)
    transport.tamper = lambda client, stage, data: (
        m.encode(m.Given((m.NamedArray("choice", np.array(7)),), 0)) if (client, stage) == (LOST, "gather") else data
    )
    train = training(scene)
    held = fed.compute(TrainAndAssign(train, 0, first=True), {"model": [train.model.init(0), train.model.init(1)]})
    counts = [0 if mean is None else mean.count for mean in fed.mean(held["step"], groups=held["choice"], k=2)]
    assert sum(counts) == 5
    assert fed.refusals == [(LOST, "gather", "malformed")]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["pfedlia", "pfedlia, peer"])
def test_whose_scores_cannot_be_is_placed_later(case: str) -> None:
    for row in (np.zeros(3), np.full(6, np.nan), np.zeros((6, 6))):
        state, _ = said(case, "gather", row)
        assert state.clustered
        assert LOST not in state.uses
        assert not any(LOST in group for group in state.groups)
        assert LOST not in state.lazy.clients
        if case == "pfedlia":
            without, _ = said(case, "compute", "internal")
            assert (state.groups, state.uses) == (without.groups, without.uses)


def test_who_does_not_take_what_was_relayed_costs_the_others_nothing() -> None:
    state, fed = said("fedfomo", "take", "internal")
    assert state.trained == tuple(range(6))
    assert fed.refusals == [(LOST, "take", "internal")]


def test_another_client_makes_the_product_where_the_first_is_lost() -> None:
    scene, models = population(groups=2, clients_per_group=3), []
    for lost in (set(), {0}):
        transport, fed = remote(scene, Protection(sum="haar"))
        transport.kill_at = {"product": lost}
        made: Any = algorithm("fednova", scene)
        state = made.init(fed)
        fed.begin_round(0)
        state, _ = made.round(fed, state)
        assert "product" in transport.stages
        what = made.serve(state)
        models.append(fed.gather(fed.compute(what.task, what.params, on=[1])["loss"])[1]["loss"])
    np.testing.assert_allclose(models[0], models[1], rtol=1e-12)


def test_held_by_some() -> None:
    held = Held(HeldKey("test"), (1, 2, 4), ("a", "b"))
    assert held.of([4, 3, 1]).clients == (1, 4)
    assert held["a"].of({2: 0}).part == "a"
    with pytest.raises(TooFewClients):
        held.of(())


def test_who_is_in_no_cluster_takes_no_part_until_it_is_admitted() -> None:
    state, fed = said("pacfl", "compute", "internal", number=-1)
    assert fed.clients == tuple(range(6))
    assert LOST not in state.clustering.clients
    made: Any = algorithm("pacfl", population(groups=2, clients_per_group=3))
    fed.begin_round(0)
    state, record = made.round(fed, state)
    assert record.cohort == (0, 1, 3, 4, 5)
    served = made.serve(state)
    with pytest.raises(InputError, match=f"no label for client {LOST}"):  # as in one process
        fed.compute(served.task, served.params, which=served.which)
    there = placed(state.clustering, fed.clients)
    assert fed.compute(served.task, served.params, which=served.which, on=there).clients == record.cohort
    state, _ = made.admit(fed, state, [LOST])
    assert made.round(fed, state)[1].cohort == tuple(range(6))
