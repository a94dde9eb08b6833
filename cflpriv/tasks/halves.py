"""Two random halves of a client's data, from which a test takes the noise in what is computed of the whole."""

from ..console import counted
from ..errors import InputError
from ..randomness import Stream
from ..types import Array

__all__ = ["HALVES", "two_halves"]

HALVES = 2


def two_halves(n: int, rng: Stream) -> tuple[Array, Array]:
    """The places of n samples, dealt at random into two halves; the first has one more of an odd number.

    Raises `InputError` for fewer than two samples.
    """
    if n < HALVES:
        raise InputError(
            f"{counted(n, 'sample')} cannot be split into {HALVES} halves; leave the client out, or merge its rows with those of another"
        )
    order = rng.permutation(n)
    return order[::HALVES], order[1::HALVES]
