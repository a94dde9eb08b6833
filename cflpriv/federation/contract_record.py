"""The session contract: what a client's operator agrees to, as a frozen record with canonical bytes and a digest.

A contract names one run: its algorithm with all that clients are asked for (`contract.schedule`), its number of rounds, the protection, the
privacy, and the pinned keys. The server sends it when a client enrols. The client's settings pin its digest or state limits, and the client
then refuses every request that is not in it (`client_contract`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

from ..contract.protection import Protection
from ..contract.schedule import EACH_ROUND, Leaving, Phase, Schedule, TaskRequest
from ..errors import InputError
from ..privacy.settings import Noise, Privacy
from ..protocols.errors import MalformedMessage
from ..protocols.keys import Roster
from . import messages as m
from .task_encoding import task_from_bytes, task_to_bytes

__all__ = ["AgreedRequest", "Contract", "contract_bytes", "contract_digest", "contract_from_bytes", "keys_that_differ", "make_contract"]

LARGEST_CONTRACT_BYTES = 1 << 18
MOST_REQUESTS, MOST_VARIES = 256, 32
"""A contract has so many requests at most, and a request so many fields that vary. Each is compared with every request of a server."""
Plain = tuple[tuple[m.Name, str], ...]
"""The keys of a section of the configuration, each value as JSON."""
ENFORCED = ("sum", "gram", "secagg_mode", "robust", "relay_updates", "max_weight")
"""Keys of `[protection]` in which a contract equals the client's own settings; its minimum cohort size is at least the client's own."""


class AgreedRequest(m.FederationMessage, frozen=True):
    """One `TaskRequest` of the schedule, with its phase. `task`: its bytes (`task_encoding`), which are decoded where they are needed: a
    client that only speaks the protocol loads no torch."""

    phase: Phase
    task: bytes
    leaves: tuple[tuple[m.Name, tuple[Leaving, ...]], ...]
    times: m.Count
    varies: tuple[m.Name, ...]

    def declared(self) -> TaskRequest:
        """The request as the algorithm declared it."""
        return TaskRequest(task_from_bytes(self.task), self.leaves, self.times, self.varies)


class Contract(m.FederationMessage, frozen=True):
    """What a server may ask of a client in one run.

    run, algorithm: their names. settings: the algorithm's hyper-parameters, for the operator who reads them. rounds: numbers from 0 on that
    the server may begin. seed: of the public randomness. requests: all tasks. models: how many models the members of one secure sum may
    have been sent. protection, privacy: the keys of these sections. noise: that of private tasks. roster: the digest of the pinned keys,
    empty without a roster. weights: whether a sum in the clear may ask for the number of training samples ("examples").
    """

    run: m.Name
    algorithm: m.Name
    settings: Plain
    rounds: m.Count
    seed: int
    requests: tuple[AgreedRequest, ...]
    models: m.Count
    protection: Plain
    privacy: Plain
    noise: m.NoisySteps | None
    roster: bytes
    weights: Literal["equal", "examples"] = "equal"

    @property
    def clip(self) -> float:
        """The clip of secure sums, `protection.secagg_clip`; 0 if that is no finite number above 0."""
        clip = _value(dict(self.protection).get("secagg_clip", "null"))
        return float(clip) if type(clip) in (int, float) and 0 < clip < float("inf") else 0.0


def make_contract(
    *, run: str, algorithm: str, settings: Mapping[str, Any], rounds: int, seed: int, schedule: Schedule, protection: Protection,
    privacy: Privacy, noise: Noise | None = None, roster: Roster | None = None,
    weights: Literal["equal", "examples"] = "equal",
) -> Contract:  # fmt: skip
    """The contract of a run. Raises `InputError` for a task or a setting that cannot be encoded, and for more than clients agree to."""
    requests = tuple(
        AgreedRequest(
            phase, task_to_bytes(asked.task), asked.leaves, max(1, rounds) if asked.times == EACH_ROUND else asked.times, asked.varies
        )
        for phase, asked in schedule.requests()
    )  # fmt: skip
    made = Contract(
        run, algorithm, _plain(settings), rounds, seed, requests, schedule.models, _plain(asdict(protection)), _plain(asdict(privacy)),
        None if noise is None else m.NoisySteps(**vars(noise)), b"" if roster is None else roster.digest, weights,
    )  # fmt: skip
    size = len(contract_bytes(made))
    if size > LARGEST_CONTRACT_BYTES or excess(made):
        raise InputError(f"the contract of algorithm {algorithm!r}: {excess(made) or f'it has {size} bytes of {LARGEST_CONTRACT_BYTES}'}")
    return made


def excess(contract: Contract) -> str:
    """In what a contract is more than a client agrees to, whatever its settings; empty if it is not."""
    if len(contract.requests) > MOST_REQUESTS:
        return f"it has {len(contract.requests)} requests, at most {MOST_REQUESTS} may be"
    if any(len(agreed.varies) > min(MOST_VARIES, len(set(agreed.varies))) for agreed in contract.requests):
        return f"fields of a request vary twice, or more than {MOST_VARIES} do"
    return ""


def contract_bytes(contract: Contract) -> bytes:
    """The canonical bytes of a contract."""
    return m.codec.encode(contract)


@lru_cache(maxsize=16)
def contract_digest(data: bytes) -> bytes:
    """SHA-256 of the canonical bytes of a contract, 32 bytes."""
    return sha256(data).digest()


@lru_cache(maxsize=16)
def contract_from_bytes(data: bytes) -> Contract:
    """The inverse of `contract_bytes`. Raises `MalformedMessage`."""
    return m.codec.decode(data, Contract, LARGEST_CONTRACT_BYTES)


@lru_cache(maxsize=16)
def keys_that_differ(data: bytes, protection: Protection, privacy: Privacy) -> tuple[str, ...]:
    """The keys in which a contract, by its canonical bytes, is not what a client's own settings demand, of those that clients enforce.

    Raises `MalformedMessage` for values that no section takes.
    """
    contract = contract_from_bytes(data)
    agreed = {key: _value(value) for key, value in contract.protection}
    unit = dict(contract.privacy).get("unit")
    keys = [key for key in ENFORCED if agreed.get(key) != _value(json.dumps(getattr(protection, key)))]
    lowest = agreed.get("min_cohort")
    if not isinstance(lowest, int) or (lowest or (3 if protection.secure else 1)) < protection.smallest_sum:
        keys.append("min_cohort")
    return (*(f"protection.{key}" for key in keys), *(() if unit == json.dumps(privacy.unit) else ("privacy.unit",)))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedMessage from None


def _plain(settings: Mapping[str, Any]) -> Plain:
    try:
        return tuple((key, json.dumps(value, sort_keys=True)) for key, value in sorted(settings.items()))
    except TypeError:
        raise InputError("contract: a setting of the algorithm is no plain value (number, text, list or table)") from None
