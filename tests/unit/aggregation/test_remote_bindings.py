"""Secure sums in active mode over messages: a client that is told something else than the others is in no sum with them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from loopback import Loopback, remote
from msgspec import structs
from scenes import population, training

from cflpriv.algorithms.shared.choosing import PickAndTrain
from cflpriv.contract.handles import Held, HeldKey, OwnAddend, PartLayout, Shared
from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.server import FederationServer
from cflpriv.federation.server_state import KnownValue as _Known
from cflpriv.federation.values import UNTRACED, from_bytes
from cflpriv.protocols.errors import TooFewClients
from cflpriv.protocols.secagg.messages import Deliver, decode_server
from cflpriv.tasks.evaluation import Losses
from cflpriv.tasks.training import Start

VICTIM = 2
ACTIVE = Protection(sum="secagg", min_cohort=3, secagg_clip=8.0)
SCENE = population(groups=1, clients_per_group=8)
TASK = training(SCENE)
Change = Callable[[int, m.PartyRequest], m.PartyRequest]


def lying_federation(change: Change, protection: Protection = ACTIVE) -> tuple[Loopback, FederationServer]:
    """A federation whose server tells each client what `change` makes of what it would tell it."""
    transport, fed = remote(SCENE, protection)
    lie(transport, change)
    fed.begin_round(0)
    return transport, fed


def lie(transport: Loopback, change: Change) -> None:
    honest = transport.exchange

    def exchange(requests: Any, stage: str) -> Any:
        return honest({place: m.encode(change(place - 1000, m.decode_ask(data))) for place, data in requests.items()}, stage)

    transport.exchange = exchange  # type: ignore[method-assign]


def of(transport: Loopback, client: int, number: int) -> Any:
    return np.ravel(from_bytes(transport.stores[client].get(f"held/{number}") or b"")[0]["update"])


def words(fed: FederationServer) -> set[tuple[int, str]]:
    return {(client, word) for client, _, word in fed.refusals}


def test_what_honest_members_are_told_is_one_thing() -> None:
    transport, fed = lying_federation(lambda client, ask: ask)
    held = fed.compute(TASK, {"model": TASK.model.init(0)})
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    number = fed._known[held.key].number
    assert mean.parts["update"].value() == pytest.approx(np.mean([of(transport, client, number) for client in range(8)], axis=0), abs=1e-6)
    assert not fed.refusals


LAZY = replace(TASK, lr=1e-30)
OTHER: dict[str, Change] = {
    "task": lambda client, ask: structs.replace(ask, task=m.Carried(LAZY)),
    "seed": lambda client, ask: structs.replace(ask, seed=99),
    "round": lambda client, ask: structs.replace(ask, round=99),
    "model": lambda client, ask: structs.replace(ask, params=(("model", m.Addends(TASK.model.init(1), (), ())),)),
}


@pytest.mark.parametrize("what", OTHER)
@pytest.mark.parametrize("alone", [True, False])
def test_whoever_computes_something_else_is_in_no_sum_with_the_others(what: str, alone: bool) -> None:
    def change(client: int, ask: m.PartyRequest) -> m.PartyRequest:
        return OTHER[what](client, ask) if isinstance(ask, m.Compute) and (client == VICTIM) == alone else ask

    _, fed = lying_federation(change)
    held = fed.compute(TASK, {"model": TASK.model.init(0)})["update"]
    told = {VICTIM} if alone else set(range(8)) - {VICTIM}
    if alone:
        (mean,) = fed.mean(held)
        assert mean is not None
        assert mean.count == 7
    else:
        with pytest.raises(TooFewClients):
            fed.mean(held)
    assert words(fed) == {(client, "unlisted-model") for client in told}


def test_the_value_that_is_added_up_is_that_of_the_invitation() -> None:
    numbers: dict[str, int] = {}

    def change(client: int, ask: m.PartyRequest) -> m.PartyRequest:
        late = isinstance(ask, m.SumStep) and isinstance(decode_server(ask.message), Deliver) and client == VICTIM
        return structs.replace(ask, held=numbers["private"]) if late else ask

    _, fed = lying_federation(change)
    held = fed.compute(TASK, {"model": TASK.model.init(0)})
    private = fed.compute(TASK, {"model": TASK.model.init(1)}, on=[VICTIM])
    numbers["private"] = fed._known[private.key].number
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    assert mean.count == 7
    assert words(fed) == {(VICTIM, "unlisted-model")}


def test_whose_choice_came_about_otherwise_is_in_no_sum_with_the_others() -> None:
    """The same list for all, of which only one client picks the model that training moves at all."""
    base, stuck = TASK.model.init(0), np.full(TASK.model.dimension, 1e9, np.float32)

    def change(client: int, ask: m.PartyRequest) -> m.PartyRequest:
        if not isinstance(ask, m.Compute) or ask.which is not None or client != VICTIM:
            return ask
        (models,) = ask.params
        assert isinstance(models[1], m.Many)
        return structs.replace(ask, params=(("model", m.Many(models[1].values[::-1])),))

    _, fed = lying_federation(change)
    choice = fed.compute(Losses(TASK.model), {"model": [base, 50 * base]})["choice"]
    held = fed.compute(TASK, {"model": [stuck, base]}, which=choice)
    picks = [int(fed.gather(choice)[client]["choice"]) for client in range(8)]
    assert picks == [int(client == VICTIM) for client in range(8)]
    with pytest.raises(InputError, match="members of one group were sent 2 different models"):
        fed.mean(held["update"])  # who chose is known, so each client's model is: two of them never meet in one sum
    (most,) = {names for client, names in names_of(fed, held).items() if client != VICTIM}
    fed._known[held.key] = replace(
        fed._known[held.key], models={client: {-1: most[0]} for client in range(8)}
    )  # a server that lists the model of most
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    assert mean.count == 7
    assert words(fed) == {(VICTIM, "unlisted-model")}


def names_of(fed: FederationServer, held: Held) -> dict[int, tuple[bytes, ...]]:
    """The names that each client's value has for secure sums, as the server knows them."""
    return {client: fed._known[held.key].names(client) for client in held.clients}


def test_a_private_model_in_an_identical_list_meets_no_other_model() -> None:
    """One request to all clients, whose list has a model that only one client chooses: what it computes is in no sum with the others."""
    base, stuck = TASK.model.init(0), np.full(TASK.model.dimension, 1e8, np.float32)
    _, fed = remote(SCENE, ACTIVE)
    fed.begin_round(0)
    pick = PickAndTrain(Losses(TASK.model), TASK, "update")
    held = fed.compute(pick, {"model": [base, stuck]})
    assert len({name for names in names_of(fed, held).values() for name in names}) == 2
    with pytest.raises(InputError, match="2 different models"):
        fed.mean(held["step"])


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_what_clients_added_up_or_were_sent_by_each_other_is_summed_in_passive_mode_only(mode: Any) -> None:
    _, fed = remote(SCENE, replace(ACTIVE, secagg_mode=mode))
    fed.begin_round(0)
    held = fed.compute(TASK, {"model": TASK.model.init(0)})["update"]
    twice = fed.fold(Shared(own=(OwnAddend(held), OwnAddend(held)))).own[0].held
    relayed = fed.relay(held)
    again = fed.compute(TASK, {"model": Shared(np.zeros(TASK.model.dimension, np.float32), own=(OwnAddend(held),))})["update"]
    assert {name for client in relayed.clients for name in fed._known[relayed.key].names(client)} == {UNTRACED}
    for one in (twice, again):
        if mode == "passive":
            assert fed.mean(one)[0] is not None
            continue
        with pytest.raises(InputError, match="secagg_mode = 'active'"):
            fed.mean(one)


def test_a_server_that_calls_such_a_value_traced_is_refused() -> None:
    _, fed = lying_federation(lambda client, ask: ask)
    held = fed.compute(TASK, {"model": TASK.model.init(0)})
    number, known = fed._rounds.next_number(), fed._known[held.key]
    factors = {client: 1.0 if client == VICTIM else 1e-30 for client in range(8)}
    asks: dict[int, m.PartyRequest] = {
        client: m.AddUp(fed.session, number, (m.OwnPart(known.number, "update", factor),)) for client, factor in factors.items()
    }
    fed._ask(asks, "add up")
    key, (_, dtype, shape) = HeldKey("own"), *known.layout.some(("update",)).parts
    fed._known[key] = _Known(number, PartLayout((("own", dtype, shape),)), known.models)
    with pytest.raises(TooFewClients):
        fed.mean(Held(key, tuple(range(8)), ("own",)))
    assert words(fed) == {(client, "forbidden") for client in range(8)}


def test_no_more_models_than_a_client_allows() -> None:
    def change(client: int, ask: m.PartyRequest) -> m.PartyRequest:
        if isinstance(ask, m.SumStep):
            return structs.replace(ask, models=2)
        return OTHER["model"](client, ask) if isinstance(ask, m.Compute) and client == VICTIM else ask

    _, fed = lying_federation(change)
    held = fed.compute(TASK, {"model": TASK.model.init(0)})["update"]
    with pytest.raises(TooFewClients):
        fed.mean(held, models=2)
    assert words(fed) == {(client, "forbidden") for client in range(8)}


def test_an_honest_sum_over_several_models_is_refused_by_name_where_clients_allow_one() -> None:
    _, fed = lying_federation(lambda client, ask: ask)
    several = {"model": [TASK.model.init(0), TASK.model.init(1)]}
    held = fed.compute(TASK, several, which={client: client % 2 for client in range(8)})["update"]
    with pytest.raises(InputError, match="models = 2 into their settings"):
        fed.mean(held, models=2)


def test_a_value_computed_from_nothing_that_was_sent_is_bound_too() -> None:
    other = Start(TASK.model, 7)

    def change(client: int, ask: m.PartyRequest) -> m.PartyRequest:
        return structs.replace(ask, task=m.Carried(other)) if isinstance(ask, m.Compute) and client == VICTIM else ask

    _, fed = lying_federation(change)
    (mean,) = fed.mean(fed.compute(Start(TASK.model, 1))["model"])
    assert mean is not None
    assert mean.count == 7
    assert words(fed) == {(VICTIM, "unlisted-model")}
