"""A session contract in plain words: what a server may ask of a client, and what the server learns. This is what an operator signs off."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from ..contract.protection import Protection
from ..contract.schedule import Leaving, Phase
from ..privacy.settings import Privacy
from .client_contract import RETAKEN
from .contract_record import AgreedRequest, Contract, contract_bytes, contract_digest
from .release_policy import kinds_of
from .task_encoding import task_from_bytes

__all__ = ["contract_text"]

PHASES: dict[Phase, str] = {
    "start": "Before the first round",
    "round": "In every round, in any order",
    "joining": "In addition, at any time, as if the client joined late (it cannot check why it is asked)",
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
    roster = f"{contract.roster.hex()} (SHA-256 of the clients' pinned keys)" if contract.roster else "no keys are pinned; none need be"
    if pinned and not contract.roster:
        roster = "MISSING: no client agrees to this contract; print it again with --roster FILE, which changes the first line"
    last = contract.rounds - 1
    lines = [
        f"contract   {contract_digest(contract_bytes(contract)).hex()}",
        f"run        {contract.run or '(no name)'}; seed {contract.seed} of public randomness (not of masks, noise, rotations)",
        f"algorithm  {contract.algorithm}" + "".join(f", {key} = {value}" for key, value in contract.settings),
        f"rounds     at most {contract.rounds}, numbered 0 to {last}; some may be skipped, none asked again; in one run of the server",
        f"roster     {roster}",
        "",
        "WHAT THE SERVER MAY ASK, AT MOST",
        *_asked(contract, protection, privacy),
        "",
        "HOW VALUES LEAVE",
        *_protected(contract, protection),
        *_private(contract, privacy, protection),
        "",
        "WHAT THE SERVER LEARNS OF THIS CLIENT",
        *(f"  - {line}" for line in _learned(contract, protection, privacy)),
        "",
        "WHAT THE CONTRACT DOES NOT LIMIT",
        *(f"  - {line}" for line in _left_open(contract, protection, privacy)),
        "",
        "BEFORE YOU AGREE",
        *(f"  - {line}" for line in _before(contract, privacy)),
        "",
        "SETTINGS FILE OF A CLIENT THAT ANSWERS THIS CONTRACT AND NO OTHER",
        *(f"  {line}" if line else "" for line in _settings(contract, protection, privacy, pinned)),
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
    if agreed.phase == "joining":
        honest = "once" if agreed.times == 1 else f"{agreed.times} times"
        return f"at most {most} times (an honest server asks a client that joins late alone, {honest}, and again where an answer was lost):"
    return "once:" if most == 1 else f"{most} times, each with other values for what the server sends, such as models:"


def _way(way: Leaving, protection: Protection) -> str:
    match way:
        case "sum" if protection.secure:
            return "leaves masked: the server reads a sum of several clients' values"
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
    shown, about = [], _about(task)
    for attribute in fields(task):
        value, name = getattr(task, attribute.name), attribute.name
        if is_dataclass(value):
            inside = _model(value) if type(value).__name__ == "Model" else _described(value, privacy)
            shown.append(f"{name}: {inside}")
        elif name in UNITS and not value:
            shown.append(f"{name}: {UNITS[name]}")
        elif (value or f"`{name}`" in about) and not (name in OF_PRIVACY and privacy.get("unit") == "none"):
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
            whom = "deviates from the protocol, too" if protection.secagg_mode == "active" else "follows the protocol"
            yield f"               this holds for a server that {whom}; {smallest} clients at least are in a sum, this client among them"
            if sums.helped:
                few = f"{protection.helpers_colluding} of {protection.helpers} helpers may work with that server, and any clients"
                yield f"               {few}; one helper more, and it reads this client's values"
            by_samples = f"by their samples, at most {protection.max_weight:g}; no client has nearly all of the weight"
            yield f"               clients weigh {by_samples if protection.max_weight else 'equally'}"
            yield f"               each number of a value is clipped to ±{protection.secagg_clip:g}; each value is in one sum only"
        elif smallest > 1:
            yield f"               {smallest} clients at least are in a sum"
        if protection.robust != "none":
            yield f"               {protection.robust}: sums are over random buckets of clients"
    if _leaves(contract, "gram"):
        yield f"  comparisons  {', '.join(protection.gram) or 'none'}: {protection.comparison.reveals}"


def _private(contract: Contract, privacy: dict[str, Any], protection: Protection) -> Iterator[str]:
    unit, noise = privacy.get("unit"), contract.noise
    if unit == "none":
        yield "  privacy      no noise is added: what the server reads, also of sums, is exact"
        return
    whole = "one sample of this client, more or less or exchanged" if unit == "sample" else "this client as a whole"
    yield f"  privacy      epsilon {privacy['epsilon']:g}, delta {privacy['delta']:g} for {whole}: the server's plan for this run"
    yield "               enforced are those of the client's own settings, over all runs with its state folder: its ledger refuses more"
    if unit == "client":
        yield f"               an update, as a single vector, is scaled to a norm of {privacy['clip_norm']:g} at most before it is summed"
        if sums := _leaves(contract, "sum"):
            added = "THE SERVER adds the noise to sums, which no client can check: it protects from everybody but the server"
            if protection.sums.helped:
                some = f"{protection.helpers_colluding} of the helpers among them"
                added = f"the helpers add the noise to sums: it protects from everybody, {some}"
            elif protection.secure:
                added = "each member of a sum adds a share of the noise before it masks: it protects from everybody, as far as members do"
            yield f"               {added}"
        if "gram" in privacy["local"]:
            rows = "to rows that are compared this client" if sums else "this client"
            yield f"               {rows} adds the noise itself: it protects from everybody"
    if noise is not None:
        who = "the members of a sum add the noise together" if noise.shares else "this client adds the noise itself"
        whom = "from everybody, as far as members add theirs" if noise.shares else "from everybody"
        if noise.shares and protection.sums.helped:
            who, whom = "the helpers add the noise to sums", f"from everybody, {protection.helpers_colluding} of the helpers among them"
        yield f"               {who}, in the private form of each task: it protects {whom};"
        batches = f"random batches of about {noise.sampling_rate * noise.samples:.0f} of {noise.samples:g} samples"
        if noise.allocated:
            batches += ", each sample in one of them a pass"
        yield f"               clip {noise.clip_norm:g}, {noise.training:.3g} x clip a step, {batches}"


def _learned(contract: Contract, protection: Protection, privacy: dict[str, Any]) -> Iterator[str]:
    """What the server learns, in the order of the requests."""
    yield "when it takes part and when it drops out; its public keys"
    for agreed in contract.requests:
        for part, ways in agreed.leaves:
            for way in ways:
                task = task_from_bytes(agreed.task)
                reading = _reading(way, part, agreed, protection) + _noisy(way, protection, privacy)
                yield f"{part!r} of {type(task).__name__}, {_times(contract, agreed)}: {reading}"
    if contract.weights == "examples" and not protection.secure:
        yield "its number of training samples, which the server may ask for with any sum"


def _noisy(way: Leaving, protection: Protection, privacy: dict[str, Any]) -> str:
    """Whether what leaves in this way has noise when the server reads it."""
    if privacy.get("unit") == "none":
        return ""
    if privacy["unit"] == "client" and way == "sum":
        if protection.sums.helped:
            return ", with the helpers' noise"
        return ", with noise of all its members" if protection.secure else "; WITHOUT noise, which the server adds to the sum"
    return ", with noise"


def _times(contract: Contract, agreed: AgreedRequest) -> str:
    each = "" if agreed.times == 1 else f"{agreed.times} times "
    return {
        "start": f"{each}before the first round",
        "round": f"{each}in each of {contract.rounds} rounds at most",
        "joining": f"at most {agreed.times + RETAKEN} times when it joins",
        "serving": f"{each}after each of {contract.rounds} rounds and before the first",
    }[agreed.phase].strip()


def _reading(way: Leaving, part: str, agreed: AgreedRequest, protection: Protection) -> str:
    kind = kinds_of(task_from_bytes(agreed.task)).get(part, "summed")
    if way == "sum":
        if protection.secure:
            return f"the sum over {protection.smallest_sum} clients or more, not this client's alone"
        return "transformed" if protection.sums.hides else "this client's own"
    if way == "gram":
        alike = ", so how alike this client is to each other client"
        return protection.comparison.reveals + alike if protection.comparison.hides else "this client's own"
    if way == "relay":
        return "nothing, but other clients see the value" + ("" if protection.relay_updates or not protection.secure else " (refused here)")
    if kind == "choice":
        return (
            "how many chose each model of a list" if protection.sums.oblivious else "which model of a list it chose, in the end its cluster"
        )
    if kind == "request":
        return "whose values the client asks for"
    words = {
        "count": "the number of samples",
        "confusion": "how many test samples of each class a model takes for which class, so also how many there are of each class",
        "errors": "sums over the test samples of labels, predictions, errors and their squares",
    }
    return words.get(part, "the number itself, of the data at models that the server sends")


def _left_open(contract: Contract, protection: Protection, privacy: dict[str, Any]) -> Iterator[str]:
    yield "which models are sent: a server that lies can choose them such that the answers show more of this client's data" + (
        "; epsilon and delta hold whatever it sends" if contract.noise is not None and not contract.noise.shares else ""
    )
    alone = ", with the helpers' noise" if protection.sums.helped else ", with its own share of the noise alone"
    own = {"client": alone, "sample": ", with noise"}.get(privacy.get("unit", ""), "")
    if protection.transformed and (_leaves(contract, "gram") or not protection.secure):
        parts = "every client's values that are compared" if protection.secure else "every client's values"
        yield f"who works with the server: a single client that does so gives away the shared rotation, and with it {parts}"
    if privacy.get("unit") == "client" and not protection.secure:
        yield "whether the server adds the noise, and whom it shows this client's values; the ledger counts what the noise would cost"
    if protection.secure:
        yield (
            "who is in a sum with this client: the server picks the clients, and if all other members "
            f"work with it, it has this client's value{own}"
        )
        within = ", up to the noise" if privacy.get("unit") != "none" else ""
        yield f"nearly equal models in successive rounds, over groups that differ in few clients: their difference shows these{within}"
    if contract.models > 1:
        yield f"members of a sum may have been sent {contract.models} models: one of these can be meant for a single client"
    if protection.secure and protection.secagg_mode == "passive":
        yield "a server that does not follow the protocol"
    if privacy.get("unit") == "sample":
        yield "what holds for the client's data as a whole; the proof covers planned noise, not noise chosen by earlier releases"
    yield "other contracts that this client agrees to, and what it answers elsewhere"


def _before(contract: Contract, privacy: dict[str, Any]) -> Iterator[str]:
    yield "read which of the client's values the server sees by themselves, and what is not limited"
    yield "to agree is to write the lines below, with your own paths, into the client's settings file"
    if contract.roster:
        yield "compare the roster with the SHA-256 of the roster file that the other operators gave you, not the server"
    if privacy.get("unit") != "none":
        yield "choose your own epsilon and delta, of all runs ever; if less than the plan is left, the client leaves the run early"


def _settings(contract: Contract, protection: Protection, privacy: dict[str, Any], pinned: bool) -> Iterator[str]:
    """The lines of a settings file, but for its paths."""
    yield 'identity = "FILE"  # this client\'s keys'
    if pinned or contract.roster:
        yield 'roster = "FILE"  # of all clients\' public keys'
    if protection.secure or privacy.get("unit") != "none":
        yield 'state = "FOLDER"  # what was answered and spent: the same for all runs, never restored from a backup'
    yield f'contract = "{contract_digest(contract_bytes(contract)).hex()}"'
    if contract.models > 1:
        yield f"models = {contract.models}"
    shown = {
        part
        for agreed in contract.requests
        for part, ways in agreed.leaves
        if "gather" in ways and kinds_of(task_from_bytes(agreed.task)).get(part) in ("choice", "request", "score")
    }
    if shown and protection.sums.hides and privacy.get("unit") == "none" and not protection.sums.oblivious:
        yield f"allow_scores = true  # lets {', '.join(map(repr, sorted(shown)))} leave; without it the client refuses and the run ends"
    yield from ("", "[protection]", f"sum = {json.dumps(protection.sum)}", f"gram = {json.dumps(protection.gram)}")
    if protection.smallest_sum > 1:
        yield f"min_cohort = {protection.smallest_sum}  # of clients in a sum; a larger number makes the client refuse this contract"
    yield from _keys(Protection, vars(protection), ("sum", "gram", "min_cohort"))
    if privacy.get("unit") != "none":
        limit = "# your limit over all runs ever; at this number for this run and nothing after it"
        spent = (f"epsilon = {privacy['epsilon']!r}  {limit}", f"delta = {privacy['delta']!r}  # as epsilon")
        yield from ("", "[privacy]", *spent, *_keys(Privacy, privacy, ("epsilon", "delta")))


def _keys(section: Any, values: dict[str, Any], without: tuple[str, ...]) -> Iterator[str]:
    """The keys of a section that are not at their defaults."""
    for attribute in fields(section):
        value, default = values[attribute.name], attribute.default
        if default is MISSING and attribute.default_factory is not MISSING:
            default = attribute.default_factory()
        if attribute.name not in without and value != default and value != (list(default) if isinstance(default, tuple) else default):
            yield f"{attribute.name} = {json.dumps(value)}"
