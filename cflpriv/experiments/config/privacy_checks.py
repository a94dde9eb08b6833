"""Checks of `[privacy]` against the other sections that need no data. Each error names the keys and what to write instead."""

import math
import warnings
from collections.abc import Callable

from ...algorithms.interface import AlgorithmSpec
from ...contract.protection import Protection
from ...errors import CflprivWarning, InputError
from ...privacy.settings import Privacy, Releases
from .sections import DataSection, RunSection, TrainingSection

__all__ = ["check_privacy", "few_shares", "needless_steps"]

FAR_MORE = 5
"""A public number of samples may be rounded up. So many times the samples of the largest client it is another number."""


def check_privacy(
    privacy: Privacy, protection: Protection, training: TrainingSection, run: RunSection, data: DataSection, spec: AlgorithmSpec,
    releases: Callable[[], Releases],
) -> None:  # fmt: skip
    """Raises `InputError` for sections that do not go together; warns of noise and of a δ that protect nothing."""
    if privacy.unit == "none":
        return
    if training.weights == "examples":
        raise InputError(
            f"training.weights = 'examples' under privacy.unit = {privacy.unit!r}: sample counts would be released; set it to 'equal'"
        )
    if training.on_divergence == "skip":
        raise InputError(
            f"training.on_divergence = 'skip' under privacy.unit = {privacy.unit!r}: who is left out would reveal what is not paid for; "
            "use 'stop'"
        )
    if changing := data.changing:
        raise InputError(
            f"{changing} under privacy.unit = {privacy.unit!r}: noise is calibrated for clients that are there from the start, with their "
            "data; leave it out"
        )
    if privacy.unit == "client":
        _check_clients(privacy, protection)
    else:
        _check_samples(privacy, protection, training, run, data, spec, releases())
    if run.insecure_test_entropy:
        warnings.warn(
            f"run.insecure_test_entropy = true with privacy.unit = {privacy.unit!r}: the noise is that of a public key and protects "
            "nothing, whatever epsilon the ledger reports",
            CflprivWarning,
            stacklevel=4,
        )
    privacy.warn_of_delta(privacy.samples if privacy.unit == "sample" else data.clients)


def _check_clients(privacy: Privacy, protection: Protection) -> None:
    if protection.sum not in ("none", "secagg", "one_message"):
        raise InputError(
            f"protection.sum = {protection.sum!r} under privacy.unit = 'client': noise goes to sums in the clear or inside secure "
            "aggregation; use 'none' (the server is trusted), 'secagg' or 'one_message'"
        )
    if privacy.correlated and protection.sum != "none":
        raise InputError(
            f"privacy.correlated = true under protection.sum = {protection.sum!r}: is the noise of a trusted server; use 'none'"
        )
    if protection.robust != "none":
        raise InputError(
            f"protection.robust = {protection.robust!r} under privacy.unit = 'client': the noise is calibrated for the mean of a whole "
            "group, not for those of its buckets; use robust = 'none'"
        )


def _check_samples(
    privacy: Privacy, protection: Protection, training: TrainingSection, run: RunSection, data: DataSection, spec: AlgorithmSpec,
    releases: Releases,
) -> None:  # fmt: skip
    if run.precision != "full":
        raise InputError(
            f"run.precision = {run.precision!r} under privacy.unit = 'sample': gradients would not keep their clip norm; use 'full'"
        )
    if spec.replace_only and privacy.relation != "replace_one":
        raise InputError(
            f"algorithm {spec.name!r} under privacy.unit = 'sample': clients hold samples back by their number, which is public only with "
            "privacy.relation = 'replace_one'"
        )
    if data.scaling is not None and data.scaling.per_client:
        raise InputError(
            f"data.standardise = {data.standardise!r} under privacy.unit = 'sample': by its client's own statistics one sample would "
            "change all others, which the noise does not cover; use 'constants', public means and deviations"
        )
    if data.repeat_per_group:
        raise InputError(
            "data.repeat_per_group = true under privacy.unit = 'sample': every sample is in a client of each group, and what it costs "
            "would be the sum of what these spend, not the figure in the ledger of one; set it to false"
        )
    if privacy.samples and training.batch_size > privacy.samples:
        raise InputError(f"training.batch_size = {training.batch_size}: is above privacy.samples = {privacy.samples}")
    if privacy.noise == "shared":
        _check_shared(protection, training, spec, releases)


def _check_shared(protection: Protection, training: TrainingSection, spec: AlgorithmSpec, releases: Releases) -> None:
    """What noise that clients share needs: updates leave in secure sums only, one step a round."""
    why = "under privacy.noise = 'shared'"
    other = "or privacy.noise = 'per_client'"
    if protection.sum not in ("secagg", "one_message"):
        raise InputError(
            f"protection.sum = {protection.sum!r} {why}: updates carry no noise before the secure sum; use 'secagg' or 'one_message', "
            f"{other}"
        )
    if protection.robust != "none":
        raise InputError(f"protection.robust = {protection.robust!r} {why}: each bucket would need all of the noise; use 'none', {other}")
    if protection.small_clusters == "local":
        raise InputError(
            f"protection.small_clusters = 'local' {why}: members of a small cluster would train on with updates that carry no noise; use "
            f"'wait' or 'merge', {other}"
        )
    if releases.singly or releases.extra_epochs:
        raise InputError(f"algorithm {spec.name!r} {why}: clients' updates leave in other ways than in sums, too; use 'fedavg', {other}")
    for key, value, plain in (("epochs", training.epochs, 1), ("optimizer", training.optimizer, "sgd")):
        if value != plain:
            raise InputError(
                f"training.{key} = {value!r} {why}: a round is one plain step of one batch; use {plain!r} and more rounds, {other}"
            )


def needless_steps(privacy: Privacy, training: TrainingSection, samples: int) -> str:
    """That `privacy.samples` is far above the `samples` of the largest client, which makes training long and noisy; "" if it is not."""
    if privacy.unit != "sample" or privacy.samples <= FAR_MORE * samples or not training.batch_size:
        return ""
    steps = 1 if privacy.noise == "shared" else max(1, round(training.epochs * privacy.samples / training.batch_size))
    whole, size = steps * training.rounds, training.batch_size * samples / privacy.samples
    return (
        f"privacy.samples = {privacy.samples:,}: the largest client has {samples:,} training samples, so each client takes {steps:,} steps "
        f"a round ({whole:,} in {training.rounds} rounds) over batches of about {size:.2g} samples; set it to about the samples of a client"
    )


def few_shares(privacy: Privacy, protection: Protection, clients: int) -> str:
    """What a small minimum cohort size costs sums over up to `clients` clients, with a better one; "" where the cost is small."""
    shared = protection.sum == "secagg" and (privacy.unit == "client" or privacy.noise == "shared")
    counted, better = protection.smallest_sum - 1, max(3, int(0.8 * clients))
    times = math.sqrt(clients / counted) if shared else 1.0
    if times < 2.5 or better <= protection.smallest_sum:
        return ""
    return (
        f"protection.min_cohort = {protection.smallest_sum}: the noise of a secure sum is calibrated for {counted} shares, so a sum over "
        f"all {clients} clients has {times:.1f} times the noise that it needs; with min_cohort = {better} it has "
        f"{math.sqrt(clients / (better - 1)):.2f} times, and no sum over fewer clients is formed (of clusters, size it by the smallest)"
    )
