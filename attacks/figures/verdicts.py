"""One verdict an adversary: what an audit found that it learns, in a sentence with a number, and what would reduce it.

The sentence is of the leak nearest to knowing everything; of equal ones, of clients' data before who is alike. Where nothing leaks it says
how many figures show that, and what is open. "Not seen to learn anything" stands only where every figure is at its baseline, with power, or
where there is nothing to read.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...console import counted
from ...experiments.report.audit_words import CONDITIONAL, STATUS, attack_name, metric_words, remedy_of, share_learned
from ...experiments.report.run_names import adversary_place
from ...plugins import ATTACKS
from .family import Family
from .leakage import Cell

__all__ = ["Verdict", "audit_text", "colluders_of", "risk_words", "risks_of", "verdicts_of"]

SETTLED = ("at_baseline", "not_applicable", "nothing_to_see")
"""What an attack with power found at its baseline, and what is not there."""
RISKS = ("singling out", "linkability", "inference")
"""The three risks by which anonymity is judged (Article 29 Working Party, opinion 05/2014; EDPB, opinion 28/2024)."""
BY_WEIGHT = ("singling out", "inference", "linkability")
"""The risks, the heaviest first: data of one client, what follows from data, and who is alike."""
COLLUDING = ("sybil_span",)
"""Attacks whose known clients are colluders, drawn among the honest clients of a run."""
SPOKEN = {"client": "one client", "released": "whoever gets the released models"}
OPEN = ("evidence_doubtful", "inconclusive", "not_validated", "not_attempted")


@dataclass(frozen=True)
class Verdict:
    """What one `adversary` learns, for people. `attack` names that of the sentence, `learns` what it finds out; without a leak these and
    `reduces` are empty. `colluders` as in `colluders_of`, for that attack."""

    adversary: str
    sentence: str
    reduces: str = ""
    attack: str = ""
    learns: str = ""
    colluders: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def audit_text(cells: Sequence[Cell], family: Family, remedies: Mapping[str, str] | None = None, **more: Any) -> str:
    """audit.json: the `cells` of an audit, judged together, with their family and verdicts, and `more` tables.

    `remedies`: by attack, what the run's configuration accepts.
    """
    verdicts = [verdict.as_json() for verdict in verdicts_of(cells, remedies)]
    leaking = sorted({cell.attack for cell in cells if cell.status == "leaks"})
    learns = {name: entry.learns for name in leaking if (entry := ATTACKS.find(name)) is not None}
    tree = {"verdicts": verdicts, "learns": learns, "risks": risks_of(cells), "risk_words": risk_words(cells), **more}
    tree["family"] = family.as_json()
    return json.dumps(tree | {"cells": [{**cell.as_json(), "colluders": colluders_of(cell)} for cell in cells]}, indent=1) + "\n"


def colluders_of(cell: Cell) -> int:
    """How many clients a figure takes to collude beside the adversary's own: honest clients of the run, drawn for the attack."""
    return cell.k_known if cell.attack in COLLUDING else 0


def verdicts_of(cells: Sequence[Cell], remedies: Mapping[str, str] | None = None) -> list[Verdict]:
    """A verdict for each adversary of an audit's figures: who sees least comes first.

    `remedies`: by attack, what the run's configuration accepts; an attack that is not there has its own words.
    """
    names = sorted({cell.adversary for cell in cells}, key=adversary_place)
    return [_verdict(name, [cell for cell in cells if cell.adversary == name], remedies or {}) for name in names]


def risks_of(cells: Sequence[Cell]) -> dict[str, list[dict[str, Any]]]:
    """The leaks of an audit by what they are to data protection law, the strongest first; a risk without a leak has an empty list."""
    leaks = sorted((cell for cell in cells if cell.status == "leaks"), key=_strength, reverse=True)
    by_risk: dict[str, list[dict[str, Any]]] = {risk: [] for risk in RISKS}
    for cell in leaks:
        entry = ATTACKS.find(cell.attack)
        if entry is not None and entry.risk in by_risk:
            figure: dict[str, Any] = {"adversary": cell.adversary, "attack": cell.attack, "metric": cell.metric, "value": cell.value}
            figure |= {"lower_is_better": cell.lower_is_better, "k_known": cell.k_known, "colluders": colluders_of(cell)}
            by_risk[entry.risk].append({**figure, "baseline": cell.baseline})
    return by_risk


def risk_words(cells: Sequence[Cell]) -> dict[str, str]:
    """What an audit found of each risk, for people: the leaks, or how many figures are open, or that no attack was made."""
    words = {}
    for risk, leaks in risks_of(cells).items():
        own = [cell for cell in cells if getattr(ATTACKS.find(cell.attack), "risk", "") == risk]
        open_ = sum(cell.status in OPEN for cell in own)
        if leaks:
            words[risk] = f"leaks by {_named(leaks)}"
        elif not own:
            words[risk] = "not attacked"
        elif any(cell.status == "evidence_doubtful" for cell in own):
            words[risk] = "not known, because the evidence is doubtful"
        else:
            words[risk] = "none shown" + (f", {counted(open_, 'figure')} {'is' if open_ == 1 else 'are'} open" if open_ else "")
    return words


def _named(leaks: Sequence[Mapping[str, Any]]) -> str:
    """The attacks of leaks, each with its adversaries, who sees least first. Of several numbers of colluding clients the least is named."""
    fewest: dict[str, dict[str, int]] = {}
    for leak in leaks:
        known = fewest.setdefault(str(leak["attack"]).replace("_", " "), {})
        known[leak["adversary"]] = min(leak["colluders"], known.get(leak["adversary"], leak["colluders"]))
    return "; ".join(
        f"{attack} ({', '.join(_helped(name, known[name]) for name in sorted(known, key=adversary_place))})"
        for attack, known in fewest.items()
    )  # fmt: skip


def _helped(adversary: str, colluders: int) -> str:
    """An adversary for people, with the clients that an attack takes to collude beside its own."""
    if not colluders:
        return _spoken(adversary)
    return f"{_spoken(adversary)} {'and' if '+' in adversary else 'with'} {colluders} {'more ' * ('+' in adversary)}colluding clients"


def _verdict(adversary: str, cells: Sequence[Cell], remedies: Mapping[str, str]) -> Verdict:
    if doubtful := next((cell for cell in cells if cell.status == "evidence_doubtful"), None):
        return Verdict(adversary, f"the evidence is doubtful, so no attack was made and nothing is concluded: {doubtful.note}")
    leaks = sorted((cell for cell in cells if cell.status == "leaks"), key=_strength, reverse=True)
    if not leaks:
        settled = all(cell.status in SETTLED for cell in cells)
        words = "was not seen to learn anything:" if settled else "may learn more than this audit could show: nothing was seen to leak, but"
        return Verdict(adversary, f"{_spoken(adversary)} {words} {_counted(cells)}{_guaranteed(cells)}")
    worst = leaks[0]
    entry = ATTACKS.find(worst.attack)
    learned = CONDITIONAL.get(worst.metric) or (entry.learns if entry is not None else "") or attack_name(worst.attack)
    figure = f"{metric_words(worst.as_json())} {worst.value:.2f}, {_beside(worst)}"
    strongest = {cell.attack: cell for cell in reversed(leaks) if cell.attack != worst.attack}
    others = [_with_known(strongest[name]) for name in dict.fromkeys(cell.attack for cell in leaks) if name in strongest]
    more = f"; leaks also by {', '.join(others)}" if others else ""
    return Verdict(
        adversary, f"{_spoken(adversary)}{_known(worst)} learns {learned} ({figure}){more}{_guaranteed(cells)}",
        _reduced(leaks, remedies), worst.attack, learned, colluders_of(worst),
    )  # fmt: skip


def _reduced(leaks: Sequence[Cell], remedies: Mapping[str, str]) -> str:
    """What would reduce the leaks, for attacks that share a remedy together. An attack with several is named by its figures."""
    by_remedy: dict[str, list[Cell]] = {}
    for cell in leaks:
        entry = ATTACKS.find(cell.attack)
        words = remedy_of(remedies, cell.attack, cell.metric) or ("" if entry is None else entry.reduces)
        if words:
            by_remedy.setdefault(words, []).append(cell)
    if len(by_remedy) == 1:
        return next(iter(by_remedy))
    often = Counter(attack for cells in by_remedy.values() for attack in {cell.attack for cell in cells})

    def named(cell: Cell) -> str:
        attack = attack_name(cell.attack)
        return attack if often[cell.attack] == 1 else f"{attack} ({metric_words(cell.as_json())})"

    return "; ".join(f"{', '.join(dict.fromkeys(map(named, cells)))}: {words}" for words, cells in by_remedy.items())


def _known(cell: Cell) -> str:
    """Who colludes with an adversary, or whose data it knows, beside its own."""
    own = 1 if cell.adversary == "client" else int(cell.adversary.partition("+")[2] or 0)
    if cell.k_known <= own:
        return ""
    if colluders_of(cell):
        return f" with {cell.k_known}{' more' if own else ''} colluding clients"
    return f", which knows {cell.k_known} clients' data,"


def _with_known(cell: Cell) -> str:
    own = 1 if cell.adversary == "client" else int(cell.adversary.partition("+")[2] or 0)
    helped = "colluding" if cell.attack in COLLUDING else "known"
    return attack_name(cell.attack) + (f" (with {cell.k_known} {helped} clients)" if cell.k_known > own else "")


def _guaranteed(cells: Sequence[Cell]) -> str:
    """That the claimed ε stood its test, with the bound beside the claim, as the end of a sentence; "" where none was tested.

    A claim has stood only a test that would have shown too little noise (`at_baseline`). Any other test left it open.

    Of the whole run, or else of the release with the bound that is nearest to its claim.
    """
    bounds = [cell for cell in cells if cell.metric.endswith("_epsilon") and cell.value is not None and cell.status != "leaks"]
    shown = [(cell.value / cell.baseline, cell) for cell in bounds if cell.value is not None and cell.baseline]
    if not shown:
        return ""
    cell = max(shown, key=lambda pair: (pair[1].metric == "run_epsilon", pair[0]))[1]
    of = f" ({cell.towards})" if cell.towards else ""
    power = "" if cell.power is None else f"; had it had .7 of its noise, this audit would have shown that in {cell.power:.0%}"
    words = "stood its test" if cell.status == "at_baseline" else "was not refuted, by a test that leaves it open"
    return (
        f"; the claimed privacy {words}: the epsilon of the {cell.metric.removesuffix('_epsilon').replace('_', ' ')} is "
        f"{cell.value:.2f} at least (97.5 % confidence), and {cell.baseline:.2f} is claimed{of}{power}"
    )


def _spoken(adversary: str) -> str:
    """An adversary for people: "the server", "the server with 2 colluding clients"."""
    if adversary in SPOKEN:
        return SPOKEN[adversary]
    name, _, colluders = adversary.partition("+")
    return f"the {name.replace('-', ' ')}" + (f" with {colluders} colluding client{'' if colluders == '1' else 's'}" if colluders else "")


def _beside(cell: Cell) -> str:
    if cell.metric.endswith("_epsilon"):
        return f"where {cell.baseline:.2f} is claimed"
    return f"baseline {cell.baseline:.2f}"


def _strength(cell: Cell) -> tuple[bool, float, int, float]:
    """The order of leaks: first those that need no colluders but the adversary's own. Of leaks that are equal to a tenth of all, those of
    clients' data come before who is alike."""
    share, entry = share_learned(cell.as_json()), ATTACKS.find(cell.attack)
    risk = entry.risk if entry is not None else ""
    return colluders_of(cell) == 0, round(share, 1), -BY_WEIGHT.index(risk) if risk in BY_WEIGHT else -len(BY_WEIGHT), share


def _counted(cells: Sequence[Cell]) -> str:
    """How many figures have which status, and which attacks leave a question open."""
    counts = Counter(cell.status for cell in cells)
    words = ", ".join(f"{counts[status]} {word}" for status, word in STATUS.items() if counts[status])  # type: ignore[index]
    open_ = [attack_name(name) for name in dict.fromkeys(cell.attack for cell in cells if cell.status in OPEN)]
    return f"{words} of {counted(len(cells), 'figure')}" + (f"; open: {', '.join(open_)}" if open_ else "")
