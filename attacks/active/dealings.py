"""Under robust means: the victim is put where the server wants it, against the random dealing into buckets.

A sum whose cohort is not within the victim's bucket; a list of the victim and accomplices alone; accomplices' nonces that are chosen when
all others are open. Checks: "Clients refuse a sum whose cohort is not within their bucket of this round's dealing" (aggregation/buckets.py,
Guarantee); "the dealing of the list that it was shown is uniform …, even if the server and all other clients collude"
(protocols/dealing.py, Guarantee).
"""

from collections.abc import Sequence

from ...experiments.config.config import Config
from ...protocols import dealing
from ...protocols.entropy import system_entropy
from .dealt_by_hand import Dealing
from .outcome import ActiveAttack, ActiveGuess, secure_sums
from .scene import AttackRun

__all__ = ["LATE_NONCES", "OUTSIDE_BUCKET", "SHORT_LIST"]

DRAWS = 20_000
"""So many nonces of an accomplice are tried."""
BUCKETS = "aggregation/buckets.py: clients refuse a sum whose cohort is not within their bucket of this round's dealing"
UNIFORM = "protocols/dealing.py: the dealing is uniform to a client that follows the protocol, even if all others collude"


def outside_bucket(run: AttackRun) -> ActiveGuess:
    """The victim and clients of other buckets, accomplices first, as many as make up the minimum cohort size."""
    outside = [client for client in run.fed.clients if client not in run.clients]
    outside.sort(key=lambda client: client not in run.identities)
    return _summed(run, [run.victim, *outside], max(2, run.scene.config.protection.smallest_sum))


def short_list(run: AttackRun) -> ActiveGuess:
    """The victim is dealt among accomplices alone: a list that makes one bucket."""
    accomplices = list(run.identities)
    listed = [run.victim, *accomplices][: max(2, run.scene.config.protection.smallest_sum)]
    dealt = Dealing(run, listed, run.dealings)
    dealt.commit()
    dealt.open()
    dealt.keep()
    return _summed(run, listed, len(listed))


def late_nonces(run: AttackRun) -> ActiveGuess:
    """An accomplice's nonce is chosen when all others are open, so that the victim's bucket has no honest client besides."""
    if not run.identities:
        return ActiveGuess(None, "update", run.honest, "no accomplices")
    dealt = Dealing(run, run.fed.clients, run.dealings)
    dealt.commit()
    dealt.open()
    accomplice = next(iter(run.identities))
    others = {run.victim, *run.identities}
    bucket: tuple[int, ...] = ()
    for _ in range(DRAWS if len(dealt.nonces) == len(run.fed.clients) else 0):
        dealt.choose(accomplice, system_entropy(dealing.NONCE_BYTES))
        bucket = dealt.bucket(run.victim)
        if set(bucket) <= others:
            break
    else:
        return ActiveGuess(None, "update", run.honest)
    dealt.keep()
    return _summed(run, bucket, len(bucket))


def _summed(run: AttackRun, clients: Sequence[int], most: int) -> ActiveGuess:
    cohort, held = list(clients)[:most], run.compute()
    return ActiveGuess(run.without_known(run.sum(held, cohort), held), "update", run.honest)


def _robust(config: Config) -> str:
    return secure_sums(config) or ("sums are not dealt into buckets (robust = 'none')" if config.protection.robust == "none" else "")


OUTSIDE_BUCKET = ActiveAttack("a sum over the victim and clients that are not in its bucket", BUCKETS, outside_bucket, _robust)
SHORT_LIST = ActiveAttack("a dealing of the victim among accomplices alone", BUCKETS, short_list, _robust)
LATE_NONCES = ActiveAttack("a dealing with an accomplice's nonce that is chosen last", UNIFORM, late_nonces, _robust)
