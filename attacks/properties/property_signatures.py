"""Signatures as features of property inference. Sketches are public, so simulated clients are sketched too."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...federation.transforms import sketched
from ...randomness import stream
from ...types import Array
from ..adversary import AdversaryView
from ..compared.signature_inversion import rows_in
from ..figures.leakage import Prior

__all__ = ["Frame", "frame_of", "read", "sent_by"]

ANCHORS = 64


@dataclass(frozen=True, eq=False)
class Frame:
    """What signatures (m, p, d) are seen in: first vectors are turned `towards` (d,), spans measured along `anchors` (a, d)."""

    towards: Array
    anchors: Array

    def features(self, rows: Array) -> Array:
        """Features (m, d + a): the first vector, its product with `towards` positive, and what the span holds of each anchor."""
        first = rows[:, 0] * np.where(rows[:, 0] @ self.towards < 0, -1.0, 1.0)[:, None]
        return np.concatenate([first, ((rows @ self.anchors.T) ** 2).sum(axis=1)], axis=1)


def read(view: AdversaryView, prior: Prior) -> dict[int, Array]:
    """The signatures (p, d) of a view as they were sent, sketched or not; (1, d) of second moments."""
    return rows_in(view, _size(view, prior))


def _size(view: AdversaryView, prior: Prior) -> int:
    """How long vectors are when they leave: that of a sample, or of its sketch, where they are sketched."""
    size = int(np.prod(prior.shape))
    if prior.private and prior.config is not None and prior.config.privacy.sketch_dim:
        size = min(size, prior.config.privacy.sketch_dim)
    if prior.moments:
        size = size * (size + 1) // 2
    return min(size, view.protection.sketch_dim) if "sketch" in view.protection.gram else size


def sent_by(view: AdversaryView, prior: Prior, data: Sequence[tuple[Array, Array]]) -> Array | None:
    """What clients with `data` would have sent in this view's run, (m, p, d); None where the public pipeline cannot be imitated."""
    rows = prior.simulate(data)
    return None if rows is None else sketched(0, view.protection.sketch_dim if "sketch" in view.protection.gram else None)(rows)


def frame_of(view: AdversaryView, prior: Prior) -> Frame | None:
    """Pixels are turned to a positive sum and measured along auxiliary samples; sketches towards that of these, and along their axes."""
    size = int(np.prod(prior.shape))
    if _size(view, prior) == size and not prior.moments:
        chosen = stream(prior.seed, "property_inference: anchors").permutation(len(prior.x))[:ANCHORS]
        flat = prior.x[chosen].reshape(len(chosen), -1).astype(np.float64)
        return Frame(np.ones(size), flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12))
    rows = sent_by(view, prior, [(prior.x, prior.y)])
    return None if rows is None else Frame(rows[0, 0], np.eye(rows.shape[-1]))
