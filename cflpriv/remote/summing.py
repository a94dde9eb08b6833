"""A client's part in secure sums: its machine between two messages, what it brings, and the share of noise it adds."""

from collections.abc import Callable

import numpy as np

from ..client_level import BETA, share
from ..protocols import secagg
from ..protocols.entropy import Entropy
from ..protocols.errors import MalformedMessage, RemoteError
from ..protocols.keys import Roster
from ..protocols.mechanisms import SkellamPlan
from ..protocols.secagg import MaskKey, Policy
from . import messages as m
from .settings import Settings
from .spending import Spending
from .store import Store
from .values import Values

__all__ = ["NO_MODEL", "Summing"]

NO_MODEL = bytes(32)


class Summing:
    """The secure sums of one client. `samples` gives its number of samples, which only weighted sums ask for."""

    def __init__(self, settings: Settings, store: Store, values: Values, spending: Spending, entropy: Entropy) -> None:
        self._settings, self._store, self._values, self._spending, self._entropy = settings, store, values, spending, entropy

    def step(self, ask: m.Step, samples: Callable[[], int]) -> m.Stepped:
        """One message of a sum, and the client's answer."""
        settings = self._settings
        wanted = "secagg" if ask.kind == "sum" else "secagg-oblivious"
        if settings.protection.sum != wanted:
            raise RemoteError("forbidden")
        name = f"sum/{ask.slot[0]}.{ask.slot[1]}"
        stored = self._store.get(name)
        if stored is not None:
            machine = secagg.Client.from_bytes(stored, settings.identity, roster=self._roster(), entropy=self._entropy)
        else:
            machine = self._machine(ask)
        contributions: list[secagg.Contribution] = []
        if machine.wants_values and kind_of(ask.said) == "Deliver":
            contributions = self._contributions(ask, machine, samples)
        said = machine.receive(ask.said, *contributions)
        following = machine.next_mask_key()
        if following is not None:
            self._store.put(f"mask/{following.slot[0]}.{following.slot[1]}", following.to_bytes())
        if machine.stage is secagg.ClientStage.DONE:
            self._store.drop(name)
        else:
            self._store.put(name, machine.to_bytes())
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
        model, _ = self._values.model(ask.held)
        models = ask.models if ask.models >= 1 else 1
        policy = Policy(
            self._store.get("session") or b"", protection.secagg_mode, model or NO_MODEL, models, protection.smallest_sum, after, None
        )
        name = f"mask/{ask.slot[0]}.{ask.slot[1]}"
        stored = self._store.get(name)
        key = None
        if stored is not None:
            self._store.drop(name)  # before it is used: it serves once
            if kind_of(ask.said) != "Invite":  # who is invited again was not heard: the key that it advertised is used for nothing
                key = MaskKey.from_bytes(stored)
        for other in self._store.names():
            if other.startswith("sum/"):
                self._store.drop(other)
            if other.startswith("mask/") and tuple(int(part) for part in other[5:].split(".")) < ask.slot:
                self._store.drop(other)
        self._store.put("last-slot", ask.slot[0].to_bytes(8, "big") + ask.slot[1].to_bytes(8, "big"))
        return secagg.Client(self._settings.identity, policy, roster=self._roster(), mask_key=key, entropy=self._entropy)

    def _contributions(self, ask: m.Step, machine: secagg.Client, samples: Callable[[], int]) -> list[secagg.Contribution]:
        """What this client brings; its own ledger is asked first."""
        terms = machine.terms
        assert terms is not None
        labels: tuple[int, ...] = (0,)
        if isinstance(ask.groups, m.Picks):
            labels = ask.groups.labels
        elif isinstance(ask.groups, m.Mine):
            labels = tuple(int(label) for label in np.ravel(np.asarray(self._values.mine(ask.groups))))
        values = {} if ask.kind == "counts" else self._values.parts(ask.held, ask.parts)
        vector = np.concatenate([np.zeros(0), *(np.ravel(np.asarray(value)).astype(np.float64) for value in values.values())])
        finite = bool(np.isfinite(vector).all())
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
        self._spending.shares(plan, self._settings.protection.smallest_sum, terms.levels, terms.weight_limit > 0)
        if not finite:  # said after it was paid for
            raise RemoteError("bad-input")
        weight = ask.weight or float(samples())
        if plan is not None and ask.noise is not None:
            return [secagg.Contribution(share(vector, plan, ask.noise.seed, terms.levels, self._entropy), weight)]
        if ask.kind == "sum":
            return [secagg.Contribution(vector, weight)]
        return [secagg.Contribution(vector, weight, label) for label in labels]


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
