"""IFCA, where the data are: choosing the model of lowest loss, working on from it, serving it; and which coordinates all share.

Source: Ghosh et al. 2020 (NeurIPS), Algorithm 2, lines 6 to 11, sections 4.3 and 6; deviations are listed in `ifca`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from ...engine import Device, Later, LaterTask, Result, RunNow, Task, TaskInput
from ...engine.device import in_use
from ...engine.seam import is_many
from ...errors import InputError
from ...privacy.settings import Noise
from ...types import Array, Parts

__all__ = [
    "ALL_BUT_LAST", "LOSS_COPIES", "LOSS_UNIT", "EvaluateLowest", "Layout", "PickAndTrain", "WithoutWork", "joined", "parted",
    "shared_spans",
]  # fmt: skip

Spans = tuple[tuple[int, int], ...]
Layout = tuple[tuple[str, tuple[int, ...], int], ...]

ALL_BUT_LAST = "all_but_last"
"""In place of prefixes: every layer but the last is shared, the paper's choice for FEMNIST."""
LOSS_UNIT = 8.0
"""Mean losses are sent in units of 8 nats, so that a secure sum that clips at 1 holds them."""
LOSS_COPIES = 8
"""The smallest vector that a rotation takes."""


@dataclass(frozen=True)
class PickAndTrain:
    """Choose the model with the lowest training loss from the list "model" and compute `then` at it; a single "model" is taken as it is.

    With `shared` spans, "model" holds only the other coordinates and "shared" (given once) those. Parts: "step", the part `part` of `then`
    without the shared coordinates; "shared", these (only with spans); "choice" (); "loss" (`LOSS_COPIES`,), the mean training loss of the
    model chosen, in units of `LOSS_UNIT`.
    """

    losses: Task
    then: Task
    part: str
    shared: Spans = ()

    chooses: ClassVar[str] = "choice"

    def private(self, noise: Noise) -> "PickAndTrain":
        """The same with a noisy choice and noisy local work, where these have private forms. The loss has none."""
        losses, then = (task.private(noise) if hasattr(task, "private") else task for task in (self.losses, self.then))
        return replace(self, losses=losses, then=then)

    @property
    def events(self) -> dict[str, Any]:
        return {**getattr(self.losses, "events", {}), **getattr(self.then, "events", {})}

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        """A step is as private as the local work and the choice of where it was done."""
        choice, work = getattr(self.losses, "covers", {}), getattr(self.then, "covers", {})
        if "choice" not in choice:
            return {}
        both = {name: (*choice["choice"], *events) for name, events in work.items()}
        step = {name: both[self.part] for name in ("step", "shared") if self.part in both}
        return {"choice": choice["choice"], **step, **{name: both[name] for name in self.keeps if name in both}}

    @property
    def parts(self) -> Parts:
        parts: Parts = {"step": "summed", "choice": "choice", "loss": "measure"}
        return {**parts, "shared": "summed"} if self.shared else parts

    @property
    def keeps(self) -> tuple[str, ...]:
        return self.then.keeps

    def run(self, task_input: TaskInput) -> Result:
        (whole,) = whole_models([task_input], self.shared)
        (picked,) = self._pick([whole], [self.losses.run(whole)])
        return self._result(picked, self.then.run(picked[0]))

    def cost(self, task_input: TaskInput) -> int:
        return self.then.cost(task_input) if is_many(self.then) else 1

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.then.chunk_size(task_input, device) if is_many(self.then) else 1

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        whole = whole_models(inputs, self.shared)
        losses, _ = many(self.losses, whole, device)
        picked = self._pick(whole, losses)
        results, path = many(self.then, [task_input for task_input, _, _ in picked], device)
        return [self._result(choice, result) for choice, result in zip(picked, results, strict=True)], path

    @property
    def large_bytes(self) -> int:
        return int(getattr(self.then, "large_bytes", 0))

    def later(self, inputs: Sequence[TaskInput], run: RunNow) -> list[tuple[Result, TaskInput]] | None:
        """The choices now, and the local work, at the chosen model alone, later."""
        if not isinstance(self.then, LaterTask):
            return None
        whole = whole_models(inputs, self.shared)
        losses = run(self.losses, whole)
        picked = self._pick(whole, losses)
        waiting = self.then.later([task_input for task_input, _, _ in picked], run)
        if waiting is None:
            return None
        declared = []
        for sent, lowest, choice, (result, _) in zip(inputs, losses, picked, waiting, strict=True):
            models = sent.params["model"]
            taken = models[int(lowest["choice"])] if isinstance(models, list) else sent.array("model")
            declared.append((self._result(choice, result), replace(sent, params={**sent.params, "model": [taken]}, choice=(choice[1],))))
        return declared

    def _pick(self, inputs: Sequence[TaskInput], losses: Sequence[Result]) -> list[tuple[TaskInput, int, float]]:
        picked = []
        for task_input, result in zip(inputs, losses, strict=True):
            at = int(result["choice"])  # ĵ = argmin_j F_i(θ_j)  (Alg. 2, l. 6)
            among = task_input.choice  # the models that it was sent, where it was not sent all
            chosen = at if among is None else among[at] if isinstance(among, tuple) else among
            models = task_input.params["model"]
            if not isinstance(chosen, int) or not isinstance(models, list):
                raise TypeError("PickAndTrain: expected one choice of a list of models")
            picked.append((replace(task_input, params={"model": models[at]}), chosen, float(result["losses"][at])))
        return picked

    def _result(self, picked: tuple[TaskInput, int, float], result: Result) -> Result:
        if not result:  # its training diverged: it takes no part
            return {}
        _, chosen, loss = picked
        kept = {name: result[name] for name in self.keeps}
        common = {**kept, "choice": np.array(chosen), "loss": np.full(LOSS_COPIES, loss / LOSS_UNIT)}
        if not self.shared:
            return {**common, "step": result[self.part]}
        step = result[self.part]
        if isinstance(step, Later):
            length = sum(stop - start for start, stop in self.shared)
            return {**common, "step": Later((step.shape[0] - length,), step.dtype), "shared": Later((length,), step.dtype)}
        joint, own = parted(np.asarray(step), self.shared)
        return {**common, "step": own, "shared": joint}


@dataclass(frozen=True)
class EvaluateLowest:
    """Evaluate the one of the list "model" with the lowest loss, on the client's own training data or on its labelled test data.

    With `shared` spans, "model" holds only the other coordinates and "shared" those. Parts: those of `evaluate`, and "choice" ().
    """

    losses: Task
    evaluate: Task
    by: Literal["train", "test"] = "train"
    shared: Spans = ()

    @property
    def parts(self) -> Parts:
        return {**self.evaluate.parts, "choice": "choice"}

    keeps: ClassVar[tuple[str, ...]] = ()

    def used(self, task_input: TaskInput) -> Array:
        """The model (d,) that the client uses."""
        return self.offered(task_input)[int(self.run(task_input)["choice"])]

    def offered(self, task_input: TaskInput) -> list[Array]:
        """The whole models (d,) that the client picks from."""
        return self._models([task_input])[0]

    def _models(self, inputs: Sequence[TaskInput]) -> list[list[Array]]:
        """Each client's list of whole models."""
        if not all(isinstance(task_input.params["model"], list) for task_input in inputs):
            raise TypeError("parameter 'model': EvaluateLowest takes a list of models")
        return [task_input.params["model"] for task_input in whole_models(inputs, self.shared)]  # type: ignore[misc]

    def run(self, task_input: TaskInput) -> Result:
        return self.run_many([task_input], in_use())[0][0]

    def cost(self, task_input: TaskInput) -> int:
        return self.losses.cost(task_input) if is_many(self.losses) else 1

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.losses.chunk_size(task_input, device) if is_many(self.losses) else 1

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        models = self._models(inputs)
        if self.by == "test":
            return self._by_test(inputs, models, device)
        losses, _ = many(
            self.losses, [replace(task_input, params={"model": own}) for task_input, own in zip(inputs, models, strict=True)], device
        )
        at = [int(result["choice"]) for result in losses]
        results, path = self._at(inputs, [own[i] for own, i in zip(models, at, strict=True)], device)
        return [{**result, "choice": np.array(i)} for result, i in zip(results, at, strict=True)], path

    def _by_test(self, inputs: Sequence[TaskInput], models: Sequence[list[Array]], device: Device) -> tuple[list[Result], str]:
        """Each client is evaluated on all of its models; the one of lowest loss counts."""
        flat = [(task_input, model) for task_input, own in zip(inputs, models, strict=True) for model in own]
        each, path = self._at([task_input for task_input, _ in flat], [model for _, model in flat], device)
        results, rest = [], iter(each)
        for own in models:
            evaluated = [next(rest) for _ in own]
            losses = np.array([float(result["loss"]) for result in evaluated])
            at = int(np.where(np.isnan(losses), np.inf, losses).argmin())
            results.append({**evaluated[at], "choice": np.array(at)})
        return results, path

    def _at(self, inputs: Sequence[TaskInput], models: Sequence[Array], device: Device) -> tuple[list[Result], str]:
        return many(
            self.evaluate, [replace(task_input, params={"model": model}) for task_input, model in zip(inputs, models, strict=True)], device
        )


def many(task: Task, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
    """The results of a task for some clients, together where it can, and the way taken."""
    return task.run_many(inputs, device) if is_many(task) else ([task.run(task_input) for task_input in inputs], "sequential")


def whole_models(inputs: Sequence[TaskInput], shared: Spans) -> list[TaskInput]:
    """The inputs with a list of whole models; clients that were sent the same pieces get the same arrays."""
    made: dict[tuple[int, int], Array] = {}
    whole = []
    for task_input in inputs:
        sent = task_input.params["model"]
        models = [np.asarray(vector) for vector in sent] if isinstance(sent, list) else [task_input.array("model")]
        if shared:
            joint = task_input.array("shared")
            for model in models:
                if (id(joint), id(model)) not in made:
                    made[id(joint), id(model)] = joined(joint, model, shared)
            models = [made[id(joint), id(model)] for model in models]
        whole.append(replace(task_input, params={"model": models}))
    return whole


def shared_spans(layout: Layout, shared: Sequence[str]) -> Spans:
    """The coordinates (start, stop) of the parameters whose names begin with one of the prefixes, by whole names between dots.

    `ALL_BUT_LAST` stands for the prefixes of all layers but the last. Raises `InputError` for a prefix that names nothing, or if nothing
    is left to cluster.
    """
    prefixes = list(shared)
    if ALL_BUT_LAST in prefixes:
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _, _ in layout))
        prefixes = [span for span in prefixes if span != ALL_BUT_LAST] + layers[:-1]
    hits = {prefix: [name for name, _, _ in layout if name == prefix or name.startswith(prefix + ".")] for prefix in prefixes}
    for prefix, names in hits.items():
        if not names:
            raise InputError(f"algorithm.shared: {prefix!r} names no parameter; there are {', '.join(name for name, _, _ in layout)}")
    chosen = {name for names in hits.values() for name in names}
    if len(chosen) == len(layout):
        raise InputError(f"algorithm.shared: {list(shared)} names every parameter; leave something to cluster")
    spans: list[tuple[int, int]] = []
    for name, shape, offset in layout:
        stop = offset + int(np.prod(shape, dtype=int))
        if name in chosen:
            if spans and spans[-1][1] == offset:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((offset, stop))
    return tuple(spans)


def parted(vector: Array, shared: Spans) -> tuple[Array, Array]:
    """A vector as (shared coordinates, the others)."""
    mask = _mask(len(vector), shared)
    return vector[mask], vector[~mask]


def joined(joint: Array, own: Array, shared: Spans) -> Array:
    """The whole vector again."""
    mask = _mask(len(joint) + len(own), shared)
    whole = np.empty(len(mask), dtype=own.dtype)
    whole[mask], whole[~mask] = joint, own
    return whole


def _mask(dimension: int, shared: Spans) -> Array:
    mask = np.zeros(dimension, dtype=bool)
    for start, stop in shared:
        mask[start:stop] = True
    return mask


@dataclass(frozen=True)
class WithoutWork:
    """No local work: only the estimate is wanted. Part: "nothing", zeros like the model."""

    parts: ClassVar[Parts] = {"nothing": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        return {"nothing": np.zeros_like(task_input.array("model"))}
