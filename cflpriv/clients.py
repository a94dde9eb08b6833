"""The clients' side of a federation in this process: their data, what they hold and remember, and how they open what they are sent."""

import weakref
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from .channels import Contribution, Transforms
from .engine import Result, Streams, Task, TaskInput, Value
from .errors import InputError
from .federation import Parameter
from .handles import Held, HeldKey, Labels, Own, Shared
from .types import Array, ClientData, check_array
from .wire import choices, closed, owned

__all__ = ["Clients"]


class Clients:
    """What clients have and the server does not. `transforms` are theirs; `memory` is what their tasks keep, by client and name.

    `values` holds the values behind each `Held` for as long as a handle lives, and `received` the hash of what they were computed from,
    where sums bind to it.
    """

    def __init__(self, data: Sequence[ClientData], transforms: Transforms, seed: int) -> None:
        self.data = {one.id: one for one in sorted(data, key=lambda one: one.id)}
        if len(self.data) != len(data):
            raise InputError("federation: client ids repeat")
        self.transforms = transforms
        self.memory: dict[int, dict[str, Array]] = {client: {} for client in self.data}
        self.values: weakref.WeakKeyDictionary[HeldKey, dict[int, dict[str, Any]]] = weakref.WeakKeyDictionary()
        self.received: weakref.WeakKeyDictionary[HeldKey, dict[int, bytes]] = weakref.WeakKeyDictionary()
        self._seed = seed

    # --- what they hold

    def hold(self, name: str, values: dict[int, dict[str, Any]], parts: tuple[str, ...]) -> Held:
        key = HeldKey(name)
        self.values[key] = values
        return Held(key, tuple(sorted(values)), parts)

    def parts(self, held: Held, client: int) -> dict[str, Any]:
        if held.key not in self.values:
            raise InputError(f"{held.key.name} is not held by clients of this federation")
        values = self.values[held.key]
        if client not in values or client not in held.clients:
            raise InputError(f"client {client} does not hold {held.key.name}")
        return {part: values[client][part] for part in held.parts}

    def value(self, held: Held, client: int) -> Any:
        value = self.parts(held, client)[held.part]
        return value if isinstance(value, dict) else np.asarray(value)

    def keep(self, task: Task, results: Mapping[int, Result]) -> Held:
        """Take in what a task made: the client remembers what the task keeps, and holds its parts."""
        values: dict[int, dict[str, Any]] = {}
        for client, result in results.items():
            self.memory[client] |= {name: result[name] for name in task.keeps}
            values[client] = {name: owned(result[name]) for name in task.parts}
        return self.hold(type(task).__name__, values, tuple(task.parts))

    def trace(self, held: Held, received: Mapping[int, bytes], params: Mapping[str, Parameter], clients: Sequence[int]) -> None:
        """What each client was sent, and what the values it already held had been computed from. What tasks remember is not traced."""
        traced = {}
        for client in clients:
            earlier = [self.received.get(value.key, {}).get(client) for _, value in sorted(params.items()) if isinstance(value, Held)]
            parts = [part for part in (received.get(client), *earlier) if part is not None]
            if parts:
                traced[client] = parts[0] if len(parts) == 1 else sha256(b"".join(parts)).digest()
        self.received[held.key] = traced

    def contributions(
        self, held: Held, clients: Sequence[int], weights: str | Mapping[int, float], labels: Mapping[int, tuple[int, ...]]
    ) -> tuple[Contribution, ...]:
        """What each client brings to a mean, checked: finite, of one shape, of positive weight."""
        contributions = []
        shapes: set[tuple[tuple[str, tuple[int, ...]], ...]] = set()
        for client in clients:
            parts = self.parts(held, client)
            for name, value in parts.items():
                if isinstance(value, np.ndarray):  # what is made on demand was checked by its task
                    check_array(f"client {client}: {name}", value)
            shapes.add(tuple((name, value.shape) for name, value in parts.items()))
            weight = self._weight(weights, client)
            if not (np.isfinite(weight) and weight > 0):
                raise InputError(f"mean: client {client} has weight {weight}; weights are finite and above 0")
            contributions.append(Contribution(client, parts, weight, labels[client]))
        if len(shapes) != 1:
            raise InputError(f"mean: clients hold parts of different shapes: {sorted(shapes)}")
        return tuple(contributions)

    def _weight(self, weights: str | Mapping[int, float], client: int) -> float:
        if isinstance(weights, str):
            return 1.0 if weights == "equal" else float(self.data[client].samples)
        if client not in weights:
            raise InputError(f"mean: no weight for client {client}")
        return float(weights[client])

    # --- what they are given

    def inputs(
        self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int], round_number: int
    ) -> list[TaskInput]:
        """Every client's parameters opened, its choice made, its memory (what the task `reads`) and streams at hand."""
        lists, picks, several = choices(params, which, clients, self.value)
        inputs = []
        opened: dict[tuple[int, int], Array] = {}
        for client in clients:
            given: dict[str, Value] = {}
            for name, value in params.items():
                if isinstance(value, Held):
                    given[name] = self.value(value, client)
                elif name in lists:
                    if which is None:
                        given[name] = [self.open(client, one, opened) for one in lists[name]]
                    elif several:
                        given[name] = [self.open(client, lists[name][label], opened) for label in picks[client]]
                    else:
                        given[name] = self.open(client, lists[name][picks[client][0]], opened)
                else:
                    given[name] = self.open(client, value, opened)  # type: ignore[arg-type]
            choice = None if which is None else picks[client] if several else picks[client][0]
            streams = Streams(self._seed, round_number, client)
            memory = {name: np.asarray(self.memory[client][name]) for name in getattr(task, "reads", ()) if name in self.memory[client]}
            inputs.append(TaskInput(self.data[client], given, memory, streams, choice))
        return inputs

    def open(self, client: int, value: Array | Shared, opened: dict[tuple[int, int], Array]) -> Array:
        """What `client` sees of a sum: clear + opened blind parts + its own. `opened` remembers what is the same for all clients."""
        if not isinstance(value, Shared):
            array_key = (id(value), -2)
            if array_key not in opened:
                opened[array_key] = closed(np.asarray(value))
            return opened[array_key]
        for term in value.blind:
            self.transforms.check(client, term.transform)
        key = (id(value), -1)
        if key not in opened:
            total: Array | None = value.clear
            for term in value.blind:
                transform = self.transforms(term.transform, term.dimension or len(term.value))
                vector = transform.invert(term.value)[term.start : term.stop].reshape(term.shape)
                total = vector if total is None else total + vector
            if total is not None:
                opened[key] = closed(total)
        total = opened.get(key)
        for own in value.own:
            if client in own.held.clients:
                addend = self.value(own.held, client)
                addend = addend if own.factor == 1.0 else (addend * own.factor).astype(addend.dtype, copy=False)
                total = addend if total is None else total + addend
        if total is None:
            raise InputError(f"client {client} has no part in this sum")
        return total

    def fold_own(self, own: Sequence[Own]) -> Held:
        """Clients add up their own addends; nothing leaves them."""
        sums: dict[int, dict[str, Array]] = {}
        for term in own:
            for client in term.held.clients:
                addend = self.value(term.held, client) * term.factor
                sums[client] = {"own": sums[client]["own"] + addend if client in sums else addend}
        return self.hold("own", sums, ("own",))
