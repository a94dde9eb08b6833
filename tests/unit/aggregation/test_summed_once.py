"""No second sum: the values of one round go into one sum, over one set of clients with one weight each, whatever a server calls them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from loopback import Loopback, remote
from msgspec import structs
from scenes import population, training

from cflpriv.algorithms.shared.attempts import mean_with_overall
from cflpriv.contract.handles import Held
from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.server import FederationServer
from cflpriv.federation.transport import OverBytes
from cflpriv.federation.values import from_bytes
from cflpriv.protocols.entropy import system_entropy
from cflpriv.protocols.errors import TooFewClients
from cflpriv.protocols.secagg.messages import decode_server
from cflpriv.tasks.joining import Join

SCENE = population(groups=1, clients_per_group=8)
TASK = training(SCENE)
VICTIM = 5
OTHERS = [client for client in range(8) if client != VICTIM]


def lying(mode: Any = "active", sum_: str = "secagg") -> tuple[Loopback, FederationServer]:
    """A federation whose server does not check what it asks for."""
    transport, fed = remote(SCENE, Protection(sum=sum_, min_cohort=3, secagg_clip=8.0, secagg_mode=mode))
    fed._sums._check_groups = lambda call, groups: None  # type: ignore[attr-defined]
    fed.begin_round(0)
    return transport, fed


def trained(fed: FederationServer) -> Held:
    return fed.compute(TASK, {"model": TASK.model.init(fed.round)})["update"]


def refused(fed: FederationServer, held: Held, on: list[int]) -> list[int]:
    """Who refuses a sum by the rule, where nobody else does; the sum has no result."""
    before = len(fed.refusals)
    with pytest.raises(TooFewClients):
        fed.mean(held, on=on)
    assert {word for _, _, word in fed.refusals[before:]} == {"second-sum"}
    return [client for client, _, _ in fed.refusals[before:]]


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_a_value_is_summed_with_eight_and_then_with_seven(mode: str) -> None:
    _, fed = lying(mode)
    held = trained(fed)
    (first,) = fed.mean(held)
    assert first is not None
    assert first.count == 8
    assert refused(fed, held, OTHERS) == OTHERS


def derived(fed: FederationServer, held: Held) -> Held:
    return fed.compute(Join(("copy",)), {"copy": held})["copy"]


def again(fed: FederationServer, held: Held) -> Held:
    return trained(fed)


def with_another_rate(fed: FederationServer, held: Held) -> Held:
    return fed.compute(replace(TASK, lr=TASK.lr * 0.999), {"model": TASK.model.init(0)})["update"]


def a_round_later(fed: FederationServer, held: Held) -> Held:
    fed.begin_round(1)
    return held


def derived_a_round_later(fed: FederationServer, held: Held) -> Held:
    fed.begin_round(1)
    return derived(fed, held)


def beside_a_decoy(fed: FederationServer, held: Held) -> Held:
    """The same computation, given besides what was computed in an earlier round and is used for nothing."""
    return fed.compute(TASK, {"model": TASK.model.init(0), "junk": held})["update"]


@pytest.mark.parametrize("other", [derived, again, with_another_rate, a_round_later, derived_a_round_later, beside_a_decoy])
def test_nor_anything_of_the_same_round(other: Any) -> None:
    _, fed = lying()
    held = trained(fed)
    fed.mean(held)
    assert refused(fed, other(fed, held), OTHERS) == OTHERS


def test_nor_by_a_decoy_of_an_earlier_round_in_the_first_sum() -> None:
    _, fed = lying()
    decoy = trained(fed)
    fed.begin_round(1)
    fed.mean(beside_a_decoy(fed, decoy))
    assert refused(fed, trained(fed), OTHERS) == OTHERS


def test_what_clients_trained_alone_on_is_of_its_own_rounds() -> None:
    """A value of rounds that were never summed goes into a sum, also after others."""
    _, fed = lying()
    alone = trained(fed)
    fed.begin_round(1)
    fed.mean(trained(fed))
    fed.begin_round(2)
    (mean,) = fed.mean(derived(fed, alone), on=OTHERS)
    assert mean is not None


def test_a_larger_cohort_is_refused() -> None:
    _, fed = lying()
    held = trained(fed)
    fed.mean(held, on=OTHERS)
    assert refused(fed, again(fed, held), list(range(8))) == OTHERS


@pytest.mark.parametrize("kind", ["Survivors", "Unmask"])
def test_the_value_that_is_named_does_not_change_from_stage_to_stage(kind: str) -> None:
    """Or a server would have the survivors of one value checked against the round of another."""
    transport, fed = lying()
    held = trained(fed)
    fed.mean(held)
    fed.begin_round(1)
    number = fed.known(trained(fed).key)["number"]
    honest = transport.exchange

    def exchange(requests: Any, stage: str) -> Any:
        asks = {place: m.decode_ask(data) for place, data in requests.items()}
        for place, ask in asks.items():
            if isinstance(ask, m.SumStep) and type(decode_server(ask.message)).__name__ in (kind, "Unmask"):
                requests = {**requests, place: m.encode(structs.replace(ask, held=number))}
        return honest({place: data for place, data in requests.items() if place != 1000 + VICTIM or stage != "secagg Deliver"}, stage)

    transport.exchange = exchange  # type: ignore[method-assign]
    before = len(fed.refusals)
    with pytest.raises(TooFewClients):
        fed.mean(held, on=list(range(8)))
    assert {word for _, _, word in fed.refusals[before:]} & {"second-sum", "unlisted-model"}
    assert not [message for message in fed.transcript.messages if message.kind == "secagg Reveal" and message.round == 1]


def test_the_same_clients_are_summed_again() -> None:
    """Their difference tells what two sums tell anyway."""
    _, fed = lying()
    held = trained(fed)
    (one,), (two,) = fed.mean(held), fed.mean(with_another_rate(fed, held))
    assert one is not None
    assert two is not None
    assert one.count == two.count == 8


def test_a_client_that_dropped_out_of_the_first_sum_may_join_a_later_one() -> None:
    _, fed = lying()
    held = trained(fed)
    fed.mean(held, on=OTHERS[:4])
    (mean,) = fed.mean(held, on=[*OTHERS[4:], VICTIM])
    assert mean is not None
    assert mean.count == 4


def test_a_resumed_server_is_refused_as_well() -> None:
    transport, fed = lying()
    saved = fed.saved()
    fed.mean(trained(fed))
    resumed = FederationServer(
        OverBytes(transport), protection=fed.protection, seed=1, roster=transport.roster, session=saved["session"], entropy=system_entropy
    )  # fmt: skip
    resumed.restore(saved)
    resumed._sums._check_groups = lambda call, groups: None  # type: ignore[attr-defined]
    resumed.begin_round(0)
    assert refused(resumed, trained(resumed), OTHERS) == OTHERS
    resumed.begin_round(1)
    (mean,) = resumed.mean(trained(resumed), on=OTHERS)  # the next round's values are new ones
    assert mean is not None
    assert mean.count == 7


def test_an_honest_server_says_what_an_algorithm_does_wrong() -> None:
    _, fed = remote(SCENE, Protection(sum="secagg", min_cohort=3, secagg_clip=8.0))
    fed.begin_round(0)
    held = trained(fed)
    fed.mean(held)
    with pytest.raises(InputError, match="client 0 was in a sum over 8 clients in this round, and would be in one over 7 others"):
        fed.mean(held, on=OTHERS)


@pytest.mark.parametrize("sum_", ["none", "secagg"])
@pytest.mark.parametrize("sizes", [(4, 4), (6, 2), (5, 1, 1, 1), (2, 2, 2, 2)])
def test_groups_and_everyone_by_one_sum_a_client(sum_: str, sizes: tuple[int, ...]) -> None:
    """The means are those of two sums; over everyone those count, too, whose groups are too small."""
    transport, fed = remote(SCENE, Protection(sum=sum_, min_cohort=1 if sum_ == "none" else 3, secagg_clip=8.0))
    fed.begin_round(0)
    held = trained(fed)
    truth = {client: from_bytes(transport.stores[client].get("held/1") or b"")[0]["update"] for client in range(8)}
    joined = fed.compute(Join(("update", "step")), {"update": held, "step": held})
    labels = dict(zip(range(8), np.repeat(range(len(sizes)), sizes).tolist(), strict=True))
    means, everyone = mean_with_overall(fed, joined, held, "equal", labels, len(sizes))
    smallest = fed.protection.smallest_sum
    for label, mean in enumerate(means):
        members = [client for client in labels if labels[client] == label]
        assert (mean is None) == (len(members) < smallest)
        if mean is not None:
            np.testing.assert_allclose(mean.parts["step"].value(), np.mean([truth[c] for c in members], axis=0), atol=1e-6)
    rest = sum(size for size in sizes if size < smallest)
    counted = [c for c in labels if sizes[labels[c]] >= smallest or rest >= smallest]
    assert everyone is not None
    assert everyone.count == len(counted)
    np.testing.assert_allclose(everyone.parts["update"].value(), np.mean([truth[c] for c in counted], axis=0), atol=1e-6)
    sums = [message.clients for message in fed.transcript.messages if message.kind in ("update", "secagg Masked")]
    assert sorted(client for clients in sums for client in clients) == counted  # each client is in one sum
