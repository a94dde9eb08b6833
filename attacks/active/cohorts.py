"""Cohorts of the server's choice: a victim with accomplices, a cohort of two, or a victim among clients that the server invented.

Checks: "the server learns the sum of each group over its survivors, at least the minimum cohort size" (aggregation/secagg.py, Guarantee);
"as good as the roster" (docs/secure_aggregation.md, Adversaries); "a server, also one that lies, … cannot put in a member of its own"
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
from .outcome import ActiveAttack, Guess, secure_sums
from .scene import Play

__all__ = ["ACCOMPLICES", "SMALLER_MINIMUM", "SYBILS", "SYBIL_GROUP"]


def accomplices(play: Play) -> Guess:
    """The victim, all accomplices, and as few others as make up the minimum cohort size. Baseline: the mean of this cohort."""
    smallest = play.scene.config.protection.smallest_sum
    honest = [one for one in play.honest if one != play.victim]
    cohort = [play.victim, *play.accomplices, *honest[: max(0, smallest - 1 - len(play.accomplices))]]
    held = play.compute()
    note = f"{len(play.accomplices)} accomplices in a cohort of {len(cohort)}; baseline: the mean of this cohort"
    return Guess(play.without_known(play.sum(held, cohort), held), "update", cohort, note)


def smaller_minimum(play: Play) -> Guess:
    """A cohort of two, of terms whose minimum cohort size is two."""
    cohort = [play.victim, *(play.accomplices or play.others)[:1]]
    held = play.compute()
    return Guess(play.without_known(play.sum(held, cohort), held), "update", play.honest)


def sybils(play: Play) -> Guess:
    """The victim among clients that do not exist, with terms that name the true roster."""
    held = play.compute()
    return Guess(play.without_known(play.sum(held, play.clients), held), "update", play.scene.clients)


def sybil_group(play: Play) -> Guess:
    """The victim agrees on the secret of the transforms with clients that do not exist, and then has its signature compared."""
    guess = None
    with suppress(ProtocolError):
        play.fed.gram(play.fed.compute(play.scene.signature)["signature"], ClusterByAngles())
    kind, dimension = play.scene.config.protection.comparison.name, math.prod(play.scene.population.shape)
    for one in play.liar.exchanges:
        if one.client == play.victim and isinstance(one.ask, m.Give) and isinstance(one.answer, m.Given) and play.puppets:
            named, secrets = clustering_name(one.ask.transform), next(iter(play.puppets.values())).secrets()
            rows = np.asarray(one.answer.values[0].value, np.float64)
            if named is not None and "epoch_secrets" in secrets:
                kept = bytes.fromhex(secrets["epoch_secrets"])
                ratchet = codec.decode(kept, Ratchet, len(kept))
                key = ratchet.key(named.number) or ratchet.moved(named.number).key(named.number)
                if key is not None:
                    guess = np.ravel(transform(kind, key, named.purpose, dimension).invert(rows)[:, :dimension])
    return Guess(guess, "signature")


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
