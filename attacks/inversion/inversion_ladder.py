"""The inversion ladder: images from the update of a network's first linear layer, by the strongest method that fits.

| rung | fits | gives |
|---|---|---|
| closed form (`closed_form`) | one sample; the network begins with a linear layer with bias | the image, exactly |
| SPEAR (`spear`) | 2 to 20 samples in one batch (above 8: 12 units each); ReLU behind it | the images, exactly; it says which pass |
| feature decoder (`feature_decoder`) | the same behind convolutions, ReLU and pooling | an image from exact features and auxiliary images |
| position vectors (`patch_positions`) | one sample; a vision transformer with learned position vectors | the image, exactly |
| gradient matching from it (`gradient_matching`) | the same after one step, samples of equal weight | an image nearer to the whole update |

Where none fits, the optimisation of `gradient_inversion` is left: smooth networks with one to four samples. Updates with weight decay fit
for one step only; noisy ones do not fit. No rung needs labels.
"""

from collections.abc import Sequence

import numpy as np
from torch import nn

from ...engine.models import Model
from ...types import Array
from ..figures.leakage import Budget
from .closed_form import LinearLayer, first_linear, gradients_of, images_from_inputs, input_from_gradients, layers_of
from .feature_decoder import decode_features
from .gradient_matching import labels_of_inputs, matched_images
from .patch_positions import images_by_positions
from .spear import CONSISTENT, MOST_DRAWN, MOST_SAMPLES, UNITS_PER_SAMPLE, inputs_of_batch

__all__ = ["CLOSED_FORM", "DECODER", "MATCHING", "SPEAR", "fitting_layer", "images_by_layer", "most_matched", "most_samples"]

CLOSED_FORM, SPEAR, DECODER, MATCHING = "closed form", "SPEAR", "feature decoder", "feature decoder, then gradient matching"
PASSED = 0.25
"""Features of several steps are decoded at the model this far on the way: they are a mean weighted by gradients, the largest of which are
the first."""
MOST_MATCHED, MOST_MATCHED_PARAMETERS = 32, 500_000
"""So many images of updates at once are improved by gradient matching, in networks of up to so many parameters: it costs most."""
MATCHING_SECONDS, MATCHING_SECONDS_PER_PARAMETER, MATCHING_SHARE = 0.08, 1.5e-6, 1 / 15
"""Processor time of matching an image, about (batches of 4, LeNet-5 and a CNN); and the share of an audit's seconds that matching takes."""
SEARCHES, SEARCHES_OF_LARGE = (9,) * 8, (12, 12)
"""Searches of SPEAR, each from the beginning, in batches of up to `MOST_DRAWN` and of more samples.

A search may keep to false columns, and then does so however long it is: of a batch of six in single precision .185 failed, with 9 searches
as with 24. So a new beginning serves where more searches do not.
"""
CONTENT = 3
"""Beginnings after which inputs that count as recovered suffice; before, all units must agree."""
MOST_RESIDUAL = 0.5
"""Above this relative residual a layer's update is not that of one sample."""
MOST_BEFORE = 1_000_000
"""Networks with more parameters before their first linear layer are left to the optimisation: auxiliary features cost too much."""


def fitting_layer(model: Model, part: int = 0) -> LinearLayer | None:
    """The layer whose update the ladder reads, of those from place `part` of the parameters on; None for a network that is left to the
    optimisation.

    Networks that are smooth before their first linear layer are: there the optimisation is exact, and a decoder is not.
    """
    layer = first_linear(model, part)
    if layer is None or layer.weight > MOST_BEFORE:
        return None
    inner = [module for before in layers_of(model)[: layer.place] for module in before.modules()]
    kinked = any(isinstance(module, nn.ReLU | nn.MaxPool2d) for module in inner)
    return layer if layer.is_first or kinked else None


def most_samples(layer: LinearLayer | None) -> int:
    """The largest batch that the ladder reads: 0, 1, or 8 to 20."""
    if layer is None or not layer.is_rectified:
        return int(layer is not None)
    return min(MOST_SAMPLES, max(MOST_DRAWN, layer.outputs // UNITS_PER_SAMPLE))


def most_matched(model: Model, budget: Budget) -> int:
    """How many images of one run gradient matching improves within a budget. It is counted, not timed, so that audits repeat."""
    seconds = MATCHING_SECONDS + MATCHING_SECONDS_PER_PARAMETER * model.dimension
    return min(MOST_MATCHED, 1 + int(MATCHING_SHARE * budget.seconds / budget.seeds / seconds))


def images_by_layer(
    model: Model, layer: LinearLayer | None, starts: Array, updates: Array, count: int, x: Array, rng: np.random.Generator, *,
    steps: int = 1, lr: float = 1.0, weight_decay: float = 0.0, is_mean: bool = True, matches: int = MOST_MATCHED,
) -> list[tuple[Array, str] | None]:  # fmt: skip
    """For each of `updates` (m, d) of models `starts` (m, d): images (count, *shape) in [0, 1] and the name of the rung, or None.

    An update is that of `steps` full-batch steps of SGD. `x` (k, *shape) are auxiliary samples. Images that SPEAR does not recover are
    their mean. None where no rung fits. Without a `layer` single samples are read from position vectors. `is_mean`: an update is that of
    the mean loss of its samples, not of a weighted one. `matches`: how many images gradient matching may improve, in whole updates; of one
    update at least, unless it is 0.
    """
    if layer is None and count == 1:
        return images_by_positions(model, starts, updates, steps=steps, lr=lr, weight_decay=weight_decay)
    if layer is None or count > most_samples(layer) or (weight_decay and steps > 1):
        return [None] * len(updates)
    moved = updates + lr * weight_decay * starts
    inputs = [_inputs(layer, start, update, count, rng, steps) for start, update in zip(starts, moved, strict=True)]
    mean = x.mean(axis=0, dtype=np.float64)
    name = DECODER if not layer.is_first else CLOSED_FORM if count == 1 else SPEAR
    results: list[tuple[Array, str] | None] = [None] * len(updates)
    passed = starts + PASSED * updates if steps > 1 else starts
    for places in _alike(passed, [i for i, rows in enumerate(inputs) if len(rows)]):
        rows = np.concatenate([inputs[i] for i in places])
        images = images_from_inputs(model, rows) if layer.is_first else decode_features(model, passed[places[0]], layer, rows, x)
        for i, part in zip(places, np.split(images, np.cumsum([len(inputs[i]) for i in places])[:-1]), strict=True):
            results[i] = np.concatenate([part, np.repeat(mean[None], count - len(part), axis=0)]), name
    if matches > 0 and steps == 1 and is_mean and name == DECODER and model.dimension <= MOST_MATCHED_PARAMETERS:
        whole = [i for i, rows in enumerate(inputs) if len(rows) == count][: max(1, matches // count)]
        if whole:
            labels = [labels_of_inputs(model, starts[i], layer, -moved[i], inputs[i]) for i in whole]
            decoded = [result[0] for i in whole if (result := results[i]) is not None]
            for i, images in zip(whole, matched_images(model, starts[whole], moved[whole], labels, decoded, lr, x), strict=True):
                results[i] = images, MATCHING
    return results


def _inputs(layer: LinearLayer, start: Array, update: Array, count: int, rng: np.random.Generator, steps: int) -> Array:
    """The inputs (k, n) of the layer, k ≤ count, that an update (d,) gives."""
    weight, bias = gradients_of(layer, update)
    none = np.zeros((0, layer.inputs))
    if not bias.any():
        return none
    if count == 1:
        image, residual = input_from_gradients(weight, bias)
        return image[None] if residual <= MOST_RESIDUAL else none
    ends = [start] if steps == 1 else [start, start + update]
    models = [gradients_of(layer, state) for state in ends]
    first, *others = SEARCHES if count <= MOST_DRAWN else SEARCHES_OF_LARGE
    best = inputs_of_batch(weight, bias, models, count, rng, searches=first)
    for number, searches in enumerate(others, 1):
        if best.consistency >= (1.0 if number < CONTENT else CONSISTENT):
            break
        again = inputs_of_batch(weight, bias, models, count, rng, searches=searches)
        best = again if again.agreement.sum() > best.agreement.sum() else best
    return best.inputs[best.agreement >= CONSISTENT]


def _alike(models: Array, places: Sequence[int]) -> list[list[int]]:
    """Those `places` together whose models are the same."""
    groups: dict[bytes, list[int]] = {}
    for i in places:
        groups.setdefault(models[i].tobytes(), []).append(i)
    return list(groups.values())
