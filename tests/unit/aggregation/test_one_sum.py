"""One sum for each value, as deployed and simulated clients enforce it: a server that lies asks for a second one under other settings.

The difference of two such sums over the same clients would show single values. `test_summed_once` has sums over other clients.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from agreements import contract_of
from loopback import remote
from scenes import eye, federation, population, sums_of, training

from cflpriv.contract.handles import Held, HeldKey
from cflpriv.contract.operations import Sampling
from cflpriv.contract.protection import Protection
from cflpriv.contract.schedule import request
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.server import FederationServer
from cflpriv.federation.values import UNTRACED
from cflpriv.protocols.errors import TooFewClients
from cflpriv.tasks.joining import Join

SCENE = population(groups=1, clients_per_group=11)
TASK = training(SCENE)
BASE: dict[str, Any] = {"sum": "secagg", "min_cohort": 3, "secagg_clip": 8.0, "max_weight": 60.0}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "active": ({}, {}), "passive": ({"secagg_mode": "passive"}, {}), "buckets": ({"robust": "trimmed_mean", "max_weight": 0.0}, {}),
    "fixed cohorts": ({}, {"sampling": Sampling("fixed_cohorts", 0.5)}), "oblivious": ({"sum": "secagg-oblivious"}, {}),
}  # fmt: skip
"""By name what is set in `[protection]`, and the server's options."""
CHANGES: dict[str, dict[str, Any]] = {
    "another clip": {"clip": 4.0}, "a clip next to it": {"clip": float(np.nextafter(8.0, 9.0))}, "other levels": {"levels": 1 << 20},
    "other bits": {"bits": 16, "levels": 1 << 10}, "another limit": {"weight_limit": 2.0, "least_weight": 2.0},
}  # fmt: skip


def begun(carrier: str, way: str = "active", **more: Any) -> tuple[FederationServer, list[int]]:
    """A server that does not check what it asks for, and the clients of a round."""
    changes, options = WAYS[way]
    protection = Protection(**{**BASE, **changes, **more})
    if carrier == "bytes":
        fed = remote(SCENE, protection, **options)[1]
    else:
        fed = federation(SCENE, protection, seed=1, release_policy="strict", on_error="refuse", **options)
    inner = sums_of(fed) if protection.robust == "none" else sums_of(fed)._sums
    inner._check_groups = lambda call, groups: None
    fed.begin_round(0)
    return fed, list(fed.cohort())


def lying(fed: FederationServer, changes: Mapping[str, Any]) -> None:
    """From here on terms have these fields."""
    outer = sums_of(fed)
    sums = (outer if fed.protection.robust == "none" else outer._sums)._sums
    for name in ("terms", "blocks"):
        honest = getattr(type(sums), name)
        changed = lambda *given, honest=honest, **named: msgspec.structs.replace(honest(sums, *given, **named), **changes)  # noqa: E731
        setattr(sums, name, changed)


def updates_of(fed: FederationServer, on: list[int]) -> Held:
    return fed.compute(TASK, {"model": TASK.model.init(fed.round)}, on=on)["update"]


def refused(fed: FederationServer, held: Held, on: list[int], weights: Any = "equal") -> set[str]:
    before = len(fed.refusals)
    with pytest.raises(TooFewClients):
        fed.mean(held, weights, on=on)
    return {code for _, _, code in fed.refusals[before:]}


@pytest.mark.parametrize("carrier", ["bytes", pytest.param("memory", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_second_sum_has_the_settings_of_the_first(change: str, way: str, carrier: str) -> None:
    fed, cohort = begun(carrier, way)
    held = updates_of(fed, cohort)
    (first,) = fed.mean(held, on=cohort)
    assert first is not None
    lying(fed, CHANGES[change])
    assert refused(fed, held, cohort) == {"second-sum"}
    fed.begin_round(1)
    (mean,) = fed.mean(updates_of(fed, cohort), on=cohort)  # a new round's value goes into a first sum
    assert mean is not None


@pytest.mark.parametrize("carrier", ["bytes", "memory"])
@pytest.mark.parametrize("way", ["active", "passive", "fixed cohorts", "oblivious"])
@pytest.mark.parametrize("first", ["equal", "examples"])
def test_a_value_is_summed_with_one_kind_of_weights(first: Literal["equal", "examples"], way: str, carrier: str) -> None:
    fed, cohort = begun(carrier, way)
    held = updates_of(fed, cohort)
    fed.mean(held, first, on=cohort)
    sums_of(fed)._taken = {}
    second = "examples" if first == "equal" else "equal"
    if way == "oblivious" and sums_of(fed)._least == 60.0:
        pytest.fail("weights do not differ, so nothing is tested")
    assert refused(fed, held, cohort, second) == {"second-sum"}


@pytest.mark.parametrize("way", ["active", "passive", "oblivious"])
@pytest.mark.parametrize("contracted", [True, False])
@pytest.mark.parametrize("changed", ["clip", "weights", "nothing"])
def test_under_a_contract_all_rounds_clip_and_weigh_alike(changed: str, contracted: bool, way: str) -> None:
    protection = Protection(**{**BASE, **WAYS[way][0]})
    agreed = contract_of(None, request(TASK, {"update": "sum"}), protection=protection)
    options: dict[str, Any] = {"contract": agreed} if contracted else {}
    fed = federation(SCENE, protection, seed=1, release_policy="strict", on_error="refuse", **options)
    for number in range(2):
        fed.begin_round(number)
        held = updates_of(fed, list(fed.cohort()))
        if number and changed == "clip":
            lying(fed, {"clip": 4.0})
        if number and changed != "nothing" and contracted:
            code = "bad-terms" if changed == "clip" else "not-agreed"
            assert refused(fed, held, list(held.clients), "examples" if changed == "weights" else "equal") == {code}
        else:
            (mean,) = fed.mean(held, "examples" if number and changed == "weights" else "equal")
            assert mean is not None


@pytest.mark.parametrize("at_first", ["alone", "with another part"])
def test_a_part_is_weighed_in_one_way_whatever_is_summed_with_it(at_first: str) -> None:
    protection = Protection(**BASE)
    fed = federation(
        SCENE, protection, seed=1, release_policy="strict", on_error="refuse",
        contract=contract_of(None, request(TASK, {"update": "sum", "count": "sum"}), protection=protection),
    )  # fmt: skip
    for number in range(2):
        fed.begin_round(number)
        held = fed.compute(TASK, {"model": TASK.model.init(number)})
        parts = held["update"] if (at_first == "alone") == (number == 0) else held["update", "count"]
        if number == 0:
            fed.mean(parts, "equal")
        else:
            assert refused(fed, parts, list(held.clients), "examples") == {"not-agreed"}


def joined(fed: FederationServer, held: Held) -> Held:
    return fed.compute(Join(("update", "count")), {"update": held, "count": held}, on=held.clients)["update", "count"]


def renamed(fed: FederationServer, held: Held) -> Held:
    return fed.compute(Join(("copy",)), {"copy": held}, on=held.clients)["copy"]


def again(fed: FederationServer, held: Held) -> Held:
    return updates_of(fed, list(held.clients))


def more_slowly(fed: FederationServer, held: Held) -> Held:
    return fed.compute(replace(TASK, lr=TASK.lr * 0.999), {"model": TASK.model.init(0)}, on=held.clients)["update"]


def added_up(fed: FederationServer, held: Held) -> Held:
    """A copy that clients make when they add up their own parts."""
    number = 1 << 30
    own = m.OwnPart(int(fed.known(held.key)["number"]), held.part, 1.0)
    fed._ask(dict.fromkeys(held.clients, m.AddUp(fed.session, number, (own,))), "add up")
    key, known = HeldKey("copy"), fed.known(held.key)
    layout = [["own", *rest] for name, *rest in known["layout"] if name == held.part]
    fed.know(key, {**known, "number": number, "layout": layout, "models": [[client, UNTRACED.hex()] for client in held.clients]})
    return Held(key, held.clients, ("own",))


@pytest.mark.parametrize("carrier", ["bytes", "memory"])
@pytest.mark.parametrize("other", [joined, renamed, again, more_slowly, added_up])
@pytest.mark.parametrize("change", ["another clip", "other clients"])
def test_so_does_everything_of_the_same_round(change: str, other: Any, carrier: str) -> None:
    fed, cohort = begun(carrier, "passive")  # where clients sum also what can be traced to nothing
    held = updates_of(fed, cohort)
    fed.mean(held, on=cohort)
    following = other(fed, held)
    if change == "another clip":
        (mean,) = fed.mean(other(fed, held), on=cohort)
        assert mean is not None, "the same settings show what the first sum showed"
        lying(fed, CHANGES[change])
    assert refused(fed, following, cohort if change == "another clip" else cohort[1:]) == {"second-sum"}


def test_overlapping_parts_are_of_one_value() -> None:
    fed, cohort = begun("memory")
    held = joined(fed, updates_of(fed, cohort))
    fed.mean(held["update"], on=cohort)
    assert refused(fed, held, cohort[:-1]) == {"second-sum"}
    assert refused(fed, held["count"], cohort[:-1]) == {"second-sum"}


def test_noise_that_a_client_does_not_demand_is_a_form_of_its_value() -> None:
    """Or a server could have the value clipped to one norm after the other, with next to no noise."""
    fed, cohort = begun("bytes")
    held = updates_of(fed, cohort)
    sums = sums_of(fed)
    honest = sums._like

    def clipped(norm: float) -> None:
        shares = m.NoiseShares(1e-9, 2, norm)
        sums._like = lambda asked, kind, groups, noise=None: honest(asked, kind, groups, shares)

    clipped(1.0)
    (mean,) = fed.mean(held, on=cohort)
    assert mean is not None
    clipped(2.0)
    assert refused(fed, held, cohort) == {"second-sum"}
    clipped(1.0)
    assert fed.mean(held, on=cohort)[0] is not None


@pytest.mark.parametrize("carrier", ["bytes", "memory"])
@pytest.mark.parametrize("way", ["active", "passive", "oblivious"])
def test_with_cohort_change_two_rounds_differ_by_nobody_or_by_the_minimum(way: str, carrier: str) -> None:
    fed, cohort = begun(carrier, way, cohort_change="min_cohort")
    fed.mean(updates_of(fed, cohort), on=cohort)
    for left_out, accepted in ((1, False), (2, False), (3, True), (3, True), (4, False), (0, True), (0, True)):
        fed.begin_round(fed.round + 1)
        on = cohort[left_out:]
        held = updates_of(fed, on)
        if accepted:
            assert fed.mean(held, on=on)[0] is not None
        else:
            assert refused(fed, held, on) == {"cohort-change"}


@pytest.mark.parametrize("weights", ["equal", "examples"])
@pytest.mark.parametrize("mode", ["active", "passive"])
def test_after_a_dropout_a_second_value_of_the_round_is_summed_over_those_left(mode: str, weights: Any) -> None:
    """With the quantiser and the least weight of the first sum, which an honest server keeps."""
    transport, fed = remote(SCENE, Protection(**{**BASE, "secagg_mode": mode}))
    fed.begin_round(0)
    held = updates_of(fed, list(range(11)))
    transport.kill_at = {"secagg Deliver": {2}}
    (first,) = fed.mean(held, weights)
    assert first is not None
    assert first.count == 10
    left = [client for client in range(11) if client != 2]
    (second,) = fed.mean(held, weights, on=left)
    assert second is not None
    np.testing.assert_allclose(second.parts["update"].value(), first.parts["update"].value(), atol=1e-6)
    with pytest.raises(InputError, match="others: the difference"):
        fed.mean(held, weights, on=left[1:])


def test_a_client_restored_from_a_checkpoint_remembers_its_sums() -> None:
    """Its store then holds bytes, of which each request makes new objects."""
    fed, cohort = begun("memory")
    fed.mean(updates_of(fed, cohort), on=cohort)
    for client in cohort:
        store: Any = eye(fed).client(client)._store
        for name in store.names():
            store.put(name, store.dumped(name))
    earlier = updates_of(fed, cohort)
    fed.begin_round(1)
    held = updates_of(fed, cohort)
    fed.mean(held, on=cohort)
    for value in (held, earlier):
        assert refused(fed, value, cohort[1:]) == {"second-sum"}
