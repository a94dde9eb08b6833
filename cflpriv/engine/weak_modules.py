"""Modules that run and learn little or nothing, or whose scores the first batch decides for ever."""

from collections.abc import Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from ..types import Loss
from .losses import loss_of
from .pass_traces import operations_below

__all__ = ["what_is_learned"]

STEPPED = {"Round": "round()", "Floor": "floor()", "Ceil": "ceil()", "Trunc": "trunc()", "Sign": "sign()"}
"""Operations without a slope: no gradient passes them."""
MOVED, TIMES = 0.1, 30.0
"""Parameters begin at exact zeros in places: they are moved by noise of this deviation; and they are multiplied, to see what grows."""
DRAWS, DRAWN = 40, 1.0
"""A narrow network may be dead with some parameters: so many others are tried, moved by noise of this deviation."""
BOUND = 1.0
SAMPLES = 10
FEW = 2
"""A module with gradients for fewer numbers than this for each class learns nothing but a scale, or offsets."""


def what_is_learned(
    module: nn.Module, x: Tensor, classes: int, loss: Loss, restored: Sequence[str], *, doubted: bool
) -> tuple[str, tuple[str, ...]]:  # fmt: skip
    """Why a module cannot be trained, or "", and doubts, by passes over samples `x` with other parameters. The module stays as it is.

    Args:
        restored: attributes that passes change.
        doubted: whether there are doubts already, which explain others.
    """
    some = x[:SAMPLES]
    if restored and _first_batch(module, some):
        return f"attribute {restored[0]!r} is set by the first batch, and scores depend on it; compute it in each pass", ()
    try:
        problem, doubts = _learned(module, some, classes, loss)
        return problem, () if doubted else (*doubts, *_bounded(module, some, loss))
    except Exception:  # parameters other than those of the factory may be impossible
        return "", ()


def _first_batch(module: nn.Module, x: Tensor) -> bool:
    """Whether the scores of the samples `x` (10 or more) depend on the batch that a fresh module saw first."""
    fresh, used = deepcopy(module).eval(), deepcopy(module).eval()
    with torch.no_grad():
        torch.default_generator.manual_seed(1)
        expected = fresh(x[:5].clone())
        used(x[5:10].clone())
        torch.default_generator.manual_seed(1)
        return not torch.allclose(expected, used(x[:5].clone()), rtol=1e-4, atol=1e-5, equal_nan=True)


def _moved(module: nn.Module, times: float = 1.0, draw: int = 0) -> nn.Module:
    """A copy with other parameters: multiplied, and moved by noise, much of it from the second draw on."""
    copied = deepcopy(module).train()
    draws, deviation = torch.Generator().manual_seed(draw), DRAWN if draw else MOVED
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=draws)
                parameter.add_((deviation * noise).to(parameter.dtype)).mul_(times)
    return copied


def _reached(module: nn.Module, x: Tensor, classes: int, loss: Loss) -> tuple[dict[str, Tensor | None], Tensor]:
    """The gradient of each trained parameter over the samples, None for one without a part in the loss, and the scores."""
    names, parameters = zip(*((name, p) for name, p in module.named_parameters() if p.requires_grad), strict=True)
    torch.default_generator.manual_seed(1)
    scores = module(x.clone())
    gradients = torch.autograd.grad(loss_of(loss, scores, torch.arange(len(x)) % classes), parameters, allow_unused=True)
    return dict(zip(names, gradients, strict=True)), scores


def _learned(module: nn.Module, x: Tensor, classes: int, loss: Loss) -> tuple[str, tuple[str, ...]]:
    """Why a module learns nothing, or "", and doubts where only a part of it learns. It stays as it is."""
    for draw in range(DRAWS):
        gradients, scores = _reached(_moved(module, draw=draw), x, classes, loss)
        sizes = {name: parameter.numel() for name, parameter in module.named_parameters() if parameter.numel() and name in gradients}
        moving = [name for name in sizes if (gradient := gradients[name]) is not None and bool(gradient.count_nonzero())]
        stepped = [STEPPED[name] for name in operations_below(scores) if name in STEPPED]
        if moving or stepped:
            break
    if not moving:
        why = f"its scores come out of {stepped[0]}, which has no slope" if stepped else "its scores are constant, or behind a step"
        return f"the gradients of all its parameters are 0, for made-up samples and other parameters: {why}", ()
    still = [name for name in sizes if name not in moving and gradients[name] is not None]
    if stepped and still:
        some = ", ".join(map(repr, still[:3])) + (", …" if len(still) > 3 else "")
        return "", (
            f"the gradient of {some} is 0 behind {stepped[0]}, so that it is never trained; let the gradient pass straight through",
        )
    learned, whole = (
        sum(sizes[name] for name in moving),
        sum(p.numel() for p in module.parameters()) + sum(b.numel() for b in module.buffers()),
    )
    if learned < FEW * classes and whole > 10 * learned:
        some = ", ".join(map(repr, moving[:3]))
        hardly = f"only {learned} of its {whole:,} numbers ({some}) are reached by a gradient, so that it hardly learns"
        return "", (f"{hardly}; is a layer frozen, or is there a detach() in its forward pass?",)
    return "", ()


def _bounded(module: nn.Module, x: Tensor, loss: Loss) -> Iterator[str]:
    """A doubt, if scores stay within −1 and 1 however large the parameters are, as cosines do. The module stays as it is."""
    if loss != "cross_entropy":
        return
    with torch.no_grad():
        torch.default_generator.manual_seed(1)
        sizes = [float(_moved(module, times)(x.clone()).abs().max()) for times in (1.0, TIMES, TIMES**2)]
    if 0 < max(sizes) <= BOUND + 1e-4 and min(sizes) > BOUND / 20:
        yield (
            "its scores stay within -1 and 1 however large its parameters are, as cosines do, so that the loss cannot become small; "
            "multiply them by a scale, such as 16"
        )
