"""The layout of values in one vector, and sums with transformed parts."""

from typing import Any

import numpy as np
import pytest

from cflpriv.contract.handles import PartLayout, Shared, join
from cflpriv.contract.transformed_parts import Transformed

VALUES: dict[str, Any] = {
    "update": np.arange(6, dtype=np.float32).reshape(2, 3),
    "count": np.array(7, dtype=np.int64),
    "none": np.zeros((0, 4), dtype=np.float32),
    "last": np.array([0.5, -0.5]),
}


def test_a_vector_is_split_into_the_parts_that_were_joined() -> None:
    layout = PartLayout.of(VALUES)
    vector = join(VALUES, np.float64)
    assert vector.dtype == np.float64
    assert vector.shape == (layout.size,) == (9,)
    assert layout.nbytes == sum(value.nbytes for value in VALUES.values())
    for name, part in layout.split(np.append(vector, 99.0)).items():  # what is beyond the last part is left out
        np.testing.assert_array_equal(part, VALUES[name], strict=True)
        start, stop = layout.places[name]
        np.testing.assert_array_equal(vector[start:stop], VALUES[name].ravel())


def test_a_layout_of_some_parts_is_in_the_order_asked_for() -> None:
    layout = PartLayout.of(VALUES).some(("last", "update"))
    assert layout.places == {"last": (0, 2), "update": (2, 8)}
    assert layout.shape("update") == (2, 3)
    assert layout.shape("count") == ()
    assert PartLayout.of(VALUES).some(("unknown",)) == PartLayout()


def test_only_transformed_parts_of_one_place_are_added() -> None:
    def part(transform: str, start: int) -> Shared:
        return Shared(transformed=(Transformed(transform, np.arange(8.0), start, start + 2, (2,), 8),))

    total = part("sum/1", 0) + part("sum/1", 0) * 3.0
    assert [list(term.value) for term in total.transformed] == [list(4.0 * np.arange(8.0))]
    assert len((total + part("sum/2", 0) + part("sum/1", 2)).transformed) == 3
    assert part("sum/1", 0).transformed[0].value[1] == 1.0  # the addends stay as they are
    with pytest.raises(ValueError, match="protected"):
        total.value()
