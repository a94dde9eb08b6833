"""Per-sample clipping against `vmap(grad)` and Opacus (hooks, ghost clipping), what noise costs, and accountants against their peers.

One client of 500 samples and an MLP, as in the measured prototype; one intra-op thread. Accountants price `STEPS`, each time with slightly
other noise, so that nothing is remembered. Ratios above 1 mean that ours is quicker.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from cflpriv.engine import Engine
from cflpriv.engine.models import Model
from cflpriv.privacy.settings import Noise
from cflpriv.protocols.accounting import Accountant, calibrate, epsilon_of
from cflpriv.protocols.events import SampledGaussianEvent
from cflpriv.tasks.training import Train

from .engine import LENET, clients, interleaved, row

__all__ = ["COMPARISONS"]

MODEL = Model("mlp", (1, 28, 28), 10, hidden=200)
SAMPLES, CLIP = 500, 1.0
STEPS = ((1.0, 0.01, 1000), (2.0, 0.1, 500), (0.8, 0.001, 20_000))
"""Noise multiplier, sampling rate, number."""
DELTA = 1e-5


def _ours(steps: int) -> tuple[Callable[[], Any], np.ndarray[Any, Any]]:
    """Full-batch steps of clipped gradients through the engine, and the sum of clipped gradients that one of them takes."""
    inputs = clients(MODEL, 1, SAMPLES)
    engine = Engine()
    task = Train(MODEL, epochs=steps, batch_size=0, lr=1e-6, clip_norm=CLIP, sampling_rate=1.0)
    step = Train(MODEL, epochs=1, batch_size=0, lr=1.0, clip_norm=CLIP, sampling_rate=1.0)
    total = -np.asarray(engine.run(step, inputs)[0]["update"]) * SAMPLES
    return lambda: engine.run(task, inputs), total


def _given() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    client = clients(MODEL, 1, SAMPLES)[0]
    return MODEL.load(client.array("model"), training=True), MODEL.inputs(client.data.x_train), torch.from_numpy(client.data.y_train)


def _clipped(each: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.asarray((each * (CLIP / each.norm(dim=1).clamp_min(CLIP)).unsqueeze(1)).sum(dim=0).detach().numpy())


def against_vmap() -> dict[str, Any]:
    """A step with every sample's gradient formed by vmap(grad), clipped and added up."""
    torch.set_num_threads(1)
    steps = 20
    ours, total = _ours(steps)
    module, x, y = _given()
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(module, parameters, (sample.unsqueeze(0),)), label.unsqueeze(0))

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def theirs() -> np.ndarray[Any, Any]:
        made = each(weights, x, y)
        return _clipped(torch.cat([made[name].flatten(1) for name in weights], dim=1))

    return _row(ours, theirs, total, steps, 20.0, 60.0, "vmap(grad)")


def against_opacus() -> dict[str, Any]:
    """A step with Opacus' hooks (GradSampleModule), clipped and added up."""
    from opacus import GradSampleModule

    torch.set_num_threads(1)
    steps = 20
    ours, total = _ours(steps)
    plain, x, y = _given()
    module: Any = GradSampleModule(plain, loss_reduction="sum")

    def theirs() -> np.ndarray[Any, Any]:
        module.zero_grad()
        functional.cross_entropy(module(x), y, reduction="sum").backward()
        return _clipped(torch.cat([parameter.grad_sample.flatten(1) for parameter in module.parameters()], dim=1))

    return _row(ours, theirs, total, steps, 10.0, 40.0, "Opacus GradSampleModule")


def against_opacus_ghost(model: Model, batch: int, floor: float = 3.0) -> dict[str, Any]:
    """An epoch of clipped SGD with Opacus' ghost clipping: norms by one backward pass, and the clipped sum by a second one."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    inputs = clients(model, 4, SAMPLES // batch * batch)
    task, engine = Train(model, lr=0.05, batch_size=batch, clip_norm=CLIP), Engine()
    given = [(model.inputs(each.data.x_train), torch.from_numpy(each.data.y_train), task.batches(each)) for each in inputs]

    def theirs() -> list[np.ndarray[Any, Any]]:
        ended = []
        for each, (x, y, batches) in zip(inputs, given, strict=True):
            plain = model.load(each.array("model"), training=True)
            module: Any = GradSampleModuleFastGradientClipping(plain, max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction="sum")
            optimiser = torch.optim.SGD(module.parameters(), lr=task.lr)
            for rows in batches:
                optimiser.zero_grad()
                losses = functional.cross_entropy(module(x[rows]), y[rows], reduction="none")
                losses.sum().backward(retain_graph=True)
                factors = module.get_clipping_coef()
                optimiser.zero_grad()
                module.disable_hooks()
                (factors * losses).sum().div(len(rows)).backward()
                module.enable_hooks()
                optimiser.step()
            ended.append(np.concatenate([parameter.detach().flatten().numpy() for parameter in module.parameters()]))
        return ended

    made = [each.array("model") + np.asarray(result["update"]) for each, result in zip(inputs, engine.run(task, inputs), strict=True)]
    error = max(float(np.abs(one - other).max()) for one, other in zip(made, theirs(), strict=True))
    note = f"{model.name}, 4 clients × {len(given[0][1])}, batch {batch}; largest difference of parameters {error:.0e}"
    return row(interleaved(lambda: engine.run(task, inputs), theirs), floor, 4.0, "Opacus ghost clipping", note)


def _row(
    ours: Callable[[], Any], theirs: Callable[[], Any], total: np.ndarray[Any, Any], steps: int, floor: float, stretch: float, name: str
) -> dict[str, Any]:
    other = theirs()
    error = float(np.abs(other - total).max() / np.abs(other).max())
    note = f"1 client × {SAMPLES}, MLP 784-200-10, full batch, per step; largest difference {error:.0e} of the largest value"
    return row(interleaved(ours, theirs, repeats=3, scale=steps), floor, stretch, name, note)


def price_of_clipping() -> dict[str, Any]:
    """Plain steps against clipped ones of the engine: what per-sample clipping adds (1 is nothing)."""
    torch.set_num_threads(1)
    inputs = clients(MODEL, 10, SAMPLES)
    engine = Engine()
    plain = Train(MODEL, epochs=1, batch_size=50, lr=0.01)
    clipped = Train(MODEL, epochs=1, batch_size=50, lr=0.01, clip_norm=CLIP)
    ratios = interleaved(lambda: engine.run(clipped, inputs), lambda: engine.run(plain, inputs))
    return row(ratios, 0.4, 1.0, "the same without clipping", "10 clients × 500, MLP 784-200-10, batch 50")


def price_of_noise() -> dict[str, Any]:
    """Clipped steps against noisy ones: what cryptographic Gaussian noise adds (1 is nothing)."""
    from dataclasses import replace

    torch.set_num_threads(1)
    plain_inputs = clients(MODEL, 10, SAMPLES)
    inputs = [replace(task_input, secret=bytes([i]) * 32) for i, task_input in enumerate(plain_inputs)]
    engine = Engine()
    clipped = Train(MODEL, epochs=1, batch_size=50, lr=0.01, clip_norm=CLIP, sampling_rate=0.1)
    noisy = Train(MODEL, epochs=1, batch_size=50, lr=0.01).private(Noise("add_remove", 1.0, 1.0, 0.0, CLIP, 0.1, SAMPLES, 0, 4.0, 0))
    ratios = interleaved(lambda: engine.run(noisy, inputs), lambda: engine.run(clipped, plain_inputs))
    return row(ratios, 0.1, 0.5, "the same without noise", f"10 clients × 500, Poisson batches of 50, d = {MODEL.dimension}")


def _priced(accountant: Accountant, peer: Callable[[float, float, int], float]) -> tuple[list[float], str]:
    """Ratios of an accountant against a peer, each pricing all of `STEPS`, and how far apart the two are."""
    numbers = iter(range(1, 1000))
    costs: list[list[float]] = [[], []]

    def steps() -> list[tuple[float, float, int]]:
        other = 1 + 1e-9 * next(numbers)
        return [(z * other, q, count) for z, q, count in STEPS]

    def ours() -> None:
        costs[0] = [epsilon_of([SampledGaussianEvent(*step, 1.0, "add_remove")], DELTA, accountant) for step in steps()]

    def theirs() -> None:
        costs[1] = [peer(*step) for step in steps()]

    ratios = interleaved(ours, theirs)
    apart = max(abs(one / other - 1) for one, other in zip(*costs, strict=True))
    return ratios, f"{len(STEPS)} kinds of steps; ε differs by at most {apart:.1%}".replace("%", " %")


def _composed(made: Callable[[], Any]) -> Callable[[float, float, int], float]:
    """The price of sampled steps by one of dp-accounting's accountants."""
    from dp_accounting import dp_event

    def priced(z: float, q: float, steps: int) -> float:
        accountant = made()
        accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), steps)
        return float(accountant.get_epsilon(DELTA))

    return priced


def renyi_accounting() -> dict[str, Any]:
    """Rényi divergences against dp-accounting's."""
    from dp_accounting.rdp import rdp_privacy_accountant

    ratios, note = _priced("rdp", _composed(rdp_privacy_accountant.RdpAccountant))
    return row(ratios, 1.0, 10.0, "dp-accounting, Rényi", note)


def random_variables(accountant: Accountant) -> dict[str, Any]:
    """An accountant against privacy random variables of Opacus."""
    from opacus.accountants import PRVAccountant

    def theirs(z: float, q: float, steps: int) -> float:
        peer = PRVAccountant()
        peer.history = [(z, q, steps)]
        return float(peer.get_epsilon(DELTA))

    warnings.filterwarnings("ignore", message="Optimal order is")
    ratios, note = _priced(accountant, theirs)
    return row(ratios, 0.9 if accountant == "prv" else 1.0, 1.0, "Opacus, PRV", note)


def distributions() -> dict[str, Any]:
    """Privacy-loss distributions against dp-accounting's, whose spacing is always 1e-4."""
    from dp_accounting.pld import pld_privacy_accountant

    ratios, note = _priced("pld", _composed(pld_privacy_accountant.PLDAccountant))
    return row(ratios, 1.0, 10.0, "dp-accounting, distributions", note)


def calibration(epsilon: float) -> dict[str, Any]:
    """Noise for an ε against Opacus' search with its PRV accountant, by the noise that each finds."""
    from opacus.accountants.utils import get_noise_multiplier

    numbers, noise = iter(range(1, 1000)), [0.0, 0.0]

    def ours() -> None:
        target = epsilon * (1 + 1e-9 * next(numbers))
        noise[0] = calibrate(lambda z: [SampledGaussianEvent(z, 0.1, 100, 1.0, "add_remove")], target, DELTA)

    def theirs() -> None:
        noise[1] = get_noise_multiplier(target_epsilon=epsilon, target_delta=DELTA, sample_rate=0.1, steps=100, accountant="prv")

    warnings.filterwarnings("ignore", message="Optimal order is")
    ratios = interleaved(ours, theirs, repeats=3)
    return row(
        ratios, 1.0, 3.0, "Opacus, get_noise_multiplier", f"100 steps at rate 0.1, ε = {epsilon:g}; noise {noise[0]:.4g} and {noise[1]:.4g}"
    )


COMPARISONS: dict[str, Callable[[], dict[str, Any]]] = {
    "clipped gradients, vmap": against_vmap,
    "clipped gradients, Opacus": against_opacus,
    "clipped steps, batch 50, Opacus ghost": lambda: against_opacus_ghost(MODEL, 50),
    "clipped steps, full batch, Opacus ghost": lambda: against_opacus_ghost(MODEL, SAMPLES, 0.8),
    "clipped steps of LeNet-5, batch 50, Opacus ghost": lambda: against_opacus_ghost(LENET, 50),
    "price of clipping": price_of_clipping,
    "price of noise": price_of_noise,
    "accounting, Rényi": renyi_accounting,
    "accounting, PRV": lambda: random_variables("prv"),
    "accounting, exact, against PRV": lambda: random_variables("pld"),
    "accounting, exact, against distributions": distributions,
    "accounting, calibration at ε = 1": lambda: calibration(1.0),
}
"""Name of a row -> what measures it."""
