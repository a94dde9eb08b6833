"""The meta-classifier of property inference: ridge regression from features of simulated clients to their shares of a property."""

from dataclasses import dataclass

import numpy as np

from ...errors import InputError
from ...types import Array, check_array
from ..evidence.learned_shares import eigen_of_centred
from .property_statements import FEWEST

__all__ = ["PENALTIES", "Fit", "fit", "infer_property"]

PENALTIES = 10.0 ** np.arange(-6, 4)


@dataclass(frozen=True, eq=False)
class Fit:
    """Shares are `middle` + (features − `centre`) · `direction`, (f,) both; `deviation` is the error of one client left out (rms)."""

    centre: Array
    direction: Array
    middle: float
    deviation: float

    def read(self, seen: Array) -> Array:
        """The shares (m,) of features (m, f). The reading of a mean of features is the mean of their readings."""
        return np.asarray((seen - self.centre) @ self.direction + self.middle)


def infer_property(seen: Array, made: Array, share: Array) -> Array:
    """Scores (m,), larger for clients likelier to have a property, from their features (m, f).

    `made` (k, f) are the features of simulated clients and `share` (k,) how much of the property each has: 0 or 1, or between. Ridge
    regression, the penalty by exact leave-one-out. Raises `InputError` for arrays that do not fit or are not finite.
    """
    seen = check_array("seen", np.asarray(seen, np.float64), ndim=2)
    if np.ndim(made) == 2 and seen.shape[1] != np.shape(made)[1]:
        raise InputError(f"infer_property: seen {seen.shape}, made {np.shape(made)}, share {np.shape(share)} do not fit")
    return fit(made, share).read(seen)


def fit(made: Array, share: Array) -> Fit:
    """The regression of `share` (k,) on features `made` (k, f), as `infer_property` uses it, with its errors."""
    made = check_array("made", np.asarray(made, np.float64), ndim=2)
    share = check_array("share", np.asarray(share, np.float64), ndim=1)
    if len(made) != len(share) or len(made) < FEWEST:
        raise InputError(f"infer_property: made {made.shape}, share {share.shape} do not fit")
    centre, middle = made.mean(axis=0), float(share.mean())
    known = made - centre
    values, vectors = eigen_of_centred(known)
    scale = max(float(values.sum()) / len(made), 1e-300)
    turned = vectors.T @ (share - middle)
    best, weights = np.inf, np.zeros(len(made))
    for penalty in PENALTIES * scale:
        shrunk = 1.0 / (values + penalty)
        dual = vectors @ (shrunk * turned)
        left = dual / ((vectors**2) @ shrunk)  # leave-one-out residuals of kernel ridge regression
        if (error := float(left @ left)) < best:
            best, weights = error, dual
    return Fit(centre, known.T @ weights, middle, float(np.sqrt(best / len(made))))
