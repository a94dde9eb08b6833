"""What a client computes: it opens what it is given, runs a task, in its private form where it is to be, and keeps the results."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from math import prod
from typing import Any

import msgspec
import numpy as np

from ..channels import Transforms
from ..protocols.entropy import Entropy
from ..protocols.errors import MalformedMessage, RemoteError
from ..types import Array, ClientData
from . import messages as m
from .foreign import Foreign
from .releases import compares, kinds_of
from .spending import Spending
from .values import UNTRACED, Origin, Values, trace

__all__ = ["Own", "Work", "sizes_in", "told"]

Own = Callable[[Foreign, Mapping[str, Any]], Mapping[str, Array]]
Choice = int | tuple[int, ...] | None


def told(ask: m.Compute) -> bytes:
    """The name of all that a client is told to compute: the task and its noise, what goes into it, which of it, when."""
    return sha256(m.encode(msgspec.structs.replace(ask, held=0, live=()))).digest()


def models_in(task: Any) -> list[Any]:
    """The models that a task itself names, however deep: no parameter that a server sends along changes them."""
    if type(task).__name__ == "Model":
        return [task]
    return [model for one in fields(task) if is_dataclass(getattr(task, one.name)) for model in models_in(getattr(task, one.name))]


def sizes_in(task: Any) -> list[int]:
    """How many numbers the models have that a task itself names."""
    if isinstance(task, Foreign):
        return [sum(prod(shape) for _, shape, _ in task.layout)]
    return [int(model.dimension) for model in models_in(task)]


def words_as_they_are(models: Iterable[Any]) -> None:
    """Refuse models that would move word numbers: "bad-settings"."""
    if any(model.name == "lstm" and (any(model.mean) or any(one != 1.0 for one in model.std)) for model in models):
        raise RemoteError("bad-settings")


def known_to(models: Iterable[Any], data: ClientData) -> ClientData:
    """Data whose labels, and words, all of these models know; each sample by itself, so that neighbouring data stay neighbours.

    A server names the models. One with too few labels would fail for some data and not for others, and that it failed is told; so labels
    are taken modulo their number, and words beyond a model's are its last.
    """
    for model in models:
        data = replace(data, y_train=data.y_train % model.classes, y_test=data.y_test % model.classes)
        if model.name == "lstm":
            last = model.classes - 1
            data = replace(data, x_train=np.clip(data.x_train, 0, last), x_test=np.clip(data.x_test, 0, last))
    return data


def smallest(sizes: Iterable[int]) -> int:
    """The smallest size of a model, 0 if there is none."""
    return min((size for size in sizes if size), default=0)


class Work:
    """The computing of one client. `data` gives its data when a task needs them; `own` does the work of `Foreign` tasks.

    With `alone` its group may be too small to be summed: then it trains on its own model, of which no server can know where it came from.
    """

    def __init__(
        self, client: int, values: Values, spending: Spending, transforms: Callable[[], Transforms], data: Callable[[], ClientData],
        entropy: Entropy, own: Mapping[str, Own], alone: bool,
    ) -> None:  # fmt: skip
        self._client, self._values, self._spending, self._transforms = client, values, spending, transforms
        self._data, self._entropy, self._own, self._alone = data, entropy, own, alone

    def compute(self, ask: m.Compute) -> m.Computed:
        """Run a task and hold its parts."""
        try:
            task = m.task_from_bytes(ask.task)
        except MalformedMessage:
            raise RemoteError("unknown-task") from None
        sizes = sizes_in(task)
        noise = self._spending.agreed(ask.noise)
        if noise is not None:
            if getattr(task, "events", {}):  # its bounds would be those that the server wrote into it
                raise RemoteError("forbidden")
            task = task.private(noise) if hasattr(task, "private") else task
        reads = {name: found for name in getattr(task, "reads", ()) if (found := self._values.remembered(name)) is not None}
        held = self._held_in(ask)
        self._spending.check(task, held, reads)
        given, received, choice = self._given(ask, sizes)
        compared = compares(task) or any(self._values.origin(one.held).is_compared(one.part) for one in held)
        compared |= any(origin.compared for _, origin in reads.values())
        sizes += [origin.size for _, origin in reads.values()]
        if self._spending.unit != "none":
            words_as_they_are(models_in(task))
        try:
            result = self._run(ask, task, given, {name: value for name, (value, _) in reads.items()}, choice)
        except Exception:  # whatever it is, that there is no result is told
            self._spending.failed(task, held, reads)
            raise
        live = (*ask.live, ask.held)
        if result:  # before anything that it was computed from is forgotten
            self._values.drop(ask.held)
            self._spending.enter(ask.held, task, held, reads, live)
        else:
            self._spending.failed(task, held, reads)
        self._values.forget(live)
        if not result:
            return m.Computed(False, ())
        kinds = tuple((part, kind) for part, kind in kinds_of(task).items() if kind != "summed")
        origin = Origin(trace(received), smallest(sizes), compared, kinds)
        for name in task.keeps:
            self._values.remember(name, result[name], origin)
        made = {part: result[part] if isinstance(result[part], dict) else np.asarray(result[part]) for part in task.parts}
        self._values.hold(ask.held, made, origin)
        return m.Computed(
            True, tuple(m.Described(part, one.dtype.str, one.shape) for part, one in made.items() if not isinstance(one, dict))
        )

    def add_up(self, ask: m.AddUp) -> m.Computed:
        """Add up own parts."""
        mine = tuple(own for own in ask.addends if self._values.holds(own.held))
        if not mine:
            return m.Computed(False, ())
        total = self._values.open(m.Addends((), (), mine), self._transforms)
        origins = [(own.part, self._values.origin(own.held)) for own in mine]
        compared = any(origin.is_compared(part) for part, origin in origins)
        self._values.drop(ask.held)
        self._spending.derive(ask.held, "own", mine)
        self._values.hold(ask.held, {"own": total}, Origin(UNTRACED, smallest(origin.size for _, origin in origins), compared))
        return m.Computed(True, (m.Described("own", total.dtype.str, total.shape),))

    def _given(self, ask: m.Compute, sizes: list[int]) -> tuple[dict[str, Any], list[bytes], Choice]:
        """The parameters opened, what each was computed from, and the client's choice; `sizes` get those of the models among them."""
        given: dict[str, Any] = {}
        several = isinstance(ask.which, m.Picks) and ask.which.several
        chosen: list[int] | None = None
        if isinstance(ask.which, m.Picks):
            chosen = list(ask.which.labels)
        elif isinstance(ask.which, m.Mine):
            own = np.asarray(self._values.mine(ask.which))
            if own.dtype.kind not in "biu":
                raise RemoteError("bad-input")
            several, chosen = own.ndim > 0, [int(label) for label in np.ravel(own)]
        received = [told(ask), *(UNTRACED for one in self._held_in(ask) if isinstance(one, m.OwnPart) and not self._alone)]
        if isinstance(ask.which, m.Mine):
            received.append(self._values.origin(ask.which.held).received)
        for parameter in ask.params:
            value = parameter.value
            if isinstance(value, m.Mine):
                given[parameter.name] = self._values.mine(value)
                earlier = self._values.origin(value.held)
                received.append(earlier.received)
                sizes.append(earlier.size)  # a copy of an update, or what is computed from one, is no freer than the update
                continue
            if isinstance(value, m.One):
                given[parameter.name] = self._values.open(value.value, self._transforms)
            else:
                sent = [self._values.open(one, self._transforms) for one in value.values]
                if isinstance(ask.which, m.Mine):
                    assert chosen is not None
                    if not sent:
                        raise RemoteError("bad-input")
                    sent = [sent[label % len(sent)] for label in chosen]  # to refuse a list that is too short would tell the label
                given[parameter.name] = sent[0] if isinstance(ask.which, m.Mine) and not several else sent
            of = given[parameter.name]
            sizes += [np.size(one) for one in (of if isinstance(of, list) else [of]) if np.size(one) > 1]
        return given, received, None if chosen is None else tuple(chosen) if several else chosen[0]

    def _held_in(self, ask: m.Compute) -> list[m.Mine | m.OwnPart]:
        """What this client holds itself of what a task is given."""
        found: list[m.Mine | m.OwnPart] = [ask.which] if isinstance(ask.which, m.Mine) else []
        for parameter in ask.params:
            value = parameter.value
            if isinstance(value, m.Mine):
                found.append(value)
                continue
            for addends in (value.value,) if isinstance(value, m.One) else value.values:
                found += [own for own in addends.own if self._values.holds(own.held)]
        return found

    def _run(self, ask: m.Compute, task: Any, given: dict[str, Any], reads: Mapping[str, Array], choice: Choice) -> dict[str, Any]:
        if isinstance(task, Foreign):
            if task.name not in self._own:
                raise RemoteError("unknown-task")
            return dict(self._own[task.name](task, given))
        from ..engine import Engine, Streams, TaskInput  # torch is loaded where something is computed

        streams = Streams(ask.seed, ask.round, self._client)
        secret = b"" if ask.noise is None else self._entropy(32)
        data = self._data() if self._spending.unit == "none" else known_to(models_in(task), self._data())
        (result,) = Engine().run(task, [TaskInput(data, given, reads, streams, choice, secret)])
        return result
