"""The answer about leaks that follows from an audit.

An attack that was not attempted, or that does not work unprotected, never counts as a sign of safety: "no leak seen" needs every attack of
the suite, settled for every adversary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...console import counted
from .answer import Answer, counted_words, listed, upper
from .audit_words import attack_name, is_validated, metric_words, share_learned
from .run_files import Audited
from .run_names import adversary_place, adversary_words, with_colluders

__all__ = ["OPEN", "audit_answer", "leak_sentence", "leaks_in"]

OPEN = "Not settled for"
"""How the sentence begins that names the adversaries for whom figures are open."""
SETTLED = ("at_baseline", "not_applicable", "nothing_to_see")
"""Statuses that leave no question open about a figure."""
NEEDED = ("server", "client", "released")
"""Adversaries that every recorded run has: without figures of each of these an audit is not whole."""


def audit_answer(audited: Audited) -> Answer:
    """What an audit found, the leak to whoever sees least first. Anything that is open keeps the answer open."""
    question, cells = "What leaks, and to whom?", audited.cells
    if not cells:
        return Answer(question, "open", "Not tested", "No attack was run, so nothing is known of what leaks.")
    if any(cell["status"] == "evidence_doubtful" for cell in cells):
        return Answer(
            question, "open", "Evidence doubtful", "What was audited failed a check, so no attack was made and nothing is concluded."
        )
    adversaries = sorted({str(cell["adversary"]) for cell in cells}, key=adversary_place)
    small, leaking = _extent(audited), leaks_in(audited)
    if leaking:
        learned: dict[str, list[str]] = {}
        for name, leak in leaking.items():
            learned.setdefault(_learns(audited, leak), []).append(name)
        sentences = [_leak_words(names, words, leaking[names[0]]) for words, names in learned.items()]
        helped = {name.partition("+")[0] for name in adversaries if "+" in name}
        open_for = [name for name in reversed(adversaries) if name not in leaking and not _settled(cells, name)]
        if unknown := [adversary_words(name) + (" alone" if name in helped else "") for name in open_for]:
            sentences.append(f"{OPEN} {listed(unknown)}.")
        return Answer(question, "bad", f"Leaks to {adversary_words(next(iter(leaking)))}", " ".join(sentences), small)
    statuses = {cell["status"] for cell in cells}
    shown = any(is_validated([cell]) for cell in cells)
    if "inconclusive" in statuses and not shown:
        return Answer(question, "open", "Not known", f"Neither a leak nor its absence is shown. {_open_words(cells)}", small)
    if not shown:
        words = "No attack that was run can read what was sent; another might."
        if "not_validated" in statuses:
            words = "No attack that was run is known to work here even unprotected, so finding nothing says nothing."
        return Answer(question, "open", "Not tested", words, small)
    if not statuses <= set(SETTLED) or not _is_whole(audited):
        return Answer(question, "open", "No leak seen yet", f"The attacks that were tested found none. {_open_words(cells)}".strip(), small)
    return Answer(
        question,
        "good",
        "No leak seen",
        "Every attack of the suite that applies does no better than its baseline. A stronger one may.",
        small,
    )


def _is_whole(audited: Audited) -> bool:
    """Whether every attack was made by every adversary that a whole audit has."""
    return audited.about.attacks_left == () and {cell["adversary"] for cell in audited.cells or ()} >= set(NEEDED)


def _leak_words(names: Sequence[str], learned: str, leak: Mapping[str, Any]) -> str:
    helped = [name for name in names if "+" in name]
    named = [name for name in names if "+" not in name] + helped[:1]  # with more helpers it learns no less
    who = upper(listed([adversary_words(name) for name in named]))
    return f"{who} learn{'s' if len(named) == 1 else ''} {learned} ({_figure(leak)})."


def leaks_in(audited: Audited) -> dict[str, Mapping[str, Any]]:
    """The leak to each adversary that has one, that of the audit's verdict or else the strongest, by adversary: who sees least comes first.

    Of the verdict's attack the strongest figure.
    """
    named = {verdict["adversary"]: verdict.get("attack") for verdict in audited.verdicts}
    leaks: dict[str, Mapping[str, Any]] = {}
    for cell in audited.cells or ():
        name = with_colluders(cell)
        if cell["status"] == "leaks" and (name not in leaks or _weight(cell, named) > _weight(leaks[name], named)):
            leaks[name] = cell
    return dict(sorted(leaks.items(), key=lambda entry: adversary_place(entry[0])))


def _weight(cell: Mapping[str, Any], named: Mapping[str, Any]) -> tuple[bool, float]:
    """The order of an adversary's leaks."""
    return named.get(str(cell["adversary"])) == cell["attack"], share_learned(cell)


def _settled(cells: Sequence[Mapping[str, Any]], adversary: str) -> bool:
    return all(cell["status"] in SETTLED for cell in cells if cell["adversary"] == adversary)


def _learns(audited: Audited, leak: Mapping[str, Any]) -> str:
    named = ((verdict["adversary"], verdict.get("attack"), verdict.get("learns")) for verdict in audited.verdicts)
    known = [words for adversary, attack, words in named if (adversary, attack) == (leak["adversary"], leak["attack"]) and words]
    words = audited.about.learns.get(str(leak["attack"]))
    return known[0] if known else words or f"something by {str(leak['attack']).replace('_', ' ')}"


def _figure(cell: Mapping[str, Any]) -> str:
    value, baseline = cell["value"], cell["baseline"]
    beside = "" if baseline is None else f", baseline {baseline:.2f}"
    return metric_words(cell) if value is None else f"{metric_words(cell)} {value:.2f}{beside}"


def _open_words(cells: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(attack_name(str(cell["attack"])) for cell in cells if cell["status"] not in SETTLED)
    return f"Open: {', '.join(list(names)[:4])}{', …' if len(names) > 4 else ''}." if names else ""


def _extent(audited: Audited) -> str:
    """How many attacks of the suite were run, and which adversaries were not tried."""
    run, left = audited.about.attacks_run, audited.about.attacks_left
    if left is None:
        return "It is not recorded which attacks were left out."
    seen = {str(cell["adversary"]) for cell in audited.cells or ()}
    untried = [adversary_words(name) for name in NEEDED if name not in seen]
    untried += [] if any("+" in name for name in seen) else ["a server that clients help"]
    nothing = sum(_found_nothing(audited, attack) for attack in run)
    words = f"{len(run)} of {counted(len(run) + len(left), 'attack')} {'was' if len(run) == 1 else 'were'} run"
    words += f"; {nothing} found nothing to read." if nothing else "."
    return f"{words} Not tried: {listed(untried)}." if untried else words


def _found_nothing(audited: Audited, attack: str) -> bool:
    """Whether no adversary's messages have what an attack reads."""
    statuses = {cell["status"] for cell in audited.cells or () if cell["attack"] == attack}
    return bool(statuses) and statuses <= {"not_applicable", "nothing_to_see"}


def leak_sentence(leaks: Answer, audited: Audited) -> str:
    if leaks.tone == "bad":
        to = leaks.verdict.removeprefix("Leaks to ")
        name, leak = next(iter(leaks_in(audited).items()))
        if "+" not in to:
            return f"{upper(adversary_words(name))} learns {_learns(audited, leak)}."
        helpers = name.partition("+")[2]
        helped = "a client helps" if helpers == "1" else f"{helpers} clients help"
        if audited.column == "none":
            return f"Once {helped} the server, both learn {_learns(audited, leak)}. Short of that, {_short_of_help(audited)}."
        return f"The protection fails once {helped} the server; short of that, {_short_of_help(audited)}."
    if leaks.verdict == "Nothing is sent":
        return "Nothing is sent, so nothing leaks."
    if leaks.verdict in ("Not tested", "Not known", "Evidence doubtful"):
        return "What leaks is not known."
    return (
        "No attack that was tested shows a leak, which is no proof."
        if leaks.tone == "open"
        else "The whole suite of attacks shows no leak, which is no proof."
    )


def _short_of_help(audited: Audited) -> str:
    """What an audit found of adversaries whom nobody helps, where none of these learns anything by it."""
    statuses = {cell["status"] for cell in audited.cells or () if "+" not in str(cell["adversary"])}
    if not statuses & {"at_baseline", "inconclusive", "not_validated"}:
        run = audited.about.attacks_run
        which = "attacks" if not run else "one attack" if len(run) == 1 else f"{counted_words(len(run)).lower()} attacks"
        return f"the {which} that ran cannot read what is sent"
    if statuses <= set(SETTLED) and audited.about.attacks_left == ():
        return "the attacks of the suite do no better than their baselines"
    return "no leak is seen, and not all is known"
