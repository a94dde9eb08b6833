"""Settings of `[protection] gram = ["ckks"]`: rings, packing, the public terms of an epoch, and how many processes pay."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from time import perf_counter
from typing import Literal

from ..contract.protection import Protection
from ..errors import InputError
from ..protocols import ckks
from ..protocols.ckks import LocalError, Packing, Parameters, Roster, Setup
from ..protocols.ckks.products import Job, Products

__all__ = ["BATCH", "DISTANCES", "CkksSettings", "sketched_shape", "workload"]

BATCH = 64
"""The number of requests in one message to the key holder."""
_WORTH_PROCESSES_SECONDS = 5.0
DISTANCES = ("distance", "clients")
_LARGE_RING = 8192


@dataclass(frozen=True)
class CkksSettings:
    """The `ckks_*` keys of `[protection]` and related ones.

    `ring` 0: the smallest that the release allows. `group` 0: as many pairs in an output as fit, in rings of 8192 at least 4 unless vectors
    are too long.
    """

    release: Literal["gram", "distances", "labels"]
    ring: int
    bound: float
    landmarks: int
    group: int
    workers: int
    sketch_dim: int | None = None

    @classmethod
    def of(cls, protection: Protection) -> "CkksSettings":
        return cls(
            protection.ckks_release, protection.ckks_ring, protection.ckks_bound, protection.landmarks,
            protection.ckks_group, protection.ckks_workers, protection.sketched,
        )  # fmt: skip

    def parameters(self) -> Parameters:
        """The ring. Raises `InputError` for one that is too small for the release."""
        ring = self.ring or (4096 if self.release == "labels" else 8192)
        parameters = ckks.PARAMETERS[ring]
        if parameters.primes < 2 and self.release != "labels":
            raise InputError(
                f"protection.ckks_release: {self.release!r} with ckks_ring = {ring}, whose one prime leaves no room for the noise that "
                "released decryptions need; use ckks_ring = 8192, or 'labels'"
            )
        return parameters

    def packing(self, p: int, dimension: int) -> Packing:
        """How clients' rows (p, dimension), sketched if they are long, are packed. Raises `LocalError` "too-long"."""
        parameters = self.parameters()
        dimension, bound = sketched_shape(self.sketch_dim, dimension, self.bound)
        together = self.group or (4 if parameters.ring >= _LARGE_RING else 1)
        try:
            return ckks.plan(parameters, p, dimension, bound, together)
        except LocalError:
            return ckks.plan(parameters, p, dimension, bound, self.group or 1)

    def setup(self, session: bytes, epoch: int, roster: Roster, p: int, dimension: int) -> Setup:
        """The public terms of an epoch over clients' rows (p, dimension), which every party computes for itself.

        Raises `InputError` for inconsistent settings, `LocalError` "too-long".
        """
        parameters, packing = self.parameters(), self.packing(p, dimension)
        return Setup(
            session, epoch, roster.digest, len(roster.keys), p, packing.dimension, parameters.ring, parameters.bits, parameters.mode,
            self.release, packing.bound, self.group or packing.group,
        )  # fmt: skip


def sketched_shape(sketch_dim: int | None, dimension: int, bound: float) -> tuple[int, float]:
    """The dimension and the bound of vectors after the stage "sketch", if there is one."""
    if sketch_dim is None or dimension <= sketch_dim:
        return dimension, bound
    return sketch_dim, bound * sqrt(1 + 8 * sqrt(2 / sketch_dim))  # a sketch can be longer than its vector: eight std of its squared norm


def workload(products: Products, jobs: Sequence[Job], most: int) -> tuple[int, float]:
    """The number of processes that pays for these jobs, at most `most` (0: one per core), and a rough estimate of the seconds."""
    began = perf_counter()
    first, total = jobs[0], sum(len(job.lefts) for job in jobs)
    products.compute(Job(first.lefts[:1], first.rights, first.wanted[:1]))
    seconds = total * (perf_counter() - began)  # one output with all its loading: an upper estimate
    count = 1 if seconds < _WORTH_PROCESSES_SECONDS else most or min(8, os.cpu_count() or 1)
    return count, seconds / count
