"""What is asked to stand between clients and the server, as data: the section `[protection]`.

`channels` has what does it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np

from ..errors import InputError
from ..protocols.orthonormal import TRANSFORMS

SKETCH_SMALLEST = 8

__all__ = ["GRAMS", "SUMS", "Protection", "SecureSum"]

SmallClusters = Literal["wait", "local", "merge"]

GRAMS: dict[str, str] = {
    "none": "the server sees every signature",
    "sketch": "a first stage for long vectors: a public random sketch of `sketch_dim` numbers; protects nothing by itself",
    "permutation": "coordinates in an order shared by the clients: the server sees every value, not its place",
    "signed_permutation": "the same with signs: the server sees the size of every value",
    "hadamard": "signs, Walsh-Hadamard mixing, permutation and signs shared by the clients: heuristically only the Gram matrix shows",
    "haar": "a Haar rotation shared by the clients: the server sees the Gram matrix and nothing else",
    "ckks": "encrypted inner products: a key holder apart sees the Gram matrix, the server what `ckks_release` says",
}
SUMS: dict[str, str] = {
    "none": "the server sees every update",
    "permutation": "updates in a secret order, averaged blindly (CFL's Algorithm 5): a curious server can read labels off them",
    "signed_permutation": "the same with signs; broken in the same way",
    "hadamard": "updates under a shared Hadamard transform, averaged blindly: heuristically only their Gram matrix shows",
    "haar": "updates under a shared Haar rotation, averaged blindly: the server sees their Gram matrix (small models)",
    "secagg": "secure aggregation: the server sees the sum of each group of clients, and who is in it",
    "secagg-oblivious": "secure aggregation over blocks: clients choose their group (IFCA), the server sees sums and sizes only",
}


@dataclass(frozen=True)
class SecureSum:
    """How sums are made secure: the `secagg_*` keys of `[protection]` and `max_weight`."""

    mode: Literal["active", "passive"]
    bits: Literal[16, 32]
    clip: float
    max_weight: float


@dataclass(frozen=True)
class Protection:
    """What is asked for. Field names are the keys of `[protection]`.

    gram: how signatures and other compared vectors reach the server, in order; empty or ("none",) for in the clear.
    sum: how updates are averaged. Single values that an algorithm gathers are released as they are.
    floor: no sum is formed over fewer clients (0: 3 under secure aggregation, else 1).
    small_clusters: what happens to a group below the floor: its model waits ("wait"), its members train alone ("local"), or clusters below
    it join the nearest while clustering ("merge").
    sketch_dim: what the stage "sketch" of `gram` makes of longer vectors; shorter ones it leaves as they are.
    transform: a fresh transform for each sum ("per_round"), or one for all ("fixed", CFL's Algorithm 5 as printed).
    secagg_mode: what the server may do: lie ("active": signatures against a roster, complete graph) or only look ("passive").
    secagg_bits, secagg_clip: the modulus is 2^bits, and values beyond ±clip are clipped, and reported. max_weight: the public maximum of a
    client's weight, needed for `weights = "examples"` under secure aggregation.
    ckks_release: what the server learns of encrypted similarities: the result of clustering ("labels"), also distances, or the Gram matrix,
    both noised. ckks_mode: clients encrypt under the key holder's public key, or ("symmetric") share its secret key.
    ckks_ring: the ring's degree, 0 for the smallest that serves. ckks_bound: the public bound on a compared vector's norm. ckks_group: how
    many pairs share an output (more takes more upload and less of all else), 0 for as many as fit, in a ring of 8192 at least 4.
    ckks_workers: processes, 0 for one a core where that pays. landmarks: clients are compared with so many of them only, 0 for all pairs.
    """

    gram: tuple[str, ...] = ()
    sum: str = "none"
    floor: int = 0
    small_clusters: SmallClusters = "wait"
    sketch_dim: int = 4096
    transform: Literal["per_round", "fixed"] = "per_round"
    secagg_mode: Literal["active", "passive"] = "active"
    secagg_bits: Literal[16, 32] = 32
    secagg_clip: float = 1.0
    max_weight: float = 0.0
    ckks_release: Literal["gram", "distances", "labels"] = "labels"
    ckks_mode: Literal["public-key", "symmetric"] = "public-key"
    ckks_ring: int = 0
    ckks_bound: float = 1.0
    ckks_group: int = 0
    ckks_workers: int = 0
    landmarks: int = 0

    def __post_init__(self) -> None:
        for stage in self.gram:
            _known("gram", stage, GRAMS)
        if "sketch" in self.gram[1:]:
            raise InputError(f"protection.gram: {list(self.gram)}: the sketch comes first, once")
        if len(self.gram) - self.gram.count("sketch") > 1:
            raise InputError(f"protection.gram: {list(self.gram)} names more than one transform; give one, perhaps after 'sketch'")
        _known("sum", self.sum, SUMS)
        for key, hint in get_type_hints(type(self)).items():
            value, choices = getattr(self, key), get_args(hint)
            if hint is int and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
                raise InputError(f"protection.{key}: {value!r} is not a whole number")
            if get_origin(hint) is Literal and not any(isinstance(value, type(one)) and value == one for one in choices):
                raise InputError(f"protection.{key}: {value!r} is not known; known are {', '.join(map(str, choices))}")
        if self.sketch_dim < SKETCH_SMALLEST:
            raise InputError(f"protection.sketch_dim: {self.sketch_dim} is below {SKETCH_SMALLEST}; inner products would be noise")
        if self.floor < 0:
            raise InputError(f"protection.floor: {self.floor} is negative")
        if self.secure and 0 < self.floor < 2:
            raise InputError(
                f"protection.floor: {self.floor} under sum = {self.sum!r}: a sum over one client is its value; 2 at least, 3 is the default"
            )
        if not (self.secagg_clip > 0 and np.isfinite(self.secagg_clip)):
            raise InputError(f"protection.secagg_clip: {self.secagg_clip} is not a finite number above 0")
        if not 2**-20 <= self.ckks_bound <= 2**20:
            raise InputError(f"protection.ckks_bound: {self.ckks_bound} is not between 2^-20 and 2^20")
        counts = (("ckks_group", self.ckks_group, 0), ("ckks_workers", self.ckks_workers, 0), ("landmarks", self.landmarks, 0))
        for key, value, smallest in counts:
            if value < smallest:
                raise InputError(f"protection.{key}: {value} is below {smallest}")
        if self.landmarks and "ckks" not in self.gram:
            raise InputError(f"protection.landmarks: {self.landmarks} spares encrypted products; it goes with gram = ['ckks']")
        if not (self.max_weight >= 0 and np.isfinite(self.max_weight)):
            raise InputError(f"protection.max_weight: {self.max_weight} is not a finite number of 0 or more")

    @property
    def secure(self) -> bool:
        """Whether sums go through secure aggregation."""
        return self.sum.startswith("secagg")

    @property
    def transformed(self) -> bool:
        """Whether clients share a secret transform, for what is compared or for updates."""
        return self.sum in TRANSFORMS or any(stage in TRANSFORMS for stage in self.gram)

    @property
    def idle(self) -> tuple[str, ...]:
        """The keys that were set and do nothing here, because what they are about is off."""
        on = {
            "secagg_": self.secure, "max_weight": self.secure, "ckks_": "ckks" in self.gram, "sketch_dim": "sketch" in self.gram,
            "transform": self.sum in TRANSFORMS,
        }  # fmt: skip
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        return tuple(name for name in changed if any(name.startswith(what) and not used for what, used in on.items()))

    @property
    def smallest_sum(self) -> int:
        """The floor in force."""
        return self.floor or (3 if self.secure else 1)

    @property
    def secure_sum(self) -> SecureSum:
        """The settings of secure aggregation."""
        return SecureSum(self.secagg_mode, self.secagg_bits, self.secagg_clip, self.max_weight)

    @property
    def name(self) -> str:
        """A short name for tables: "none", "haar", or "gram=…, sum=…"."""
        gram = "+".join(self.gram) or "none"
        if gram == self.sum:
            return gram
        return ", ".join(f"{key}={value}" for key, value in (("gram", gram), ("sum", self.sum)) if value != "none")


def _known(key: str, value: str, names: Mapping[str, str]) -> None:
    if value not in names:
        raise InputError(f"protection.{key}: {value!r} is not known; known are {', '.join(names)}")
