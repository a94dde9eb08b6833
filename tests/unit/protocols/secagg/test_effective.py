"""The effective number of clients: the bound against brute force, and every weighted sum that clients let be opened."""

import math
from collections.abc import Mapping
from fractions import Fraction
from itertools import combinations_with_replacement

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import RemoteError
from cflpriv.protocols.secagg import (
    STAGES,
    Contribution,
    Policy,
    Terms,
    TooFewClients,
    block_terms,
    count_terms,
    fewest_contributors,
    fewest_survivors,
    retaken,
    simulate,
    simulate_oblivious,
)
from cflpriv.protocols.secagg.effective import FEWEST_LEVELS, effective_number, largest_ratio, reaches, smallest_least_weight
from cflpriv.protocols.secagg.policy import check_proposal

from .scene import MODEL, SESSION, identities, policy, roster, terms


def effective(weights: list[int]) -> Fraction:
    """(Σ w)² / Σ w² in whole numbers."""
    return Fraction(sum(weights) ** 2, sum(weight**2 for weight in weights))


@pytest.mark.parametrize("ratio", [1, 2, 3, 7, 10, 40])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_the_minimum_is_that_of_all_weights_on_a_grid(n: int, ratio: int) -> None:
    """Weights in whole steps from 1 to the ratio (at most 10 different ones); the ends are among them."""
    steps = sorted({round(value) for value in np.linspace(1, ratio, min(ratio, 10))})
    lowest = min(effective(list(weights)) for weights in combinations_with_replacement(steps, n))
    assert effective_number(n, float(ratio), 1.0) == lowest


@given(st.integers(1, 30), st.integers(1, 1000), st.data())
@settings(max_examples=300, deadline=None)
def test_no_weights_within_the_limits_fall_below_the_minimum(n: int, ratio: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(10, 10 * ratio), min_size=n, max_size=n))
    assert effective(weights) >= effective_number(n, 10.0 * ratio, 10.0)


@given(st.integers(1, 3000), st.floats(1.0, 1e6))
@settings(max_examples=300, deadline=None)
def test_the_kantorovich_bound_is_below_the_minimum_and_near_it(n: int, ratio: float) -> None:
    exact, r = effective_number(n, ratio, 1.0), Fraction(ratio)
    bound = n * 4 * r / (1 + r) ** 2
    assert exact >= bound
    assert exact >= 1
    if n % 2 == 0 and ratio == 1.0:
        assert exact == n
    assert effective_number(n + 1, ratio, 1.0) >= exact, "one client more never lowers the minimum"


def test_where_the_number_of_heavy_clients_is_whole_the_bound_is_the_minimum() -> None:
    for n, ratio in ((4, 3), (12, 2), (12, 5), (30, 9)):
        assert effective_number(n, float(ratio), 1.0) == Fraction(n * 4 * ratio, (1 + ratio) ** 2)


@given(st.integers(2, 400), st.integers(2, 400), st.floats(0.1, 1e9), st.sampled_from([1.0, 1.5, 3.0]))
@settings(max_examples=200, deadline=None)
def test_the_least_weight_is_the_smallest_that_will_do(clients: int, needed: int, limit: float, spread: float) -> None:
    if not reaches(clients, needed, limit, limit, spread):
        with pytest.raises(ValueError, match="spread"):
            smallest_least_weight(clients, needed, limit, spread)
        return
    least = smallest_least_weight(clients, needed, limit, spread)
    assert reaches(clients, needed, limit, least, spread)
    assert not reaches(clients, needed, limit, least * (1 - 1e-9), spread)
    assert limit / least * spread >= largest_ratio(clients, needed) * (1 - 1e-9)


def test_the_largest_ratio_holds_and_is_one_without_clients_to_spare() -> None:
    assert largest_ratio(3, 3) == largest_ratio(2, 3) == 1.0
    for clients, needed in ((4, 3), (6, 3), (67, 3), (1000, 100)):
        ratio = largest_ratio(clients, needed)
        assert reaches(clients, needed, ratio * (1 - 1e-12), 1.0)
        assert not reaches(clients, needed, ratio * (1 + 1e-9), 1.0)
        assert ratio >= (2 * clients - needed + 2 * math.sqrt(clients * (clients - needed))) / needed * (1 - 1e-12), "by Kantorovich"
    assert effective_number(10, 1.0, 1.0, math.inf) == 1


# --- terms


def weighted(n: int, mode: str, min_cohort: int = 3, **changes: object) -> Terms:
    return terms(n, mode, weight_limit=100.0, min_cohort=min_cohort, **changes)


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("n", [3, 4, 8, 32, 33, 150])
def test_terms_have_a_least_weight_for_their_fewest_survivors(mode: str, n: int) -> None:
    agreed = weighted(n, mode)
    assert reaches(fewest_survivors(agreed), 3, 100.0, agreed.least_weight)
    assert (agreed.least_weight == 100.0) == (n <= 4)  # where 3 may be left
    if n > 4:
        assert fewest_survivors(agreed) > n / 2
        assert not reaches(fewest_survivors(agreed), 3, 100.0, agreed.least_weight * 0.999)
    check_proposal(agreed, policy(agreed), 0, None, roster())


def test_a_weight_has_so_many_levels_that_rounding_changes_it_little() -> None:
    agreed = weighted(150, "passive", bits=16)
    assert agreed.least_weight / 100.0 * agreed.levels >= FEWEST_LEVELS
    assert weighted(1000, "passive", bits=16).least_weight == 100.0, "there are 32 levels in all"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"least_weight": 10.0}, "too-unequal"), ({"least_weight": 0.0}, "bad-terms"), ({"least_weight": -1.0}, "bad-terms"),
        ({"least_weight": 101.0}, "bad-terms"), ({"least_weight": float("nan")}, "bad-terms"), ({"weight_limit": 200.0}, "bad-terms"),
        ({"weight_limit": 0.0}, "bad-terms"), ({"weight_limit": 0.0, "least_weight": -0.0}, "bad-terms"),
        ({"weight_limit": 0.0, "least_weight": 0.0}, ""), ({"least_weight": 100.0}, ""),
    ],
)  # fmt: skip
def test_a_client_refuses_terms_under_which_one_client_could_be_nearly_all(changes: Mapping[str, float], code: str) -> None:
    agreed = weighted(5, "passive")
    lying = msgspec.structs.replace(agreed, **changes)
    if not code:
        check_proposal(lying, policy(agreed), 0, None, None)
        return
    with pytest.raises(RemoteError) as caught:
        check_proposal(lying, policy(agreed), 0, None, None)
    assert caught.value.code == code


def test_a_client_without_a_limit_of_its_own_lets_all_weigh_equally_only() -> None:
    agreed = weighted(8, "passive")
    with pytest.raises(RemoteError, match="bad-terms"):
        check_proposal(agreed, policy(agreed, max_weight=0.0), 0, None, None)
    check_proposal(msgspec.structs.replace(agreed, least_weight=100.0), policy(agreed, max_weight=0.0), 0, None, None)


@pytest.mark.parametrize(("spread", "accepted"), [(1.0, True), (5.8, True), (6.0, False), (math.inf, False)])
def test_weights_inside_a_value_count(spread: float, accepted: bool) -> None:
    agreed = terms(8, "active", min_cohort=3)
    assert fewest_survivors(agreed) == 6
    if accepted:
        check_proposal(agreed, policy(agreed, spread=spread), 0, None, roster())
    else:
        with pytest.raises(RemoteError, match="too-unequal"):
            check_proposal(agreed, policy(agreed, spread=spread), 0, None, roster())
        with pytest.raises(ValueError, match=r"spread: .* at most 5\.8"):
            terms(8, "active", min_cohort=3, spread=spread)


def test_weights_and_weights_inside_a_value_multiply() -> None:
    agreed = weighted(8, "active", spread=2.0)
    assert agreed.least_weight == pytest.approx(2 * weighted(8, "active").least_weight, rel=1e-6)
    check_proposal(agreed, policy(agreed, spread=2.0), 0, None, roster())
    with pytest.raises(RemoteError, match="too-unequal"):
        check_proposal(agreed, policy(agreed, spread=2.1), 0, None, roster())


def test_a_sum_taken_again_with_fewer_clients_has_a_larger_least_weight() -> None:
    agreed = weighted(8, "active")
    again = retaken(agreed, (7, 6))
    assert again.fixed == agreed.fixed
    assert again.least_weight > agreed.least_weight
    check_proposal(again, policy(agreed), 0, None, roster())
    equal = terms(8, "active", weight_limit=1.0, least_weight=1.0, blocks=((0, 8),))
    assert retaken(equal, (7,)).least_weight == 1.0


@pytest.mark.parametrize(
    "field", [{"max_weight": -1.0}, {"max_weight": math.inf}, {"spread": 0.5}, {"spread": math.nan}, {"names": (b"",)}]
)
def test_a_policy_that_nothing_can_meet_names_its_field(field: Mapping[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        Policy(SESSION, "passive", MODEL, **field)  # type: ignore[arg-type]


# --- sums


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_the_effective_number_of_a_sum_is_never_below_the_minimum(data: st.DataObject) -> None:
    """Random weights, dropouts and modes. Levels are whole numbers, and so is what is checked."""
    n, mode = data.draw(st.integers(2, 12)), data.draw(st.sampled_from(["active", "passive"]))
    smallest, bits = data.draw(st.integers(2, min(4, n))), data.draw(st.sampled_from([16, 32]))
    agreed = terms(n, mode, min_cohort=smallest, weight_limit=1000.0, bits=bits, dimension=2)
    weights = [data.draw(st.one_of(st.integers(0, 1000), st.sampled_from([0, 1, 999, 1000]))) for _ in range(n)]
    stages = st.sampled_from([stage for stage in STAGES if mode == "active" or stage != "Consistent"])
    drops = data.draw(st.dictionaries(st.integers(0, n - 1), stages, max_size=n // 3))
    values = np.eye(n)  # which client counts how much shows in the sum itself
    try:
        outcome = simulate(
            msgspec.structs.replace(agreed, dimension=n), {i: identities()[i] for i in range(n)},
            lambda i: Contribution(values[i], float(weights[i])), roster=roster() if mode == "active" else None, drops=drops,
            entropy=public_entropy("effective"), policy=lambda i: policy(agreed, dimension=n),
        )  # fmt: skip
    except TooFewClients:
        return
    counted = [int(level) for level in outcome.sum.block() if level]
    assert len(counted) == len(outcome.sum.survivors)
    rounding = Fraction(1) - Fraction(4, FEWEST_LEVELS if agreed.levels >= FEWEST_LEVELS else agreed.levels)
    assert effective(counted) >= smallest * rounding
    exact = [max(Fraction(weights[i]), Fraction(agreed.least_weight)) for i in outcome.sum.survivors]
    assert sum(exact) ** 2 >= smallest * sum(weight**2 for weight in exact)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_nor_is_that_of_an_open_block(data: st.DataObject) -> None:
    n = data.draw(st.integers(4, 14))
    clusters = {i: data.draw(st.integers(0, 1)) for i in range(n)}
    weights = {i: float(data.draw(st.integers(1, 100))) for i in range(n)}
    counts = count_terms(session=SESSION, slot=(5, 0), cohort=range(n), models=[MODEL], clusters=2)
    drops = data.draw(st.dictionaries(st.integers(0, n - 1), st.sampled_from(["Shares", "Masked"]), max_size=2))
    try:
        outcome = simulate_oblivious(
            counts, {i: identities()[i] for i in range(n)}, lambda i: (clusters[i],),
            lambda i: [Contribution(np.eye(n)[i], weights[i], clusters[i])], slot=(5, 1), dimension=n, clip=1.0, weight_limit=100.0,
            least_weight=None, drops=({}, drops),
        )  # fmt: skip
    except TooFewClients:
        return
    agreed = outcome.second.sum.terms
    for cluster in outcome.means:
        counted = [int(level) for level in outcome.second.sum.block(cluster) if level]
        assert len(counted) >= fewest_contributors(agreed) >= 3
        exact = [max(Fraction(weights[i]), Fraction(agreed.least_weight)) for i in outcome.second.sum.survivors if clusters[i] == cluster]
        if agreed.least_weight == agreed.weight_limit:
            exact = [Fraction(1)] * len(exact)
        assert sum(exact) ** 2 >= 3 * sum(weight**2 for weight in exact)


def test_blocks_weigh_equally_unless_dropouts_leave_clients_to_spare() -> None:
    counted = simulate(
        count_terms(session=SESSION, slot=(5, 0), cohort=range(12), models=[MODEL], clusters=1),
        {i: identities()[i] for i in range(12)}, lambda i: Contribution(np.ones(1, np.int32), is_levels=True),
    ).sum  # fmt: skip
    given_terms = {"slot": (5, 1), "models": [MODEL], "dimension": 2, "clip": 1.0}
    equal = block_terms(counted, **given_terms)  # type: ignore[arg-type]
    assert (equal.weight_limit, equal.least_weight) == (1.0, 1.0)
    apart = block_terms(counted, **given_terms, weight_limit=50.0, least_weight=None)  # type: ignore[arg-type]
    assert apart.least_weight < 50.0
    assert reaches(fewest_contributors(apart), 3, 50.0, apart.least_weight)
