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
from .outcome import ActiveAttack, Guess, secure_sums
from .scene import Play

__all__ = ["LATE_NONCES", "OUTSIDE_BUCKET", "SHORT_LIST"]

DRAWS = 20_000
"""So many nonces of an accomplice are tried."""
BUCKETS = "aggregation/buckets.py: clients refuse a sum whose cohort is not within their bucket of this round's dealing"
UNIFORM = "protocols/dealing.py: the dealing is uniform to a client that follows the protocol, even if all others collude"


def outside_bucket(play: Play) -> Guess:
    """The victim and clients of other buckets, accomplices first, as many as make up the minimum cohort size."""
    outside = [one for one in play.fed.clients if one not in play.clients]
    outside.sort(key=lambda one: one not in play.identities)
    return _summed(play, [play.victim, *outside], max(2, play.scene.config.protection.smallest_sum))


def short_list(play: Play) -> Guess:
    """The victim is dealt among accomplices alone: a list that makes one bucket."""
    accomplices = list(play.identities)
    listed = [play.victim, *accomplices][: max(2, play.scene.config.protection.smallest_sum)]
    dealt = Dealing(play, listed, play.dealings)
    dealt.commit()
    dealt.open()
    dealt.keep()
    return _summed(play, listed, len(listed))


def late_nonces(play: Play) -> Guess:
    """An accomplice's nonce is chosen when all others are open, so that the victim's bucket has no honest client besides."""
    if not play.identities:
        return Guess(None, "update", play.honest, "no accomplices")
    dealt = Dealing(play, play.fed.clients, play.dealings)
    dealt.commit()
    dealt.open()
    one = next(iter(play.identities))
    others = {play.victim, *play.identities}
    bucket: tuple[int, ...] = ()
    for _ in range(DRAWS if len(dealt.nonces) == len(play.fed.clients) else 0):
        dealt.choose(one, system_entropy(dealing.NONCE_BYTES))
        bucket = dealt.bucket(play.victim)
        if set(bucket) <= others:
            break
    else:
        return Guess(None, "update", play.honest)
    dealt.keep()
    return _summed(play, bucket, len(bucket))


def _summed(play: Play, clients: Sequence[int], most: int) -> Guess:
    cohort, held = list(clients)[:most], play.compute()
    return Guess(play.without_known(play.sum(held, cohort), held), "update", play.honest)


def _robust(config: Config) -> str:
    return secure_sums(config) or ("sums are not dealt into buckets (robust = 'none')" if config.protection.robust == "none" else "")


OUTSIDE_BUCKET = ActiveAttack("a sum over the victim and clients that are not in its bucket", BUCKETS, outside_bucket, _robust)
SHORT_LIST = ActiveAttack("a dealing of the victim among accomplices alone", BUCKETS, short_list, _robust)
LATE_NONCES = ActiveAttack("a dealing with an accomplice's nonce that is chosen last", UNIFORM, late_nonces, _robust)
