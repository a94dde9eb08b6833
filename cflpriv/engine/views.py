"""Views of images: an image and public changes of it. A sample's gradient is that of the mean loss of its views.

Where gradients are clipped, the views' gradients are averaged before (De et al. 2022, "Unlocking high-accuracy differentially private image
classification through scale", augmentation multiplicity): a sample still contributes one vector of at most the clip norm, so its cost and
sensitivity are those without views. Deviation: the views are a fixed set, the same in every step, not drawn at random.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..errors import InputError, near

__all__ = ["SMALLEST", "VIEWS", "as_views", "check_views", "views_in", "with_views"]

SHIFT = 2
"""Pixels; what comes in has the values of the border."""
SMALLEST = 8
"""The least height and width of an image with views."""


def _mirrored(x: Tensor) -> Tensor:
    return x.flip(-1)


def _moved(x: Tensor, axis: int, pixels: int) -> Tensor:
    places = torch.arange(x.shape[axis], device=x.device).sub_(pixels).clamp_(0, x.shape[axis] - 1)
    return x.index_select(axis, places)


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "flip": (_mirrored,),
    "shift": tuple(partial(_moved, axis=axis, pixels=pixels) for axis in (-2, -1) for pixels in (-SHIFT, SHIFT)),
}
"""The changes of images (…, h, w) by name; with several names each change of one is combined with each of the others."""


def check_views(names: Sequence[str]) -> None:
    """Raises `InputError` for a name that is not known, or is there twice."""
    for name in names:
        if name not in VIEWS:
            raise InputError(f"training.augment: {name!r} is not known{near(name, list(VIEWS))}")
    if len(set(names)) < len(names):
        raise InputError(f"training.augment = {list(names)}: names a change twice")


def views_in(names: Sequence[str]) -> int:
    """How many views an image has, itself among them."""
    count = 1
    for name in names:
        count *= 1 + len(VIEWS[name])
    return count


def as_views(x: Tensor, names: Sequence[str]) -> Tensor:
    """Images (a, b, channels, h, w) as their views (a, b, views, channels, h, w), the image first."""
    views = [x]
    for name in names:
        views += [change(view) for view in views for change in VIEWS[name]]
    return torch.stack(views, dim=2)


def with_views(inputs: Tensor, labels: Tensor, names: Sequence[str], images: bool) -> tuple[Tensor, Tensor]:
    """A batch of several clients with all views of each sample as neighbouring rows, and their labels (C, B · views).

    `inputs` are (B, C, channels, h, w) where `images`, else (C, B, channels, h, w), as they return; `labels` are (C, B).
    """
    if not names:
        return inputs, labels
    views = as_views(inputs, names)
    rows = views.transpose(1, 2).flatten(0, 1) if images else views.flatten(1, 2)
    return rows, labels.repeat_interleave(views.shape[2], 1)
