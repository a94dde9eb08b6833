"""Who is in a sum is the server's choice: a cohort of one and accomplices, of two, or of one and inventions of the server.

Checks: "the server learns each group's sum over its survivors (of whom there are at least the minimum cohort size)" (aggregation/secagg.py,
Guarantee); "as good as the roster" (docs/secure_aggregation.md, who is stopped by what). The guarantee holds for fewer accomplices than a
third of the *cohort*: a server that picks the cohort can pick all of its accomplices and one client, and that is no breach of it.
"""

from dataclasses import replace

from ...contract.protection import Protection
from ...experiments.config import Config
from .outcome import ActiveAttack, Guess, secure_sums
from .scene import Play

__all__ = ["ACCOMPLICES", "SMALLER_MINIMUM", "SYBILS"]


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


def _of_two(config: Config) -> str:
    small = config.protection.smallest_sum <= 2
    return secure_sums(config) or ("clients' own minimum cohort size is 2, the least that there is" if small else "")


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
SYBILS = ActiveAttack(
    "one client in a sum with clients that the server made up",
    "protocols/keys.py: an active server can impersonate nobody on the roster, which keeps sybils out", sybils, sybils=True,
)  # fmt: skip
