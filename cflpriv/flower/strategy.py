"""Secure clustered averaging for an existing Flower app: the server's strategy, to be used with the clients' mod.

    # server                                                          # client
    strategy = ClusteredAveraging(Protection(sum="secagg"))           app = ClientApp(mods=[cflpriv_mod(signature=...)])
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)   @app.train() ...   # as it was

The mod answers protocol stages itself, and calls the application's own train function for local training: what that returns stays with
the client and leaves it only as part of a sum. Ordinary messages pass where the client's settings ask for no protection.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid, PrivacyAccountant
from flwr.supercore.privacy_accounting import GaussianPrivacyEvent

from ..algorithms.pacfl import ClusterByAngles
from ..contract.handles import GroupMean, Shared
from ..contract.operations import Sampling
from ..contract.protection import Protection
from ..contract.schedule import Schedule, request
from ..errors import InputError, TrainingDiverged
from ..federation.contract_record import Contract, make_contract
from ..federation.error_codes import MEANINGS
from ..federation.foreign import Foreign
from ..federation.server import ClientsLost, FederationServer, KeyHolderLost
from ..federation.transport import OverBytes
from ..keys import Key, check_ranges
from ..privacy.settings import Privacy
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import TooFewClients
from ..protocols.keys import Roster
from ..protocols.mechanisms import gaussian
from ..protocols.orthonormal import TRANSFORMS
from ..protocols.secagg.vectors import largest_levels
from .doubtful_signatures import signature_doubt
from .doubtful_updates import initial_doubt, named
from .mod import CLIP, cut, flat, layout_of
from .scores import clipped_share, noise_over_run, noise_to_signal, useless_models, with_class_scores
from .seen import Seen, Watch
from .transport import GridTransport

__all__ = ["ClusteredAveraging", "ClusteredResult"]

SIGNATURE = Foreign("signature", ("signature",))
MOST_OF_ONE = 0.9
"""A warning is given if one client of three or more has more than this share of the weight."""
MOST_ROUNDED = 0.1
"""A warning is given if rounding in secure sums may add more than this share to the length of a mean update."""
log = logging.getLogger("cflpriv.flower")


@dataclass
class ClusteredResult:
    """The result of training: each client's cluster, the clusters' models, a record of each round; ε of the updates where noise was
    added.

    A round's record: "round"; "skipped", why it has no sum, or None; "trained", the clients whose updates are in a sum; "clipped_clients",
    those whose values were cut off or of no use; "train_loss" by cluster, None where it is not seen; "rounding", the share of a mean's
    length that secure sums may have added; "zero_sums", how many are zero; "largest_share" of the examples that one client has; "doubts"
    about means; "clusters_without_a_sum"; "refusals", (client, stage, error code); "metrics"; with a clip_norm
    "server_clipped_share" of updates that are seen, and with noise "server_noise_to_signal" by cluster, as `scores.noise_to_signal` says:
    both from values without noise, for the server alone. `warnings` are for people, each once.
    `notes`: what differs from stock FedAvg in this run.
    """

    labels: dict[int, int]
    arrays: list[ArrayRecord]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    evidence: Mapping[str, Any] | None = None
    epsilon: float | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class ClusteredAveraging:
    """FedAvg inside clusters, which are found once from the clients' signatures (PACFL), with sums under `protection`.

    `k` clusters, or `beta` degrees, or neither for an automatic cut; `k = 1` does not cluster and asks for no signature. `clients` is how
    many must have answered before the first round.

    Updates are weighed by "num-examples", as by FedAvg, with `weights = "equal"` alike. In secure sums a weight is private and at most
    `protection.max_weight`, which is public; where that is 0, with noise, and with a robust rule all weigh alike, and `notes` says so.

    With `noise_multiplier`, the clients' mod scales each update down to `clip_norm`, and this server adds Gaussian noise to each cluster's
    sum before it is used: of noise_multiplier times the longest that an update can be, which is `clip_norm`, and in a secure sum what
    rounding to its levels may add (the root of the number of parameters, times one level). That protects clients from whoever sees the
    models, not from this server (secure aggregation hides single updates from it). `accountant` counts these releases, e.g.
    `PldAccountant`; when its budget is spent, training ends. Numbers of clients count as public, and signatures carry no noise: ε is
    that of the updates alone.

    Raises `InputError` for parameters that cannot be.
    """

    protection: Protection = field(default_factory=Protection)
    clients: Annotated[int, Key("Clients that must have answered before the first round.", "[0, inf)", "clients")] = 2
    k: Annotated[int | None, Key("Number of clusters.", "[1, inf)", "clusters")] = None
    beta: Annotated[float | None, Key("Cut the tree at this distance of angles; inf: one cluster.", "[0, inf]", "degrees")] = None
    sampling: Sampling = field(default_factory=Sampling)
    roster: Roster | None = None
    seed: int = 0
    wait_seconds: float = 120.0
    deadline_seconds: float = 60.0
    train_seconds: float = 3600.0
    clip_norm: Annotated[float, Key("Norm to which updates are scaled down; 0: not.", "[0, inf)")] = 0.0
    noise_multiplier: Annotated[float, Key("Noise on a cluster's sum, relative to `clip_norm`; 0: none.", "[0, inf)")] = 0.0
    accountant: PrivacyAccountant | None = None
    entropy: Entropy = system_entropy
    message_type: str = "train"
    weights: Literal["examples", "equal"] = "examples"
    name: Annotated[str, Key("Name of the run in the session contract, which clients answer in one session only.")] = ""

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self))
        if self.protection.sum in TRANSFORMS:
            raise InputError(f"protection.sum: {self.protection.sum!r} leaves no model to read here; use 'none' or 'secagg'")
        if self.protection.sums.oblivious and self.k != 1:
            raise InputError(
                f"protection.sum: {self.protection.sum!r} keeps clusters private, which this strategy knows; use 'secagg', or k = 1"
            )
        if self.protection.small_clusters == "local":
            raise InputError("protection.small_clusters: 'local' leaves members with models that are not read here; use 'wait' or 'merge'")
        if self.protection.robust != "none" and self.noise_multiplier:
            raise InputError(
                f"protection.robust: {self.protection.robust!r} with noise_multiplier = {self.noise_multiplier:g}: the noise is scaled to "
                "a mean, of which the robust rule makes something else; use robust = 'none'"
            )
        if self.noise_multiplier and not self.clip_norm:
            raise InputError("noise_multiplier: needs clip_norm, the bound that it is relative to")
        if self.accountant is not None and not self.noise_multiplier:
            raise InputError("accountant: there is nothing to account without noise_multiplier")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        train_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> ClusteredResult:
        """Train. `evaluate_fn(round, cluster, arrays)` looks at a cluster's model after each round, on the server.

        With the metric "confusion", k · k counts row by row, the record has balanced accuracy, macro F1, recalls and the majority baseline,
        too, and models that learned nothing are warned of.

        Raises `InputError` if fewer than `clients` answer, or if rounding in a secure sum would more than double the noise.
        """
        layout = layout_of(initial_arrays)
        start = flat(initial_arrays, layout) if layout else np.zeros(0)
        if not start.size or not np.isfinite(start).all():
            raise InputError(f"initial_arrays: {'have numbers that are not finite' if start.size else 'have no numbers'}")
        if num_rounds < 1:
            raise InputError(f"num_rounds = {num_rounds}: expected 1 or more")
        config = tuple((str(key), value) for key, value in (train_config or {}).items() if isinstance(value, bool | int | float | str))
        if self.clip_norm:
            config = (*config, (CLIP, self.clip_norm))
        task = Foreign("train", self._asked, layout, config)
        transport = GridTransport(
            grid, deadline_seconds=self.deadline_seconds, compute_seconds=self.train_seconds, message_type=self.message_type
        )
        seen = Seen()
        federation = FederationServer(
            OverBytes(transport),
            transcript=seen,
            protection=self.protection,
            sampling=self.sampling,
            seed=self.seed,
            roster=self.roster,
            entropy=self.entropy,
            contract=self._contract(task, num_rounds),
        )
        transport.welcome_all(federation, self.clients, self.wait_seconds)
        labels, evidence = self._clusters(federation)
        first = Shared(start)
        longest = self._longest(len(first.value()), len(labels)) if self.noise_multiplier else 0.0
        models = [first] * (max(labels.values()) + 1)
        result = ClusteredResult(labels, [], evidence=evidence, notes=self._notes())
        if evidence is not None and evidence.get("note"):
            result.notes.append(f"clusters: {evidence['note']}")
        _warn(result, "train_config", _unsent(train_config))
        _warn(result, "initial_arrays", initial_doubt(start, layout))
        _warn(result, "signatures", _refused(federation.refusals))
        _warn(result, "signatures", signature_doubt(evidence, len(models), seen.signature))
        watch = Watch(seen, layout, self.seed)
        for number in range(num_rounds):
            before = len(federation.refusals)
            federation.begin_round(number)
            if self._spent(federation):
                result.rounds.append({"round": number, "stopped": "the privacy budget is spent"})
                break
            row: dict[str, Any] = {"round": number, "skipped": None, "trained": 0, "clipped_clients": 0}
            try:
                cohort = [client for client in federation.cohort(labels) if client in labels]
                held = federation.compute(task, {"model": models}, which=labels, on=cohort)
                means = federation.mean(held, self._weighed, labels, len(models))
                doubts = watch.doubts(
                    [model.value() for model in models],
                    [None if mean is None else mean.parts["update"].value() for mean in means],
                    labels,
                )
                if silent := _silent(cohort, labels, means):
                    doubts.append(f"{named(silent)}: gave no answer that counts; the mean is of the others")
                models = [
                    model if mean is None else model + self._noised(mean.parts["update"], mean.count, longest)
                    for model, mean in zip(models, means, strict=True)
                ]
                row |= self._counted(means) | self._noise_beside(means, watch.last, longest) | {"doubts": doubts}
                if self.accountant is not None:
                    self.accountant.compose(self._event(federation))
            except (TooFewClients, TrainingDiverged) as error:
                row["skipped"] = str(error)
            row["refusals"] = list(federation.refusals[before:])
            self._warn_of(result, row)
            log.info("round %d: %s", number, row)
            if evaluate_fn is not None:
                results = [evaluate_fn(number, label, cut(model.value(), layout)) for label, model in enumerate(models)]
                row["metrics"] = [_metrics(one) for one in results]
            result.rounds.append(row)
        self._end(result)
        result.arrays = [cut(model.value(), layout) for model in models]
        result.epsilon = None if self.accountant is None else self.accountant.get_privacy_spent().epsilon
        return result

    def _noise_beside(self, means: Sequence[GroupMean | None], lengths: Sequence[float], longest: float) -> dict[str, Any]:
        """What a round's record says of clipping and noise. From means without noise, so no accountant pays for it."""
        figures: dict[str, Any] = {"server_clipped_share": clipped_share(lengths, self.clip_norm)} if self.clip_norm else {}
        if self.noise_multiplier:
            figures["server_noise_to_signal"] = [
                None if mean is None
                else noise_to_signal(mean.parts["update"].value(), longest * self.noise_multiplier / mean.count, self.clip_norm)
                for mean in means
            ]  # fmt: skip
        return figures

    def _end(self, result: ClusteredResult) -> None:
        """Warn of models that learned nothing, and of noise that swamps what clusters could learn."""
        for words in useless_models(next((row["metrics"] for row in reversed(result.rounds) if "metrics" in row), ())):
            _warn(result, "evaluate_fn", words)
        rows = [row["server_noise_to_signal"] for row in result.rounds if "server_noise_to_signal" in row]
        for label, ratios in enumerate(zip(*rows, strict=True)):
            _warn(result, f"cluster {label}", noise_over_run([ratio for ratio in ratios if ratio is not None])[1])

    def _contract(self, task: Foreign, rounds: int) -> Contract:
        """What clients are asked for: their signature once where clusters are found, and one training a round, whose update is summed."""
        signatures = () if self.k == 1 else (request(SIGNATURE, {"signature": "gram"}),)
        training = request(task, dict.fromkeys(task.asked, "sum"))
        return make_contract(
            run=self.name, algorithm="clustered_averaging", settings={"k": self.k, "beta": self.beta}, rounds=rounds, seed=self.seed,
            schedule=Schedule(signatures, (training,)), protection=self.protection, privacy=Privacy(),
            roster=self.roster, weights="equal" if self.protection.secure else self._weighed,
        )  # fmt: skip

    @property
    def _asked(self) -> tuple[str, ...]:
        """What clients return of a training: its loss, too, where single updates are seen and nothing but the mean is made of them."""
        plain = not (self.protection.sums.hides or self.noise_multiplier) and self.protection.robust == "none"
        return ("update", "loss") if plain else ("update",)

    @property
    def _alike(self) -> str:
        """Why all clients weigh alike although they should weigh by their examples; empty if they do not, or should."""
        if self.weights == "equal":
            return ""
        if self.noise_multiplier:
            return f"noise_multiplier = {self.noise_multiplier:g}: the noise is for updates that weigh alike"
        if self.protection.robust != "none":
            return f"protection.robust = {self.protection.robust!r}: a number of examples is not verified"
        if self.protection.secure and not self.protection.max_weight:
            return "protection.max_weight = 0; give a public maximum of num-examples to weigh by them"
        return ""

    @property
    def _weighed(self) -> Literal["examples", "equal"]:
        return "equal" if self._alike else self.weights

    def _notes(self) -> list[str]:
        """What differs from stock FedAvg in this run."""
        if self._alike:
            return [f"all clients weigh alike, where FedAvg weighs by num-examples: {self._alike}"]
        if self._weighed == "examples" and self.protection.secure:
            limit = self.protection.max_weight
            return [f"num-examples above protection.max_weight = {limit:g} count as that, and small ones may count as more"]
        return []

    def _counted(self, means: Sequence[GroupMean | None]) -> dict[str, Any]:
        """What a round's record says of its sums."""
        made = [mean for mean in means if mean is not None]
        return {
            "trained": sum(mean.count for mean in made), "clipped_clients": sum(mean.clipped for mean in made),
            "zero_sums": sum(not mean.parts["update"].value().any() for mean in made),
            "rounding": max((mean.rounding for mean in made), default=0.0),
            "train_loss": [_mean_loss(mean) for mean in means],
            "largest_share": max((mean.largest for mean in made if mean.count > 2), default=0.0),
            "clusters_without_a_sum": [i for i, mean in enumerate(means) if mean is None],
        }  # fmt: skip

    def _warn_of(self, result: ClusteredResult, row: Mapping[str, Any]) -> None:
        """Warn of updates that were cut off, lost in rounding or refused, and of a round without a sum."""
        where, clip, reasons = f"round {row['round']}", self.protection.secagg_clip, _refused(row["refusals"])
        if row["skipped"] is not None:
            _warn(result, where, f"skipped ({row['skipped']})" + (f": {reasons}" if reasons else ""))
        elif reasons:
            _warn(result, where, reasons)
        if row["clipped_clients"]:
            words = (
                f"{row['clipped_clients']} of {row['trained']} clients' updates went beyond ±{clip:g} and were cut off, or had no finite "
                "numbers and count as zero; raise protection.secagg_clip, on server and clients, above the largest change of a parameter "
                "in one round"
            )
            _warn(result, where, words)
        known = {_kind(doubt) for earlier in result.rounds for doubt in earlier.get("doubts", ())}
        for doubt in row.get("doubts", ()):
            if _kind(doubt) not in known:
                _warn(result, where, doubt)
        if row.get("largest_share", 0.0) > MOST_OF_ONE:
            words = (
                f"one client has {row['largest_share']:.0%} of all examples, so the mean is its own update; is its num-examples right? "
                'weights = "equal" weighs all alike'
            )
            _warn(result, where, words)
        if row.get("zero_sums") and not self.protection.secure:
            _warn(result, where, f"{row['zero_sums']} mean(s) of updates are zero: no client changed its arrays; check that clients train")
        if row.get("zero_sums") and self.protection.secure:
            words = (
                f"{row['zero_sums']} secure sum(s) of updates are zero: no client changed a parameter by as much as a step of the "
                f"quantiser, which protection.secagg_clip = {clip:g} sets; use a smaller one on server and clients, or check that clients "
                "train"
            )
            _warn(result, where, words)
        if row.get("rounding", 0.0) > MOST_ROUNDED:
            words = (
                f"rounding in the secure sum may change the mean update by {row['rounding']:.0%} of its length; use a smaller "
                f"protection.secagg_clip than {clip:g}, on server and clients"
            )
            _warn(result, where, words)

    def _clusters(self, federation: FederationServer) -> tuple[dict[int, int], Mapping[str, Any] | None]:
        if self.k == 1:
            return dict.fromkeys(federation.clients, 0), None
        for _ in range(3):
            try:
                held = federation.compute(SIGNATURE)
            except TrainingDiverged:
                raise InputError(f"no client has a signature: {_refused(federation.refusals)}") from None
            by = ClusterByAngles(beta=self.beta, k=self.k, at_least=federation.merge_below)
            try:
                released = federation.gram(held["signature"], then=by)
            except ClientsLost:
                continue
            except KeyHolderLost as error:
                raise InputError(str(error)) from None
            federation.close(held["signature"])  # no client is added later
            found = [int(label) for label in released.result["labels"]]
            return dict(zip(held.clients, found, strict=True)), released.evidence
        raise InputError("clients were lost three times while their signatures were compared; see the refusals")

    def _longest(self, size: int, clients: int) -> float:
        """The norm of a clipped update of `size` numbers at most, as it enters a sum over up to `clients`."""
        if not self.protection.secure:
            return self.clip_norm
        level = self.protection.secagg_clip / largest_levels(clients, self.protection.secagg_bits)
        longest = self.clip_norm + level * math.sqrt(size)  # clients round once, each coordinate by less than a level
        if longest > 2 * self.clip_norm:
            raise InputError(
                f"protection.secagg_bits = {self.protection.secagg_bits}: rounded for a sum over {clients} clients, an update of {size} "
                f"numbers may be {longest:.3g} long, where clip_norm = {self.clip_norm:g}: the noise would be more than doubled; use 32 "
                "bits, a larger clip_norm or a smaller protection.secagg_clip"
            )
        return longest

    def _noised(self, update: Shared, count: int, longest: float) -> Shared:
        """The mean update, with noise of `longest` · noise_multiplier on the sum."""
        if not self.noise_multiplier:
            return update
        value = update.value()
        noised = gaussian(value.astype(np.float64) * count, longest, self.noise_multiplier, "add_remove", "client", self.entropy)
        return Shared((noised.value / count).astype(value.dtype))

    def _event(self, federation: FederationServer) -> GaussianPrivacyEvent:
        """A client is in one cluster only, so a round is one release for each client."""
        assert self.accountant is not None
        size = self.accountant.config.population_size
        return GaussianPrivacyEvent(self.noise_multiplier, min(len(federation.clients), size), size)

    def _spent(self, federation: FederationServer) -> bool:
        limited = self.accountant is not None and self.accountant.config.max_epsilon is not None
        return bool(limited and self.accountant is not None and self.accountant.would_exceed(self._event(federation)))


def _mean_loss(mean: GroupMean | None) -> float | None:
    """The mean loss of the training of clients that state one, weighed as their updates are; None without any, and where it is not seen."""
    share, loss = (0.0, 0.0) if mean is None or "loss" not in mean.parts else map(float, mean.parts["loss"].value())
    return loss / share if share else None


def _silent(cohort: Sequence[int], labels: Mapping[int, int], means: Sequence[GroupMean | None]) -> list[int]:
    """The clients that were asked and are not in the mean of their cluster, where there is one."""
    return [client for client in cohort if (mean := means[labels[client]]) is not None and client not in mean.contributors]


def _unsent(config: ConfigRecord | None) -> str:
    """A warning of the settings of training that clients are not sent; empty if all are."""
    names = [str(key) for key, value in (config or {}).items() if not isinstance(value, bool | int | float | str)]
    return f"{', '.join(map(repr, names))} are not sent to clients, since only single values are" if names else ""


def _metrics(made: Any) -> dict[str, Any] | None:
    """What `evaluate_fn` returned, as a round's record has it."""
    if made is None or isinstance(made, Mapping):
        return None if made is None else with_class_scores(made)
    raise InputError(f"evaluate_fn: returned {type(made).__name__} ({made!r:.60}), expected a MetricRecord or None")


def _refused(refusals: Sequence[tuple[int, str, str]]) -> str:
    """Refusals for people: how many of each error code, and what the code means; empty without any."""
    counts = Counter(code for _, _, code in refusals)
    return "; ".join(f"{count} refused with {code!r} ({MEANINGS.get(code, 'an unknown code')})" for code, count in counts.items())


def _kind(doubt: str) -> str:
    """A doubt without the clients that it begins with, and without numbers."""
    return re.sub(r"\d[\d.e+-]*", "", re.sub("^clients? [^:]*: ", "", doubt))


def _warn(result: ClusteredResult, where: str, words: str) -> None:
    """Warn of something, in the log and in the result; of the same thing once."""
    if words and all(known.partition(": ")[2] != words for known in result.warnings):
        result.warnings.append(f"{where}: {words}")
        log.warning("%s: %s", where, words)
