"""Two sums that differ by the victim, of one value or of nearly equal values: the difference is the victim's update.

Checks: "of all values that share a name only sums with the same survivors and settings are opened" (protocols/secagg/summed.py, Guarantee;
the names of a value are the rounds in which it, and the held values that went into it, were computed, and without privacy the models that
it was computed at); "the server learns the sum of each
group … and nothing else about a value" (aggregation/secagg.py, Guarantee), "with `secagg_mode = "active"` also a server that lies"
(docs/guarantees.md, Averaging). `next_round`: two sums whose groups differ by one client, in two rounds that begin from one model, differ
by about its update. From nearly equal models they do as well, and no client can know.
"""

from collections.abc import Callable

from ...contract.handles import Held, HeldKey
from ...federation import messages as m
from ...federation.values import UNTRACED
from .outcome import ActiveAttack, ActiveGuess, lies_claimed
from .scene import WHOLE, AttackRun, VictimValue

__all__ = ["COMPUTED_AGAIN", "DERIVED", "NEXT_ROUND", "SECOND_SUM", "STALE_SLOT"]

GUARANTEE = "secagg: the server learns the sum of each group over its survivors and nothing else about a value"
MADE_NUMBER = 1 << 30
"""The number of a value that the server has clients make; far from those that its honest part gives."""


def difference(run: AttackRun, first: Held, second: Callable[[], Held], of: VictimValue = "update", note: str = "") -> ActiveGuess:
    """A sum of `first` over all, then one of `second` over all but the victim. An honest server refuses two such sums of one turn."""
    whole = run.sum(first, run.clients)
    run.fed.begin_round(run.fed.round)
    rest = None if whole is None else run.sum(second(), run.others)
    guess = None
    if whole is not None and rest is not None and set(whole.survivors) - set(rest.survivors) == {run.victim}:
        guess = whole.total - rest.total
    return ActiveGuess(guess, of, run.honest, note)


def second_sum(run: AttackRun) -> ActiveGuess:
    """The same held value is summed again."""
    held = run.compute()
    return difference(run, held, lambda: held)


def computed_again(run: AttackRun) -> ActiveGuess:
    """The same training from the same model in the same round, as another held value."""
    return difference(run, run.compute(), run.compute)


def derived(run: AttackRun) -> ActiveGuess:
    """A copy of the held value, which clients make when they add up their own parts."""
    held = run.compute()

    def copied() -> Held:
        ask = m.AddUp(run.fed.session, MADE_NUMBER, (m.OwnPart(run.number(held), held.part, 1.0),))
        run.liar.ask(dict.fromkeys(run.clients, ask), "add up")
        key, known = HeldKey("copy"), run.fed.known(held.key)
        models, layout = known["models"], [["own", *rest] for name, *rest in known["layout"] if name == held.part]
        if run.fed.protection.secagg_mode == "passive":  # where clients let in what can be traced to nothing
            models = [[client, UNTRACED.hex()] for client in run.clients]
        run.fed.know(key, {**known, "number": MADE_NUMBER, "layout": layout, "models": models})
        copy = Held(key, run.clients, ("own",))
        if run.fed.privacy_ledger is not None:  # the server's own ledger, which binds no client
            run.fed.privacy_ledger.public(copy)
        return copy

    return difference(run, held, copied)


def next_round(run: AttackRun) -> ActiveGuess:
    """All clients in one round, all but the victim in the next, which begins from the same model; one step over all data in each."""
    held = run.compute(**WHOLE)

    def later() -> Held:
        run.fed.begin_round(1)
        return run.compute(**WHOLE)

    return difference(run, held, later, "whole_batch_update", "one step over all data, from the same model in both rounds")


def stale_slot(run: AttackRun) -> ActiveGuess:
    """The second round's sum at a slot before that of the first's: turns are counted anew."""
    held, before = run.compute(**WHOLE), run.fed.saved()
    for _ in range(2):
        run.fed.begin_round(0)

    def earlier() -> Held:
        run.fed.restore(before, 0)
        run.fed.begin_round(1)
        return run.compute(**WHOLE)

    return difference(run, held, earlier, "whole_batch_update", "one step over all data, from the same model in both rounds")


SECOND_SUM = ActiveAttack(
    "one update from two sums of one held value over cohorts that differ by its client", GUARANTEE, second_sum, accomplices=False
)
COMPUTED_AGAIN = ActiveAttack(
    "the same with the value computed a second time from the round's model", GUARANTEE, computed_again, accomplices=False
)
DERIVED = ActiveAttack("the same with a copy that clients make of the value", GUARANTEE, derived, accomplices=False)
NEXT_ROUND = ActiveAttack(
    "one update from the sums of two rounds that begin from one model, over cohorts that differ by its client",
    GUARANTEE, next_round, claimed=lambda config: lies_claimed(config) and config.privacy.unit == "none", accomplices=False,
)  # fmt: skip
STALE_SLOT = ActiveAttack(
    "a later round's sum at a slot that has passed", "protocols/secagg/policy.py: a client accepts only terms of later slots", stale_slot,
    accomplices=False,
)  # fmt: skip
