"""Client-level differential privacy: each client's contribution to a mean is clipped, and the sum gets noise.

With `sum = "none"` the server adds the noise: it is trusted with every contribution, and
the guarantee holds towards those who see the means (clients, and whoever gets a model later). With `sum = "secagg"` each client adds a
share of Skellam noise to its integers before they are masked, so the guarantee holds towards the server as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ..contract.calls import Contribution, Recorder, SumCall, clear_means, large_enough
from ..contract.handles import GroupMean, Shared
from ..contract.protection import Protection
from ..errors import InputError
from ..protocols.accounting import calibrate
from ..protocols.entropy import Entropy
from ..protocols.events import Event, GaussianEvent, Relation
from ..protocols.fixedpoint import Bits, largest_levels
from ..protocols.ledger import Ledger
from ..protocols.mechanisms import MOST_VARIANCE, SkellamPlan, clip, gaussian, skellam_open, skellam_plan, skellam_share, snap
from ..randomness import stream
from ..types import Array
from .correlated import CorrelatedNoise
from .settings import Privacy, Releases

__all__ = ["BETA", "LOCAL", "ClippedMean", "LocalGram", "client_noise", "fits", "local_event", "local_rows", "share"]

FINEST_NOISE = 1e4
"""Standard deviation of a share of Skellam noise, in integers, where the modulus leaves room: finer integers gain nothing."""
FEWEST_LEVELS = 1.0
"""A clipped vector is at least so many integers long: below, rounding would dominate it."""
LOCAL = "gram by local noise"
"""What the ledger calls a release of single clients' rows."""
BETA = math.exp(-0.5)
"""The chance that a rounding of a vector is too long and is taken again, at most."""
REACH = 13
"""A share of noise stays within so many standard deviations, but for 1e-30."""


def client_noise(
    privacy: Privacy, releases: Releases, protection: Protection, ledger: Ledger, clients: int, seed: int, noise_source: Entropy,
    correlated: CorrelatedNoise | None = None,
) -> "tuple[ClippedMean, LocalGram | None]":  # fmt: skip
    """The server's side of unit = "client": in means, and where single rows are compared. `InputError` for sums without noise.

    A trusted server's noise is independent from round to round, or `correlated`.
    """
    if protection.sum not in ("none", "secagg"):
        raise InputError(
            f"protection.sum = {protection.sum!r} under privacy.unit = 'client': noise goes to sums in the clear ('none', the server being "
            "trusted) or inside secure aggregation ('secagg')"
        )
    if protection.gram and "gram" in privacy.local:
        raise InputError(f"protection.gram = {list(protection.gram)} with privacy.local = ['gram']: the rows carry noise already; use none")
    portion = privacy.signature_share if releases.signatures and releases.trainings else 1.0
    first: tuple[Event, ...] = ()
    gram = None
    if releases.signatures:
        z = calibrate(lambda z: [local_event(z, privacy.relation)], portion * privacy.epsilon, privacy.delta)
        first = (local_event(z, privacy.relation),)
        gram = LocalGram(z, privacy, ledger)
    shares = None
    if protection.sum == "secagg":
        shares = Shares(protection.secagg_bits, protection.secagg_clip, protection.smallest_sum - 1, clients, seed)
    return ClippedMean(privacy, releases.trainings, first, ledger, noise_source, shares, correlated), gram


@dataclass(frozen=True)
class Shares:
    """Public settings of noise inside a secure sum.

    `bits` of the modulus, the quantiser's `clip`, the fewest `others` beside a member that a sum is opened for, the most `clients` there
    are, the `seed` of the flattening signs.
    """

    bits: Bits
    clip: float
    others: int
    clients: int
    seed: int


@dataclass(frozen=True, eq=False)
class ClippedMean:
    """`mean` under client-level privacy. Every client's parts together are clipped to `privacy.clip_norm`; weights are equal.

    Guarantee: that of one `GaussianEvent` (central) or `SkellamEvent` (in secure sums) a mean, charged before anything is sent. Under
    "add_remove" neighbours differ in whether a client's contribution is there or zero: who takes part, and so the number that the sum is
    divided by, is public. No amplification by the sampling of clients is claimed: the server sees who takes part. Reveals: the means up to
    the noise, who is in which group; with `sum = "none"`, every contribution to the trusted server. Inside a secure sum clients must be
    honest about their shares: whoever knows c of them subtracts c from the noise. A member knows its own, and may collude with the server,
    so the price counts one share less than the minimum cohort size, the fewest survivors; all beyond are slack (for dropouts, and for more
    such clients). Source: McMahan et al. 2018 (central); Agarwal, Kairouz & Liu 2021 (Skellam).
    """

    privacy: Privacy
    trainings: int
    before: tuple[Event, ...]
    ledger: Ledger
    noise_source: Entropy = field(repr=False)
    shares: Shares | None = None
    correlated: CorrelatedNoise | None = None

    def settle(self, call: SumCall, size: int) -> None:
        """Ask the ledger, for contributions of `size` numbers, before anything is sent."""
        if len({one.weight for one in call.contributions}) > 1:
            raise InputError("mean: different weights under privacy.unit = 'client': a heavy client would need more noise; use 'equal'")
        groups = large_enough(call)
        payers = [one.client for one in call.contributions if any(label in groups for label in one.labels)]
        self.ledger.charge(dict.fromkeys(payers, (self.event(size),)), "mean")

    def event(self, size: int) -> Event:
        """What a mean of `size` numbers costs each client."""
        plan = self.plan(size)
        return GaussianEvent(self.multiplier, self._sensitivity(), self.privacy.relation, "client") if plan is None else plan.event

    @property
    def bound(self) -> tuple[Relation, float, float]:
        """What is sent to clients whose sums get noise at the server: relation, clip_norm, noise multiplier."""
        return self.privacy.relation, self.privacy.clip_norm, self.multiplier

    @property
    def multiplier(self) -> float:
        """The noise that a trusted server adds, in sensitivities."""
        return _central_multiplier(self.privacy, self.trainings, self.before)

    def plan(self, size: int) -> SkellamPlan | None:
        """The shares that clients add inside a secure sum of `size` numbers; None where the server adds the noise."""
        return None if self.shares is None else self._plan(size, self.shares)

    def _sensitivity(self) -> float:
        return self.privacy.clip_norm * (1 if self.privacy.relation == "add_remove" else 2)

    # --- a trusted server

    def central(self, call: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
        """The means of contributions, each clipped, with noise on their sums; it was paid for."""
        clipped = [replace(one, parts={"contribution": clip(_vector(one), self.privacy.clip_norm)}) for one in call.contributions]
        means: list[GroupMean | None] = []
        for label, mean in enumerate(clear_means(replace(call, contributions=tuple(clipped)), record)):
            if mean is None:
                means.append(None)
                continue
            total = mean.parts["contribution"].value() * mean.count
            if self.correlated is not None:
                scale, members = self.multiplier * self._sensitivity(), [one.client for one in call.members(label)]
                noised = snap(total + self.correlated.row(label, call.round, members, scale, total.size, self.noise_source), scale)
            else:
                noised = gaussian(total, self._sensitivity(), self.multiplier, self.privacy.relation, "client", self.noise_source).value
            means.append(_mean(noised / mean.count, call.contributions[0], mean))
        return tuple(means)

    # --- shares inside a secure sum

    def _plan(self, size: int, shares: Shares) -> SkellamPlan:
        return _skellam(self.privacy, self.trainings, self.before, shares, size)

    def opened(self, means: Sequence[GroupMean | None], call: SumCall, like: Contribution) -> tuple[GroupMean | None, ...]:
        """Means of contributions `like` this one, from the means of "shares" that the members of each group sent."""
        assert self.shares is not None
        size = len(_vector(like))
        plan = self._plan(size, self.shares)
        opened: list[GroupMean | None] = []
        for label, mean in enumerate(means):
            if mean is None:
                opened.append(None)
                continue
            levels = largest_levels(len(call.members(label)), self.shares.bits)
            total = np.rint(mean.parts["shares"].value() * mean.count * (levels / self.shares.clip))
            vector = skellam_open(total, plan, _signs(self.shares.seed, plan.dimension), size) / mean.count
            opened.append(_mean(vector, like, mean))
        return tuple(opened)


def share(vector: Array, plan: SkellamPlan, seed: int, room: int, entropy: Entropy) -> Array:
    """A client's integers (plan.dimension,) for a secure sum, noise included, of which `room` fit on each side of zero.

    The rest is cut off: less than 1e-30 a coordinate where `fits` holds.
    """
    return np.clip(skellam_share(vector, plan, _signs(seed, plan.dimension), entropy), -room, room)


def fits(plan: SkellamPlan, room: float) -> bool:
    """Whether `REACH` standard deviations of a share stay within `room` integers on each side of zero."""
    largest = plan.clip_norm * plan.levels_per_unit + 1  # of one coordinate: rounding adds less than 1
    return plan.local_variance <= MOST_VARIANCE and largest + REACH * math.sqrt(plan.local_variance) <= room


@lru_cache(maxsize=16)
def _central_multiplier(privacy: Privacy, trainings: int, before: tuple[Event, ...]) -> float:
    return calibrate(
        lambda z: [*before, *[GaussianEvent(z, 1.0, privacy.relation, "client")] * trainings], privacy.epsilon, privacy.delta, 1e-4
    )


@lru_cache(maxsize=16)
def _skellam(privacy: Privacy, trainings: int, before: tuple[Event, ...], shares: Shares, size: int) -> SkellamPlan:
    """The finest integers that fit, and the least noise that keeps the budget.

    What a share holds at most, the rounded vector and `REACH` standard deviations of noise, must fit into the room that the modulus leaves
    a client where all take part: noise that is cut off would not be the noise that the event prices. Noise is sized by the vector *after*
    rounding, which in many dimensions and with few levels is much longer than before.
    """
    dimension = 1 << max(0, (size - 1).bit_length())
    room, root = largest_levels(shares.clients, shares.bits) * 0.9, math.sqrt(shares.others)

    def made(z: float) -> SkellamPlan:
        def at(levels: float) -> SkellamPlan:
            return skellam_plan(privacy.clip_norm, z, dimension, levels, shares.others, privacy.relation, BETA)

        low, high = FEWEST_LEVELS / privacy.clip_norm, min(room / privacy.clip_norm, FINEST_NOISE * root / (z * privacy.clip_norm))
        if fits(at(high), room):
            return at(high)
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if fits(at(middle), room) else (low, middle)
        return at(low)  # which need not fit either: judged when the noise is known

    def events(z: float) -> Sequence[Event]:
        return [*before, *[made(z).event] * trainings]

    try:
        plan = made(calibrate(events, privacy.epsilon, privacy.delta))
        if not fits(plan, room):
            spread = math.sqrt(plan.local_variance)
            raise ValueError(f"{dimension} coordinates take noise of {spread:.3g} levels a client; there are {room:.0f}")
        return plan
    except ValueError as error:
        words = f"too few for noise at privacy.epsilon = {privacy.epsilon:g}"
        raise InputError(f"protection.secagg_bits = {shares.bits}: {words} ({error})") from None


@lru_cache(maxsize=4)
def _signs(seed: int, dimension: int) -> Array:
    return stream(seed, f"flatten {dimension}").choice(np.array([-1.0, 1.0]), size=dimension)


def _vector(one: Contribution) -> Array:
    return np.concatenate([np.ravel(np.asarray(part)).astype(np.float64) for part in one.parts.values()])


def _mean(vector: Array, like: Contribution, mean: GroupMean) -> GroupMean:
    """A mean cut into the parts of a contribution, in their dtypes."""
    parts, start = {}, 0
    for name, value in like.parts.items():
        shape = np.shape(value)
        stop = start + int(np.prod(shape, dtype=int))
        parts[name] = Shared(vector[start:stop].reshape(shape).astype(value.dtype))
        start = stop
    return replace(mean, parts=parts)


# --- signatures by local noise --------------------------------------------------------------------------------------------------------


def local_event(noise_multiplier: float, relation: Relation) -> GaussianEvent:
    """What a client's rows cost, of norm 1 in all, each time they are shown with this noise."""
    return GaussianEvent(noise_multiplier, 1.0 if relation == "add_remove" else 2.0, relation, "client")


def local_rows(rows: Array, event: GaussianEvent, entropy: Entropy) -> Array:
    """Rows (p, d) scaled to norm 1 in all, at most, with the event's noise."""
    unit = clip(rows / max(1.0, math.sqrt(len(rows))), 1.0)
    return gaussian(unit, event.sensitivity, event.noise_multiplier, event.relation, "client", entropy).value


@dataclass(frozen=True, eq=False)
class LocalGram:
    """`gram` by local noise, asked for by name: each client scales its rows to norm 1 in all and adds noise that hides them.

    Guarantee: that of one `GaussianEvent` of the unit "client", each time something is added. Reveals: the rows up to that noise, which is
    so much that a clustering survives only with very large ε. Source: the Gaussian mechanism in the local model.
    """

    noise_multiplier: float
    privacy: Privacy
    ledger: Ledger

    @property
    def event(self) -> GaussianEvent:
        return local_event(self.noise_multiplier, self.privacy.relation)
