"""Gradient inversions and shadow models as rows of one tensor program against the same one after the other.

The reference network of gradient inversion on random images, float64, one intra-op thread; a trial is one inversion of 40 iterations.
All is compared by processor time, pair by pair: other programs on the machine then matter less.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cflpriv.attacks.inversion.image_search import LocalSteps, invert_updates, unroll
from cflpriv.attacks.membership.membership_shadows import federated_replicas
from cflpriv.engine import Engine
from cflpriv.engine.models import Model
from cflpriv.tasks.training import Train

from .engine import clients, row

__all__ = ["COMPARISONS"]

TRIALS, ITERATIONS, PAIRS = 32, 40, 3
STEPS = LocalSteps()


def inversions(size: int) -> dict[str, Any]:
    """Inversions at once against a loop over them, each with `torch.optim.LBFGS` on a gradient by plain autograd."""
    torch.set_num_threads(1)
    rng, model = np.random.default_rng(0), Model("sigmoid_lenet", (1, size, size), 10, dtype="float64")
    x, y = rng.random((TRIALS, 1, 1, size, size)), rng.integers(0, 10, (TRIALS, 1))
    starts = np.repeat(model.init(0)[None], TRIALS, axis=0)
    updates = unroll(model, STEPS)(torch.tensor(starts), torch.tensor(x), torch.tensor(y)).detach().numpy()
    module = model.load(starts[0])
    weights = list(module.parameters())

    def ours() -> float:
        _, left = invert_updates(model, starts, updates, y, STEPS, np.random.default_rng(1), iterations=ITERATIONS)
        return float(np.median(left))

    def alone(update: np.ndarray[Any, Any], label: torch.Tensor, image: torch.Tensor) -> float:
        target, image = -torch.tensor(update), image.requires_grad_(True)
        search = torch.optim.LBFGS([image], max_iter=ITERATIONS, history_size=50, line_search_fn="strong_wolfe", tolerance_change=0)

        def closure() -> float:
            search.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(image), label)
            made = torch.autograd.grad(loss, weights, create_graph=True)
            apart = (torch.cat([part.flatten() for part in made]) - target).square().sum() / target.square().sum()
            apart.backward(inputs=[image])
            return float(apart.detach())

        search.step(closure)
        return float(closure())

    def theirs() -> float:
        begin = torch.tensor(np.random.default_rng(1).random((TRIALS, 1, 1, size, size)))
        return float(np.median([alone(updates[i], torch.tensor(y[i]), begin[i]) for i in range(TRIALS)]))

    a, b = ours(), theirs()
    pairs = [(1 / processor_time(ours)) * processor_time(theirs) for _ in range(PAIRS)]
    return row(pairs, 2.0, 3.4, "plain loop", f"processor time; median distance left {a:.1e} against {b:.1e}")


def processor_time(work: Callable[[], object]) -> float:
    """Seconds that this process computed."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def shadows() -> dict[str, Any]:
    """Sixteen shadow models of 100 samples as clients of one stacked program against one after the other."""
    train = Train(Model("mlp", (64,), 10, hidden=32), epochs=10, batch_size=10, lr=0.1)
    inputs = clients(train.model, 16, 100)
    return replicas_against_loop(lambda engine: engine.run(train, inputs), "16 models × 100 samples, batch 10")


def shadow_federations() -> dict[str, Any]:
    """Eight replicas of a federation of ten clients, two rounds, in one stacked program against one client after the other."""
    rng, train = np.random.default_rng(0), Train(Model("mlp", (64,), 10, hidden=16), epochs=2, batch_size=10, lr=0.1)
    data = [(rng.random((70, 64), dtype=np.float32), rng.integers(10, size=70)) for _ in range(80)]
    rosters = [dict(enumerate(data[10 * s : 10 * s + 10])) for s in range(8)]
    chain = [(number, range(10)) for number in range(2)]
    start = train.model.init(0)
    scale = "8 federations of 10 clients × 70 samples, batch 10"
    return replicas_against_loop(lambda engine: federated_replicas(train.at, start, chain, rosters, 0, engine=engine), scale)


def replicas_against_loop(train: Callable[[Engine], object], scale: str) -> dict[str, Any]:
    engine, plain = Engine(), Engine("sequential")
    train(engine)
    pairs = [(1 / processor_time(lambda: train(engine))) * processor_time(lambda: train(plain)) for _ in range(PAIRS)]
    return row(pairs, 2.0, 3.4, "plain loop", f"processor time; {scale}, {'+'.join(sorted({path for _, path in engine.paths}))}")


COMPARISONS: dict[str, Callable[[], dict[str, Any]]] = {
    "gradient inversion, 32 of 28×28": lambda: inversions(28),
    "gradient inversion, 32 of 8×8": lambda: inversions(8),
    "16 shadow models": shadows,
    "8 shadow federations": shadow_federations,
}
