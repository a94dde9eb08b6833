"""The end of a secure sum with lists of survivors of the server's choice.

Shares of both secrets of a client remove its masks. The attempts: two lists, to two parts of the clients or one after the other to all; a
list shorter than the minimum cohort size; the passive mode, in which clients do not compare lists; a client accused so that the sum is
taken again without it, after which the first sum is finished as well; complaints that nobody made, so that a client opens its shares.

Checks: "what leaves this machine shows no more than the sum over at least `min_cohort` survivors" (protocols/secagg/client.py, Guarantee),
and the rows "reports two sets of survivors" and "asks for both shares of a client" of docs/secure_aggregation.md.
"""

from dataclasses import replace

from ...contract.protection import Protection
from ...experiments.config.config import Config
from .halted import Halted, halted
from .outcome import ActiveAttack, ActiveGuess, pairwise_sums
from .scene import AttackRun

__all__ = ["FALSE_ACCUSATION", "FALSE_COMPLAINTS", "FEW_SURVIVORS", "MODE_DOWNGRADE", "SECOND_UNMASKING", "SPLIT_SURVIVORS"]

GUARANTEE = "protocols/secagg: what leaves a client shows no more than the sum over at least the minimum cohort size of survivors"


def split_survivors(run: AttackRun) -> ActiveGuess:
    """The server reports the victim as a survivor to some clients and as dropped to the others; accomplices answer both."""
    stopped = halted(run, run.compute(), run.clients)
    if stopped is not None:
        everyone = [client for client in run.clients if client in stopped.uploads]
        honest = [client for client in everyone if client not in (*run.accomplices, run.victim)]
        few = max(0, stopped.terms.threshold - 1 - len(run.accomplices))
        lists = {run.victim: everyone, **dict.fromkeys(honest[:few], everyone)}
        _finish(stopped, {**lists, **dict.fromkeys(run.accomplices, everyone)})
        without = [client for client in everyone if client != run.victim]
        _finish(stopped, dict.fromkeys([*honest[few:], *run.accomplices], without))
    return _read(run, stopped)


def second_unmasking(run: AttackRun) -> ActiveGuess:
    """All reveal shares for the sum over all, and are asked once more, for the sum without the victim."""
    stopped = halted(run, run.compute(), run.clients)
    if stopped is not None:
        everyone = [client for client in run.clients if client in stopped.uploads]
        without = [client for client in everyone if client != run.victim]
        _finish(stopped, dict.fromkeys(everyone, everyone))
        _finish(stopped, dict.fromkeys(without, without))
    return _read(run, stopped)


def _finish(stopped: Halted, lists: dict[int, list[int]]) -> None:
    signatures = stopped.agree(lists)
    stopped.reveal(lists, signatures)


def _read(run: AttackRun, stopped: Halted | None) -> ActiveGuess:
    return ActiveGuess(None if stopped is None else stopped.opened([run.victim]), "update", run.honest)


def few_survivors(run: AttackRun) -> ActiveGuess:
    """The server reports all clients as dropped but the victim, accomplices and as few others as hold enough shares."""
    held = run.compute()
    stopped = halted(run, held, run.clients)
    guess, few = None, []
    if stopped is not None:
        smallest = run.scene.config.protection.smallest_sum
        most = max(1, min(smallest - 1, stopped.terms.threshold))  # below the minimum, or at least as few as can be opened
        honest = [client for client in run.honest if client != run.victim]
        few = sorted([run.victim, *run.accomplices, *honest][:most])
        _finish(stopped, dict.fromkeys(few, few))
        mean = stopped.opened(few)
        if mean is not None:
            theirs = sum((run.known(client, held) for client in few if client in run.accomplices), start=0 * mean)
            guess = (mean * len(few) - theirs) / len([client for client in few if client not in run.accomplices])
    return ActiveGuess(guess, "update", run.honest, f"{len(few)} reported as survivors of {len(run.clients)}")


def false_accusation(run: AttackRun) -> ActiveGuess:
    """A sum is stopped and taken again without the victim, as if it had misbehaved; then the first is finished, too."""
    held = run.compute()
    first = halted(run, held, run.clients)
    whole = None
    rest = None if first is None else run.sum(held, run.others)
    if first is not None:
        everyone = [client for client in run.clients if client in first.uploads]
        _finish(first, dict.fromkeys(everyone, everyone))
        whole = first.opened(everyone)
    guess = None
    if first is not None and whole is not None and rest is not None and set(first.uploads) - set(rest.survivors) == {run.victim}:
        guess = whole * len(first.uploads) - rest.total
    return ActiveGuess(guess, "update", run.honest, "the first sum was stopped before any share was revealed")


def false_complaints(run: AttackRun) -> ActiveGuess:
    """The server reports to the victim that all others complained about its shares, then half of them, then the rest; then it finishes the
    sum.

    What it opens are shares of both its secrets. It is in the sum, so that the others reveal theirs of its self mask.
    """
    stopped = halted(run, run.compute(), run.clients)
    if stopped is not None:
        everyone = [client for client in run.clients if client in stopped.uploads]
        others = [client for client in everyone if client != run.victim]
        half = len(others) // 2
        if not stopped.challenge(run.victim, others):
            for accusers in (others[:half], others[half:]):
                stopped.challenge(run.victim, accusers)
        _finish(stopped, dict.fromkeys(everyone, everyone))
    return _read(run, stopped)


def _plain_values(config: Config) -> str:
    if config.privacy.unit == "client":
        return "sums carry clients' shares of noise, which this attack does not decode"
    return pairwise_sums(config)


def _active(config: Config) -> str:
    if not config.protection.secure or config.protection.secagg_mode != "active":
        return "clients' own settings name no active mode"
    return _plain_values(config)


def _passive(protection: Protection) -> Protection:
    return replace(protection, secagg_mode="passive")


SPLIT_SURVIVORS = ActiveAttack("two lists of survivors for two parts of the clients", GUARANTEE, split_survivors, _plain_values)
SECOND_UNMASKING = ActiveAttack(
    "a second list of survivors after the first was answered", "protocols/secagg/client.py: one object answers a message once",
    second_unmasking, _plain_values,
)  # fmt: skip
FEW_SURVIVORS = ActiveAttack("a list of survivors below the minimum cohort size", GUARANTEE, few_survivors, _plain_values)
MODE_DOWNGRADE = ActiveAttack(
    "terms of the passive mode, and then two lists of survivors", "protocols/secagg/policy.py: a client accepts only terms of its own mode",
    split_survivors, _active, server=_passive,
)  # fmt: skip
FALSE_COMPLAINTS = ActiveAttack(
    "shares of a client's secrets, from complaints that nobody made",
    "protocols/secagg/complaints.py: with the shares of colluding clients, those that a dealer opens are fewer than the threshold",
    false_complaints, _plain_values,
)  # fmt: skip
FALSE_ACCUSATION = ActiveAttack(
    "a sum taken again without an accused client, and the first one finished as well",
    "secagg: the server learns the sum of each group over its survivors and nothing else about a value", false_accusation, _plain_values,
)  # fmt: skip
