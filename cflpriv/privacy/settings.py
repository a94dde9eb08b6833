"""The section `[privacy]` and the noise that meets it: one (ε, δ) for signatures, choices and training.

unit = "sample"
    Clients do not trust the server: what leaves a client carries its noise already, whatever protection it goes through. A task that can be
    made private has a method `private(noise)`; the federation runs that in its place. The result of a task without a private form never
    leaves the client: an operation that would release the result raises an error naming the step. With `noise = "shared"` a training is one
    step a round, which leaves its client in a secure sum only: there each client adds a share of the noise, so that a sum has it once, not
    once a client (`protocols.shared_noise`).
unit = "client"
    A client's whole contribution to a mean is clipped, and the sum gets noise: by the server, which is trusted with the contributions then
    (`sum = "none"`), or by shares of noise that clients add inside secure aggregation. Nothing but `mean` is released.

`plan_noise` calibrates the noise for a whole run beforehand; the ledger (`protocols.ledger`) enforces the budget.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..errors import CflprivWarning, InputError
from ..keys import Key, check_ranges, readable
from ..protocols.accounting import calibrate, epsilon_of
from ..protocols.entropy import Entropy, derive, keystream
from ..protocols.events import ChoiceEvent, Event, GaussianEvent, training_event
from ..protocols.ledger import PrivacyBudget
from ..protocols.shared_noise import SharedNoise

if TYPE_CHECKING:
    from ..engine import TaskInput

__all__ = [
    "Noise", "Privacy", "Releases", "SumNoise", "check_samples", "events_of_plan", "noise_of_mean", "noise_of_rounds", "plan_noise",
    "secret_key", "secret_of", "share_of_batch", "updates_only",
]  # fmt: skip


SAMPLING = ("poisson", "balls_in_bins")
"""How batches are drawn; no accountant covers others."""


@readable
@dataclass(frozen=True)
class Privacy:
    """The section `[privacy]`; field names are its keys. Values hold for each client over the whole run."""

    unit: Annotated[
        Literal["none", "sample", "client"], Key("What differential privacy protects: a sample of a client, a whole client, or nothing.")
    ] = "none"
    relation: Annotated[
        Literal["add_remove", "replace_one"], Key("Neighbouring data sets differ by a unit more or less, or by another in its place.")
    ] = "add_remove"
    epsilon: Annotated[
        float, Key("ε that each client may spend over the whole run; above 0 where there is a unit.", "[0, inf)", default="none")
    ] = 0.0
    delta: Annotated[
        float, Key("δ of the whole run, below one over the number of units; above 0 with a unit.", "[0, 1)", default="none")
    ] = 0.0
    signature_share: Annotated[float, Key("unit `sample`: part of ε that the signature would cost alone.", "(0, 1)")] = 0.3
    choice_share: Annotated[float, Key("unit `sample`: part of ε that the choices of a cluster (IFCA) would cost alone.", "(0, 1)")] = 0.3
    clip_norm: Annotated[float, Key("Bound on the norm of a sample's gradient, or of a client's contribution.", "(0, inf)")] = 1.0
    samples: Annotated[
        int,
        Key("unit `sample`: public number that sums over a client's samples are divided by; needed there.", "[0, inf)", "samples"),
    ] = 0
    sampling: Annotated[
        str,
        Key(
            "unit `sample`: each sample joins each batch by its own coin (`poisson`), or one random batch of each pass (`balls_in_bins`), "
            "which needs less noise where passes are few.",
            known=lambda: SAMPLING,
        ),
    ] = "poisson"
    sketch_dim: Annotated[
        int, Key("unit `sample`: dimensions to which a signature is projected before noise; 0: none.", "[0, inf)", "dimensions")
    ] = 32
    loss_cap: Annotated[float, Key("unit `sample`: bound on a sample's loss in choices.", "(0, inf)")] = 4.0
    local: Annotated[
        tuple[str, ...],
        Key("unit `client`: operations that clients release with local noise.", known=lambda: ("gram",)),
    ] = ()
    noise: Annotated[
        Literal["per_client", "shared"],
        Key(
            "unit `sample`: each client adds the noise to each of its steps, or the members of a secure sum add it together, one step "
            "a round."
        ),
    ] = "per_client"
    correlated: Annotated[
        bool,
        Key('unit `client`: a trusted server\'s noise cancels part of that of earlier rounds; for `sampling = "fixed_cohorts"`.'),
    ] = False
    clip_quantile: Annotated[
        float,
        Key(
            "unit `client`: the clip norm starts at `clip_norm` and follows this quantile of the norms of contributions; 0: fixed.",
            "[0, 1)",
        ),
    ] = 0.0
    updates: Annotated[
        Literal["scaled", "clipped"] | None,
        Key(
            "unit `client`: an update of local training is scaled to `clip_norm`, up or down, or only clipped to it. Both cost the same.",
            default="scaled; clipped with `clip_quantile`",
        ),
    ] = None
    clip_rate: Annotated[
        float, Key("How fast the clip norm follows its quantile: its logarithm moves by up to so much a sum, but for noise.", "(0, inf)")
    ] = 0.2

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "privacy")
        if self.noise == "shared" and self.unit != "sample":
            raise InputError(
                "privacy.noise = 'shared': is for privacy.unit = 'sample'; under 'client' the noise of secure sums is shared in any case"
            )
        if self.unit == "none":
            if self.epsilon or self.delta:
                raise InputError("privacy.epsilon, privacy.delta: given without privacy.unit; set it to 'sample' or 'client'")
            return
        for key in ("epsilon", "delta"):
            if not getattr(self, key):
                raise InputError(f"privacy.{key} = {getattr(self, key)} with privacy.unit = {self.unit!r}: expected a number > 0")
        if self.correlated and self.unit != "client":
            raise InputError(f"privacy.correlated = true with privacy.unit = {self.unit!r}: is the noise of a server, for unit = 'client'")
        self._check_clip_quantile()
        if self.updates and self.unit != "client":
            raise InputError(
                f"privacy.updates = {self.updates!r} with privacy.unit = {self.unit!r}: is of whole updates, for unit = 'client'"
            )
        self._check_sampling()
        for operation in self.local:
            if operation != "gram" or self.unit != "client":
                raise InputError(f"privacy.local = {list(self.local)}: only 'gram' under unit = 'client' can be released by local noise")

    def _check_sampling(self) -> None:
        key = f"privacy.sampling = {self.sampling!r}"
        if self.sampling not in SAMPLING:
            raise InputError(
                f"{key}: the accountants cover {' and '.join(map(repr, SAMPLING))} only, not batches of a fixed size, shuffled or drawn "
                "without replacement"
            )
        if self.sampling != "poisson":
            needed = {"unit": "sample", "relation": "add_remove", "noise": "per_client"}
            for name, value in needed.items():
                if getattr(self, name) != value:
                    raise InputError(f"{key} with privacy.{name} = {getattr(self, name)!r}: is for privacy.{name} = {value!r} only")

    def _check_clip_quantile(self) -> None:
        key = f"privacy.clip_quantile = {self.clip_quantile}"
        if self.clip_quantile and self.unit != "client":
            raise InputError(f"{key} with privacy.unit = {self.unit!r}: is of the norms of clients' contributions, for unit = 'client'")
        if self.clip_quantile and self.correlated:
            raise InputError(
                f"{key} with privacy.correlated = true: noise that takes back part of earlier noise needs one scale for the whole run; use "
                "clip_quantile = 0 or correlated = false"
            )
        if self.clip_quantile and self.updates == "scaled":
            raise InputError(f"{key} with privacy.updates = 'scaled': the quantile is of lengths, and all would have one; use 'clipped'")

    @property
    def update_norm(self) -> float:
        """The length that local training scales an update to; 0: its own."""
        return self.clip_norm if self.unit == "client" and (self.updates or "scaled") == "scaled" and not self.clip_quantile else 0.0

    @property
    def budget(self) -> PrivacyBudget:
        """What the ledger enforces."""
        if self.unit == "none":
            raise InputError("privacy.unit = 'none' has no budget")
        return PrivacyBudget(self.epsilon, self.delta, self.relation, self.unit)

    def warn_of_delta(self, units: int) -> None:
        """Warn where δ is no smaller than one over the number of units: a mechanism that publishes one at random would pass."""
        if self.unit != "none" and units > 0 and self.delta >= 1 / units:
            noun = "samples a client" if self.unit == "sample" else "clients"
            warnings.warn(
                f"privacy.delta = {self.delta:g}: is not below 1/{units} ({units} {noun}); it would allow publishing one of them",
                CflprivWarning,
                stacklevel=2,
            )


@dataclass(frozen=True)
class Releases:
    """How often a client releases at most, over a whole run: signatures (or rows of scores), trainings (updates), and choices.

    `extra_epochs` are trained beside those of `trainings`, each of which has as many as `[training]` sets. `mechanism` is how a signature
    is released: the eigenvectors of a noisy "moment" of samples or the "whole_moment", the noisy "total" of a vector for each sample, whose
    length is not shown, or their noisy "mean", or noisy "scores" of others' models. `singly`: updates leave clients in other ways than in
    sums, too (compared, or relayed).
    """

    signatures: int = 0
    trainings: int = 0
    choices: int = 0
    extra_epochs: int = 0
    mechanism: Literal["moment", "whole_moment", "total", "mean", "scores"] = "moment"
    singly: bool = False


def updates_only(rounds: int, settings: Mapping[str, Any]) -> Releases:
    """What an algorithm releases whose clients send an update in each round and nothing else: an `AlgorithmSpec.sample_releases`."""
    return Releases(trainings=rounds)


@dataclass(frozen=True)
class SumNoise:
    """What clients add inside a secure sum: their shares of `noise`, each to its vector clipped to `clip_norm` (0: its samples were).

    No coordinate is expected to be longer than `length`. With a `count` above 0 the vector has one more coordinate, which says whether it
    was shorter than `clip_norm` (`adaptive_clip.with_count`).
    """

    noise: SharedNoise
    clip_norm: float
    length: float
    count: float = 0.0


@dataclass(frozen=True)
class Noise:
    """What a private task needs to know, all of it public.

    training, signature: noise multipliers; choice: the ε of one choice, for which scores take `1 / choice` as their multiplier.
    sampling_rate and samples: batches of a share of the records, sums divided by sampling_rate · samples. shares: of how many clients a
    secure sum has the noise of training (0: each client adds all of it to each step). allocated: each sample is in one batch of each pass
    (`protocols.allocation`); else batches are Poisson.
    """

    relation: Literal["add_remove", "replace_one"]
    training: float
    signature: float
    choice: float
    clip_norm: float
    sampling_rate: float
    samples: int
    sketch_dim: int
    loss_cap: float
    seed: int
    shares: int = 0
    allocated: bool = False


def noise_of_mean(noise: Noise, clients: float, helper_sets: int) -> float:
    """The noise of training in a mean over so many clients, as a share of that of the sum or the client that it protects.

    `helper_sets`: by how many sets of helpers it is added, if at all (`Protection.helper_sets`).
    """
    if noise.shares and helper_sets:
        return math.sqrt(helper_sets) / clients
    return 1 / math.sqrt((noise.shares or 1) * clients)


def noise_of_rounds(ratios: Sequence[float], rounds: int) -> float:
    """The ratio of noise to signal of so many rounds together, from those of some single rounds.

    Noise adds up like a random walk, what updates lower adds up in full.
    """
    return 1 / (math.sqrt(rounds) * (sum(1 / max(ratio, 1e-12) for ratio in ratios) / len(ratios)))


def check_samples(privacy: Privacy, releases: Releases, batch_size: int) -> None:
    """Raises `InputError` without a public number of samples where one is needed, or for batches that are larger. Needs no data."""
    if releases.trainings or releases.signatures:
        if not privacy.samples:
            raise InputError(
                "privacy.samples: give a public number of samples a client; sums are divided by it, because the true number is not released"
            )
        if batch_size > privacy.samples:
            raise InputError(
                f"training.batch_size = {batch_size}: is above privacy.samples = {privacy.samples}; no sampling rate is above 1"
            )


@lru_cache(maxsize=64)
def plan_noise(privacy: Privacy, releases: Releases, *, epochs: int, batch_size: int, seed: int, shares: int = 0) -> Noise:
    """The noise for a whole run at the sample level, that of training shared by at least `shares` clients where that is above 0.

    Raises `InputError` for what cannot be; it needs no data.
    """
    check_samples(privacy, releases, batch_size)
    trains = bool(releases.trainings or releases.extra_epochs)
    rate = share_of_batch(privacy, batch_size) if trains else 1.0
    allocated = rate < 1 and privacy.sampling == "balls_in_bins"
    epsilon, delta, relation = privacy.epsilon, privacy.delta, privacy.relation
    fixed: list[Event] = []
    signature = choice = training = 0.0
    alone = sum(map(bool, (releases.signatures, trains, releases.choices))) == 1
    if releases.signatures:
        share = 1.0 if alone else privacy.signature_share
        signature = calibrate(lambda z: [GaussianEvent(z, 1.0, relation, "sample")] * releases.signatures, share * epsilon, delta, 1e-4)
        fixed += [GaussianEvent(signature, 1.0, relation, "sample")] * releases.signatures
    if releases.choices:
        share = 1.0 if alone else privacy.choice_share
        choice = 1 / calibrate(lambda z: [ChoiceEvent(1 / z, relation, "sample")] * releases.choices, share * epsilon, delta)
        fixed += [ChoiceEvent(choice, relation, "sample")] * releases.choices
    if trains:
        sampled = _steps(releases, epochs, rate, shares)

        def events(z: float) -> list[Event]:
            return [*fixed, training_event(z, rate, sampled, privacy.clip_norm, relation, shares, allocated)]

        if epsilon_of(fixed, delta) >= epsilon:
            parts = f"{privacy.signature_share:g} and {privacy.choice_share:g}"
            raise InputError(f"privacy.signature_share, privacy.choice_share = {parts}: leave nothing to train with")
        training = calibrate(events, epsilon, delta)
    return Noise(
        relation, training, signature, choice, privacy.clip_norm, rate, privacy.samples, privacy.sketch_dim, privacy.loss_cap, seed, shares,
        allocated,
    )  # fmt: skip


def share_of_batch(privacy: Privacy, batch_size: int) -> float:
    """The share of the public number of samples that a batch of `batch_size` (0: all) has on average."""
    if not (batch_size and privacy.samples):
        return 1.0
    return batch_size / privacy.samples if privacy.sampling == "poisson" else 1 / math.ceil(privacy.samples / batch_size)


def _steps(releases: Releases, epochs: int, rate: float, shares: int) -> int:
    """How many noisy steps a client trains at most, over a whole run."""
    each = 1 if shares else max(1, round(epochs / rate))
    return releases.trainings * each + (max(1, round(releases.extra_epochs / rate)) if releases.extra_epochs else 0)


def events_of_plan(noise: Noise, releases: Releases, epochs: int) -> tuple[Event, ...]:
    """What a client is charged at most over a whole run with the noise that `plan_noise` made for these releases."""
    relation = noise.relation
    events: list[Event] = []
    if releases.signatures:
        events += [GaussianEvent(noise.signature, 1.0, relation, "sample")] * releases.signatures
    if releases.choices:
        events += [ChoiceEvent(noise.choice, relation, "sample")] * releases.choices
    if steps := _steps(releases, epochs, noise.sampling_rate, noise.shares):
        rate, norm = noise.sampling_rate, noise.clip_norm
        events.append(training_event(noise.training, rate, steps, norm, relation, noise.shares, noise.allocated))
    return tuple(events)


def secret_key(task_input: "TaskInput") -> bytes:
    """The client's 32 fresh bytes of secret randomness for a private task."""
    if len(task_input.secret) != 32:
        raise InputError(f"client {task_input.data.id}: a private task needs 32 bytes of secret randomness, which the federation gives")
    return task_input.secret


def secret_of(task_input: "TaskInput", purpose: str) -> Entropy:
    """A source for one draw of a mechanism, made of the client's secret randomness and a purpose. The same draw every time it is asked."""
    return lambda count: keystream(derive(secret_key(task_input), purpose), count)
