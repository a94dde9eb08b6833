"""Public weights: a group whose weights make it in effect smaller than the minimum cohort size gets no mean."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.contract.calls import ClientContribution, SumCall, TooUnequal, large_enough
from cflpriv.errors import InputError
from cflpriv.protocols.errors import TooFewClients


def call(weights: list[float], min_cohort: int, public: bool = True) -> SumCall:
    members = tuple(ClientContribution(client, {}, weight, (0,)) for client, weight in enumerate(weights))
    return SumCall(0, 1, members, 1, min_cohort, public)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.integers(1, 5))
def test_the_effective_number_decides_about_public_weights(weights: list[int], min_cohort: int) -> None:
    effective = Fraction(sum(weights) ** 2, sum(weight**2 for weight in weights))
    asked = call([float(weight) for weight in weights], min_cohort)
    if len(weights) < min_cohort:
        with pytest.raises(TooFewClients):
            large_enough(asked)
    elif min_cohort > 1 and effective < min_cohort:
        with pytest.raises(InputError, match=r"one client has \d+% of the weight of group 0, so its \d+ clients count as"):
            large_enough(asked)
    else:
        assert large_enough(asked) == [0]


def test_at_the_minimum_weights_are_equal_and_private_ones_are_not_seen() -> None:
    assert large_enough(call([2.0, 2.0, 2.0], 3)) == [0]
    with pytest.raises(InputError, match="make weights more alike"):
        large_enough(call([2.0, 2.0, 2.0000001], 3))
    assert large_enough(call([1.0, 1.0, 1e9], 3, public=False)) == [0]


def test_the_error_of_values_that_weigh_clients_inside() -> None:
    error = TooUnequal(10.0, 6, 3, 5.854)
    assert "by up to 10 to 1" in str(error)
    assert "at most 5.854 to 1 keeps it" in str(error)
    assert "without bound" in str(TooUnequal(float("inf"), 6, 3, 5.854))
