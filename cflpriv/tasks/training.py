"""Training tasks: train a model, take its gradient, or initialise another."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count as counting
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from ..engine import Deferred, Device, Later, Result, RunNow, TaskInput, fast
from ..engine.clipped_sums import LARGEST_BLOCK, block_size
from ..engine.device import cpu_in_use, tensor, using
from ..engine.losses import loss_of
from ..engine.memory import resident_samples
from ..engine.models import Model, dtype_of
from ..engine.own_modules import slopes
from ..engine.sgd import Local, Options, to_prototypes
from ..engine.span import Movement
from ..engine.step_noise import keys_of, noise_place, normals
from ..engine.views import SMALLEST, VIEWS, check_views, views_in, with_views
from ..errors import InputError, TrainingDiverged
from ..keys import Key, check_ranges, readable
from ..privacy.settings import Noise, secret_key
from ..protocols.entropy import derive, uniforms
from ..protocols.events import Event, Relation, training_event
from ..protocols.mechanisms import snap, spacing
from ..types import Array, Parts

__all__ = [
    "Augment", "BatchSize", "Epochs", "Gradient", "LearningRate", "LearningRateDecay", "Momentum", "OnDivergence", "Optimizer", "Start",
    "Train", "WeightDecay", "listening",
]  # fmt: skip

NEGLIGIBLE = 1e-30
"""An update no longer than this is left as it is: a factor that makes it longer would not be finite in float32."""
ROUNDED = 1e-2
"""Rounding of the public part of a step may take at most so much of what one sample moves; on average it takes far less."""

Epochs = Annotated[int, Key("Passes over a client's data in one local training.", "[1, inf)", "epochs")]
BatchSize = Annotated[
    int, Key("Samples of a batch; 0: all. Under sample-level privacy the expected size; left out there: all.", "[0, inf)", "samples")
]
LearningRate = Annotated[float, Key("Learning rate of a local step; left out under sample-level privacy: by a rule.", "(0, inf)")]
LearningRateDecay = Annotated[float, Key("Factor that multiplies the learning rate once a round.", "(0, 1]")]
Momentum = Annotated[float, Key("Momentum of SGD; it starts at zero in every local training.", "[0, 1)")]
WeightDecay = Annotated[float, Key("L2 weight decay, added to the gradient.", "[0, inf)")]
OnDivergence = Annotated[
    Literal["stop", "skip"],
    Key(
        "When a client's parameters are not finite: end the run (`stop`), or leave the client out of the round (`skip`). Under a "
        "protection the client adds zeros, and only a simulation ends."
    ),
]
Augment = Annotated[
    tuple[str, ...],
    Key(
        "Views of an image: itself, mirrored (`flip`), moved by 2 pixels in four directions (`shift`). Their gradients are averaged, "
        "before clipping where there is any. They cost time, and no privacy.",
        known=lambda: VIEWS,
    ),
]
Optimizer = Annotated[Literal["sgd", "adam"], Key("Optimiser of local training; `adam` takes no momentum.")]
Amount = Annotated[float, Key("A part of the step; 0: none.", "[0, inf)")]
Count = Annotated[int, Key("A number of clients or samples; 0: none.", "[0, inf)")]


@readable
@dataclass(frozen=True)
class Train:
    """Local SGD from the given "model": `epochs` passes in batches of `batch_size` (0: the full batch), fresh momentum each time.

    Parts: "update" (d,), local minus given; "count" (), the number of samples. Kept by the client: "trained" (d,), the local model.

    v ← momentum·v + g + weight_decay·θ + prox·(θ − anchor) + correction;  θ ← θ − lr·v. The anchor is the given "anchor" (FedProx, Ditto,
    StoCFL's bi-level step), else the given model; the correction is the given "correction", else zero (SCAFFOLD's c − c_i). With `maml_lr`
    above 0, batches are used in pairs: g is taken at θ − maml_lr·g′, g′ being the gradient on the first of the pair (first-order MAML).
    With `clip_norm` above 0 each sample's gradient is scaled down to that norm before averaging. With `sampling_rate` q above 0 batches
    are Poisson: round(epochs / q) steps, each with every sample independently with probability q, sums divided by q·n (DP-SGD, less noise).
    With `allocated` each epoch has 1/q batches instead, and each sample is in one of them, drawn evenly (`protocols.allocation`).
    With `noise_multiplier` z above 0 (the private form, see `private`) each sum of clipped gradients gets Gaussian noise of z·clip_norm and
    is divided by q·`public_samples`; batches and noise come from the client's cryptographic source. Source: Abadi et al. 2016,
    Algorithm 1. Deviations: the divisor is public; norms are taken in float64, whatever the model's dtype.
    With `shares` above 0 (noise that clients share) a training is one such step without the noise: the update of a client is
    −lr·(Σ clipped gradients)/(q·public_samples) and what is public (weight decay, the anchor's pull); one sample moves it by `moves`.
    With `pull` above 0 each sample's loss has pull·‖f − C_y‖²/e more: f (e,) is what the last linear layer takes, C_y the row of the
    sample's class in the given "prototypes" (classes, e), where a row of NaN pulls nothing (FedProto).
    With `optimizer` "adam" the step is `torch.optim.Adam`'s (its betas and epsilon, L2 weight decay) on g + prox·(θ − anchor) + correction,
    with fresh moments each time; it takes no momentum. Noise is added before, so a private training costs the same.
    With `update_norm` above 0 "update" is scaled to that length, up or down (a zero update stays zero); "trained" is not. A contribution
    that is clipped to the same norm afterwards costs what it would cost at any length up to the norm, and has the most signal for it.
    With `augment` a sample's loss is the mean over its `engine.views`, so their gradients are averaged before clipping.
    `frozen` names parameters, by prefix, that stay as given. `lr_decay` multiplies the rate once a round. A client whose parameters do not
    stay finite ends the run (`TrainingDiverged`), or with `on_divergence = "skip"` takes no part in the round.
    """

    model: Model
    epochs: Epochs = 1
    batch_size: BatchSize = 10
    lr: LearningRate = 0.01
    momentum: Momentum = 0.0
    weight_decay: WeightDecay = 0.0
    lr_decay: LearningRateDecay = 1.0
    prox: Amount = 0.0
    maml_lr: Amount = 0.0
    clip_norm: Amount = 0.0
    sampling_rate: Annotated[float, Key("Share of the samples in a Poisson batch; 0: shuffled batches.", "[0, 1]")] = 0.0
    frozen: tuple[str, ...] = ()
    on_divergence: OnDivergence = "stop"
    pull: Amount = 0.0
    noise_multiplier: Amount = 0.0
    public_samples: Count = 0
    relation: Relation = "add_remove"
    shares: Count = 0
    optimizer: Optimizer = "sgd"
    update_norm: Amount = 0.0
    augment: Augment = ()
    allocated: bool = False

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "training")
        if self.optimizer == "adam" and self.momentum:
            raise InputError(f"training.momentum: {self.momentum} with optimizer = 'adam', which has its own moments; leave it out")
        if self.frozen and len(set(self._frozen())) == 1:
            which = "every parameter" if all(self._frozen()) else "none of the parameters"
            names = ", ".join(name for name, _, _ in self.model.layout)
            raise InputError(f"training.frozen: {self.frozen} are prefixes of {which} of the model ({names})")
        if self.pull and self.clip_norm:
            raise InputError(f"training.pull: {self.pull} with clip_norm = {self.clip_norm}: per-sample gradients know no prototypes")
        check_views(self.augment)
        if self.augment:
            if len(self.model.shape) != 3 or min(self.model.shape[1:]) < SMALLEST:
                raise InputError(
                    f"training.augment = {list(self.augment)}: views are of images of at least {SMALLEST}×{SMALLEST}, and samples have "
                    f"shape {self.model.shape}; leave it out"
                )
            if self.pull:
                raise InputError(f"training.augment = {list(self.augment)} with pull = {self.pull}: features of views know no prototypes")
        if self.noise_multiplier and not (self.clip_norm and self.sampling_rate and self.public_samples):
            raise InputError(
                f"training.noise_multiplier: {self.noise_multiplier} needs clip_norm, sampling_rate and public_samples above 0 "
                f"({self.clip_norm}, {self.sampling_rate}, {self.public_samples})"
            )
        if self.allocated and (
            self.shares or not self.noise_multiplier or abs(round(1 / self.sampling_rate) * self.sampling_rate - 1) > 1e-9
        ):
            raise InputError(
                f"training.allocated: needs noise_multiplier above 0, a whole 1 / sampling_rate and shares = 0 ({self.noise_multiplier}, "
                f"{self.sampling_rate}, {self.shares})"
            )
        if self.shares:
            alone = ("noise_multiplier", "clip_norm", "sampling_rate", "public_samples")
            missing = [name for name in alone if not getattr(self, name)]
            if missing:
                raise InputError(f"training.shares: {self.shares} needs {', '.join(alone)} above 0")
            for name, setting, plain in (("training.optimizer", self.optimizer, "sgd"), ("algorithm.alpha", self.maml_lr, 0.0)):
                if setting != plain:
                    raise InputError(
                        f"{name}: {setting!r} with noise that clients share (privacy.noise = 'shared'): it is one plain step "
                        f"whose noise comes later; use {plain!r}, or privacy.noise = 'per_client'"
                    )

    parts: ClassVar[Parts] = {"update": "summed", "count": "measure"}
    keeps: ClassVar[tuple[str, ...]] = ("trained",)

    def at(self, round: int) -> "Train":
        """This task with the learning rate of `round`."""
        return replace(self, lr=self.lr * self.lr_decay ** max(0, round), lr_decay=1.0) if self.lr_decay != 1.0 else self

    def private(self, noise: Noise) -> "Train":
        """This training with per-sample clipping, Poisson batches and noise.

        Guarantee: "update" and what the client keeps are as private as `events` states, towards all who see them.
        Reveals: the update up to the noise; not "count", which has no private form.
        """
        if not noise.training:
            return self
        return replace(
            self, clip_norm=noise.clip_norm, sampling_rate=noise.sampling_rate, noise_multiplier=noise.training,
            public_samples=noise.samples, relation=noise.relation, shares=noise.shares,
            allocated=noise.allocated,
        )  # fmt: skip

    @property
    def events(self) -> dict[str, Event]:
        """What a private training costs: its noisy steps."""
        if not self.noise_multiplier:
            return {}
        bound = self.moves if self.shares else self.clip_norm
        event = training_event(self.noise_multiplier, self.sampling_rate, self.steps, bound, self.relation, self.shares, self.allocated)
        return {"steps": event}

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        """Which events cover which results."""
        if not self.noise_multiplier:
            return {}
        return {"update": ("steps",)} if self.shares else {"update": ("steps",), "trained": ("steps",)}

    @property
    def steps(self) -> int:
        """The number of batches, Poisson or allocated."""
        return 1 if self.shares else max(1, round(self.epochs / self.sampling_rate))

    @property
    def moves(self) -> float:
        """By how much one sample moves a client's update of one step, at most."""
        return self.lr * self.clip_norm / (self.sampling_rate * self.public_samples)

    def batches(self, task_input: TaskInput) -> list[Array]:
        """The client's batches in order, as indices of its samples. `InputError` where they should go in pairs and there is none."""
        batches = self._batches(task_input)
        if self.maml_lr and len(batches) < 2:
            raise InputError(
                f"training.epochs = {self.epochs}: client {task_input.data.id} has 1 batch, which makes no pair for the inner step of MAML "
                f"(algorithm.alpha = {self.maml_lr}); 2 epochs at least, or smaller batches"
            )
        return batches

    def _batches(self, task_input: TaskInput) -> list[Array]:
        count = len(task_input.data.y_train)
        size = self.batch_size or count
        if self.noise_multiplier and self.allocated:
            places = uniforms(derive(secret_key(task_input), "batches"), self.epochs * count).reshape(self.epochs, count)
            numbers = np.floor(places * round(1 / self.sampling_rate))
            return [np.flatnonzero(row == batch) for row in numbers for batch in range(round(1 / self.sampling_rate))]
        if self.noise_multiplier:
            coins = uniforms(derive(secret_key(task_input), "batches"), self.steps * count).reshape(self.steps, count)
            return [np.flatnonzero(row < self.sampling_rate) for row in coins]
        draws = task_input.streams("batches")
        if self.sampling_rate:
            return [np.flatnonzero(draws.random(count) < self.sampling_rate) for _ in range(self.steps)]
        if size >= count:
            return [np.arange(count)] * self.epochs
        orders = [draws.permutation(count) for _ in range(self.epochs)]
        return [order[at : at + size] for order in orders for at in range(0, count, size)]

    def run(self, task_input: TaskInput) -> Result:
        with using(cpu_in_use()):  # the generators of devices are not keyed, and modules may draw
            moved = self._moved(task_input)
        return self._result(task_input, task_input.array("model"), self._stepped(task_input, moved) if self.shares else moved)

    def _stepped(self, task_input: TaskInput, summed: Array) -> Array:
        """The update (d,) of the one step along minus `summed` (d,), the sum of clipped gradients.

        It carries no noise yet. So numbers are cut off far below the largest of their dtype, and whether it is finite depends on what is
        public alone. Cutting coordinates off moves no two updates further apart; rounding does, by the size of the numbers. So the sum is
        never a difference of parameters, and a public part of a size that would tell is refused (`InputError`).
        """
        start = task_input.array("model")
        most = float(np.finfo(start.dtype).max) / (4 * start.size)
        public = self.weight_decay * start.astype(np.float64)
        if self.prox and "anchor" in task_input.params:
            public += self.prox * (start - task_input.array("anchor"))
        if "correction" in task_input.params:
            public += task_input.array("correction")
        sizes = [math.prod(shape) for _, shape, _ in self.model.layout]
        public[np.repeat(self._frozen(), sizes)] = 0.0
        with np.errstate(over="ignore"):
            rounding = float(np.finfo(start.dtype).eps) * math.sqrt(start.size) * self.lr * float(np.abs(public).max(initial=0.0))
            if rounding > ROUNDED * self.moves:
                raise InputError(
                    f"privacy.noise = 'shared': in {start.dtype} rounding of weight decay and pull takes {rounding:.3g}, where one sample "
                    f"moves an update by {self.moves:.3g}; use model.dtype = 'float64', or a larger privacy.clip_norm"
                )
            step = np.asarray(summed, dtype=np.float64) / (self.sampling_rate * self.public_samples) * self.lr
            return np.asarray(-np.clip(step, -most, most) - np.clip(self.lr * public, -most, most), dtype=start.dtype)

    def _moved(self, task_input: TaskInput) -> Array:
        """By how much the parameters (d,) move; with shares the sum of clipped gradients."""
        start = task_input.array("model")
        module = self.model.lent(start, training=True)
        parameters = list(module.parameters())
        velocities = [torch.zeros_like(parameter) for parameter in parameters] if self.momentum else []
        anchor = self._pieces(task_input, "anchor", start) if self.prox else None
        correction = None if self.shares else self._pieces(task_input, "correction", None)
        moving = [i for i, frozen in enumerate(self._frozen()) if not frozen]
        x, y = self.model.inputs(task_input.data.x_train), torch.from_numpy(task_input.data.y_train)

        seen: list[torch.Tensor] = []
        prototypes = torch.tensor(task_input.array("prototypes"), dtype=x.dtype) if self.pull else None

        def scored(batch: Array) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, labels = with_views(x[batch].unsqueeze(0), y[batch].unsqueeze(0), self.augment, images=False)
            return module(inputs.squeeze(0)), labels.squeeze(0)

        def gradients(batch: Array) -> list[torch.Tensor]:
            leaves = [parameters[i] for i in moving]
            divisor = self._expected(task_input) or len(batch)
            if not self.clip_norm:
                if len(batch) == 0:
                    return [torch.zeros_like(leaf) for leaf in leaves]
                loss = loss_of(self.model.loss, *scored(batch), "sum") / divisor / views_in(self.augment)
                if prototypes is not None:
                    loss = loss + self.pull * to_prototypes(seen.pop(), prototypes[y[batch]]).sum() / divisor
                return slopes(loss, leaves)
            total = [torch.zeros_like(leaf, dtype=torch.float64) for leaf in leaves]
            for i in batch:
                # by itself, in memory of its own: its gradient depends on no other sample, to the last bit (`engine.clipped_sums`)
                own = slopes(loss_of(self.model.loss, *scored(np.array([i]))), leaves)
                norm = torch.stack([gradient.double().square().sum() for gradient in own]).sum().sqrt()
                if not torch.isfinite(norm):
                    continue  # no norm bounds it, so it contributes nothing
                for sum_, gradient in zip(total, own, strict=True):
                    sum_.add_(gradient.double() * (self.clip_norm / norm.clamp_min(self.clip_norm)) / divisor)
            return total

        numbers = counting()

        def noisy(batch: Array) -> list[torch.Tensor]:
            plain = gradients(batch)
            if not self.noise_multiplier:
                return [gradient.to(x.dtype) for gradient in plain]
            whole = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
            for i, gradient in zip(moving, plain, strict=True):
                whole[i] = gradient
            noise = self.noise(task_input, next(numbers))
            made = snap(torch.cat([piece.reshape(-1) for piece in whole]).numpy() + noise, self._scale)
            pieces = torch.split(torch.from_numpy(made).to(x.dtype), [piece.numel() for piece in whole])
            return [pieces[i].view_as(whole[i]) for i in moving]

        batches = self.batches(task_input)
        stride = 2 if self.maml_lr else 1
        with torch.random.fork_rng(devices=[]):  # for modules that draw, such as dropout
            # private: by a secret seed, since with known masks one sample more would move the masks, and gradients, of all after it
            torch.default_generator.manual_seed(  # torch.manual_seed queues a traceback for every device that is not there
                int.from_bytes(derive(secret_key(task_input), "torch")[:8], "big")
                if self.noise_multiplier
                else int(task_input.streams("torch").integers(2**63))
            )
            if self.shares:
                whole = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
                for i, gradient in zip(moving, gradients(batches[0]), strict=True):
                    whole[i] = gradient
                return torch.cat([piece.reshape(-1) for piece in whole]).numpy()
            with listening(module, seen) if self.pull else nullcontext():
                self._steps(batches, stride, parameters, moving, velocities, anchor, correction, noisy)
        return np.asarray(self.model.store(module) - start)

    def _steps(
        self, batches: Sequence[Array], stride: int, parameters: Sequence[torch.Tensor], moving: list[int], velocities: list[torch.Tensor],
        anchor: list[torch.Tensor] | None, correction: list[torch.Tensor] | None, gradients: Callable[[Array], list[torch.Tensor]],
    ) -> None:  # fmt: skip
        """The plain loop: one batch (or, with MAML, pair of batches) after the other."""
        adam = None
        if self.optimizer == "adam":
            adam = torch.optim.Adam([parameters[i] for i in moving], self.lr, weight_decay=self.weight_decay)
        for at in range(0, len(batches) - stride + 1, stride):
            gradient = gradients(batches[at])
            with torch.no_grad():
                if self.maml_lr:
                    here = [parameters[i].clone() for i in moving]
                    for i, inner in zip(moving, gradient, strict=True):
                        parameters[i].sub_(inner, alpha=self.maml_lr)
                    with torch.enable_grad():
                        gradient = gradients(batches[at + 1])
                    for i, before in zip(moving, here, strict=True):
                        parameters[i].copy_(before)
                for i, step in zip(moving, gradient, strict=True):
                    if self.weight_decay and adam is None:
                        step = step.add(parameters[i], alpha=self.weight_decay)
                    if anchor is not None:
                        step = step + self.prox * (parameters[i] - anchor[i])
                    if correction is not None:
                        step = step + correction[i]
                    if adam is not None:
                        parameters[i].grad = step
                        continue
                    parameters[i].sub_(velocities[i].mul_(self.momentum).add_(step) if velocities else step, alpha=self.lr)
                if adam is not None:
                    adam.step()
                    adam.zero_grad()

    @property
    def large_bytes(self) -> int:
        return _vector_of(self.model).nbytes

    def laid_out(self, task_input: TaskInput) -> Result | None:
        """The layout of the result for all data. None for a model of another size: a trial tells what is wrong."""
        vector = _vector_of(self.model)
        if task_input.array("model").shape != vector.shape:
            return None
        return {"update": vector, "count": np.array(0.0), "trained": vector}

    def later(self, inputs: Sequence[TaskInput], run: RunNow) -> list[tuple[Result, TaskInput]] | None:
        """None where clients that diverge have no result, and where updates are small because they are in the span of the samples."""
        counts, vector = [len(task_input.data.y_train) for task_input in inputs], _vector_of(self.model)
        if self.on_divergence == "skip" or self.shares or any(task_input.array("model").dtype.str != vector.dtype for task_input in inputs):
            return None
        if any(fast.may_span(self.model, count, self.batch_size, self._options) for count in set(counts)):
            return None
        return [
            ({"update": vector, "count": np.array(float(count)), "trained": vector}, task_input)
            for count, task_input in zip(counts, inputs, strict=True)
        ]

    def cost(self, task_input: TaskInput) -> int:
        return self.epochs * len(task_input.data.y_train)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        count = len(task_input.data.y_train)
        batch = self.batch_size or count
        if self.sampling_rate and device.kind == "cuda":
            batch = self._longest(count)
        return fast.chunk_size(self.model, batch, count, self._options, device)

    def stands_alone(self, task_input: TaskInput, device: Device) -> bool:
        """Whether a client's results have the same bits beside any other clients."""
        return fast.stands_alone(self.model, self.batch_size, len(task_input.data.y_train), self._options, device)

    def _longest(self, count: int) -> int:
        """How many of `count` samples a Poisson batch hardly ever exceeds; 0 for batches of a fixed size."""
        return min(count, math.ceil(self.sampling_rate * count + 6 * math.sqrt(self.sampling_rate * count)))

    @property
    def _options(self) -> Options:
        scale = self._scale if self._noisy else 0.0
        return Options(
            self.lr, self.momentum, self.weight_decay, self.prox, self.maml_lr, self.clip_norm, tuple(self._frozen()), self.pull,
            self.optimizer, scale, spacing(scale) if scale else 0.0, loss=self.model.loss, block=self._block, augment=self.augment,
        )  # fmt: skip

    @property
    def _block(self) -> int:
        """Samples that are computed together where gradients are clipped; of public numbers alone."""
        views = views_in(self.augment)
        if self.noise_multiplier:
            return block_size(self.sampling_rate * self.public_samples, self.sampling_rate, views)
        return block_size(self.batch_size or LARGEST_BLOCK, views=views)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        samples = resident_samples(self.model, [task_input.data for task_input in inputs], device)
        if self._noisy:
            device = replace(device, noise=noise_place(device))
        results: list[Result] = []
        paths: dict[str, None] = {}
        before: Callable[[], list[Result]] = list
        for pairs in fast.in_turns(list(zip(inputs, samples, strict=True)), device):
            begun, path = self._begun(pairs, device)
            results += before()  # only now: the device has work again
            before, paths[path] = begun, None
        return results + before(), "+".join(paths)

    def _begun(
        self, pairs: Sequence[tuple[TaskInput, tuple[torch.Tensor, torch.Tensor]]], device: Device
    ) -> tuple[Callable[[], list[Result]], str]:
        """Begin the training of some inputs, each with its samples: what gives the results when it is called, and the way taken."""
        inputs = [task_input for task_input, _ in pairs]
        work = [self._local(task_input, x, y) for task_input, (x, y) in pairs]
        moved, path = (
            self._gradients(inputs, work, device) if self.shares else fast.train(self.model, work, self._options, self.epochs, device)
        )
        if moved is None:
            return lambda: [self.run(task_input) for task_input in inputs], "sequential"
        return lambda: [self._result(each, each.array("model"), update) for each, update in zip(inputs, moved(), strict=True)], path

    def _gradients(
        self, inputs: Sequence[TaskInput], work: Sequence[Local], device: Device
    ) -> tuple[Callable[[], Sequence[Array]] | None, str]:
        """As `fast.train`, of the one step along sums of clipped gradients."""
        options = Options(
            0.0, clip_norm=self.clip_norm, frozen=tuple(self._frozen()), loss=self.model.loss, block=self._block, augment=self.augment
        )
        summed, path = fast.gradients(self.model, work, options, device)
        if summed is None:
            return None, path
        stepped = [self._stepped(task_input, vector) for task_input, vector in zip(inputs, summed, strict=True)]
        return lambda: stepped, path

    def _local(self, task_input: TaskInput, x: torch.Tensor, y: torch.Tensor) -> Local:
        names = ("prototypes",) if self.shares else ("anchor", "correction", "prototypes")
        vectors = {name: task_input.array(name) for name in names if name in task_input.params}
        return Local(
            x,
            y,
            self.batches(task_input),
            task_input.array("model"),
            **vectors,
            expected=self._expected(task_input),
            longest=self._longest(len(y)),
            noise_key=self._noise_key(task_input) if self._noisy else b"",
            owner=task_input.data,
            model=self.model,
        )

    def _expected(self, task_input: TaskInput) -> float:
        """What sums of gradients are divided by; 0 for batches of a fixed size.

        The expected size of a Poisson batch, from the public number of samples where that is private; 1 where `_stepped` divides.
        """
        if self.shares:
            return 1.0
        return self.sampling_rate * (self.public_samples if self.noise_multiplier else len(task_input.data.y_train))

    @property
    def _noisy(self) -> bool:
        """Whether each step adds noise."""
        return self.noise_multiplier > 0 and not self.shares

    @property
    def _scale(self) -> float:
        """The standard deviation of a step's noise, which belongs to the mean of clipped gradients."""
        return self.noise_multiplier * self.clip_norm / (self.sampling_rate * self.public_samples)

    def _noise_key(self, task_input: TaskInput) -> bytes:
        """What the noise of all steps is made of (`engine.step_noise`): a key of this task alone, as its secret is fresh."""
        return derive(secret_key(task_input), "noise")

    def noise(self, task_input: TaskInput, at: int) -> Array:
        """The noise (d,) float64 of batch number `at`, from the client's cryptographic source."""
        keys = keys_of([self._noise_key(task_input)])
        return normals(keys, torch.tensor([at]), self.model.dimension, self._scale)[0].numpy()

    def _result(self, task_input: TaskInput, start: Array, update: Array | Movement) -> Result:
        # of an array, one pass: a sum of finite numbers that overflows has diverged as well
        if not (update.is_finite() if isinstance(update, Movement) else np.isfinite(update.sum())):
            if self.on_divergence == "skip":
                return {}
            raise TrainingDiverged(
                f"client {task_input.data.id}: training in round {task_input.streams.round} ended with parameters that are not finite; "
                f"lower training.lr (now {self.lr}), or set training.on_divergence = 'skip'"
            )
        return {"update": self.sent(update), "count": np.array(float(len(task_input.data.y_train))), "trained": Deferred(start, update)}

    def sent(self, update: Array | Movement) -> Array | Movement:
        """What leaves the client of an update or of a part of it: with `update_norm` of that length, up to rounding in its dtype."""
        if not self.update_norm:
            return update
        with np.errstate(over="ignore"):  # a longer update than float64 can square becomes zeros
            length = float(np.linalg.norm(np.asarray(update, dtype=np.float64)))
        factor = self.update_norm / length if length > NEGLIGIBLE else 1.0
        return update.scaled(factor) if isinstance(update, Movement) else np.asarray(update * factor, dtype=update.dtype)

    def _frozen(self) -> list[bool]:
        return [any(name.startswith(prefix) for prefix in self.frozen) for name, _, _ in self.model.layout]

    def _pieces(self, task_input: TaskInput, name: str, default: Array | None) -> list[torch.Tensor] | None:
        """A given vector (or the default) in the shapes of the parameters."""
        vector = task_input.array(name) if name in task_input.params else default
        if vector is None:
            return None
        if vector.shape != (self.model.dimension,):
            raise InputError(f"{name}: has shape {vector.shape}, expected ({self.model.dimension},)")
        whole = torch.tensor(vector, dtype=dtype_of(self.model.dtype))
        return [whole[offset : offset + int(np.prod(shape))].view(shape) for _, shape, offset in self.model.layout]


def _vector_of(model: Model) -> Later:
    return Later((model.dimension,), np.dtype(model.dtype).str)


@contextmanager
def listening(module: nn.Module, seen: list[torch.Tensor]) -> Iterator[None]:
    """While inside, what the module's last linear layer takes is appended to `seen` at every pass. `InputError` if there is none."""
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise InputError("the model has no linear layer, so there are no features before it (FedProto)")
    hook = linear[-1].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True)
class Start:
    """The initial model of a public seed, made by the client itself. Parts: "model" (d,)."""

    model: Model
    seed: int

    parts: ClassVar[Parts] = {"model": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def uses_data(self) -> bool:
        return False

    def run(self, task_input: TaskInput) -> Result:
        return {"model": self.model.init(self.seed)}


@dataclass(frozen=True)
class Gradient:
    """The gradient of the mean training loss at the given "model". Parts: "gradient" (d,), "count" ().

    One that is not finite ends the run (`TrainingDiverged`), or with `on_divergence = "skip"` its client takes no part.
    """

    model: Model
    on_divergence: Literal["stop", "skip"] = "stop"

    parts: ClassVar[Parts] = {"gradient": "summed", "count": "measure"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        module = self.model.lent(task_input.array("model"))
        x, y = self.model.inputs(task_input.data.x_train), tensor(task_input.data.y_train)
        gradients = slopes(loss_of(self.model.loss, module(x), y), list(module.parameters()))
        return self._result(task_input, torch.cat([gradient.reshape(-1) for gradient in gradients]).cpu().numpy())

    @property
    def large_bytes(self) -> int:
        return _vector_of(self.model).nbytes

    def later(self, inputs: Sequence[TaskInput], run: RunNow) -> list[tuple[Result, TaskInput]] | None:
        """None where clients that diverge have no result."""
        if self.on_divergence == "skip":
            return None
        vector = _vector_of(self.model)
        return [({"gradient": vector, "count": np.array(float(len(each.data.y_train)))}, each) for each in inputs]

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return fast.chunk_size(self.model, 0, len(task_input.data.y_train), Options(0.0), device)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        samples = resident_samples(self.model, [task_input.data for task_input in inputs], device)
        clients = [Local(x, y, [np.arange(len(y))], task_input.array("model")) for task_input, (x, y) in zip(inputs, samples, strict=True)]
        gradients, path = fast.gradients(self.model, clients, Options(0.0, loss=self.model.loss), device)
        if gradients is None:
            return [self.run(task_input) for task_input in inputs], "sequential"
        return [self._result(task_input, gradient) for task_input, gradient in zip(inputs, gradients, strict=True)], path

    def _result(self, task_input: TaskInput, gradient: Array) -> Result:
        if not np.isfinite(gradient).all():
            if self.on_divergence == "skip":
                return {}
            raise TrainingDiverged(f"client {task_input.data.id}: its gradient in round {task_input.streams.round} is not finite")
        return {"gradient": gradient, "count": np.array(float(len(task_input.data.y_train)))}
