"""What training minimises: the cross-entropy of classes, or the squared or absolute error of a number."""

from typing import Literal

from torch import Tensor
from torch.nn import functional

from ..types import Loss

__all__ = ["Reduction", "loss_of"]

Reduction = Literal["none", "sum", "mean"]


def loss_of(loss: Loss, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
    """The loss of outputs against targets (n,): of each sample (n,), its sum, or its mean.

    For "cross_entropy" the outputs (n, classes) are scores and the targets int64 classes; for the others the outputs are (n, 1) and the
    targets are numbers.
    """
    if loss == "cross_entropy":
        return functional.cross_entropy(outputs, targets, reduction=reduction)
    error = functional.mse_loss if loss == "squared" else functional.l1_loss
    return error(outputs.squeeze(1), targets.to(outputs.dtype), reduction=reduction)
