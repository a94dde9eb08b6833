"""A session contract in plain words: what a server may ask of a client, and what the server learns. This is what an operator signs off."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ..contract.protection import Protection
from ..contract.schedule import Leaving, Phase
from .contract_record import AgreedRequest, Contract, contract_bytes, contract_digest
from .release_policy import kinds_of
from .task_encoding import task_from_bytes

__all__ = ["contract_text"]

PHASES: dict[Phase, str] = {
    "start": "Once, before the first round",
    "round": "In every round",
    "joining": "When the client joins a run that goes on: once in the whole run, or at most five times more where that failed",
    "serving": "After a round, to score the model in use",
}
LEAVING: dict[Leaving, str] = {
    "sum": "summed with other clients' values",
    "gram": "compared with other clients' values",
    "gather": "shown to the server as it is",
    "relay": "sent to other clients, sealed",
}


def contract_text(contract: Contract) -> str:
    """The text of a contract, one fact a line."""
    protection = Protection(**{key: _loaded(value) for key, value in contract.protection})
    privacy = {key: json.loads(value) for key, value in contract.privacy}
    lines = [
        f"contract   {contract_digest(contract_bytes(contract)).hex()}",
        f"run        {contract.run or '(no name)'}, seed {contract.seed}",
        f"algorithm  {contract.algorithm}" + "".join(f", {key} = {value}" for key, value in contract.settings),
        f"rounds     {contract.rounds}, numbered 0 to {contract.rounds - 1}; each once, in this order, in one session",
        f"clients    {'those on the roster ' + contract.roster.hex() if contract.roster else 'no roster of pinned keys'}",
        "",
        "WHAT THE SERVER MAY ASK",
        *_asked(contract),
        "",
        "HOW VALUES LEAVE",
        *_protected(protection),
        *_private(privacy),
        "",
        "WHAT THE SERVER LEARNS OF THIS CLIENT",
        *(f"  - {line}" for line in _learned(contract, protection, privacy)),
        "",
        "WHAT THE CONTRACT DOES NOT LIMIT",
        *(f"  - {line}" for line in _left_open(contract, protection, privacy)),
    ]
    return "\n".join(lines) + "\n"


def _loaded(value: str) -> Any:
    loaded = json.loads(value)
    return tuple(loaded) if isinstance(loaded, list) else loaded


def _asked(contract: Contract) -> Iterator[str]:
    """All requests, by phase."""
    for phase, when in PHASES.items():
        requests = [agreed for agreed in contract.requests if agreed.phase == phase]
        if not requests:
            continue
        yield f"  {when}:"
        for agreed in requests:
            times = "" if agreed.times == 1 else f" ({agreed.times} times, with different parameters)"
            chosen = f"; the server chooses {', '.join(agreed.varies)}" if agreed.varies else ""
            yield f"    {_described(task_from_bytes(agreed.task))}{times}{chosen}"
            leaving = dict(agreed.leaves)
            for part in task_from_bytes(agreed.task).parts:
                if part in leaving:
                    yield f"      {part!r} is {' and '.join(LEAVING[way] for way in leaving[part])}"
            kept = [repr(part) for part in task_from_bytes(agreed.task).parts if part not in leaving]
            if kept:
                yield f"      {', '.join(kept)} {'stays' if len(kept) == 1 else 'stay'} with the client"


def _described(task: Any) -> str:
    """A task by its class and its fields, without those that are empty or zero; tasks and models inside it in parentheses."""
    shown = []
    for attribute in fields(task):
        value = getattr(task, attribute.name)
        if is_dataclass(value):
            shown.append(f"{attribute.name}: {_model(value) if type(value).__name__ == 'Model' else _described(value)}")
        elif value:
            shown.append(f"{attribute.name} = {_short(value)}")
    return f"{type(task).__name__}({', '.join(shown)})"


def _model(model: Any) -> str:
    return f"{model.name} of {model.dimension:,} numbers, {model.dtype}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _protected(protection: Protection) -> Iterator[str]:
    sums, comparison = protection.sums, protection.comparison
    yield f"  sums         {protection.sum}: {sums.reveals}"
    if protection.secure:
        server = "may lie" if protection.secagg_mode == "active" else "follows the protocol, but is curious"
        yield f"               the server {server}; at least {protection.smallest_sum} clients are in a sum, also counted by their weights"
        weights = f"its number of samples, at most {protection.max_weight:g}" if protection.max_weight else "the same as every other client"
        yield f"               this client weighs {weights}; each value is in one sum only"
    elif protection.smallest_sum > 1:
        yield f"               at least {protection.smallest_sum} clients are in a sum"
    if protection.robust != "none":
        yield f"               {protection.robust}: sums are over random buckets of clients"
    yield f"  comparisons  {', '.join(protection.gram) or 'none'}: {comparison.reveals}"


def _private(privacy: dict[str, Any]) -> Iterator[str]:
    unit = privacy.get("unit")
    if unit == "none":
        yield "  privacy      no noise is added: what leaves is exact"
        return
    whole = "one sample of this client" if unit == "sample" else "this client as a whole"
    yield f"  privacy      epsilon {privacy['epsilon']:g}, delta {privacy['delta']:g} for {whole}, over the run"


def _learned(contract: Contract, protection: Protection, privacy: dict[str, Any]) -> Iterator[str]:
    """What the server learns, in the order of the requests."""
    yield "when it takes part and when it drops out; its public keys"
    for agreed in contract.requests:
        times = _times(contract, agreed)
        for part, ways in agreed.leaves:
            for way in ways:
                yield f"{part!r} of {type(task_from_bytes(agreed.task)).__name__}, {times}: {_reading(way, part, agreed, protection)}"
    if privacy.get("unit") != "none":
        yield "all of this with the noise of the privacy above, which bounds what can be concluded"


def _times(contract: Contract, agreed: AgreedRequest) -> str:
    each = "" if agreed.times == 1 else f"{agreed.times} times "
    return {
        "start": f"{each or 'once '}before the first round",
        "round": f"{each}in each of {contract.rounds} rounds",
        "joining": f"{each}if it joins later",
        "serving": f"{each}after each of {contract.rounds} rounds",
    }[agreed.phase].strip()


def _reading(way: Leaving, part: str, agreed: AgreedRequest, protection: Protection) -> str:
    kind = kinds_of(task_from_bytes(agreed.task)).get(part, "summed")
    if way == "sum":
        if protection.secure:
            return f"only the sum over at least {protection.smallest_sum} clients"
        return protection.sums.reveals
    if way == "gram":
        return protection.comparison.reveals
    if way == "relay":
        return "nothing, but other clients see the value" + ("" if protection.relay_updates or not protection.secure else " (refused here)")
    if kind == "choice":
        return "which of several models the client chose" + (": only how many chose each" if protection.sums.oblivious else "")
    if kind == "request":
        return "whose values the client asks for"
    return "the numbers themselves, computed at models that the server sends"


def _left_open(contract: Contract, protection: Protection, privacy: dict[str, Any]) -> Iterator[str]:
    noisy = privacy.get("unit") != "none"
    if not noisy:
        yield "the models that are sent: a server can make them such that a sum, a score or a choice shows more than an honest one would"
        yield "what is concluded from exact results: sums of similar groups in successive rounds differ by what few clients contribute"
    if contract.models > 1:
        yield f"members of a sum may have been sent {contract.models} models: one of these can be meant for a single client"
    if protection.secure and protection.secagg_mode == "passive":
        yield "a server that does not follow the protocol"
    yield "other contracts that this client agrees to, and what it answers elsewhere"
