"""Client-level differential privacy: each client's contribution to a mean is clipped, and the sum gets noise.

With `sum = "none"` the server adds the noise: it is trusted with every contribution, and the guarantee holds towards those who see the
means (clients, and whoever gets a model later). With `sum = "secagg"` each client adds a share of the noise before it rounds to integers
and masks them, so the guarantee holds towards the server as well (`protocols.shared_noise`).
"""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ..contract.calls import Contribution, Recorder, SumCall, clear_means, cut, large_enough
from ..contract.handles import GroupMean
from ..contract.protection import Protection
from ..errors import InputError
from ..protocols.accounting import calibrate
from ..protocols.entropy import Entropy
from ..protocols.events import Event, GaussianEvent, Relation
from ..protocols.ledger import Ledger
from ..protocols.mechanisms import clip, gaussian, snap
from ..protocols.shared_noise import SharedNoise
from ..types import Array
from .correlated import CorrelatedNoise
from .settings import Privacy, Releases, SumNoise

__all__ = ["LOCAL", "ClippedMean", "LocalGram", "client_noise", "local_event", "local_rows"]

LOCAL = "gram by local noise"
"""What the ledger calls a release of single clients' rows."""


def client_noise(
    privacy: Privacy, releases: Releases, protection: Protection, ledger: Ledger, noise_source: Entropy,
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
    others = protection.smallest_sum - 1 if protection.sum == "secagg" else 0
    return ClippedMean(privacy, releases.trainings, first, ledger, noise_source, others, correlated), gram


@dataclass(frozen=True, eq=False)
class ClippedMean:
    """`mean` under client-level privacy. Every client's parts together are clipped to `privacy.clip_norm`; weights are equal.

    Guarantee: that of one `GaussianEvent` a mean, charged before anything is sent. Under "add_remove" neighbours differ in whether a
    client's contribution is there or zero: who takes part, and so the number that the sum is divided by, is public. No amplification by the
    sampling of clients is claimed: the server sees who takes part. Reveals: the means up to the noise, who is in which group; with
    `sum = "none"`, every contribution to the trusted server. Inside a secure sum clients must be honest about their shares: whoever knows c
    of them subtracts c from the noise. A member knows its own, and may collude with the server, so the price counts `others`, one share
    less than the minimum cohort size, the fewest survivors; all beyond are slack (for dropouts, and for more such clients). `others` = 0:
    the server adds the noise. Source: McMahan et al. 2018.
    """

    privacy: Privacy
    trainings: int
    before: tuple[Event, ...]
    ledger: Ledger
    noise_source: Entropy = field(repr=False)
    others: int = 0
    correlated: CorrelatedNoise | None = None

    def settle(self, call: SumCall) -> None:
        """Ask the ledger before anything is sent."""
        if len({one.weight for one in call.contributions}) > 1:
            raise InputError("mean: different weights under privacy.unit = 'client': a heavy client would need more noise; use 'equal'")
        groups = large_enough(call)
        payers = [one.client for one in call.contributions if any(label in groups for label in one.labels)]
        self.ledger.charge(dict.fromkeys(payers, (self.event,)), "mean")

    @property
    def event(self) -> GaussianEvent:
        """What a mean costs each client."""
        return GaussianEvent(self.multiplier, self._sensitivity(), self.privacy.relation, "client", self.others)

    @property
    def bound(self) -> tuple[Relation, float, float]:
        """What is sent to clients whose sums get noise at the server: relation, clip_norm, noise multiplier."""
        return self.privacy.relation, self.privacy.clip_norm, self.multiplier

    @property
    def multiplier(self) -> float:
        """The noise on a sum, in sensitivities."""
        return _central_multiplier(self.privacy, self.trainings, self.before)

    @property
    def inside(self) -> SumNoise | None:
        """What clients add inside a secure sum; None where the server adds the noise."""
        if not self.others:
            return None
        return SumNoise(SharedNoise(self.multiplier * self._sensitivity(), self.others), self.privacy.clip_norm, self.privacy.clip_norm)

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


@lru_cache(maxsize=16)
def _central_multiplier(privacy: Privacy, trainings: int, before: tuple[Event, ...]) -> float:
    return calibrate(
        lambda z: [*before, *[GaussianEvent(z, 1.0, privacy.relation, "client")] * trainings], privacy.epsilon, privacy.delta, 1e-4
    )


def _vector(one: Contribution) -> Array:
    return np.concatenate([np.ravel(np.asarray(part)).astype(np.float64) for part in one.parts.values()])


def _mean(vector: Array, like: Contribution, mean: GroupMean) -> GroupMean:
    """A mean cut into the parts of a contribution, in their dtypes."""
    return replace(mean, parts=cut(vector, {name: (np.shape(value), value.dtype) for name, value in like.parts.items()}))


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
