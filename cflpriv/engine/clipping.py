"""Clipped sums of per-sample gradients by book-keeping: one backward pass to the outputs of the layers, and none per sample.

A layer's parameters get, from one sample, a gradient made of its input a and the gradient δ of its output. So the norm of every sample's
whole gradient follows from (a, δ) of all layers; then each layer adds up what its samples may contribute.

Source: Goodfellow 2015 (norms of linear layers), Bu et al. 2022 (book-keeping). For convolutions the per-sample gradient of one layer is
formed for a moment, which for their small kernels is cheaper than the Gram trick.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .convolutions import Form, patches

__all__ = ["COLUMNS", "ConvolutionRule", "GroupNormRule", "LayerGradients", "LinearRule", "Rule", "even"]


COLUMNS = 8
"""Rows that are summed are of a multiple of this many numbers."""


def even(rows: Tensor) -> Tensor:
    """Rows (C, B, n) with zeros up to a multiple of `COLUMNS`: a device sums a row in an order that depends on where its memory begins."""
    more = -rows.shape[2] % COLUMNS
    return functional.pad(rows, (0, more)) if more else rows


def _norms(rows: Tensor) -> Tensor:
    """The norms (C, B) of rows (C, B, n), in float64: in float32 a square of a small slope is zero, which beside large inputs is most of a
    gradient's norm. Forms no tensor of squares."""
    norms: Tensor = torch.linalg.vector_norm(even(rows), dim=2, dtype=torch.float64)
    return norms


class LayerGradients(Protocol):
    """The per-sample gradients of one layer, in whatever form is cheapest."""

    def squares(self) -> Tensor:
        """The squared norm of each sample's gradient, (clients, batch) float64."""
        ...

    def parts(self) -> list[Tensor]:
        """What the gradients are made of, (clients, batch, ...): with the same bits here, samples have the same gradients."""
        ...

    def total(self, factors: Tensor, lost: Tensor | None) -> list[Tensor]:
        """Σ factor × gradient over the batch, in float64, one new tensor (clients, *shape) a parameter; `factors` (clients, batch) float64.

        `lost` of that shape marks samples that contribute nothing whatever their numbers; their factors are 0. A factor of 0 alone would
        not do: products of finite numbers overflow too, and 0 · ∞ is no number. None where no sample is lost.
        """
        ...

    def merged(self, views: int) -> "LayerGradients":
        """The gradients of samples that are so many neighbouring rows of the batch each: their sums, computed before any norm is taken."""
        ...


class Rule(Protocol):
    """How a kind of layer makes per-sample gradients of its input and the gradient of its output."""

    def spread(self, before: Tensor, delta: Tensor, clients: int) -> LayerGradients: ...


@dataclass(frozen=True)
class LinearRule:
    """a (C, B, i), δ (C, B, o): the gradient of the (transposed) weight is a δᵀ, of norm |a| |δ|; of the bias δ."""

    bias: bool

    def spread(self, before: Tensor, delta: Tensor, clients: int) -> LayerGradients:
        return _Linear(before, delta, self.bias)


@dataclass(frozen=True, eq=False)
class _Linear:
    before: Tensor
    delta: Tensor
    bias: bool

    def squares(self) -> Tensor:
        inputs, deltas = _norms(self.before), _norms(self.delta)
        return (inputs.square() + float(self.bias)) * deltas.square()

    def parts(self) -> list[Tensor]:
        return [self.before, self.delta, self.squares()]

    def total(self, factors: Tensor, lost: Tensor | None) -> list[Tensor]:
        before, scaled = self.before.double(), self.delta * factors.unsqueeze(2)
        if lost is not None:
            before, scaled = before.masked_fill(lost.unsqueeze(2), 0.0), scaled.masked_fill_(lost.unsqueeze(2), 0.0)
        weight = torch.bmm(before.transpose(1, 2), scaled)
        return [weight, scaled.sum(1)] if self.bias else [weight]

    def merged(self, views: int) -> "LayerGradients":
        clients, rows = self.before.shape[:2]
        before, delta = (part.reshape(clients * (rows // views), views, -1) for part in (self.before, self.delta))
        made = [torch.bmm(before.transpose(1, 2), delta), *[delta.sum(1)] * self.bias]
        return _Whole([gradient.view(clients, rows // views, *gradient.shape[1:]) for gradient in made])


@dataclass(frozen=True, eq=False)
class _Whole:
    """Per-sample gradients as they are: tensors (clients, batch, *shape)."""

    gradients: Sequence[Tensor]

    def squares(self) -> Tensor:
        return torch.stack([_norms(gradient.flatten(2)).square() for gradient in self.gradients]).sum(0)

    def parts(self) -> list[Tensor]:
        return [*self.gradients, self.squares()]

    def total(self, factors: Tensor, lost: Tensor | None) -> list[Tensor]:
        gradients = [gradient.double() for gradient in self.gradients]
        if lost is not None:
            gradients = [gradient.masked_fill(lost.view(*lost.shape, *[1] * (gradient.dim() - 2)), 0.0) for gradient in gradients]
        return [torch.einsum("cb,cb...->c...", factors, gradient) for gradient in gradients]

    def merged(self, views: int) -> "LayerGradients":
        return _Whole([gradient.reshape(len(gradient), -1, views, *gradient.shape[2:]).sum(2) for gradient in self.gradients])


@dataclass(frozen=True)
class ConvolutionRule:
    """a (B, C·i, H, W), δ (B, C·o, h, w): each sample's gradient is δ times its unfolded patches."""

    form: Form
    bias: bool

    def spread(self, before: Tensor, delta: Tensor, clients: int) -> LayerGradients:
        batch, channels = before.shape[0], before.shape[1] // clients
        columns = patches(before.reshape(batch * clients, channels, *before.shape[2:]), self.form)  # (B·C, i·k·k, L)
        deltas = delta.reshape(len(columns), -1, columns.shape[2])  # (B·C, o, L)
        weight = torch.bmm(deltas, columns.transpose(1, 2)).view(batch, clients, -1, channels, *self.form.size).transpose(0, 1)
        if not self.bias:
            return _Whole([weight])
        return _Whole([weight, deltas.sum(2).view(batch, clients, -1).transpose(0, 1)])


@dataclass(frozen=True)
class GroupNormRule:
    """The gradients of scale and shift: δ times the normalised input, and δ, summed over the image."""

    groups: int
    eps: float

    def spread(self, before: Tensor, delta: Tensor, clients: int) -> LayerGradients:
        normal = functional.group_norm(before, clients * self.groups, None, None, self.eps)
        batch = before.shape[0]
        scale, shift = (delta * normal).flatten(2).sum(2), delta.flatten(2).sum(2)
        return _Whole([parameter.view(batch, clients, -1).transpose(0, 1) for parameter in (scale, shift)])
