"""Privacy events: one frozen record per noisy release, with everything that decides its price and nothing that is secret.

An event records the kind of noise added to a value, which datasets count as neighbours (`relation`) and what a record
is (`unit`). What it costs is computed elsewhere (`accounting`); an event that is not known there is refused, never priced at zero.

relation
    "add_remove": a record more or less. For `unit = "client"` the client's taking part is public, and its contribution is there or zero.
    "replace_one": a record exchanged for another; the number of records is public.
unit
    "sample": one training sample of one client. "client": all that a client contributes to one release.
shares
    0: whoever releases the value added all of the noise. Else the noise is that of so many clients' shares in a secure sum
    (`shared_noise`). If c of them are known to an adversary, (shares − c)/shares of the variance is left (`known_shares`).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

from .copies import check_own

__all__ = [
    "EVENTS", "AllocatedGaussianEvent", "ChoiceEvent", "Event", "GaussianEvent", "Relation", "SampledGaussianEvent", "Unit", "event_from",
    "event_to", "known_shares", "training_event", "unsampled",
]  # fmt: skip

Relation = Literal["add_remove", "replace_one"]
Unit = Literal["sample", "client"]


@dataclass(frozen=True)
class GaussianEvent:
    """f(D) + N(0, (noise_multiplier · sensitivity)² I), where f moves by at most `sensitivity` (L2) between neighbours of `relation`."""

    noise_multiplier: float
    sensitivity: float
    relation: Relation
    unit: Unit
    shares: int = 0

    def __post_init__(self) -> None:
        _check(self, positive=("noise_multiplier", "sensitivity"))


@dataclass(frozen=True)
class SampledGaussianEvent:
    """`steps` sums, each over an own Poisson sample (every record with probability `sampling_rate`), each with Gaussian noise.

    A record contributes a vector of norm at most `norm_bound`; the noise has the standard deviation noise_multiplier · norm_bound. Under
    "replace_one" two neighbours differ by up to twice the bound: the accountant knows, the multiplier stays that of the bound.

    The sample must be secret: whoever sees the price must not see who was drawn. So the unit is always "sample" (a client draws among its
    own records); that clients are drawn by a server who sees them amplifies nothing, and such an event cannot be made.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int
    norm_bound: float
    relation: Relation
    unit: Unit = "sample"
    shares: int = 0

    def __post_init__(self) -> None:
        _check(self, positive=("noise_multiplier", "norm_bound"), counts=("steps",))
        if not (_number(self.sampling_rate) and 0 < self.sampling_rate <= 1):
            raise ValueError(f"SampledGaussianEvent.sampling_rate: {self.sampling_rate} is outside (0, 1]")
        if self.unit != "sample":
            raise ValueError(
                f"SampledGaussianEvent.unit: {self.unit!r}: a server that draws clients sees who takes part, so their sampling amplifies "
                "nothing; use GaussianEvent"
            )


@dataclass(frozen=True)
class AllocatedGaussianEvent:
    """`passes` passes of `batches` sums: each pass puts each record into one of its batches, drawn evenly and secretly (`allocation`).

    A record contributes a vector of norm at most `norm_bound` to its batch; the noise on each sum has the standard deviation
    noise_multiplier · norm_bound. The unit is always "sample", and the relation "add_remove".
    """

    noise_multiplier: float
    batches: int
    passes: int
    norm_bound: float
    relation: Relation = "add_remove"
    unit: Unit = "sample"
    shares: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _check(self, positive=("noise_multiplier", "norm_bound"), counts=("batches", "passes"))
        if self.unit != "sample":
            raise ValueError(f"AllocatedGaussianEvent.unit: {self.unit!r}: who is drawn must be secret, as only samples of a client are")
        if self.relation != "add_remove":
            raise ValueError(f"AllocatedGaussianEvent.relation: {self.relation!r} has no known price; use 'add_remove'")

    @property
    def steps(self) -> int:
        """The number of sums."""
        return self.batches * self.passes

    @property
    def sampling_rate(self) -> float:
        """The share of the records in a batch, on average."""
        return 1 / self.batches


@dataclass(frozen=True)
class ChoiceEvent:
    """An index chosen by the exponential mechanism (noisy argmin): pure `epsilon`, and `epsilon`-bounded-range.

    Bounded range is what it is priced by (`bounded_range` says what that is, and why noisy argmin has it): a mechanism that is merely
    pure, as randomised response between more than two values, must not be charged as this event.
    """

    epsilon: float
    relation: Relation
    unit: Unit

    def __post_init__(self) -> None:
        _check(self, positive=("epsilon",))


Event = GaussianEvent | SampledGaussianEvent | AllocatedGaussianEvent | ChoiceEvent
EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
"""Every kind of event there is, by name."""


def training_event(
    noise_multiplier: float, sampling_rate: float, steps: int, norm_bound: float, relation: Relation, shares: int = 0,
    allocated: bool = False,
) -> SampledGaussianEvent | AllocatedGaussianEvent:  # fmt: skip
    """The event of private training: `steps` Poisson batches, or whole passes of 1/`sampling_rate` batches where they are `allocated`."""
    if allocated:
        return AllocatedGaussianEvent(noise_multiplier, round(1 / sampling_rate), round(steps * sampling_rate), norm_bound, relation)
    return SampledGaussianEvent(noise_multiplier, sampling_rate, steps, norm_bound, relation, shares=shares)


def _check(event: Any, positive: tuple[str, ...] = (), counts: tuple[str, ...] = ()) -> None:
    name = type(event).__name__
    for key in positive:
        value = getattr(event, key)
        if not (_number(value) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name}.{key}: {value!r} is not a finite number above 0")
    for key in counts:
        value = getattr(event, key)
        if not (_number(value) and isinstance(value, int) and value >= 1):
            raise ValueError(f"{name}.{key}: {value!r} is not a whole number of 1 or more")
    shares = getattr(event, "shares", 0)
    if not (_number(shares) and isinstance(shares, int) and shares >= 0):
        raise ValueError(f"{name}.shares: {shares!r} is not a whole number of 0 or more")
    if event.relation not in get_args(Relation):
        raise ValueError(f"{name}.relation: {event.relation!r} is not known; known are {', '.join(get_args(Relation))}")
    if event.unit not in get_args(Unit):
        raise ValueError(f"{name}.unit: {event.unit!r} is not known; known are {', '.join(get_args(Unit))}")


def _number(value: Any) -> bool:
    """Whether it is a number; Python takes a truth value for one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def known_shares(event: Event, known: int) -> Event | None:
    """The event towards an adversary that knows `known` of the shares that its noise is made of; None if it knows all of them.

    An event without shares stays as it is.
    """
    check_own("privacy event", event, *EVENTS.values())
    shares = getattr(event, "shares", 0)
    if not shares or not isinstance(event, GaussianEvent | SampledGaussianEvent) or known <= 0:
        return event
    if known >= shares:
        return None
    return replace(event, noise_multiplier=event.noise_multiplier * math.sqrt((shares - known) / shares), shares=shares - known)


def unsampled(event: Event) -> Event:
    """The event of a value whose batches are no secret any more: all records in each step. Others stay as they are.

    It is a bound for any knowledge of the batches: a mixture of Gaussians that a record moves or not is no easier to tell from its
    neighbour's than the Gaussians themselves.
    """
    check_own("privacy event", event, *EVENTS.values())
    if isinstance(event, AllocatedGaussianEvent):
        return replace(event, batches=1)
    return replace(event, sampling_rate=1.0) if isinstance(event, SampledGaussianEvent) else event


def event_to(event: Event) -> dict[str, Any]:
    """An event as plain JSON values: its fields (without `shares` where it is 0), and its kind under "event".

    Raises `TypeError` for what is not an event.
    """
    check_own("privacy event", event, *EVENTS.values())
    values = {"event": type(event).__name__, **asdict(event)}
    return {name: value for name, value in values.items() if name != "shares" or value}


def event_from(values: Mapping[str, Any]) -> Event:
    """What `event_to` wrote. Raises `ValueError` for an unknown kind, a missing or unknown field, or an impossible value."""
    name = values.get("event")
    if name == "SkellamEvent":
        raise ValueError("event: 'SkellamEvent' is of version 0.1, whose secure sums had other noise; use that version to price it")
    if name not in EVENTS:
        raise ValueError(f"event: {name!r} is not a known privacy event; known are {', '.join(EVENTS)}")
    kind = EVENTS[name]
    event_fields = {key: value for key, value in values.items() if key != "event"}
    wanted = {field.name for field in fields(kind)}
    if not wanted - {"shares"} <= set(event_fields) <= wanted:
        raise ValueError(f"event {name}: fields {sorted(event_fields)}, expected {sorted(wanted)}")
    return kind(**event_fields)
