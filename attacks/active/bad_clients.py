"""Clients that do not follow the protocol, in a simulation: false data, false updates, crafted signatures. They leak nothing; they harm.

Not one of the registered attacks, which measure leakage: `corrupt` changes what a simulated client holds after it computed, `poisoned` the
data that it trains on. What leaves the client then goes through the same protections as an honest value.

Sources: Bagdasaryan et al. 2020 (model replacement), Gu et al. 2017 (back doors by a patch), Li et al. 2019 (sign flips).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cflpriv.engine import TaskInput
from cflpriv.federation import messages as m
from cflpriv.federation.host import Handler
from cflpriv.federation.values import SharedWork
from cflpriv.transports.simulation import Simulated
from cflpriv.types import Array, ClientData

__all__ = ["Change", "mean_of_victims", "bridging", "corrupt", "copied", "flipped_labels", "poisoned", "scaled_update", "triggered"]

Change = Callable[[Any, TaskInput, Mapping[str, Array]], Mapping[str, Array]]
"""What a bad client holds in place of a task's results: from the task, what it was given, and the honest results by part."""


def corrupt(simulated: Simulated, client: int, change: Change) -> None:
    """Let a client of a simulation change what it holds after each task."""
    party = simulated.client(client)
    honest = party.handle

    def handle(ask: m.PartyRequest, exchange: SharedWork) -> Handler:
        answer = yield from honest(ask, exchange)
        if isinstance(ask, m.Compute) and isinstance(answer, m.Computed) and answer.result:
            values = party.values
            held = values.parts(ask.held, tuple(part.name for part in answer.parts))
            results = {name: np.asarray(value) for name, value in held.items()}
            changed = change(ask.task.task, party.given(ask, exchange), results)
            false = {name: np.asarray(value, results[name].dtype) for name, value in changed.items()}
            values.hold(ask.held, {**held, **false}, values.origin(ask.held))
        return answer

    party.handle = handle  # type: ignore[method-assign]


def scaled_update(factor: float, part: str = "update") -> Change:
    """Its own update times a factor: −1 flips the sign; with the number of members of its cluster it takes the model's place."""
    return lambda task, task_input, results: {part: factor * results[part]} if part in results else {}


def copied(part: str, victim: ClientData) -> Change:
    """The part of a task's results that a victim's data give."""
    return lambda task, task_input, results: {part: _of(task, task_input, victim, part)} if part in results else {}


def mean_of_victims(part: str, victims: Sequence[ClientData]) -> Change:
    """The mean of what the victims' data give."""
    return lambda task, task_input, results: (
        {part: np.mean([_of(task, task_input, victim, part) for victim in victims], axis=0)} if part in results else {}
    )


def bridging(part: str, victims: Sequence[ClientData]) -> Change:
    """A signature (p, d) whose rows are the victims' first ones in turn, made orthonormal: its smallest angle to each of them is 0."""

    def change(task: Any, task_input: TaskInput, results: Mapping[str, Array]) -> Mapping[str, Array]:
        if part not in results:
            return {}
        rows = [_of(task, task_input, victim, part) for victim in victims]
        mixed = [rows[place % len(rows)][place // len(rows)] for place in range(len(results[part]))]
        return {part: np.linalg.qr(np.stack(mixed).T)[0].T}

    return change


def _of(task: Any, task_input: TaskInput, data: ClientData, part: str) -> Array:
    return np.asarray(task.run(replace(task_input, data=data))[part])


# --- data ---------------------------------------------------------------------------------------------------------------------------


def flipped_labels(data: ClientData, classes: int) -> ClientData:
    """Label y becomes the last one minus y, in training data."""
    return replace(data, y_train=classes - 1 - data.y_train)


def triggered(x: Array, size: int) -> Array:
    """Images (..., h, w) with a bright square of `size` pixels in the last corner."""
    marked = x.copy()
    marked[..., -size:, -size:] = x.max()
    return marked


def poisoned(data: ClientData, target: int, size: int) -> ClientData:
    """Training data with as many samples again that bear the trigger and the label `target`."""
    x, y = np.concatenate([data.x_train, triggered(data.x_train, size)]), np.full(len(data.y_train), target)
    return replace(data, x_train=x, y_train=np.concatenate([data.y_train, y]))
