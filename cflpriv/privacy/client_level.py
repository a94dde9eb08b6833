"""Client-level differential privacy: each client's contribution to a mean is clipped, and the sum gets noise.

With `sum = "none"` the server adds the noise: it is trusted with every contribution, and the guarantee holds towards those who see the
means (clients, and whoever gets a model later). With `sum = "secagg"` each client adds a share of the noise before it rounds to integers
and masks them, so the guarantee holds towards the server as well (`protocols.shared_noise`). With `sum = "one_message"` the helpers add it
(`protocols.one_message.noise`): the guarantee holds towards the server, all helpers that may collude, and all other clients together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ..contract.calls import ClientContribution, Recorder, SumCall, clear_means, large_enough
from ..contract.handles import GroupMean, PartLayout, Shared, join
from ..contract.protection import Protection
from ..errors import InputError
from ..protocols.accounting import calibrate
from ..protocols.entropy import Entropy
from ..protocols.events import Event, GaussianEvent, Relation
from ..protocols.ledger import Ledger
from ..protocols.mechanisms import clip, gaussian, snap
from ..protocols.shared_noise import SharedNoise
from ..types import Array
from .adaptive_clip import AdaptiveClip, is_below
from .correlated import CorrelatedNoise
from .settings import Privacy, Releases, SumNoise

__all__ = ["LOCAL", "ClippedMean", "LocalGram", "client_noise", "local_event", "local_rows"]

LOCAL = "gram by local noise"
"""What the ledger calls a release of single clients' rows."""


def client_noise(
    privacy: Privacy, releases: Releases, protection: Protection, ledger: Ledger, noise_source: Entropy,
    correlated: CorrelatedNoise | None = None, adaptive: AdaptiveClip | None = None,
) -> "tuple[ClippedMean, LocalGram | None]":  # fmt: skip
    """The server's side of unit = "client": in means, and where single rows are compared. `InputError` for sums without noise.

    A trusted server's noise is independent from round to round, or `correlated`. The clip norm is fixed, or `adaptive`.
    """
    if protection.sum not in ("none", "secagg", "one_message"):
        raise InputError(
            f"protection.sum = {protection.sum!r} under privacy.unit = 'client': noise goes to sums in the clear ('none', the server being "
            "trusted) or inside secure aggregation ('secagg', 'one_message')"
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
    return ClippedMean(
        privacy, releases.trainings, first, ledger, noise_source, protection.noise_shares, correlated, adaptive, protection.sums.helped
    ), gram


@dataclass(frozen=True, eq=False)
class ClippedMean:
    """`mean` under client-level privacy. Every client's parts together are clipped to `clip_norm`; weights are equal.

    `adaptive`: that norm moves, and the sum counts the clients below it, at the same price (`adaptive_clip`).

    Guarantee: that of one `GaussianEvent` a mean, charged before anything is sent. Under "add_remove" neighbours differ in whether a
    client's contribution is there or zero: who takes part, and so the number that the sum is divided by, is public. No amplification by the
    sampling of clients is claimed: the server sees who takes part. Reveals: the means up to the noise, who is in which group; with
    `sum = "none"`, every contribution to the trusted server. Inside a secure sum clients must be honest about their shares: whoever knows c
    of them subtracts c from the noise. A member knows its own, and may collude with the server, so the price counts `others`, one share
    less than the minimum cohort size, the fewest survivors; all beyond are slack (for dropouts, and for more such clients). `others` = 0:
    the server adds the noise. `helped`: helpers add it, whatever clients do; `others` says how fine the integers are. Source: McMahan et
    al. 2018.
    """

    privacy: Privacy
    trainings: int
    before: tuple[Event, ...]
    ledger: Ledger
    noise_source: Entropy = field(repr=False)
    others: int = 0
    correlated: CorrelatedNoise | None = None
    adaptive: AdaptiveClip | None = None
    helped: bool = False

    def settle(self, call: SumCall) -> None:
        """Ask the ledger before anything is sent."""
        if len({member.weight for member in call.contributions}) > 1:
            raise InputError("mean: different weights under privacy.unit = 'client': a heavy client would need more noise; use 'equal'")
        if any(len(member.labels) > 1 for member in call.contributions):
            raise InputError("mean: overlapping groups under privacy.unit = 'client': a client would be in several sums and pay for one")
        groups = large_enough(call)
        payers = [member.client for member in call.contributions if any(label in groups for label in member.labels)]
        self.ledger.charge(dict.fromkeys(payers, (self.event,)), "mean")

    @property
    def event(self) -> GaussianEvent:
        """What a mean costs each client."""
        return GaussianEvent(self.multiplier, self._sensitivity(), self.privacy.relation, "client", 0 if self.helped else self.others)

    @property
    def bound(self) -> tuple[Relation, float, float]:
        """What is sent to clients whose sums get noise at the server: relation, clip_norm, noise multiplier."""
        return self.privacy.relation, self.clip_norm, self.multiplier

    @property
    def clip_norm(self) -> float:
        """The bound on the next contributions."""
        return self.privacy.clip_norm if self.adaptive is None else self.adaptive.norm

    @property
    def count(self) -> float:
        """What the count of clients below `clip_norm` is multiplied by in a sum; 0 where there is none."""
        return 0.0 if self.adaptive is None else self.adaptive.scale(self.multiplier, self.privacy.relation)

    @property
    def multiplier(self) -> float:
        """The noise on a sum, in sensitivities."""
        return _central_multiplier(self.privacy, self.trainings, self.before)

    @property
    def inside(self) -> SumNoise | None:
        """What clients and helpers add inside a secure sum; None where the server adds the noise."""
        if not self.others:
            return None
        noise, norm, count = SharedNoise(self.multiplier * self._sensitivity(), self.others), self.clip_norm, self.count
        return SumNoise(noise, norm, max(norm, count / 2), count)

    def _sensitivity(self) -> float:
        return math.hypot(self.clip_norm, self.count / 2) * (1 if self.privacy.relation == "add_remove" else 2)

    # --- a trusted server

    def central(self, like: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
        """The means of contributions, each clipped, with noise on their sums; it was paid for."""
        norm, count, below, clients = self.clip_norm, self.count, 0.0, 0
        call = replace(
            like,
            contributions=tuple(
                replace(member, parts={"contribution": clip(join(member.parts, np.float64), norm)}) for member in like.contributions
            ),
        )
        means: list[GroupMean | None] = []
        for label, mean in enumerate(clear_means(call, record)):
            if mean is None:
                means.append(None)
                continue
            total, members = mean.parts["contribution"].value() * mean.count, call.members(label)
            if count:
                unclipped = sum(is_below(member.parts["contribution"], norm) for member in members)
                total = np.append(total, count * (unclipped - mean.count / 2))
            noised = self._noised(total, label, call.round, [member.client for member in members])
            means.append(_mean(noised / mean.count, like.contributions[0], mean))
            if count:
                below, clients = below + float(noised[-1]) / count + mean.count / 2, clients + mean.count
        if self.adaptive is not None:
            self.adaptive.follow(below, clients)
        return tuple(means)

    def _noised(self, total: Array, group: int, turn: int, members: Sequence[int]) -> Array:
        """A group's sum with the server's noise."""
        if self.correlated is None:
            return gaussian(total, self._sensitivity(), self.multiplier, self.privacy.relation, "client", self.noise_source).value
        scale = self.multiplier * self._sensitivity()
        return snap(total + self.correlated.row(group, turn, members, scale, total.size, self.noise_source), scale)


@lru_cache(maxsize=16)
def _central_multiplier(privacy: Privacy, trainings: int, before: tuple[Event, ...]) -> float:
    return calibrate(
        lambda z: [*before, *[GaussianEvent(z, 1.0, privacy.relation, "client")] * trainings], privacy.epsilon, privacy.delta, 1e-4
    )


def _mean(vector: Array, like: ClientContribution, mean: GroupMean) -> GroupMean:
    """A mean cut into the parts of a contribution, in their dtypes."""
    return replace(mean, parts={name: Shared(part) for name, part in PartLayout.of(like.parts).split(vector).items()})


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
    so much that a clustering survives only with large ε. Source: the Gaussian mechanism in the local model.
    """

    noise_multiplier: float
    privacy: Privacy
    ledger: Ledger

    @property
    def event(self) -> GaussianEvent:
        return local_event(self.noise_multiplier, self.privacy.relation)
