"""Cohorts of the server's choice: a victim with accomplices, a cohort of two, or a victim among clients that the server invented.

Checks: "the server learns the sum of each group over its survivors, at least the minimum cohort size" (aggregation/secagg.py, Guarantee);
"as good as the roster" (docs/secure_aggregation.md, Adversaries); "a server, also one that lies, … cannot add a member"
(docs/guarantees.md, the secret they share). The guarantee holds for fewer accomplices than a third of the *cohort*: a server that
picks the cohort can pick all of its accomplices and one client, and that is no breach of it.
"""

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ...algorithms.pacfl import ClusterByAngles
from ...contract.protection import Protection
from ...experiments.config.config import Config
from ...federation import messages as m
from ...federation.transforms import clustering_name
from ...protocols import codec
from ...protocols.errors import ProtocolError
from ...protocols.group import Ratchet
from ...protocols.orthonormal import transform
from .outcome import ActiveAttack, ActiveGuess, secure_sums
from .scene import AttackRun

__all__ = ["ACCOMPLICES", "SMALLER_MINIMUM", "SYBILS", "SYBIL_GROUP"]


def accomplices(run: AttackRun) -> ActiveGuess:
    """The victim, all accomplices, and as few others as make up the minimum cohort size. Baseline: the mean of this cohort."""
    smallest = run.scene.config.protection.smallest_sum
    honest = [client for client in run.honest if client != run.victim]
    cohort = [run.victim, *run.accomplices, *honest[: max(0, smallest - 1 - len(run.accomplices))]]
    held = run.compute()
    note = f"{len(run.accomplices)} accomplices in a cohort of {len(cohort)}; baseline: the mean of this cohort"
    return ActiveGuess(run.without_known(run.sum(held, cohort), held), "update", cohort, note)


def smaller_minimum(run: AttackRun) -> ActiveGuess:
    """A cohort of two, of terms whose minimum cohort size is two."""
    cohort = [run.victim, *(run.accomplices or run.others)[:1]]
    held = run.compute()
    return ActiveGuess(run.without_known(run.sum(held, cohort), held), "update", run.honest)


def sybils(run: AttackRun) -> ActiveGuess:
    """The victim among clients that do not exist, with terms that name the true roster."""
    held = run.compute()
    return ActiveGuess(run.without_known(run.sum(held, run.clients), held), "update", run.scene.clients)


def sybil_group(run: AttackRun) -> ActiveGuess:
    """The victim agrees on the secret of the transforms with clients that do not exist, and then has its signature compared."""
    guess = None
    with suppress(ProtocolError):
        run.fed.gram(run.fed.compute(run.scene.signature)["signature"], ClusterByAngles())
    kind, dimension = run.scene.config.protection.comparison.name, math.prod(run.scene.population.shape)
    for exchange in run.liar.exchanges:
        if exchange.client == run.victim and isinstance(exchange.ask, m.Give) and isinstance(exchange.answer, m.Given) and run.controlled:
            named, secrets = clustering_name(exchange.ask.transform), next(iter(run.controlled.values())).secrets()
            rows = np.asarray(exchange.answer.values[0].value, np.float64)
            if named is not None and "epoch_secrets" in secrets:
                kept = bytes.fromhex(secrets["epoch_secrets"])
                ratchet = codec.decode(kept, Ratchet, len(kept))
                key = ratchet.key(named.number) or ratchet.moved(named.number).key(named.number)
                if key is not None:
                    guess = np.ravel(transform(kind, key, named.purpose, dimension).invert(rows)[:, :dimension])
    return ActiveGuess(guess, "signature")


def _of_two(config: Config) -> str:
    small = config.protection.smallest_sum <= 2
    return secure_sums(config) or ("clients' own minimum cohort size is 2, the least that there is" if small else "")


def _transformed(config: Config) -> str:
    if config.protection.sketched is not None:
        return "what is compared is sketched first, and a sketch is not turned back here"
    return "" if config.protection.comparison.transformed else "clients share no secret for what is compared"


def _two(protection: Protection) -> Protection:
    return replace(protection, min_cohort=2)


ACCOMPLICES = ActiveAttack(
    "one update from a sum over its client and accomplices of the server",
    "secagg: of the survivors there are at least the minimum cohort size; fewer than a third of the cohort collude", accomplices,
    claimed=lambda config: False,
)  # fmt: skip
SMALLER_MINIMUM = ActiveAttack(
    "terms with a smaller minimum cohort size than the clients' own", "secagg: of the survivors there are at least the minimum cohort size",
    smaller_minimum, _of_two, server=_two,
)  # fmt: skip
SYBIL_GROUP = ActiveAttack(
    "one client in the agreement on the transforms' secret with clients that the server made up",
    "protocols/group: a server that lies cannot put in a member of its own", sybil_group, _transformed, claimed=lambda config: True,
    sybils=True,
)  # fmt: skip
SYBILS = ActiveAttack(
    "one client in a sum with clients that the server made up",
    "protocols/keys.py: an active server can impersonate nobody on the roster, which keeps sybils out", sybils, sybils=True,
)  # fmt: skip
