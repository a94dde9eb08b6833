"""The computations of a client: it opens its parameters, runs a task (in its private form, if noise is asked), and keeps the results."""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..errors import InputError
from ..privacy.settings import Noise
from ..protocols.errors import RemoteError
from ..types import Array, ClientData, PartKind
from . import messages as m
from .client_contract import ClientContract
from .foreign import ROUND, Foreign
from .host import RunTask
from .limits import check_parameters, check_task
from .protections import ClientParts
from .release_policy import compares, kinds_of
from .stand_in import blank, foreign_layout, layout_of, light, stand_in_layout
from .task_encoding import UnknownTask
from .values import UNTRACED, Origin, SharedWork, rounds_of, spread_of, trace

if TYPE_CHECKING:  # torch is loaded where something is computed
    from ..engine import TaskInput

__all__ = ["OwnFunction", "Work", "alternatives_of", "request_digest", "sizes_in"]

OwnFunction = Callable[[Foreign, Mapping[str, Any]], Mapping[str, Array]]
MOST_MODELS = 1 << 10
Choice = int | tuple[int, ...] | None


def request_digest(ask: m.Compute | m.AddUp, numbers: bool = True) -> bytes:
    """A digest of what a client computes: the task, its noise, parameters, picks, round and seed; without the `numbers` of held values.

    A task that cannot be encoded, such as one that a test defines, counts with its type and fields.
    """
    if isinstance(ask, m.AddUp):
        addends = tuple(msgspec.structs.replace(own, held=0) for own in ask.addends)
        return sha256(m.encode(msgspec.structs.replace(ask, held=0, addends=addends))).digest()
    if not numbers:
        ask = msgspec.structs.replace(ask, params=_without_numbers(ask.params), which=_without_number(ask.which))
    try:
        task = ask.task.data
    except InputError:
        task = f"{type(ask.task.task).__module__} {ask.task.task!r}".encode()
    return sha256(m.encode(msgspec.structs.replace(ask, task=m.Carried(UnknownTask(task)), held=0, live=()))).digest()


def alternatives_of(ask: m.Compute, digest: bytes) -> dict[int, bytes]:
    """The names that a value may have by its request, whose `request_digest` is given, by the label of the model that the client chooses;
    −1 where it has no choice.

    A client chooses with a held value as `which`, or inside of a task that names the part with its choice as `chooses`. The name of what it
    computes is that of the model that it used: values from different models never meet in one sum. Under `[privacy]` the name is that of
    the request alone: noise protects a client that is alone in a sum, and a refusal would show the choice, which is not paid for.
    """
    lists = [value.values for _, value in ask.params if isinstance(value, m.Many)]
    if not lists or not (isinstance(ask.which, m.HeldValue) or hasattr(ask.task.task, "chooses")):
        return {-1: digest}
    labels = ask.which.labels if isinstance(ask.which, m.Picks) else range(len(lists[0]))
    names = (chosen_name(digest, map(addends_digest, offered)) for offered in zip(*lists, strict=False))
    return dict(zip(labels, names, strict=False))


def chosen_name(digest: bytes, offered: Iterable[bytes]) -> bytes:
    """The name of a value by the digest of its request, and those of what the client chose."""
    return sha256(digest + b"".join(offered)).digest()


def addends_digest(addends: m.Addends) -> bytes:
    """A digest of a sum as it was sent."""
    return sha256(m.encode(addends)).digest()


def _without_number(value: Any) -> Any:
    """A parameter, or picks, with 0 in place of the numbers of held values."""
    if isinstance(value, m.HeldValue | m.OwnPart):
        return msgspec.structs.replace(value, held=0)
    if isinstance(value, m.Addends):
        return msgspec.structs.replace(value, own=tuple(map(_without_number, value.own))) if value.own else value
    return msgspec.structs.replace(value, values=tuple(map(_without_number, value.values))) if isinstance(value, m.Many) else value


def _without_numbers(params: m.SentParameters) -> m.SentParameters:
    return tuple((name, _without_number(value)) for name, value in params)


def models_in(task: Any) -> list[Any]:
    """The models that a task names, however deep. The parameters that a server sends do not change them."""
    if type(task).__name__ == "Model":
        return [task]
    models: list[Any] = []
    for attribute in fields(task):
        inner = getattr(task, attribute.name)
        if is_dataclass(inner):
            models += models_in(inner)
    return models


def sizes_in(task: Any) -> list[int]:
    """The sizes of the models that a task names."""
    if isinstance(task, Foreign):
        return [sum(prod(shape) for _, shape, _ in task.layout)]
    return [int(model.dimension) for model in models_in(task)]


def words_as_they_are(models: Iterable[Any]) -> None:
    """Raises `RemoteError` "bad-settings" for models that would scale word numbers."""
    if any(model.name == "lstm" and (any(model.mean) or any(scale != 1.0 for scale in model.std)) for model in models):
        raise RemoteError("bad-settings")


def known_to(models: Iterable[Any], data: ClientData) -> ClientData:
    """Data whose labels and words fit all of these models. Each sample changes by itself, so neighbouring data stay neighbours.

    A server chooses the models. With too few labels a model would fail on some data only, and the failure would reveal them. So labels are
    taken modulo their number, and words beyond a model's vocabulary become its last word. Raises `RemoteError` "bad-settings" for a model
    of classes where labels are numbers, and the reverse.
    """
    for model in models:
        if (model.loss == "cross_entropy") != (data.y_train.dtype.kind != "f"):
            raise RemoteError("bad-settings")  # classes for numbers, or numbers for classes
        if model.loss == "cross_entropy" and any(
            len(y) and not 0 <= int(y.min()) <= int(y.max()) < model.classes for y in (data.y_train, data.y_test)
        ):
            data = replace(data, y_train=data.y_train % model.classes, y_test=data.y_test % model.classes)
        if model.name == "lstm":
            last = model.classes - 1
            data = replace(data, x_train=np.clip(data.x_train, 0, last), x_test=np.clip(data.x_test, 0, last))
    return data


def other_kinds(task: Any) -> tuple[tuple[str, PartKind], ...]:
    """The parts of a task that are not summed, and their kinds."""
    other: list[tuple[str, PartKind]] = []
    for part, kind in kinds_of(task).items():
        if kind != "summed":
            other.append((part, kind))
    return tuple(other)


def smallest(sizes: Iterable[int]) -> int:
    """The smallest size of a model, 0 if there is none."""
    return min((size for size in sizes if size), default=0)


def owned(value: Any) -> Any:
    """A result that no later change of a parameter affects."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return array if array.flags.owndata and array.flags.writeable else array.copy()
    return value


@dataclass(frozen=True)
class Sent:
    """The digest of a sum as it was sent, and how many numbers it has."""

    digest: bytes
    size: int


@dataclass(frozen=True)
class Used:
    """What a value was computed at, the lists that a task chooses from by itself, and the length of the longest list."""

    models: tuple[Sent, ...]
    offered: tuple[tuple[Sent, ...], ...]
    alternatives: int


def _offered_at(ask: m.Compute, choice: int, used: Used) -> tuple[Sent, ...]:
    """What was sent at the place of a choice, which a task made among all that it was sent. A choice that is none counts as the first."""
    labels = ask.which.labels if isinstance(ask.which, m.Picks) else tuple(range(min(map(len, used.offered))))
    place = labels.index(choice) if choice in labels else 0
    return tuple(offered[place] for offered in used.offered)


def merged(*several: Iterable[bytes]) -> tuple[bytes, ...]:
    """The union of digests of models, at most `MOST_MODELS`; values from more rounds than that no sum takes (`values.rounds_of`)."""
    return tuple(sorted({digest for digests in several for digest in digests})[:MOST_MODELS])


@dataclass(frozen=True)
class Planned:
    """What clients with the same request share, so that they can be computed together.

    `task`: as it is run, with noise where it has noise; its `models` and their `sizes`, whether it is `compared`, its `spread`, and the
    `kinds` of parts that are not summed. `light`: its form for stand-in data, where answers are alike for all data; `laid_out_alike`:
    results then have one layout for clients of all numbers. `fits`: shapes of samples with which it keeps the limits, as far as seen.
    """

    task: Any
    models: list[Any]
    sizes: list[int]
    compared: bool
    spread: float
    kinds: tuple[tuple[str, PartKind], ...]
    light: Any
    laid_out_alike: bool
    fits: set[tuple[int, ...]]


def _untraced(*of: Any) -> list[Sent]:
    """No digests, where no sum binds to values."""
    return []


class Work:
    """The computations of one client. `data` loads its data when a task needs them; `own` has functions for `Foreign` tasks.

    With `small_clusters = "local"` the client may be in a group too small to be summed. Then it trains on its own model, which no server
    can trace.
    """

    def __init__(
        self, parts: ClientParts, data: Callable[[], ClientData], own: Mapping[str, OwnFunction], contract: ClientContract
    ) -> None:  # fmt: skip
        self._contract = contract
        self._client, self._values, self._ledger, self._transforms = parts.client, parts.values, parts.ledger, parts.transforms
        self._parts, self._limits = parts, parts.settings.limits
        self._data, self._entropy, self._own = data, parts.entropy, own
        protection = parts.settings.protection
        self._alone, self._traced = protection.small_clusters == "local", protection.secure
        self._named_by_choice = parts.ledger.unit == "none"
        self._compared_hidden = protection.transformed or protection.comparison.hides
        self._fitted: tuple[ClientData, list[Any], ClientData] | None = None

    def compute(self, ask: m.Compute, exchange: SharedWork) -> Generator[RunTask, Any, m.Computed]:
        """Run a task and hold its parts."""
        public = ask.task.task
        if isinstance(public, UnknownTask):
            raise RemoteError("unknown-task")
        digest, held = exchange.once(lambda: request_digest(ask), ask), self._held_in(ask)
        leaves = self._contract.begin(ask, self._counted(ask, digest, held, exchange), exchange)
        noise = self._ledger.agreed(ask.noise)
        if noise is not None and getattr(public, "events", {}):  # its bounds would be the server's
            raise RemoteError("forbidden")
        planned = exchange.once(partial(self._planned, ask, noise), ask, self._limits, self._parts.alike)
        task, models, compared, spread = planned.task, planned.models, planned.compared, planned.spread
        reads = {name: memory for name in getattr(task, "reads", ()) if (memory := self._values.remembered(name)) is not None}
        self._ledger.begin(task, held, reads)
        sizes = list(planned.sizes)
        for name, (_, origin) in reads.items():
            sizes.append(origin.size)
            compared, spread = compared or origin.is_compared(name), max(spread, origin.spread)
        params, received, choice, used = self._given(ask, sizes, held, exchange)
        inputs = [(source, self._values.origin(source.held)) for source in held]
        for source, origin in inputs:
            compared, spread = compared or origin.is_compared(source.part), max(spread, origin.spread)
        rounds = rounds_of((ask.round,), *(origin.rounds for _, origin in inputs)) if inputs else (ask.round,)
        if self._ledger.unit != "none":
            words_as_they_are(models)
        read = {name: value for name, (value, _) in reads.items()}
        failed = False
        if self._parts.alike:
            result, failed = yield from self._alike(ask, planned, params, read, choice)
            failed = failed or any(self._values.origin(source.held).failed for source in held)
        else:
            result = yield from self._result(ask, task, models, params, read, choice)
        live = (*ask.live, ask.held)
        if result:  # before the sources of the result are forgotten
            self._values.drop(ask.held)
            self._ledger.enter(ask.held, task, held, reads, live)
        self._values.forget(live)
        if not result:
            return m.Computed(False, ())
        if received and used.offered and self._named_by_choice and hasattr(task, "chooses"):
            taken = _offered_at(ask, int(np.asarray(result[task.chooses])), used)
            received = [chosen_name(digest, (sent.digest for sent in taken)), *received[1:]]
            used = replace(used, models=(*used.models, *taken), offered=())
        sent = sorted(each.digest for each in chain(used.models, *used.offered) if each.size > 1)
        # All of it together: where layers are shared, a cluster's own may stay while the shared ones move.
        models_used = (
            merged([sha256(b"".join(sent)).digest()] if sent else [], *(origin.models for _, origin in inputs)) if sent or inputs else ()
        )
        alternatives = max(used.alternatives, *(origin.alternatives for _, origin in inputs), 1)
        origin = Origin(
            trace(received) if received else b"", smallest(sizes), compared, planned.kinds, rounds, spread, failed,
            self._answered(ask, held, exchange), models_used, alternatives, leaves,
        )  # fmt: skip
        for name in task.keeps:
            self._values.remember(name, result[name], origin)
        made = {part: owned(result[part]) for part in task.parts}
        self._values.hold(ask.held, made, origin)
        return m.Computed(
            True, tuple(m.Described(part, one.dtype.str, one.shape) for part, one in made.items() if not isinstance(one, dict))
        )

    def _planned(self, ask: m.Compute, noise: Noise | None) -> Planned:
        """What clients with the same request share. Raises `RemoteError` for a request over the limits."""
        public = ask.task.task
        task = public.private(noise) if noise and hasattr(public, "private") else public
        check_task(task, self._limits)  # before anything is made of it
        check_parameters(ask.params, self._limits, self._parts.alike)
        models, lighter = models_in(task), light(task) if self._parts.alike else None
        # what clients sum or compare has the same layout for all; only what is kept or relayed may depend on a client's number
        equal = bool(models) or (not task.keeps and set(task.parts.values()) <= {"summed", "compared"})
        return Planned(task, models, sizes_in(task), compares(task), spread_of(task), other_kinds(task), lighter, equal, set())

    def _result(
        self, ask: m.Compute, task: Any, models: list[Any], params: dict[str, Any], reads: Mapping[str, Array], choice: Choice
    ) -> Generator[RunTask, Any, dict[str, Any]]:  # fmt: skip
        """The results of a task, empty if there are none."""
        if isinstance(task, Foreign):
            return self._own_result(task, params, ask.round)
        result: dict[str, Any] = yield RunTask(task, self._input(ask, models, params, reads, choice))
        return result

    def _alike(
        self, ask: m.Compute, planned: Planned, params: dict[str, Any], reads: Mapping[str, Array], choice: Choice
    ) -> Generator[RunTask, Any, tuple[dict[str, Any], bool]]:  # fmt: skip
        """Results in the layout that they have for all data, and whether they are zeros because the client's data gave none.

        Raises what the task raises for every data. What it raises for the client's own stays at the client.
        """
        task, models = planned.task, planned.models
        if isinstance(task, Foreign):
            layout = foreign_layout(task)
            if task.name not in self._own or layout is None:
                return self._own_result(task, params, ask.round), False
            given = None
        else:
            given = self._input(ask, models, params, reads, choice)
            features = given.data.x_train.shape[1:]
            if features not in planned.fits:
                check_task(task, self._limits, prod(features))
                planned.fits.add(features)
            if any(tuple(model.shape) != features for model in models):
                raise RemoteError("bad-input")
            try:
                layout = stand_in_layout(planned.light, given, planned.laid_out_alike)
            except (RemoteError, InputError):
                raise
            except Exception as error:
                why = f"{type(task).__name__}: does not take these parameters ({type(error).__name__}: {error})"
                raise InputError(f"client {self._client}: {why}") from error
        try:
            result = self._own_result(task, params, ask.round) if given is None else (yield RunTask(task, given))
            if result and layout_of(result, [part for part, _ in layout][: len(task.parts)]) == layout[: len(task.parts)]:
                return result, False
            if result:
                raise InputError(f"client {self._client}: {type(task).__name__}: the layout of its results depends on data")
        except Exception as error:
            if isinstance(error, RemoteError) and error.code in ("bad-result", "old-result"):  # the application's code, not its data
                raise
            self._parts.failed(error)
        zeros = blank(layout)
        for name in task.keeps:  # what the client kept before is better than nothing
            before = self._values.remembered(name)
            if before is not None and (before[0].shape, before[0].dtype) == (zeros[name].shape, zeros[name].dtype):
                zeros[name] = before[0]
        return zeros, True

    def _own_result(self, task: Foreign, params: Mapping[str, Any], number: int) -> dict[str, Any]:
        """What the application's own function gives."""
        if task.name not in self._own:
            raise RemoteError("unknown-task")
        return dict(self._own[task.name](task, {**params, ROUND: number}))

    def _counted(self, ask: m.Compute, digest: bytes, held: Iterable[m.HeldValue | m.OwnPart], exchange: SharedWork) -> bytes:
        """The name of a request, whose `request_digest` is given, as the contract counts it: held values go by the names of the requests
        that they answer, because a step that is taken again computes them again, under other numbers."""
        names = b""
        for source in held:
            leaves = self._values.origin(source.held).leaves
            if leaves is None or not leaves.request:
                return digest
            names += leaves.request
        if not names:
            return digest
        alike = exchange.once(lambda: request_digest(ask, numbers=False), ask, request_digest)
        return sha256(alike + names).digest()

    def _answered(self, ask: m.Compute | m.AddUp, held: Iterable[m.HeldValue | m.OwnPart], exchange: SharedWork) -> bytes:
        """The digest of a request and of those that its held values answer, empty where the result is compared in the clear."""
        if not self._compared_hidden:
            return b""
        alike = exchange.once(lambda: request_digest(ask, numbers=False), ask, request_digest)
        return sha256(alike + b"".join(self._values.origin(source.held).request for source in held)).digest()

    def given(self, ask: m.Compute, exchange: SharedWork) -> "TaskInput":
        """The input that a task would get."""
        from ..engine import Streams, TaskInput

        params, _, choice, _ = self._given(ask, [], self._held_in(ask), exchange)
        reads = {name: memory[0] for name in getattr(ask.task.task, "reads", ()) if (memory := self._values.remembered(name)) is not None}
        return TaskInput(self._data(), params, reads, Streams(ask.seed, ask.round, self._client), choice)

    def add_up(self, ask: m.AddUp, exchange: SharedWork) -> m.Computed:
        """Add up the client's own parts of a sum."""
        addends = tuple(own for own in ask.addends if self._values.holds(own.held))
        if not addends:
            return m.Computed(False, ())
        total = self._values.open(m.Addends(None, (), addends), self._transforms, exchange)
        origins = [(own.part, self._values.origin(own.held)) for own in addends]
        compared = any(origin.is_compared(part) for part, origin in origins)
        self._values.drop(ask.held)
        self._ledger.derive(ask.held, "own", addends)
        rounds = rounds_of(*(origin.rounds for _, origin in origins))
        sources = [origin for _, origin in origins]
        made = Origin(
            UNTRACED, smallest(origin.size for origin in sources), compared, (), rounds, max(origin.spread for origin in sources),
            any(origin.failed for origin in sources), self._answered(ask, addends, exchange),
            merged(*(origin.models for origin in sources)),
            leaves=self._contract.derived("own", [(part, origin.leaves) for part, origin in origins]),
        )  # fmt: skip
        self._values.hold(ask.held, {"own": total}, made)
        return m.Computed(True, (m.Described("own", total.dtype.str, total.shape),))

    def _given(
        self, ask: m.Compute, sizes: list[int], held: list[m.HeldValue | m.OwnPart], exchange: SharedWork
    ) -> tuple[dict[str, Any], list[bytes], Choice, "Used"]:  # fmt: skip
        """The opened parameters, what each was computed from (empty where no sum binds to it), the client's choice, and digests of models.

        Appends the sizes of models among the parameters to `sizes`.
        """
        used, offered, chosen_models, alternatives = list[Sent](), list[tuple[Sent, ...]](), list[Sent](), 1
        sent = self._sent if self._traced else _untraced
        params: dict[str, Any] = {}
        several = isinstance(ask.which, m.Picks) and ask.which.several
        chosen: list[int] | None = None
        received: list[bytes] = []
        if isinstance(ask.which, m.Picks):
            chosen = list(ask.which.labels)
        elif isinstance(ask.which, m.HeldValue):
            own = np.asarray(self._values.value(ask.which))
            if own.dtype.kind not in "biu":
                raise RemoteError("bad-input")
            several, chosen = own.ndim > 0, [int(label) for label in np.ravel(own)]
        if self._traced:
            received = [exchange.once(lambda: request_digest(ask), ask)]
            received += [UNTRACED for source in held if isinstance(source, m.OwnPart) and not self._alone]
            received += [self._values.origin(source.held).received for source in held if isinstance(source, m.HeldValue)]
        for name, value in ask.params:
            if isinstance(value, m.HeldValue):
                params[name] = self._values.value(value)
                sizes.append(self._values.origin(value.held).size)  # a copy of an update, or a value computed from one, is as protected
                continue
            if isinstance(value, m.Addends):
                opened = [self._values.open(value, self._transforms, exchange)]
                params[name] = opened[0]
                used += sent([value], opened, exchange)
            elif isinstance(ask.which, m.HeldValue):
                if not value.values or chosen is None:
                    raise RemoteError("bad-input")
                picked = [value.values[label % len(value.values)] for label in chosen]  # refusing a short list would reveal the label
                opened = [self._values.open(addends, self._transforms, exchange) for addends in picked]
                params[name] = opened if several else opened[0]
                chosen_models += sent(picked, opened, exchange)
                alternatives = max(alternatives, len(value.values))
            else:
                opened = [self._values.open(addends, self._transforms, exchange) for addends in value.values]
                params[name] = opened
                offered.append(tuple(sent(value.values, opened, exchange)))
                alternatives = max(alternatives, len(value.values))
            sizes += [array.size for array in opened if array.size > 1]
        if chosen_models and self._named_by_choice:
            received[0] = chosen_name(received[0], (each.digest for each in chosen_models))
        models = Used((*used, *chosen_models), tuple(offered), alternatives)
        return params, received, None if chosen is None else tuple(chosen) if several else chosen[0], models

    def _sent(self, values: Iterable[m.Addends], arrays: Iterable[Array], exchange: SharedWork) -> list[Sent]:
        """Digests of what was sent."""
        return [
            Sent(exchange.once(partial(addends_digest, addends), addends, addends_digest), array.size)
            for addends, array in zip(values, arrays, strict=True)
        ]

    def _held_in(self, ask: m.Compute) -> list[m.HeldValue | m.OwnPart]:
        """The held values that go into a task."""
        held: list[m.HeldValue | m.OwnPart] = [ask.which] if isinstance(ask.which, m.HeldValue) else []
        for _, value in ask.params:
            if isinstance(value, m.HeldValue):
                held.append(value)
                continue
            for addends in (value,) if isinstance(value, m.Addends) else value.values:
                held += [own for own in addends.own if self._values.holds(own.held)]
        return held

    def _input(self, ask: m.Compute, models: list[Any], params: dict[str, Any], reads: Mapping[str, Array], choice: Choice) -> "TaskInput":
        from ..engine import Streams, TaskInput

        secret = b"" if ask.noise is None else self._entropy(32)
        data = self._data()
        if self._parts.alike:
            data = self._known_to(models, data)
        return TaskInput(data, params, reads, Streams(ask.seed, ask.round, self._client), choice, secret)

    def _known_to(self, models: list[Any], data: ClientData) -> ClientData:
        """`known_to`, kept for the next task, because engines cache by the data object."""
        if self._fitted is None or self._fitted[0] is not data or self._fitted[1] != models:
            self._fitted = (data, models, known_to(models, data))
        return self._fitted[2]
