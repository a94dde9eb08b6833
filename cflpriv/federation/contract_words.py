"""A session contract in plain words: what a server may ask of a client, and what the server learns. This is what an operator signs off."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ..contract.protection import Protection
from ..contract.schedule import Leaving, Phase
from .client_contract import RETAKEN
from .contract_record import AgreedRequest, Contract, contract_bytes, contract_digest
from .release_policy import kinds_of
from .task_encoding import task_from_bytes

__all__ = ["contract_text"]

PHASES: dict[Phase, str] = {
    "start": "Once, before the first round",
    "round": "In every round, in any order",
    "joining": "When the client joins a run that goes on (the client cannot check why it is asked), in the whole run",
    "serving": "After a round, and once before the first, to score the model that clients would use",
}
OF_PRIVACY = ("relation",)
"""Fields of tasks that mean nothing without noise."""
UNITS = {"batch_size": "all samples"}
"""What a field says by being zero."""


def contract_text(contract: Contract) -> str:
    """The text of a contract, one fact a line."""
    protection = Protection(**{key: _loaded(value) for key, value in contract.protection})
    privacy = {key: json.loads(value) for key, value in contract.privacy}
    pinned = protection.secure or protection.transformed or protection.encrypted
    roster = contract.roster.hex() if contract.roster else "none"
    if pinned and not contract.roster:
        roster = "NONE: clients refuse this contract under their own roster; print it with --roster FILE"
    last = contract.rounds - 1
    lines = [
        f"contract   {contract_digest(contract_bytes(contract)).hex()}",
        f"run        {contract.run or '(no name)'}; seed {contract.seed} of the public randomness (not of masks or noise)",
        f"algorithm  {contract.algorithm}" + "".join(f", {key} = {value}" for key, value in contract.settings),
        f"rounds     at most {contract.rounds}, numbered 0 to {last}; some may be left out, none comes back; all in one session",
        f"roster     {roster}" + (" (SHA-256 of the clients' pinned keys)" if contract.roster else ""),
        "",
        "WHAT THE SERVER MAY ASK, AT MOST",
        *_asked(contract, protection, privacy),
        "",
        "HOW VALUES LEAVE",
        *_protected(contract, protection),
        *_private(contract, privacy),
        "",
        "WHAT THE SERVER LEARNS OF THIS CLIENT",
        *(f"  - {line}" for line in _learned(contract, protection, privacy)),
        "",
        "WHAT THE CONTRACT DOES NOT LIMIT",
        *(f"  - {line}" for line in _left_open(contract, protection, privacy)),
        "",
        "BEFORE YOU AGREE",
        *(f"  - {line}" for line in _before(contract, protection, privacy, pinned)),
    ]
    return "\n".join(lines) + "\n"


def _loaded(value: str) -> Any:
    loaded = json.loads(value)
    return tuple(loaded) if isinstance(loaded, list) else loaded


def _leaves(contract: Contract, way: Leaving) -> bool:
    return any(way in ways for agreed in contract.requests for _, ways in agreed.leaves)


def _asked(contract: Contract, protection: Protection, privacy: dict[str, Any]) -> Iterator[str]:
    """All requests, by phase."""
    for phase, when in PHASES.items():
        requests = [agreed for agreed in contract.requests if agreed.phase == phase]
        if not requests:
            continue
        yield f"  {when}:"
        for agreed in requests:
            task = task_from_bytes(agreed.task)
            chosen = f"; the server chooses {', '.join(agreed.varies)}" if agreed.varies else ""
            yield f"    {_number(agreed)} {_described(task, privacy)}{chosen}"
            if about := _about(task):
                yield f"      {about}"
            leaving = dict(agreed.leaves)
            for part in task.parts:
                if part in leaving:
                    yield f"      {part!r} {' and '.join(_way(way, protection) for way in leaving[part])}"
            kept = [repr(part) for part in task.parts if part not in leaving]
            if kept:
                yield f"      {', '.join(kept)} {'stays' if len(kept) == 1 else 'stay'} with the client"


def _number(agreed: AgreedRequest) -> str:
    most = agreed.times + (RETAKEN if agreed.phase == "joining" else 0)
    return "once:" if most == 1 else f"{most} times, with different parameters:"


def _way(way: Leaving, protection: Protection) -> str:
    match way:
        case "sum" if protection.secure:
            return "leaves masked: only a sum of several clients' can be read"
        case "sum":
            return (
                "goes to the server, which averages it" if not protection.sums.hides else "goes to the server transformed, to be averaged"
            )
        case "gram" if protection.comparison.hides:
            return f"leaves under {protection.comparison.name}, to be compared with other clients' values"
        case "gram":
            return "goes to the server, readable, to be compared with other clients' values"
        case "gather":
            return "is shown to the server as it is"
        case _:
            return "is sent to other clients, sealed"


def _described(task: Any, privacy: dict[str, Any]) -> str:
    """A task by its class and its fields, without those that are empty or have no effect; tasks and models inside it in parentheses."""
    shown = []
    for attribute in fields(task):
        value, name = getattr(task, attribute.name), attribute.name
        if is_dataclass(value):
            inside = _model(value) if type(value).__name__ == "Model" else _described(value, privacy)
            shown.append(f"{name}: {inside}")
        elif name in UNITS and not value:
            shown.append(f"{name}: {UNITS[name]}")
        elif value and not (name in OF_PRIVACY and privacy.get("unit") == "none"):
            shown.append(f"{name} = {_short(value)}")
    return f"{type(task).__name__}({', '.join(shown)})"


def _about(task: Any) -> str:
    """The first sentence of what a task says of itself."""
    sentence, _, _ = " ".join((type(task).__doc__ or "").split()).partition(". ")
    return sentence.rstrip(".") if not sentence.startswith(f"{type(task).__name__}(") else ""


def _model(model: Any) -> str:
    return f"{model.name} of {model.dimension:,} numbers, {model.dtype}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _protected(contract: Contract, protection: Protection) -> Iterator[str]:
    sums, smallest = protection.sums, protection.smallest_sum
    if _leaves(contract, "sum"):
        yield f"  sums         {protection.sum}: {sums.reveals}"
        if protection.secure:
            lies = "may lie" if protection.secagg_mode == "active" else "is trusted to follow the protocol"
            yield f"               the server {lies}; {smallest} clients at least are in a sum, none with nearly all of its weight"
            weight = f"its number of samples, at most {protection.max_weight:g}" if protection.max_weight else "as much as every other"
            yield f"               this client weighs {weight}; values are clipped at {protection.secagg_clip:g}"
            yield "               each value is in one sum only"
        elif smallest > 1:
            yield f"               {smallest} clients at least are in a sum"
        if protection.robust != "none":
            yield f"               {protection.robust}: sums are over random buckets of clients"
    if _leaves(contract, "gram"):
        yield f"  comparisons  {', '.join(protection.gram) or 'none'}: {protection.comparison.reveals}"


def _private(contract: Contract, privacy: dict[str, Any]) -> Iterator[str]:
    unit, noise = privacy.get("unit"), contract.noise
    if unit == "none":
        yield "  privacy      no noise is added: what leaves is exact"
        return
    whole = "one sample of this client, more or less or exchanged" if unit == "sample" else "this client as a whole"
    yield f"  privacy      epsilon {privacy['epsilon']:g}, delta {privacy['delta']:g} for {whole}, planned for this run"
    yield "               the client's own ledger, over all runs on its data, refuses more than its own settings allow"
    if noise is not None:
        yield (
            f"               this client adds the noise itself, in the private form of each task: clip {noise.clip_norm:g}, "
            f"{noise.training:.3g} x clip a step,"
        )
        yield f"               random batches of about {noise.sampling_rate * noise.samples:.0f} of {noise.samples:g} samples"


def _learned(contract: Contract, protection: Protection, privacy: dict[str, Any]) -> Iterator[str]:
    """What the server learns, in the order of the requests."""
    yield "when it takes part and when it drops out; its public keys"
    noisy = " (with noise)" if privacy.get("unit") != "none" else ""
    for agreed in contract.requests:
        for part, ways in agreed.leaves:
            for way in ways:
                task = task_from_bytes(agreed.task)
                yield f"{part!r} of {type(task).__name__}, {_times(contract, agreed)}: {_reading(way, part, agreed, protection)}{noisy}"
    if contract.weights == "examples" and not protection.secure:
        yield "its number of training samples, which the server may ask for with any sum"


def _times(contract: Contract, agreed: AgreedRequest) -> str:
    each = "" if agreed.times == 1 else f"{agreed.times} times "
    return {
        "start": f"{each}before the first round",
        "round": f"{each}in each of {contract.rounds} rounds",
        "joining": f"at most {agreed.times + RETAKEN} times when it joins",
        "serving": f"{each}after each of {contract.rounds} rounds and before the first",
    }[agreed.phase].strip()


def _reading(way: Leaving, part: str, agreed: AgreedRequest, protection: Protection) -> str:
    kind = kinds_of(task_from_bytes(agreed.task)).get(part, "summed")
    if way == "sum":
        if protection.secure:
            return f"the sum over {protection.smallest_sum} clients or more, not this client's"
        return "transformed" if protection.sums.hides else "this client's own, as it was computed"
    if way == "gram":
        return protection.comparison.reveals if protection.comparison.hides else "this client's own, as it was computed"
    if way == "relay":
        return "nothing, but other clients see the value" + ("" if protection.relay_updates or not protection.secure else " (refused here)")
    if kind == "choice":
        return "which of several models the client chose" + (": only how many chose each" if protection.sums.oblivious else "")
    if kind == "request":
        return "whose values the client asks for"
    words = {
        "count": "the number of samples",
        "confusion": "how many test samples of each class a model takes for which class, so also how many there are of each class",
    }
    return words.get(part, "the number itself, of the data at models that the server sends")


def _left_open(contract: Contract, protection: Protection, privacy: dict[str, Any]) -> Iterator[str]:
    yield "the models that are sent: a server can make them such that what it learns shows more than in an honest run"
    if protection.secure:
        yield (
            f"who is in a sum with this client: the server picks the clients, and if all others of {protection.smallest_sum} or more "
            "work with it, it has this client's value"
        )
        yield "nearly equal models in successive rounds over other clients: the difference of two sums shows what few clients contribute"
    if contract.models > 1:
        yield f"members of a sum may have been sent {contract.models} models: one of these can be meant for a single client"
    if protection.secure and protection.secagg_mode == "passive":
        yield "a server that does not follow the protocol"
    if privacy.get("unit") == "sample":
        yield "what holds for the client's data as a whole; the proof covers planned noise, not noise chosen by earlier releases"
    yield "other contracts that this client agrees to, and what it answers elsewhere"


def _before(contract: Contract, protection: Protection, privacy: dict[str, Any], pinned: bool) -> Iterator[str]:
    yield "write contract = \"DIGEST\" with the first line's digest into the client's settings file"
    yield (
        f"[protection] there: sum = {protection.sum!r}, gram = {list(protection.gram)}, the same mode and rule, and a minimum cohort size "
        f"of {protection.smallest_sum} or less"
    )
    if pinned:
        yield "compare the roster with the SHA-256 of your own roster file"
    if protection.secure or privacy.get("unit") != "none":
        yield "state = FOLDER keeps what was answered and spent; never set it back to a backup"
    shown = {
        part
        for agreed in contract.requests
        for part, ways in agreed.leaves
        if "gather" in ways and kinds_of(task_from_bytes(agreed.task)).get(part) in ("choice", "request", "score")
    }
    if shown and protection.sums.hides and privacy.get("unit") == "none" and not protection.sums.oblivious:
        yield f"allow_scores = true lets {', '.join(map(repr, sorted(shown)))} leave; without it the run ends"
    if privacy.get("unit") != "none":
        yield "your own [privacy] is what is enforced; its unit must be the same"
