"""The result is the exact sum of the survivors, or TooFewClients: for every pattern of dropouts of small cohorts, and random large ones."""

import math
from collections.abc import Iterator, Mapping
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.secagg import (
    STAGES,
    Contribution,
    LocalError,
    Outcome,
    RemoteError,
    Terms,
    TooFewClients,
    fewest_survivors,
    make_terms,
    simulate,
    weight_error,
)
from cflpriv.protocols.secagg.vectors import largest_levels

from .scene import MODEL, SESSION, identities, levels, policy, roster, terms

KINDS = tuple(product((16, 32), (False, True)))


def summed(agreed: Terms, drops: Mapping[int, str], weights: Mapping[int, float]) -> Outcome:
    return simulate(
        agreed,
        {i: identities()[i] for i in agreed.cohort},
        lambda i: Contribution(grid(i, agreed, weights[i]), weights[i], is_levels=not agreed.weight_limit),
        roster=roster() if agreed.mode == "active" else None,
        drops=drops,
        entropy=public_entropy(str(sorted(drops.items()))),
    )


def grid(number: int, agreed: Terms, weight: float) -> np.ndarray[Any, Any]:
    """Values for which weight · value falls on a level exactly (levels and weights are powers of two), so nothing is rounded."""
    if not agreed.weight_limit:
        return levels(number, agreed.dimension, agreed.levels)
    step = int(agreed.weight_limit / weight)
    whole = levels(number, agreed.dimension, agreed.levels // step)
    return whole * step / agreed.levels * agreed.clip


def expected_sum(agreed: Terms, survivors: tuple[int, ...], weights: Mapping[int, float]) -> list[int]:
    """The sum in Python integers, with the coordinates of weight and clipping behind it."""
    total = [0] * agreed.dimension
    weight = 0
    for i in survivors:
        if agreed.weight_limit:
            fraction = weights[i] / agreed.weight_limit
            row = levels(i, agreed.dimension, int(agreed.levels * fraction))
            weight += int(agreed.levels * fraction)
        else:
            row = levels(i, agreed.dimension, agreed.levels)
        total = [a + int(b) for a, b in zip(total, row, strict=True)]
    return [*total, *([weight] if agreed.weight_limit else []), 0]


def check(agreed: Terms, drops: Mapping[int, str]) -> bool:
    """Runs one pattern; returns whether there was a sum. In a complete graph, there is one exactly when the thresholds are met."""
    n = len(agreed.cohort)
    weights = {i: max((1.0, 2.0, 4.0)[i % 3], agreed.least_weight) for i in agreed.cohort}
    order: dict[str | None, int] = {None: len(STAGES), **{stage: place for place, stage in enumerate(STAGES)}}
    sends = {stage: [i for i in agreed.cohort if order[drops.get(i)] > order[stage]] for stage in STAGES}
    enough = (
        n >= fewest_survivors(agreed)
        and len(sends["Masked"]) >= fewest_survivors(agreed)
        and (agreed.mode == "passive" or len(sends["Consistent"]) >= agreed.threshold)
        and len(sends["Reveal"]) >= agreed.threshold
    )
    try:
        outcome = summed(agreed, drops, weights)
    except TooFewClients:
        assert not enough or agreed.degree < n - 1
        return False
    assert enough
    assert outcome.sum.survivors == tuple(sends["Masked"])
    assert outcome.sum.levels.tolist() == expected_sum(agreed, outcome.sum.survivors, weights)
    return True


def patterns(n: int, mode: str) -> Iterator[dict[int, str]]:
    """Every pattern of dropouts over the stages up to relabelling; who is who is turned, so that the order of numbers varies too."""
    stages = [stage for stage in STAGES if mode == "active" or stage != "Consistent"]
    for turn, pattern in enumerate(combinations_with_replacement([None, *stages], n)):
        yield {(i * 5 + turn) % n if n == 6 else (i + turn) % n: stage for i, stage in enumerate(pattern) if stage}


def agreement(n: int, mode: str, bits: int, weighted: bool, **changes: Any) -> Terms:
    given = {"levels": 1 << (10 if bits == 16 else 20), "bits": bits, "dimension": 5, **changes}
    if not weighted:
        return terms(n, mode, **given)
    least = terms(n, mode, **{**given, "levels": 1 << 20, "bits": 32}, weight_limit=4.0).least_weight
    return terms(n, mode, **given, weight_limit=4.0, least_weight=2.0 ** math.ceil(math.log2(least)))


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(("bits", "weighted"), KINDS)
def test_every_dropout_pattern_of_up_to_four_clients(mode: str, n: int, bits: int, weighted: bool) -> None:
    sums = [check(agreement(n, mode, bits, weighted), drops) for drops in patterns(n, mode)]
    assert any(sums)
    assert not all(sums)


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize(("bits", "weighted"), KINDS)
def test_there_are_no_terms_for_one_client(mode: str, bits: int, weighted: bool) -> None:
    with pytest.raises(TooFewClients, match="minimum cohort size of 2 clients"):
        agreement(1, mode, bits, weighted)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("n", [5, pytest.param(6, marks=pytest.mark.slow)])
def test_every_dropout_pattern_of_five_and_six_clients(mode: str, n: int) -> None:
    # The four kinds of arithmetic take turns here; the slow test below tries all of them on all patterns.
    sums = [check(agreement(n, mode, *KINDS[turn % 4]), drops) for turn, drops in enumerate(patterns(n, mode))]
    assert any(sums)
    assert not all(sums)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize(("bits", "weighted"), KINDS)
@pytest.mark.parametrize("n", [5, 6])
def test_every_dropout_pattern_in_every_arithmetic(mode: str, bits: int, weighted: bool, n: int) -> None:
    for drops in patterns(n, mode):
        check(agreement(n, mode, bits, weighted), drops)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_cohorts(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 32))
    mode = data.draw(st.sampled_from(["active", "passive"]))
    stages = st.sampled_from([stage for stage in STAGES if mode == "active" or stage != "Consistent"])
    drops = data.draw(st.dictionaries(st.integers(0, n - 1), stages, max_size=n // 2))
    check(agreement(n, mode, *data.draw(st.sampled_from(KINDS)), min_cohort=data.draw(st.integers(2, min(5, n)))), drops)


@settings(max_examples=4, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_random_large_cohorts_on_the_sparse_graph(data: st.DataObject) -> None:
    n = data.draw(st.integers(33, 200))
    stages = st.sampled_from([stage for stage in STAGES if stage != "Consistent"])
    drops = data.draw(st.dictionaries(st.integers(0, n - 1), stages, max_size=n // 10))
    agreed = agreement(n, "passive", *data.draw(st.sampled_from(KINDS)))
    assert agreed.degree < n - 1
    more = data.draw(st.dictionaries(st.integers(0, n - 1), stages, max_size=n // 2))
    check(agreed, {**drops, **more})
    # The graph is made for 10 % dropouts: failing here has probability below 2^-30.
    assert check(agreed, drops)


@pytest.mark.parametrize("bits", [16, 32])
def test_the_largest_sum_that_the_overflow_proof_allows_is_exact(bits: int) -> None:
    agreed = terms(7, "passive", bits=bits)
    assert 7 * agreed.levels <= 2 ** (bits - 1) - 1 < 7 * (agreed.levels + 1)
    outcome = summed(agreed, {}, dict.fromkeys(range(7), 1.0))
    assert outcome.sum.levels[:2].tolist() == [7 * agreed.levels, -7 * agreed.levels]


@pytest.mark.parametrize("bits", [16, 32])
def test_terms_that_could_overflow_are_refused_before_anything_is_sent(bits: int) -> None:
    with pytest.raises(ValueError, match="levels"):
        terms(7, "passive", bits=bits, levels=(2 ** (bits - 1) - 1) // 7 + 1)


def test_weighted_mean_clipping_and_its_count() -> None:
    agreed = terms(6, "active", weight_limit=50.0, dimension=400)
    assert 0 < agreed.least_weight < 10.0  # 5 of 6 survive: client 0 counts as the least weight
    generator = np.random.default_rng(0)
    values = {i: generator.uniform(-0.9, 0.9, 400) for i in range(6)}
    values[2][:7] = 1.5
    weights = {i: 10.0 * i for i in range(6)}
    outcome = simulate(
        agreed,
        {i: identities()[i] for i in range(6)},
        lambda i: Contribution(values[i].astype(np.float32), weights[i]),
        roster=roster(),
        drops={5: "Masked"},
    )
    assert outcome.clipped == {0: 0, 1: 0, 2: 7, 3: 0, 4: 0}
    assert outcome.sum.clipped_clients == 1
    step, counted = 50.0 / agreed.levels, [max(weights[i], agreed.least_weight) for i in range(5)]
    assert abs(outcome.sum.weight() - sum(counted)) <= 5 * step
    expected = sum(counted[i] * np.clip(values[i], -1, 1) for i in range(5)) / sum(counted)
    # Five roundings of at most one level in numerator and denominator each; the rest is float32 input.
    np.testing.assert_allclose(outcome.sum.mean(), expected, atol=10 * step / 100.0 + 1e-7)


def test_without_weights_of_their_own_all_count_as_the_least() -> None:
    agreed = terms(9, "passive", weight_limit=1.0)
    assert agreed.least_weight < 1
    outcome = simulate(agreed, {i: identities()[i] for i in range(9)}, lambda i: Contribution(np.full(10, 0.25 * (i % 2)), 0.0))
    assert outcome.sum.weight() == pytest.approx(9 * agreed.least_weight, abs=1e-6)
    np.testing.assert_allclose(outcome.sum.mean(), 1 / 9, atol=1e-6)


def test_blocks_to_which_nobody_contributes_have_no_mean() -> None:
    agreed = terms(3, "passive", weight_limit=1.0, blocks=((0, 3),))
    outcome = simulate(agreed, {i: identities()[i] for i in range(3)}, lambda i: [])
    assert outcome.sum.weight(0) == 0
    with pytest.raises(ValueError, match="mean"):
        outcome.sum.mean(0)


def test_keys_advertised_with_the_upload_save_the_first_stage() -> None:
    kinds: list[str] = []
    first = simulate(
        terms(5, "active", following=(6, 0)),
        {i: identities()[i] for i in range(5)},
        lambda i: Contribution(levels(i, 10, 1000), is_levels=True),
        roster=roster(),
        drops={4: "Reveal"},
    )
    assert set(first.mask_keys) == set(first.adverts) == set(range(5))
    agreed = terms(6, "active", slot=(6, 0))
    second = simulate(
        agreed,
        {i: identities()[i] for i in range(6)},
        lambda i: Contribution(levels(i, 10, 1000), is_levels=True),
        roster=roster(),
        mask_keys=first.mask_keys,
        adverts=first.adverts,
        record=lambda direction, client, kind, data: kinds.append(f"{kind} {client}"),
    )
    assert [kind for kind in kinds if kind.startswith(("Invite", "Advert "))] == ["Invite 5", "Advert 5"]
    assert second.sum.block().tolist() == np.sum([levels(i, 10, 1000) for i in range(6)], axis=0).tolist()


def test_the_minimum_cohort_size_is_enforced_by_client_and_server() -> None:
    with pytest.raises(TooFewClients):
        summed(terms(2, "passive", min_cohort=3), {}, dict.fromkeys(range(2), 1.0))
    with pytest.raises(TooFewClients):
        summed(terms(5, "passive", min_cohort=4), {0: "Masked", 1: "Masked"}, dict.fromkeys(range(5), 1.0))
    with pytest.raises(RemoteError, match="minimum-too-low"):
        simulate(
            terms(5, "passive", min_cohort=2),
            {i: identities()[i] for i in range(5)},
            lambda i: Contribution(levels(i, 10, 1000), is_levels=True),
            policy=lambda i: policy(terms(5, "passive", min_cohort=3)),
        )
    with pytest.raises(ValueError, match="min_cohort"):
        make_terms(session=SESSION, slot=(0, 0), cohort=range(3), models=[MODEL], dimension=1, clip=1.0, min_cohort=1)


def test_unknown_dropout_stage() -> None:
    with pytest.raises(ValueError, match="'Mask'"):
        summed(terms(3, "passive"), {0: "Mask"}, {})


# --- rounding is bounded before a sum


@pytest.mark.parametrize(("limit", "error"), [(1e8, 0.23), (1e9, 2.3)])
def test_weights_that_the_quantiser_cannot_hold_are_refused(limit: float, error: float) -> None:
    """A weight of 1 under these limits is a few levels or none, so that its client's values are lost in rounding."""
    with pytest.raises(
        ValueError, match=rf"least_weight: rounding may change the value of a client that weighs 1 by {error:g} of the clip"
    ):
        terms(5, "passive", weight_limit=limit, least_weight=1.0)
    made = terms(5, "passive", weight_limit=limit)
    assert weight_error(made) <= 1 / 64
    assert weight_error(terms(5, "passive")) == 1 / largest_levels(5, 32)


def test_values_that_are_lost_in_rounding_are_refused_by_their_client() -> None:
    agreed = terms(5, "passive", clip=1e3, dimension=100)
    values = np.random.default_rng(0).normal(0, 1e-6, (5, 100))

    def run(**changes: Any) -> Outcome:
        return simulate(
            agreed, {i: identities()[i] for i in range(5)}, lambda i: Contribution(values[i]), policy=lambda i: policy(agreed, **changes)
        )

    with pytest.raises(LocalError, match=r"too-coarse \(rounding to steps of 2\.33e-06 would change the values by \d+% of their length"):
        run()
    total = run(most_error=math.inf).sum
    exact = values.sum(axis=0)
    error = np.linalg.norm(total.total() - exact) / np.linalg.norm(exact)
    assert error > 0.5
    assert total.rounding() > 0.1
    with pytest.raises(ValueError, match="most_error: expected a number above 0"):
        run(most_error=0.0)


def test_ordinary_values_are_not_refused() -> None:
    """Fifty sums of values as federations have them: updates of 1e-4 to 1 under a clip of 1 to 100, zeros among them."""
    generator = np.random.default_rng(1)
    for trial in range(50):
        clip, size = 10.0 ** generator.uniform(0, 2), 10.0 ** generator.uniform(-4, 0)
        agreed = terms(3, "passive", clip=clip, bits=32)
        rows = generator.normal(0, size, (3, 10)) * (generator.random((3, 10)) < 0.7)
        rows[0] = 0.0 if trial % 5 == 0 else rows[0]
        outcome = simulate(agreed, {i: identities()[i] for i in range(3)}, lambda i, rows=rows: Contribution(rows[i]))  # type: ignore[misc]
        np.testing.assert_allclose(outcome.sum.total(), np.clip(rows, -clip, clip).sum(axis=0), atol=3 * clip / agreed.levels)
