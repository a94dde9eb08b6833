"""A client's part in secure sums: its machine between two messages, what it brings, and the share of noise it adds."""

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from ..channels import MOST_WEIGHT
from ..client_level import BETA, share
from ..protocols import secagg
from ..protocols.entropy import Entropy
from ..protocols.errors import LocalError, MalformedMessage, RemoteError
from ..protocols.keys import Roster
from ..protocols.mechanisms import SkellamPlan
from ..protocols.secagg import MaskKey, Policy
from ..protocols.secagg.messages import survivor_floor
from ..types import check_array
from . import messages as m
from . import releases
from .settings import Settings
from .spending import Spending
from .store import Store
from .values import UNTRACED, Values

__all__ = ["FEWEST_LEVELS", "Summing", "balanced", "bound", "weighed"]

FEWEST_LEVELS = 64
"""A weight quantised to fewer levels distorts its client's share by more than about one per cent."""


class Summing:
    """The secure sums of one client. `samples` gives its number of samples, which only weighted sums ask for."""

    def __init__(
        self, settings: Settings, store: Store, values: Values, spending: Spending, entropy: Entropy,
        allowed: Callable[[releases.Verb, int, tuple[str, ...]], dict[str, Any]],
    ) -> None:  # fmt: skip
        self._settings, self._store, self._values, self._spending, self._entropy = settings, store, values, spending, entropy
        self._allowed = allowed

    def step(self, ask: m.Step, samples: Callable[[], int]) -> m.Stepped:
        """One message of a sum, and the client's answer."""
        settings = self._settings
        wanted = "secagg" if ask.kind == "sum" else "secagg-oblivious"
        if settings.protection.sum != wanted:
            raise RemoteError("forbidden")
        name = f"sum/{ask.slot[0]}.{ask.slot[1]}"
        read = partial(secagg.Client.from_bytes, identity=settings.identity, roster=self._roster(), entropy=self._entropy)
        machine = self._store.load(name, read) or self._machine(ask)
        contributions: list[secagg.Contribution] = []
        if machine.wants_values and kind_of(ask.said) == "Deliver":
            contributions = self._contributions(ask, machine, samples)
        try:
            said = machine.receive(ask.said, *contributions)
        except LocalError:  # it is dead, and its secrets are gone
            self._store.drop(name)
            raise
        following = machine.next_mask_key()
        if following is not None:
            self._store.put(f"mask/{following.slot[0]}.{following.slot[1]}", following.to_bytes())
        if machine.stage is secagg.ClientStage.DONE:
            self._store.drop(name)
        else:
            self._store.keep(name, machine, secagg.Client.to_bytes)
        return m.Stepped(said)

    def _roster(self) -> Roster | None:
        return self._settings.roster if self._settings.protection.secagg_mode == "active" else None

    def _machine(self, ask: m.Step) -> secagg.Client:
        """A machine for a new sum; what was left of earlier ones is dropped."""
        protection = self._settings.protection
        last = self._store.get("last-slot")
        after = None if last is None else (int.from_bytes(last[:8], "big"), int.from_bytes(last[8:], "big"))
        if after is not None and ask.slot <= after:
            raise RemoteError("old-slot")
        session = self._store.get("session") or b""
        policy = Policy(session, protection.secagg_mode, self._named(ask), ask.models, protection.smallest_sum, after, None)
        name = f"mask/{ask.slot[0]}.{ask.slot[1]}"
        kept = self._store.get(name)
        key = None if kept is None else MaskKey.from_bytes(kept)
        if key is not None:
            self._store.drop(name)  # before it is used: it serves once
            if kind_of(ask.said) == "Invite":  # who is invited again was not heard: the key that it advertised is used for nothing
                key = None
        for other in self._store.names():
            if other.startswith("sum/"):
                self._store.drop(other)
            if other.startswith("mask/") and tuple(int(part) for part in other[5:].split(".")) < ask.slot:
                self._store.drop(other)
        self._store.put("last-slot", ask.slot[0].to_bytes(8, "big") + ask.slot[1].to_bytes(8, "big"))
        return secagg.Client(self._settings.identity, policy, roster=self._roster(), mask_key=key, entropy=self._entropy)

    def _named(self, ask: m.Step) -> bytes:
        """What a sum says of this client's part in it. "forbidden" for one of too many kinds, or that no sum can be bound to."""
        received = self._values.origin(ask.held).received
        if not 1 <= ask.models <= self._settings.models or (received == UNTRACED and self._settings.protection.secagg_mode == "active"):
            raise RemoteError("forbidden")
        return bound(ask, received)

    def _contributions(self, ask: m.Step, machine: secagg.Client, samples: Callable[[], int]) -> list[secagg.Contribution]:
        """What this client brings; its own ledger is asked first."""
        terms = machine.terms
        assert terms is not None
        if self._named(ask) != machine.policy.model:  # all were shown the name, so what it is of must not change
            raise RemoteError("unlisted-model")
        labels: tuple[int, ...] = (0,)
        if isinstance(ask.groups, m.Picks) and ask.groups.labels != labels:  # a block that the server chose might be this client's alone
            raise RemoteError("forbidden")
        protection = self._settings.protection
        if isinstance(ask.groups, m.Mine):
            chosen = self._allowed("sum", ask.groups.held, (ask.groups.part,))
            labels = tuple(int(label) for label in np.ravel(np.asarray(chosen[ask.groups.part])))
        values = {} if ask.kind == "counts" else self._allowed("sum", ask.held, ask.parts)
        vector = np.concatenate([np.zeros(0), *(np.ravel(np.asarray(value)).astype(np.float64) for value in values.values())])
        if isinstance(ask.groups, m.Mine):
            self._spending.settle(ask.groups.held, (ask.groups.part,), "mean")
        if ask.kind == "counts":
            if any(not 0 <= label < terms.dimension for label in labels):
                raise RemoteError("bad-input")
            self._spending.shares(None, 0, 0, False)
            return [secagg.membership(terms.dimension, labels)]
        if not ask.weight and self._spending.unit != "none":
            raise RemoteError("forbidden")
        self._spending.settle(ask.held, ask.parts, "mean")
        plan = None if ask.noise is None else plan_of(ask.noise, len(vector))
        self._spending.shares(plan, protection.smallest_sum, terms.levels, terms.weight_limit > 0)
        check_array(f"client {self._settings.identity.client}: {'+'.join(ask.parts)}", vector)  # reported after it was paid for
        if not weighed(ask.weight, terms, protection.max_weight):
            raise RemoteError("bad-terms")
        weight = ask.weight or float(samples())
        self._check_weight(weight, terms)
        if plan is not None and ask.noise is not None:
            return [secagg.Contribution(share(vector, plan, ask.noise.seed, terms.levels, self._entropy), weight)]
        if ask.kind == "sum":
            return [secagg.Contribution(vector, weight)]
        return [secagg.Contribution(vector, weight, label) for label in labels]

    def _check_weight(self, weight: float, terms: secagg.Terms) -> None:
        """Raises `RemoteError` "bad-terms" for a weight above the limit, or so far below that rounding would make another of it."""
        limit, why = terms.weight_limit, ""
        if limit and weight > limit:
            why = f"its weight is above protection.max_weight = {limit:g}; that maximum is public and must hold for all"
        elif limit and weight / limit * terms.levels < FEWEST_LEVELS:
            why = (
                f"its weight is below {FEWEST_LEVELS} of the {terms.levels} levels up to max_weight = {limit:g}; lower "
                "protection.max_weight, or use secagg_bits = 32"
            )
        if why:
            error = RemoteError("bad-terms")
            error.add_note(why)
            raise error


def bound(ask: m.Step, received: bytes) -> bytes:
    """What a sum binds to: what is added up, in which form and with which noise, and the name of all that it was computed from.

    Whoever is told something else than the others, and so might stand alone in a sum of what is nothing or known, has another name.
    """
    alike = msgspec.structs.replace(ask, slot=(0, 0), weight=0.0, models=0, said=b"")
    return sha256(received + m.encode(alike)).digest()


def weighed(weight: float, terms: secagg.Terms, max_weight: float) -> bool:
    """Whether a client may go into a sum with the `weight` that it is told (0: its own sample count).

    It is told its own only, and a server that lies could give one update all of the weight. So what all are shown decides: under the limit
    `max_weight` of their own settings all weigh by their counts, and under another all are told weights, which must be `balanced`.
    """
    if terms.weight_limit == max_weight or not weight:
        return terms.weight_limit == max_weight and (not weight or not max_weight)
    return balanced(weight, terms)


def balanced(weight: float, terms: secagg.Terms) -> bool:
    """Whether a client with all the weight that the terms allow, among others of this weight, has no more of the sum than one may have.

    For sums over the fewest survivors that there may be. Sums without weights are.
    """
    fewest = terms.floor if terms.blocks else survivor_floor(terms)
    return terms.weight_limit <= MOST_WEIGHT * (terms.weight_limit + (fewest - 1) * weight)


def plan_of(said: m.Shares, size: int) -> SkellamPlan:
    """The shares that a server asks for, for `size` numbers. Raises `RemoteError` "malformed" for numbers that no noise has."""
    numbers = (said.clip_norm, said.levels_per_unit, said.local_variance)
    if not all(0 < one < float("inf") for one in numbers) or said.survivors < 1:
        raise RemoteError("malformed")
    dimension = 1 << max(0, (size - 1).bit_length())
    return SkellamPlan(said.clip_norm, said.levels_per_unit, dimension, BETA, said.local_variance, said.survivors, said.relation)


def kind_of(said: bytes) -> str:
    """Which message of a secure sum these bytes are, "" for none."""
    from ..protocols.secagg.messages import decode_server

    try:
        return type(decode_server(said)).__name__
    except MalformedMessage:
        return ""
