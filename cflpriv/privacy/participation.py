"""What a client releases that takes part in some rounds only."""

from dataclasses import replace

from .settings import Releases

__all__ = ["of_participations"]


def of_participations(releases: Releases, rounds: int, most: int) -> Releases:
    """The `releases` of a run of `rounds` rounds for a client that is asked in at most `most` of them.

    In a round that asks a client, the client trains at most ⌈trainings / rounds⌉ times, and chooses as often. In other rounds it does
    neither. What an algorithm counts outside its cohorts (signatures, extra epochs) stays. Raises `ValueError` for a `most` outside 0 …
    rounds.
    """
    if not 0 <= most <= rounds:
        raise ValueError(f"most: {most} is outside 0 … {rounds} rounds")

    def fewer(count: int) -> int:
        return min(count, -(-count // rounds) * most) if rounds else count

    return replace(releases, trainings=fewer(releases.trainings), choices=fewer(releases.choices))
